"""Tests errors, threads and memory of calls that the compiled runner repeats."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, OutOfMemoryError
from fuser.frontend.program_cache import MAX_DECLINED, MAX_PATIENCE, RUNS_BEFORE
from fuser.multidevice import simulate
from fuser.ops.reference import matmul_calls
from fuser.runtime import compiled_runner
from fuser.support.errors import FuserError, KernelError
from hostir.runtime import steps
from tests.support.limits import HANG_S
from tests.support.repeated_calls import (
    ENOUGH,
    add,
    layers,
    program,
    runs,
    same,
    steady,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _runner() -> None:
    assert compiled_runner.wait(HANG_S) is not None, compiled_runner.why_not()


def _bound(fd: FusionDefinition) -> Any:
    call = fd.fec._latest
    assert call is not None and call.steady is not None
    (plan,) = call.known.plans.values()
    (bound,) = plan.arenas.bound(plan)
    return plan, bound


def _multiply_by(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes programs that are bound from now on multiply two plain matrices by this function."""
    way = matmul_calls.Product(function, ((0, None), (1, None)))
    monkeypatch.setattr(matmul_calls, "_AS_THEY_ARE", way)


class _Room:
    """Memory for outputs, which can be made full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full, self._make = False, steps.empty_on(CPU)
        monkeypatch.setattr(steps, "empty_on", lambda device: self._empty)

    def _empty(self, *about: Any) -> torch.Tensor:
        if self.is_full:
            raise RuntimeError("no room")
        return self._make(*about)


def test_no_memory_for_an_output_is_told_as_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    room = _Room(monkeypatch)
    fd, inputs = add(), [torch.randn(6, 8), torch.randn(6, 8)]
    steady(fd, inputs)
    room.is_full = True
    with pytest.raises(OutOfMemoryError, match="no memory"):
        fd.execute(inputs)
    room.is_full = False
    for _ in range(4 * MAX_DECLINED):
        assert torch.equal(fd.execute(inputs)[0], inputs[0] + inputs[1])
    steady(fd, inputs)


def test_a_closure_that_raises_is_told_as_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the same as in Python, and the arena of the call is not used again."""
    fd = program(2, lambda ops, x, w: [ops.relu(ops.matmul(x, w))])
    is_broken, product = False, torch.mm

    def multiply(*args: Any, **more: Any) -> Any:
        if is_broken:
            raise RuntimeError("a broken library")
        return product(*args, **more)

    _multiply_by(multiply, monkeypatch)
    inputs = [torch.randn(4, 4), torch.randn(4, 4)]
    steady(fd, inputs)
    plan, _ = _bound(fd)
    texts: list[str] = []
    for disable in ((), ("compiled_runner",)):
        is_broken = True
        with pytest.raises(FuserError, match="a broken library") as raised:
            fd.execute(inputs, _disable_options=disable) if disable else fd.execute(inputs)
        texts.append(str(raised.value))
        is_broken = False
        assert disable or not plan.arenas.bound(plan)
        torch.testing.assert_close(fd.execute(inputs)[0], product(*inputs).relu())
    assert texts[0] == texts[1]


def test_after_an_error_it_comes_back_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner is used again soon after an error, even if its first use took many calls."""
    room = _Room(monkeypatch)
    fd, inputs = add(), [torch.randn(6, 8), torch.randn(6, 8)]
    steady(fd, inputs)
    call = fd.fec._latest
    assert call is not None
    for _ in range(2):
        for _ in range(MAX_DECLINED):
            fd.execute(inputs)
        assert runs(fd) > MAX_DECLINED
        call.patience, room.is_full = MAX_PATIENCE, True
        with pytest.raises(OutOfMemoryError, match="no memory"):
            fd.execute(inputs)
        room.is_full = False
        for _ in range(2 * RUNS_BEFORE):
            assert torch.equal(fd.execute(inputs)[0], inputs[0] + inputs[1])
        assert 0 < runs(fd) <= 2 * RUNS_BEFORE, fd.compiled_runner()


@pytest.mark.parametrize("recovers", [True, False])
def test_a_launch_that_fails(recovers: bool) -> None:
    """The error has the same text as in Python, or a second attempt succeeds. Later steps
    run once."""
    import ctypes

    fd = program(1, lambda ops, x: [ops.relu(ops.segment_set(ops.tanh(x)))])
    inputs = [torch.randn(5, 9)]
    for _ in range(4):
        fd.execute(inputs)
    plan, bound = _bound_plan(fd)
    kernels = list(bound.launches.items())
    closure, kernel = kernels[1]
    told: list[int] = []
    is_broken = False
    run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)

    def function(record: int) -> int:
        return 7 if is_broken else kernel.call.function(record)

    def fail(status: int) -> None:
        told.append(status)
        if not recovers:
            raise KernelError("a broken launch")
        kernel.call.function(*kernel.call.arguments)

    entry = run(function)
    raw = ctypes.cast(entry, ctypes.c_void_p).value, *kernel.call.raw[1:]
    bound.launches[closure] = kernel._replace(call=kernel.call._replace(raw=raw), fail=fail)
    steady(fd, inputs)
    is_broken = True
    if recovers:
        torch.testing.assert_close(fd.execute(inputs)[0], inputs[0].tanh().relu())
    else:
        with pytest.raises(KernelError, match="a broken launch"):
            fd.execute(inputs)
        assert not plan.arenas.bound(plan)
    assert told == [7]
    is_broken = False
    torch.testing.assert_close(fd.execute(inputs)[0], inputs[0].tanh().relu())


def _bound_plan(fd: FusionDefinition) -> Any:
    (call,) = fd.fec._by_signature.values()
    (plan,) = call.known.plans.values()
    (bound,) = plan.arenas.bound(plan)
    return plan, bound


def test_inside_of_a_run_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closure that calls the program again gets another arena."""
    fd = program(2, lambda ops, x, w: [ops.relu(ops.matmul(ops.tanh(x), w))])
    inputs, deep = [torch.randn(4, 4), torch.randn(4, 4)], 0
    seen: list[int] = []
    product = torch.mm

    def multiply(*args: Any, **more: Any) -> Any:
        nonlocal deep
        deep += 1
        if deep == 1:
            seen.append(runs(fd))
            other = [-inputs[0], inputs[1]]
            (got,) = fd.execute(other)
            torch.testing.assert_close(got, product(other[0].tanh(), other[1]).relu())
        deep -= 1
        return product(*args, **more)

    _multiply_by(multiply, monkeypatch)
    steady(fd, inputs)
    for _ in range(5):
        torch.testing.assert_close(
            fd.execute(inputs)[0], product(inputs[0].tanh(), inputs[1]).relu()
        )
    assert len(seen) > 5


