"""The elementwise ops, one line each: all that other packages know of one is read from here.

The IR takes kinds and text, scalars their meaning, `fuser.ops` dtype rules and torch meanings, the
code generator CUDA text, testers what they may draw.

CUDA text: `{0} {1} {2}` are operand texts, which must be atoms (names, literals or parenthesised)
of the C type in which the op computes (operand 0 of `where`: bool); `fm_NAME` is a function of
`codegen/rt_math.h`. Half-like values are computed as float.
"""

from __future__ import annotations

# torch has no types for these functions.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
import math
from collections.abc import Callable
from typing import Literal

import torch

from fuser.support.record import record

# Names of `fuser.ops.elementwise`.
Rule = Literal[
    "default",
    "float",
    "float_only",
    "comparison",
    "keep",
    "limits",
    "fitting",
    "keep_float",
    "part",
    "parts",
    "test",
    "test_promoted",
    "bool",
    "bits",
    "int",
    "select",
]
# The rules whose result is Bool.
TESTS: frozenset[Rule] = frozenset({"comparison", "test", "test_promoted", "bool"})
# The rules by which an op computes floats, also of integers.
_OF_FLOATS: frozenset[Rule] = frozenset({"float", "float_only", "keep_float"})
TorchFn = Callable[..., torch.Tensor]
Number = bool | int | float


@record
class PointwiseRow:
    """Facts about one kind of elementwise op.

    `torch` takes tensors of the dtype in which the op computes. `cuda_int` replaces `cuda` for
    integers. `text` is an operator or a function in IR text, `float_text` what it is for a floating
    result (of one operand: a Float one). `scalar` is the op of scalars, which
    `fuser.ir.scalar.constructors` knows by itself or computes as torch does. `domains` says per
    operand what may be drawn (`tests.support.op_samples`). An all-Bool call is of the kind
    `of_bools`. Complex operands are refused by an op that does not `take_complex` ones, as torch
    refuses them. A thread needs many instructions where it `is_slow`. `near` are names of others
    for it. `exact` are the positions of operands of which a number must be a value of the result's
    dtype: a wrapped one has another meaning, where sums and products are right modulo 2**32.
    """

    name: str
    arity: int
    rule: Rule
    torch: TorchFn
    meaning: str
    cuda: str
    cuda_int: str | None
    text: str
    float_text: str
    scalar: str
    domains: tuple[str, ...]
    of_bools: str
    takes_complex: bool
    is_slow: bool
    near: tuple[str, ...]
    exact: tuple[int, ...]

    @property
    def is_operator(self) -> bool:
        return not _is_function(self.text)

    @property
    def scalar_ops(self) -> dict[str, Callable[..., Number]]:
        """What ops of scalars mean on Python numbers, by name.

        An op whose result depends on the precision has two: the one of Float ends in f.
        """
        found = {self.scalar: self._of_numbers(torch.float64)}
        if self.rule == "float_only":
            found[f"{self.scalar}f"] = self._of_numbers(torch.float32)
        return found

    def _of_numbers(self, floating: torch.dtype) -> Callable[..., Number]:
        meaning = self.torch
        always_float = self.rule in _OF_FLOATS

        def compute(*values: Number) -> Number:
            dtype = torch.int64
            if any(isinstance(v, complex) for v in values):
                dtype = floating.to_complex()
            elif always_float or any(isinstance(v, float) for v in values):
                dtype = floating
            try:
                result = meaning(*(torch.tensor(v, dtype=dtype) for v in values))
            except RuntimeError as error:
                raise OverflowError(str(error)) from None
            return result.item()

        return compute


