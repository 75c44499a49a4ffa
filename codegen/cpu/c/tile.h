/* A product in registers: STEP_Q rows and at most STEP_N vectors at a time. Operands are of 32-bit places, each of
   which holds a float, or two bfloat16 numbers that are neighbours in the depth and that the processor multiplies and
   adds up in one instruction. Sums are floats. */

#if defined(__AVX512F__) || defined(__aarch64__)
enum { STEP_N = 4 };
#else
enum { STEP_N = 2 };
#endif
enum { STEP_Q = 6, FEW_VECTORS = 8 };  /* one row has so many vectors */

/* How many elements of the depth a place has. PAIRED is defined where operands are of bfloat16. */
#if defined(PAIRED) && defined(__AVX512F__) && defined(__AVX512BF16__)
#include <immintrin.h>
enum { IN_PLACE = 2 };
INLINE Vector add_pairs(Vector sum, float a, Vector b) {
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(a), (__m512bh)b);
}
/* One vector of the numbers of two, rounded to the nearest, ties to even. */
INLINE Vector rounded(Vector first, Vector second) {
    return (Vector)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}
INLINE Vector sum_of_pairs(Vector pairs) {
    __m512i bits = (__m512i)pairs, high = _mm512_set1_epi32((int)0xffff0000);
    return (Vector)_mm512_slli_epi32(bits, 16) + (Vector)_mm512_and_si512(bits, high);
}
/* A place of two elements, `apart` from each other; of the first alone, if no second is `left`. */
INLINE float place_at(const Element *from, int64_t apart, int64_t left) {
    union { uint32_t bits; float place; } u = {.bits = from[0] | (left > 1 ? (uint32_t)from[apart] << 16 : 0)};
    return u.place;
}
#else
enum { IN_PLACE = 1 };
INLINE Vector add_pairs(Vector sum, float a, Vector b) { return sum + a * b; }
INLINE Vector rounded(Vector first, Vector second) { return (void)second, first; }
INLINE Vector sum_of_pairs(Vector one) { return one; }
INLINE float place_at(const Element *from, int64_t apart, int64_t left) {
    (void)apart, (void)left;
    return widen(*from);
}
#endif
INLINE int64_t places(int64_t elements) { return (elements + IN_PLACE - 1) / IN_PLACE; }

/* C[rows][n] = (C * by, row by row) + A[rows][depth] B[depth][n], with n vectors of B; rows times vectors fit into
   registers. The strides of A are `lda` between rows and `step` along the depth, so that it may be transposed. Without
   `by` C is not read. A product is added up by itself first: long sums, of many blocks, then round with each block and
   not with each term. The depth is counted in places, of which each has `in_place` elements. */
INLINE void multiply_tile(float *restrict C, int64_t ldc, const float *restrict A, int64_t lda, int64_t step,
                          const float *restrict B, int64_t ldb, int64_t depth, const float *by, const int rows,
                          const int vectors, const int in_place) {
    Vector sum[STEP_Q][FEW_VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; ++j) sum[i][j] = (Vector){0};
    for (int64_t d = 0; d < depth; ++d) {
        Vector right[FEW_VECTORS];
#pragma GCC unroll 8
        for (int j = 0; j < vectors; ++j) right[j] = *(const Vector *)(B + d * ldb + j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
            for (int j = 0; j < vectors; ++j) {
                float left = A[i * lda + d * step];
                if (in_place == 2) sum[i][j] = add_pairs(sum[i][j], left, right[j]);
                else ADD_PRODUCT(sum[i][j], left, right[j]);
            }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; ++j) {
            Vector *to = (Vector *)(C + i * ldc + j * LANES);
            if (by) ADD_PRODUCT(sum[i][j], by[i], *to);
            *to = sum[i][j];
        }
}
