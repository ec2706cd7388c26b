// One row of logits on the CPU: statistics, probabilities and draws of its law under a request's controls
// (token_law.h, controls.h).
//
// A row is read from memory once, in tiles of 4096 entries: edits (where there are any) into a buffer in
// the first cache, the tile's maximum, the sum of exponentials. Filters look again at the blocks that can
// hold what they keep, a draw at one tile, a residual at the tiles that can have mass.
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

// What is left of p after rejections: max(a p - b q, 0), and 0 for the rejected ids.
struct Rest {
    double a = 1.0, b = 0.0;
    std::vector<int64_t> rejected;
};

// Reads a row and answers for its law. Reused from row to row, so that its vectors are allocated
// once per thread.
template <class T>
class Row {
  public:
    void read(const T* row, int64_t size, const RowEdits& edits, const ReadPlan& plan,
              bool across_tiles) {
        row_ = row;
        size_ = size;
        edits_ = edits.none() ? nullptr : &edits;
        plan_ = plan;
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
        cut_ = Cut{};
        has_cut_ = false;
        c_ = plan.scale;
    }

    // kTargetNan: NaN, +inf or nothing finite; kEmptySupport: the edits leave nothing; else 0.
    int32_t status() const {
        if (!usable_ || raw_max_ == kMinusInfinity) return kTargetNan;
        return max_ == kMinusInfinity ? kEmptySupport : 0;
    }
    // Whether the raw row has a law.
    bool raw_usable() const { return raw_usable_ && raw_max_ > kMinusInfinity; }
    float max() const { return max_; }
    float raw_max() const { return raw_max_; }
    float raw_logit(int64_t column) const { return to_float(row_[column]); }
    float logit(int64_t column) const {
        const float x = raw_logit(column);
        return edits_ == nullptr ? x : edits_->z_of(x, column);
    }

