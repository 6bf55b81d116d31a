"""Tests that kernels of one program that differ only in names are lowered once, and
launched apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition
from fuser.ir.canonical_form import form_of
from fuser.kernels import executor


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the names of the kernels that are lowered."""
    names: list[str] = []
    make = executor.make_kernel

    def note(*args: Any, name: str, **kwargs: Any) -> Any:
        names.append(name)
        return make(*args, name=name, **kwargs)

    monkeypatch.setattr(executor, "make_kernel", note)
    return names


def row_sums(count: int) -> FusionDefinition:
    with FusionDefinition() as fd:
        for _ in range(count):
            fd.add_output(fd.ops.sum(fd.define_tensor([-1, -1], contiguity=True), dim=1))
    return fd


@pytest.mark.parametrize("options", [[], ["schedules_for(h200)"]], ids=["cpu", "h200"])
def test_sums_of_tensors_of_different_sizes_are_one_kernel(
    options: list[str], lowered: list[str]
) -> None:
    fd = row_sums(3)
    for shapes in ([(5, 64), (6, 64), (7, 64)], [(8, 60), (5, 60), (6, 60)]):
        inputs = [torch.randn(s) for s in shapes]
        outputs = fd.execute(inputs, _enable_options=options)
        for out, x in zip(outputs, inputs, strict=True):
            torch.testing.assert_close(out, x.double().sum(1).float())
    assert fd.fec.statistics()["kernels"] == 3
    assert {*lowered} == {"kernel0"}


def test_each_takes_its_own_scalars_strides_and_extents(lowered: list[str]) -> None:
    with FusionDefinition() as fd:
        for _ in range(3):
            x = fd.define_tensor([-1, -1], contiguity=[False, True])
            s = fd.define_scalar(None, DataType.Double)
            fd.add_output(fd.ops.add(fd.ops.mul(x, s), 1.0))
    for widths in ((6, 9, 4), (5, 5, 5)):
        inputs: list[Any] = []
        for k, width in enumerate(widths):
            inputs += [torch.randn(3 + k, 20)[:, :width], 0.5 + k]
        outputs = fd.execute(inputs)
        for out, x, s in zip(outputs, inputs[::2], inputs[1::2], strict=True):
            torch.testing.assert_close(out, (x.double() * s + 1).float())
    assert lowered == ["kernel0"]


def test_what_is_dumped_or_checked_has_a_kernel_of_its_own(
    lowered: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    inputs = [torch.randn(3, 8), torch.randn(4, 8)]
    row_sums(2).execute(inputs, _enable_options=["checked"])
    assert lowered == ["kernel0", "kernel1"]
    lowered.clear()
    monkeypatch.setenv("FUSER_DUMP", "cuda_kernel")
    row_sums(2).execute(inputs)
    assert lowered == ["kernel0", "kernel1"]
    assert "kernel1(" in capfd.readouterr().out


def sum_of(build: Any, **tensor: Any) -> FusionDefinition:
    with FusionDefinition() as fd:
        fd.ops.neg(fd.define_tensor([-1], contiguity=True))  # takes numbers
        x = fd.define_tensor(**{"shape": [-1, -1], "contiguity": True, **tensor})
        fd.add_output(build(fd, x))
    return fd


def test_forms_differ_in_whatever_lowering_reads() -> None:
    """Each fusion differs from the first in one property that is no name."""
    with FusionDefinition() as other:
        y = other.define_tensor([-1, -1], contiguity=True)
        other.add_output(other.ops.sum(other.ops.mul(y, 2.0), dim=1))
    plain = sum_of(lambda fd, x: fd.ops.sum(fd.ops.mul(x, 2.0), dim=1))
    plain.fusion.inputs.pop(0)
    plain.fusion.exprs = plain.fusion.used_exprs()
    assert form_of(plain.fusion).key == form_of(other.fusion).key
    assert form_of(plain.fusion).tensors != form_of(other.fusion).tensors
    others = [
        sum_of(lambda fd, x: fd.ops.sum(fd.ops.mul(x, 3.0), dim=1)),
        sum_of(lambda fd, x: fd.ops.sum(fd.ops.mul(x, 2.0), dim=0)),
        sum_of(lambda fd, x: fd.ops.max(fd.ops.mul(x, 2.0), dim=1)),
        sum_of(lambda fd, x: fd.ops.sum(fd.ops.mul(x, 2.0), dim=1), contiguity=[False, True]),
        sum_of(lambda fd, x: fd.ops.sum(fd.ops.mul(x, 2.0), dim=1), dtype=DataType.Double),
        sum_of(lambda fd, x: fd.ops.sum(fd.ops.mul(x, 2.0), dim=1), shape=[-1, 8]),
        sum_of(lambda fd, x: fd.ops.sum(fd.ops.mul(x, x), dim=1)),
    ]
    keys = {form_of(plain.fusion).key}
    for fd in others:
        fd.fusion.inputs.pop(0)
        fd.fusion.exprs = fd.fusion.used_exprs()
        keys.add(form_of(fd.fusion).key)
    same = sum_of(lambda fd, x: fd.ops.sum(fd.ops.mul(x, 2.0), dim=1))
    same.fusion.inputs.pop(0)
    same.fusion.exprs = same.fusion.used_exprs()
    same.fusion.resident_threads = 1024
    keys.add(form_of(same.fusion).key)
    assert len(keys) == len(others) + 2
