/* Converts rows as files have them to panels, and back. `rows[n]` is the source row of output n (NULL: n). A source row
 * has plain values (float, bfloat16, half) or ggml blocks (layouts: ggml-common.h). */
#ifndef NANO_PACK_H
#define NANO_PACK_H

#include "formats.h"

INLINE void put16(char *base, int lane, uint16_t value) { memcpy(base + 2 * lane, &value, 2); }
INLINE uint16_t get16(const char *base, long index) { uint16_t v; memcpy(&v, base + 2 * index, 2); return v; }

/* Pack eight values below 16 into a word. */
INLINE uint32_t word_of(const uint8_t *q) {
    uint32_t word = 0;
    for (int j = 0; j < 8; j++) word |= (uint32_t)(q[j] & 15) << (4 * nibble_at(j));
    return word;
}
INLINE void put_words(char *base, int lane, const uint8_t *q, int num_words) {
    for (int g = 0; g < num_words; g++) {
        uint32_t word = word_of(q + 8 * g);
        memcpy(base + g * 256 + 4 * lane, &word, 4);
    }
}
/* Convert ggml's 16 bytes of 32 nibbles, with the first 16 values in the low halves: eight bytes become two words. */
INLINE void put_halves(char *base, int lane, const uint8_t *bytes) {
    for (int g = 0; g < 2; g++) {
        uint32_t first, second;
        memcpy(&first, bytes + 8 * g, 4);
        memcpy(&second, bytes + 8 * g + 4, 4);
        const uint32_t low = (first & 0x0f0f0f0fu) | (second & 0x0f0f0f0fu) << 4;
        const uint32_t high = (first >> 4 & 0x0f0f0f0fu) | (second & 0xf0f0f0f0u);
        memcpy(base + g * 256 + 4 * lane, &low, 4);
        memcpy(base + (g + 2) * 256 + 4 * lane, &high, 4);
    }
}

static long source_row_bytes(int format, long num_in) {
    switch (format) {
    case F32: return 4 * num_in;
    case BF16: case F16: return 2 * num_in;
    case Q4_0: return num_in / 32 * 18;
    case Q4_1: return num_in / 32 * 20;
    case Q8_0: return num_in / 32 * 34;
    case Q4_K: return num_in / 256 * 144;
    case Q6_K: return num_in / 256 * 210;
    default: return -1;
    }
}

static void pack_q4_k(const uint8_t *block, char *super, int lane) {
    uint8_t q[32];
    put16(super, lane, get16((const char *)block, 0));
    put16(super + 128, lane, get16((const char *)block, 1));
    for (int i = 0; i < 8; i++) {
        const uint8_t *s = block + 4;
        char *p = super + 256 + i * 1152;
        p[lane] = (char)(i < 4 ? s[i] & 63 : (s[i + 4] & 15) | (s[i - 4] >> 6 << 4));
        p[64 + lane] = (char)(i < 4 ? s[i + 4] & 63 : (s[i + 4] >> 4) | (s[i] >> 6 << 4));
        const uint8_t *bytes = block + 16 + i / 2 * 32;
        for (int j = 0; j < 32; j++) q[j] = i % 2 ? bytes[j] >> 4 : bytes[j] & 15;
        put_words(p + 128, lane, q, 4);
    }
}

static void pack_q6_k(const uint8_t *block, char *super, int lane) {
    uint8_t q[256];
    for (int half = 0; half < 2; half++) {
        const uint8_t *low = block + half * 64, *high = block + 128 + half * 32;
        for (int j = 0; j < 32; j++)
            for (int part = 0; part < 4; part++) {
                uint8_t nib = part < 2 ? low[j + part * 32] & 15 : low[j + (part - 2) * 32] >> 4;
                q[half * 128 + part * 32 + j] = nib | ((high[j] >> (2 * part)) & 3) << 4;
            }
    }
    put16(super, lane, get16((const char *)block + 208, 0));
    for (int part = 0; part < 16; part++) {
        char *p = super + 128 + part * 832;
        uint32_t high = 0;
        p[lane] = (char)block[192 + part];
        for (int j = 0; j < 16; j++) high |= (uint32_t)(q[part * 16 + j] >> 4) << (2 * j);
        memcpy(p + 64 + 4 * lane, &high, 4);
        put_words(p + 320, lane, q + part * 16, 2);
    }
}

