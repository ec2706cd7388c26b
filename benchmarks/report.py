"""Writes a summary of benchmarks/results/<device>.json into README.md, between its two markers: a line per op over
its cases at one thread. The cases themselves are in the Markdown file beside the results and in docs/benchmarks.md."""

import argparse
import json
import pathlib

HERE = pathlib.Path(__file__).resolve().parent
BEGIN = "<!-- benchmarks/report.py writes this part from benchmarks/results/cpu.json -->\n"
END = "<!-- end -->"


def span(numbers):
    """ "2.3" or "1.3 to 2.3"."""
    low, high = (f"{x:.0f}" if x >= 10 else f"{x:.1f}" for x in (min(numbers), max(numbers)))
    return low if low == high else f"{low} to {high}"


def ratio(row):
    """To the fastest contender that is not one of our own calls."""
    return min(peer["ratio"] for name, peer in row["peers"].items() if not name.startswith("own "))


def summary(machine, rows):
    lines = [
        "Machine: "
        + ", ".join(f"{key} {value}" for key, value in machine.items())
        + "; one thread.",
        "Every case is beside its floor in `benchmarks/results/cpu.md`.",
        "",
        "| op | cases | times the speed of the best other formulation | time over the floor | aims | missed |",
        "| --- | --: | --- | --- | --- | --: |",
    ]
    rows = [row for row in rows if row["threads"] == 1]
    for op in sorted({row["op"] for row in rows}):
        cases = [row for row in rows if row["op"] == op]
        aimed = [row for row in cases if row["target"]]
        floors = [max(row["floor_us"], row.get("flop_floor_us") or 0.0) for row in cases]
        over = [row["us"] / floor for row, floor in zip(cases, floors, strict=True) if floor >= 1.0]
        lines.append(
            f"| `{op}` | {len(cases)} | {span([ratio(row) for row in cases])} "
            f"| {span(over) if over else 'below 1 µs'} "
            f"| {span([row['target'] for row in aimed]) if aimed else ''} "
            f"| {sum(ratio(row) < row['target'] for row in aimed) if aimed else ''} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", default=str(HERE / "results" / "cpu.json"))
    parser.add_argument("--readme", default=str(HERE.parent / "README.md"))
    options = parser.parse_args()
    results = json.loads(pathlib.Path(options.results).read_text())
    path = pathlib.Path(options.readme)
    head, rest = path.read_text().split(BEGIN)
    tail = rest[rest.index(END) :]
    path.write_text(head + BEGIN + summary(results["machine"], results["rows"]) + tail)
    print(f"{path.name}: {len(results['rows'])} rows")


main()
