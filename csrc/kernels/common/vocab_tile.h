// One tile of a row of logits on the CPU: what its entries are, their sums, and the place of a number
// in them. A tile is 16 blocks of 256 entries, a block 16 vectors of 16 lanes; lanes and blocks are
// summed in fixed order, the same for every instruction set.
#pragma once

#include <vector>

#include "softmax.h"
#include "token_law.h"

namespace specdec::cpu::SPECDEC_ISA {

constexpr int64_t kVocabBlock = 256;
constexpr int64_t kBlocksPerTile = kVocabTile / kVocabBlock;
constexpr float kMinusInfinity = -__builtin_inff();

// Orders like the float, -0 and +0 alike.
SPECDEC_SIMD uint32_t key_of(float z) {
    const uint32_t bits = float_bits(z + 0.0f);
    return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}
SPECDEC_SIMD float z_of_key(uint32_t key) {
    return bits_float((key >> 31) != 0 ? key & 0x7fffffffu : ~key);
}

// Lanes i..i+15 of a row of n entries; lanes past its end hold -inf, which has probability 0.
template <class T>
SPECDEC_SIMD V16 row_lanes(const T* row, int64_t i, int64_t n) {
    if (i + kLanes <= n) return load(row + i);
    alignas(64) float lane[kLanes];
    for (int64_t l = 0; l < kLanes; ++l)
        lane[l] = i + l < n ? to_float(row[i + l]) : kMinusInfinity;
    return load(lane);
}

// --- 1. What a tile holds -------------------------------------------------------------------------
// Which entries a filter keeps (controls.h), and which blocks can hold one: a block's peak is the upper
// half of the largest key in it (vocab_select.h). Everything is kept where `peaks` is nullptr.
struct TileCut {
    const uint16_t* peaks = nullptr;  // of the tile's blocks
    uint16_t peak = 0;                // of the cut
    float z = 0.0f;
    int32_t last = 0;  // entries of this z are kept up to this one of the tile

    SPECDEC_SIMD bool skips(int64_t begin) const {
        return peaks != nullptr && peaks[begin / kVocabBlock] < peak;
    }
    SPECDEC_SIMD V16 apply(V16 x, V16 weight, int64_t i) const {
        if (peaks == nullptr) return weight;
        const I16 id = lane_numbers() + set1(static_cast<int32_t>(i));
        const I16 tie = (x == set1(z)) & (id < set1(last + 1));
        return select((x > set1(z)) | tie, weight, set1(0.0f));
    }
};

// Entries of a law, up to a factor: 2^((z - base) * c) where kept.
template <class T>
struct LawEntries {
    const T* row;
    float base, c;
    TileCut cut;

    SPECDEC_SIMD bool skips(int64_t begin) const { return cut.skips(begin); }
    SPECDEC_SIMD V16 lanes(int64_t i, int64_t n) const {
        const V16 x = row_lanes(row, i, n);
        return cut.apply(x, exp2_product(x - set1(base), set1(c)), i);
    }
};

// Probabilities of a law: 2^((z - max) * c - log2_sum) where kept.
template <class T>
struct Probabilities {
    const T* row;
    float max, c, log2_sum;
    TileCut cut;

    SPECDEC_SIMD bool skips(int64_t begin) const { return cut.skips(begin); }
    SPECDEC_SIMD V16 lanes(int64_t i, int64_t n) const {
        const V16 x = row_lanes(row, i, n);
        const V16 exponent = fma(x - set1(max), set1(c), set1(-log2_sum));
        return cut.apply(x, exp2_product(exponent, set1(1.0f)), i);
    }
};

// max(a p - b q, 0), with the tile's q computed before.
template <class T>
struct ResidualEntries {
    Probabilities<T> p;
    const float* q;  // [kVocabTile]
    float a, b;

    SPECDEC_SIMD bool skips(int64_t begin) const { return p.skips(begin); }
    SPECDEC_SIMD V16 lanes(int64_t i, int64_t n) const {
        return max(set1(a) * p.lanes(i, n) - set1(b) * load(q + i), set1(0.0f));
    }
};

// Entries computed before.
struct StoredEntries {
    const float* entries;  // [kVocabTile], zeros behind the last

