// Launches and the scheduler.
#include "runtime.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "hooks.h"
#include "sanitizer.h"

namespace specdec::emu {

namespace {

std::mutex launch_mutex;
char* stacks = nullptr;
size_t stacks_mapped = 0;

// Each stack begins at another cache set, or a switch would always evict the same lines.
constexpr size_t kStagger = 64;
constexpr size_t kStaggerSteps = 64;
// Only so many guard pages fit the kernel's limit on mappings; later stacks have a canary only.
constexpr size_t kGuardedStacks = 8192;
constexpr size_t kGuardBytes = 4096;
constexpr uint64_t kCanary = 0x5afe57ac5afe57acull;

uint64_t* canary_of(const Fiber& fiber) {
    return reinterpret_cast<uint64_t*>(fiber.stack + kGuardBytes);
}

bool map_stacks(size_t count) {
    if (count * stack_bytes <= stacks_mapped) return true;
    if (stacks != nullptr) munmap(stacks, stacks_mapped);
    stacks_mapped = 0;
    void* memory = mmap(nullptr, count * stack_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED) {
        stacks = nullptr;
        return false;
    }
    stacks = static_cast<char*>(memory);
    stacks_mapped = count * stack_bytes;
    for (size_t i = 0; i < std::min(count, kGuardedStacks); ++i) {
        mprotect(stacks + i * stack_bytes, kGuardBytes, PROT_NONE);
    }
    return true;
}

void switch_to(Context& from, Fiber* next) {
    ++machine.switches;
    current = next;
    sanitizer::before_switch(next->stack, stack_bytes);
    context_switch(from, next->context);
    sanitizer::after_switch();
}

void fiber_main() {
    sanitizer::after_first_switch();
    machine.request->body(machine.request->frame);
    Fiber& self = *current;
    check_exit(self);
    end_thread_memory(self);
    if (*canary_of(self) != kCanary) fail(Site{nullptr, 0}, "stack overflow of a device thread");
    self.state = FiberState::kExited;
    self.warp->exited |= 1u << self.lane;
    note_progress();
    if (--self.block->live == 0) machine.finished = self.block;
    leave_for_good();
}

Index3 unflatten(uint64_t linear, Index3 extent) {
    return Index3{static_cast<unsigned>(linear % extent.x),
                  static_cast<unsigned>(linear / extent.x % extent.y),
                  static_cast<unsigned>(linear / extent.x / extent.y)};
}

void start_fiber(Fiber& fiber) {
    fiber.state = FiberState::kReady;
    fiber.async.clear();
    fiber.async_group = 0;
    sanitizer::unpoison(fiber.stack + kGuardBytes, stack_bytes - kGuardBytes);
    *canary_of(fiber) = kCanary;
    const size_t fiber_number = static_cast<size_t>(&fiber - machine.fibers.get());
    context_make(fiber.context, fiber.stack, stack_bytes - fiber_number % kStaggerSteps * kStagger,
                 fiber_main);
}

void start_block(Block& block, uint64_t linear) {
    block.linear = linear;
    block.index = unflatten(linear, machine.request->grid);
    block.live = block.threads;
    block.done = false;
    for (Warp& warp : block.warps) {
        warp.exited = 0;
        warp.at_barrier = 0;
        warp.pending.clear();
    }
    for (Barrier& barrier : block.barriers) {
        barrier.arrived = 0;
        barrier.waiting.clear();
    }
    begin_block_memory(block);
    if constexpr (kHooks) hooks::block_begin(block);
    for (unsigned i = 0; i < block.threads; ++i) start_fiber(block.fibers[i]);
    const bool descending = machine.settings.order == Order::kReverse;
    for (unsigned i = 0; i < block.threads; ++i) {
        make_ready(&block.fibers[descending ? block.threads - 1 - i : i]);
    }
}

void admit_into(Block& block) {
    block.done = true;
    if (machine.next_block == machine.num_blocks) return;
    start_block(block, machine.block_order[machine.next_block++]);
}

bool fail_launch(const char* format, unsigned long long a, unsigned long long b) {
    char text[256];
    std::snprintf(text, sizeof(text), format, a, b);
    machine.error = text;
    machine.failed = true;
    return false;
}

bool prepare(const LaunchRequest& request) {
    const auto& g = request.grid;
    const auto& b = request.block;
    const uint64_t blocks = static_cast<uint64_t>(g.x) * g.y * g.z;
    const uint64_t threads = static_cast<uint64_t>(b.x) * b.y * b.z;
    if (blocks == 0 || threads == 0) {
        return fail_launch("launch: empty grid (%llu blocks) or block (%llu threads)", blocks,
                           threads);
    }
    if (threads > kMaxThreads || b.z > 64) {
        return fail_launch("launch: %llu threads per block, at most %llu", threads, kMaxThreads);
    }
    if (g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535) {
        return fail_launch("launch: grid.y = %llu or grid.z = %llu is over 65535", g.y, g.z);
    }
    // Red zones (at most 32 arrays) are not part of what the GPU would need.
    if (request.smem > kMaxDynamicShared + 32 * kSharedRedZone) {
        return fail_launch("launch: %llu bytes of dynamic shared memory, at most %llu",
                           request.smem, kMaxDynamicShared);
    }
    const unsigned limit = request.cooperative ? machine.settings.max_coop_blocks
                                               : std::max(1u, machine.settings.resident);
    if (request.cooperative && blocks > limit) {
        return fail_launch("launch: cooperative grid of %llu blocks, at most %llu are resident",
                           blocks, limit);
    }
    const size_t slots = static_cast<size_t>(std::min<uint64_t>(blocks, limit));

    const size_t needed = slots * threads;
    if (!map_stacks(needed)) {
        return fail_launch("launch: no memory for %llu stacks of %llu bytes", needed, stack_bytes);
    }
    if (needed > machine.num_fibers) {
        machine.fibers.reset(new Fiber[needed]);
        machine.num_fibers = needed;
    }
    for (size_t i = 0; i < needed; ++i) machine.fibers[i].stack = stacks + i * stack_bytes;
    machine.threads = static_cast<unsigned>(threads);
    machine.num_blocks = blocks;
    machine.next_block = 0;
    machine.finished_blocks = 0;
    machine.finished = nullptr;
    machine.grid_arrived = 0;
    machine.grid_waiting.clear();
    machine.idle_yields = 0;
    machine.ready.reset(machine.settings.order, machine.settings.seed, needed);
    if (machine.blocks.size() < slots) machine.blocks.resize(slots);

    const unsigned warps = (machine.threads + kWarpSize - 1) / kWarpSize;
    for (size_t s = 0; s < slots; ++s) {
        Block& block = machine.blocks[s];
        block.slot = static_cast<unsigned>(s);
        block.threads = machine.threads;
        block.fibers = machine.fibers.get() + s * threads;
        block.dynamic_bytes = request.smem;
        block.warps.resize(warps);
        for (unsigned w = 0; w < warps; ++w) {
            Warp& warp = block.warps[w];
            const unsigned lanes = std::min(kWarpSize, machine.threads - w * kWarpSize);
            warp.block = &block;
            warp.index = w;
            warp.lanes = block.fibers + w * kWarpSize;
            warp.existing = lanes == kWarpSize ? 0xffffffffu : (1u << lanes) - 1;
        }
        for (unsigned t = 0; t < machine.threads; ++t) {
            Fiber& fiber = block.fibers[t];
            fiber.block = &block;
            fiber.warp = &block.warps[t / kWarpSize];
            fiber.linear = t;
            fiber.lane = t % kWarpSize;
            fiber.index = unflatten(t, request.block);
        }
    }

    machine.block_order.resize(blocks);
    for (uint64_t i = 0; i < blocks; ++i) {
        machine.block_order[i] = machine.settings.order == Order::kReverse ? blocks - 1 - i : i;
    }
    if (machine.settings.order >= Order::kRandom) {
        for (uint64_t i = blocks - 1; i > 0; --i) {
            std::swap(machine.block_order[i],
                      machine.block_order[machine.ready.random() % (i + 1)]);
        }
    }
    return true;
}

// No fiber can run and some have not returned: says who waits where.
void report_deadlock() {
    std::map<std::string, unsigned> places;
    for (Block& block : machine.blocks) {
        if (block.done) continue;
        for (unsigned t = 0; t < block.threads; ++t) {
            const Fiber& fiber = block.fibers[t];
            if (fiber.state != FiberState::kWaiting) continue;
            places[describe_location(fiber.waiting_at.file, fiber.waiting_at.line) + " (" +
                   fiber.waiting_for + ")"]++;
        }
    }
    std::string text = "deadlock: no thread can run;";
    int shown = 0;
    for (const auto& [place, count] : places) {
        if (++shown > 6) break;
        text += " " + std::to_string(count) + " wait at " + place + ";";
    }
    machine.error = text;
    machine.failed = true;
}

void run_blocks() {
    const size_t slots = static_cast<size_t>(machine.blocks.size());
    for (size_t s = 0; s < slots && machine.next_block < machine.num_blocks; ++s) {
        if (machine.blocks[s].threads == machine.threads) admit_into(machine.blocks[s]);
    }
    while (!machine.failed) {
        if (machine.finished != nullptr) {
            Block& block = *machine.finished;
            machine.finished = nullptr;
            ++machine.finished_blocks;
            if constexpr (kHooks) hooks::block_end(block);
            if (machine.failed) break;
            admit_into(block);
        }
        Fiber* next = machine.ready.pop();
        if (next == nullptr) {
            if (machine.finished_blocks < machine.num_blocks) report_deadlock();
            break;
        }
        switch_to(machine.host, next);
        current = nullptr;
    }
}

}  // namespace

bool in_any_stack(uintptr_t address) {
    return address - reinterpret_cast<uintptr_t>(stacks) < stacks_mapped;
}

void leave_for_good() {
    sanitizer::before_last_switch();
    Fiber* next = machine.failed || machine.finished != nullptr ? nullptr : machine.ready.pop();
    Context& own = current->context;
    if (next != nullptr) {
        ++machine.switches;
        current = next;
        sanitizer::before_switch_no_return(next->stack, stack_bytes);
        context_switch(own, next->context);
    } else {
        sanitizer::before_host_switch();
        context_switch(own, machine.host);
    }
    __builtin_unreachable();
}

void suspend(const char* what, Site site) {
    Fiber* self = current;
    self->state = FiberState::kWaiting;
    self->waiting_for = what;
    self->waiting_at = site;
    Fiber* next = machine.ready.pop();
    if (next != nullptr) {
        switch_to(self->context, next);
    } else {
        sanitizer::before_host_switch();
        context_switch(self->context, machine.host);
        sanitizer::after_switch();
    }
}

void yield(Site site) {
    if (current == nullptr) return;
    // A spin that nobody can end: nothing has happened for many rounds of all fibers.
    const uint64_t limit = 100000 + 1000 * static_cast<uint64_t>(machine.ready.size());
    if (++machine.idle_yields > limit) {
        fail(site, "livelock: this thread spins and no other thread makes progress");
    }
    if (machine.ready.empty()) return;
    Fiber* self = current;
    self->state = FiberState::kReady;
    machine.ready.push_yielded(self);
    Fiber* next = machine.ready.pop();
    if (next != self) switch_to(self->context, next);
}

void fail(Site site, const char* format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    char where[160] = "";
    if (current != nullptr) {
        const Index3 t = current->index;
        const Index3 b = current->block->index;
        std::snprintf(where, sizeof(where), " [thread (%u,%u,%u) of block (%u,%u,%u)]", t.x, t.y,
                      t.z, b.x, b.y, b.z);
    }
    if (!machine.failed) {
        machine.error =
            (site.file != nullptr ? describe_location(site.file, site.line) + ": " : "") + text +
            where;
        machine.failed = true;
    }
    if (current == nullptr) {
        std::fprintf(stderr, "emulator: %s\n", machine.error.c_str());
        std::abort();  // device code called outside a launch
    }
    leave_for_good();
}

int run(const LaunchRequest& request, const char** what) {
    static std::string last_error;
    const std::lock_guard<std::mutex> lock(launch_mutex);
    machine.failed = false;
    machine.error.clear();
    machine.request = &request;
    ++machine.launches;
    if (prepare(request)) {
        sanitizer::enter_host();
        if constexpr (kHooks) hooks::launch_begin(request);
        run_blocks();
        if constexpr (kHooks) hooks::launch_end();
    }
    for (Block& block : machine.blocks) block.threads = 0;
    current = nullptr;
    machine.request = nullptr;
    last_error = machine.error;
    *what = last_error.c_str();
    return machine.failed ? 1 : 0;
}

}  // namespace specdec::emu
