/* Products of many rows, y[row][out] = sum over d of x[row][d] w[out][d], near the speed of the arithmetic units. Of
   a piece of the depth, a thread copies a group of its outputs to panels, [strand by strand][PANEL] for PANEL outputs
   each, and multiplies all rows by them, block by block, before it copies the next group. That reads the weight once, in the
   layout that it has, and widens integers once; for so many rows it costs a few percent, so no copy is kept. A panel,
   a block's piece of x and its sums stay in the second cache. */

enum {
    NEAR = PANEL > 32 ? 1 << 17 : 1 << 16, /* the most elements of a group; half of them of a piece of a block of rows */
    GROUP = PANEL > 32 ? PANEL : 32,    /* outputs that are copied at once where there is one block of rows */
    COLUMNS = 128,                      /* the most outputs of a group and of an item */
    FEWEST_ROWS = 64,                   /* of an item, where rows are divided too */
    MOST_ROWS_ACROSS = 128,             /* rows.h: rows and outputs of an item, and elements of a part of x, */
    MOST_OUTS_ACROSS = 512,             /* so that it and the sums stay in the second cache */
    X_PART = PANEL > 32 ? 1 << 16 : 1 << 15,
};
static const float ONES[STEP_Q] = {1, 1, 1, 1, 1, 1};

/* Work that threads take one by one: `columns` and `rows` of a product, and a part of its depth; how many pieces of
   columns there are, how many parts of the depth, and items in all. */
typedef struct { int64_t columns, rows, shares, parts, count; } Items;

/* The elements of the panels of a group of few rows; of packed elements, whose bytes have two that are far apart, it is
   the whole `depth` that a panel has. */
INLINE int64_t room_of_group(int64_t depth) { return larger(PANEL, GROUP) * larger(PART, depth); }

/* Whether vectors are of rows (rows.h): there are few, and they fill 24 of 25 places. */
INLINE int64_t goes_across(int64_t rows, int64_t outs) {
    int64_t places = parts_of(rows, LANES) * LANES;
    return rows <= MOST_ROWS_ACROSS && 25 * rows >= 24 * places && places > LANES && outs >= 4 * STEP_Q;
}

/* Items of many rows: all threads get equally many. Where there are too few columns for the threads, rows are
   divided too. `across`: whether the weight is [out][depth], of floats. */
static Items items_of_many(int64_t width, int64_t depth, int64_t rows, int64_t members, int across) {
    int64_t panels = parts_of(width, PANEL);
    int64_t most = (across && goes_across(rows, width) ? MOST_OUTS_ACROSS : COLUMNS) / PANEL;
    int64_t each = parts_of(panels, members * parts_of(panels, members * most));
    Items items = {each * PANEL, rows, parts_of(panels, each), 1, 0};
    if (items.shares % members)
        items.rows = larger(smaller(rows, FEWEST_ROWS), parts_of(rows, parts_of(4 * members, items.shares)));
    items.rows = parts_of(rows, larger(1, rows / items.rows)); /* no short piece at the end */
    items.count = items.shares * parts_of(rows, items.rows);
    return items;
}

/* The elements that are the most of these: a panel of the whole depth, where a byte's elements are far apart; else a
   group, which has no more than NEAR, or GROUP outputs of a part; a part of x and sums (rows.h). */
static int64_t room_of(int64_t depth) {
    return larger(PANEL * depth, X_PART + MOST_ROWS_ACROSS * MOST_OUTS_ACROSS);
}

/* LANES places of some rows of a weight, from d on: `deep` times `wide` elements, one of each place. The panel has
   `piece` elements of the depth, the first of which is `from`. */
INLINE void copy_square(const void *w, int64_t ldw, Scales scales, int64_t first, int64_t d, int64_t deep, int64_t wide,
                        float *panel, int64_t from, int64_t piece, const int n, const int type, const int scaled, const int zeros) {
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
    if (deep == LANES && wide == LANES) {
        turn(part);
#pragma GCC unroll 16
        for (int64_t e = 0; e < LANES; ++e) *(Vector *)(panel + place_in_strands(to + e * step, piece) * PANEL) = part[e];
    } else
        for (int64_t e = 0; e < deep; ++e)
            for (int64_t o = 0; o < wide; ++o) panel[place_in_strands(to + e * step, piece) * PANEL + o] = part[o][e];
}

