"""Project rules that no standard linter knows; `make lint` runs this beside ruff.

    python tools/lint.py            check
    python tools/lint.py --format   also rewrite C++ sources with clang-format

Rules: the layers of CONTRIBUTING.md, what the package may import, inline assembly only in device.h,
tolerances only in compare.py, no printing or exiting in the library, file lengths, headers that compile alone,
C++ formatting, every path named in a Markdown file exists, and so does the text of every seeded bug.
"""

import argparse
import ast
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
KERNELS = CSRC / "kernels"
CXX = {".h", ".cuh", ".cpp", ".cu"}
MAX_LINES = 400

problems = []


def report(path, line, text):
    problems.append(f"{path.relative_to(ROOT)}:{line}: {text}")


def sources(folder, suffixes):
    return sorted(p for p in folder.rglob("*") if p.suffix in suffixes and p.is_file())


def lines_of(path):
    return enumerate(path.read_text().splitlines(), 1)


def check_layers():
    """common <- kernels/<op> <- ops/<op> -> stable; only stable/ includes torch."""
    for path in sources(CSRC, CXX):
        for number, line in lines_of(path):
            m = re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line)
            if not m:
                continue
            name = m.group(1)
            if ".." in name.split("/"):
                report(path, number, f"an include names its folder from the root, not {name}")
            in_stable = path.parent == CSRC / "stable"
            if name.startswith(("torch/", "ATen/", "c10/")) and not in_stable:
                report(path, number, f"only csrc/stable may include torch headers, not {name}")
            if path.is_relative_to(KERNELS):
                if name.startswith(("stable/", "ops/")):
                    report(path, number, f"a kernel must not include {name}")
                op = path.relative_to(KERNELS).parts[0]
                other = name.split("/")[0]
                if "/" in name and other != op and (KERNELS / other).is_dir() and other != "common":
                    report(path, number, f"kernels/{op} must not include kernels/{other}")
            if path.parent == CSRC / "ops" and "/" in name:
                other = name.split("/")[0]
                if (KERNELS / other).is_dir() and other not in ("common", path.stem):
                    report(path, number, f"ops/{path.name} must not include another op's {name}")


def check_package_imports():
    """The Python package needs torch and numpy, nothing else (what it tries, it imports in a function)."""
    for path in sources(ROOT / "specdec_ext", {".py"}):
        for node in ast.parse(path.read_text()).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in names:
                top = name.split(".")[0]
                if top not in ("torch", "numpy", "specdec_ext", *sys.stdlib_module_names):
                    report(
                        path, node.lineno, f"the package imports torch and numpy only, not {top}"
                    )


def check_python_layers():
    """specdec_ext/compat stands on the wrappers alone, and nothing of the package stands on it."""
    package = ROOT / "specdec_ext"
    below = ("specdec_ext.ops", "specdec_ext._checks")
    for path in sources(package, {".py"}):
        inside = (package / "compat") in path.parents
        for number, line in lines_of(path):
            m = re.match(r"\s*(?:from|import)\s+(specdec_ext[\w.]*)", line)
            if not m:
                continue
            of_compat = m.group(1).startswith("specdec_ext.compat")
            if inside and not of_compat and m.group(1) not in below:
                report(path, number, f"compat may not import {m.group(1)}")
            if not inside and of_compat:
                report(path, number, "nothing imports specdec_ext.compat")


def check_kernel_text():
    for path in sources(CSRC, CXX):
        for number, line in lines_of(path):
            code = line.split("//")[0]
            if re.search(r"\basm\b", code) and path.name != "device.h":
                report(path, number, "inline assembly belongs in kernels/common/device.h")
            if re.search(r"\b(printf|std::cout|std::cerr|abort|exit)\s*[(<]", code):
                report(path, number, "the library never prints, aborts or exits")
            if path.suffix in (".cu", ".cuh") and re.search(r"<<<|__CUDA_ARCH__|__shared__", code):
                if path.name not in ("kernel.h", "device.h"):
                    report(path, number, "kernels use cu::launch and CU_SHARED (CONTRIBUTING.md)")
    for path in sources(CSRC, CXX):
        count = len(path.read_text().splitlines())
        if count > MAX_LINES:
            report(path, count, f"{count} lines, more than {MAX_LINES}")


