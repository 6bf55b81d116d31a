"""Buffers that a caller gives for results: what is right runs, what would lose something is refused
in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuser import ParallelType, ops
from fuser.ir.fusion import TensorView
from fuser.multidevice import DeviceMesh
from fuser.support.errors import ExecutionError, InputError
from hostir import (
    NUMBER_OF_STREAMS,
    Allocate,
    GetCurrentStream,
    HostIrContainer,
    HostIrEvaluator,
    SetCurrentStream,
    Stream,
    Synchronize,
)
from hostir.ir.ops import Communication, Wait
from multidevice.job.communicator import Communicator
from multidevice.job.simulation import simulate
from multidevice.sharding.reshard import TeamOf
from tests.support.host_programs import Case, build_for, out, tensor

Build = Callable[..., tuple[TensorView, ...]]
LATE = pytest.mark.parametrize("late", [None, "all"])


def program(
    make: Build, *shapes: tuple[int, ...]
) -> tuple[HostIrContainer, tuple[TensorView, ...]]:
    """Returns a program of ops, in order, whose results are all outputs."""
    hic = HostIrContainer()
    with hic:
        results = make(*(hic.input(shape) for shape in shapes))
        for tv in results:
            hic.append(tv)
            hic.add_output(tv)
    return hic, results


def refused(hic: HostIrContainer, values: dict[Any, Any], words: str, **options: Any) -> None:
    with pytest.raises(InputError, match=words):
        HostIrEvaluator(hic, **options).run_with_input(values)


@LATE
def test_a_buffer_without_memory_is_refused(late: str | None) -> None:
    hic, (y,) = program(lambda x: (ops.mul(x, 2.0),), (4, 8))
    (x,) = hic.inputs
    resized, good = torch.empty(4, 8), torch.ones(4, 8)
    resized.untyped_storage().resize_(0)
    refused(hic, {x: good, y: resized}, "storage was resized to 0", late_stream=late)
    refused(hic, {x: good, y: torch.empty(4, 8).to_sparse()}, "sparse_coo", late_stream=late)
    refused(hic, {x: good, y: torch.empty(4, 8, device="meta")}, "device meta", late_stream=late)


@LATE
@pytest.mark.parametrize("strides", [(0, 1), (1, 1), (8, 0)])
def test_a_buffer_that_overlaps_itself_is_refused(strides: Any, late: str | None) -> None:
    hic, (y,) = program(lambda x, w: (ops.matmul(x, w),), (4, 8), (8, 8))
    x, w = hic.inputs
    buffer = torch.zeros(64).as_strided((4, 8), strides)
    values = {x: torch.ones(4, 8), w: torch.ones(8, 8), y: buffer}
    refused(hic, values, r"memory for every element.*T2.*strides \(", late_stream=late)


@LATE
def test_elements_are_written_over_their_operands(late: str | None) -> None:
    """The last reader may write to the memory if it computes all elements before it writes."""
    makes: list[tuple[Callable[..., Any], Callable[..., torch.Tensor]]] = [
        (lambda x: ops.add(x, 1.0), lambda x: x + 1),
        (lambda x: ops.add(x, ops.permute(x, [1, 0])), lambda x: x + x.t()),
        (lambda x: ops.sum(ops.mul(x, x), [1], keepdim=False), lambda x: (x * x).sum(1)),
    ]
    for make, meaning in makes:
        hic = HostIrContainer()
        with hic:
            x = hic.input([4, 4])
            y = make(x)
            hic.append(y)
            hic.add_output(y)
        for shift in (0, 1):
            rows = torch.randn(6, 4)
            given = rows[1:5]
            want = meaning(given.double())
            at = 4 * (1 - shift)
            buffer = rows.view(-1)[at : at + want.numel()].view(want.shape)
            (got,) = HostIrEvaluator(hic, late_stream=late).run_with_input({x: given, y: buffer})
            assert got is buffer
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@LATE
def test_a_product_over_its_operand_is_refused(late: str | None) -> None:
    hic, (y,) = program(lambda x, w: (ops.matmul(x, w),), (4, 4), (4, 4))
    x, w = hic.inputs
    rows, weight = torch.randn(6, 4), torch.randn(4, 4)
    for buffer in (rows[1:5], rows[:4]):
        values = {x: rows[1:5], w: weight, y: buffer}
        refused(hic, values, rf"T2.*input 0, T0.*matmul reads.*{__file__}", late_stream=late)


@LATE
def test_an_input_that_is_read_later_is_not_written_over(late: str | None) -> None:
    def make(x: Any) -> tuple[TensorView, ...]:
        y = ops.add(x, 1.0)
        return y, ops.sum(x, [1])

    hic, (y, z) = program(make, (4, 4))
    (x,) = hic.inputs
    given = torch.randn(4, 4)
    refused(hic, {x: given, y: given}, r"T1.*shares elements with input 0, T0.*sum reads")
    # The sum is the last that reads it.
    want = given.double().sum(1)
    (_, total) = HostIrEvaluator(hic, late_stream=late).run_with_input({x: given, z: given[0]})
    torch.testing.assert_close(total.double(), want, rtol=1e-5, atol=1e-6)


def test_two_results_need_two_places() -> None:
    def make(x: Any) -> tuple[TensorView, ...]:
        y = ops.add(x, 1.0)
        return y, ops.mul(y, 2.0)

    hic, (y, z) = program(make, (4, 8))
    (x,) = hic.inputs
    rows = torch.empty(5, 8)
    values = {x: torch.ones(4, 8), y: rows[:4], z: rows[1:]}
    refused(hic, values, "buffers of T1.* and T2.* share elements")
    columns = torch.empty(4, 16)
    values = {**values, y: columns[:, ::2], z: columns[:, 1::2]}
    got = HostIrEvaluator(hic).run_with_input(values)
    assert [t.unique().item() for t in got] == [2, 4]


def test_an_input_that_is_returned_or_updated_is_not_written_over() -> None:
    hic = HostIrContainer()
    with hic:
        x = hic.input([4])
        y = ops.neg(x)
        hic.append(y)
        hic.add_output(y)
        hic.add_output(x)
    given = torch.ones(4)
    refused(hic, {x: given, y: given}, r"input 0, T0.*which is also an output")


def in_rows(*, streamed: bool, turned: bool) -> tuple[HostIrContainer, TensorView, TensorView]:
    """Returns a program: row i of y is relu of row i of x, or of row 7 - i."""
    hic = HostIrContainer()
    with hic:
        x, y, caller = hic.input([8, 4]), hic.tensor([8, 4]), Stream(name="S0")
        hic.append(Allocate(y), GetCurrentStream(caller))
        if streamed:
            with hic.loop(NUMBER_OF_STREAMS) as i:
                hic.append(SetCurrentStream(Stream(i)), Synchronize(caller))
        with hic.loop(8) as i:
            if streamed:
                hic.append(SetCurrentStream(Stream(i % NUMBER_OF_STREAMS)))
            row = ops.relu(hic.select(x, 0, 7 - i if turned else i))
            hic.select(y, 0, i, row)
            hic.append(row)
        if streamed:
            hic.append(SetCurrentStream(caller))
            with hic.loop(NUMBER_OF_STREAMS) as i:
                hic.append(Synchronize(Stream(i)))
        hic.add_output(y)
    return hic, x, y


@pytest.mark.parametrize("streamed", [False, True])
def test_rows_are_written_over_themselves(streamed: bool) -> None:
    hic, x, y = in_rows(streamed=streamed, turned=False)
    for late in (None, "all"):
        given = torch.randn(8, 4)
        want = given.relu()
        HostIrEvaluator(hic, late_stream=late).run_with_input({x: given, y: given})
        assert torch.equal(given, want)
    rows = torch.randn(9, 4)
    refused(hic, {x: rows[:8], y: rows[1:]}, "relu reads although relu may have overwritten")
    other, x, y = in_rows(streamed=streamed, turned=True)
    refused(other, {x: rows[:8], y: rows[:8]}, "relu reads although relu may have overwritten")


@pytest.mark.parametrize("method", ["evaluate", "run_with_input"])
def test_inputs_that_meet_an_update_are_copied_by_every_entrance(method: str) -> None:
    def define() -> None:
        x, w = tensor(-1), tensor(-1)
        out(ops.add(x, w), x)

    evaluator = HostIrEvaluator(build_for(Case(define, ()).fusion(), [torch.zeros(64)] * 2))
    (x, w), rows = evaluator.program.inputs, torch.ones(65)
    if method == "evaluate":
        evaluator.evaluate([rows[1:], rows[:64]])
    else:
        evaluator.run_with_input({x: rows[1:], w: rows[:64]})
    assert rows.tolist() == [1] + [2] * 64


def test_an_update_takes_no_other_buffer() -> None:
    def define() -> None:
        x, w = tensor(-1), tensor(-1)
        out(ops.add(x, w), x)

    hic = build_for(Case(define, ()).fusion(), [torch.zeros(4)] * 2)
    x, w = hic.inputs
    values = {x: torch.ones(4), w: torch.ones(4), hic.outputs[0]: torch.ones(4)}
    refused(hic, values, "T2.* updates the input T0")


def test_a_communication_takes_no_buffer_with_gaps() -> None:
    """Once, only one rank raised the error, while the others waited."""
    mesh = DeviceMesh([0, 1])
    hic = HostIrContainer()
    with hic:
        x, y = hic.input([2, 4], mesh=mesh), hic.tensor([2, 4], mesh=mesh)
        x.axis(0).parallelize(ParallelType.mesh_x)
        gather = Communication(
            x, y, number=0, type="Allgather", team=TeamOf(mesh, (ParallelType.mesh_x,))
        )
        hic.append(Allocate(y), gather, Wait(0))
        hic.add_output(y)

    def body() -> None:
        evaluator = HostIrEvaluator(hic, Communicator.instance())
        with pytest.raises(InputError, match=r"Communication 0 .*T1.*so there are gaps"):
            evaluator.run_with_input({x: torch.ones(1, 4), y: torch.empty(2, 8)[:, ::2]})
        (got,) = evaluator.run_with_input({x: torch.ones(1, 4), y: torch.empty(2, 4)})
        assert got.tolist() == [[1] * 4] * 2

    with simulate(2) as world:
        world.run(body)


def test_torch_refusing_late_work_is_told_by_op_and_line() -> None:
    hic, (y,) = program(lambda x, w: (ops.matmul(x, w),), (4, 4), (4, 4))
    x, w = hic.inputs
    with torch.inference_mode():
        buffer = torch.empty(4, 4)
    for late in (None, "all"):
        with pytest.raises(ExecutionError, match=rf"matmul failed.*inference.*{__file__}"):
            HostIrEvaluator(hic, late_stream=late).run_with_input(
                {x: torch.ones(4, 4), w: torch.ones(4, 4), y: buffer}
            )
