// Run-time choice of the instruction set of CPU kernels. Each kernels/<op>/cpu.cpp is compiled once
// per ISA, its code inside namespace specdec::cpu::SPECDEC_ISA; SPECDEC_DECLARE_CPU in params.h
// declares the copies and the entry point that picks one. Every copy gives the same bits.
#pragma once

namespace specdec::cpu {

enum class Isa { kBaseline, kAvx2, kAvx512 };

// Best the CPU has, or the one that SPECDEC_CPU_ISA=baseline|avx2|avx512 asks for. A name that is
// unknown or that the CPU lacks throws std::runtime_error: a test that forces an ISA must not
// silently run another one.
Isa isa();
const char* isa_name(Isa isa);
bool isa_supported(Isa isa);

}  // namespace specdec::cpu

#if defined(SPECDEC_X86_ISAS)
#define SPECDEC_DECLARE_CPU(op, Params) \
    namespace specdec::cpu {            \
    namespace baseline {                \
    void op(const Params& p);           \
    }                                   \
    namespace avx2 {                    \
    void op(const Params& p);           \
    }                                   \
    namespace avx512 {                  \
    void op(const Params& p);           \
    }                                   \
    inline void op(const Params& p) {   \
        switch (isa()) {                \
            case Isa::kAvx512:          \
                return avx512::op(p);   \
            case Isa::kAvx2:            \
                return avx2::op(p);     \
            default:                    \
                return baseline::op(p); \
        }                               \
    }                                   \
    }
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
