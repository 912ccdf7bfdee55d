/* The shared-memory engine: reduce_scatter, allgather and allreduce among ranks that see each other's memory.
 *
 * The vector is cut into pieces small enough for the caches: piece j holds segment j of every block. Pieces are numbered
 * k = 1, 2, 3, ... over the life of the communicator, calls following each other; all ranks agree on the numbers, since
 * they make the same calls (and if not, the fingerprints tell). For piece k a rank
 *
 *   stages    S(k): copies what others will read into its stage slot k % 2 (or into the line itself, if it fits; or
 *             nothing, if its input lies in shared memory), then stores k to its line k % 2. A release.
 *   consumes  F(k): waits until the lines k % 2 of all peers hold k (acquire), compares fingerprints if it is a call's
 *             first piece, then folds its own block, or copies the blocks of the others, from the peers' slots. In an
 *             allreduce of two phases it writes its block also to its result slot k % 2. Then it stores k to `folded`.
 *   collects  C(k): only with two phases: waits until `folded` of all peers is at least k, copies their results.
 *
 * in the order  S(1) F(1) S(2) C(1) F(2) S(3) C(2) ...  where S(k+1) comes before C(k) if both are of one call, and after
 * it if they are not. So every wait has work before it in which peers can catch up. A call that has ended on a rank has
 * all its pieces consumed and collected there.
 *
 * Why two slots and two lines are enough. Nothing that a peer may still read is ever overwritten:
 *
 *   (1) S(k+1) writes stage slot and line (k+1) % 2, which peers read in F(k-1). The rank is past F(k), in which it saw
 *       all peers' S(k); a peer does S(k) after its F(k-1).
 *   (2) F(k) writes result slot k % 2, which peers read in C(k-2). In F(k) the rank has seen all peers' S(k); a peer does
 *       S(k) after C(k-2), since C(k-2) comes before F(k-1), and that before S(k).
 *   (3) A line is waited for with ==: by (1) it cannot hold k+2 before this rank has done F(k) itself. `folded` is waited
 *       for with >=: a peer may be past F(k+1) while this rank is still to do C(k).
 *   (4) An input in shared memory is read by peers in F(k). Its owner returns only when `folded` of all peers has reached
 *       the call's last piece. Within the call, an in-place allreduce writes block b of piece k in C(k), after rank b
 *       said folded >= k. Where results would be written before that (small, or reduce_scatter in place), it is staged.
 *       An owner that gives up in between spoils its fingerprint first; peers look at it again after they have read.
 *
 * The argument uses nothing but the order above and that every rank does every piece: so it holds for any mixture of the
 * three kinds, for one phase and two, and for blocks of any lengths. tests/test_shared_model.py checks it exhaustively for
 * 2 and 3 ranks; tests/c/shared_stress.c under the thread sanitizer.
 *
 * Nothing here waits: pr_shared_advance does what can be done, looks again for a while, and says how far it came.
 */
#define _DEFAULT_SOURCE
#include "shared.h"
#include "wait.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#ifndef PR_DELAY /* the stress test stretches the time before a store becomes visible */
#define PR_DELAY()
#endif

#if defined(__SANITIZE_THREAD__) /* which knows no fences; without them nothing changes for it */
#define FENCE(order) ((void)0)
#else
#define FENCE(order) atomic_thread_fence(order)
#endif

static const uint64_t POISON = UINT64_MAX;

size_t pr_shared_bytes(size_t slot)
{
    return PR_HEAD + 4 * slot;
}

struct pr_shared *pr_shared_open(int nranks, int rank, const uintptr_t *parts, size_t slot, int looks,
                                 size_t cache)
{
    struct pr_shared *e = calloc(1, sizeof *e);
    if (e == NULL)
        return NULL;
    e->nranks = nranks, e->rank = rank, e->looks = looks;
    e->slot = slot;
    e->cache = cache;
    e->parts = malloc((size_t)nranks * sizeof *e->parts);
    e->srcs = malloc((size_t)nranks * sizeof *e->srcs);
    e->inputs = calloc((size_t)nranks, sizeof *e->inputs);
    if (e->parts == NULL || e->srcs == NULL || e->inputs == NULL) {
        pr_shared_close(e);
        return NULL;
    }
    for (int r = 0; r < nranks; r++)
        e->parts[r] = (struct pr_part *)parts[r];
    return e;
}

void pr_shared_forget_chunks(struct pr_shared *e)
{
    for (int i = 0; i < e->nchunks; i++)
        free(e->chunks[i].parts);
    e->nchunks = 0;
}

void pr_shared_close(struct pr_shared *e)
{
    pr_shared_forget_chunks(e);
    free(e->parts);
    free(e->srcs);
    free(e->inputs);
    free(e);
}

