// next_round(tokens [B, K+1], num_accepted [B], seq_lens [B], block_table [B, P], *, page_size, block_len,
//            mask_token_id, stop_token_ids [S], max_len [B])
//     -> (input_ids, positions, slots [B, block_len], seq_lens [B], num_emitted [B], finished [B])
// Which tokens of a round are emitted, and the draft block that follows: kernels/next_round/params.h.
#include "next_round/params.h"

#include "stable/check.h"

namespace specdec::ops {
namespace {

constexpr const char* kOp = "next_round";

using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Result next_round(const Tensor& tokens, const Tensor& num_accepted, const Tensor& seq_lens,
                  const Tensor& block_table, int64_t page_size, int64_t block_len,
                  int64_t mask_token_id, const OptionalTensor& stop_token_ids,
                  const OptionalTensor& max_len) {
    // 1. Validate.
    constexpr int64_t kMaxInt32 = 0x7fffffff;
    const Arg tokens_arg(kOp, "tokens", tokens);
    tokens_arg.dims(2, "[B, K+1]").index().dense_last();
    const auto check_per_request = [&](const char* name, const Tensor& t) {
        Arg(kOp, name, t).same_device(tokens, "tokens").per_request(tokens.size(0), "B of tokens");
    };
    check_per_request("num_accepted", num_accepted);
    check_per_request("seq_lens", seq_lens);
    Arg(kOp, "block_table", block_table)
        .same_device(tokens, "tokens")
        .dims(2, "[B, P]")
        .dtype({DType::kI32})
        .size(0, tokens.size(0), "B of tokens")
        .dense_last();
    if (stop_token_ids) {
        Arg(kOp, "stop_token_ids", *stop_token_ids)
            .same_device(tokens, "tokens")
            .dims(1, "[S]")
            .index();
    }
    if (max_len) check_per_request("max_len", *max_len);
    check_option(page_size >= 1 && page_size <= kMaxInt32, kOp, "page_size",
                 "a number from 1 to 2^31 - 1", page_size);
    check_option(block_len >= 0 && block_len <= kMaxInt32, kOp, "block_len",
                 "a number from 0 to 2^31 - 1", block_len);
    check_option(tokens_arg.type() == DType::kI64 ||
                     (mask_token_id >= -kMaxInt32 - 1 && mask_token_id <= kMaxInt32),
                 kOp, "mask_token_id", "a number of the dtype of tokens", mask_token_id);

    // 2. Allocate.
    const int64_t batch = tokens.size(0);
    Tensor input_ids = empty_on(tokens, {batch, block_len}, tokens_arg.type());
    Tensor positions = empty_on(tokens, {batch, block_len}, DType::kI64);
    Tensor slots = empty_on(tokens, {batch, block_len}, DType::kI64);
    Tensor new_seq_lens = empty_on(tokens, {batch}, DType::kI32);
    Tensor num_emitted = empty_on(tokens, {batch}, DType::kI32);
    Tensor finished = empty_on(tokens, {batch}, DType::kBool);
    Result result = {input_ids, positions, slots, new_seq_lens, num_emitted, finished};
    if (batch == 0) return result;

    // 3. Parameters.
    Launch launch(kOp, tokens);
    const auto list = [&](const char* name, const Tensor& t) {
        return static_cast<const int32_t*>(launch.in_data(name, t));
    };
    NextRoundParams p;
    p.tokens = launch.in<2>("tokens", tokens);
    p.token_dtype = tokens_arg.type();
    p.num_accepted = list("num_accepted", num_accepted);
    p.seq_lens = list("seq_lens", seq_lens);
    p.block_table = launch.in<2>("block_table", block_table).as<const int32_t>();
    p.page_size = page_size;
    p.block_len = block_len;
    p.mask_token_id = mask_token_id;
    if (stop_token_ids) p.stop_token_ids = launch.index("stop_token_ids", *stop_token_ids);
    p.max_len = max_len ? list("max_len", *max_len) : nullptr;
    p.batch = batch;
    p.input_ids = launch.out_data("input_ids", input_ids);
    p.positions = static_cast<int64_t*>(launch.out_data("positions", positions));
    p.slots = static_cast<int64_t*>(launch.out_data("slots", slots));
    p.new_seq_lens = static_cast<int32_t*>(launch.out_data("new_seq_lens", new_seq_lens));
    p.num_emitted = static_cast<int32_t*>(launch.out_data("num_emitted", num_emitted));
    p.finished = static_cast<bool*>(launch.out_data("finished", finished));

    // 4. Run.
    SPECDEC_RUN(next_round, launch, p);
    return result;
}

}  // namespace

SPECDEC_REGISTER(next_round, next_round)

}  // namespace specdec::ops
