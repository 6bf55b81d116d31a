"""Op functions that read or write elements at indexed positions of a tensor.

Indices are Int or Int32 and count from 0; a negative index does not count from the end. For an
index out of range, torch raises an error. A kernel cannot raise an error: the kernel reads nothing,
and the value is NaN, or 0 if the dtype has no NaN. The checked mode of CPU kernels raises an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast as typing_cast

from fuser.ir.domain.tensor_domain import IterDomain
from fuser.ir.dtypes import DataType, category, dtype_text, is_floating
from fuser.ir.fusion import TensorView
from fuser.ir.fusion_guard import active_fusion
from fuser.ir.ops.lookup import (
    INDEX_DTYPES,
    EmbeddingFwdOp,
    GatherOp,
    IndexPutAccumulateOp,
    IndexSelectOp,
    ScatterOp,
    SelectOp,
    TakeAlongAxisOp,
)
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Const, Scalar, ScalarLike
from fuser.ops import elementwise, reductions
from fuser.ops.building import (
    OperandLike,
    SizeLike,
    add_op,
    as_operand,
    axes_of,
    broadcast_tensor,
    cast_tensor,
    convert,
    fail,
    join_axes,
    new_output,
    number_in,
    same_extent,
    unexpanded,
    wrap_dim,
)
from fuser.support.errors import DtypeError, counted, user_line


def _check_index(name: str, index: TensorView) -> None:
    if index.dtype() not in INDEX_DTYPES:
        raise DtypeError(
            f"{name}: Expected an index of dtype Int or Int32, but {index} is "
            f"{dtype_text(index.dtype())} (at {user_line()})"
        )


def _looked_up_axis(name: str, table: TensorView, dim: int) -> int:
    if not table.ndim:
        raise fail(name, f"the operand needs at least 1 axis, but {table} has no axis")
    return wrap_dim(dim, table.ndim, name, table)


def _clone(axes: Sequence[IterDomain]) -> list[IterDomain]:
    return [active_fusion().clone_axis(a) for a in axes]


def index_select(arg: TensorView, index: TensorView, dim: int) -> TensorView:
    """Selects the positions `index` [n] along axis `dim`: [.., m, ..] -> [.., n, ..].

    An index without axes counts as an index [1]. A position outside of the axis gives NaN, or 0 in
    a dtype without NaN.

    Raises:
        DefinitionError: the index has more than one axis, or there is no axis `dim`.
        DtypeError: the index is neither Int nor Int32.
    """
    name = "index_select"
    _check_index(name, index)
    axis = _looked_up_axis(name, arg, dim)
    if index.ndim > 1:
        raise fail(
            name,
            f"the index must have 1 axis or none, but {index} has {counted(index.ndim, 'axis')}",
        )
    if not index.ndim:
        index = broadcast_tensor(index, (True,))
    sources = axes_of(arg)
    axes = [*sources[:axis], *axes_of(index), *sources[axis + 1 :]]
    out = new_output(_clone(axes), arg.dtype(), [arg, index])
    add_op(IndexSelectOp(out, arg, index, dim=axis))
    return out


def select(arg: TensorView, index: SizeLike, dim: int) -> TensorView:
    """Selects position `index` along axis `dim`, and removes this axis.

    A negative index counts from the end.

    Raises:
        DefinitionError: there is no axis `dim`, or a constant index is outside of a constant size.
        DtypeError: the index is not an integer.
    """
    name = "select"
    index = as_operand(index, name)
    axis = _looked_up_axis(name, arg, dim)
    if category(index.dtype) != "int":
        raise DtypeError(
            f"{name}: the index must be an integer, but {index} is {dtype_text(index.dtype)} "
            f"(at {user_line()})"
        )
    axes = [a for k, a in enumerate(axes_of(arg)) if k != axis]
    out = new_output(_clone(axes), arg.dtype(), [arg])
    op = SelectOp(out, arg, index, dim=axis)
    if problem := op.misfit(sc.int_value(axes_of(arg)[axis].size)):
        raise fail(name, problem)
    add_op(op)
    return out


def embedding_fwd(
    input: TensorView,
    weight: TensorView,
    padding_idx: ScalarLike | None = None,
    max_norm: ScalarLike | None = None,
    norm_type: ScalarLike | None = None,
    scale_grad_by_freq: ScalarLike | None = None,
    sparse: ScalarLike | None = None,
) -> TensorView:
    """Looks up rows of `weight` [v, h] by the indices `input` [*i] -> [*i, h].

    - With `max_norm`, a row with a larger norm is scaled down to this norm. `norm_type` is the
      order of the norm; the default is 2. Order 0 counts the elements that are not 0.
    - `weight` is not changed, whereas torch writes the scaled rows back into `weight`.
    - `padding_idx`, `scale_grad_by_freq` and `sparse` are ignored, because these arguments affect
      gradients only.

    Raises:
        DefinitionError: the weight does not have two axes.
        DtypeError: the index is neither Int nor Int32, or `max_norm` is passed for a weight that is
            not floating.
    """
    name = "embedding_fwd"
    del padding_idx, scale_grad_by_freq, sparse
    _check_index(name, input)
    if max_norm is not None and not is_floating(weight.dtype()):
        raise DtypeError(
            f"{name}: Expected a weight of a floating dtype for max_norm, but {weight} is "
            f"{dtype_text(weight.dtype())} (at {user_line()})"
        )
    if weight.ndim != 2:
        raise fail(name, f"weight must have 2 axes, but {weight} has {weight.ndim}")
    axes = [*axes_of(input), axes_of(weight)[1]]
    out = new_output(_clone(axes), weight.dtype(), [input, weight])
    add_op(EmbeddingFwdOp(out, input, weight))
    if max_norm is None:
        return out
    order = as_operand(2.0 if norm_type is None else norm_type, name)
    return _bounded(out, as_operand(max_norm, name), order)


# torch adds this number to the norm before it divides by it.
_ABOVE_NO_NORM = 1e-7


def _bounded(rows: TensorView, max_norm: Scalar, norm_type: Scalar) -> TensorView:
    """Returns `rows` with each row of a norm above `max_norm` scaled down to this norm.

    `norm_type` is the order of the norm.
    """
    dtype = DataType.Double if rows.dtype() is DataType.Double else DataType.Float
    wide = typing_cast(TensorView, convert(rows, dtype))
    norm = _norm(wide, norm_type)
    factor = _call("div", max_norm, _call("add", norm, _ABOVE_NO_NORM))
    scale = _call("where", _call("gt", norm, max_norm), factor, 1.0)
    return typing_cast(TensorView, convert(_call("mul", wide, scale), rows.dtype()))


def _norm(rows: TensorView, order: Scalar) -> TensorView:
    """Computes the norms, of the given order, along the last axis: [*i, h] -> [*i, 1]."""
    along = rows.ndim - 1
    known = float(order.value.real) if isinstance(order, Const) else None
    if known == 2.0:
        return _call("sqrt", reductions.sum(_call("mul", rows, rows), along, True))
    sizes = _call("abs", rows)
    if known == math.inf:
        return reductions.max(sizes, along, True)
    if known == -math.inf:
        return reductions.min(sizes, along, True)
    if known == 0.0:
        return reductions.sum(_others_than_zero(rows), along, True)
    if known == 1.0:
        return reductions.sum(sizes, along, True)
    if known is not None:
        total = reductions.sum(_call("pow", sizes, order), along, True)
        return _call("pow", total, _call("reciprocal", order))
    return _norm_of_each_call(rows, sizes, order)


def _others_than_zero(rows: TensorView) -> TensorView:
    """Returns, in the dtype of `rows`, 1 where an element is not 0, else 0."""
    return typing_cast(TensorView, convert(_call("ne", rows, 0.0), rows.dtype()))


def _norm_of_each_call(rows: TensorView, sizes: TensorView, order: Scalar) -> TensorView:
    """Computes the norms along the last axis if the order of the norm is known only in a run.

    Such an order is a scalar of the program. It may be 0 or infinite. `sizes` are the absolute
    values of `rows`.
    """
    along = rows.ndim - 1
    is_count = elementwise.apply_pointwise("eq", (order, 0))
    powers = _call("where", is_count, _others_than_zero(rows), _call("pow", sizes, order))
    total = reductions.sum(powers, along, True)
    found = _call("where", is_count, total, _call("pow", total, _call("reciprocal", order)))
    for end, reduce in ((math.inf, reductions.max), (-math.inf, reductions.min)):
        is_end = elementwise.apply_pointwise("eq", (order, end))
        found = _call("where", is_end, reduce(sizes, along, True), found)
    return found


def _call(name: str, *operands: OperandLike) -> TensorView:
    return typing_cast(TensorView, elementwise.apply_pointwise(name, operands))


def _check_ranks(name: str, table: TensorView, index: TensorView) -> None:
    if table.ndim != index.ndim:
        raise fail(
            name,
            f"{table} and index {index} must have the same number of axes, but have {table.ndim} "
            f"and {index.ndim}",
        )


def take_along_axis(arg: TensorView, index: TensorView, dim: int) -> TensorView:
    """Selects elements along axis `dim`: out[.., i, ..] = arg[.., index[.., i, ..], ..].

    - Along all other axes, both operands have the same size, or one operand has a broadcast axis.
    - An index of a floating dtype is truncated, as in nvFuser. Labels from `where(valid, labels,
      0.0)` are such an index.

    Raises:
        DefinitionError: the ranks differ, sizes differ, or there is no axis `dim`.
        DtypeError: the index is Bool or complex.
    """
    name = "take_along_axis"
    if category(index.dtype()) == "float":
        index = cast_tensor(index, DataType.Int)
    _check_index(name, index)
    _check_ranks(name, arg, index)
    axis = _looked_up_axis(name, arg, dim)
    fusion = active_fusion()
    axes: list[IterDomain] = []
    for k, (mine, theirs) in enumerate(zip(axes_of(arg), axes_of(index), strict=True)):
        pairs = [(index, theirs)] if k == axis else [(arg, mine), (index, theirs)]
        joined = join_axes(fusion, pairs, name)
        axes.append(fusion.new_axis(joined.extent, joined.kind, expanded=joined.expanded))
    out = new_output(axes, arg.dtype(), [arg, index])
    add_op(TakeAlongAxisOp(out, arg, index, dim=axis))
    return out


def gather(arg: TensorView, index: TensorView, dim: int) -> TensorView:
    """Selects elements of `arg` along axis `dim`, as `torch.gather` does.

    The result has the shape of `index`. Along axes other than `dim`, `index` may be shorter than
    `arg`. On a device mesh, prefer take_along_axis: gather can be sharded only along axis `dim` of
    `index`, and along axes on which `arg` and `index` are known to have equal sizes.

    Raises:
        DefinitionError: the ranks differ, the index is longer than `arg` along another axis than
            `dim`, or there is no axis `dim`.
        DtypeError: the index is neither Int nor Int32.
    """
    name = "gather"
    _check_index(name, index)
    _check_ranks(name, arg, index)
    axis = _looked_up_axis(name, arg, dim)
    fusion = active_fusion()
    axes: list[IterDomain] = []
    for k, (mine, theirs) in enumerate(zip(axes_of(arg), axes_of(index), strict=True)):
        pairs = [(index, theirs)]
        if k != axis and fusion.canonical(mine.size) == fusion.canonical(theirs.size):
            pairs = [(arg, mine), (index, theirs)]
        elif k != axis:
            _check_narrower(name, arg, index, k, axis)
            pairs = [(index, unexpanded(theirs))]
        joined = join_axes(fusion, pairs, name)
        axes.append(fusion.new_axis(joined.extent, joined.kind, expanded=joined.expanded))
    out = new_output(axes, arg.dtype(), [arg, index])
    add_op(GatherOp(out, arg, index, dim=axis))
    return out


def _check_narrower(name: str, arg: TensorView, index: TensorView, k: int, axis: int) -> None:
    have, want = (sc.int_value(axes_of(tv)[k].size) for tv in (arg, index))
    if have is not None and want is not None and want > have:
        raise fail(
            name,
            f"Size does not match at dimension {k}: expected index {index} to be no larger than "
            f"{arg} apart from dimension {axis}, but the index has size {want} there, and the "
            f"other tensor has size {have}",
        )


def scatter(arg: TensorView, index: TensorView, src: OperandLike, dim: int) -> TensorView:
    """Returns a copy of `arg` with `src` written at the positions `index` along axis `dim`.

    The meaning is that of `torch.scatter`.

    - `src` is a tensor or a number. All tensors have equally many axes.
    - `index` must not be longer than `src` along any axis. `index` must not be longer than `arg`
      along axes other than `dim`.
    - If several elements are written to one position, the result has any one of these elements.
    - An element for a position outside of `arg` is ignored.
    - Torch runs this op; it is not part of a kernel.

    Raises:
        DefinitionError: the numbers of axes or the sizes of the operands contradict each other.
        DtypeError: the index is neither Int nor Int32, or `src` has another dtype than `arg`.
    """
    name = "scatter"
    _check_index(name, index)
    _check_ranks(name, arg, index)
    axis = _looked_up_axis(name, arg, dim)
    if not isinstance(src, TensorView | Scalar):
        src = number_in(src, arg.dtype(), name)
    if isinstance(src, TensorView):
        _check_ranks(name, src, index)
        if src.dtype() is not arg.dtype():
            raise DtypeError(
                f"{name}: arg and src must have the same dtype, but {arg} is "
                f"{dtype_text(arg.dtype())} and {src} is {dtype_text(src.dtype())} "
                f"(at {user_line()})"
            )
    elif category(src.dtype) != category(arg.dtype()):
        raise DtypeError(
            f"{name}: src must be a number of the same category (Bool, integer, floating or "
            f"complex) as {arg}, but {src} is {dtype_text(src.dtype)} (at {user_line()})"
        )
    axes = [active_fusion().new_axis(b.extent, b.kind) for b in map(unexpanded, axes_of(arg))]
    out = new_output(axes, arg.dtype(), [arg, index, src])
    op = add_op(ScatterOp(out, arg, index, src, dim=axis))
    for k, tv in op.limits():
        _check_narrower(name, tv, index, k, axis)
    return out


def index_put_accumulate(acc: TensorView, index: TensorView, value: TensorView) -> TensorView:
    """Returns `acc` [m, ..] plus the rows `value` [n, ..], added to the rows `index` [n] of `acc`.

    The meaning is that of `torch.index_put` with `accumulate=True`.

    - An axis of size 1 in `value` is broadcast.
    - A row for a position outside of `acc` is ignored.
    - Torch runs this op; it is not part of a kernel. Rows are added one after the other, so that
      sums are reproducible. Half, BFloat16 and Float8 are added in Float.

    Raises:
        DefinitionError: the numbers of axes or the sizes of the operands contradict each other.
        DtypeError: the index is neither Int nor Int32, the dtypes of `acc` and `value` differ, or
            are Bool.
    """
    name = "index_put_accumulate"
    _check_index(name, index)
    _looked_up_axis(name, acc, 0)
    if index.ndim != 1:
        raise fail(
            name, f"the index must have 1 axis, but {index} has {counted(index.ndim, 'axis')}"
        )
    _check_ranks(name, value, acc)
    if value.dtype() is not acc.dtype() or category(acc.dtype()) == "bool":
        raise DtypeError(
            f"{name}: acc and value must have the same dtype, which is not Bool, but {acc} is "
            f"{dtype_text(acc.dtype())} and {value} is {dtype_text(value.dtype())} "
            f"(at {user_line()})"
        )
    fusion = active_fusion()
    pairs = zip((*axes_of(index), *axes_of(acc)[1:]), axes_of(value), strict=True)
    for mine, theirs in pairs:
        if not theirs.is_broadcast or theirs.expanded is not None:
            same_extent(fusion, mine.size, theirs.size, f"{name}: {acc}, {index} and {value}")
    axes = [fusion.new_axis(a.extent, a.kind) for a in map(unexpanded, axes_of(acc))]
    out = new_output(axes, acc.dtype(), [acc, index, value])
    add_op(IndexPutAccumulateOp(out, acc, index, value))
    return out
