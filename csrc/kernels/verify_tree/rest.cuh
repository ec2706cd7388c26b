// What rejections leave of a node's law, and draws from it, by the block of the last launch.
//
// After some rejections the law of the next token is max(a p - b q, 0) off the rejected ids, not
// normalised. A rejection costs one pass over the two rows: a warp owns a tile and sums it strip after
// strip, by the tree of vocab_rows.cuh. Where d2t scatters q, the block owns a tile at a time, as its q
// lies in shared memory. What is weighed lies there too: two rows with their edits are more than a
// thread's registers hold beside the entries.
#pragma once

#include "request.cuh"
#include "vocab_draw.cuh"

namespace specdec::cuda {

// Threads of the last launch: those of the selection that finds the most probable ids at its end.
constexpr int kWalkThreads = 512;
constexpr int kWalkWarps = kWalkThreads / kWarpSize;

// The first `count` children of a node.
struct RejectedIds {
    static constexpr bool kBesideQ = true;
    const TreeChild* children;
    int32_t count;

    __device__ __forceinline__ bool holds(int64_t id) const {
        bool found = false;
        for (int32_t k = 0; k < count; ++k) found = found || children[k].id == id;
        return found;
    }
    template <int kCount, class IdOf>
    __device__ __forceinline__ void take(IdSpan span, IdOf id_of, float (&mass)[kCount]) const {
        for (int32_t k = 0; k < count; ++k) {
            const int64_t id = children[k].id;
            if (!span.holds(id)) continue;
#pragma unroll
            for (int i = 0; i < kCount; ++i) mass[i] = id_of(i) == id ? 0.0f : mass[i];
        }
    }
};

struct Rest {
    EntryMass<RejectedIds> weight;
    DraftMap map;     // where q has to be scattered
    float* q_values;  // for a tile of it; nullptr: weight has q, or none is needed
    const TileStats* tiles;
    int num_tiles;
    bool filtered;  // tiles that keep nothing are passed over

    __device__ __forceinline__ bool keeps_any(int tile) const {
        return !filtered || load_stats(tiles + tile).sum > 0.0f;
    }
    // Before a tile is looked at.
    __device__ __forceinline__ void prepare(int tile) const {
        if (q_values != nullptr) scatter_q(map, weight.q_row, weight.q, tile, q_values);
    }
};

// Fills in what is left at a node: the children before at.next are rejected. Member by member, as the
// whole would not fit a thread's registers.
__device__ __forceinline__ void set_rest(const VerifyTreeParams& p, const TreePlan& plan,
                                         const TreeRequest& r, const TreeNode& at, float* q_values,
                                         Rest& rest) {
    const RowScratch scratch = target_scratch(p, plan, r.first + at.node);
    rest.map = draft_map(p, plan);
    rest.q_values = r.reads_q && plan.has_map ? q_values : nullptr;
    rest.tiles = scratch.tiles;
    rest.num_tiles = scratch.num_tiles;
    rest.filtered = r.p.filtered;
    EntryMass<RejectedIds>& weight = rest.weight;
    weight.p_row = target_row(p, r, at.node);
    weight.q_row = draft_row(p, r, at.node);
    weight.q_values = rest.q_values;
    weight.p = at.p;
    weight.q = at.q;
    weight.removed =
        RejectedIds{scratch_at<TreeChild>(p, plan.children) + r.first + at.list, at.next};
    weight.a = static_cast<float>(at.a);
    weight.b = static_cast<float>(at.b);
}

// Sums of kStripCount strips from `first` on, by a warp: that of strip s is in sums[s], in every lane.
template <int kStripCount>
__device__ __forceinline__ void sum_strips_by_warp(const EntryMass<RejectedIds>& weight,
                                                   int64_t first, float (&sums)[kStripCount]) {
    float mass[kStripCount * kQuad];
    weight.of_strips(first, mass);
#pragma unroll
    for (int s = 0; s < kStripCount; ++s) {
        float sum = quad_sum(mass + s * kQuad);
#pragma unroll
        for (int lanes = 1; lanes < kWarpSize; lanes *= 2) sum = sum + warp_exchange(sum, lanes);
        sums[s] = sum;
    }
}

// Sums of all strips of a tile, by the block's warps side by side; a barrier follows.
CU_NOINLINE __device__ inline void sum_strips_by_block(const EntryMass<RejectedIds>& weight,
                                                       int tile, float* strips) {
    constexpr int kEach = kStrips / kWalkWarps;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int first = static_cast<int>(threadIdx.x) / kWarpSize * kEach;
    float sums[kEach];
    sum_strips_by_warp(weight, tile * kVocabTile + first * kStrip, sums);
    if (lane == 0) {
#pragma unroll
        for (int s = 0; s < kEach; ++s) strips[first + s] = sums[s];
    }
    __syncthreads();
}

// Mass of a tile, by a warp.
CU_NOINLINE __device__ inline float tile_mass_by_warp(const EntryMass<RejectedIds>& weight,
                                                      int tile) {
    constexpr int kAtOnce = 4;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    float mine = 0.0f;
#pragma unroll 1
    for (int first = 0; first < kStrips; first += kAtOnce) {
        float sums[kAtOnce];
        sum_strips_by_warp(weight, tile * kVocabTile + first * kStrip, sums);
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s) mine = lane == first + s ? sums[s] : mine;
    }
    return warp_sum(mine);
}

// Masses of all tiles; a barrier follows.
__device__ __forceinline__ void sum_rest(const Rest& rest, float* masses, float* strips) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    if (rest.q_values == nullptr) {
        for (int tile = warp; tile < rest.num_tiles; tile += kWalkWarps) {
            const float mass = rest.keeps_any(tile) ? tile_mass_by_warp(rest.weight, tile) : 0.0f;
            if (lane == 0) masses[tile] = mass;
        }
    } else {
        for (int tile = 0; tile < rest.num_tiles; ++tile) {
            float mass = 0.0f;
            if (rest.keeps_any(tile)) {
                rest.prepare(tile);
                sum_strips_by_block(rest.weight, tile, strips);
                mass = warp_sum(strips[lane]);
            }
            if (threadIdx.x == 0) masses[tile] = mass;
        }
    }
    __syncthreads();
}

}  // namespace specdec::cuda
