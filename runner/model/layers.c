/* The parts of a layer that are not matrix products, one pass over memory each.
 *
 * Values are float or bfloat16 in memory and float in registers. Sums run over fixed lanes and fixed blocks
 * of rows, so that no result depends on the number of threads. They agree with the torch definitions to
 * rounding, not to the bit: which of the two ran is kept in the manifest.
 *
 * Legend: R rows, C columns; type 0 float, 1 bfloat16.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif
#include "../team.h"

#define W 16
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t veci __attribute__((vector_size(4 * W)));
typedef uint32_t vecu __attribute__((vector_size(4 * W)));
typedef uint16_t half __attribute__((vector_size(2 * W)));
typedef float vec_at __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint16_t half_at __attribute__((vector_size(2 * W), aligned(2), may_alias));

/* ---- lanes ---- */

#define LANES ((veci){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
#ifdef __clang__
#define SWAP(x, s)                                                                                                  \
    __builtin_shufflevector(x, x, 0 ^ s, 1 ^ s, 2 ^ s, 3 ^ s, 4 ^ s, 5 ^ s, 6 ^ s, 7 ^ s, 8 ^ s, 9 ^ s, 10 ^ s,       \
                            11 ^ s, 12 ^ s, 13 ^ s, 14 ^ s, 15 ^ s)
#else
#define SWAP(x, s) __builtin_shuffle(x, LANES ^ s) /* lane i and lane i ^ s change places */
#endif

INLINE vec all(float x) { return x - (vec){0}; }

INLINE vec choose(veci mask, vec a, vec b) { return (vec)(((veci)a & mask) | ((veci)b & ~mask)); }

INLINE vec widen(half h) { return (vec)(__builtin_convertvector(h, vecu) << 16); }

INLINE half narrow(vec x) {
#ifdef __AVX512BF16__
    return (half)_mm512_cvtneps_pbh((__m512)x);
#else
    vecu bits = (vecu)x;
    vecu nearest = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    veci nan = x != x;
    return __builtin_convertvector((nearest & ~(vecu)nan) | (0x7FC0u & (vecu)nan), half);
#endif
}

INLINE vec load_whole(const void *x, int64_t i, const int type) {
    return type ? widen(*(const half_at *)((const uint16_t *)x + i)) : (vec) * (const vec_at *)((const float *)x + i);
}

/* Element i on of x; `left` elements are there, lanes beyond them hold `fill`. */
INLINE vec load(const void *x, int64_t i, int64_t left, float fill, const int type) {
    if (left >= W)
        return load_whole(x, i, type);
    char lanes[4 * W];
    memcpy(lanes, (const char *)x + i * (type ? 2 : 4), left * (type ? 2 : 4));
    return choose(LANES < (int32_t)left, load_whole(lanes, 0, type), all(fill));
}

INLINE void store_whole(void *x, int64_t i, vec value, const int type) {
    if (type)
        *(half_at *)((uint16_t *)x + i) = narrow(value);
    else
        *(vec_at *)((float *)x + i) = value;
}

INLINE void store(void *x, int64_t i, int64_t left, vec value, const int type) {
    if (left >= W) {
        store_whole(x, i, value, type);
        return;
    }
    char lanes[4 * W];
    store_whole(lanes, 0, value, type);
    memcpy((char *)x + i * (type ? 2 : 4), lanes, left * (type ? 2 : 4));
}

/* The larger of each lane, NaN if either is. */
INLINE vec larger(vec a, vec b) { return choose((a > b) | (a != a), a, b); }

INLINE float sum(vec x) {
    x += SWAP(x, 8);
    x += SWAP(x, 4);
    x += SWAP(x, 2);
    x += SWAP(x, 1);
    return x[0];
}

INLINE float most(vec x) {
    x = larger(x, SWAP(x, 8));
    x = larger(x, SWAP(x, 4));
    x = larger(x, SWAP(x, 2));
    x = larger(x, SWAP(x, 1));
    return x[0];
}

