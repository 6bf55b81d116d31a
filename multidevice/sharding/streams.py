"""Questions about streams in host programs: which axis, in which memory, in which loop.

A tensor with a stream axis is computed in steps, one per block of the axis; `shard_fusion` has seen
to it that an op in steps finds, of every operand, its blocks or the whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from fuser.ir.axis_graph import AxisGraph, mapped_axes, tensor_operands
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.memory_layout import copy_memory_order
from fuser.ir.naming import axis_words, in_ir, tensor_words
from fuser.ir.ops.nodes import LibraryOp, LoadStoreOp, ReductionOp, Reshard
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import STREAM_TYPES, LoadStoreOpType, ParallelType
from fuser.passes.view_ops import VIEW_OPS, is_copy
from fuser.support.errors import UnsupportedError, user_code
from multidevice.sharding.placement import (
    SPREAD_TYPES,
    Block,
    Cut,
    Cuts,
    Placement,
    add_cuts,
    axis_cuts,
    clone_domain,
    copy_like,
    cut_origin,
    is_allocated_per_step,
    is_plain_broadcast,
    local_extent,
    outside_streams,
    placement,
    sharded_axis,
    spread_axes,
    step_parts,
    stream_axis_of,
    stream_cuts,
    unparallelize,
    unparallelize_inward,
    without_streams,
)
from multidevice.sharding.propagation import backward_cuts, is_from_devices, uncuttable_axes
from multidevice.sharding.queries import (
    has_streams,
    have_different_shardings,
    is_resharding,
    local_extents,
)
from multidevice.sharding.reshard import (
    exchanged_axes,
    is_same_cut,
    is_step_slice,
    moved_axes,
    replace_operand,
)


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
    """Returns the stream axis of a tensor, () for one that is computed at once; of a merged one the
    axes that it merges, the outermost part of a step's number first."""
    positions = {a.number: p for p, a in enumerate(tv.domain.no_reductions)}
    return tuple(
        StreamAxis(positions[n], sc.as_scalar(cut.count), cut.whole, cut.swizzle, cut.ptype)
        for n, cut in stream_cuts(tv)
        if n in positions
    )


def stream_axis(tv: TensorView) -> StreamAxis | None:
    """Returns the stream axis of a tensor, None for one that is computed at once; of a merged one
    the first."""
    return next(iter(stream_axes(tv)), None)


def dropped_axes_of(tv: TensorView, rank: int) -> tuple[int, ...]:
    """Returns the axes of a kernel's operand `tv` that a slice of this rank lacks, in order."""
    whole = sorted(s.position for s in stream_axes(tv) if s.is_logical)
    return tuple(whole) if tv.ndim - rank == len(whole) else ()


def block_extents(tv: TensorView, block: Block = "first") -> tuple[Scalar, ...]:
    """Returns the symbolic shape of one step's block of a device's shard, without reductions.

    "first": of all steps but the last that has elements, which may be shorter (and any behind it
    has none: "empty"); "last": of that one. An axis that is a stream as a whole has 1.
    """
    axes = zip(tv.domain.no_reductions, placement(tv), strict=True)
    return tuple(local_extent(tv.fusion.canonical(a.size), cuts, block) for a, cuts in axes)


def held_extents(tv: TensorView) -> tuple[Scalar, ...]:
    """Returns the shape of what one allocation of the tensor holds: a block, or a device's
    shard."""
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
    """The ops of a sharded fusion that run in steps, and those of them that may share a loop.

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
        """Returns the loop in which the op runs, None for an op that is computed at once."""
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
        """Returns what stands for each stream axis of a tensor."""
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
        """Yields the ops that make the op's operands, with the operands' indices."""
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
    """Returns the intermediates that nothing reads but steps of their own loop, each its block.

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


def is_single(tv: TensorView, position: int, *, in_steps: bool) -> bool:
    """Whether a device's shard of a tensor, or a step's block of it, has one element along an axis:
    then the axis may be anywhere in memory."""
    axis = tv.domain.no_reductions[position]
    if is_plain_broadcast(axis) or sc.int_value(axis.size) == 1:
        return True
    return any(c.whole and (in_steps or c.ptype.is_device) for c in placement(tv)[position])


class StepMemory:
    """The place of a step's block of a tensor in memory, and whether it has gaps.

        y [istream{3}(i0), i1]     memory order (0, 1): dense     (1, 0): a block has gaps in y,
                                   but not where each step has memory of its own

    The tensors with such memory are found anew when the ops of the fusion have changed.
    """

    def __init__(self, fusion: Fusion) -> None:
        self.fusion = fusion
        self._exprs: tuple[TensorOp, ...] | None = None
        self._own: set[TensorView] = set()

    def is_dense(self, tv: TensorView, order: Sequence[int]) -> bool:
        """Whether one step's block of a tensor with this memory order has no gaps."""
        return _is_dense_in_whole(tv, order) or tv in self._with_own_memory()

    def _with_own_memory(self) -> set[TensorView]:
        if self._exprs is not self.fusion.exprs:
            self._exprs, self._own = self.fusion.exprs, allocated_per_step(self.fusion)
        return self._own


