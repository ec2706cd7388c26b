// sample: one token per row from the law of its controls, or the argmax of its processed logits.
//   greedy iff not temperature >= kGreedyTemperature (so NaN is greedy) or top_k == 1; else the number
//   is uniform_at(seed, position, 0, kSample). Unusable rows: steps 1 and 2 of common/verify.h.
//   lse is that of the raw row (0 where it has NaN or +inf or nothing finite); logprob is raw, or of the
//   processed law, and 0 where that does not exist.
#pragma once

#include "controls.h"
#include "isa.h"

namespace specdec {

struct SampleParams {
    View<const void, 2> logits;  // [R, >= vocab_size]
    DType logits_dtype;
    IndexView seeds;      // [R] int64: the request's seed, per row
    IndexView positions;  // [R] absolute position of the token fed at the row
    SamplingControls controls;
    LogprobsWanted logprobs_wanted;
    int64_t vocab_size;
    int64_t* tokens;      // [R]
    float* logprob;       // [R]
    float* lse;           // [R]
    int32_t* status;      // [R]
    int64_t* top_ids;     // [R, n], padded with -1
    float* top_logprobs;  // [R, n]
    void* scratch;        // CUDA: sample_scratch_bytes(p) bytes, uninitialised
};

namespace cuda {
int64_t sample_scratch_bytes(const SampleParams& p);
Status sample(const SampleParams& p, Stream stream);
}  // namespace cuda

}  // namespace specdec

SPECDEC_DECLARE_CPU(sample, ::specdec::SampleParams)
