// Columns of logits as target ids, for drafters with a vocabulary of their own: d2t holds offsets (target id =
// column + d2t[column]) or the target ids themselves. Its entries may be any numbers.
#pragma once

#include "types.h"

namespace specdec {

struct ColumnMap {
    const int64_t* d2t = nullptr;  // [columns]; nullptr: columns are target ids
    bool is_offset = true;
    int64_t vocab_size = 0;

    // The target id of a column; -1 where it has none inside the vocabulary.
    SPECDEC_HD int64_t token(int64_t column) const {
        if (d2t == nullptr) return column;
        const uint64_t delta = static_cast<uint64_t>(d2t[column]);
        const int64_t id =
            static_cast<int64_t>(delta + (is_offset ? static_cast<uint64_t>(column) : 0u));
        return id >= 0 && id < vocab_size ? id : -1;
    }
};

}  // namespace specdec
