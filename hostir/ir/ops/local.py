"""Defines the host ops that concern only one rank: buffers and views, work on the device, streams
and control flow.

A host program is not in SSA form, so an op does not create the tensor of its result. An op that
computes or copies writes into an existing buffer: one that an `Allocate` made, or a part of another
buffer, to which a view refers. Its `out` is therefore a destination. The `out` of a view op is a
new name for the memory of its operand.

Indices are scalar expressions over loop indices, `rank` and `numberOfStreams` (the number of
streams of a run). Therefore all ranks can run the same program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from fuser.ir.domain.tensor_domain import IterDomain
from fuser.ir.dtypes import DataType, dtype_text
from fuser.ir.fusion import Fusion, TensorView, Variant
from fuser.ir.naming import axis_words
from fuser.ir.op import Op, attr, operand, operands, region, result, results
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Number, Scalar, ScalarLike, Symbol
from fuser.ir.types import DEVICE_TYPES, MemoryType, ParallelType
from fuser.support.errors import ExecutionError, UnsupportedError, VerifyError, counted, user_code
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
    """Allocates a buffer for this rank's shard of the tensor `buffer`, the part that this rank
    stores.

    `zero_init` fills the buffer with zeros. If a loop computes the tensor block by block, an
    iteration may allocate memory for its own block only. Then `stream_index` is the number of this
    block.
    """

    buffer: TensorView = result()
    zero_init: bool = attr(default=False)
    stream_index: Scalar | None = operand(default=None, kw_only=True)
    OLDER = ("{buffer} = ALLOCATE(mem_type={mem_type}, zero_init={zero_init})",)

    def template(self) -> str:
        """Returns the pattern by which an `Allocate` is printed and parsed. The pattern mentions
        `stream_index` only if the op has one.
        """
        return _allocate_template(self.stream_index is not None)

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields (attribute values, text template) for both patterns by which an `Allocate` may be
        printed: without and with a stream index. The parser tries them.
        """
        yield {"stream_index": None}, _allocate_template(False)
        yield {}, _allocate_template(True)

    @property
    def mem_type(self) -> str:
        """The kind of memory that `Allocate` allocates, as its text names the kind: `global` or
        `symmetric`."""
        return self.buffer.memory.text

    @property
    def size(self) -> Scalar:
        """The number of elements that `Allocate` allocates on one rank. With a `stream_index`, this
        is the size of a full block, although the last blocks of a tensor may be shorter.
        """
        return allocated_elements(self.buffer, per_step=self.stream_index is not None)

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effect of `Allocate`: the tensor gets a new buffer. The buffer has contents
        only if `zero_init` is set."""
        return (Makes(self.buffer, is_filled=self.zero_init, step=self.stream_index),)

    def emit(self, rt: Runtime) -> None:
        """Runs `Allocate`: allocates the buffer. If the tensor already has memory, because it is a
        view or in a buffer of the caller, nothing is allocated. `zero_init` then fills that memory
        with zeros.
        """
        if not rt.is_named(self.buffer):
            rt.allocate(self.buffer, self.stream_index, is_cleared=self.zero_init)
        elif self.zero_init:
            # The tensor names a part of another buffer, as in the loops of nvFuser's programs, or
            # a buffer of the caller.
            rt.call(_clear, self.buffer)

    def verify(self) -> None:
        """Raises `VerifyError` if `Allocate` names a tensor in local or shared memory, which only
        kernels can allocate."""
        if self.buffer.memory not in (MemoryType.global_, MemoryType.symmetric):
            raise VerifyError(
                f"{self.buffer} is in {self.buffer.memory.text} memory, but a host program can "
                "allocate only global and symmetric memory"
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
    """Frees the buffer of the tensor `buffer`. No later op may use the tensor or a view of the
    tensor."""

    buffer: TensorView = operand()
    TEXT = "Deallocate {\n  {buffer}\n}"

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effect of `Deallocate`: the buffer is freed."""
        return (Frees(self.buffer),)

    def emit(self, rt: Runtime) -> None:
        """Runs `Deallocate`. If the tensor is a view of the parts (shards) of a tensor that several
        ranks store, waits for these ranks, then ends the view.
        """
        rt.deallocate(self.buffer)