static void pack_row(int format, const uint8_t *row, long num_in, char *panel, int lane) {
    if (format == Q8_0)
        for (long b = 0; b < num_in / 32; b++, row += 34) {
            put16(panel + b * 2176, lane, get16((const char *)row, 0));
            for (int j = 0; j < 32; j++) panel[b * 2176 + 128 + j * 64 + lane] = (char)row[2 + j];
        }
    else if (format == Q4_0 || format == Q4_1)
        for (long b = 0; b < num_in / 32; b++) {
            const int scales = format == Q4_1 ? 2 : 1;
            char *p = panel + b * block_bytes(format);
            for (int i = 0; i < scales; i++, row += 2) put16(p + 128 * i, lane, get16((const char *)row, 0));
            put_halves(p + 128 * scales, lane, row);
            row += 16;
        }
    else if (format == Q4_K)
        for (long b = 0; b < num_in / 256; b++) pack_q4_k(row + b * 144, panel + b * 9472, lane);
    else if (format == Q6_K)
        for (long b = 0; b < num_in / 256; b++) pack_q6_k(row + b * 210, panel + b * 13440, lane);
}

/* Pack plain values: `count` rows to the lanes of one panel from `lane` on, a few inputs of all rows at a time, so that
 * written lines stay in the first-level cache. */
#define PACK_PLAIN(type, from_k, to_k, place)                                                                          \
    for (long start = (from_k); start < (to_k); start += 16)                                                           \
        for (long n = 0; n < count; n++) {                                                                             \
            const type *from = (const type *)(rows + n * row_bytes);                                                   \
            for (long k = start; k < start + 16 && k < (to_k); k++) {                                                  \
                const long at = (place);                                                                               \
                memcpy(panel + at, from + k, sizeof(type));                                                            \
            }                                                                                                          \
        }

#define TURN 8
typedef uint32_t words __attribute__((vector_size(4 * TURN)));

/* Store a tile's words with non-temporal stores if available: packed weights exceed the caches, and reading lines
 * before overwriting them would take a third of the time. Call `flush_stores` afterwards. */
#if defined(__AVX__)
INLINE void put_words_past(char *at, words v) {
    if ((uintptr_t)at % sizeof v) memcpy(at, &v, sizeof v);
    else _mm256_stream_si256((__m256i *)at, (__m256i)v);
}
static void flush_stores(void) { _mm_sfence(); }
#else
INLINE void put_words_past(char *at, words v) { memcpy(at, &v, sizeof v); }
static void flush_stores(void) {}
#endif

