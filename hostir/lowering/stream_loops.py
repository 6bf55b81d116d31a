"""Loops over streams: segments that are computed in steps become one loop of the host program.

One skeleton for both kinds of stream axis; what differs is the table `FORMS`:

    logical axis: FOR streamIdx in istreamIdx2{8}:
                    SetCurrentStream(Stream (streamIdx % numberOfStreams)), Synchronize(Stream S0)
                  FOR streamIdx in istreamIdx2{8}:
                    SetCurrentStream(Stream (streamIdx % numberOfStreams))
                    the steps' ops
                    SetCurrentStream(Stream S0), Synchronize(Stream (streamIdx % numberOfStreams))

    split axis:   FOR i9 from 0 to 3:
                    SetCurrentStream(Stream i9), Synchronize(Stream S0)
                    the steps' ops
                  SetCurrentStream(Stream S0)
                  FOR i9 from 0 to 3:
                    Synchronize(Stream i9)

Waiting for S0 inside of a loop that S0 joins step by step would chain the steps: so either the
entering waits or the joins stand in a loop of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fuser.ir.fusion import TensorOp
from fuser.ir.op import Op
from fuser.ir.ops import nodes
from fuser.ir.ops.resizing import SliceOp
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.tensor import TensorView
from fuser.ir.types import MemoryType, ParallelType
from fuser.passes.segment import Segment
from fuser.passes.view_ops import VIEW_OPS, is_copy
from hostir.ir.ops import (
    ForLoop,
    GetCurrentStream,
    LaunchKernel,
    SetCurrentStream,
    Synchronize,
)
from hostir.lowering.params import LowerParams
from hostir.lowering.random_offsets import with_places
from hostir.lowering.slices import block_type, split_tensor, with_block_number
from hostir.lowering.step_transfers import StepTransfers
from multidevice.sharding.passes.localize import is_block
from multidevice.sharding.placement import clone_domain
from multidevice.sharding.stream_steps import is_in_step
from multidevice.sharding.streams import StreamLoops, is_allocated_per_step

# What torch carries out where `LowerParams.standalone` asks for it.
STANDALONE_OPS = (nodes.LibraryOp, nodes.BinaryOp, nodes.ReductionOp, SliceOp)


def stands_alone(loops: StreamLoops, params: LowerParams) -> Callable[[TensorOp], bool]:
    """Return which ops are no part of kernels: those of the library, and plain copies in steps."""
    if params.standalone:
        return lambda op: isinstance(op, STANDALONE_OPS) or is_copy(op)
    return lambda op: (
        isinstance(op, nodes.LibraryOp) or (is_copy(op) and loops.loop_of(op) is not None)
    )


class StreamLoopBuilder(StepTransfers):
    """Lowers the segments of one loop, in order."""

    def build(self) -> list[Op]:
        """Return the allocations, the loops, and what they wait for."""
        for segment in self._segments:
            before, steps = len(self._before), len(self._steps)
            STEP[segment.kind](self, segment)
            for ops, start in ((self._before, before), (self._steps, steps)):
                ops[start:] = (op.located(segment.line) for op in ops[start:])
        self._steps += self._last
        form = FORMS[self._shares_streams]
        return [*self._before, *form(self)]

    # ------------------------------------------------------------ segments
    def _kernel(self, segment: Segment) -> None:
        assert segment.fusion is not None, f"kernel segment {segment.number} has no fusion"
        ins: list[TensorView | Scalar] = [
            (self._part(v) if is_block(mine) else self._twin(v))
            if isinstance(v, TensorView) and isinstance(mine, TensorView)
            else v
            for v, mine in zip(segment.inputs, segment.fusion.inputs, strict=True)
        ]
        outs = [self._result(o) for o in segment.outputs]
        fusion, places = with_places(
            segment.fusion, lambda tv, ptype: self._digit(self._which(tv), ptype)
        )
        ins += places
        segment = replace(segment, fusion=fusion)
        split = split_tensor(fusion)
        if split is not None and split[0] < 0:
            ins.append(self._digit(self._which(split[1]), block_type(split[1])))
            segment = replace(segment, fusion=with_block_number(fusion, self._index))
        self._lowering.add_group(segment)
        self._steps.append(LaunchKernel(tuple(ins), tuple(outs), group=segment.number))

    def _library(self, segment: Segment) -> None:
        for op in segment.exprs:
            if isinstance(op, VIEW_OPS) and not is_copy(op) and self._shares_streams:
                self._copied_view(op)
                continue
            kept = self._rows_or_columns(op)
            if kept:
                self._steps.append(self._with_kept_axes(op, kept))
                continue
            ins = self._operands(op)
            outs = [self._result(o) for o in op.outputs]
            self._product(op, op.with_values(ins, outs))

    def _with_kept_axes(self, op: TensorOp, keep: Sequence[ParallelType]) -> Op:
        """Return the step of an op on blocks of one element along these stream axes."""

        def kept(tv: TensorView) -> TensorView:
            source = self._twin(self._sliced.get(tv, tv))
            return self._part_at(tv, source, self._which(tv), keep=keep)

        ins = [
            self._without_repeated(
                op, k, kept(v) if is_in_step(op, k) else self._twin(v), keep=keep
            )
            for k, v in enumerate(op.inputs)
            if isinstance(v, TensorView)
        ]
        self._result(op.out_tensor)
        return op.with_values(ins, [kept(op.out_tensor)])

    def _copied_view(self, op: TensorOp) -> None:
        """A view of the whole is made before the loop, and copied step by step."""
        out = self._twin(op.out_tensor)
        domain, _ = clone_domain(out.fusion, out.domain)
        view = out.fusion.new_tensor(domain, out.dtype(), mesh=out.mesh, memory=MemoryType.global_)
        self._before.append(op.with_values([self._whole(v, op) for v in op.inputs], [view]))
        source = self._part_at(op.out_tensor, view, self._index)
        result = self._result(op.out_tensor)
        self._steps.append(nodes.LoadStoreOp(result, source).replace(where=op.where))

    def _view(self, segment: Segment) -> None:
        for op in segment.exprs:
            out = self._twin(op.out_tensor)
            out.give_memory()
            if is_allocated_per_step(op.out_tensor):
                self._steps.append(op.with_values(self._operands(op), [out]))
            else:
                self._before.append(op.with_values([self._whole(v, op) for v in op.inputs], [out]))

    # ------------------------------------------------------------ loops
    def _for(self, *body: Op) -> ForLoop:
        if self._over_axis:
            return ForLoop(index=self._index, axis=self._loop_axis, body=body)
        return ForLoop(index=self._index, stop=self._count, body=body)

    def _joined_in_the_loop(self) -> list[Op]:
        entry, mine = self._entry, self._stream
        return [
            GetCurrentStream(stream=entry),
            self._for(SetCurrentStream(stream=mine), Synchronize(stream=entry)),
            self._for(
                SetCurrentStream(stream=mine),
                *self._steps,
                SetCurrentStream(stream=entry),
                Synchronize(stream=mine),
            ),
        ]

    def _joined_behind(self) -> list[Op]:
        entry, mine = self._entry, self._stream
        return [
            GetCurrentStream(stream=entry),
            self._for(SetCurrentStream(stream=mine), Synchronize(stream=entry), *self._steps),
            SetCurrentStream(stream=entry),
            self._for(Synchronize(stream=mine)),
        ]


# Whether the stream axis is a logical axis -> the loops around the steps.
FORMS: dict[bool, Callable[[StreamLoopBuilder], list[Op]]] = {
    True: StreamLoopBuilder._joined_in_the_loop,  # pyright: ignore[reportPrivateUsage]
    False: StreamLoopBuilder._joined_behind,  # pyright: ignore[reportPrivateUsage]
}
STEP: dict[str, Callable[[StreamLoopBuilder, Segment], None]] = {
    "kernel": StreamLoopBuilder._kernel,  # pyright: ignore[reportPrivateUsage]
    "library": StreamLoopBuilder._library,  # pyright: ignore[reportPrivateUsage]
    "alias": StreamLoopBuilder._view,  # pyright: ignore[reportPrivateUsage]
    "communication": StreamLoopBuilder._communication,  # pyright: ignore[reportPrivateUsage]
}
