/* Selects the largest values of a row without sorting it: top-k, top-p, min-p and the most probable tokens.
 * Among equal values the lowest ids are selected; -0 equals 0. Rows must not contain NaN. */
#ifndef NANO_SELECT_H
#define NANO_SELECT_H

#include <math.h>
#include <stdlib.h>
#include "vec.h"

/* What is selected: the tokens whose keys are above `key`, and the first `equal` of those that have it. */
typedef struct { uint32_t key; long equal; } Cut;

/* Unsigned integers in the order of the values. */
INLINE uint32_t key_of(float x) {
    uint32_t bits;
    x += 0.0f;                                                             /* -0 becomes 0 */
    memcpy(&bits, &x, 4);
    return bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
}

INLINE int is_selected(uint32_t key, Cut *cut) {
    return key > cut->key || (key == cut->key && cut->equal-- > 0);
}

/* The fewest largest values whose weights reach `share` of all weights; without weights, the `share` largest values.
 * Eleven bits of the keys at a time, sums of weights say in which range of values the last one lies. `found` has room
 * for n ids. */
static Cut select_best(const float *x, const double *weight, long n, double share, int32_t *found) {
    double mass[2048], above = 0, target = share;
    uint32_t prefix = 0;
    long count = n;
    for (int shift = 21, width = 11;; width = shift < 11 ? shift : 11, shift -= width) {
        memset(mass, 0, sizeof mass);
        for (long j = 0; j < count; j++) {
            const long i = shift == 21 ? j : found[j];
            mass[key_of(x[i]) >> shift & ((1u << width) - 1)] += weight ? weight[i] : 1;
        }
        if (shift == 21 && weight) {
            double total = 0;
            for (int b = 0; b < 2048; b++) total += mass[b];
            target = share * total;
        }
        uint32_t b = (1u << width) - 1;
        while (b > 0 && above + mass[b] < target) above += mass[b--];
        prefix = prefix << width | b;
        long kept = 0;
        for (long j = 0; j < count; j++) {
            const int32_t i = shift == 21 ? (int32_t)j : found[j];
            found[kept] = i;
            kept += key_of(x[i]) >> shift == prefix;
        }
        count = kept;
        if (shift == 0) break;
    }
    long equal = 0;
    while (equal < count && above < target) above += weight ? weight[found[equal]] : 1, equal++;
    return (Cut){prefix, equal};
}

/* e^x in float64 for x not above 0, within two ulps: 2^n times the Taylor series of e^r, |r| <= ln 2 / 2. */
INLINE vd vexp_double(vd x) {
    const vd magic = all_d(6755399441055744.0);
    const vl tiny = x < all_d(-708.0);
    x = (vd)((~tiny & (vl)x) | (tiny & (vl)all_d(-708.0)));
    const vd shifted = x * all_d(1.44269504088896341) + magic, n = shifted - magic;
    const vd r = x - n * all_d(6.93147180369123816490e-01) - n * all_d(1.90821492927058770002e-10);
    static const double factorials[13] = {1, 1, 2, 6, 24, 120, 720, 5040, 40320, 362880, 3628800, 39916800, 479001600};
    vd y = all_d(1.0 / 6227020800);
    for (int i = 12; i >= 0; i--) y = y * r + all_d(1.0 / factorials[i]);
    return (vd)(((vl)y + (((vl)shifted - (vl)magic) << 52)) & ~tiny);
}

/* weight[i] = e^(v[i] - best) */
static void weigh(const float *v, long n, float best, double *weight) {
    long i = 0;
    for (; i + DOUBLES <= n; i += DOUBLES) store_d(weight + i, vexp_double(widened(v + i) - all_d(best)));
    for (; i < n; i++) weight[i] = vexp_double(all_d((double)v[i] - best))[0];
}

/* Set to -inf what top-k, then top-p of the rest, then min-p exclude. `v` is divided by the temperature. */
static void truncate_row(float *v, long n, long top_k, double top_p, double min_p, double *weight, int32_t *found) {
    float best = -INFINITY;
    for (long i = 0; i < n; i++) best = v[i] > best ? v[i] : best;
    if (top_k > 0 && top_k < n) {
        Cut cut = select_best(v, NULL, n, (double)top_k, found);
        for (long i = 0; i < n; i++) if (!is_selected(key_of(v[i]), &cut)) v[i] = -INFINITY;
    }
    if (top_p < 1 || min_p > 0) weigh(v, n, best, weight);
    if (top_p < 1) {
        Cut cut = select_best(v, weight, n, top_p, found);
        for (long i = 0; i < n; i++) if (!is_selected(key_of(v[i]), &cut)) v[i] = -INFINITY;
    }
    if (min_p > 0) for (long i = 0; i < n; i++) if (weight[i] < min_p) v[i] = -INFINITY;
}

typedef struct { float x; int32_t id; } Place;

static int by_rank(const void *a_, const void *b_) {
    const Place *a = a_, *b = b_;
    if (a->x != b->x) return a->x > b->x ? -1 : 1;
    return a->id < b->id ? -1 : 1;
}

/* The `count` largest values, at most n, in order. `place` has room for `count`, `found` for n ids. */
static void best_places(const float *x, long n, long count, int32_t *found, Place *place) {
    Cut cut = select_best(x, NULL, n, (double)count, found);
    long k = 0;
    for (long i = 0; i < n && k < count; i++)
        if (is_selected(key_of(x[i]), &cut)) place[k++] = (Place){x[i], (int32_t)i};
    qsort(place, (size_t)k, sizeof *place, by_rank);
}

#endif
