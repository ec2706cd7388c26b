"""Every Python block of the README, of docs/ and of examples/README.md runs: the blocks of a page in order, in
one namespace, as a reader would paste them.

A block that needs something else says so in its title, ```python title="needs a GPU": it is compiled, and
runs where that is here.
"""

import os
import pathlib
import re
import sys
import xml.etree.ElementTree

import backends
import pytest

import specdec_ext

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```", re.M | re.S)
sys.path.append(str(ROOT / "tools"))

import docs_figures  # noqa: E402
import docs_hooks  # noqa: E402


def is_here(need):
    if need == "a GPU":
        return specdec_ext.cuda_reason == ""
    if need == "the emulated kernels":
        return "emu_hooks" in backends.available()
    assert need == "a checkpoint", f"no test knows what '{need}' is"
    return False


def blocks_of(path):
    """(line of the fence, what it needs or None, source) of the Python blocks of a page."""
    page = path.read_text()
    for match in FENCE.finditer(page):
        language, info, source = match.groups()
        if language == "python":
            need = re.fullmatch(r' title="needs (.*)"', info)
            assert need or not info, f"{path.name}: ```python{info}"
            yield page[: match.start()].count("\n") + 1, need and need[1], source


def run(path):
    namespace, ran = {"__name__": path.stem}, 0
    for line, need, source in blocks_of(path):
        code = compile("\n" * line + source, str(path), "exec")  # errors name the page's lines
        if need is None or is_here(need):
            exec(code, namespace)
            ran += 1
    return ran


NAMES = {str(path.relative_to(ROOT)): path for path in PAGES if list(blocks_of(path))}


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_a_page_run(name):
    ran = run(NAMES[name])
    assert ran >= 1 or all(need for _, need, _ in blocks_of(NAMES[name]))


def test_pages_that_have_blocks():
    """So that a changed fence or folder does not empty the test above."""
    ops = [
        "attention",
        "conventions",
        "dflash",
        "dspark",
        "kv_cache",
        "linear",
        "sampling",
        "trees",
    ]
    wanted = {"README.md", "examples/README.md", "docs/porting.md", "docs/internals.md"}
    assert wanted | {f"docs/{op}.md" for op in ops} <= set(NAMES)


def test_a_block_that_fails_is_named_by_its_line(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\n```python\nx = 1\n```\n\n```python\nassert x == 1\nassert x == 2\n```\n"
    )
    with pytest.raises(AssertionError) as failed:
        run(page)
    assert failed.traceback[-1].lineno + 1 == 9
    page.write_text('```python title="needs a GPU"\nx = (\n```\n')
    with pytest.raises(SyntaxError):
        run(page)
    page.write_text('```python title="needs luck"\nx = 1\n```\n')
    with pytest.raises(AssertionError, match="luck"):
        run(page)


# --- The site (mkdocs.yml) ---------------------------------------------------------------------------


def test_every_public_name_is_in_the_reference_once():
    text = "".join(p.read_text() for p in sorted((ROOT / "docs" / "reference").glob("*.md")))
    named = re.findall(r"^::: specdec_ext\.(\w+)$", text, re.M)
    assert sorted(named) == sorted(set(specdec_ext.__all__) - {"cuda_reason"})
    assert "specdec_ext.cuda_reason" in text


def test_every_page_is_in_the_navigation():
    config = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r": ([\w/]+\.md)$", config, re.M)
    pages = [str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted(pages)


@pytest.mark.parametrize("stem", docs_figures.FIGURES)
def test_figures_are_those_of_the_script(stem):
    """Run tools/docs_figures.py after a change."""
    drawn = docs_figures.FIGURES[stem]()
    xml.etree.ElementTree.fromstring(drawn)
    assert (ROOT / "docs" / "figures" / f"{stem}.svg").read_text() == drawn
    assert any(f"figures/{stem}.svg" in page.read_text() for page in PAGES), "shown on no page"


def test_the_tree_of_the_figure_has_the_mask_of_the_figure():
    import torch

    parents = torch.tensor(docs_figures.PARENTS, dtype=torch.int32)
    rows = torch.tensor([0, len(parents)], dtype=torch.int32)
    mask = specdec_ext.tree_links(parents, rows, len(parents))[0][:, 0].tolist()
    assert mask == [sum(1 << j for j in docs_figures.ancestors(i)) for i in range(len(parents))]


def test_sections_of_the_readme_and_results_are_filled_in():
    page = docs_hooks.filled("a\n<!-- README.md: Ops -->\nb")
    assert page.startswith("a\n## Ops\n") and page.endswith("\nb")
    assert "](kv_cache.md)" in page and "](docs/" not in page and "## Measured" not in page
    with pytest.raises(ValueError, match="No such"):
        docs_hooks.filled("<!-- README.md: No such -->")
    row = {
        "op": "sample",
        "case": "a case",
        "threads": 1,
        "us": 2.0,
        "us_best": 1.5,
        "us_worst": 9.0,
    }
    row |= {"floor_us": 0.5, "flop_floor_us": 0.25, "peers": {"torch": {"us": 6.0, "ratio": 3.0}}}
    slow = row | {"case": "another", "peers": {"torch": {"us": 1.0, "ratio": 0.5}}}
    text = docs_hooks.results_tables({"machine": {"device": "some CPU"}, "rows": [row, slow]})
    assert "Machine: device some CPU." in text
    assert "| [`sample`](#sample) | 2 | torch | 0.5 | 1.8 | 3.0 |" in text
    assert "| a case | 1 | 2.0 | 1.5..9.0 | 0.5, arithmetic 0.2 | 3.0 x torch |" in text


@pytest.mark.parametrize("page", ["index.md", "benchmarks.md"])
def test_markers_of_the_pages_name_something(page):
    text = (ROOT / "docs" / page).read_text()
    filled = docs_hooks.filled(text)
    assert "<!--" in text and "<!--" not in filled


def test_the_site_builds_without_a_warning(tmp_path):
    """As `make docs` does; mkdocs.yml makes a warning an error."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    import subprocess

    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, text=True, capture_output=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "reference" / "verification.html").read_text()
    assert "verify_chain" in page and "absolute position of the anchor" in page
