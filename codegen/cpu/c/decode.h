/* A few new tokens of each row against all that the row has seen: pages of keys and values, then the new
   ones. The heads of a group are one block, so that keys and values are read once. What lies in pages
   beyond a row's tokens is never read. */

#ifndef HAS_WEIGHTS
/* The sum of a vector's elements, as a tree. */
INLINE float sum_of(Vector x) {
    union { Vector v; float f[LANES]; } u = {.v = x};
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int l = 0; l < half; ++l) u.f[l] += u.f[l + half];
    return u.f[0];
}

/* S[row][j] = Q[row] . k[j], for keys that lie `stride` elements apart. */
static void dots_few(const Call *c, const float *Q, int rows, const Element *k, int64_t stride, int keys, float *S) {
    float wide[1024];
    for (int j = 0; j < keys; ++j) {
        const Element *from = k + j * stride;
        int64_t D = c->D;
#if defined(FLOAT32)
        const float *key = from;
        (void)wide;
#else
        const float *key = wide;
        for (int64_t d = 0; d < D; ++d) wide[d] = widen(from[d]);
#endif
        for (int i = 0; i < rows; ++i) {
            const float *query = Q + i * D;
            Vector sums = {0};
            int64_t d = 0;
            for (; d + LANES <= D; d += LANES) sums += *(const Vector *)(query + d) * *(const Vector *)(key + d);
            float sum = sum_of(sums);
            for (; d < D; ++d) sum += query[d] * key[d];
            S[i * BLOCK_K + j] = sum;
        }
    }
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

/* Queries of one row: those of `group` heads from `head` on, which share key head `kv`. */
enum { MANY = 12 };                     /* queries from which on laying a block of keys out pays */

/* The same two products for many queries, by register blocks: keys with the width outermost, values as rows
   of whole vectors, both in `pack`. */
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

typedef struct { int64_t row, kv, head, group, position; int queries; } Few;

/* One run of keys at neighbouring places, the first of them at position k0. */
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

static void attend_few(Call *c, const Few *at, Block *t, int64_t first_query) {
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
    for (int64_t p = oldest; p < held;) {
        int64_t slot = p % capacity, inside = slot % c->page;
        int64_t count = smaller(held - p, smaller(c->page - inside, capacity - slot)), page = pages[slot / c->page];
        const Element *k = (const Element *)c->k + page * c->k_stride[0] + at->kv * c->k_stride[1];
        const Element *v = (const Element *)c->v + page * c->v_stride[0] + at->kv * c->v_stride[1];
        attend_run(c, at, t, k + inside * c->k_stride[2], c->k_stride[2], v + inside * c->v_stride[2],
                   c->v_stride[2], p, count);
        p += count;
    }
    if (c->k_new) {
        int64_t start = c->starts[at->row], count = first_query + at->queries - start;
        const Element *k = (const Element *)c->k_new + at->kv * c->k_new_stride[0] + start * c->k_new_stride[1];
        const Element *v = (const Element *)c->v_new + at->kv * c->v_new_stride[0] + start * c->v_new_stride[1];
        attend_run(c, at, t, k, c->k_new_stride[1], v, c->v_new_stride[1], held, count);
    }
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

/* One member of the team. Items are (row, key head, heads that share it, `step` queries). */
void attngraph_decode(Call *c) {
    int64_t group = c->H / c->Hkv, together = smaller(group, BLOCK_Q), shares = blocks(group, together);
    Block t;
    t.Q = c->scratch + take(&c->member) * c->scratch_size;
    t.O = t.Q + BLOCK_Q * c->D;
    int64_t seen = 0, row = 0;
    for (int64_t item; (item = take(&c->slot)) >= 0;) {
        for (; row < c->B; ++row) {
            int64_t items = blocks(c->starts[row + 1] - c->starts[row], c->step) * c->Hkv * shares;
            if (item < seen + items) break;
            seen += items;
        }
        if (row == c->B) return;
        int64_t place = item - seen, share = place % shares, kv = place / shares % c->Hkv;
        int64_t part = place / shares / c->Hkv, first = c->starts[row] + part * c->step;
        Few at = {row, kv, kv * group + share * together, 0, c->first[row] + part * c->step, 0};
        at.group = smaller(together, group - share * together);
        at.queries = (int)smaller(c->step, c->starts[row + 1] - first);
        attend_few(c, &at, &t, first);
    }
}
#endif
