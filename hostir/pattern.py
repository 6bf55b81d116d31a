"""What the plans of a program have in common, whatever the sizes: most of a rehearsal, done once.

A rehearsal walks a program for one class of inputs. Where it came upon buffers, kernels and
products alone, the same steps serve other sizes: between the same slots, with the same lifetimes.
Then a new size only asks where its tensors lie, which launch each kernel takes, and how torch is to
see the operands of each product. What is not as usual (an extent of 0, a kernel to be compiled) is
left to a rehearsal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from typing import TYPE_CHECKING, Any, cast

import torch

from fuser.ir import nodes
from fuser.ir import scalar as sc
from fuser.ir.core import Op
from fuser.ir.laid import Laid
from fuser.ir.scalar import Number, Scalar, Symbol
from fuser.ir.scalar_python import Computed
from fuser.ir.storage import dense_strides
from fuser.ir.tensor import TensorView
from fuser.kernels.executor import KernelExecutor
from fuser.ops.products import Product, bind_contraction
from fuser.schedule.vectorize import VECTOR_BYTES
from hostir.arena import Block, first_fit
from hostir.frame import Frame, KernelRunner
from hostir.lifetimes import Lifetime
from hostir.ops import Allocate, LaunchKernel
from hostir.plan import Plan
from hostir.slices import dropped_axes
from hostir.steps import Action, Launch, Multiply, Release, Step, allocation
from multidevice.sharding import local_extents

if TYPE_CHECKING:
    from hostir.replay import Recorder

# What of a plan belongs to a size.
_OF_A_SIZE = frozenset({"made", "steps", "blocks", "nbytes", "records"})
# What makes a step of a size, from where the tensors lie, by slot; None where a rehearsal has to.
_Make = Callable[[dict[int, Laid], Frame], Step | None]


@dataclass(frozen=True)
class Buffer:
    """A buffer that a program allocates, and where in it the buffer is used: None if it lasts."""

    tv: TensorView
    slot: int
    dtype: torch.dtype
    lies_in_order: bool
    lifetime: Lifetime | None


@dataclass(frozen=True)
class Pattern:
    """The plans of one program on one device. `steps` are those of every size, or what makes them;
    `like` is the plan of some size, and `shared` what all have in common."""

    inputs: tuple[tuple[TensorView, int], ...]
    buffers: tuple[Buffer, ...]
    layouts: Layouts
    steps: tuple[tuple[Step | _Make, Op | None], ...]
    like: Plan
    shared: Mapping[str, Any]
    # Whether torch reads something, so that it would record gradients.
    reads: bool

    def plan(self, frame: Frame) -> Plan | None:
        """Return the plan of the inputs of a frame; None where a rehearsal has to make it."""
        laid: dict[int, Laid] = {}
        requires_grad = False
        for tv, slot in self.inputs:
            t = frame.tensors[tv]
            requires_grad = requires_grad or t.requires_grad
            skipped, rest = divmod(t.data_ptr() % VECTOR_BYTES, t.element_size())
            if rest:
                return None
            laid[slot] = Laid.of(t, skipped)
            if 0 in t.shape:
                return None
        if not self.layouts.lay(frame.values, laid):
            return None
        steps: list[tuple[Step, Op | None]] = []
        for step, op in self.steps:
            made = step(laid, frame) if callable(step) else step
            if made is None:
                return None
            steps.append((made, op))
        made, placed = dict(self.like.made), list[Buffer]()
        lifetimes: list[tuple[Lifetime, int]] = []
        for buffer in self.buffers:
            if buffer.lifetime is None:
                block = _block(buffer, laid)
                made[block.slot] = allocation(buffer.tv, block, frame.machine, frame.program)
            else:
                placed.append(buffer)
                lifetimes.append((buffer.lifetime, laid[buffer.slot].nbytes()))
        offsets, nbytes = first_fit(lifetimes)
        blocks = [_block(b, laid, offset) for b, offset in zip(placed, offsets, strict=True)]
        return Plan(
            **self.shared,
            made=made,
            steps=tuple(steps),
            blocks=tuple(blocks),
            nbytes=nbytes,
            records=requires_grad and self.reads,
        )


class Layouts:
    """How the buffers of a program lie, for many sizes."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        # All at once: the extents of all buffers, then the strides and the span of each.
        shapes = [local_shape_of(b.tv) for b in buffers]
        scalars = [x for shape in shapes for x in shape]
        self._extents = begin = len(scalars)
        self._rows: list[tuple[int, int, bool, slice, slice, int]] = []
        end = 0
        for buffer, shape in zip(buffers, shapes, strict=True):
            strides = dense_strides(buffer.tv, shape)
            last = (sc.mul(sc.sub(n, sc.ONE), step) for n, step in zip(shape, strides, strict=True))
            is_dense = buffer.lies_in_order
            span = sc.product(shape) if is_dense else reduce(sc.add, last, sc.ONE)
            scalars += (*strides, span)
            rank = len(shape)
            places = slice(end, end + rank), slice(begin, begin + rank), begin + rank
            self._rows.append((buffer.slot, buffer.dtype.itemsize, is_dense, *places))
            begin, end = begin + rank + 1, end + rank
        self._all = Computed(scalars)

    def lay(self, values: Mapping[Symbol, Number], laid: dict[int, Laid]) -> bool:
        """Add each buffer by its slot; whether all have elements, and sizes that are known."""
        found: Any = self._all.at_once(values)
        if found is None or min(found[: self._extents], default=1) < 1:
            return False
        for slot, itemsize, is_dense, extents, strides, span in self._rows:
            shape, steps = found[extents], found[strides]
            laid[slot] = (
                Laid(shape, steps, itemsize, found[span], True)
                if is_dense
                else Laid.with_strides(shape, steps, itemsize)
            )
        return True


