// What penalties, bias and a bitmask make of logits on CUDA, in registers: x becomes z (controls.h).
//
// Loops over drafts and bias entries are the outer ones: a list entry is one uniform load per thread,
// and only the thread that holds its id does anything. Steps are rounded one by one and in the order
// of controls.h, so z is the same bits wherever it is computed: in a tile, a quad or a single entry.
#pragma once

#include "controls.h"
#include "vocab_rows.cuh"

namespace specdec::cuda {

// The drafts on the path to a row that token_counts do not hold yet: nodes `node`, its parent and so
// on, without the anchor 0. In a chain (no parents) that is node, node - 1, ..., 1.
struct DraftsBefore {
    IndexView ids;      // of the call
    IndexView parents;  // of the call, local node numbers; data nullptr: a chain
    int64_t first = 0;  // row of the anchor
    int64_t node = 0;   // 0: none

    __device__ __forceinline__ int64_t before(int64_t u) const {
        return parents.data == nullptr ? u - 1 : parents[first + u];
    }
};

// Target id of a column of the row: the column itself, or through d2t.
struct IdMap {
    const int64_t* d2t = nullptr;
    bool is_offset = false;

    __device__ __forceinline__ int64_t operator()(int64_t column) const {
        if (d2t == nullptr) return column;
        return is_offset ? column + d2t[column] : d2t[column];
    }
};

// Edits of one row; `none` when they change nothing.
struct RowEdits {
    Penalties penalties{1.0f, 0.0f, 0.0f, nullptr, nullptr, true};
    BiasRange bias{0, 0};
    Allowed allowed{nullptr, false};
    IndexView bias_ids;
    const float* bias_values = nullptr;
    DraftsBefore drafts;
    IdMap map;
    int64_t vocab_size = 0;  // target ids there are
    bool none = true;

    // Target id of a column, -1 where that is none.
    __device__ __forceinline__ int32_t target_of(int64_t column) const {
        const int64_t id = map(column);
        return id >= 0 && id < vocab_size ? static_cast<int32_t>(id) : -1;
    }
};

// Edits of row r of the call, of request b.
__device__ __forceinline__ RowEdits edits_of(const SamplingControls& c, int64_t b, int64_t r,
                                             const DraftsBefore& drafts, const IdMap& map,
                                             int64_t vocab_size) {
    RowEdits e;
    if (!c.any_edits && map.d2t == nullptr) return e;
    e.penalties = penalties_of(c, b);
    e.bias = bias_of(c, b);
    e.allowed = allowed_of(c, r);
    e.bias_ids = c.bias_ids;
    e.bias_values = c.bias_values;
    e.drafts = drafts;
    e.map = map;
    e.vocab_size = vocab_size;
    e.none = e.penalties.none && e.bias.begin == e.bias.end && !e.allowed.constrained &&
             map.d2t == nullptr;
    return e;
}

// Target ids that the callers of one edit hold between them: lists skip the others at once.
struct IdSpan {
    int64_t first, end;

    __device__ __forceinline__ bool holds(int64_t id) const { return id >= first && id < end; }
};

// x[i], of target id id[i], becomes z. An id that is none (also: past the vocabulary) gets -inf.
template <int kCount>
__device__ __forceinline__ void edit(const RowEdits& e, IdSpan span, const int32_t (&id)[kCount],
                                     float (&x)[kCount]) {
    const int32_t vocab_size = static_cast<int32_t>(e.vocab_size);
    const auto is_known = [&](int32_t v) { return v >= 0 && v < vocab_size; };
    if (!e.penalties.none) {
        int32_t count[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            count[i] = is_known(id[i]) ? __ldg(e.penalties.counts + id[i]) : 0;
        }
        for (int64_t u = e.drafts.node; u > 0; u = e.drafts.before(u)) {
            const int64_t draft = e.drafts.ids[e.drafts.first + u];
            if (!span.holds(draft)) continue;
#pragma unroll
            for (int i = 0; i < kCount; ++i) count[i] = counted(count[i], id[i] == draft);
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const bool in_prompt = e.penalties.prompt != nullptr && is_known(id[i]) &&
                                   bit_of(e.penalties.prompt, id[i]);
            x[i] = penalised(e.penalties, x[i], count[i], in_prompt);
        }
    }
    for (int64_t k = e.bias.begin; k < e.bias.end; ++k) {
        const int64_t biased = e.bias_ids[k];
        if (!span.holds(biased)) continue;
        const float value = e.bias_values[k];
#pragma unroll
        for (int i = 0; i < kCount; ++i) x[i] = id[i] == biased ? x[i] + value : x[i];
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if (!is_known(id[i]) || !e.allowed(id[i])) x[i] = minus_infinity();
    }
}

// --- A row with its edits ---------------------------------------------------------------------------
struct VocabRow {
    Row row;              // data nullptr: there is none
    int64_t columns = 0;  // entries in use
    RowEdits edits;

