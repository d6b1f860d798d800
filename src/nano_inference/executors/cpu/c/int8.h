/* Products of weights of eight bits or fewer with eight-bit activations, opt-in. Activations have a scale for every
 * GROUP inputs of each token (largest magnitude / 127, ties to even), because a model's few large activations would
 * otherwise round the others to 0. Four-bit weights are not converted (second half of this file); others are rounded
 * to eight bits, with a scale per output. Sums within a group or block are exact integers, and are added in ascending
 * order.
 *
 * The panels are followed by 64 float scales for each. CPUs multiply unsigned by signed bytes. With VNNI, 128 is added
 * to the weights on loading, and 128 times the sum of a group's activations is subtracted; without VNNI, two products
 * are added in 16 bits, which would overflow, so the weight's sign is moved to the activation. */
#ifndef NANO_INT8_H
#define NANO_INT8_H

#include "formats.h"
#include "pool.h"

INLINE const float *int8_scales(const Matrix *m, long panel) {
    return (const float *)(m->data + num_panels(m->num_out) * panel_bytes(INT8, m->num_in) + panel * PANEL * 4);
}

INLINE float round_even(float x) { return (x + 12582912.0f) - 12582912.0f; }

#define GROUP 64                             /* inputs that share an activation scale */
#define HALF (GROUP / 2)                     /* inputs of a block of nibbles */

/* A row of activations: each group's scale; 128 times the sum of each group's bytes; for each half group, the sum of
 * its bytes times the scale; then, aligned to 64, the bytes, padded with zeros to whole groups. */
INLINE long num_groups(long num_in) { return (num_in + GROUP - 1) / GROUP; }
INLINE long bytes_before(long num_in) { return (num_groups(num_in) * 16 + 63) / 64 * 64; }
int64_t nano_int8_row_bytes(int64_t num_in) { return bytes_before(num_in) + num_groups(num_in) * GROUP; }

/* NaN or infinity makes its group's scale NaN. */
static void quantise_group(const float *x, int8_t *q, float *scale, int32_t *sum, float *shifts) {
    vf best = all_f(0), odd = all_f(0);
    for (int i = 0; i < GROUP; i += LANES) {
        const vf v = load_f(x + i);
        best = vmax(vmax(v, -v), best);
        odd += v * all_f(0);
    }
    float top = 0, flaw = 0;
    for (int u = 0; u < LANES; u++) {
        top = best[u] > top ? best[u] : top;
        flaw += odd[u];
    }
    *scale = top / 127.0f + flaw;
    const float inverse = top > 0 && *scale == *scale ? 127.0f / top : 0;
    const vf magic = all_f(12582912.0f);                 /* round to even */
    *sum = 0;
    for (int half = 0; half < 2; half++) {
        vi total = {0};
        for (int i = half * HALF; i < (half + 1) * HALF; i += LANES) {
            const vf rounded = inverse != 0 ? (load_f(x + i) * all_f(inverse) + magic) - magic : all_f(0);
            const vi whole = __builtin_convertvector(rounded, vi);
            const vb bytes = __builtin_convertvector(whole, vb);
            memcpy(q + i, &bytes, sizeof bytes);
            total += whole;
        }
        int32_t of_half = 0;
        for (int u = 0; u < LANES; u++) of_half += total[u];
        *sum += 128 * of_half;
        shifts[half] = *scale * (float)of_half;
    }
}
static void quantise_row(const float *x, long n, uint8_t *row) {
    float *scales = (float *)row, *shifts = scales + 2 * num_groups(n), rest[GROUP] = {0};
    int32_t *sums = (int32_t *)row + num_groups(n);
    int8_t *q = (int8_t *)row + bytes_before(n);
    long g = 0;
    for (; (g + 1) * GROUP <= n; g++)
        quantise_group(x + g * GROUP, q + g * GROUP, &scales[g], &sums[g], &shifts[2 * g]);
    if (g * GROUP == n) return;
    memcpy(rest, x + g * GROUP, 4 * (n - g * GROUP));
    quantise_group(rest, q + g * GROUP, &scales[g], &sums[g], &shifts[2 * g]);
}

