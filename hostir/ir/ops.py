"""The ops that exist only in host programs; the fusion IR's tensor ops stand beside them.

Each is declared once: fields, text, and effects (`hostir.ir.effects`), from which verification,
liveness and the race check derive. A host program is not in SSA form: an op writes a tensor that
`Allocate` made, or that is a name of another's buffer. So `out` of a library op is a destination,
and `out` of a view op is a new name for its input. Indices, roots and peers are scalar expressions
over loop indices, `rank` and `numberOfStreams`: one text holds for all ranks.

Communications are in `hostir.ir.ops`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from types import UnionType
from typing import Any, ClassVar, Literal, Union, cast, get_args, get_origin

from fuser.ir import memory_layout
from fuser.ir.domain.tensor_domain import IterDomain
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import TensorOp, TensorView, Variant
from fuser.ir.memory_layout import memory_order
from fuser.ir.naming import axis_words, in_ir, tensor_words
from fuser.ir.op import Op, attr, operand, operands, region, result, results
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar, ScalarLike, Symbol, as_scalar
from fuser.ir.types import DEVICE_TYPES, MemoryType, ParallelType
from fuser.support.arguments import show
from fuser.support.errors import ArgumentError, VerifyError
from hostir.ir.effects import (
    Captures,
    ClosesGroup,
    Effect,
    Enters,
    Frees,
    Joins,
    Makes,
    Members,
    OpensGroup,
    Part,
    Reads,
    Shows,
    Starts,
    Stream,
    Waits,
    Writes,
)
from hostir.ir.shard_layout import allocated_elements
from multidevice.sharding.placement import placement
from multidevice.sharding.reshard import CommunicationType, TeamOf
from multidevice.sharding.streams import stream_axis
from multidevice.transports.base.protocol import RED_OPS, RedOp

# What every run binds: this rank, and how many streams the evaluator has.
RANK = Symbol("rank", DataType.Index, lo=0)
NUMBER_OF_STREAMS = Symbol("numberOfStreams", DataType.Index, lo=1)


class HostOp(Op):
    """Base of the ops of host programs."""

    # Spellings of earlier versions, which the parser still reads.
    OLDER: ClassVar[tuple[str, ...]] = ()
    # Whether the op makes those of its results that have no buffer.
    MAKES_RESULTS: ClassVar[bool] = False

    def __post_init__(self) -> None:
        complete_fields(self)

    def effects(self) -> tuple[Effect, ...]:
        """Return what the op does, in order; regions speak for themselves."""
        raise NotImplementedError(f"{type(self).__name__} declares no effects")


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
        return (Makes(self.buffer, is_filled=self.zero_init),)

    def verify(self) -> None:
        if self.buffer.memory not in (MemoryType.global_, MemoryType.symmetric):
            raise VerifyError(
                f"{self.buffer} is not in global memory, but {self.buffer.memory.text}"
            )


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


# ------------------------------------------------------------------ launches
class LaunchKernel(HostOp):
    """Runs the kernel of group `group` on the current stream; `outs` are allocated or aliases."""

    ins: tuple[TensorView | Scalar, ...] = operands()
    outs: tuple[TensorView, ...] = results()
    group: int = attr()
    TEXT = "LaunchKernel(\n  Group ID: {group},\n  Inputs: {ins},\n  Outputs: {outs},\n)"

    def effects(self) -> tuple[Effect, ...]:
        return _computes(self.ins, self.outs)


class PostOnStream(HostOp):
    """Runs the host unit of number `unit`, a fusion of its own, on the current stream.

    `outs` are written where they have a buffer, and made where they have none.
    """

    ins: tuple[TensorView | Scalar, ...] = operands()
    outs: tuple[TensorView, ...] = results()
    unit: int = attr()
    MAKES_RESULTS = True
    TEXT = "PostOnStream (HostUnit{unit}, Inputs:{ins}, Outputs:{outs})"

    def effects(self) -> tuple[Effect, ...]:
        return _computes(self.ins, self.outs)


def _computes(
    ins: tuple[TensorView | Scalar, ...], outs: tuple[TensorView, ...]
) -> tuple[Effect, ...]:
    reads = [Reads(v) for v in ins if isinstance(v, TensorView)]
    return (*reads, *map(Writes, outs))


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

    def effects(self) -> tuple[Effect, ...]:
        return (Reads(self.inp), Writes(self.out))

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

    @property
    def position(self) -> int | None:
        """The axis's place among the logical axes without reductions; None for a reduction."""
        kept = [a.number for a in self.inp.domain.no_reductions]
        return kept.index(self.axis.number) if self.axis.number in kept else None

    def effects(self) -> tuple[Effect, ...]:
        at = self.position
        return (Shows(self.out, self.inp, None if at is None else Part(at, self.index)),)

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

    @property
    def part(self) -> Part:
        position, count = stream_cut(self.out)
        return Part(position, self.stream_index, count)

    def effects(self) -> tuple[Effect, ...]:
        return (Shows(self.out, self.inp, self.part),)

    def verify(self) -> None:
        if self.out.ndim != self.inp.ndim:
            raise VerifyError(f"ShardByStream: {self.out} and {self.inp} differ in rank")
        position, chunks = stream_cut(self.out)
        check_index("ShardByStream", self.stream_index, chunks, f"axis {position} of {self.out}")


