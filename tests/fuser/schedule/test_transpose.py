"""Tests the transpose scheduler: tiles in shared memory, for every order, type and size.

Kernels run with the H200's schedules on the CPU in checked mode. Accesses out of bounds, reads of
uninitialised memory and races in shared memory are errors.
"""

from __future__ import annotations

import itertools
import math
import random as python_random
from collections.abc import Sequence
from functools import reduce

import pytest
import torch

from fuser import ops
from fuser.ir.dtypes import DataType, from_torch
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.text.parser import parse_fusion
from fuser.ir.text.printer import fusion_text
from fuser.ir.verify import verify_fusion
from fuser.kernels.executor import FusedKernelExecutor
from fuser.schedule import find_scheduler, rejections, scheduler
from fuser.schedule.input_facts import Facts
from fuser.schedule.pointwise import PointwiseParams
from fuser.schedule.transpose import TransposeParams
from fuser.support.device import CPU, H200
from fuser.support.errors import UnsupportedError
from fuser.support.record import replace
from tests.support.small_fusions import Build, define, new_input, random, run, sizes_of

D = DataType


def turned(x: TensorView, order: Sequence[int]) -> TensorView:
    return ops.permute(x, list(order))


def forced(fusion: Fusion, params: TransposeParams) -> FusedKernelExecutor:
    """Returns an executor in checked mode whose tile does not depend on sizes."""
    made = FusedKernelExecutor(
        fusion, scheduler="transpose", name="tile", device=H200, checked=True
    )
    made.scheduler = replace(made.scheduler, chooser=lambda fusion, device: lambda facts: params)
    return made


def launched(executor: FusedKernelExecutor) -> object:
    """Returns the parameters of the variant that was compiled."""
    (variant,) = [v for v in executor.variants if v.compiled is not None]
    return variant.params


def check(
    build: Build,
    inputs: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    params: TransposeParams,
    *,
    shapes: Sequence[Sequence[int | None]] | None = None,
) -> FusedKernelExecutor:
    """Runs with these parameters, and compares the results bit by bit."""
    given = shapes or [[None if n > 1 else 1 for n in t.shape] for t in inputs]
    fusion = define(build, *given, dtype=from_torch(inputs[0].dtype))
    executor = forced(fusion, params)
    outs = run(executor, inputs, [w.shape for w in wanted])
    for out, want in zip(outs, wanted, strict=True):
        assert torch.equal(out, want), (params, [tuple(t.shape) for t in inputs])
    return executor


# ------------------------------------------------------------------ every order, type and size
ORDERS = [
    order
    for rank in (2, 3, 4)
    for order in itertools.permutations(range(rank))
    if order[-1] != rank - 1
]
TYPES = [torch.bool, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64]


def widths(extent: int, dtype: torch.dtype) -> list[int]:
    return [v for v in (1, 2, 4, 8, 16) if v * dtype.itemsize <= 16 and extent % v == 0]


def any_tile(
    draw: python_random.Random, dtype: torch.dtype, extents: Sequence[int]
) -> TransposeParams:
    """Returns a random tile, with vectors that divide these innermost extents."""
    vector, staged = (draw.choice(widths(n, dtype)) for n in extents)
    edge, staged_edge = (
        v * draw.choice([m for m in (1, 2, 4, 8, 16, 32) if m * v <= 64]) for v in (vector, staged)
    )
    threads = draw.choice(
        [t for t in (32, 64, 128) if t * max(vector, staged) <= edge * staged_edge] or [1]
    )
    return TransposeParams(threads, vector, staged, edge, staged_edge)


@pytest.mark.parametrize("order", ORDERS, ids=lambda o: "".join(map(str, o)))
def test_every_order(order: tuple[int, ...]) -> None:
    """The extents are below, at and above the tile's, and some are no multiples of vectors. Axes
    that are adjacent in both orders are one run."""
    draw = python_random.Random(str(order))
    for _ in range(3):
        dtype = draw.choice(TYPES)
        shape = [draw.choice([2, 3, 5, 8, 16, 31, 32, 33, 48]) for _ in order]
        if len(order) > 2:
            shape = [min(n, 16) for n in shape]
        x = random(shape, dtype)
        want = x.permute(order).contiguous()
        tile = any_tile(draw, dtype, (want.shape[-1], shape[-1]))
        executor = check(lambda t: turned(t, order), [x], [want], tile)
        assert launched(executor) == tile