def test_threads_share_a_definition() -> None:
    fd = program(2, layers)
    inputs = [torch.randn(48, 48), torch.randn(48, 48)]
    wanted = [out.clone() for out in fd.execute(inputs)]
    wrong: list[str] = []

    def work() -> None:
        try:
            for _ in range(300):
                if not same(fd.execute(inputs), wanted):
                    wrong.append("another result")
        except BaseException as error:
            wrong.append(repr(error))

    steady(fd, inputs)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_simulated_ranks_share_a_definition() -> None:
    fd, inputs = add(), [torch.randn(6, 8), torch.randn(6, 8)]
    steady(fd, inputs)

    def work() -> None:
        for _ in range(2 * ENOUGH):
            assert torch.equal(fd.execute(inputs)[0], inputs[0] + inputs[1])

    outside = fd.fec._steady
    assert outside is not None
    before = outside.runs
    with simulate(2) as world:
        world.run(work)
    # Other ranks do not use the calls bound to this process's own rank.
    assert outside.runs == before
    steady(fd, inputs)


def test_inputs_are_read_anew_and_may_go() -> None:
    fd = add()
    steady(fd, [torch.randn(6, 8), torch.randn(6, 8)])
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for k in range(50):
        inputs = [torch.randn(6, 8), torch.randn(6, 8)]
        (got,) = fd.execute(inputs)
        held.append((got, inputs[0] + inputs[1]))
        inputs[0].fill_(k)
        assert torch.equal(fd.execute(inputs)[0], inputs[0] + inputs[1])
        del inputs
    assert all(torch.equal(got, want) for got, want in held)


def test_nothing_stays_of_a_call() -> None:
    fd, inputs = program(2, layers), [torch.randn(8, 8), torch.randn(8, 8)]
    wrong = [torch.randn(4, 8), torch.randn(8, 8)]
    steady(fd, inputs)
    steady(fd, inputs)

    def run(calls: int) -> None:
        for k in range(calls):
            fd.execute(inputs)
            if k % 64 == 0:
                fd.execute(wrong)

    def counts() -> list[int]:
        gc.collect()
        steady = fd.fec._steady
        kept = [*inputs, None, fd.fec, torch.float32, inputs, steady]
        return [sys.getrefcount(x) for x in kept]

    run(2000)
    steady(fd, inputs)
    before, nbytes = counts(), _resident()
    run(100_000)
    steady(fd, inputs)
    after = counts()
    gained = [b - a for a, b in zip(before, after, strict=True)]
    # The count of None is allowed to change, because all code uses it.
    assert abs(gained.pop(2)) < 500 and max(map(abs, gained)) < 3, gained
    assert _resident() - nbytes < 8 << 20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_no_input_is_kept() -> None:
    """Neither the inputs it was built with, nor those of repeated calls, are kept alive."""
    fd, gone = _weighted(), list[weakref.ref[torch.Tensor]]()
    for _ in range(3 * ENOUGH):
        inputs: list[Any] = [torch.randn(6, 8), 0.5]
        outputs = fd.execute(inputs)
        gone += [weakref.ref(x) for x in (inputs[0], *outputs)]
        del inputs, outputs
    assert runs(fd) > 0
    # The walk of the first call is garbage with reference cycles.
    gc.collect()
    assert not [x for x in gone if x() is not None]


def _weighted() -> FusionDefinition:
    with FusionDefinition() as fd:
        x, s = fd.define_tensor([-1, -1], contiguity=True), fd.define_scalar(None, DataType.Double)
        fd.add_output(fd.ops.mul(x, s))
    return fd


def test_it_goes_with_its_definition() -> None:
    fd, inputs = add(), [torch.randn(6, 8), torch.randn(6, 8)]
    steady(fd, inputs)
    gone = weakref.ref(fd.fec)
    del fd
    gc.collect()
    assert gone() is None
