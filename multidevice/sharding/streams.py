"""What host programs ask about streams: which axis, in which memory, in which loop.

A tensor with a stream axis is computed in steps, one per block of the axis; `shard_fusion` has seen
to it that an op in steps finds, of every operand, its blocks or the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fuser.ir.axis_graph import AxisGraph, tensor_operands
from fuser.ir.fusion import Fusion, TensorOp
from fuser.ir.ops.nodes import Reshard
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.tensor import TensorView
from fuser.ir.types import LoadStoreOpType, ParallelType
from fuser.passes.view_ops import VIEW_OPS, is_copy
from multidevice.sharding.placement import (
    Block,
    is_allocated_per_step,
    local_extent,
    placement,
    step_parts,
    stream_cuts,
)
from multidevice.sharding.queries import has_streams, local_extents
from multidevice.sharding.reshard import is_same_cut, is_step_slice, moved_axes
from multidevice.sharding.stream_steps import is_in_step


@dataclass(frozen=True)
class StreamAxis:
    """The axis along which a tensor is computed in steps.

    `position`: of the logical axis, reductions left out. `count`: the number of steps.
    `is_logical`: the axis itself has the type, a step is one index; else a step is a block of
    ceilDiv(n, count) of the device's n indices: the last may be shorter, and those behind it empty.
    `swizzle`: step i has block (i + my coordinate along this device type) % count; None: block i.
    """

    position: int
    count: Scalar
    is_logical: bool
    swizzle: ParallelType | None = None
    ptype: ParallelType = ParallelType.stream


def stream_axes(tv: TensorView) -> tuple[StreamAxis, ...]:
    """Return the stream axis of a tensor, () for one that is computed at once; of a merged one the
    axes that it merges, the outermost part of a step's number first."""
    positions = {a.number: p for p, a in enumerate(tv.domain.no_reductions)}
    return tuple(
        StreamAxis(positions[n], sc.as_scalar(cut.count), cut.whole, cut.swizzle, cut.ptype)
        for n, cut in stream_cuts(tv)
        if n in positions
    )


def stream_axis(tv: TensorView) -> StreamAxis | None:
    """Return the stream axis of a tensor, None for one that is computed at once; of a merged one
    the first."""
    return next(iter(stream_axes(tv)), None)


def block_extents(tv: TensorView, block: Block = "first") -> tuple[Scalar, ...]:
    """Return the symbolic shape of one step's block of a device's shard, without reductions.

    "first": of all steps but the last that has elements, which may be shorter (and any behind it
    has none: "empty"); "last": of that one. An axis that is a stream as a whole has 1.
    """
    axes = zip(tv.domain.no_reductions, placement(tv), strict=True)
    return tuple(local_extent(tv.fusion.canonical(a.size), cuts, block) for a, cuts in axes)


def held_extents(tv: TensorView) -> tuple[Scalar, ...]:
    """Return the shape of what one allocation of the tensor holds: a block, or a device's shard."""
    return block_extents(tv) if is_allocated_per_step(tv) else local_extents(tv)


def scatters_steps(op: TensorOp) -> bool:
    """Whether each step of the operand's loop computes what one device gets of the result.

    t [DIDx(K), stream(M), N], out [DIDx(M), N] = Reshard(t, ..., op = add)
    """
    if not isinstance(op, Reshard) or op.reduction is None or op.target is None:
        return False
    axis = stream_axis(op.inp)
    if axis is None or axis.swizzle is not None or stream_axis(op.out) is not None:
        return False
    if len(stream_axes(op.inp)) > 1:
        return False
    if axis.position != moved_axes(op)[0]:
        return False
    return is_same_cut(placement(op.inp)[axis.position], placement(op.out)[op.target])


@dataclass(frozen=True)
class StreamLoop:
    """Ops that may run in one loop over steps: `axes` stand for their stream axes, which are all
    mapped, and no op of loop `order` needs what a later loop, or the whole of what this one, makes.
    What scatters the steps of a loop is part of it.
    """

    axes: tuple[int, ...]
    order: int


