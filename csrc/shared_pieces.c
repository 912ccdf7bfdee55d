/* What the engine moves: staging, consuming and collecting one piece. Plain loads and stores of data; their order
 * between ranks is the business of shared_engine.c.
 *
 * Where a peer's data lie. A rank stages for every peer d, in the order rank+1, rank+2, ..., the segment of block d. With
 * a stride the i-th of them begins at i * stride. What fits a line is packed: the segments one after the other. A small
 * allreduce stages the whole vector. Peers are read from rank+1 on, so that not all read the same one at once.
 */
#include "shared.h"

#include <string.h>

static size_t clamp(size_t count, size_t from, size_t most)
{
    size_t left = count > from ? count - from : 0;
    return left < most ? left : most;
}

/* The number of the segment that a piece of the call under way holds, as an element offset into a block. */
static size_t begin_of(const struct pr_shared *e, uint64_t piece)
{
    return (size_t)(piece - e->first) * e->plan->segment;
}

static char *staged_at(const struct pr_shared *e, int rank, uint64_t piece)
{
    return e->plan->fits_line ? (char *)e->parts[rank]->staged[piece & 1].data : pr_stage_slot(e, rank, piece);
}

/* Where rank r has staged its segment of this rank's block. */
static uintptr_t staged_for_me(const struct pr_shared *e, int r, uint64_t piece)
{
    const struct pr_shared_plan *p = e->plan;
    const char *slot = staged_at(e, r, piece);
    int place = e->rank - r - 1 + (e->rank > r ? 0 : e->nranks);
    if (p->stride != 0)
        return (uintptr_t)(slot + (size_t)place * p->stride);
    for (int i = 1; i <= place; i++)
        slot += p->counts[pr_next_rank(e, r, i)] * p->size;
    return (uintptr_t)slot;
}

/* Element `at` of rank r's input, which lies in shared memory. */
static uintptr_t in_chunk(const struct pr_shared *e, int r, size_t at)
{
    uint64_t where = e->inputs[r], offset = where & (((uint64_t)1 << PR_OFFSET_BITS) - 1);
    return e->chunks[(where >> PR_OFFSET_BITS) - 1].parts[r] + (uintptr_t)offset + at * e->plan->size;
}

static void stage(const struct pr_shared *e, char *slot, const char *from, size_t nbytes)
{
    if (e->past)
        pr_copy_out(slot, from, nbytes, 1);
    else
        pr_copy_in(slot, from, nbytes);
}

void pr_stage(struct pr_shared *e, uint64_t piece)
{
    const struct pr_shared_plan *p = e->plan;
    size_t begin = begin_of(e, piece);
    const char *source = (const char *)e->source;
    char *slot = staged_at(e, e->rank, piece);
    if (p->collective == PR_ALLGATHER) {
        size_t nbytes = clamp(p->counts[e->rank], begin, p->segment) * p->size;
        char *own = (char *)e->target + (p->starts[e->rank] + begin) * p->size;
        const char *from = source + begin * p->size;
        if (e->where == 0 && e->nranks > 1)
            stage(e, slot, from, nbytes);
        if (own != from)
            pr_copy_out(own, from, nbytes, p->stream);
        return;
    }
    if (e->where != 0 || e->nranks == 1)
        return;
    if (p->small) {
        memcpy(slot, source, p->total * p->size);
        return;
    }
    for (int i = 1; i < e->nranks; i++) {
        int b = pr_next_rank(e, e->rank, i);
        size_t nbytes = clamp(p->counts[b], begin, p->segment) * p->size;
        stage(e, slot, source + (p->starts[b] + begin) * p->size, nbytes);
        slot += p->stride != 0 ? p->stride : nbytes;
    }
}

/* Where rank r has what the others copy of it: its result, or in an allgather its input. */
static const char *to_copy(const struct pr_shared *e, int r, uint64_t piece)
{
    if (e->plan->collective == PR_ALLREDUCE)
        return pr_result_slot(e, r, piece);
    return e->inputs[r] != 0 ? (const char *)in_chunk(e, r, begin_of(e, piece)) : staged_at(e, r, piece);
}

void pr_collect(struct pr_shared *e, uint64_t piece)
{
    const struct pr_shared_plan *p = e->plan;
    size_t begin = begin_of(e, piece);
    for (int i = 1; i < e->nranks; i++) {
        int r = pr_next_rank(e, e->rank, i);
        size_t nbytes = clamp(p->counts[r], begin, p->segment) * p->size;
        char *target = (char *)e->target + (p->starts[r] + begin) * p->size;
        if (nbytes > 0)
            pr_copy_out(target, to_copy(e, r, piece), nbytes, p->stream);
    }
}

void pr_consume(struct pr_shared *e, uint64_t piece)
{
    const struct pr_shared_plan *p = e->plan;
    if (p->collective == PR_ALLGATHER) {
        pr_collect(e, piece);
        return;
    }
    size_t begin = p->small ? 0 : p->starts[e->rank] + begin_of(e, piece);
    size_t n = p->small ? p->total : clamp(p->counts[e->rank], begin_of(e, piece), p->segment);
    if (n == 0)
        return;
    for (int r = 0; r < e->nranks; r++) {
        if (r == e->rank)
            e->srcs[r] = e->source + begin * p->size;
        else if (e->inputs[r] != 0)
            e->srcs[r] = in_chunk(e, r, begin);
        else
            e->srcs[r] = p->small ? (uintptr_t)staged_at(e, r, piece) : staged_for_me(e, r, piece);
    }
    size_t to = p->collective == PR_REDUCE_SCATTER ? begin_of(e, piece) : begin;
    char *keep = pr_two_phases(p) && e->nranks > 1 ? pr_result_slot(e, e->rank, piece) : NULL;
    pr_fold_out(&p->folding, n, (char *)e->target + to * p->size, keep, e->srcs, e->nranks, p->stream);
}
