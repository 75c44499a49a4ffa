/* A few new tokens of each row against all its keys and values: those in pages, then the new ones. The
   heads of a group are one block, so that keys and values are read once. Where there are fewer such blocks
   than threads, each thread takes a part of the keys, and the last to finish combines the parts. Memory of
   pages beyond a row's tokens is never read. Pages have elements of the type KEPT, with a scale for each token
   and head if SCALED: dots are multiplied by the keys' scales and weights by those of the values. */

#if defined(FLOAT32)
enum { OWN = FLOAT };
#elif defined(FLOAT16)
enum { OWN = F16 };
#else
enum { OWN = BF16 };
#endif
#ifndef KEPT
#define KEPT OWN
#define SCALED 0
#endif

/* Keys or values that are consecutive in memory, `step` elements apart, and their scales. */
typedef struct { const void *data; int64_t step; const float *scale; int64_t scale_step; } Stretch;

INLINE Stretch from_place(Stretch s, int64_t count, const int type) {
    s.data = place(s.data, count * s.step, type);
    s.scale += count * s.scale_step;
    return s;
}

/* to[j] = the elements of j, for `keys` of them, `width` elements apart. */
INLINE void widen_all(Stretch from, int keys, int64_t width, float *to, int64_t apart, const int type) {
    for (int j = 0; j < keys; ++j) {
        int64_t d = 0;
        for (; d + LANES <= width; d += LANES)
            *(Vector *)(to + j * apart + d) = vector(from.data, j * from.step + d, type);
        for (; d < width; ++d) to[j * apart + d] = number(from.data, j * from.step + d, type);
        for (; d < apart; ++d) to[j * apart + d] = 0;
    }
}

/* S[row][j] = Q[row] . k[j] for `count` keys, at most STREAMS, that lie `stride` elements apart. */
INLINE void dots_of(const float *Q, int rows, int64_t D, const void *k, int64_t stride, const int count, float *S,
                    const int type) {
    for (int i = 0; i < rows; ++i) {
        const float *query = Q + i * D;
        Vector sums[STREAMS];
        float total[STREAMS];
        int64_t d = 0;
#pragma GCC unroll 8
        for (int j = 0; j < count; ++j) sums[j] = (Vector){0};
        for (; d + LANES <= D; d += LANES)
#pragma GCC unroll 8
            for (int j = 0; j < count; ++j) sums[j] += *(const Vector *)(query + d) * vector(k, j * stride + d, type);
        totals(sums, total, count);
#pragma GCC unroll 8
        for (int j = 0; j < count; ++j) {
            for (int64_t e = d; e < D; ++e) total[j] += query[e] * number(k, j * stride + e, type);
            S[i * BLOCK_K + j] = total[j];
        }
    }
}

/* What is read next, fetched meanwhile: the first `count` of the stretch, `width` elements of each. */
typedef struct { Stretch from; int64_t count, width; } Next;

INLINE void fetch(Next next, int64_t j, int64_t until, const int type) {
    for (until = smaller(until, next.count); j < until; ++j) {
        const char *at = place(next.from.data, j * next.from.step, type);
        for (int64_t b = 0; b < next.width * size_of(type); b += LINE) PREFETCH(at + b);
    }
}

/* The same for any number of keys. */
INLINE void dots_each(const float *Q, int rows, int64_t D, const void *k, int64_t stride, int keys, float *S,
                      const int type, Next next, const int kept) {
    int j = 0;
    for (; j + STREAMS <= keys; j += STREAMS) {
        fetch(next, j, j + STREAMS, kept);
        dots_of(Q, rows, D, place(k, j * stride, type), stride, STREAMS, S + j, type);
    }
    fetch(next, j, next.count, kept);
    for (; j < keys; ++j) dots_of(Q, rows, D, place(k, j * stride, type), stride, 1, S + j, type);
}

/* The same; what several rows read is widened once, in `pack`. */
INLINE void dots_few(const Call *c, const float *Q, int rows, Stretch k, int keys, float *S, float *pack,
                     Next next, const int type) {
    if (type == FLOAT || rows == 1) {
        dots_each(Q, rows, c->D, k.data, k.step, keys, S, type, next, type);
    } else {
        widen_all(k, keys, c->D, pack, c->D, type);
        dots_each(Q, rows, c->D, pack, c->D, keys, S, FLOAT, next, type);
    }
}

