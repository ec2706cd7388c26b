// sample(logits [R, >= V], seeds [R], positions [R], *, vocab_size V, controls)
//     -> (tokens [R], logprob [R], lse [R], status [R], top_ids [R, n], top_logprobs [R, n])
// One token per row from the row's law under its controls (one value of each control per row), with the
// uniform number (seeds[r], positions[r], SAMPLE); the argmax for greedy rows.
// A row's result depends on that row alone.
#include "sample/params.h"

#include "stable/control_args.h"

namespace specdec::ops {
namespace {

constexpr const char* kOp = "sample";
constexpr int64_t kMaxVocab = int64_t{1} << 31;

using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Result sample(const Tensor& logits, const Tensor& seeds, const Tensor& positions,
              int64_t vocab_size, SPECDEC_CONTROL_PARAMETERS) {
    const ControlArgs controls = SPECDEC_CONTROL_ARGUMENTS;

    // 1. Validate.
    const Arg logits_arg(kOp, "logits", logits);
    logits_arg.dims(2, "[R, >= vocab_size]").dtype({DType::kF32, DType::kF16, DType::kBF16});
    check_option(vocab_size > 0 && vocab_size < kMaxVocab, kOp, "vocab_size",
                 "a number from 1 to 2^31 - 1", vocab_size);
    logits_arg.size_at_least(1, vocab_size, "vocab_size").dense_last();
    const int64_t num_rows = logits.size(0);
    const auto per_row = [&](const char* name, const Tensor& t) {
        return Arg(kOp, name, t)
            .dims(1, "[R]")
            .size(0, num_rows, "R of logits")
            .same_device(logits, "logits");
    };
    per_row("seeds", seeds).dtype({DType::kI64});
    per_row("positions", positions).index();
    controls.check(kOp, logits, num_rows, "R of logits", num_rows, vocab_size);

    // 2. Allocate.
    const int64_t n = controls.top_n();
    Tensor tokens = empty_on(logits, {num_rows}, DType::kI64);
    Tensor logprob = empty_on(logits, {num_rows}, DType::kF32);
    Tensor lse = empty_on(logits, {num_rows}, DType::kF32);
    Tensor status = empty_on(logits, {num_rows}, DType::kI32);
    Tensor top_ids = empty_on(logits, {num_rows, n}, DType::kI64);
    Tensor top_logprobs = empty_on(logits, {num_rows, n}, DType::kF32);
    const Result result = {tokens, logprob, lse, status, top_ids, top_logprobs};
    if (num_rows == 0) return result;

    // 3. Parameters.
    Launch launch(kOp, logits);
    SampleParams p;
    p.logits = launch.in<2>("logits", logits);
    p.logits_dtype = logits_arg.type();
    p.seeds = launch.index("seeds", seeds);
    p.positions = launch.index("positions", positions);
    p.controls = controls.fill(launch);
    p.logprobs_wanted = controls.logprobs();
    p.vocab_size = vocab_size;
    p.tokens = static_cast<int64_t*>(launch.out_data("tokens", tokens));
    p.logprob = static_cast<float*>(launch.out_data("logprob", logprob));
    p.lse = static_cast<float*>(launch.out_data("lse", lse));
    p.status = static_cast<int32_t*>(launch.out_data("status", status));
    p.top_ids = static_cast<int64_t*>(launch.out_data("top_ids", top_ids));
    p.top_logprobs = static_cast<float*>(launch.out_data("top_logprobs", top_logprobs));
    p.scratch = nullptr;
#if !defined(SPECDEC_BACKEND_CPU)
    const Tensor scratch = empty_on(logits, {cuda::sample_scratch_bytes(p)}, DType::kBool);
    p.scratch = launch.out_data("scratch", scratch);
#endif

    // 4. Run.
    SPECDEC_RUN(sample, launch, p);
    return result;
}

}  // namespace

SPECDEC_REGISTER(sample, sample)

}  // namespace specdec::ops
