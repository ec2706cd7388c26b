// What the headers seen by kernels (cuda_names.h, ptx.h, host_launch.h) need from the runtime.
//
// Everything here is out of line and compiled without a sanitizer: in the hooks build the compiler
// reports each memory access of kernel code, and accesses made on behalf of a collective or an
// atomic must be reported once, by the runtime, with their own meaning.
#pragma once

#include <cstddef>
#include <cstdint>

namespace specdec::emu {

struct Index3 {
    unsigned x, y, z;
};

// A place in kernel source, passed as pointers to literals.
struct Site {
    const char* file;
    int line;
};

// The const attribute holds because a fiber is one CUDA thread for as long as any of its frames
// lives.
__attribute__((const)) Index3 thread_idx();
__attribute__((const)) Index3 block_idx();
__attribute__((const)) Index3 block_dim();
__attribute__((const)) Index3 grid_dim();

// Ends the launch with an error at `site`; the calling fiber never runs again.
[[noreturn]] void fail(Site site, const char* format, ...) __attribute__((format(printf, 2, 3)));

// ---- barriers -----------------------------------------------------------------------------------

enum class BlockVote { kNone, kCount, kAnd, kOr };
int block_barrier(BlockVote vote, int predicate, Site site);  // __syncthreads and its variants
void named_barrier(int id, int threads, bool wait, Site site);
void grid_barrier(Site site);

// ---- warp collectives ---------------------------------------------------------------------------

enum class WarpOp {
    kSync,
    kShuffle,
    kBallot,
    kMatchAny,
    kReduceAdd,
    kReduceMin,
    kReduceMax,
    kReduceMinSigned,
    kReduceMaxSigned,
    kReduceAnd,
    kReduceOr,
    kReduceXor,
    kLdmatrix,
    kMmaBf16,
    kMmaF16,
};

struct ShuffleArgs {
    uint64_t value;
    int source_lane;
    uint64_t result;
};

struct VoteArgs {
    uint64_t value;
    uint64_t result;
};

struct LdmatrixArgs {
    const void* row;
    int matrices;  // 2 or 4
    bool transpose;
    uint32_t result[4];
};

struct MmaArgs {
    uint32_t a[4];
    uint32_t b[2];
    float c[4];
    float d[4];
};

// Waits until every lane of `mask` has arrived with the same operation at the same site; the last
// one to arrive fills in the results of all. `args` is one of the structs above.
void warp_collective(WarpOp op, unsigned mask, void* args, Site site);
unsigned lane_id();
// The lane a shuffle reads, or the own lane where CUDA defines the value as unchanged.
int shuffle_source(int wanted, int width, bool inside, Site site);
unsigned active_mask();

// ---- memory -------------------------------------------------------------------------------------

enum class AtomicOp { kAdd, kSub, kExch, kMin, kMax, kAnd, kOr, kXor, kInc, kDec, kCas };
enum class AtomicType { kI32, kU32, kU64, kI64, kF32, kF64 };
// Values travel as raw bits. `acq_rel` is true for atomics that order memory by themselves.
uint64_t atomic_rmw(AtomicOp op, AtomicType type, void* address, uint64_t operand, uint64_t compare,
                    bool acq_rel, Site site);
uint64_t load_acquire(const void* address, int bytes, Site site);
void store_release(void* address, uint64_t value, int bytes, Site site);
void thread_fence(Site site);
void yield(Site site);

void* shared_static(const void* key, size_t bytes, size_t alignment, const char* name, Site site);
unsigned char* shared_dynamic();
void shared_array(unsigned char* base, size_t offset, size_t bytes, size_t alignment, Site site);

void async_copy(void* smem, const void* gmem, int bytes, bool valid, Site site);
void async_commit();
void async_wait(int pending, Site site);

uint64_t clock_ticks();

// ---- launching ----------------------------------------------------------------------------------

struct LaunchRequest {
    Index3 grid;
    Index3 block;
    size_t smem;
    bool cooperative;
    void (*body)(const void* frame);  // runs the kernel once, as the current thread
    const void* frame;                // the arguments
    size_t frame_bytes;
};

// Returns 0, or an error code with the text in *what (valid until the next launch).
int run(const LaunchRequest& request, const char** what);
int resident_limit();
int multiprocessors();

}  // namespace specdec::emu
