/* What one thread does with a few queries, a decode's above all: they read keys and values where they lie, by vectors.
 *
 * Tiles multiply sixteen queries at once and want values turned first: for two or four queries that is mostly work for
 * nothing. A lane is a query; its scores stand side by side, sixteen keys a vector. Knows no jobs.
 */
#pragma once

#include "many_queries.h"

#define FEW 4    /* Queries of one key-value head at most: with eight, tiles are faster. */
#define HEADS 16 /* Key-value heads at once: a token's are neighbours in memory, and are read together. */
#define NEAR 64  /* Keys at a time, while the next ones are on their way. */

/* Sums so far of one key-value head's queries. `out` is in the order in which pairs of values are unpacked. */
typedef struct {
    float out[FEW][D];
    float largest[FEW], total[FEW]; /* The largest score, and the sum of weights measured by it. */
} __attribute__((aligned(64))) Few;

/* Element i is the sum of a[i]. */
static INLINE __m512 sums_of_16(const __m512 a[16])
{
    __m512 b[8], c[4];
    for (int i = 0; i < 8; i++)
        b[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        const __m512d low = (__m512d)b[2 * i], high = (__m512d)b[2 * i + 1];
        c[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(low, high), (__m512)_mm512_unpackhi_pd(low, high));
    }
    /* c[i] has four parts of each of a[4 i] to a[4 i + 3], a quarter each. */
    const __m512 d = _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
    const __m512 e = _mm512_add_ps(_mm512_shuffle_f32x4(c[2], c[3], 0x88), _mm512_shuffle_f32x4(c[2], c[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(d, e, 0x88), _mm512_shuffle_f32x4(d, e, 0xdd));
}

/* Scores of one query for 16 keys. */
static INLINE __m512 scores_of_16(const bf16 *query, const bf16 *keys, int64_t stride)
{
    __m512 sums[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        sums[i] = _mm512_setzero_ps();
#pragma GCC unroll 8
        for (int d = 0; d < D; d += 32)
            sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)_mm512_loadu_si512(keys + i * stride + d),
                                       (__m512bh)_mm512_loadu_si512(query + d));
    }
    return sums_of_16(sums);
}

/* Turn the scores of one query for `keys` keys (at most NEAR, or none) into weights, zeros after the last, and measure
 * what was summed before by the largest score so far. */
static INLINE void weigh_few(Few *w, int lane, __m512 score[NEAR / 16], int keys, float factor, bf16 weight[NEAR])
{
    const __m512 never = _mm512_set1_ps(-INFINITY), before = _mm512_set1_ps(w->largest[lane]);
    __m512 largest = before;
    for (int t = 0; t < NEAR / 16; t++) {
        const int left = keys - 16 * t;
        score[t] = _mm512_mask_mov_ps(never, left >= 16 ? 0xffff : left > 0 ? (1 << left) - 1 : 0, score[t]);
        largest = _mm512_max_ps(largest, score[t]);
    }
    w->largest[lane] = _mm512_reduce_max_ps(largest);
    largest = _mm512_set1_ps(w->largest[lane]);
    /* A query that has seen no key yet would subtract infinities. */
    const __mmask16 any = _mm512_cmp_ps_mask(largest, never, _CMP_NEQ_UQ);
    const __m512 scale = _mm512_set1_ps(factor), offset = _mm512_maskz_mul_ps(any, largest, scale);
    const __m512i half = _mm512_set1_epi32(0x8000);
    __m512 total = _mm512_setzero_ps();
    for (int t = 0; t < NEAR / 16; t++) {
        const __m512 exact = power_of_two(_mm512_fmsub_ps(score[t], scale, offset));
        total = _mm512_add_ps(total, exact);
        _mm256_store_si256((__m256i *)(weight + 16 * t),
                           _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_add_epi32((__m512i)exact, half), 16)));
    }
    /* Exactly 1 while the largest score stays what it was: a little less at every step would forget the first keys. */
    const __m512 shrink = power_of_two(_mm512_mul_ps(_mm512_maskz_sub_ps(any, before, largest), scale));
    w->total[lane] = w->total[lane] * _mm512_cvtss_f32(shrink) + _mm512_reduce_add_ps(total);
    for (int d = 0; d < D; d += 16)
        _mm512_store_ps(w->out[lane] + d, _mm512_mul_ps(_mm512_load_ps(w->out[lane] + d), shrink));
}

