/* Products of many rows, y[row][out] = sum over d of x[row][d] w[out][d], near the speed of the arithmetic units. A
   thread copies its share of the weight to panels, [depth][PANEL] for PANEL of its outputs, before it multiplies.
   That reads the weight once, in the layout that it has, and widens integers once; for so many rows it costs a few
   percent, so no copy is kept. A part of a panel stays in the first cache while a block of rows passes it: where all
   rows pass at once it is copied just before, always to the same place, and never leaves that cache. */

enum {
    PANEL = STEP_N * LANES,
    PART = PANEL > 32 ? 128 : 256,      /* elements of the depth */
    COPIED = PANEL > 32 ? 96 : 256,     /* of those that are copied just before: 24 or 16 KiB */
    NEAR = 1 << 17,                     /* elements of panels, and of a block of rows: half of the second cache */
    FEWEST_ROWS = 64,                   /* of an item, where rows are divided too */
    IN_TURN = 8,                        /* panels of an item that are needed once */
    MOST_ROWS_ACROSS = 192,             /* rows.h: rows and outputs of an item, and elements of a part of x, */
    MOST_OUTS_ACROSS = 512,             /* so that it and the sums stay in the second cache */
    X_PART = NEAR / 2,
};
static const float ONES[STEP_Q] = {1, 1, 1, 1, 1, 1};

/* Work that threads take one by one: `columns` and `rows` of a product, and how many pieces of columns there are,
   and pieces in all. */
typedef struct { int64_t columns, rows, shares, count; } Items;

