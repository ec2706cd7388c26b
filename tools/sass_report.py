"""What the compiled kernels are made of: a table per kernel and architecture, and a check against the last one.

    python tools/sass_report.py LIBRARY                    prints the table (build/cuda/_C_cuda.so)
    python tools/sass_report.py LIBRARY --update           writes it to benchmarks/results/cuda_static.{json,md}
    python tools/sass_report.py LIBRARY --check            exit code 1 where a kernel became worse than there

Per kernel: registers, static shared memory, local memory, blocks per multiprocessor that these allow, widths of
global loads and stores, tensor-core instructions (HMMA, IMMA), asynchronous copies (LDGSTS), matrix loads (LDSM),
and the instruction mix of the main loop. The main loop is the shortest one with all the work that the kernel is
written for: tensor-core and int8 products; where it has none, 16-byte accesses; else the loop that moves most bytes
per instruction.

Worse means: local memory where there was none, fewer blocks per multiprocessor, narrower global accesses in the main
loop, or a main loop that is more than 5 % longer. Kernels that are new or gone are named, not judged. Another
version of ptxas makes other code, so the check is skipped where it differs from the recorded one.
"""

import argparse
import collections
import dataclasses
import json
import pathlib
import re
import sys

import check_sass

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "results" / "cuda_static.json"
LONGER = 1.05

# CUDA C programming guide, table of compute capabilities: registers and bytes of shared memory of a multiprocessor,
# threads and blocks that it holds, bytes of shared memory that the system takes per block.
SM = {
    "sm_80": (65536, 167936, 2048, 32, 1024),
    "sm_90": (65536, 233472, 2048, 32, 1024),
    "sm_100": (65536, 233472, 2048, 32, 1024),
    "sm_120": (65536, 102400, 1536, 24, 1024),
}

# First match counts. Named after what the hardware unit does.
KINDS = [
    ("tensor", r"[HIQ]MMA|[A-Z]*GMMA"),
    ("async copy", r"LDGSTS|UBLKCP|UTMA"),
    ("global load", r"LDG|LD\."),
    ("global store", r"STG|ST\.|ATOMG|ATOM|RED\b"),
    ("local", r"LDL|STL"),
    ("matrix load", r"LDSM|STSM"),
    ("shared", r"LDS|STS|ATOMS"),
    ("constant", r"LDC|ULDC"),
    ("special", r"MUFU"),
    ("fp32", r"F(ADD|MUL|FMA|MNMX|SETP|SET|SEL|CHK|SWZADD)"),
    ("fp16", r"H(ADD|MUL|FMA|MNMX|SET)"),
    ("fp64", r"D(ADD|MUL|FMA|SETP|MNMX)"),
    ("dot int8", r"IDP"),
    ("convert", r"[FI]2[FI]P?|I2FP|F2FP"),
    ("shuffle", r"SHFL|VOTE|REDUX|MATCH"),
    ("barrier", r"BAR|B2R|DEPBAR|LDGDEPBAR|SYNCS|MEMBAR|WARPSYNC|ERRBAR|CCTL"),
    ("control", r"BRA|BRX|EXIT|RET|CALL|BSSY|BSYNC|JMP|YIELD|NOP|NANOSLEEP|BREAK|BMOV|KILL"),
    ("integer", r"U?(I|LEA|SHF|SHL|SHR|LOP|PRMT|SEL|MOV|BMSK|FLO|POPC|PLOP|P2R|R2P|VI|R2U|S2)"),
]
KIND_PATTERNS = [(name, re.compile(pattern)) for name, pattern in KINDS]
PRODUCTS = ("tensor", "dot int8")
GLOBAL = ("async copy", "global load", "global store")


def kind_of(opcode):
    return next((name for name, pattern in KIND_PATTERNS if pattern.match(opcode)), "other")


def width_of(opcode):
    """Bytes per thread of a memory instruction."""
    if m := re.search(r"\.(8|16|32|64|128|256)(?=\.|$)", opcode):
        return int(m.group(1)) // 8
    if re.search(r"\.[US]8(?=\.|$)", opcode):
        return 1
    if re.search(r"\.[US]16(?=\.|$)", opcode):
        return 2
    return 4


@dataclasses.dataclass
class Kernel:
    name: str  # mangled
    arch: str
    code: list = dataclasses.field(
        default_factory=list
    )  # (address, opcode, target of a branch or None)
    registers: int = 0
    shared: int = 0
    local: int = 0
    threads: int = 0  # per block, of its launch bounds


INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")


