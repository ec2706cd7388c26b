// Tile shapes of the tensor-core verify_attention. Which one runs changes speed and never a bit of
// the result: rows of a matrix product do not see each other.
#pragma once

#include <cstdint>

namespace specdec::cuda {

struct AttentionTile {
    int row_blocks;     // 16-row blocks that one warp holds
    int row_warps;      // warps stacked along the rows; 4 more lie side by side along the tokens
    int blocks_per_sm;  // resident blocks, for the register budget and the size of the grid

    constexpr int rows() const { return 16 * row_blocks * row_warps; }
};

// By packed rows (rows of a request x query heads per KV head): the smallest tile that holds them,
// or the largest one, several times.
constexpr AttentionTile kAttentionTiles[] = {{1, 1, 2}, {2, 1, 2}, {2, 2, 1}};
constexpr int kNumAttentionTiles = 3;

constexpr int attention_tile(int64_t packed_rows) {
    int tile = 0;
    while (tile + 1 < kNumAttentionTiles && kAttentionTiles[tile].rows() < packed_rows) ++tile;
    return tile;
}

// Bytes of K and V that one block keeps in flight or in use. With 64 KB a block of 16 or 32 rows needs
// 76 or 80 KB in all, so that two share an SM of 164 KB (sm_80) and up; one of 64 rows needs 96 KB and
// still fits the 99 KB that sm_120 gives a block.
constexpr int kRingBytes = 64 * 1024;
constexpr int kSmallestSharedMemory = 99 * 1024;

}  // namespace specdec::cuda
