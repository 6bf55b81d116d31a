"""Elementwise op functions, made from the table: unary, binary, ternary, cast and composites.

All are positional-only, as in nvFuser. A call with scalars only returns a scalar.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast as typing_cast
from typing import overload

from fuser.ir.dtypes import (
    COMPLEX_OF,
    Config,
    DataType,
    DtypeLike,
    category,
    check_supported,
    complex_of,
    dtype_text,
    is_complex,
    is_inexact,
    misfit,
    part_of,
)
from fuser.ir.fusion import TensorView
from fuser.ir.ops.nodes import BinaryOp, LoadStoreOp, TernaryOp, UnaryOp
from fuser.ir.pointwise_table import POINTWISE, PUBLIC, TESTS
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Const, Scalar, ScalarLike
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
    promote,
    promote_keeping_half,
    refuse_complex,
)
from fuser.ops.reduction_table import highest, lowest, operand_dtype
from fuser.support.arguments import show
from fuser.support.errors import ArgumentError, DtypeError, user_line
from fuser.support.record import record

_NODES = {1: UnaryOp, 2: BinaryOp, 3: TernaryOp}


# ------------------------------------------------------------------ the call
def apply_pointwise(name: str, arguments: tuple[OperandLike, ...]) -> Operand:
    """Appends the nodes of one elementwise op call; returns its result."""
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
    """Returns the scalar that the op makes of scalars."""
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
    """Appends a plain copy."""
    out = new_output(clone_axes(tv), tv.dtype(), [tv])
    add_op(LoadStoreOp(out, tv, kind=kind))
    return out


def set_(x: OperandLike, /) -> Operand:
    """Appends a copy of a tensor; a scalar is returned as it is."""
    value = as_operand(x, "set")
    return copy_tensor(value) if isinstance(value, TensorView) else value


def segment_set(x: TensorView, /) -> TensorView:
    """Appends a copy that forces a segment boundary."""
    return copy_tensor(x, LoadStoreOpType.segmenter_set)


@overload
def cast(arg: TensorView, dtype: DtypeLike) -> TensorView: ...
@overload
def cast(arg: Scalar | bool | int | float | complex, dtype: DtypeLike) -> Scalar: ...
def cast(arg: OperandLike, dtype: DtypeLike) -> Operand:
    """Appends a conversion: floats become integers by truncation, complex numbers their real parts,
    in Bool whether they are not 0. The same dtype is a `set`."""
    value = as_operand(arg, "cast")
    check_supported(operand_dtype(value), "cast")
    dtype = check_supported(dtype, "cast")
    if isinstance(value, Scalar):
        return sc.cast(value, dtype)
    return copy_tensor(value) if value.dtype() is dtype else cast_tensor(value, dtype)


def real(x: OperandLike, /) -> Operand:
    """Appends the real parts; of a real operand, a copy."""
    value = as_operand(x, "real")
    return apply_pointwise("real", (value,)) if is_complex(operand_dtype(value)) else set_(value)


def imag(x: OperandLike, /) -> Operand:
    """Appends the imaginary parts of a complex operand."""
    value = as_operand(x, "imag")
    dtype = operand_dtype(value)
    if not is_complex(dtype):
        raise DtypeError(
            f"imag: a complex operand is needed, got {dtype_text(dtype)} (at {user_line()})"
        )
    return apply_pointwise("imag", (value,))


def complex_(lhs: OperandLike, rhs: OperandLike, /) -> Operand:
    """Appends lhs + i rhs: two tensors, or two scalars."""
    if isinstance(lhs, TensorView) is not isinstance(rhs, TensorView):
        raise ArgumentError(
            "complex(): incompatible function arguments: expected two tensors or two scalars, got "
            f"{show(lhs)} and {show(rhs)} (at {user_line()})"
        )
    return apply_pointwise("complex", (lhs, rhs))


# ------------------------------------------------------------------ optional or fixed slots
def clamp(x: OperandLike, min: ScalarLike | None, max: ScalarLike | None, /) -> Operand:
    """Appends min(max(x, min), max); None is the end of the dtype's range. Limits are scalars."""
    value = as_operand(x, "clamp")
    refuse_complex("clamp", value)
    dtype = operand_dtype(value)
    limits: list[OperandLike] = []
    for limit, end in ((min, lowest(dtype)), (max, highest(dtype))):
        limits.append(Const(end, dtype) if limit is None else limit)
    return apply_pointwise("clamp", (value, *limits))


