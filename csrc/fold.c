/* pr_fold and pr_divide: check the arguments, find the kernel, and choose how the result is stored.
 *
 * A result larger than any cache is stored past it (streaming): ordinary stores first read every line that they are
 * about to overwrite, a third of the traffic of a two-source fold. For that the kernel folds a tile into a buffer that
 * stays in the L1 cache, and the tile goes out with non-temporal stores. Smaller results are stored as usual, since
 * somebody is about to send or read them. Never when out is a source: its lines are in the cache already.
 */
#include "kernels.h"

#include <string.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

static const unsigned char dtype_size[PR_DTYPE_COUNT] = {
    [PR_BOOL] = 1,    [PR_INT8] = 1,    [PR_INT16] = 2,    [PR_INT32] = 4,     [PR_INT64] = 8,   [PR_UINT8] = 1,
    [PR_UINT16] = 2,  [PR_UINT32] = 4,  [PR_UINT64] = 8,   [PR_FLOAT16] = 2,   [PR_BFLOAT16] = 2, [PR_FLOAT32] = 4,
    [PR_FLOAT64] = 8, [PR_LONGDOUBLE] = sizeof(long double), [PR_COMPLEX64] = 8, [PR_COMPLEX128] = 16,
};

#if defined(__x86_64__)
enum { STREAM_FROM = 8 << 20, STREAM_TILE = 4096, LINE = 64 };

static int may_stream(size_t n, size_t size, uintptr_t out, const uintptr_t *srcs, int k)
{
    if (n < STREAM_FROM / size || out % size != 0)
        return 0;
    for (int j = 0; j < k; j++)
        if (srcs[j] == out)
            return 0;
    return 1;
}

static void fold_streaming(pr_fold_kernel *kernel, size_t n, size_t size, uintptr_t out, const uintptr_t *srcs, int k)
{
    _Alignas(64) char tile[STREAM_TILE];
    size_t head = (LINE - out % LINE) % LINE / size, step = STREAM_TILE / size;
    kernel((void *)out, srcs, k, 0, head);
    for (size_t start = head; start < n; start += step) {
        size_t m = n - start < step ? n - start : step, bytes = m * size, whole = bytes - bytes % LINE;
        char *to = (char *)out + start * size;
        kernel(tile, srcs, k, start, m);
        for (size_t at = 0; at < whole; at += LINE) {
            __m128i *line = (__m128i *)(void *)(to + at);
            const __m128i *from = (const __m128i *)(const void *)(tile + at);
            __m128i a = _mm_load_si128(from), b = _mm_load_si128(from + 1);
            __m128i c = _mm_load_si128(from + 2), d = _mm_load_si128(from + 3);
            _mm_stream_si128(line, a);
            _mm_stream_si128(line + 1, b);
            _mm_stream_si128(line + 2, c);
            _mm_stream_si128(line + 3, d);
        }
        memcpy(to + whole, tile + whole, bytes - whole);
    }
    _mm_sfence(); /* whoever is told that the result is there must see it */
}
#endif

int pr_fold(int op, int dtype, size_t n, uintptr_t out, const uintptr_t *srcs, int k)
{
    const struct pr_kernels *table = pr_choose_kernels();
    if (table == NULL)
        return PR_BAD_ISA;
    if (op < 0 || op >= PR_OP_COUNT)
        return PR_BAD_OP;
    if (dtype < 0 || dtype >= PR_DTYPE_COUNT)
        return PR_BAD_DTYPE;
    if (k < 1)
        return PR_BAD_COUNT;
    if (op == PR_SUM && (dtype == PR_COMPLEX64 || dtype == PR_COMPLEX128)) {
        dtype = dtype == PR_COMPLEX64 ? PR_FLOAT32 : PR_FLOAT64;
        n *= 2;
    } else if (op >= PR_BAND && dtype >= PR_INT8 && dtype <= PR_UINT64) {
        n *= dtype_size[dtype];
        dtype = PR_UINT8;
    }
    pr_fold_kernel *kernel = table->fold[op][dtype];
    size_t size = dtype_size[dtype];
    if (kernel == NULL)
        return PR_BAD_PAIR;
    if (n == 0)
        return PR_OK;
    if (k == 1) {
        memmove((void *)out, (const void *)srcs[0], n * size);
        return PR_OK;
    }
#if defined(__x86_64__)
    if (may_stream(n, size, out, srcs, k)) {
        fold_streaming(kernel, n, size, out, srcs, k);
        return PR_OK;
    }
#endif
    kernel((void *)out, srcs, k, 0, n);
    return PR_OK;
}

int pr_fold2(int op, int dtype, size_t n, uintptr_t out, uintptr_t first, uintptr_t second)
{
    const uintptr_t srcs[2] = {first, second};
    return pr_fold(op, dtype, n, out, srcs, 2);
}

void pr_copy(size_t nbytes, uintptr_t out, uintptr_t src)
{
    memmove((void *)out, (const void *)src, nbytes);
}

int pr_divide(int dtype, size_t n, uintptr_t out, uintptr_t src, double divisor)
{
    const struct pr_kernels *table = pr_choose_kernels();
    if (table == NULL)
        return PR_BAD_ISA;
    if (dtype < 0 || dtype >= PR_DTYPE_COUNT)
        return PR_BAD_DTYPE;
    if (!(divisor > 0) || divisor > 3e38 || (double)(float)divisor != divisor)
        return PR_BAD_DIVISOR;
    if (dtype == PR_COMPLEX64 || dtype == PR_COMPLEX128) {
        dtype = dtype == PR_COMPLEX64 ? PR_FLOAT32 : PR_FLOAT64;
        n *= 2;
    }
    if (table->divide[dtype] == NULL)
        return PR_BAD_PAIR;
    if (n > 0)
        table->divide[dtype]((void *)out, (const void *)src, n, divisor);
    return PR_OK;
}
