// What a row is read for, and the log-probabilities it reports, on the CPU.
#pragma once

#include <limits>

#include "vocab_row.h"

namespace specdec::cpu::SPECDEC_ISA {

// The law of a request's rows: what its tokens are drawn from or, for a greedy request that reports
// processed log-probabilities, what those are of (temperature 1 where it is too small).
struct LawPlan {
    bool greedy, law;
    float scale;
    Filters filters;
};

inline LawPlan law_plan(const SamplingControls& c, int64_t b, int64_t vocab_size,
                        const LogprobsWanted& wanted) {
    const bool greedy = is_greedy(c, b);
    const float temperature = temperature_of(c, b);
    return {greedy, !greedy || (wanted.processed && wanted.count >= 0),
            exponent_scale(is_greedy(temperature) ? 1.0f : temperature),
            filters_of(c, b, vocab_size)};
}

inline ReadPlan read_plan(const LawPlan& law, const LogprobsWanted& wanted, int64_t size,
                          bool raw_sum) {
    ReadPlan plan;
    const Filters& f = law.filters;
    const bool filtered = law.law && !f.none;
    plan.scale = law.law ? law.scale : 0.0f;
    plan.sum = law.law && (f.none || (f.top_p < 1.0f && (f.joint || f.top_k >= size)));
    plan.peaks = filtered || wanted.count > 0;
    plan.raw_sum = raw_sum;
    plan.raw_peaks = wanted.count > 0 && !wanted.processed;
    return plan;
}

inline RowEdits row_edits(const SamplingControls& c, int64_t b, int64_t r, int64_t vocab_size) {
    RowEdits edits;
    edits.controls = &c;
    edits.vocab_size = vocab_size;
    if (!c.any_edits) return edits;
    edits.penalties = penalties_of(c, b);
    edits.allowed = allowed_of(c, r);
    edits.bias = bias_of(c, b);
    return edits;
}

// The log-probability of `token`, and the n most probable ids through set(i, id, log-probability), which
// is called for every i < n: -1 and 0 behind the last id of positive probability. lse: of the raw row.
template <class T, class Set>
float report(const Row<T>& row, const LogprobsWanted& wanted, double lse, int64_t token,
             const Set& set) {
    const int64_t n = wanted.count > 0 ? wanted.count : 0;
    const bool exists = wanted.processed ? row.status() == 0 : row.raw_usable();
    int64_t listed = 0;
    const auto value = [&](int64_t id) {
        return static_cast<float>(wanted.processed ? row.log_probability(id)
                                                   : row.raw_logit(id) - lse);
    };
    if (exists && n > 0) {
        row.visit_top(n, !wanted.processed, [&](int64_t i, int64_t id) {
            const float v = value(id);
            if (!(v > kMinusInfinity)) return;
            set(i, id, v);
            listed = i + 1;
        });
    }
    for (int64_t i = listed; i < n; ++i) set(i, int64_t{-1}, 0.0f);
    return exists ? value(token) : 0.0f;
}

}  // namespace specdec::cpu::SPECDEC_ISA
