/* Runs a list of operations on numbered buffers with all threads: one call per step. */
#include "adapters.h"
#include "attention.h"
#include "delta.h"
#include "gemm.h"
#include "int8.h"
#include "pack.h"
#include "rows.h"
#include "sample.h"
#include <sys/mman.h>
#if defined(__linux__) && !defined(MADV_POPULATE_WRITE)
#define MADV_POPULATE_WRITE 23               /* Linux 5.14; older C libraries do not name it */
#endif

enum {
    EMBED, NORM, MATMUL, HEADS, ATTEND, GLU, MIX, CAP, VALUES, SMEAR, KEEP, ARRANGE, CONVOLVE, DELTA, GATED_NORM, GATE,
    NUM_KINDS
};
enum { ADD = 1, NORM_FIRST = 2, NORM_LAST = 4 };          /* flags */
enum { FROM_TOKEN, FROM_PREVIOUS, FROM_PAIR };            /* rows selected by EMBED */

typedef struct {
    int32_t kind, flags;
    int32_t in, in2, out;                /* buffers */
    int32_t matrix, num_matrices;        /* range of the program's matrices */
    int32_t layer;                       /* of the cache */
    int32_t rope;                        /* -1: none */
    int32_t choice;                      /* GLU: activation; EMBED: rows; ATTEND: window; DELTA: 1 if tiled */
    int64_t count;                       /* EMBED: rows of the table */
    int64_t state;                       /* first float of the operation's state in a slot */
    float eps, offset, scale, cap;
    int32_t column, column2;             /* GATED_NORM, GATE: of the gate in in2; DELTA: of a and b */
    int32_t dim;                         /* ARRANGE: of a piece; CONVOLVE: taps; DELTA: of a key; GATED_NORM: of a head */
    int32_t num_keys, num_values;        /* DELTA: heads */
    const float *weight, *weight2;       /* of norms, biases and mixtures; DELTA: a_log, dt_bias */
    const int32_t *pieces;               /* ARRANGE: the input's piece at each place of the output */
} Op;

typedef struct {
    const float *cosine, *sine;          /* [position, turning] */
    int64_t turning;
} Rope;

typedef struct {
    const Op *ops;
    int64_t num_ops;
    const Matrix *matrices;
    const Rope *ropes;
    const int32_t *widths;               /* floats per row of each buffer */
    const int32_t *strides;              /* floats between rows of each buffer */
    int32_t num_heads, num_kv_heads, head_dim;
} Program;

typedef struct {
    Tokens tokens;
    int64_t num_splits;                  /* above 0: each split of a row's keys is a separate piece of work */
    const int32_t *adapter;              /* [T]: index of the row's adapter in the step; -1: none. NULL: no row has one */
} Rows;

typedef struct {
    Rows all, kept;                      /* all tokens of the step; those that KEEP selects */
    const int32_t *keep;                 /* indices of the kept tokens, ascending */
    const int32_t *token, *previous;     /* [T]; previous -1: none */
    float *const *buffers;               /* [T, width] each */
    char *k, *v;                         /* the cache: blocks, each with all layers */
    int64_t block_bytes;
    int64_t is_short;                    /* 1: bfloat16, 0: float32 */
    float *parts;                        /* [T, H, num_splits, D + 2] if num_splits is above 0 */
    uint8_t *bytes;                      /* [T, byte_stride]: rows rounded to eight bits, after their scales (int8.h) */
    int64_t byte_stride;
    States states;
    const LowRank *const *adapters;      /* of each adapter of the step, what it has for the program's matrices */
    float *low;                          /* [T, low_stride]: x A^T of the current matrices */
    int64_t low_stride;
    _Atomic int failed;                  /* 1: out of memory */
} Step;

typedef struct { const Program *program; Step *step; const Rows *rows; } Run;

INLINE float *row_of(const Run *r, int buffer, long t) {
    return r->step->buffers[buffer] + t * r->program->strides[buffer];
}

#define ROWS_A_PIECE 8

static long embedding_row(const Op *op, const Step *s, long t) {
    if (op->choice == FROM_TOKEN) return s->token[t];
    if (op->choice == FROM_PREVIOUS) return s->previous[t] < 0 ? 0 : s->previous[t];
    if (s->previous[t] < 0) return op->count - 1;         /* nanochat's hashed pairs; the last row has no predecessor */
    const int64_t hash = ((int64_t)s->token[t] * 36313) ^ ((int64_t)s->previous[t] * 27191);
    return hash % (op->count - 1);
}

