// What verify_chain and verify_tree write on the CPU, and how their requests are shared out to threads.
#pragma once

#include "verify_walk.h"

namespace specdec::cpu::SPECDEC_ISA {

inline void put_id(const VerifyParams& p, void* ids, int64_t i, int64_t id) {
    if (p.input_ids.dtype == DType::kI64) {
        static_cast<int64_t*>(ids)[i] = id;
    } else {
        static_cast<int32_t*>(ids)[i] = static_cast<int32_t>(id);
    }
}

// Row `i` of request b's results: no token (and, from place `i` on, none).
inline void write_padding(const VerifyParams& p, int64_t b, int64_t i) {
    const int64_t width = p.max_path + 1,
                  n = p.logprobs_wanted.count > 0 ? p.logprobs_wanted.count : 0;
    for (; i < width; ++i) {
        put_id(p, p.tokens, b * width + i, -1);
        p.logprobs[b * width + i] = 0.0f;
        for (int64_t k = 0; k < n; ++k) {
            put_id(p, p.top_ids, (b * width + i) * n + k, -1);
            p.top_logprobs[(b * width + i) * n + k] = 0.0f;
        }
    }
}

inline void write_inactive(const VerifyParams& p, int64_t b) {
    p.num_accepted[b] = 0;
    p.status[b] = 0;
    write_padding(p, b, 0);
}

template <class T, class Shape>
void write_results(const VerifyParams& p, int64_t b, const Shape& shape, const Walk<T, Shape>& walk,
                   int64_t last_token, int32_t status) {
    const LogprobsWanted& wanted = p.logprobs_wanted;
    const std::vector<int64_t>& path = walk.path();
    const int64_t width = p.max_path + 1, length = static_cast<int64_t>(path.size());
    p.num_accepted[b] = static_cast<int32_t>(length - 1);
    p.status[b] = status;
    write_padding(p, b, wanted.count >= 0 ? length : 0);
    for (int64_t i = 0; i < length; ++i) {
        const int64_t token = i + 1 < length ? shape.token(path[i + 1]) : last_token;
        const int64_t place = b * width + i;
        put_id(p, p.tokens, place, token);
        if (wanted.count < 0) continue;
        const Row<T>& row = walk.row(i);
        const double lse = !wanted.processed && row.raw_usable() ? row.raw_lse() : 0.0;
        p.logprobs[place] =
            report(row, wanted, lse, token, [&](int64_t k, int64_t id, float value) {
                put_id(p, p.top_ids, place * wanted.count + k, id);
                p.top_logprobs[place * wanted.count + k] = value;
            });
    }
}

// Calls verify(walk, b) for every request: a thread takes whole requests, or tiles of one row where there
// are fewer requests than threads.
template <class Shape, class Verify>
void for_requests(const VerifyParams& p, const Verify& verify) {
    const DraftMap map(p);
    dispatch_float(p.logits_dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        if (p.batch < num_threads()) {
            Walk<T, Shape> walk(p, map, true);
            for (int64_t b = 0; b < p.batch; ++b) verify(walk, b);
            return;
        }
        parallel_for(0, p.batch, 1, [&](int64_t begin, int64_t end) {
            Walk<T, Shape> walk(p, map, false);
            for (int64_t b = begin; b < end; ++b) verify(walk, b);
        });
    });
}

}  // namespace specdec::cpu::SPECDEC_ISA
