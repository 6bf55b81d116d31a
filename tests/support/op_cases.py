"""Test cases for every elementwise op: operands to try, and torch's results.

`CASES` is used by the tests of the op functions and by the tests of generated kernels. A case
builds a fusion (`OpCase.define`), draws inputs (`OpCase.draw`) and computes a reference
(`OpCase.reference`, on float64 or integer tensors). The reference is that of the fuzzers
(`tools/fuzz/table.py`), which is independent of our table of ops. So a new elementwise op is
described once for all tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fuser import ops
from fuser.ir.dtypes import DataType, category, to_torch
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.pointwise_table import POINTWISE, PUBLIC
from fuser.ops.define import define_tensor
from tests.support.op_samples import DOMAINS
from tools.fuzz.ops.elementwise import BOOL_FN, typed
from tools.fuzz.table import ROWS as REFERENCES
from tools.fuzz.table import Row
from tools.fuzz.values import exact

D = DataType
FLOATS = (D.Double, D.Float, D.Half, D.BFloat16)
INTS = (D.Int32, D.Int)
COMPLEX = (D.ComplexFloat, D.ComplexDouble)
ALL = (*FLOATS, *INTS, D.Bool)

# Extents 0, 1, primes, and rank 0 to 3.
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7,), (3, 0), (5, 13), (2, 3, 11))
LAYOUTS = ("contiguous", "strided", "transposed", "expanded")


def draw_operand(
    domain: str, dtype: DataType, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    """Returns a contiguous tensor of random values from the domain."""
    (least, most), (low, high) = DOMAINS[domain].floats, DOMAINS[domain].integers
    match category(dtype):
        case "float":
            unit = torch.rand(shape, generator=generator, dtype=torch.float64)
            return (unit * (most - least) + least).to(to_torch(dtype))
        case "complex":
            parts = [
                draw_operand(domain, D.Double, shape, generator).to(torch.float64) for _ in range(2)
            ]
            return torch.complex(*parts).to(to_torch(dtype))
        case "int":
            values = torch.randint(low, high + 1, shape, generator=generator)
            return values.to(to_torch(dtype))
        case _:
            return torch.randint(0, 2, shape, generator=generator).bool()


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Returns the values in another memory layout; `expanded` repeats the first row."""
    if x.ndim == 0 or layout == "contiguous":
        return x.contiguous()
    if layout == "strided":
        out = x.new_empty([2 * n for n in x.shape])[tuple(slice(None, None, 2) for _ in x.shape)]
        return out.copy_(x)
    if layout == "transposed":
        order = list(reversed(range(x.ndim)))
        return x.permute(order).contiguous().permute(order)
    return x[:1].expand(x.shape) if x.shape[0] > 1 else x


