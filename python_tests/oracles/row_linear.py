"""row_linear, slowly and obviously: dense float64."""

import torch


def row_linear(x, weight, bias=None):
    """y [R, N], float64."""
    y = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64)
    for r in range(x.shape[0]):
        for n in range(weight.shape[0]):
            y[r, n] = (x[r].double() * weight[n].double()).sum()
    return y if bias is None else y + bias.double()


def torch_peer(x, weight, bias=None):
    """The same by torch at the dtype of x; its error is what ours is measured by."""
    return torch.nn.functional.linear(x, weight, bias)


def random_case(generator, rows, outputs, size, dtype=torch.float32, bias=True):
    """x, weight, bias. Sums of K products of size 1 / sqrt(K): results have size 1."""
    x = torch.randn(rows, size, generator=generator)
    weight = torch.randn(outputs, size, generator=generator) / max(size, 1) ** 0.5
    b = torch.randn(outputs, generator=generator) if bias else None
    return tuple(t if t is None else t.to(dtype) for t in (x, weight, b))
