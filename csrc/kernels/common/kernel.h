// The one include of a CUDA kernel.
//
// Under nvcc it is CUDA plus the few names below. Under g++ the same names come from
// cpp_tests/cuda_on_cpu/host.h, which runs every thread of the grid as a fiber on the CPU, so that
// the very source that ships is tested on machines without a GPU. Both sides provide
//
//   cu::LaunchCfg, cu::launch(cfg, kernel, args...)   -> Status, the only way to start a kernel
//   cu::SmemLayout, cu::smem_at<T>(base, off, n)      dynamic shared memory
//   CU_SHARED(name, type), CU_DYN_SHARED(name)        shared memory declarations
//   CU_NOINLINE                                       a large function with several callers
//   cu::max_resident_blocks, cu::sm_count, cu::memset_async, cu::guard
//   ptx::*                                            single instructions, see device.h
//
// Rules for kernels: include only this header; no <<<>>>, no bare __shared__; spin only on
// ptx::ld_acquire, atomics or __nanosleep; reach every *_sync call with a literal mask from all
// lanes of the mask at one source line; no printf, malloc or cooperative_groups objects.
#pragma once

#include <cstddef>
#include <cstdint>

#include "types.h"

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#define SPECDEC_EMULATED 0
#else
#define SPECDEC_EMULATED 1
#include "host.h"  // cpp_tests/cuda_on_cpu
#endif

#include "launch.h"

#if defined(__CUDACC__)
#include "device.h"
#define CU_NOINLINE __noinline__
#else
#define CU_NOINLINE __attribute__((noinline))
#endif
