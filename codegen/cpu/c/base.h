/* The beginning of every compiled attention: the arguments of a call, and the functions of the score
   language, written so that compilers vectorise the loops that call them. ELEMENT, the type of q, k, v and
   out, is FLOAT32, BFLOAT16 or FLOAT16. Plain C11 with GNU extensions, without PyTorch's headers. */

#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* Block sizes: queries of a work item, keys of a step. call.py has the same numbers. */
enum { BLOCK_Q = 48, BLOCK_K = 64, MOST_READS = 16, MOST_NUMBERS = 16 };

typedef struct { const void *data; int64_t stride[6], size[6]; } Read;

/* The threads' progress in a round: what was taken and what is finished. */
struct Round { int64_t next_pack, packed, next_item, finished; };

typedef struct {
    const void *q, *k, *v;              /* the width is contiguous; strides are of elements: b, h, token */
    void *out;
    float *lse;                         /* [B, H, Sq], contiguous */
    int64_t q_stride[3], k_stride[3], v_stride[3], out_stride[3];
    int64_t B, H, Hkv, Sq, Sk, D, Dv, wide; /* wide: Dv rounded up to whole vectors */
    const uint8_t *map[2];              /* per block: 0 skip, 1 evaluate masks, 2 masks keep all */
    int64_t map_stride[2][3];           /* b, h, block of queries; map[0] also skips finite fills */
    const uint8_t *known[2];            /* for maps completed at run time: what follows from sizes alone */
    int64_t known_stride[2][3], lines[2][2]; /* lines: numbers of b and h with separate lines, or 1 */
    int64_t next_line, made;            /* shared counters */
    double hidden;                      /* no score behind a finite fill exceeds it */
    float scale;
    int32_t together;                   /* (b, key head) pairs per round */
    float *k_packed, *v_packed;         /* [2][pair of the round][block][D][BLOCK_K] and [token][wide] */
    float *scratch;                     /* [thread][scratch_size] */
    int64_t scratch_size;
    struct Round *rounds;               /* zeros */
    int64_t slot, bad;                  /* shared counters; bad: an index was out of range */
    int64_t whole[MOST_NUMBERS];        /* values of expressions of sizes */
    float real[MOST_NUMBERS];
    Read read[MOST_READS];
    /* decode.h: k and v are pages (strides of page, head, token), a row's tokens lie at its pages in `table`
       [rows][columns]; tokens starts[r] .. starts[r + 1] - 1 of q and of k_new, v_new are row r's, the first
       of them at position first[r], after held[r] keys. */
    const int64_t *table, *starts, *first, *held;
    int64_t columns, page, window;      /* window: the most keys that a query sees; 0: all */
    const void *k_new, *v_new;
    int64_t k_new_stride[2], v_new_stride[2];
    int64_t step, member;               /* queries of an item; a shared counter */
    int64_t parts;                      /* parts of the keys, with a separate item each */
    float *partial;                     /* [item][part][BLOCK_Q * (wide + 2)] */
    int64_t *arrived;                   /* [item], zeros */
    const struct Gradients *gradients;  /* backward.h */
} Call;

/* Further arguments of a backward pass. Items are blocks of queries of a head, (b, h, block) in this order. */
struct Gradients {
    const void *grad;                   /* of out */
    const float *grad_lse;              /* [B, H, Sq] */
    int64_t grad_stride[3];
    int64_t wanted;                     /* OF_Q | OF_K | OF_V */
    float *grad_q;                      /* [B, H, Sq, D] */
    void *grad_k, *grad_v;              /* [B, Hkv, Sk, D or Dv] */
    float *q_packed, *grad_packed;      /* [item][BLOCK_Q][wide_k], times scale, and [item][BLOCK_Q][wide] */
    float *rows;                        /* [item][3][BLOCK_Q]: base, unit, delta */
    uint8_t *choice;                    /* [item]: the map to use, 2 for none */
    int64_t *added;                     /* [item], zeros: 1 + the last block of keys that was added */
    int64_t *counters;                  /* [4], zeros */
    float *sums[MOST_READS];            /* [B, H, Sq or Sk]: of reads by rows or by columns */
    /* One read by pairs: sums of rows first .. first + count - 1, separate for each batch (from `batch` on) and
       each head, or over all. */
    float *pairs;
    int64_t owner_stride, row_stride, first, count, batch, owners, number, each_batch, each_head;
};

