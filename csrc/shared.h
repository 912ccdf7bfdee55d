/* Inside the core: the shared-memory engine. The protocol and its proof are in shared_engine.c, what is moved in
 * shared_pieces.c, the way in from NumPy arrays in shared_door.c.
 */
#ifndef PYREDUCE_SHARED_H
#define PYREDUCE_SHARED_H
#include "kernels.h"

#include <stdatomic.h>

enum {
    PR_LINE = 128,       /* lines come in pairs: what two ranks write is so far apart */
    PR_INLINE = 104,     /* bytes of data that fit into a published line */
    PR_HEAD = 512,       /* bytes of a rank's part before its slots */
    PR_MOST_CHUNKS = 64,
    PR_OFFSET_BITS = 48
};

/* What a rank publishes with a piece. Only its owner writes it. */
struct pr_line {
    _Alignas(PR_LINE) _Atomic uint64_t piece; /* the number of the piece that is ready; grows by two */
    _Atomic uint64_t fingerprint;             /* of the call that the piece belongs to */
    uint64_t where;                           /* 0: the data are staged; else 1 + chunk, and offset, of the input */
    unsigned char data[PR_INLINE];            /* staged data, where they fit */
};

/* A rank's part of the arena: two lines and two pairs of slots, taken in turn by even and odd pieces. */
struct pr_part {
    struct pr_line staged[2];
    _Alignas(PR_LINE) _Atomic uint64_t folded; /* the last piece that this rank has read and folded */
};

struct pr_chunk { /* memory that all ranks can read: where each rank's part begins */
    uintptr_t *parts;
    size_t nbytes;
};

/* One collective for given sizes; nothing in it changes while it is used, but the counts of use. */
struct pr_shared_plan {
    struct pr_shared *engine;
    int collective;
    int small;          /* an allreduce in one phase: every rank folds all */
    int fits_line;      /* the data of a piece fit into a line */
    int stream;         /* results go past the caches */
    int measured;       /* large enough to be worth looking how it is best staged */
    size_t size;        /* bytes of an element */
    size_t total;       /* elements of the vector */
    size_t segment;     /* elements of a block in a piece */
    size_t stride;      /* bytes from one staged segment to the next */
    uint64_t pieces;
    uint64_t fingerprint;
    struct pr_folding folding;
    size_t *counts, *starts; /* elements of every block, and before it */
    uint64_t calls;
    int unused;      /* to be freed when the call under way is over */
    uint64_t waited; /* nanoseconds in which nothing could be done */
};

enum pr_step { PR_IDLE, PR_STAGED, PR_FOLDED };

/* The engine of one rank. */
struct pr_shared {
    int nranks, rank, looks;
    size_t slot;                /* bytes of a slot */
    size_t cache;               /* bytes of the last-level cache, which the ranks share */
    struct pr_part **parts;     /* of every rank */
    struct pr_chunk chunks[PR_MOST_CHUNKS];
    int nchunks;
    uint64_t piece;             /* the last piece that this rank has published */
    uintptr_t *srcs;            /* scratch for a fold */
    atomic_int entered, open;   /* see shared_door.c */
    uint64_t light;             /* calls that came through doors */
    int left_waiting;           /* pr_door_call has left a call that its caller must go on with */

    struct pr_staging {         /* what calls of each collective have cost, large and streamed ones, see shared_engine.c */
        uint64_t calls;
        double cost[2];
    } staging[3][2];

    /* The call under way. */
    struct pr_shared_plan *plan;
    uintptr_t source, target;
    uint64_t where;             /* published: where peers find this rank's input */
    uint64_t first, last;       /* its pieces */
    uint64_t current;           /* the piece that is waited for */
    enum pr_step step;
    int seen;                   /* peers seen in this wait, in the order of reading */
    int mismatched;
    int past;                   /* it is staged past the caches */
    int64_t worked;             /* nanoseconds spent in moving data; counted only if that is measured */
    uint64_t *inputs;           /* where every rank has its input, of the call under way */
};

struct pr_door {
    struct pr_shared *engine;
    struct pr_door_entry *entries;
    int count, room, last;
};

/* shared_pieces.c */
void pr_stage(struct pr_shared *e, uint64_t piece);
void pr_consume(struct pr_shared *e, uint64_t piece);
void pr_collect(struct pr_shared *e, uint64_t piece);

static inline int pr_two_phases(const struct pr_shared_plan *p)
{
    return p->collective == PR_ALLREDUCE && !p->small;
}

/* The rank so many places after another, around the end. */
static inline int pr_next_rank(const struct pr_shared *e, int rank, int ahead)
{
    int r = rank + ahead;
    return r < e->nranks ? r : r - e->nranks;
}

static inline char *pr_stage_slot(const struct pr_shared *e, int rank, uint64_t piece)
{
    return (char *)e->parts[rank] + PR_HEAD + (piece & 1) * e->slot;
}

static inline char *pr_result_slot(const struct pr_shared *e, int rank, uint64_t piece)
{
    return (char *)e->parts[rank] + PR_HEAD + (2 + (piece & 1)) * e->slot;
}

#endif
