"""Plants bugs in the real kernels and requires that tests or detectors catch every one.

    python cpp_tests/seeded_bugs/run.py                      all (make seeded-bugs)
    python cpp_tests/seeded_bugs/run.py --sample 6           some, others with every commit
    python cpp_tests/seeded_bugs/run.py --sample 6 --seed 1  some, another choice for each seed
    python cpp_tests/seeded_bugs/run.py --only chain         those whose id contains a text
    python cpp_tests/seeded_bugs/run.py --list

mutations.py is the table. Each bug is planted in a copy of csrc/; only the objects that depend on the
changed file are compiled again, by the commands of the existing build (build/emu; for CPU kernels that of the
installed package), and the op's own tests then run on the library so made. A bug is caught when they fail, with the expected diagnostic
where one is named. A text that no longer occurs exactly once, a compile error and a time-out are
failures of the suite.
"""

import argparse
import dataclasses
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("SPECDEC_EMU_DIR", ROOT / "build" / "emu"))
CPU_BUILD = pathlib.Path(
    os.environ.get("SPECDEC_CPU_BUILD", ROOT / "build" / f"cmake-py3{sys.version_info[1]}")
)
WORK = ROOT / "build" / "seeded_bugs"
TIMEOUT_S = 300
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import mutations  # noqa: E402

BACKENDS = {"plain": "emu", "hooks": "emu_hooks", "asan": "emu_asan", "cpu": "cpu"}
EMULATOR_TESTS = "cpp_tests/cuda_on_cpu/tests"


class Broken(Exception):
    """The suite itself does not work: no such text, a compile error, a hang."""


@dataclasses.dataclass
class Result:
    mutation: object
    caught: bool
    how: str
    seconds: float


def library_of(tests, flavour):
    if flavour == "cpu":
        return "_C.so"
    return f"emu_tests_{flavour}.so" if tests.startswith(EMULATOR_TESTS) else f"_C_emu_{flavour}.so"


CPU_ISA = None  # of this machine; set by preload()
RECIPES = {}  # by library; filled before the workers are forked


class Recipe:
    """How the build makes one library: its compile commands by object, and the link command."""

    def __init__(self, library):
        self.library = library
        self.build = CPU_BUILD if library == "_C.so" else BUILD
        # Emulated kernels compile twice as fast so, and round alike at every level.
        self.optimise = "" if library == "_C.so" else "-O1 "
        lines = self.ninja("commands", library).splitlines()
        self.link = lines[-1]
        if f"-o {library}" not in self.link:
            raise Broken(f"no link command of {library} in {self.build}")
        self.compile = {}
        for line in lines:
            if m := re.search(r" -o (\S+\.o) -c (\S+)$", line):
                self.compile[m.group(1)] = line
        self.depends = {}
        target = None
        for line in self.ninja("deps").splitlines():
            if m := re.match(r"(\S+): #deps", line):
                target = m.group(1)
                self.depends[target] = set()
            elif target and line.strip():
                self.depends[target].add((self.build / line.strip()).resolve())

    def ninja(self, tool, *args):
        done = subprocess.run(
            ["ninja", "-C", str(self.build), "-t", tool, *args], text=True, capture_output=True
        )
        if done.returncode != 0:
            raise Broken(f"ninja -t {tool}: {done.stderr.strip() or done.stdout.strip()}")
        return "\n".join(
            line for line in done.stdout.splitlines() if not line.startswith("ninja: Entering")
        )

    def make(self, changed, pattern, op, folder):
        """Builds the library in `folder` from the sources in folder/csrc: those objects that depend on
        the changed file and match the pattern are compiled again, the rest is linked as it is. Of a
        header that many ops share, those of the tested op are enough, where it has any."""
        source = (ROOT / changed).resolve()
        objects = [
            name
            for name in self.compile
            if source in self.depends.get(name, ()) and re.search(pattern, name)
        ]
        of_op = [name for name in objects if re.search(rf"/(kernels/{op}/|ops/{op}\.)", name)]
        objects = of_op or objects
        if not objects:
            raise Broken(f"nothing in {self.library} depends on {changed}")
        link = self.link
        made = []
        for i, name in enumerate(objects):
            command = self.compile[name].replace(f"{ROOT}/csrc", f"{folder}/csrc")
            command = re.sub(r" -MD -MT \S+ -MF \S+", "", command)
            new = folder / f"{i}.o"
            self.run(command.replace(f" -o {name} ", f" {self.optimise}-o {new} "))
            link = re.sub(rf"(?<=\s){re.escape(name)}(?=\s)", "", link)
            made.append(str(new))
        # First: of an inline function that several objects hold, the linker takes the first copy.
        first = re.search(r"(?<=\s)\S+\.o(?=\s)", link).start()
        link = f"{link[:first]}{' '.join(made)} {link[first:]}"
        self.run(link.replace(f"-o {self.library}", f"-o {folder / self.library}"))

    def run(self, command):
        done = subprocess.run(command, shell=True, cwd=self.build, text=True, capture_output=True)
        if done.returncode != 0:
            raise Broken("does not build: " + (done.stderr or done.stdout).strip()[:600])


