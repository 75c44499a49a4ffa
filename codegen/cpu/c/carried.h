/* What a decoder's step does with tokens other than by attention: rows of tables by index (embeddings, tokens that are
   picked), whole numbers as numbers of another kind, new tokens to the pages of a cache, the last few tokens of each
   row, and sums that are carried from token to token. Tokens starts[r] .. starts[r + 1] - 1 belong to row r. */

/* ---- rows and numbers ---- */

/* to[n] is row index[n] of `from`, which has `rows` rows of so many bytes, `stride` apart. */
typedef struct {
    const char *from;
    const int64_t *index;
    char *to;
    int64_t count, rows, stride, bytes, item, bad;
} Gather;

void attngraph_gather(Gather *c) {
    for (int64_t n; (n = take(&c->item)) < c->count;) {
        int64_t row = c->index[n];
        if (row >= 0 && row < c->rows) memcpy(c->to + n * c->bytes, c->from + row * c->stride, (size_t)c->bytes);
        else c->bad = 1;
    }
}

/* Whole numbers plus `add`: as they are, or as floats. One thread computes them: there are few. */
typedef struct {
    const int64_t *from;
    int64_t *whole;
    float *real;
    int64_t count, add, item;
} Numbers;

void attngraph_numbers(Numbers *c) {
    if (take(&c->item)) return;
    for (int64_t n = 0; n < c->count; ++n) {
        int64_t x = c->from[n] + c->add;
        if (c->real) c->real[n] = (float)x;
        else c->whole[n] = x;
    }
}

/* ---- tokens and pages ---- */

enum { INNER = 4 };

/* New tokens of rows, the first at position first[r], and pages: position p of row r has place p % (columns * page) of
   the row's pages. A token has `size` elements of `bytes` bytes, in at most INNER dimensions; strides are of bytes. */
typedef struct {
    const char *fresh;
    char *pages;
    const int64_t *table, *starts, *first;
    int64_t rows, columns, page, bytes, token_stride, page_stride, slot_stride;
    int64_t size[INNER], fresh_strides[INNER], page_strides[INNER];
} Paged;

static char *in_pages(const Paged *c, int64_t row, int64_t position) {
    int64_t slot = position % (c->columns * c->page), page = c->table[row * c->columns + slot / c->page];
    return c->pages + page * c->page_stride + slot % c->page * c->slot_stride;
}

INLINE void copy_token(const Paged *c, const char *from, const int64_t *stride, char *to, const int64_t *to_stride) {
    const int64_t each = c->bytes, line = c->size[3] * each;
    for (int64_t a = 0; a < c->size[0]; ++a)
        for (int64_t b = 0; b < c->size[1]; ++b)
            for (int64_t d = 0; d < c->size[2]; ++d) {
                const char *p = from + a * stride[0] + b * stride[1] + d * stride[2];
                char *q = to + a * to_stride[0] + b * to_stride[1] + d * to_stride[2];
                if (stride[3] == each) memcpy(q, p, (size_t)line);
                else for (int64_t e = 0; e < c->size[3]; ++e) memcpy(q + e * each, p + e * stride[3], (size_t)each);
            }
}

/* So many of them, whose new tokens are written where they belong. Each is written by one thread: where a ring's places
   are fewer than its new tokens, the last ones stay. */
typedef struct {
    const Paged *const *all;
    int64_t count, item;
} Keep;

void attngraph_keep(Keep *k) {
    for (int64_t n; (n = take(&k->item)) < k->count;) {
        const Paged *c = k->all[n];
        for (int64_t r = 0; r < c->rows; ++r)
            for (int64_t t = c->starts[r]; t < c->starts[r + 1]; ++t)
                copy_token(c, c->fresh + t * c->token_stride, c->fresh_strides,
                           in_pages(c, r, c->first[r] + t - c->starts[r]), c->page_strides);
    }
}

/* out[token][j] is the row's token `back - j` places before: zero before the row's first, from the row's pages if an
   earlier call computed it, else from `fresh`. */
typedef struct {
    Paged of;
    char *out;
    int64_t back, out_strides[INNER], item;
} LastTokens;

void attngraph_last_tokens(LastTokens *k) {
    const Paged *c = &k->of;
    int64_t each = c->size[0] * c->size[1] * c->size[2] * c->size[3] * c->bytes;
    for (int64_t item; (item = take(&k->item)) < c->starts[c->rows] * (k->back + 1);) {
        int64_t r = 0, t = item / (k->back + 1), from = t - k->back + item % (k->back + 1);
        char *to = k->out + item * each;
        while (t >= c->starts[r + 1]) ++r;
        int64_t position = c->first[r] + from - c->starts[r];
        if (from >= c->starts[r])
            copy_token(c, c->fresh + from * c->token_stride, c->fresh_strides, to, k->out_strides);
        else if (position < 0) memset(to, 0, (size_t)each);
        else copy_token(c, in_pages(c, r, position), c->page_strides, to, k->out_strides);
    }
}

/* ---- running sums ---- */

