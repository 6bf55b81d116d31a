"""The verifier accepts what the lowering makes and finds every planted mistake, on its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fuser.ir.dtypes import DataType
from fuser.ir.ops import nodes
from fuser.ir.scalar import constructors as sc
from fuser.ir.types import ParallelType
from fuser.support.errors import ParseError, VerifyError
from hostir import RANK, eq
from hostir.ir.ops import (
    Allocate,
    CollectivePermute,
    Communication,
    Deallocate,
    LaunchKernel,
    LocalSlice,
    ShardByStream,
    Wait,
)
from hostir.ir.parser import parse
from hostir.ir.program import HostIrContainer
from hostir.ir.verifier import verify
from hostir.passes.deallocation import run_passes
from hostir.tools.cli import main
from hostir.tools.run_text import run_simulated
from multidevice.job.shard_tensor import LocalDeviceMesh
from multidevice.sharding.reshard import TeamOf
from tests.support.host_programs import CASES, build


@pytest.fixture(scope="module")
def program() -> HostIrContainer:
    """Linear, kernel, partial linear, allreduce, kernel."""
    return build(CASES["mlp2"])


def _without(program: HostIrContainer, kind: type, index: int = 0) -> HostIrContainer:
    found = [op for op in program.ops if isinstance(op, kind)]
    return program.with_ops(tuple(op for op in program.ops if op is not found[index]))


def _first(program: HostIrContainer, kind: type) -> int:
    return next(i for i, op in enumerate(program.ops) if isinstance(op, kind))


def _moved(program: HostIrContainer, kind: type, steps: int, index: int = 0) -> HostIrContainer:
    ops = list(program.ops)
    at = [i for i, op in enumerate(ops) if isinstance(op, kind)][index]
    ops.insert(at + steps, ops.pop(at))
    return program.with_ops(tuple(ops))


@pytest.mark.parametrize("name", CASES)
def test_lowered_programs_are_accepted(name: str) -> None:
    verify(build(CASES[name]))


def test_a_missing_allocation_is_found(program: HostIrContainer) -> None:
    with pytest.raises(
        VerifyError, match=r"launch of kernel group 1: T6.* is written before it is allocated"
    ):
        verify(_without(program, Allocate, 1))


def test_a_second_deallocation_is_found(program: HostIrContainer) -> None:
    at = _first(program, Deallocate)
    ops = (*program.ops, program.ops[at])
    with pytest.raises(VerifyError, match=r"T5.* is deallocated twice"):
        verify(program.with_ops(ops))


def test_a_leak_is_found(program: HostIrContainer) -> None:
    with pytest.raises(VerifyError, match=r"Memory leak detected .* no Deallocate of T5"):
        verify(_without(program, Deallocate))


def test_use_after_deallocation_is_found(program: HostIrContainer) -> None:
    with pytest.raises(VerifyError, match=r"T5.* is used after its Deallocate"):
        verify(_moved(program, Deallocate, -1))


def test_use_of_a_view_after_the_deallocation_of_its_buffer_is_found() -> None:
    program = build(CASES["heads"])
    frees = [op for op in program.ops if isinstance(op, Deallocate)]
    ops = [op for op in program.ops if op is not frees[-1]]
    ops.insert(next(i for i, op in enumerate(ops) if op.name == "matmul"), frees[-1])
    with pytest.raises(VerifyError, match=r"T4.*, a view of T2.*, is used after its Deallocate"):
        verify(program.with_ops(tuple(ops)))


def test_a_missing_wait_is_found(program: HostIrContainer) -> None:
    with pytest.raises(VerifyError, match=r"T11.* is used, but Communication 0, .* has no Wait"):
        verify(_without(program, Wait))
    unused = program.ops[: _first(program, Communication) + 1]
    mark = (
        r"Communication 0, started .*, has no Wait: append .*\n(.*\n)*->  *\d+   Communication 0 "
    )
    with pytest.raises(VerifyError, match=mark):
        verify(program.with_ops(unused))


def test_a_second_wait_is_found(program: HostIrContainer) -> None:
    ops = (*program.ops, Wait(number=0))
    with pytest.raises(VerifyError, match="an earlier op already waits for communication 0"):
        verify(program.with_ops(ops))


def test_reading_the_result_before_the_wait_is_found(program: HostIrContainer) -> None:
    steps = len(program.ops) - 1 - _first(program, Wait)
    with pytest.raises(VerifyError, match=r"is used before Wait\(Communication 0\)"):
        verify(_moved(program, Wait, steps))


def test_a_collective_before_its_operand_is_written_is_found(program: HostIrContainer) -> None:
    ops = list(program.ops)
    at = _first(program, Communication)
    ops[at], ops[at - 3] = ops[at - 3], ops[at]
    with pytest.raises(VerifyError, match=r"is read before it is written|before it is allocated"):
        verify(program.with_ops(tuple(ops)))


def test_a_kernel_group_must_exist_and_fit(program: HostIrContainer) -> None:
    with pytest.raises(
        VerifyError, match="the program has no kernel group 1: its kernel groups are 4"
    ):
        verify(HostIrContainer(program.values, program.ops, {4: program.groups[4]}))
    at = _first(program, LaunchKernel)
    launch = program.ops[at]
    assert isinstance(launch, LaunchKernel)
    ops = (*program.ops[:at], launch.replace(ins=()), *program.ops[at + 1 :])
    with pytest.raises(VerifyError, match="expected 1 input for kernel group 1, got 0"):
        verify(program.with_ops(ops))


def test_an_output_must_be_written(program: HostIrContainer) -> None:
    kept = tuple(op for op in program.ops if not isinstance(op, Deallocate))
    with pytest.raises(VerifyError, match=r"^No op writes the output T8"):
        verify(program.with_ops(kept[:-1]))


def test_the_callers_buffers_are_not_deallocated(program: HostIrContainer) -> None:
    ops = (*program.ops, Deallocate(program.outputs[0]))
    with pytest.raises(VerifyError, match=r"T8.* belongs to the caller"):
        verify(program.with_ops(ops))


def test_a_collective_over_one_rank_is_refused(program: HostIrContainer) -> None:
    text = program.full_text().replace("team=(0 1)", "team=(0)")
    with pytest.raises(VerifyError, match="the team has 1 rank, expected at least 2 ranks"):
        verify(parse(text))


def test_a_team_outside_of_the_meshes_is_found_on_its_line(
    program: HostIrContainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "program.txt"
    broken.write_text(program.full_text().replace("team=(0 1)", "team=(0 2)"))
    for command in ("verify", "run"):
        assert main([command, str(broken)]) == 1
        shown = capsys.readouterr().err
        assert (
            "contains rank 2, but the meshes of the program's tensors contain only ranks" in shown
        )
        assert re.search(r"^-> +\d+ +Communication 0 \(", shown, re.MULTILINE)
        # The message begins with the op's name, once.
        assert shown.count("Communication 0 (Allreduce): ") == 1


def _dtypes(case: str) -> HostIrContainer:
    """A program whose last op writes halves as floats, or names them so."""
    hic = HostIrContainer()
    with hic:
        mesh = LocalDeviceMesh([0, 1])
        x = hic.input([4, 8], DataType.Half, mesh=mesh)
        y = hic.tensor([4, 8], mesh=mesh)
        if case == "set":
            hic.append(Allocate(y), nodes.LoadStoreOp(y, x))
        elif case == "select":
            hic.select(x, 0, 0, hic.tensor([8], mesh=mesh))
        elif case == "chunk":
            y.outer_split(0, 2)
            y.axis(0).parallelize(ParallelType.stream)
            hic.append(ShardByStream(y, x, sc.ZERO))
        elif case == "slice":
            y.outer_split(0, 2)
            y.axis(0).parallelize(ParallelType.mesh_x)
            hic.append(Allocate(y), LocalSlice(y, x, axis=0, ptype=ParallelType.mesh_x))
        else:
            team = TeamOf(mesh, (ParallelType.mesh_x,))
            one = sc.ONE
            hic.append(Allocate(y), CollectivePermute(x, y, one, one, number=0, team=team))
    return hic


@pytest.mark.parametrize(
    ("case", "op"),
    {
        "set": "set",
        "select": "HirAliasSelect",
        "chunk": "ShardByStream",
        "slice": "LocalSlice",
        "permute": "CollectivePermute 0",
    }.items(),
)
def test_a_name_or_a_copy_has_the_dtype_of_its_buffer(case: str, op: str) -> None:
    with pytest.raises(VerifyError, match=r"dtype|and output") as error:
        verify(_dtypes(case))
    assert re.match(rf"(Op )?{op}: .*T0_g___half", str(error.value))
    assert "-> " in str(error.value)


def test_a_symbol_that_no_input_binds_is_found(program: HostIrContainer) -> None:
    text = program.full_text().replace("T8_g_float[iS22{i0}", "T8_g_float[iS22{i7}")
    text = re.sub(r"\(iS22\{i0\}", "(iS22{i7}", text)
    with pytest.raises((VerifyError, ParseError), match="i7"):
        verify(parse(text))


@pytest.mark.parametrize(
    ("spelled", "says"),
    [
        (
            "numberOfStrems",
            "no input of the program defines the symbol numberOfStrems; "
            "did you mean numberOfStreams?",
        ),
        ("steps", "no input of the program defines the symbol steps; did you mean step?"),
        ("i77", "no input of the program defines the symbol i77"),
        (
            "other",
            "no input of the program defines the symbol other, the index of a loop, "
            "outside of its loop",
        ),
    ],
)
def test_an_unbound_name_in_an_op_is_marked_with_a_suggestion(spelled: str, says: str) -> None:
    hic = HostIrContainer()
    with hic:
        x = hic.input([4, 8])
        with hic.loop(4, name="other"):
            pass
        with hic.loop(4, name="step") as step:
            hic.select(x, 0, step)
    text = hic.full_text().replace("index = step ", f"index = {spelled} ")
    with pytest.raises(VerifyError) as error:
        verify(parse(text))
    assert re.search(
        rf"HirAliasSelect: {re.escape(says)}, at line 5 \(.*py:\d+\)\n", str(error.value)
    )
    assert re.search(rf"^-> 5 .*\n.*index = {spelled} ", str(error.value), re.MULTILINE)


def test_an_unknown_op_is_marked_with_a_suggestion(program: HostIrContainer) -> None:
    text = str(program).replace("= linear(", "= liner(", 1)
    with pytest.raises(ParseError, match="unknown op liner; did you mean linear") as error:
        parse(text)
    line, caret = str(error.value).splitlines()[-2:]
    assert line[caret.index("^") :].startswith("liner(")


def _passed_on(first: int) -> HostIrContainer:
    """A ring: step `first` copies the own slot, every other one gets the next slot from the next
    rank, which has had it since the step before."""
    d, mesh, hic = 4, LocalDeviceMesh(range(4)), HostIrContainer()
    team = TeamOf(mesh, (ParallelType.mesh_x,))
    with hic:
        x = hic.input([d, 3], mesh=mesh)
        x.axis(0).parallelize(ParallelType.mesh_x)
        y = hic.tensor([d, 3], mesh=mesh)
        hic.append(Allocate(y))
        with hic.loop(d) as i:
            slot = hic.select(y, 0, (RANK + i) % d)
            with hic.branch(eq(i, first)):
                own = hic.select(x, 0, 0)
                hic.append(nodes.LoadStoreOp(hic.select(y, 0, RANK), own))
            with hic.otherwise():
                before = hic.select(y, 0, (RANK + i - 1) % d)
                to, source = (RANK + d - 1) % d, (RANK + 1) % d
                hic.append(CollectivePermute(before, slot, to, source, number=0, team=team))
                hic.append(Wait(0))
        hic.add_output(y)
    return hic


def test_a_branch_reads_what_an_earlier_step_wrote() -> None:
    program = _passed_on(first=0)
    verify(program)
    x = torch.arange(12.0).reshape(4, 3)
    for (out,) in run_simulated(program, [x], ranks=4):
        torch.testing.assert_close(out, x)


def test_a_branch_that_reads_before_any_step_has_written_is_found_before_the_run() -> None:
    program = _passed_on(first=3)
    verify(program)
    with pytest.raises(VerifyError, match="is read before it is written"):
        run_simulated(program, [torch.zeros(4, 3)], ranks=4)


def test_a_step_that_reads_before_it_writes_is_found() -> None:
    hic = HostIrContainer()
    with hic:
        y = hic.tensor([4, 8])
        hic.append(Allocate(y))
        with hic.loop(4) as i:
            other = hic.select(y, 0, (i + 1) % 4)
            hic.append(nodes.LoadStoreOp(hic.select(y, 0, i), other))
        hic.add_output(y)
    with pytest.raises(VerifyError, match=r"set: T.* is read before it is written"):
        verify(hic)


def test_errors_mark_the_line_and_name_the_pass(program: HostIrContainer) -> None:
    def break_it(p: HostIrContainer) -> HostIrContainer:
        return _moved(p, Deallocate, -1)

    kept = tuple(op for op in program.ops if not isinstance(op, Deallocate))
    with pytest.raises(VerifyError) as error:
        run_passes(program.with_ops(kept), (*_passes(), break_it))
    head, *_ = str(error.value).splitlines()
    assert head.startswith("The launch of kernel group 1: ") and head.endswith("after break_it")
    assert re.search(r"^-> +\d+ +LaunchKernel\(", str(error.value), re.MULTILINE)


def _passes():
    from hostir.passes.deallocation import PASSES

    return PASSES