static void read_embedding(const Matrix *m, long row, float *out) {
    if (m->format == INT8) { read_int8_row(m, row, out); return; }
    if (m->by_rows) { read_plain_row(m, row, out); return; }
    const char *panel = m->data + row / PANEL * panel_bytes(m->format, m->num_in);
    for (long k = 0; k < m->num_in; k++) out[k] = value_at(m->format, panel, k, row % PANEL);
}

static void do_embed(const Run *r, const Op *op, long t) {
    const long width = r->program->widths[op->out];
    float *out = row_of(r, op->out, t);
    read_embedding(&r->program->matrices[op->matrix], embedding_row(op, r->step, t), out);
    if (op->scale != 1) for (long i = 0; i < width; i++) out[i] *= op->scale;
}

static void do_norm(const Run *r, const Op *op, long t) {
    const long width = r->program->widths[op->in];
    norm_row(row_of(r, op->in, t), width, op->weight, op->offset, op->eps, row_of(r, op->out, t), op->flags & ADD);
}

/* Write one kv head's key and value of a token to the cache. */
static void write_kv(const Run *r, long layer, long head, long t, const float *key, const float *value) {
    const Tokens *tokens = &r->rows->tokens;
    const long dim = r->program->head_dim, size = tokens->block_size, position = tokens->position[t];
    const long block = tokens->tables[tokens->table_of[t] + position / size], slot = position % size;
    const long place = (layer * r->program->num_kv_heads + head) * size * dim;
    char *k = r->step->k + block * r->step->block_bytes, *v = r->step->v + block * r->step->block_bytes;
    for (long d = 0; d < dim; d++) {
        const long k_at = place + d * size + slot, v_at = place + slot * dim + d;
        if (r->step->is_short) {
            ((uint16_t *)k)[k_at] = round_bf16(key[d]);
            ((uint16_t *)v)[v_at] = round_bf16(value[d]);
        } else {
            ((float *)k)[k_at] = key[d];
            ((float *)v)[v_at] = value[d];
        }
    }
}

/* Queries, keys and values of one token, adjacent in a buffer: norms and rotation in place; then keys and values are
 * written to a layer's cache (-1: none). */
static void do_heads(const Run *r, const Op *op, long t) {
    const Program *p = r->program;
    const Tokens *tokens = &r->rows->tokens;
    const long dim = p->head_dim, position = tokens->position[t];
    const long num_qk = p->num_heads + p->num_kv_heads;
    float *row = row_of(r, op->in, t);
    for (long h = 0; h < num_qk; h++) {
        float *x = row + h * dim;
        const float *weight = h < p->num_heads ? op->weight : op->weight2;
        if (op->flags & NORM_FIRST) norm_row(x, dim, weight, op->offset, op->eps, x, 0);
        if (op->rope >= 0) {
            const Rope *rope = &p->ropes[op->rope];
            const long at = position * rope->turning;
            rotate_head(x, rope->turning, rope->cosine + at, rope->sine + at);
        }
        if (op->flags & NORM_LAST) norm_row(x, dim, weight, op->offset, op->eps, x, 0);
    }
    for (long h = 0; op->layer >= 0 && h < p->num_kv_heads; h++)
        write_kv(r, op->layer, h, t, row + (p->num_heads + h) * dim, row + (num_qk + h) * dim);
}

static void do_glu(const Run *r, const Op *op, long t) {
    const long width = r->program->widths[op->out];
    const float *in = row_of(r, op->in, t);
    glu_row(op->choice, in, op->choice == RELU_SQUARED ? NULL : in + width, width, row_of(r, op->out, t));
}

/* out = weight in + weight2 in2; weights may be NULL (1). */
static void do_mix(const Run *r, const Op *op, long t) {
    const long width = r->program->widths[op->out];
    const float *a = row_of(r, op->in, t), *b = row_of(r, op->in2, t);
    float *out = row_of(r, op->out, t);
    const float x = op->weight ? *op->weight : 1, y = (op->weight2 ? *op->weight2 : 1) * op->scale;
    for (long i = 0; i < width; i++) out[i] = x * a[i] + y * b[i];
}

/* nanochat: v += scale sigmoid(gate) more, for each kv head. */
static void do_values(const Run *r, const Op *op, long t) {
    const Program *p = r->program;
    float *row = row_of(r, op->in, t) + (long)(p->num_heads + p->num_kv_heads) * p->head_dim;
    const float *gate = row_of(r, op->in2, t), *more = row_of(r, op->out, t);
    for (long h = 0; h < p->num_kv_heads; h++) {
        const float share = op->scale * sigmoid(gate[h]);
        for (long d = 0; d < p->head_dim; d++) row[h * p->head_dim + d] += share * more[h * p->head_dim + d];
    }
}