# ------------------------------------------------------------------ launches
@dataclass(frozen=True)
class KernelGroup:
    """A kernel of a host program: its number, the fusion that it computes, and the name of the
    scheduler that accepts the fusion. A scheduler chooses the loops and threads of a kernel.

    All inputs and outputs of the fusion are in global memory.
    """

    number: int
    fusion: Fusion
    scheduler: str


class LaunchKernel(HostOp):
    """Launches the kernel with the number `group` on the current stream.

    `ins` and `outs` are its operands and results. Each tensor of `outs` must already have a buffer,
    or be a view of another tensor.
    """

    ins: tuple[TensorView | Scalar, ...] = operands()
    outs: tuple[TensorView, ...] = results()
    group: int = attr()
    HAS_CONTROL_SCALARS = False
    TEXT = "LaunchKernel(\n  Group ID: {group},\n  Inputs: {ins},\n  Outputs: {outs},\n)"

    @property
    def subject(self) -> str:
        """The phrase that names a `LaunchKernel` op at the beginning of an error message: `The
        launch of kernel group 1`."""
        return f"The launch of kernel group {self.group}"

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effects of `LaunchKernel`: the kernel reads all tensors of `ins` and writes
        all tensors of `outs`."""
        return _computes(self.ins, self.outs)

    def emit(self, rt: Runtime) -> None:
        """Runs `LaunchKernel`: launches the kernel on the current stream."""
        rt.launch(self)

    def verify_in(self, program: ProgramAround) -> None:
        """Raises `VerifyError` unless the operands of `LaunchKernel` fit the fusion that the kernel
        computes. Their number, dtypes, extents and meshes must agree."""
        fusion = program.kernel(self.group)
        _check_operands(self, fusion, f"kernel group {self.group}", _kernel_kind)


class PostOnStream(HostOp):
    """Runs the host unit with the number `unit` on the current stream. A host unit is a fusion that
    is compiled separately.

    `ins` and `outs` are its operands and results. The host unit writes into the results that have a
    buffer, and allocates buffers for all other results.
    """

    ins: tuple[TensorView | Scalar, ...] = operands()
    outs: tuple[TensorView, ...] = results()
    unit: int = attr()
    MAKES_RESULTS = True
    HAS_CONTROL_SCALARS = False
    TEXT = "PostOnStream (HostUnit{unit}, Inputs:{ins}, Outputs:{outs})"

    @property
    def subject(self) -> str:
        """The phrase that names a `PostOnStream` op at the beginning of an error message: `The
        launch of host unit 0`."""
        return f"The launch of host unit {self.unit}"

    @property
    def buffer_sharing(self) -> BufferSharing:
        """The way in which an operand and a result of a `PostOnStream` may share one buffer:
        `freely`. The host unit (a separately compiled fusion) computes all results before it writes
        any of them.
        """
        return "freely"

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effects of `PostOnStream`: the host unit (a separately compiled fusion) reads
        all tensors of `ins` and writes all tensors of `outs`.
        """
        return _computes(self.ins, self.outs)

    def emit(self, rt: Runtime) -> None:
        """Runs `PostOnStream` on one rank: runs the host unit, a separately compiled fusion, on the
        current stream."""
        rt.run_unit(self)

    def work(self, sizes: Sizes) -> Work:
        """Returns the bytes that the op's work moves, for the prediction of its time.
        `PostOnStream` always raises `UnsupportedError`, because its host unit (a separate fusion)
        is scheduled only when the program runs, so the time is unknown.
        """
        raise UnsupportedError(
            f"cost: the time of PostOnStream (HostUnit{self.unit}) cannot be predicted, because "
            "its kernels are generated only when the program runs: predict a program without it"
            f"{user_code(self.where)}"
        )

    def verify_in(self, program: ProgramAround) -> None:
        """Raises `VerifyError` unless the operands of `PostOnStream` fit its host unit, a
        separately compiled fusion. Their number, dtypes, numbers of axes and meshes must agree.

        Also raises `VerifyError` if the host unit updates an input in place.
        """
        fusion = program.unit(self.unit)
        # The symbols of a unit's extents differ from those of the program.
        _check_operands(self, fusion, f"HostUnit{self.unit}", _unit_kind)
        for alias in fusion.aliases:
            raise VerifyError(
                f"HostUnit{self.unit} updates {alias.into} in place, which a host unit cannot do"
            )


