"""Layouts of ldmatrix and mma: emulator = golden file = CuTe. Conversions: emulator = torch."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
GOLDEN = json.loads((HERE / "golden" / "cute_layouts.json").read_text())


def test_golden_file_is_what_cute_says():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "cute_layouts.py", "--check"],
        text=True,
        capture_output=True,
    )
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("matrices", [2, 4])
@pytest.mark.parametrize("transpose", [0, 1])
def test_ldmatrix(emu, matrices, transpose):
    want = np.array(GOLDEN[f"ldmatrix_x{matrices}" + ("_trans" if transpose else "")])
    out = np.full((32, 2 * matrices), 0xFFFF, np.uint16)
    emu.run("layouts_ldmatrix", out, matrices, transpose)
    assert (out == want).all()


def pack(matrix, layout):
    """Fragments of all lanes: pairs of 16-bit codes, the first in the low half."""
    codes = matrix.T.reshape(-1)[layout].astype(np.uint32)  # the layout counts down columns
    return np.ascontiguousarray(codes[:, 0::2] | codes[:, 1::2] << 16)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_mma(emu, dtype):
    rng = np.random.default_rng(7)
    # Layouts count A as [m, k], B as [n, k], C as [m, n].
    layout_a, layout_b, layout_c = (np.array(GOLDEN[f"mma_{dtype}_{m}"]) for m in "abc")
    torch_type = torch.bfloat16 if dtype == "bf16" else torch.float16
    for _ in range(8):
        a, b, c = (
            torch.from_numpy(rng.integers(-30, 31, shape).astype(np.float32))
            for shape in ((16, 16), (8, 16), (16, 8))
        )
        want = (a @ b.T + c).numpy()
        codes = [x.to(torch_type).view(torch.int16).numpy().view(np.uint16) for x in (a, b)]
        fragment_c = np.ascontiguousarray(c.numpy().T.reshape(-1)[layout_c])
        out = np.full((32, 4), np.nan, np.float32)
        emu.run(
            "layouts_mma",
            pack(codes[0], layout_a),
            pack(codes[1], layout_b),
            fragment_c,
            out,
            int(dtype == "bf16"),
            read_only=[0, 1, 2],
        )
        got = np.full(128, np.nan, np.float32)
        got[layout_c.reshape(-1)] = out.reshape(-1)
        assert (got.reshape(8, 16).T == want).all()


def test_conversions(emu):
    """Every fp16 code to float; floats of all kinds to fp16 and bf16, as torch rounds them."""
    rng = np.random.default_rng(8)
    count = 65536
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    # ties and near-ties of both targets, subnormals of fp16, the borders to infinity
    bits[:4096] = bits[:4096] & 0xFFFF0000 | 0x8000
    bits[4096:8192] = bits[4096:8192] & 0xFFFFE000 | 0x1000
    bits[8192:12288] = (bits[8192:12288] & 0x807FFFFF) | (
        rng.integers(96, 118, 4096).astype(np.uint32) << 23
    )
    x = bits.view(np.float32)
    x[:6] = [65504, 65519.996, 65520, np.inf, 3.3895314e38, 0]
    bf16s, f16s = np.zeros(count, np.uint32), np.zeros(count, np.uint32)
    widened = np.zeros(count, np.float32)
    emu.run("layouts_convert", x, bf16s, f16s, widened, count, read_only=[0])
    nan = np.isnan(x)
    for codes, torch_type in ((bf16s, torch.bfloat16), (f16s, torch.float16)):
        for half, sign in ((codes & 0xFFFF, 0), (codes >> 16, 1 << 31)):
            signed = (bits ^ np.uint32(sign)).view(np.float32)
            want = torch.from_numpy(signed).to(torch_type).view(torch.int16).numpy()
            got = half.astype(np.uint16).view(np.int16)
            assert (got[~nan] == want[~nan]).all()
            assert (got[nan] == 0x7FFF).all()  # cvt makes every NaN this one
    want = torch.arange(count, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    same = widened.view(np.uint32) == want.numpy().view(np.uint32)
    assert (same | np.isnan(want.numpy()) & np.isnan(widened)).all()
