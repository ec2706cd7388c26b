"""Correct kernels: the right answer under every schedule, and nothing for a detector to report."""

import numpy as np


def to_bf16(x):
    """float32 values that are exact in bfloat16, and their 16-bit codes."""
    codes = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return (codes.astype(np.uint32) << 16).view(np.float32), codes


def test_reduce(emu, schedule):
    rng = np.random.default_rng(1)
    x = rng.integers(-1000, 1000, (3, 700)).astype(np.float32)
    x[1, 40] = x[1, 600] = 5000  # the lower index wins
    out = np.full((3, 3), np.nan, np.float32)
    scan = np.full_like(x, np.nan)
    emu.run("correct_reduce", x, 3, 700, out, scan, read_only=[0])
    assert (out[:, 0] == x.sum(1)).all()
    assert (out[:, 1] == x.max(1)).all()
    assert (out[:, 2] == x.argmax(1)).all() and out[1, 2] == 40
    assert (scan == np.cumsum(x, 1)).all()


def test_transpose(emu, schedule):
    x = np.arange(70 * 45, dtype=np.float32).reshape(70, 45)
    for padded in (0, 1):
        out = np.full((45, 70), np.nan, np.float32)
        emu.run("correct_transpose", x, out, 70, 45, padded, read_only=[0])
        assert (out == x.T).all()


def test_matmul(emu, schedule):
    rng = np.random.default_rng(2)
    m, n, k = 64, 128, 192
    a, a_codes = to_bf16(rng.integers(-8, 9, (m, k)) / 8)
    b, b_codes = to_bf16(rng.integers(-8, 9, (k, n)) / 8)
    want = a @ b  # exact: few bits, short sums
    out = np.full((m, n), np.nan, np.float32)
    emu.run("correct_matmul", a_codes, b_codes, out, m, n, k, 1, read_only=[0, 1])
    assert (out == want).all()
    out[:] = np.nan
    halves = a.astype(np.float16), b.astype(np.float16)
    emu.run("correct_matmul", *halves, out, m, n, k, 0, read_only=[0, 1])
    assert (out == want).all()


def test_last_block(emu, schedule):
    x = np.random.default_rng(3).integers(0, 256, 5000).astype(np.uint8)
    partial = np.full(9 * 256, -1, np.int32)
    ticket = np.zeros(1, np.int32)
    for _ in range(2):  # the kernel resets its ticket
        out = np.full(256, -1, np.int32)
        emu.run("correct_last_block", x, 5000, 9, partial, ticket, out, read_only=[0])
        assert (out == np.bincount(x, minlength=256)).all() and ticket[0] == 0


def test_chain(emu, schedule):
    x = np.arange(1, 24, dtype=np.int32)
    running, out = np.full(23, -1, np.int32), np.full(23, -1, np.int32)
    ready = np.zeros(23, np.int32)
    emu.run("correct_chain", x, 23, running, ready, out, read_only=[0])
    assert (out == np.cumsum(x)).all()


def test_grid(emu, schedule):
    x = np.random.default_rng(4).integers(0, 64, 5 * 96).astype(np.float32)
    want = x.copy()
    for _ in range(3):
        want = 0.5 * (np.roll(want, 1) + np.roll(want, -1))
    y = np.full_like(x, np.nan)
    emu.run("correct_grid", x, y, 5, 3)
    assert (x == want).all()


def test_named_barriers(emu, schedule):
    x = np.arange(7 * 32, dtype=np.int32)
    out = np.full((7, 3, 32), -1, np.int32)
    emu.run("correct_named", x, out, 7, read_only=[0])
    for warp in range(3):
        assert (out[:, warp] == x.reshape(7, 32)[:, ::-1] * (warp + 1)).all()


def test_warp_functions(emu, schedule):
    x = np.random.default_rng(5).integers(-50, 50, 32).astype(np.int32)
    x[9] = 7
    out = np.full((20, 32), -12345, np.int32)
    emu.run("correct_warp", x, out, read_only=[0])
    lane = np.arange(32)
    u = x.view(np.uint32)
    # C's remainder, on which lanes are matched
    rest = np.fmod(x, 3)
    want = [
        x[(lane + 5) % 32],
        x[lane // 8 * 8 + 3],
        np.where(lane >= 4, x[(lane - 4) % 32], x),
        np.where(lane % 16 + 3 < 16, x[(lane + 3) % 32], x),
        x[lane ^ 17],
        np.full(32, sum(1 << i for i in range(32) if x[i] > 0), np.uint32).view(np.int32),
        np.full(32, 1),
        np.full(32, 1),
        np.array(
            [sum(1 << j for j in range(32) if rest[j] == rest[i]) for i in range(32)], np.uint32
        ).view(np.int32),
        np.full(32, x.sum()),
        np.full(32, x.min()),
        np.full(32, x.max()),
        np.full(32, u.max(), np.uint32).view(np.int32),
        np.full(32, np.bitwise_xor.reduce(u), np.uint32).view(np.int32),
        np.full(32, np.bitwise_and.reduce(u | 1), np.uint32).view(np.int32),
        x[::-1],
        np.concatenate([x[:16][::-1][lane[:16] ^ 1], 2 * x[16:][::-1][lane[:16] ^ 2]]),
        np.full(32, (x > 0).sum()),
        np.full(32, 1),
        np.full(32, 1),
    ]
    for row, expected in enumerate(want):
        assert (out[row] == expected).all(), row


def test_dot_bytes(emu, schedule):
    a, b = np.random.default_rng(6).integers(-128, 128, (2, 64, 4)).astype(np.int8)
    a[0], b[0] = -128, -128
    a[1], b[1] = 127, -128
    out = np.full(64, -1, np.int32)
    emu.run("correct_dot_bytes", a.view(np.int32)[:, 0].copy(), b.view(np.int32)[:, 0].copy(), out)
    assert (out == (a.astype(int) * b).sum(1) + 100 * np.arange(64)).all()
