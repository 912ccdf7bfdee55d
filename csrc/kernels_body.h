/* The loops of kernels.c for one instruction set; included several times, so without a guard. See kernels.c for what
 * must be defined; the definitions are dropped again at the end.
 *
 * FOLD makes one kernel for an op and a dtype:
 *   T       the element in memory          A       the value computed with (float for float16)
 *   W       elements a value of A holds    LOAD(p), STORE(p, v), OP(a, b)
 * FUSE: up to four sources are folded in registers. More go through a tile of accumulators that stays in the L1
 * cache, four sources at a time: still one pass over memory. Without FUSE all do, one source at a time: less code for
 * less common pairs, and nearly as fast where memory is the limit. A tile of the output is written only after all
 * sources' have been read, so out may be any source. With W > 1 the last n % W elements are padded to one value.
 */
#ifndef TILE_BYTES
#define TILE_BYTES 4096
/* The source that j-th comes, at element i of the range. */
#define SRC(j) ((const T *)srcs[j] + begin)
#define EACH(count, statement)                                                                                        \
    INDEPENDENT for (size_t i = 0; i < (count); i += W) { statement; }
#endif

#define FOLD(name, T_, A_, W_, FUSE, LOAD, STORE, OP)                                                                 \
    TARGET static void ISA(name)(void *to, const uintptr_t *srcs, int k, size_t begin, size_t n)                      \
    {                                                                                                                 \
        typedef T_ T;                                                                                                 \
        typedef A_ A;                                                                                                 \
        enum { W = W_, TILE = TILE_BYTES / sizeof(A) * W };                                                           \
        T *out = to;                                                                                                  \
        size_t whole = n - n % W;                                                                                     \
        const T *p0 = SRC(0), *p1 = SRC(1), *p2 = SRC(k > 2 ? 2 : 0), *p3 = SRC(k > 3 ? 3 : 0);           \
        if (FUSE && k == 2)                                                                                      \
            EACH(whole, STORE(out + i, OP(LOAD(p0 + i), LOAD(p1 + i))))                                               \
        else if (FUSE && k == 3)                                                                                      \
            EACH(whole, A a = OP(LOAD(p0 + i), LOAD(p1 + i)); STORE(out + i, OP(a, LOAD(p2 + i))))                    \
        else if (FUSE && k == 4)                                                                                      \
            EACH(whole, A a = OP(LOAD(p0 + i), LOAD(p1 + i)); A b = OP(a, LOAD(p2 + i));                              \
                 STORE(out + i, OP(b, LOAD(p3 + i))))                                                                 \
        else                                                                                                          \
            for (size_t start = 0; start < whole; start += TILE) {                                                    \
                A acc[TILE / W];                                                                                      \
                size_t m = whole - start < TILE ? whole - start : TILE;                                               \
                int j = FUSE ? 4 : 1;                                                                                 \
                if (FUSE)                                                                                             \
                    EACH(m, A a = OP(LOAD(p0 + start + i), LOAD(p1 + start + i)); A b = OP(a, LOAD(p2 + start + i));  \
                         acc[i / W] = OP(b, LOAD(p3 + start + i)))                                                    \
                else                                                                                                  \
                    EACH(m, acc[i / W] = LOAD(p0 + start + i))                                                        \
                for (; FUSE && j + 4 <= k; j += 4) {                                                                  \
                    const T *q0 = SRC(j) + start, *q1 = SRC(j + 1) + start;                                           \
                    const T *q2 = SRC(j + 2) + start, *q3 = SRC(j + 3) + start;                                       \
                    EACH(m, A a = OP(acc[i / W], LOAD(q0 + i)); A b = OP(a, LOAD(q1 + i));                            \
                         A c = OP(b, LOAD(q2 + i)); acc[i / W] = OP(c, LOAD(q3 + i)))                                 \
                }                                                                                                     \
                for (; j < k; j++) {                                                                                  \
                    const T *q = SRC(j) + start;                                                                      \
                    EACH(m, acc[i / W] = OP(acc[i / W], LOAD(q + i)))                                                 \
                }                                                                                                     \
                EACH(m, STORE(out + start + i, acc[i / W]))                                                           \
            }                                                                                                         \
        if (whole < n) {                                                                                              \
            T pad[W] = {0};                                                                                           \
            size_t rest = (n - whole) * sizeof(T);                                                                    \
            memcpy(pad, p0 + whole, rest);                                                                            \
            A a = LOAD(pad);                                                                                          \
            for (int j = 1; j < k; j++) {                                                                             \
                memcpy(pad, SRC(j) + whole, rest);                                                                    \
                a = OP(a, LOAD(pad));                                                                                 \
            }                                                                                                         \
            STORE(pad, a);                                                                                            \
            memcpy(out + whole, pad, rest);                                                                           \
        }                                                                                                             \
    }

