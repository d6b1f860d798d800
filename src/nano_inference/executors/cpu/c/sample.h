/* Samples one token per row from its logits, and computes its log-probability: the most probable token (greedy), or the
 * first one at which the cumulative probability, in order of token ids, exceeds the row's number in [0, 1). The
 * distribution is softmax((x - max x) / t), where a row's `Special` may adjust and truncate x before. Blocks of the
 * vocabulary are summed first, so that only one is searched.
 *
 * A row has two sums: float32 weights, which determine the token with reproducible bits, and a float64 mass, which
 * normalises log-probabilities accurately. */
#ifndef NANO_SAMPLE_H
#define NANO_SAMPLE_H

#include <math.h>
#include "pool.h"
#include "select.h"

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

enum { RAW, TEMPERED, PROCESSED };           /* log-probabilities of the logits, the adjusted or the truncated ones */

/* What one row wants beyond a temperature and its token's log-probability. */
typedef struct {
    double top_p, min_p;
    float repetition, presence, frequency;
    int32_t top_k, report, wants_raw, wants_kept;
    int32_t num_seen, num_biased, num_named, num_tops;
    int64_t mask_bytes;
    const int32_t *seen, *times;             /* tokens so far, and how often each is in the output */
    const int32_t *biased;
    const float *bias;                       /* -inf excludes a token */
    const uint8_t *mask;                     /* a bit for each allowed id, NULL: all */
    const int32_t *named;
    float *named_logprob;
    int32_t *top_id;                         /* -1 after the last */
    float *top_logprob;
    float raw_logprob;                       /* of the token, under the unmodified logits, if `wants_raw` */
} Special;

typedef struct {
    float *logits;                           /* overwritten with the scaled row if `wants_kept` */
    int64_t stride;
    int64_t vocab_size;
    const float *temperature;                /* [B], 0: greedy */
    const double *uniform;                   /* [B] */
    const int32_t *is_raw;                   /* [B]: 1: log-probability at temperature 1 */
    Special *const *special;                 /* [B], NULL for rows without; or NULL: no row has any */
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

/* Converts logits to log-probabilities. */
typedef struct { float top, t; double log_mass; } Scale;

/* Set `log_mass`; return the sum of the sampling weights, and their sum in each block if `weights` is not NULL. */
static double weights_of(const float *x, long n, Scale *s, double *weights) {
    double total = 0, mass = 0;
    for (long b = 0; b * BLOCK < n; b++) {
        const double weight = block_mass(x + b * BLOCK, block_size(n, b), s->top, s->t, &mass);
        if (weights) weights[b] = weight;
        total += weight;
    }
    s->log_mass = log_of(mass);
    return total;
}

static Scale scale_of(const float *x, long n, float t) {
    Scale scale = {best_of(x, n), t, 0};
    weights_of(x, n, &scale, NULL);
    return scale;
}

static float logprob_of(Scale s, float x) { return (float)(((double)x - s.top) / s.t - s.log_mass); }

/* -9999 instead of -inf: JSON has no infinity. */
static float floored(float logprob) { return logprob == -INFINITY ? -9999.0f : logprob; }

static void sum_row(const Sums *s, long row) {
    const Scale scale = scale_of(s->logits + row * s->stride, s->vocab_size, divisor_of(s->temperature[row]));
    s->best[row] = scale.top;
    s->log_mass[row] = scale.log_mass;
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

/* Apply penalties, biases and the mask, in this order. */
static void adjust_row(const Special *s, float *x, long n) {
    for (long j = 0; j < s->num_seen; j++) {
        float *one = x + s->seen[j];
        if (s->repetition != 1) *one = *one > 0 ? *one / s->repetition : *one * s->repetition;
        if (s->times[j]) *one -= s->presence + s->frequency * (float)s->times[j];
    }
    for (long j = 0; j < s->num_biased; j++) {
        float *one = x + s->biased[j];
        *one = s->bias[j] == -INFINITY ? -INFINITY : *one + s->bias[j];
    }
    if (!s->mask) return;
    for (long i = 0; i < n; i++)
        if (i >= 8 * s->mask_bytes || !(s->mask[i >> 3] >> (i & 7) & 1)) x[i] = -INFINITY;
}

/* Write the log-probabilities of the named and of the most probable tokens. */
static void describe(const Special *s, const float *x, long n, Scale scale, int32_t *found, Place *place) {
    for (long j = 0; j < s->num_named; j++) s->named_logprob[j] = floored(logprob_of(scale, x[s->named[j]]));
    long count = s->num_tops < n ? s->num_tops : n, k = 0;
    if (count && isfinite(scale.log_mass)) best_places(x, n, count, found, place);
    else count = 0;
    for (; k < count && logprob_of(scale, place[k].x) > -INFINITY; k++) {
        s->top_id[k] = place[k].id;
        s->top_logprob[k] = logprob_of(scale, place[k].x);
    }
    if (k < s->num_tops) s->top_id[k] = -1;
}

static size_t special_bytes(long n) { return 24 * (size_t)(n + 16); }

/* Sample a row with options; `room` has `special_bytes`. */
static void sample_special(const Draws *d, long row, Special *s, double *weights, double *room) {
    float *own = d->logits + row * d->stride;
    const long n = d->vocab_size, size = (n + 15) / 16 * 16;
    double *weight = room;
    float *x = (float *)(room + size), *v = x + size;
    int32_t *found = (int32_t *)(v + size);
    Place *place = (Place *)weight;
    const float temperature = d->temperature[row], t = divisor_of(temperature);
    memcpy(x, own, 4 * (size_t)n);
    adjust_row(s, x, n);
    Scale raw = {0, 1, 0}, scale = {best_of(x, n), t, 0};
    const int has_raw = s->report == RAW || s->wants_raw;
    if (has_raw) raw = scale_of(own, n, 1);
    if (s->report == RAW) describe(s, own, n, raw, found, place);
    double total = weights_of(x, n, &scale, weights);
    if (s->report == TEMPERED) describe(s, x, n, scale, found, place);
    const Scale tempered = scale;
    const int is_possible = total > 0 && !isinf(total);
    const int is_cut = temperature != 0 && ((s->top_k > 0 && s->top_k < n) || s->top_p < 1 || s->min_p > 0);
    if (is_cut || s->wants_kept) {
        const float shift = t == 1 || !isfinite(scale.top) ? 0 : scale.top;
        for (long i = 0; i < n; i++) v[i] = (x[i] - shift) / t;
    }
    if (is_cut && is_possible) {
        truncate_row(v, n, s->top_k, s->top_p, s->min_p, weight, found);
        for (long i = 0; i < n; i++) x[i] = v[i] == -INFINITY ? -INFINITY : x[i];
        total = weights_of(x, n, &scale, weights);
    }
    if (s->report == PROCESSED) describe(s, x, n, scale, found, place);
    long token = 0;
    if (is_possible && temperature == 0) token = place_of_best(x, n, scale.top);
    else if (is_possible) token = find_token(x, n, scale.top, t, weights, d->uniform[row] * total);
    s->raw_logprob = has_raw ? floored(logprob_of(raw, own[token])) : 0;
    const float adjusted = logprob_of(s->report == TEMPERED ? tempered : scale, x[token]);
    d->token[row] = (int32_t)token;
    d->logprob[row] = !is_possible || isnan(s->raw_logprob) ? NAN : s->report == RAW ? s->raw_logprob : adjusted;
    if (s->wants_kept) memcpy(own, v, 4 * (size_t)n);
}

#endif
