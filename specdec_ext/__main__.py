"""`python -m specdec_ext`: versions, devices, backends, and why CUDA is absent where it is."""

import os
import platform

import torch

import specdec_ext


def main():
    info = specdec_ext.build_info()
    lines = [
        ("specdec_ext", specdec_ext.__version__),
        ("built with", f"torch {info.get('torch_built_with')}, {info.get('compiler')}"),
        ("running on", f"torch {torch.__version__}, Python {platform.python_version()}"),
        ("stable ABI", f"target {info.get('torch_target')}"),
        (
            "CPU backend",
            f"{platform.machine()}, {os.cpu_count()} CPUs, ISA {specdec_ext.cpu_isa()}",
        ),
    ]
    if specdec_ext.cuda_reason:
        lines.append(("CUDA backend", f"absent: {specdec_ext.cuda_reason}"))
    else:
        archs = info.get("cuda_archs")
        lines.append(("CUDA backend", f"nvcc {info.get('nvcc')}, architectures {archs}"))
        for index in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(index)
            lines.append(
                (f"cuda:{index}", f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory >> 30} GiB")
            )
    lines.append(("ops", ", ".join(specdec_ext.op_names())))
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        print(f"{name:<{width}}  {text}")


main()
