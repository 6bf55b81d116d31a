"""Tests L2 reuse of two kernels that read the same tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuser import FusionDefinition
from fuser.ir.fusion import TensorView
from fuser.support import options
from hostir import HostIrEvaluator
from hostir.ir.parser import parse
from hostir.runtime.kernels import CacheReuse, second_reads

H200 = ["schedules_for(h200)"]
# More than a block keeps.
ROWS, COLUMNS = 8192, 32


def defined(build: Callable[[FusionDefinition, TensorView], Any]) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(build(fd, x))
    return fd


def centred(fd: FusionDefinition, x: TensorView) -> TensorView:
    return fd.ops.sub(x, fd.ops.sum(x, [0], True))


def column_sum(fd: FusionDefinition, x: TensorView) -> TensorView:
    return fd.ops.sum(x, [0])


def reads_of(fd: FusionDefinition, x: torch.Tensor) -> dict[int, CacheReuse]:
    return dict(second_reads(fd._executor_cache().program_for([x])))  # pyright: ignore[reportPrivateUsage]


def texts_of(
    fd: FusionDefinition, x: torch.Tensor, capfd: pytest.CaptureFixture[str]
) -> tuple[torch.Tensor, list[str]]:
    (out,) = fd.execute([x], _enable_options=H200)
    printed = capfd.readouterr().out
    return out, printed.split("// end of cuda_kernel")[:-1]


def test_the_second_kernel_begins_with_what_the_first_read_last(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSER_DUMP", "cuda_kernel")
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    fd = defined(centred)
    out, (first, second) = texts_of(fd, x, capfd)
    torch.testing.assert_close(out, (x.double() - x.double().sum(0)).float(), atol=1e-3, rtol=1e-5)
    # The program from its text has such kernels, too.
    text = fd.fec.host_program().full_text()
    HostIrEvaluator(parse(text), settings=options.settings(H200)).run([x])
    again = capfd.readouterr().out.split("// end of cuda_kernel")[:-1]
    for leaves, finds in ((first, second), again):
        assert "load_vec<4>(" in leaves and "load_vec_cs" not in leaves
        assert "gridDim" not in leaves
        assert "= gridDim.x - 1 - blockIdx.x;" in finds


def test_what_no_kernel_reads_again_is_streamed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSER_DUMP", "cuda_kernel")
    x = torch.ones(ROWS, COLUMNS)
    out, (text,) = texts_of(defined(column_sum), x, capfd)
    assert out.tolist() == [float(ROWS)] * COLUMNS
    assert "load_vec_cs<4>(" in text and "gridDim" not in text


def test_groups_that_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSER_ENABLE", *H200)
    x = torch.empty(ROWS, COLUMNS)
    found = reads_of(fd := defined(centred), x)
    (number,) = (tv.number for tv in fd.fusion.inputs if isinstance(tv, TensorView))
    assert list(found.values()) == [CacheReuse(frozenset({number})), CacheReuse(is_second=True)]
    assert reads_of(defined(column_sum), x) == {}
    # Few rows are one kernel.
    assert reads_of(defined(centred), x[:64]) == {}
