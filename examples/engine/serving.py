"""Requests that come and go: a batch with places, pages on demand, and preemption when they run out."""

from bisect import insort
from dataclasses import dataclass, field

import torch

from engine.batch import Drafts, Request, empty_batch, new_batch, seat
from engine.decode import Engine, lookahead, tapped_layers
from engine.layout import lay_out_rows
from specdec_ext import StepTable, profile_steps


@dataclass(frozen=True)
class Progress:
    """What a step did for a request."""

    number: int
    new_ids: list[int]
    finished: bool
    status: int = 0  # of a finished request, status bits of its rounds since it took its place


@dataclass(order=True)
class Job:
    """A request from its arrival to its end. Jobs are ordered by arrival."""

    number: int
    request: Request = field(compare=False)
    output_ids: list[int] = field(compare=False, default_factory=list)
    place: int = field(compare=False, default=-1)  # in the batch, -1 while it waits
    pages: list[int] = field(compare=False, default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_ids) + len(self.output_ids)


class Server:
    """Decodes whatever requests are there, round by round.

    A request waits for a place in the batch and for the pages that its tokens and one round need, first come first
    served. Running requests take a page when a round needs it. When there is none, the last one that came gives way: its
    pages are free again, and later the pass over its prompt is made again with the output that it had. The first one
    never gives way, so everything ends.

    No request's output depends on the others, on its place, or on how often it gave way: rows have the same bits in
    every pass, and random numbers belong to a seed and a position. Two things are exceptions: drafts scheduled for the
    whole batch (DSpark with `steps_per_second`), which change what sampling with `Engine(method="token")` makes of the
    same law, and trees, whose rows are rounded otherwise than those of the pass that replaces them.
    """

    def __init__(
        self,
        engine: Engine,
        drafter=None,
        num_drafts: int = 0,
        *,
        batch_size: int,
        num_pages: int,
        max_tokens: int | None = None,
    ):
        """max_tokens: of a request, prompt and output together; None: as many as the model has positions."""
        model, self.engine, self.drafter, self.num_drafts = (
            engine.model,
            engine,
            drafter,
            num_drafts,
        )
        self.max_tokens = max_tokens or model.config.max_positions
        self.cache = model.new_cache(num_pages, engine.page_size)
        self._ahead = max(num_drafts, lookahead(drafter))
        columns = self.cache.pages_for(self.max_tokens + self._ahead)
        block_table = torch.full((batch_size, columns), -1, dtype=torch.int32, device=model.device)
        self.state = empty_batch(
            batch_size, self.max_tokens, block_table, engine.stop_ids, model.device
        )
        self._status = torch.zeros(batch_size, dtype=torch.int32, device=model.device)
        if tapped_layers(drafter):
            drafter.start(self.state, self.cache)
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._free_places = list(range(batch_size))[::-1]
        self._next_number = 0
        self.num_preemptions = self.num_rounds = 0
        self.drafted = self.accepted = 0

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._running)

    def add(self, request: Request) -> int:
        """A request arrives; its number, by which `step` speaks of it."""
        length = self.engine.checked_length(request)
        if length > self.max_tokens:
            raise ValueError(f"max_tokens: wanted at most {self.max_tokens}, got {length}")
        pages = self.cache.pages_for(length + self._ahead)
        if pages > self.cache.num_pages:
            raise ValueError(
                f"num_pages: the request wants {pages}, the cache has {self.cache.num_pages}"
            )
        job = Job(self._next_number, request)
        self._next_number += 1
        self._waiting.append(job)
        return job.number

    @torch.inference_mode()
    def step(self) -> list[Progress]:
        """One round. Requests that wait enter before it; those that want no token have ended by then."""
        self._extend_running()
        done = self._admit_waiting()
        if not self._running:
            return done
        record = self.engine.round(
            self.state, self.cache, self.drafter, self.num_drafts, self._status
        )
        self.num_rounds += 1
        self.drafted += sum(map(len, record.drafts))
        self.accepted += sum(record.num_accepted)
        for job in list(self._running):
            new_ids, finished = record.committed[job.place], record.finished[job.place]
            job.output_ids += new_ids
            status = 0
            if finished:
                status = int(self._status[job.place])
                self._leave(job)
            done.append(Progress(job.number, new_ids, finished, status))
        return done

    def _extend_running(self) -> None:
        """Pages for the next round, first for those that came first."""
        for job in list(self._running):
            while job.place >= 0 and not self._take_pages(job):
                last = self._running[-1]
                self._leave(last)
                insort(self._waiting, last)
                self.num_preemptions += 1

    def _admit_waiting(self) -> list[Progress]:
        ended = []
        while self._waiting:
            job = self._waiting[0]
            if job.request.max_new_tokens == 0:
                ended.append(Progress(self._waiting.pop(0).number, [], True))
                continue
            if not self._free_places:
                break
            job.place = self._free_places.pop()
            if not self._take_pages(job):
                self._free_places.append(job.place)
                job.place = -1
                break
            insort(self._running, self._waiting.pop(0))
            seat(self.state, job.place, job.request, job.output_ids)
            self._status[job.place] = 0
            self.engine.prefill(job.place, job.num_tokens - 1, self.state, self.cache, self.drafter)
        return ended

    def _take_pages(self, job: Job) -> bool:
        """Whether the job now has the pages of its tokens and of a round."""
        missing = self.cache.pages_for(job.num_tokens + self._ahead) - len(job.pages)
        if missing > self.cache.num_free_pages:
            return False
        begin = len(job.pages)
        job.pages += self.cache.take_pages(max(missing, 0))
        self.state.block_table[job.place, begin : len(job.pages)] = torch.tensor(
            job.pages[begin:], dtype=torch.int32, device=self.cache.device
        )
        return True

    def _leave(self, job: Job) -> None:
        """Gives place and pages back."""
        self._running.remove(job)
        self.state.active[job.place] = False
        self.state.block_table[job.place] = -1
        self.cache.give_back([job.pages])
        self._free_places.append(job.place)
        job.place, job.pages = -1, []


@torch.inference_mode()
def profile_rounds(
    engine: Engine, sizes: list[int], batch_size: int, *, context: int = 256, **options: int
) -> StepTable:
    """What passes of the target cost by their rows, for DSpark's `steps_per_second` at start-up.

    Rows are spread over up to batch_size requests with `context` tokens each, whose keys and values are zeros.
    options: `repeats` and `warmup` of `specdec_ext.profile_steps`.
    """
    model, most = engine.model, max(sizes)
    per_request = -(-most // batch_size)
    requests = [Request([0] * context, per_request) for _ in range(batch_size)]
    places = [request.max_tokens for request in requests]
    cache = model.new_cache(batch_size * (-(-places[0] // engine.page_size)), engine.page_size)
    block_table, _ = cache.take(places)
    for tensor in (*cache.keys, *cache.values):
        tensor.zero_()
    state = new_batch(requests, [], block_table, model.device)
    tokens = torch.zeros(batch_size, per_request - 1, dtype=torch.int64, device=model.device)
    index = torch.arange(batch_size, device=model.device)

    def run(rows: int) -> None:
        counts = rows // batch_size + (index < rows % batch_size).long()
        state.active.copy_(counts > 0)
        layout = lay_out_rows(
            state,
            Drafts(tokens, (counts - 1).clamp(min=0)),
            engine.page_size,
            model.cheap_row_count,
        )
        model.logits(model.forward(layout.rows, cache))
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)

    return profile_steps(run, sizes, **options)
