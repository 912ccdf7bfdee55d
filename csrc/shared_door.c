/* The short way of a blocking call: from two NumPy arrays to the engine in one C call.
 *
 * What is needed of an array stands in the fields of PyArrayObject, which are part of NumPy's binary interface and have
 * not changed since 1.0 (numpy/ndarraytypes.h, struct tagPyArrayObject_fields). Reading them costs nothing, where the
 * ways through Python cost as much as the whole exchange. pyreduce.arrays compares what is read here with what NumPy
 * says, once, before the door is used; if it differs, the door stays shut.
 *
 * A door belongs to a collective, op and algorithm, and knows the plans of the shapes and dtypes that have been called
 * with. Everything else (other types, strides, overlaps, a broken communicator) is sent the long way, which explains.
 *
 * Threads: `entered` is held by the thread that is inside; the long way, which has a lock of its own, clears `open` and
 * then looks at `entered`, the door sets `entered` and then looks at `open`. Both sequentially consistent: one of the two
 * sees the other.
 */
#include "shared.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_DIMS = 4, C_CONTIGUOUS = 0x1, WRITEABLE = 0x400, PATIENCE_NS = 200000 };

struct ndarray { /* after the head of every Python object, whose second word is the type */
    char *data;
    int nd;
    intptr_t *dims, *strides;
    void *base;
    uintptr_t descr;
    int flags;
};

struct pr_door_entry {
    struct pr_shared_plan *plan;
    uintptr_t descr;
    int nd[2];
    intptr_t dims[2][MOST_DIMS];
    size_t nbytes[2];
    int whole; /* one array, which holds input and output of different lengths: in place */
};

static size_t head_bytes;   /* 0: not known, doors stay shut */
static uintptr_t array_type;

void pr_door_layout(size_t head, uintptr_t type)
{
    head_bytes = head;
    array_type = type;
}

static const struct ndarray *fields(uintptr_t object)
{
    uintptr_t type = *(const uintptr_t *)(object + head_bytes - sizeof(uintptr_t));
    return type == array_type ? (const struct ndarray *)(object + head_bytes) : NULL;
}

int pr_door_look(uintptr_t object, uintptr_t *data, int *nd, intptr_t *first_dim, uintptr_t *descr, int *flags)
{
    const struct ndarray *a = head_bytes != 0 ? fields(object) : NULL;
    if (a == NULL)
        return PR_SHUT;
    *data = (uintptr_t)a->data, *nd = a->nd, *descr = a->descr, *flags = a->flags;
    *first_dim = a->nd > 0 ? a->dims[0] : 0;
    return PR_OK;
}

uintptr_t pr_door_address(uintptr_t object)
{
    const struct ndarray *a = head_bytes != 0 ? fields(object) : NULL;
    return a != NULL ? (uintptr_t)a->data : 0;
}

struct pr_door *pr_door_make(struct pr_shared *e)
{
    struct pr_door *door = calloc(1, sizeof *door);
    if (door != NULL)
        door->engine = e;
    return door;
}

void pr_door_free(struct pr_door *door)
{
    free(door->entries);
    free(door);
}

static int fits(const struct ndarray *a, const struct pr_door_entry *entry, int i)
{
    if (a->descr != entry->descr || a->nd != entry->nd[i])
        return 0;
    for (int d = 0; d < a->nd; d++)
        if (a->dims[d] != entry->dims[i][d])
            return 0;
    return 1;
}

static int whole(const struct pr_shared_plan *plan, const struct ndarray *send, const struct ndarray *recv)
{
    return send == recv && plan->collective != PR_ALLREDUCE;
}

static const struct pr_door_entry *find(struct pr_door *door, const struct ndarray *send, const struct ndarray *recv)
{
    for (int i = 0, at = door->last; i < door->count; i++, at = at + 1 < door->count ? at + 1 : 0) {
        const struct pr_door_entry *entry = &door->entries[at];
        if (fits(send, entry, 0) && fits(recv, entry, 1) && entry->whole == whole(entry->plan, send, recv)) {
            door->last = at;
            return entry;
        }
    }
    return NULL;
}

