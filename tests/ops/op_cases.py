"""Cases of every elementwise op: operands to try, and what torch says about them.

`CASES` is used by the tests of the op functions and by the tests of generated kernels. A case
builds a fusion (`OpCase.define`), draws inputs (`OpCase.draw`) and has a reference that knows
nothing of our op table (`OpCase.reference`, on float64 or integer tensors).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fuser import ops
from fuser.ir.dtypes import DataType, category, to_torch
from fuser.ir.fusion import Fusion
from fuser.ir.guard import FusionGuard
from fuser.ir.tensor import TensorView
from fuser.ops.define import define_tensor

D = DataType
FLOATS = (D.Double, D.Float, D.Half, D.BFloat16)
INTS = (D.Int32, D.Int)
ALL = (*FLOATS, *INTS, D.Bool)

# Extents 0, 1, primes, and rank 0 to 3.
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7,), (3, 0), (5, 13), (2, 3, 11))
LAYOUTS = ("contiguous", "strided", "transposed", "expanded")

Draw = Callable[[torch.Generator, tuple[int, ...]], torch.Tensor]


def _uniform(low: float, high: float) -> Draw:
    def draw(generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low

    return draw


# Domains of operands: what may be drawn as a float, and the inclusive range of integers.
DOMAINS: dict[str, tuple[Draw, tuple[int, int]]] = {
    "any": (_uniform(-4.0, 4.0), (-9, 9)),
    "unit": (_uniform(-0.95, 0.95), (0, 0)),
    "positive": (_uniform(0.05, 6.0), (1, 12)),
    "above_one": (_uniform(1.05, 6.0), (2, 12)),
    "below_two": (_uniform(0.05, 1.95), (1, 1)),
    "nonzero": (_uniform(0.5, 4.0), (1, 9)),
    "shift": (_uniform(0.0, 6.0), (-2, 70)),
    "wide": (_uniform(-1e4, 1e4), (-(2**30), 2**30)),
}


def draw_operand(
    domain: str, dtype: DataType, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    """Return a contiguous tensor of the domain."""
    draw, (low, high) = DOMAINS[domain]
    match category(dtype):
        case "float":
            return draw(generator, shape).to(to_torch(dtype))
        case "int":
            values = torch.randint(low, high + 1, shape, generator=generator)
            return values.to(to_torch(dtype))
        case _:
            return torch.randint(0, 2, shape, generator=generator).bool()


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the values in another memory layout; `expanded` repeats the first row."""
    if x.ndim == 0 or layout == "contiguous":
        return x.contiguous()
    if layout == "strided":
        out = x.new_empty([2 * n for n in x.shape])[tuple(slice(None, None, 2) for _ in x.shape)]
        return out.copy_(x)
    if layout == "transposed":
        order = list(reversed(range(x.ndim)))
        return x.permute(order).contiguous().permute(order)
    return x[:1].expand(x.shape) if x.shape[0] > 1 else x


