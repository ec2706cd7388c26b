"""Loads the op libraries and says, where CUDA is absent, why."""

import json
import pathlib

import torch

_FOLDER = pathlib.Path(__file__).parent
_MIN_TORCH = (2, 10)


def _check_torch():
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _MIN_TORCH:
        raise ImportError(
            f"specdec_ext needs torch >= {_MIN_TORCH[0]}.{_MIN_TORCH[1]}, found {torch.__version__}"
        )


def build_info():
    """Facts about this build: versions, compiler, CUDA architectures (dict)."""
    path = _FOLDER / "_build_info.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _load_cuda():
    """Loads the CUDA library; returns the reason when it cannot be used, else ""."""
    library = _FOLDER / "_C_cuda.so"
    if not library.exists():
        return build_info().get("cuda_reason") or "this is a build without CUDA kernels"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return f"the CUDA library did not load: {error}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return ""


def load():
    """Registers all ops. Returns why the CUDA kernels cannot run here ("" if they can)."""
    _check_torch()
    library = _FOLDER / "_C.so"
    if not library.exists():
        raise ImportError(
            f"specdec_ext is not built: {library.name} is missing beside {_FOLDER.name}/__init__.py; "
            "run `pip install .` in the source tree"
        )
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise ImportError(
            f"specdec_ext (built with torch {build_info().get('torch_built_with', '?')}) "
            f"does not load under torch {torch.__version__}: {error}"
        ) from error
    return _load_cuda()