#define ALIGNED __attribute__((aligned(64)))
enum { MOST_VECTORS = 8, BESIDE = 4 * LANES * sizeof(float) / sizeof(STATE), NEAR = 1 << 12 };

/* For each row and head a matrix [depth][width] is carried from `state` to `after`,

       S = decay S + left^T (right S) + k v^T          out = q S, with S as it was before if not `inclusive`

   Absent operands are 0: q and k then count as 1 (depth is 1), decay as 1, and 1 is added to it if it is given
   `less_one`. left and right have `vectors` vectors. A
   column of S depends on no other one, so threads share rows, heads, and columns, BESIDE at a time. S is of STATE:
   what is added up over many tokens is rounded with each of them. */
typedef struct {
    const float *q, *k, *v, *decay, *left, *right;
    const STATE *state;
    float *out;
    STATE *after;
    const int64_t *starts;
    int64_t rows, heads, depth, width, vectors, inclusive, less_one;
    int64_t q_stride[3], k_stride[3], v_stride[3], decay_stride[3], left_stride[4], right_stride[4];
    int64_t item;
} Sums;

INLINE float at_depth(const float *p, const int64_t *stride, int64_t t, int64_t h, int64_t d) {
    return p ? p[t * stride[0] + h * stride[1] + d * stride[2]] : 1;
}

/* Token t, columns first .. first + columns - 1 of a head, whose matrix is read at `from` and written to `to`, with
   lines of these lengths. */
INLINE void add_token(const Sums *c, int64_t t, int64_t h, const STATE *from, int64_t line, STATE *to, int64_t wide,
                      int64_t first, const int columns) {
    STATE v[BESIDE] ALIGNED, out[BESIDE] ALIGNED, seen[MOST_VECTORS][BESIDE] ALIGNED;
    for (int e = 0; e < columns; ++e) {
        v[e] = c->v[t * c->v_stride[0] + h * c->v_stride[1] + (first + e) * c->v_stride[2]];
        out[e] = 0;
    }
    for (int64_t m = 0; m < c->vectors; ++m) {
        const float *right = c->right + t * c->right_stride[0] + h * c->right_stride[1] + m * c->right_stride[2];
        for (int e = 0; e < columns; ++e) seen[m][e] = 0;
        for (int64_t d = 0; d < c->depth; ++d) {
            STATE by = right[d * c->right_stride[3]];
#pragma omp simd
            for (int e = 0; e < columns; ++e) seen[m][e] += by * from[d * line + e];
        }
    }
    for (int64_t d = 0; d < c->depth; ++d) {
        STATE q = at_depth(c->q, c->q_stride, t, h, d), k = at_depth(c->k, c->k_stride, t, h, d);
        STATE decay = at_depth(c->decay, c->decay_stride, t, h, d), sum[BESIDE] ALIGNED;
        if (c->decay && c->less_one) decay += 1;
#pragma omp simd
        for (int e = 0; e < columns; ++e) {
            STATE old = from[d * line + e];
            sum[e] = decay * old + k * v[e];
            if (!c->inclusive) out[e] += q * old;
        }
        for (int64_t m = 0; m < c->vectors; ++m) {
            STATE by = c->left[t * c->left_stride[0] + h * c->left_stride[1] + m * c->left_stride[2] +
                               d * c->left_stride[3]];
#pragma omp simd
            for (int e = 0; e < columns; ++e) sum[e] += by * seen[m][e];
        }
#pragma omp simd
        for (int e = 0; e < columns; ++e) {
            to[d * wide + e] = sum[e];
            if (c->inclusive) out[e] += q * sum[e];
        }
    }
    for (int e = 0; e < columns; ++e) c->out[(t * c->heads + h) * c->width + first + e] = out[e];
}

/* Several tokens of a row: what lies between is kept together, near by, where it is not too large. */
INLINE void add_tokens(const Sums *c, int64_t r, int64_t h, int64_t first, const int columns) {
    int64_t place = (r * c->heads + h) * c->depth * c->width + first, width = c->width;
    int64_t t = c->starts[r], end = c->starts[r + 1];
    const STATE *from = c->state + place;
    STATE *after = c->after + place, near[NEAR] ALIGNED, *own = after;
    int64_t wide = width, line = width;
    if (end - t > 2 && c->depth * columns <= NEAR) own = near, wide = columns;
    for (; t < end; ++t, from = own, line = wide) add_token(c, t, h, from, line, own, wide, first, columns);
    if (from == after) return;
    for (int64_t d = 0; d < c->depth; ++d)
        for (int e = 0; e < columns; ++e) after[d * width + e] = from[d * line + e];
}

void attngraph_sums(Sums *c) {
    int64_t blocks = (c->width + BESIDE - 1) / BESIDE, count = c->rows * c->heads * blocks;
    for (int64_t item; (item = take(&c->item)) < count;) {
        int64_t first = item % blocks * BESIDE, head = item / blocks, columns = smaller(BESIDE, c->width - first);
        if (columns == BESIDE) add_tokens(c, head / c->heads, head % c->heads, first, BESIDE);
        else add_tokens(c, head / c->heads, head % c->heads, first, (int)columns);
    }
}
