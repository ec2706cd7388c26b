// inject_kv: K and V of context rows, for all layers of a block drafter, into their paged caches.
//   For every row r that is written (below), every layer l and every head h:
//       y = x / sqrt(mean(x^2) + eps) * k_norm_weight[l],            x = kv[r, l, 0, h]
//       k_caches[l][slots[r]] = y, its first rotary_dim channels turned by the angles of positions[r]
//       v_caches[l][slots[r]] = kv[r, l, 1, h]
//   in float32, rounded once. Nothing is written where the slot is no place of the cache, the position is
//   outside the tables, or the row is not among the first commit_rows of its request.
#pragma once

#include "floats_view.h"
#include "isa.h"
#include "kv_store.h"
#include "rows.h"

namespace specdec {

struct LayerCache {
    View<void, 4> k;  // [num_pages, page_size, Hkv, D], any strides
    View<void, 4> v;
};

// Which rows are written, beside what their slots and positions say.
struct CommittedRows {
    const int32_t* cu_rows = nullptr;      // [B+1], or null: every row
    const int32_t* commit_rows = nullptr;  // [B] leading rows of each request, or null: all of them
    int64_t batch = 0;
    int64_t num_rows = 0;  // R

    // offsets: how many entries of cu_rows are at most `row`.
    SPECDEC_HD bool has(int64_t row, int64_t offsets) const {
        const int64_t b = offsets - 1;
        if (b < 0 || b >= batch) return false;
        const RowSpan rows = rows_of_request(cu_rows, b, num_rows);
        const int64_t end = commit_rows == nullptr || commit_rows[b] > rows.count
                                ? rows.count
                                : int64_t{commit_rows[b]};
        return row >= rows.first && row - rows.first < end;
    }
};

constexpr int64_t kMaxHeadDim = 1024;
constexpr int64_t kMaxKvHeads = 4096;

struct InjectKvParams {
    View<const void, 5> kv;    // [R, L, 2, Hkv, D]
    FloatsView k_norm_weight;  // [L, D], or null: K keeps its length
    FloatsView cos;            // [max_position, rotary_dim / 2]
    FloatsView sin;            // the same
    int64_t max_position;
    int64_t rotary_pairs;      // rotary_dim / 2
    IndexView positions;       // [R]
    IndexView slots;           // [R], page * page_size + offset
    const LayerCache* layers;  // [L], on the host
    CommittedRows committed;
    LayerScale k_scale;
    LayerScale v_scale;
    DType dtype;        // of kv
    DType cache_dtype;  // the same, or kF8E4M3
    float eps;
    bool interleaved;  // pairs of channels are (2 j, 2 j + 1), else (j, j + rotary_pairs)

    template <class T>
    SPECDEC_HD const T* head(int64_t r, int64_t l, int64_t side, int64_t h) const {
        return static_cast<const T*>(kv.data) + r * kv.stride[0] + l * kv.stride[1] +
               side * kv.stride[2] + h * kv.stride[3];
    }
};

// The channels of pair j are first + j * step and second + j * step.
struct RotaryPairs {
    int64_t second;
    int64_t step;
};

SPECDEC_HD RotaryPairs rotary_pairs_of(bool interleaved, int64_t pairs) {
    return interleaved ? RotaryPairs{1, 2} : RotaryPairs{pairs, 1};
}

// By an angle of cosine c and sine s.
SPECDEC_HD void turn(float& a, float& b, float c, float s) {
    const float turned = a * c - b * s;
    b = b * c + a * s;
    a = turned;
}

namespace cuda {
Status inject_kv(const InjectKvParams& p, Stream stream);
}

}  // namespace specdec

SPECDEC_DECLARE_CPU(inject_kv, ::specdec::InjectKvParams)