/* ---- elements ---- */

#if defined(FLOAT32)
typedef float Element;
INLINE float widen(Element x) { return x; }
INLINE Element narrow(float x) { return x; }
#elif defined(FLOAT16)
typedef _Float16 Element;
INLINE float widen(Element x) { return (float)x; }
INLINE Element narrow(float x) { return (Element)x; }
#else
typedef uint16_t Element;
INLINE float widen_bits(uint16_t x) { union { uint32_t i; float f; } u = {.i = (uint32_t)x << 16}; return u.f; }
INLINE float widen(Element x) { return widen_bits(x); }
INLINE Element narrow(float x) {        /* to the nearest, ties to even */
    union { float f; uint32_t i; } u = {.f = x};
    uint32_t rounded = (u.i + 0x7fff + ((u.i >> 16) & 1)) >> 16;
    return (Element)(x != x ? 0x7fc0 : rounded);
}
#endif

INLINE float from_float(float x) { return x; }
INLINE float from_bfloat16(uint16_t x) { union { uint32_t i; float f; } u = {.i = (uint32_t)x << 16}; return u.f; }
INLINE int from_bool(uint8_t x) { return x != 0; }
INLINE int from_int32(int32_t x) { return x; }
INLINE int64_t from_int64(int64_t x) { return x; }
#ifdef __FLT16_MAX__
INLINE float from_float16(_Float16 x) { return (float)x; }
#endif

/* ---- functions ----
   exp by the reduction of Cody and Waite (Software Manual for the Elementary Functions, 1980, chapter 6):
   x = n ln 2 + r with ln 2 in two parts, then a polynomial in r that is minimax on |r| <= ln 2 / 2. */

INLINE float power_of_two(int n) { union { int32_t i; float f; } u = {.i = (n + 127) * (1 << 23)}; return u.f; }

INLINE float exp_reduced(float r) {     /* exp(r) for |r| <= ln 2 / 2 */
    float p = 0.001381459878757596f;
    p = p * r + 0.008368716575205326f;
    p = p * r + 0.04166838899254799f;
    p = p * r + 0.1666652113199234f;
    p = p * r + 0.4999999403953552f;
    return p * r * r + r + 1.0f;
}

/* The nearest integer to a small x is read from the last bits of x + 1.5 * 2**23. */
INLINE float exp_of_negative(float x) { /* x <= 0 or NaN; zero where exp(x) is below the normal numbers */
    float c = x < -87.0f ? -87.0f : x;
    float shifted = c * 1.442695040888963f + 12582912.0f;
    union { float f; int32_t i; } u = {.f = shifted};
    float n = shifted - 12582912.0f;
    float r = c - n * 0.693359375f;
    r = r + n * 2.12194440054690583e-4f;
    float y = exp_reduced(r) * power_of_two(u.i - 0x4b400000);
    return x < -87.0f ? 0.0f : y;
}

INLINE float scaled_exp(int n, float r) {
    int half = n >> 1;                  /* in two steps, for subnormal results and for 2**128 */
    return exp_reduced(r) * power_of_two(half) * power_of_two(n - half);
}

INLINE float exp_(float x) {
    float c = x < -105.0f ? -105.0f : x;
    c = c > 90.0f ? 90.0f : c;
    float shifted = c * 1.442695040888963f + 12582912.0f;
    union { float f; int32_t i; } u = {.f = shifted};
    float n = shifted - 12582912.0f;
    float r = c - n * 0.693359375f;
    r = r + n * 2.12194440054690583e-4f;
    return x != x ? x : scaled_exp(u.i - 0x4b400000, r);
}

INLINE float exp2_(float x) {
    float c = x < -152.0f ? -152.0f : x;
    c = c > 130.0f ? 130.0f : c;
    float shifted = c + 12582912.0f;
    union { float f; int32_t i; } u = {.f = shifted};
    float n = shifted - 12582912.0f;
    return x != x ? x : scaled_exp(u.i - 0x4b400000, (c - n) * 0.6931471805599453f);
}

