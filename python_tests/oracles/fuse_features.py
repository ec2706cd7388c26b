"""fuse_features, slowly and obviously: float64, one row at a time."""

import torch

from oracles import row_linear as linear


def fuse_features(hiddens, fc_weight, norm_weight=None, eps=1e-6):
    """y [R, d], float64."""
    y = linear.row_linear(torch.cat(list(hiddens), 1), fc_weight)
    if norm_weight is None:
        return y
    for row in y:
        row /= (row.square().mean() + eps).sqrt()
    return y * norm_weight.double()


def torch_peer(hiddens, fc_weight, norm_weight=None, eps=1e-6):
    """The same by torch at the dtype of hiddens."""
    y = torch.nn.functional.linear(torch.cat(list(hiddens), 1), fc_weight)
    if norm_weight is None:
        return y
    wide = y.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * norm_weight.float()).to(y.dtype)


def random_case(generator, rows=3, sizes=(40, 24, 64), width=20, dtype=torch.float32, norm=True):
    """hiddens, fc_weight, norm_weight."""
    hiddens = [torch.randn(rows, n, generator=generator).to(dtype) for n in sizes]
    _, weight, _ = linear.random_case(generator, 1, width, sum(sizes), dtype)
    gain = (1 + 0.2 * torch.randn(width, generator=generator)).to(dtype)
    return hiddens, weight, gain if norm else None
