/* out[m, n] = sum over k of x[m, k] w[n, k], k ascending, one fused multiply-add in float32 per step.
 *
 * Up to DIRECT rows, weights are widened in registers; for more rows, a panel is widened into the thread's scratch
 * memory, unless it is float32, and multiplied in register tiles of ROWS x WIDE outputs. Both add the same numbers in
 * the same order, so a row's result has the same bits for any number of rows. */
#ifndef NANO_GEMM_H
#define NANO_GEMM_H

#include "formats.h"
#include "pool.h"

#define VECS 4                               /* vectors of outputs of the direct product */
#if LANES == 16
#define DIRECT 10
#define NARROW 4                             /* most rows for which the direct product uses VECS vectors */
#define ROWS 12
#define WIDE 32
#define DEPTH 1024                           /* inputs widened at a time, a multiple of every block: with as much of 64
                                                rows they stay in the second-level cache */
#else
#define DIRECT 4
#define NARROW 3
#define ROWS 6
#define WIDE (2 * LANES)
#define DEPTH 512
#endif
#define TILE_FLOATS (96 * 1024)              /* floats of x read at a time by a job: they fit the second-level cache */
#define WIDEN_AHEAD 8192                     /* prefetch distance in bytes while weights are widened */
#define LINE 16                              /* floats of a cache line */

/* ---- few rows --------------------------------------------------------------------------------------------------- */

INLINE void direct_slice(const int format, const int M, const int U, const char *panel, const float *x, long ldx,
                         long K, int lane, float *tile) {
    vf acc[DIRECT][VECS];
    for (int m = 0; m < M; m++)
        for (int u = 0; u < U; u++) acc[m][u] = all_f(0);
    const long ahead = fetch_distance(format, K);
    WIDEN(format, panel, 0, K, lane, U, ahead, {
        _Pragma("GCC unroll 16") for (int m = 0; m < M; m++) acc[m][u] = vfma(all_f(x[m * ldx + k]), w, acc[m][u]);
    });
    for (int m = 0; m < M; m++)
        for (int u = 0; u < U; u++) store_f(tile + m * PANEL + lane + u * LANES, acc[m][u]);
}

/* One row, for formats that need few registers: all of a panel's outputs in one pass. */
INLINE void direct_row(const int format, const char *panel, const float *x, long K, float *tile) {
    const long ahead = fetch_distance(format, K);
    vf acc[PANEL / LANES];
    for (int u = 0; u < PANEL / LANES; u++) acc[u] = all_f(0);
    WIDEN(format, panel, 0, K, 0, PANEL / LANES, ahead, { acc[u] = vfma(all_f(x[k]), w, acc[u]); });
    for (int u = 0; u < PANEL / LANES; u++) store_f(tile + u * LANES, acc[u]);
}

INLINE void direct(const int format, const char *panel, Lanes part, const float *x, long ldx, long M, long K,
                   float *tile) {
    if (M == 1 && LANES == 8 && is_plain(format)) { direct_row(format, panel, x, K, tile); return; }
    const int wide = M <= NARROW ? VECS : 2;     /* limited by the number of registers */
    for (int lane = part.from; lane < part.to; lane += wide * LANES) {
        switch (M) {
#define CASE(n, u) case n: direct_slice(format, n, u, panel, x, ldx, K, lane, tile); break;
        CASE(1, VECS) CASE(2, VECS) CASE(3, VECS)
#if DIRECT == 10
        CASE(4, VECS) CASE(5, 2) CASE(6, 2) CASE(7, 2) CASE(8, 2) CASE(9, 2) CASE(10, 2)
#else
        CASE(4, 2)
#endif
#undef CASE
        }
    }
}

/* ---- many rows -------------------------------------------------------------------------------------------------- */

/* Fill wide[s][k - start][WIDE]: inputs [start, stop) of a part's outputs, in strips of WIDE. */
INLINE void widen(const int format, const char *panel, Lanes part, long start, long stop, float *wide) {
    const long depth = stop - start;
    for (int lane = part.from; lane < part.to; lane += WIDE) {
        float *strip = wide + lane * depth;
        if (WIDE / LANES == 2) {
            WIDEN(format, panel, start, stop, lane, 2, WIDEN_AHEAD, {
                store_f(strip + (k - start) * WIDE + u * LANES, w);
            });
        } else {
            WIDEN(format, panel, start, stop, lane, 1, WIDEN_AHEAD, {
                store_f(strip + (k - start) * WIDE + u * LANES, w);
            });
        }
    }
}

/* Multiply `rows` rows with a strip of WIDE outputs, whose inputs follow each other at `stride` floats. Meanwhile fetch
 * one cache line of `next` for each input, at the same stride. */
