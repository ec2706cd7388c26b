// Statistics of the vocabulary tiles of a row on CUDA, and where a row's scratch lies.
//
// One block reads one tile once, 16 entries a thread, and leaves what every later step needs: the
// maximum and where it is, the sum of the law's weights, and, only where the call asks for them, the
// sum of the raw row, the entropy sum and the maxima of groups of entries. Calls without edits run an
// instance in which none of that costs a register.
#pragma once

#include "row_edits.cuh"

namespace specdec::cuda {

// --- Scratch of a row -------------------------------------------------------------------------------
// x: logits as they came; z: after the edits (the same without any).
struct alignas(16) TileStats {
    float max;      // of the usable z; -inf when there is none
    float sum;      // of 2^((z - max) * scale); of a filtered row, after its launch: what the tile
                    // keeps of 2^((z - row maximum) * scale)
    float raw_sum;  // of 2^((x - x maximum) * log2(e)), where asked for
    uint32_t peak;  // place in the tile of the lowest id of max, and the flags below
};
constexpr uint32_t kPeakPlace = kVocabTile - 1;
constexpr uint32_t kBadRaw = 0x10000u;     // x has NaN or +inf
constexpr uint32_t kBadEdited = 0x20000u;  // z has
constexpr uint32_t kFiniteRaw = 0x40000u;  // x has something finite

// What filters make of a row: the ids that they keep (Cut, but a 32-bit id), log2 of the sum of
// 2^((z - max) * scale) over them, and the mean of (z - max) * scale under the law.
struct alignas(16) RowCut {
    float z;
    int32_t id;
    float log2_sum;
    float mean_exponent;
};

// Group maxima: 16 a tile, the upper halves of order-preserving keys, which rounds down. Where both x
// and z need them each has 8.
constexpr int kGroupsPerTile = 16;

struct GroupMaxima {
    const uint16_t* data = nullptr;
    int per_tile = kGroupsPerTile;
    int first = 0;  // in each tile
    int num_tiles = 0;

    __device__ __forceinline__ int count() const { return num_tiles * per_tile; }
    __device__ __forceinline__ int entries() const { return kTileEntries / per_tile; }
    __device__ __forceinline__ uint32_t operator[](int g) const {
        return data[g / per_tile * kGroupsPerTile + first + g % per_tile];
    }
};

struct RowScratch {
    TileStats* tiles;
    float* raw_max;       // [tiles]; nullptr: x is z
    float* exponent_sum;  // [tiles] sums of weight * (z - max) * scale, or nullptr
    uint16_t* groups;     // [tiles, kGroupsPerTile] or nullptr
    RowCut* cut;          // or nullptr
    int num_tiles;
    bool raw_groups;  // of the groups of a tile, z has the first half and x the second

    __device__ __forceinline__ GroupMaxima z_maxima() const {
        return GroupMaxima{groups, raw_groups ? kGroupsPerTile / 2 : kGroupsPerTile, 0, num_tiles};
    }
    __device__ __forceinline__ GroupMaxima raw_maxima() const {
        if (!raw_groups) return z_maxima();
        return GroupMaxima{groups, kGroupsPerTile / 2, kGroupsPerTile / 2, num_tiles};
    }
};

// Which of these the rows of a call have: 16 bytes a tile, up to 56 with everything.
struct RowLayout {
    int num_tiles;
    bool raw_max, exponent_sum, groups, raw_groups, cut;