#define DIVIDE(name, T_, A_, W_, LOAD, STORE, OP, SPREAD)                                                             \
    TARGET static void ISA(name)(void *to, const void *from, size_t n, double divisor)                                \
    {                                                                                                                 \
        typedef T_ T;                                                                                                 \
        typedef A_ A;                                                                                                 \
        enum { W = W_ };                                                                                              \
        T *out = to;                                                                                                  \
        const T *p = from;                                                                                            \
        size_t whole = n - n % W;                                                                                     \
        A d = SPREAD(divisor);                                                                                        \
        EACH(whole, STORE(out + i, OP(LOAD(p + i), d)))                                                               \
        if (whole < n) {                                                                                              \
            T pad[W] = {0};                                                                                           \
            memcpy(pad, p + whole, (n - whole) * sizeof(T));                                                          \
            STORE(pad, OP(LOAD(pad), d));                                                                             \
            memcpy(out + whole, pad, (n - whole) * sizeof(T));                                                        \
        }                                                                                                             \
    }

/* The mean of narrow floats: like FOLD without FUSE, but divided before it is rounded. */
#define MEAN(name, T_, A_, W_, LOAD, STORE, ADD_, DIVIDE_, SPREAD)                                                    \
    TARGET static void ISA(name)(void *to, const uintptr_t *srcs, int k, size_t begin, size_t n, double divisor)      \
    {                                                                                                                 \
        typedef T_ T;                                                                                                 \
        typedef A_ A;                                                                                                 \
        enum { W = W_, TILE = TILE_BYTES / sizeof(A) * W };                                                           \
        T *out = to;                                                                                                  \
        size_t whole = n - n % W;                                                                                     \
        const T *p = SRC(0);                                                                                          \
        A d = SPREAD(divisor);                                                                                        \
        for (size_t start = 0; start < whole; start += TILE) {                                                        \
            A acc[TILE / W];                                                                                          \
            size_t m = whole - start < TILE ? whole - start : TILE;                                                   \
            EACH(m, acc[i / W] = LOAD(p + start + i))                                                                 \
            for (int j = 1; j < k; j++) {                                                                             \
                const T *q = SRC(j) + start;                                                                          \
                EACH(m, acc[i / W] = ADD_(acc[i / W], LOAD(q + i)))                                                   \
            }                                                                                                         \
            EACH(m, STORE(out + start + i, DIVIDE_(acc[i / W], d)))                                                   \
        }                                                                                                             \
        if (whole < n) {                                                                                              \
            T pad[W] = {0};                                                                                           \
            size_t rest = (n - whole) * sizeof(T);                                                                    \
            memcpy(pad, p + whole, rest);                                                                             \
            A a = LOAD(pad);                                                                                          \
            for (int j = 1; j < k; j++) {                                                                             \
                memcpy(pad, SRC(j) + whole, rest);                                                                    \
                a = ADD_(a, LOAD(pad));                                                                               \
            }                                                                                                         \
            STORE(pad, DIVIDE_(a, d));                                                                                \
            memcpy(out + whole, pad, rest);                                                                           \
        }                                                                                                             \
    }

