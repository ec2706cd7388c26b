// Inverse-CDF draws on CUDA, in vocabulary order, with one uniform: first a tile by its mass, then,
// after one more look at that tile only, a strip, a quad and an entry of it (see vocab_rows.cuh).
//
// At each level the number left over is carried on as the fraction of the chosen bucket's mass, so
// that no level depends on another one's rounding. Buckets are half-open and one without mass is
// never chosen while another has any: an id of probability 0 cannot come out, nor one past the end.
// The id is monotone in the uniform.
#pragma once

#include "vocab_rows.cuh"

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

// --- What an entry weighs: max(p - q, 0) ----------------------------------------------------------
struct EntryMass {
    Row p_row;
    Row q_row;      // data nullptr: q is one-hot at `draft`
    int64_t draft;  // -1: there is no q
    int64_t vocab_size;
    RowLaw p, q;

    // Of a thread's 16 entries of a tile, in groups of a quad.
    __device__ __forceinline__ void of_tile(int tile, float (&mass)[kEntriesPerThread]) const {
        weigh(
            mass, [&](const Row& row, auto& x) { load_tile<kQuad>(row, vocab_size, tile, x); },
            [&](int i) { return tile * kVocabTile + entry_place<kQuad>(i); });
    }
    // Of the entries first..first+3.
    __device__ __forceinline__ void of_quad(int64_t first, float (&mass)[kQuad]) const {
        weigh(
            mass, [&](const Row& row, auto& x) { load_quad(row, vocab_size, first, x); },
            [&](int i) { return first + i; });
    }

  private:
    template <int kCount, class Load, class IdOf>
    __device__ __forceinline__ void weigh(float (&mass)[kCount], Load load, IdOf id_of) const {
        load(p_row, mass);
        if (q_row.data == nullptr) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) mass[i] = id_of(i) == draft ? 0.0f : p(mass[i]);
            return;
        }
        float y[kCount];
        load(q_row, y);
#pragma unroll
        for (int i = 0; i < kCount; ++i) mass[i] = fmaxf(p(mass[i]) - q(y[i]), 0.0f);
    }
};

// softmax(row * scale / log2(e)) within one tile: relative to the tile's maximum, so that a tile with
// mass has an entry with mass, however far it lies below the row's maximum.
__device__ __forceinline__ EntryMass softmax_in_tile(const Row& row, int64_t vocab_size,
                                                     const TileStats& tile, float scale) {
    return EntryMass{row, Row{}, -1, vocab_size, RowLaw{tile.max, scale, 0.0f}, RowLaw{}};
}

// --- Draws, by the whole block --------------------------------------------------------------------

// Mass of one tile. Every thread gets the result.
__device__ __forceinline__ float tile_mass(const EntryMass& weight, int tile, float* strips) {
    float mass[kEntriesPerThread];
    weight.of_tile(tile, mass);
    sum_strips<kQuad>(mass, strips);
    __syncthreads();
    const float sum = warp_sum(strips[threadIdx.x % kWarpSize]);
    __syncthreads();  // the next tile may overwrite the strips
    return sum;
}

// Draws an id of one tile. The result is valid in warp 0.
__device__ __forceinline__ int64_t draw_in_tile(const EntryMass& weight, int tile, float u,
                                                float* strips) {
    float mass[kEntriesPerThread];
    weight.of_tile(tile, mass);
    sum_strips<kQuad>(mass, strips);
    __syncthreads();
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

// Where u falls among the tiles of a softmax row. By whole warps; every lane gets the result.
__device__ __forceinline__ Bucket pick_tile(const TileStats* tiles, int num_tiles, float row_max,
                                            float scale, float u) {
    const auto mass_of = [&](int t) {
        return tile_mass<&TileStats::sum>(load_stats(tiles + t), row_max, scale);
    };
    return pick_bucket(num_tiles, u, total_mass(num_tiles, mass_of), mass_of);
}

}  // namespace specdec::cuda
