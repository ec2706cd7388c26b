// Memory of a call of a CPU kernel that stays with the thread: fresh memory would cost page faults in every
// call.
#pragma once

#include <cstdint>
#include <vector>

namespace specdec::cpu::SPECDEC_ISA {

// To be held as `static thread_local`, one for each use.
class KeptMemory {
  public:
    // So many floats at the start of a cache line, until they are asked for again.
    float* floats(int64_t count) {
        constexpr int64_t kLine = 16;
        if (static_cast<int64_t>(memory_.size()) < count + kLine) memory_.resize(count + kLine);
        return memory_.data() + (64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64) / 4;
    }

  private:
    std::vector<float> memory_;
};

}  // namespace specdec::cpu::SPECDEC_ISA
