"""The host ops that move data between ranks, and the waits for them.

A communication starts where it stands, on the current stream, and uses its buffers until its Wait.
One numbering holds for all that can be waited for.
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

# What a program may name: nvFuser's libraries, and those that carry out runs here.
LIBRARIES = ("NCCL", "UCC", "MPI", "GLOO", "SIMULATED", PEER_COPIES)


def library_name(backend: str) -> str:
    """Returns what people call a library: peer copies also stand in CPU ranks, without CUDA."""
    return "peer copies" if backend.upper() == PEER_COPIES else backend.upper()


TransferKind = Literal["send", "recv"]
TRANSFER_KINDS: tuple[TransferKind, ...] = get_args(TransferKind)


@dataclass(frozen=True)
class AxisOrder:
    """The order of a shard in memory: its axes, outermost first (None: as they are), and those
    that are expanded, of which memory holds one element."""

    axes: tuple[int, ...] | None
    expanded: tuple[int, ...]

    @staticmethod
    def of(tv: TensorView) -> AxisOrder:
        """Returns the order that the allocation domain declares."""
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

    @property
    def buffer_sharing(self) -> BufferSharing:
        return "never"

    def verify_in(self, program: ProgramAround) -> None:
        if self.number in program.twice:
            raise VerifyError(f"there are two communications {self.number}")


def _check_team(team: TeamOf, program: ProgramAround) -> None:
    """Requires that the members of a team are in the meshes of the tensors."""
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
    """Returns the value of a root or peer; None for one that is known only in a run.

    Raises `VerifyError` for a scalar that is no integer.
    """
    if not sc.is_int(position):
        raise VerifyError(
            f"{op.name}: {field}={position} is no integer, but a {position.dtype.name}"
        )
    return sc.int_value(position)


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
    def collective(self) -> Collective:
        """All facts about its type."""
        return COLLECTIVES[self.type]

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
        row = self.collective
        reads, writes = self._members(row.inp), self._members(row.out)
        return (Reads(self.inp, reads), Writes(self.out, writes), Starts(self.number))

    def emit(self, rt: Runtime) -> None:
        team = self.team.ranks(rt.rank)
        if team:
            root = -1 if self.root is None else member(team, rt.integer(self.root), self)
            rt.post(self, team, root)

    @property
    def buffer_sharing(self) -> BufferSharing:
        return self.collective.sharing

    @cached_property
    def movement(self) -> Movement:
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
        super().verify_in(program)
        _check_team(self.team, program)

    def _members(self, side: Side) -> Members:
        """Returns whose operand is read, or result is written."""
        return Members(self.team, self.root if side.at_root else None)

    def verify(self) -> None:
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
    """Returns the global rank at a position of a team; raises `ExecutionError` outside."""
    if not 0 <= position < len(team):
        raise ExecutionError(
            f"{op.name}: position {position} in a team of {len(team)}{user_code(op.where)}"
        )
    return team[position]


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

    @cached_property
    def movement(self) -> Movement:
        ends = (self.buffer, None) if self.type == "send" else (None, self.buffer)
        return Movement(self.type, *ends, None, self.backend, peers={"peer": self.peer})

    def emit(self, rt: Runtime) -> None:
        peer = rt.integer(self.peer)
        if peer not in rt.team:
            raise ExecutionError(
                f"{self.name}: peer {self.peer} = {peer} of {self.buffer}, but the program is on "
                f"ranks {team_text(rt.team)}{user_code(self.where)}"
            )
        rt.transfer(self, peer)

    def verify(self) -> None:
        if self.buffer.mesh is None:
            raise VerifyError(f"{self.name}: {self.buffer} has no mesh")
        peer = _constant(self, "peer", self.peer)
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

    @cached_property
    def movement(self) -> Movement:
        peers = {"send_peer": self.send_peer, "recv_peer": self.recv_peer}
        kind = type(self).__name__
        return Movement(kind, self.inp, self.out, self.team, self.backend, peers=peers)

    def emit(self, rt: Runtime) -> None:
        team = self.team.ranks(rt.rank)
        if team:
            to, source = (
                member(team, rt.integer(peer), self) for peer in (self.send_peer, self.recv_peer)
            )
            rt.permute(self, team, to, source)

    def verify_in(self, program: ProgramAround) -> None:
        super().verify_in(program)
        _check_team(self.team, program)

    def verify(self) -> None:
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
    """The sends and receives up to `EndCoalescing` start together, so that a ring cannot block."""

    TEXT = "StartCoalescing"

    def effects(self) -> tuple[Effect, ...]:
        return (OpensGroup(),)

    def emit(self, rt: Runtime) -> None:
        rt.open_group(self)


class EndCoalescing(StartsCommunication):
    """Starts the sends and receives since `StartCoalescing`; one Wait is for all of them."""

    number: int = attr(kw_only=False)
    TEXT = "EndCoalescing {number}"

    @property
    def name(self) -> str:
        return f"EndCoalescing {self.number}"

    def effects(self) -> tuple[Effect, ...]:
        return (ClosesGroup(self.number),)

    def emit(self, rt: Runtime) -> None:
        rt.close_group(self)


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

    def emit(self, rt: Runtime) -> None:
        rt.wait(self.number)


class ShareMemHandles(HostOp):
    """Announces which buffers peers copy from and to; a run maps memory where it is first needed,
    so there is nothing left to be done.
    """

    buffers: tuple[TensorView, ...] = operands()
    TEXT = "ShareMemHandles({buffers})"

    def effects(self) -> tuple[Effect, ...]:
        return ()

    def emit(self, rt: Runtime) -> None:
        """There is nothing to do: memory is mapped where it is first copied from."""
