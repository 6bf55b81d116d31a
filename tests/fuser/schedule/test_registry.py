"""Tests the automatic schedulers: the fusions they accept, their loops, and the number of
kernels."""

from __future__ import annotations

import itertools

import pytest
import torch

from fuser import FusionDefinition, ops
from fuser.ir.dtypes import DataType, from_torch
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.types import IterType, ParallelType
from fuser.ir.verify import verify_fusion
from fuser.schedule import SCHEDULERS, find_scheduler, reduction, rejections, scheduler
from fuser.schedule.input_facts import Facts
from fuser.schedule.pointwise import PointwiseParams
from fuser.schedule.reduction import ReductionParams
from fuser.support.device import CPU, H200
from tests.support.counted_calls import calls_of
from tests.support.small_fusions import define, make_executor, random, run, scheduled, sizes_of

BF16 = DataType.BFloat16
PT = ParallelType


def gelu_mul_add(x: TensorView, y: TensorView, z: TensorView) -> TensorView:
    inner = ops.mul(ops.add(1.0, ops.erf(ops.mul(x, 0.70710678))), ops.mul(x, 0.5))
    return ops.cast(ops.add(ops.mul(inner, y), z), BF16)


def loops(tv: TensorView) -> str:
    """Returns the types of the loop axes with the constant extents of inner ones: `BIDx US UR TIDx
    V8`."""
    parts = []
    for a in tv.domain.loop:
        name = {PT.grid_x: "BIDx", PT.grid_y: "BIDy", PT.block_x: "TIDx", PT.block_y: "TIDy"}
        role = name.get(a.ptype, a.ptype.text)
        size = str(a.extent) if not a.extent.is_symbolic() and role != "US" else ""
        parts.append(("r" if a.kind is IterType.reduction else "") + role + size)
    return " ".join(parts)


# ------------------------------------------------------------------ pointwise
def test_contiguous_tensors_are_one_run() -> None:
    fusion = define(gelu_mul_add, *[(None, None)] * 3, dtype=BF16)
    shape = (16384, 8192)
    copy, params = scheduled(fusion, H200, shape, shape, shape)
    verify_fusion(copy)
    assert params == PointwiseParams(128, 1, 8, 1)
    (out,) = copy.outputs
    assert loops(out) == "BIDx US TIDx128 V8"
    registers = out.definition().inputs[0]  # pyright: ignore[reportOptionalMemberAccess]
    assert (loops(registers), registers.compute_at) == ("BIDx US TIDx128 S8", 3)
    for x in copy.inputs:
        (load,) = x.uses()  # pyright: ignore[reportAttributeAccessIssue]
        assert loops(load.out_tensor) == "BIDx US TIDx128 V8"
        assert load.out_tensor.compute_at == 2
    inlined = [tv for tv in copy.tensors() if tv.compute_at == 4]
    assert len(inlined) == len(copy.exprs) - 5


def test_a_bias_makes_two_runs_and_is_loaded_in_vectors() -> None:
    fusion = define(
        lambda x, b: ops.cast(ops.add(x, ops.broadcast(b, [True, False])), BF16),
        (None, None),
        (None,),
        dtype=BF16,
    )
    copy, params = scheduled(fusion, H200, (16384, 8192), (8192,))
    assert str(params) == "pointwise(threads 128x1, vector 8, unroll 8, inner on x)"
    assert loops(copy.outputs[0]) == "BIDy BIDx US UR8 TIDx128 V8"
    bias = copy.inputs[1].uses()[0].out_tensor  # pyright: ignore[reportAttributeAccessIssue]
    assert (loops(bias), bias.compute_at) == ("BIDx US TIDx128 V8", 2)


def test_short_rows_share_a_block() -> None:
    fusion = define(lambda x, b: ops.add(x, ops.broadcast(b, [True, False])), (None, None), (None,))
    copy, params = scheduled(fusion, H200, (100000, 24), (24,))
    assert str(params).startswith("pointwise(threads 8x16, vector 4")
    assert loops(copy.outputs[0]).startswith("BIDy BIDx US")


