"""Library ops on a GPU: equal to torch, and as few kernels as torch's own call launches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from kernel_patterns.library import FLOAT8, LIBRARY, LibraryRow
from kernel_patterns.pattern import as_tuple

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CELLS = [(name, dtype) for name, row in LIBRARY.items() for dtype in row.dtypes]
# Shapes that the kernels of tensor cores take, where those of the CPU are too small.
SHAPES = {
    "scaled_mm": (64, 128, 96),
    "grouped_mm": (4, 96, 64, 128),
    "sdpfa_fwd": (2, 3, 128, 64),
    "sdpfa_bwd": (2, 3, 128, 64),
}


def inputs_of(name: str, row: LibraryRow, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return list(row.operands(SHAPES.get(name, row.small), dtype, "cuda"))


@pytest.mark.finding("G36")
@pytest.mark.parametrize(("name", "dtype"), CELLS, ids=str)
def test_library_op_equals_torch(name: str, dtype: torch.dtype) -> None:
    row = LIBRARY[name]
    inputs = inputs_of(name, row, dtype)
    fd = row.define(inputs)
    held: list[torch.Tensor] = []
    for _ in range(4):
        # Of several runs, whose results the caller holds.
        held += fd.execute(inputs)
    if row.peer is None:
        return
    is_wide = not (row.is_exact or name.startswith("sdpfa") or inputs[0].dtype is FLOAT8)
    wide = [t.double() if t.is_floating_point() and is_wide else t for t in inputs]
    expected = list(as_tuple(row.peer(*wide)))
    if name == "grouped_mm":
        expected = [groups(*wide)]
    close = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    limit = 0.0 if row.is_exact else close
    for i, out in enumerate(held):
        value = expected[i % len(expected)].to(out.dtype)
        torch.testing.assert_close(out, value, rtol=limit, atol=limit * 4)


def groups(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    out, start = x.new_zeros(len(x), w.shape[2]), 0
    for g, end in enumerate(ends.tolist()):
        out[start:end] = x[start:end] @ w[g]
        start = end
    return out


def kernels_of(call: Callable[[], object]) -> list[str]:
    """Return the names of what one call does on the GPU."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        call()
        torch.cuda.synchronize()
    kinds = "DeviceType.CUDA"
    return [e.name for e in profiled.events() or () if str(e.device_type) == kinds]


@pytest.mark.finding("G36")
@pytest.mark.parametrize(("name", "dtype"), CELLS, ids=str)
def test_library_op_launches_no_more_than_torch(name: str, dtype: torch.dtype) -> None:
    row = LIBRARY[name]
    peer = row.peer
    if peer is None:
        pytest.skip("torch has no such call")
    inputs = inputs_of(name, row, dtype)
    fd = row.define(inputs)
    ours, theirs = kernels_of(lambda: fd.execute(inputs)), kernels_of(lambda: peer(*inputs))
    assert len(ours) <= len(theirs), (ours, theirs)
