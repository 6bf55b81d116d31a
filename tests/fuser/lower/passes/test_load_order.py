"""Tests that loops over rows with a reduction over threads prefetch the next row, by the texts of
kernels for an H200."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from kernel_patterns import PATTERNS

from fuser import FusionDefinition
from fuser.kernels import executor as kernels

H200 = ["schedules_for(h200)"]


class Enough(Exception):
    """Raised when the kernel texts are complete, to stop the run."""


def kernel_texts(
    monkeypatch: pytest.MonkeyPatch, name: str, rows: int, columns: int, dtype: torch.dtype
) -> list[str]:
    found: list[Any] = []

    def note(sources: Any, *_: Any, **__: Any) -> None:
        found.extend(sources)
        raise Enough

    monkeypatch.setattr(kernels, "compile_kernels", note)
    key = rows, columns, dtype
    inputs = [torch.empty(o.shape, dtype=o.dtype) for o in PATTERNS[name].operands(*key)]
    with pytest.raises(Enough):
        PATTERNS[name].define(*key).execute(inputs, _enable_options=H200)
    return [source.text for source in found]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [768, 4096])
def test_gradients_of_a_norm_ask_for_the_next_row(
    monkeypatch: pytest.MonkeyPatch, columns: int, dtype: torch.dtype
) -> None:
    texts = kernel_texts(monkeypatch, "layer_norm_gradients", 8192, columns, dtype)
    (text,) = (t for t in texts if "block_reduce<" in t or "warp_reduce<" in t)
    loop = text[text.index("for (nvfuser_index_t k0 = 0; k0 < s0") :]
    before = loop[: loop.index("_reduce<")]
    # The gradient dy, x, mean and deviation. The weight is the same for all rows.
    loaded = set(re.findall(r"load_vec\w*<\d>\(.*?, (T\d+), [^,]*\);", before))
    loaded |= set(re.findall(r"= (T\d+)\[\w+ \+ \d+ \* k0\]", before))
    asked = re.findall(r"prefetch\((T\d+), ", text)
    assert {*asked} == loaded and len(loaded) == 4
    assert len(asked) == len(set(asked)) and "(k0 + 1) < s0" in before
    assert before.index("prefetch(") > max(m.end() for m in re.finditer("load_vec", before))


def test_one_row_per_block_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = kernel_texts(monkeypatch, "softmax", 4096, 4096, torch.bfloat16)
    assert "prefetch(" not in text


@pytest.mark.parametrize("enabled", [[*H200, "checked"], H200])
def test_nothing_behind_the_last_row_is_asked_for(enabled: list[str]) -> None:
    """The last block has fewer rows. The checked build verifies that each prefetched element
    exists."""
    rows, columns = 1057, 4096
    x, dy = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(k)) for k in (0, 1))
    with FusionDefinition() as fd:
        a, b = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
        g = fd.ops.mul(a, b)
        fd.add_output(fd.ops.sub(g, fd.ops.sum(g, 1, True)))
        fd.add_output(fd.ops.sum(g, 0))
    rows_out, columns_out = fd.execute([x, dy], _enable_options=enabled)
    g = x.double() * dy.double()
    assert torch.allclose(rows_out.double(), g - g.sum(1, keepdim=True), atol=2e-3)
    assert torch.allclose(columns_out.double(), g.sum(0), atol=1e-3)
