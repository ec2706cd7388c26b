"""verify_attention, slowly and obviously: dense float64, one row and one KV head at a time."""

import math

import torch


def visible_places(row, rows, seq_len, mask, block_table_row, page_size, num_pages):
    """Places of a request that its row number `row` of `rows` sees, in ascending order."""
    last = seq_len - rows + row if mask == "causal" else seq_len - 1
    places = []
    for place in range(max(last + 1, 0)):
        column = place // page_size
        if column < len(block_table_row) and 0 <= block_table_row[column] < num_pages:
            places.append(place)
    return places


def rows_of(cu_rows, b, num_rows):
    begin = min(max(cu_rows[b], 0), num_rows)
    return begin, min(max(cu_rows[b + 1], begin), num_rows)


def verify_attention(
    q, k_cache, v_cache, block_table, cu_rows, seq_lens, *, max_rows, scale=None, mask="causal"
):
    """out and lse, both float64."""
    num_rows, heads, head_dim = q.shape
    num_pages, page_size, kv_heads, v_dim = v_cache.shape
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros(num_rows, heads, v_dim, dtype=torch.float64)
    lse = torch.full((num_rows, heads), -math.inf, dtype=torch.float64)
    table, cu_rows, seq_lens = block_table.tolist(), cu_rows.tolist(), seq_lens.tolist()
    for b, seq_len in enumerate(seq_lens):
        begin, end = rows_of(cu_rows, b, num_rows)
        for row in range(begin, end):
            places = visible_places(
                row - begin, end - begin, seq_len, mask, table[b], page_size, num_pages
            )
            if not places:
                continue
            pages = [table[b][place // page_size] for place in places]
            offsets = [place % page_size for place in places]
            keys, values = k_cache[pages, offsets].double(), v_cache[pages, offsets].double()
            group = heads // kv_heads
            for kv_head in range(kv_heads):
                share = slice(kv_head * group, (kv_head + 1) * group)
                scores = q[row, share].double() @ keys[:, kv_head].T * scale
                lse[row, share] = torch.logsumexp(scores, 1)
                weights = torch.exp(scores - lse[row, share, None])
                out[row, share] = weights @ values[:, kv_head]
    return out, lse


def torch_peer(
    q, k_cache, v_cache, block_table, cu_rows, seq_lens, *, max_rows, scale=None, mask="causal"
):
    """The same by torch: scaled_dot_product_attention on the gathered keys and values, at the dtype
    of q, and logsumexp of float32 scores. Its error against the oracle is what ours is measured by."""
    num_rows, heads, head_dim = q.shape
    num_pages, page_size, kv_heads, v_dim = v_cache.shape
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros(num_rows, heads, v_dim, dtype=q.dtype)
    lse = torch.full((num_rows, heads), -math.inf)
    table, cu_rows, seq_lens = block_table.tolist(), cu_rows.tolist(), seq_lens.tolist()
    for b, seq_len in enumerate(seq_lens):
        begin, end = rows_of(cu_rows, b, num_rows)
        for row in range(begin, end):
            places = visible_places(
                row - begin, end - begin, seq_len, mask, table[b], page_size, num_pages
            )
            if not places:
                continue
            pages = [table[b][place // page_size] for place in places]
            offsets = [place % page_size for place in places]
            group = heads // kv_heads
            keys = k_cache[pages, offsets].transpose(0, 1).repeat_interleave(group, 0)
            values = v_cache[pages, offsets].transpose(0, 1).repeat_interleave(group, 0)
            queries = q[row][:, None]
            scores = torch.bmm(queries.float(), keys.float().mT)[:, 0] * scale
            lse[row] = torch.logsumexp(scores, 1)
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
        k_cache.to(dtype),
        v_cache.to(dtype),
        table.int(),
        cu_rows.int(),
        torch.tensor(seq_lens, dtype=torch.int32),
    )