    SPECDEC_SIMD bool skips(int64_t) const { return false; }
    SPECDEC_SIMD V16 lanes(int64_t i, int64_t) const { return load(entries + i); }
};

// --- 2. Sums over a tile --------------------------------------------------------------------------
template <class Entries>
float tile_sum(const Entries& entries, int64_t n) {
    V16 total = set1(0.0f);
    for (int64_t begin = 0; begin < n; begin += kVocabBlock) {
        if (entries.skips(begin)) continue;
        V16 sum = set1(0.0f);
        if (begin + kVocabBlock <= n) {
            for (int64_t i = begin; i < begin + kVocabBlock; i += kLanes) {
                sum = sum + entries.lanes(i, i + kLanes);
            }
        } else {
            for (int64_t i = begin; i < n; i += kLanes) sum = sum + entries.lanes(i, n);
        }
        total = total + sum;
    }
    return sum_lanes(total);
}

// Sums of 2^((x - max) * c) over a tile of largest entry `max`, for several c in one go.
// next: the tile that is read after this one, asked for evenly and not in bursts, so that it arrives
// while the exponentials are computed. A prefetch may reach past the row's end: it never faults.
template <int kScales, class T>
void law_sums(const T* x, int64_t n, float max, const float* scales, const T* next, float* sums) {
    for (int k = 0; k < kScales; ++k) sums[k] = 0.0f;
    if (max == kMinusInfinity) return;
    const V16 peak = set1(max);
    V16 c[kScales], floor[kScales], total[kScales];
    for (int k = 0; k < kScales; ++k) {
        c[k] = set1(scales[k]);
        floor[k] = set1(exp2_floor(scales[k]));
        total[k] = set1(0.0f);
    }
    for (int64_t begin = 0; begin < n; begin += kVocabBlock) {
        V16 sum[kScales];
        for (int k = 0; k < kScales; ++k) sum[k] = set1(0.0f);
        const auto add = [&](V16 lanes) __attribute__((always_inline)) {
            for (int k = 0; k < kScales; ++k) {
                sum[k] = exp2_add(sum[k], lanes - peak, c[k], floor[k]);
            }
        };
        if (begin + kVocabBlock <= n) {
            for (int64_t i = begin; i < begin + kVocabBlock; i += kLanes) {
                __builtin_prefetch(next + i, 0, 2);
                add(load(x + i));
            }
        } else {
            for (int64_t i = begin; i < n; i += kLanes) add(row_lanes(x, i, n));
        }
        for (int k = 0; k < kScales; ++k) total[k] = total[k] + sum[k];
    }
    for (int k = 0; k < kScales; ++k) sums[k] = sum_lanes(total[k]);
}

// Largest |x c| of a tile that is summed relative to 0: the sums of all tiles stay far from overflow.
constexpr float kPlainRange = 100.0f;

// Sums of 2^(x c), and the largest entry, in one pass without knowing that one first. False, and nothing
// else, for a tile with an entry beyond `bound` on either side or one that is not finite: given up at the
// first block beyond, as such a tile is read again.
template <int kScales, class T>
bool plain_sums(const T* x, int64_t n, float bound, const float* scales, const T* next,
                float* max_out, float* sums) {
    if (n % kLanes != 0) return false;
    V16 c[kScales], total[kScales], most = set1(kMinusInfinity), least = set1(-kMinusInfinity);
    for (int k = 0; k < kScales; ++k) {
        c[k] = set1(scales[k]);
        total[k] = set1(0.0f);
    }
    for (int64_t begin = 0; begin < n; begin += kVocabBlock) {
        const int64_t end = begin + kVocabBlock < n ? begin + kVocabBlock : n;
        V16 sum[kScales];
        for (int k = 0; k < kScales; ++k) sum[k] = set1(0.0f);
        for (int64_t i = begin; i < end; i += kLanes) {
            __builtin_prefetch(next + i, 0, 2);
            const V16 lanes = load(x + i);
            most = max(lanes, most);
            least = min(lanes, least);
            for (int k = 0; k < kScales; ++k) {
                const Exp2Factors e = exp2_factors(lanes, c[k]);
                sum[k] = fma(e.power, e.fraction, sum[k]);
            }
        }
        if (lane_bits((most > set1(bound)) | (least < set1(-bound))) != 0) return false;
        for (int k = 0; k < kScales; ++k) total[k] = total[k] + sum[k];
    }
    bool good = true;
    for (int k = 0; k < kScales; ++k) {
        sums[k] = sum_lanes(total[k]);
        good = good && sums[k] == sums[k];  // a NaN among the entries reaches its sum
    }
    *max_out = max_lanes(most);
    return good;
}

// Entries of a tile of n in memory; room for kVocabTile. Behind the n-th: zeros to a whole vector.
template <class Entries>
void store_tile(const Entries& entries, int64_t n, float* out) {
    for (int64_t begin = 0; begin < n; begin += kVocabBlock) {
        const int64_t end = begin + kVocabBlock < n ? begin + kVocabBlock : n;
        const bool nothing = entries.skips(begin);
        for (int64_t i = begin; i < end; i += kLanes) {
            store(out + i, nothing ? set1(0.0f) : entries.lanes(i, n));
        }
    }
}

struct TilePeak {
    float max;
    bool usable;  // neither NaN nor +inf
};

// Of 16-bit floats, in integers: nothing is converted, and a vector holds twice as many. As signed
// integers the bits of floats from +0 up ascend, those from -0 down follow below in reverse: the
// largest float is the largest integer, or the smallest one where all are negative. A NaN lies above
// +inf, or as a negative one above -inf in unsigned order.
struct HalfBounds {
    int16_t high = INT16_MIN, low = INT16_MAX;
    uint16_t top = 0;

