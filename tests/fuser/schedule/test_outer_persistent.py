"""Tests norms and softmax of columns as one kernel, against torch in float64.

As in `test_reduction_numeric.py`: with the CPU's loops, and with the H200's schedule in checked
mode.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fuser import FusionDefinition, ops
from fuser.ir.dtypes import DataType, from_torch
from fuser.ir.fusion import Alias, TensorView
from fuser.runtime.cpu_kernel import CheckedCpuKernel, Counters
from fuser.schedule import outer_persistent, scheduler
from fuser.schedule.input_facts import Facts
from fuser.schedule.outer_persistent import OuterPersistentParams, most_rows
from fuser.support.device import H200
from tests.fuser.schedule.test_registry import loops
from tests.support.kernel_checks import BOTH, back, check
from tests.support.row_programs import back_to, wide
from tests.support.small_fusions import (
    Build,
    define,
    make_executor,
    random,
    run,
    scheduled,
    sizes_of,
)

F = DataType.Float
BF16 = DataType.BFloat16


def softmax(x: TensorView) -> TensorView:
    x = wide(x)
    e = ops.exp(ops.sub(x, ops.max(x, 0, keepdim=True)))
    return ops.div(e, ops.sum(e, 0, keepdim=True))


def batch_norm(x: TensorView, w: TensorView, b: TensorView) -> Sequence[TensorView]:
    dims = list(range(x.ndim - 1))
    x_wide = wide(x)
    var, mean = ops.var_mean(x_wide, dims, correction=0)
    r = ops.rsqrt(ops.add(var, 1e-5))
    flags = [*(True for _ in dims), False]
    y = ops.mul(ops.sub(x_wide, ops.broadcast(mean, flags)), ops.broadcast(r, flags))
    y = ops.add(ops.mul(y, ops.broadcast(wide(w), flags)), ops.broadcast(wide(b), flags))
    return back_to(x, y), mean, r


def torch_batch_norm(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    var, mean = torch.var_mean(x, list(range(x.dim() - 1)), correction=0)
    r = torch.rsqrt(var + 1e-5)
    return (x - mean) * r * w + b, mean, r


CASES = [
    ((2, 1), torch.float32),
    ((31, 7), torch.bfloat16),
    ((130, 131), torch.float64),
    ((1000, 24), torch.bfloat16),
    ((5000, 3), torch.float32),
]


@BOTH
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_softmax(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    check(
        lambda x: back(softmax(x), dtype),
        lambda x: torch.softmax(x, 0),
        [random(shape, dtype)],
        device,
        broadcast_ones=False,
    )


@BOTH
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 3, 5, 7), torch.float32), ((4, 8, 8, 96), torch.float16), ((64, 48), torch.float64)],
    ids=str,
)
def test_batch_norm(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    inputs = [random(shape, dtype), *(random(shape[-1:], torch.float32, k) for k in (1, 2))]
    params = check(batch_norm, torch_batch_norm, inputs, device, scale=4)
    assert isinstance(params, OuterPersistentParams)


@BOTH
def test_softmax_beside_what_columns_have(device: str) -> None:
    """The sum has two readers: one that needs no other row, and one that also reads the maximum."""

    def build(x: TensorView) -> Sequence[TensorView]:
        m = ops.max(x, 0, keepdim=True)
        e = ops.exp(ops.sub(x, m))
        s = ops.sum(e, 0, keepdim=True)
        return ops.div(e, s), ops.add(ops.log(s), m)

    def reference(x: torch.Tensor) -> Sequence[torch.Tensor]:
        return torch.softmax(x, 0), torch.logsumexp(x, 0, keepdim=True)

    params = check(build, reference, [random((31, 300), torch.float32)], device, scale=4)
    assert isinstance(params, OuterPersistentParams)


@BOTH
@pytest.mark.parametrize("flags", [[True, False, False], [False, True, False]], ids=str)
def test_a_broadcast_axis_beside_columns_alone(flags: list[bool], device: str) -> None:
    def build(x: TensorView) -> TensorView:
        x = ops.broadcast(x, flags)
        return ops.sub(x, ops.max(x, [flags.index(False)], keepdim=True))

    def reference(x: torch.Tensor) -> torch.Tensor:
        return (x - x.amax(0)).unsqueeze(flags.index(True))

    params = check(build, reference, [random((31, 300), torch.float32)], device)
    assert isinstance(params, OuterPersistentParams)


@BOTH
@pytest.mark.parametrize("shape", [(3, 37, 48), (5, 64, 7)], ids=str)
def test_rows_between_columns(shape: tuple[int, ...], device: str) -> None:
    """The statistics are over the middle axis: an instance norm of channels-last inputs."""

    def build(x: TensorView, w: TensorView, row: TensorView) -> Sequence[TensorView]:
        var, mean = ops.var_mean(x, [1], 0, True)
        y = ops.mul(ops.sub(x, mean), ops.rsqrt(ops.add(var, 1e-5)))
        y = ops.mul(y, ops.broadcast(w, [True, True, False]))
        return ops.add(y, ops.broadcast(row, [True, False, True])), ops.squeeze(mean, [1])

    def reference(x: torch.Tensor, w: torch.Tensor, row: torch.Tensor) -> Sequence[torch.Tensor]:
        var, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
        return (x - mean) * torch.rsqrt(var + 1e-5) * w + row[None, :, None], mean.squeeze(1)

    inputs = [random(s, torch.float32, k) for k, s in enumerate([shape, shape[2:], shape[1:2]])]
    params = check(build, reference, inputs, device, scale=4)
    assert isinstance(params, OuterPersistentParams)


@BOTH
def test_channels_first_in_an_order_of_channels_last(device: str) -> None:
    def build(x: TensorView) -> TensorView:
        var, mean = ops.var_mean(x, [0, 2, 3], 0, True)
        return ops.mul(ops.sub(x, mean), ops.rsqrt(ops.add(var, 1e-5)))

    x = random((4, 24, 5, 6), torch.float32).contiguous(memory_format=torch.channels_last)
    with FusionDefinition() as fd:
        fd.add_output(build(fd.define_tensor([-1] * 4, contiguity=True, stride_order=[3, 0, 2, 1])))
    (out,) = fd.execute([x], _enable_options=OPTIONS[device])
    expected = torch_batch_norm(x.double().permute(0, 2, 3, 1), *torch.tensor([1.0, 0.0]).double())
    torch.testing.assert_close(out, expected[0].permute(0, 3, 1, 2).float(), atol=1e-5, rtol=1e-5)
    assert schedulers_of(fd, [x]) == ["outer_persistent"]


OPTIONS = {"cpu": [], "h200": ["schedules_for(h200)", "checked"]}


def schedulers_of(fd: FusionDefinition, inputs: Sequence[torch.Tensor]) -> list[str]:
    program = fd._executor_cache().program_for(inputs)  # pyright: ignore[reportPrivateUsage]
    return [g.scheduler for g in program.groups.values()]


@BOTH
def test_running_statistics_are_updated_in_the_kernel(device: str) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        mean_so_far, var_so_far = (fd.define_tensor([-1], contiguity=True) for _ in range(2))
        var, mean = fd.ops.var_mean(x, [0], 0)
        flags = [True, False]
        y = fd.ops.sub(x, fd.ops.broadcast(mean, flags))
        r = fd.ops.rsqrt(fd.ops.add(var, 1e-5))
        fd.add_output(fd.ops.mul(y, fd.ops.broadcast(r, flags)))
        for old, new in ((mean_so_far, mean), (var_so_far, var)):
            fd.add_output(fd.ops.add(fd.ops.mul(old, 0.9), fd.ops.mul(new, 0.1)), old)
    x, old = random((96, 40), torch.float32), [random((40,), torch.float32, k) for k in (1, 2)]
    given = [t.clone() for t in old]
    (out,) = fd.execute([x, *given], _enable_options=OPTIONS[device])
    var, mean = torch.var_mean(x.double(), 0, correction=0)
    expected = [(x - mean) * torch.rsqrt(var + 1e-5)]
    expected += [0.9 * a + 0.1 * b for a, b in zip(old, (mean, var), strict=True)]
    for got, want in zip([out, *given], expected, strict=True):
        torch.testing.assert_close(got, want.float(), atol=1e-5, rtol=1e-5)
    assert schedulers_of(fd, [x, *given]) == ["outer_persistent"]


def test_old_values_that_others_read_are_not_overwritten() -> None:
    def build(x: TensorView, shift: TensorView) -> Sequence[TensorView]:
        total = ops.sum(x, [0])
        y = ops.sub(x, ops.broadcast(ops.add(total, shift), [True, False]))
        return y, ops.add(total, 1.0)

    fusion = define(build, (None, None), (None,))
    assert outer_persistent.accepts(fusion) is None
    shift, new = fusion.inputs[1], fusion.outputs[1]
    assert isinstance(shift, TensorView)
    fusion.aliases.append(Alias(new, shift))
    assert (
        outer_persistent.accepts(fusion)
        == f"{fusion.outputs[0]} reads {shift}, which {new} overwrites"
    )


def test_reasons_for_refusal() -> None:
    inner = define(lambda x: ops.sub(x, ops.sum(x, [1], True)), (None, None))
    assert "innermost in memory" in str(outer_persistent.accepts(inner))
    alone = define(lambda x: ops.sum(x, [0]), (None, None))
    assert "uses the result of" in str(outer_persistent.accepts(alone))


# ------------------------------------------------------------------ how it is done
def two_inputs(x: TensorView, y: TensorView) -> TensorView:
    h = ops.mul(wide(x), wide(y))
    return ops.sub(h, ops.sum(h, [0], True))


@pytest.mark.parametrize(
    ("build", "count", "dtype", "rows"),
    [
        (softmax, 1, BF16, 2048),
        (softmax, 1, F, 4096),
        (two_inputs, 2, BF16, 1024),
        (two_inputs, 2, F, 2048),
    ],
)
def test_how_many_rows_a_block_holds(build: Build, count: int, dtype: DataType, rows: int) -> None:
    fusion = define(build, *[(None, None)] * count, dtype=dtype)
    assert most_rows(fusion) == rows
    row = scheduler("outer_persistent")
    for n, fits in ((rows, True), (rows + 1, False)):
        shapes = [(n, 4096)] * count
        assert row.suits(fusion, sizes_of(fusion, *shapes)) == fits
        params = row.heuristics(fusion, Facts(sizes_of(fusion, *shapes)), H200)
        assert bool(params.kept) == fits, params
        assert params.threads_x * params.threads_y <= 1024
    assert not row.suits(fusion, {})
    for n, fits in ((rows // 8, True), (rows // 8 + 1, False)):
        assert row.suits(fusion, sizes_of(fusion, *[(n, 4097)] * count)) == fits


# Rows, columns, dtype, threads, rows per thread, columns per thread.
PARAMS = [
    (64, 4096, BF16, (16, 8), 8, 2),
    (64, 4096, F, (16, 8), 8, 2),
    (512, 1024, BF16, (8, 32), 16, 2),
    (512, 1024, F, (4, 32), 16, 2),
    (2048, 384, BF16, (8, 128), 16, 2),
    (128, 1 << 20, BF16, (16, 16), 8, 4),
    (128, 1 << 20, F, (8, 16), 8, 4),
]


@pytest.mark.parametrize(("rows", "columns", "dtype", "threads", "kept", "vector"), PARAMS)
def test_strips_are_sectors_wide_or_lines_where_there_are_many(
    rows: int, columns: int, dtype: DataType, threads: tuple[int, int], kept: int, vector: int
) -> None:
    fusion = define(lambda x: back_to(x, softmax(x)), (None, None), dtype=dtype)
    copy, params = scheduled(fusion, H200, (rows, columns))
    assert isinstance(params, OuterPersistentParams)
    assert ((params.threads_x, params.threads_y), params.kept) == (threads, kept)
    assert (params.vector, params.exact) == (vector, True)
    x, y = threads
    assert loops(copy.outputs[0]) == f"BIDx TIDx{x} S UR{kept} TIDy{y} V{vector}"


def counters(build: Build, inputs: Sequence[torch.Tensor]) -> Counters:
    dtypes = [from_torch(t.dtype) for t in inputs]
    fusion = define(build, *([None] * t.dim() for t in inputs), dtype=dtypes)
    executor = make_executor(fusion, "h200")
    run(executor, inputs, [tuple(inputs[0].shape)])
    (variant,) = executor.variants
    assert isinstance(variant.compiled, CheckedCpuKernel)
    return variant.compiled.counters


@pytest.mark.parametrize(("rows", "dtype"), [(256, torch.bfloat16), (130, torch.float32)])
def test_rows_that_fit_are_read_once_in_vectors(rows: int, dtype: torch.dtype) -> None:
    x = random((rows, 64), dtype)
    found = counters(lambda x: back(softmax(x), dtype), [x])
    words = {2 * x.element_size(): x.numel() // 2}
    assert (found.global_loads, found.global_stores) == (words, words)


def test_longer_columns_are_read_once_by_each_level() -> None:
    x = random((4100, 8), torch.bfloat16)
    found = counters(lambda x: back(softmax(x), torch.bfloat16), [x])
    assert found.global_loads == {4: 3 * x.numel() * 2 // 4}