def _computes(
    ins: tuple[TensorView | Scalar, ...], outs: tuple[TensorView, ...]
) -> tuple[Effect, ...]:
    reads = [Reads(v) for v in ins if isinstance(v, TensorView)]
    return (*reads, *map(Writes, outs))


# ----- the properties that a launch must share with the fusion that it runs
def _kernel_kind(value: TensorView | Scalar, like: TensorView | Scalar | None = None) -> object:
    """Returns the properties in which an operand of a launch must agree with the kernel's parameter
    `value`: dtype, extents and mesh.

    `like` is the operand. It may be a slice of one element along some axes, which then lacks these
    axes. The extents of these axes are left out of the result.
    """
    if isinstance(value, TensorView):
        shape = list(map(str, value.shape()))
        gone = dropped_axes_of(value, like.ndim) if isinstance(like, TensorView) else ()
        shape = [n for axis, n in enumerate(shape) if axis not in gone]
        return (value.dtype(), shape, value.mesh)
    return value.dtype


def _unit_kind(value: TensorView | Scalar, like: object = None) -> object:
    """Returns the properties in which an operand of `PostOnStream` must agree with the parameter
    `value` of the host unit (a separately compiled fusion): dtype, number of axes and mesh.

    `like` is ignored. The parameter exists because `_kernel_kind` has the same signature.
    """
    if isinstance(value, TensorView):
        return (value.dtype(), value.ndim, value.mesh)
    return value.dtype


def _check_operands(
    op: LaunchKernel | PostOnStream,
    fusion: Fusion,
    where: str,
    kind: Callable[..., object],
) -> None:
    """Raises `VerifyError` if the operands and results of the launch `op` do not fit the inputs and
    outputs of `fusion`.

    `kind` returns the properties of an operand that must be equal on both sides. `where` names the
    fusion in messages.
    """
    for what, mine, theirs in (
        ("input", op.ins, fusion.inputs),
        ("output", op.outs, fusion.outputs),
    ):
        if len(mine) != len(theirs):
            raise VerifyError(f"expected {counted(len(theirs), what)} for {where}, got {len(mine)}")
        for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if kind(a) != kind(b, like=a):
                differ = _difference(a, b)
                raise VerifyError(
                    f"the op passes {a} as {what} {k}, but {where} expects {b}{differ}"
                )


def _difference(a: TensorView | Scalar, b: TensorView | Scalar) -> str:
    """Returns the end of an error message: the first property in which the operand `a` of a launch
    differs from `b`, the value that the fusion expects."""
    if not (isinstance(a, TensorView) and isinstance(b, TensorView)):
        return ""
    if a.dtype() is not b.dtype():
        return f": the dtype is {dtype_text(a.dtype())}, expected {dtype_text(b.dtype())}"
    if a.ndim != b.ndim:
        return f": it has {counted(a.ndim, 'axis')}, expected {b.ndim}"
    if a.mesh != b.mesh:
        mine, theirs = ("no mesh" if tv.mesh is None else tv.mesh for tv in (a, b))
        return f": it has {mine}, expected {theirs}"
    mine, theirs = (", ".join(map(str, tv.shape())) for tv in (a, b))
    return f": the extents are [{mine}], expected [{theirs}]"


