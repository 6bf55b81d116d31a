"""The host ops of one rank: buffers and names, work on the device, streams, control flow.

A host program is not in SSA form. An op writes a tensor whose buffer `Allocate` made, or a tensor
that names part of another buffer. The `out` of a library op is therefore a destination, and the
`out` of a view op is a new name for its input.

Indices are scalar expressions over loop indices, `rank` and `numberOfStreams`, so all ranks run one
program.
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
    """Allocates a buffer for the local shard of `buffer`.

    If the allocation domain has a stream axis, the buffer holds only the block of step
    `stream_index` of a stream loop.
    """

    buffer: TensorView = result()
    zero_init: bool = attr(default=False)
    stream_index: Scalar | None = operand(default=None, kw_only=True)
    OLDER = ("{buffer} = ALLOCATE(mem_type={mem_type}, zero_init={zero_init})",)

    def template(self) -> str:
        """Returns the text of the op, with or without a stream index."""
        return _allocate_template(self.stream_index is not None)

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields both texts of the op, which the parser reads."""
        yield {"stream_index": None}, _allocate_template(False)
        yield {}, _allocate_template(True)

    @property
    def mem_type(self) -> str:
        """The name of the memory in the op's text: `global` or `symmetric`."""
        return self.buffer.memory.text

    @property
    def size(self) -> Scalar:
        """The number of elements of the local shard, or of a full block of one step."""
        return allocated_elements(self.buffer, per_step=self.stream_index is not None)

    def effects(self) -> tuple[Effect, ...]:
        """Allocates the buffer; it has contents if it is zeroed."""
        return (Makes(self.buffer, is_filled=self.zero_init, step=self.stream_index),)

    def emit(self, rt: Runtime) -> None:
        """Allocates the buffer, or zeroes memory that already exists under this name."""
        if not rt.is_named(self.buffer):
            rt.allocate(self.buffer, self.stream_index, is_cleared=self.zero_init)
        elif self.zero_init:
            # The tensor names a part of another buffer, as in the loops of nvFuser's programs, or
            # a buffer of the caller.
            rt.call(_clear, self.buffer)

    def verify(self) -> None:
        """Raises `VerifyError` for a tensor in local or shared memory."""
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
    """Frees the buffer. No later op may use the tensor or a view of it."""

    buffer: TensorView = operand()
    TEXT = "Deallocate {\n  {buffer}\n}"

    def effects(self) -> tuple[Effect, ...]:
        """Frees the buffer."""
        return (Frees(self.buffer),)

    def emit(self, rt: Runtime) -> None:
        """Frees the buffer. The ranks of a view of several shards synchronise first."""
        rt.deallocate(self.buffer)


# ------------------------------------------------------------------ launches
@dataclass(frozen=True)
class KernelGroup:
    """A kernel as a fusion of global tensors, and the name of the scheduler that accepts it."""

    number: int
    fusion: Fusion
    scheduler: str


class LaunchKernel(HostOp):
    """Runs the kernel of kernel group `group` on the current stream. Each of `outs` has a buffer,
    or names another tensor."""

    ins: tuple[TensorView | Scalar, ...] = operands()
    outs: tuple[TensorView, ...] = results()
    group: int = attr()
    HAS_CONTROL_SCALARS = False
    TEXT = "LaunchKernel(\n  Group ID: {group},\n  Inputs: {ins},\n  Outputs: {outs},\n)"

    @property
    def subject(self) -> str:
        """The op in a sentence: `The launch of kernel group 1`."""
        return f"The launch of kernel group {self.group}"

    def effects(self) -> tuple[Effect, ...]:
        """Reads all tensors of `ins` and writes all of `outs`."""
        return _computes(self.ins, self.outs)

    def emit(self, rt: Runtime) -> None:
        """Launches the kernel on the current stream."""
        rt.launch(self)

    def verify_in(self, program: ProgramAround) -> None:
        """Compares number, dtype, extents and mesh of the operands with the group's fusion."""
        fusion = program.kernel(self.group)
        _check_operands(self, fusion, f"group {self.group}", _kernel_kind)


