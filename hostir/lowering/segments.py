"""Lowers the segments of a fusion, in run order, to the ops of a host program. A segment is a part
of a fusion that runs as one unit.

    segment         ops of the host program
    kernel          Allocate each output, LaunchKernel
    library op      Allocate the output, the op
    view            the op, whose output is a view of its input
    communication   Allocate, Communication, Wait; or Allocate, LocalSlice if no data moves

All segments that are computed block by block together become one loop over streams
(`hostir.lowering.stream_loops`) instead.

An output that updates an input is computed in the input's buffer if nothing reads the old value
afterwards. Otherwise the output has a separate buffer and is copied into the input at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from fuser.ir import memory_layout
from fuser.ir.fusion import Alias, Fusion, TensorOp, TensorView
from fuser.ir.op import Op, walk
from fuser.ir.ops import nodes
from fuser.ir.scalar import constructors as sc
from fuser.ir.types import MemoryType
from fuser.passes.segment import Segment, SegmentedFusion
from fuser.passes.view_ops import is_copy
from fuser.support import progress
from hostir.ir.buffer_aliasing import Storage
from hostir.ir.effects import Reads
from hostir.ir.ops import (
    PEER_COPIES,
    Allocate,
    Communication,
    KernelGroup,
    LaunchKernel,
    LocalSlice,
    ShareMemHandles,
    StartsCommunication,
    Wait,
)
from hostir.ir.program import HostIrContainer
from hostir.lowering.loop_steps import LoweringState
from hostir.lowering.mesh_transfers import lower_mesh_transfer
from hostir.lowering.params import DEFAULT, LowerParams
from hostir.lowering.slices import with_places
from hostir.lowering.stream_loops import StreamLoopBuilder
from multidevice.sharding.placement import clone_domain
from multidevice.sharding.queries import local_extents
from multidevice.sharding.reshard import (
    RED_OP_OF,
    communicates,
    communication_type,
    sliced_axis,
    team_of,
)
from multidevice.sharding.streams import StreamLoops, stream_axis
from multidevice.transports.base.collectives import BROADCAST

_ELEMENTWISE = (nodes.UnaryOp, nodes.BinaryOp, nodes.TernaryOp, nodes.CastOp)


def lower(
    segmented: SegmentedFusion,
    *,
    backend_name: str,
    params: LowerParams = DEFAULT,
    loops: StreamLoops | None = None,
) -> HostIrContainer:
    """Returns the host program of a fusion that is divided into segments (kernels and the ops
    between kernels).

    The caller ensures that the fusion has its final shardings. `loops` are the fusion's stream
    loops, whose iterations compute one block of a tensor each; if None, `lower` finds them.
    `backend_name` is the library that communications name. The program has no deallocations yet:
    `hostir.passes.deallocation.run_passes` adds them.
    """
    found = StreamLoops(segmented.fusion) if loops is None else loops
    program = LoweringState.of(segmented.fusion, found, params, backend_name)
    lowering = SegmentLowering(program, _in_place_outputs(program, segmented.segments))
    ordered = _in_order(segmented.segments, found)
    for number, group in enumerate(ordered, 1):
        progress.stage("segment", number, len(ordered))
        if found.loop_of(group[0].exprs[0]) is not None:
            lowering.ops += StreamLoopBuilder(program, group).build()
        else:
            (segment,) = group
            lowering.add(segment)
    lines = {program.twins[o]: s.line for s in segmented.segments for o in s.outputs}
    lowering.update_inputs(lines)
    made = HostIrContainer(program.values, tuple(lowering.ops), program.groups)
    is_mapped = PEER_COPIES in (backend_name, program.step_backend)
    return let_peers_map(made) if is_mapped else made


def _in_order(segments: Sequence[Segment], loops: StreamLoops) -> list[list[Segment]]:
    """Returns the segments in run order, in groups. All segments that one stream loop computes are
    one group; any other segment is a group of its own.

    `loops` are the stream loops of the fusion; the iterations of each run on different streams. A
    group comes after all groups that compute its inputs.
    """
    groups: dict[object, list[Segment]] = {}
    for segment in segments:
        key: object = loops.loop_of(segment.exprs[0]) or segment
        groups.setdefault(key, []).append(segment)
    if len(groups) == len(segments):
        return list(groups.values())
    maker: dict[object, object] = {
        o: key for key, group in groups.items() for s in group for o in s.outputs
    }
    needs = {
        key: {maker[v] for s in group for v in s.inputs if v in maker} - {key}
        for key, group in groups.items()
    }
    ordered: list[list[Segment]] = []
    while groups:
        ready = next((k for k in groups if not needs[k] & groups.keys()), None)
        assert ready is not None, "two stream loops each need a result of the other"
        ordered.append(groups.pop(ready))
    return ordered


# ------------------------------------------------------------------ one segment
class SegmentLowering:
    """Lowers the segments (kernels, library ops, views, communications) that are not in a stream
    loop (its iterations run on different streams). `ops` has the ops of the host program so far.

        y [i0] = sum( x [i0, i1] )   ->   y = ALLOCATE(..); LaunchKernel ( 0, Inputs:{x}, ..:{y} )

    `in_place` maps outputs to inputs: a kernel computes such an output in the buffer of the input.
    These outputs are not allocated.
    """

    def __init__(self, program: LoweringState, in_place: Mapping[TensorView, TensorView]) -> None:
        self.ops: list[Op] = []
        self._program, self._in_place = program, in_place

    def add(self, segment: Segment) -> None:
        """Appends the ops that run one segment to the host program. A segment is a kernel, or
        library ops, views or communications outside of kernels.
        """
        lower = {
            "kernel": self._kernel,
            "library": self._library,
            "alias": self._view,
            "communication": self._communication,
        }
        before = len(self.ops)
        lower[segment.kind](segment)
        self.ops[before:] = (op.located(segment.line) for op in self.ops[before:])

    def update_inputs(self, lines: Mapping[TensorView, str]) -> None:
        """Adds ops that copy each output that updates an input into this input. No copy is needed
        if a kernel has computed the output in the input's buffer.

        The copies are the last ops of the program, because earlier ops may read the old values.
        `lines` maps an output to the line of the user's code that defines it, for messages about
        the copy.
        """
        for alias in self._program.values.aliases:
            if alias.out not in self._in_place and alias.out is not alias.into:
                copied = nodes.LoadStoreOp(alias.into, alias.out)
                self.ops.append(copied.located(lines.get(alias.out, "")))

    def _kernel(self, segment: Segment) -> None:
        outs = tuple(self._program.twins[t] for t in segment.outputs)
        for out in outs:
            if out not in self._in_place:
                self._allocate(out)
        assert segment.fusion is not None, f"the kernel segment {segment.number} has no fusion"
        fusion, places = with_places(segment.fusion)
        fusion = self._with_aliases(segment, fusion)
        self._program.groups[segment.number] = KernelGroup(
            segment.number, fusion, segment.scheduler
        )
        twins = self._program.twins
        ins = (twins[v] if isinstance(v, TensorView) else v for v in segment.inputs)
        self.ops.append(LaunchKernel((*ins, *places), outs, group=segment.number))

    def _library(self, segment: Segment) -> None:
        for expr in segment.exprs:
            op = self._twin_op(expr)
            pairs = zip(op.outputs, expr.outputs, strict=True)
            # Torch may choose the memory order of results that only this program sees.
            is_seen = any(
                out in self._program.values.outputs or _is_packed(made) for out, made in pairs
            )
            for out in op.outputs:
                if not self._program.params.standalone or is_seen:
                    self._allocate(out)
                out.give_memory()
            self.ops.append(op)

    def _view(self, segment: Segment) -> None:
        for expr in segment.exprs:
            op = self._twin_op(expr)
            op.out_tensor.give_memory()
            self.ops.append(op)

    def _communication(self, segment: Segment) -> None:
        for expr in segment.exprs:
            op = self._twin_op(expr)
            assert isinstance(op, nodes.Reshard), (
                f"expected a reshard in a communication segment, got {op.name}"
            )
            self._allocate(op.out)
            kind = communication_type(op)
            if kind == "LocalSlice":
                axis = sliced_axis(op)
                self.ops.append(
                    LocalSlice(op.out, op.inp, axis=axis, ptype=op.ptypes[0]).replace(
                        where=op.where
                    )
                )
                continue
            if kind in ("SendRecv", "LocalCopy"):
                self.ops += lower_mesh_transfer(self._program, op)
                continue
            number = self._program.next_communication()
            root = sc.ZERO if kind == BROADCAST.name else None
            communication = Communication(
                op.inp,
                op.out,
                number=number,
                type=kind,
                team=team_of(op),
                root=root,
                red_op=RED_OP_OF[op.reduction] if op.reduction else "SUM",
                backend=self._program.backend_name,
            )
            self.ops += [communication.replace(where=op.where), Wait(number=number)]

    # -------------------------------------------------------------- tensors
    def _twin_op(self, op: TensorOp) -> TensorOp:
        twins = self._program.twins
        return op.map_values(lambda v: twins[v] if isinstance(v, TensorView) else v)

    def _allocate(self, tv: TensorView) -> None:
        tv.give_memory()
        self.ops.append(Allocate(tv))

    def _with_aliases(self, segment: Segment, fusion: Fusion) -> Fusion:
        """Returns the fusion of a kernel, with an `Alias` for each buffer that the kernel both
        reads and writes. `fusion` is the kernel's fusion without aliases.

        The alias tells the kernel that an output and an input have the same memory.
        """
        targets = {o.number: self._in_place.get(self._program.twins[o]) for o in segment.outputs}
        read = {v.number for v in fusion.inputs if isinstance(v, TensorView)}
        pairs = [
            (number, into.number)
            for number, into in targets.items()
            if into is not None and into.number in read
        ]
        if not pairs:
            return fusion
        made, _ = fusion.copy()
        known = {tv.number: tv for tv in made.tensors()}
        made.aliases = [Alias(known[out], known[into]) for out, into in pairs]
        return made


# ------------------------------------------------------------------ outputs in place
def _in_place_outputs(
    program: LoweringState, segments: Sequence[Segment]
) -> dict[TensorView, TensorView]:
    """Returns the outputs that a kernel may write directly into the buffer of an input, each with
    this input. Only outputs that update an input are considered.
    """
    aliases = program.values.aliases
    original = {twin: tv for tv, twin in program.twins.items()} if aliases else {}
    counts = Counter(a.out for a in aliases)
    return {
        a.out: a.into
        for a in aliases
        if counts[a.out] == 1
        and original[a.into] not in program.fusion.outputs
        and _is_in_place(original[a.out], original[a.into], segments)
    }


def _is_in_place(out: TensorView, into: TensorView, segments: Sequence[Segment]) -> bool:
    """Whether the kernel that computes `out` may write `out` into the buffer of the input `into`,
    because no op can observe this.

    True if three conditions hold. One kernel writes the whole buffer. No other op reads the old
    value then or later, also not through a view. Within the kernel, element i of `into` is read
    only for element i of `out`.
    """
    at = next((i for i, s in enumerate(segments) if out in s.outputs), None)
    if out.dtype() is not into.dtype() or at is None:
        return False
    if segments[at].kind != "kernel" or stream_axis(out) is not None:
        return False
    if any(into in s.inputs and (s.kind == "alias" or i > at) for i, s in enumerate(segments)):
        return False
    return _has_layout_of(out, into) and _reads_own_element(segments[at], out, into)


def _is_packed(tv: TensorView) -> bool:
    """Whether memory for `tv` must be allocated before the op that computes `tv`, so that `tv` has
    the memory layout that it declares.

    True if a communication sends `tv`, and torch could choose another layout when it allocates the
    result of the op. Ranks must agree about the layout of the data that they send.
    """
    has_rows = isinstance(tv.definition(), nodes.LibraryOp) and memory_layout.lies_in_order(tv)
    return any(map(communicates, tv.uses())) and not has_rows


def _shape(tv: TensorView) -> object:
    return local_extents(tv), [a.is_broadcast for a in tv.domain.no_reductions]


def _has_layout_of(out: TensorView, into: TensorView) -> bool:
    """Whether the buffer of `into` has the memory layout in which a kernel writes `out`: equal
    sizes and equal order of axes."""
    is_plain = all(
        {*t.domain.allocation_numbers} <= {*t.domain.logical_numbers} for t in (out, into)
    )
    return (
        is_plain
        and _shape(out) == _shape(into)
        and memory_layout.memory_order(out) == memory_layout.memory_order(into)
    )


def _reads_own_element(segment: Segment, out: TensorView, into: TensorView) -> bool:
    """Whether the kernel of `segment` reads element i of `into` only to compute element i of `out`,
    so that overwriting is safe."""
    reading: set[TensorView] = {into}
    for e in segment.exprs:
        if not reading.intersection(v for v in e.inputs if isinstance(v, TensorView)):
            continue
        if not (is_copy(e) or isinstance(e, _ELEMENTWISE)) or _shape(e.out_tensor) != _shape(into):
            return False
        reading.update(e.outputs)
    return all(o is out or o not in reading for o in segment.outputs)


# ----------------------------------------------------------------------
# Memory of tensors that peers copy, which they must be able to map.


def let_peers_map(program: HostIrContainer) -> HostIrContainer:
    """Returns the program with all sent tensors in symmetric memory, which other ranks can map and
    copy from. The communications with the backend CUDA need this.

    A tensor that the program allocates is allocated in symmetric memory. The memory of an input
    belongs to the caller, so the input is copied to symmetric memory once:

        Communication 0 (type=Broadcast, .., input=T0, ..)
        -> T9 = ALLOCATE(mem_type=symmetric, ..); T9 = Set( T0 ); Communication 0 (.., input=T9, ..)

    Any other sent tensor is copied to symmetric memory whenever it is sent.
    """
    storage, sent = Storage.of(program), dict[TensorView, str]()
    for op in program.started():
        if getattr(op, "backend", "") == PEER_COPIES:
            read = (e.tensor for e in op.effects() if isinstance(e, Reads))
            sent.update((tv, op.where) for tv in read)
    made = {o.buffer for o in walk(program.ops) if isinstance(o, Allocate)}
    moved = made & {storage.root(tv) for tv in sent}
    for tv in program.tensors():
        if storage.root(tv) in moved:
            tv.memory = MemoryType.symmetric
    copies: dict[object, TensorView] = {}
    before: list[Op] = []
    for tv, where in sent.items():
        if tv in program.inputs and tv.memory is not MemoryType.symmetric:
            domain, _ = clone_domain(tv.fusion, tv.domain)
            copy = copies[tv] = tv.fusion.new_tensor(
                domain, tv.dtype(), mesh=tv.mesh, memory=MemoryType.symmetric
            )
            before += [Allocate(copy), nodes.LoadStoreOp(copy, tv).replace(where=where)]

    def from_copy(op: Op) -> Op:
        if isinstance(op, StartsCommunication | ShareMemHandles):
            return op.map_values(lambda v: copies.get(v, v))
        regions = op.fields_of("region")
        return op.replace(**{r: tuple(map(from_copy, getattr(op, r))) for r in regions})

    ops = (*before, *map(from_copy, program.ops))
    return HostIrContainer(program.values, ops, program.groups)
