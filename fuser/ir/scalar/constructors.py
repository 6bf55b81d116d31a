"""Symbolic scalars that are simplified when they are built.

A scalar is a constant, a symbol, or an op applied to scalars. Integer sums and products are stored
as polynomials whose factors are symbols and other ops, such as `/`. Equal index expressions
therefore usually become the same object.

A symbol has a range, from which simplifications are proved (`fuser.ir.scalar.simplify`):

- an extent (the size of an axis) is at least 0, or at least 1 in a fusion that is compiled only for
  inputs without empty axes;
- an index is in [0, extent - 1];
- an integer that the user passes has no bounds.

The functions of this module (`add`, `mul`, `floordiv`, ...) are the only way to build an
expression. No later step simplifies an expression.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from fuser.ir.dtypes import (
    DataType,
    common_dtype,
    complex_of,
    dtype_text,
    is_complex,
    part_of,
)
from fuser.ir.scalar.evaluate import BOOL_OPS, COMPLEX_OPS, COMPUTE, PART_OPS
from fuser.ir.scalar.scalar_nodes import (
    CONSTRUCTORS,
    ONE,
    OPERATORS,
    ZERO,
    Apply,
    Const,
    Number,
    Poly,
    Scalar,
    ScalarLike,
    Symbol,
    alike_literals,
    as_scalar,
    children,
    const,
    int_value,
    is_int,
    literal_text,
    postorder,
    scalar_text,
    symbols,
)
from fuser.ir.scalar.simplify import (
    absolute,
    add_terms,
    ceil_divide,
    divide,
    has_index,
    interval,
    is_less,
    is_nonnegative,
    larger,
    multiply,
    negate,
    remainder,
    smaller,
    subtract,
)
from fuser.support.errors import DivisionByZeroError, DtypeError, InputError

__all__ = [
    "Apply",
    "COMPUTE",
    "Const",
    "Number",
    "ONE",
    "Poly",
    "Scalar",
    "ScalarLike",
    "Symbol",
    "ZERO",
    "add",
    "all_of",
    "apply",
    "as_scalar",
    "cast",
    "ceildiv",
    "children",
    "const",
    "eq",
    "evaluate",
    "floordiv",
    "has_index",
    "index",
    "int_value",
    "interval",
    "is_int",
    "is_less",
    "is_nonnegative",
    "le",
    "literal_text",
    "logical_and",
    "logical_not",
    "lt",
    "maximum",
    "minimum",
    "mod",
    "mul",
    "name_for",
    "ne",
    "product",
    "rebuild",
    "scalar_text",
    "sub",
    "substitute",
    "symbols",
    "truncdiv",
    "truncmod",
    "where",
]


def index(name: str, extent: ScalarLike) -> Symbol:
    """Returns a symbol for the index of a loop, thread or mesh dimension: 0 <= index < extent."""
    return Symbol(name, DataType.Index, lo=0, hi=sub(extent, 1))


def name_for(name: str, x: Scalar, dtype: DataType = DataType.Index) -> Symbol:
    """Returns a symbol with the name `name` that stands for the value of `x`.

    Its lower bound is that of `x`, so that simplifications can still use it.
    """
    low = interval(x)[0]
    return Symbol(name, dtype, lo=low if isinstance(low, int) else None)


# ---------------------------------------------------------------- arithmetic
def add(a: ScalarLike, b: ScalarLike) -> Scalar:
    """Returns a + b as a simplified expression."""
    return apply("+", a, b)


def mul(a: ScalarLike, b: ScalarLike) -> Scalar:
    """Returns a * b as a simplified expression."""
    return apply("*", a, b)


def sub(a: ScalarLike, b: ScalarLike) -> Scalar:
    """Returns a - b as a simplified expression."""
    return apply("-", a, b)


def product(factors: Iterable[ScalarLike]) -> Scalar:
    """Returns the product of the factors as a simplified expression, or 1 if there are none."""
    out: Scalar = ONE
    for f in factors:
        out = mul(out, f)
    return out


def floordiv(a: ScalarLike, b: ScalarLike) -> Scalar:
    """Returns a / b rounded down, as index arithmetic needs, as a simplified expression."""
    return divide(as_scalar(a), as_scalar(b), "floorDiv")


def mod(a: ScalarLike, b: ScalarLike) -> Scalar:
    """Returns the remainder of `floordiv`, simplified. It is in [0, b) for a positive b."""
    return remainder(as_scalar(a), as_scalar(b), "floorMod")


def truncdiv(a: ScalarLike, b: ScalarLike) -> Scalar:
    """Returns a / b rounded towards zero, as C's `/`, as a simplified expression.

    The division of user programs rounds in this way.
    """
    return divide(as_scalar(a), as_scalar(b), "/")


def truncmod(a: ScalarLike, b: ScalarLike) -> Scalar:
    """Returns the remainder of `truncdiv`, simplified. It has the sign of `a`, as C's `%`."""
    return remainder(as_scalar(a), as_scalar(b), "%")


def ceildiv(a: ScalarLike, b: ScalarLike) -> Scalar:
    """Returns a / b rounded up, as a simplified expression."""
    return ceil_divide(as_scalar(a), as_scalar(b))


