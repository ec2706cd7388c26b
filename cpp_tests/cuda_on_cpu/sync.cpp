// Barriers and warp collectives: a rendezvous, completed by whoever arrives last.
#include "runtime.h"

#include <cstring>

#include "hooks.h"

namespace specdec::emu {

namespace {

bool same_site(Site a, Site b) {
    return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

std::string at(Site site) {
    return describe_location(site.file, site.line);
}

bool descending() {
    return machine.settings.order == Order::kReverse;
}

const char* name_of(WarpOp op) {
    switch (op) {
        case WarpOp::kSync:
            return "__syncwarp";
        case WarpOp::kShuffle:
            return "shuffle";
        case WarpOp::kBallot:
            return "warp vote";
        case WarpOp::kMatchAny:
            return "__match_any_sync";
        case WarpOp::kLdmatrix:
            return "ldmatrix";
        case WarpOp::kMmaBf16:
            return "mma bf16";
        case WarpOp::kMmaF16:
            return "mma f16";
        default:
            return "__reduce_sync";
    }
}

// Lanes of `mask` that already wait at a block-wide barrier will not come.
void expect_lanes(const Warp& warp, unsigned mask, const char* what, Site site) {
    const unsigned missing = mask & ~warp.existing;
    if (missing != 0) fail(site, "%s: lanes 0x%08x of the mask do not exist", what, missing);
    const unsigned gone = mask & warp.exited;
    if (gone != 0) fail(site, "%s: lanes 0x%08x of the mask have returned", what, gone);
    const unsigned stuck = mask & warp.at_barrier;
    if (stuck != 0) {
        const Fiber& other = warp.lanes[__builtin_ctz(stuck)];
        fail(site, "%s waits for lanes 0x%08x, which wait at %s (%s)", what, stuck,
             at(other.waiting_at).c_str(), other.waiting_for);
    }
}

// A lane that enters a barrier leaves the pending collectives of its warp incomplete.
void expect_no_pending(const Warp& warp, unsigned lane, const char* what, Site site) {
    for (const Rendezvous& meeting : warp.pending) {
        if ((meeting.mask >> lane & 1u) != 0) {
            fail(site, "%s, while lanes 0x%08x wait for this lane in %s at %s", what,
                 meeting.arrived, name_of(meeting.op), at(meeting.site).c_str());
        }
    }
}

void release(std::vector<Fiber*>& waiting) {
    const size_t count = waiting.size();
    for (size_t i = 0; i < count; ++i) {
        Fiber* fiber = waiting[descending() ? count - 1 - i : i];
        fiber->warp->at_barrier &= ~(1u << fiber->lane);
        make_ready(fiber);
    }
    waiting.clear();
}

void release_block(Block& block) {
    const unsigned count = block.threads;
    for (unsigned i = 0; i < count; ++i) {
        Fiber& fiber = block.fibers[descending() ? count - 1 - i : i];
        if (fiber.state != FiberState::kWaiting) continue;
        fiber.warp->at_barrier &= ~(1u << fiber.lane);
        make_ready(&fiber);
    }
}

int vote_result(const Barrier& barrier) {
    if (barrier.vote == BlockVote::kAnd) return barrier.count == barrier.arrived;
    return barrier.vote == BlockVote::kOr ? barrier.count > 0 : barrier.count;
}

// Every thread of the block that has to be there is.
void complete_block_barrier(Block& block, Barrier& barrier) {
    const int result = vote_result(barrier);
    if constexpr (kHooks) hooks::block_synchronized(block);
    for (Fiber* fiber : barrier.waiting) fiber->barrier_result = result;
    const bool everyone_waits = barrier.arrived == static_cast<int>(block.threads);
    barrier.arrived = barrier.count = 0;
    ++machine.barriers;
    note_progress();
    if (everyone_waits) {
        barrier.waiting.clear();
        release_block(block);
    } else {
        release(barrier.waiting);
    }
}

bool block_barrier_complete(const Block& block, const Barrier& barrier) {
    const unsigned needed = machine.settings.allow_exited ? block.live : block.threads;
    return barrier.arrived >= static_cast<int>(needed);
}

void complete_votes(Rendezvous& meeting) {
    VoteArgs* args[kWarpSize];
    unsigned lanes[kWarpSize];
    int count = 0;
    for (unsigned rest = meeting.mask; rest != 0; rest &= rest - 1) {
        lanes[count] = static_cast<unsigned>(__builtin_ctz(rest));
        args[count] = static_cast<VoteArgs*>(meeting.args[lanes[count]]);
        ++count;
    }
    if (meeting.op == WarpOp::kMatchAny) {
        for (int i = 0; i < count; ++i) {
            unsigned equal = 0;
            for (int j = 0; j < count; ++j) {
                if (args[i]->value == args[j]->value) equal |= 1u << lanes[j];
            }
            args[i]->result = equal;
        }
        return;
    }
    uint64_t result = meeting.op == WarpOp::kBallot ? 0 : args[0]->value;
    for (int i = 0; i < count; ++i) {
        const auto value = static_cast<unsigned>(args[i]->value);
        const auto so_far = static_cast<unsigned>(result);
        const bool less = value < so_far;
        const bool signed_less = static_cast<int>(value) < static_cast<int>(so_far);
        const bool first = i == 0;
        switch (meeting.op) {
            case WarpOp::kBallot:
                result |= args[i]->value << lanes[i];
                break;
            case WarpOp::kReduceAdd:
                result = first ? value : so_far + value;
                break;
            case WarpOp::kReduceMin:
                result = less ? value : so_far;
                break;
            case WarpOp::kReduceMax:
                result = less ? so_far : value;
                break;
            case WarpOp::kReduceMinSigned:
                result = signed_less ? value : so_far;
                break;
            case WarpOp::kReduceMaxSigned:
                result = signed_less ? so_far : value;
                break;
            case WarpOp::kReduceAnd:
                result = so_far & value;
                break;
            case WarpOp::kReduceOr:
                result = so_far | value;
                break;
            case WarpOp::kReduceXor:
                result = first ? value : so_far ^ value;
                break;
            default:
                break;
        }
    }
    for (int i = 0; i < count; ++i) args[i]->result = result;
}

void complete_shuffle(Rendezvous& meeting) {
    for (unsigned rest = meeting.mask; rest != 0; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest);
        auto* args = static_cast<ShuffleArgs*>(meeting.args[lane]);
        const int source = args->source_lane;
        if (source < 0 || source >= 32 || (meeting.mask >> source & 1u) == 0) {
            fail(meeting.site, "shuffle: lane %d reads lane %d, which is not in the mask 0x%08x",
                 lane, source, meeting.mask);
        }
        args->result = static_cast<const ShuffleArgs*>(meeting.args[source])->value;
    }
}

void complete(Rendezvous& meeting, Warp& warp) {
    switch (meeting.op) {
        case WarpOp::kSync:
            if constexpr (kHooks) hooks::warp_synchronized(warp, meeting.mask);
            break;
        case WarpOp::kShuffle:
            complete_shuffle(meeting);
            break;
        case WarpOp::kLdmatrix:
        case WarpOp::kMmaBf16:
        case WarpOp::kMmaF16:
            complete_matrix_op(meeting, warp);
            break;
        default:
            complete_votes(meeting);
            break;
    }
}

}  // namespace

int block_barrier(BlockVote vote, int predicate, Site site) {
    Fiber& self = *current;
    Block& block = *self.block;
    Barrier& barrier = block.barriers[0];
    expect_no_pending(*self.warp, self.lane, "__syncthreads", site);
    if (!machine.settings.allow_exited && block.live != block.threads) {
        fail(site, "__syncthreads: %u threads of the block have returned",
             block.threads - block.live);
    }
    if (barrier.arrived == 0) {
        barrier.site = site;
        barrier.vote = vote;
    } else if (!same_site(barrier.site, site) || barrier.vote != vote) {
        fail(site, "divergent barrier: %d threads of the block wait at %s", barrier.arrived,
             at(barrier.site).c_str());
    }
    ++barrier.arrived;
    barrier.count += predicate != 0;
    if (block_barrier_complete(block, barrier)) {
        const int result = vote_result(barrier);
        complete_block_barrier(block, barrier);
        return result;
    }
    self.warp->at_barrier |= 1u << self.lane;
    barrier.waiting.push_back(&self);
    suspend("__syncthreads", site);
    return self.barrier_result;
}

void named_barrier(int id, int threads, bool wait, Site site) {
    Fiber& self = *current;
    Block& block = *self.block;
    if (id < 0 || id >= kNumBarriers) fail(site, "barrier %d does not exist", id);
    if (threads <= 0 || threads % static_cast<int>(kWarpSize) != 0 ||
        threads > static_cast<int>(block.threads)) {
        fail(site, "barrier %d: %d threads is not a multiple of 32 within the block", id, threads);
    }
    if (id == 0 && wait && threads == static_cast<int>(block.threads)) {
        block_barrier(BlockVote::kNone, 0, site);
        return;
    }
    Barrier& barrier = block.barriers[id];
    expect_no_pending(*self.warp, self.lane, "named barrier", site);
    if (barrier.arrived == 0) {
        barrier.expected = threads;
        barrier.site = site;
    } else if (barrier.expected != threads) {
        fail(site, "barrier %d: %d threads here, %d at %s", id, threads, barrier.expected,
             at(barrier.site).c_str());
    }
    ++barrier.arrived;
    if constexpr (kHooks) hooks::named_arrived(self, id);
    if (barrier.arrived == barrier.expected) {
        if constexpr (kHooks) {
            hooks::named_synchronized(block, id, barrier.waiting, wait ? &self : nullptr);
        }
        barrier.arrived = 0;
        ++machine.barriers;
        note_progress();
        release(barrier.waiting);
        return;
    }
    if (!wait) return;
    self.warp->at_barrier |= 1u << self.lane;
    barrier.waiting.push_back(&self);
    suspend("named barrier", site);
}

void grid_barrier(Site site) {
    Fiber& self = *current;
    if (!machine.request->cooperative) {
        fail(site, "grid_sync in a launch without LaunchCfg::cooperative");
    }
    expect_no_pending(*self.warp, self.lane, "grid_sync", site);
    const uint64_t all = machine.num_blocks * machine.threads;
    if (machine.finished_blocks > 0 || self.block->live != self.block->threads) {
        fail(site, "grid_sync: threads of the grid have returned");
    }
    if (machine.grid_arrived == 0) {
        machine.grid_site = site;
    } else if (!same_site(machine.grid_site, site)) {
        fail(site, "divergent grid_sync: %llu threads wait at %s",
             static_cast<unsigned long long>(machine.grid_arrived), at(machine.grid_site).c_str());
    }
    if (++machine.grid_arrived == all) {
        machine.grid_arrived = 0;
        ++machine.barriers;
        note_progress();
        if constexpr (kHooks) hooks::grid_synchronized();
        release(machine.grid_waiting);
        return;
    }
    self.warp->at_barrier |= 1u << self.lane;
    machine.grid_waiting.push_back(&self);
    suspend("grid_sync", site);
}

int shuffle_source(int wanted, int width, bool inside, Site site) {
    if (width < 1 || width > 32 || (width & (width - 1)) != 0) {
        fail(site, "shuffle: width %d is not a power of two up to 32", width);
    }
    return inside ? wanted : static_cast<int>(current->lane);
}

unsigned active_mask() {
    return current->warp->existing & ~current->warp->exited;
}

void warp_collective(WarpOp op, unsigned mask, void* args, Site site) {
    Fiber& self = *current;
    Warp& warp = *self.warp;
    const unsigned bit = 1u << self.lane;
    if ((mask & bit) == 0) {
        fail(site, "%s: lane %u calls with mask 0x%08x, which leaves it out", name_of(op),
             self.lane, mask);
    }
    Rendezvous* meeting = nullptr;
    for (Rendezvous& candidate : warp.pending) {
        if (candidate.op == op && candidate.mask == mask && same_site(candidate.site, site)) {
            meeting = &candidate;
        } else if ((candidate.mask & bit) != 0 && (candidate.arrived & mask) != 0) {
            fail(site,
                 "%s with mask 0x%08x waits for lanes 0x%08x, which wait for this lane in %s with "
                 "mask 0x%08x at %s",
                 name_of(op), mask, candidate.arrived & mask, name_of(candidate.op), candidate.mask,
                 at(candidate.site).c_str());
        }
    }
    if (meeting == nullptr) {
        expect_lanes(warp, mask, name_of(op), site);
        warp.pending.push_back(Rendezvous{op, mask, 0, site, {}});
        meeting = &warp.pending.back();
    }
    meeting->arrived |= bit;
    meeting->args[self.lane] = args;
    if (meeting->arrived != mask) {
        suspend(name_of(op), site);
        return;
    }
    complete(*meeting, warp);
    if constexpr (kHooks) hooks::warp_met(warp, mask);
    ++machine.collectives;
    note_progress();
    const unsigned others = mask & ~bit;
    *meeting = warp.pending.back();
    warp.pending.pop_back();
    if (descending()) {
        for (unsigned rest = others; rest != 0;) {
            const int lane = 31 - __builtin_clz(rest);
            rest &= ~(1u << lane);
            make_ready(&warp.lanes[lane]);
        }
    } else {
        for (unsigned rest = others; rest != 0; rest &= rest - 1) {
            make_ready(&warp.lanes[__builtin_ctz(rest)]);
        }
    }
}

void check_exit(Fiber& fiber) {
    for (const Rendezvous& meeting : fiber.warp->pending) {
        if ((meeting.mask >> fiber.lane & 1u) != 0) {
            fail(meeting.site, "%s: lanes 0x%08x wait for lane %u, which returned",
                 name_of(meeting.op), meeting.arrived, fiber.lane);
        }
    }
    if (machine.grid_arrived > 0) {
        fail(machine.grid_site, "grid_sync: %llu threads wait, but a thread returned",
             static_cast<unsigned long long>(machine.grid_arrived));
    }
    Barrier& barrier = fiber.block->barriers[0];
    if (barrier.arrived == 0) return;
    if (!machine.settings.allow_exited) {
        fail(barrier.site, "__syncthreads: %d threads wait, but thread %u returned",
             barrier.arrived, fiber.linear);
    }
    if (barrier.arrived >= static_cast<int>(fiber.block->live) - 1) {
        complete_block_barrier(*fiber.block, barrier);
    }
}

}  // namespace specdec::emu