def _row(
    name: str,
    arity: int,
    rule: Rule,
    fn: TorchFn | None = None,
    *,
    cuda: str = "",
    cuda_int: str = "",
    text: str = "",
    float_text: str = "",
    scalar: str = "",
    domains: str = "any",
    of_bools: str = "",
    takes_complex: bool = False,
    is_slow: bool = False,
    near: str = "",
    exact: tuple[int, ...] = (),
) -> PointwiseRow:
    """Returns a row: without `fn` the op is torch's of the same name. Without `cuda` it is the
    operator of its text, else the device's function of its name; a mere name is a device function.
    One domain is that of all operands.
    """
    text = text or name
    if not cuda:
        operator = f"{{0}} {text} {{1}}" if arity == 2 else f"{text}{{0}}"
        cuda = name if _is_function(text) else operator
    drawn = tuple(domains.split())
    return PointwiseRow(
        name,
        arity,
        rule,
        fn or getattr(torch, name),
        fn.__doc__ or "" if fn else f"As `torch.{name}`.",
        _cuda_text(cuda, arity),
        _cuda_text(cuda_int, arity) if cuda_int else None,
        text,
        float_text or text,
        scalar or text,
        drawn if len(drawn) == arity else drawn * arity,
        of_bools,
        takes_complex,
        is_slow,
        tuple(near.split()),
        exact,
    )


def _is_function(text: str) -> bool:
    """Whether text names a function, and is no operator: `sqrt`, `std::real`."""
    return text.removeprefix("std::").isidentifier()


def _cuda_text(text: str, arity: int) -> str:
    """Returns a template; of the name of a function of `codegen/rt_math.h`, its call."""
    if not text.isidentifier():
        return text
    return f"fm_{text}(" + ", ".join(f"{{{i}}}" for i in range(arity)) + ")"


def _function(name: str, domain: str = "any") -> PointwiseRow:
    """Returns the row of a function of the C library, which computes in floats."""
    text = f"{name}f"
    return _row(name, 1, "float", float_text=text, domains=domain, takes_complex=True, is_slow=True)


def _real_function(name: str, domain: str = "any", fn: TorchFn | None = None) -> PointwiseRow:
    """Returns the row of a function of real numbers alone."""
    text = f"{name}f"
    return _row(name, 1, "float", fn, float_text=text, domains=domain, is_slow=True)


# ------------------------------------------------------------------ torch meanings without a twin
def _frac(x: torch.Tensor) -> torch.Tensor:
    """x - trunc(x)."""
    return x - torch.trunc(x)


def _erfcinv(x: torch.Tensor) -> torch.Tensor:
    """The y with erfc(y) = x."""
    return -torch.special.ndtri(x / 2) / math.sqrt(2.0)


def _silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x)."""
    return torch.nn.functional.silu(x)


def _neg(x: torch.Tensor) -> torch.Tensor:
    """-x; of Bool, x."""
    return x.clone() if x.dtype is torch.bool else torch.neg(x)


def _sub(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """lhs - rhs; of Bool, lhs xor rhs."""
    return torch.logical_xor(a, b) if a.dtype is torch.bool else torch.sub(a, b)


def _real(x: torch.Tensor) -> torch.Tensor:
    """The real part; of a real x, x."""
    return _part(x, 0) if x.is_complex() else x.clone()


def _imag(x: torch.Tensor) -> torch.Tensor:
    """The imaginary part."""
    return _part(x, 1)


def _part(x: torch.Tensor, which: int) -> torch.Tensor:
    return torch.view_as_real(x.resolve_conj())[..., which].clone()


def _where_divisible(
    fn: TorchFn, a: torch.Tensor, b: torch.Tensor, on_zero: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Gives an integer division a value where the divisor is 0; others use `fn` as it is."""
    if a.dtype.is_floating_point or a.dtype.is_complex:
        return fn(a, b)
    if a.dtype is torch.bool:
        return _where_divisible(fn, a.int(), b.int(), on_zero).bool()
    is_zero = b == 0
    return torch.where(is_zero, on_zero(a), fn(a, torch.where(is_zero, 1, b)))


def _quotient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    is_exact = a.dtype.is_floating_point or a.dtype.is_complex
    return torch.div(a, b, rounding_mode=None if is_exact else "trunc")


