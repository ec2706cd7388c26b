// What verify_chain and verify_tree share as ops: the arguments of VerifyParams, their checks, their
// results.
#pragma once

#include "control_args.h"
#include "kernels/common/verify.h"

namespace specdec::ops {

constexpr int64_t kMaxVocab = int64_t{1} << 31;

struct VerifyArgs {
    const char* op;
    const Tensor &target_logits, &input_ids, &cu_rows, &seeds, &positions;
    int64_t max_path;
    const char* max_path_name;
    int64_t vocab_size;
    const OptionalTensor &draft_logits, &draft_temperature, &d2t;
    bool d2t_is_offset, draft_controls;
    ControlArgs controls;

    int64_t batch() const { return cu_rows.size(0) - 1; }
    int64_t num_rows() const { return target_logits.size(0); }
    int64_t draft_vocab() const { return d2t ? d2t->size(0) : vocab_size; }

    Arg on_device(const char* name, const Tensor& t) const {
        return Arg(op, name, t).same_device(target_logits, "target_logits");
    }
    Arg per_request(const char* name, const Tensor& t) const {
        return on_device(name, t).dims(1, "[B]").size(0, batch(), "B of cu_rows");
    }
    // Everything but the shape of draft_logits, whose last dimension is `draft_columns` wide.
    // q_elsewhere: there is a q without draft_logits, so that d2t has a meaning.
    void check(int draft_dims, const char* draft_shape, bool q_elsewhere = false) const;

    struct Results {
        Tensor tokens, num_accepted, status, logprobs, top_ids, top_logprobs;
    };
    Results allocate() const;
    // draft_logits stay with the op, whose shapes differ.
    void fill(Launch& launch, const Results& results, Method method, double posterior_threshold,
              double posterior_alpha, VerifyParams* p) const;
};

}  // namespace specdec::ops
