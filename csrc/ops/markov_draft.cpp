// markov_draft(base_logits [B, G, >= V'], anchor_ids [B], w1 [V1, r], w2 [V', r], seeds [B], positions [B], *,
//              vocab_size, head, hidden, gate_*, joint_*, confidence_*, sts_temperature, temperature, d2t,
//              return_logits, prepared, return_logprobs) -> (tokens, logprob, lse (both [0] if not asked for),
//              confidence [B, G], logits [B, G, V'] or [0])
// The drafts of a block, one after the other: kernels/markov_draft/params.h.
#include "markov_draft/params.h"

#include "stable/check.h"

namespace specdec::ops {
namespace {

constexpr const char* kOp = "markov_draft";
constexpr int64_t kMaxVocab = int64_t{1} << 31;

using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

void run([[maybe_unused]] Launch& launch, [[maybe_unused]] const Tensor& like,
         MarkovDraftParams& p) {
#if !defined(SPECDEC_BACKEND_CPU)
    const Tensor scratch = empty_on(like, {cuda::markov_draft_scratch_bytes(p)}, DType::kBool);
    p.scratch = launch.out_data("scratch", scratch);
#endif
    SPECDEC_RUN(markov_draft, launch, p);
}

MarkovHead head_of(const std::string& name) {
    if (name == "vanilla") return MarkovHead::kVanilla;
    if (name == "gated") return MarkovHead::kGated;
    if (name == "rnn") return MarkovHead::kRnn;
    fail(kOp, "head", "wanted \"vanilla\", \"gated\" or \"rnn\", got \"", name, "\"");
}

// prepared is (codes, rows, turn) of prepare_markov, of a w2 of these rows and rank.
void check_prepared(const TensorList& prepared, const Tensor& w2, const Tensor& base_logits) {
    check_option(prepared.size() == 3, kOp, "prepared", "(codes, rows, turn) of prepare_markov",
                 prepared.size());
    const auto arg = [&](const char* name, int i) {
        return Arg(kOp, name, prepared[i]).same_device(base_logits, "base_logits");
    };
    const int64_t width = (w2.size(1) + 3) / 4 * 4;
    check_option(width <= kMarkovTableWidth, kOp, "prepared", "none for a rank above 1024",
                 w2.size(1));
    const int64_t tiles = (w2.size(0) + kMarkovTile - 1) / kMarkovTile;
    constexpr const char* kCodes = "prepared[0] (codes)";
    const Arg codes = arg(kCodes, 0);
    codes.dims(4, "[tiles, r / 4, 16, 4]").size(0, tiles, "rows of w2 / 16");
    codes.size(1, width / 4, "r of w2 / 4").size(2, kMarkovTile, "columns of a tile").dense();
    codes.size(3, 4, "numbers of a word");
    if (dtype_text(prepared[0]) != "int8") {
        fail(kOp, kCodes, "wanted dtype int8, got ", dtype_text(prepared[0]));
    }
    const Arg rows = arg("prepared[1] (rows)", 1);
    rows.dims(3, "[tiles, 3, 16]").dtype({DType::kF32}).size(0, tiles, "rows of w2 / 16");
    rows.size(1, 3, "scale and two norms").size(2, kMarkovTile, "columns of a tile").dense();
    arg("prepared[2] (turn)", 2)
        .dims(1, "[r]")
        .dtype({DType::kF32})
        .size(0, width, "r of w2, in whole words")
        .dense();
}

Result markov_draft(const Tensor& base_logits, const Tensor& anchor_ids, const Tensor& w1,
                    const Tensor& w2, const Tensor& seeds, const Tensor& positions,
                    int64_t vocab_size, const std::string& head, const OptionalTensor& hidden,
                    const OptionalTensor& gate_weight, const OptionalTensor& gate_bias,
                    const OptionalTensor& joint_weight, const OptionalTensor& joint_bias,
                    const OptionalTensor& confidence_weight, double confidence_bias,
                    const OptionalTensor& sts_temperature, const OptionalTensor& temperature,
                    const OptionalTensor& d2t, bool d2t_is_offset, bool return_logits,
                    const std::optional<TensorList>& prepared, bool return_logprobs) {
    // 1. Validate.
    const auto floats = {DType::kF32, DType::kF16, DType::kBF16};
    const MarkovHead which = head_of(head);
    const Arg base_arg(kOp, "base_logits", base_logits);
    base_arg.dims(3, "[B, G, V']").dtype(floats);
    check_option(vocab_size > 0 && vocab_size < kMaxVocab, kOp, "vocab_size",
                 "a number from 1 to 2^31 - 1", vocab_size);
    const int64_t batch = base_logits.size(0), steps = base_logits.size(1);
    const auto arg = [&](const char* name, const Tensor& t) {
        return Arg(kOp, name, t).same_device(base_logits, "base_logits");
    };
    const auto per_request = [&](const char* name, const Tensor& t) {
        return arg(name, t).dims(1, "[B]").size(0, batch, "B of base_logits");
    };
    if (d2t) arg("d2t", *d2t).dims(1, "[Vd]").dtype({DType::kI64}).dense();
    const int64_t columns = d2t ? d2t->size(0) : vocab_size;
    const char* columns_are = d2t ? "length of d2t" : "vocab_size";
    base_arg.size_at_least(2, columns, columns_are).dense_last();
    const Arg anchor_arg = per_request("anchor_ids", anchor_ids);
    anchor_arg.index();
    arg("w1", w1).dims(2, "[V1, r]").dtype(floats).size_at_least(0, vocab_size, "vocab_size");
    arg("w1", w1).dense_last();
    const int64_t rank = w1.size(1);
    arg("w2", w2)
        .dims(2, "[V', r]")
        .dtype(floats)
        .size_at_least(0, columns, columns_are)
        .size(1, rank, "r of w1")
        .dense_last();
    per_request("seeds", seeds).dtype({DType::kI64});
    per_request("positions", positions).index();
    if (hidden) {
        arg("hidden", *hidden)
            .dims(3, "[B, G, d]")
            .dtype(floats)
            .size(0, batch, "B of base_logits")
            .size(1, steps, "G of base_logits")
            .dense_last();
    }
    const int64_t depth = hidden ? hidden->size(2) : 0;
    const auto check_projection = [&](const char* weight_name, const OptionalTensor& weight,
                                      const char* bias_name, const OptionalTensor& bias,
                                      MarkovHead of, int64_t outputs, int64_t inputs,
                                      const char* shape) {
        if (which != of) {
            if (weight)
                fail(kOp, weight_name, "wanted none with head \"", head, "\", got a tensor");
            if (bias) fail(kOp, bias_name, "wanted none with head \"", head, "\", got a tensor");
            return;
        }
        if (!hidden) fail(kOp, "hidden", "wanted a tensor with head \"", head, "\", got None");
        if (!weight) fail(kOp, weight_name, "wanted a tensor with head \"", head, "\", got None");
        if (!bias) fail(kOp, bias_name, "wanted a tensor with head \"", head, "\", got None");
        arg(weight_name, *weight)
            .dims(2, shape)
            .dtype(floats)
            .size(0, outputs, "of r of w1")
            .size(1, inputs, "of d of hidden and r of w1")
            .dense_last();
        arg(bias_name, *bias)
            .dims(1, "[outputs]")
            .dtype(floats)
            .size(0, outputs, "of r of w1")
            .dense();
    };
    check_projection("gate_weight", gate_weight, "gate_bias", gate_bias, MarkovHead::kGated, rank,
                     depth + rank, "[r, d + r]");
    check_projection("joint_weight", joint_weight, "joint_bias", joint_bias, MarkovHead::kRnn,
                     3 * rank, 2 * rank + depth, "[3 r, 2 r + d]");
    bool on_embedding = false;
    if (confidence_weight) {
        arg("confidence_weight", *confidence_weight).dims(1, "[d + r]").dtype(floats).dense();
        const int64_t size = confidence_weight->size(0);
        if (size != depth + rank && !(hidden && size == depth)) {
            fail(kOp, "confidence_weight", "wanted size ", depth + rank, " (d of hidden + r of w1)",
                 hidden ? " or d alone" : "", ", got ", shape_text(*confidence_weight));
        }
        on_embedding = size == depth + rank;
    }
    if (sts_temperature) {
        arg("sts_temperature", *sts_temperature)
            .dims(1, "[G]")
            .dtype({DType::kF32})
            .size(0, steps, "G of base_logits")
            .dense();
    }
    if (temperature) per_request("temperature", *temperature).dtype({DType::kF32}).dense();
    if (prepared) check_prepared(*prepared, w2, base_logits);

    // 2. Allocate.
    const int64_t width = base_logits.size(2);
    Tensor tokens = empty_on(base_logits, {batch, steps}, anchor_arg.type());
    const auto numbers = [&](bool wanted) {
        return wanted ? empty_on(base_logits, {batch, steps}, DType::kF32)
                      : empty_on(base_logits, {0}, DType::kF32);
    };
    Tensor logprob = numbers(return_logprobs), lse = numbers(return_logprobs);
    Tensor confidence = empty_on(base_logits, {batch, steps}, DType::kF32);
    Tensor logits = return_logits ? empty_on(base_logits, {batch, steps, width}, DType::kF32)
                                  : empty_on(base_logits, {0}, DType::kF32);
    const Result result = {tokens, logprob, lse, confidence, logits};
    if (batch == 0 || steps == 0) return result;

    // 3. Parameters.
    Launch launch(kOp, base_logits);
    const auto matrix = [&](const char* name, const Tensor& t) {
        return FloatsView{launch.in_data(name, t), *dtype_of(t), t.dim() > 1 ? t.stride(0) : 0};
    };
    MarkovDraftParams p{};
    p.base_logits = launch.in<3>("base_logits", base_logits);
    p.logits_dtype = base_arg.type();
    p.anchor_ids = launch.index("anchor_ids", anchor_ids);
    p.seeds = launch.index("seeds", seeds);
    p.positions = launch.index("positions", positions);
    p.w1 = matrix("w1", w1);
    p.w2 = matrix("w2", w2);
    p.batch = batch;
    p.steps = steps;
    p.rank = rank;
    p.columns = columns;
    p.vocab_size = vocab_size;
    p.head = which;
    if (hidden) {
        p.hidden = launch.in<3>("hidden", *hidden);
        p.hidden_dtype = *dtype_of(*hidden);
    }
    p.depth = depth;
    if (which == MarkovHead::kGated) {
        p.projection = matrix("gate_weight", *gate_weight);
        p.projection_bias = matrix("gate_bias", *gate_bias);
    } else if (which == MarkovHead::kRnn) {
        p.projection = matrix("joint_weight", *joint_weight);
        p.projection_bias = matrix("joint_bias", *joint_bias);
    }
    if (confidence_weight) p.confidence_weight = matrix("confidence_weight", *confidence_weight);
    p.has_confidence = confidence_weight.has_value();
    p.confidence_on_embedding = on_embedding;
    p.confidence_bias = static_cast<float>(confidence_bias);
    const auto list = [&](const char* name, const OptionalTensor& t) {
        return t ? launch.in_data(name, *t) : nullptr;
    };
    p.sts_temperature = static_cast<const float*>(list("sts_temperature", sts_temperature));
    p.temperature = static_cast<const float*>(list("temperature", temperature));
    p.d2t = static_cast<const int64_t*>(list("d2t", d2t));
    p.d2t_is_offset = d2t_is_offset;
    p.tokens = launch.out_data("tokens", tokens);
    if (return_logprobs) {
        p.logprob = static_cast<float*>(launch.out_data("logprob", logprob));
        p.lse = static_cast<float*>(launch.out_data("lse", lse));
    }
    p.confidence = static_cast<float*>(launch.out_data("confidence", confidence));
    p.logits = return_logits ? static_cast<float*>(launch.out_data("logits", logits)) : nullptr;
    p.width = width;
    if (prepared && !return_logprobs && !return_logits) {
        p.table.codes = static_cast<const int8_t*>(launch.in_data("codes", (*prepared)[0]));
        p.table.rows = static_cast<const float*>(launch.in_data("rows", (*prepared)[1]));
        p.table.turn = static_cast<const float*>(launch.in_data("turn", (*prepared)[2]));
        p.table.width = (rank + 3) / 4 * 4;
    }

    // 4. Run.
    run(launch, base_logits, p);
    return result;
}

// _markov_logits(base_logits [B', K, >= Vd], input_ids [R], cu_rows [B+1], w1, w2, max_drafts K, *, vocab_size,
//                draft_rows [B], d2t [Vd]) -> (logits [B, K, Vd], rows [B])
// What markov_draft drew the drafts of verify_chain from, bit for bit. verify_chain, its only caller, has
// checked the arguments: an error on this side of the dispatcher would lose its text.
std::tuple<Tensor, Tensor> markov_logits(const Tensor& base_logits, const Tensor& input_ids,
                                         const Tensor& cu_rows, const Tensor& w1, const Tensor& w2,
                                         int64_t max_drafts, int64_t vocab_size,
                                         const OptionalTensor& draft_rows,
                                         const OptionalTensor& d2t, bool d2t_is_offset) {
    // 1. Allocate.
    const int64_t batch = cu_rows.size(0) - 1;
    const int64_t columns = d2t ? d2t->size(0) : vocab_size;
    Tensor logits = empty_on(base_logits, {batch, max_drafts, columns}, DType::kF32);
    Tensor rows = empty_on(base_logits, {batch}, DType::kI32);
    if (batch == 0 || max_drafts == 0) return {logits, rows};

    // 2. Parameters.
    Launch launch("verify_chain", base_logits);
    MarkovDraftParams p{};
    p.base_logits = launch.in<3>("base_logits", base_logits);
    p.logits_dtype = *dtype_of(base_logits);
    p.w1 = FloatsView{launch.in_data("w1", w1), *dtype_of(w1), w1.stride(0)};
    p.w2 = FloatsView{launch.in_data("w2", w2), *dtype_of(w2), w2.stride(0)};
    p.batch = batch * max_drafts;
    p.steps = 1;
    p.rank = w1.size(1);
    p.columns = columns;
    p.vocab_size = vocab_size;
    p.head = MarkovHead::kVanilla;
    p.d2t = d2t ? static_cast<const int64_t*>(launch.in_data("d2t", *d2t)) : nullptr;
    p.d2t_is_offset = d2t_is_offset;
    p.follows = true;
    p.chain.cu_rows = static_cast<const int32_t*>(launch.in_data("cu_rows", cu_rows));
    p.chain.input_ids = launch.index("input_ids", input_ids);
    p.chain.num_rows = input_ids.size(0);
    p.chain.drafts = max_drafts;
    p.chain.draft_rows =
        draft_rows ? static_cast<const int32_t*>(launch.in_data("draft_rows", *draft_rows))
                   : nullptr;
    p.chain.rows = static_cast<int32_t*>(launch.out_data("rows", rows));
    p.logits = static_cast<float*>(launch.out_data("logits", logits));
    p.width = columns;

    // 3. Run.
    run(launch, base_logits, p);
    return {logits, rows};
}

}  // namespace

SPECDEC_REGISTER(markov_draft, markov_draft)
SPECDEC_REGISTER(_markov_logits, markov_logits)

}  // namespace specdec::ops
