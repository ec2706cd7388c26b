"""specdec_ext.compat.vllm: published cases, the peer's semantics request by request, exact laws, callers."""

import itertools
import json
import pathlib
from types import SimpleNamespace

import backends
import numpy as np
import pytest
import torch
from compare import DECISION_BAND, assert_decisions, assert_formula, assert_rate, assert_same
from compat_callers import DEVICES, on, parameters, use_backend, with_import_changed, with_peer
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import compat_vllm_v1 as oracle1
from oracles import compat_vllm_v2 as oracle2
from oracles.choices import Every

import specdec_ext
from specdec_ext.compat.vllm import v1, v2

CASES = pathlib.Path(__file__).parent / "cases"
SIGNATURES1 = {
    "rejection_sample": "draft_token_ids num_draft_tokens max_spec_len cu_num_draft_tokens draft_probs target_logits "
    "bonus_token_ids sampling_metadata synthetic_mode=False synthetic_conditional_rates=None use_fp64_gumbel=False "
    "fly_window_size=None fly_entropy_threshold=None fly_entropy_top_k=3",
    "eagle_step_update_slot_mapping_and_metadata": "positions_1d block_table_tensor seq_lens block_size max_model_len "
    "out_clamped_positions out_slot_mapping input_batch_size=None",
    "_eagle_prepare_inputs_padded": "cu_num_draft_tokens valid_sampled_tokens_count query_start_loc_gpu "
    "token_indices_to_sample num_rejected_tokens_gpu num_reqs",
    "_eagle_prepare_next_token_padded": "sampled_token_ids discard_request_mask backup_next_token_ids next_token_ids "
    "valid_sampled_tokens_count vocab_size num_sampled_tokens_per_req num_reqs stride_sampled_token_ids BLOCK_SIZE_TOKENS=0",
    "_copy_and_expand_eagle_inputs": "target_token_ids_ptr target_positions_ptr next_token_ids_ptr out_input_ids_ptr "
    "out_positions_ptr out_is_rejected_token_mask_ptr out_is_masked_token_mask_ptr out_new_token_indices_ptr "
    "out_hidden_state_mapping_ptr query_start_loc_ptr query_end_loc_ptr padding_token_id parallel_drafting_token_id "
    "total_input_tokens num_padding_slots_per_request shift_input_ids BLOCK_SIZE_TOKENS=0 batch_size=0 num_blocks=0",
    "_copy_and_expand_dflash_inputs": "next_token_ids_ptr target_positions_ptr out_input_ids_ptr "
    "out_context_positions_ptr out_query_positions_ptr out_context_slot_mapping_ptr out_query_slot_mapping_ptr "
    "out_token_indices_ptr block_table_ptr query_start_loc_ptr num_rejected_tokens_ptr block_table_stride=0 "
    "parallel_drafting_token_id block_size num_query_per_req num_speculative_tokens total_input_tokens "
    "max_tokens_per_req=0 triton_block_size=0 has_num_rejected=False",
}  # fmt: skip
SIGNATURES2 = {
    "rejection_sample": "target_logits draft_logits draft_sampled cu_num_logits pos idx_mapping expanded_idx_mapping "
    "expanded_local_pos temperature seed num_speculative_steps synthetic_conditional_rates=None use_fp64=False "
    "use_block_verification=False contexts=None watermarking=None watermarking_skip_mask=None watermark_key=None "
    "fly_window_size=0 fly_entropy_threshold=0.3 fly_entropy_top_k=3",
    "prepare_prefill_inputs": "last_token_indices current_draft_step input_buffers input_batch num_sampled num_rejected "
    "last_sampled next_prefill_tokens max_num_reqs",
    "prepare_decode_inputs": "draft_tokens target_seq_lens num_rejected input_buffers sample_src_positions max_model_len "
    "max_num_reqs advance_draft_positions=True",
    "update_draft_inputs": "draft_tokens current_draft_step hidden_states output_draft_tokens next_input_hidden_states "
    "input_buffers sample_src_positions num_reqs max_model_len num_speculative_steps advance_draft_positions=True",
    "prepare_dflash_inputs": "input_buffers query_slot_mapping context_positions context_slot_mapping sample_indices "
    "sample_pos sample_idx_mapping temperature seeds input_batch num_sampled num_rejected last_sampled "
    "next_prefill_tokens input_temperature input_seeds block_table block_size cp_rank cp_size cp_interleave "
    "parallel_drafting_token_id num_query_per_req num_speculative_steps max_num_reqs max_num_tokens max_model_len "
    "sample_from_anchor=False num_reqs_override=None",
}  # fmt: skip


@pytest.mark.parametrize(
    ("module", "name", "wanted"),
    [(v1, *item) for item in SIGNATURES1.items()] + [(v2, *item) for item in SIGNATURES2.items()],
)
def test_signatures_are_the_peers(module, name, wanted):
    assert parameters(getattr(module, name)) == wanted.split()


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def copied(value):
    if torch.is_tensor(value):
        return value.clone()
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**{k: copied(v) for k, v in vars(value).items()})
    return value


def tensors(arguments, prefix=""):
    for key, value in arguments.items():
        if torch.is_tensor(value):
            yield prefix + key, value
        elif isinstance(value, SimpleNamespace):
            yield from tensors(vars(value), f"{key}.")


