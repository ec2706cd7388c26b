// Rows of logits on CUDA: a vocabulary tile in registers, and its sums by a fixed tree.
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
    with_type(row.dtype, [&](auto zero) {
        // 16 bytes at most: groups of 8 are for 16-bit types.
        if constexpr (kVec * sizeof(zero) <= 16) {
            load_tile<kVec>(row.as<decltype(zero)>(), vocab_size, tile, x);
        }
    });
}

// The entries first..first+3, with -inf past the vocabulary.
__device__ __forceinline__ void load_quad(const Row& row, int64_t vocab_size, int64_t first,
                                          float (&x)[kQuad]) {
    with_type(row.dtype, [&](auto zero) {
        const auto* source = row.as<decltype(zero)>();
        load_group<kQuad>(source + first, vocab_size - first, is_aligned<kQuad>(source), x);
    });
}

// Where a lane's entry number i lies behind the first one of some strips: a quad of each.
__device__ __forceinline__ int strip_place(int i) {
    return i / kQuad * kStrip + static_cast<int>(threadIdx.x) % kWarpSize * kQuad + i % kQuad;
}

// The lane's quads of the strips that begin at `first`, by a whole warp; -inf past the vocabulary.
template <int kCount>
__device__ __forceinline__ void load_strips(const Row& row, int64_t vocab_size, int64_t first,
                                            float (&x)[kCount]) {
    with_type(row.dtype, [&](auto zero) {
        const auto* source = row.as<decltype(zero)>();
        const bool aligned = is_aligned<kQuad>(source);
        if (aligned && first + kCount / kQuad * kStrip <= vocab_size) {
#pragma unroll
            for (int i = 0; i < kCount; i += kQuad) {
                load_vector<kQuad>(source + first + strip_place(i), x + i);
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < kCount; i += kQuad) {
            const int64_t id = first + strip_place(i);
            load_group<kQuad>(source + id, vocab_size - id, aligned, x + i);
        }
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

// --- Launch limits --------------------------------------------------------------------------------
// Rows go to grid.x, tiles to grid.y.
inline Status check_grid(int64_t rows, int64_t num_tiles) {
    const bool fits = rows <= 0x7fffffff && num_tiles <= 0xffff;
    return fits ? Status{} : Status{1, "more rows or vocabulary tiles than a CUDA grid holds"};
}

}  // namespace specdec::cuda
