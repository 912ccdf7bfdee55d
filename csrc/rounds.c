/* Programs of messages, run in C: what a small call would otherwise spend in Python between two messages.
 *
 * The MPI is the one that mpi4py has loaded. Python looks its functions up and hands in their addresses and the handles;
 * nothing here is compiled against any mpi.h. What the MPIs differ in is the width of a handle (an int, or a pointer)
 * and the size of a status.
 *
 * A call's program is a list of words, read from left to right, which Python compiles once for its sizes:
 *
 *     rounds, most messages in a round, all messages, then for every round
 *         receives, sends, works, and then that many
 *             message: peer, space, pieces, then for each offset, bytes
 *             work:    kind, bytes, space, offset, sources, then for each space, offset
 *
 * A space is a number of an address that is known when the call begins: input, output, scratch.
 */
#define _DEFAULT_SOURCE
#include "core.h"
#include "wait.h"
#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum { MPI_ERR_NO_ROOM = -1 }; /* among the MPI's codes, which are not negative */
enum { HEAD_WORDS = 3, STATUS_BYTES_MOST = 256, SOURCES_AT_HAND = 16 };

static struct {
    uintptr_t functions[PR_MPI_FUNCTIONS];
    uintptr_t byte; /* MPI_BYTE */
    size_t handle_bytes, status_bytes;
} mpi;

struct pr_run {
    const int64_t *words, *at; /* the program, and the works of the round that is under way */
    int kept;                  /* the messages are prepared once, by persistent requests */
    int rounds, round;         /* how many there are; how many are over */
    int first, count;          /* the round's requests */
    int prepared;              /* persistent requests that have been made */
    int posted;                /* requests are under way */
    int works;                 /* of the round */
    int error;                 /* the MPI's code */
    int tag;
    int op, dtype;
    size_t element;            /* bytes */
    double divisor;
    uintptr_t comm;
    uintptr_t bases[3];
    void *requests, *statuses;
    int64_t *times; /* when it began, and when each round was over */
};

struct message {
    int peer, space, pieces;
    const int64_t *at;
};

#define HANDLE int32_t
#define NAME(name) name##_int
#include "rounds_body.h"
#undef HANDLE
#undef NAME
#define HANDLE uintptr_t
#define NAME(name) name##_pointer
#include "rounds_body.h"
#undef HANDLE
#undef NAME

#define BY_WIDTH(name, ...) (mpi.handle_bytes == sizeof(int32_t) ? name##_int(__VA_ARGS__) : name##_pointer(__VA_ARGS__))

int pr_mpi_use(const uintptr_t *functions, uintptr_t byte, size_t handle_bytes, size_t status_bytes)
{
    if ((handle_bytes != sizeof(int32_t) && handle_bytes != sizeof(uintptr_t)) || status_bytes > STATUS_BYTES_MOST)
        return PR_NO_MPI;
    memcpy(mpi.functions, functions, sizeof mpi.functions);
    mpi.byte = byte;
    mpi.handle_bytes = handle_bytes;
    mpi.status_bytes = status_bytes;
    return PR_OK;
}

struct pr_run *pr_run_new(const int64_t *words, int op, int dtype, size_t element, double divisor,
                          int kept)
{
    struct pr_run *run = calloc(1, sizeof *run);
    if (run == NULL || mpi.handle_bytes == 0) {
        free(run);
        return NULL;
    }
    size_t slots = (size_t)(kept ? words[2] : words[1]) + 1;
    run->words = words;
    run->rounds = (int)words[0];
    run->op = op;
    run->dtype = dtype;
    run->element = element;
    run->divisor = divisor;
    run->kept = kept;
    run->requests = calloc(slots, mpi.handle_bytes);
    run->statuses = calloc(slots, mpi.status_bytes);
    run->times = calloc((size_t)run->rounds + 1, sizeof *run->times);
    if (run->requests && run->statuses && run->times)
        return run;
    pr_run_free(run);
    return NULL;
}

/* Memory that the MPI may still write to is never given back. */
void pr_run_free(struct pr_run *run)
{
    if (run == NULL || run->posted)
        return;
    free(run->requests);
    free(run->statuses);
    free(run->times);
    free(run);
}

int pr_run_error(const struct pr_run *run)
{
    return run->error;
}

static int failed(struct pr_run *run, int code)
{
    run->error = code;
    return code == MPI_ERR_NO_ROOM ? PR_NO_ROOM : PR_MPI_FAILED;
}