/* out = out * decay + sum over j of weight[j] v[j], in columns from d on, `vectors` at a time; returns the
   first column that is left. */
INLINE int64_t weigh_columns(float *out, float decay, const float *weight, const void *v, int64_t stride, int keys,
                             int64_t d, int64_t width, const int vectors, const int type, Next next, const int kept) {
    for (; d + vectors * LANES <= width; d += vectors * LANES) {
        Vector sums[4];
#pragma GCC unroll 4
        for (int n = 0; n < vectors; ++n) sums[n] = (Vector){0};
        for (int j = 0; j < keys; ++j) {
            if (!d) fetch(next, j, j + 1, kept);
#pragma GCC unroll 4
            for (int n = 0; n < vectors; ++n) sums[n] += weight[j] * vector(v, j * stride + d + n * LANES, type);
        }
#pragma GCC unroll 4
        for (int n = 0; n < vectors; ++n) {
            Vector *to = (Vector *)(out + d + n * LANES);
            *to = *to * decay + sums[n];
        }
    }
    return d;
}

INLINE void weigh_each(const Call *c, Block *t, int rows, const void *v, int64_t stride, int keys, const int type,
                       Next next, const int kept) {
    for (int i = 0; i < rows; ++i, next.count = 0) {
        float *out = t->O + i * c->wide, decay = t->decay[i];
        const float *weight = t->S + i * BLOCK_K;
        int64_t d = weigh_columns(out, decay, weight, v, stride, keys, 0, c->Dv, 4, type, next, kept);
        d = weigh_columns(out, decay, weight, v, stride, keys, d, c->Dv, 1, type, next, kept);
        if (d < c->Dv) {
            float sums[LANES] = {0};
            for (int j = 0; j < keys; ++j)
                for (int64_t e = d; e < c->Dv; ++e) sums[e - d] += weight[j] * number(v, j * stride + e, type);
            for (int64_t e = d; e < c->Dv; ++e) out[e] = out[e] * decay + sums[e - d];
        }
    }
}

/* O[row] = O[row] * decay[row] + sum over j of S[row][j] v[j]. */
INLINE void weigh_few(const Call *c, Block *t, int rows, Stretch v, int keys, float *pack, Next next, const int type) {
    if (type == FLOAT || rows == 1) {
        weigh_each(c, t, rows, v.data, v.step, keys, type, next, type);
    } else {
        widen_all(v, keys, c->Dv, pack, c->wide, type);
        weigh_each(c, t, rows, pack, c->wide, keys, FLOAT, next, type);
    }
}

enum { MANY = 12 };                     /* with at least so many queries, packing keys pays */

/* The same two products for many queries, by register blocks: keys with the width outermost, values as rows
   padded to whole vectors, both in `pack`. */
INLINE void dots_many(const Call *c, Block *t, int padded, Stretch k, int keys, float *pack, const int type) {
    for (int j = 0; j < keys; ++j)
        for (int64_t d = 0; d < c->D; ++d) pack[d * BLOCK_K + j] = number(k.data, j * k.step + d, type);
    for (int64_t d = 0; d < c->D; ++d)
        for (int j = keys; j < BLOCK_K; ++j) pack[d * BLOCK_K + j] = 0;
    multiply(t->S, BLOCK_K, t->Q, c->D, pack, BLOCK_K, c->D, padded, BLOCK_K, 0);
}

INLINE void weigh_many(const Call *c, Block *t, int padded, Stretch v, int keys, float *pack, const int type) {
    widen_all(v, keys, c->Dv, pack, c->wide, type);
    multiply(t->O, c->wide, t->S, BLOCK_K, pack, c->wide, keys, padded, c->wide, t->decay);
}

/* Queries of one row: those of `group` heads from `head` on, which share key head `kv`. `exact`: their weights are to be
   normalised before the program's `p = ...` statements change them, by the top and the total of each query. */
typedef struct { int64_t row, kv, head, group, position; int queries, exact; } Few;

static void scale_columns(float *S, int rows, Stretch by, int keys) {
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < keys; ++j) S[i * BLOCK_K + j] *= by.scale[j * by.scale_step];
}

