"""Registers fake kernels, with the argument checks that are free of data and of guards.

A fake kernel answers for the real one wherever some tensor has no data: while tracing, and also when a
tensor on the meta device comes among others. Without checks that second case would return memory that
nobody wrote. Sizes are compared where they are plain numbers; a symbolic size gets no guard.
"""

from __future__ import annotations

import functools
import inspect

import torch

_DTYPES = {
    "float": (torch.float32, torch.float16, torch.bfloat16),
    "float32": (torch.float32,),
    "cache": (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    "index": (torch.int32, torch.int64),
    "int32": (torch.int32,),
    "int64": (torch.int64,),
    "bool": (torch.bool,),
}

CONTROLS = {
    "temperature": "float32 [B]",
    "top_k": "int32 [B]",
    "top_p": "float32 [B]",
    "min_p": "float32 [B]",
    "repetition_penalty": "float32 [B]",
    "frequency_penalty": "float32 [B]",
    "presence_penalty": "float32 [B]",
    "token_counts": "int32 [B, >= vocab_size]",
    "prompt_mask": "int32 [B, any]",
    "bias_offsets": "int32 [B+1]",
    "bias_ids": "index [n]",
    "bias_values": "float32 [n]",
    "token_bitmask": "int32 [M, any]",
    "bitmask_rows": "int32 [R]",
}


def fake(op, **specs):
    """Decorator: registers the fake kernel of `op`. `specs` give, per tensor argument and in the order
    in which they are checked, dtypes and shape: "float32 [B, >= vocab_size]". The first one sets the
    device. Instead of a dtype there may be an argument whose dtype is wanted. A name in a shape is an
    integer argument, or stands for the size it had where it came first; `name+1` is one more, a number is
    itself, `>=` compares with an argument, "any" may be anything; of "[1] or [B, V]" counts what has as many
    dimensions. A list of tensors is checked one by one.
    """

    def register(kernel):
        signature = inspect.signature(kernel)

        @functools.wraps(kernel)
        def checked(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            given = {}
            for name, value in bound.arguments.items():
                kind = signature.parameters[name].kind
                given.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
            _check(op, specs, given)
            return kernel(*args, **kwargs)

        torch.library.register_fake(f"specdec::{op}")(checked)
        return kernel

    return register


def _tensors(specs, given):
    """(name, tensor, spec) of every tensor given, those of a list under `name[i]`."""
    for name, spec in specs.items():
        value = given.get(name)
        if isinstance(value, (list, tuple)):
            yield from ((f"{name}[{i}]", tensor, spec) for i, tensor in enumerate(value))
        elif value is not None:
            yield name, value, spec


def _leader(op, name, value):
    """A tensor, or the first one of a list, with its name."""
    if not isinstance(value, (list, tuple)):
        return name, value
    if not value:
        raise RuntimeError(f"specdec::{op}: {name}: wanted at least one tensor, got none")
    return f"{name}[0]", value[0]


def _check(op, specs, given):
    first = next(iter(specs))
    first, leader = _leader(op, first, given[first])
    sizes = {name: value for name, value in given.items() if type(value) is int}
    for name, tensor, spec in _tensors(specs, given):

        def fail(wanted, got, name=name):
            raise RuntimeError(f"specdec::{op}: {name}: wanted {wanted}, got {got}")

        if tensor.device != leader.device:
            fail(f"the device of {first}", tensor.device)
        dtypes, shape = spec.split(" ", 1)
        shapes = [[dim.strip() for dim in one[1:-1].split(",")] for one in shape.split(" or ")]
        dims = next((dims for dims in shapes if len(dims) == tensor.dim()), None)
        if dims is None:
            fail(f"shape {shape}", list(tensor.shape))
        if dtypes == "any":
            continue
        allowed = _DTYPES.get(dtypes) or (_leader(op, dtypes, given[dtypes])[1].dtype,)
        if tensor.dtype not in allowed:
            wanted = " or ".join(str(dtype)[6:] for dtype in allowed)
            fail(f"dtype {wanted}", str(tensor.dtype)[6:])
        for d, (dim, size) in enumerate(zip(dims, tensor.shape, strict=True)):
            if dim.startswith(">="):
                least = given[dim[2:].strip()]
                if type(size) is type(least) is int and size < least:
                    fail(
                        f"at least {least} ({dim[2:].strip()}) in dimension {d}",
                        f"shape {list(tensor.shape)}",
                    )
                continue
            base, _, more = dim.partition("+")
            more = int(more or 0)
            if base == "any" or type(size) is not int:
                continue
            if base.isdigit():
                sizes[base] = int(base)
            if sizes.setdefault(base, size - more) + more != size:
                fail(
                    f"size {sizes[base] + more} ({dim}) in dimension {d}",
                    f"shape {list(tensor.shape)}",
                )
