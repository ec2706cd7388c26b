// CUDA for g++: the part of CUDA C++ that kernels may use, on the emulator. Included by kernel.h.
#pragma once

#if defined(__CUDACC__)
#error "host.h replaces CUDA; nvcc must not see it"
#endif

#include "cuda_names.h"
#include "cuda_math.h"
#include "ptx.h"
