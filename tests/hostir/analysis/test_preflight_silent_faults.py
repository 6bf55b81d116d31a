"""Programs by hand, and calls, that were wrong without a word: each is right now, or refused."""

# Host programs by hand take plain numbers where a Scalar is declared.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import gc
import resource
import weakref

import pytest
import torch

from fuser import DataType, FusionDefinition, ops
from fuser.ir.ops import nodes
from fuser.ir.types import ParallelType
from fuser.support.errors import (
    DefinitionError,
    ExecutionError,
    InputError,
    ProgramMismatchError,
    VerifyError,
)
from hostir import (
    NUMBER_OF_STREAMS,
    RANK,
    Allocate,
    Communication,
    Deallocate,
    GetCurrentStream,
    HostIrContainer,
    HostIrEvaluator,
    P2PCommunication,
    SetCurrentStream,
    StartCoalescing,
    Stream,
    Synchronize,
    TeamOf,
    Wait,
    eq,
    verify,
)
from hostir.analysis.preflight import findings
from hostir.analysis.races import find_races
from multidevice import Communicator, DeviceMesh, simulate

CALLER = Stream(name="S0")
X = ParallelType.mesh_x


# ------------------------------------------------------------------ memory
@pytest.mark.parametrize("entered", ["flat", "branch", "loop"])
def test_buffers_of_two_streams_share_no_bytes(entered: str) -> None:
    """They work at once: the caller's stream waits for the other one when all are made."""
    hic, other = HostIrContainer(), Stream(0)
    with hic:
        x, s = hic.input([64]), hic.scalar()
        out = hic.tensor([64])
        a, b = ops.neg(x), ops.abs(x)
        c, d = ops.neg(a), ops.add(b, b)
        hic.append(Allocate(out), GetCurrentStream(CALLER))

        def on_the_other() -> None:
            hic.append(Allocate(a), Allocate(c), a, c, Deallocate(a), Deallocate(c))
            hic.append(SetCurrentStream(CALLER))

        if entered == "branch":
            with hic.branch(eq(s, 1)):
                hic.append(SetCurrentStream(other), Synchronize(CALLER))
                on_the_other()
        elif entered == "loop":
            with hic.loop(1) as i:
                hic.append(SetCurrentStream(Stream(i)), Synchronize(CALLER))
            on_the_other()
        else:
            hic.append(SetCurrentStream(other), Synchronize(CALLER))
            on_the_other()
        hic.append(Allocate(b), b, Allocate(d), d, Deallocate(b), Synchronize(other))
        hic.append(nodes.LoadStoreOp(out, d), Deallocate(d))
        hic.add_output(out)
    evaluator, t = HostIrEvaluator(hic), torch.linspace(-1, 1, 64)
    for _ in range(3):
        (got,) = evaluator.run([t, 1])
        assert torch.equal(got, 2 * t.abs())
    (plan,) = evaluator.plans()
    assert len({b.offset for b in plan.blocks}) == 4, "a and c on one stream, b and d on the other"


def test_a_failed_replay_lets_go_of_its_memory() -> None:
    hic = HostIrContainer()
    with hic:
        x = hic.input([-1])
        b = ops.neg(x)
        y = ops.abs(b)
        hic.append(Allocate(b), b, Allocate(y), y, Deallocate(b))
        hic.add_output(y)
    evaluator, t = HostIrEvaluator(hic), torch.ones(1024)
    evaluator.run([t])
    evaluator.run([t])
    (plan,) = evaluator.plans()
    taken = plan.arenas.take(0, plan)
    arena = weakref.ref(taken)
    plan.arenas.give(taken)
    bound = taken.bound[plan]
    del taken

    def fail(slots: object) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    object.__setattr__(bound, "closures", (fail, *bound.closures))
    object.__setattr__(bound, "ops", (plan.steps[0][1], *bound.ops))
    del bound
    with pytest.raises(ExecutionError, match="no memory is left"):
        evaluator.run([t])
    gc.collect()
    assert arena() is None


# ------------------------------------------------------------------ results and inputs
def test_a_given_buffer_is_used_where_the_program_allocates() -> None:
    hic = HostIrContainer()
    with hic:
        x = hic.input([4])
        y, z = ops.neg(x), hic.tensor([4])
        hic.append(Allocate(y), y, Allocate(z, zero_init=True))
        hic.add_output(y)
        hic.add_output(z)
    mine, zeroed = torch.full((4,), 7.0), torch.full((4,), 7.0)
    for late in (None, "all"):
        evaluator = HostIrEvaluator(hic, late_stream=late)
        got = evaluator.run_with_input({x: torch.ones(4), y: mine, z: zeroed})
        assert [t.data_ptr() for t in got] == [mine.data_ptr(), zeroed.data_ptr()]
        assert mine.tolist() == [-1] * 4
        assert zeroed.tolist() == [0] * 4