# ------------------------------------------------------------------ slices
class LocalSlice(HostOp):
    """Copies this rank's part of `inp`, which every rank has as a whole, into `out`. Nothing is
    sent.

    `axis` is the index of the axis that is split, not counting reduction axes. `ptype` is the mesh
    dimension over which it is split. The rank's coordinate along `ptype` in the mesh of `out` says
    which part is copied.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    axis: int = attr()
    ptype: ParallelType = attr()
    TEXT = "{out}\n   = LocalSlice( {inp}, axis = {axis}, parallelType = {ptype} )"

    @property
    def moved(self) -> tuple[TensorView, TensorView]:
        """The pair (operand, result) of an op that copies values of one tensor to another tensor.
        For `LocalSlice`, these are the tensor that every rank has as a whole, and the copy of this
        rank's part.
        """
        return self.inp, self.out

    def work(self, sizes: Sizes) -> Work:
        """Returns the bytes that `LocalSlice` reads and writes: the size of the slice, for operand
        and result. The rest of the operand is not read."""
        part = held_nbytes(self.out, sizes(self.out))
        return {self.inp: part, self.out: part}

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effects of `LocalSlice`: the op reads `inp` and writes `out`."""
        return (Reads(self.inp), Writes(self.out))

    def emit(self, rt: Runtime) -> None:
        """Runs `LocalSlice`: copies this rank's part on the current stream."""
        rt.copy_part(self.out, self.inp, self.axis, self.bounds)

    def bounds(self, shapes: LocalShapes) -> tuple[int, int]:
        """Returns the range (start, length) of this rank's part along the axis of `LocalSlice`, in
        elements. `shapes` evaluates local sizes."""
        mesh = self.out.mesh
        assert mesh is not None, f"{self.out} has no mesh"
        length = shapes.local_shape(self.out)[self.axis]
        if self.inp.domain.no_reductions[self.axis].is_broadcast:
            # All parts of an expanded axis are the same element. Memory may have fewer elements
            # than a part is long.
            return 0, min(length, shapes.local_shape(self.inp)[self.axis])
        return mesh.coordinate(shapes.rank, self.ptype) * length, length

    def verify(self) -> None:
        """Raises `VerifyError` if the axis or the mesh dimension of `LocalSlice` does not exist, or
        if the dtypes differ."""
        mesh = self.out.mesh
        if mesh is None or mesh.size_of(self.ptype) < 2:
            raise VerifyError(
                f"LocalSlice: the mesh of {self.out} must have at least 2 devices along "
                f"{self.ptype.text}, found {'no mesh' if mesh is None else mesh}"
            )
        if not 0 <= self.axis < self.inp.ndim:
            raise VerifyError(
                f"LocalSlice: there is no axis {self.axis} in {self.inp}, which has "
                f"{counted(self.inp.ndim, 'axis')}"
            )
        if self.inp.dtype() is not self.out.dtype():
            raise VerifyError(
                f"LocalSlice: {self.inp} and {self.out} must have one dtype, found "
                f"{dtype_text(self.inp.dtype())} and {dtype_text(self.out.dtype())}"
            )

    def check_shapes(self, values: Mapping[Symbol, Number]) -> None:
        """Raises `VerifyError` unless the mesh dimension `ptype` of `LocalSlice` splits the axis in
        `out` but not in `inp`. All other axes must have equal sizes and splits.

        `values` binds the symbols in extents.
        """
        check_kept_axes(self, self.inp, self.out, None, values, cut=self.axis)
        if self.inp.domain.no_reductions[self.axis].is_broadcast:
            return  # all parts of an expanded axis are the same element
        before, after = (device_cuts(tv, self.axis) for tv in (self.inp, self.out))
        if self.ptype in before or self.ptype not in after:
            is_split = self.ptype in before
            which, state = (self.inp, "already") if is_split else (self.out, "not")
            raise VerifyError(
                f"{self.name}: {self.ptype.text} must split axis {self.axis} of the result only, "
                f"but axis {self.axis} of {which.label} is {state} split by {self.ptype.text}: "
                f"{self.inp} -> {self.out}"
            )


