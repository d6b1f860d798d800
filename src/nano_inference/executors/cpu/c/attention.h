/* Attention over a paged cache. The order of additions for a query is the same whether its row decodes alone, is part
 * of a chunk, or shares its first blocks with other rows.
 *
 * Keys are processed in splits of about 256 positions, counted from 0: all scores of a split, their maximum, their
 * exponentials and the sum of these, then the weighted values, key after key. Splits are merged in order. Tokens are
 * grouped into crews, which read the blocks common to their block tables once; all else is computed per token.
 *
 * The cache is k[block][layer][kv head][D][size] (a vector holds one dimension of adjacent keys, so that scores need
 * no sum across lanes) and v[block][layer][kv head][size][D], in float32 or in bfloat16, which is widened on loading.
 * Loads may exceed the last block by up to a vector. */
#ifndef NANO_ATTENTION_H
#define NANO_ATTENTION_H

#include "pool.h"

#define SPLIT 256
#define CREW 32                              /* most tokens of a crew */
#define HIDDEN (-1e30f)
#define AHEAD 8                              /* prefetch distance in blocks */

typedef struct {
    int32_t num_tokens, block_size, num_crews;
    const int32_t *position;                 /* [T] */
    const int32_t *table_of;                 /* [T]: start of the token's block table in `tables` */
    const int32_t *tables;
    const int32_t *order;                    /* [T]: tokens, sorted so that those that share blocks are adjacent */
    const int32_t *crews;                    /* [C + 1]: start of each crew in `order` */
} Tokens;

typedef struct {
    const char *k, *v;                       /* this layer's part of the first block */
    int64_t block_bytes;                     /* distance between blocks */
    int32_t is_short;                        /* 1: bfloat16, 0: float32 */
    int32_t num_heads, num_kv_heads, head_dim;
    int32_t window;                          /* latest keys visible to a query, its own included; 0: all */
    float scale, softcap;                    /* softcap 0: none */
} Attention;

typedef struct {
    const Tokens *t;
    const Attention *a;
    const float *q;                          /* [T, ldq], heads in adjacent columns */
    long ldq;
    float *out;                              /* [T, ldo] */
    long ldo;
    const Worker *worker;
    long num_pieces, num_splits;             /* crews x kv heads x splits; 1 split: all splits of a crew */
} AttentionJob;

typedef struct { long crew, head, split; } Piece;

/* The last crews first: those of chunks, which take longest. */
INLINE Piece piece_at(const AttentionJob *job, long number) {
    const long back = job->num_pieces - 1 - number, splits = job->num_splits, heads = job->a->num_kv_heads;
    return (Piece){.crew = back / splits / heads, .head = back / splits % heads, .split = back % splits};
}

/* Blocks [block, block + num_blocks), common to the block tables of the tokens [from, to). */
typedef struct {
    int from, to;
    long block, num_blocks;
} Stretch;

/* State of the computation of one crew and kv head. */
typedef struct {
    const AttentionJob *job;
    const int32_t *token;                    /* the crew's tokens */
    int num_tokens, group, crew, head;       /* group: query heads of a kv head */
    int num_blocks[CREW];                    /* of each token; equal for tokens of one table */
    long split_size, first;                  /* the split's size and first position */
    long lds;                                /* stride of a row of scores */
    float *queries, *scores, *part, *tops, *sums, *whole, *best, *total;
    Stretch stretches[2 * CREW];             /* of the split, in reading order */
    int num_stretches;
    const char **places;                     /* addresses of keys, of values, and of the AHEAD next keys */
    long num_places;                         /* of keys; the same number of values */
    long ahead;                              /* min(AHEAD, num_places) */
} Crew;

INLINE long lowest_key(const Attention *a, long position) {
    return a->window > 0 && position + 1 > a->window ? position + 1 - a->window : 0;
}

/* ---- register tiles --------------------------------------------------------------------------------------------- */

INLINE long value_bytes(const int is_short) { return is_short ? 2 : 4; }
INLINE vf load_kv(const int is_short, const char *p) {
    return is_short ? load_bf16((const uint16_t *)p) : load_f((const float *)p);
}

/* Blocks are scattered in memory, so hardware prefetchers do not find the next one: while a block is read, a later one
 * is prefetched line by line. */
INLINE void fetch_line(const char *p) { __builtin_prefetch(p, 0, 2); }
INLINE int begins_line(int vector, long stride) { return vector * LANES % 16 == 0 || stride <= LANES; }

