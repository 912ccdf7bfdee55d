/* Signal cells in shared memory: 64-bit counters that one rank raises and another waits for.
 *
 * Publication: a notify is a release, a wait that is satisfied (and a read) is an acquire. So what a rank has written,
 * to its own memory or to a peer's, before it notifies is seen by whoever waits for that notify. Nothing else orders
 * data: they are plain stores.
 */
#define _DEFAULT_SOURCE
#include "core.h"
#include "wait.h"

#include <sched.h>
#include <stdatomic.h>

typedef _Atomic int64_t cell_t;

static int satisfied(cell_t *cell, int64_t expected, int equal)
{
    int64_t value = atomic_load_explicit(cell, memory_order_acquire);
    return equal ? value == expected : value >= expected;
}

static void count(uintptr_t record)
{
    if (record != 0) { /* only its owner writes it; peers may look */
        cell_t *notifies = (cell_t *)record;
        int64_t before = atomic_load_explicit(notifies, memory_order_relaxed);
        atomic_store_explicit(notifies, before + 1, memory_order_relaxed);
    }
}

void pr_cell_add(uintptr_t cell, int64_t value, uintptr_t record)
{
    count(record);
    atomic_fetch_add_explicit((cell_t *)cell, value, memory_order_release);
}

void pr_cell_set(uintptr_t cell, int64_t value, uintptr_t record)
{
    count(record);
    atomic_store_explicit((cell_t *)cell, value, memory_order_release);
}

int64_t pr_cell_read(uintptr_t cell)
{
    return atomic_load_explicit((cell_t *)cell, memory_order_acquire);
}

int64_t pr_cell_compare_and_swap(uintptr_t cell, int64_t expected, int64_t desired)
{
    atomic_compare_exchange_strong_explicit((cell_t *)cell, &expected, desired, memory_order_acq_rel,
                                            memory_order_acquire);
    return expected;
}

static int look(cell_t *cell, int64_t expected, int equal, int times)
{
    for (int i = 0; i < times; i++) {
        if (satisfied(cell, expected, equal))
            return 1;
        pr_relax();
    }
    return 0;
}

int pr_cell_look(uintptr_t cell, int64_t expected, int times)
{
    return look((cell_t *)cell, expected, 0, times);
}

int pr_cell_look_equal(uintptr_t cell, int64_t expected, int times)
{
    return look((cell_t *)cell, expected, 1, times);
}

int pr_cell_wait(uintptr_t cell, int64_t expected, int equal, int times, int64_t nanoseconds)
{
    int64_t end = pr_now() + nanoseconds;
    do {
        if (look((cell_t *)cell, expected, equal, times))
            return 1;
        sched_yield(); /* ranks may outnumber cores: the peer may need this one */
    } while (pr_now() < end);
    return 0;
}
