"""Programs are shared by structure, and the cache is bounded: ranks and equal definitions lower
once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from fuser import FusionDefinition, ParallelType, multidevice
from fuser.frontend import executor_cache
from fuser.frontend.program_cache import PROGRAMS, ProgramCache
from fuser.kernels.executor import FusedKernelExecutor
from fuser.runtime.compiled_kernel import kernel_requests
from fuser.support.lru import Recent


@pytest.fixture(autouse=True)
def forgotten_programs() -> Iterator[None]:
    PROGRAMS.clear()
    yield
    PROGRAMS.clear()


def scaled(factor: float = 2.0) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.add(fd.ops.mul(x, factor), 1.0))
    return fd


def row_parallel(size: int) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 8], contiguity=True)
        w = fd.define_tensor([6, 8], contiguity=True)
        y = fd.ops.relu(fd.ops.linear(x, w))
        fd.add_output(y)
        for tv, axis in ((x, 1), (w, 1)):
            tv.set_device_mesh(multidevice.DeviceMesh(list(range(size))))
            tv.outer_split(axis, size)
            tv.axis(axis).parallelize(ParallelType.mesh_x)
    return fd


def test_simulated_ranks_and_repeated_calls_make_one_lowering() -> None:
    size = 4
    fd = row_parallel(size)
    x, w = torch.randn(3, 8, dtype=torch.float32), torch.randn(6, 8)
    before, requests = PROGRAMS.lowerings, kernel_requests()

    def rank(me: int) -> torch.Tensor:
        part = slice(me * 2, me * 2 + 2)
        return fd.execute([x[:, part].contiguous(), w[:, part].contiguous()])[0]

    expected = torch.relu(x.double() @ w.double().t()).float()
    for _ in range(3):
        with multidevice.simulate(size) as world:
            for out in world.run(lambda: rank(multidevice.Communicator.instance().rank())):
                torch.testing.assert_close(out, expected)
    assert PROGRAMS.lowerings - before == 1
    # Each kernel was requested once, not once per rank and run.
    kernels = fd.fec.statistics()["kernels"]
    assert kernels >= 1 and kernel_requests() - requests == kernels


def test_equal_definitions_share_a_program_and_others_do_not() -> None:
    x = torch.randn(4, 5)
    before = PROGRAMS.lowerings
    for _ in range(3):
        torch.testing.assert_close(scaled().execute([x])[0], x * 2 + 1)
    assert PROGRAMS.lowerings - before == 1
    torch.testing.assert_close(scaled(3.0).execute([x])[0], x * 3 + 1)
    assert PROGRAMS.lowerings - before == 2


def test_a_program_speaks_of_the_lines_of_its_own_definition() -> None:
    with FusionDefinition() as first:
        first.add_output(first.ops.neg(first.define_tensor([-1], contiguity=True)))
    with FusionDefinition() as second:
        second.add_output(second.ops.neg(second.define_tensor([-1], contiguity=True)))
    lines: list[str] = []
    for fd in (first, second):
        fd.execute([torch.ones(3)])
        lines += [op.where for op in fd._executor_cache()._last().program.segmented.fusion.exprs]
    mine, other = (int(line.rpartition(":")[2]) for line in lines)
    assert other - mine == 2, lines


def test_a_mesh_set_by_the_user_tells_definitions_apart() -> None:
    x, w = torch.randn(3, 8), torch.randn(6, 8)
    before = PROGRAMS.lowerings
    for _ in range(2):
        with multidevice.simulate(1) as world:
            fd = row_parallel(1)
            world.run(lambda fd=fd: fd.execute([x, w]))
    with FusionDefinition() as plain:
        a, b = (plain.define_tensor(s, contiguity=True) for s in ([-1, 8], [6, 8]))
        plain.add_output(plain.ops.relu(plain.ops.linear(a, b)))
    torch.testing.assert_close(plain.execute([x, w])[0], torch.relu(x @ w.t()))
    assert PROGRAMS.lowerings - before == 2


def test_many_shapes_leave_bounded_caches() -> None:
    fd = scaled()
    for n in range(1, 700):
        x = torch.full((n, 2), 0.5)
        for _ in range(2):  # the second run is bound
            torch.testing.assert_close(fd.execute([x])[0], x * 2 + 1)
    assert fd.fec._by_signature.size() <= executor_cache.MAX_SIGNATURES
    (bound,) = {id(c.bound): c.bound for c in fd.fec._by_signature.values()}.values()
    assert not bound.evaluator.plans(), "what is known is kept by signature alone"
    (arenas,) = bound.evaluator.arenas()
    mine = [plan for arena in arenas.arenas() for plan in arena.bound if plan.arenas is arenas]
    assert 1 < len(mine) <= executor_cache.MAX_SIGNATURES
    (group,) = bound.program.container.groups.values()
    kernel = bound.program.kernel(group)
    assert isinstance(kernel, FusedKernelExecutor) and kernel._records.size() <= 256


def test_programs_beyond_the_bound_are_freed() -> None:
    cache = ProgramCache(4)
    x = torch.randn(2, 3)
    seen = []
    for n in range(12):
        fd = scaled(float(n))
        fd.execute([x])
        (program,) = {
            id(c.bound.program): c.bound.program for c in fd.fec._by_signature.values()
        }.values()
        cache.find_or_build(n, lambda program=program: program)
        seen.append(weakref.ref(program))
        del fd, program
    PROGRAMS.clear()
    gc.collect()
    assert cache.size() <= 4
    assert sum(r() is not None for r in seen) <= 4
    assert seen[-1]() is not None


def test_recent_keeps_what_is_used() -> None:
    dropped: list[int] = []
    recent: Recent[int, int] = Recent(8, on_drop=dropped.append)
    for n in range(1, 100):
        recent[n] = n
        assert recent.recall(1) == 1  # used all the time
        assert recent.size() <= 8
    assert recent.recall(98) == 98 and recent.recall(50) is None
    kept = {*recent, *recent._old}
    assert not kept & set(dropped) and sorted(kept | set(dropped)) == list(range(1, 100))
