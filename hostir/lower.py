"""The one lowering: segments in run order -> a host program.

    kernel          Allocate each output, LaunchKernel
    library op      Allocate the output, the op
    view            the op, whose output is a view of its input
    communication   Allocate, Communication, Wait; or Allocate, LocalSlice where no data moves

An output that is written into an input's buffer is computed in place where nothing reads the old
value any more, else computed beside it and copied at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fuser.errors import UnsupportedError
from fuser.ir import nodes
from fuser.ir.core import Op
from fuser.ir.fusion import Alias
from fuser.ir.nodes import TensorOp
from fuser.ir.tensor import TensorView
from fuser.ir.types import MemoryType
from fuser.passes.segment import Segment, SegmentedFusion
from hostir.container import HostIrContainer, KernelGroup
from hostir.ops import (
    Allocate,
    Communication,
    LaunchKernel,
    LocalSlice,
    Wait,
)
from multidevice.communication import RED_OP_OF, communication_type, team_of
from multidevice.sharding import local_extents

_ELEMENTWISE = (nodes.UnaryOp, nodes.BinaryOp, nodes.TernaryOp, nodes.CastOp)


def lower(segmented: SegmentedFusion, *, backend_name: str) -> HostIrContainer:
    """Return the host program of a segmented fusion; `hostir.host_passes.run_passes` completes it.

    The fusion is complete, sharded and finalized. `backend_name` is written on communications.
    Raises `UnsupportedError` for aliases that cannot be written without losing a value.
    """
    return _Lowering(segmented, backend_name).run()


@dataclass
class _Lowering:
    segmented: SegmentedFusion
    backend_name: str
    ops: list[Op] = field(default_factory=list[Op])
    groups: dict[int, KernelGroup] = field(default_factory=dict[int, KernelGroup])

    def run(self) -> HostIrContainer:
        # The program gets its own tensors: what it does to them never shows in the fusion.
        copy, self.twins = self.segmented.fusion.copy()
        copy.exprs = ()
        self.values = copy
        self._check_aliases()
        self.in_place = self._in_place_outputs()
        self.overwritten = {a.into for a in copy.aliases}
        self.shows: dict[TensorView, TensorView] = {}
        for segment in self.segmented.segments:
            LOWER[segment.kind](self, segment)
        for alias in copy.aliases:
            if alias.out not in self.in_place and alias.out is not alias.into:
                self.ops.append(nodes.LoadStoreOp(alias.into, alias.out))
        return HostIrContainer(copy, tuple(self.ops), self.groups)

    # ------------------------------------------------------------ segments
    def kernel(self, segment: Segment) -> None:
        assert segment.fusion is not None, f"kernel segment {segment.number} has no fusion"
        outs = tuple(self._twin(t) for t in segment.outputs)
        for out in outs:
            if out not in self.in_place:
                self._allocate(out)
        group = KernelGroup(segment.number, segment.fusion, segment.scheduler)
        self.groups[segment.number] = group
        ins = tuple(self._twin(v) if isinstance(v, TensorView) else v for v in segment.inputs)
        self.ops.append(LaunchKernel(ins, outs, group=segment.number))

    def library(self, segment: Segment) -> None:
        for expr in segment.exprs:
            op = self._twin_op(expr)
            for out in op.outputs:
                self._allocate(out)
            self.ops.append(op)

    def view(self, segment: Segment) -> None:
        for expr in segment.exprs:
            op = self._twin_op(expr)
            source: TensorView = op.inputs[0]
            root = self.shows.get(source, source)
            out = op.out_tensor
            out.memory = MemoryType.global_
            if root in self.overwritten or out in self.values.outputs:
                # A view of a buffer that is written later would show the new value.
                self._allocate(out)
            else:
                self.shows[out] = root
            self.ops.append(op)

    def communication(self, segment: Segment) -> None:
        for expr in segment.exprs:
            op = self._twin_op(expr)
            assert isinstance(op, nodes.Reshard), f"{op.name} is no communication"
            self._allocate(op.out)
            kind = communication_type(op)
            if kind == "LocalSlice":
                assert op.target is not None, f"{op} slices no axis"
                self.ops.append(
                    LocalSlice(op.out, op.inp, axis=op.target, ptype=op.ptypes[0]).replace(
                        where=op.where
                    )
                )
                continue
            number = sum(isinstance(o, Communication) for o in self.ops)
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
    def _twin(self, tv: TensorView) -> TensorView:
        return self.twins[tv]

    def _twin_op(self, op: TensorOp) -> TensorOp:
        return op.map_values(lambda v: self.twins[v] if isinstance(v, TensorView) else v)

    def _allocate(self, tv: TensorView) -> None:
        tv.memory = MemoryType.global_
        self.ops.append(Allocate(tv))

    # ------------------------------------------------------------ aliases
    def _check_aliases(self) -> None:
        """Refuse what copies at the end, one after another, would get wrong."""
        targets = [a.into for a in self.values.aliases]
        for alias in self.values.aliases:
            if targets.count(alias.into) > 1:
                raise UnsupportedError(f"two outputs are written into the buffer of {alias.into}")
            if alias.out in targets and alias.out is not alias.into:
                raise UnsupportedError(
                    f"{alias.out} is written into {alias.into}, and is itself overwritten"
                )

    def _in_place_outputs(self) -> set[TensorView]:
        """Return the aliased outputs that a kernel may write into the input's buffer directly."""
        return {a.out for a in self.values.aliases if self._is_in_place(a)}

    def _is_in_place(self, alias: Alias) -> bool:
        """An elementwise kernel that is the last reader of the input, element for element."""
        original = {twin: tv for tv, twin in self.twins.items()}
        out, into = original[alias.out], original[alias.into]
        outputs = self.segmented.fusion.outputs
        sharers = [a for a in self.values.aliases if a.out is alias.out]
        if into in outputs or len(sharers) > 1 or out.dtype() is not into.dtype():
            return False
        segments = self.segmented.segments
        at = next((i for i, s in enumerate(segments) if out in s.outputs), None)
        if at is None or segments[at].kind != "kernel":
            return False
        if any(into in s.inputs for s in segments[at + 1 :]):
            return False
        # A view of the input, taken earlier, might be read later.
        if any(into in s.inputs and s.kind == "alias" for s in segments):
            return False
        return _is_elementwise(segments[at], out, into)


def _is_elementwise(segment: Segment, out: TensorView, into: TensorView) -> bool:
    """Whether the segment computes element i of everything from element i of its inputs."""

    def shape(tv: TensorView) -> object:
        return local_extents(tv), [a.is_broadcast for a in tv.domain.no_reductions]

    same_order = out.domain.contiguity == into.domain.contiguity and not (
        out.domain.allocation or into.domain.allocation
    )
    plain = all(
        isinstance(e, _ELEMENTWISE) or (isinstance(e, nodes.LoadStoreOp) and not e.out.domain.root)
        for e in segment.exprs
    )
    return plain and same_order and shape(out) == shape(into)


LOWER: dict[str, Callable[[_Lowering, Segment], None]] = {
    "kernel": _Lowering.kernel,
    "library": _Lowering.library,
    "alias": _Lowering.view,
    "communication": _Lowering.communication,
}
