"""Elementwise ops: dtypes and values compared with torch, in all layouts; promotion; errors of
calls."""

# Ops are called with wrong arguments, and with options from dictionaries.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import itertools
from typing import Any

import numpy
import pytest
import torch

from fuser import ops
from fuser.ir.dtypes import DataType, to_torch
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.pointwise_table import POINTWISE, PUBLIC
from fuser.ir.verify import verify_fusion
from fuser.ops.define import define_scalar, define_tensor
from fuser.ops.reference.meaning import evaluate_fusion
from fuser.support.errors import DefinitionError, DtypeError, UnsupportedError
from tests.support.op_cases import (
    CASES,
    COMPLEX,
    LAYOUTS,
    SHAPES,
    SPECIAL_FLOATS,
    OpCase,
    check_result,
)

D = DataType


def names_without_case() -> set[str]:
    return set(PUBLIC) - {c.name for c in CASES}


def test_every_op_of_the_table_has_a_case() -> None:
    assert names_without_case() == set()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_values_and_dtype(case: OpCase) -> None:
    for seed, shape in enumerate(SHAPES):
        fusion = case.define(len(shape))
        verify_fusion(fusion)
        assert fusion.outputs[0].dtype() is case.result
        layout = LAYOUTS[seed % len(LAYOUTS)]
        inputs = case.draw(shape, seed, layout)
        (out,) = evaluate_fusion(fusion, inputs, dtype=torch.float64)
        check_result(case, out, inputs)
        (own,) = evaluate_fusion(fusion, inputs)
        assert own.dtype is to_torch(case.result)
        check_result(case, own, inputs)


@pytest.mark.parametrize("name", ["relu", "maximum", "minimum", "clamp", "round", "sign", "isnan"])
def test_special_values(name: str) -> None:
    case = next(c for c in CASES if c.name == name and c.dtypes[0] is D.Float)
    values = torch.tensor(SPECIAL_FLOATS)
    pairs = (
        [values] if len(case.dtypes) == 1 else list(torch.meshgrid(values, values, indexing="ij"))
    )
    inputs = [p.flatten() for p in pairs]
    (out,) = evaluate_fusion(case.define(1), inputs, dtype=torch.float64)
    check_result(case, out, inputs)


# ------------------------------------------------------------------ promotion
def torch_result(a: DataType, b: DataType, ranks: tuple[int, int]) -> torch.dtype:
    left, right = (
        torch.ones([2] * r, dtype=to_torch(d)) for d, r in zip((a, b), ranks, strict=True)
    )
    dtype = torch.result_type(left, right)
    if dtype is torch.complex32:
        return torch.complex64
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@pytest.mark.parametrize("ranks", [(1, 1), (1, 0), (0, 1), (0, 0)])
def test_promotion_follows_torch_but_for_half(ranks: tuple[int, int]) -> None:
    dtypes = (D.Double, D.Float, D.Half, D.BFloat16, D.Int32, D.Int, D.Bool, *COMPLEX)
    for a, b in itertools.product(dtypes, dtypes):
        with FusionGuard(Fusion()):
            x, y = (define_tensor([-1] * r, dtype=d) for d, r in zip((a, b), ranks, strict=True))
            assert to_torch(ops.add(x, y).dtype()) is torch_result(a, b, ranks), (a, b)
            assert ops.eq(x, y).dtype() is D.Bool


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        (D.BFloat16, 2.0, D.Float),
        (D.Float, 2.0, D.Float),
        (D.Int, 1.5, D.Float),
        (D.Int32, 3, D.Int32),
        (D.Bool, 1, D.Int),
        (D.Float, 2j, D.ComplexFloat),
        (D.Double, 2j, D.ComplexDouble),
        (D.Half, 2j, D.ComplexFloat),
        (D.Float8_e4m3fn, 2j, D.ComplexFloat),
        (D.Int, 2j, D.ComplexFloat),
        (D.ComplexFloat, 2.0, D.ComplexFloat),
        (D.ComplexFloat, 2j, D.ComplexFloat),
        (D.Half, 3, D.Float),
    ],
)
def test_promotion_with_numbers(dtype: DataType, value: complex, expected: DataType) -> None:
    with FusionGuard(Fusion()):
        assert ops.add(define_tensor([-1], dtype=dtype), value).dtype() is expected