def threshold(x: OperandLike, threshold: ScalarLike, value: ScalarLike, /) -> Operand:
    """Appends x <= threshold ? value : x. Threshold and value are scalars."""
    return apply_pointwise("threshold", (x, threshold, value))


def lerp(start: OperandLike, end: OperandLike, weight: OperandLike, /) -> Operand:
    """Appends start + weight * (end - start)."""
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
    """Appends in1 + in2 * in3 * value; `value` is a scalar."""
    return _call("add", in1, _call("mul", _call("mul", in2, in3), value))


def sign(x: OperandLike, /) -> Operand:
    """Appends -1, 0 or 1 in x's dtype; NaN gives 0."""
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
    """Appends lhs >> rhs with zeros shifted in; counts outside [0, width) give 0."""
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


# ----------------------------------------------------------------------
# How ops type their operands and results: a row per rule.
#
# A rule that turns operands into the dtype in which an elementwise op computes does so in `apply`.
# The others are what an op's function does by itself.

Typed = tuple[list[Operand], DataType]
Apply = Callable[[str, list[Operand]], Typed]


@record
class DtypeRule:
    """What the rule says; the operands of a call in its dtypes, with the dtype of the result (that
    in which a test is computed); the categories of dtypes that it takes (see `samples`)."""

    sentence: str
    apply: Apply | None = None
    takes: str = "fib"


def typed(name: str, rule: str, values: list[Operand]) -> Typed:
    """Converts the operands of a call of `name` as the rule says; returns them and the result
    dtype.

    Raises `DtypeError` for what the rule does not take, `UnsupportedError` for dtypes that cannot
    be computed with.
    """
    for v in values:
        check_supported(operand_dtype(v), name)
    apply = DTYPE_RULES[rule].apply
    assert apply is not None, f"{name} types its operands by itself"
    converted, dtype = apply(name, values)
    return converted, DataType.Bool if rule in TESTS else dtype


# ------------------------------------------------------------------ one function per rule
def _check_complex(name: str, values: list[Operand]) -> None:
    """Raises `DtypeError` for complex operands of an op that has no meaning for them."""
    kind, _ = PUBLIC.get(name, ("", ""))
    if kind and not POINTWISE[kind].takes_complex:
        refuse_complex(name, *values)


def _promoted(config: Config) -> Apply:
    def apply(name: str, values: list[Operand]) -> Typed:
        if config != "float_only":  # which has words of its own
            _check_complex(name, values)
        return promote(values, config)

    return apply


def _kept(name: str, values: list[Operand]) -> Typed:
    _check_complex(name, values)
    dtype = operand_dtype(values[0])
    return [values[0], *(convert(v, dtype) for v in values[1:])], dtype


_ORDER = ("bool", "int", "float", "complex")


def _is_above(dtype: DataType, other: DataType) -> bool:
    """Whether a dtype is of a higher category: its values are not those of the other."""
    return _ORDER.index(category(dtype)) > _ORDER.index(category(other))


def _limited(name: str, values: list[Operand]) -> Typed:
    refuse_complex(name, *values)
    dtype = operand_dtype(values[0])
    is_on_tensors = any(isinstance(v, TensorView) for v in values)
    converted, promoted = promote_keeping_half(values, is_on_tensors=is_on_tensors)
    if _is_above(promoted, dtype):
        return converted, promoted
    _check_fit(name, values, dtype)
    return _kept(name, values)


