/* Gradients, in one pass over blocks of keys. Weights are computed again from the scores and the rows'
   log-sum-exp, as in FlashAttention-2 (Dao 2023, algorithm 2), around the program's own functions:

       differentiate(c, b, h, q0, rows, k0, keys, S, G, row, of_rows, of_columns)
       differentiate_unmasked(...)                        the same where every mask keeps everything
       differentiate_pairs(c, number, ...)                one read's gradient from each pair, in S

   Rows whose log-sum-exp exceeds TRUSTED get another pass over the keys, because float32 has too few
   digits of it.

   S holds dots and becomes weights, G holds grad . v and becomes the gradients of the dots. A block of keys
   owns its dk and dv; its contributions to dq are added in the order of the blocks, so that the sums do not
   depend on the timing of threads. */

enum { OF_Q = 1, OF_K = 2, OF_V = 4 };
enum { TURNED = (BLOCK_K + STEP_Q - 1) / STEP_Q * STEP_Q };

static const float ones[TURNED] = {[0 ... TURNED - 1] = 1};

/* The buffers of one thread. */
typedef struct {
    Block block;
    float S[BLOCK_Q * BLOCK_K + LANES], G[BLOCK_Q * BLOCK_K + LANES];
    float of_rows[MOST_READS * BLOCK_Q], of_columns[MOST_READS * BLOCK_K];
    float *k_turned, *v_turned, *k;     /* [D][BLOCK_K], [Dv][BLOCK_K], [BLOCK_K][wide_k] */
    float *dq, *dk, *dv;                /* [BLOCK_Q][wide_k], [TURNED][wide_k], [TURNED][wide] */
} Work;

static int64_t width(const Call *c) { return blocks(c->D, LANES) * LANES; }

static Work work_of(Call *c) {
    Work w;
    w.block.Q = c->scratch + take(&c->slot) * c->scratch_size;
    w.k_turned = w.block.Q + BLOCK_Q * width(c);
    w.v_turned = w.k_turned + c->D * BLOCK_K;
    w.k = w.v_turned + c->Dv * BLOCK_K;
    w.dq = w.k + BLOCK_K * width(c);
    w.dk = w.dq + BLOCK_Q * width(c);
    w.dv = w.dk + TURNED * width(c);
    w.block.O = 0;
    return w;
}

static const float *keys_of(const Call *c, const Place *at, int64_t k0) {
    int64_t head = at->h / (c->H / c->Hkv);
    turn_rows(at_token(c->k, c->k_stride, at->b, head, k0), c->k_stride[2], (int)smaller(BLOCK_K, c->Sk - k0),
              c->D, (float *)at->k);
    return at->k;
}

static Place place_of(const Call *c, int64_t item) {
    int64_t steps = blocks(c->Sq, BLOCK_Q), head = item / steps, q0 = item % steps * BLOCK_Q;
    int rows = (int)smaller(BLOCK_Q, c->Sq - q0);
    return (Place){head / c->H, head % c->H, q0, rows, (rows + STEP_Q - 1) / STEP_Q * STEP_Q, 0, 0};
}

/* The line of the map that serves a block of queries; null: all blocks of keys are visited. */
static const uint8_t *line_of(const Call *c, const Place *at, int64_t item) {
    const uint8_t *line[2];
    lines_of(c, at->b, at->h, at->q0, line);
    return c->gradients->choice[item] < 2 ? line[c->gradients->choice[item]] : 0;
}

/* Prepare what all blocks of keys need of a block of queries: packed rows, delta = grad . out - grad_lse, the
   map to use, and base and unit such that a weight is exp(score - base) * unit. If a row is NaN, all keys are
   visited. */
static void prepare(Call *c, Work *w, int64_t item) {
    const struct Gradients *g = c->gradients;
    Place at = place_of(c, item);
    float *base = g->rows + item * 3 * BLOCK_Q, *unit = base + BLOCK_Q, *delta = unit + BLOCK_Q;
    float *grad = g->grad_packed + item * BLOCK_Q * c->wide;
    const Element *q = at_token(c->q, c->q_stride, at.b, at.h, at.q0);
    widen_rows(q, c->q_stride[2], at.rows, c->D, c->scale, g->q_packed + item * BLOCK_Q * width(c), BLOCK_Q,
               width(c));
    widen_rows(at_token(g->grad, g->grad_stride, at.b, at.h, at.q0), g->grad_stride[2], at.rows, c->Dv, 1, grad,
               BLOCK_Q, c->wide);
    int64_t first = (at.b * c->H + at.h) * c->Sq + at.q0;
    if (g->wanted & OF_Q) memset(g->grad_q + first * c->D, 0, sizeof(float) * at.rows * c->D);
    for (int n = 0; n < SUMS; ++n)
        if (by_rows[n]) memset(g->sums[n] + first, 0, sizeof(float) * at.rows);
    int finite = 1, trusted = 1;
    float least = INFINITY;
    for (int i = 0; i < at.rows; ++i) {
        const Element *out = at_token(c->out, c->out_stride, at.b, at.h, at.q0 + i);
        float sum = 0, lse = c->lse[first + i];
#pragma omp simd reduction(+ : sum)
        for (int64_t d = 0; d < c->Dv; ++d) sum += grad[i * c->wide + d] * widen(out[d]);
        int usable = fabsf(lse) < INFINITY;
        finite &= usable;
        trusted &= fabsf(lse) <= TRUSTED;
        least = lse < least ? lse : least;
        base[i] = usable ? lse : NAN;
        unit[i] = 1;
        delta[i] = sum - g->grad_lse[first + i];
    }
    const uint8_t *line[2];
    lines_of(c, at.b, at.h, at.q0, line);
    int hidden = line[0] && (double)least - log((double)c->Sk + 1) - c->hidden > EXP_UNDERFLOW;
    g->choice[item] = !finite ? 2 : hidden ? 0 : 1;
    if (trusted) return;
    at.k = w->k_turned;
    widen_rows(q, c->q_stride[2], at.rows, c->D, c->scale, w->block.Q, at.padded, c->D);
    pass(c, &at, &w->block, line_of(c, &at, item), 0);
    for (int i = 0; i < at.rows; ++i) {
        base[i] = w->block.top[i];
        unit[i] = 1 / w->block.total[i];
    }
}