def test_promotion_with_scalars_and_where() -> None:
    with FusionGuard(Fusion()):
        ints, half = define_tensor([-1], dtype=D.Int), define_tensor([-1], dtype=D.Half)
        cond = define_tensor([-1], dtype=D.Bool)
        assert ops.add(ints, define_scalar(1.5, D.Float)).dtype() is D.Float
        assert ops.where(cond, half, half).dtype() is D.Half
        assert ops.where(cond, 1.0, 2.0).dtype() is D.Float
        assert ops.truediv(ints, ints).dtype() is D.Float
        assert ops.exp(ints).dtype() is D.Float
        z, f8 = define_tensor([-1], dtype=D.ComplexFloat), define_tensor([-1], dtype=D.Float8_e5m2)
        assert ops.add(z, f8).dtype() is D.ComplexFloat
        assert ops.where(cond, half, 1j).dtype() is D.ComplexFloat


NUMBERS: list[Any] = [True, 3, 0.5, 2j, -0.0, numpy.float32(0.5), numpy.int64(3)]


def torch_with_number(dtype: DataType, rank: int, number: Any, name: str) -> torch.dtype:
    """Returns torch's dtype for an op on a tensor and a number, in which half dtypes become
    Float."""
    operand = torch.ones([2] * rank, dtype=to_torch(dtype))
    plain = number if type(number) in (bool, int, float, complex) else number.item()
    result = torch.result_type(operand, plain)
    if name == "truediv" and not (result.is_floating_point or result.is_complex):
        return torch.float32
    if result is torch.complex32:
        return torch.complex64
    return torch.float32 if result in (torch.float16, torch.bfloat16) else result


@pytest.mark.finding("G8")
@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "pow", "maximum", "eq"])
@pytest.mark.parametrize("rank", [0, 2])
def test_dtypes_with_numbers_are_those_of_torch(name: str, rank: int) -> None:
    op = getattr(ops, name)
    dtypes = (D.Double, D.Float, D.Half, D.BFloat16, D.Int32, D.Int, D.Bool, *COMPLEX)
    for dtype, number in itertools.product(dtypes, NUMBERS):
        if name == "maximum" and (isinstance(number, complex) or dtype in COMPLEX):
            continue  # not ordered
        if name in ("sub", "truediv") and dtype is D.Bool and isinstance(number, bool):
            continue  # torch refuses a difference of two booleans
        with FusionGuard(Fusion()):
            x = define_tensor([-1] * rank, dtype=dtype)
            expected = torch_with_number(dtype, rank, number, name)
            expected = torch.bool if name == "eq" else expected
            for given in (number, define_scalar(number)):
                assert to_torch(op(x, given).dtype()) is expected, (dtype, number)
                assert to_torch(op(given, x).dtype()) is expected, (number, dtype)


@pytest.mark.finding("G8")
@pytest.mark.parametrize("rank", [0, 1])
def test_where_of_numbers_has_the_dtype_of_torch(rank: int) -> None:
    for a, b in itertools.product((True, 1, 0.5, -0.0, 2j), repeat=2):
        condition = torch.ones([1] * rank, dtype=torch.bool)
        expected = torch.where(condition, a, b).dtype
        with FusionGuard(Fusion()):
            p = define_tensor([-1] * rank, dtype=D.Bool)
            assert to_torch(ops.where(p, a, b).dtype()) is expected, (a, b)
            scalars = define_scalar(a), define_scalar(b)
            assert to_torch(ops.where(p, *scalars).dtype()) is expected, (a, b)


def test_a_scalar_input_is_a_number_that_has_no_width() -> None:
    with FusionGuard(Fusion()):
        x, d = define_tensor([-1], dtype=D.Int), define_scalar(None, D.Double)
        assert ops.mul(x, d).dtype() is D.Float
        assert ops.mul(ops.cast(x, D.Double), d).dtype() is D.Double
        # Without a tensor, scalars remain Python numbers.
        assert ops.mul(d, 2).dtype is D.Double
        assert ops.mul(x, ops.mul(d, 2)).dtype() is D.Float


def test_the_option_gives_numbers_the_width_of_nvfuser() -> None:
    fusion = Fusion()
    fusion.double_numbers = True
    with FusionGuard(fusion):
        x, p = define_tensor([-1], dtype=D.Int), define_tensor([-1], dtype=D.Bool)
        assert ops.add(x, 0.5).dtype() is D.Double
        assert ops.add(p, 2j).dtype() is D.ComplexDouble
        assert ops.where(p, 1, 0.5).dtype() is D.Double
        assert ops.add(ops.cast(x, D.Float), 0.5).dtype() is D.Float
    assert fusion.copy()[0].double_numbers


# ------------------------------------------------------------------ calls
def test_scalar_calls_return_scalars() -> None:
    with FusionGuard(Fusion()):
        d = define_scalar()
        assert str(ops.add(d, 1.0)) == "( d0 + double(1) )"
        assert str(ops.mul(3, 4)) == "12"
        assert ops.sqrt(4).dtype is D.Float
        assert str(ops.erf(d)) == "( erf(d0) )"