/* Scores of V vectors of keys, each at its own address, and R query rows. */
INLINE void score_tile(const int S, const int R, const int V, const float *q, long dim, const char *const *k,
                       const char *const *next, long stride, float *const *out, long lds) {
    vf acc[12][4];
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) acc[r][v] = all_f(0);
    for (long d = 0; d < dim; d++) {
        vf keys[4];
        _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) {
            if (begins_line(v, stride)) fetch_line(next[v] + d * stride * value_bytes(S));
            keys[v] = load_kv(S, k[v] + d * stride * value_bytes(S));
        }
        _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {
            const vf x = all_f(q[r * dim + d]);
            _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) acc[r][v] = vfma(x, keys[v], acc[r][v]);
        }
    }
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) store_f(out[v] + r * lds, acc[r][v]);
}

/* part[r][d..] += sum over keys of p[r][key] v[key][d..], for V vectors of dimensions, over several blocks. */
INLINE void value_tile(const int S, const int R, const int V, const float *p, long lds, const char *const *v,
                       const char *const *next, long d, long size, long num_keys, long dim, float *part) {
    vf acc[12][4];
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 4") for (int u = 0; u < V; u++) acc[r][u] = load_f(part + r * dim + d + u * LANES);
    for (long first = 0; first < num_keys; first += size) {
        const char *block = *v++ + d * value_bytes(S), *ahead = *next++ + d * value_bytes(S);
        const long count = num_keys - first < size ? num_keys - first : size;
        for (long key = 0; key < count; key++) {
            vf values[4];
            _Pragma("GCC unroll 4") for (int u = 0; u < V; u++) {
                if (begins_line(u, dim)) fetch_line(ahead + (key * dim + u * LANES) * value_bytes(S));
                values[u] = load_kv(S, block + (key * dim + u * LANES) * value_bytes(S));
            }
            _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {
                const vf x = all_f(p[r * lds + first + key]);
                _Pragma("GCC unroll 4") for (int u = 0; u < V; u++) acc[r][u] = vfma(x, values[u], acc[r][u]);
            }
        }
    }
    _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 4") for (int u = 0; u < V; u++) store_f(part + r * dim + d + u * LANES, acc[r][u]);
}

#if LANES == 16
#define TALL 12
#define SHORT 6
#else
#define TALL 6
#define SHORT 3
#endif

/* Number of rows of the next tile: many with two vectors, few with four. */
INLINE int tile_rows(long rows) { return rows >= TALL ? TALL : rows >= SHORT ? SHORT : rows >= 3 ? 3 : (int)rows; }

#define TILE(rows, wide, call)                                                                                         \
    switch (rows) {                                                                                                    \
    case 1: { enum { R = 1, V = wide }; call; } break;                                                                 \
    case 2: { enum { R = 2, V = wide }; call; } break;                                                                 \
    case 3: { enum { R = 3, V = wide }; call; } break;                                                                 \
    case 6: { enum { R = 6, V = TALL == 6 && wide > 2 ? 2 : wide }; call; } break;                                     \
    case 12: { enum { R = 12, V = wide > 2 ? 2 : wide }; call; } break;                                                \
    }
INLINE int widest(int rows) { return rows == TALL ? 2 : 4; }

INLINE void score_vectors(const int S, const float *q, long rows, long dim, const char *const *k,
                          const char *const *next, long stride, float **out, long lds, int num_vectors) {
    for (int step; rows > 0; rows -= step, q += step * dim) {
        step = tile_rows(rows);
        for (int v = 0; v < num_vectors;) {
            const int left = num_vectors - v, wide = widest(step);
#define SCORE(n) { TILE(step, n, score_tile(S, R, V, q, dim, k + v, next + v, stride, out + v, lds)) v += n; }
            if (left >= 4 && wide == 4) SCORE(4)
            else if (left >= 2) SCORE(2)
            else SCORE(1)
#undef SCORE
        }
        for (int v = 0; v < num_vectors; v++) out[v] += step * lds;
    }
}

