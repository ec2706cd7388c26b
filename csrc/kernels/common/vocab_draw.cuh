// Inverse-CDF draws on CUDA, in vocabulary order, with one uniform: first a tile by its mass, then,
// after one more look at that tile only, a strip, a quad and an entry of it (see vocab_rows.cuh).
//
// At each level the number left over is carried on as the fraction of the chosen bucket's mass, so
// that no level depends on another one's rounding. Buckets are half-open and one without mass is
// never chosen while another has any: an id of probability 0 cannot come out, nor one past the end.
// The id is monotone in the uniform.
#pragma once

#include "row_stats.cuh"

namespace specdec::cuda {

struct Bucket {
    int index;
    float fraction;  // of its mass, below the number looked for
};

// Sum of mass_of(0..count-1), in a fixed order. By whole warps; every lane gets the result.
template <class MassOf>
__device__ __forceinline__ float total_mass(int count, MassOf mass_of) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    float total = 0.0f;
    for (int first = 0; first < count; first += kWarpSize) {
        const float mass = first + lane < count ? mass_of(first + lane) : 0.0f;
        total = __shfl_sync(kFullMask, total + warp_inclusive_sum(mass), kWarpSize - 1);
    }
    return total;
}

// The first bucket with mass whose running sum exceeds u * total_mass, else the last one with mass.
template <class MassOf>
__device__ __forceinline__ Bucket pick_bucket(int count, float u, float total, MassOf mass_of) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const float target = u * total;
    float before = 0.0f;
    Bucket last{0, 1.0f};
    for (int first = 0; first < count; first += kWarpSize) {
        const float mass = first + lane < count ? mass_of(first + lane) : 0.0f;
        const float after = before + warp_inclusive_sum(mass);
        const unsigned above = __ballot_sync(kFullMask, mass > 0.0f && after > target);
        const unsigned positive = __ballot_sync(kFullMask, mass > 0.0f);
        // What lies below each lane's bucket is the running sum of the lane before it.
        float below = __shfl_up_sync(kFullMask, after, 1);
        if (lane == 0) below = before;
        if (above != 0) {
            const int chosen = __ffs(static_cast<int>(above)) - 1;
            const float fraction = fmaxf(target - below, 0.0f) / mass;
            return Bucket{first + chosen, __shfl_sync(kFullMask, fraction, chosen)};
        }
        if (positive != 0) {
            last.index = first + kWarpSize - 1 - __clz(static_cast<int>(positive));
        }
        before = __shfl_sync(kFullMask, after, kWarpSize - 1);
    }
    return last;
}

// --- What an entry weighs: max(a p - b q, 0) ------------------------------------------------------
// a = b = 1 is bitwise max(p - q, 0).
struct OneId {
    static constexpr bool kBesideQ = false;
    int64_t id = -1;  // -1: none

    // Takes mass[i], of id id_of(i), away where that id is removed; all ids lie in `span`.
    template <int kCount, class IdOf>
    __device__ __forceinline__ void take(IdSpan, IdOf id_of, float (&mass)[kCount]) const {
#pragma unroll
        for (int i = 0; i < kCount; ++i) mass[i] = id_of(i) == id ? 0.0f : mass[i];
    }
};

// Removed: the ids that have no mass where there is no q (a one-hot q is that of its draft); with
// kBesideQ, also where there is one.
template <class Removed = OneId>
struct EntryMass {
    VocabRow p_row;
    VocabRow q_row;  // none: see Removed
    const float*
        q_values;  // q of the tile looked at where d2t scatters it (draft_map.cuh), or nullptr
    RowLaw p, q;
    Removed removed;
    float a = 1.0f, b = 1.0f;

    // Of a thread's 16 entries of a tile, in groups of a quad.
    __device__ __forceinline__ void of_tile(int tile, float (&mass)[kEntriesPerThread]) const {
        weigh(
            mass, IdSpan{tile * kVocabTile, (tile + 1) * kVocabTile},
            [&](const VocabRow& row, auto& x) { row.load_tile(tile, x); },
            [&](int i) { return tile * kVocabTile + entry_place<kQuad>(i); });
    }
    // Of the lane's quads of the strips that begin at `first`.
    template <int kCount>
    __device__ __forceinline__ void of_strips(int64_t first, float (&mass)[kCount]) const {
        weigh(
            mass, IdSpan{first, first + kCount / kQuad * kStrip},
            [&](const VocabRow& row, auto& x) { row.load_strips(first, x); },
            [&](int i) { return first + strip_place(i); });
    }
    // Of the entries first..first+3.
    __device__ __forceinline__ void of_quad(int64_t first, float (&mass)[kQuad]) const {
        weigh(
            mass, IdSpan{first, first + kQuad},
            [&](const VocabRow& row, auto& x) { row.load_quad(first, x); },
            [&](int i) { return first + i; });
    }

