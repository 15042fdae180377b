/* What the AMX kernels share: eight tile registers of 16 rows of 64 bytes, and how a thread takes and leaves them. */
#pragma once

#include <immintrin.h>
#include <stdint.h>

#define INLINE inline __attribute__((always_inline))

typedef uint16_t bf16;

typedef struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((packed)) TileShapes;

/* Other kernels of this process keep their shapes loaded between their calls: what was there is put back. */
static INLINE TileShapes take_tiles(void)
{
    static const TileShapes ours = {
        .palette = 1, .bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    TileShapes before;
    _tile_storeconfig(&before);
    _tile_loadconfig(&ours);
    return before;
}

static INLINE void leave_tiles(const TileShapes *before)
{
    if (before->palette) _tile_loadconfig(before);
    else _tile_release();
}
