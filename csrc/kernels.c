/* Fold and divide kernels: the scalar building blocks, one table a CPU level, and the choice between them at run time.
 *
 * kernels_body.h is a template of loops that the compiler vectorises, included once for each instruction set, with
 *   ISA(name)   the function name of this version
 *   TARGET      the function attribute that lets the compiler use the instruction set
 *   HALF_*      how float16 is loaded, stored and computed with (intrinsics, since compilers do not vectorise it)
 *   STREAM_*    how a vector is stored past the caches, where that can be done
 *   BFLOAT_*    the same for bfloat16 (scalar code that the compiler vectorises, but for AVX2)
 * Nothing is compiled with -march, so one binary serves every x86-64; other architectures have the baseline only.
 * All versions give the same bits: no contraction to fma, no reassociation, correctly rounded conversions.
 */
#include "kernels.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

/* Arrays may have any alignment, and may be written through other types. */
#define UNALIGNED __attribute__((aligned(1), may_alias))
typedef uint8_t UNALIGNED u8;
typedef uint16_t UNALIGNED u16;
typedef uint32_t UNALIGNED u32;
typedef uint64_t UNALIGNED u64;
typedef int8_t UNALIGNED i8;
typedef int16_t UNALIGNED i16;
typedef int32_t UNALIGNED i32;
typedef int64_t UNALIGNED i64;
typedef float UNALIGNED f32;
typedef double UNALIGNED f64;
typedef long double UNALIGNED ld;
typedef struct __attribute__((packed, may_alias)) { float re, im; } c64;
typedef struct __attribute__((packed, may_alias)) { double re, im; } c128;

/* out may equal a source, element for element: no iteration depends on another one. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

#define INLINE static inline __attribute__((always_inline))

INLINE uint32_t float_bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float bits_float(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
INLINE uint32_t choose(int condition, uint32_t yes, uint32_t no) { return condition ? yes : no; }

INLINE float bfloat_to_float(uint16_t h) { return bits_float((uint32_t)h << 16); }

/* Round to nearest even; NaN becomes the quiet NaN of its sign, as in ml_dtypes. */
INLINE uint16_t float_to_bfloat(float x)
{
    uint32_t u = float_bits(x);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (uint16_t)choose((u & 0x7fffffffu) > 0x7f800000u, ((u >> 16) & 0x8000u) | 0x7fc0u, rounded);
}

/* The exponent is moved by adding to the bits, twice for inf and NaN; an exact subtraction normalises subnormals. */
INLINE float half_to_float(uint16_t h)
{
    uint32_t magnitude = (uint32_t)(h & 0x7fffu) << 13, moved = magnitude + (112u << 23);
    uint32_t small = float_bits(bits_float(moved + (1u << 23)) - bits_float(113u << 23));
    uint32_t quiet = choose(magnitude > 0x0f800000u, 1u << 22, 0u);
    uint32_t u = choose(magnitude >= 0x0f800000u, (moved + (112u << 23)) | quiet, moved);
    u = choose(magnitude < (1u << 23), small, u);
    return bits_float(u | ((uint32_t)(h & 0x8000u) << 16));
}

/* Round to nearest even: normal numbers on the bits, results below 2^-14 by adding 0.5, whose last place is that of a
 * subnormal half. NaN keeps its sign and upper payload. */
INLINE uint16_t float_to_half(float x)
{
    uint32_t u = float_bits(x), sign = u & 0x80000000u, magnitude = u ^ sign;
    uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t small = float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f);
    uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    uint32_t large = choose(magnitude > 0x7f800000u, nan, 0x7c00u);
    uint32_t h = choose(magnitude < (113u << 23), small, normal);
    return (uint16_t)(choose(magnitude >= (143u << 23), large, h) | (sign >> 16));
}

/* How elements are loaded from and stored to memory. */
#define LOAD_SAME(p) (*(p))
#define LOAD_TRUTH(p) (*(p) != 0)
#define LOAD_HALF(p) half_to_float(*(p))
#define LOAD_BFLOAT(p) bfloat_to_float(*(p))
#define STORE_SAME(p, v) (*(p) = (v))
#define STORE_HALF(p, v) (*(p) = float_to_half(v))
#define STORE_BFLOAT(p, v) (*(p) = float_to_bfloat(v))

