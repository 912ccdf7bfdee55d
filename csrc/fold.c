/* pr_fold and pr_divide: check the arguments, find the kernel, and choose how the result is stored.
 *
 * A result larger than any cache is stored past it (see copy.c): by a kernel made for that, or else the usual kernel
 * folds a tile into a buffer that stays in the L1 cache, and the tile goes out with streaming stores. Smaller results
 * are stored as usual, since somebody is about to send or read them. Never when out is a source: its lines are in the
 * cache already.
 */
#include "kernels.h"

#include <string.h>

enum { STREAM_FROM = 8 << 20, TILE = 4096, LINE = 64 };

static const unsigned char dtype_size[PR_DTYPE_COUNT] = {
    [PR_BOOL] = 1,    [PR_INT8] = 1,    [PR_INT16] = 2,    [PR_INT32] = 4,     [PR_INT64] = 8,   [PR_UINT8] = 1,
    [PR_UINT16] = 2,  [PR_UINT32] = 4,  [PR_UINT64] = 8,   [PR_FLOAT16] = 2,   [PR_BFLOAT16] = 2, [PR_FLOAT32] = 4,
    [PR_FLOAT64] = 8, [PR_LONGDOUBLE] = sizeof(long double), [PR_COMPLEX64] = 8, [PR_COMPLEX128] = 16,
};

static int is_complex(int dtype)
{
    return dtype == PR_COMPLEX64 || dtype == PR_COMPLEX128;
}

static int divisor_is_good(double divisor)
{
    return divisor > 0 && divisor <= 3e38 && (double)(float)divisor == divisor;
}

int pr_find_folding(int op, int dtype, double divisor, struct pr_folding *found)
{
    const struct pr_kernels *table = pr_choose_kernels();
    if (table == NULL)
        return PR_BAD_ISA;
    if (op < 0 || op >= PR_OP_COUNT)
        return PR_BAD_OP;
    if (dtype < 0 || dtype >= PR_DTYPE_COUNT)
        return PR_BAD_DTYPE;
    if (divisor != 0 && !divisor_is_good(divisor))
        return PR_BAD_DIVISOR;
    size_t per = 1;
    if (op == PR_SUM && is_complex(dtype)) {
        dtype = dtype == PR_COMPLEX64 ? PR_FLOAT32 : PR_FLOAT64;
        per = 2;
    } else if (op >= PR_BAND && dtype >= PR_INT8 && dtype <= PR_UINT64) {
        per = dtype_size[dtype];
        dtype = PR_UINT8;
    }
    *found = (struct pr_folding){.kernel = table->fold[op][dtype], .divisor = divisor, .size = dtype_size[dtype],
                                 .per = per};
    if (divisor == 0 && op == PR_SUM)
        found->stream = table->stream_sum[dtype];
    if (divisor != 0) {
        found->mean = table->mean[dtype];
        found->divide = table->divide[dtype];
    }
    return found->kernel == NULL || (divisor != 0 && found->divide == NULL) ? PR_BAD_PAIR : PR_OK;
}

static void fold_tile(const struct pr_folding *f, char *to, const uintptr_t *srcs, int k, size_t begin, size_t n)
{
    if (f->mean != NULL) {
        f->mean(to, srcs, k, begin, n, f->divisor);
        return;
    }
    f->kernel(to, srcs, k, begin, n);
    if (f->divide != NULL)
        f->divide(to, to, n, f->divisor);
}

static int is_among(uintptr_t out, const uintptr_t *srcs, int k)
{
    for (int j = 0; j < k; j++)
        if (srcs[j] == out)
            return 1;
    return 0;
}

