// sample on the CPU: token[r] ~ softmax(logits[r] / T[r]) by inverse CDF with one uniform number, or
// the argmax; logprob and lse of the row at temperature 1.
// Work: a thread takes whole rows, or tiles of one row where there are fewer rows than threads.
// Bytes moved: R V logits, once; one tile of 4096 entries again for the draw.
// Determinism: fixed sums over absolute tiles (vocab_row.h); a row depends on nothing but itself.
#include "params.h"

#include "dispatch.h"
#include "philox.h"
#include "vocab_row.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

template <class T>
void sample_row(const SampleParams& p, int64_t r, bool across_tiles, Row<T>& row) {
    const float temperature = p.temperature == nullptr ? 1.0f : p.temperature[r];
    const bool greedy = is_greedy(temperature);
    const float scales[kMaxScales] = {exponent_scale(1.0f), exponent_scale(temperature)};

    // 1. One pass: the raw law, and that of the temperature where it is another one.
    const bool same_law = greedy || scales[1] == scales[0];
    row.read(static_cast<const T*>(p.logits.data) + r * p.logits.stride[0], p.vocab_size, scales,
             same_law ? 1 : 2, across_tiles);
    if (!row.usable()) {
        p.tokens[r] = row.finite_argmax();
        p.logprob[r] = 0.0f;
        p.lse[r] = 0.0f;
        p.status[r] = kTargetNan;
        return;
    }
    row.choose_law(0, scales[0]);
    const double lse = row.max() + kLn2 * row.log2_sum();

    // 2. The token.
    int64_t token;
    if (greedy) {
        token = row.argmax();
    } else {
        if (!same_law) row.choose_law(1, scales[1]);
        token = row.draw(uniform_at(p.seeds[r], p.positions[r], 0, Purpose::kSample));
    }
    p.tokens[r] = token;
    p.logprob[r] = static_cast<float>(row.logit(token) - lse);
    p.lse[r] = static_cast<float>(lse);
    p.status[r] = 0;
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
