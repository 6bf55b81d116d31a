"""The table of elementwise ops: one row per op, which all other packages read.

- The IR reads names and texts of ops. `fuser.ops` reads dtype rules and torch functions.
- Scalars use the torch functions. The code generator uses the CUDA text.
- Tests read the domains: the operand values for which an op is defined.

In the CUDA text, `{0} {1} {2}` are the texts of the operands. Each text must be a name, a literal
or in parentheses, and of the C type in which the op computes. Operand 0 of `where` is bool.
`fm_NAME` is a function of `codegen/rt_math.h`. Values of half precision are computed as float.
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

# Dtype rules, which `fuser.ops.elementwise` implements under these names.
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
# The rules under which an op computes in a floating dtype, even for integers.
_OF_FLOATS: frozenset[Rule] = frozenset({"float", "float_only", "keep_float"})
TorchFn = Callable[..., torch.Tensor]
Number = bool | int | float


@record
class PointwiseRow:
    """Facts about one kind of elementwise op: one row of the table.

    - `arity`: the number of operands. `rule`: how the dtypes of the operands determine the dtype in
      which the op computes, and that of the result.
    - `torch`: the reference function, for tensors of the dtype in which the op computes. `meaning`:
      a sentence that says what it returns.
    - `cuda`, `cuda_int`: the C++ expression, and the C++ expression for integers if it differs.
    - `text`: the operator or function in texts of the IR.
    - `float_text`: the operator or function in texts if the dtype of the result is floating. For an
      op with one operand, it is used only if the dtype is Float.
    - `scalar`: the name of the op on scalars.
    - `domains`: per operand, the values that tests may draw (`tests.support.op_samples`).
    - `of_bools`: the kind of op that replaces this kind if all operands are Bool.
    - `takes_complex`: whether complex operands are allowed, as in torch.
    - `is_slow`: whether a thread needs many instructions.
    - `near`: other names of the op, for hints in messages.
    - `exact`: positions of operands. If such an operand is a number, the dtype of the result must
      represent it exactly. An example is a divisor. Sums and products have no such operands: they
      are correct modulo 2**32 even if a number wraps around.
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
        """Whether the op is written in texts as an operator such as `+`, and not as a function."""
        return not _is_function(self.text)

    @property
    def scalar_ops(self) -> dict[str, Callable[..., Number]]:
        """The functions of this op on Python numbers, by the name of the op on scalars.

        If the result depends on the precision, there are two functions. The name of the op that
        computes in Float ends in f.
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
    """Returns the row of an elementwise op, with these defaults:

    - `fn` is torch's function with the name `name`.
    - `cuda` is the operator in `text`. If `text` is no operator, it is a call of the device
      function with the name `name`. A `cuda` that is only a name is also such a call.
    - If `domains` has one domain, the domain applies to all operands.
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
        " ".join((fn.__doc__ or "").split()) if fn else f"As `torch.{name}`.",
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
    """Returns whether `text` is a function name (`sqrt`, `std::real`) and not an operator."""
    return text.removeprefix("std::").isidentifier()


def _cuda_text(text: str, arity: int) -> str:
    """Returns the CUDA expression of an op, in which `{0}`, `{1}` stand for the operands.

    If `text` is only a name, the expression is a call of `fm_NAME` of `codegen/rt_math.h`.
    """
    if not text.isidentifier():
        return text
    return f"fm_{text}(" + ", ".join(f"{{{i}}}" for i in range(arity)) + ")"


def _function(name: str, domain: str = "any") -> PointwiseRow:
    """Returns the row of a C library function, such as `expf`, that computes in floating dtypes.

    `domain` names the values for which the function is defined. Tests draw its operand from them.
    """
    text = f"{name}f"
    return _row(name, 1, "float", float_text=text, domains=domain, takes_complex=True, is_slow=True)


def _real_function(name: str, domain: str = "any", fn: TorchFn | None = None) -> PointwiseRow:
    """Returns the row of a C library function that takes no complex numbers, such as `erff`.

    `domain` names the values for which it is defined. `fn` is the torch function, if it has another
    name.
    """
    text = f"{name}f"
    return _row(name, 1, "float", fn, float_text=text, domains=domain, is_slow=True)


# ------------------------------------------------------------------ functions that torch lacks
def _frac(x: torch.Tensor) -> torch.Tensor:
    """Returns x - trunc(x)."""
    return x - torch.trunc(x)


