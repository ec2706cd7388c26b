// The tensor-core kernel of verify_attention: traits, shared memory, and what a block and a thread know
// about themselves. Order of summation and bytes moved: see cuda.cu.
#pragma once

#include <type_traits>

#include "fold.cuh"
#include "fp8.cuh"
#include "schedule.cuh"
#include "tuning.h"

namespace specdec::cuda {

struct AttendArgs {
    VerifyAttentionParams p;
    LogitScale scale;
    bool aligned;  // rows of q and of both caches start at multiples of 16 bytes
    PartialStore partials;
};

// --- Traits ------------------------------------------------------------------------------------------

template <class Element, class CacheElement, int kHeadDim_, int kValueDim_, int kTile>
struct AttendTraits {
    using T = Element;       // of q and out: bf16 or f16
    using C = CacheElement;  // of K and V: T or f8e4m3
    static constexpr bool kFp8 = std::is_same<C, f8e4m3>::value;
    static constexpr int kChunk = 16 / static_cast<int>(sizeof(C));  // elements of 16 bytes
    static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_;
    static constexpr int kRowBlocks = kAttentionTiles[kTile].row_blocks;
    static constexpr int kRowWarps = kAttentionTiles[kTile].row_warps;
    static constexpr int kRows = kAttentionTiles[kTile].rows();
    static constexpr int kBlocksPerSm = kAttentionTiles[kTile].blocks_per_sm;

    static constexpr int kParts = 4;  // warps side by side along the tokens of a tile
    static constexpr int kWarpTokens = kTileTokens / kParts;
    static_assert(kWarpTokens == 16, "one contraction step of P V per warp and tile");
    static constexpr int kThreads = 32 * kParts * kRowWarps;

    static constexpr int kFittingStages =
        kRingBytes / (kTileTokens * (kHeadDim + kValueDim) * static_cast<int>(sizeof(C)));
    static constexpr int kStages = kFittingStages >= 4 ? 4 : kFittingStages >= 2 ? 2 : 1;
    static_assert(kFittingStages >= 1, "the ring holds a tile");
    static_assert(kSegmentTokens / kTileTokens % kStages == 0, "a segment begins at stage 0");
    using RingBits = std::conditional_t<kStages <= 2, uint32_t, uint64_t>;

    // Sums change owners in slices of this many columns, to keep the exchange buffer small.
    static constexpr int kSliceColumns = kRowBlocks == 1 ? 32 : 16;
    static constexpr int kSlices = (kValueDim + kSliceColumns - 1) / kSliceColumns;
    static constexpr int kSliceQuads = kSliceColumns / 4;
    static_assert(kRows * kSliceQuads == kThreads, "every thread owns one quad of a slice");

    // Query fragments are read from shared memory once where they fit beside the sums in registers.
    static constexpr bool kQueryInRegisters = kRowBlocks * (kHeadDim / 4 + kValueDim / 2) <= 128;
};

// --- Shared memory -----------------------------------------------------------------------------------

struct SharedPlan {
    size_t keys, values, query, exchange;  // byte offsets
    size_t bytes, device_bytes;
};

template <class Tr>
constexpr SharedPlan shared_plan() {
    using T = typename Tr::T;
    using C = typename Tr::C;
    cu::SmemLayout layout;
    SharedPlan plan{};
    plan.keys = layout.add<C>(Tr::kStages * kTileTokens * Tr::kHeadDim);     // [stage, token, D]
    plan.values = layout.add<C>(Tr::kStages * kTileTokens * Tr::kValueDim);  // [stage, token, Dv]
    plan.query = layout.add<T>(Tr::kRows * Tr::kHeadDim);                    // [row, D]
    plan.exchange =
        layout.add<float>(Tr::kParts * Tr::kRows * Tr::kSliceColumns);  // [part, row, col]
    plan.bytes = layout.bytes();
    plan.device_bytes = layout.device_bytes();
    return plan;
}

template <class Tr>
constexpr SharedPlan kSharedPlan = shared_plan<Tr>();  // a constant, as device code cannot call it

template <class T>
struct alignas(16) Chunk {  // what one lane copies: 16 bytes of a row
    T x[16 / sizeof(T)];
};

// Element offset of 16-byte chunk `chunk` in row `row` of a matrix [rows][kDim] in shared memory. Eight
// rows at one chunk, and eight chunks of one row, both lie in different banks: rows of an odd number of
// chunks do so by themselves; where 2, 4 or 8 divides it, every 4, 2 or 1 rows that many chunks swap.
template <class T, int kDim>
__device__ __forceinline__ int swizzled(int row, int chunk) {
    constexpr int kElements = 16 / static_cast<int>(sizeof(T)), kChunks = kDim / kElements;
    constexpr int kSwap = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : kChunks % 2 == 0 ? 2 : 1;
    return (row * kChunks + (chunk ^ (row / (8 / kSwap) & (kSwap - 1)))) * kElements;
}

// Same for the exchange buffer of floats, whose rows are 16 or 32 words: the four rows that a half-warp
// stores 8-byte pairs of lie in different banks; with fp8 caches, the two rows that a quarter of one stores
// 16-byte quads of.
template <class Tr>
__device__ __forceinline__ int exchange_index(int row, int column) {
    constexpr int kColumns = Tr::kSliceColumns, kPiece = Tr::kFp8 ? 16 : 8;
    return row * kColumns + (column ^ (row / (32 / kColumns) % (kColumns / kPiece) * kPiece));
}

// Global to shared, asynchronously where rows are 16-byte aligned; zeros where there is no source.
template <class T>
__device__ __forceinline__ void copy_chunk(T* target, const T* source, bool valid, bool aligned) {
    if (aligned) {
        ptx::cp_async16_zfill(target, source, valid);
        return;
    }
    Chunk<T> chunk;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(chunk) / sizeof(T)); ++i) {
        chunk.x[i] = valid ? source[i] : T{};
    }
    *reinterpret_cast<Chunk<T>*>(target) = chunk;
}

