// A row of logits on CUDA from the statistics of its tiles: its status, its law, its entropy, and the
// token it falls back to where it has no law.
#pragma once

#include "tile_stats.cuh"

namespace specdec::cuda {

// --- By whole warps; every lane gets the result -----------------------------------------------------
struct RowPeak {
    float max;       // of z
    int32_t argmax;  // lowest id of max; 0 when nothing is finite
    uint32_t flags;

    // x has a log-sum-exp.
    __device__ __forceinline__ bool raw_usable() const {
        return (flags & kBadRaw) == 0 && (flags & kFiniteRaw) != 0;
    }
    __device__ __forceinline__ int32_t status() const {
        if (!raw_usable() || (flags & kBadEdited) != 0) return kTargetNan;
        return max > minus_infinity() ? 0 : kEmptySupport;
    }
    __device__ __forceinline__ bool usable() const { return status() == 0; }
};

// In one 16-byte load.
__device__ __forceinline__ TileStats load_stats(const TileStats* tile) {
    const uint4 words = *reinterpret_cast<const uint4*>(tile);
    return TileStats{bits_float(words.x), bits_float(words.y), bits_float(words.z), words.w};
}

__device__ __forceinline__ RowPeak row_peak(const TileStats* tiles, int num_tiles) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    ArgMax best{minus_infinity(), 0};
    uint32_t flags = 0;
    for (int t = lane; t < num_tiles; t += kWarpSize) {
        const TileStats tile = load_stats(tiles + t);
        flags |= tile.peak;
        const int id = t * kTileEntries + static_cast<int>(tile.peak & kPeakPlace);
        best = ArgMaxOp{}(best, ArgMax{tile.max, tile.max > minus_infinity() ? id : 0});
    }
    best = warp_argmax(best);
    return RowPeak{best.value, best.index, __reduce_or_sync(kFullMask, flags) & ~kPeakPlace};
}

// Mass of a tile in units of the row.
__device__ __forceinline__ float tile_mass(const TileStats& tile, float row_max, float scale) {
    return tile.sum * ptx::ex2((tile.max - row_max) * scale);
}

// Sum over the row of 2^((z - max) * scale), without filters.
__device__ __forceinline__ float row_sum(const TileStats* tiles, int num_tiles, float row_max,
                                         float scale) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    float sum = 0.0f;
    for (int t = lane; t < num_tiles; t += kWarpSize) {
        sum = sum + tile_mass(load_stats(tiles + t), row_max, scale);
    }
    return warp_sum(sum);
}

// log-sum-exp of x in two parts, their sum being it: so that x - lse loses nothing for large x.
struct RawLse {
    float max;
    float log_sum;
};

__device__ __forceinline__ RawLse raw_lse(const RowScratch& s, float z_max) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    float max = z_max;
    if (s.raw_max != nullptr) {
        max = minus_infinity();
        for (int t = lane; t < s.num_tiles; t += kWarpSize) max = fmaxf(max, s.raw_max[t]);
        max = warp_max(max);
    }
    float sum = 0.0f;
    for (int t = lane; t < s.num_tiles; t += kWarpSize) {
        const TileStats tile = load_stats(s.tiles + t);
        const float from = s.raw_max == nullptr ? tile.max : s.raw_max[t];
        sum = sum + tile.raw_sum * ptx::ex2((from - max) * kLog2E);
    }
    return RawLse{max, logf(warp_sum(sum))};
}

// --- The law of a row (token_law.h) -----------------------------------------------------------------
// One function for p and q: equal rows give equal bits.
struct RowLaw {
    float max;
    float scale;
    float log2_sum;
    float cut_z;  // -inf and INT32_MAX: keeps every id
    int32_t cut_id;

    __device__ __forceinline__ bool keeps(float z, int64_t id) const {
        return z > cut_z || (z == cut_z && id <= cut_id);
    }
    __device__ __forceinline__ float operator()(float z, int64_t id) const {
        return keeps(z, id) ? ptx::ex2(fmaf(z - max, scale, -log2_sum)) : 0.0f;
    }
};

__device__ __forceinline__ RowLaw law_of(const RowScratch& s, float max, float scale,
                                         bool filtered) {
    if (filtered) {
        const RowCut cut = *s.cut;
        return RowLaw{max, scale, cut.log2_sum, cut.z, cut.id};
    }
    const float log2_sum = log2f(row_sum(s.tiles, s.num_tiles, max, scale));
    return RowLaw{max, scale, log2_sum, minus_infinity(), INT32_MAX};
}