@pytest.mark.parametrize("late", [None, "all"])
def test_a_given_buffer_that_begins_as_zeros_is_added_to(late: str | None) -> None:
    hic = HostIrContainer()
    with hic:
        x, n = hic.input([-1, 4]), hic.scalar(DataType.Int)
        y = hic.tensor([x.size(0), 4])
        hic.append(Allocate(y, zero_init=True))
        with hic.loop(n):
            hic.append(ops.add(y, x), into=y)
        hic.add_output(y)
    given, buffer = torch.randn(2, 4), torch.full((2, 4), 7.0)
    evaluator = HostIrEvaluator(hic, late_stream=late)
    (got,) = evaluator.run_with_input({x: given, n: 3, y: buffer})
    assert got is buffer
    torch.testing.assert_close(got.double(), 3 * given.double(), rtol=1e-6, atol=1e-6)
    with pytest.raises(InputError, match=r"of shape \(2, 4\), .* but got \(3, 4\)"):
        evaluator.run_with_input({x: given, n: 3, y: torch.zeros(3, 4)})


def test_a_part_that_is_to_begin_as_zeros_does_in_each_run() -> None:
    hic = HostIrContainer()
    with hic:
        x = hic.input([-1, 4])
        y = hic.tensor([x.size(0), 4])
        hic.append(Allocate(y))
        hic.append(ops.mul(x, 5.0), into=y)
        with hic.loop(x.size(0)) as i:
            row = hic.select(y, 0, i)
            hic.append(Allocate(row, zero_init=True))
            hic.append(ops.add(row, hic.select(x, 0, i)), into=row)
        hic.add_output(y)
    evaluator = HostIrEvaluator(hic)
    for _ in range(4):  # the table of handlers, then plans
        given = torch.randn(3, 4)
        assert torch.equal(evaluator.evaluate([given])[0], given)
        assert torch.equal(evaluator.run([given])[0], given)


def test_a_buffer_for_a_part_of_another_is_refused() -> None:
    hic = HostIrContainer()
    with hic:
        x = hic.input([2, 4])
        r = ops.neg(x)
        hic.append(Allocate(r), r)
        part = hic.select(r, 0, 0)
        z = ops.abs(part)
        hic.append(z)
        hic.add_output(z)
    with pytest.raises(InputError, match=r"T2.* is a part of T1.*: pass a buffer for T1.* instead"):
        HostIrEvaluator(hic).run_with_input({x: torch.ones(2, 4), part: torch.zeros(4)})


def test_an_update_that_nothing_writes_is_found() -> None:
    hic = HostIrContainer()
    with hic:
        x = hic.input([4])
        y = ops.neg(x)
        hic.add_output(y, x)
        hic.append(y)
    with pytest.raises(VerifyError, match=r"No op writes input 0 .*T0.* updates in place: T1"):
        verify(hic)


def test_nothing_is_added_to_a_program_that_an_evaluator_has() -> None:
    hic = HostIrContainer()
    with hic:
        x = hic.input([4])
        y, z = ops.neg(x), ops.abs(x)
        hic.append(y, z)
        hic.add_output(y)
        HostIrEvaluator(hic)
        for add in (lambda: hic.append(Deallocate(z)), lambda: hic.add_output(z), hic.scalar):
            with pytest.raises(DefinitionError, match="because an evaluator uses it"):
                add()


# ------------------------------------------------------------------ what is checked
def test_a_program_is_checked_for_each_number_of_streams() -> None:
    """One slot for all steps: on one stream, they wait for each other."""
    hic = HostIrContainer()
    with hic:
        x, y, slot = hic.input([8, 4]), hic.tensor([8, 4]), hic.tensor([1, 4])
        hic.append(Allocate(y), Allocate(slot), GetCurrentStream(CALLER))
        with hic.loop(NUMBER_OF_STREAMS) as i:
            hic.append(SetCurrentStream(Stream(i)), Synchronize(CALLER))
        with hic.loop(8) as i:
            hic.append(SetCurrentStream(Stream(i % NUMBER_OF_STREAMS)))
            a = ops.neg(hic.select(x, 0, i))
            hic.select(slot, 0, 0, a)
            b = ops.neg(hic.select(slot, 0, 0))
            hic.select(y, 0, i, b)
            hic.append(a, b)
        hic.append(SetCurrentStream(CALLER))
        with hic.loop(NUMBER_OF_STREAMS) as i:
            hic.append(Synchronize(Stream(i)))
        hic.add_output(y)
    t = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    (got,) = HostIrEvaluator(hic, number_of_streams=1).run([t])
    assert torch.equal(got, t)
    with pytest.raises(VerifyError, match="is overwritten while an earlier"):
        HostIrEvaluator(hic, number_of_streams=4).run([t])


@pytest.mark.parametrize("has_loop", [False, True])
def test_a_part_in_flight_is_not_overwritten(has_loop: bool) -> None:
    mesh, hic = DeviceMesh([0, 1]), HostIrContainer()
    with hic:
        x, whole = hic.input([4], mesh=mesh), hic.tensor([2, 4], mesh=mesh)
        hic.append(Allocate(whole, zero_init=True))
        part, again = hic.select(whole, 0, 0), ops.set(x)
        team = TeamOf(mesh, (X,))
        hic.append(Communication(x, part, number=0, type="Allreduce", team=team))
        hic.select(whole, 0, 0, again)
        hic.append(again, Wait(0))
        y = ops.neg(whole)
        if has_loop:
            with hic.loop(1):
                pass
        hic.append(y)
        hic.add_output(y)
    assert [f.kind for f in findings(hic, {NUMBER_OF_STREAMS: 4})] == ["race"]