/* S becomes the weights of `keys` keys from position k0 on. */
INLINE void weights_of_few(Call *c, const Few *at, Block *t, const Place *block, int64_t k0, int keys) {
    for (int g = 0; g < at->group; ++g)
        scores(c, (int)at->row, (int)at->head + g, (int)at->position, at->queries, (int)k0, keys,
               t->S + g * at->queries * BLOCK_K, t->next + g * at->queries);
    if (at->exact)
        for (int i = 0; i < block->rows; ++i) normalised(t->S + i * BLOCK_K, t->top[i], t->total[i]);
    else exponentials(block, t);
#ifdef HAS_WEIGHTS
    for (int g = 0; g < at->group; ++g)
        weigh(c, (int)at->row, (int)at->head + g, (int)at->position, at->queries, (int)k0, keys,
              t->S + g * at->queries * BLOCK_K);
#endif
}

/* One run of keys that are consecutive in memory, the first of them at position k0. */
INLINE void attend_run(Call *c, const Few *at, Block *t, Stretch k, Stretch v, int64_t k0, int64_t count,
                       const int type, const int scaled) {
    int rows = (int)(at->group * at->queries), padded = (rows + STEP_Q - 1) / STEP_Q * STEP_Q;
    float *pack = t->O + BLOCK_Q * c->wide;
    Place block = {0, 0, 0, rows, padded, 0, 0};
    for (int64_t done = 0; done < count; done += BLOCK_K) {
        int keys = (int)smaller(BLOCK_K, count - done);
        Stretch k_here = from_place(k, done, type), v_here = from_place(v, done, type);
        Next values = {v_here, keys, c->Dv};
        Next later = {from_place(k_here, keys, type), smaller(BLOCK_K, count - done - keys), c->D};
        if (!done) fetch((Next){k_here, keys, c->D}, 0, keys, type);
        if (rows >= MANY) dots_many(c, t, padded, k_here, keys, pack, type);
        else dots_few(c, t->Q, rows, k_here, keys, t->S, pack, values, type);
        if (scaled) scale_columns(t->S, rows, k_here, keys);
        weights_of_few(c, at, t, &block, k0 + done, keys);
        if (scaled) scale_columns(t->S, rows, v_here, keys);
        if (rows >= MANY) weigh_many(c, t, padded, v_here, keys, pack, type);
        else weigh_few(c, t, rows, v_here, keys, pack, later, type);
    }
}

static void attend_kept(Call *c, const Few *at, Block *t, Stretch k, Stretch v, int64_t k0, int64_t count) {
    attend_run(c, at, t, k, v, k0, count, KEPT, SCALED);
}

static void attend_new(Call *c, const Few *at, Block *t, Stretch k, Stretch v, int64_t k0, int64_t count) {
    attend_run(c, at, t, k, v, k0, count, OWN, 0);
}

static int64_t part_of(int64_t count, int64_t part, int64_t parts) {
    return part == parts ? count : count * part / parts / BLOCK_K * BLOCK_K;
}

/* What lies in a page of keys or values of one head, from the token `inside` on. */
INLINE Stretch in_page(const void *data, const int64_t *stride, const float *scale, const int64_t *scale_stride,
                       int64_t page, int64_t kv, int64_t inside) {
    Stretch s = {place(data, page * stride[0] + kv * stride[1] + inside * stride[2], KEPT), stride[2], scale,
                 scale_stride[2]};
    if (SCALED) s.scale += page * scale_stride[0] + kv * scale_stride[1] + inside * scale_stride[2];
    return s;
}

/* No key yet. */
static void clear_few(const Call *c, const Few *at, Block *t) {
    int rows = (int)(at->group * at->queries), padded = (rows + STEP_Q - 1) / STEP_Q * STEP_Q;
    for (int i = 0; i < BLOCK_Q; ++i) t->decay[i] = 1;
    memset(t->O, 0, sizeof(float) * padded * c->wide);
    if (at->exact) return;
    for (int i = 0; i < BLOCK_Q; ++i) t->top[i] = t->next[i] = -INFINITY;
    memset(t->sums, 0, sizeof t->sums);
}

