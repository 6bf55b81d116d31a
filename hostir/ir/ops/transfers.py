"""The host ops that move data between ranks, and the waits for them.

A communication starts on the current stream, at the op that declares it. It uses its buffers until
the `Wait` with its number. Collectives, transfers and groups of transfers share one numbering.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Literal, get_args

from fuser.ir import memory_layout
from fuser.ir.domain.device_mesh import ranks_text
from fuser.ir.fusion import TensorView, Variant
from fuser.ir.memory_layout import memory_order
from fuser.ir.op import Op, attr, operand, operands, result
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.support.errors import ArgumentError, ExecutionError, VerifyError, user_code
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

# The libraries that a program may name: those of nvFuser, and those of this project's ranks.
LIBRARIES = ("NCCL", "UCC", "MPI", "GLOO", "SIMULATED", PEER_COPIES)


def library_name(backend: str) -> str:
    """Returns the name of a library in messages. Peer copies (`CUDA`) also exist between CPU ranks,
    so they are called `peer copies`."""
    return "peer copies" if backend.upper() == PEER_COPIES else backend.upper()


TransferKind = Literal["send", "recv"]
TRANSFER_KINDS: tuple[TransferKind, ...] = get_args(TransferKind)


@dataclass(frozen=True)
class AxisOrder:
    """The order of a local shard in memory.

    `axes` are the axes, outermost first; None for the order of the logical axes. `expanded` are the
    expanded axes, of which memory holds one element.
    """

    axes: tuple[int, ...] | None
    expanded: tuple[int, ...]

    @staticmethod
    def of(tv: TensorView) -> AxisOrder:
        """Returns the order that the allocation domain of `tv` declares."""
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
        """The memory orders of the tensors that move. A communication copies memory in
        its order."""
        return ()

    @property
    def buffer_sharing(self) -> BufferSharing:
        """The operand and the result need separate buffers."""
        return "never"

    def verify_in(self, program: ProgramAround) -> None:
        """Raises `VerifyError` for a number that another communication has."""
        if self.number in program.twice:
            raise VerifyError(f"there are two communications {self.number}")


def _check_team(team: TeamOf, program: ProgramAround) -> None:
    """Raises `VerifyError` for a team with ranks that are in no mesh of a tensor."""
    if not program.devices or team.mesh in program.meshes:
        return
    known = {*program.devices}
    strange = [r for r in team.mesh.devices if r not in known]
    if strange:
        raise VerifyError(
            f"the team {team} names {ranks_text(strange)}, "
            f"the meshes of tensors have {ranks_text(program.devices)}"
        )


def _constant(op: HostOp, field: str, position: Scalar) -> int | None:
    """Returns the constant value of a root or peer; None for a symbolic scalar.

    Raises `VerifyError` for a scalar that is no integer.
    """
    if not sc.is_int(position):
        raise VerifyError(
            f"{op.name}: {field}={position} is no integer, but a {position.dtype.name}"
        )
    return sc.int_value(position)


class Communication(StartsCommunication):
    """Starts a collective of type `type` on the local shards `inp` -> `out`, within each team.

    `root` is a position in the team. `red_op` is the reduction of the types that reduce. `backend`
    CUDA means that the members copy out of each other's memory. Any other name records the library
    for which the program was made, and a run uses the library of its device.
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
        """The op in a sentence: `Communication 3 (Allgather)`."""
        return f"Communication {self.number} ({self.type})"

    @cached_property
    def collective(self) -> Collective:
        """The row of facts about the type."""
        return COLLECTIVES[self.type]

    @cached_property
    def orders(self) -> tuple[AxisOrder, AxisOrder]:
        """The memory orders of `inp` and `out`."""
        return AxisOrder.of(self.inp), AxisOrder.of(self.out)

    def template(self) -> str:
        """Returns the text of the op, with or without root and reduction."""
        return _communication_template(self.root is not None, self.red_op)

    @classmethod
    def variants(cls) -> Iterator[Variant]:
        """Yields all texts of the op, which the parser reads."""
        for has_root in (False, True):
            root: dict[str, object] = {} if has_root else {"root": None}
            for red_op in RED_OPS:
                yield {**root, "red_op": red_op}, _communication_template(has_root, red_op)

    def effects(self) -> tuple[Effect, ...]:
        """Reads `inp` and writes `out`, on the root alone where the type says so, and starts the
        communication."""
        row = self.collective
        reads, writes = self._members(row.inp), self._members(row.out)
        return (Reads(self.inp, reads), Writes(self.out, writes), Starts(self.number))

    def emit(self, rt: Runtime) -> None:
        """Posts the collective if this rank is in a team. Raises `ExecutionError` for a root
        outside of it."""
        team = self.team.ranks(rt.rank)
        if team:
            root = -1 if self.root is None else member(team, rt.integer(self.root), self)
            rt.post(self, team, root)

    @property
    def buffer_sharing(self) -> BufferSharing:
        """Is that of the collective's row."""
        return self.collective.sharing

    @cached_property
    def movement(self) -> Movement:
        """A collective from `inp` to `out` within the team."""
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
        """Raises `VerifyError` for a number in use, or a team with ranks that are in no mesh."""
        super().verify_in(program)
        _check_team(self.team, program)

    def _members(self, side: Side) -> Members:
        """Returns the members that have this side of the collective: all, or the root."""
        return Members(self.team, self.root if side.at_root else None)

    def verify(self) -> None:
        """Raises `VerifyError` for a root, reduction, team, mesh or dtype that does not fit the
        type."""
        row = self.collective
        if (self.root is not None) != row.is_rooted:
            rule = "needs a root" if row.is_rooted else "takes no root"
            raise VerifyError(f"{self.name}: {self.type} {rule}, got root={self.root}")
        if self.red_op != "SUM" and not row.reduces:
            raise VerifyError(f"{self.name}: {self.type} reduces nothing, got red_op={self.red_op}")
        root = None if self.root is None else _constant(self, "root", self.root)
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