def run_both(module, oracle, name, arguments):
    """A function that writes in place and its oracle on copies; every tensor must end up the same."""
    mine, theirs = ({k: copied(v) for k, v in arguments.items()} for _ in range(2))
    getattr(module, name)(**mine)
    getattr(oracle, name)(**theirs)
    for (key, got), (_, wanted) in zip(tensors(mine), tensors(theirs), strict=True):
        assert_same(got, wanted, f"{name}: {key}")
    return mine


# --- V1: rejection_sample ---------------------------------------------------------------------------
def metadata(temperature, generators=None):
    temperature = torch.tensor(temperature, dtype=torch.float32)
    return SimpleNamespace(
        all_greedy=bool((temperature == 0).all()),
        all_random=bool((temperature != 0).all()),
        temperature=temperature,
        generators=generators or {},
    )


def v1_case(
    drafts, target_logits, temperature, draft_probs=None, bonus=None, generators=None, most=None
):
    counts = [len(row) for row in drafts]
    return {
        "draft_token_ids": torch.tensor([x for row in drafts for x in row], dtype=torch.int32),
        "num_draft_tokens": counts,
        "max_spec_len": max(counts, default=0) if most is None else most,
        "cu_num_draft_tokens": torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32),
        "draft_probs": draft_probs,
        "target_logits": target_logits,
        "bonus_token_ids": torch.tensor(bonus or [7] * len(drafts), dtype=torch.int32)[:, None],
        "sampling_metadata": metadata(temperature, generators),
    }  # fmt: skip


PUBLISHED = json.loads((CASES / "chain_greedy_vllm.json").read_text())["cases"]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    chosen = backends.get(request.param)
    use_backend(monkeypatch, chosen)
    return chosen


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda c: c["name"])
def test_v1_greedy_cases_of_the_peer(backend, monkeypatch, case):
    use_backend(monkeypatch, backend)
    argmax = torch.tensor([x for row in case["target_argmax"] for x in row], dtype=torch.long)
    logits = torch.nn.functional.one_hot(argmax, 100).float() * 100
    arguments = v1_case(
        case["draft_tokens"], logits, [0.0] * len(case["draft_tokens"]), bonus=case["bonus_token"]
    )
    out = v1.rejection_sample(**on(backend, arguments))
    assert out.cpu().tolist() == case["expected"] and out.dtype == torch.int32


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda c: c["name"])
def test_v2_greedy_cases_of_the_peer(backend, monkeypatch, case):
    """The bonus token is the argmax of the row behind the drafts here."""
    use_backend(monkeypatch, backend)
    rows = [
        [*row, bonus] for row, bonus in zip(case["target_argmax"], case["bonus_token"], strict=True)
    ]
    logits = torch.nn.functional.one_hot(
        torch.tensor([x for row in rows for x in row]), 100
    ).float()
    ids = [x for row in case["draft_tokens"] for x in [0, *row]]
    most = max(len(row) for row in case["draft_tokens"])
    sampled, count = v2.rejection_sample(**on(backend, v2_case(
        logits, None, ids, [len(row) + 1 for row in case["draft_tokens"]], [0.0] * len(rows), most
    )))  # fmt: skip
    assert sampled.cpu().tolist() == case["expected"] and sampled.dtype == torch.int64
    wanted = [sum(x >= 0 for x in row) for row in case["expected"]]
    assert count.cpu().tolist() == wanted and count.dtype == torch.int32


def random_v1(
    seed, batch=9, vocab=11, most=4, with_probs=True, greedy=(), seeds=(), synthetic=False
):
    g = seeded(seed)
    counts = torch.randint(0, most + 1, (batch,), generator=g).tolist()
    counts[0] = most
    total = sum(counts)
    target = torch.randn(total, vocab, generator=g) * 2
    probs = (target + torch.randn(total, vocab, generator=g) * 0.7).softmax(-1)
    ids = probs.multinomial(1, generator=g)[:, 0]
    drafts = [x.tolist() for x in ids.split(counts)]
    case = v1_case(
        drafts, target, [0.0 if b in greedy else 1.0 for b in range(batch)],
        probs if with_probs else None, list(range(batch)), {b: seeded(seed + b) for b in seeds}, most,
    )  # fmt: skip
    if synthetic:
        case |= {
            "synthetic_mode": True,
            "synthetic_conditional_rates": torch.rand(most, generator=g),
        }
    return case


@pytest.mark.parametrize("with_probs", [True, False])
@pytest.mark.parametrize("greedy", [(), (0, 3), tuple(range(9))], ids=["random", "mixed", "greedy"])
@pytest.mark.parametrize("synthetic", [False, True])
@pytest.mark.parametrize("fp64", [False, True])
def test_v1_with_the_peers_random_numbers(with_probs, greedy, synthetic, fp64):
    """Seeded requests draw from their generators, the others from torch's: the same calls in the same order."""
    for seed in range(4):
        outs = []
        for function in (v1.rejection_sample, oracle1.rejection_sample):
            case = random_v1(
                seed, with_probs=with_probs, greedy=greedy, seeds=(1, 4), synthetic=synthetic
            )
            torch.manual_seed(seed)
            outs.append(function(**case, use_fp64_gumbel=fp64))
        assert_same(*outs)


