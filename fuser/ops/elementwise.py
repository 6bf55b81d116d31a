"""Elementwise op functions, made from the table: unary, binary, ternary, cast and composites.

All are positional-only, as in nvFuser. A call with scalars only returns a scalar.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast as typing_cast
from typing import overload

from fuser.ir.dtypes import (
    DataType,
    DtypeLike,
    category,
    check_supported,
    dtype_text,
    is_complex,
    is_inexact,
)
from fuser.ir.ops.nodes import BinaryOp, LoadStoreOp, TernaryOp, UnaryOp
from fuser.ir.pointwise_table import POINTWISE, PUBLIC
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Const, Scalar, ScalarLike
from fuser.ir.tensor import TensorView
from fuser.ir.types import LoadStoreOpType
from fuser.ops.building import (
    Operand,
    OperandLike,
    add_op,
    align_ranks,
    as_operand,
    cast_tensor,
    check_exact,
    clone_axes,
    convert,
    fail,
    new_output,
    pointwise_output,
    refuse_complex,
)
from fuser.ops.dtype_rules import integers, typed
from fuser.ops.reduction_table import highest, lowest, operand_dtype
from fuser.support.arguments import show
from fuser.support.errors import ArgumentError, DtypeError, user_line

_NODES = {1: UnaryOp, 2: BinaryOp, 3: TernaryOp}


# ------------------------------------------------------------------ the call
def apply_pointwise(name: str, arguments: tuple[OperandLike, ...]) -> Operand:
    """Append the nodes of one elementwise op call; return its result."""
    kind, rule = PUBLIC[name]
    values = [as_operand(a, name) for a in arguments]
    of_bools = POINTWISE[kind].of_bools
    if of_bools and all(operand_dtype(v) is DataType.Bool for v in values):
        kind, rule = of_bools, POINTWISE[of_bools].rule
    values, dtype = typed(name, rule, values)
    if not any(isinstance(v, TensorView) for v in values):
        return _apply_scalar(kind, typing_cast(list[Scalar], values), dtype)
    for k in POINTWISE[kind].exact:
        check_exact(values[k], dtype, name)
    values = align_ranks(values)
    out = pointwise_output(values, dtype, name)
    add_op(_NODES[len(values)](out, *values, kind=kind))
    return out


def _apply_scalar(kind: str, values: list[Scalar], dtype: DataType) -> Scalar:
    """Return the scalar that the op makes of scalars."""
    row = POINTWISE[kind]
    if kind == "neg" and category(dtype) == "int":
        return sc.mul(values[0], Const(-1, values[0].dtype))
    narrow = f"{row.scalar}f"
    op = narrow if dtype is DataType.Float and narrow in sc.COMPUTE else row.scalar
    result = sc.where(*values) if op == "where" else sc.apply(op, *values)
    is_typed = category(result.dtype) == category(dtype) and not is_inexact(dtype)
    return result if is_typed else sc.cast(result, dtype)


def _make(name: str) -> Callable[..., Operand]:
    kind, _ = PUBLIC[name]
    arity = POINTWISE[kind].arity

    def unary(x: OperandLike, /) -> Operand:
        return apply_pointwise(name, (x,))

    def binary(lhs: OperandLike, rhs: OperandLike, /) -> Operand:
        return apply_pointwise(name, (lhs, rhs))

    def ternary(a: OperandLike, b: OperandLike, c: OperandLike, /) -> Operand:
        return apply_pointwise(name, (a, b, c))

    function = {1: unary, 2: binary, 3: ternary}[arity]
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Append {name}, element by element: {POINTWISE[kind].meaning}"
    return function


ELEMENTWISE: dict[str, Callable[..., Operand]] = {name: _make(name) for name in PUBLIC}


# ------------------------------------------------------------------ copies and casts
def copy_tensor(tv: TensorView, kind: LoadStoreOpType = LoadStoreOpType.set) -> TensorView:
    """Append a plain copy."""
    out = new_output(clone_axes(tv), tv.dtype(), [tv])
    add_op(LoadStoreOp(out, tv, kind=kind))
    return out


def set_(x: OperandLike, /) -> Operand:
    """Append a copy of a tensor; a scalar is returned as it is."""
    value = as_operand(x, "set")
    return copy_tensor(value) if isinstance(value, TensorView) else value


def segment_set(x: TensorView, /) -> TensorView:
    """Append a copy that forces a segment boundary."""
    return copy_tensor(x, LoadStoreOpType.segmenter_set)


@overload
def cast(arg: TensorView, dtype: DtypeLike) -> TensorView: ...
@overload
def cast(arg: Scalar | bool | int | float | complex, dtype: DtypeLike) -> Scalar: ...
def cast(arg: OperandLike, dtype: DtypeLike) -> Operand:
    """Append a conversion: floats become integers by truncation, complex numbers their real parts,
    in Bool whether they are not 0. The same dtype is a `set`."""
    value = as_operand(arg, "cast")
    check_supported(operand_dtype(value), "cast")
    dtype = check_supported(dtype, "cast")
    if isinstance(value, Scalar):
        return sc.cast(value, dtype)
    return copy_tensor(value) if value.dtype() is dtype else cast_tensor(value, dtype)


def real(x: OperandLike, /) -> Operand:
    """Append the real parts; of a real operand, a copy."""
    value = as_operand(x, "real")
    return apply_pointwise("real", (value,)) if is_complex(operand_dtype(value)) else set_(value)


def imag(x: OperandLike, /) -> Operand:
    """Append the imaginary parts of a complex operand."""
    value = as_operand(x, "imag")
    dtype = operand_dtype(value)
    if not is_complex(dtype):
        raise DtypeError(
            f"imag: a complex operand is needed, got {dtype_text(dtype)} (at {user_line()})"
        )
    return apply_pointwise("imag", (value,))


def complex_(lhs: OperandLike, rhs: OperandLike, /) -> Operand:
    """Append lhs + i rhs: two tensors, or two scalars."""
    if isinstance(lhs, TensorView) is not isinstance(rhs, TensorView):
        raise ArgumentError(
            "complex(): incompatible function arguments: expected two tensors or two scalars, got "
            f"{show(lhs)} and {show(rhs)} (at {user_line()})"
        )
    return apply_pointwise("complex", (lhs, rhs))


# ------------------------------------------------------------------ optional or fixed slots
def clamp(x: OperandLike, min: ScalarLike | None, max: ScalarLike | None, /) -> Operand:
    """Append min(max(x, min), max); None is the end of the dtype's range. Limits are scalars."""
    value = as_operand(x, "clamp")
    refuse_complex("clamp", value)
    dtype = operand_dtype(value)
    limits: list[OperandLike] = []
    for limit, end in ((min, lowest(dtype)), (max, highest(dtype))):
        limits.append(Const(end, dtype) if limit is None else limit)
    return apply_pointwise("clamp", (value, *limits))


