// schedule_prefix(confidence [B, G], steps_per_second [M+1], *, budget=None [1], min_drafts=0,
//                 max_drafts=None, active=None [B]) -> (num_drafts [B], cu_rows [B+1])
// How many drafts of every request are verified, by their confidences and what a row costs:
// kernels/schedule_prefix/params.h.
#include "schedule_prefix/params.h"

#include "stable/check.h"

namespace specdec::ops {
namespace {

constexpr const char* kOp = "schedule_prefix";

std::tuple<Tensor, Tensor> schedule_prefix(const Tensor& confidence, const Tensor& steps_per_second,
                                           const OptionalTensor& budget, int64_t min_drafts,
                                           std::optional<int64_t> max_drafts,
                                           const OptionalTensor& active) {
    // 1. Validate.
    const Arg confidence_arg(kOp, "confidence", confidence);
    confidence_arg.dims(2, "[B, G]").dtype({DType::kF32}).dense_last();
    const int64_t batch = confidence.size(0), drafts = confidence.size(1);
    if (batch * drafts > kMaxCandidates) {
        fail(kOp, "confidence", "wanted at most ", kMaxCandidates, " elements, got shape ",
             shape_text(confidence));
    }
    const Arg table_arg(kOp, "steps_per_second", steps_per_second);
    table_arg.same_device(confidence, "confidence").dims(1, "[M+1]").dtype({DType::kF32}).dense();
    if (!budget) table_arg.size_at_least(0, 1, "one entry, as budget is absent");
    if (budget) {
        Arg(kOp, "budget", *budget)
            .same_device(confidence, "confidence")
            .dims(1, "[1]")
            .dtype({DType::kI32})
            .size(0, 1, "one number for the batch");
    }
    if (active) {
        Arg(kOp, "active", *active)
            .same_device(confidence, "confidence")
            .dims(1, "[B]")
            .dtype({DType::kBool})
            .size(0, batch, "B of confidence")
            .dense();
    }
    check_option(min_drafts >= 0, kOp, "min_drafts", "a number from 0 up", min_drafts);
    if (max_drafts) {
        check_option(*max_drafts >= 0, kOp, "max_drafts", "a number from 0 up", *max_drafts);
    }

    // 2. Allocate.
    Tensor num_drafts = empty_on(confidence, {batch}, DType::kI32);
    Tensor cu_rows = empty_on(confidence, {batch + 1}, DType::kI32);

    // 3. Parameters.
    Launch launch(kOp, confidence);
    SchedulePrefixParams p;
    p.confidence = launch.in<2>("confidence", confidence).as<const float>();
    p.steps_per_second =
        static_cast<const float*>(launch.in_data("steps_per_second", steps_per_second));
    p.table = steps_per_second.size(0);
    p.budget = budget ? static_cast<const int32_t*>(launch.in_data("budget", *budget)) : nullptr;
    p.max_drafts = max_drafts && *max_drafts < drafts ? *max_drafts : drafts;
    p.min_drafts = min_drafts < p.max_drafts ? min_drafts : p.max_drafts;
    p.active = active ? static_cast<const bool*>(launch.in_data("active", *active)) : nullptr;
    p.batch = batch;
    p.num_drafts = static_cast<int32_t*>(launch.out_data("num_drafts", num_drafts));
    p.cu_rows = static_cast<int32_t*>(launch.out_data("cu_rows", cu_rows));

    // 4. Run.
    SPECDEC_RUN(schedule_prefix, launch, p);
    return {num_drafts, cu_rows};
}

}  // namespace

SPECDEC_REGISTER(schedule_prefix, schedule_prefix)

}  // namespace specdec::ops