def test_v1_laws():
    """First and second token of many requests have the target's law, and so have those behind a placeholder."""
    batch, vocab = 10000, 5
    g = seeded(3)
    p, q = (torch.randn(2, vocab, generator=g).mul(1.5) for _ in range(2))
    ids = torch.stack([q[j].softmax(-1).multinomial(batch, True, generator=g) for j in range(2)], 1)
    ids[::2, 1] = -1
    case = v1_case(ids.tolist(), p.repeat(batch, 1), [1.0] * batch, q.softmax(-1).repeat(batch, 1))
    torch.manual_seed(11)
    out = v1.rejection_sample(**case)
    law = p.softmax(-1).numpy()
    assert_rate(torch.bincount(out[:, 0], minlength=vocab).numpy() / batch, law[0], batch, "first")
    for rows, what in ((out[::2], "behind a placeholder"), (out[1::2], "second")):
        second = rows[rows[:, 1] >= 0, 1]
        assert_rate(
            torch.bincount(second, minlength=vocab).numpy() / len(second), law[1], len(second), what
        )
    assert (out[::2, 2] == -1).all()


def test_v1_edges(monkeypatch):
    """A draft of probability 0 is never accepted, a residual of no mass is p again, NaN stays in its request."""
    p = torch.tensor(
        [[0.0, 0.5, 0.5, 0.0], [0.25, 0.25, 0.25, 0.25], [0.0, 0.5, 0.5, 0.0], [0.0, 0.5, 0.5, 0.0]]
    )
    q = torch.tensor(
        [[1.0, 0, 0, 0], [0.25, 0.25, 0.25, 0.25], [0.0, 0.5, 0.5, 0.0], [0.0, 0.5, 0.5, 0.0]]
    )
    case = v1_case([[0], [9], [3], [1]], p.log(), [1.0] * 4, q)
    for seed in range(20):
        torch.manual_seed(seed)
        out = v1.rejection_sample(**case)
        assert out[0, 0] in (1, 2) and out[1, 0] in range(4) and out[2, 0] in (1, 2)
        assert out[3].tolist() == [1, 7]
    with monkeypatch.context() as patch:
        patch.setattr(v1, "_uniforms", lambda count, *rest: torch.zeros(count, dtype=torch.float64))
        assert v1.rejection_sample(**case)[0, 0] in (1, 2)  # nor with a coin of 0
    case["target_logits"][1] = float("nan")
    torch.manual_seed(19)
    again = v1.rejection_sample(**case)
    assert again[[0, 2, 3]].tolist() == out[[0, 2, 3]].tolist() and again[1, 0] in range(4)
    empty = v1_case([], torch.zeros(0, 4), [])
    assert v1.rejection_sample(**empty).shape == (0, 1)
    none = v1_case([[], []], torch.zeros(0, 4), [1.0, 0.0], most=2)
    assert v1.rejection_sample(**none).tolist() == [[7, -1, -1]] * 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cu_num_draft_tokens": torch.zeros(3, dtype=torch.int32)}, "cu_num_draft_tokens: wanted size 9 (B of num_draft_tokens), got 3"),
        ({"target_logits": torch.zeros(2, 11)}, "target_logits: wanted size"),
        ({"draft_probs": torch.zeros(2, 11)}, "draft_probs: wanted size"),
        ({"num_draft_tokens": [1] * 9}, "num_draft_tokens: wanted a sum of"),
        ({"max_spec_len": 2}, "num_draft_tokens: wanted at most 2 each, got 4"),
        ({"fly_window_size": 2}, "fly_window_size: wanted None (FLy is not supported), got 2"),
        ({"synthetic_mode": True}, "synthetic_conditional_rates: wanted a tensor, got NoneType"),
    ],
)  # fmt: skip
def test_v1_bad_arguments_are_named(change, words):
    with pytest.raises(RuntimeError) as error:
        v1.rejection_sample(**random_v1(1) | change)
    assert str(error.value).startswith("specdec_ext.compat.vllm.v1.rejection_sample: ")
    assert words in str(error.value)


# --- V2: rejection_sample ---------------------------------------------------------------------------
def v2_case(logits, draft_logits, ids, rows, temperature, most, seed=5, pad=0):
    """Requests lie in slots in reverse order."""
    batch, g = len(rows), seeded(seed)
    cu = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32)
    slots = torch.arange(batch - 1, -1, -1, dtype=torch.int32)
    owner = torch.repeat_interleave(torch.arange(batch), torch.tensor(rows))
    local = torch.arange(len(owner)) - cu[:-1][owner]
    return {
        "target_logits": torch.nn.functional.pad(logits, (0, 0, 0, pad), value=float("nan")),
        "draft_logits": draft_logits,
        "draft_sampled": torch.tensor([*ids, *[0] * pad]),
        "cu_num_logits": cu,
        "pos": torch.nn.functional.pad(100 * owner + local, (0, pad)),
        "idx_mapping": slots,
        "expanded_idx_mapping": slots[owner],
        "expanded_local_pos": local.int(),
        "temperature": torch.tensor(temperature).flip(0),
        "seed": torch.randint(-(2**62), 2**62, (batch,), generator=g),
        "num_speculative_steps": most,
    }  # fmt: skip


def random_v2(seed, batch=24, vocab=9, most=3, drafted=True, wider=0, **options):
    g = seeded(seed)
    rows = [1 + n for n in torch.randint(0, most + 1, (batch,), generator=g).tolist()]
    rows[3] = 0
    temperature = [(0.0, 1.0, 0.5, 2.0)[b % 4] for b in range(batch)]
    draft = torch.randn(batch, most, vocab, generator=g)
    logits, ids = [], []
    for b, n in enumerate(rows):
        near = draft[batch - 1 - b] / max(temperature[b], 0.5)
        for j in range(n):
            x = torch.randn(vocab, generator=g)
            logits.append(x + near[j] if j < n - 1 else x)
            ids.append(-1 if j == 0 else int(near[j - 1].softmax(-1).multinomial(1, generator=g)))
        if n > 2 and b % 7 == 0:
            ids[-1] = -1
    target = torch.nn.functional.pad(torch.stack(logits), (0, wider), value=50.0)
    return v2_case(
        target, draft if drafted else None, ids, rows, temperature, most, seed, **options
    )


