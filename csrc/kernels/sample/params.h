// sample: one token per row from softmax(logits / temperature), or the argmax.
//   greedy iff not temperature >= kGreedyTemperature (so NaN is greedy); else the number is
//   uniform_at(seed, position, 0, kSample).
//   A row with NaN or +inf, or without a finite logit: kTargetNan, the finite argmax (0 when there
//   is none), logprob 0 and lse 0.
#pragma once

#include "isa.h"
#include "view.h"

namespace specdec {

struct SampleParams {
    View<const void, 2> logits;  // [R, >= vocab_size]
    DType logits_dtype;
    IndexView seeds;           // [R] int64: the request's seed, per row
    IndexView positions;       // [R] absolute position of the token fed at the row
    const float* temperature;  // [R] or nullptr (= 1); below kGreedyTemperature: argmax
    int64_t vocab_size;
    int64_t* tokens;  // [R]
    float* logprob;   // [R] of the raw row: logits[token] - lse
    float* lse;       // [R] natural log-sum-exp of the raw row
    int32_t* status;  // [R]
    void* scratch;    // CUDA: sample_scratch_bytes(R, vocab_size) bytes, uninitialised
};

namespace cuda {
int64_t sample_scratch_bytes(int64_t num_rows, int64_t vocab_size);
Status sample(const SampleParams& p, Stream stream);
}  // namespace cuda

}  // namespace specdec

SPECDEC_DECLARE_CPU(sample, ::specdec::SampleParams)
