// One row of logits on the CPU: statistics, probabilities and draws of its law (token_law.h).
//
// A row is read from memory once, in tiles of 4096 entries: the tile's maximum, then the sum of
// exponentials while the tile lies in the first cache. Drawing needs one tile again. A residual is
// the only thing that reads a row a second time.
// Determinism: a tile is 16 blocks of 256 entries, a block 16 vectors of 16 lanes; lanes, blocks
// and tiles are summed in fixed order, so threads (over rows, or over the tiles of one row) and
// instruction sets change no bit.
#pragma once

#include <vector>

#include "parallel.h"
#include "vocab_tile.h"

namespace specdec::cpu::SPECDEC_ISA {

// Tiles per thread below which waking one costs more than it saves: 10 us of work.
constexpr int64_t kTileGrain = 8;

constexpr int kMaxScales = 2;

struct Tile {
    float max;
    float sum[kMaxScales];  // one per exponent scale
    bool usable;
};

// log2 for 1 <= x in plain double operations: the same bits everywhere, which no libm promises.
inline double log2_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    int64_t exponent = static_cast<int64_t>(bits >> 52) - 1023;
    bits = (bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull;
    double m;
    memcpy(&m, &bits, 8);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        exponent += 1;
    }
    const double z = (m - 1.0) / (m + 1.0), z2 = z * z;  // |z| < 0.172: atanh series to 1e-17
    double series = 0.0;
    for (int k = 21; k >= 1; k -= 2) series = series * z2 + 1.0 / k;
    return static_cast<double>(exponent) + 2.0 / kLn2 * (z * series);
}