def member(team: Team, position: int, op: Op) -> int:
    """Returns the global rank at a position of a team. Raises `ExecutionError` for a position
    outside."""
    if not 0 <= position < len(team):
        raise ExecutionError(
            f"{op.name}: position {position} in a team of {len(team)}{user_code(op.where)}"
        )
    return team[position]


class P2PCommunication(StartsCommunication):
    """Starts to send `buffer` to the global rank `peer`, or to receive it from that rank."""

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
        """The op in a sentence: `P2PCommunication 3 (send)`."""
        return f"P2PCommunication {self.number} ({self.type})"

    @cached_property
    def orders(self) -> tuple[AxisOrder, AxisOrder]:
        """The memory order of the buffer, as that of the source and of the destination."""
        order = AxisOrder.of(self.buffer)
        return order, order

    def effects(self) -> tuple[Effect, ...]:
        """Reads the buffer of a send, or writes that of a receive, and starts the communication."""
        touch = Reads if self.type == "send" else Writes
        return (touch(self.buffer), Starts(self.number))

    @cached_property
    def movement(self) -> Movement:
        """Is one end of a transfer between two ranks."""
        ends = (self.buffer, None) if self.type == "send" else (None, self.buffer)
        return Movement(self.type, *ends, None, self.backend, peers={"peer": self.peer})

    def emit(self, rt: Runtime) -> None:
        """Starts the transfer. Raises `ExecutionError` for a peer outside of the
        program's ranks."""
        peer = rt.integer(self.peer)
        if peer not in rt.team:
            raise ExecutionError(
                f"{self.name}: peer {self.peer} = {peer} of {self.buffer}, but the program is on "
                f"ranks {team_text(rt.team)}{user_code(self.where)}"
            )
        rt.transfer(self, peer)

    def verify(self) -> None:
        """Raises `VerifyError` for a buffer without a mesh, or a constant peer below 0."""
        if self.buffer.mesh is None:
            raise VerifyError(f"{self.name}: {self.buffer} has no mesh")
        peer = _constant(self, "peer", self.peer)
        if peer is not None and peer < 0:
            raise VerifyError(f"{self.name}: peer {peer} of {self.buffer} is no rank")


