/* What a decoder's step copies: rows of tables by index (embeddings, tokens that are picked), whole numbers as
   numbers of another kind, and new tokens to the pages of a cache. */

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

enum { INNER = 4 };

/* Tokens starts[r] .. starts[r + 1] - 1 of `fresh`, the first at position first[r], are written where they belong:
   position p of row r at place p % (columns * page) of the row's pages. A token has `size` elements of `bytes` bytes,
   in at most INNER dimensions, the last of which is contiguous; strides are of bytes. */
typedef struct {
    const char *fresh;
    char *pages;
    const int64_t *table, *starts, *first;
    int64_t rows, columns, page, bytes, token_stride, page_stride, slot_stride;
    int64_t size[INNER], fresh_strides[INNER], page_strides[INNER];
} Kept;

static void write_token(const Kept *c, const char *from, char *to) {
    size_t line = (size_t)(c->size[3] * c->bytes);
    for (int64_t a = 0; a < c->size[0]; ++a)
        for (int64_t b = 0; b < c->size[1]; ++b)
            for (int64_t d = 0; d < c->size[2]; ++d)
                memcpy(to + a * c->page_strides[0] + b * c->page_strides[1] + d * c->page_strides[2],
                       from + a * c->fresh_strides[0] + b * c->fresh_strides[1] + d * c->fresh_strides[2], line);
}

/* So many of them. Each is written by one thread: where a ring's places are fewer than its new tokens, the last ones
   stay. */
typedef struct {
    const Kept *const *all;
    int64_t count, item;
} Keep;

void attngraph_keep(Keep *k) {
    for (int64_t n; (n = take(&k->item)) < k->count;) {
        const Kept *c = k->all[n];
        for (int64_t r = 0; r < c->rows; ++r)
            for (int64_t t = c->starts[r]; t < c->starts[r + 1]; ++t) {
                int64_t slot = (c->first[r] + t - c->starts[r]) % (c->columns * c->page);
                int64_t page = c->table[r * c->columns + slot / c->page];
                char *to = c->pages + page * c->page_stride + slot % c->page * c->slot_stride;
                write_token(c, c->fresh + t * c->token_stride, to);
            }
    }
}
