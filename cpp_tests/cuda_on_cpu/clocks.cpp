// The clocks of race.h.
#include <algorithm>
#include <unordered_map>

#include "race.h"

namespace specdec::emu::race {

namespace {

std::vector<BlockClock> clocks;  // per block slot
Clocks grid_known;               // per thread of the grid, through grid barriers
bool grid_used = false;

struct Variable {
    uint64_t version = 0;
    Foreign known;
};
std::unordered_map<const void*, Variable> variables;

BlockClock& of(const Block& block) {
    return clocks[block.slot];
}
ThreadClock& of(const Fiber& fiber) {
    return clocks[fiber.block->slot].threads[fiber.linear];
}

ClocksPtr join(const ClocksPtr& a, const ClocksPtr& b) {
    if (a == nullptr || a == b) return b;
    if (b == nullptr) return a;
    auto joined = std::make_shared<Clocks>(*a);
    for (size_t i = 0; i < joined->size(); ++i) (*joined)[i] = std::max((*joined)[i], (*b)[i]);
    return joined;
}

ForeignPtr join(const ForeignPtr& a, const ForeignPtr& b) {
    if (a == nullptr || a == b) return b;
    if (b == nullptr) return a;
    auto joined = std::make_shared<Foreign>(*a);
    for (const auto& [key, known] : *b) {
        ClocksPtr& mine = (*joined)[key];
        mine = join(mine, known);
    }
    return joined;
}

// What `fiber` knows of the threads of its own block.
Clocks knowledge(const Fiber& fiber) {
    const BlockClock& block = of(*fiber.block);
    Clocks known = block.full;
    const unsigned first = fiber.warp->index * kWarpSize;
    const unsigned end = std::min<unsigned>(first + kWarpSize, fiber.block->threads);
    for (unsigned u = first; u < end; ++u) {
        known[u] = std::max(known[u], block.warp_sync[u]);
        if (block.lane_used) {
            known[u] = std::max(known[u], block.lane[fiber.linear * kWarpSize + u - first]);
        }
    }
    if (block.named_used) {
        const uint32_t* row = &block.named[fiber.warp->index * fiber.block->threads];
        for (unsigned u = 0; u < fiber.block->threads; ++u) known[u] = std::max(known[u], row[u]);
    }
    known[fiber.linear] = of(fiber).now;
    return known;
}

template <class Fibers>
void share_foreign(BlockClock& block, const Fibers& fibers) {
    if (!block.any_foreign) return;
    ForeignPtr all;
    for (const Fiber* fiber : fibers) all = join(all, of(*fiber).foreign);
    for (const Fiber* fiber : fibers) of(*fiber).foreign = all;
}

std::vector<Fiber*> lanes_of(Warp& warp, unsigned mask) {
    std::vector<Fiber*> fibers;
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
        fibers.push_back(&warp.lanes[__builtin_ctz(rest)]);
    }
    return fibers;
}

}  // namespace

void begin_launch() {
    clocks.resize(std::max(clocks.size(), machine.blocks.size()));
    variables.clear();
    grid_used = false;
}

void begin_block(Block& block) {
    BlockClock& c = of(block);
    c.threads.assign(block.threads, ThreadClock{});
    c.full.assign(block.threads, 0);
    c.warp_sync.assign(block.threads, 0);
    for (auto& barrier : c.barriers) {
        barrier.known.clear();
        barrier.foreign.reset();
    }
    c.lane_used = c.named_used = c.any_fence = c.any_foreign = false;
}

void block_synchronized(Block& block) {
    BlockClock& c = of(block);
    for (unsigned t = 0; t < block.threads; ++t) c.full[t] = c.threads[t].now++;
    if (!c.any_foreign) return;
    std::vector<Fiber*> everyone;
    for (unsigned t = 0; t < block.threads; ++t) everyone.push_back(&block.fibers[t]);
    share_foreign(c, everyone);
}

void warp_synchronized(Warp& warp, unsigned mask) {
    BlockClock& c = of(*warp.block);
    const std::vector<Fiber*> fibers = lanes_of(warp, mask);
    if (mask == 0xffffffffu) {
        for (const Fiber* fiber : fibers) c.warp_sync[fiber->linear] = of(*fiber).now++;
    } else {
        if (!c.lane_used) {
            c.lane.assign(warp.block->threads * kWarpSize, 0);
            c.lane_used = true;
        }
        uint32_t known[kWarpSize] = {};
        for (const Fiber* fiber : fibers) {
            for (unsigned u = 0; u < kWarpSize; ++u) {
                known[u] = std::max(known[u], c.lane[fiber->linear * kWarpSize + u]);
            }
            known[fiber->lane] = std::max(known[fiber->lane], of(*fiber).now);
        }
        for (const Fiber* fiber : fibers) {
            std::copy(known, known + kWarpSize, &c.lane[fiber->linear * kWarpSize]);
            ++of(*fiber).now;
        }
    }
    share_foreign(c, fibers);
}