/* SUM with streaming stores, in whole vectors: compilers have no way of saying "store this past the caches" that they
 * would also vectorise. One loop, so that loads go on while stores drain: folding into a tile first costs a third. */
#ifdef STREAM_STORE
#define STREAM_SUM(T_)                                                                                                \
    TARGET static void ISA(stream_##T_)(void *to, const uintptr_t *srcs, int k, size_t begin, size_t n)               \
    {                                                                                                                 \
        typedef T_ T;                                                                                                 \
        typedef T_ V __attribute__((vector_size(STREAM_BYTES), aligned(1), may_alias));                               \
        enum { W = STREAM_BYTES / sizeof(T) };                                                                        \
        T *out = to;                                                                                                  \
        const T *p0 = SRC(0), *p1 = SRC(1), *p2 = SRC(k > 2 ? 2 : 0), *p3 = SRC(k > 3 ? 3 : 0);                       \
        if (k == 2)                                                                                                   \
            for (size_t i = 0; i < n; i += W)                                                                         \
                STREAM_STORE(out + i, AT(p0) + AT(p1));                                                               \
        else if (k == 3)                                                                                              \
            for (size_t i = 0; i < n; i += W)                                                                         \
                STREAM_STORE(out + i, AT(p0) + AT(p1) + AT(p2));                                                      \
        else                                                                                                          \
            for (size_t i = 0; i < n; i += W)                                                                         \
                STREAM_STORE(out + i, AT(p0) + AT(p1) + AT(p2) + AT(p3));                                             \
    }
#define AT(p) (*(const V *)(const void *)((p) + i))
#define ROW_STREAM                                                                                                    \
    [PR_INT8] = ISA(stream_u8), [PR_INT16] = ISA(stream_u16), [PR_INT32] = ISA(stream_u32),                           \
    [PR_INT64] = ISA(stream_u64), [PR_UINT8] = ISA(stream_u8), [PR_UINT16] = ISA(stream_u16),                         \
    [PR_UINT32] = ISA(stream_u32), [PR_UINT64] = ISA(stream_u64), [PR_FLOAT32] = ISA(stream_f32),                     \
    [PR_FLOAT64] = ISA(stream_f64)
#endif

#define FOLD_FUSED(name, T, OP) FOLD(name, T, T, 1, 1, LOAD_SAME, STORE_SAME, OP)
#define FOLD_SAME(name, T, OP) FOLD(name, T, T, 1, 0, LOAD_SAME, STORE_SAME, OP)
#define FOLD_TRUTH(name, T, OP) FOLD(name, T, T, 1, 0, LOAD_TRUTH, STORE_SAME, OP)
#define FOLD_UNSIGNED(T)                                                                                              \
    FOLD_FUSED(sum_##T, T, ADD)                                                                                       \
    FOLD_SAME(prod_##T, T, MULTIPLY_UNSIGNED)                                                                         \
    FOLD_SAME(min_##T, T, SMALLER)                                                                                    \
    FOLD_SAME(max_##T, T, LARGER)                                                                                     \
    FOLD_TRUTH(land_##T, T, AND)                                                                                      \
    FOLD_TRUTH(lor_##T, T, OR)                                                                                        \
    FOLD_TRUTH(lxor_##T, T, XOR)
#define FOLD_SIGNED(T)                                                                                                \
    FOLD_SAME(min_##T, T, SMALLER)                                                                                    \
    FOLD_SAME(max_##T, T, LARGER)
#define FOLD_FLOAT(T)                                                                                                 \
    FOLD_FUSED(sum_##T, T, ADD)                                                                                       \
    FOLD_SAME(prod_##T, T, MULTIPLY)                                                                                  \
    FOLD_SAME(min_##T, T, smaller_##T)                                                                                \
    FOLD_SAME(max_##T, T, larger_##T)                                                                                 \
    DIVIDE(divide_##T, T, T, 1, LOAD_SAME, STORE_SAME, QUOTIENT, (T))

FOLD_UNSIGNED(u8)
FOLD_UNSIGNED(u16)
FOLD_UNSIGNED(u32)
FOLD_UNSIGNED(u64)
FOLD_SIGNED(i8)
FOLD_SIGNED(i16)
FOLD_SIGNED(i32)
FOLD_SIGNED(i64)
FOLD_SAME(band, u8, AND)
FOLD_SAME(bor, u8, OR)
FOLD_SAME(bxor, u8, XOR)
FOLD_FLOAT(f32)
FOLD_FLOAT(f64)
FOLD_FLOAT(ld)
#ifndef COMPLEX_PROD
#define COMPLEX_PROD(T) ISA(prod_##T)
FOLD_SAME(prod_c64, c64, multiply_c64)
FOLD_SAME(prod_c128, c128, multiply_c128)
#endif
FOLD(sum_half, u16, HALF_VALUE, HALF_WIDTH, 1, HALF_LOAD, HALF_STORE, ADD)
FOLD(prod_half, u16, HALF_VALUE, HALF_WIDTH, 0, HALF_LOAD, HALF_STORE, MULTIPLY)
FOLD(min_half, u16, HALF_VALUE, HALF_WIDTH, 0, HALF_LOAD, HALF_STORE, HALF_MIN)
FOLD(max_half, u16, HALF_VALUE, HALF_WIDTH, 0, HALF_LOAD, HALF_STORE, HALF_MAX)
DIVIDE(divide_half, u16, HALF_VALUE, HALF_WIDTH, HALF_LOAD, HALF_STORE, QUOTIENT, HALF_SPREAD)
MEAN(mean_half, u16, HALF_VALUE, HALF_WIDTH, HALF_LOAD, HALF_STORE, ADD, QUOTIENT, HALF_SPREAD)
FOLD(sum_bfloat, u16, BFLOAT_VALUE, BFLOAT_WIDTH, 1, BFLOAT_LOAD, BFLOAT_STORE, BFLOAT_OP(add))
FOLD(prod_bfloat, u16, BFLOAT_VALUE, BFLOAT_WIDTH, 0, BFLOAT_LOAD, BFLOAT_STORE, BFLOAT_OP(multiply))
FOLD(min_bfloat, u16, BFLOAT_VALUE, BFLOAT_WIDTH, 0, BFLOAT_LOAD, BFLOAT_STORE, BFLOAT_OP(smaller))
FOLD(max_bfloat, u16, BFLOAT_VALUE, BFLOAT_WIDTH, 0, BFLOAT_LOAD, BFLOAT_STORE, BFLOAT_OP(larger))
DIVIDE(divide_bfloat, u16, BFLOAT_VALUE, BFLOAT_WIDTH, BFLOAT_LOAD, BFLOAT_STORE, BFLOAT_OP(divide), BFLOAT_SPREAD)
MEAN(mean_bfloat, u16, BFLOAT_VALUE, BFLOAT_WIDTH, BFLOAT_LOAD, BFLOAT_STORE, BFLOAT_OP(add), BFLOAT_OP(divide),
     BFLOAT_SPREAD)

#ifdef STREAM_STORE
STREAM_SUM(u8)
STREAM_SUM(u16)
STREAM_SUM(u32)
STREAM_SUM(u64)
STREAM_SUM(f32)
STREAM_SUM(f64)
#endif

#define ROW_UNSIGNED(op)                                                                                              \
    [PR_INT8] = ISA(op##_u8), [PR_INT16] = ISA(op##_u16), [PR_INT32] = ISA(op##_u32), [PR_INT64] = ISA(op##_u64),     \
    [PR_UINT8] = ISA(op##_u8), [PR_UINT16] = ISA(op##_u16), [PR_UINT32] = ISA(op##_u32), [PR_UINT64] = ISA(op##_u64)
#define ROW_ORDERED(op)                                                                                               \
    [PR_INT8] = ISA(op##_i8), [PR_INT16] = ISA(op##_i16), [PR_INT32] = ISA(op##_i32), [PR_INT64] = ISA(op##_i64),     \
    [PR_UINT8] = ISA(op##_u8), [PR_UINT16] = ISA(op##_u16), [PR_UINT32] = ISA(op##_u32), [PR_UINT64] = ISA(op##_u64)
#define ROW_FLOAT(op)                                                                                                 \
    [PR_FLOAT16] = ISA(op##_half), [PR_BFLOAT16] = ISA(op##_bfloat), [PR_FLOAT32] = ISA(op##_f32),                    \
    [PR_FLOAT64] = ISA(op##_f64), [PR_LONGDOUBLE] = ISA(op##_ld)

static const struct pr_kernels ISA(kernels) = {
    .name = ISA_NAME,
    .fold = {
        [PR_SUM] = {ROW_UNSIGNED(sum), ROW_FLOAT(sum)},
        [PR_PROD] = {ROW_UNSIGNED(prod), ROW_FLOAT(prod),
                     [PR_COMPLEX64] = COMPLEX_PROD(c64), [PR_COMPLEX128] = COMPLEX_PROD(c128)},
        [PR_MIN] = {[PR_BOOL] = ISA(land_u8), ROW_ORDERED(min), ROW_FLOAT(min)},
        [PR_MAX] = {[PR_BOOL] = ISA(lor_u8), ROW_ORDERED(max), ROW_FLOAT(max)},
        [PR_LAND] = {[PR_BOOL] = ISA(land_u8), ROW_UNSIGNED(land)},
        [PR_LOR] = {[PR_BOOL] = ISA(lor_u8), ROW_UNSIGNED(lor)},
        [PR_LXOR] = {[PR_BOOL] = ISA(lxor_u8), ROW_UNSIGNED(lxor)},
        [PR_BAND] = {[PR_BOOL] = ISA(land_u8), [PR_UINT8] = ISA(band)},
        [PR_BOR] = {[PR_BOOL] = ISA(lor_u8), [PR_UINT8] = ISA(bor)},
        [PR_BXOR] = {[PR_BOOL] = ISA(lxor_u8), [PR_UINT8] = ISA(bxor)},
    },
#ifdef STREAM_STORE
    .stream_sum = {ROW_STREAM},
#endif
    .divide = {ROW_FLOAT(divide)},
    .mean = {[PR_FLOAT16] = ISA(mean_half), [PR_BFLOAT16] = ISA(mean_bfloat)},
};

#undef FOLD
#undef DIVIDE
#undef MEAN
#undef STREAM_STORE
#undef STREAM_BYTES
#undef STREAM_SUM
#undef ROW_STREAM
#undef AT
#undef FOLD_FUSED
#undef FOLD_SAME
#undef FOLD_TRUTH
#undef FOLD_UNSIGNED
#undef FOLD_SIGNED
#undef FOLD_FLOAT
#undef ROW_UNSIGNED
#undef ROW_ORDERED
#undef ROW_FLOAT
#undef ISA
#undef ISA_NAME
#undef TARGET
#undef COMPLEX_PROD
#undef HALF_VALUE
#undef HALF_WIDTH
#undef HALF_LOAD
#undef HALF_STORE
#undef HALF_MIN
#undef HALF_MAX
#undef HALF_SPREAD
#undef BFLOAT_VALUE
#undef BFLOAT_WIDTH
#undef BFLOAT_LOAD
#undef BFLOAT_STORE
#undef BFLOAT_OP
#undef BFLOAT_SPREAD
