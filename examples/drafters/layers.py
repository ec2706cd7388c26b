"""What the layers of all drafters share: norms, heads and the feed-forward half."""

from torch import Tensor
from torch.nn import functional

from drafters.weights import DraftLayer
from engine.linear import Linear
from engine.model import LlamaModel, rotate


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, (x.size(-1),), weight, eps)


def turned_heads(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [R, H, D] normed one by one, where the model does that, and turned by their positions."""
    if weight is not None:
        x = rms_norm(x, weight, eps)
    return rotate(x, cos[:, None], sin[:, None])


def finish_layer(
    layer: DraftLayer, linear: Linear, eps: float, residual: Tensor, attended: Tensor
) -> Tensor:
    """From the attention's output [R, Hq, D] to the layer's [R, d]."""
    x = residual + linear(attended.flatten(1), layer.attention_out)
    gate, up = linear(rms_norm(x, layer.ffn_norm, eps), layer.gate_up).chunk(2, dim=1)
    return x + linear(functional.silu(gate) * up, layer.ffn_down)


def check_target(target: LlamaModel, **sizes: int) -> None:
    """A drafter reads and writes in the target's terms, so fields of its config must be as the drafter says."""
    for what, size in sizes.items():
        has = getattr(target.config, what)
        if size != has:
            raise ValueError(f"the drafter's target: {what}: wanted {size}, got {has}")