def test_many_rows_leave_grid_y() -> None:
    fusion = define(lambda x, b: ops.add(x, ops.broadcast(b, [True, False])), (None, None), (None,))
    _, params = scheduled(fusion, H200, (10_000_000, 1024), (1024,))
    assert isinstance(params, PointwiseParams)
    assert not params.inner_on_x


@pytest.mark.parametrize(
    ("cols", "alignment", "vector"),
    [(8192, 16, 8), (8192, 8, 4), (8192, 2, 1), (8196, 16, 4), (8193, 16, 8), (770, 16, 8)],
)
def test_vector_width_follows_extent_and_alignment(cols: int, alignment: int, vector: int) -> None:
    fusion = define(
        lambda x, b: ops.cast(ops.add(x, ops.broadcast(b, [True, False])), BF16),
        (None, None),
        (None,),
        dtype=BF16,
    )
    facts = Facts(sizes_of(fusion, (16384, cols), (cols,)), {fusion.inputs[0].number: alignment})  # pyright: ignore[reportAttributeAccessIssue]
    params = scheduler("pointwise").heuristics(fusion, facts, H200)
    assert params.vector == vector


def test_the_widest_element_decides_the_vector() -> None:
    fusion = define(lambda x: ops.cast(x, DataType.Double), (None,), dtype=BF16)
    _, params = scheduled(fusion, H200, (1 << 20,))
    assert isinstance(params, PointwiseParams)
    assert params.vector == 2


def test_cpu_schedules_are_plain_loops() -> None:
    fusion = define(gelu_mul_add, *[(None, None)] * 3, dtype=BF16)
    copy, params = scheduled(fusion, CPU, (7, 96), (7, 96), (7, 96))
    assert str(params) == "pointwise(loops)"
    assert str(copy.outputs[0].domain) == "[iS39{( i0 * i2 )}]" or loops(copy.outputs[0]) == "S"
    assert all(
        tv.compute_at == len(tv.domain.loop)
        for tv in copy.tensors()
        if tv.uses() and tv.definition()
    )


@pytest.mark.parametrize("device", [CPU, H200], ids=["cpu", "h200"])
def test_twenty_shapes_need_at_most_four_kernels(device: object) -> None:
    fusion = define(gelu_mul_add, *[(None, None)] * 3, dtype=BF16)
    rows, columns = (7, 64, 1000, 4096), (96, 100, 384, 770, 1536)
    chosen = set()
    for shape in itertools.product(rows, columns):
        facts = Facts(sizes_of(fusion, shape, shape, shape))
        chosen.add(scheduler("pointwise").heuristics(fusion, facts, device))  # pyright: ignore[reportArgumentType]
    assert len(chosen) <= 4, chosen


def test_permuted_tensors_run_in_their_memory_order() -> None:
    fusion = define(lambda x: ops.neg(x), (None, None))
    for tv in (*fusion.inputs, *fusion.outputs):
        assert isinstance(tv, TensorView)
        tv.domain = tv.domain.with_allocation(tv.domain.logical_numbers[::-1], (True, True))
    copy, params = scheduled(fusion, H200, (4096, 4096))
    out = copy.outputs[0]
    merge = out.domain.transforms[0]
    assert merge.inputs == out.domain.logical_numbers[::-1]
    assert isinstance(params, PointwiseParams)
    assert params.vector == 4


# ------------------------------------------------------------------ reduction
def row_sum(x: TensorView) -> TensorView:
    return ops.cast(ops.sum(x, [1]), BF16)


def column_sum(x: TensorView) -> TensorView:
    return ops.cast(ops.sum(x, [0]), BF16)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((16384, 8192), ReductionParams(True, 64, 2, 8, 2, 1)),
        ((32768, 1024), ReductionParams(True, 32, 4, 8, 2, 1)),
        ((16384, 64), ReductionParams(True, 8, 16, 8, 1, 1)),
        ((16384, 770), ReductionParams(True, 32, 4, 8, 2, 1, shifted=True)),
        ((16, 65536), ReductionParams(True, 256, 1, 8, 4, 8)),
        ((1, 1 << 24), ReductionParams(True, 256, 1, 8, 4, 512)),
    ],
)
def test_inner_reduction_parameters(shape: tuple[int, int], expected: ReductionParams) -> None:
    copy, params = scheduled(define(row_sum, (None, None), dtype=BF16), H200, shape)
    verify_fusion(copy)
    assert params == expected


