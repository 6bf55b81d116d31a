"""Tests the backward of norms: rows and the sums over them in one kernel, against torch
in float64."""

from __future__ import annotations

import random as python_random
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from fuser import FusionDefinition, ParallelType, ops
from fuser.ir.dtypes import DataType, from_torch
from fuser.ir.fusion import TensorView
from fuser.ops.reference.meaning import evaluate_fusion
from fuser.passes.segment import row_parts, split_rows
from fuser.schedule import inner_outer_persistent as scheduler
from fuser.schedule import inner_persistent
from fuser.schedule.reduction import accepts as reduction_accepts
from fuser.support.options import settings
from hostir import HostIrEvaluator
from hostir.ir.parser import parse
from hostir.lowering import pipeline
from multidevice import Communicator, DeviceMesh, simulate
from tests.support.small_fusions import define

F = DataType.Float
H200 = ["schedules_for(h200)"]
BOTH_KERNELS = ["inner_outer_persistent", "reduction"]
Results = tuple[TensorView, ...]


def wide(x: TensorView) -> TensorView:
    return x if x.dtype() is DataType.Double else ops.cast(x, F)


def layer_norm_backward(
    dy: TensorView, x: TensorView, w: TensorView, mean: TensorView, rstd: TensorView
) -> Results:
    """Returns the gradients of input, weight and bias."""
    rank, n = dy.ndim, dy.size(-1)
    flags = [False] * (rank - 1) + [True]
    m, r = (ops.broadcast(wide(v), flags) for v in (mean, rstd))
    x_hat = ops.mul(ops.sub(wide(x), m), r)
    g = ops.mul(wide(dy), wide(w))
    first = ops.div(ops.sum(g, -1, keepdim=True), n)
    second = ops.div(ops.sum(ops.mul(g, x_hat), -1, keepdim=True), n)
    dx = ops.mul(r, ops.sub(ops.sub(g, first), ops.mul(x_hat, second)))
    rows = list(range(rank - 1))
    dw, db = ops.sum(ops.mul(wide(dy), x_hat), rows), ops.sum(wide(dy), rows)
    return tuple(ops.cast(t, dy.dtype()) for t in (dx, dw, db))


def rms_norm_backward(dy: TensorView, x: TensorView, w: TensorView) -> Results:
    """Returns the gradients of input and weight; the norm is computed again."""
    n, wx = x.size(-1), wide(x)
    mean = ops.div(ops.sum(ops.mul(wx, wx), -1, keepdim=True), n)
    r = ops.rsqrt(ops.add(mean, 1e-5))
    x_hat, g = ops.mul(wx, r), ops.mul(wide(dy), wide(w))
    second = ops.div(ops.sum(ops.mul(g, x_hat), -1, keepdim=True), n)
    dx = ops.mul(r, ops.sub(g, ops.mul(x_hat, second)))
    dw = ops.sum(ops.mul(wide(dy), x_hat), list(range(x.ndim - 1)))
    return ops.cast(dx, dy.dtype()), ops.cast(dw, w.dtype())


