/* Products of few rows with a weight, y[row][out] = sum over d of x[row][d] w[out][d]. A weight is read once, in
   the layout that it has, by several streams at a time, so that the memory's speed is the limit; what comes next
   is fetched into the second cache meanwhile. Integers are widened in registers: only their bytes are read.
   What `type`, `scaled` and `zeros` say is known when compiling. */

/* A tile's sums, and what they are added up from, fill the registers: there are 32 or 16 of them. */
#if defined(__AVX512F__) || defined(__aarch64__)
enum { TILE_ROWS = 8, DEEP = 4, VECTORS = 4 };
#else
enum { TILE_ROWS = 4, DEEP = 4, VECTORS = 2 };
#endif

/* Has the compiler load a vector once, into a register, where it would load it for each use. */
#if defined(__x86_64__)
#define IN_REGISTER(V) __asm__("" : "+x"(V))
#elif defined(__aarch64__)
#define IN_REGISTER(V) __asm__("" : "+w"(V))
#else
#define IN_REGISTER(V) (void)0
#endif

/* Element (out, d) of a weight is (w - zero) * scale: `scale` and `zero` are [out][groups], with one for each
   `group` of d. A group is whole vectors, unless there is only one. */
typedef struct { const float *scale; const void *zero; int64_t group, groups; } Scales;

/* ---- w is [out][depth] ---- */

enum { WHOLE_TILES = 24 };              /* a multiple of the outs of all tiles */

/* What the dots of some rows fetch: every `every`th line of the rows of `next`, from the `wait`th on. */
typedef struct { const void *next; int64_t every, wait; } Fetch;

INLINE Vector weights_of(const void *w, int64_t at, const int type, const int zeros, float less) {
    Vector found = vector(w, at, type);
    if (zeros) found -= less;
    IN_REGISTER(found);
    return found;
}

/* `rows` times `outs` dots, from d on as far as `end`; returns where they end. */
INLINE int64_t add_dots(const float *x, int64_t ldx, const void *w, int64_t ldw, int64_t d, int64_t end,
                        Vector sum[TILE_ROWS][STREAMS], const int rows, const int outs, Fetch *fetch, const int type,
                        const int zeros, const float *less, const int vectors) {
    for (; d + vectors * LANES <= end; d += vectors * LANES) {
        if (fetch->wait-- == 0) {
            fetch->wait = fetch->every - 1;
#pragma GCC unroll 8
            for (int o = 0; o < outs; ++o) PREFETCH(place(fetch->next, o * ldw + d, type));
        }
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
            Vector left[TILE_ROWS], right[STREAMS];
            int64_t at = d + v * LANES;
            if (rows < outs) {          /* the fewer of the two are kept in registers */
#pragma GCC unroll 8
                for (int r = 0; r < rows; ++r) left[r] = *(const Vector *)(x + r * ldx + at);
#pragma GCC unroll 8
                for (int o = 0; o < outs; ++o) {
                    right[o] = weights_of(w, o * ldw + at, type, zeros, less[o]);
#pragma GCC unroll 8
                    for (int r = 0; r < rows; ++r) sum[r][o] += left[r] * right[o];
                }
            } else {
#pragma GCC unroll 8
                for (int o = 0; o < outs; ++o) right[o] = weights_of(w, o * ldw + at, type, zeros, less[o]);
#pragma GCC unroll 8
                for (int r = 0; r < rows; ++r) {
                    left[r] = *(const Vector *)(x + r * ldx + at);
                    IN_REGISTER(left[r]);
#pragma GCC unroll 8
                    for (int o = 0; o < outs; ++o) sum[r][o] += left[r] * right[o];
                }
            }
        }
    }
    return d;
}

/* `rows` times `outs` dots at a time. The sum over a group is multiplied by the group's scale. */
INLINE void dots(const float *x, int64_t ldx, const void *w, int64_t ldw, int64_t depth, Scales scales, int64_t first,
                 float *y, int64_t ldy, const int rows, const int outs, Fetch fetch, const int type, const int scaled,
                 const int zeros) {
    const int vectors = (int)(LINE / LANES / size_of(type));
    Vector whole[TILE_ROWS][STREAMS];
    float by[STREAMS], less[STREAMS];
    int64_t d = 0, groups = scaled ? scales.groups : 1;
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
        for (int o = 0; o < outs; ++o) whole[r][o] = (Vector){0};
    for (int64_t g = 0; g < groups; ++g) {
        int64_t end = g + 1 < groups ? (g + 1) * scales.group : depth;
        Vector sum[TILE_ROWS][STREAMS];
#pragma GCC unroll 8
        for (int o = 0; o < outs; ++o) {
            by[o] = scaled ? scales.scale[(first + o) * groups + g] : 1;
            less[o] = zeros ? number(scales.zero, (first + o) * groups + g, zeros) : 0;
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) sum[r][o] = (Vector){0};
        }
        d = add_dots(x, ldx, w, ldw, d, end, sum, rows, outs, &fetch, type, zeros, less, vectors);
        if (vectors > 1) d = add_dots(x, ldx, w, ldw, d, end, sum, rows, outs, &fetch, type, zeros, less, 1);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
            for (int o = 0; o < outs; ++o) whole[r][o] += sum[r][o] * by[o];
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
        float total[STREAMS];
        totals(whole[r], total, outs);
#pragma GCC unroll 8
        for (int o = 0; o < outs; ++o) {
            for (int64_t e = d; e < depth; ++e) {
                float right = number(w, o * ldw + e, type);
                if (scaled) right = (right - less[o]) * by[o];
                total[o] += x[r * ldx + e] * right;
            }
            y[r * ldy + o] = total[o];
        }
    }
}