template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<bf16>(float low, float high) {
    return ptx::pack_bf16(low, high);
}
template <>
__device__ __forceinline__ uint32_t pack<f16>(float low, float high) {
    return ptx::pack_f16(low, high);
}

// Where a thread stands. Made anew in every tile from a thread index that the compiler must read again:
// addresses derived from it would otherwise be computed once and held in registers that are needed for
// sums.
template <class Tr>
struct Lane {
    int thread = static_cast<int>(ptx::thread_x());
    int lane = thread % 32;
    int part = thread / 32 % Tr::kParts;      // which 16 tokens of a tile
    int row_warp = thread / 32 / Tr::kParts;  // which rows
    int first_row = row_warp * Tr::kRowBlocks * 16;
    // ldmatrix: a 16x16 block whose four 8x8 matrices go down first, then right; or right, then down.
    int down_row = lane % 16, down_chunk = lane / 16;
    int right_row = lane / 16 * 8 + lane % 8, right_chunk = lane / 8 % 2;

    // The warps that share one part of the tokens wait for each other.
    __device__ __forceinline__ void sync_part() const {
        if constexpr (Tr::kRowWarps == 1) {
            __syncwarp();
        } else {
            ptx::bar_sync(1 + part, 32 * Tr::kRowWarps);
        }
    }
};

template <class Tr>
struct SharedArrays {
    using T = typename Tr::T;
    using C = typename Tr::C;
    C* keys;
    C* values;
    T* query;
    float* exchange;

    __device__ __forceinline__ explicit SharedArrays(unsigned char* memory) {
        constexpr SharedPlan plan = kSharedPlan<Tr>;
        constexpr int kTokens = Tr::kStages * kTileTokens;
        keys = cu::smem_at<C>(memory, plan.keys, kTokens * Tr::kHeadDim);
        values = cu::smem_at<C>(memory, plan.values, kTokens * Tr::kValueDim);
        query = cu::smem_at<T>(memory, plan.query, Tr::kRows * Tr::kHeadDim);
        exchange =
            cu::smem_at<float>(memory, plan.exchange, Tr::kParts * Tr::kRows * Tr::kSliceColumns);
    }
    // The 16 rows of one part in one stage of the ring.
    __device__ __forceinline__ C* key_slot(int stage, const Lane<Tr>& at) const {
        return keys + (stage * kTileTokens + at.part * Tr::kWarpTokens) * Tr::kHeadDim;
    }
    __device__ __forceinline__ C* value_slot(int stage, const Lane<Tr>& at) const {
        return values + (stage * kTileTokens + at.part * Tr::kWarpTokens) * Tr::kValueDim;
    }
};

// --- Task: what the block works on, in shared memory for the same reason -----------------------------

struct Task {
    Item item;
    int64_t stop;                    // end of the task in the list of items
    int64_t range_begin, range_end;  // of all that the block does, in the list of items
    int64_t partial_slot;            // of segment `first`, or -1: fold, starting with segment 0
    int first, last;                 // segments
    int end_tile;                    // first tile without a place that any row sees
    int limit;                       // places from here on are seen by no row
    int begin;                       // places below this are seen by no row
    int all_begin, all_end;          // places that every row sees
    float factor;                    // of LogitScale, with the scale of K
};

__device__ __forceinline__ int packed_rows(const VerifyAttentionParams& p, const Item& item) {
    return item.request.rows * group_size(p);
}

// Number in its request of a row of the tile; padding rows see what the last row sees.
template <class Tr>
__device__ __forceinline__ int row_number(const VerifyAttentionParams& p, const Item& item,
                                          int row) {
    const int packed = min(item.row_block * Tr::kRows + row, packed_rows(p, item) - 1);
    return packed / group_size(p);
}

template <class Tr>
__device__ __forceinline__ int row_limit(const VerifyAttentionParams& p, const Item& item,
                                         int row) {
    return visible_places(p, item.request, row_number<Tr>(p, item, row));
}

// What no row and what every row of the tile sees. One thread calls.
template <class Tr>
__device__ __forceinline__ void find_reach(const VerifyAttentionParams& p, Task& task) {
    const Item& item = task.item;
    task.limit = row_limit<Tr>(p, item, Tr::kRows - 1);
    task.begin = task.all_begin = 0;
    task.all_end = row_limit<Tr>(p, item, 0);
    if (!has_holes(p)) return;
    const int prefix = max(item.request.prefix, 0);
    task.all_end = min(task.all_end, prefix);
    if (p.window == 0) return;
    task.begin = prefix;
    const int last = row_number<Tr>(p, item, Tr::kRows - 1);
    for (int j = row_number<Tr>(p, item, 0); j <= last; ++j) {
        const PlaceRange window = prefix_window(p, pass_rows(item.request), j);
        task.begin = min(task.begin, static_cast<int>(window.begin));
        task.all_begin = max(task.all_begin, static_cast<int>(window.begin));
        task.all_end = min(task.all_end, static_cast<int>(window.end));
    }
}

template <class Tr>
__device__ __forceinline__ bool seen_by_all(const Task& task, uint32_t valid, int first_token) {
    return valid == 0xffffu && first_token >= task.all_begin &&
           first_token + Tr::kWarpTokens <= task.all_end;
}

}  // namespace specdec::cuda
