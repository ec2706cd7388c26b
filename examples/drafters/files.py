"""A checkpoint's config.json and tensors, read strictly: what is missing, wrong or left over is an error that names
file, key, what was wanted and what is there."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

_REQUIRED = object()


class CheckpointError(ValueError):
    def __init__(self, path: Path, key: str, wanted: object, got: object):
        super().__init__(f"{path}: {key}: wanted {wanted}, got {got}")


class ConfigFile:
    """Keys of config.json, or of an object inside it (`section`)."""

    def __init__(self, path: Path, values: Mapping | None = None, prefix: str = ""):
        self.path, self._prefix = path, prefix
        self._values = read_json(path) if values is None else values

    def get(self, key: str, kind: type, default=_REQUIRED):
        """The value of a key. A null counts as missing, and an integer is a float too."""
        value = self._values.get(key)
        if value is None:
            if default is _REQUIRED:
                self.fail(key, kind.__name__, "nothing")
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            self.fail(key, kind.__name__, repr(value))
        return value

    def size(self, key: str, default=_REQUIRED) -> int:
        value = self.get(key, int, default)
        if value is not None and value < 1:
            self.fail(key, "at least 1", value)
        return value

    def choice(self, key: str, choices: Iterable[str], default=_REQUIRED) -> str:
        value = self.get(key, str, default)
        if value not in choices:
            self.fail(key, f"one of {', '.join(choices)}", repr(value))
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        values = self.get(key, list)
        if not values or any(type(value) is not int for value in values):
            self.fail(key, "a list of integers", values)
        return tuple(values)

    def section(self, key: str) -> "ConfigFile":
        return ConfigFile(self.path, self.get(key, dict), f"{self._prefix}{key}.")

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def fail(self, key: str, wanted: object, got: object):
        raise CheckpointError(self.path, self._prefix + key, wanted, got)


class TensorFiles:
    """The tensors of a checkpoint folder: safetensors, in shards or not, or a state dict of torch."""

    def __init__(self, folder: Path):
        self.path, self._tensors = read_tensors(folder)

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of a name, as stored."""
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise CheckpointError(self.path, name, f"a tensor {list(shape)}", "nothing")
        if tensor.shape != shape:
            raise CheckpointError(self.path, name, f"shape {list(shape)}", list(tensor.shape))
        return tensor

    def take_if_there(self, name: str, *shape: int) -> Tensor | None:
        return self.take(name, *shape) if name in self._tensors else None

    def finish(self) -> None:
        """Nothing may be left: a tensor that no loader knows belongs to a model that is computed otherwise."""
        for name, tensor in self._tensors.items():
            raise CheckpointError(self.path, name, "no such tensor", f"shape {list(tensor.shape)}")


def read_json(path: Path) -> dict:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(path, "the file", "JSON", error) from error
    if not isinstance(values, dict):
        raise CheckpointError(path, "the file", "an object", type(values).__name__)
    return values


def read_tensors(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """All tensors, and the file that speaks for them in messages."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    pickled = folder / "pytorch_model.bin"
    if single.is_file():
        return single, _read_safetensors(single)
    if index.is_file():
        tensors: dict[str, Tensor] = {}
        weight_map = ConfigFile(index).get("weight_map", dict)
        for shard in sorted(set(weight_map.values())):
            tensors |= _read_safetensors(folder / shard)
        for name in weight_map:
            if name not in tensors:
                raise CheckpointError(index, name, f"a tensor in {weight_map[name]}", "nothing")
        return index, tensors
    if pickled.is_file():
        return pickled, torch.load(pickled, map_location="cpu", weights_only=True)
    raise FileNotFoundError(
        f"{folder}: no {single.name}, {index.name} or {pickled.name}: no tensors to read"
    )


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(path, "the file", "safetensors", error) from error
