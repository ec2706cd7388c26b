// verify_chain(target_logits [R, >= V], input_ids [R], cu_rows [B+1], seeds [B], positions [B],
//              max_drafts K, *, vocab_size V, draft_logits [B', K, >= Vd], draft_rows [B],
//              draft_temperature [B], draft_is_one_hot [B], d2t [Vd], method, markov, controls)
//     -> (tokens [B, K+1], num_accepted [B], status [B], logprobs [B, K+1],
//         top_ids [B, K+1, n], top_logprobs [B, K+1, n])
// Accepts a prefix of each request's drafts; then comes one token. The emitted tokens have the law of p
// under the request's controls (method "typical": its own). A request's result depends on that request
// alone. Rules: kernels/common/verify.h; laws: docs/sampling.md.
#include "verify_chain/params.h"

#include "stable/verify_args.h"

namespace specdec::ops {
namespace {

constexpr const char* kOp = "verify_chain";

using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Method method_of(const std::string& name) {
    if (name == "token") return Method::kToken;
    if (name == "block") return Method::kBlock;
    if (name == "sampled") return Method::kSampled;
    if (name == "typical") return Method::kTypical;
    fail(kOp, "method", "wanted \"token\", \"block\", \"sampled\" or \"typical\", got \"", name,
         "\"");
}

// markov is (w1, w2, base_logits) of a vanilla markov_draft: q is recomputed from them.
void check_markov(const TensorList& markov, const VerifyArgs& args,
                  const OptionalTensor& draft_rows) {
    const auto floats = {DType::kF32, DType::kF16, DType::kBF16};
    check_option(markov.size() == 3, kOp, "markov", "(w1, w2, base_logits)", markov.size());
    const char* columns_are = args.d2t ? "length of d2t" : "vocab_size";
    const Arg base = args.on_device("markov[2] (base_logits)", markov[2]);
    base.dims(3, "[B', max_drafts, V']")
        .dtype(floats)
        .size(1, args.max_path, "max_drafts")
        .size_at_least(2, args.draft_vocab(), columns_are)
        .dense_last();
    if (!draft_rows) base.size_at_least(0, args.batch(), "B of cu_rows, as draft_rows is absent");
    args.on_device("markov[0] (w1)", markov[0])
        .dims(2, "[V1, r]")
        .dtype(floats)
        .size_at_least(0, args.vocab_size, "vocab_size")
        .dense_last();
    args.on_device("markov[1] (w2)", markov[1])
        .dims(2, "[V', r]")
        .dtype(floats)
        .size_at_least(0, args.draft_vocab(), columns_are)
        .size(1, markov[0].size(1), "r of w1")
        .dense_last();
}

Result verify_chain(const Tensor& target_logits, const Tensor& input_ids, const Tensor& cu_rows,
                    const Tensor& seeds, const Tensor& positions, int64_t max_drafts,
                    int64_t vocab_size, const OptionalTensor& draft_logits,
                    const OptionalTensor& draft_rows, const OptionalTensor& draft_temperature,
                    const OptionalTensor& draft_is_one_hot, const OptionalTensor& d2t,
                    bool d2t_is_offset, bool draft_controls, const std::string& method,
                    double posterior_threshold, double posterior_alpha,
                    const std::optional<TensorList>& markov, SPECDEC_CONTROL_PARAMETERS) {
    // 1. Validate.
    OptionalTensor q_logits = draft_logits, q_rows = draft_rows;
    const VerifyArgs args{kOp,
                          target_logits,
                          input_ids,
                          cu_rows,
                          seeds,
                          positions,
                          max_drafts,
                          "max_drafts",
                          vocab_size,
                          q_logits,
                          draft_temperature,
                          d2t,
                          d2t_is_offset,
                          draft_controls,
                          SPECDEC_CONTROL_ARGUMENTS};
    const Method which = method_of(method);
    if (markov && draft_logits) {
        fail(kOp, "markov", "wanted none beside draft_logits, got both");
    }
    args.check(3, "[B', max_drafts, >= vocab_size]", markov.has_value());
    if (draft_logits) {
        const Arg arg(kOp, "draft_logits", *draft_logits);
        arg.size(1, max_drafts, "max_drafts");
        if (!draft_rows) {
            arg.size_at_least(0, args.batch(), "B of cu_rows, as draft_rows is absent");
        }
    }
    if (draft_rows) args.per_request("draft_rows", *draft_rows).dtype({DType::kI32}).dense();
    if (draft_is_one_hot) {
        args.per_request("draft_is_one_hot", *draft_is_one_hot).dtype({DType::kBool}).dense();
    }

    if (markov) check_markov(*markov, args, draft_rows);

    // 2. Allocate.
    const VerifyArgs::Results r = args.allocate();
    const Result result = {r.tokens,   r.num_accepted, r.status,
                           r.logprobs, r.top_ids,      r.top_logprobs};
    if (args.batch() == 0) return result;

    if (markov) {
        const auto [logits, rows] = call_op<Tensor, Tensor>(
            SPECDEC_OP_NAME(_markov_logits), (*markov)[2], input_ids, cu_rows, (*markov)[0],
            (*markov)[1], max_drafts, vocab_size, draft_rows, d2t, d2t_is_offset);
        q_logits = logits;
        q_rows = rows;
    }

    // 3. Parameters.
    Launch launch(kOp, target_logits);
    VerifyChainParams p;
    args.fill(launch, r, which, posterior_threshold, posterior_alpha, &p);
    if (q_logits) p.draft_logits = launch.in<3>("draft_logits", *q_logits);
    p.draft_rows =
        q_rows ? static_cast<const int32_t*>(launch.in_data("draft_rows", *q_rows)) : nullptr;
    p.draft_is_one_hot =
        draft_is_one_hot
            ? static_cast<const bool*>(launch.in_data("draft_is_one_hot", *draft_is_one_hot))
            : nullptr;
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
