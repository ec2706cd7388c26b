"""Drafters for the tests of examples/drafters: small random checkpoints with the names of their exporters, and what
such a model computes, written down plainly from these names, for one request at a time and without a cache."""

import json
from dataclasses import replace

import compare
import pytest
import tiny_llama
import torch
from torch.nn import functional

from drafters.dflash import DFlash
from drafters.dspark import DSpark
from drafters.eagle3 import Eagle3
from drafters.weights import load_block_drafter, load_eagle3
from engine import decode
from engine.batch import Request
from engine.linear import LINEARS

TARGET = replace(tiny_llama.CONFIG, num_layers=6)
THETA, EPS, HEADS, KV_HEADS, HEAD_DIM, FFN = 5e4, 1e-5, 4, 2, 64, 80
BLOCK, MASK, RANK, REDUCED = 5, 66, 8, 23
NEW_TOKENS = [18, 5, 12]

_QWEN3 = {
    "vocab_size": TARGET.vocab_size,
    "hidden_size": TARGET.hidden_size,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": FFN,
    "rope_theta": THETA,
    "rms_norm_eps": EPS,
    "hidden_act": "silu",
    "rope_scaling": None,
}
_LAYERS = {"num_target_layers": TARGET.num_layers, "block_size": BLOCK}
_TAPS = {"mask_token_id": MASK, "target_layer_ids": [-1, 1, 3]}
_NO_HEADS = {"markov_rank": 0, "enable_confidence_head": False}


def config_of(kind, markov_head="vanilla"):
    """config.json of `dspark`, `deepspec_dflash`, `dflash` (z-lab), `eagle3` or `deepspec_eagle3`."""
    if kind == "dflash":
        own = {"architectures": ["DFlashDraftModel"], **_LAYERS, "dflash_config": dict(_TAPS)}
        return _QWEN3 | own
    if kind == "eagle3":
        own = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": REDUCED}
        return _QWEN3 | own | {"num_hidden_layers": 1}
    if kind == "deepspec_eagle3":
        own = {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [1, 2, 4]}
        return _QWEN3 | own | {"num_hidden_layers": 1, "ttt_length": 7, "step_loss_decay": 1.0}
    own = {"architectures": ["Qwen3DSparkModel"], "tie_word_embeddings": False, **_LAYERS, **_TAPS}
    own["layer_types"] = ["full_attention"] * 2
    if kind == "deepspec_dflash":
        return _QWEN3 | own | _NO_HEADS
    own |= {"markov_rank": RANK, "markov_head_type": markov_head, "num_anchors": 512}
    own |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    return _QWEN3 | own


def tensors_of(kind, markov_head="vanilla", seed=0):
    """Tensors of a checkpoint by name, float32."""
    generator = torch.Generator().manual_seed(seed)
    d, vocab_size = TARGET.hidden_size, TARGET.vocab_size

    def matrix(rows, columns, gain=1.0):
        return torch.randn(rows, columns, generator=generator) * gain / columns**0.5

    def gains(n):
        return 1 + 0.2 * torch.randn(n, generator=generator)

    def layer(prefix, width, names, normed):
        t = {f"{prefix}{name}.weight": gains(d) for name in names}
        for side, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            t[f"{prefix}self_attn.{side}_proj.weight"] = matrix(heads * HEAD_DIM, width, 1.5)
        t[prefix + "self_attn.o_proj.weight"] = matrix(d, HEADS * HEAD_DIM)
        for name in ("gate", "up"):
            t[f"{prefix}mlp.{name}_proj.weight"] = matrix(FFN, d)
        t[prefix + "mlp.down_proj.weight"] = matrix(d, FFN)
        if normed:
            t |= {f"{prefix}self_attn.{side}_norm.weight": gains(HEAD_DIM) for side in "qk"}
        return t

    def copies():
        return {f"{name}.weight": matrix(vocab_size, d) for name in ("embed_tokens", "lm_head")}

    norms = ("input_layernorm", "post_attention_layernorm")
    tensors = {"fc.weight": matrix(d, 3 * d), "norm.weight": gains(d)}
    if kind == "deepspec_eagle3":
        tensors |= layer("layers.0.", 2 * d, (*norms, "hidden_norm"), normed=True)
        return tensors | copies()
    if kind == "eagle3":
        tensors |= layer("midlayer.", 2 * d, (*norms, "hidden_norm"), normed=False)
        ids = torch.randperm(vocab_size, generator=generator)[:REDUCED].sort().values
        tensors["lm_head.weight"] = matrix(REDUCED, d, 2.5)
        tensors["d2t"] = ids - torch.arange(REDUCED)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        return tensors
    tensors["hidden_norm.weight"] = gains(d)
    for index in range(2):
        tensors |= layer(f"layers.{index}.", d, norms, normed=True)
    if kind == "dflash":
        return tensors
    tensors |= copies()
    if kind == "dspark":
        head = "markov_head."
        tensors |= {f"{head}markov_w{i}.weight": matrix(vocab_size, RANK, 2.0) for i in (1, 2)}
        if markov_head == "gated":
            tensors[head + "gate_proj.weight"] = matrix(RANK, d + RANK)
            tensors[head + "gate_proj.bias"] = gains(RANK)
        if markov_head == "rnn":
            tensors[head + "joint_proj.weight"] = matrix(3 * RANK, 2 * RANK + d)
            tensors[head + "joint_proj.bias"] = gains(3 * RANK)
        tensors["confidence_head.proj.weight"] = matrix(1, d + RANK)
        tensors["confidence_head.proj.bias"] = torch.tensor([0.4])
    return tensors


