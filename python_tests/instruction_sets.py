"""What a script gives on every instruction set that this CPU has. SPECDEC_CPU_ISA is read once per process,
so each is a process of its own."""

import os
import pathlib
import subprocess
import sys

import torch

import specdec_ext

HERE = pathlib.Path(__file__).resolve().parent
OWN_BF16 = ("avx512bf16", "amx")  # products of bf16 pairs round in their own ways


def results_by_isa(script, folder):
    """{isa: {name: tensor}} of a script of this folder that saves them, and "isa", to the file it is told."""
    saved = {}
    for isa in ("baseline", "avx2", "avx512", "avx512bf16", "amx"):
        path = folder / f"{isa}.pt"
        package = pathlib.Path(specdec_ext.__file__).parent
        done = subprocess.run(
            [sys.executable, str(HERE / script), str(path)],
            env={**os.environ, "SPECDEC_CPU_ISA": isa, "PYTHONPATH": str(package.parent)},
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
