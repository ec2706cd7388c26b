"""Callers written against an engine's own module, run on that module's oracle and, with the import changed and
nothing else, on specdec_ext.compat."""

import inspect
import sys
import types

import backends
import torch

import specdec_ext

# Most of compat is tensor code: it runs on every backend's ops in a few tests, on the devices here in all.
DEVICES = [name for name in backends.available() if name in ("cpu", "cuda")]


def use_backend(monkeypatch, backend):
    """Let the wrappers of specdec_ext call a backend's ops, so that compat runs on it."""
    monkeypatch.setattr(specdec_ext.ops, "_ops", backend.ops)


def on(backend, arguments):
    """Arguments by name, tensors on the backend's device."""
    return {k: v.to(backend.device) if torch.is_tensor(v) else v for k, v in arguments.items()}


def run_caller(text, name, *args):
    """What the function `name` of a program's text returns."""
    space = {}
    exec(compile(text, "caller", "exec"), space)
    return space[name](*args)


def with_peer(monkeypatch, path, oracle, text, name, *args):
    """Run the caller with the oracle standing where the engine's module would be, packages included."""
    parts = path.split(".")
    for i in range(1, len(parts)):
        package = types.ModuleType(".".join(parts[:i]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, path, oracle)
    return run_caller(text, name, *args)


def with_import_changed(text, path, replacement, name, *args):
    old, new = f"from {path} import", f"from {replacement} import"
    assert text.count(old) == 1
    return run_caller(text.replace(old, new), name, *args)


def parameters(function):
    """Names of a function's parameters, those with a default as name=default."""
    found = inspect.signature(function).parameters.values()
    return [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in found]
