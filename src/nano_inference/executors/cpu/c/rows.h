/* Operations on one token's row: norms, rotations, activations. Sums use 16 lanes and then a tree for any vector width,
 * so a result depends on the row only. */
#ifndef NANO_ROWS_H
#define NANO_ROWS_H

#include <math.h>
#include "vec.h"

INLINE float sum_of_squares(const float *x, long n) {
    float lanes[16] = {0};
    long i = 0;
    for (; i + 16 <= n; i += 16)
        for (int u = 0; u < 16; u += LANES) {
            const vf v = load_f(x + i + u);
            store_f(lanes + u, vfma(v, v, load_f(lanes + u)));
        }
    for (int u = 0; i < n; i++, u++) lanes[u] = vfma(all_f(x[i]), all_f(x[i]), all_f(lanes[u]))[0];
    return sum16(lanes);
}

/* out (+)= x / rms(x) (offset + weight); weight NULL means a factor of 1 (arXiv 1910.07467). */
static void norm_row(const float *x, long n, const float *weight, float offset, float eps, float *out, int add) {
    const float inverse = 1.0f / sqrtf(sum_of_squares(x, n) / (float)n + eps);
    for (long i = 0; i < n; i++) {
        float value = x[i] * inverse;
        if (weight) value *= offset + weight[i];
        out[i] = add ? out[i] + value : value;
    }
}

/* Rotate the first `turning` dimensions of a head; dimension i is paired with i + turning / 2 (GPT-NeoX layout). The
 * first half of `sine` is negated. */
static void rotate_head(float *x, long turning, const float *cosine, const float *sine) {
    const long half = turning / 2;
    for (long i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = vfma(all_f(b), all_f(sine[i]), all_f(a * cosine[i]))[0];
        x[i + half] = vfma(all_f(a), all_f(sine[i + half]), all_f(b * cosine[i + half]))[0];
    }
}

enum { SILU, GELU_TANH, RELU_SQUARED };

INLINE vf activate(int kind, vf x) {
    const vf one = all_f(1.0f);
    if (kind == SILU) return x / (one + vexp(-x));
    if (kind == RELU_SQUARED) { const vf y = vmax(all_f(0), x); return y * y; }
    const vf inner = all_f(0.7978845608028654f) * vfma(all_f(0.044715f) * x * x, x, x);
    return all_f(0.5f) * x * (one + vtanh(inner));
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + vexp(all_f(-x))[0]); }

INLINE void activate_row(const int kind, const float *gate, const float *up, long n, float *out) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf y = activate(kind, load_f(gate + i));
        if (up) y *= load_f(up + i);
        store_f(out + i, y);
    }
    for (; i < n; i++) out[i] = activate(kind, all_f(gate[i]))[0] * (up ? up[i] : 1.0f);
}
/* out = act(gate) up; up NULL means 1. */
static void glu_row(int kind, const float *gate, const float *up, long n, float *out) {
    if (kind == SILU) activate_row(SILU, gate, up, n, out);
    else if (kind == GELU_TANH) activate_row(GELU_TANH, gate, up, n, out);
    else activate_row(RELU_SQUARED, gate, up, n, out);
}

static void softcap_row(float *x, long n, float cap) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) store_f(x + i, vtanh(load_f(x + i) / all_f(cap)) * all_f(cap));
    for (; i < n; i++) x[i] = vtanh(all_f(x[i] / cap))[0] * cap;
}

#endif