int pr_run_give_back(struct pr_run *run)
{
    int prepared = run->posted ? 0 : run->prepared;
    run->prepared -= prepared;
    int code = BY_WIDTH(give_back, run, prepared);
    return code == 0 ? PR_OK : failed(run, code);
}

/* Begin the messages of the round whose words begin at run->at, and go on to its works. */
static int post(struct pr_run *run)
{
    const int64_t *at = run->at;
    int receives = (int)at[0], count = receives + (int)at[1];
    run->works = (int)at[2];
    run->first = run->kept ? run->first + run->count : 0;
    run->count = count;
    int make = !run->kept || run->prepared < run->first + count;
    at += 3;
    for (int i = 0; i < count; i++) {
        struct message m = {(int)at[0], (int)at[1], (int)at[2], at + 3};
        if (make) {
            enum pr_mpi_function function = i < receives ? (run->kept ? PR_MPI_RECV_INIT : PR_MPI_IRECV)
                                                         : (run->kept ? PR_MPI_SEND_INIT : PR_MPI_ISEND);
            int code = BY_WIDTH(post, run, &m, function, run->first + i);
            if (code != 0)
                return failed(run, code);
            if (run->kept)
                run->prepared++;
            else
                run->posted = 1; /* whatever becomes of the next */
        }
        at += 3 + 2 * m.pieces;
    }
    run->at = at;
    if (run->kept && count) {
        run->posted = 1;
        int code = BY_WIDTH(start, run, run->first, count);
        if (code != 0)
            return failed(run, code);
    }
    return PR_OK;
}

/* The works of the round, at run->at; then the next round's words are there. */
static int work(struct pr_run *run)
{
    const int64_t *at = run->at;
    for (int i = 0; i < run->works; i++) {
        int64_t kind = at[0], sources = at[4];
        size_t nbytes = (size_t)at[1];
        uintptr_t target = run->bases[at[2]] + (uintptr_t)at[3];
        uintptr_t at_hand[SOURCES_AT_HAND];
        uintptr_t *addresses = sources <= SOURCES_AT_HAND ? at_hand : malloc((size_t)sources * sizeof *addresses);
        if (addresses == NULL)
            return PR_NO_ROOM;
        at += 5;
        for (int64_t k = 0; k < sources; k++, at += 2)
            addresses[k] = run->bases[at[0]] + (uintptr_t)at[1];
        int code = PR_OK;
        if (kind == PR_WORK_FOLD)
            code = pr_fold(run->op, run->dtype, nbytes / run->element, target, addresses, (int)sources);
        else if (kind == PR_WORK_DIVIDE)
            code = pr_divide(run->dtype, nbytes / run->element, target, target, run->divisor);
        else if (target != addresses[0])
            pr_copy(nbytes, target, addresses[0]);
        if (addresses != at_hand)
            free(addresses);
        if (code != PR_OK)
            return code;
    }
    run->at = at;
    return PR_OK;
}

int pr_run_start(struct pr_run *run, uintptr_t comm, int tag, uintptr_t input, uintptr_t output, uintptr_t scratch)
{
    run->comm = comm;
    run->tag = tag;
    run->bases[0] = input;
    run->bases[1] = output;
    run->bases[2] = scratch;
    run->at = run->words + HEAD_WORDS;
    run->round = run->first = run->count = 0;
    run->times[0] = pr_now();
    int code = run->rounds ? post(run) : PR_OK;
    return code == PR_OK ? pr_run_advance(run, 0, 0) : code;
}

const int64_t *pr_run_times(const struct pr_run *run)
{
    return run->times;
}

int64_t pr_clock(void)
{
    return pr_now();
}

int pr_run_advance(struct pr_run *run, int64_t nanoseconds, int until)
{
    int64_t end = 0;
    while (run->round < run->rounds) {
        if (run->posted) {
            int done = 0, code = BY_WIDTH(test, run, run->first, run->count, &done);
            if (code != 0)
                return failed(run, code);
            if (!done) {
                if (nanoseconds == 0)
                    return run->round;
                int64_t now = pr_now();
                if (end == 0)
                    end = now + nanoseconds;
                else if (now > end)
                    return run->round;
                sched_yield(); /* ranks may outnumber cores */
                continue;
            }
            run->posted = 0;
        }
        int code = work(run);
        if (code != PR_OK)
            return code;
        run->times[++run->round] = pr_now();
        if (run->round == until)
            nanoseconds = 0;
        if (run->round < run->rounds && (code = post(run)) != PR_OK)
            return code;
    }
    return run->round;
}
