"""The host ops of one rank: buffers and their names, work on the device, streams, control flow.

A host program is not in SSA form: an op writes a tensor that `Allocate` made, or that is a name of
another's buffer. So `out` of a library op is a destination, and `out` of a view op is a new name
for its input. Indices are scalar expressions over loop indices, `rank` and `numberOfStreams`: one
text holds for all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from fuser.ir.domain.tensor_domain import IterDomain
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorView, Variant
from fuser.ir.naming import axis_words
from fuser.ir.op import Op, attr, operand, operands, region, result, results
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Number, Scalar, ScalarLike, Symbol
from fuser.ir.types import DEVICE_TYPES, MemoryType, ParallelType
from fuser.support.errors import ExecutionError, UnsupportedError, VerifyError, user_code
from hostir.ir.effects import (
    Captures,
    Effect,
    Enters,
    Frees,
    Joins,
    Makes,
    Part,
    Reads,
    Shows,
    Stream,
    Writes,
)
from hostir.ir.ops.base import (
    BufferSharing,
    HostOp,
    LocalShapes,
    ProgramAround,
    Runtime,
    Sizes,
    Work,
)
from hostir.ir.shape_rules import check_kept_axes, device_cuts
from hostir.ir.shard_layout import allocated_elements, held_nbytes
from multidevice.sharding.placement import placement
from multidevice.sharding.reshard import TeamOf
from multidevice.sharding.streams import dropped_axes_of, stream_axis


# ------------------------------------------------------------------ buffers
class Allocate(HostOp):
    """Makes a buffer for the local shard of `buffer`; for that of one step of a stream loop, if
    its allocation has a stream axis, of which `stream_index` is the step."""

    buffer: TensorView = result()
    zero_init: bool = attr(default=False)
    stream_index: Scalar | None = operand(default=None, kw_only=True)
    OLDER = ("{buffer} = ALLOCATE(mem_type={mem_type}, zero_init={zero_init})",)

    def template(self) -> str:
        return _allocate_template(self.stream_index is not None)

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        yield {"stream_index": None}, _allocate_template(False)
        yield {}, _allocate_template(True)

    @property
    def mem_type(self) -> str:
        return self.buffer.memory.text

    @property
    def size(self) -> Scalar:
        """The number of elements of the local shard, or of a step's block that is not the last."""
        return allocated_elements(self.buffer, per_step=self.stream_index is not None)

    def effects(self) -> tuple[Effect, ...]:
        return (Makes(self.buffer, is_filled=self.zero_init, step=self.stream_index),)

    def emit(self, rt: Runtime) -> None:
        if not rt.is_named(self.buffer):
            rt.allocate(self.buffer, self.stream_index, is_cleared=self.zero_init)
        elif self.zero_init:
            # A part of another buffer, as in the loops of nvFuser's programs, or the caller's.
            rt.call(_clear, self.buffer)

    def verify(self) -> None:
        if self.buffer.memory not in (MemoryType.global_, MemoryType.symmetric):
            raise VerifyError(
                f"{self.buffer} is not in global memory, but {self.buffer.memory.text}"
            )


def _clear(buffer: Any) -> None:
    buffer.zero_()


def _allocate_template(has_index: bool) -> str:
    index = ", stream_index={stream_index}" if has_index else ""
    return (
        "{buffer} = ALLOCATE(buffer={buffer}, mem_type={mem_type}, size={size}, "
        "zero_init={zero_init}, resets_to_zero=false" + index + ")"
    )


class Deallocate(HostOp):
    """Gives up the buffer; no later op may use it or a view of it."""

    buffer: TensorView = operand()
    TEXT = "Deallocate {\n  {buffer}\n}"

    def effects(self) -> tuple[Effect, ...]:
        return (Frees(self.buffer),)

    def emit(self, rt: Runtime) -> None:
        rt.deallocate(self.buffer)


# ------------------------------------------------------------------ launches
@dataclass(frozen=True)
class KernelGroup:
    """A kernel as a fusion of global tensors, and the scheduler that accepts it."""

    number: int
    fusion: Fusion
    scheduler: str


