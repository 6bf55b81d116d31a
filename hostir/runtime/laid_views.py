"""Where the views of torch lie, told from where their operands lie: no tensor is made for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fuser.ir.domain import strided_layout
from fuser.ir.domain.strided_layout import Laid
from fuser.ir.fusion import TensorOp
from fuser.ir.ops import nodes
from fuser.ir.ops.resizing import SliceOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Number, Symbol

Shape = tuple[int, ...]
# Strides, and elements from the operand's first one to the view's; None where torch has to tell.
Seen = tuple[Shape, int] | None


def _load_store(op: nodes.LoadStoreOp, x: Laid, shape: Shape, values: object) -> Seen:
    root = op.out.domain.root_numbers
    if not root:
        return x.stride(), 0
    return tuple([x.stride(root.index(n)) for n in op.out.domain.logical_numbers]), 0


def _broadcast(op: nodes.BroadcastOp, x: Laid, shape: Shape, values: object) -> Seen:
    sizes, strides = list(x.shape), list(x.stride())
    for p, is_new in enumerate(op.flags):
        if is_new:
            strides.insert(p, sizes[p] * strides[p] if p < len(sizes) else 1)
            sizes.insert(p, 1)
    return tuple(strides), 0


def _squeeze(op: nodes.SqueezeOp, x: Laid, shape: Shape, values: object) -> Seen:
    return tuple([s for s, gone in zip(x.stride(), op.flags, strict=True) if not gone]), 0


def _expand(op: nodes.ExpandOp, x: Laid, shape: Shape, values: object) -> Seen:
    if len(shape) != x.ndim:
        return None
    sized = zip(x.shape, x.stride(), shape, strict=True)
    return tuple([step if n == wanted else 0 for n, step, wanted in sized]), 0


def _reshape(op: nodes.ReshapeOp, x: Laid, shape: Shape, values: object) -> Seen:
    if x.stride() == strided_layout.dense_strides(x.shape):
        return strided_layout.dense_strides(shape), 0
    if 1 in x.shape or 1 in shape:
        return None  # torch gives axes of one element strides of its own
    strides = strided_layout.viewed_strides(x.shape, x.stride(), shape)
    return None if strides is None else (strides, 0)


def _slice(op: SliceOp, x: Laid, shape: Shape, values: Mapping[Symbol, Number]) -> Seen:
    shift = 0
    axes = zip(op.starts, op.stops, x.shape, x.stride(), shape, strict=True)
    for start, stop, n, step, wanted in axes:
        begin, end, _ = slice(*(int(sc.evaluate(s, values)) for s in (start, stop))).indices(n)
        if end - begin != wanted:
            return None
        shift += begin * step
    return x.stride(), shift


VIEWS: dict[type[TensorOp], Callable[[Any, Laid, Shape, Mapping[Symbol, Number]], Seen]] = {
    nodes.BroadcastOp: _broadcast,
    nodes.ExpandOp: _expand,
    nodes.LoadStoreOp: _load_store,
    nodes.ReshapeOp: _reshape,
    SliceOp: _slice,
    nodes.SqueezeOp: _squeeze,
}


def seen(op: TensorOp, x: Laid, shape: Sequence[int], values: Mapping[Symbol, Number]) -> Seen:
    """Return how the result of an op, a view of `x` with this shape, lies in memory."""
    return VIEWS[type(op)](op, x, tuple(shape), values)
