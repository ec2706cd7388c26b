// The walk of chain and tree verification on the CPU: the rules of verify.h, lazily. A row behind the
// first rejection is never read, a draft row only when a child is tested against it.
//
// `Shape` is one request's tree: num_nodes(), token(u), first_child(u), next_sibling(u) (-1: none) and
// draft_row(u) (where q of u's children lies). Its nodes are valid and no deeper than max_path.
#pragma once

#include <cmath>
#include <memory>

#include "draft_row.h"
#include "philox.h"

namespace specdec::cpu::SPECDEC_ISA {

// Who the request is, beside its tree.
struct RequestOf {
    int64_t b, begin;
    int64_t seed, position;
    Siblings siblings;  // kDeterministic: q is one-hot at every child
    bool one_hot;
};

template <class T, class Shape>
class Walk {
  public:
    Walk(const VerifyParams& p, const DraftMap& map, bool across_tiles)
        : p_(p), map_(map), across_tiles_(across_tiles) {}

    struct Outcome {
        int64_t token;
        int32_t status;
    };

    // The accepted nodes are path()[1..]; path()[0] is the anchor.
    Outcome run(const Shape& shape, const RequestOf& request) {
        shape_ = &shape;
        request_ = request;
        law_ = law_plan(p_.controls, request.b, p_.vocab_size, p_.logprobs_wanted);
        draft_law_ = law_;
        draft_law_.law = true;
        draft_law_.scale = exponent_scale(
            p_.draft_temperature == nullptr ? 1.0f : p_.draft_temperature[request.b]);
        draft_law_.filters = p_.draft_controls
                                 ? filters_of(p_.controls, request.b, p_.draft_vocab)
                                 : Filters{p_.draft_vocab, 1.0f, kMinusInfinity, false, true};
        path_.clear();
        drafts_.clear();
        drafts_.reserve(shape.num_nodes());  // edits point into it
        status_ = 0;
        const bool up =
            p_.method == Method::kBlock || (p_.method == Method::kTraversal && !target_only());
        const int64_t token = up && !law_.greedy ? walk_up() : walk_down();
        return {token, status_};
    }

    const std::vector<int64_t>& path() const { return path_; }
    // Target row of the i-th node of the path, as the walk left it.
    const Row<T>& row(size_t i) const { return nodes_[i]->p; }

  private:
    bool target_only() const { return request_.siblings == Siblings::kDeterministic; }

    float coin(int64_t index, Purpose purpose) const {
        return uniform_at(request_.seed, request_.position, index, purpose);
    }

    // --- 1. Nodes ---------------------------------------------------------------------------------
    // A node on the way: its law, the law of its children, what is left of the former.
    struct Node {
        Node(DType draft_dtype, const DraftMap& map) : q(draft_dtype, map) {}
        int64_t u = 0;
        RowEdits edits;
        Row<T> p;
        DraftRow q;
        int32_t status = 0;
        std::vector<int64_t> children;  // usable ones that are left
        double alpha = 1.0;
        double factor = 1.0, removed = 0.0;  // of q, without replacement
        Rest rest;
        double mass = 1.0;
        bool touched = false;
    };

    Node& node(size_t depth) {
        while (nodes_.size() <= depth) {
            nodes_.push_back(std::make_unique<Node>(p_.draft_dtype, map_));
        }
        return *nodes_[depth];
    }

    bool is_token(int64_t id) const { return id >= 0 && id < p_.vocab_size; }

    // Comes to node u, the next of the path. False: the row has no law, `token` is what it falls back to.
    bool enter(int64_t u, int64_t* token) {
        path_.push_back(u);
        if (u > 0) drafts_.push_back(shape_->token(u));
        Node& at = node(path_.size() - 1);
        at.u = u;
        at.edits = row_edits(p_.controls, request_.b, request_.begin + u, p_.vocab_size);
        at.edits.drafts = drafts_.data();
        at.edits.num_drafts = static_cast<int64_t>(drafts_.size());
        const bool raw_sum = p_.logprobs_wanted.count >= 0 && !p_.logprobs_wanted.processed;
        at.p.read(static_cast<const T*>(p_.target_logits.data) +
                      (request_.begin + u) * p_.target_logits.stride[0],
                  p_.vocab_size, at.edits,
                  read_plan(law_, p_.logprobs_wanted, p_.vocab_size, raw_sum), across_tiles_);
        at.status = at.p.status();
        at.children.clear();
        at.rest = Rest{};
        at.alpha = at.factor = at.mass = 1.0;
        at.removed = 0.0;
        at.touched = false;
        if (at.status != 0) {
            *token = at.p.fallback();
            return false;
        }
        if (law_.law) at.p.choose_law(law_.filters);
        return true;
    }

