"""Op functions that create tensors: full, iota; and triu, which is built on them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fuser.ir.dtypes import DataType, DtypeLike, category, check_supported, dtype_text
from fuser.ir.ops.nodes import FullOp, IotaOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Const, Scalar, ScalarLike
from fuser.ir.tensor import TensorView
from fuser.ops.building import (
    SizeLike,
    add_op,
    as_extent,
    as_operand,
    axis_of_extent,
    broadcast_tensor,
    check_exact,
    fail,
    new_output,
)
from fuser.ops.elementwise import apply_pointwise, check_rank_at_least
from fuser.support.errors import DtypeError


def full(shape: Sequence[SizeLike], fill_value: ScalarLike, dtype: DtypeLike) -> TensorView:
    """Append a tensor filled with `fill_value`, cast to `dtype`; an integer out of the range of an
    integer dtype is refused."""
    sizes = [as_extent(s, "full", i, lowest=0) for i, s in enumerate(shape)]
    value, dtype = as_operand(fill_value, "full"), check_supported(dtype, "full")
    check_exact(value, dtype, "full")
    return full_tensor(sizes, value, dtype)


def full_tensor(sizes: Sequence[Scalar], value: Scalar, dtype: DataType) -> TensorView:
    """Append a FullOp over sizes that are scalars already."""
    out = new_output([axis_of_extent(s) for s in sizes], dtype, ())
    add_op(FullOp(out, tuple(sizes), sc.cast(value, dtype)))
    return out


def iota(
    length: SizeLike,
    start: ScalarLike | None = None,
    step: ScalarLike | None = None,
    dtype: DtypeLike = DataType.Int,
) -> TensorView:
    """Append start + i * step for i < length. Raises for a step that is 0 or not finite."""
    dtype = check_supported(dtype, "iota")
    if category(dtype) not in ("int", "float"):
        raise DtypeError(f"iota: an integer or floating dtype is needed, got {dtype_text(dtype)}")
    size = as_extent(length, "iota", lowest=0)
    first, stride = (_iota_scalar(v, default, dtype) for v, default in ((start, 0), (step, 1)))
    # Before the cast, of which nothing is computed yet.
    value = stride.value if isinstance(stride, Const) else 1
    if value == 0 or not math.isfinite(value):
        raise fail("iota", f"step must be finite and not 0, got {value}")
    out = new_output([axis_of_extent(size)], dtype, ())
    add_op(IotaOp(out, size, sc.cast(first, dtype), sc.cast(stride, dtype)))
    return out


def _iota_scalar(value: ScalarLike | None, default: int, dtype: DataType) -> Scalar:
    if value is None:
        return Const(default, dtype)
    scalar = as_operand(value, "iota")
    if category(scalar.dtype) != category(dtype):
        raise DtypeError(
            f"iota: {scalar} is {dtype_text(scalar.dtype)}, but the result is {dtype_text(dtype)}"
        )
    return scalar


def triu(arg: TensorView, diagonal: ScalarLike = 0) -> TensorView:
    """Append a copy with zeros where column - row < diagonal, over the last two axes."""
    tv = arg
    check_rank_at_least("triu", tv, 2)
    row = broadcast_tensor(iota(tv.size(-2)), (False, True))
    column = iota(tv.size(-1))
    distance = apply_pointwise("sub", (column, row))
    kept = apply_pointwise("ge", (distance, as_operand(diagonal, "triu")))
    out = apply_pointwise("where", (kept, tv, Const(0, tv.dtype())))
    assert isinstance(out, TensorView)
    return out