/* Pack the float rows [first, first + count); each output's scale is its largest magnitude / 127. The packed memory
 * must be zero before. */
void nano_pack_int8(const float *values, long first, long count, long num_out, long num_in, char *packed) {
    const long bytes = panel_bytes(INT8, num_in);
    for (long n = first; n < first + count; n++) {
        const float *row = values + (n - first) * num_in;
        const long lane = n % PANEL;
        char *panel = packed + n / PANEL * bytes;
        char *behind = packed + num_panels(num_out) * bytes + n / PANEL * PANEL * 4;
        float top = 0;
        for (long k = 0; k < num_in; k++) if (__builtin_fabsf(row[k]) > top) top = __builtin_fabsf(row[k]);
        float odd = 0;
        for (long k = 0; k < num_in; k++) odd += row[k] * 0.0f;
        const float scale = top / 127.0f + odd, inverse = top > 0 && scale == scale ? 127.0f / top : 0;
        for (long k = 0; k < num_in; k++)
            panel[k / 4 * 256 + lane * 4 + k % 4] = (char)(scale == scale ? (int)round_even(row[k] * inverse) : 0);
        memcpy(behind + 4 * lane, &scale, 4);
    }
}

/* One output's weights, widened. */
static void read_int8_row(const Matrix *m, long row, float *out) {
    const char *panel = m->data + row / PANEL * panel_bytes(INT8, m->num_in);
    const float scale = int8_scales(m, row / PANEL)[row % PANEL];
    for (long k = 0; k < m->num_in; k++) out[k] = (float)(int8_t)panel[k / 4 * 256 + row % PANEL * 4 + k % 4] * scale;
}

#if (LANES == 16 && defined(__AVX512VNNI__)) || (LANES == 8 && defined(__AVXVNNI__))
#define HAS_VNNI 1
#else
#define HAS_VNNI 0
#endif

/* Initial value of a group's sums, from 128 times the sum of its activations. */
INLINE vi start_sum(int32_t sum) { return HAS_VNNI ? -(sum - (vi){0}) : (vi){0}; }

/* acc + four products of weights and activations, all of them signed bytes from -127 to 127. */
INLINE vi dot4(vi acc, vu w, vi x) {
#if LANES == 16 && HAS_VNNI
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)(w ^ 0x80808080u), (__m512i)x);
#elif LANES == 8 && HAS_VNNI
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)(w ^ 0x80808080u), (__m256i)x);
#elif LANES == 16
    const __mmask64 negative = _mm512_movepi8_mask((__m512i)w);
    const __m512i turned = _mm512_mask_sub_epi8((__m512i)x, negative, _mm512_setzero_si512(), (__m512i)x);
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)w), turned);
    return acc + (vi)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif LANES == 8
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), _mm256_sign_epi8((__m256i)x, (__m256i)w));
    return acc + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    for (int j = 0; j < 4; j++) {
        const vi a = ((vi)(w << (24 - 8 * j))) >> 24, b = ((vi)((vu)x << (24 - 8 * j))) >> 24;
        acc += a * b;
    }
    return acc;
#endif
}

/* The same four in every lane. */
INLINE vi four_bytes(const uint8_t *x) {
    int32_t bytes;
    memcpy(&bytes, x, 4);
    return bytes - (vi){0};
}

#define MOST 4                               /* rows, and vectors of outputs, of a tile */

