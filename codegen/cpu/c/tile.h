/* A product in registers: STEP_Q rows and at most STEP_N vectors at a time. */

#if defined(__AVX512F__) || defined(__aarch64__)
enum { STEP_N = 4 };
#else
enum { STEP_N = 2 };
#endif
enum { STEP_Q = 6 };

/* C[rows][n] = (C * by, row by row) + A[rows][depth] B[depth][n], with n vectors of B. The strides of A are `lda`
   between rows and `step` along the depth, so that it may be transposed. Without `by` C is not read. */
INLINE void multiply_tile(float *restrict C, int64_t ldc, const float *restrict A, int64_t lda, int64_t step,
                          const float *restrict B, int64_t ldb, int64_t depth, const float *by, const int rows,
                          const int vectors) {
    Vector sum[STEP_Q][STEP_N];
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; ++j) {
            sum[i][j] = (Vector){0};
            if (by) sum[i][j] = *(Vector *)(C + i * ldc + j * LANES) * by[i];
        }
    for (int64_t d = 0; d < depth; ++d) {
        Vector right[STEP_N];
#pragma GCC unroll 8
        for (int j = 0; j < vectors; ++j) right[j] = *(const Vector *)(B + d * ldb + j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
            for (int j = 0; j < vectors; ++j) sum[i][j] += A[i * lda + d * step] * right[j];
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; ++j) *(Vector *)(C + i * ldc + j * LANES) = sum[i][j];
}
