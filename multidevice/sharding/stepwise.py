"""Resharding copies, one device type at a time, shared between their consumers.

x [DIDy(a), DIDx(b)]  ->  t = set(x) [DIDy(a), b]  ->  r = set(t) [a, b]      two allgathers
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from itertools import takewhile, zip_longest

from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.fusion import Fusion, TensorOp
from fuser.ir.ops.nodes import LoadStoreOp
from fuser.ir.tensor import TensorView
from fuser.ir.types import DEVICE_TYPES, ParallelType
from fuser.passes.view_ops import is_copy
from multidevice.sharding.placement import (
    Cuts,
    Placement,
    copy_like,
    placement,
    without_streams,
)
from multidevice.sharding.reshard import exchanged_axes


class Copies:
    """The resharded copies of a fusion, by source, mesh and placement."""

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion
        self._known: dict[tuple[TensorView, DeviceMesh | None, Placement], TensorView] = {}

    def get(
        self, source: TensorView, mesh: DeviceMesh | None, cuts: Placement, *, before: TensorOp
    ) -> TensorView:
        """Return a copy of `source` with this placement that is defined before the op `before`."""
        known = self._known.get((source, mesh, cuts))
        if known is not None and self._is_before(known, before):
            return known
        made = copy_like(source, mesh, cuts)
        self._fusion.insert_before(before, [LoadStoreOp(made, source).replace(where=before.where)])
        self._known[(source, mesh, cuts)] = made
        return made

    def feed(
        self, op: TensorOp, index: int, *, mesh: DeviceMesh | None, cuts: Placement
    ) -> TensorOp:
        """Make operand `index` of the op a copy with this placement; return the new op."""
        made = self.get(op.inputs[index], mesh, cuts, before=op)
        fed = replace_operand(op, index, made)
        self._fusion.replace_expr(op, [fed])
        return fed

    def drop_unused(self) -> None:
        """Remove copies that nothing reads any more."""
        for made in reversed(self._known.values()):
            definition = self._fusion.definition(made)
            if definition is not None and not self._fusion.uses(made):
                self._fusion.replace_expr(definition, [])

    def _is_before(self, tv: TensorView, op: TensorOp) -> bool:
        definition = self._fusion.definition(tv)
        exprs = self._fusion.exprs
        return definition is not None and exprs.index(definition) < exprs.index(op)


def replace_operand(op: TensorOp, index: int, new: TensorView) -> TensorOp:
    """Return the op with its operand number `index` (as in `op.inputs`) replaced."""
    position = -1
    changes: dict[str, object] = {}
    for f in dataclasses.fields(op):  # pyright: ignore[reportArgumentType]
        kind, value = f.metadata.get("kind"), getattr(op, f.name)
        if kind == "operand" and value is not None:
            position += 1
            if position == index:
                changes[f.name] = new
        elif kind == "operands":
            values: tuple[object, ...] = getattr(op, f.name)
            at = index - position - 1
            position += len(values)
            if 0 <= at < len(values):
                changes[f.name] = (*values[:at], new, *values[at + 1 :])
    assert len(changes) == 1, f"{op} has no operand {index}"
    return op.replace(**changes)


def split_copies(fusion: Fusion, copies: Copies) -> None:
    """Rewrite every copy as a chain of copies in which one device type changes at a time.

    Devices' blocks that lie inside of a stream's come together step by step: as a whole, what a
    device has is no block.

        y [N] = set(x [stream(N), DIDx])   ->   t [stream(N)] = set(x), y = set(t)
    """
    for op in fusion.exprs:
        if not is_copy(op) or exchanged_axes(op) is not None:
            continue
        at, out = op.inputs[0], op.out_tensor
        if at.mesh != out.mesh:
            continue
        steps = plan_steps(placement(at), placement(out))
        for cuts in steps:
            at = copies.get(at, out.mesh, cuts, before=op)
        if steps:
            fusion.replace_expr(op, [op.replace(inp=at)])


def plan_steps(source: Placement, target: Placement) -> list[Placement]:
    """Return the placements on the way from `source` to `target`, both left out.

    Each step drops or adds one device type. Types are added first where the axis is free of
    changing types, so that less data is gathered; then types are dropped, inner cuts before outer
    ones, mesh_x first; then the remaining types are added, outer cuts first. What is dropped inside
    of a stream leaves the stream, whose steps then have the same blocks on all these devices.
    """
    changing = _changing_types(source, target)
    now = [without_streams(cuts) for cuts in source]
    steps: list[Placement] = []

    def add(position: int, cuts: Cuts) -> None:
        now[:] = map(without_streams, now)
        now[position] = cuts
        steps.append(tuple(now))

    dropped = {c.ptype for cuts in source for c in cuts if c.ptype in changing}
    late: list[tuple[int, Cuts]] = []
    for position, depth in ((p, k) for p, cuts in enumerate(target) for k in range(len(cuts))):
        cuts = target[position][: depth + 1]
        if cuts[-1].ptype not in changing:
            continue
        others = {c.ptype for p, mine in enumerate(now) if p != position for c in mine}
        is_free = dropped.isdisjoint(c.ptype for c in (*now[position], cuts[-1]))
        is_one_loop = not any(p.is_stream for p in others.intersection(c.ptype for c in cuts))
        if is_free and is_one_loop and now[position] == without_streams(cuts[:-1]):
            add(position, cuts)
        else:
            late.append((position, cuts))
    for ptype in _drop_order(source, dropped):
        now[:] = (_without(ptype, cuts) for cuts in now)
        steps.append(tuple(now))
    for position, cuts in late:
        add(position, cuts)
    if steps and steps[-1] in (target, tuple(map(without_streams, target))):
        steps.pop()
    return steps


def _changing_types(source: Placement, target: Placement) -> set[ParallelType]:
    found: set[ParallelType] = set()
    for mine, wanted in zip(source, target, strict=True):
        sides = [
            [replace(c, whole=False, swizzle=None) for c in without_streams(cuts)]
            for cuts in (mine, wanted)
        ]
        depth = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip_longest(*sides)))
        found |= {c.ptype for side in sides for c in side[depth:] if c.ptype.is_device}
    return found


def _without(ptype: ParallelType, cuts: Cuts) -> Cuts:
    """Return the cuts around one over `ptype`, all if there is none, in an order of a stream's that
    does not depend on it."""
    depth = next((k for k, c in enumerate(cuts) if c.ptype is ptype), None)
    kept = without_streams(cuts) if depth is None else cuts[:depth]
    return tuple(replace(c, swizzle=None) if c.swizzle is ptype else c for c in kept)


def _drop_order(source: Placement, dropped: set[ParallelType]) -> list[ParallelType]:
    depth = {c.ptype: d for cuts in source for d, c in enumerate(cuts)}
    return sorted(dropped, key=lambda p: (-depth[p], DEVICE_TYPES.index(p)))