class HirAliasSelect(HostOp):
    """Makes `out` a view of the element `index` of `inp` along `axis`, an axis of `inp`. `out` has
    all other axes of `inp`. No data moves.

    If `axis` is a reduction axis of `inp`, memory has no such axis, because its elements are
    already summed: `out` is a view of all of `inp`. If the axis has one element on each rank,
    because devices split it or because it is a broadcast, every index selects this element.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    axis: IterDomain = attr()
    index: Scalar = operand()
    TEXT = "{out}\n   = HirAliasSelect( {inp}, axis = {axis}, index = {index} )"
    OLDER = ("{out}\n   = select( {inp}, axis = {axis}, index = {index} )",)

    @cached_property
    def position(self) -> int | None:
        """The index of the axis that `HirAliasSelect` removes from `inp`, not counting reduction
        axes. None if the axis is itself a reduction axis, along which memory has no elements to
        select.
        """
        kept = [a.number for a in self.inp.domain.no_reductions]
        return kept.index(self.axis.number) if self.axis.number in kept else None

    @cached_property
    def part(self) -> Part | None:
        """The part of `inp` that `HirAliasSelect` selects: one element of an axis. None if `out` is
        a view of the whole of `inp`, because the selected axis is a reduction axis.
        """
        return None if self.position is None else Part(self.position, self.index)

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effect of `HirAliasSelect`: `out` becomes a view of the selected element of
        `inp`."""
        return (Shows(self.out, self.inp, self.part),)

    def emit(self, rt: Runtime) -> None:
        """Runs `HirAliasSelect`: makes `out` a view of the selected element of `inp`. No data
        moves."""
        rt.name_part(self.out, self.inp, self.part)

    def verify(self) -> None:
        """Raises `VerifyError` if the selected axis is not an axis of `inp`, or `out` has a wrong
        number of axes.

        A constant index outside of the axis also raises `VerifyError`.
        """
        if self.axis not in self.inp.domain.logical:
            raise VerifyError(
                f"HirAliasSelect: the selected axis is not an axis of {self.inp}"
                f"\nin the IR: {self.axis}"
            )
        lost = 0 if self.position is None else 1
        if self.out.ndim != self.inp.ndim - lost:
            which = axis_words(self.inp, self.axis)
            raise VerifyError(
                f"HirAliasSelect: {self.out} has {counted(self.out.ndim, 'axis')}, expected "
                f"{self.inp.ndim - lost}: the axes of {self.inp} without {which}"
            )
        # An axis of local size 1 has one element, whatever the index.
        if lost and not (self.axis.is_broadcast or self.axis.is_device):
            which = axis_words(self.inp, self.axis)
            check_index("HirAliasSelect", self.index, self.axis.extent, which)


class ShardByStream(HostOp):
    """Makes `out` a view of chunk number `stream_index` of `inp`. `out` declares the axes of the
    whole tensor. Its stream axis (an axis divided over the iterations of a loop) says which axis is
    divided into chunks, and into how many. No data moves.

    The size of a chunk is rounded up, so the last chunks may be short or empty.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    stream_index: Scalar = operand()
    TEXT = "{out} = ShardByStream({inp}, stream_index={stream_index})"
    OLDER = ("{out} = ShardByStream({inp}, stream_index = {stream_index})",)

    @cached_property
    def part(self) -> Part:
        """The part of `inp` that `ShardByStream` selects: one chunk of an axis. The stream axis of
        `out`, which is divided over the iterations of a loop, says which axis it is and how many
        chunks there are.
        """
        position, count = stream_cut(self.out)
        return Part(position, self.stream_index, count)

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effect of `ShardByStream`: `out` becomes a view of a chunk of `inp`."""
        return (Shows(self.out, self.inp, self.part),)

    def emit(self, rt: Runtime) -> None:
        """Runs `ShardByStream`: makes `out` a view of a chunk of `inp`. No data moves."""
        rt.name_part(self.out, self.inp, self.part)

    def verify(self) -> None:
        """Raises `VerifyError` if `inp` and `out` of `ShardByStream` differ in the number of axes,
        or if `out` has no stream axis, which says how `inp` is divided into chunks.

        A constant index that is not below the number of chunks also raises `VerifyError`.
        """
        if self.out.ndim != self.inp.ndim:
            raise VerifyError(
                f"ShardByStream: {self.out} has {counted(self.out.ndim, 'axis')}, expected "
                f"{self.inp.ndim}, as many as {self.inp}"
            )
        position, chunks = stream_cut(self.out)
        check_index("ShardByStream", self.stream_index, chunks, f"axis {position} of {self.out}")