INLINE void value_blocks(const int S, const float *p, long rows, long lds, const char *const *v,
                         const char *const *next, long size, long num_keys, long dim, float *part) {
    for (int step; rows > 0; rows -= step, p += step * lds, part += step * dim) {
        step = tile_rows(rows);
        const int wide = widest(step);
        long d = 0;
        for (; d + wide * LANES <= dim; d += wide * LANES) {
            if (wide == 4) { TILE(step, 4, value_tile(S, R, V, p, lds, v, next, d, size, num_keys, dim, part)) }
            else { TILE(step, 2, value_tile(S, R, V, p, lds, v, next, d, size, num_keys, dim, part)) }
        }
        for (; d + LANES <= dim; d += LANES) {
            TILE(step, 1, value_tile(S, R, V, p, lds, v, next, d, size, num_keys, dim, part))
        }
        for (; d < dim; d++)                 /* remainder of a head size that is not a multiple of a vector */
            for (int r = 0; r < step; r++) {
                vf sum = all_f(part[r * dim + d]);
                for (long key = 0; key < num_keys; key++) {
                    const char *value = v[key / size] + (key % size * dim + d) * value_bytes(S);
                    const float w = S ? bf16_scalar(*(const uint16_t *)value) : *(const float *)value;
                    sum = vfma(all_f(p[r * lds + key]), all_f(w), sum);
                }
                part[r * dim + d] = sum[0];
            }
    }
}

/* ---- one crew, one split ---------------------------------------------------------------------------------------- */

INLINE long block_at(const Crew *c, int index, long block) {
    const Tokens *t = c->job->t;
    return t->tables[t->table_of[c->token[index]] + block];
}

/* Address of one kv head's keys, or values, in a block. */
INLINE const char *place_of(const AttentionJob *job, const char *cache, long block, long head) {
    const long bytes = (long)job->t->block_size * job->a->head_dim * value_bytes(job->a->is_short);
    return cache + block * job->a->block_bytes + head * bytes;
}

#define AT_ONCE 8                            /* vectors of keys, or blocks of values, processed together */

/* Compute the scores of a stretch with keys at `k`. */
INLINE void score_stretch(const int S, const Crew *c, const Stretch *s, const char *const *k) {
    const long size = c->job->t->block_size, dim = c->job->a->head_dim, rows = (long)(s->to - s->from) * c->group;
    const float *q = c->queries + (long)s->from * c->group * dim;
    float *scores = c->scores + (long)s->from * c->group * c->lds + (s->block * size - c->first), *out[AT_ONCE];
    const char *now[AT_ONCE], *next[AT_ONCE];
    int n = 0;
    for (long i = 0; i < s->num_blocks; i++)
        for (long key = 0; key < size; key += LANES) {
            now[n] = k[i] + key * value_bytes(S);
            next[n] = k[i + c->ahead] + key * value_bytes(S);
            out[n++] = scores + i * size + key;
            if (n < AT_ONCE && (i + 1 < s->num_blocks || key + LANES < size)) continue;
            score_vectors(S, q, rows, dim, now, next, size, out, c->lds, n);
            n = 0;
        }
}

/* Add the weighted values of a stretch up to the last token's position; later slots are uninitialised. */
INLINE void weigh_stretch(const int S, const Crew *c, const Stretch *s, const char *const *v) {
    const Tokens *t = c->job->t;
    const long size = t->block_size, dim = c->job->a->head_dim, row = (long)s->from * c->group;
    long last = 0;
    for (int i = s->from; i < s->to; i++)
        if (t->position[c->token[i]] > last) last = t->position[c->token[i]];
    for (long i = 0; i < s->num_blocks; i += AT_ONCE) {
        const long begin = (s->block + i) * size, left = s->num_blocks - i, n = left < AT_ONCE ? left : AT_ONCE;
        const long keys = last + 1 - begin < n * size ? last + 1 - begin : n * size;
        value_blocks(S, c->scores + row * c->lds + (begin - c->first), (long)(s->to - s->from) * c->group, c->lds,
                     v + i, v + i + c->ahead, size, keys, dim, c->part + row * dim);
    }
}

/* Separate functions for float32 and bfloat16. */
#define STRETCHES(of, s)                                                                                               \
    static void score_##of(const Crew *c) {                                                                            \
        const char *const *k = c->places;                                                                              \
        for (int i = 0; i < c->num_stretches; k += c->stretches[i++].num_blocks)                                       \
            score_stretch(s, c, &c->stretches[i], k);                                                                  \
    }                                                                                                                  \
    static void weigh_##of(const Crew *c) {                                                                            \
        const char *const *v = c->places + c->num_places;                                                              \
        for (int i = 0; i < c->num_stretches; v += c->stretches[i++].num_blocks)                                       \
            weigh_stretch(s, c, &c->stretches[i], v);                                                                  \
    }
STRETCHES(floats, 0) STRETCHES(shorts, 1)
#undef STRETCHES

