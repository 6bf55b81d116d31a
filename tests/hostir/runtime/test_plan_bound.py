"""Tests bound plans: the checks before a replay, and the separation of concurrent runs."""

from __future__ import annotations

import threading
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition
from fuser.ir.memory_layout import dense_strides, dense_strides_of
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import const
from fuser.kernels.executor import FusedKernelExecutor
from hostir import HostIrEvaluator
from hostir.runtime.steps import LaunchStep
from tests.support.host_programs import CASES, build


def _chain() -> FusionDefinition:
    """Defines a kernel, a matmul and a kernel, whose intermediates are stored in the arena."""
    with FusionDefinition() as fd:
        x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
        y = fd.ops.matmul(fd.ops.tanh(x), w)
        fd.add_output(fd.ops.sum(fd.ops.exp(y), [1]))
    return fd


def _expected(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.double().tanh() @ w.double()).exp().sum(1)


def test_a_steady_call_asks_no_kernel_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    fd, inputs = _chain(), [torch.randn(8, 8), torch.randn(8, 8)]
    fd.execute(inputs)

    def asked(*args: object, **kwargs: object) -> None:
        raise AssertionError("a bound launch asked its executor")

    for name in ("run", "_record", "launch_for"):
        monkeypatch.setattr(FusedKernelExecutor, name, asked)
    for _ in range(2):
        (got,) = fd.execute(inputs)
        torch.testing.assert_close(got.double(), _expected(*inputs), rtol=1e-5, atol=1e-5)


def test_tensors_at_other_places_of_a_vector_take_another_plan() -> None:
    """A kernel for aligned rows reads 16-byte vectors, which fault at other alignments."""
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([-1], contiguity=True) for _ in range(2))
        fd.add_output(fd.ops.add(x, y))
    memory, other = torch.randn(4096 + 8), torch.randn(4096)

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        return fd.execute(inputs, _enable_options=["schedules_for(h200)"])[0]

    for _ in range(2):
        for start in (0, 1, 4, 2, 0, 3):
            x = memory[start : start + 4096]
            assert torch.equal(run(x, other), x + other)
            assert torch.equal(run(other, x), x + other)
    (call,) = fd.fec._by_signature.values()  # pyright: ignore[reportPrivateUsage]
    plans = call.known.plans
    # Aligned (0 and 4), and three places of either input.
    assert plans.size() == 1 + 3 * 2
    kernels = {
        step.kernel.kernel.source.text
        for plan in plans.values()
        for step, _ in plan.steps
        if isinstance(step, LaunchStep)
    }
    assert len(kernels) > 1, "the kernel of aligned tensors reads wider than the others"


def test_scalar_inputs_reach_a_bound_launch() -> None:
    with FusionDefinition() as fd:
        x, s = fd.define_tensor([-1], contiguity=True), fd.define_scalar(None, DataType.Double)
        n = fd.define_scalar(None, DataType.Int)
        fd.add_output(fd.ops.mul(fd.ops.add(x, s), n))
    x = torch.randn(33)
    for s, n in ((0.5, 2), (-3.25, 7), (1e-3, -(2**40)), (0.5, 2)):
        want = (x.double() + s) * n
        torch.testing.assert_close(fd.execute([x, s, n])[0].double(), want, rtol=1e-5, atol=1e-5)


def test_threads_run_one_definition_at_once() -> None:
    fd, rounds, count = _chain(), 150, 4
    sets = [[torch.randn(16, 16) / 4, torch.randn(16, 16) / 4] for _ in range(count)]
    for inputs in sets:
        fd.execute(inputs)
    wrong: list[int] = []
    start = threading.Barrier(count)

    def body(i: int) -> None:
        want = _expected(*sets[i])
        start.wait()
        for _ in range(rounds):
            (got,) = fd.execute(sets[i])
            if not torch.allclose(got.double(), want, rtol=1e-4, atol=1e-4):
                wrong.append(i)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_run_inside_of_a_run_has_its_own_launches() -> None:
    """Like a thread that runs between the kernels of another thread, but in every run."""
    case = CASES["linear_relu_sum"]
    evaluator = HostIrEvaluator(build(case))
    outer, inner = case.inputs(), [t * 2 for t in case.inputs()]
    wanted = [evaluator.evaluate(inputs) for inputs in (outer, inner)]
    evaluator.run(outer)
    (plan,) = evaluator.plans()
    evaluator.run(outer)
    arena = plan.arenas.take(0, plan)
    bound = arena.bound[plan]
    whole, whole_ops = bound.closures, bound.ops
    found: list[list[torch.Tensor]] = []

    def nested(slots: object) -> None:
        found.append(evaluator.run(inner))

    for k in range(len(whole) + 1):
        changed = replace(
            bound,
            closures=(*whole[:k], nested, *whole[k:]),
            ops=(*whole_ops[:k], None, *whole_ops[k:]),
        )
        arena.bound[plan] = changed
        plan.arenas.give(arena)
        got = evaluator.run(outer)
        assert plan.arenas.take(0) is arena, "the outer run gave its arena back last"
        for a, b in zip((*got, *found.pop()), (*wanted[0], *wanted[1]), strict=True):
            assert torch.equal(a, b)


# ------------------------------------------------------------------ new shapes
def test_a_new_shape_binds_each_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are bound when the plan is made; the run finds them again."""
    fd, binds = _chain(), list[str]()
    # Equal definitions share kernels: sizes that no other test here has.
    fd.execute([torch.randn(20, 20), torch.randn(20, 20)])
    bind = FusedKernelExecutor._bind_to

    def counted(self: FusedKernelExecutor, *args: Any, **kwargs: Any) -> Any:
        binds.append(self.name)
        return bind(self, *args, **kwargs)

    monkeypatch.setattr(FusedKernelExecutor, "_bind_to", counted)
    for n in (21, 22, 22, 23):
        inputs = [torch.randn(n, n) / 4, torch.randn(n, n) / 4]
        (got,) = fd.execute(inputs)
        torch.testing.assert_close(got.double(), _expected(*inputs), rtol=1e-4, atol=1e-4)
    assert len(binds) == 3 * fd.fec.statistics()["kernels"]


@pytest.mark.parametrize("name", CASES)
def test_strides_of_known_sizes_are_those_of_symbolic_ones(name: str) -> None:
    random = Random(0)
    for tv in build(CASES[name]).tensors():
        for _ in range(3):
            sizes = [random.choice((1, 2, 3, 7)) for _ in range(tv.ndim)]
            symbolic = dense_strides(tv, [const(n) for n in sizes])
            assert dense_strides_of(tv, sizes) == tuple(sc.evaluate(s, {}) for s in symbolic)
