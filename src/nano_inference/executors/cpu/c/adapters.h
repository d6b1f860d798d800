/* Adapters: out += scale (x A^T) B^T for the rows that have one (arXiv 2106.09685). A row's sums run over the inputs,
 * then over its adapter's own rank, in ascending order, so that its result is the same alone and in any batch. */
#ifndef NANO_ADAPTERS_H
#define NANO_ADAPTERS_H

#include "gemm.h"
#include "pack.h"

#define RANK_UNIT 16                         /* A's columns are padded to a multiple of it */
#define TALL 4                               /* rows of a tile of x A^T */

typedef struct {
    int32_t rank;                            /* 0: the matrix has no adapter */
    int32_t column;                          /* of x A^T in a row of `Step.low` */
    int32_t format;                          /* F32 or BF16, of both */
    float scale;
    const char *a;                           /* [num_in, rank padded]: an input's values for all ranks are adjacent */
    const char *b;                           /* panels [num_out, rank], as in formats.h */
} LowRank;

INLINE long padded_rank(long rank) { return (rank + RANK_UNIT - 1) / RANK_UNIT * RANK_UNIT; }

/* low = scale x A^T of R rows, for RANK_UNIT ranks. */
INLINE void shrink_tile(const int format, const int R, const float *x, long ldx, const char *a, long width, long num_in,
                        float scale, float *low, long ldl) {
    enum { VECTORS = RANK_UNIT / LANES };
    vf acc[TALL][VECTORS];
    _Pragma("GCC unroll 4") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++) acc[r][v] = all_f(0);
    for (long k = 0; k < num_in; k++) {
        vf w[VECTORS];
        _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++)
            w[v] = format == F32 ? load_f((const float *)a + k * width + v * LANES)
                                 : load_bf16((const uint16_t *)a + k * width + v * LANES);
        _Pragma("GCC unroll 4") for (int r = 0; r < R; r++)
            _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++)
                acc[r][v] = vfma(all_f(x[r * ldx + k]), w[v], acc[r][v]);
    }
    _Pragma("GCC unroll 4") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++)
            store_f(low + r * ldl + v * LANES, acc[r][v] * all_f(scale));
}

INLINE void shrink_of(const int format, const LowRank *l, const float *x, long ldx, long rows, long num_in, float *low,
                      long ldl) {
    const long width = padded_rank(l->rank), bytes = format == F32 ? 4 : 2;
    for (long r = 0; r < rows; r += TALL)
        for (long rank = 0; rank < width; rank += RANK_UNIT) {
            const char *a = l->a + rank * bytes;
            const float *from = x + r * ldx;
            float *to = low + r * ldl + l->column + rank;
            switch (rows - r) {
            case 1: shrink_tile(format, 1, from, ldx, a, width, num_in, l->scale, to, ldl); break;
            case 2: shrink_tile(format, 2, from, ldx, a, width, num_in, l->scale, to, ldl); break;
            case 3: shrink_tile(format, 3, from, ldx, a, width, num_in, l->scale, to, ldl); break;
            default: shrink_tile(format, 4, from, ldx, a, width, num_in, l->scale, to, ldl);
            }
        }
}

/* Compute x A^T of rows of one adapter. */
static void shrink(const LowRank *l, const float *x, long ldx, long rows, long num_in, float *low, long ldl) {
    if (l->format == F32) shrink_of(F32, l, x, ldx, rows, num_in, low, ldl);
    else shrink_of(BF16, l, x, ldx, rows, num_in, low, ldl);
}

/* Pack A [rank, num_in] and B [num_out, rank] of the plain format `source`, F32 or BF16; float32 values are cut off if
 * `format` is BF16. The packed memory must be zero before, for the padding. */
void nano_pack_low(int source, int format, const void *a, const void *b, int64_t rank, int64_t num_in, int64_t num_out,
                   char *packed_a, char *packed_b) {
    const long width = padded_rank(rank), cut = source == F32 && format == BF16;     /* the upper half of a float */
    for (long start = 0; start < num_in; start += 16)
        for (long r = 0; r < rank; r++)
            for (long k = start; k < start + 16 && k < num_in; k++) {
                if (format == F32) ((uint32_t *)packed_a)[k * width + r] = ((const uint32_t *)a)[r * num_in + k];
                else ((uint16_t *)packed_a)[k * width + r] = ((const uint16_t *)a)[((r * num_in + k) << cut) + cut];
            }
    if (cut) nano_pack_short(b, 0, num_out, rank, packed_b);
    else nano_pack(format, b, NULL, 0, num_out, rank, packed_b);
}

#endif
