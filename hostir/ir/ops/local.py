"""The host ops of one rank: buffers and views, work on the device, streams, control flow.

A host program is not in SSA form. An op writes a tensor whose buffer `Allocate` made, or a tensor
that is a view of part of another buffer. The `out` of a library op is therefore a destination. The
`out` of a view op is a new name for the memory of the operand.

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
    """Allocates a buffer for this rank's shard of `buffer`.

    `zero_init` fills the buffer with zeros. If the allocation domain has a stream axis, the buffer
    holds only the block that iteration `stream_index` of a stream loop uses.
    """

    buffer: TensorView = result()
    zero_init: bool = attr(default=False)
    stream_index: Scalar | None = operand(default=None, kw_only=True)
    OLDER = ("{buffer} = ALLOCATE(mem_type={mem_type}, zero_init={zero_init})",)

    def template(self) -> str:
        """Returns the text template of the op, with or without a stream index."""
        return _allocate_template(self.stream_index is not None)

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields both text templates that the parser reads: without and with a stream index."""
        yield {"stream_index": None}, _allocate_template(False)
        yield {}, _allocate_template(True)

    @property
    def mem_type(self) -> str:
        """The kind of memory, as the op's text names it: `global` or `symmetric`."""
        return self.buffer.memory.text

    @property
    def size(self) -> Scalar:
        """The number of elements of the local shard. With a stream index, the number of elements of
        a full block."""
        return allocated_elements(self.buffer, per_step=self.stream_index is not None)

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effects: the tensor gets a new buffer. The buffer has contents if the op
        fills the buffer with zeros."""
        return (Makes(self.buffer, is_filled=self.zero_init, step=self.stream_index),)

    def emit(self, rt: Runtime) -> None:
        """Allocates the buffer. If the tensor already has memory, only fills that memory with zeros
        if `zero_init` is set."""
        if not rt.is_named(self.buffer):
            rt.allocate(self.buffer, self.stream_index, is_cleared=self.zero_init)
        elif self.zero_init:
            # The tensor names a part of another buffer, as in the loops of nvFuser's programs, or
            # a buffer of the caller.
            rt.call(_clear, self.buffer)

    def verify(self) -> None:
        """Raises `VerifyError` if the tensor is in local or shared memory, which only kernels
        have."""
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
    """Frees the buffer of a tensor. No later op may use the tensor or a view of the tensor."""

    buffer: TensorView = operand()
    TEXT = "Deallocate {\n  {buffer}\n}"

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effects: the buffer is freed."""
        return (Frees(self.buffer),)

    def emit(self, rt: Runtime) -> None:
        """Frees the buffer. If the tensor is a view of several ranks' shards, these ranks
        synchronise first."""
        rt.deallocate(self.buffer)


# ------------------------------------------------------------------ launches
@dataclass(frozen=True)
class KernelGroup:
    """A kernel: its number, its fusion of tensors in global memory, and the scheduler that accepts
    the fusion."""

    number: int
    fusion: Fusion
    scheduler: str


