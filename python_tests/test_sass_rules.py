"""tools/check_sass.py on listings of its own: each rule must be able to fail."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tools"))

import check_sass  # noqa: E402

HMMA = "HMMA.16816.F32.BF16 R4, R8, R12, R4"
COPY = "@!P1 LDGSTS.E.BYPASS.128 [R5], [R2.64]"
LINEAR = (
    "_ZN7specdec4cuda1x17row_linear_kernelINS1_12LinearTraitsINS_4bf16ELi8EEEEEvNS1_10LinearArgsE"
)
LINEAR_F32 = "_ZN7specdec4cuda1x17row_linear_kernelINS1_12LinearTraitsIfLi8EEEEEvNS1_10LinearArgsE"
ATTEND = "_ZN7specdec4cuda1x23verify_attention_kernelINS1_1TEEEvNS1_10AttendArgsE"
SIMT = "_ZN7specdec4cuda1x28verify_attention_simt_kernelINS1_1TEEEvNS1_1PE"
COMBINE = "_ZN7specdec4cuda1x31verify_attention_combine_kernelINS1_1TEEEvNS1_10AttendArgsE"
GOOD = {
    LINEAR: [HMMA, COPY],
    LINEAR_F32: [COPY, "FFMA R1, R2, R3, R1"],
    ATTEND: [COPY, HMMA],
    SIMT: ["FFMA R1, R2, R3, R1"],
    COMBINE: ["FADD R1, R2, R3"],
}


def listing(functions, arch="sm_90"):
    lines = [f"\tcode for {arch}"]
    for name, code in functions.items():
        lines.append(f"\t\tFunction : {name}")
        for i, instruction in enumerate([*code, "EXIT"]):
            lines.append(
                f"        /*{16 * i:04x}*/                   {instruction} ;   /* 0x0000 */"
            )
            lines.append("                                             /* 0x000fe20000000f00 */")
    return "\n".join(lines) + "\n"


def wrong(functions, archs=("sm_90",)):
    return check_sass.violations(check_sass.parse(listing(functions)), archs)


def test_good_code_passes():
    assert wrong(GOOD) == []
    wide = {**GOOD, ATTEND: [HMMA, "LDGSTS.E.BYPASS.LTC128B.128.ZFILL [R5], desc[UR4][R2.64], P0"]}
    assert wrong(wide) == []


@pytest.mark.parametrize(
    "name, code, says",
    [
        (LINEAR, [COPY], "row_linear of bf16 and fp16: no HMMA in "),
        (ATTEND, [COPY, "FFMA R1, R2, R3, R1"], "verify_attention: no HMMA in "),
        (LINEAR, [HMMA, "LDG.E.128 R4, [R2.64]"], "no LDGSTS.E.BYPASS.128 in "),
        (LINEAR_F32, ["LDGSTS.E.BYPASS.64 [R5], [R2.64]"], "float32: no LDGSTS.E.BYPASS.128 in "),
        (ATTEND, [HMMA, "LDGSTS.E.128 [R5], [R2.64]"], "no LDGSTS.E.BYPASS.128 in "),
        (ATTEND, [HMMA, COPY, "STL.64 [R1], R2"], "1 LDL or STL in "),
        (SIMT, ["@P0 LDL R2, [R1+0x4]"], "1 LDL or STL in "),
        (COMBINE, ["LDL.LU R2, [R1]", "STL [R1], R2"], "2 LDL or STL in "),
    ],
)
def test_bad_code_is_named(name, code, says):
    (text,) = wrong({**GOOD, name: code})
    assert says in text and name in text and text.endswith("for sm_90")


def test_a_rule_without_a_kernel_and_an_architecture_without_code():
    missing = {name: code for name, code in GOOD.items() if name != ATTEND}
    assert wrong(missing) == ["verify_attention: no kernel for sm_90"]
    assert wrong(GOOD, ("sm_90", "sm_120")) == ["no code for sm_120"]


def test_the_program_exits_with_the_reason(tmp_path, capsys):
    good, bad = tmp_path / "good.sass", tmp_path / "bad.sass"
    good.write_text(listing(GOOD))
    bad.write_text(listing({**GOOD, LINEAR: [COPY]}))
    check_sass.check(good, "90-real")
    assert "all rules hold" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no HMMA"):
        check_sass.check(bad, "90-real")
    (tmp_path / "none.sass").write_text("")
    with pytest.raises(SystemExit, match="no function"):
        check_sass.check(tmp_path / "none.sass")
