// verify_chain on the CPU: the rules of common/verify.h on a chain, one request after the other, lazily:
// a row behind the first rejection is never read, a draft row only when its draft is tested.
// Work: a thread takes whole requests, or tiles of one row where there are fewer requests than threads.
// Bytes moved per request with a accepted drafts: a + 1 target rows, a + 1 draft rows (where q is
// read), and both rows of the rejected draft a second time; nothing is written but the results. Method
// "block" reads all rows, and those that it rejects a second time.
// Determinism: fixed sums over absolute tiles (vocab_row.h); a request depends on nothing but itself.
#include "params.h"

#include <algorithm>

#include "rows.h"
#include "verify_results.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

struct Chain {
    const VerifyChainParams& p;
    int64_t begin, count;  // rows in use
    int64_t draft;         // row of draft_logits, -1: one-hot

    int64_t num_nodes() const { return count; }
    int64_t token(int64_t u) const { return p.input_ids[begin + u]; }
    int64_t first_child(int64_t u) const { return u + 1 < count ? u + 1 : -1; }
    int64_t next_sibling(int64_t) const { return -1; }
    const void* draft_row(int64_t u) const {
        const int64_t offset = draft * p.draft_logits.stride[0] + u * p.draft_logits.stride[1];
        return static_cast<const char*>(p.draft_logits.data) + offset * dtype_size(p.draft_dtype);
    }
};

// Row of draft_logits that holds request b's q, or -1 where q is one-hot.
int64_t row_of_draft_logits(const VerifyChainParams& p, int64_t b) {
    if (p.draft_logits.data == nullptr) return -1;
    if (p.draft_is_one_hot != nullptr && p.draft_is_one_hot[b]) return -1;
    if (p.draft_temperature != nullptr && is_greedy(p.draft_temperature[b])) return -1;
    const int64_t row = p.draft_rows == nullptr ? b : p.draft_rows[b];
    return row >= 0 && row < p.draft_logits.size[0] ? row : -1;
}

}  // namespace

void verify_chain(const VerifyChainParams& p) {
    for_requests<Chain>(p, [&](auto& walk, int64_t b) {
        const RowSpan rows = rows_of_request(p.cu_rows, b, p.num_rows);
        if (rows.count == 0) return write_inactive(p, b);
        const Chain chain{p, rows.first, std::min(rows.count, p.max_path + 1),
                          row_of_draft_logits(p, b)};
        const bool one_hot = chain.draft < 0;
        const RequestOf request{b,
                                rows.first,
                                p.seeds[b],
                                p.positions[b],
                                one_hot ? Siblings::kDeterministic : Siblings::kSampled,
                                one_hot};
        const auto outcome = walk.run(chain, request);
        write_results(p, b, chain, walk, outcome.token, outcome.status);
    });
}

}  // namespace specdec::cpu::SPECDEC_ISA
