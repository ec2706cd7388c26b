// schedule_prefix on the CPU: candidates are put into the order of admission, and admitted until the
// first one that does not pay (or until the budget is used).
// Work: one thread; B G is at most 4096. A heap gives the candidates in order, so that only what is
// looked at is sorted; with a budget nothing is, but what lies before the budget's end. Bytes moved: 4 B G, and 8 B written.
// Determinism: keys are all different, and sums are integers.
#include <algorithm>
#include <vector>

#include "params.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

// Up to the first candidate that does not raise the throughput. keys: the candidates, in any order.
void admit_while_it_pays(const SchedulePrefixParams& p, std::vector<uint64_t>& keys, uint64_t tau,
                         int64_t rows) {
    const auto later = [](uint64_t a, uint64_t b) { return a > b; };
    std::make_heap(keys.begin(), keys.end(), later);
    double best = throughput(p, tau, rows);
    while (!keys.empty()) {
        const uint64_t key = keys.front();
        tau += survival_units(survival_of_key(key));
        rows += 1;
        const double now = throughput(p, tau, rows);
        if (!(now > best)) return;
        best = now;
        p.num_drafts[key & 0xffff] += 1;
        std::pop_heap(keys.begin(), keys.end(), later);
        keys.pop_back();
    }
}

}  // namespace

void schedule_prefix(const SchedulePrefixParams& p) {
    // 1. The floor of every request, and the candidates behind it.
    std::vector<uint64_t> keys;
    keys.reserve(p.batch * p.max_drafts);
    uint64_t tau = 0;
    int64_t rows = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
        p.num_drafts[b] = is_active(p, b) ? static_cast<int32_t>(p.min_drafts) : 0;
        if (!is_active(p, b)) continue;
        rows += 1 + p.min_drafts;
        tau += kSurvivalOne;
        visit_survivals(p, b, [&](int64_t j, float survival) {
            if (j < p.min_drafts) {
                tau += survival_units(survival);
            } else if (survival > 0.0f) {
                keys.push_back(candidate_key(survival, j, b));
            }
        });
    }
    // 2. Admit.
    if (p.budget != nullptr) {
        const int64_t budget = std::max<int64_t>(p.budget[0], 0);
        const int64_t admitted = std::min<int64_t>(budget, keys.size());
        std::nth_element(keys.begin(), keys.begin() + admitted, keys.end());
        for (int64_t k = 0; k < admitted; ++k) p.num_drafts[keys[k] & 0xffff] += 1;
    } else {
        admit_while_it_pays(p, keys, tau, rows);
    }

    // 3. Rows.
    int32_t row = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
        p.cu_rows[b] = row;
        row += is_active(p, b) ? 1 + p.num_drafts[b] : 0;
    }
    p.cu_rows[p.batch] = row;
}

}  // namespace specdec::cpu::SPECDEC_ISA
