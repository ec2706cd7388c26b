// verify_chain(target_logits [R, >= V], input_ids [R], cu_rows [B+1], seeds [B], positions [B],
//              max_drafts K, *, vocab_size V, draft_logits [B', K, >= V], draft_rows [B],
//              draft_temperature [B], draft_is_one_hot [B], method, temperature [B])
//     -> (tokens [B, K+1], num_accepted [B], status [B], logprobs [B, K+1],
//         top_ids [B, K+1, 0], top_logprobs [B, K+1, 0])
// Accepts draft x of row j iff u q(x) < p(x); after the last accepted draft comes one token, from
// max(p - q, 0) of the rejecting row or from p of the last row. The emitted tokens have the law of p.
// A request's result depends on that request alone. Decisions in detail: kernels/verify_chain/params.h.
#include "verify_chain/params.h"

#include "stable/check.h"

namespace specdec::ops {
namespace {

constexpr const char* kOp = "verify_chain";
constexpr int64_t kMaxVocab = int64_t{1} << 31;

using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Result verify_chain(const Tensor& target_logits, const Tensor& input_ids, const Tensor& cu_rows,
                    const Tensor& seeds, const Tensor& positions, int64_t max_drafts,
                    int64_t vocab_size, const OptionalTensor& draft_logits,
                    const OptionalTensor& draft_rows, const OptionalTensor& draft_temperature,
                    const OptionalTensor& draft_is_one_hot, const std::string& method,
                    const OptionalTensor& temperature) {
    // 1. Validate.
    check_option(method == "token", kOp, "method", "\"token\"", "\"" + method + "\"");
    const Arg target_arg(kOp, "target_logits", target_logits);
    target_arg.dims(2, "[R, >= vocab_size]").dtype({DType::kF32, DType::kF16, DType::kBF16});
    check_option(vocab_size > 0 && vocab_size < kMaxVocab, kOp, "vocab_size",
                 "a number from 1 to 2^31 - 1", vocab_size);
    target_arg.size_at_least(1, vocab_size, "vocab_size").dense_last();
    const int64_t num_rows = target_logits.size(0);
    const auto on_device = [&](const char* name, const Tensor& t) {
        return Arg(kOp, name, t).same_device(target_logits, "target_logits");
    };
    const Arg ids_arg = on_device("input_ids", input_ids);
    ids_arg.dims(1, "[R]").index().size(0, num_rows, "R of target_logits");
    on_device("cu_rows", cu_rows)
        .dims(1, "[B+1]")
        .dtype({DType::kI32})
        .size_at_least(0, 1, "B + 1")
        .dense();
    const int64_t batch = cu_rows.size(0) - 1;
    const auto per_request = [&](const char* name, const Tensor& t) {
        return on_device(name, t).dims(1, "[B]").size(0, batch, "B of cu_rows");
    };
    per_request("seeds", seeds).dtype({DType::kI64});
    per_request("positions", positions).index();
    check_option(max_drafts >= 0, kOp, "max_drafts", "a number >= 0", max_drafts);
    DType draft_dtype = target_arg.type();
    if (draft_logits) {
        const Arg draft_arg = on_device("draft_logits", *draft_logits);
        draft_arg.dims(3, "[B', max_drafts, >= vocab_size]")
            .dtype({DType::kF32, DType::kF16, DType::kBF16})
            .size(1, max_drafts, "max_drafts")
            .size_at_least(2, vocab_size, "vocab_size")
            .dense_last();
        if (!draft_rows) draft_arg.size_at_least(0, batch, "B of cu_rows, as draft_rows is absent");
        draft_dtype = draft_arg.type();
    }
    if (draft_rows) per_request("draft_rows", *draft_rows).dtype({DType::kI32}).dense();
    if (draft_temperature) {
        per_request("draft_temperature", *draft_temperature).dtype({DType::kF32}).dense();
    }
    if (draft_is_one_hot) {
        per_request("draft_is_one_hot", *draft_is_one_hot).dtype({DType::kBool}).dense();
    }
    if (temperature) per_request("temperature", *temperature).dtype({DType::kF32}).dense();

    // 2. Allocate.
    const int64_t width = max_drafts + 1;
    Tensor tokens = empty_on(target_logits, {batch, width}, ids_arg.type());
    Tensor num_accepted = empty_on(target_logits, {batch}, DType::kI32);
    Tensor status = empty_on(target_logits, {batch}, DType::kI32);
    Result result = {tokens,
                     num_accepted,
                     status,
                     zeros_on(target_logits, {batch, width}, DType::kF32),
                     empty_on(target_logits, {batch, width, 0}, ids_arg.type()),
                     empty_on(target_logits, {batch, width, 0}, DType::kF32)};
    if (batch == 0) return result;

    // 3. Parameters.
    Launch launch(kOp, target_logits);
    const auto floats = [&](const char* name, const OptionalTensor& t) {
        return t ? static_cast<const float*>(launch.in_data(name, *t)) : nullptr;
    };
    VerifyChainParams p;
    p.target_logits = launch.in<2>("target_logits", target_logits);
    p.logits_dtype = target_arg.type();
    p.input_ids = launch.index("input_ids", input_ids);
    p.cu_rows = static_cast<const int32_t*>(launch.in_data("cu_rows", cu_rows));
    p.seeds = launch.index("seeds", seeds);
    p.positions = launch.index("positions", positions);
    p.temperature = floats("temperature", temperature);
    if (draft_logits) p.draft_logits = launch.in<3>("draft_logits", *draft_logits);
    p.draft_dtype = draft_dtype;
    p.draft_rows = draft_rows
                       ? static_cast<const int32_t*>(launch.in_data("draft_rows", *draft_rows))
                       : nullptr;
    p.draft_temperature = floats("draft_temperature", draft_temperature);
    p.draft_is_one_hot =
        draft_is_one_hot
            ? static_cast<const bool*>(launch.in_data("draft_is_one_hot", *draft_is_one_hot))
            : nullptr;
    p.num_rows = num_rows;
    p.batch = batch;
    p.max_drafts = max_drafts;
    p.vocab_size = vocab_size;
    p.tokens = launch.out_data("tokens", tokens);
    p.num_accepted = static_cast<int32_t*>(launch.out_data("num_accepted", num_accepted));
    p.status = static_cast<int32_t*>(launch.out_data("status", status));
    p.scratch = nullptr;
#if !defined(SPECDEC_BACKEND_CPU)
    const Tensor scratch =
        empty_on(target_logits, {cuda::verify_chain_scratch_bytes(p)}, DType::kBool);
    p.scratch = launch.out_data("scratch", scratch);
#endif

    // 4. Run.
    SPECDEC_RUN(verify_chain, launch, p);
    return result;
}

}  // namespace

SPECDEC_REGISTER(verify_chain, verify_chain)

}  // namespace specdec::ops