class StreamLoops:
    """Which ops of a sharded fusion run in steps, and which of them may share a loop.

    Two ops share one when their axes map and every path between them stays in step: nothing on it
    needs a tensor of the loop as a whole. So making one node of each loop leaves the program
    without cycles, also when unrelated ops stand between.
    """

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion
        # What is proved once.
        self._steps: dict[TensorView, bool] = {}
        self._proved: dict[tuple[TensorOp, int], bool] = {}
        self._order: dict[TensorOp, int] = {}
        self._loop: dict[TensorOp, StreamLoop] = {}
        if not has_streams(fusion):
            return
        self._graph = AxisGraph(fusion)
        self._same: dict[int, int] = {}
        for op in fusion.exprs:
            for index, operand in tensor_operands(op):
                if self._has_steps(op.out_tensor) and self._is_in_step(op, index):
                    self._map_steps(operand, op.out_tensor)
        for op in fusion.exprs:
            made_by = [d for d, _ in self._sources(op)]
            after = [self._order[d] + self._leaves(d, op) for d in made_by]
            self._order[op] = max(after, default=0)
        # As late as its readers allow: what is read in step runs with its readers.
        for op in reversed(fusion.exprs):
            readers = {u for out in op.outputs for u in fusion.uses(out)}
            before = [self._order[u] - self._leaves(op, u) for u in readers]
            self._order[op] = min(before, default=self._order[op])
        for op in fusion.exprs:
            stepping = op.inputs[0] if scatters_steps(op) else op.out_tensor
            if self._has_steps(stepping):
                self._loop[op] = StreamLoop(self._axes(stepping), self._order[op])

    def loop_of(self, op: TensorOp) -> StreamLoop | None:
        """Return the loop in which the op runs, None for an op that is computed at once."""
        return self._loop.get(op)

    def may_share_kernel(self, a: TensorOp, b: TensorOp) -> bool:
        """Whether two ops run in the same loop; or both in none, with no loop between them."""
        is_loop = self._loop.get(a) == self._loop.get(b)
        return is_loop and self._order.get(a) == self._order.get(b)

    def fits_in_loop(self, tv: TensorView) -> bool:
        """Whether nothing but steps of the tensor's own loop read it, each its own block."""
        definition = self._fusion.definition(tv)
        loop = None if definition is None else self._loop.get(definition)
        return loop is not None and all(
            self._loop.get(op) == loop and (scatters_steps(op) or self._is_in_step(op, index))
            for op in self._fusion.uses(tv)
            for index, operand in tensor_operands(op)
            if operand is tv
        )

    def _has_steps(self, tv: TensorView) -> bool:
        if tv not in self._steps:
            self._steps[tv] = stream_axis(tv) is not None
        return self._steps[tv]

    def _is_in_step(self, op: TensorOp, index: int) -> bool:
        if (op, index) not in self._proved:
            self._proved[op, index] = is_in_step(op, index)
        return self._proved[op, index]

    def _map_steps(self, operand: TensorView, out: TensorView) -> None:
        mine, theirs = self._parts(operand), self._parts(out)
        for ptype in mine.keys() & theirs.keys():
            a, b = mine[ptype], theirs[ptype]
            if a != b:
                self._same[max(a, b)] = min(a, b)

    def _parts(self, tv: TensorView) -> dict[ParallelType, int]:
        """Return what stands for each stream axis of a tensor."""
        found: dict[ParallelType, int] = {}
        for axis in tv.domain.loop:
            if axis.is_stream:
                number = self._graph.find(axis)
                while number in self._same:
                    number = self._same[number]
                found.setdefault(axis.ptype, number)
        return found

    def _axes(self, tv: TensorView) -> tuple[int, ...]:
        made_by = tv.definition()
        if made_by is not None and is_step_slice(made_by):
            # A slice that lacks some of the merged axes is one of its reader's loop.
            readers = (op.out_tensor for op in self._fusion.uses(tv))
            tv = max((tv, *readers), key=lambda t: len(step_parts(t)))
        return tuple(self._parts(tv)[ptype] for ptype in step_parts(tv))

    def _sources(self, op: TensorOp) -> Iterator[tuple[TensorOp, int]]:
        """Yield the ops that make the op's operands, with the operands' indices."""
        for index, operand in tensor_operands(op):
            made_by = self._fusion.definition(operand)
            if made_by is not None:
                yield made_by, index

    def _leaves(self, op: TensorOp, reader: TensorOp) -> bool:
        """Whether a reader needs more of an op in steps than its own step's block."""
        if scatters_steps(op):
            return True
        if not self._has_steps(op.out_tensor) or scatters_steps(reader):
            return False
        if not self._has_steps(reader.out_tensor):
            return True
        if self._axes(op.out_tensor) != self._axes(reader.out_tensor):
            return True
        return not all(self._is_in_step(reader, i) for d, i in self._sources(reader) if d is op)


def allocated_per_step(fusion: Fusion) -> set[TensorView]:
    """Return the intermediates that nothing reads but steps of their own loop, each its block.

    Inputs and outputs are none: callers are outside of the loop; neither is a tensor of which a
    step is one index, nor the slices of another. A view of a tensor in memory is in memory like it.
    """
    loops = StreamLoops(fusion)
    outside = {*fusion.inputs, *fusion.outputs}
    found = {
        tv
        for tv in fusion.tensors()
        if tv not in outside and loops.fits_in_loop(tv) and _may_have_blocks(tv)
    }
    views = [(op.inputs[0], op.out_tensor) for op in fusion.exprs if _may_be_view(op)]
    changed = True
    while changed:
        mixed = {tv for pair in views if len(found.intersection(pair)) == 1 for tv in pair}
        changed = bool(found & mixed)
        found -= mixed
    return found


def _may_have_blocks(tv: TensorView) -> bool:
    axes, definition = stream_axes(tv), tv.definition()
    is_slice = definition is not None and is_step_slice(definition)
    return len(axes) == 1 and not axes[0].is_logical and not is_slice


def _may_be_view(op: TensorOp) -> bool:
    is_set = is_copy(op) and op.kind is LoadStoreOpType.set
    return isinstance(op, VIEW_OPS) and not is_set
