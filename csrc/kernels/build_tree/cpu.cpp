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
    std::vector<int32_t> number,
        parent;  // of a place: its node, and its parent's place, -1: the root
};

void choose(const BuildTreeParams& p, int64_t b, Chosen& c) {
    c.orders.clear();
    for (int64_t i = 0; i < p.num_candidates; ++i) {
        const uint64_t order = candidate_order(p, b, i);
        if (order != kNoOrder) c.orders.push_back(order);
    }
    const int64_t count = std::min<int64_t>(p.num_nodes - 1, c.orders.size());
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

// Returns the status bits.
int32_t request_tree(const BuildTreeParams& p, int64_t b, Chosen& c) {
    choose(p, b, c);
    list_children(p, b, c);
    const int64_t first = b * p.num_nodes, words = p.num_words;
    int32_t* mask = p.tree_mask + first * words;
    std::fill_n(mask, p.num_nodes * words, 0);
    std::fill_n(p.first_child + first, p.num_nodes, -1);
    std::fill_n(p.next_sibling + first, p.num_nodes, -1);
    const auto set_own_bit = [&](int64_t node) {
        int32_t& word = mask[node * words + node / kMaskBits];
        word = static_cast<int32_t>(static_cast<uint32_t>(word) | node_bit(node, node / kMaskBits));
    };

    // 1. Nodes in the order of their numbers: a child waits for its parent, so this reaches no cycle.
    const auto later = std::greater<int32_t>();
    c.number.assign(c.candidates.size(), -1);
    c.ready.clear();
    const auto add_children = [&](int32_t place) {
        for (int32_t i = c.first[place + 1]; i >= 0; i = c.next[i]) {
            c.ready.push_back(i);
            std::push_heap(c.ready.begin(), c.ready.end(), later);
        }
    };
    write_node(p, b, 0, -1, -1, 0);
    set_own_bit(0);
    add_children(-1);
    int32_t nodes = 1;
    for (; !c.ready.empty(); ++nodes) {
        std::pop_heap(c.ready.begin(), c.ready.end(), later);
        const int32_t place = c.ready.back();
        c.ready.pop_back();
        c.number[place] = nodes;
        const int32_t parent = c.parent[place] < 0 ? 0 : c.number[c.parent[place]];
        const int64_t depth = p.node_positions[first + parent] - p.node_positions[first] + 1;
        write_node(p, b, nodes, c.candidates[place], parent, static_cast<int32_t>(depth));
        std::copy_n(mask + parent * words, words, mask + nodes * words);
        set_own_bit(nodes);
        add_children(place);
    }

    // 2. What is no node, and links.
    for (int64_t node = nodes; node < p.num_nodes; ++node) {
        write_node(p, b, node, -1, -1, -1);
        set_own_bit(node);
    }
    link_children(
        nodes, [](int64_t) { return true; },
        [&](int64_t node) { return p.node_parents[first + node]; }, p.first_child + first,
        p.next_sibling + first);
    return nodes < p.num_nodes ? kBadTree : 0;
}

}  // namespace

void build_tree(const BuildTreeParams& p) {
    // A tree of 60 nodes takes some microseconds.
    constexpr int64_t kGrain = 8;
    parallel_for(0, p.batch, kGrain, [&](int64_t begin, int64_t end) {
        Chosen chosen;
        for (int64_t b = begin; b < end; ++b) p.status[b] = request_tree(p, b, chosen);
    });
}

}  // namespace specdec::cpu::SPECDEC_ISA
