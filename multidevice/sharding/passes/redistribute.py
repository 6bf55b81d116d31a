"""Redistribution of copies: each copy that changes a placement becomes a chain of communications.

The steps of the chain are those of `redistribution.plan_steps`. An all-to-all sends one block of
the target axis to each device. Its operand gets one more axis, whose index is the receiver. In the
example, DIDx(M) is an axis M that is divided over d devices:

    y [M, DIDx(N)] = set(x [DIDx(M), N])
      ->  r [DIDx(M), d, N/d] = reshape(x)
          e [M, DIDx(d), N/d] = set(r)            all-to-all
          y [M, DIDx(N)]      = reshape(e)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod

from fuser.ir.domain.tensor_domain import IterDomain, MergeTransform
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.ops.nodes import ReshapeOp
from fuser.ir.scalar import constructors as sc
from fuser.ops.reshaping import transformed_domain
from fuser.passes.view_ops import is_copy
from multidevice.sharding.placement import (
    Cuts,
    Placement,
    add_cuts,
    copy_like,
    placement,
    step_parts,
)
from multidevice.sharding.redistribution import moved_axes_of, plan_arrival, plan_steps
from multidevice.sharding.reshard import Copies, changes_mesh, exchanged_axes, transfer_of


def split_copies(fusion: Fusion, copies: Copies) -> None:
    """Rewrites every copy as a chain of copies that are one communication or local slice each.

    `copies` supplies copies that exist already. In the example, a stream loop computes one block of
    x per step (`stream(N)`), and the devices divide each block (DIDx). So a device has parts of
    several blocks. The chain first gathers each block in its step of the loop, and then copies the
    whole tensor:

        y [N] = set(x [stream(N), DIDx])   ->   t [stream(N)] = set(x), y = set(t)
    """
    for op in fusion.exprs:
        if not is_copy(op) or exchanged_axes(op) is not None:
            continue
        at, out = op.inputs[0], op.out_tensor
        copied = [p for p, a in enumerate(out.domain.no_reductions) if a.is_broadcast]
        have, want = placement(at), placement(out)
        steps: list[Placement] = []
        if changes_mesh(op):
            if step_parts(at) or step_parts(out):
                continue  # refused when the copy becomes a `Reshard`
            divided = {p for p in copied if len(have[p]) + len(want[p])}
            have = _undivided(have, divided)
            at = _changed_before(op, have, copied, copies)
            have = _arrival(at, out, _undivided(want, divided), copied)
            steps = [have] if have != want else []
        steps += plan_steps(have, want, copied) if at.mesh == out.mesh or steps else []
        for cuts in steps:
            at = copies.get(at, out.mesh, cuts, before=op)
        if at is not op.inputs[0]:
            fusion.replace_expr(op, [op.replace(inp=at)])


def _undivided(cuts: Placement, axes: Collection[int]) -> Placement:
    return tuple(() if p in axes else mine for p, mine in enumerate(cuts))


def _changed_before(
    op: TensorOp, cuts: Placement, copied: Collection[int], copies: Copies
) -> TensorView:
    """Returns the operand of `op`, or a copy on its mesh with the placement `cuts`.

    A rank of both meshes copies its pieces itself. So no broadcast axis, of which every rank has
    the only element, may have other extents on the operand's mesh than on the result's.
    """
    inp = op.inputs[0]
    if placement(inp) == cuts:
        return inp
    for step in (*plan_steps(placement(inp), cuts, copied), cuts):
        inp = copies.get(inp, inp.mesh, step, before=op)
    return inp


def _arrival(
    inp: TensorView, out: TensorView, cuts: Placement, copied: Collection[int]
) -> Placement:
    """Returns the placement in which `inp` arrives on the mesh of `out`, on its way to `cuts`."""
    assert inp.mesh is not None and out.mesh is not None, f"{inp} is copied between meshes"
    return plan_arrival((inp.mesh, placement(inp)), (out.mesh, cuts), copied)


def form_exchanges(fusion: Fusion) -> None:
    """Splits an axis of every copy that sends parts of blocks, so that each part is one index of a
    new axis.

    - An all-to-all: a copy changes the axis that a mesh dimension divides. The index of the new
      axis is the device that receives the part.
    - A copy to a mesh that divides the tensor into other blocks: the index of the new axis is the
      number of a piece (`mesh_transfer`). There may be one new axis for each axis of the tensor.

    Afterwards, a reshape before the copy splits the axis, and a reshape after the copy merges the
    two parts again. An axis is not split if each part has one index of it already.
    """
    for op in fusion.exprs:
        if not is_copy(op) or op.inputs[0].mesh is None or op.out_tensor.mesh is None:
            continue
        if changes_mesh(op):
            parts = _pieces(op)
        else:
            parts = _receivers(op)
        if parts:
            fusion.replace_expr(op, _exchange(op, parts))


def _receivers(op: TensorOp) -> dict[int, int]:
    """Returns {axis that a mesh dimension divides in the result of `op`: number of its blocks}.

    Empty if `op` is no all-to-all, or each block has one index.
    """
    cuts = placement(op.out_tensor)
    moved = moved_axes_of(placement(op.inputs[0]), cuts)
    if moved is None or cuts[moved[1]][-1].whole:
        return {}
    # A broadcast axis has one element in memory, so no device lacks a part of it.
    axes = op.inputs[0].domain.no_reductions
    if any(axes[p].is_broadcast for p in moved):
        return {}
    return {moved[1]: prod(cut.devices for cut in cuts[moved[1]])}


def _pieces(op: TensorOp) -> dict[int, int]:
    """Returns {axis: number of its pieces} for the axes of which a rank sends or receives parts.

    `op` copies a tensor to another mesh. Axes whose pieces have one index each are left out.
    """
    inp, out = op.inputs[0], op.out_tensor
    if step_parts(inp) or step_parts(out):
        return {}
    transfer = transfer_of(op)
    sides = list(zip(placement(inp), placement(out), strict=True))
    return {
        p: transfer.pieces[p]
        for p in transfer.cut_axes
        if not any(cut.whole for cuts in sides[p] for cut in cuts)
    }


def _exchange(op: TensorOp, parts: Mapping[int, int]) -> list[TensorOp]:
    """Returns the ops that replace the copy `op`: a reshape that splits axes, the copy, and a
    reshape that merges them again.

    After the split, each part that a device sends is one index of a new axis. `parts` maps the
    position of each axis to split to the number of parts. The outer axis of such a split, which
    counts the parts, gets the divisions over devices.
    """
    inp, out = op.inputs[0], op.out_tensor
    fusion = out.fusion
    axes = inp.domain.no_reductions
    roots = [fusion.clone_axis(a) for a in axes]
    counts = {p: sc.const(count) for p, count in parts.items()}
    groups = [
        ([p], [counts[p], sc.ceildiv(a.size, counts[p])] if p in counts else [a.size])
        for p, a in enumerate(axes)
    ]
    spread = fusion.new_tensor(
        transformed_domain(fusion, roots, groups), inp.dtype(), mesh=inp.mesh
    )
    positions = [p + sum(q < p for q in parts) for p in range(len(axes))]
    for p, cuts in zip(positions, placement(inp), strict=True):
        add_cuts(spread, spread.domain.logical[p].number, cuts)
    want: list[Cuts] = []
    for p, cuts in enumerate(placement(out)):
        want += [cuts, ()] if p in parts else [cuts]
    received = copy_like(spread, out.mesh, tuple(want))
    _merge_into(out, received, parts)
    return [
        ReshapeOp(spread, inp).replace(where=op.where),
        op.replace(inp=spread, out=received),
        ReshapeOp(out, received).replace(where=op.where),
    ]


def _merge_into(out: TensorView, received: TensorView, parts: Collection[int]) -> None:
    """Makes `out` the result of a reshape of `received`. Each axis in `parts` is two axes of
    `received`, which the reshape merges.

    Only the domain of `out` changes: it gets the axes of `received` as root axes, and the merges.
    The caller creates the op.
    """
    fusion, domain = out.fusion, out.domain.without_root()
    given = iter(received.domain.no_reductions)
    roots: list[int] = []
    merges: list[MergeTransform] = []
    made: list[IterDomain] = []
    for p, axis in enumerate(domain.no_reductions):
        pair = [next(given) for _ in range(1 + (p in parts))]
        if p not in parts:
            roots.append(axis.number)
            continue
        outer, inner = map(fusion.clone_axis, pair)
        merged = axis.having(rfactor=True)
        roots += [outer.number, inner.number]
        merges.append(MergeTransform(outer.number, inner.number, merged.number))
        made += [outer, inner, merged]
    out.domain = domain.having(
        root=roots, transforms=(*merges, *domain.transforms), axes=tuple(made)
    )
