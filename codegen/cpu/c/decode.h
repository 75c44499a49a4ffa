/* A few new tokens of each row against all its keys and values: those in pages, then the new ones. The
   heads of a group are one block, so that keys and values are read once. Where there are fewer such blocks
   than threads, each thread takes a part of the keys, and the last to finish combines the parts. Memory of
   pages beyond a row's tokens is never read. */

#ifndef HAS_WEIGHTS
/* S[row][j] = Q[row] . k[j] for `count` keys, at most STREAMS, that lie `stride` elements apart. */
INLINE void dots_of(const float *Q, int rows, int64_t D, const float *k, int64_t stride, const int count, float *S) {
    for (int i = 0; i < rows; ++i) {
        const float *query = Q + i * D;
        Vector sums[STREAMS];
        float total[STREAMS];
        int64_t d = 0;
#pragma GCC unroll 8
        for (int j = 0; j < count; ++j) sums[j] = (Vector){0};
        for (; d + LANES <= D; d += LANES)
#pragma GCC unroll 8
            for (int j = 0; j < count; ++j) sums[j] += *(const Vector *)(query + d) * *(const Vector *)(k + j * stride + d);
        totals(sums, total, count);
#pragma GCC unroll 8
        for (int j = 0; j < count; ++j) {
            for (int64_t e = d; e < D; ++e) total[j] += query[e] * k[j * stride + e];
            S[i * BLOCK_K + j] = total[j];
        }
    }
}

/* The same for any number of keys. */
static void dots_few(const Call *c, const float *Q, int rows, const Element *k, int64_t stride, int keys, float *S) {
    int j = 0;
#if defined(FLOAT32)
    for (; j + STREAMS <= keys; j += STREAMS) dots_of(Q, rows, c->D, k + j * stride, stride, STREAMS, S + j);
    for (; j < keys; ++j) dots_of(Q, rows, c->D, k + j * stride, stride, 1, S + j);
#else
    float wide[STREAMS * 1024];
    for (; j < keys; j += STREAMS) {
        int count = (int)smaller(STREAMS, keys - j);
        for (int n = 0; n < count; ++n)
            for (int64_t d = 0; d < c->D; ++d) wide[n * c->D + d] = widen(k[(j + n) * stride + d]);
        if (count == STREAMS) dots_of(Q, rows, c->D, wide, c->D, STREAMS, S + j);
        else
            for (int n = 0; n < count; ++n) dots_of(Q, rows, c->D, wide + n * c->D, c->D, 1, S + j + n);
    }
#endif
}

/* O[row] = O[row] * decay[row] + sum over j of S[row][j] v[j]. */
static void weigh_few(const Call *c, Block *t, int rows, const Element *v, int64_t stride, int keys) {
    for (int i = 0; i < rows; ++i) {
        float *out = t->O + i * c->wide, decay = t->decay[i];
        const float *weight = t->S + i * BLOCK_K;
        int64_t d = 0;
#if defined(FLOAT32)
        for (; d + 4 * LANES <= c->Dv; d += 4 * LANES) {
            Vector sums[4];
#pragma GCC unroll 4
            for (int n = 0; n < 4; ++n) sums[n] = *(Vector *)(out + d + n * LANES) * decay;
            for (int j = 0; j < keys; ++j)
#pragma GCC unroll 4
                for (int n = 0; n < 4; ++n) sums[n] += weight[j] * *(const Vector *)(v + j * stride + d + n * LANES);
#pragma GCC unroll 4
            for (int n = 0; n < 4; ++n) *(Vector *)(out + d + n * LANES) = sums[n];
        }
#endif
        if (d < c->Dv) {
            for (int64_t e = d; e < c->Dv; ++e) out[e] *= decay;
            for (int j = 0; j < keys; ++j)
                for (int64_t e = d; e < c->Dv; ++e) out[e] += weight[j] * widen(v[j * stride + e]);
        }
    }
}

enum { MANY = 12 };                     /* with at least so many queries, packing keys pays */

/* The same two products for many queries, by register blocks: keys with the width outermost, values as rows
   padded to whole vectors, both in `pack`. */
static void dots_many(const Call *c, Block *t, int padded, const Element *k, int64_t stride, int keys, float *pack) {
    for (int j = 0; j < keys; ++j)
        for (int64_t d = 0; d < c->D; ++d) pack[d * BLOCK_K + j] = widen(k[j * stride + d]);
    for (int64_t d = 0; d < c->D; ++d)
        for (int j = keys; j < BLOCK_K; ++j) pack[d * BLOCK_K + j] = 0;
    multiply(t->S, BLOCK_K, t->Q, c->D, pack, BLOCK_K, c->D, padded, BLOCK_K, 0);
}

static void weigh_many(const Call *c, Block *t, int padded, const Element *v, int64_t stride, int keys, float *pack) {
    for (int j = 0; j < keys; ++j) {
        int64_t d = 0;
        for (; d < c->Dv; ++d) pack[j * c->wide + d] = widen(v[j * stride + d]);
        for (; d < c->wide; ++d) pack[j * c->wide + d] = 0;
    }
    multiply(t->O, c->wide, t->S, BLOCK_K, pack, c->wide, keys, padded, c->wide, t->decay);
}

/* Queries of one row: those of `group` heads from `head` on, which share key head `kv`. */
typedef struct { int64_t row, kv, head, group, position; int queries; } Few;

