"""A small batched decoding engine on top of the specdec operators."""

import specdec_ext  # noqa: F401  (registers torch.ops.specdec, which every module here calls)