@pytest.mark.parametrize("options", [{}, {"drafted": False}, {"wider": 3}, {"pad": 4}], ids=str)
def test_v2_given_its_random_numbers(device, options):
    got, allowed = [], []
    for seed in range(4):
        case = random_v2(seed, **options)
        sampled, count = v2.rejection_sample(**on(device, case))
        found = [[t for t in row if t != -1] for row in sampled.cpu().tolist()]
        assert count.cpu().tolist() == [len(row) for row in found]
        got += found
        allowed += oracle2.rejection_sample(**case, band=DECISION_BAND)
    assert_decisions(got, allowed)
    assert {0, 1, 2, 3, 4} == {len(row) for row in got}


def test_v2_exact_law():
    """All drafts and all choices of the walk that the function is compared with."""
    vocab, drafts, heat = 3, 2, 0.7
    g = seeded(2)
    target = torch.randn(drafts + 1, vocab, generator=g).double().numpy()
    draft = torch.randn(drafts, vocab, generator=g).double().numpy()
    p = np.exp(target) / np.exp(target).sum(1, keepdims=True)
    q = np.exp(draft / np.float64(np.float32(heat)))
    q /= q.sum(1, keepdims=True)
    law = np.zeros((vocab,) * 3)
    for ids in itertools.product(range(vocab), repeat=drafts):
        drawn = q[0][ids[0]] * q[1][ids[1]]
        for weight, tokens in oracle2.walk(target, draft, list(ids), heat, Every()):
            tail = np.ones(())
            for row in p[len(tokens) :]:
                tail = np.multiply.outer(tail, row)
            law[tuple(tokens)] += drawn * weight * tail
    assert_formula(law, p[0][:, None, None] * p[1][None, :, None] * p[2], "law")


def test_v2_block_verification_is_that_of_verify_chain(device):
    case = random_v2(8)
    case["draft_sampled"][case["draft_sampled"] < 0] = 0
    sampled, count = v2.rejection_sample(**on(device, case), use_block_verification=True)
    slots = case["idx_mapping"].long()
    heat = case["temperature"][slots]
    tokens, accepted, *_ = specdec_ext.verify_chain(
        case["target_logits"], case["draft_sampled"], case["cu_num_logits"], case["seed"][slots],
        case["pos"][case["cu_num_logits"][:-1].long()], 3, vocab_size=9, method="block",
        draft_logits=case["draft_logits"][slots], draft_temperature=heat, temperature=(heat != 0).float(),
    )  # fmt: skip
    assert sampled.cpu().tolist() == tokens.tolist()
    assert count.cpu().tolist() == (accepted + (case["cu_num_logits"].diff() > 0)).tolist()


def test_v2_does_not_depend_on_slot_or_batch():
    case = random_v2(9)
    together, _ = v2.rejection_sample(**case)
    for b in (0, 7, 23):
        rows = slice(int(case["cu_num_logits"][b]), int(case["cu_num_logits"][b + 1]))
        slot = int(case["idx_mapping"][b])
        alone, _ = v2.rejection_sample(
            case["target_logits"][rows], case["draft_logits"][slot : slot + 1], case["draft_sampled"][rows],
            torch.tensor([0, rows.stop - rows.start], dtype=torch.int32), case["pos"][rows],
            torch.tensor([0]), None, None, case["temperature"][slot : slot + 1], case["seed"][slot : slot + 1], 3,
        )  # fmt: skip
        assert alone[0].tolist() == together[b].tolist()


def test_v2_empty_batches():
    case = random_v2(1)
    none = {k: v[:0] if torch.is_tensor(v) else v for k, v in case.items()}
    none |= {"cu_num_logits": torch.zeros(1, dtype=torch.int32), "draft_logits": None}
    sampled, count = v2.rejection_sample(**none)
    assert sampled.shape == (0, 4) and count.shape == (0,)
    padded = none | {"cu_num_logits": torch.zeros(3, dtype=torch.int32), "idx_mapping": torch.tensor([-1, -1]),
                     "temperature": torch.ones(1), "seed": torch.zeros(1, dtype=torch.int64)}  # fmt: skip
    sampled, count = v2.rejection_sample(**padded)
    assert sampled.tolist() == [[-1] * 4] * 2 and count.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"draft_sampled": torch.zeros(3, dtype=torch.int64)}, "draft_sampled: wanted size"),
        ({"seed": torch.zeros(24)}, "seed: wanted dtype int64, got float32"),
        ({"draft_logits": torch.zeros(24, 2, 9)}, "draft_logits: wanted size 3 (num_speculative_steps), got 2"),
        ({"synthetic_conditional_rates": torch.ones(3)}, "synthetic_conditional_rates: wanted None (synthetic acceptance is not supported)"),
        ({"watermark_key": 3}, "watermark_key: wanted None (watermarking is not supported)"),
        ({"fly_window_size": 2}, "fly_window_size: wanted 0 (FLy is not supported), got 2"),
    ],
)  # fmt: skip
def test_v2_bad_arguments_are_named(change, words):
    with pytest.raises(RuntimeError) as error:
        v2.rejection_sample(**random_v2(1) | change)
    assert str(error.value).startswith("specdec_ext.compat.vllm.v2.rejection_sample: ")
    assert words in str(error.value)