class LaunchKernel(HostOp):
    """Runs the kernel of group `group` on the current stream; `outs` are allocated or aliases."""

    ins: tuple[TensorView | Scalar, ...] = operands()
    outs: tuple[TensorView, ...] = results()
    group: int = attr()
    HAS_CONTROL_SCALARS = False
    TEXT = "LaunchKernel(\n  Group ID: {group},\n  Inputs: {ins},\n  Outputs: {outs},\n)"

    @property
    def subject(self) -> str:
        return f"The launch of kernel group {self.group}"

    def effects(self) -> tuple[Effect, ...]:
        return _computes(self.ins, self.outs)

    def emit(self, rt: Runtime) -> None:
        rt.launch(self)

    def verify_in(self, program: ProgramAround) -> None:
        fusion = program.kernel(self.group)
        _check_operands(self, fusion, f"group {self.group}", _kernel_kind)


class PostOnStream(HostOp):
    """Runs the host unit of number `unit`, a fusion of its own, on the current stream.

    `outs` are written where they have a buffer, and made where they have none.
    """

    ins: tuple[TensorView | Scalar, ...] = operands()
    outs: tuple[TensorView, ...] = results()
    unit: int = attr()
    MAKES_RESULTS = True
    HAS_CONTROL_SCALARS = False
    TEXT = "PostOnStream (HostUnit{unit}, Inputs:{ins}, Outputs:{outs})"

    @property
    def subject(self) -> str:
        return f"The launch of host unit {self.unit}"

    @property
    def buffer_sharing(self) -> BufferSharing:
        return "freely"

    def effects(self) -> tuple[Effect, ...]:
        return _computes(self.ins, self.outs)

    def emit(self, rt: Runtime) -> None:
        rt.run_unit(self)

    def work(self, sizes: Sizes) -> Work:
        raise UnsupportedError(
            f"cost: what PostOnStream (HostUnit{self.unit}) takes is not known before the unit is "
            f"scheduled{user_code(self.where)}"
        )

    def verify_in(self, program: ProgramAround) -> None:
        fusion = program.unit(self.unit)
        # Its extents have names of their own.
        _check_operands(self, fusion, f"HostUnit{self.unit}", _unit_kind)
        for alias in fusion.aliases:
            raise VerifyError(f"HostUnit{self.unit} updates its input {alias.into} in place")


def _computes(
    ins: tuple[TensorView | Scalar, ...], outs: tuple[TensorView, ...]
) -> tuple[Effect, ...]:
    reads = [Reads(v) for v in ins if isinstance(v, TensorView)]
    return (*reads, *map(Writes, outs))


# What a launch must have in common with the fusion that it runs.
def _kernel_kind(value: TensorView | Scalar, like: TensorView | Scalar | None = None) -> object:
    """Returns what a launch and its kernel must agree on; `like` may be a slice of the value."""
    if isinstance(value, TensorView):
        shape = list(map(str, value.shape()))
        gone = dropped_axes_of(value, like.ndim) if isinstance(like, TensorView) else ()
        shape = [n for axis, n in enumerate(shape) if axis not in gone]
        return (value.dtype(), shape, value.mesh)
    return value.dtype


def _unit_kind(value: TensorView | Scalar, like: object = None) -> object:
    """Returns what a post and its unit must agree on."""
    if isinstance(value, TensorView):
        return (value.dtype(), value.ndim, value.mesh)
    return value.dtype


def _check_operands(
    op: LaunchKernel | PostOnStream,
    fusion: Fusion,
    where: str,
    kind: Callable[..., object],
) -> None:
    """Raises `VerifyError` where operands of a launch or post are not those of its fusion, which
    stands at `where`; `kind` says what must be equal."""
    for what, mine, theirs in (
        ("inputs", op.ins, fusion.inputs),
        ("outputs", op.outs, fusion.outputs),
    ):
        if len(mine) != len(theirs):
            raise VerifyError(f"{len(mine)} {what}, but {where} has {len(theirs)}")
        for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if kind(a) != kind(b, like=a):
                differ = _difference(a, b)
                raise VerifyError(f"its {what[:-1]} {k} is {a}, but {where} has {b}{differ}")


def _difference(a: TensorView | Scalar, b: TensorView | Scalar) -> str:
    """Returns in what a launch's operand differs from the fusion's, where that is one thing."""
    if not (isinstance(a, TensorView) and isinstance(b, TensorView)):
        return ""
    if a.dtype() is not b.dtype():
        return ", of another dtype"
    if a.ndim != b.ndim:
        return f": {a.ndim} axes, expected {b.ndim}"
    return ", on another mesh" if a.mesh != b.mesh else ", of other extents"


