// Sums of markov_draft on the CPU: dots of the heads, statistics of a chunk of logits, and places in a list of masses.
// params.h defines their order.
#pragma once

#include "dispatch.h"
#include "params.h"
#include "simd.h"
#include "softmax.h"
#include "vocab_tile.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

// --- 1. Dots of the heads -------------------------------------------------------------------------
// 32 lanes, k = l, l + 32, ..
template <class T>
float dot32_of(const T* w, const float* x, int64_t size) {
    V16 low = set1(0.0f), high = set1(0.0f);
    int64_t k = 0;
    for (; k + 2 * kLanes <= size; k += 2 * kLanes) {
        low = fma(load(w + k), load(x + k), low);
        high = fma(load(w + k + kLanes), load(x + k + kLanes), high);
    }
    if (k < size) {
        alignas(64) float lanes[2 * kLanes];
        store(lanes, low);
        store(lanes + kLanes, high);
        for (int l = 0; k + l < size; ++l) lanes[l] = fused(to_float(w[k + l]), x[k + l], lanes[l]);
        low = load(static_cast<const float*>(lanes));
        high = load(static_cast<const float*>(lanes + kLanes));
    }
    return sum_lanes(low + high);
}

float dot32(const void* w, DType dtype, const float* x, int64_t size) {
    float sum = 0.0f;
    dispatch_float(dtype, [&](auto tag) {
        sum = dot32_of(static_cast<const typename decltype(tag)::type*>(w), x, size);
    });
    return sum;
}

// --- 2. Statistics and draws ------------------------------------------------------------------------
// z[0..n): logits of a chunk; -inf behind them up to a multiple of 32. The sum only where it is asked for.
ChunkStats chunk_stats(const float* z, int64_t n, float scale, bool sums) {
    V16 most = set1(kMinusInfinity);
    I16 good = set1(-1);
    for (int64_t i = 0; i < n; i += kLanes) {
        const V16 x = load(z + i);
        most = max(x, most);
        good = good & (x < set1(-kMinusInfinity));
    }
    ChunkStats stats{max_lanes(most), 0.0f};
    if (!all_lanes(good)) stats.max = -kMinusInfinity;
    if (!sums || stats.max == kMinusInfinity || stats.max == -kMinusInfinity) return stats;
    V16 low = set1(0.0f), high = set1(0.0f);
    const V16 from = set1(stats.max), by = set1(scale);
    for (int64_t i = 0; i < n; i += 2 * kLanes) {
        low = low + exp2_nonpositive((load(z + i) - from) * by);
        high = high + exp2_nonpositive((load(z + i + kLanes) - from) * by);
    }
    stats.sum = sum_lanes(low + high);
    return stats;
}

// Numbers in rows of 32: the sum, and the place of a number among them.
struct Rows32 {
    const float* mass;  // zeros behind the last up to a multiple of 32
    int64_t count;

    float row(int64_t i) const { return sum_lanes(load(mass + i) + load(mass + i + kLanes)); }
    double total() const {
        double sum = 0.0;
        for (int64_t i = 0; i < count; i += 2 * kLanes) sum += row(i);
        return sum;
    }
    // Half-open buckets; where rounding lets the walk fall off the end, the last place with mass.
    struct Place {
        int64_t index;
        double fraction;
    };
    Place find(double target) const {
        int64_t chosen = 0;
        for (int64_t i = 0; i < count; i += 2 * kLanes) {
            const double sum = row(i);
            if (sum > 0.0) chosen = i;
            if (sum > target) break;
            target -= sum;
        }
        Place place{chosen, 1.0};
        for (int64_t i = chosen; i < chosen + 2 * kLanes; ++i) {
            const double here = mass[i];
            if (here > 0.0) place.index = i;
            if (here > target) {
                place.fraction = target / here;
                break;
            }
            target -= here;
        }
        return place;
    }
};

}  // namespace
}  // namespace specdec::cpu::SPECDEC_ISA