class CollectivePermute(StartsCommunication):
    """Starts to send `inp` to the member `send_peer` and to receive `out` from `recv_peer`.

    Peers are positions in the team. A member that sends to itself copies.
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
        """The op in a sentence: `CollectivePermute 3`."""
        return f"CollectivePermute {self.number}"

    @cached_property
    def orders(self) -> tuple[AxisOrder, AxisOrder]:
        """The memory orders of `inp` and `out`."""
        return AxisOrder.of(self.inp), AxisOrder.of(self.out)

    def effects(self) -> tuple[Effect, ...]:
        """Reads `inp` and writes `out` on all members, and starts the communication."""
        team = Members(self.team)
        return (Reads(self.inp, team), Writes(self.out, team), Starts(self.number))

    @cached_property
    def movement(self) -> Movement:
        """A permutation from `inp` to `out` within the team."""
        peers = {"send_peer": self.send_peer, "recv_peer": self.recv_peer}
        kind = type(self).__name__
        return Movement(kind, self.inp, self.out, self.team, self.backend, peers=peers)

    def emit(self, rt: Runtime) -> None:
        """Starts the permutation if this rank is in a team. Raises `ExecutionError` for a peer
        outside of it."""
        team = self.team.ranks(rt.rank)
        if team:
            to, source = (
                member(team, rt.integer(peer), self) for peer in (self.send_peer, self.recv_peer)
            )
            rt.permute(self, team, to, source)

    def verify_in(self, program: ProgramAround) -> None:
        """Raises `VerifyError` for a number in use, or a team with ranks that are in no mesh."""
        super().verify_in(program)
        _check_team(self.team, program)

    def verify(self) -> None:
        """Raises `VerifyError` for tensors without a mesh or of two dtypes, or a constant peer
        outside of the team."""
        for tv in (self.inp, self.out):
            if tv.mesh is None:
                raise VerifyError(f"{self.name}: {tv} has no mesh")
        if self.inp.dtype() is not self.out.dtype():
            raise VerifyError(f"{self.name}: {self.inp} and output {self.out} differ in dtype")
        for field in ("send_peer", "recv_peer"):
            peer = _constant(self, field, getattr(self, field))
            if peer is not None and not 0 <= peer < self.team.size:
                raise VerifyError(
                    f"{self.name}: peer {peer} is outside of a team of {self.team.size}"
                )


class StartCoalescing(HostOp):
    """Opens a group: the transfers up to `EndCoalescing` start together, so that a ring of ranks
    cannot deadlock."""

    TEXT = "StartCoalescing"

    def effects(self) -> tuple[Effect, ...]:
        """Opens the group."""
        return (OpensGroup(),)

    def emit(self, rt: Runtime) -> None:
        """Opens the group in the run."""
        rt.open_group(self)


class EndCoalescing(StartsCommunication):
    """Starts the transfers since `StartCoalescing`. One `Wait` waits for all of them."""

    number: int = attr(kw_only=False)
    TEXT = "EndCoalescing {number}"

    @property
    def name(self) -> str:
        """The op in a sentence: `EndCoalescing 3`."""
        return f"EndCoalescing {self.number}"

    def effects(self) -> tuple[Effect, ...]:
        """Closes the group and starts it under the op's number."""
        return (ClosesGroup(self.number),)

    def emit(self, rt: Runtime) -> None:
        """Starts the group's transfers."""
        rt.close_group(self)


class Wait(HostOp):
    """Makes the current stream wait for the communication with this number."""

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
        """The op in a sentence: `Wait 3`."""
        return f"Wait {self.number}"

    def effects(self) -> tuple[Effect, ...]:
        """Orders later work of the current stream after the communication."""
        return (Waits(self.number),)

    def emit(self, rt: Runtime) -> None:
        """Makes the current stream wait."""
        rt.wait(self.number)


class ShareMemHandles(HostOp):
    """Announces the buffers that peers copy from and to.

    The op does nothing in a run, which maps peers' memory at its first use.
    """

    buffers: tuple[TensorView, ...] = operands()
    TEXT = "ShareMemHandles({buffers})"

    def effects(self) -> tuple[Effect, ...]:
        """Returns no effects."""
        return ()

    def emit(self, rt: Runtime) -> None:
        """Does nothing: memory is mapped before the first copy out of it."""
