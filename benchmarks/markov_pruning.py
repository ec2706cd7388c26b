"""How many columns the bounds of a prepared head leave, on synthetic heads of DSpark's size.

    python benchmarks/markov_pruning.py [--steps 16] [--out benchmarks/results]

W1 and W2 are random with a given spectrum of their product along the places of a row, scaled so that the bias W1[x] W2^T has a given standard
deviation; base logits fall like Zipf's law, plus noise. Counts are of columns whose upper bound reaches the largest
lower bound, and of tiles of 16 columns with such a column, which are what a step computes; the argmax is among
them in every step, or the script fails. `codes alone` is the count without the turn of the rows.
"""

import argparse
import json
import pathlib
import statistics
import sys

import torch

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path = [p for p in sys.path if pathlib.Path(p or ".").resolve() != HERE]

from specdec_ext import prune  # noqa: E402

VOCAB, RANK = 151936, 256
SPECTRA = {
    "flat": lambda i: torch.ones_like(i),
    "1/sqrt(i)": lambda i: i**-0.5,
    "1/i": lambda i: 1.0 / i,
    "flat, 4 places x 20": lambda i: torch.where(i <= 4, 20.0, 1.0),
}


def head(g, spectrum, std):
    """(w1, w2) bfloat16. Rows differ in size by a factor of 2 or so, as trained ones do."""
    root = SPECTRA[spectrum](torch.arange(1.0, RANK + 1)).sqrt()
    w1 = torch.randn(4096, RANK, generator=g) * root
    w2 = torch.randn(VOCAB, RANK, generator=g) * root
    w2 = w2 * (0.3 * torch.randn(VOCAB, 1, generator=g)).exp()
    scale = (std / float((w1[:64] @ w2[:4096].T).std())) ** 0.5
    return (w1 * scale).bfloat16(), (w2 * scale).bfloat16()


def base_logits(g):
    ranks = torch.randperm(VOCAB, generator=g) + 1.0
    return (-1.1 * ranks.log() + 0.7 * torch.randn(VOCAB, generator=g)).bfloat16().float()


def codes_of(w2, turn):
    """codes as float32, and scale, lost, left of every row."""
    parts = [prune._rounded(w2[i : i + 8192], turn) for i in range(0, len(w2), 8192)]
    codes = torch.cat([codes.float() for codes, _ in parts])
    return codes, *torch.cat([rows for _, rows in parts]).unbind(1)


def turned_vector(y, turn, turns):
    x = prune._turned(y[None], turn)[0] if turns else y.double()
    scale = float(x.abs().max()) / 127
    codes = (x / scale).round()
    return codes.float(), scale, float(y.double().norm()), float((x - codes * scale).norm())


def left(bounds, vector, base):
    """Mask of the columns that can win."""
    codes, scale, lost, size = bounds
    other, unit, norm, gone = vector
    near = (codes @ other) * scale * unit
    error = lost * norm + size * gone
    return base + near + error >= (base + near - error).max()


def identity_codes(w2):
    """codes_of without the turn."""
    x = w2.double()
    scale = x.abs().amax(1) / 127
    codes = (x / scale[:, None]).round()
    kept = codes * scale[:, None]
    return codes.float(), scale.float(), (x - kept).norm(dim=1).float(), kept.norm(dim=1).float()


def study(g, spectrum, std, steps):
    w1, w2 = head(g, spectrum, std)
    turn = prune.prepare_markov(w2[:16]).turn
    turned, plain = codes_of(w2, turn), identity_codes(w2)
    counts = {"columns": [], "tiles": [], "codes_alone": []}
    for _ in range(steps):
        y = w1[int(torch.randint(0, len(w1), (1,), generator=g))].float()
        base = base_logits(g)
        mask = left(turned, turned_vector(y, turn, True), base)
        assert mask[int((base + w2.float() @ y).argmax())], "the largest was left out"
        counts["columns"].append(int(mask.sum()))
        counts["tiles"].append(int(mask.view(-1, prune.TILE).any(1).sum()))
        alone = left(plain, turned_vector(y, turn, False), base)
        counts["codes_alone"].append(int(alone.sum()))
    row = {"spectrum": spectrum, "bias_std": std, "steps": steps}
    for name, values in counts.items():
        row[name] = {"median": statistics.median(values), "max": max(values)}
    return row


def markdown(rows):
    lines = [
        f"# Columns that bounds leave, V = {VOCAB}, r = {RANK}, bfloat16 (benchmarks/markov_pruning.py)",
        "",
        "| spectrum | bias std | columns median | max | tiles of 16 median | max | codes alone median | max |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = [row["spectrum"], row["bias_std"]]
        for name in ("columns", "tiles", "codes_alone"):
            cells += [row[name]["median"], row[name]["max"]]
        lines.append(
            "| " + " | ".join(f"{c:g}" if isinstance(c, float) else str(c) for c in cells) + " |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--out", default=str(HERE / "results"))
    options = parser.parse_args()
    rows = []
    for spectrum in SPECTRA:
        for std in (1.0, 3.0):
            g = torch.Generator().manual_seed(len(rows))
            rows.append(study(g, spectrum, std, options.steps))
            print(rows[-1], flush=True)
    out = pathlib.Path(options.out)
    (out / "markov_pruning.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    (out / "markov_pruning.md").write_text(markdown(rows))


if __name__ == "__main__":
    main()
