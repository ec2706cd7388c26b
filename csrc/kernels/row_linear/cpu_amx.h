// row_linear on the CPU for bf16 with AMX tiles. Included by cpu.cpp only, for the instruction set `amx`.
//
// Y^T [16 outputs][16 rows] float32 += W X^T, 32 of k at a time: rows of weights lie as the left factor
// wants them, x is turned once a call. A sum is one chain over blocks of 32 of k, and inside a block what
// the instruction does; a tile's rows and columns do not know each other, so every call of bf16 comes
// through here, however few its rows are, and a row has the same bits in all of them: others than those
// of cpu_fma.h. The instruction takes subnormals as zeros, of inputs and of sums.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu_pair_tiles.h"
#include "kept_memory.h"
#include "params.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

constexpr int64_t kPanelRows = 256;  // x of a panel stays in the second cache
constexpr int64_t kStripBytes = 256 << 10;

// Outputs that a thread takes at a time: two strips of 16, which share the loads of x, or one where two of
// them and the two that come next would not stay in the second cache.
template <class T>
int64_t block_outputs(int64_t size) {
    return size * 2 * kTileRows > kStripBytes ? kTileRows : 2 * kTileRows;
}

// --- 1. Rows as right factors --------------------------------------------------------------------

struct Panel {
    const bf16*
        x;  // [K / 32][strips][16 pairs][16 rows][2]; rows and k that do not exist are zeros
    int64_t first_row, rows, strips;

    int64_t step() const { return strips * kTileBf16; }  // from 32 of k to the next
};

template <class T>
Panel make_panel(const RowLinearParams& p, int64_t first_row) {
    const int64_t size = p.x.size, rows = std::min(kPanelRows, p.x.rows - first_row);
    Panel panel{nullptr, first_row, rows, (rows + kTileRows - 1) / kTileRows};
    static thread_local KeptMemory memory;
    bf16* x =
        reinterpret_cast<bf16*>(memory.floats(whole_tiles(size) * panel.strips * kTileRows / 2));
    panel.x = x;
    for (int64_t k = 0; k < size; k += 32) {
        for (int64_t row = 0; row < panel.strips * kTileRows; row += kTileRows, x += kTileBf16) {
            __m512i words[kTileRows];
#pragma GCC unroll 16
            for (int i = 0; i < kTileRows; ++i) {
                bf16 room[32];
                words[i] = row + i < rows
                               ? load_channels(p.x.piece(first_row + row + i, k,
                                                         std::min<int64_t>(32, size - k), room),
                                               size - k)
                               : _mm512_setzero_si512();
            }
            turn(words);
#pragma GCC unroll 16
            for (int i = 0; i < kPairs; ++i) _mm512_store_si512(x + 32 * i, words[i]);
        }
    }
    return panel;
}

// --- 2. Rows of weights as left factors ----------------------------------------------------------

// Sixteen outputs: whole blocks of 32 of k where they lie, what is left of k as a copy.
struct Strip {
    const bf16* at = nullptr;
    int64_t bytes = 0;  // from output to output
    alignas(64) bf16 rest[kTileBf16];
};

// Outputs output .. output + count - 1. Fewer than 16 are copied to `room` [16][whole_tiles(K)], zeros
// behind them: the rows of a tile must not be read past the end of the weights.
inline void find_strip(const View<const bf16, 2>& weight, int64_t output, int64_t count,
                       std::vector<bf16>& room, Strip& strip) {
    const int64_t size = weight.size[1], whole = size / 32 * 32;
    strip.at = weight.at(output);
    strip.bytes = 2 * weight.stride[0];
    if (count < kTileRows) {
        room.assign(kTileRows * whole + 1, bf16{});
        for (int64_t i = 0; i < count; ++i) {
            std::memcpy(room.data() + i * whole, weight.at(output + i), 2 * whole);
        }
        strip.at = room.data();
        strip.bytes = 2 * whole;
    }
    if (whole == size) return;
    for (int64_t i = 0; i < kTileRows; ++i) {
        const __m512i rest = i < count ? load_channels(weight.at(output + i) + whole, size - whole)
                                       : _mm512_setzero_si512();
        _mm512_store_si512(strip.rest + 32 * i, rest);
    }
}

// Asks for rows begin .. end-1 of the weights, which come next, line by line in the order of their
// addresses: the processor's own prefetchers join in.
class Fetch {
  public:
    Fetch(const View<const bf16, 2>& weight, int64_t begin, int64_t end)
        : row_(reinterpret_cast<const char*>(weight.at(begin))),
          stride_(2 * weight.stride[0]),
          bytes_(2 * weight.size[1]),
          rows_(end - begin) {
        if (rows_ > 1 && stride_ == bytes_) {
            bytes_ *= rows_;
            rows_ = 1;
        }
    }
    SPECDEC_SIMD void lines(int count) {
        for (; count > 0 && rows_ > 0; --count) {
            __builtin_prefetch(row_ + at_, 0, 2);
            at_ += 64;
            if (at_ < bytes_) continue;
            at_ = 0;
            row_ += stride_;
            --rows_;
        }
    }

  private:
    const char* row_;
    int64_t stride_, bytes_, rows_, at_ = 0;
};

// --- 3. Sums -------------------------------------------------------------------------------------