void named_arrived(Fiber& fiber, int id) {
    BlockClock& c = of(*fiber.block);
    const unsigned threads = fiber.block->threads;
    if (!c.named_used) {
        c.named.assign(fiber.block->warps.size() * threads, 0);
        c.named_used = true;
    }
    auto& barrier = c.barriers[id];
    if (barrier.known.empty()) barrier.known.assign(threads, 0);
    if (fiber.lane == 0) {  // the rest of the warp arrives too and knows the same
        const uint32_t* row = &c.named[fiber.warp->index * threads];
        for (unsigned u = 0; u < threads; ++u)
            barrier.known[u] = std::max(barrier.known[u], row[u]);
    }
    barrier.known[fiber.linear] = of(fiber).now++;
    barrier.foreign = join(barrier.foreign, of(fiber).foreign);
}

void named_synchronized(Block& block, int id, const std::vector<Fiber*>& waiting, Fiber* caller) {
    BlockClock& c = of(block);
    auto& barrier = c.barriers[id];
    const auto learn = [&](Fiber& fiber) {
        if (fiber.lane == 0) {
            uint32_t* row = &c.named[fiber.warp->index * block.threads];
            for (unsigned u = 0; u < block.threads; ++u)
                row[u] = std::max(row[u], barrier.known[u]);
        }
        of(fiber).foreign = join(of(fiber).foreign, barrier.foreign);
    };
    for (Fiber* fiber : waiting) learn(*fiber);
    if (caller != nullptr) learn(*caller);
    barrier.known.clear();
    barrier.foreign.reset();
}

void grid_synchronized() {
    if (!grid_used) grid_known.assign(machine.num_blocks * machine.threads, 0);
    grid_used = true;
    for (Block& block : machine.blocks) {
        if (block.done || block.threads == 0) continue;
        BlockClock& c = of(block);
        for (unsigned t = 0; t < block.threads; ++t) {
            grid_known[block.linear * block.threads + t] = c.full[t] = c.threads[t].now++;
        }
    }
}

void fence(Fiber& fiber) {
    ThreadClock& self = of(fiber);
    self.fence_known = knowledge(fiber);
    self.fence_foreign = self.foreign;
    self.fence_clock = self.now++;
    of(*fiber.block).any_fence = true;
}

void acquire(Fiber& fiber, const void* variable) {
    const auto found = variables.find(variable);
    if (found == variables.end()) return;
    const Variable& v = found->second;
    ThreadClock& self = of(fiber);
    if (self.acquired == variable && self.acquired_version == v.version) return;
    self.acquired = variable;
    self.acquired_version = v.version;
    self.foreign = join(self.foreign, std::make_shared<const Foreign>(v.known));
    of(*fiber.block).any_foreign = true;
}

void release(Fiber& fiber, const void* variable, bool all) {
    const BlockClock& block = of(*fiber.block);
    ThreadClock& self = of(fiber);
    if (!all && !block.any_fence) return;
    Clocks known = knowledge(fiber);
    ForeignPtr foreign = self.foreign;
    if (!all) {
        // Fences are cumulative: what another thread wrote before its own fence goes along if a
        // barrier has made it known here.
        for (unsigned u = 0; u < known.size(); ++u) {
            known[u] = std::min(known[u], block.threads[u].fence_clock);
            if (!self.fence_known.empty()) known[u] = std::max(known[u], self.fence_known[u]);
        }
        foreign = self.fence_foreign;
    }
    Variable& v = variables[variable];
    ++v.version;
    const auto publish = [&](std::pair<uint64_t, const void*> key, ClocksPtr clocks_of_block) {
        ClocksPtr& entry = v.known[key];
        entry = join(entry, clocks_of_block);
    };
    const uint64_t own = fiber.block->linear;
    publish({own, nullptr}, std::make_shared<const Clocks>(std::move(known)));
    if (!all) {
        Clocks atomics(fiber.block->threads, 0);
        atomics[fiber.linear] = self.now;
        publish({own, variable}, std::make_shared<const Clocks>(std::move(atomics)));
    }
    if (foreign != nullptr) {
        for (const auto& [key, clocks_of_block] : *foreign) publish(key, clocks_of_block);
    }
    ++self.now;
}

uint32_t now(const Fiber& fiber) {
    return of(fiber).now;
}

uint32_t global_thread(const Fiber& fiber) {
    return static_cast<uint32_t>(fiber.block->linear * fiber.block->threads + fiber.linear);
}

bool ordered(const Fiber& fiber, uint32_t other_thread, uint32_t clock, const void* variable) {
    const unsigned threads = fiber.block->threads;
    const BlockClock& c = of(*fiber.block);
    const uint32_t u =
        other_thread - static_cast<uint32_t>(fiber.block->linear * fiber.block->threads);
    if (u < threads) {
        if (u == fiber.linear || clock <= c.full[u]) return true;
        if (u / kWarpSize == fiber.warp->index) {
            if (clock <= c.warp_sync[u]) return true;
            if (c.lane_used && clock <= c.lane[fiber.linear * kWarpSize + u % kWarpSize])
                return true;
        }
        if (c.named_used && clock <= c.named[fiber.warp->index * threads + u]) return true;
    } else if (grid_used && clock <= grid_known[other_thread]) {
        return true;
    }
    if (!c.any_foreign) return false;
    const ForeignPtr& foreign = c.threads[fiber.linear].foreign;
    if (foreign == nullptr) return false;
    const auto knows = [&](const void* of_variable) {
        const auto known = foreign->find({other_thread / threads, of_variable});
        return known != foreign->end() && clock <= (*known->second)[other_thread % threads];
    };
    return knows(nullptr) || (variable != nullptr && knows(variable));
}

}  // namespace specdec::emu::race
