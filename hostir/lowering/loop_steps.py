"""Lowers one stream loop: its index, its streams, and the part of each tensor that one iteration
uses.

A stream loop is a loop of the host program whose iterations run on different CUDA streams. Each
iteration (also called a step) computes one part of each tensor.

- `LoweringState`: the program that is created: its tensors, kernels and counters.
- `LoopContext`: the facts that all ops of a loop share: index, blocks, streams.
- `LoopBody`: the ops of the loop so far: before the loop, in each iteration, at the end of each
  iteration.
- `OperandSlicer`: makes a view of the part of an operand that an iteration reads, and allocates
  memory for the iteration's result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fuser.ir.domain.tensor_domain import IterDomain
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.op import Op
from fuser.ir.ops import nodes
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.ir.types import LoadStoreOpType, ParallelType
from fuser.passes.view_ops import VIEW_OPS, is_copy
from fuser.support.errors import UnsupportedError, user_code
from hostir.ir.effects import Stream
from hostir.ir.ops import (
    NUMBER_OF_STREAMS,
    PEER_COPIES,
    Allocate,
    ForLoop,
    HirAliasSelect,
    IfThenElse,
    KernelGroup,
    SetCurrentStream,
    ShardByStream,
    Synchronize,
    loop_index,
)
from hostir.lowering.params import LowerParams
from hostir.lowering.slices import block, rotated, selected, slots
from multidevice.sharding.reshard import (
    communicates,
    communication_type,
    is_device_to_stream,
    is_exchange,
    is_step_slice,
)
from multidevice.sharding.streams import (
    StreamAxis,
    StreamLoops,
    is_allocated_per_step,
    is_in_step,
    scatters_steps,
    stream_axes,
    stream_axis,
)


# ------------------------------------------------------------------ the program
@dataclass
class LoweringState:
    """The host program while it is created from a fusion: its tensors, its kernels, and counters.

    `fusion` has its final shardings and does not change. `values` is a copy of `fusion` that owns
    the tensors of the host program. `twins` maps each tensor of `fusion` to its copy in `values`.
    `loops` are the stream loops of the fusion, whose iterations run on different streams. `groups`
    are the kernels so far, by number.
    """

    fusion: Fusion
    values: Fusion
    twins: Mapping[TensorView, TensorView]
    loops: StreamLoops
    params: LowerParams
    backend_name: str
    groups: dict[int, KernelGroup] = field(default_factory=dict[int, KernelGroup])
    _communications: int = 0
    _streams: int = 0

    @classmethod
    def of(
        cls, fusion: Fusion, loops: StreamLoops, params: LowerParams, backend_name: str
    ) -> LoweringState:
        """Returns the state of the host program before the first segment of `fusion` is lowered: it
        has all its tensors, but no ops. A segment is a part of the fusion that runs as one unit,
        such as a kernel.
        """
        # The program has copies of the tensors, so that changes do not affect the fusion.
        values, twins = fusion.copy()
        values.exprs = ()
        return cls(fusion, values, twins, loops, params, backend_name)

    @property
    def step_backend(self) -> str:
        """The name of the communication library for transfers between ranks inside stream loops
        (loops whose iterations run on different streams).
        """
        return self.params.step_backend or self.backend_name

    @property
    def copies_in_turn(self) -> bool:
        """Whether the peer copies of a stream loop run one after another, although the iterations
        run on different streams, which could make the copies at the same time.

        In a peer copy, the receiver copies directly out of the sender's memory. If True, the
        transfer of the next iteration waits for the transfer of this iteration. If an op computes
        the data of the next transfer, that op waits instead of the transfer.
        """
        return self.step_backend == PEER_COPIES and not self.params.standalone

    def next_communication(self) -> int:
        """Returns a new number for a communication. A `Wait` names its communication by this
        number."""
        self._communications += 1
        return self._communications - 1

    def next_stream(self) -> Stream:
        """Returns a stream with a new name, such as `S0`, for a `GetCurrentStream` op."""
        self._streams += 1
        return Stream(name=f"S{self._streams - 1}")


# ------------------------------------------------------------------ one loop
def stepping_axis(tv: TensorView) -> StreamAxis:
    """Returns the stream axis of `tv`, a tensor that a stream loop computes, one part per
    iteration. The parts divide this axis, and the iterations run on different streams. If `tv` has
    several stream axes, the first is returned.

    The caller ensures that `tv` has a stream axis, otherwise an assertion fails.
    """
    axis = stream_axis(tv)
    assert axis is not None, f"{tv} is computed in a stream loop, but has no stream axis"
    return axis


@dataclass(frozen=True)
class LoopContext:
    """The facts that all ops of a stream loop share: the loop's index, the streams, and the block
    (the part of a divided axis) that each iteration computes.

        y [istream{3}(i0), i1]          FOR i9 from 0 to 3, on Stream i9; step i9 has block i9
        x [iDIDx{2}], y [istream{2}]    FOR i9 from 0 to 2, on Stream i9; with offset_by_rank,
                                        step i9 has block (i9 + rank) % 2
        y [istream, istream1{4}, i1]    FOR streamIdx from 0 to i0 * 4; the indices of a step along
                                        the two stream axes are streamIdx // 4 and streamIdx % 4

    A step is an iteration. A stream axis (`istream`) is divided over the iterations:
    `istream{3}(i0)` is axis i0 in 3 blocks, one per iteration. `iDIDx{2}` is an axis that is
    divided over 2 devices.

    - `index`: the symbol of the loop's index.
    - `count`: the number of iterations.
    - `axis`: the tensor axis that the loop runs over; None if the loop counts to `count`.
    - `step`: the number from which each device computes its partners in the transfers of an
      iteration. Usually it is the index. In a loop in which devices only exchange blocks it is the
      index + 1: a device's own block, which needs no transfer, is then last.
    - `block`: the number of the block that the iteration computes.
    - `begins_at_rank`: whether each device begins with its own block.
    - `digits`: for each stream axis, (number of its parts, number of successive iterations with the
      same part).
    - `entry`: the stream on which the loop begins.
    - `shares_streams`: whether iterations share the available streams. Otherwise each iteration has
      its own stream.
    """

    index: Symbol
    count: Scalar
    axis: IterDomain | None
    step: Scalar
    block: Scalar
    begins_at_rank: bool
    digits: Mapping[ParallelType, tuple[Scalar, Scalar]]
    shares_streams: bool
    entry: Stream

    @classmethod
    def of(cls, program: LoweringState, ops: Sequence[TensorOp]) -> LoopContext:
        """Returns the facts (index, streams, blocks) about the stream loop that computes `ops`. The
        iterations of a stream loop run on different streams, and each computes one block of a
        tensor.

        Raises `UnsupportedError` in one case: by the option `offset_by_rank`, each device begins
        with its own block, but some ops need the same block on all devices in each iteration.
        """
        entry, values, params = program.next_stream(), program.values, program.params
        # The name of the loop's index follows from a tensor that it computes.
        op = next((op for op in ops if not is_step_slice(op)), ops[0])
        first = op.inputs[0] if scatters_steps(op) else op.out_tensor
        axes, is_logical = stream_axes(first), stepping_axis(first).is_logical
        counts = [values.canonical(axis.count) for axis in axes]
        count = sc.product(counts)
        loop_axis = next(a for a in program.twins[first].domain.loop if a.is_stream)
        # Steps that are blocks of one axis have one stream each. All others share the streams.
        shares_streams = len(axes) > 1 or is_logical
        # The loop is written as one over an axis if the inputs bind the extent of that axis.
        is_over_axis = len(axes) == 1 and is_logical and count is loop_axis.extent
        name = "streamIdx" if shares_streams else f"i{values.next_scalar()}"
        index = loop_index(name, 0, count)
        # The steps run in order. If all send their results, the own block is last: it needs no
        # transfer, and is computed during the transfers of the others.
        is_own_last = not params.offset_by_rank and _all_are_exchanges(ops)
        step: Scalar = sc.add(index, 1) if is_own_last else index
        # The block of a step: the same on every device, or a different one on each.
        number = sc.mod(step, count) if is_own_last else index
        along = None if first.mesh is None else _rotation(ops, params)
        begins_at_rank = params.offset_by_rank and along is not None
        if begins_at_rank:
            number = rotated(index, count, first.mesh, along)
        return cls(
            index=index,
            count=count,
            axis=loop_axis if is_over_axis else None,
            step=step,
            block=number,
            begins_at_rank=begins_at_rank,
            digits={
                axis.ptype: (n, sc.product(counts[k + 1 :]))
                for k, (axis, n) in enumerate(zip(axes, counts, strict=True))
            },
            shares_streams=shares_streams,
            entry=entry,
        )

    @property
    def stream(self) -> Stream:
        """The stream on which an iteration of the loop runs, as an expression of the loop's
        index."""
        return Stream(sc.mod(self.index, NUMBER_OF_STREAMS) if self.shares_streams else self.index)

    def repeat(self, *body: Op) -> ForLoop:
        """Returns a `ForLoop` op that runs the ops of `body` in every iteration of this loop."""
        if self.axis is not None:
            return ForLoop(index=self.index, axis=self.axis, body=body)
        return ForLoop(index=self.index, stop=self.count, body=body)

    def block_of(self, tv: TensorView) -> Scalar:
        """Returns the number of the part of `tv` that the current iteration of the loop uses, as an
        expression of the loop's index. On each rank, the part may be a different one, so the
        expression may also contain the rank.
        """
        swizzle = stepping_axis(tv).swizzle
        number = self.block if swizzle is None else self.step
        return rotated(number, self.count, tv.mesh, swizzle)

    def digit(self, number: Scalar, ptype: ParallelType) -> Scalar:
        """Returns the index that the part `number` has along the stream axis of type `ptype`. A
        stream axis is divided over the iterations of a loop.

        A loop with several stream axes runs over all combinations of their indices, the last axis
        fastest. With axes of 2 and 3 parts, the part number 5 has the index 1 along the first axis,
        and the index 2 along the second.
        """
        count, inner = self.digits[ptype]
        if sc.int_value(self.count) == 0:
            return sc.ZERO  # there is no step
        if ptype is ParallelType.stream:
            return sc.floordiv(number, inner)
        return sc.mod(sc.floordiv(number, inner), count)

    def next_stream_waits(self) -> Op:
        """Returns an op that makes the stream of the next loop iteration wait for all earlier work
        on the stream of this iteration.

        For iteration i9 of 3:

            IF i9 + 1 < 3: SetCurrentStream(Stream i9 + 1); Synchronize(Stream i9);
            SetCurrentStream(Stream i9)
        """
        following = sc.add(self.index, 1)
        streams = NUMBER_OF_STREAMS if self.shares_streams else self.count
        ordered = (
            SetCurrentStream(stream=Stream(following)),
            Synchronize(stream=self.stream),
            SetCurrentStream(stream=self.stream),
        )
        return IfThenElse(sc.lt(following, streams), then=ordered)


def _rotation(ops: Sequence[TensorOp], params: LowerParams) -> ParallelType | None:
    """Returns the mesh dimension along which devices may work on different blocks in one iteration
    of a stream loop (its iterations run on different streams). `ops` are the ops of the loop.

    Returns None if some op gathers or reduces each block over all devices of this dimension,
    because all devices must then work on the same block.

    Raises:
        UnsupportedError: the loop has such an op, and also transfers in a ring with the option
            `offset_by_rank` of `params`. With this option each device begins with its own block.
    """
    moves = [op for op in ops if isinstance(op, nodes.Reshard) and communicates(op)]
    rings = [op for op in moves if is_device_to_stream(op) or is_exchange(op)]
    along = next((p for op in rings for p in op.ptypes if p.is_device), ParallelType.mesh_x)
    together = [op for op in moves if op not in rings and along in op.ptypes]
    if together and rings and params.offset_by_rank:
        kind = communication_type(together[0])
        raise UnsupportedError(
            f"{kind} of {together[0].inp} needs the same block on all devices. But the same loop "
            f"receives {rings[0].out} in a ring, and with offset_stream_indexing_by_rank each "
            "device then begins with its own block: leave the parameter off"
            f"{user_code(together[0].where)}"
        )
    return None if together else along


def _all_are_exchanges(ops: Sequence[TensorOp]) -> bool:
    """Whether every transfer of a stream loop is an exchange. `ops` are the ops of the loop, whose
    iterations run on different streams.

    In each iteration of an exchange, each device sends a block to one other device, and no two
    devices send to the same device. Returns False if no op of the loop transfers data.
    """
    moves = [op for op in ops if isinstance(op, nodes.Reshard) and communicates(op)]
    return bool(moves) and all(is_exchange(op) and stepping_axis(op.inp).swizzle for op in moves)


@dataclass(frozen=True)
class LoopBody:
    """The ops of one stream loop so far, in lists that grow while the ops of the fusion are
    lowered. The iterations of a stream loop run on different streams.

    - `before`: the ops before the loop.
    - `steps`: the ops in each iteration.
    - `last`: the ops at the end of each iteration.
    """

    before: list[Op] = field(default_factory=list[Op])
    steps: list[Op] = field(default_factory=list[Op])
    last: list[Op] = field(default_factory=list[Op])


# ------------------------------------------------------------------ the operands of a step
class OperandSlicer:
    """Makes views of the operands of one iteration of a stream loop, and allocates memory for its
    result. (The iterations of the loop run on different streams.) A view has the part of the
    operand that the iteration reads.

        T1 [istream{3}(i0), i1] = relu( T0 [istream{3}(i0), i1] )

        operand  step:    T2 = ShardByStream( T0, stream_index=i3 )
        result   before:  T1 = ALLOCATE(..)
                 step:    T3 = ShardByStream( T1, stream_index=i3 )
            or   step:    T1 = ALLOCATE(.., stream_index=i3)     if only this loop reads it

    `before` are ops before the loop, and `step` ops of an iteration; i3 is the loop's index. A
    stream axis (`istream`) is divided over the iterations: `istream{3}(i0)` is axis i0 in 3 blocks.
    A stream axis may also be a whole axis of the tensor. An iteration then uses one element of it,
    and the view lacks the axis (`HirAliasSelect`). An iteration makes only one view of each part.
    """

    def __init__(self, program: LoweringState, loop: LoopContext, body: LoopBody) -> None:
        self._program, self._loop, self._body = program, loop, body
        self._parts: dict[TensorView, TensorView] = {}
        # The name of a slice -> the tensor that was computed before the loop.
        self._wholes: dict[TensorView, TensorView] = {}

    # -------------------------------------------------------------- operands
    def operands(self, op: TensorOp) -> list[object]:
        """Returns the operands that `op` has inside the stream loop, whose iterations run on
        different streams. For each tensor, this is the part that one iteration uses, or the whole
        tensor.
        """
        return [
            self.operand(op, k) if isinstance(v, TensorView) else v for k, v in enumerate(op.inputs)
        ]

    def operand(self, op: TensorOp, index: int) -> TensorView:
        """Returns the tensor that one iteration of the stream loop reads as operand number `index`
        of `op`: a part of the operand, or the whole operand. The iterations run on different
        streams.
        """
        v = op.inputs[index]
        found = self.part(v) if is_in_step(op, index) else self._program.twins[v]
        return self._without_repeated(op, index, found)

    def part(self, tv: TensorView) -> TensorView:
        """Returns a view of a part of `tv`: the part that one iteration of the stream loop uses.
        The iterations run on different streams.

        If each iteration allocates memory for its own part only, the tensor itself is the part, and
        no view is made.
        """
        if tv not in self._parts:
            if is_allocated_per_step(tv):
                return self._program.twins[tv]
            self._parts[tv] = self._slice(tv, self._program.twins[tv])
        return self._parts[tv]

    def slice_whole(self, op: nodes.Reshard) -> None:
        """Makes a view of a part of an operand: the part that one iteration of the stream loop
        uses. The iterations run on different streams. The whole operand is computed before the
        loop.

        `op` is a reshard (change of sharding) that moves no data, but only selects the part. Later
        ops in the loop that read the result of `op` read the view instead.
        """
        self._parts[op.out] = self._slice(op.out, self._program.twins[op.inp])
        self._wholes[op.out] = op.inp

    def whole(self, v: object, op: TensorOp) -> object:
        """Returns the operand `v` of `op` as a whole tensor. It exists before the stream loop, and
        has the parts of all iterations. The iterations run on different streams.

        Raises `UnsupportedError` for a tensor that only the loop computes.
        """
        if not isinstance(v, TensorView):
            return v
        twin = self._program.twins[self._wholes.get(v, v)]
        if v in self._parts and v not in self._wholes and twin not in self._known_before():
            raise UnsupportedError(
                f"{op.name} needs the complete tensor {v} before the stream loop, but the loop "
                f"computes one part of {v} in each iteration: remove the stream axis of {v}"
                f"{user_code(op.where)}"
            )
        return twin

    def _known_before(self) -> set[TensorView]:
        before, inputs = self._body.before, self._program.values.inputs
        made = {o.buffer for o in before if isinstance(o, Allocate)}
        views = {o for op in before for o in op.outputs}
        return made | views | {v for v in inputs if isinstance(v, TensorView)}

    def _without_repeated(
        self, op: TensorOp, index: int, found: TensorView, *, keep: Collection[ParallelType] = ()
    ) -> TensorView:
        """Returns a view of an operand of `op` without the broadcast axes that correspond to stream
        axes of the result. One iteration computes one element of the result along a stream axis, so
        its result lacks the axis, and the operand must also lack the axis.

        `index` is the number of the operand. `found` is the tensor that the iteration reads for it:
        the whole operand, or its part for this iteration. The view ops are added to the body of the
        loop. Axes of the stream types in `keep` are not removed.
        """
        operand = op.inputs[index]
        is_part = found.ndim < operand.ndim
        gone = {
            s.position
            for s in stream_axes(operand)
            if is_part and s.is_logical and s.ptype not in keep
        }
        for position in sorted(_repeated_axes(op, index, keep) - gone, reverse=True):
            at = position - sum(p < position for p in gone)
            found = only_element(found, at, self._body.steps)
        return found

    # -------------------------------------------------------------- parts
    def part_at(
        self,
        tv: TensorView,
        source: TensorView,
        number: Scalar,
        *,
        keep: Collection[ParallelType] = (),
    ) -> TensorView:
        """Returns a view of block `number` of `source`, the tensor of the host program that stores
        the values of `tv`, a tensor of the fusion.

        A stream axis of `tv` is divided over the iterations of a loop, and each iteration uses one
        block of the tensor. This method adds one view op per stream axis to the body of the loop.
        Some stream axes divide an axis of the tensor into blocks. Others are themselves an axis of
        the tensor, and the view lacks such an axis. But if its type is in `keep`, the view keeps
        it, with size 1.
        """
        like = self._program.twins[tv]
        elements = [s.ptype for s in stream_axes(tv) if s.is_logical and s.ptype not in keep]
        for ptype in elements:
            position = next(s.position for s in stream_axes(like) if s.ptype is ptype)
            out, axis = selected(like, position), source.domain.no_reductions[position]
            index = self._loop.digit(number, ptype)
            self._body.steps.append(HirAliasSelect(out, source, index, axis=axis))
            like = source = out
        for axis in stream_axes(like):
            out, index = block(like, axis.ptype), self._loop.digit(number, axis.ptype)
            self._body.steps.append(ShardByStream(out, source, index))
            source = out
        return source

    def _slice(self, tv: TensorView, source: TensorView) -> TensorView:
        """Returns a view of a part of `source`: the part that the current iteration of the stream
        loop uses. The iterations run on different streams.

        `source` is the tensor of the host program that stores the values of `tv`, a tensor of the
        fusion. The stream axes of `tv`, which are divided over the iterations, say which part each
        iteration uses.
        """
        return self.part_at(tv, source, self._loop.block_of(tv))

    # -------------------------------------------------------------- results
    def result(self, tv: TensorView) -> TensorView:
        """Allocates memory for the result `tv`, and returns the tensor into which one iteration of
        the stream loop writes. The iterations run on different streams.

        The tensor is a part of a buffer that is allocated before the loop, or a separate buffer of
        the iteration.
        """
        twin = self._program.twins[tv]
        twin.give_memory()
        if is_allocated_per_step(tv):
            number = self._loop.block_of(tv)
            self._body.steps.append(Allocate(twin, stream_index=number))
            return twin
        if _takes_slots(tv, self._program):
            return self._slot(tv, twin)
        self._body.before.append(Allocate(twin))
        return self.part(tv)

    def _slot(self, tv: TensorView, twin: TensorView) -> TensorView:
        """Allocates a buffer for `tv`, a tensor of the fusion, with one slot per stream. Returns a
        view of the slot of the current iteration's stream. `twin` is the copy of `tv` in the host
        program.

        One slot per stream is enough, because iterations on the same stream run one after another.
        """
        position = stepping_axis(tv).position
        room, out = slots(twin, position), selected(twin, position)
        self._body.before.append(Allocate(room))
        which = sc.mod(self._loop.index, NUMBER_OF_STREAMS)
        axis = room.domain.no_reductions[0]
        self._body.steps.append(HirAliasSelect(out, room, which, axis=axis))
        self._parts[tv] = out
        return out

    # -------------------------------------------------------------- matrices of a batch
    def with_kept_axes(self, op: TensorOp, keep: Sequence[ParallelType]) -> Op:
        """Returns `op` for one iteration of the stream loop (its iterations run on different
        streams). Its operands and its result keep the stream axes in `keep`, as axes of one
        element.

        Otherwise the part of a tensor would lack these axes, and a batch of matrices would become a
        single matrix. An example is a matmul of which an iteration computes one row of each matrix:

            T2 [i0, istream, i3] = matmul( T0 [i0, istream, i2], T1 [i0, i2, i3] )
            -> T3 [i0, 1, i2] = ShardByStream( T0, .. ); T4 [i0, 1, i3] = ShardByStream( T2, .. )
               T4 = matmul( T3, T1 )
        """

        def kept(tv: TensorView) -> TensorView:
            source = self._program.twins[self._wholes.get(tv, tv)]
            return self.part_at(tv, source, self._loop.block_of(tv), keep=keep)

        ins = [
            self._without_repeated(
                op, k, kept(v) if is_in_step(op, k) else self._program.twins[v], keep=keep
            )
            for k, v in enumerate(op.inputs)
            if isinstance(v, TensorView)
        ]
        self.result(op.out_tensor)
        return op.with_values(ins, [kept(op.out_tensor)])


def only_element(tv: TensorView, position: int, into: list[Op]) -> TensorView:
    """Returns a view of `tv` without the axis at `position`, which has only one element. The view
    op is appended to the list `into`.

    Along axis 0:

        x [b1, i1]   ->   y [i1] = HirAliasSelect( x, axis = b1, index = 0 )
    """
    out = selected(tv, position)
    axis = tv.domain.no_reductions[position]
    into.append(HirAliasSelect(out, tv, sc.ZERO, axis=axis))
    return out


def rows_or_columns(op: TensorOp) -> list[ParallelType]:
    """Returns the stream axes that divide the rows or the columns of each matrix of a batch, so
    that one iteration of a stream loop computes one row or column of each matrix. (The iterations
    run on different streams.) Returns an empty list if `op` is not a matmul or linear op on a batch
    of matrices.

    Views of operands and result must keep these axes, with one element. Without these axes, an
    operand would have the shape of a single matrix or of a different batch.
    """
    if isinstance(op, nodes.MatmulOp) and max(op.a.ndim, op.b.ndim) > 2:
        alone = [op.a.ndim - 2, None], [None, op.b.ndim - 1]
    elif isinstance(op, nodes.LinearOp) and op.weight.ndim > 2:
        alone = ([None, op.weight.ndim - 2],)
    else:
        return []
    return [
        axis.ptype
        for axis in stream_axes(op.out)
        if axis.is_logical and [_operand_position(op, k, axis) for k in range(2)] in alone
    ]


def _repeated_axes(op: TensorOp, index: int, keep: Collection[ParallelType]) -> set[int]:
    """Returns the positions of the broadcast axes of operand number `index` that correspond to
    stream axes of the result of `op`.

    A stream axis is divided over the iterations of a stream loop, which run on different streams.
    An iteration needs the operand without the returned axes. Stream axes of the types in `keep` are
    ignored.
    """
    axes = op.inputs[index].domain.no_reductions
    places = (
        _operand_position(op, index, axis)
        for axis in stream_axes(op.out_tensor)
        if axis.is_logical and axis.ptype not in keep
    )
    return {p for p in places if p is not None and axes[p].is_broadcast}


def _operand_position(op: TensorOp, index: int, axis: StreamAxis) -> int | None:
    """Returns the position of the axis that corresponds to `axis` in operand number `index` of
    `op`. `axis` is a stream axis (an axis divided over the iterations of a loop) of the result of
    `op`. Returns None if the operand has no corresponding axis.
    """
    domain = op.out_tensor.domain
    number = domain.no_reductions[axis.position].number
    if number not in domain.root_numbers and domain.root:
        return None
    places = [a.number for a in domain.maybe_root]
    return op.axis_map(index)[places.index(number)]


def _takes_slots(tv: TensorView, program: LoweringState) -> bool:
    """Whether one slot (memory for one part) per stream is enough for `tv`, a tensor that a stream
    loop computes. Otherwise all parts of `tv` are stored. Each iteration of the loop computes one
    part, and the iterations run on different streams.

    True if each iteration needs only one element along the stream axis, no op outside of the loop
    uses the tensor, and the user has set `LowerParams.stream_slots`.
    """
    fusion = program.fusion
    made_by = [op for op in (fusion.definition(tv),) if op is not None]
    return (
        program.params.stream_slots
        and len(stream_axes(tv)) == 1
        and stepping_axis(tv).is_logical
        and tv not in fusion.outputs
        and program.loops.fits_in_loop(tv)
        and not any(_takes_whole(op) for op in fusion.uses(tv))
        and not any(map(rows_or_columns, made_by))
    )


def _takes_whole(op: TensorOp) -> bool:
    """Whether `op` may need more of an operand than the part that one iteration of a stream loop
    uses. The whole operand must then be stored. The iterations of the loop run on different
    streams.

    True for three kinds of ops:

    - a view, which is made of the whole tensor before the loop;
    - a copy that marks a border between kernels;
    - a matmul or linear op of which one iteration computes one row or column of each matrix of a
      batch (`rows_or_columns`), because its operands are parts of the whole tensors.
    """
    is_border = isinstance(op, nodes.LoadStoreOp) and op.kind is LoadStoreOpType.segmenter_set
    is_view = isinstance(op, VIEW_OPS) and not is_copy(op)
    return is_border or is_view or bool(rows_or_columns(op))
