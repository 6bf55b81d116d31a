"""Op functions that change the sizes of axes: slice, pad, cat. The axes of a result are recorded as
enlarged or shortened axes of the operand (`Resize`).

Whether a resized axis of size 1 is a broadcast depends on its size:

- A constant size of 1 is a broadcast.
- If the size is symbolic and may become 1, the axis is `?` (undecided) until
  `fuser.passes.concretize` knows the size: `x[2:3]`, `x[:n]`, `x[1:]`.
- An axis whose size can be 1 only because an input has size 1, or only because the end is clamped,
  is an iteration axis: `x[:5]`. Symbolic axes of inputs are iteration axes as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fuser.ir.domain.tensor_domain import DomainBuilder, IterDomain, TensorDomain
from fuser.ir.dtypes import category, dtype_text
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import active_fusion
from fuser.ir.ops.nodes import CatOp, PadOp, SliceOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Apply, Const, Scalar, ScalarLike
from fuser.ir.types import IterType
from fuser.ops.building import (
    SizeLike,
    add_op,
    as_extent,
    as_integer,
    as_operand,
    axes_of,
    check_exact,
    clone_axes,
    fail,
    join_axes,
    new_output,
    unsupported,
    wrap_dim,
)
from fuser.ops.elementwise import copy_tensor
from fuser.ops.factories import full_tensor
from fuser.support.errors import ArgumentError, DtypeError, counted, user_line


def resized_domain(
    fusion: Fusion, root: Sequence[IterDomain], widths: Sequence[tuple[Scalar, Scalar]]
) -> TensorDomain:
    """Returns the axes of a slice's or pad's result: the axes `root`, enlarged or shortened by
    `widths`.

    `widths` has (elements added on the left, elements added on the right) per axis. A negative
    width removes elements.
    """
    built = DomainBuilder(fusion, root)
    logical: list[IterDomain] = []
    for axis, (left, right) in zip(root, widths, strict=True):
        if sc.int_value(left) == 0 and sc.int_value(right) == 0:
            logical.append(axis)
            continue
        out = built.resize(axis, left, right)
        if out.kind is IterType.iteration and _may_be_one(fusion, axis.size, left, right):
            out = built.restate(out, replace(out, kind=IterType.symbolic))
        logical.append(out)
    return TensorDomain.of(
        logical, root=root, transforms=built.transforms, between=built.axes.values()
    )


def _may_be_one(fusion: Fusion, size: Scalar, left: Scalar, right: Scalar) -> bool:
    """Returns whether a slice or pad may leave one element of an axis, so that the axis of the
    result may be a broadcast.

    The axis has `size` elements, to which `left` and `right` are added at the ends. Bounds are
    taken as the user wrote them, before they are clamped to the axis. If the new size is symbolic
    and cannot be negative, the result is False, as for a symbolic size of an input. Examples are
    `x[:y.size(0)]` and `x[:n // 2]`.
    """
    size = fusion.canonical(size)
    start, end = sc.mul(fusion.canonical(left), -1), sc.add(size, fusion.canonical(right))
    # The end is clamped to the size, the start to the end.
    meant = sc.sub(_unclamped(end, size), _unclamped(start, end))
    value = sc.int_value(meant)
    return not sc.is_nonnegative(meant) if value is None else value == 1


def _unclamped(x: Scalar, limit: Scalar) -> Scalar:
    """Returns the bound `a` of a slice if `x` is the clamped bound min(a, limit); otherwise `x`."""
    if not (isinstance(x, Apply) and x.op == "min"):
        return x
    others = [a for a in x.args if sc.int_value(sc.sub(a, limit)) != 0]
    return others[0] if len(others) == 1 else x


def _bounds(values: Sequence[SizeLike], op_name: str) -> list[Scalar]:
    """Returns the bounds of a slice or the widths of a pad as Index scalars, from which the sizes
    of the result follow.
    """
    return [as_extent(v, op_name, i) for i, v in enumerate(values)]


# ------------------------------------------------------------------ slice
def slice(
    arg: TensorView,
    start_indices: Sequence[SizeLike],
    end_indices: Sequence[SizeLike],
    strides: Sequence[SizeLike] | None = None,
    manual_normalization: bool = False,
) -> TensorView:
    """Returns the elements [start, end) of every axis.

    - `start_indices` and `end_indices` have one bound per axis. `strides` must be 1 for every axis.
    - An end beyond the extent is clamped, as in torch.
    - A negative bound raises an error. A symbolic bound is checked when its value is known.
    - With `manual_normalization`, the caller guarantees bounds in range. Symbolic bounds are then
      not clamped.
    - A slice of all elements adds a copy op, and an empty slice adds a `full`.

    Raises:
        ArgumentError: the bounds are neither all lists nor all tuples.
        DefinitionError: there are more or fewer bounds than axes, a constant bound is negative, or
            a constant end is before its start.
        UnsupportedError: a stride is not 1.

    Example: `fd.ops.slice(x, [0, 2], [4, 6])` of x [8, 8] is [4, 4], as `x[0:4, 2:6]`.
    """
    name = "slice"
    tv = arg
    given = [start_indices, end_indices, *([strides] if strides is not None else [])]
    if not (all(isinstance(g, list) for g in given) or all(isinstance(g, tuple) for g in given)):
        raise ArgumentError(
            f"{name}(): incompatible function arguments: start_indices, end_indices and strides "
            "must be all lists or all tuples"
        )
    starts, ends = _bounds(start_indices, name), _bounds(end_indices, name)
    _check_slice(
        tv,
        starts,
        ends,
        [as_integer(s, name, i) for i, s in enumerate(strides)] if strides is not None else None,
    )
    fusion = active_fusion()

    def clamped(bound: Scalar, limit: Scalar) -> Scalar:
        is_known = isinstance(bound, Const) and isinstance(limit, Const)
        return bound if manual_normalization and not is_known else sc.minimum(bound, limit)

    bounds: list[tuple[Scalar, Scalar]] = []
    for axis, start, end in zip(axes_of(tv), starts, ends, strict=True):
        end = clamped(end, fusion.canonical(axis.size))
        bounds.append((clamped(start, end), end))
    sizes = [a.size for a in axes_of(tv)]
    widths = [
        (sc.mul(start, -1), sc.sub(end, size))
        for (start, end), size in zip(bounds, map(fusion.canonical, sizes), strict=True)
    ]
    if all(sc.int_value(w) == 0 for pair in widths for w in pair):
        return copy_tensor(tv)
    kept = [sc.sub(end, start) for start, end in bounds]
    if any(sc.int_value(k) == 0 for k in kept):
        return full_tensor(kept, Const(0, tv.dtype()), tv.dtype())
    out = new_output(resized_domain(fusion, clone_axes(tv), widths), tv.dtype(), [tv])
    pairs = tuple(s for s, _ in bounds), tuple(e for _, e in bounds)
    add_op(SliceOp(out, tv, SliceOp.ranges_of(*pairs)))
    return out


def _check_slice(
    tv: TensorView, starts: list[Scalar], ends: list[Scalar], strides: list[Scalar] | None
) -> None:
    name = "slice"
    if len(ends) != len(starts):
        raise fail(
            name,
            "Slice indexing attribute dimensions don't match! "
            f"Start Indices: {len(starts)} End Indices: {len(ends)}: the two lists must have the "
            "same length",
        )
    if strides is not None and len(strides) != len(starts):
        raise fail(
            name,
            "Slice start_indices and strides don't match! "
            f"Start Indices: {len(starts)} Strides: {len(strides)}: the two lists must have the "
            "same length",
        )
    if len(starts) != tv.ndim:
        raise fail(
            name,
            "Number of tensor dimensions does not match slice dimensions! "
            f"Tensor-dims: {tv.ndim} Slice-dims: {len(starts)} for {tv}",
        )
    for start, end in zip(starts, ends, strict=True):
        first, last = sc.int_value(start), sc.int_value(end)
        if first is not None and first < 0:
            raise fail(
                name,
                "Slice operation start_indices must be greater than or equal to 0. "
                f"Start Indices: {first}",
            )
        if last is not None and last < (first or 0):
            raise fail(
                name,
                "Slice operation end_indices must be greater than or equal to start_indices. "
                f"Start Indices: {start} End Indices: {last}",
            )
    if strides is not None and any(sc.int_value(s) != 1 for s in strides):
        raise unsupported(
            name,
            "nvFuser Limitation: All slice operation strides must be of const size 1. "
            f"Strides: {', '.join(map(str, strides))}",
        )


# ------------------------------------------------------------------ pad
def pad(
    arg: TensorView, pad_widths: Sequence[SizeLike], value: ScalarLike | None = None
) -> TensorView:
    """Pads axes with `value` (default 0), as `torch.nn.functional.pad` does.

    `pad_widths` has a left and a right width for each axis, the last axis first. A negative width
    removes elements.

    Raises:
        DefinitionError: the number of widths is odd or too large, or a constant size would be
            negative.
        DtypeError: `value` is of another category than the operand.
    """
    name = "pad"
    tv = arg
    widths = _bounds(pad_widths, name)
    if len(widths) % 2 or len(widths) > 2 * tv.ndim:
        raise fail(
            name,
            f"got {counted(len(widths), 'pad width')} for the {counted(tv.ndim, 'axis')} of {tv}: "
            "pass two for each axis, the last axis first",
        )
    pairs = list(zip(widths[::2], widths[1::2], strict=True))[::-1]
    none = [(sc.ZERO, sc.ZERO)] * (tv.ndim - len(pairs))
    return pad_tensor(tv, [*none, *pairs], _pad_value(tv, value))


def _pad_value(tv: TensorView, value: ScalarLike | None) -> Scalar:
    if value is None:
        return Const(0, tv.dtype())
    scalar = as_operand(value, "pad")
    if category(scalar.dtype) != category(tv.dtype()):
        raise DtypeError(
            "pad: Tensor arg and pad value must have the same dtype. "
            f"{tv} and pad value {scalar} of dtype {dtype_text(scalar.dtype)} (at {user_line()})"
        )
    check_exact(scalar, tv.dtype(), "pad")
    return sc.cast(scalar, tv.dtype())


def pad_tensor(
    tv: TensorView, widths: Sequence[tuple[Scalar, Scalar]], value: Scalar
) -> TensorView:
    """Adds an op that pads `tv` with `value`, and returns the result.

    `widths` has (left, right) per axis, outermost axis first. If all widths are 0, adds a copy.
    """
    if all(sc.int_value(w) == 0 for pair in widths for w in pair):
        return copy_tensor(tv)
    for axis, pair in zip(axes_of(tv), widths, strict=True):
        kept = sc.int_value(sc.add(sc.add(axis.size, pair[0]), pair[1]))
        if kept is not None and kept < 0:
            raise fail(
                "pad",
                f"the widths {pair[0]} and {pair[1]} change the size of axis {axis} of {tv} from "
                f"{axis.size} to {kept}, but a size must be at least 0",
            )
    domain = resized_domain(active_fusion(), clone_axes(tv), widths)
    if any(sc.int_value(a.size) == 0 for a in axes_of(tv)):
        return full_tensor([a.size for a in domain.logical], value, tv.dtype())
    out = new_output(domain, tv.dtype(), [tv])
    filler = None if _is_zero(value) else value
    add_op(PadOp(out, tv, tuple(w for pair in widths for w in pair), filler))
    return out


def _is_zero(value: Scalar) -> bool:
    """Returns whether a pad value is the constant 0, 0.0 or False. -0.0 is another value."""
    return isinstance(value, Const) and repr(value.value) in ("0", "0.0", "False")


# ------------------------------------------------------------------ cat
def cat(tensors: Sequence[TensorView], dim: int = 0, manual_padding: bool = False) -> TensorView:
    """Concatenates tensors along axis `dim`.

    Inside the graph, each tensor is first padded to the size of the result, so that all operands
    have equal loops in a kernel. The op `cat` then selects, for each position, the tensor to read.

    - With `manual_padding`, each tensor is already the result of such a pad.
    - A single tensor is copied. Tensors of constant size 0 along `dim` are dropped.

    Raises:
        DefinitionError: there is no tensor, or ranks or sizes differ.
        DtypeError: the dtypes differ.
        UnsupportedError: with `manual_padding`, a tensor is not the result of a pad.
    """
    name = "cat"
    pieces = list(tensors)
    if not pieces:
        raise fail(name, "the list of tensors is empty")
    first = pieces[0]
    for piece in pieces[1:]:
        if piece.dtype() is not first.dtype():
            raise DtypeError(
                f"{name}: all tensors must have the same dtype, but {first} is "
                f"{dtype_text(first.dtype())} and {piece} is {dtype_text(piece.dtype())} "
                f"(at {user_line()})"
            )
        if piece.ndim != first.ndim:
            raise fail(
                name,
                f"all tensors must have the same number of axes, but {first} has {first.ndim} and "
                f"{piece} has {piece.ndim}",
            )
    if first.ndim == 0:
        raise fail(name, f"rank-0 tensors cannot be concatenated: {first}")
    axis = wrap_dim(dim, first.ndim, name, first)
    if manual_padding:
        return _join(pieces, [_end_of_padded(p, axis) for p in pieces], axis)
    pieces = [p for p in pieces if sc.int_value(axes_of(p)[axis].size) != 0] or pieces[:1]
    if len(pieces) == 1:
        return copy_tensor(pieces[0])
    ends: list[Scalar] = []
    for p in pieces:
        ends.append(sc.add(ends[-1] if ends else sc.ZERO, axes_of(p)[axis].size))
    starts = [sc.ZERO, *ends[:-1]]
    padded: list[TensorView] = []
    for p, start, end in zip(pieces, starts, ends, strict=True):
        widths: list[tuple[Scalar, Scalar]] = [(sc.ZERO, sc.ZERO)] * p.ndim
        widths[axis] = (start, sc.sub(ends[-1], end))
        padded.append(pad_tensor(p, widths, Const(0, p.dtype())))
    return _join(padded, ends, axis)


def _end_of_padded(piece: TensorView, axis: int) -> Scalar:
    """Returns the position along `axis` at which the data of `piece`, an operand of a concatenation
    padded to the size of the result, ends.

    Raises `UnsupportedError` if `piece` is not the result of a pad.
    """
    definition = piece.definition()
    if not isinstance(definition, PadOp):
        raise unsupported(
            "cat",
            f"with manual_padding, each tensor must be the result of a pad, but {piece} is not",
        )
    return sc.sub(axes_of(piece)[axis].size, definition.right[axis])


def _join(pieces: list[TensorView], ends: list[Scalar], dim: int) -> TensorView:
    fusion = active_fusion()
    columns = zip(*(axes_of(p) for p in pieces), strict=True)
    joined = [join_axes(fusion, list(zip(pieces, c, strict=True)), "cat") for c in columns]
    dtype = pieces[0].dtype()
    if any(sc.int_value(j.size) == 0 for j in joined):
        return full_tensor([j.size for j in joined], Const(0, dtype), dtype)
    axes = [fusion.new_axis(j.extent, j.kind, expanded=j.expanded) for j in joined]
    out = new_output(axes, dtype, pieces)
    add_op(CatOp(out, tuple(pieces), tuple(ends), dim=dim))
    return out
