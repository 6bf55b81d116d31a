"""Stream axes: tensors that a loop computes block by block, their memory, and the ops of each loop.

A stream axis divides a tensor into blocks. Each iteration of a loop on the host (a stream loop),
called a step, computes one block. An op that is computed in steps reads of each operand either the
block of the same step or the whole operand. The function `slice_operands` inserts the slices that
this needs.
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
    """One axis along which a loop on the host computes a tensor block by block.

    An iteration of the loop is called a step; it computes one block. A stream type is the mark by
    which the axis is recognized.

    - `position`: the position of the logical axis (an axis that the user sees); reduction axes are
      not counted.
    - `count`: the number of blocks along this axis. This is the number of steps, unless the loop
      runs over several axes.
    - `is_logical`: True if the logical axis itself has a stream type; a block is then one index.
      Otherwise a block has ceilDiv(n, count) of the n indices that a device has. The last block may
      be shorter, and blocks after the last one are empty.
    - `swizzle`: a mesh dimension, or None. If set, step i computes block (i + c) % count, where c
      is the device's coordinate along the dimension. If None, step i computes block i.
    - `ptype`: the stream type of the axis.
    """

    position: int
    count: Scalar
    is_logical: bool
    swizzle: ParallelType | None = None
    ptype: ParallelType = ParallelType.stream


def stream_axes(tv: TensorView) -> tuple[StreamAxis, ...]:
    """Returns the axes along which a stream loop computes a tensor block by block; () if there are
    none.

    If the loop runs over several axes merged into one, there is an entry for each of them. The axis
    whose index changes slowest from step to step is first.
    """
    positions = {a.number: p for p, a in enumerate(tv.domain.no_reductions)}
    return tuple(
        StreamAxis(positions[n], sc.as_scalar(cut.count), cut.whole, cut.swizzle, cut.ptype)
        for n, cut in stream_cuts(tv)
        if n in positions
    )


def stream_axis(tv: TensorView) -> StreamAxis | None:
    """Returns the first axis along which a stream loop computes a tensor block by block.

    If the loop runs over several merged axes, the first one changes slowest from step to step.
    Returns None if no stream loop computes the tensor.
    """
    return next(iter(stream_axes(tv)), None)


def dropped_axes_of(tv: TensorView, rank: int) -> tuple[int, ...]:
    """Returns the axes of `tv` that are missing in a kernel argument with only `rank` dimensions.

    In a stream loop, a kernel may get the slice of `tv` for one step. The slice lacks each axis of
    which a step computes a single index: a stream axis without a split. Returns the sorted
    positions of these axes; () if the argument has all axes.
    """
    whole = sorted(s.position for s in stream_axes(tv) if s.is_logical)
    return tuple(whole) if tv.ndim - rank == len(whole) else ()


def block_extents(tv: TensorView, block: Block = "first") -> tuple[Scalar, ...]:
    """Returns the symbolic shape of the block that one step of a stream loop computes on a device.

    Reduction axes have no entry. `block` selects the step, because the blocks may differ in size:

    - "last": the last step that has elements; its block may be shorter than earlier blocks;
    - "first": any step before the last one with elements;
    - "empty": a step after the last one with elements.

    An axis that itself has a stream type, without a split, has extent 1.
    """
    axes = zip(tv.domain.no_reductions, placement(tv), strict=True)
    return tuple(local_extent(tv.fusion.canonical(a.size), cuts, block) for a, cuts in axes)


def held_extents(tv: TensorView) -> tuple[Scalar, ...]:
    """Returns the symbolic shape of the memory that one allocation of the tensor needs on a device.

    If each step of a stream loop allocates the block that it computes, this is the shape of a
    block. Otherwise it is the shape of the device's shard.
    """
    return block_extents(tv) if is_allocated_per_step(tv) else local_extents(tv)


def scatters_steps(op: TensorOp) -> bool:
    """Returns whether `op` is a reduction over devices in which each step computes one device's
    result.

    In each step of a stream loop, the devices compute partial sums of one block. The total is
    stored on the device that the block belongs to. Such an op runs in the loop of its operand,
    although its result has no steps. In the example, each device has a part of K, over which the op
    sums:

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
    """A loop on the host that computes the results of several ops block by block, one block per
    step.

    - `axes`: numbers that identify the divided axes (stream axes) of the ops in the loop.
    - `order`: the position of the loop among the loops of the fusion. No op of a loop needs a
      result of a later loop.

    No op of a loop needs the whole of a result that the loop itself computes. An op that sums a
    block over devices and stores the sum on one of them (`scatters_steps`) belongs to the loop of
    its operand.
    """

    axes: tuple[int, ...]
    order: int