# --- Inputs: published cases ------------------------------------------------------------------------
DFLASH = {
    c["name"]: c
    for c in json.loads((CASES / "dflash_prepare_inputs_vllm.json").read_text())["cases"]
}


def test_v1_dflash_case_of_the_peer(device):
    case = DFLASH["cpu_two_requests"]
    tables = torch.tensor(case["block_table"], dtype=torch.int32)
    context, queries, drafts = 7, 6, 4
    out = {
        "out_input_ids_ptr": torch.full((queries,), -5, dtype=torch.int32),
        "out_context_positions_ptr": torch.full((context,), -5),
        "out_query_positions_ptr": torch.full((queries,), -5),
        "out_context_slot_mapping_ptr": torch.full((context,), -5),
        "out_query_slot_mapping_ptr": torch.full((queries,), -5),
        "out_token_indices_ptr": torch.full((drafts,), -5, dtype=torch.int32),
    }
    arguments = {
        "next_token_ids_ptr": torch.tensor(case["next_token"], dtype=torch.int32),
        "target_positions_ptr": torch.tensor(case["target_positions"]),
        "block_table_ptr": tables, "block_table_stride": tables.stride(0),
        "query_start_loc_ptr": torch.tensor(case["query_start"], dtype=torch.int32),
        "num_rejected_tokens_ptr": torch.tensor(case["num_rejected"], dtype=torch.int32),
        "parallel_drafting_token_id": case["mask_token"], "block_size": case["block_size"],
        "num_query_per_req": 3, "num_speculative_tokens": case["num_speculative"],
        "total_input_tokens": context, "max_tokens_per_req": 7, "triton_block_size": 8, "has_num_rejected": True,
    }  # fmt: skip
    there = on(device, out)
    v1._copy_and_expand_dflash_inputs(**there, **on(device, arguments))
    for key, wanted in (
        ("out_query_positions_ptr", case["expected_query_positions"]),
        ("out_query_slot_mapping_ptr", case["expected_query_slots"]),
        ("out_context_slot_mapping_ptr", case["expected_context_slots"]),
        ("out_context_positions_ptr", case["target_positions"]),
        ("out_input_ids_ptr", case["expected_input_ids"]),
        ("out_token_indices_ptr", case["expected_sample_rows"]),
    ):
        assert there[key].cpu().tolist() == wanted, key
    run_both(v1, oracle1, "_copy_and_expand_dflash_inputs", out | arguments)


def dflash_case(
    starts,
    positions,
    slots,
    rejected,
    table,
    *,
    block_size=4,
    query=3,
    drafts=3,
    room=4,
    tokens=20,
    **options,
):
    batch, count = len(slots), len(positions)
    return {
        "input_buffers": SimpleNamespace(
            input_ids=torch.full((tokens,), -5, dtype=torch.int32),
            positions=torch.full((tokens,), -5),
            is_padding=torch.ones(tokens, dtype=torch.bool),
            query_start_loc=torch.full((room + 1,), -5, dtype=torch.int32),
            seq_lens=torch.full((room,), -5, dtype=torch.int32),
        ),
        "query_slot_mapping": torch.full((tokens,), -5),
        "context_positions": torch.full((count + 2,), -5),
        "context_slot_mapping": torch.full((count + 2,), -5),
        "sample_indices": torch.full((room * drafts,), -5),
        "sample_pos": torch.full((room * drafts,), -5),
        "sample_idx_mapping": torch.full((room * drafts,), -5, dtype=torch.int32),
        "temperature": torch.zeros(room),
        "seeds": torch.zeros(room, dtype=torch.int64),
        "input_batch": SimpleNamespace(
            num_reqs=batch,
            positions=torch.tensor([*positions, 0]),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            idx_mapping=torch.tensor(slots, dtype=torch.int32),
            num_scheduled_tokens=np.diff(starts),
        ),
        "num_sampled": torch.ones(batch, dtype=torch.int32),
        "num_rejected": torch.tensor(rejected, dtype=torch.int32),
        "last_sampled": torch.arange(room)[:, None] + 70,
        "next_prefill_tokens": torch.arange(room, dtype=torch.int32) + 30,
        "input_temperature": torch.arange(room) / 4 + 0.25,
        "input_seeds": torch.arange(room) + 900,
        "block_table": torch.tensor(table, dtype=torch.int32),
        "block_size": block_size, "cp_rank": 0, "cp_size": 1, "cp_interleave": 1,
        "parallel_drafting_token_id": 123, "num_query_per_req": query, "num_speculative_steps": drafts,
        "max_num_reqs": room, "max_num_tokens": tokens, "max_model_len": 1000, "sample_from_anchor": True,
        **options,
    }  # fmt: skip