def test_a_race_on_one_rank_of_many_is_found() -> None:
    hic = HostIrContainer()
    with hic:
        x = hic.input([4], mesh=DeviceMesh(range(64)))
        y = hic.tensor([4], mesh=DeviceMesh(range(64)))
        hic.append(Allocate(y), GetCurrentStream(CALLER))
        with hic.branch(eq(RANK, 33)):
            hic.append(SetCurrentStream(Stream(0)), nodes.LoadStoreOp(y, x))
            hic.append(SetCurrentStream(CALLER))
        with hic.otherwise():
            hic.append(nodes.LoadStoreOp(y, x))
        hic.add_output(y)
    found = findings(hic, {NUMBER_OF_STREAMS: 4})
    assert found
    assert all(f.what.startswith("on rank 33: ") for f in found)


def test_a_group_of_transfers_ends_in_its_branch() -> None:
    hic = HostIrContainer()
    with hic:
        x = hic.input([4], mesh=DeviceMesh([0, 1]))
        with hic.branch(eq(RANK, 0)):
            hic.append(StartCoalescing(), P2PCommunication(x, 1, number=0, type="send"))
        with hic.otherwise():
            hic.append(StartCoalescing(), P2PCommunication(x, 0, number=1, type="recv"))
        y = ops.neg(x)
        hic.append(y)
        hic.add_output(y)
    with pytest.raises(VerifyError, match="must begin and end in the same branch"):
        verify(hic)


def test_verify_is_linear_in_communications() -> None:
    def program(count: int) -> HostIrContainer:
        mesh, hic = DeviceMesh([0, 1]), HostIrContainer()
        with hic:
            x = hic.input([4], mesh=mesh)
            for number in range(count):
                y = hic.tensor([4], mesh=mesh)
                team = TeamOf(mesh, (X,))
                hic.append(Allocate(y))
                hic.append(Communication(x, y, number=number, type="Allreduce", team=team))
                hic.append(Wait(number))
                if number < count - 1:
                    hic.append(Deallocate(y))
                else:
                    hic.add_output(y)
        return hic

    def user_s(hic: HostIrContainer) -> float:
        start = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        verify(hic)
        return resource.getrusage(resource.RUSAGE_SELF).ru_utime - start

    small, large = program(100), program(800)
    verify(small)
    assert user_s(large) < 30 * max(user_s(small), 0.005)


# ------------------------------------------------------------------ ranks
@pytest.mark.parametrize("swizzled", [False, True])
def test_shards_of_other_memory_orders_are_refused_in_steps_too(swizzled: bool) -> None:
    def body() -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, -1], contiguity=False)
            y = fd.ops.set(x)
            z = fd.ops.neg(y)
            fd.add_output(z)
        for tv in (x, y, z):
            tv.set_device_mesh(DeviceMesh([0, 1]))
        x.outer_split(0, 2)
        x.axis(0).parallelize(X)
        y.outer_split(0, 2)
        if swizzled:
            y.swizzle1d(0, X)
        y.axis(0).parallelize(ParallelType.stream)
        rank = Communicator.instance().rank()
        mine = torch.arange(24.0).view(6, 4)[3 * rank : 3 * rank + 3]
        if rank == 1:
            mine = mine.t().contiguous().t()
        with pytest.raises(ProgramMismatchError, match="the programs of the ranks differ"):
            fd.execute([mine])

    with simulate(2) as world:
        world.run(body)


def test_a_whole_axis_in_rotated_steps() -> None:
    whole = torch.arange(24.0).view(2, 3, 4)

    def body() -> None:
        with FusionDefinition() as fd:
            x = fd.define_tensor([2, -1, -1], contiguity=True)
            y = fd.ops.set(x)
            z = fd.ops.neg(y)
            fd.add_output(z)
        for tv in (x, y, z):
            tv.set_device_mesh(DeviceMesh([0, 1]))
        x.axis(0).parallelize(X)
        y.swizzle1d(0, X)
        y.axis(0).parallelize(ParallelType.stream)
        rank = Communicator.instance().rank()
        (got,) = fd.execute([whole[rank : rank + 1]])
        assert torch.equal(got, -whole)

    with simulate(2) as world:
        world.run(body)


def test_races_of_given_buffers_are_those_of_allocated_ones() -> None:
    hic = HostIrContainer()
    with hic:
        x = hic.input([4])
        y = ops.neg(x)
        hic.append(GetCurrentStream(CALLER), Allocate(y), SetCurrentStream(Stream(0)))
        hic.append(Synchronize(CALLER), y, SetCurrentStream(CALLER))
        hic.add_output(y)
    for given in ((), (y,)):
        found = find_races(hic, {RANK: 0, NUMBER_OF_STREAMS: 4}, rank=0, given=given)
        assert {f.kind for f in found} == {"returned too early"}
