// The law of one row of logits on the CPU under a request's controls (token_law.h, controls.h):
// probabilities, draws, and what is left of it after rejections. A draw looks at one tile again, a residual
// at the tiles that can have mass. Sums follow the fixed order of tiled_row.h.
#pragma once

#include "tiled_row.h"

namespace specdec::cpu::SPECDEC_ISA {

// What is left of p after rejections: max(a p - b q, 0), and 0 for the rejected ids.
struct Rest {
    double a = 1.0, b = 0.0;
    std::vector<int64_t> rejected;
};

template <class T>
class Row : public TiledRow<T> {
    using Base = TiledRow<T>;
    using Base::edits_;
    using Base::max_;
    using Base::over_factors;
    using Base::over_tiles;
    using Base::peaks_;
    using Base::plan_;
    using Base::size_;
    using Base::tile_size;
    using Base::tiles_;
    using Base::with_tile;

  public:
    using Base::logit;

    void read(const T* row, int64_t size, const RowEdits& edits, const ReadPlan& plan,
              bool across_tiles) {
        Base::read(row, size, edits, plan, across_tiles);
        cut_ = Cut{};
        has_cut_ = false;
        c_ = plan.scale;
    }

    // Of a row with status 0 that was read with a scale.
    void choose_law(const Filters& filters) {
        if (!filters.none) {
            Selector<Base> selector(*this, max_, c_);
            double total = 0.0;
            if (plan_.sum) {
                over_factors(&Tile::base, max_, c_, [&](int64_t t, float factor) {
                    total += tiles_[t].sum * double{factor};
                });
            }
            cut_ = selector.select(filters, size_, total);
            has_cut_ = cut_.id != kNoCut || cut_.z > kMinusInfinity;
        }
        masses_.resize(tiles_.size());
        total_ = 0.0;
        over_factors(&Tile::base, max_, c_, [&](int64_t t, float factor) {
            float sum = tiles_[t].sum;
            if (has_cut_ || !plan_.sum) {
                sum = tiles_[t].max < cut_.z ? 0.0f : with_tile(t, [&](const auto* x) {
                    return tile_sum(entries(x, t), tile_size(t));
                });
            }
            masses_[t] = sum * double{factor};
            total_ += masses_[t];
        });
        log2_total_ = log2_of(total_);
    }

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
                kept.base = max_;
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

  private:
    TileCut tile_cut(int64_t t) const {
        if (!has_cut_) return {};
        const int64_t last = cut_.id - t * kVocabTile;
        return {peaks_.data() + t * kBlocksPerTile, static_cast<uint16_t>(key_of(cut_.z) >> 16),
                cut_.z,
                static_cast<int32_t>(last < -1           ? -1
                                     : last < kVocabTile ? last
                                                         : kVocabTile)};
    }
    template <class X>
    LawEntries<X> entries(const X* x, int64_t t) const {
        return {x, tiles_[t].base, c_, tile_cut(t)};
    }
    template <class X>
    Probabilities<X> probabilities(const X* x, int64_t t) const {
        return {x, max_, c_, static_cast<float>(log2_total_), tile_cut(t)};
    }
    // What makes a tile's sum one relative to the row's maximum.
    double tile_factor(int64_t t) const {
        return first_lane(exp2_product(set1(tiles_[t].base - max_), set1(c_)));
    }
    // The rest in tile t: in units of probability with a draft, else relative to the tile's base.
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
        return place.tile * kVocabTile + find_in_tile(mass, tile_size(place.tile), place.fraction);
    }

    float c_ = 0.0f;
    bool has_cut_ = false;
    Cut cut_;
    double total_ = 0.0, log2_total_ = 0.0, rest_total_ = 0.0;
    std::vector<double> masses_, rest_;
};

}  // namespace specdec::cpu::SPECDEC_ISA
