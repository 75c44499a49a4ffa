/* Products of rows that fill vectors with a weight [out][depth], y[row][out] = sum over d of x[row][d] w[out][d].
   Vectors are of rows: a thread turns x to panels [depth][rows of a vector or more], and multiplies them by single
   elements of the weight, which is read where it lies. Sums are turned back at the end. For about a hundred rows that
   costs a share of one over the number of outputs of an item, where copying the weight (gemm.h) costs a share of one
   over the number of rows. For few rows no vector of sums has to be added up, as dots need it (product.h); IN_ORDER they
   are computed so however few they are: the vectors' other places are idle, but the weight is read as fast. */

/* Elements d .. d + deep - 1 of `count` rows of x to panel [depth][wide]; both are at most LANES, and zeros fill the
   vectors. */
INLINE void turn_square(const float *x, int64_t ldx, int64_t deep, int64_t count, float *panel, int64_t wide) {
    Vector part[LANES];
    for (int64_t r = 0; r < LANES; ++r) {
        part[r] = (Vector){0};
        if (r < count && deep == LANES) part[r] = *(const Vector *)(x + r * ldx);
        else if (r < count) for (int64_t e = 0; e < deep; ++e) part[r][e] = x[r * ldx + e];
    }
    if (deep == LANES) store_turned(part, panel, wide);
    else
        for (int64_t e = 0; e < deep; ++e)
            for (int64_t r = 0; r < LANES; ++r) panel[e * wide + r] = part[r][e];
}

/* The sums of LANES outputs [out][wide] to y, for `count` rows; `outs` of them are there. */
INLINE void turn_back(const float *sums, int64_t wide, int64_t outs, float *y, int64_t ldy, int64_t count) {
    Vector part[LANES];
    for (int64_t o = 0; o < LANES; ++o) part[o] = o < outs ? *(const Vector *)(sums + o * wide) : (Vector){0};
    if (outs == LANES && count == LANES) store_turned(part, y, ldy);
    else
        for (int64_t r = 0; r < count; ++r)
            for (int64_t o = 0; o < outs; ++o) y[r * ldy + o] = part[o][r];
}

/* Adds to the sums of `count` outputs [out][wide] a part of the depth: rows of the weight times a panel. */
INLINE void add_rows(float *sums, const float *w, int64_t ldw, const float *panel, int64_t wide, int64_t depth,
                     int64_t count) {
#define TILE(OUTS, WIDE) \
    multiply_tile(sums, (WIDE) * LANES, w, ldw, 1, panel, (WIDE) * LANES, depth, ONES, OUTS, WIDE, 1)
#define TILES(WIDE)                             \
    if (wide == (WIDE) * LANES) {               \
        if (count == STEP_Q) TILE(STEP_Q, WIDE); \
        else TILE(STEP_Q - 1, WIDE);            \
    }
    TILES(STEP_N)
    if (STEP_N > 2) { TILES(STEP_N - 1) }
    if (STEP_N > 3) { TILES(STEP_N - 2) }
    if (STEP_N == 2) { TILES(1) }
#undef TILES
#undef TILE
}