def test_inner_reduction_loops() -> None:
    copy, _ = scheduled(define(row_sum, (None, None), dtype=BF16), H200, (32768, 1024))
    load = copy.exprs[0].out_tensor
    total = next(op for op in copy.exprs if op.name == "sum").out_tensor
    assert (loops(load), load.compute_at) == ("BIDx TIDy4 S US UR2 TIDx32 V8", 4)
    assert (loops(total), total.compute_at) == ("BIDx TIDy4 rS rUS rUR2 rTIDx32 rS8", 2)
    assert loops(copy.outputs[0]) == "BIDx TIDy4"


def test_few_rows_are_split_over_the_grid() -> None:
    copy, _ = scheduled(define(row_sum, (None, None), dtype=BF16), H200, (16, 65536))
    total = next(op for op in copy.exprs if op.name == "sum").out_tensor
    assert loops(total) == "BIDx rBIDy8 rS rUS rUR4 rTIDx256 rS8"


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((16384, 8192), ReductionParams(False, 32, 8, 8, 8, 16)),
        ((32768, 1024), ReductionParams(False, 32, 8, 8, 8, 128)),
        ((100000, 8), ReductionParams(False, 1, 256, 8, 8, 48)),
        # Strips of 32 bytes that one block sums, so that no blocks wait for each other.
        ((512, 1024), ReductionParams(False, 2, 128, 8, 4, 1)),
        ((2048, 384), ReductionParams(False, 32, 8, 4, 8, 32)),
        ((4096, 770), ReductionParams(False, 32, 8, 2, 16, 32)),
        ((4096, 50257), ReductionParams(False, 32, 16, 1, 16, 1)),
    ],
)
def test_outer_reduction_parameters(shape: tuple[int, int], expected: ReductionParams) -> None:
    copy, params = scheduled(define(column_sum, (None, None), dtype=BF16), H200, shape)
    verify_fusion(copy)
    assert params == expected
    # About one wave of blocks of 256 threads, each with enough outstanding loads of 16 bytes.
    assert isinstance(params, ReductionParams)


