/* Operations with a recurrent state of each sequence: a causal convolution and the gated delta rule (models/ops.py).
 *
 * A row of a step starts from the state in one slot and leaves states in others: at the end of each of its parts. Tokens
 * are computed one after the other in float32, and no sum depends on parts, rows or threads: a token has the same bits
 * in any step. The first pass over a state reads one slot and writes another, so that a fork copies nothing. */
#ifndef NANO_DELTA_H
#define NANO_DELTA_H
#include "rows.h"

typedef struct {
    float *slots;                        /* [slot, slot_floats] */
    int64_t slot_floats, num_rows;
    const int32_t *row;                  /* [T]: each token's row */
    const int32_t *begin;                /* [R]: each row's first token */
    const int32_t *source;               /* [R]: the slot of the state before it; -1: zeros */
    const int32_t *first;                /* [R + 1]: each row's first part */
    const int32_t *end, *slot;           /* [P]: the token after each part, and the slot of the state there */
} States;

INLINE float *slot_at(const States *s, long slot, long state) { return s->slots + slot * s->slot_floats + state; }

#define MOST_TAPS 64

/* out = silu(sum of w[i] x[t - taps + 1 + i]) for one token; w is [taps, channels], a state [taps - 1, channels]. */
static void convolve_row(const States *s, long state, const float *w, long taps, const float *x, long ldx, long t,
                         long channels, float *out) {
    const long row = s->row[t], before = t - s->begin[row];
    const float *in[MOST_TAPS], *past = s->source[row] < 0 ? NULL : slot_at(s, s->source[row], state);
    long zeros = 0;
    for (long i = 0; i < taps; i++) {
        const long back = taps - 1 - i;
        if (back <= before) in[i] = x + (t - back) * ldx;
        else if (past) in[i] = past + (i + before) * channels;
        else zeros = i + 1;
    }
    long c = 0;
    for (; c + LANES <= channels; c += LANES) {
        vf sum = all_f(0);
        for (long i = zeros; i < taps; i++) sum = vfma(load_f(w + i * channels + c), load_f(in[i] + c), sum);
        store_f(out + c, activate(SILU, sum));
    }
    for (; c < channels; c++) {
        vf sum = all_f(0);
        for (long i = zeros; i < taps; i++) sum = vfma(all_f(w[i * channels + c]), all_f(in[i][c]), sum);
        out[c] = activate(SILU, sum)[0];
    }
}

/* The last taps - 1 inputs at the end of one part of a row. */
static void keep_inputs(const States *s, long row, long part, long state, long taps, const float *x, long ldx,
                        long channels) {
    const float *past = s->source[row] < 0 ? NULL : slot_at(s, s->source[row], state);
    const long count = s->end[part] - s->begin[row];
    float *to = slot_at(s, s->slot[part], state);
    for (long j = 0; j + 1 < taps; j++, to += channels) {
        const long token = count - (taps - 1) + j;                    /* of the row; below 0: before it */
        if (token >= 0) memcpy(to, x + (s->begin[row] + token) * ldx, 4 * (size_t)channels);
        else if (past) memmove(to, past + (count + j) * channels, 4 * (size_t)channels);
        else memset(to, 0, 4 * (size_t)channels);
    }
}

/* Those of all parts; the one that overwrites the row's source is the last. */
static void keep_row_inputs(const States *s, long row, long state, long taps, const float *x, long ldx, long channels) {
    for (int is_source = 0; is_source < 2; is_source++)
        for (long p = s->first[row]; p < s->first[row + 1]; p++)
            if ((s->slot[p] == s->source[row]) == is_source) keep_inputs(s, row, p, state, taps, x, ldx, channels);
}

INLINE float inverse_length(const float *x, long n) { return 1.0f / sqrtf(sum_of_squares(x, n) + 1e-6f); }

/* Normalise queries and keys of one token (heads of x); turn a into exp(g), b into beta. */
static void prepare_delta(float *x, long num_keys, long dk, float *a, float *b, const float *a_log,
                          const float *dt_bias, long num_values) {
    const float scale = 1.0f / sqrtf((float)dk);
    for (long h = 0; h < 2 * num_keys; h++, x += dk) {
        const float factor = inverse_length(x, dk) * (h < num_keys ? scale : 1.0f);
        for (long i = 0; i < dk; i++) x[i] *= factor;
    }
    for (long h = 0; h < num_values; h++) {
        const float z = a[h] + dt_bias[h], soft = z > 20 ? z : log1pf(expf(z));
        a[h] = expf(-expf(a_log[h]) * soft);
        b[h] = sigmoid(b[h]);
    }
}

