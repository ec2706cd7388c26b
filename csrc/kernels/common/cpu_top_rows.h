// The top of a row of logits on the CPU (top_rows.h): one pass in tiles that stay in the first cache, for their
// peaks and their sums; then a look at the few blocks whose peak says that they hold one of the first k.
#pragma once

#include <vector>

#include "parallel.h"
#include "top_rows.h"
#include "vocab_select.h"

namespace specdec::cpu::SPECDEC_ISA {

constexpr int64_t kTopBlocks = kTopTile / kVocabBlock;
constexpr int kTopVectors = static_cast<int>(kTopPlaces) / kLanes;
constexpr int kTopAtOnce = kParts < 4 ? 4 / kParts : 1;  // vectors: four native ones in step

// --- 1. Sums --------------------------------------------------------------------------------------
// add_exp2 of several vectors in step: one alone is a chain longer than a processor looks ahead.
template <int N>
SPECDEC_SIMD void add_exp2(Native (&sum)[N], Native (&x)[N]) {
    Native f[N], p[N];
    NativeInt n[N];
#define SPECDEC_EACH_VECTOR(step) _Pragma("GCC unroll 4") for (int i = 0; i < N; ++i) step
    SPECDEC_EACH_VECTOR(x[i] = max(x[i], spread<Native>(kAddExp2Floor)));
    SPECDEC_EACH_VECTOR(f[i] = x[i] + spread<Native>(kAddExp2Round));
    SPECDEC_EACH_VECTOR(n[i] = as_bits(f[i]) << 23);
    SPECDEC_EACH_VECTOR(f[i] = x[i] - (f[i] - spread<Native>(kAddExp2Round)));
    SPECDEC_EACH_VECTOR(p[i] = spread<Native>(kAddExp2Powers[0]));
    _Pragma("GCC unroll 5") for (int k = 1; k < 6; ++k) {
        SPECDEC_EACH_VECTOR(p[i] = fma(p[i], f[i], spread<Native>(kAddExp2Powers[k])));
    }
    SPECDEC_EACH_VECTOR(sum[i] = fma(p[i], as_floats(n[i]), sum[i]));
#undef SPECDEC_EACH_VECTOR
}

// Sum of 2^((x - max) * scale) over a tile of n columns whose largest is `max`, finite.
template <bool kWhole, class T>
float top_tile_sum(const T* x, int64_t n, float max, float scale, const T* ahead) {
    const V16 peak = set1(max), by = set1(scale);
    alignas(64) float lanes[kTopPlaces];
    for (int v = 0; v < kTopVectors; v += kTopAtOnce) {
        Native sum[kTopAtOnce * kParts] = {};
        for (int64_t j = v * kLanes; j < (kWhole ? kTopTile : n); j += kTopPlaces) {
            Native exponent[kTopAtOnce * kParts];
            _Pragma("GCC unroll 4") for (int u = 0; u < kTopAtOnce; ++u) {
                const int64_t at = j + u * kLanes;
                V16 d = set1(kMinusInfinity);
                if constexpr (kWhole) {
                    constexpr int kLine = 64 / static_cast<int>(sizeof(T));
                    if (u * kLanes % kLine == 0) __builtin_prefetch(ahead + at, 0, 2);
                    d = load(x + at);
                } else if (at < n) {
                    d = row_lanes(x, at, n);
                }
                d = (d - peak) * by;
                SPECDEC_EACH_PART(exponent[u * kParts + i] = d.part[i]);
            }
            add_exp2(sum, exponent);
        }
        _Pragma("GCC unroll 4") for (int i = 0; i < kTopAtOnce * kParts; ++i) {
            store(lanes + v * kLanes + i * kNativeLanes, sum[i]);
        }
    }
    for (int half = kTopVectors / 2; half > 0; half /= 2) {
        for (int v = 0; v < half; ++v) {
            float* here = lanes + v * kLanes;
            store(here, load(here) + load(here + half * kLanes));
        }
    }
    return sum_lanes(load(lanes));
}

// --- 2. The columns of a row in order -----------------------------------------------------------------
// A source of Selector.
template <class T>
struct TopBlocks {
    const T* row = nullptr;
    int64_t columns = 0;
    const uint16_t* peaks = nullptr;

    int64_t num_blocks() const { return (columns + kVocabBlock - 1) / kVocabBlock; }
    uint16_t peak(int64_t block) const { return peaks[block]; }
    template <class Fn>
    void visit(uint32_t lowest, const Fn& fn) const {
        const uint16_t least = static_cast<uint16_t>(lowest >> 16);
        for (int64_t b = 0; b < num_blocks(); ++b) {
            const int64_t begin = b * kVocabBlock, end = begin + kVocabBlock;
            if (peaks[b] >= least) fn(row, begin, end < columns ? end : columns, int64_t{0});
        }
    }
};

// Calls fn(i, column) for the first k columns of a row; returns how many there are.
template <class T, class Fn>
int64_t first_columns(const TopBlocks<T>& blocks, int64_t k, const Fn& fn) {
    Selector<TopBlocks<T>> selector(blocks, 0.0f, 0.0f);  // masses are not wanted
    const Ranked* list = nullptr;
    const int64_t count = selector.list_first(k, &list);
    for (int64_t i = 0; i < count; ++i) fn(i, static_cast<int64_t>(list[i].id));
    return count;
}

// --- 3. A row ---------------------------------------------------------------------------------------
// Its first tokens in order; behind `count` there are none.
struct TopList {
    bool has_law;
    int count;
    int64_t token[kMaxTop];
    double logprob[kMaxTop];
};

// Reused from row to row.
template <class T>
class TopRow {
  public:
    explicit TopRow(const TopRows& p)
        : p_(p), stats_(p.num_tiles()), peaks_((p.columns + kVocabBlock - 1) / kVocabBlock) {}