/* nanochat: x += weight sigmoid(gate) before, unless the token has no previous one. */
static void do_smear(const Run *r, const Op *op, long t) {
    if (r->step->previous[t] < 0) return;
    const long width = r->program->widths[op->out];
    const float *gate = row_of(r, op->in2, t), *before = row_of(r, op->in, t);
    float *out = row_of(r, op->out, t);
    const float share = *op->weight * sigmoid(gate[0]);
    for (long i = 0; i < width; i++) out[i] += share * before[i];
}

static void do_arrange(const Run *r, const Op *op, long t) {
    const float *in = row_of(r, op->in, t);
    float *out = row_of(r, op->out, t);
    for (long i = 0; i < op->count; i++)
        memcpy(out + i * op->dim, in + (long)op->pieces[i] * op->dim, 4 * (size_t)op->dim);
}

static void do_convolve(const Run *r, const Op *op, long t) {
    convolve_row(&r->step->states, op->state, op->weight, op->dim, r->step->buffers[op->in],
                 r->program->strides[op->in], t, r->program->widths[op->out], row_of(r, op->out, t));
}

static void do_prepare(const Run *r, const Op *op, long t) {
    float *more = row_of(r, op->in2, t);
    prepare_delta(row_of(r, op->in, t), op->num_keys, op->dim, more + op->column, more + op->column2, op->weight,
                  op->weight2, op->num_values);
}

static void do_gated_norm(const Run *r, const Op *op, long t) {
    const long width = r->program->widths[op->out];
    const float *x = row_of(r, op->in, t), *gate = row_of(r, op->in2, t) + op->column;
    float *out = row_of(r, op->out, t);
    for (long at = 0; at < width; at += op->dim) norm_row(x + at, op->dim, op->weight, 0, op->eps, out + at, 0);
    glu_row(SILU, gate, out, width, out);
}

static void do_gate(const Run *r, const Op *op, long t) {
    const long width = r->program->widths[op->out];
    const float *x = row_of(r, op->in, t), *gate = row_of(r, op->in2, t) + op->column;
    float *out = row_of(r, op->out, t);
    long i = 0;
    for (; i + LANES <= width; i += LANES)
        store_f(out + i, load_f(x + i) / (all_f(1.0f) + vexp(-load_f(gate + i))));
    for (; i < width; i++) out[i] = x[i] / (1.0f + vexp(all_f(-gate[i]))[0]);
}

static void do_row(const Run *r, const Op *op, long t) {
    switch (op->kind) {
    case EMBED: do_embed(r, op, t); break;
    case NORM: do_norm(r, op, t); break;
    case HEADS: do_heads(r, op, t); break;
    case GLU: do_glu(r, op, t); break;
    case MIX: do_mix(r, op, t); break;
    case VALUES: do_values(r, op, t); break;
    case SMEAR: do_smear(r, op, t); break;
    case ARRANGE: do_arrange(r, op, t); break;
    case CONVOLVE: do_convolve(r, op, t); break;
    case DELTA: do_prepare(r, op, t); break;
    case GATED_NORM: do_gated_norm(r, op, t); break;
    case GATE: do_gate(r, op, t); break;
    case CAP:
        softcap_row(row_of(r, op->out, t), r->program->widths[op->out], op->cap);
        break;
    }
}

/* ---- products --------------------------------------------------------------------------------------------------- */

typedef struct {
    const Matrix *matrices;
    int num_matrices;
    const float *x;
    long ldx, num_rows;
    float *out;
    long ldo;
    const float *bias;
    int add;
    const int32_t *adapter;              /* of each row; NULL: no row has one */
    long first_matrix;                   /* index in the program */
} Product;

/* Number of rows from `first` on, at most `most`, that have the same adapter. */
INLINE long rows_of_adapter(const int32_t *adapter, long first, long most) {
    long n = 1;
    while (n < most && adapter[first + n] == adapter[first]) n++;
    return n;
}

/* What the adapter of a row has for a matrix of a product; NULL if nothing. */
INLINE const LowRank *low_rank_of(const Product *p, const Step *s, long row, long matrix) {
    if (p->adapter[row] < 0) return NULL;
    const LowRank *found = &s->adapters[p->adapter[row]][p->first_matrix + matrix];
    return found->rank ? found : NULL;
}

