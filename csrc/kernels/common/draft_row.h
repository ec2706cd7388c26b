// A row of draft logits on the CPU: q of target ids, also for drafters with a vocabulary of their own.
#pragma once

#include "dispatch.h"
#include "verify.h"
#include "vocab_report.h"

namespace specdec::cpu::SPECDEC_ISA {

// Draft ids by tiles of the target vocabulary, for drafters with a reduced one.
class DraftMap {
  public:
    // Reads d2t once per call: where it grows from id to id, a target tile holds a range of draft ids.
    explicit DraftMap(const VerifyParams& p) : p_(p) {
        if (p.d2t == nullptr) return;
        int64_t before = INT64_MIN;
        for (int64_t i = 0; i < p.draft_vocab; ++i) {
            const int64_t id = target_of(i);
            sorted_ = sorted_ && id > before;
            before = id;
        }
    }
    bool identity() const { return p_.d2t == nullptr; }
    int64_t target_of(int64_t draft) const {
        return p_.d2t_is_offset ? draft + p_.d2t[draft] : p_.d2t[draft];
    }
    // The draft id of a target id, -1 without one.
    int64_t draft_of(int64_t target) const {
        if (identity()) return target;
        if (sorted_) {
            const int64_t i = first_from(target);
            return i < p_.draft_vocab && target_of(i) == target ? i : -1;
        }
        for (int64_t i = 0; i < p_.draft_vocab; ++i) {
            if (target_of(i) == target) return i;
        }
        return -1;
    }
    // Calls fn(draft id, target id) for the draft ids with a target id in [begin, end).
    template <class Fn>
    void visit(int64_t begin, int64_t end, const Fn& fn) const {
        for (int64_t i = sorted_ ? first_from(begin) : 0; i < p_.draft_vocab; ++i) {
            const int64_t target = target_of(i);
            if (target >= begin && target < end) {
                fn(i, target);
            } else if (sorted_) {
                return;
            }
        }
    }

  private:
    int64_t first_from(int64_t target) const {
        int64_t low = 0, high = p_.draft_vocab;
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (target_of(middle) < target) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        return low;
    }

    const VerifyParams& p_;
    bool sorted_ = true;
};

// A draft row, of whatever type draft_logits has: its own kernels per type, not per pair of types.
class DraftRow {
  public:
    DraftRow(DType dtype, const DraftMap& map) : dtype_(dtype), map_(&map) {}

    // False: the row has no law.
    bool read(const void* row, int64_t size, const RowEdits& edits, const LawPlan& law,
              bool across_tiles) {
        edits_ = edits;
        bool good = false;
        with(*this, [&](auto& draft, auto tag) {
            using Q = typename decltype(tag)::type;
            draft.read(static_cast<const Q*>(row), size, edits_,
                       read_plan(law, LogprobsWanted{}, size, false), across_tiles);
            good = draft.status() == 0;
            if (good) draft.choose_law(law.filters);
        });
        return good;
    }
    // Of a target id.
    float probability(int64_t id) const {
        const int64_t column = map_->draft_of(id);
        float out = 0.0f;
        if (column >= 0) with(*this, [&](auto& draft, auto) { out = draft.probability(column); });
        return out;
    }
    // Of the target ids of a tile, room for kVocabTile.
    void store_probabilities(int64_t tile, float* out) const {
        if (map_->identity()) {
            with(*this, [&](auto& draft, auto) { draft.store_probabilities(tile, out); });
            return;
        }
        const int64_t first = tile * kVocabTile;
        for (int64_t i = 0; i < kVocabTile; ++i) out[i] = 0.0f;
        with(*this, [&](auto& draft, auto) {
            map_->visit(first, first + kVocabTile, [&](int64_t column, int64_t id) {
                out[id - first] = draft.probability(column);
            });
        });
    }

  private:
    template <class Self, class F>
    static void with(Self& self, const F& fn) {
        switch (self.dtype_) {
            case DType::kF32:
                return fn(self.f32_, Tag<float>{});
            case DType::kF16:
                return fn(self.f16_, Tag<f16>{});
            default:
                return fn(self.bf16_, Tag<bf16>{});
        }
    }

    DType dtype_;
    const DraftMap* map_;
    RowEdits edits_;
    Row<float> f32_;
    Row<f16> f16_;
    Row<bf16> bf16_;
};

}  // namespace specdec::cpu::SPECDEC_ISA
