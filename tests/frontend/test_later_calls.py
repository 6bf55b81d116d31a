"""What the first call of a signature refuses, every later call refuses too."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fuser import DataType, FusionDefinition, InputError


def doubled() -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.mul(x, 2.0))
    fd.execute([torch.randn(2, 3)])
    return fd


def short() -> torch.Tensor:
    t = torch.randn(100).as_strided((2, 3), (3, 1))
    t.untyped_storage().resize_(8)
    return t


def short_behind_an_offset() -> torch.Tensor:
    t = torch.randn(100).as_strided((2, 3), (3, 1), 90)
    t.untyped_storage().resize_(4 * 95)
    return t


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.randn(2, 3)


@pytest.mark.parametrize("make", [short, short_behind_an_offset, fake])
def test_tensors_that_kernels_cannot_read(make: Callable[[], torch.Tensor]) -> None:
    fd = doubled()
    for _ in range(2):
        with pytest.raises(InputError):
            fd.execute([make()])
    x = torch.randn(2, 3)
    assert torch.equal(fd.execute([x])[0], x * 2)


def nested() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([torch.randn(3), torch.randn(3)])


@pytest.mark.parametrize(
    "given",
    [
        lambda: [short()],
        lambda: [short_behind_an_offset()],
        lambda: [fake()],
        lambda: [nested()],
        lambda: [torch.randn(2, 3), nested()],
        lambda: [torch.randn(2, 3)] * 2,
        list,
        lambda: [2.0],
        lambda: torch.randn(2, 3),
        lambda: [torch.randn(2, 3, dtype=torch.float64)],
    ],
)
def test_what_is_known_at_a_glance_is_still_looked_at(given: Callable[[], list[object]]) -> None:
    """After the second call of a kind, inputs are compared in one go."""
    fd, x = doubled(), torch.randn(2, 3)
    for _ in range(2):
        fd.execute([x])
    for _ in range(2):
        with pytest.raises(InputError):
            fd.execute(given())
        assert torch.equal(fd.execute([x])[0], x * 2)
        assert torch.equal(fd.execute(iter([x]))[0], x * 2)


def test_a_view_between_two_vectors_has_a_kernel_of_its_own() -> None:
    fd, x = doubled(), torch.randn(20)
    for shift in (0, 1, 0, 2, 1, 0):
        for _ in range(3):
            view = x[shift : shift + 6].view(2, 3)
            assert torch.equal(fd.execute([view])[0], view * 2)


@pytest.mark.parametrize("device", ["abc", -1, 300, 1.5, [1], "meta", "cuda:99"])
def test_devices_that_do_not_fit(device: object) -> None:
    with pytest.raises(InputError):
        doubled().execute([torch.randn(2, 3)], device=device)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [
        (DataType.Int32, 2, 2**40 + 3),
        (DataType.Int32, 2, -(2**31) - 1),
        (DataType.Half, 1.5, 1e6),
        (DataType.Float, 1.5, 1e300),
        (DataType.Int, 2, 2**63),
    ],
)
def test_numbers_out_of_range(dtype: DataType, good: float, bad: float) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        n = fd.define_scalar(None, dtype)
        fd.add_output(fd.ops.mul(x, n))
    x = torch.ones(3)
    fd.execute([x, good])
    with pytest.raises(InputError, match="range"):
        fd.execute([x, bad])
    assert fd.execute([x, good])[0][0] == good


def test_tensors_inside_a_function_transform_are_refused_by_name() -> None:
    fd = doubled()
    with pytest.raises(InputError, match=r"torch\.func|plain tensor"):
        torch.func.vmap(lambda v: fd.execute([v])[0])(torch.randn(4, 2, 3))