# ------------------------------------------------------------------ slices
class LocalSlice(HostOp):
    """Copies this rank's part of the replicated `inp`: no communication.

    `axis` counts the logical axes without reductions; the part is the rank's coordinate along
    `ptype` in the mesh of `out`.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    axis: int = attr()
    ptype: ParallelType = attr()
    TEXT = "{out}\n   = LocalSlice( {inp}, axis = {axis}, parallelType = {ptype} )"

    @property
    def moved(self) -> tuple[TensorView, TensorView]:
        return self.inp, self.out

    def work(self, sizes: Sizes) -> Work:
        part = held_nbytes(self.out, sizes(self.out))
        return {self.inp: part, self.out: part}

    def effects(self) -> tuple[Effect, ...]:
        return (Reads(self.inp), Writes(self.out))

    def emit(self, rt: Runtime) -> None:
        rt.copy_part(self.out, self.inp, self.axis, self.bounds)

    def bounds(self, shapes: LocalShapes) -> tuple[int, int]:
        """Returns (start, length) of this rank's part along the op's axis."""
        mesh = self.out.mesh
        assert mesh is not None, f"{self.out} has no mesh"
        length = shapes.local_shape(self.out)[self.axis]
        if self.inp.domain.no_reductions[self.axis].is_broadcast:
            # Expanded: every part is the same element, and there may be fewer than wanted.
            return 0, min(length, shapes.local_shape(self.inp)[self.axis])
        return mesh.coordinate(shapes.rank, self.ptype) * length, length

    def verify(self) -> None:
        mesh = self.out.mesh
        if mesh is None or mesh.size_of(self.ptype) < 2:
            raise VerifyError(f"LocalSlice: {self.out} has no {self.ptype.text} to slice along")
        if not 0 <= self.axis < self.inp.ndim:
            raise VerifyError(
                f"LocalSlice: there is no axis {self.axis} of {self.inp}, which has {self.inp.ndim}"
            )
        if self.inp.dtype() is not self.out.dtype():
            raise VerifyError(
                f"LocalSlice: it writes {self.inp} into {self.out}, which has another dtype"
            )

    def check_shapes(self, values: Mapping[Symbol, Number]) -> None:
        check_kept_axes(self, self.inp, self.out, None, values, cut=self.axis)
        if self.inp.domain.no_reductions[self.axis].is_broadcast:
            return  # of an expanded axis every part is the same element
        before, after = (device_cuts(tv, self.axis) for tv in (self.inp, self.out))
        if self.ptype in before or self.ptype not in after:
            which, state = (self.inp, "cut") if self.ptype in before else (self.out, "not cut")
            raise VerifyError(
                f"{self.name}: {which.label} is {state} by {self.ptype.text} on axis {self.axis}: "
                f"{self.inp} -> {self.out}"
            )


class HirAliasSelect(HostOp):
    """Names element `index` of `inp` along its logical axis `axis`, which `out` lacks.

    A reduction axis is kept: `out` is then `inp` itself. An axis of local size 1 (a device axis, a
    broadcast) has one element, whatever the index.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    axis: IterDomain = attr()
    index: Scalar = operand()
    TEXT = "{out}\n   = HirAliasSelect( {inp}, axis = {axis}, index = {index} )"
    OLDER = ("{out}\n   = select( {inp}, axis = {axis}, index = {index} )",)

    @cached_property
    def position(self) -> int | None:
        """The axis's place among the logical axes without reductions; None for a reduction."""
        kept = [a.number for a in self.inp.domain.no_reductions]
        return kept.index(self.axis.number) if self.axis.number in kept else None

    @cached_property
    def part(self) -> Part | None:
        """The element that it names; None where it names all of `inp`."""
        return None if self.position is None else Part(self.position, self.index)

    def effects(self) -> tuple[Effect, ...]:
        return (Shows(self.out, self.inp, self.part),)

    def emit(self, rt: Runtime) -> None:
        rt.name_part(self.out, self.inp, self.part)

    def verify(self) -> None:
        if self.axis not in self.inp.domain.logical:
            raise VerifyError(
                f"HirAliasSelect: {self.inp} has not the axis that is selected along"
                f"\nin the IR: {self.axis}"
            )
        lost = 0 if self.position is None else 1
        if self.out.ndim != self.inp.ndim - lost:
            which = axis_words(self.inp, self.axis)
            raise VerifyError(
                f"HirAliasSelect: {self.out} has {self.out.ndim} axes, expected "
                f"{self.inp.ndim - lost}, those of {self.inp} without {which}"
            )
        # An axis of local size 1 has one element, whatever the index.
        if lost and not (self.axis.is_broadcast or self.axis.is_device):
            which = axis_words(self.inp, self.axis)
            check_index("HirAliasSelect", self.index, self.axis.extent, which)


