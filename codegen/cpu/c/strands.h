/* Products of few rows IN_ORDER with a weight [out][depth]. Four neighbours of the depth belong to the four strands
   (weights.h), so a vector has four elements of each of LANES / 4 rows of the weight, which is read as it lies, and the
   same four elements of x in all its fours. At the end of a piece fours are turned, so that a vector has one strand of
   LANES sums, and the strands are added up. */

#if defined(__AVX__)
#include <immintrin.h>
#endif

typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));
enum {
    FOURS = LANES / STRANDS,            /* outputs that a vector has */
    WIDE = FOURS > 1 ? 2 : 4,           /* vectors of outputs that are computed together */
    OUTS = FOURS * WIDE,
    FULL = FOURS > 1 ? TILE_ROWS : 4,   /* rows that are */
    ROW = LINE / sizeof(float),         /* elements of a row that are widened together */
};

/* Fours of as many rows, which lie `step` elements apart. */
INLINE Vector fours(const float *from, int64_t step) {
#if defined(__AVX512F__)
    __m512 found = _mm512_castps128_ps512(_mm_loadu_ps(from));
    found = _mm512_insertf32x4(found, _mm_loadu_ps(from + step), 1);
    found = _mm512_insertf32x4(found, _mm_loadu_ps(from + 2 * step), 2);
    return (Vector)_mm512_insertf32x4(found, _mm_loadu_ps(from + 3 * step), 3);
#elif defined(__AVX__)
    return (Vector)_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(from)), _mm_loadu_ps(from + step), 1);
#else
    union { Vector whole; Four four[FOURS]; } found;
    for (int n = 0; n < FOURS; ++n) found.four[n] = *(const Four *)(from + n * step);
    return found.whole;
#endif
}

/* Four elements in all fours. */
INLINE Vector in_all_fours(const float *from) {
#if defined(__AVX512F__)
    return (Vector)_mm512_broadcast_f32x4(_mm_loadu_ps(from));
#elif defined(__AVX__)
    return (Vector)_mm256_broadcast_ps((const __m128 *)from);
#else
    return fours(from, 0);
#endif
}

/* Adds to the sums of rows and outputs the products of four elements; `step`: from one output's to the next one's. */
INLINE void add_fours(const float *x, int64_t ldx, const float *w, int64_t step, Vector *sum, const int rows) {
    Vector right[WIDE];
#pragma GCC unroll 4
    for (int v = 0; v < WIDE; ++v) {
        right[v] = fours(w + v * FOURS * step, step);
        IN_REGISTER(right[v]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
        Vector left = in_all_fours(x + r * ldx);
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; ++v) ADD_PRODUCT(sum[r * WIDE + v], left, right[v]);
    }
}

/* Turns each four of a square of vectors: element e of vector s and element s of vector e change places. */
INLINE void turn_fours(Vector *square) {
#if defined(__clang__)
    for (int e = 0; e < LANES; ++e)
        for (int s = 0; s < e % STRANDS; ++s) {
            float first = square[s][e];
            square[s][e] = square[e % STRANDS][e - e % STRANDS + s];
            square[e % STRANDS][e - e % STRANDS + s] = first;
        }
#else
    for (int half = STRANDS / 2; half > 0; half /= 2)
        for (int s = 0; s < STRANDS; ++s)
            if (!(s & half)) exchange(square + s, square + s + half, half);
#endif
}

/* Elements d .. end - 1 of row `o` of a weight, at most ROW, as numbers, with zeros behind them. */
INLINE void widen_line(const void *w, int64_t ldw, Scales scales, int64_t o, int64_t d, int64_t end, float *to,
                       const int type, const int scaled, const int zeros) {
    for (; d < end; d += LANES, to += LANES) {
        int64_t at = o * ldw + d, of = o * scales.groups + (scaled ? d / scales.group : 0);
        int64_t deep = smaller(LANES, end - d);
        Vector part = (Vector){0};
        if (deep == LANES) part = vector(w, at, type);
        else for (int64_t e = 0; e < deep; ++e) part[e] = number(w, at + e, type);
        if (zeros) part -= number(scales.zero, of, zeros);
        if (scaled) part *= scales.scale[of];
        *(Vector *)to = part;
    }
}

/* `rows` times outputs `first` .. `first + outs - 1`, which are OUTS where a weight of floats `is_read` as it lies, and
   else at most OUTS. */
