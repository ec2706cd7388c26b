// Sixteen float lanes with the same bits on every instruction set: a lane's result depends on that
// lane's inputs only, fma is fused everywhere, and the sums over lanes are one fixed tree. Whatever
// the machine has, V16 is made of its native vectors (one of 512 bits, two of 256, four of 128).
//
// For CPU kernels only: cpu.cpp files are compiled once per instruction set (isa.h), so all of this
// lives in the namespace of the one being compiled and is always inlined.
#pragma once

#include <type_traits>
#include <utility>

#include "types.h"

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#ifndef SPECDEC_ISA
#error "simd.h is for kernels/<op>/cpu.cpp, which is compiled once per instruction set"
#endif
#define SPECDEC_SIMD inline __attribute__((always_inline))

namespace specdec::cpu::SPECDEC_ISA {

#if defined(__AVX512F__)
constexpr int kNativeLanes = 16;
#elif defined(__AVX2__)
constexpr int kNativeLanes = 8;
#else
constexpr int kNativeLanes = 4;
#endif
constexpr int kLanes = 16;
constexpr int kParts = kLanes / kNativeLanes;

typedef float Native __attribute__((vector_size(4 * kNativeLanes)));
typedef int32_t NativeInt __attribute__((vector_size(4 * kNativeLanes)));
// As they lie in memory: any alignment, beside any other type.
typedef Native NativeAt __attribute__((aligned(4), may_alias));
typedef NativeInt NativeIntAt __attribute__((aligned(4), may_alias));
typedef int16_t Shorts __attribute__((vector_size(2 * 16)));
typedef uint16_t UnsignedShorts __attribute__((vector_size(2 * 16)));
typedef Shorts ShortsAt __attribute__((aligned(2), may_alias));
typedef uint16_t NativeHalfAt __attribute__((vector_size(2 * kNativeLanes), aligned(2), may_alias));

struct V16 {
    Native part[kParts];
};
struct I16 {  // integers, or the outcome of a comparison: all bits of a lane set where it holds
    NativeInt part[kParts];
};

// Every function below is one expression per native vector.
#define SPECDEC_EACH_PART(expression)                          \
    _Pragma("GCC unroll 4") for (int i = 0; i < kParts; ++i) { \
        expression;                                            \
    }

SPECDEC_SIMD V16 load(const float* at) {
    V16 r;
    SPECDEC_EACH_PART(r.part[i] = *reinterpret_cast<const NativeAt*>(at + i * kNativeLanes));
    return r;
}
SPECDEC_SIMD void store(float* at, V16 x) {
    SPECDEC_EACH_PART(*reinterpret_cast<NativeAt*>(at + i * kNativeLanes) = x.part[i]);
}
SPECDEC_SIMD V16 load(const bf16* at) {
    V16 r;
#if defined(__AVX2__) && !defined(__AVX512F__)
    SPECDEC_EACH_PART(r.part[i] = reinterpret_cast<Native>(_mm256_slli_epi32(
                          _mm256_cvtepu16_epi32(_mm_loadu_si128(
                              reinterpret_cast<const __m128i*>(at + i * kNativeLanes))),
                          16)));
#else
    SPECDEC_EACH_PART(
        r.part[i] = reinterpret_cast<Native>(
            __builtin_convertvector(*reinterpret_cast<const NativeHalfAt*>(at + i * kNativeLanes),
                                    NativeInt)
            << 16));
#endif
    return r;
}
#if !defined(__AVX2__) && !defined(__AVX512F__)
// Not inlined: unrolled into every kernel, these lane by lane loops would take minutes to compile.
inline __attribute__((noinline)) void convert_lanes(const f16* at, float* lanes) {
    for (int l = 0; l < kLanes; ++l) lanes[l] = to_float(at[l]);
}
inline __attribute__((noinline)) void fma_lanes(const float* a, const float* b, float* c) {
    for (int l = 0; l < kNativeLanes; ++l) c[l] = __builtin_fmaf(a[l], b[l], c[l]);
}
inline __attribute__((noinline)) void pick_lanes(const int32_t* table, int32_t* lanes) {
    for (int l = 0; l < kLanes; ++l) lanes[l] = table[lanes[l] & 7];
}
#endif
SPECDEC_SIMD V16 load(const f16* at) {
    V16 r;
#if defined(__AVX512F__)
    r.part[0] = reinterpret_cast<Native>(
        _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))));
#elif defined(__AVX2__)
    SPECDEC_EACH_PART(r.part[i] = reinterpret_cast<Native>(_mm256_cvtph_ps(_mm_loadu_si128(
                          reinterpret_cast<const __m128i*>(at + i * kNativeLanes)))));
