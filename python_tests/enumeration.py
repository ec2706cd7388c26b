"""The exact law of what verification emits: all drafts that a drafter may draw, all choices of the walk
that the oracles make (oracles/choices.py), and then plain sampling up to a fixed number of tokens. A
lossless method gives the law of plain sampling.

Laws depend on the whole context: the logits of a row are a fixed function of the tokens before it.
"""

import itertools

import numpy as np
from compare import FORMULA_ERROR
from oracles.choices import Every
from oracles.controls import Controls, Row
from oracles.verify import Verification


class Context:
    """Random logits x(. | tokens) of a target and y(. | tokens) of a drafter."""

    def __init__(self, vocab, seed, scale=1.2):
        self.vocab, self.seed, self.scale = vocab, seed, scale
        self.cache = {}

    def logits(self, tokens, which, vocab=None):
        key = (tuple(tokens), which)
        if key not in self.cache:
            g = np.random.default_rng([self.seed, which, *[t + 1 for t in tokens]])
            x = g.normal(size=vocab or self.vocab) * self.scale
            self.cache[key] = x.astype(np.float32)
        return self.cache[key]

    def target(self, tokens):
        return self.logits(tokens, 0)

    def draft(self, tokens, columns=None):
        return self.logits(tokens, 1, columns)


class Job:
    """A tree shape, a drafter and the controls of one request."""

    def __init__(
        self, context, parents, controls=None, *, one_hot=False, draft_ids=None, **options
    ):
        self.context, self.parents, self.options = context, parents, options
        self.controls = Controls(context.vocab, **(controls or {}))
        self.request = self.controls.of(0)
        self.one_hot, self.draft_ids = one_hot, draft_ids
        self.children = [[c for c, p in enumerate(parents) if p == u] for u in range(len(parents))]
        self.paths = []
        for u, p in enumerate(parents):
            self.paths.append([0] if p < 0 else [*self.paths[p], u])
        self.depth = max(len(p) for p in self.paths) - 1

    def row_of(self, tokens_before):
        """Row (for the bitmask) of the node after some tokens: its depth, whatever the branch."""
        return len(tokens_before)

    def plain(self, tokens):
        """Law of the next token under the controls."""
        row = Row(self.context.target(tokens), self.request, self.row_of(tokens), tokens)
        assert not row.status, "every context of a law test has a law"
        return row.laws()[0]

    def verification(self, tokens, choices):
        def before(u):
            return [tokens[v] for v in self.paths[u][1:]]

        columns = None if self.draft_ids is None else len(self.draft_ids)
        masks = _Rows(self, before)
        request = self.controls.of(0)
        request.allowed = masks.allowed
        return Verification(
            request,
            tokens,
            self.children,
            lambda u: self.context.target(before(u)),
            None if self.one_hot else lambda u: self.context.draft(before(u), columns),
            choices,
            draft_ids=self.draft_ids,
            **self.options,
        )

    def drafts(self):
        """All (probability, tokens of the nodes) that the drafter may draw."""
        out = [(1.0, [0] * len(self.parents))]
        for u in range(len(self.parents)):
            if not self.children[u]:
                continue
            grown = []
            for w, tokens in out:
                for v, picks in self._siblings(u, tokens):
                    filled = list(tokens)
                    for c, t in zip(self.children[u], picks, strict=True):
                        filled[c] = t
                    grown.append((w * v, filled))
            out = grown
        return out

    def _siblings(self, u, tokens):
        count, vocab = len(self.children[u]), self.context.vocab
        siblings = self.options.get("siblings", "deterministic")
        if self.one_hot and siblings == "deterministic":
            # Any choice that does not look at the random numbers: ids from the context.
            g = np.random.default_rng([self.context.seed, 2, u, *[t + 1 for t in tokens]])
            return [(1.0, [int(t) for t in g.permutation(vocab)[:count]])]
        q = self.verification(tokens, Every()).q_laws(self.paths[u])[0]
        out = []
        if siblings == "sampled_with_replacement" or count == 1:
            for picks in itertools.product(range(vocab), repeat=count):
                w = float(np.prod([q[t] for t in picks]))
                out.append((w, list(picks)))
        else:
            # A law of fewer ids than children gives no more siblings than it has ids.
            some = min(count, int((q > 0).sum()))
            for picks in itertools.permutations(range(vocab), some):
                w, left = 1.0, 1.0
                for t in picks:
                    w *= q[t] / left if left > 0 else 0.0
                    left -= q[t]
                out.append((w, [*picks, *[-1] * (count - some)]))
        return [(w, picks) for w, picks in out if w > 0]

    def emitted(self):
        """(law of the first depth + 1 tokens [V, .., V], expected number of accepted drafts, law of
        the first token)."""
        length = self.depth + 1
        joint = np.zeros([self.context.vocab] * length)
        accepted = 0.0
        for w, tokens in self.drafts():
            walk = self.verification(tokens, Every()).walk()
            assert abs(sum(v for v, _ in walk) - 1) < FORMULA_ERROR, (
                "choices with probabilities that sum to 1"
            )
            for v, outcome in walk:
                assert outcome.status == 0
                accepted += w * v * (len(outcome.path) - 1)
                out = [tokens[u] for u in outcome.path[1:]] + [outcome.token]
                self._extend(joint, out, w * v)
        return joint, accepted

    def plain_law(self):
        joint = np.zeros([self.context.vocab] * (self.depth + 1))
        self._extend(joint, [], 1.0)
        return joint

    def _extend(self, joint, tokens, weight):
        if len(tokens) == joint.ndim:
            joint[tuple(tokens)] += weight
            return
        for t, p in enumerate(self.plain(tokens)):
            if p > 0:
                self._extend(joint, [*tokens, t], weight * p)


class _Rows:
    """The bitmask of a node is that of its depth, so that plain sampling knows it too."""

    def __init__(self, job, before):
        self.job, self.before = job, before
        self.plain = job.controls.of(0)

    def allowed(self, row):
        return self.plain.allowed(len(self.before(row)))
