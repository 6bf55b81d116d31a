"""Tests SymmetricContiguousView: the shards of several ranks as one tensor, without a copy."""

# Host programs by hand take plain numbers where a Scalar is declared.
# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import multidevice
from fuser import ParallelType
from fuser.ir.fusion import TensorView
from fuser.ir.ops import nodes
from fuser.ir.types import MemoryType
from fuser.support.errors import CommunicationError, UnsupportedError, VerifyError
from hostir import (
    Allocate,
    Deallocate,
    GetCurrentStream,
    HostIrContainer,
    HostIrEvaluator,
    SetCurrentStream,
    Stream,
    SymmetricContiguousView,
    Synchronize,
    TeamOf,
    equal,
    parse,
    verify,
)
from hostir.analysis.collective_matching import find_mismatches
from hostir.analysis.races import find_races
from hostir.ir.ops import RANK, Communication, Wait
from multidevice.job.communicator import Communicator
from multidevice.transports.memory.handles import MemoryLocation
from multidevice.transports.memory.host_shared import SharedMemory
from tests.support import mpi_abort
from tests.support.jobs import needs_mpi, run_job
from tests.support.predicted_times import predicted
from tests.support.rank_programs.symmetric_views import double, program_of, run_here
from tests.support.stream_programs import MAIN

alone = pytest.mark.skipif(mpi_abort.world_size() > 1, reason="starts jobs of its own")


class Parts:
    """The parts of a program: x is doubled into shards t; all are viewed and doubled into y."""

    def __init__(self, ranks: int = 2) -> None:
        self.mesh = multidevice.DeviceMesh(range(ranks))
        self.program = HostIrContainer()
        with self.program:
            shape = [ranks, 4, 256]
            self.x = self.program.input(shape, mesh=self.mesh)
            self.t = self.program.tensor(shape, mesh=self.mesh, memory=MemoryType.symmetric)
            self.view, self.y = (self.program.tensor(shape, mesh=self.mesh) for _ in range(2))
            for spread in (self.x, self.t):
                spread.axis(0).parallelize(ParallelType.mesh_x)

    def made(self, *ops: object) -> HostIrContainer:
        with self.program:
            self.program.append(*ops)  # pyright: ignore[reportArgumentType]
            self.program.add_output(self.y)
        return self.program

    @property
    def head(self) -> tuple[object, ...]:
        return (Allocate(self.y), Allocate(self.t), double(self.t, self.x))

    @property
    def shows(self) -> SymmetricContiguousView:
        return SymmetricContiguousView(self.view, self.t)

    @property
    def tail(self) -> tuple[object, ...]:
        return (Deallocate(self.view), Deallocate(self.t))


# ------------------------------------------------------------------ values
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_shards_are_one_tensor_on_simulated_ranks(ranks: int) -> None:
    program = parse(program_of(ranks).full_text())
    assert equal(program, program_of(ranks))
    with multidevice.simulate(ranks) as world:
        world.run(run_here, program)


@alone
@needs_mpi
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_shards_are_one_tensor_under_mpirun(ranks: int, tmp_path: Path) -> None:
    text = tmp_path / "program.txt"
    text.write_text(program_of(ranks).full_text())
    job = run_job("mpirun", ranks, "symmetric_views.py", "right", str(text))
    assert job.code == 0 and job.text.count("ok rank") == ranks, job.text


@alone
def test_all_shards_are_one_tensor_under_torchrun() -> None:
    job = run_job("torchrun", 2, "symmetric_views.py", "right")
    assert job.code == 0 and job.text.count("ok rank") == 2, job.text


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_that_kernels_read_from_others_are_predicted(ranks: int) -> None:
    """Of a shard of 4 kB each reads those of all others, at 1e8 bytes per second; a byte of memory
    takes a tenth of that."""
    parts, shard = Parts(ranks), 4096
    program = parts.made(*parts.head, parts.shows, double(parts.y, parts.view), *parts.tail)
    found = predicted(program)
    (one,) = found.classes
    far, near = (ranks - 1) * shard, 2 * shard + 2 * ranks * shard
    assert one.sent_nbytes == one.received_nbytes == far
    assert found.links == tuple((a, b, shard) for a in range(ranks) for b in range(ranks) if a != b)
    assert one.seconds == pytest.approx(far / 1e8 + near / 1e9)


@pytest.mark.parametrize("late", ["all", "entry", 0])
def test_held_back_streams_see_all_shards(late: str | int) -> None:
    """The view is on another stream, which waits for the shards; the caller's waits for it."""
    parts = Parts()
    program = parts.made(
        *parts.head,
        GetCurrentStream(MAIN),
        SetCurrentStream(Stream(0)),
        Synchronize(MAIN),
        parts.shows,
        double(parts.y, parts.view),
        Deallocate(parts.view),
        SetCurrentStream(MAIN),
        Synchronize(Stream(0)),
        Deallocate(parts.t),
    )
    assert not find_races(program, {}) and not find_mismatches(program, {})
    whole = torch.randn(2, 4, 256)

    def body() -> torch.Tensor:
        evaluator = HostIrEvaluator(program, late_stream=late)
        return evaluator.run([multidevice.shard_tensor(whole, parts.x)])[0]

    with multidevice.simulate(2) as world:
        for out in world.run(body):
            assert torch.equal(out, 4 * whole)