@dataclass(frozen=True)
class OpCase:
    """One op on operands of given dtypes.

    `result` is the dtype of the output. `scalars` are trailing operands given as Python numbers.
    """

    name: str
    dtypes: tuple[DataType, ...]
    domains: tuple[str, ...]
    result: DataType
    torch: Callable[..., torch.Tensor]
    scalars: tuple[float | int | bool | None, ...] = ()

    @property
    def id(self) -> str:
        parts = [self.name, *(d.name for d in self.dtypes), *map(str, self.scalars)]
        return "-".join(parts)

    def define(self, rank: int, *, contiguity: bool = False) -> Fusion:
        """Return a fusion of this op on symbolic inputs of the given rank."""
        fusion = Fusion()
        with FusionGuard(fusion):
            inputs = [
                define_tensor([-1] * rank, contiguity=contiguity, dtype=d) for d in self.dtypes
            ]
            for tv in inputs:
                fusion.add_input(tv)
            fusion.add_output(self.apply(inputs))
        return fusion

    def apply(self, inputs: list[TensorView]) -> TensorView:
        """Append the op to the active fusion."""
        return getattr(ops, self.name)(*inputs, *self.scalars)

    def draw(
        self, shape: tuple[int, ...], seed: int, layout: str = "contiguous"
    ) -> list[torch.Tensor]:
        """Return input tensors."""
        generator = torch.Generator().manual_seed(seed)
        return [
            lay_out(draw_operand(domain, dtype, shape, generator), layout)
            for domain, dtype in zip(self.domains, self.dtypes, strict=True)
        ]

    def reference(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        """Return the result in float64 (integers and Bool: exactly)."""
        wide = [x.double() if x.dtype.is_floating_point else x for x in inputs]
        return self.torch(*wide, *self.scalars)


# ------------------------------------------------------------------ result dtypes
def promoted(dtype: DataType) -> DataType:
    """The result of an op that promotes one dtype with itself."""
    return D.Float if dtype in (D.Half, D.BFloat16) else dtype


def promoted_to_float(dtype: DataType) -> DataType:
    return D.Double if dtype is D.Double else D.Float


# ------------------------------------------------------------------ the ops
def _double(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Compute integers in float64 too: the op's result is floating."""
    return lambda *xs: fn(*(x.double() for x in xs))


_FLOAT_UNARY: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "acos": ("unit", torch.acos),
    "acosh": ("above_one", torch.acosh),
    "asin": ("unit", torch.asin),
    "asinh": ("any", torch.asinh),
    "atan": ("any", torch.atan),
    "atanh": ("unit", torch.atanh),
    "cos": ("any", torch.cos),
    "cosh": ("any", torch.cosh),
    "sin": ("any", torch.sin),
    "sinh": ("any", torch.sinh),
    "tan": ("unit", torch.tan),
    "tanh": ("any", torch.tanh),
    "exp": ("any", torch.exp),
    "exp2": ("any", torch.exp2),
    "expm1": ("any", torch.expm1),
    "erf": ("any", torch.erf),
    "erfc": ("any", torch.erfc),
    "erfinv": ("unit", torch.erfinv),
    "erfcinv": ("below_two", lambda x: torch.erfinv(1 - x)),
    "lgamma": ("positive", torch.lgamma),
    "log": ("positive", torch.log),
    "log10": ("positive", torch.log10),
    "log1p": ("positive", torch.log1p),
    "log2": ("positive", torch.log2),
    "reciprocal": ("nonzero", torch.reciprocal),
    "rsqrt": ("positive", torch.rsqrt),
    "sqrt": ("positive", torch.sqrt),
    "sigmoid": ("any", torch.sigmoid),
}
_KEEP_UNARY: dict[str, Callable[..., torch.Tensor]] = {
    "abs": torch.abs,
    "ceil": torch.ceil,
    "floor": torch.floor,
    "frac": lambda x: x - torch.trunc(x),
    "relu": torch.relu,
    "round": torch.round,
    "trunc": torch.trunc,
    "set": lambda x: x,
    "segment_set": lambda x: x,
    "sign": torch.sign,
    "real": lambda x: x,
}
_TESTS = ("isfinite", "isinf", "isnan", "isneginf", "isposinf", "isreal")


def _binary(name: str) -> tuple[tuple[str, str], Callable[..., torch.Tensor]]:
    return ("any", "any"), getattr(torch, name)


def _truncated(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a / b if a.dtype.is_floating_point else torch.div(a, b, rounding_mode="trunc")


_PROMOTING_BINARY: dict[str, tuple[tuple[str, str], Callable[..., torch.Tensor]]] = {
    "add": _binary("add"),
    "sub": _binary("sub"),
    "mul": _binary("mul"),
    "div": (("any", "nonzero"), _truncated),
    "mod": (("any", "nonzero"), torch.fmod),
    "fmod": (("any", "nonzero"), torch.fmod),
    "remainder": (("any", "nonzero"), torch.remainder),
    "pow": (("positive", "nonzero"), torch.pow),
    "maximum": _binary("maximum"),
    "minimum": _binary("minimum"),
}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_BITS = ("bitwise_and", "bitwise_or", "bitwise_xor")


def _logical_right_shift(a: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    width = 64 if a.dtype is torch.int64 else 32
    out = [
        ((int(x) % 2**width) >> int(s)) if 0 <= int(s) < width else 0
        for x, s in zip(a.flatten().tolist(), n.flatten().tolist(), strict=True)
    ]
    signed = [v - 2**width if v >= 2 ** (width - 1) else v for v in out]
    return torch.tensor(signed, dtype=a.dtype).reshape(a.shape)


def _unary_cases() -> list[OpCase]:
    cases: list[OpCase] = []
    for name, (domain, fn) in _FLOAT_UNARY.items():
        for d in (*FLOATS, D.Int):
            cases.append(OpCase(name, (d,), (domain,), promoted_to_float(d), _double(fn)))
    for name, fn in _KEEP_UNARY.items():
        for d in (*FLOATS, *INTS):
            cases.append(OpCase(name, (d,), ("any",), d, _integer_frac if name == "frac" else fn))
    for d in FLOATS:
        cases.append(OpCase("silu", (d,), ("any",), d, torch.nn.functional.silu))
    for d in (*FLOATS, *INTS):
        cases.append(OpCase("neg", (d,), ("any",), promoted(d), torch.neg))
        cases.append(OpCase("signbit", (d,), ("any",), D.Bool, torch.signbit))
    for name in _TESTS:
        for d in ALL:
            cases.append(OpCase(name, (d,), ("any",), D.Bool, getattr(torch, name)))
    for d in ALL:
        cases.append(OpCase("logical_not", (d,), ("any",), D.Bool, torch.logical_not))
    for d in (*INTS, D.Bool):
        cases.append(OpCase("bitwise_not", (d,), ("any",), d, torch.bitwise_not))
    return cases


def _integer_frac(x: torch.Tensor) -> torch.Tensor:
    return x - torch.trunc(x)


def _binary_cases() -> list[OpCase]:
    cases: list[OpCase] = []
    for name, (domains, fn) in _PROMOTING_BINARY.items():
        for d in (*FLOATS, *INTS):
            cases.append(OpCase(name, (d, d), domains, promoted(d), fn))
    for d in (*FLOATS, D.Int):
        wide = promoted_to_float(d)
        cases.append(OpCase("truediv", (d, d), ("any", "nonzero"), wide, _double(torch.div)))
        cases.append(OpCase("atan2", (d, d), ("any", "any"), wide, _double(torch.atan2)))
    cases.append(OpCase("nextafter", (D.Double,) * 2, ("any", "any"), D.Double, torch.nextafter))
    for name in _COMPARISONS:
        for d in ALL:
            cases.append(OpCase(name, (d, d), ("any", "any"), D.Bool, getattr(torch, name)))
    for name in ("logical_and", "logical_or"):
        for d in ALL:
            cases.append(OpCase(name, (d, d), ("any", "any"), D.Bool, getattr(torch, name)))
    for name in _BITS:
        for d in (*INTS, D.Bool):
            cases.append(OpCase(name, (d, d), ("any", "any"), d, getattr(torch, name)))
    for d in INTS:
        for name in ("bitwise_left_shift", "bitwise_right_shift"):
            # torch is asked for counts in range only: what it does outside depends on its build.
            cases.append(OpCase(name, (d, d), ("any", "nonzero"), d, getattr(torch, name)))
        shift = ("wide", "shift")
        cases.append(OpCase("logical_right_shift", (d, d), shift, d, _logical_right_shift))
        cases.append(OpCase("gcd", (d, d), ("any", "any"), d, torch.gcd))
    return cases


def _ternary_cases() -> list[OpCase]:
    cases: list[OpCase] = []
    for d in ALL:
        cases.append(OpCase("where", (D.Bool, d, d), ("any",) * 3, d, torch.where))
    for d in FLOATS:
        lerp = OpCase("lerp", (d, d, d), ("any",) * 3, promoted(d), torch.lerp)
        cases.append(lerp)
    for d in (*FLOATS, *INTS):
        value = 2.5 if d in FLOATS else 2

        def addcmul(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, v: float) -> torch.Tensor:
            return a + b * c * v

        cases.append(OpCase("addcmul", (d,) * 3, ("any",) * 3, promoted(d), addcmul, (value,)))
        limits = (-1.5, 2.0) if d in FLOATS else (-3, 2)
        cases.append(OpCase("clamp", (d,), ("any",), d, torch.clamp, limits))
        cases.append(OpCase("clamp", (d,), ("any",), d, torch.clamp, (None, limits[1])))
        cases.append(OpCase("clamp", (d,), ("any",), d, torch.clamp, (limits[0], None)))

        def threshold(x: torch.Tensor, limit: float, v: float) -> torch.Tensor:
            return torch.where(x <= limit, torch.full_like(x, v), x)

        cases.append(
            OpCase("threshold", (d,), ("any",), d, threshold, (1, 7) if d in INTS else (0.5, 7.0))
        )
    return cases


CASES: tuple[OpCase, ...] = (*_unary_cases(), *_binary_cases(), *_ternary_cases())

# |error| allowed per result dtype: (relative, absolute); the reference is float64.
TOLERANCE: dict[DataType, tuple[float, float]] = {
    D.Double: (1e-10, 1e-10),
    D.Float: (4e-6, 4e-6),
    D.Half: (2e-3, 2e-3),
    D.BFloat16: (1.6e-2, 1.6e-2),
}


def check_result(case: OpCase, out: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Compare a result (float64 or the case's dtype) with the reference."""
    expected = case.reference(inputs)
    assert out.shape == expected.shape, (out.shape, expected.shape)
    rtol, atol = TOLERANCE.get(case.result, (0.0, 0.0))
    if not out.dtype.is_floating_point:
        expected = expected.to(out.dtype)
    torch.testing.assert_close(
        out,
        expected.to(out.dtype),
        rtol=rtol,
        atol=atol,
        equal_nan=True,
        msg=lambda m: f"{case.id}: {m}",
    )


SPECIAL_FLOATS = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 0.5, -2.5, 3.5)
