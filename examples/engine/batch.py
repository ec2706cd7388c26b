"""The state of a batch between rounds, and the bookkeeping that turns it into the next target pass.

Everything a round reads or writes is a tensor on the device. The one exception is marked: a pass on
the CPU is cut to the rows in use, and their number has to be known on the host for that.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_cache import slots_of
from engine.model import PassRows


@dataclass(frozen=True)
class Request:
    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0


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
class Drafts:
    """What a drafter proposes: for request b the ids `tokens[b, :counts[b]]`.

    Without `logits` the ids count as certain (a one-hot law). A drafter that draws its ids passes the
    `logits` it drew them from, at `temperature`.
    """

    tokens: Tensor  # int64 [B, K], -1 past counts
    counts: Tensor  # int64 [B]
    logits: Tensor | None = None  # [B, K, V]
    temperature: Tensor | None = None  # float32 [B]


@dataclass(frozen=True)
class RoundRows:
    """The rows of one round and which request each of them belongs to."""

    rows: PassRows
    requests: Tensor  # int64 [R]; padding rows name request 0
    used: Tensor  # bool [R]
    num_used: int


@dataclass(frozen=True)
class TargetPass:
    """What a pass of the target over prompt tokens or over a round's rows leaves for a drafter. The requests of
    `rows.cu_rows` are `members`; of each of them the first `num_committed` rows stay."""

    rows: PassRows
    requests: Tensor  # int64 [R], the request of every row
    members: Tensor  # int64 [M]
    hiddens: list[Tensor]  # [R, d] of every tapped layer
    num_committed: Tensor  # int64 [M]


@dataclass(frozen=True)
class Commit:
    """What a round added to the requests."""

    tokens: Tensor  # int64 [B, K+1] as decided, -1 where nothing
    num_committed: Tensor  # int64 [B], 0 for a request that took no part


def new_batch(
    requests: list[Request], stop_ids: list[int], block_table: Tensor, device: torch.device
) -> BatchState:
    limits = [len(r.prompt_ids) + r.max_new_tokens for r in requests]
    history = torch.full((len(requests), max(limits) + 1), -1, dtype=torch.int64)
    for index, request in enumerate(requests):
        history[index, : len(request.prompt_ids)] = torch.tensor(request.prompt_ids)

    def per_request(values: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return BatchState(
        history=history.to(device),
        num_tokens=per_request([len(r.prompt_ids) for r in requests], torch.int64),
        max_tokens=per_request(limits, torch.int64),
        active=per_request([r.max_new_tokens > 0 for r in requests], torch.bool),
        temperature=per_request([r.temperature for r in requests], torch.float32),
        seeds=per_request([r.seed for r in requests], torch.int64),
        stop_ids=per_request(stop_ids, torch.int64),
        block_table=block_table,
    )


def trim_drafts(state: BatchState, drafts: Drafts) -> Drafts:
    """No drafts for requests that ended, and none past the last token a request may still get: the
    round's own token takes one place, so at most `max_tokens - num_tokens - 1` drafts can matter."""
    room = (state.max_tokens - state.num_tokens - 1).clamp(min=0)
    counts = torch.minimum(drafts.counts, room) * state.active
    column = torch.arange(drafts.tokens.size(1), device=counts.device)
    tokens = drafts.tokens.masked_fill(column >= counts[:, None], -1)
    return Drafts(tokens, counts, drafts.logits, drafts.temperature)


def lay_out_rows(
    state: BatchState, drafts: Drafts, page_size: int, row_count: Callable[[int], int]
) -> RoundRows | None:
    """Rows of the pass: per active request its anchor, then its drafts, then padding up to row_count of
    them. None when all have ended."""
    device = state.history.device
    rows_per_request = state.active * (drafts.counts + 1)
    cu_rows = torch.zeros(state.batch_size + 1, dtype=torch.int64, device=device)
    torch.cumsum(rows_per_request, 0, out=cu_rows[1:])
    num_used = int(cu_rows[-1])  # the one host read of a round
    if num_used == 0:
        return None

    row = torch.arange(row_count(num_used), device=device)
    requests = torch.searchsorted(cu_rows[1:], row, right=True)
    used = requests < state.batch_size
    requests = requests.where(used, 0)
    offset = (row - cu_rows[requests]).where(used, 0)  # 0 = anchor, j = draft j
    candidates = torch.cat([state.anchor_ids[:, None], drafts.tokens], dim=1)
    positions = state.anchor_positions[requests] + offset
    slots = slots_of(state.block_table, requests, positions, page_size)
    return RoundRows(
        rows=PassRows(
            token_ids=candidates[requests, offset],
            positions=positions,
            slots=slots.where(used, -1),
            cu_rows=cu_rows.to(torch.int32),
            seq_lens=(state.anchor_positions + rows_per_request).to(torch.int32),
            block_table=state.block_table,
            max_rows=drafts.tokens.size(1) + 1,
        ),
        requests=requests,
        used=used,
        num_used=num_used,
    )


def commit(state: BatchState, tokens: Tensor) -> Commit:
    """Appends the decided `tokens` [B, K+1] to the requests, up to the first stop token (kept) and the
    length limit, and retires the requests that reached either.

    Cache places of rejected drafts need no clean-up: the next pass writes its rows over them, and
    attention never looks past `seq_lens`.
    """
    column = torch.arange(tokens.size(1), device=tokens.device)
    places = state.num_tokens[:, None] + column
    is_stop = torch.isin(tokens, state.stop_ids)
    after_stop = is_stop.cumsum(1) - is_stop.long() > 0
    kept = (tokens >= 0) & ~after_stop & (places < state.max_tokens[:, None])

    nowhere = state.history.size(1) - 1
    state.history.scatter_(1, places.where(kept, nowhere), tokens)
    num_committed = kept.sum(1)
    state.num_tokens += num_committed
    stopped = (is_stop & kept).any(1) | (state.num_tokens >= state.max_tokens)
    state.active &= ~stopped
    return Commit(tokens, num_committed)
