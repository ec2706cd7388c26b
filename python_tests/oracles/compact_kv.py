"""compact_kv, slowly and obviously: every source is copied aside, then put in its place."""

import torch

from oracles.tree_links import spans


def moves(slots, cu_rows, path, num_accepted):
    """(source slot, target slot) of every path entry that is a row of its request."""
    found = []
    for b, (first, count) in enumerate(spans(cu_rows, len(slots))):
        last = min(int(num_accepted[b]), path.shape[1] - 1, count - 1)
        for i in range(last + 1):
            row = int(path[b, i])
            if 0 <= row < count:
                found.append((int(slots[first + row]), int(slots[first + i])))
    return found


def compact_kv(caches, slots, cu_rows, path, num_accepted):
    """Returns new caches; the arguments stay as they are."""
    out = []
    for old in caches:
        cache = old.clone()
        places, page_size = old.shape[0] * old.shape[1], old.shape[1]
        for source, target in moves(slots, cu_rows, path, num_accepted):
            if 0 <= source < places and 0 <= target < places:
                moved = old[source // page_size, source % page_size]
                cache[target // page_size, target % page_size] = moved
        out.append(cache)
    return out


def random_path(generator, rows, width):
    """An ascending path of a tree from its root, padded with -1, and its number of accepted drafts."""
    path = [0] if rows else []
    while len(path) < width and path and path[-1] + 1 < rows:
        if torch.rand(1, generator=generator) < 0.2:
            break
        low = path[-1] + 1
        path.append(int(torch.randint(low, min(rows, low + 3), (1,), generator=generator)))
    return path + [-1] * (width - len(path)), max(len(path) - 1, 0)


def random_case(generator, rows=(7, 0, 1, 12), width=5, pages=10, page_size=4, padding=2):
    """slots (distinct), cu_rows, path and num_accepted for tests."""
    total = sum(rows) + padding
    slots = torch.randperm(pages * page_size, generator=generator)[:total]
    paths = [random_path(generator, count, width) for count in rows]
    cu_rows = torch.tensor([0, *rows]).cumsum(0).int()
    path = torch.tensor([p for p, _ in paths], dtype=torch.int32).view(len(rows), width)
    num_accepted = torch.tensor([n for _, n in paths], dtype=torch.int32)
    return slots, cu_rows, path, num_accepted