/* Append the stretches of the blocks [block, stop) of the tokens [from, to): adjacent tokens share a stretch while
 * their block tables agree. */
static void find_stretches(Crew *c, int from, int to, long block, long stop) {
    while (from < to) {
        if (c->num_blocks[from] <= block) { from++; continue; }
        const int32_t *table_of = c->job->t->table_of, *token = c->token;
        long common = c->num_blocks[from] < stop ? c->num_blocks[from] : stop;
        int until = from + 1;
        for (; until < to; until++) {
            if (table_of[token[until]] == table_of[token[from]]) continue;
            if (c->num_blocks[until] <= block || block_at(c, until, block) != block_at(c, from, block)) break;
            const long most = c->num_blocks[until] < common ? c->num_blocks[until] : common;
            long agree = block + 1;
            while (agree < most && block_at(c, until, agree) == block_at(c, from, agree)) agree++;
            common = agree;
        }
        c->stretches[c->num_stretches++] = (Stretch){from, until, block, common - block};
        if (common < stop) find_stretches(c, from, until, common, stop);       /* skips tokens that end here */
        from = until;
    }
}

/* List the addresses of the stretches' keys and values. */
static void list_places(Crew *c) {
    const char **place = c->places, *caches[2] = {c->job->a->k, c->job->a->v};
    for (int cache = 0; cache < 2; cache++)
        for (int i = 0; i < c->num_stretches; i++)
            for (long b = 0; b < c->stretches[i].num_blocks; b++) {
                const long block = block_at(c, c->stretches[i].from, c->stretches[i].block + b);
                *place++ = place_of(c->job, caches[cache], block, c->head);
            }
    c->num_places = (place - c->places) / 2;
    c->ahead = c->num_places < AHEAD ? c->num_places : AHEAD;
    for (int i = 0; i < AHEAD; i++) *place++ = c->places[0];
}

/* List, after them, the first keys of another piece, for prefetching: those of its first token from `block` on. */
static void list_next(Crew *c, long crew, long head, long block) {
    const Tokens *t = c->job->t;
    const int32_t token = t->order[t->crews[crew]], *table = t->tables + t->table_of[token];
    const long stop = t->position[token] / t->block_size + 1;
    const char **place = c->places + 2 * c->num_places;
    for (int i = 0; i < AHEAD && block + i < stop; i++)
        place[i] = place_of(c->job, c->job->a->k, table[block + i], head);
}

/* Scale and soft-cap one row's scores [begin, end). */
static void cap_scores(const Attention *a, float *row, int begin, int end) {
    for (int key = begin; key < end; key += LANES) {
        const vf x = load_f(row + key) * all_f(a->scale) / all_f(a->softcap);
        store_f(row + key, vtanh(x) * all_f(a->softcap));
    }
}

/* Maximum of a row's scores [begin, end), both multiples of 16; -infinity if all are. */
INLINE float largest(const float *row, int begin, int end) {
    vf best[16 / LANES];
    for (int u = 0; u < 16; u += LANES) best[u / LANES] = all_f(-__builtin_inff());
    for (int key = begin; key < end; key += 16)
        for (int u = 0; u < 16; u += LANES) best[u / LANES] = vmax(load_f(row + key + u), best[u / LANES]);
    for (int u = LANES; u < 16; u += LANES) best[0] = vmax(best[u / LANES], best[0]);
    float top = best[0][0];
    for (int i = 1; i < LANES; i++) if (best[0][i] > top) top = best[0][i];
    return top;
}

/* Scale, cap and mask one row's scores and replace them by exponentials; exactly 0 for masked keys. Scores outside the
 * visible range are set to 0 without being read. */
static void soften(const Crew *c, long position, float *row, float *top, float *sum) {
    const Attention *a = c->job->a;
    const int low = (int)(lowest_key(a, position) - c->first);
    const int high = position - c->first < c->split_size ? (int)(position - c->first) : (int)c->split_size - 1;
    const int begin = low > 0 ? low / 16 * 16 : 0, end = (high / 16 + 1) * 16;
    const float scale = a->softcap > 0 ? 1 : a->scale;
    if (a->softcap > 0) cap_scores(a, row, begin, end);
    for (int key = begin; key < low; key++) row[key] = -__builtin_inff();
    for (int key = high + 1; key < end; key++) row[key] = -__builtin_inff();
    *top = largest(row, begin, end) * scale;             /* equals the largest product: the scale is positive */
    if (*top < HIDDEN) *top = HIDDEN;
    float sums[16] = {0};
    for (int key = begin; key < end; key += 16)
        for (int u = 0; u < 16; u += LANES) {
            const vf e = vexp_down(load_f(row + key + u) * all_f(scale) - all_f(*top));
            store_f(row + key + u, e);
            store_f(sums + u, load_f(sums + u) + e);
        }
    memset(row, 0, 4 * begin);
    memset(row + end, 0, 4 * (c->lds - end));
    *sum = sum16(sums);
}

