"""Reduction op functions: sum, prod, max, min, welford, var, var_mean.

Inside the graph, the result keeps the reduced axes, as reduction axes, at their positions. Users do
not see them. Two kinds of axes are not reduced by a kernel:

- A broadcast axis is squeezed instead. If such an axis is expanded (one element, repeated), the
  result of sum is then multiplied by its size. The result of prod is raised to the power of its
  size.
- If an axis has the constant size 0, the result is filled with the neutral value of the reduction,
  such as 0 for a sum.
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
from fuser.support.errors import ArgumentError, DtypeError, counted, user_line


def sum(
    arg: TensorView,
    dim: int | Sequence[int] | DataType | None = None,
    keepdim: bool = False,
    dtype: DtypeLike = DataType.Null,
    *,
    dims: Sequence[int] | None = None,
) -> TensorView:
    """Sums the elements over one axis (`dim`), several axes (`dims`) or all axes.

    Integers and Bool are summed in Int (64 bits). If `dtype` is passed, `arg` is first cast to
    `dtype`. `keepdim` keeps the reduced axes with size 1. As in nvFuser, `sum(x, DataType.Float)`
    is also accepted.

    Raises:
        ArgumentError: `dim` and `dims` are both passed.
        DefinitionError: an axis does not exist, is repeated, or the list of axes is empty.

    Example: `fd.ops.sum(x, 1)` of x [t, k] is [t]; `fd.ops.sum(x, [0, 1], keepdim=True)` is [1, 1].
    """
    return _reduce("add", arg, dim, dims, keepdim, dtype)


def prod(
    arg: TensorView,
    dim: int | Sequence[int] | DataType | None = None,
    keepdim: bool = False,
    dtype: DtypeLike = DataType.Null,
    *,
    dims: Sequence[int] | None = None,
) -> TensorView:
    """Multiplies the elements over one axis (`dim`), several axes (`dims`) or all axes.

    Integers and Bool are multiplied in Int (64 bits). If `dtype` is passed, `arg` is first cast to
    `dtype`. `keepdim` keeps the reduced axes with size 1.

    Raises:
        ArgumentError: `dim` and `dims` are both passed.
        DefinitionError: an axis does not exist, is repeated, or the list of axes is empty.
    """
    return _reduce("mul", arg, dim, dims, keepdim, dtype)


def max(
    arg: TensorView,
    dim: int | Sequence[int] | DataType | None = None,
    keepdim: bool = False,
    dtype: DtypeLike = DataType.Null,
    *,
    dims: Sequence[int] | None = None,
) -> TensorView:
    """Returns the largest element over one axis (`dim`), several axes (`dims`) or all axes.

    - If one of the elements is NaN, the result is NaN.
    - The maximum of no elements is the lowest value of the dtype, as in nvFuser: -inf, the smallest
      integer, or False. `torch.amax` raises an error in this case.
    - `keepdim` keeps the reduced axes with size 1.

    Raises:
        ArgumentError: `dim` and `dims` are both passed.
        DefinitionError: a dtype is passed, an axis does not exist or is repeated, or the list of
            axes is empty.
        DtypeError: the operand is complex.
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
    """Returns the smallest element over one axis (`dim`), several axes (`dims`) or all axes.

    - If one of the elements is NaN, the result is NaN.
    - The minimum of no elements is the highest value of the dtype, as in nvFuser: inf, the largest
      integer, or True. `torch.amin` raises an error in this case.
    - `keepdim` keeps the reduced axes with size 1.

    Raises:
        ArgumentError: `dim` and `dims` are both passed.
        DefinitionError: a dtype is passed, an axis does not exist or is repeated, or the list of
            axes is empty.
        DtypeError: the operand is complex.
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
        # nvFuser's first form takes the dtype as the second argument: sum(x, DataType.Float).
        dim, dtype = None, dim
    dims = given_dims(name, dim, dims)
    if dtype is not DataType.Null:
        dtype = check_supported(dtype, name)
        if kind in ("max", "min"):
            raise fail(
                name, "A dtype other than Null is not currently supported. Cast the result instead"
            )
        tv = typing_cast(TensorView, convert(tv, dtype))
    elif kind in ("add", "mul") and not is_inexact(tv.dtype()):
        tv = typing_cast(TensorView, convert(tv, DataType.Int))
    if tv.dtype() in FLOAT8 and tv.ndim:
        # Partial results in Float8 would lose most or all of their digits.
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
    """Returns the axes that the caller of op `name` passed, either as `dim` or as `dims`.

    Raises `ArgumentError` if both are passed.
    """
    if dim is not None and dims is not None:
        raise ArgumentError(
            f"{name}(): incompatible function arguments: pass dim or dims, not both"
        )
    return dim if dims is None else dims


def axes_to_reduce(name: str, tv: TensorView, dims: int | Sequence[int] | None) -> set[int]:
    """Returns the positions of the axes of `tv` that `dims` selects; None selects all axes.

    For a tensor without axes, returns an empty set and accepts the axes 0 and -1, as torch does.
    Raises `DefinitionError` for an empty list, duplicates, and axes that do not exist.
    """
    if tv.ndim:
        return _reduced_axes(name, tv, dims)
    for d in [dims] if isinstance(dims, int) else dims or ():
        wrap_dim(d, 0, name, tv)
    return set()


def _reduced_axes(name: str, tv: TensorView, dims: int | Sequence[int] | None) -> set[int]:
    """Returns the positions of the axes of `tv` that `dims` selects; None selects all axes.

    Raises `DefinitionError` for an empty list, duplicates, and axes that do not exist.
    """
    if dims is None:
        return set(range(tv.ndim))
    given = [dims] if isinstance(dims, int) else list(dims)
    if not given or not tv.ndim:
        raise fail(
            name,
            f"No reduction axis specified for {tv}: dims is {given}, and the tensor has "
            f"{counted(tv.ndim, 'axis')}",
        )
    axes = [wrap_dim(d, tv.ndim, name, tv) for d in given]
    if len(set(axes)) != len(axes):
        raise fail(name, f"the reduction axes {given} of {tv} contain an axis twice")
    return set(axes)


def _reduce_axes(kind: str, tv: TensorView, axes: set[int], init: Scalar) -> TensorView:
    logical = axes_of(tv)
    if any(sc.int_value(logical[i].size) == 0 for i in axes):
        kept = [a.size for i, a in enumerate(logical) if i not in axes]
        return full_tensor(kept, init, tv.dtype())
    dtype = tv.dtype()
    tv, left, repeated = _squeeze_broadcasts(tv, axes)
    if repeated != sc.ONE and kind in ("add", "mul") and dtype in HALF_LIKE:
        # Computed in Float, so that the result is rounded once, after the repetitions.
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
    """Returns `out`, the result of a reduction, or `init` in runs in which there are no elements to
    reduce.

    `repeated` is the number of elements along broadcast axes, which have been removed before the
    reduction. The number may be 0 in some runs if the size of an expanded axis is symbolic.
    """
    if sc.is_less(0, repeated):
        return out
    chosen = apply_pointwise("where", (sc.eq(repeated, 0), init, out))
    return typing_cast(TensorView, convert(chosen, out.dtype()))


def _squeeze_broadcasts(tv: TensorView, axes: set[int]) -> tuple[TensorView, set[int], Scalar]:
    """Removes the broadcast axes among `axes` from `tv`, because a kernel does not have to reduce
    them.

    Returns (tensor without these axes, positions of the axes that still must be reduced, number of
    times that each element must be used in the reduction).
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
    """Computes (average, sum of squared deviations, count) over the axes `dims` in one pass.

    The deviations are the distances from the average. The sum of squared deviations, divided by the
    count, is the variance. The count is an Index tensor.

    Raises:
        DefinitionError: an axis does not exist, is repeated, or the list of axes is empty.
        DtypeError: the operand is not floating.
    """
    tv = arg
    if not is_floating(tv.dtype()):
        raise DtypeError(
            f"welford: the operand must have a floating dtype, but {tv} is {dtype_text(tv.dtype())}"
        )
    if tv.dtype() in FLOAT8:
        wide = typing_cast(TensorView, convert(tv, DataType.Float))
        average, deviation, count = welford(wide, dims)
        return cast_tensor(average, tv.dtype()), cast_tensor(deviation, tv.dtype()), count
    axes = _reduced_axes("welford", tv, dims)
    tv, left, repeated = _squeeze_broadcasts(tv, axes)
    if not left:
        # Every element equals the average. x - x is 0, or NaN where x is NaN or infinite.
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
    """Computes (variance, mean) over the axes `dims`.

    The sum of squared deviations is divided by max(count - correction, 0). The variance of a
    complex operand is the sum of the variances of the real and imaginary parts. `keepdim` keeps the
    reduced axes with size 1.

    Raises:
        DefinitionError: `correction` is negative, an axis does not exist or is repeated, or `dims`
            is empty.
        DtypeError: the operand is Half, BFloat16 or Float8 (cast it to Float first), or not
            floating.
    """
    tv = arg
    if is_complex(tv.dtype()):
        return _complex_var_mean(tv, dims, correction, keepdim)
    if tv.dtype() in HALF_LIKE:
        raise DtypeError(
            f"variance_mean is not supported for {dtype_text(tv.dtype())} please upcast to float: "
            f"cast {tv} with fd.ops.cast (at {user_line()})"
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
    """Computes (variance, mean) of a complex tensor from its real and imaginary parts.

    The parameters are those of `var_mean`. The variance is the mean squared distance from the mean
    in the complex plane: the sum of the variances of the parts.
    """
    parts = [typing_cast(TensorView, apply_pointwise(p, (tv,))) for p in ("real", "imag")]
    (real, x), (imag, y) = (var_mean(part, dims, correction, keepdim) for part in parts)
    variance, mean = apply_pointwise("add", (real, imag)), apply_pointwise("complex", (x, y))
    return typing_cast(TensorView, variance), typing_cast(TensorView, mean)


def var(
    arg: TensorView, dims: int | Sequence[int], correction: int = 1, keepdim: bool = False
) -> TensorView:
    """Computes the variance over the axes `dims`.

    The mean is computed first, then the deviations from the mean. The sum of squared deviations is
    divided by max(count - correction, 0). `keepdim` keeps the reduced axes with size 1.

    Raises:
        DefinitionError: `correction` is negative, an axis does not exist or is repeated, or `dims`
            is empty.
    """
    tv = arg
    axes, scale = _variance_scale("var", tv, dims, correction)
    order = sorted(axes)
    count = sc.product(tv.size(i) for i in order)
    # In the dtype in which the op computes: a sum of Half overflows above 65,504.
    is_half = tv.dtype() in (*HALF_LIKE, *FLOAT8)
    wide = typing_cast(TensorView, convert(tv, DataType.Float if is_half else tv.dtype()))
    mean = apply_pointwise("div", (sum(wide, dims=order, keepdim=True), count))
    delta = apply_pointwise("sub", (tv, mean))
    if not is_complex(tv.dtype()):
        total = _squared_deviations(typing_cast(TensorView, delta), order, keepdim, count)
    else:
        # The squared distance in the complex plane, which is real.
        parts = [apply_pointwise(part, (delta,)) for part in ("real", "imag")]
        sums = [
            _squared_deviations(typing_cast(TensorView, x), order, keepdim, count) for x in parts
        ]
        total = apply_pointwise("add", tuple(sums))
    return typing_cast(TensorView, apply_pointwise("mul", (total, scale)))


def _squared_deviations(
    delta: TensorView, order: Sequence[int], keepdim: bool, count: Scalar
) -> TensorView:
    """Computes the sum of squared deviations from the exact mean, over the axes `order`.

    `delta` has the deviations from the computed mean. This mean is rounded, so the result is
    corrected (`without_shift`). `count` is the number of elements.
    """
    square = typing_cast(TensorView, apply_pointwise("mul", (delta, delta)))
    total, rest = (sum(x, dims=order, keepdim=keepdim) for x in (square, delta))
    return without_shift(total, rest, count)


def without_shift(squares: TensorView, rest: TensorView, count: Scalar) -> TensorView:
    """Converts a sum of squared distances from a point near the mean to one from the exact mean.

    - `squares`: the sum of squared distances from the point.
    - `rest`: the sum of the distances from the point, which is 0 if the point is the exact mean.
    - `count`: the number of elements.

    The correction matters for large means: near 1e6, a mean in Float is rounded by up to 0.03,
    which can exceed the deviations.
    """
    share = apply_pointwise("mul", (rest, apply_pointwise("div", (rest, count))))
    zero = sc.const(0, squares.dtype())
    left = apply_pointwise("maximum", (apply_pointwise("sub", (squares, share)), zero))
    return typing_cast(TensorView, convert(left, squares.dtype()))


def _variance_scale(
    name: str, tv: TensorView, dims: int | Sequence[int], correction: int
) -> tuple[set[int], Scalar]:
    """Returns the positions of the axes `dims`, and the factor by which a sum of squared deviations
    over them becomes a variance: 1 / max(count - correction, 0).

    `count` is the number of elements along these axes. Raises `DefinitionError` if `correction` is
    negative.
    """
    if correction < 0:
        raise fail(name, f"correction must be at least 0, got {correction}")
    axes = _reduced_axes(name, tv, dims)
    count = sc.product(tv.size(i) for i in sorted(axes))
    dtype = DataType.Double if part_of(tv.dtype()) is DataType.Double else DataType.Float
    # In floating point, because integer simplification assumes that every extent is at least 1.
    free = sc.sub(sc.cast(count, dtype), Const(correction, dtype))
    return axes, sc.apply("reciprocal", sc.apply("max", free, Const(0, dtype)))


__all__ = ["max", "min", "prod", "sum", "var", "var_mean", "welford"]
