"""A small DFlash drafter (algorithms of arXiv 2602.06036) whose every number can be written down twice: with the
context's features projected and concatenated, and over paged caches that inject_kv fills."""

import torch
from oracles.inject_kv import angles

EPS = 1e-6


def rms(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def rotate(x, cos, sin, interleaved):
    """x [rows, heads, D] turned in its first channels; cos, sin [rows, rotary_dim / 2]."""
    pairs = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([turned, rest], -1)


class Drafter:
    """Weights in float64; two layers, grouped queries, three features of different widths."""

    layers, q_heads, kv_heads, head_dim, width, inner = 2, 4, 2, 64, 24, 40
    features = (16, 24, 8)

    def __init__(self, generator, interleaved, rotary_dim, max_position=80):
        def random(*shape):
            weight = torch.randn(*shape, generator=generator) / shape[-1] ** 0.5
            return weight.double()

        def gains(n):
            return (1 + 0.2 * torch.randn(n, generator=generator)).double()

        q, kv, d = self.q_heads * self.head_dim, self.kv_heads * self.head_dim, self.width
        self.fc, self.hidden_norm = random(d, sum(self.features)), gains(d)
        self.blocks = [
            {
                "input_norm": gains(d), "post_norm": gains(d), "q": random(q, d), "k": random(kv, d),
                "v": random(kv, d), "o": random(d, q), "q_norm": gains(self.head_dim),
                "k_norm": gains(self.head_dim), "up": random(self.inner, d), "gate": random(self.inner, d),
                "down": random(d, self.inner),
            }
            for _ in range(self.layers)
        ]  # fmt: skip
        self.interleaved = interleaved
        self.cos, self.sin = angles(max_position, rotary_dim)

    def to(self, dtype):
        """The same weights in another dtype."""
        other = object.__new__(Drafter)
        other.interleaved = self.interleaved
        other.fc, other.hidden_norm = self.fc.to(dtype), self.hidden_norm.to(dtype)
        other.blocks = [{k: v.to(dtype) for k, v in block.items()} for block in self.blocks]
        other.cos, other.sin = self.cos.to(dtype), self.sin.to(dtype)
        return other

    def heads(self, x, weight):
        return (x @ weight.T).view(len(x), -1, self.head_dim)

    def queries(self, x, block, positions):
        q = rms(self.heads(x, block["q"]), block["q_norm"])
        return rotate(q, self.cos[positions], self.sin[positions], self.interleaved)

    def finish(self, hidden, attended, block):
        """Output projection, residuals and the MLP."""
        hidden = hidden + attended.flatten(1) @ block["o"].T
        x = rms(hidden, block["post_norm"])
        gate = torch.nn.functional.silu(x @ block["gate"].T)
        return hidden + (gate * (x @ block["up"].T)) @ block["down"].T

    def concatenated(self, context, hidden, start):
        """Of one request: features of all positions before start, and the block's hidden rows, which all see
        the context and each other."""
        context = rms(torch.cat(context, -1) @ self.fc.T, self.hidden_norm)
        positions = torch.arange(start + len(hidden))
        for block in self.blocks:
            x = rms(hidden, block["input_norm"])
            q = self.queries(x, block, positions[start:])
            both = torch.cat([context, x])
            k = rms(self.heads(both, block["k"]), block["k_norm"])
            k = rotate(k, self.cos[positions], self.sin[positions], self.interleaved)
            v = self.heads(both, block["v"])
            k, v = (t.repeat_interleave(self.q_heads // self.kv_heads, 1) for t in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / self.head_dim**0.5
            attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
            hidden = self.finish(hidden, attended, block)
        return hidden
