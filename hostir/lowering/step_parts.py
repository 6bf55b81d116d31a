"""The steps of one loop over streams: their index, and names for what each of them sees."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from fuser.ir.fusion import Alias, Fusion, TensorOp
from fuser.ir.op import Op
from fuser.ir.ops import nodes
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.tensor import TensorView
from fuser.ir.types import LoadStoreOpType, ParallelType
from fuser.passes.segment import Segment, SegmentedFusion
from fuser.passes.view_ops import VIEW_OPS, is_copy
from fuser.support.errors import UnsupportedError, user_code
from hostir.ir.effects import Stream
from hostir.ir.ops import (
    NUMBER_OF_STREAMS,
    Allocate,
    HirAliasSelect,
    ShardByStream,
    loop_index,
)
from hostir.ir.program import KernelGroup
from hostir.lowering.params import LowerParams
from hostir.lowering.slices import block, rotated, selected, slots
from multidevice.sharding.reshard import (
    communicates,
    communication_type,
    is_device_to_stream,
    is_exchange,
    is_step_slice,
)
from multidevice.sharding.stream_steps import is_in_step
from multidevice.sharding.streams import (
    StreamAxis,
    StreamLoops,
    is_allocated_per_step,
    scatters_steps,
    stream_axes,
    stream_axis,
)


@dataclass
class LoweringState:
    """What the lowering of a fusion has so far: tensors, and the ops and kernels of the program.

    `values` are the program's own tensors, `twins` names them by the fusion's, and `in_place` has
    the outputs that are computed in the buffer of an input.
    """

    segmented: SegmentedFusion
    backend_name: str
    params: LowerParams
    loops: StreamLoops
    ops: list[Op] = field(default_factory=list[Op])
    groups: dict[int, KernelGroup] = field(default_factory=dict[int, KernelGroup])
    numbers: int = 0
    streams: int = 0
    values: Fusion = field(init=False)
    twins: dict[TensorView, TensorView] = field(init=False)
    in_place: dict[TensorView, TensorView] = field(init=False)

    @property
    def step_backend(self) -> str:
        """The library of what the steps of a loop send from rank to rank."""
        return self.params.step_backend or self.backend_name

    def next_number(self) -> int:
        """Return the number of the next communication."""
        self.numbers += 1
        return self.numbers - 1

    def next_stream(self) -> Stream:
        """Return the name of the next stream that is captured."""
        self.streams += 1
        return Stream(name=f"S{self.streams - 1}")

    def add_group(self, segment: Segment) -> None:
        """Keep the kernel of a segment."""
        group = KernelGroup(segment.number, self._kernel_fusion(segment), segment.scheduler)
        self.groups[segment.number] = group

    def _kernel_fusion(self, segment: Segment) -> Fusion:
        """Return the kernel's fusion, which knows of buffers that it both reads and writes."""
        assert segment.fusion is not None, f"kernel segment {segment.number} has no fusion"
        targets = {o.number: self.in_place.get(self._twin(o)) for o in segment.outputs}
        read = {v.number: v for v in segment.fusion.inputs if isinstance(v, TensorView)}
        pairs = [
            (number, into.number)
            for number, into in targets.items()
            if into is not None and into.number in read
        ]
        if not pairs:
            return segment.fusion
        fusion, _ = segment.fusion.copy()
        known = {tv.number: tv for tv in fusion.tensors()}
        fusion.aliases = [Alias(known[out], known[into]) for out, into in pairs]
        return fusion

    def _twin(self, tv: TensorView) -> TensorView:
        return self.twins[tv]