@pytest.mark.parametrize("name", [n for n in DFLASH if n.startswith("gpu")])
def test_v2_dflash_cases_of_the_peer(name):
    case = DFLASH[name]
    batch = len(case["num_rejected"])
    parallel = {
        f"cp_{k}": case.get(f"cp_{k}", v) for k, v in (("rank", 0), ("size", 1), ("interleave", 1))
    }
    arguments = dflash_case(
        case["query_start"], case["target_positions"], case.get("request_slot", [1] * batch), case["num_rejected"],
        case.get("block_table", [list(range(1, 9))] * batch), block_size=case["block_size"],
        drafts=case["num_speculative"], sample_from_anchor=case["sample_from_anchor"], **parallel,
    )  # fmt: skip
    last = case.get("last_sampled_by_slot", [case.get("last_sampled", 0)] * 4)
    arguments["last_sampled"] = torch.tensor(last)
    out = run_both(v2, oracle2, "prepare_dflash_inputs", arguments)
    buffers, drafts = out["input_buffers"], batch * case["num_speculative"]
    found = {
        "input_ids": buffers.input_ids, "query_positions": buffers.positions, "query_slots": out["query_slot_mapping"],
        "context_positions": out["context_positions"], "context_slots": out["context_slot_mapping"],
        "sample_rows": out["sample_indices"], "sample_positions": out["sample_pos"], "sample_slot": out["sample_idx_mapping"],
    }  # fmt: skip
    checked = 0
    for key, value in found.items():
        if f"expected_{key}" in case:
            wanted = case[f"expected_{key}"]
            assert value[: len(wanted)].tolist() == wanted, key
            checked += 1
    assert checked >= 2 and out["sample_idx_mapping"][drafts:].tolist() == [-1] * (12 - drafts)


# --- Inputs: any batch ------------------------------------------------------------------------------
@st.composite
def batches(draw):
    batch = draw(st.integers(1, 4))
    lengths = [draw(st.integers(1, 6)) for _ in range(batch)]
    rejected = [draw(st.integers(0, n - 1)) for n in lengths]
    firsts = [draw(st.integers(0, 40)) for _ in range(batch)]
    positions = [f + i for f, n in zip(firsts, lengths, strict=True) for i in range(n)]
    return [0, *itertools.accumulate(lengths)], positions, rejected, draw(st.integers(0, 2**32 - 1))


@settings(max_examples=15, deadline=None)
@given(
    batches(), st.booleans(), st.sampled_from([(0, 1, 1), (1, 2, 2), (2, 4, 1)]), st.integers(1, 4)
)
def test_v2_dflash_of_any_batch(batch, anchor, ranks, drafts):
    starts, positions, rejected, seed = batch
    g, count = seeded(seed), len(rejected)
    arguments = dflash_case(
        starts, positions, torch.randperm(4, generator=g)[:count].tolist(), rejected,
        torch.randint(0, 5, (count, 9), generator=g).tolist(), drafts=drafts, query=drafts + (not anchor), room=4,
        sample_from_anchor=anchor, cp_rank=ranks[0], cp_size=ranks[1], cp_interleave=ranks[2], max_model_len=41,
    )  # fmt: skip
    arguments["num_sampled"] = torch.randint(0, 2, (count,), generator=g, dtype=torch.int32)
    if count > 1 and seed % 2:
        arguments["num_reqs_override"] = count - 1
    run_both(v2, oracle2, "prepare_dflash_inputs", arguments)


@settings(max_examples=15, deadline=None)
@given(batches(), st.integers(1, 3))
def test_v1_dflash_of_any_batch(batch, drafts):
    starts, positions, rejected, seed = batch
    count, total, g = len(rejected), len(positions), seeded(seed)
    queries = count * (drafts + 1)
    run_both(v1, oracle1, "_copy_and_expand_dflash_inputs", {
        "next_token_ids_ptr": torch.randint(0, 99, (count,), generator=g, dtype=torch.int32),
        "target_positions_ptr": torch.tensor(positions),
        "out_input_ids_ptr": torch.full((queries + 2,), -5, dtype=torch.int32),
        "out_context_positions_ptr": torch.full((total + 2,), -5),
        "out_query_positions_ptr": torch.full((queries + 2,), -5),
        "out_context_slot_mapping_ptr": torch.full((total + 2,), -5),
        "out_query_slot_mapping_ptr": torch.full((queries + 2,), -5),
        "out_token_indices_ptr": torch.full((count * drafts + 2,), -5, dtype=torch.int32),
        "block_table_ptr": torch.randint(0, 9, (count, 8), generator=g, dtype=torch.int32),
        "query_start_loc_ptr": torch.tensor(starts, dtype=torch.int32),
        "num_rejected_tokens_ptr": torch.tensor(rejected, dtype=torch.int32) if seed % 2 else 0,
        "parallel_drafting_token_id": 123, "block_size": 4, "num_query_per_req": drafts + 1,
        "num_speculative_tokens": drafts, "total_input_tokens": total, "has_num_rejected": bool(seed % 2),
    })  # fmt: skip


