"""Checks the machine code of the kernels that live by their instructions: verify_attention and row_linear.

    python tools/check_sass.py LIBRARY [--archs "80-real;90-real"]     a library or object with GPU code
    python tools/check_sass.py LISTING.sass                            what cuobjdump -sass wrote

Per kernel and architecture: bf16 and fp16 products are HMMA instructions, global memory comes by asynchronous
copies of 16 bytes past L1 (LDGSTS.E.BYPASS.128), and there is no local memory (LDL, STL), which also means no
spills. Any violation, an architecture without code and a rule that no kernel answers to end with exit code 1.
cuobjdump and nvdisasm are looked for in PATH and in the PyPI packages nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm; without them it says so and succeeds.
"""

import argparse
import collections
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

HMMA = re.compile(r"HMMA\.\w")
COPY_16 = re.compile(r"LDGSTS\.E\.BYPASS(\.LTC\w+)?\.128(\.ZFILL)?$")
LOCAL = re.compile(r"(LDL|STL)(\.|$)")


@dataclasses.dataclass(frozen=True)
class Rule:
    """What the functions whose mangled names match must have; none of them may use local memory."""

    name: str
    pattern: str
    wanted: dict  # what it is called: the pattern of an opcode


RULES = [
    Rule(
        "verify_attention",
        r"\d+verify_attention_kernelI",
        {"HMMA": HMMA, "LDGSTS.E.BYPASS.128": COPY_16},
    ),
    Rule("verify_attention, other dtypes", r"\d+verify_attention_simt_kernelI", {}),
    Rule("verify_attention, combine", r"\d+verify_attention_combine_kernelI", {}),
    Rule(
        "row_linear of bf16 and fp16",
        r"\d+row_linear_kernelI.*\dLinearTraitsINS_\d+b?f16E",
        {"HMMA": HMMA, "LDGSTS.E.BYPASS.128": COPY_16},
    ),
    Rule(
        "row_linear of float32",
        r"\d+row_linear_kernelI.*\dLinearTraitsIf",
        {"LDGSTS.E.BYPASS.128": COPY_16},
    ),
]


@dataclasses.dataclass
class Function:
    name: str
    arch: str
    opcodes: collections.Counter

    def count(self, pattern):
        return sum(n for opcode, n in self.opcodes.items() if pattern.match(opcode))


def parse(sass):
    """Every function of a listing of cuobjdump -sass."""
    found, arch, function = [], "", None
    for line in sass.splitlines():
        if m := re.match(r"\s*code for (sm_\w+)", line):
            arch, function = m.group(1), None
        elif m := re.match(r"\s*Function : (\S+)", line):
            function = Function(m.group(1), arch, collections.Counter())
            found.append(function)
        elif function and (
            m := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", line)
        ):
            function.opcodes[m.group(1)] += 1
    return found


def violations(functions, archs=()):
    """Texts of what is wrong."""
    wrong = []
    seen = {f.arch.rstrip("af") for f in functions}
    wrong += [f"no code for {arch}" for arch in archs if arch not in seen]
    for rule in RULES:
        of_rule = [f for f in functions if re.search(rule.pattern, f.name)]
        for arch in sorted(seen):
            if not any(f.arch.rstrip("af") == arch for f in of_rule):
                wrong.append(f"{rule.name}: no kernel for {arch}")
        for f in of_rule:
            for what, pattern in rule.wanted.items():
                if f.count(pattern) == 0:
                    wrong.append(f"{rule.name}: no {what} in {f.name} for {f.arch}")
            if local := f.count(LOCAL):
                wrong.append(f"{rule.name}: {local} LDL or STL in {f.name} for {f.arch}")
    return wrong


def summary(functions):
    """A line per rule and architecture: kernels, and the fewest of each wanted instruction."""
    lines = []
    for rule in RULES:
        for arch in sorted({f.arch for f in functions}):
            own = [f for f in functions if f.arch == arch and re.search(rule.pattern, f.name)]
            if own:
                fewest = (
                    f"{min(f.count(p) for f in own)} {what}" for what, p in rule.wanted.items()
                )
                lines.append(
                    f"{arch:<7} {rule.name}: {len(own)} kernels, at least " + ", ".join(fewest)
                )
                lines[-1] = lines[-1].removesuffix(", at least ")
    return lines


def find_tool(name):
    if path := shutil.which(name):
        return path
    packages = pathlib.Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    return next((str(p) for p in sorted(packages.glob(f"*/bin/{name}"))), None)


def run_tool(name, *arguments):
    """What a tool of the CUDA toolkit prints; None without it. They find nvdisasm beside them or in PATH."""
    tool, nvdisasm = find_tool(name), find_tool("nvdisasm")
    if not tool or (name == "cuobjdump" and not nvdisasm):
        return None
    folders = [str(pathlib.Path(nvdisasm).parent)] if nvdisasm else []
    path = os.pathsep.join([*folders, os.environ.get("PATH", "")])
    done = subprocess.run(
        [tool, *arguments], env={**os.environ, "PATH": path}, text=True, capture_output=True
    )
    if done.returncode != 0:
        sys.exit(f"{name}: {done.stderr.strip()}")
    return done.stdout


def cuobjdump(path, flag):
    return run_tool("cuobjdump", flag, str(path))


def demangle(names):
    """Readable names by mangled ones; the same without c++filt."""
    text = run_tool("c++filt", "-p", *names) if names else ""
    return dict(zip(names, text.splitlines() if text else names, strict=True))


def listing(path):
    """The SASS of a file; None without the tools."""
    return path.read_text() if path.suffix == ".sass" else cuobjdump(path, "-sass")


def check(path, archs=""):
    """Prints what there is, and exits where something is wrong."""
    sass = listing(pathlib.Path(path))
    if sass is None:
        print(
            "check_sass: SKIPPED, no cuobjdump and nvdisasm (PyPI: nvidia-cuda-cuobjdump, -nvdisasm)"
        )
        return
    functions = parse(sass)
    wrong = violations(functions, ["sm_" + a.split("-")[0] for a in archs.split(";") if a])
    print("\n".join(summary(functions)))
    if wrong or not functions:
        sys.exit("check_sass: " + ("\n  ".join(wrong) or "no function in the listing"))
    print(f"check_sass: {len(functions)} functions, all rules hold")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file")
    parser.add_argument("--archs", default="", help="architectures that must be there")
    options = parser.parse_args()
    check(options.file, options.archs)


if __name__ == "__main__":
    main()
