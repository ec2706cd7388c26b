// Logits of a drafter [B, F, V'] whose most probable tokens are wanted, as arguments of an op (expand_tree,
// block_tree): checked, and as kernels read them.
#pragma once

#include "kernels/common/top_rows.h"
#include "stable/check.h"

namespace specdec::ops {

struct TopRowsArgs {
    const char* op;
    const Tensor& logits;
    const char* shape;  // of logits, for messages
    int64_t topk, vocab_size;
    const OptionalTensor& d2t;
    bool d2t_is_offset;

    void check() const {
        constexpr int64_t kMaxVocab = int64_t{1} << 31;
        const Arg arg(op, "logits", logits);
        arg.dims(3, shape).dtype({DType::kF32, DType::kF16, DType::kBF16});
        check_option(topk >= 1 && topk <= kMaxTop, op, "topk", "a number from 1 to 32", topk);
        check_option(vocab_size > 0 && vocab_size < kMaxVocab, op, "vocab_size",
                     "a number from 1 to 2^31 - 1", vocab_size);
        if (d2t) {
            Arg(op, "d2t", *d2t)
                .same_device(logits, "logits")
                .dims(1, "[Vd]")
                .dtype({DType::kI64})
                .dense();
            check_option(d2t->size(0) < kMaxVocab, op, "d2t", "at most 2^31 - 1 entries",
                         d2t->size(0));
        }
        arg.size_at_least(2, d2t ? d2t->size(0) : vocab_size, d2t ? "length of d2t" : "vocab_size");
        arg.dense_last();
    }
    TopRows fill(Launch& launch) const {
        TopRows p{};
        p.logits = launch.in<3>("logits", logits);
        p.dtype = *dtype_of(logits);
        p.columns = d2t ? d2t->size(0) : vocab_size;
        const void* map = d2t ? launch.in_data("d2t", *d2t) : nullptr;
        p.map = ColumnMap{static_cast<const int64_t*>(map), d2t_is_offset, vocab_size};
        p.k = static_cast<int>(topk);
        return p;
    }
};

}  // namespace specdec::ops
