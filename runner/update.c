/* The update and the norm on a CPU, one pass over memory each.
 *
 * Every arithmetic step is written out: the compiler must contract nothing (-ffp-contract=off), so
 * that these loops, the torch reference and the CUDA kernels give the same bits.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "team.h"

#define LANES 32
#define BLOCK 2048

typedef struct {
    float scale, lr, beta1, beta2, correction1, correction2, eps;
} Step;

/* One rank's part of one slot: `rows` layers of `cols` elements. master may be null. */
typedef struct {
    void *param;
    const float *grad;
    float *m, *v, *master;
    int64_t rows, cols, param_stride, grad_stride, start;
    float decay;
    uint32_t seed;
} Part;

static inline float step_of(float old, float grad, float *m, float *v, const Step *s, float decay) {
    float g = s->scale * grad;
    float gg = g * g;
    float m1 = fmaf(s->beta1, *m, fmaf(-s->beta1, g, g));
    float v1 = fmaf(s->beta2, *v, fmaf(-s->beta2, gg, gg));
    *m = m1;
    *v = v1;
    float mh = m1 / s->correction1;
    float vh = v1 / s->correction2;
    return old - s->lr * (mh / (sqrtf(vh) + s->eps) + decay * old);
}

static inline uint32_t squirrel(uint32_t position, uint32_t seed) {
    uint32_t k = position * 0xD2A80A3Fu;
    k += seed;
    k ^= k >> 9;
    k += 0xA884F197u;
    k ^= k >> 11;
    k *= 0x6C736F4Bu;
    k ^= k >> 13;
    k += 0xB79F3ABBu;
    k ^= k >> 15;
    k *= 0x1B56C4F5u;
    k ^= k >> 17;
    return k;
}

static inline uint16_t round_stochastic(float x, uint32_t noise) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t kept = (bits & 0xFFFFu) > (noise & 0xFFFFu) ? bits | 0xFFFFu : bits & ~0xFFFFu;
    uint32_t nearest = (kept + 0x7FFFu + ((kept >> 16) & 1u)) >> 16;
    return (kept & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : (uint16_t)nearest;
}

static inline float widen(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

static inline uint32_t position_of(uint32_t i, uint32_t layer) {
    return (i & 511u) + 198491317u * ((i & ~511u) + layer);
}

static void row_f32(float *restrict p, const float *restrict g, float *restrict m, float *restrict v,
                    int64_t n, const Step *s, float decay) {
    for (int64_t i = 0; i < n; i++)
        p[i] = step_of(p[i], g[i], &m[i], &v[i], s, decay);
}

static void row_master(uint16_t *restrict p, const float *restrict g, float *restrict m, float *restrict v,
                       float *restrict master, int64_t n, const Step *s, float decay, uint32_t first,
                       uint32_t layer, uint32_t seed) {
    for (int64_t i = 0; i < n; i++) {
        float x = step_of(master[i], g[i], &m[i], &v[i], s, decay);
        master[i] = x;
        p[i] = round_stochastic(x, squirrel(position_of(first + (uint32_t)i, layer), seed));
    }
}

static void row_bf16(uint16_t *restrict p, const float *restrict g, float *restrict m, float *restrict v,
                     int64_t n, const Step *s, float decay, uint32_t first, uint32_t layer, uint32_t seed) {
    for (int64_t i = 0; i < n; i++) {
        float x = step_of(widen(p[i]), g[i], &m[i], &v[i], s, decay);
        p[i] = round_stochastic(x, squirrel(position_of(first + (uint32_t)i, layer), seed));
    }
}

typedef struct {
    const Part *parts;
    int64_t count;
    const Step *step;
    int64_t half;
} Update;

static void adamw_share(const void *arguments, int64_t share, int64_t shares) {
    const Update *u = arguments;
    const Step *s = u->step;
    for (int64_t k = 0; k < u->count; k++) {
        const Part *part = &u->parts[k];
        int64_t from = part->cols * share / shares, n = part->cols * (share + 1) / shares - from;
        for (int64_t row = 0; row < part->rows; row++) {
            int64_t at = row * part->cols + from, to = row * part->param_stride + from;
            const float *g = part->grad + row * part->grad_stride + from;
            float *m = part->m + at, *v = part->v + at;
            if (!u->half)
                row_f32((float *)part->param + to, g, m, v, n, s, part->decay);
            else if (part->master)
                row_master((uint16_t *)part->param + to, g, m, v, part->master + at, n, s, part->decay,
                           (uint32_t)(part->start + from), (uint32_t)row, part->seed);
            else
                row_bf16((uint16_t *)part->param + to, g, m, v, n, s, part->decay, (uint32_t)(part->start + from),
                         (uint32_t)row, part->seed);
        }
    }
}

/* Update every part; `half` says that the weights are bfloat16. */
void runner_adamw(const Part *parts, int64_t count, const Step *s, int64_t half, int64_t threads) {
    Update update = {parts, count, s, half};
    int64_t elements = 0;
    for (int64_t k = 0; k < count; k++)
        elements += parts[k].rows * parts[k].cols;
    spread(adamw_share, &update, elements, threads);
}

/* Add x[n] in halves: the element `half` on is added to the first, half the least power of two >= n/2. */
static double fold(double *x, int64_t n) {
    int64_t half = 1;
    while (half * 2 < n)
        half *= 2;
    for (; n > 1; n = half, half /= 2)
        for (int64_t j = 0; j + half < n; j++)
            x[j] += x[j + half];
    return x[0];
}

static double block_sum(const float *restrict x, int64_t n) {
    double lane[LANES] = {0};
    int64_t whole = n / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int64_t j = 0; j < LANES; j++)
            lane[j] += (double)x[i + j] * (double)x[i + j];
    for (int64_t j = 0; j < n - whole; j++)
        lane[j] += (double)x[whole + j] * (double)x[whole + j];
    return fold(lane, LANES);
}

typedef struct {
    const float *x;
    const int64_t *offset, *length;
    double *out, *scratch;
    int64_t chunks, blocks, elements;
} Sums;

static void sums_share(const void *arguments, int64_t share, int64_t shares) {
    const Sums *a = arguments;
    double *scratch = a->scratch + share * a->blocks;
    int64_t from = a->elements * share / shares, to = a->elements * (share + 1) / shares, at = 0;
    for (int64_t c = 0; c < a->chunks; at += a->length[c++]) {
        int64_t blocks = 0;
        if (at < from || (at >= to && share + 1 < shares)) /* a chunk is whose share it begins in */
            continue;
        scratch[0] = 0.0;
        for (int64_t i = 0; i < a->length[c]; i += BLOCK)
            scratch[blocks++] =
                block_sum(a->x + a->offset[c] + i, a->length[c] - i < BLOCK ? a->length[c] - i : BLOCK);
        a->out[c] = fold(scratch, blocks);
    }
}

/* Sums of squares of chunks; chunk c is length[c] floats at x + offset[c]. `scratch` has room for the
 * `blocks` block sums of the longest chunk, for each thread. */
void runner_square_sums(const float *x, const int64_t *offset, const int64_t *length, double *out, double *scratch,
                        int64_t chunks, int64_t blocks, int64_t threads) {
    Sums sums = {x, offset, length, out, scratch, chunks, blocks, 0};
    for (int64_t c = 0; c < chunks; c++)
        sums.elements += length[c];
    spread(sums_share, &sums, sums.elements, threads);
}
