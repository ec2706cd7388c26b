"""`python -m specdec_ext`, what import costs and says, and the types that users' checkers see."""

import inspect
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from compare import assert_close

import specdec_ext
from specdec_ext import __main__ as command_line
from specdec_ext import _bench, _load, _selftest

PACKAGE = pathlib.Path(specdec_ext.__file__).parent


def test_info_is_the_default(capsys):
    assert command_line.main([]) == 0
    text = capsys.readouterr().out
    assert command_line.main(["info"]) == 0
    assert capsys.readouterr().out == text
    assert specdec_ext.__version__ in text and torch.__version__ in text
    assert specdec_ext.cuda_reason in text and specdec_ext.cpu_isa() in text
    assert all(op in text for op in specdec_ext.op_names())


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main(["selftset"])
    assert ended.value.code == 2
    assert "selftest" in capsys.readouterr().err


# --- selftest ----------------------------------------------------------------------------------------


def test_selftest_passes_here(capsys):
    assert command_line.main(["selftest"]) == 0
    lines = capsys.readouterr().out.splitlines()
    checks = len(specdec_ext.op_names()) * len(_selftest.devices())
    assert sum(line.endswith(" ok") for line in lines) == checks
    assert lines[-1].startswith(f"{checks} of {checks} checks passed")


def test_selftest_has_a_check_for_every_op():
    assert set(_selftest.CHECKS) == set(specdec_ext.op_names())


def spoilt(op):
    """The op with a small mistake: the first result is off by one, or nothing is written."""
    real = getattr(specdec_ext, op)

    def wrong(*args, **kwargs):
        if op in ("append_kv", "compact_kv", "inject_kv"):
            return None
        out = real(*args, **kwargs)
        return out + 1 if torch.is_tensor(out) else (out[0] + 1, *out[1:])

    return wrong


@pytest.mark.parametrize("op", specdec_ext.op_names())
def test_selftest_sees_a_wrong_op(op, monkeypatch, capsys):
    monkeypatch.setattr(specdec_ext, op, spoilt(op))
    with pytest.raises(AssertionError):
        _selftest.CHECKS[op](torch.device("cpu"))


def test_selftest_goes_on_after_a_failure_and_says_so(monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(specdec_ext, "sample", broken)
    monkeypatch.setattr(specdec_ext, "append_kv", spoilt("append_kv"))
    monkeypatch.setattr(_selftest, "devices", lambda: [torch.device("cpu")])
    assert command_line.main(["selftest"]) == 1
    text = capsys.readouterr().out
    assert re.search(r"cpu +sample +FAILED +RuntimeError: no kernel image", text)
    assert re.search(r"cpu +append_kv +FAILED +AssertionError: cache: wanted", text)
    total = len(specdec_ext.op_names())
    assert f"{total - 2} of {total} checks passed" in text


# --- bench -------------------------------------------------------------------------------------------


def test_bench_prints_a_ratio_per_case(monkeypatch):
    monkeypatch.setattr(_bench, "_TURNS", 1)
    monkeypatch.setattr(_bench, "_TURN_SECONDS", 0.0)
    lines = []
    _bench.run(lines.append, [torch.device("cpu")], scale=32)
    assert len(lines) == 5
    for line, op in zip(
        lines[1:], ["sample", "verify_chain", "verify_attention", "row_linear"], strict=True
    ):
        assert re.match(rf"cpu +{op}, .* us +\d+\.\d x \w+", line), line


def test_contenders_of_bench_compute_the_same():
    """Those of them that draw nothing."""
    found = {name.split(",")[0]: case for name, *case in _bench.cases(torch.device("cpu"), 32)}
    ours, _, peer = found["row_linear"]
    assert_close(ours(), peer(), what="row_linear", magnitude=64)
    ours, _, peer = found["verify_attention"]
    assert_close(ours()[0], peer()[0].transpose(0, 1), what="verify_attention", magnitude=1)
    (tokens, *_), peer = found["verify_chain"][0](), found["verify_chain"][2]
    assert tokens.shape == (1, 8) and peer().shape == (1,)


# --- What import says --------------------------------------------------------------------------------


def fresh_python(code, **options):
    return subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, **options)


def test_import_loads_nothing_that_torch_has_not_loaded():
    """What an import costs is what it imports: besides torch's, only the package's own modules."""
    done = fresh_python(
        "import sys, torch; before = set(sys.modules); import specdec_ext;"
        "print(*sorted(n for n in set(sys.modules) - before if n.split('.')[0] != 'specdec_ext'));"
        "print(*sorted(n for n in sys.modules if n.startswith('specdec_ext._')))",
        cwd=PACKAGE.parent,
    )
    assert done.returncode == 0, done.stderr
    others, own = done.stdout.split("\n")[:2]
    assert others.split() == []
    assert "specdec_ext._selftest" not in own and "specdec_ext._bench" not in own


