// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and the
// library's counter layout. One definition for CPU, CUDA and the host module, so that all draw the
// same numbers; python_tests/test_philox.py holds it to the published known-answer vectors.
#pragma once

#include "types.h"

namespace specdec {

struct Philox4 {
    uint32_t word[4];
};

SPECDEC_HD Philox4 philox4x32(Philox4 counter, uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t product0 = static_cast<uint64_t>(0xD2511F53u) * counter.word[0];
        const uint64_t product1 = static_cast<uint64_t>(0xCD9E8D57u) * counter.word[2];
        counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0,
                    static_cast<uint32_t>(product1),
                    static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1,
                    static_cast<uint32_t>(product0)}};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

// Disjoint streams: a number used for one purpose is never used for another.
enum class Purpose : uint32_t { kDraft = 0, kAccept = 1, kResidual = 2, kBonus = 3, kSample = 4 };

// Uniform in [0, 1) on a grid of 2^-24, from (request seed, absolute position, index, purpose).
// Nothing else enters: not the batch slot, not the batch size, not the launch shape.
SPECDEC_HD float uniform_at(int64_t seed, int64_t position, int64_t index, Purpose purpose) {
    const uint64_t p = static_cast<uint64_t>(position);
    const Philox4 counter = {
        {static_cast<uint32_t>(p), static_cast<uint32_t>(index), 0u,
         static_cast<uint32_t>(purpose) + 8u * static_cast<uint32_t>(p >> 32)}};
    const uint64_t s = static_cast<uint64_t>(seed);
    const Philox4 out =
        philox4x32(counter, static_cast<uint32_t>(s), static_cast<uint32_t>(s >> 32));
    return static_cast<float>(out.word[0] >> 8) * 5.9604644775390625e-08f;  // 2^-24
}

}  // namespace specdec
