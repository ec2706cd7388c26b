"""The state of a batch between rounds, what a round proposes, and what it commits. All tensors on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

ops = torch.ops.specdec


@dataclass(frozen=True)
class Request:
    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0

    @property
    def max_tokens(self) -> int:
        """Prompt and output together."""
        return len(self.prompt_ids) + self.max_new_tokens


@dataclass
class BatchState:
    """B requests. The last committed token of a request is its anchor: it is in `history`, its keys
    and values are not in the cache yet, so the cache holds `num_tokens - 1` places of the request."""

    history: Tensor  # int64 [B, L+1] prompt and output; column L takes writes that belong nowhere
    num_tokens: Tensor  # int64 [B]
    max_tokens: Tensor  # int64 [B], prompt and output together
    active: Tensor  # bool [B]
    temperature: Tensor  # float32 [B]
    seeds: Tensor  # int64 [B]
    stop_ids: Tensor  # int64 [S]
    block_table: Tensor  # int32 [B, P]

    @property
    def batch_size(self) -> int:
        return self.history.size(0)

    @property
    def anchor_positions(self) -> Tensor:
        return self.num_tokens - 1

    @property
    def anchor_ids(self) -> Tensor:
        return self.history.gather(1, self.anchor_positions[:, None]).squeeze(1)


@dataclass(frozen=True)
class DraftTree:
    """How drafts that form a tree hang together. Node 0 is the anchor, node j + 1 is draft j."""

    parents: Tensor  # int64 [B, K], node of the parent, which comes before its child; anything past counts
    depths: Tensor  # int64 [B, K], 1 for a child of the anchor
    max_depth: int


@dataclass(frozen=True)
class Drafts:
    """What a drafter proposes: for request b the ids `tokens[b, :counts[b]]`, each after the one before it or, with
    a `tree`, after its parent.

    Without `logits` the ids count as certain (a one-hot law), and so do those of requests in `one_hot`. A drafter that
    draws its ids passes the `logits` it drew them from, at `temperature`. The drafts of a tree are always certain:
    siblings are the best candidates, not draws.
    """

    tokens: Tensor  # int64 [B, K], -1 past counts
    counts: Tensor  # int64 [B]
    logits: Tensor | None = None  # [B, K, V]
    temperature: Tensor | None = None  # float32 [B]
    one_hot: Tensor | None = None  # bool [B]
    tree: DraftTree | None = None

    @property
    def max_depth(self) -> int:
        """Most tokens on a path."""
        return self.tree.max_depth if self.tree else self.tokens.size(1)


@dataclass(frozen=True)
class Commit:
    """What a round added to the requests."""

    tokens: Tensor  # int64 [B, K+1] as decided, -1 where nothing
    num_committed: Tensor  # int64 [B], 0 for a request that took no part
    finished: Tensor  # bool [B], by this round


def empty_batch(
    batch_size: int, max_tokens: int, block_table: Tensor, stop_ids: list[int], device: torch.device
) -> BatchState:
    """Places for requests of up to max_tokens tokens, prompt and output together; nobody is in them yet."""

    def per_request(value, dtype: torch.dtype) -> Tensor:
        return torch.full((batch_size,), value, dtype=dtype, device=device)

    return BatchState(
        history=torch.full((batch_size, max_tokens + 1), -1, dtype=torch.int64, device=device),
        num_tokens=per_request(1, torch.int64),  # an anchor, so that positions are some
        max_tokens=per_request(1, torch.int64),
        active=per_request(False, torch.bool),
        temperature=per_request(0.0, torch.float32),
        seeds=per_request(0, torch.int64),
        stop_ids=torch.tensor(stop_ids, dtype=torch.int64, device=device),
        block_table=block_table,
    )


def seat(state: BatchState, index: int, request: Request, output_ids: Sequence[int] = ()) -> None:
    """Puts a request into place `index` of the batch, with the output that it has so far."""
    ids = [*request.prompt_ids, *output_ids]
    state.history[index, : len(ids)] = torch.tensor(ids, device=state.history.device)
    state.num_tokens[index] = len(ids)
    state.max_tokens[index] = request.max_tokens
    state.active[index] = len(ids) < request.max_tokens
    state.temperature[index] = request.temperature
    state.seeds[index] = request.seed


def new_batch(
    requests: list[Request], stop_ids: list[int], block_table: Tensor, device: torch.device
) -> BatchState:
    longest = max((request.max_tokens for request in requests), default=0)
    state = empty_batch(len(requests), longest, block_table, stop_ids, device)
    for index, request in enumerate(requests):
        seat(state, index, request)
    return state


def tree_drafts(
    built: tuple[Tensor, ...], anchor_positions: Tensor, takes_part: Tensor, max_depth: int
) -> Drafts:
    """The trees that `build_tree` or `block_tree` made, for the requests that take part (bool [B])."""
    input_ids, parents, _, positions, *_ = built
    tree = DraftTree(
        parents=parents[:, 1:].long(),
        depths=positions[:, 1:] - anchor_positions[:, None],
        max_depth=max_depth,
    )
    return Drafts(input_ids[:, 1:], (tree.parents >= 0).sum(1).where(takes_part, 0), tree=tree)


def trim_drafts(state: BatchState, drafts: Drafts) -> Drafts:
    """No drafts for requests that ended, and none past the last token a request may still get: the
    round's own token takes one place, so at most `max_tokens - num_tokens - 1` drafts can matter."""
    room = (state.max_tokens - state.num_tokens - 1).clamp(min=0) * state.active
    if drafts.tree is not None:
        return prune_tree(drafts, room)
    counts = torch.minimum(drafts.counts, room)
    column = torch.arange(drafts.tokens.size(1), device=counts.device)
    tokens = drafts.tokens.masked_fill(column >= counts[:, None], -1)
    return replace(drafts, tokens=tokens, counts=counts)


