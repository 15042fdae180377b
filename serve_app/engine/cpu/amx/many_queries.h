/* What one thread does with keys and queries at hand: scores, weights and sums of 16 or 32 queries at a time.
 *
 * Everything is computed transposed, so that a query is a lane of a vector: scores^T = K Q^T, an online softmax down
 * the rows, out^T += V^T P^T. Of what lies in the pool only V has to be turned, a few keys at a time. Knows no jobs.
 */
#pragma once

#include "tiles.h"

#include <math.h>

#define D HEAD_DIM  /* Given by the build; a multiple of 32. */
#define LANES 512   /* Queries of a job at most: its token rows times the heads that share a key-value head. */
#define KEYS 128    /* Keys at hand at once: with their scores and weights they have to fit a core's nearest cache. */
#define FAR 40      /* Powers of two by which a score may exceed what it is measured by, before that is changed. */

/* What one thread works in. A tile is 16 rows of 64 bytes; operand B holds two neighbours of a column in a word. */
typedef struct {
    bf16 query[LANES / 16][D / 32][16][32]; /* Q^T, operand B */
    bf16 key[KEYS / 16][D / 32][16][32];    /* K, operand A */
    bf16 value[KEYS / 32][D][32];           /* V^T, operand A */
    float score[2][KEYS][16];
    bf16 weight[2][KEYS / 32][16][32];      /* P^T, operand B */
    float out[LANES / 16][D][16];
    float largest[LANES], total[LANES];     /* The score that weights are measured by, and their sum. */
    int32_t position[LANES];
} __attribute__((aligned(64))) Work;

static INLINE __m512i even_quarters(__m512i a, __m512i b) { return _mm512_shuffle_i32x4(a, b, 0x88); }
static INLINE __m512i odd_quarters(__m512i a, __m512i b) { return _mm512_shuffle_i32x4(a, b, 0xdd); }

/* Turn 16 x 16 words: row k becomes column k. */
static INLINE void turn(__m512i r[16])
{
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    /* r[4 g + c] holds columns c, 4 + c, 8 + c and 12 + c, a quarter each, of rows 4 g to 4 g + 3. */
    for (int c = 0; c < 4; c++) {
        const __m512i a = even_quarters(r[c], r[4 + c]), b = odd_quarters(r[c], r[4 + c]);
        const __m512i e = even_quarters(r[8 + c], r[12 + c]), f = odd_quarters(r[8 + c], r[12 + c]);
        t[c] = even_quarters(a, e);
        t[4 + c] = even_quarters(b, f);
        t[8 + c] = odd_quarters(a, e);
        t[12 + c] = odd_quarters(b, f);
    }
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

/* 2^x to about 1e-4 of it, which is then rounded to bfloat16's eight bits; exact for whole x, 0 for minus infinity. */
static INLINE __m512 power_of_two(__m512 x)
{
    const __m512 f = _mm512_reduce_ps(x, 0x09); /* x - floor(x) */
    __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(0.07816385f), _mm512_set1_ps(0.22644174f));
    p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(0.69539441f));
    p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(1));
    return _mm512_scalef_ps(p, x);
}

static INLINE const bf16 *at_key(const bf16 *slots, const int32_t *table, int block, int64_t stride, int key)
{
    return slots + ((int64_t)table[key / block] * block + key % block) * stride;
}

/* Copy up to KEYS keys together: many queries read them, and far apart they would fight for the same cache lines.
 * What lies after the last one, up to a tile's end, is copied too and hidden later. */
static void copy_keys(Work *w, const bf16 *keys, const int32_t *table, int block, int64_t stride, int first, int count)
{
    for (int t = 0; t < (count + 15) / 16; t++) {
        const bf16 *from = at_key(keys, table, block, stride, first + 16 * t);
        for (int i = 0; i < 16; i++)
            for (int d = 0; d < D / 32; d++)
                _mm512_store_si512(w->key[t][d][i], _mm512_loadu_si512(from + i * stride + 32 * d));
    }
}