def plant(mutation, folder):
    path = ROOT / mutation.file
    text = path.read_text()
    count = text.count(mutation.old)
    if count != 1:
        raise Broken(f"{mutation.file}: the text occurs {count} times, must be once")
    if mutation.new in ("", None) and mutation.old == mutation.new:
        raise Broken("changes nothing")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    (folder / mutation.file).write_text(text.replace(mutation.old, mutation.new))


def make_package(folder):
    """The Python package beside the library in `folder`, so that `import specdec_ext` there finds both."""
    package = folder / "specdec_ext"
    package.mkdir()
    for path in (ROOT / "specdec_ext").iterdir():
        if path.is_file() and path.name != "_C.so":
            (package / path.name).symlink_to(path)
    (folder / "_C.so").rename(package / "_C.so")


def pytest_arguments(tests, flavour):
    backend = BACKENDS[flavour]
    path, _, names = tests.partition("::")
    where = flavour if tests.startswith(EMULATOR_TESTS) else backend
    chosen = f"({where}) and ({names})" if names else where
    options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-k", chosen]
    return [str(ROOT / path), *options, *(["-s"] if flavour == "asan" else [])]


def run_tests(tests, flavour, folder, log):
    """(passed, output) of the tests on the libraries in `folder`."""
    environment = {
        "SPECDEC_EMU_DIR": str(folder),
        "SPECDEC_BACKENDS": BACKENDS[flavour],
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    arguments = pytest_arguments(tests, flavour)
    if flavour == "cpu":  # the package itself is another one, and `-m pytest` looks where it is run
        environment["PYTHONPATH"] = str(folder)
        code, output = run_in_new_process([], arguments, environment, log, folder)
    elif flavour == "asan":  # the sanitizers must be loaded before Python
        runner = [str(ROOT / "tools" / "with_asan.sh")]
        code, output = run_in_new_process(runner, arguments, environment, log, ROOT)
    else:
        code, output = run_in_fork(arguments, environment, log)
    if code == 5:
        raise Broken(f"{tests} selects no test for {BACKENDS[flavour]}")
    return code == 0, output


def run_in_new_process(runner, arguments, environment, log, folder):
    command = [*runner, sys.executable, "-m", "pytest", *arguments]
    with log.open("w") as out:
        try:
            done = subprocess.run(
                command, cwd=folder, env={**os.environ, **environment}, timeout=TIMEOUT_S,
                stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Broken(f"hangs: no result after {TIMEOUT_S} s") from None
    return done.returncode, log.read_text()


def run_in_fork(arguments, environment, log):
    """torch is imported once, by preload(); each run of the tests is a fork that has it already."""
    child = os.fork()
    if child == 0:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(ROOT)
        os.environ.update(environment)
        code = 70
        try:
            import pytest

            code = int(pytest.main(arguments))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), log.read_text()
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise Broken(f"hangs: no result after {TIMEOUT_S} s")
        time.sleep(0.05)


def preload():
    global CPU_ISA
    sys.path.insert(0, str(ROOT))
    import pytest  # noqa: F401
    import torch

    import specdec_ext

    CPU_ISA = specdec_ext.cpu_isa()
    torch.set_num_threads(1)


def symptom(output):
    """One line that says how the tests failed."""
    for pattern in (
        r"(\S+\.(?:cu|cuh|h):\d+: (?:race|read|write|out of|misaligned|diverg|__|shuffle|deadlock|live"
        r"|cp\.async|shared|grid).{0,90})",
        r"(AddressSanitizer: \S+ )",
        r"(runtime error: .{0,90})",
        r"^(FAILED .{0,110})",
        r"^E +(.{0,110})",
    ):
        if m := re.search(pattern, output, re.MULTILINE):
            return m.group(1)
    return output.strip().splitlines()[-1][:110] if output.strip() else "ended without a word"


def check(mutation):
    begin = time.monotonic()
    folder = WORK / mutation.id
    try:
        plant(mutation, folder)
        objects = mutation.objects
        if mutation.build == "cpu":
            # Some instruction sets have copies of some ops only.
            isas = f"(avx512|{CPU_ISA})" if CPU_ISA in ("avx512bf16", "amx") else CPU_ISA
            objects = f"specdec_cpu_{isas}.dir/.*{objects}"
        op = pathlib.Path(mutation.tests.partition("::")[0]).stem.removeprefix("test_")
        RECIPES[library_of(mutation.tests, mutation.build)].make(mutation.file, objects, op, folder)
        if mutation.build == "cpu":
            make_package(folder)
        passed, output = run_tests(mutation.tests, mutation.build, folder, folder / "tests.log")
        if passed:
            caught, how = False, "every test passed"
        elif mutation.says and not re.search(mutation.says, output):
            caught, how = False, f"failed, but not with /{mutation.says}/: {symptom(output)}"
        else:
            caught, how = True, symptom(output)
    except Broken as broken:
        caught, how = False, str(broken)
    if caught:
        shutil.rmtree(folder, ignore_errors=True)
    return Result(mutation, caught, how, time.monotonic() - begin)


def baseline(chosen):
    """The same tests pass without a bug; else a failure would prove nothing."""
    bad = []
    for tests, flavour in sorted({(m.tests, m.build) for m in chosen}):
        folder = ROOT if flavour == "cpu" else BUILD
        passed, output = run_tests(tests, flavour, folder, WORK / "baseline.log")
        print(f"{'ok' if passed else 'FAILS':<7} without any bug: {tests} on {flavour}", flush=True)
        if not passed:
            bad.append(output)
    if bad:
        sys.exit(bad[0])


def commit_seed():
    """A number that the commit fixes; 0 outside a git checkout."""
    done = subprocess.run(
        ["git", "rev-parse", "--verify", "HEAD"], cwd=ROOT, text=True, capture_output=True
    )
    return int(done.stdout[:8], 16) if done.returncode == 0 else 0


def select(args):
    here = [m for m in mutations.ALL if not m.isas or CPU_ISA in m.isas]
    chosen = [m for m in here if any(text in m.id for text in args.only.split(","))]
    if args.sample and args.sample < len(chosen):
        seed = commit_seed() if args.seed is None else args.seed
        print(f"seeded_bugs: sample of {args.sample}, again with --seed {seed}", flush=True)
        # Spread over the files, so that a small sample still touches each kernel.
        rng = random.Random(seed)
        by_file = {}
        for m in rng.sample(chosen, len(chosen)):
            by_file.setdefault(m.file, []).append(m)
        groups = rng.sample(sorted(by_file), len(by_file))
        ordered = []
        while len(ordered) < args.sample:
            for name in groups:
                if by_file[name]:
                    ordered.append(by_file[name].pop())
        chosen = ordered[: args.sample]
    return chosen


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sample", type=int, default=0, help="only so many")
    parser.add_argument("--seed", type=int, help="which sample (default: from the git commit)")
    parser.add_argument("--only", default="", help="ids that contain this text, or one of A,B,C")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--no-baseline", action="store_true")
    args = parser.parse_args()
    ids = [m.id for m in mutations.ALL]
    if len(set(ids)) != len(ids):
        sys.exit("seeded_bugs: an id occurs twice")
    preload()
    chosen = select(args)
    if args.list:
        for m in chosen:
            print(f"{m.id:<34} {m.build:<6} {m.file}")
        print(f"{len(chosen)} seeded bugs")
        return
    if not chosen:
        sys.exit(f"seeded_bugs: no id contains {args.only!r}")
    try:
        for m in chosen:
            library = library_of(m.tests, m.build)
            if library not in RECIPES:
                RECIPES[library] = Recipe(library)
    except Broken as broken:
        sys.exit(f"seeded_bugs: {broken}")
    WORK.mkdir(parents=True, exist_ok=True)
    # A sample runs after the whole test suite (make check), which is its baseline.
    if not args.sample and not args.no_baseline:
        baseline(chosen)
    missed = []
    with multiprocessing.get_context("fork").Pool(args.jobs) as pool:
        for result in pool.imap(check, chosen):
            verdict = "caught" if result.caught else "MISSED"
            m = result.mutation
            print(
                f"{verdict:<7} {m.id:<34} {m.build:<6} {result.seconds:5.1f} s  {result.how}",
                flush=True,
            )
            if not result.caught:
                missed.append(m.id)
    print(f"seeded_bugs: {len(chosen) - len(missed)} of {len(chosen)} caught")
    if missed:
        sys.exit(
            f"seeded_bugs: not caught: {', '.join(missed)}; see {WORK.relative_to(ROOT)}/ID/tests.log"
        )


if __name__ == "__main__":
    main()