INLINE float tanh_(float x) {           /* an odd minimax polynomial near zero, elsewhere by exp */
    float a = fabsf(x);
    float z = x * x;
    float p = -0.005704986862838268f;
    p = p * z + 0.02063908614218235f;
    p = p * z - 0.05373971536755562f;
    p = p * z + 0.13331441581249237f;
    p = p * z - 0.3333328068256378f;
    float near = x + x * z * p;
    float t = exp_of_negative(-2.0f * a);
    float far = copysignf((1.0f - t) / (1.0f + t), x);
    return a < 0.625f ? near : far;     /* NaN takes `far` and stays NaN */
}

INLINE float sigmoid_(float x) { return 1.0f / (1.0f + exp_(-x)); }
INLINE float rsqrt_(float x) { return 1.0f / sqrtf(x); }
INLINE float sign_(float x) { return (float)((x > 0) - (x < 0)); }
INLINE float minimum(float a, float b) { return a < b || a != a ? a : b; }
INLINE float maximum(float a, float b) { return a > b || a != a ? a : b; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Floor division and its remainder. A divisor is a constant or was checked at launch: it is not 0. */
#define FLOOR_DIVISION(TYPE, NAME)                                                                    \
    INLINE TYPE floor_divide_##NAME(TYPE a, TYPE b) {                                                 \
        TYPE quotient = a / b, rest = a - quotient * b;                                               \
        return quotient - (rest != 0 && (rest < 0) != (b < 0));                                       \
    }                                                                                                 \
    INLINE TYPE floor_modulo_##NAME(TYPE a, TYPE b) {                                                 \
        TYPE rest = a % b;                                                                            \
        return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;                                  \
    }
FLOOR_DIVISION(int, int)
FLOOR_DIVISION(int64_t, long)

INLINE float floor_modulo_float(float a, float b) {
    float rest = fmodf(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

INLINE float floor_divide_float(float a, float b) { /* exact for results that a float holds */
    float rest = fmodf(a, b);
    float quotient = (a - rest) / b;
    if (rest != 0 && (rest < 0) != (b < 0)) quotient -= 1;
    float whole = floorf(quotient);
    if (quotient - whole > 0.5f) whole += 1;
    return b == 0 ? a / b : quotient == 0 ? copysignf(0.0f, a / b) : whole;
}

/* Uniform in [0, 1) from a seed and four counters: the finaliser of MurmurHash3 (Appleby) once for each. */
INLINE uint32_t mix(uint32_t state, uint32_t place) {
    state ^= place * 0x9E3779B1u;
    state = (state ^ (state >> 16)) * 0x85EBCA6Bu;
    state = (state ^ (state >> 13)) * 0xC2B2AE35u;
    return state ^ (state >> 16);
}
INLINE float uniform(uint32_t seed, uint32_t b, uint32_t h, uint32_t q, uint32_t k) {
    return (float)(int32_t)(mix(mix(mix(mix(seed, b), h), q), k) >> 8) * (1.0f / (1 << 24));
}

/* ---- reads ---- */

/* The first of `count` consecutive indices, moved so that all are in range; sets `bad` if they were not. */
INLINE int64_t in_range_row(int64_t first, int count, int64_t size, int *bad) {
    if (first >= 0 && first + count <= size) return first;
    *bad = 1;
    return 0;
}

/* Consecutive elements along an axis. From an axis that is too short (in_range_row sets `bad`) nothing is
   read. */
#define COPY(TO, CONVERT, FROM, STRIDE, COUNT)                                                        \
    do {                                                                                              \
        const int64_t step = (STRIDE);                                                                \
        const __typeof__(*(FROM)) *const from = (FROM);                                               \
        if (bad) break;                                                                               \
        if (step == 1)                                                                                \
            for (int j = 0; j < (COUNT); ++j) TO[j] = CONVERT(from[j]);                               \
        else                                                                                          \
            for (int j = 0; j < (COUNT); ++j) TO[j] = CONVERT(from[j * step]);                        \
    } while (0)

/* ---- the program ---- */