/* Compute x A^T for all matrices of a product. */
static void shrink_all(Worker *w, const Product *p, const Step *s) {
    const long blocks = (p->num_rows + ROWS_A_PIECE - 1) / ROWS_A_PIECE, num = blocks * p->num_matrices;
    begin_job(w);
    FOR_PIECES(w, piece, num) {
        const long begin = piece / p->num_matrices * ROWS_A_PIECE, left = p->num_rows - begin;
        const long end = begin + (left < ROWS_A_PIECE ? left : ROWS_A_PIECE);
        for (long r = begin, n; r < end; r += n) {
            n = rows_of_adapter(p->adapter, r, end - r);
            const LowRank *l = low_rank_of(p, s, r, piece % p->num_matrices);
            if (l) shrink(l, p->x + r * p->ldx, p->ldx, n, p->matrices[0].num_in, s->low + r * s->low_stride,
                          s->low_stride);
        }
    }
    finish_job(w, num);
}

/* Add (x A^T) B^T to the tile of a piece's rows. `more` is scratch memory like `tile`. */
static void add_adapters(const Product *p, const Step *s, const Matrix *m, long panel, Lanes part, long first,
                         long rows, float *tile, float *wide, float *more) {
    for (long r = 0, n; r < rows; r += n) {
        n = rows_of_adapter(p->adapter, first + r, rows - r);
        const LowRank *l = low_rank_of(p, s, first + r, m - p->matrices);
        if (!l) continue;
        panel_product(l->format, l->b + panel * panel_bytes(l->format, l->rank), part,
                      s->low + (first + r) * s->low_stride + l->column, s->low_stride, n, l->rank, more, wide);
        for (long i = 0; i < n; i++)
            for (long j = part.from; j < part.to; j++) tile[(r + i) * PANEL + j] += more[i * PANEL + j];
    }
}

static void write_tile(const Product *p, const Matrix *m, long panel, Lanes part, long first, long num_rows,
                       const float *tile) {
    const long begin = panel * PANEL + part.from, stop = panel * PANEL + part.to;
    const long width = (m->num_out < stop ? m->num_out : stop) - begin;
    const float *bias = p->bias ? p->bias + m->column + begin : NULL;
    for (long r = 0; r < num_rows && width > 0; r++) {
        float *out = p->out + (first + r) * p->ldo + m->column + begin;
        const float *from = tile + r * PANEL + part.from;
        if (bias && p->add) for (long i = 0; i < width; i++) out[i] += from[i] + bias[i];
        else if (bias) for (long i = 0; i < width; i++) out[i] = from[i] + bias[i];
        else if (p->add) for (long i = 0; i < width; i++) out[i] += from[i];
        else memcpy(out, from, 4 * width);
    }
}

static long rows_of_piece(long num_rows, long num_in) {
    long rows = TILE_FLOATS / (num_in < DEPTH ? num_in : DEPTH) / ROWS * ROWS;
    if (rows < ROWS) rows = ROWS;
    return rows < num_rows ? rows : num_rows > 0 ? num_rows : 1;
}

/* Multiply a part of one panel, of any format, with a piece's rows. The last arguments are scratch memory. */
static void product_piece(const Product *p, const Step *s, const Matrix *m, long panel, Lanes part, long first,
                          long rows, float *tile, float *wide, float *more) {
    if (m->rounds)
        rounded_panel(m, panel, part, s->bytes + first * s->byte_stride, s->byte_stride, rows, tile);
    else
        panel_product(m->format, m->data + panel * panel_bytes(m->format, m->num_in), part, p->x + first * p->ldx,
                      p->ldx, rows, m->num_in, tile, wide);
    if (p->adapter) add_adapters(p, s, m, panel, part, first, rows, tile, wide, more);
    write_tile(p, m, panel, part, first, rows, tile);
}

/* Round all rows of x to eight bits. */
static void quantise(Worker *w, const Product *p, const Step *s) {
    const long num = (p->num_rows + ROWS_A_PIECE - 1) / ROWS_A_PIECE;
    begin_job(w);
    FOR_PIECES(w, piece, num)
        for (long r = piece * ROWS_A_PIECE; r < (piece + 1) * ROWS_A_PIECE && r < p->num_rows; r++)
            quantise_row(p->x + r * p->ldx, p->matrices[0].num_in, s->bytes + r * s->byte_stride);
    finish_job(w, num);
}

#define LONGEST_RUN 16

/* Number of runs of adjacent panels that a product is divided into. With few rows reading dominates, which is fastest
 * in long runs; every thread then gets the same number. */
static long runs_of_panels(const Pool *pool, long num_rows, long panels) {
    if (num_rows > DIRECT || panels < pool->num_threads) return panels;
    const long few = pool->num_threads * 6, many = panels / LONGEST_RUN > few ? panels / LONGEST_RUN : few;
    const long runs = panels < many ? panels : many;
    return runs / pool->num_threads * pool->num_threads;
}