class ShardByStream(HostOp):
    """Names chunk `stream_index` of `inp` along the axis that the stream axis of `out` cuts.

    Chunks are equal, rounded up: the last ones may be short or empty.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    stream_index: Scalar = operand()
    TEXT = "{out} = ShardByStream({inp}, stream_index={stream_index})"
    OLDER = ("{out} = ShardByStream({inp}, stream_index = {stream_index})",)

    @cached_property
    def part(self) -> Part:
        position, count = stream_cut(self.out)
        return Part(position, self.stream_index, count)

    def effects(self) -> tuple[Effect, ...]:
        return (Shows(self.out, self.inp, self.part),)

    def emit(self, rt: Runtime) -> None:
        rt.name_part(self.out, self.inp, self.part)

    def verify(self) -> None:
        if self.out.ndim != self.inp.ndim:
            raise VerifyError(f"ShardByStream: {self.out} and {self.inp} differ in rank")
        position, chunks = stream_cut(self.out)
        check_index("ShardByStream", self.stream_index, chunks, f"axis {position} of {self.out}")


def check_index(op: str, index: Scalar, extent: Scalar, where: str) -> None:
    """Raises `VerifyError` for an index that is constant and outside; others are for the run."""
    at, size = sc.int_value(index), sc.int_value(extent)
    if at is not None and (at < 0 or (size is not None and size > 1 and at >= size)):
        raise VerifyError(f"{op}: index {at} is outside of {where}, which has {extent}")


def stream_cut(tv: TensorView) -> tuple[int, Scalar]:
    """Returns the logical position (reductions left out) that the stream axis of `tv` cuts, and
    into how many chunks. Raises `VerifyError` when there is none."""
    axis = stream_axis(tv)
    if axis is None:
        raise VerifyError(f"{tv} has no stream axis")
    return axis.position, axis.count


class SymmetricContiguousView(HostOp):
    """Names all shards of `inp`, which lies in symmetric memory, as one tensor, back to back.

    Where several ranks have shards they meet here, and where the view is given up: what each has
    written before the one is seen, and what it writes after the other is not. Between, nobody
    writes.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    TEXT = "{out} = SymmetricContiguousView({inp})"

    @cached_property
    def team(self) -> TeamOf | None:
        """The ranks whose shards it shows, where they are several: those that share `inp`."""
        mesh, cuts = self.inp.mesh, placement(self.inp, DEVICE_TYPES)
        along = {cut.ptype for mine in cuts for cut in mine}
        if mesh is None or not along:
            return None
        team = TeamOf(mesh, tuple(p for p in DEVICE_TYPES if p in along))
        return team if team.size > 1 else None

    def effects(self) -> tuple[Effect, ...]:
        reads = () if self.team is None else (Reads(self.inp),)
        return (*reads, Shows(self.out, self.inp))

    def emit(self, rt: Runtime) -> None:
        if self.team is None:
            rt.name_as_shaped(self.out, self.inp)
        else:
            rt.show_shards(self)

    def verify(self) -> None:
        if self.inp.memory is not MemoryType.symmetric:
            raise VerifyError(f"SymmetricContiguousView: {self.inp} is not in symmetric memory")
        if self.team is None:
            return
        if self.out.mesh != self.inp.mesh or self.out.domain.has_devices:
            raise VerifyError(
                f"SymmetricContiguousView: {self.out} is on every rank of the mesh of {self.inp}, "
                f"and spread over none: expected {self.inp.mesh}, found {self.out.mesh}"
                + (", spread over devices" if self.out.domain.has_devices else "")
            )

    @property
    def ranks_meet(self) -> bool:
        return self.team is not None

    def check_shapes(self, values: Mapping[Symbol, Number]) -> None:
        """Devices cut the axes of `inp`, and none of `out`: `verify` compares the meshes."""


# ------------------------------------------------------------------ streams
class StreamOp(HostOp):
    """Base of the ops that name a stream."""

    stream: Stream = attr(kw_only=False)

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        return () if self.stream.index is None else (self.stream.index,)


class SetCurrentStream(StreamOp):
    """What follows runs on `stream`."""

    stream: Stream = attr(kw_only=False)
    TEXT = "SetCurrentStream(Stream {stream})"
    OLDER = ("SetCurrentStream to Stream {stream}",)

    def effects(self) -> tuple[Effect, ...]:
        return (Enters(self.stream),)

    def emit(self, rt: Runtime) -> None:
        rt.enter(self.stream)


