/* Inside the core: what every loop that waits for another rank's store is made of. */
#ifndef PYREDUCE_WAIT_H
#define PYREDUCE_WAIT_H
#include <stdint.h>
#include <time.h>

/* Tell the core that this is a spinning loop. */
static inline void pr_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int64_t pr_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#endif
