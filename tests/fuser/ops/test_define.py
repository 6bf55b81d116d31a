"""define_tensor, define_scalar and layouts from strides."""

from __future__ import annotations

import itertools

import pytest
import torch

from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.verify import verify_fusion
from fuser.ops.define import compute_tensor_descriptor, define_scalar, define_tensor
from fuser.support.errors import DefinitionError, UnsupportedError

D = DataType


def made(*args: object, **kwargs: object) -> TensorView:
    fusion = Fusion()
    with FusionGuard(fusion):
        tv = define_tensor(*args, **kwargs)
        fusion.add_input(tv)
    verify_fusion(fusion)
    return tv


def test_forms_and_defaults() -> None:
    assert str(made([-1, 1, 0, 4])) == "T0_g_float[iS0{i0}, bS1{1}, iS2{0}, iS3{4}]"
    assert made([-1, 1]).domain.contiguity == (False, None)
    assert made([-1, 1], True).domain.contiguity == (True, None)
    assert made(shape=(-1, 3), contiguity=[True, False], dtype=D.Half).dtype() is D.Half
    assert str(made([2, 3], [3, 1])) == "T0_g_float[iS0{i0}, iS1{i1}]"
    fixed = made(sizes=torch.Size([2, 3]), strides=(1, 2), static_sizes=True)
    assert str(fixed) == "T0_g_float[iS0{2}, iS1{3}]"
    assert [a.number for a in fixed.domain.allocation] == [1, 0]
    assert fixed.domain.contiguity == (True, True)
    assert made([], is_cpu=True).is_cpu_scalar
    assert made([]).ndim == 0


def test_expanded_broadcasts() -> None:
    tv = made([4, -1, 3], contiguity=[None, None, True])
    assert str(tv) == "T0_g_float[bS0{1 ex 4}, bS1{1 ex i0}, iS2{3}]"
    assert [str(s) for s in tv.shape()] == ["4", "i0", "3"]


def test_contiguity_is_in_allocation_order() -> None:
    tv = made([-1, 1, -1], contiguity=[None, True, False], stride_order=[0, 2, 1])
    assert [a.number for a in tv.domain.allocation] == [1, 2, 0]
    assert tv.domain.contiguity == (None, True, False)
    assert made([-1, -1], stride_order=[1, 0]).domain.allocation == ()


def test_scalar_numbers_follow_the_first_axes() -> None:
    with FusionGuard(Fusion()):
        first, second = define_tensor([-1, -1]), define_tensor([-1, -1])
        assert [str(s) for s in (*first.shape(), *second.shape())] == ["i0", "i1", "i3", "i4"]
    with FusionGuard(Fusion()):
        define_tensor([-1])
        assert str(define_scalar()) == "d2"


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"shape": [-2]}, r"The value -2 at index 0 was neither symbolic\(-1\)"),
        ({"shape": [2], "contiguity": [True, True]}, r"Length of contiguity argument \(2\)"),
        ({"shape": [1], "contiguity": [True]}, "must be None"),
        ({"shape": [2, 3], "stride_order": [0]}, r"Length of stride_order argument \(1\)"),
        ({"shape": [2, 3], "stride_order": [0, 2]}, "stride_order argument is out of range"),
        ({"shape": [2, 3], "stride_order": [1, 1]}, "got duplicated stride_order entries"),
        ({"shape": [2], "is_cpu": True}, "CPU non-scalar tensor is not supported"),
        ({"sizes": [2], "strides": [1, 2]}, "1 size, but 2 strides"),
        ({"sizes": [2], "strides": [-1]}, "negative stride on tensor is not supported"),
    ],
)
def test_errors(kwargs: dict[str, object], text: str) -> None:
    with FusionGuard(Fusion()), pytest.raises(DefinitionError, match=text):
        define_tensor(**kwargs)


def test_unsupported_and_wrong_types() -> None:
    with FusionGuard(Fusion()):
        with pytest.raises(UnsupportedError):
            define_tensor([2, 3], stride_order=[-1, 0])
        with pytest.raises(DefinitionError, match="1\\+2j is complex, but double is real"):
            define_scalar(1 + 2j, D.Double)
        with pytest.raises(TypeError):
            define_tensor([2], contiguity=["yes"])
        with pytest.raises(TypeError):
            define_scalar("x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(DefinitionError, match="no active fusion"):
        define_tensor([2])


def test_scalars() -> None:
    with FusionGuard(Fusion()):
        assert define_scalar(3).dtype is D.Int and define_scalar(3.0).dtype is D.Double
        assert define_scalar(True, D.Bool).dtype is D.Bool
        assert define_scalar(1 - 2j).dtype is D.ComplexDouble
        assert define_scalar(3, D.ComplexFloat).value == 3 + 0j  # pyright: ignore[reportAttributeAccessIssue]
        assert define_scalar(None, D.ComplexFloat).dtype is D.ComplexFloat
        assert define_scalar(None, D.Int32).dtype is D.Int32
        assert define_scalar(D.Float).dtype is D.Float
        assert define_scalar(dtype=D.Half).dtype is D.Half
        assert define_scalar(2, D.Float).value == 2.0  # pyright: ignore[reportAttributeAccessIssue]


def test_descriptor_of_real_tensors() -> None:
    base = torch.empty(2, 3, 4)
    for order in itertools.permutations(range(3)):
        x = base.permute(order)
        contiguity, stride_order = compute_tensor_descriptor(x.shape, x.stride())
        assert contiguity == [True] * 3
        # The axis with the largest stride has the largest rank.
        assert [sorted(x.stride()).index(s) for s in x.stride()] == stride_order
    assert compute_tensor_descriptor([3, 4], [8, 2]) == ([True, False], [1, 0])
    assert compute_tensor_descriptor([3, 4], [5, 1]) == ([False, True], [1, 0])
    assert compute_tensor_descriptor([3, 5, 4], [4, 0, 1]) == ([True, None, True], [2, 1, 0])
    assert compute_tensor_descriptor([3, 1, 4], [4, 4, 1])[0] == [True, None, True]