/* exp(x) of x <= 88 with a relative error below 2e-7; 0 below -87, NaN stays. */
INLINE vec exponential(vec x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vec shifted = x * 1.44269504088896341f + magic;
    vec n = shifted - magic;
    vec r = x - n * 0.693359375f; /* ln 2 in two parts, the first exact times n */
    r = r + n * 2.12194440054690583e-4f;
    vec p = all(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    vec power = (vec)(((vecu)shifted << 23) + (127u << 23));
    return choose(x < -87.0f, all(0.0f), p * power);
}

/* 1 / (1 + e) of e = exp(-x); below -87 the exponential is not to be trusted, and the result is 0. */
INLINE vec sigmoid_of(vec e, vec x) { return choose(x < -87.0f, all(0.0f), 1.0f / (1.0f + e)); }

INLINE vec sigmoid(vec x) { return sigmoid_of(exponential(-x), x); }

INLINE size_t size_of(const int type) { return type ? 2 : 4; }

INLINE const void *row_of(const void *x, int64_t at, const int type) { return (const char *)x + at * size_of(type); }

/* ---- layer norm and RMS norm ---- */

#define BLOCK 32 /* rows whose weight gradients are added before the blocks are */

typedef struct {
    const void *x, *delta;
    const float *weight, *bias;
    void *sum, *y;
    float *mean, *rstd;
    int64_t rows, cols;
    float eps;
    int64_t x_type, delta_type, y_type;
} Norm;

INLINE void norm_rows(const Norm *a, int64_t from, int64_t to, const int xt, const int dt, const int yt) {
    const int64_t C = a->cols;
    for (int64_t row = from; row < to; row++) {
        const void *x = row_of(a->x, row * C, xt);
        vec total = {0}, squares = {0};
        if (a->delta) { /* the residual stream moves on first */
            const void *delta = row_of(a->delta, row * C, dt);
            void *moved = (void *)row_of(a->sum, row * C, xt);
            for (int64_t i = 0; i < C; i += W)
                store(moved, i, C - i, load(x, i, C - i, 0, xt) + load(delta, i, C - i, 0, dt), xt);
            x = moved;
        }
        float mean = 0;
        if (a->mean) {
            for (int64_t i = 0; i < C; i += W)
                total += load(x, i, C - i, 0, xt);
            mean = a->mean[row] = sum(total) / (float)C;
        }
        for (int64_t i = 0; i < C; i += W) {
            vec centred = load(x, i, C - i, mean, xt) - mean;
            squares += centred * centred;
        }
        float rstd = a->rstd[row] = 1.0f / sqrtf(sum(squares) / (float)C + a->eps);
        void *y = (void *)row_of(a->y, row * C, yt);
        for (int64_t i = 0; i < C; i += W) {
            vec normed = (load(x, i, C - i, mean, xt) - mean) * rstd * load(a->weight, i, C - i, 0, 0);
            store(y, i, C - i, a->bias ? normed + load(a->bias, i, C - i, 0, 0) : normed, yt);
        }
    }
}

static void norm_share(const void *arguments, int64_t share, int64_t shares) {
    const Norm *a = arguments;
    int64_t from = a->rows * share / shares, to = a->rows * (share + 1) / shares;
    switch (a->x_type * 4 + a->delta_type * 2 + a->y_type) {
    case 0: norm_rows(a, from, to, 0, 0, 0); break;
    case 1: norm_rows(a, from, to, 0, 0, 1); break;
    case 2: norm_rows(a, from, to, 0, 1, 0); break;
    case 3: norm_rows(a, from, to, 0, 1, 1); break;
    case 7: norm_rows(a, from, to, 1, 1, 1); break;
    }
}

/* y = norm(x) or, with a `delta`, sum = x + delta and y = norm(sum); an RMS norm where `mean` is null. */
void runner_norm(const Norm *a, int64_t threads) { spread(norm_share, a, a->rows * a->cols, threads); }

typedef struct {
    const void *dy, *carry, *x;
    const float *weight, *mean, *rstd;
    void *dx, *ddelta;
    float *partial; /* [blocks, 2, C] */
    int64_t rows, cols;
    int64_t x_type, delta_type, y_type;
} NormBack;

INLINE void norm_back_row(const NormBack *a, int64_t row, float *dw, float *db, const int xt, const int dt,
                          const int yt) {
    const int64_t C = a->cols;
    const void *x = row_of(a->x, row * C, xt), *dy = row_of(a->dy, row * C, yt);
    const void *carry = a->carry ? row_of(a->carry, row * C, xt) : NULL;
    float mean = a->mean ? a->mean[row] : 0, rstd = a->rstd[row];
    vec total = {0}, overlap = {0};
    for (int64_t i = 0; i < C; i += W) {
        vec d = load(dy, i, C - i, 0, yt);
        vec normed = (load(x, i, C - i, mean, xt) - mean) * rstd;
        vec g = d * load(a->weight, i, C - i, 0, 0);
        total += g;
        overlap += g * normed;
        store(dw, i, C - i, load(dw, i, C - i, 0, 0) + d * normed, 0);
        if (a->mean)
            store(db, i, C - i, load(db, i, C - i, 0, 0) + d, 0);
    }
    float average = a->mean ? sum(total) / (float)C : 0, projection = sum(overlap) / (float)C;
    void *dx = (void *)row_of(a->dx, row * C, xt);
    for (int64_t i = 0; i < C; i += W) {
        vec normed = (load(x, i, C - i, mean, xt) - mean) * rstd;
        vec g = load(dy, i, C - i, 0, yt) * load(a->weight, i, C - i, 0, 0);
        vec d = (g - average - normed * projection) * rstd;
        if (carry)
            d += load(carry, i, C - i, 0, xt);
        store(dx, i, C - i, d, xt);
        if (a->ddelta)
            store((void *)row_of(a->ddelta, row * C, dt), i, C - i, d, dt);
    }
}

static void norm_back_share(const void *arguments, int64_t share, int64_t shares) {
    const NormBack *a = arguments;
    int64_t blocks = (a->rows + BLOCK - 1) / BLOCK;
    for (int64_t block = blocks * share / shares; block < blocks * (share + 1) / shares; block++) {
        float *dw = a->partial + block * 2 * a->cols, *db = dw + a->cols;
        memset(dw, 0, 2 * a->cols * sizeof(float));
        int64_t end = (block + 1) * BLOCK < a->rows ? (block + 1) * BLOCK : a->rows;
        for (int64_t row = block * BLOCK; row < end; row++)
            switch (a->x_type * 4 + a->delta_type * 2 + a->y_type) {
            case 0: norm_back_row(a, row, dw, db, 0, 0, 0); break;
            case 1: norm_back_row(a, row, dw, db, 0, 0, 1); break;
            case 2: norm_back_row(a, row, dw, db, 0, 1, 0); break;
            case 3: norm_back_row(a, row, dw, db, 0, 1, 1); break;
            case 7: norm_back_row(a, row, dw, db, 1, 1, 1); break;
            }
    }
}

/* Gradients of `runner_norm`; those of weight and bias end up in partial[0]. */
void runner_norm_back(const NormBack *a, int64_t threads) {
    spread(norm_back_share, a, a->rows * a->cols, threads);
    int64_t blocks = (a->rows + BLOCK - 1) / BLOCK, n = 2 * a->cols;
    for (int64_t block = 1; block < blocks; block++)
        for (int64_t i = 0; i < n; i++)
            a->partial[i] += a->partial[block * n + i];
}

/* ---- activations ---- */

typedef struct {
    const void *x, *dy;
    void *y, *slope;
    int64_t rows, cols, type;
} Activation;

INLINE void gelu_range(const Activation *a, int64_t from, int64_t to, const int type) {
    const float factor = 1.5957691216057308f, cubic = 0.044715f; /* 2 sqrt(2 / pi) */
    for (int64_t i = from; i < to; i += W) {
        vec x = load(a->x, i, to - i, 0, type), square = x * x;
        vec u = x * (factor + factor * cubic * square); /* (1 + tanh(u / 2)) / 2 = 1 / (1 + exp(-u)) */
        vec e = exponential(-u), gate = sigmoid_of(e, u);
        vec bend = x * (e * gate * gate) * (factor + 3 * factor * cubic * square);
        veci flat = (u < -87.0f) | (u > 87.0f); /* there bend is 0, not inf * 0 */
        store(a->y, i, to - i, x * gate, type);
        store(a->slope, i, to - i, gate + choose(flat, all(0.0f), bend), type);
    }
}

static void gelu_share(const void *arguments, int64_t share, int64_t shares) {
    const Activation *a = arguments;
    int64_t lanes = (a->cols + W - 1) / W;
    int64_t from = lanes * share / shares * W, to = lanes * (share + 1) / shares * W;
    to = to < a->cols ? to : a->cols;
    if (a->type)
        gelu_range(a, from, to, 1);
    else
        gelu_range(a, from, to, 0);
}

/* y = gelu(x) of `cols` elements, and its derivative. */
void runner_gelu(const Activation *a, int64_t threads) { spread(gelu_share, a, a->cols, threads); }

INLINE void swiglu_rows(const Activation *a, int64_t from, int64_t to, const int type) {
    const int64_t F = a->cols;
    for (int64_t row = from; row < to; row++) {
        const void *gate = row_of(a->x, row * 2 * F, type), *up = row_of(gate, F, type);
        void *y = (void *)row_of(a->y, row * F, type);
        for (int64_t i = 0; i < F; i += W) {
            vec g = load(gate, i, F - i, 0, type);
            store(y, i, F - i, g * sigmoid(g) * load(up, i, F - i, 0, type), type);
        }
    }
}

INLINE void swiglu_back_rows(const Activation *a, int64_t from, int64_t to, const int type) {
    const int64_t F = a->cols;
    for (int64_t row = from; row < to; row++) {
        const void *gate = row_of(a->x, row * 2 * F, type), *up = row_of(gate, F, type);
        const void *dy = row_of(a->dy, row * F, type);
        void *dgate = (void *)row_of(a->y, row * 2 * F, type), *dup = (void *)row_of(dgate, F, type);
        for (int64_t i = 0; i < F; i += W) {
            vec g = load(gate, i, F - i, 0, type), d = load(dy, i, F - i, 0, type);
            vec s = sigmoid(g), silu = g * s;
            store(dup, i, F - i, d * silu, type);
            store(dgate, i, F - i, d * load(up, i, F - i, 0, type) * (s + silu * (1.0f - s)), type);
        }
    }
}

static void swiglu_share(const void *arguments, int64_t share, int64_t shares) {
    const Activation *a = arguments;
    int64_t from = a->rows * share / shares, to = a->rows * (share + 1) / shares;
    if (a->dy)
        a->type ? swiglu_back_rows(a, from, to, 1) : swiglu_back_rows(a, from, to, 0);
    else
        a->type ? swiglu_rows(a, from, to, 1) : swiglu_rows(a, from, to, 0);
}

/* y [R, F] = silu(gate) * up of x [R, 2F]; with a `dy`, y [R, 2F] is the gradient of x. */
void runner_swiglu(const Activation *a, int64_t threads) { spread(swiglu_share, a, a->rows * a->cols, threads); }

/* ---- attention ---- */

typedef struct {
    void *scores;
    const void *weights;
    int64_t batch, queries, keys, start;
    float scale;
    int64_t type;
} Softmax;

/* Lanes i on of a row, of which the first `seen` count and the others hold `fill`. */
INLINE vec load_seen(const void *row, int64_t i, int64_t seen, int64_t keys, float fill, const int type) {
    vec x = load(row, i, keys - i, fill, type);
    return i + W <= seen ? x : choose(LANES < (int32_t)(seen - i), x, all(fill));
}

INLINE void clear(void *row, int64_t from, int64_t to, const int type) {
    if (from < to)
        memset((char *)row + from * size_of(type), 0, (to - from) * size_of(type));
}

/* Query `start + i` sees the keys up to itself; the other weights are 0. */
INLINE void softmax_row(void *scores, int64_t seen, int64_t keys, float scale, const int type) {
    vec top = all(-INFINITY), total = {0};
    for (int64_t i = 0; i < seen; i += W)
        top = larger(load_seen(scores, i, seen, keys, -INFINITY, type), top);
    float peak = most(top);
    for (int64_t i = 0; i < seen; i += W)
        total += exponential((load_seen(scores, i, seen, keys, -INFINITY, type) - peak) * scale);
    float share = 1.0f / sum(total);
    int64_t i = 0;
    for (; i < seen; i += W) {
        vec e = exponential((load_seen(scores, i, seen, keys, -INFINITY, type) - peak) * scale);
        store(scores, i, keys - i, e * share, type);
    }
    clear(scores, i, keys, type);
}

INLINE void softmax_back_row(void *gradient, const void *weights, int64_t seen, int64_t keys, float scale,
                             const int type) {
    vec overlap = {0};
    for (int64_t i = 0; i < seen; i += W)
        overlap += load_seen(gradient, i, seen, keys, 0, type) * load(weights, i, keys - i, 0, type);
    float mean = sum(overlap);
    int64_t i = 0;
    for (; i < seen; i += W) {
        vec d = load_seen(gradient, i, seen, keys, 0, type) - mean;
        store(gradient, i, keys - i, d * load(weights, i, keys - i, 0, type) * scale, type);
    }
    clear(gradient, i, keys, type);
}

INLINE void softmax_rows(const Softmax *a, int64_t from, int64_t to, const int type) {
    for (int64_t row = from; row < to; row++) {
        int64_t seen = a->start + row % a->queries + 1;
        void *scores = (void *)row_of(a->scores, row * a->keys, type);
        if (a->weights)
            softmax_back_row(scores, row_of(a->weights, row * a->keys, type), seen, a->keys, a->scale, type);
        else
            softmax_row(scores, seen, a->keys, a->scale, type);
    }
}

static void softmax_share(const void *arguments, int64_t share, int64_t shares) {
    const Softmax *a = arguments;
    int64_t rows = a->batch * a->queries;
    if (a->type)
        softmax_rows(a, rows * share / shares, rows * (share + 1) / shares, 1);
    else
        softmax_rows(a, rows * share / shares, rows * (share + 1) / shares, 0);
}

/* scores [batch, queries, keys] become causal attention weights; with `weights`, their gradient that of scores. */
void runner_softmax(const Softmax *a, int64_t threads) {
    spread(softmax_share, a, a->batch * a->queries * a->keys, threads);
}

typedef struct {
    void *packed;
    void *parts[3]; /* [B, heads, T, D] each; null parts are skipped */
    const float *cos, *sin;
    int64_t heads[3], turned[3]; /* whether a part is rotated */
    int64_t batch, tokens, dims;
    int64_t packed_row, packed_batch; /* elements from token to token and from sequence to sequence */
    int64_t back, type;
} Heads;

INLINE void turn(const void *from, void *to, const float *cos, const float *sin, int64_t D, float sign,
                 const int type) {
    int64_t half_ = D / 2;
    for (int64_t i = 0; i < half_; i += W) {
        vec a = load(from, i, half_ - i, 0, type), b = load(row_of(from, half_, type), i, half_ - i, 0, type);
        vec c = load(cos, i, half_ - i, 0, 0), s = load(sin, i, half_ - i, 0, 0) * sign;
        store(to, i, half_ - i, a * c - b * s, type);
        store((void *)row_of(to, half_, type), i, half_ - i, b * c + a * s, type);
    }
}

INLINE void head_rows(const Heads *a, int64_t sequence, int64_t part, int64_t head, int64_t first, const int type) {
    const int64_t D = a->dims, T = a->tokens, width = D * (int64_t)size_of(type);
    char *apart = (char *)a->parts[part] + (sequence * a->heads[part] + head) * T * width;
    char *packed = (char *)a->packed + (sequence * a->packed_batch + (first + head) * D) * size_of(type);
    for (int64_t t = 0; t < T; t++) {
        char *here = apart + t * width, *there = packed + t * a->packed_row * size_of(type);
        char *from = a->back ? here : there, *to = a->back ? there : here;
        if (a->turned[part])
            turn(from, to, a->cos + t * D / 2, a->sin + t * D / 2, D, a->back ? -1.0f : 1.0f, type);
        else
            memcpy(to, from, width);
    }
}

static void heads_share(const void *arguments, int64_t share, int64_t shares) {
    const Heads *a = arguments;
    int64_t all_heads = a->heads[0] + a->heads[1] + a->heads[2], count = a->batch * all_heads;
    for (int64_t at = count * share / shares; at < count * (share + 1) / shares; at++) {
        int64_t sequence = at / all_heads, head = at % all_heads, part = 0, first = 0;
        while (head >= a->heads[part]) {
            head -= a->heads[part];
            first += a->heads[part++];
        }
        if (a->type)
            head_rows(a, sequence, part, head, first, 1);
        else
            head_rows(a, sequence, part, head, first, 0);
    }
}

/* Part packed [B, T, heads * D] into heads, some of them rotated; `back` packs and rotates back. */
void runner_heads(const Heads *a, int64_t threads) {
    int64_t all_heads = a->heads[0] + a->heads[1] + a->heads[2];
    spread(heads_share, a, a->batch * all_heads * a->tokens * a->dims, threads);
}

/* ---- loss ---- */

typedef struct {
    void *logits;
    const int64_t *targets;
    float *losses;
    int64_t rows, cols;
    float weight, z_loss; /* of a row's loss in the mean; of the squared log-normaliser in a row's loss */
    int64_t type;
} Loss;

#define RUN 1024 /* elements whose sum stays in single precision */

INLINE void loss_row(const Loss *a, int64_t row, const int type) {
    const int64_t V = a->cols, target = a->targets[row];
    void *logits = (void *)row_of(a->logits, row * V, type);
    vec top = all(-INFINITY);
    for (int64_t i = 0; i < V; i += W)
        top = larger(load(logits, i, V - i, -INFINITY, type), top);
    float peak = most(top);
    double total = 0;
    for (int64_t run = 0; run < V; run += RUN) {
        int64_t end = run + RUN < V ? run + RUN : V;
        vec part = {0};
        for (int64_t i = run; i < end; i += W)
            part += exponential(load(logits, i, end - i, -INFINITY, type) - peak);
        total += (double)sum(part);
    }
    float chosen = load(logits, target, 1, 0, type)[0];
    double normaliser = (double)peak + log(total);
    a->losses[row] = (float)(normaliser - (double)chosen + (double)a->z_loss * normaliser * normaliser);
    float share = (float)((1 + 2 * (double)a->z_loss * normaliser) * (double)a->weight / total);
    float taken = exponential(all(chosen - peak))[0] * share - a->weight;
    for (int64_t i = 0; i < V; i += W)
        store(logits, i, V - i, exponential(load(logits, i, V - i, -INFINITY, type) - peak) * share, type);
    store(logits, target, 1, all(taken), type);
}

static void loss_share(const void *arguments, int64_t share, int64_t shares) {
    const Loss *a = arguments;
    for (int64_t row = a->rows * share / shares; row < a->rows * (share + 1) / shares; row++)
        if (a->type)
            loss_row(a, row, 1);
        else
            loss_row(a, row, 0);
}

/* losses [R] of logits [R, V], which become the gradient of `weight` times their sum. */
void runner_loss(const Loss *a, int64_t threads) { spread(loss_share, a, a->rows * a->cols, threads); }

/* ---- embedding ---- */

typedef struct {
    void *table;
    const int64_t *ids;
    const void *rows;
    int64_t count, cols, type;
} AddRows;

static void add_rows_share(const void *arguments, int64_t share, int64_t shares) {
    const AddRows *a = arguments;
    int64_t lanes = (a->cols + W - 1) / W; /* by columns: every row's sum keeps its order */
    int64_t from = lanes * share / shares * W, to = lanes * (share + 1) / shares * W;
    to = to < a->cols ? to : a->cols;
    for (int64_t row = 0; row < a->count; row++) {
        void *sum = (void *)row_of(a->table, a->ids[row] * a->cols, (int)a->type);
        const void *x = row_of(a->rows, row * a->cols, (int)a->type);
        for (int64_t i = from; i < to; i += W)
            if (a->type)
                store(sum, i, to - i, load(sum, i, to - i, 0, 1) + load(x, i, to - i, 0, 1), 1);
            else
                store(sum, i, to - i, load(sum, i, to - i, 0, 0) + load(x, i, to - i, 0, 0), 0);
    }
}

/* table[ids[r]] += rows[r] for every row in order. */
void runner_add_rows(const AddRows *a, int64_t threads) { spread(add_rows_share, a, a->count * a->cols, threads); }