template <int Outs, int Rows>
SPECDEC_SIMD void multiply_block(const bf16* const (&w)[2], const int64_t (&w_bytes)[2],
                                 const bf16* x) {
    _tile_loadd(6, x, 64);
    _tile_loadd(4, w[0], w_bytes[0]);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (Outs == 2) {
        _tile_loadd(5, w[1], w_bytes[1]);
        _tile_dpbf16ps(1, 5, 6);
    }
    if constexpr (Rows == 2) {
        _tile_loadd(7, x + kTileBf16, 64);
        _tile_dpbf16ps(2, 4, 7);
        if constexpr (Outs == 2) _tile_dpbf16ps(3, 5, 7);
    }
}

// Sums of Outs x 16 outputs and Rows x 16 rows: [row strip][output strip][16 outputs][16 rows].
template <int Outs, int Rows>
void multiply(const Strip (&strips)[2], int64_t size, const bf16* x, int64_t x_step, int lines,
              Fetch& fetch, float* sums) {
    tile_fence();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const bf16* w[] = {strips[0].at, strips[1].at};
    const int64_t w_bytes[] = {strips[0].bytes, strips[1].bytes};
    for (int64_t k = 0; k + 32 <= size; k += 32, x += x_step) {
        multiply_block<Outs, Rows>(w, w_bytes, x);
        fetch.lines(lines);
        w[0] += 32;
        if constexpr (Outs == 2) w[1] += 32;
    }
    if (size % 32 != 0) {
        multiply_block<Outs, Rows>({strips[0].rest, strips[1].rest}, {64, 64}, x);
    }
    constexpr int kSums = kTileRows * kTileRows;
    _tile_stored(0, sums, 64);
    if constexpr (Outs == 2) _tile_stored(1, sums + kSums, 64);
    if constexpr (Rows == 2) {
        _tile_stored(2, sums + 2 * kSums, 64);
        if constexpr (Outs == 2) _tile_stored(3, sums + 3 * kSums, 64);
    }
    tile_fence();
}

// Writes 16 x 16 sums, [output][row].
inline void store_sums(const RowLinearParams& p, const float* sums, int64_t row, int64_t rows,
                       int64_t output, int64_t outputs) {
    __m512i words[kTileRows];
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) words[i] = _mm512_loadu_si512(sums + i * kTileRows);
    turn(words);
    const bf16* bias = static_cast<const bf16*>(p.bias);
    const __mmask16 some = static_cast<__mmask16>((1u << outputs) - 1);
    for (int64_t i = 0; i < rows; ++i) {
        __m512 sum = reinterpret_cast<__m512>(words[i]);
        if (bias != nullptr) {
            const __m512i wide =
                _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, bias + output));
            sum = _mm512_add_ps(sum, reinterpret_cast<__m512>(_mm512_slli_epi32(wide, 16)));
        }
        if (p.rounded) {
            _mm256_mask_storeu_epi16(p.y.as<bf16>().at(row + i, output), some, round_to_bf16(sum));
        } else {
            _mm512_mask_storeu_ps(p.y.as<float>().at(row + i, output), some, sum);
        }
    }
}

// All rows of the panel for outputs begin .. end-1.
template <class T>
void finish_outputs(const RowLinearParams& p, const Panel& panel, int64_t begin, int64_t end) {
    static thread_local std::vector<bf16> room;  // only the last strip of the weights can need it
    const View<const bf16, 2> weight = p.weight.as<const bf16>();
    const int64_t size = weight.size[1], step = block_outputs<T>(size);
    TileRegisters registers;
    Strip strips[2];
    alignas(64) float sums[4][kTileRows * kTileRows];
    for (int64_t output = begin; output < end; output += step) {
        const int64_t next = std::min(output + step, end);
        const int outs = next - output > kTileRows ? 2 : 1;
        for (int o = 0; o < outs; ++o) {
            const int64_t first = output + o * kTileRows;
            find_strip(weight, first, std::min<int64_t>(kTileRows, next - first), room, strips[o]);
        }
        Fetch fetch(weight, next, std::min(next + step, end));
        const int passes = static_cast<int>((panel.strips + 1) / 2);
        const int lines =
            (outs * kTileRows + passes - 1) / passes;  // what a step reads, over all passes
        for (int64_t strip = 0; strip < panel.strips; strip += 2) {
            const bf16* x = panel.x + strip * kTileBf16;
            const int rows = strip + 1 < panel.strips ? 2 : 1;
            const auto sum_up = outs == 2 ? (rows == 2 ? multiply<2, 2> : multiply<2, 1>)
                                          : (rows == 2 ? multiply<1, 2> : multiply<1, 1>);
            sum_up(strips, size, x, panel.step(), lines, fetch, sums[0]);
            for (int r = 0; r < rows; ++r) {
                for (int o = 0; o < outs; ++o) {
                    const int64_t row = (strip + r) * kTileRows, first = output + o * kTileRows;
                    store_sums(p, sums[2 * r + o], panel.first_row + row,
                               std::min<int64_t>(kTileRows, panel.rows - row), first,
                               std::min<int64_t>(kTileRows, next - first));
                }
            }
        }
    }
}

}  // namespace
}  // namespace specdec::cpu::SPECDEC_ISA
