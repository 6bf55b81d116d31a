"""How ops type their operands and results: a row per rule.

A rule that turns operands into the dtype in which an elementwise op computes does so in `apply`.
The others are what an op's function does by itself.
"""

from __future__ import annotations

from collections.abc import Callable

from fuser.ir.dtypes import (
    COMPLEX_OF,
    Config,
    DataType,
    category,
    check_supported,
    complex_of,
    dtype_text,
    is_inexact,
    misfit,
    part_of,
)
from fuser.ir.pointwise_table import POINTWISE, PUBLIC, TESTS
from fuser.ir.scalar.constructors import Const
from fuser.ir.tensor import TensorView
from fuser.ops.building import (
    Operand,
    convert,
    fail,
    promote,
    promote_keeping_half,
    refuse_complex,
)
from fuser.ops.reduction_table import operand_dtype
from fuser.support.errors import DtypeError, user_line
from fuser.support.record import record

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
    """Convert the operands of a call of `name` as the rule says; return them and the result dtype.

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
    """Raise `DtypeError` for complex operands of an op that has no meaning for them."""
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
    """Raise `DefinitionError` for a number that is no value of the dtype."""
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
    """Return integers promoted; raises `DtypeError` for any other, and for Bool where the op has
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
