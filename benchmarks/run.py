"""`make bench`: every op's benchmark, correctness first; results as JSON and Markdown.

python benchmarks/run.py [--ops sample,verify_chain] [--device cpu] [--threads 1,2] [--out DIR]
"""

import argparse
import importlib.util
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "python_tests"), str(HERE.parent)]
sys.path = [p for p in sys.path if pathlib.Path(p or ".").resolve() != HERE]

import torch  # noqa: E402

import specdec_ext  # noqa: E402


def load(name):
    spec = importlib.util.spec_from_file_location(f"bench_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ops", help="comma-separated (default: all)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--threads", default=",".join(str(n) for n in sorted({1, min(2, os.cpu_count())}))
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", default=str(HERE / "results"))
    options = parser.parse_args()
    ops = options.ops.split(",") if options.ops else specdec_ext.op_names()
    threads = [int(n) for n in options.threads.split(",")]
    harness = load("harness").Harness(options.device, threads, options.repeats)
    print(", ".join(f"{key} {value}" for key, value in harness.machine().items()))
    with torch.inference_mode():
        for op in ops:
            if (HERE / f"{op}.py").exists():
                load(op).bench(harness)
            else:
                print(f"{op}: no benchmark")
    print(f"written: {harness.write(options.out)}")


main()