/* Index of the n-th run to process. With few rows, threads that alternate get consecutive runs each, so that a thread
 * prefetches its own next run. */
static long run_at(const Pool *pool, long num_rows, long runs, long n) {
    if (num_rows > DIRECT || runs < pool->num_threads) return n;
    return n % pool->num_threads * (runs / pool->num_threads) + n / pool->num_threads;
}

/* Number of parts per panel: two if there are so few pieces that a thread would be idle at the end. */
static long parts_of_panel(const Pool *pool, const Product *p, long fewest_rows, long num_pieces) {
    if (num_pieces % pool->num_threads == 0 || num_pieces >= 16 * pool->num_threads) return 1;
    for (int i = 0; i < p->num_matrices; i++) if (!can_halve(&p->matrices[i], fewest_rows)) return 1;
    return 2;
}

static void multiply(Worker *w, const Product *p, Step *step) {
    const long num_in = p->matrices[0].num_in, rows = rows_of_piece(p->num_rows, num_in);
    const long num_blocks = (p->num_rows + rows - 1) / rows;
    long panels = 0;
    for (int i = 0; i < p->num_matrices; i++) panels += num_panels(p->matrices[i].num_out);
    int rounds = 0;
    for (int i = 0; i < p->num_matrices; i++) rounds |= p->matrices[i].rounds;
    if (rounds) quantise(w, p, step);
    if (p->adapter) shrink_all(w, p, step);
    begin_job(w);
    float *tile = scratch_of(w, 4 * (size_t)((p->adapter ? 2 : 1) * rows * PANEL + DEPTH * PANEL));
    const long runs = runs_of_panels(w->pool, p->num_rows, panels), fewest_rows = p->num_rows - (num_blocks - 1) * rows;
    const long parts = parts_of_panel(w->pool, p, fewest_rows, num_blocks * runs);
    FOR_PIECES(w, piece, num_blocks * runs * parts) {
        if (!tile) { atomic_store(&step->failed, 1); continue; }
        const long number = piece / parts, first = number / runs * rows, left = p->num_rows - first;
        const long run = run_at(w->pool, p->num_rows, runs, number % runs);
        const long begin = run * panels / runs, end = (run + 1) * panels / runs;
        const int from = (int)(piece % parts) * PANEL / 2;
        const Lanes part = {from, parts == 1 ? PANEL : from + PANEL / 2};
        for (long at = begin; at < end; at++) {
            const Matrix *m = p->matrices;
            long panel = at;
            while (panel >= num_panels(m->num_out)) panel -= num_panels(m++->num_out);
            float *wide = tile + rows * PANEL;
            product_piece(p, step, m, panel, part, first, left < rows ? left : rows, tile, wide, wide + DEPTH * PANEL);
        }
    }
    finish_job(w, num_blocks * runs * parts);
}

/* ---- attention -------------------------------------------------------------------------------------------------- */

static void attend(Worker *w, const Run *r, const Op *op) {
    const Program *p = r->program;
    const Tokens *tokens = &r->rows->tokens;
    Step *s = r->step;
    const long place = (long)op->layer * p->num_kv_heads * tokens->block_size * p->head_dim * value_bytes(s->is_short);
    const Attention a = {.k = s->k + place, .v = s->v + place, .block_bytes = s->block_bytes, .is_short = s->is_short,
                         .num_heads = p->num_heads, .num_kv_heads = p->num_kv_heads, .head_dim = p->head_dim,
                         .window = op->choice, .scale = op->scale, .softcap = op->cap};
    const int is_split = r->rows->num_splits > 0;
    const long splits = is_split ? r->rows->num_splits : 1, num = (long)tokens->num_crews * a.num_kv_heads * splits;
    const AttentionJob job = {.t = tokens, .a = &a, .q = s->buffers[op->in], .ldq = p->strides[op->in],
                              .out = s->buffers[op->out], .ldo = p->strides[op->out],
                              .worker = w, .num_pieces = num, .num_splits = splits};
    begin_job(w);
    void *scratch = scratch_of(w, crew_bytes(&a, tokens->block_size));
    FOR_PIECES(w, number, num) {
        if (!scratch) { atomic_store(&s->failed, 1); continue; }
        const Piece piece = piece_at(&job, number);
        if (is_split) attend_part(&job, &piece, s->parts, scratch);
        else attend_crew(&job, &piece, scratch);
    }
    finish_job(w, num);
    if (!is_split) return;
    begin_job(w);
    FOR_PIECES(w, token, tokens->num_tokens) {
        if (!scratch) { atomic_store(&s->failed, 1); continue; }
        for (long h = 0; h < a.num_heads; h++) merge_parts(&job, token, h, s->parts, scratch);
    }
    finish_job(w, tokens->num_tokens);
}

