// Rows of logits on CUDA: a vocabulary tile in registers, its sums by a fixed tree, its statistics,
// and the statistics of a row from those of its tiles.
//
// A block of 256 threads holds one tile of 4096 entries, 16 per thread. The tree over a tile is
//     tile = 32 strips of 128 entries, strip = 32 quads of 4 entries:
// quads left to right, then pairs of neighbours up to a strip, then a butterfly over the strips. It
// is the same for every dtype and alignment, although fp32 threads load groups of 4 entries and
// 16-bit ones groups of 8 (16 bytes each): who adds two numbers never changes which are added.
#pragma once

#include "block.cuh"
#include "token_law.h"
#include "view.h"

namespace specdec::cuda {

// --- Traits ---------------------------------------------------------------------------------------
constexpr int kTileThreads = 256;
constexpr int kTileWarps = kTileThreads / kWarpSize;
// Statistics blocks per multiprocessor: at most 48 registers, 40 KB or more of loads in flight.
constexpr int kTileBlocksPerSm = 5;
constexpr int kTileEntries = static_cast<int>(kVocabTile);
constexpr int kEntriesPerThread = kTileEntries / kTileThreads;
constexpr int kQuad = 4;
constexpr int kStrip = kQuad * kWarpSize;
constexpr int kStrips = kTileEntries / kStrip;
static_assert(kStrips == kWarpSize, "one warp adds up the strips of a tile, one lane each");

// Statistics of one tile; a row has one per tile, in order.
struct alignas(16) TileStats {
    float max;        // of the usable entries; -inf when there is none
    float sum;        // of 2^((x - max) * scale); 0 where max is -inf
    float raw_sum;    // of 2^((x - max) * log2(e)), where asked for
    uint32_t argmax;  // lowest id of max (0 when there is none), plus kBadTile
};
constexpr uint32_t kBadTile = 0x80000000u;  // the tile has a NaN or +inf

__device__ __forceinline__ float minus_infinity() {
    return bits_float(0xff800000u);
}

// --- Loads ----------------------------------------------------------------------------------------
__device__ __forceinline__ float widen(float x) {
    return x;
}
__device__ __forceinline__ float widen(bf16 x) {
    return to_float(x);
}
__device__ __forceinline__ float widen(f16 x) {
    return ptx::f16_to_float(x);
}

__device__ __forceinline__ void unpack(uint32_t word, float (&x)[1], float) {
    x[0] = bits_float(word);
}
__device__ __forceinline__ void unpack(uint32_t word, float (&x)[2], bf16) {
    x[0] = bits_float(word << 16);
    x[1] = bits_float(word & 0xffff0000u);
}
__device__ __forceinline__ void unpack(uint32_t word, float (&x)[2], f16) {
    x[0] = widen(f16{static_cast<uint16_t>(word & 0xffffu)});
    x[1] = widen(f16{static_cast<uint16_t>(word >> 16)});
}

template <int kBytes>
struct VectorOf;
template <>
struct VectorOf<8> {
    using type = uint2;
};
template <>
struct VectorOf<16> {
    using type = uint4;
};

// kCount entries from an address that is a multiple of their size, in one load.
template <int kCount, class T>
__device__ __forceinline__ void load_vector(const T* source, float* x) {
    using Vector = typename VectorOf<kCount* static_cast<int>(sizeof(T))>::type;
    constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
    const Vector vector = __ldg(reinterpret_cast<const Vector*>(source));
    uint32_t words[kCount / kPerWord];
    words[0] = vector.x;
    words[1] = vector.y;
    if constexpr (sizeof(Vector) == 16) {
        words[2] = vector.z;
        words[3] = vector.w;
    }
#pragma unroll
    for (int w = 0; w < kCount / kPerWord; ++w) {
        float part[kPerWord];
        unpack(words[w], part, T{});
#pragma unroll
        for (int i = 0; i < kPerWord; ++i) x[w * kPerWord + i] = part[i];
    }
}

template <int kCount, class T>
__device__ __forceinline__ bool is_aligned(const T* row) {
    return reinterpret_cast<uintptr_t>(row) % (kCount * sizeof(T)) == 0;
}

// kCount entries from `source`, of which the first `valid` exist; the others read as -inf.
template <int kCount, class T>
__device__ __forceinline__ void load_group(const T* source, int64_t valid, bool aligned, float* x) {
    if (aligned && valid >= kCount) {
        load_vector<kCount>(source, x);
        return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = i < valid ? widen(source[i]) : minus_infinity();
}

// Where in its tile the thread's entry number i lies: groups of kVec, thread after thread.
template <int kVec>
__device__ __forceinline__ int entry_place(int i) {
    return (i / kVec * kTileThreads + static_cast<int>(threadIdx.x)) * kVec + i % kVec;
}

// The thread's 16 entries of a tile, in groups of kVec.
template <int kVec, class T>
__device__ __forceinline__ void load_tile(const T* row, int64_t vocab_size, int tile,
                                          float (&x)[kEntriesPerThread]) {
    const int64_t first = tile * kVocabTile;
    const bool aligned = is_aligned<kVec>(row);  // tiles start at multiples of a group
    if (aligned && first + kVocabTile <= vocab_size) {
#pragma unroll
        for (int i = 0; i < kEntriesPerThread; i += kVec) {
            load_vector<kVec>(row + first + entry_place<kVec>(i), x + i);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < kEntriesPerThread; i += kVec) {
        const int64_t id = first + entry_place<kVec>(i);
        load_group<kVec>(row + id, vocab_size - id, aligned, x + i);
    }
}

// --- Rows of a dtype known at run time ------------------------------------------------------------
// The dtype is the same for a whole block, so a branch around the loads costs next to nothing, and
// one kernel serves every pair of target and draft types.
struct Row {
    const void* data = nullptr;
    DType dtype = DType::kF32;

    template <class T>
    __device__ __forceinline__ const T* as() const {
        return static_cast<const T*>(data);
    }
};

template <int N>
__device__ __forceinline__ Row row_of(const View<const void, N>& logits, DType dtype, int64_t i,
                                      int64_t j = 0) {
    int64_t offset = i * logits.stride[0];
    if constexpr (N == 3) offset += j * logits.stride[1];
    return Row{static_cast<const unsigned char*>(logits.data) + offset * dtype_size(dtype), dtype};
}

// Calls fn with a value of the row's type.
template <class Fn>
__device__ __forceinline__ void with_type(DType dtype, Fn&& fn) {
    if (dtype == DType::kBF16) {
        fn(bf16{});
    } else if (dtype == DType::kF16) {
        fn(f16{});
    } else {
        fn(float{});
    }
}

template <int kVec>
__device__ __forceinline__ void load_tile(const Row& row, int64_t vocab_size, int tile,
                                          float (&x)[kEntriesPerThread]) {
    with_type(row.dtype,
              [&](auto zero) { load_tile<kVec>(row.as<decltype(zero)>(), vocab_size, tile, x); });
}

// The entries first..first+3, with -inf past the vocabulary.
__device__ __forceinline__ void load_quad(const Row& row, int64_t vocab_size, int64_t first,
                                          float (&x)[kQuad]) {
    with_type(row.dtype, [&](auto zero) {
        const auto* source = row.as<decltype(zero)>();
        load_group<kQuad>(source + first, vocab_size - first, is_aligned<kQuad>(source), x);
    });
}

__device__ __forceinline__ float entry_of(const Row& row, int64_t id) {
    float x = 0.0f;
    with_type(row.dtype, [&](auto zero) { x = widen(row.as<decltype(zero)>()[id]); });
    return x;
}

// --- Sums -----------------------------------------------------------------------------------------
__device__ __forceinline__ float quad_sum(const float* x) {
    return ((x[0] + x[1]) + x[2]) + x[3];
}

// Sums of the strips of a tile, by the whole block; the caller puts a barrier before reading them.
template <int kVec>
__device__ __forceinline__ void sum_strips(const float (&mass)[kEntriesPerThread], float* strips) {
#pragma unroll
    for (int round = 0; round < kEntriesPerThread / kVec; ++round) {
        float sum = quad_sum(mass + round * kVec);
        if constexpr (kVec == 2 * kQuad) sum = sum + quad_sum(mass + round * kVec + kQuad);
#pragma unroll
        for (int lanes = 1; lanes < kStrip / kVec; lanes *= 2) {
            sum = sum + warp_exchange(sum, lanes);
        }
        const int start = entry_place<kVec>(round * kVec);
        if (start % kStrip == 0) strips[start / kStrip] = sum;
    }
}

// --- Statistics of a tile -------------------------------------------------------------------------
struct StatsPlan {
    float warp_max[kTileWarps];
    uint32_t warp_argmax[kTileWarps];
    float strips[kStrips];
    float raw_strips[kStrips];
};

// By the whole block, once per block. scale 0: the sum is not wanted.
template <bool kRaw, class T>
__device__ __forceinline__ void tile_statistics(const T* row, int64_t vocab_size, int tile,
                                                float scale, StatsPlan& plan, TileStats* out) {
    constexpr int kVec = 16 / static_cast<int>(sizeof(T));
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    float x[kEntriesPerThread];
    load_tile<kVec>(row, vocab_size, tile, x);

    // Maximum of the usable entries; the others are reported and then have no mass.
    bool bad = false;
    float most = minus_infinity();
#pragma unroll
    for (int i = 0; i < kEntriesPerThread; ++i) {
        const bool bad_entry = is_bad_logit(x[i]);
        bad = bad || bad_entry;
        x[i] = bad_entry ? minus_infinity() : x[i];
        most = fmaxf(most, x[i]);
    }
    most = warp_max(most);
    if (lane == 0) plan.warp_max[warp] = most;
    const bool bad_tile = __syncthreads_or(bad) != 0;
    float max = plan.warp_max[0];
#pragma unroll
    for (int w = 1; w < kTileWarps; ++w) max = fmaxf(max, plan.warp_max[w]);
    const bool any = max > minus_infinity();

    // Its lowest id, in the warps that hold it.
    uint32_t argmax = 0xffffffffu;
    if (any && most == max) {
#pragma unroll
        for (int i = kEntriesPerThread - 1; i >= 0; --i) {
            if (x[i] == max) argmax = static_cast<uint32_t>(entry_place<kVec>(i));
        }
        argmax = __reduce_min_sync(kFullMask, argmax);
    }
    if (lane == 0) plan.warp_argmax[warp] = argmax;

    // Sums.
    const float origin = any ? max : 0.0f;
    const auto sum_scaled = [&](float by, float* strips) {
        float mass[kEntriesPerThread];
#pragma unroll
        for (int i = 0; i < kEntriesPerThread; ++i) mass[i] = ptx::ex2((x[i] - origin) * by);
        sum_strips<kVec>(mass, strips);
    };
    const bool raw_too = kRaw && scale != kLog2E;
    if (scale > 0.0f) sum_scaled(scale, plan.strips);
    if (raw_too) sum_scaled(kLog2E, plan.raw_strips);
    __syncthreads();

    // One warp puts the tile's parts together.
    if (warp != 0) return;
    TileStats stats;
    stats.max = max;
    stats.sum = scale > 0.0f ? warp_sum(plan.strips[lane]) : 0.0f;
    stats.raw_sum = raw_too ? warp_sum(plan.raw_strips[lane]) : stats.sum;
    argmax = lane < kTileWarps ? plan.warp_argmax[lane] : 0xffffffffu;
    argmax = __reduce_min_sync(kFullMask, argmax);
    stats.argmax = any ? static_cast<uint32_t>(tile * kTileEntries) + argmax : 0u;
    if (bad_tile) stats.argmax |= kBadTile;
    if (lane == 0) *out = stats;
}

template <bool kRaw>
__device__ __forceinline__ void tile_statistics(const Row& row, int64_t vocab_size, int tile,
                                                float scale, StatsPlan& plan, TileStats* out) {
    with_type(row.dtype, [&](auto zero) {
        tile_statistics<kRaw>(row.as<decltype(zero)>(), vocab_size, tile, scale, plan, out);
    });
}

// --- Statistics of a row, by whole warps; every lane gets the result ---------------------------------
struct RowPeak {
    float max;
    int argmax;   // lowest id of max; 0 when nothing is finite
    bool usable;  // no NaN, no +inf, something finite
};

// In one 16-byte load.
__device__ __forceinline__ TileStats load_stats(const TileStats* tile) {
    const uint4 words = __ldg(reinterpret_cast<const uint4*>(tile));
    return TileStats{bits_float(words.x), bits_float(words.y), bits_float(words.z), words.w};
}

__device__ __forceinline__ RowPeak row_peak(const TileStats* tiles, int num_tiles) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    ArgMax best{minus_infinity(), 0};
    bool bad = false;
    for (int t = lane; t < num_tiles; t += kWarpSize) {
        const TileStats tile = load_stats(tiles + t);
        bad = bad || (tile.argmax & kBadTile) != 0;
        best = ArgMaxOp{}(best, ArgMax{tile.max, static_cast<int>(tile.argmax & ~kBadTile)});
    }
    best = warp_argmax(best);
    bad = __any_sync(kFullMask, bad) != 0;
    return RowPeak{best.value, best.index, !bad && best.value > minus_infinity()};
}

// Mass of a tile in units of the row: kSum is &TileStats::sum or &TileStats::raw_sum.
template <float TileStats::*kSum>
__device__ __forceinline__ float tile_mass(const TileStats& tile, float row_max, float scale) {
    return tile.*kSum * ptx::ex2((tile.max - row_max) * scale);
}

// Sum over the row of 2^((x - max) * scale).
template <float TileStats::*kSum>
__device__ __forceinline__ float row_sum(const TileStats* tiles, int num_tiles, float row_max,
                                         float scale) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    float sum = 0.0f;
    for (int t = lane; t < num_tiles; t += kWarpSize) {
        sum = sum + tile_mass<kSum>(load_stats(tiles + t), row_max, scale);
    }
    return warp_sum(sum);
}

// The law of a row (token_law.h). One function for p and q: equal rows give equal bits.
struct RowLaw {
    float max;
    float scale;
    float log2_sum;

    __device__ __forceinline__ float operator()(float x) const {
        return ptx::ex2(fmaf(x - max, scale, -log2_sum));
    }
};

// --- Launch limits --------------------------------------------------------------------------------
// Rows go to grid.x, tiles to grid.y.
inline Status check_grid(int64_t rows, int64_t num_tiles) {
    const bool fits = rows <= 0x7fffffff && num_tiles <= 0xffff;
    return fits ? Status{} : Status{1, "more rows or vocabulary tiles than a CUDA grid holds"};
}

}  // namespace specdec::cuda
