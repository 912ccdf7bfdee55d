/* Signal cells in shared memory: 64-bit counters that one rank raises and another waits for.
 *
 * Publication: a notify is a release, a wait that is satisfied (and a read) is an acquire. So what a rank has written,
 * to its own memory or to a peer's, before it notifies is seen by whoever waits for that notify. Nothing else orders
 * data: they are plain stores.
 */
#define _DEFAULT_SOURCE
#include "core.h"

#include <sched.h>
#include <stdatomic.h>
#include <time.h>

typedef _Atomic int64_t cell_t;

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int satisfied(cell_t *cell, int64_t expected, int equal)
{
    int64_t value = atomic_load_explicit(cell, memory_order_acquire);
    return equal ? value == expected : value >= expected;
}

void pr_cell_notify(uintptr_t cell, int64_t value, int set, uintptr_t record)
{
    if (record != 0) { /* only its owner writes it; peers may look */
        cell_t *count = (cell_t *)record;
        atomic_store_explicit(count, atomic_load_explicit(count, memory_order_relaxed) + 1, memory_order_relaxed);
    }
    if (set)
        atomic_store_explicit((cell_t *)cell, value, memory_order_release);
    else
        atomic_fetch_add_explicit((cell_t *)cell, value, memory_order_release);
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

int pr_cell_wait(uintptr_t cell, int64_t expected, int equal, int spins, int64_t nanoseconds)
{
    cell_t *watched = (cell_t *)cell;
    int64_t end = 0;
    for (;;) {
        for (int i = 0; i < spins; i++) {
            if (satisfied(watched, expected, equal))
                return 1;
            relax();
        }
        if (nanoseconds <= 0)
            return satisfied(watched, expected, equal);
        if (end == 0)
            end = now() + nanoseconds;
        else if (now() >= end)
            return satisfied(watched, expected, equal);
        sched_yield(); /* ranks may outnumber cores: the peer may need this one */
    }
}
