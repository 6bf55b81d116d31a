"""Op functions that only rearrange axes, and those that name sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fuser.ir.domain.tensor_domain import IterDomain, TensorDomain
from fuser.ir.fusion_guard import active_fusion
from fuser.ir.ops.nodes import ExpandOp, LoadStoreOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Apply, Const, Scalar
from fuser.ir.tensor import TensorView
from fuser.ir.types import IterType
from fuser.ops.building import (
    SizeLike,
    add_op,
    as_extent,
    axes_of,
    broadcast_tensor,
    clone_axes,
    declare_extent,
    fail,
    new_output,
    prepend_axes,
    squeeze_axes,
    wrap_dim,
)
from fuser.ops.elementwise import copy_tensor


def broadcast(arg: TensorView, is_broadcast_dim: Sequence[bool]) -> TensorView:
    """Insert broadcast axes: one flag per output axis. Without a True, `arg` itself is returned."""
    tv = arg
    flags = tuple(bool(f) for f in is_broadcast_dim)
    if flags.count(False) != tv.ndim:
        raise fail(
            "broadcast",
            f"{flags.count(False)} of {len(flags)} flags are False, but {tv} has {tv.ndim} axes",
        )
    return broadcast_tensor(tv, flags) if any(flags) else tv


def broadcast_in_dim(
    arg: TensorView, shape: Sequence[SizeLike], broadcast_dims: Sequence[int]
) -> TensorView:
    """Place input axis i at output position broadcast_dims[i], then expand to `shape`."""
    name = "broadcast_in_dim"
    tv = arg
    if not len(shape) >= len(broadcast_dims) == tv.ndim:
        raise fail(
            name,
            f"{tv} has {tv.ndim} axes, but there are {len(broadcast_dims)} broadcast_dims and "
            f"{len(shape)} sizes",
        )
    flags = [True] * len(shape)
    for dim in broadcast_dims:
        position = wrap_dim(dim, len(shape), name, tv)
        if not flags[position]:
            raise fail(name, f"output position {dim} is specified more than once.")
        flags[position] = False
    placed = broadcast_tensor(tv, tuple(flags)) if any(flags) else tv
    return expand(placed, shape)


def expand(arg: TensorView, shape: Sequence[SizeLike]) -> TensorView:
    """Expand broadcast axes to `shape`; -1 keeps an axis, a longer shape prepends new ones.

    A broadcast becomes an expanded one; a concrete axis keeps its size, which must equal the given
    one (checked when inputs are bound if either is symbolic). Without expansion it is a `set`.
    """
    name = "expand"
    tv = arg
    sizes = [as_extent(s, name, i, lowest=-1) for i, s in enumerate(shape)]
    if len(sizes) < tv.ndim:
        raise fail(name, f"{len(sizes)} sizes for the {tv.ndim} axes of {tv}")
    if len(sizes) > tv.ndim:
        tv = prepend_axes(tv, len(sizes) - tv.ndim)
    fusion = active_fusion()
    planned = [_expanded(tv, a, s) for a, s in zip(axes_of(tv), sizes, strict=True)]
    if all(new is old for new, old in zip(planned, axes_of(tv), strict=True)):
        return copy_tensor(tv)
    out = new_output([fusion.clone_axis(a) for a in planned], tv.dtype(), [tv])
    targets = tuple(a.size for a in axes_of(out))
    add_op(ExpandOp(out, tv, targets))
    return out


def _expanded(tv: TensorView, axis: IterDomain, size: Scalar) -> IterDomain:
    """Return the state of an axis after expansion to `size`; `axis` itself when nothing changes."""
    fusion = active_fusion()
    value = sc.int_value(size)
    if value == -1 or size == axis.size:
        return axis
    if axis.kind is IterType.symbolic:
        return replace(axis, extent=size)
    if axis.is_broadcast and axis.expanded is None:
        return replace(axis, expanded=size)
    if _is_quotient(axis.size) and sc.int_value(fusion.canonical(axis.size)) in (None, 1):
        same = fusion.canonical(axis.size) is fusion.canonical(size)
        # What a reshape infers may be 1: a broadcast, of which the sizes of the inputs decide.
        return axis if same else replace(axis, kind=IterType.symbolic, extent=size)
    if value is not None and isinstance(fusion.canonical(axis.size), Const):
        if sc.int_value(fusion.canonical(axis.size)) != value:
            raise fail("expand", f"Invalid expand size, {value}, for {axis} of {tv}")
        return axis
    declare_extent(fusion, axis.size, size, f"expand: {tv}")
    return axis


def _is_quotient(size: Scalar) -> bool:
    """Whether a size is what a reshape makes of -1."""
    return isinstance(size, Apply) and size.op in ("/", "floorDiv")


def squeeze(arg: TensorView, dims: Sequence[int], squeeze_expanded: bool = False) -> TensorView:
    """Drop broadcast axes; expanded ones only with `squeeze_expanded`."""
    tv = arg
    axes = axes_of(tv)
    if not axes and list(dims):
        raise fail("squeeze", f"axes {list(dims)} of {tv}, which has none")
    gone = {wrap_dim(d, tv.ndim, "squeeze", tv) for d in dims}
    if not gone:
        return copy_tensor(tv)
    for d in sorted(gone):
        if axes[d].kind not in (IterType.broadcast, IterType.symbolic):
            raise fail(
                "squeeze", f"Can not squeeze non-broadcasting dimension(s). Axis {axes[d]} of {tv}"
            )
        if axes[d].expanded is not None and not squeeze_expanded:
            raise fail("squeeze", f"Refusing to squeeze expanded IterDomain {axes[d]} of {tv}")
    return squeeze_axes(tv, gone)


def permute(arg: TensorView, dims: Sequence[int]) -> TensorView:
    """Output axis i is input axis dims[i]; the output's root domain has the input's order."""
    tv = arg
    if tv.ndim == 0 or not dims:
        return copy_tensor(tv)
    order = [wrap_dim(d, tv.ndim, "permute", tv) for d in dims]
    if sorted(order) != list(range(tv.ndim)):
        raise fail("permute", f"dims {list(dims)} are not a permutation of {tv.ndim} axes of {tv}")
    root = tuple(clone_axes(tv))
    logical = tuple(root[d] for d in order)
    domain = TensorDomain.of(logical, root=root)
    out = new_output(domain, tv.dtype(), [tv])
    add_op(LoadStoreOp(out, tv))
    return out


def stride_order(arg: TensorView, stride_order: Sequence[int]) -> TensorView:
    """Copy into the memory order that `stride_order` gives: entry i is the rank by stride of axis
    i, 0 for the fastest. Contiguous."""
    tv = arg
    out = copy_tensor(tv)
    if not stride_order:
        return out
    out.set_allocation_domain(ordered_axes(axes_of(out), stride_order, "stride_order"), True)
    return out


def ordered_axes(
    axes: Sequence[IterDomain], stride_order: Sequence[int], op_name: str
) -> list[IterDomain]:
    """Return logical axes in allocation order, outermost first.

    Raises `DefinitionError` for a wrong length, entries out of range and duplicates.
    """
    rank = len(axes)
    if len(stride_order) != rank:
        raise fail(
            op_name,
            f"Length of stride_order argument ({len(stride_order)}) must be zero or match that of "
            f"shape argument ({rank})",
        )
    text = "defineTensor stride_order argument is out of range, expects entries in"
    for entry in stride_order:
        if not 0 <= entry < rank:
            raise fail(op_name, f"{text} [0, {rank}), got {entry}")
    if len(set(stride_order)) != rank:
        found = list(stride_order)
        raise fail(op_name, f"defineTensor got duplicated stride_order entries: {found}")
    placed = {rank - 1 - entry: axis for axis, entry in zip(axes, stride_order, strict=True)}
    return [placed[i] for i in range(rank)]


def size(arg: TensorView, dim: int) -> Scalar:
    """Return the (expanded) extent of an axis."""
    return arg.size(dim)


def shape(arg: TensorView, /) -> list[Scalar]:
    """Return the (expanded) extents of all axes."""
    return arg.shape()
