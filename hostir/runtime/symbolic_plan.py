"""What the plans of a program have in common, whatever the sizes: most of a rehearsal, done once.

A rehearsal, or the first run, walks a program for one class of inputs. Where it came upon buffers,
views, kernels, products and communications of whole buffers alone, the same steps serve other
sizes: between the same slots, with the same lifetimes. Then a new size only asks where its tensors
lie, which launch each kernel takes, and how torch is to see the operands of each product. What is
not as usual (an extent of 0, a copy where there was a view, a kernel to be compiled) is left to a
rehearsal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, cast

from fuser.ir.domain import strided_layout
from fuser.ir.domain.strided_layout import Laid
from fuser.ir.fusion import TensorOp, TensorView
from fuser.ir.memory_layout import dense_strides
from fuser.ir.op import Op
from fuser.ir.ops import nodes
from fuser.ir.ops.nodes import SliceOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.compiled import Computed
from fuser.ir.scalar.constructors import Number, Scalar, Symbol
from fuser.kernels.executor import FusedKernelExecutor
from fuser.support.device import VECTOR_BYTES
from hostir.ir.ops import (
    NUMBER_OF_STREAMS,
    RANK,
    Allocate,
    Communication,
    Deallocate,
    ForLoop,
    IfThenElse,
    LaunchKernel,
    LocalSlice,
    Wait,
)
from hostir.ir.program import walk
from hostir.ir.shard_layout import viewed_strides
from hostir.lowering.slices import dropped_axes
from hostir.runtime.execute import copying, free_scalars, numbers_reader
from hostir.runtime.frame import Frame, KernelRunner
from hostir.runtime.plan import Plan, fit, successions
from hostir.runtime.steps import (
    Action,
    Block,
    LaunchStep,
    Multiply,
    PlannedBuffer,
    Release,
    Started,
    Step,
    View,
    allocation,
    announcer,
)
from hostir.runtime.torch_ops import contraction, writing
from multidevice.sharding.queries import local_extents

if TYPE_CHECKING:
    from hostir.runtime.recorder import Recorder

# What of a plan belongs to a size.
_OF_A_SIZE = frozenset({"made", "steps", "blocks", "nbytes", "records", "settled"})


@dataclass
class Size:
    """A new size of a program: how the tensors lie and the shapes of views, by slot; and what the
    communications are first started by."""

    frame: Frame
    laid: dict[int, Laid]
    shapes: dict[int, tuple[int, ...]]
    posts: dict[int, Started]


# What makes a step of a size; None where a rehearsal has to.
_Make = Callable[[Size], Step | None]


@dataclass(frozen=True)
class Pattern:
    """The plans of one program on one device. `steps` are those of every size, or what makes them;
    `like` is the plan of some size, and `shared` what all have in common."""

    inputs: tuple[tuple[TensorView, int], ...]
    # The positions of scalar inputs on which no size depends, and those that changed in the class.
    free: tuple[frozenset[int], tuple[Symbol, ...]]
    # The buffers that outlive a run; those of the arena, and which of these come after which.
    lasting: tuple[PlannedBuffer, ...]
    placed: tuple[PlannedBuffer, ...]
    after: Sequence[Sequence[bool]]
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
            if rest or 0 in t.shape:
                return None
            laid[slot] = Laid.of(t, skipped)
        positions, free = self.free
        if free_scalars(frame, positions) != free:
            return None
        shapes = self.layouts.lay(frame.values, laid)
        if shapes is None:
            return None
        size = Size(frame, laid, shapes, {})
        steps: list[tuple[Step, Op | None]] = []
        for step, op in self.steps:
            made = step(size) if callable(step) else step
            if made is None:
                return None
            steps.append((made, op))
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
        return replace(plan, settled=partial(_settled, plan, size.posts)) if size.posts else plan


def _settled(plan: Plan, posts: Mapping[int, Started]) -> Plan:
    """Return a plan that has run once, with its communications started as later runs do."""
    steps = list(plan.steps)
    for k, first in posts.items():
        assert first.later is not None, "a communication that the first run did not start"
        steps[k] = first.later, steps[k][1]
    return replace(plan, steps=tuple(steps))


class Layouts:
    """How the buffers of a program lie, and the shapes of views, for many sizes."""

    def __init__(self, buffers: Sequence[PlannedBuffer], views: Mapping[int, TensorView]) -> None:
        # All at once: the extents of all buffers and views, then the strides and the span of each
        # buffer.
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
        self, values: Mapping[Symbol, Number], laid: dict[int, Laid]
    ) -> dict[int, tuple[int, ...]] | None:
        """Add each buffer by its slot and return the shapes of views; None unless all have
        elements, and sizes that are known."""
        found: Any = self._all.at_once(values)
        if found is None or min(found[: self._extents], default=1) < 1:
            return None
        for slot, itemsize, is_dense, extents, strides, span in self._rows:
            shape, steps = found[extents], found[strides]
            laid[slot] = (
                Laid(shape, steps, itemsize, found[span], True)
                if is_dense
                else Laid.with_strides(shape, steps, itemsize)
            )
        return {slot: found[extents] for slot, extents in self._views}


def local_shape_of(tv: TensorView) -> Sequence[Scalar]:
    """Return the sizes of a rank's shard, which exist for sizes that `Frame.local_shape` has."""
    return local_extents(tv) if tv.domain.has_devices else tv.shape()


