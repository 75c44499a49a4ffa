/* A token program: its arguments, and how threads share the work. The call is an array of 64-bit integers: the
   numbers below, a counter for each phase, the address of each given tensor and its strides, the address of each
   value, `[tokens][width]`. */

enum { TOKENS, MEMBERS, PHASE, MEMBER, ARRIVED, COUNTERS = 8 };

static int64_t rounded_up(int64_t a, int64_t to) { return (a + to - 1) / to * to; }

/* How many columns of a product one thread computes at a time. A weight `[in, out]` is read in pieces of its rows,
   which should be long; results of all rows should stay in the first cache. One that is `[out, in]` is read row
   by row. */
static int64_t share_of(int64_t width, int64_t depth, int64_t tokens, int64_t members, int turned) {
    int64_t each = (width + members - 1) / members;
    if (turned) return rounded_up(smaller(each, SHARE / tokens), VECTORS * LANES);
    return rounded_up(smaller(each, larger(16, 65536 / depth)), 16);
}

/* Waits until all threads have come here for the `number`th time. */
static void meet(int64_t *c, int64_t number) {
    take(c + ARRIVED);
    wait_for(c + ARRIVED, number * c[MEMBERS]);
}
