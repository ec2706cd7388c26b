// d2t on CUDA: draft columns whose target ids differ from their numbers.
//
// q is only ever wanted for one target tile, or for one token, at a time. Per tile of draft columns a
// first launch notes which target ids it spans and whether they increase; then the columns of a target
// tile are a range found by bisection, or, where the order is another one, all columns of those tiles
// that span it. q of a tile is scattered into shared memory; there is no row of target ids anywhere.
#pragma once

#include "row_stats.cuh"

namespace specdec::cuda {

// Of a tile of 4096 draft columns.
struct alignas(16) MapTile {
    int32_t low, high;  // the target ids inside the vocabulary; low > high: none
    int32_t increasing;
    int32_t unused;
};

struct DraftMap {
    IdMap map;  // without d2t: there is no map
    const MapTile* tiles;
    int64_t columns;
    int64_t vocab_size;

    __device__ __forceinline__ bool exists() const { return map.d2t != nullptr; }
    __device__ __forceinline__ int num_tiles() const {
        return static_cast<int>(num_vocab_tiles(columns));
    }
    __device__ __forceinline__ int64_t end_of(int tile) const {
        const int64_t end = (tile + 1) * kVocabTile;
        return end < columns ? end : columns;
    }
    // First column of an increasing tile whose target id is not below id.
    __device__ __forceinline__ int64_t lower_bound(int tile, int64_t id) const {
        int64_t low = tile * kVocabTile, high = end_of(tile);
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (map(middle) < id) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        return low;
    }
};

// Facts about one tile of columns, by the whole block.
__device__ __forceinline__ void map_statistics(const DraftMap& map, int tile, MapTile* out) {
    CU_SHARED(lows, BlockScratch<int32_t, kTileThreads>);
    CU_SHARED(highs, BlockScratch<int32_t, kTileThreads>);
    int32_t low = INT32_MAX, high = -1;
    bool disorder = false;
    const int64_t end = map.end_of(tile);
    for (int64_t c = tile * kVocabTile + threadIdx.x; c < end; c += kTileThreads) {
        const int64_t id = map.map(c);
        if (id >= 0 && id < map.vocab_size) {
            low = min(low, static_cast<int32_t>(id));
            high = max(high, static_cast<int32_t>(id));
        }
        disorder = disorder || (c + 1 < end && map.map(c + 1) <= id);
    }
    low = block_min<kTileThreads>(low, lows);
    high = block_max<kTileThreads>(high, highs);
    disorder = __syncthreads_or(disorder) != 0;
    if (threadIdx.x == 0) *out = MapTile{low, high, disorder ? 0 : 1, 0};
}

// The draft column of a target id, -1: it has none. By a whole warp; every lane gets the result.
__device__ __forceinline__ int64_t column_of(const DraftMap& map, int64_t id) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    for (int t = 0; t < map.num_tiles(); ++t) {
        const MapTile tile = map.tiles[t];
        if (id < tile.low || id > tile.high) continue;
        const int64_t end = map.end_of(t);
        if (tile.increasing != 0) {
            const int64_t column = map.lower_bound(t, id);
            if (column < end && map.map(column) == id) return column;
            continue;
        }
        for (int64_t first = t * kVocabTile; first < end; first += kWarpSize) {
            const bool here = first + lane < end && map.map(first + lane) == id;
            const unsigned found = __ballot_sync(kFullMask, here);
            if (found != 0) return first + __ffs(static_cast<int>(found)) - 1;
        }
    }
    return -1;
}

// q of the target ids of one tile, by the whole block; a barrier follows. values: [kTileEntries]
CU_NOINLINE __device__ inline void scatter_q(const DraftMap& map, const VocabRow& q_row,
                                             const RowLaw& q, int target_tile, float* values) {
    const int threads = static_cast<int>(blockDim.x);
    __syncthreads();  // the values of the tile before have been read
    for (int i = static_cast<int>(threadIdx.x); i < kTileEntries; i += threads) {
        values[i] = 0.0f;
    }
    __syncthreads();
    const int64_t first_id = target_tile * kVocabTile, end_id = first_id + kVocabTile;
    for (int t = 0; t < map.num_tiles(); ++t) {
        const MapTile tile = map.tiles[t];
        if (tile.low > tile.high || tile.high < first_id || tile.low >= end_id) continue;
        int64_t begin = t * kVocabTile, end = map.end_of(t);
        if (tile.increasing != 0) {
            begin = map.lower_bound(t, first_id);
            end = map.lower_bound(t, end_id);
        }
        for (int64_t c = begin + threadIdx.x; c < end; c += threads) {
            const int64_t id = map.map(c);
            if (id < first_id || id >= end_id) continue;
            values[id - first_id] = q(q_row.at(c), c);
        }
    }
    __syncthreads();
}

}  // namespace specdec::cuda
