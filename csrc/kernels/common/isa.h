// Run-time choice of the instruction set of CPU kernels. Each kernels/<op>/cpu.cpp is compiled once
// per ISA, its code inside namespace specdec::cpu::SPECDEC_ISA; SPECDEC_DECLARE_CPU in params.h
// declares the copies and the entry point that picks one. Every copy gives the same bits, but for products
// of bf16 in ops that SPECDEC_DECLARE_CPU_BF16 declares: the instructions of `avx512bf16` (AVX-512) and of
// `amx` (tiles) round each in their own way.
#pragma once

namespace specdec::cpu {

enum class Isa { kBaseline, kAvx2, kAvx512, kAvx512Bf16, kAmx };

// Best the CPU has, or the one that SPECDEC_CPU_ISA=baseline|avx2|avx512|avx512bf16|amx asks for. A name that is
// unknown or that the CPU lacks throws std::runtime_error: a test that forces an ISA must not
// silently run another one.
Isa isa();
const char* isa_name(Isa isa);
bool isa_supported(Isa isa);

}  // namespace specdec::cpu

#if defined(SPECDEC_X86_ISAS)
#define SPECDEC_DECLARE_CPU_ISAS(op, Params, on_bf16, on_amx) \
    namespace specdec::cpu {                                  \
    namespace baseline {                                      \
    void op(const Params& p);                                 \
    }                                                         \
    namespace avx2 {                                          \
    void op(const Params& p);                                 \
    }                                                         \
    namespace avx512 {                                        \
    void op(const Params& p);                                 \
    }                                                         \
    namespace avx512bf16 {                                    \
    void op(const Params& p);                                 \
    }                                                         \
    namespace amx {                                           \
    void op(const Params& p);                                 \
    }                                                         \
    inline void op(const Params& p) {                         \
        switch (isa()) {                                      \
            case Isa::kAmx:                                   \
                return on_amx;                                \
            case Isa::kAvx512Bf16:                            \
                return on_bf16;                               \
            case Isa::kAvx512:                                \
                return avx512::op(p);                         \
            case Isa::kAvx2:                                  \
                return avx2::op(p);                           \
            default:                                          \
                return baseline::op(p);                       \
        }                                                     \
    }                                                         \
    }
#define SPECDEC_DECLARE_CPU(op, Params) \
    SPECDEC_DECLARE_CPU_ISAS(op, Params, avx512::op(p), avx512::op(p))
#else
#define SPECDEC_DECLARE_CPU(op, Params) \
    namespace specdec::cpu {            \
    namespace baseline {                \
    void op(const Params& p);           \
    }                                   \
    inline void op(const Params& p) {   \
        baseline::op(p);                \
    }                                   \
    }
#endif

// Of an op with a dtype whose cpu.cpp is compiled for `avx512bf16` and `amx` too.
#if defined(SPECDEC_BF16_ISAS)
#define SPECDEC_DECLARE_CPU_BF16(op, Params)                                                \
    SPECDEC_DECLARE_CPU_ISAS(                                                               \
        op, Params, p.dtype == ::specdec::DType::kBF16 ? avx512bf16::op(p) : avx512::op(p), \
        p.dtype == ::specdec::DType::kBF16 ? amx::op(p) : avx512::op(p))
#else
#define SPECDEC_DECLARE_CPU_BF16(op, Params) SPECDEC_DECLARE_CPU(op, Params)
#endif
