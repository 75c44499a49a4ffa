/* A block of queries against blocks of keys: the buffers, products, and the online softmax (Milakov and
   Gimelshein 2018), for the loops in loop.h and decode.h. */

/* multiply_tile for any number of rows that is a multiple of STEP_Q. */
INLINE void multiply_panel(float *restrict C, int64_t ldc, const float *restrict A, int64_t lda, int64_t step,
                           const float *restrict B, int64_t ldb, int64_t depth, int rows, const float *by,
                           const int vectors, const int in_place) {
    for (int row = 0; row < rows; row += STEP_Q)
        multiply_tile(C + row * ldc, ldc, A + row * lda, lda, step, B, ldb, depth, by ? by + row : 0, STEP_Q, vectors,
                      in_place);
}

INLINE void multiply_panels(float *restrict C, int64_t ldc, const float *restrict A, int64_t lda, int64_t step,
                            const float *restrict B, int64_t ldb, int64_t depth, int rows, int64_t columns,
                            const float *by, const int in_place) {
    int64_t n = 0;
    for (; n + STEP_N * LANES <= columns; n += STEP_N * LANES)
        by ? multiply_panel(C + n, ldc, A, lda, step, B + n, ldb, depth, rows, by, STEP_N, in_place)
           : multiply_panel(C + n, ldc, A, lda, step, B + n, ldb, depth, rows, 0, STEP_N, in_place);
    for (; n < columns; n += LANES)
        by ? multiply_panel(C + n, ldc, A, lda, step, B + n, ldb, depth, rows, by, 1, in_place)
           : multiply_panel(C + n, ldc, A, lda, step, B + n, ldb, depth, rows, 0, 1, in_place);
}

static void multiply(float *restrict C, int64_t ldc, const float *restrict A, int64_t lda, const float *restrict B,
                     int64_t ldb, int64_t depth, int rows, int64_t columns, const float *by) {
    multiply_panels(C, ldc, A, lda, 1, B, ldb, depth, rows, columns, by, 1);
}

/* The same for operands of packed places. */
static void multiply_packed(float *restrict C, int64_t ldc, const float *restrict A, int64_t lda,
                            const float *restrict B, int64_t ldb, int64_t depth, int rows, int64_t columns,
                            const float *by) {
    multiply_panels(C, ldc, A, lda, 1, B, ldb, depth, rows, columns, by, IN_PLACE);
}

/* The same with A transposed: [depth][rows]. */
static void multiply_turned(float *restrict C, int64_t ldc, const float *restrict A, int64_t lda,
                            const float *restrict B, int64_t ldb, int64_t depth, int rows, int64_t columns,
                            const float *by) {
    multiply_panels(C, ldc, A, 1, lda, B, ldb, depth, rows, columns, by, 1);
}

const int attngraph_lanes = LANES;

static int64_t blocks(int64_t extent, int64_t block) { return (extent + block - 1) / block; }

/* The buffers of one thread. */
typedef struct {
    float S[BLOCK_Q * BLOCK_K], sums[BLOCK_Q * LANES], rounded[BLOCK_Q * LANES];
    float top[BLOCK_Q], next[BLOCK_Q], total[BLOCK_Q], decay[BLOCK_Q];
    float *Q, *O; /* [BLOCK_Q][D], [BLOCK_Q][wide] */
} Block;

/* A block of queries, and where the packed keys and values of its head lie. */
typedef struct { int64_t b, h, q0; int rows, padded; const float *k, *v; } Place;

/* A row of scores becomes weights, of which the total over all keys is known. */
INLINE void normalised(float *row, float top, float total) {
#pragma omp simd
    for (int j = 0; j < BLOCK_K; ++j) row[j] = exp_(row[j] - top) / total;
}

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
        Vector sum = (Vector){0}, *sums = (Vector *)(t->sums + i * LANES);
        for (int j = 0; j < BLOCK_K; j += LANES) {
#pragma omp simd
            for (int l = 0; l < LANES; ++l) row[j + l] = exp_of_negative(row[j + l] - base);
            sum += *(Vector *)(row + j);
        }
        *sums = *sums * t->decay[i] + sum;
    }
    for (int i = 0; i < at->rows; ++i) t->next[i] = t->top[i];
}