def _fitting(name: str, values: list[Operand]) -> Typed:
    refuse_complex(name, *values)
    dtype = operand_dtype(values[0])
    _check_fit(name, values, dtype)
    for v in values[1:]:
        if not isinstance(v, Const) and _is_above(operand_dtype(v), dtype):
            raise DtypeError(
                f"{name}: the result has the dtype {dtype_text(dtype)} of {values[0]}, and {v} is "
                f"{dtype_text(operand_dtype(v))}: cast one of them first (at {user_line()})"
            )
    return _kept(name, values)


def _check_fit(name: str, values: list[Operand], dtype: DataType) -> None:
    """Raises `DefinitionError` for a number that is no value of the dtype."""
    for v in values[1:]:
        if not isinstance(v, Const):
            continue
        problem = misfit(v.value, dtype)
        if category(dtype) == "bool" and v.value not in (0, 1):
            problem = f"{v.value:g} is no value of bool"
        if problem:
            raise fail(
                name,
                f"{problem}, the dtype of {values[0]} and of the result: cast the operand first, "
                "or give a number that fits",
            )


def _kept_floating(name: str, values: list[Operand]) -> Typed:
    dtype = operand_dtype(values[0])
    if not is_inexact(dtype):
        raise DtypeError(f"{name}: a floating operand is needed, got {dtype_text(dtype)}")
    return _kept(name, values)


def _part(name: str, values: list[Operand]) -> Typed:
    return values, part_of(operand_dtype(values[0]))


def _of_parts(name: str, values: list[Operand]) -> Typed:
    dtypes = [operand_dtype(v) for v in values]
    if dtypes[0] not in COMPLEX_OF or dtypes[1] is not dtypes[0]:
        found = " and ".join(map(dtype_text, dtypes))
        raise DtypeError(
            f"{name}: two operands of dtype float or double are needed, got {found} "
            f"(at {user_line()})"
        )
    return values, complex_of(dtypes[0])


def _as_bool(name: str, values: list[Operand]) -> Typed:
    return [convert(v, DataType.Bool) for v in values], DataType.Bool


def integers(name: str, values: list[Operand]) -> Typed:
    """Returns integers promoted; raises `DtypeError` for any other, and for Bool where the op has
    no meaning for Bool."""
    takes_bools = name in POINTWISE and bool(POINTWISE[name].of_bools)
    for v in values:
        kind = category(operand_dtype(v))
        if kind != "int" and not (kind == "bool" and takes_bools):
            accepted = "Integer or boolean" if takes_bools else "Integer"
            raise DtypeError(
                f"{accepted} input is required for {name} but found "
                f"{dtype_text(operand_dtype(v))} (at {user_line()})"
            )
    return promote(values, "default")


def _selected(name: str, values: list[Operand]) -> Typed:
    cond = operand_dtype(values[0])
    if cond is not DataType.Bool:
        raise DtypeError(
            f"{name}: Condition should be of DataType Bool, not {dtype_text(cond)} "
            f"(at {user_line()})"
        )
    is_on_tensors = any(isinstance(v, TensorView) for v in values)
    rest, dtype = promote_keeping_half(values[1:], is_on_tensors=is_on_tensors)
    return [values[0], *rest], dtype


