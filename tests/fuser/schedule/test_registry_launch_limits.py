"""Tests that no scheduler launches more blocks along an axis than the device accepts.

Larger grids are folded into blocks along x. A device with low limits tests this on small tensors.
"""

from __future__ import annotations

import random as python_random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, ParallelType, ops
from fuser.ir.dtypes import from_torch
from fuser.ir.fusion import TensorView
from fuser.kernels.executor import FusedKernelExecutor
from fuser.schedule import find_scheduler
from fuser.support.device import H200, MAX_GRID, DeviceInfo
from fuser.support.errors import DefinitionError
from fuser.support.record import replace
from tests.support.small_fusions import define, random, run, sizes_of

SMALL_GRID = (64, 8, 4)
SMALL = replace(H200, max_grid=SMALL_GRID, sm_count=16)
SINGLE = replace(H200, max_grid=(1, 1, 1), sm_count=16)


@dataclass(frozen=True)
class Case:
    """A kind of fusion, its torch reference, and the shapes of its inputs."""

    build: Callable[..., Any]
    torch_form: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    scheduler: str


def _softmax(x: TensorView) -> TensorView:
    e = ops.exp(ops.sub(x, ops.max(x, -1, keepdim=True)))
    return ops.div(e, ops.sum(e, -1, keepdim=True))


def _column_softmax(x: TensorView) -> TensorView:
    e = ops.exp(ops.sub(x, ops.max(x, 0, keepdim=True)))
    return ops.div(e, ops.sum(e, 0, keepdim=True))


def _two(x: TensorView, y: TensorView) -> tuple[TensorView, TensorView]:
    return ops.neg(x), ops.exp(y)


def _bias(x: TensorView, b: TensorView) -> TensorView:
    return ops.add(x, ops.broadcast(b, [True, False]))


def _scale(x: TensorView, s: TensorView) -> TensorView:
    return ops.mul(x, ops.broadcast(s, [False, True]))


def _pad(x: TensorView) -> TensorView:
    return ops.pad(x, [1, 2])


CASES = {
    "pointwise": Case(lambda x: ops.neg(x), lambda x: -x, ((300, 700),), "pointwise"),
    "bias": Case(_bias, lambda x, b: x + b, ((1500, 40), (40,)), "pointwise"),
    "bias of long rows": Case(_bias, lambda x, b: x + b, ((90, 3001), (3001,)), "pointwise"),
    "scale": Case(_scale, lambda x, s: x * s[:, None], ((1500, 33), (1500,)), "pointwise"),
    "rows": Case(lambda x: ops.sum(x, dim=1), lambda x: x.sum(1), ((1030, 70),), "reduction"),
    "long rows": Case(lambda x: ops.sum(x, dim=1), lambda x: x.sum(1), ((3, 40_000),), "reduction"),
    "columns": Case(lambda x: ops.sum(x, dim=0), lambda x: x.sum(0), ((700, 900),), "reduction"),
    "few columns": Case(lambda x: ops.sum(x, dim=0), lambda x: x.sum(0), ((9000, 7),), "reduction"),
    "short columns": Case(
        lambda x: ops.sum(x, dim=1), lambda x: x.sum(1), ((200, 3, 170),), "reduction"
    ),
    "all": Case(lambda x: ops.sum(x), lambda x: x.sum(), ((400, 500),), "reduction"),
    "variance": Case(
        lambda x: ops.var_mean(x, [0, 2], 0)[0],
        lambda x: x.var((0, 2), correction=0),
        ((40, 100, 30),),
        "reduction",
    ),
    "softmax": Case(_softmax, lambda x: torch.softmax(x, -1), ((700, 65),), "inner_persistent"),
    "column softmax": Case(
        _column_softmax, lambda x: torch.softmax(x, 0), ((24, 4100),), "outer_persistent"
    ),
    "pad": Case(_pad, lambda x: torch.nn.functional.pad(x, [1, 2]), ((1100, 40),), "pointwise"),
    "transpose": Case(
        lambda x, y: ops.add(x, ops.permute(y, [1, 0])),
        lambda x, y: x + y.t(),
        ((520, 270), (270, 520)),
        "transpose",
    ),
    "horizontal": Case(_two, lambda x, y: (-x, y.exp()), ((900, 40), (77, 130)), "horizontal"),
}


