"""Loaders of the drafters of examples/, on small random checkpoints written in the exporters' formats."""

import json

import draft_models
import pytest
import torch
from compare import assert_same

pytest.importorskip("safetensors")

from drafters.configs import read_block_config  # noqa: E402
from drafters.files import CheckpointError  # noqa: E402
from drafters.weights import load_block_drafter, load_eagle3, move  # noqa: E402

BLOCKS = ("dspark", "deepspec_dflash", "dflash")


def written(folder, kind, markov_head="vanilla"):
    tensors = draft_models.tensors_of(kind, markov_head)
    draft_models.write(folder, draft_models.config_of(kind, markov_head), tensors)
    return tensors


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_drafter_is_read(tmp_path, kind):
    tensors = written(tmp_path, kind)
    config, weights = load_block_drafter(tmp_path)
    layers = config.layers
    assert (layers.num_layers, layers.num_heads, layers.num_kv_heads) == (2, 4, 2)
    assert (layers.rope_theta, layers.norm_eps) == (draft_models.THETA, draft_models.EPS)
    assert config.target_layer_ids == (-1, 1, 3) and config.mask_token_id == draft_models.MASK
    assert config.markov_rank == (draft_models.RANK if kind == "dspark" else 0)
    assert (weights.markov is None) == (weights.confidence is None) == (kind != "dspark")
    assert_same(weights.fc, tensors["fc.weight"])
    assert_same(weights.hidden_norm, tensors["hidden_norm.weight"])
    assert_same(weights.final_norm, tensors["norm.weight"])
    for index, layer in enumerate(weights.layers):
        part = f"layers.{index}."
        k, v = (tensors[f"{part}self_attn.{side}_proj.weight"] for side in "kv")
        assert_same(layer.kv, torch.cat([k, v]))
        assert_same(layer.q, tensors[part + "self_attn.q_proj.weight"])
        assert_same(layer.q_norm, tensors[part + "self_attn.q_norm.weight"])
        assert_same(layer.k_norm, tensors[part + "self_attn.k_norm.weight"])
        assert_same(layer.input_norm, tensors[part + "input_layernorm.weight"])
        assert_same(layer.ffn_norm, tensors[part + "post_attention_layernorm.weight"])
        gate, up = (tensors[f"{part}mlp.{side}_proj.weight"] for side in ("gate", "up"))
        assert_same(layer.gate_up, torch.cat([gate, up]))


@pytest.mark.parametrize("markov_head", ["vanilla", "gated", "rnn"])
def test_heads_of_dspark_are_read(tmp_path, markov_head):
    tensors = written(tmp_path, "dspark", markov_head)
    config, weights = load_block_drafter(tmp_path)
    assert config.markov_head == markov_head
    assert_same(weights.markov.w1, tensors["markov_head.markov_w1.weight"])
    assert_same(weights.markov.w2, tensors["markov_head.markov_w2.weight"])
    for name, wanted in (("gate", "gated"), ("joint", "rnn")):
        for part in ("weight", "bias"):
            got = getattr(weights.markov, f"{name}_{part}")
            assert (got is not None) == (markov_head == wanted)
            if got is not None:
                assert_same(got, tensors[f"markov_head.{name}_proj.{part}"])
    assert_same(weights.confidence.weight, tensors["confidence_head.proj.weight"][0])
    assert weights.confidence.bias == float(tensors["confidence_head.proj.bias"])


def test_the_read_out_is_that_of_the_exporter_unless_said(tmp_path):
    for kind, anchor_first in zip(BLOCKS, (True, True, False), strict=True):
        written(tmp_path / kind, kind)
        for said in (None, True, False):
            config = read_block_config(tmp_path / kind, said)
            assert config.sample_from_anchor == (anchor_first if said is None else said)
            assert config.max_drafts == draft_models.BLOCK - (not config.sample_from_anchor)


def test_eagle3_is_read(tmp_path):
    tensors = written(tmp_path, "eagle3")
    config, weights = load_eagle3(tmp_path)
    assert config.draft_vocab_size == draft_models.REDUCED
    assert config.target_hidden_size == config.layers.hidden_size
    assert weights.embedding is None and weights.layer.q_norm is None
    assert_same(weights.d2t, tensors["d2t"])
    assert_same(weights.lm_head, tensors["lm_head.weight"])
    assert_same(weights.hidden_norm, tensors["midlayer.hidden_norm.weight"])
    assert_same(weights.layer.q, tensors["midlayer.self_attn.q_proj.weight"])
    embedding = torch.randn(draft_models.TARGET.vocab_size, draft_models.TARGET.hidden_size)
    config = draft_models.config_of("eagle3")
    draft_models.write(tmp_path, config, tensors | {"embed_tokens.weight": embedding})
    assert_same(load_eagle3(tmp_path)[1].embedding, embedding)
    # A whole vocabulary has no offsets.
    whole = {name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}
    whole["lm_head.weight"] = embedding
    draft_models.write(tmp_path, config | {"draft_vocab_size": len(embedding)}, whole)
    assert load_eagle3(tmp_path)[1].d2t is None


