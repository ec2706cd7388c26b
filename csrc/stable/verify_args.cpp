#include "stable/verify_args.h"

namespace specdec::ops {

void VerifyArgs::check(int draft_dims, const char* draft_shape, bool q_elsewhere) const {
    const auto floats = {DType::kF32, DType::kF16, DType::kBF16};
    const Arg target_arg(op, "target_logits", target_logits);
    target_arg.dims(2, "[R, >= vocab_size]").dtype(floats);
    check_option(vocab_size > 0 && vocab_size < kMaxVocab, op, "vocab_size",
                 "a number from 1 to 2^31 - 1", vocab_size);
    target_arg.size_at_least(1, vocab_size, "vocab_size").dense_last();
    on_device("input_ids", input_ids)
        .dims(1, "[R]")
        .index()
        .size(0, num_rows(), "R of target_logits");
    on_device("cu_rows", cu_rows).offsets();
    per_request("seeds", seeds).dtype({DType::kI64});
    per_request("positions", positions).index();
    check_option(max_path >= 0 && max_path < kMaxVocab, op, max_path_name,
                 "a number from 0 to 2^31 - 1", max_path);
    if (d2t) {
        on_device("d2t", *d2t).dims(1, "[Vd]").dtype({DType::kI64}).dense();
        if (!draft_logits && !q_elsewhere) fail(op, "d2t", "wanted draft_logits with it, got none");
    }
    if (draft_logits) {
        on_device("draft_logits", *draft_logits)
            .dims(draft_dims, draft_shape)
            .dtype(floats)
            .size_at_least(draft_dims - 1, draft_vocab(), d2t ? "length of d2t" : "vocab_size")
            .dense_last();
    }
    if (draft_temperature) {
        per_request("draft_temperature", *draft_temperature).dtype({DType::kF32}).dense();
    }
    controls.check(op, target_logits, batch(), "B of cu_rows", num_rows(), vocab_size);
}

VerifyArgs::Results VerifyArgs::allocate() const {
    const int64_t width = max_path + 1, n = controls.top_n();
    const DType ids = *dtype_of(input_ids);
    const auto make = [&](const std::vector<int64_t>& sizes, DType dtype) {
        return empty_on(target_logits, sizes, dtype);
    };
    return {make({batch(), width}, ids),    make({batch()}, DType::kI32),
            make({batch()}, DType::kI32),   make({batch(), width}, DType::kF32),
            make({batch(), width, n}, ids), make({batch(), width, n}, DType::kF32)};
}

void VerifyArgs::fill(Launch& launch, const Results& results, Method method,
                      double posterior_threshold, double posterior_alpha, VerifyParams* p) const {
    p->target_logits = launch.in<2>("target_logits", target_logits);
    p->logits_dtype = *dtype_of(target_logits);
    p->input_ids = launch.index("input_ids", input_ids);
    p->cu_rows = static_cast<const int32_t*>(launch.in_data("cu_rows", cu_rows));
    p->seeds = launch.index("seeds", seeds);
    p->positions = launch.index("positions", positions);
    p->controls = controls.fill(launch);
    p->draft_dtype = *dtype_of(draft_logits ? *draft_logits : target_logits);
    p->draft_temperature =
        draft_temperature
            ? static_cast<const float*>(launch.in_data("draft_temperature", *draft_temperature))
            : nullptr;
    p->d2t = d2t ? static_cast<const int64_t*>(launch.in_data("d2t", *d2t)) : nullptr;
    p->d2t_is_offset = d2t_is_offset;
    p->draft_controls = draft_controls;
    p->method = method;
    p->posterior_threshold = static_cast<float>(posterior_threshold);
    p->posterior_alpha = static_cast<float>(posterior_alpha);
    p->logprobs_wanted = controls.logprobs();
    p->num_rows = num_rows();
    p->batch = batch();
    p->vocab_size = vocab_size;
    p->max_path = max_path;
    p->draft_vocab = draft_vocab();
    p->tokens = launch.out_data("tokens", results.tokens);
    p->num_accepted = static_cast<int32_t*>(launch.out_data("num_accepted", results.num_accepted));
    p->status = static_cast<int32_t*>(launch.out_data("status", results.status));
    p->logprobs = static_cast<float*>(launch.out_data("logprobs", results.logprobs));
    p->top_ids = launch.out_data("top_ids", results.top_ids);
    p->top_logprobs = static_cast<float*>(launch.out_data("top_logprobs", results.top_logprobs));
    p->scratch = nullptr;
}

}  // namespace specdec::ops
