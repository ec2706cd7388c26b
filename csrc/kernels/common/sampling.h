// Constants of the sampling laws that CPU and CUDA kernels share.
#pragma once

#include "types.h"

namespace specdec {

// Below it a temperature means argmax (and a draft temperature means a one-hot draft law).
constexpr float kGreedyTemperature = 1e-5f;

// Vocabulary entries per tile: row sums are a fixed tree over absolute tiles.
constexpr int kVocabTile = 4096;

// A residual max(p - q, 0) of less mass is rounding noise: the token comes from p instead.
constexpr float kMinResidualMass = 1e-6f;

// NaN is greedy: such a request still gets a defined token.
SPECDEC_HD bool is_greedy(float temperature) { return !(temperature >= kGreedyTemperature); }

}  // namespace specdec
