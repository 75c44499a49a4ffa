/* A token program: its arguments, and how threads share the work. The call is an array of 64-bit integers: the
   numbers below, a counter for each phase, the address of each given tensor and its strides, the address of each
   value, `[tokens][width]`. PANELS: the address of room for panels, for each thread, or 0 for few tokens. ARRANGED:
   for few tokens, that of room for twice as many rows, for each thread. SUMS: that of room for sums of parts of the
   depth. */

enum { TOKENS, MEMBERS, PANELS, ARRANGED, SUMS, PHASE, MEMBER, ARRIVED, COUNTERS };

static int64_t rounded_up(int64_t a, int64_t to) { return (a + to - 1) / to * to; }

/* How many columns of a product one thread computes at a time, so that all threads get equally many shares. A weight
   `[in, out]` is read in pieces of its rows, which should be long, and the results of all rows should stay in the
   first cache. One that is `[out, in]` is read row by row, some 4 MiB at a time. */
static int64_t share_of(int64_t width, int64_t depth, int64_t tokens, int64_t members, int turned) {
    int64_t each = (width + members - 1) / members;
    int64_t most = turned ? SHARE / tokens : larger(16, (1 << 20) / depth);
    int64_t shares = (each + most - 1) / most;
    return rounded_up((each + shares - 1) / shares, turned ? LANES : WHOLE_TILES);
}

/* Where a thread's share of the columns of a weight `[in, out]` would be shorter than a page, threads share its depth
   too, and the sums of its parts are added up afterwards. There are so few parts that their sums, which are written and
   read, have at most a sixteenth of the weight's bytes. */
enum { PIECE = 4096 / sizeof(float), SMALL = 32 };

/* Of how many parts a thread's share of the depth is one, if nothing limits them. */
INLINE int64_t parts_wanted(int64_t width, int64_t members) { return parts_of(members, larger(1, width / PIECE)); }

static int64_t parts_of_depth(int64_t width, int64_t depth, int64_t tokens, int64_t members) {
    int64_t parts = larger(1, smaller(parts_wanted(width, members), depth / (SMALL * tokens)));
    while (members % parts) --parts;
    return parts;
}

/* The most elements of the sums of a product, for so many tokens and for fewer. */
static int64_t room_of_sums(int64_t width, int64_t depth, int64_t tokens, int64_t members) {
    if (parts_wanted(width, members) == 1) return 0;
    return smaller(members * tokens, depth / SMALL) * width;
}

/* How a weight lies, `turned`: [out][depth], [depth][out], or in panels (gemm.h). */
enum { NOT_TURNED, TURNED, IN_PANELS };

/* The items of a product, whose rows are the tokens. `across`: as for items_of_many. `deep`: whether the depth may be
   divided. */
static Items items_of(int64_t width, int64_t depth, const int64_t *c, int turned, int across, int deep) {
    int64_t tokens = c[TOKENS], members = c[MEMBERS];
    if (c[PANELS] || turned == IN_PANELS) return items_of_many(width, depth, tokens, members, across);
    int64_t parts = deep ? parts_of_depth(width, depth, tokens, members) : 1;
    int64_t columns = share_of(width, depth, tokens, members / parts, turned), shares = parts_of(width, columns);
    return (Items){columns, tokens, shares, parts, shares * parts};
}

/* The columns that a thread adds up begin here. */
INLINE int64_t column_of(int64_t member, int64_t members, int64_t width) {
    return smaller(width, rounded_up(parts_of(width, members), LANES) * member);
}

/* A product, in a library of its own for each way in which a weight is given and laid out: programs are given its
   address. Many rows have `panels`; few that meet packed elements, room to be `arranged` in. Few rows
   and a weight `[in, out]` may be given a part of the depth, `from` .. `until` - 1. */
typedef void Product(const float *x, int64_t ldx, const void *w, const float *scale, const void *zero, int64_t first,
                     float *y, int64_t ldy, int64_t rows, int64_t outs, int64_t from, int64_t until, float *panels,
                     float *arranged);

/* `ldw`, `depth`, and what follows the addresses in `scales` are known when compiling too. */
INLINE void product(const float *x, int64_t ldx, const void *w, int64_t ldw, int64_t depth, Scales scales,
                    int64_t first, float *y, int64_t ldy, int64_t rows, int64_t outs, int64_t from, int64_t until,
                    float *panels, float *arranged, const int type, const int scaled, const int zeros,
                    const int turned) {
    const int across = type == FLOAT && !scaled && !zeros && !turned;
    if (turned == IN_PANELS) {
        product_of_panels(x, ldx, w, depth, first, y, ldy, rows, outs);
        return;
    }
    if (IN_ORDER && !panels && !turned) {
        if (elements_in(type) == 1) {
            product_by_strands(x, ldx, w, ldw, depth, scales, first, y, ldy, rows, outs, type, scaled, zeros);
            return;
        }
        panels = arranged;
    }
    if (across && !IN_ORDER && panels && goes_across(rows, outs) && outs <= MOST_OUTS_ACROSS) {
        product_by_rows(x, ldx, w, ldw, depth, first, y, ldy, rows, outs, panels);
        return;
    }
    if (panels) {
        product_of_many(x, ldx, w, ldw, depth, scales, first, y, ldy, rows, outs, panels, type, scaled, zeros, turned);
        return;
    }
    if (elements_in(type) == 2 && (2 * scales.run < depth || scales.high_first)) {
        arrange(x, ldx, rows, depth, scales, arranged);
        x = arranged, ldx = depth;
    }
    if (turned)
        product_turned_of(x + from, ldx, place(w, from * ldw, type), ldw, until - from, first, y, ldy, rows, outs, type);
    else product_of(x, ldx, w, ldw, depth, scales, first, y, ldy, rows, outs, type, scaled, zeros);
}
