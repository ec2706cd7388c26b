"""Speculative decoding of a real model on the specdec operators, shown round by round.

    python examples/generate.py                            the three editing prompts, and a batch of 8
    python examples/generate.py --prompt "Why is the sky blue?" --temperature 1
    python examples/generate.py --prompt-file notes.txt --batch 8 --json figures.json
    python examples/generate.py --check-identity           greedy speculative = greedy plain: 8 prompts, 3 draft
                                                           lengths, and how often that fails with torch's linears

Every workload runs three times: plain decoding on the same kernels, speculative decoding, and
`transformers` generate on the same weights.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from comparison import Comparison, merge
from engine.checkpoint import MODEL_NAME
from engine.linear import LINEARS
from report import COLUMNS, comparison_figures, environment, table_section, write_json
from session import DTYPES, NamedPrompt, Session, load
from ui import Ui

PROMPT_DIR = Path(__file__).parent / "prompts"
EDITING_PROMPTS = ["fix_text", "edit_code", "summarise"]
BATCH = 8
CHECKED_DRAFTS = (3, 5, 7)  # draft lengths that --check-identity compares


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    torch.set_num_threads(args.threads)
    sys.stdout.reconfigure(line_buffering=True)  # a log file shows rounds when they happen
    ui = Ui()
    try:
        session = load(args, ui)
        if args.check_identity:
            return check_identity(session)
        if args.prompt or args.prompt_file or args.batch:
            return run_prompts(session)
        return run_demo(session)
    except (FileNotFoundError, ValueError) as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 2


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--prompt", action="append", default=[], help="user message; may be repeated")
    add("--prompt-file", action="append", default=[], type=Path, help="file with a user message")
    add(
        "--batch", type=_positive, help="requests decoded together (default 1; the demo: 1, then 8)"
    )
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--seed", type=int, default=0, help="request i of a batch gets seed + i")
    add("--max-new-tokens", type=_positive, default=96)
    add("--k", type=_positive, default=7, help="drafts per round (default 7)")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--dtype", choices=list(DTYPES), default="fp32", help="of weights and activations")
    add(
        "--linear", choices=list(LINEARS), default="specdec",
        help="specdec: rows are rounded alike in every pass, so greedy outputs are identical (default)",
    )  # fmt: skip
    add("--threads", type=_positive, default=1, help="CPU threads (default 1)")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    add("--no-transformers", action="store_true", help="leave out transformers generate")
    add(
        "--check-identity", action="store_true", help="only compare greedy outputs; 1 on a mismatch"
    )
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def run_demo(session: Session) -> int:
    """The editing prompts one by one, all prompts as a batch, one sampled run; then the table."""
    ui, temperature = session.ui, session.args.temperature
    prompts = shipped_prompts()
    editing, others = prompts[: len(EDITING_PROMPTS)], prompts[len(EDITING_PROMPTS) :]
    ui.legend()
    done = [
        session.run(session.workload(f"{prompt[0]}, batch 1", [prompt], temperature))
        for prompt in editing
    ]
    ui.heading(f"{len(others)} more prompts, batch 1, not shown")
    with ui.progress("decoding") as advance:
        quiet = []
        for index, prompt in enumerate(others):
            quiet.append(
                session.run(session.workload(prompt[0], [prompt], temperature), quiet=True)
            )
            advance(index + 1, len(others))
    done.append(merge(f"{len(others)} other prompts, batch 1", quiet))
    done.append(
        session.run(
            session.workload(f"{len(prompts)} prompts, batch {BATCH}", prompts, temperature)
        )
    )
    singles, batch = merge("", done[:-1]), done[-1]
    if temperature == 0:
        done.append(session.run(session.workload("fix_text, batch 1, T=1", prompts[:1], 1.0)))
    return finish(session, done, [("1", singles), (str(BATCH), batch)])


def run_prompts(session: Session) -> int:
    """The prompts of the command line, in groups of --batch; a group with fewer is filled up by
    repeating its prompts with other seeds."""
    args = session.args
    prompts = list(command_line_prompts(args)) or shipped_prompts()
    batch = args.batch or 1
    session.ui.legend()
    done = []
    for begin in range(0, len(prompts), batch):
        group = prompts[begin : begin + batch]
        group = [group[index % len(group)] for index in range(batch)]
        name = f"{group[0][0]}, batch 1" if batch == 1 else f"batch {batch}"
        if args.temperature > 0:
            name += f", T={args.temperature:g}"
        done.append(session.run(session.workload(name, group, args.temperature)))
    return finish(session, done, [(str(batch), merge("", done))])


def finish(session: Session, done: list[Comparison], checked: list[tuple[str, Comparison]]) -> int:
    """Table, JSON and the verdict on identity, which is claimed for the linears that round a row alike in
    every pass, in every dtype."""
    session.ui.heading("figures")
    session.ui.table(COLUMNS, [table_section(comparison) for comparison in done])
    verdict = all([report_identity(session, batch, comparison) for batch, comparison in checked])
    save(session, {"workloads": [comparison_figures(c, session.tokenizer.decode) for c in done]})
    return 0 if verdict or session.args.linear != "specdec" else 1


def report_identity(session: Session, batch: str, comparison: Comparison) -> bool:
    same = comparison.identical
    if same is None:
        return True
    session.ui.line(
        f"greedy speculative output = greedy plain output, batch {batch}: "
        f"{sum(same)} of {len(same)} identical",
        "bold green" if all(same) else "bold red",
    )
    return all(same)


def check_identity(session: Session) -> int:
    """Greedy, every prompt: speculative against plain at batch 1 with several draft lengths and at batch 8,
    and batch 8 against batch 1. Beside it, what the first of these gives with torch's linears."""
    prompts = list(command_line_prompts(session.args)) + shipped_prompts()
    singles = compare_drafts(session, prompts, session.args.linear)
    groups = [prompts[begin : begin + BATCH] for begin in range(0, len(prompts), BATCH)]
    batched = [session.run(session.workload("", group, 0.0), quiet=True) for group in groups]
    batch = merge(f"batch {BATCH}", batched)

    plain = singles[CHECKED_DRAFTS[0]].plain
    across = zip(batch.plain.output_ids, plain.output_ids, strict=True)
    outcomes = {
        f"speculative = plain, batch 1, {k} drafts": single.identical
        for k, single in singles.items()
    }
    outcomes[f"speculative = plain, batch {BATCH}"] = batch.identical
    outcomes[f"plain batch {BATCH} = plain batch 1"] = [b == s for b, s in across]
    for claim, same in outcomes.items():
        report_claim(session, batch.workload.labels, claim, same)
    beside = {}
    if session.args.linear != "torch":
        for k, single in compare_drafts(session.with_linear("torch"), prompts, "torch").items():
            beside[f"torch's linears, batch 1, {k} drafts"] = single.identical
        for claim, same in beside.items():
            report_claim(session, batch.workload.labels, claim, same)
    for name, counted in (
        (session.args.linear, [single.identical for single in singles.values()]),
        ("torch", list(beside.values())),
    ):
        if counted:
            same = sum(counted, [])
            session.ui.line(
                f"{name} linears, {session.args.dtype}: {len(same) - sum(same)} of {len(same)} outputs differ"
            )
    save(session, {"identity": outcomes, "beside": beside, "prompts": batch.workload.labels})
    return 0 if all(all(same) for same in outcomes.values()) else 1