@settings(max_examples=15, deadline=None)
@given(batches(), st.integers(1, 4), st.booleans())
def test_v1_eagle_inputs_of_any_batch(batch, pad, shift):
    starts, positions, rejected, seed = batch
    count, total, g = len(rejected), len(positions), seeded(seed)
    ends = (
        torch.tensor(starts[1:], dtype=torch.int32) - 1 - torch.tensor(rejected, dtype=torch.int32)
    )
    rows = total + count * pad
    run_both(v1, oracle1, "_copy_and_expand_eagle_inputs", {
        "target_token_ids_ptr": torch.randint(0, 99, (total,), generator=g, dtype=torch.int32),
        "target_positions_ptr": torch.tensor(positions),
        "next_token_ids_ptr": torch.randint(0, 99, (count,), generator=g, dtype=torch.int32),
        "out_input_ids_ptr": torch.full((rows,), -5, dtype=torch.int32),
        "out_positions_ptr": torch.full((rows,), -5),
        "out_is_rejected_token_mask_ptr": torch.ones(rows, dtype=torch.bool),
        "out_is_masked_token_mask_ptr": torch.ones(rows, dtype=torch.bool),
        "out_new_token_indices_ptr": torch.full((count * pad,), -5, dtype=torch.int32),
        "out_hidden_state_mapping_ptr": torch.full((total,), -5, dtype=torch.int32),
        "query_start_loc_ptr": torch.tensor(starts, dtype=torch.int32), "query_end_loc_ptr": ends,
        "padding_token_id": 0, "parallel_drafting_token_id": 123, "total_input_tokens": total,
        "num_padding_slots_per_request": pad, "shift_input_ids": shift,
        "BLOCK_SIZE_TOKENS": 8, "batch_size": count, "num_blocks": 1,
    })  # fmt: skip


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_v1_next_tokens_and_rows(batch, width, seed):
    g = seeded(seed)
    ids = torch.randint(-1, 11, (batch, width + 1), generator=g, dtype=torch.int32)
    counts = torch.full((batch + 1,), -5, dtype=torch.int32)
    run_both(v1, oracle1, "_eagle_prepare_next_token_padded", {
        "sampled_token_ids": ids, "discard_request_mask": torch.rand(batch, generator=g) < 0.3,
        "backup_next_token_ids": torch.randint(0, 9, (batch,), generator=g, dtype=torch.int32),
        "next_token_ids": torch.full((batch + 1,), -5, dtype=torch.int32), "valid_sampled_tokens_count": counts,
        "vocab_size": 9, "num_sampled_tokens_per_req": width, "num_reqs": batch, "stride_sampled_token_ids": width + 1,
    })  # fmt: skip
    drafts = torch.randint(0, 4, (batch,), generator=g, dtype=torch.int32)
    valid = (torch.rand(batch, generator=g) * (drafts + 1)).int() + 1
    run_both(v1, oracle1, "_eagle_prepare_inputs_padded", {
        "cu_num_draft_tokens": drafts.cumsum(0).int(), "valid_sampled_tokens_count": valid,
        "query_start_loc_gpu": torch.nn.functional.pad((drafts + 1).cumsum(0), (1, 0)).int(),
        "token_indices_to_sample": torch.full((batch + 1,), -5, dtype=torch.int32),
        "num_rejected_tokens_gpu": torch.full((batch + 1,), -5, dtype=torch.int32), "num_reqs": batch,
    })  # fmt: skip
    v1._eagle_prepare_inputs_padded.register_warmup(max_batch_size=8)  # as the engine does at start


def test_fault_J04():
    """Placeholders and ids outside the vocabulary are no tokens; accepted counts are never negative."""
    ids = torch.tensor([[-1, -1, -1], [4, -1, -1], [4, 7, 9]], dtype=torch.int32)
    token, count = (torch.zeros(3, dtype=torch.int32) for _ in range(2))
    backup = torch.full((3,), 5, dtype=torch.int32)
    v1._eagle_prepare_next_token_padded(
        ids, torch.zeros(3, dtype=torch.bool), backup, token, count, 8, 3, 3, 3
    )
    assert token.tolist() == [5, 4, 7] and count.tolist() == [0, 1, 2]


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 6), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_v1_one_eagle_step(batch, padding, seed):
    g = seeded(seed)
    run_both(v1, oracle1, "eagle_step_update_slot_mapping_and_metadata", {
        "positions_1d": torch.randint(0, 20, (batch,), generator=g),
        "block_table_tensor": torch.randint(0, 9, (batch, 5), generator=g, dtype=torch.int32),
        "seq_lens": torch.randint(0, 20, (batch,), generator=g, dtype=torch.int32),
        "block_size": 4, "max_model_len": 18,
        "out_clamped_positions": torch.full((batch,), -5), "out_slot_mapping": torch.full((batch + padding,), -5),
        "input_batch_size": batch + padding if padding else None,
    })  # fmt: skip


def eagle_buffers(rows, room, g):
    return SimpleNamespace(
        input_ids=torch.randint(0, 99, (rows,), generator=g, dtype=torch.int32),
        positions=torch.randint(0, 20, (rows,), generator=g),
        query_start_loc=torch.full((room + 1,), -5, dtype=torch.int32),
        seq_lens=torch.randint(0, 20, (room,), generator=g, dtype=torch.int32),
    )