/* The queries. */
static void begin_few(const Call *c, const Few *at, Block *t, int64_t first_query) {
    int rows = (int)(at->group * at->queries);
    for (int g = 0; g < at->group; ++g)
        for (int i = 0; i < at->queries; ++i) {
            const Element *q = (const Element *)c->q + (at->head + g) * c->q_stride[1] +
                               (first_query + i) * c->q_stride[2];
            float *to = t->Q + (g * at->queries + i) * c->D;
            for (int64_t d = 0; d < c->D; ++d) to[d] = widen(q[d]) * c->scale;
        }
    int padded = (rows + STEP_Q - 1) / STEP_Q * STEP_Q;
    memset(t->Q + rows * c->D, 0, sizeof(float) * (padded - rows) * c->D);
}

/* Keys and values that are consecutive in memory: `count` of them, from position `from` on. */
typedef struct { Stretch k, v; int64_t from, count; } Both;

/* Those in a page that begin at position p, which is kept, and end before `until`. */
INLINE Both kept_from(const Call *c, const Few *at, int64_t p, int64_t until) {
    int64_t capacity = c->columns * c->page, slot = p % capacity, inside = slot % c->page;
    int64_t page = c->table[at->row * c->columns + slot / c->page];
    int64_t count = smaller(until - p, smaller(c->page - inside, capacity - slot));
    return (Both){in_page(c->k, c->k_stride, c->k_scale, c->k_scale_stride, page, at->kv, inside),
                  in_page(c->v, c->v_stride, c->v_scale, c->v_scale_stride, page, at->kv, inside), p, count};
}

/* The new ones from position p on, before `until`. */
INLINE Both new_from(const Call *c, const Few *at, int64_t p, int64_t until) {
    int64_t first = c->starts[at->row] + p - c->held[at->row];
    Stretch k = {(const Element *)c->k_new + at->kv * c->k_new_stride[0], c->k_new_stride[1], 0, 0};
    Stretch v = {(const Element *)c->v_new + at->kv * c->v_new_stride[0], c->v_new_stride[1], 0, 0};
    return (Both){from_place(k, first, OWN), from_place(v, first, OWN), p, until - p};
}

/* The positions of the keys that are there for the queries: those from `first` on that are before `end`. */
typedef struct { int64_t first, end; } Seen;

INLINE Seen seen_by(const Call *c, const Few *at, int64_t first_query) {
    int64_t held = c->held[at->row], oldest = larger(0, held - c->columns * c->page);
    if (c->window) oldest = larger(oldest, at->position - c->window + 1);
    return (Seen){oldest, held + (c->k_new ? first_query + at->queries - c->starts[at->row] : 0)};
}

#ifndef ORDERED
/* The queries against part `part` of all the row's keys. */
static void see_part(Call *c, const Few *at, Block *t, int64_t first_query, int64_t part) {
    clear_few(c, at, t);
    Seen seen = seen_by(c, at, first_query);
    int64_t count = seen.end - seen.first, held = c->held[at->row];
    int64_t from = seen.first + part_of(count, part, c->parts), until = seen.first + part_of(count, part + 1, c->parts);
    for (Both some; from < smaller(held, until); from += some.count) {
        some = kept_from(c, at, from, smaller(held, until));
        attend_kept(c, at, t, some.k, some.v, from, some.count);
    }
    from = larger(from, held);
    if (until > from) {
        Both some = new_from(c, at, from, until);
        attend_new(c, at, t, some.k, some.v, from, some.count);
    }
}
#else
/* In order: what a query gets from its keys is the same number whatever other queries there are, and wherever keys lie.
   Blocks of keys begin at positions that are multiples of BLOCK_K. Scores are added up by strands (weights.h), values key
   by key. */

enum { BEFORE = 2 * LANES };

/* Keys with the width outermost, BLOCK_K apart. Keys a little further on, and the values, are fetched meanwhile. */
INLINE void turn_keys(Stretch from, int64_t keys, int64_t width, float *to, Next values, const int type) {
    for (int64_t j = 0; j < keys; j += LANES) {
        fetch((Next){from, j + BEFORE + LANES, width}, j + BEFORE, j + BEFORE + LANES, type);
        fetch(values, j, j + LANES, type);
        for (int64_t d = 0; d < width; d += LANES) {
            if (keys - j >= LANES && width - d >= LANES) {
                Vector part[LANES];
                for (int64_t l = 0; l < LANES; ++l) part[l] = vector(from.data, (j + l) * from.step + d, type);
                store_turned(part, to + d * BLOCK_K + j, BLOCK_K);
            } else
                for (int64_t l = j; l < smaller(keys, j + LANES); ++l)
                    for (int64_t e = d; e < smaller(width, d + LANES); ++e)
                        to[e * BLOCK_K + l] = number(from.data, l * from.step + e, type);
        }
    }
}

