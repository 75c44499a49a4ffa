/* Products of few rows with a weight, y[row][out] = sum over d of x[row][d] w[out][d]. A weight is read once, in
   the layout that it has, by several streams at a time, so that the memory's speed is the limit; what comes next
   is fetched into the second cache meanwhile. */

#if defined(__AVX512F__) || defined(__aarch64__)
enum { TILE_ROWS = 4, DEEP = 4, VECTORS = 4 };
#else
enum { TILE_ROWS = 3, DEEP = 4, VECTORS = 2 };
#endif
enum { AHEAD = 256 };                   /* elements between a read and its prefetch */
#define PREFETCH(P) __builtin_prefetch((P), 0, 2)

/* w is [out][depth]: `rows` times `outs` dots at a time. `next`: the weights of the next tile, of which these
   dots fetch rows f0 .. f1 - 1. */
INLINE void dots(const float *x, int64_t ldx, const float *w, int64_t ldw, int64_t depth, float *y, int64_t ldy,
                 const int rows, const int outs, const float *next, const int f0, const int f1) {
    Vector sum[TILE_ROWS][STREAMS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
        for (int o = 0; o < outs; ++o) sum[r][o] = (Vector){0};
    int64_t d = 0;
    for (; d + LANES <= depth; d += LANES) {
        Vector left[TILE_ROWS];
        for (int f = f0; f < f1; ++f) PREFETCH(next + f * ldw + d);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) left[r] = *(const Vector *)(x + r * ldx + d);
#pragma GCC unroll 8
        for (int o = 0; o < outs; ++o) {
            const float *from = w + o * ldw + d;
            if (!next) PREFETCH(from + AHEAD);
            Vector right = *(const Vector *)from;
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) sum[r][o] += left[r] * right;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
        float total[STREAMS];
        totals(sum[r], total, outs);
#pragma GCC unroll 8
        for (int o = 0; o < outs; ++o) {
            for (int64_t e = d; e < depth; ++e) total[o] += x[r * ldx + e] * w[o * ldw + e];
            y[r * ldy + o] = total[o];
        }
    }
}

/* All rows with `tile` rows of the weight at a time; returns how many outs are done. */
INLINE int64_t dots_of_rows(const float *x, int64_t ldx, const float *w, int64_t ldw, int64_t depth, float *y,
                            int64_t ldy, int64_t rows, int64_t outs, const int tile) {
    int64_t o = 0, passes = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (; o + tile <= outs; o += tile) {
        const float *from = w + o * ldw, *next = from + tile * ldw;
        for (int64_t p = 0; p < passes; ++p) {
            int64_t r = p * TILE_ROWS, left = smaller(TILE_ROWS, rows - r);
            int f0 = (int)(p * tile / passes), f1 = (int)((p + 1) * tile / passes);
            const float *row = x + r * ldx;
            float *to = y + r * ldy + o;
            if (left == TILE_ROWS) dots(row, ldx, from, ldw, depth, to, ldy, TILE_ROWS, tile, next, f0, f1);
            else if (left == 3) dots(row, ldx, from, ldw, depth, to, ldy, 3, tile, next, f0, f1);
            else if (left == 2) dots(row, ldx, from, ldw, depth, to, ldy, 2, tile, next, f0, f1);
            else dots(row, ldx, from, ldw, depth, to, ldy, 1, tile, next, f0, f1);
        }
    }
    return o;
}

static void product(const float *x, int64_t ldx, const float *w, int64_t ldw, int64_t depth, float *y, int64_t ldy,
                    int64_t rows, int64_t outs) {
    int64_t o = 0;
    if (rows == 1)
        for (; o + STREAMS <= outs; o += STREAMS)
            dots(x, ldx, w + o * ldw, ldw, depth, y + o, ldy, 1, STREAMS, 0, 0, 0);
    else
        o = dots_of_rows(x, ldx, w, ldw, depth, y, ldy, rows, outs, 4);
    for (; o < outs; ++o)
        for (int64_t r = 0; r < rows; ++r)
            dots(x + r * ldx, ldx, w + o * ldw, ldw, depth, y + r * ldy + o, ldy, 1, 1, 0, 0, 0);
}

/* w is [depth][out]: `deep` of its rows are added to all rows of y, `vectors` columns at a time; returns how many
   columns are done, from o on. */
INLINE int64_t add_columns(const float *x, int64_t ldx, const float *w, int64_t ldw, float *y, int64_t ldy,
                           int64_t rows, int64_t o, int64_t outs, const int deep, const int vectors) {
    for (; o + vectors * LANES <= outs; o += vectors * LANES) {
        Vector right[DEEP][VECTORS];
#pragma GCC unroll 8
        for (int d = 0; d < deep; ++d)
#pragma GCC unroll 8
            for (int v = 0; v < vectors; ++v) {
                const float *from = w + d * ldw + o + v * LANES;
                PREFETCH(from + deep * ldw);
                right[d][v] = *(const Vector *)from;
            }
        for (int64_t r = 0; r < rows; ++r) {
            Vector sum[VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < vectors; ++v) sum[v] = *(Vector *)(y + r * ldy + o + v * LANES);
#pragma GCC unroll 8
            for (int d = 0; d < deep; ++d) {
                float by = x[r * ldx + d];
#pragma GCC unroll 8
                for (int v = 0; v < vectors; ++v) sum[v] += by * right[d][v];
            }
#pragma GCC unroll 8
            for (int v = 0; v < vectors; ++v) *(Vector *)(y + r * ldy + o + v * LANES) = sum[v];
        }
    }
    return o;
}

INLINE void add_deep(const float *x, int64_t ldx, const float *w, int64_t ldw, float *y, int64_t ldy, int64_t rows,
                     int64_t outs, const int deep) {
    int64_t o = add_columns(x, ldx, w, ldw, y, ldy, rows, 0, outs, deep, VECTORS);
    o = add_columns(x, ldx, w, ldw, y, ldy, rows, o, outs, deep, 1);
    for (; o < outs; ++o)
        for (int64_t r = 0; r < rows; ++r)
            for (int d = 0; d < deep; ++d) y[r * ldy + o] += x[r * ldx + d] * w[d * ldw + o];
}

/* The results of a share of columns that a thread computes at a time, in memory of its own: rows of y may lie a
   multiple of 4096 bytes apart, where they would displace each other in the first cache. */
enum { SHARE = 4096, LEAST_COLUMNS = 128, MOST_ROWS = SHARE / LEAST_COLUMNS, APART = 16 };

static void product_turned(const float *x, int64_t ldx, const float *w, int64_t ldw, int64_t depth, float *y,
                           int64_t ldy, int64_t rows, int64_t outs) {
    float share[SHARE + MOST_ROWS * (APART + VECTORS * LANES)];
    int64_t ld = outs + APART, d = 0;
    memset(share, 0, sizeof(float) * rows * ld);
    for (; d + DEEP <= depth; d += DEEP) add_deep(x + d, ldx, w + d * ldw, ldw, share, ld, rows, outs, DEEP);
    for (; d < depth; ++d) add_deep(x + d, ldx, w + d * ldw, ldw, share, ld, rows, outs, 1);
    for (int64_t r = 0; r < rows; ++r) memcpy(y + r * ldy, share + r * ld, sizeof(float) * outs);
}
