// ldmatrix, mma and 16-bit floats. The layouts are those of the PTX manual; tests compare them with
// CuTe.
#include <cmath>
#include <cstring>

#include "hooks.h"
#include "ptx.h"
#include "runtime.h"

namespace specdec::ptx {

bf16 float_to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bf16 result{};
    if (x != x) {
        result.bits = 0x7fff;
    } else {
        result.bits = static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    }
    return result;
}

f16 float_to_f16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000u;
    const float magnitude = std::fabs(x);
    f16 result{};
    if (x != x) {
        result.bits = 0x7fff;
    } else if (magnitude >= 65520.0f) {
        result.bits = static_cast<uint16_t>(sign | 0x7c00u);
    } else if (magnitude < 6.103515625e-5f) {
        // Subnormal: the spacing is 2^-24, nearbyint rounds to even.
        result.bits = static_cast<uint16_t>(
            sign | static_cast<uint32_t>(std::nearbyint(magnitude * 16777216.0f)));
    } else {
        const uint32_t rounded = (bits & 0x7fffffffu) + 0xfffu + (bits >> 13 & 1u);
        result.bits = static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
    }
    return result;
}

float f16_to_float(f16 x) {
    const uint32_t exponent = x.bits >> 10 & 0x1fu;
    const uint32_t mantissa = x.bits & 0x3ffu;
    float magnitude;
    if (exponent == 0x1f) {
        magnitude = mantissa == 0 ? INFINITY : NAN;
    } else if (exponent == 0) {
        magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    } else {
        magnitude =
            std::ldexp(static_cast<float>(mantissa | 0x400u), static_cast<int>(exponent) - 25);
    }
    return (x.bits & 0x8000u) != 0 ? -magnitude : magnitude;
}

}  // namespace specdec::ptx

namespace specdec::emu {

namespace {

constexpr int kRows = 16;    // m
constexpr int kColumns = 8;  // n
constexpr int kDepth = 16;   // k

// All 65536 values once: mma spends most of its time in conversions.
const float* f16_table() {
    static float* table = [] {
        auto* values = new float[65536];
        for (uint32_t i = 0; i < 65536; ++i) {
            f16 x{};
            x.bits = static_cast<uint16_t>(i);
            values[i] = ptx::f16_to_float(x);
        }
        return values;
    }();
    return table;
}

float widen(uint32_t bits, bool is_bf16) {
    if (!is_bf16) return f16_table()[bits];
    const uint32_t wide = bits << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
}

// Lane 4 * g + t holds, of each 8x8 piece, row g and columns 2t, 2t + 1.
void multiply(Rendezvous& meeting) {
    const bool is_bf16 = meeting.op == WarpOp::kMmaBf16;
    float a[kRows][kDepth];
    float b[kColumns][kDepth];
    for (int lane = 0; lane < 32; ++lane) {
        const auto* args = static_cast<const MmaArgs*>(meeting.args[lane]);
        const int g = lane / 4;
        const int t = lane % 4;
        for (int piece = 0; piece < 4; ++piece) {
            const int row = g + 8 * (piece % 2);
            const int k = 2 * t + 8 * (piece / 2);
            a[row][k] = widen(args->a[piece] & 0xffffu, is_bf16);
            a[row][k + 1] = widen(args->a[piece] >> 16, is_bf16);
        }
        for (int piece = 0; piece < 2; ++piece) {
            const int k = 2 * t + 8 * piece;
            b[g][k] = widen(args->b[piece] & 0xffffu, is_bf16);
            b[g][k + 1] = widen(args->b[piece] >> 16, is_bf16);
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        auto* args = static_cast<MmaArgs*>(meeting.args[lane]);
        for (int i = 0; i < 4; ++i) {
            const float* row = a[lane / 4 + 8 * (i / 2)];
            const float* column = b[2 * (lane % 4) + i % 2];
            float sum = args->c[i];
            for (int k = 0; k < kDepth; ++k) sum += row[k] * column[k];
            args->d[i] = sum;
        }
    }
}

void load_matrices(Rendezvous& meeting, Warp& warp) {
    const auto* first = static_cast<const LdmatrixArgs*>(meeting.args[0]);
    const int matrices = first->matrices;
    const Block& block = *warp.block;
    uint16_t rows[4][8][8];
    for (int matrix = 0; matrix < matrices; ++matrix) {
        for (int row = 0; row < 8; ++row) {
            const int lane = 8 * matrix + row;
            const auto* args = static_cast<const LdmatrixArgs*>(meeting.args[lane]);
            const auto* from = static_cast<const unsigned char*>(args->row);
            if (args->matrices != matrices || args->transpose != first->transpose) {
                fail(meeting.site, "ldmatrix: lanes disagree about the form of the instruction");
            }
            if (reinterpret_cast<uintptr_t>(from) % 16 != 0) {
                fail(meeting.site, "ldmatrix: the row of lane %d is not aligned to 16 bytes", lane);
            }
            if (from < block.shared || from + 16 > block.shared + block.shared_bytes) {
                fail(meeting.site, "ldmatrix: the row of lane %d is not in shared memory", lane);
            }
            std::memcpy(rows[matrix][row], from, 16);
        }
    }
    if constexpr (kHooks) hooks::ldmatrix(warp, meeting, 8 * matrices);
    for (int lane = 0; lane < 32; ++lane) {
        auto* args = static_cast<LdmatrixArgs*>(meeting.args[lane]);
        const int g = lane / 4;
        const int t = lane % 4;
        for (int matrix = 0; matrix < matrices; ++matrix) {
            const auto& m = rows[matrix];
            const uint32_t low = first->transpose ? m[2 * t][g] : m[g][2 * t];
            const uint32_t high = first->transpose ? m[2 * t + 1][g] : m[g][2 * t + 1];
            args->result[matrix] = low | high << 16;
        }
    }
}

}  // namespace

void complete_matrix_op(Rendezvous& meeting, Warp& warp) {
    if (meeting.op == WarpOp::kLdmatrix) {
        load_matrices(meeting, warp);
    } else {
        multiply(meeting);
    }
}

}  // namespace specdec::emu
