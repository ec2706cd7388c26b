"""inject_kv, slowly and obviously: float64, one row, one layer, one head at a time."""

import torch

from oracles.tree_links import spans


def written_rows(positions, slots, max_position, places, cu_rows=None, commit_rows=None):
    """Rows that write into a cache of so many places."""
    rows = set(range(len(slots)))
    if cu_rows is not None:
        owned = spans(cu_rows.tolist(), len(slots))
        counts = [n for _, n in owned] if commit_rows is None else commit_rows.tolist()
        rows = {
            first + j
            for (first, count), commit in zip(owned, counts, strict=True)
            for j in range(count)
            if j < commit
        }
    return [
        r
        for r in sorted(rows)
        if 0 <= int(slots[r]) < places and 0 <= int(positions[r]) < max_position
    ]


def normed(x, weight, eps):
    """RMSNorm of a head; without weights the head itself."""
    if weight is None:
        return x.double()
    x = x.double()
    return x / (x.square().mean() + eps).sqrt() * weight.double()


def turned(y, cos, sin, interleaved):
    """The first channels turned, pair by pair."""
    out, pairs = y.clone(), len(cos)
    for j in range(pairs):
        a, b = (2 * j, 2 * j + 1) if interleaved else (j, j + pairs)
        c, s = float(cos[j]), float(sin[j])
        out[a] = y[a] * c - y[b] * s
        out[b] = y[b] * c + y[a] * s
    return out


def scale_of(scale, layer, head):
    if scale is None:
        return 1.0
    if scale.dim() == 2:
        return float(scale[layer, head])
    return float(scale[layer if len(scale) > 1 else 0])


def inject_kv(
    kv, k_norm_weight, cos, sin, positions, slots, k_caches, v_caches, *, eps, interleaved=False,
    cu_rows=None, commit_rows=None, k_scale=None, v_scale=None,
):  # fmt: skip
    """New caches (k_caches, v_caches) in float64: what is stored, before it is rounded."""
    out = [cache.double() for cache in k_caches], [cache.double() for cache in v_caches]
    for layer, (k, v) in enumerate(zip(*out, strict=True)):
        pages, page_size = k.shape[:2]
        rows = written_rows(positions, slots, len(cos), pages * page_size, cu_rows, commit_rows)
        for r in rows:
            place = int(slots[r]) // page_size, int(slots[r]) % page_size
            at = int(positions[r])
            for h in range(kv.shape[3]):
                weight = None if k_norm_weight is None else k_norm_weight[layer]
                y = normed(kv[r, layer, 0, h], weight, eps)
                y = turned(y, cos[at], sin[at], interleaved)
                k[place][h] = y / scale_of(k_scale, layer, h)
                v[place][h] = kv[r, layer, 1, h].double() / scale_of(v_scale, layer, h)
    return out


def angles(max_position, rotary_dim, theta=1e4):
    """cos and sin tables."""
    frequency = theta ** (-torch.arange(0, rotary_dim, 2).double() / max(rotary_dim, 1))
    angle = torch.arange(max_position).double()[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


NAMES = ("kv", "k_norm_weight", "cos", "sin", "positions", "slots", "k_caches", "v_caches")


def random_case(
    generator, rows=7, layers=3, heads=3, head_dim=64, rotary_dim=None, pages=6, page_size=4,
    dtype=torch.float32, cache_dtype=None, max_position=50, eps=1e-6,
):  # fmt: skip
    """Arguments by name: distinct slots, one of them -1, one position outside the tables."""
    g = generator
    rotary_dim = head_dim // 2 * 2 if rotary_dim is None else rotary_dim
    cos, sin = angles(max_position, rotary_dim)
    positions = torch.randint(0, max_position, (rows,), generator=g)
    slots = torch.randperm(pages * page_size, generator=g)[:rows]
    if rows > 3:
        slots[1], positions[2] = -1, max_position
    shape = (layers, pages, page_size, heads, head_dim)
    k_caches, v_caches = torch.randn(2, *shape, generator=g).to(cache_dtype or dtype)
    return {
        "kv": (3 * torch.randn(rows, layers, 2, heads, head_dim, generator=g)).to(dtype),
        "k_norm_weight": (1 + 0.3 * torch.randn(layers, head_dim, generator=g)).to(dtype),
        "cos": cos,
        "sin": sin,
        "positions": positions,
        "slots": slots,
        "k_caches": list(k_caches),
        "v_caches": list(v_caches),
        "eps": eps,
    }
