"""Views: ops whose result shares the memory of the operand, and the strides of such results.

Strides are scalar expressions over extents. A property of these expressions therefore holds for
every size of an input class, and torch can create such a view without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

from fuser.ir import memory_layout
from fuser.ir.domain.axis_path import SizeRules, StrideRules, path, replay
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.ops import nodes
from fuser.ir.ops.nodes import SliceOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar

VIEW_OPS = (
    nodes.LoadStoreOp,
    nodes.ReshapeOp,
    nodes.BroadcastOp,
    nodes.SqueezeOp,
    nodes.ExpandOp,
    SliceOp,
)

Strides = tuple[Scalar, ...]
"""Per logical axis without reductions, in elements."""


def is_copy(op: TensorOp) -> TypeGuard[nodes.LoadStoreOp]:
    """Returns whether an op is a copy with the same axes in the same order.

    A user writes such a copy to obtain a separate tensor, so it never becomes a view.
    """
    return isinstance(op, nodes.LoadStoreOp) and not op.out.domain.root


def views_of_inputs(fusion: Fusion) -> set[TensorView]:
    """Returns the outputs that are views of an input, and the tensors between them and the input.

    Three kinds of tensors are excluded:

    - views of an input that an update overwrites, because outputs have the old values;
    - results that are written into an input, because they have its memory;
    - results of stream loops, because each step writes its own part.
    """
    updates = [alias for alias in fusion.aliases if alias.out is not alias.into]
    updated = {alias.into for alias in updates}
    written = {alias.out for alias in updates}
    found: dict[TensorView, TensorView] = {
        v: v
        for v in fusion.inputs
        if isinstance(v, TensorView) and not v.is_cpu_scalar and v not in updated
    }
    for op in fusion.exprs:
        is_view = isinstance(op, VIEW_OPS) and not is_copy(op) and op.inputs[0] in found
        if is_view and not any(a.is_stream for a in op.out_tensor.domain.loop):
            found[op.out_tensor] = op.inputs[0]  # pyright: ignore[reportArgumentType]
    shown: set[TensorView] = set()
    for out in fusion.outputs:
        while out not in written and out not in shown and found.get(out, out) is not out:
            shown.add(out)
            out = found[out]
    return shown


def view_strides(
    op: TensorOp, known: Strides, local_shape: Callable[[TensorView], Sequence[Scalar]]
) -> Strides | None:
    """Returns the strides of a view op's result, or None if torch would have to copy.

    `known` are the strides of the operand. `local_shape` returns the extents of a tensor in memory.
    """
    if isinstance(op, nodes.ReshapeOp):
        return _reshape_strides(op, known, local_shape)
    picked = [None if i is None else known[i] for i in op.axis_map(0)]
    if isinstance(op, nodes.LoadStoreOp) and op.out.domain.root:
        root = op.out.domain.root_numbers
        picked = [picked[root.index(n)] for n in op.out.domain.logical_numbers]
    return tuple(sc.ZERO if p is None else p for p in picked)


def _reshape_strides(
    op: nodes.ReshapeOp, known: Strides, local_shape: Callable[[TensorView], Sequence[Scalar]]
) -> Strides | None:
    domain = op.out.domain
    sizes = dict(zip(domain.root_numbers, local_shape(op.inp), strict=True))
    sizes.update(zip(domain.logical_numbers, local_shape(op.out), strict=True))
    steps = path(domain, domain.root, domain.logical)
    sizes = replay(steps, sizes, SizeRules())
    strides = dict(zip(domain.root_numbers, known, strict=True))
    strides = replay(steps, strides, StrideRules(sizes.__getitem__))
    if not strides.keys() >= set(domain.logical_numbers):
        return None
    return tuple(strides[n] for n in domain.logical_numbers)


def contiguity_of(
    tv: TensorView, strides: Strides, order: Sequence[int], extents: Sequence[Scalar]
) -> tuple[bool | None, ...]:
    """Returns the contiguity of a tensor with these strides, one flag per axis in `order`.

    `order` lists the positions of all axes, outermost first. The flag of an axis is None if memory
    holds only one element along the axis.
    """
    axes, step = tv.domain.no_reductions, sc.ONE
    flags: list[bool | None] = []
    for p in reversed(order):
        if not memory_layout.is_stored(axes[p]):
            flags.append(None)
            continue
        flags.append(strides[p] == step)
        step = sc.mul(strides[p], extents[p])
    return tuple(reversed(flags))


def lies_as_declared(tv: TensorView, strides: Strides, extents: Sequence[Scalar]) -> bool:
    """Returns whether strides match the declared layout of a tensor for all sizes.

    `extents` are the extents of the tensor's axes in memory.
    """
    order = memory_layout.memory_order(tv)
    found = contiguity_of(tv, strides, [p for p, _ in order], extents)
    return all(is_so or not flag for is_so, (_, flag) in zip(found, order, strict=True))