static void load_keys(const Call *c, Work *w, int64_t b, int64_t head, int64_t k0, int keys) {
    const Element *k = at_token(c->k, c->k_stride, b, head, k0), *v = at_token(c->v, c->v_stride, b, head, k0);
    turn_rows(k, c->k_stride[2], keys, c->D, w->k_turned);
    turn_rows(v, c->v_stride[2], keys, c->Dv, w->v_turned);
    widen_rows(k, c->k_stride[2], keys, c->D, 1, w->k, BLOCK_K, width(c));
}

/* Compute the dots in S, and in G the products of the output's gradient with the values. */
static void multiply_item(const Call *c, const Place *at, Work *w, int64_t item) {
    const struct Gradients *g = c->gradients;
    multiply(w->S, BLOCK_K, g->q_packed + item * BLOCK_Q * width(c), width(c), w->k_turned, BLOCK_K, c->D,
             at->padded, BLOCK_K, 0);
    multiply(w->G, BLOCK_K, g->grad_packed + item * BLOCK_Q * c->wide, c->wide, w->v_turned, BLOCK_K, c->Dv,
             at->padded, BLOCK_K, 0);
}

/* Add a block of keys' contribution to dq, once the visited blocks before it have added theirs. */
static void add_rows(Call *c, const Place *at, Work *w, int64_t item, const uint8_t *line, int64_t block) {
    const struct Gradients *g = c->gradients;
    int64_t before = block - 1, first = (at->b * c->H + at->h) * c->Sq + at->q0;
    while (before >= 0 && line && line[before] == 0) --before;
    wait_for(g->added + item, before + 1);
    if (g->wanted & OF_Q)
        for (int i = 0; i < at->rows; ++i) {
            float *to = g->grad_q + (first + i) * c->D;
            const float *from = w->dq + i * width(c);
            for (int64_t d = 0; d < c->D; ++d) to[d] += from[d] * c->scale;
        }
    for (int n = 0; n < SUMS; ++n)
        if (by_rows[n])
            for (int i = 0; i < at->rows; ++i) g->sums[n][first + i] += w->of_rows[n * BLOCK_Q + i];
    __atomic_store_n(g->added + item, block + 1, __ATOMIC_RELEASE);
}

static void differentiate_tile(Call *c, const Place *at, Work *w, int64_t item, int64_t k0, int keys, int class,
                               const uint8_t *line) {
    const struct Gradients *g = c->gradients;
    float *row = g->rows + item * 3 * BLOCK_Q;
    multiply_item(c, at, w, item);
    (class == 2 && keys == BLOCK_K ? differentiate_unmasked : differentiate)(
        c, at->b, at->h, at->q0, at->rows, k0, keys, w->S, w->G, row, w->of_rows, w->of_columns);
    if (g->wanted & OF_V)
        multiply_turned(w->dv, c->wide, w->S, BLOCK_K, g->grad_packed + item * BLOCK_Q * c->wide, c->wide, at->rows,
                 keys, c->wide, ones);
    if (g->wanted & OF_K)
        multiply_turned(w->dk, width(c), w->G, BLOCK_K, g->q_packed + item * BLOCK_Q * width(c), width(c), at->rows,
                 keys, width(c), ones);
    if (g->wanted & OF_Q)
        multiply(w->dq, width(c), w->G, BLOCK_K, w->k, width(c), keys, at->padded, width(c), 0);
    if (g->wanted & OF_Q || HAS_ROWS) add_rows(c, at, w, item, line, k0 / BLOCK_K);
}

static void store_keys(void *to, int64_t first, int keys, int64_t columns, const float *from, int64_t ld) {
    for (int j = 0; j < keys; ++j)
        for (int64_t d = 0; d < columns; ++d)
            ((Element *)to)[(first + j) * columns + d] = narrow(from[j * ld + d]);
}