/* Columns of a head's state that are adjacent in memory, [dk, COLUMNS]: both passes over them hit the nearest cache. */
#define COLUMNS 32
#define VECTORS (COLUMNS / LANES)

/* One token: d = beta (v - decay Sᵀk); S = decay S + k dᵀ; out = Sᵀq. */
INLINE void delta_token(const float *from, float *to, const float *q, const float *k, const float *v, float decay,
                        float beta, float *out, long dk) {
    vf even[VECTORS], odd[VECTORS], d[VECTORS];
    for (int u = 0; u < VECTORS; u++) even[u] = odd[u] = all_f(0);
    long i = 0;
    for (; i + 2 <= dk; i += 2)
        for (int u = 0; u < VECTORS; u++) {
            even[u] = vfma(load_f(from + i * COLUMNS + u * LANES), all_f(k[i]), even[u]);
            odd[u] = vfma(load_f(from + (i + 1) * COLUMNS + u * LANES), all_f(k[i + 1]), odd[u]);
        }
    for (int u = 0; i < dk && u < VECTORS; u++)
        even[u] = vfma(load_f(from + i * COLUMNS + u * LANES), all_f(k[i]), even[u]);
    for (int u = 0; u < VECTORS; u++) {
        d[u] = (load_f(v + u * LANES) - all_f(decay) * (even[u] + odd[u])) * all_f(beta);
        even[u] = all_f(0);
    }
    for (i = 0; i < dk; i++)
        for (int u = 0; u < VECTORS; u++) {
            const long at = i * COLUMNS + u * LANES;
            const vf next = vfma(all_f(k[i]), d[u], all_f(decay) * load_f(from + at));
            store_f(to + at, next);
            even[u] = vfma(next, all_f(q[i]), even[u]);
        }
    for (int u = 0; u < VECTORS; u++) store_f(out + u * LANES, even[u]);
}

/* The same for the last columns of a head: n of them. */
static void delta_token_last(const float *from, float *to, const float *q, const float *k, const float *v, float decay,
                             float beta, float *out, long dk, long n) {
    float m[COLUMNS] = {0}, o[COLUMNS] = {0}, d[COLUMNS];
    for (long i = 0; i < dk; i++)
        for (long c = 0; c < n; c++) m[c] += from[i * n + c] * k[i];
    for (long c = 0; c < n; c++) d[c] = (v[c] - decay * m[c]) * beta;
    for (long i = 0; i < dk; i++)
        for (long c = 0; c < n; c++) {
            to[i * n + c] = decay * from[i * n + c] + k[i] * d[c];
            o[c] += to[i * n + c] * q[i];
        }
    memcpy(out, o, 4 * (size_t)n);
}

/* Some columns of one head, of all tokens: queries, keys and values are columns of rows of x, decay and beta numbers of
 * rows of y. */
typedef struct { const float *q, *k, *v, *decay, *beta; float *out; long ldx, ldy, ldo, dk, columns; } Delta;

static void delta_row(const States *s, long row, long state, const Delta *d) {
    const size_t bytes = 4 * (size_t)(d->dk * d->columns);
    const float *from = s->source[row] < 0 ? NULL : slot_at(s, s->source[row], state);
    long t = s->begin[row];
    for (long p = s->first[row]; p < s->first[row + 1]; p++) {
        float *to = slot_at(s, s->slot[p], state);
        if (!from) from = memset(to, 0, bytes);
        if (t == s->end[p] && from != to) memcpy(to, from, bytes);
        for (; t < s->end[p]; t++, from = to) {
            const float *q = d->q + t * d->ldx, *k = d->k + t * d->ldx, *v = d->v + t * d->ldx;
            const float decay = d->decay[t * d->ldy], beta = d->beta[t * d->ldy];
            float *out = d->out + t * d->ldo;
            if (d->columns == COLUMNS) delta_token(from, to, q, k, v, decay, beta, out, d->dk);
            else delta_token_last(from, to, q, k, v, decay, beta, out, d->dk, d->columns);
        }
        from = to;
    }
}

#endif
