"""Results that no machine has memory for: an error that names the op and what it wanted, and nothing is lost."""

import pytest
import torch
from compare import assert_same


def test_the_error_names_op_and_tensor(backend):
    if backend.name == "emu_asan":
        pytest.skip("the sanitizer's allocator ends the process")
    one = torch.ones(1, 1, device=backend.device)
    many = one.expand(2**24, 1)  # 2^50 bytes of results from four bytes of arguments
    wanted = r"row_linear: memory: wanted a tensor \[16777216, 16777216\] of float32, got none"
    with pytest.raises(RuntimeError, match=wanted):
        backend.ops.row_linear(many, many)
    lists = torch.zeros(2**16, dtype=torch.int32, device=backend.device)
    wanted = r"next_round: memory: wanted a tensor \[65536, 2147483647\] of int64, got none"
    with pytest.raises(RuntimeError, match=wanted):
        backend.ops.next_round(
            lists[:, None].long(), lists, lists, lists[:, None],
            page_size=1, block_len=2**31 - 1, mask_token_id=0,
        )  # fmt: skip
    assert_same(backend.ops.row_linear(one, one), one)
