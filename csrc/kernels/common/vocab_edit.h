// Penalties, bias and bitmask on a tile of logits on the CPU: from raw to processed logits z
// (controls.h). Most entries of a tile are dealt with sixteen at a time; ids that are drafts before the
// row or have a bias are then done again one by one, from their raw logit.
#pragma once

#include <vector>

#include "controls.h"
#include "simd.h"
#include "vocab_tile.h"

namespace specdec::cpu::SPECDEC_ISA {

// What changes the logits of one row. Columns are token ids, or draft ids with a table to token ids.
struct RowEdits {
    const SamplingControls* controls = nullptr;
    Penalties penalties{1.0f, 0.0f, 0.0f, nullptr, nullptr, true};
    Allowed allowed{nullptr, false};
    BiasRange bias{0, 0};
    const int64_t* drafts = nullptr;  // tokens before the row that are not in the counts
    int64_t num_drafts = 0;
    const int64_t* d2t = nullptr;
    bool d2t_is_offset = true;
    int64_t vocab_size = 0;

    bool none() const {
        return d2t == nullptr && penalties.none && !allowed.constrained && bias.begin == bias.end;
    }

    int64_t id_of(int64_t column) const {
        return d2t == nullptr ? column : d2t_is_offset ? column + d2t[column] : d2t[column];
    }

    // z of one raw logit.
    float z_of(float x, int64_t column) const {
        const int64_t id = id_of(column);
        if (id < 0 || id >= vocab_size) return kMinusInfinity;
        if (!penalties.none) {
            int32_t count = penalties.counts[id];
            for (int64_t i = 0; i < num_drafts; ++i) count = counted(count, drafts[i] == id);
            x = penalised(penalties, x, count,
                          penalties.prompt != nullptr && bit_of(penalties.prompt, id));
        }
        for (int64_t i = bias.begin; i < bias.end; ++i) {
            if (controls->bias_ids[i] == id) x = x + controls->bias_values[i];
        }
        return allowed(id) ? x : kMinusInfinity;
    }

    // z of columns first..first+n-1 (a tile).
    template <class T>
    void tile(const T* x, int64_t first, int64_t n, float* z) const {
        if (d2t != nullptr) {
            for (int64_t i = 0; i < n; ++i) z[i] = z_of(to_float(x[i]), first + i);
            return;
        }
        for (int64_t i = 0; i < n; i += kLanes) store(z + i, lanes(x, first, i, n));
        const auto again = [&](int64_t id) {
            const int64_t i = id - first;
            if (i >= 0 && i < n) z[i] = z_of(to_float(x[i]), id);
        };
        if (!penalties.none) {
            for (int64_t i = 0; i < num_drafts; ++i) again(drafts[i]);
        }
        for (int64_t i = bias.begin; i < bias.end; ++i) again(controls->bias_ids[i]);
    }

  private:
    // Sixteen entries, as `penalised` and the bitmask treat one.
    template <class T>
    SPECDEC_SIMD V16 lanes(const T* x, int64_t first, int64_t i, int64_t n) const {
        V16 z = row_lanes(x, i, n);
        const int64_t id = first + i;
        if (!penalties.none) {
            I16 counts;
            if (i + kLanes <= n) {
                counts = load(penalties.counts + id);
            } else {
                alignas(64) int32_t lane[kLanes] = {};
                for (int64_t l = 0; i + l < n; ++l) lane[l] = penalties.counts[id + l];
                counts = load(lane);
            }
            const I16 seen = counts > set1(0);
            if (penalties.repetition != 1.0f) {
                const I16 hit =
                    penalties.prompt == nullptr ? seen : seen | bits_of(penalties.prompt, id);
                const V16 r = set1(penalties.repetition);
                z = select(hit, select(z > set1(0.0f), z / r, z * r), z);
            }
            if (penalties.frequency != 0.0f || penalties.presence != 0.0f) {
                const V16 less =
                    set1(penalties.frequency) * to_floats(counts) + set1(penalties.presence);
                z = select(seen, z - less, z);
            }
        }
        if (allowed.constrained) {
            const I16 yes = allowed.words == nullptr ? set1(0) : bits_of(allowed.words, id);
            z = select(yes, z, set1(kMinusInfinity));
        }
        return z;
    }

    // Bits id..id+15 of a bit set; id is a multiple of 16.
    SPECDEC_SIMD static I16 bits_of(const int32_t* words, int64_t id) {
        alignas(64) static constexpr int32_t kBit[kLanes] = {
            1,      1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
            1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
        const uint32_t word = static_cast<uint32_t>(words[id / 32]);
        const I16 bit = load(kBit);
        return (set1(static_cast<int32_t>(word >> (id % 32) & 0xffffu)) & bit) == bit;
    }
};

}  // namespace specdec::cpu::SPECDEC_ISA
