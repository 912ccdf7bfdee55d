/* Inside the core: the table of kernels that kernels.c builds for each instruction set and fold.c calls. */
#ifndef PYREDUCE_KERNELS_H
#define PYREDUCE_KERNELS_H
#include "core.h"

/* Folds elements [begin, begin + n) of the k sources into out[0, n), which may be exactly a source's place. */
typedef void pr_fold_kernel(void *out, const uintptr_t *srcs, int k, size_t begin, size_t n);
typedef void pr_divide_kernel(void *out, const void *src, size_t n, double divisor);

typedef void pr_mean_kernel(void *out, const uintptr_t *srcs, int k, size_t begin, size_t n, double divisor);

/* A SUM whose result goes past the caches. out begins on a line of 64 bytes and n is whole lines; 2 <= k <=
 * PR_STREAM_MOST; no source is written. */
enum { PR_STREAM_MOST = 4 };
typedef void pr_stream_kernel(void *out, const uintptr_t *srcs, int k, size_t begin, size_t n);

/* No entry: not defined for the dtype, or fold.c reaches it through another dtype (complex SUM, bitwise ops). */
struct pr_kernels {
    const char *name;
    pr_fold_kernel *fold[PR_OP_COUNT][PR_DTYPE_COUNT];
    pr_divide_kernel *divide[PR_DTYPE_COUNT];
    pr_stream_kernel *stream_sum[PR_DTYPE_COUNT]; /* or NULL */
    pr_mean_kernel *mean[PR_DTYPE_COUNT]; /* of 16-bit floats: summed and divided in float32, rounded once */
};

/* The table in use, chosen at the first call; NULL if PYREDUCE_ISA asks for one that is not available. */
const struct pr_kernels *pr_choose_kernels(void);

/* A fold made ready: the kernel, and in what terms it counts. */
struct pr_folding {
    pr_fold_kernel *kernel;
    pr_divide_kernel *divide; /* or NULL; applied to what the kernel has folded */
    pr_stream_kernel *stream; /* or NULL: the kernel, in a form that streams */
    pr_mean_kernel *mean;     /* or NULL; in the place of kernel and divide */
    double divisor;
    size_t size; /* bytes of an element of the kernel */
    size_t per;  /* the kernel's elements per element of the dtype: 2 for the SUM of complex numbers */
};

/* Fill in a folding; divisor 0 for none. Returns a code. */
int pr_find_folding(int op, int dtype, double divisor, struct pr_folding *found);

/* Fold n elements into out, and into keep as well unless it is NULL. out may be a source, or else may be streamed. */
void pr_fold_out(const struct pr_folding *f, size_t n, char *out, char *keep, const uintptr_t *srcs, int k, int stream);

/* Copy to memory that is next read by nobody soon, past the caches if stream says so; the regions are apart. */
void pr_copy_out(char *out, const char *src, size_t nbytes, int stream);

/* Copy from memory that is not in the caches yet, to memory that shall be; the regions are apart. */
void pr_copy_in(char *out, const char *src, size_t nbytes);

/* Order streaming stores before whatever follows. */
void pr_end_stream(void);

#endif
