// Every detector has a pair: a kernel with a bug (kBug) that must be reported at a line marked with
// `@name`, and the same kernel without it, which must not be. test_detectors.py runs them all.
#include <cstring>

#include "block.cuh"
#include "kernel.h"

using namespace specdec;

namespace {

// Both arrays have 1024 elements; `constant` is registered read-only.
struct Buffers {
    float* data;
    unsigned* words;
    const float* constant;
};

constexpr int kThreads = 128;

#define KERNEL(name)     \
    template <bool kBug> \
    __global__ void name([[maybe_unused]] Buffers b)

__device__ int thread_number() {
    return static_cast<int>(threadIdx.x);
}

// ---- races on shared memory ---------------------------------------------------------------------

KERNEL(raw_without_barrier) {
    CU_SHARED(a, float[kThreads]);
    a[thread_number()] = 1.0f;  // @raw_without_barrier
    if (!kBug) __syncthreads();
    b.data[thread_number()] = a[thread_number() ^ 64];  // @raw_without_barrier
}

KERNEL(war_on_refill) {
    CU_SHARED(a, float[kThreads]);
    float sum = 0.0f;
    for (int tile = 0; tile < 4; ++tile) {
        a[thread_number()] = static_cast<float>(tile);  // @war_on_refill
        __syncthreads();
        sum += a[thread_number() ^ 64];  // @war_on_refill
        if (!kBug) __syncthreads();
    }
    b.data[thread_number()] = sum;
}

KERNEL(same_value_twice) {
    CU_SHARED(flag, int);
    if (thread_number() == 0 || (kBug && thread_number() == 64)) flag = 1;  // @same_value_twice
    __syncthreads();
    b.data[thread_number()] = static_cast<float>(flag);
}

KERNEL(lanes_without_syncwarp) {
    CU_SHARED(a, float[kThreads]);
    a[thread_number()] = 1.0f;  // @lanes_without_syncwarp
    if (!kBug) __syncwarp();
    b.data[thread_number()] = a[thread_number() ^ 1];  // @lanes_without_syncwarp
}

KERNEL(shuffle_is_no_fence) {
    CU_SHARED(a, float[kThreads]);
    a[thread_number()] = 1.0f;  // @shuffle_is_no_fence
    const float other = __shfl_xor_sync(kFullMask, 1.0f, 1);
    if (!kBug) __syncwarp();
    b.data[thread_number()] = a[thread_number() ^ 1] + other;  // @shuffle_is_no_fence
}

KERNEL(half_warps_apart) {
    CU_SHARED(a, float[32]);
    const int lane = thread_number() % 32;
    if (thread_number() >= 32) return;
    a[lane] = 1.0f;  // @half_warps_apart
    if (lane < 16) {
        __syncwarp(0x0000ffffu);
    } else {
        __syncwarp(0xffff0000u);
    }
    b.data[lane] = a[kBug ? 31 - lane : lane ^ 15];  // @half_warps_apart
}

KERNEL(warps_without_block_barrier) {
    CU_SHARED(a, float[kThreads]);
    a[thread_number()] = 1.0f;  // @warps_without_block_barrier
    __syncwarp();
    b.data[thread_number()] =
        a[kBug ? thread_number() ^ 32 : thread_number() ^ 1];  // @warps_without_block_barrier
}

KERNEL(plain_read_of_atomic) {
    CU_SHARED(best, int);
    if (thread_number() == 0) best = 1000;
    __syncthreads();
    bool first = true;
    if (kBug) first = best > thread_number();      // @plain_read_of_atomic
    if (first) atomicMin(&best, thread_number());  // @plain_read_of_atomic
    __syncthreads();
    b.data[thread_number()] = static_cast<float>(best);
}

KERNEL(plain_instead_of_atomic) {
    CU_SHARED(best, int);
    if (thread_number() == 0) best = 1000;
    __syncthreads();
    if (kBug) {
        best = min(best, thread_number());  // @plain_instead_of_atomic
    } else {
        atomicMin(&best, thread_number());
    }
    __syncthreads();
    b.data[thread_number()] = static_cast<float>(best);
}

KERNEL(named_barrier_not_waited) {
    CU_SHARED(a, float[64]);
    if (thread_number() < 64) {
        a[thread_number()] = 1.0f;  // @named_barrier_not_waited
        ptx::bar_arrive(1, kThreads);
    } else {
        if (kBug) {
            ptx::bar_arrive(1, kThreads);
        } else {
            ptx::bar_sync(1, kThreads);
        }
        b.data[thread_number()] = a[thread_number() - 64];  // @named_barrier_not_waited
    }
}

KERNEL(reduction_scratch_reused) {
    CU_SHARED(scratch, float[4]);
    float total = 0.0f;
    for (int round = 0; round < 2; ++round) {
        const float sum = warp_sum(static_cast<float>(thread_number() + round));
        if (thread_number() % 32 == 0)
            scratch[thread_number() / 32] = sum;  // @reduction_scratch_reused
        __syncthreads();
        for (int w = 0; w < 4; ++w) total += scratch[w];  // @reduction_scratch_reused
        if (!kBug) __syncthreads();
    }
    b.data[thread_number()] = total;
}

// Readers of wide words must be remembered when the same memory is then read in bytes.
KERNEL(bytes_of_wide_words) {
    CU_SHARED(a, float4[kThreads]);
    a[thread_number()] = make_float4(0, 0, 0, 0);
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < kThreads; ++i) {
        const float4 all = a[i];  // @bytes_of_wide_words
        sum += all.x + all.w;
    }
    const auto* bytes = reinterpret_cast<const unsigned char*>(a);
    for (int i = 0; i < kThreads; ++i) sum += bytes[16 * i + 5];  // @bytes_of_wide_words
    if (!kBug) __syncthreads();
    a[thread_number()] = make_float4(sum, 0, 0, 0);  // @bytes_of_wide_words
    b.data[thread_number()] = sum;
}

