"""The tables of elementwise and reduction ops: dtype rule, torch meaning and CUDA text of each.

`POINTWISE` is keyed by node kind. `PUBLIC` maps the user's op names to node kinds and dtype rules;
several names may share a kind (`div` and `truediv`).

CUDA text: `{0} {1} {2}` are operand texts, which must be atoms (names, literals or parenthesised)
of C type `compute_dtype(op)` (operand 0 of `where`: bool); `{t}` is the C type of the result before
it is stored. Half-like values are computed as float.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from fuser.ir.dtypes import HALF_LIKE, DataType, is_floating, to_torch
from fuser.ir.nodes import BinaryOp, CastOp, TensorOp, TernaryOp, UnaryOp
from fuser.ir.scalar import Number, Scalar
from fuser.ir.tensor import TensorView
from fuser.record import record

# How an op's operands and result are typed:
#   default, float, float_only   promote the operands, half-like becomes Float; result: that dtype
#   comparison                   promote as default; result Bool
#   keep                         operand as it is; result: operand dtype
#   keep_float                   as keep; floating operands only
#   test                         operand as it is; result Bool
#   test_promoted                promote as default; result Bool
#   bool                         operands cast to Bool; result Bool
#   bits                         integers promote as default, all-Bool operands become a logical op
#   int                          integers only, promoted as default
#   select                       `where`: condition Bool, the rest promoted without half -> Float
Rule = Literal[
    "default",
    "float",
    "float_only",
    "comparison",
    "keep",
    "keep_float",
    "test",
    "test_promoted",
    "bool",
    "bits",
    "int",
    "select",
]
TorchFn = Callable[..., torch.Tensor]


@record
class PointwiseRow:
    """Facts about one node kind.

    `torch` takes tensors of the compute dtype. `cuda_int` replaces `cuda` for integer computation.
    """

    name: str
    arity: int
    rule: Rule
    torch: TorchFn
    cuda: str
    cuda_int: str | None = None

    def cuda_text(self, dtype: DataType) -> str:
        """Return the CUDA template for computation in `dtype`."""
        if self.cuda_int is not None and not is_floating(dtype):
            return self.cuda_int
        return self.cuda


# ------------------------------------------------------------------ torch meanings without a twin
def _frac(x: torch.Tensor) -> torch.Tensor:
    return x - torch.trunc(x)


def _erfcinv(x: torch.Tensor) -> torch.Tensor:
    return -torch.special.ndtri(x / 2) / math.sqrt(2.0)


def _neg(x: torch.Tensor) -> torch.Tensor:
    return x.clone() if x.dtype is torch.bool else torch.neg(x)


def _sub(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.logical_xor(a, b) if a.dtype is torch.bool else torch.sub(a, b)


def _integer_only(fn: TorchFn, on_zero: Callable[[torch.Tensor], torch.Tensor]) -> TorchFn:
    """Give an integer division a value where the divisor is 0; floats use `fn` as it is."""

    def safe(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype.is_floating_point:
            return fn(a, b)
        if a.dtype is torch.bool:
            return safe(a.int(), b.int()).bool()
        is_zero = b == 0
        return torch.where(is_zero, on_zero(a), fn(a, torch.where(is_zero, 1, b)))

    return safe


def _div(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a, b, rounding_mode=None if a.dtype.is_floating_point else "trunc")


def _pow(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.pow(a.int(), b.int()).bool() if a.dtype is torch.bool else torch.pow(a, b)


def _clamp(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return torch.minimum(torch.maximum(x, low), high)


def _threshold(x: torch.Tensor, limit: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.where(x <= limit, value, x)


def _lerp(start: torch.Tensor, end: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.lerp(*torch.broadcast_tensors(start, end, weight))


# ------------------------------------------------------------------ elementwise
def _fm(name: str, arity: int = 1) -> str:
    return f"fm_{name}(" + ", ".join(f"{{{i}}}" for i in range(arity)) + ")"


_TRANSCENDENTAL = """
    acos acosh asin asinh atan atanh cos cosh sin sinh tan tanh exp exp2 expm1 erf erfc erfinv
    lgamma log log10 log1p log2 reciprocal rsqrt sqrt sigmoid