/* One block of keys of one head, with the queries of all heads that share it. */
static void differentiate_keys(Call *c, Work *w, int64_t b, int64_t head, int64_t k0) {
    const struct Gradients *g = c->gradients;
    int64_t group = c->H / c->Hkv, steps = blocks(c->Sq, BLOCK_Q), first = (b * c->Hkv + head) * c->Sk + k0;
    int keys = (int)smaller(BLOCK_K, c->Sk - k0);
    load_keys(c, w, b, head, k0, keys);
    memset(w->dk, 0, sizeof(float) * TURNED * width(c));
    memset(w->dv, 0, sizeof(float) * TURNED * c->wide);
    for (int64_t h = head * group; h < (head + 1) * group; ++h) {
        if (SUMS) memset(w->of_columns, 0, sizeof w->of_columns);
        for (int64_t step = 0; step < steps; ++step) {
            int64_t item = (b * c->H + h) * steps + step;
            Place at = place_of(c, item);
            const uint8_t *line = line_of(c, &at, item);
            int class = line ? line[k0 / BLOCK_K] : 1;
            if (class) differentiate_tile(c, &at, w, item, k0, keys, class, line);
        }
        for (int n = 0; n < SUMS; ++n)
            if (by_columns[n])
                memcpy(g->sums[n] + (b * c->H + h) * c->Sk + k0, w->of_columns + n * BLOCK_K, sizeof(float) * keys);
    }
    if (g->wanted & OF_K) store_keys(g->grad_k, first, keys, c->D, w->dk, width(c));
    if (g->wanted & OF_V) store_keys(g->grad_v, first, keys, c->Dv, w->dv, c->wide);
}

/* Run by each thread. Consecutive items are the same block of keys of different heads, so that they rarely
   wait for each other; an item waits only for items taken before it. */
void attngraph_differentiate(Call *c) {
    int64_t *counters = c->gradients->counters, heads = c->B * c->Hkv;
    int64_t rows = c->B * c->H * blocks(c->Sq, BLOCK_Q), items = heads * blocks(c->Sk, BLOCK_K);
    Work w = work_of(c);
    make_maps(c, w.S);
    for (int64_t item; (item = take(counters)) < rows; take(counters + 1)) prepare(c, &w, item);
    wait_for(counters + 1, rows);
    for (int64_t item; (item = take(counters + 2)) < items;)
        differentiate_keys(c, &w, item % heads / c->Hkv, item % c->Hkv, item / heads * BLOCK_K);
}

#if HAS_PAIRS
/* One read's gradient from a block of keys, for rows from `first` on, summed over the batches and heads by
   which it is not indexed. */
static void sum_pairs(Call *c, Work *w, int64_t owner, int64_t k0) {
    const struct Gradients *g = c->gradients;
    int64_t own_heads = g->each_head ? c->H : 1, steps = blocks(c->Sq, BLOCK_Q);
    int64_t b_first = g->each_batch ? g->batch + owner / own_heads : 0, b_stop = g->each_batch ? b_first + 1 : c->B;
    int64_t h_first = g->each_head ? owner % own_heads : 0, h_stop = g->each_head ? h_first + 1 : c->H;
    int keys = (int)smaller(BLOCK_K, c->Sk - k0);
    float *to = g->pairs + owner * g->owner_stride + k0;
    for (int64_t i = 0; i < g->count; ++i) memset(to + i * g->row_stride, 0, sizeof(float) * keys);
    for (int64_t b = b_first; b < b_stop; ++b)
        for (int64_t h = h_first; h < h_stop; ++h) {
            load_keys(c, w, b, h / (c->H / c->Hkv), k0, keys);
            for (int64_t q0 = g->first; q0 < smaller(c->Sq, g->first + g->count); q0 += BLOCK_Q) {
                int64_t item = (b * c->H + h) * steps + q0 / BLOCK_Q;
                Place at = place_of(c, item);
                const uint8_t *line = line_of(c, &at, item);
                if (line && !line[k0 / BLOCK_K]) continue;
                multiply_item(c, &at, w, item);
                differentiate_pairs(c, (int)g->number, b, h, q0, at.rows, k0, keys, w->S, w->G,
                                    g->rows + item * 3 * BLOCK_Q);
                for (int i = 0; i < at.rows; ++i)
                    for (int j = 0; j < keys; ++j)
                        to[(q0 - g->first + i) * g->row_stride + j] += w->S[i * BLOCK_K + j];
            }
        }
}

/* Run by each thread, after attngraph_differentiate of the same call. */
void attngraph_sum_pairs(Call *c) {
    int64_t steps = blocks(c->Sk, BLOCK_K);
    Work w = work_of(c);
    for (int64_t item; (item = take(c->gradients->counters + 3)) < c->gradients->owners * steps;)
        sum_pairs(c, &w, item / steps, item % steps * BLOCK_K);
}
#endif
