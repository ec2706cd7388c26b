"""Prefill and the decoding rounds: draft, one target pass, accept, commit."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.batch import (
    BatchState,
    Drafts,
    Request,
    RoundRows,
    TargetPass,
    commit,
    lay_out_rows,
    new_batch,
    trim_drafts,
)
from engine.kv_cache import PagedKvCache, slots_of
from engine.model import LlamaModel, PassRows, Taps

ops = torch.ops.specdec

PAGE_SIZE = 16
PREFILL_ROWS = 256  # prompt tokens per prefill pass; bounds the activations of long prompts


@dataclass(frozen=True)
class RoundRecord:
    """One round as tensors on the host, for display and statistics."""

    drafts: list[list[int]]  # per request, the drafts that were verified
    committed: list[list[int]]  # per request, the tokens added; empty if it took no part
    num_accepted: list[int]  # of the committed tokens, those that were drafts


@dataclass
class Generation:
    """What came out of one batch, and what it cost."""

    output_ids: list[list[int]]  # per request, the stop token included
    prefill_seconds: float
    decode_seconds: float
    rounds: int  # target passes of the whole batch
    request_passes: int  # target passes counted once per request that took part
    drafted: int
    accepted: int
    status: list[int] = field(default_factory=list)  # per request, status bits of all rounds or-ed

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.output_ids)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.decode_seconds

    @property
    def accepted_length(self) -> float:
        """Tokens committed per target pass of a request; plain decoding has 1."""
        return self.num_tokens / max(self.request_passes, 1)


class Engine:
    """Decodes batches of requests with one model.

    With a drafter, a round verifies up to `num_drafts` drafts per request with `verify_chain`. Without
    one it is plain decoding: the same pass over one row per request, the token from `sample`.
    """

    def __init__(self, model: LlamaModel, stop_ids: list[int], page_size: int = PAGE_SIZE):
        self.model = model
        self.stop_ids = stop_ids
        self.page_size = page_size

    @torch.inference_mode()
    def generate(
        self,
        requests: list[Request],
        drafter=None,
        num_drafts: int = 0,
        on_round: Callable[[RoundRecord], None] | None = None,
    ) -> Generation:
        lengths = [self._checked_length(request) for request in requests]
        num_pages = sum(-(-length // self.page_size) for length in lengths)
        cache = self.model.new_cache(num_pages, self.page_size)
        block_table, pages = cache.take(lengths)
        state = new_batch(requests, self.stop_ids, block_table, self.model.device)

        start = self._now()
        if tapped_layers(drafter):
            drafter.start(state, self.page_size)
        self._prefill(requests, state, cache, drafter)
        prefill_seconds = self._now() - start

        result = Generation([], prefill_seconds, 0.0, 0, 0, 0, 0)
        status = torch.zeros(len(requests), dtype=torch.int32, device=self.model.device)
        while True:
            start = self._now()
            record = self._round(state, cache, drafter, num_drafts, status)
            result.decode_seconds += self._now() - start
            if record is None:
                break
            result.rounds += 1
            result.request_passes += sum(1 for tokens in record.committed if tokens)
            result.drafted += sum(len(tokens) for tokens in record.drafts)
            result.accepted += sum(record.num_accepted)
            if on_round is not None:
                on_round(record)

        ends, history = state.num_tokens.tolist(), state.history.tolist()
        result.output_ids = [
            history[b][len(request.prompt_ids) : ends[b]] for b, request in enumerate(requests)
        ]
        result.status = status.tolist()
        cache.give_back(pages)
        return result

    def _prefill(
        self, requests: list[Request], state: BatchState, cache: PagedKvCache, drafter
    ) -> None:
        """Fills the cache with every prompt token but the last, which is the first round's anchor.

        One request at a time, so that a prompt's keys and values do not depend on its neighbours.
        """
        device = self.model.device
        for index, request in enumerate(requests):
            ids = state.history[index, : len(request.prompt_ids) - 1]
            for begin in range(0, ids.numel(), PREFILL_ROWS):
                end = min(begin + PREFILL_ROWS, ids.numel())
                positions = torch.arange(begin, end, device=device)
                owner = torch.full_like(positions, index)
                table = state.block_table
                rows = PassRows(
                    token_ids=ids[begin:end],
                    positions=positions,
                    slots=slots_of(table, owner, positions, self.page_size),
                    cu_rows=torch.tensor([0, end - begin], dtype=torch.int32, device=device),
                    seq_lens=torch.tensor([end], dtype=torch.int32, device=device),
                    block_table=table[index : index + 1],
                    max_rows=end - begin,
                )
                taps = Taps(tapped_layers(drafter))
                self.model.forward(rows, cache, taps)
                if taps.hiddens:
                    kept = torch.full((1,), end - begin, device=device)
                    drafter.observe(state, TargetPass(rows, owner, owner[:1], taps.hiddens, kept))

    def _round(
        self, state: BatchState, cache: PagedKvCache, drafter, num_drafts: int, status: Tensor
    ) -> RoundRecord | None:
        """One round of every active request; None when there is none."""
        drafts = trim_drafts(state, propose(state, drafter, num_drafts))
        layout = lay_out_rows(state, drafts, self.page_size, self.model.cheap_row_count)
        if layout is None:
            return None
        taps = Taps(tapped_layers(drafter))
        logits = self.model.logits(self.model.forward(layout.rows, cache, taps))
        if drafter is None:
            tokens, num_accepted = self._sample(state, layout, logits, status)
        else:
            tokens, num_accepted = self._verify(state, layout, drafts, logits, status)
        done = commit(state, tokens)
        if taps.hiddens:
            everyone = torch.arange(state.batch_size, device=self.model.device)
            drafter.observe(
                state,
                TargetPass(
                    layout.rows, layout.requests, everyone, taps.hiddens, done.num_committed
                ),
            )
        return to_record(drafts, num_accepted, done.tokens, done.num_committed)

    def _sample(self, state: BatchState, layout: RoundRows, logits: Tensor, status: Tensor):
        """Plain decoding: every used row is the only row of its request."""
        rows, requests = layout.rows, layout.requests
        drawn, _, _, row_status, *_ = ops.sample(
            logits,
            state.seeds[requests],
            rows.positions,
            vocab_size=self.model.config.vocab_size,
            temperature=state.temperature[requests],
        )
        tokens = torch.full_like(state.num_tokens, -1)
        tokens[requests[layout.used]] = drawn[layout.used].to(tokens.dtype)
        status[requests[layout.used]] |= row_status[layout.used]
        return tokens[:, None], torch.zeros_like(tokens)

    def _verify(
        self, state: BatchState, layout: RoundRows, drafts: Drafts, logits: Tensor, status: Tensor
    ):
        tokens, num_accepted, round_status, *_ = ops.verify_chain(
            logits,
            layout.rows.token_ids,
            layout.rows.cu_rows,
            state.seeds,
            state.anchor_positions,
            drafts.tokens.size(1),
            vocab_size=self.model.config.vocab_size,
            draft_logits=drafts.logits,
            draft_temperature=drafts.temperature,
            method="token",
            temperature=state.temperature,
        )
        status |= round_status
        return tokens, num_accepted

    def _checked_length(self, request: Request) -> int:
        if not request.prompt_ids:
            raise ValueError("a request needs at least one prompt token")
        length = len(request.prompt_ids) + request.max_new_tokens
        if length > self.model.config.max_positions:
            raise ValueError(
                f"prompt and output together want {length} positions, "
                f"the model has {self.model.config.max_positions}"
            )
        return length

    def _now(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()


def tapped_layers(drafter) -> tuple[int, ...]:
    """The target's layers that a drafter reads; rules such as prompt lookup read none."""
    return getattr(drafter, "tapped_layers", ())


def propose(state: BatchState, drafter, num_drafts: int) -> Drafts:
    if drafter is not None:
        return drafter.propose(state, num_drafts)
    nothing = state.history.new_empty((state.batch_size, 0))
    return Drafts(nothing, torch.zeros_like(state.num_tokens))


def to_record(
    drafts: Drafts, num_accepted: Tensor, tokens: Tensor, num_committed: Tensor
) -> RoundRecord:
    counts, committed = drafts.counts.tolist(), num_committed.tolist()
    return RoundRecord(
        drafts=[row[:n] for row, n in zip(drafts.tokens.tolist(), counts, strict=True)],
        committed=[row[:n] for row, n in zip(tokens.tolist(), committed, strict=True)],
        # A stop token or the length limit may end a request inside its accepted run.
        num_accepted=torch.minimum(num_accepted, num_committed).tolist(),
    )