    void read(int64_t b, int64_t f, bool across_tiles, TopList* out) {
        row_ = static_cast<const T*>(p_.row(b, f));
        const float scale = p_.scale(b);
        const auto tiles = [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t) read_tile(t, t + 1 < end ? t + 1 : t, scale);
        };
        constexpr int64_t kGrain = 16;  // tiles that are worth waking a thread
        if (across_tiles) {
            parallel_for(0, p_.num_tiles(), kGrain, tiles);
        } else {
            tiles(0, p_.num_tiles());
        }
        out->count = 0;
        TopLaw law;
        out->has_law = law_of_row(scale, &law);
        if (out->has_law) list(law, out);
    }

  private:
    void read_tile(int64_t t, int64_t next, float scale) {
        const T* x = row_ + t * kTopTile;
        const int64_t left = p_.columns - t * kTopTile, n = left < kTopTile ? left : kTopTile;
        const TilePeak peak = tile_peak(x, n, peaks_.data() + t * kTopBlocks);
        TopTileStats& stats = stats_[t];
        stats = {peak.usable ? peak.max : -kMinusInfinity, 0.0f};
        if (peak.usable && peak.max > kMinusInfinity) {
            const T* ahead = row_ + next * kTopTile;
            stats.sum = n == kTopTile ? top_tile_sum<true>(x, n, peak.max, scale, ahead)
                                      : top_tile_sum<false>(x, n, peak.max, scale, ahead);
        }
    }

    bool law_of_row(float scale, TopLaw* law) const {
        float max = kMinusInfinity;
        for (const TopTileStats& tile : stats_) max = tile.max > max ? tile.max : max;
        if (max == kMinusInfinity || max == -kMinusInfinity) return false;
        constexpr int kColumns = 32;
        float lanes[kColumns] = {};
        for (int64_t t = 0; t < p_.num_tiles(); ++t) {
            float& lane = lanes[t % kColumns];
            lane = lane + stats_[t].sum * exp2_of((stats_[t].max - max) * scale);
        }
        for (int half = kColumns / 2; half > 0; half /= 2) {
            for (int l = 0; l < half; ++l) lanes[l] = lanes[l] + lanes[l + half];
        }
        *law = {max, scale, log2_of(static_cast<double>(lanes[0]))};
        return true;
    }

    void list(const TopLaw& law, TopList* out) {
        bool outside = false;
        const auto add = [&](const auto* row, int64_t i, int64_t column) {
            out->token[i] = p_.map.token(column);
            out->logprob[i] = law.logprob(to_float(row[column]));
            outside = outside || out->token[i] < 0;
        };
        const TopBlocks<T> blocks{row_, p_.columns, peaks_.data()};
        out->count = static_cast<int>(
            first_columns(blocks, p_.k, [&](int64_t i, int64_t column) { add(row_, i, column); }));
        if (!outside) return;

        // Columns without a target id came first: once more without them, on a copy of the row.
        copy_.resize(p_.columns);
        for (int64_t c = 0; c < p_.columns; ++c) {
            copy_[c] = p_.map.token(c) < 0 ? kMinusInfinity : to_float(row_[c]);
        }
        const float* copy = copy_.data();
        for (int64_t begin = 0; begin < p_.columns; begin += kVocabBlock) {
            const int64_t left = p_.columns - begin;
            tile_peak(copy + begin, left < kVocabBlock ? left : kVocabBlock,
                      peaks_.data() + begin / kVocabBlock);
        }
        out->count = static_cast<int>(
            first_columns(TopBlocks<float>{copy, p_.columns, peaks_.data()}, p_.k,
                          [&](int64_t i, int64_t column) { add(copy, i, column); }));
    }

    const TopRows& p_;
    const T* row_ = nullptr;
    std::vector<TopTileStats> stats_;
    std::vector<uint16_t> peaks_;
    std::vector<float> copy_;
};

// Calls done(b, f, list) for all rows, from several threads; the list of a row that is not alive is empty.
template <class T, class Done>
void for_top_rows(const TopRows& p, const Done& done) {
    const int64_t num_rows = p.batch() * p.rows();
    const auto take = [&](TopRow<T>& row, int64_t r, bool across_tiles) {
        const int64_t b = r / p.rows(), f = r % p.rows();
        TopList list;
        list.count = 0;
        list.has_law = false;
        if (is_alive(p.score(b, f))) row.read(b, f, across_tiles, &list);
        done(b, f, list);
    };
    if (num_rows < num_threads()) {
        TopRow<T> row(p);
        for (int64_t r = 0; r < num_rows; ++r) take(row, r, true);
        return;
    }
    parallel_for(0, num_rows, 1, [&](int64_t begin, int64_t end) {
        TopRow<T> row(p);
        for (int64_t r = begin; r < end; ++r) take(row, r, false);
    });
}

}  // namespace specdec::cpu::SPECDEC_ISA
