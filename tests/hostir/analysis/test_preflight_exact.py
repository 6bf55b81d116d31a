"""The checks are exact: parts of views, branches, ranks, and sizes of later calls."""

# Host programs by hand take plain numbers where a Scalar is declared.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from fuser import ops
from fuser.ir.fusion import TensorView
from fuser.ir.op import Op
from fuser.ir.ops import nodes
from fuser.ir.scalar.constructors import Scalar, as_scalar
from fuser.support.errors import ArgumentError, VerifyError
from hostir import (
    NUMBER_OF_STREAMS,
    RANK,
    Allocate,
    Deallocate,
    EndCoalescing,
    GetCurrentStream,
    HostIrContainer,
    HostIrEvaluator,
    P2PCommunication,
    SetCurrentStream,
    StartCoalescing,
    Stream,
    Synchronize,
    Wait,
    eq,
    ne,
    verify,
)
from hostir.analysis import races
from hostir.analysis.buffer_regions import (
    BufferRegion,
    TrackedBuffer,
    reshaped,
    whole_axes,
    whole_box,
)
from hostir.analysis.preflight import check_before_run
from hostir.tools.run_text import run_simulated
from multidevice import DeviceMesh
from tests.support.handmade_programs import enter_streams, leave_streams
from tests.support.stream_programs import chunk

BOTH = DeviceMesh([0, 1])


def _copy(out: TensorView, inp: TensorView) -> nodes.LoadStoreOp:
    return nodes.LoadStoreOp(out, inp)


def _add(out: TensorView, inp: TensorView, by: float) -> nodes.BinaryOp:
    return nodes.BinaryOp(out, inp, as_scalar(by), kind="add")


def _check(hic: HostIrContainer, rank: int = 0) -> None:
    verify(hic)
    check_before_run(hic, {RANK: rank, NUMBER_OF_STREAMS: 4}, rank=rank)


def _views(hic: HostIrContainer, shape: list[int], to: list[int]) -> list[TensorView]:
    """Appends names of a new input and of a new output in another shape."""
    x, y = hic.input(shape), hic.tensor(shape)
    hic.append(Allocate(y))
    hic.add_output(y)
    views = [ops.reshape(tv, to) for tv in (x, y)]
    hic.append(*views)
    return views


# ------------------------------------------------------------------ parts of views
@pytest.mark.parametrize("count", [1, 23, 24])
def test_elements_of_a_flat_view_fill_a_buffer_when_all_are_written(count: int) -> None:
    hic = HostIrContainer()
    with hic:
        x, y = _views(hic, [4, 6], [24])
        with hic.loop(count) as i:
            hic.append(_copy(hic.select(y, 0, i), hic.select(x, 0, i)))
    if count == 24:
        t = torch.randn(4, 6)
        assert torch.equal(run_simulated(hic, [t], ranks=1)[0][0], t)
    else:
        with pytest.raises(VerifyError, match=r"uninitialised: T1.*, part of an output, is never"):
            _check(hic)


@pytest.mark.parametrize("late", [None, "all", 0, 1])
def test_rows_of_a_merged_axis_are_apart(late: str | int | None) -> None:
    hic = HostIrContainer()
    with hic:
        x, y = _views(hic, [2, 4, 6], [8, 6])
        enter_streams(hic, NUMBER_OF_STREAMS)
        with hic.loop(8) as i:
            hic.append(SetCurrentStream(Stream(i % NUMBER_OF_STREAMS)))
            hic.append(_add(hic.select(y, 0, i), hic.select(x, 0, i), 1.0))
        leave_streams(hic, NUMBER_OF_STREAMS)
    t = torch.randn(2, 4, 6)
    assert torch.equal(run_simulated(hic, [t], ranks=1, late_stream=late)[0][0], t + 1)


