"""Redistribution of copies: each copy that changes a placement becomes a chain of communications.

The steps of the chain are those of `redistribution.plan_steps`. An all-to-all sends one block of
the target axis to each device. Its operand gets one more axis, whose index is the receiver:

    y [M, DIDx(N)] = set(x [DIDx(M), N])
      ->  r [DIDx(M), d, N/d] = reshape(x)
          e [M, DIDx(d), N/d] = set(r)            all-to-all
          y [M, DIDx(N)]      = reshape(e)
"""

from __future__ import annotations

from math import prod

from fuser.ir.domain.tensor_domain import MergeTransform
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.ops.nodes import ReshapeOp
from fuser.ir.scalar import constructors as sc
from fuser.ops.reshaping import transformed_domain
from fuser.passes.view_ops import is_copy
from multidevice.sharding.placement import add_cuts, copy_like, placement
from multidevice.sharding.redistribution import moved_axes_of, plan_steps
from multidevice.sharding.reshard import Copies, exchanged_axes


def split_copies(fusion: Fusion, copies: Copies) -> None:
    """Rewrites every copy as a chain of copies that are one communication or local slice each.

    `copies` supplies copies that exist already. In the example, a stream loop computes one block of
    x per step, and the devices divide each block. So a device has parts of several blocks, and the
    chain first gathers each block in its step of the loop:

        y [N] = set(x [stream(N), DIDx])   ->   t [stream(N)] = set(x), y = set(t)
    """
    for op in fusion.exprs:
        if not is_copy(op) or exchanged_axes(op) is not None:
            continue
        at, out = op.inputs[0], op.out_tensor
        if at.mesh != out.mesh:
            continue
        copied = [p for p, a in enumerate(out.domain.no_reductions) if a.is_broadcast]
        steps = plan_steps(placement(at), placement(out), copied)
        for cuts in steps:
            at = copies.get(at, out.mesh, cuts, before=op)
        if steps:
            fusion.replace_expr(op, [op.replace(inp=at)])


def form_exchanges(fusion: Fusion) -> None:
    """Gives every all-to-all an axis whose index is the device that receives the block.

    Before: a copy changes the axis that a mesh dimension divides. After: the copy is between two
    reshapes, and each block of its operand is one index of the new axis. The copy remains alone if
    each block of its target axis has one index already.
    """
    for op in fusion.exprs:
        if not is_copy(op) or op.inputs[0].mesh != op.out_tensor.mesh:
            continue
        cuts = placement(op.out_tensor)
        moved = moved_axes_of(placement(op.inputs[0]), cuts)
        if moved is None or cuts[moved[1]][-1].whole:
            continue
        # A broadcast axis has one element in memory, so no device lacks a part of it.
        axes = op.inputs[0].domain.no_reductions
        if not any(axes[p].is_broadcast for p in moved):
            fusion.replace_expr(op, _exchange(op, *moved))


def _exchange(op: TensorOp, source: int, target: int) -> list[TensorOp]:
    """Returns the ops of an all-to-all that divides the axis `target` instead of `source`."""
    inp, out = op.inputs[0], op.out_tensor
    fusion = out.fusion
    have, want = placement(inp), placement(out)
    axes = inp.domain.no_reductions
    blocks = sc.const(prod(cut.devices for cut in want[target]))
    sizes = [blocks, sc.ceildiv(axes[target].size, blocks)]
    roots = [fusion.clone_axis(a) for a in axes]
    groups = [([p], sizes if p == target else [a.size]) for p, a in enumerate(roots)]
    spread = fusion.new_tensor(
        transformed_domain(fusion, roots, groups), inp.dtype(), mesh=inp.mesh
    )
    positions = [p + (p > target) for p in range(len(axes))]
    for p, axis in enumerate(positions):
        add_cuts(spread, spread.domain.logical[axis].number, have[p])
    received = copy_like(spread, out.mesh, (*want[: target + 1], (), *want[target + 1 :]))
    _merge_into(out, received, target)
    return [
        ReshapeOp(spread, inp).replace(where=op.where),
        op.replace(inp=spread, out=received),
        ReshapeOp(out, received).replace(where=op.where),
    ]


def _merge_into(out: TensorView, received: TensorView, target: int) -> None:
    """Gives `out` the root axes of `received`, of which two are merged to its axis `target`."""
    fusion, domain = out.fusion, out.domain.without_root()
    logical = list(domain.no_reductions)
    given = received.domain.no_reductions
    outer, inner = (fusion.clone_axis(given[target + k]) for k in range(2))
    roots = [*(a.number for a in logical[:target]), outer.number, inner.number]
    roots += [a.number for a in logical[target + 1 :]]
    merged = logical[target].having(rfactor=True)
    merge = MergeTransform(outer.number, inner.number, merged.number)
    out.domain = domain.having(
        root=roots, transforms=(merge, *domain.transforms), axes=(outer, inner, merged)
    )