INLINE void micro(const int rows, const float *x, long ldx, const float *strip, long stride, long depth,
                  const float *next, float *tile, int is_first) {
    vf acc[ROWS][2];
    _Pragma("GCC unroll 16") for (int m = 0; m < rows; m++)
        for (int u = 0; u < 2; u++) acc[m][u] = is_first ? all_f(0) : load_f(tile + m * PANEL + u * LANES);
    for (long k = 0; k < depth; k++) {
        const vf w0 = load_f(strip + k * stride), w1 = load_f(strip + k * stride + LANES);
        __builtin_prefetch(next + k * stride, 0, 2);
        _Pragma("GCC unroll 16") for (int m = 0; m < rows; m++) {
            const vf v = all_f(x[m * ldx + k]);
            acc[m][0] = vfma(v, w0, acc[m][0]);
            acc[m][1] = vfma(v, w1, acc[m][1]);
        }
    }
    _Pragma("GCC unroll 16") for (int m = 0; m < rows; m++)
        for (int u = 0; u < 2; u++) store_f(tile + m * PANEL + u * LANES, acc[m][u]);
}

static void micro_rows(long rows, const float *x, long ldx, const float *strip, long stride, long depth,
                       const float *next, float *tile, int is_first) {
    switch (rows) {
#define CASE(n) case n: micro(n, x, ldx, strip, stride, depth, next, tile, is_first); break;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if ROWS == 12
    CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
    }
}

/* Float32 panels are multiplied where they are: while the first tiles of a strip are computed, each fetches one cache
 * line per input of the strip that follows. */
INLINE void tiled(const int format, const char *panel, Lanes part, const float *x, long ldx, long M, long K,
                  float *tile, float *wide) {
    const int is_wide = format == F32;
    const long lines = is_wide ? (WIDE + LINE - 1) / LINE : 1, stride = is_wide ? PANEL : WIDE;
    const long fewest = (M + ROWS - 1) / ROWS, tiles = fewest < lines ? lines : fewest;
    for (long start = 0; start < K; start += DEPTH) {
        const long stop = start + DEPTH < K ? start + DEPTH : K;
        const float *here = (const float *)panel + start * PANEL, *after = (const float *)panel + stop * PANEL;
        if (!is_wide) widen(format, panel, part, start, stop, wide);
        for (int lane = part.from; lane < part.to; lane += WIDE) {
            const float *strip = is_wide ? here + lane : wide + lane * (stop - start);
            const float *following = lane + WIDE < part.to ? strip + WIDE : after + part.from;
            for (long m = 0, i = 0; i < tiles; i++) {    /* tiles of similar height: a low tile underuses the units */
                const long rows = (M - m + tiles - i - 1) / (tiles - i);
                const float *next = is_wide && i < lines ? following + i * LINE : strip;
                micro_rows(rows, x + m * ldx + start, ldx, strip, stride, stop - start, next,
                           tile + m * PANEL + lane, start == 0);
                m += rows;
            }
        }
    }
}

/* One function per format: in a single function GCC 12 spills registers, which doubles the time of a row. */
#define PRODUCT(f)                                                                                                     \
    static __attribute__((noinline)) void direct_##f(const char *panel, Lanes part, const float *x, long ldx, long M,  \
                                                     long K, float *tile) {                                            \
        direct(f, panel, part, x, ldx, M, K, tile);                                                                    \
    }                                                                                                                  \
    static __attribute__((noinline)) void tiled_##f(const char *panel, Lanes part, const float *x, long ldx, long M,   \
                                                    long K, float *tile, float *wide) {                                \
        tiled(f, panel, part, x, ldx, M, K, tile, wide);                                                               \
    }
PRODUCT(F32) PRODUCT(BF16) PRODUCT(F16) PRODUCT(Q4_0) PRODUCT(Q4_1) PRODUCT(Q8_0) PRODUCT(Q4_K) PRODUCT(Q6_K)
#undef PRODUCT

/* Compute a part of one panel's outputs for M rows: its columns of tile [M, 64]. */
static void panel_product(int format, const char *panel, Lanes part, const float *x, long ldx, long M, long K,
                          float *tile, float *wide) {
#define BOTH(f)                                                                                                        \
    case f:                                                                                                            \
        if (M <= DIRECT) direct_##f(panel, part, x, ldx, M, K, tile);                                                  \
        else tiled_##f(panel, part, x, ldx, M, K, tile, wide);                                                         \
        break;
    switch (format) { BOTH(F32) BOTH(BF16) BOTH(F16) BOTH(Q4_0) BOTH(Q4_1) BOTH(Q8_0) BOTH(Q4_K) BOTH(Q6_K) }
#undef BOTH
}

/* True if half panels can be separate pieces of work for this number of rows. With few rows, reading dominates and a
 * half panel is not contiguous: bfloat16 took an eighth longer. With 16 lanes, eight-bit tiles (int8.h) span a whole
 * panel. */
INLINE int can_halve(const Matrix *m, long M) { return M > DIRECT && (LANES <= 8 || !m->rounds); }

#endif