/* Merge one split's part of a row into the result of earlier splits (total 0: none). */
static void merge(float *best, float *total, float *whole, float top, float sum, const float *part, long dim) {
    if (*total == 0) {
        *best = top;
        *total = sum;
        memcpy(whole, part, 4 * dim);
        return;
    }
    const float now = top > *best ? top : *best;
    const float kept = vexp(all_f(*best - now))[0], added = vexp(all_f(top - now))[0];
    *best = now;
    *total = *total * kept + sum * added;
    for (long d = 0; d < dim; d++) whole[d] = whole[d] * kept + part[d] * added;
}

/* List the keys of the piece that this thread will probably take next, for prefetching. */
static void list_next_piece(Crew *c) {
    const AttentionJob *job = c->job;
    const long piece = likely_piece(job->worker);
    if (piece >= job->num_pieces) return;
    const Piece next = piece_at(job, piece);
    const long first = lowest_key(job->a, job->t->position[job->t->order[job->t->crews[next.crew]]]);
    const long begin = next.split * c->split_size;
    list_next(c, next.crew, next.head, (begin > first ? begin : first) / job->t->block_size);
}

/* One split: scores, exponentials, weighted values. The sum is 0 for a row without visible keys in it. */
static void attend_split(Crew *c, long split, int is_last) {
    const Attention *a = c->job->a;
    const Tokens *t = c->job->t;
    const long rows = (long)c->num_tokens * c->group, size = t->block_size, num_blocks = c->split_size / size;
    c->first = split * c->split_size;
    long low = c->first + c->split_size;
    for (int i = 0; i < c->num_tokens; i++) {
        const long begin = lowest_key(a, t->position[c->token[i]]);
        if (begin < low) low = begin;
    }
    c->num_stretches = 0;
    find_stretches(c, 0, c->num_tokens, (low > c->first ? low : c->first) / size, (split + 1) * num_blocks);
    list_places(c);
    (a->is_short ? score_shorts : score_floats)(c);
    memset(c->part, 0, 4 * rows * a->head_dim);
    for (long r = 0; r < rows; r++) {
        const long position = t->position[c->token[r / c->group]];
        if (position < c->first || lowest_key(a, position) >= c->first + c->split_size) {
            memset(c->scores + r * c->lds, 0, 4 * c->lds);
            c->sums[r] = 0;
        } else {
            soften(c, position, c->scores + r * c->lds, &c->tops[r], &c->sums[r]);
        }
    }
    if (!is_last) list_next(c, c->crew, c->head, (split + 1) * num_blocks);
    else list_next_piece(c);
    (a->is_short ? weigh_shorts : weigh_floats)(c);
}

/* ---- crews ------------------------------------------------------------------------------------------------------ */

/* Number of keys of a split: whole blocks. */
int64_t nano_split_size(int64_t size) { return size >= SPLIT ? size : SPLIT / size * size; }
static size_t crew_bytes(const Attention *a, long block_size) {
    const size_t rows = (size_t)CREW * (a->num_heads / a->num_kv_heads), split = nano_split_size(block_size);
    const size_t places = 2 * CREW * (split / block_size) + AHEAD;
    return sizeof(char *) * places + 4 * (rows * (3 * a->head_dim + 4 + (split + 15) / 16 * 16 + 16) + 256);
}

