"""Compares the whole text of typical kernels with golden files. A refactoring changes
none of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fuser import ops
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion
from tests.fuser.lower.test_pipeline_pointwise import vectorized
from tests.fuser.lower.test_reduction_code import spread, staged
from tests.support.hand_schedules import CPU, H200, P, define, lower, parallelize

GOLDEN = Path(__file__).parent / "golden"


def bias_relu_bf16() -> Fusion:
    """Defines a kernel with two paths, 16-byte accesses, and a bias row that is not streamed."""
    fusion = define(
        lambda a, b: ops.cast(ops.relu(ops.add(a, b)), DataType.BFloat16),
        (-1, -1),
        (-1,),
        dtype=DataType.BFloat16,
    )
    vectorized(fusion, width=8, threads=128)
    return fusion


def row_sum_and_max() -> Fusion:
    """Defines a block and grid reduction of two values in one exchange, with an epilogue."""
    fusion = define(lambda a: [ops.mul(ops.sum(a, [1]), 0.5), ops.max(a, [1])], (-1, -1))
    r = staged(fusion)
    r.split(1, 128)
    r.split(1, 4, False)
    parallelize(r, P.grid_y, P.grid_x, None, P.block_x)
    spread(fusion, r)
    return fusion


def cpu_column_maximum() -> Fusion:
    """Defines plain loops over a tile of accumulators, with clamped bounds instead of
    predicates."""
    fusion = define(lambda a: ops.max(a, [0]), (-1, -1))
    r = staged(fusion)
    r.split(1, 64)
    r.reorder({1: 0, 0: 1})
    spread(fusion, r)
    r.compute_at = 1
    return fusion


@pytest.mark.parametrize("make", [bias_relu_bf16, row_sum_and_max, cpu_column_maximum])
def test_golden(make: Callable[[], Fusion]) -> None:
    name = make.__name__
    device = CPU if name.startswith("cpu") else H200
    texts = [lower(make(), name=name, device=device).source.text for _ in range(2)]
    assert texts[0] == texts[1]
    assert texts[0] == (GOLDEN / f"{name}.cu").read_text()


def test_lowering_again_gives_the_same_text() -> None:
    fusion = bias_relu_bf16()
    assert lower(fusion).source.text == lower(fusion).source.text