/* All rows times rows `first` .. `first + outs - 1` of the weight. */
static void product_by_rows(const float *x, int64_t ldx, const float *w, int64_t ldw, int64_t depth, int64_t first,
                            float *y, int64_t ldy, int64_t rows, int64_t outs, float *room) {
    int64_t vectors = parts_of(rows, LANES), panels = parts_of(vectors, STEP_N), tiles = parts_of(outs, STEP_Q);
    int64_t part = larger(LANES, X_PART / (vectors * LANES * LANES) * LANES), size = sizeof(float);
    float *turned = room, *sums = room + X_PART;
    memset(sums, 0, sizeof(float) * vectors * LANES * outs);
    for (int64_t from = 0, until; from < depth; from = until) {
        until = smaller(from + part, depth);
        for (int64_t p = 0; p < panels; ++p) {
            int64_t begin = row_of(p, panels, vectors) * LANES, end = row_of(p + 1, panels, vectors) * LANES;
            float *panel = turned + begin * part;
            for (int64_t d = from; d < until; d += LANES)
                for (int64_t r = begin; r < end; r += LANES)
                    turn_square(x + r * ldx + d, ldx, smaller(LANES, until - d), rows - r,
                                panel + (d - from) * (end - begin) + r - begin, end - begin);
        }
        for (int64_t t = 0; t < tiles; ++t) {
            int64_t o = row_of(t, tiles, outs), count = row_of(t + 1, tiles, outs) - o;
            const float *of = w + (first + o) * ldw + from;
            Soon soon = {place(of, 2 * STEP_Q * ldw, FLOAT), ldw * size, STEP_Q, (until - from) * size};
            for (int64_t p = 0; p < panels; ++p) {
                int64_t begin = row_of(p, panels, vectors) * LANES, end = row_of(p + 1, panels, vectors) * LANES;
                fetch_part(soon, p, panels);
                add_rows(sums + begin * outs + o * (end - begin), of, ldw, turned + begin * part, end - begin,
                         until - from, count);
            }
        }
    }
    for (int64_t p = 0; p < panels; ++p) {
        int64_t begin = row_of(p, panels, vectors) * LANES, end = row_of(p + 1, panels, vectors) * LANES;
        for (int64_t o = 0; o < outs; o += LANES)
            for (int64_t r = begin; r < end; r += LANES)
                turn_back(sums + begin * outs + o * (end - begin) + r - begin, end - begin, smaller(LANES, outs - o),
                          y + r * ldy + o, ldy, smaller(LANES, rows - r));
    }
}

/* ---- few rows ---- */

/* Of a tile with one vector: as many sums as hide how long an addition takes, and no more, because rows of a weight often
   lie a multiple of 4096 bytes apart, where a first cache has places for eight lines. */
enum { FEW_OUTS = 8 };

/* Whether few rows fill more than half of their vectors. */
INLINE int64_t fill_vectors(int64_t rows) { return 2 * rows > LANES * parts_of(rows, LANES); }

/* Elements d .. end - 1 of row `o` of a weight, as many as a line of floats has, as numbers. */
INLINE void widen_line(const void *w, int64_t ldw, Scales scales, int64_t o, int64_t d, int64_t end, float *to, const int type,
                  const int scaled, const int zeros) {
    for (; d < end; d += LANES, to += LANES) {
        int64_t at = o * ldw + d, of = o * scales.groups + (scaled ? d / scales.group : 0), deep = smaller(LANES, end - d);
        Vector part = (Vector){0};
        if (deep == LANES) part = vector(w, at, type);
        else for (int64_t e = 0; e < deep; ++e) part[e] = number(w, at + e, type);
        if (zeros) part -= number(scales.zero, of, zeros);
        if (scaled) part *= scales.scale[of];
        *(Vector *)to = part;
    }
}

