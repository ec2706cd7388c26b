"""verify_attention, slowly and obviously: dense float64, one row and one KV head at a time."""

import math

import torch


def sees(row, place, prefix, mask="causal", tree_mask=None, positions=None, window=-1):
    """Whether row `row` of a request sees this place of it. tree_mask and positions: of its rows."""
    other = place - prefix  # a row of the pass, or negative

    def position(row):
        return positions[row] if positions is not None and row >= 0 else prefix + row

    if mask == "causal" and other > row:
        return False
    if mask == "tree" and other >= 0:
        words = tree_mask[row]
        if other // 32 >= len(words) or not words[other // 32] >> other % 32 & 1:
            return False
    return window < 0 or abs(position(row) - position(other)) < window


def visible_places(b, table, cu_rows, seq_lens, num_rows, page_size, num_pages, **masks):
    """For every row of request b: its index in q and the places that it sees, in ascending order."""
    begin, end = rows_of(cu_rows, b, num_rows)
    own = {
        name: t[begin:end].tolist() if isinstance(t, torch.Tensor) else t
        for name, t in masks.items()
    }
    shown = [
        place
        for place in range(min(max(seq_lens[b], 0), len(table[b]) * page_size))
        if 0 <= table[b][place // page_size] < num_pages
    ]
    prefix = seq_lens[b] - (end - begin)
    for row in range(end - begin):
        yield begin + row, [place for place in shown if sees(row, place, prefix, **own)]


def rows_of(cu_rows, b, num_rows):
    begin = min(max(cu_rows[b], 0), num_rows)
    return begin, min(max(cu_rows[b + 1], begin), num_rows)


def unscaled(cache, scale):
    """What a cache stands for, in float64."""
    return cache.double() if scale is None else cache.double() * scale.double().reshape(-1, 1)


def verify_attention(
    q,
    k_cache,
    v_cache,
    block_table,
    cu_rows,
    seq_lens,
    *,
    max_rows,
    scale=None,
    softcap=0.0,
    sinks=None,
    k_scale=None,
    v_scale=None,
    **masks,
):
    """out and lse, both float64."""
    k_cache, v_cache = unscaled(k_cache, k_scale), unscaled(v_cache, v_scale)
    num_rows, heads, head_dim = q.shape
    num_pages, page_size, kv_heads, v_dim = v_cache.shape
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros(num_rows, heads, v_dim, dtype=torch.float64)
    lse = torch.full((num_rows, heads), -math.inf, dtype=torch.float64)
    table, cu_rows, seq_lens = block_table.tolist(), cu_rows.tolist(), seq_lens.tolist()
    sizes = (num_rows, page_size, num_pages)
    for b in range(len(seq_lens)):
        for row, places in visible_places(b, table, cu_rows, seq_lens, *sizes, **masks):
            if not places:
                continue
            pages = [table[b][place // page_size] for place in places]
            offsets = [place % page_size for place in places]
            keys, values = k_cache[pages, offsets].double(), v_cache[pages, offsets].double()
            group = heads // kv_heads
            for kv_head in range(kv_heads):
                share = slice(kv_head * group, (kv_head + 1) * group)
                scores = q[row, share].double() @ keys[:, kv_head].T * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                lse[row, share] = torch.logsumexp(scores, 1)
                if sinks is not None:
                    lse[row, share] = torch.logaddexp(lse[row, share], sinks[share].double())
                weights = torch.exp(scores - lse[row, share, None])
                out[row, share] = weights @ values[:, kv_head]
    return out, lse


def torch_peer(
    q,
    k_cache,
    v_cache,
    block_table,
    cu_rows,
    seq_lens,
    *,
    max_rows,
    scale=None,
    softcap=0.0,
    sinks=None,
    k_scale=None,
    v_scale=None,
    **masks,
):
    """The same by torch: scaled_dot_product_attention (with a soft cap or sinks, its steps) on the
    gathered keys and values, at the dtype of q, and logsumexp of float32 scores. Its error against the
    oracle is what ours is measured by. A float8 cache is its values at the dtype of q, unscaled before."""
    if k_cache.dtype == torch.float8_e4m3fn:
        k_cache = unscaled(k_cache, k_scale).to(q.dtype)
        v_cache = unscaled(v_cache, v_scale).to(q.dtype)
    num_rows, heads, head_dim = q.shape
    num_pages, page_size, kv_heads, v_dim = v_cache.shape
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros(num_rows, heads, v_dim, dtype=q.dtype)
    lse = torch.full((num_rows, heads), -math.inf)
    table, cu_rows, seq_lens = block_table.tolist(), cu_rows.tolist(), seq_lens.tolist()
    sizes = (num_rows, page_size, num_pages)
    for b in range(len(seq_lens)):
        for row, places in visible_places(b, table, cu_rows, seq_lens, *sizes, **masks):
            if not places:
                continue
            pages = [table[b][place // page_size] for place in places]
            offsets = [place % page_size for place in places]
            group = heads // kv_heads
            keys = k_cache[pages, offsets].transpose(0, 1).repeat_interleave(group, 0)
            values = v_cache[pages, offsets].transpose(0, 1).repeat_interleave(group, 0)
            queries = q[row][:, None]
            scores = torch.bmm(queries.float(), keys.float().mT)[:, 0] * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            lse[row] = torch.logsumexp(scores, 1)
            if sinks is not None:
                lse[row] = torch.logaddexp(lse[row], sinks)
            if softcap or sinks is not None:
                weights = torch.exp(scores - lse[row, :, None]).to(q.dtype)
                out[row] = torch.bmm(weights[:, None], values)[:, 0]
                continue
            out[row] = torch.nn.functional.scaled_dot_product_attention(
                queries[None], keys[None], values[None], scale=scale
            )[0, :, 0]
    return out, lse


def random_case(
    generator,
    rows,
    seq_lens,
    heads=4,
    kv_heads=2,
    head_dim=64,
    v_dim=None,
    page_size=16,
    dtype=torch.float32,
    cache_dtype=None,
    spare_rows=0,
    spare_pages=2,
):
    """Arguments for requests with rows[b] rows and seq_lens[b] places, on shuffled pages.

    Everything that no row sees is NaN: unused pages, places behind the end, and entries of the block
    table behind the last used column are garbage.
    """
    v_dim = v_dim or head_dim
    batch = len(rows)
    columns = [max(-(-n // page_size), 0) for n in seq_lens]
    width = max(columns, default=0) + 1
    num_pages = sum(columns) + spare_pages
    order = torch.randperm(num_pages, generator=generator).tolist()
    table = torch.full((batch, width), -(2**31), dtype=torch.int64)
    table[:, ::2] = 2**31 - 1  # garbage of both signs
    k_cache = torch.full((num_pages, page_size, kv_heads, head_dim), math.nan)
    v_cache = torch.full((num_pages, page_size, kv_heads, v_dim), math.nan)
    for b in range(batch):
        for column in range(columns[b]):
            page = order.pop()
            table[b, column] = page
            used = min(seq_lens[b] - column * page_size, page_size)
            k_cache[page, :used] = torch.randn(used, kv_heads, head_dim, generator=generator)
            v_cache[page, :used] = torch.randn(used, kv_heads, v_dim, generator=generator)
    total = sum(rows) + spare_rows
    q = torch.randn(total, heads, head_dim, generator=generator)
    q[sum(rows) :] = math.nan
    cu_rows = torch.tensor([0, *torch.tensor(rows, dtype=torch.int64).cumsum(0).tolist()])
    return (
        q.to(dtype),
        k_cache.to(cache_dtype or dtype),
        v_cache.to(cache_dtype or dtype),
        table.int(),
        cu_rows.int(),
        torch.tensor(seq_lens, dtype=torch.int32),
    )


def ancestor_words(parents, num_words):
    """Rows of a tree mask of one request: bit j of row i is set where j is i or an ancestor of it."""
    rows = []
    for i, parent in enumerate(parents):
        words = list(rows[parent]) if parent >= 0 else [0] * num_words
        words[i // 32] |= 1 << i % 32
        rows.append(words)
    return rows


def random_trees(generator, rows, seq_lens, num_words=None):
    """tree_mask and positions of one random tree per request, with garbage in the bits behind it."""
    num_words = num_words or -(-max(rows) // 32)
    masks, positions = [], []
    for count, seq_len in zip(rows, seq_lens, strict=True):
        parents, depth = [], []
        for i in range(count):
            parent = int(torch.randint(i, (1,), generator=generator)) if i else -1
            parents.append(parent)
            depth.append(depth[parent] + 1 if i else 0)
        junk = ~((1 << count) - 1)
        for words in ancestor_words(parents, num_words):
            masks.append([word | junk >> 32 * n & 0xFFFFFFFF for n, word in enumerate(words)])
        positions += [seq_len - count + d for d in depth]
    words = torch.tensor(masks, dtype=torch.int64).reshape(-1, num_words)
    return (words - (words >> 31 << 32)).int(), torch.tensor(positions, dtype=torch.int64)