/* Elements `from` .. `until` - 1 of `outs` rows of a weight [out][depth] from `first` on, at most PANEL; what is
   missing to PANEL becomes zero. */
INLINE void copy_panel(const void *w, int64_t ldw, int64_t from, int64_t until, Scales scales, int64_t first,
                       int64_t outs, float *panel, const int type, const int scaled, const int zeros) {
    if (outs < PANEL) memset(panel, 0, sizeof(float) * PANEL * (until - from));
    int64_t begin = from / elements_in(type), end = until / elements_in(type);
    for (int64_t o = 0; o < outs; o += LANES)
        for (int64_t d = begin; d < end; d += LANES) {
            int64_t deep = smaller(LANES, end - d), wide = smaller(LANES, outs - o);
#define COPY_SQUARE(N) \
    copy_square(w, ldw, scales, first + o, d, deep, wide, panel + o, from, until - from, N, type + N * HIGH, scaled, zeros)
            COPY_SQUARE(0);
            if (elements_in(type) == 2) COPY_SQUARE(1);
#undef COPY_SQUARE
        }
}

/* The same for a weight [depth][out] and the panels of a group, one after another: whole rows of the group are read. */
INLINE void copy_group_turned(const void *w, int64_t ldw, int64_t from, int64_t until, int64_t first, int64_t outs,
                              float *panels, const int type) {
    int64_t step = (until - from) * PANEL;
    for (int64_t d = from; d < until; ++d) {
        float *to = panels + place_in_strands(d - from, until - from) * PANEL;
        int64_t at = d * ldw + first, end = at + outs;
        for (; at + PANEL <= end; at += PANEL, to += step)
            for (int64_t o = 0; o < PANEL; o += LANES) *(Vector *)(to + o) = vector(w, at + o, type);
        for (int64_t o = 0; at < end && o < PANEL; ++o) to[o] = at + o < end ? number(w, at + o, type) : 0;
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

/* Adds to the outputs of a tile of rows, STEP_Q or one less (`any` number), the product with `depth` elements of a
   strand. Where `is_first`, there is nothing yet to add to. */
INLINE void add_panel(const float *x, int64_t ldx, const float *panel, int64_t depth, float *y, int64_t ldy,
                      int64_t rows, int is_first, const int any) {
#define TILE(BY, ROWS) multiply_tile(y, ldy, x, ldx, STRANDS, panel, PANEL, depth, BY, ROWS, STEP_N, 1)
#define TILES(ROWS) is_first ? TILE(0, ROWS) : TILE(ONES, ROWS)
    if (rows == STEP_Q) TILES(STEP_Q);
    else if (rows == STEP_Q - 1 || !any) TILES(STEP_Q - 1);
    else if (rows == 4) TILES(4);
    else if (rows == 3) TILES(3);
    else if (rows == 2) TILES(2);
    else TILES(1);
#undef TILES
#undef TILE
}

/* The same for `outs` outputs, fewer than a panel has. */
static void add_short_panel(const float *x, int64_t ldx, const float *panel, int64_t depth, float *y, int64_t ldy,
                            int64_t rows, int64_t outs, int is_first, const int any) {
    float whole[STEP_Q * PANEL] = {0};
    for (int64_t i = 0; i < rows && !is_first; ++i) memcpy(whole + i * PANEL, y + i * ldy, sizeof(float) * outs);
    add_panel(x, ldx, panel, depth, whole, PANEL, rows, is_first, any);
    for (int64_t i = 0; i < rows; ++i) memcpy(y + i * ldy, whole + i * PANEL, sizeof(float) * outs);
}

/* Adds to the outputs of tiles `t` .. `last` - 1 of the rows, strand by strand, a panel of a piece that begins with
   element `from` of the depth, and fetches meanwhile. */
INLINE void add_piece(const float *x, int64_t ldx, const float *panel, int64_t from, int64_t piece, float *y,
                      int64_t ldy, int64_t rows, int64_t outs, int64_t tiles, int64_t t, int64_t last, Soon soon,
                      int64_t step, int64_t steps, const int any) {
    for (int64_t s = 0; s < smaller(STRANDS, piece); ++s) {
        int64_t depth = length_of(s, piece), is_first = !(from + s);
        for (int64_t n = t; n < last; ++n) {
            int64_t r = row_of(n, tiles, rows), count = row_of(n + 1, tiles, rows) - r;
            const float *left = x + r * ldx + from + s;
            fetch_part(soon, step++, steps);
            if (outs >= PANEL) add_panel(left, ldx, panel, depth, y + r * ldy, ldy, count, is_first, any);
            else add_short_panel(left, ldx, panel, depth, y + r * ldy, ldy, count, outs, is_first, any);
        }
        panel += depth * PANEL;
    }
}

/* Of few rows that meet panels: how many there are at most, how many are computed together, elements of a strand that
   all of them meet before the next ones, and how far before it is needed a panel is fetched. */
enum { FEW_ROWS = 16, TOGETHER = 4, NEXT = 64, AHEAD = 1 << 12 };

/* Adds to the sums of rows the product with `depth` elements of a strand; those that come first fetch what is AHEAD. */
INLINE void add_few(const float *x, int64_t ldx, const float *panel, int64_t depth, Vector *kept, const int rows,
                    int is_first) {
    Vector sum[TOGETHER][STEP_N], right[STEP_N];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < STEP_N; ++v) sum[r][v] = kept[r * STEP_N + v];
#define ADD_FEW(FETCH)                                                                                      \
    for (int64_t d = 0; d < depth; ++d, panel += PANEL) {                                                   \
        _Pragma("GCC unroll 4") for (int v = 0; v < STEP_N; ++v) {                                          \
            if (FETCH && v * LANES % ROW == 0) PREFETCH(panel + AHEAD + v * LANES);                         \
            right[v] = *(const Vector *)(panel + v * LANES);                                                \
            IN_REGISTER(right[v]);                                                                          \
        }                                                                                                   \
        _Pragma("GCC unroll 4") for (int r = 0; r < rows; ++r)                                              \
            _Pragma("GCC unroll 4") for (int v = 0; v < STEP_N; ++v)                                        \
                ADD_PRODUCT(sum[r][v], x[r * ldx + d * STRANDS], right[v]);                                 \
    }
    if (is_first) ADD_FEW(1)
    else ADD_FEW(0)
#undef ADD_FEW
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < STEP_N; ++v) kept[r * STEP_N + v] = sum[r][v];
}

