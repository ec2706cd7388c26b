"""Chain and tree verification, slowly and obviously: one request, node after node, float64.

A request is a tree of nodes: node 0 is the anchor, the token of node u > 0 is a draft, `children[u]` are
the drafts that follow u, in draw order. A chain is a tree in which every node has one child. Target row
u is the law of the token after node u.

`walk` returns a list of (probability, Outcome), see choices.py. Laws: docs/sampling.md.
"""

import dataclasses

import numpy as np

from oracles.choices import BONUS, RESIDUAL, SAMPLE
from oracles.controls import BAD_ID, DRAFT_NAN, Controls, Row, usable

MIN_RESIDUAL_MASS = 1e-6


@dataclasses.dataclass(frozen=True)
class Outcome:
    path: tuple  # accepted nodes, the anchor first
    token: int  # after the last of them
    status: int


class Verification:
    """One request. target(u), draft(u): float32 logits of node u (draft: target vocabulary, -inf outside
    the draft vocabulary; None: q is one-hot at each child)."""

    def __init__(
        self, request, tokens, children, target, draft, choices, *, first_row=0, **options
    ):
        self.request, self.tokens, self.children = request, tokens, children
        self.target_of, self.draft_of, self.choices = target, draft, choices
        self.first_row = first_row
        self.method = options.pop("method", "token")
        self.siblings = options.pop("siblings", "deterministic")
        self.threshold = options.pop("posterior_threshold", 0.09)
        self.alpha = options.pop("posterior_alpha", 0.3)
        self.one_hot_token = options.pop("draft_is_one_hot", False)
        self.draft_temperature = options.pop("draft_temperature", np.float32(1))
        self.draft_controls = options.pop("draft_controls", False)
        self.draft_ids = options.pop("draft_ids", None)
        assert not options, sorted(options)
        self.band = choices.band

    # --- What a node offers ---------------------------------------------------------------------
    def drafts_before(self, path):
        return [self.tokens[u] for u in path[1:]]

    def row(self, path):
        u = path[-1]
        return Row(self.target_of(u), self.request, self.first_row + u, self.drafts_before(path))

    def usable_children(self, u):
        """Children whose id is a token, each id once, and the status of the others."""
        some, status, seen = [], 0, set()
        for c in self.children[u]:
            token = self.tokens[c]
            if not 0 <= token < self.request.vocab_size:
                status |= 0 if token == -1 else BAD_ID
            elif token not in seen or self.siblings == "sampled_with_replacement":
                seen.add(token)
                some.append(c)
        return some, status

    def q_laws(self, path):
        """The draft row's laws (the exact one first); None: unusable. Not called for one-hot q."""
        x = self.draft_of(path[-1])
        if not usable(x):
            return None
        if not self.draft_controls:
            plain = Controls(self.request.vocab_size).of(0)
            plain.temperature = self.draft_temperature
            return self._in_target_ids(plain.laws(x))
        z = self.request.process(
            x, self.first_row + path[-1], self.drafts_before(path), self.draft_ids
        )
        if not usable(z):
            return None
        request = object.__new__(type(self.request))
        request.__dict__.update(self.request.__dict__, temperature=self.draft_temperature)
        return self._in_target_ids(request.laws(z, self.band))

    def _in_target_ids(self, laws):
        if self.draft_ids is None:
            return laws
        out = []
        for law in laws:
            full = np.zeros(self.request.vocab_size)
            for v, p in zip(self.draft_ids, law, strict=True):
                if 0 <= v < len(full):
                    full[v] = p
            out.append(full)
        return out

    @property
    def one_hot(self):
        return self.draft_of is None

    # --- The token after the path -----------------------------------------------------------------
    def stop(self, path, status, masses, purpose, index, mass=1.0):
        return [
            (w, Outcome(tuple(path), v, status))
            for w, v in self.choices.draw(masses, purpose, index, mass)
        ]

    def from_residual(self, path, status, p, rest):
        """The token from masses `rest` of the last node's row, from p where nothing is left."""
        index, mass, band = path[-1] + 1, rest.sum(), self.band
        sides = [mass < MIN_RESIDUAL_MASS]
        if band and abs(mass - MIN_RESIDUAL_MASS) < band and mass > 0:
            sides.append(not sides[0])
        out = []
        for nothing in sides:
            masses, known = (p, 1.0) if nothing else (rest, mass)
            out += self.stop(path, status, masses, RESIDUAL, index, known)
        return out

    # --- Walks --------------------------------------------------------------------------------------
    def walk(self):
        if self.request.greedy:
            return self.greedy([0], 0)
        if self.method in ("block", "traversal") and not (
            self.method == "traversal" and self.siblings == "deterministic"
        ):
            return self.traverse()
        step = {
            "sampled": self.sampled,
            "typical": self.typical,
            "token": self.deterministic if self._target_only() else self.recursive,
            "traversal": self.deterministic,
        }[self.method]
        return self.descend([0], 0, step)

    def _target_only(self):
        return self.siblings == "deterministic" and self.one_hot

    def greedy(self, path, status):
        row = self.row(path)
        if row.status:
            return [(1.0, Outcome(tuple(path), row.fallback, status | row.status))]
        children, bad = self.usable_children(path[-1])
        best = int(np.argmax(row.z))
        for c in children:
            if self.tokens[c] == best:
                return self.greedy([*path, c], status | bad)
        return [(1.0, Outcome(tuple(path), best, status | bad))]

    def descend(self, path, status, step):
        row = self.row(path)
        if row.status:
            return [(1.0, Outcome(tuple(path), row.fallback, status | row.status))]
        children, bad = self.usable_children(path[-1])
        out = []
        for p in row.laws(self.band):
            out += step(path, status | bad, p, children)
        return out

    def deeper(self, weight, path, child, status, step):
        return [(weight * w, o) for w, o in self.descend([*path, child], status, step)]

    def bonus(self, path, status, p):
        return self.stop(path, status, p, BONUS, path[-1])

    def sampled(self, path, status, p, children):
        u, out = path[-1], []
        for w, token in self.choices.draw(p, SAMPLE, 0, offset=u):
            child = [c for c in children if self.tokens[c] == token]
            if child:
                out += self.deeper(w, path, child[0], status, self.sampled)
            else:
                out.append((w, Outcome(tuple(path), token, status)))
        return out

    def typical(self, path, status, p, children):
        if not children:
            return self.bonus(path, status, p)
        (child,) = children
        kept = p[p > 0]
        bound = min(self.threshold, self.alpha * np.exp((kept * np.log(kept)).sum()))
        chance = p[self.tokens[child]]
        sides = [chance > bound]
        if self.band and abs(chance - bound) <= self.band * bound and chance > 0:
            sides.append(not sides[0])
        out = []
        for yes in sides:
            if yes:
                out += self.deeper(1.0, path, child, status, self.typical)
            else:
                out += self.stop(path, status, p, RESIDUAL, path[-1] + 1)
        return out

    def deterministic(self, path, status, p, children):
        """One coin per node against the cumulative mass of its children."""
        if not children:
            return self.bonus(path, status, p)
        tokens = [self.tokens[c] for c in children]
        out = []
        for w, chosen in self.choices.pick([p[t] for t in tokens], path[-1] + 1):
            if chosen is not None:
                out += self.deeper(w, path, children[chosen], status, self.deterministic)
                continue
            rest = p.copy()
            rest[tokens] = 0.0
            out += [(w * v, o) for v, o in self.from_residual(path, status, p, rest)]
        return out

    def recursive(self, path, status, p, children):
        """Recursive rejection: one coin per child against its ratio; what is left goes on."""
        if not children:
            return self.bonus(path, status, p)
        laws = [None] if self.one_hot else self.q_laws(path)
        if laws is None:
            return self.bonus(path, status | DRAFT_NAN, p)
        out = []
        for q in laws:
            state = Residual(p, q, self.siblings != "sampled_with_replacement")
            out += self.test(path, status, state, children)
        return out

    def test(self, path, status, state, children):
        (child, *others), out = children, []
        token = self.tokens[child]
        q = state.q_of(token)
        for w, yes in self.choices.accept(q, state.rest[token], child):
            if yes:
                out += self.deeper(w, path, child, status, self.recursive)
                continue
            after = state.rejected(token)
            if not others or after.mass < MIN_RESIDUAL_MASS or after.exhausted:
                more = self.from_residual(path, status, state.p, after.raw)
            else:
                more = self.test(path, status, after.normalised(), others)
            out += [(w * v, o) for v, o in more]
        return out

    # --- Bottom up: block verification, traversal verification --------------------------------------
    def traverse(self):
        return self._visit([self._enter([0], 1.0)])

    def _enter(self, path, alpha):
        """The state of a node that the traversal comes to: its laws with all their alternatives are not
        branched over (the band only widens the coins' comparisons)."""
        row = self.row(path)
        node = {"path": path, "row": row, "alpha": alpha, "status": row.status, "children": []}
        if row.status:
            return node
        node["children"], bad = self.usable_children(path[-1])
        node["status"] |= bad
        node["p"] = row.laws()[0]
        if node["children"] and not self.one_hot:
            laws = self.q_laws(path)
            if laws is None:
                node["children"], node["status"] = [], node["status"] | DRAFT_NAN
        if node["children"]:
            q = None if self.one_hot else laws[0]
            node["state"] = Residual(node["p"], q, self.siblings != "sampled_with_replacement")
        node["touched"] = False
        return node

    def _visit(self, stack):
        """stack: the nodes from the anchor to the one that is looked at, each with the children that
        are left."""
        node = stack[-1]
        if node["children"]:
            child = node["children"][0]
            token = self.tokens[child]
            q, p = node["state"].q_of(token), node["state"].rest[token]
            ratio = p / q if q > 0 else (np.inf if p > 0 else 0.0)
            alpha = min(1.0, node["alpha"] * ratio) if node["alpha"] > 0 else 0.0
            return self._visit([*stack, self._enter([*node["path"], child], alpha)])
        if len(stack) == 1:
            return self._finish(stack)
        out = []
        for w, yes in self.choices.accept(1.0, node["alpha"], node["path"][-1]):
            if yes:
                more = self._finish(stack)
            else:
                parent = dict(stack[-2])
                token = self.tokens[node["path"][-1]]
                after = parent["state"].rejected(token, parent["alpha"])
                alpha = parent["alpha"]
                whole = after.mass + 1.0 - alpha
                parent["alpha"] = after.mass / whole if whole > 0 else 1.0
                parent["touched"] = True
                parent["children"] = parent["children"][1:]
                parent["left"] = after
                if after.mass < MIN_RESIDUAL_MASS or after.exhausted:
                    parent["children"] = []
                else:
                    parent["state"] = after.normalised()
                more = self._visit([*stack[:-2], parent])
            out += [(w * v, o) for v, o in more]
        return out

    def _finish(self, stack):
        node, status = stack[-1], 0
        for n in stack:
            status |= n["status"]
        path = node["path"]
        if node["row"].status:
            return [(1.0, Outcome(tuple(path), node["row"].fallback, status))]
        if node["touched"]:
            return self.from_residual(path, status, node["p"], node["left"].raw)
        return self.bonus(path, status, node["p"])