def test_deepspec_eagle3_is_read(tmp_path):
    tensors = written(tmp_path, "deepspec_eagle3")
    config, weights = load_eagle3(tmp_path)
    assert config.target_layer_ids == (1, 2, 4) and config.draft_vocab_size == 67
    assert weights.embedding is None and weights.lm_head is None and weights.d2t is None
    assert_same(weights.layer.k_norm, tensors["layers.0.self_attn.k_norm.weight"])
    assert_same(weights.layer.ffn_down, tensors["layers.0.mlp.down_proj.weight"])


def test_shards_and_state_dicts_hold_the_same(tmp_path):
    from safetensors.torch import save_file

    tensors = written(tmp_path / "one", "dspark")
    config = draft_models.config_of("dspark")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    shards = tmp_path / "shards"
    shards.mkdir()
    (shards / "config.json").write_text(json.dumps(config))
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, shards / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    index = shards / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text(json.dumps(config))
    torch.save(tensors, pickled / "pytorch_model.bin")
    wanted = load_block_drafter(tmp_path / "one")[1]
    for folder in (shards, pickled):
        got = load_block_drafter(folder)[1]
        assert_same(got.fc, wanted.fc)
        assert_same(got.layers[1].ffn_down, wanted.layers[1].ffn_down)
        assert_same(got.markov.w2, wanted.markov.w2)
    index.write_text(json.dumps({"weight_map": weight_map | {"lost.weight": "a.safetensors"}}))
    with pytest.raises(CheckpointError, match="lost.weight: wanted a tensor in a.safetensors, got"):
        load_block_drafter(shards)
    (shards / "b.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="b.safetensors: no such file"):
        load_block_drafter(shards)


def test_weights_move_and_the_confidence_head_stays_float32(tmp_path):
    written(tmp_path / "dspark", "dspark", "rnn")
    moved = move(load_block_drafter(tmp_path / "dspark")[1], torch.device("cpu"), torch.bfloat16)
    assert moved.layers[1].kv.dtype == moved.markov.joint_bias.dtype == torch.bfloat16
    assert moved.confidence.weight.dtype == torch.float32
    written(tmp_path / "eagle3", "eagle3")
    moved = move(load_eagle3(tmp_path / "eagle3")[1], torch.device("cpu"), torch.bfloat16)
    assert moved.d2t.dtype == torch.int64 and moved.layer.q_norm is None


GONE = object()


@pytest.mark.parametrize(
    "kind, key, value, message",
    [
        ("dspark", "architectures", ["LlamaForCausalLM"], r"architectures: wanted one of Qwen3DSparkModel"),
        ("dspark", "block_size", GONE, "block_size: wanted int, got nothing"),
        ("dspark", "block_size", "7", "block_size: wanted int, got '7'"),
        ("dspark", "block_size", 0, "block_size: wanted at least 1, got 0"),
        ("dspark", "mask_token_id", 67, "mask_token_id: wanted an id below 67, got 67"),
        ("dspark", "target_layer_ids", [1, 5], "target_layer_ids: wanted ids of -1 to 4, not the last, got 5"),
        ("dspark", "target_layer_ids", [], r"target_layer_ids: wanted a list of integers, got \[\]"),
        ("dspark", "markov_head_type", "lstm", "markov_head_type: wanted one of vanilla, gated, rnn, got 'lstm'"),
        ("dspark", "markov_head_type", GONE, "markov_head_type: wanted str, got nothing"),
        ("dspark", "markov_rank", GONE, "markov_rank: wanted int, got nothing"),
        ("dspark", "markov_rank", 0, "enable_confidence_head: wanted false with markov_rank 0, got True"),
        ("dspark", "rope_scaling", {"rope_type": "yarn"}, "rope_scaling.rope_type: wanted one of default, got 'yarn'"),
        ("dspark", "layer_types", ["sliding_attention"], "layer_types: wanted full_attention alone, got 'sliding"),
        ("dspark", "rms_norm_eps", None, "rms_norm_eps: wanted float, got nothing"),
        ("dspark", "num_key_value_heads", 3, "num_key_value_heads: wanted a divisor of 4, got 3"),
        ("dflash", "dflash_config", {"target_layer_ids": [1]}, "dflash_config.mask_token_id: wanted int, got nothing"),
        ("dflash", "dflash_config", GONE, "dflash_config: wanted dict, got nothing"),
        ("dflash", "block_size", 1, "block_size: wanted at least 2, as row 0 predicts nothing, got 1"),
        ("eagle3", "num_hidden_layers", 2, "num_hidden_layers: wanted 1, got 2"),
        ("eagle3", "norm_before_residual", True, "norm_before_residual: wanted False, got True"),
        ("eagle3", "draft_vocab_size", 68, "draft_vocab_size: wanted at most 67, got 68"),
    ],
)  # fmt: skip
def test_a_wrong_key_is_named(tmp_path, kind, key, value, message):
    written(tmp_path, kind)
    config = draft_models.config_of(kind) | {key: value}
    config = {name: item for name, item in config.items() if item is not GONE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json: " + message):
        (load_eagle3 if kind == "eagle3" else load_block_drafter)(tmp_path)


@pytest.mark.parametrize(
    "kind, name, change, message",
    [
        ("dspark", "fc.weight", GONE, r"fc.weight: wanted a tensor \[96, 288\], got nothing"),
        ("dspark", "fc.weight", torch.zeros(96, 192), r"fc.weight: wanted shape \[96, 288\], got \[96, 192\]"),
        ("dspark", "layers.1.self_attn.k_norm.weight", GONE, r"layers.1.self_attn.k_norm.weight: wanted a tensor \[64\]"),
        ("dspark", "lm_head.weight", torch.zeros(60, 96), r"lm_head.weight: wanted shape \[67, 96\], got \[60, 96\]"),
        ("dspark", "markov_head.markov_w2.weight", torch.zeros(67, 4), r"markov_w2.weight: wanted shape \[67, 8\]"),
        ("dspark", "confidence_head.proj.bias", GONE, r"confidence_head.proj.bias: wanted a tensor \[1\], got nothing"),
        ("dspark", "layers.2.mlp.up_proj.weight", torch.zeros(3), r"layers.2.mlp.up_proj.weight: wanted no such tensor, got shape \[3\]"),
        ("deepspec_dflash", "markov_head.markov_w1.weight", torch.zeros(67, 8), "markov_w1.weight: wanted no such tensor"),
        ("dflash", "hidden_norm.weight", GONE, r"hidden_norm.weight: wanted a tensor \[96\], got nothing"),
        ("eagle3", "d2t", GONE, r"d2t: wanted a tensor \[23\], got nothing"),
        ("eagle3", "d2t", torch.zeros(23), "d2t: wanted int64 offsets, got torch.float32"),
        ("eagle3", "d2t", torch.full((23,), 60), "d2t: wanted offsets to target ids below 67, got id 67"),
        ("eagle3", "d2t", -torch.arange(23), "d2t: wanted offsets to 23 different target ids, got 1"),
        ("eagle3", "t2d", torch.ones(67, dtype=torch.bool), "t2d: wanted the target ids of d2t, got others"),
        ("eagle3", "midlayer.self_attn.q_proj.weight", torch.zeros(256, 96), r"q_proj.weight: wanted shape \[256, 192\]"),
    ],
)  # fmt: skip
def test_a_wrong_tensor_is_named(tmp_path, kind, name, change, message):
    tensors = {**draft_models.tensors_of(kind), name: change}
    tensors = {key: tensor for key, tensor in tensors.items() if tensor is not GONE}
    draft_models.write(tmp_path, draft_models.config_of(kind), tensors)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*" + message):
        (load_eagle3 if kind == "eagle3" else load_block_drafter)(tmp_path)


def test_what_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json: no such file"):
        load_block_drafter(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json: the file: wanted JSON, got"):
        load_block_drafter(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(draft_models.config_of("dflash")))
    with pytest.raises(
        FileNotFoundError, match="no model.safetensors, model.safetensors.index.json or"
    ):
        load_block_drafter(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(CheckpointError, match="the file: wanted safetensors, got"):
        load_block_drafter(tmp_path)


def test_theta_may_lie_in_rope_parameters(tmp_path):
    written(tmp_path, "dflash")
    config = draft_models.config_of("dflash")
    theta = config.pop("rope_theta")
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": int(theta)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_block_drafter(tmp_path)[0].layers.rope_theta == theta
