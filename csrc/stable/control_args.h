// The sampling controls as arguments of an op (sample, verify_chain, verify_tree): one list of
// parameters, one set of checks.
#pragma once

#include "check.h"
#include "kernels/common/controls.h"

namespace specdec::ops {

// The order is that of SPECDEC_CONTROLS_SCHEMA in schema.cpp.
#define SPECDEC_CONTROL_PARAMETERS                                                                 \
    const OptionalTensor &temperature, const OptionalTensor &top_k, const OptionalTensor &top_p,   \
        const OptionalTensor &min_p, const OptionalTensor &repetition_penalty,                     \
        const OptionalTensor &frequency_penalty, const OptionalTensor &presence_penalty,           \
        const OptionalTensor &token_counts, const OptionalTensor &prompt_mask,                     \
        const OptionalTensor &bias_offsets, const OptionalTensor &bias_ids,                        \
        const OptionalTensor &bias_values, const OptionalTensor &token_bitmask,                    \
        const OptionalTensor &bitmask_rows, const std::string &filter_order, int64_t num_logprobs, \
        const std::string &logprobs_mode
#define SPECDEC_CONTROL_ARGUMENTS                                                      \
    {                                                                                  \
        &temperature, &top_k, &top_p, &min_p, &repetition_penalty, &frequency_penalty, \
            &presence_penalty, &token_counts, &prompt_mask, &bias_offsets, &bias_ids,  \
            &bias_values, &token_bitmask, &bitmask_rows, &filter_order, num_logprobs,  \
            &logprobs_mode                                                             \
    }

struct ControlArgs {
    const OptionalTensor *temperature, *top_k, *top_p, *min_p, *repetition_penalty,
        *frequency_penalty, *presence_penalty, *token_counts, *prompt_mask, *bias_offsets,
        *bias_ids, *bias_values, *token_bitmask, *bitmask_rows;
    const std::string* filter_order;
    int64_t num_logprobs;
    const std::string* logprobs_mode;

    // batch: B of per-request tensors, named `batch_name` in messages; num_rows: R of the bitmask.
    void check(const char* op, const Tensor& logits, int64_t batch, const char* batch_name,
               int64_t num_rows, int64_t vocab_size) const;
    SamplingControls fill(Launch& launch) const;
    LogprobsWanted logprobs() const;
    int64_t top_n() const { return num_logprobs > 0 ? num_logprobs : 0; }
};

}  // namespace specdec::ops
