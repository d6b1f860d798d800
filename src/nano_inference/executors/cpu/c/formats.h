/* Layout of packed weights, and their conversion to float32.
 *
 * A matrix [N, K] (N outputs, K inputs) is divided into panels of 64 outputs; the last is padded with zeros. A panel
 * stores input after input, each with all 64 outputs, so that a panel is read sequentially and a vector holds adjacent
 * outputs. Blocks of 32 or 256 inputs have ggml's scales (types: docs/gguf.md and ggml-common.h; the values equal
 * those of the `gguf` package in float32):
 *
 *   F32   per input 64 floats                     F16   per input 64 half floats
 *   BF16  per two inputs 64 words: the even one in the low half
 *   Q4_0  per 32: 64 half scales d; per 8: 64 words of 8 nibbles q (`nibble_at`)          (q - 8) d
 *   Q4_1  per 32: 64 half d, 64 half m; nibbles as in Q4_0                                q d + m
 *   Q8_0  per 32: 64 half d; per input 64 signed bytes q                                  q d
 *   Q4_K  per 256: 64 half d, 64 half e; per 32: 64 bytes s, 64 bytes t, nibbles          q (d s) - e t
 *   Q6_K  per 256: 64 half d; per 16: 64 signed bytes s, 64 words of 16 two-bit high parts, nibbles   (q - 32)(d s)
 *   INT8  per four inputs 64 x 4 signed bytes q; the scales follow all panels (int8.h)
 *
 * Instead of panels, a matrix of F32, BF16 or F16 may have its rows as they are (`by_rows`): a table of which only
 * single rows are read. In a panel each value of a row has a cache line of its own.
 *
 * Every product q d is exact in float32, except the last one of Q6_K, which is rounded once, as in `gguf`.
 *
 * A byte of a word has input j in the low half and input j + 4 in the high half: the low halves are four adjacent
 * inputs, the high halves the next four, as products with eight-bit activations need them. */
#ifndef NANO_FORMATS_H
#define NANO_FORMATS_H

#include "vec.h"

#define PANEL 64
enum { F32, BF16, F16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, INT8, NUM_FORMATS };

typedef struct {
    int32_t format;
    int32_t num_out;         /* N */
    int32_t num_in;          /* K */
    int32_t column;          /* first column of its outputs in the result */
    int32_t rounds;          /* 1: activations are rounded to eight bits (int8.h) */
    int32_t by_rows;         /* 1: rows instead of panels; only embeddings can read it */
    const char *data;
} Matrix;

typedef struct { int from, to; } Lanes;      /* range of a panel's outputs: all, or a half */

INLINE long block_inputs(int format) {
    switch (format) {
    case BF16: return 2;
    case Q4_0: case Q4_1: case Q8_0: return 32;
    case Q4_K: case Q6_K: return 256;
    case INT8: return 4;
    default: return 1;
    }
}
INLINE long block_bytes(int format) {
    switch (format) {
    case F32: return 256;
    case BF16: return 256;
    case F16: return 128;
    case Q4_0: return 128 + 1024;
    case Q4_1: return 256 + 1024;
    case Q8_0: return 128 + 2048;
    case Q4_K: return 256 + 8 * 1152;
    case Q6_K: return 128 + 16 * 832;
    default: return 256;
    }
}
INLINE long panel_bytes(int format, long num_in) {
    long inputs = block_inputs(format);
    return (num_in + inputs - 1) / inputs * block_bytes(format);
}
INLINE long num_panels(long num_out) { return (num_out + PANEL - 1) / PANEL; }
long nano_packed_bytes(int format, long num_out, long num_in) {
    long bytes = num_panels(num_out) * panel_bytes(format, num_in);
    return format == INT8 ? bytes + num_panels(num_out) * PANEL * 4 : bytes;
}

/* ---- widening, U vectors of outputs at a time ------------------------------------------------------------------- */

/* Index of input j (of eight) among the nibbles of a word, lowest first. */
INLINE int nibble_at(int j) { return j < 4 ? 2 * j : 2 * j - 7; }
INLINE int nibble_of(uint32_t word, int j) { return word >> (4 * nibble_at(j)) & 15; }

/* Input j of each word times 16^raised(j), as a float: this avoids most shifts. Dividing the scale by a power of 16 is
 * exact, so the products are the same. */