@pytest.mark.parametrize("same", [False, True])
def test_rows_of_a_split_axis_are_apart(same: bool) -> None:
    hic = HostIrContainer()
    with hic:
        x, y = _views(hic, [4, 6], [2, 2, 6])
        enter_streams(hic, NUMBER_OF_STREAMS)
        with hic.loop(2) as i, hic.loop(2) as j:
            hic.append(SetCurrentStream(Stream(2 * i + j)))
            inner = 0 if same else j
            a, b = (hic.select(hic.select(tv, 0, i), 0, inner) for tv in (x, y))
            hic.append(_add(b, a, 1.0))
        leave_streams(hic, NUMBER_OF_STREAMS)
    if same:
        with pytest.raises(VerifyError, match=r"race: (.|\n)*T1_g_float\[0, :\]"):
            _check(hic)
    else:
        t = torch.randn(4, 6)
        assert torch.equal(run_simulated(hic, [t], ranks=1)[0][0], t + 1)


def test_parts_that_are_no_boxes_fill_a_buffer_together() -> None:
    for count in (2, 3):
        hic = HostIrContainer()
        with hic:
            x, y = _views(hic, [2, 4], [8])
            with hic.loop(count) as i:
                hic.append(_copy(chunk(hic, y, 0, 3, i), chunk(hic, x, 0, 3, i)))
        if count == 3:
            _check(hic)
        else:
            with pytest.raises(VerifyError, match=r"part of an output, is never written"):
                _check(hic)


# ------------------------------------------------------------------ branches and ranks
@pytest.mark.parametrize("other", [ne, eq])
def test_complementary_branches_write_all(other: Callable[[Scalar, int], Scalar]) -> None:
    hic = HostIrContainer()
    with hic:
        x, y = hic.input([6, 8]), hic.tensor([6, 8])
        hic.append(Allocate(y))
        with hic.loop(6) as i:
            a, b = hic.select(x, 0, i), hic.select(y, 0, i)
            with hic.branch(eq(i % 2, 0)):
                hic.append(_add(b, a, 1.0))
            with hic.branch(other(i % 2, 0)):
                hic.append(_add(b, a, 2.0))
        hic.add_output(y)
    if other is ne:
        t = torch.randn(6, 8)
        want = t + torch.tensor([1.0, 2.0] * 3)[:, None]
        assert torch.equal(run_simulated(hic, [t], ranks=1)[0][0], want)
    else:
        with pytest.raises(VerifyError, match=r"T1_g_float\[1, :\], part of an output, is never"):
            _check(hic)


def _pipeline(reader: int) -> HostIrContainer:
    """Rank 0 computes and sends; one of the ranks writes y, which rank 1 has."""
    hic = HostIrContainer()
    with hic:
        x, t = hic.input([8], mesh=BOTH), hic.tensor([8], mesh=BOTH)
        y = hic.tensor([8], mesh=DeviceMesh([1]))
        hic.append(Allocate(t), Allocate(y))
        with hic.branch(eq(RANK, 0)):
            hic.append(_add(t, x, 1.0), P2PCommunication(t, 1, number=0, type="send"), Wait(0))
        with hic.otherwise():
            hic.append(P2PCommunication(t, 0, number=1, type="recv"), Wait(1))
        with hic.branch(eq(RANK, reader)):
            hic.append(_add(y, t, 2.0))
        hic.add_output(y)
    return hic


def test_a_pipeline_over_ranks() -> None:
    x = torch.randn(8)
    (_, (got,)) = run_simulated(_pipeline(1), [x], ranks=2)
    assert torch.equal(got, x + 1 + 2)


def test_a_tensor_that_a_rank_lacks_is_named() -> None:
    with pytest.raises(
        VerifyError, match=r"tensor of other ranks: T2.* not in the mesh of the tensor, .*1"
    ):
        _check(_pipeline(0), 0)
    hic = HostIrContainer()
    with hic:
        x, y = hic.input([8], mesh=DeviceMesh([0])), hic.tensor([8], mesh=BOTH)
        hic.append(Allocate(y), _add(y, x, 1.0))
        hic.add_output(y)
    with pytest.raises(
        VerifyError,
        match=r"add: the op uses .*T0.* and T1.* only one of these tensors is on rank 1",
    ):
        verify(hic)


