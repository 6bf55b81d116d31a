"""The transpose scheduler: tiles in shared memory, for every order, type and size.

Kernels run with the H200's schedules on the CPU in checked mode, where an access out of bounds, a
read of what nobody has written and a race in shared memory are errors.
"""

from __future__ import annotations

import itertools
import random as python_random
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch

from fuser import ops
from fuser.device import CPU, H200
from fuser.ir import scalar as sc
from fuser.ir.dtypes import DataType, from_torch, nbytes_of, to_torch
from fuser.ir.fusion import Fusion
from fuser.ir.scalar import Number, Scalar, Symbol
from fuser.ir.tensor import TensorView
from fuser.kernels.executor import KernelExecutor
from fuser.lower.kernel import (
    Assign,
    Body,
    Element,
    For,
    GlobalLoad,
    If,
    Let,
    LoweredKernel,
    ScalarArg,
    Store,
    Sync,
    VectorLoad,
    VectorStore,
    values_of,
    walk,
)
from fuser.lower.kernel_passes import lower_kernel
from fuser.record import replace
from fuser.schedule import find_scheduler, rejections, scheduler
from fuser.schedule.facts import Facts
from fuser.schedule.pointwise import PointwiseParams
from fuser.schedule.transpose_params import TransposeParams
from tests.schedule.programs import Build, define, random, run, sizes_of

D = DataType
WORD, WARP = 4, 32


def turned(x: TensorView, order: Sequence[int]) -> TensorView:
    return ops.permute(x, list(order))


def forced(fusion: Fusion, params: TransposeParams) -> KernelExecutor:
    """Return an executor in checked mode whose tile does not depend on sizes."""
    made = KernelExecutor(fusion, scheduler="transpose", name="tile", device=H200, checked=True)
    made.scheduler = replace(made.scheduler, chooser=lambda fusion, device: lambda facts: params)
    return made


def launched(executor: KernelExecutor) -> object:
    """Return the parameters of the variant that was compiled."""
    (variant,) = [v for v in executor.variants if v.compiled is not None]
    return variant.params


def check(
    build: Build,
    inputs: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    params: TransposeParams,
    *,
    shapes: Sequence[Sequence[int | None]] | None = None,
) -> KernelExecutor:
    """Run with these parameters, and find the wanted bits."""
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


def any_tile(draw: python_random.Random, dtype: torch.dtype, extents: Sequence[int]) -> object:
    """Return a tile of any shape, with vectors that these innermost extents allow."""
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
    """Extents below, at and beyond the tile, those that vectors divide and those that they do not;
    runs of axes that stay together are one."""
    draw = python_random.Random(str(order))
    for _ in range(3):
        dtype = draw.choice(TYPES)
        shape = [draw.choice([2, 3, 5, 8, 16, 31, 32, 33, 48]) for _ in order]
        if len(order) > 2:
            shape = [min(n, 16) for n in shape]
        x = random(shape, dtype)
        want = x.permute(order).contiguous()
        tile = any_tile(draw, dtype, (want.shape[-1], shape[-1]))
        assert isinstance(tile, TransposeParams)
        executor = check(lambda t: turned(t, order), [x], [want], tile)
        assert launched(executor) == tile
