"""Prefill and the decoding rounds: draft, one target pass, accept, commit."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.batch import BatchState, Commit, Drafts, Request, commit, new_batch, trim_drafts
from engine.kv_cache import PagedKvCache, slots_of
from engine.layout import RoundRows, TargetPass, lay_out_rows, seen_along_path
from engine.model import LlamaModel, PassRows, Taps

ops = torch.ops.specdec

PAGE_SIZE = 16
PREFILL_ROWS = 256  # prompt tokens per prefill pass; bounds the activations of long prompts


@dataclass(frozen=True)
class RoundRecord:
    """One round as tensors on the host, for display and statistics."""

    drafts: list[
        list[int]
    ]  # per request, the drafts that were verified; of a tree the accepted path first
    committed: list[list[int]]  # per request, the tokens added; empty if it took no part
    num_accepted: list[int]  # of the committed tokens, those that were drafts
    finished: list[bool]  # by this round


@dataclass(frozen=True)
class Decision:
    """What verification says about a round."""

    tokens: Tensor  # int64 [B, D+1], accepted drafts and the target's own token, -1 behind them
    num_accepted: Tensor  # int32 [B]
    status: Tensor  # int32 [B]
    path: Tensor | None = (
        None  # int32 [B, D+1], the accepted nodes of a tree from the anchor on, -1 behind them
    )


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

    With a drafter, a round verifies chains of up to `num_drafts` drafts with `verify_chain`, or trees of so many levels
    with `verify_tree`. Without one it is plain decoding: the same pass over one row per request, the token from
    `sample`.

    `method` is how `verify_chain` decides about chains. "sampled" gives the tokens of plain decoding, whatever the drafts
    are and however many of them; "token" accepts more.
    """

    def __init__(
        self,
        model: LlamaModel,
        stop_ids: list[int],
        page_size: int = PAGE_SIZE,
        method: str = "token",
    ):
        self.model = model
        self.method = method
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
        lengths = [self.checked_length(request) for request in requests]
        places = [length + lookahead(drafter) for length in lengths]
        num_pages = sum(-(-count // self.page_size) for count in places)
        cache = self.model.new_cache(num_pages, self.page_size)
        block_table, pages = cache.take(places)
        state = new_batch(requests, self.stop_ids, block_table, self.model.device)

        start = self._now()
        if tapped_layers(drafter):
            drafter.start(state, cache)
        for index, request in enumerate(requests):
            self.prefill(index, len(request.prompt_ids) - 1, state, cache, drafter)
        prefill_seconds = self._now() - start

        result = Generation([], prefill_seconds, 0.0, 0, 0, 0, 0)
        status = torch.zeros(len(requests), dtype=torch.int32, device=self.model.device)
        while True:
            start = self._now()
            record = self.round(state, cache, drafter, num_drafts, status)
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

    def prefill(
        self, index: int, num_places: int, state: BatchState, cache: PagedKvCache, drafter
    ) -> None:
        """Fills the cache with the first tokens of a request, all but the last one, which is the next round's anchor.

        One request at a time, so that a prompt's keys and values do not depend on its neighbours.
        """
        if tapped_layers(drafter):
            drafter.admit(index)
        device, table = self.model.device, state.block_table
        for begin in range(0, num_places, PREFILL_ROWS):
            end = min(begin + PREFILL_ROWS, num_places)
            positions = torch.arange(begin, end, device=device)
            owner = torch.full_like(positions, index)
            rows = PassRows(
                token_ids=state.history[index, begin:end],
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

    def round(
        self, state: BatchState, cache: PagedKvCache, drafter, num_drafts: int, status: Tensor
    ) -> RoundRecord | None:
        """One round of every active request; None when there is none."""
        drafts = trim_drafts(state, propose(state, drafter, num_drafts))
        layout = lay_out_rows(state, drafts, self.page_size, self.model.cheap_row_count)
        if layout is None:
            return None
        taps = Taps(tapped_layers(drafter))
        logits = self.model.logits(self.model.forward(layout.rows, cache, taps))
        decide = self._sample if drafter is None else self._verify
        decision = decide(state, layout, drafts, logits)
        status |= decision.status
        if decision.path is not None:
            rows = layout.rows
            ops.compact_kv(
                cache.keys, cache.values, rows.slots, rows.cu_rows, decision.path,
                decision.num_accepted,
            )  # fmt: skip
        done = commit(state, decision.tokens, decision.num_accepted, self.page_size)
        if taps.hiddens:
            drafter.observe(state, self._seen(layout, decision, done, taps))
        return to_record(drafts, decision, done)

    def _sample(self, state: BatchState, layout: RoundRows, _drafts: Drafts, logits: Tensor):
        """Plain decoding: every used row is the only row of its request."""
        rows, requests = layout.rows, layout.requests
        drawn, _, _, row_status, *_ = ops.sample(
            logits,
            state.seeds[requests],
            rows.positions,
            vocab_size=self.model.config.vocab_size,
            temperature=state.temperature[requests],
        )
        tokens, taking_part = torch.full_like(state.num_tokens, -1), requests[layout.used]
        tokens[taking_part] = drawn[layout.used].to(tokens.dtype)
        status = torch.zeros_like(tokens, dtype=torch.int32)
        status[taking_part] = row_status[layout.used]
        return Decision(tokens[:, None], torch.zeros_like(status), status)

    def _verify(self, state: BatchState, layout: RoundRows, drafts: Drafts, logits: Tensor):
        rows, vocab_size = layout.rows, self.model.config.vocab_size
        if drafts.tree is not None:
            if self.method != "token":
                raise ValueError(f"drafts are trees: method: wanted 'token', got {self.method!r}")
            tokens, path, num_accepted, status, *_ = ops.verify_tree(
                logits,
                rows.token_ids,
                layout.parents,
                rows.cu_rows,
                state.seeds,
                state.anchor_positions,
                drafts.max_depth,
                vocab_size=vocab_size,
                children="deterministic",  # the best candidates, not draws
                temperature=state.temperature,
            )
            return Decision(tokens, num_accepted, status, path)
        tokens, num_accepted, status, *_ = ops.verify_chain(
            logits,
            rows.token_ids,
            rows.cu_rows,
            state.seeds,
            state.anchor_positions,
            drafts.max_depth,
            vocab_size=vocab_size,
            draft_logits=drafts.logits,
            draft_temperature=drafts.temperature,
            draft_is_one_hot=drafts.one_hot,
            method=self.method,
            temperature=state.temperature,
        )
        return Decision(tokens, num_accepted, status)

    def _seen(self, layout: RoundRows, decision: Decision, done: Commit, taps: Taps) -> TargetPass:
        if decision.path is not None:
            return seen_along_path(
                layout, decision.path, done.num_committed, taps.hiddens, self.page_size
            )
        everyone = torch.arange(done.num_committed.numel(), device=self.model.device)
        return TargetPass(layout.rows, layout.requests, everyone, taps.hiddens, done.num_committed)

    def checked_length(self, request: Request) -> int:
        if not request.prompt_ids:
            raise ValueError("a request needs at least one prompt token")
        length = request.max_tokens
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


def lookahead(drafter) -> int:
    """Places of the cache past a request's last token that a round may write to."""
    return getattr(drafter, "lookahead", 0)


def propose(state: BatchState, drafter, num_drafts: int) -> Drafts:
    if drafter is not None:
        return drafter.propose(state, num_drafts)
    nothing = state.history.new_empty((state.batch_size, 0))
    return Drafts(nothing, torch.zeros_like(state.num_tokens))


def to_record(drafts: Drafts, decision: Decision, done: Commit) -> RoundRecord:
    counts, committed = drafts.counts.tolist(), done.num_committed.tolist()
    # A stop token or the length limit may end a request inside its accepted run.
    num_accepted = torch.minimum(decision.num_accepted, done.num_committed).tolist()
    proposed = [row[:n] for row, n in zip(drafts.tokens.tolist(), counts, strict=True)]
    if decision.path is not None:
        for ids, path, n in zip(proposed, decision.path.tolist(), num_accepted, strict=True):
            nodes = [node - 1 for node in path[1 : n + 1]]
            others = [token for node, token in enumerate(ids) if node not in nodes]
            ids[:] = [ids[node] for node in nodes] + others
    return RoundRecord(
        drafts=proposed,
        committed=[row[:n] for row, n in zip(done.tokens.tolist(), committed, strict=True)],
        num_accepted=num_accepted,
        finished=done.finished.tolist(),
    )