/* How a block is packed: values, or keys, row by row; or keys with the width outermost. */
enum { VALUES, KEYS, TURNED_KEYS };

/* Packs keys or values of the block that begins at position k0. Those that are kept rounded become the same numbers of
   the new tokens' type that they were when they were new. */
INLINE void pack_some(const Call *c, Both some, int64_t k0, const int how, float *pack, const int type, const int scaled) {
    Stretch from = how == VALUES ? some.v : some.k;
    int64_t at = some.from - k0, width = how == VALUES ? c->Dv : c->D, apart = how == VALUES ? c->wide : c->D;
    if (how == TURNED_KEYS) turn_keys(from, some.count, width, pack + at, (Next){some.v, some.count, c->Dv}, type);
    else widen_all(from, (int)some.count, width, pack + at * apart, apart, type);
    if (!scaled && (type == OWN || OWN == FLOAT)) return;
    for (int64_t j = 0; j < some.count; ++j)
        for (int64_t d = 0; d < width; ++d) {
            float *x = how == TURNED_KEYS ? pack + d * BLOCK_K + at + j : pack + (at + j) * apart + d;
            if (scaled) *x *= from.scale[j * from.scale_step];
            if (OWN != FLOAT) *x = widen(narrow(*x));
        }
}

/* Where the keys or the values of a block lie for a product: packed, or floats of one page where they are. */
typedef struct { const float *data; int64_t step; } Packed;

static Packed pack_block(const Call *c, const Few *at, Seen seen, int64_t k0, int64_t keys, const int how, float *pack) {
    int64_t held = c->held[at->row], until = k0 + keys, p = larger(k0, seen.first);
    int64_t step = how == TURNED_KEYS ? BLOCK_K : how == KEYS ? c->D : c->wide;
    const int is_whole = how == KEYS || (how == VALUES && c->wide == c->Dv);
    if (is_whole && KEPT == FLOAT && !SCALED && p == k0 && until <= held) {
        Both some = kept_from(c, at, p, until);
        Stretch from = how == KEYS ? some.k : some.v;
        if (some.count == keys) return (Packed){from.data, from.step};
    }
    if (p > k0 || keys < BLOCK_K) memset(pack, 0, sizeof(float) * (how == TURNED_KEYS ? c->D : step) * BLOCK_K);
    for (Both some; p < smaller(held, until); p += some.count) {
        some = kept_from(c, at, p, smaller(held, until));
        pack_some(c, some, k0, how, pack, KEPT, SCALED);
    }
    if (p < until) pack_some(c, new_from(c, at, p, until), k0, how, pack, OWN, 0);
    return (Packed){pack, step};
}

/* C = C * by + A B for some rows, so many vectors of B at a time; every `apart`th element of the depth. */
INLINE void multiply_some(float *C, int64_t ldc, const float *A, int64_t lda, Packed B, int64_t depth, int64_t columns,
                          const float *by, const int rows, const int vectors, const int apart) {
    int64_t n = 0, ldb = B.step * apart;
    for (; n + vectors * LANES <= columns; n += vectors * LANES)
        multiply_tile(C + n, ldc, A, lda, apart, B.data + n, ldb, depth, by, rows, vectors, 1);
    for (; n < columns; n += LANES) multiply_tile(C + n, ldc, A, lda, apart, B.data + n, ldb, depth, by, rows, 1, 1);
}

/* The same for any number of rows: few have as many vectors as keep the arithmetic units busy. */
INLINE void multiply_rows(float *C, int64_t ldc, const float *A, int64_t lda, Packed B, int64_t depth, int rows,
                          int64_t columns, const float *by, int64_t by_step, const int apart) {
#define SOME(ROWS, VECTORS)                                                                                            \
    multiply_some(C + i * ldc, ldc, A + i * lda, lda, B, depth, columns, by ? by + i * by_step : 0, ROWS, VECTORS, apart), \
        i += ROWS
    for (int i = 0; i < rows;)
        if (rows - i >= STEP_Q) SOME(STEP_Q, STEP_N);
        else if (rows - i >= 4) SOME(4, STEP_N);
        else if (rows - i >= 2) SOME(2, FEW_VECTORS / 2);
        else SOME(1, FEW_VECTORS);
#undef SOME
}