"""


def _rows() -> dict[str, PointwiseRow]:
    rows: dict[str, PointwiseRow] = {}

    def add(
        kind: str, arity: int, rule: Rule, meaning: TorchFn, cuda: str, cuda_int: str | None = None
    ) -> None:
        rows[kind] = PointwiseRow(kind, arity, rule, meaning, cuda, cuda_int)

    for kind in _TRANSCENDENTAL.split():
        add(kind, 1, "float", getattr(torch, kind), _fm(kind))
    add("erfcinv", 1, "float", _erfcinv, _fm("erfcinv"))
    add("neg", 1, "default", _neg, "-{0}", _fm("neg"))
    add("abs", 1, "keep", torch.abs, _fm("abs"))
    for kind in ("ceil", "floor", "round", "trunc", "relu"):
        add(kind, 1, "keep", getattr(torch, kind), _fm(kind))
    add("frac", 1, "keep", _frac, _fm("frac"))
    add("silu", 1, "keep_float", torch.nn.functional.silu, _fm("silu"))
    for kind in ("isfinite", "isinf", "isnan", "isneginf", "isposinf"):
        add(kind, 1, "test", getattr(torch, kind), _fm(kind))
    # Complex dtypes do not exist yet, so every value is real.
    add("isreal", 1, "test", torch.isreal, "({0}, true)")
    add("signbit", 1, "test_promoted", torch.signbit, _fm("signbit"))
    add("logical_not", 1, "bool", torch.logical_not, "!{0}")
    add("bitwise_not", 1, "int", torch.bitwise_not, "~{0}")

    add("add", 2, "default", torch.add, "{0} + {1}", _fm("add", 2))
    add("sub", 2, "default", _sub, "{0} - {1}", _fm("sub", 2))
    add("mul", 2, "default", torch.mul, "{0} * {1}", _fm("mul", 2))
    minus_one = _integer_only(_div, lambda a: torch.full_like(a, -1))
    add("div", 2, "default", minus_one, "{0} / {1}", _fm("div", 2))
    add("atan2", 2, "float", torch.atan2, _fm("atan2", 2))
    fmod = _integer_only(torch.fmod, torch.clone)
    add("mod", 2, "default", fmod, _fm("fmod", 2), _fm("mod", 2))
    add("fmod", 2, "default", fmod, _fm("fmod", 2))
    add("remainder", 2, "default", _integer_only(torch.remainder, torch.clone), _fm("remainder", 2))
    add("pow", 2, "default", _pow, _fm("pow", 2))
    add("maximum", 2, "default", torch.maximum, _fm("maximum", 2))
    add("minimum", 2, "default", torch.minimum, _fm("minimum", 2))
    add("nextafter", 2, "float_only", torch.nextafter, _fm("nextafter", 2))
    compare = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
    for kind, sign in compare.items():
        add(kind, 2, "comparison", getattr(torch, kind), f"{{0}} {sign} {{1}}")
    add("logical_and", 2, "bool", torch.logical_and, "{0} && {1}")
    add("logical_or", 2, "bool", torch.logical_or, "{0} || {1}")
    add("bitwise_and", 2, "bits", torch.bitwise_and, "{0} & {1}")
    add("bitwise_or", 2, "bits", torch.bitwise_or, "{0} | {1}")
    add("bitwise_xor", 2, "bits", torch.bitwise_xor, "{0} ^ {1}")
    add("bitwise_left_shift", 2, "int", torch.bitwise_left_shift, _fm("lshift", 2))
    add("bitwise_right_shift", 2, "int", torch.bitwise_right_shift, _fm("rshift", 2))
    add("gcd", 2, "int", torch.gcd, _fm("gcd", 2))

    add("where", 3, "select", torch.where, "{0} ? {1} : {2}")
    add("lerp", 3, "default", _lerp, _fm("lerp", 3))
    add("clamp", 3, "keep", _clamp, _fm("clamp", 3))
    add("threshold", 3, "keep", _threshold, _fm("threshold", 3))
    return rows


POINTWISE: dict[str, PointwiseRow] = _rows()

# Public op name -> (node kind, dtype rule). Names built from several nodes are in `composite`.
PUBLIC: dict[str, tuple[str, Rule]] = {
    **{row.name: (kind, row.rule) for kind, row in POINTWISE.items()},
    "truediv": ("div", "float"),
}
# For an all-Bool call, bitwise ops are these logical ones.
LOGICAL_TWIN = {
    "bitwise_not": "logical_not",
    "bitwise_and": "logical_and",
    "bitwise_or": "logical_or",
    "bitwise_xor": "ne",
}


def operand_dtype(value: TensorView | Scalar) -> DataType:
    return value.dtype() if isinstance(value, TensorView) else value.dtype


def compute_dtype(op: TensorOp) -> DataType:
    """Return the dtype in which an elementwise op computes: its operands are converted to it.

    Half-like dtypes compute as Float. The condition of `where` is Bool and not counted.
    """
    assert isinstance(op, UnaryOp | BinaryOp | TernaryOp | CastOp), op
    values = list(op.inputs)
    if op.name == "where":
        dtype = op.out_tensor.dtype()
    else:
        tensors = [v for v in values if isinstance(v, TensorView)]
        dtype = operand_dtype((tensors or values)[0])
    return computed_in(dtype)


def computed_in(dtype: DataType) -> DataType:
    """Return the dtype in which values of a dtype are computed."""
    return DataType.Float if dtype in HALF_LIKE else dtype


# ------------------------------------------------------------------ reductions
@record
class ReductionRow:
    """Facts about one `ReductionOp.kind`.

    `torch(x, dims)` reduces; `identity(dtype)` is the initial value; `cuda` names the functor.
    """

    name: str
    torch: Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
    identity: Callable[[DataType], Number]
    cuda: str


def _extreme(dtype: DataType, *, largest: bool) -> Number:
    if dtype is DataType.Bool:
        return largest
    if is_floating(dtype):
        return math.inf if largest else -math.inf
    info = torch.iinfo(to_torch(dtype))
    return info.max if largest else info.min


def lowest(dtype: DataType) -> Number:
    """Return the value that no other is below: -inf, the integer minimum, or False."""
    return _extreme(dtype, largest=False)


def highest(dtype: DataType) -> Number:
    """Return the value that no other is above: inf, the integer maximum, or True."""
    return _extreme(dtype, largest=True)


def _sum(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    return torch.sum(x, tuple(dims), dtype=x.dtype)


def _prod(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    for d in sorted(dims, reverse=True):
        x = torch.prod(x, d, dtype=x.dtype)
    return x


REDUCTIONS: dict[str, ReductionRow] = {
    "add": ReductionRow("sum", _sum, lambda dtype: 0, "SumOp"),
    "mul": ReductionRow("prod", _prod, lambda dtype: 1, "ProdOp"),
    "max": ReductionRow("max", lambda x, dims: torch.amax(x, tuple(dims)), lowest, "MaxOp"),
    "min": ReductionRow("min", lambda x, dims: torch.amin(x, tuple(dims)), highest, "MinOp"),
}
