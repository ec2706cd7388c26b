"""The seam between the engine and the models or rules that draft for it."""

from typing import Protocol

from engine.batch import BatchState, Drafts, TargetPass


class Drafter(Protocol):
    name: str

    def propose(self, state: BatchState, num_drafts: int) -> Drafts:
        """Up to `num_drafts` tokens after the anchor of every request, as tensors on the device.

        `state` is read only. Proposals for requests that have ended are ignored. Any proposal is
        safe: what the target model would not have said is dropped, so drafts change speed, not text.
        """
        ...


class FeatureDrafter(Drafter, Protocol):
    """A drafter that reads hidden states of the target, and keeps what it makes of them from pass to pass."""

    tapped_layers: tuple[
        int, ...
    ]  # outputs of these decoder layers, -1 for the embedding; at least one

    def start(self, state: BatchState, page_size: int) -> None:
        """A new batch begins; whatever was kept of the one before is void."""
        ...

    def observe(self, state: BatchState, seen: TargetPass) -> None:
        """Called after every pass, those over the prompts too, and after its tokens have been committed.

        The rows that stay are the context of the next proposal: places before the anchor.
        """
        ...