/* The operators. Integers are unsigned wherever they may wrap; 1u keeps uint16 products out of (signed) int. */
#define ADD(a, b) ((a) + (b))
#define MULTIPLY(a, b) ((a) * (b))
#define QUOTIENT(a, b) ((a) / (b))
#define MULTIPLY_UNSIGNED(a, b) ((a) * 1u * (b))
#define SMALLER(a, b) ((b) < (a) ? (b) : (a))
#define LARGER(a, b) ((b) > (a) ? (b) : (a))
#define AND(a, b) ((a) & (b))
#define OR(a, b) ((a) | (b))
#define XOR(a, b) ((a) ^ (b))
INLINE float add_f32(float a, float b) { return a + b; }
INLINE float multiply_f32(float a, float b) { return a * b; }
INLINE float divide_f32(float a, float b) { return a / b; }
/* As numpy.minimum: the first NaN wins; of equal values (0 and -0) the second. */
INLINE float smaller_f32(float a, float b) { return ((a < b) | (a != a)) ? a : b; }
INLINE float larger_f32(float a, float b) { return ((a > b) | (a != a)) ? a : b; }
INLINE double smaller_f64(double a, double b) { return ((a < b) | (a != a)) ? a : b; }
INLINE double larger_f64(double a, double b) { return ((a > b) | (a != a)) ? a : b; }
INLINE long double smaller_ld(long double a, long double b) { return ((a < b) | (a != a)) ? a : b; }
INLINE long double larger_ld(long double a, long double b) { return ((a > b) | (a != a)) ? a : b; }
INLINE c64 multiply_c64(c64 a, c64 b)
{
    return (c64){a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
INLINE c128 multiply_c128(c128 a, c128 b)
{
    return (c128){a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}

/* Baseline: what every CPU of the architecture has. */
#define ISA(name) name##_baseline
#define ISA_NAME "baseline"
#define TARGET
#define HALF_VALUE float
#define HALF_WIDTH 1
#define HALF_LOAD LOAD_HALF
#define HALF_STORE STORE_HALF
#define HALF_MIN smaller_f32
#define HALF_MAX larger_f32
#define HALF_SPREAD(d) (d)
#define BFLOAT_VALUE float
#define BFLOAT_WIDTH 1
#define BFLOAT_LOAD LOAD_BFLOAT
#define BFLOAT_STORE STORE_BFLOAT
#define BFLOAT_OP(op) op##_f32
#define BFLOAT_SPREAD (float)
#if defined(__x86_64__)
#define STREAM_BYTES 16
#define STREAM_STORE(p, v) _mm_stream_si128((__m128i *)(void *)(p), (__m128i)(v))
#endif
#include "kernels_body.h"

#if defined(__x86_64__)
#define ROUND_EVEN (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

#define AVX2 __attribute__((target("avx2,f16c")))
AVX2 INLINE __m256 smaller_avx2(__m256 a, __m256 b)
{
    return _mm256_blendv_ps(_mm256_min_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
AVX2 INLINE __m256 larger_avx2(__m256 a, __m256 b)
{
    return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
/* 16 bfloat16 as the floats of the even and of the odd places: a shift or a mask each, no shuffles. */
typedef struct { __m256 even, odd; } pair;
AVX2 INLINE pair load_pair(const u16 *p)
{
    __m256i both = _mm256_loadu_si256((const __m256i *)(const void *)p);
    __m256i odd = _mm256_and_si256(both, _mm256_set1_epi32((int)0xffff0000u));
    return (pair){_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)), _mm256_castsi256_ps(odd)};
}
AVX2 INLINE __m256i round_to_upper(__m256 x)
{
    __m256i u = _mm256_castps_si256(x), last = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(u, _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff)));
}
AVX2 INLINE void store_pair(u16 *p, pair x)
{
    if (__builtin_expect(_mm256_movemask_ps(_mm256_cmp_ps(x.even, x.odd, _CMP_UNORD_Q)) != 0, 0)) {
        f32 even[8], odd[8]; /* a NaN: the slow way */
        _mm256_storeu_ps(even, x.even);
        _mm256_storeu_ps(odd, x.odd);
        for (int i = 0; i < 8; i++) {
            p[2 * i] = float_to_bfloat(even[i]);
            p[2 * i + 1] = float_to_bfloat(odd[i]);
        }
        return;
    }
    __m256i even = _mm256_srli_epi32(round_to_upper(x.even), 16), odd = round_to_upper(x.odd);
    _mm256_storeu_si256((__m256i *)(void *)p, _mm256_blend_epi16(even, odd, 0xaa));
}
AVX2 INLINE pair spread_pair(double d) { return (pair){_mm256_set1_ps((float)d), _mm256_set1_ps((float)d)}; }
#define PAIRWISE(name, expression)                                                                                    \
    AVX2 INLINE __m256 name##_each(__m256 a, __m256 b) { return expression; }                                         \
    AVX2 INLINE pair name##_pair(pair a, pair b)                                                                      \
    {                                                                                                                 \
        return (pair){name##_each(a.even, b.even), name##_each(a.odd, b.odd)};                                        \
    }
PAIRWISE(add, _mm256_add_ps(a, b))
PAIRWISE(multiply, _mm256_mul_ps(a, b))
PAIRWISE(divide, _mm256_div_ps(a, b))
PAIRWISE(smaller, smaller_avx2(a, b))
PAIRWISE(larger, larger_avx2(a, b))

#define ISA(name) name##_avx2
#define ISA_NAME "avx2"
#define TARGET AVX2
#define HALF_VALUE __m256
#define HALF_WIDTH 8
#define HALF_LOAD(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p)))
#define HALF_STORE(p, v) _mm_storeu_si128((__m128i *)(void *)(p), _mm256_cvtps_ph(v, ROUND_EVEN))
#define HALF_MIN smaller_avx2
#define HALF_MAX larger_avx2
#define HALF_SPREAD(d) _mm256_set1_ps(d)
#define BFLOAT_VALUE pair
#define BFLOAT_WIDTH 16
#define BFLOAT_LOAD load_pair
#define BFLOAT_STORE store_pair
#define BFLOAT_OP(op) op##_pair
#define BFLOAT_SPREAD spread_pair
#define STREAM_BYTES 32
#define STREAM_STORE(p, v) _mm256_stream_si256((__m256i *)(void *)(p), (__m256i)(v))
#include "kernels_body.h"

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c")))
AVX512 INLINE __m512 smaller_avx512(__m512 a, __m512 b)
{
    return _mm512_mask_mov_ps(_mm512_min_ps(a, b), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a);
}
AVX512 INLINE __m512 larger_avx512(__m512 a, __m512 b)
{
    return _mm512_mask_mov_ps(_mm512_max_ps(a, b), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a);
}
/* GCC 12 makes vfmaddsub of this product in spite of -ffp-contract=off, which would round differently: no FMA here. */
#define COMPLEX_PROD(T) prod_##T##_avx2
#define ISA(name) name##_avx512
#define ISA_NAME "avx512"
#define TARGET AVX512
#define HALF_VALUE __m512
#define HALF_WIDTH 16
#define HALF_LOAD(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(p)))
#define HALF_STORE(p, v) _mm256_storeu_si256((__m256i *)(void *)(p), _mm512_cvtps_ph(v, ROUND_EVEN))
#define HALF_MIN smaller_avx512
#define HALF_MAX larger_avx512
#define HALF_SPREAD(d) _mm512_set1_ps(d)
#define BFLOAT_VALUE float
#define BFLOAT_WIDTH 1
#define BFLOAT_LOAD LOAD_BFLOAT
#define BFLOAT_STORE STORE_BFLOAT
#define BFLOAT_OP(op) op##_f32
#define BFLOAT_SPREAD (float)
#define STREAM_BYTES 64
#define STREAM_STORE(p, v) _mm512_stream_si512((void *)(p), (__m512i)(v))
#include "kernels_body.h"
#endif

/* The versions this CPU can run, slowest first. */
static int list_available(const struct pr_kernels *tables[3])
{
    int count = 0;
    tables[count++] = &kernels_baseline;
#if defined(__x86_64__)
    unsigned a, b, c = 0, d;
    __builtin_cpu_init();
    int f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
    if (!__builtin_cpu_supports("avx2") || !f16c)
        return count;
    tables[count++] = &kernels_avx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")
        && __builtin_cpu_supports("avx512vl"))
        tables[count++] = &kernels_avx512;
#endif
    return count;
}

const struct pr_kernels *pr_choose_kernels(void)
{
    static const struct pr_kernels none = {.name = NULL};
    static _Atomic(const struct pr_kernels *) chosen; /* racing threads choose the same */
    const struct pr_kernels *table = atomic_load_explicit(&chosen, memory_order_acquire);
    if (table == NULL) {
        const struct pr_kernels *tables[3];
        int count = list_available(tables);
        const char *wanted = getenv("PYREDUCE_ISA");
        table = wanted != NULL && wanted[0] != '\0' ? &none : tables[count - 1];
        for (int i = 0; table == &none && i < count; i++)
            if (strcmp(wanted, tables[i]->name) == 0)
                table = tables[i];
        atomic_store_explicit(&chosen, table, memory_order_release);
    }
    return table == &none ? NULL : table;
}

const char *pr_isa(void)
{
    const struct pr_kernels *table = pr_choose_kernels();
    return table == NULL ? NULL : table->name;
}
