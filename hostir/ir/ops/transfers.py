"""Defines the host ops that move data between ranks, and the op that waits for the end of a
communication.

A communication starts on the current stream, when its op runs. The communication uses its buffers
until the `Wait` with the same number. Collectives, transfers and groups of transfers share one
numbering.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Literal, get_args

from fuser.ir import memory_layout
from fuser.ir.domain.device_mesh import ranks_text
from fuser.ir.dtypes import dtype_text
from fuser.ir.fusion import TensorView, Variant
from fuser.ir.memory_layout import memory_order
from fuser.ir.op import Op, attr, operand, operands, result
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.support.errors import ArgumentError, ExecutionError, VerifyError, counted, user_code
from hostir.ir.effects import (
    ClosesGroup,
    Effect,
    Members,
    OpensGroup,
    Reads,
    Starts,
    Waits,
    Writes,
)
from hostir.ir.ops.base import (
    PEER_COPIES,
    BufferSharing,
    HostOp,
    Movement,
    ProgramAround,
    Runtime,
)
from multidevice.coordination.bounded_wait import Team, team_text
from multidevice.sharding.reshard import CommunicationType, TeamOf
from multidevice.transports.base.collectives import COLLECTIVES, Collective, Side
from multidevice.transports.base.protocol import RED_OPS, RedOp

# The end of a message about a tensor without a mesh.
_NEEDS_MESH = "but a communicated tensor needs a mesh of the ranks that store its shards"

# The libraries that a program may name: those of nvFuser, and those of this project's ranks.
LIBRARIES = ("NCCL", "UCC", "MPI", "GLOO", "SIMULATED", PEER_COPIES)


def library_name(backend: str) -> str:
    """Returns the name of a communication library for messages, such as `NCCL`.

    The `backend` CUDA is called `peer copies`, because ranks on CPUs also copy out of each other's
    memory.
    """
    return "peer copies" if backend.upper() == PEER_COPIES else backend.upper()


TransferKind = Literal["send", "recv"]
TRANSFER_KINDS: tuple[TransferKind, ...] = get_args(TransferKind)


@dataclass(frozen=True)
class AxisOrder:
    """The order in which the axes of a local shard are stored in memory, from the outermost axis to
    the contiguous one. A shard is the part of a tensor that one rank stores.

    `axes` are axis indices, outermost first; None if the axes have the same order in memory as in
    the shape. `expanded` are the indices of expanded axes, along which memory holds only one
    element.
    """

    axes: tuple[int, ...] | None
    expanded: tuple[int, ...]

    @staticmethod
    def of(tv: TensorView) -> AxisOrder:
        """Returns the memory order that the tensor `tv` declares (by its allocation domain)."""
        axes = tuple(p for p, _ in memory_order(tv))
        is_logical = axes == tuple(range(len(axes)))
        return AxisOrder(None if is_logical else axes, memory_layout.expanded_positions(tv))


class StartsCommunication(HostOp):
    """Base class of the host ops that start a communication. The `Wait` with the same `number`
    waits for the end of the communication."""

    number: int = attr()

    def __post_init__(self) -> None:
        super().__post_init__()
        backend = getattr(self, "backend", PEER_COPIES)  # EndCoalescing has none
        if backend not in LIBRARIES:
            near = get_close_matches(backend.upper(), LIBRARIES, n=1)
            advice = f"; did you mean {near[0]}?" if near else ""
            raise ArgumentError(
                f"{self.name}: expected backend to be one of {', '.join(LIBRARIES)}, got "
                f"{backend!r}{advice}"
            )

    @cached_property
    def orders(self) -> tuple[AxisOrder, ...]:
        """The memory orders of the tensors that the communication moves: which axis is outermost in
        memory, and which is contiguous. The base class has no such tensors, so its tuple is empty.

        A communication copies elements in memory order, so the tensors of sender and receiver must
        have the same order.
        """
        return ()

    @property
    def buffer_sharing(self) -> BufferSharing:
        """The way in which an operand and a result of a communication may share one buffer:
        `never`, because a communication may write the result while it still reads the operand.
        `Communication` has its own rule for each type of collective.
        """
        return "never"

    def verify_in(self, program: ProgramAround) -> None:
        """Raises `VerifyError` if another op of the program starts a communication with the same
        number."""
        if self.number in program.twice:
            raise VerifyError(
                f"another op also starts communication {self.number}: give each communication a "
                "different number"
            )


def _check_team(team: TeamOf, program: ProgramAround) -> None:
    """Raises `VerifyError` if the `team` of a communication contains a rank that is in the mesh of
    no tensor of the program. Such a rank would not run the program, and the others would wait for
    it.
    """
    if not program.devices or team.mesh in program.meshes:
        return
    known = {*program.devices}
    strange = [r for r in team.mesh.devices if r not in known]
    if strange:
        raise VerifyError(
            f"the team {team} contains {ranks_text(strange)}, but the meshes of the program's "
            f"tensors contain only {ranks_text(program.devices)}"
        )


def _constant(op: HostOp, field: str, position: Scalar) -> int | None:
    """Returns the value of `position`, the root or a peer of a communication, if the value is
    constant. Returns None otherwise.

    `field` is the name of the op's field, for the message. Raises `VerifyError` if `position` is
    not an integer scalar.
    """
    if not sc.is_int(position):
        raise VerifyError(
            f"{op.name}: {field}={position} has the dtype {position.dtype.name}, expected an "
            "integer"
        )
    return sc.int_value(position)


class Communication(StartsCommunication):
    """Starts a collective, such as an allgather, among the ranks of a team. Each rank contributes
    its shard of `inp`, the part that it stores, and receives its shard of `out`.

    `type` names the collective. `root` is a position in the team. `red_op` is the operation by
    which a collective reduces, such as a sum. If `backend` is CUDA, the members copy out of each
    other's memory. Any other `backend` is only a note of the library for which the program was
    made, because a run uses the library of its device.
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
        """The phrase that names a `Communication` op in a sentence: `Communication 3
        (Allgather)`."""
        return f"Communication {self.number} ({self.type})"

    @cached_property
    def collective(self) -> Collective:
        """The facts about the collective that `Communication` starts, for example whether the
        collective has a root, or reduces."""
        return COLLECTIVES[self.type]

    @cached_property
    def orders(self) -> tuple[AxisOrder, AxisOrder]:
        """The memory orders of `inp` and of `out` of a `Communication`: the order in which their
        axes are stored."""
        return AxisOrder.of(self.inp), AxisOrder.of(self.out)

    def template(self) -> str:
        """Returns the pattern by which a `Communication` is printed and parsed. The pattern
        mentions `root` and `red_op` only if the op has a root, or a reduction other than a sum.
        """
        return _communication_template(self.root is not None, self.red_op)

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields (attribute values, text template) for each pattern by which a `Communication` may
        be printed: with and without a root, for each reduction. The parser tries them.
        """
        for has_root in (False, True):
            root: dict[str, object] = {} if has_root else {"root": None}
            for red_op in RED_OPS:
                yield {**root, "red_op": red_op}, _communication_template(has_root, red_op)

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effects of `Communication`: team members read `inp` and write `out`, and the
        collective starts.

        If this type of collective has a root, one of the two tensors may exist only at the root.
        Only the root reads or writes this tensor.
        """
        row = self.collective
        reads, writes = self._members(row.inp), self._members(row.out)
        return (Reads(self.inp, reads), Writes(self.out, writes), Starts(self.number))

    def emit(self, rt: Runtime) -> None:
        """Runs `Communication`: starts the collective on this rank. Does nothing if the rank is in
        no team. Raises `ExecutionError` if the root is no position in the team.
        """
        team = self.team.ranks(rt.rank)
        if team:
            root = -1 if self.root is None else member(team, rt.integer(self.root), self)
            rt.post(self, team, root)

    @property
    def buffer_sharing(self) -> BufferSharing:
        """The way in which operand and result of a `Communication` may share one buffer: a value of
        `BufferSharing`. The type of collective decides. For example, a rank may reduce in place, or
        may pass its own block of a gathered result as the operand.
        """
        return self.collective.sharing

    @cached_property
    def movement(self) -> Movement:
        """The data that `Communication` moves: from `inp` to `out`, between the members of the
        team."""
        return Movement(
            self.type,
            self.inp,
            self.out,
            self.team,
            self.backend,
            collective=self.collective,
            root=self.root,
            red_op=self.red_op,
        )

    def verify_in(self, program: ProgramAround) -> None:
        """Raises `VerifyError` if another op of the program starts a communication with the same
        number. Also raises `VerifyError` if a team member of this `Communication` is in no tensor's
        mesh."""
        super().verify_in(program)
        _check_team(self.team, program)

    def _members(self, side: Side) -> Members:
        """Returns the team members that use one tensor of the collective. `side` describes this
        tensor: the operand, which they read, or the result, which they write. The members are all
        ranks of the team, or only the root.
        """
        return Members(self.team, self.root if side.at_root else None)

    def verify(self) -> None:
        """Raises `VerifyError` if the root, the reduction, the team, the meshes or the dtypes of a
        `Communication` do not fit the type of collective."""
        row = self.collective
        if (self.root is not None) != row.is_rooted:
            rule = "needs a root" if row.is_rooted else "takes no root"
            raise VerifyError(f"{self.name}: {self.type} {rule}, got root={self.root}")
        if self.red_op != "SUM" and not row.reduces:
            raise VerifyError(
                f"{self.name}: {self.type} does not reduce and takes no red_op, got "
                f"red_op={self.red_op}"
            )
        root = None if self.root is None else _constant(self, "root", self.root)
        if root is not None and not 0 <= root < self.team.size:
            raise VerifyError(
                f"{self.name}: root={root} is not a position in a team of "
                f"{counted(self.team.size, 'rank')}, expected 0 to {self.team.size - 1}"
            )
        if self.team.size < 2:
            raise VerifyError(
                f"{self.name}: the team has {self.team.size} rank, expected at least 2 ranks"
            )
        for tv in (self.inp, self.out):
            if tv.mesh is None:
                raise VerifyError(f"{self.name}: {tv} has no mesh, {_NEEDS_MESH}")
        if self.inp.dtype() is not self.out.dtype():
            raise VerifyError(_dtypes_differ(self))


