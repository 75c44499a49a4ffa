/* Products with a weight: how its elements lie, in what order they are added up, and how tiles are made of registers. */

/* A tile's sums, and what they are added up from, fill the registers: there are 32 or 16 of them. */
#if defined(__AVX512F__) || defined(__aarch64__)
enum { TILE_ROWS = 8, DEEP = 4, VECTORS = 4 };
#else
enum { TILE_ROWS = 4, DEEP = 4, VECTORS = 2 };
#endif

/* Has the compiler load a vector once, into a register, where it would load it for each use. */
#if defined(__x86_64__)
#define IN_REGISTER(V) __asm__("" : "+x"(V))
#elif defined(__aarch64__)
#define IN_REGISTER(V) __asm__("" : "+w"(V))
#else
#define IN_REGISTER(V) (void)0
#endif

/* Element (out, d) of a weight is (w - zero) * scale: `scale` and `zero` are [out][groups], with one for each
   `group` of d. A group is whole vectors, unless there is only one. Of two elements in a byte, which are `run` apart,
   the first may have the high bits. */
typedef struct { const float *scale; const void *zero; int64_t group, groups, run, high_first; } Scales;

enum { PANEL = STEP_N * LANES };        /* outputs that are computed together (gemm.h) */

static int64_t parts_of(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

/* A product has an order of sums that follows from its depth alone: by pieces of PART elements (of more where a byte's
   two elements are further apart), and in a piece by STRANDS, of which each has every fourth element (both numbers are
   in ir/ops/panels.py). A strand is added up element by element, and then the strands are, one after another. So many
   neighbours are a vector of 128 bits, which few rows read as they lie (strands.h), and a strand is long enough for the
   tiles of many (gemm.h). IN_ORDER all ways to compute a product have this order. Elsewhere few rows are added up as is
   fastest for them. */
#ifdef ORDERED
enum { IN_ORDER = 1 };
#else
enum { IN_ORDER = 0 };
#endif

INLINE int64_t piece_of(int64_t depth, Scales scales, const int type) {
    const int64_t whole = elements_in(type) == 1 ? 1 : 2 * scales.run;
    return smaller(depth, parts_of(PART, whole) * whole);
}

/* How many of `count` elements strand `s` has. */
INLINE int64_t length_of(int64_t s, int64_t count) { return count / STRANDS + (s < count % STRANDS); }

/* The place of element `e` of a piece of `count` elements where they lie strand by strand. */
INLINE int64_t place_in_strands(int64_t e, int64_t count) {
    int64_t s = e % STRANDS;
    return s * (count / STRANDS) + smaller(s, count % STRANDS) + e / STRANDS;
}

/* Which d is element `n` of byte `at` of a row, where bits count n: 0 for the low ones. */
INLINE int64_t place_in_row(int64_t at, const int n, Scales of, const int type) {
    if (elements_in(type) == 1) return at;
    return (at / of.run * 2 + (n ^ of.high_first)) * of.run + at % of.run;
}

/* What the dots of some rows fetch: every `every`th line of the rows of `next`, from the `wait`th on. */
typedef struct { const void *next; int64_t every, wait; } Fetch;
