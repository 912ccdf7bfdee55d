/* Inside the core: the table of kernels that kernels.c builds for each instruction set and fold.c calls. */
#ifndef PYREDUCE_KERNELS_H
#define PYREDUCE_KERNELS_H
#include "core.h"

/* Folds elements [begin, begin + n) of the k sources into out[0, n), which may be exactly a source's place. */
typedef void pr_fold_kernel(void *out, const uintptr_t *srcs, int k, size_t begin, size_t n);
typedef void pr_divide_kernel(void *out, const void *src, size_t n, double divisor);

/* No entry: not defined for the dtype, or fold.c reaches it through another dtype (complex SUM, bitwise ops). */
struct pr_kernels {
    const char *name;
    pr_fold_kernel *fold[PR_OP_COUNT][PR_DTYPE_COUNT];
    pr_divide_kernel *divide[PR_DTYPE_COUNT];
};

/* The table in use, chosen at the first call; NULL if PYREDUCE_ISA asks for one that is not available. */
const struct pr_kernels *pr_choose_kernels(void);

#endif