/* ---- recurrent states -------------------------------------------------------------------------------------------- */

static void keep_all_inputs(Worker *w, const Run *r, const Op *op) {
    const States *s = &r->step->states;
    begin_job(w);
    FOR_PIECES(w, row, s->num_rows)
        keep_row_inputs(s, row, op->state, op->dim, r->step->buffers[op->in], r->program->strides[op->in],
                        r->program->widths[op->out]);
    finish_job(w, s->num_rows);
}

static void gated_delta(Worker *w, const Run *r, const Op *op) {
    const Program *p = r->program;
    const States *s = &r->step->states;
    const long dk = op->dim, dv = p->widths[op->out] / op->num_values, groups = (dv + COLUMNS - 1) / COLUMNS;
    const float *x = r->step->buffers[op->in], *more = r->step->buffers[op->in2];
    const long num = s->num_rows * op->num_values * groups;
    begin_job(w);
    FOR_PIECES(w, piece, num) {
        const long h = piece / groups % op->num_values, c = piece % groups * COLUMNS;
        const long each = op->num_values / op->num_keys;
        const long key = (op->choice ? h % op->num_keys : h / each) * dk, value = h * dv + c;
        const Delta d = {.q = x + key, .k = x + op->num_keys * dk + key, .v = x + 2 * op->num_keys * dk + value,
                         .decay = more + op->column + h, .beta = more + op->column2 + h,
                         .out = r->step->buffers[op->out] + value, .ldx = p->strides[op->in],
                         .ldy = p->strides[op->in2], .ldo = p->strides[op->out], .dk = dk,
                         .columns = dv - c < COLUMNS ? dv - c : COLUMNS};
        delta_row(s, piece / (groups * op->num_values), op->state + (h * dv + c) * dk, &d);
    }
    finish_job(w, num);
}

/* ---- running ---------------------------------------------------------------------------------------------------- */

/* Move the kept rows to the front of up to three buffers. */
static void keep(Worker *w, const Run *r, const Op *op) {
    const Step *s = r->step;
    const int buffers[3] = {op->in, op->in2, op->out};
    begin_job(w);
    FOR_PIECES(w, piece, 3)
        for (long i = 0; buffers[piece] >= 0 && i < s->kept.tokens.num_tokens; i++)
            if (s->keep[i] != i)
                memcpy(row_of(r, buffers[piece], i), row_of(r, buffers[piece], s->keep[i]),
                       4 * (size_t)r->program->widths[buffers[piece]]);
    finish_job(w, 3);
}

static void run_op(Worker *w, const Run *r, const Op *op) {
    const Program *p = r->program;
    const long num_tokens = r->rows->tokens.num_tokens;
    Step *s = r->step;
    if (op->kind == MATMUL) {
        const Product product = {.matrices = p->matrices + op->matrix, .num_matrices = op->num_matrices,
                                 .x = s->buffers[op->in], .ldx = p->strides[op->in], .num_rows = num_tokens,
                                 .out = s->buffers[op->out], .ldo = p->strides[op->out], .bias = op->weight,
                                 .add = op->flags & ADD, .adapter = r->rows->adapter,
                                 .first_matrix = op->matrix};
        multiply(w, &product, s);
    } else if (op->kind == ATTEND) {
        attend(w, r, op);
    } else if (op->kind == KEEP) {
        keep(w, r, op);
    } else {
        const long num = (num_tokens + ROWS_A_PIECE - 1) / ROWS_A_PIECE;
        begin_job(w);
        FOR_PIECES(w, piece, num)
            for (long t = piece * ROWS_A_PIECE; t < (piece + 1) * ROWS_A_PIECE && t < num_tokens; t++) do_row(r, op, t);
        finish_job(w, num);
        if (op->kind == CONVOLVE) keep_all_inputs(w, r, op);
        else if (op->kind == DELTA) gated_delta(w, r, op);
    }
}

typedef struct { const Program *program; Step *step; } Part;
typedef struct { Part parts[2]; int num_parts; } Parts;

static void run_part(Worker *w, const Part *part) {
    Run run = {part->program, part->step, &part->step->all};
    for (long i = 0; i < part->program->num_ops; i++) {
        run_op(w, &run, &part->program->ops[i]);
        if (part->program->ops[i].kind == KEEP) run.rows = &part->step->kept;
    }
}

