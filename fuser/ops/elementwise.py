"""Elementwise op functions: unary, binary and ternary ops from the pointwise table, casts, copies.

All functions take operands by position only, as in nvFuser. If all operands are scalars, the result
is a scalar.
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
from fuser.support.errors import ArgumentError, DtypeError, counted, user_line
from fuser.support.record import record

_NODES = {1: UnaryOp, 2: BinaryOp, 3: TernaryOp}


# ------------------------------------------------------------------ the call
def apply_pointwise(name: str, arguments: tuple[OperandLike, ...]) -> Operand:
    """Adds the nodes of one call of the elementwise op `name`, and returns the result.

    If all arguments are scalars or numbers, adds no node and returns a scalar.
    """
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
    """Returns the result of an elementwise op on scalars, as a scalar of dtype `dtype`.

    No node is added, because the host computes scalars.
    """
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
    function.__doc__ = _help_of(name, kind)
    return function


def _help_of(name: str, kind: str) -> str:
    """Returns the docstring of the elementwise op `name`.

    `kind` names a row of the table of elementwise ops. The docstring is made from the text in this
    row, which is "As `torch.acos`." or a sentence. An op whose `name` differs from `kind` computes
    in floats also for integers: `truediv` is such a form of `div`.
    """
    meaning = POINTWISE[kind].meaning
    if name != kind:
        return f"Computes `{kind}` of each element in floats, also for integers."
    if meaning.startswith("As `torch."):
        return f"Computes {name} of each element, as {meaning[3:-1]} does."
    return f"{meaning} The op is applied element by element."


ELEMENTWISE: dict[str, Callable[..., Operand]] = {name: _make(name) for name in PUBLIC}


# ------------------------------------------------------------------ copies and casts
def copy_tensor(tv: TensorView, kind: LoadStoreOpType = LoadStoreOpType.set) -> TensorView:
    """Adds an op that copies `tv`, and returns the copy.

    With the kind `segmenter_set`, the copy also ends a kernel: the ops that read the copy are in
    another kernel than the op that computes `tv`.
    """
    out = new_output(clone_axes(tv), tv.dtype(), [tv])
    add_op(LoadStoreOp(out, tv, kind=kind))
    return out


def set_(x: OperandLike, /) -> Operand:
    """Copies a tensor. A scalar is returned unchanged."""
    value = as_operand(x, "set")
    return copy_tensor(value) if isinstance(value, TensorView) else value


def segment_set(x: TensorView, /) -> TensorView:
    """Copies a tensor and starts a new kernel.

    The op that computes `x` and the ops that read the copy are never in the same kernel.
    """
    return copy_tensor(x, LoadStoreOpType.segmenter_set)


@overload
def cast(arg: TensorView, dtype: DtypeLike) -> TensorView: ...
@overload
def cast(arg: Scalar | bool | int | float | complex, dtype: DtypeLike) -> Scalar: ...
def cast(arg: OperandLike, dtype: DtypeLike) -> Operand:
    """Converts each element to `dtype`; if the operand already has this dtype, copies it.

    - To an integer dtype: floats are truncated.
    - To a real dtype: the imaginary parts are dropped.
    - To Bool: whether an element is not 0.

    Raises:
        UnsupportedError: no kernel computes with one of the two dtypes.
    """
    value = as_operand(arg, "cast")
    check_supported(operand_dtype(value), "cast")
    dtype = check_supported(dtype, "cast")
    if isinstance(value, Scalar):
        return sc.cast(value, dtype)
    return copy_tensor(value) if value.dtype() is dtype else cast_tensor(value, dtype)


def real(x: OperandLike, /) -> Operand:
    """Returns the real parts of a complex operand, or a copy of a real operand."""
    value = as_operand(x, "real")
    return apply_pointwise("real", (value,)) if is_complex(operand_dtype(value)) else set_(value)


def imag(x: OperandLike, /) -> Operand:
    """Returns the imaginary parts of a complex operand.

    Raises:
        DtypeError: the operand is not complex.
    """
    value = as_operand(x, "imag")
    dtype = operand_dtype(value)
    if not is_complex(dtype):
        raise DtypeError(
            f"imag: the operand must be complex, but its dtype is {dtype_text(dtype)} "
            f"(at {user_line()})"
        )
    return apply_pointwise("imag", (value,))


def complex_(lhs: OperandLike, rhs: OperandLike, /) -> Operand:
    """Computes the complex numbers lhs + i * rhs from two tensors or two scalars.

    Raises:
        ArgumentError: one operand is a tensor and the other is not.
        DtypeError: the operands are not both Float or both Double.
    """
    if isinstance(lhs, TensorView) is not isinstance(rhs, TensorView):
        raise ArgumentError(
            "complex(): incompatible function arguments: expected two tensors or two scalars, got "
            f"{show(lhs)} and {show(rhs)} (at {user_line()})"
        )
    return apply_pointwise("complex", (lhs, rhs))


# ------------------------------------------------------------------ optional or fixed slots
def clamp(x: OperandLike, min: ScalarLike | None, max: ScalarLike | None, /) -> Operand:
    """Computes min(max(x, min), max).

    The limits are scalars. None as a limit stands for the lowest or highest value of the dtype.

    Raises:
        DefinitionError: the dtype of the result cannot represent a limit.
        DtypeError: the operand is complex.
    """
    value = as_operand(x, "clamp")
    refuse_complex("clamp", value)
    dtype = operand_dtype(value)
    limits: list[OperandLike] = []
    for limit, end in ((min, lowest(dtype)), (max, highest(dtype))):
        limits.append(Const(end, dtype) if limit is None else limit)
    return apply_pointwise("clamp", (value, *limits))


def threshold(x: OperandLike, threshold: ScalarLike, value: ScalarLike, /) -> Operand:
    """Returns `value` where x <= threshold, else x.

    `threshold` and `value` are scalars.

    Raises:
        DefinitionError: the dtype of `x` cannot represent `threshold` or `value`.
        DtypeError: an operand is complex, or a scalar is of a higher category than `x`.
    """
    return apply_pointwise("threshold", (x, threshold, value))


def lerp(start: OperandLike, end: OperandLike, weight: OperandLike, /) -> Operand:
    """Computes start + weight * (end - start)."""
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
    """Computes in1 + in2 * in3 * value; `value` is a scalar."""
    return _call("add", in1, _call("mul", _call("mul", in2, in3), value))


def sign(x: OperandLike, /) -> Operand:
    """Returns -1, 0 or 1 in the dtype of `x`; the sign of NaN is 0.

    Raises:
        DtypeError: the operand is complex.
    """
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
    """Computes lhs >> rhs with zeros shifted in; 0 if rhs < 0 or rhs >= the number of bits.

    Raises:
        DtypeError: an operand is not an integer.
    """
    values = [as_operand(lhs, "logical_right_shift"), as_operand(rhs, "logical_right_shift")]
    values, dtype = integers("logical_right_shift", values)
    value, count = values
    # The arithmetic shift repeats the sign; the mask keeps the width - count low bits.
    ones = _call("bitwise_right_shift", Const(highest(dtype), dtype), _call("sub", count, 1))
    masked = _call("bitwise_and", _call("bitwise_right_shift", value, count), ones)
    return _call("where", _call("eq", count, 0), value, masked)


def check_rank_at_least(op_name: str, tv: TensorView, rank: int) -> None:
    """Raises `DefinitionError` for a tensor with fewer than `rank` axes."""
    if tv.ndim < rank:
        raise fail(
            op_name,
            f"the operand needs at least {counted(rank, 'axis')}, but {tv} has {tv.ndim}",
        )


# ----------------------------------------------------------------------
# The dtype rules: in which dtypes operands are computed, and which dtype the result has.
#
# Rules with an `apply` convert the operands of an elementwise op. Rules without an `apply` are
# descriptions: the op's own function carries them out.

Typed = tuple[list[Operand], DataType]
Apply = Callable[[str, list[Operand]], Typed]


@record
class DtypeRule:
    """A rule by which an op determines the dtype of its result from the dtypes of its operands.

    - `sentence`: the text of the rule in `help` and in docs/reference/operations.md.
    - `apply`: converts the operands of a call; returns (operands, dtype of the result). For an op
      with a Bool result, such as a comparison, the dtype is that of the computation.
    - `takes`: the categories of dtypes that the rule accepts, one letter each: f (floating),
      i (integer), b (Bool) and c (complex).
    """

    sentence: str
    apply: Apply | None = None
    takes: str = "fib"


def typed(name: str, rule: str, values: list[Operand]) -> Typed:
    """Converts the operands `values` of op `name` by a dtype rule.

    Returns (converted operands, dtype of the result). `rule` is a name in `DTYPE_RULES`.

    Raises:
        DtypeError: the rule does not accept an operand.
        UnsupportedError: no kernel computes with the dtype of an operand.
    """
    for v in values:
        check_supported(operand_dtype(v), name)
    apply = DTYPE_RULES[rule].apply
    assert apply is not None, f"{name} converts its operands in its own function"
    converted, dtype = apply(name, values)
    return converted, DataType.Bool if rule in TESTS else dtype


# ------------------------------------------------------------------ one function per rule
def _check_complex(name: str, values: list[Operand]) -> None:
    """Raises `DtypeError` if an operand is complex, although the op `name` is for real numbers
    only.
    """
    kind, _ = PUBLIC.get(name, ("", ""))
    if kind and not POINTWISE[kind].takes_complex:
        refuse_complex(name, *values)


def _promoted(config: Config) -> Apply:
    def apply(name: str, values: list[Operand]) -> Typed:
        if config != "float_only":  # `promote` raises a more specific error for it
            _check_complex(name, values)
        return promote(values, config)

    return apply


def _kept(name: str, values: list[Operand]) -> Typed:
    _check_complex(name, values)
    dtype = operand_dtype(values[0])
    return [values[0], *(convert(v, dtype) for v in values[1:])], dtype


_ORDER = ("bool", "int", "float", "complex")


def _is_above(dtype: DataType, other: DataType) -> bool:
    """Returns whether `dtype` has a higher category than `other`, so that `other` cannot represent
    its values.

    The categories are, from low to high: bool, int, float, complex.
    """
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
                f"{name}: the result has the dtype {dtype_text(dtype)} of {values[0]}, which "
                f"cannot hold the values of {v}, {dtype_text(operand_dtype(v))}: cast one of them "
                f"first (at {user_line()})"
            )
    return _kept(name, values)


def _check_fit(name: str, values: list[Operand], dtype: DataType) -> None:
    """Raises `DefinitionError` if a constant operand cannot be represented in `dtype`, the dtype of
    the first operand and of the result.

    The first operand is not checked, because it has this dtype.
    """
    for v in values[1:]:
        if not isinstance(v, Const):
            continue
        problem = misfit(v.value, dtype)
        if category(dtype) == "bool" and v.value not in (0, 1):
            problem = f"{v.value:g} is not a value of bool"
        if problem:
            raise fail(
                name,
                f"{problem}, the dtype of {values[0]} and of the result: cast the operand first, "
                "or pass a number that fits",
            )


def _kept_floating(name: str, values: list[Operand]) -> Typed:
    dtype = operand_dtype(values[0])
    if not is_inexact(dtype):
        raise DtypeError(
            f"{name}: the operand must have a floating or complex dtype, but {values[0]} is "
            f"{dtype_text(dtype)} (at {user_line()})"
        )
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
    """Converts the integer operands of op `name` to a common dtype, and returns (converted
    operands, this dtype).

    Raises `DtypeError` for operands that are not integers. Bool operands are accepted only if the
    op is defined for Bool.
    """
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
        "Operands are promoted as in torch, and the result has the promoted dtype. Next to a "
        "tensor, only the category of a number or scalar counts: an integer or Bool tensor with "
        "0.5 gives Float, with 2j ComplexFloat (with the option `double_numbers` Double and "
        "ComplexDouble, as in nvFuser). Half, BFloat16 and Float8 are computed in Float; Float8 "
        "with another floating dtype gives at least Float. An integer number that the dtype "
        "cannot hold wraps, as in torch, but as the divisor of `div`, `fmod`, `mod` and "
        "`remainder` and as the exponent of `pow` it is an error.",
        _promoted("default"),
    ),
    "float": DtypeRule(
        "Operands are promoted as by `default`; integers and Bool become Float.",
        _promoted("float"),
    ),
    "float_only": DtypeRule(
        "As `float`; operands that promote to Half, BFloat16 or Float8 are an error.",
        _promoted("float_only"),
        "w",
    ),
    "comparison": DtypeRule(
        "Operands are promoted as by `default`; the result is Bool.",
        _promoted("comparison"),
    ),
    "keep": DtypeRule("The result has the dtype of the first operand.", _kept),
    "limits": DtypeRule(
        "The result has the dtype of the first operand. If a limit is of a higher category, it has "
        "the promoted dtype, as in torch: integers or Bool with 0.5 give Float (with the option "
        "`double_numbers` Double), Bool with 2 gives Int. A number that this dtype cannot hold is "
        "an error.",
        _limited,
    ),
    "fitting": DtypeRule(
        "The result has the dtype of the first operand. A number or scalar that does not fit it is "
        "an error: 0.5 with integers, for which torch uses 0.",
        _fitting,
    ),
    "keep_float": DtypeRule(
        "The result has the dtype of the operand, which is floating.", _kept_floating, "f"
    ),
    "keep_wide": DtypeRule(
        "The result has the dtype of the operand, which is floating. Half, BFloat16 and Float8 are "
        "computed in Float and rounded once.",
        takes="f",
    ),
    "mean": DtypeRule(
        "As `keep_wide`, also for complex numbers. If `dtype` is passed, the operand is cast to it "
        "first."
    ),
    "losses": DtypeRule(
        "As `keep_wide`. With class probabilities of another dtype, the result has the promoted "
        "dtype."
    ),
    "part": DtypeRule(
        "The result of a complex operand has the dtype of its parts, that of a real one its dtype.",
        _part,
    ),
    "parts": DtypeRule(
        "The operands are both Float or both Double; the result is complex with such parts.",
        _of_parts,
        "w",
    ),
    "test": DtypeRule("The operand is not converted; the result is Bool.", _kept),
    "test_promoted": DtypeRule(
        "The operand is converted as by `default`; the result is Bool.",
        _promoted("comparison"),
    ),
    "bool": DtypeRule("Operands are cast to Bool; the result is Bool.", _as_bool),
    "bits": DtypeRule(
        "Integers are promoted as by `default`. On Bool operands it is the logical op.",
        integers,
        "ib",
    ),
    "int": DtypeRule(
        "Only integers are accepted; they are promoted as by `default`.", integers, "i"
    ),
    "select": DtypeRule(
        "The condition is Bool. The other operands are promoted as by `default`, but Half, "
        "BFloat16 and Float8 stay. An integer that an integer result cannot hold is an error.",
        _selected,
    ),
    "given": DtypeRule("The result has the dtype of the argument `dtype`."),
    "sum": DtypeRule(
        "Without `dtype`, integers and Bool become Int and other dtypes stay. With it, the operand "
        "is cast to it first."
    ),
    "variance": DtypeRule(
        "As `default`; the result of a complex operand has the dtype of its parts."
    ),
    "wide": DtypeRule(
        "The results have the dtype of the operand, Float or Double; the variance of a complex "
        "operand has the dtype of its parts."
    ),
    "counts": DtypeRule(
        "Mean and sum of squares have the dtype of the floating operand; the count is Index."
    ),
    "equal": DtypeRule("All operands have one dtype, which is also the result's."),
    "indexed": DtypeRule(
        "The result has the dtype of the tensor that is read or copied; values that are written "
        "have the same dtype. An index is Int or Int32."
    ),
    "places": DtypeRule("The result is Int."),
    "found": DtypeRule("The values have the dtype of the operand; their indices are Int."),
    "scaled": DtypeRule(
        "Factors are Float8_e4m3fn or Float8_e5m2, scales Float; the result has the dtype of the "
        "argument `dtype`."
    ),
    "groups": DtypeRule("Without scales as `equal`, with scales as `scaled`; offsets are Int32."),
    "blocks": DtypeRule(
        "The values have the dtype of the argument `dtype`; their scales are Float8_e8m0fnu."
    ),
    "attention": DtypeRule(
        "Queries, keys and values have one dtype, which is also the results'; logsumexp is Float, "
        "the random state UInt64."
    ),
    "index": DtypeRule("The result is an Index scalar for each axis."),
    "complex": DtypeRule(
        "The operand is complex; the result has the dtype of its parts.", takes="c"
    ),
}