@pytest.fixture(name="launches")
def _launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Records the grids of all launches."""
    found: list[tuple[int, ...]] = []
    bind_to = FusedKernelExecutor._bind_to

    def noted(self: FusedKernelExecutor, *args: Any, **named: Any) -> Any:
        record = bind_to(self, *args, **named)
        found.append(record[1].grid)
        return record

    monkeypatch.setattr(FusedKernelExecutor, "_bind_to", noted)
    yield found


def _is_inside(grid: Sequence[int], limits: Sequence[int]) -> bool:
    return all(n <= most for n, most in zip(grid, limits, strict=True))


def _executor(
    case: Case, device: DeviceInfo, dtype: torch.dtype, *, fixed: bool
) -> FusedKernelExecutor:
    kinds = [shape if fixed else [None] * len(shape) for shape in case.shapes]
    fusion = define(case.build, *kinds, dtype=from_torch(dtype))
    name = "horizontal" if case.scheduler == "horizontal" else find_scheduler(fusion)
    assert name == case.scheduler
    return FusedKernelExecutor(
        fusion, scheduler=case.scheduler, name="kernel", device=device, checked=True
    )


def _check(executor: FusedKernelExecutor, case: Case, shapes: Sequence[Sequence[int]]) -> None:
    inputs = [random(shape, torch.float32, seed) for seed, shape in enumerate(shapes)]
    expected = case.torch_form(*(t.double() for t in inputs))
    wanted = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    got = run(executor, inputs, [tuple(t.shape) for t in wanted])
    for out, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(out, want.float(), rtol=1e-4, atol=1e-3)


@pytest.mark.finding("G2")
@pytest.mark.parametrize("device", [SMALL, SINGLE], ids=["64x8x4", "1x1x1"])
@pytest.mark.parametrize("fixed", [False, True], ids=["symbols", "constants"])
@pytest.mark.parametrize("name", CASES)
def test_scheduler_on_a_device_of_few_blocks_computes_the_same(
    name: str, fixed: bool, device: DeviceInfo, launches: list[tuple[int, ...]]
) -> None:
    case = CASES[name]
    executor = _executor(case, device, torch.float32, fixed=fixed)
    _check(executor, case, case.shapes)
    assert launches
    assert all(_is_inside(grid, device.max_grid) for grid in launches), launches


@pytest.mark.finding("G2")
def test_variant_with_too_many_blocks_for_a_new_size_gives_way_to_its_folded_form(
    launches: list[tuple[int, ...]],
) -> None:
    case = CASES["bias"]
    executor = _executor(case, SMALL, torch.float32, fixed=False)
    for rows in (5, 1500, 7, 3000, 1500):
        _check(executor, case, ((rows, 40), (40,)))
    assert all(_is_inside(grid, SMALL_GRID) for grid in launches), launches
    texts = [v.kernel.source.text for v in executor.variants]
    assert sum("fold" in text for text in texts) == 1
    assert len(texts) == 3


# More than 65535 outer rows, and more along each of the other axes.
HUGE: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "product of blocks": (lambda x: ops.prod(x, [0, 2, 4]), ((131072, 3, 2, 2, 3),)),
    "product outside": (lambda x: ops.prod(x, [1, 3]), ((131072, 3, 2, 2, 3),)),
    "sums outside": (lambda x: ops.sum(x, dims=[1]), ((131072, 5, 3),)),
    "sums along": (lambda x: ops.sum(x, dims=[0, 2]), ((3, 131072, 5),)),
    "columns": (lambda x: ops.sum(x, dim=0), ((131072, 3),)),
    "columns of many": (lambda x: ops.sum(x, dim=0), ((3, 40_000_000),)),
    "all": (lambda x: ops.sum(x), ((70_000_000,),)),
    "variances": (
        lambda x: ops.var_mean(ops.cast(x, DataType.Float), [0, 2, 4], 0)[0],
        ((131072, 3, 2, 2, 3),),
    ),
    "bias": (_bias, ((40_000_000, 3), (3,))),
    "bias of wide rows": (_bias, ((3, 40_000_000), (40_000_000,))),
    "both outside": (_bias, ((70_000, 70_000), (70_000,))),
    "softmax": (_softmax, ((1 << 27, 4),)),
    "column softmax": (_column_softmax, ((5, 1 << 27),)),
    "transpose": (lambda x: ops.add(ops.permute(x, [1, 0]), 1.0), ((1 << 24, 9),)),
    "heads": (lambda x: ops.neg(ops.permute(x, [0, 2, 1, 3])), ((131072, 3, 70, 2),)),
    "padded": (_pad, ((40_000_000, 3),)),
    "two": (_two, ((1 << 27, 3), (5, 1 << 25))),
}


@pytest.mark.finding("G2")
@pytest.mark.parametrize("fixed", [False, True], ids=["symbols", "constants"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", HUGE)
def test_launch_of_a_huge_tensor_is_inside_the_limits(
    name: str, dtype: torch.dtype, fixed: bool
) -> None:
    build, shapes = HUGE[name]
    kinds = [shape if fixed else [None] * len(shape) for shape in shapes]
    fusion = define(build, *kinds, dtype=from_torch(dtype))
    scheduler = find_scheduler(fusion) or "horizontal"
    _assert_inside(
        FusedKernelExecutor(fusion, scheduler=scheduler, name="kernel", device=H200), shapes
    )


def _assert_inside(executor: FusedKernelExecutor, shapes: Sequence[Sequence[int]]) -> None:
    """Binds tensors without contents, and checks the launch against the limits."""
    fusion = executor.fusion
    sizes = sizes_of(fusion, *shapes)
    from fuser.ir.dtypes import to_torch
    from fuser.ir.scalar import constructors as sc

    tensors = [v for v in fusion.inputs if isinstance(v, TensorView)]
    inputs = [
        torch.empty(shape, dtype=to_torch(tv.dtype()), device="meta")
        for tv, shape in zip(tensors, shapes, strict=True)
    ]
    outputs = [
        torch.empty(
            [int(sc.evaluate(fusion.canonical(n), sizes)) for n in tv.shape()],
            dtype=to_torch(tv.dtype()),
            device="meta",
        )
        for tv in fusion.outputs
    ]
    record = executor.bind(inputs, outputs, sizes=sizes)
    assert record is not None
    assert _is_inside(record[1].grid, MAX_GRID), (record[0].params, record[1].grid)
    assert _is_inside(record[1].block, H200.max_block)


@pytest.mark.finding("G2")
@pytest.mark.parametrize("seed", range(40))
def test_launch_of_any_shape_is_inside_the_limits(seed: int) -> None:
    """Random reductions, broadcasts and orders of random shapes with up to 2^32 elements."""
    rng = python_random.Random(seed)
    rank = rng.randint(1, 5)
    shape = [1] * rank
    for _ in range(rng.randint(8, 32)):
        shape[rng.randrange(rank)] *= rng.choice((2, 2, 2, 3))
        if torch.Size(shape).numel() > 1 << 31:
            break
    order = rng.sample(range(rank), rank)
    dims = sorted(rng.sample(range(rank), rng.randint(0, rank)))

    def build(x: TensorView) -> TensorView:
        y = ops.permute(ops.add(x, 1.0), order)
        return ops.sum(y, dims=dims) if dims else y

    kind: list[int | None] = [None if rng.random() < 0.5 else n for n in shape]
    fusion = define(build, kind, dtype=DataType.BFloat16)
    scheduler = find_scheduler(fusion)
    assert scheduler is not None
    executor = FusedKernelExecutor(fusion, scheduler=scheduler, name="kernel", device=H200)
    _assert_inside(executor, [shape])


# ------------------------------------------------------------------ schedules by hand
def _by_hand(shape: Sequence[int], ptype: ParallelType, *, split: int = 0) -> FusionDefinition:
    with FusionDefinition() as fd:
        y = fd.ops.add(fd.define_tensor(list(shape), contiguity=True), 1.0)
        fd.add_output(y)
        if split:
            y.split(0, split)
        y.axis(1 if split else 0).parallelize(ptype)
    return fd


@pytest.mark.finding("G2")
@pytest.mark.parametrize("shape", [[70_000, 2], [-1, -1]], ids=["constants", "symbols"])
@pytest.mark.parametrize("ptype", [ParallelType.grid_y, ParallelType.grid_z])
def test_schedule_by_hand_with_too_many_blocks_is_refused_in_words(
    shape: list[int], ptype: ParallelType
) -> None:
    fd, axis = _by_hand(shape, ptype), ptype.name[-1]
    x = torch.randn(70_000, 2)
    with pytest.raises(
        DefinitionError, match=rf"70000 blocks along {axis} for axis .* \({ptype.name}\) of T"
    ) as refused:
        fd.manual_execute([x])
    assert "accepts at most 65535: parallelize that axis by grid_x" in str(refused.value)
    assert "test_registry_launch_limits.py" in str(refused.value)


@pytest.mark.finding("G2")
@pytest.mark.parametrize(
    ("ptype", "threads", "most"),
    [
        (ParallelType.block_x, 2048, 1024),
        (ParallelType.block_y, 1025, 1024),
        (ParallelType.block_z, 65, 64),
    ],
)
def test_schedule_by_hand_with_too_many_threads_is_refused_in_words(
    ptype: ParallelType, threads: int, most: int
) -> None:
    fd = _by_hand([-1, -1], ptype, split=threads)
    with pytest.raises(
        DefinitionError, match=rf"{threads} threads along .* accepts at most {most}"
    ):
        fd.manual_execute([torch.randn(5000, 2)])