class LaunchKernel(HostOp):
    """Launches the kernel of kernel group `group` on the current stream.

    Each tensor of `outs` must have a buffer already, or be a view of another tensor.
    """

    ins: tuple[TensorView | Scalar, ...] = operands()
    outs: tuple[TensorView, ...] = results()
    group: int = attr()
    HAS_CONTROL_SCALARS = False
    TEXT = "LaunchKernel(\n  Group ID: {group},\n  Inputs: {ins},\n  Outputs: {outs},\n)"

    @property
    def subject(self) -> str:
        """The op at the beginning of a message: `The launch of kernel group 1`."""
        return f"The launch of kernel group {self.group}"

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effects: the op reads all tensors of `ins` and writes all tensors of
        `outs`."""
        return _computes(self.ins, self.outs)

    def emit(self, rt: Runtime) -> None:
        """Launches the kernel on the current stream."""
        rt.launch(self)

    def verify_in(self, program: ProgramAround) -> None:
        """Raises `VerifyError` unless the operands fit the kernel group's fusion: number, dtype,
        extents and mesh are compared."""
        fusion = program.kernel(self.group)
        _check_operands(self, fusion, f"group {self.group}", _kernel_kind)


class PostOnStream(HostOp):
    """Runs a host unit on the current stream. A host unit is a fusion that is compiled separately.

    The unit writes into the results that have a buffer. The op allocates buffers for all other
    results.
    """

    ins: tuple[TensorView | Scalar, ...] = operands()
    outs: tuple[TensorView, ...] = results()
    unit: int = attr()
    MAKES_RESULTS = True
    HAS_CONTROL_SCALARS = False
    TEXT = "PostOnStream (HostUnit{unit}, Inputs:{ins}, Outputs:{outs})"

    @property
    def subject(self) -> str:
        """The op at the beginning of a message: `The launch of host unit 0`."""
        return f"The launch of host unit {self.unit}"

    @property
    def buffer_sharing(self) -> BufferSharing:
        """`freely`: an operand and a result may share a buffer, because the unit computes all
        results before it writes any."""
        return "freely"

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effects: the op reads all tensors of `ins` and writes all tensors of
        `outs`."""
        return _computes(self.ins, self.outs)

    def emit(self, rt: Runtime) -> None:
        """Runs the host unit on the current stream."""
        rt.run_unit(self)

    def work(self, sizes: Sizes) -> Work:
        """Raises `UnsupportedError`, because the cost of a host unit is unknown before the unit is
        scheduled."""
        raise UnsupportedError(
            f"cost: PostOnStream (HostUnit{self.unit}) has no known cost before the unit is "
            f"scheduled{user_code(self.where)}"
        )

    def verify_in(self, program: ProgramAround) -> None:
        """Raises `VerifyError` unless the operands fit the host unit's fusion: number, dtype,
        number of axes and mesh are compared.

        Also raises `VerifyError` if the host unit updates an input in place.
        """
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
    """Returns dtype, extents and mesh of an operand: a launch and its kernel must agree about
    these.

    `like` is the launch's operand. If `like` is a slice of `value`, the axes that `like` lacks are
    left out.
    """
    if isinstance(value, TensorView):
        shape = list(map(str, value.shape()))
        gone = dropped_axes_of(value, like.ndim) if isinstance(like, TensorView) else ()
        shape = [n for axis, n in enumerate(shape) if axis not in gone]
        return (value.dtype(), shape, value.mesh)
    return value.dtype


def _unit_kind(value: TensorView | Scalar, like: object = None) -> object:
    """Returns dtype, number of axes and mesh of an operand: the op and its host unit must agree
    about these. `like` is ignored."""
    if isinstance(value, TensorView):
        return (value.dtype(), value.ndim, value.mesh)
    return value.dtype