#else
    alignas(16) float lanes[kLanes];
    convert_lanes(at, lanes);
    r = load(lanes);
#endif
    return r;
}

#if defined(__F16C__) && defined(__AVX2__)
// Sign-extended e4m3 codes as halves, whose exponent is one bit wider: a code moved to the top of their 15
// bits is 2^-8 times its value, subnormal ones too.
SPECDEC_SIMD __m256i e4m3_halves(__m256i codes) {
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(codes, 7),
                                            _mm256_set1_epi16(static_cast<short>(0xbfff)));
    const __m256i magnitude = _mm256_and_si256(halves, _mm256_set1_epi16(0x3f80));
    const __m256i is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x3f80));
    return _mm256_xor_si256(halves, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7e00 ^ 0x3f80)));
}
#else
// e4m3 codes, one to a lane, as floats. No step meets a subnormal number: those cost a lot on some
// machines, and are zero on threads that flush them.
SPECDEC_SIMD Native e4m3_floats(NativeInt codes) {
    const NativeInt magnitude = codes & 0x7f;
    const Native small = __builtin_convertvector(magnitude, Native) * 0.001953125f;  // 2^-9
    NativeInt bits =
        magnitude < 8 ? reinterpret_cast<NativeInt>(small) : (magnitude << 20) + (120 << 23);
    bits = magnitude == 0x7f ? NativeInt{} + 0x7fc00000 : bits;
    return reinterpret_cast<Native>(bits | (codes << 24 & static_cast<int32_t>(0x80000000u)));
}
#endif
SPECDEC_SIMD V16 load(const f8e4m3* at) {
    V16 r;
#if defined(__F16C__) && defined(__AVX2__)
    const __m256i halves =
        e4m3_halves(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
#if defined(__AVX512F__)
    r.part[0] = reinterpret_cast<Native>(_mm512_maskz_cvtph_ps(0xffff, halves)) * 256.0f;
#else
    r.part[0] = reinterpret_cast<Native>(_mm256_cvtph_ps(_mm256_castsi256_si128(halves))) * 256.0f;
    r.part[1] =
        reinterpret_cast<Native>(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))) * 256.0f;
#endif
#else
    typedef uint8_t Bytes __attribute__((vector_size(4), aligned(1), may_alias));
    SPECDEC_EACH_PART(r.part[i] = e4m3_floats(__builtin_convertvector(
                          *reinterpret_cast<const Bytes*>(at + i * kNativeLanes), NativeInt)));
#endif
    return r;
}

SPECDEC_SIMD V16 set1(float x) {
    V16 r;
    SPECDEC_EACH_PART(r.part[i] = x - Native{});  // keeps -0, and folds to a broadcast
    return r;
}
SPECDEC_SIMD I16 set1(int32_t x) {
    I16 r;
    SPECDEC_EACH_PART(r.part[i] = NativeInt{} + x);
    return r;
}
SPECDEC_SIMD float first_lane(V16 x) {
    return x.part[0][0];
}
SPECDEC_SIMD I16 load(const int32_t* at) {
    I16 r;
    SPECDEC_EACH_PART(r.part[i] = *reinterpret_cast<const NativeIntAt*>(at + i * kNativeLanes));
    return r;
}
SPECDEC_SIMD I16 lane_numbers() {  // 0, 1, .. 15
    alignas(64) static constexpr int32_t kNumbers[kLanes] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                             8, 9, 10, 11, 12, 13, 14, 15};
    return load(kNumbers);
}

#define SPECDEC_BINARY(Type, name, expression)       \
    SPECDEC_SIMD Type name(Type a, Type b) {         \
        Type r;                                      \
        SPECDEC_EACH_PART(r.part[i] = (expression)); \
        return r;                                    \
    }
SPECDEC_BINARY(V16, operator+, a.part[i] + b.part[i])
SPECDEC_BINARY(V16, operator-, a.part[i] - b.part[i])
SPECDEC_BINARY(V16, operator*, a.part[i] * b.part[i])
SPECDEC_BINARY(V16, operator/, a.part[i] / b.part[i])
SPECDEC_BINARY(V16, max, a.part[i] > b.part[i] ? a.part[i] : b.part[i])  // b where one is NaN
SPECDEC_BINARY(V16, min, a.part[i] < b.part[i] ? a.part[i] : b.part[i])  // b where one is NaN
SPECDEC_BINARY(I16, operator+, a.part[i] + b.part[i])
SPECDEC_BINARY(I16, operator-, a.part[i] - b.part[i])
SPECDEC_BINARY(I16, operator&, a.part[i] & b.part[i])
SPECDEC_BINARY(I16, operator|, a.part[i] | b.part[i])
#undef SPECDEC_BINARY