  private:
    template <int kCount, class Load, class IdOf>
    __device__ __forceinline__ void weigh(float (&mass)[kCount], IdSpan span, Load load,
                                          IdOf id_of) const {
        load(p_row, mass);
#pragma unroll
        for (int i = 0; i < kCount; ++i) mass[i] = a * p(mass[i], id_of(i));
        if (Removed::kBesideQ || !q_row.exists()) removed.take(span, id_of, mass);
        if (!q_row.exists()) return;
        if (q_values != nullptr) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                mass[i] = fmaxf(mass[i] - b * q_values[id_of(i) % kVocabTile], 0.0f);
            }
        } else {
            float y[kCount];
            load(q_row, y);
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                mass[i] = fmaxf(mass[i] - b * q(y[i], id_of(i)), 0.0f);
            }
        }
    }
};

// A law within one tile: relative to the tile's maximum, so that a tile with mass has an entry with
// mass, however far it lies below the row's maximum.
__device__ __forceinline__ RowLaw law_in_tile(RowLaw law, float tile_max) {
    law.max = tile_max;
    law.log2_sum = 0.0f;
    return law;
}
__device__ __forceinline__ EntryMass<> law_in_tile(const VocabRow& row, const RowLaw& law,
                                                   float tile_max) {
    return EntryMass<>{row, VocabRow{}, nullptr, law_in_tile(law, tile_max), RowLaw{}, OneId{}};
}

// --- Draws, by the whole block --------------------------------------------------------------------

// Mass of one tile. Every thread gets the result.
template <class Removed>
CU_NOINLINE __device__ inline float tile_mass(const EntryMass<Removed>& weight, int tile,
                                              float* strips) {
    float mass[kEntriesPerThread];
    weight.of_tile(tile, mass);
    sum_strips<kQuad>(mass, strips);
    __syncthreads();
    const float sum = warp_sum(strips[threadIdx.x % kWarpSize]);
    __syncthreads();  // the next tile may overwrite the strips
    return sum;
}

// Draws an id of a tile whose strips have been summed up. The result is valid in warp 0.
template <class Removed>
__device__ __forceinline__ int64_t draw_from_strips(const EntryMass<Removed>& weight, int tile,
                                                    float u, const float* strips) {
    if (threadIdx.x >= kWarpSize) return 0;
    const int lane = static_cast<int>(threadIdx.x);
    const float strip_mass = strips[lane];
    const auto strip_of = [&](int) { return strip_mass; };
    const Bucket strip = pick_bucket(kStrips, u, total_mass(kStrips, strip_of), strip_of);

    const int64_t strip_start = tile * kVocabTile + strip.index * kStrip;
    float entry[kQuad];
    weight.of_quad(strip_start + lane * kQuad, entry);
    const float quad_mass = quad_sum(entry);
    const auto quad_of = [&](int) { return quad_mass; };
    const Bucket quad =
        pick_bucket(kWarpSize, strip.fraction, total_mass(kWarpSize, quad_of), quad_of);

    // Each lane looks for the entry in its own quad; the chosen quad's answer counts.
    const float target = quad.fraction * quad_mass;
    float after = 0.0f;
    int chosen = 0;
    bool found = false;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
        after = after + entry[i];
        if (!found && entry[i] > 0.0f) {
            chosen = i;
            found = after > target;
        }
    }
    chosen = __shfl_sync(kFullMask, chosen, quad.index);
    return strip_start + quad.index * kQuad + chosen;
}

// Draws an id of one tile. The result is valid in warp 0.
template <class Removed>
CU_NOINLINE __device__ inline int64_t draw_in_tile(const EntryMass<Removed>& weight, int tile,
                                                   float u, float* strips) {
    float mass[kEntriesPerThread];
    weight.of_tile(tile, mass);
    sum_strips<kQuad>(mass, strips);
    __syncthreads();
    return draw_from_strips(weight, tile, u, strips);
}

// Where a number falls among the tiles, and what the entries of that tile weigh.
struct Pick {
    EntryMass<> weight;
    Bucket tile;
};

// By whole warps; every lane gets the result.
__device__ __forceinline__ Bucket tile_of_law(const RowScratch& s, const RowLaw& law, bool filtered,
                                              float u) {
    const auto mass_of = [&](int t) {
        const TileStats tile = load_stats(s.tiles + t);
        return filtered ? tile.sum : tile_mass(tile, law.max, law.scale);
    };
    return pick_bucket(s.num_tiles, u, total_mass(s.num_tiles, mass_of), mass_of);
}

// Of the row's law, by the whole block: one thread fills the pick, for all.
__device__ __forceinline__ void pick_from_law(const VocabRow& row, const RowScratch& s,
                                              const RowLaw& law, bool filtered, float u,
                                              Uniform<Pick>& shared) {
    const Bucket tile = tile_of_law(s, law, filtered, u);
    if (threadIdx.x == 0) {
        Pick& pick = shared.get();
        pick.weight = law_in_tile(row, law, load_stats(s.tiles + tile.index).max);
        pick.tile = tile;
    }
    __syncthreads();
}

__device__ __forceinline__ int64_t draw(const Pick& pick, float* strips) {
    return draw_in_tile(pick.weight, pick.tile.index, pick.tile.fraction, strips);
}

}  // namespace specdec::cuda