    // The children of the node whose ids are tokens; each id once unless it may be drawn twice.
    void find_children(Node& at) {
        for (int64_t c = shape_->first_child(at.u); c >= 0; c = shape_->next_sibling(c)) {
            const int64_t id = shape_->token(c);
            if (!is_token(id)) {
                at.status |= id == -1 ? 0 : kBadId;
                continue;
            }
            bool again = false;
            if (request_.siblings != Siblings::kSampledWithReplacement) {
                for (int64_t d : at.children) again = again || shape_->token(d) == id;
            }
            if (!again) at.children.push_back(c);
        }
    }

    bool read_q(Node& at) {
        RowEdits edits;
        if (p_.draft_controls) {
            edits = at.edits;
            edits.d2t = p_.d2t;
            edits.d2t_is_offset = p_.d2t_is_offset;
        }
        return at.q.read(shape_->draft_row(at.u), p_.draft_vocab, edits, draft_law_, across_tiles_);
    }

    // --- 2. The token after the path ------------------------------------------------------------------
    int64_t bonus(Node& at) { return at.p.draw(coin(at.u, Purpose::kBonus)); }

    // From what is left, whose mass was computed last; from p where it is none.
    int64_t from_rest(Node& at) {
        const float u = coin(at.u + 1, Purpose::kResidual);
        if (at.mass < kMinResidualMass) return at.p.draw(u);
        return at.p.draw_rest(at.rest, &at.q, u);
    }

    // rest <- alpha rest - q off the rejected child, and its mass.
    void reject(Node& at, int64_t child, double alpha) {
        const int64_t id = shape_->token(child);
        at.rest.a *= alpha;
        at.rest.b *= alpha;
        if (!request_.one_hot) at.rest.b += at.factor;
        at.rest.rejected.push_back(id);
        at.mass = at.p.rest_mass(at.rest, &at.q, across_tiles_);
        at.touched = true;
    }
    // After that, for the next sibling: normalises, and takes the child out of q. False: nothing is left.
    bool renew(Node& at, int64_t child) {
        if (at.mass < kMinResidualMass) return false;
        if (request_.siblings == Siblings::kSampled && !request_.one_hot) {
            at.removed += at.q.probability(shape_->token(child));
            if (1.0 - at.removed < kMinResidualMass) return false;
            at.factor = 1.0 / (1.0 - at.removed);
        }
        at.rest.a /= at.mass;
        at.rest.b /= at.mass;
        return true;
    }
    float q_of(const Node& at, int64_t id) const {
        return request_.one_hot ? 1.0f : static_cast<float>(at.factor) * at.q.probability(id);
    }
    float rest_of(const Node& at, int64_t id) const {
        for (int64_t other : at.rest.rejected) {
            if (other == id) return 0.0f;
        }
        float left = static_cast<float>(at.rest.a) * at.p.probability(id);
        if (at.rest.b > 0.0) left = left - static_cast<float>(at.rest.b) * at.q.probability(id);
        return left > 0.0f ? left : 0.0f;
    }

    // --- 3. Root to leaf ------------------------------------------------------------------------------
    // The child that is accepted, or -1 and the token.
    int64_t test(Node& at, int64_t* token) {
        if (law_.greedy) {
            *token = at.p.argmax();
            return child_of(at, *token);
        }
        if (p_.method == Method::kSampled) {
            *token =
                at.p.draw(uniform_at(request_.seed, request_.position + at.u, 0, Purpose::kSample));
            return child_of(at, *token);
        }
        if (at.children.empty()) {
            *token = bonus(at);
            return -1;
        }
        if (p_.method == Method::kTypical) return typical(at, token);
        return target_only() ? one_coin(at, token) : one_by_one(at, token);
    }

    int64_t child_of(const Node& at, int64_t id) const {
        for (int64_t c : at.children) {
            if (shape_->token(c) == id) return c;
        }
        return -1;
    }

