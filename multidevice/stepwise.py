"""Resharding copies, one device type at a time, shared between their consumers.

x [DIDy(a), DIDx(b)]  ->  t = set(x) [DIDy(a), b]  ->  r = set(t) [a, b]      two allgathers
"""

from __future__ import annotations

import dataclasses

from fuser.ir.fusion import Fusion
from fuser.ir.mesh import DeviceMesh
from fuser.ir.nodes import LoadStoreOp, TensorOp
from fuser.ir.tensor import TensorView
from fuser.ir.types import DEVICE_TYPES, ParallelType
from multidevice.communication import exchanged_axes, is_copy
from multidevice.placement import Cut, Placement, copy_like, placement
from multidevice.sharding import have_different_shardings


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
    """Rewrite every copy in which several device types change as a chain of one-type copies."""
    for op in fusion.exprs:
        if not is_copy(op) or exchanged_axes(op) is not None:
            continue
        source, out = op.inputs[0], op.out_tensor
        if source.mesh != out.mesh:
            continue
        changing = [p for p in DEVICE_TYPES if have_different_shardings(op, 0, (p,))]
        steps = plan_steps(placement(source, DEVICE_TYPES), placement(out, DEVICE_TYPES), changing)
        at = source
        for cuts in steps[:-1]:
            at = copies.get(at, out.mesh, cuts, before=op)
        if at is not source:
            fusion.replace_expr(op, [op.replace(inp=at)])


def plan_steps(
    source: Placement, target: Placement, changing: list[ParallelType]
) -> list[Placement]:
    """Return the placements after each step from `source` to `target`.

    Each step drops or adds one device type. Types are added first where the axis is free of
    changing types, so that less data is gathered; then types are dropped, inner cuts before outer
    ones, mesh_x first; then the remaining types are added, outer cuts first.
    """
    now = [list(cuts) for cuts in source]
    steps: list[Placement] = []

    def took() -> None:
        steps.append(tuple(tuple(cuts) for cuts in now))

    def busy(cuts: list[Cut]) -> bool:
        return any(c.ptype in changing for c in cuts)

    dropped = {c.ptype for cuts in source for c in cuts if c.ptype in changing}
    added = [
        (position, cut)
        for position, cuts in enumerate(target)
        for cut in cuts
        if cut.ptype in changing
    ]
    for position, cut in list(added):
        prefix = target[position][: target[position].index(cut)]
        is_free = cut.ptype not in dropped and tuple(now[position]) == prefix
        if is_free and not busy([c for c in now[position] if c.ptype in dropped]):
            now[position].append(cut)
            added.remove((position, cut))
            took()
    for ptype in _drop_order(source, dropped):
        for cuts in now:
            cuts[:] = [c for c in cuts if c.ptype is not ptype]
        took()
    for position, cut in added:
        now[position].append(cut)
        took()
    return steps


def _drop_order(source: Placement, dropped: set[ParallelType]) -> list[ParallelType]:
    depth = {c.ptype: d for cuts in source for d, c in enumerate(cuts)}
    return sorted(dropped, key=lambda p: (-depth[p], DEVICE_TYPES.index(p)))