def parse_sass(sass):
    """Every kernel of a listing of cuobjdump -sass, by (name, architecture)."""
    found, arch, kernel = {}, "", None
    for line in sass.splitlines():
        if m := re.match(r"\s*code for (sm_\w+)", line):
            arch, kernel = m.group(1), None
        elif m := re.match(r"\s*Function : (\S+)", line):
            kernel = found.setdefault((m.group(1), arch), Kernel(m.group(1), arch))
        elif kernel and (m := INSTRUCTION.match(line)):
            target = (
                re.search(r"0x([0-9a-f]+)\s*$", m.group(3)) if m.group(2)[:3] == "BRA" else None
            )
            kernel.code.append(
                (int(m.group(1), 16), m.group(2), int(target.group(1), 16) if target else None)
            )
    return found


def add_resources(kernels, usage, elf):
    """Fills in what cuobjdump -res-usage and -elf say."""
    arch = name = None
    for line in usage.splitlines():
        if m := re.match(r"arch = (sm_\w+)", line):
            arch = m.group(1)
        elif m := re.match(r"\s*Function (\S+):", line):
            name = m.group(1)
        elif (m := re.match(r"\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line)) and (
            kernel := kernels.get((name, arch))
        ):
            kernel.registers, kernel.shared = int(m.group(1)), int(m.group(3))
            kernel.local = int(m.group(2)) + int(m.group(4))
    kernel, wanted = None, False
    for line in elf.splitlines():
        if m := re.match(r"arch = (sm_\w+)", line):
            arch, kernel = m.group(1), None
        elif m := re.match(r"\.nv\.info\.(\S+)", line):
            kernel = kernels.get((m.group(1), arch))
        elif "EIATTR_MAX_THREADS" in line:
            wanted = True
        elif wanted and (m := re.match(r"\s*Value:\s*0x([0-9a-f]+) 0x([0-9a-f]+)", line)):
            if kernel:
                kernel.threads = int(m.group(1), 16) * int(m.group(2), 16)
            wanted = False


def loops(code):
    """(first, last) indices of the instructions of every loop, from its backward branches."""
    index = {address: i for i, (address, _, _) in enumerate(code)}
    found = {}
    for i, (address, _, target) in enumerate(code):
        # A branch to itself is the trap behind the end of a kernel.
        if target is not None and target < address and target in index:
            first = index[target]
            found[first] = max(i, found.get(first, 0))
    return sorted(found.items())


def main_loop(code):
    """Opcodes of the loop that this kernel is about, [] without a loop."""
    bodies = [[opcode for _, opcode, _ in code[a : b + 1]] for a, b in loops(code)]
    bodies.sort(key=len)
    # Of nested loops the inner one: sorted by length, and max takes the first of equals.
    for does_work in (
        lambda opcode: kind_of(opcode) in PRODUCTS,
        lambda opcode: kind_of(opcode) in GLOBAL and width_of(opcode) >= 16,
    ):
        body = max(bodies, key=lambda b: sum(map(does_work, b)), default=[])
        if any(map(does_work, body)):
            return body
    return max(bodies, key=bytes_per_instruction, default=[])


def bytes_per_instruction(body):
    """Of global memory."""
    return sum(width_of(opcode) for opcode in body if kind_of(opcode) in GLOBAL) / len(body)


def blocks_per_sm(kernel):
    """Blocks that a multiprocessor holds by registers, threads and static shared memory; 0: not known."""
    arch = re.match(r"sm_\d+", kernel.arch).group(0)
    if not kernel.threads or arch not in SM:
        return 0
    registers, shared, threads, blocks, reserved = SM[arch]
    warps = -(-kernel.threads // 32)
    per_warp = -(-kernel.registers * 32 // 256) * 256  # allocated in units of 256
    return min(
        registers // max(1, per_warp * warps),
        threads // (warps * 32),
        shared // (kernel.shared + reserved),
        blocks,
    )


def describe(kernel):
    """The row of a kernel, as it is recorded."""
    opcodes = [opcode for _, opcode, _ in kernel.code]
    body = main_loop(kernel.code)
    widths = collections.Counter()
    for opcode in opcodes:
        kind = kind_of(opcode)
        if kind in ("global load", "global store", "async copy"):
            widths[f"{kind} {width_of(opcode)}"] += 1

    def count(pattern):
        return sum(bool(re.match(pattern, opcode)) for opcode in opcodes)

    moved = [width_of(opcode) for opcode in body if kind_of(opcode) in GLOBAL]
    return {
        "registers": kernel.registers,
        "shared": kernel.shared,
        "local": kernel.local,
        "threads": kernel.threads,
        "blocks_per_sm": blocks_per_sm(kernel),
        "instructions": len(opcodes),
        "HMMA": count("HMMA"),
        "IMMA": count("IMMA|IDP"),
        "LDGSTS": count("LDGSTS"),
        "LDSM": count("LDSM"),
        "widths": dict(sorted(widths.items())),
        "main_loop": len(body),
        "main_loop_bytes_per_access": round(sum(moved) / len(moved), 2) if moved else 0,
        "main_loop_mix": dict(collections.Counter(map(kind_of, body)).most_common()),
    }


def short(name):
    """A demangled kernel name without what all of them share."""
    return re.sub(r"specdec::|cuda::|\(anonymous namespace\)::|^void ", "", name).partition("(")[0]


def report(library):
    """Rows by architecture and kernel name; None without cuobjdump and nvdisasm."""
    outputs = [check_sass.cuobjdump(library, flag) for flag in ("-sass", "-res-usage", "-elf")]
    if None in outputs:
        return None
    sass, usage, elf = outputs
    kernels = parse_sass(sass)
    add_resources(kernels, usage, elf)
    nice = check_sass.demangle(sorted({name for name, _ in kernels}))
    rows = {}
    for (name, arch), kernel in sorted(kernels.items()):
        rows.setdefault(arch, {})[short(nice[name])] = describe(kernel)
    return {arch: dict(sorted(of_arch.items())) for arch, of_arch in sorted(rows.items())}


def worse(old, new):
    """What is worse in `new`, a text per finding; and which kernels only one of them has."""
    findings, moved = [], []
    for arch in sorted(set(old) & set(new)):
        for name in sorted(set(old[arch]) | set(new[arch])):
            if name not in old[arch] or name not in new[arch]:
                moved.append(f"{arch} {name}: {'new' if name in new[arch] else 'gone'}")
                continue
            was, now = old[arch][name], new[arch][name]

            def note(what, before, after, where=f"{arch} {name}"):
                findings.append(f"{where}: {what} {before} before, {after} now")

            if now["local"] > was["local"]:
                note("bytes of local memory", was["local"], now["local"])
            if now["blocks_per_sm"] < was["blocks_per_sm"]:
                note("blocks per multiprocessor", was["blocks_per_sm"], now["blocks_per_sm"])
            if now["main_loop"] > LONGER * was["main_loop"]:
                note("instructions of the main loop", was["main_loop"], now["main_loop"])
            key = "main_loop_bytes_per_access"
            if now[key] < was[key]:
                note("bytes per global access of the main loop", was[key], now[key])
    return findings, moved


def markdown(record):
    lines = [
        "# What the compiled kernels are made of",
        "",
        f"By `tools/sass_report.py` from ptxas {record['ptxas']}; nothing here was measured. Blocks: per"
        " multiprocessor, by registers, threads and static shared memory (dynamic shared memory is chosen at"
        " launch). Main loop: instructions of the shortest loop that does the kernel's work, and their kinds.",
    ]
    for arch, rows in record["kernels"].items():
        lines += [
            "",
            f"## {arch}",
            "",
            "| kernel | registers | shared B | local B | threads | blocks | HMMA | int8 | LDGSTS | LDSM"
            " | global accesses, bytes: count | main loop |",
            "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|---|",
        ]
        for name, row in rows.items():
            widths = ", ".join(f"{k}: {v}" for k, v in row["widths"].items())
            mix = ", ".join(f"{v} {k}" for k, v in list(row["main_loop_mix"].items())[:6])
            cells = [
                f"`{name}`", row["registers"], row["shared"], row["local"], row["threads"] or "",
                row["blocks_per_sm"] or "", row["HMMA"], row["IMMA"], row["LDGSTS"], row["LDSM"],
                widths, f"{row['main_loop']}: {mix}" if mix else "none",
            ]  # fmt: skip
            lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def ptxas_version():
    text = check_sass.run_tool("ptxas", "--version")
    m = re.search(r"V([\d.]+)", text or "")
    return m.group(1) if m else "unknown"


def check(library, ptxas):
    """Exits where a kernel became worse than recorded."""
    record = json.loads(RECORD.read_text())
    if record["ptxas"] != ptxas:
        print(f"sass_report: SKIPPED, recorded with ptxas {record['ptxas']}, here is {ptxas}")
        return
    rows = report(library)
    if rows is None:
        print("sass_report: SKIPPED, no cuobjdump and nvdisasm")
        return
    findings, moved = worse(record["kernels"], rows)
    for line in moved:
        print(f"sass_report: {line}")
    if findings:
        again = "  (better so? --update records it)"
        sys.exit("sass_report: worse than recorded:\n  " + "\n  ".join(findings) + "\n" + again)
    count = sum(map(len, rows.values()))
    print(f"sass_report: {count} kernels, none worse than recorded")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library", type=pathlib.Path)
    parser.add_argument("--update", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    parser.add_argument("--check", action="store_true", help="fail where a kernel became worse")
    options = parser.parse_args()
    if options.check:
        check(options.library, ptxas_version())
        return
    rows = report(options.library)
    if rows is None:
        sys.exit(
            "sass_report: needs cuobjdump and nvdisasm (PyPI: nvidia-cuda-cuobjdump, -nvdisasm)"
        )
    record = {"ptxas": ptxas_version(), "kernels": rows}
    if options.update:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        RECORD.with_suffix(".md").write_text(markdown(record))
    else:
        print(markdown(record))


if __name__ == "__main__":
    main()
