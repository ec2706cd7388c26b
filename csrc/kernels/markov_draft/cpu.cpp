// markov_draft on the CPU: per step the heads' states, one pass over W2 for the whole batch, the tokens.
// Work: threads share the requests of a step's states and tokens, and the chunks of 512 columns of its pass.
// In a chunk, blocks of outputs and requests stay in registers: a row of W2 is read from memory for the
// first requests and from cache for the others. No row of logits is kept: a draw computes its chunk again.
// With a table, a step of greedy requests first goes over its codes, for the upper bound of every tile of 16 columns
// and the largest lower bound of all, and then over the rows of W2 of the tiles that can win.
// Bytes moved per step: W2 (or the table) and the base logits once (and the logits, where they are asked for, written).
// Determinism: params.h defines every sum; threads, batch and instruction set enter none of them.
#include <algorithm>
#include <optional>
#include <vector>

#include "cpu_bounds.h"
#include "cpu_sums.h"
#include "dot_rows.h"
#include "parallel.h"
#include "vocab_tile.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

constexpr int kOutputs = 3;  // of a block of several requests
constexpr int kRequests = kNativeLanes == 16 ? 8 : 4;
constexpr int kSoloOutputs = kNativeLanes == 16 ? 16 : 8;  // of a block of one request

// --- A block of drafts -----------------------------------------------------------------------------
template <class W>
class Drafts {
  public:
    explicit Drafts(const MarkovDraftParams& p)
        : p_(p),
          padded_(markov_padded_rank(p)),
          chunks_(markov_chunks(p)),
          before_(p.batch),
          embedding_(p.batch * p.rank),
          y_((p.batch + kRequests) * padded_),
          stats_(p.batch * chunks_) {
        if (p.head == MarkovHead::kRnn) state_.resize(p.batch * p.rank);
        for (int64_t b = 0; b < p.batch; ++b) before_[b] = first_token(p, b);
        for (int64_t c = 0; c < p.columns && p.d2t != nullptr; ++c) {
            outside_ = outside_ || markov_token(p, c) < 0;
        }
        if (p.table.codes != nullptr) pruning_.emplace(p, outside_);
    }

    void run() {
        const int64_t weight_bytes =
            kMarkovChunk * std::max<int64_t>(p_.rank, 1) * static_cast<int64_t>(sizeof(W));
        const int64_t grain = std::max<int64_t>(1, (int64_t{128} << 10) / weight_bytes);
        const bool plain =
            p_.head == MarkovHead::kVanilla && !p_.has_confidence && !pruning_.has_value();
        for (int64_t k = 0; k < p_.steps; ++k) {
            parallel_for(0, p_.batch, plain ? 64 : 1, [&](int64_t begin, int64_t end) {
                for (int64_t b = begin; b < end; ++b) prepare(b, k);
            });
            bool pruned = prunes();
            if (pruned) {
                const auto here = [&](int64_t b) { return alive(b); };
                parallel_for(0, chunks_, 4 * grain, [&](int64_t begin, int64_t end) {
                    for (int64_t chunk = begin; chunk < end; ++chunk) {
                        pruning_->bound(k, chunk, here);
                    }
                });
                pruned = pruning_->set_limits(here);
            }
            if (pruned) {
                parallel_for(0, chunks_, 4 * grain, [&](int64_t begin, int64_t end) {
                    for (int64_t chunk = begin; chunk < end; ++chunk) scan_tiles(k, chunk);
                });
            } else {
                parallel_for(0, chunks_, grain, [&](int64_t begin, int64_t end) {
                    std::vector<float> z(p_.batch * kMarkovChunk);
                    for (int64_t chunk = begin; chunk < end; ++chunk) scan(k, chunk, z.data());
                });
            }
            if (p_.follows) return;
            parallel_for(0, p_.batch, 1, [&](int64_t begin, int64_t end) {
                for (int64_t b = begin; b < end; ++b) settle(b, k);
            });
        }
    }

