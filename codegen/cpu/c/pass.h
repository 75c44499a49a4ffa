/* Shared by forward and backward: one pass of a block of queries over the blocks of keys (flash
   attention, Dao et al. 2022; online softmax of Milakov and Gimelshein 2018) around the program's own
   functions, written above:

       scores(c, b, h, q0, rows, k0, keys, S, top)        scores of a tile in place, tops of its rows
       scores_unmasked(...)                               the same where every mask keeps everything
       weigh(c, b, h, q0, rows, k0, keys, S)              the statements `p = ...`, if HAS_WEIGHTS
       sink(c, b, h, q)                                   if HAS_SINK
       tile_states(c, b, h, q0, rows, k0, keys, S, found) if HAS_TILE_STATES: sets bits in `found`: 1 if any is kept,
       tile_states_soft(...)                              2 if any is masked; soft: also by finite fills

   S is [BLOCK_Q][BLOCK_K]. */

/* A block of keys with the width outermost, [places of D][BLOCK_K]: defined by loop.h and backward.h. */
static const float *keys_of(const Call *c, const Place *at, int64_t k0);

/* Rows of elements as rows of whole vectors in float32, padded with zeros, and times a number. */
static void widen_rows(const Element *from, int64_t stride, int count, int64_t width, float by, float *to,
                       int to_rows, int64_t to_width) {
    for (int i = 0; i < to_rows; ++i, to += to_width) {
        int64_t d = 0;
        if (i < count)
            for (; d < width; ++d) to[d] = widen(from[i * stride + d]) * by;
        for (; d < to_width; ++d) to[d] = 0;
    }
}

/* Rows as [places of the width][BLOCK_K]. */
static void turn_rows(const Element *from, int64_t stride, int count, int64_t width, float *to) {
    for (int64_t d = 0; d < width; d += IN_PLACE, to += BLOCK_K) {
        for (int j = 0; j < count; ++j) to[j] = place_at(from + j * stride + d, 1, width - d);
        for (int j = count; j < BLOCK_K; ++j) to[j] = 0;
    }
}

/* Queries as rows of places of the width. Those of floats are multiplied by the scale; of others, dots are. */
static void pack_queries(const Element *from, int64_t stride, int count, int64_t width, float scale, float *to,
                         int to_rows) {
    int64_t row = places(width);
    if (IN_PLACE == 1) {
        widen_rows(from, stride, count, width, scale, to, to_rows, width);
        return;
    }
    for (int i = 0; i < count; ++i, to += row)
        for (int64_t d = 0; d < row; ++d)
            to[d] = place_at(from + i * stride + d * IN_PLACE, 1, width - d * IN_PLACE);
    memset(to, 0, sizeof(float) * row * (to_rows - count));
}

/* Values as [places of BLOCK_K][to_width]. */
static void pack_values(const Element *from, int64_t stride, int count, int64_t width, float *to, int64_t to_width) {
    for (int j = 0; j < BLOCK_K; j += IN_PLACE, to += to_width) {
        int64_t d = 0;
        if (j + 1 < count)              /* whole, if places have two */
            for (; d < width; ++d) to[d] = place_at(from + j * stride + d, stride, 2);
        else if (j < count)
            for (; d < width; ++d) to[d] = place_at(from + j * stride + d, stride, 1);
        for (; d < to_width; ++d) to[d] = 0;
    }
}

static const Element *at_token(const void *data, const int64_t *stride, int64_t b, int64_t h, int64_t token) {
    return (const Element *)data + b * stride[0] + h * stride[1] + token * stride[2];
}

static void dots(const Call *c, const Place *at, Block *t, int64_t k0) {
    int64_t depth = places(c->D);
    multiply_packed(t->S, BLOCK_K, t->Q, depth, keys_of(c, at, k0), BLOCK_K, depth, at->padded, BLOCK_K, 0);
    if (IN_PLACE > 1)
        for (int n = 0; n < at->padded * BLOCK_K; n += LANES) *(Vector *)(t->S + n) *= c->scale;
}

/* Weights as pairs, in the first half of each row of S. They are rounded, and so they are added up once more, because
   what is weighed by rounded weights should be divided by their sum. */
static void round_weights(const Place *at, Block *t, const float *decay) {
    for (int i = 0; i < at->padded; ++i) {
        float *row = t->S + i * BLOCK_K;
        Vector sum = (Vector){0}, *sums = (Vector *)(t->rounded + i * LANES);
        for (int j = 0; j < BLOCK_K; j += 2 * LANES) {
            Vector pairs = rounded(*(Vector *)(row + j), *(Vector *)(row + j + LANES));
            *(Vector *)(row + j / 2) = pairs;
            sum += sum_of_pairs(pairs);
        }
        *sums = *sums * decay[i] + sum;
    }
}

