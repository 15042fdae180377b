/* Products of a step's rows with a layer's weights, for CPUs with AMX: bfloat16 in and out, float32 sums.
 *
 * The weights lie packed, 32 outputs a panel, in the order a product reads them: with few rows a step takes as long as
 * they take to come from memory, with many the rows' blocks and a panel's part stay near the core. Owns the packing and
 * the arithmetic; library.py builds this and loads it, packed_linears.py holds it to torch's own product.
 */
#include "tiles.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK_ROWS 256               /* Rows that a thread works on at once, at most, */
#define BLOCK_BYTES (1024 * 1024)    /* and how much of them: about half a core's second cache. */
#define FEW_ROWS 32                  /* Up to here all weights are read once and in order. */
#define NEAR_STEPS 11                /* Steps of 32 inputs whose part of a panel stays in the first cache. */
#define PARTS_A_THREAD 4
#define WORDS 1024                   /* bfloat16 numbers of two tiles. */

typedef float Sums[2][2][16][16];    /* Of 32 rows and outputs: half of the rows, half of the outputs, row, output. */

static INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static INLINE int64_t shares(int64_t total, int64_t size) { return (total + size - 1) / size; }

/* Pack `weight` [out, in], seen as pairs of numbers, as [out / 32][in / 32][2][16 pairs of inputs][16 outputs].
 * Outputs that are missing in the last panel are zeros. */
void warmpath_pack(const uint32_t *weight, uint32_t *packed, int64_t out, int64_t in)
{
    const int64_t steps = in / 32;
#pragma omp parallel for
    for (int64_t panel = 0; panel < shares(out, 32); panel++)
        for (int64_t step = 0; step < steps; step++)
            for (int i = 0; i < 32; i++)
                for (int pair = 0; pair < 16; pair++) {
                    const int64_t output = 32 * panel + i, tile = (panel * steps + step) * 2 + i / 16;
                    const uint32_t word = output < out ? weight[output * (in / 2) + 16 * step + pair] : 0;
                    packed[(tile * 16 + pair) * 16 + i % 16] = word;
                }
}

/* Copy rows as [pairs of 16 rows][in / 32][32 rows][32 inputs]; rows that are missing in the last are zeros. */
static void gather(const bf16 *given, bf16 *to, int64_t rows, int64_t in)
{
    for (int64_t row = 0; row < shares(rows, 32) * 32; row++) {
        bf16 *at = to + row / 32 * 32 * in + row % 32 * 32;
        for (int64_t step = 0; step < in / 32; step++)
            _mm512_store_si512(
                at + step * WORDS,
                row < rows ? _mm512_loadu_si512(given + row * in + 32 * step) : _mm512_setzero_si512());
    }
}

/* Add the products of 16 or 32 rows with 32 outputs over `steps` times 32 inputs; `more`: to what is in `sums`. */
static INLINE void multiply(
    const bf16 *rows, const bf16 *weights, int64_t steps, const int both, const int more, Sums sums)
{
    if (more) {
        _tile_loadd(0, sums[0][0], 64);
        _tile_loadd(1, sums[0][1], 64);
        if (both) {
            _tile_loadd(2, sums[1][0], 64);
            _tile_loadd(3, sums[1][1], 64);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if (both) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    for (int64_t step = 0; step < steps; step++, rows += WORDS, weights += WORDS) {
        _tile_loadd(4, rows, 64);
        _tile_loadd(6, weights, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + WORDS / 2, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (both) {
            _tile_loadd(5, rows + WORDS / 2, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0][0], 64);
    _tile_stored(1, sums[0][1], 64);
    if (both) {
        _tile_stored(2, sums[1][0], 64);
        _tile_stored(3, sums[1][1], 64);
    }
}

/* Write `rows` rows of 32 sums or, at the end of a row, as many as it has. */
static INLINE void store(Sums sums, const float *bias, bf16 *result, int64_t rows, int64_t out, int64_t column)
{
    const int64_t left = out - column;
    const __mmask32 mask = left >= 32 ? 0xffffffff : (1u << left) - 1;
    const __m512 low = bias ? _mm512_maskz_loadu_ps(mask, bias + column) : _mm512_setzero_ps();
    const __m512 high = bias ? _mm512_maskz_loadu_ps(mask >> 16, bias + column + 16) : _mm512_setzero_ps();
    for (int row = 0; row < rows; row++) {
        const __m512 a = _mm512_add_ps(_mm512_load_ps(sums[row / 16][0][row % 16]), low);
        const __m512 b = _mm512_add_ps(_mm512_load_ps(sums[row / 16][1][row % 16]), high);
        _mm512_mask_storeu_epi16(result + row * out + column, mask, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
}

/* `result` [rows, out] = `given` [rows, in] times the packed weights, plus `bias` [out] unless it is null; `in` is a
 * multiple of 32. Returns 0, or -1 where there was no memory for a copy of the rows. */
int warmpath_linear(
    const bf16 *given, const bf16 *packed, const float *bias, bf16 *result, int64_t rows, int64_t in, int64_t out)
{
    const int64_t panels = shares(out, 32), steps = in / 32, bytes = 32 * in * sizeof(bf16);
    const int64_t fitting = BLOCK_BYTES / bytes * 32, most = fitting < 32 ? 32 : least(fitting, BLOCK_ROWS);
    const int64_t size = least(shares(rows, 32) * 32, most), blocks = shares(rows, size);
    const int64_t parts = least(panels, shares(PARTS_A_THREAD * omp_get_max_threads(), blocks));
    const int64_t near = rows <= FEW_ROWS ? steps : shares(steps, shares(steps, NEAR_STEPS));
    int failed = 0;
#pragma omp parallel reduction(| : failed)
    {
        static __thread Sums memory[BLOCK_ROWS / 32] __attribute__((aligned(64)));
        static __thread bf16 *copy;
        static __thread int64_t room;
        if (room < size * in) {
            free(copy);
            copy = aligned_alloc(64, size * in * sizeof(bf16));
            room = copy ? size * in : 0;
        }
        failed = !copy;
        Sums *sums = memory;
        const bf16 *held = copy;
        __asm__("" : "+r"(sums), "+r"(held)); /* Or the compiler asks for the thread's address in the inner loops. */
        const TileShapes before = take_tiles();
        int64_t there = -1;
#pragma omp for collapse(2) schedule(static)
        for (int64_t block = 0; block < blocks; block++)
            for (int64_t part = 0; part < parts; part++) {
                if (failed) continue;
                const int64_t first = block * size, count = least(rows - first, size);
                if (there != block) gather(given + first * in, (bf16 *)held, count, in);
                there = block;
                for (int64_t panel = panels * part / parts; panel < panels * (part + 1) / parts; panel++)
                    for (int64_t step = 0; step < steps; step += near) {
                        const bf16 *weights = packed + (panel * steps + step) * WORDS;
                        const int64_t now = least(near, steps - step);
                        for (int64_t row = 0; row < count; row += 32) {
                            const bf16 *from = held + row * in + step * WORDS;
                            const int both = row + 16 < count;
                            if (both && step) multiply(from, weights, now, 1, 1, sums[row / 32]);
                            else if (both) multiply(from, weights, now, 1, 0, sums[row / 32]);
                            else if (step) multiply(from, weights, now, 0, 1, sums[row / 32]);
                            else multiply(from, weights, now, 0, 0, sums[row / 32]);
                            if (step + now == steps)
                                store(sums[row / 32], bias, result + (first + row) * out, least(32, count - row), out,
                                      32 * panel);
                        }
                    }
            }
        leave_tiles(&before);
    }
    return failed ? -1 : 0;
}
