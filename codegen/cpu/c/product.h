/* Products of few rows with a weight, y[row][out] = sum over d of x[row][d] w[out][d]. A weight is read once, in
   the layout that it has, by several streams at a time, so that the memory's speed is the limit. */

#if defined(__AVX512F__) || defined(__aarch64__)
enum { TILE_ROWS = 4, TILE_OUTS = 4, DEEP = 8, VECTORS = 2 };
#else
enum { TILE_ROWS = 3, TILE_OUTS = 4, DEEP = 4, VECTORS = 2 };
#endif
enum { STREAMS = 8, AHEAD = 256 };      /* AHEAD: elements between a read and its prefetch */
#define PREFETCH(P) __builtin_prefetch((P), 0, 2)

/* w is [out][depth]: `rows` times `outs` dots at a time. */
INLINE void dots(const float *x, int64_t ldx, const float *w, int64_t ldw, int64_t depth, float *y, int64_t ldy,
                 const int rows, const int outs, const int ahead) {
    Vector sum[TILE_ROWS][STREAMS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
        for (int o = 0; o < outs; ++o) sum[r][o] = (Vector){0};
    int64_t d = 0;
    for (; d + LANES <= depth; d += LANES) {
        Vector left[TILE_ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) left[r] = *(const Vector *)(x + r * ldx + d);
#pragma GCC unroll 8
        for (int o = 0; o < outs; ++o) {
            const float *from = w + o * ldw + d;
            if (ahead) PREFETCH(from + ahead);
            Vector right = *(const Vector *)from;
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) sum[r][o] += left[r] * right;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
        for (int o = 0; o < outs; ++o) {
            float whole = sum_of(sum[r][o]);
            for (int64_t e = d; e < depth; ++e) whole += x[r * ldx + e] * w[o * ldw + e];
            y[r * ldy + o] = whole;
        }
}

static void product(const float *x, int64_t ldx, const float *w, int64_t ldw, int64_t depth, float *y, int64_t ldy,
                    int64_t rows, int64_t outs) {
    int64_t o = 0;
    if (rows == 1)
        for (; o + STREAMS <= outs; o += STREAMS)
            dots(x, ldx, w + o * ldw, ldw, depth, y + o, ldy, 1, STREAMS, AHEAD);
    else
        for (; o + TILE_OUTS <= outs; o += TILE_OUTS) {
            const float *from = w + o * ldw;
            int64_t r = 0;
            for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
                r ? dots(x + r * ldx, ldx, from, ldw, depth, y + r * ldy + o, ldy, TILE_ROWS, TILE_OUTS, 0)
                  : dots(x, ldx, from, ldw, depth, y + o, ldy, TILE_ROWS, TILE_OUTS, AHEAD);
            for (; r + 2 <= rows; r += 2)
                r ? dots(x + r * ldx, ldx, from, ldw, depth, y + r * ldy + o, ldy, 2, TILE_OUTS, 0)
                  : dots(x, ldx, from, ldw, depth, y + o, ldy, 2, TILE_OUTS, AHEAD);
            for (; r < rows; ++r) dots(x + r * ldx, ldx, from, ldw, depth, y + r * ldy + o, ldy, 1, TILE_OUTS, 0);
        }
    for (; o < outs; ++o)
        for (int64_t r = 0; r < rows; ++r) dots(x + r * ldx, ldx, w + o * ldw, ldw, depth, y + r * ldy + o, ldy, 1, 1, 0);
}

/* w is [depth][out]: `deep` of its rows are added to all rows of y at a time. */
INLINE void add_deep(const float *x, int64_t ldx, const float *w, int64_t ldw, float *y, int64_t ldy, int64_t rows,
                     int64_t outs, const int deep) {
    int64_t o = 0;
    for (; o + VECTORS * LANES <= outs; o += VECTORS * LANES) {
        Vector right[DEEP][VECTORS];
#pragma GCC unroll 8
        for (int d = 0; d < deep; ++d)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) {
                const float *from = w + d * ldw + o + v * LANES;
                PREFETCH(from + deep * ldw);
                right[d][v] = *(const Vector *)from;
            }
        for (int64_t r = 0; r < rows; ++r) {
            Vector sum[VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) sum[v] = *(Vector *)(y + r * ldy + o + v * LANES);
#pragma GCC unroll 8
            for (int d = 0; d < deep; ++d) {
                float by = x[r * ldx + d];
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; ++v) sum[v] += by * right[d][v];
            }
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) *(Vector *)(y + r * ldy + o + v * LANES) = sum[v];
        }
    }
    for (; o < outs; ++o)
        for (int64_t r = 0; r < rows; ++r)
            for (int d = 0; d < deep; ++d) y[r * ldy + o] += x[r * ldx + d] * w[d * ldw + o];
}

static void product_turned(const float *x, int64_t ldx, const float *w, int64_t ldw, int64_t depth, float *y,
                           int64_t ldy, int64_t rows, int64_t outs) {
    for (int64_t r = 0; r < rows; ++r) memset(y + r * ldy, 0, sizeof(float) * outs);
    int64_t d = 0;
    for (; d + DEEP <= depth; d += DEEP) add_deep(x + d, ldx, w + d * ldw, ldw, y, ldy, rows, outs, DEEP);
    for (; d < depth; ++d) add_deep(x + d, ldx, w + d * ldw, ldw, y, ldy, rows, outs, 1);
}