@pytest.mark.parametrize("bytes_alone", [0, 65536])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(2048, 24), (1025, 7), (700, 1), (17, 68), (1, 40)], ids=str)
def test_columns_of_few_bytes(
    shape: tuple[int, int], dtype: torch.dtype, bytes_alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A strip of columns is summed by one block, or by several that exchange partial sums."""
    monkeypatch.setattr(reduction, "BYTES_ALONE", bytes_alone)

    def build(x: TensorView) -> tuple[TensorView, TensorView]:
        wide = ops.cast(x, DataType.Float) if dtype is torch.bfloat16 else x
        return ops.sum(wide, [0]), ops.max(wide, [0])

    x = random(shape, dtype)
    executor = make_executor(define(build, (None, None), dtype=from_torch(dtype)), "h200")
    total, largest = run(executor, [x], [shape[1:]] * 2)
    assert torch.equal(largest.double(), x.double().amax(0))
    torch.testing.assert_close(total.double(), x.double().sum(0), rtol=1e-5, atol=1e-3)


def test_outer_reduction_loops() -> None:
    copy, _ = scheduled(define(column_sum, (None, None), dtype=BF16), H200, (16384, 8192))
    load = copy.exprs[0].out_tensor
    total = next(op for op in copy.exprs if op.name == "sum").out_tensor
    assert (loops(load), load.compute_at) == ("BIDx TIDx32 BIDy16 S US UR8 TIDy8 V8", 5)
    assert (loops(total), total.compute_at) == ("BIDx TIDx32 rBIDy16 rS rUS rUR8 rTIDy8 S8", 2)
    assert loops(copy.outputs[0]) == "BIDx TIDx32 V8"


def test_cpu_reductions_are_plain_loops() -> None:
    inner, _ = scheduled(define(row_sum, (None, None), dtype=BF16), CPU, (7, 96))
    total = next(op for op in inner.exprs if op.name == "sum").out_tensor
    assert (loops(total), total.compute_at) == ("S rS", 1)
    outer, _ = scheduled(define(column_sum, (None, None), dtype=BF16), CPU, (7, 96))
    total = next(op for op in outer.exprs if op.name == "sum").out_tensor
    assert (loops(total), total.compute_at) == ("S US rS S256", 2)


# ------------------------------------------------------------------ accepting
def test_reasons_for_refusal() -> None:
    def softmax(x: TensorView) -> TensorView:
        return ops.div(x, ops.broadcast(ops.sum(x, [1]), [False, True]))

    found = rejections(define(softmax, (None, None)))
    persistent = {"outer_persistent", "inner_outer_persistent"}
    assert set(found) == {"transpose", "pointwise", "reduction", *persistent}
    assert "one memory order" in found["transpose"]
    assert found["inner_outer_persistent"] == "no sum over rows is computed in partial sums"
    assert "is not pointwise" in found["pointwise"]
    assert "repeats the result" in found["reduction"]
    two = define(lambda x, y: (ops.neg(x), ops.neg(y)), (None,), (None, None))
    assert "does not have the axes" in rejections(two)["pointwise"]
    mixed = define(lambda x: (ops.sum(x, [0]), ops.sum(x, [1])), (None, None))
    assert "reduce different axes" in rejections(mixed)["reduction"]
    twice = define(lambda x: ops.sum(ops.sum(x, [1]), [0]), (None, None))
    assert find_scheduler(twice) is None
    transposed = define(lambda x: ops.add(x, ops.permute(x, [1, 0])), (None, None))
    assert "the same axis" in rejections(transposed)["pointwise"]


def test_every_scheduler_is_found_by_its_name() -> None:
    names = ["transpose", "pointwise", "reduction"]
    names += ["inner_persistent", "outer_persistent", "inner_outer_persistent"]
    assert list(SCHEDULERS) == names
    assert find_scheduler(define(gelu_mul_add, *[(None, None)] * 3)) == "pointwise"
    assert find_scheduler(define(row_sum, (None, None))) == "reduction"


def chain(length: int) -> Fusion:
    def build(x: TensorView, y: TensorView) -> TensorView:
        for k in range(length):
            x = ops.add(ops.sin(x), y) if k % 2 else ops.mul(x, y)
        return x

    return define(build, (None, None), (None, None))


def test_scheduling_is_near_linear() -> None:
    def calls(length: int) -> int:
        fusion = chain(length)
        return calls_of(lambda: scheduled(fusion, H200, (1024, 1024), (1024, 1024))).total()

    short, long = calls(40), calls(320)
    assert long < 9 * short, (short, long)


def test_an_input_that_is_read_elsewhere_is_not_overwritten() -> None:
    fusion = define(lambda x: ops.neg(ops.permute(x, [1, 0])), (None, None))
    out, x = fusion.outputs[0], fusion.inputs[0]
    assert isinstance(x, TensorView)
    assert find_scheduler(fusion) == "transpose"
    fusion.add_output(out, alias_input=x)
    assert "overwrites" in rejections(fusion)["pointwise"]
    assert "overwrites" in rejections(fusion)["transpose"]


# ------------------------------------------------------------------ one result of many
@pytest.mark.parametrize("options", [[], ["schedules_for(h200)"]], ids=["cpu", "h200"])
@pytest.mark.parametrize("kind", ["sum", "var_mean"])
@pytest.mark.parametrize(("dims", "shape"), [([0], [5, 7]), ([1], [50, 300]), ([0, 1], [3, 5, 70])])
def test_one_result_meets_all(
    kind: str, dims: list[int], shape: list[int], options: list[str]
) -> None:
    """A thread keeps only its own results; results of other threads are read from memory."""
    (kept,) = {*range(len(shape))} - {*dims}
    bounds = (
        [int(k == kept) for k in range(len(shape))],
        [1 + (k == kept) for k in range(len(shape))],
    )
    with FusionDefinition() as fd:
        x = fd.define_tensor(shape)
        if kind == "sum":
            reduced = fd.ops.sum(x, dims, True)
        else:
            reduced = fd.ops.var_mean(x, dims, 0, True)[0]
        second = fd.ops.slice(reduced, *bounds)
        fd.add_output(fd.ops.mul(x, fd.ops.add(second, reduced)))
    given = torch.rand(shape)
    wide = given.double()
    expected = wide.sum(dims, True) if kind == "sum" else wide.var(dims, correction=0, keepdim=True)
    expected = wide * (expected.narrow(kept, 1, 1) + expected)
    (out,) = fd.execute([given], _enable_options=options)
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.finding("G37")
@pytest.mark.parametrize(
    ("dtype", "places", "is_variance", "expected"),
    [
        (BF16, 3136, True, (224, 1)),
        (BF16, 3136, False, (416, 1)),
        (DataType.Float, 3136, True, (416, 1)),
        (DataType.Float, 3136, False, (416, 1)),
        # Whole tiles with power-of-two sizes are kept.
        (BF16, 4096, True, (256, 2)),
    ],
)
def test_runs_of_images_fill_whole_warps(
    dtype: DataType, places: int, is_variance: bool, expected: tuple[int, int]
) -> None:
    """Channels of images of 56 x 56: few rows, each with many runs of 392 or 784 vectors."""

    def statistics(x: TensorView) -> TensorView:
        wide = ops.cast(x, DataType.Float)
        return ops.var_mean(wide, [0, 2], 0)[0] if is_variance else ops.sum(wide, dims=[0, 2])

    fusion = define(statistics, (None, None, None), dtype=dtype)
    _, params = scheduled(fusion, H200, (64, 256, places))
    assert isinstance(params, ReductionParams) and params.inner
    assert (params.threads_x, params.grid) == expected
    assert params.unroll_outer == (places == 3136)
    few = scheduled(fusion, H200, (64, 16, places))[1]
    assert isinstance(few, ReductionParams) and few.grid > 1


@pytest.mark.finding("G37")
def test_looked_up_rows_are_taken_by_few_blocks() -> None:
    def build(x: TensorView, places: TensorView) -> TensorView:
        return ops.take_along_axis(x, places, 1)

    kinds = [BF16, DataType.Int]
    fusion = define(build, (None, None), (None, None), dtype=kinds)
    shape = (8192, 8192)
    _, params = scheduled(fusion, H200, shape, shape)
    assert params == PointwiseParams(512, 1, 2, 8, inner_on_x=True, along=True)
    # Rows as wide as a block do not need it, and few rows need all multiprocessors.
    _, params = scheduled(fusion, H200, (8192, 128), (8192, 128))
    assert isinstance(params, PointwiseParams) and not params.along
    _, params = scheduled(fusion, H200, (16, 8192), (16, 8192))
    assert isinstance(params, PointwiseParams) and params.unroll < 8


@pytest.mark.finding("G37")
@pytest.mark.parametrize("device", ["cpu", "h200"])
@pytest.mark.parametrize("shape", [(3, 2048), (2, 9001), (5, 300), (1, 40_000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_elements_of_rows_are_looked_up(
    shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    x = random(shape, dtype)
    places = torch.randint(0, shape[1], shape, generator=torch.Generator().manual_seed(2))
    for fixed in (False, True):
        kinds = [shape if fixed else (None, None)] * 2
        fusion = define(
            lambda x, places: ops.take_along_axis(x, places, 1),
            *kinds,
            dtype=[from_torch(dtype), DataType.Int],
        )
        (out,) = run(make_executor(fusion, device), [x, places], [shape])
        assert torch.equal(out, x.gather(1, places))
