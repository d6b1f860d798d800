/* Samples one token per row from its logits, and computes its log-probability: the most probable token (greedy), or the
 * first one at which the cumulative probability, in order of token ids, exceeds the row's number in [0, 1). The
 * distribution is softmax((x - max x) / t). Blocks of the vocabulary are summed first, so that only one is searched.
 *
 * A row has two sums: float32 weights, which determine the token with reproducible bits, and a float64 mass, which
 * normalises log-probabilities accurately. */
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

/* Index of the first maximum. Whole blocks are compared, because a loop with an early exit is not vectorised. */
static int32_t place_of_best(const float *x, long n, float top) {
    for (long begin = 0; begin < n; begin += BLOCK) {
        const long end = begin + BLOCK < n ? begin + BLOCK : n;
        int is_here = 0;
        for (long i = begin; i < end; i++) is_here |= x[i] == top;
        if (!is_here) continue;
        for (long i = begin; i < end; i++) if (x[i] == top) return (int32_t)i;
    }
    return 0;
}

/* Sum of e (1 + (x - top) / t - v) in float64, in an order that does not depend on the vector width. There is no
 * correction if v is so low that e is 0, or is not finite. */
static double corrected_sum(const float *x, const float *v, const float *e, long n, float top, float t) {
    const double coldness = 1.0 / t;
    double lanes[16] = {0};
    long i = 0;
    for (; i + 16 <= n; i += 16)
        for (int u = 0; u < 16; u += DOUBLES) {
            const vd near = widened(v + i + u);
            const vd rest = (widened(x + i + u) - all_d(top)) * all_d(coldness) - near;
            const vd kept = (vd)((near > all_d(-88)) & (vl)rest), weight = widened(e + i + u);
            store_d(lanes + u, load_d(lanes + u) + (weight + weight * kept));
        }
    for (int u = 0; i < n; i++, u++) {
        const double rest = v[i] > -88 ? ((double)x[i] - top) * coldness - v[i] : 0;
        lanes[u] += (double)e[i] + (double)e[i] * rest;
    }
    double sum = 0;
    for (int u = 0; u < 16; u++) sum += lanes[u];
    return sum;
}

/* Two sums of e^((x - top) / t) over at most BLOCK values; `top` is the largest logit except NaN, so no argument is
 * above 0.
 *
 * Returned: float32 exponentials of float32 arguments, added in float32: the weights for sampling. Added to `mass`,
 * unless it is NULL, in float64: the same exponentials e^v, each times 1 + (u - v), where v is the argument rounded to
 * float32 and u is computed in float64. The remaining error is that of `vexp_down`: at most an ulp of a term,
 * unbiased. Without the correction, the rounding of v would be a bias of 5e-7 for a flat row with one peak. */
static double block_mass(const float *x, long n, float top, float t, double *mass) {
    float v[BLOCK], e[BLOCK], lanes[16] = {0};
    long i = 0;
    for (; i + 16 <= n; i += 16)
        for (int u = 0; u < 16; u += LANES) {
            vf below = load_f(x + i + u) - all_f(top);
            if (t != 1) below = below / all_f(t);
            const vf weight = vexp_down(below);
            store_f(v + i + u, below);
            store_f(e + i + u, weight);
            store_f(lanes + u, load_f(lanes + u) + weight);
        }
    for (int u = 0; i < n; i++, u++) {
        v[i] = (x[i] - top) / t;
        lanes[u] += e[i] = vexp_down(all_f(v[i]))[0];
    }
    if (mass) *mass += corrected_sum(x, v, e, n, top, t);
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
    return token;                                        /* not reached due to rounding: last token with a weight */
}

typedef struct {
    const float *logits;
    int64_t stride;
    int64_t vocab_size;
    const float *temperature;                /* [B], 0: greedy */
    const double *uniform;                   /* [B] */
    const int32_t *is_raw;                   /* [B]: 1: log-probability at temperature 1 */
    int32_t *token;                          /* [B] */
    float *logprob;                          /* [B]: NaN if the logits contain NaN or +inf, or are all -inf */
} Draws;

/* A row's largest logit, and the logarithm of the sum of e^((x - best) / t): unbiased, within 2e-7. */
typedef struct {
    const float *logits;
    int64_t stride;
    int64_t vocab_size;
    const float *temperature;                /* [B], 0 counts as 1 */
    float *best;                             /* [B] */
    double *log_mass;                        /* [B]: NaN if the logits contain NaN or +inf, or are all -inf */
} Sums;

static float divisor_of(float temperature) {
    return temperature == 0 ? 1.0f : temperature > 1e-30f ? temperature : 1e-30f;
}

static long block_size(long n, long block) { return n - block * BLOCK < BLOCK ? n - block * BLOCK : BLOCK; }

static double log_of(double mass) { return mass > 0 && !isinf(mass) ? log(mass) : NAN; }

static void sum_row(const Sums *s, long row) {
    const float *x = s->logits + row * s->stride;
    const long n = s->vocab_size;
    const float top = best_of(x, n), t = divisor_of(s->temperature[row]);
    double mass = 0;
    for (long b = 0; b * BLOCK < n; b++) block_mass(x + b * BLOCK, block_size(n, b), top, t, &mass);
    s->best[row] = top;
    s->log_mass[row] = log_of(mass);
}

static void sample_row(const Draws *d, long row, double *weights) {
    const float *x = d->logits + row * d->stride;
    const long n = d->vocab_size, num_blocks = (n + BLOCK - 1) / BLOCK;
    const float top = best_of(x, n), t = divisor_of(d->temperature[row]);
    const int is_untempered = d->is_raw[row] && t != 1;
    double total = 0, mass = 0;
    for (long b = 0; b < num_blocks; b++)
        total += weights[b] = block_mass(x + b * BLOCK, block_size(n, b), top, t, is_untempered ? NULL : &mass);
    if (!(total > 0) || isinf(total)) {
        d->token[row] = 0;
        d->logprob[row] = NAN;
        return;
    }
    const int32_t token = d->temperature[row] == 0 ? place_of_best(x, n, top)
                                    : (int32_t)find_token(x, n, top, t, weights, d->uniform[row] * total);
    double divisor = t;
    if (is_untempered) {
        divisor = 1;
        for (long b = 0; b < num_blocks; b++) block_mass(x + b * BLOCK, block_size(n, b), top, 1, &mass);
    }
    d->token[row] = token;
    d->logprob[row] = (float)(((double)x[token] - top) / divisor - log_of(mass));
}

#endif