  private:
    bool alive(int64_t b) const { return is_token(p_, before_[b]); }
    // Not beside a request that samples: that one needs all of W2.
    bool prunes() const {
        bool greedy = pruning_.has_value();
        for (int64_t b = 0; greedy && b < p_.batch; ++b) {
            greedy = !alive(b) || markov_law(p_, b).greedy;
        }
        return greedy;
    }
    float* y(int64_t b) { return y_.data() + b * padded_; }
    const float* y(int64_t b) const { return y_.data() + b * padded_; }

    // The head's output y and the confidence of step k.
    void prepare(int64_t b, int64_t k) {
        write_chain_row(p_, b);
        std::fill(y(b), y(b) + padded_, 0.0f);
        if (p_.logits != nullptr) {
            float* row = logits_row(p_, b, k);
            std::fill(row + (alive(b) ? p_.columns : 0), row + p_.width, kMinusInfinity);
        }
        if (!alive(b)) return;
        float* e = embedding_.data() + b * p_.rank;
        const void* w1 = row_of(p_.w1, before_[b]);
        for (int64_t i = 0; i < p_.rank; ++i) e[i] = float_at(w1, p_.w1.dtype, i);
        std::vector<float> hidden(p_.depth);
        for (int64_t i = 0; i < p_.depth; ++i) {
            hidden[i] = float_at(hidden_row(p_, b, k), p_.hidden_dtype, i);
        }
        if (!p_.follows) p_.confidence[b * p_.steps + k] = confidence(k, hidden.data(), e);
        const DType dtype = p_.projection.dtype;
        const auto part = [&](int64_t output, int64_t from, const float* x, int64_t size) {
            return dot32(float_row(row_of(p_.projection, output), dtype, from), dtype, x, size);
        };
        const auto bias = [&](int64_t output) {
            return float_at(p_.projection_bias.data, p_.projection_bias.dtype, output);
        };
        const int64_t r = p_.rank, d = p_.depth;
        switch (p_.head) {
            case MarkovHead::kVanilla:
                for (int64_t i = 0; i < r; ++i) y(b)[Widened<W>::place(i)] = e[i];
                break;
            case MarkovHead::kGated:
                for (int64_t i = 0; i < r; ++i) {
                    y(b)[Widened<W>::place(i)] =
                        gated_value(part(i, 0, hidden.data(), d), part(i, d, e, r), bias(i), e[i]);
                }
                break;
            case MarkovHead::kRnn: {
                float* s = state_.data() + b * r;
                const std::vector<float> old(s, s + r);
                const auto joint = [&](int64_t output) {
                    return rnn_sum(part(output, 0, old.data(), r), part(output, r, e, r),
                                   part(output, 2 * r, hidden.data(), d), bias(output));
                };
                for (int64_t i = 0; i < r; ++i) {
                    s[i] = rnn_state(joint(i), joint(r + i), old[i]);
                    y(b)[Widened<W>::place(i)] = tanh_of(joint(2 * r + i));
                }
                break;
            }
        }
        if (pruning_) {
            pruning_->turn(b, [&](int64_t i) { return y(b)[Widened<W>::place(i)]; });
        }
    }

    float confidence(int64_t k, const float* hidden, const float* e) const {
        const FloatsView& w = p_.confidence_weight;
        if (!p_.has_confidence) return 1.0f;
        float logit = 0.0f;
        if (p_.depth > 0) logit = dot32(w.data, w.dtype, hidden, p_.depth);
        if (p_.confidence_on_embedding) {
            logit = logit + dot32(float_row(w.data, w.dtype, p_.depth), w.dtype, e, p_.rank);
        }
        return markov_confidence(p_, k, logit);
    }