/* One run of keys that are consecutive in memory, the first of them at position k0. */
static void attend_run(Call *c, const Few *at, Block *t, const Element *k, int64_t k_step, const Element *v,
                       int64_t v_step, int64_t k0, int64_t count) {
    int rows = (int)(at->group * at->queries), padded = (rows + STEP_Q - 1) / STEP_Q * STEP_Q;
    float *pack = t->O + BLOCK_Q * c->wide;
    Place place = {0, 0, 0, rows, padded, 0, 0};
    for (int64_t done = 0; done < count; done += BLOCK_K) {
        int keys = (int)smaller(BLOCK_K, count - done);
        if (rows >= MANY)
            dots_many(c, t, padded, k + done * k_step, k_step, keys, pack);
        else
            dots_few(c, t->Q, rows, k + done * k_step, k_step, keys, t->S);
        for (int g = 0; g < at->group; ++g)
            scores(c, (int)at->row, (int)at->head + g, (int)at->position, at->queries, (int)(k0 + done),
                   keys, t->S + g * at->queries * BLOCK_K, t->next + g * at->queries);
        exponentials(&place, t);
        if (rows >= MANY)
            weigh_many(c, t, padded, v + done * v_step, v_step, keys, pack);
        else
            weigh_few(c, t, rows, v + done * v_step, v_step, keys);
    }
}

static int64_t part_of(int64_t count, int64_t part, int64_t parts) {
    return part == parts ? count : count * part / parts / BLOCK_K * BLOCK_K;
}

/* The queries against part `part` of all the row's keys. */
static void see_part(Call *c, const Few *at, Block *t, int64_t first_query, int64_t part) {
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
    for (int i = 0; i < BLOCK_Q; ++i) t->top[i] = t->next[i] = -INFINITY;
    memset(t->sums, 0, sizeof t->sums);
    memset(t->O, 0, sizeof(float) * padded * c->wide);
    int64_t held = c->held[at->row], capacity = c->columns * c->page;
    int64_t oldest = larger(0, held - capacity);
    if (c->window) oldest = larger(oldest, at->position - c->window + 1);
    const int64_t *pages = c->table + at->row * c->columns;
    int64_t start = c->starts[at->row], news = c->k_new ? first_query + at->queries - start : 0;
    int64_t from = oldest + part_of(held - oldest + news, part, c->parts);
    int64_t until = oldest + part_of(held - oldest + news, part + 1, c->parts), end = smaller(held, until);
    for (int64_t p = from; p < end;) {
        int64_t slot = p % capacity, inside = slot % c->page;
        int64_t count = smaller(end - p, smaller(c->page - inside, capacity - slot)), page = pages[slot / c->page];
        const Element *k = (const Element *)c->k + page * c->k_stride[0] + at->kv * c->k_stride[1];
        const Element *v = (const Element *)c->v + page * c->v_stride[0] + at->kv * c->v_stride[1];
        attend_run(c, at, t, k + inside * c->k_stride[2], c->k_stride[2], v + inside * c->v_stride[2],
                   c->v_stride[2], p, count);
        p += count;
    }
    from = larger(from, held);
    if (until > from) {
        int64_t place = start + from - held;
        const Element *k = (const Element *)c->k_new + at->kv * c->k_new_stride[0] + place * c->k_new_stride[1];
        const Element *v = (const Element *)c->v_new + at->kv * c->v_new_stride[0] + place * c->v_new_stride[1];
        attend_run(c, at, t, k, c->k_new_stride[1], v, c->v_new_stride[1], from, until - from);
    }
}

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

static void write_few(Call *c, const Few *at, Block *t, int64_t first_query) {
    int rows = (int)(at->group * at->queries);
    for (int i = 0; i < rows; ++i) {
        int64_t head = at->head + i / at->queries, token = first_query + i % at->queries;
        float total = sum_of(*(Vector *)(t->sums + i * LANES)), by = 1;
#ifdef HAS_SINK
        float other = sink(c, (int)at->row, (int)head, (int)at->position + i % at->queries), top = t->top[i];
        float joint = maximum(top, other);
        by = joint == joint && top == -INFINITY ? 0.0f : exp_(top - joint);
        total = total * by + exp_(other - joint);
        t->top[i] = joint;
#endif
        by = t->top[i] == -INFINITY ? NAN : by / total;
        Element *out = (Element *)c->out + head * c->out_stride[1] + token * c->out_stride[2];
        for (int64_t d = 0; d < c->Dv; ++d) out[d] = narrow(t->O[i * c->wide + d] * by);
    }
}

/* Run by each thread. Items are (row, `step` queries, key head, heads that share it, part of the keys). */
void attngraph_decode(Call *c) {
    int64_t group = c->H / c->Hkv, together = smaller(group, BLOCK_Q), shares = blocks(group, together);
    Block t;
    t.Q = c->scratch + take(&c->member) * c->scratch_size;
    t.O = t.Q + BLOCK_Q * c->D;
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
        Few at = {row, kv, kv * group + share * together, 0, c->first[row] + step, 0};
        at.group = smaller(together, group - share * together);
        at.queries = (int)smaller(c->step, c->starts[row + 1] - first);
        see_part(c, &at, &t, first, part);
        if (c->parts == 1 || join_parts(c, &at, &t, item / c->parts, part)) write_few(c, &at, &t, first);
    }
}
#endif