class StepParts:
    """The index of one loop, and the tensors that its steps read and write: parts of what is there
    before the loop, or memory of a step's own."""

    def __init__(self, lowering: LoweringState, segments: Sequence[Segment]) -> None:
        self._lowering = lowering
        self._segments = segments
        # What stands before the loop, the steps, and how each of them ends.
        self._before: list[Op] = []
        self._steps: list[Op] = []
        self._last: list[Op] = []
        self._parts: dict[TensorView, TensorView] = {}
        # What was whole before the loop, by what its slices are called.
        self._sliced: dict[TensorView, TensorView] = {}
        # What products read in place of a block that this rank has: (when it is its own, what).
        self._own: dict[TensorView, tuple[Scalar, TensorView]] = {}
        # Products whose blocks are exchanged: this rank's own is computed where it belongs.
        self._exchanged: dict[TensorView, TensorOp] = {}
        # The stream on which the loop begins.
        self._entry = lowering.next_stream()
        ops = [op for s in segments for op in s.exprs]
        # The loop is named after what it computes, not after what it reads.
        op = next((op for op in ops if not is_step_slice(op)), ops[0])
        first = op.inputs[0] if scatters_steps(op) else op.out_tensor
        axes, is_logical = stream_axes(first), stepping_axis(first).is_logical
        counts = [lowering.values.canonical(axis.count) for axis in axes]
        count = sc.product(counts)
        twin = lowering.twins[first]
        self._loop_axis = next(a for a in twin.domain.loop if a.is_stream)
        # Steps of blocks, of one axis, have a stream each; any others share what there are.
        self._shares_streams = len(axes) > 1 or is_logical
        # A loop over a whole axis is written as one where the inputs bind the axis's own extent.
        self._over_axis = len(axes) == 1 and is_logical and count is self._loop_axis.extent
        name = "streamIdx" if self._shares_streams else f"i{lowering.values.next_scalar()}"
        self._count = count
        # How many steps count each axis, and how many there are for each of its elements.
        self._digits = {
            axis.ptype: (n, sc.product(counts[k + 1 :]))
            for k, (axis, n) in enumerate(zip(axes, counts, strict=True))
        }
        self._index = loop_index(name, 0, count)
        # The steps are taken in order, but where all send what they compute the own one comes last:
        # it needs no transfer, and those of the others are under way meanwhile.
        is_own_last = not lowering.params.offset_by_rank and _sends_all(ops)
        self._step: Scalar = sc.add(self._index, 1) if is_own_last else self._index
        # Which block a step has: on every device the same, or another on each.
        self._block_index = sc.mod(self._step, count) if is_own_last else self._index
        along = None if first.mesh is None else self._rotation(ops)
        self._offset = lowering.params.offset_by_rank and along is not None
        if self._offset and along is not None and first.mesh is not None:
            self._block_index = rotated(self._index, count, first.mesh, along)
        modulo = sc.mod(self._index, NUMBER_OF_STREAMS)
        self._stream = Stream(modulo if self._shares_streams else self._index)

    def _rotation(self, ops: Sequence[TensorOp]) -> ParallelType | None:
        """Return along which device type devices may be at different blocks; None where they gather
        or reduce one block together.

        Raises `UnsupportedError` when the loop has both.
        """
        moves = [op for op in ops if isinstance(op, nodes.Reshard) and communicates(op)]
        rings = [op for op in moves if is_device_to_stream(op) or is_exchange(op)]
        along = next((p for op in rings for p in op.ptypes if p.is_device), ParallelType.mesh_x)
        together = [op for op in moves if op not in rings and along in op.ptypes]
        if together and rings and self._lowering.params.offset_by_rank:
            kind = communication_type(together[0])
            raise UnsupportedError(
                f"{kind} of {together[0].inp} in steps of which every device begins with its own "
                f"block (offset_stream_indexing_by_rank), as {rings[0].out} is made in the same "
                f"loop: leave the parameter off{user_code(together[0].where)}"
            )
        return None if together else along

    def _twin(self, tv: TensorView) -> TensorView:
        return self._lowering.twins[tv]

    def _axis_of(self, op: TensorOp) -> StreamAxis:
        return stepping_axis(op.out_tensor)

    def _digit(self, which: Scalar, ptype: ParallelType) -> Scalar:
        """Return the part of a step's number that counts one of the axes of a merged one."""
        count, inner = self._digits[ptype]
        if sc.int_value(self._count) == 0:
            return sc.ZERO  # there is no step
        if ptype is ParallelType.stream:
            return sc.floordiv(which, inner)
        return sc.mod(sc.floordiv(which, inner), count)

    def _operands(self, op: TensorOp) -> list[object]:
        """Return what a step reads: its part of an operand, or the whole."""
        return [
            self._operand(op, k) if isinstance(v, TensorView) else v
            for k, v in enumerate(op.inputs)
        ]

    def _operand(self, op: TensorOp, index: int) -> TensorView:
        v = op.inputs[index]
        found = self._part(v) if is_in_step(op, index) else self._twin(v)
        return self._without_repeated(op, index, found)

    def _without_repeated(
        self, op: TensorOp, index: int, found: TensorView, *, keep: Collection[ParallelType] = ()
    ) -> TensorView:
        """Name the element of an operand, or of its part, that is repeated along stream axes that
        slices lack: every step has the same one. Of an axis that is both repeated and cut in steps,
        an expanded one, the part is that element already."""
        operand = op.inputs[index]
        is_part = found.ndim < operand.ndim
        gone = {
            s.position
            for s in stream_axes(operand)
            if is_part and s.is_logical and s.ptype not in keep
        }
        for position in sorted(self._repeated(op, index, keep) - gone, reverse=True):
            at = position - sum(p < position for p in gone)
            found = self._element(found, at, self._steps)
        return found

    def _repeated(self, op: TensorOp, index: int, keep: Collection[ParallelType]) -> set[int]:
        """Return which axes of an operand are repeated along stream axes that slices drop."""
        axes = op.inputs[index].domain.no_reductions
        places = (
            self._operand_position(op, index, axis)
            for axis in stream_axes(op.out_tensor)
            if axis.is_logical and axis.ptype not in keep
        )
        return {p for p in places if p is not None and axes[p].is_broadcast}

    def _operand_position(self, op: TensorOp, index: int, axis: StreamAxis) -> int | None:
        """Return which axis of an operand a stream axis of the result comes from."""
        domain = op.out_tensor.domain
        number = domain.no_reductions[axis.position].number
        if number not in domain.root_numbers and domain.root:
            return None
        places = [a.number for a in domain.maybe_root]
        return op.axis_map(index)[places.index(number)]

    def _whole(self, v: object, op: TensorOp) -> object:
        if not isinstance(v, TensorView):
            return v
        if v in self._sliced:
            return self._twin(self._sliced[v])
        if v in self._parts and self._twin(v) not in self._known():
            raise UnsupportedError(
                f"{op.name} of {v} in steps along a whole axis: the operand has no memory of its "
                f"own{user_code(op.where)}"
            )
        return self._twin(v)

    def _known(self) -> set[TensorView]:
        made = {o.buffer for o in self._before if isinstance(o, Allocate)}
        views = {o for op in self._before for o in op.outputs}
        return made | views | {v for v in self._lowering.values.inputs if isinstance(v, TensorView)}

    def _part(self, tv: TensorView) -> TensorView:
        """Return the name of a step's part of a tensor that is in step with the loop."""
        if tv not in self._parts and is_allocated_per_step(tv):
            return self._twin(tv)
        if tv not in self._parts:
            self._parts[tv] = self._slice(tv, self._twin(tv))
        return self._parts[tv]

    def _slice(self, tv: TensorView, source: TensorView) -> TensorView:
        """Name the step's part of `source` as the stream axis of `tv` says."""
        return self._part_at(tv, source, self._which(tv))

    def _which(self, tv: TensorView) -> Scalar:
        """Return which part of a tensor this step has."""
        swizzle = stepping_axis(tv).swizzle
        index = self._block_index if swizzle is None else self._step
        return rotated(index, self._count, tv.mesh, swizzle)

    def _part_at(
        self,
        tv: TensorView,
        source: TensorView,
        which: Scalar,
        *,
        keep: Collection[ParallelType] = (),
    ) -> TensorView:
        """Name one part of `source`, as the stream axis of `tv` cuts it: of a merged one, a part of
        a part. Along the axes to `keep` it is a block, of one element."""
        like = self._twin(tv)
        elements = [s.ptype for s in stream_axes(tv) if s.is_logical and s.ptype not in keep]
        for ptype in elements:
            position = next(s.position for s in stream_axes(like) if s.ptype is ptype)
            out, axis = selected(like, position), source.domain.no_reductions[position]
            index = self._digit(which, ptype)
            self._steps.append(HirAliasSelect(out, source, index, axis=axis))
            like = source = out
        for axis in stream_axes(like):
            out, index = block(like, axis.ptype), self._digit(which, axis.ptype)
            self._steps.append(ShardByStream(out, source, index))
            source = out
        return source

    def _result(self, tv: TensorView) -> TensorView:
        """Return what a step writes: its part of a buffer that was made before, or its own."""
        twin = self._twin(tv)
        twin.give_memory()
        if is_allocated_per_step(tv):
            self._steps.append(Allocate(twin, stream_index=self._which(tv)))
            return twin
        if self._takes_slots(tv):
            return self._slot(tv, twin)
        self._before.append(Allocate(twin))
        return self._part(tv)

    def _takes_slots(self, tv: TensorView) -> bool:
        """Whether a stream needs one element of the tensor at a time, and nothing else sees it."""
        lowering = self._lowering
        fusion = lowering.segmented.fusion
        made_by = [op for op in (fusion.definition(tv),) if op is not None]
        return (
            lowering.params.stream_slots
            and len(stream_axes(tv)) == 1
            and stepping_axis(tv).is_logical
            and tv not in fusion.outputs
            and lowering.loops.fits_in_loop(tv)
            and not any(self._takes_whole(op) for op in fusion.uses(tv))
            and not any(map(self._rows_or_columns, made_by))
        )

    def _takes_whole(self, op: TensorOp) -> bool:
        """Whether steps of an op find their part of its operands in all of these."""
        is_border = isinstance(op, nodes.LoadStoreOp) and op.kind is LoadStoreOpType.segmenter_set
        is_view = isinstance(op, VIEW_OPS) and not is_copy(op)
        return is_border or is_view or bool(self._rows_or_columns(op))

    def _rows_or_columns(self, op: TensorOp) -> list[ParallelType]:
        """Return along which stream axes a step computes one row or column of matrices of a batch:
        without that axis an operand would be another batch of matrices, or a matrix."""
        if isinstance(op, nodes.MatmulOp) and max(op.a.ndim, op.b.ndim) > 2:
            alone = [op.a.ndim - 2, None], [None, op.b.ndim - 1]
        elif isinstance(op, nodes.LinearOp) and op.weight.ndim > 2:
            alone = ([None, op.weight.ndim - 2],)
        else:
            return []
        return [
            axis.ptype
            for axis in stream_axes(op.out)
            if axis.is_logical and [self._operand_position(op, k, axis) for k in range(2)] in alone
        ]

    def _slot(self, tv: TensorView, twin: TensorView) -> TensorView:
        """Make room for one element per stream; steps of one stream follow one another."""
        position = stepping_axis(tv).position
        room, out = slots(twin, position), selected(twin, position)
        self._before.append(Allocate(room))
        which = sc.mod(self._index, NUMBER_OF_STREAMS)
        axis = room.domain.no_reductions[0]
        self._steps.append(HirAliasSelect(out, room, which, axis=axis))
        self._parts[tv] = out
        return out

    def _element(self, tv: TensorView, position: int, into: list[Op]) -> TensorView:
        """Name the one element that a tensor has along an axis."""
        out = selected(tv, position)
        axis = tv.domain.no_reductions[position]
        into.append(HirAliasSelect(out, tv, sc.ZERO, axis=axis))
        return out


def _sends_all(ops: Sequence[TensorOp]) -> bool:
    """Whether the transfers of a loop are exchanges, each of another block on every
    device."""
    moves = [op for op in ops if isinstance(op, nodes.Reshard) and communicates(op)]
    return bool(moves) and all(is_exchange(op) and stepping_axis(op.inp).swizzle for op in moves)


def stepping_axis(tv: TensorView) -> StreamAxis:
    """Return the stream axis of a tensor that is computed in steps."""
    axis = stream_axis(tv)
    assert axis is not None, f"{tv} is in a loop without a stream axis"
    return axis