    // Products of W2 with y of some requests: z[i * kMarkovChunk + column of the chunk].
    template <int kRows, int kCount>
    void dot_block(int64_t b, int64_t column, int64_t ahead, float* z) const {
        const W* w[kCount];
        for (int n = 0; n < kCount; ++n) {
            w[n] = static_cast<const W*>(row_of(p_.w2, column + n));
        }
        Lanes<kRows, kCount> lanes;
        sum_block<W, kRows, kCount>(StridedRows{y(b), padded_}, w, p_.rank, ahead, lanes);
        float sums[padded_sums(kRows * kCount)];
        sum_each(lanes, sums);
        for (int r = 0; r < kRows; ++r) {
            for (int n = 0; n < kCount; ++n) z[r * kMarkovChunk + n] = sums[r * kCount + n];
        }
    }
    template <int kCount>
    void dot_outputs(int64_t first, int64_t requests, int64_t column, int64_t ahead,
                     float* z) const {
        for (int64_t b = 0; b < requests; b += kRequests) {
            const int64_t left = requests - b;
            float* out = z + b * kMarkovChunk;
            if (left >= kRequests) {
                dot_block<kRequests, kCount>(first + b, column, b == 0 ? ahead : 0, out);
                continue;
            }
            int64_t done = 0;
            for (; done + 2 <= left; done += 2) {
                dot_block<2, kCount>(first + b + done, column, b + done == 0 ? ahead : 0,
                                     out + done * kMarkovChunk);
            }
            if (done < left) {
                dot_block<1, kCount>(first + b + done, column, b + done == 0 ? ahead : 0,
                                     out + done * kMarkovChunk);
            }
        }
    }
    // Of n columns from begin on.
    void dot_columns(int64_t first, int64_t requests, int64_t begin, int64_t n, float* z) const {
        int64_t c = 0;
        const auto take = [&](auto count) {
            constexpr int kCount = decltype(count)::value;
            for (; c + kCount <= n; c += kCount) {
                const bool more = begin + c + 2 * kCount <= p_.columns;
                dot_outputs<kCount>(first, requests, begin + c, more ? kCount * p_.w2.stride : 0,
                                    z + c);
            }
        };
        if (requests == 1) {
            take(IntTag<kSoloOutputs>{});
        } else {
            take(IntTag<kOutputs>{});
        }
        take(IntTag<1>{});
    }

    // Products to logits; -inf for columns outside of the law and behind the last one.
    void finish_logits(int64_t b, int64_t k, int64_t begin, int64_t n, float* z) const {
        dispatch_float(p_.logits_dtype, [&](auto tag) {
            const auto* base = static_cast<const typename decltype(tag)::type*>(base_row(p_, b, k));
            int64_t i = 0;
            for (; i + kLanes <= n; i += kLanes) store(z + i, load(z + i) + load(base + begin + i));
            for (; i < n; ++i) z[i] = z[i] + to_float(base[begin + i]);
            for (; i % (2 * kLanes) != 0; ++i) z[i] = kMinusInfinity;
        });
        for (int64_t i = 0; outside_ && i < n; ++i) {
            if (markov_token(p_, begin + i) < 0) z[i] = kMinusInfinity;
        }
    }

    void scan(int64_t k, int64_t chunk, float* z) {
        const int64_t begin = chunk * kMarkovChunk;
        const int64_t n = std::min(kMarkovChunk, p_.columns - begin);
        dot_columns(0, p_.batch, begin, n, z);
        for (int64_t b = 0; b < p_.batch; ++b, z += kMarkovChunk) {
            if (!alive(b)) continue;
            finish_logits(b, k, begin, n, z);
            if (p_.logits != nullptr) std::copy(z, z + n, logits_row(p_, b, k) + begin);
            const MarkovLaw law = markov_law(p_, b);
            stats_[b * chunks_ + chunk] = chunk_stats(z, n, law.scale, needs_sum(p_, law));
        }
    }