class Residual:
    """What is left of p after rejections: rest = a p - b q where positive, q with factor s off the
    rejected tokens (without replacement) or as it is (with). q None: one-hot at the child tested."""

    def __init__(self, p, q, without_replacement):
        self.p, self.q, self.without = p, q, without_replacement
        self.rest, self.factor, self.removed = p, 1.0, ()
        self.raw, self.mass, self.exhausted = p, 1.0, False

    def q_of(self, token):
        if self.q is None:
            return 1.0
        return 0.0 if token in self.removed else self.factor * self.q[token]

    def q_law(self, token):
        if self.q is None:
            law = np.zeros(len(self.p))
            law[token] = 1.0
            return law
        law = self.factor * self.q
        law[list(self.removed)] = 0.0
        return law

    def rejected(self, token, alpha=1.0):
        after = Residual(self.p, self.q, self.without)
        after.raw = np.maximum(alpha * self.rest - self.q_law(token), 0.0)
        after.mass = float(after.raw.sum())
        after.removed = self.removed
        if self.without and self.q is not None:
            after.removed = (*self.removed, token)
            left = 1.0 - self.q[list(after.removed)].sum()
            after.exhausted = left < MIN_RESIDUAL_MASS
            after.factor = 1.0 / left if not after.exhausted else 0.0
        return after

    def normalised(self):
        self.rest = self.raw / self.mass
        return self
