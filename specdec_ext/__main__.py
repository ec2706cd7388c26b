"""`python -m specdec_ext [info | selftest | bench]`."""

import argparse
import os
import platform
import sys

import torch

import specdec_ext
from specdec_ext import _load


def info() -> int:
    """Versions, devices, backends, and why CUDA is absent where it is."""
    build = specdec_ext.build_info()
    lines = [
        ("specdec_ext", specdec_ext.__version__),
        ("built with", f"torch {build.get('torch_built_with')}, {build.get('compiler')}"),
        ("running on", f"torch {torch.__version__}, Python {platform.python_version()}"),
        ("stable ABI", f"target {build.get('torch_target')}"),
        (
            "CPU backend",
            f"{platform.machine()}, {os.cpu_count()} CPUs, ISA {specdec_ext.cpu_isa()}",
        ),
    ]
    if specdec_ext.cuda_reason:
        lines.append(("CUDA backend", f"absent: {specdec_ext.cuda_reason}"))
    else:
        archs = build.get("cuda_archs")
        lines.append(("CUDA backend", f"nvcc {build.get('nvcc')}, architectures {archs}"))
        for index in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(index)
            text = f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory >> 30} GiB"
            problem = _load.architecture_problem(index)
            lines.append((f"cuda:{index}", f"{text}; {problem}" if problem else text))
    lines.append(("ops", ", ".join(specdec_ext.op_names())))
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        print(f"{name:<{width}}  {text}")
    return 0


def selftest() -> int:
    """Run every op on every device here and compare with plain torch; exit code 1 if one differs."""
    from specdec_ext import _selftest

    return 1 if _selftest.run(lambda line: print(line, flush=True)) else 0


def bench() -> int:
    """Time a few ops beside torch's way to do the same."""
    from specdec_ext import _bench, _selftest

    with torch.inference_mode():
        _bench.run(lambda line: print(line, flush=True), _selftest.devices())
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specdec_ext")
    commands = parser.add_subparsers(dest="command", metavar="{info,selftest,bench}")
    for command in (info, selftest, bench):
        commands.add_parser(command.__name__, help=command.__doc__, description=command.__doc__)
    chosen = parser.parse_args(arguments).command or "info"
    return {"info": info, "selftest": selftest, "bench": bench}[chosen]()


if __name__ == "__main__":
    sys.exit(main())
