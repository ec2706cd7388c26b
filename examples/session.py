"""A loaded model and the runs that a program makes with it."""

import argparse
import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from comparison import Comparison, Workload
from drafters import PromptLookup
from engine.batch import Request
from engine.checkpoint import MODEL_NAME, find_smollm2, load_checkpoint
from engine.decode import Engine, Generation, RoundRecord
from engine.linear import LINEARS
from engine.model import LlamaModel
from engine.tokenizer import ChatTokenizer
from transformers_baseline import (
    BaselineGeneration,
    build_transformers_model,
    transformers_generate,
)
from ui import Ui, segments_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NamedPrompt = tuple[str, str]  # label, text


@dataclass
class Session:
    """What every run of this program shares."""

    args: argparse.Namespace
    ui: Ui
    tokenizer: ChatTokenizer
    engine: Engine
    transformers_model: object | None

    def workload(self, name: str, prompts: list[NamedPrompt], temperature: float) -> Workload:
        requests = [
            Request(
                prompt_ids=self.tokenizer.encode_chat(text),
                max_new_tokens=self.args.max_new_tokens,
                temperature=temperature,
                seed=self.args.seed + index,
            )
            for index, (_, text) in enumerate(prompts)
        ]
        return Workload(name, [label for label, _ in prompts], requests)

    def run(self, workload: Workload, quiet: bool = False) -> Comparison:
        """Plain decoding, speculative decoding with its rounds on show, transformers. A quiet run
        shows nothing and leaves transformers out."""
        if not quiet:
            self.ui.heading(workload.name)
        plain = self._run_plain(workload, quiet)
        display = RoundDisplay(self, workload, quiet)
        drafter = PromptLookup()
        speculative = self.engine.generate(
            workload.requests, drafter, self.args.k, on_round=display.round
        )
        display.finish()
        baseline = None if quiet else self._run_transformers(workload)
        if any(plain.status) or any(speculative.status):
            self.ui.line(f"status bits: {plain.status} {speculative.status}", "red")
        return Comparison(workload, drafter.name, self.args.k, plain, speculative, baseline)

    def compare(self, workload: Workload, draft_lengths: Sequence[int]) -> dict[int, Comparison]:
        """By draft length, quietly: one plain run against a speculative one each."""
        plain = self.engine.generate(workload.requests)
        found = {}
        for k in draft_lengths:
            drafter = PromptLookup()
            speculative = self.engine.generate(workload.requests, drafter, k)
            found[k] = Comparison(workload, drafter.name, k, plain, speculative, None)
        return found

    def with_linear(self, name: str) -> "Session":
        """The same model with other linears."""
        model = self.engine.model
        model = LlamaModel(model.config, model.weights, LINEARS[name])
        return replace(self, engine=Engine(model, self.engine.stop_ids, self.engine.page_size))

    def _run_plain(self, workload: Workload, quiet: bool) -> Generation:
        if quiet:
            return self.engine.generate(workload.requests)
        longest = max(request.max_new_tokens for request in workload.requests)
        rounds = 0
        with self.ui.progress("plain decoding", lines=False) as advance:

            def count(_record: RoundRecord) -> None:
                nonlocal rounds
                rounds += 1
                advance(rounds, longest)

            return self.engine.generate(workload.requests, on_round=count)

    def _run_transformers(self, workload: Workload) -> BaselineGeneration | None:
        if self.transformers_model is None:
            return None
        first = workload.requests[0]
        with self.ui.progress("transformers generate", lines=False):
            return transformers_generate(
                self.transformers_model,
                [request.prompt_ids for request in workload.requests],
                first.max_new_tokens,
                self.engine.stop_ids,
                first.temperature,
                first.seed,
            )


class RoundDisplay:
    """One request is shown as it goes; of a batch, every request's transcript at the end."""

    def __init__(self, session: Session, workload: Workload, quiet: bool):
        self._ui = session.ui
        self._decode = session.tokenizer.decode
        self._labels = workload.labels
        self._quiet = quiet
        self._rounds = 0
        self._segments = [[] for _ in workload.labels]

    def round(self, record: RoundRecord) -> None:
        self._rounds += 1
        for request, segments in enumerate(self._segments):
            segments.extend(new := segments_of(record, request))
            if len(self._segments) == 1 and not self._quiet:
                self._ui.show_round(self._rounds, new, self._decode)

    def finish(self) -> None:
        if self._quiet:
            return
        if len(self._segments) == 1:
            self._ui.line()
            return
        for label, segments in zip(self._labels, self._segments, strict=True):
            self._ui.show_transcript(label, segments, self._decode)


def load(args: argparse.Namespace, ui: Ui) -> Session:
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device")
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    start = time.perf_counter()
    with ui.progress(f"loading {MODEL_NAME}") as advance:
        checkpoint = load_checkpoint(find_smollm2(), advance)
    tokenizer = ChatTokenizer(checkpoint.tokenizer)
    weights = checkpoint.weights.to(device, dtype)
    model = LlamaModel(checkpoint.config, weights, LINEARS[args.linear])
    engine = Engine(model, tokenizer.stop_ids)
    transformers_model = None
    if not args.no_transformers and not args.check_identity:
        if importlib.util.find_spec("transformers") is None:
            ui.line("transformers is not installed: its rows are left out")
        else:
            transformers_model = build_transformers_model(model.config, model.weights)
    ui.line(
        f"{MODEL_NAME}, {args.dtype} on {args.device}, {args.threads} thread(s), {args.linear} linears, "
        f"ready in {time.perf_counter() - start:.1f} s"
    )
    engine.generate([Request(tokenizer.encode("warm up"), 4)])
    return Session(args, ui, tokenizer, engine, transformers_model)
