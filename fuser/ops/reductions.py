"""Reduction op functions: sum, prod, max, min, welford, var, var_mean.

The result's logical domain keeps the reduced axes, as reduction axes, at their positions. A
broadcast axis is squeezed instead (an expanded one counts its size for sum and prod), and a
reduction over an axis of constant size 0 is filled with the identity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast as typing_cast

from fuser.ir.domain.tensor_domain import IterDomain
from fuser.ir.dtypes import (
    FLOAT8,
    HALF_LIKE,
    DataType,
    DtypeLike,
    check_supported,
    dtype_text,
    is_complex,
    is_floating,
    is_inexact,
    part_of,
)
from fuser.ir.fusion import TensorView
from fuser.ir.fusion_guard import active_fusion
from fuser.ir.ops.nodes import ReductionOp, WelfordOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Const, Scalar
from fuser.ir.types import IterType
from fuser.ops.building import (
    add_op,
    axes_of,
    broadcast_tensor,
    cast_tensor,
    convert,
    fail,
    new_output,
    refuse_complex,
    wrap_dim,
)
from fuser.ops.elementwise import apply_pointwise, copy_tensor
from fuser.ops.factories import full_tensor
from fuser.ops.reduction_table import REDUCTIONS
from fuser.ops.reshaping import squeeze_axes
from fuser.support.errors import ArgumentError, DtypeError


def sum(
    arg: TensorView,
    dim: int | Sequence[int] | DataType | None = None,
    keepdim: bool = False,
    dtype: DtypeLike = DataType.Null,
    *,
    dims: Sequence[int] | None = None,
) -> TensorView:
    """Appends a sum over one axis (`dim`), several (`dims`) or all. Integers and Bool sum to
    Int."""
    return _reduce("add", arg, dim, dims, keepdim, dtype)


def prod(
    arg: TensorView,
    dim: int | Sequence[int] | DataType | None = None,
    keepdim: bool = False,
    dtype: DtypeLike = DataType.Null,
    *,
    dims: Sequence[int] | None = None,
) -> TensorView:
    """Appends a product over one axis (`dim`), several (`dims`) or all."""
    return _reduce("mul", arg, dim, dims, keepdim, dtype)


def max(
    arg: TensorView,
    dim: int | Sequence[int] | DataType | None = None,
    keepdim: bool = False,
    dtype: DtypeLike = DataType.Null,
    *,
    dims: Sequence[int] | None = None,
) -> TensorView:
    """Appends a maximum over one axis (`dim`), several (`dims`) or all. NaN wins.

    Over no elements it is what no value is below, as in nvFuser: -inf, the least integer, False
    (torch.amax raises there).
    """
    return _reduce("max", arg, dim, dims, keepdim, dtype)


def min(
    arg: TensorView,
    dim: int | Sequence[int] | DataType | None = None,
    keepdim: bool = False,
    dtype: DtypeLike = DataType.Null,
    *,
    dims: Sequence[int] | None = None,
) -> TensorView:
    """Appends a minimum over one axis (`dim`), several (`dims`) or all. NaN wins.

    Over no elements it is what no value is above, as in nvFuser: inf, the greatest integer, True
    (torch.amin raises there).
    """
    return _reduce("min", arg, dim, dims, keepdim, dtype)


def _reduce(
    kind: str,
    arg: TensorView,
    dim: int | Sequence[int] | DataType | None,
    dims: int | Sequence[int] | None,
    keepdim: bool,
    dtype: DtypeLike,
) -> TensorView:
    name = REDUCTIONS[kind].name
    tv = arg
    if kind in ("max", "min"):
        refuse_complex(name, tv)
    if isinstance(dim, DataType):
        # nvFuser's first form has the dtype in this place: sum(x, DataType.Float).
        dim, dtype = None, dim
    dims = given_dims(name, dim, dims)
    if dtype is not DataType.Null:
        dtype = check_supported(dtype, name)
        if kind in ("max", "min"):
            raise fail(name, "A dtype other than Null is not currently supported.")
        tv = typing_cast(TensorView, convert(tv, dtype))
    elif kind in ("add", "mul") and not is_inexact(tv.dtype()):
        tv = typing_cast(TensorView, convert(tv, DataType.Int))
    if tv.dtype() in FLOAT8 and tv.ndim:
        # A partial result would hold too few digits, or none.
        wide = typing_cast(TensorView, convert(tv, DataType.Float))
        return cast_tensor(_reduce(kind, wide, None, dims, keepdim, DataType.Null), tv.dtype())
    axes = axes_to_reduce(name, tv, dims)
    if tv.ndim == 0:
        return copy_tensor(tv)
    init = Const(REDUCTIONS[kind].identity(tv.dtype()), tv.dtype())
    active_fusion().next_scalar()
    out = _reduce_axes(kind, tv, axes, init)
    return broadcast_tensor(out, tuple(i in axes for i in range(tv.ndim))) if keepdim else out


def given_dims(
    name: str, dim: int | Sequence[int] | None, dims: int | Sequence[int] | None
) -> int | Sequence[int] | None:
    """Returns the axes by either name; raises `ArgumentError` for both."""
    if dim is not None and dims is not None:
        raise ArgumentError(
            f"{name}(): incompatible function arguments: dim and dims are both given"
        )
    return dim if dims is None else dims


def axes_to_reduce(name: str, tv: TensorView, dims: int | Sequence[int] | None) -> set[int]:
    """As `_reduced_axes`; of a tensor of rank 0, whose only axes are 0 and -1 as in torch, none."""
    if tv.ndim:
        return _reduced_axes(name, tv, dims)
    for d in [dims] if isinstance(dims, int) else dims or ():
        wrap_dim(d, 0, name, tv)
    return set()


def _reduced_axes(name: str, tv: TensorView, dims: int | Sequence[int] | None) -> set[int]:
    """Returns the axis positions; raises `DefinitionError` for none, duplicates or out of range."""
    if dims is None:
        return set(range(tv.ndim))
    given = [dims] if isinstance(dims, int) else list(dims)
    if not given or not tv.ndim:
        raise fail(name, f"No reduction axis specified for {tv}")
    axes = [wrap_dim(d, tv.ndim, name, tv) for d in given]
    if len(set(axes)) != len(axes):
        raise fail(name, f"duplicate reduction axes {given} of {tv}")
    return set(axes)


def _reduce_axes(kind: str, tv: TensorView, axes: set[int], init: Scalar) -> TensorView:
    logical = axes_of(tv)
    if any(sc.int_value(logical[i].size) == 0 for i in axes):
        kept = [a.size for i, a in enumerate(logical) if i not in axes]
        return full_tensor(kept, init, tv.dtype())
    dtype = tv.dtype()
    tv, left, repeated = _squeeze_broadcasts(tv, axes)
    if repeated != sc.ONE and kind in ("add", "mul") and dtype in HALF_LIKE:
        # Rounded once, after the repetitions.
        tv = typing_cast(TensorView, convert(tv, DataType.Float))
        init = sc.cast(init, DataType.Float)
    out = _reduction_node(kind, tv, left, init) if left else tv
    if kind == "add" and repeated != sc.ONE:
        out = apply_pointwise("mul", (out, repeated))
    elif kind == "mul" and repeated != sc.ONE:
        out = apply_pointwise("pow", (out, repeated))
    elif kind in ("max", "min"):
        out = _unless_empty(repeated, out, init)
    return typing_cast(TensorView, convert(out, dtype))


def _unless_empty(repeated: Scalar, out: TensorView, init: Scalar) -> TensorView:
    """Returns `init` where the broadcasts that were squeezed have no elements, else `out`."""
    if sc.is_less(0, repeated):
        return out
    chosen = apply_pointwise("where", (sc.eq(repeated, 0), init, out))
    return typing_cast(TensorView, convert(chosen, out.dtype()))


def _squeeze_broadcasts(tv: TensorView, axes: set[int]) -> tuple[TensorView, set[int], Scalar]:
    """Squeezes the broadcasts among `axes`.

    Returns the tensor, the positions still to be reduced, and how often each element counts.
    """
    logical = axes_of(tv)
    gone = {i for i in axes if logical[i].is_broadcast}
    if not gone:
        return tv, axes, sc.ONE
    repeated = sc.product(logical[i].size for i in sorted(gone))
    kept = [i for i in range(tv.ndim) if i not in gone]
    return squeeze_axes(tv, gone), {kept.index(i) for i in axes - gone}, repeated


def _output_axes(tv: TensorView, axes: set[int]) -> list[IterDomain]:
    fusion = active_fusion()
    return [
        fusion.clone_axis(a, kind=IterType.reduction) if i in axes else fusion.clone_axis(a)
        for i, a in enumerate(axes_of(tv))
    ]


def _reduction_node(kind: str, tv: TensorView, axes: set[int], init: Scalar) -> TensorView:
    out = new_output(_output_axes(tv, axes), tv.dtype(), [tv])
    add_op(ReductionOp(out, tv, init, kind=kind))
    return out


# ------------------------------------------------------------------ moments
def welford(
    arg: TensorView, dims: int | Sequence[int]
) -> tuple[TensorView, TensorView, TensorView]:
    """Appends a Welford reduction: average, sum of squared deviations, and count (Index)."""
    tv = arg
    if not is_floating(tv.dtype()):
        raise DtypeError(f"welford: a floating operand is needed, got {tv}")
    if tv.dtype() in FLOAT8:
        wide = typing_cast(TensorView, convert(tv, DataType.Float))
        average, deviation, count = welford(wide, dims)
        return cast_tensor(average, tv.dtype()), cast_tensor(deviation, tv.dtype()), count
    axes = _reduced_axes("welford", tv, dims)
    tv, left, repeated = _squeeze_broadcasts(tv, axes)
    if not left:
        # Every element equals the average; x - x keeps NaN and makes one of an infinity.
        deviation = typing_cast(TensorView, convert(apply_pointwise("sub", (tv, tv)), tv.dtype()))
        count = full_tensor(tv.shape(), repeated, DataType.Index)
        return _unless_empty(repeated, tv, sc.const(math.nan, tv.dtype())), deviation, count
    outs = [
        new_output(_output_axes(tv, left), dtype, [tv])
        for dtype in (tv.dtype(), tv.dtype(), DataType.Index)
    ]
    add_op(WelfordOp(outs[0], outs[1], outs[2], tv))
    if repeated != sc.ONE:
        for i in (1, 2):
            scaled = apply_pointwise("mul", (outs[i], repeated))
            outs[i] = typing_cast(TensorView, convert(scaled, outs[i].dtype()))
        outs[0] = _unless_empty(repeated, outs[0], sc.const(math.nan, outs[0].dtype()))
    return outs[0], outs[1], outs[2]


def var_mean(
    arg: TensorView, dims: int | Sequence[int], correction: int = 1, keepdim: bool = False
) -> tuple[TensorView, TensorView]:
    """Appends (variance, mean): squared deviations over max(count - correction, 0)."""
    tv = arg
    if is_complex(tv.dtype()):
        return _complex_var_mean(tv, dims, correction, keepdim)
    if tv.dtype() in HALF_LIKE:
        raise DtypeError(
            f"variance_mean is not supported for {dtype_text(tv.dtype())} please upcast to float"
        )
    axes, scale = _variance_scale("var_mean", tv, dims, correction)
    mean, deviation, _ = welford(tv, sorted(axes))
    variance = typing_cast(TensorView, apply_pointwise("mul", (deviation, scale)))
    if not keepdim:
        return variance, mean
    flags = tuple(i in axes for i in range(tv.ndim))
    return broadcast_tensor(variance, flags), broadcast_tensor(mean, flags)


def _complex_var_mean(
    tv: TensorView, dims: int | Sequence[int], correction: int, keepdim: bool
) -> tuple[TensorView, TensorView]:
    """Appends both of the parts: the variance is their sum, as of distances in the plane."""
    parts = [typing_cast(TensorView, apply_pointwise(p, (tv,))) for p in ("real", "imag")]
    (real, x), (imag, y) = (var_mean(part, dims, correction, keepdim) for part in parts)
    variance, mean = apply_pointwise("add", (real, imag)), apply_pointwise("complex", (x, y))
    return typing_cast(TensorView, variance), typing_cast(TensorView, mean)


def var(
    arg: TensorView, dims: int | Sequence[int], correction: int = 1, keepdim: bool = False
) -> TensorView:
    """Appends the variance in two steps: mean, then the squared deviations from it."""
    tv = arg
    axes, scale = _variance_scale("var", tv, dims, correction)
    order = sorted(axes)
    count = sc.product(tv.size(i) for i in order)
    # In the dtype that computes: a sum of halves ends at 65,504.
    is_half = tv.dtype() in (*HALF_LIKE, *FLOAT8)
    wide = typing_cast(TensorView, convert(tv, DataType.Float if is_half else tv.dtype()))
    mean = apply_pointwise("div", (sum(wide, dims=order, keepdim=True), count))
    delta = apply_pointwise("sub", (tv, mean))
    if not is_complex(tv.dtype()):
        total = _squared_deviations(typing_cast(TensorView, delta), order, keepdim, count)
    else:
        # The square of a distance in the plane, which is real.
        parts = [apply_pointwise(part, (delta,)) for part in ("real", "imag")]
        sums = [
            _squared_deviations(typing_cast(TensorView, x), order, keepdim, count) for x in parts
        ]
        total = apply_pointwise("add", tuple(sums))
    return typing_cast(TensorView, apply_pointwise("mul", (total, scale)))


def _squared_deviations(
    delta: TensorView, order: Sequence[int], keepdim: bool, count: Scalar
) -> TensorView:
    """Appends the sum of the squared distances from a mean, given those from the rounded mean."""
    square = typing_cast(TensorView, apply_pointwise("mul", (delta, delta)))
    total, rest = (sum(x, dims=order, keepdim=keepdim) for x in (square, delta))
    return without_shift(total, rest, count)


def without_shift(squares: TensorView, rest: TensorView, count: Scalar) -> TensorView:
    """Appends what is left of a sum of squared distances from a point near the mean when these are
    taken from the mean itself: `rest` is the sum of the distances, 0 for the exact mean.

    A large mean is rounded by more than the deviations can spare: by 0.03 at 1e6 in Float.
    """
    share = apply_pointwise("mul", (rest, apply_pointwise("div", (rest, count))))
    zero = sc.const(0, squares.dtype())
    left = apply_pointwise("maximum", (apply_pointwise("sub", (squares, share)), zero))
    return typing_cast(TensorView, convert(left, squares.dtype()))


def _variance_scale(
    name: str, tv: TensorView, dims: int | Sequence[int], correction: int
) -> tuple[set[int], Scalar]:
    """Returns the reduced axes and 1 / max(count - correction, 0)."""
    if correction < 0:
        raise fail(name, f"correction must be at least 0, got {correction}")
    axes = _reduced_axes(name, tv, dims)
    count = sc.product(tv.size(i) for i in sorted(axes))
    dtype = DataType.Double if part_of(tv.dtype()) is DataType.Double else DataType.Float
    # In floating point, because integer simplification takes every extent to be at least 1.
    free = sc.sub(sc.cast(count, dtype), Const(correction, dtype))
    return axes, sc.apply("reciprocal", sc.apply("max", free, Const(0, dtype)))


__all__ = ["max", "min", "prod", "sum", "var", "var_mean", "welford"]
