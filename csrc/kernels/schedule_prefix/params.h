// schedule_prefix: how many drafts of every request the next verification pass takes.
//   Survival a[b, j] = product of the confidences of drafts 0..j, float32, left to right; a confidence
//   is clamped to [0, 1], NaN is 0. Every active request gets a floor of drafts; behind it lie the
//   candidates, in one order for the whole batch: survival descending, then place, then request. Each
//   candidate that is admitted adds a row; a[b, j] = 0 is never admitted. As a[b, j] does not grow with
//   j, what is admitted of a request is a prefix.
//   Early stop (Algorithm 1 of the DSpark paper, arXiv 2607.05147): with `rows` rows and `tau` expected
//   tokens, theta = tau * steps_per_second[rows]; candidates are admitted while each one raises theta.
//   Whether a draft is verified then depends only on what comes before it, so the output keeps its law.
//   Budget: the first `budget` candidates; lossless as long as the budget is older than this round.
//   tau is an integer, in units of 2^-50: its sums are exact in any order, on both backends.
#pragma once

#include "isa.h"
#include "view.h"

namespace specdec {

constexpr int64_t kMaxCandidates = 4096;  // B G of a call: what one block sorts in shared memory

struct SchedulePrefixParams {
    View<const float, 2> confidence;  // [B, G]
    const float* steps_per_second;    // [table]; not read with a budget
    int64_t table;                    // entries: at least 1 without a budget
    const int32_t* budget;            // [1] or nullptr
    int64_t min_drafts, max_drafts;   // 0 <= min_drafts <= max_drafts <= G
    const bool* active;               // [B] or nullptr (= all)
    int64_t batch;
    int32_t* num_drafts;  // [B]
    int32_t* cu_rows;     // [B+1]
};

// NaN is 0.
SPECDEC_HD float clamped_confidence(float c) {
    return c > 0.0f ? (c < 1.0f ? c : 1.0f) : 0.0f;
}

// A survival, which lies in [0, 1], in units of 2^-50. 8192 of them fit 64 bits.
SPECDEC_HD uint64_t survival_units(float survival) {
    constexpr double kUnits = 1125899906842624.0;  // 2^50
    return static_cast<uint64_t>(static_cast<double>(survival) * kUnits);
}
constexpr uint64_t kSurvivalOne = uint64_t{1} << 50;

// Ascending keys are the order of admission. Bits of floats from 0 up ascend with them.
SPECDEC_HD uint64_t candidate_key(float survival, int64_t place, int64_t request) {
    return static_cast<uint64_t>(~float_bits(survival)) << 32 | static_cast<uint64_t>(place) << 16 |
           static_cast<uint64_t>(request);
}
SPECDEC_HD float survival_of_key(uint64_t key) {
    return bits_float(~static_cast<uint32_t>(key >> 32));
}
constexpr uint64_t kNoCandidate = ~uint64_t{0};  // behind every key: survival is not a NaN

SPECDEC_HD bool is_active(const SchedulePrefixParams& p, int64_t b) {
    return p.active == nullptr || p.active[b];
}

// Expected tokens per second with `rows` rows. One rounding of tau, one of the product.
SPECDEC_HD double throughput(const SchedulePrefixParams& p, uint64_t tau, int64_t rows) {
    const int64_t last = p.table - 1;
    return static_cast<double>(tau) *
           static_cast<double>(p.steps_per_second[rows < last ? rows : last]);
}

// Calls fn(place, survival) for the drafts of request b that may be verified, in order.
template <class Fn>
SPECDEC_HD void visit_survivals(const SchedulePrefixParams& p, int64_t b, const Fn& fn) {
    float survival = 1.0f;
    for (int64_t j = 0; j < p.max_drafts; ++j) {
        survival *= clamped_confidence(*p.confidence.at(b, j));
        fn(j, survival);
    }
}

namespace cuda {
Status schedule_prefix(const SchedulePrefixParams& p, Stream stream);
}

}  // namespace specdec

SPECDEC_DECLARE_CPU(schedule_prefix, ::specdec::SchedulePrefixParams)
