// Sampling controls inside verification, shared by CPU and CUDA kernels: what the arguments are, and
// what they make of one logit.
//
// Order: penalties, bias, bitmask (these give the processed logit z of an id), temperature, top-k,
// top-p, min-p (these cut the ids, sorted by z descending and id ascending, after some prefix).
// So a law under any controls is softmax(z / T) over {z > cut} and the ids <= cut_id of {z == cut},
// and no filter ever needs more than those two numbers.
//
// Every step of z is rounded on its own and in this order, on CPU and CUDA: equal z means equal rank.
#pragma once

#include "token_law.h"
#include "view.h"

namespace specdec {

// Of a whole call. A null pointer: that control is off for everybody. B: requests (rows of `sample`).
struct SamplingControls {
    const float* temperature = nullptr;         // [B], 1 where absent
    const float* top_p = nullptr;               // [B], off from 1 up
    const float* min_p = nullptr;               // [B], off from 0 down
    const int32_t* top_k = nullptr;             // [B], off from 0 down and from vocab_size up
    const float* repetition_penalty = nullptr;  // [B], off at 1
    const float* frequency_penalty = nullptr;   // [B], off at 0
    const float* presence_penalty = nullptr;    // [B], off at 0
    View<const int32_t, 2> token_counts;        // [B, >= V]; data nullptr: no penalties
    View<const int32_t, 2> prompt_mask;         // [B, >= ceil(V / 32)]
    const int32_t* bias_offsets = nullptr;      // [B + 1] into the two below, clamped before use
    IndexView bias_ids;                         // [n]; repeated ids add, in this order
    const float* bias_values = nullptr;         // [n]
    bool has_bitmask = false;                   // a bitmask of no rows is one too
    View<const int32_t, 2> token_bitmask;       // [M, >= ceil(V / 32)], bit 1: allowed
    const int32_t* bitmask_rows = nullptr;      // [R] row of token_bitmask, -1: unconstrained
    bool joint = false;                         // top-p on the law before top-k
    bool any_edits = false;                     // penalties, bias or bitmask are given
    bool any_filters = false;                   // top_k, top_p or min_p are given
};

// Which log-probabilities a call reports.
struct LogprobsWanted {
    int32_t count = -1;  // -1: none; n: those of the emitted tokens and the n most probable ids
    bool processed = false;
};

constexpr int64_t kNoCut = INT64_MAX;

// The ids that filters keep.
struct Cut {
    float z = -__builtin_huge_valf();
    int64_t id = kNoCut;

    SPECDEC_HD bool keeps(float other_z, int64_t other_id) const {
        return other_z > z || (other_z == z && other_id <= id);
    }
};

// Filters of one request; `none` when they keep everything.
struct Filters {
    int64_t top_k;  // vocab_size: off
    float top_p;    // 1: off
    float min_cut;  // log2(min_p): least (z - max) * c kept; -inf: off
    bool joint, none;
};

// Penalties of one request; `none` when they change nothing.
struct Penalties {
    float repetition, frequency, presence;
    const int32_t* counts;  // [V]
    const int32_t* prompt;  // [ceil(V / 32)] or nullptr
    bool none;
};

SPECDEC_HD bool bit_of(const int32_t* words, int64_t id) {
    return (static_cast<uint32_t>(words[id / 32]) >> (id % 32) & 1u) != 0;
}

// Counts end at the largest int32 instead of passing it.
SPECDEC_HD int32_t counted(int32_t count, bool once_more) {
    return count + (once_more && count != 0x7fffffff ? 1 : 0);
}

// z of a logit seen `count` times (drafts before the row included).
SPECDEC_HD float penalised(const Penalties& p, float x, int32_t count, bool in_prompt) {
    if (p.repetition != 1.0f && (count > 0 || in_prompt)) {
        x = x > 0.0f ? x / p.repetition : x * p.repetition;
    }
    if (count > 0 && (p.frequency != 0.0f || p.presence != 0.0f)) {
        const float scaled = p.frequency * static_cast<float>(count);
        x = x - (scaled + p.presence);
    }
    return x;
}

// Words of the bitmask for row r, and whether the row is constrained at all. A row outside the
// bitmask allows nothing: `words` nullptr.
struct Allowed {
    const int32_t* words;
    bool constrained;

    SPECDEC_HD bool operator()(int64_t id) const {
        return !constrained || (words != nullptr && bit_of(words, id));
    }
};

SPECDEC_HD Allowed allowed_of(const SamplingControls& c, int64_t r) {
    if (!c.has_bitmask) return {nullptr, false};
    const int64_t row = c.bitmask_rows == nullptr ? r : c.bitmask_rows[r];
    if (row == -1) return {nullptr, false};
    const bool inside = row >= 0 && row < c.token_bitmask.size[0];
    return {inside ? c.token_bitmask.at(row) : nullptr, true};
}

SPECDEC_HD Penalties penalties_of(const SamplingControls& c, int64_t b) {
    Penalties p{1.0f, 0.0f, 0.0f, nullptr, nullptr, true};
    if (c.token_counts.data == nullptr) return p;
    if (c.repetition_penalty != nullptr) p.repetition = c.repetition_penalty[b];
    if (c.frequency_penalty != nullptr) p.frequency = c.frequency_penalty[b];
    if (c.presence_penalty != nullptr) p.presence = c.presence_penalty[b];
    p.counts = c.token_counts.at(b);
    p.prompt = c.prompt_mask.data == nullptr ? nullptr : c.prompt_mask.at(b);
    p.none = p.repetition == 1.0f && p.frequency == 0.0f && p.presence == 0.0f;
    return p;
}

// Entries [begin, end) of the bias lists.
struct BiasRange {
    int64_t begin, end;
};

SPECDEC_HD BiasRange bias_of(const SamplingControls& c, int64_t b) {
    if (c.bias_offsets == nullptr) return {0, 0};
    const int64_t all = c.bias_ids.size;
    const int64_t first = c.bias_offsets[b], last = c.bias_offsets[b + 1];
    const int64_t begin = first < 0 ? 0 : first > all ? all : first;
    return {begin, last < begin ? begin : last > all ? all : last};
}

SPECDEC_HD float temperature_of(const SamplingControls& c, int64_t b) {
    return c.temperature == nullptr ? 1.0f : c.temperature[b];
}

SPECDEC_HD bool is_greedy(const SamplingControls& c, int64_t b) {
    return is_greedy(temperature_of(c, b)) || (c.top_k != nullptr && c.top_k[b] == 1);
}

SPECDEC_HD Filters filters_of(const SamplingControls& c, int64_t b, int64_t vocab_size) {
    Filters f{vocab_size, 1.0f, -__builtin_huge_valf(), c.joint, true};
    if (c.top_k != nullptr && c.top_k[b] > 0 && c.top_k[b] < vocab_size) f.top_k = c.top_k[b];
    if (c.top_p != nullptr && c.top_p[b] < 1.0f) f.top_p = c.top_p[b];
    if (c.min_p != nullptr && c.min_p[b] > 0.0f) {
        f.min_cut = static_cast<float>(log2_of(c.min_p[b] < 1.0f ? c.min_p[b] : 1.0f));
    }
    f.none = f.top_k == vocab_size && f.top_p == 1.0f && f.min_cut == -__builtin_huge_valf();
    return f;
}

// Mass of an id in sums that must not depend on their order: 2^((z - max) * c) in units of 2^-40.
// 2^18 ids of the largest weight still fit.
SPECDEC_HD uint64_t mass_units(float weight) {
    return static_cast<uint64_t>(weight * 1099511627776.0f);
}

}  // namespace specdec
