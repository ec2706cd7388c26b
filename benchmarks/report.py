"""Writes the table of benchmarks/results/<device>.json into README.md, between its two markers."""

import argparse
import json
import pathlib

from harness import markdown

HERE = pathlib.Path(__file__).resolve().parent
BEGIN = "<!-- benchmarks/report.py writes this part from benchmarks/results/cpu.json -->\n"
END = "<!-- end -->"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", default=str(HERE / "results" / "cpu.json"))
    parser.add_argument("--readme", default=str(HERE.parent / "README.md"))
    options = parser.parse_args()
    results = json.loads(pathlib.Path(options.results).read_text())
    path = pathlib.Path(options.readme)
    head, rest = path.read_text().split(BEGIN)
    tail = rest[rest.index(END) :]
    path.write_text(head + BEGIN + markdown(results["machine"], results["rows"]) + tail)
    print(f"{path.name}: {len(results['rows'])} rows")


main()
