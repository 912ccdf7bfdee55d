/* The interface of the C core, and at the same time the cffi cdef: build_core.py drops the lines that start with '#'.
 *
 * Plain C11 without mpi.h or Python.h. Addresses travel as uintptr_t, so that Python passes plain ints. Every function
 * that can fail returns a code of enum pr_code; pyreduce/ops.py turns codes into exceptions.
 */
#ifndef PYREDUCE_CORE_H
#define PYREDUCE_CORE_H
#include <stddef.h>
#include <stdint.h>

/* The one table of codes: 0 is success, everything else is negative. */
enum pr_code {
    PR_OK = 0,
    PR_BAD_OP = -1,      /* no such op */
    PR_BAD_DTYPE = -2,   /* no such dtype */
    PR_BAD_PAIR = -3,    /* the op is not defined for the dtype */
    PR_BAD_COUNT = -4,   /* k < 1 */
    PR_BAD_DIVISOR = -5, /* not positive, or not exact in float32 */
    PR_BAD_ISA = -6      /* PYREDUCE_ISA names an instruction set that is unknown or not available here */
};

enum pr_op { PR_SUM, PR_PROD, PR_MIN, PR_MAX, PR_LAND, PR_LOR, PR_LXOR, PR_BAND, PR_BOR, PR_BXOR, PR_OP_COUNT };

enum pr_dtype {
    PR_BOOL,
    PR_INT8,
    PR_INT16,
    PR_INT32,
    PR_INT64,
    PR_UINT8,
    PR_UINT16,
    PR_UINT32,
    PR_UINT64,
    PR_FLOAT16,
    PR_BFLOAT16,
    PR_FLOAT32,
    PR_FLOAT64,
    PR_LONGDOUBLE,
    PR_COMPLEX64,
    PR_COMPLEX128,
    PR_DTYPE_COUNT
};

/* out[i] = ((s0[i] op s1[i]) op s2[i]) ... for i < n, in one pass over memory, for any k >= 1. out may be exactly one
 * of the sources, any of them; other overlaps are not allowed. Any alignment. Integers wrap; MIN and MAX propagate the
 * first NaN; logical ops give 0 or 1; k = 1 is a copy; float16 and bfloat16 are folded in float32 and rounded once, to
 * nearest even. All instruction sets give the same bits, but for which NaN a SUM or PROD
 * of several different NaNs becomes. */
int pr_fold(int op, int dtype, size_t n, uintptr_t out, const uintptr_t *srcs, int k);

/* pr_fold of two sources: saves Python a list, a third of the cost of a call. */
int pr_fold2(int op, int dtype, size_t n, uintptr_t out, uintptr_t first, uintptr_t second);

/* Copy bytes; they may overlap. */
void pr_copy(size_t nbytes, uintptr_t out, uintptr_t src);

/* out[i] = src[i] / divisor, rounded once (float16 and bfloat16 through float32, complex by component). out may be src.
 * divisor is a number of ranks: positive and exact in float32. */
int pr_divide(int dtype, size_t n, uintptr_t out, uintptr_t src, double divisor);

/* The instruction set in use, "baseline", "avx2" or "avx512"; NULL if PYREDUCE_ISA asks for one that is not there.
 * The environment is read once, by whichever call comes first. */
const char *pr_isa(void);

/* Signal cells: aligned 64-bit counters in memory that processes share. To add to one, or to set it, is a release; if
 * record is not 0, the count there, which belongs to the caller, goes up by one first. */
void pr_cell_add(uintptr_t cell, int64_t value, uintptr_t record);
void pr_cell_set(uintptr_t cell, int64_t value, uintptr_t record);

/* The value, as an acquire. */
int64_t pr_cell_read(uintptr_t cell);

/* Replace expected by desired; returns what was there, which is expected if it succeeded. */
int64_t pr_cell_compare_and_swap(uintptr_t cell, int64_t expected, int64_t desired);

/* Look up to so many times (one at least) whether the cell is at least, or exactly, expected: 1 if so, then as an acquire, else 0. */
int pr_cell_look(uintptr_t cell, int64_t expected, int times);
int pr_cell_look_equal(uintptr_t cell, int64_t expected, int times);

/* The same for some time, yielding the core after so many looks. */
int pr_cell_wait(uintptr_t cell, int64_t expected, int equal, int times, int64_t nanoseconds);

#endif
