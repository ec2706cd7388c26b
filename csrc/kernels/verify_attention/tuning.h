// Tile shapes of the tensor-core verify_attention. Which one runs changes speed and never a bit of
// the result: rows of a matrix product do not see each other.
#pragma once

#include <cstdint>

namespace specdec::cuda {

// --- Head dims ---------------------------------------------------------------------------------------

struct HeadDims {
    int key, value;

    constexpr bool operator==(const HeadDims& other) const {
        return key == other.key && value == other.value;
    }
};

// All that there are kernels for. Stages are those of the ring, for a cache of 16 bits | of 8 bits: 1, 2 or 4
// tiles, so that every segment begins at the first.
constexpr HeadDims kHeadDims[] = {
    {64, 64},    // 4 | 4 stages: more would only wait longer; queries stay in registers
    {64, 128},   // 2 | 4
    {80, 80},    // 2 | 4: rows of 160 bytes: 6 of 8 lanes idle in the second step of a copy
    {96, 96},    // 2 | 4
    {128, 64},   // 2 | 4
    {128, 128},  // 2 | 4: 128 sums per thread at 32 rows, the most that leave room for the rest
    {192, 128},  // 1 | 2: with one stage K of the next tile loads beside P V, and V beside Q K
    {192, 192},  // 1 | 2: 96 sums per thread at 16 rows a warp; 32 rows a warp would spill
    {256, 256},  // 1 | 2: 128 sums per thread at 16 rows a warp
};
constexpr int kNumHeadDims = sizeof(kHeadDims) / sizeof(kHeadDims[0]);

constexpr bool has_kernel(int64_t key, int64_t value) {
    for (const HeadDims& dims : kHeadDims) {
        if (dims.key == key && dims.value == value) return true;
    }
    return false;
}

// --- Rows --------------------------------------------------------------------------------------------

struct AttentionTile {
    int row_blocks;     // 16-row blocks that one warp holds
    int row_warps;      // warps stacked along the rows; 4 more lie side by side along the tokens
    int blocks_per_sm;  // resident blocks, for the register budget and the size of the grid

    constexpr int rows() const { return 16 * row_blocks * row_warps; }
};

// A warp of 32 rows reads K and V from shared memory half as often as two of 16, but holds twice the
// sums: value dims above 128 have registers for 16 rows only, and 8 warps of them fill an SM.
constexpr AttentionTile kAttentionTiles[] = {
    {1, 1, 2},  // 16 rows
    {2, 1, 2},  // 32 rows, value dims up to 128
    {2, 2, 1},  // 64 rows, value dims up to 128
    {1, 2, 1},  // 32 rows, value dims above 128
};
constexpr int kNarrowValueDim = 128;

// By packed rows (rows of a request x query heads per KV head): the smallest tile that holds them,
// or the largest one, several times.
constexpr int attention_tile(int64_t packed_rows, int64_t value_dim) {
    if (packed_rows <= 16) return 0;
    if (value_dim > kNarrowValueDim) return 3;
    return packed_rows <= 32 ? 1 : 2;
}

// --- Shared memory -----------------------------------------------------------------------------------

// Bytes of K and V that one block keeps in flight or in use. With 64 KB a block of 16 or 32 rows needs
// 76 or 80 KB in all, so that two share an SM of 164 KB (sm_80) and up; one of 64 rows needs 96 KB and
// still fits the 99 KB that sm_120 gives a block.
constexpr int kRingBytes = 64 * 1024;
constexpr int kSmallestSharedMemory = 99 * 1024;

}  // namespace specdec::cuda