#if LANES == 16
#define RAISED 1
#else
#define RAISED 4
#endif
INLINE int raised(int j) { return nibble_at(j) % RAISED; }
INLINE vf raised_nibble(vu words, int j) {
#if LANES == 16
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (vf)_mm512_permutexvar_ps((__m512i)(words >> (4 * nibble_at(j))), table);
#else
    const int up = raised(j), down = nibble_at(j) - up;
    return __builtin_convertvector((vi)((words >> (4 * down)) & (15u << (4 * up))), vf);
#endif
}

/* Set a and b such that the values of block `block` are q a + b, for the vector of outputs that starts at `lane`;
 * return the words of its first eight inputs. */
INLINE const char *nibble_block(const int format, const char *panel, long block, int lane, vf *a, vf *b) {
    if (format == Q4_0) {
        const char *p = panel + block * 1152;
        *a = load_half((const uint16_t *)p + lane);
        *b = *a * all_f(-8.0f);
        return p + 128 + 4 * lane;
    }
    if (format == Q4_1) {
        const char *p = panel + block * 1280;
        *a = load_half((const uint16_t *)p + lane);
        *b = load_half((const uint16_t *)(p + 128) + lane);
        return p + 256 + 4 * lane;
    }
    const char *super = panel + block / 8 * 9472;
    const char *p = super + 256 + block % 8 * 1152;
    *a = load_half((const uint16_t *)super + lane) * load_u8((const uint8_t *)p + lane);
    *b = -(load_half((const uint16_t *)(super + 128) + lane) * load_u8((const uint8_t *)p + 64 + lane));
    return p + 128 + 4 * lane;
}
INLINE int is_plain(const int format) { return format <= F16; }
INLINE int has_nibbles(const int format) { return format == Q4_0 || format == Q4_1 || format == Q4_K; }

/* Prefetch the weights that follow. A panel that is read twice, half of its outputs at a time, is loaded from memory
 * most evenly if each half of the next panel is prefetched during the same half of this one. */
#define FARTHEST 65536
INLINE long fetch_distance(int format, long num_in) {
    const long bytes = panel_bytes(format, num_in);
    return bytes < FARTHEST ? bytes : FARTHEST;
}
INLINE void fetch_ahead(const char *p, long distance) { __builtin_prefetch(p + distance, 0, 2); }

/* Call `take(k, u, w)` for every input k of [start, stop) and each of U vectors of outputs from `lane` on, prefetching
 * `ahead` bytes further; start and stop are block boundaries (or the end). A macro, so that `take` can use the caller's
 * registers. */