def _dtypes_differ(op: Communication | CollectivePermute) -> str:
    """Returns the text of the error for a communication whose operand and result have different
    dtypes."""
    mine, theirs = (dtype_text(tv.dtype()) for tv in (op.inp, op.out))
    found = f"found {mine} and {theirs}"
    return f"{op.name}: {op.inp} and the result {op.out} must have one dtype, {found}"


def _communication_template(has_root: bool, red_op: RedOp) -> str:
    root = ", root={root}" if has_root else ""
    tail = "" if red_op == "SUM" else f", red_op={red_op}"
    return (
        "Communication {number} (type={type}, team={team}"
        + root
        + tail
        + ", input={inp}, output={out}, backend={backend})"
    )


def member(team: Team, position: int, op: Op) -> int:
    """Returns the global rank of the member at `position` in `team`. Raises `ExecutionError` if the
    team has no such position. `op` is named in the message."""
    if not 0 <= position < len(team):
        raise ExecutionError(
            f"{op.name}: there is no position {position} in a team of "
            f"{counted(len(team), 'rank')}, whose positions are 0 to "
            f"{len(team) - 1}{user_code(op.where)}"
        )
    return team[position]


class P2PCommunication(StartsCommunication):
    """Starts the send of `buffer` to the global rank `peer`, or the receive of `buffer` from
    `peer`. The rank `peer` runs the other half of the transfer."""

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
        """The phrase that names a `P2PCommunication` op in a sentence: `P2PCommunication 3
        (send)`."""
        return f"P2PCommunication {self.number} ({self.type})"

    @cached_property
    def orders(self) -> tuple[AxisOrder, AxisOrder]:
        """The memory order of the buffer of a `P2PCommunication`, twice, because callers expect a
        pair (order of the operand, order of the result). A send or a receive has only this one
        buffer.
        """
        order = AxisOrder.of(self.buffer)
        return order, order

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effects of `P2PCommunication`: a send reads the buffer, a receive writes the
        buffer, and the communication starts."""
        touch = Reads if self.type == "send" else Writes
        return (touch(self.buffer), Starts(self.number))

    @cached_property
    def movement(self) -> Movement:
        """The data that `P2PCommunication` moves: its buffer, sent to the peer or received from the
        peer."""
        ends = (self.buffer, None) if self.type == "send" else (None, self.buffer)
        return Movement(self.type, *ends, None, self.backend, peers={"peer": self.peer})

    def emit(self, rt: Runtime) -> None:
        """Runs `P2PCommunication`: starts the send or receive on this rank. Raises `ExecutionError`
        if the peer is not one of the program's ranks."""
        peer = rt.integer(self.peer)
        if peer not in rt.team:
            raise ExecutionError(
                f"{self.name}: the peer {self.peer} = {peer} of {self.buffer} is not one of the "
                f"ranks of the program, {team_text(rt.team)}{user_code(self.where)}"
            )
        rt.transfer(self, peer)

    def verify(self) -> None:
        """Raises `VerifyError` if the buffer of `P2PCommunication` has no mesh, or if its peer is a
        constant below 0."""
        if self.buffer.mesh is None:
            raise VerifyError(f"{self.name}: {self.buffer} has no mesh, {_NEEDS_MESH}")
        peer = _constant(self, "peer", self.peer)
        if peer is not None and peer < 0:
            raise VerifyError(
                f"{self.name}: the peer of {self.buffer} is {peer}, expected a rank of at least 0"
            )


