"""The dtypes in which elementwise ops and reductions compute, and the table of reductions.

The table of elementwise ops is `fuser.ir.pointwise_table`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch

from fuser.ir.dtypes import HALF_LIKE, DataType, is_complex, is_floating, to_torch
from fuser.ir.fusion import TensorOp, TensorView
from fuser.ir.ops.nodes import BinaryOp, CastOp, TernaryOp, UnaryOp
from fuser.ir.scalar.constructors import Number, Scalar
from fuser.support.record import record


def operand_dtype(value: TensorView | Scalar) -> DataType:
    """Returns the dtype of a tensor or a scalar."""
    return value.dtype() if isinstance(value, TensorView) else value.dtype


def compute_dtype(op: TensorOp) -> DataType:
    """Returns the dtype in which an elementwise op computes, and to which operands are converted.

    Half, BFloat16 and Float8 are computed in Float. The condition of `where` is Bool and is not
    converted.
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
    """Returns the dtype in which ops compute values of `dtype`: Float for Half, BFloat16 and
    Float8, else `dtype` itself.
    """
    return DataType.Float if dtype in HALF_LIKE else dtype


# ------------------------------------------------------------------ reductions
@record
class ReductionRow:
    """Facts about one kind of reduction (`ReductionOp.kind`).

    - `name`: the name of the op in `fd.ops`.
    - `torch`: reduces a torch tensor over the axes `dims`.
    - `identity`: returns the initial value in a dtype, such as 0 for a sum.
    - `cuda`: the name of the C++ function object in kernels.
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


def missing(dtype: DataType) -> Number:
    """Returns the value that stands for "no value": the result of a lookup at an index out of
    range, and the average of no elements.

    It is NaN, or 0 in a dtype without NaN.
    """
    if is_complex(dtype):
        return cast(Number, complex(math.nan, math.nan))
    return math.nan if is_floating(dtype) else 0


def lowest(dtype: DataType) -> Number:
    """Returns the smallest value of a dtype: -inf, the smallest integer, or False."""
    return _extreme(dtype, largest=False)


def highest(dtype: DataType) -> Number:
    """Returns the largest value of a dtype: inf, the largest integer, or True."""
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
