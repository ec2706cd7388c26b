// markov_draft: the drafts of a block, one after the other, from base logits and a sequential head.
//   Step k of request b, with x the token before (the anchor at step 0), e = W1[x] and h = hidden[b, k]:
//     state    vanilla  y = e
//              gated    y = sigmoid(G [h; e] + bias) * e
//              rnn      (g, c, o) = J [s; e; h] + bias, s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c),
//                       y = tanh(o); s = 0 at step 0
//     logits   z[v] = U[b, k, v] + W2[v] . y, float32; -inf for columns outside of the law
//     token    from softmax(z / T), by inverse CDF in the order of columns with the one number
//              uniform_at(seed, position, k + 1, kDraft); or the argmax, lowest column on ties
//     confidence  sigmoid((w . [h; e] + bias) / sts[k])
//   With a table of w2, steps without a request that samples look at the columns that can win alone (bounds.h).
//   A request ends (token -1 and zeros from there on) at a token outside [0, vocab_size) before a step
//   or at a row with NaN, +inf or nothing finite.
//
// Everything is defined to the bit, for both backends and all instruction sets:
//   W2[v] . y   16 lanes as in dot_rows.h: which k a lane has goes by the dtype of W2
//   other dots  32 lanes; lane l adds k = l, l + 32, .. by fused multiply-adds; then the tree of lanes 16,
//               8, 4, 2 and 1 apart. Parts of a concatenated input are summed one by one, then added up
//               from left to right, then the bias
//   sums of 2^((z - m) c), c as in token_law.h, m the largest z of a chunk of 512 columns: 32 lanes as above
//               (Rows32); chunks then count 2^((m - M) c) times their sum, M the largest z of the row, and
//               are summed like the entries of a chunk, 32 at a time, rows of 32 in double from left to right
#pragma once

#include "bounds.h"
#include "column_map.h"
#include "exact_math.h"
#include "floats_view.h"
#include "isa.h"
#include "philox.h"
#include "rows.h"
#include "view.h"

