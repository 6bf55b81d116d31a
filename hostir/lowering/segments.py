"""The one lowering: segments in run order -> a host program.

    kernel          Allocate each output, LaunchKernel
    library op      Allocate the output, the op
    view            the op, whose output is a view of its input
    communication   Allocate, Communication, Wait; or Allocate, LocalSlice where no data moves
    any, in steps   a loop over streams (`hostir.lowering.stream_loops`), one for segments that
    share it

An output that is written into an input's buffer is computed in place where nothing reads the old
value any more, else computed beside it and copied at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fuser.ir import memory_layout
from fuser.ir.fusion import Alias, TensorOp, TensorView
from fuser.ir.ops import nodes
from fuser.passes.segment import Segment, SegmentedFusion
from fuser.passes.view_ops import is_copy
from fuser.support import progress
from hostir.ir.ops import PEER_COPIES, Allocate, Communication, LaunchKernel, LocalSlice, Wait
from hostir.ir.program import HostIrContainer
from hostir.lowering.params import DEFAULT, LowerParams
from hostir.lowering.random_offsets import with_places
from hostir.lowering.stream_loops import LoweringState, StreamLoopBuilder
from hostir.passes.memory_hints import let_peers_map
from multidevice.sharding.queries import local_extents
from multidevice.sharding.reshard import (
    RED_OP_OF,
    communicates,
    communication_type,
    sliced_axis,
    team_of,
)
from multidevice.sharding.streams import StreamLoops, stream_axis

_ELEMENTWISE = (nodes.UnaryOp, nodes.BinaryOp, nodes.TernaryOp, nodes.CastOp)


def lower(
    segmented: SegmentedFusion,
    *,
    backend_name: str,
    params: LowerParams = DEFAULT,
    loops: StreamLoops | None = None,
) -> HostIrContainer:
    """Return the host program of a segmented fusion; `hostir.passes.deallocation.run_passes`
    completes it.

    The fusion is complete, sharded and finalized; `loops` are its loops, None if nobody has looked
    for them. `backend_name` is written on communications.
    """
    found = StreamLoops(segmented.fusion) if loops is None else loops
    return Lowering(segmented, backend_name, params, found).run()


class Lowering(LoweringState):
    """Lowers the segments of a fusion in run order: single ones here, those of one loop by
    `StreamLoopBuilder`."""

    def run(self) -> HostIrContainer:
        # The program gets its own tensors: what it does to them never shows in the fusion.
        copy, self.twins = self.segmented.fusion.copy()
        copy.exprs = ()
        self.values = copy
        self.in_place = self._in_place_outputs()
        ordered = self._in_order()
        for number, group in enumerate(ordered, 1):
            progress.stage("segment", number, len(ordered))
            if self.loops.loop_of(group[0].exprs[0]) is not None:
                self.ops += StreamLoopBuilder(self, group).build()
            else:
                (segment,) = group
                before = len(self.ops)
                LOWER[segment.kind](self, segment)
                self.ops[before:] = (op.located(segment.line) for op in self.ops[before:])
        lines = {self._twin(o): s.line for s in self.segmented.segments for o in s.outputs}
        # Last, when everything has been computed from old values.
        for alias in copy.aliases:
            if alias.out not in self.in_place and alias.out is not alias.into:
                copied = nodes.LoadStoreOp(alias.into, alias.out)
                self.ops.append(copied.located(lines.get(alias.out, "")))
        program = HostIrContainer(copy, tuple(self.ops), self.groups)
        is_mapped = PEER_COPIES in (self.backend_name, self.step_backend)
        return let_peers_map(program) if is_mapped else program

    def _in_order(self) -> list[list[Segment]]:
        """Return the segments in run order, those of one loop together where the first can be."""
        groups: dict[object, list[Segment]] = {}
        for segment in self.segmented.segments:
            op = segment.exprs[0]
            key: object = self.loops.loop_of(op) or segment
            groups.setdefault(key, []).append(segment)
        if len(groups) == len(self.segmented.segments):
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
            assert ready is not None, "loops over streams need one another"
            ordered.append(groups.pop(ready))
        return ordered

    # ------------------------------------------------------------ segments
    def kernel(self, segment: Segment) -> None:
        outs = tuple(self._twin(t) for t in segment.outputs)
        for out in outs:
            if out not in self.in_place:
                self._allocate(out)
        assert segment.fusion is not None, f"kernel segment {segment.number} has no fusion"
        fusion, places = with_places(segment.fusion)
        self.add_group(replace(segment, fusion=fusion))
        ins = (self._twin(v) if isinstance(v, TensorView) else v for v in segment.inputs)
        self.ops.append(LaunchKernel((*ins, *places), outs, group=segment.number))

    def library(self, segment: Segment) -> None:
        for expr in segment.exprs:
            op = self._twin_op(expr)
            pairs = zip(op.outputs, expr.outputs, strict=True)
            # Torch makes what only this program sees, in an order of its own.
            is_seen = any(out in self.values.outputs or _is_packed(made) for out, made in pairs)
            for out in op.outputs:
                if not self.params.standalone or is_seen:
                    self._allocate(out)
                out.give_memory()
            self.ops.append(op)

    def view(self, segment: Segment) -> None:
        for expr in segment.exprs:
            op = self._twin_op(expr)
            op.out_tensor.give_memory()
            self.ops.append(op)

    def communication(self, segment: Segment) -> None:
        for expr in segment.exprs:
            op = self._twin_op(expr)
            assert isinstance(op, nodes.Reshard), f"{op.name} is no communication"
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
            number = self.next_number()
            communication = Communication(
                op.inp,
                op.out,
                number=number,
                type=kind,
                team=team_of(op),
                red_op=RED_OP_OF[op.reduction] if op.reduction else "SUM",
                backend=self.backend_name,
            )
            self.ops += [communication.replace(where=op.where), Wait(number=number)]

    # ------------------------------------------------------------ tensors
    def _twin_op(self, op: TensorOp) -> TensorOp:
        return op.map_values(lambda v: self.twins[v] if isinstance(v, TensorView) else v)

    def _allocate(self, tv: TensorView) -> None:
        tv.give_memory()
        self.ops.append(Allocate(tv))

    # ------------------------------------------------------------ aliases
    def _in_place_outputs(self) -> dict[TensorView, TensorView]:
        """Return the aliased outputs that a kernel may write into the input's buffer directly."""
        return {a.out: a.into for a in self.values.aliases if self._is_in_place(a)}

    def _is_in_place(self, alias: Alias) -> bool:
        """Whether nothing that the program computes or returns can see the write too early.

        One kernel writes the whole buffer, no other step reads the old value then or later, through
        a view or as itself, and within the kernel only the result's own element reads it.
        """
        original = {twin: tv for tv, twin in self.twins.items()}
        out, into = original[alias.out], original[alias.into]
        if into in self.segmented.fusion.outputs or out.dtype() is not into.dtype():
            return False
        if sum(a.out is alias.out for a in self.values.aliases) > 1:
            return False
        segments = self.segmented.segments
        at = next((i for i, s in enumerate(segments) if out in s.outputs), None)
        if at is None or segments[at].kind != "kernel" or stream_axis(out) is not None:
            return False
        if any(into in s.inputs and (s.kind == "alias" or i > at) for i, s in enumerate(segments)):
            return False
        return _has_layout_of(out, into) and _reads_own_element(segments[at], out, into)