def softmax_and_columns(x: TensorView) -> Results:
    """Returns a softmax, and a sum over rows of values that depend on two reductions along them."""
    e = ops.exp(ops.sub(wide(x), ops.max(wide(x), -1, keepdim=True)))
    y = ops.div(e, ops.sum(e, -1, keepdim=True))
    return ops.cast(y, x.dtype()), ops.sum(y, list(range(x.ndim - 1)))


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes small tensors use the kernels of large ones, with four partial sums."""
    monkeypatch.setattr(scheduler, "FEWEST_ROWS", 1)
    monkeypatch.setattr(pipeline, "PARTS", 4)


def defined(
    build: Callable[..., Results], inputs: Sequence[torch.Tensor], *, symbolic: bool = True
) -> FusionDefinition:
    with FusionDefinition() as fd:
        given = [
            fd.define_tensor(
                [-1] * t.ndim if symbolic else [*t.shape],
                contiguity=True,
                dtype=from_torch(t.dtype),
            )
            for t in inputs
        ]
        for out in build(*given):
            fd.add_output(out)
    return fd


def schedulers(fd: FusionDefinition) -> list[str]:
    """Returns the schedulers of the kernels of the latest run."""
    segments = fd._executor_cache()._last().program.segmented.segments
    return [s.scheduler or s.kind for s in segments]


def check(
    build: Callable[..., Results],
    inputs: Sequence[torch.Tensor],
    *,
    symbolic: bool = True,
    kernels: Sequence[str] = BOTH_KERNELS,
) -> None:
    """Runs with the H200's schedules and all checks, and compares with float64."""
    fd = defined(build, inputs, symbolic=symbolic)
    got = fd.execute(inputs, _enable_options=[*H200, "checked"])
    assert schedulers(fd) == [*kernels]
    expected = evaluate_fusion(fd.fusion, inputs, dtype=torch.float64)
    for ours, theirs in zip(got, expected, strict=True):
        # Sums over m rows of k elements have rounding errors that depend on both.
        scale = max(float(theirs.abs().max()), 1.0)
        limit = {torch.bfloat16: 8e-3, torch.float32: 2e-5}.get(ours.dtype, 1e-12)
        assert float((ours.double() - theirs).abs().max()) <= limit * scale


def operands(dtype: torch.dtype, rows: Sequence[int], n: int, count: int = 2) -> list[torch.Tensor]:
    """Returns `count` tensors of rows, and a weight."""
    generator = torch.Generator().manual_seed(sum(rows) + n)
    shapes = [(*rows, n)] * count + [(n,)]
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def norm_inputs(dtype: torch.dtype, rows: Sequence[int], n: int) -> list[torch.Tensor]:
    dy, x, w = operands(dtype, rows, n)
    return [dy, x, w, x.float().mean(-1), x.float().var(-1).add(1e-5).rsqrt()]


ROWS = [(3,), (4,), (37,), (5, 7), (2, 3, 4)]


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("n", [4, 96, 260])
def test_layer_norm_backward(rows: tuple[int, ...], n: int) -> None:
    check(layer_norm_backward, norm_inputs(torch.bfloat16, rows, n))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [8, 768, 1000, 4100, 8192])
def test_rms_norm_backward(dtype: torch.dtype, n: int) -> None:
    check(rms_norm_backward, operands(dtype, (21,), n))


@pytest.mark.parametrize("symbolic", [True, False], ids=["symbolic", "constant"])
def test_what_waits_for_reductions_is_summed_over_rows(symbolic: bool) -> None:
    check(softmax_and_columns, operands(torch.float32, (19,), 64, 1)[:1], symbolic=symbolic)


def test_unaligned_and_gapped_rows() -> None:
    dy, x, w = operands(torch.bfloat16, (9,), 96)
    wide_rows = torch.zeros(9, 101).bfloat16()
    wide_rows[:, 3:99] = x
    with FusionDefinition() as fd:
        tensors = [fd.from_pytorch(t) for t in (dy, wide_rows[:, 3:99], w)]
        for out in rms_norm_backward(*tensors):
            fd.add_output(out)
    inputs = [dy, wide_rows[:, 3:99], w]
    got = fd.execute(inputs, _enable_options=[*H200, "checked"])
    for ours, theirs in zip(
        got, evaluate_fusion(fd.fusion, inputs, dtype=torch.float64), strict=True
    ):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-2, atol=2e-2)


