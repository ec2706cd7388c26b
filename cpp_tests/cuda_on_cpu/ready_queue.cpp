// The schedules: in which order fibers that can run do run.
#include <algorithm>

#include "runtime.h"

namespace specdec::emu {

uint64_t ReadyQueue::random() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

void ReadyQueue::reset(Order order, uint64_t seed, size_t capacity) {
    order_ = order;
    seed_ = state_ = seed;
    head_ = count_ = 0;
    size_t size = 64;
    while (size <= capacity) size *= 2;
    if (ring_.size() < size) ring_.resize(size);
    mask_ = ring_.size() - 1;
    heap_.clear();
    floor_ = UINT64_MAX / 2;
}

// kSkewed runs one fiber as far as it goes: each push draws a priority that its warp shares (high
// bits), so warps drift apart as much as the barriers allow.
void ReadyQueue::push(Fiber* fiber) {
    ++count_;
    if (order_ != Order::kSkewed) {
        ring_[(head_ + count_ - 1) & mask_] = fiber;
        return;
    }
    const uint64_t number = fiber->block->linear * kWarpSize + fiber->warp->index + 1;
    const uint64_t shared = ((number ^ seed_) * 0x9e3779b97f4a7c15ull) >> 2;
    const uint64_t priority = UINT64_MAX / 2 + shared / 64 * 64 + random() % 64;
    heap_.push_back({priority, fiber});
    std::push_heap(heap_.begin(), heap_.end(),
                   [](const Entry& a, const Entry& b) { return a.priority < b.priority; });
}

void ReadyQueue::push_yielded(Fiber* fiber) {
    if (order_ != Order::kSkewed) return push(fiber);
    ++count_;
    heap_.push_back({--floor_, fiber});
    std::push_heap(heap_.begin(), heap_.end(),
                   [](const Entry& a, const Entry& b) { return a.priority < b.priority; });
}

Fiber* ReadyQueue::pop() {
    if (count_ == 0) return nullptr;
    --count_;
    if (order_ == Order::kSkewed) {
        std::pop_heap(heap_.begin(), heap_.end(),
                      [](const Entry& a, const Entry& b) { return a.priority < b.priority; });
        Fiber* fiber = heap_.back().fiber;
        heap_.pop_back();
        return fiber;
    }
    if (order_ == Order::kRandom) {
        std::swap(ring_[head_], ring_[(head_ + random() % (count_ + 1)) & mask_]);
    }
    Fiber* fiber = ring_[head_];
    head_ = (head_ + 1) & mask_;
    return fiber;
}

}  // namespace specdec::emu