class GetCurrentStream(StreamOp):
    """The stream's name means the current stream from now on."""

    stream: Stream = attr(kw_only=False)
    TEXT = "Stream {stream} = GetCurrentStream()"
    OLDER = ("GetCurrentStream into Stream {stream}",)

    def effects(self) -> tuple[Effect, ...]:
        return (Captures(self.stream),)

    def emit(self, rt: Runtime) -> None:
        rt.capture(self.stream)

    def verify(self) -> None:
        if self.stream.index is not None:
            raise VerifyError(f"GetCurrentStream: Stream {self.stream} is a numbered stream")


class Synchronize(StreamOp):
    """The current stream waits for all that `stream` has been given so far; the host goes on."""

    stream: Stream = attr(kw_only=False)
    TEXT = "Synchronize(Stream {stream})"
    OLDER = ("Synchronize Stream {stream}",)

    def effects(self) -> tuple[Effect, ...]:
        return (Joins(self.stream),)

    def emit(self, rt: Runtime) -> None:
        rt.join(self.stream)

    def verify_in(self, program: ProgramAround) -> None:
        """Requires that a stream that is waited for by name is one; an address needs no capture."""
        name = self.stream.name
        if not name or name in program.streams or name.startswith("0x"):
            return
        near = get_close_matches(name, sorted(program.streams), n=1, cutoff=0.4)
        advice = f"; did you mean Stream {near[0]}?" if near else ""
        raise VerifyError(f"nothing captures or enters Stream {name}{advice}")


# ------------------------------------------------------------------ control flow
# What the parser reads as the definition of an index.
Index = Symbol


def loop_index(name: str, start: ScalarLike, stop: ScalarLike) -> Symbol:
    """Returns the index of a loop: its range is that of the loop."""
    return Symbol(name, DataType.Index, lo=sc.int_value(start) or 0, hi=sc.sub(stop, 1))


class ForLoop(HostOp):
    """Runs `body` for index = start, start + step, ... below stop.

    With `axis`, the loop runs over all of that axis of some tensor, and says so.
    """

    index: Index = attr()
    axis: IterDomain | None = attr(default=None)
    start: Scalar = operand(default=sc.ZERO, kw_only=True)
    stop: Scalar = operand(default=None, kw_only=True)
    step: Scalar = operand(default=sc.ONE, kw_only=True)
    body: tuple[Op, ...] = region()

    def __post_init__(self) -> None:
        if isinstance(self.axis, IterDomain):
            object.__setattr__(self, "stop", self.axis.extent)
        super().__post_init__()

    @property
    def subject(self) -> str:
        return f"The loop over {self.index}"

    def template(self) -> str:
        return _loop_template(self.axis is not None, self.step is not sc.ONE)

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        yield {"start": sc.ZERO, "step": sc.ONE}, _loop_template(True, False)
        yield {"axis": None}, _loop_template(False, True)
        yield {"axis": None, "step": sc.ONE}, _loop_template(False, False)

    def effects(self) -> tuple[Effect, ...]:
        return ()

    def emit(self, rt: Runtime) -> None:
        start, stop, step = map(rt.integer, (self.start, self.stop, self.step))
        if step < 1:
            raise ExecutionError(
                f"FOR {self.index}: a step of {self.step} = {step}{user_code(self.where)}"
            )
        rt.run_loop(self.index, range(start, stop, step), self.body)

    def verify(self) -> None:
        if sc.int_value(self.step) is not None and sc.int_value(self.step) < 1:  # pyright: ignore[reportOptionalOperand]
            raise VerifyError(f"its step is {self.step}, expected at least 1")


def _loop_template(has_axis: bool, has_step: bool) -> str:
    if has_axis:
        return "FOR {index} in {axis}:{body}"
    return "FOR {index} from {start} to {stop}" + (" step {step}" if has_step else "") + ":{body}"


class IfThenElse(HostOp):
    """Runs `then` where `predicate` holds on this rank, else `orelse`."""

    predicate: Scalar = operand()
    then: tuple[Op, ...] = region()
    orelse: tuple[Op, ...] = region(head="ELSE:", default=())
    TEXT = "IF Manual {predicate}:{then}{orelse}"

    @property
    def subject(self) -> str:
        return "The branch"

    @property
    def has_dry_run(self) -> bool:
        return True

    def effects(self) -> tuple[Effect, ...]:
        return ()

    def emit(self, rt: Runtime) -> None:
        rt.run(self.then if rt.number(self.predicate) else self.orelse)
