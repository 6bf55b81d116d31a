"""Tests that size-generic plans make the same plans as a dry run or a run."""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from fuser import DataType, DeviceMesh, FusionDefinition, ParallelType
from fuser.ir.domain.strided_layout import viewed_strides
from fuser.ir.fusion import TensorView
from fuser.ir.scalar import constructors as sc
from hostir.ir.ops import RANK, IfThenElse
from hostir.ir.program import HostIrContainer
from hostir.runtime import execute as posting
from hostir.runtime.communication import CommunicationCall, PostedBuffer, post
from hostir.runtime.dry_run import dry_run_plan
from hostir.runtime.evaluator import ProgramEvaluator, returned
from hostir.runtime.frame import Frame
from hostir.runtime.plan import Plan
from hostir.runtime.plan_cache import PlanCache
from hostir.runtime.steps import CollectiveStep
from multidevice import Communicator, simulate
from multidevice.transports.base.protocol import Post, Work
from tests.hostir.runtime.test_size_generic_plan_new_sizes import _assert_alike
from tests.support.host_programs import CASES, build
from tools.fuzz import single
from tools.fuzz.product import Mode
from tools.fuzz.runner import Case, run


def _compared(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Compares each plan that a size-generic plan makes with the one of a dry run."""
    counts, plan_for_new_sizes = Counter[str](), PlanCache.plan_for_new_sizes

    def compared(cache: PlanCache, frame: Frame) -> Plan | None:
        plan = plan_for_new_sizes(cache, frame)
        if plan is not None:
            arenas = cache.arenas_on(frame.machine.device)
            with torch.no_grad():
                told = dry_run_plan(frame, cache.free, returned(frame.program), arenas).plan
            assert told is not None
            _assert_alike(plan, told)
            counts["plans"] += 1
        return plan

    monkeypatch.setattr(PlanCache, "plan_for_new_sizes", compared)
    return counts


@pytest.mark.parametrize("schedules", ["cpu", "h200"])
def test_plans_of_random_programs_are_those_of_dry_runs(
    monkeypatch: pytest.MonkeyPatch, schedules: str
) -> None:
    """`scripts/fuzz.py` compares the results of many more."""
    counts = _compared(monkeypatch)
    for seed in range(12, 26):
        outcome = run(Case.of(single.generate(seed)), Mode(schedules=schedules))
        assert not outcome.is_failure, f"seed {seed}: {outcome.detail}"
    assert counts["plans"] > 0


def _of_all_kinds() -> FusionDefinition:
    """Defines views of every kind, a scalar in a kernel, and products of views and with a bias."""
    with FusionDefinition() as fd:
        x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
        b, s = fd.define_tensor([-1], contiguity=True), fd.define_scalar(None, DataType.Double)
        y = fd.ops.mul(fd.ops.linear(x, w, b), s)
        heads = fd.ops.permute(fd.ops.reshape(y, [y.shape()[0], 2, -1]), [1, 0, 2])
        scores = fd.ops.matmul(heads, fd.ops.permute(heads, [0, 2, 1]))
        fd.add_output(fd.ops.exp(scores))
        fd.add_output(fd.ops.sum(fd.ops.matmul(fd.ops.permute(x, [1, 0]), y), [0]))
        fd.add_output(heads)
    return fd


def _all_kinds_meaning(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, s: float
) -> list[torch.Tensor]:
    x, w, b = (t.double() for t in (x, w, b))
    y = torch.nn.functional.linear(x, w, b) * s
    heads = y.reshape(len(x), 2, -1).permute(1, 0, 2)
    return [(heads @ heads.mT).exp(), (x.T @ y).sum(0), heads]


@pytest.mark.parametrize("schedules", [(), ("schedules_for(h200)",)])
def test_views_and_scalars(monkeypatch: pytest.MonkeyPatch, schedules: tuple[str, ...]) -> None:
    fd, counts = _of_all_kinds(), _compared(monkeypatch)
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / 4

    for n in (4, 6, 3, 8, 1, 2, 12, 33, 7):
        inputs = normal(n, 5), normal(2 * n, 5), normal(2 * n)
        for number in (0.5, 2, -1.25, 0.5):
            got = fd.execute([*inputs, number], _enable_options=schedules)
            for one, want in zip(got, _all_kinds_meaning(*inputs, number), strict=True):
                torch.testing.assert_close(one.double(), want, rtol=1e-3, atol=1e-4)
    assert counts["plans"] > 10


def test_views_without_a_tensor_are_those_of_torch() -> None:
    draw, views = random.Random(1), 0
    for _ in range(2000):
        sizes = [draw.choice((1, 2, 3, 4, 6)) for _ in range(draw.randrange(5))]
        memory = torch.empty([n * draw.choice((1, 1, 2)) for n in sizes], device="meta")
        t = memory[tuple(slice(0, n) for n in sizes)]
        t = t.permute(draw.sample(range(t.ndim), t.ndim))
        if draw.random() < 0.2:
            t = t.expand(draw.choice((1, 2, 3)), *t.shape)
        rest, wanted = t.numel(), [1] * draw.randrange(2)
        while rest > 1:
            wanted.append(draw.choice([n for n in range(2, rest + 1) if rest % n == 0]))
            rest //= wanted[-1]
        draw.shuffle(wanted)
        found = viewed_strides(t.shape, t.stride(), wanted)
        try:
            want = t.view(wanted).stride()
        except RuntimeError:
            want = None
        assert (found is None) is (want is None), (t.shape, t.stride(), wanted)
        if found is not None and want is not None:
            views += 1
            pairs = zip(found, want, wanted, strict=True)
            assert all(a == b for a, b, n in pairs if n > 1), (t.shape, t.stride(), wanted)
    assert views > 500


# ------------------------------------------------------------------ ranks
def _two_layers(communicator: Communicator) -> FusionDefinition:
    """Defines layers with weights cut by columns, then by rows, an allgather and an allreduce."""
    with FusionDefinition() as fd:
        x, v, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(3))
        y = fd.ops.relu(fd.ops.linear(x, v))
        z = fd.ops.linear(y, w)
        fd.add_output(fd.ops.relu(z))
    mesh = DeviceMesh(range(communicator.size()))
    for tv in (x, v, y, w, z):
        tv.set_device_mesh(mesh)
    for tv, axis in ((v, 0), (w, 1)):
        size = communicator.size()
        tv.outer_split(axis, size)
        tv.axis(axis).parallelize(ParallelType.mesh_x)
    return fd


def _on_two_ranks(check: Callable[[FusionDefinition, int], None], sizes: list[int]) -> None:
    def body() -> None:
        fd = _two_layers(Communicator.instance())
        for n in sizes:
            check(fd, n)

    with simulate(2) as world:
        world.run(body)


def _check_layers(fd: FusionDefinition, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    x, v, w = (torch.randn(s, generator=generator) for s in ((n, 6), (8, 6), (4, 8)))
    rank = Communicator.instance().rank()
    mine = [x, v[4 * rank : 4 * rank + 4].contiguous(), w[:, 4 * rank : 4 * rank + 4].contiguous()]
    want = ((x.double() @ v.double().T).relu() @ w.double().T).relu()
    for _ in range(3):
        (got,) = fd.execute(mine)
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_later_sizes_of_what_communicates_are_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    walk, walked = ProgramEvaluator.walk, list[int]()

    def noted(evaluator: ProgramEvaluator, frame: Frame, recorder: None) -> list[torch.Tensor]:
        walked.append(frame.machine.rank)
        return walk(evaluator, frame, recorder)

    monkeypatch.setattr(ProgramEvaluator, "walk", noted)
    _on_two_ranks(_check_layers, [5, 6, 3, 1, 9, 16])
    assert sorted(walked) == [0, 1]


def test_what_is_bound_is_bound_after_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend binds a communication after its first start; later runs use the binding."""
    bound, taken = list[int](), list[int]()

    def at(address: int, like: torch.Tensor) -> torch.Tensor:
        memory = (ctypes.c_char * like.nbytes).from_address(address)
        flat = torch.frombuffer(memory, dtype=like.dtype)
        return flat.as_strided(like.shape, like.stride())

    def bind(call: CommunicationCall, inp: PostedBuffer, out: PostedBuffer) -> Post:
        assert inp is not None and out is not None
        like_inp, like_out = torch.empty_like(inp), torch.empty_like(out)
        bound.append(call.rank)

        def start(to: int, source: int, stream: int) -> Work:
            taken.append(call.rank)
            return post(call, at(source, like_inp), at(to, like_out))

        return start

    monkeypatch.setattr(posting, "bind_post", bind)
    kinds = set[int]()

    def check(fd: FusionDefinition, n: int) -> None:
        _check_layers(fd, n)
        assert fd.fec._latest is not None
        (plan,) = fd.fec._latest.known.plans.values()
        kinds.add(sum(isinstance(step, CollectiveStep) for step, _ in plan.steps))

    sizes = [5, 6, 3]
    _on_two_ranks(check, sizes)
    assert kinds == {2}, "later runs post anew"
    # Two communications of two ranks: bound in the first of three runs, taken in the others.
    assert len(bound) == 4 * len(sizes) and len(taken) == 8 * len(sizes)


# ------------------------------------------------------------------ decisions by sizes
@pytest.mark.parametrize("is_decided_by_size", [False, True])
def test_a_branch_that_a_size_decides_has_no_size_generic_plan(is_decided_by_size: bool) -> None:
    case = CASES["linear_relu_sum"]
    program: HostIrContainer = build(case)
    x = program.inputs[0]
    assert isinstance(x, TensorView)
    size = x.shape()[0]
    branch = IfThenElse(sc.lt(size if is_decided_by_size else RANK, 8), then=())
    evaluator, inputs = ProgramEvaluator(program.with_ops((*program.ops, branch))), case.inputs()
    want = ProgramEvaluator(program).run(inputs)
    for _ in range(2):
        for got, expected in zip(evaluator.run(inputs), want, strict=True):
            assert torch.equal(got, expected)
    assert bool(evaluator.cache._generic_plans) is not is_decided_by_size
