"""Library ops on a GPU: equal to torch, with no more kernels than torch's own call launches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_patterns.library import FLOAT8, LIBRARY, LibraryRow
from kernel_patterns.pattern import as_tuple
from torch.profiler import ProfilerActivity, profile

from fuser.support.errors import InputError

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
    is_grouped = name == "grouped_mm"
    expected = [groups(*inputs)] if is_grouped else list(as_tuple(row.peer(*wide)))
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
    """Returns the names of the GPU activities of one call."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        call()
        torch.cuda.synchronize()
    kinds = "DeviceType.CUDA"
    return [e.name for e in profiled.events() or () if str(e.device_type) == kinds]


@pytest.mark.finding("G36")
@pytest.mark.parametrize(
    ("name", "dtype"), [cell for cell in CELLS if not cell[0].startswith("sdpfa")], ids=str
)
def test_library_op_launches_no_more_than_torch(name: str, dtype: torch.dtype) -> None:
    row = LIBRARY[name]
    peer = row.peer
    if peer is None:
        pytest.skip("torch has no such call")
    inputs = inputs_of(name, row, dtype)
    fd = row.define(inputs)
    ours, theirs = kernels_of(lambda: fd.execute(inputs)), kernels_of(lambda: peer(*inputs))
    # Of groups, the ends are checked before, and rows of none cleared behind.
    more = 2 if name == "grouped_mm" else 0
    assert len(ours) <= len(theirs) + more, (ours, theirs)


@pytest.mark.finding("G36")
def test_ends_of_groups_that_fall_are_refused_at_the_latest_by_the_next_call() -> None:
    x, w, _ = inputs_of("grouped_mm", LIBRARY["grouped_mm"], torch.bfloat16)
    right = torch.tensor([10, 10, 50, 90], dtype=torch.int32, device="cuda")
    falls = torch.tensor([10, 5, 50, 90], dtype=torch.int32, device="cuda")
    ends = torch.tensor([0, 0, 0, 0], dtype=torch.int32, device="cuda")
    fd = LIBRARY["grouped_mm"].define([x, w, right])
    with pytest.raises(InputError, match="Expected sorted offsets from 0 to 96"):
        fd.execute([x, w, falls])
    for _ in range(3):
        for given in (right, ends):
            (out,) = fd.execute([x, w, given])
            torch.testing.assert_close(out, groups(x, w, given), rtol=2e-2, atol=1e-1)
    fd.execute([x, w, falls])
    torch.cuda.synchronize()
    with pytest.raises(InputError, match=r"in an earlier run .* had 5 for group 1"):
        fd.execute([x, w, right])
    (out,) = fd.execute([x, w, right])
    torch.testing.assert_close(out, groups(x, w, right), rtol=2e-2, atol=1e-1)


@pytest.mark.finding("G36")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_is_meant_for_no_place_goes_nowhere(dtype: torch.dtype) -> None:
    x = torch.randn(9, 12, device="cuda").to(dtype)
    index = torch.stack([torch.randperm(20, device="cuda")[:8] - 4 for _ in range(9)])
    src = torch.randn(9, 8, device="cuda").to(dtype)
    scatter = LIBRARY["scatter"].define([x, index, src])
    expected, kept = x.clone(), (index >= 0) & (index < 12)
    for row in range(9):
        expected[row, index[row][kept[row]]] = src[row][kept[row]]
    rows = torch.tensor([-1, 3, 9, 3, 0, 2**40, -(2**40)], device="cuda")
    value = torch.randn(7, 12, device="cuda").to(dtype)
    put = LIBRARY["index_put_accumulate"].define([x, rows, value])
    added = x.double().clone()
    for place, one in zip(rows.tolist(), value.double(), strict=True):
        if 0 <= place < 9:
            added[place] += one
    for _ in range(4):
        assert torch.equal(scatter.execute([x, index, src])[0], expected)
        close = 2e-2 if dtype is torch.bfloat16 else 1e-5
        (out,) = put.execute([x, rows, value])
        torch.testing.assert_close(out.double(), added, rtol=close, atol=close)