#define SPECDEC_COMPARE(Type, name, relation)                        \
    SPECDEC_SIMD I16 name(Type a, Type b) {                          \
        I16 r;                                                       \
        SPECDEC_EACH_PART(r.part[i] = a.part[i] relation b.part[i]); \
        return r;                                                    \
    }
SPECDEC_COMPARE(V16, operator<, <)
SPECDEC_COMPARE(V16, operator>, >)
SPECDEC_COMPARE(V16, operator>=, >=)
SPECDEC_COMPARE(V16, operator==, ==)
SPECDEC_COMPARE(I16, operator<, <)
SPECDEC_COMPARE(I16, operator>, >)
SPECDEC_COMPARE(I16, operator==, ==)
#undef SPECDEC_COMPARE

SPECDEC_SIMD I16 operator<<(I16 x, int count) {
    SPECDEC_EACH_PART(x.part[i] = x.part[i] << count);
    return x;
}
SPECDEC_SIMD V16 select(I16 where, V16 yes, V16 no) {
    V16 r;
    SPECDEC_EACH_PART(r.part[i] = where.part[i] ? yes.part[i] : no.part[i]);
    return r;
}
SPECDEC_SIMD I16 select(I16 where, I16 yes, I16 no) {
    I16 r;
    SPECDEC_EACH_PART(r.part[i] = where.part[i] ? yes.part[i] : no.part[i]);
    return r;
}
SPECDEC_SIMD I16 as_bits(V16 x) {
    I16 r;
    SPECDEC_EACH_PART(r.part[i] = reinterpret_cast<NativeInt>(x.part[i]));
    return r;
}
SPECDEC_SIMD V16 as_floats(I16 x) {
    V16 r;
    SPECDEC_EACH_PART(r.part[i] = reinterpret_cast<Native>(x.part[i]));
    return r;
}

SPECDEC_SIMD V16 to_floats(I16 x) {
    V16 r;
    SPECDEC_EACH_PART(r.part[i] = __builtin_convertvector(x.part[i], Native));
    return r;
}

// a * b + c, rounded once, on every instruction set.
SPECDEC_SIMD Native fma(Native a, Native b, Native c) {
#if defined(__AVX512F__)
    return reinterpret_cast<Native>(_mm512_fmadd_ps(
        reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(__AVX2__)
    return reinterpret_cast<Native>(_mm256_fmadd_ps(
        reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#else
    fma_lanes(reinterpret_cast<const float*>(&a), reinterpret_cast<const float*>(&b),
              reinterpret_cast<float*>(&c));
    return c;
#endif
}
SPECDEC_SIMD V16 fma(V16 a, V16 b, V16 c) {
    V16 r;
    SPECDEC_EACH_PART(r.part[i] = fma(a.part[i], b.part[i], c.part[i]));
    return r;
}

// Entries of a table of eight by the low three bits of the index; the table lies there twice.
SPECDEC_SIMD I16 pick_of_eight(const int32_t (&table)[16], I16 index) {
#if defined(__AVX512F__)
    I16 r;
    r.part[0] = reinterpret_cast<NativeInt>(_mm512_maskz_permutexvar_epi32(
        0xffff, reinterpret_cast<__m512i>(index.part[0]), _mm512_loadu_si512(table)));
    return r;
#elif defined(__AVX2__)
    I16 r;
    const __m256i entries = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(table));
    SPECDEC_EACH_PART(r.part[i] = reinterpret_cast<NativeInt>(_mm256_permutevar8x32_epi32(
                          entries, reinterpret_cast<__m256i>(index.part[i]))));
    return r;
#else
    alignas(16) int32_t lanes[kLanes];
    SPECDEC_EACH_PART(*reinterpret_cast<NativeIntAt*>(lanes + i * kNativeLanes) = index.part[i]);
    pick_lanes(table, lanes);
    return load(lanes);
#endif
}

// The same names for one native vector, for kernels that block by registers; spread<V>(x) is x in
// every lane of a V.
SPECDEC_SIMD Native load_native(const float* at) {
    return *reinterpret_cast<const NativeAt*>(at);
}
SPECDEC_SIMD void store(float* at, Native x) {
    *reinterpret_cast<NativeAt*>(at) = x;
}
SPECDEC_SIMD Native select(NativeInt where, Native yes, Native no) {
    return where ? yes : no;
}
SPECDEC_SIMD Native max(Native a, Native b) {  // b where one is NaN
    return a > b ? a : b;
}
SPECDEC_SIMD NativeInt as_bits(Native x) {
    return reinterpret_cast<NativeInt>(x);
}
SPECDEC_SIMD Native as_floats(NativeInt x) {
    return reinterpret_cast<Native>(x);
}
template <class V, class X>
SPECDEC_SIMD V spread(X x) {
    if constexpr (std::is_same_v<V, V16> || std::is_same_v<V, I16>) {
        return set1(x);
    } else {
        return x - V{};  // keeps -0, and folds to a broadcast
    }
}

// Whether a comparison holds in every lane.
SPECDEC_SIMD bool all_lanes(I16 x) {
    NativeInt both = x.part[0];
    for (int i = 1; i < kParts; ++i) both &= x.part[i];
    int32_t all = -1;
    for (int l = 0; l < kNativeLanes; ++l) all &= both[l];
    return all != 0;
}

// A comparison as a bit per lane.
SPECDEC_SIMD uint32_t lane_bits(I16 x) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(x.part[0]),
                                  reinterpret_cast<__m512i>(x.part[0]));
#elif defined(__AVX2__)
    return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(x.part[0]))) |
           static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(x.part[1]))) << 8;
