"""Executes a sharded fusion in the loops that `StreamLoops` finds, step by step, as a reference.

Each step sees only its blocks of the tensors that it computes in the loop. A tensor allocated per
step is dropped at the end of the step, and memory that no step wrote is NaN. So a wrong loop, a
wrong allocation or a wrong block gives wrong numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fuser.ir.axis_graph import tensor_operands
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.memory_layout import memory_order
from fuser.ir.ops.nodes import Reshard
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Symbol
from fuser.ir.types import STREAM_TYPES, ParallelType
from fuser.passes.segment import segment_fusion
from fuser.schedule.registry import find_scheduler
from multidevice.sharding.passes.localize import localize
from multidevice.sharding.placement import Block
from multidevice.sharding.queries import local_sizes
from multidevice.sharding.reshard import (
    communicates,
    communication_type,
    is_device_to_stream,
    is_exchange,
    is_step_slice,
    team_of,
)
from multidevice.sharding.streams import (
    StreamAxis,
    StreamLoops,
    block_extents,
    held_extents,
    is_allocated_per_step,
    is_in_step,
    needed_blocks,
    scatters_steps,
    stream_axes,
    stream_axis,
)

Local = dict[TensorView, torch.Tensor]
Values = dict[Symbol, int]
# Which element or block of each axis that is streamed.
Step = dict[ParallelType, int]


@dataclass(frozen=True, eq=False)
class Unit:
    """The ops that run together: one op, or all ops of one kernel, with the kernel's fusion."""

    exprs: tuple[TensorOp, ...]
    inputs: tuple[TensorView, ...]
    outputs: tuple[TensorView, ...]
    kernel: Fusion | None = None


Execute = Callable[[Unit, dict[int, Local], Block], None]


def ops_of(fusion: Fusion) -> list[Unit]:
    """Returns each op as a unit of its own."""
    units: list[Unit] = []
    for op in fusion.used_exprs():
        inputs = dict.fromkeys(v for _, v in tensor_operands(op))
        units.append(Unit((op,), tuple(inputs), op.outputs))
    return units


def segments_of(fusion: Fusion) -> list[Unit]:
    """Returns the segments into which the compiler cuts a fusion."""
    segmented = segment_fusion(
        fusion,
        find_scheduler=lambda f: find_scheduler(localize(f)[0]),
        local_shape=held_extents,
        may_share_kernel=StreamLoops(fusion).may_share_kernel,
    )
    return [
        Unit(s.exprs, tuple(v for v in s.inputs if isinstance(v, TensorView)), s.outputs, s.fusion)
        for s in segmented.segments
    ]


def in_order(units: list[Unit], fusion: Fusion, loops: StreamLoops) -> list[list[Unit]]:
    """Returns the units in program order, grouped by loop; fails on cycles."""
    groups: dict[object, list[Unit]] = {}
    for unit in units:
        (loop,) = {loops.loop_of(op) for op in unit.exprs}
        groups.setdefault(loop or unit, []).append(unit)
    for unit in units:
        for op in unit.exprs:
            if is_step_slice(op):
                readers = {loops.loop_of(u) for u in fusion.uses(op.out_tensor)}
                assert readers <= {loops.loop_of(op)}, op
    waiting, ready, ordered = list(groups.values()), set(fusion.inputs), list[list[Unit]]()
    while waiting:
        made = [{o for unit in group for o in unit.outputs} for group in waiting]
        at = next(
            k
            for k, group in enumerate(waiting)
            if all(v in ready or v in made[k] for unit in group for v in unit.inputs)
        )
        ready |= made[at]
        ordered.append(waiting.pop(at))
    return ordered