static void crew_begin(Crew *c, const AttentionJob *job, int crew, int head, void *scratch) {
    const Attention *a = job->a;
    const Tokens *t = job->t;
    const long dim = a->head_dim;
    c->job = job;
    c->crew = crew;
    c->head = head;
    c->token = t->order + t->crews[crew];
    c->num_tokens = t->crews[crew + 1] - t->crews[crew];
    c->group = a->num_heads / a->num_kv_heads;
    c->split_size = nano_split_size(t->block_size);
    c->lds = (c->split_size + 15) / 16 * 16 + 16;        /* a block's last vector may exceed the split */
    const long rows = (long)c->num_tokens * c->group;
    c->places = scratch;
    c->queries = (float *)(c->places + 2 * CREW * (c->split_size / t->block_size) + AHEAD);
    c->part = c->queries + rows * dim;
    c->whole = c->part + rows * dim;
    c->tops = c->whole + rows * dim;
    c->sums = c->tops + rows;
    c->best = c->sums + rows;
    c->total = c->best + rows;
    c->scores = c->total + rows;
    for (int i = c->num_tokens - 1; i >= 0; i--) {       /* the last token of a chunk has the highest position */
        const int is_last = i + 1 == c->num_tokens || t->table_of[c->token[i]] != t->table_of[c->token[i + 1]];
        c->num_blocks[i] = is_last ? t->position[c->token[i]] / t->block_size + 1 : c->num_blocks[i + 1];
        memcpy(c->queries + (long)i * c->group * dim, job->q + c->token[i] * job->ldq + (long)head * c->group * dim,
               4 * c->group * dim);
    }
}

INLINE void write_row(const AttentionJob *job, long token, long head, const float *whole, float total) {
    float *out = job->out + token * job->ldo + head * job->a->head_dim;
    for (long d = 0; d < job->a->head_dim; d++) out[d] = total == 0 ? __builtin_nanf("") : whole[d] / total;
}

static long last_position(const AttentionJob *job, int crew) {
    long last = 0;
    for (int i = job->t->crews[crew]; i < job->t->crews[crew + 1]; i++)
        if (job->t->position[job->t->order[i]] > last) last = job->t->position[job->t->order[i]];
    return last;
}
static long first_key(const AttentionJob *job, int crew) {
    long first = 1L << 40;
    for (int i = job->t->crews[crew]; i < job->t->crews[crew + 1]; i++) {
        const long low = lowest_key(job->a, job->t->position[job->t->order[i]]);
        if (low < first) first = low;
    }
    return first;
}

/* All splits of a crew and kv head. */
static void attend_crew(const AttentionJob *job, const Piece *piece, void *scratch) {
    Crew c;
    crew_begin(&c, job, piece->crew, piece->head, scratch);
    const long dim = job->a->head_dim, rows = (long)c.num_tokens * c.group;
    memset(c.total, 0, 4 * rows);
    const long last = last_position(job, c.crew) / c.split_size;
    for (long s = first_key(job, c.crew) / c.split_size; s <= last; s++) {
        attend_split(&c, s, s == last);
        for (long r = 0; r < rows; r++)
            if (c.sums[r] != 0)
                merge(&c.best[r], &c.total[r], c.whole + r * dim, c.tops[r], c.sums[r], c.part + r * dim, dim);
    }
    for (long r = 0; r < rows; r++)
        write_row(job, c.token[r / c.group], (long)c.head * c.group + r % c.group, c.whole + r * dim, c.total[r]);
}

/* One split of a crew and kv head; writes to `parts` [T, H, num_splits, D + 2], for `merge_parts`. */
static void attend_part(const AttentionJob *job, const Piece *piece, float *parts, void *scratch) {
    Crew c;
    crew_begin(&c, job, piece->crew, piece->head, scratch);
    const long dim = job->a->head_dim, rows = (long)c.num_tokens * c.group, split = piece->split;
    const long first = first_key(job, c.crew) / c.split_size, last = last_position(job, c.crew) / c.split_size;
    const int is_seen = first <= split && split <= last;
    if (is_seen) attend_split(&c, split, 1);
    for (long r = 0; r < rows; r++) {
        const long place = (long)c.token[r / c.group] * job->a->num_heads + (long)c.head * c.group + r % c.group;
        float *part = parts + (place * job->num_splits + split) * (dim + 2);
        part[dim] = is_seen ? c.tops[r] : 0;
        part[dim + 1] = is_seen ? c.sums[r] : 0;
        if (is_seen) memcpy(part, c.part + r * dim, 4 * dim);
    }
}

static void merge_parts(const AttentionJob *job, long token, long head, const float *parts, float *whole) {
    const long dim = job->a->head_dim, num_splits = job->num_splits;
    float best = 0, total = 0;
    for (long s = 0; s < num_splits; s++) {
        const float *part = parts + ((token * job->a->num_heads + head) * num_splits + s) * (dim + 2);
        if (part[dim + 1] != 0) merge(&best, &total, whole, part[dim], part[dim + 1], part, dim);
    }
    write_row(job, token, head, whole, total);
}

#endif
