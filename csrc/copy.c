/* Copies: plain, streaming past the caches, and prefetching.
 *
 * An ordinary store first reads the line that it is about to overwrite, and pushes others out of the cache. For a result
 * larger than the last-level cache both are waste; streaming (non-temporal) stores do neither. They want whole aligned
 * lines, so the head up to the first line and the tail after the last are stored as usual. Where the result fits the
 * cache they do harm: whoever reads it next must fetch it from memory.
 */
#include "kernels.h"

#include <string.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

enum { LINE = 64, AHEAD = 512 };

void pr_copy(size_t nbytes, uintptr_t out, uintptr_t src)
{
    memmove((void *)out, (const void *)src, nbytes);
}

#if defined(__x86_64__)
static void stream_lines(char *out, const char *src, size_t lines)
{
    for (size_t i = 0; i < lines; i++, out += LINE, src += LINE) {
        __m128i *to = (__m128i *)(void *)out;
        const __m128i *from = (const __m128i *)(const void *)src;
        __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
    }
}

void pr_copy_out(char *out, const char *src, size_t nbytes, int stream)
{
    if (!stream || nbytes < 2 * LINE) {
        memcpy(out, src, nbytes);
        return;
    }
    size_t head = (LINE - (uintptr_t)out % LINE) % LINE, whole = (nbytes - head) & ~(size_t)(LINE - 1);
    memcpy(out, src, head);
    stream_lines(out + head, src + head, whole / LINE);
    memcpy(out + head + whole, src + head + whole, nbytes - head - whole);
}

void pr_end_stream(void)
{
    _mm_sfence();
}

void pr_copy_in(char *out, const char *src, size_t nbytes)
{
    size_t whole = nbytes & ~(size_t)(LINE - 1);
    for (size_t at = 0; at < whole; at += LINE) {
        _mm_prefetch(src + at + AHEAD, _MM_HINT_T0); /* beyond the end it does nothing */
        const __m128i *from = (const __m128i *)(const void *)(src + at);
        __m128i *to = (__m128i *)(void *)(out + at);
        __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
        _mm_storeu_si128(to, a);
        _mm_storeu_si128(to + 1, b);
        _mm_storeu_si128(to + 2, c);
        _mm_storeu_si128(to + 3, d);
    }
    memcpy(out + whole, src + whole, nbytes - whole);
}
#else
void pr_copy_out(char *out, const char *src, size_t nbytes, int stream)
{
    (void)stream;
    memcpy(out, src, nbytes);
}

void pr_end_stream(void) {}

void pr_copy_in(char *out, const char *src, size_t nbytes)
{
    memcpy(out, src, nbytes);
}
#endif

void pr_copy_streaming(size_t nbytes, uintptr_t out, uintptr_t src)
{
    pr_copy_out((char *)out, (const char *)src, nbytes, 1);
    pr_end_stream();
}