namespace specdec {

constexpr int64_t kMarkovChunk = 512;

enum class MarkovHead : int32_t { kVanilla, kGated, kRnn };

// Logits along drafts that were drawn before, for the q of verification: row b * drafts + j of the call is draft j of
// request b, after token j of its rows (its anchor, or draft j - 1). All of them in one pass over W2.
struct MarkovChain {
    const int32_t* cu_rows;  // [requests + 1]
    IndexView input_ids;     // [num_rows]
    int64_t num_rows;
    int64_t drafts;             // most of a request
    const int32_t* draft_rows;  // [requests] row of base_logits, or nullptr (= identity)
    int32_t* rows;  // [requests], written: the request itself where it has a row, else -1
};

struct MarkovDraftParams {
    View<const void, 3> base_logits;  // [B, G, >= columns]
    DType logits_dtype;
    IndexView anchor_ids, seeds, positions;  // [B]
    FloatsView w1;                           // [>= vocab_size, rank]
    FloatsView w2;                           // [>= columns, rank]
    int64_t batch, steps, rank, columns, vocab_size;
    MarkovHead head;
    View<const void, 3> hidden;  // [B, G, depth]; no data: there is none
    DType hidden_dtype;
    int64_t depth;  // 0 without hidden
    FloatsView projection,
        projection_bias;           // gated [rank, depth + rank], rnn [3 rank, 2 rank + depth]
    FloatsView confidence_weight;  // [depth + rank], [depth] or (without hidden) [rank]
    bool has_confidence, confidence_on_embedding;
    float confidence_bias;
    const float* sts_temperature;  // [G] or nullptr
    const float* temperature;      // [B] or nullptr (= 1)
    const int64_t* d2t;            // [columns] or nullptr
    bool d2t_is_offset;
    bool follows;       // a chain: only logits are written, of one step; vanilla heads
    MarkovChain chain;  // if it does
    MarkovTable table;  // of w2; without codes: none. Then neither logprob nor logits are asked for
    void* tokens;       // [B, G] in the dtype of anchor_ids
    float* logprob;     // [B, G] or nullptr
    float* lse;         // [B, G] or nullptr
    float* confidence;  // [B, G]
    float* logits;      // [B, G, width] or nullptr
    int64_t width;      // of base_logits
    void* scratch;      // CUDA: markov_draft_scratch_bytes(p) bytes, uninitialised
};

SPECDEC_HD int64_t markov_chunks(const MarkovDraftParams& p) {
    return (p.columns + kMarkovChunk - 1) / kMarkovChunk;
}
SPECDEC_HD int64_t markov_tiles(const MarkovDraftParams& p) {
    return (p.columns + kMarkovTile - 1) / kMarkovTile;
}
// Of y in its widened layout: whole steps of dot_rows.h.
SPECDEC_HD int64_t markov_padded_rank(const MarkovDraftParams& p) {
    return (p.rank + 31) / 32 * 32;
}

SPECDEC_HD const void* hidden_row(const MarkovDraftParams& p, int64_t b, int64_t k) {
    return float_row(p.hidden.data, p.hidden_dtype,
                     b * p.hidden.stride[0] + k * p.hidden.stride[1]);
}
// The row of base_logits of a request of the chain that is followed, -1: none.
SPECDEC_HD int64_t chain_row(const MarkovDraftParams& p, int64_t request) {
    const int64_t row = p.chain.draft_rows == nullptr ? request : p.chain.draft_rows[request];
    return row >= 0 && row < p.base_logits.size[0] ? row : -1;
}
SPECDEC_HD const void* base_row(const MarkovDraftParams& p, int64_t b, int64_t k) {
    if (p.follows) {
        k = b % p.chain.drafts;
        b = chain_row(p, b / p.chain.drafts);
    }
    return float_row(p.base_logits.data, p.logits_dtype,
                     b * p.base_logits.stride[0] + k * p.base_logits.stride[1]);
}
SPECDEC_HD float* logits_row(const MarkovDraftParams& p, int64_t b, int64_t k) {
    return p.logits + (b * p.steps + k) * p.width;
}

// The target id of a column; -1 where it has none inside the vocabulary.
SPECDEC_HD int64_t markov_token(const MarkovDraftParams& p, int64_t column) {
    return ColumnMap{p.d2t, p.d2t_is_offset, p.vocab_size}.token(column);
}
SPECDEC_HD bool is_token(const MarkovDraftParams& p, int64_t id) {
    return id >= 0 && id < p.vocab_size;
}

// The token before the first step of row b of the call; outside of the vocabulary: there is nothing to draw.
SPECDEC_HD int64_t first_token(const MarkovDraftParams& p, int64_t b) {
    if (!p.follows) return p.anchor_ids[b];
    const int64_t request = b / p.chain.drafts, draft = b % p.chain.drafts;
    const RowSpan rows = rows_of_request(p.chain.cu_rows, request, p.chain.num_rows);
    if (draft + 1 >= rows.count || chain_row(p, request) < 0) return -1;
    return p.chain.input_ids[rows.first + draft];
}
// Row of the logits that holds a request of a chain: its own.
SPECDEC_HD void write_chain_row(const MarkovDraftParams& p, int64_t b) {
    if (!p.follows || b % p.chain.drafts != 0) return;
    const int64_t request = b / p.chain.drafts;
    p.chain.rows[request] = chain_row(p, request) < 0 ? -1 : static_cast<int32_t>(request);
}

// How request b draws. A greedy one reports its numbers at temperature 1.
struct MarkovLaw {
    bool greedy;
    float temperature, scale;
};
SPECDEC_HD MarkovLaw markov_law(const MarkovDraftParams& p, int64_t b) {
    const float t = p.temperature == nullptr ? 1.0f : p.temperature[b];
    const bool greedy = is_greedy(t);
    const float used = greedy ? 1.0f : t;
    return MarkovLaw{greedy, used, exponent_scale(used)};
}

// Whether the sum of a row is of use: for its draw or for its numbers.
SPECDEC_HD bool needs_sum(const MarkovDraftParams& p, const MarkovLaw& law) {
    return !law.greedy || p.logprob != nullptr;
}

// Of a chunk: its largest logit (+inf: it holds NaN or +inf) and sum of 2^((z - max) scale).
struct alignas(8) ChunkStats {
    float max, sum;
};

// What a step chose.
struct MarkovPick {
    int64_t token;  // target id; -1: the request has ended
    float logprob, lse;
};

// Of the chosen logit z in a row of maximum `max` and log2 of its sum.
SPECDEC_HD MarkovPick markov_pick(int64_t token, const MarkovLaw& law, float z, float max,
                                  double log2_sum) {
    MarkovPick pick;
    pick.token = token;
    pick.logprob = static_cast<float>(
        kLn2 * (static_cast<double>(z - max) * static_cast<double>(law.scale) - log2_sum));
    pick.lse = static_cast<float>(static_cast<double>(max) / static_cast<double>(law.temperature) +
                                  kLn2 * log2_sum);
    return pick;
}
SPECDEC_HD MarkovPick markov_end() {
    return MarkovPick{-1, 0.0f, 0.0f};
}

SPECDEC_HD void write_pick(const MarkovDraftParams& p, int64_t b, int64_t k,
                           const MarkovPick& pick) {
    const int64_t at = b * p.steps + k;
    if (p.anchor_ids.dtype == DType::kI64) {
        static_cast<int64_t*>(p.tokens)[at] = pick.token;
    } else {
        static_cast<int32_t*>(p.tokens)[at] = static_cast<int32_t>(pick.token);
    }
    if (p.logprob != nullptr) {
        p.logprob[at] = pick.logprob;
        p.lse[at] = pick.lse;
    }
    if (pick.token < 0) p.confidence[at] = 0.0f;
}

// The confidence of step k from the dot product of its head.
SPECDEC_HD float markov_confidence(const MarkovDraftParams& p, int64_t k, float logit) {
    const float t = p.sts_temperature == nullptr ? 1.0f : p.sts_temperature[k];
    return sigmoid_of((logit + p.confidence_bias) / t);
}

// y of one place of the gated and of the rnn head, from its sums over parts of the input.
SPECDEC_HD float gated_value(float over_hidden, float over_embedding, float bias, float e) {
    return sigmoid_of(over_hidden + over_embedding + bias) * e;
}
SPECDEC_HD float rnn_sum(float over_state, float over_embedding, float over_hidden, float bias) {
    return over_state + over_embedding + over_hidden + bias;
}
SPECDEC_HD float rnn_state(float gate, float candidate, float state) {
    const float g = sigmoid_of(gate);
    return g * state + (1.0f - g) * tanh_of(candidate);
}

namespace cuda {
int64_t markov_draft_scratch_bytes(const MarkovDraftParams& p);
Status markov_draft(const MarkovDraftParams& p, Stream stream);
}  // namespace cuda

}  // namespace specdec

SPECDEC_DECLARE_CPU(markov_draft, ::specdec::MarkovDraftParams)
