/* Eight-bit weights times eight-bit activations, opt-in. Weights have a scale for each output, activations one for each
 * token (largest magnitude / 127, ties to even). Sums are exact integers, so their order does not matter.
 *
 * Behind the panels stand, for each panel, 64 float scales and 64 words: 128 times each output's sum of weights. VNNI
 * multiplies unsigned by signed bytes, so activations are shifted by 128 and that sum is taken off again. */
#ifndef NANO_INT8_H
#define NANO_INT8_H

#include "formats.h"
#include "pool.h"

INLINE const float *int8_scales(const Matrix *m, long panel) {
    return (const float *)(m->data + num_panels(m->num_out) * panel_bytes(INT8, m->num_in) + panel * PANEL * 8);
}

INLINE float round_even(float x) { return (x + 12582912.0f) - 12582912.0f; }

#define BYTES_BEFORE 64                      /* of a row's bytes: its scale */

/* One row: its scale, then K bytes, filled up to a multiple of four with what stands for 0. What is no number makes the
 * scale none. */
static void quantise_row(const float *x, long n, uint8_t *row) {
    uint8_t *q = row + BYTES_BEFORE;
    vf most = all_f(0), odd = all_f(0);
    long i = 0;
    for (; i + LANES <= n; i += LANES) {
        const vf v = load_f(x + i);
        most = vmax(vmax(-v, v), most);
        odd += v * all_f(0);
    }
    float top = 0, odds = 0;
    for (int u = 0; u < LANES; u++) { odds += odd[u]; if (most[u] > top) top = most[u]; }
    for (; i < n; i++) { odds += x[i] * 0; if (__builtin_fabsf(x[i]) > top) top = __builtin_fabsf(x[i]); }
    const float scale = top / 127.0f + odds, inverse = top > 0 && scale == scale ? 127.0f / top : 0;
    memcpy(row, &scale, 4);
    if (scale != scale) { memset(q, 128, n); i = n; }
    else
        for (i = 0; i < n; i++) q[i] = (uint8_t)(int)(round_even(x[i] * inverse) + 128.0f);
    for (; i % 4; i++) q[i] = 128;
}

/* From float rows: each output's scale is its largest magnitude / 127. Memory must be zero before. */
void nano_pack_int8(const float *values, const int32_t *rows, long first, long count, long num_out, long num_in,
                    char *packed) {
    const long bytes = panel_bytes(INT8, num_in);
    for (long n = first; n < first + count; n++) {
        const float *row = values + (rows ? rows[n - first] : n - first) * num_in;
        const long lane = n % PANEL;
        char *panel = packed + n / PANEL * bytes;
        char *behind = packed + num_panels(num_out) * bytes + n / PANEL * PANEL * 8;
        float top = 0;
        for (long k = 0; k < num_in; k++) if (__builtin_fabsf(row[k]) > top) top = __builtin_fabsf(row[k]);
        float odd = 0;
        for (long k = 0; k < num_in; k++) odd += row[k] * 0.0f;
        const float scale = top / 127.0f + odd, inverse = top > 0 && scale == scale ? 127.0f / top : 0;
        int32_t sum = 0;
        for (long k = 0; k < num_in; k++) {
            const int q = scale == scale ? (int)round_even(row[k] * inverse) : 0;
            panel[k / 4 * 256 + lane * 4 + k % 4] = (char)q;
            sum += q;
        }
        sum *= 128;
        memcpy(behind + 4 * lane, &scale, 4);
        memcpy(behind + 256 + 4 * lane, &sum, 4);
    }
}

/* One output's weights, widened. */
static void read_int8_row(const Matrix *m, long row, float *out) {
    const char *panel = m->data + row / PANEL * panel_bytes(INT8, m->num_in);
    const float scale = int8_scales(m, row / PANEL)[row % PANEL];
    for (long k = 0; k < m->num_in; k++) out[k] = (float)(int8_t)panel[k / 4 * 256 + row % PANEL * 4 + k % 4] * scale;
}

INLINE vi dot4(vi acc, vi x, vu w) {
#if LANES == 16 && defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)x, (__m512i)w);
#elif LANES == 8 && defined(__AVXVNNI__)
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)x, (__m256i)w);
#else
    for (int j = 0; j < 4; j++) {
        const vi u = (vi)(((vu)x >> (8 * j)) & 255), s = ((vi)(w << (24 - 8 * j))) >> 24;
        acc += u * s;
    }
    return acc;
#endif
}

INLINE void int8_tile(const int R, const int V, const uint8_t *x, long ldx, const char *panel, long groups,
                      const float *scales, float *tile) {
    vi acc[6][4];
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) acc[r][v] = (vi){0};
    for (long g = 0; g < groups; g++) {
        vu w[4];
        _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) w[v] = load_u(panel + g * 256 + v * LANES * 4);
        _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {
            int32_t four;
            memcpy(&four, x + BYTES_BEFORE + r * ldx + g * 4, 4);
            const vi b = four - (vi){0};
            _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) acc[r][v] = dot4(acc[r][v], b, w[v]);
        }
    }
    _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) {
        const vf scale = load_f(scales + v * LANES);
        const vi sum = (vi)load_u(scales + PANEL + v * LANES);
        _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {
            float row_scale;
            memcpy(&row_scale, x + r * ldx, 4);
            store_f(tile + r * PANEL + v * LANES,
                    __builtin_convertvector(acc[r][v] - sum, vf) * scale * all_f(row_scale));
        }
    }
}

/* One panel's outputs for M rows of bytes: tile [M, 64]. */
static void int8_panel(const Matrix *m, long panel, const uint8_t *x, long ldx, long M, float *tile) {
    const long groups = (m->num_in + 3) / 4;
    const char *data = m->data + panel * panel_bytes(INT8, m->num_in);
    const float *scales = int8_scales(m, panel);
#if LANES == 16
    enum { TALLEST = 6 };
#else
    enum { TALLEST = 2 };
#endif
    for (int lane = 0; lane < PANEL; lane += 4 * LANES)
        for (long r = 0; r < M;) {
            const long left = M - r;
            float *out = tile + r * PANEL + lane;
#define DO(n) { int8_tile(n, 4, x + r * ldx, ldx, data + lane * 4, groups, scales + lane, out); r += n; }
            if (left >= TALLEST) DO(TALLEST)
            else if (TALLEST > 4 && left >= 3) DO(3)
            else DO(1)
#undef DO
        }
}

#endif