int pr_shared_add_chunk(struct pr_shared *e, const uintptr_t *parts, size_t nbytes)
{
    size_t size = (size_t)e->nranks * sizeof *parts;
    uintptr_t *kept = e->nchunks < PR_MOST_CHUNKS ? malloc(size) : NULL;
    if (kept == NULL)
        return PR_NO_ROOM;
    memcpy(kept, parts, size);
    e->chunks[e->nchunks++] = (struct pr_chunk){kept, nbytes};
    return PR_OK;
}

/* Whether a region lies in shared memory, in the form in which it is published. */
static uint64_t find_in_chunks(const struct pr_shared *e, uintptr_t start, size_t nbytes)
{
    for (int i = 0; i < e->nchunks; i++) {
        uintptr_t base = e->chunks[i].parts[e->rank];
        if (start >= base && start - base <= e->chunks[i].nbytes && nbytes <= e->chunks[i].nbytes - (start - base))
            return (uint64_t)(i + 1) << PR_OFFSET_BITS | (start - base);
    }
    return 0;
}

static void publish(struct pr_shared *e, uint64_t piece)
{
    struct pr_line *line = &e->parts[e->rank]->staged[piece & 1];
    e->piece = piece;
    if (piece == e->first) {
        line->where = e->where;
        atomic_store_explicit(&line->fingerprint, e->plan->fingerprint, memory_order_relaxed);
    }
    PR_DELAY();
    if (e->past)
        pr_end_stream();
    atomic_store_explicit(&line->piece, piece, memory_order_release);
}

/* Whether all peers have come to the current piece; remembers those that have. */
static int all_staged(struct pr_shared *e)
{
    for (; e->seen < e->nranks - 1; e->seen++) {
        struct pr_line *line = &e->parts[pr_next_rank(e, e->rank, 1 + e->seen)]->staged[e->current & 1];
        if (atomic_load_explicit(&line->piece, memory_order_acquire) != e->current)
            return 0;
    }
    return 1;
}

static int all_folded(struct pr_shared *e)
{
    for (; e->seen < e->nranks - 1; e->seen++) {
        struct pr_part *part = e->parts[pr_next_rank(e, e->rank, 1 + e->seen)];
        if (atomic_load_explicit(&part->folded, memory_order_acquire) < e->current)
            return 0;
    }
    return 1;
}

/* Compare the call with what the peers have published, and note where they have their inputs. */
static int same_call(struct pr_shared *e)
{
    for (int r = 0; r < e->nranks; r++) {
        struct pr_line *line = &e->parts[r]->staged[e->first & 1];
        if (atomic_load_explicit(&line->fingerprint, memory_order_relaxed) != e->plan->fingerprint)
            return 0;
        e->inputs[r] = line->where;
    }
    return 1;
}

/* Whether no peer whose input is read in place has given up, and may have written to it, while it was read. Its line keeps
 * the call's fingerprint until it has seen `folded` of this rank. Pairs with the fence in pr_shared_poison. */
static int still_there(struct pr_shared *e)
{
    FENCE(memory_order_acquire);
    for (int r = 0; r < e->nranks; r++)
        if (e->inputs[r] != 0 && atomic_load_explicit(&e->parts[r]->staged[e->first & 1].fingerprint,
                                                      memory_order_relaxed) != e->plan->fingerprint)
            return 0;
    return 1;
}

/* How to stage a call that is not small. Ranks that share a cache exchange pieces through it; ranks that do not (on other core
 * complexes or sockets) read a line that another has just written several times more slowly than memory. Nobody says which
 * is which, and a virtual machine may change it at any time, so it is measured: the time that this rank spends in moving
 * the data of a call, staged through the caches (0) or past them (1). The better way is taken; the other one is tried
 * every so often. All ranks try in the same calls, since they count the same; should they choose differently, the data are
 * the same. */
enum { TRY_EVERY = 32, MEASURE_FROM = 1 << 15 };

static int choose_staging(struct pr_staging *s)
{
    uint64_t call = s->calls++;
    int better = s->cost[1] < s->cost[0];
    return call < 2 ? (int)call : call % TRY_EVERY == 0 ? !better : better;
}

static void note_staging(struct pr_shared *e)
{
    const struct pr_shared_plan *p = e->plan;
    struct pr_staging *s = &e->staging[p->collective][p->stream];
    double cost = (double)e->worked / (double)(p->total * p->size);
    double *known = &s->cost[e->past], risen = *known * 9 / 8; /* a core that was taken away for a while says nothing */
    *known = *known == 0 || cost < risen ? cost : risen;
}