@settings(max_examples=15, deadline=None)
@given(batches(), st.booleans())
def test_v2_eagle_inputs_of_any_batch(batch, advance):
    starts, positions, rejected, seed = batch
    g, count, total, room = seeded(seed), len(rejected), len(positions), 5
    out = run_both(v2, oracle2, "prepare_prefill_inputs", {
        "last_token_indices": torch.full((room,), -5), "current_draft_step": torch.tensor([3]),
        "input_buffers": eagle_buffers(total + 3, room, g),
        "input_batch": SimpleNamespace(
            num_reqs=count, input_ids=torch.randint(0, 99, (total + 1,), generator=g, dtype=torch.int32),
            positions=torch.tensor([*positions, 0]), idx_mapping=torch.randperm(room, generator=g)[:count].int(),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.randint(1, 20, (count,), generator=g, dtype=torch.int32),
        ),
        "num_sampled": torch.randint(0, 2, (count,), generator=g, dtype=torch.int32),
        "num_rejected": torch.tensor(rejected, dtype=torch.int32),
        "last_sampled": torch.arange(room) + 70, "next_prefill_tokens": torch.arange(room, dtype=torch.int32) + 30,
        "max_num_reqs": room,
    })  # fmt: skip
    assert int(out["current_draft_step"]) == 0
    run_both(v2, oracle2, "prepare_decode_inputs", {
        "draft_tokens": torch.randint(0, 99, (count, 2), generator=g), "target_seq_lens": torch.tensor(starts[1:]) + 9,
        "num_rejected": torch.tensor(rejected), "input_buffers": eagle_buffers(room, room, g),
        "sample_src_positions": torch.arange(room), "max_model_len": 15, "max_num_reqs": room,
        "advance_draft_positions": advance,
    })  # fmt: skip
    for step in range(3):
        run_both(v2, oracle2, "update_draft_inputs", {
            "draft_tokens": torch.randint(0, 99, (count,), generator=g), "current_draft_step": torch.tensor(step),
            "hidden_states": torch.randn(count, 6, generator=g), "output_draft_tokens": torch.full((room, 3), -5),
            "next_input_hidden_states": torch.zeros(room, 6), "input_buffers": eagle_buffers(room, room, g),
            "sample_src_positions": torch.arange(room), "num_reqs": count, "max_model_len": 15,
            "num_speculative_steps": 3, "advance_draft_positions": advance,
        })  # fmt: skip


# --- Callers ----------------------------------------------------------------------------------------
CALLER1 = '''
from vllm.v1.sample.rejection_sampler import rejection_sample

def forward(metadata, draft_probs, target_logits, bonus_token_ids, sampling_metadata):
    return rejection_sample(
        metadata.draft_token_ids, metadata.num_draft_tokens, metadata.max_spec_len,
        metadata.cu_num_draft_tokens, draft_probs, target_logits, bonus_token_ids, sampling_metadata,
    )
'''  # fmt: skip

CALLER2 = '''
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

def __call__(logits, draft_logits, batch, temperature, seeds, num_speculative_steps):
    return rejection_sample(
        logits, draft_logits, batch.draft_sampled, batch.cu_num_logits, batch.pos, batch.idx_mapping,
        batch.expanded_idx_mapping, batch.expanded_local_pos, temperature, seeds, num_speculative_steps,
        use_fp64=False, use_block_verification=False,
    )
'''  # fmt: skip


def test_a_caller_of_v1_with_the_import_changed(monkeypatch):
    path = "vllm.v1.sample.rejection_sampler"
    outs = []
    for changed in (False, True):
        case = random_v1(4, greedy=(2,), seeds=(1, 3))
        args = (SimpleNamespace(**case), case["draft_probs"], case["target_logits"], case["bonus_token_ids"],
                case["sampling_metadata"])  # fmt: skip
        torch.manual_seed(0)
        outs.append(
            with_import_changed(CALLER1, path, "specdec_ext.compat.vllm.v1", "forward", *args)
            if changed
            else with_peer(monkeypatch, path, oracle1, CALLER1, "forward", *args)
        )
    assert_same(*outs)


def test_a_caller_of_v2_with_the_import_changed(monkeypatch):
    path, case = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils", random_v2(3)
    args = (
        case["target_logits"],
        case["draft_logits"],
        SimpleNamespace(**case),
        case["temperature"],
        case["seed"],
        3,
    )
    theirs = with_peer(monkeypatch, path, oracle2, CALLER2, "__call__", *args)
    mine = with_import_changed(CALLER2, path, "specdec_ext.compat.vllm.v2", "__call__", *args)
    for got, wanted in zip(mine, theirs, strict=True):
        assert_same(got, wanted)


# --- No waiting for the device, graphs --------------------------------------------------------------
def faked(mode, value):
    if torch.is_tensor(value):
        return mode.from_tensor(value)
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**{k: faked(mode, v) for k, v in vars(value).items()})
    return value


def test_traces_without_a_value_on_the_host():
    from torch._subclasses.fake_tensor import FakeTensorMode

    g = seeded(1)
    prefill = {
        "last_token_indices": torch.zeros(4), "current_draft_step": torch.tensor(0), "input_buffers": eagle_buffers(9, 4, g),
        "input_batch": SimpleNamespace(num_reqs=2, input_ids=torch.zeros(7).int(), positions=torch.arange(7),
                                       idx_mapping=torch.tensor([1, 0]), query_start_loc=torch.tensor([0, 3, 7]),
                                       seq_lens=torch.tensor([3, 4])),
        "num_sampled": torch.ones(2), "num_rejected": torch.zeros(2).int(), "last_sampled": torch.arange(4),
        "next_prefill_tokens": torch.arange(4), "max_num_reqs": 4,
    }  # fmt: skip
    calls = (
        (v1, "rejection_sample", random_v1(2, greedy=(1,))),
        (v2, "rejection_sample", random_v2(2)),
        (v2, "prepare_dflash_inputs", dflash_case([0, 3, 5], range(5), [1, 0], [1, 0], [[1, 2]] * 2)),
        (v2, "prepare_prefill_inputs", prefill),
    )  # fmt: skip
    with FakeTensorMode() as mode:
        for module, name, case in calls:
            getattr(module, name)(**{k: faked(mode, v) for k, v in case.items()})


def test_v2_compiles_as_one_graph():
    case = random_v2(5)
    wanted = v2.rejection_sample(**case)
    got = torch.compile(v2.rejection_sample, fullgraph=True, backend="aot_eager")(**case)
    for mine, theirs in zip(got, wanted, strict=True):
        assert_same(mine, theirs)