def _block(buffer: PlannedBuffer, laid: dict[int, Laid], offset: int = 0) -> Block:
    one = laid[buffer.slot]
    return Block(buffer.slot, one.shape, one.stride(), buffer.dtype, offset)


# ------------------------------------------------------------------ from a plan
class _PlanFacts:
    """What is known of a plan while its steps are gone through, in order."""

    def __init__(self, recorder: Recorder, slots: set[int]) -> None:
        self.recorder = recorder
        # Of which it can be told how they lie; and the views among them.
        self.slots = slots
        self.views: dict[int, TensorView] = {}
        # The place of the step among all.
        self.place = 0


def pattern_of(recorder: Recorder, plan: Plan) -> Pattern | None:
    """Return the pattern of a plan that was rehearsed, or recorded in a run; None where other sizes
    may take other steps."""
    frame = recorder.frame
    inputs = [
        (v, i)
        for i, v in enumerate(frame.program.inputs)
        if isinstance(v, TensorView) and not v.is_cpu_scalar and frame.is_mine(v)
    ]
    buffers = recorder.buffers()
    own = {b.slot for b in buffers}
    known = _PlanFacts(recorder, own | {i for _, i in inputs})
    if frame.storage.switches_streams or not plan.made.keys() <= own:
        return None
    if not all(map(_goes_one_way, walk(frame.program.ops))):
        return None
    steps: list[tuple[Step | _Make, Op | None]] = []
    for known.place, (step, op) in enumerate(plan.steps):
        made = next(filter(None, (rule(step, op, known) for rule in _RULES)), None)
        if made is None:
            return None
        steps.append((made, op))
    if not known.slots.issuperset(plan.outputs):
        return None
    reads = not all(
        isinstance(step, LaunchStep) or isinstance(op, Allocate | Deallocate)
        for step, op in plan.steps
    )
    shared = {f.name: getattr(plan, f.name) for f in fields(plan) if f.name not in _OF_A_SIZE}
    layouts = Layouts(buffers, known.views)
    free = recorder.execution.given_free, recorder.execution.free
    lasting = tuple(b for b in buffers if b.lifetime is None and not b.is_never_made)
    in_arena = {block.slot for block in plan.blocks}
    lifetimes = {b: b.lifetime for b in buffers if b.lifetime is not None}
    placed = {b: lifetime for b, lifetime in lifetimes.items() if b.slot in in_arena}
    after = successions(tuple(placed.values()))
    return Pattern(
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


def _goes_one_way(op: Op) -> bool:
    """Whether no size decides what is done inside of an op."""
    if isinstance(op, IfThenElse):
        return {RANK, NUMBER_OF_STREAMS}.issuperset(sc.symbols(op.predicate))
    return not isinstance(op, ForLoop)


def _same(step: Step, op: Op | None, known: _PlanFacts) -> Step | None:
    """Return a step that is the same for all sizes."""
    is_same = isinstance(step, Release) or (
        isinstance(step, Action) and isinstance(op, Allocate | Wait)
    )
    return step if is_same else None


def _view(step: Step, op: Op | None, known: _PlanFacts) -> _Make | None:
    if not isinstance(step, View) or not isinstance(op, TensorOp) or type(op) not in VIEWS:
        return None
    source, out, itemsize, kind = step.source, step.out, step.itemsize, op
    if source not in known.slots:
        return None
    known.slots.add(out)
    known.views[out] = op.out_tensor
    is_result = op.out_tensor in known.recorder.frame.program.outputs

    def view(size: Size) -> View | None:
        one, shape = size.laid[source], size.shapes[out]
        found = seen(kind, one, shape, size.frame.values)
        if found is None:
            return None
        strides, shift = found
        if is_result:
            strides = viewed_strides(kind.out_tensor, shape, strides)
        size.laid[out] = one.seen(shape, strides, shift)
        return View(source, out, shape, strides, shift, itemsize)

    return view


def _kernel(step: Step, op: Op | None, known: _PlanFacts) -> _Make | None:
    if not isinstance(step, LaunchStep) or not isinstance(op, LaunchKernel):
        return None
    recorder = known.recorder
    runner: KernelRunner = recorder.machine.runner(op.group)
    operands, stream = step.operands, step.stream
    if not isinstance(runner, FusedKernelExecutor) or not known.slots.issuperset(operands):
        return None
    if any(dropped_axes(op, recorder.frame.program)):
        return None
    scalars = [v for v in op.ins if isinstance(v, Scalar)]
    places, free = recorder.execution.places, recorder.execution.free
    shapes = [local_shape_of(v) for v in (*op.ins, *op.outs) if isinstance(v, TensorView)]
    are_sized = runner.sizes_fit(shapes)

    def launch(size: Size) -> LaunchStep | None:
        frame, laid = size.frame, size.laid
        tensors = [laid[slot] for slot in operands]
        numbers = tuple([frame.number(v) for v in scalars]) if scalars else ()
        kernel = runner.launch_laid(
            tensors, frame.sizes, frame.machine.device, numbers, are_sized=are_sized
        )
        if kernel is None:
            return None
        read = numbers_reader(scalars, places, free, frame) if scalars else None
        return LaunchStep(kernel, operands, numbers, read, stream)

    return launch


def _product(step: Step, op: Op | None, known: _PlanFacts) -> _Make | None:
    if not isinstance(step, Multiply | Action) or not isinstance(op, nodes.Contraction):
        return None
    recorder = known.recorder
    places = tuple(recorder.slot(v) for v in op.inputs), recorder.slot(op.out)
    ins, out = places
    if not known.slots.issuperset((*ins, out)) or min(v.ndim for v in op.inputs[:2]) < 2:
        return None

    def multiply(size: Size) -> Step:
        laid = size.laid
        made = contraction(op, places, cast("Any", [laid[i] for i in ins]), cast("Any", laid[out]))
        return Action(made) if callable(made) else made

    return multiply


def _local_slice(step: Step, op: Op | None, known: _PlanFacts) -> _Make | None:
    if not isinstance(op, LocalSlice) or not isinstance(step, Action):
        return None
    inp, out, axis = known.recorder.slot(op.inp), known.recorder.slot(op.out), op.axis
    if not known.slots.issuperset((inp, out)):
        return None

    def make(size: Size) -> Action:
        like = cast("Any", size.laid[out])
        return Action(copying(like, (inp, out), axis, op.bounds(size.frame)))

    return make


def _communication(step: Step, op: Op | None, known: _PlanFacts) -> _Make | None:
    recorder, place = known.recorder, known.place
    if not isinstance(op, Communication) or op not in recorder.posts:
        return None
    posting = recorder.posts[op]
    buffers = {posting.inp, posting.out} - {-1}
    is_fixed = op.root is None or sc.int_value(op.root) is not None
    if announcer(op, recorder.machine) or not is_fixed or not buffers <= known.slots:
        return None

    def start(size: Size) -> Started:
        started = size.posts[place] = posting.started()
        return started

    return start


def _copy(step: Step, op: Op | None, known: _PlanFacts) -> _Make | None:
    """Results that torch computes into buffers."""
    if (
        not isinstance(step, Action)
        or not isinstance(op, TensorOp)
        or isinstance(op, nodes.Contraction)
    ):
        return None
    recorder = known.recorder
    ins, free = recorder.execution.operands(op), recorder.execution.free_slots
    outs = [recorder.slot(v) for v in op.outputs]
    if not known.slots.issuperset([*outs, *(i for i in ins if i is not None)]):
        return None
    copied = op

    def make(size: Size) -> Action:
        places = [(i, cast("Any", size.laid[i])) for i in outs]
        return Action(writing(copied, size.frame, ins, free, places))

    return make


_RULES = (_same, _view, _kernel, _product, _local_slice, _copy, _communication)


# ----------------------------------------------------------------------
# Where the views of torch lie, told from where their operands lie: no tensor is made for it.

Shape = tuple[int, ...]
# Strides, and elements from the operand's first one to the view's; None where torch has to tell.
Seen = tuple[Shape, int] | None


def _load_store(op: nodes.LoadStoreOp, x: Laid, shape: Shape, values: object) -> Seen:
    root = op.out.domain.root_numbers
    if not root:
        return x.stride(), 0
    return tuple([x.stride(root.index(n)) for n in op.out.domain.logical_numbers]), 0


def _broadcast(op: nodes.BroadcastOp, x: Laid, shape: Shape, values: object) -> Seen:
    sizes, strides = list(x.shape), list(x.stride())
    for p, is_new in enumerate(op.flags):
        if is_new:
            strides.insert(p, sizes[p] * strides[p] if p < len(sizes) else 1)
            sizes.insert(p, 1)
    return tuple(strides), 0


def _squeeze(op: nodes.SqueezeOp, x: Laid, shape: Shape, values: object) -> Seen:
    return tuple([s for s, gone in zip(x.stride(), op.flags, strict=True) if not gone]), 0


def _expand(op: nodes.ExpandOp, x: Laid, shape: Shape, values: object) -> Seen:
    if len(shape) != x.ndim:
        return None
    sized = zip(x.shape, x.stride(), shape, strict=True)
    return tuple([step if n == wanted else 0 for n, step, wanted in sized]), 0


def _reshape(op: nodes.ReshapeOp, x: Laid, shape: Shape, values: object) -> Seen:
    if x.stride() == strided_layout.dense_strides(x.shape):
        return strided_layout.dense_strides(shape), 0
    if 1 in x.shape or 1 in shape:
        return None  # torch gives axes of one element strides of its own
    strides = strided_layout.viewed_strides(x.shape, x.stride(), shape)
    return None if strides is None else (strides, 0)


def _slice(op: SliceOp, x: Laid, shape: Shape, values: Mapping[Symbol, Number]) -> Seen:
    shift = 0
    axes = zip(op.starts, op.stops, x.shape, x.stride(), shape, strict=True)
    for start, stop, n, step, wanted in axes:
        begin, end, _ = slice(*(int(sc.evaluate(s, values)) for s in (start, stop))).indices(n)
        if end - begin != wanted:
            return None
        shift += begin * step
    return x.stride(), shift


VIEWS: dict[type[TensorOp], Callable[[Any, Laid, Shape, Mapping[Symbol, Number]], Seen]] = {
    nodes.BroadcastOp: _broadcast,
    nodes.ExpandOp: _expand,
    nodes.LoadStoreOp: _load_store,
    nodes.ReshapeOp: _reshape,
    SliceOp: _slice,
    nodes.SqueezeOp: _squeeze,
}


def seen(op: TensorOp, x: Laid, shape: Sequence[int], values: Mapping[Symbol, Number]) -> Seen:
    """Return how the result of an op, a view of `x` with this shape, lies in memory."""
    return VIEWS[type(op)](op, x, tuple(shape), values)
