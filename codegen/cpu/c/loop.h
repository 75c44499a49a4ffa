/* Attention: each block of queries of a head makes its pass over packed keys and values (pass.h). */

/* Pack one block of keys with the width outermost, and its values as rows of whole vectors, both in places of the
   tile and padded with zeros. */
static void pack(const Call *c, int64_t head, int64_t k0, float *to_k, float *to_v) {
    int64_t b = head / c->Hkv, h = head % c->Hkv;
    int keys = (int)smaller(BLOCK_K, c->Sk - k0);
    turn_rows(at_token(c->k, c->k_stride, b, h, k0), c->k_stride[2], keys, c->D, to_k);
    pack_values(at_token(c->v, c->v_stride, b, h, k0), c->v_stride[2], keys, c->Dv, to_v, c->wide);
}

static const float *keys_of(const Call *c, const Place *at, int64_t k0) { return at->k + k0 * places(c->D); }

#ifdef HAS_WEIGHTS
/* The output by weights that are normalised before the program's `p = ...` statements change them. */
static void weigh_exactly(Call *c, const Place *at, Block *t, const uint8_t *map) {
    memset(t->O, 0, sizeof(float) * BLOCK_Q * c->wide);
    for (int i = 0; i < BLOCK_Q; ++i) t->decay[i] = 1;
    for (int64_t k0 = 0; k0 < c->Sk; k0 += BLOCK_K) {
        int class = map ? map[k0 / BLOCK_K] : 1;
        if (class == 0) continue;
        dots(c, at, t, k0);
        score(c, at, t, k0, class);
        for (int i = 0; i < at->rows; ++i) normalised(t->S + i * BLOCK_K, t->top[i], t->total[i]);
        weigh(c, at->b, at->h, at->q0, at->rows, k0, (int)smaller(BLOCK_K, c->Sk - k0), t->S);
        weigh_values(c, at, t, k0, t->decay);
    }
}
#endif

/* Whether a finite fill gives every key that it hides a weight of exactly zero. */
static int is_hidden(const Call *c, const Place *at, const Block *t) {
    for (int i = 0; i < at->rows; ++i)
        if (!((double)t->top[i] - c->hidden > EXP_UNDERFLOW)) return 0;
    return 1;
}

static void attend_block(Call *c, const Place *at, Block *t) {
    const uint8_t *map[2];
    lines_of(c, at->b, at->h, at->q0, map);
    const int values = !EXACT_WEIGHTS;
    const uint8_t *used = map[0];
    if (map[0]) pass(c, at, t, used, values);
    if (!map[0] || !is_hidden(c, at, t)) pass(c, at, t, used = map[1], values);
    int divided = 0;
#ifdef HAS_WEIGHTS
    int finite = 1;
    for (int i = 0; i < at->rows; ++i) finite &= fabsf(t->total[i]) < INFINITY && fabsf(t->top[i]) < INFINITY;
    if (EXACT_WEIGHTS || !finite) { /* if a row is NaN, all keys are needed */
        if (!finite) pass(c, at, t, used = 0, 0);
        weigh_exactly(c, at, t, used);
        divided = 1;
    }
#endif
    Element *out = (Element *)c->out + at->b * c->out_stride[0] + at->h * c->out_stride[1];
    for (int i = 0; i < at->rows; ++i) {
        int64_t q = at->q0 + i;
        float by = divided ? 1 : t->decay[i] / t->total[i];
        for (int64_t d = 0; d < c->Dv; ++d) out[q * c->out_stride[2] + d] = narrow(t->O[i * c->wide + d] * by);
        c->lse[(at->b * c->H + at->h) * c->Sq + q] = t->top[i] + logf(t->total[i]);
    }
}

static void attend_item(Call *c, Block *t, int64_t head, int64_t item, const float *k, const float *v) {
    int64_t group = c->H / c->Hkv, steps = blocks(c->Sq, BLOCK_Q);
    /* The last blocks first: under a causal mask they take longest. */
    Place at = {head / c->Hkv, head % c->Hkv * group + item / steps, (steps - 1 - item % steps) * BLOCK_Q, 0, 0, k, v};
    at.rows = (int)smaller(BLOCK_Q, c->Sq - at.q0);
    at.padded = (at.rows + STEP_Q - 1) / STEP_Q * STEP_Q;
    pack_queries(at_token(c->q, c->q_stride, at.b, at.h, at.q0), c->q_stride[2], at.rows, c->D, c->scale, t->Q,
                 at.padded);
    attend_block(c, &at, t);
}

/* Run by each thread. Heads are computed in rounds of a few. A round's keys and values are packed first, by
   all threads, into one of two buffers. A thread waits only for blocks that another is packing, and for a
   buffer that another still reads. */
void attngraph_attend(Call *c) {
    int64_t heads = c->B * c->Hkv, group = c->H / c->Hkv;
    int64_t steps = blocks(c->Sk, BLOCK_K), items = group * blocks(c->Sq, BLOCK_Q);
    int64_t k_block = places(c->D) * BLOCK_K, v_block = places(BLOCK_K) * c->wide;
    Block t;
    t.Q = c->scratch + take(&c->slot) * c->scratch_size;
    t.O = t.Q + BLOCK_Q * c->D;
    make_maps(c, t.S);
    for (int64_t first = 0, number = 0; first < heads; first += c->together, ++number) {
        struct Round *round = c->rounds + number;
        int64_t here = smaller(c->together, heads - first);
        float *k = c->k_packed + number % 2 * c->together * steps * k_block;
        float *v = c->v_packed + number % 2 * c->together * steps * v_block;
        if (number >= 2) wait_for(&round[-2].finished, c->together * items);
        for (int64_t item; (item = take(&round->next_pack)) < here * steps; take(&round->packed)) {
            pack(c, first + item / steps, item % steps * BLOCK_K, k + item * k_block, v + item * v_block);
        }
        wait_for(&round->packed, here * steps);
        for (int64_t item; (item = take(&round->next_item)) < here * items; take(&round->finished)) {
            int64_t pair = item / items;
            attend_item(c, &t, first + pair, item % items, k + pair * steps * k_block, v + pair * steps * v_block);
        }
    }
}