class StreamLoops:
    """Forms loops over the blocks of tensors (stream loops), and decides which ops run in which
    loop.

    A step of such a loop computes one block of each result. Two ops may share a loop if the loop
    divides the same axis of both. In addition, no op on a path between the two may need the whole
    of a tensor that the loop computes. Unrelated ops between the two are no obstacle, because the
    loops and the ops outside them can run one after another.
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
        """Returns the stream loop in which an op runs; None if the op is not computed block by
        block.
        """
        return self._loop.get(op)

    def may_share_kernel(self, a: TensorOp, b: TensorOp) -> bool:
        """Returns whether the ops `a` and `b` may be in one kernel.

        Both must run in the same stream loop, or both outside all loops with no loop between them.
        """
        is_loop = self._loop.get(a) == self._loop.get(b)
        return is_loop and self._order.get(a) == self._order.get(b)

    def fits_in_loop(self, tv: TensorView) -> bool:
        """Returns whether only the stream loop that computes a tensor reads the tensor, and step i
        reads only block i.

        If so, no step needs memory for more than one block of `tv`. A step is an iteration of the
        loop; it computes one block of `tv`.
        """
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
        """Returns the number that identifies each stream axis of a tensor, by stream type.

        A stream axis is one along which a stream loop computes the tensor block by block. The axes
        of two tensors have the same number if step i computes the same block i of both.
        """
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
        """Yields (source, index) for each operand of `op` that another op of the fusion computes.

        `source` is that other op, and `index` is the position of the operand in `op.inputs`.
        Operands that are inputs of the fusion are left out.
        """
        for index, operand in tensor_operands(op):
            made_by = self._fusion.definition(operand)
            if made_by is not None:
                yield made_by, index

    def _leaves(self, op: TensorOp, reader: TensorOp) -> bool:
        """Returns whether `reader` must run after the stream loop that computes the result of `op`.

        `reader` is an op that reads the result of `op`. Returns False if no loop computes this
        result. Also returns False if step i of `reader` needs only the block of step i, so that
        both ops can run in one loop.
        """
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
    """Returns the tensors for which each step of a stream loop can allocate memory for its own
    block alone.

    All readers of such a tensor are in the loop, and each step reads only its own block. Three
    kinds of tensors are left out:

    - inputs and outputs of the fusion, because they are used outside of the loop;
    - tensors whose blocks are single indices;
    - slices of other tensors.

    A view is in the result if and only if the tensor that it is a view of is in the result, because
    both share memory.
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
    """Returns whether a device's shard of a tensor has at most one element along an axis.

    If `in_steps` is True, the block that one step of a stream loop computes is considered instead
    of the whole shard. The answer matters for memory orders: an axis with one element may be at any
    position in a memory order, because the memory is the same.
    """
    axis = tv.domain.no_reductions[position]
    if is_plain_broadcast(axis) or sc.int_value(axis.size) == 1:
        return True
    return any(c.whole and (in_steps or c.ptype.is_device) for c in placement(tv)[position])