    __device__ __forceinline__ bool exists() const { return row.data != nullptr; }

    // The row before its edits.
    __device__ __forceinline__ VocabRow raw() const {
        VocabRow other;
        other.row = row;
        other.columns = columns;
        return other;
    }

    // Edits entries of the columns column_of(i), all of them in [first, end).
    template <int kCount, class ColumnOf>
    __device__ __forceinline__ void apply(int64_t first, int64_t end, ColumnOf column_of,
                                          float (&x)[kCount]) const {
        if (edits.none) return;
        const bool is_mapped = edits.map.d2t != nullptr;
        int32_t id[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const int64_t column = column_of(i);
            id[i] = static_cast<int32_t>(column);
            if (is_mapped) id[i] = column < columns ? edits.target_of(column) : -1;
        }
        const IdSpan span = is_mapped ? IdSpan{0, edits.vocab_size} : IdSpan{first, end};
        edit(edits, span, id, x);
    }

    // The thread's 16 entries of a tile, in groups of a quad. All loads come first; the edits then go
    // quad by quad, which needs fewer registers.
    __device__ __forceinline__ void load_tile(int tile, float (&x)[kEntriesPerThread]) const {
        cuda::load_tile<kQuad>(row, columns, tile, x);
        if (edits.none) return;
#pragma unroll
        for (int i = 0; i < kEntriesPerThread; i += kQuad) {
            const int64_t first = tile * kVocabTile + entry_place<kQuad>(i);
            float quad[kQuad] = {x[i], x[i + 1], x[i + 2], x[i + 3]};
            apply(
                first, first + kQuad, [&](int k) { return first + k; }, quad);
#pragma unroll
            for (int k = 0; k < kQuad; ++k) x[i + k] = quad[k];
        }
    }

    // The lane's quads of the strips that begin at `first`, by a whole warp. All loads come first; the
    // edits then go quad by quad, which needs fewer registers.
    template <int kCount>
    __device__ __forceinline__ void load_strips(int64_t first, float (&x)[kCount]) const {
        cuda::load_strips(row, columns, first, x);
        if (edits.none) return;
#pragma unroll
        for (int i = 0; i < kCount; i += kQuad) {
            const int64_t quad = first + strip_place(i);
            float z[kQuad] = {x[i], x[i + 1], x[i + 2], x[i + 3]};
            apply(
                quad, quad + kQuad, [&](int k) { return quad + k; }, z);
#pragma unroll
            for (int k = 0; k < kQuad; ++k) x[i + k] = z[k];
        }
    }

    // The entries first..first+3.
    __device__ __forceinline__ void load_quad(int64_t first, float (&x)[kQuad]) const {
        cuda::load_quad(row, columns, first, x);
        apply(
            first, first + kQuad, [&](int i) { return first + i; }, x);
    }

    __device__ __forceinline__ float at(int64_t column) const {
        float x[1] = {entry_of(row, column)};
        apply(
            column, column + 1, [&](int) { return column; }, x);
        return x[0];
    }
};

}  // namespace specdec::cuda