static int64_t parts_of(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

/* How many tiles of rows pass all panels of an item before the next ones do. The panels are then kept, in the second
   cache. Where all rows pass at once, or only one panel could be kept, each panel is needed once. */
INLINE int64_t tiles_at_once(int64_t depth, int64_t rows) {
    int64_t tiles = parts_of(rows, STEP_Q), near = larger(1, NEAR / (depth * STEP_Q));
    return tiles <= near || NEAR / (depth * PANEL) <= 1 ? tiles : near;
}

/* Whether vectors are of rows (rows.h): there are few, and they fill 24 of 25 places. */
INLINE int64_t goes_across(int64_t rows, int64_t outs) {
    int64_t places = parts_of(rows, LANES) * LANES;
    return rows <= MOST_ROWS_ACROSS && 25 * rows >= 24 * places && places > LANES && outs >= 4 * STEP_Q;
}

/* Items of many rows: all threads get equally many. Where there are too few columns for the threads, rows are
   divided too. `across`: whether the weight is [out][depth], of floats. */
static Items items_of_many(int64_t width, int64_t depth, int64_t rows, int64_t members, int across) {
    int64_t panels = parts_of(width, PANEL), are_kept = tiles_at_once(depth, rows) < parts_of(rows, STEP_Q);
    int64_t most = are_kept ? NEAR / (depth * PANEL) : IN_TURN;
    if (across && goes_across(rows, width)) most = MOST_OUTS_ACROSS / PANEL;
    int64_t each = parts_of(panels, members * parts_of(panels, members * most));
    Items items = {each * PANEL, rows, parts_of(panels, each), 0};
    if (items.shares % members)
        items.rows = larger(smaller(rows, FEWEST_ROWS), parts_of(rows, parts_of(4 * members, items.shares)));
    items.rows = parts_of(rows, larger(1, rows / items.rows)); /* no short piece at the end */
    items.count = items.shares * parts_of(rows, items.rows);
    return items;
}

/* The elements of panels of an item, or of a part of x and of sums. */
static int64_t room_of(int64_t depth) {
    return larger(larger(PANEL * depth, NEAR), X_PART + MOST_ROWS_ACROSS * MOST_OUTS_ACROSS);
}

/* LANES places of some rows of a weight, from d on: `deep` times `wide` elements, one of each place. The panel begins
   with element `from` of the depth. */
INLINE void copy_square(const void *w, int64_t ldw, Scales scales, int64_t first, int64_t d, int64_t deep, int64_t wide,
                        float *panel, int64_t from, const int n, const int type, const int scaled, const int zeros) {
    Vector part[LANES];
    int64_t at_depth = place_in_row(d, n, scales, type), to = at_depth - from;
    int64_t step = elements_in(type) == 2 && scales.run == 1 ? 2 : 1, group = scaled ? at_depth / scales.group : 0;
    for (int64_t o = 0; o < wide; ++o) {
        int64_t at = (first + o) * ldw + d, of = (first + o) * scales.groups + group;
        part[o] = (Vector){0};
        if (deep == LANES) part[o] = vector(w, at, type);
        else for (int64_t e = 0; e < deep; ++e) part[o][e] = number(w, at + e, type);
        if (zeros) part[o] -= number(scales.zero, of, zeros);
        if (scaled) part[o] *= scales.scale[of];
    }
    if (deep == LANES && wide == LANES)
        store_turned(part, panel + to * PANEL, step * PANEL);
    else
        for (int64_t e = 0; e < deep; ++e)
            for (int64_t o = 0; o < wide; ++o) panel[(to + e * step) * PANEL + o] = part[o][e];
}

/* Elements `from` .. `until` - 1 of `outs` rows of a weight [out][depth] from `first` on, at most PANEL; what is
   missing to PANEL becomes zero. Where two elements share a byte, all of the depth. */
INLINE void copy_panel(const void *w, int64_t ldw, int64_t from, int64_t until, Scales scales, int64_t first,
                       int64_t outs, float *panel, const int type, const int scaled, const int zeros) {
    if (outs < PANEL) memset(panel, 0, sizeof(float) * PANEL * (until - from));
    int64_t end = until / elements_in(type);
    for (int64_t o = 0; o < outs; o += LANES)
        for (int64_t d = from; d < end; d += LANES) {
            int64_t deep = smaller(LANES, end - d), wide = smaller(LANES, outs - o);
            copy_square(w, ldw, scales, first + o, d, deep, wide, panel + o, from, 0, type, scaled, zeros);
            if (elements_in(type) == 2)
                copy_square(w, ldw, scales, first + o, d, deep, wide, panel + o, from, 1, type + HIGH, scaled, zeros);
        }
}

/* The same for a weight [depth][out]. */
INLINE void copy_panel_turned(const void *w, int64_t ldw, int64_t from, int64_t until, int64_t first, int64_t outs,
                              float *panel, const int type) {
    for (int64_t d = from; d < until; ++d, panel += PANEL) {
        int64_t at = d * ldw + first, o = 0;
        for (; o + LANES <= outs; o += LANES) *(Vector *)(panel + o) = vector(w, at + o, type);
        for (; o < outs; ++o) panel[o] = number(w, at + o, type);
        for (; o < PANEL; ++o) panel[o] = 0;
    }
}

/* The rows of tile `t` of `tiles` begin here. */
INLINE int64_t row_of(int64_t t, int64_t tiles, int64_t rows) { return rows * t / tiles; }

/* A part of a weight that is read next: `lines` rows of `bytes` bytes, `stride` bytes apart. */
typedef struct { const char *data; int64_t stride, lines, bytes; } Soon;

/* Fetches part `n` of `parts` of it. */
INLINE void fetch_part(Soon soon, int64_t n, int64_t parts) {
    for (int64_t l = soon.lines * n / parts; l < soon.lines * (n + 1) / parts; ++l)
        for (int64_t b = 0; b < soon.bytes; b += LINE) PREFETCH(soon.data + l * soon.stride + b);
}

/* Tiles t0 .. t1 - 1 of the rows times one panel, from element `from` of the depth to `until`, with `outs` outputs;
   what is before `from` has been added up. There are at least 20 rows, so a tile has STEP_Q of them or one less. */
static void multiply_by_panel(const float *x, int64_t ldx, const float *panel, int64_t from, int64_t until, float *y,
                              int64_t ldy, int64_t rows, int64_t tiles, int64_t t0, int64_t t1, int64_t outs,
                              Soon soon) {
    float whole[STEP_Q * PANEL];
    int64_t part = outs == PANEL ? PART : until, step = 0, steps = parts_of(until - from, part) * (t1 - t0);
    for (int64_t d = from; d < until; d += part)
        for (int64_t t = t0; t < t1; ++t) {
            int64_t r = row_of(t, tiles, rows), count = row_of(t + 1, tiles, rows) - r, ld = ldy;
            const float *left = x + r * ldx + d;
            float *to = y + r * ldy;
            fetch_part(soon, step++, steps);
            if (outs < PANEL) to = whole, ld = PANEL;
#define TILE(BY, ROWS) \
    multiply_tile(to, ld, left, ldx, 1, panel + (d - from) * PANEL, PANEL, smaller(part, until - d), BY, ROWS, STEP_N, 1)
            if (count == STEP_Q) d ? TILE(ONES, STEP_Q) : TILE(0, STEP_Q);
            else d ? TILE(ONES, STEP_Q - 1) : TILE(0, STEP_Q - 1);
#undef TILE
            if (outs < PANEL)
                for (int64_t i = 0; i < count; ++i) memcpy(y + (r + i) * ldy, whole + i * PANEL, sizeof(float) * outs);
        }
}

/* All rows times columns `first` .. `first + outs - 1` of the weight, by way of `panels`. */
INLINE void product_of_many(const float *x, int64_t ldx, const void *w, int64_t ldw, int64_t depth, Scales scales,
                            int64_t first, float *y, int64_t ldy, int64_t rows, int64_t outs, float *panels,
                            const int type, const int scaled, const int zeros, const int turned) {
    int64_t tiles = parts_of(rows, STEP_Q), block = tiles_at_once(depth, rows), size = size_of(type);
    int64_t part = block == tiles && elements_in(type) == 1 ? COPIED : depth;
    for (int64_t t = 0; t < tiles; t += block)
        for (int64_t o = 0; o < outs; o += PANEL) {
            int64_t wide = smaller(PANEL, outs - o), step = wide == PANEL ? part : depth, at = first + o;
            float *panel = block < tiles ? panels + o * depth : panels;
            for (int64_t from = 0, until; from < depth; from = until) {
                until = smaller(from + step, depth);
                int64_t d = until < depth ? until : 0, next = d ? o : o + PANEL; /* what is copied after this */
                int64_t more = larger(0, smaller(PANEL, outs - next)), deep = smaller(step, depth - d);
                Soon soon = {0};
                if (turned && !t) {
                    copy_panel_turned(w, ldw, from, until, at, wide, panel, type);
                    soon = (Soon){place(w, d * ldw + first + next, type), ldw * size, more ? deep : 0, more * size};
                } else if (!t) {
                    copy_panel(w, ldw, from, until, scales, at, wide, panel, type, scaled, zeros);
                    int64_t bytes = deep / elements_in(type) * size;
                    soon = (Soon){place(w, (first + next) * ldw + d, type), ldw * size, more, bytes};
                }
                multiply_by_panel(x, ldx, panel, from, until, y + o, ldy, rows, tiles, t, smaller(t + block, tiles),
                                  wide, soon);
            }
        }
}