class CollectivePermute(StartsCommunication):
    """Starts to send `inp` to the team member `send_peer`, and to receive `out` from the team
    member `recv_peer`. All members of the team take part.

    Peers are positions in the team. A member that sends to itself makes a local copy.
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
        """The phrase that names a `CollectivePermute` op in a sentence: `CollectivePermute 3`."""
        return f"CollectivePermute {self.number}"

    @cached_property
    def orders(self) -> tuple[AxisOrder, AxisOrder]:
        """The memory orders of `inp` and of `out` of a `CollectivePermute`: the order in which
        their axes are stored."""
        return AxisOrder.of(self.inp), AxisOrder.of(self.out)

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effects of `CollectivePermute`: all team members read `inp` and write `out`,
        and the communication starts."""
        team = Members(self.team)
        return (Reads(self.inp, team), Writes(self.out, team), Starts(self.number))

    @cached_property
    def movement(self) -> Movement:
        """The data that `CollectivePermute` moves: from `inp` to `out`, between the members of the
        team."""
        peers = {"send_peer": self.send_peer, "recv_peer": self.recv_peer}
        kind = type(self).__name__
        return Movement(kind, self.inp, self.out, self.team, self.backend, peers=peers)

    def emit(self, rt: Runtime) -> None:
        """Runs `CollectivePermute`: starts the permutation on this rank. Does nothing if the rank
        is in no team. Raises `ExecutionError` if a peer is no position in the team.
        """
        team = self.team.ranks(rt.rank)
        if team:
            to, source = (
                member(team, rt.integer(peer), self) for peer in (self.send_peer, self.recv_peer)
            )
            rt.permute(self, team, to, source)

    def verify_in(self, program: ProgramAround) -> None:
        """Raises `VerifyError` if another op of the program starts a communication with the same
        number. Also raises `VerifyError` if a team member of this `CollectivePermute` is in no
        tensor's mesh."""
        super().verify_in(program)
        _check_team(self.team, program)

    def verify(self) -> None:
        """Raises `VerifyError` if `inp` or `out` of a `CollectivePermute` has no mesh, their dtypes
        differ, or a constant peer is no position in the team."""
        for tv in (self.inp, self.out):
            if tv.mesh is None:
                raise VerifyError(f"{self.name}: {tv} has no mesh, {_NEEDS_MESH}")
        if self.inp.dtype() is not self.out.dtype():
            raise VerifyError(_dtypes_differ(self))
        for field in ("send_peer", "recv_peer"):
            peer = _constant(self, field, getattr(self, field))
            if peer is not None and not 0 <= peer < self.team.size:
                raise VerifyError(
                    f"{self.name}: {field}={peer} is not a position in a team of "
                    f"{counted(self.team.size, 'rank')}, expected 0 to {self.team.size - 1}"
                )