def _check_operands(
    op: LaunchKernel | PostOnStream,
    fusion: Fusion,
    where: str,
    kind: Callable[..., object],
) -> None:
    """Raises `VerifyError` if the operands differ from the inputs and outputs of the fusion.

    `kind` returns the properties that must be equal. `where` names the fusion in messages.
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
    """Returns the end of a message: the first property in which operand `a` differs from `b`, a
    value of the fusion."""
    if not (isinstance(a, TensorView) and isinstance(b, TensorView)):
        return ""
    if a.dtype() is not b.dtype():
        return ", of another dtype"
    if a.ndim != b.ndim:
        return f": {a.ndim} axes, expected {b.ndim}"
    return ", on another mesh" if a.mesh != b.mesh else ", of other extents"


# ------------------------------------------------------------------ slices
class LocalSlice(HostOp):
    """Copies this rank's part of the replicated tensor `inp` into `out`, without communication.

    `axis` counts the logical axes without reductions. `ptype` is the mesh dimension that cuts the
    axis: the index of the part is `mesh.coordinate(rank, ptype)` in the mesh of `out`.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    axis: int = attr()
    ptype: ParallelType = attr()
    TEXT = "{out}\n   = LocalSlice( {inp}, axis = {axis}, parallelType = {ptype} )"

    @property
    def moved(self) -> tuple[TensorView, TensorView]:
        """The pair (replicated tensor, sharded copy)."""
        return self.inp, self.out

    def work(self, sizes: Sizes) -> Work:
        """Returns the bytes of the slice for the operand and for the result. The rest of the
        operand is not read."""
        part = held_nbytes(self.out, sizes(self.out))
        return {self.inp: part, self.out: part}

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effects: the op reads `inp` and writes `out`."""
        return (Reads(self.inp), Writes(self.out))

    def emit(self, rt: Runtime) -> None:
        """Copies the slice on the current stream."""
        rt.copy_part(self.out, self.inp, self.axis, self.bounds)

    def bounds(self, shapes: LocalShapes) -> tuple[int, int]:
        """Returns (start, length) of this rank's part along the op's axis, in elements. `shapes`
        has the local sizes."""
        mesh = self.out.mesh
        assert mesh is not None, f"{self.out} has no mesh"
        length = shapes.local_shape(self.out)[self.axis]
        if self.inp.domain.no_reductions[self.axis].is_broadcast:
            # All parts of an expanded axis are the same element. Memory may have fewer elements
            # than a part is long.
            return 0, min(length, shapes.local_shape(self.inp)[self.axis])
        return mesh.coordinate(shapes.rank, self.ptype) * length, length

    def verify(self) -> None:
        """Raises `VerifyError` if the axis or the mesh dimension does not exist, or if the dtypes
        differ."""
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
        """Raises `VerifyError` unless `ptype` cuts the axis in `out` but not in `inp`, and all
        other axes are equal."""
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
    """Makes `out` a view of element `index` of `inp` along the logical axis `axis`. `out` has all
    other axes. No data moves.

    If `axis` is a reduction, `out` is a view of all of `inp`. An axis of local size 1 (a device
    axis or a broadcast) has one element, which every index selects.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    axis: IterDomain = attr()
    index: Scalar = operand()
    TEXT = "{out}\n   = HirAliasSelect( {inp}, axis = {axis}, index = {index} )"
    OLDER = ("{out}\n   = select( {inp}, axis = {axis}, index = {index} )",)

    @cached_property
    def position(self) -> int | None:
        """The index of the selected axis among the logical axes without reductions; None if the
        axis is a reduction."""
        kept = [a.number for a in self.inp.domain.no_reductions]
        return kept.index(self.axis.number) if self.axis.number in kept else None

    @cached_property
    def part(self) -> Part | None:
        """The selected element of `inp`; None if `out` is a view of the whole of `inp`."""
        return None if self.position is None else Part(self.position, self.index)

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effects: `out` becomes a view of the selected element."""
        return (Shows(self.out, self.inp, self.part),)

    def emit(self, rt: Runtime) -> None:
        """Makes `out` a view of the selected element. No data moves."""
        rt.name_part(self.out, self.inp, self.part)

    def verify(self) -> None:
        """Raises `VerifyError` if the axis is not an axis of `inp`, the result has a wrong number
        of axes, or a constant index is out of range."""
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
    """Makes `out` a view of chunk `stream_index` of `inp`, along the axis that the stream axis of
    `out` cuts. No data moves.

    The size of a chunk is rounded up, so the last chunks may be short or empty.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    stream_index: Scalar = operand()
    TEXT = "{out} = ShardByStream({inp}, stream_index={stream_index})"
    OLDER = ("{out} = ShardByStream({inp}, stream_index = {stream_index})",)

    @cached_property
    def part(self) -> Part:
        """The chunk of `inp` that `out` is a view of."""
        position, count = stream_cut(self.out)
        return Part(position, self.stream_index, count)

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effects: `out` becomes a view of the chunk."""
        return (Shows(self.out, self.inp, self.part),)

    def emit(self, rt: Runtime) -> None:
        """Makes `out` a view of the chunk. No data moves."""
        rt.name_part(self.out, self.inp, self.part)

    def verify(self) -> None:
        """Raises `VerifyError` if the numbers of axes differ, `out` has no stream axis, or a
        constant index is out of range."""
        if self.out.ndim != self.inp.ndim:
            raise VerifyError(f"ShardByStream: {self.out} and {self.inp} differ in rank")
        position, chunks = stream_cut(self.out)
        check_index("ShardByStream", self.stream_index, chunks, f"axis {position} of {self.out}")


def check_index(op: str, index: Scalar, extent: Scalar, where: str) -> None:
    """Raises `VerifyError` if a constant `index` is not in `0 <= index < extent`. Other indices are
    checked in runs.

    `op` and `where` name the op and the indexed axis in the message.
    """
    at, size = sc.int_value(index), sc.int_value(extent)
    if at is not None and (at < 0 or (size is not None and size > 1 and at >= size)):
        raise VerifyError(f"{op}: index {at} is outside of {where}, which has {extent}")


def stream_cut(tv: TensorView) -> tuple[int, Scalar]:
    """Returns (axis, number of chunks) of the stream axis of `tv`.

    The axis is the index of the logical axis that the stream axis cuts, counted without reductions.
    Raises `VerifyError` if the tensor has no stream axis.
    """
    axis = stream_axis(tv)
    if axis is None:
        raise VerifyError(f"{tv} has no stream axis")
    return axis.position, axis.count


class SymmetricContiguousView(HostOp):
    """Makes `out` a view of the shards of all ranks as one tensor, in which the shards follow each
    other.

    `inp`, the tensor with the shards, is in symmetric memory. If several ranks have shards, the op
    is a barrier of these ranks. The `Deallocate` of the view is a second barrier. Writes of a rank
    before the first barrier are visible through the view. Between the two barriers, no rank may
    write.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    TEXT = "{out} = SymmetricContiguousView({inp})"

    @cached_property
    def team(self) -> TeamOf | None:
        """The ranks whose shards the view shows; None if there is only one rank."""
        mesh, cuts = self.inp.mesh, placement(self.inp, DEVICE_TYPES)
        along = {cut.ptype for mine in cuts for cut in mine}
        if mesh is None or not along:
            return None
        team = TeamOf(mesh, tuple(p for p in DEVICE_TYPES if p in along))
        return team if team.size > 1 else None

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effects: `out` becomes a view of `inp`. If several ranks have shards, the op
        also reads `inp`."""
        reads = () if self.team is None else (Reads(self.inp),)
        return (*reads, Shows(self.out, self.inp))

    def emit(self, rt: Runtime) -> None:
        """Maps the shards of all ranks of the team. If there is only one shard, reshapes that
        shard."""
        if self.team is None:
            rt.name_as_shaped(self.out, self.inp)
        else:
            rt.show_shards(self)

    def verify(self) -> None:
        """Raises `VerifyError` if the operand is not in symmetric memory, or if the result is
        sharded or on another mesh."""
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
        """Checks nothing, because devices cut the axes of `inp` but no axis of `out`. `verify`
        compares the meshes."""


# ------------------------------------------------------------------ streams
class StreamOp(HostOp):
    """Base class of the ops that name a stream."""

    stream: Stream = attr(kw_only=False)

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        """The index of a numbered stream; () for a stream with a name."""
        return () if self.stream.index is None else (self.stream.index,)


class SetCurrentStream(StreamOp):
    """Makes `stream` the current stream: the work of later ops is put on `stream`."""

    stream: Stream = attr(kw_only=False)
    TEXT = "SetCurrentStream(Stream {stream})"
    OLDER = ("SetCurrentStream to Stream {stream}",)

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effects: the op's stream becomes the current stream."""
        return (Enters(self.stream),)

    def emit(self, rt: Runtime) -> None:
        """Makes the op's stream the current stream of the run."""
        rt.enter(self.stream)