/* Rows `first` .. `first + outs - 1` of the weight times a panel of one or two vectors, to `count` rows of y. */
INLINE void dots_of_vectors(const float *panel, const void *w, int64_t ldw, int64_t depth, Scales scales, int64_t first,
                            float *y, int64_t ldy, int64_t count, Fetch fetch, const int outs, const int vectors,
                            const int type, const int scaled, const int zeros) {
    const int64_t piece = IN_ORDER ? piece_of(depth, scales, type) : depth;
    const int plain = type == FLOAT && !scaled && !zeros;
    const float *of = (const float *)w + first * ldw; /* where it has floats */
    float wide[FEW_OUTS][LINE / sizeof(float)] __attribute__((aligned(64)));
    Vector whole[FEW_OUTS][2];
    for (int64_t begin = 0; begin < depth; begin += piece) {
        const int64_t end = smaller(begin + piece, depth);
        Vector sum[FEW_OUTS][2], right[2];
#pragma GCC unroll 16
        for (int o = 0; o < outs; ++o)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; ++v) sum[o][v] = (Vector){0};
        for (int64_t from = begin; from < end; from += LINE / size_of(FLOAT)) {
            int64_t until = smaller(from + LINE / size_of(FLOAT), end);
            if (fetch.wait-- == 0) {
                fetch.wait = fetch.every - 1;
#pragma GCC unroll 16
                for (int o = 0; o < outs; ++o) PREFETCH(place(fetch.next, o * ldw + from, type));
            }
            if (!plain)
                for (int o = 0; o < outs; ++o) widen_line(w, ldw, scales, first + o, from, until, wide[o], type, scaled, zeros);
            for (int64_t d = from; d < until; ++d) {
#pragma GCC unroll 2
                for (int v = 0; v < vectors; ++v) right[v] = *(const Vector *)(panel + (d * vectors + v) * LANES);
#pragma GCC unroll 16
                for (int o = 0; o < outs; ++o)
#pragma GCC unroll 2
                    for (int v = 0; v < vectors; ++v)
                        ADD_PRODUCT(sum[o][v], plain ? of[o * ldw + d] : wide[o][d - from], right[v]);
            }
        }
#pragma GCC unroll 16
        for (int o = 0; o < outs; ++o)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; ++v) {
                if (begin) whole[o][v] += sum[o][v];
                else whole[o][v] = sum[o][v];
            }
    }
    for (int v = 0; v < vectors; ++v)
        for (int64_t r = 0; r < smaller(LANES, count - v * LANES); ++r)
#pragma GCC unroll 16
            for (int o = 0; o < outs; ++o) y[(v * LANES + r) * ldy + o] = whole[o][v][r];
}

/* Rows of the weight, `tile` at a time, times all panels, each of which fetches its share of the next tile. What is left
   of the rows is computed with rows before it, once more. */
INLINE void tiles_of_vectors(const float *panels, const void *w, int64_t ldw, int64_t depth, Scales scales,
                             int64_t first, float *y, int64_t ldy, int64_t rows, int64_t outs, const int tile,
                             const int type, const int scaled, const int zeros) {
    int64_t vectors = parts_of(rows, LANES), passes = parts_of(vectors, 2);
    for (int64_t at = 0; at < outs; at += tile) {
        int64_t o = smaller(at, outs - tile);
        for (int64_t p = 0; p < passes; ++p) {
            Fetch fetch = {place(w, (first + o + tile) * ldw, type), passes, p};
            const float *panel = panels + 2 * p * LANES * depth;
            float *to = y + 2 * p * LANES * ldy + o;
            int64_t count = rows - 2 * p * LANES;
            if (count > LANES && tile < FEW_OUTS)
                dots_of_vectors(panel, w, ldw, depth, scales, first + o, to, ldy, count, fetch, tile, 2, type, scaled, zeros);
            else
                dots_of_vectors(panel, w, ldw, depth, scales, first + o, to, ldy, count, fetch, tile, 1, type, scaled, zeros);
        }
    }
}

/* All rows, which are few, times rows `first` .. `first + outs - 1` of the weight. */
INLINE void product_of_few_by_rows(const float *x, int64_t ldx, const void *w, int64_t ldw, int64_t depth,
                                   Scales scales, int64_t first, float *y, int64_t ldy, int64_t rows, int64_t outs,
                                   float *panels, const int type, const int scaled, const int zeros) {
    for (int64_t begin = 0; begin < rows; begin += 2 * LANES) {
        int64_t wide = smaller(2, parts_of(rows - begin, LANES)) * LANES;
        for (int64_t d = 0; d < depth; d += LANES)
            for (int64_t r = 0; r < wide; r += LANES)
                turn_square(x + (begin + r) * ldx + d, ldx, smaller(LANES, depth - d), rows - begin - r,
                            panels + begin * depth + d * wide + r, wide);
    }
#define TILES(TILE) tiles_of_vectors(panels, w, ldw, depth, scales, first, y, ldy, rows, outs, TILE, type, scaled, zeros)
    if (outs < STEP_Q) TILES(1);
    else if (rows > LANES || outs < FEW_OUTS) TILES(STEP_Q);
    else TILES(FEW_OUTS);
#undef TILES
}