def test_a_view_copies_nothing() -> None:
    """A later write of a member is visible in memory that was mapped before."""
    memory = SharedMemory()
    shards = [memory.empty(mmap.PAGESIZE).fill_(k) for k in (1, 2, 3)]
    names = [memory.name_of(shards[k]) for k in (2, 0, 1)]
    row = memory.row([MemoryLocation(0, *name) for name in names if name], mmap.PAGESIZE)
    assert row.view(3, -1)[:, 0].tolist() == [3, 1, 2]
    shards[0].fill_(7)
    assert row.view(3, -1)[:, -1].tolist() == [3, 7, 2]


# ------------------------------------------------------------------ refused on all ranks
def refused(program: HostIrContainer, of: type[Exception]) -> str:
    """Returns the errors of all simulated ranks."""

    def body() -> str:
        with pytest.raises(of) as error:
            run_here(program)
        return str(error.value)

    with multidevice.simulate(2) as world:
        one, other = world.run(body)
    assert one == other
    return one


def test_shards_that_are_no_pages_are_refused() -> None:
    text = refused(program_of(2, rows=3), UnsupportedError)
    assert "SymmetricContiguousView of T1_sym_float" in text and "symmetric_views.py" in text
    assert f"pages of {mmap.PAGESIZE} bytes, but the shard of rank 0 has 3072 bytes: pad" in text


def test_shards_of_unequal_sizes_are_refused() -> None:
    def body() -> str:
        rows = 4 + 4 * Communicator.instance().rank()
        with pytest.raises(CommunicationError) as error:
            run_here(program_of(2, rows))
        return str(error.value)

    with multidevice.simulate(2) as world:
        texts = set(world.run(body))
    (text,) = texts
    assert "must agree, but rank 0 has a shard of 4096 bytes; rank 1 has a shard of 8192" in text


@alone
@needs_mpi
def test_unequal_ranks_are_refused_under_mpirun() -> None:
    job = run_job("mpirun", 2, "symmetric_views.py", "uneven")
    assert job.code != 0 and "rank 1 has a shard of 8192 bytes" in job.text, job.text


@alone
@needs_mpi
@pytest.mark.parametrize(
    ("kind", "text"),
    [("leaves", "rank 1 left early"), ("stops", "rank 1 has not entered it (process")],
)
def test_a_rank_that_does_not_come_is_named(kind: str, text: str) -> None:
    job = run_job("mpirun", 2, "symmetric_views.py", kind)
    assert job.code != 0 and text in job.text, job.text
    assert "SymmetricContiguousView of T1_sym_float" in job.text


# ------------------------------------------------------------------ verification
def _never_given_up(p: Parts) -> HostIrContainer:
    return p.made(*p.head, p.shows, double(p.y, p.view))


def _written_meanwhile(p: Parts) -> HostIrContainer:
    return p.made(*p.head, p.shows, double(p.y, p.view), double(p.t, p.x), *p.tail)


def _written_itself(p: Parts) -> HostIrContainer:
    return p.made(*p.head, p.shows, double(p.view, p.view), double(p.y, p.view), *p.tail)


def _given_up_before(p: Parts) -> HostIrContainer:
    return p.made(*p.head, p.shows, double(p.y, p.view), Deallocate(p.t), Deallocate(p.view))


def _not_written(p: Parts) -> HostIrContainer:
    return p.made(Allocate(p.y), Allocate(p.t), p.shows, double(p.y, p.view), *p.tail)


def _used_after(p: Parts) -> HostIrContainer:
    return p.made(*p.head, p.shows, *p.tail[:1], double(p.y, p.view), *p.tail[1:])


def _made_outside(p: Parts) -> HostIrContainer:
    with p.program:
        p.program.append(*p.head, p.shows)  # pyright: ignore[reportArgumentType]
        with p.program.branch(RANK < 5):
            p.program.append(double(p.y, p.view), Deallocate(p.view))
    return p.made(Deallocate(p.t))


def _in_a_step(p: Parts) -> HostIrContainer:
    with p.program:
        p.program.append(*p.head)  # pyright: ignore[reportArgumentType]
        with p.program.loop(2):
            p.program.append(p.shows, double(p.y, p.view))
    return p.made(Deallocate(p.t))


def _received_meanwhile(p: Parts) -> HostIrContainer:
    team = TeamOf(p.mesh, (ParallelType.mesh_x,))
    reduce = Communication(p.t, p.t, number=0, type="Allreduce", team=team)
    return p.made(*p.head, reduce, p.shows, Wait(0), double(p.y, p.view), *p.tail)


