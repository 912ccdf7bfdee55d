/* Threads as ranks over the shared-memory engine, for the sanitizers: random calls, every result compared exactly.
 *
 * Each thread makes its calls on two communicators at once, now on one, now on the other. What a call is follows from
 * the seed, so that all ranks make the same; where a rank has its buffers (private memory, or chunks that all ranks can
 * read; any alignment; in place or not) is its own affair. As soon as a call has returned, its buffers are overwritten,
 * and private ones freed: a peer that still reads them shows as a race or a wrong result. The slots are tiny, so that
 * some thousand elements are many pieces, and random delays come before every publication (PR_DELAY). All inputs follow
 * from the seed as well: every rank folds them itself, in rank order. Exits with 1 on a wrong value.
 *
 * Arguments: ranks, calls, seed.
 */
#define _DEFAULT_SOURCE
#include "core.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 8, COMMS = 2, LINE = 128, INLINE = 104, ROOM = 1 << 16, SHIFT = 64, REPEATS = 3, GIVE_UP = 100 };

struct kind {
    int op, dtype;
    size_t size;
    int mean;
};

static const struct kind kinds[] = {
    {PR_SUM, PR_INT32, 4, 0},  {PR_SUM, PR_FLOAT32, 4, 0}, {PR_MAX, PR_FLOAT64, 8, 0}, {PR_SUM, PR_FLOAT16, 2, 0},
    {PR_BXOR, PR_INT64, 8, 0}, {PR_PROD, PR_UINT8, 1, 0},  {PR_SUM, PR_FLOAT32, 4, 1}, {PR_SUM, PR_COMPLEX128, 16, 0},
};

/* A call, the same on all ranks. */
struct call {
    int collective;
    const struct kind *kind;
    size_t counts[MOST], starts[MOST], total;
    size_t small_bytes;
    uint64_t fingerprint;
};

/* A communicator as one rank has it, and the call that it is in. */
struct job {
    struct pr_shared *engine;
    struct pr_shared_plan *plan;
    struct call call;
    int comm, index, active, in_place;
    char *source, *target;
    size_t source_bytes, target_bytes;
    void *owned[2]; /* private buffers, to be freed */
};

struct rank {
    int rank;
    uint64_t dice;
    struct job jobs[COMMS];
    char *inputs[MOST], *expected, *got;
};

static struct rank ranks[MOST];
static uintptr_t parts[COMMS][MOST], chunks[COMMS][2][MOST];
static size_t slots[COMMS];
static uint64_t seed;
static int nranks, calls, failures;
static _Thread_local uint64_t delay_dice;

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static uint64_t roll(uint64_t *dice)
{
    return mix(*dice += 0x9e3779b97f4a7c15u);
}

static size_t below(uint64_t *dice, size_t n)
{
    return (size_t)(roll(dice) % n);
}

static uint64_t seeded(uint64_t a, uint64_t b, uint64_t c)
{
    return mix(seed + mix(a + mix(b + mix(c))));
}

static void failed(const char *what, const struct rank *me, const struct job *job)
{
    __atomic_fetch_add(&failures, 1, __ATOMIC_RELAXED);
    fprintf(stderr, "%s: rank %d, communicator %d, call %d, collective %d, dtype %d, total %zu\n", what, me->rank,
            job->comm, job->index, job->call.collective, job->call.kind->dtype, job->call.total);
}

/* What the engine's PR_DELAY becomes. */
void stress_delay(void)
{
    size_t kind = below(&delay_dice, 64);
    if (kind == 0)
        usleep((useconds_t)below(&delay_dice, 50));
    else if (kind < 8)
        sched_yield();
}

/* ---- what all ranks derive from the seed ---- */

