/* What all emitted C begins with: elements of the dtype in use (ELEMENT: FLOAT32, BFLOAT16 or FLOAT16), the
   functions of the score language, written so that compilers vectorise the loops that call them, vectors, and
   counters that threads share. Plain C11 with GNU extensions, without PyTorch's headers. */

#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* ---- elements ---- */

INLINE float from_bfloat16(uint16_t x) { union { uint32_t i; float f; } u = {.i = (uint32_t)x << 16}; return u.f; }
INLINE uint16_t to_bfloat16(float x) {  /* to the nearest, ties to even */
    union { float f; uint32_t i; } u = {.f = x};
    return (uint16_t)(x != x ? 0x7fc0 : (u.i + 0x7fff + ((u.i >> 16) & 1)) >> 16);
}

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
INLINE float widen(Element x) { return from_bfloat16(x); }
INLINE Element narrow(float x) { return to_bfloat16(x); }
#endif

INLINE float from_float(float x) { return x; }
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

INLINE float erf_(float x) {            /* near zero an odd minimax polynomial, elsewhere 1 - exp(-a - a * p(a)) */
    float a = fabsf(x);
    float z = x * x;
    float p = 8.370100113097578e-05f;
    p = p * z - 0.0008142704027704895f;
    p = p * z + 0.005201032385230064f;
    p = p * z - 0.026859398931264877f;
    p = p * z + 0.11283695697784424f;
    p = p * z - 0.37612634897232056f;
    p = p * z + 0.12837916612625122f;
    float near = x + x * p;
    float c = a > 4.0f ? 4.0f : a;      /* from there on 1 is nearest */
    float r = 1.1303807696094736e-05f;
    r = r * c - 0.0003235291806049645f;
    r = r * c + 0.0036454065702855587f;
    r = r * c - 0.023768292739987373f;
    r = r * c + 0.10624410957098007f;
    r = r * c + 0.635146975517273f;
    r = r * c + 0.12864956259727478f;
    float far = copysignf(1.0f - exp_of_negative(-(c + c * r)), x);
    return a < 0.921875f ? near : far;  /* NaN takes `far` and stays NaN */
}

/* x = 2**n * (1 + f) with 1 + f between sqrt(1/2) and sqrt(2), then a polynomial in f that is minimax there. */
INLINE float log_parts(float x, float *n) {
    int small = x < 1.1754943508222875e-38f;
    union { float f; int32_t i; } u = {.f = small ? x * 8388608.0f : x};
    int e = (u.i - 0x3f3504f3) >> 23;
    u.i -= e * (1 << 23);
    float f = u.f - 1.0f;
    float z = f * f;
    float p = -0.07634492963552475f;
    p = p * f + 0.12761574983596802f;
    p = p * f - 0.13160182535648346f;
    p = p * f + 0.14201758801937103f;
    p = p * f - 0.16623356938362122f;
    p = p * f + 0.20001226663589478f;
    p = p * f - 0.2500081956386566f;
    p = p * f + 0.3333333134651184f;
    *n = (float)(small ? e - 23 : e);
    return f * z * p - 0.5f * z + f;
}

INLINE float log_at(float x, float y) { /* y, but for what has no finite logarithm */
    return x > 0.0f ? (x < INFINITY ? y : x) : x == 0.0f ? -INFINITY : NAN;
}

INLINE float log_(float x) {
    float n, y = log_parts(x, &n);
    return log_at(x, n * 0.693359375f + (y - n * 2.12194440054690583e-4f));
}

INLINE float log2_(float x) {
    float n, y = log_parts(x, &n);
    return log_at(x, n + (y + y * 0.4426950408889634f));
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

/* ---- vectors ---- */

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* The sum of a vector's elements, by pairwise addition. */
INLINE float sum_of(Vector x) {
    union { Vector v; float f[LANES]; } u = {.v = x};
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int l = 0; l < half; ++l) u.f[l] += u.f[l + half];
    return u.f[0];
}

/* In order, a product and a sum are rounded once, in every loop: compilers decide that by the form of a loop, and avoid
   it in chains of sums on some processors. */
#ifdef ORDERED
#if defined(__FMA__)
#include <immintrin.h>
#endif
INLINE Vector fused(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int l = 0; l < LANES; ++l) c[l] = __builtin_fmaf(a[l], b[l], c[l]);
    return c;
