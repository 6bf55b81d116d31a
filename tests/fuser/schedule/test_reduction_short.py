"""Tests sums over few outer rows, such as the partial results of a matmul on several devices.

Each thread sums whole columns, and issues all loads of a step before it uses the first value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fuser import ops
from fuser.ir.dtypes import DataType, from_torch
from fuser.ir.fusion import TensorView
from fuser.kernels.executor import FusedKernelExecutor
from fuser.schedule.input_facts import Facts
from fuser.schedule.reduction import ReductionParams
from fuser.support.device import H200
from tests.support.hand_schedules import P
from tests.support.small_fusions import (
    Build,
    define,
    make_executor,
    random,
    run,
    scheduled,
    sizes_of,
)

BF16, F32 = DataType.BFloat16, DataType.Float
# A device with one multiprocessor, so that small tensors have work for all threads, and each thread
# takes several vectors.
ONE = replace(H200, sm_count=1)


def sum_of_rows(dtype: DataType) -> Build:
    return lambda x: ops.cast(ops.sum(x, [0]), dtype)


# ------------------------------------------------------------------ parameters and loops
@pytest.mark.parametrize(
    ("shape", "dtype", "vector", "unroll", "columns"),
    [
        ((2, 2048, 8192), BF16, 8, 2, 1),
        ((4, 2048, 8192), BF16, 8, 4, 1),
        ((8, 2048, 8192), BF16, 8, 8, 1),
        ((4, 2048, 8192), F32, 4, 4, 1),
        ((12, 2048, 8192), BF16, 8, 6, 1),
        ((16, 2048, 8192), BF16, 8, 8, 1),
        ((4, 1024, 50257), BF16, 8, 4, 1),
        # Odd sizes have no vectors; a thread takes several columns instead, if there are enough.
        ((4, 8193, 4097), BF16, 1, 4, 4),
        ((2, 8193, 4097), F32, 1, 2, 4),
        ((4, 129, 37), BF16, 1, 4, 1),
    ],
    ids=str,
)
def test_parameters(
    shape: tuple[int, ...], dtype: DataType, vector: int, unroll: int, columns: int
) -> None:
    fusion = define(sum_of_rows(dtype), (None,) * 3, dtype=dtype)
    _, params = scheduled(fusion, H200, shape)
    assert params == ReductionParams(False, 128, 1, vector, unroll, columns=columns)


def test_more_rows_are_shared_by_threads() -> None:
    fusion = define(sum_of_rows(BF16), (None, None), dtype=BF16)
    _, params = scheduled(fusion, H200, (17, 1 << 24))
    assert isinstance(params, ReductionParams)
    assert (params.threads_x, params.threads_y, params.columns) == (32, 8, 1)


def test_many_inputs_are_read_in_several_steps() -> None:
    """Three inputs of 16 bytes: four rows of them at a time would take 192 bytes of registers."""

    def build(x: TensorView, y: TensorView, z: TensorView) -> TensorView:
        return ops.cast(ops.sum(ops.mul(ops.add(x, y), z), [0]), BF16)

    fusion = define(build, *[(None, None)] * 3, dtype=BF16)
    _, params = scheduled(fusion, H200, *[(4, 1 << 24)] * 3)
    assert params == ReductionParams(False, 128, 1, 8, 2)


def test_loops() -> None:
    fusion = define(sum_of_rows(BF16), (None,) * 2, dtype=BF16)
    copy, params = scheduled(fusion, ONE, (3, 60_002))
    assert params == ReductionParams(False, 128, 1, 2, 3, columns=4)
    assert str(params).endswith("unroll 3, grid 1, columns 4)")
    load = copy.exprs[0].out_tensor
    total = next(op for op in copy.exprs if op.name == "sum").out_tensor
    shared, inside = [P.grid_x, P.block_x], [P.serial, P.unswitch, P.unroll, P.unroll]
    assert [a.ptype for a in load.domain.loop] == [*shared, *inside, P.vectorize]
    assert [a.ptype for a in total.domain.loop] == [*shared, *inside, P.serial]
    assert [a.ptype for a in copy.outputs[0].domain.loop] == [*shared, P.unroll, P.vectorize]
    assert (load.compute_at, total.compute_at) == (4, 2)
    # Adjacent threads take adjacent vectors; the other vectors of a thread are further away.
    facts = Facts(sizes_of(copy, (3, 60_002)))
    extents = [facts.value(copy, a.extent) for a in load.domain.loop]
    assert extents == [-(-30_001 // 512), 128, 1, 1, 3, 4, 2]


def test_short_rows_fill_blocks_together() -> None:
    shape = (70, 4, 37)
    fusion = define(lambda x: ops.sum(x, [1]), (None,) * 3)
    copy, params = scheduled(fusion, H200, shape)
    assert params == ReductionParams(False, 128, 1, 1, 4)
    facts = Facts(sizes_of(copy, shape))
    extents = [facts.value(copy, a.extent) for a in copy.outputs[0].domain.loop]
    assert extents == [-(-70 * 37 // 128), 128, 1, 1, 4]


# ------------------------------------------------------------------ text
def text_of(rows: int | None, *, rows_now: int = 4) -> str:
    fusion = define(sum_of_rows(BF16), (rows, None, None), dtype=BF16)
    executor = FusedKernelExecutor(fusion, scheduler="reduction", name="sum_of_rows", device=H200)
    x = torch.empty((rows_now, 2048, 8192), dtype=torch.bfloat16, device="meta")
    sizes = sizes_of(fusion, x.shape)
    launch = executor.launch_for([x], [x[0]], sizes=sizes, device=torch.device("cpu"))
    assert launch is not None
    return launch.variant.kernel.source.text


def test_rows_known_before_are_one_step_without_a_loop() -> None:
    text = text_of(4)
    assert "__launch_bounds__(128)" in text
    assert "k0 < 4" in text and "k0 < s" not in text and "else" not in text
    assert text.count("load_vec<8>") == text.count("store_vec_cs<8>") == 1
    assert "reduce" not in text and "/" not in text and "%" not in text


def test_steps_in_a_loop_leave_registers_for_all_loads() -> None:
    """Without a bound on registers, the compiler waits for the first loads of a step before it
    issues the last."""
    text = text_of(None)
    assert "__launch_bounds__(128, 6)" in text
    fast = text[text.index("if (") : text.index("else")]
    assert fast.count("if (") == 1 and "k1 < 4" in fast
    assert fast.index("load_vec<8>") < fast.index("+=")


# ------------------------------------------------------------------ numbers
def executor_of(
    build: Build, *inputs: torch.Tensor, rows: int | None = None
) -> FusedKernelExecutor:
    shapes = [(rows, *[None] * (x.dim() - 1)) for x in inputs]
    fusion = define(build, *shapes, dtype=from_torch(inputs[0].dtype))
    return FusedKernelExecutor(
        fusion, scheduler="reduction", name="few_rows", device=ONE, checked=True
    )


def check(
    build: Build,
    reference: Callable[..., torch.Tensor],
    *inputs: torch.Tensor,
    rows: int | None = None,
) -> ReductionParams:
    executor = executor_of(build, *inputs, rows=rows)
    want = reference(*(x.double() for x in inputs))
    (got,) = run(executor, inputs, [want.shape])
    tolerance = 1e-5 if inputs[0].dtype is torch.float32 else 1e-2
    torch.testing.assert_close(got, want.to(got.dtype), rtol=tolerance, atol=10 * tolerance)
    params = executor.variants[-1].params
    assert isinstance(params, ReductionParams)
    return params


@pytest.mark.parametrize("is_constant", [False, True], ids=["symbol", "constant"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 9, 11, 16])
@pytest.mark.parametrize("columns", [(64, 136), (63, 131)], ids=str)
def test_any_number_of_rows(rows: int, columns: tuple[int, int], is_constant: bool) -> None:
    x = random((rows, *columns), torch.bfloat16)
    known = rows if is_constant and rows > 1 else None
    params = check(sum_of_rows(BF16), lambda x: x.sum(0), x, rows=known)
    assert params.threads_y == 1


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "rows with gaps": lambda x: x[:, :, :96],
    "misaligned": lambda x: x[:, :, 1:97],
    "every other row": lambda x: x[::2, ::2],
    "every other column": lambda x: x[:, :, ::2],
    "permuted": lambda x: x.permute(0, 2, 1),
    "rows in the middle": lambda x: x.permute(1, 0, 2)[:7],
    "rows innermost": lambda x: x.permute(2, 1, 0)[:7],
    "expanded rows": lambda x: x[:1].expand(5, -1, -1),
    "expanded columns": lambda x: x[:, :, :1].expand(-1, -1, 40),
    "expanded middle": lambda x: x[:, :1].expand(-1, 30, -1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout](random((6, 50, 104), dtype))
    check(sum_of_rows(from_torch(dtype)), lambda x: x.sum(0), x)


@pytest.mark.parametrize("shape", [(70, 4, 37), (300, 3, 5), (9, 2, 1000), (5000, 4, 1)], ids=str)
def test_rows_between_other_axes(shape: tuple[int, int, int]) -> None:
    """The threads of a block process columns of several outer rows."""
    x = random(shape, torch.float32)
    check(lambda x: ops.sum(x, [1]), lambda x: x.sum(1), x)


@pytest.mark.parametrize("columns", [16384, 16383], ids=str)
def test_a_thread_takes_several_vectors_of_columns(columns: int) -> None:
    params = check(sum_of_rows(F32), lambda x: x.sum(0), random((1, columns), torch.float32))
    assert params.columns > 1
    gaps = random((2, 3, columns), torch.float16)[:, 1]
    assert check(sum_of_rows(F32), lambda x: x.sum(0), gaps).columns > 1


def test_what_surrounds_the_sum() -> None:
    """Before the sum, two tensors and one without the row axis are read; after it,
    another tensor."""
    x, y = (random((4, 24, 104), torch.bfloat16, k) for k in range(2))
    b = random((24, 104), torch.bfloat16, 2)

    def build(x: TensorView, y: TensorView, b: TensorView) -> TensorView:
        total = ops.sum(ops.mul(ops.add(x, ops.broadcast(b, [True, False, False])), y), [0])
        return ops.cast(ops.add(ops.relu(total), b), BF16)

    fusion = define(build, x.shape, y.shape, b.shape, dtype=BF16)
    executor = FusedKernelExecutor(
        fusion, scheduler="reduction", name="k", device=ONE, checked=True
    )
    (got,) = run(executor, [x, y, b], [b.shape])
    want = ((x.double() + b.double()) * y.double()).sum(0).relu() + b.double()
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-1)


def test_variance_over_few_rows() -> None:
    def build(x: TensorView) -> TensorView:
        return ops.var_mean(x, [0], 1, False)[0]

    x = random((5, 33, 36), torch.float32) + 3.0
    check(build, lambda x: x.var(0), x)


def test_a_kernel_serves_other_numbers_of_rows() -> None:
    """Small inputs reuse the kernel for fewer rows than a step, and for more than one step."""
    executor = executor_of(sum_of_rows(F32), random((4, 8, 40), torch.float32))
    for rows in (4, 3, 2, 6, 15):
        x = random((rows, 8, 40), torch.float32, rows)
        (got,) = run(executor, [x], [(8, 40)])
        torch.testing.assert_close(got, x.double().sum(0).float(), rtol=1e-5, atol=1e-5)
    assert len(executor.variants) == 1


@pytest.mark.parametrize(
    ("build", "bounds"),
    [
        (lambda x: ops.sum(x, [0]), "(256, 4)"),
        (lambda x: ops.sum(x, [0, 1]), "(256, 4)"),
        # Their arrays do not fit in the registers that this limit leaves.
        (lambda x: list(ops.var_mean(x, [0])), "(256)"),
        (lambda x: [f(x, [0]) for f in (ops.sum, ops.max, ops.min, ops.prod)], "(256)"),
    ],
    ids=["columns", "all", "welford", "many"],
)
def test_loads_of_long_sums_are_under_way_together(build: Build, bounds: str) -> None:
    executor = make_executor(define(build, (None, None)), "h200")
    fusion = executor.fusion
    x = torch.empty(8192, 1536, device="meta")
    outs = [torch.empty(1536 if tv.ndim else (), device="meta") for tv in fusion.outputs]
    executor.bind([x], outs, sizes=sizes_of(fusion, x.shape))
    assert f"__launch_bounds__{bounds} " in executor.variants[0].kernel.source.text
