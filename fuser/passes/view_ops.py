"""Views: ops whose result shares the memory of the operand, and the strides of such results.

Strides are expressions of the tensors' sizes. A view that is possible according to these
expressions is possible for all sizes for which the program is compiled. torch then creates it
without a copy.
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
    """Returns whether an op is a copy whose result has the same axes in the same order.

    A user writes such a copy to obtain a separate tensor. It is therefore never replaced by a view
    of the operand.
    """
    return isinstance(op, nodes.LoadStoreOp) and not op.out.domain.root


def is_permute(op: TensorOp) -> TypeGuard[nodes.LoadStoreOp]:
    """Returns whether an op is a copy whose result has the axes of its operand in another order."""
    return isinstance(op, nodes.LoadStoreOp) and bool(op.out.domain.root)


def views_of_inputs(fusion: Fusion) -> set[TensorView]:
    """Returns the outputs that are views of an input, and the tensors between them and the input. A
    view shares the memory of its operand.

    Three kinds of tensors are not in the result:

    - views of an input that an in-place update overwrites, because outputs have the old values;
    - results that are written into an input, because they have its memory;
    - results of stream loops (loops that compute a tensor part by part), because each iteration
      writes its own part.
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
    """Returns the strides of the result of a view op, or None if torch would have to copy.

    `known` has the strides of the operand. `local_shape` returns the sizes that a tensor has in the
    memory of one device.
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
    """Returns whether each axis of a tensor is contiguous: whether its stride is the product of
    extent and stride of the next axis inside it. The innermost axis is contiguous if its stride is
    1.

    `order` lists the positions of all axes, outermost first. The result has one flag per axis, in
    this order. The flag is None if memory holds only one element along the axis.
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
    """Returns whether `strides` are those of the tensor's declared memory order, for all sizes.

    `extents` has the sizes of the tensor's axes in memory. Gaps are allowed where the declaration
    allows them.
    """
    order = memory_layout.memory_order(tv)
    found = contiguity_of(tv, strides, [p for p, _ in order], extents)
    return all(is_so or not flag for is_so, (_, flag) in zip(found, order, strict=True))
