/* One token a row from its logits: the likeliest, or the one at which the cumulated probability passes the row's number
 * in [0, 1), tokens in the order of their ids; and its log-probability. The distribution is softmax((x - max x) / t).
 * Blocks of the vocabulary are summed first (in float64 from float32 exponentials), so that only one is gone through. */
#ifndef NANO_SAMPLE_H
#define NANO_SAMPLE_H

#include <math.h>
#include "pool.h"

#define BLOCK 512

static float best_of(const float *x, long n) {
    vf best = all_f(-INFINITY);
    long i = 0;
    for (; i + LANES <= n; i += LANES) best = vmax(load_f(x + i), best);
    float top = best[0];
    for (int u = 1; u < LANES; u++) if (best[u] > top) top = best[u];
    for (; i < n; i++) if (x[i] > top) top = x[i];
    return top;
}

static int32_t place_of_best(const float *x, long n, float top) {
    for (long i = 0; i < n; i++) if (x[i] == top) return (int32_t)i;
    return 0;
}

/* The sum of e^((x - top) / t) over at most BLOCK values. */
static double block_mass(const float *x, long n, float top, float t) {
    float lanes[16] = {0};
    long i = 0;
    for (; i + 16 <= n; i += 16)
        for (int u = 0; u < 16; u += LANES) {
            vf v = load_f(x + i + u) - all_f(top);
            if (t != 1) v = v / all_f(t);
            store_f(lanes + u, load_f(lanes + u) + vexp(v));
        }
    for (int u = 0; i < n; i++, u++) lanes[u] += vexp(all_f((x[i] - top) / t))[0];
    double sum = 0;
    for (int u = 0; u < 16; u++) sum += lanes[u];
    return sum;
}

static long find_token(const float *x, long n, float top, float t, const double *mass, double target) {
    const long num_blocks = (n + BLOCK - 1) / BLOCK;
    double before = 0;
    long block = 0, last = 0, token = -1;
    for (long b = 0; b < num_blocks; b++) if (mass[b] > 0) last = b;
    while (block < last && before + mass[block] <= target) before += mass[block++];
    for (long i = block * BLOCK; i < n && i < (block + 1) * BLOCK; i++) {
        const double p = vexp(all_f((x[i] - top) / t))[0];
        if (p > 0) token = i;
        before += p;
        if (before > target && token >= 0) return token;
    }
    return token;                                        /* rounding hid it: the last that has any probability */
}

typedef struct {
    const float *logits;
    int64_t stride;
    int64_t vocab_size;
    const float *temperature;                /* [B], 0 is greedy */
    const double *uniform;                   /* [B] */
    const int32_t *is_raw;                   /* [B]: the log-probability is that of temperature 1 */
    int32_t *token;                          /* [B] */
    float *logprob;                          /* [B]: not a number where the logits are none */
} Draws;

static void sample_row(const Draws *d, long row, double *mass) {
    const float *x = d->logits + row * d->stride;
    const long n = d->vocab_size, num_blocks = (n + BLOCK - 1) / BLOCK;
    const int is_greedy = d->temperature[row] == 0;
    const float t = is_greedy ? 1.0f : d->temperature[row] > 1e-30f ? d->temperature[row] : 1e-30f;
    const float top = best_of(x, n);
    double total = 0;
    for (long b = 0; b < num_blocks; b++)
        total += mass[b] = block_mass(x + b * BLOCK, n - b * BLOCK < BLOCK ? n - b * BLOCK : BLOCK, top, t);
    if (!(total > 0) || isinf(total)) {
        d->token[row] = 0;
        d->logprob[row] = NAN;
        return;
    }
    const int32_t token = is_greedy ? place_of_best(x, n, top)
                                    : (int32_t)find_token(x, n, top, t, mass, d->uniform[row] * total);
    double divisor = t;
    if (d->is_raw[row] && t != 1) {
        total = 0;
        divisor = 1;
        for (long b = 0; b < num_blocks; b++)
            total += block_mass(x + b * BLOCK, n - b * BLOCK < BLOCK ? n - b * BLOCK : BLOCK, top, 1);
    }
    d->token[row] = token;
    d->logprob[row] = (float)((double)(x[token] - top) / divisor - log(total));
}

#endif