/* The products of queries with a block of keys. Few queries read keys as they lie; the values are fetched meanwhile. */
static void dots_in_order(const Call *c, const Few *at, Block *t, Seen seen, int64_t k0, int keys, int rows, float *pack) {
    static const float ones[STEP_Q] = {1, 1, 1, 1, 1, 1};
    const Scales none = {.group = c->D, .groups = 1};
    if (rows > FULL) {
        Packed found = pack_block(c, at, seen, k0, keys, TURNED_KEYS, pack);
        for (int64_t s = 0; s < smaller(STRANDS, c->D); ++s)
            multiply_rows(t->S, BLOCK_K, t->Q + s, c->D, (Packed){found.data + s * found.step, found.step},
                          length_of(s, c->D), rows, BLOCK_K, s ? ones : 0, 0, STRANDS);
        return;
    }
    Packed found = pack_block(c, at, seen, k0, keys, KEYS, pack);
    int64_t p = larger(k0, seen.first), held = c->held[at->row];
    Next values = {{0}, 0, c->Dv};
    if (p < held) {
        Both some = kept_from(c, at, p, smaller(held, k0 + keys));
        values.from = some.v, values.count = some.count;
    }
    for (int64_t j = 0; j < BLOCK_K; j += OUTS) {
        fetch(values, j, j + OUTS, KEPT);
        if (j < keys)
            product_by_strands(t->Q, c->D, found.data, found.step, c->D, none, j, t->S + j, BLOCK_K, rows,
                               smaller(OUTS, keys - j), FLOAT, 0, 0);
        for (int64_t l = larger(j, keys); l < j + OUTS; ++l)
            for (int i = 0; i < rows; ++i) t->S[i * BLOCK_K + l] = 0;
    }
}

static void see_part(Call *c, const Few *at, Block *t, int64_t first_query, int64_t part) {
    (void)part;
    clear_few(c, at, t);
    int rows = (int)(at->group * at->queries);
    float *pack = t->O + BLOCK_Q * c->wide;
    Place block = {0, 0, 0, rows, rows, 0, 0};
    Seen seen = seen_by(c, at, first_query);
    for (int64_t k0 = seen.first / BLOCK_K * BLOCK_K; k0 < seen.end; k0 += BLOCK_K) {
        int keys = (int)smaller(BLOCK_K, seen.end - k0);
        dots_in_order(c, at, t, seen, k0, keys, rows, pack);
        weights_of_few(c, at, t, &block, k0, keys);
        Packed found = pack_block(c, at, seen, k0, keys, VALUES, pack);
        multiply_rows(t->O, c->wide, t->S, BLOCK_K, found, keys, rows, c->wide, t->decay, 1, 1);
    }
}
#endif

/* Store one part's results, [rows][wide] and the top and the total of each row; true for the last thread of
   an item, which has combined all parts. */
static int join_parts(Call *c, const Few *at, Block *t, int64_t group, int64_t part) {
    int64_t rows = at->group * at->queries, size = BLOCK_Q * (c->wide + 2);
    float *all = c->partial + group * c->parts * size, *own = all + part * size;
    for (int i = 0; i < rows; ++i) {
        own[rows * c->wide + i] = t->top[i];
        own[rows * (c->wide + 1) + i] = sum_of(*(Vector *)(t->sums + i * LANES));
    }
    memcpy(own, t->O, sizeof(float) * rows * c->wide);
    if (take(c->arrived + group) != c->parts - 1) return 0;
    memset(t->sums, 0, sizeof t->sums);
    for (int i = 0; i < rows; ++i) {
        float top = -INFINITY, *out = t->O + i * c->wide;
        for (int p = 0; p < c->parts; ++p) top = maximum(top, all[p * size + rows * c->wide + i]);
        float base = top == -INFINITY ? 0.0f : top;
        memset(out, 0, sizeof(float) * c->wide);
        for (int p = 0; p < c->parts; ++p) {
            const float *found = all + p * size;
            float by = exp_of_negative(found[rows * c->wide + i] - base);
            t->sums[i * LANES] += by * found[rows * (c->wide + 1) + i];
            for (int64_t d = 0; d < c->wide; ++d) out[d] += by * found[i * c->wide + d];
        }
        t->top[i] = top;
    }
    return 1;
}

