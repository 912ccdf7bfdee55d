/* Threads as ranks over the signal cells, for the sanitizers: data published by a notify must be there after the wait.
 *
 * Rank r writes a slot of its right neighbour, notifies it, waits for its left neighbour, checks, and says that the slot
 * may be written again: two cells a rank, two slots, random delays at every publication. Meanwhile all ranks add to one
 * cell, and take turns at a lock made of compare-and-swap around a plain counter. Exits with 1 on a wrong value.
 */
#define _DEFAULT_SOURCE
#include "core.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 8, LENGTH = 33, LINE = 128 };

struct rank {
    _Alignas(LINE) int64_t arrived;
    _Alignas(LINE) int64_t done;
    _Alignas(LINE) int64_t record;
    _Alignas(LINE) int64_t slot[2][LENGTH];
};

static struct rank ranks[MOST];
static _Alignas(LINE) int64_t sum;
static _Alignas(LINE) int64_t lock;
static int64_t guarded;
static int nranks, rounds, failures;

static uintptr_t at(int64_t *word) { return (uintptr_t)word; }

static void delay(unsigned *seed)
{
    int kind = rand_r(seed) % 64;
    if (kind == 0)
        usleep(rand_r(seed) % 50);
    else if (kind < 8)
        sched_yield();
}

static void await(int64_t *cell, int64_t expected, unsigned *seed)
{
    int times = 1 + rand_r(seed) % 50;
    if (pr_cell_look(at(cell), expected, times))
        return;
    while (!pr_cell_wait(at(cell), expected, 0, times, 20000))
        ;
}

static void *run(void *which)
{
    int r = (int)(intptr_t)which;
    struct rank *own = &ranks[r], *right = &ranks[(r + 1) % nranks], *left = &ranks[(r + nranks - 1) % nranks];
    int source = (r + nranks - 1) % nranks;
    unsigned seed = 17u * (unsigned)r + 1;
    for (int64_t n = 1; n <= rounds; n++) {
        if (n > 2)
            await(&own->done, n - 2, &seed);
        for (int i = 0; i < LENGTH; i++)
            right->slot[n % 2][i] = n * 1000 + r * 100 + i;
        delay(&seed);
        if (n % 3 == 0)
            pr_cell_set(at(&right->arrived), n, at(&own->record)); /* one writer: a set does as well as an add */
        else
            pr_cell_add(at(&right->arrived), 1, at(&own->record));
        await(&own->arrived, n, &seed);
        for (int i = 0; i < LENGTH; i++)
            if (own->slot[n % 2][i] != n * 1000 + source * 100 + i)
                __atomic_fetch_add(&failures, 1, __ATOMIC_RELAXED);
        delay(&seed);
        pr_cell_add(at(&left->done), 1, 0);
        pr_cell_add(at(&sum), r + 1, 0);
        if (n % 4 == 0) {
            while (pr_cell_compare_and_swap(at(&lock), 0, r + 1) != 0)
                sched_yield();
            guarded += 1;
            delay(&seed);
            if (pr_cell_compare_and_swap(at(&lock), r + 1, 0) != r + 1)
                __atomic_fetch_add(&failures, 1, __ATOMIC_RELAXED);
        }
    }
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t threads[MOST];
    if (argc != 3)
        return 2;
    nranks = atoi(argv[1]);
    rounds = atoi(argv[2]);
    if (nranks < 1 || nranks > MOST)
        return 2;
    for (int r = 0; r < nranks; r++)
        if (pthread_create(&threads[r], NULL, run, (void *)(intptr_t)r))
            return 2;
    for (int r = 0; r < nranks; r++)
        pthread_join(threads[r], NULL);
    int64_t each = (int64_t)nranks * (nranks + 1) / 2;
    if (pr_cell_read(at(&sum)) != each * rounds || !pr_cell_look_equal(at(&sum), each * rounds, 1) ||
        guarded != (int64_t)nranks * (rounds / 4) || ranks[0].record != rounds)
        failures++;
    printf("%d ranks, %d rounds: %d wrong\n", nranks, rounds, failures);
    return failures != 0;
}