def check_index(op: str, index: Scalar, extent: Scalar, where: str) -> None:
    """Raises `VerifyError` if the constant `index` is not in `0 <= index < extent`. An index that
    is not constant is checked when the program runs.

    `op` and `where` name the op and the indexed axis in the message.
    """
    at, size = sc.int_value(index), sc.int_value(extent)
    if at is not None and (at < 0 or (size is not None and size > 1 and at >= size)):
        raise VerifyError(
            f"{op}: index {at} of {where} is out of range: expected 0 <= index < {extent}"
        )


def stream_cut(tv: TensorView) -> tuple[int, Scalar]:
    """Returns (axis, number of chunks): the axis of `tv` that a loop computes chunk by chunk, each
    in another iteration and on another stream.

    The axis is an index that does not count reduction axes. Raises `VerifyError` if no axis of `tv`
    has the parallel type stream.
    """
    axis = stream_axis(tv)
    if axis is None:
        raise VerifyError(
            f"{tv} has no stream axis: give the parallel type stream to the axis that the op "
            "divides into chunks"
        )
    return axis.position, axis.count


class SymmetricContiguousView(HostOp):
    """Makes `out` a view of the shards of all ranks as one tensor, in which the shards follow each
    other. A shard is the part of a tensor that one rank stores.

    `inp` is the sharded tensor, in symmetric memory, which other ranks can map. If several ranks
    have shards, the op is a barrier of these ranks, and the `Deallocate` of the view is a second
    one. Writes of a rank before the first barrier are visible through the view. Between the two
    barriers, no rank may write.
    """

    out: TensorView = result()
    inp: TensorView = operand()
    TEXT = "{out} = SymmetricContiguousView({inp})"

    @cached_property
    def team(self) -> TeamOf | None:
        """The ranks whose shards (parts of one tensor) a `SymmetricContiguousView` shows as one
        tensor. None if only one rank has a shard.
        """
        mesh, cuts = self.inp.mesh, placement(self.inp, DEVICE_TYPES)
        along = {cut.ptype for mine in cuts for cut in mine}
        if mesh is None or not along:
            return None
        team = TeamOf(mesh, tuple(p for p in DEVICE_TYPES if p in along))
        return team if team.size > 1 else None

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effects of `SymmetricContiguousView`: `out` becomes a view of `inp`. If
        several ranks have shards (parts of the tensor), the op also reads `inp`.
        """
        reads = () if self.team is None else (Reads(self.inp),)
        return (*reads, Shows(self.out, self.inp))

    def emit(self, rt: Runtime) -> None:
        """Runs `SymmetricContiguousView`: maps the shards of all ranks into the memory of this
        process. If only one rank has a shard, makes `out` a view of that shard."""
        if self.team is None:
            rt.name_as_shaped(self.out, self.inp)
        else:
            rt.show_shards(self)

    def verify(self) -> None:
        """Raises `VerifyError` if `inp` is not in symmetric memory. If several ranks have shards
        (parts of the tensor), `out` must be replicated on the mesh of `inp`.
        """
        if self.inp.memory is not MemoryType.symmetric:
            raise VerifyError(
                f"SymmetricContiguousView: {self.inp} is in {self.inp.memory.text} memory, "
                "expected symmetric memory, which other ranks can map"
            )
        if self.team is None:
            return
        if self.out.mesh != self.inp.mesh or self.out.domain.has_devices:
            raise VerifyError(
                f"SymmetricContiguousView: {self.out} must be replicated on {self.inp.mesh}, the "
                f"mesh of {self.inp}; found {'no mesh' if self.out.mesh is None else self.out.mesh}"
                + (", with an axis that devices split" if self.out.domain.has_devices else "")
            )

    @property
    def ranks_meet(self) -> bool:
        """Whether `SymmetricContiguousView` is a barrier, in which several ranks wait for each
        other. False if only one rank has a shard (part) of `inp`.
        """
        return self.team is not None

    def check_shapes(self, values: Mapping[Symbol, Number]) -> None:
        """Raises an error if the shape of the result does not fit the operand.
        `SymmetricContiguousView` checks nothing here: `inp` has the axes of one rank's part and
        `out` those of the whole tensor, so their sizes differ.

        `SymmetricContiguousView.verify` compares the meshes instead.
        """


# ------------------------------------------------------------------ streams
class StreamOp(HostOp):
    """Base class of the host ops that refer to a stream, by its number or its name."""

    stream: Stream = attr(kw_only=False)

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        """The scalars that the op has besides its operands: the number of its stream. () if the
        stream has a name.
        """
        return () if self.stream.index is None else (self.stream.index,)


class SetCurrentStream(StreamOp):
    """Makes `stream` the current stream: later ops put their work on `stream`."""

    stream: Stream = attr(kw_only=False)
    TEXT = "SetCurrentStream(Stream {stream})"
    OLDER = ("SetCurrentStream to Stream {stream}",)

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effect of `SetCurrentStream`: the op's stream becomes the current stream."""
        return (Enters(self.stream),)

    def emit(self, rt: Runtime) -> None:
        """Runs `SetCurrentStream`: makes the op's stream the current stream of the run."""
        rt.enter(self.stream)