def run(
    fusion: Fusion,
    units: list[Unit],
    values: Values,
    tensors: dict[int, Local],
    execute: Execute,
) -> None:
    """Runs all units of a fusion whose inputs are in `tensors`, by rank."""
    loops = StreamLoops(fusion)
    for group in in_order(units, fusion, loops):
        if loops.loop_of(group[0].exprs[0]) is None:
            (unit,) = group
            execute(unit, tensors, "first")
            for out in unit.outputs:
                for mine in tensors.values():
                    assert tuple(mine[out].shape) == _local_shape(out, values), out
            continue
        # A slice may lack some of the axes that the steps of its readers count.
        made = [unit.exprs[0] for unit in group if not is_step_slice(unit.exprs[0])]
        counts = {tuple(_counts(_stepping(op), values)) for op in made}
        assert len(counts) == 1, group
        sizes = counts.pop()
        for unit in group:
            for out in unit.outputs:
                for mine in tensors.values():
                    mine[out] = torch.full(_local_shape(out, values), math.nan).double()
        for step in itertools.product(*map(range, sizes)):
            _step(group, dict(zip(STREAM_TYPES, step, strict=False)), values, tensors, execute)
            for unit in group:
                for out in unit.outputs:
                    if is_allocated_per_step(out):
                        for mine in tensors.values():
                            mine[out].fill_(math.nan)


def _counts(tv: TensorView, values: Values) -> list[int]:
    return [int(sc.evaluate(axis.count, values)) for axis in stream_axes(tv)]


def _stepping(op: TensorOp) -> TensorView:
    return op.inputs[0] if scatters_steps(op) else op.out_tensor


def _local_shape(tv: TensorView, values: Values) -> tuple[int, ...]:
    return local_sizes(tv, [int(sc.evaluate(a.size, values)) for a in tv.domain.no_reductions])