class PostOnStream(HostOp):
    """Runs a host unit, a fusion that is compiled separately, on the current stream.

    Results that have a buffer are written into it. The op allocates all others.
    """

    ins: tuple[TensorView | Scalar, ...] = operands()
    outs: tuple[TensorView, ...] = results()
    unit: int = attr()
    MAKES_RESULTS = True
    HAS_CONTROL_SCALARS = False
    TEXT = "PostOnStream (HostUnit{unit}, Inputs:{ins}, Outputs:{outs})"

    @property
    def subject(self) -> str:
        """The op in a sentence: `The launch of host unit 0`."""
        return f"The launch of host unit {self.unit}"

    @property
    def buffer_sharing(self) -> BufferSharing:
        """Is `freely`: the unit computes all results before it writes them."""
        return "freely"

    def effects(self) -> tuple[Effect, ...]:
        """Reads all tensors of `ins` and writes all of `outs`."""
        return _computes(self.ins, self.outs)

    def emit(self, rt: Runtime) -> None:
        """Runs the unit on the current stream."""
        rt.run_unit(self)

    def work(self, sizes: Sizes) -> Work:
        """Raises `UnsupportedError`: the cost of a unit is unknown before it is scheduled."""
        raise UnsupportedError(
            f"cost: PostOnStream (HostUnit{self.unit}) has no known cost before the unit is "
            f"scheduled{user_code(self.where)}"
        )

    def verify_in(self, program: ProgramAround) -> None:
        """Compares number, dtype, rank and mesh of the operands with those of the unit, and refuses
        a unit that updates an input."""
        fusion = program.unit(self.unit)
        # The symbols of a unit's extents differ from those of the program.
        _check_operands(self, fusion, f"HostUnit{self.unit}", _unit_kind)
        for alias in fusion.aliases:
            raise VerifyError(f"HostUnit{self.unit} updates its input {alias.into} in place")


def _computes(
    ins: tuple[TensorView | Scalar, ...], outs: tuple[TensorView, ...]
) -> tuple[Effect, ...]:
    reads = [Reads(v) for v in ins if isinstance(v, TensorView)]
    return (*reads, *map(Writes, outs))


# ----- the properties that a launch must share with the fusion that it runs
def _kernel_kind(value: TensorView | Scalar, like: TensorView | Scalar | None = None) -> object:
    """Returns dtype, extents and mesh of an operand, which a launch and its kernel must share.
    `like` may be a slice of the value: the axes that it lacks are left out."""
    if isinstance(value, TensorView):
        shape = list(map(str, value.shape()))
        gone = dropped_axes_of(value, like.ndim) if isinstance(like, TensorView) else ()
        shape = [n for axis, n in enumerate(shape) if axis not in gone]
        return (value.dtype(), shape, value.mesh)
    return value.dtype


def _unit_kind(value: TensorView | Scalar, like: object = None) -> object:
    """Returns dtype, rank and mesh of an operand, which a post and its unit must share."""
    if isinstance(value, TensorView):
        return (value.dtype(), value.ndim, value.mesh)
    return value.dtype


def _check_operands(
    op: LaunchKernel | PostOnStream,
    fusion: Fusion,
    where: str,
    kind: Callable[..., object],
) -> None:
    """Raises `VerifyError` for operands that differ from the inputs and outputs of the fusion.

    `kind` returns the properties that must be equal, `where` names the fusion in messages.
    """
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
    """Returns the first property in which an operand differs from that of the fusion, as the end of
    a message."""
    if not (isinstance(a, TensorView) and isinstance(b, TensorView)):
        return ""
    if a.dtype() is not b.dtype():
        return ", of another dtype"
    if a.ndim != b.ndim:
        return f": {a.ndim} axes, expected {b.ndim}"
    return ", on another mesh" if a.mesh != b.mesh else ", of other extents"