def minimum(a: ScalarLike, b: ScalarLike) -> Scalar:
    """Returns the smaller of two scalars as a simplified expression."""
    return apply("min", a, b)


def maximum(a: ScalarLike, b: ScalarLike) -> Scalar:
    """Returns the larger of two scalars as a simplified expression."""
    return apply("max", a, b)


# ---------------------------------------------------------------- comparisons, logic, choice
def ne(a: ScalarLike, b: ScalarLike) -> Scalar:
    """Returns the condition a != b as an expression, or false if both are equal expressions."""
    a, b = as_scalar(a), as_scalar(b)
    return const(False) if a == b and is_int(a) else apply("!=", a, b)


def logical_not(a: ScalarLike) -> Scalar:
    """Returns the condition that `a` is false, as an expression."""
    return apply("!", a)


def lt(a: ScalarLike, b: ScalarLike) -> Scalar:
    """Returns the condition a < b as an expression, or a constant if it is always true or false.

    The ranges of symbols decide this.
    """
    a, b = as_scalar(a), as_scalar(b)
    if is_int(a) and is_int(b):
        if is_less(a, b):
            return const(True)
        if is_nonnegative(sub(a, b)):
            return const(False)
    return apply("<", a, b)


def le(a: ScalarLike, b: ScalarLike) -> Scalar:
    """Returns the condition a <= b as an expression. For integers, it is written as a < b + 1."""
    a, b = as_scalar(a), as_scalar(b)
    return lt(a, add(b, 1)) if is_int(a) and is_int(b) else apply("<=", a, b)


def eq(a: ScalarLike, b: ScalarLike) -> Scalar:
    """Returns the condition a == b as an expression, or true if both are equal expressions."""
    a, b = as_scalar(a), as_scalar(b)
    return const(True) if a == b and is_int(a) else apply("==", a, b)


def logical_and(a: ScalarLike, b: ScalarLike) -> Scalar:
    """Returns the condition that `a` and `b` are both true, as a simplified expression."""
    a, b = as_scalar(a), as_scalar(b)
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Const):
            return y if x.value else x
    return a if a == b else apply("&&", a, b)


def all_of(conditions: Iterable[ScalarLike]) -> Scalar:
    """Returns the condition that all `conditions` are true, as a simplified expression.

    Without conditions, the result is the constant true.
    """
    out: Scalar = const(True)
    for c in conditions:
        out = logical_and(out, c)
    return out


def where(cond: ScalarLike, a: ScalarLike, b: ScalarLike) -> Scalar:
    """Returns the expression that has the value `a` if the condition is true, else `b`.

    The dtype of the result is the common dtype of `a` and `b`.
    """
    cond, a, b = as_scalar(cond), as_scalar(a), as_scalar(b)
    if isinstance(cond, Const):
        return a if cond.value else b
    a, b = alike_literals((a, b))
    return a if a == b else Apply("where", (cond, a, b), _result_dtype((a, b), "where"))


def cast(x: ScalarLike, dtype: DataType) -> Scalar:
    """Returns `x` converted to a dtype, as an expression. A constant is converted at once."""
    x = as_scalar(x)
    if x.dtype is dtype:
        return x
    if isinstance(x, Const) and cmath.isfinite(x.value):
        return Const(x.value, dtype)
    return Apply(f"cast:{dtype_text(dtype)}", (x,), dtype)


def _result_dtype(args: Sequence[Scalar], op: str) -> DataType:
    if op in BOOL_OPS:
        return DataType.Bool
    dtype = common_dtype([(a.dtype, "scalar") for a in args], "default")
    if op in PART_OPS:
        return part_of(dtype)
    return complex_of(dtype) if op == "complex" else dtype


def apply(op: str, *args: ScalarLike) -> Scalar:
    """Returns the scalar op with name `op`, such as "+" or "exp", applied to `args` and simplified.

    An op on constants becomes its value. Integer `/` and `%` round towards zero, as in C.

    Raises:
        DtypeError: an operand is complex, and the op is not defined for complex numbers.
    """
    scalars = tuple([as_scalar(a) for a in args])
    if op not in COMPLEX_OPS and any(is_complex(s.dtype) for s in scalars):
        raise DtypeError(
            f"the scalar op {op} is not defined for complex numbers, got "
            f"{', '.join(map(str, scalars))}"
        )
    form = _INT_FORMS.get(op)
    if form is not None and all(map(is_int, scalars)):
        return form(*scalars)
    scalars = alike_literals(scalars)
    dtype = _result_dtype(scalars, op)
    values = [s.value for s in scalars if isinstance(s, Const)]
    if len(values) == len(scalars):
        try:
            return Const(COMPUTE[op](*values), dtype)
        except (ValueError, ZeroDivisionError, OverflowError):
            pass  # outside the op's domain: keep it symbolic; an error is raised when it runs
    return Apply(op, scalars, dtype)