def steps_outermost(tv: TensorView, order: list[int]) -> list[int]:
    """Returns the memory order with a stream outermost of which a step is one index, or one of each
    of the axes that it merges: its blocks lie in memory of the whole."""
    streams = [s.position for s in stream_axes(tv) if s.is_logical]
    if not streams or _is_dense_in_whole(tv, order):
        return order
    return [*(p for p in order if p in streams), *(p for p in order if p not in streams)]


def _is_dense_in_whole(tv: TensorView, order: Sequence[int]) -> bool:
    """Whether one step's block of a tensor with this memory order has no gaps in the whole."""
    streams = stream_axes(tv)
    assert streams, f"{tv} is not computed in steps"
    outside = order[: max(order.index(s.position) for s in streams)]
    return all(is_single(tv, p, in_steps=True) for p in outside)


# ----------------------------------------------------------------------
# Streams: what can be computed in steps, and with which block of each operand.
#
# A tensor with a stream axis is computed block by block, one step of a loop for each. An op can be
# computed so when one block of the result needs, of every operand, one block or the whole.


# ------------------------------------------------------------------ one op
def _stream_positions(tv: TensorView) -> list[tuple[int, Cut]]:
    """Returns (position among all logical axes, cut) of the stream axis, or of all parts of it."""
    return [(tv.domain.logical_numbers.index(n), cut) for n, cut in stream_cuts(tv)]


def _is_one_step(op: TensorOp) -> bool:
    return isinstance(op, LibraryOp) and not op.RUNS_IN_STEPS


def is_computable_in_steps(op: TensorOp) -> bool:
    """Whether blocks along the stream axis of an op's results come from blocks of its operands.

    True without stream axes.
    """
    if _is_one_step(op):
        return not any(map(_stream_positions, op.outputs))
    first = _stream_positions(op.out_tensor)
    if any(_stream_positions(out) != first for out in op.outputs[1:]):
        return False
    if not first:
        return True
    streamed = {number for number, _ in stream_cuts(op.out_tensor)}
    return streamed.isdisjoint(uncuttable_axes(op, SPREAD_TYPES))


def needed_blocks(op: TensorOp, index: int) -> dict[int, Cuts]:
    """Returns of which axes of a tensor operand (positions without reductions) a step of the op
    needs one block, and those axes' cuts, the stream's included; {} where it needs the whole.
    """
    exchanged = exchanged_axes(op)
    if exchanged is not None:
        # The block that is sent, not the one that is received.
        return {exchanged[1]: placement(op.inputs[index])[exchanged[1]]}
    axes = op.inputs[index].domain.no_reductions
    return {
        axes.index(axis): cuts
        for axis, cuts in backward_cuts(op, index, op.out_tensor)
        if any(c.ptype.is_stream for c in cuts)
    }


def is_in_step(op: TensorOp, index: int) -> bool:
    """Whether the blocks that the steps of an op need of an operand are the operand's own."""
    operand = op.inputs[index]
    needed, found = needed_blocks(op, index), stream_cuts(operand)
    if not needed or not found:
        return False
    if exchanged_axes(op) is not None:
        return True
    made_by = operand.definition()
    if made_by is not None and exchanged_axes(made_by) is not None:
        return False  # a step has received another block than it has computed
    axes = operand.domain.no_reductions
    if {axes[p].number for p in needed} != {number for number, _ in found}:
        return False
    # Blocks of one index may be counted with empty ones behind them, or without; and with an axis
    # of extent 1, or without.
    by_number = {axes[p].number: cuts for p, cuts in needed.items()}
    are_cuts = all(
        any((c.ptype, c.count, c.whole) == (mine.ptype, mine.count, mine.whole) for c in cuts)
        for number, mine in found
        for cuts in (by_number[number],)
    )
    return are_cuts and not have_different_shardings(op, index, STREAM_TYPES)