def test_ranks_are_aligned_by_broadcasts_and_sizes_must_match() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x, row = define_tensor([-1, 5]), define_tensor([5])
        column = define_tensor([-1, 1], contiguity=[True, None])
        out = ops.add(ops.add(x, row), column)
        assert [str(a.extent()) for a in out.get_logical_domain()] == ["i0", "5"]
        with pytest.raises(DefinitionError, match=r"Expected sizes to match.*T0.*T\d"):
            ops.add(x, define_tensor([-1, 6]))
        with pytest.raises(RuntimeError, match=r"test_elementwise.py:\d+"):
            ops.add(x, define_tensor([7]))


def test_symbolic_extents_become_one_class() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x, y, z = define_tensor([-1]), define_tensor([-1]), define_tensor([6])
        ops.add(x, y)
        assert fusion.canonical(y.size(0)) == x.size(0)
        ops.add(y, z)
        assert str(fusion.canonical(x.size(0))) == "6"


def test_dtype_errors_name_op_and_dtype() -> None:
    with FusionGuard(Fusion()):
        x = define_tensor([-1])
        with pytest.raises(
            DtypeError, match="Integer or boolean input is required for bitwise_and"
        ):
            ops.bitwise_and(x, x)
        with pytest.raises(DtypeError, match="Condition should be of DataType Bool, not float"):
            ops.where(x, x, x)
        with pytest.raises(DtypeError, match="Promoted type must be single or double precision"):
            half = define_tensor([-1], dtype=D.Half)
            ops.nextafter(half, half)
        with pytest.raises(TypeError):
            ops.add(lhs=x, rhs=x)
        with pytest.raises(TypeError, match="incompatible function arguments"):
            ops.add(x, "1")


def _refuses_in_torch(name: str, arity: int) -> bool:
    """Whether torch does not support this op for complex numbers."""
    kind, _ = PUBLIC[name]
    z = torch.ones(2, dtype=torch.complex64)
    operands = [z.real] * 2 if name == "complex" else [z] * arity
    try:
        POINTWISE[kind].torch(*([z == z, z, z] if name == "where" else operands))
    except (RuntimeError, TypeError):
        return True
    return False


@pytest.mark.parametrize("name", PUBLIC)
def test_complex_numbers_are_refused_where_torch_refuses_them(name: str) -> None:
    kind, rule = PUBLIC[name]
    row = POINTWISE[kind]
    if name != "complex":
        assert row.takes_complex is not _refuses_in_torch(name, row.arity), name
    with FusionGuard(Fusion()):
        z = define_tensor([-1], dtype=D.ComplexFloat)
        operands: list[object] = [define_tensor([-1], dtype=D.Bool), z, z]
        operands = operands[: row.arity] if rule == "select" else [z] * row.arity
        if row.arity == 3 and name in ("clamp", "threshold"):
            operands = [z, 0.0, 1.0]
        if row.takes_complex:
            getattr(ops, name)(*operands)
            return
        with pytest.raises(DtypeError, match="std::complex<float>") as caught:
            getattr(ops, name)(*operands)
        assert name in str(caught.value) or rule == "float_only"


@pytest.mark.parametrize("name", ["max", "min", "cummax", "cummin", "argsort", "topk", "sign"])
def test_what_needs_an_order_refuses_complex_numbers(name: str) -> None:
    more: list[object] = [] if name in ("max", "min", "sign") else [0]
    with FusionGuard(Fusion()):
        z = define_tensor([-1], dtype=D.ComplexDouble)
        if name == "topk":
            more = [define_scalar(2, D.Int)]
        with pytest.raises(DtypeError, match=f"{name}.*std::complex<double>"):
            getattr(ops, name)(z, *more)


def test_unsupported_dtypes_raise() -> None:
    for dtype in (D.Float4_e2m1fn, D.Float4_e2m1fn_x2):
        with (
            FusionGuard(Fusion()),
            pytest.raises(UnsupportedError, match=r"e2m1.*capability 10"),
        ):
            define_tensor([-1], dtype=dtype)


def test_mesh_is_copied_as_provenance() -> None:
    with FusionGuard(Fusion()):
        x, y = define_tensor([-1]), define_tensor([-1])
        y.set_device_mesh([0, 1])
        out: TensorView = ops.add(x, ops.exp(y))
        assert out.mesh == y.mesh and not out.mesh_is_user_set


def test_cuda_text_of_every_row_has_its_operands() -> None:
    for kind, row in POINTWISE.items():
        for text in filter(None, (row.cuda, row.cuda_int)):
            assert all(f"{{{i}}}" in text for i in range(row.arity)), (kind, text)