# ------------------------------------------------------------------ slices
class LocalSlice(HostOp):
    """Copies this rank's part of the replicated `inp` into `out`. Nothing is communicated.

    `axis` counts the logical axes without reductions. The part is number `mesh.coordinate(rank,
    ptype)` in the mesh of `out`.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    axis: int = attr()
    ptype: ParallelType = attr()
    TEXT = "{out}\n   = LocalSlice( {inp}, axis = {axis}, parallelType = {ptype} )"

    @property
    def moved(self) -> tuple[TensorView, TensorView]:
        """The replicated tensor, and the sharded copy of it."""
        return self.inp, self.out

    def work(self, sizes: Sizes) -> Work:
        """Reads and writes as many bytes as the slice has, not the whole operand."""
        part = held_nbytes(self.out, sizes(self.out))
        return {self.inp: part, self.out: part}

    def effects(self) -> tuple[Effect, ...]:
        """Reads `inp` and writes `out`."""
        return (Reads(self.inp), Writes(self.out))

    def emit(self, rt: Runtime) -> None:
        """Copies the slice on the current stream."""
        rt.copy_part(self.out, self.inp, self.axis, self.bounds)

    def bounds(self, shapes: LocalShapes) -> tuple[int, int]:
        """Returns (start, length) of this rank's part, in elements along the op's axis."""
        mesh = self.out.mesh
        assert mesh is not None, f"{self.out} has no mesh"
        length = shapes.local_shape(self.out)[self.axis]
        if self.inp.domain.no_reductions[self.axis].is_broadcast:
            # All parts of an expanded axis are the same element. Memory may have fewer elements
            # than a part is long.
            return 0, min(length, shapes.local_shape(self.inp)[self.axis])
        return mesh.coordinate(shapes.rank, self.ptype) * length, length

    def verify(self) -> None:
        """Raises `VerifyError` for an axis or a mesh dimension that does not exist, or for two
        dtypes."""
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
        """Requires that `ptype` cuts the axis in `out` and not in `inp`, and that all other axes
        are equal."""
        check_kept_axes(self, self.inp, self.out, None, values, cut=self.axis)
        if self.inp.domain.no_reductions[self.axis].is_broadcast:
            return  # all parts of an expanded axis are the same element
        before, after = (device_cuts(tv, self.axis) for tv in (self.inp, self.out))
        if self.ptype in before or self.ptype not in after:
            which, state = (self.inp, "cut") if self.ptype in before else (self.out, "not cut")
            raise VerifyError(
                f"{self.name}: {which.label} is {state} by {self.ptype.text} on axis {self.axis}: "
                f"{self.inp} -> {self.out}"
            )


class HirAliasSelect(HostOp):
    """Names element `index` of `inp` along its logical axis `axis`. `out` has the other axes.

    If the axis is a reduction, `out` names all of `inp`. An axis of local size 1 (a device axis or
    a broadcast) has one element, which every index selects.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    axis: IterDomain = attr()
    index: Scalar = operand()
    TEXT = "{out}\n   = HirAliasSelect( {inp}, axis = {axis}, index = {index} )"
    OLDER = ("{out}\n   = select( {inp}, axis = {axis}, index = {index} )",)

    @cached_property
    def position(self) -> int | None:
        """The axis's position among the logical axes without reductions; None for a reduction."""
        kept = [a.number for a in self.inp.domain.no_reductions]
        return kept.index(self.axis.number) if self.axis.number in kept else None

    @cached_property
    def part(self) -> Part | None:
        """The element that `out` names; None if it names all of `inp`."""
        return None if self.position is None else Part(self.position, self.index)

    def effects(self) -> tuple[Effect, ...]:
        """Makes `out` a name of the element."""
        return (Shows(self.out, self.inp, self.part),)

    def emit(self, rt: Runtime) -> None:
        """Binds the name to the element's memory; no data moves."""
        rt.name_part(self.out, self.inp, self.part)

    def verify(self) -> None:
        """Raises `VerifyError` for an axis of another tensor, another number of axes, or a constant
        index outside."""
        if self.axis not in self.inp.domain.logical:
            raise VerifyError(
                f"HirAliasSelect: the selected axis is not an axis of {self.inp}"
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

    The size of a chunk is rounded up, so the last chunks may be short or empty.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    stream_index: Scalar = operand()
    TEXT = "{out} = ShardByStream({inp}, stream_index={stream_index})"
    OLDER = ("{out} = ShardByStream({inp}, stream_index = {stream_index})",)

    @cached_property
    def part(self) -> Part:
        """The chunk that `out` names."""
        position, count = stream_cut(self.out)
        return Part(position, self.stream_index, count)

    def effects(self) -> tuple[Effect, ...]:
        """Makes `out` a name of the chunk."""
        return (Shows(self.out, self.inp, self.part),)

    def emit(self, rt: Runtime) -> None:
        """Binds the name to the chunk's memory; no data moves."""
        rt.name_part(self.out, self.inp, self.part)

    def verify(self) -> None:
        """Raises `VerifyError` for tensors of different rank, no stream axis, or a constant index
        outside."""
        if self.out.ndim != self.inp.ndim:
            raise VerifyError(f"ShardByStream: {self.out} and {self.inp} differ in rank")
        position, chunks = stream_cut(self.out)
        check_index("ShardByStream", self.stream_index, chunks, f"axis {position} of {self.out}")


def check_index(op: str, index: Scalar, extent: Scalar, where: str) -> None:
    """Raises `VerifyError` for a constant index outside of `0 <= index < extent`. Other indices are
    checked in runs."""
    at, size = sc.int_value(index), sc.int_value(extent)
    if at is not None and (at < 0 or (size is not None and size > 1 and at >= size)):
        raise VerifyError(f"{op}: index {at} is outside of {where}, which has {extent}")


def stream_cut(tv: TensorView) -> tuple[int, Scalar]:
    """Returns (axis, number of chunks) of the stream axis of `tv`.

    The axis is the position of the cut logical axis, reductions left out. Raises `VerifyError` if
    the tensor has no stream axis.
    """
    axis = stream_axis(tv)
    if axis is None:
        raise VerifyError(f"{tv} has no stream axis")
    return axis.position, axis.count


class SymmetricContiguousView(HostOp):
    """Names the shards of all ranks as one tensor, one shard after the other. `inp` is in symmetric
    memory.

    If several ranks have shards, the op is a barrier of these ranks, and so is the `Deallocate` of
    the view. A rank's writes before the first barrier are visible through the view. Between the two
    barriers, no rank may write.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    TEXT = "{out} = SymmetricContiguousView({inp})"

    @cached_property
    def team(self) -> TeamOf | None:
        """The ranks whose shards the view shows; None if there is only one."""
        mesh, cuts = self.inp.mesh, placement(self.inp, DEVICE_TYPES)
        along = {cut.ptype for mine in cuts for cut in mine}
        if mesh is None or not along:
            return None
        team = TeamOf(mesh, tuple(p for p in DEVICE_TYPES if p in along))
        return team if team.size > 1 else None

    def effects(self) -> tuple[Effect, ...]:
        """Reads the shard (only with a team) and makes `out` a name of it."""
        reads = () if self.team is None else (Reads(self.inp),)
        return (*reads, Shows(self.out, self.inp))

    def emit(self, rt: Runtime) -> None:
        """Maps the shards of the team, or reshapes the only shard."""
        if self.team is None:
            rt.name_as_shaped(self.out, self.inp)
        else:
            rt.show_shards(self)

    def verify(self) -> None:
        """Raises `VerifyError` for an operand outside of symmetric memory, or a result that is
        sharded."""
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
        """Whether several ranks have shards, so that the op is a barrier."""
        return self.team is not None

    def check_shapes(self, values: Mapping[Symbol, Number]) -> None:
        """Checks nothing: devices cut the axes of `inp` and none of `out`, and `verify` compares
        the meshes."""


# ------------------------------------------------------------------ streams
class StreamOp(HostOp):
    """Base of the ops that name a stream."""

    stream: Stream = attr(kw_only=False)

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        """The index of a numbered stream; none for a stream with a name."""
        return () if self.stream.index is None else (self.stream.index,)


class SetCurrentStream(StreamOp):
    """Makes `stream` the current one: later ops run on it."""

    stream: Stream = attr(kw_only=False)
    TEXT = "SetCurrentStream(Stream {stream})"
    OLDER = ("SetCurrentStream to Stream {stream}",)

    def effects(self) -> tuple[Effect, ...]:
        """Changes the current stream."""
        return (Enters(self.stream),)

    def emit(self, rt: Runtime) -> None:
        """Changes the current stream of the run."""
        rt.enter(self.stream)


class GetCurrentStream(StreamOp):
    """Gives the current stream the name `stream`."""

    stream: Stream = attr(kw_only=False)
    TEXT = "Stream {stream} = GetCurrentStream()"
    OLDER = ("GetCurrentStream into Stream {stream}",)

    def effects(self) -> tuple[Effect, ...]:
        """Binds the name to the current stream."""
        return (Captures(self.stream),)

    def emit(self, rt: Runtime) -> None:
        """Binds the name in the run."""
        rt.capture(self.stream)

    def verify(self) -> None:
        """Raises `VerifyError` for a numbered stream, which cannot be renamed."""
        if self.stream.index is not None:
            raise VerifyError(f"GetCurrentStream: Stream {self.stream} is a numbered stream")


class Synchronize(StreamOp):
    """Makes the current stream wait for all work that `stream` has received so far. The host does
    not wait."""

    stream: Stream = attr(kw_only=False)
    TEXT = "Synchronize(Stream {stream})"
    OLDER = ("Synchronize Stream {stream}",)

    def effects(self) -> tuple[Effect, ...]:
        """Orders later work of the current stream after earlier work of `stream`."""
        return (Joins(self.stream),)

    def emit(self, rt: Runtime) -> None:
        """Makes the current stream wait."""
        rt.join(self.stream)

    def verify_in(self, program: ProgramAround) -> None:
        """Raises `VerifyError` for a stream name that no op captures or enters. A stream known by
        its address needs neither."""
        name = self.stream.name
        if not name or name in program.streams or name.startswith("0x"):
            return
        near = get_close_matches(name, sorted(program.streams), n=1, cutoff=0.4)
        advice = f"; did you mean Stream {near[0]}?" if near else ""
        raise VerifyError(f"nothing captures or enters Stream {name}{advice}")


# ------------------------------------------------------------------ control flow
# The parser reads a field of this type as the definition of a new symbol.
Index = Symbol


def loop_index(name: str, start: ScalarLike, stop: ScalarLike) -> Symbol:
    """Returns the index of a loop, a symbol with the range [start, stop - 1]."""
    return Symbol(name, DataType.Index, lo=sc.int_value(start) or 0, hi=sc.sub(stop, 1))


class ForLoop(HostOp):
    """Runs `body` for index = start, start + step, ... below stop.

    With `axis`, `stop` is the extent of that axis, and the text names the axis in place of the
    bounds.
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
        """The op in a sentence: `The loop over i3`."""
        return f"The loop over {self.index}"

    def template(self) -> str:
        """Returns the text of the op, with an axis or with bounds and step."""
        return _loop_template(self.axis is not None, self.step is not sc.ONE)

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields all texts of the op, which the parser reads."""
        yield {"start": sc.ZERO, "step": sc.ONE}, _loop_template(True, False)
        yield {"axis": None}, _loop_template(False, True)
        yield {"axis": None, "step": sc.ONE}, _loop_template(False, False)

    def effects(self) -> tuple[Effect, ...]:
        """Returns no effects: the ops of the body have their own."""
        return ()

    def emit(self, rt: Runtime) -> None:
        """Runs the body for each step. Raises `ExecutionError` for a step below 1."""
        start, stop, step = map(rt.integer, (self.start, self.stop, self.step))
        if step < 1:
            raise ExecutionError(
                f"FOR {self.index}: a step of {self.step} = {step}{user_code(self.where)}"
            )
        rt.run_loop(self.index, range(start, stop, step), self.body)

    def verify(self) -> None:
        """Raises `VerifyError` for a constant step below 1."""
        if sc.int_value(self.step) is not None and sc.int_value(self.step) < 1:  # pyright: ignore[reportOptionalOperand]
            raise VerifyError(f"its step is {self.step}, expected at least 1")


def _loop_template(has_axis: bool, has_step: bool) -> str:
    if has_axis:
        return "FOR {index} in {axis}:{body}"
    return "FOR {index} from {start} to {stop}" + (" step {step}" if has_step else "") + ":{body}"


class IfThenElse(HostOp):
    """Runs `then` on the ranks where `predicate` is true, and `orelse` on the others."""

    predicate: Scalar = operand()
    then: tuple[Op, ...] = region()
    orelse: tuple[Op, ...] = region(head="ELSE:", default=())
    TEXT = "IF Manual {predicate}:{then}{orelse}"

    @property
    def subject(self) -> str:
        """The op in a sentence: `The branch`."""
        return "The branch"

    @property
    def has_dry_run(self) -> bool:
        """True: the dry run takes the same branch as the run."""
        return True

    def effects(self) -> tuple[Effect, ...]:
        """Returns no effects: the ops of both regions have their own."""
        return ()

    def emit(self, rt: Runtime) -> None:
        """Evaluates the predicate once and runs one region."""
        rt.run(self.then if rt.number(self.predicate) else self.orelse)
