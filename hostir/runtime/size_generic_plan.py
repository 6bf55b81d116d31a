"""The size-generic plan: makes recorded plans for new input sizes without a dry run. A plan is the
list of steps (such as kernel launches) that repeat a run on inputs of certain sizes.

A dry run on tensors without contents, or the first run, carries out a program for inputs of certain
sizes and records the steps. A recorded step may have a function that makes the same step for other
sizes (`hostir.runtime.execute.GenericStep`). If all steps have such a function, the list of steps,
the slots and the lifetimes of buffers are the same for all sizes. For new sizes, only layouts are
computed, and the steps are made from the layouts.

Unusual sizes still need a dry run:

- an extent is 0;
- an op copies although the first sizes had a view;
- a kernel is not compiled yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, cast

import torch

from fuser.ir.domain.strided_layout import StridedLayout
from fuser.ir.fusion import TensorView
from fuser.ir.memory_layout import dense_strides
from fuser.ir.op import Op, walk
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.compiled import Computed
from fuser.ir.scalar.constructors import Number, Symbol
from fuser.support.device import VECTOR_BYTES
from hostir.ir.ops import NUMBER_OF_STREAMS, RANK, Allocate, Deallocate, ForLoop, IfThenElse
from hostir.runtime.execute import as_step, free_scalars, local_shape_of
from hostir.runtime.frame import Frame
from hostir.runtime.plan import Plan, fit, successions
from hostir.runtime.steps import (
    Block,
    Closure,
    LaunchStep,
    PlannedBuffer,
    Step,
    TwoPhaseStep,
    View,
    allocation,
)

if TYPE_CHECKING:
    from hostir.runtime.recorder import Recorder

# The fields of a plan that depend on the sizes.
_OF_A_SIZE = frozenset({"made", "steps", "blocks", "nbytes", "records", "after_first_run"})


@dataclass
class NewSizes:
    """The layouts of a program's tensors for new input sizes, from which the recorded steps for
    these sizes are made.

    `laid` has the layouts of tensors by slot (position in the list of a run's values), and `shapes`
    the shapes of views by slot. Implements `hostir.runtime.execute.InputSizes`.
    """

    frame: Frame
    laid: dict[int, StridedLayout]
    shapes: dict[int, tuple[int, ...]]

    def like(self, slot: int) -> torch.Tensor:
        """Returns the layout of the tensor in `slot`, a position in the list of a run's values. A
        layout has the shape and strides of a tensor, which suffice to make a step.
        """
        return cast("torch.Tensor", self.laid[slot])

    def shape(self, tv: TensorView, slot: int) -> tuple[int, ...]:
        """Returns the shape of this rank's part of `tv`, a view that a run stores at the position
        `slot` in its list of values.
        """
        return self.shapes[slot]


# Makes a step for new sizes; returns None if these sizes need a dry run.
_Make = Callable[[NewSizes], Step | Closure | None]


@dataclass(frozen=True)
class SizeGenericPlan:
    """Makes the recorded plans (lists of steps that repeat a run) of one program on one device, for
    inputs of any sizes.

    - `inputs`: the tensor inputs with their slots (positions in the list of a run's values).
    - `layouts`: computes the layouts of all buffers for given sizes.
    - `steps`: for each recorded step, a function that makes the step for given sizes.
    - `like`: the plan that was recorded, for some sizes.
    - `shared`: the fields of `Plan` that do not depend on the sizes.
    """

    inputs: tuple[tuple[TensorView, int], ...]
    # The positions of scalar inputs on which no size depends; the scalars that may change between
    # runs of one plan.
    free: tuple[frozenset[int], tuple[Symbol, ...]]
    # The buffers that are still used after a run; the buffers in the arena; and for each buffer in
    # the arena, whether each earlier one has ended when the buffer is allocated.
    lasting: tuple[PlannedBuffer, ...]
    placed: tuple[PlannedBuffer, ...]
    after: Sequence[Sequence[bool]]
    layouts: Layouts
    steps: tuple[tuple[_Make, Op | None], ...]
    like: Plan
    shared: Mapping[str, Any]
    # Whether torch reads a tensor, so that it would record gradients.
    reads: bool

    def plan_for(self, frame: Frame) -> Plan | None:
        """Returns a plan, the list of steps of a run, for the inputs of `frame`. The new plan is
        made from the plan for other sizes, without following the program again.

        Returns None if this is impossible for these inputs, for example if an extent is 0. The
        program must then be followed in a dry run.
        """
        laid: dict[int, StridedLayout] = {}
        requires_grad = False
        for tv, slot in self.inputs:
            t = frame.tensors[tv]
            requires_grad = requires_grad or t.requires_grad
            skipped, rest = divmod(t.data_ptr() % VECTOR_BYTES, t.element_size())
            if rest or 0 in t.shape:
                return None
            laid[slot] = StridedLayout.of(t, skipped)
        positions, free = self.free
        if free_scalars(frame, positions) != free:
            return None
        shapes = self.layouts.lay(frame.values, laid)
        if shapes is None:
            return None
        sizes = NewSizes(frame, laid, shapes)
        steps: list[tuple[Step, Op | None]] = []
        for make, op in self.steps:
            step = make(sizes)
            if step is None:
                return None
            if isinstance(step, View):
                laid[step.out] = laid[step.source].viewed(step.shape, step.strides, step.shift)
            steps.append((as_step(step), op))
        made = dict(self.like.made)
        for buffer in self.lasting:
            block = _block(buffer, laid)
            made[block.slot] = allocation(buffer.tv, block, frame.machine, frame.program)
        offsets, nbytes = fit(self.after, [laid[b.slot].nbytes() for b in self.placed])
        blocks = [_block(b, laid, offset) for b, offset in zip(self.placed, offsets, strict=True)]
        plan = Plan(
            **self.shared,
            made=made,
            steps=tuple(steps),
            blocks=tuple(blocks),
            nbytes=nbytes,
            records=requires_grad and self.reads,
        )
        if any(isinstance(step, TwoPhaseStep) for step, _ in steps):
            return replace(plan, after_first_run=partial(_with_later_steps, plan))
        return plan


def _with_later_steps(plan: Plan) -> Plan:
    """Returns the list of steps of `plan` for later runs, after the first run.

    A communication, for example, is started normally in the first run, and by a faster call that
    the backend has then prepared in later runs. Each such step is replaced by its form for later
    runs.
    """
    steps: list[tuple[Step, Op | None]] = []
    for step, op in plan.steps:
        later = step.later if isinstance(step, TwoPhaseStep) else step
        assert later is not None, "the first run did not reach a two-phase step"
        steps.append((later, op))
    return replace(plan, steps=tuple(steps))


class Layouts:
    """Computes the layouts of a program's buffers, and the shapes of views, for given input sizes.

    `buffers` are the buffers that the program allocates. `views` has the views by slot, their
    position in the list of a run's values.
    """

    def __init__(self, buffers: Sequence[PlannedBuffer], views: Mapping[int, TensorView]) -> None:
        # One compiled expression computes all: first the extents of all buffers and views, then the
        # strides and the span of each buffer.
        shapes = [local_shape_of(tv) for tv in (*(b.tv for b in buffers), *views.values())]
        scalars = [x for shape in shapes for x in shape]
        self._extents = begin = len(scalars)
        self._rows: list[tuple[int, int, bool, slice, slice, int]] = []
        end = 0
        for buffer, shape in zip(buffers, shapes, strict=False):
            strides = dense_strides(buffer.tv, shape)
            last = (sc.mul(sc.sub(n, sc.ONE), step) for n, step in zip(shape, strides, strict=True))
            is_dense = buffer.lies_in_order
            span = sc.product(shape) if is_dense else reduce(sc.add, last, sc.ONE)
            scalars += (*strides, span)
            rank = len(shape)
            places = slice(end, end + rank), slice(begin, begin + rank), begin + rank
            self._rows.append((buffer.slot, buffer.dtype.itemsize, is_dense, *places))
            begin, end = begin + rank + 1, end + rank
        self._views: list[tuple[int, slice]] = []
        for slot, tv in views.items():
            self._views.append((slot, slice(end, end + tv.ndim)))
            end += tv.ndim
        self._all = Computed(scalars)

    def lay(
        self, values: Mapping[Symbol, Number], laid: dict[int, StridedLayout]
    ) -> dict[int, tuple[int, ...]] | None:
        """Computes the layouts of all buffers for the symbols' `values`, which include the sizes,
        and adds them to `laid`.

        The keys of `laid` are slots, positions in the list of a run's values. Returns the shapes of
        views, by slot. Returns None if an extent is 0 or has no value.
        """
        found: Any = self._all.at_once(values)
        if found is None or min(found[: self._extents], default=1) < 1:
            return None
        for slot, itemsize, is_dense, extents, strides, span in self._rows:
            shape, steps = found[extents], found[strides]
            laid[slot] = (
                StridedLayout(shape, steps, itemsize, found[span], True)
                if is_dense
                else StridedLayout.with_strides(shape, steps, itemsize)
            )
        return {slot: found[extents] for slot, extents in self._views}


def _block(buffer: PlannedBuffer, laid: dict[int, StridedLayout], offset: int = 0) -> Block:
    one = laid[buffer.slot]
    return Block(buffer.slot, one.shape, one.stride(), buffer.dtype, offset)


# ------------------------------------------------------------------ from a plan
def size_generic_plan(recorder: Recorder, plan: Plan) -> SizeGenericPlan | None:
    """Returns an object that makes plans like `plan` for other input sizes. A plan is the list of
    steps that repeat a run.

    `recorder` has recorded the plan. Returns None if runs on other sizes may need other steps, for
    example because the program has a loop.
    """
    frame = recorder.frame
    inputs = [
        (v, i)
        for i, v in enumerate(frame.program.inputs)
        if isinstance(v, TensorView) and not v.is_cpu_scalar and frame.is_mine(v)
    ]
    buffers = recorder.buffers()
    own = {b.slot for b in buffers}
    # The slots whose layouts are computable for other sizes, and the views among them.
    slots = own | {i for _, i in inputs}
    views: dict[int, TensorView] = {}
    if frame.storage.switches_streams or not plan.made.keys() <= own:
        return None
    if not all(map(_is_independent_of_sizes, walk(frame.program.ops))):
        return None
    steps: list[tuple[_Make, Op | None]] = []
    for (step, op), make_generic in zip(plan.steps, recorder.generic, strict=True):
        generic = None if make_generic is None else make_generic()
        if generic is None or not slots.issuperset(generic[0]):
            return None
        if isinstance(step, View) and op is not None:
            slots.add(step.out)
            (views[step.out],) = (v for v in op.outputs if isinstance(v, TensorView))
        steps.append((generic[1], op))
    if not slots.issuperset(plan.outputs):
        return None
    reads = not all(
        isinstance(step, LaunchStep) or isinstance(op, Allocate | Deallocate)
        for step, op in plan.steps
    )
    shared = {f.name: getattr(plan, f.name) for f in fields(plan) if f.name not in _OF_A_SIZE}
    layouts = Layouts(buffers, views)
    free = recorder.execution.free_positions, recorder.execution.free_symbols
    lasting = tuple(b for b in buffers if b.lifetime is None and not b.is_never_made)
    in_arena = {block.slot for block in plan.blocks}
    lifetimes = {b: b.lifetime for b in buffers if b.lifetime is not None}
    placed = {b: lifetime for b, lifetime in lifetimes.items() if b.slot in in_arena}
    after = successions(tuple(placed.values()))
    return SizeGenericPlan(
        tuple(inputs),
        free,
        lasting,
        tuple(placed),
        after,
        layouts,
        tuple(steps),
        plan,
        shared,
        reads,
    )


def _is_independent_of_sizes(op: Op) -> bool:
    """Whether `op` runs in the same way for all input sizes. False for a loop, and for a branch
    whose condition depends on more than the rank and the number of streams.

    The recorded steps of a run can serve for other sizes only if all ops of the program run in the
    same way for all sizes.
    """
    if isinstance(op, IfThenElse):
        return {RANK, NUMBER_OF_STREAMS}.issuperset(sc.symbols(op.predicate))
    return not isinstance(op, ForLoop)
