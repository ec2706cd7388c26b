#include "stable/control_args.h"

namespace specdec::ops {

namespace {
constexpr int64_t kMaxLogprobs = 1024;

template <class T>
const T* data_of(Launch& launch, const char* name, const OptionalTensor& t) {
    return t ? static_cast<const T*>(launch.in_data(name, *t)) : nullptr;
}

View<const int32_t, 2> rows_of(Launch& launch, const char* name, const OptionalTensor& t) {
    // A tensor without elements may have no memory; kernels tell absence by the pointer.
    if (!t || t->numel() == 0) return {};
    return launch.in<2>(name, *t).as<const int32_t>();
}
}  // namespace

void ControlArgs::check(const char* op, const Tensor& logits, int64_t batch, const char* batch_name,
                        int64_t num_rows, int64_t vocab_size) const {
    const auto arg = [&](const char* name, const OptionalTensor& t) {
        return Arg(op, name, *t).same_device(logits, "the logits");
    };
    const auto per_request = [&](const char* name, const OptionalTensor& t, DType dtype) {
        if (t) arg(name, t).dims(1, "[B]").dtype({dtype}).size(0, batch, batch_name).dense();
    };
    per_request("temperature", *temperature, DType::kF32);
    per_request("top_k", *top_k, DType::kI32);
    per_request("top_p", *top_p, DType::kF32);
    per_request("min_p", *min_p, DType::kF32);
    per_request("repetition_penalty", *repetition_penalty, DType::kF32);
    per_request("frequency_penalty", *frequency_penalty, DType::kF32);
    per_request("presence_penalty", *presence_penalty, DType::kF32);

    const int64_t num_words = (vocab_size + 31) / 32;
    if (*token_counts) {
        arg("token_counts", *token_counts)
            .dims(2, "[B, >= vocab_size]")
            .dtype({DType::kI32})
            .size(0, batch, batch_name)
            .size_at_least(1, vocab_size, "vocab_size")
            .dense_last();
    }
    const bool penalties = *repetition_penalty || *frequency_penalty || *presence_penalty;
    if (penalties && !*token_counts) {
        fail(op, "token_counts", "wanted int32 [B, vocab_size] with the penalties, got none");
    }
    if (*prompt_mask) {
        arg("prompt_mask", *prompt_mask)
            .dims(2, "[B, >= ceil(vocab_size / 32)]")
            .dtype({DType::kI32})
            .size(0, batch, batch_name)
            .size_at_least(1, num_words, "ceil(vocab_size / 32)")
            .dense_last();
    }
    if (*bias_offsets || *bias_ids || *bias_values) {
        if (!*bias_offsets || !*bias_ids || !*bias_values) {
            fail(op, "bias_offsets", "wanted bias_offsets, bias_ids and bias_values together, got ",
                 *bias_offsets ? "bias_offsets" : "no bias_offsets", ", ",
                 *bias_ids ? "bias_ids" : "no bias_ids", ", ",
                 *bias_values ? "bias_values" : "no bias_values");
        }
        arg("bias_offsets", *bias_offsets)
            .dims(1, "[B + 1]")
            .dtype({DType::kI32})
            .size(0, batch + 1, "B + 1")
            .dense();
        arg("bias_ids", *bias_ids).dims(1, "[n]").index();
        arg("bias_values", *bias_values)
            .dims(1, "[n]")
            .dtype({DType::kF32})
            .size(0, (*bias_ids)->size(0), "n of bias_ids")
            .dense();
    }
    if (*bitmask_rows && !*token_bitmask) {
        fail(op, "bitmask_rows", "wanted token_bitmask with it, got none");
    }
    if (*token_bitmask) {
        const Arg mask = arg("token_bitmask", *token_bitmask);
        mask.dims(2, "[M, >= ceil(vocab_size / 32)]")
            .dtype({DType::kI32})
            .size_at_least(1, num_words, "ceil(vocab_size / 32)")
            .dense_last();
        if (*bitmask_rows) {
            arg("bitmask_rows", *bitmask_rows)
                .dims(1, "[R]")
                .dtype({DType::kI32})
                .size(0, num_rows, "R of the logits")
                .dense();
        } else {
            mask.size(0, num_rows, "R of the logits, as bitmask_rows is absent");
        }
    }
    check_option(*filter_order == "sequential" || *filter_order == "joint", op, "filter_order",
                 "\"sequential\" or \"joint\"", "\"" + *filter_order + "\"");
    check_option(*logprobs_mode == "raw" || *logprobs_mode == "processed", op, "logprobs_mode",
                 "\"raw\" or \"processed\"", "\"" + *logprobs_mode + "\"");
    check_option(num_logprobs >= -1 && num_logprobs <= kMaxLogprobs, op, "num_logprobs",
                 "a number from -1 to 1024", num_logprobs);
}

SamplingControls ControlArgs::fill(Launch& launch) const {
    SamplingControls c;
    c.temperature = data_of<float>(launch, "temperature", *temperature);
    c.top_k = data_of<int32_t>(launch, "top_k", *top_k);
    c.top_p = data_of<float>(launch, "top_p", *top_p);
    c.min_p = data_of<float>(launch, "min_p", *min_p);
    c.repetition_penalty = data_of<float>(launch, "repetition_penalty", *repetition_penalty);
    c.frequency_penalty = data_of<float>(launch, "frequency_penalty", *frequency_penalty);
    c.presence_penalty = data_of<float>(launch, "presence_penalty", *presence_penalty);
    const bool penalties = *repetition_penalty || *frequency_penalty || *presence_penalty;
    if (penalties) {
        c.token_counts = rows_of(launch, "token_counts", *token_counts);
        c.prompt_mask = rows_of(launch, "prompt_mask", *prompt_mask);
    }
    if (*bias_offsets && (*bias_ids)->size(0) > 0) {
        c.bias_offsets = data_of<int32_t>(launch, "bias_offsets", *bias_offsets);
        c.bias_ids = launch.index("bias_ids", **bias_ids);
        c.bias_values = data_of<float>(launch, "bias_values", *bias_values);
    }
    if (*token_bitmask) {
        c.has_bitmask = true;
        c.token_bitmask = launch.in<2>("token_bitmask", **token_bitmask).as<const int32_t>();
        c.bitmask_rows = data_of<int32_t>(launch, "bitmask_rows", *bitmask_rows);
    }
    c.joint = *filter_order == "joint";
    c.any_edits = penalties || c.bias_offsets != nullptr || *token_bitmask;
    c.any_filters = *top_k || *top_p || *min_p;
    return c;
}

LogprobsWanted ControlArgs::logprobs() const {
    return {static_cast<int32_t>(num_logprobs), *logprobs_mode == "processed"};
}

}  // namespace specdec::ops
