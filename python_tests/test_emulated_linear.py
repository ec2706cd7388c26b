"""row_linear's CUDA kernel asks memory for no more than it needs."""

import backends
import pytest
import torch
from oracles import fuse_features as fuse_oracle
from oracles import row_linear as oracle

HOOKS = [name for name in backends.available() if name == "emu_hooks"]


@pytest.fixture(params=HOOKS)
def hooks(request):
    return backends.get(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 13, 32, 64])
def test_streams_each_weight_once(hooks, dtype, rows):
    """Up to 64 rows: every weight once, in whole sectors, no bank conflicts, one launch."""
    outputs, size = 80, 640
    x, weight, bias = oracle.random_case(
        torch.Generator().manual_seed(1), rows, outputs, size, dtype
    )
    stats = hooks.stats(lambda: hooks.ops.row_linear(x, weight, bias))
    assert stats["launches"] == 1
    tensors = stats["tensors"]
    assert tensors["weight"]["read_bytes"] == weight.nbytes
    assert tensors["x"]["read_bytes"] == x.nbytes * -(-outputs // 32)  # once per block
    assert tensors["y"]["written_bytes"] == rows * outputs * dtype.itemsize
    assert any(line["space"] == "shared" for line in stats["lines"])
    for line in stats["lines"]:
        if line["space"] == "global" and line["bytes"] >= 1024:
            assert line["sectors"] == line["ideal_sectors"], line
        if line["space"] == "shared":
            assert line["wavefronts"] == line["ideal_wavefronts"], line


def test_more_rows_stream_the_weights_once_per_64(hooks):
    x, weight, _ = oracle.random_case(
        torch.Generator().manual_seed(2), 130, 32, 64, torch.bfloat16, bias=False
    )
    stats = hooks.stats(lambda: hooks.ops.row_linear(x, weight))
    assert stats["tensors"]["weight"]["read_bytes"] == 3 * weight.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fuse_features_streams_each_weight_once(hooks, dtype):
    """Two launches, no concatenation: every weight once, every hidden state once per block."""
    rows, width, sizes = 8, 80, (320, 128, 192)
    hiddens, weight, norm = fuse_oracle.random_case(
        torch.Generator().manual_seed(3), rows, sizes, width, dtype
    )
    stats = hooks.stats(lambda: hooks.ops.fuse_features(hiddens, weight, norm))
    assert stats["launches"] == 2
    tensors = stats["tensors"]
    assert tensors["fc_weight"]["read_bytes"] == weight.nbytes
    blocks = -(-width // 32)
    assert tensors["hiddens"]["read_bytes"] == sum(h.nbytes for h in hiddens) * blocks
    assert tensors["sums"]["read_bytes"] == 2 * 4 * rows * width
    assert tensors["y"]["written_bytes"] == rows * width * (4 + dtype.itemsize)
    for line in stats["lines"]:
        if line["space"] == "global" and line["bytes"] >= 1024:
            assert line["sectors"] == line["ideal_sectors"], line
    assert hooks.stats(lambda: hooks.ops.fuse_features(hiddens, weight))["launches"] == 1