# The implementations of Python's operators on scalars.
OPERATORS.update(
    {
        "+": add,
        "-": sub,
        "*": mul,
        "floorDiv": floordiv,
        "floorMod": mod,
        "<": lt,
        "<=": le,
    }
)
CONSTRUCTORS.update(eq=eq, ne=ne, cast=cast)


_INT_FORMS: dict[str, Callable[..., Scalar]] = {
    "+": add_terms,
    "-": subtract,
    "*": multiply,
    "/": truncdiv,
    "%": truncmod,
    "floorDiv": floordiv,
    "floorMod": mod,
    "ceilDiv": ceildiv,
    "min": smaller,
    "max": larger,
    "abs": absolute,
    "neg": negate,
}


# ---------------------------------------------------------------- traversal
def substitute(x: Scalar, mapping: Mapping[Scalar, Scalar]) -> Scalar:
    """Returns `x` with the keys of `mapping` replaced by their values, and simplified again.

    Keys are symbols, or ops other than sums and products.
    """
    done = dict(mapping)
    for y in postorder(x, done.__contains__):
        done[y] = _rebuilt(y, done)
    return done[x]


def _rebuilt(x: Scalar, done: Mapping[Scalar, Scalar]) -> Scalar:
    """Returns `x` with each operand replaced by its entry in `done`, and simplified again."""
    if all(done[c] is c for c in children(x)):
        return x
    if isinstance(x, Poly):
        total: Scalar = Const(0, x.dtype)
        for mono, coef in x.terms:
            total = add(total, mul(coef, product(done[a] for a in mono)))
        return total
    assert isinstance(x, Apply)
    return rebuild(x, [done[a] for a in x.args])


def rebuild(x: Apply, args: Sequence[Scalar]) -> Scalar:
    """Returns the op of `x` applied to the operands `args` instead of its own, simplified."""
    if x.op.startswith("cast:"):
        return cast(args[0], x.dtype)
    special = {"<": lt, "<=": le, "==": eq, "&&": logical_and}
    if x.op in special:
        return special[x.op](args[0], args[1])
    if x.op == "where":
        return where(args[0], args[1], args[2])
    return apply(x.op, *args)


# Scalars up to this depth are evaluated by plain recursion.
_SHALLOW = 8


def evaluate(x: Scalar, values: Mapping[Symbol, Number]) -> Number:
    """Returns the value of `x` as a Python number, for the values of symbols in `values`.

    Raises:
        KeyError: `values` lacks a symbol.
        DivisionByZeroError: an integer is divided by 0.
        InputError: an infinity or a NaN is converted to an integer.
    """
    if x.depth <= _SHALLOW:
        return _evaluate(x, values)
    # Both branches of a `where` are computed; an error counts only if the result depends on it.
    done: dict[Scalar, Number | InputError] = {}
    for y in postorder(x, done.__contains__):
        try:
            done[y] = _value(y, values, [_defined(done[c]) for c in _relevant(y, done)])
        except InputError as error:
            done[y] = error
    return _defined(done[x])


def _relevant(x: Scalar, done: Mapping[Scalar, Number | InputError]) -> tuple[Scalar, ...]:
    """Returns the operands on which the value of `x` depends, given the values of its operands.

    For a `where`, these are the condition and the selected branch. Other ops depend on all
    operands. `done` has the values of the operands that are computed already.
    """
    if isinstance(x, Apply) and x.op == "where":
        cond, a, b = x.args
        return (cond, *((a, a) if done[cond] else (b, b)))
    return children(x)


def _defined(value: Number | InputError) -> Number:
    if isinstance(value, InputError):
        raise value
    return value


def _evaluate(x: Scalar, values: Mapping[Symbol, Number]) -> Number:
    if isinstance(x, Const):
        return x.value
    if isinstance(x, Symbol):
        return values[x]
    if isinstance(x, Apply) and x.op == "where":
        return _evaluate(x.args[1 if _evaluate(x.args[0], values) else 2], values)
    return _value(x, values, [_evaluate(c, values) for c in children(x)])


def _value(x: Scalar, values: Mapping[Symbol, Number], args: Sequence[Number]) -> Number:
    """Returns the value of `x` as a number. `args` are the values of its direct operands."""
    if isinstance(x, Const):
        return x.value
    if isinstance(x, Symbol):
        return values[x]
    if isinstance(x, Poly):
        given = iter(args)
        return sum(c * math.prod(int(next(given)) for _ in m) for m, c in x.terms)
    assert isinstance(x, Apply)
    try:
        if x.op not in COMPUTE:
            return Const(args[0], x.dtype).value
        found = COMPUTE[x.op](*args)
        # Arithmetic on Bool is that of 0 and 1.
        return bool(found) if x.dtype is DataType.Bool else found
    except ZeroDivisionError:
        raise DivisionByZeroError(f"{x} divides {args[0]} by 0{_bound(x, values)}") from None
    except (OverflowError, ValueError):
        raise InputError(
            f"{x} has no result for the operand values {args}{_bound(x, values)}"
        ) from None


def _bound(x: Scalar, values: Mapping[Symbol, Number]) -> str:
    known = ", ".join(f"{s} = {values[s]}" for s in symbols(x)[:8])
    return f": {known}" if known else ""