def prune_tree(drafts: Drafts, max_depths: Tensor) -> Drafts:
    """Without the nodes deeper than max_depths [B]. The others keep their order and get new numbers; a parent is not as
    deep as its child, so what is left is a tree."""
    tree, column = drafts.tree, torch.arange(drafts.tokens.size(1), device=max_depths.device)
    kept = (column < drafts.counts[:, None]) & (tree.depths <= max_depths[:, None])
    counts, order = kept.sum(1), (~kept).long().argsort(dim=1, stable=True)
    number = torch.cat([torch.zeros_like(counts)[:, None], kept.cumsum(1)], dim=1)  # by old one
    parents = number.gather(1, tree.parents.clamp(min=0))
    unused = column >= counts[:, None]
    return Drafts(
        tokens=drafts.tokens.gather(1, order).masked_fill(unused, -1),
        counts=counts,
        tree=DraftTree(parents.gather(1, order), tree.depths.gather(1, order), tree.max_depth),
    )


def commit(state: BatchState, tokens: Tensor, num_accepted: Tensor, page_size: int) -> Commit:
    """Appends the decided tokens, the first `num_accepted + 1` of `tokens` [B, K+1], to the requests, up to the first
    stop token (kept) and the length limit, and retires the requests that reached either.

    Cache places of rejected drafts need no clean-up: the next pass writes its rows over them, and
    attention never looks past `seq_lens`.
    """
    *_, num_emitted, finished = ops.next_round(
        tokens,
        num_accepted.to(torch.int32),
        state.anchor_positions.to(torch.int32),
        state.block_table,
        page_size=page_size,
        block_len=0,  # drafters lay out their own rows
        mask_token_id=0,
        stop_token_ids=state.stop_ids,
        max_len=state.max_tokens.to(torch.int32),
    )
    column = torch.arange(tokens.size(1), device=tokens.device)
    nowhere = state.history.size(1) - 1
    places = state.num_tokens[:, None] + column
    state.history.scatter_(1, places.where(column < num_emitted[:, None], nowhere), tokens)
    state.num_tokens += num_emitted
    state.active &= ~finished
    return Commit(tokens, num_emitted.long(), finished)