class GetCurrentStream(StreamOp):
    """Gives the current stream the name `stream`, so that later ops can refer to the current
    stream."""

    stream: Stream = attr(kw_only=False)
    TEXT = "Stream {stream} = GetCurrentStream()"
    OLDER = ("GetCurrentStream into Stream {stream}",)

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effect of `GetCurrentStream`: the current stream gets a name."""
        return (Captures(self.stream),)

    def emit(self, rt: Runtime) -> None:
        """Runs `GetCurrentStream`: gives the current stream of the run the name of `stream`, such
        as `S0`.
        """
        rt.capture(self.stream)

    def verify(self) -> None:
        """Raises `VerifyError` if `GetCurrentStream` is given the number of a stream instead of a
        new name. A number already denotes a stream of the run."""
        if self.stream.index is not None:
            raise VerifyError(
                f"GetCurrentStream: expected a name for the current stream, such as S0, got the "
                f"number of a stream, {self.stream}"
            )


class Synchronize(StreamOp):
    """Makes the current stream wait for all work that earlier ops put on `stream`. The host does
    not wait."""

    stream: Stream = attr(kw_only=False)
    TEXT = "Synchronize(Stream {stream})"
    OLDER = ("Synchronize Stream {stream}",)

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effect of `Synchronize`: later work on the current stream begins after all
        earlier work on the op's stream has ended."""
        return (Joins(self.stream),)

    def emit(self, rt: Runtime) -> None:
        """Runs `Synchronize`: makes the current stream wait for the op's stream."""
        rt.join(self.stream)

    def verify_in(self, program: ProgramAround) -> None:
        """Raises `VerifyError` if `Synchronize` names a stream that no `GetCurrentStream` or
        `SetCurrentStream` of the program names.

        A name that is an address, such as `0x5f10` in the text of an nvFuser program, is always
        accepted, because no op of the text needs to define it.
        """
        name = self.stream.name
        if not name or name in program.streams or name.startswith("0x"):
            return
        near = get_close_matches(name, sorted(program.streams), n=1, cutoff=0.4)
        advice = f"; did you mean Stream {near[0]}?" if near else ""
        raise VerifyError(
            f"the op waits for Stream {name}, but the program has no GetCurrentStream that returns "
            f"this stream, and no SetCurrentStream that selects it{advice}"
        )