/* A number of elements: few, around the sizes at which the engine changes its ways, or many pieces. */
static size_t some_total(uint64_t *dice, const struct call *call, size_t slot)
{
    size_t n = (size_t)nranks, peers = n > 1 ? n - 1 : 1;
    size_t around[] = {INLINE, INLINE * n, call->small_bytes, slot, slot * n, slot / peers / LINE * LINE * n};
    size_t way = below(dice, 16), size = call->kind->size, total = way;
    if (way >= 4 && way < 12)
        total = around[below(dice, sizeof around / sizeof *around)] / size + below(dice, 3);
    else if (way >= 12)
        total = below(dice, (way < 14 ? 1 : 12) * slot / size);
    if (way >= 4 && way < 12 && total > 0)
        total--;
    return total * size <= ROOM ? total : ROOM / size;
}

/* Blocks of equal or random lengths, or all in one. */
static void split(uint64_t *dice, struct call *call)
{
    size_t n = (size_t)nranks, left = call->total, way = below(dice, 4), chosen = below(dice, n);
    for (size_t r = 0; r < n; r++) {
        size_t count = call->total / n + (r < call->total % n);
        if (way == 0)
            count = r + 1 == n ? left : below(dice, left + 1);
        else if (way == 1)
            count = r == chosen ? call->total : 0;
        call->counts[r] = count;
        call->starts[r] = call->total - left;
        left -= count;
    }
}

/* The same call is made some times before the next one. */
static struct call describe(int comm, int index)
{
    static const size_t percent[] = {0, 25, 50, 100};
    uint64_t dice = seeded(1, (uint64_t)comm, (uint64_t)(index / REPEATS));
    struct call call = {.collective = (int)below(&dice, 3), .fingerprint = dice | 1};
    call.kind = &kinds[below(&dice, sizeof kinds / sizeof *kinds)];
    call.small_bytes = slots[comm] * percent[below(&dice, 4)] / 100;
    call.total = some_total(&dice, &call, slots[comm]);
    split(&dice, &call);
    return call;
}

/* A number whose sums are rounded: the order in which they are taken shows. */
static double some_number(uint64_t bits)
{
    return (double)((int64_t)(bits >> 34) - (1 << 29)) * (double)(1u << (bits & 15));
}

/* A rank's input. Not instrumented: only its owner's scratch is written. */
__attribute__((no_sanitize("thread"))) static void make_input(const struct kind *kind, char *out, size_t n,
                                                               uint64_t dice)
{
    int floats = kind->dtype >= PR_FLOAT16 && kind->dtype != PR_COMPLEX128;
    size_t nbytes = n * kind->size, width = floats ? kind->size : 8;
    for (size_t at = 0; at < nbytes; at += width) {
        uint64_t bits = roll(&dice);
        double d = some_number(bits);
        float f = (float)d;
        uint16_t half = (uint16_t)((bits & 0x83ffu) | (8 + (bits >> 16) % 12) << 10);
        const char *from = (const char *)&bits;
        if (kind->dtype == PR_FLOAT64 || kind->dtype == PR_COMPLEX128)
            from = (const char *)&d;
        else if (kind->dtype == PR_FLOAT32)
            from = (const char *)&f;
        else if (kind->dtype == PR_FLOAT16)
            from = (const char *)&half;
        for (size_t i = 0; i < width && at + i < nbytes; i++)
            out[at + i] = from[i];
    }
}

static void input_of(const struct job *job, int r, char *out)
{
    const struct call *call = &job->call;
    size_t n = call->collective == PR_ALLGATHER ? call->counts[r] : call->total;
    make_input(call->kind, out, n, seeded(2 + (uint64_t)job->comm, (uint64_t)job->index, (uint64_t)r));
}

/* All ranks' inputs into scratch, and the whole result into expected. */
static void expect(struct rank *me, const struct job *job)
{
    const struct call *call = &job->call;
    const struct kind *kind = call->kind;
    uintptr_t srcs[MOST];
    for (int r = 0; r < nranks; r++) {
        if (call->collective == PR_ALLGATHER)
            input_of(job, r, me->expected + call->starts[r] * kind->size);
        else
            input_of(job, r, me->inputs[r]);
        srcs[r] = (uintptr_t)me->inputs[r];
    }
    if (call->collective == PR_ALLGATHER)
        return;
    int bad = pr_fold(kind->op, kind->dtype, call->total, (uintptr_t)me->expected, srcs, nranks);
    if (kind->mean)
        bad |= pr_divide(kind->dtype, call->total, (uintptr_t)me->expected, (uintptr_t)me->expected, nranks);
    if (bad)
        failed("cannot fold", me, job);
}