@pytest.mark.parametrize("ones", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)], ids=str)
def test_axes_of_one_element(ones: tuple[int, ...]) -> None:
    """Axes of extent 1 are no axes of a tile, at any position."""
    shape = [1 if one else n for one, n in zip(ones, (12, 36, 20, 8), strict=True)]
    x = random(shape, torch.float32)
    count = 0
    for order in itertools.permutations(range(4)):
        real = [k for k in order if not ones[k]]
        if real[-1] == max(real):
            continue  # the innermost axis stays
        count += 1
        if count % 3 == 0:
            want = x.permute(order).contiguous()
            check(lambda t, order=order: ops.neg(turned(t, order)), [x], [-want], TILE)
    assert count == 16


# ------------------------------------------------------------------ who passes through the tile
TILE = TransposeParams(64, 4, 4, 32, 16)
SCALAR = TransposeParams(32, 1, 1, 16, 8)


@pytest.mark.parametrize("tile", [TILE, SCALAR], ids=str)
@pytest.mark.parametrize("shape", [(36, 20), (64, 32), (4, 100), (100, 4)], ids=str)
def test_several_inputs_and_outputs_on_both_sides(
    tile: TransposeParams, shape: tuple[int, int]
) -> None:
    """Direct and staged inputs and outputs, of which other ops read some."""
    x, y = random(shape, torch.float32), random(shape, torch.float32, 1)
    z, w = (random(shape[::-1], torch.float32, seed) for seed in (2, 3))

    def build(*given: TensorView) -> list[TensorView]:
        x, y, z, w = given
        a = ops.add(x, y)
        b = ops.mul(turned(a, (1, 0)), z)
        c = ops.add(b, w)
        return [a, ops.neg(b), c, turned(ops.mul(c, z), (1, 0))]

    a = x + y
    b = a.t() * z
    c = b + w
    wanted = [a, -b, c, (c * z).t()]
    executor = check(build, [x, y, z, w], [v.contiguous() for v in wanted], tile)
    assert launched(executor) == tile


def test_outputs_are_staged_where_they_are_fewer() -> None:
    """The sum of three transposed tensors is computed along their axis, with one tile instead of
    three."""
    shape = (40, 24)
    inputs = [random(shape, torch.float32, seed) for seed in range(3)]

    def build(*given: TensorView) -> TensorView:
        a, b, c = (turned(t, (1, 0)) for t in given)
        return ops.add(ops.add(a, b), c)

    want = (inputs[0] + inputs[1] + inputs[2]).t().contiguous()
    check(build, inputs, [want], TILE)
    copy = applied(define(build, *[(None, None)] * 3), TILE)
    assert len(tiles_of(copy)) == 1


def applied(fusion: Fusion, params: object) -> Fusion:
    copy, _ = fusion.copy()
    scheduler("transpose").apply(copy, params)
    return copy


def tiles_of(fusion: Fusion) -> list[TensorView]:
    return [tv for tv in fusion.tensors() if tv.memory.name == "shared"]


def test_a_scheduled_fusion_is_whole_and_has_a_text() -> None:
    """The padding of a tile is an axis of its allocation domain."""
    copy = applied(define(lambda x: [ops.neg(turned(x, (1, 0))), ops.abs(x)], (None, None)), TILE)
    verify_fusion(copy)
    text = fusion_text(copy)
    assert fusion_text(parse_fusion(text)) == text and "Resize" in text


@pytest.mark.parametrize("tile", [TILE, SCALAR], ids=str)
def test_operands_that_lack_axes_are_read_in_place(tile: TransposeParams) -> None:
    x = random((3, 20, 36), torch.float32)
    row, column = random((20,), torch.float32, 1), random((36, 1), torch.float32, 2)
    plane = random((20, 36), torch.float32, 3)

    def build(x: TensorView, row: TensorView, column: TensorView, plane: TensorView) -> TensorView:
        t = turned(x, (0, 2, 1))
        return ops.add(ops.mul(ops.add(t, row), column), turned(plane, (1, 0)))

    want = (x.transpose(1, 2) + row) * column + plane.t()
    executor = check(build, [x, row, column, plane], [want.contiguous()], tile)
    assert launched(executor) == tile


