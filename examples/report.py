"""The figures of a run as table rows and as JSON."""

import json
import platform
from pathlib import Path

import torch

from comparison import Comparison
from engine.decode import Generation

COLUMNS = [
    "decoding",
    "tokens",
    "tokens/s",
    "accepted\nlength",
    "rounds",
    "x plain",
    "x trans-\nformers",
    "same as\nplain",
]


def table_section(comparison: Comparison) -> list[list[str]]:
    """One workload: its name, then plain decoding, speculative decoding and transformers."""
    plain, speculative = comparison.plain, comparison.speculative
    baseline = comparison.transformers
    baseline_speed = baseline.tokens_per_second if baseline else None

    def row(decoding: str, run: Generation, same: str) -> list[str]:
        return [
            f"  {decoding}",
            str(run.num_tokens),
            f"{run.tokens_per_second:.1f}",
            f"{run.accepted_length:.2f}",
            str(run.rounds),
            f"{run.tokens_per_second / plain.tokens_per_second:.2f}",
            f"{run.tokens_per_second / baseline_speed:.2f}" if baseline_speed else "-",
            same,
        ]

    drafted = f"{comparison.drafter_name} k={comparison.num_drafts}"
    rows = [
        [comparison.workload.name] + [""] * (len(COLUMNS) - 1),
        row("plain", plain, ""),
        row(drafted, speculative, identity_text(comparison)),
    ]
    if baseline:
        tokens = sum(map(len, baseline.output_ids))
        figures = ["-", "", "", "-", "-"]
        if baseline_speed:
            ratio = f"{baseline_speed / plain.tokens_per_second:.2f}"
            figures = [f"{baseline_speed:.1f}", "", "", ratio, "1.00"]
        rows.append(["  transformers", str(tokens), *figures, ""])
    return rows


def identity_text(comparison: Comparison) -> str:
    same = comparison.identical
    return "sampled" if same is None else f"{sum(same)}/{len(same)}"


def generation_figures(run: Generation) -> dict:
    return {
        "tokens": run.num_tokens,
        "tokens_per_second": run.tokens_per_second,
        "decode_seconds": run.decode_seconds,
        "prefill_seconds": run.prefill_seconds,
        "rounds": run.rounds,
        "accepted_length": run.accepted_length,
        "drafted": run.drafted,
        "accepted": run.accepted,
        "status": run.status,
    }


def comparison_figures(comparison: Comparison, decode) -> dict:
    workload, baseline = comparison.workload, comparison.transformers
    figures = {
        "workload": workload.name,
        "prompts": workload.labels,
        "prompt_tokens": [len(request.prompt_ids) for request in workload.requests],
        "temperature": workload.temperature,
        "seeds": [request.seed for request in workload.requests],
        "drafter": comparison.drafter_name,
        "k": comparison.num_drafts,
        "plain": generation_figures(comparison.plain),
        "speculative": generation_figures(comparison.speculative),
        "transformers": None,
        "speedup_over_plain": comparison.speedup_over_plain,
        "speedup_over_transformers": comparison.speedup_over_transformers,
        "identical_to_plain": comparison.identical,
        "texts": [decode(ids) for ids in comparison.speculative.output_ids],
        "texts_plain": [decode(ids) for ids in comparison.plain.output_ids],
    }
    if baseline:
        figures["transformers"] = {
            "tokens": sum(map(len, baseline.output_ids)),
            "tokens_per_second": baseline.tokens_per_second,
            "decode_seconds": baseline.decode_seconds,
        }
    return figures


def environment(device: torch.device, dtype: torch.dtype) -> dict:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }


def write_json(path: Path, figures: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=2) + "\n")


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