/* ---- one rank's calls ---- */

/* Memory for nbytes, in a chunk or private, at any alignment. */
static char *place(struct rank *me, struct job *job, int which, size_t nbytes)
{
    size_t shift = below(&me->dice, SHIFT);
    job->owned[which] = NULL;
    if (below(&me->dice, 2))
        return (char *)chunks[job->comm][which][me->rank] + shift;
    char *own = malloc(shift + nbytes + 1);
    if (own == NULL)
        abort();
    job->owned[which] = own;
    return own + shift;
}

static void lay_out(struct rank *me, struct job *job)
{
    const struct call *call = &job->call;
    size_t size = call->kind->size, own = call->counts[me->rank] * size, all = call->total * size;
    int gathers = call->collective == PR_ALLGATHER;
    job->source_bytes = gathers ? own : all;
    job->target_bytes = call->collective == PR_REDUCE_SCATTER ? own : all;
    job->in_place = below(&me->dice, 3) == 0;
    job->target = place(me, job, 0, job->in_place ? all : job->target_bytes);
    job->owned[1] = NULL;
    if (!job->in_place)
        job->source = place(me, job, 1, job->source_bytes);
    else
        job->source = job->target + (gathers ? call->starts[me->rank] * size : 0);
    memcpy(job->source, me->inputs[me->rank], job->source_bytes);
}

/* The call is over: at once overwrite what peers might still read; then look at the result. */
static void finish(struct rank *me, struct job *job)
{
    const struct call *call = &job->call;
    int junk = (int)below(&me->dice, 256);
    if (!job->in_place)
        memset(job->source, junk, job->source_bytes);
    memcpy(me->got, job->target, job->target_bytes);
    memset(job->target, junk, job->target_bytes);
    free(job->owned[0]);
    free(job->owned[1]);
    expect(me, job);
    size_t from = call->collective == PR_REDUCE_SCATTER ? call->starts[me->rank] * call->kind->size : 0;
    if (memcmp(me->got, me->expected + from, job->target_bytes) != 0)
        failed("wrong", me, job);
    unsigned char missing[MOST];
    if (pr_shared_missing(job->engine, missing) != 0 || pr_shared_rounds(job->engine) != 0)
        failed("not idle", me, job);
    if (++job->index % REPEATS == 0 || job->index == calls) {
        if (pr_shared_plan_calls(job->plan) == 0)
            failed("not counted", me, job);
        pr_shared_plan_free(job->plan);
        job->plan = NULL;
    }
    job->active = 0;
}

static void make_plan(struct rank *me, struct job *job)
{
    int code;
    const struct call *call = &job->call;
    const struct kind *kind = call->kind;
    job->plan = pr_shared_plan(job->engine, call->collective, kind->op, kind->dtype, kind->mean ? nranks : 0,
                               kind->size, call->counts, call->fingerprint, call->small_bytes, &code);
    if (job->plan == NULL) {
        failed("no plan", me, job);
        abort();
    }
}

static void settle(struct rank *me, struct job *job, int code)
{
    unsigned char missing[MOST];
    if (code == PR_OK) {
        finish(me, job);
        return;
    }
    if (code != PR_PENDING) {
        failed("mismatch", me, job);
        abort();
    }
    if (below(&me->dice, 8) == 0 && pr_shared_start(job->plan, 0, 0) != PR_BUSY)
        failed("not busy", me, job);
    if (below(&me->dice, 8) == 0)
        pr_shared_missing(job->engine, missing);
    stress_delay();
}