/* R rows by V vectors of outputs. */
INLINE void int8_tile(const int R, const int V, const uint8_t *x, long ldx, const char *panel, long num_in,
                      const float *scales, float *tile) {
    const long groups = num_groups(num_in), before = bytes_before(num_in), fours = (num_in + 3) / 4;
    const long ahead = fetch_distance(INT8, num_in);
    vf total[MOST][MOST];
    _Pragma("GCC unroll 4") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) total[r][v] = all_f(0);
    for (long g = 0; g < groups; g++) {
        vi acc[MOST][MOST];
        _Pragma("GCC unroll 4") for (int r = 0; r < R; r++) {
            const vi sum = start_sum(((const int32_t *)(x + r * ldx))[groups + g]);
            _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) acc[r][v] = sum;
        }
        const long end = (g + 1) * (GROUP / 4) < fours ? (g + 1) * (GROUP / 4) : fours;
        for (long four = g * (GROUP / 4); four < end; four++) {
            vu w[4];
            _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) {
                w[v] = load_u(panel + four * 256 + v * LANES * 4);
                fetch_ahead(panel + four * 256 + v * LANES * 4, ahead);
            }
            _Pragma("GCC unroll 4") for (int r = 0; r < R; r++) {
                const vi b = four_bytes(x + r * ldx + before + four * 4);
                _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) acc[r][v] = dot4(acc[r][v], w[v], b);
            }
        }
        _Pragma("GCC unroll 4") for (int r = 0; r < R; r++) {
            const vf scale = all_f(((const float *)(x + r * ldx))[g]);
            _Pragma("GCC unroll 4") for (int v = 0; v < V; v++)
                total[r][v] += __builtin_convertvector(acc[r][v], vf) * scale;
        }
    }
    _Pragma("GCC unroll 4") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 4") for (int v = 0; v < V; v++)
            store_f(tile + r * PANEL + v * LANES, total[r][v] * load_f(scales + v * LANES));
}

/* Compute a part of one panel's outputs for M rows of bytes: its columns of tile [M, 64]. */
static void int8_panel(const Matrix *m, long panel, Lanes part, const uint8_t *x, long ldx, long M, float *tile) {
    const char *data = m->data + panel * panel_bytes(m->format, m->num_in);
    const float *scales = int8_scales(m, panel);
#if LANES == 16
    enum { TALLEST = 3, WIDEST = 4 };
#else
    enum { TALLEST = 4, WIDEST = 2 };
#endif
    for (long r = 0; r < M;) {
        const long rows = M - r < TALLEST ? M - r : TALLEST;
        const int wide = rows == 1 ? MOST : WIDEST;
        for (int lane = part.from; lane < part.to; lane += wide * LANES) {
            const char *from = data + lane * 4;
            float *out = tile + r * PANEL + lane;
            switch (rows) {
#define CASE(n, v) case n: int8_tile(n, v, x + r * ldx, ldx, from, m->num_in, scales + lane, out); break;
            CASE(1, MOST) CASE(2, WIDEST) CASE(3, WIDEST)
#if LANES != 16
            CASE(4, WIDEST)
#endif
#undef CASE
            }
        }
        r += rows;
    }
}

/* ---- nibbles ---------------------------------------------------------------------------------------------------- */

/* sum + products of bytes below 16 and signed bytes: in 32 bits, or without VNNI in 16, which do not overflow for a
 * block of 32 inputs: 8 additions of 2 products of at most 15 * 127 are 30480. */
INLINE vi add_products(vi sum, vu q, vi x) {
#if LANES == 16 && HAS_VNNI
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)q, (__m512i)x);
#elif LANES == 8 && HAS_VNNI
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)q, (__m256i)x);
#elif LANES == 16
    return (vi)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)q, (__m512i)x));
#elif LANES == 8
    return (vi)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)q, (__m256i)x));
#else
    return dot4(sum, q, x);
#endif
}
INLINE vi whole_sums(vi sum) {
#if LANES == 16 && !HAS_VNNI
    return (vi)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1));
#elif LANES == 8 && !HAS_VNNI
    return (vi)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
#else
    return sum;
#endif
}

