"""tools/sass_report.py on listings of its own: what it reads, and that each finding can be found."""

import copy
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tools"))

import sass_report  # noqa: E402

NAME = "_ZN7specdec4cuda6kernelEv"
# A copy loop of 16 bytes inside an outer loop, then a trap that branches to itself.
CODE = [
    "LDC R1, c[0x0][0x28]",
    "@!P0 LDG.E.U16 R2, [R4.64]",
    "LDG.E.128.CONSTANT R4, [R2.64]",
    "IADD3 R2, R2, 0x10, RZ",
    "STG.E.128 [R8.64], R4",
    "@P0 BRA 0x20",
    "FADD R1, R2, R3",
    "@P1 BRA 0x10",
    "EXIT",
    "BRA 0x90",
]
ELF = """arch = sm_90
.nv.info.{name}
\tAttribute:\tEIATTR_MAX_THREADS
\tFormat:\tEIFMT_SVAL
\tValue:\t0x80 0x2 0x1
"""
USAGE = """arch = sm_90
 Function {name}:
  REG:40 STACK:8 SHARED:512 LOCAL:16 CONSTANT[0]:752 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def listing(code):
    lines = ["\tcode for sm_90", f"\t\tFunction : {NAME}"]
    lines += [
        f"        /*{16 * i:04x}*/        {text} ;   /* 0x0 */" for i, text in enumerate(code)
    ]
    return "\n".join(lines) + "\n"


def kernel(code=CODE):
    kernels = sass_report.parse_sass(listing(code))
    sass_report.add_resources(kernels, USAGE.format(name=NAME), ELF.format(name=NAME))
    return kernels[NAME, "sm_90"]


def test_reads_what_the_tools_print():
    row = sass_report.describe(kernel())
    assert row["registers"] == 40 and row["shared"] == 512 and row["local"] == 24
    assert row["threads"] == 256 and row["instructions"] == len(CODE)
    assert row["widths"] == {"global load 16": 1, "global load 2": 1, "global store 16": 1}


def test_main_loop_is_the_inner_one_with_the_wide_accesses():
    body = sass_report.main_loop(kernel().code)
    assert body == ["LDG.E.128.CONSTANT", "IADD3", "STG.E.128", "BRA"]


def test_main_loop_goes_by_products_before_bytes():
    code = [
        "LDG.E.128 R4, [R2.64]",
        "@P0 BRA 0x0",
        "HMMA.16816.F32.BF16 R4, R8, R12, R4",
        "@P0 BRA 0x20",
    ]
    assert sass_report.main_loop(kernel(code).code)[0].startswith("HMMA")
    assert sass_report.main_loop(kernel(["EXIT"]).code) == []


@pytest.mark.parametrize(
    "registers, threads, shared, blocks",
    [
        (32, 256, 0, 8),  # by threads: 2048 / 256
        (128, 256, 0, 2),  # by registers: 65536 / (128 * 256)
        (129, 256, 0, 1),  # allocated in eights per thread: 136
        (32, 256, 100_000, 2),  # by shared memory: 233472 / (100000 + 1024)
        (16, 32, 0, 32),  # by blocks
        (32, 0, 0, 0),  # no launch bounds
    ],
)
def test_blocks_per_multiprocessor(registers, threads, shared, blocks):
    made = sass_report.Kernel("k", "sm_90a", [], registers, shared, 0, threads)
    assert sass_report.blocks_per_sm(made) == blocks


@pytest.mark.parametrize(
    "key, value, says",
    [
        ("local", 1000, "bytes of local memory 24 before, 1000 now"),
        ("blocks_per_sm", 1, "blocks per multiprocessor 6 before, 1 now"),
        ("main_loop", 5, "instructions of the main loop 4 before, 5 now"),
        ("main_loop_bytes_per_access", 8, "bytes per global access of the main loop 16.0 before"),
    ],
)
def test_finds_what_is_worse(key, value, says):
    rows = {"sm_90": {"kernel": sass_report.describe(kernel())}}
    assert sass_report.worse(rows, rows) == ([], [])
    changed = copy.deepcopy(rows)
    changed["sm_90"]["kernel"][key] = value
    findings, moved = sass_report.worse(rows, changed)
    assert len(findings) == 1 and says in findings[0] and not moved
    assert sass_report.worse(changed, rows)[0] == []  # better is not worse


def test_new_and_gone_kernels_are_named():
    row = sass_report.describe(kernel())
    findings, moved = sass_report.worse({"sm_90": {"old": row}}, {"sm_90": {"fresh": row}})
    assert not findings and moved == ["sm_90 fresh: new", "sm_90 old: gone"]


def test_kinds_of_opcodes():
    assert sass_report.kind_of("LDGSTS.E.BYPASS.128") == "async copy"
    assert sass_report.kind_of("FFMA.FTZ") == "fp32"
    assert sass_report.kind_of("IDP.4A.S8.S8") == "dot int8"
    assert sass_report.kind_of("IMMA.16832.S8.S8") == "tensor"
    assert sass_report.kind_of("NEWTHING") == "other"