#else
    uint32_t bits = 0;
    for (int l = 0; l < kLanes; ++l) {
        bits |= (static_cast<uint32_t>(x.part[l / kNativeLanes][l % kNativeLanes]) & 1u) << l;
    }
    return bits;
#endif
}

// Every lane combined with lane l + By, then l + By/2, .. l + 1 (round the end).
template <int By, class Combine, int... Lane>
SPECDEC_SIMD Native fold_rotated(Native x, Combine combine,
                                 std::integer_sequence<int, Lane...> lanes) {
    if constexpr (By == 0) {
        return x;
    } else {
        constexpr NativeInt kFrom = {((Lane + By) % kNativeLanes)...};
        return fold_rotated<By / 2>(combine(x, __builtin_shuffle(x, kFrom)), combine, lanes);
    }
}

// Over the lanes, as the tree (l, l+8), (l, l+4), (l, l+2), (0, 1).
template <class Combine>
SPECDEC_SIMD float fold_lanes(V16 x, Combine combine) {
    _Pragma("GCC unroll 2") for (int width = kParts / 2; width > 0; width /= 2) {
        _Pragma("GCC unroll 2") for (int i = 0; i < width; ++i) {
            x.part[i] = combine(x.part[i], x.part[i + width]);
        }
    }
    return fold_rotated<kNativeLanes / 2>(x.part[0], combine,
                                          std::make_integer_sequence<int, kNativeLanes>())[0];
}
SPECDEC_SIMD float sum_lanes(V16 x) {
    return fold_lanes(x, [](Native a, Native b) { return a + b; });
}
SPECDEC_SIMD float max_lanes(V16 x) {
    return fold_lanes(x, [](Native a, Native b) { return a > b ? a : b; });
}

#if defined(__AVX512F__)
// The sums of sixteen vectors, each the tree of sum_lanes, in a third of the steps: a step adds halves of
// two vectors at once.
SPECDEC_SIMD void sum_sixteen(const float (*lanes)[kLanes], float* sums) {
    __m512 x[16];
#define SPECDEC_FOLD(count, shuffle, low, high)                      \
    _Pragma("GCC unroll 8") for (int i = 0; i < (count); ++i) {      \
        x[i] = _mm512_add_ps(shuffle(x[2 * i], x[2 * i + 1], low),   \
                             shuffle(x[2 * i], x[2 * i + 1], high)); \
    }
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; ++i) x[i] = _mm512_loadu_ps(lanes[i]);
    SPECDEC_FOLD(8, _mm512_shuffle_f32x4, 0x44, 0xee)  // l and l + 8
    SPECDEC_FOLD(4, _mm512_shuffle_f32x4, 0x88, 0xdd)  // l and l + 4
    SPECDEC_FOLD(2, _mm512_shuffle_ps, 0x44, 0xee)     // l and l + 2
    SPECDEC_FOLD(1, _mm512_shuffle_ps, 0x88, 0xdd)     // 0 and 1
#undef SPECDEC_FOLD
    const __m512i turned = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_ps(sums, _mm512_permutexvar_ps(turned, x[0]));
}
#endif

// sums[i] = sum_lanes(lanes[i]).
template <int kCount>
SPECDEC_SIMD void sum_each(const float (&lanes)[kCount][kLanes], float (&sums)[kCount]) {
    int done = 0;
#if defined(__AVX512F__)
    for (; done + 16 <= kCount; done += 16) sum_sixteen(lanes + done, sums + done);
#endif
    for (; done < kCount; ++done) sums[done] = sum_lanes(load(lanes[done]));
}

}  // namespace specdec::cpu::SPECDEC_ISA
