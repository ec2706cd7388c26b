#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace specdec::cpu {

const char* isa_name(Isa isa) {
    switch (isa) {
        case Isa::kAvx512:
            return "avx512";
        case Isa::kAvx2:
            return "avx2";
        default:
            return "baseline";
    }
}

bool isa_supported(Isa isa) {
#if defined(SPECDEC_X86_ISAS)
    __builtin_cpu_init();
    switch (isa) {
        case Isa::kAvx512:
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
        case Isa::kAvx2:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        default:
            return true;
    }
#else
    return isa == Isa::kBaseline;
#endif
}

namespace {
Isa choose() {
    const Isa all[] = {Isa::kAvx512, Isa::kAvx2, Isa::kBaseline};
    const char* forced = std::getenv("SPECDEC_CPU_ISA");
    if (forced == nullptr || *forced == '\0') {
        for (Isa isa : all) {
            if (isa_supported(isa)) return isa;
        }
    } else {
        for (Isa isa : all) {
            if (std::strcmp(forced, isa_name(isa)) != 0) continue;
            if (isa_supported(isa)) return isa;
            throw std::runtime_error(std::string("specdec: SPECDEC_CPU_ISA: wanted an instruction "
                                                 "set that this CPU has, got ") +
                                     forced);
        }
        throw std::runtime_error(
            std::string("specdec: SPECDEC_CPU_ISA: wanted baseline, avx2 or avx512, got ") +
            forced);
    }
    return Isa::kBaseline;
}
}  // namespace

Isa isa() {
    static const Isa chosen = choose();
    return chosen;
}

}  // namespace specdec::cpu