class GetCurrentStream(StreamOp):
    """Binds the name `stream` to the current stream, so that later ops can refer to it."""

    stream: Stream = attr(kw_only=False)
    TEXT = "Stream {stream} = GetCurrentStream()"
    OLDER = ("GetCurrentStream into Stream {stream}",)

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effects: the name is bound to the current stream."""
        return (Captures(self.stream),)

    def emit(self, rt: Runtime) -> None:
        """Binds the name to the current stream of the run."""
        rt.capture(self.stream)

    def verify(self) -> None:
        """Raises `VerifyError` if `stream` is a numbered stream, because a number already denotes a
        stream of the evaluator."""
        if self.stream.index is not None:
            raise VerifyError(f"GetCurrentStream: Stream {self.stream} is a numbered stream")


class Synchronize(StreamOp):
    """Makes the current stream wait for all work that was put on `stream` so far. The host does not
    wait."""

    stream: Stream = attr(kw_only=False)
    TEXT = "Synchronize(Stream {stream})"
    OLDER = ("Synchronize Stream {stream}",)

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effects: later work of the current stream begins after the earlier work of
        `stream` has ended."""
        return (Joins(self.stream),)

    def emit(self, rt: Runtime) -> None:
        """Makes the current stream wait for the op's stream."""
        rt.join(self.stream)

    def verify_in(self, program: ProgramAround) -> None:
        """Raises `VerifyError` if no `GetCurrentStream` or `SetCurrentStream` names the stream.
        Stream names that are addresses are always accepted."""
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
    """Returns a new symbol for the index of a loop, with the range [start, stop - 1]."""
    return Symbol(name, DataType.Index, lo=sc.int_value(start) or 0, hi=sc.sub(stop, 1))