_WRONG: dict[str, tuple[Callable[[Parts], HostIrContainer], str]] = {
    "never_given_up": (_never_given_up, "Deallocate { T2_g_float"),
    "written_meanwhile": (_written_meanwhile, "is written while T2_g_float"),
    "written_itself": (_written_itself, "is written while T2_g_float"),
    "given_up_before": (_given_up_before, "is deallocated while T2_g_float"),
    "not_written": (_not_written, "is read before it is written"),
    "used_after": (_used_after, "is used after its Deallocate"),
    "made_outside": (_made_outside, "must be deallocated in the loop or branch"),
    "in_a_step": (_in_a_step, "the region that makes the view must also deallocate"),
    "received_meanwhile": (_received_meanwhile, "is used before Wait(Communication 0)"),
}


@pytest.mark.parametrize("name", _WRONG)
def test_what_ranks_would_do_to_each_other_is_refused(name: str) -> None:
    build, text = _WRONG[name]
    with pytest.raises(VerifyError) as error:
        verify(build(Parts()))
    assert text in str(error.value)


def test_what_the_caller_gets_is_no_view() -> None:
    parts = Parts()
    with parts.program:
        parts.program.append(*parts.head, parts.shows)  # pyright: ignore[reportArgumentType]
        parts.program.add_output(parts.view)
    with pytest.raises(VerifyError, match="is missing"):
        verify(parts.program)
    with parts.program:
        parts.program.append(Deallocate(parts.view))
    with pytest.raises(VerifyError, match="belongs to the caller"):
        verify(parts.program)


def test_a_result_of_a_view_is_on_all_ranks() -> None:
    parts = Parts()
    parts.view.axis(0).parallelize(ParallelType.mesh_x)
    with pytest.raises(VerifyError, match="with an axis that devices split"):
        verify(parts.made(*parts.head, parts.shows, double(parts.y, parts.view), *parts.tail))


def _on_streams(p: Parts, *, before: bool = True, after: bool = True) -> HostIrContainer:
    """Returns a program that writes the shard on one stream and reads the view on another."""
    opens = [Synchronize(MAIN)] if before else []
    closes = [Synchronize(Stream(0))] if after else []
    return p.made(
        Allocate(p.y),
        Allocate(p.t),
        GetCurrentStream(MAIN),
        SetCurrentStream(Stream(0)),
        Synchronize(MAIN),
        SetCurrentStream(MAIN),
        double(p.t, p.x),
        SetCurrentStream(Stream(0)),
        *opens,
        p.shows,
        double(p.y, p.view),
        SetCurrentStream(MAIN),
        *closes,
        Deallocate(p.view),
        Synchronize(Stream(0)),
        Deallocate(p.t),
    )


def test_streams_order_the_shards_before_the_view_and_its_uses_before_its_end() -> None:
    assert find_races(_on_streams(Parts()), {}) == []
    early = find_races(_on_streams(Parts(), before=False), {})
    assert any("nothing orders two uses of T1_sym_float" in f.what for f in early)
    late = find_races(_on_streams(Parts(), after=False), {})
    assert any("nothing orders two uses of T1_sym_float" in f.what for f in late)


def test_a_rank_that_does_not_come_to_a_view_is_found() -> None:
    parts = Parts()
    with parts.program:
        parts.program.append(*parts.head)  # pyright: ignore[reportArgumentType]
        with parts.program.branch(RANK < 1):
            parts.program.append(parts.shows, double(parts.y, parts.view), *parts.tail[:1])
        with parts.program.otherwise():
            parts.program.append(double(parts.y, parts.y))
    program = parts.made(*parts.tail[1:])
    (found,) = find_mismatches(program, {})
    assert "rank 1 never enters a communication for which other ranks wait" in found.what


def test_shards_that_are_columns_do_not_lie_back_to_back_as_the_whole() -> None:
    """The check reports it as for a gather, although a hand-written program may intend it."""
    mesh, program = multidevice.DeviceMesh(range(2)), HostIrContainer()
    with program:
        x = program.input([4, 2048], mesh=mesh)
        t = program.tensor([4, 2048], mesh=mesh, memory=MemoryType.symmetric)
        view, y = (program.tensor([4, 2048], mesh=mesh) for _ in range(2))
        for spread in (x, t):
            spread.outer_split(1, 2)
            spread.axis(1).parallelize(ParallelType.mesh_x)
        program.append(Allocate(t), nodes.LoadStoreOp(t, x), SymmetricContiguousView(view, t))
        program.append(Allocate(y), double(y, view), Deallocate(view), Deallocate(t))
        program.add_output(y)
    (found,) = find_mismatches(program, {})
    assert found.kind == "parts do not fit"


def test_one_rank_sees_its_shard_as_it_is() -> None:
    """One rank has no other ranks to wait for."""
    parts = Parts(1)
    program = parts.made(*parts.head, parts.shows, double(parts.y, parts.view))
    x = torch.randn(1, 4, 256)
    assert isinstance(parts.x, TensorView)
    (out,) = HostIrEvaluator(program).run([x])
    assert torch.equal(out, 4 * x)
