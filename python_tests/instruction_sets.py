"""What scripts give on every instruction set that this CPU has. SPECDEC_CPU_ISA is read once per process,
so each is a process of its own; one runs all scripts, as importing torch takes longer than they do."""

import functools
import importlib
import os
import pathlib
import subprocess
import sys
import tempfile

import torch

import specdec_ext

HERE = pathlib.Path(__file__).resolve().parent
OWN_BF16 = ("avx512bf16", "amx")  # products of bf16 pairs round in their own ways


def results_by_isa(script):
    """{isa: {name: tensor}} that results() of a module of this folder, `isa_...`, gives."""
    return {isa: results[script] for isa, results in _everything().items()}


@functools.cache
def _everything():
    """{isa: {script: {name: tensor}}}"""
    saved = {}
    package = pathlib.Path(specdec_ext.__file__).parent.parent
    for isa in ("baseline", "avx2", "avx512", "avx512bf16", "amx"):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "results.pt"
            done = subprocess.run(
                [sys.executable, __file__, str(path)],
                env={**os.environ, "SPECDEC_CPU_ISA": isa, "PYTHONPATH": str(package)},
                capture_output=True,
                text=True,
            )
            if done.returncode != 0:
                assert "wanted an instruction set that this CPU has" in done.stderr, done.stderr
                continue
            saved[isa] = torch.load(path)
        assert saved[isa].pop("isa") == isa
    assert "baseline" in saved
    return saved


def main():
    saved = {"isa": specdec_ext.cpu_isa()}
    for path in sorted(HERE.glob("isa_*.py")):
        saved[path.stem] = importlib.import_module(path.stem).results()
    torch.save(saved, sys.argv[1])


if __name__ == "__main__":
    main()
