// The machine behind emu.h: one fiber per CUDA thread, all on one host thread, fully deterministic.
//
//   machine.cpp  the state of it all              runtime.cpp      launches, switching fibers
//   sync.cpp     barriers, warp collectives       ready_queue.cpp  schedules
//   memory.cpp   shared memory, copies, atomics   matrix.cpp       ldmatrix, mma, conversions
//   capi.cpp     the C interface for tests
// and in the hooks build hooks.cpp (events), tsan.cpp (every access), checks.cpp (what an access
// must satisfy), clocks.cpp and shadow.cpp (races), counters.cpp, symbols.cpp (source lines).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "context.h"
#include "emu.h"

#if !defined(EMU_HOOKS)
#define EMU_HOOKS 0
#endif
#if !defined(EMU_ASAN)
#define EMU_ASAN 0
#endif

namespace specdec::emu {

constexpr bool kHooks = EMU_HOOKS != 0;
constexpr bool kAsan = EMU_ASAN != 0;
constexpr unsigned kWarpSize = 32;
constexpr unsigned kMaxThreads = 1024;
constexpr size_t kSharedRedZone = 128;
constexpr size_t kStaticSharedBytes = 48 * 1024;
constexpr size_t kMaxDynamicShared = 227 * 1024;
constexpr unsigned char kPoison = 0xff;  // NaN in every float format, -1 in every integer

struct Block;
struct Warp;

struct AsyncCopy {
    unsigned char* smem;
    const void* gmem;
    int bytes;
    bool valid;
    uint64_t group;
    Site site;
};

enum class FiberState : uint8_t { kReady, kWaiting, kExited };

struct Fiber {
    Context context;
    char* stack = nullptr;
    Block* block = nullptr;
    Warp* warp = nullptr;
    Index3 index{};
    unsigned linear = 0;  // within the block
    unsigned lane = 0;
    FiberState state = FiberState::kReady;
    const char* waiting_for = nullptr;
    Site waiting_at{};
    int barrier_result = 0;
    uint64_t async_group = 0;  // groups committed so far
    std::vector<AsyncCopy> async;
    void* asan_fake_stack = nullptr;
};

// Lanes that have arrived at one warp operation and wait for the rest of its mask.
struct Rendezvous {
    WarpOp op;
    unsigned mask;
    unsigned arrived;
    Site site;
    void* args[kWarpSize];
};

struct Warp {
    Block* block = nullptr;
    Fiber* lanes = nullptr;  // 32 in a row
    unsigned index = 0;
    unsigned existing = 0;  // lanes that the block has
    unsigned exited = 0;
    unsigned at_barrier = 0;  // lanes that wait at a block, named or grid barrier
    std::vector<Rendezvous> pending;
};

struct Barrier {
    int expected = 0;
    int arrived = 0;
    int count = 0;  // threads with a true predicate
    BlockVote vote = BlockVote::kNone;
    Site site{};
    std::vector<Fiber*> waiting;
};

struct SharedArray {
    size_t offset;
    size_t bytes;
    const void* key;  // identifies a CU_SHARED declaration, null for smem_at
    const char* name;
    Site site;
};

constexpr int kNumBarriers = 16;

struct Block {
    Index3 index{};
    uint64_t linear = 0;
    unsigned slot = 0;
    unsigned threads = 0;
    unsigned live = 0;
    bool done = true;
    Fiber* fibers = nullptr;
    std::vector<Warp> warps;
    Barrier barriers[kNumBarriers];
    unsigned char* shared = nullptr;  // dynamic part, then a red zone, then CU_SHARED arrays
    size_t shared_bytes = 0;
    size_t dynamic_bytes = 0;
    size_t static_used = 0;
    std::vector<SharedArray> arrays;
};

enum class Order : int { kForward = 0, kReverse = 1, kRandom = 2, kSkewed = 3 };

struct Settings {
    Order order = Order::kForward;
    uint64_t seed = 1;
    unsigned resident = 4;           // blocks of an ordinary launch that run at the same time
    unsigned max_coop_blocks = 264;  // what cu::max_resident_blocks answers
    unsigned multiprocessors = 132;
    bool allow_exited = false;  // barriers do not wait for threads that have returned
    bool cp_early = false;      // cp.async delivers at issue instead of at the wait
};

// Fibers that can run, in the order of the schedule.
class ReadyQueue {
  public:
    void reset(Order order, uint64_t seed, size_t capacity);
    void push(Fiber* fiber);
    void push_yielded(Fiber* fiber);  // like push, behind everything else
    Fiber* pop();
    bool empty() const { return count_ == 0; }
    size_t size() const { return count_; }
    Order order() const { return order_; }
    uint64_t random();

  private:
    struct Entry {
        uint64_t priority;
        Fiber* fiber;
    };
    Order order_ = Order::kForward;
    uint64_t seed_ = 1;
    uint64_t state_ = 1;
    size_t head_ = 0;
    size_t count_ = 0;
    size_t mask_ = 0;
    std::vector<Fiber*> ring_;
    std::vector<Entry> heap_;
    uint64_t floor_ = 0;
};

struct Machine {
    Settings settings;
    ReadyQueue ready;
    const LaunchRequest* request = nullptr;
    Context host;
    std::vector<Block> blocks;
    std::unique_ptr<Fiber[]> fibers;
    size_t num_fibers = 0;
    unsigned threads = 0;
    uint64_t num_blocks = 0;
    uint64_t next_block = 0;
    uint64_t finished_blocks = 0;
    uint64_t grid_arrived = 0;
    Site grid_site{};
    std::vector<Fiber*> grid_waiting;
    std::vector<uint64_t> block_order;
    uint64_t switches = 0;
    uint64_t launches = 0;
    uint64_t barriers = 0;
    uint64_t collectives = 0;
    uint64_t idle_yields = 0;
    bool failed = false;
    std::string error;
    Block* finished = nullptr;  // the block whose last thread has just returned
};

extern Machine machine;
extern Fiber* current;  // null outside a kernel
extern size_t stack_bytes;

// Stops the calling fiber until make_ready puts it back.
void suspend(const char* what, Site site);
inline void make_ready(Fiber* fiber) {
    fiber->state = FiberState::kReady;
    machine.ready.push(fiber);
}
inline void note_progress() {
    machine.idle_yields = 0;
}
[[noreturn]] void leave_for_good();
// Whether an address lies in the stack of a device thread.
bool in_any_stack(uintptr_t address);
std::string describe_location(const char* file, int line);
// Called as a thread returns: everything that can no longer be completed is an error.
void check_exit(Fiber& fiber);
// Fills in the results of a complete rendezvous.
void complete_matrix_op(Rendezvous& meeting, Warp& warp);
void begin_block_memory(Block& block);
void end_thread_memory(Fiber& fiber);

}  // namespace specdec::emu