/* Turn up to KEYS values; after the last one, up to a tile's end, come zeros, whatever lies there. */
static void turn_values(
    Work *w, const bf16 *values, const int32_t *table, int block, int64_t stride, int first, int count)
{
    for (int k = 0; k < (count + 31) / 32; k++) {
        const int left = count - 32 * k;
        const bf16 *halves[2] = {at_key(values, table, block, stride, first + 32 * k), 0};
        if (left > 16) halves[1] = at_key(values, table, block, stride, first + 32 * k + 16);
        for (int d = 0; d < D; d += 32) {
            __m512i low[16], high[16];
            for (int r = 0; r < 16; r++) {
                const bf16 *from = halves[r / 8] + 2 * (r % 8) * stride + d;
                const __m512i a = left > 2 * r ? _mm512_loadu_si512(from) : _mm512_setzero_si512();
                const __m512i b = left > 2 * r + 1 ? _mm512_loadu_si512(from + stride) : _mm512_setzero_si512();
                low[r] = _mm512_unpacklo_epi16(a, b);
                high[r] = _mm512_unpackhi_epi16(a, b);
            }
            turn(low);
            turn(high);
            for (int i = 0; i < 16; i++) {
                const int dim = d + 8 * (i / 4) + i % 4;
                _mm512_store_si512(w->value[k][dim], low[i]);
                _mm512_store_si512(w->value[k][dim + 4], high[i]);
            }
        }
    }
}

/* Ask for keys and values `first` to `last` - 1, which come next, while those at hand are worked on.
 * (Inline, or gcc leaves the calls out: nothing that it knows of comes of them.) */
static INLINE void fetch(
    const bf16 *keys, const bf16 *values, const int32_t *table, int block, int64_t stride, int first, int last)
{
    for (int at = first; at < last; at += 16) {
        const bf16 *key = at_key(keys, table, block, stride, at), *value = at_key(values, table, block, stride, at);
        for (int i = 0; i < 16; i++)
            for (int d = 0; d < D; d += 32) {
                _mm_prefetch((const char *)(key + i * stride + d), _MM_HINT_T1);
                _mm_prefetch((const char *)(value + i * stride + d), _MM_HINT_T1);
            }
    }
}

/* scores^T = K Q^T of 16 or 32 queries, from tile number `tile` on, over the 16 keys number `t`. */
static INLINE void score(Work *w, int tile, const int both, int t)
{
    _tile_zero(0);
    if (both) _tile_zero(1);
    for (int d = 0; d < D / 32; d++) {
        _tile_loadd(2, w->key[t][d], 64);
        _tile_loadd(3, w->query[tile][d], 64);
        _tile_dpbf16ps(0, 2, 3);
        if (both) {
            _tile_loadd(4, w->query[tile + 1][d], 64);
            _tile_dpbf16ps(1, 2, 4);
        }
    }
    _tile_stored(0, w->score[0][16 * t], 64);
    if (both) _tile_stored(1, w->score[1][16 * t], 64);
}

typedef struct { __m512 scale, offset, largest, total; } Sums;

static INLINE Sums sums_of(const Work *w, int lane, float factor)
{
    const __m512 scale = _mm512_set1_ps(factor), largest = _mm512_load_ps(w->largest + lane);
    return (Sums){scale, _mm512_mul_ps(largest, scale), largest, _mm512_setzero_ps()};
}

/* Weights 2^(score * scale - offset) of 16 queries for the 16 keys number `t`. */
static INLINE void weigh(Work *w, int side, int t, Sums *sums)
{
    const __m512i half = _mm512_set1_epi32(0x8000);
    const float *score = w->score[side][16 * t];
    bf16 *weight = w->weight[side][0][0] + 256 * t;
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) {
        const __m512 a = _mm512_load_ps(score + 32 * k), b = _mm512_load_ps(score + 32 * k + 16);
        sums->largest = _mm512_max_ps(sums->largest, _mm512_max_ps(a, b));
        const __m512 even = power_of_two(_mm512_fmsub_ps(a, sums->scale, sums->offset));
        const __m512 odd = power_of_two(_mm512_fmsub_ps(b, sums->scale, sums->offset));
        /* Rounded to bfloat16 by hand: four plain operations, where the conversion and a shuffle take twice as long. */
        const __m512i low = _mm512_srli_epi32(_mm512_add_epi32((__m512i)even, half), 16);
        const __m512i high = _mm512_add_epi32((__m512i)odd, half);
        _mm512_store_si512(weight + 32 * k, _mm512_mask_blend_epi16(0xaaaaaaaa, low, high));
        sums->total = _mm512_add_ps(sums->total, _mm512_add_ps(even, odd));
    }
}

/* The same for all keys at hand, where some are hidden, none came before, or a much larger score came: take the largest
 * as what the others are measured by, and make smaller what was summed before. */
