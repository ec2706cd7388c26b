// Which ids of a row top-k, top-p, min-p and top-n keep, on the CPU, without sorting the row.
//
// All of them keep a prefix of the ids sorted by (z descending, id ascending), so the answer is the last
// id kept: a Cut. Ids are compared by a 32-bit key that orders like z. Every block of 256 entries has the
// upper half of its largest key ("peak", 2 bytes), and blocks whose peak lies below the range looked at
// are not visited: the k-th largest peak bounds the k-th largest key from below, so that top-k of a row
// visits about k blocks. Ids in the range are listed and sorted when they are few; otherwise histograms
// of 2048 bins (counts, and masses as integers, which no order of addition changes) narrow the range
// until they are, or until it is one key, whose ids count by number.
#pragma once

#include <algorithm>

#include "controls.h"
#include "vocab_tile.h"

namespace specdec::cpu::SPECDEC_ISA {

constexpr uint32_t kLeastKey = 0x00800000u;  // of the least finite float: -inf is never kept
constexpr uint32_t kMostKey = 0xffffffffu;

struct Ranked {
    uint32_t key, id;
    bool operator<(const Ranked& other) const {
        return key != other.key ? key > other.key : id < other.id;
    }
};

constexpr int64_t kMaxListed = 2048;

// Source: num_blocks(), peak(block) -> uint16_t, and visit(lowest, fn), which calls
// fn(z, begin, end, first) for every block whose peak reaches the key `lowest`: z[begin..end) are its
// entries (any type that row_lanes takes) and first + i is the id of entry i.
template <class Source>
class Selector {
  public:
    // max: largest z of the row; c: exponent scale of its law.
    Selector(const Source& source, float max, float c) : source_(source), max_(max), c_(c) {}

    // The ids kept by filters that are not all off. total: sum of 2^((z - max) * c) over the row, needed
    // where top-p is on and top-k off, or joint.
    Cut select(const Filters& f, int64_t vocab_size, double total) {
        Cut cut;
        double mass = total * kUnits;
        if (f.top_k < vocab_size) {
            const Kept kept = first_ids(f.top_k);
            cut = kept.cut;
            if (!f.joint) mass = static_cast<double>(kept.mass);
        }
        if (f.min_cut > kMinusInfinity) cut = stricter(cut, least_probable(f.min_cut));
        if (f.top_p < 1.0f) cut = stricter(cut, first_mass(f.top_p * mass));
        return cut;
    }

    // The n first ids in order, fewer when the row has fewer finite ones. n <= kMaxListed.
    int64_t list_first(int64_t n, const Ranked** out) {
        if (n == 0) return 0;
        const Cut cut = first_ids(n).cut;
        const uint32_t lowest = cut.id == kNoCut ? kLeastKey : key_of(cut.z);
        // Ids equal to the cut's z may be many; only those up to its id count.
        count_ = 0;
        visit_range(lowest, kMostKey, [&](Ranked r) {
            if ((r.key > lowest || r.id <= cut.id) && count_ < kMaxListed) list_[count_++] = r;
        });
        std::sort(list_, list_ + count_);
        *out = list_;
        return count_ < n ? count_ : n;
    }

  private:
    static constexpr double kUnits = 1099511627776.0;  // of mass_units
    static constexpr int kBins = 2048;

    struct Kept {
        Cut cut;
        uint64_t mass;
    };
    // What is looked for: enough ids, or enough mass.
    struct Goal {
        bool by_count;
        int64_t count;
        double mass;

        bool reached(int64_t have, uint64_t units) const {
            return have > 0 && (by_count ? have >= count : static_cast<double>(units) >= mass);
        }
    };

    static Cut stricter(const Cut& a, const Cut& b) {
        if (a.z != b.z) return a.z > b.z ? a : b;
        return a.id < b.id ? a : b;
    }

    Kept first_ids(int64_t k) {
        const uint32_t lowest = k <= source_.num_blocks() ? peak_of_rank(k) : kLeastKey;
        return find({true, k, 0.0}, lowest);
    }

    Cut first_mass(double mass) {
        const int64_t blocks = source_.num_blocks();
        return find({false, 0, mass}, peak_of_rank(blocks < 32 ? blocks : 32)).cut;
    }