    SPECDEC_HD int64_t bytes() const {
        const int64_t per_tile = static_cast<int64_t>(sizeof(TileStats)) + (raw_max ? 4 : 0) +
                                 (exponent_sum ? 4 : 0) + (groups ? 2 * kGroupsPerTile : 0);
        return (num_tiles * per_tile + (cut ? static_cast<int64_t>(sizeof(RowCut)) : 0) + 15) / 16 *
               16;
    }
    __device__ __forceinline__ RowScratch at(void* rows, int64_t row) const {
        unsigned char* next = static_cast<unsigned char*>(rows) + row * bytes();
        const auto take = [&](bool present, int64_t size) {
            unsigned char* here = next;
            next += present ? size : 0;
            return present ? here : nullptr;
        };
        RowScratch s;
        s.tiles = reinterpret_cast<TileStats*>(take(true, num_tiles * sizeof(TileStats)));
        s.cut = reinterpret_cast<RowCut*>(take(cut, sizeof(RowCut)));
        s.groups = reinterpret_cast<uint16_t*>(
            take(groups, num_tiles * static_cast<int64_t>(2 * kGroupsPerTile)));
        s.raw_max = reinterpret_cast<float*>(take(raw_max, num_tiles * int64_t{4}));
        s.exponent_sum = reinterpret_cast<float*>(take(exponent_sum, num_tiles * int64_t{4}));
        s.num_tiles = num_tiles;
        s.raw_groups = raw_groups;
        return s;
    }
};

// The layout of the rows of one kind in a call.
struct RowNeeds {
    bool edited, filtered;
    bool raw;      // the sum of x
    bool entropy;  // for `typical`
    bool top;      // the most probable ids
    bool raw_top;  // by x
};

SPECDEC_HD RowLayout row_layout(int64_t columns, const RowNeeds& needs) {
    RowLayout l;
    l.num_tiles = static_cast<int>(num_vocab_tiles(columns));
    l.raw_max = needs.raw && needs.edited;
    l.exponent_sum = needs.entropy;
    l.groups = needs.filtered || needs.top;
    l.raw_groups = needs.top && needs.raw_top && needs.edited;
    l.cut = needs.filtered;
    return l;
}

// --- Order-preserving keys --------------------------------------------------------------------------
// Larger float, larger key; the two zeros are one.
__device__ __forceinline__ uint32_t key_of(float z) {
    const uint32_t bits = float_bits(z + 0.0f);
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float float_of_key(uint32_t key) {
    return bits_float((key & 0x80000000u) != 0 ? key ^ 0x80000000u : ~key);
}

// --- Statistics of a tile ---------------------------------------------------------------------------
struct StatsPlan {
    float warp_max[kTileWarps];
    uint32_t warp_argmax[kTileWarps];
    float strips[kStrips];
    float raw_strips[kStrips];
};

// What only some calls need.
struct MoreStatsPlan {
    float warp_raw_max[kTileWarps];
    uint32_t warp_flags[kTileWarps];
    float exponent_strips[kStrips];
    float strip_max[kStrips];
    float raw_strip_max[kStrips];
};

struct StatsWanted {
    float scale;        // 0: the sum is not wanted
    bool raw_sum;       // of x
    bool exponent_sum;  // of z
    bool groups;
};

// Takes NaN and +inf out; whether there were any.
__device__ __forceinline__ bool drop_bad(float (&x)[kEntriesPerThread]) {
    bool bad = false;
#pragma unroll
    for (int i = 0; i < kEntriesPerThread; ++i) {
        const bool bad_entry = is_bad_logit(x[i]);
        bad = bad || bad_entry;
        x[i] = bad_entry ? minus_infinity() : x[i];
    }
    return bad;
}

__device__ __forceinline__ float max_of(const float (&x)[kEntriesPerThread]) {
    float most = minus_infinity();
#pragma unroll
    for (int i = 0; i < kEntriesPerThread; ++i) most = fmaxf(most, x[i]);
    return most;
}

__device__ __forceinline__ float fold_max(const float* warp_max) {
    float max = warp_max[0];
#pragma unroll
    for (int w = 1; w < kTileWarps; ++w) max = fmaxf(max, warp_max[w]);
    return max;
}

// Maxima of the strips of a tile, by the whole block; barrier before reading them.
template <int kVec>
__device__ __forceinline__ void max_strips(const float (&x)[kEntriesPerThread], float* strips) {
#pragma unroll
    for (int round = 0; round < kEntriesPerThread / kVec; ++round) {
        float most = x[round * kVec];
#pragma unroll
        for (int i = 1; i < kVec; ++i) most = fmaxf(most, x[round * kVec + i]);
#pragma unroll
        for (int lanes = 1; lanes < kStrip / kVec; lanes *= 2) {
            most = fmaxf(most, warp_exchange(most, lanes));
        }
        const int start = entry_place<kVec>(round * kVec);
        if (start % kStrip == 0) strips[start / kStrip] = most;
    }
}

// Upper half of the key of the maximum of strips [first, first + count).
__device__ __forceinline__ uint16_t group_key(const float* strips, int first, int count) {
    float most = strips[first];
    for (int s = 1; s < count; ++s) most = fmaxf(most, strips[first + s]);
    return static_cast<uint16_t>(key_of(most) >> 16);
}

// By the whole block, once per block. kRaw: the sum of x is wanted; kEdits: the row has edits; kMore:
// entropy or groups are wanted. `more` is used with kEdits or kMore only.
template <int kVec, bool kRaw, bool kEdits, bool kMore>
__device__ __forceinline__ void tile_statistics(const VocabRow& whole, int tile,
                                                const StatsWanted& wanted, StatsPlan& plan,
                                                MoreStatsPlan* more, const RowScratch& out) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    float x[kEntriesPerThread];
    load_tile<kVec>(whole.row, whole.columns, tile, x);

    const auto sum_scaled = [&](float from, float by, float* strips) {
        float mass[kEntriesPerThread];
#pragma unroll
        for (int i = 0; i < kEntriesPerThread; ++i) mass[i] = ptx::ex2((x[i] - from) * by);
        sum_strips<kVec>(mass, strips);
    };

    // Unusable entries are reported and then have no mass. Then x becomes z.
    bool bad = drop_bad(x);
    uint32_t flags = 0;
    float raw_max = 0.0f;
    if constexpr (kEdits) {
        flags = bad ? kBadRaw : 0u;
        const float most = warp_max(max_of(x));
        if (most > minus_infinity()) flags |= kFiniteRaw;
        if (wanted.raw_sum) {
            if (lane == 0) more->warp_raw_max[warp] = most;
            __syncthreads();
            raw_max = fold_max(more->warp_raw_max);
            sum_scaled(raw_max > minus_infinity() ? raw_max : 0.0f, kLog2E, plan.raw_strips);
        }
        if (wanted.groups && out.raw_groups) max_strips<kVec>(x, more->raw_strip_max);
        const int64_t first = tile * kVocabTile;
        whole.apply(
            first, first + kVocabTile, [&](int i) { return first + entry_place<kVec>(i); }, x);
        flags |= drop_bad(x) ? kBadEdited : 0u;
        flags = __reduce_or_sync(kFullMask, flags);
        if (lane == 0) more->warp_flags[warp] = flags;
    }

    // The maximum.
    const float most = warp_max(max_of(x));
    if (lane == 0) plan.warp_max[warp] = most;
    const bool bad_tile = __syncthreads_or(bad) != 0;
    const float max = fold_max(plan.warp_max);
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
    const bool raw_too = kRaw && !kEdits && wanted.scale != kLog2E && (!kMore || wanted.raw_sum);
    if (wanted.scale > 0.0f) sum_scaled(origin, wanted.scale, plan.strips);
    if (raw_too) sum_scaled(origin, kLog2E, plan.raw_strips);
    if constexpr (kMore) {
        if (wanted.groups) max_strips<kVec>(x, more->strip_max);
        if (wanted.exponent_sum) {
            float part[kEntriesPerThread];
#pragma unroll
            for (int i = 0; i < kEntriesPerThread; ++i) {
                const float exponent = (x[i] - origin) * wanted.scale;
                const float weight = ptx::ex2(exponent);
                part[i] = weight > 0.0f ? weight * exponent : 0.0f;
            }
            sum_strips<kVec>(part, more->exponent_strips);
        }
    }
    __syncthreads();

    // One warp puts the tile's parts together.
    if (warp != 0) return;
    TileStats stats;
    stats.max = max;
    stats.sum = wanted.scale > 0.0f ? warp_sum(plan.strips[lane]) : 0.0f;
    const bool raw_apart = raw_too || (kEdits && wanted.raw_sum);
    stats.raw_sum = raw_apart ? warp_sum(plan.raw_strips[lane]) : stats.sum;
    argmax = lane < kTileWarps ? plan.warp_argmax[lane] : 0xffffffffu;
    argmax = __reduce_min_sync(kFullMask, argmax);
    stats.peak = any ? argmax : 0u;
    if constexpr (kEdits) {
        flags = __reduce_or_sync(kFullMask, lane < kTileWarps ? more->warp_flags[lane] : 0u);
        stats.peak |= flags;
    } else {
        if (any) stats.peak |= kFiniteRaw;
        if (bad_tile) stats.peak |= kBadRaw;
    }
    if (lane == 0) out.tiles[tile] = stats;
    if constexpr (kEdits) {
        if (lane == 0 && out.raw_max != nullptr) out.raw_max[tile] = raw_max;
    }
    if constexpr (kMore) {
        if (wanted.exponent_sum) {
            const float sum = warp_sum(more->exponent_strips[lane]);
            if (lane == 0) out.exponent_sum[tile] = sum;
        }
        if (wanted.groups && lane < kGroupsPerTile) {
            // A group is 2 strips; 4 where x and z share the room.
            const int half = kGroupsPerTile / 2;
            const float* strips =
                lane < half || !out.raw_groups ? more->strip_max : more->raw_strip_max;
            out.groups[tile * kGroupsPerTile + lane] = out.raw_groups
                                                           ? group_key(strips, lane % half * 4, 4)
                                                           : group_key(strips, lane * 2, 2);
        }
    }
}

template <bool kRaw, bool kEdits, bool kMore>
__device__ __forceinline__ void tile_statistics(const VocabRow& row, int tile,
                                                const StatsWanted& wanted, StatsPlan& plan,
                                                MoreStatsPlan* more, const RowScratch& out) {
    if (row.row.dtype == DType::kF32) {
        tile_statistics<4, kRaw, kEdits, kMore>(row, tile, wanted, plan, more, out);
    } else {
        tile_statistics<8, kRaw, kEdits, kMore>(row, tile, wanted, plan, more, out);
    }
}

}  // namespace specdec::cuda
