// One row of logits on the CPU as it is read: its tiles, their largest entries and sums of exponentials,
// raw and processed.
//
// A row is read from memory once, in tiles of 4096 entries: edits (where there are any) into a buffer in
// the first cache, the tile's maximum, the sum of exponentials. Filters look again at the blocks that can
// hold what they keep.
// Determinism: a tile is 16 blocks of 256 entries, a block 16 vectors of 16 lanes; lanes, blocks
// and tiles are summed in fixed order, so threads (over rows, or over the tiles of one row) and
// instruction sets change no bit.
#pragma once

#include <vector>

#include "parallel.h"
#include "vocab_edit.h"
#include "vocab_select.h"

namespace specdec::cpu::SPECDEC_ISA {

// Tiles per thread below which waking one costs more than it saves.
constexpr int64_t kTileGrain = 8;

struct Tile {
    float max, sum;  // of the processed logits, at the law's scale
    float raw_max, raw_sum;
    float base, raw_base;     // what the sums' exponents are relative to: 0, or the tile's maximum
    bool usable, raw_usable;  // neither NaN nor +inf: raw and processed, raw
};

// What is wanted of a row beside its maximum.
struct ReadPlan {
    float scale = 0.0f;      // of the law; 0: greedy rows have none
    bool sum = false;        // of the law before filters
    bool peaks = false;      // filters, or the most probable processed ids
    bool raw_sum = false;    // raw log-probabilities
    bool raw_peaks = false;  // the most probable raw ids
};

// Reused from row to row, so that its vectors are allocated once per thread.
template <class T>
class TiledRow {
  public:
    void read(const T* row, int64_t size, const RowEdits& edits, const ReadPlan& plan,
              bool across_tiles) {
        row_ = row;
        size_ = size;
        edits_ = edits.none() ? nullptr : &edits;
        plan_ = plan;
        both_ = plan.sum && plan.raw_sum && plan.scale != kLog2E;
        scales_[0] = plan.sum ? plan.scale : kLog2E;
        tiles_.resize(num_vocab_tiles(size));
        if (plan.peaks) peaks_.resize((size + kVocabBlock - 1) / kVocabBlock);
        if (plan.raw_peaks && edits_ != nullptr) {
            raw_peaks_.resize((size + kVocabBlock - 1) / kVocabBlock);
        }
        over_tiles(across_tiles, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t) read_tile(t, t + 1 < end ? t + 1 : t);
        });
        max_ = raw_max_ = kMinusInfinity;
        usable_ = raw_usable_ = true;
        for (const Tile& tile : tiles_) {
            max_ = tile.max > max_ ? tile.max : max_;
            raw_max_ = tile.raw_max > raw_max_ ? tile.raw_max : raw_max_;
            usable_ = usable_ && tile.usable;
            raw_usable_ = raw_usable_ && tile.raw_usable;
        }
    }

    // kTargetNan: NaN, +inf or nothing finite; kEmptySupport: the edits leave nothing; else 0.
    int32_t status() const {
        if (!usable_ || raw_max_ == kMinusInfinity) return kTargetNan;
        return max_ == kMinusInfinity ? kEmptySupport : 0;
    }
    // Whether the raw row has a law.
    bool raw_usable() const { return raw_usable_ && raw_max_ > kMinusInfinity; }
    float raw_logit(int64_t column) const { return to_float(row_[column]); }
    float logit(int64_t column) const {
        const float x = raw_logit(column);
        return edits_ == nullptr ? x : edits_->z_of(x, column);
    }

    // Lowest column of the largest processed logit of a row with status 0.
    int64_t argmax() const {
        int64_t t = 0;
        while (tiles_[t].max != max_) ++t;
        return with_tile(
            t, [&](const auto* x) { return t * kVocabTile + first_equal(x, tile_size(t), max_); });
    }

    // The token of a row without a law, by the rules of verify.h.
    int64_t fallback() const {
        const auto allowed = [&](int64_t id) { return edits_ == nullptr || edits_->allowed(id); };
        bool some = false;
        int64_t lowest = 0;
        for (int64_t v = 0; v < size_ && !some; ++v) {
            some = allowed(v);
            if (some) lowest = v;
        }
        const bool constrained = edits_ != nullptr && edits_->allowed.constrained;
        if (status() == kEmptySupport && some && constrained) return lowest;
        int64_t best = -1;
        float largest = kMinusInfinity;
        for (int64_t v = 0; v < size_; ++v) {
            const float x = raw_logit(v);
            if ((some && !allowed(v)) || is_bad_logit(x) || !(x > largest)) continue;
            largest = x;
            best = v;
        }
        return best >= 0 ? best : lowest;
    }

    // --- Log-probabilities ------------------------------------------------------------------------
    // Natural log-sum-exp of the raw row.
    double raw_lse() const {
        double sum = 0.0;
        over_factors(&Tile::raw_base, raw_max_, kLog2E,
                     [&](int64_t t, float factor) { sum += double{tiles_[t].raw_sum} * factor; });
        return raw_max_ + kLn2 * log2_of(sum);
    }

    // The n most probable columns in order, raw or of the processed logits: fn(i, column).
    template <class Fn>
    void visit_top(int64_t n, bool raw, const Fn& fn) const {
        const Raw view{*this};
        const Ranked* list = nullptr;
        if (raw && edits_ != nullptr) {
            Selector<Raw> selector(view, raw_max_, kLog2E);
            const int64_t count = selector.list_first(n, &list);
            for (int64_t i = 0; i < count; ++i) fn(i, static_cast<int64_t>(list[i].id));
        } else {
            Selector<TiledRow> selector(*this, max_, kLog2E);
            const int64_t count = selector.list_first(n, &list);
            for (int64_t i = 0; i < count; ++i) fn(i, static_cast<int64_t>(list[i].id));
        }
    }

    // --- As a source of Selector: the processed logits ----------------------------------------------
    int64_t num_blocks() const { return static_cast<int64_t>(peaks_.size()); }
    uint16_t peak(int64_t block) const { return peaks_[block]; }
    template <class Fn>
    void visit(uint32_t lowest, const Fn& fn) const {
        visit_blocks(peaks_, lowest, [&](int64_t t, const auto& blocks) {
            with_tile(t, [&](const auto* x) { blocks(x, fn); });
        });
    }

  protected:
    // The raw logits of an edited row as a source of Selector.
    struct Raw {
        const TiledRow& row;
        int64_t num_blocks() const { return static_cast<int64_t>(row.raw_peaks_.size()); }
        uint16_t peak(int64_t block) const { return row.raw_peaks_[block]; }
        template <class Fn>
        void visit(uint32_t lowest, const Fn& fn) const {
            row.visit_blocks(row.raw_peaks_, lowest, [&](int64_t t, const auto& blocks) {
                blocks(row.row_ + t * kVocabTile, fn);
            });
        }
    };

    int64_t tile_size(int64_t t) const {
        const int64_t left = size_ - t * kVocabTile;
        return left < kVocabTile ? left : kVocabTile;
    }

    // Calls fn with the processed logits of a tile.
    template <class Fn>
    auto with_tile(int64_t t, const Fn& fn) const {
        const T* x = row_ + t * kVocabTile;
        if (edits_ == nullptr) return fn(x);
        alignas(64) float z[kVocabTile];
        edits_->tile(x, t * kVocabTile, tile_size(t), z);
        return fn(static_cast<const float*>(z));
    }

    // The usual tile, in one pass. False: nothing has been read.
    bool read_plain_tile(const T* x, int64_t n, const T* ahead, Tile& tile) const {
        if (edits_ != nullptr || plan_.peaks || !(plan_.sum || plan_.raw_sum)) return false;
        const float bound = kPlainRange / (plan_.scale > kLog2E ? plan_.scale : kLog2E);
        float sums[2];
        const bool plain = both_ ? plain_sums<2>(x, n, bound, scales_, ahead, &tile.max, sums)
                                 : plain_sums<1>(x, n, bound, scales_, ahead, &tile.max, sums);
        if (!plain) return false;
        tile.raw_max = tile.max;
        tile.usable = tile.raw_usable = true;
        tile.base = tile.raw_base = 0.0f;
        tile.sum = sums[0];
        tile.raw_sum = sums[both_];
        return true;
    }

    void read_tile(int64_t t, int64_t next) {
        const T* x = row_ + t * kVocabTile;
        const T* ahead = row_ + next * kVocabTile;
        const int64_t n = tile_size(t);
        Tile& tile = tiles_[t];
        uint16_t* peaks = plan_.peaks ? peaks_.data() + t * kBlocksPerTile : nullptr;
        tile.sum = tile.raw_sum = 0.0f;
        if (read_plain_tile(x, n, ahead, tile)) return;
        if (edits_ == nullptr) {
            const TilePeak peak = tile_peak(x, n, peaks);
            tile.max = tile.raw_max = tile.base = tile.raw_base = peak.max;
            tile.usable = tile.raw_usable = peak.usable;
            if (!plan_.sum && !plan_.raw_sum) return;
            float sums[2];
            if (both_) {
                law_sums<2>(x, n, peak.max, scales_, ahead, sums);
            } else {
                law_sums<1>(x, n, peak.max, scales_, ahead, sums);
            }
            tile.sum = sums[0];
            tile.raw_sum = sums[both_];
            return;
        }
        uint16_t* raw_peaks = plan_.raw_peaks ? raw_peaks_.data() + t * kBlocksPerTile : nullptr;
        const TilePeak raw = tile_peak(x, n, raw_peaks);
        tile.raw_max = tile.raw_base = raw.max;
        tile.raw_usable = raw.usable;
        if (plan_.raw_sum) law_sums<1>(x, n, raw.max, &kLog2E, ahead, &tile.raw_sum);
        alignas(64) float z[kVocabTile];
        edits_->tile(x, t * kVocabTile, n, z);
        const TilePeak peak = tile_peak(static_cast<const float*>(z), n, peaks);
        tile.max = tile.base = peak.max;
        tile.usable = raw.usable && peak.usable;
        if (plan_.sum) {
            law_sums<1>(static_cast<const float*>(z), n, peak.max, &plan_.scale,
                        static_cast<const float*>(z), &tile.sum);
        }
    }

    // First entry of a tile that equals `value`, which it holds.
    template <class X>
    static int64_t first_equal(const X* x, int64_t n, float value) {
        for (int64_t i = 0;; i += kLanes) {
            const uint32_t here = lane_bits(row_lanes(x, i, n) == set1(value));
            if (here != 0) return i + __builtin_ctz(here);
        }
    }

    // Calls fn(t, blocks) for every tile with a block whose peak reaches the key `lowest`;
    // blocks(x, visitor) then calls visitor(x, begin, end, first id) for those blocks.
    template <class Fn>
    void visit_blocks(const std::vector<uint16_t>& peaks, uint32_t lowest, const Fn& fn) const {
        const uint16_t least = static_cast<uint16_t>(lowest >> 16);
        const int64_t num_blocks = static_cast<int64_t>(peaks.size());
        for (int64_t t = 0; t < static_cast<int64_t>(tiles_.size()); ++t) {
            const int64_t from = t * kBlocksPerTile;
            const int64_t to =
                from + kBlocksPerTile < num_blocks ? from + kBlocksPerTile : num_blocks;
            bool any = false;
            for (int64_t b = from; b < to; ++b) any = any || peaks[b] >= least;
            if (!any) continue;
            fn(t, [&](const auto* x, const auto& visitor) {
                for (int64_t b = from; b < to; ++b) {
                    if (peaks[b] < least) continue;
                    const int64_t begin = (b - from) * kVocabBlock, n = tile_size(t);
                    visitor(x, begin, begin + kVocabBlock < n ? begin + kVocabBlock : n,
                            t * kVocabTile);
                }
            });
        }
    }

    // Calls fn(t, 2^((tile's base_of - row_max) * c)) for all tiles, in order: what makes a tile's sum one
    // relative to the row's maximum.
    template <class Fn>
    void over_factors(float Tile::*base_of, float row_max, float c, const Fn& fn) const {
        alignas(64) float lane[kLanes];
        const int64_t n = static_cast<int64_t>(tiles_.size());
        for (int64_t t = 0; t < n; t += kLanes) {
            const int64_t count = n - t < kLanes ? n - t : kLanes;
            for (int64_t l = 0; l < kLanes; ++l) lane[l] = tiles_[t + (l < count ? l : 0)].*base_of;
            store(lane, exp2_product(load(lane) - set1(row_max), set1(c)));
            for (int64_t l = 0; l < count; ++l) fn(t + l, lane[l]);
        }
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

    const T* row_ = nullptr;
    int64_t size_ = 0;
    const RowEdits* edits_ = nullptr;
    ReadPlan plan_;
    // Of the sums of an unedited tile: one scale, or the law's and the raw one.
    bool both_ = false;
    float scales_[2] = {0.0f, kLog2E};
    float max_ = 0.0f, raw_max_ = 0.0f;
    bool usable_ = false, raw_usable_ = false;
    std::vector<Tile> tiles_;
    std::vector<uint16_t> peaks_, raw_peaks_;
};

}  // namespace specdec::cpu::SPECDEC_ISA