def write(folder, config, tensors):
    """config.json and model.safetensors."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def target_model(device="cpu", dtype=torch.float32, linear="specdec"):
    """linear="torch" has passes with padding rows."""
    weights = tiny_llama.random_weights(TARGET, seed=5).to(torch.device(device), dtype)
    return tiny_llama.LlamaModel(TARGET, weights, LINEARS[linear])


def load_drafter(folder, kind, target, base=None, **options):
    """The drafter of a checkpoint that is written to `folder`; base: a class of a test in place of its own."""
    folder = write(folder / kind, config_of(kind), tensors_of(kind))
    eagle = "eagle3" in kind
    class_ = base or (Eagle3 if eagle else DSpark if kind == "dspark" else DFlash)
    return class_(*(load_eagle3 if eagle else load_block_drafter)(folder), target, **options)


def target_on(backend, monkeypatch):
    """A target whose passes go through the ops of a backend, as `monkeypatch` leaves them."""
    if backend.emulated:
        pytest.skip("emulated kernels have tests of their own; a model only takes longer")
    tiny_llama.use_ops(monkeypatch, backend)
    monkeypatch.setattr(decode, "PREFILL_ROWS", 4)  # longer prompts come in parts
    return target_model(backend.device)


def requests_of(temperature=0.0, count=3):
    """Of different lengths; the last prompt is one token, which is the anchor and has no context."""
    prompts = tiny_llama.random_prompts(count)
    prompts[-1] = prompts[-1][:1]
    return [
        Request(prompt, limit, temperature, 100 + index)
        for index, (prompt, limit) in enumerate(zip(prompts, NEW_TOKENS[:count], strict=True))
    ]


# --- What the models compute ------------------------------------------------------------------------
def rms(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def turn(x, positions, theta):
    """x [rows, heads, D]; angles are float32, as everybody's."""
    half = x.shape[-1] // 2
    frequencies = 1.0 / theta ** (torch.arange(half, dtype=torch.float32) / half)
    angle = (positions.float()[:, None] * frequencies)[:, None]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attention(q, k, v, mask=None):
    """q [rows, Hq, D], k and v [places, Hkv, D], mask [rows, places] of what is seen."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


def target_hiddens(weights, tokens):
    """By layer id the output of every decoder layer over all tokens; -1 is the embedding."""
    c, positions = TARGET, torch.arange(len(tokens))
    x = weights.embedding[tokens]
    mask, outputs = positions[:, None] >= positions, {-1: x}
    for index, layer in enumerate(weights.layers):
        qkv = (rms(x, layer.attention_norm, c.norm_eps) @ layer.qkv.T).unflatten(
            1, (-1, c.head_dim)
        )
        q, k, v = qkv.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], 1)
        q, k = turn(q, positions, c.rope_theta), turn(k, positions, c.rope_theta)
        x = x + attention(q, k, v, mask) @ layer.attention_out.T
        gate, up = (rms(x, layer.ffn_norm, c.norm_eps) @ layer.gate_up.T).chunk(2, -1)
        x = x + (functional.silu(gate) * up) @ layer.ffn_down.T
        outputs[index] = x
    return outputs


def heads(x, weight):
    return (x @ weight.T).unflatten(1, (-1, HEAD_DIM))


def feed_forward(t, prefix, x):
    normed = rms(x, t[prefix + "post_attention_layernorm.weight"], EPS)
    gate, up = (normed @ t[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (functional.silu(gate) * up) @ t[prefix + "mlp.down_proj.weight"].T


def block_hidden(t, weights, tokens, rows):
    """Normed hidden states [rows, d] of a block of `rows` behind the context: tokens[-1] is the anchor, and the
    target's hidden states of the tokens before it are the context. t: tensors by name."""
    start = len(tokens) - 1
    outputs = target_hiddens(weights, tokens[:-1])
    features = torch.cat([outputs[layer] for layer in _TAPS["target_layer_ids"]], -1)
    context = rms(features @ t["fc.weight"].T, t["hidden_norm.weight"], EPS)
    x = weights.embedding[torch.tensor([int(tokens[-1])] + [MASK] * (rows - 1))]
    positions = torch.arange(start + rows)
    for index in range(2):
        prefix = f"layers.{index}."
        part = prefix + "self_attn."
        normed = rms(x, t[prefix + "input_layernorm.weight"], EPS)
        q = rms(heads(normed, t[part + "q_proj.weight"]), t[part + "q_norm.weight"], EPS)
        both = torch.cat([context, normed])
        k = rms(heads(both, t[part + "k_proj.weight"]), t[part + "k_norm.weight"], EPS)
        v = heads(both, t[part + "v_proj.weight"])
        q, k = turn(q, positions[start:], THETA), turn(k, positions, THETA)
        x = x + attention(q, k, v) @ t[part + "o_proj.weight"].T
        x = feed_forward(t, prefix, x)
    return rms(x, t["norm.weight"], EPS)