/* In one loop: the elements before the first whole line and after the last are folded as usual. */
static void fold_streaming(const struct pr_folding *f, size_t n, char *out, const uintptr_t *srcs, int k)
{
    size_t size = f->size, head = (LINE - (uintptr_t)out % LINE) % LINE / size;
    head = head < n ? head : n;
    size_t middle = (n - head) * size / LINE * LINE / size, tail = head + middle;
    f->kernel(out, srcs, k, 0, head);
    if (middle > 0)
        f->stream(out + head * size, srcs, k, head, middle);
    f->kernel(out + tail * size, srcs, k, tail, n - tail);
}

void pr_fold_out(const struct pr_folding *f, size_t n, char *out, char *keep, const uintptr_t *srcs, int k, int stream)
{
    size_t size = f->size, whole = n * f->per, step = TILE / size;
    if (k == 1) { /* nothing is folded: a logical op of one operand, too, is a copy */
        if ((uintptr_t)out != srcs[0])
            pr_copy_out(out, (const char *)srcs[0], whole * size, stream);
        if (keep != NULL)
            memcpy(keep, (const char *)srcs[0], whole * size);
        return;
    }
    stream &= (uintptr_t)out % size == 0; /* or tiles would never begin on a line */
    if (!stream && keep == NULL && f->divide == NULL) {
        f->kernel(out, srcs, k, 0, whole);
        return;
    }
    if (stream && keep == NULL && f->stream != NULL && k <= PR_STREAM_MOST && !is_among((uintptr_t)out, srcs, k)) {
        fold_streaming(f, whole, out, srcs, k);
        return;
    }
    _Alignas(LINE) char tile[TILE];
    size_t m = stream ? (LINE - (uintptr_t)out % LINE) % LINE / size : 0;
    for (size_t start = 0; start < whole; start += m, m = 0) {
        if (m == 0 || m > whole - start)
            m = whole - start < step ? whole - start : step;
        char *to = keep != NULL ? keep + start * size : stream ? tile : out + start * size;
        fold_tile(f, to, srcs, k, start, m);
        if (to != out + start * size)
            pr_copy_out(out + start * size, to, m * size, stream);
    }
}

static int may_stream(size_t nbytes, uintptr_t out, const uintptr_t *srcs, int k)
{
    return nbytes >= STREAM_FROM && !is_among(out, srcs, k);
}

int pr_fold(int op, int dtype, size_t n, uintptr_t out, const uintptr_t *srcs, int k)
{
    struct pr_folding f;
    int code = pr_find_folding(op, dtype, 0, &f);
    if (code != PR_OK)
        return code;
    if (k < 1)
        return PR_BAD_COUNT;
    if (n == 0)
        return PR_OK;
    if (k == 1) {
        memmove((void *)out, (const void *)srcs[0], n * f.per * f.size);
        return PR_OK;
    }
    int stream = may_stream(n * f.per * f.size, out, srcs, k);
    pr_fold_out(&f, n, (char *)out, NULL, srcs, k, stream);
    if (stream)
        pr_end_stream(); /* whoever is told that the result is there must see it */
    return PR_OK;
}

int pr_fold2(int op, int dtype, size_t n, uintptr_t out, uintptr_t first, uintptr_t second)
{
    const uintptr_t srcs[2] = {first, second};
    return pr_fold(op, dtype, n, out, srcs, 2);
}

int pr_divide(int dtype, size_t n, uintptr_t out, uintptr_t src, double divisor)
{
    const struct pr_kernels *table = pr_choose_kernels();
    if (table == NULL)
        return PR_BAD_ISA;
    if (dtype < 0 || dtype >= PR_DTYPE_COUNT)
        return PR_BAD_DTYPE;
    if (!divisor_is_good(divisor))
        return PR_BAD_DIVISOR;
    if (is_complex(dtype)) {
        dtype = dtype == PR_COMPLEX64 ? PR_FLOAT32 : PR_FLOAT64;
        n *= 2;
    }
    if (table->divide[dtype] == NULL)
        return PR_BAD_PAIR;
    if (n > 0)
        table->divide[dtype]((void *)out, (const void *)src, n, divisor);
    return PR_OK;
}
