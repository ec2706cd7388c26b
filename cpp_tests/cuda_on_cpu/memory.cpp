// Shared memory, asynchronous copies, atomics and fences.
#include "runtime.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "hooks.h"
#include "sanitizer.h"

namespace specdec::emu {

namespace {

constexpr size_t kSharedAlignment = 1024;
// Red zones take part of the room of the CU_SHARED arrays.
constexpr size_t kStaticRoom = kStaticSharedBytes + 64 * kSharedRedZone;

size_t round_up(size_t bytes, size_t alignment) {
    return (bytes + alignment - 1) / alignment * alignment;
}

size_t static_begin(const Block& block) {
    return round_up(block.dynamic_bytes + kSharedRedZone, kSharedAlignment);
}

void add_array(Block& block, const SharedArray& array) {
    block.arrays.push_back(array);
    sanitizer::unpoison(block.shared + array.offset, array.bytes);
    if constexpr (kHooks) hooks::shared_array_added(block, array.offset, array.bytes);
}

void deliver(const AsyncCopy& copy) {
    if (copy.valid) {
        std::memcpy(copy.smem, copy.gmem, static_cast<size_t>(copy.bytes));
    } else {
        std::memset(copy.smem, 0, static_cast<size_t>(copy.bytes));
    }
}

template <class T>
T apply(AtomicOp op, T old, T operand, T compare) {
    switch (op) {
        case AtomicOp::kAdd:
            return static_cast<T>(old + operand);
        case AtomicOp::kSub:
            return static_cast<T>(old - operand);
        case AtomicOp::kExch:
            return operand;
        case AtomicOp::kMin:
            return operand < old ? operand : old;
        case AtomicOp::kMax:
            return old < operand ? operand : old;
        case AtomicOp::kInc:
            return old >= operand ? T(0) : static_cast<T>(old + T(1));
        case AtomicOp::kDec:
            return old == T(0) || old > operand ? operand : static_cast<T>(old - T(1));
        case AtomicOp::kCas:
            return old == compare ? operand : old;
        default:
            break;
    }
    if constexpr (std::is_integral_v<T>) {
        if (op == AtomicOp::kAnd) return old & operand;
        if (op == AtomicOp::kOr) return old | operand;
        if (op == AtomicOp::kXor) return old ^ operand;
    }
    return old;
}

template <class T>
uint64_t update(AtomicOp op, void* address, uint64_t operand_bits, uint64_t compare_bits) {
    T old, operand, compare;
    std::memcpy(&old, address, sizeof(T));
    std::memcpy(&operand, &operand_bits, sizeof(T));
    std::memcpy(&compare, &compare_bits, sizeof(T));
    const T now = apply(op, old, operand, compare);
    std::memcpy(address, &now, sizeof(T));
    uint64_t result = 0;
    std::memcpy(&result, &old, sizeof(T));
    if (std::memcmp(&old, &now, sizeof(T)) != 0) note_progress();
    return result;
}

int bytes_of(AtomicType type) {
    return type == AtomicType::kU64 || type == AtomicType::kI64 || type == AtomicType::kF64 ? 8 : 4;
}

void require_aligned(const void* address, int bytes, const char* what, Site site) {
    if (reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) != 0) {
        fail(site, "%s: address %p is not aligned to %d bytes", what, address, bytes);
    }
}

}  // namespace

void begin_block_memory(Block& block) {
    const size_t bytes = static_begin(block) + kStaticRoom;
    if (bytes > block.shared_bytes || block.shared == nullptr) {
        if (block.shared != nullptr) {
            sanitizer::unpoison(block.shared, block.shared_bytes);
            std::free(block.shared);
        }
        block.shared_bytes = round_up(bytes, kSharedAlignment);
        block.shared =
            static_cast<unsigned char*>(std::aligned_alloc(kSharedAlignment, block.shared_bytes));
    }
    sanitizer::unpoison(block.shared, block.dynamic_bytes);
    std::memset(block.shared, kPoison, block.dynamic_bytes);
    sanitizer::poison(block.shared, block.shared_bytes);
    block.arrays.clear();
    block.static_used = 0;
}

void* shared_static(const void* key, size_t bytes, size_t alignment, const char* name, Site site) {
    Block& block = *current->block;
    for (const SharedArray& array : block.arrays) {
        if (array.key == key) return block.shared + array.offset;
    }
    const size_t begin =
        round_up(static_begin(block) + block.static_used, std::max<size_t>(alignment, 16));
    block.static_used = begin - static_begin(block) + bytes + kSharedRedZone;
    if (block.static_used > kStaticRoom) {
        fail(site, "%s: CU_SHARED arrays take more than %zu bytes", name, kStaticSharedBytes);
    }
    add_array(block, SharedArray{begin, bytes, key, name, site});
    std::memset(block.shared + begin, kPoison, bytes);
    return block.shared + begin;
}