static __attribute__((noinline)) void weigh_carefully(Work *w, int tile, int first, int keys, float factor)
{
    const int lane = 16 * tile, padded = (keys + 31) / 32 * 32;
    float (*score)[16] = w->score[tile % 2];
    const __m512 never = _mm512_set1_ps(-INFINITY), before = _mm512_load_ps(w->largest + lane);
    const __m512i position = _mm512_load_si512(w->position + lane);
    const int seen = _mm512_reduce_min_epi32(position) + 1 - first;
    for (int k = seen < 0 ? 0 : seen < keys ? seen : keys; k < padded; k++) {
        const __mmask16 later = _mm512_cmplt_epi32_mask(position, _mm512_set1_epi32(first + k));
        const __mmask16 hidden = k < keys ? later : 0xffff;
        _mm512_store_ps(score[k], _mm512_mask_mov_ps(_mm512_load_ps(score[k]), hidden, never));
    }
    __m512 largest = before;
    for (int k = 0; k < padded; k++) largest = _mm512_max_ps(largest, _mm512_load_ps(score[k]));
    _mm512_store_ps(w->largest + lane, largest);
    Sums sums = sums_of(w, lane, factor);
    /* A query that has seen no key yet would subtract infinities. */
    sums.offset = _mm512_maskz_mov_ps(_mm512_cmpneq_ps_mask(largest, never), sums.offset);
    for (int t = 0; t < padded / 16; t++) weigh(w, tile % 2, t, &sums);
    const __m512 shrink = power_of_two(_mm512_fmsub_ps(before, sums.scale, sums.offset));
    for (int d = 0; d < D; d++)
        _mm512_store_ps(w->out[tile][d], _mm512_mul_ps(_mm512_load_ps(w->out[tile][d]), shrink));
    _mm512_store_ps(w->total + lane, _mm512_fmadd_ps(_mm512_load_ps(w->total + lane), shrink, sums.total));
}

/* Keep a tile's sums, unless a score came so much larger that weights might overflow. */
static INLINE void keep(Work *w, int tile, int first, int keys, float factor, const Sums *sums)
{
    const __m512 over = _mm512_fmsub_ps(sums->largest, sums->scale, sums->offset);
    if (_mm512_cmp_ps_mask(over, _mm512_set1_ps(FAR), _CMP_NLT_UQ))
        weigh_carefully(w, tile, first, keys, factor);
    else
        _mm512_store_ps(w->total + 16 * tile, _mm512_add_ps(_mm512_load_ps(w->total + 16 * tile), sums->total));
}

/* out^T += V^T P^T over `parts` times 32 keys. */
static INLINE void add_values(Work *w, int tile, const int both, int parts)
{
    for (int d = 0; d < D; d += 32) {
        float *out = w->out[tile][d], *other = w->out[tile + both][d];
        _tile_loadd(0, out, 64);
        _tile_loadd(1, out + 256, 64);
        if (both) {
            _tile_loadd(2, other, 64);
            _tile_loadd(3, other + 256, 64);
        }
        for (int k = 0; k < parts; k++) {
            _tile_loadd(4, w->value[k][d], 64);
            _tile_loadd(6, w->weight[0][k], 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, w->value[k][d + 16], 64);
            _tile_dpbf16ps(1, 5, 6);
            if (both) {
                _tile_loadd(7, w->weight[1][k], 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, out, 64);
        _tile_stored(1, out + 256, 64);
        if (both) {
            _tile_stored(2, other, 64);
            _tile_stored(3, other + 256, 64);
        }
    }
}

/* 16 or 32 queries over `keys` of the keys at hand, the first of them at position `first`. */
static INLINE void attend_keys(Work *w, int tile, const int both, int first, int keys, float factor)
{
    const int tiles = (keys + 15) / 16, lane = 16 * tile, hidden = w->position[lane] + 1 - first < keys;
    const __m512 largest = _mm512_min_ps(
        _mm512_load_ps(w->largest + lane), _mm512_load_ps(w->largest + lane + 16 * both));
    if (keys % 32 || hidden || _mm512_cmp_ps_mask(largest, _mm512_set1_ps(-INFINITY), _CMP_NGT_UQ)) {
        for (int t = 0; t < tiles; t++) score(w, tile, both, t);
        weigh_carefully(w, tile, first, keys, factor);
        if (both) weigh_carefully(w, tile + 1, first, keys, factor);
    } else {
        Sums sums = sums_of(w, lane, factor), others = sums_of(w, lane + 16 * both, factor);
        score(w, tile, both, 0);
        for (int t = 0; t < tiles; t++) {
            /* The next scores are multiplied while these are weighed. */
            if (t + 1 < tiles) score(w, tile, both, t + 1);
            weigh(w, 0, t, &sums);
            if (both) weigh(w, 1, t, &others);
        }
        keep(w, tile, first, keys, factor, &sums);
        if (both) keep(w, tile + 1, first, keys, factor, &others);
    }
    add_values(w, tile, both, (keys + 31) / 32);
}