def _erfcinv(x: torch.Tensor) -> torch.Tensor:
    """Returns the number y for which erfc(y) = x."""
    return -torch.special.ndtri(x / 2) / math.sqrt(2.0)


def _silu(x: torch.Tensor) -> torch.Tensor:
    """Returns x * sigmoid(x)."""
    return torch.nn.functional.silu(x)


def _neg(x: torch.Tensor) -> torch.Tensor:
    """Returns -x. A Bool is returned unchanged."""
    return x.clone() if x.dtype is torch.bool else torch.neg(x)


def _sub(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """Returns lhs - rhs, or lhs xor rhs for Bool."""
    return torch.logical_xor(lhs, rhs) if lhs.dtype is torch.bool else torch.sub(lhs, rhs)


def _real(x: torch.Tensor) -> torch.Tensor:
    """Returns the real part of x. A real x is returned unchanged."""
    return _part(x, 0) if x.is_complex() else x.clone()


def _imag(x: torch.Tensor) -> torch.Tensor:
    """Returns the imaginary part of x."""
    return _part(x, 1)


def _part(x: torch.Tensor, which: int) -> torch.Tensor:
    return torch.view_as_real(x.resolve_conj())[..., which].clone()


def _where_divisible(
    fn: TorchFn, a: torch.Tensor, b: torch.Tensor, on_zero: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Returns `fn(a, b)`, which is a quotient or a remainder of the elements of two tensors.

    Where integers are divided by 0, returns the elements of `on_zero(a)`.
    """
    if a.dtype.is_floating_point or a.dtype.is_complex:
        return fn(a, b)
    if a.dtype is torch.bool:
        return _where_divisible(fn, a.int(), b.int(), on_zero).bool()
    is_zero = b == 0
    return torch.where(is_zero, on_zero(a), fn(a, torch.where(is_zero, 1, b)))


def _quotient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    is_exact = a.dtype.is_floating_point or a.dtype.is_complex
    return torch.div(a, b, rounding_mode=None if is_exact else "trunc")


def _div(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """Returns lhs / rhs, for integers rounded towards zero. An integer / 0 is -1 in a tensor, and
    an error between scalars.
    """
    return _where_divisible(_quotient, lhs, rhs, lambda x: torch.full_like(x, -1))


def _fmod(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """Returns the remainder of lhs / rhs, with the sign of lhs. For integers and rhs = 0, it is lhs
    in a tensor, and an error between scalars.
    """
    return _where_divisible(torch.fmod, lhs, rhs, torch.clone)


def _remainder(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """Returns the remainder of lhs / rhs, with the sign of rhs, or lhs for integers and rhs = 0."""
    return _where_divisible(torch.remainder, lhs, rhs, torch.clone)


def _pow(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """Returns lhs ** rhs. Integers wrap, and an integer rhs < 0 gives 0 unless lhs is 1 or -1."""
    if lhs.dtype is torch.bool:
        return torch.pow(lhs.int(), rhs.int()).bool()
    found = torch.pow(lhs, rhs)
    # x ** 0 is 1 for real numbers; for two complex tensors, torch returns NaN for 0 ** 0.
    return torch.where(rhs == 0, 1, found) if lhs.is_complex() else found


def _clamp(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Returns min(max(x, low), high); NaN if an operand is NaN; -0.0 for x = -0.0 and low = 0."""
    above = torch.where((x < low) | low.isnan(), low, x)
    return torch.where((above > high) | high.isnan(), high, above)


def _threshold(x: torch.Tensor, limit: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns `value` if x <= limit, else x."""
    return torch.where(x <= limit, value, x)


def _lerp(start: torch.Tensor, end: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns start + weight * (end - start)."""
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

# Kind -> row.
POINTWISE: dict[str, PointwiseRow] = {row.name: row for row in _ROWS}
# Public op -> (kind, dtype rule). `truediv` has the kind of `div` and another dtype rule.
PUBLIC: dict[str, tuple[str, Rule]] = {
    **{kind: (kind, row.rule) for kind, row in POINTWISE.items()},
    "truediv": ("div", "float"),
}


def kinds_of(arity: int) -> tuple[str, ...]:
    """Returns the names (kinds) of all elementwise ops with `arity` operands, such as "exp"."""
    return tuple(kind for kind, row in POINTWISE.items() if row.arity == arity)