class StartCoalescing(HostOp):
    """Opens a group of transfers. All sends and receives up to the next `EndCoalescing` start
    together, so that a ring of ranks cannot deadlock.
    """

    TEXT = "StartCoalescing"

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effect of `StartCoalescing`: a group of transfers is opened."""
        return (OpensGroup(),)

    def emit(self, rt: Runtime) -> None:
        """Runs `StartCoalescing`: opens a group, to which later transfers are added."""
        rt.open_group(self)


class EndCoalescing(StartsCommunication):
    """Starts all sends and receives since `StartCoalescing` together, as the communication
    `number`. A single `Wait` with this number waits for all of them.
    """

    number: int = attr(kw_only=False)
    TEXT = "EndCoalescing {number}"

    @property
    def name(self) -> str:
        """The phrase that names an `EndCoalescing` op in a sentence: `EndCoalescing 3`."""
        return f"EndCoalescing {self.number}"

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effect of `EndCoalescing`: all transfers of the open group start, as the
        communication `number`."""
        return (ClosesGroup(self.number),)

    def emit(self, rt: Runtime) -> None:
        """Runs `EndCoalescing`: starts all transfers of the open group together."""
        rt.close_group(self)


class Wait(HostOp):
    """Makes the current stream wait for the end of the communication `number`."""

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
        """The phrase that names a `Wait` op in a sentence: `Wait 3`."""
        return f"Wait {self.number}"

    def effects(self) -> tuple[Effect, ...]:
        """Returns the effect of `Wait`: later work on the current stream begins after the
        communication has ended."""
        return (Waits(self.number),)

    def emit(self, rt: Runtime) -> None:
        """Runs `Wait`: makes the current stream wait for the end of the communication."""
        rt.wait(self.number)


class ShareMemHandles(HostOp):
    """Announces the buffers that other ranks copy from or to.

    The op does nothing in a run, because a run maps the memory of another rank by itself before the
    first copy. The op exists because programs of nvFuser contain it.
    """

    buffers: tuple[TensorView, ...] = operands()
    TEXT = "ShareMemHandles({buffers})"

    def effects(self) -> tuple[Effect, ...]:
        """Returns what the op does to buffers, views, communications and streams. Empty for
        `ShareMemHandles`, because the op only announces buffers.
        """
        return ()

    def emit(self, rt: Runtime) -> None:
        """Runs `ShareMemHandles`: does nothing, because a run maps the memory of another rank by
        itself before the first copy. The op exists because programs of nvFuser contain it.
        """
