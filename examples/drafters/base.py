"""The seam between the engine and the models or rules that draft for it."""

from typing import Protocol

from engine.batch import BatchState, Drafts


class Drafter(Protocol):
    name: str

    def propose(self, state: BatchState, num_drafts: int) -> Drafts:
        """Up to `num_drafts` tokens after the anchor of every request, as tensors on the device.

        `state` is read only. Proposals for requests that have ended are ignored. Any proposal is
        safe: what the target model would not have said is dropped, so drafts change speed, not text.
        """
        ...
