"""Requests that arrive one after the other, decoded together by the serving loop.

python examples/serve.py                             16 requests with the shipped prompts, two a second
python examples/serve.py --rate 8 --pages 60         more than fits: some give way and come back
python examples/serve.py --dspark FOLDER             a DSpark checkpoint for this model: drafts are scheduled for the
                                                     whole batch by what passes cost here, measured at start-up
"""

import argparse
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from drafters import PromptLookup
from drafters.dspark import DSpark
from drafters.mixed import LookupOr
from drafters.weights import load_block_drafter
from engine.batch import Request
from engine.decode import Engine
from engine.linear import LINEARS
from engine.serving import Server, profile_rounds
from generate import shipped_prompts
from session import DTYPES, Session, load
from ui import Ui


@dataclass
class Visit:
    """A request with its times, in seconds from the start."""

    label: str
    request: Request
    arrival: float
    first_token: float | None = None
    num_tokens: int = 0


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    torch.set_num_threads(args.threads)
    try:
        session = load(args, Ui())
        serve(session, server_of(session), visits_of(session))
    except (FileNotFoundError, ValueError) as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 2
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--requests", type=int, default=16)
    add("--rate", type=float, default=2.0, help="arrivals per second, at random times (default 2)")
    add("--batch", type=int, default=8, help="most requests decoded together (default 8)")
    add("--pages", type=int, default=400, help="pages of the cache, 16 tokens each (default 400)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--seed", type=int, default=0, help="of the arrivals; request i gets seed + i")
    add("--max-new-tokens", type=int, default=96)
    add("--k", type=int, default=7, help="drafts per request and round (default 7)")
    add("--dspark", type=Path, metavar="FOLDER", help="a drafter where prompts do not repeat")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--dtype", choices=list(DTYPES), default="fp32")
    add("--linear", choices=list(LINEARS), default="specdec")
    add("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.set_defaults(no_transformers=True, check_identity=False)
    return parser.parse_args(argv)


def visits_of(session: Session) -> list[Visit]:
    args, prompts = session.args, shipped_prompts()
    draw, now, visits = random.Random(args.seed), 0.0, []
    for index in range(args.requests):
        label, text = prompts[index % len(prompts)]
        ids = session.tokenizer.encode_chat(text)
        request = Request(ids, args.max_new_tokens, args.temperature, args.seed + index)
        visits.append(Visit(label, request, now))
        now += draw.expovariate(args.rate)
    return visits


def server_of(session: Session) -> Server:
    """Prompt lookup, or with a DSpark checkpoint the mix of both. Outputs must not depend on the batch, so that drafts
    scheduled for all of it go with the method whose tokens are those of plain decoding."""
    args, engine, drafter = session.args, session.engine, PromptLookup()
    if args.dspark is not None:
        engine = Engine(engine.model, engine.stop_ids, engine.page_size, method="sampled")
        most = args.batch * (args.k + 1)
        sizes = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n < most] + [most]
        context = min(256, engine.model.config.max_positions // 2)
        table = profile_rounds(engine, sizes, args.batch, context=context)
        steps = torch.from_numpy(table.steps(most)).to(engine.model.device)
        config, weights = load_block_drafter(args.dspark)
        drafter = LookupOr(DSpark(config, weights, engine.model, steps_per_second=steps))
    return Server(engine, drafter, args.k, batch_size=args.batch, num_pages=args.pages)


def serve(session: Session, server: Server, visits: list[Visit]) -> None:
    """Until the last request has left; a line for each of them, and what all of it took."""
    ui, start, waiting, here = session.ui, time.monotonic(), list(visits), {}
    while waiting or not server.idle:
        now = time.monotonic() - start
        while waiting and waiting[0].arrival <= now:
            visit = waiting.pop(0)
            here[server.add(visit.request)] = visit
        if server.idle:
            time.sleep(waiting[0].arrival - now)
            continue
        for progress in server.step():
            visit, now = here[progress.number], time.monotonic() - start
            visit.num_tokens += len(progress.new_ids)
            if visit.first_token is None:
                visit.first_token = now
            if progress.finished:
                ui.line(
                    f"request {progress.number:3d}  {visit.label:14s} {visit.num_tokens:4d} tokens, "
                    f"first after {visit.first_token - visit.arrival:.2f} s, "
                    f"last after {now - visit.arrival:.2f} s"
                )
    seconds, num_tokens = time.monotonic() - start, sum(visit.num_tokens for visit in visits)
    ui.line(
        f"{num_tokens} tokens in {seconds:.1f} s, {server.num_rounds} rounds, "
        f"{server.accepted} of {server.drafted} drafts accepted, "
        f"{server.num_preemptions} times a request gave way"
    )


if __name__ == "__main__":
    sys.exit(main())
