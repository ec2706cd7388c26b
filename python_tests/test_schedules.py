"""A kernel's result must not depend on the order in which threads, warps and blocks run."""

import backends
import pytest
import small_calls
import torch
from compare import assert_same

import specdec_ext

EMULATED = [name for name in backends.available() if name in ("emu", "emu_hooks")]
FORWARD, REVERSE, RANDOM = 0, 1, 2


@pytest.mark.parametrize("op", specdec_ext.op_names())
@pytest.mark.parametrize("name", EMULATED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_schedules_give_the_same_bits(name, op, dtype):
    backend = backends.get(name)
    try:
        backend.set("order", FORWARD)
        wanted = small_calls.call(op, backend.ops, dtype=dtype)
        for order, seed in ((REVERSE, 0), (RANDOM, 1), (RANDOM, 2)):
            backend.set("order", order)
            backend.set("seed", seed)
            for got, want in zip(
                small_calls.call(op, backend.ops, dtype=dtype), wanted, strict=True
            ):
                assert_same(got, want, f"{op} under order {order}, seed {seed}")
    finally:
        backend.set("order", FORWARD)


@pytest.mark.parametrize("op", specdec_ext.op_names())
def test_threads_give_the_same_bits(op):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        wanted = small_calls.call(op, torch.ops.specdec)
        torch.set_num_threads(2)
        for got, want in zip(small_calls.call(op, torch.ops.specdec), wanted, strict=True):
            assert_same(got, want)
    finally:
        torch.set_num_threads(threads)