@pytest.mark.parametrize("inside", [False, True])
def test_a_group_is_closed_in_the_step_that_opens_it(inside: bool) -> None:
    hic, other = HostIrContainer(), 1 - RANK
    with hic:
        x, y = hic.input([8], mesh=BOTH), hic.tensor([8], mesh=BOTH)
        hic.append(Allocate(y))
        with hic.loop(2):
            hic.append(
                StartCoalescing(),
                P2PCommunication(x, other, number=0, type="send"),
                P2PCommunication(y, other, number=1, type="recv"),
            )
            if inside:
                hic.append(EndCoalescing(2), Wait(2))
        if not inside:
            hic.append(EndCoalescing(2), Wait(2))
        hic.add_output(y)
    if inside:
        _check(hic)
    else:
        with pytest.raises(
            VerifyError, match=r"loop over i1: a group of transfers must begin and end in"
        ):
            verify(hic)


# ------------------------------------------------------------------ later calls
def test_a_longer_loop_of_a_later_call_is_checked_again() -> None:
    hic = HostIrContainer()
    with hic:
        x = hic.input([-1, 8])
        y, s = hic.tensor([x.size(0), 8]), hic.tensor([4, 8])
        hic.append(Allocate(y), Allocate(s))
        enter_streams(hic, 4)
        with hic.loop(x.size(0)) as i:
            hic.append(SetCurrentStream(Stream(i % 4)))
            slot = hic.select(s, 0, i % 3)
            hic.append(_add(slot, hic.select(x, 0, i), 1.0), _add(hic.select(y, 0, i), slot, 1.0))
        leave_streams(hic, 4)
        hic.add_output(y)
    evaluator = HostIrEvaluator(hic)
    for _ in range(2):
        t = torch.randn(3, 8)
        assert torch.allclose(evaluator.run([t])[0], t + 2)
    with pytest.raises(VerifyError, match=r"a part of T2.* is overwritten while an earlier"):
        evaluator.run([torch.randn(8, 8)])


# ------------------------------------------------------------------ names and numbers
def _joining(name: str) -> HostIrContainer:
    hic = HostIrContainer()
    with hic:
        x, y = hic.input([8]), hic.tensor([8])
        mine = Stream(name="S5")
        hic.append(Allocate(y), GetCurrentStream(Stream(name="S0")), SetCurrentStream(mine))
        hic.append(Synchronize(Stream(name=name)), _add(y, x, 1.0))
        hic.append(SetCurrentStream(Stream(name="S0")), Synchronize(mine))
        hic.add_output(y)
    return hic


def test_a_stream_that_nothing_captures_or_enters_is_refused() -> None:
    x = torch.randn(8)
    assert torch.equal(run_simulated(_joining("S0"), [x], ranks=1)[0][0], x + 1)
    with pytest.raises(
        VerifyError, match=r"Synchronize: .* Stream S1, .* no GetCurrentStream .*did you mean"
    ):
        verify(_joining("S1"))


def test_a_condition_of_a_program_is_none_of_pythons() -> None:
    hic = HostIrContainer()
    with hic, hic.loop(4) as i:
        for condition in (i < 2, eq(i, 1)):
            with pytest.raises(ArgumentError, match=r"neither true nor false .*hic.branch"):
                bool(condition)
        with pytest.raises(ArgumentError, match="logical_and"):
            assert i < 2 and i < 3
    assert [bool(as_scalar(v)) for v in (True, False)] == [True, False]