class StepMemory:
    """Decides whether the block that one step of a stream loop computes is dense (without gaps) in
    memory.

    In the example, a loop of 3 steps computes y in 3 blocks along its first axis. A memory order
    lists axis positions, outermost first:

        y [istream{3}(i0), i1]     memory order (0, 1): dense     (1, 0): a block has gaps in y,
                                   unless each step allocates its own memory

    The set of tensors of which each step allocates its own block is cached, and computed again
    after a change of the fusion's ops.
    """

    def __init__(self, fusion: Fusion) -> None:
        self.fusion = fusion
        self._exprs: tuple[TensorOp, ...] | None = None
        self._own: set[TensorView] = set()

    def is_dense(self, tv: TensorView, order: Sequence[int]) -> bool:
        """Returns whether the block of `tv` that one step of a stream loop computes has no gaps in
        memory.

        `order` is the assumed memory order of `tv`, outermost axis first.
        """
        return _is_dense_in_whole(tv, order) or tv in self._with_own_memory()

    def _with_own_memory(self) -> set[TensorView]:
        if self._exprs is not self.fusion.exprs:
            self._exprs, self._own = self.fusion.exprs, allocated_per_step(self.fusion)
        return self._own


def steps_outermost(tv: TensorView, order: list[int]) -> list[int]:
    """Returns a memory order of `tv`, similar to `order`, in which the block of one step has no
    gaps.

    A step of a stream loop computes one block of `tv`, which is a part of the whole tensor's
    memory. Axes of which a step computes a single index are moved to the front. If the block has no
    gaps already, `order` is returned unchanged.
    """
    streams = [s.position for s in stream_axes(tv) if s.is_logical]
    if not streams or _is_dense_in_whole(tv, order):
        return order
    return [*(p for p in order if p in streams), *(p for p in order if p not in streams)]


def _is_dense_in_whole(tv: TensorView, order: Sequence[int]) -> bool:
    """Returns whether the block that one step computes has no gaps in the memory of the whole
    tensor.

    `order` is the memory order of the tensor, outermost axis first. A step is an iteration of the
    stream loop that computes `tv` block by block.
    """
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
    """Returns which axes of a tensor a stream loop computes block by block: (position, cut) for
    each.

    The cut says into how many blocks the axis is divided. The position is among all logical axes,
    including reduction axes.
    """
    return [(tv.domain.logical_numbers.index(n), cut) for n, cut in stream_cuts(tv)]


def _is_one_step(op: TensorOp) -> bool:
    return isinstance(op, LibraryOp) and not op.RUNS_IN_STEPS


def is_computable_in_steps(op: TensorOp) -> bool:
    """Returns whether a stream loop can compute an op's results block by block, one block per step.

    The blocks divide the stream axis of the results: the axis that has been chosen for such a loop.
    Each block must depend only on blocks of the operands, or on whole operands. Returns True if the
    results have no stream axis.
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
    """Returns the axes of operand `index` of which one step of the op needs only one block.

    A step is an iteration of the stream loop that computes the op's result block by block. The keys
    are positions of axes; reduction axes are not counted. The values say how the axis is divided:
    its cuts over devices and steps, outermost first. Returns {} if a step needs the whole operand.
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
    """Returns whether step i of an op needs exactly block i of operand `index`, for all steps i.

    A step is an iteration of the stream loop that computes the op's result block by block; block i
    is the one that step i computes.
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
    """Removes the stream type from reduction axes along which the operand has one index per device.

    A stream type says that a loop on the host computes the tensor in steps along the axis. In the
    example, `r` marks the reduced axis, which is the first one, and DIDx an axis with one index per
    device:

        c [DIDx, stream, N], out [rstream, DIDx, N] = sum(c)   ->   out [r, DIDx, N]

    The sum over devices cannot be made in steps along the first axis, because a device has only one
    index of it. Users write `rstream` to say that the sum is made for one block of `c` after
    another, but the stream axis of `c` already says this.
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
    """Removes the stream axis from every result that cannot be computed block by block along it.

    A stream axis is one along which a loop on the host computes a tensor, one block per step.
    Without the stream axis, the result is computed as a whole. Divisions over devices inside the
    stream axis are removed, too, because without the stream axis they would make other blocks.
    `asked` are the tensors to which the user has given the stream axis. If a tensor in `asked`
    cannot be computed block by block, the function raises `UnsupportedError` with op and axis.
    """
    for op in fusion.exprs:
        if is_computable_in_steps(op):
            continue
        for out in op.outputs:
            if out in asked:
                raise _not_computable(op, out)
            unparallelize_inward(out, lambda a: a.is_stream)