/* Few rows times one panel, for its first `outs` outputs. */
static void few_rows_of_panel(const float *x, int64_t ldx, const float *panel, int64_t depth, float *y, int64_t ldy,
                              int64_t rows, int64_t outs) {
    Vector whole[FEW_ROWS * STEP_N], sum[FEW_ROWS * STEP_N];
    for (int64_t n = 0; n < rows * STEP_N; ++n) whole[n] = -(Vector){0}; /* to which zeros of both signs may be added */
    for (int64_t from = 0; from < depth; from += PART)
        for (int64_t s = 0, piece = smaller(PART, depth - from); s < smaller(STRANDS, piece); ++s) {
            const int64_t deep = length_of(s, piece);
            for (int64_t n = 0; n < rows * STEP_N; ++n) sum[n] = (Vector){0};
            for (int64_t d = 0; d < deep; d += NEXT)
                for (int64_t r = 0, n = smaller(NEXT, deep - d); r < rows; r += TOGETHER) {
                    const float *left = x + r * ldx + from + s + d * STRANDS, *right = panel + d * PANEL;
                    Vector *of = sum + r * STEP_N;
                    if (rows - r >= TOGETHER) add_few(left, ldx, right, n, of, TOGETHER, !r);
                    else if (rows - r == 3) add_few(left, ldx, right, n, of, 3, !r);
                    else if (rows - r == 2) add_few(left, ldx, right, n, of, 2, !r);
                    else add_few(left, ldx, right, n, of, 1, !r);
                }
            for (int64_t n = 0; n < rows * STEP_N; ++n) whole[n] += sum[n];
            panel += deep * PANEL;
        }
    for (int64_t r = 0; r < rows; ++r) memcpy(y + r * ldy, whole + r * STEP_N, sizeof(float) * smaller(outs, PANEL));
}