// ---- races on global memory ---------------------------------------------------------------------

KERNEL(neighbour_block) {
    const int i = static_cast<int>(blockIdx.x) * kThreads + thread_number();
    b.data[i] = 1.0f;                                                            // @neighbour_block
    if (kBug) b.words[i] = static_cast<unsigned>(b.data[(i + kThreads) % 512]);  // @neighbour_block
}

KERNEL(block_barrier_on_global) {
    b.data[thread_number()] = 1.0f;  // @block_barrier_on_global
    if (!kBug) __syncthreads();
    b.words[thread_number()] =
        static_cast<unsigned>(b.data[thread_number() ^ 64]);  // @block_barrier_on_global
}

KERNEL(ticket_without_fence) {
    CU_SHARED(is_last, bool);
    b.data[blockIdx.x * kThreads + threadIdx.x] = 1.0f;  // @ticket_without_fence
    if (!kBug) __threadfence();
    __syncthreads();
    if (thread_number() == 0) is_last = atomicAdd(&b.words[0], 1u) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    float sum = 0.0f;
    for (unsigned i = 0; i < gridDim.x; ++i)
        sum += b.data[i * kThreads + threadIdx.x];  // @ticket_without_fence
    b.data[512 + thread_number()] = sum;
}

KERNEL(ticket_fence_after_barrier) {
    CU_SHARED(is_last, bool);
    b.data[blockIdx.x * kThreads + threadIdx.x] = 1.0f;  // @ticket_fence_after_barrier
    if (!kBug) __syncthreads();
    if (thread_number() == 0) {
        is_last = ptx::atom_add_acq_rel(&b.words[0], 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!is_last) return;
    float sum = 0.0f;
    for (unsigned i = 0; i < gridDim.x; ++i)
        sum += b.data[i * kThreads + threadIdx.x];  // @ticket_fence_after_barrier
    b.data[512 + thread_number()] = sum;
}

KERNEL(flag_without_release) {
    if (blockIdx.x == 0 && thread_number() == 0) {
        b.data[0] = 1.0f;  // @flag_without_release
        if (kBug) {
            b.words[0] = 1;  // @flag_without_release
        } else {
            ptx::st_release(&b.words[0], 1u);
        }
    }
    if (blockIdx.x == 1 && thread_number() == 0) {
        while (ptx::ld_acquire(&b.words[0]) == 0) {  // @flag_without_release
        }
        b.data[1] = b.data[0];  // @flag_without_release
    }
}

KERNEL(flag_seen_by_one_thread) {
    if (blockIdx.x == 0) {
        b.data[thread_number()] = 1.0f;  // @flag_seen_by_one_thread
        __syncthreads();
        if (thread_number() == 0) ptx::st_release(&b.words[0], 1u);
    }
    if (blockIdx.x == 1) {
        if (thread_number() == 0) {
            while (ptx::ld_acquire(&b.words[0]) == 0) {
            }
        }
        if (!kBug) __syncthreads();
        b.data[512 + thread_number()] = b.data[thread_number()];  // @flag_seen_by_one_thread
    }
}

KERNEL(flag_not_waited_for) {
    if (blockIdx.x == 0 && thread_number() == 0) {
        b.data[0] = 1.0f;  // @flag_not_waited_for
        ptx::st_release(&b.words[0], 1u);
    }
    if (blockIdx.x == 1 && thread_number() == 0) {
        if (!kBug) {
            while (ptx::ld_acquire(&b.words[0]) == 0) {
            }
        }
        b.data[1] = b.data[0];  // @flag_not_waited_for
    }
}

KERNEL(grid_without_barrier) {
    const int i = static_cast<int>(blockIdx.x) * kThreads + thread_number();
    b.data[i] = 1.0f;  // @grid_without_barrier
    if (!kBug) ptx::grid_sync();
    b.words[i] = static_cast<unsigned>(b.data[511 - i]);  // @grid_without_barrier
}

// ---- uninitialised and in-flight shared memory --------------------------------------------------

KERNEL(uninitialised_shared) {
    CU_SHARED(a, float[kThreads]);
    if (!kBug || thread_number() != 77) a[thread_number()] = 1.0f;
    __syncthreads();
    b.data[thread_number()] = a[127 - thread_number()];  // @uninitialised_shared
}

KERNEL(uninitialised_atomic) {
    CU_SHARED(count, unsigned);
    if (!kBug && thread_number() == 0) count = 0;
    __syncthreads();
    atomicAdd(&count, 1u);  // @uninitialised_atomic
}

KERNEL(copy_in_flight) {
    CU_SHARED(a, float4[2][kThreads]);
    const float4* from = reinterpret_cast<const float4*>(b.constant);
    ptx::cp_async16(&a[0][thread_number()], from + thread_number());
    ptx::cp_async_commit();
    ptx::cp_async16(&a[1][thread_number()], from + 128 + thread_number());
    ptx::cp_async_commit();
    ptx::cp_async_wait<kBug ? 1 : 0>();
    b.data[thread_number()] = a[1][thread_number()].x;  // @copy_in_flight
    ptx::cp_async_wait<0>();
}

KERNEL(write_to_copy_in_flight) {
    CU_SHARED(a, float4[kThreads]);
    ptx::cp_async16(&a[thread_number()],
                    reinterpret_cast<const float4*>(b.constant) + thread_number());
    ptx::cp_async_commit();
    if (!kBug) ptx::cp_async_wait<0>();
    a[thread_number()].y = 0.0f;  // @write_to_copy_in_flight
    ptx::cp_async_wait<0>();
}

KERNEL(copy_without_barrier) {
    CU_SHARED(a, float4[kThreads]);
    ptx::cp_async16(&a[thread_number()],  // @copy_without_barrier
                    reinterpret_cast<const float4*>(b.constant) + thread_number());
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    if (!kBug) __syncthreads();
    b.data[thread_number()] = a[thread_number() ^ 64].x;  // @copy_without_barrier
}

KERNEL(copy_over_data_in_use) {
    CU_SHARED(a, float4[kThreads]);
    a[thread_number()] = make_float4(0, 0, 0, 0);
    __syncthreads();
    const float x = a[thread_number() ^ 64].x;  // @copy_over_data_in_use
    if (!kBug) __syncthreads();
    ptx::cp_async16(&a[thread_number()],  // @copy_over_data_in_use
                    reinterpret_cast<const float4*>(b.constant) + thread_number());
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    b.data[thread_number()] = x;
}

KERNEL(copy_not_waited_for) {
    CU_SHARED(a, float4[kThreads]);
    ptx::cp_async16(&a[thread_number()],  // @copy_not_waited_for
                    reinterpret_cast<const float4*>(b.constant) + thread_number());
    ptx::cp_async_commit();
    if (!kBug) ptx::cp_async_wait<0>();
}

KERNEL(copy_not_committed) {
    CU_SHARED(a, float4[kThreads]);
    ptx::cp_async16(&a[thread_number()],  // @copy_not_committed
                    reinterpret_cast<const float4*>(b.constant) + thread_number());
    if (!kBug) ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
}

// ---- bounds and alignment -----------------------------------------------------------------------

KERNEL(read_past_the_end) {
    b.data[thread_number()] =
        b.constant[thread_number() + (kBug ? 897 : 896)];  // @read_past_the_end
}

KERNEL(write_past_the_end) {
    b.data[thread_number() + (kBug ? 897 : 896)] = 0.0f;  // @write_past_the_end
}

KERNEL(read_before_the_start) {
    b.data[thread_number()] =
        b.constant[thread_number() - (kBug ? 1 : 0)];  // @read_before_the_start
}

KERNEL(write_to_read_only) {
    float* to = kBug ? const_cast<float*>(b.constant) : b.data;
    to[thread_number()] = 0.0f;  // @write_to_read_only
}

KERNEL(shared_array_end) {
    CU_SHARED(first, float[kThreads]);
    CU_SHARED(second, float[kThreads]);
    first[thread_number() + (kBug ? 1 : 0)] = 0.0f;  // @shared_array_end
    second[thread_number()] = 0.0f;
}

struct Plan {
    cu::SmemLayout layout;
    size_t first = layout.add<float>(kThreads);
    size_t second = layout.add<float>(kThreads);
};

KERNEL(dynamic_shared_end) {
    const Plan plan;
    CU_DYN_SHARED(smem);
    float* first = cu::smem_at<float>(smem, plan.first, kThreads);
    float* second = cu::smem_at<float>(smem, plan.second, kThreads);
    first[thread_number()] = 0.0f;
    second[thread_number() - (kBug ? 1 : 0)] = 0.0f;  // @dynamic_shared_end
}

KERNEL(shared_arrays_overlap) {
    const Plan plan;
    CU_DYN_SHARED(smem);
    float* first = cu::smem_at<float>(smem, plan.first, kThreads);
    const size_t at = kBug ? plan.first + 256 : plan.second;
    float* second = cu::smem_at<float>(smem, at, kThreads);  // @shared_arrays_overlap
    first[thread_number()] = second[thread_number()] = 0.0f;
}

KERNEL(shared_beyond_launch) {
    const Plan plan;
    CU_DYN_SHARED(smem);
    constexpr int kCount = kBug ? 2 * kThreads : kThreads;
    float* second = cu::smem_at<float>(smem, plan.second, kCount);  // @shared_beyond_launch
    second[thread_number()] = 0.0f;
}

KERNEL(misaligned_vector) {
    const float* from = b.constant + 4 * thread_number() + (kBug ? 2 : 0);
    b.data[thread_number()] = reinterpret_cast<const float4*>(from)->x;
    const float4 all = *reinterpret_cast<const float4*>(from);  // @misaligned_vector
    b.data[thread_number()] = all.x + all.y + all.z + all.w;
}

KERNEL(misaligned_copy) {
    CU_SHARED(a, float[4 * kThreads + 4]);
    ptx::cp_async16(&a[4 * thread_number()],  // @misaligned_copy
                    b.constant + 4 * thread_number() + (kBug ? 1 : 0));
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
}

KERNEL(misaligned_atomic) {
    auto* bytes = reinterpret_cast<unsigned char*>(b.words) + (kBug ? 2 : 0);
    atomicAdd(reinterpret_cast<unsigned*>(bytes), 1u);  // @misaligned_atomic
}

KERNEL(misaligned_ldmatrix) {
    CU_SHARED(a, bf16[64 * 16 + 8]);
    for (int i = thread_number(); i < 64 * 16 + 8; i += kThreads) a[i] = bf16{0};
    __syncthreads();
    uint32_t r[4];
    ptx::ldmatrix_x4(r, a + thread_number() % 32 * 8 + (kBug ? 4 : 0));  // @misaligned_ldmatrix
    b.words[thread_number()] = r[0] + r[1] + r[2] + r[3];
}

KERNEL(stack_of_another_thread) {
    CU_SHARED(pointers, float* [kThreads]);
    float mine[2] = {static_cast<float>(thread_number()), 0.0f};
    pointers[thread_number()] = mine;
    __syncthreads();
    const float* whose = pointers[kBug ? thread_number() ^ 1 : thread_number()];
    b.data[thread_number()] = *whose;  // @stack_of_another_thread
    __syncthreads();
}

// ---- convergence --------------------------------------------------------------------------------

KERNEL(divergent_barrier) {
    if (thread_number() < 64 || !kBug) {
        __syncthreads();  // @divergent_barrier
    } else {
        __syncthreads();  // @divergent_barrier
    }
}

KERNEL(barrier_after_return) {
    if (kBug && thread_number() == 5) return;
    __syncthreads();  // @barrier_after_return
}

KERNEL(lane_outside_its_mask) {
    const int value =
        __shfl_xor_sync(kBug ? 0x0000ffffu : kFullMask, 1, 1);  // @lane_outside_its_mask
    b.data[thread_number()] = static_cast<float>(value);
}

KERNEL(source_outside_mask) {
    if (thread_number() % 32 < 16) {
        const int value = __shfl_xor_sync(0x0000ffffu, 1, kBug ? 16 : 1);  // @source_outside_mask
        b.data[thread_number()] = static_cast<float>(value);
    }
}

KERNEL(lanes_that_left) {
    if (kBug && thread_number() % 32 > 20) return;
    b.data[thread_number()] = warp_sum(1.0f);  // @lanes_that_left
}

KERNEL(barrier_against_shuffle) {
    if (kBug && thread_number() % 32 == 3) __syncthreads();  // @barrier_against_shuffle
    const int value = __shfl_xor_sync(kFullMask, 1, 1);      // @barrier_against_shuffle
    if (!kBug || thread_number() % 32 != 3) __syncthreads();
    b.data[thread_number()] = static_cast<float>(value);
}

KERNEL(masks_that_cross) {
    const int lane = thread_number() % 32;
    unsigned value = 0;
    if (!kBug || lane < 16) {
        value = __ballot_sync(kFullMask, 1);  // @masks_that_cross
    } else {
        value = __ballot_sync(kFullMask, 0);  // @masks_that_cross
    }
    b.words[thread_number()] = value;
}

KERNEL(grid_barrier_after_return) {
    if (kBug && blockIdx.x == 1) return;
    ptx::grid_sync();  // @grid_barrier_after_return
}

KERNEL(grid_barrier_not_cooperative) {
    if (kBug) ptx::grid_sync();  // @grid_barrier_not_cooperative
}

KERNEL(named_barrier_counts) {
    if (thread_number() < 64) {
        ptx::bar_sync(1, kThreads);  // @named_barrier_counts
    } else {
        ptx::bar_sync(1, kBug ? 64 : kThreads);  // @named_barrier_counts
    }
}

KERNEL(named_barrier_too_few) {
    if (!kBug || thread_number() < 96) ptx::bar_sync(1, kThreads);  // @named_barrier_too_few
}

KERNEL(endless_spin) {
    if (thread_number() == 0 && !kBug) ptx::st_release(&b.words[0], 1u);
    while (ptx::ld_acquire(&b.words[0]) == 0) __nanosleep(10);  // @endless_spin
}

KERNEL(trap) {
    if (kBug && thread_number() == 3) __trap();  // @trap
}

// ---- registry -----------------------------------------------------------------------------------

struct Case {
    const char* name;
    unsigned blocks;
    bool cooperative;
    void (*good)(Buffers);
    void (*bad)(Buffers);
};

#define CASE(name, blocks, cooperative) \
    { #name, blocks, cooperative, name < false>, name < true> }

const Case kCases[] = {
    CASE(raw_without_barrier, 1, false),
    CASE(war_on_refill, 1, false),
    CASE(same_value_twice, 1, false),
    CASE(lanes_without_syncwarp, 1, false),
    CASE(shuffle_is_no_fence, 1, false),
    CASE(half_warps_apart, 1, false),
    CASE(warps_without_block_barrier, 1, false),
    CASE(plain_read_of_atomic, 1, false),
    CASE(plain_instead_of_atomic, 1, false),
    CASE(named_barrier_not_waited, 1, false),
    CASE(reduction_scratch_reused, 1, false),
    CASE(bytes_of_wide_words, 1, false),
    CASE(neighbour_block, 4, false),
    CASE(block_barrier_on_global, 1, false),
    CASE(ticket_without_fence, 4, false),
    CASE(ticket_fence_after_barrier, 4, false),
    CASE(flag_without_release, 2, true),
    CASE(flag_seen_by_one_thread, 2, true),
    CASE(flag_not_waited_for, 2, true),
    CASE(grid_without_barrier, 4, true),
    CASE(uninitialised_shared, 1, false),
    CASE(uninitialised_atomic, 1, false),
    CASE(copy_in_flight, 1, false),
    CASE(write_to_copy_in_flight, 1, false),
    CASE(copy_without_barrier, 1, false),
    CASE(copy_over_data_in_use, 1, false),
    CASE(copy_not_waited_for, 1, false),
    CASE(copy_not_committed, 1, false),
    CASE(read_past_the_end, 1, false),
    CASE(write_past_the_end, 1, false),
    CASE(read_before_the_start, 1, false),
    CASE(write_to_read_only, 1, false),
    CASE(shared_array_end, 1, false),
    CASE(dynamic_shared_end, 1, false),
    CASE(shared_arrays_overlap, 1, false),
    CASE(shared_beyond_launch, 1, false),
    CASE(misaligned_vector, 1, false),
    CASE(misaligned_copy, 1, false),
    CASE(misaligned_atomic, 1, false),
    CASE(misaligned_ldmatrix, 1, false),
    CASE(stack_of_another_thread, 1, false),
    CASE(divergent_barrier, 1, false),
    CASE(barrier_after_return, 1, false),
    CASE(lane_outside_its_mask, 1, false),
    CASE(source_outside_mask, 1, false),
    CASE(lanes_that_left, 1, false),
    CASE(barrier_against_shuffle, 1, false),
    CASE(masks_that_cross, 1, false),
    CASE(grid_barrier_after_return, 4, true),
    CASE(grid_barrier_not_cooperative, 1, false),
    CASE(named_barrier_counts, 1, false),
    CASE(named_barrier_too_few, 1, false),
    CASE(endless_spin, 1, false),
    CASE(trap, 1, false),
};

}  // namespace

// Name of case number i, or null.
extern "C" __attribute__((visibility("default"))) const char* detector_case(int i) {
    return i >= 0 && i < static_cast<int>(sizeof(kCases) / sizeof(kCases[0])) ? kCases[i].name
                                                                              : nullptr;
}

extern "C" __attribute__((visibility("default"))) int detector_run(float* data, unsigned* words,
                                                                   const float* constant,
                                                                   int number, int bug) {
    const Case& c = kCases[number];
    const Plan plan;
    cu::LaunchCfg cfg;
    cfg.grid = dim3(c.blocks);
    cfg.block = dim3(kThreads);
    cfg.smem = plan.layout.bytes();
    cfg.cooperative = c.cooperative;
    return cu::launch(cfg, bug != 0 ? c.bad : c.good, Buffers{data, words, constant}).code;
}

namespace {
__global__ void empty_kernel() {}
}  // namespace

extern "C" __attribute__((visibility("default"))) int detector_launch(int grid_x, int grid_y,
                                                                      int threads, int smem,
                                                                      int cooperative) {
    cu::LaunchCfg cfg;
    cfg.grid = dim3(grid_x, grid_y);
    cfg.block = dim3(threads);
    cfg.smem = static_cast<size_t>(smem);
    cfg.cooperative = cooperative != 0;
    return cu::launch(cfg, empty_kernel).code;
}