static void run_body(Worker *w, void *argument) {
    const Parts *parts = argument;
    for (int i = 0; i < parts->num_parts; i++) run_part(w, &parts->parts[i]);
}

/* Run a program, then `then` unless NULL. Returns 0, or -1 if memory ran out or there are too many operations. */
int nano_run(Pool *pool, const Program *program, Step *step, const Program *then, Step *then_step) {
    Parts parts = {{{program, step}, {then, then_step}}, then ? 2 : 1};
    const int64_t num_ops = program->num_ops + (then ? then->num_ops : 0);
    const int jobs = step->all.adapter ? 3 : 2;          /* of an operation, at most */
    if (jobs * num_ops > MAX_JOBS) return -1;
    step->failed = 0;
    if (then) then_step->failed = 0;
    pool_run(pool, jobs * (int)num_ops, run_body, &parts);
    return step->failed || (then && then_step->failed) ? -1 : 0;
}

/* ---- drawing ---------------------------------------------------------------------------------------------------- */

typedef struct { const Draws *draws; int64_t num_rows; _Atomic int failed; } DrawRun;

static void draw_body(Worker *w, void *argument) {
    DrawRun *r = argument;
    begin_job(w);
    const Draws *d = r->draws;
    const size_t num_weights = (size_t)((d->vocab_size + BLOCK - 1) / BLOCK + 7) / 8 * 8;
    double *weights = scratch_of(w, 8 * num_weights + (d->special ? special_bytes(d->vocab_size) : 0));
    FOR_PIECES(w, row, r->num_rows) {
        if (!weights) atomic_store(&r->failed, 1);
        else if (d->special && d->special[row]) sample_special(d, row, d->special[row], weights, weights + num_weights);
        else sample_row(d, row, weights);
    }
    finish_job(w, r->num_rows);
}

int nano_draw(Pool *pool, const Draws *draws, int64_t num_rows) {
    DrawRun run = {draws, num_rows, 0};
    pool_run(pool, 1, draw_body, &run);
    return run.failed ? -1 : 0;
}

typedef struct { const Sums *sums; int64_t num_rows; } SumRun;

static void sum_body(Worker *w, void *argument) {
    const SumRun *r = argument;
    begin_job(w);
    FOR_PIECES(w, row, r->num_rows) sum_row(r->sums, row);
    finish_job(w, r->num_rows);
}

void nano_normalise(Pool *pool, const Sums *sums, int64_t num_rows) {
    SumRun run = {sums, num_rows};
    pool_run(pool, 1, sum_body, &run);
}

/* ---- planning --------------------------------------------------------------------------------------------------- */

typedef struct { const int32_t *table; int32_t num_blocks, token; } Decoding;

static int by_table(const void *a_, const void *b_) {
    const Decoding *a = a_, *b = b_;
    const int32_t n = a->num_blocks < b->num_blocks ? a->num_blocks : b->num_blocks;
    for (int32_t i = 0; i < n; i++)
        if (a->table[i] != b->table[i]) return a->table[i] < b->table[i] ? -1 : 1;
    if (a->num_blocks != b->num_blocks) return a->num_blocks < b->num_blocks ? -1 : 1;
    return a->token < b->token ? -1 : 1;
}

/* Number of tokens from `first` on that are consecutive in one sequence. */
static int32_t run_length(const Tokens *t, int32_t first) {
    int32_t n = 1;
    while (first + n < t->num_tokens && t->table_of[first + n] == t->table_of[first] &&
           t->position[first + n] == t->position[first] + n) n++;
    return n;
}

/* Form the crews: decode tokens whose block tables start with the same block, and the tokens of a chunk in order.
 * Returns 0, or -1 if memory ran out. */
static int form_crews(Tokens *t, int32_t *order, int32_t *crews) {
    Decoding *rows = malloc(sizeof(Decoding) * (t->num_tokens + 1));
    if (!rows) return -1;
    int32_t num_rows = 0, num_crews = 0, placed = 0;
    for (int32_t i = 0, n; i < t->num_tokens; i += n) {
        n = run_length(t, i);
        if (n == 1) rows[num_rows++] = (Decoding){t->tables + t->table_of[i], t->position[i] / t->block_size + 1, i};
    }
    qsort(rows, num_rows, sizeof *rows, by_table);
    for (int32_t i = 0; i < num_rows; i++) {
        const int is_new = i == 0 || rows[i].table[0] != rows[i - 1].table[0] || placed - crews[num_crews - 1] == CREW;
        if (is_new) crews[num_crews++] = placed;
        order[placed++] = rows[i].token;
    }
    free(rows);
    for (int32_t first = 0, n; first < t->num_tokens; first += n) {
        n = run_length(t, first);
        for (int32_t i = 0; n > 1 && i < n; i++) {
            if (i % CREW == 0) crews[num_crews++] = placed;
            order[placed++] = first + i;
        }
    }
    crews[num_crews] = placed;
    t->num_crews = num_crews;
    t->order = order;
    t->crews = crews;
    return 0;
}

