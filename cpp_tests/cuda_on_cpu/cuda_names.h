// CUDA keywords, vector types, thread indices, warp and block functions, atomics and cached loads.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "emu.h"

// __shared__ stays undefined on purpose: shared memory is declared with CU_SHARED.
#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

#define threadIdx (::specdec::emu::thread_idx())
#define blockIdx (::specdec::emu::block_idx())
#define blockDim (::specdec::emu::block_dim())
#define gridDim (::specdec::emu::grid_dim())
constexpr int warpSize = 32;

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

#define EMU_VECTOR_TYPES(name, T, align2, align4)       \
    struct alignas(align2) name##2 {                    \
        T x, y;                                         \
    };                                                  \
    struct name##3 {                                    \
        T x, y, z;                                      \
    };                                                  \
    struct alignas(align4) name##4 {                    \
        T x, y, z, w;                                   \
    };                                                  \
    inline name##2 make_##name##2(T x, T y) {           \
        return {x, y};                                  \
    }                                                   \
    inline name##3 make_##name##3(T x, T y, T z) {      \
        return {x, y, z};                               \
    }                                                   \
    inline name##4 make_##name##4(T x, T y, T z, T w) { \
        return {x, y, z, w};                            \
    }

EMU_VECTOR_TYPES(char, signed char, 2, 4)
EMU_VECTOR_TYPES(uchar, unsigned char, 2, 4)
EMU_VECTOR_TYPES(short, short, 4, 8)
EMU_VECTOR_TYPES(ushort, unsigned short, 4, 8)
EMU_VECTOR_TYPES(int, int, 8, 16)
EMU_VECTOR_TYPES(uint, unsigned, 8, 16)
EMU_VECTOR_TYPES(float, float, 8, 16)
EMU_VECTOR_TYPES(longlong, long long, 16, 16)
EMU_VECTOR_TYPES(ulonglong, unsigned long long, 16, 16)
EMU_VECTOR_TYPES(double, double, 16, 16)
#undef EMU_VECTOR_TYPES

// Every function that the runtime must be able to name the caller of takes these two last.
#define EMU_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define EMU_HERE           \
    ::specdec::emu::Site { \
        file, line         \
    }

// ---- barriers and fences ------------------------------------------------------------------------

inline void __syncthreads(EMU_SITE) {
    ::specdec::emu::block_barrier(::specdec::emu::BlockVote::kNone, 0, EMU_HERE);
}
inline int __syncthreads_count(int predicate, EMU_SITE) {
    return ::specdec::emu::block_barrier(::specdec::emu::BlockVote::kCount, predicate, EMU_HERE);
}
inline int __syncthreads_and(int predicate, EMU_SITE) {
    return ::specdec::emu::block_barrier(::specdec::emu::BlockVote::kAnd, predicate, EMU_HERE);
}
inline int __syncthreads_or(int predicate, EMU_SITE) {
    return ::specdec::emu::block_barrier(::specdec::emu::BlockVote::kOr, predicate, EMU_HERE);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, EMU_SITE) {
    ::specdec::emu::warp_collective(::specdec::emu::WarpOp::kSync, mask, nullptr, EMU_HERE);
}
inline void __threadfence(EMU_SITE) {
    ::specdec::emu::thread_fence(EMU_HERE);
}
inline void __threadfence_block(EMU_SITE) {
    ::specdec::emu::thread_fence(EMU_HERE);
}
inline void __threadfence_system(EMU_SITE) {
    ::specdec::emu::thread_fence(EMU_HERE);
}
inline void __nanosleep(unsigned, EMU_SITE) {
    ::specdec::emu::yield(EMU_HERE);
}
[[noreturn]] inline void __trap(EMU_SITE) {
    ::specdec::emu::fail(EMU_HERE, "__trap()");
}
inline long long clock64() {
    return static_cast<long long>(::specdec::emu::clock_ticks());
}

// ---- warp functions -----------------------------------------------------------------------------