def test_one_definition_serves_many_sizes() -> None:
    inputs = operands(torch.float32, (8,), 64)
    fd = defined(rms_norm_backward, inputs)
    for rows, n in ((8, 64), (13, 64), (5, 512), (1000, 4), (3, 77), (4, 9000), (6, 64)):
        inputs = operands(torch.float32, (rows,), n)
        got = fd.execute(inputs, _enable_options=H200)
        is_one = n % 4 == 0 and n <= 8192
        assert (schedulers(fd) == BOTH_KERNELS) == is_one
        expected = evaluate_fusion(fd.fusion, inputs, dtype=torch.float64)
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_for_which_it_does_not_pay_are_right(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program made for some sizes also serves other sizes of its class."""
    for module in (scheduler, inner_persistent):
        monkeypatch.setattr(module, "pays", lambda rows, columns: True)
    inputs = operands(dtype, (3,), 64)
    fd = defined(rms_norm_backward, inputs)
    for n in (64, 77, 1, 8193, 20001, 40000):
        inputs = operands(dtype, (3,), n)
        got = fd.execute(inputs, _enable_options=H200)
        assert schedulers(fd) == BOTH_KERNELS or n == 1
        expected = evaluate_fusion(fd.fusion, inputs, dtype=torch.float64)
        for ours, theirs in zip(got, expected, strict=True):
            limit = 1e-4 if dtype is torch.float32 else 3e-2
            torch.testing.assert_close(ours.double(), theirs, rtol=limit, atol=limit)


def test_cpu_schedules_sum_in_a_kernel_of_their_own() -> None:
    inputs = operands(torch.float32, (8,), 64)
    fd = defined(rms_norm_backward, inputs)
    got = fd.execute(inputs)
    assert schedulers(fd) == ["inner_persistent", "reduction"]
    for ours, theirs in zip(
        got, evaluate_fusion(fd.fusion, inputs, dtype=torch.float64), strict=True
    ):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


def test_a_sum_that_the_rows_wait_for_stays_whole() -> None:
    """The rows depend on the sums over rows, so there are two kernels, one after the other."""

    def build(x: TensorView) -> Results:
        total = ops.sum(x, 0)
        return (ops.sub(x, ops.sum(ops.mul(x, total), -1, keepdim=True)), total)

    check(
        build, operands(torch.float32, (9,), 32, 1)[:1], kernels=["reduction", "inner_persistent"]
    )


def test_a_declared_order_stays_whole() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1, -1], contiguity=True)
        y = fd.ops.sub(x, fd.ops.max(x, -1, keepdim=True))
        fd.add_output(y)
        fd.add_output(fd.ops.stride_order(fd.ops.sum(x, 0), [0, 1]))
    x = torch.randn(5, 6, 8)
    got = fd.execute([x], _enable_options=[*H200, "checked"])
    assert "inner_outer_persistent" not in schedulers(fd)
    torch.testing.assert_close(got[1], x.sum(0))
    assert got[1].stride() == (1, 6)


def test_a_program_with_parts_runs_from_its_text() -> None:
    inputs = operands(torch.float32, (9,), 64)
    fd = defined(rms_norm_backward, inputs)
    got = fd.execute(inputs, _enable_options=H200)
    text = fd._executor_cache().host_program().full_text()
    program = parse(text)
    assert program.full_text() == text
    cpu = torch.device("cpu")
    again = HostIrEvaluator(program, None, device=cpu, settings=settings(H200)).run(inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_ranks(cut: bool) -> None:
    """Rows that several devices share are summed in a separate kernel."""
    inputs = operands(torch.float32, (12,), 64)
    with FusionDefinition() as fd:
        given = [fd.define_tensor([-1] * t.ndim, contiguity=True) for t in inputs]
        for out in rms_norm_backward(*given):
            fd.add_output(out)
        for tv in given:
            tv.set_device_mesh(DeviceMesh(range(2)))
        for tv in given[:2] if cut else ():
            tv.split(0, 2, inner_split=False)
            tv.axis(0).parallelize(ParallelType.mesh_x)
    dx, dw = evaluate_fusion(fd.fusion, inputs, dtype=torch.float64)

    def run() -> None:
        rank = Communicator.instance().rank()
        dy, x, w = inputs
        mine = [t.chunk(2)[rank].contiguous() if cut else t for t in (dy, x)]
        got = fd.execute([*mine, w], _enable_options=[*H200, "checked"])
        expected = dx.chunk(2)[rank] if cut else dx
        torch.testing.assert_close(got[0].double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[1].double(), dw, rtol=1e-5, atol=1e-5)
        assert (BOTH_KERNELS[0] in schedulers(fd)) != cut

    with simulate(2) as world:
        world.run(run)


def test_rows_in_another_order_than_that_of_memory_stay_whole() -> None:
    dy, x, w = operands(torch.float32, (5, 6), 32)
    inputs = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (dy, x)] + [w]
    with FusionDefinition() as fd:
        for out in rms_norm_backward(*map(fd.from_pytorch, inputs)):
            fd.add_output(out)
    got = fd.execute(inputs, _enable_options=[*H200, "checked"])
    assert schedulers(fd) == ["inner_persistent", "reduction"]
    expected = evaluate_fusion(fd.fusion, inputs, dtype=torch.float64)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


def test_what_has_no_rows_is_not_summed_in_parts() -> None:
    def build(x: TensorView, y: TensorView) -> Results:
        repeated = ops.expand(ops.sum(y, 0, keepdim=True), [x.size(0), x.size(1)])
        rows = ops.div(x, ops.sum(ops.mul(x, y), -1, keepdim=True))
        return rows, ops.sum(ops.mul(repeated, 2.0), 0)

    inputs = operands(torch.float64, (9,), 32)[:2]
    fd = defined(build, inputs)
    got = fd.execute(inputs, _enable_options=[*H200, "checked"])
    expected = evaluate_fusion(fd.fusion, inputs, dtype=torch.float64)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_parts_sum_every_row_once() -> None:
    fusion = define(lambda x: ops.sum(x, [0, 1]), (None, None, None))
    (total,) = fusion.outputs
    parts = split_rows(total, 4)
    made_by = parts.definition()
    assert made_by is not None and row_parts(made_by) is not None
    final = total.definition()
    assert final is not None and row_parts(final) is None
    assert str(total.domain).count("r") == 1


def test_equal_spaces_that_nothing_relates_are_one_reduction() -> None:
    fusion = define(lambda x, y: (ops.sum(x, 0), ops.max(y, 0)), (4, 40), (4, 40))
    assert reduction_accepts(fusion) is None


UNARY = [ops.sin, ops.tanh, ops.neg, lambda t: ops.mul(t, 0.5)]
BINARY = [ops.add, ops.sub, ops.mul]


def random_build(r: python_random.Random, x: TensorView, y: TensorView, w: TensorView) -> Results:
    """Returns a random row op that depends on a sum, and sums over rows."""
    pool = [x, y, ops.mul(x, w)]

    def grow(times: int) -> TensorView:
        for _ in range(times):
            a, b = r.choice(pool), r.choice(pool)
            made = r.choice(BINARY)(a, b) if r.random() < 0.6 else r.choice(UNARY)(a)
            pool.append(made)
        return pool[-1]

    along = ops.div(ops.sum(grow(2), -1, keepdim=True), 16.0)
    pool.append(ops.add(along, y))
    outs = [grow(2)]
    for _ in range(r.randint(1, 3)):
        outs.append(ops.sum(grow(1), list(range(x.ndim - 1))))
    return tuple(outs)


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed: int) -> None:
    r = python_random.Random(seed)
    rows, n = r.choice([(3,), (17,), (2, 9)]), 4 * r.randint(1, 40)
    inputs = operands(torch.float64, rows, n)
    fd = defined(partial(random_build, r), inputs)
    got = fd.execute(inputs, _enable_options=[*H200, "checked"])
    expected = evaluate_fusion(fd.fusion, inputs, dtype=torch.float64)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
