/* Elements of weights, and of what a cache keeps, as floats. Integers and floating numbers of 4, 8 and 16 bits are
   widened in registers, so only their bytes are read. What `type` says is known when compiling. */

#if defined(SHORT_ELEMENTS) && defined(__AVX2__) && defined(__F16C__) && !defined(__clang__)
#include <immintrin.h>                  /* GCC 12 converts bytes by __builtin_convertvector one by one */
#define BY_INTRINSICS
#endif

enum { LINE = 64 };                     /* bytes that the memory gives at once */
#define PREFETCH(P) __builtin_prefetch((P), 0, 2)

enum { NONE, FLOAT, INT8, UINT8, INT32, BF16, F16, F8 };

/* A type of 4 bits is PACKED, SIGNED in two's complement, and what is subtracted, times LESS: a byte has two elements,
   and `type` is the one in its low bits, `type + HIGH` the one in its high bits. Places are those of bytes. */
enum { PACKED = 1 << 4, HIGH = 1 << 5, SIGNED = 1 << 6, LESS = 1 << 7, NOTHING_LESS = 1 << 6 };

INLINE int64_t size_of(const int type) {
    if (type & PACKED) return 1;
    return type == INT8 || type == UINT8 || type == F8 ? 1 : type == BF16 || type == F16 ? 2 : 4;
}
INLINE int elements_in(const int type) { return type & PACKED ? 2 : 1; }
INLINE int subtracted(const int type) { return type / LESS - NOTHING_LESS + (type & SIGNED ? 8 : 0); }
INLINE int digit(uint8_t byte, const int type) {
    int found = type & HIGH ? byte >> 4 : byte & 15;
    return (type & SIGNED ? found ^ 8 : found) - subtracted(type);
}
INLINE const void *place(const void *w, int64_t at, const int type) { return (const char *)w + at * size_of(type); }

/* float8_e4m3fn: a sign, 4 bits of an exponent whose bias is 7, 3 of a mantissa. Its one NaN is not written. */
INLINE float from_float8(uint8_t x) {
    uint32_t size = x & 0x7f;
    union { uint32_t i; float f; } u = {.i = (size << 20) + (120u << 23)};
    float found = size < 8 ? (float)size * 0x1p-9f : u.f;
    return x & 0x80 ? -found : found;
}

#ifdef __FLT16_MAX__
INLINE _Float16 to_float16(float x) { return (_Float16)x; }
#endif

INLINE float number(const void *w, int64_t at, const int type) {
    if (type & PACKED) return digit(((const uint8_t *)w)[at], type);
    if (type == INT8) return ((const int8_t *)w)[at];
    if (type == UINT8) return ((const uint8_t *)w)[at];
    if (type == BF16) return from_bfloat16(((const uint16_t *)w)[at]);
    if (type == F8) return from_float8(((const uint8_t *)w)[at]);
#ifdef __FLT16_MAX__
    if (type == F16) return from_float16(((const _Float16 *)w)[at]);
#endif
    return type == INT32 ? (float)((const int32_t *)w)[at] : ((const float *)w)[at];
}

#if defined(BY_INTRINSICS) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
INLINE Vector widened_vector(const void *from, const int type) {
    if (type == BF16 || type == F16) {
        __m256i shorts = _mm256_loadu_si256((const __m256i *)from);
        if (type == F16) return (Vector)_mm512_cvtph_ps(shorts);
        return (Vector)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(shorts), 16));
    }
    __m128i bytes = _mm_loadu_si128((const __m128i *)from);
    if (type == F8) {                   /* the bits of a half whose exponent is 8 less */
        __m256i high = _mm256_srai_epi16(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8), 1);
        return (Vector)_mm512_cvtph_ps(_mm256_and_si256(high, _mm256_set1_epi16((short)0xbfff))) * 256.0f;
    }
    if (type & PACKED) {                /* the low 4 bits of an index choose among 16 */
        Vector values;
#pragma GCC unroll 16
        for (int n = 0; n < 16; ++n) values[n] = digit(n, type - (type & HIGH));
        __m512i words = _mm512_cvtepu8_epi32(bytes);
        return (Vector)_mm512_permutexvar_ps(type & HIGH ? _mm512_srli_epi32(words, 4) : words, (__m512)values);
    }
    return (Vector)_mm512_cvtepi32_ps(type == INT8 ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
}
#elif defined(BY_INTRINSICS) && !defined(__AVX512F__)
INLINE Vector widened_vector(const void *from, const int type) {
    if (type == BF16 || type == F16) {
        __m128i shorts = _mm_loadu_si128((const __m128i *)from);
        if (type == F16) return (Vector)_mm256_cvtph_ps(shorts);
        return (Vector)_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(shorts), 16));
    }
    __m128i bytes = _mm_loadl_epi64((const __m128i *)from);
    if (type == F8) {
        __m128i high = _mm_srai_epi16(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 8), 1);
        return (Vector)_mm256_cvtph_ps(_mm_and_si128(high, _mm_set1_epi16((short)0xbfff))) * 256.0f;
    }
    if (type & PACKED) {
        __m256i words = _mm256_cvtepu8_epi32(bytes);
        words = type & HIGH ? _mm256_srli_epi32(words, 4) : _mm256_and_si256(words, _mm256_set1_epi32(15));
        if (type & SIGNED) words = _mm256_xor_si256(words, _mm256_set1_epi32(8));
        return (Vector)_mm256_cvtepi32_ps(_mm256_sub_epi32(words, _mm256_set1_epi32(subtracted(type))));
    }
    return (Vector)_mm256_cvtepi32_ps(type == INT8 ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
}
#else
INLINE Vector widened_vector(const void *from, const int type) {
    typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
    typedef uint8_t Unsigned __attribute__((vector_size(LANES), aligned(1), may_alias));
    typedef int16_t Shorts __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
    typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
    typedef int32_t Words __attribute__((vector_size(4 * LANES)));
    if (type == BF16)
        return (Vector)(__builtin_convertvector(*(const Halves *)from, Words) << 16);
    if (type == F16 || type == F8) {
        Vector found = {0};
        for (int l = 0; l < LANES; ++l) found[l] = number(from, l, type);
        return found;
    }
    if (type & PACKED) {
        Unsigned bytes = *(const Unsigned *)from;
        if (type & HIGH) bytes >>= 4;
        else bytes &= 15;
        if (type & SIGNED) bytes ^= 8;
        Shorts digits = __builtin_convertvector(bytes, Shorts) - (int16_t)subtracted(type);
        return __builtin_convertvector(__builtin_convertvector(digits, Words), Vector);
    }
    Shorts shorts = type == INT8 ? __builtin_convertvector(*(const Bytes *)from, Shorts)
                                 : __builtin_convertvector(*(const Unsigned *)from, Shorts);
    return __builtin_convertvector(__builtin_convertvector(shorts, Words), Vector);
}
#endif

INLINE Vector vector(const void *w, int64_t at, const int type) {
    const void *from = place(w, at, type);
    return type == FLOAT ? *(const Vector *)from : widened_vector(from, type);
}