def bounds(extent: int, axis: StreamAxis, step: int, values: Values, rank: int, tv: TensorView):
    """Returns (start, length) of a step's block among `extent` indices."""
    count = int(sc.evaluate(axis.count, values))
    if axis.swizzle is not None:
        assert tv.mesh is not None
        step = (step + tv.mesh.coordinate(rank, axis.swizzle)) % count
    size = -(-extent // count)
    start = min(step * size, extent)
    return start, min(size, extent - start)


def _step(
    group: list[Unit], step: Step, values: Values, tensors: dict[int, Local], execute: Execute
) -> None:
    for unit in group:
        op = unit.exprs[0]
        if isinstance(op, Reshard) and (scatters_steps(op) or is_exchange(op)):
            _send(op, step[ParallelType.stream], values, tensors)
            continue
        blocks: dict[int, Local] = {}
        full: set[bool] = set()
        into: dict[int, dict[TensorView, torch.Tensor]] = {}
        for rank, mine in tensors.items():
            blocks[rank] = {v: mine[v] for v in unit.inputs}
            into[rank] = {}
            for out in unit.outputs:
                axes = {axis.ptype: axis for axis in stream_axes(out)}
                assert axes
                target = mine[out]
                for ptype, axis in axes.items():
                    extent = mine[out].shape[axis.position]
                    start, length = bounds(extent, axis, step[ptype], values, rank, out)
                    target = target.narrow(axis.position, start, length)
                    if not axis.is_logical or len(axes) == 1:
                        full.add(length * int(sc.evaluate(axis.count, values)) >= extent)
                into[rank][out] = target
                for v, places in needed_parts(unit).items():
                    blocks[rank][v] = mine[v]
                    for p, ptype in places.items():
                        extent = mine[v].shape[p]
                        where = bounds(extent, axes[ptype], step[ptype], values, rank, out)
                        blocks[rank][v] = blocks[rank][v].narrow(p, *where)
        if all(t.numel() == 0 for mine in into.values() for t in mine.values()):
            continue
        if isinstance(op, Reshard) and communicates(op):
            for tv, parts in ((op.inp, blocks), (op.out, into)):
                if is_allocated_per_step(tv) or stream_axis(tv) is None:
                    continue
                _check_dense(tv, tensors, parts)
        # Ranks may be at different blocks: of a rotation all blocks are equally large.
        assert len(full) < 2, op
        block: Block = "first" if all(full) else "last"
        if isinstance(op, Reshard) and is_device_to_stream(op):
            _bring(op, step[ParallelType.stream], values, blocks)
        elif isinstance(op, Reshard) and communication_type(op) == "StepSlice":
            for mine in blocks.values():
                mine[op.out] = mine[op.inp]
        else:
            execute(unit, blocks, block)
        for rank, outs in into.items():
            for out, target in outs.items():
                expected = tuple(int(sc.evaluate(n, values)) for n in block_extents(out, block))
                assert tuple(blocks[rank][out].shape) == tuple(target.shape) == expected, out
                target.copy_(blocks[rank][out])


def _send(op: Reshard, step: int, values: Values, tensors: dict[int, Local]) -> None:
    """Copies each rank's block of this step to the rank that owns it; sums if it is a
    reduction.
    """
    axis = stream_axis(op.inp)
    assert axis is not None
    blocks: dict[int, torch.Tensor] = {}
    for rank, mine in tensors.items():
        start, length = bounds(mine[op.inp].shape[axis.position], axis, step, values, rank, op.inp)
        blocks[rank] = mine[op.inp].narrow(axis.position, start, length)
    if not is_allocated_per_step(op.inp):
        _check_dense(op.inp, tensors, {rank: {op.inp: b} for rank, b in blocks.items()})
    for rank, block in blocks.items():
        team = team_of(op).ranks(rank)
        assert len(team) == int(sc.evaluate(axis.count, values))
        assert op.source is not None
        place = team.index(rank)
        owner = team[(step + (place if axis.swizzle else 0)) % len(team)]
        theirs = tensors[owner][op.out]
        if op.reduction is None:
            size = block.shape[op.source]
            theirs.narrow(op.source, place * size, size).copy_(block)
        elif rank == owner:
            assert op.reduction == "add" and axis.swizzle is None
            theirs.copy_(torch.stack([blocks[r].squeeze(op.source) for r in team]).sum(0))


def _check_dense(tv: TensorView, tensors: dict[int, Local], parts: dict[int, Local]) -> None:
    """Checks that the blocks to send are dense in the declared memory order."""
    order = [p for p, _ in memory_order(tv)]
    for rank, mine in tensors.items():
        whole, part = mine[tv], parts[rank][tv]
        placed = torch.empty([whole.shape[p] for p in order], dtype=whole.dtype)
        block = placed[tuple(slice(part.shape[p]) for p in order)]
        assert block.is_contiguous(), (tv, order, part.shape)


def needed_parts(unit: Unit) -> dict[TensorView, dict[int, ParallelType]]:
    """Returns, for each operand, the axes of which a step of the unit sees one block.

    Each axis has the stream type that numbers its blocks.
    """
    found: dict[TensorView, dict[int, ParallelType]] = {}
    for op in unit.exprs:
        for index, operand in tensor_operands(op):
            cuts = needed_blocks(op, index)
            needed = {p: c.ptype for p, mine in cuts.items() for c in mine if c.ptype.is_stream}
            if operand not in unit.inputs or not needed:
                continue
            if isinstance(op, Reshard) and is_device_to_stream(op):
                continue
            is_slice = isinstance(op, Reshard) and communication_type(op) == "StepSlice"
            assert is_slice or is_in_step(op, index), (op, index)
            assert found.setdefault(operand, needed) == needed, (op, index)
    return found


def _bring(op: Reshard, step: int, values: Values, blocks: dict[int, Local]) -> None:
    """Copies the block of one device, which depends on the step, to each rank."""
    axis = stream_axis(op.out)
    assert axis is not None and op.inp.mesh is not None
    given = {rank: mine[op.inp] for rank, mine in blocks.items()}
    for rank, mine in blocks.items():
        team = team_of(op).ranks(rank)
        shift = op.inp.mesh.coordinate(rank, axis.swizzle) if axis.swizzle else 0
        assert len(team) == int(sc.evaluate(axis.count, values))
        mine[op.out] = given[team[(step + shift) % len(team)]]
