/* Products of few rows with a weight, y[row][out] = sum over d of x[row][d] w[out][d]. A weight is read once, in
   the layout that it has, by several streams at a time, so that the memory's speed is the limit; what comes next
   is fetched into the second cache meanwhile. Integers are widened in registers: only their bytes are read.
   What `type`, `scaled` and `zeros` say is known when compiling. */

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

/* What the integers of a group of some rows are multiplied by, and what is subtracted from them. */
typedef struct { float by[STREAMS], less[STREAMS]; } Group;

INLINE Group group_of(Scales scales, int64_t first, int64_t g, const int outs, const int scaled, const int zeros) {
    Group found;
#pragma GCC unroll 8
    for (int o = 0; o < outs; ++o) {
        int64_t at = (first + o) * scales.groups + g;
        found.by[o] = scaled ? scales.scale[at] : 1;
        found.less[o] = zeros ? number(scales.zero, at, zeros) : 0;
    }
    return found;
}

/* Elements of row `o` of a weight, multiplied by the scale if there are so many rows of x that it is cheaper than to
   multiply sums. */
INLINE Vector weights_of(const void *w, int64_t at, int o, const Group *group, const int type, const int scaled,
                         const int zeros) {
    Vector found = vector(w, at, type);
    if (zeros) found -= group->less[o];
    if (scaled) found *= group->by[o];
    IN_REGISTER(found);
    return found;
}

/* A vector of each of the rows times one of each of the outs. */
INLINE void add_products(const float *x, int64_t ldx, const void *w, int64_t ldw, int64_t at, const Group *group,
                         Vector sum[TILE_ROWS][STREAMS], const int rows, const int outs, const int type,
                         const int scaled, const int zeros) {
    Vector left[TILE_ROWS], right[STREAMS];
    if (rows < outs) {                  /* the fewer of the two are kept in registers */
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) left[r] = *(const Vector *)(x + r * ldx);
#pragma GCC unroll 8
        for (int o = 0; o < outs; ++o) {
            right[o] = weights_of(w, o * ldw + at, o, group, type, scaled, zeros);
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) sum[r][o] += left[r] * right[o];
        }
    } else {
#pragma GCC unroll 8
        for (int o = 0; o < outs; ++o) right[o] = weights_of(w, o * ldw + at, o, group, type, scaled, zeros);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            left[r] = *(const Vector *)(x + r * ldx);
            IN_REGISTER(left[r]);
#pragma GCC unroll 8
            for (int o = 0; o < outs; ++o) sum[r][o] += left[r] * right[o];
        }
    }
}

/* `rows` times `outs` dots of one group, from place d of the rows as far as `end`; returns where they end. If there are
   two elements at each place, x has those of the second kind `apart` from those of the first. */
INLINE int64_t add_dots(const float *x, int64_t ldx, const void *w, int64_t ldw, int64_t d, int64_t end, int64_t apart,
                        const Group *group, Vector sum[TILE_ROWS][STREAMS], const int rows, const int outs,
                        Fetch *fetch, const int type, const int both, const int scaled, const int zeros,
                        const int vectors) {
    for (; d + vectors * LANES <= end; d += vectors * LANES) {
        if (d * size_of(type) % LINE == 0 && fetch->wait-- == 0) {
            fetch->wait = fetch->every - 1;
#pragma GCC unroll 8
            for (int o = 0; o < outs; ++o) PREFETCH(place(fetch->next, o * ldw + d, type));
        }
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
            int64_t at = d + v * LANES;
            add_products(x + at, ldx, w, ldw, at, group, sum, rows, outs, type, scaled, zeros);
            if (both)
                add_products(x + apart + at, ldx, w, ldw, at, group, sum, rows, outs, type + HIGH, scaled, zeros);
        }
    }
    return d;
}

