"""The nine pieces of every op (CONTRIBUTING.md, "Adding an op"): red until all of them exist."""

import ast
import functools
import importlib
import inspect
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import specdec_ext

ROOT = pathlib.Path(__file__).resolve().parent.parent
OPS = specdec_ext.op_names()


def text(path):
    full = ROOT / path
    assert full.exists(), f"{path} is missing"
    return full.read_text()


def test_ops_are_the_registered_ones():
    """Public ops of the schema, of op_names() and of the package are the same set."""
    in_schema = set(re.findall(r'm\.def\(\s*"([a-z]\w*)\(', text("csrc/schema.cpp")))
    assert in_schema == set(OPS)
    assert set(OPS) <= set(specdec_ext.__all__)
    sources = re.search(r"set\(SPECDEC_OPS ([^)]*)\)", text("cmake/sources.cmake")).group(1).split()
    assert set(sources) == set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_1_oracle(op):
    oracle = importlib.import_module(f"oracles.{op}")
    assert callable(getattr(oracle, op)), f"oracles/{op}.py defines no {op}()"


@pytest.mark.parametrize("op", OPS)
def test_2_schema(op):
    schema = getattr(torch.ops.specdec, op).default._schema
    wrapper = dict(inspect.signature(getattr(specdec_ext, op)).parameters)
    arguments = list(schema.arguments)
    if "controls" in wrapper:  # SamplingControls, the same in every op, last in the schema
        assert wrapper.pop("controls").kind is inspect.Parameter.VAR_KEYWORD
        controls = list(specdec_ext.SamplingControls.__annotations__)
        assert [a.name for a in arguments[-len(controls) :]] == controls
        assert all(a.kwarg_only and a.has_default_value() for a in arguments[-len(controls) :])
        arguments = arguments[: -len(controls)]
    assert [a.name for a in arguments] == list(wrapper), "wrapper and schema differ"
    for a in arguments:
        kind = wrapper[a.name].kind
        assert a.kwarg_only == (kind is inspect.Parameter.KEYWORD_ONLY), a.name
        assert a.has_default_value() == (wrapper[a.name].default is not inspect.Parameter.empty)
        if a.has_default_value():
            assert a.default_value == wrapper[a.name].default, a.name


@pytest.mark.parametrize("op", OPS)
def test_3_to_6_sources(op):
    params = text(f"csrc/kernels/{op}/params.h")
    struct = "".join(part.title() for part in op.split("_")) + "Params"
    assert f"struct {struct}" in params and "SPECDEC_DECLARE_CPU" in params
    for path in (f"csrc/kernels/{op}/cpu.cpp", f"csrc/kernels/{op}/cuda.cu"):
        source = text(path)
        assert source.startswith("//"), f"{path} opens with no header comment"
        assert re.search(r"[Dd]eterminis", source[:2500]), (
            f"{path} does not say what fixes its result"
        )
    assert f"SPECDEC_REGISTER({op}" in text(f"csrc/ops/{op}.cpp")


@pytest.mark.parametrize("op", OPS)
def test_7_wrapper_and_fake(op):
    doc = inspect.getdoc(getattr(specdec_ext, op)) or ""
    for part in ("Args:", "Raises:", "["):
        assert part in doc, f"docstring of {op} has no {part}"
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has(f"specdec::{op}", "CPU")
    assert (
        has(f"specdec::{op}", "Meta")
        or torch._library.simple_registry.singleton.find(f"specdec::{op}").fake_impl.kernel
    ), f"{op} has no fake kernel"


@functools.cache
def files_with_seeded_bugs():
    """By a process of its own: names of its modules are those of modules here."""
    code = "import mutations; print(*{bug.file for bug in mutations.ALL})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "cpp_tests" / "seeded_bugs",
        text=True,
        capture_output=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize("op", OPS)
def test_8_tests_and_benchmark(op):
    tree = ast.parse(text(f"python_tests/test_{op}.py"))
    tests = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    assert tests
    # The parametrised fixture runs a test on the CPU, the emulated kernels and the GPU.
    assert any("backend" in [a.arg for a in n.args.args] for n in tests)
    source = text(f"python_tests/test_{op}.py")
    assert "opcheck" in source and "fullgraph=True" in source
    text(f"benchmarks/{op}.py")
    assert f"{op}" in text("python_tests/test_fakes.py")
    assert any(f"/kernels/{op}/" in path for path in files_with_seeded_bugs()), (
        f"no seeded bug in {op}"
    )


@pytest.mark.parametrize("op", OPS)
def test_9_documentation(op):
    assert re.search(rf"\|\s*\[?`{op}`", text("README.md")), f"README.md has no row for {op}"
    pages = [p.read_text() for p in (ROOT / "docs").glob("*.md")]
    assert any(re.search(rf"^#+ .*`{op}`", page, re.MULTILINE) for page in pages), (
        f"no page in docs/ has a section on {op}"
    )


def test_tests_of_every_case_file_exist():
    """A numeric case that is copied here is used by some test."""
    cases = sorted((ROOT / "python_tests" / "cases").glob("*.json"))
    sources = "".join(p.read_text() for p in (ROOT / "python_tests").rglob("*.py"))
    assert cases
    for case in cases:
        assert case.stem in sources, f"no test reads {case.name}"