/* Transpose eight words of each of eight rows: word w of all rows goes to panel + 256 w. */
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define TURNS_TILES 1
#define SHUFFLE __builtin_shufflevector
INLINE void put_turned(const words *r, char *panel) {
    words a[TURN], b[TURN];
    for (int i = 0; i < TURN; i += 2) {
        a[i] = SHUFFLE(r[i], r[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        a[i + 1] = SHUFFLE(r[i], r[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < TURN; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + j] = SHUFFLE(a[i + j], a[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            b[i + j + 2] = SHUFFLE(a[i + j], a[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int j = 0; j < 4; j++) {
        const words low = SHUFFLE(b[j], b[j + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        const words high = SHUFFLE(b[j], b[j + 4], 4, 5, 6, 7, 12, 13, 14, 15);
        put_words_past(panel + 256 * j, low);
        put_words_past(panel + 256 * (j + 4), high);
    }
}

/* The upper halves of sixteen floats as eight words. */
INLINE words halves_of(const uint8_t *from) {
    words a, b;
    memcpy(&a, from, sizeof a);
    memcpy(&b, from + sizeof a, sizeof b);
    return SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14) >> 16 | (SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15) & 0xffff0000u);
}
#endif
#endif

/* Number of rows that form whole tiles; all rows if there is no whole tile. */
INLINE long whole_tiles(long rows) { return rows > TURN ? rows - rows % TURN : rows; }

/* Pack words of whole tiles; a word of `is_halved` rows is the upper halves of two floats. Returns the number of words
 * packed per row: 0 if the rows do not form whole tiles. */
static long pack_tiles(const uint8_t *rows, long row_bytes, long count, long num_words, int is_halved, char *panel,
                       long lane) {
#ifdef TURNS_TILES
    if (count % TURN) return 0;
    const long done = num_words / TURN * TURN;
    for (long word = 0; word < done; word += TURN)
        for (long n = 0; n < count; n += TURN) {
            words tile[TURN];
            for (long i = 0; i < TURN; i++) {
                const uint8_t *from = rows + (n + i) * row_bytes + word * (is_halved ? 8 : 4);
                if (is_halved) tile[i] = halves_of(from);
                else memcpy(&tile[i], from, sizeof tile[i]);
            }
            put_turned(tile, panel + 256 * word + 4 * (lane + n));
        }
    return done;
#else
    (void)rows; (void)row_bytes; (void)count; (void)num_words; (void)is_halved; (void)panel; (void)lane;
    return 0;
#endif
}

static void pack_plain(int format, const uint8_t *rows, long count, long num_in, char *panel, long lane) {
    const long row_bytes = source_row_bytes(format, num_in);
    if (format == F32) {
        const long done = pack_tiles(rows, row_bytes, count, num_in, 0, panel, lane);
        PACK_PLAIN(uint32_t, done, num_in, k * 256 + 4 * (lane + n))
    } else if (format == BF16) {
        const long done = 2 * pack_tiles(rows, row_bytes, count, num_in / 2, 0, panel, lane);
        PACK_PLAIN(uint16_t, done, num_in, k / 2 * 256 + 4 * (lane + n) + k % 2 * 2)
    } else {
        PACK_PLAIN(uint16_t, 0, num_in, k * 128 + 2 * (lane + n))
    }
}

/* Truncate float32 values to bfloat16. */
static void pack_short(const uint8_t *rows, long count, long num_in, char *panel, long lane) {
    const long row_bytes = 4 * num_in, done = 2 * pack_tiles(rows, row_bytes, count, num_in / 2, 1, panel, lane);
    for (long n = 0; n < count; n++)
        for (long k = done; k < num_in; k++)
            memcpy(panel + k / 2 * 256 + 4 * (lane + n) + k % 2 * 2, rows + n * row_bytes + 4 * k + 2, 2);
}

/* Pack float32 outputs [first, first + count), whose values are exact in bfloat16, as bfloat16. */
void nano_pack_short(const void *source, long first, long count, long num_in, char *packed) {
    const long bytes = panel_bytes(BF16, num_in);
    for (long n = first, step; n < first + count; n += step) {
        const long in_panel = PANEL - n % PANEL, left = first + count - n;
        step = whole_tiles(in_panel < left ? in_panel : left);
        const uint8_t *rows = (const uint8_t *)source + (n - first) * 4 * num_in;
        pack_short(rows, step, num_in, packed + n / PANEL * bytes, n % PANEL);
    }
    flush_stores();
}

/* Pack outputs [first, first + count) of a matrix. The packed memory must be zero before, for the padding. `rows` is
 * supported for ggml blocks only. */
void nano_pack(int format, const void *source, const int32_t *rows, long first, long count, long num_in, char *packed) {
    const long row_bytes = source_row_bytes(format, num_in), bytes = panel_bytes(format, num_in);
    const int is_plain = format == F32 || format == BF16 || format == F16;
    for (long n = first, step; n < first + count; n += step) {
        const long in_panel = PANEL - n % PANEL, left = first + count - n;
        const uint8_t *row = (const uint8_t *)source + (rows && !is_plain ? rows[n - first] : n - first) * row_bytes;
        step = !is_plain ? 1 : whole_tiles(in_panel < left ? in_panel : left);
        if (is_plain) pack_plain(format, row, step, num_in, packed + n / PANEL * bytes, n % PANEL);
        else pack_row(format, row, num_in, packed + n / PANEL * bytes, n % PANEL);
    }
    flush_stores();
}

enum { NOT_FINITE = 1, NOT_SHORT = 2 };

/* Check plain values in one pass. NOT_FINITE: there is NaN or infinity. NOT_SHORT: a float32 value is not exact in
 * bfloat16. */
int nano_scan(int format, const void *values, int64_t count) {
    if (format == F32) {
        const uint32_t *bits = values;
        uint32_t any = 0, top = 0;
        for (int64_t i = 0; i < count; i++) {
            const uint32_t magnitude = bits[i] & 0x7fffffffu;
            any |= bits[i];
            top = magnitude > top ? magnitude : top;
        }
        return (top >= 0x7f800000u ? NOT_FINITE : 0) | (any & 0xffff ? NOT_SHORT : 0);
    }
    const uint16_t *bits = values, limit = format == BF16 ? 0x7f80 : 0x7c00;
    uint16_t top = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint16_t magnitude = bits[i] & 0x7fff;
        top = magnitude > top ? magnitude : top;
    }
    return top >= limit ? NOT_FINITE : 0;
}

/* One value of a nibble format or a plain format, as converted by formats.h. */
static float value_at(int format, const char *panel, long k, int lane) {
    uint32_t word;
    float f;
    if (format == F32) { memcpy(&f, panel + k * 256 + 4 * lane, 4); return f; }
    if (format == BF16) {
        word = (uint32_t)get16(panel + k / 2 * 256 + 4 * lane + k % 2 * 2, 0) << 16;
        memcpy(&f, &word, 4);
        return f;
    }
    if (format == F16) return half_scalar(get16(panel + k * 128, lane));
    const long block = k / 32, j = k % 32;
    if (format == Q8_0) {
        const char *p = panel + block * 2176;
        return (float)(int8_t)p[128 + j * 64 + lane] * half_scalar(get16(p, lane));
    }
    if (format == Q6_K) {
        const char *super = panel + k / 256 * 13440, *p = super + 128 + k / 16 % 16 * 832;
        uint32_t high;
        memcpy(&high, p + 64 + 4 * lane, 4);
        memcpy(&word, p + 320 + k / 8 % 2 * 256 + 4 * lane, 4);
        int q = nibble_of(word, k % 8) | (int)((high >> (2 * (k % 16))) & 3) << 4;
        return (float)(q - 32) * (half_scalar(get16(super, lane)) * (float)(int8_t)p[lane]);
    }
    const char *p;
    double a, b;                                        /* exact: only the conversion to float rounds */
    if (format == Q4_K) {
        const char *super = panel + k / 256 * 9472;
        p = super + 256 + block % 8 * 1152;
        a = (double)half_scalar(get16(super, lane)) * (uint8_t)p[lane];
        b = -(double)half_scalar(get16(super + 128, lane)) * (uint8_t)p[64 + lane];
        p += 128;
    } else {
        p = panel + block * block_bytes(format);
        a = half_scalar(get16(p, lane));
        b = format == Q4_1 ? half_scalar(get16(p + 128, lane)) : -8 * a;
        p += format == Q4_1 ? 256 : 128;
    }
    memcpy(&word, p + j / 8 * 256 + 4 * lane, 4);
    return (float)(nibble_of(word, j % 8) * a + b);
}

/* Read a row of a matrix that is stored by rows. */
static void read_plain_row(const Matrix *m, long row, float *out) {
    const char *values = m->data + row * source_row_bytes(m->format, m->num_in);
    if (m->format == F32) { memcpy(out, values, 4 * m->num_in); return; }
    for (long k = 0; k < m->num_in; k++) {
        const uint16_t value = get16(values, k);
        const uint32_t word = (uint32_t)value << 16;
        if (m->format == BF16) memcpy(out + k, &word, 4);
        else out[k] = half_scalar(value);
    }
}

/* Unpack outputs [first, first + count) to float rows. */
void nano_unpack(int format, const char *packed, long first, long count, long num_in, float *values) {
    const long bytes = panel_bytes(format, num_in);
    for (long n = first; n < first + count; n++)
        for (long k = 0; k < num_in; k++)
            values[(n - first) * num_in + k] = value_at(format, packed + n / PANEL * bytes, k, n % PANEL);
}

#endif
