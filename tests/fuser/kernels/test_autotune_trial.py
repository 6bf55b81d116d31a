"""Tests trials: their memory, the comparison of results, and which launches a device accepts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fuser import ops
from fuser.ir.dtypes import DataType
from fuser.kernels import autotune
from fuser.kernels.autotune import Scratch, TuningCandidate, is_launchable
from fuser.kernels.kernel_variant import address
from fuser.runtime.prepared_launch import BoundLaunch
from fuser.support.device import H200
from tests.support.small_fusions import define


def pair(values: torch.Tensor) -> tuple[Scratch, Scratch]:
    """Returns two results with the same values."""
    found = Scratch([values]), Scratch([values])
    for one in found:
        one.tensors[0].copy_(values)
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_rounding_agrees_and_more_does_not(dtype: torch.dtype) -> None:
    """A unit in the last place of each result is rounding; a tenth of one result is not."""
    values = torch.randn(1000, dtype=torch.float64).to(dtype)
    tolerance = autotune._TOLERANCE[dtype]
    first, second = pair(values)
    assert first.difference(second, tolerance) is None
    second.tensors[0].mul_(1 + torch.finfo(dtype).eps)
    assert first.difference(second, tolerance) is None
    second.tensors[0][123] += 0.1
    assert first.difference(second, tolerance) is not None


def test_small_results_count_beside_large_ones_of_the_same_kernel() -> None:
    """The error is relative to the root mean square of all results, so a wrong small result is
    found."""
    first, second = pair(torch.ones(100_000))
    second.tensors[0][77_777] = 0
    excess = first.difference(second, 1e-4)
    assert excess is not None and math.isclose(excess, 1 / 2e-4, rel_tol=1e-3)


@pytest.mark.parametrize(
    ("values", "others"),
    [
        ([1.0, math.nan], [1.0, 0.0]),
        ([1.0, 0.0], [1.0, math.nan]),
        ([1.0, math.inf], [1.0, -math.inf]),
        ([1.0, math.inf], [1.0, 3e38]),
        ([1.0, math.nan], [1.0, math.inf]),
    ],
)
def test_what_is_not_finite_must_be_the_same(values: list[float], others: list[float]) -> None:
    first, second = pair(torch.tensor(values))
    assert first.difference(second, 1e-4) is None
    second.tensors[0].copy_(torch.tensor(others))
    assert first.difference(second, 1e-4) == math.inf


@pytest.mark.parametrize(
    "values",
    [torch.arange(9), torch.arange(9) % 2 == 0, torch.randn(9, dtype=torch.complex64)],
    ids=lambda v: str(v.dtype),
)
def test_integers_are_exact_and_complex_numbers_have_two_parts(values: torch.Tensor) -> None:
    first, second = pair(values)
    assert first.difference(second, 1e-4) is None
    wrong = values[5:6].clone()
    second.tensors[0][5] = ~wrong if wrong.dtype == torch.bool else wrong + 1
    assert first.difference(second, 1e-4) is not None


def test_parts_are_compared_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "_CHUNK", 64)
    for place in (0, 63, 64, 999):
        first, second = pair(torch.ones(1000))
        second.tensors[0][place] += 1
        assert first.difference(second, 1e-4) is not None


def test_scratch_lies_as_the_results_do() -> None:
    room = torch.zeros(1000)
    for out in (room[3:83].view(8, 10), room[:80].view(8, 10).t(), room[1:161:2].view(8, 10)[::2]):
        (made,) = Scratch([out]).tensors
        assert made.shape == out.shape and made.stride() == out.stride()
        assert address(made) % 16 == address(out) % 16
        made.fill_(1)
        assert not room.any()


def test_the_coarsest_dtype_inside_decides() -> None:
    narrow = define(lambda x: ops.cast(ops.cast(x, DataType.BFloat16), DataType.Float), (None,))
    assert autotune.tolerance_of(narrow) == autotune._TOLERANCE[torch.bfloat16]
    assert autotune.tolerance_of(define(ops.neg, (None,))) == autotune._TOLERANCE[torch.float32]
    whole = define(ops.neg, (None,), dtype=DataType.Int)
    assert autotune.tolerance_of(whole) == autotune._TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("grid", "block", "smem_bytes", "fits"),
    [
        ((98304, 1, 1), (1024, 1, 1), 232448, True),
        ((1, 65535, 65535), (32, 32, 1), 0, True),
        ((1, 98304, 1), (128, 1, 1), 0, False),
        ((1, 1, 65536), (128, 1, 1), 0, False),
        ((1 << 31, 1, 1), (128, 1, 1), 0, False),
        ((1, 1, 1), (32, 33, 1), 0, False),
        ((1, 1, 1), (32, 1, 1), 232449, False),
    ],
)
def test_what_a_device_takes(
    grid: tuple[int, int, int], block: tuple[int, int, int], smem_bytes: int, fits: bool
) -> None:
    assert is_launchable(BoundLaunch([], grid, block, smem_bytes, ()), H200) is fits


def test_a_race_has_three_rounds_at_least() -> None:
    launch: Any = None
    for budget, rounds in ((0.0, 3), (100.0, 8)):
        candidate = TuningCandidate(None, launch, launch, [], [], [9.0])
        autotune.race([candidate], lambda run: 1.0, 8, budget)
        assert candidate.seconds == [1.0] * rounds
