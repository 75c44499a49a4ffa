/* Products of rows that fill vectors with a weight [out][depth], y[row][out] = sum over d of x[row][d] w[out][d].
   Vectors are of rows: a thread turns x to panels [depth][rows of a vector or more], and multiplies them by single
   elements of the weight, which is read where it lies. Sums are turned back at the end. For about a hundred rows that
   costs a share of one over the number of outputs of an item, where copying the weight (gemm.h) costs a share of one
   over the number of rows. */

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
