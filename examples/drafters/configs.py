"""What the config.json of a drafter says, for the exports that the loaders read.

| architectures[0] | export | keys |
| --- | --- | --- |
| `Qwen3DSparkModel` | DeepSpec's DSpark, and its DFlash (`markov_rank` 0) | all at top level |
| `DFlashDraftModel` | z-lab's DFlash | `mask_token_id` and `target_layer_ids` in `dflash_config` |
| `LlamaForCausalLMEagle3` | EAGLE-3 | `draft_vocab_size`; the tapped layers follow from the target |
| `Qwen3Eagle3Model` | DeepSpec's EAGLE-3 | `target_layer_ids`; the whole vocabulary, heads with norms |
"""

from dataclasses import dataclass
from pathlib import Path

from drafters.files import ConfigFile

DSPARK, DFLASH = "Qwen3DSparkModel", "DFlashDraftModel"
EAGLE3, DEEPSPEC_EAGLE3 = "LlamaForCausalLMEagle3", "Qwen3Eagle3Model"
HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class LayerConfig:
    """The decoder layers of a drafter."""

    vocab_size: int  # of the target
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    rope_theta: float
    norm_eps: float


@dataclass(frozen=True)
class BlockConfig:
    """A block drafter: DFlash, or DSpark where `markov_rank` is not 0."""

    layers: LayerConfig
    target_layer_ids: tuple[int, ...]  # outputs of these target layers; -1 is the embedding
    num_target_layers: int
    block_size: int  # rows of a draft pass in training: the anchor and masks
    mask_token_id: int
    sample_from_anchor: bool  # row 0 predicts the first draft; else row 1 does
    markov_rank: int = 0
    markov_head: str = "vanilla"
    has_confidence: bool = False
    confidence_reads_markov: bool = True

    @property
    def max_drafts(self) -> int:
        return self.block_size if self.sample_from_anchor else self.block_size - 1


@dataclass(frozen=True)
class Eagle3Config:
    layers: LayerConfig
    draft_vocab_size: int
    target_hidden_size: int
    layer_prefix: str  # of tensor names
    normed_heads: bool
    target_layer_ids: tuple[int, ...] | None  # None: those of `eagle3_taps`

    @property
    def num_features(self) -> int:
        return 3 if self.target_layer_ids is None else len(self.target_layer_ids)


def eagle3_taps(num_target_layers: int) -> tuple[int, int, int]:
    """Outputs of these layers are what enters layers 2, L // 2 and L - 3."""
    return 1, num_target_layers // 2 - 1, num_target_layers - 4


def read_block_config(folder: Path, sample_from_anchor: bool | None = None) -> BlockConfig:
    """`sample_from_anchor` says how the block is read. No shape tells the two ways apart and no key of these exports
    names them; None takes the one that the architecture's exporter trains."""
    file = ConfigFile(folder / "config.json")
    architecture = _architecture(file, (DSPARK, DFLASH))
    nested = file.section("dflash_config") if architecture == DFLASH else file
    if nested.get("causal", bool, False):
        nested.fail("causal", "false: rows of a block that see each other", True)
    layers = _layers(file)
    num_target_layers = file.size("num_target_layers")
    ids = nested.integers("target_layer_ids")
    for layer in ids:
        if not -1 <= layer < num_target_layers - 1:
            nested.fail(
                "target_layer_ids", f"ids of -1 to {num_target_layers - 2}, not the last", layer
            )
    mask = nested.get("mask_token_id", int)
    if not 0 <= mask < layers.vocab_size:
        nested.fail("mask_token_id", f"an id below {layers.vocab_size}", mask)
    sizes = file if file.has("block_size") or not nested.has("block_size") else nested
    anchor_first = architecture == DSPARK if sample_from_anchor is None else sample_from_anchor
    block_size = sizes.size("block_size")
    if block_size == 1 and not anchor_first:
        sizes.fail("block_size", "at least 2, as row 0 predicts nothing", 1)
    rank, has_confidence = 0, False
    if architecture == DSPARK:
        rank = file.get("markov_rank", int)
        if rank < 0:
            file.fail("markov_rank", "at least 0", rank)
        has_confidence = file.get("enable_confidence_head", bool, False)
    if has_confidence and rank == 0:
        file.fail("enable_confidence_head", "false with markov_rank 0", True)
    reads_markov = has_confidence and file.get("confidence_head_with_markov", bool)
    return BlockConfig(
        layers=layers,
        target_layer_ids=ids,
        num_target_layers=num_target_layers,
        block_size=block_size,
        mask_token_id=mask,
        sample_from_anchor=anchor_first,
        markov_rank=rank,
        markov_head=file.choice("markov_head_type", HEADS) if rank else "vanilla",
        has_confidence=has_confidence,
        confidence_reads_markov=reads_markov,
    )


def read_eagle3_config(folder: Path) -> Eagle3Config:
    file = ConfigFile(folder / "config.json")
    deepspec = _architecture(file, (EAGLE3, DEEPSPEC_EAGLE3)) == DEEPSPEC_EAGLE3
    layers = _layers(file)
    if layers.num_layers != 1:
        file.fail("num_hidden_layers", 1, layers.num_layers)
    for other in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        if file.get(other, bool, False):
            file.fail(other, False, True)
    draft_vocab_size = layers.vocab_size
    if not deepspec:
        draft_vocab_size = file.size("draft_vocab_size", layers.vocab_size)
    if draft_vocab_size > layers.vocab_size:
        file.fail("draft_vocab_size", f"at most {layers.vocab_size}", draft_vocab_size)
    return Eagle3Config(
        layers=layers,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=file.size("target_hidden_size", layers.hidden_size),
        layer_prefix="layers.0." if deepspec else "midlayer.",
        normed_heads=deepspec,
        target_layer_ids=file.integers("target_layer_ids") if deepspec else None,
    )


def _architecture(file: ConfigFile, known: tuple[str, ...]) -> str:
    names = file.get("architectures", list)
    if len(names) != 1 or names[0] not in known:
        file.fail("architectures", f"one of {', '.join(known)}", names)
    return names[0]


def _layers(file: ConfigFile) -> LayerConfig:
    hidden_size, num_heads = file.size("hidden_size"), file.size("num_attention_heads")
    num_kv_heads = file.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        file.fail("num_key_value_heads", f"a divisor of {num_heads}", num_kv_heads)
    if not file.has("head_dim") and hidden_size % num_heads:
        file.fail(
            "head_dim", f"a size, as {num_heads} heads do not divide {hidden_size}", "nothing"
        )
    num_layers = file.size("num_hidden_layers")
    for kind in file.get("layer_types", list, []):
        if kind != "full_attention":
            file.fail("layer_types", "full_attention alone", repr(kind))
    if file.get("attention_bias", bool, False):
        file.fail("attention_bias", False, True)
    file.choice("hidden_act", ("silu",), "silu")
    return LayerConfig(
        vocab_size=file.size("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=file.size("head_dim", hidden_size // num_heads),
        ffn_size=file.size("intermediate_size"),
        rope_theta=_rope_theta(file),
        norm_eps=file.get("rms_norm_eps", float),
    )


def _rope_theta(file: ConfigFile) -> float:
    """Plain rotation: scaled ones (yarn, llama3) have other angles. Newer files keep theta in rope_parameters."""
    for key in ("rope_scaling", "rope_parameters"):
        if file.has(key):
            rope = file.section(key)
            for name in ("rope_type", "type"):
                rope.choice(name, ("default",), "default")
            if rope.has("rope_theta"):
                return rope.get("rope_theta", float)
    return file.get("rope_theta", float)