#define WIDEN(format, panel, start, stop, lane, U, ahead, take)                                                        \
    do {                                                                                                               \
        if (has_nibbles(format)) {                                                                                     \
            for (long block_ = (start) / 32; block_ < (stop) / 32; block_++) {                                         \
                vf a_[RAISED][4], b_[4];                                                                               \
                const char *p_ = NULL;                                                                                 \
                for (int u = U - 1; u >= 0; u--) {                                                                     \
                    p_ = nibble_block(format, panel, block_, (lane) + u * LANES, &a_[0][u], &b_[u]);                   \
                    for (int up_ = 1; up_ < RAISED; up_++) a_[up_][u] = a_[0][u] * all_f(1.0f / (1 << (4 * up_)));     \
                }                                                                                                      \
                for (int g_ = 0; g_ < 4; g_++) {                                                                       \
                    vu words_[4];                                                                                      \
                    for (int u = 0; u < U; u++) {                                                                      \
                        words_[u] = load_u(p_ + g_ * 256 + u * LANES * 4);                                             \
                        fetch_ahead(p_ + g_ * 256 + u * LANES * 4, ahead);                                             \
                    }                                                                                                  \
                    _Pragma("GCC unroll 8") for (int j_ = 0; j_ < 8; j_++) {                                           \
                        const long k = block_ * 32 + g_ * 8 + j_;                                                      \
                        _Pragma("GCC unroll 4") for (int u = 0; u < U; u++) {                                          \
                            const vf w = vfma(raised_nibble(words_[u], j_), a_[raised(j_)][u], b_[u]);                 \
                            take                                                                                       \
                        }                                                                                              \
                    }                                                                                                  \
                }                                                                                                      \
            }                                                                                                          \
        } else if (format == Q8_0) {                                                                                   \
            for (long block_ = (start) / 32; block_ < (stop) / 32; block_++) {                                         \
                const char *p_ = (panel) + block_ * 2176;                                                              \
                vf a_[4];                                                                                              \
                for (int u = 0; u < U; u++) a_[u] = load_half((const uint16_t *)p_ + (lane) + u * LANES);              \
                p_ += 128 + (lane);                                                                                    \
                _Pragma("GCC unroll 4") for (int j_ = 0; j_ < 32; j_++) {                                              \
                    const long k = block_ * 32 + j_;                                                                   \
                    fetch_ahead(p_ + j_ * 64, ahead);                                                                  \
                    _Pragma("GCC unroll 4") for (int u = 0; u < U; u++) {                                              \
                        const vf w = load_s8((const int8_t *)p_ + j_ * 64 + u * LANES) * a_[u];                        \
                        take                                                                                           \
                    }                                                                                                  \
                }                                                                                                      \
            }                                                                                                          \
        } else if (format == Q6_K) {                                                                                   \
            for (long part_ = (start) / 16; part_ < (stop) / 16; part_++) {                                            \
                const char *super_ = (panel) + part_ / 16 * 13440, *p_ = super_ + 128 + part_ % 16 * 832;              \
                vf a_[4];                                                                                              \
                for (int u = 0; u < U; u++)                                                                            \
                    a_[u] = load_half((const uint16_t *)super_ + (lane) + u * LANES) *                                 \
                            load_s8((const int8_t *)p_ + (lane) + u * LANES);                                          \
                for (int g_ = 0; g_ < 2; g_++) {                                                                       \
                    vu low_[4], high_[4];                                                                              \
                    for (int u = 0; u < U; u++) {                                                                      \
                        low_[u] = load_u(p_ + 320 + g_ * 256 + ((lane) + u * LANES) * 4);                              \
                        high_[u] = load_u(p_ + 64 + ((lane) + u * LANES) * 4) >> (16 * g_);                            \
                    }                                                                                                  \
                    _Pragma("GCC unroll 8") for (int j_ = 0; j_ < 8; j_++) {                                           \
                        const long k = part_ * 16 + g_ * 8 + j_;                                                       \
                        _Pragma("GCC unroll 4") for (int u = 0; u < U; u++) {                                          \
                            const vu q_ = ((low_[u] >> (4 * nibble_at(j_))) & 15) | (((high_[u] >> (2 * j_)) & 3) << 4);\
                            const vf w = __builtin_convertvector((vi)q_ - 32, vf) * a_[u];                             \
                            take                                                                                       \
                        }                                                                                              \
                    }                                                                                                  \
                }                                                                                                      \
            }                                                                                                          \
        } else if (format == BF16) {                                                                                   \
            long k = (start);                                                                                          \
            const char *p_ = (panel) + k / 2 * 256 + (lane) * 4;                                                       \
            for (; k + 1 < (stop); k++, p_ += 256) {                                                                   \
                vu pair_[8];                                                                                           \
                for (int u = 0; u < U; u++) {                                                                          \
                    pair_[u] = load_u(p_ + u * LANES * 4);                                                             \
                    fetch_ahead(p_ + u * LANES * 4, ahead);                                                            \
                }                                                                                                      \
                _Pragma("GCC unroll 8") for (int u = 0; u < U; u++) { const vf w = (vf)(pair_[u] << 16); take }        \
                k++;                                                                                                   \
                _Pragma("GCC unroll 8") for (int u = 0; u < U; u++) { const vf w = (vf)(pair_[u] & 0xffff0000u); take } \
            }                                                                                                          \
            if (k < (stop))                                                                                            \
                for (int u = 0; u < U; u++) { const vf w = (vf)(load_u(p_ + u * LANES * 4) << 16); take }              \
        } else if (format == F16) {                                                                                    \
            for (long k = (start); k < (stop); k++)                                                                    \
                _Pragma("GCC unroll 8") for (int u = 0; u < U; u++) {                                                  \
                    const vf w = load_half((const uint16_t *)((panel) + k * 128) + (lane) + u * LANES);                \
                    take                                                                                               \
                }                                                                                                      \
        } else {                                                                                                       \
            _Pragma("GCC unroll 4") for (long k = (start); k < (stop); k++)                                            \
                _Pragma("GCC unroll 8") for (int u = 0; u < U; u++) {                                                  \
                    fetch_ahead((panel) + k * 256 + ((lane) + u * LANES) * 4, ahead);                                  \
                    const vf w = load_f((const float *)((panel) + k * 256) + (lane) + u * LANES);                      \
                    take                                                                                               \
                }                                                                                                      \
        }                                                                                                              \
    } while (0)

#endif