class ForLoop(HostOp):
    """Runs `body` once for each index = start, start + step, ... below stop.

    If `axis` is given, `stop` is the extent of that axis, and the op's text shows the axis instead
    of the bounds.
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
        """The op at the beginning of a message: `The loop over i3`."""
        return f"The loop over {self.index}"

    def template(self) -> str:
        """Returns the text template of the op, with an axis or with bounds and step."""
        return _loop_template(self.axis is not None, self.step is not sc.ONE)

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields all text templates that the parser reads."""
        yield {"start": sc.ZERO, "step": sc.ONE}, _loop_template(True, False)
        yield {"axis": None}, _loop_template(False, True)
        yield {"axis": None, "step": sc.ONE}, _loop_template(False, False)

    def effects(self) -> tuple[Effect, ...]:
        """Returns no effects, because the ops of the body have their own effects."""
        return ()

    def emit(self, rt: Runtime) -> None:
        """Runs the body once per iteration. Raises `ExecutionError` if the step is below 1."""
        start, stop, step = map(rt.integer, (self.start, self.stop, self.step))
        if step < 1:
            raise ExecutionError(
                f"FOR {self.index}: a step of {self.step} = {step}{user_code(self.where)}"
            )
        rt.run_loop(self.index, range(start, stop, step), self.body)

    def verify(self) -> None:
        """Raises `VerifyError` if the step is a constant below 1."""
        if sc.int_value(self.step) is not None and sc.int_value(self.step) < 1:  # pyright: ignore[reportOptionalOperand]
            raise VerifyError(f"its step is {self.step}, expected at least 1")


def _loop_template(has_axis: bool, has_step: bool) -> str:
    if has_axis:
        return "FOR {index} in {axis}:{body}"
    return "FOR {index} from {start} to {stop}" + (" step {step}" if has_step else "") + ":{body}"


class IfThenElse(HostOp):
    """Runs `then` on the ranks where `predicate` is true, and `orelse` on all other ranks."""

    predicate: Scalar = operand()
    then: tuple[Op, ...] = region()
    orelse: tuple[Op, ...] = region(head="ELSE:", default=())
    TEXT = "IF Manual {predicate}:{then}{orelse}"

    @property
    def subject(self) -> str:
        """The op at the beginning of a message: `The branch`."""
        return "The branch"

    @property
    def has_dry_run(self) -> bool:
        """True, because the dry run and the real run take the same branch."""
        return True

    def effects(self) -> tuple[Effect, ...]:
        """Returns no effects, because the ops of both regions have their own effects."""
        return ()

    def emit(self, rt: Runtime) -> None:
        """Evaluates the predicate once and runs one of the two regions."""
        rt.run(self.then if rt.number(self.predicate) else self.orelse)