def check_index(op: str, index: Scalar, extent: Scalar, where: str) -> None:
    """Raise `VerifyError` for an index that is constant and outside; others are for the run."""
    at, size = sc.int_value(index), sc.int_value(extent)
    if at is not None and (at < 0 or (size is not None and size > 1 and at >= size)):
        raise VerifyError(f"{op}: index {at} is outside of {where}, which has {extent}")


def stream_cut(tv: TensorView) -> tuple[int, Scalar]:
    """Return the logical position (reductions left out) that the stream axis of `tv` cuts, and into
    how many chunks. Raises `VerifyError` when there is none."""
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


class GetCurrentStream(StreamOp):
    """The stream's name means the current stream from now on."""

    stream: Stream = attr(kw_only=False)
    TEXT = "Stream {stream} = GetCurrentStream()"
    OLDER = ("GetCurrentStream into Stream {stream}",)

    def effects(self) -> tuple[Effect, ...]:
        return (Captures(self.stream),)

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


# ------------------------------------------------------------------ control flow
# What the parser reads as the definition of an index.
Index = Symbol


def loop_index(name: str, start: ScalarLike, stop: ScalarLike) -> Symbol:
    """Return the index of a loop: its range is that of the loop."""
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

    def template(self) -> str:
        return _loop_template(self.axis is not None, self.step is not sc.ONE)

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        yield {"start": sc.ZERO, "step": sc.ONE}, _loop_template(True, False)
        yield {"axis": None}, _loop_template(False, True)
        yield {"axis": None, "step": sc.ONE}, _loop_template(False, False)

    def effects(self) -> tuple[Effect, ...]:
        return ()

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

    def effects(self) -> tuple[Effect, ...]:
        return ()


def is_computed(op: Op, effects: Iterable[Effect]) -> bool:
    """Whether an op with these effects is work for the device, rather than a name, room in memory,
    a communication or an order of streams."""
    if isinstance(op, Allocate):
        return op.zero_init
    is_work = isinstance(op, TensorOp | LaunchKernel | LocalSlice | PostOnStream)
    return is_work and not any(isinstance(e, Shows) for e in effects)


# ----------------------------------------------------------------------
# The host ops that move data between ranks, and the waits for them.
#
# A communication starts where it stands, on the current stream, and uses its buffers until its
# Wait. One numbering holds for all that can be waited for.

# What a program can start as a `Communication`; the others are ops of their own.
COLLECTIVES: tuple[CommunicationType, ...] = (
    "Allgather",
    "Allreduce",
    "AllToAll",
    "Broadcast",
    "Gather",
    "Reduce",
    "ReduceScatter",
    "Scatter",
)
ROOTED = frozenset({"Broadcast", "Gather", "Reduce", "Scatter"})
REDUCING = frozenset({"Allreduce", "Reduce", "ReduceScatter"})
# Which types read their input, and write their output, on the root only.
AT_ROOT: dict[str, frozenset[str]] = {
    "operand": frozenset({"Broadcast", "Scatter"}),
    "result": frozenset({"Gather", "Reduce"}),
}

