// verify_chain on the CPU: the decisions of params.h, one request after the other, lazily: a row
// behind the first rejection is never read, a draft row only when its draft is tested.
// Work: a thread takes whole requests, or tiles of one row where there are fewer requests than threads.
// Bytes moved per request with a accepted drafts: a + 1 target rows, a + 1 draft rows (where q is
// read), and both rows of the rejected draft a second time; nothing is written but the results.
// Determinism: fixed sums over absolute tiles (vocab_row.h); a request depends on nothing but itself.
#include "params.h"

#include "dispatch.h"
#include "philox.h"
#include "vocab_row.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

int64_t clamp(int64_t x, int64_t low, int64_t high) {
    return x < low ? low : x > high ? high : x;
}

// What a request decides: its accepted drafts and the token after them.
struct Outcome {
    int64_t accepted;
    int64_t token;
    int32_t status;
};

// A draft row, of whatever type draft_logits has: its own kernels per type, not per pair of types.
class DraftRow {
  public:
    explicit DraftRow(DType dtype) : dtype_(dtype) {}

    void read(const View<const void, 3>& all, int64_t row, int64_t j, int64_t vocab_size,
              float scale, bool across_tiles) {
        with(*this, [&](auto& draft, auto tag) {
            using Q = typename decltype(tag)::type;
            draft.read(all.as<const Q>().at(row, j), vocab_size, &scale, 1, across_tiles);
            if (draft.usable()) draft.choose_law(0, scale);
        });
    }
    bool usable() const {
        bool out = false;
        with(*this, [&](auto& draft, auto) { out = draft.usable(); });
        return out;
    }
    float probability(int64_t id) const {
        float out = 0.0f;
        with(*this, [&](auto& draft, auto) { out = draft.probability(id); });
        return out;
    }
    void store_probabilities(int64_t tile, float* out) const {
        with(*this, [&](auto& draft, auto) { draft.store_probabilities(tile, out); });
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

    const DType dtype_;
    Row<float> f32_;
    Row<f16> f16_;
    Row<bf16> bf16_;
};

template <class T>
class Request {
  public:
    Request(const VerifyChainParams& p, bool across_tiles)
        : p_(p), across_tiles_(across_tiles), draft_(p.draft_dtype) {}

    void verify(int64_t b) {
        const int64_t begin = clamp(p_.cu_rows[b], 0, p_.num_rows);
        const int64_t end = clamp(p_.cu_rows[b + 1], begin, p_.num_rows);
        if (begin == end) {
            write(b, begin, {0, -1, 0});  // inactive: no token at all
            return;
        }
        seed_ = p_.seeds[b];
        position_ = p_.positions[b];
        const float temperature = p_.temperature == nullptr ? 1.0f : p_.temperature[b];
        greedy_ = is_greedy(temperature);
        scale_ = exponent_scale(temperature);
        draft_row_ = row_of_draft_logits(b);
        draft_scale_ =
            exponent_scale(p_.draft_temperature == nullptr ? 1.0f : p_.draft_temperature[b]);

        const int64_t num_drafts = clamp(end - begin - 1, 0, p_.max_drafts);
        write(b, begin, walk(begin, num_drafts));
    }

  private:
    // Row of draft_logits that holds this request's q, or -1 where q is one-hot or not needed.
    int64_t row_of_draft_logits(int64_t b) const {
        if (greedy_ || p_.draft_logits.data == nullptr) return -1;
        if (p_.draft_is_one_hot != nullptr && p_.draft_is_one_hot[b]) return -1;
        if (p_.draft_temperature != nullptr && is_greedy(p_.draft_temperature[b])) return -1;
        const int64_t row = p_.draft_rows == nullptr ? b : p_.draft_rows[b];
        return row < p_.draft_logits.size[0] ? row : -1;
    }

    float coin(int64_t index, Purpose purpose) const {
        return uniform_at(seed_, position_, index, purpose);
    }

    // The numbered steps are those of params.h.
    Outcome walk(int64_t begin, int64_t num_drafts) {
        const T* logits = static_cast<const T*>(p_.target_logits.data);
        for (int64_t j = 0;; ++j) {
            // 1. The target row.
            target_.read(logits + (begin + j) * p_.target_logits.stride[0], p_.vocab_size, &scale_,
                         greedy_ ? 0 : 1, across_tiles_);
            if (!target_.usable()) return {j, target_.finite_argmax(), kTargetNan};
            if (!greedy_) target_.choose_law(0, scale_);

            // 2. The draft id.
            const int64_t draft = j < num_drafts ? p_.input_ids[begin + j + 1] : -1;
            if (draft < 0 || draft >= p_.vocab_size) {
                return {j, end_of_chain(j), draft == -1 ? 0 : kBadId};
            }

            // 3. Greedy requests compare.
            if (greedy_) {
                const int64_t best = target_.argmax();
                if (draft == best) continue;
                return {j, best, 0};
            }

            // 4. The draft row.
            float q = 1.0f;
            if (draft_row_ >= 0) {
                draft_.read(p_.draft_logits, draft_row_, j, p_.vocab_size, draft_scale_,
                            across_tiles_);
                if (!draft_.usable()) return {j, end_of_chain(j), kDraftNan};
                q = draft_.probability(draft);
            }

            // 5. The test, and the residual where it fails.
            if (coin(j + 1, Purpose::kAccept) * q < target_.probability(draft)) continue;
            const float u = coin(j + 1, Purpose::kResidual);
            if (draft_row_ < 0) return {j, target_.draw_without(draft, u), 0};
            return {j, target_.draw_residual(draft_, u, across_tiles_), 0};
        }
    }

    int64_t end_of_chain(int64_t j) {
        return greedy_ ? target_.argmax() : target_.draw(coin(j, Purpose::kBonus));
    }

    // The accepted drafts, the token after them (none for an inactive request), then -1.
    void write(int64_t b, int64_t begin, const Outcome& outcome) const {
        p_.num_accepted[b] = static_cast<int32_t>(outcome.accepted);
        p_.status[b] = outcome.status;
        const int64_t width = p_.max_drafts + 1;
        for (int64_t i = 0; i < width; ++i) {
            int64_t token = -1;
            if (i < outcome.accepted) token = p_.input_ids[begin + 1 + i];
            if (i == outcome.accepted) token = outcome.token;
            if (p_.input_ids.dtype == DType::kI64) {
                static_cast<int64_t*>(p_.tokens)[b * width + i] = token;
            } else {
                static_cast<int32_t*>(p_.tokens)[b * width + i] = static_cast<int32_t>(token);
            }
        }
    }

    const VerifyChainParams& p_;
    const bool across_tiles_;
    int64_t seed_ = 0, position_ = 0, draft_row_ = -1;
    bool greedy_ = false;
    float scale_ = 0.0f, draft_scale_ = 0.0f;
    Row<T> target_;
    DraftRow draft_;
};

template <class T>
void run(const VerifyChainParams& p) {
    if (p.batch < num_threads()) {
        Request<T> request(p, true);
        for (int64_t b = 0; b < p.batch; ++b) request.verify(b);
        return;
    }
    parallel_for(0, p.batch, 1, [&](int64_t begin, int64_t end) {
        Request<T> request(p, false);
        for (int64_t b = begin; b < end; ++b) request.verify(b);
    });
}

}  // namespace

void verify_chain(const VerifyChainParams& p) {
    dispatch_float(p.logits_dtype, [&](auto tag) { run<typename decltype(tag)::type>(p); });
}

}  // namespace specdec::cpu::SPECDEC_ISA