    // Lowest column of the largest processed logit of a row with status 0.
    int64_t argmax() const {
        int64_t t = 0;
        while (tiles_[t].max != max_) ++t;
        return with_tile(t, [&](const auto* x) { return t * kVocabTile + first_equal(x, tile_size(t), max_); });
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

    // --- The law --------------------------------------------------------------------------------
    // Of a row with status 0 that was read with a scale.
    void choose_law(const Filters& filters) {
        if (!filters.none) {
            Selector<Row> selector(*this, max_, c_);
            double total = 0.0;
            if (plan_.sum) {
                over_factors([&](int64_t t, float factor) { total += tiles_[t].sum * double{factor}; });
            }
            cut_ = selector.select(filters, size_, total);
            has_cut_ = cut_.id != kNoCut || cut_.z > kMinusInfinity;
        }
        masses_.resize(tiles_.size());
        total_ = 0.0;
        over_factors([&](int64_t t, float factor) {
            float sum = tiles_[t].sum;
            if (has_cut_ || !plan_.sum) {
                sum = tiles_[t].max < cut_.z
                          ? 0.0f
                          : with_tile(t, [&](const auto* x) {
                                return tile_sum(entries(x, t), tile_size(t));
                            });
            }
            masses_[t] = sum * double{factor};
            total_ += masses_[t];
        });
        log2_total_ = log2_of(total_);
    }

    // log2 of the kept sum of 2^((z - max) * c).
    double log2_sum() const { return log2_total_; }

    float probability(int64_t column) const {
        const float z = logit(column);
        if (has_cut_ && !cut_.keeps(z, column)) return 0.0f;
        const V16 exponent =
            fma(set1(z) - set1(max_), set1(c_), set1(-static_cast<float>(log2_total_)));
        return first_lane(exp2_product(exponent, set1(1.0f)));
    }

    // Natural logarithm of the probability of a column.
    double log_probability(int64_t column) const {
        const float z = logit(column);
        if (z == kMinusInfinity || (has_cut_ && !cut_.keeps(z, column))) return kMinusInfinity;
        return kLn2 * ((double{z} - max_) * c_ - log2_total_);
    }

    // Probabilities of tile t, room for kVocabTile.
    void store_probabilities(int64_t t, float* out) const {
        with_tile(t, [&](const auto* x) { store_tile(probabilities(x, t), tile_size(t), out); });
    }

    // Entropy of the law in nats.
    double entropy() const {
        double sum = 0.0;  // of 2^e e, e = (z - max) c, over the kept
        for (size_t t = 0; t < tiles_.size(); ++t) {
            if (tiles_[t].max < cut_.z) continue;
            with_tile(t, [&](const auto* x) {
                const int64_t n = tile_size(t);
                auto kept = entries(x, t);
                kept.max = max_;
                V16 part = set1(0.0f);
                for (int64_t i = 0; i < n; i += kLanes) {
                    const V16 weight = kept.lanes(i, n);
                    const V16 e = (row_lanes(x, i, n) - set1(max_)) * set1(c_);
                    part = part + select(weight > set1(0.0f), weight * e, set1(0.0f));
                }
                sum += sum_lanes(part);
            });
        }
        return kLn2 * (log2_total_ - sum / total_);
    }

    // The column at u of the law, by inverse CDF in vocabulary order.
    int64_t draw(float u) const {
        const TilePlace place = find_tile(masses_, u * total_);
        return with_tile(place.tile, [&](const auto* x) {
            alignas(64) float mass[kVocabTile];
            store_tile(entries(x, place.tile), tile_size(place.tile), mass);
            return place_in_tile(place, mass);
        });
    }

    // Mass of the rest, in units of probability; draft.store_probabilities gives q where rest.b > 0.
    template <class Draft>
    double rest_mass(const Rest& rest, const Draft* draft, bool across_tiles) {
        rest_.resize(tiles_.size());
        over_tiles(across_tiles, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t) {
                bool hit = rest.b > 0.0;
                for (int64_t id : rest.rejected) hit = hit || id / kVocabTile == t;
                if (!hit) {
                    rest_[t] = masses_[t];
                    continue;
                }
                if (has_cut_ && tiles_[t].max < cut_.z) {
                    rest_[t] = 0.0;
                    continue;
                }
                alignas(64) float mass[kVocabTile];
                store_rest(rest, draft, t, mass);
                rest_[t] = tile_sum(StoredEntries{mass}, tile_size(t));
                if (!(rest.b > 0.0)) rest_[t] *= tile_factor(t);
            }
        });
        rest_total_ = 0.0;
        for (double mass : rest_) rest_total_ += mass;
        return rest.b > 0.0 ? rest_total_ : rest.a * rest_total_ / total_;
    }

    // The column at u of the rest whose mass was asked for last.
    template <class Draft>
    int64_t draw_rest(const Rest& rest, const Draft* draft, float u) const {
        const TilePlace place = find_tile(rest_, u * rest_total_);
        alignas(64) float mass[kVocabTile];
        store_rest(rest, draft, place.tile, mass);
        return place_in_tile(place, mass);
    }

    // --- Log-probabilities ------------------------------------------------------------------------
    // Natural log-sum-exp of the raw row.
    double raw_lse() const {
        double sum = 0.0;
        for (const Tile& tile : tiles_) {
            alignas(64) float lane[kLanes];
            store(lane, exp2_product(set1(tile.raw_max - raw_max_), set1(kLog2E)));
            sum += double{tile.raw_sum} * lane[0];
        }
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
            Selector<Row> selector(*this, max_, kLog2E);
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

  private:
    // The raw logits of an edited row as a source of Selector.
    struct Raw {
        const Row& row;
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

    void read_tile(int64_t t, int64_t next) {
        const T* x = row_ + t * kVocabTile;
        const T* ahead = row_ + next * kVocabTile;
        const int64_t n = tile_size(t);
        Tile& tile = tiles_[t];
        uint16_t* peaks = plan_.peaks ? peaks_.data() + t * kBlocksPerTile : nullptr;
        tile.sum = tile.raw_sum = 0.0f;
        if (edits_ == nullptr) {
            const TilePeak peak = tile_peak(x, n, peaks);
            tile.max = tile.raw_max = peak.max;
            tile.usable = tile.raw_usable = peak.usable;
            if (plan_.sum && plan_.raw_sum && plan_.scale != kLog2E) {
                const float scales[] = {plan_.scale, kLog2E};
                float sums[2];
                law_sums<2>(x, n, peak.max, scales, ahead, sums);
                tile.sum = sums[0];
                tile.raw_sum = sums[1];
            } else if (plan_.sum || plan_.raw_sum) {
                const float scale = plan_.sum ? plan_.scale : kLog2E;
                law_sums<1>(x, n, peak.max, &scale, ahead, &tile.sum);
                tile.raw_sum = tile.sum;
            }
            return;
        }
        uint16_t* raw_peaks = plan_.raw_peaks ? raw_peaks_.data() + t * kBlocksPerTile : nullptr;
        const TilePeak raw = tile_peak(x, n, raw_peaks);
        tile.raw_max = raw.max;
        tile.raw_usable = raw.usable;
        if (plan_.raw_sum) law_sums<1>(x, n, raw.max, &kLog2E, ahead, &tile.raw_sum);
        alignas(64) float z[kVocabTile];
        edits_->tile(x, t * kVocabTile, n, z);
        const TilePeak peak = tile_peak(static_cast<const float*>(z), n, peaks);
        tile.max = peak.max;
        tile.usable = raw.usable && peak.usable;
        if (plan_.sum) {
            law_sums<1>(static_cast<const float*>(z), n, peak.max, &plan_.scale,
                        static_cast<const float*>(z), &tile.sum);
        }
    }

    TileCut tile_cut(int64_t t) const {
        if (!has_cut_) return {};
        const int64_t last = cut_.id - t * kVocabTile;
        return {peaks_.data() + t * kBlocksPerTile, static_cast<uint16_t>(key_of(cut_.z) >> 16),
                cut_.z, static_cast<int32_t>(last < -1 ? -1 : last < kVocabTile ? last : kVocabTile)};
    }
    template <class X>
    LawEntries<X> entries(const X* x, int64_t t) const {
        return {x, tiles_[t].max, c_, tile_cut(t)};
    }
    template <class X>
    Probabilities<X> probabilities(const X* x, int64_t t) const {
        return {x, max_, c_, static_cast<float>(log2_total_), tile_cut(t)};
    }
    // Tile sums are relative to the tile's maximum; this makes them relative to the row's.
    double tile_factor(int64_t t) const {
        return first_lane(exp2_product(set1(tiles_[t].max - max_), set1(c_)));
    }
    // Calls fn(t, tile_factor(t)) for all tiles, in order.
    template <class Fn>
    void over_factors(const Fn& fn) const {
        alignas(64) float lane[kLanes];
        const int64_t n = static_cast<int64_t>(tiles_.size());
        for (int64_t t = 0; t < n; t += kLanes) {
            const int64_t count = n - t < kLanes ? n - t : kLanes;
            for (int64_t l = 0; l < kLanes; ++l) lane[l] = tiles_[t + (l < count ? l : 0)].max;
            store(lane, exp2_product(load(lane) - set1(max_), set1(c_)));
            for (int64_t l = 0; l < count; ++l) fn(t + l, lane[l]);
        }
    }

    // The rest in tile t: in units of probability with a draft, else relative to the tile's maximum.
    template <class Draft>
    void store_rest(const Rest& rest, const Draft* draft, int64_t t, float* mass) const {
        with_tile(t, [&](const auto* x) {
            if (rest.b > 0.0) {
                alignas(64) float q[kVocabTile];
                draft->store_probabilities(t, q);
                const ResidualEntries<std::decay_t<decltype(*x)>> left{
                    probabilities(x, t), q, static_cast<float>(rest.a), static_cast<float>(rest.b)};
                store_tile(left, tile_size(t), mass);
            } else {
                store_tile(entries(x, t), tile_size(t), mass);
            }
        });
        for (int64_t id : rest.rejected) {
            if (id / kVocabTile == t) mass[id - t * kVocabTile] = 0.0f;
        }
    }

    int64_t place_in_tile(const TilePlace& place, const float* mass) const {
        return place.tile * kVocabTile +
               find_in_tile(mass, tile_size(place.tile), place.fraction);
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
            const int64_t to = from + kBlocksPerTile < num_blocks ? from + kBlocksPerTile : num_blocks;
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
    float max_ = 0.0f, raw_max_ = 0.0f, c_ = 0.0f;
    bool usable_ = false, raw_usable_ = false, has_cut_ = false;
    Cut cut_;
    double total_ = 0.0, log2_total_ = 0.0, rest_total_ = 0.0;
    std::vector<Tile> tiles_;
    std::vector<uint16_t> peaks_, raw_peaks_;
    std::vector<double> masses_, rest_;
};

}  // namespace specdec::cpu::SPECDEC_ISA