def check_tolerances():
    """Tolerances live in compare.py alone."""
    pattern = re.compile(
        r"\b(allclose|assert_close_to|isclose|atol|rtol|pytest\.approx|assert_allclose)\b"
    )
    for path in sources(ROOT / "python_tests", {".py"}):
        if path.name == "compare.py":
            continue
        for number, line in lines_of(path):
            if pattern.search(line):
                report(path, number, "tolerances belong in python_tests/compare.py")


def check_markdown_paths():
    """A path in backticks or a link that looks like one of ours must exist."""
    tops = {p.name for p in ROOT.iterdir()} - {"build", ".venv"}
    for path in sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md")):
        for number, line in lines_of(path):
            names = re.findall(r"`([\w.\-/]+)`", line)
            names += [n.split("#")[0] for n in re.findall(r"\]\(([^):]+)\)", line)]
            for name in names:
                if not name or "<" in name:
                    continue
                is_path = "/" in name and name.split("/")[0] in tops
                is_link = f"]({name}" in line
                if not (is_path or is_link):
                    continue
                if not ((ROOT / name).exists() or (path.parent / name).exists()):
                    report(path, number, f"{name} does not exist")


def check_headers_alone():
    """Every host-side header compiles by itself."""
    compiler = shutil.which("g++") or shutil.which("c++")
    includes = ["-I", str(KERNELS), "-I", str(KERNELS / "common"), "-I", str(CSRC)]
    for path in sources(KERNELS, {".h"}):
        if path.name in ("kernel.h", "launch.h", "device.h"):
            continue  # those that need nvcc or the emulator
        isa = (
            ["-DSPECDEC_ISA=amx", "-march=sapphirerapids"]
            if "amx" in path.name
            else ["-DSPECDEC_ISA=avx512bf16", "-march=cooperlake", "-mavx512vbmi"]
            if "pair" in path.name
            else ["-DSPECDEC_ISA=baseline"]
        )
        done = subprocess.run(
            [compiler, "-std=gnu++17", "-fsyntax-only", "-Wno-psabi", "-Wno-pragma-once-outside-header",
             *isa, *includes, "-x", "c++", str(path)],
            text=True, capture_output=True,
        )  # fmt: skip
        if done.returncode != 0:
            report(path, 1, "does not compile alone: " + done.stderr.strip().splitlines()[0])


def check_seeded_bugs():
    """The text that a seeded bug changes is in its file, once."""
    sys.path.insert(0, str(ROOT / "cpp_tests" / "seeded_bugs"))
    import mutations

    for bug in mutations.ALL:
        count = (ROOT / bug.file).read_text().count(bug.old)
        if count != 1:
            report(
                ROOT / bug.file,
                1,
                f"the text of seeded bug {bug.id} occurs {count} times, wanted once",
            )


def check_cxx_format(rewrite):
    tool = pathlib.Path(sys.executable).parent / "clang-format"
    files = sources(CSRC, CXX) + sources(ROOT / "cpp_tests", CXX)
    if rewrite:
        subprocess.run([tool, "-i", *files], check=True)
        return
    done = subprocess.run([tool, "--dry-run", *files], text=True, capture_output=True)
    for line in done.stderr.splitlines():
        if "warning:" in line:
            problems.append(line.replace(str(ROOT) + "/", "").split(" [")[0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--format", action="store_true")
    rewrite = parser.parse_args().format
    check_cxx_format(rewrite)
    check_layers()
    check_package_imports()
    check_python_layers()
    check_kernel_text()
    check_tolerances()
    check_markdown_paths()
    check_headers_alone()
    check_seeded_bugs()
    for problem in problems:
        print(problem)
    if problems:
        sys.exit(f"lint: {len(problems)} problems")
    print("lint: rules hold")


main()