/* Decide whether splits are separate pieces of work: for at most `few` long rows, too few to occupy all threads. Sums
 * are the same either way. Returns the number of floats of `parts`. */
static int64_t choose_splits(Rows *rows, const Program *p, int num_threads, int32_t few) {
    const Tokens *t = &rows->tokens;
    int32_t longest = 0;
    for (int32_t i = 0; i < t->num_tokens; i++) if (t->position[i] >= longest) longest = t->position[i] + 1;
    const int64_t size = nano_split_size(t->block_size), num_splits = (longest + size - 1) / size;
    const int is_cut = t->num_tokens <= few && num_splits > 1 &&
                       t->num_crews * p->num_kv_heads < 4 * num_threads;
    rows->num_splits = is_cut ? num_splits : 0;
    return is_cut ? t->num_tokens * p->num_heads * num_splits * (p->head_dim + 2) : 0;
}

/* Compute the positions, block tables and crews of a step's tokens and of the kept ones. A step is a sequence of spans,
 * each with its number of tokens, first position and start of its block table. `room` has space for 4 (all + kept) + 2
 * numbers; `few`: see `choose_splits`. Returns the number of floats of the step's `parts`, or -1 if memory ran out. */
int64_t nano_plan(const Program *program, Step *step, int32_t num_threads, int64_t num_spans,
                  const int32_t *num_tokens, const int32_t *start, const int32_t *table_begin, const int32_t *tables,
                  int32_t block_size, const int32_t *keep, int32_t num_kept, int32_t few, int32_t *room) {
    int32_t t = 0, total = 0;
    for (int64_t s = 0; s < num_spans; s++) total += num_tokens[s];
    int32_t *position = room, *table_of = position + total, *order = table_of + total, *crews = order + total;
    for (int64_t s = 0; s < num_spans; s++)
        for (int32_t i = 0; i < num_tokens[s]; i++, t++) {
            position[t] = start[s] + i;
            table_of[t] = table_begin[s];
        }
    step->all.tokens = (Tokens){.num_tokens = total, .block_size = block_size, .position = position,
                                .table_of = table_of, .tables = tables};
    if (form_crews(&step->all.tokens, order, crews)) return -1;
    const int64_t floats = choose_splits(&step->all, program, num_threads, few);
    step->keep = keep;
    step->kept = step->all;
    if (num_kept == total) return floats;
    int32_t *kept_position = crews + total + 1, *kept_table = kept_position + num_kept;
    for (int32_t i = 0; i < num_kept; i++) {
        kept_position[i] = position[keep[i]];
        kept_table[i] = table_of[keep[i]];
    }
    step->kept.tokens = (Tokens){.num_tokens = num_kept, .block_size = block_size, .position = kept_position,
                                 .table_of = kept_table, .tables = tables};
    if (form_crews(&step->kept.tokens, kept_table + num_kept, kept_table + 2 * num_kept)) return -1;
    const int64_t more = choose_splits(&step->kept, program, num_threads, few);
    return floats > more ? floats : more;
}

/* Fault in the whole pages within [begin, begin + bytes). Returns 0, or -1 if the system does not support it. */
int nano_populate(char *begin, int64_t bytes) {
#if defined(MADV_POPULATE_WRITE)
    const uintptr_t page = 4096, at = (uintptr_t)begin;
    const uintptr_t first = (at + page - 1) & -page, last = (at + bytes) & -page;
    return last > first ? madvise((void *)first, last - first, MADV_POPULATE_WRITE) : 0;
#else
    (void)begin; (void)bytes;
    return -1;
#endif
}

const char *nano_isa(void) { return ISA_NAME; }
int nano_has_vnni(void) { return HAS_VNNI; }
int64_t nano_sizes(int which) {          /* checked against the ctypes structures (library.py) */
    switch (which) {
    case 0: return sizeof(Op);
    case 1: return sizeof(Program);
    case 2: return sizeof(Step);
    case 3: return sizeof(Matrix);
    case 4: return sizeof(Rope);
    case 5: return sizeof(Draws);
    case 6: return sizeof(Tokens);
    case 7: return sizeof(Sums);
    case 8: return sizeof(Special);
    case 9: return sizeof(LowRank);
    default: return -1;
    }
}