def test_an_old_torch_is_named(tmp_path):
    """A torch that is too old never gets as far as the library."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.9.1+cu126'\n")
    done = fresh_python(
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(PACKAGE.parent)!r}]; import specdec_ext"
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        "ImportError: specdec_ext needs torch >= 2.10, found 2.9.1+cu126; run `pip install 'torch>=2.10'`"
    )


@pytest.mark.parametrize("version", ["2.10.0", "2.10.0a0+git1234", "3.0", "2.13.0+cpu"])
def test_a_torch_that_is_new_enough(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    _load._check_torch()


def test_a_package_that_is_not_built_says_how(monkeypatch, tmp_path):
    monkeypatch.setattr(_load, "_FOLDER", tmp_path)
    with pytest.raises(ImportError, match="_C.so is missing .* run `pip install .`"):
        _load.load()


def test_a_library_that_does_not_load_says_with_which_torch(monkeypatch, tmp_path):
    (tmp_path / "_C.so").write_bytes(b"no library")
    (tmp_path / "_build_info.json").write_text('{"torch_built_with": "2.99"}')
    monkeypatch.setattr(_load, "_FOLDER", tmp_path)
    with pytest.raises(
        ImportError, match=rf"built with torch 2\.99.* under torch {re.escape(torch.__version__)}"
    ):
        _load.load()


ARCHS = [
    ("80-real;90-real;100-real;120", (8, 0), True),
    ("80-real;90-real;100-real;120", (8, 9), True),  # machine code of 8.0 runs on all of generation 8
    ("80-real;90-real;100-real;120", (7, 5), False),
    ("80-real;90-real;100-real;120", (10, 3), True),
    ("80-real;90-real;100-real;120", (11, 0), False),
    ("80-real;90-real;100-real;120", (12, 1), True),
    ("80-real;90-real;100-real;120", (13, 0), True),  # PTX of 12.0
    ("86-real", (8, 0), False),
    ("90a-real", (9, 0), True),
    ("90a-real", (10, 0), False),
    ("90a", (10, 0), False),  # its PTX is for 9.0 alone
    ("100f-real", (10, 3), True),
    ("100f-real", (12, 0), False),
    ("75-virtual", (9, 0), True),
    ("", (9, 0), False),
]  # fmt: skip


@pytest.mark.parametrize("archs, capability, wanted", ARCHS)
def test_architectures_that_run(archs, capability, wanted):
    assert _load._runs_on(archs, capability) is wanted


def test_a_gpu_without_kernels_is_named(monkeypatch):
    """Two GPUs, the second too old for the wheel: one warning, when CUDA is used first."""
    capabilities = [(9, 0), (7, 5)]
    monkeypatch.setattr(_load, "build_info", lambda: {"cuda_archs": "80-real;90-real"})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
    with pytest.warns(UserWarning) as caught:
        _load._warn_of_architectures()
    assert [str(w.message) for w in caught] == [
        "specdec_ext was built for the CUDA architectures 80-real;90-real, and cuda:1 (Some GPU) is "
        "sm_75; build it with SPECDEC_CUDA_ARCHS=75-real pip install ."
    ]
    assert _load.architecture_problem(0) == ""


def test_import_asks_for_the_warning_without_touching_the_gpu(monkeypatch, tmp_path):
    """A CUDA library that loads, a torch with CUDA, a device: nothing runs before CUDA is used."""
    (tmp_path / "_C_cuda.so").touch()
    later = []
    monkeypatch.setattr(_load, "_FOLDER", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: pytest.fail("too early"))
    monkeypatch.setattr(torch.cuda, "_lazy_call", later.append)
    assert _load._load_cuda() == ""
    assert later == [_load._warn_of_architectures]


# --- Types -------------------------------------------------------------------------------------------


def public_functions():
    for name in specdec_ext.__all__:
        value = getattr(specdec_ext, name)
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value):
            for attribute, method in vars(value).items():
                if not attribute.startswith("_"):
                    method = getattr(method, "__func__", getattr(method, "fget", method))
                    if inspect.isfunction(method):
                        yield f"{name}.{attribute}", method


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").exists()
    assert 'specdec_ext = ["py.typed"]' in (PACKAGE.parent / "pyproject.toml").read_text()


@pytest.mark.parametrize("name, function", list(public_functions()))
def test_every_public_signature_is_complete(name, function):
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    missing = [p.name for p in parameters if p.annotation is inspect.Parameter.empty]
    assert not missing and signature.return_annotation is not inspect.Signature.empty


GOOD = """
import torch
import specdec_ext

x = torch.zeros(4, 10)
out = specdec_ext.sample(x, x, x, vocab_size=10, top_p=x, num_logprobs=2)
tokens, logprob, lse, status, top_ids, top_logprobs = out
specdec_ext.append_kv(x, x, x, x, x, k_scale=None)
name: str = specdec_ext.cpu_isa()
"""
BAD = """
import torch
import specdec_ext

x = torch.zeros(4, 10)
specdec_ext.sample(x, x, x)
specdec_ext.sample(x, x, x, vocab_size="10")
specdec_ext.sample(x, x, x, vocab_size=10, topp=x)
a, b = specdec_ext.sample(x, x, x, vocab_size=10)
n: int = specdec_ext.cpu_isa()
"""


def test_mypy_sees_the_signatures(tmp_path):
    """Under --strict, torch taken as it is: reading all of torch takes a minute and tells nothing."""
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nstrict = True\nmypy_path = {PACKAGE.parent}\ncache_dir = {tmp_path / 'cache'}\n"
        "[mypy-specdec_ext.*]\nfollow_imports = silent\n"
        "[mypy-torch.*,numpy.*]\nfollow_imports = skip\nignore_missing_imports = True\n"
    )
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(BAD)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "good.py", "bad.py"],
        cwd=tmp_path, text=True, capture_output=True,
    )  # fmt: skip
    lines = re.findall(r"^(\w+)\.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.M)
    assert lines == [
        ("bad", "6", "call-arg"),
        ("bad", "7", "arg-type"),
        ("bad", "8", "call-arg"),
        ("bad", "9", "misc"),
        ("bad", "10", "assignment"),
    ], done.stdout + done.stderr
