// The emulator's side of csrc/kernels/common/device.h: the same names with the same meaning.
#pragma once

#include <cstdint>

#include "cuda_math.h"
#include "cuda_names.h"
#include "types.h"

namespace specdec::ptx {

// ---- asynchronous copies global -> shared -------------------------------------------------------

inline void cp_async16(void* smem, const void* gmem, EMU_SITE) {
    emu::async_copy(smem, gmem, 16, true, EMU_HERE);
}
inline void cp_async16_zfill(void* smem, const void* gmem, bool valid, EMU_SITE) {
    emu::async_copy(smem, gmem, 16, valid, EMU_HERE);
}
inline void cp_async4(void* smem, const void* gmem, EMU_SITE) {
    emu::async_copy(smem, gmem, 4, true, EMU_HERE);
}
inline void cp_async_commit() {
    emu::async_commit();
}
template <int kPending>
inline void cp_async_wait(EMU_SITE) {
    emu::async_wait(kPending, EMU_HERE);
}

// ---- matrix fragments ---------------------------------------------------------------------------

template <int kMatrices, bool kTranspose>
inline void ldmatrix(uint32_t (&r)[kMatrices], const void* row, emu::Site site) {
    emu::LdmatrixArgs args{row, kMatrices, kTranspose, {}};
    emu::warp_collective(emu::WarpOp::kLdmatrix, 0xffffffffu, &args, site);
    for (int i = 0; i < kMatrices; ++i) r[i] = args.result[i];
}
inline void ldmatrix_x4(uint32_t (&r)[4], const void* row, EMU_SITE) {
    ldmatrix<4, false>(r, row, EMU_HERE);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, EMU_SITE) {
    ldmatrix<4, true>(r, row, EMU_HERE);
}
inline void ldmatrix_x2(uint32_t (&r)[2], const void* row, EMU_SITE) {
    ldmatrix<2, false>(r, row, EMU_HERE);
}
inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row, EMU_SITE) {
    ldmatrix<2, true>(r, row, EMU_HERE);
}

template <class T>
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                         const float (&c)[4], EMU_SITE) {
    static_assert(std::is_same_v<T, bf16> || std::is_same_v<T, f16>, "bf16 or f16 operands");
    emu::MmaArgs args{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {c[0], c[1], c[2], c[3]}, {}};
    constexpr emu::WarpOp kOp =
        std::is_same_v<T, bf16> ? emu::WarpOp::kMmaBf16 : emu::WarpOp::kMmaF16;
    emu::warp_collective(kOp, 0xffffffffu, &args, EMU_HERE);
    for (int i = 0; i < 4; ++i) d[i] = args.d[i];
}

// ---- thread index -------------------------------------------------------------------------------

inline uint32_t thread_x() {
    return threadIdx.x;
}

// ---- arithmetic ---------------------------------------------------------------------------------

inline float ex2(float x) {
    return emu::approx_exp2(x);
}
inline float lg2(float x) {
    return emu::approx_log2(x);
}
inline float rcp(float x) {
    return emu::flush_subnormal(1.0f / emu::flush_subnormal(x));
}

// ---- conversions, round to nearest even ---------------------------------------------------------

bf16 float_to_bf16(float x);
f16 float_to_f16(float x);
float f16_to_float(f16 x);
inline uint32_t pack_bf16(float low, float high) {
    return float_to_bf16(low).bits | static_cast<uint32_t>(float_to_bf16(high).bits) << 16;
}
inline uint32_t pack_f16(float low, float high) {
    return float_to_f16(low).bits | static_cast<uint32_t>(float_to_f16(high).bits) << 16;
}

// ---- products of pairs ---------------------------------------------------------------------------

inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    const auto half = [](uint32_t x, int shift) {
        return to_float(bf16{static_cast<uint16_t>(x >> shift)});
    };
    return pack_bf16(half(a, 0) * half(b, 0), half(a, 16) * half(b, 16));
}
inline uint32_t mul_f16x2(uint32_t a, uint32_t b) {
    const auto half = [](uint32_t x, int shift) {
        return f16_to_float(f16{static_cast<uint16_t>(x >> shift)});
    };
    return pack_f16(half(a, 0) * half(b, 0), half(a, 16) * half(b, 16));
}

// ---- memory model -------------------------------------------------------------------------------

template <class T>
inline T ld_acquire(const T* address, EMU_SITE) {
    static_assert(std::is_integral_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "32 or 64 bits");
    return static_cast<T>(emu::load_acquire(address, sizeof(T), EMU_HERE));
}
template <class T>
inline void st_release(T* address, std::common_type_t<T> value, EMU_SITE) {
    static_assert(std::is_integral_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "32 or 64 bits");
    emu::store_release(address, static_cast<uint64_t>(value), sizeof(T), EMU_HERE);
}
inline uint32_t atom_add_acq_rel(uint32_t* address, uint32_t value, EMU_SITE) {
    return static_cast<uint32_t>(emu::atomic_rmw(emu::AtomicOp::kAdd, emu::AtomicType::kU32,
                                                 address, value, 0, true, EMU_HERE));
}

// ---- barriers -----------------------------------------------------------------------------------

inline void bar_sync(int id, int threads, EMU_SITE) {
    emu::named_barrier(id, threads, true, EMU_HERE);
}
inline void bar_arrive(int id, int threads, EMU_SITE) {
    emu::named_barrier(id, threads, false, EMU_HERE);
}
inline void grid_sync(EMU_SITE) {
    emu::grid_barrier(EMU_HERE);
}

// Launches run one after the other here, so the previous kernel has always ended.
inline void grid_dependency_wait() {}
inline void grid_dependency_trigger() {}

}  // namespace specdec::ptx
