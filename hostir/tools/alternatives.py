"""The cheapest other sequence of communications that makes the same change of placement, as text.

`python -m hostir why` prints this sequence below each communication, with the bytes that it would
send.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from math import prod

from fuser.ir.fusion import TensorView
from fuser.ir.op import Op
from fuser.ir.scalar import constructors as sc
from fuser.ir.types import DEVICE_TYPES, ParallelType
from hostir.cost.report import size_text
from hostir.ir.ops import HostOp
from multidevice.sharding.placement import Cut, Placement, placement
from multidevice.sharding.queries import partial_sum_axes
from multidevice.sharding.redistribution import PlanCost, SumStage, cheapest_detour, step_cost
from multidevice.transports.base.collectives import (
    ALL_TO_ALL,
    ALLGATHER,
    ALLREDUCE,
    REDUCE_SCATTER,
)

# A sequence of steps: its cost, and its stages with both ends.
_Plan = tuple[PlanCost, tuple[SumStage, ...]]


def alternative_words(op: Op, inp: TensorView, out: TensorView, sent_nbytes: int) -> str:
    """Returns the cheapest other sequence of steps that changes the placement of `inp` to that of
    `out`, with its bytes, such as `Allgather + LocalSlice, 3.072 kB from each rank, 3.0 times as
    much`.

    `sent_nbytes` are the bytes that a rank sends in the communication that makes the change.
    Returns "" if the change is not one communication on one mesh.
    """
    before, after = stage_of(inp, summed_by(op)), stage_of(out)
    if inp.mesh != out.mesh or len(before.placement) != len(after.placement):
        return ""
    # Parts along other mesh dimensions stay as they are.
    before = SumStage(before.placement, tuple(c for c in before.parts if c not in after.parts))
    target = after.placement
    copied = [p for p, a in enumerate(out.domain.no_reductions) if a.is_broadcast]
    direct = step_cost(before, SumStage(target), copied)
    if direct is None or not direct.sent:
        return ""
    plans = [*_scattered(before, target, out, copied)]
    detour = cheapest_detour(before, target, copied)
    if detour is not None:
        plans.append((detour[0], (before, *detour[1], SumStage(target))))
    if not plans:
        return "no other sequence of steps makes this change"
    cost, stages = min(plans, key=lambda plan: plan[0])
    ratio = cost.sent / direct.sent
    times = "as much" if ratio == 1 else f"{float(ratio):.1f} times as much"
    steps = " + ".join(_step_name(a, b) for a, b in pairwise(stages))
    return f"{steps}, {size_text(round(sent_nbytes * ratio))} from each rank, {times}"


def summed_by(op: Op) -> tuple[ParallelType, ...]:
    """Returns the mesh dimensions over which the communication `op` reduces; () for other ops."""
    movement = op.movement if isinstance(op, HostOp) else None
    if movement is None or movement.collective is None or movement.team is None:
        return ()
    return movement.team.ptypes if movement.collective.reduces else ()


def stage_of(tv: TensorView, summed: Collection[ParallelType] = ()) -> SumStage:
    """Returns how devices divide the axes of a tensor, and along which mesh dimensions they have
    parts of its sums.

    The communication of which `tv` is the operand reduces over the mesh dimensions `summed`.
    """
    sums, cuts = partial_sum_axes(tv), placement(tv, DEVICE_TYPES)
    parts = {
        position
        for position, mine in enumerate(cuts)
        if position in sums or any(cut.ptype in summed for cut in mine)
    }
    kept = tuple(mine for position, mine in enumerate(cuts) if position not in parts)
    return SumStage(kept, tuple(cut for position in sorted(parts) for cut in cuts[position]))


def _scattered(
    before: SumStage, target: Placement, out: TensorView, copied: Sequence[int]
) -> Iterator[_Plan]:
    """Yields a reduce-scatter and an allgather that make the change of an allreduce, if the number
    of ranks is not known not to divide an axis of `out`.
    """
    if before.placement != target or len(before.parts) != 1:
        return
    (cut,) = before.parts
    for axis, (cuts, size) in enumerate(zip(target, out.shape(), strict=True)):
        extent = sc.int_value(out.fusion.canonical(size))
        blocks = prod(c.devices for c in cuts) * cut.devices
        if axis in copied or (extent is not None and extent % blocks):
            continue
        divided = Cut(cut.ptype, cut.devices)
        middle = SumStage((*target[:axis], (*cuts, divided), *target[axis + 1 :]))
        steps = [step_cost(before, middle, copied), step_cost(middle, SumStage(target), copied)]
        if None not in steps:
            cost = sum((s for s in steps if s is not None), PlanCost())
            yield cost, (before, middle, SumStage(target))
        return


def _step_name(before: SumStage, after: SumStage) -> str:
    """Returns the name of the communication or local slice that turns the stage `before` into the
    stage `after`. A stage of a sum says how its axes are divided over devices, and along which mesh
    dimensions devices still have partial sums.
    """
    counts = [sum(map(len, stage.placement)) for stage in (before, after)]
    if len(after.parts) < len(before.parts):
        return (ALLREDUCE if counts[0] == counts[1] else REDUCE_SCATTER).name
    if counts[0] == counts[1]:
        return ALL_TO_ALL.name
    return ALLGATHER.name if counts[1] < counts[0] else "LocalSlice"
