// next_round: what the next draft pass of every request needs, from what verification accepted.
//   seq_lens is the KV length before the pass, which is the position of the old anchor. The tokens of
//   request b are emitted one by one: num_accepted + 1 of them, fewer when one is a stop token (the last
//   one emitted), when the request then holds max_len tokens (2^31 - 1 without max_len), or when an id is
//   negative. Each one grows
//   the KV by a place, so the last one, the new anchor, has position seq_lens + num_emitted.
//   The block is the new anchor and placeholders behind it, at the positions from there on.
#pragma once

#include "isa.h"
#include "view.h"

namespace specdec {

struct NextRoundParams {
    View<const void, 2> tokens;          // [B, K+1]
    DType token_dtype;                   // kI32 or kI64, also of input_ids
    const int32_t* num_accepted;         // [B]
    const int32_t* seq_lens;             // [B]
    View<const int32_t, 2> block_table;  // [B, P] page of every page_size places; negative: none
    int64_t page_size;
    int64_t block_len;
    int64_t mask_token_id;
    IndexView stop_token_ids;  // [S], empty when there are none
    const int32_t* max_len;    // [B] or nullptr (= 2^31 - 1)
    int64_t batch;
    void* input_ids;        // [B, block_len]
    int64_t* positions;     // [B, block_len]
    int64_t* slots;         // [B, block_len]
    int32_t* new_seq_lens;  // [B]
    int32_t* num_emitted;   // [B]
    bool* finished;         // [B]
};

SPECDEC_HD int64_t token_at(const NextRoundParams& p, int64_t b, int64_t j) {
    return p.token_dtype == DType::kI64 ? *p.tokens.as<const int64_t>().at(b, j)
                                        : *p.tokens.as<const int32_t>().at(b, j);
}

// A request whose first token is no id is inactive.
SPECDEC_HD bool is_active(const NextRoundParams& p, int64_t b) {
    return p.tokens.size[1] > 0 && token_at(p, b, 0) >= 0;
}

// Tokens that the request may hold: lengths are int32, so there is always an end.
SPECDEC_HD int64_t limit_of(const NextRoundParams& p, int64_t b) {
    constexpr int64_t kLongest = 0x7fffffff;
    return p.max_len == nullptr ? kLongest : p.max_len[b];
}

// Tokens that it may hold besides those before the pass and its anchor.
SPECDEC_HD int64_t room_of(const NextRoundParams& p, int64_t b) {
    return limit_of(p, b) - p.seq_lens[b] - 1;
}

// Tokens that may be emitted as long as none of them ends the request.
SPECDEC_HD int64_t most_emitted(const NextRoundParams& p, int64_t b) {
    int64_t most = int64_t{p.num_accepted[b]} + 1;
    if (most > p.tokens.size[1]) most = p.tokens.size[1];
    if (most < 1) most = 1;
    const int64_t room = room_of(p, b);
    return most < room ? most : (room < 0 ? 0 : room);
}

// A negative stop id stands for none.
SPECDEC_HD bool is_stop(const NextRoundParams& p, int64_t token) {
    if (token < 0) return false;
    for (int64_t s = 0; s < p.stop_token_ids.size; ++s) {
        if (p.stop_token_ids[s] == token) return true;
    }
    return false;
}

// Slot of a place of the request, -1 where it has no page.
SPECDEC_HD int64_t slot_of_place(const NextRoundParams& p, int64_t b, int64_t place) {
    const int64_t column = place / p.page_size;
    if (place < 0 || column >= p.block_table.size[1]) return -1;
    const int64_t page = *p.block_table.at(b, column);
    return page < 0 ? -1 : page * p.page_size + (place - column * p.page_size);
}

// Row j of the draft block. `anchor` is its first token and `start` its first position.
struct BlockRow {
    int64_t input_id;
    int64_t position;
    int64_t slot;
};

SPECDEC_HD BlockRow block_row(const NextRoundParams& p, int64_t b, int64_t j, int64_t anchor,
                              int64_t start) {
    BlockRow row{j == 0 ? anchor : p.mask_token_id, start + j, -1};
    if (row.position >= limit_of(p, b)) {
        row.position = limit_of(p, b) - 1;  // of an unfinished request: at least its anchor's
    } else {
        row.slot = slot_of_place(p, b, row.position);
    }
    return row;
}

SPECDEC_HD BlockRow padding_row(const NextRoundParams& p) {
    return BlockRow{p.mask_token_id, 0, -1};
}

SPECDEC_HD void write_row(const NextRoundParams& p, int64_t b, int64_t j, const BlockRow& row) {
    const int64_t at = b * p.block_len + j;
    if (p.token_dtype == DType::kI64) {
        static_cast<int64_t*>(p.input_ids)[at] = row.input_id;
    } else {
        static_cast<int32_t*>(p.input_ids)[at] = static_cast<int32_t>(row.input_id);
    }
    p.positions[at] = row.position;
    p.slots[at] = row.slot;
}

namespace cuda {
Status next_round(const NextRoundParams& p, Stream stream);
}

}  // namespace specdec

SPECDEC_DECLARE_CPU(next_round, ::specdec::NextRoundParams)