def threshold(x: OperandLike, threshold: ScalarLike, value: ScalarLike, /) -> Operand:
    """Append x <= threshold ? value : x. Threshold and value are scalars."""
    return apply_pointwise("threshold", (x, threshold, value))


def lerp(start: OperandLike, end: OperandLike, weight: OperandLike, /) -> Operand:
    """Append start + weight * (end - start)."""
    values: tuple[OperandLike, ...] = (start, end, weight)
    operands = [as_operand(v, "lerp") for v in values]
    if any(is_inexact(operand_dtype(v)) for v in operands):
        return apply_pointwise("lerp", tuple(operands))
    a, b, w = operands
    return _call("add", a, _call("mul", w, _call("sub", b, a)))


# ------------------------------------------------------------------ composites
def _call(name: str, *arguments: OperandLike) -> Operand:
    return apply_pointwise(name, arguments)


def addcmul(in1: OperandLike, in2: OperandLike, in3: OperandLike, value: ScalarLike, /) -> Operand:
    """Append in1 + in2 * in3 * value; `value` is a scalar."""
    return _call("add", in1, _call("mul", _call("mul", in2, in3), value))


def sign(x: OperandLike, /) -> Operand:
    """Append -1, 0 or 1 in x's dtype; NaN gives 0."""
    value = as_operand(x, "sign")
    refuse_complex("sign", value)
    dtype = operand_dtype(value)
    if category(dtype) == "bool":
        return set_(value)
    zero = Const(0, dtype)
    negative = _call("where", _call("lt", value, zero), Const(-1, dtype), zero)
    result = _call("where", _call("gt", value, zero), Const(1, dtype), negative)
    return convert(result, dtype)


def logical_right_shift(lhs: OperandLike, rhs: OperandLike, /) -> Operand:
    """Append lhs >> rhs with zeros shifted in; counts outside [0, width) give 0."""
    values = [as_operand(lhs, "logical_right_shift"), as_operand(rhs, "logical_right_shift")]
    values, dtype = integers("logical_right_shift", values)
    value, count = values
    # The arithmetic shift repeats the sign; the mask keeps the width - count low bits.
    ones = _call("bitwise_right_shift", Const(highest(dtype), dtype), _call("sub", count, 1))
    masked = _call("bitwise_and", _call("bitwise_right_shift", value, count), ones)
    return _call("where", _call("eq", count, 0), value, masked)


def check_rank_at_least(op_name: str, tv: TensorView, rank: int) -> None:
    if tv.ndim < rank:
        raise fail(op_name, f"rank of at least {rank} is needed, got {tv}")
