// Float and integer intrinsics. The approximate ones use the host's libm: their error on a GPU is
// not modelled, which is why tests compare decisions inside a stated band.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace specdec::emu {

inline float flush_subnormal(float x) {
    return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x;
}
inline float approx_exp2(float x) {
    return flush_subnormal(::exp2f(flush_subnormal(x)));
}
inline float approx_log2(float x) {
    return ::log2f(flush_subnormal(x));
}
inline float approx_exp(float x) {
    return ::expf(x);
}
inline float approx_exp10(float x) {
    return ::exp10f(x);
}
inline float approx_log(float x) {
    return ::logf(x);
}
inline float approx_log10(float x) {
    return ::log10f(x);
}
inline float approx_sin(float x) {
    return ::sinf(x);
}
inline float approx_cos(float x) {
    return ::cosf(x);
}
inline float approx_pow(float x, float y) {
    return ::powf(x, y);
}

}  // namespace specdec::emu

// glibc declares functions of these names itself, hence macros.
#define __expf(x) (::specdec::emu::approx_exp(x))
#define __exp10f(x) (::specdec::emu::approx_exp10(x))
#define __logf(x) (::specdec::emu::approx_log(x))
#define __log2f(x) (::specdec::emu::approx_log2(x))
#define __log10f(x) (::specdec::emu::approx_log10(x))
#define __sinf(x) (::specdec::emu::approx_sin(x))
#define __cosf(x) (::specdec::emu::approx_cos(x))
#define __powf(x, y) (::specdec::emu::approx_pow(x, y))

inline float rsqrtf(float x) {
    return 1.0f / std::sqrt(x);
}
inline float __frsqrt_rn(float x) {
    return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x)));
}
inline float __fdividef(float a, float b) {
    return a / b;
}
inline float __frcp_rn(float x) {
    return 1.0f / x;
}
inline float __fsqrt_rn(float x) {
    return std::sqrt(x);
}
inline float __fadd_rn(float a, float b) {
    return a + b;
}
inline float __fsub_rn(float a, float b) {
    return a - b;
}
inline float __fmul_rn(float a, float b) {
    return a * b;
}
inline float __fdiv_rn(float a, float b) {
    return a / b;
}
inline float __fmaf_rn(float a, float b, float c) {
    return ::fmaf(a, b, c);
}
inline float __saturatef(float x) {
    return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f;
}

#define EMU_BITCAST(name, To, From)            \
    inline To name(From x) {                   \
        To y;                                  \
        static_assert(sizeof(x) == sizeof(y)); \
        __builtin_memcpy(&y, &x, sizeof(y));   \
        return y;                              \
    }
EMU_BITCAST(__float_as_int, int, float)
EMU_BITCAST(__float_as_uint, unsigned, float)
EMU_BITCAST(__int_as_float, float, int)
EMU_BITCAST(__uint_as_float, float, unsigned)
EMU_BITCAST(__double_as_longlong, long long, double)
EMU_BITCAST(__longlong_as_double, double, long long)
#undef EMU_BITCAST

namespace specdec::emu {
// CUDA saturates and turns NaN into 0; a C++ cast out of range would be undefined.
inline int to_int(double x) {
    if (!(x == x)) return 0;
    if (x >= 2147483647.0) return 2147483647;
    if (x <= -2147483648.0) return -2147483647 - 1;
    return static_cast<int>(x);
}
inline unsigned to_uint(double x) {
    if (!(x > 0.0)) return 0;
    return x >= 4294967295.0 ? 4294967295u : static_cast<unsigned>(x);
}
}  // namespace specdec::emu

inline int __float2int_rn(float x) {
    return ::specdec::emu::to_int(std::nearbyint(x));
}
inline int __float2int_rz(float x) {
    return ::specdec::emu::to_int(std::trunc(x));
}
inline int __float2int_rd(float x) {
    return ::specdec::emu::to_int(std::floor(x));
}
inline int __float2int_ru(float x) {
    return ::specdec::emu::to_int(std::ceil(x));
}
inline unsigned __float2uint_rn(float x) {
    return ::specdec::emu::to_uint(std::nearbyint(x));
}
inline unsigned __float2uint_rz(float x) {
    return ::specdec::emu::to_uint(std::trunc(x));
}
inline float __int2float_rn(int x) {
    return static_cast<float>(x);
}
inline float __uint2float_rn(unsigned x) {
    return static_cast<float>(x);
}

inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}
inline int __popcll(unsigned long long x) {
    return __builtin_popcountll(x);
}
inline int __clz(int x) {
    return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x));
}
inline int __clzll(long long x) {
    return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}
inline int __ffs(int x) {
    return __builtin_ffs(x);
}
inline int __ffsll(long long x) {
    return __builtin_ffsll(x);
}
inline unsigned __brev(unsigned x) {
    unsigned y = 0;
    for (int i = 0; i < 32; ++i) y |= ((x >> i) & 1u) << (31 - i);
    return y;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>((static_cast<uint64_t>(a) * b) >> 32);
}
inline int __mulhi(int a, int b) {
    return static_cast<int>((static_cast<int64_t>(a) * b) >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t both = (static_cast<uint64_t>(b) << 32) | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned pick = (selector >> (4 * i)) & 0xf;
        unsigned byte = static_cast<unsigned>(both >> (8 * (pick & 7))) & 0xff;
        if (pick & 8) byte = (byte & 0x80) ? 0xff : 0;
        result |= byte << (8 * i);
    }
    return result;
}
// Four products of signed bytes, added to c.
inline int __dp4a(int a, int b, int c) {
    unsigned sum = static_cast<unsigned>(c);
    for (int i = 0; i < 4; ++i) {
        const int product = static_cast<int8_t>(static_cast<unsigned>(a) >> (8 * i)) *
                            static_cast<int8_t>(static_cast<unsigned>(b) >> (8 * i));
        sum += static_cast<unsigned>(product);
    }
    return static_cast<int>(sum);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((((static_cast<uint64_t>(high) << 32) | low) << (shift & 31)) >>
                                 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>(((static_cast<uint64_t>(high) << 32) | low) >> (shift & 31));
}

#define EMU_MIN_MAX(T)        \
    inline T min(T a, T b) {  \
        return b < a ? b : a; \
    }                         \
    inline T max(T a, T b) {  \
        return a < b ? b : a; \
    }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
#undef EMU_MIN_MAX
inline float min(float a, float b) {
    return ::fminf(a, b);
}
inline float max(float a, float b) {
    return ::fmaxf(a, b);
}
inline double min(double a, double b) {
    return ::fmin(a, b);
}
inline double max(double a, double b) {
    return ::fmax(a, b);
}