# ------------------------------------------------------------------ passes
def drop_steps_of_devices(fusion: Fusion) -> None:
    """Takes the stream from every reduced axis of which a device has one index: it has no steps.

    c [DIDx, stream, N], out [rstream, DIDx, N] = sum(c)   ->   out [r, DIDx, N]
    Users write it to say that the steps of `c` are reduced one by one, which `c` says as well.
    """
    for op in fusion.exprs:
        if not isinstance(op, ReductionOp):
            continue
        reduced = [a for a in op.out.domain.logical if a.is_reduction() and a.is_stream]
        source = {c.number: p for p, c in mapped_axes(op, 0)} if reduced else {}
        for axis in reduced:
            if source[axis.number].is_device:
                op.out.parallelize_axis(axis, ParallelType.serial)


def keep_computable_streams(fusion: Fusion, *, asked: Collection[TensorView] = ()) -> None:
    """Takes the stream axis from every result that cannot be computed in steps along it, and the
    devices' blocks inside of it.

    Raises `UnsupportedError` naming op and axis when the user asked for it.
    """
    for op in fusion.exprs:
        if is_computable_in_steps(op):
            continue
        for out in op.outputs:
            if out in asked:
                raise _not_computable(op, out)
            unparallelize_inward(out, lambda a: a.is_stream)


def slice_operands(fusion: Fusion) -> None:
    """Gives every op that is computed in steps its operands in the blocks that the steps need.

        y [stream(M), N] = add(x [M, N], b)  ->  s [stream(M), N] = Reshard(x, along stream)
                                                 y = add(s, b)

    Afterwards an operand of such an op is in step with it, or used whole. Where the steps of a
    communication need other blocks than the devices have, it comes first, as a whole; so does one
    between devices that are at different blocks, because each starts with its own; and an op, a
    reshape, whose blocks nobody can prove to be blocks of its operands.
    """
    made: _Slices = {}
    for op in fusion.exprs:
        _feed_steps(fusion, op, made)


def slice_per_loop(fusion: Fusion) -> None:
    """Gives every loop slices of its own: outside of a loop, a slice names nothing."""
    slices = [op for op in fusion.exprs if isinstance(op, Reshard) and is_step_slice(op)]
    if not slices:
        return
    loops = StreamLoops(fusion)
    loop_of = {out: loops.loop_of(op) for op in fusion.exprs for out in op.outputs}
    for op in slices:
        made = {loop_of[op.out]: op.out}
        for reader in fusion.uses(op.out):
            loop = loop_of[reader.out_tensor]
            if loop not in made:
                domain, _ = clone_domain(fusion, op.out.domain)
                made[loop] = fusion.new_tensor(domain, op.out.dtype(), mesh=op.out.mesh)
                fusion.insert_before(reader, [op.replace(out=made[loop])])
            if made[loop] is not op.out:
                fusion.replace_uses(op.out, made[loop], where=lambda e, r=reader: e is r)


# A whole, how its slices are cut, and the op that they are for if they are for that one alone.
_Slices = dict[tuple[TensorView, Placement, TensorOp | None], TensorView]


def _feed_steps(fusion: Fusion, op: TensorOp, made: _Slices) -> None:
    if stream_axis_of(op.out_tensor) is None:
        return
    is_whole = _mixes_rotated_steps(op) or _moves_blocks_of_merged_axes(op)
    slices = None if is_whole else _find_slices(op, made)
    if slices is None:
        for part in _compute_first(fusion, op):
            _feed_steps(fusion, part, made)
        return
    fed = op
    for index, (block, position) in slices.items():
        operand = op.inputs[index]
        key = _slice_key(op, operand, placement(block))
        if key not in made:
            made[key] = block
            copy_memory_order(operand, block)
            slicing = Reshard(block, operand, ptypes=step_parts(block), target=position)
            fusion.insert_before(op, [slicing.replace(where=op.where)])
        fed = replace_operand(fed, index, made[key])
    if slices:
        fusion.replace_expr(op, [fed])


def _slice_key(
    op: TensorOp, operand: TensorView, cuts: Placement
) -> tuple[TensorView, Placement, TensorOp | None]:
    """Returns what slices are found by: the parts of a merged axis that an operand has do not say,
    alone, which step has which block."""
    parts = {c.ptype for mine in cuts for c in mine if c.ptype.is_stream}
    return operand, cuts, None if parts == {*step_parts(op.out_tensor)} else op


def _mixes_rotated_steps(op: TensorOp) -> bool:
    """Whether devices that are at different blocks in the same step would communicate."""
    found = stream_axis_of(op.out_tensor)
    by = None if found is None else found[1].swizzle
    if by is None or not is_resharding(op) or exchanged_axes(op) is not None:
        return False
    for index, operand in tensor_operands(op):
        is_ring = _is_ring(op, index)
        is_gathered = sharded_axis(operand, by) and have_different_shardings(op, index, (by,))
        if is_gathered and not (is_copy(op) and is_ring):
            return True
    return False


