// Memory of a call of row_linear on the CPU. Included by cpu_fma.h and cpu_amx.h.
#pragma once

#include <cstdint>
#include <vector>

namespace specdec::cpu::SPECDEC_ISA {
namespace {

// Floats at the start of a cache line, until the thread's next call: they stay with the thread, as fresh
// memory would cost page faults in every call.
inline float* kept_memory(int64_t floats) {
    constexpr int64_t kLine = 16;
    static thread_local std::vector<float> memory;
    if (static_cast<int64_t>(memory.size()) < floats + kLine) memory.resize(floats + kLine);
    return memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) / 4;
}

}  // namespace
}  // namespace specdec::cpu::SPECDEC_ISA
