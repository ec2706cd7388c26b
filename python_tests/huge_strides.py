"""Views whose last element lies behind 2^31 others, for tests of 32-bit offsets."""

import mmap

import pytest
import torch

ROWS, STRIDE, PICKED = 2100, 2**20, [0, 2047, 2048, 2099]


def huge(backend, shape, strides, dtype):
    """A view over more than 2^31 elements, whose untouched pages cost nothing."""
    if backend.name == "emu_asan":
        pytest.skip("gigabytes of address space do not fit the sanitizer's shadow memory")
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    if backend.name == "cuda":
        base = torch.empty(last, dtype=dtype, device="cuda")
    else:
        no_reserve = 0x4000  # MAP_NORESERVE of Linux
        size = last * torch.empty(0, dtype=dtype).element_size()
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
        base = torch.frombuffer(pages, dtype=dtype)
    return base.as_strided(shape, strides)


def huge_caches(backend):
    """(k_cache, v_cache [2100, 1, 1, 8] bf16, slots [4] whose offsets go beyond 2^31)."""
    shape, strides = (ROWS, 1, 1, 8), (STRIDE, 8, 8, 1)
    if backend.name == "emu_asan":
        pytest.skip("gigabytes of address space do not fit the sanitizer's shadow memory")
    base = torch.empty(ROWS * STRIDE, dtype=torch.bfloat16, device=backend.device)
    caches = [base.as_strided(shape, strides, first) for first in (0, 8)]
    return *caches, torch.tensor(PICKED, device=backend.device)