# ------------------------------------------------------------------ the table
DTYPE_RULES: dict[str, DtypeRule] = {
    "default": DtypeRule(
        "Operands are promoted as torch promotes them: of a number or scalar beside tensors only "
        "the category counts, so that 0.5 beside integers or Bool alone gives Float, 2j "
        "ComplexFloat (with the option `double_numbers` Double and ComplexDouble, as in nvFuser). "
        "Floats of one byte with others become at least Float; Half, BFloat16 and Float8 become "
        "Float; the result has that dtype. An integer out of its range wraps, as in torch; as the "
        "divisor of `div`, `fmod`, `mod` and `remainder` and the exponent of `pow` it is refused.",
        _promoted("default"),
    ),
    "float": DtypeRule(
        "As `default`; integers and Bool become Float.",
        _promoted("float"),
    ),
    "float_only": DtypeRule(
        "As `float`; operands that promote to Half, BFloat16 or Float8 are refused.",
        _promoted("float_only"),
        "w",
    ),
    "comparison": DtypeRule(
        "Operands are promoted as by `default`; the result is Bool.",
        _promoted("comparison"),
    ),
    "keep": DtypeRule("The result has the dtype of the first operand.", _kept),
    "limits": DtypeRule(
        "The result has the dtype of the first operand, or, where a limit is of a higher category, "
        "the promoted one, as in torch: 0.5 beside integers or Bool gives Float (with the option "
        "`double_numbers` Double), 2 beside Bool gives Int. Numbers out of its range are refused.",
        _limited,
    ),
    "fitting": DtypeRule(
        "The result has the dtype of the first operand; numbers and scalars that do not fit it are "
        "refused (0.5 beside integers, where torch takes 0).",
        _fitting,
    ),
    "keep_float": DtypeRule(
        "The result has the dtype of the operand, which is floating.", _kept_floating, "f"
    ),
    "keep_wide": DtypeRule(
        "The result has the dtype of the operand, which is floating; Half, BFloat16 and Float8 are "
        "computed in Float and rounded once.",
        takes="f",
    ),
    "mean": DtypeRule(
        "As `keep_wide`, also of complex numbers; where a dtype is given, the operand is cast to "
        "it first."
    ),
    "losses": DtypeRule(
        "As `keep_wide`; of class probabilities in another dtype, the promoted one."
    ),
    "part": DtypeRule(
        "The result has the dtype of the parts of a complex operand; of a real one, its own.", _part
    ),
    "parts": DtypeRule(
        "The operands are both Float or both Double; the result is complex, of such parts.",
        _of_parts,
        "w",
    ),
    "test": DtypeRule("The operand stays as it is; the result is Bool.", _kept),
    "test_promoted": DtypeRule(
        "The operand becomes what `default` makes of it; the result is Bool.",
        _promoted("comparison"),
    ),
    "bool": DtypeRule("Operands are cast to Bool; the result is Bool.", _as_bool),
    "bits": DtypeRule(
        "Integers are promoted as by `default`; of Bool alone it is the logical op.", integers, "ib"
    ),
    "int": DtypeRule("Integers alone, promoted as by `default`.", integers, "i"),
    "select": DtypeRule(
        "The condition is Bool; the other operands are promoted as by `default`, but Half, "
        "BFloat16 and Float8 stay. An integer out of the range of an integer result is refused.",
        _selected,
    ),
    "given": DtypeRule("The result has the dtype that is given."),
    "sum": DtypeRule(
        "Without a dtype, integers and Bool become Int and others stay; else the operand is cast "
        "to the dtype first."
    ),
    "variance": DtypeRule(
        "As `default`; of a complex operand, the result has the dtype of its parts."
    ),
    "wide": DtypeRule(
        "The results have the dtype of the operand, Float or Double; the variance of a complex one "
        "has the dtype of its parts."
    ),
    "counts": DtypeRule(
        "Mean and sum of squares have the dtype of the floating operand, the count is Index."
    ),
    "equal": DtypeRule("Operands have one dtype, which is the result's."),
    "indexed": DtypeRule(
        "The result has the dtype of what is read, or written into, as what is written has; an "
        "index is Int or Int32."
    ),
    "places": DtypeRule("The result is Int."),
    "found": DtypeRule("The values have the dtype of the operand, their places are Int."),
    "scaled": DtypeRule(
        "Factors are Float8_e4m3fn or Float8_e5m2, scales Float; the result has the dtype that is "
        "given."
    ),
    "groups": DtypeRule("Without scales as `equal`, with scales as `scaled`; offsets are Int32."),
    "blocks": DtypeRule("The values have the dtype that is given, their scales Float8_e8m0fnu."),
    "attention": DtypeRule(
        "Queries, keys and values have one dtype, which is the results'; logsumexp is Float, the "
        "random state UInt64."
    ),
    "index": DtypeRule("The result is an Index scalar for each axis."),
    "complex": DtypeRule(
        "The operand is complex; the result has the dtype of its parts.", takes="c"
    ),
}