/* Add the values of two keys, each to its weight: a pair of weights is one word. */
static INLINE void add_pair(
    __m512 *out, const int lanes, const bf16 weight[][NEAR], int key, const bf16 *value, const bf16 *next)
{
#pragma GCC unroll 8
    for (int d = 0; d < D / 32; d++) {
        const __m512i a = _mm512_loadu_si512(value + 32 * d);
        const __m512i b = next ? _mm512_loadu_si512(next + 32 * d) : _mm512_setzero_si512();
        const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(a, b), high = (__m512bh)_mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 2
        for (int i = 0; i < lanes; i++) {
            __m512 *sums = out + i * (D / 16) + 2 * d;
            const __m512bh pair = (__m512bh)_mm512_set1_epi32(*(const int32_t *)(weight[i] + key));
            sums[0] = _mm512_dpbf16_ps(sums[0], low, pair);
            sums[1] = _mm512_dpbf16_ps(sums[1], high, pair);
        }
    }
}

/* Add the values of `keys` keys to the sums of one or two queries. */
static INLINE void add_few(Few *w, int lane, const int lanes, const bf16 weight[][NEAR], const bf16 *values,
                           const int32_t *table, int block, int64_t stride, int first, int keys)
{
    __m512 out[2 * D / 16];
    for (int i = 0; i < lanes * D / 16; i++) out[i] = _mm512_load_ps(w->out[lane] + 16 * i);
    for (int k = 0; k < keys; k += 16) {
        const bf16 *value = at_key(values, table, block, stride, first + k);
        const int here = keys - k < 16 ? keys - k : 16;
        if (here == 16)
#pragma GCC unroll 8
            for (int i = 0; i < 16; i += 2)
                add_pair(out, lanes, weight, k + i, value + i * stride, value + (i + 1) * stride);
        else
            for (int i = 0; i < here; i += 2)
                add_pair(out, lanes, weight, k + i, value + i * stride, i + 1 < here ? value + (i + 1) * stride : 0);
    }
    for (int i = 0; i < lanes * D / 16; i++) _mm512_store_ps(w->out[lane] + 16 * i, out[i]);
}

/* Ask for the keys and values `first` to `last` - 1 of `width` numbers each. */
static INLINE void fetch_few(const bf16 *keys, const bf16 *values, const int32_t *table, int block, int64_t stride,
                             int width, int first, int last)
{
    for (int at = first; at < last; at++) {
        const bf16 *key = at_key(keys, table, block, stride, at), *value = at_key(values, table, block, stride, at);
        for (int d = 0; d < width; d += 32) {
            _mm_prefetch((const char *)(key + d), _MM_HINT_T1);
            _mm_prefetch((const char *)(value + d), _MM_HINT_T1);
        }
    }
}

static INLINE void begin_few(Few *w, int lanes)
{
    for (int lane = 0; lane < lanes; lane++) {
        for (int d = 0; d < D; d += 16) _mm512_store_ps(w->out[lane] + d, _mm512_setzero_ps());
        w->largest[lane] = -INFINITY;
        w->total[lane] = 0;
    }
}

/* The sums of a query in the order of a head's numbers, divided by the total of its weights. */
static INLINE void finish_few(const Few *w, int lane, float out[D])
{
    const __m512 share = _mm512_set1_ps(w->total[lane] == 0 ? 0 : 1 / w->total[lane]);
    for (int d = 0; d < D; d += 32) {
        const __m512 low = _mm512_load_ps(w->out[lane] + d), high = _mm512_load_ps(w->out[lane] + d + 16);
        const __m512 a = _mm512_shuffle_f32x4(low, high, 0x44), b = _mm512_shuffle_f32x4(low, high, 0xee);
        _mm512_storeu_ps(out + d, _mm512_mul_ps(_mm512_shuffle_f32x4(a, a, 0xd8), share));
        _mm512_storeu_ps(out + d + 16, _mm512_mul_ps(_mm512_shuffle_f32x4(b, b, 0xd8), share));
    }
}
