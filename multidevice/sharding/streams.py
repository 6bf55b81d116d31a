"""Streams in fusions: which axis of a tensor is computed in steps, in which memory, in which loop.

A tensor with a stream axis is computed in steps, one per block of the axis. `shard_fusion` makes
sure that an op in steps reads, of every operand, either the block of the same step or the whole.
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

    - `position`: the position of the logical axis, without reductions.
    - `count`: the number of steps.
    - `is_logical`: the axis itself has the type, and a step is one index. Otherwise a step is a
      block of ceilDiv(n, count) of the device's n indices. The last block may be shorter; blocks
      after it are empty.
    - `swizzle`: step i has block (i + this device's coordinate along the type) % count; None: block
      i.
    """

    position: int
    count: Scalar
    is_logical: bool
    swizzle: ParallelType | None = None
    ptype: ParallelType = ParallelType.stream


def stream_axes(tv: TensorView) -> tuple[StreamAxis, ...]:
    """Returns the stream axes of a tensor, () for one that is computed at once.

    A merged stream axis has several; the outermost part of a step's number is first.
    """
    positions = {a.number: p for p, a in enumerate(tv.domain.no_reductions)}
    return tuple(
        StreamAxis(positions[n], sc.as_scalar(cut.count), cut.whole, cut.swizzle, cut.ptype)
        for n, cut in stream_cuts(tv)
        if n in positions
    )


def stream_axis(tv: TensorView) -> StreamAxis | None:
    """Returns the first stream axis of a tensor, None for one that is computed at once."""
    return next(iter(stream_axes(tv)), None)


def dropped_axes_of(tv: TensorView, rank: int) -> tuple[int, ...]:
    """Returns the axes of a kernel's operand `tv` that a slice with `rank` dimensions lacks, in
    order.
    """
    whole = sorted(s.position for s in stream_axes(tv) if s.is_logical)
    return tuple(whole) if tv.ndim - rank == len(whole) else ()


def block_extents(tv: TensorView, block: Block = "first") -> tuple[Scalar, ...]:
    """Returns the symbolic shape of one step's block of a device's shard, without reductions.

    `block` selects the step:

    - "last": the last step that has elements; its block may be shorter than the others;
    - "first": any step before it;
    - "empty": a step after it.

    An axis that is a stream as a whole has extent 1.
    """
    axes = zip(tv.domain.no_reductions, placement(tv), strict=True)
    return tuple(local_extent(tv.fusion.canonical(a.size), cuts, block) for a, cuts in axes)


def held_extents(tv: TensorView) -> tuple[Scalar, ...]:
    """Returns the shape of one allocation of the tensor: of a step's block, or of a device's
    shard.
    """
    return block_extents(tv) if is_allocated_per_step(tv) else local_extents(tv)


def scatters_steps(op: TensorOp) -> bool:
    """Whether each step of the operand's loop computes the part of the result of one device.

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
    """A loop over steps that ops may share.

    `axes` identify the stream axes of the ops, which are all mapped to each other. No op of a loop
    with a given `order` needs a result of a later loop, or the whole of a result of this one. An op
    that scatters the steps of a loop belongs to it.
    """

    axes: tuple[int, ...]
    order: int


class StreamLoops:
    """The ops of a sharded fusion that run in steps, and the loops that they may share.

    Two ops may share a loop when their stream axes correspond and no op on a path between them
    needs a whole tensor that the loop computes. Then replacing each loop by one node makes no cycle
    in the program, also when unrelated ops are between them.
    """

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion
        # Caches of proofs.
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
        # Schedule each op as late as its readers allow: an op that is read in step runs with its
        # readers.
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
        """Whether two ops run in the same loop, or both in none with no loop between them."""
        is_loop = self._loop.get(a) == self._loop.get(b)
        return is_loop and self._order.get(a) == self._order.get(b)

    def fits_in_loop(self, tv: TensorView) -> bool:
        """Whether only steps of the tensor's own loop read it, each its own block."""
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
        """Returns the representative of each stream axis of a tensor, by type."""
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
            # A slice that lacks some of the merged axes belongs to the loop of its reader.
            readers = (op.out_tensor for op in self._fusion.uses(tv))
            tv = max((tv, *readers), key=lambda t: len(step_parts(t)))
        return tuple(self._parts(tv)[ptype] for ptype in step_parts(tv))

    def _sources(self, op: TensorOp) -> Iterator[tuple[TensorOp, int]]:
        """Yields the ops that define the op's operands, with the operands' indices."""
        for index, operand in tensor_operands(op):
            made_by = self._fusion.definition(operand)
            if made_by is not None:
                yield made_by, index

    def _leaves(self, op: TensorOp, reader: TensorOp) -> bool:
        """Whether a reader needs more of an op in steps than the block of its own step."""
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
    """Returns the intermediates that only steps of their own loop read, each its own block.

    Left out are inputs and outputs, because callers are outside the loop; tensors whose steps are
    single indices; and slices of other tensors. A view is allocated per step if and only if its
    tensor is.
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
    """Whether a device's shard of a tensor, or a step's block of it, has one element along an axis.

    Such an axis may be at any position in the memory order.
    """
    axis = tv.domain.no_reductions[position]
    if is_plain_broadcast(axis) or sc.int_value(axis.size) == 1:
        return True
    return any(c.whole and (in_steps or c.ptype.is_device) for c in placement(tv)[position])


class StepMemory:
    """Decides whether one step's block of a tensor is dense in memory.

        y [istream{3}(i0), i1]     memory order (0, 1): dense     (1, 0): a block has gaps in y,
                                   but not where each step has its own memory

    The set of tensors with memory per step is computed again when the ops of the fusion have
    changed.
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
    """Returns the memory order with the stream axes outermost whose steps are single indices.

    The blocks of these axes are in the memory of the whole tensor, and must be dense there.
    """
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
# Which ops can be computed in steps, and which block of each operand a step needs.
#
# A tensor with a stream axis is computed block by block, one step of a loop for each. An op can be
# computed so when one block of the result needs, of every operand, one block or the whole.


