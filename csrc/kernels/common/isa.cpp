#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(SPECDEC_BF16_ISAS)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace specdec::cpu {

const char* isa_name(Isa isa) {
    switch (isa) {
        case Isa::kAmx:
            return "amx";
        case Isa::kAvx512Bf16:
            return "avx512bf16";
        case Isa::kAvx512:
            return "avx512";
        case Isa::kAvx2:
            return "avx2";
        default:
            return "baseline";
    }
}

namespace {
// Products of bf16 pairs, and the look-up in tables of bytes that widens e4m3.
bool vector_bf16_supported() {
#if defined(SPECDEC_BF16_ISAS)
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool pairs = __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 5 & 1) != 0;
    return pairs && __builtin_cpu_supports("avx512vbmi") != 0;
#else
    return false;
#endif
}

// Tiles of the processor, and the system's leave to use them: for the whole process, and asked for once
// (torch may have done so; asking again is harmless).
bool tiles_supported() {
#if defined(SPECDEC_BF16_ISAS)
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool tiles = (d >> 24 & 1) != 0, tile_bf16 = (d >> 22 & 1) != 0;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
    return tiles && tile_bf16 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}
}  // namespace

bool isa_supported(Isa isa) {
#if defined(SPECDEC_X86_ISAS)
    __builtin_cpu_init();
    switch (isa) {
        case Isa::kAmx:
            return isa_supported(Isa::kAvx512Bf16) && tiles_supported();
        case Isa::kAvx512Bf16:
            return isa_supported(Isa::kAvx512) && vector_bf16_supported();
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
    const Isa all[] = {Isa::kAmx, Isa::kAvx512Bf16, Isa::kAvx512, Isa::kAvx2, Isa::kBaseline};
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
        throw std::runtime_error(std::string("specdec: SPECDEC_CPU_ISA: wanted baseline, avx2, "
                                             "avx512, avx512bf16 or amx, got ") +
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