static int is_finite(const Block *t, int i) { return fabsf(t->total[i]) < INFINITY && fabsf(t->top[i]) < INFINITY; }

/* The total of each query's exponentials, and in `decay` by what to multiply its output; whether all are finite. */
static int settle_few(Call *c, const Few *at, Block *t) {
    int rows = (int)(at->group * at->queries), finite = 1;
    for (int i = 0; i < rows; ++i) {
        float total = sum_of(*(Vector *)(t->sums + i * LANES)), by = 1;
#ifdef HAS_SINK
        int head = (int)at->head + i / at->queries;
        float other = sink(c, (int)at->row, head, (int)at->position + i % at->queries), top = t->top[i];
        float joint = maximum(top, other);
        by = joint == joint && top == -INFINITY ? 0.0f : exp_(top - joint);
        total = total * by + exp_(other - joint);
        t->top[i] = joint;
#endif
        t->total[i] = t->top[i] == -INFINITY ? NAN : total;
        t->decay[i] = by / t->total[i];
        finite &= is_finite(t, i);
    }
    return finite;
}

static void write_few(Call *c, const Few *at, Block *t, int64_t first_query) {
    int rows = (int)(at->group * at->queries);
    for (int i = 0; i < rows; ++i) {
        int64_t head = at->head + i / at->queries, token = first_query + i % at->queries;
        float by = at->exact ? 1 : t->decay[i], top = t->top[i];
        if (at->exact && !EXACT_WEIGHTS && is_finite(t, i)) continue;  /* it stays as it was without the others */
        if (c->lse) c->lse[head * c->Sq + token] = top == -INFINITY ? -INFINITY : top + logf(t->total[i]);
        Element *out = (Element *)c->out + head * c->out_stride[1] + token * c->out_stride[2];
        for (int64_t d = 0; d < c->Dv; ++d) out[d] = narrow(t->O[i * c->wide + d] * by);
    }
}

/* The fewest keys that a thread should get: with fewer, joining the parts costs more than it saves. */
enum { LEAST_KEYS = 256 };

/* Into how many parts the keys of the longest row are divided. */
static int64_t parts_of_longest(const Call *c) {
    int64_t longest = 0;
    for (int64_t row = 0; row < c->B; ++row) longest = larger(longest, c->held[row]);
    return smaller(c->most, larger(1, longest / LEAST_KEYS));
}

/* Run by each thread. Items are (row, `step` queries, key head, heads that share it, part of the keys). */
void attngraph_decode(Call *c) {
    int64_t group = c->H / c->Hkv, together = smaller(group, BLOCK_Q), shares = blocks(group, together);
    Block t;
    t.Q = c->scratch + take(&c->member) * c->scratch_size;
    t.O = t.Q + BLOCK_Q * c->D;
    if (c->most) __atomic_store_n(&c->parts, parts_of_longest(c), __ATOMIC_RELAXED);  /* each thread finds the same */
    int64_t seen = 0, row = 0;
    for (int64_t item; (item = take(&c->slot)) >= 0;) {
        for (; row < c->B; ++row) {
            int64_t items = blocks(c->starts[row + 1] - c->starts[row], c->step) * c->Hkv * shares * c->parts;
            if (item < seen + items) break;
            seen += items;
        }
        if (row == c->B) return;
        int64_t part = item % c->parts, place = (item - seen) / c->parts, share = place % shares;
        int64_t kv = place / shares % c->Hkv, step = place / shares / c->Hkv * c->step;
        int64_t first = c->starts[row] + step;
        Few at = {row, kv, kv * group + share * together, 0, c->first[row] + step, 0, 0};
        at.group = smaller(together, group - share * together);
        at.queries = (int)smaller(c->step, c->starts[row + 1] - first);
        begin_few(c, &at, &t, first);
        see_part(c, &at, &t, first, part);
        if (c->parts > 1 && !join_parts(c, &at, &t, item / c->parts, part)) continue;
        int finite = settle_few(c, &at, &t);
        write_few(c, &at, &t, first);
#ifdef HAS_WEIGHTS
        if (!EXACT_WEIGHTS && finite) continue;
        at.exact = 1;
        see_part(c, &at, &t, first, part);  /* all of its keys again: it is the only part */
        write_few(c, &at, &t, first);
#endif
        (void)finite;
    }
}
