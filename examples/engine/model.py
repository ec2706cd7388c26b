"""Llama forward pass over the ragged rows of a batch, attention through the specdec operators."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.kv_cache import PagedKvCache
from engine.linear import LINEARS, Linear

ops = torch.ops.specdec


@dataclass(frozen=True)
class LlamaConfig:
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    rope_theta: float
    norm_eps: float
    max_positions: int


@dataclass
class LayerWeights:
    """Projections that read the same input are one matrix: fewer, larger products."""

    attention_norm: Tensor  # [d]
    qkv: Tensor  # [(Hq + 2 * Hkv) * D, d]
    attention_out: Tensor  # [d, Hq * D]
    ffn_norm: Tensor  # [d]
    gate_up: Tensor  # [2 * ffn, d]
    ffn_down: Tensor  # [d, ffn]

    def to(self, *args) -> "LayerWeights":
        return LayerWeights(**{name: value.to(*args) for name, value in vars(self).items()})


@dataclass
class LlamaWeights:
    embedding: Tensor  # [V, d], also the output projection
    layers: list[LayerWeights]
    final_norm: Tensor  # [d]

    def to(self, *args) -> "LlamaWeights":
        return LlamaWeights(
            self.embedding.to(*args),
            [layer.to(*args) for layer in self.layers],
            self.final_norm.to(*args),
        )


@dataclass(frozen=True)
class PassRows:
    """The rows of one target pass. Rows past `cu_rows[-1]` are padding: they are computed, cost time,
    write nothing to the cache and reach no request."""

    token_ids: Tensor  # int64 [R]
    positions: Tensor  # int64 [R]
    slots: Tensor  # int64 [R], -1 writes nothing
    cu_rows: Tensor  # int32 [B+1]
    seq_lens: Tensor  # int32 [B], all KV of a request including this pass's rows
    block_table: Tensor  # int32 [B, P]
    max_rows: int  # no request has more rows
    tree_mask: Tensor | None = (
        None  # int32 [R, W], which rows of its request a row sees; None: those before it
    )

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, **options: object) -> Tensor:
        """Attention [R, Hq, D] of the queries of these rows over their requests' pages of one layer; options are
        further ones of `verify_attention`."""
        attended, _ = ops.verify_attention(
            q,
            keys,
            values,
            self.block_table,
            self.cu_rows,
            self.seq_lens,
            max_rows=self.max_rows,
            mask="causal" if self.tree_mask is None else "tree",
            tree_mask=self.tree_mask,
            **options,
        )
        return attended


class Taps:
    """Hidden states that a pass leaves for a drafter: `hiddens[i]` [R, d] is the output of decoder layer
    `layer_ids[i]` before any norm, and that of layer -1 is the embedding."""

    def __init__(self, layer_ids: Sequence[int]):
        self.layer_ids = layer_ids
        self.hiddens: list[Tensor | None] = [None] * len(layer_ids)

    def see(self, layer: int, hidden: Tensor) -> None:
        for place, wanted in enumerate(self.layer_ids):
            if wanted == layer:
                self.hiddens[place] = hidden


class LlamaModel:
    def __init__(
        self, config: LlamaConfig, weights: LlamaWeights, linear: Linear = LINEARS["specdec"]
    ):
        self.config = config
        self.weights = weights
        self.linear = linear
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self._cos, self._sin = rotary_tables(
            config.head_dim, config.rope_theta, config.max_positions, self.device
        )

    def new_cache(self, num_pages: int, page_size: int) -> PagedKvCache:
        c = self.config
        return PagedKvCache(
            c.num_layers, num_pages, page_size, c.num_kv_heads, c.head_dim, self.dtype, self.device
        )

    def cheap_row_count(self, num_rows: int) -> int:
        return self.linear.cheap_row_count(num_rows, self.device, self.dtype)

    def forward(self, rows: PassRows, cache: PagedKvCache, taps: Taps | None = None) -> Tensor:
        """Hidden states [R, d] after the last layer; keys and values of the rows go into the cache, and hidden
        states of the layers that a drafter reads into `taps`."""
        c, linear, taps = self.config, self.linear, taps or Taps(())
        cos = self._cos[rows.positions].unsqueeze(1)
        sin = self._sin[rows.positions].unsqueeze(1)
        x = self.weights.embedding[rows.token_ids]
        taps.see(-1, x)
        layers = zip(self.weights.layers, cache.keys, cache.values, strict=True)
        for index, (layer, keys, values) in enumerate(layers):
            qkv = linear(self._norm(x, layer.attention_norm), layer.qkv)
            qkv = qkv.view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
            turned = rotate(qkv[:, : c.num_heads + c.num_kv_heads], cos, sin)
            q, k = turned[:, : c.num_heads], turned[:, c.num_heads :]
            v = qkv[:, c.num_heads + c.num_kv_heads :]
            ops.append_kv(k, v, keys, values, rows.slots)
            attended = rows.attend(q, keys, values)
            x = x + linear(attended.flatten(1), layer.attention_out)
            gate, up = linear(self._norm(x, layer.ffn_norm), layer.gate_up).chunk(2, dim=1)
            x = x + linear(functional.silu(gate) * up, layer.ffn_down)
            taps.see(index, x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [R, V] of hidden states [R, d]. The most expensive matrix of a small
        model, so prompt rows, whose logits nobody reads, must not come here."""
        return self.linear(self._norm(hidden, self.weights.final_norm), self.weights.embedding)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.size(-1),), weight, self.config.norm_eps)


def rotary_tables(
    head_dim: int, theta: float, max_positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2j/D), float32 [max_positions, D/2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return angles.cos().to(device), angles.sin().to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns channel pairs (j, j + D/2) of x [R, H, D] by the angle of the row, in float32."""
    low, high = x.float().chunk(2, dim=-1)
    turned = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    return turned.to(x.dtype)