/* Any number of rows times columns `first` .. `first + outs - 1` of a weight that lies in panels of the whole depth,
   [panel][depth, piece by piece and strand by strand][PANEL]; `first` begins a panel. */
INLINE void product_of_panels(const float *x, int64_t ldx, const float *w, int64_t depth, int64_t first, float *y,
                              int64_t ldy, int64_t rows, int64_t outs) {
    int64_t tiles = parts_of(rows, STEP_Q), blocks = parts_of(rows, larger(STEP_Q, NEAR / 2 / PART));
    w += first * depth;
    for (int64_t o = 0; rows <= FEW_ROWS && o < outs; o += PANEL)
        few_rows_of_panel(x, ldx, w + o * depth, depth, y + o, ldy, rows, outs - o);
    for (int64_t b = 0; rows > FEW_ROWS && b < blocks; ++b)
        for (int64_t o = 0; o < outs; o += PANEL)
            for (int64_t from = 0; from < depth; from += PART)
                add_piece(x, ldx, w + o * depth + from * PANEL, from, smaller(PART, depth - from), y + o, ldy, rows,
                          outs - o, tiles, tiles * b / blocks, tiles * (b + 1) / blocks, (Soon){0}, 0, 1, 1);
}

/* All rows times columns `first` .. `first + outs - 1` of the weight, by way of `panels`. There are at least 20 rows,
   so a tile has STEP_Q of them or one less; IN_ORDER there may be any number. */
INLINE void product_of_many(const float *x, int64_t ldx, const void *w, int64_t ldw, int64_t depth, Scales scales,
                            int64_t first, float *y, int64_t ldy, int64_t rows, int64_t outs, float *panels,
                            const int type, const int scaled, const int zeros, const int turned) {
    const int64_t in_byte = elements_in(type), size = size_of(type);
    int64_t piece = piece_of(depth, scales, type);
    int64_t tiles = parts_of(rows, STEP_Q), blocks = parts_of(rows, larger(STEP_Q, NEAR / 2 / piece));
    int64_t group = blocks == 1 ? GROUP : larger(PANEL, smaller(COLUMNS, NEAR / piece / PANEL * PANEL));
    for (int64_t from = 0, until; from < depth; from = until) {
        until = smaller(from + piece, depth);
        for (int64_t g = 0, wide; g < outs; g += wide) {
            wide = smaller(group, outs - g);
            if (turned) copy_group_turned(w, ldw, from, until, first + g, wide, panels, type);
            else
                for (int64_t o = 0; o < wide; o += PANEL)
                    copy_panel(w, ldw, from, until, scales, first + g + o, smaller(PANEL, wide - o),
                               panels + o * (until - from), type, scaled, zeros);
            int is_last = g + wide == outs;
            int64_t d = is_last ? until : from, next = is_last ? 0 : g + wide; /* what is copied after this */
            int64_t deep = smaller(piece, depth - d), more = smaller(group, outs - next);
            Soon soon = {place(w, (first + next) * ldw + d, type), ldw * size, more, deep / in_byte * size};
            if (turned) soon = (Soon){place(w, d * ldw + first + next, type), ldw * size, deep, more * size};
            int64_t step = 0, steps = parts_of(wide, PANEL) * tiles * STRANDS;
            for (int64_t b = 0; b < blocks; ++b)
                for (int64_t o = 0; o < wide; o += PANEL) {
                    int64_t t = tiles * b / blocks, last = tiles * (b + 1) / blocks;
                    add_piece(x, ldx, panels + o * (until - from), from, until - from, y + g + o, ldy, rows, wide - o,
                              tiles, t, last, soon, step, steps, IN_ORDER);
                    step += (last - t) * STRANDS;
                }
        }
    }
}
