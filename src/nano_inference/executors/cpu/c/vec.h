/* One vector width per build: 16 floats with AVX-512, 8 with AVX2 and FMA, 4 otherwise. Arithmetic uses GCC's vector
 * extensions, and intrinsics only for operations that they lack.
 *
 * The order of every sum in these files depends on positions only, not on the number of rows or on threads: this makes
 * a row's result the same alone and in any batch. Contraction is off; `vfma` is the only fused operation. */
#ifndef NANO_VEC_H
#define NANO_VEC_H

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define LANES 16
#define ISA_NAME "avx512"
#elif defined(__AVX2__) && defined(__FMA__)
#define LANES 8
#define ISA_NAME "avx2"
#else
#define LANES 4
#define ISA_NAME "generic"
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef int8_t vb __attribute__((vector_size(LANES)));
typedef uint8_t vub __attribute__((vector_size(LANES)));

/* float64: half as many lanes; one half of a float32 vector. */
#define DOUBLES (LANES / 2)
typedef double vd __attribute__((vector_size(4 * LANES)));
typedef int64_t vl __attribute__((vector_size(4 * LANES)));
typedef float vf_half __attribute__((vector_size(2 * LANES)));

INLINE vf load_f(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void store_f(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vu load_u(const void *p) { vu v; memcpy(&v, p, sizeof v); return v; }
INLINE vf all_f(float x) { return x - (vf){0}; }
INLINE vd load_d(const double *p) { vd v; memcpy(&v, p, sizeof v); return v; }
INLINE void store_d(double *p, vd v) { memcpy(p, &v, sizeof v); }
INLINE vd all_d(double x) { return x - (vd){0}; }
/* With intrinsics: GCC 12 converts a quarter of a vector at a time. */
INLINE vd widened(const float *p) {
#if LANES == 16
    return (vd)_mm512_cvtps_pd(_mm256_loadu_ps(p));
#elif LANES == 8
    return (vd)_mm256_cvtps_pd(_mm_loadu_ps(p));
#else
    vf_half v; memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, vd);
#endif
}

INLINE vf vfma(vf a, vf b, vf c) {
#if LANES == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE vf vmax(vf a, vf b) {
#if LANES == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    vi keep = a > b;
    return (vf)((keep & (vi)a) | (~keep & (vi)b));
#endif
}

INLINE vf select_f(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

/* Lane indices, from 0. */
INLINE vi lane_numbers(void) {
    vi v;
    for (int i = 0; i < LANES; i++) v[i] = i;
    return v;
}

/* Sums and maxima of 16 adjacent floats, in the order of the same binary tree for any vector width. */
INLINE float sum16(const float *p) {
    float a[8];
    for (int i = 0; i < 8; i++) a[i] = p[i] + p[i + 8];
    for (int i = 0; i < 4; i++) a[i] += a[i + 4];
    return (a[0] + a[2]) + (a[1] + a[3]);
}

/* Half precision to float, exactly, by integer arithmetic: the exponent is shifted, then scaled. The scaling is exact,
 * so subnormals are correct, and infinities and NaN are preserved. */
INLINE vf half_to_f(vh h) {
#if LANES == 16
    return (vf)_mm512_cvtph_ps((__m256i)h);
#elif LANES == 8 && defined(__F16C__)
    return (vf)_mm256_cvtph_ps((__m128i)h);
#else
    vu x = __builtin_convertvector(h, vu);
    vu magnitude = (x & 0x7fff) << 13;
    vf scaled = (vf)magnitude * all_f(0x1p112f);
    vi special = (vi)(magnitude >= (vu){} + 0x0f800000u);
    vf odd = (vf)(magnitude | 0x7f800000u);
    return (vf)((vu)select_f(special, odd, scaled) | ((x & 0x8000) << 16));
#endif
}
INLINE vf load_half(const uint16_t *p) { vh h; memcpy(&h, p, sizeof h); return half_to_f(h); }
INLINE vf load_s8(const int8_t *p) {
    vb b; memcpy(&b, p, sizeof b);
#if LANES == 16
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)b));
#elif LANES == 8
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)&b)));
#else
    return __builtin_convertvector(__builtin_convertvector(b, vi), vf);
#endif
}
INLINE vf load_u8(const uint8_t *p) {
    vub b; memcpy(&b, p, sizeof b);
    return __builtin_convertvector(__builtin_convertvector(b, vi), vf);
}

INLINE vf load_bf16(const uint16_t *p) {
    vh h; memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
}
INLINE float bf16_scalar(uint16_t h) {
    const uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
/* Round to the nearest bfloat16, ties to even; NaN stays NaN. */
INLINE uint16_t round_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE float half_scalar(uint16_t h) {
    uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13, bits;
    float f;
    memcpy(&f, &magnitude, 4);
    f *= 0x1p112f;
    if (magnitude >= 0x0f800000u) { bits = magnitude | 0x7f800000u; memcpy(&f, &bits, 4); }
    memcpy(&bits, &f, 4);
    bits |= (uint32_t)(h & 0x8000) << 16;
    memcpy(&f, &bits, 4);
    return f;
}

/* e^x for x from -87 to 88: x = n ln 2 + r with |r| <= ln 2 / 2; Taylor series of e^r to the seventh power (remainder
 * below a tenth of an ulp); n is added to the exponent. */
INLINE vi exp_bits(vf x) {
    const vf magic = all_f(12582912.0f);
    const vf n = vfma(x, all_f(1.44269504088896341f), magic) - magic;
    vf r = vfma(n, all_f(-0.693359375f), x);
    r = vfma(n, all_f(2.12194440054690583e-4f), r);
    vf y = all_f(1.0f / 5040);
    y = vfma(y, r, all_f(1.0f / 720));
    y = vfma(y, r, all_f(1.0f / 120));
    y = vfma(y, r, all_f(1.0f / 24));
    y = vfma(y, r, all_f(1.0f / 6));
    y = vfma(y, r, all_f(0.5f));
    y = vfma(y, r, all_f(1.0f));
    y = vfma(y, r, all_f(1.0f));
    return (vi)y + (__builtin_convertvector(n, vi) << 23);      /* n << 23 is 0 for NaN, which is preserved */
}

/* e^x: 0 below the smallest normal number, infinite above e^88; NaN stays NaN. */
INLINE vf vexp(vf x) {
    const vi tiny = x < all_f(-87.33654f), huge = x > all_f(88.0f);
    x = vmax(all_f(-87.33654f), x);          /* this order of arguments preserves NaN */
    x = -vmax(all_f(-88.0f), -x);
    return (vf)((exp_bits(x) & ~(tiny | huge)) | (huge & 0x7f800000));
}

/* e^x for x not above 0. */
INLINE vf vexp_down(vf x) {
    const vi tiny = x < all_f(-87.33654f);
    return (vf)(exp_bits(vmax(all_f(-87.33654f), x)) & ~tiny);
}

INLINE vf vtanh(vf x) {  /* 1 - 2 / (e^2x + 1), symmetric: near 0 the absolute error is half an ulp of 1 */
    vf e = vexp(x + x);
    return all_f(1.0f) - all_f(2.0f) / (e + all_f(1.0f));
}

#endif