// Natural logarithm of the probability of an id under the row's law.
__device__ __forceinline__ float log_of(const RowLaw& law, float z, int64_t id) {
    if (!law.keeps(z, id)) return minus_infinity();
    return ((z - law.max) * law.scale - law.log2_sum) * static_cast<float>(kLn2);
}

// Entropy of the law in nats.
__device__ __forceinline__ float entropy_of(const RowScratch& s, const RowLaw& law, bool filtered) {
    float mean = 0.0f;
    if (filtered) {
        mean = s.cut->mean_exponent;
    } else {
        const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
        float sum = 0.0f, moment = 0.0f;
        for (int t = lane; t < s.num_tiles; t += kWarpSize) {
            const TileStats tile = load_stats(s.tiles + t);
            const float shift = (tile.max - law.max) * law.scale, weight = ptx::ex2(shift);
            if (weight > 0.0f) moment = moment + weight * (s.exponent_sum[t] + shift * tile.sum);
            sum = sum + weight * tile.sum;
        }
        mean = warp_sum(moment) / warp_sum(sum);
    }
    return (law.log2_sum - mean) * static_cast<float>(kLn2);
}

// How a request's controls make laws of its rows. `scale` is that of the law which log-probabilities
// are of: at temperature 1 where it is greedy.
struct LawPlan {
    Filters filters;
    float scale;
    bool greedy;
    bool filtered;
};

// reported: the law is wanted of greedy requests too.
__device__ __forceinline__ LawPlan law_plan(const SamplingControls& c, int64_t b,
                                            int64_t vocab_size, bool reported) {
    const float temperature = temperature_of(c, b);
    LawPlan plan;
    plan.filters = filters_of(c, b, vocab_size);
    plan.scale = is_greedy(temperature) ? kLog2E : exponent_scale(temperature);
    plan.greedy = is_greedy(c, b);
    plan.filtered = !plan.filters.none && (!plan.greedy || reported);
    return plan;
}

// --- Rows without a law -----------------------------------------------------------------------------
template <int kThreads>
struct FallbackScratch {
    BlockScratch<ArgMax, kThreads> best;
    BlockScratch<uint32_t, kThreads> lowest;
};
using FallbackPlan = FallbackScratch<kTileThreads>;

// The token of a row whose status is kTargetNan or kEmptySupport (common/verify.h, 1 and 2), by the
// whole block, which reads the row again. Every thread gets the result.
template <int kThreads>
CU_NOINLINE __device__ inline int64_t fallback_token(const VocabRow& row, int32_t status,
                                                     FallbackScratch<kThreads>& plan) {
    const Allowed& allowed = row.edits.allowed;
    ArgMax best{minus_infinity(), INT32_MAX}, best_allowed = best;
    uint32_t lowest_allowed = 0xffffffffu;
    for (int64_t first = static_cast<int64_t>(threadIdx.x) * kQuad; first < row.columns;
         first += kThreads * kQuad) {
        float x[kQuad];
        load_quad(row.row, row.columns, first, x);
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
            const int64_t id = first + i;
            if (id >= row.columns) continue;
            const ArgMax here{is_bad_logit(x[i]) ? minus_infinity() : x[i], static_cast<int>(id)};
            const bool is_finite = here.value > minus_infinity();
            if (is_finite) best = ArgMaxOp{}(best, here);
            if (!allowed(id)) continue;
            if (is_finite) best_allowed = ArgMaxOp{}(best_allowed, here);
            lowest_allowed = min(lowest_allowed, static_cast<uint32_t>(id));
        }
    }
    best = block_argmax<kThreads>(best, plan.best);
    best_allowed = block_argmax<kThreads>(best_allowed, plan.best);
    lowest_allowed = block_min<kThreads>(lowest_allowed, plan.lowest);
    const bool some = lowest_allowed != 0xffffffffu;
    if (status == kTargetNan && some) {
        return best_allowed.index != INT32_MAX ? best_allowed.index : lowest_allowed;
    }
    if (some && allowed.constrained) return lowest_allowed;
    return best.index != INT32_MAX ? best.index : 0;
}

}  // namespace specdec::cuda
