"""The form with names only: what runs, without the types of tensors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fuser.ir.fusion import TensorView
from fuser.ir.op import walk
from fuser.support import options
from hostir.ir.printer import dumped
from hostir.ir.program import HostIrContainer
from hostir.tools.cli import main
from tests.support.handmade_programs import EXAMPLES
from tests.support.host_programs import CASES, build
from tests.support.predicted_times import gather

PROGRAMS = {
    **{n: e.build for n, e in EXAMPLES.items()},
    **{n: (lambda c=c: build(c)) for n, c in CASES.items()},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_names_stand_for_tensors(name: str) -> None:
    program = PROGRAMS[name]()
    text = program.names_text()
    assert not re.search(r"T\d+_\w", text) and " (DeviceMesh" not in text
    lines = text.splitlines()
    # Each op in a line of its own, with all of its tensors.
    for op in walk(program.ops):
        if not op.region_heads():
            labels = {
                f"T{v.number}" for v in (*op.inputs, *op.outputs) if isinstance(v, TensorView)
            }
            assert any(labels <= set(re.findall(r"T\d+", line)) for line in lines), op
    assert all(line.count("(") == line.count(")") for line in lines)


RESETS = "zero_init=false, resets_to_zero=false"


def test_the_form_of_a_small_program() -> None:
    assert gather(2, kernel="before").names_text().splitlines() == [
        "%HostIrContainer { (T0, T3) -> (T1) :",
        f"  T1 = ALLOCATE(buffer=T1, mem_type=global, size=500, {RESETS})",
        f"  T2 = ALLOCATE(buffer=T2, mem_type=global, size=250, {RESETS})",
        "  Stream S0 = GetCurrentStream()",
        "  SetCurrentStream(Stream 0)",
        "  Synchronize(Stream S0)",
        "  T2 = -T3;",
        "  SetCurrentStream(Stream 1)",
        "  Synchronize(Stream S0)",
        "  Communication 0 (type=Allgather, team=(0 1), input=T0, output=T1, backend=NCCL)",
        "  Wait(Communication 0)",
        "  SetCurrentStream(Stream S0)",
        "  Synchronize(Stream 0)",
        "  Synchronize(Stream 1)",
        "} // %HostIrContainer",
    ]


def test_dumps_have_three_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSER_DUMP", "host_ir(names)")
    assert options.dump_args("host_ir") == ("names",)
    program: HostIrContainer = build(CASES["mlp2"])
    forms = [dumped(program, form) for form in ("names", "short", "")]
    assert forms == [program.names_text(), str(program), program.full_text(first_line="")]


def test_names_are_printed_and_not_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = build(CASES["mlp2"])
    (file := tmp_path / "p.txt").write_text(program.full_text())
    assert main(["print", "--names", str(file)]) == 0
    text = capsys.readouterr().out
    assert text == f"// names only\n{program.names_text()}"
    (file := tmp_path / "names.txt").write_text(text)
    assert main(["print", str(file)]) == 1
    assert "cannot be parsed: it is in the form `names`" in capsys.readouterr().err