# ------------------------------------------------------------------ control flow
# The parser reads a field of this type as the definition of a new symbol.
Index = Symbol


def loop_index(name: str, start: ScalarLike, stop: ScalarLike) -> Symbol:
    """Returns a new symbol for the index of a loop. The range of the symbol is from `start` to
    `stop - 1`."""
    return Symbol(name, DataType.Index, lo=sc.int_value(start) or 0, hi=sc.sub(stop, 1))


class ForLoop(HostOp):
    """Runs the ops of `body` once for each `index` = start, start + step, ... below stop.

    If `axis` is given, `stop` is the extent of that axis. The program's text then shows the axis
    instead of the bounds.
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
        """The phrase that names a `ForLoop` op at the beginning of an error message: `The loop over
        i3`."""
        return f"The loop over {self.index}"

    def template(self) -> str:
        """Returns the pattern by which a `ForLoop` is printed and parsed: over an axis, or with
        start, stop and (unless 1) step.
        """
        return _loop_template(self.axis is not None, self.step is not sc.ONE)

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields (attribute values, text template) for each pattern by which a `ForLoop` may be
        printed: over an axis, or with bounds, with and without a step. The parser tries them.
        """
        yield {"start": sc.ZERO, "step": sc.ONE}, _loop_template(True, False)
        yield {"axis": None}, _loop_template(False, True)
        yield {"axis": None, "step": sc.ONE}, _loop_template(False, False)

    def effects(self) -> tuple[Effect, ...]:
        """Returns what the op does to buffers, views, communications and streams. Empty for
        `ForLoop`, because the ops of the loop body have their own effects.
        """
        return ()

    def emit(self, rt: Runtime) -> None:
        """Runs the body of `ForLoop` once per iteration. Raises `ExecutionError` if the step has a
        value below 1."""
        start, stop, step = map(rt.integer, (self.start, self.stop, self.step))
        if step < 1:
            raise ExecutionError(
                f"FOR {self.index}: the step {self.step} has the value {step}, expected at least 1"
                f"{user_code(self.where)}"
            )
        rt.run_loop(self.index, range(start, stop, step), self.body)

    def verify(self) -> None:
        """Raises `VerifyError` if the step of `ForLoop` is a constant below 1."""
        if sc.int_value(self.step) is not None and sc.int_value(self.step) < 1:  # pyright: ignore[reportOptionalOperand]
            raise VerifyError(f"the step of the loop is {self.step}, expected at least 1")


def _loop_template(has_axis: bool, has_step: bool) -> str:
    if has_axis:
        return "FOR {index} in {axis}:{body}"
    return "FOR {index} from {start} to {stop}" + (" step {step}" if has_step else "") + ":{body}"


class IfThenElse(HostOp):
    """Runs the ops of `then` if the scalar `predicate` is true, otherwise the ops of `orelse`. Each
    rank evaluates the predicate for itself, so ranks may take different branches.
    """

    predicate: Scalar = operand()
    then: tuple[Op, ...] = region()
    orelse: tuple[Op, ...] = region(head="ELSE:", default=())
    TEXT = "IF Manual {predicate}:{then}{orelse}"

    @property
    def subject(self) -> str:
        """The phrase that names an `IfThenElse` op at the beginning of an error message: `The
        branch`."""
        return "The branch"

    @property
    def has_dry_run(self) -> bool:
        """Whether a dry run, on tensors without contents, can record the op for later runs. True
        for `IfThenElse`: the predicate needs no tensor contents, so a real run takes the same
        branch.
        """
        return True

    def effects(self) -> tuple[Effect, ...]:
        """Returns what the op does to buffers, views, communications and streams. Empty for
        `IfThenElse`, because the ops in both regions of the branch have their own effects.
        """
        return ()

    def emit(self, rt: Runtime) -> None:
        """Evaluates the predicate of `IfThenElse` once and runs the ops of one of the two
        regions."""
        rt.run(self.then if rt.number(self.predicate) else self.orelse)