/* All rows, `most` at a time, with `tile` rows of the weight; returns how many outs are done. What is left of the rows
   is computed with rows before it, once more. Each pass over the rows fetches its share of the next tile. */
INLINE int64_t dots_of_rows(const float *x, int64_t ldx, const void *w, int64_t ldw, int64_t depth, Scales scales,
                            int64_t first, float *y, int64_t ldy, int64_t rows, int64_t outs, const int most,
                            const int tile, const int type, const int scaled, const int zeros) {
    int64_t o = 0, passes = (rows + most - 1) / most;
    for (; o + tile <= outs; o += tile) {
        const void *from = place(w, o * ldw, type);
        for (int64_t p = 0; p < passes; ++p) {
            int64_t r = smaller(p * most, rows - most);
            Fetch fetch = {place(from, tile * ldw, type), passes, p};
            dots(x + r * ldx, ldx, from, ldw, depth, scales, first + o, y + r * ldy + o, ldy, most, tile, fetch, type,
                 scaled, zeros);
        }
    }
    return o;
}

/* The rows of the weight from `first` on. */
INLINE void product_of(const float *x, int64_t ldx, const void *w, int64_t ldw, int64_t depth, Scales scales,
                       int64_t first, float *y, int64_t ldy, int64_t rows, int64_t outs, const int type,
                       const int scaled, const int zeros) {
    Fetch nothing = {w, depth, depth};
    int64_t o = 0;
    w = place(w, first * ldw, type);
#define TILES(ROWS, OUTS) \
    o = dots_of_rows(x, ldx, w, ldw, depth, scales, first, y, ldy, rows, outs, ROWS, OUTS, type, scaled, zeros)
    if (TILE_ROWS == 8 && rows >= 8) TILES(TILE_ROWS, 3);
    else if (rows >= 4) TILES(4, TILE_ROWS == 8 || type == FLOAT ? 3 : 2);
    else if (rows >= 2) TILES(2, 4);
    else TILES(1, STREAMS);
#undef TILES
    for (; o < outs; ++o)
        for (int64_t r = 0; r < rows; ++r)
            dots(x + r * ldx, ldx, place(w, o * ldw, type), ldw, depth, scales, first + o, y + r * ldy + o, ldy, 1, 1,
                 nothing, type, scaled, zeros);
}

/* ---- w is [depth][out] ---- */

/* `deep` rows of the weight are added to all rows of y, `vectors` columns at a time; returns how many
   columns are done, from o on. */
INLINE int64_t add_columns(const float *x, int64_t ldx, const void *w, int64_t ldw, float *y, int64_t ldy,
                           int64_t rows, int64_t o, int64_t outs, const int deep, const int vectors, const int type) {
    for (; o + vectors * LANES <= outs; o += vectors * LANES) {
        Vector right[DEEP][VECTORS];
#pragma GCC unroll 8
        for (int d = 0; d < deep; ++d)
#pragma GCC unroll 8
            for (int v = 0; v < vectors; ++v) {
                int64_t at = d * ldw + o + v * LANES;
                PREFETCH(place(w, at + deep * ldw, type));
                right[d][v] = vector(w, at, type);
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

INLINE void add_deep(const float *x, int64_t ldx, const void *w, int64_t ldw, float *y, int64_t ldy, int64_t rows,
                     int64_t outs, const int deep, const int type) {
    int64_t o = add_columns(x, ldx, w, ldw, y, ldy, rows, 0, outs, deep, VECTORS, type);
    o = add_columns(x, ldx, w, ldw, y, ldy, rows, o, outs, deep, 1, type);
    for (; o < outs; ++o)
        for (int64_t r = 0; r < rows; ++r)
            for (int d = 0; d < deep; ++d) y[r * ldy + o] += x[r * ldx + d] * number(w, d * ldw + o, type);
}

/* The results of a share of columns that a thread computes at a time, in memory of its own: rows of y may lie a
   multiple of 4096 bytes apart, where they would displace each other in the first cache. */
enum { SHARE = 4096, LEAST_COLUMNS = 128, MOST_ROWS = SHARE / LEAST_COLUMNS, APART = 16 };

/* The columns of the weight from `first` on. */
INLINE void product_turned_of(const float *x, int64_t ldx, const void *w, int64_t ldw, int64_t depth, int64_t first,
                              float *y, int64_t ldy, int64_t rows, int64_t outs, const int type) {
    float share[SHARE + MOST_ROWS * (APART + VECTORS * LANES)];
    int64_t ld = outs + APART, d = 0;
    w = place(w, first, type);
    memset(share, 0, sizeof(float) * rows * ld);
    for (; d + DEEP <= depth; d += DEEP)
        add_deep(x + d, ldx, place(w, d * ldw, type), ldw, share, ld, rows, outs, DEEP, type);
    for (; d < depth; ++d) add_deep(x + d, ldx, place(w, d * ldw, type), ldw, share, ld, rows, outs, 1, type);
    for (int64_t r = 0; r < rows; ++r) memcpy(y + r * ldy, share + r * ld, sizeof(float) * outs);
}