    void add(int16_t bits) {
        high = bits > high ? bits : high;
        low = bits < low ? bits : low;
        const uint16_t magnitude = static_cast<uint16_t>(bits);
        top = magnitude > top ? magnitude : top;
    }
};

template <class T>
TilePeak half_peak(const T* x, int64_t n) {
    const int16_t* bits = reinterpret_cast<const int16_t*>(x);
    HalfBounds bounds;
    int64_t i = 0;
    if (n >= kLanes) {
        Shorts high = Shorts{} + bounds.high, low = Shorts{} + bounds.low;
        UnsignedShorts top = {};
        for (; i + kLanes <= n; i += kLanes) {
            const Shorts here = *reinterpret_cast<const ShortsAt*>(bits + i);
            const UnsignedShorts magnitude = reinterpret_cast<UnsignedShorts>(here);
            high = here > high ? here : high;
            low = here < low ? here : low;
            top = magnitude > top ? magnitude : top;
        }
        for (int l = 0; l < kLanes; ++l) {
            bounds.add(high[l]);
            bounds.add(low[l]);
            bounds.add(static_cast<int16_t>(top[l]));
        }
    }
    for (; i < n; ++i) {
        int16_t one;
        memcpy(&one, x + i, sizeof one);
        bounds.add(one);
    }
    T largest;
    memcpy(&largest, bounds.high >= 0 ? &bounds.high : &bounds.low, sizeof largest);
    const uint16_t infinity = from_float<T>(__builtin_inff()).bits;
    return {to_float(largest), bounds.high < infinity && bounds.top <= (infinity | 0x8000)};
}

template <class T>
TilePeak peak_of(const T* x, int64_t n) {
    if constexpr (sizeof(T) == 2) return half_peak(x, n);
    const V16 infinity = set1(__builtin_inff());
    V16 best0 = set1(kMinusInfinity), best1 = best0;
    I16 good0 = set1(-1), good1 = good0;
    int64_t i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        const V16 x0 = load(x + i), x1 = load(x + i + kLanes);
        best0 = max(x0, best0);
        best1 = max(x1, best1);
        good0 = good0 & (x0 < infinity);
        good1 = good1 & (x1 < infinity);
    }
    for (; i < n; i += kLanes) {
        const V16 x0 = row_lanes(x, i, n);
        best0 = max(x0, best0);
        good0 = good0 & (x0 < infinity);
    }
    return {max_lanes(max(best0, best1)), all_lanes(good0 & good1)};
}

// Largest entry of a tile; of its blocks too, as the upper half of key_of, where `peaks` is given.
template <class T>
TilePeak tile_peak(const T* x, int64_t n, uint16_t* peaks = nullptr) {
    if (peaks == nullptr) return peak_of(x, n);
    TilePeak tile{kMinusInfinity, true};
    for (int64_t begin = 0; begin < n; begin += kVocabBlock) {
        const int64_t left = n - begin;
        const TilePeak block = peak_of(x + begin, left < kVocabBlock ? left : kVocabBlock);
        peaks[begin / kVocabBlock] = static_cast<uint16_t>(key_of(block.max) >> 16);
        tile.max = block.max > tile.max ? block.max : tile.max;
        tile.usable = tile.usable && block.usable;
    }
    return tile;
}

// --- 3. Draws: half-open buckets, the first id whose running sum exceeds the target ----------------
// Where rounding lets a walk fall off the end, it ends at the last place with a positive mass, so no
// id of probability 0 can come out.
struct TilePlace {
    int64_t tile;
    double fraction;  // of the tile's mass
};

inline TilePlace find_tile(const std::vector<double>& masses, double target) {
    int64_t last = 0;
    for (int64_t t = 0; t < static_cast<int64_t>(masses.size()); ++t) {
        if (masses[t] > 0.0) last = t;
        if (masses[t] > target) return {t, target / masses[t]};
        target -= masses[t];
    }
    return {last, 1.0};
}

inline int64_t find_in_tile(const float* entries, int64_t n, double fraction) {
    double block_mass[kBlocksPerTile];
    double total = 0.0;
    const int64_t num_blocks = (n + kVocabBlock - 1) / kVocabBlock;
    for (int64_t b = 0; b < num_blocks; ++b) {
        const int64_t end = (b + 1) * kVocabBlock < n ? (b + 1) * kVocabBlock : n;
        V16 sum = set1(0.0f);
        for (int64_t i = b * kVocabBlock; i < end; i += kLanes) sum = sum + load(entries + i);
        block_mass[b] = sum_lanes(sum);
        total += block_mass[b];
    }
    double target = fraction * total;
    int64_t block = 0;
    for (int64_t b = 0; b < num_blocks; ++b) {
        if (block_mass[b] > 0.0) block = b;
        if (block_mass[b] > target) break;
        target -= block_mass[b];
    }
    int64_t last = block * kVocabBlock;
    const int64_t end = last + kVocabBlock < n ? last + kVocabBlock : n;
    for (int64_t i = last; i < end; ++i) {
        if (entries[i] > 0.0f) last = i;
        if (entries[i] > target) break;
        target -= entries[i];
    }
    return last;
}

}  // namespace specdec::cpu::SPECDEC_ISA