/* Move the data of a piece, and count the time it takes where that is of interest. */
static void work(struct pr_shared *e, void (*what)(struct pr_shared *, uint64_t), uint64_t piece)
{
    if (!e->plan->measured) {
        what(e, piece);
        return;
    }
    int64_t before = pr_now();
    what(e, piece);
    e->worked += pr_now() - before;
}

/* Do what comes next. 1: something was done; 0: a peer is missing, or the call is over, or mismatched. */
static int move(struct pr_shared *e)
{
    uint64_t k = e->current;
    int last = k == e->last, two = e->plan != NULL && pr_two_phases(e->plan);
    switch (e->step) {
    case PR_STAGED:
        if (!all_staged(e))
            return 0;
        if (k == e->first && !same_call(e)) {
            e->mismatched = 1;
            return 0;
        }
        work(e, pr_consume, k);
        if (!still_there(e)) {
            e->mismatched = 1;
            return 0;
        }
        PR_DELAY();
        if (two || last) /* nobody waits for another */
            atomic_store_explicit(&e->parts[e->rank]->folded, k, memory_order_release);
        e->seen = 0;
        if (!last) {
            work(e, pr_stage, k + 1);
            publish(e, k + 1);
        }
        if (two || (last && e->where != 0))
            e->step = PR_FOLDED;
        else if (last)
            e->step = PR_IDLE;
        else
            e->current++;
        return 1;
    case PR_FOLDED:
        if (!all_folded(e))
            return 0;
        if (two)
            work(e, pr_collect, k);
        e->seen = 0;
        e->step = last ? PR_IDLE : PR_STAGED;
        if (!last)
            e->current++;
        return 1;
    default:
        return 0;
    }
}

static int where_it_stands(struct pr_shared *e)
{
    if (e->mismatched)
        return PR_MISMATCH;
    if (e->step != PR_IDLE)
        return PR_PENDING;
    if (e->plan != NULL) {
        if (e->plan->stream)
            pr_end_stream();
        if (e->plan->measured && e->where == 0)
            note_staging(e);
        e->plan->calls++;
        if (e->plan->unused)
            free(e->plan);
        e->plan = NULL;
    }
    return PR_OK;
}

int pr_shared_begin(struct pr_shared_plan *p, uintptr_t source, uintptr_t target)
{
    struct pr_shared *e = p->engine;
    if (e->plan != NULL)
        return PR_BUSY;
    int writes_early = p->small || p->fits_line || (p->collective == PR_REDUCE_SCATTER && source == target);
    size_t elements = p->collective == PR_ALLGATHER ? p->counts[e->rank] : p->total;
    e->plan = p;
    e->source = source, e->target = target;
    e->where = e->nchunks == 0 || writes_early ? 0 : find_in_chunks(e, source, elements * p->size);
    e->past = p->measured && e->where == 0 && choose_staging(&e->staging[p->collective][p->stream]);
    e->worked = 0;
    e->first = e->current = e->piece + 1;
    e->last = e->piece + p->pieces;
    e->seen = 0;
    e->step = PR_STAGED;
    work(e, pr_stage, e->first);
    publish(e, e->first);
    return PR_PENDING;
}

int pr_shared_start(struct pr_shared_plan *p, uintptr_t source, uintptr_t target)
{
    int code = pr_shared_begin(p, source, target);
    if (code == PR_BUSY)
        return code;
    while (move(p->engine))
        ;
    return where_it_stands(p->engine);
}

int pr_shared_advance(struct pr_shared *e, int64_t nanoseconds)
{
    int64_t began = 0;
    for (int tries = 0;;) {
        if (move(e)) {
            tries = 0;
            continue;
        }
        if (e->step == PR_IDLE || e->mismatched || nanoseconds <= 0)
            break;
        if (tries++ < e->looks) {
            pr_relax();
            continue;
        }
        tries = 0;
        int64_t before = pr_now();
        if (began == 0)
            began = before;
        else if (before - began >= nanoseconds)
            break;
        sched_yield(); /* ranks may outnumber cores: the peer may need this one */
    }
    if (began != 0)
        e->plan->waited += (uint64_t)(pr_now() - began);
    return where_it_stands(e);
}

int pr_shared_missing(const struct pr_shared *e, unsigned char *missing)
{
    int count = 0;
    for (int r = 0; r < e->nranks; r++) {
        struct pr_part *part = e->parts[r];
        uint64_t reached = e->step == PR_FOLDED ? atomic_load_explicit(&part->folded, memory_order_relaxed)
                                                : atomic_load_explicit(&part->staged[e->current & 1].piece,
                                                                       memory_order_relaxed);
        missing[r] = e->step != PR_IDLE && r != e->rank && reached < e->current;
        count += missing[r];
    }
    return count;
}

