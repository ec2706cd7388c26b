"""Loads the op libraries and says, where CUDA is absent, why."""

import json
import pathlib
import re
import warnings

import torch

_FOLDER = pathlib.Path(__file__).parent
_MIN_TORCH = (2, 10)


def _check_torch() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _MIN_TORCH:
        raise ImportError(
            f"specdec_ext needs torch >= {_MIN_TORCH[0]}.{_MIN_TORCH[1]}, found {torch.__version__}; "
            f"run `pip install 'torch>={_MIN_TORCH[0]}.{_MIN_TORCH[1]}'`"
        )


def build_info() -> dict[str, str]:
    """Facts about this build: versions, compiler, CUDA architectures (dict)."""
    path = _FOLDER / "_build_info.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _runs_on(archs: str, capability: tuple[int, int]) -> bool:
    """Whether code for a CMake list of architectures ("80-real;90a-real;120") runs on a device.

    Machine code runs on its own generation from its own minor version on; that of "90a" on 9.0 alone, and
    of "100f" on its generation. PTX (no "-real") of plain numbers runs on everything newer.
    """
    for arch in archs.split(";"):
        match = re.fullmatch(r"(\d+)(\d)([af]?)(-real|-virtual)?", arch.strip())
        if match is None:
            continue
        built = (int(match[1]), int(match[2]))
        if match[3] == "a":
            runs = capability == built
        elif match[3] == "f" or match[4] == "-real":
            runs = capability[0] == built[0] and capability >= built
        else:
            runs = capability >= built
        if runs:
            return True
    return False


def architecture_problem(index: int) -> str:
    """Why the kernels of this build cannot run on GPU `index`, or "". Initialises CUDA."""
    archs, capability = build_info().get("cuda_archs", ""), torch.cuda.get_device_capability(index)
    if _runs_on(archs, capability):
        return ""
    here = f"{capability[0]}{capability[1]}"
    return (
        f"specdec_ext was built for the CUDA architectures {archs or 'of nothing'}, and cuda:{index} "
        f"({torch.cuda.get_device_name(index)}) is sm_{here}; "
        f"build it with SPECDEC_CUDA_ARCHS={here}-real pip install ."
    )


def _warn_of_architectures() -> None:
    for index in range(torch.cuda.device_count()):
        problem = architecture_problem(index)
        if problem:
            warnings.warn(problem, stacklevel=2)


def _load_cuda() -> str:
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
    # A look at the devices initialises CUDA, which an import must not do (processes that fork afterwards
    # could not use it). So the warning comes when CUDA is used first, as torch's own one does.
    if hasattr(torch.cuda, "_lazy_call"):
        torch.cuda._lazy_call(_warn_of_architectures)
    return ""


def load() -> str:
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
