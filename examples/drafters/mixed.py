"""Prompt lookup where the text repeats itself, a trained drafter elsewhere: each drafts what it is good at."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from drafters.base import Drafter
from drafters.prompt_lookup import PromptLookup
from engine.batch import BatchState, Drafts, DraftTree
from engine.decode import lookahead, tapped_layers
from engine.kv_cache import PagedKvCache
from engine.layout import TargetPass


class LookupOr:
    """Looks a request's next tokens up where its last `shortest` tokens or more have occurred before, else asks
    `drafter`: a choice per request and round, by its own text alone."""

    def __init__(self, drafter: Drafter, shortest: int = 3):
        self.drafter = drafter
        self.lookup = PromptLookup(longest=max(4, shortest), shortest=shortest)
        self.name = f"{self.lookup.name} or {drafter.name}"
        self.tapped_layers, self.lookahead = tapped_layers(drafter), lookahead(drafter)

    def start(self, state: BatchState, cache: PagedKvCache) -> None:
        self.drafter.start(state, cache)

    def admit(self, index: int) -> None:
        self.drafter.admit(index)

    def observe(self, state: BatchState, seen: TargetPass) -> None:
        """The drafter sees every pass, also those over tokens that were looked up."""
        self.drafter.observe(state, seen)

    def propose(self, state: BatchState, num_drafts: int) -> Drafts:
        looked_up = self.lookup.propose(state, num_drafts)
        found = looked_up.counts > 0
        others = replace(state, active=state.active & ~found)
        return choose(found, looked_up, self.drafter.propose(others, num_drafts))


def choose(first: Tensor, chain: Drafts, other: Drafts) -> Drafts:
    """Drafts of `chain`, which are certain, for the requests `first` (bool [B]), of `other` for the rest."""
    width = max(chain.tokens.size(1), other.tokens.size(1))

    def pick(ours: Tensor, theirs: Tensor) -> Tensor:
        return torch.where(first[:, None], widened(ours, width), widened(theirs, width))

    logits = one_hot = tree = None
    if other.logits is not None:
        missing = width - other.tokens.size(1)
        logits = functional.pad(other.logits, (0, 0, 0, missing))  # rows of no draft
        one_hot = first if other.one_hot is None else first | other.one_hot
    if other.tree is not None:
        nodes = torch.arange(width, device=first.device).expand(first.numel(), -1)
        tree = DraftTree(
            parents=pick(nodes, other.tree.parents),
            depths=pick(nodes + 1, other.tree.depths),
            max_depth=max(chain.max_depth, other.max_depth),
        )
    return Drafts(
        tokens=pick(chain.tokens, other.tokens),
        counts=torch.where(first, chain.counts, other.counts),
        logits=logits,
        temperature=other.temperature,
        one_hot=one_hot,
        tree=tree,
    )


def widened(x: Tensor, width: int) -> Tensor:
    """[B, width], filled up with -1."""
    return functional.pad(x, (0, width - x.size(1)), value=-1)
