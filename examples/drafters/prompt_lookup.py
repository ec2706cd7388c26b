"""Prompt lookup: what followed the last time these words were used, follows again."""

import torch

from engine.batch import BatchState, Drafts


class PromptLookup:
    """Finds the last tokens of a request earlier in its own prompt and output, the longest n-gram
    first, and proposes what came after them. No weights; pays off where the output repeats the input
    (editing, summarising, code) and costs little where it does not.

    A match of a single token is weak evidence, and a pass over four rows costs little more than one
    over a single row, over eight nearly twice as much: such a match gets `weak_drafts` drafts at most. One of fewer
    than `shortest` tokens is none.
    """

    name = "prompt lookup"

    def __init__(self, longest: int = 4, weak_drafts: int = 3, shortest: int = 1):
        self.longest, self.shortest = longest, shortest
        self.weak_drafts = weak_drafts

    def propose(self, state: BatchState, num_drafts: int) -> Drafts:
        length, end = match_suffix(state, self.longest)
        allowed = torch.where(length > 1, num_drafts, min(self.weak_drafts, num_drafts))
        available = state.num_tokens - 1 - end  # tokens from after the match to the anchor
        counts = torch.minimum(allowed, available).where(length >= self.shortest, 0)

        column = torch.arange(num_drafts, device=end.device)
        source = (end[:, None] + 1 + column).clamp(max=state.history.size(1) - 1)
        tokens = state.history.gather(1, source)
        return Drafts(tokens.masked_fill(column >= counts[:, None], -1), counts)


def match_suffix(state: BatchState, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Per request, the best earlier occurrence of its last tokens: how many of them match (at most
    `longest`) and the position of the last one. Ties go to the latest occurrence."""
    history, last = state.history, state.num_tokens - 1
    position = torch.arange(history.size(1), device=history.device)
    matching = position < last[:, None]  # the match must have a successor
    length = torch.zeros_like(history)
    for back in range(longest):
        wanted = history.gather(1, (last - back).clamp(min=0)[:, None])
        same = history == wanted
        same = same.roll(back, dims=1) & (position >= back) & (last[:, None] >= back)
        matching = matching & same
        length += matching
    score, end = (length * history.size(1) + position).where(length > 0, -1).max(dim=1)
    return length.gather(1, end[:, None]).squeeze(1), end
