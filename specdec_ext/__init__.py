"""specdec_ext: CUDA and CPU kernels for speculative decoding, as PyTorch ops (torch.ops.specdec.*)."""

from specdec_ext import _load

cuda_reason = _load.load()  # why the CUDA kernels cannot run here; "" where they can

from specdec_ext._load import build_info  # noqa: E402
from specdec_ext._philox import philox4x32  # noqa: E402
from specdec_ext.calibration import (  # noqa: E402
    Calibration,
    StepTable,
    best_budget,
    calibration_error,
    expected_speedup,
    fit_sts,
    load_sts,
    profile_steps,
    save_sts,
)
from specdec_ext.drafting import draft_block, prepare_kv_weights  # noqa: E402
from specdec_ext.ops import (  # noqa: E402
    SamplingControls,
    append_kv,
    block_tree,
    build_tree,
    compact_kv,
    cpu_isa,
    expand_tree,
    fuse_features,
    inject_kv,
    markov_draft,
    next_round,
    op_names,
    row_linear,
    sample,
    schedule_prefix,
    tree_from_mask,
    tree_links,
    verify_attention,
    verify_chain,
    verify_tree,
)
from specdec_ext.prune import PreparedHead, prepare_markov  # noqa: E402
from specdec_ext.trees import tree_from_paths  # noqa: E402

__version__ = build_info().get("version", "0+unknown")

__all__ = [
    "Calibration",
    "PreparedHead",
    "SamplingControls",
    "StepTable",
    "append_kv",
    "best_budget",
    "block_tree",
    "build_info",
    "build_tree",
    "calibration_error",
    "compact_kv",
    "cpu_isa",
    "cuda_reason",
    "draft_block",
    "expand_tree",
    "expected_speedup",
    "fit_sts",
    "fuse_features",
    "inject_kv",
    "load_sts",
    "markov_draft",
    "next_round",
    "op_names",
    "philox4x32",
    "prepare_kv_weights",
    "prepare_markov",
    "profile_steps",
    "row_linear",
    "sample",
    "save_sts",
    "schedule_prefix",
    "tree_from_mask",
    "tree_from_paths",
    "tree_links",
    "verify_attention",
    "verify_chain",
    "verify_tree",
]