def markov_bias(t, markov_head, previous, hidden):
    """Bias [G, V] of every draft given the tokens before them, and confidences [G]."""
    embedded = t["markov_head.markov_w1.weight"][previous]
    state = embedded.new_zeros(RANK)
    rows = []
    for e, h in zip(embedded, hidden, strict=True):
        y = e
        if markov_head == "gated":
            z = t["markov_head.gate_proj.weight"] @ torch.cat([h, e])
            y = (z + t["markov_head.gate_proj.bias"]).sigmoid() * e
        if markov_head == "rnn":
            z = t["markov_head.joint_proj.weight"] @ torch.cat([state, e, h])
            gate, candidate, out = (z + t["markov_head.joint_proj.bias"]).chunk(3)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            y = out.tanh()
        rows.append(t["markov_head.markov_w2.weight"] @ y)
    both = torch.cat([hidden, embedded], -1)
    confidence = both @ t["confidence_head.proj.weight"][0] + t["confidence_head.proj.bias"]
    return torch.stack(rows), confidence.sigmoid()


EAGLE3_TAPS = {"eagle3": (1, 2, 2), "deepspec_eagle3": (1, 2, 4)}  # the first: of 6 target layers


def eagle3_features(t, kind, weights, tokens):
    outputs = target_hiddens(weights, tokens)
    return torch.cat([outputs[layer] for layer in EAGLE3_TAPS[kind]], -1) @ t["fc.weight"].T


def eagle3_layer(t, kind, weights, tokens, hidden):
    """Outputs of all rows: row i is tokens[i] and the hidden state before it."""
    prefix = "midlayer." if kind == "eagle3" else "layers.0."
    part, positions = prefix + "self_attn.", torch.arange(len(tokens))
    x = torch.cat(
        [
            rms(weights.embedding[tokens], t[prefix + "input_layernorm.weight"], EPS),
            rms(hidden, t[prefix + "hidden_norm.weight"], EPS),
        ],
        -1,
    )
    q, k, v = (heads(x, t[f"{part}{side}_proj.weight"]) for side in "qkv")
    if kind == "deepspec_eagle3":
        q, k = (rms(y, t[f"{part}{s}_norm.weight"], EPS) for y, s in ((q, "q"), (k, "k")))
    q, k = turn(q, positions, THETA), turn(k, positions, THETA)
    attended = attention(q, k, v, positions[:, None] >= positions)
    return feed_forward(t, prefix, hidden + attended @ t[part + "o_proj.weight"].T)


def next_token_law(weights, tokens):
    """The target's law [V] of the token after a list of them."""
    last = target_hiddens(weights, torch.tensor(tokens))[TARGET.num_layers - 1][-1]
    return (rms(last, weights.final_norm, TARGET.norm_eps) @ weights.embedding.T).softmax(-1)


def assert_first_two_tokens_have_their_law(target, prompt, outputs):
    """The first and second tokens of many outputs of different seeds, at temperature 1 behind a prompt, by chi-squared."""
    w = target.weights.to("cpu").to(torch.float64)
    first = next_token_law(w, prompt)
    second = sum(p * next_token_law(w, [*prompt, token]) for token, p in enumerate(first))
    for place, exact in enumerate((first, second)):
        counted = torch.bincount(
            torch.tensor([ids[place] for ids in outputs]), minlength=TARGET.vocab_size
        )
        compare.assert_counts(counted, exact, f"token {place}")


def eagle3_chain(t, kind, weights, tokens, drafts):
    """Logits [len(drafts), Vd] of a chain whose tokens are given: tokens[-1] is the anchor."""
    hidden, followers = eagle3_features(t, kind, weights, tokens[:-1]), tokens[1:]
    head = t["lm_head.weight"] if kind == "eagle3" else weights.embedding
    logits = []
    for draft in drafts:
        last = eagle3_layer(t, kind, weights, followers, hidden)[-1:]
        logits.append(rms(last[0], t["norm.weight"], EPS) @ head.T)
        hidden, followers = torch.cat([hidden, last]), torch.cat([followers, draft[None]])
    return torch.stack(logits)