int pr_door_add(struct pr_door *door, struct pr_shared_plan *plan, uintptr_t send, uintptr_t recv)
{
    if (head_bytes == 0)
        return PR_SHUT;
    const struct ndarray *arrays[2] = {fields(send), fields(recv)};
    struct pr_door_entry entry = {.plan = plan};
    if (arrays[0] == NULL || arrays[1] == NULL || arrays[0]->descr != arrays[1]->descr)
        return PR_SHUT; /* it knows one descr, which its plan keeps alive */
    entry.whole = whole(plan, arrays[0], arrays[1]);
    if (find(door, arrays[0], arrays[1]) != NULL)
        return PR_SHUT;
    for (int i = 0; i < 2; i++) {
        if (arrays[i]->nd > MOST_DIMS)
            return PR_SHUT;
        entry.descr = arrays[i]->descr;
        entry.nd[i] = arrays[i]->nd;
        entry.nbytes[i] = plan->size;
        for (int d = 0; d < arrays[i]->nd; d++) {
            entry.dims[i][d] = arrays[i]->dims[d];
            entry.nbytes[i] *= (size_t)arrays[i]->dims[d];
        }
    }
    if (door->count == door->room) {
        int room = door->room ? 2 * door->room : 4;
        struct pr_door_entry *grown = realloc(door->entries, (size_t)room * sizeof *grown);
        if (grown == NULL)
            return PR_NO_ROOM;
        door->entries = grown, door->room = room;
    }
    door->last = door->count;
    door->entries[door->count++] = entry;
    return PR_OK;
}

static int enter(struct pr_door *door, const struct ndarray *send, const struct ndarray *recv)
{
    struct pr_shared *e = door->engine;
    if (!atomic_load(&e->open) || send == NULL || recv == NULL)
        return PR_SHUT;
    if (!(send->flags & C_CONTIGUOUS) || (recv->flags & (C_CONTIGUOUS | WRITEABLE)) != (C_CONTIGUOUS | WRITEABLE))
        return PR_SHUT;
    const struct pr_door_entry *entry = find(door, send, recv);
    if (entry == NULL)
        return PR_SHUT;
    uintptr_t source = (uintptr_t)send->data, target = (uintptr_t)recv->data;
    int apart = source + entry->nbytes[0] <= target || target + entry->nbytes[1] <= source;
    struct pr_shared_plan *plan = entry->plan;
    if (!apart && !entry->whole && !(source == target && plan->collective == PR_ALLREDUCE))
        return PR_SHUT;
    if (entry->whole && plan->collective == PR_ALLGATHER) /* its block lies at its place */
        source += plan->starts[e->rank] * plan->size;
    int code = pr_shared_start(plan, source, target);
    e->light += code != PR_BUSY;
    if (code == PR_PENDING)
        code = pr_shared_advance(e, PATIENCE_NS);
    e->left_waiting = code == PR_PENDING || code == PR_MISMATCH;
    return code == PR_BUSY ? PR_SHUT : code;
}

int pr_door_call(struct pr_door *door, uintptr_t send, uintptr_t recv)
{
    if (door == NULL || head_bytes == 0)
        return PR_SHUT;
    struct pr_shared *e = door->engine;
    int code = PR_SHUT;
    if (atomic_exchange(&e->entered, 1))
        return PR_SHUT;
    code = enter(door, fields(send), fields(recv));
    atomic_store(&e->entered, 0);
    return code;
}

int pr_door_start(struct pr_shared_plan *p, uintptr_t source, uintptr_t target)
{
    struct pr_shared *e = p->engine;
    int code = PR_SHUT;
    if (atomic_exchange(&e->entered, 1))
        return PR_SHUT;
    if (atomic_load(&e->open) && e->plan == NULL) {
        code = pr_shared_start(p, source, target);
        e->light++;
    }
    atomic_store(&e->entered, 0);
    return code;
}

int pr_door_wait(struct pr_shared_plan *p)
{
    struct pr_shared *e = p->engine;
    int code = PR_SHUT;
    if (atomic_exchange(&e->entered, 1))
        return PR_SHUT;
    if (atomic_load(&e->open) && e->plan == p)
        code = pr_shared_advance(e, PATIENCE_NS);
    atomic_store(&e->entered, 0);
    return code;
}

int pr_door_waiting(const struct pr_shared *e)
{
    return e->left_waiting;
}

void pr_door_taken_over(struct pr_shared *e)
{
    e->left_waiting = 0;
}

uint64_t pr_door_calls(const struct pr_shared *e)
{
    return e->light;
}

int pr_door_shut(struct pr_shared *e)
{
    atomic_store(&e->open, 0);
    return atomic_load(&e->entered) ? PR_BUSY : PR_OK;
}

void pr_door_open(struct pr_shared *e)
{
    atomic_store(&e->open, 1);
}
