// next_round on the CPU: walks the tokens of a request to the one that ends the round, then writes the
// draft block behind it.
// Work: a thread takes whole requests. Bytes moved: the tokens that are emitted, a page per block row;
// B (20 block_len + 9) written for int32 ids.
// Determinism: integers; a request depends on its own arguments alone.
#include "parallel.h"
#include "params.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

void request_round(const NextRoundParams& p, int64_t b) {
    const bool active = is_active(p, b);
    // 1. Emit.
    const int64_t most = active ? most_emitted(p, b) : 0;
    int64_t emitted = 0, anchor = -1;
    bool stopped = false;
    while (emitted < most && !stopped) {
        const int64_t token = token_at(p, b, emitted);
        if (token < 0) break;
        anchor = token;
        stopped = is_stop(p, token);
        ++emitted;
    }
    // 2. The request.
    const int64_t start = p.seq_lens[b] + emitted;
    const bool finished = active && (stopped || emitted >= room_of(p, b));
    p.new_seq_lens[b] = static_cast<int32_t>(start);
    p.num_emitted[b] = static_cast<int32_t>(emitted);
    p.finished[b] = finished;
    // 3. The block.
    for (int64_t j = 0; j < p.block_len; ++j) {
        write_row(p, b, j,
                  active && !finished ? block_row(p, b, j, anchor, start) : padding_row(p));
    }
}

}  // namespace

void next_round(const NextRoundParams& p) {
    // A request takes a twentieth of a microsecond: fewer are not worth waking a thread.
    constexpr int64_t kGrain = 512;
    parallel_for(0, p.batch, kGrain, [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) request_round(p, b);
    });
}

}  // namespace specdec::cpu::SPECDEC_ISA