def _moves_blocks_of_merged_axes(op: TensorOp) -> bool:
    """Whether devices would communicate in steps of elements of one axis and blocks of another:
    these have gaps in memory of the whole, and steps have none of their own."""
    cuts = [cut for _, cut in stream_cuts(op.out_tensor)]
    return len(cuts) > 1 and not all(cut.whole for cut in cuts) and is_resharding(op)


def _find_slices(op: TensorOp, made: _Slices) -> dict[int, tuple[TensorView, int]] | None:
    """Returns, by number, which block a step needs of each operand that is not in step, and the
    axis to slice; None where some cannot be sliced."""
    found: dict[int, tuple[TensorView, int]] = {}
    for index, operand in tensor_operands(op):
        needed, have = needed_blocks(op, index), placement(operand)
        if not needed or (is_in_step(op, index) and not _is_read_both_ways(operand)):
            continue
        if is_resharding(op):
            if is_copy(op) and _is_ring(op, index):
                continue
            for position, cuts in needed.items():
                depth = len(outside_streams(cuts))
                if outside_streams(have[position]) != cuts[:depth]:
                    return None
                # The devices inside of a step are what it is about.
                needed[position] = (*cuts[: depth + 1], *have[position][depth + 1 :])
        wanted = tuple(needed.get(p) or outside_streams(c) for p, c in enumerate(have))
        known = made.get(_slice_key(op, operand, wanted))
        block = known or copy_like(operand, operand.mesh, wanted)
        if have_different_shardings(replace_operand(op, index, block), index, STREAM_TYPES):
            return None  # the same blocks, perhaps, but nobody can prove it
        found[index] = block, min(needed)
    return found


def _is_ring(op: TensorOp, index: int) -> bool:
    """Whether each step of the op would bring the block of one device."""
    needed = needed_blocks(op, index)
    if len(needed) != 1 or len(step_parts(op.out_tensor)) != 1:
        return False
    ((position, cuts),) = needed.items()
    return is_from_devices(op.inputs[index], position, cuts, op.out_tensor.mesh)


def _is_read_both_ways(tv: TensorView) -> bool:
    """Whether steps read a tensor's own blocks and steps read the whole: one kernel may do both,
    and has to get both. A communication stands for itself.
    """
    ways = {
        is_in_step(op, index)
        for op in tv.fusion.uses(tv)
        if stream_axis_of(op.out_tensor) is not None and not is_resharding(op)
        for index, operand in tensor_operands(op)
        if operand is tv
    }
    return len(ways) > 1


def _compute_first(fusion: Fusion, op: TensorOp) -> list[TensorOp]:
    """Computes an op at once, and copies its results in steps; returns the ops that do so.

    Where devices share each step, the op is computed in steps that are the same on all.
    """
    first, copies = op, list[TensorOp]()
    for out in op.outputs:
        domain, _ = clone_domain(fusion, out.domain)
        whole = fusion.new_tensor(domain.in_logical_order(), out.dtype(), mesh=out.mesh)
        _leave_steps(op, whole)
        out.domain = out.domain.without_root()
        first = first.map_values(lambda v, o=out, w=whole: w if v is o else v)
        copies.append(LoadStoreOp(out, whole).replace(where=op.where))
    fusion.replace_expr(op, [first, *copies])
    return [first, *copies]


def _leave_steps(op: TensorOp, out: TensorView) -> None:
    number = stream_cuts(out)[0][0]
    cuts = axis_cuts(out)[number]
    if without_streams(cuts) != cuts:
        unparallelize(out, lambda a: a.is_stream)
        return
    aligned = tuple(replace(c, swizzle=None) for c in cuts)
    if aligned == cuts:
        raise _not_computable(op, out)
    mine = {a.number for a in spread_axes(out) if cut_origin(out, a)[0] == number}
    unparallelize(out, lambda a: a.number in mine)
    add_cuts(out, number, aligned)


def _not_computable(op: TensorOp, out: TensorView) -> UnsupportedError:
    uncuttable = uncuttable_axes(op, SPREAD_TYPES)
    types = [cut.ptype for number, cut in stream_cuts(out) if number in uncuttable]
    streams = [a for a in out.domain.loop if a.is_stream]
    axis = next((a for a in streams if a.ptype in types), streams[0])
    others = [o for o in op.outputs if _stream_positions(o) != _stream_positions(out)]
    why = "a block of the result is not made from blocks of the operands"
    if others and not types and not _is_one_step(op):
        why = f"the same steps make {tensor_words(others[0])}, which does not stand on it"
    return UnsupportedError(
        f"{op.name} cannot be computed in steps along {axis_words(out, axis)}: {why}"
        f"{user_code(op.where)}{in_ir(axis, out)}"
    )
