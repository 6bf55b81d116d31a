"""Programs print as golden texts, and every text reads back as the same program."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fuser import FusionDefinition, ops
from fuser.ir.op import walk
from fuser.ir.types import ParallelType
from fuser.support.errors import ParseError, VerifyError
from hostir import HostIrEvaluator
from hostir.ir.ops import Allocate, Communication, LocalSlice, Wait
from hostir.ir.parser import parse
from hostir.ir.printer import FULL_FORM
from hostir.ir.program import HostIrContainer, equal
from hostir.ir.verifier import verify
from tests.support.host_programs import CASES, Case, build, check, out, shard, tensor

GOLDEN = Path(__file__).parent / "golden"

# One of each host op and each spelling of a communication.
EVERY_OP = (GOLDEN / "every_op.txt").read_text()


def test_every_host_op_prints_as_it_was_read() -> None:
    assert str(parse(EVERY_OP)) == EVERY_OP


@pytest.mark.parametrize("name", CASES)
def test_programs_round_trip(name: str) -> None:
    program = build(CASES[name])
    again = parse(program.full_text())
    assert again.full_text() == program.full_text()
    assert equal(again, program)
    verify(again)


@pytest.mark.parametrize("name", CASES)
def test_programs_run_from_their_text(name: str) -> None:
    program = build(CASES[name])
    check(program, CASES[name])
    check(parse(program.full_text()), CASES[name])


@pytest.mark.parametrize("name", ["heads", "mlp2", "sequence2", "slice2"])
def test_programs_print_as_golden_texts(name: str) -> None:
    """Regenerate with HOSTIR_GOLDEN=write; the semantic twin is the test above."""
    path = GOLDEN / f"{name}.txt"
    text = str(build(CASES[name]))
    if os.environ.get("HOSTIR_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


def test_changed_programs_are_unequal() -> None:
    text = build(CASES["mlp2"]).full_text()
    program = parse(text)
    for old, new in (
        ("type=Allreduce, team=(0 1)", "type=Allreduce, team=(0 1), red_op=MAX"),
        ("Kernel group 4 (pointwise)", "Kernel group 4 (reduction)"),
        ("contiguity: t t", "contiguity: t f"),
        ("zero_init=false", "zero_init=true"),
    ):
        assert old in text
        assert not equal(parse(text.replace(old, new, 1)), program), old


def test_collectives_are_counted_by_type() -> None:
    def types(name: str) -> list[str]:
        return [c.type for c in build(CASES[name]).communications()]

    assert types("linear_relu_sum") == []
    assert types("mlp2") == types("mlp4") == ["Allreduce"]
    assert types("sequence2") == ["Allgather", "ReduceScatter"]
    assert types("slice2") == []
    assert any(isinstance(op, LocalSlice) for op in build(CASES["slice2"]).ops)


def test_older_spellings_are_read() -> None:
    new = parse(EVERY_OP)
    text = EVERY_OP.replace("Wait(Communication 0)", "Wait Communication 0")
    # The second allocation; the first line is empty, the next is the header.
    first = EVERY_OP.splitlines()[3]
    buffer = first.split(" = ")[0]
    text = text.replace(first, f"{buffer} = ALLOCATE(mem_type=global, zero_init=false)")
    old = parse(text)
    assert isinstance(old.ops[1], Allocate)
    assert not old.ops[1].zero_init
    assert old.ops[1].size == new.ops[1].size  # pyright: ignore[reportAttributeAccessIssue]
    assert [type(op) for op in old.ops] == [type(op) for op in new.ops]
    assert any(isinstance(op, Wait) for op in old.ops)


def test_bare_names_stand_for_known_tensors() -> None:
    program = parse(EVERY_OP)
    lines = EVERY_OP.splitlines()
    short = lines[:3]
    for line in lines[3:]:
        for n in (0, 1):  # T2 and T3 are declared in the body
            line = line.replace(str(_tensor(program, n)), f"T{n}")
        short.append(line)
    assert equal(parse("\n".join(short)), program)


def _tensor(program: HostIrContainer, number: int) -> object:
    return next(t for t in program.tensors() if t.number == number)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("type=Allgather", "type=Allgathr", "unknown communication type 'Allgathr'"),
        ("team=(0 1), root", "team=(0 0), root", "duplicates"),
        ("mesh_x of", "mesh_w of", "'mesh_w' is not a mesh axis"),
        ("axis = 0", "axs = 0", "expected 'axis'"),
        ("Group ID: 3", "Group: 3", "expected 'ID:'"),
        ("Deallocate {", "Dealocate {", "unknown op Dealocate"),
        ("} // %HostIrContainer", "", "expected a tensor"),
        ("red_op=MAX", "red_op=AVX", "line 7"),
        ("T2_g_float[iS6{2}, iS7{i0}", "T2_g_float[iS6{2}, iS7{i1}", "T2 was declared as"),
    ],
)
def test_errors_mark_the_line(old: str, new: str, message: str) -> None:
    assert old in EVERY_OP
    with pytest.raises(ParseError, match=r"line \d+, column \d+") as error:
        parse(EVERY_OP.replace(old, new, 1))
    assert message in str(error.value)


def test_text_does_not_depend_on_hash_order() -> None:
    code = (
        "from tests.support.host_programs import CASES, build\n"
        "print(build(CASES['mlp2']).full_text(), build(CASES['heads']).full_text())"
    )
    root = Path(__file__).parents[3]
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
            cwd=root,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1


def test_a_communications_type_and_numbers_are_checked() -> None:
    program = parse(EVERY_OP)
    (first, *_) = [op for op in program.ops if isinstance(op, Communication)]
    assert str(first.team) == "(0 1)"
    assert first.team.ranks(1) == (0, 1)
    assert first.team.ranks(2) == ()


def _wide() -> None:
    mesh = list(range(1024))
    x = tensor(-1, 1024, mesh=mesh)
    w1, w2 = tensor(4096, 1024, mesh=mesh, cut=0), tensor(1024, 4096, mesh=mesh, cut=1)
    y = ops.linear(ops.relu(ops.linear(x, w1)), w2)
    out(shard(ops.add(ops.set(y), x), 1, mesh))


def test_a_program_of_1024_ranks_is_short() -> None:
    """It printed all ranks at every mention: 163 KB for 12 ops."""
    program = build(Case(_wide, ((2, 1024), (4096, 1024), (1024, 4096)), 1024))
    text = program.full_text()
    assert "team=(0..1023)" in text
    assert len(str(program)) < 6_000
    assert len(text) < 16_000
    assert equal(parse(text), program)


def lines_of(program: HostIrContainer) -> list[str]:
    return [op.where for op in walk(program.ops)]


@pytest.mark.parametrize("name", ["mlp2", "sequence2", "slice2", "heads"])
def test_the_users_lines_survive_the_text(name: str) -> None:
    """Errors of a program that was read named no line."""
    program = build(CASES[name])
    again = parse(program.full_text())
    assert lines_of(again) == lines_of(program)
    assert sum(".py:" in where for where in lines_of(again)) >= len(program.communications()) + 1
    # They are no part of what a program is.
    text = program.full_text()
    (section,) = re.findall(r"^User lines :[ ]*\n(?:  [^\n]*\n)+", text, re.MULTILINE)
    without = parse(text.replace(section, ""))
    assert not any(lines_of(without))
    assert equal(without, program)
    with pytest.raises(ParseError, match="expected an op and the user's line"):
        parse(text.replace(section, "User lines : \n  T3 linear at x.py\n"))


def test_a_wrong_size_is_marked_in_the_full_form() -> None:
    old, new = "size=( ( i0 * i1 ) * 2 )", "size=( i0 * i1 )"
    assert old in EVERY_OP
    with pytest.raises(
        ParseError,
        match=r"line \d+, column \d+: size.* fields of this op give \( \( i0 \* i1 \) \* 2",
    ):
        parse(FULL_FORM + EVERY_OP.replace(old, new, 1))


def test_a_short_form_with_blocks_is_read_and_says_what_it_lacks() -> None:
    """Its sizes are those of logical domains, which it does not have."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        w = fd.define_tensor([-1, -1], contiguity=True)
        y = fd.ops.matmul(x, w)
        fd.add_output(y)
        w.outer_split(1, 3)
        w.axis(1).parallelize(ParallelType.stream)
    fd.execute([torch.ones(4, 5), torch.ones(5, 7)])
    program = fd.fec.host_program()
    short = parse(str(program))
    assert short.is_short
    assert len(short.ops) == len(program.ops)
    with pytest.raises(VerifyError, match="The full form is needed"):
        HostIrEvaluator(short)