    // Least z with (z - max) * c >= min_cut, which falls monotonically with z.
    Cut least_probable(float min_cut) const {
        uint32_t low = kLeastKey, high = key_of(max_);  // high is kept
        while (low < high) {
            const uint32_t middle = low + (high - low) / 2;
            const float d = (z_of_key(middle) - max_) * c_;
            if (!(d < min_cut)) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        return {z_of_key(high), kNoCut};
    }

    // A lower bound of the key of the rank-th largest peak: at least `rank` ids lie at or above it.
    uint32_t peak_of_rank(int64_t rank) const {
        uint32_t prefix = 0;
        for (int shift = 8; shift >= 0; shift -= 8) {
            int64_t counts[256] = {};
            for (int64_t b = 0; b < source_.num_blocks(); ++b) {
                const uint32_t peak = source_.peak(b);
                if (shift == 8 || peak >> 8 == prefix) ++counts[peak >> shift & 255u];
            }
            int bin = 255;
            while (bin > 0 && counts[bin] < rank) rank -= counts[bin--];
            prefix = prefix << 8 | static_cast<uint32_t>(bin);
        }
        const uint32_t key = prefix << 16;
        return key < kLeastKey ? kLeastKey : key;
    }

    // The last id that the goal needs, from the ids with keys from `lowest` up and, where they do not
    // reach it, from the others.
    Kept find(const Goal& goal, uint32_t lowest) {
        uint32_t low = lowest, high = kMostKey;
        int64_t above = 0;
        uint64_t mass_above = 0;
        for (;;) {
            if (list_range(low, high)) {
                std::sort(list_, list_ + count_);
                weigh_list();
                for (int64_t i = 0; i < count_; ++i) {
                    above += 1;
                    mass_above += weights_[i];
                    if (goal.reached(above, mass_above)) {
                        return {{z_of_key(list_[i].key), list_[i].id}, mass_above};
                    }
                }
            } else if (low == high) {
                return tied(goal, low, above, mass_above);
            } else {
                const int shift = histogram(low, high);
                int bin = kBins - 1;
                for (; bin >= 0; --bin) {
                    if (goal.reached(above + bins_[bin].count, mass_above + bins_[bin].mass)) break;
                    above += bins_[bin].count;
                    mass_above += bins_[bin].mass;
                }
                if (bin >= 0) {
                    low += static_cast<uint32_t>(bin) << shift;
                    const uint64_t last = low + ((uint64_t{1} << shift) - 1);
                    if (last < high) high = static_cast<uint32_t>(last);
                    continue;
                }
            }
            if (low == kLeastKey) return {Cut{}, mass_above};  // everything is kept
            high = low - 1;
            low = next_lower(low);
        }
    }

    // More of the row, a few steps at most.
    uint32_t next_lower(uint32_t low) const {
        int64_t blocks = 0;
        for (int64_t b = 0; b < source_.num_blocks(); ++b) {
            blocks += (static_cast<uint32_t>(source_.peak(b)) << 16) >= low ? 1 : 0;
        }
        const uint32_t wider =
            blocks * 8 < source_.num_blocks() ? peak_of_rank(blocks * 8) : kLeastKey;
        return wider < low ? wider : kLeastKey;
    }

    // The ids of one key, in the order of their numbers.
    Kept tied(const Goal& goal, uint32_t key, int64_t above, uint64_t mass_above) {
        const uint64_t weight = mass_units(weight_of(z_of_key(key)));
        Kept kept{{z_of_key(key), kNoCut}, mass_above};
        bool done = false;
        visit_range(key, key, [&](Ranked r) {
            if (done) return;
            above += 1;
            kept.mass += weight;
            if (goal.reached(above, kept.mass)) {
                kept.cut.id = r.id;
                done = true;
            }
        });
        return kept;
    }

    // Calls fn for every id with a key in [low, high], in the order of the ids.
    template <class Fn>
    void visit_range(uint32_t low, uint32_t high, const Fn& fn) const {
        const V16 least = set1(z_of_key(low));
        source_.visit(low, [&](const auto* z, int64_t begin, int64_t end, int64_t first) {
            alignas(64) float lane[kLanes];
            for (int64_t i = begin; i < end; i += kLanes) {
                const V16 x = row_lanes(z, i, end);
                uint32_t bits = lane_bits(x >= least);
                if (bits == 0) continue;
                store(lane, x);
                for (; bits != 0; bits &= bits - 1) {
                    const int l = __builtin_ctz(bits);
                    const uint32_t key = key_of(lane[l]);
                    if (key <= high) fn(Ranked{key, static_cast<uint32_t>(first + i + l)});
                }
            }
        });
    }

    // Lists the range; false when it holds too many.
    bool list_range(uint32_t low, uint32_t high) {
        count_ = 0;
        visit_range(low, high, [&](Ranked r) {
            if (count_ < kMaxListed) list_[count_] = r;
            ++count_;
        });
        return count_ <= kMaxListed;
    }

    int histogram(uint32_t low, uint32_t high) {
        int shift = 0;
        while ((high - low) >> shift >= static_cast<uint32_t>(kBins)) ++shift;
        for (Bin& bin : bins_) bin = Bin{};
        visit_range(low, high, [&](Ranked r) {
            Bin& bin = bins_[(r.key - low) >> shift];
            bin.count += 1;
            bin.mass += mass_units(weight_of(z_of_key(r.key)));
        });
        return shift;
    }

    float weight_of(float z) const { return first_lane(exp2_product(set1(z - max_), set1(c_))); }
    void weigh_list() {
        alignas(64) float lane[kLanes];
        for (int64_t i = 0; i < count_; i += kLanes) {
            for (int64_t l = 0; l < kLanes; ++l) {
                lane[l] = i + l < count_ ? z_of_key(list_[i + l].key) : kMinusInfinity;
            }
            store(lane, exp2_product(load(lane) - set1(max_), set1(c_)));
            for (int64_t l = 0; l < kLanes && i + l < count_; ++l)
                weights_[i + l] = mass_units(lane[l]);
        }
    }

    struct Bin {
        int64_t count = 0;
        uint64_t mass = 0;
    };

    const Source& source_;
    const float max_, c_;
    int64_t count_ = 0;
    Ranked list_[kMaxListed];
    uint64_t weights_[kMaxListed];
    Bin bins_[kBins];
};

}  // namespace specdec::cpu::SPECDEC_ISA