// Reads a row and answers for its law. Reused from row to row, so that its vectors are allocated
// once per thread.
template <class T>
class Row {
  public:
    // scales: the exponent scales c of the laws wanted (none for a greedy row).
    void read(const T* row, int64_t vocab_size, const float* scales, int num_scales,
              bool across_tiles) {
        row_ = row;
        vocab_size_ = vocab_size;
        tiles_.resize(num_vocab_tiles(vocab_size));
        const auto read_tiles = [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t) {
                const TilePeak peak = tile_peak(tile_row(t), tile_size(t));
                tiles_[t].max = peak.max;
                tiles_[t].usable = peak.usable;
                const auto sums = num_scales == 2 ? law_sums<2, T> : law_sums<1, T>;
                if (num_scales == 0) continue;
                sums(tile_row(t), tile_size(t), peak.max, scales, tile_row(t + 1 < end ? t + 1 : t),
                     tiles_[t].sum);
            }
        };
        over_tiles(across_tiles, read_tiles);
        max_ = kMinusInfinity;
        usable_ = true;
        for (const Tile& tile : tiles_) {
            max_ = tile.max > max_ ? tile.max : max_;
            usable_ = usable_ && tile.usable;
        }
        usable_ = usable_ && max_ > kMinusInfinity;
    }

    // A row with NaN or +inf, or without any finite logit, has no law.
    bool usable() const { return usable_; }
    float max() const { return max_; }
    float logit(int64_t id) const { return to_float(row_[id]); }

    // Lowest id of the largest logit of a usable row.
    int64_t argmax() const {
        int64_t t = 0;
        while (tiles_[t].max != max_) ++t;
        const T* x = tile_row(t);
        for (int64_t begin = 0;; begin += kVocabBlock) {
            const int64_t size = tile_size(t);
            const int64_t end = begin + kVocabBlock < size ? begin + kVocabBlock : size;
            I16 here = set1(0);
            for (int64_t i = begin; i < end; i += kLanes) {
                here = here | (row_lanes(x, i, end) == set1(max_));
            }
            if (!any_lane(here)) continue;
            int64_t i = begin;
            while (to_float(x[i]) != max_) ++i;
            return t * kVocabTile + i;
        }
    }

    // Lowest id of the largest finite logit of any row, 0 when there is none.
    int64_t finite_argmax() const {
        int64_t best = 0;
        float largest = kMinusInfinity;
        for (int64_t v = 0; v < vocab_size_; ++v) {
            const float x = logit(v);
            if (!is_bad_logit(x) && x > largest) {
                largest = x;
                best = v;
            }
        }
        return best;
    }

    // Chooses the law that the functions below speak of: number k of read(), with its scale.
    void choose_law(int k, float scale) {
        c_ = scale;
        masses_.resize(tiles_.size());
        total_ = 0.0;
        // Sums are relative to their tile's maximum; these make them relative to the row's.
        alignas(64) float factors[kLanes] = {};
        for (size_t t = 0; t < tiles_.size(); ++t) {
            const size_t lane = t % kLanes;
            if (lane == 0) tile_factors(t, factors);
            masses_[t] = tiles_[t].sum[k] * static_cast<double>(factors[lane]);
            total_ += masses_[t];
        }
        log2_total_ = log2_of(total_);
    }

    // log2 of the sum of 2^((x - max) * c).
    double log2_sum() const { return log2_total_; }

    Probabilities<T> probabilities(int64_t tile) const {
        return {tile_row(tile), max_, c_, static_cast<float>(log2_total_)};
    }

    float probability(int64_t id) const {
        alignas(64) float lane[kLanes];
        store(lane, probabilities(0).lanes(id, id + 1));
        return lane[0];
    }

    // Probabilities of tile t, room for kVocabTile.
    void store_probabilities(int64_t t, float* out) const {
        store_tile(probabilities(t), tile_size(t), out);
    }

    // The id at u of the law, by inverse CDF in vocabulary order.
    int64_t draw(float u) const {
        const TilePlace place = find_tile(masses_, u * total_);
        return finish_draw(place, entries(place.tile));
    }

    // The id at u of the law without `id`; of the law itself when nothing is left.
    int64_t draw_without(int64_t id, float u) {
        const int64_t own = id / kVocabTile;
        const auto entries_without = [&](int64_t t) {
            return LawEntriesWithout<T>{entries(t), t == own ? id - t * kVocabTile : -kVocabTile};
        };
        rest_ = masses_;
        alignas(64) float factors[kLanes];
        tile_factors(own, factors);
        rest_[own] = tile_sum(entries_without(own), tile_size(own)) * double{factors[0]};
        const double rest = sum_of(rest_);
        if (rest < kMinResidualMass * total_) return draw(u);
        const TilePlace place = find_tile(rest_, u * rest);
        return finish_draw(place, entries_without(place.tile));
    }

    // The id at u of max(p - q, 0), normalised; of p when that has no mass.
    template <class Draft>
    int64_t draw_residual(const Draft& draft, float u, bool across_tiles) {
        rest_.resize(tiles_.size());
        over_tiles(across_tiles, [&](int64_t begin, int64_t end) {
            alignas(64) float q[kVocabTile];
            for (int64_t t = begin; t < end; ++t) {
                draft.store_probabilities(t, q);
                rest_[t] = tile_sum(ResidualEntries<T>{probabilities(t), q}, tile_size(t));
            }
        });
        const double rest = sum_of(rest_);
        if (rest < kMinResidualMass) return draw(u);
        const TilePlace place = find_tile(rest_, u * rest);
        alignas(64) float q[kVocabTile];
        draft.store_probabilities(place.tile, q);
        return finish_draw(place, ResidualEntries<T>{probabilities(place.tile), q});
    }

  private:
    int64_t tile_size(int64_t t) const {
        const int64_t left = vocab_size_ - t * kVocabTile;
        return left < kVocabTile ? left : kVocabTile;
    }

    const T* tile_row(int64_t t) const { return row_ + t * kVocabTile; }
    LawEntries<T> entries(int64_t t) const { return {tile_row(t), tiles_[t].max, c_}; }
    // 2^((tile maximum - row maximum) * c) of up to kLanes tiles from t on.
    void tile_factors(int64_t t, float* factors) const {
        const int64_t left = static_cast<int64_t>(tiles_.size()) - t;
        for (int64_t l = 0; l < kLanes; ++l) factors[l] = l < left ? tiles_[t + l].max : max_;
        store(factors, exp2_product(load(factors) - set1(max_), set1(c_)));
    }

    static double sum_of(const std::vector<double>& masses) {
        double sum = 0.0;
        for (double mass : masses) sum += mass;
        return sum;
    }

    template <class F>
    void over_tiles(bool in_parallel, const F& fn) const {
        const int64_t n = static_cast<int64_t>(tiles_.size());
        if (in_parallel) {
            parallel_for(0, n, kTileGrain, fn);
        } else {
            fn(0, n);
        }
    }

    template <class Entries>
    int64_t finish_draw(const TilePlace& place, const Entries& entries) const {
        alignas(64) float mass[kVocabTile];
        store_tile(entries, tile_size(place.tile), mass);
        return place.tile * kVocabTile + find_in_tile(mass, tile_size(place.tile), place.fraction);
    }

    const T* row_ = nullptr;
    int64_t vocab_size_ = 0;
    float max_ = 0.0f;
    bool usable_ = false;
    float c_ = 0.0f;
    double total_ = 0.0, log2_total_ = 0.0;
    std::vector<Tile> tiles_;
    std::vector<double> masses_, rest_;
};

}  // namespace specdec::cpu::SPECDEC_ISA
