"""The seam between the engine and the models or rules that draft for it."""

from dataclasses import dataclass
from typing import Protocol

from engine.batch import BatchState, Drafts
from engine.kv_cache import PagedKvCache
from engine.layout import TargetPass

MAX_TOPK, MAX_NODES, MAX_CANDIDATES = 32, 256, 2048  # of expand_tree, build_tree and block_tree


class Drafter(Protocol):
    name: str

    def propose(self, state: BatchState, num_drafts: int) -> Drafts:
        """Up to `num_drafts` tokens after the anchor of every request, as tensors on the device.

        `state` is read only. Proposals for requests that have ended are ignored. Any proposal is
        safe: what the target model would not have said is dropped, so drafts change speed, not text.
        """
        ...


class FeatureDrafter(Drafter, Protocol):
    """A drafter that reads hidden states of the target, and keeps what it makes of them from pass to pass.

    Its keys and values lie in caches of its own, at the places that the target's block table names: whoever moves a
    request to other pages moves it for both.
    """

    tapped_layers: tuple[
        int, ...
    ]  # outputs of these decoder layers, -1 for the embedding; at least one

    lookahead: (
        int  # places past a request's last token that it, or a round over its drafts, may write to
    )

    def start(self, state: BatchState, cache: PagedKvCache) -> None:
        """A new batch begins, with the target's cache; whatever was kept of the one before is void."""
        ...

    def admit(self, index: int) -> None:
        """Another request takes this place of the batch; passes over its tokens follow."""
        ...

    def observe(self, state: BatchState, seen: TargetPass) -> None:
        """Called after every pass, those over the prompts too, and after its tokens have been committed.

        The rows that stay are the context of the next proposal: places before the anchor.
        """
        ...


@dataclass(frozen=True)
class TreeShape:
    """Draft trees of at most `num_nodes` nodes, the anchor among them, and at most `topk` children of a node."""

    topk: int
    num_nodes: int

    def __post_init__(self):
        for what, value, most in (
            ("topk", self.topk, MAX_TOPK),
            ("num_nodes", self.num_nodes, MAX_NODES),
        ):
            if not 1 <= value <= most:
                raise ValueError(f"TreeShape: {what}: wanted 1 to {most}, got {value}")