namespace specdec::emu {

template <class T>
constexpr bool kShufflable =
    std::is_same_v<T, int> || std::is_same_v<T, unsigned> || std::is_same_v<T, long> ||
    std::is_same_v<T, unsigned long> || std::is_same_v<T, long long> ||
    std::is_same_v<T, unsigned long long> || std::is_same_v<T, float> || std::is_same_v<T, double>;

template <class T>
uint64_t to_bits(T value) {
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    return bits;
}

template <class T>
T from_bits(uint64_t bits) {
    T value;
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}

template <class T>
T shuffle(unsigned mask, T value, int wanted, int width, bool inside, Site site) {
    static_assert(kShufflable<T>, "CUDA has no shuffle of this type");
    ShuffleArgs args{to_bits(value), shuffle_source(wanted, width, inside, site), 0};
    warp_collective(WarpOp::kShuffle, mask, &args, site);
    return from_bits<T>(args.result);
}

inline uint64_t vote(WarpOp op, unsigned mask, uint64_t value, Site site) {
    VoteArgs args{value, 0};
    warp_collective(op, mask, &args, site);
    return args.result;
}

}  // namespace specdec::emu

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, EMU_SITE) {
    const int base = static_cast<int>(::specdec::emu::lane_id()) & ~(width - 1);
    return ::specdec::emu::shuffle(mask, value, base + (lane & (width - 1)), width, true, EMU_HERE);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_SITE) {
    const int lane = static_cast<int>(::specdec::emu::lane_id());
    const int from = lane - static_cast<int>(delta);
    return ::specdec::emu::shuffle(mask, value, from, width, from >= (lane & ~(width - 1)),
                                   EMU_HERE);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_SITE) {
    const int lane = static_cast<int>(::specdec::emu::lane_id());
    const int from = lane + static_cast<int>(delta);
    return ::specdec::emu::shuffle(mask, value, from, width, from <= (lane | (width - 1)),
                                   EMU_HERE);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, EMU_SITE) {
    const int lane = static_cast<int>(::specdec::emu::lane_id());
    const int from = lane ^ lane_mask;
    return ::specdec::emu::shuffle(mask, value, from, width, from <= (lane | (width - 1)),
                                   EMU_HERE);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, EMU_SITE) {
    using ::specdec::emu::WarpOp;
    return static_cast<unsigned>(
        ::specdec::emu::vote(WarpOp::kBallot, mask, predicate != 0, EMU_HERE));
}
inline int __any_sync(unsigned mask, int predicate, EMU_SITE) {
    return __ballot_sync(mask, predicate, file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, EMU_SITE) {
    return __ballot_sync(mask, predicate, file, line) == mask;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, EMU_SITE) {
    static_assert(::specdec::emu::kShufflable<T>, "CUDA has no match of this type");
    return static_cast<unsigned>(::specdec::emu::vote(::specdec::emu::WarpOp::kMatchAny, mask,
                                                      ::specdec::emu::to_bits(value), EMU_HERE));
}
inline unsigned __activemask() {
    return ::specdec::emu::active_mask();
}

#define EMU_REDUCE(name, T, op)                                                              \
    inline T name(unsigned mask, T value, EMU_SITE) {                                        \
        return static_cast<T>(::specdec::emu::vote(::specdec::emu::WarpOp::op, mask,         \
                                                   static_cast<unsigned>(value), EMU_HERE)); \
    }
EMU_REDUCE(__reduce_add_sync, unsigned, kReduceAdd)
EMU_REDUCE(__reduce_add_sync, int, kReduceAdd)
EMU_REDUCE(__reduce_min_sync, unsigned, kReduceMin)
EMU_REDUCE(__reduce_min_sync, int, kReduceMinSigned)
EMU_REDUCE(__reduce_max_sync, unsigned, kReduceMax)
EMU_REDUCE(__reduce_max_sync, int, kReduceMaxSigned)
EMU_REDUCE(__reduce_and_sync, unsigned, kReduceAnd)
EMU_REDUCE(__reduce_or_sync, unsigned, kReduceOr)
EMU_REDUCE(__reduce_xor_sync, unsigned, kReduceXor)
#undef EMU_REDUCE

// ---- atomics ------------------------------------------------------------------------------------

#define EMU_ATOMIC(name, T, op, type)                                                \
    inline T name(T* address, T value, EMU_SITE) {                                   \
        return ::specdec::emu::from_bits<T>(::specdec::emu::atomic_rmw(              \
            ::specdec::emu::AtomicOp::op, ::specdec::emu::AtomicType::type, address, \
            ::specdec::emu::to_bits(value), 0, false, EMU_HERE));                    \
    }
EMU_ATOMIC(atomicAdd, int, kAdd, kI32)
EMU_ATOMIC(atomicAdd, unsigned, kAdd, kU32)
EMU_ATOMIC(atomicAdd, unsigned long long, kAdd, kU64)
EMU_ATOMIC(atomicAdd, float, kAdd, kF32)
EMU_ATOMIC(atomicAdd, double, kAdd, kF64)
EMU_ATOMIC(atomicSub, int, kSub, kI32)
EMU_ATOMIC(atomicSub, unsigned, kSub, kU32)
EMU_ATOMIC(atomicExch, int, kExch, kI32)
EMU_ATOMIC(atomicExch, unsigned, kExch, kU32)
EMU_ATOMIC(atomicExch, unsigned long long, kExch, kU64)
EMU_ATOMIC(atomicExch, float, kExch, kF32)
EMU_ATOMIC(atomicMin, int, kMin, kI32)
EMU_ATOMIC(atomicMin, unsigned, kMin, kU32)
EMU_ATOMIC(atomicMin, unsigned long long, kMin, kU64)
EMU_ATOMIC(atomicMin, long long, kMin, kI64)
EMU_ATOMIC(atomicMax, int, kMax, kI32)
EMU_ATOMIC(atomicMax, unsigned, kMax, kU32)
EMU_ATOMIC(atomicMax, unsigned long long, kMax, kU64)
EMU_ATOMIC(atomicMax, long long, kMax, kI64)
EMU_ATOMIC(atomicAnd, int, kAnd, kI32)
EMU_ATOMIC(atomicAnd, unsigned, kAnd, kU32)
EMU_ATOMIC(atomicAnd, unsigned long long, kAnd, kU64)
EMU_ATOMIC(atomicOr, int, kOr, kI32)
EMU_ATOMIC(atomicOr, unsigned, kOr, kU32)
EMU_ATOMIC(atomicOr, unsigned long long, kOr, kU64)
EMU_ATOMIC(atomicXor, int, kXor, kI32)
EMU_ATOMIC(atomicXor, unsigned, kXor, kU32)
EMU_ATOMIC(atomicXor, unsigned long long, kXor, kU64)
EMU_ATOMIC(atomicInc, unsigned, kInc, kU32)
EMU_ATOMIC(atomicDec, unsigned, kDec, kU32)
#undef EMU_ATOMIC

#define EMU_CAS(T, type)                                                                         \
    inline T atomicCAS(T* address, T compare, T value, EMU_SITE) {                               \
        return ::specdec::emu::from_bits<T>(::specdec::emu::atomic_rmw(                          \
            ::specdec::emu::AtomicOp::kCas, ::specdec::emu::AtomicType::type, address,           \
            ::specdec::emu::to_bits(value), ::specdec::emu::to_bits(compare), false, EMU_HERE)); \
    }
EMU_CAS(int, kI32)
EMU_CAS(unsigned, kU32)
EMU_CAS(unsigned long long, kU64)
#undef EMU_CAS

// ---- cache hints: plain accesses here, so that the hooks see them at the caller's line ----------

#define EMU_LOAD(name)                                               \
    template <class T>                                               \
    inline __attribute__((always_inline)) T name(const T* address) { \
        static_assert(sizeof(T) <= 16, "at most 16 bytes per load"); \
        return *address;                                             \
    }
EMU_LOAD(__ldg)
EMU_LOAD(__ldca)
EMU_LOAD(__ldcg)
EMU_LOAD(__ldcs)
EMU_LOAD(__ldlu)
EMU_LOAD(__ldcv)
#undef EMU_LOAD

#define EMU_STORE(name)                                                    \
    template <class T>                                                     \
    inline __attribute__((always_inline)) void name(T* address, T value) { \
        static_assert(sizeof(T) <= 16, "at most 16 bytes per store");      \
        *address = value;                                                  \
    }
EMU_STORE(__stwb)
EMU_STORE(__stcg)
EMU_STORE(__stcs)
EMU_STORE(__stwt)
#undef EMU_STORE
