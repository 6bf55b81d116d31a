"""Tests the memory that programs of one stream share: its limit, its count and its release."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from fuser import FusionDefinition
from fuser.multidevice import Communicator, DeviceMesh
from hostir.runtime import plan as arenas_of
from hostir.runtime.plan import Arena, Memory, Pool
from multidevice import simulate

pytestmark = pytest.mark.finding("G30")


@pytest.fixture(autouse=True)
def pools(monkeypatch: pytest.MonkeyPatch) -> dict[torch.device, Pool]:
    """Returns pools that only this test uses."""
    found: dict[torch.device, Pool] = {}
    monkeypatch.setattr(arenas_of, "_POOLS", found)
    return found


def program(scale: float = 1.0, steps: int = 1) -> FusionDefinition:
    """Defines relu(matmul(relu(a), a)) with a different text for each scale."""
    with FusionDefinition() as fd:
        a = y = fd.define_tensor([-1, -1], contiguity=True)
        for _ in range(steps):
            y = fd.ops.relu(fd.ops.matmul(fd.ops.relu(fd.ops.mul(y, scale)), a))
        fd.add_output(y)
    return fd


def expected(a: torch.Tensor, scale: float = 1.0, steps: int = 1) -> torch.Tensor:
    y = a.double()
    for _ in range(steps):
        y = ((y * scale).relu() @ a.double()).relu()
    return y


def check(found: torch.Tensor, a: torch.Tensor, scale: float = 1.0, steps: int = 1) -> None:
    want = expected(a, scale, steps)
    bound = 1e-5 * max(1.0, want.abs().max().item())
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=bound)


def test_definitions_share_one_buffer_however_many_there_are() -> None:
    a = torch.randn(300, 300)
    made = [program(1.0 + k) for k in range(4)]
    held: list[int] = []
    for k, fd in enumerate(made):
        check(fd.execute([a])[0], a, 1.0 + k)
        held.append(fd.memory().total)
    # relu(a) and the product.
    needed = made[0].memory().needed
    assert 2 * a.nbytes <= needed < 2 * a.nbytes + 1024
    assert held == held[:1] * 4 and needed <= held[0] <= needed * 5 // 4
    assert made[0].memory().shared == held[0]
    for k in (2, 0, 3, 1):
        for _ in range(12):
            check(made[k].execute([a])[0], a, 1.0 + k)
    assert made[0].memory().total == held[0]


def test_a_definition_that_has_not_run_keeps_nothing() -> None:
    assert program().memory() == Memory()
    assert str(Memory(needed=1 << 20)).startswith("needed 1.0 MiB, shared 0 bytes")


def test_a_larger_program_moves_the_buffer_and_nothing_keeps_the_smaller_one() -> None:
    small, large = torch.randn(40, 40), torch.randn(200, 200)
    first, second = program(), program(2.0, 3)
    # So often that the compiled runner has it, which knows the memory, too.
    for _ in range(40):
        check(first.execute([small])[0], small)
    (arena,) = first.fec._latest.bound.evaluator.arenas()[0].arenas()  # pyright: ignore[reportOptionalMemberAccess]
    assert arena._buffer is not None
    storage = arena._buffer.untyped_storage()
    for _ in range(2):
        check(second.execute([large])[0], large, 2.0, 3)
    gc.collect()
    assert _users(storage) == 1, "views of the old buffer are left"
    for _ in range(40):
        check(first.execute([small])[0], small)
        check(second.execute([large])[0], large, 2.0, 3)
    assert first.memory().shared == second.memory().total


def _users(storage: torch.UntypedStorage) -> int:
    """Returns the number of tensors and storages that use this memory."""
    return torch._C._storage_Use_Count(storage._cdata)  # pyright: ignore[reportAttributeAccessIssue]


def test_outputs_that_callers_hold_are_never_overwritten() -> None:
    a = torch.randn(64, 64)
    made = [program(1.0 + k, 1 + k) for k in range(3)]
    held = [(k, fd.execute([a])[0]) for _ in range(20) for k, fd in enumerate(made)]
    for k, found in held:
        check(found, a, 1.0 + k, 1 + k)


def test_threads_never_share_a_buffer_at_one_time() -> None:
    a = torch.randn(128, 128)
    made = [program(1.0 + k, 2) for k in range(4)]
    errors: list[BaseException] = []

    def work(k: int) -> None:
        try:
            for _ in range(40):
                check(made[k].execute([a])[0], a, 1.0 + k, 2)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    one = with_one(made[0])
    assert made[0].memory().total <= 4 * one


def with_one(fd: FusionDefinition) -> int:
    """Returns the bytes of the largest buffer to which a definition is bound."""
    found = [arena.nbytes for one in fd.fec._by_signature.values() for arena in _arenas(one)]
    return max(found)


def _arenas(call: Any) -> list[Arena]:
    return [a for arenas in call.bound.evaluator.arenas() for a in arenas.arenas()]


def test_a_buffer_goes_with_the_last_program_that_needs_it(
    pools: dict[torch.device, Pool],
) -> None:
    a = torch.randn(100, 100)
    first, second = program(), program(2.0)
    for fd in (first, second):
        for _ in range(12):
            fd.execute([a])
    (pool,) = pools.values()
    whole = pool.nbytes
    assert whole >= first.memory().needed > 0
    del first, fd
    gc.collect()
    assert pool.nbytes == whole, "the other one still needs it"
    (arena,) = pool.all_spare()
    assert len(arena.bound) == 1
    del second, arena
    gc.collect()
    assert pool.nbytes == 0 and not pool.all_spare()


def test_a_buffer_shrinks_when_its_largest_program_goes(
    monkeypatch: pytest.MonkeyPatch, pools: dict[torch.device, Pool]
) -> None:
    monkeypatch.setattr(arenas_of, "MIN_SHRINK_NBYTES", 1 << 12)
    small, large = torch.randn(16, 16), torch.randn(256, 256)
    first, second = program(), program(2.0)
    second.execute([large])
    second.execute([large])
    for _ in range(12):
        first.execute([small])
    (pool,) = pools.values()
    assert pool.nbytes >= 2 * large.nbytes
    del second
    gc.collect()
    assert pool.nbytes == 0
    for _ in range(12):
        check(first.execute([small])[0], small)
    assert first.memory().needed <= pool.nbytes < 4096


def test_after_an_error_no_program_runs_in_the_memory_of_the_failed_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a = torch.randn(32, 32)
    first, second = program(), program(2.0)
    for _ in range(12):
        first.execute([a])
        second.execute([a])
    (plan,) = [p for c in second.fec._by_signature.values() for p in c.known.plans.values()]
    (bound,) = plan.arenas.bound(plan)
    (arena,) = plan.arenas.arenas()

    def fail(slots: object) -> None:
        raise RuntimeError("a broken library")

    object.__setattr__(bound, "closures", (fail, *bound.closures[1:]))
    second.fec._steady = None
    with pytest.raises(Exception, match="a broken library"):
        second.execute([a])
    assert not arena.bound and arena not in plan.arenas.spare(0)
    for _ in range(12):
        check(first.execute([a])[0], a)
        check(second.execute([a])[0], a, 2.0)


def test_simulated_ranks_have_memory_of_their_own(pools: dict[torch.device, Pool]) -> None:
    a = torch.randn(24, 24)

    def run() -> tuple[int, set[int]]:
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, -1], contiguity=True)
            fd.add_output(fd.ops.relu(fd.ops.matmul(fd.ops.relu(x), x)))
            x.set_device_mesh(DeviceMesh(range(Communicator.instance().size())))
        for _ in range(4):
            check(fd.execute([a])[0], a)
        (call,) = fd.fec._by_signature.values()
        return fd.memory().total, {id(arena) for arena in _arenas(call)}

    with simulate(2) as world:
        (first, mine), (second, others) = world.run(run)
    assert first == second > 0 and not mine & others and not pools


def test_inputs_of_many_sizes_keep_one_buffer() -> None:
    fd = program()
    for n in (8, 40, 24, 64, 16, 64):
        a = torch.randn(n, n)
        for _ in range(2):
            check(fd.execute([a])[0], a)
    found = fd.memory()
    assert found.needed <= found.total == found.shared <= found.needed * 5 // 4


@pytest.mark.finding("G21")
def test_memory_is_printed_in_bytes_below_one_mib() -> None:
    shown = str(Memory(needed=4096, shared=3 << 19))
    assert shown == "needed 4096 bytes, shared 1.5 MiB, own 0 bytes, graphs 0 bytes, total 0 bytes"
