"""Elementwise op functions, made from the table: unary, binary, ternary, cast and composites.

All are positional-only, as in nvFuser. A call with scalars only returns a scalar.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast as typing_cast
from typing import overload

from fuser.errors import DtypeError, user_line
from fuser.ir import scalar as sc
from fuser.ir.dtypes import DataType, DtypeLike, category, check_supported, dtype_text, is_floating
from fuser.ir.nodes import BinaryOp, LoadStoreOp, TernaryOp, UnaryOp
from fuser.ir.scalar import Const, Scalar, ScalarLike
from fuser.ir.tensor import TensorView
from fuser.ir.types import LoadStoreOpType
from fuser.ops.building import (
    Operand,
    OperandLike,
    add_op,
    align_ranks,
    as_operand,
    cast_tensor,
    clone_axes,
    convert,
    fail,
    new_output,
    pointwise_output,
    promote,
    promote_keeping_half,
    unsupported,
)
from fuser.ops.table import (
    LOGICAL_TWIN,
    POINTWISE,
    PUBLIC,
    Rule,
    highest,
    lowest,
    operand_dtype,
)

# Node kind -> scalar op of `fuser.ir.scalar.COMPUTE`, for calls without a tensor.
_SCALAR_OPS = {
    "neg": "neg",
    "abs": "abs",
    "sqrt": "sqrt",
    "rsqrt": "rsqrt",
    "exp": "exp",
    "log": "log",
    "reciprocal": "reciprocal",
    "logical_not": "!",
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "mod": "%",
    "fmod": "%",
    "pow": "pow",
    "maximum": "max",
    "minimum": "min",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "logical_and": "&&",
    "logical_or": "||",
    "where": "where",
    "bitwise_and": "&",
    "bitwise_or": "|",
    "bitwise_xor": "^",
    "bitwise_not": "~",
    "bitwise_left_shift": "<<",
    "bitwise_right_shift": ">>",
}
_NODES = {1: UnaryOp, 2: BinaryOp, 3: TernaryOp}


# ------------------------------------------------------------------ dtype rules
def _typed(name: str, rule: Rule, values: list[Operand]) -> tuple[list[Operand], DataType]:
    """Convert the operands as the rule says; return them and the result dtype."""
    for v in values:
        check_supported(operand_dtype(v), name)
    match rule:
        case "keep" | "keep_float":
            dtype = operand_dtype(values[0])
            if rule == "keep_float" and not is_floating(dtype):
                raise DtypeError(f"{name}: a floating operand is needed, got {dtype_text(dtype)}")
            return [values[0], *(convert(v, dtype) for v in values[1:])], dtype
        case "test":
            return values, DataType.Bool
        case "bool":
            return [convert(v, DataType.Bool) for v in values], DataType.Bool
        case "comparison" | "test_promoted":
            converted, _ = promote(values, "comparison")
            return converted, DataType.Bool
        case "select":
            return _typed_where(name, values)
        case "bits" | "int":
            _need_integers(name, values)
            return promote(values, "default")
        case _:
            return promote(values, rule)


def _need_integers(name: str, values: list[Operand]) -> None:
    for v in values:
        dtype = operand_dtype(v)
        if category(dtype) not in ("int", "bool") or (
            category(dtype) == "bool" and name not in LOGICAL_TWIN
        ):
            accepted = "Integer or boolean" if name in LOGICAL_TWIN else "Integer"
            raise DtypeError(
                f"{accepted} input is required for {name} but found {dtype_text(dtype)} "
                f"(at {user_line()})"
            )


def _typed_where(name: str, values: list[Operand]) -> tuple[list[Operand], DataType]:
    cond = operand_dtype(values[0])
    if cond is not DataType.Bool:
        raise DtypeError(
            f"{name}: Condition should be of DataType Bool, not {dtype_text(cond)} "
            f"(at {user_line()})"
        )
    rest, dtype = promote_keeping_half(values[1:])
    return [values[0], *rest], dtype


# ------------------------------------------------------------------ the call
def apply_pointwise(name: str, arguments: tuple[OperandLike, ...]) -> Operand:
    """Append the nodes of one elementwise op call; return its result."""
    kind, rule = PUBLIC[name]
    values = [as_operand(a, name) for a in arguments]
    if name in LOGICAL_TWIN and all(operand_dtype(v) is DataType.Bool for v in values):
        kind = LOGICAL_TWIN[name]
        rule = "comparison" if kind == "ne" else "bool"
    values, dtype = _typed(name, rule, values)
    if not any(isinstance(v, TensorView) for v in values):
        return _apply_scalar(name, kind, typing_cast(list[Scalar], values), dtype)
    values = align_ranks(values)
    out = pointwise_output(values, dtype, name)
    add_op(_NODES[len(values)](out, *values, kind=kind))
    return out


def _apply_scalar(name: str, kind: str, values: list[Scalar], dtype: DataType) -> Scalar:
    op = _SCALAR_OPS.get(kind)
    if op is None:
        texts = ", ".join(map(str, values))
        raise unsupported(name, f"not available for scalars only ({texts})")
    if op == "neg" and category(dtype) == "int":
        return sc.mul(values[0], -1)
    result = sc.where(*values) if op == "where" else sc.apply(op, *values)
    return sc.cast(result, dtype) if category(result.dtype) != category(dtype) else result


def _make(name: str) -> Callable[..., Operand]:
    kind, rule = PUBLIC[name]
    arity = POINTWISE[kind].arity

    def unary(x: OperandLike, /) -> Operand:
        return apply_pointwise(name, (x,))

    def binary(lhs: OperandLike, rhs: OperandLike, /) -> Operand:
        return apply_pointwise(name, (lhs, rhs))

    def ternary(a: OperandLike, b: OperandLike, c: OperandLike, /) -> Operand:
        return apply_pointwise(name, (a, b, c))

    function = {1: unary, 2: binary, 3: ternary}[arity]
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Append `{name}`, element by element (dtype rule: {rule})."
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
def cast(arg: Scalar | bool | int | float, dtype: DtypeLike) -> Scalar: ...
def cast(arg: OperandLike, dtype: DtypeLike) -> Operand:
    """Append a conversion; floats become integers by truncation. The same dtype is a `set`."""
    value = as_operand(arg, "cast")
    check_supported(operand_dtype(value), "cast")
    dtype = check_supported(dtype, "cast")
    if isinstance(value, Scalar):
        return sc.cast(value, dtype)
    return copy_tensor(value) if value.dtype() is dtype else cast_tensor(value, dtype)


def real(x: OperandLike, /) -> Operand:
    """Append a copy: every supported dtype is real."""
    return set_(x)


def imag(x: OperandLike, /) -> Operand:
    """Raise: no supported dtype is complex."""
    dtype = operand_dtype(as_operand(x, "imag"))
    raise DtypeError(f"imag: a complex operand is needed, got {dtype_text(dtype)}")


# ------------------------------------------------------------------ optional or fixed slots
def clamp(x: OperandLike, min: ScalarLike | None, max: ScalarLike | None, /) -> Operand:
    """Append max(min(x, max), min); None is the end of the dtype's range. Limits are scalars."""
    value = as_operand(x, "clamp")
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
    if any(is_floating(operand_dtype(v)) for v in operands):
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
    _need_integers("logical_right_shift", values)
    values, dtype = promote(values, "default")
    value, count = values
    # The arithmetic shift repeats the sign; the mask keeps the width - count low bits.
    ones = _call("bitwise_right_shift", Const(highest(dtype), dtype), _call("sub", count, 1))
    masked = _call("bitwise_and", _call("bitwise_right_shift", value, count), ones)
    return _call("where", _call("eq", count, 0), value, masked)


def check_rank_at_least(op_name: str, tv: TensorView, rank: int) -> None:
    if tv.ndim < rank:
        raise fail(op_name, f"rank of at least {rank} is needed, got {tv}")