struct pr_shared_plan *pr_shared_current(const struct pr_shared *e)
{
    return e->plan;
}

uint64_t pr_shared_rounds(const struct pr_shared *e)
{
    return e->step == PR_IDLE ? 0 : e->current - e->first + 1;
}

void pr_shared_poison(struct pr_shared *e)
{
    if (e->plan == NULL)
        return; /* slow peers may still be in the last call, which has gone well; for the next they wait in vain */
    atomic_store_explicit(&e->parts[e->rank]->staged[e->first & 1].fingerprint, POISON, memory_order_relaxed);
    FENCE(memory_order_seq_cst); /* before what the user does to its input */
}

/* ---- plans ---- */

static size_t largest_of(const size_t *counts, int n)
{
    size_t largest = 0;
    for (int r = 0; r < n; r++)
        largest = counts[r] > largest ? counts[r] : largest;
    return largest;
}

/* How a vector is cut: see struct pr_shared_plan. */
static void cut(struct pr_shared_plan *p, const struct pr_shared *e, size_t small_bytes)
{
    size_t peers = e->nranks > 1 ? (size_t)e->nranks - 1 : 1, largest = largest_of(p->counts, e->nranks);
    size_t most = p->collective == PR_ALLGATHER ? largest : p->total; /* of elements that a rank stages */
    size_t limit = small_bytes < e->slot ? small_bytes : e->slot;
    p->fits_line = most * p->size <= PR_INLINE;
    p->small = p->collective == PR_ALLREDUCE && (p->fits_line || p->total * p->size <= limit);
    if (p->fits_line || p->small) {
        p->segment = largest;
        p->stride = 0; /* segments lie one after the other, see pr_stage */
    } else {
        size_t share = e->slot / (p->collective == PR_ALLGATHER ? 1 : peers) / PR_LINE * PR_LINE;
        p->segment = share / p->size;
        if (p->segment > largest)
            p->segment = largest;
        p->stride = (p->segment * p->size + PR_LINE - 1) / PR_LINE * PR_LINE;
    }
    p->pieces = p->segment == 0 ? 1 : (largest + p->segment - 1) / p->segment;
}

/* Measured with 2 and 4 ranks on 2 cores: what all ranks write is best streamed from half the cache on; the results
 * of a reduce_scatter, a P-th of that beside inputs that sweep the cache anyway, from four times as much. */
static int results_outgrow_cache(const struct pr_shared_plan *p, const struct pr_shared *e)
{
    size_t all = p->total * p->size * (size_t)e->nranks;
    return all >= (p->collective == PR_REDUCE_SCATTER ? 2 * e->cache : e->cache / 2);
}

struct pr_shared_plan *pr_shared_plan(struct pr_shared *e, int collective, int op, int dtype, double divisor,
                                      size_t size, const size_t *counts, uint64_t fingerprint, size_t small_bytes,
                                      int *code)
{
    size_t n = (size_t)e->nranks;
    struct pr_shared_plan *p = calloc(1, sizeof *p + 2 * n * sizeof(size_t));
    *code = p == NULL ? PR_NO_ROOM : PR_OK;
    if (p != NULL && collective != PR_ALLGATHER)
        *code = pr_find_folding(op, dtype, divisor, &p->folding);
    if (*code == PR_OK && e->slot / (n > 1 ? n - 1 : 1) < 4 * PR_LINE)
        *code = PR_NO_ROOM; /* too many ranks for the slots */
    if (*code != PR_OK) {
        free(p);
        return NULL;
    }
    p->engine = e;
    p->collective = collective;
    p->size = size;
    p->fingerprint = fingerprint;
    p->counts = (size_t *)(p + 1), p->starts = p->counts + n;
    for (size_t r = 0; r < n; r++) {
        p->counts[r] = counts[r];
        p->starts[r] = p->total;
        p->total += counts[r];
    }
    cut(p, e, small_bytes);
    p->stream = results_outgrow_cache(p, e);
    p->measured = p->total * size >= MEASURE_FROM && !p->small && !p->fits_line && e->nranks > 1;
    return p;
}

uint64_t pr_shared_plan_calls(const struct pr_shared_plan *p)
{
    return p->calls;
}

uint64_t pr_shared_plan_pieces(const struct pr_shared_plan *p)
{
    return p->pieces;
}

uint64_t pr_shared_plan_waited(const struct pr_shared_plan *p)
{
    return p->waited;
}

void pr_shared_plan_free(struct pr_shared_plan *p)
{
    if (p->engine->plan == p)
        p->unused = 1; /* freed when its call is over */
    else
        free(p);
}