# The library of peer copies; every other name stands for that of the run's device.
PEER_COPIES = "CUDA"
# What a program may name: nvFuser's libraries, and those that carry out runs here.
LIBRARIES = ("NCCL", "UCC", "MPI", "GLOO", "SIMULATED", PEER_COPIES)


def library_name(backend: str) -> str:
    """Return what people call a library: peer copies also stand in CPU ranks, without CUDA."""
    return "peer copies" if backend.upper() == PEER_COPIES else backend.upper()


TransferKind = Literal["send", "recv"]
TRANSFER_KINDS: tuple[TransferKind, ...] = get_args(TransferKind)


@dataclass(frozen=True)
class AxisOrder:
    """How a shard lies in memory: its axes, outermost first (None: as they are), and those that are
    expanded, of which memory holds one element."""

    axes: tuple[int, ...] | None
    expanded: tuple[int, ...]

    @staticmethod
    def of(tv: TensorView) -> AxisOrder:
        """Return the order that the allocation domain declares."""
        axes = tuple(p for p, _ in memory_order(tv))
        is_logical = axes == tuple(range(len(axes)))
        return AxisOrder(None if is_logical else axes, memory_layout.expanded_positions(tv))


class StartsCommunication(HostOp):
    """Base of the ops that start a communication under `number`."""

    number: int = attr()

    def __post_init__(self) -> None:
        super().__post_init__()
        backend = getattr(self, "backend", PEER_COPIES)  # EndCoalescing has none
        if backend not in LIBRARIES:
            near = get_close_matches(backend.upper(), LIBRARIES, n=1)
            advice = f"; did you mean {near[0]}?" if near else ""
            raise ArgumentError(
                f"{self.name}: backend is one of {', '.join(LIBRARIES)}, got {backend!r}{advice}"
            )

    @cached_property
    def orders(self) -> tuple[AxisOrder, ...]:
        """The memory orders of what it moves; a communication moves memory as it lies."""
        return ()


class Communication(StartsCommunication):
    """Starts a communication of the local shards `inp` -> `out` within each team.

    `root` is a position in the team; `red_op` counts for the reducing types. With `backend` CUDA
    members copy out of each other's memory; any other name records the library for which the
    program was made, and a run takes that of its device.
    """

    inp: TensorView = operand()
    out: TensorView = result()
    number: int = attr()
    type: CommunicationType = attr()
    team: TeamOf = attr()
    backend: str = attr(default="NCCL")
    root: Scalar | None = operand(default=None, kw_only=True)
    red_op: RedOp = attr(default="SUM")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.type not in COLLECTIVES:
            raise ArgumentError(
                f"Communication.type: expected one of {', '.join(COLLECTIVES)}, got {self.type!r}"
            )

    @property
    def name(self) -> str:
        return f"Communication {self.number} ({self.type})"

    @cached_property
    def orders(self) -> tuple[AxisOrder, AxisOrder]:
        """The memory orders of `inp` and `out`; a communication moves memory as it lies."""
        return AxisOrder.of(self.inp), AxisOrder.of(self.out)

    def template(self) -> str:
        return _communication_template(self.root is not None, self.red_op)

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        for has_root in (False, True):
            root: dict[str, object] = {} if has_root else {"root": None}
            for red_op in RED_OPS:
                yield {**root, "red_op": red_op}, _communication_template(has_root, red_op)

    def effects(self) -> tuple[Effect, ...]:
        reads, writes = self._members("operand"), self._members("result")
        return (Reads(self.inp, reads), Writes(self.out, writes), Starts(self.number))

    def _members(self, of: str) -> Members:
        """Return whose operand is read, or result is written."""
        return Members(self.team, self.root if self.type in AT_ROOT[of] else None)

    def verify(self) -> None:
        if (self.root is not None) != (self.type in ROOTED):
            rule = "takes no root" if self.type not in ROOTED else "needs a root"
            raise VerifyError(f"{self.name}: {self.type} {rule}, got root={self.root}")
        if self.red_op != "SUM" and self.type not in REDUCING:
            raise VerifyError(f"{self.name}: {self.type} reduces nothing, got red_op={self.red_op}")
        root = None if self.root is None else sc.int_value(self.root)
        if root is not None and not 0 <= root < self.team.size:
            raise VerifyError(f"{self.name}: root={root} is outside of a team of {self.team.size}")
        if self.team.size < 2:
            raise VerifyError(f"{self.name}: a team of {self.team.size} needs no communication")
        for tv in (self.inp, self.out):
            if tv.mesh is None:
                raise VerifyError(f"{self.name}: {tv} has no mesh")
        if self.inp.dtype() is not self.out.dtype():
            raise VerifyError(f"{self.name}: {self.inp} and output {self.out} differ in dtype")


