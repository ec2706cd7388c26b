"""A whole pass of SmolLM2-135M over 8 rows against one over 1 row, on one thread, with the linears of the
example engine: what a round of 7 drafts costs beside one of plain decoding. And a pass over a prompt.

    python benchmarks/whole_pass.py
    python benchmarks/whole_pass.py --context 1024 --repeats 40

Needs the packages of `make demo`. The passes take turns; a ratio is the median over the turns, in CPU time of
the thread, so that a machine that slows down for a while slows both and other work on it counts less. The
rows write their keys and values behind the context. Logits are included, but for the prompt.
"""

import argparse
import pathlib
import statistics
import sys
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples")]

import specdec_ext  # noqa: E402
from engine.checkpoint import find_smollm2, load_checkpoint  # noqa: E402
from engine.linear import LINEARS  # noqa: E402
from engine.model import LlamaModel, PassRows  # noqa: E402

PAGE_SIZE = 16
PROMPT = 256
ROWS = (1, 8, PROMPT)


def pass_rows(rows, context, table):
    positions = torch.arange(context, context + rows)
    pages = table[0, positions // PAGE_SIZE].long()
    return PassRows(
        token_ids=torch.arange(100, 100 + rows),
        positions=positions,
        slots=pages * PAGE_SIZE + positions % PAGE_SIZE,
        cu_rows=torch.tensor([0, rows], dtype=torch.int32),
        seq_lens=torch.tensor([context + rows], dtype=torch.int32),
        block_table=table,
        max_rows=rows,
    )


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--context", type=int, default=256, help="places in the cache before the pass"
    )
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(find_smollm2())
    print(f"cpu_isa {specdec_ext.cpu_isa()}, torch {torch.__version__}, context {args.context}")
    print(
        f"{'dtype':<9} {'linears':<8} {'1 row ms':>9} {'8 rows ms':>10} {'8 rows / 1 row':>15} {'prompt ms':>10}"
    )
    for dtype in (torch.float32, torch.bfloat16):
        weights = checkpoint.weights.to(torch.device("cpu"), dtype)
        runs = {}
        for name in ("specdec", "torch"):
            model = LlamaModel(checkpoint.config, weights, LINEARS[name])
            pages = -(-(args.context + max(ROWS)) // PAGE_SIZE)
            cache = model.new_cache(pages, PAGE_SIZE)
            table, _ = cache.take([pages * PAGE_SIZE])
            for kept in cache.keys + cache.values:
                kept.normal_()
            for rows in ROWS:
                runs[name, rows] = (model, cache, pass_rows(rows, args.context, table))
        times = {key: [] for key in runs}
        for turn in range(-2, args.repeats):
            for key in list(runs) if turn % 2 == 0 else reversed(runs):
                model, cache, rows = runs[key]
                begin = time.thread_time()
                hidden = model.forward(rows, cache)
                if key[1] != PROMPT:
                    model.logits(hidden)
                if turn >= 0:
                    times[key].append(1e3 * (time.thread_time() - begin))
        for name in ("specdec", "torch"):
            one, eight = times[name, 1], times[name, 8]
            ratio = statistics.median(e / o for o, e in zip(one, eight, strict=True))
            print(
                f"{str(dtype)[6:]:<9} {name:<8} {statistics.median(one):>9.1f} "
                f"{statistics.median(eight):>10.1f} {ratio:>15.2f} "
                f"{statistics.median(times[name, PROMPT]):>10.1f}"
            )


main()
