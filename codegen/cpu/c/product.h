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
   `group` of d. A group is whole vectors, unless there is only one. Of two elements in a byte, which are `run` apart,
   the first may have the high bits. */
typedef struct { const float *scale; const void *zero; int64_t group, groups, run, high_first; } Scales;

/* Which d is element `n` of byte `at` of a row, where bits count n: 0 for the low ones. */
INLINE int64_t place_in_row(int64_t at, const int n, Scales of, const int type) {
    if (elements_in(type) == 1) return at;
    return (at / of.run * 2 + (n ^ of.high_first)) * of.run + at % of.run;
}

/* Rows of x in the order in which the elements of a weight lie in bytes: those in low bits, then those in high bits. */
static void arrange(const float *x, int64_t ldx, int64_t rows, int64_t depth, Scales of, float *to) {
    for (int64_t r = 0; r < rows; ++r)
        for (int n = 0; n < 2; ++n, to += depth / 2) {
            const float *from = x + r * ldx + (n ^ of.high_first) * of.run;
            if (of.run == 1)
#pragma omp simd
                for (int64_t b = 0; b < depth / 2; ++b) to[b] = from[2 * b];
            else
                for (int64_t b = 0; b < depth / 2; b += of.run) memcpy(to + b, from + 2 * b, sizeof(float) * of.run);
        }
}

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

/* A vector of each of the rows times one of each of the outs. */
INLINE void add_products(const float *x, int64_t ldx, const void *w, int64_t ldw, int64_t at,
                         Vector sum[TILE_ROWS][STREAMS], const int rows, const int outs, const int type,
                         const int zeros, const float *less) {
    Vector left[TILE_ROWS], right[STREAMS];
    if (rows < outs) {                  /* the fewer of the two are kept in registers */
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) left[r] = *(const Vector *)(x + r * ldx);
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
            left[r] = *(const Vector *)(x + r * ldx);
            IN_REGISTER(left[r]);
#pragma GCC unroll 8
            for (int o = 0; o < outs; ++o) sum[r][o] += left[r] * right[o];
        }
    }
}

/* `rows` times `outs` dots, from place d of the rows as far as `end`; returns where they end. If there are two
   elements at each place, x has those of the second kind `apart` from those of the first. */
INLINE int64_t add_dots(const float *x, int64_t ldx, const void *w, int64_t ldw, int64_t d, int64_t end, int64_t apart,
                        Vector sum[TILE_ROWS][STREAMS], const int rows, const int outs, Fetch *fetch, const int type,
                        const int both, const int zeros, const float *less, const int vectors) {
    for (; d + vectors * LANES <= end; d += vectors * LANES) {
        if (fetch->wait-- == 0) {
            fetch->wait = fetch->every - 1;
#pragma GCC unroll 8
            for (int o = 0; o < outs; ++o) PREFETCH(place(fetch->next, o * ldw + d, type));
        }
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
            int64_t at = d + v * LANES;
            add_products(x + at, ldx, w, ldw, at, sum, rows, outs, type, zeros, less);
            if (both) add_products(x + apart + at, ldx, w, ldw, at, sum, rows, outs, type + HIGH, zeros, less);
        }
    }
    return d;
}

/* A piece of a row, and what its elements have in common: a piece of integers has one group, or, if it is not
   `together`, those in low and those in high bits have one each. */
INLINE int64_t piece_of(int64_t row, Scales scales, const int scaled, const int type, int *together) {
    *together = 1;
    if (!scaled || scales.groups == 1) return row;
    if (elements_in(type) == 1) return scales.group;
    *together = scales.group % (2 * scales.run) == 0;
    return *together ? scales.group / 2 : smaller(scales.run, scales.group);
}

typedef struct { float by[STREAMS], less[STREAMS]; } Group;

/* What the integers of a group of some rows are multiplied by, and what is subtracted from them. */
INLINE Group group_of(Scales scales, int64_t first, int64_t d, const int outs, const int scaled, const int zeros) {
    Group found;
#pragma GCC unroll 8
    for (int o = 0; o < outs; ++o) {
        int64_t at = scaled ? (first + o) * scales.groups + d / scales.group : 0;
        found.by[o] = scaled ? scales.scale[at] : 1;
        found.less[o] = zeros ? number(scales.zero, at, zeros) : 0;
    }
    return found;
}

INLINE void add_sums(Vector whole[TILE_ROWS][STREAMS], Vector sum[TILE_ROWS][STREAMS], const Group *group,
                     const int rows, const int outs) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
        for (int o = 0; o < outs; ++o) whole[r][o] += sum[r][o] * group->by[o], sum[r][o] = (Vector){0};
}

/* `rows` times `outs` dots at a time. The sum over a group is multiplied by the group's scale. */
INLINE void dots(const float *x, int64_t ldx, const void *w, int64_t ldw, int64_t depth, Scales scales, int64_t first,
                 float *y, int64_t ldy, const int rows, const int outs, Fetch fetch, const int type, const int scaled,
                 const int zeros) {
    const int vectors = (int)(LINE / LANES / size_of(type)), each = elements_in(type);
    Vector whole[TILE_ROWS][STREAMS], sum[TILE_ROWS][STREAMS];
    Group group;
    int together;
    int64_t row = depth / each, piece = piece_of(row, scales, scaled, type, &together), d = 0;
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
        for (int o = 0; o < outs; ++o) whole[r][o] = sum[r][o] = (Vector){0};
#define ADD_DOTS(X, TYPE, BOTH, VECTORS) \
    d = add_dots(X, ldx, w, ldw, d, at + piece, row, sum, rows, outs, &fetch, TYPE, BOTH, zeros, group.less, VECTORS)
#define ADD_PIECE(N, BOTH)                                                                              \
    do {                                                                                                \
        group = group_of(scales, first, place_in_row(at, N, scales, type), outs, scaled, zeros);        \
        d = at;                                                                                         \
        if (vectors > 1) ADD_DOTS(x + N * row, type + N * HIGH, BOTH, vectors);                         \
        ADD_DOTS(x + N * row, type + N * HIGH, BOTH, 1);                                                \
        add_sums(whole, sum, &group, rows, outs);                                                       \
    } while (0)
    for (int64_t at = 0; at < row; at += piece) {
        if (each == 1 || together) {
            ADD_PIECE(0, each == 2);
        } else {
            ADD_PIECE(0, 0);
            ADD_PIECE(1, 0);
        }
    }
#undef ADD_PIECE
#undef ADD_DOTS
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
        float total[STREAMS];
        totals(whole[r], total, outs);
#pragma GCC unroll 8
        for (int o = 0; o < outs; ++o) {
            for (int64_t e = d; e < row; ++e)
                for (int n = 0; n < each; ++n) {
                    float right = number(w, o * ldw + e, type + n * HIGH);
                    if (scaled) right = (right - group.less[o]) * group.by[o];
                    total[o] += x[r * ldx + n * row + e] * right;
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