    // Statistics of a chunk from its tiles that can hold the largest logit.
    void scan_tiles(int64_t k, int64_t chunk) {
        const int64_t end = std::min((chunk + 1) * kMarkovChunk, p_.columns);
        for (int64_t b = 0; b < p_.batch; ++b) {
            if (!alive(b)) continue;
            float most = kMinusInfinity;
            for (int64_t begin = chunk * kMarkovChunk; begin < end; begin += kMarkovTile) {
                if (!pruning_->can_win(b, begin / kMarkovTile)) continue;
                alignas(64) float z[2 * kMarkovTile];
                const int64_t n = std::min(kMarkovTile, end - begin);
                dot_columns(b, 1, begin, n, z);
                finish_logits(b, k, begin, n, z);
                most = std::max(most, chunk_stats(z, n, 1.0f, false).max);
            }
            stats_[b * chunks_ + chunk] = ChunkStats{most, 0.0f};
        }
    }

    void settle(int64_t b, int64_t k) {
        const MarkovPick pick = alive(b) ? choose(b, k) : markov_end();
        write_pick(p_, b, k, pick);
        before_[b] = pick.token;
    }

    MarkovPick choose(int64_t b, int64_t k) const {
        const MarkovLaw law = markov_law(p_, b);
        const ChunkStats* stats = stats_.data() + b * chunks_;
        float peak = kMinusInfinity;
        for (int64_t c = 0; c < chunks_; ++c) peak = std::max(peak, stats[c].max);
        if (peak == kMinusInfinity || peak == -kMinusInfinity) return markov_end();

        // 1. The row's sum, from its chunks.
        const bool summed = needs_sum(p_, law);
        std::vector<float> masses((chunks_ + 31) / 32 * 32);
        for (int64_t c = 0; summed && c < chunks_; ++c) {
            masses[c] = stats[c].sum * exp2_of((stats[c].max - peak) * law.scale);
        }
        const Rows32 row{masses.data(), chunks_};
        const double total = row.total();

        // 2. A chunk, and its logits again.
        Rows32::Place place{0, 0.0};
        if (law.greedy) {
            while (stats[place.index].max != peak) ++place.index;
        } else {
            const float u = uniform_at(p_.seeds[b], p_.positions[b], k + 1, Purpose::kDraft);
            place = row.find(u * total);
        }
        const int64_t begin = place.index * kMarkovChunk;
        const int64_t n = std::min(kMarkovChunk, p_.columns - begin);
        alignas(64) float z[kMarkovChunk];
        dot_columns(b, 1, begin, n, z);
        finish_logits(b, k, begin, n, z);

        // 3. A column of it.
        int64_t column = 0;
        if (law.greedy) {
            while (z[column] != peak) ++column;
        } else {
            alignas(64) float weights[kMarkovChunk];
            const V16 from = set1(stats[place.index].max), by = set1(law.scale);
            for (int64_t i = 0; i < n; i += 2 * kLanes) {
                store(weights + i, exp2_nonpositive((load(z + i) - from) * by));
                store(weights + i + kLanes, exp2_nonpositive((load(z + i + kLanes) - from) * by));
            }
            const Rows32 entries{weights, n};
            column = entries.find(place.fraction * entries.total()).index;
        }
        const int64_t token = markov_token(p_, begin + column);
        if (!summed) return MarkovPick{token, 0.0f, 0.0f};
        return markov_pick(token, law, z[column], peak, log2_of(total));
    }

    const MarkovDraftParams& p_;
    const int64_t padded_, chunks_;
    bool outside_ = false;          // some column has no target id
    std::vector<int64_t> before_;   // [B] the token before the step
    std::vector<float> embedding_;  // [B, rank]
    std::vector<float> state_;      // [B, rank]
    std::vector<float> y_;          // [B + a block, padded_], widened for W
    std::vector<ChunkStats> stats_;
    std::optional<Pruning> pruning_;
};

}  // namespace

void markov_draft(const MarkovDraftParams& p) {
    dispatch_float(p.w2.dtype, [&](auto tag) { Drafts<typename decltype(tag)::type>(p).run(); });
}

}  // namespace specdec::cpu::SPECDEC_ISA