def _is_packed(tv: TensorView) -> bool:
    """Whether a communication reads the result of an op that torch may lay out otherwise."""
    has_rows = isinstance(tv.definition(), nodes.LibraryOp) and memory_layout.lies_in_order(tv)
    return any(map(communicates, tv.uses())) and not has_rows


def _shape(tv: TensorView) -> object:
    return local_extents(tv), [a.is_broadcast for a in tv.domain.no_reductions]


def _has_layout_of(out: TensorView, into: TensorView) -> bool:
    """Whether the buffer of `into` can hold `out` as a kernel lays it out."""
    is_plain = all(
        {*t.domain.allocation_numbers} <= {*t.domain.logical_numbers} for t in (out, into)
    )
    return (
        is_plain
        and _shape(out) == _shape(into)
        and memory_layout.memory_order(out) == memory_layout.memory_order(into)
    )


def _reads_own_element(segment: Segment, out: TensorView, into: TensorView) -> bool:
    """Whether element i of `into` is read for element i of `out`, and for nothing else."""
    reading: set[TensorView] = {into}
    for e in segment.exprs:
        if not reading.intersection(v for v in e.inputs if isinstance(v, TensorView)):
            continue
        if not (is_copy(e) or isinstance(e, _ELEMENTWISE)) or _shape(e.out_tensor) != _shape(into):
            return False
        reading.update(e.outputs)
    return all(o is out or o not in reading for o in segment.outputs)


LOWER: dict[str, Callable[[Lowering, Segment], None]] = {
    "kernel": Lowering.kernel,
    "library": Lowering.library,
    "alias": Lowering.view,
    "communication": Lowering.communication,
}
