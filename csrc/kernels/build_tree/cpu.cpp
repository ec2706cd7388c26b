// build_tree on the CPU: the best candidates, the order of their numbers by a heap of those whose parent has one,
// then masks from parents and links from the last node up.
// Work: a thread takes whole requests. Bytes moved: C (8 + id) read, N (20 + id + 4 W) written.
// Determinism: orders are of (score, index), and no two are equal; the rest are integers.
#include <algorithm>
#include <functional>
#include <vector>

#include "parallel.h"
#include "params.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

// The tree of a request. Numbers of candidates are their places in `chosen`.
struct Chosen {
    std::vector<uint64_t> orders;
    std::vector<int32_t> candidates;   // ascending
    std::vector<int32_t> first, next;  // children of a place + 1, of the root at 0; -1: none
    std::vector<int32_t> ready;        // a heap: the lowest place first
    std::vector<int32_t> number;       // of a place: its node
    std::vector<int32_t> parent;       // of a place: its parent's place; -1: the root
    std::vector<int32_t> place;        // of a node
};

void choose(const BuildTreeParams& p, int64_t b, Chosen& c) {
    c.orders.clear();
    for (int64_t i = 0; i < p.num_candidates; ++i) {
        const uint64_t order = candidate_order(p, b, i);
        if (order != kNoOrder) c.orders.push_back(order);
    }
    const int64_t count = std::min<int64_t>(p.nodes.num_nodes - 1, c.orders.size());
    if (count < static_cast<int64_t>(c.orders.size())) {
        std::nth_element(c.orders.begin(), c.orders.begin() + count, c.orders.end());
    }
    c.candidates.resize(count);
    for (int64_t i = 0; i < count; ++i) {
        c.candidates[i] = static_cast<int32_t>(id_of_order(c.orders[i]));
    }
    std::sort(c.candidates.begin(), c.candidates.end());
}

// Lists every chosen candidate below its parent, where that one is chosen or the root.
void list_children(const BuildTreeParams& p, int64_t b, Chosen& c) {
    const int32_t count = static_cast<int32_t>(c.candidates.size());
    c.first.assign(count + 1, -1);
    c.next.assign(count, -1);
    c.parent.resize(count);
    for (int32_t i = count - 1; i >= 0; --i) {
        const int32_t parent = *p.parents.at(b, c.candidates[i]);
        int32_t place = -1;
        if (parent != -1) {
            const auto at = std::lower_bound(c.candidates.begin(), c.candidates.end(), parent);
            if (at == c.candidates.end() || *at != parent) continue;
            place = static_cast<int32_t>(at - c.candidates.begin());
        }
        c.parent[i] = place;
        c.next[i] = c.first[place + 1];
        c.first[place + 1] = i;
    }
}

void request_tree(const BuildTreeParams& p, int64_t b, Chosen& c) {
    choose(p, b, c);
    list_children(p, b, c);

    // Nodes in the order of their numbers: a child waits for its parent, so this reaches no cycle.
    const auto later = std::greater<int32_t>();
    c.number.assign(c.candidates.size(), -1);
    c.place.assign(1, -1);
    c.ready.clear();
    const auto add_children = [&](int32_t place) {
        for (int32_t i = c.first[place + 1]; i >= 0; i = c.next[i]) {
            c.ready.push_back(i);
            std::push_heap(c.ready.begin(), c.ready.end(), later);
        }
    };
    add_children(-1);
    while (!c.ready.empty()) {
        std::pop_heap(c.ready.begin(), c.ready.end(), later);
        const int32_t place = c.ready.back();
        c.ready.pop_back();
        c.number[place] = static_cast<int32_t>(c.place.size());
        c.place.push_back(place);
        add_children(place);
    }

    const int64_t count = static_cast<int64_t>(c.place.size());
    write_tree(
        p.nodes, b, count,
        [&](int64_t node) { return candidate_token(p, b, c.candidates[c.place[node]]); },
        [&](int64_t node) {
            const int32_t parent = c.parent[c.place[node]];
            return parent < 0 ? 0 : c.number[parent];
        });
    p.nodes.status[b] = count < p.nodes.num_nodes ? kBadTree : 0;
}

}  // namespace

void build_tree(const BuildTreeParams& p) {
    // A tree of 60 nodes takes some microseconds.
    constexpr int64_t kGrain = 8;
    parallel_for(0, p.batch, kGrain, [&](int64_t begin, int64_t end) {
        Chosen chosen;
        for (int64_t b = begin; b < end; ++b) request_tree(p, b, chosen);
    });
}

}  // namespace specdec::cpu::SPECDEC_ISA