    int64_t typical(Node& at, int64_t* token) {
        const double by_entropy = p_.posterior_alpha * std::exp(-at.p.entropy());
        const double bound =
            by_entropy < p_.posterior_threshold ? by_entropy : p_.posterior_threshold;
        if (at.p.probability(shape_->token(at.children[0])) > bound) return at.children[0];
        *token = at.p.draw(coin(at.u + 1, Purpose::kResidual));
        return -1;
    }

    int64_t one_coin(Node& at, int64_t* token) {
        const float u = coin(at.u + 1, Purpose::kAccept);
        float below = 0.0f;
        for (int64_t c : at.children) {
            below = below + at.p.probability(shape_->token(c));
            if (u < below) return c;
        }
        for (int64_t c : at.children) at.rest.rejected.push_back(shape_->token(c));
        at.mass = at.p.rest_mass(at.rest, &at.q, across_tiles_);
        *token = from_rest(at);
        return -1;
    }

    int64_t one_by_one(Node& at, int64_t* token) {
        if (!request_.one_hot && !read_q(at)) {
            at.status |= kDraftNan;
            *token = bonus(at);
            return -1;
        }
        for (int64_t c : at.children) {
            const int64_t id = shape_->token(c);
            if (coin(c, Purpose::kAccept) * q_of(at, id) < rest_of(at, id)) return c;
            reject(at, c, 1.0);
            if (c == at.children.back() || !renew(at, c)) break;
        }
        *token = from_rest(at);
        return -1;
    }

    int64_t walk_down() {
        int64_t token = -1;
        for (int64_t u = 0; u >= 0;) {
            const bool usable = enter(u, &token);
            Node& at = node(path_.size() - 1);
            if (usable) find_children(at);
            u = usable ? test(at, &token) : -1;
            status_ |= at.status;
        }
        return token;
    }

    // --- 4. Leaf to root: block and traversal verification ----------------------------------------------
    // Goes down along first children; a leaf is accepted with probability alpha(leaf), else its parent
    // loses it: rest <- max(alpha rest - q, 0) normalised, alpha <- R / (R + 1 - alpha).
    int64_t walk_up() {
        int64_t token = -1;
        double alpha = 1.0;
        for (int64_t u = 0;;) {
            if (u >= 0) {
                const bool usable = enter(u, &token);
                Node& at = node(path_.size() - 1);
                at.alpha = alpha;
                if (usable) find_children(at);
                if (!at.children.empty() && !request_.one_hot && !read_q(at)) {
                    at.children.clear();
                    at.status |= kDraftNan;
                }
            }
            Node& at = node(path_.size() - 1);
            if (!at.children.empty()) {
                u = at.children.front();
                const int64_t id = shape_->token(u);
                const double q = q_of(at, id), rest = at.alpha * rest_of(at, id);
                alpha = rest < q ? rest / q : rest > 0.0 ? 1.0 : 0.0;
                continue;
            }
            if (path_.size() == 1 || coin(at.u, Purpose::kAccept) < static_cast<float>(at.alpha)) {
                break;
            }
            const int64_t child = at.u;
            path_.pop_back();
            drafts_.pop_back();
            Node& parent = node(path_.size() - 1);
            reject(parent, child, parent.alpha);
            const double whole = parent.mass + 1.0 - parent.alpha;
            parent.alpha = whole > 0.0 ? parent.mass / whole : 1.0;
            parent.children.erase(parent.children.begin());
            if (!parent.children.empty() && !renew(parent, child)) parent.children.clear();
            u = -1;
        }
        Node& last = node(path_.size() - 1);
        for (size_t i = 0; i < path_.size(); ++i) status_ |= node(i).status;
        if (last.p.status() != 0) return last.p.fallback();
        return last.touched ? from_rest(last) : bonus(last);
    }

    const VerifyParams& p_;
    const DraftMap& map_;
    const bool across_tiles_;
    const Shape* shape_ = nullptr;
    RequestOf request_{};
    LawPlan law_{}, draft_law_{};
    std::vector<int64_t> path_, drafts_;
    std::vector<std::unique_ptr<Node>> nodes_;
    int32_t status_ = 0;
};

}  // namespace specdec::cpu::SPECDEC_ISA
