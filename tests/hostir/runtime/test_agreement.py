"""Tests that ranks of hand-written programs agree on each run, as for `execute`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fuser import ParallelType, ops
from fuser.ir.fusion import TensorView
from fuser.support.errors import FuserError, InputError, PeerError, ProgramMismatchError
from hostir import (
    Allocate,
    Communication,
    Deallocate,
    HostIrContainer,
    HostIrEvaluator,
    TeamOf,
    Wait,
)
from hostir.runtime.agreement import RankAgreement
from multidevice import Communicator, DeviceMesh
from multidevice.job.simulation import simulate
from multidevice.transports.base.protocol import RedOp

X = ParallelType.mesh_x
MESH = DeviceMesh((0, 1))
TEAM = TeamOf(MESH, (X,))


def sharded(program: HostIrContainer, *, rows: int = 2, is_input: bool = False) -> TensorView:
    made = program.input if is_input else program.tensor
    tv = made([rows, 4], mesh=MESH)
    tv.axis(0).parallelize(X)
    return tv


def gathered(factor: float = 1.0, *, backend: str = "NCCL") -> HostIrContainer:
    """Returns a program that gathers `factor * x`."""
    program = HostIrContainer()
    with program:
        x, t = sharded(program, is_input=True), sharded(program)
        y = program.tensor([2, 4], mesh=MESH)
        program.append(Allocate(t))
        program.append(ops.mul(x, factor), into=t)
        program.append(Allocate(y))
        program.append(
            Communication(t, y, number=0, type="Allgather", team=TEAM, backend=backend), Wait(0)
        )
        program.append(Deallocate(t))
        program.add_output(y)
    return program


def reduced(red_op: RedOp) -> HostIrContainer:
    program = HostIrContainer()
    with program:
        x, y = sharded(program, is_input=True), sharded(program)
        program.append(Allocate(y))
        program.append(
            Communication(x, y, number=0, type="Allreduce", team=TEAM, red_op=red_op), Wait(0)
        )
        program.add_output(y)
    return program


def _run(evaluator: HostIrEvaluator, inputs: Sequence[Any]) -> list[torch.Tensor]:
    return evaluator.run(inputs)


def _evaluate(evaluator: HostIrEvaluator, inputs: Sequence[Any]) -> list[torch.Tensor]:
    return evaluator.evaluate(inputs)


def _with_buffer(evaluator: HostIrEvaluator, inputs: Sequence[Any]) -> list[torch.Tensor]:
    program = evaluator.program
    values = dict(zip(program.inputs, inputs, strict=True))
    rows = 1 if any(a.is_device for a in program.outputs[0].domain.loop) else 2
    return evaluator.run_with_input({**values, program.outputs[0]: torch.empty(rows, 4)})


WAYS = {"run": _run, "evaluate": _evaluate, "run_with_input": _with_buffer}


def refused_once(way: Callable[..., list[torch.Tensor]], backend: str) -> list[str]:
    """Runs six times, with an input that rank 1 refuses in the third run; returns the errors."""
    communicator = Communicator.instance()
    evaluator, errors = HostIrEvaluator(gathered(backend=backend)), list[str]()
    for i in range(6):
        mine = torch.full((1, 4), 10.0 * i + communicator.rank())
        given = torch.zeros(3) if i == 2 and communicator.rank() == 1 else mine
        try:
            (out,) = way(evaluator, [given])
        except FuserError as error:
            errors.append(f"{i} {type(error).__name__}: {error}")
            continue
        assert out.tolist() == [[10.0 * i] * 4, [10.0 * i + 1] * 4]
    return errors


@pytest.mark.parametrize("backend", ["NCCL", "CUDA"])
@pytest.mark.parametrize("way", WAYS)
def test_an_input_that_one_rank_refuses_ends_the_run_of_all_and_no_other(
    way: str, backend: str
) -> None:
    with simulate(2) as world:
        one, other = world.run(refused_once, WAYS[way], backend)
    assert len(one) == len(other) == 1
    assert one[0].startswith("2 PeerError: rank 1 failed: InputError: Expected input 0")
    assert other[0].startswith("2 InputError: Expected input 0")


def test_a_buffer_that_one_rank_refuses_is_an_error_of_all() -> None:
    def here() -> str:
        evaluator, rank = HostIrEvaluator(gathered()), Communicator.instance().rank()
        (x,), (y,) = evaluator.program.inputs, evaluator.program.outputs
        mine = torch.full((1, 4), float(rank))
        with pytest.raises(InputError if rank else PeerError) as error:
            evaluator.run_with_input({x: mine, y: torch.empty(2, 4 + rank)})
        (out,) = evaluator.run_with_input({x: mine, y: torch.empty(2, 4)})
        assert out.tolist() == [[0.0] * 4, [1.0] * 4]
        return str(error.value)

    with simulate(2) as world:
        one, _ = world.run(here)
    assert "rank 1 failed: InputError: Expected a tensor of shape (2, 4)" in one


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("programs", "shown"),
    [
        (
            (lambda: reduced("SUM"), lambda: reduced("MAX")),
            ("(type=Allreduce, team=(0 1), input", "red_op=MAX"),
        ),
        ((lambda: gathered(2.0), lambda: gathered(3.0)), ("double(2)", "double(3)")),
        ((gathered, lambda: gathered(backend="CUDA")), ("backend=NCCL", "backend=CUDA")),
    ],
)
def test_ranks_with_different_programs_are_told_what_differs(
    programs: tuple[Callable[[], HostIrContainer], ...], shown: tuple[str, str], way: str
) -> None:
    def here() -> str:
        rank = Communicator.instance().rank()
        evaluator = HostIrEvaluator(programs[rank]())
        with pytest.raises(ProgramMismatchError) as error:
            WAYS[way](evaluator, [torch.ones(1, 4)])
        return str(error.value)

    with simulate(2) as world:
        one, other = world.run(here)
    assert one == other
    assert all(text in one for text in shown), one


def test_a_rank_that_traces_does_not_meet_one_that_runs() -> None:
    def here() -> None:
        evaluator = HostIrEvaluator(gathered())
        with pytest.raises(ProgramMismatchError, match="traced: warm_up=3"):
            if Communicator.instance().rank():
                evaluator.trace([torch.ones(1, 4)])
            else:
                evaluator.run([torch.ones(1, 4)])

    with simulate(2) as world:
        world.run(here)


def test_a_program_without_a_mesh_is_its_rank_s_own_matter() -> None:
    program = HostIrContainer()
    with program:
        x = program.input([-1])
        y = ops.add(x, 1.0)
        program.append(y)
        program.add_output(y)

    def here() -> None:
        if Communicator.instance().rank():
            (out,) = HostIrEvaluator(program).run([torch.ones(3)])
            assert out.tolist() == [2.0] * 3

    with simulate(2) as world:
        world.run(here)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("backend", ["NCCL", "CUDA"])
def test_an_input_that_one_process_refuses_ends_the_run_of_all(
    comm: Communicator, backend: str
) -> None:
    if comm.rank() < 2:
        (error,) = refused_once(_run, backend)
        assert error.startswith(("2 PeerError: rank 1", "2 InputError")[comm.rank()])


@pytest.mark.mpi(min_size=2)
def test_processes_with_different_programs_all_raise(comm: Communicator) -> None:
    if comm.rank() < 2:
        evaluator = HostIrEvaluator(reduced(("SUM", "MAX")[comm.rank()]))
        with pytest.raises(ProgramMismatchError, match="red_op=MAX"):
            evaluator.run([torch.ones(1, 4)])


# ------------------------------------------------------------------ without an evaluator
def _first_element(given: list[Any]) -> float:
    return float(given[0][0, 0])


def _nothing_bound(given: list[Any]) -> dict[Any, Any]:
    return {}


def _agreement(how: str = "// how") -> RankAgreement:
    communicator = Communicator.instance()
    return RankAgreement(gathered(), communicator, free=frozenset(), how=how)


def test_a_rank_without_a_communicator_agrees_with_nobody() -> None:
    def refused(given: list[Any]) -> dict[Any, Any]:
        raise AssertionError("nobody has to hear of it")

    alone = RankAgreement(gathered(), None, free=frozenset(), how="")
    assert (alone.rank, alone.team, alone.channel()) == (0, (0, 1), None)
    assert alone.agreed([torch.full((1, 4), 3.0)], refused, _first_element) == 3.0
    alone.begin_run()


def test_ranks_with_equal_run_signatures_run_each_its_own_body() -> None:
    def here() -> list[float]:
        agreement = _agreement()
        assert agreement.channel() is agreement.channel() is not None
        values = [10.0 * i + agreement.rank for i in range(3)]
        return [
            agreement.agreed([torch.full((1, 4), v)], _nothing_bound, _first_element)
            for v in values
        ]

    with simulate(2) as world:
        assert world.run(here) == [[0.0, 10.0, 20.0], [1.0, 11.0, 21.0]]


@pytest.mark.parametrize("where", ["how", "also"])
def test_ranks_that_run_it_in_other_ways_all_raise_and_run_nothing(where: str) -> None:
    def here() -> str:
        rank, ran = Communicator.instance().rank(), list[float]()

        def body(given: list[Any]) -> None:
            ran.append(_first_element(given))

        agreement = _agreement(f"// streams: {4 + rank if where == 'how' else 4}")
        also = [f"// given: T{rank}"] if where == "also" else []
        with pytest.raises(ProgramMismatchError) as error:
            agreement.agreed([torch.zeros(1, 4)], _nothing_bound, body, *also)
        assert not ran
        return str(error.value)

    with simulate(2) as world:
        texts = world.run(here)
    different = ("// streams: 4", "// streams: 5") if where == "how" else ("T0", "T1")
    assert all(text in one for one in texts for text in different)


def test_what_the_check_of_one_rank_refuses_all_hear() -> None:
    def here() -> list[str]:
        agreement, told = _agreement(), list[str]()

        def check(given: list[Any]) -> dict[Any, Any]:
            if agreement.rank and _first_element(given) == 1.0:
                raise InputError("1 is too little")
            return {}

        for value in (0.0, 1.0, 2.0):
            try:
                told.append(
                    str(agreement.agreed([torch.full((1, 4), value)], check, _first_element))
                )
            except FuserError as error:
                told.append(type(error).__name__)
        return told

    with simulate(2) as world:
        assert world.run(here) == [["0.0", "PeerError", "2.0"], ["0.0", "InputError", "2.0"]]