/* Begin the communicator's next call, or go on with the one under way. */
static void step(struct rank *me, struct job *job)
{
    if (job->active) {
        int64_t patience = below(&me->dice, 2) ? 0 : (int64_t)below(&me->dice, 20000);
        settle(me, job, pr_shared_advance(job->engine, patience));
        return;
    }
    job->call = describe(job->comm, job->index);
    if (job->plan == NULL)
        make_plan(me, job);
    input_of(job, me->rank, me->inputs[me->rank]);
    lay_out(me, job);
    job->active = 1;
    settle(me, job, pr_shared_start(job->plan, (uintptr_t)job->source, (uintptr_t)job->target));
}

static void *run(void *which)
{
    struct rank *me = which;
    delay_dice = seeded(9, 9, (uint64_t)me->rank);
    me->dice = seeded(8, 8, (uint64_t)me->rank);
    for (;;) {
        struct job *job = &me->jobs[below(&me->dice, COMMS)];
        if (job->index == calls)
            job = &me->jobs[1 - job->comm];
        if (job->index == calls)
            return NULL;
        step(me, job);
    }
}

/* ---- setting up ---- */

static void *zeroed(size_t nbytes)
{
    void *memory = aligned_alloc(LINE, (nbytes + LINE - 1) / LINE * LINE);
    if (memory == NULL)
        abort();
    return memset(memory, 0, nbytes);
}

static void make_memory(int comm)
{
    size_t least = 4 * LINE * (size_t)(nranks > 1 ? nranks - 1 : 1);
    slots[comm] = comm == 0 && least < 2048 ? 2048 : 4096;
    for (int r = 0; r < nranks; r++) {
        parts[comm][r] = (uintptr_t)zeroed(pr_shared_bytes(slots[comm]));
        for (int i = 0; i < 2; i++)
            chunks[comm][i][r] = (uintptr_t)zeroed(ROOM + SHIFT);
    }
}

static void make_rank(int r)
{
    struct rank *me = &ranks[r];
    uint64_t dice = seeded(7, 7, (uint64_t)r);
    me->rank = r;
    for (int i = 0; i < nranks; i++)
        me->inputs[i] = zeroed(ROOM);
    me->expected = zeroed(ROOM);
    me->got = zeroed(ROOM);
    for (int comm = 0; comm < COMMS; comm++) {
        size_t stream_from = below(&dice, 2) ? SIZE_MAX : below(&dice, 4096);
        struct pr_shared *e =
            pr_shared_open(nranks, r, parts[comm], slots[comm], 1 + (int)below(&dice, 50), stream_from);
        if (e == NULL)
            abort();
        for (int i = 0; i < 2; i++)
            if (pr_shared_add_chunk(e, chunks[comm][i], ROOM + SHIFT) != PR_OK)
                abort();
        me->jobs[comm] = (struct job){.engine = e, .comm = comm};
    }
}

static void drop_all(void)
{
    for (int r = 0; r < nranks; r++) {
        for (int comm = 0; comm < COMMS; comm++) {
            pr_shared_close(ranks[r].jobs[comm].engine);
            free((void *)parts[comm][r]);
            free((void *)chunks[comm][0][r]);
            free((void *)chunks[comm][1][r]);
        }
        for (int i = 0; i < nranks; i++)
            free(ranks[r].inputs[i]);
        free(ranks[r].expected);
        free(ranks[r].got);
    }
}

int main(int argc, char **argv)
{
    pthread_t threads[MOST];
    if (argc != 4)
        return 2;
    nranks = atoi(argv[1]);
    calls = (atoi(argv[2]) + 1) / COMMS; /* on each communicator */
    seed = (uint64_t)atoll(argv[3]);
    if (nranks < 1 || nranks > MOST || calls < 1)
        return 2;
    alarm(GIVE_UP);
    for (int comm = 0; comm < COMMS; comm++)
        make_memory(comm);
    for (int r = 0; r < nranks; r++)
        make_rank(r);
    for (int r = 0; r < nranks; r++)
        if (pthread_create(&threads[r], NULL, run, &ranks[r]))
            return 2;
    for (int r = 0; r < nranks; r++)
        pthread_join(threads[r], NULL);
    drop_all();
    printf("%d ranks, %d calls: %d wrong\n", nranks, atoi(argv[2]), failures);
    return failures != 0;
}