unsigned char* shared_dynamic() {
    return current->block->shared;
}

void shared_array(unsigned char* base, size_t offset, size_t bytes, size_t alignment, Site site) {
    Block& block = *current->block;
    const size_t begin = static_cast<size_t>(base - block.shared) + offset;
    for (const SharedArray& array : block.arrays) {
        if (array.offset == begin && array.bytes == bytes) return;
        if (begin < array.offset + array.bytes && array.offset < begin + bytes) {
            fail(site,
                 "shared array of bytes %zu..%zu overlaps the one of bytes %zu..%zu made at %s",
                 begin, begin + bytes, array.offset, array.offset + array.bytes,
                 describe_location(array.site.file, array.site.line).c_str());
        }
    }
    if (begin + bytes > block.dynamic_bytes) {
        fail(site, "shared array of bytes %zu..%zu, but the launch gave %zu bytes", begin,
             begin + bytes, block.dynamic_bytes);
    }
    if (begin % alignment != 0) fail(site, "shared array at byte %zu is misaligned", begin);
    add_array(block, SharedArray{begin, bytes, nullptr, "dynamic", site});
}

// ---- cp.async -----------------------------------------------------------------------------------

void async_copy(void* smem, const void* gmem, int bytes, bool valid, Site site) {
    Fiber& self = *current;
    auto* to = static_cast<unsigned char*>(smem);
    require_aligned(smem, bytes, "cp.async to shared memory", site);
    require_aligned(gmem, bytes, "cp.async from global memory", site);
    const Block& block = *self.block;
    if (to < block.shared || to + bytes > block.shared + block.shared_bytes) {
        fail(site, "cp.async: the destination is not in shared memory");
    }
    const AsyncCopy copy{to, gmem, bytes, valid, self.async_group, site};
    if constexpr (kHooks) hooks::async_issued(copy);
    if (machine.settings.cp_early) {
        deliver(copy);
    } else {
        std::memset(smem, kPoison, static_cast<size_t>(bytes));
    }
    self.async.push_back(copy);
}

void async_commit() {
    ++current->async_group;
}

void async_wait(int pending, Site) {
    Fiber& self = *current;
    size_t kept = 0;
    for (const AsyncCopy& copy : self.async) {
        if (copy.group + static_cast<uint64_t>(pending) < self.async_group) {
            if (!machine.settings.cp_early) deliver(copy);
            if constexpr (kHooks) hooks::async_delivered(copy);
        } else {
            self.async[kept++] = copy;
        }
    }
    self.async.resize(kept);
}

void end_thread_memory(Fiber& fiber) {
    if (!fiber.async.empty()) {
        fail(fiber.async.front().site, "cp.async: %zu copies never waited for", fiber.async.size());
    }
}

// ---- atomics and fences -------------------------------------------------------------------------

uint64_t atomic_rmw(AtomicOp op, AtomicType type, void* address, uint64_t operand, uint64_t compare,
                    bool acq_rel, Site site) {
    require_aligned(address, bytes_of(type), "atomic", site);
    if (current != nullptr) yield(site);
    if constexpr (kHooks) hooks::atomic(address, bytes_of(type), acq_rel, site);
    switch (type) {
        case AtomicType::kI32:
            return update<int32_t>(op, address, operand, compare);
        case AtomicType::kU32:
            return update<uint32_t>(op, address, operand, compare);
        case AtomicType::kU64:
            return update<uint64_t>(op, address, operand, compare);
        case AtomicType::kI64:
            return update<int64_t>(op, address, operand, compare);
        case AtomicType::kF32:
            return update<float>(op, address, operand, compare);
        case AtomicType::kF64:
            return update<double>(op, address, operand, compare);
    }
    return 0;
}

uint64_t load_acquire(const void* address, int bytes, Site site) {
    require_aligned(address, bytes, "ld.acquire", site);
    yield(site);
    if constexpr (kHooks) hooks::acquire(address, bytes, site);
    uint64_t value = 0;
    std::memcpy(&value, address, static_cast<size_t>(bytes));
    return value;
}

void store_release(void* address, uint64_t value, int bytes, Site site) {
    require_aligned(address, bytes, "st.release", site);
    yield(site);
    if constexpr (kHooks) hooks::release(address, bytes, site);
    std::memcpy(address, &value, static_cast<size_t>(bytes));
    note_progress();
}

void thread_fence(Site site) {
    if constexpr (kHooks) hooks::fence();
    yield(site);
}

}  // namespace specdec::emu
