"""The steps of one loop over streams: their index, and names for what each of them sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fuser.errors import UnsupportedError, user_code
from fuser.ir import nodes
from fuser.ir import scalar as sc
from fuser.ir.core import Op
from fuser.ir.nodes import TensorOp
from fuser.ir.scalar import Scalar
from fuser.ir.tensor import TensorView
from fuser.ir.types import LoadStoreOpType, ParallelType
from fuser.passes.segment import VIEW_OPS, Segment
from hostir.effects import Stream
from hostir.ops import (
    NUMBER_OF_STREAMS,
    Allocate,
    HirAliasSelect,
    ShardByStream,
    loop_index,
)
from hostir.slices import block, rotated, selected, slots
from multidevice.communication import (
    communicates,
    communication_type,
    is_copy,
    is_device_to_stream,
    is_exchange,
    is_step_slice,
)
from multidevice.stream_steps import is_in_step
from multidevice.streams import (
    StreamAxis,
    is_allocated_per_step,
    scatters_steps,
    stream_axis,
)

if TYPE_CHECKING:
    from hostir.lower import Lowering


class StepParts:
    """The index of one loop, and the tensors that its steps read and write: parts of what is there
    before the loop, or memory of a step's own."""

    def __init__(self, lowering: Lowering, segments: Sequence[Segment]) -> None:
        self._lowering = lowering
        self._segments = segments
        # What stands before the loop, the steps, and how each of them ends.
        self._before: list[Op] = []
        self._steps: list[Op] = []
        self._last: list[Op] = []
        self._parts: dict[TensorView, TensorView] = {}
        # What was whole before the loop, by what its slices are called.
        self._sliced: dict[TensorView, TensorView] = {}
        ops = [op for s in segments for op in s.exprs]
        # The loop is named after what it computes, not after what it reads.
        op = next((op for op in ops if not is_step_slice(op)), ops[0])
        first = op.inputs[0] if scatters_steps(op) else op.out_tensor
        self._axis = stepping_axis(first)
        twin = lowering.twins[first]
        self._loop_axis = next(a for a in twin.domain.loop if a.is_stream)
        count = lowering.values.canonical(self._axis.count)
        # A loop over a whole axis is written as one where the inputs bind the axis's own extent.
        self._over_axis = self._axis.is_logical and count is self._loop_axis.extent
        name = "streamIdx" if self._axis.is_logical else f"i{lowering.values.next_scalar()}"
        self._count = count
        self._index = loop_index(name, 0, count)
        # Which block a step has: on every device the same, or first its own.
        self._block_index: Scalar = self._index
        along = None if first.mesh is None else self._rotation(ops)
        self._offset = lowering.params.offset_by_rank and along is not None
        if self._offset and along is not None and first.mesh is not None:
            self._block_index = rotated(self._index, count, first.mesh, along)
        modulo = sc.mod(self._index, NUMBER_OF_STREAMS)
        self._stream = Stream(modulo if self._axis.is_logical else self._index)

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

    def _operands(self, op: TensorOp) -> list[object]:
        """Return what a step reads: its part of an operand, or the whole."""
        return [
            self._operand(op, k) if isinstance(v, TensorView) else v
            for k, v in enumerate(op.inputs)
        ]

    def _operand(self, op: TensorOp, index: int) -> TensorView:
        v = op.inputs[index]
        if is_in_step(op, index):
            return self._part(v)
        twin, position = self._twin(v), self._repeated(op, index)
        if position is None:
            return twin
        # Every step's element is the one that is repeated along the axis that slices lack.
        return self._element(twin, position, self._steps)

    def _repeated(self, op: TensorOp, index: int) -> int | None:
        """Return which axis of an operand is repeated along a stream axis that slices drop."""
        axis = stream_axis(op.out_tensor)
        if axis is None or not axis.is_logical:
            return None
        position = self._operand_position(op, index)
        if position is None or not op.inputs[index].domain.no_reductions[position].is_broadcast:
            return None
        return position

    def _operand_position(self, op: TensorOp, index: int) -> int | None:
        """Return which axis of an operand the stream axis of the result comes from."""
        domain = op.out_tensor.domain
        number = domain.no_reductions[self._axis_of(op).position].number
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
        index = self._block_index if swizzle is None else self._index
        return rotated(index, self._count, tv.mesh, swizzle)

    def _part_at(self, tv: TensorView, source: TensorView, which: Scalar) -> TensorView:
        """Name one part of `source`, as the stream axis of `tv` cuts it."""
        axis, twin = stepping_axis(tv), self._twin(tv)
        if axis.is_logical:
            out = selected(twin, axis.position)
            whole = source.domain.no_reductions[axis.position]
            self._steps.append(HirAliasSelect(out, source, which, axis=whole))
        else:
            out = block(twin)
            self._steps.append(ShardByStream(out, source, which))
        return out

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
            and stepping_axis(tv).is_logical
            and tv not in fusion.outputs
            and lowering.loops.fits_in_loop(tv)
            and not any(self._takes_whole(op) for op in fusion.uses(tv))
            and not any(map(self._is_row_or_column, made_by))
        )

    def _takes_whole(self, op: TensorOp) -> bool:
        """Whether steps of an op find their part of its operands in all of these."""
        is_border = isinstance(op, nodes.LoadStoreOp) and op.kind is LoadStoreOpType.segmenter_set
        is_view = isinstance(op, VIEW_OPS) and not is_copy(op)
        return is_border or is_view or self._is_row_or_column(op)

    def _is_row_or_column(self, op: TensorOp) -> bool:
        """Whether a step computes one row or column of each matrix of a batch: without that axis
        an operand would be another batch of matrices."""
        if not isinstance(op, nodes.MatmulOp) or max(op.a.ndim, op.b.ndim) < 3:
            return False
        maps = [self._operand_position(op, k) for k in range(2)]
        return self._axis_of(op).is_logical and maps in (
            [op.a.ndim - 2, None],
            [None, op.b.ndim - 1],
        )

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


def stepping_axis(tv: TensorView) -> StreamAxis:
    """Return the stream axis of a tensor that is computed in steps."""
    axis = stream_axis(tv)
    assert axis is not None, f"{tv} is in a loop without a stream axis"
    return axis
