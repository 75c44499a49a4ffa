/* A block of queries against blocks of keys: the buffers, products, and the online softmax (Milakov and
   Gimelshein 2018), for the loops in loop.h and decode.h. Products are computed by a register block of
   STEP_Q rows and STEP_N vectors. */

#if defined(__AVX512F__) || defined(__aarch64__)
enum { STEP_N = 4 };
#else
enum { STEP_N = 2 };
#endif
enum { STEP_Q = 6 };

/* C[rows][n] = (C * by, row by row) + A[rows][depth] B[depth][n], with n vectors of B, at most STEP_N. The
   strides of A are `lda` between rows and `step` along the depth, so that it may be transposed. */
INLINE void multiply_panel(float *restrict C, int64_t ldc, const float *restrict A, int64_t lda, int64_t step,
                           const float *restrict B, int64_t ldb, int64_t depth, int rows, const float *by,
                           const int vectors) {
    for (int row = 0; row < rows; row += STEP_Q) {
        Vector sum[STEP_Q][STEP_N];
        const float *a = A + row * lda;
        float *c = C + row * ldc;
#pragma GCC unroll 8
        for (int i = 0; i < STEP_Q; ++i)
#pragma GCC unroll 8
            for (int j = 0; j < vectors; ++j) {
                sum[i][j] = (Vector){0};
                if (by) sum[i][j] = *(Vector *)(c + i * ldc + j * LANES) * by[row + i];
            }
        for (int64_t d = 0; d < depth; ++d) {
            Vector right[STEP_N];
#pragma GCC unroll 8
            for (int j = 0; j < vectors; ++j) right[j] = *(const Vector *)(B + d * ldb + j * LANES);
#pragma GCC unroll 8
            for (int i = 0; i < STEP_Q; ++i)
#pragma GCC unroll 8
                for (int j = 0; j < vectors; ++j) sum[i][j] += a[i * lda + d * step] * right[j];
        }
#pragma GCC unroll 8
        for (int i = 0; i < STEP_Q; ++i)
#pragma GCC unroll 8
            for (int j = 0; j < vectors; ++j) *(Vector *)(c + i * ldc + j * LANES) = sum[i][j];
    }
}

INLINE void multiply_panels(float *restrict C, int64_t ldc, const float *restrict A, int64_t lda, int64_t step,
                     const float *restrict B, int64_t ldb, int64_t depth, int rows, int64_t columns, const float *by) {
    int64_t n = 0;
    for (; n + STEP_N * LANES <= columns; n += STEP_N * LANES)
        by ? multiply_panel(C + n, ldc, A, lda, step, B + n, ldb, depth, rows, by, STEP_N)
           : multiply_panel(C + n, ldc, A, lda, step, B + n, ldb, depth, rows, 0, STEP_N);
    for (; n < columns; n += LANES)
        by ? multiply_panel(C + n, ldc, A, lda, step, B + n, ldb, depth, rows, by, 1)
           : multiply_panel(C + n, ldc, A, lda, step, B + n, ldb, depth, rows, 0, 1);
}

static void multiply(float *restrict C, int64_t ldc, const float *restrict A, int64_t lda, const float *restrict B,
                     int64_t ldb, int64_t depth, int rows, int64_t columns, const float *by) {
    multiply_panels(C, ldc, A, lda, 1, B, ldb, depth, rows, columns, by);
}

/* The same with A transposed: [depth][rows]. */
static void multiply_turned(float *restrict C, int64_t ldc, const float *restrict A, int64_t lda,
                            const float *restrict B, int64_t ldb, int64_t depth, int rows, int64_t columns,
                            const float *by) {
    multiply_panels(C, ldc, A, 1, lda, B, ldb, depth, rows, columns, by);
}

const int attngraph_lanes = LANES;

static int64_t blocks(int64_t extent, int64_t block) { return (extent + block - 1) / block; }

/* The buffers of one thread. */
typedef struct {
    float S[BLOCK_Q * BLOCK_K], sums[BLOCK_Q * LANES];
    float top[BLOCK_Q], next[BLOCK_Q], total[BLOCK_Q], decay[BLOCK_Q];
    float *Q, *O; /* [BLOCK_Q][D], [BLOCK_Q][wide] */
} Block;

/* A block of queries, and where the packed keys and values of its head lie. */
typedef struct { int64_t b, h, q0; int rows, padded; const float *k, *v; } Place;

/* S becomes exp(S - top) for the new tops; earlier sums must be multiplied by `decay`. */
static void exponentials(const Place *at, Block *t) {
#pragma omp simd
    for (int i = 0; i < BLOCK_Q; ++i) {
        float top = t->next[i];
        float base = top == -INFINITY ? 0.0f : top; /* no key so far: exp(-inf - 0) = 0 */
        t->decay[i] = exp_of_negative(t->top[i] - base);
        t->top[i] = top;
        t->next[i] = base;
    }
    for (int i = 0; i < at->rows; ++i) {
        float *row = t->S + i * BLOCK_K, base = t->next[i];
        Vector sum = *(Vector *)(t->sums + i * LANES) * t->decay[i];
        for (int j = 0; j < BLOCK_K; j += LANES) {
#pragma omp simd
            for (int l = 0; l < LANES; ++l) row[j + l] = exp_of_negative(row[j + l] - base);
            sum += *(Vector *)(row + j);
        }
        *(Vector *)(t->sums + i * LANES) = sum;
    }
    for (int i = 0; i < at->rows; ++i) t->next[i] = t->top[i];
}
