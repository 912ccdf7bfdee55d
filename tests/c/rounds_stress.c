/* Threads as ranks over csrc/rounds.c and a small MPI of our own, for the sanitizers: a mean over all ranks, again and
 * again, by messages prepared each time or once, whole or in pieces that lie apart.
 *
 * The MPI: a communicator's handle is the rank that calls, plus one; a message is copied into a mailbox when it is sent
 * and taken out when its receive is tested, in the order of sending. Handles are int32_t or pointers, as compiled
 * (HANDLE_TYPE). Usage: PROGRAM RANKS CALLS. Exits with 1 on a wrong value or a message, a type or a request too many.
 */
#define _DEFAULT_SOURCE
#include "core.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef HANDLE_TYPE
#define HANDLE_TYPE int32_t
#endif

enum { MOST = 20, BLOCK = 6, TYPES = 1024, REQUESTS = 4096, BYTE = 77, NONE = 0 };

struct message {
    struct message *next;
    int source, target, tag, nbytes;
    char data[];
};

struct type {
    int used, count, lengths[4];
    intptr_t at[4];
};

struct request {
    int used, kept, active, sends, rank, peer, tag, type;
    char *buffer;
    int count;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct message *first, **last = &first;
static struct type types[TYPES];
static struct request requests[REQUESTS];
static int nranks, calls, failures;

static int find_free(int *used, size_t stride, int most)
{
    for (int i = 1; i < most; i++) {
        int *one = (int *)((char *)used + (size_t)i * stride);
        if (!*one) {
            *one = 1;
            return i;
        }
    }
    abort();
}

/* What a request moves: pieces of memory, one after the other. */
static int pieces_of(const struct request *r, char **at, int *lengths)
{
    if (r->type == BYTE) {
        at[0] = r->buffer;
        lengths[0] = r->count;
        return r->count > 0;
    }
    const struct type *t = &types[r->type];
    for (int i = 0; i < t->count; i++) {
        at[i] = (char *)t->at[i];
        lengths[i] = t->lengths[i];
    }
    return t->count;
}

static void send_now(const struct request *r)
{
    char *at[4];
    int lengths[4], pieces = pieces_of(r, at, lengths), nbytes = 0;
    for (int i = 0; i < pieces; i++)
        nbytes += lengths[i];
    struct message *m = malloc(sizeof *m + (size_t)nbytes);
    *m = (struct message){NULL, r->rank, r->peer, r->tag, nbytes};
    for (int i = 0, to = 0; i < pieces; to += lengths[i++])
        memcpy(m->data + to, at[i], (size_t)lengths[i]);
    *last = m;
    last = &m->next;
}

static int received(const struct request *r)
{
    for (struct message **link = &first; *link; link = &(*link)->next) {
        struct message *m = *link;
        if (m->source != r->peer || m->target != r->rank || m->tag != r->tag)
            continue;
        char *at[4];
        int lengths[4], pieces = pieces_of(r, at, lengths), from = 0;
        for (int i = 0; i < pieces; from += lengths[i++])
            memcpy(at[i], m->data + from, (size_t)lengths[i]);
        failures += from != m->nbytes;
        *link = m->next;
        if (last == &m->next)
            last = link;
        free(m);
        return 1;
    }
    return 0;
}

static int make(void *buffer, int count, HANDLE_TYPE type, int peer, int tag, HANDLE_TYPE comm, HANDLE_TYPE *out, int sends, int kept)
{
    if (peer < 0 || peer >= nranks)
        return 6; /* MPI_ERR_RANK */
    pthread_mutex_lock(&lock);
    int i = find_free(&requests[0].used, sizeof *requests, REQUESTS);
    requests[i] = (struct request){1, kept, !kept, sends, (int)comm - 1, peer, tag, (int)type, buffer, count};
    if (requests[i].type != BYTE)
        types[requests[i].type].used++;
    if (sends && !kept)
        send_now(&requests[i]);
    pthread_mutex_unlock(&lock);
    *out = (HANDLE_TYPE)i;
    return 0;
}

static void drop_type(int type)
{
    if (type != BYTE)
        types[type].used--;
}

static int isend(void *b, int n, HANDLE_TYPE t, int p, int tag, HANDLE_TYPE c, HANDLE_TYPE *r) { return make(b, n, t, p, tag, c, r, 1, 0); }
static int irecv(void *b, int n, HANDLE_TYPE t, int p, int tag, HANDLE_TYPE c, HANDLE_TYPE *r) { return make(b, n, t, p, tag, c, r, 0, 0); }
static int send_init(void *b, int n, HANDLE_TYPE t, int p, int tag, HANDLE_TYPE c, HANDLE_TYPE *r) { return make(b, n, t, p, tag, c, r, 1, 1); }
static int recv_init(void *b, int n, HANDLE_TYPE t, int p, int tag, HANDLE_TYPE c, HANDLE_TYPE *r) { return make(b, n, t, p, tag, c, r, 0, 1); }

static int startall(int count, HANDLE_TYPE *handles)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < count; i++) {
        struct request *r = &requests[handles[i]];
        failures += !r->kept || r->active;
        r->active = 1;
        if (r->sends)
            send_now(r);
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

static int testall(int count, HANDLE_TYPE *handles, int *done, void *statuses)
{
    memset(statuses, 1, (size_t)count * 20);
    *done = 1;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < count; i++) {
        if (handles[i] == NONE)
            continue;
        struct request *r = &requests[handles[i]];
        if (r->active && !r->sends && !received(r)) {
            *done = 0;
            continue;
        }
        r->active = 0;
        if (!r->kept) {
            drop_type(r->type);
            r->used = 0;
            handles[i] = NONE;
        }
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

static int request_free(HANDLE_TYPE *handle)
{
    pthread_mutex_lock(&lock);
    struct request *r = &requests[*handle];
    failures += !r->used || !r->kept || r->active;
    drop_type(r->type);
    r->used = 0;
    pthread_mutex_unlock(&lock);
    *handle = NONE;
    return 0;
}

static int hindexed(int count, const int *lengths, const intptr_t *at, HANDLE_TYPE old, HANDLE_TYPE *type)
{
    pthread_mutex_lock(&lock);
    failures += old != BYTE || count > 4;
    int i = find_free(&types[0].used, sizeof *types, TYPES);
    types[i].count = count;
    memcpy(types[i].lengths, lengths, (size_t)count * sizeof *lengths);
    memcpy(types[i].at, at, (size_t)count * sizeof *at);
    pthread_mutex_unlock(&lock);
    *type = (HANDLE_TYPE)i;
    return 0;
}

static int commit(HANDLE_TYPE *type) { return *type == NONE; }

static int type_free(HANDLE_TYPE *type)
{
    pthread_mutex_lock(&lock);
    drop_type((int)*type);
    pthread_mutex_unlock(&lock);
    *type = NONE;
    return 0;
}

/* ---- the program: every rank means its block of all inputs, then all send their block to all */

static int64_t *put(int64_t *to, int count, const int64_t *words)
{
    memcpy(to, words, (size_t)count * sizeof *words);
    return to + count;
}

static int64_t *message(int64_t *to, int peer, int space, int64_t at, int whole)
{
    int64_t bytes = BLOCK * 8, half = bytes / 2;
    if (whole)
        return put(to, 5, (int64_t[]){peer, space, 1, at, bytes});
    return put(to, 7, (int64_t[]){peer, space, 2, at + half, half, at, half}); /* the second half first */
}

static int64_t *program(int rank, int whole)
{
    int64_t *words = malloc(4096 * sizeof *words), *to = words, bytes = BLOCK * 8;
    int peers = nranks - 1;
    to = put(to, 3, (int64_t[]){3, 2 * peers, 4 * peers});
    to = put(to, 3, (int64_t[]){peers, peers, 2});
    for (int p = 0; p < nranks; p++)
        if (p != rank)
            to = message(to, p, 2, p * bytes, whole);
    for (int p = 0; p < nranks; p++)
        if (p != rank)
            to = message(to, p, 0, p * bytes, whole);
    to = put(to, 5, (int64_t[]){PR_WORK_FOLD, bytes, 1, rank * bytes, nranks});
    for (int p = 0; p < nranks; p++)
        to = put(to, 2, p == rank ? (int64_t[]){0, rank * bytes} : (int64_t[]){2, p * bytes});
    to = put(to, 5, (int64_t[]){PR_WORK_DIVIDE, bytes, 1, rank * bytes, 0});
    to = put(to, 3, (int64_t[]){peers, peers, 0});
    for (int p = 0; p < nranks; p++)
        if (p != rank)
            to = message(to, p, 1, p * bytes, 1);
    for (int p = 0; p < nranks; p++)
        if (p != rank)
            to = message(to, p, 1, rank * bytes, 1);
    to = put(to, 3, (int64_t[]){0, 0, 1}); /* a round without messages, in place */
    put(to, 7, (int64_t[]){PR_WORK_COPY, bytes, 1, 0, 1, 1, 0});
    return words;
}

static void *run(void *which)
{
    int rank = (int)(intptr_t)which, wrong = 0;
    unsigned seed = 31u * (unsigned)rank + 1;
    double input[MOST * BLOCK], output[MOST * BLOCK], scratch[MOST * BLOCK];
    for (int way = 0; way < 4; way++) {
        int kept = way & 1;
        int64_t *words = program(rank, way & 2);
        struct pr_run *run = pr_run_new(words, PR_SUM, PR_FLOAT64, 8, nranks, kept);
        for (int call = 0; call < calls; call++) {
            for (int i = 0; i < nranks * BLOCK; i++)
                input[i] = rank * 1000.0 + call + i;
            memset(output, 0, sizeof output);
            int done = pr_run_start(run, (uintptr_t)rank + 1, 5 + way, (uintptr_t)input, (uintptr_t)output,
                                    (uintptr_t)scratch);
            while (done >= 0 && done < 3) {
                if (rand_r(&seed) % 8 == 0)
                    usleep(rand_r(&seed) % 30);
                done = pr_run_advance(run, rand_r(&seed) % 2 ? 0 : 20000, rand_r(&seed) % 2 ? 3 : done + 1);
            }
            wrong += done != 3;
            for (int i = 0; i < 3; i++)
                wrong += pr_run_times(run)[i] > pr_run_times(run)[i + 1];
            wrong += pr_run_times(run)[3] > pr_clock();
            for (int i = 0; i < nranks * BLOCK; i++)
                wrong += output[i] != 1000.0 * (nranks - 1) / 2 + call + i;
        }
        wrong += pr_run_give_back(run) != PR_OK;
        pr_run_free(run);
        free(words);
    }
    int64_t nowhere[] = {1, 1, 1, 0, 1, 0, nranks, 0, 0}; /* to a rank that is not there */
    struct pr_run *run = pr_run_new(nowhere, PR_SUM, PR_FLOAT64, 8, 0, 0);
    wrong += pr_run_start(run, (uintptr_t)rank + 1, 1, 0, 0, 0) != PR_MPI_FAILED || pr_run_error(run) != 6;
    pr_run_free(run);
    return (void *)(intptr_t)wrong;
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    nranks = atoi(argv[1]);
    calls = atoi(argv[2]);
    uintptr_t functions[PR_MPI_FUNCTIONS] = {
        [PR_MPI_ISEND] = (uintptr_t)isend,         [PR_MPI_IRECV] = (uintptr_t)irecv,
        [PR_MPI_SEND_INIT] = (uintptr_t)send_init, [PR_MPI_RECV_INIT] = (uintptr_t)recv_init,
        [PR_MPI_STARTALL] = (uintptr_t)startall,   [PR_MPI_TESTALL] = (uintptr_t)testall,
        [PR_MPI_REQUEST_FREE] = (uintptr_t)request_free,
        [PR_MPI_TYPE_CREATE_HINDEXED] = (uintptr_t)hindexed,
        [PR_MPI_TYPE_COMMIT] = (uintptr_t)commit,  [PR_MPI_TYPE_FREE] = (uintptr_t)type_free,
    };
    if (pr_run_new((int64_t[]){0, 0, 0}, 0, 0, 1, 0, 0) || pr_mpi_use(functions, BYTE, 3, 20) != PR_NO_MPI)
        return 1; /* before there is an MPI; handles that are neither */
    if (pr_mpi_use(functions, BYTE, sizeof(HANDLE_TYPE), 20) != PR_OK)
        return 1;
    types[BYTE].used = 1; /* taken */
    pthread_t threads[MOST];
    for (int r = 0; r < nranks; r++)
        pthread_create(&threads[r], NULL, run, (void *)(intptr_t)r);
    int all = 0;
    for (int r = 0; r < nranks; r++) {
        void *wrong;
        pthread_join(threads[r], &wrong);
        all += (int)(intptr_t)wrong;
    }
    failures += all;
    failures += first != NULL;
    for (int i = 0; i < REQUESTS; i++)
        failures += requests[i].used;
    for (int i = 0; i < TYPES; i++)
        failures += i != BYTE && types[i].used;
    printf("%d ranks, %d calls: %d wrong\n", nranks, calls, failures);
    return failures != 0;
}