# ------------------------------------------------------------------ one op
def _stream_positions(tv: TensorView) -> list[tuple[int, Cut]]:
    """Returns (position among all logical axes, cut) of each stream axis."""
    return [(tv.domain.logical_numbers.index(n), cut) for n, cut in stream_cuts(tv)]


def _is_one_step(op: TensorOp) -> bool:
    return isinstance(op, LibraryOp) and not op.RUNS_IN_STEPS


def is_computable_in_steps(op: TensorOp) -> bool:
    """Whether blocks along the stream axis of an op's results depend only on blocks of its
    operands.

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
    """Returns the axes of a tensor operand of which a step of the op needs only one block.

    The keys are positions without reductions; the values are the cuts of these axes, including the
    stream's. Returns {} if a step needs the whole operand.
    """
    exchanged = exchanged_axes(op)
    if exchanged is not None:
        # An exchange needs the block that it sends, not the one that it receives.
        return {exchanged[1]: placement(op.inputs[index])[exchanged[1]]}
    axes = op.inputs[index].domain.no_reductions
    return {
        axes.index(axis): cuts
        for axis, cuts in backward_cuts(op, index, op.out_tensor)
        if any(c.ptype.is_stream for c in cuts)
    }


def is_in_step(op: TensorOp, index: int) -> bool:
    """Whether each step of an op needs exactly the block of the operand that has the same
    step.
    """
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
    # Two ways to count the same blocks are equal: blocks of one index with or without empty ones
    # after them, and with or without an axis of extent 1.
    by_number = {axes[p].number: cuts for p, cuts in needed.items()}
    are_cuts = all(
        any((c.ptype, c.count, c.whole) == (mine.ptype, mine.count, mine.whole) for c in cuts)
        for number, mine in found
        for cuts in (by_number[number],)
    )
    return are_cuts and not have_different_shardings(op, index, STREAM_TYPES)


# ------------------------------------------------------------------ passes
def drop_steps_of_devices(fusion: Fusion) -> None:
    """Removes the stream from every reduced axis of which a device has one index: it has no steps.

    c [DIDx, stream, N], out [rstream, DIDx, N] = sum(c)   ->   out [r, DIDx, N]
    Users write it to say that the steps of `c` are reduced one by one; the stream axis of `c` says
    the same.
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
    """Removes the stream axis from every result that cannot be computed in steps along it.

    Device cuts inside it are removed, too. Raises `UnsupportedError`, with op and axis, for a
    tensor in `asked`, where the user has put the stream axis.
    """
    for op in fusion.exprs:
        if is_computable_in_steps(op):
            continue
        for out in op.outputs:
            if out in asked:
                raise _not_computable(op, out)
            unparallelize_inward(out, lambda a: a.is_stream)


def slice_operands(fusion: Fusion) -> None:
    """Gives every op that is computed in steps its operands as the blocks that the steps need.

        y [stream(M), N] = add(x [M, N], b)  ->  s [stream(M), N] = Reshard(x, along stream)
                                                 y = add(s, b)

    Afterwards an operand of such an op is in step with it, or used whole. Three kinds of ops are
    computed first, as a whole, and their results are sliced:

    - a communication whose steps need other blocks than the devices have;
    - a communication between devices that are at different blocks, because each starts with its
      own;
    - an op such as a reshape whose blocks cannot be proved to be blocks of its operands.
    """
    made: _Slices = {}
    for op in fusion.exprs:
        _feed_steps(fusion, op, made)


def slice_per_loop(fusion: Fusion) -> None:
    """Gives every loop its own slices: a slice has no meaning outside its loop."""
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


# (whole tensor, cuts of its slices, the op if the slices are for that op alone) -> the slice.
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
    """Returns the key under which slices are cached.

    If the operand has only some parts of a merged axis, the key includes the op. The parts alone do
    not determine which step has which block.
    """
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
    """Whether devices would communicate in steps of single elements of one axis and blocks of
    another.

    These have gaps in the memory of the whole tensor, and the steps have no memory of their own.
    """
    cuts = [cut for _, cut in stream_cuts(op.out_tensor)]
    return len(cuts) > 1 and not all(cut.whole for cut in cuts) and is_resharding(op)


def _find_slices(op: TensorOp, made: _Slices) -> dict[int, tuple[TensorView, int]] | None:
    """Returns operand index -> (block that a step needs, position of the axis to slice).

    It has the operands that are not in step. Returns None where some operand cannot be sliced.
    """
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
                # The device cuts inside the step are the ones that the communication changes.
                needed[position] = (*cuts[: depth + 1], *have[position][depth + 1 :])
        wanted = tuple(needed.get(p) or outside_streams(c) for p, c in enumerate(have))
        known = made.get(_slice_key(op, operand, wanted))
        block = known or copy_like(operand, operand.mesh, wanted)
        if have_different_shardings(replace_operand(op, index, block), index, STREAM_TYPES):
            return None  # perhaps the same blocks, but this cannot be proved
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
    """Whether some steps read a tensor's own blocks and others read the whole.

    One kernel may do both and needs both tensors. Communications are left out: they are not in
    kernels.
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

    Where devices share each step, the op is computed in steps that are the same on all devices.
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
        why = f"the same op makes {tensor_words(others[0])}, which has no such axis on stream"
    return UnsupportedError(
        f"{op.name} cannot be computed in steps along {axis_words(out, axis)}: {why}"
        f"{user_code(op.where)}{in_ir(axis, out)}"
    )