static void weigh_values(const Call *c, const Place *at, Block *t, int64_t k0, const float *decay) {
    if (IN_PLACE > 1) round_weights(at, t, decay);
    multiply_packed(t->O, c->wide, t->S, BLOCK_K, at->v + places(k0) * c->wide, c->wide, places(BLOCK_K), at->padded,
                    c->wide, decay);
}

static void score(Call *c, const Place *at, Block *t, int64_t k0, int class) {
    int keys = (int)smaller(BLOCK_K, c->Sk - k0);
    if (class == 2 && keys == BLOCK_K)
        scores_unmasked(c, at->b, at->h, at->q0, at->rows, k0, BLOCK_K, t->S, t->next);
    else
        scores(c, at->b, at->h, at->q0, at->rows, k0, keys, t->S, t->next);
}

/* One pass over the blocks of keys that the map does not leave out. With `values` the output is
   accumulated too, with weights that are not normalised yet: it is to be multiplied by `decay` and divided by
   `total`. */
static void pass(Call *c, const Place *at, Block *t, const uint8_t *map, int values) {
    for (int i = 0; i < BLOCK_Q; ++i) t->top[i] = t->next[i] = -INFINITY;
    memset(t->sums, 0, sizeof t->sums);
    memset(t->rounded, 0, sizeof t->rounded);
    if (values) memset(t->O, 0, sizeof(float) * BLOCK_Q * c->wide);
    for (int64_t k0 = 0; k0 < c->Sk; k0 += BLOCK_K) {
        int class = map ? map[k0 / BLOCK_K] : 1;
        if (class == 0) continue;
        dots(c, at, t, k0);
        score(c, at, t, k0, class);
        exponentials(at, t);
#ifdef HAS_WEIGHTS
        if (values) weigh(c, at->b, at->h, at->q0, at->rows, k0, (int)smaller(BLOCK_K, c->Sk - k0), t->S);
#endif
        if (values) weigh_values(c, at, t, k0, t->decay);
    }
    for (int i = 0; i < at->rows; ++i) {
        float sum = 0, rounded = 0;
        for (int l = 0; l < LANES; ++l) sum += t->sums[i * LANES + l], rounded += t->rounded[i * LANES + l];
        t->decay[i] = rounded > 0 ? sum / rounded : 1;
#ifdef HAS_SINK
        float other = sink(c, at->b, at->h, at->q0 + i), top = t->top[i];
        float joint = maximum(top, other); /* infinite or NaN: the total is NaN */
        float by = joint == joint && top == -INFINITY ? 0.0f : exp_(top - joint);
        sum = sum * by + exp_(other - joint);
        t->decay[i] *= by;
        t->top[i] = joint;
#endif
        t->total[i] = t->top[i] == -INFINITY ? NAN : sum;
    }
}

/* The lines of both maps for a block of queries; null where there is no map. */
static void lines_of(const Call *c, int64_t b, int64_t h, int64_t q0, const uint8_t *line[2]) {
    for (int n = 0; n < 2; ++n)
        line[n] = c->map[n] ? c->map[n] + b * c->map_stride[n][0] + h * c->map_stride[n][1] +
                                  q0 / BLOCK_Q * c->map_stride[n][2]
                            : 0;
}

#if HAS_TILE_STATES
/* Complete the maps for masks that read tensors, line by line, before other work: known states of blocks are
   copied, others are found element by element. */
static void make_maps(Call *c, float *S) {
    int64_t steps = blocks(c->Sq, BLOCK_Q), count[2];
    for (int n = 0; n < 2; ++n) count[n] = c->known[n] ? c->lines[n][0] * c->lines[n][1] * steps : 0;
    for (int64_t item; (item = take(&c->next_line)) < count[0] + count[1]; take(&c->made)) {
        int n = item >= count[0];
        int64_t line = n ? item - count[0] : item, q0 = line % steps * BLOCK_Q;
        int64_t b = line / steps / c->lines[n][1], h = line / steps % c->lines[n][1];
        const uint8_t *known = c->known[n] + b * c->known_stride[n][0] + h * c->known_stride[n][1] +
                               line % steps * c->known_stride[n][2];
        uint8_t *map = (uint8_t *)c->map[n] + line * blocks(c->Sk, BLOCK_K);
        for (int64_t k0 = 0; k0 < c->Sk; k0 += BLOCK_K, ++map, ++known) {
            *map = *known;
            if (*known != 1) continue;
            int found = 0, keys = (int)smaller(BLOCK_K, c->Sk - k0), rows = (int)smaller(BLOCK_Q, c->Sq - q0);
            (n ? tile_states : tile_states_soft)(c, b, h, q0, rows, k0, keys, S, &found);
            *map = !(found & 1) ? 0 : found == 1 ? 2 : 1;
        }
    }
    wait_for(&c->made, count[0] + count[1]);
}
#else
static void make_maps(Call *c, float *S) { (void)c, (void)S; }
#endif