/* Integer products of one block: R rows by V vectors of outputs. */
INLINE void block_products(const int R, const int V, const uint8_t *x, long ldx, const char *words, long ahead,
                           vi sum[MOST][MOST]) {
    _Pragma("GCC unroll 4") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) sum[r][v] = (vi){0};
    _Pragma("GCC unroll 1") for (int g = 0; g < HALF / 8; g++) {      /* unrolled, GCC adds in a tree, and spills */
        vu low[MOST], high[MOST];
        _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) {
            const char *p = words + g * 256 + v * LANES * 4;
            const vu both = load_u(p);
            fetch_ahead(p, ahead);
            low[v] = both & 0x0f0f0f0fu;
            high[v] = (both >> 4) & 0x0f0f0f0fu;
        }
        _Pragma("GCC unroll 4") for (int r = 0; r < R; r++) {
            const vi first = four_bytes(x + r * ldx + g * 8), second = four_bytes(x + r * ldx + g * 8 + 4);
            _Pragma("GCC unroll 4") for (int v = 0; v < V; v++)
                sum[r][v] = add_products(add_products(sum[r][v], low[v], first), high[v], second);
        }
    }
}

INLINE void nibble_tile(const int format, const int R, const int V, const uint8_t *x, long ldx, const char *panel,
                        int lane, long num_in, float *tile) {
    const long groups = num_groups(num_in), before = bytes_before(num_in), ahead = fetch_distance(format, num_in);
    vf total[MOST][MOST];
    _Pragma("GCC unroll 4") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) total[r][v] = all_f(0);
    for (long block = 0; block < num_in / HALF; block++) {
        vf a[MOST], b[MOST];
        vi sum[MOST][MOST];
        const char *words = NULL;
        _Pragma("GCC unroll 4") for (int v = V - 1; v >= 0; v--)
            words = nibble_block(format, panel, block, lane + v * LANES, &a[v], &b[v]);
        block_products(R, V, x + before + block * HALF, ldx, words, ahead, sum);
        _Pragma("GCC unroll 4") for (int r = 0; r < R; r++) {
            const float *scales = (const float *)(x + r * ldx);
            const vf scale = all_f(scales[block / 2]), shift = all_f(scales[2 * groups + block]);
            _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) {
                total[r][v] = vfma(__builtin_convertvector(whole_sums(sum[r][v]), vf), a[v] * scale, total[r][v]);
                total[r][v] = vfma(b[v], shift, total[r][v]);
            }
        }
    }
    _Pragma("GCC unroll 4") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) store_f(tile + r * PANEL + v * LANES, total[r][v]);
}

INLINE void nibble_rows(const int format, const char *panel, Lanes part, const uint8_t *x, long ldx, long M, long K,
                        float *tile) {
    for (long r = 0; r < M;) {
        const long left = M - r, rows = left >= MOST ? MOST : left;
        const int wide = rows == 1 ? MOST : 2;           /* limited by the number of registers */
        for (int lane = part.from; lane < part.to; lane += wide * LANES) {
            float *out = tile + r * PANEL + lane;
            switch (rows) {
#define CASE(n, v) case n: nibble_tile(format, n, v, x + r * ldx, ldx, panel, lane, K, out); break;
            CASE(1, MOST) CASE(2, 2) CASE(3, 2) CASE(4, 2)
#undef CASE
            }
        }
        r += rows;
    }
}

/* One function per format, as in gemm.h. */
#define NIBBLES(f)                                                                                                     \
    static __attribute__((noinline)) void nibbles_##f(const char *panel, Lanes part, const uint8_t *x, long ldx,       \
                                                      long M, long K, float *tile) {                                   \
        nibble_rows(f, panel, part, x, ldx, M, K, tile);                                                               \
    }
NIBBLES(Q4_0) NIBBLES(Q4_1) NIBBLES(Q4_K)
#undef NIBBLES

static void rounded_panel(const Matrix *m, long panel, Lanes part, const uint8_t *x, long ldx, long M, float *tile) {
    const char *data = m->data + panel * panel_bytes(m->format, m->num_in);
    switch (m->format) {
    case Q4_0: nibbles_Q4_0(data, part, x, ldx, M, m->num_in, tile); break;
    case Q4_1: nibbles_Q4_1(data, part, x, ldx, M, m->num_in, tile); break;
    case Q4_K: nibbles_Q4_K(data, part, x, ldx, M, m->num_in, tile); break;
    default: int8_panel(m, panel, part, x, ldx, M, tile);
    }
}

#endif
