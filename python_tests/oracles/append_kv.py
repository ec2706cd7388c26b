"""append_kv, slowly and obviously: one row, one head at a time."""

import torch


def append_kv(k, v, k_cache, v_cache, slots, k_scale=None, v_scale=None):
    """Returns new caches; the arguments stay as they are."""
    out = []
    for rows, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        cache = cache.clone()
        num_pages, page_size = cache.shape[:2]
        for r, slot in enumerate(slots.tolist()):
            if not 0 <= slot < num_pages * page_size:
                continue
            row = rows[r]
            if cache.dtype != rows.dtype:
                row = row.float()
                if scale is not None:
                    row = row / scale.reshape(-1, 1)
                row = row.clamp(-448.0, 448.0)  # clamp keeps NaN
            cache[slot // page_size, slot % page_size] = row.to(cache.dtype)
        out.append(cache)
    return out


def random_case(
    generator, rows=7, heads=3, head_dim=64, v_dim=None, pages=5, page_size=4, dtype=None
):
    """k, v, caches and slots (distinct, some -1) for tests."""
    dtype = dtype or torch.float32
    v_dim = v_dim or head_dim
    k = torch.randn(rows, heads, head_dim, generator=generator).to(dtype)
    v = torch.randn(rows, heads, v_dim, generator=generator).to(dtype)
    k_cache = torch.randn(pages, page_size, heads, head_dim, generator=generator).to(dtype)
    v_cache = torch.randn(pages, page_size, heads, v_dim, generator=generator).to(dtype)
    slots = torch.randperm(pages * page_size, generator=generator)[:rows]
    if rows > 2:
        slots[1] = -1
    return k, v, k_cache, v_cache, slots