def widened(x: torch.Tensor) -> torch.Tensor:
    """Returns floating values in float64, complex ones in complex128, and others unchanged."""
    if x.is_complex():
        return x.to(torch.complex128)
    return x.double() if x.is_floating_point() else x


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
    scalars: tuple[complex | int | bool | None, ...] = ()

    @property
    def id(self) -> str:
        parts = [self.name, *(d.name for d in self.dtypes), *map(str, self.scalars)]
        return "-".join(parts)

    def define(self, rank: int, *, contiguity: bool = False) -> Fusion:
        """Returns a fusion of this op on symbolic inputs with `rank` axes."""
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
        """Adds the op to the active fusion."""
        return getattr(ops, self.name)(*inputs, *self.scalars)

    def draw(
        self, shape: tuple[int, ...], seed: int, layout: str = "contiguous"
    ) -> list[torch.Tensor]:
        """Returns random input tensors."""
        generator = torch.Generator().manual_seed(seed)
        return [
            lay_out(draw_operand(domain, dtype, shape, generator), layout)
            for domain, dtype in zip(self.domains, self.dtypes, strict=True)
        ]

    def reference(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        """Returns the expected result in float64, or exactly for integers and Bool."""
        return self.torch(*map(widened, inputs), *self.scalars)


# ------------------------------------------------------------------ one node each
def _dtypes(row: Row) -> list[DataType]:
    """Returns the dtypes to try: those of each category that the reference supports."""
    found: list[DataType] = []
    if "f" in row.dtypes:
        # The number next to a float depends on its dtype; the reference has Double.
        found += (D.Double,) if row.name == "nextafter" else FLOATS
    if "i" in row.dtypes:
        found += (D.Int,) if row.rule == "float" else INTS
    if "w" in row.dtypes:
        found += FLOATS[:2]
    if "c" in row.dtypes:
        found += COMPLEX
    if "b" in row.dtypes:
        found.append(D.Bool)
    return found


def _case(row: Row, dtype: DataType) -> OpCase:
    kind, _ = PUBLIC[row.name]
    dtypes = [dtype] * row.arity
    if row.rule == "select":
        dtypes[0] = D.Bool
    operands = [exact(torch.zeros(1), d.name) for d in dtypes]
    result = D[typed(row, operands)[1]]
    fn = row.fn
    if row.rule == "float":
        fn = _double(fn)
    elif category(dtype) in ("int", "bool"):
        fn = row.int_fn or fn
    if dtype is D.Bool and row.rule == "default":
        fn = BOOL_FN[row.name]
    return OpCase(row.name, tuple(dtypes), POINTWISE[kind].domains, result, fn)


def _double(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns float64 for integers too, for ops with floating results."""
    return lambda *xs: fn(*(x if x.is_complex() else x.double() for x in xs))


# ------------------------------------------------------------------ with arguments of their own
def _shifted(a: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """Returns the logical shift; counts outside of [0, width) give 0."""
    width = 64 if a.dtype is torch.int64 else 32
    inside = (n >= 0) & (n < width)
    shifted = REFERENCES["logical_right_shift"].fn(a.long(), torch.where(inside, n, 0), width)
    return torch.where(inside, shifted, 0).to(a.dtype)


def _composite_cases() -> list[OpCase]:
    cases: list[OpCase] = []
    numbers = (*FLOATS, *INTS)
    for d in numbers:
        for name in ("set", "segment_set"):
            cases.append(OpCase(name, (d,), ("any",), d, lambda x: x))
        cases.append(OpCase("sign", (d,), ("any",), d, torch.sign))
        value, limits, step = (
            (2.5, (-1.5, 2.0), (0.5, 7.0)) if d in FLOATS else (2, (-3, 2), (1, 7))
        )
        wide = D.Float if d in (D.Half, D.BFloat16) else d

        def addcmul(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, v: float) -> torch.Tensor:
            return a + b * c * v

        def threshold(x: torch.Tensor, limit: float, v: float) -> torch.Tensor:
            return torch.where(x <= limit, torch.full_like(x, v), x)

        cases.append(OpCase("addcmul", (d,) * 3, ("any",) * 3, wide, addcmul, (value,)))
        for ends in (limits, (None, limits[1]), (limits[0], None)):
            cases.append(OpCase("clamp", (d,), ("any",), d, torch.clamp, ends))
        cases.append(OpCase("threshold", (d,), ("any",), d, threshold, step))
        if d in INTS:
            shifts = ("wide", "shift")
            cases.append(OpCase("logical_right_shift", (d, d), shifts, d, _shifted))
    for d in COMPLEX:
        for name in ("set", "segment_set"):
            cases.append(OpCase(name, (d,), ("any",), d, lambda x: x))
        operands, value = ((d,) * 3, ("any",) * 3), 1.5 - 2.5j
        cases.append(
            OpCase("addcmul", *operands, d, lambda a, b, c, v: a + b * c * v, scalars=(value,))
        )
    return cases


_OWN = {"clamp", "threshold"}
CASES: tuple[OpCase, ...] = (
    *(
        _case(row, dtype)
        for row in REFERENCES.values()
        if row.name in PUBLIC and row.name not in _OWN
        for dtype in _dtypes(row)
    ),
    # Cases that the generator of random programs never makes.
    *(_case(REFERENCES["frac"], d) for d in INTS),
    _case(REFERENCES["erfcinv"], D.Int),
    *_composite_cases(),
)

# |error| allowed per result dtype: (relative, absolute); the reference is float64.
TOLERANCE: dict[DataType, tuple[float, float]] = {
    D.ComplexDouble: (1e-10, 1e-10),
    D.ComplexFloat: (4e-6, 4e-6),
    D.Double: (1e-10, 1e-10),
    D.Float: (4e-6, 4e-6),
    D.Half: (2e-3, 2e-3),
    D.BFloat16: (1.6e-2, 1.6e-2),
}


def check_result(case: OpCase, out: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Compares a result (float64 or the case's dtype) with the reference."""
    expected = case.reference(inputs)
    assert out.shape == expected.shape, (out.shape, expected.shape)
    rtol, atol = TOLERANCE.get(case.result, (0.0, 0.0))
    if not (out.is_floating_point() or out.is_complex()):
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
