// sample on the CPU: token[r] from the row's law under its controls by inverse CDF with one uniform
// number, or the argmax; log-probabilities from the same pass.
// Work: a thread takes whole rows, or tiles of one row where there are fewer rows than threads.
// Bytes moved: R V logits, once (and counts, bitmask where given); the blocks that a filter can keep
// and one tile of 4096 entries again for the draw, from cache.
// Determinism: fixed sums over absolute tiles (vocab_row.h); a row depends on nothing but itself.
#include "params.h"

#include "dispatch.h"
#include "philox.h"
#include "vocab_report.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

template <class T>
void sample_row(const SampleParams& p, int64_t r, bool across_tiles, Row<T>& row) {
    // 1. One pass. `sample` reports a log-probability in any case.
    LogprobsWanted wanted = p.logprobs_wanted;
    wanted.count = wanted.count < 0 ? 0 : wanted.count;
    const LawPlan law = law_plan(p.controls, r, p.vocab_size, wanted);
    const RowEdits edits = row_edits(p.controls, r, r, p.vocab_size);
    row.read(static_cast<const T*>(p.logits.data) + r * p.logits.stride[0], p.vocab_size, edits,
             read_plan(law, wanted, p.vocab_size, true), across_tiles);
    p.status[r] = row.status();
    const double lse = row.raw_usable() ? row.raw_lse() : 0.0;
    p.lse[r] = static_cast<float>(lse);

    // 2. The token.
    int64_t token;
    if (row.status() != 0) {
        token = row.fallback();
    } else {
        if (law.law) row.choose_law(law.filters);
        token = law.greedy ? row.argmax()
                           : row.draw(uniform_at(p.seeds[r], p.positions[r], 0, Purpose::kSample));
    }
    p.tokens[r] = token;

    // 3. Log-probabilities.
    p.logprob[r] = report(row, wanted, lse, token, [&](int64_t i, int64_t id, float value) {
        p.top_ids[r * wanted.count + i] = id;
        p.top_logprobs[r * wanted.count + i] = value;
    });
}

template <class T>
void run(const SampleParams& p) {
    const int64_t num_rows = p.logits.size[0];
    if (num_rows < num_threads()) {
        Row<T> row;
        for (int64_t r = 0; r < num_rows; ++r) sample_row(p, r, true, row);
        return;
    }
    parallel_for(0, num_rows, 1, [&](int64_t begin, int64_t end) {
        Row<T> row;
        for (int64_t r = begin; r < end; ++r) sample_row(p, r, false, row);
    });
}

}  // namespace

void sample(const SampleParams& p) {
    dispatch_float(p.logits_dtype, [&](auto tag) { run<typename decltype(tag)::type>(p); });
}

}  // namespace specdec::cpu::SPECDEC_ISA
