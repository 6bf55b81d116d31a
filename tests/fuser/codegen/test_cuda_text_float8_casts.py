"""Tests casts of floats that are too large for Float8_e4m3fn: kernels and torch give
equal results."""

from __future__ import annotations

import math

import pytest
import torch

from fuser import DataType, ops
from fuser.ir import dtypes
from fuser.kernels.executor import FusedKernelExecutor
from fuser.runtime import compile_cubin
from fuser.support.device import CPU, H200
from tests.support.small_fusions import define, sizes_of

# Older versions of torch convert them to NaN, newer ones to the largest value.
BYTES = {False: 0x7E, True: 0x7F}


@pytest.fixture(params=BYTES, ids=["448", "NaN"])
def too_large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Makes torch convert values that are too large to this byte."""
    monkeypatch.setattr(dtypes, "e4m3_has_nan_beyond", lambda: request.param)
    return BYTES[request.param]


def values() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (10_000,), generator=generator).int()
    edges = torch.tensor([463.9, 464.0, 464.00003, 479.9, 480.0, 3e38, math.inf, math.nan, 0.0])
    return torch.cat([bits.view(torch.float32), edges, -edges])


def test_what_torch_is_asked_for() -> None:
    beyond = torch.tensor([465.0, 479.0, 481.0, 3e38, math.inf]).to(torch.float8_e4m3fn)
    assert beyond.view(torch.uint8).tolist() == [BYTES[dtypes.e4m3_has_nan_beyond()]] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_on_the_cpu(too_large: int, dtype: torch.dtype) -> None:
    given = dtypes.from_torch(dtype)
    fusion = define(lambda t: ops.cast(t, DataType.Float8_e4m3fn), (None,), dtype=given)
    executor = FusedKernelExecutor(fusion, scheduler="pointwise", name="to_e4m3", device=CPU)
    x = values().to(dtype)
    out = torch.empty(len(x), dtype=torch.float8_e4m3fn)
    executor.run([x], [out], sizes=sizes_of(fusion, x.shape))
    expected = x.to(torch.float8_e4m3fn).view(torch.uint8)
    # 464 is halfway between 448 and 480, and rounds to the even one.
    is_large = (x.abs() > 464) & ~x.isnan()
    wanted = (x.signbit().to(torch.uint8) << 7) | too_large
    assert torch.equal(out.view(torch.uint8), torch.where(is_large, wanted, expected))


def test_for_gpus(too_large: int) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="the extra nvrtc")
    fusion = define(lambda t: ops.cast(t, DataType.Float8_e4m3fn), (None,))
    executor = FusedKernelExecutor(fusion, scheduler="pointwise", name="to_e4m3", device=H200)
    x = torch.empty(1000, device="meta")
    out = torch.empty(1000, dtype=torch.float8_e4m3fn, device="meta")
    launch = executor.launch_for(
        [x], [out], sizes=sizes_of(fusion, x.shape), device=torch.device("cpu")
    )
    assert launch is not None
    source = launch.variant.kernel.source
    assert ("fm_e4m3_or_nan(" in source.text) == (too_large == 0x7F)
    assert compile_cubin([source])