def _communication_template(has_root: bool, red_op: RedOp) -> str:
    root = ", root={root}" if has_root else ""
    tail = "" if red_op == "SUM" else f", red_op={red_op}"
    return (
        "Communication {number} (type={type}, team={team}"
        + root
        + tail
        + ", input={inp}, output={out}, backend={backend})"
    )


class P2PCommunication(StartsCommunication):
    """Starts to send `buffer` to the global rank `peer`, or to receive it from there."""

    buffer: TensorView = operand()
    peer: Scalar = operand()
    number: int = attr()
    type: TransferKind = attr()
    backend: str = attr(default="NCCL")
    TEXT = (
        "P2PCommunication {number} (type={type}, buffer={buffer}, peer={peer}, backend={backend})"
    )

    @property
    def name(self) -> str:
        return f"P2PCommunication {self.number} ({self.type})"

    @cached_property
    def orders(self) -> tuple[AxisOrder, AxisOrder]:
        order = AxisOrder.of(self.buffer)
        return order, order

    def effects(self) -> tuple[Effect, ...]:
        touch = Reads if self.type == "send" else Writes
        return (touch(self.buffer), Starts(self.number))

    def verify(self) -> None:
        if self.buffer.mesh is None:
            raise VerifyError(f"{self.name}: {self.buffer} has no mesh")
        peer = sc.int_value(self.peer)
        if peer is not None and peer < 0:
            raise VerifyError(f"{self.name}: peer {peer} of {self.buffer} is no rank")


class CollectivePermute(StartsCommunication):
    """Starts to send `inp` to the member `send_peer` and to receive `out` from `recv_peer`.

    Peers are positions in the team. To oneself it is a copy.
    """

    inp: TensorView = operand()
    out: TensorView = result()
    send_peer: Scalar = operand()
    recv_peer: Scalar = operand()
    number: int = attr()
    team: TeamOf = attr()
    backend: str = attr(default="NCCL")
    TEXT = (
        "CollectivePermute {number} (team={team}, send_peer={send_peer}, recv_peer={recv_peer}, "
        "input={inp}, output={out}, backend={backend})"
    )

    @property
    def name(self) -> str:
        return f"CollectivePermute {self.number}"

    @cached_property
    def orders(self) -> tuple[AxisOrder, AxisOrder]:
        return AxisOrder.of(self.inp), AxisOrder.of(self.out)

    def effects(self) -> tuple[Effect, ...]:
        team = Members(self.team)
        return (Reads(self.inp, team), Writes(self.out, team), Starts(self.number))

    def verify(self) -> None:
        for tv in (self.inp, self.out):
            if tv.mesh is None:
                raise VerifyError(f"{self.name}: {tv} has no mesh")
        if self.inp.dtype() is not self.out.dtype():
            raise VerifyError(f"{self.name}: {self.inp} and output {self.out} differ in dtype")
        for peer in map(sc.int_value, (self.send_peer, self.recv_peer)):
            if peer is not None and not 0 <= peer < self.team.size:
                raise VerifyError(
                    f"{self.name}: peer {peer} is outside of a team of {self.team.size}"
                )


class StartCoalescing(HostOp):
    """The sends and receives up to `EndCoalescing` start together, so that a ring cannot block."""

    TEXT = "StartCoalescing"

    def effects(self) -> tuple[Effect, ...]:
        return (OpensGroup(),)


class EndCoalescing(StartsCommunication):
    """Starts the sends and receives since `StartCoalescing`; one Wait is for all of them."""

    number: int = attr(kw_only=False)
    TEXT = "EndCoalescing {number}"

    @property
    def name(self) -> str:
        return f"EndCoalescing {self.number}"

    def effects(self) -> tuple[Effect, ...]:
        return (ClosesGroup(self.number),)