/* What is left of rows whose elements have one scale, element by element, from place d on. */
INLINE float dot_of_rest(const float *x, const void *w, int64_t d, int64_t row, int o, const Group *group,
                         const int type, const int scaled, const int zeros) {
    float total = 0;
    for (; d < row; ++d)
        for (int n = 0; n < elements_in(type); ++n) {
            float right = number(w, d, type + n * HIGH);
            if (zeros) right -= group->less[o];
            total += x[n * row + d] * (scaled ? right * group->by[o] : right);
        }
    return total;
}

/* `rows` times `outs` dots at a time, by pieces of the rows: of whole elements, those of a group. Where a place has two
   elements, a piece has those of one group, or of one for each half of a byte. */
INLINE void dots(const float *x, int64_t ldx, const void *w, int64_t ldw, int64_t depth, Scales scales, int64_t first,
                 float *y, int64_t ldy, const int rows, const int outs, Fetch fetch, const int type, const int scaled,
                 const int zeros) {
    const int vectors = (int)(LINE / LANES / size_of(type)), each = elements_in(type);
    const int few = vectors > 4 ? vectors / 4 : 1;  /* the least piece of bytes: a loop of single vectors is slow */
    const int early = scaled && rows > 1;
    const int together = each == 1 || scales.group % (2 * scales.run) == 0;
    int64_t row = depth / each, piece = together ? scales.group / each : scales.group, d = 0, g = 0;
    int64_t halves = together ? 0 : scales.run / scales.group;
    Vector whole[TILE_ROWS][STREAMS], sum[TILE_ROWS][STREAMS];
    Group group;
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
        for (int o = 0; o < outs; ++o) whole[r][o] = sum[r][o] = (Vector){0};
#define ADD_DOTS(N, BOTH, VECTORS)                                                                             \
    add_dots(x + N * row, ldx, w, ldw, d, at + piece, row, &group, sum, rows, outs, &fetch, type + N * HIGH, BOTH, \
             early, zeros, VECTORS)
#define ADD_PIECE(N, G, BOTH)                                           \
    do {                                                                \
        group = group_of(scales, first, G, outs, scaled, zeros);        \
        d = at;                                                         \
        if (vectors > 1) d = ADD_DOTS(N, BOTH, vectors);                \
        if (each == 2) d = ADD_DOTS(N, BOTH, 2 * few);                  \
        d = ADD_DOTS(N, BOTH, few);                                     \
        if (scaled && !early) ADD_SUMS;                                 \
    } while (0)
#define ADD_SUMS                                                                                \
    _Pragma("GCC unroll 8") for (int r = 0; r < rows; ++r)                                      \
    _Pragma("GCC unroll 8") for (int o = 0; o < outs; ++o)                                      \
        whole[r][o] += sum[r][o] * group.by[o], sum[r][o] = (Vector){0}
    for (int64_t at = 0; at < row; at += piece, ++g) {
        if (together) {
            ADD_PIECE(0, g, each == 2);
        } else {                        /* g counts the pieces of runs, each of which has two groups */
            int64_t low = g + g / halves * halves;
            ADD_PIECE(0, low + (scales.high_first ? halves : 0), 0);
            ADD_PIECE(1, low + (scales.high_first ? 0 : halves), 0);
        }
    }
#undef ADD_SUMS
#undef ADD_PIECE
#undef ADD_DOTS
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
        float total[STREAMS];
        totals(scaled && !early ? whole[r] : sum[r], total, outs);
#pragma GCC unroll 8
        for (int o = 0; o < outs; ++o)
            y[r * ldy + o] = total[o] + dot_of_rest(x + r * ldx, place(w, o * ldw, type), d, row, o, &group, type,
                                                    scaled, zeros);
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

/* `deep` rows of the weight, and as many elements of each row of x, NEIGHBOURS apart, are added to all rows of y,
   `vectors` columns at a time; returns how many columns are done, from o on. */
enum { NEIGHBOURS = IN_ORDER ? STRANDS : 1 };

INLINE int64_t add_columns(const float *x, int64_t ldx, const void *w, int64_t ldw, float *y, int64_t ldy,
                           int64_t rows, int64_t o, int64_t outs, const int deep, const int vectors, const int type) {
    for (; o + vectors * LANES <= outs; o += vectors * LANES) {
        Vector right[DEEP][VECTORS];
#pragma GCC unroll 8
        for (int d = 0; d < deep; ++d)
#pragma GCC unroll 8
            for (int v = 0; v < vectors; ++v) {
                int64_t at = d * NEIGHBOURS * ldw + o + v * LANES;
                PREFETCH(place(w, at + deep * NEIGHBOURS * ldw, type));
                right[d][v] = vector(w, at, type);
            }
        for (int64_t r = 0; r < rows; ++r) {
            Vector sum[VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < vectors; ++v) sum[v] = *(Vector *)(y + r * ldy + o + v * LANES);
#pragma GCC unroll 8
            for (int d = 0; d < deep; ++d) {
                float by = x[r * ldx + d * NEIGHBOURS];
#pragma GCC unroll 8
                for (int v = 0; v < vectors; ++v) ADD_PRODUCT(sum[v], by, right[d][v]);
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
            for (int d = 0; d < deep * NEIGHBOURS; d += NEIGHBOURS)
                ADD_NUMBERS(y[r * ldy + o], x[r * ldx + d], number(w, d * ldw + o, type));
}

/* The results of a share of columns that a thread computes at a time, in memory of its own: rows of y may lie a
   multiple of 4096 bytes apart, where they would displace each other in the first cache. They are more than that cache
   holds, because the pieces of the weight's rows should be long. */
enum { SHARE = 1 << 14, LEAST_COLUMNS = 512, MOST_ROWS = SHARE / LEAST_COLUMNS, APART = 16 };

/* The columns of the weight from `first` on. */
INLINE void product_turned_of(const float *x, int64_t ldx, const void *w, int64_t ldw, int64_t depth, int64_t first,
                              float *y, int64_t ldy, int64_t rows, int64_t outs, const int type) {
    float share[SHARE + MOST_ROWS * (APART + VECTORS * LANES)];
    int64_t ld = outs + APART;
    w = place(w, first, type);
    const int64_t piece = IN_ORDER ? PART : depth;
    for (int64_t from = 0, end; from < depth; from = end) {
        end = smaller(from + piece, depth);
        for (int64_t strand = from; strand < smaller(from + NEIGHBOURS, end); ++strand) {
            int64_t d = strand;
            memset(share, 0, sizeof(float) * rows * ld);
            for (; d + (DEEP - 1) * NEIGHBOURS < end; d += DEEP * NEIGHBOURS)
                add_deep(x + d, ldx, place(w, d * ldw, type), ldw, share, ld, rows, outs, DEEP, type);
            for (; d < end; d += NEIGHBOURS)
                add_deep(x + d, ldx, place(w, d * ldw, type), ldw, share, ld, rows, outs, 1, type);
            for (int64_t r = 0; r < rows; ++r) {
                if (!strand) memcpy(y + r * ldy, share + r * ld, sizeof(float) * outs);
                else
#pragma omp simd
                    for (int64_t o = 0; o < outs; ++o) y[r * ldy + o] += share[r * ld + o];
            }
        }
    }
}

/* Columns c0 .. c1 - 1 of y from the sums of parts of the depth, [parts][rows][width]. */
static void add_parts(const float *sums, int64_t parts, int64_t rows, int64_t width, int64_t c0, int64_t c1, float *y,
                      int64_t ldy) {
    for (int64_t r = 0; r < rows; ++r) {
        memcpy(y + r * ldy + c0, sums + r * width + c0, sizeof(float) * (c1 - c0));
        for (int64_t p = 1; p < parts; ++p) {
            const float *more = sums + (p * rows + r) * width;
#pragma omp simd
            for (int64_t o = c0; o < c1; ++o) y[r * ldy + o] += more[o];
        }
    }
}
