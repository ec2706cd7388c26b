"""next_round, slowly and obviously: one token, then one row of the block at a time."""

import torch

NAMES = ["input_ids", "positions", "slots", "seq_lens", "num_emitted", "finished"]


def emit(row, num_accepted, seq_len, stops, max_len):
    """(tokens emitted, finished) of an active request."""
    emitted = []
    for token in row[: min(max(num_accepted, 0), len(row) - 1) + 1]:
        if token < 0 or seq_len + 1 + len(emitted) >= max_len:
            break
        emitted.append(token)
        if token in stops:
            return emitted, True
    return emitted, seq_len + 1 + len(emitted) >= max_len


def slot_of(pages, place, page_size):
    """pages: a request's row of the block table."""
    column = place // page_size
    if place < 0 or column >= len(pages) or pages[column] < 0:
        return -1
    return pages[column] * page_size + place % page_size


def next_round(
    tokens, num_accepted, seq_lens, block_table, *, page_size, block_len, mask_token_id,
    stop_token_ids=None, max_len=None,
):  # fmt: skip
    batch = tokens.shape[0]
    stops = [] if stop_token_ids is None else [s for s in stop_token_ids.tolist() if s >= 0]
    input_ids = torch.full((batch, block_len), mask_token_id, dtype=tokens.dtype)
    positions = torch.zeros(batch, block_len, dtype=torch.int64)
    slots = torch.full((batch, block_len), -1, dtype=torch.int64)
    new_lens, num_emitted, finished = seq_lens.clone(), torch.zeros_like(seq_lens), []
    for b in range(batch):
        row, seq_len = tokens[b].tolist(), int(seq_lens[b])
        limit = 2**31 - 1 if max_len is None else int(max_len[b])
        if not row or row[0] < 0:
            finished.append(False)
            continue
        emitted, done = emit(row, int(num_accepted[b]), seq_len, stops, limit)
        finished.append(done)
        num_emitted[b] = len(emitted)
        new_lens[b] = seq_len + len(emitted)
        if done or not block_len:
            continue
        input_ids[b, 0] = emitted[-1]
        for j in range(block_len):
            place = int(new_lens[b]) + j
            positions[b, j] = min(place, limit - 1) if place >= limit else place
            if place < limit:
                slots[b, j] = slot_of(block_table[b].tolist(), place, page_size)
    finished = torch.tensor(finished, dtype=torch.bool)
    return input_ids, positions, slots, new_lens, num_emitted, finished


def random_case(
    generator, batch=7, width=5, block_len=6, page_size=4, dtype=torch.int64, limits=True
):
    """Arguments by name: ragged acceptance, stop tokens, inactive requests, missing pages."""

    def randint(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    tokens = randint(0, 12, batch, width).to(dtype)
    num_accepted = randint(0, width, batch).int()
    for b in range(batch):
        tokens[b, int(num_accepted[b]) + 1 :] = -1
    tokens[randint(0, 6, batch) == 0] = -1
    seq_lens = randint(0, 30, batch).int()
    block_table = randint(-1, 50, batch, 8).int()
    case = {
        "tokens": tokens,
        "num_accepted": num_accepted,
        "seq_lens": seq_lens,
        "block_table": block_table,
        "page_size": page_size,
        "block_len": block_len,
        "mask_token_id": 99,
    }
    if limits:
        case["stop_token_ids"] = torch.tensor([-1, 3, 11])
        case["max_len"] = seq_lens + randint(-2, 3 + width + block_len, batch).int()
    return case