#endif
}
#define ADD_PRODUCT(SUM, BY, VECTOR) (SUM) = fused((BY) - (Vector){0}, VECTOR, SUM)
#define ADD_NUMBERS(SUM, A, B) (SUM) = __builtin_fmaf(A, B, SUM)
#else
#define ADD_PRODUCT(SUM, BY, VECTOR) (SUM) += (BY) * (VECTOR)
#define ADD_NUMBERS(SUM, A, B) (SUM) += (A) * (B)
#endif

enum { STREAMS = 8 };                   /* what is read side by side where the memory's speed counts */

/* total[o] = the sum of the elements of sum[o], for at most STREAMS vectors. Each step adds the halves of pairs of
   vectors, so that it ends with vectors that hold LANES totals each. */
#if defined(__clang__)
INLINE void totals(const Vector *sum, float *total, const int outs) {
    for (int o = 0; o < outs; ++o) total[o] = sum_of(sum[o]);
}
#else
typedef int32_t Lanes __attribute__((vector_size(4 * LANES)));

/* Two vectors as a square of four blocks: the blocks beside the diagonal change places, in each group of 2 * `half`
   lanes. */
INLINE void exchange(Vector *a, Vector *b, const int half) {
    Vector first = *a, second = *b;
    Lanes lane = {0}, of_b;             /* lanes whose number has the bit `half` are b's, the others a's */
#pragma GCC unroll 16
    for (int l = 0; l < LANES; ++l) lane[l] = l;
    of_b = ((lane & half) != 0) & (LANES - half);
    Lanes low = lane + of_b, high = lane + half + of_b;
    *a = __builtin_shuffle(first, second, low);
    *b = __builtin_shuffle(first, second, high);
}

INLINE Vector add_halves(Vector a, Vector b, const int half) {
    exchange(&a, &b, half);
    return a + b;
}

INLINE void totals(const Vector *sum, float *total, const int outs) {
    Vector part[STREAMS];
    int count = outs;
#pragma GCC unroll 8
    for (int o = 0; o < outs; ++o) part[o] = sum[o];
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2) {
#pragma GCC unroll 4
        for (int p = 0; p < (count + 1) / 2; ++p)
            part[p] = add_halves(part[2 * p], part[2 * p + 1 < count ? 2 * p + 1 : 2 * p], half);
        count = (count + 1) / 2;
    }
#pragma GCC unroll 8
    for (int o = 0; o < outs; ++o) {    /* vector o went to b's lanes in the steps of its one bits */
        int lane = 0, half = LANES / 2;
        for (int n = o; half > 0; n /= 2, half /= 2) lane |= n & 1 ? half : 0;
        total[o] = part[o / LANES][lane];
    }
}
#endif

/* Turns a square of LANES vectors: element e of vector r and element r of vector e change places. */
INLINE void turn(Vector *rows) {
#if defined(__clang__)
    for (int e = 0; e < LANES; ++e)
        for (int r = 0; r < e; ++r) {
            float first = rows[r][e];
            rows[r][e] = rows[e][r], rows[e][r] = first;
        }
#else
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2)
#pragma GCC unroll 16
        for (int r = 0; r < LANES; ++r)
            if (!(r & half)) exchange(rows + r, rows + r + half, half);
#endif
}

/* to[e * step ..] = element e of each of `rows`, which are LANES vectors. */
INLINE void store_turned(Vector *rows, float *to, int64_t step) {
    turn(rows);
#pragma GCC unroll 16
    for (int e = 0; e < LANES; ++e) *(Vector *)(to + e * step) = rows[e];
}

/* ---- threads ---- */

static int64_t take(int64_t *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_ACQ_REL); }

INLINE void rest(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Waits are mostly short, so a thread spins first: on a busy machine a thread that yields may not run again
   for milliseconds. */
static void wait_for(int64_t *counter, int64_t wanted) {
    for (int turns = 0; __atomic_load_n(counter, __ATOMIC_ACQUIRE) < wanted; ++turns)
        turns < 4096 ? rest() : (void)sched_yield();
}

/* Waits until all `members` threads have come here for the `number`th time. */
INLINE void meet(int64_t *arrived, int64_t number, int64_t members) {
    take(arrived);
    wait_for(arrived, number * members);
}