def local_shape_of(tv: TensorView) -> Sequence[Scalar]:
    """Return the sizes of a rank's shard, which exist for sizes that `Frame.local_shape` has."""
    return local_extents(tv) if tv.domain.has_devices else tv.shape()


def _block(buffer: Buffer, laid: dict[int, Laid], offset: int = 0) -> Block:
    one = laid[buffer.slot]
    return Block(buffer.slot, one.shape, one.stride(), buffer.dtype, offset)


def pattern_of(recorder: Recorder, plan: Plan) -> Pattern | None:
    """Return the pattern of a plan that was rehearsed; None where other sizes may take other
    steps."""
    program = recorder.frame.program
    inputs = [v for v in program.inputs if isinstance(v, TensorView) and not v.is_cpu_scalar]
    buffers = recorder.buffers()
    whole = {*range(len(inputs)), *(b.slot for b in buffers)}
    if len(inputs) < len(program.inputs) or not {*plan.made, *plan.outputs} <= whole:
        return None
    steps: list[tuple[Step | _Make, Op | None]] = []
    for step, op in plan.steps:
        made = _same(step, op) or _kernel(step, op, recorder, whole) or _product(step, op, whole)
        if made is None:
            return None
        steps.append((made, op))
    reads = any(not isinstance(step, Launch | Release | Action) for step, _ in plan.steps)
    places = tuple((v, i) for i, v in enumerate(inputs))
    shared = {f.name: getattr(plan, f.name) for f in fields(plan) if f.name not in _OF_A_SIZE}
    return Pattern(places, buffers, Layouts(buffers), tuple(steps), plan, shared, reads)


def _same(step: Step, op: Op | None) -> Step | None:
    """Return a step that is the same for all sizes."""
    is_same = isinstance(step, Release) or (isinstance(step, Action) and isinstance(op, Allocate))
    return step if is_same else None


def _kernel(step: Step, op: Op | None, recorder: Recorder, whole: set[int]) -> _Make | None:
    if not isinstance(step, Launch) or not isinstance(op, LaunchKernel):
        return None
    runner: KernelRunner = recorder.machine.runner(op.group)
    program = recorder.frame.program
    operands, stream = step.operands, step.stream
    is_plain = all(isinstance(v, TensorView) for v in op.ins) and whole.issuperset(operands)
    if not is_plain or not isinstance(runner, KernelExecutor) or any(dropped_axes(op, program)):
        return None

    shapes = [local_shape_of(v) for v in (*op.ins, *op.outs) if isinstance(v, TensorView)]
    are_sized = runner.sizes_fit(shapes)

    def launch(laid: dict[int, Laid], frame: Frame) -> Launch | None:
        tensors = [laid[slot] for slot in operands]
        device = frame.machine.device
        kernel = runner.launch_laid(tensors, frame.sizes, device, are_sized=are_sized)
        return None if kernel is None else Launch(kernel, operands, (), None, stream)

    return launch


def _product(step: Step, op: Op | None, whole: set[int]) -> _Make | None:
    if not isinstance(step, Multiply) or not isinstance(op, nodes.MatmulOp | nodes.LinearOp):
        return None
    ins, out = step.ins, step.out
    if not whole.issuperset((*ins, out)) or min(op.inputs[0].ndim, op.inputs[1].ndim) < 2:
        return None

    def multiply(laid: dict[int, Laid], frame: Frame) -> Multiply | None:
        result = laid[out]
        if not result.is_contiguous():
            return None
        way: Any = bind_contraction(op, cast("Any", [laid[i] for i in ins]), cast("Any", result))
        return Multiply(way, ins, out) if isinstance(way, Product) else None

    return multiply