def compare_drafts(
    session: Session, prompts: list[NamedPrompt], linear: str
) -> dict[int, Comparison]:
    """By draft length, all prompts at batch 1."""
    by_length: dict[int, list[Comparison]] = {k: [] for k in CHECKED_DRAFTS}
    with session.ui.progress(f"batch 1, {linear} linears") as advance:
        for index, prompt in enumerate(prompts):
            workload = session.workload(prompt[0], [prompt], 0.0)
            for k, comparison in session.compare(workload, CHECKED_DRAFTS).items():
                by_length[k].append(comparison)
            advance(index + 1, len(prompts))
    return {k: merge("batch 1", comparisons) for k, comparisons in by_length.items()}


def report_claim(session: Session, labels: list[str], claim: str, same: list[bool]) -> None:
    failed = [label for label, ok in zip(labels, same, strict=True) if not ok]
    text = f"{claim}: {sum(same)}/{len(same)} identical"
    session.ui.line(text + (f"; different: {', '.join(failed)}" if failed else ""))


def shipped_prompts() -> list[NamedPrompt]:
    """The three editing prompts, then the others."""
    editing = [PROMPT_DIR / f"{name}.txt" for name in EDITING_PROMPTS]
    others = sorted((PROMPT_DIR / "more").glob("*.txt"))
    return [(path.stem, path.read_text().strip()) for path in editing + others]


def command_line_prompts(args: argparse.Namespace) -> Iterator[NamedPrompt]:
    for index, text in enumerate(args.prompt):
        yield f"prompt {index + 1}", text
    for path in args.prompt_file:
        yield path.stem, path.read_text().strip()


def save(session: Session, figures: dict) -> None:
    args = session.args
    if args.json is None:
        return
    engine = session.engine
    header = {
        "model": MODEL_NAME,
        "environment": environment(engine.model.device, engine.model.dtype),
        "max_new_tokens": args.max_new_tokens,
    }
    write_json(args.json, header | figures)
    session.ui.line(f"figures written to {args.json}")


if __name__ == "__main__":
    sys.exit(main())