def slice_operands(fusion: Fusion) -> None:
    """Inserts slices, so that each op in a stream loop reads only the blocks that its steps need.

        y [stream(M), N] = add(x [M, N], b)  ->  s [stream(M), N] = Reshard(x, along stream)
                                                 y = add(s, b)

    Afterwards each step of such an op reads of an operand either the block of the same step, or the
    whole operand. Three kinds of ops are first computed as a whole, outside the loop, and then
    their results are sliced:

    - a communication whose steps need other blocks than the devices have;
    - a communication between devices that compute different blocks in the same step, because each
      device starts with its own block;
    - an op such as a reshape whose blocks cannot be proved to be blocks of its operands.
    """
    made: _Slices = {}
    for op in fusion.exprs:
        _feed_steps(fusion, op, made)


def slice_per_loop(fusion: Fusion) -> None:
    """Copies slices so that no two stream loops share a slice.

    A slice selects the block of the current step of a loop, so it has no meaning outside its loop.
    """
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
    """Returns the cache key of the slice of `operand` that `op` reads: ops with equal keys share a
    slice.

    `cuts` says how the slice is divided. If `op` is computed in steps over several merged axes and
    the slice has only some of them, the key contains `op`. The reason is that these axes alone do
    not determine which block belongs to which step.
    """
    parts = {c.ptype for mine in cuts for c in mine if c.ptype.is_stream}
    return operand, cuts, None if parts == {*step_parts(op.out_tensor)} else op


def _mixes_rotated_steps(op: TensorOp) -> bool:
    """Returns whether one step of `op` would need blocks that other devices compute in other steps.

    This happens if devices exchange data in `op` and each device starts the stream loop (a loop on
    the host over the blocks) with its own block. The caller then computes the op as a whole,
    outside the loop. Returns False if each step only sends the block of one device on to others.
    """
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
    """Returns whether a communication would move blocks that have gaps in memory, because the
    stream loop runs over merged axes.

    A step of such a loop computes a single index of one axis and a block of indices of another
    axis. This block has gaps in the memory of the whole tensor, and steps over merged axes do not
    allocate their own memory. The caller then computes `op` as a whole, outside the loop.
    """
    cuts = [cut for _, cut in stream_cuts(op.out_tensor)]
    return len(cuts) > 1 and not all(cut.whole for cut in cuts) and is_resharding(op)


def _find_slices(op: TensorOp, made: _Slices) -> dict[int, tuple[TensorView, int]] | None:
    """Returns the slices that the steps of `op` read instead of whole operands.

    The keys are operand indices. The values are (tensor of one step's block, position of the axis
    along which it is sliced). Slices in `made` exist already and are used again. Operands of which
    step i already reads block i are left out. Returns None if an operand cannot be sliced.
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
    """Returns whether each device needs, in each step of `op`, the whole block of exactly one
    device.

    A step is an iteration of a stream loop, a loop on the host that computes the result block by
    block. The blocks are those of operand `index`. Usually all devices need the same block in a
    step. If each device starts the loop with its own block, they need the blocks of different
    devices.
    """
    needed = needed_blocks(op, index)
    if len(needed) != 1 or len(step_parts(op.out_tensor)) != 1:
        return False
    ((position, cuts),) = needed.items()
    return is_from_devices(op.inputs[index], position, cuts, op.out_tensor.mesh)


def _is_read_both_ways(tv: TensorView) -> bool:
    """Returns whether some ops of stream loops read `tv` block by block, and others as a whole.

    One kernel may contain both kinds of ops, and then needs the tensor and a slice. Communications
    are ignored, because they are not in kernels.
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
    """Splits an op of a stream loop in two: an op that computes the whole result outside the loop,
    and copies in the loop.

    Each step of the loop copies one block of the whole result. Returns the new ops. If devices
    divide each block among them, the first op instead runs in another loop, in which all devices
    compute the same block in the same step.
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
