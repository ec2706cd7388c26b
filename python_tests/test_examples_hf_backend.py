"""Models of transformers on the operators: prompts, decoding and trees against the model's own eager attention."""

import copy

import compare
import draft_models
import pytest
import tiny_llama
import torch

pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

import hf_backend  # noqa: E402
from drafters import PromptLookup  # noqa: E402
from drafters.base import TreeShape  # noqa: E402
from engine.batch import Drafts, DraftTree, Request, new_batch  # noqa: E402
from engine.decode import Engine  # noqa: E402
from engine.layout import lay_out_rows  # noqa: E402
from engine.linear import LINEARS  # noqa: E402
from engine.model import Taps  # noqa: E402
from hf_backend import HfModel  # noqa: E402
from transformers_baseline import build_transformers_model  # noqa: E402

SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SLIDING = {
    "sliding_window": 5,  # shorter than every text here
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 20,  # a scale that is not that of the head dim
}
# Of every type: its classes, and what it has that the others do not.
MODELS = {
    "llama": ("Llama", {"head_dim": 16, "tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {"head_dim": 64, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {**SLIDING, "head_dim": 32, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0},
    ),
    "gemma3": ("Gemma3", {**SLIDING, "head_dim": 80}),
}
# A tree of the last request, in the order that block_tree might number it.
PARENTS, DEPTHS = [0, 0, 1, 2, 1, 3, 0, 4], [1, 1, 2, 2, 2, 3, 1, 3]


def random_model(name):
    """Weights large enough for scores that tell tokens, windows and caps apart."""
    family, options = MODELS[name]
    config = "Gemma3TextConfig" if name == "gemma3" else f"{family}Config"
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, config)(**SIZES, **options, attn_implementation="eager")
    ).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight += 0.2 * torch.randn_like(weight)
            else:
                weight.normal_(std=1.5 / weight.size(1) ** 0.5)
    return model


@pytest.fixture
def on_ops(backend, monkeypatch):
    if backend.emulated:
        pytest.skip("emulated kernels have tests of their own; a model only takes longer")
    tiny_llama.use_ops(monkeypatch, backend)
    monkeypatch.setattr(hf_backend, "ops", backend.ops)
    return backend.device


def eager_outputs(model, ids):
    """Logits of all rows and what every layer puts out, the embedding first."""
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    return out.logits[0], out.hidden_states


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("linear", ["specdec", "torch"])
def test_rows_are_those_of_eager_attention(on_ops, monkeypatch, name, linear):
    """Two prompts in parts, then a pass with one row of the first request and a tree of the second."""
    if name in ("llama", "gemma2") and linear == "torch":
        pytest.skip("linears do not depend on the model")
    eager = random_model(name)
    exact = copy.deepcopy(eager).double()
    model = HfModel(copy.deepcopy(eager).to(on_ops), LINEARS[linear])
    monkeypatch.setattr("engine.decode.PREFILL_ROWS", 4)
    engine, generator = Engine(model, [], page_size=3), torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 61, (n,), generator=generator).tolist() for n in (14, 9)]
    nodes = torch.randint(0, 61, (len(PARENTS),), generator=generator).tolist()

    cache = model.new_cache(20, 3)
    table, _ = cache.take([20, 30])
    state = new_batch([Request(p, 5) for p in prompts], [], table, model.device)
    tapped = Taps((-1, 0, 1))
    with torch.inference_mode():
        for index, prompt in enumerate(prompts):
            engine.prefill(index, len(prompt) - 1, state, cache, None)
        rows = torch.tensor([[-1] * len(nodes), nodes], device=model.device)
        counts = torch.tensor([0, len(nodes)], device=model.device)
        parents, depths = (
            torch.tensor(t, device=model.device).expand(2, -1) for t in (PARENTS, DEPTHS)
        )
        drafts = Drafts(rows, counts, tree=DraftTree(parents, depths, 3))
        layout = lay_out_rows(state, drafts, 3, model.cheap_row_count)
        logits = model.logits(model.forward(layout.rows, cache, tapped))

    texts = [prompts[0], prompts[1]]
    for node, parent in zip(nodes, PARENTS, strict=True):
        texts.append([*texts[1 + parent], node])
    for row, text in enumerate(texts):
        (oracle, oracle_hiddens), (peer, peer_hiddens) = (
            eager_outputs(m, text) for m in (exact, eager)
        )
        compare.assert_close(logits[row], oracle[-1], peer[-1], f"logits of row {row}")
        for place, hidden in enumerate(tapped.hiddens):
            compare.assert_close(
                hidden[row], oracle_hiddens[place][0, -1], peer_hiddens[place][0, -1], "hidden"
            )


@pytest.mark.parametrize("name", MODELS)
def test_greedy_output_is_that_of_generate(on_ops, name):
    eager = random_model(name)
    model = HfModel(copy.deepcopy(eager).to(on_ops))
    requests = [Request(p, 12) for p in tiny_llama.random_prompts(2, vocab_size=61)]
    engine = Engine(model, [], page_size=4)
    plain = engine.generate(requests).output_ids
    assert engine.generate(requests, PromptLookup(), 4).output_ids == plain
    for request, ids in zip(requests, plain, strict=True):
        prompt = torch.tensor([request.prompt_ids])
        out = eager.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        assert out[0, prompt.size(1) :].tolist() == ids


@pytest.mark.parametrize("kind, shape", [("eagle3", TreeShape(3, 10)), ("dspark", None)])
def test_drafters_read_the_hidden_states_of_a_hooked_model(on_ops, tmp_path, kind, shape):
    """The same weights in both engines, the same drafts and the same output."""
    ours = draft_models.target_model(on_ops)
    theirs = HfModel(build_transformers_model(ours.config, ours.weights))
    requests, got = draft_models.requests_of(), []
    for model in (ours, theirs):
        drafter = draft_models.load_drafter(tmp_path, kind, model, tree=shape)
        records = []
        Engine(model, []).generate(requests, drafter, 4, records.append)
        got.append(records)
    assert got[0] == got[1] and all(any(record.drafts) for record in got[0][:3])


def test_what_cannot_be_right_is_refused(on_ops):
    model = random_model("llama").to(on_ops)
    with pytest.raises(ValueError, match="plain and tied embeddings, got Embedding and Linear"):
        HfModel(model).weights  # noqa: B018
    with pytest.raises(RuntimeError, match="wanted cached_pass and no mask"):
        model(torch.tensor([[1, 2]], device=on_ops))
    with pytest.raises(ValueError, match="plain and tied embeddings, got Gemma3TextScaled"):
        HfModel(random_model("gemma3").to(on_ops)).weights  # noqa: B018
    model.config.model_type = "mamba"
    with pytest.raises(ValueError, match="model_type: wanted one of llama, .* got 'mamba'"):
        HfModel(model)