# ------------------------------------------------------------------ lines
def test_refusals_number_both_ops_and_mark_the_right_one_of_two_alike() -> None:
    hic = HostIrContainer()
    with hic:
        x, y, t = hic.input([4, 8]), hic.tensor([4, 8]), hic.tensor([8])
        hic.append(Allocate(y))
        with hic.loop(4) as i:
            row, own = hic.select(x, 0, i), hic.select(y, 0, i)
            hic.append(Allocate(t), _add(t, row, 1.0), _copy(own, t), Allocate(t))
        hic.add_output(y)
    with pytest.raises(VerifyError, match=r"T2.* already has a buffer, .*, at line 15 ") as error:
        verify(hic)
    marked = [k for k, line in enumerate(str(error.value).splitlines()) if line[:2] == "->"]
    assert marked == [len(str(error.value).splitlines()) - 1]
    hic = HostIrContainer()
    with hic:
        x, y, t = hic.input([8]), hic.tensor([8]), hic.tensor([8])
        hic.append(Allocate(y), Allocate(t), _add(t, x, 1.0), Deallocate(t), _add(y, t, 1.0))
        hic.add_output(y)
    with pytest.raises(VerifyError, match=r"after its Deallocate at line 8 \(.*\), at line 11\n"):
        verify(hic)


def test_the_remedy_for_memory_of_another_stream_works() -> None:
    def program(remedy: bool) -> HostIrContainer:
        hic, caller = HostIrContainer(), Stream(name="S0")
        with hic:
            x = hic.input([8])
            hic.append(GetCurrentStream(caller), SetCurrentStream(Stream(0)), Synchronize(caller))
            t = ops.add(x, x)
            hic.append(t, SetCurrentStream(caller), Synchronize(Stream(0)))
            y = ops.add(t, x)
            hic.append(y)
            if remedy:
                hic.append(SetCurrentStream(Stream(0)), Synchronize(caller))
                hic.append(SetCurrentStream(caller))
            hic.add_output(y)
        return hic

    text = r"Synchronize\(Stream S0\) is missing, between SetCurrentStream\(Stream 0\) and"
    with pytest.raises(VerifyError, match=text):
        _check(program(remedy=False))
    _check(program(remedy=True))


def test_chained_steps_of_many_loops_are_found_in_few_walks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walks, start = [0], races.RaceWalk.run

    def counted(self: races.RaceWalk, given: Sequence[Op]) -> None:
        walks[0] += given is hic.ops
        start(self, given)

    monkeypatch.setattr(races.RaceWalk, "run", counted)
    hic, caller = HostIrContainer(), Stream(name="S0")
    with hic:
        x = hic.input([4, 8])
        hic.append(GetCurrentStream(caller))
        for _ in range(20):
            y = hic.tensor([4, 8])
            hic.append(Allocate(y))
            with hic.loop(4) as i:
                worker = Stream(i % NUMBER_OF_STREAMS)
                hic.append(SetCurrentStream(worker), Synchronize(caller))
                hic.append(_add(hic.select(y, 0, i), hic.select(x, 0, i), 1.0))
                hic.append(SetCurrentStream(caller), Synchronize(worker))
            x = y
        hic.add_output(x)
    assert len(races.find_chains(hic, {RANK: 0, NUMBER_OF_STREAMS: 4})) == 20
    assert walks[0] == 2


def test_an_empty_range_of_a_reshaped_axis_of_one_element_is_no_use() -> None:
    """One row in more steps than rows: behind a reshape, no axis of the buffer counts the row."""
    hic = HostIrContainer()
    with hic:
        x = hic.input([1, 8])
    buffer = TrackedBuffer(x, (1, 8), "entry", None, True)
    axes = tuple(reshaped((1, 8), whole_axes((1, 8)), (1, 2, 4)))
    view = BufferRegion(buffer, whole_box((1, 8)), (1, 2, 4), axes)
    assert not view.chunk(0, 0, 1, 4).is_empty
    assert view.chunk(0, 1, 0, 4).is_empty