@pytest.mark.parametrize("tile", [TILE, SCALAR], ids=str)
def test_outputs_with_broadcast_axes(tile: TransposeParams) -> None:
    x = random((20, 36), torch.float32)

    def build(x: TensorView) -> list[TensorView]:
        t = turned(x, (1, 0))
        kept = ops.broadcast(ops.neg(t), [False, True, False])
        return [t, kept, ops.broadcast(ops.abs(x), [False, False, True])]

    wanted = [x.t().contiguous(), -x.t()[:, None].contiguous(), x.abs()[:, :, None]]
    check(build, [x], wanted, tile)


def test_types_of_several_sizes() -> None:
    """Each tile is padded for its own element size; the widest type determines the vectors."""
    x = random((64, 48), torch.bfloat16)

    def build(x: TensorView) -> list[TensorView]:
        t = ops.cast(turned(x, (1, 0)), D.Double)
        return [t, ops.gt(t, 0.0), ops.cast(turned(ops.neg(t), (1, 0)), D.Float)]

    wide = x.double().t().contiguous()
    tile = TransposeParams(64, 2, 4, 16, 32)
    check(build, [x], [wide, wide > 0, -x.float()], tile)


@pytest.mark.parametrize("seed", range(12))
def test_random_fusions_in_random_tiles(seed: int) -> None:
    """Inputs and outputs have one of two orders each, and the tile is random."""
    draw = python_random.Random(seed)
    dtype = draw.choice([torch.float32, torch.float64, torch.bfloat16])
    shape = [draw.choice([3, 8, 16, 20, 33, 64]) for _ in range(2)]
    sides = [draw.random() < 0.5 for _ in range(draw.randint(1, 3))]
    results = [not sides[0], *(draw.random() < 0.5 for _ in range(draw.randint(0, 2)))]
    inputs = [random(shape[::-1] if side else shape, dtype, k) for k, side in enumerate(sides)]

    def build(*given: TensorView) -> list[TensorView]:
        straight = [turned(t, (1, 0)) if s else t for s, t in zip(sides, given, strict=True)]
        total = reduce(ops.maximum, straight)
        values = [ops.neg(total) if k % 2 else ops.abs(total) for k in range(len(results))]
        sided = [turned(v, (1, 0)) if s else v for s, v in zip(results, values, strict=True)]
        return [ops.cast(v, from_torch(dtype)) for v in sided]

    total = reduce(torch.maximum, [t.t() if s else t for s, t in zip(sides, inputs, strict=True)])
    values = [-total if k % 2 else total.abs() for k in range(len(results))]
    wanted = [(v.t() if s else v).contiguous() for s, v in zip(results, values, strict=True)]
    # The scheduler decides which extent belongs to which edge, so the vectors divide both.
    both = math.gcd(*shape)
    tile = any_tile(draw, torch.float64, (both, both))
    assert launched(check(build, inputs, wanted, tile)) == tile