class Wait(HostOp):
    """Makes the current stream wait for the communication of this number."""

    number: int = attr(kw_only=False)
    TEXT = "Wait(Communication {number})"
    OLDER = (
        "Wait Communication {number}",
        "Wait(P2PCommunication {number})",
        "Wait(CollectivePermute {number})",
        "Wait(EndCoalescing {number})",
    )

    @property
    def name(self) -> str:
        return f"Wait {self.number}"

    def effects(self) -> tuple[Effect, ...]:
        return (Waits(self.number),)


class ShareMemHandles(HostOp):
    """Announces which buffers peers copy from and to; a run maps memory where it is first needed,
    so there is nothing left to be done.
    """

    buffers: tuple[TensorView, ...] = operands()
    TEXT = "ShareMemHandles({buffers})"

    def effects(self) -> tuple[Effect, ...]:
        return ()


# Every op that only host programs have, in order of declaration; what has subclasses is no op.
HOST_OPS: tuple[type[HostOp], ...] = tuple(
    cls
    for cls in Op.REGISTRY.values()
    if issubclass(cls, HostOp) and cls is not HostOp and not cls.__subclasses__()
)


# ----------------------------------------------------------------------
# What the fields of host ops take: a value of another kind is refused when an op is made.

# How messages call a type; others go by their name.
_WORDS: dict[object, str] = {
    TensorView: "a tensor",
    Scalar: "a scalar or a number",
    type(None): "None",
}


def complete_fields(op: Op) -> None:
    """Put constants for Python numbers among the operands, and tuples for lists.

    Raises `ArgumentError` naming op and field for a value of a wrong kind.
    """
    for name, kind, hint, known in _fields(type(op)):
        given: Any = getattr(op, name)
        if type(given) in known:
            continue
        value = _completed(given, kind, hint)
        if not _fits(value, hint):
            words = _words(hint)
            raise ArgumentError(
                f"{type(op).__name__}.{name}: expected {words}, {_got(given, hint)}"
            )
        if value is not given:
            object.__setattr__(op, name, value)
        elif get_origin(hint) not in (tuple, Literal):
            known.add(cast("type[object]", type(given)))


def _completed(given: Any, kind: str, hint: Any) -> Any:
    if kind == "operand" and _is_number(given):
        return as_scalar(given)
    if get_origin(hint) is tuple and type(given) in (tuple, list):
        return tuple(as_scalar(v) if _is_number(v) else v for v in given)
    return given


@cache
def _fields(cls: type[Op]) -> tuple[tuple[str, str, Any, set[type[object]]], ...]:
    """Return (name, kind, type, classes that were found to fit) of every field of an op class."""
    return tuple(
        (f.name, f.metadata["kind"], _hint(cls.__module__, f.type), set[type[object]]())
        for f in dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        if f.metadata.get("kind", "where") != "where"
    )


@cache
def _hint(module: str, text: str) -> Any:
    """Return what an annotation means; `get_type_hints` takes a millisecond per class."""
    return eval(text, vars(sys.modules[module]))


def _is_number(value: object) -> bool:
    # A comparison by `==` is a bool by accident.
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fits(value: object, hint: Any) -> bool:
    origin: Any = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(v, get_args(hint)[0]) for v in value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    origin: Any = get_origin(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_words, get_args(hint)))
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if origin is tuple:
        return f"a tuple, each {_words(get_args(hint)[0])}"
    return _WORDS.get(hint) or str(hint.__name__)


def _got(given: object, hint: Any) -> str:
    """Return what was given instead; a tensor by name, its type below."""
    if isinstance(given, TensorView):
        return f"got {tensor_words(given)}{_advice(given, hint)}{in_ir(given)}"
    return f"got {show(given)}{_advice(given, hint)}"


def _advice(given: object, hint: Any) -> str:
    if isinstance(given, bool) and _fits(as_scalar(given), hint):
        return "; Python's == compares objects: write hostir.eq(a, b) or hostir.ne(a, b)"
    if isinstance(given, TensorView) and hint is Scalar and given.dtype() is DataType.Bool:
        return "; a comparison of tensors has one answer per element: compare scalars"
    return ""