def _div(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """lhs / rhs; integers are truncated, and x / 0 is -1 (of scalars: an error)."""
    return _where_divisible(_quotient, a, b, lambda x: torch.full_like(x, -1))


def _fmod(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What lhs / rhs leaves, of the sign of lhs; of integers, x % 0 is x (of scalars: an error)."""
    return _where_divisible(torch.fmod, a, b, torch.clone)


def _remainder(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What floor(lhs / rhs) leaves, of the sign of rhs; of integers, x and 0 give x."""
    return _where_divisible(torch.remainder, a, b, torch.clone)


def _pow(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """lhs to the power rhs; integers wrap, and negative exponents give 0 except of 1 and -1."""
    if a.dtype is torch.bool:
        return torch.pow(a.int(), b.int()).bool()
    found = torch.pow(a, b)
    # As of real numbers, and of complex ones where the exponent is a number: torch's pow of two
    # complex tensors has NaN for 0 ** 0.
    return torch.where(b == 0, 1, found) if a.is_complex() else found


def _clamp(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """min(max(x, low), high), x itself where it equals a bound; NaN stays."""
    above = torch.where((x < low) | low.isnan(), low, x)
    return torch.where((above > high) | high.isnan(), high, above)


def _threshold(x: torch.Tensor, limit: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value` where x <= limit, else x."""
    return torch.where(x <= limit, value, x)


def _lerp(start: torch.Tensor, end: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """start + weight * (end - start)."""
    return torch.lerp(*torch.broadcast_tensors(start, end, weight))


# ------------------------------------------------------------------ the table
_ROWS = (
    _function("acos", "unit"),
    _function("acosh", "above_one"),
    _function("asin", "unit"),
    _function("asinh"),
    _function("atan"),
    _function("atanh", "unit"),
    _function("cos"),
    _function("cosh"),
    _function("sin"),
    _function("sinh"),
    _function("tan", "unit"),
    _function("tanh"),
    _function("exp"),
    _function("exp2"),
    _function("expm1"),
    _real_function("erf"),
    _real_function("erfc"),
    _real_function("erfinv", "unit"),
    _real_function("erfcinv", "below_two", _erfcinv),
    _real_function("lgamma", "positive"),
    _function("log", "positive"),
    _function("log10", "positive"),
    _function("log1p", "positive"),
    _function("log2", "positive"),
    _function("rsqrt", "positive"),
    _function("sqrt", "positive"),
    _row("reciprocal", 1, "float", domains="nonzero", is_slow=True, takes_complex=True),
    _row("sigmoid", 1, "float", is_slow=True, takes_complex=True),
    _row("silu", 1, "keep_float", _silu, is_slow=True, near="swish", takes_complex=True),
    _row(
        "neg",
        1,
        "default",
        _neg,
        text="-",
        cuda_int="neg",
        scalar="neg",
        near="negative",
        takes_complex=True,
    ),
    _row("abs", 1, "part", takes_complex=True, near="absolute fabs"),
    _row("real", 1, "part", _real, text="std::real", scalar="real", takes_complex=True),
    _row("imag", 1, "part", _imag, text="std::imag", scalar="imag", takes_complex=True),
    _row("ceil", 1, "keep", float_text="ceilf"),
    _row("floor", 1, "keep", float_text="floorf"),
    _row("round", 1, "keep", text="nearbyint", float_text="nearbyintf", cuda="round", near="rint"),
    _row("trunc", 1, "keep", float_text="truncf", near="fix"),
    _row("frac", 1, "keep", _frac),
    _row("relu", 1, "keep"),
    _row("isfinite", 1, "test", takes_complex=True),
    _row("isinf", 1, "test", takes_complex=True),
    _row("isnan", 1, "test", takes_complex=True),
    _row("isneginf", 1, "test"),
    _row("isposinf", 1, "test"),
    _row("isreal", 1, "test", takes_complex=True),
    _row("signbit", 1, "test_promoted"),
    _row("logical_not", 1, "bool", text="!", takes_complex=True),
    _row("bitwise_not", 1, "int", text="~", of_bools="logical_not", near="invert"),
    _row("add", 2, "default", text="+", cuda_int="add", near="plus", takes_complex=True),
    _row(
        "sub",
        2,
        "default",
        _sub,
        text="-",
        cuda_int="sub",
        near="subtract minus",
        takes_complex=True,
    ),
    _row("mul", 2, "default", text="*", cuda_int="mul", near="multiply times", takes_complex=True),
    _row(
        "div",
        2,
        "default",
        _div,
        text="/",
        cuda_int="div",
        domains="any nonzero",
        is_slow=True,
        takes_complex=True,
        exact=(1,),
    ),
    _row(
        "mod",
        2,
        "default",
        _fmod,
        text="%",
        cuda="fmod",
        cuda_int="mod",
        domains="any nonzero",
        exact=(1,),
    ),
    _row(
        "fmod",
        2,
        "default",
        _fmod,
        float_text="fmodf",
        scalar="%",
        domains="any nonzero",
        is_slow=True,
        exact=(1,),
    ),
    _row("remainder", 2, "default", _remainder, domains="any nonzero", is_slow=True, exact=(1,)),
    _row("complex", 2, "parts", text="std::complex", scalar="complex"),
    _row(
        "pow",
        2,
        "default",
        _pow,
        domains="positive nonzero",
        is_slow=True,
        near="power",
        takes_complex=True,
        exact=(1,),
    ),
    _row("maximum", 2, "default", text="max", float_text="fmax", cuda="maximum"),
    _row("minimum", 2, "default", text="min", float_text="fmin", cuda="minimum"),
    _row("atan2", 2, "float", float_text="atan2f", is_slow=True, near="arctan2"),
    _row("nextafter", 2, "float_only"),
    _row("eq", 2, "comparison", text="==", near="equal", takes_complex=True),
    _row("ne", 2, "comparison", text="!=", near="not_equal", takes_complex=True),
    _row("lt", 2, "comparison", text="<", near="less"),
    _row("le", 2, "comparison", text="<=", near="less_equal"),
    _row("gt", 2, "comparison", text=">", near="greater"),
    _row("ge", 2, "comparison", text=">=", near="greater_equal"),
    _row("logical_and", 2, "bool", text="&&", takes_complex=True),
    _row("logical_or", 2, "bool", text="||", takes_complex=True),
    _row("bitwise_and", 2, "bits", text="&", of_bools="logical_and"),
    _row("bitwise_or", 2, "bits", text="|", of_bools="logical_or"),
    _row("bitwise_xor", 2, "bits", text="^", of_bools="ne"),
    _row("bitwise_left_shift", 2, "int", text="<<", cuda="lshift", domains="any nonzero"),
    _row("bitwise_right_shift", 2, "int", text=">>", cuda="rshift", domains="any nonzero"),
    _row("gcd", 2, "int"),
    _row("where", 3, "select", cuda="{0} ? {1} : {2}", takes_complex=True, exact=(1, 2)),
    _row("lerp", 3, "default", _lerp, takes_complex=True),
    _row("clamp", 3, "limits", _clamp, near="clip", exact=(1, 2)),
    _row("threshold", 3, "fitting", _threshold, exact=(1, 2)),
)

# By kind.
POINTWISE: dict[str, PointwiseRow] = {row.name: row for row in _ROWS}
# Public op -> (kind, dtype rule): `truediv` shares the kind of `div`.
PUBLIC: dict[str, tuple[str, Rule]] = {
    **{kind: (kind, row.rule) for kind, row in POINTWISE.items()},
    "truediv": ("div", "float"),
}


def kinds_of(arity: int) -> tuple[str, ...]:
    """Returns the kinds with so many operands."""
    return tuple(kind for kind, row in POINTWISE.items() if row.arity == arity)