# ------------------------------------------------------------------ layouts
LARGE = random((280, 520), torch.float32)
ROW, COLUMN = LARGE[:1, :512].expand(256, 512), LARGE[:256, :1].expand(256, 512)
LAYOUTS = {
    "gap": (LARGE[:256, :512], TransposeParams(256, 4, 4, 32, 64)),
    "begin that is not aligned": (LARGE[:256, 1:513], TransposeParams(128, 4, 1, 32, 32)),
    "rows that are not aligned": (LARGE[:255, :512], TransposeParams(128, 1, 4, 32, 32)),
    "turned": (random((512, 256), torch.float32).t(), None),
    "repeated rows": (ROW, TransposeParams(256, 4, 4, 32, 64)),
    "repeated columns": (COLUMN, None),
    "every second": (random((256, 1024), torch.float32)[:, ::2], None),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_that_come(name: str) -> None:
    """Gaps, expanded axes and permuted strides: the actual layouts decide, not the declared ones.
    If no tile helps, the kernel is a pointwise one."""
    x, tile = LAYOUTS[name]
    fusion = define(lambda t: ops.neg(turned(t, (1, 0))), (None, None))
    small = replace(H200, sm_count=3)
    executor = FusedKernelExecutor(
        fusion, scheduler="transpose", name="tile", device=small, checked=True
    )
    (out,) = run(executor, [x], [x.t().shape])
    assert torch.equal(out, -x.t())
    params = launched(executor)
    assert params == tile if tile else isinstance(params, PointwiseParams)


def test_a_pointwise_kernel_of_turned_tensors_takes_a_tile() -> None:
    """The tensors are declared in one order, and passed in two."""
    fusion = define(lambda x, y: ops.add(x, y), (None, None), (None, None))
    assert find_scheduler(fusion) == "pointwise"
    executor = FusedKernelExecutor(
        fusion, scheduler="pointwise", name="sum", device=H200, checked=True
    )
    x, y = random((1024, 512), torch.float32), random((512, 1024), torch.float32, 1).t()
    (out,) = run(executor, [x, y], [x.shape])
    assert torch.equal(out, x + y)
    assert launched(executor) == TransposeParams(128, 4, 4, 32, 32)
    (out,) = run(executor, [x, x], [x.shape])
    assert torch.equal(out, x + x)
    assert [type(v.params) for v in executor.variants] == [TransposeParams, PointwiseParams]


# ------------------------------------------------------------------ what is chosen
def chosen(
    build: Build, *shapes: Sequence[int], dtype: torch.dtype = torch.bfloat16
) -> TransposeParams | PointwiseParams:
    fusion = define(build, *[[None] * len(s) for s in shapes], dtype=from_torch(dtype))
    return scheduler("transpose").heuristics(fusion, Facts(sizes_of(fusion, *shapes)), H200)


def test_tiles_by_type() -> None:
    for dtype, tile in {
        torch.bool: TransposeParams(128, 16, 16, 128, 128),
        torch.bfloat16: TransposeParams(512, 8, 8, 128, 128),
        torch.float32: TransposeParams(512, 4, 4, 64, 64),
        torch.float64: TransposeParams(128, 2, 2, 32, 32),
    }.items():
        assert chosen(lambda x: turned(x, (1, 0)), (8192, 8192), dtype=dtype) == tile


@pytest.mark.parametrize(
    ("order", "shape", "is_tile"),
    [
        # NHWC to NCHW: each channel would read all sectors. In the other direction, a block reads
        # all of them.
        ((0, 3, 1, 2), (64, 224, 224, 3), True),
        ((0, 2, 3, 1), (64, 3, 224, 224), False),
        ((0, 3, 1, 2), (64, 56, 56, 256), True),
        # Heads of attention: rows of 64 are kept, so nothing is transposed.
        ((0, 2, 1, 3), (16, 1024, 12, 64), False),
        ((0, 2, 3, 1), (16, 1024, 12, 64), True),
        # The data that a block reads contains both axes already.
        ((0, 2, 1), (1 << 16, 5, 7), False),
        ((0, 2, 1), (1 << 16, 16, 16), False),
        ((1, 0), (1 << 20, 2), True),
        ((1, 0), (2, 1 << 20), False),
        # Little work for so many multiprocessors, so the tiles are smaller.
        ((1, 0), (256, 512), True),
    ],
)
def test_tiles_where_they_save_traffic(
    order: tuple[int, ...], shape: tuple[int, ...], is_tile: bool
) -> None:
    params = chosen(lambda x: turned(x, order), shape)
    assert isinstance(params, TransposeParams) is is_tile, params
    if isinstance(params, TransposeParams):
        inner, other = shape[order[-1]], shape[-1]
        is_short = params.staged_edge < 2 * other and params.edge < 2 * inner
        assert is_short or len(order) > 2  # of several axes some may be one
        assert params.edge * params.staged_edge >= 1024


def test_many_staged_tensors_share_the_budget() -> None:
    def build(*given: TensorView) -> list[TensorView]:
        return [turned(ops.add(x, given[0]), (1, 0)) for x in given]

    for count in (2, 8, 24, 60, 200):
        params = chosen(build, *[(4096, 4096)] * count, dtype=torch.float32)
        if isinstance(params, TransposeParams):
            tile = params.edge * params.staged_edge
            assert count * 4 * tile <= H200.max_smem_per_block // 4
            assert count * 4 * tile // params.threads <= 512
        assert isinstance(params, TransposeParams) is (count < 60), count


# ------------------------------------------------------------------ accepting
def test_reasons() -> None:
    square = [(None, None)] * 2
    cube = (None, None, None)

    def three(x: TensorView) -> list[TensorView]:
        return [turned(x, (0, 2, 1)), turned(x, (1, 2, 0)), ops.neg(x)]

    for build, shapes, reason in (
        (ops.add, square, "have one memory order"),
        (lambda x: turned(x, (1, 0, 2)), [cube], "have one memory order"),
        (lambda x: ops.sum(turned(x, (1, 0)), [1]), [(None, None)], "is not pointwise"),
        (three, [cube], "3 innermost axes"),
        (lambda x: ops.add(x, turned(x, (1, 0))), [(None, None)], "the same axis"),
    ):
        assert reason in rejections(define(build, *shapes))["transpose"]
    assert find_scheduler(define(three, cube)) == "pointwise"
    with pytest.raises(UnsupportedError, match=r"tile 32x16.*3 innermost axes"):
        applied(define(three, cube), TILE)


def test_inputs_that_nothing_reads() -> None:
    """Unused inputs neither need a tile nor get one."""
    x, y = random((32, 20), torch.float32), random((20, 32), torch.float32, 1)
    unused = define(lambda x, y: ops.neg(ops.permute(x, [1, 0])), (None, None), (None, None))
    (out,) = run(forced(unused, TILE), [x, y], [(20, 32)])
    assert torch.equal(out, -x.t())
    straight = define(lambda x, y: ops.neg(y), (None, None), (None, None))
    assert "one memory order" in rejections(straight)["transpose"]


def test_slices_and_pads_above_the_permutation_are_left_to_others() -> None:
    """A tensor read at shifted indices is read directly; other tensors may still use a tile."""

    def alone(x: TensorView) -> TensorView:
        return turned(ops.slice(x, [1, 0], [65, 48]), (1, 0))

    x, y = random((70, 48), torch.float32), random((64, 48), torch.float32, 1)
    reason = rejections(define(alone, (70, 48)))["transpose"]
    assert "have one memory order, except T0" in reason and "other indices" in reason

    def both(x: TensorView, y: TensorView) -> TensorView:
        return ops.add(alone(x), turned(y, (1, 0)))

    want = (x[1:65] + y).t().contiguous()
    assert launched(check(both, [x, y], [want], TILE, shapes=[(70, 48), (64, 48)])) == TILE


def test_outputs_that_are_written_into_inputs() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x, y = (new_input(fusion, (None, None), D.Float) for _ in range(2))
        total = ops.add(x, turned(y, (1, 0)))
        fusion.add_output(total, alias_input=x)
    assert "written into an input" in rejections(fusion)["transpose"]


def test_the_cpu_has_plain_loops() -> None:
    fusion = define(lambda x: turned(x, (1, 0)), (None, None))
    params = scheduler("transpose").heuristics(fusion, Facts(sizes_of(fusion, (4096, 4096))), CPU)
    assert str(params) == "pointwise(loops)"


def test_sizes_of_one_kernel_with_and_without_a_tile() -> None:
    """Small inputs reuse a similar kernel of a nearby size. Kernels with and without tiles are not
    similar."""
    fusion = define(lambda x: ops.neg(turned(x, (1, 0))), (None, None))
    executor = FusedKernelExecutor(
        fusion, scheduler="transpose", name="tile", device=H200, checked=True
    )
    for shape in ((512, 512), (508, 512), (12, 8), (512, 509), (3, 1024), (509, 517)):
        x = random(shape, torch.float32)
        (out,) = run(executor, [x], [shape[::-1]])
        assert torch.equal(out, -x.t()), shape
    kinds = [type(v.params) for v in executor.variants]
    assert {TransposeParams, PointwiseParams} <= {*kinds} and len(kinds) <= 5


def test_ladder_of_a_tile() -> None:
    tiles = scheduler("transpose").ladder(TransposeParams(128, 4, 8, 32, 64), H200)
    assert [(t.vector, getattr(t, "staged_vector", 0)) for t in tiles] == [
        (4, 8),
        (2, 8),
        (1, 1),
        (1, 0),
    ]


def test_what_a_view_hides_is_named() -> None:
    def build(x: TensorView) -> TensorView:
        return ops.slice(ops.permute(x, [1, 0]), [1, 0], [3, 4])

    fusion = define(build, [4, 5], dtype=[DataType.Float])
    (x,) = fusion.inputs
    assert f"except {x}, which a view reads" in str(scheduler("transpose").accepts(fusion))