INLINE void sums_of_strands(const float *x, int64_t ldx, const void *w, int64_t ldw, int64_t depth, Scales scales,
                            int64_t first, float *y, int64_t ldy, int64_t outs, Fetch fetch, const int rows,
                            const int is_read, const int type, const int scaled, const int zeros) {
    enum { SQUARES = FULL * WIDE / STRANDS };
    const int64_t piece = piece_of(depth, scales, type), step = is_read ? ldw : ROW;
    const int squares = (rows * WIDE + STRANDS - 1) / STRANDS;
    float wide[OUTS][ROW] __attribute__((aligned(64))), rest[FULL][STRANDS] = {{0}};
    Vector whole[SQUARES], sum[SQUARES * STRANDS];
    if (outs < OUTS) memset(wide, 0, sizeof(wide));
    for (int n = 0; n < squares; ++n) whole[n] = -(Vector){0}; /* to which zeros of both signs may be added */
#define WIDEN(LINE, UNTIL)                                                                  \
    for (int64_t o = 0; o < outs; ++o)                                                      \
        widen_line(w, ldw, scales, first + o, LINE, UNTIL, wide[o], type, scaled, zeros)
    for (int64_t from = 0, end; from < depth; from = end) {
        int64_t line = from;
        end = smaller(from + piece, depth);
#pragma GCC unroll 16
        for (int n = 0; n < squares * STRANDS; ++n) sum[n] = (Vector){0};
        for (; line + ROW <= end; line += ROW) {
            if (fetch.wait-- == 0) {
                fetch.wait = fetch.every - 1;
#pragma GCC unroll 16
                for (int o = 0; o < OUTS; ++o) PREFETCH(place(fetch.next, o * ldw + line, type));
            }
            if (!is_read) WIDEN(line, line + ROW);
            const float *of = is_read ? (const float *)w + first * ldw + line : wide[0];
#pragma GCC unroll 4
            for (int64_t d = 0; d < ROW; d += STRANDS) add_fours(x + line + d, ldx, of + d, step, sum, rows);
        }
        if (line < end) WIDEN(line, end);
        for (int64_t d = line; d < end; d += STRANDS) {
            for (int r = 0; r < rows; ++r)
                for (int s = 0; s < STRANDS; ++s) rest[r][s] = d + s < end ? x[r * ldx + d + s] : 0;
            add_fours(rest[0], STRANDS, wide[0] + d - line, ROW, sum, rows);
        }
#undef WIDEN
#pragma GCC unroll 8
        for (int n = 0; n < squares; ++n) {
            turn_fours(sum + n * STRANDS);
#pragma GCC unroll 4
            for (int s = 0; s < STRANDS; ++s) whole[n] += sum[n * STRANDS + s];
        }
    }
    for (int r = 0; r < rows; ++r)
        for (int64_t o = 0; o < outs; ++o) {
            int64_t n = r * WIDE + o / FOURS;
            y[r * ldy + o] = whole[n / STRANDS][o % FOURS * STRANDS + n % STRANDS];
        }
}

/* All rows times rows `first` .. `first + outs - 1` of the weight. What is left of either is computed with those before
   it, once more; where there are too few rows of the weight, they are widened for each row. Each pass over the rows
   fetches its share of the next tile. */
INLINE void product_by_strands(const float *x, int64_t ldx, const void *w, int64_t ldw, int64_t depth, Scales scales,
                               int64_t first, float *y, int64_t ldy, int64_t rows, int64_t outs, const int type,
                               const int scaled, const int zeros) {
    const int is_read = type == FLOAT && !scaled && !zeros;
    Fetch nothing = {w, depth, depth};
#define SUMS(R, O, FETCH, ROWS, IS_READ)                                                                            \
    sums_of_strands(x + (R) * ldx, ldx, w, ldw, depth, scales, first + (O), y + (R) * ldy + (O), ldy,               \
                    smaller(OUTS, outs), FETCH, ROWS, IS_READ, type, scaled, zeros)
#define TILES(ROWS)                                                                                                 \
    for (int64_t n = 0; n < outs; n += OUTS)                                                                        \
        for (int64_t p = 0, passes = parts_of(rows, ROWS), o = smaller(n, outs - OUTS); p < passes; ++p) {          \
            Fetch fetch = {place(w, (first + o + OUTS) * ldw, type), passes, p};                                    \
            SUMS(smaller(p * ROWS, rows - ROWS), o, fetch, ROWS, is_read);                                          \
        }
    if (outs < OUTS) for (int64_t r = 0; r < rows; ++r) SUMS(r, 0, nothing, 1, 0);
    else if (FULL > 4 && rows >= FULL) TILES(FULL)
    else if (rows >= 4) TILES(4)
    else if (rows >= 2) TILES(2)
    else TILES(1)
#undef TILES
#undef SUMS
}
