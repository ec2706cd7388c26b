"""What mkdocs fills in while it builds the site (`hooks` in mkdocs.yml).

<!-- README.md: TITLE -->        that section of README.md, so that nothing is written twice
<!-- benchmarks/results/X -->    tables of that results file
"""

import json
import pathlib
import re
import statistics

ROOT = pathlib.Path(__file__).resolve().parent.parent


def on_page_markdown(markdown, page, config, files):
    return filled(markdown)


def filled(markdown):
    """A page with its markers replaced; a marker that names nothing is an error."""
    markdown = re.sub(r"<!-- README\.md: (.+) -->", lambda m: readme_section(m[1]), markdown)
    return re.sub(
        r"<!-- (benchmarks/results/[\w.]+) -->",
        lambda m: results_tables(json.loads((ROOT / m[1]).read_text())),
        markdown,
    )


def readme_section(title):
    """`## title` of README.md up to the next section, links as seen from docs/."""
    parts = re.split(r"^(?=## )", (ROOT / "README.md").read_text(), flags=re.M)
    found = [part for part in parts if part.startswith(f"## {title}\n")]
    if len(found) != 1:
        raise ValueError(f"README.md: wanted one section '{title}', got {len(found)}")
    return found[0].replace("](docs/", "](").strip()


def results_tables(results):
    """Machine, a summary by op, and a table for each op."""
    machine = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    ops = {}
    for row in results["rows"]:
        ops.setdefault(row["op"], []).append(row)
    lines = [f"Machine: {machine}.", "", "## Summary", ""]
    lines += [
        "How many times the first contender's time is ours: smallest, median and largest over the cases.",
        "",
        "| op | cases | against | smallest | median | largest |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for op, rows in ops.items():
        first = [next(iter(row["peers"].items())) for row in rows if row["peers"]]
        ratios = [peer["ratio"] for _, peer in first]
        names = ", ".join(dict.fromkeys(name for name, _ in first))
        lines.append(
            f"| [`{op}`](#{op}) | {len(rows)} | {names} | {min(ratios):.1f} | "
            f"{statistics.median(ratios):.1f} | {max(ratios):.1f} |"
        )
    for op, rows in ops.items():
        lines += ["", f"## `{op}` {{ #{op} }}", ""]
        lines += ["| case | threads | µs | best..worst | floor µs | against |"]
        lines += ["| --- | --- | --- | --- | --- | --- |"]
        lines += [_line(row) for row in rows]
    return "\n".join(lines)


def _line(row):
    floor = f"{row['floor_us']:.1f}"
    if row.get("flop_floor_us"):
        floor += f", arithmetic {row['flop_floor_us']:.1f}"
    peers = "; ".join(f"{peer['ratio']:.1f} x {name}" for name, peer in row["peers"].items())
    return (
        f"| {row['case']} | {row['threads']} | {row['us']:.1f} | "
        f"{row['us_best']:.1f}..{row['us_worst']:.1f} | {floor} | {peers} |"
    )
