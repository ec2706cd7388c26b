"""CUDA kernels against CPU kernels, token for token, on random mixed batches (mixed_batches.py).

SPECDEC_FUZZ_BATCHES sets how many (`make fuzz`: 10,000). A batch whose number is printed is had again by
`mixed_batches.random_batch(number)`.
"""

import os

import backends
import mixed_batches
import pytest

PARTS = 10
BATCHES = int(os.environ.get("SPECDEC_FUZZ_BATCHES", "0"))
# What CI runs, per backend: the detectors are slower, and see the same arithmetic.
DEFAULT = {"emu": 500, "emu_hooks": 40, "emu_asan": 100, "cuda": 1000}


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", [name for name in backends.available() if name != "cpu"])
def test_cuda_is_cpu(name, part, record_property):
    cpu, cuda = backends.get("cpu"), backends.get(name)
    crossings = 0
    for seed in range(part, BATCHES or DEFAULT[name], PARTS):
        op, case = mixed_batches.random_batch(seed)
        wanted = mixed_batches.run(cpu, op, case)
        got = mixed_batches.run(cuda, op, case)
        crossings += mixed_batches.compare(op, case, got, wanted, f"batch {seed}")
    record_property("crossings", crossings)
    assert crossings == 0, f"{crossings} requests are decided differently, all within rounding"
