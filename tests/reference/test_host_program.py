"""Tests the interpreter: it equals torch, and raises an error for programs without a meaning."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from fuser import ops
from fuser.ir.fusion import TensorView
from fuser.ir.ops import nodes
from fuser.ir.types import ParallelType
from hostir import (
    Allocate,
    Communication,
    Deallocate,
    HostIrContainer,
    P2PCommunication,
    TeamOf,
    Wait,
)
from hostir.ir.ops import RANK
from hostir.tools.run_text import shards_of
from multidevice import DeviceMesh
from multidevice.job.shard_tensor import shard_for_rank
from tests.reference.host_program import MeaninglessError, interpret
from tests.support import handmade_programs, host_programs, stream_programs


@pytest.mark.parametrize("name", handmade_programs.EXAMPLES)
def test_programs_by_hand_mean_what_torch_computes(name: str) -> None:
    example = handmade_programs.EXAMPLES[name]
    program, given = example.build(), example.arguments(0)
    runs = interpret(
        program,
        [shards_of(program, given, rank) for rank in range(example.ranks)],
        number_of_streams=example.streams,
    )
    for rank, run in enumerate(runs):
        declared = [program.inputs[i] for i in example.updates] or program.outputs
        found = [run.inputs[i] for i in example.updates] or run.outputs
        for tv, got, want in zip(declared, found, example.expected(given), strict=True):
            assert isinstance(got, torch.Tensor)
            assert isinstance(tv, TensorView)
            want = want if tv.mesh is None else shard_for_rank(want, tv, rank)
            torch.testing.assert_close(got.double(), want, atol=example.atol, rtol=1e-4)


@pytest.mark.parametrize("name", stream_programs.PROGRAMS)
def test_programs_with_streams_mean_what_torch_computes(name: str) -> None:
    case = stream_programs.PROGRAMS[name]
    check_global(case.build(), case.inputs(), case.expected(), case.ranks)


@pytest.mark.parametrize("name", host_programs.CASES)
def test_compiled_programs_mean_what_torch_computes(name: str) -> None:
    case = host_programs.CASES[name]
    program = host_programs.build(case)
    check_global(program, case.inputs(), host_programs.expected(case), case.ranks)


def check_global(
    program: HostIrContainer,
    inputs: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    ranks: int,
) -> None:
    runs = interpret(
        program,
        [shards_of(program, inputs, r) for r in range(ranks)],
        number_of_streams=stream_programs.N_STREAMS,
    )
    for rank, run in enumerate(runs):
        for tv, got, want in zip(program.outputs, run.outputs, expected, strict=True):
            assert got is not None
            want = want if tv.mesh is None else shard_for_rank(want, tv, rank)
            torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------ no meaning
def used_after_deallocate(hic: HostIrContainer) -> None:
    x = hic.input([4])
    y, z = ops.add(x, 1.0), hic.tensor([4])
    hic.append(Allocate(y), y, Deallocate(y), Allocate(z), nodes.LoadStoreOp(z, y))
    hic.add_output(z)


def view_of_what_was_given_back(hic: HostIrContainer) -> None:
    x = hic.input([4, 4])
    y = ops.add(x, 1.0)
    hic.append(Allocate(y), y)
    row = hic.select(y, 0, 1)
    z = hic.tensor([4])
    hic.append(Deallocate(y), Allocate(z), nodes.LoadStoreOp(z, row))
    hic.add_output(z)


def _gathered(hic: HostIrContainer) -> tuple[TensorView, TensorView, TeamOf]:
    mesh = DeviceMesh([0, 1])
    x, y = hic.input([2, 4], mesh=mesh), hic.tensor([2, 4], mesh=mesh)
    x.axis(0).parallelize(ParallelType.mesh_x)
    hic.append(Allocate(y))
    hic.add_output(y)
    return x, y, TeamOf(mesh, (ParallelType.mesh_x,))


def never_waited_for(hic: HostIrContainer) -> None:
    x, y, team = _gathered(hic)
    hic.append(Communication(x, y, number=0, type="Allgather", team=team))


def waits_for_nothing(hic: HostIrContainer) -> None:
    x, y, team = _gathered(hic)
    hic.append(Communication(x, y, number=0, type="Allgather", team=team), Wait(0), Wait(0))


def one_member_alone(hic: HostIrContainer) -> None:
    x, y, team = _gathered(hic)
    with hic.branch(RANK < 1):
        hic.append(Communication(x, y, number=0, type="Allgather", team=team), Wait(0))


def other_roots(hic: HostIrContainer) -> None:
    x, _, team = _gathered(hic)
    hic.append(Communication(x, x, number=0, type="Broadcast", team=team, root=RANK), Wait(0))


def sent_to_nobody(hic: HostIrContainer) -> None:
    x, _, _ = _gathered(hic)
    hic.append(P2PCommunication(x, (RANK + 1) % 2, number=0, type="send"), Wait(0))


@pytest.mark.parametrize(
    ("define", "ranks", "said"),
    [
        (used_after_deallocate, 1, "no buffer"),
        (view_of_what_was_given_back, 1, "given back"),
        (never_waited_for, 2, "never waits"),
        (waits_for_nothing, 2, "has not started"),
        (one_member_alone, 2, "every rank waits"),
        (other_roots, 2, "different ops"),
        (sent_to_nobody, 2, "parts were posted"),
    ],
)
def test_programs_without_meaning_are_refused(
    define: Callable[[HostIrContainer], None], ranks: int, said: str
) -> None:
    hic = HostIrContainer()
    with hic:
        define(hic)
    (x,) = hic.inputs
    shape = (1, 4) if ranks > 1 else (4,) * len(x.shape())  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(MeaninglessError, match=said):
        interpret(hic, [[torch.ones(shape)]] * ranks)


def test_what_a_communication_writes_is_poison_until_its_wait() -> None:
    """A copy between the start of a communication and its Wait reads NaN."""
    hic = HostIrContainer()
    with hic:
        x, y, team = _gathered(hic)
        early = hic.tensor([2, 4], mesh=y.mesh)
        hic.append(Allocate(early))
        hic.append(Communication(x, y, number=0, type="Allgather", team=team))
        hic.append(nodes.LoadStoreOp(early, y), Wait(0))
        hic.add_output(early)
    runs = interpret(hic, [[torch.ones(1, 4)], [torch.ones(1, 4)]])
    for run in runs:
        whole, seen = run.outputs
        assert whole is not None and torch.equal(whole, torch.ones(2, 4))
        assert seen is not None and seen.isnan().all()
