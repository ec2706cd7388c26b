"""Prompt lookup of examples/ against a search written with Python lists."""

import random

import pytest
import tiny_llama  # noqa: F401  (puts examples/ on the path)
import torch

from drafters import PromptLookup
from engine.batch import Request, new_batch, trim_drafts


def search(tokens, longest, weak_drafts, num_drafts):
    """Longest n-gram first, latest occurrence first, and what follows it up to the end."""
    for n in range(longest, 0, -1):
        suffix = tokens[len(tokens) - n :]
        for begin in range(len(tokens) - n - 1, -1, -1):
            if len(suffix) == n and tokens[begin : begin + n] == suffix:
                limit = num_drafts if n > 1 else min(weak_drafts, num_drafts)
                return tokens[begin + n : begin + n + limit]
    return []


def batch_of(histories, max_new_tokens=50):
    requests = [Request(tokens, max_new_tokens) for tokens in histories]
    table = torch.zeros(len(requests), 1, dtype=torch.int32)
    return new_batch(requests, [], table, torch.device("cpu"))


def proposals(drafts):
    rows, counts = drafts.tokens.tolist(), drafts.counts.tolist()
    for row, count in zip(rows, counts, strict=True):
        assert all(token >= 0 for token in row[:count])
        assert all(token == -1 for token in row[count:])
    return [row[:count] for row, count in zip(rows, counts, strict=True)]


@pytest.mark.parametrize("alphabet", [1, 2, 4, 30])
@pytest.mark.parametrize("longest, weak_drafts, num_drafts", [(4, 3, 7), (1, 3, 7), (6, 9, 3)])
def test_proposals_are_those_of_the_search(alphabet, longest, weak_drafts, num_drafts):
    draw = random.Random(alphabet)
    histories = [
        [draw.randrange(alphabet) for _ in range(draw.randrange(1, 40))] for _ in range(60)
    ]
    drafts = PromptLookup(longest, weak_drafts).propose(batch_of(histories), num_drafts)
    assert proposals(drafts) == [search(h, longest, weak_drafts, num_drafts) for h in histories]


def test_text_behind_the_last_token_is_not_read():
    """A request's row of the history is longer than its text; what lies there must not match."""
    state = batch_of([[5, 6, 7, 5, 6]])
    behind = [7, 5, 6, 9] + [5, 6] * state.history.size(1)
    state.history[0, 5:] = torch.tensor(behind[: state.history.size(1) - 5])
    assert proposals(PromptLookup().propose(state, 7)) == [[7, 5, 6]]


def test_drafts_end_before_the_last_token_a_request_may_get():
    histories = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]] * 3
    state = batch_of(histories, max_new_tokens=3)
    state.max_tokens[1] = state.num_tokens[1] + 1
    state.active[2] = False
    drafts = trim_drafts(state, PromptLookup().propose(state, 7))
    assert proposals(drafts) == [[3, 4], [], []]