def damaged(change: str) -> str:
    """Returns the full form of a program with a kernel, damaged in one place."""
    text = build(CASES["sliced_matmul"]).full_text()
    header, rows = re.search(r"TransformPrinter : \n((?: .*\n)+)", text), "TransformPrinter : \n"
    kernel = text.index("Kernel group 0")
    assert header is not None and header.start() < kernel
    changed = {
        "renamed": text.replace(rows, "Transforms : \n", 1),
        "deleted": text.replace(rows, "", 1),
        "without": text.replace(header[0], "", 1),
        "later unknown": text.replace("User lines : \n", "Lines : \n", 1),
        "garbage": text.replace("} // %HostIrContainer\n", "} // %HostIrContainer\ngarbage\n", 1),
        "kernel without": text[:kernel]
        + re.sub(r"TransformPrinter : \n(?: .*\n)+", "", text[kernel:], count=1),
    }[change]
    assert changed != text
    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("renamed", "unknown section 'Transforms : ': expected Aliases, .*TransformPrinter"),
        ("deleted", r"expected a section \(Aliases, .*TransformPrinter"),
        ("without", "the full form lacks the domains of T0_g_float in section TransformPrinter"),
        ("later unknown", "unknown section 'Lines : '"),
        ("garbage", r"line \d+, column 1: expected a section .* or the end of the text\n  garbage"),
        ("kernel without", "the full form lacks the domains of T"),
    ],
)
def test_a_damaged_section_is_refused(change: str, message: str) -> None:
    text = damaged(change)
    with pytest.raises(ParseError, match=message):
        parse(text)


def test_comments_may_follow_a_program() -> None:
    text = build(CASES["sliced_matmul"]).full_text()
    end = "} // %HostIrContainer\n"
    assert equal(parse(text.replace(end, f"{end}// more\n\n", 1)), parse(text))


@pytest.mark.finding("G34")
@pytest.mark.parametrize("digits", [1, 20, 200, 300, 5000])
def test_a_name_of_many_digits_is_read_or_refused_as_a_fault_of_the_text(digits: int) -> None:
    program = HostIrContainer()
    with program:
        x = program.input([-1, -1])
        y = program.tensor(x.shape())
        program.append(Allocate(y))
        program.append(ops.neg(x), into=y)
        program.add_output(y)
    text = program.full_text()
    assert "size=( i0 * i2 )" in text
    renamed = re.sub(r"\bi2\b", "i" + "3" * digits, text)
    if digits < 250:
        assert parse(renamed).full_text() == renamed
    else:
        with pytest.raises(ParseError, match=f"line 9, .*a name of {digits + 1} characters"):
            parse(renamed)
