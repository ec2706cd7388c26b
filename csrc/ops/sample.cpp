// sample(logits [R, >= V], seeds [R], positions [R], *, vocab_size V, temperature [R])
//     -> (tokens [R], logprob [R], lse [R], status [R], top_ids [R, 0], top_logprobs [R, 0])
// tokens[r] ~ softmax(logits[r, :V] / temperature[r]) with the uniform number (seeds[r], positions[r],
// SAMPLE), argmax below temperature 1e-5; logprob and lse of the row at temperature 1.
// A row's result depends on that row alone.
#include "sample/params.h"

#include "stable/check.h"

namespace specdec::ops {
namespace {

constexpr const char* kOp = "sample";
constexpr int64_t kMaxVocab = int64_t{1} << 31;

using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Result sample(const Tensor& logits, const Tensor& seeds, const Tensor& positions,
              int64_t vocab_size, const OptionalTensor& temperature) {
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
    if (temperature) per_row("temperature", *temperature).dtype({DType::kF32}).dense();

    // 2. Allocate.
    Tensor tokens = empty_on(logits, {num_rows}, DType::kI64);
    Tensor logprob = empty_on(logits, {num_rows}, DType::kF32);
    Tensor lse = empty_on(logits, {num_rows}, DType::kF32);
    Tensor status = empty_on(logits, {num_rows}, DType::kI32);
    Result result = {tokens,
                     logprob,
                     lse,
                     status,
                     empty_on(logits, {num_rows, 0}, DType::kI64),
                     empty_on(logits, {num_rows, 0}, DType::kF32)};
    if (num_rows == 0) return result;

    // 3. Parameters.
    Launch launch(kOp, logits);
    SampleParams p;
    p.logits = launch.in<2>("logits", logits);
    p.logits_dtype = logits_arg.type();
    p.seeds = launch.index("seeds", seeds);
    p.positions = launch.index("positions", positions);
    p.temperature = temperature
                        ? static_cast<const float*>(launch.in_data("temperature", *temperature))
                        : nullptr;
    p.vocab_size = vocab_size;
    p.tokens = static_cast<int64_t*>(launch.out_data("tokens", tokens));
    p.logprob = static_cast<float*>(launch.out_data("logprob", logprob));
    p.lse = static_cast<float*>(launch.out_data("lse", lse));
    p.status = static_cast<int32_t*>(launch.out_data("status", status));
    p.scratch = nullptr;
#if !defined(SPECDEC_BACKEND_CPU)
    const Tensor scratch =
        empty_on(logits, {cuda::sample_scratch_bytes(num_rows, vocab_size)}, DType::kBool);
    p.scratch = launch.out_data("scratch", scratch);
#endif

    // 4. Run.
    SPECDEC_RUN(sample, launch, p);
    return result;
}

}  // namespace

SPECDEC_REGISTER(sample, sample)

}  // namespace specdec::ops
