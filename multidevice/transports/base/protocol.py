"""The protocol of communication backends.

A team is an ordered tuple of global ranks; roots and peers are global ranks too. All tensors are
contiguous. Part `i` of a buffer with `len(team)` equal parts belongs to `team[i]`. A call enters a
collective that every member of the team must enter, in the same order; it returns at once with a
`Work`, and the buffers belong to the backend until `Work.wait()` has returned.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, Literal, Protocol
from weakref import WeakSet

from multidevice.coordination.bounded_wait import Calls, Ledger, Team
from multidevice.transports.base.collectives import (
    ALL_TO_ALL,
    ALLGATHER,
    ALLREDUCE,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    Collective,
)

if TYPE_CHECKING:
    import torch

RedOp = Literal["SUM", "PRODUCT", "MIN", "MAX", "AVG"]
RED_OPS: tuple[RedOp, ...] = ("SUM", "PRODUCT", "MIN", "MAX", "AVG")


class Work(Protocol):
    """A communication that was started."""

    def wait(self) -> None:
        """Returns when later work may use the buffers: on CPU the data is there; on CUDA the
        order is the stream's.

        Raises:
            CommunicationTimeout: the deadline passed.
            PeerError: a peer failed, or left before it entered this communication.
        """
        ...

    def synchronize(self) -> None:
        """Returns when the data is there, seen from the host; same errors as `wait`."""
        ...


# Starts a collective on the buffers at these addresses, of output and input (0: none), on a stream
# (a raw handle).
Post = Callable[[int, int, int], Work]


# Starts a batch of transfers on the tensors at these addresses, in order, on a stream.
PostBatch = Callable[[Sequence[int], int], Work]


@dataclass(frozen=True)
class Transfer:
    """One half of a point-to-point copy: `kind` is "send" to or "recv" from the global rank
    `peer`. Halves meet in the order in which they are started; where simulated ranks start them
    later than the program says, `order` counts in the program's.
    """

    kind: Literal["send", "recv"]
    tensor: torch.Tensor
    peer: int
    order: int | None = None


class NamedCollectives(Protocol):
    """The collectives by name, for callers who write them by hand."""

    @abstractmethod
    def collective(
        self,
        row: Collective,
        out: torch.Tensor | None,
        inp: torch.Tensor | None,
        *,
        team: Team,
        reduce: RedOp | None = None,
        root: int | None = None,
        stream: object = None,
    ) -> Work:
        """Starts a collective. A buffer that the row has on the root alone is ignored elsewhere.

        `reduce` is given for rows that reduce, `root` for those that have a root.
        """
        ...

    def allgather(
        self, out: torch.Tensor, inp: torch.Tensor, *, team: Team, stream: object = None
    ) -> Work:
        """Writes the parts `inp` of all members, in team order, to `out` [n parts]."""
        return self.collective(ALLGATHER, out, inp, team=team, stream=stream)

    def allreduce(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        *,
        op: RedOp,
        team: Team,
        stream: object = None,
    ) -> Work:
        """Writes the elementwise reduction of all `inp` to `out` on every member; may be in
        place.
        """
        return self.collective(ALLREDUCE, out, inp, team=team, reduce=op, stream=stream)

    def reduce_scatter(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        *,
        op: RedOp,
        team: Team,
        stream: object = None,
    ) -> Work:
        """Writes this member's part of the reduction of all `inp` [n parts] to `out`."""
        return self.collective(REDUCE_SCATTER, out, inp, team=team, reduce=op, stream=stream)

    def broadcast(self, buf: torch.Tensor, *, root: int, team: Team, stream: object = None) -> Work:
        """Overwrites `buf` on every member with the root's."""
        return self.collective(BROADCAST, buf, buf, team=team, root=root, stream=stream)

    def gather(
        self,
        out: torch.Tensor | None,
        inp: torch.Tensor,
        *,
        root: int,
        team: Team,
        stream: object = None,
    ) -> Work:
        """Writes the parts `inp` of all members to `out` [n parts] on the root; `out` is None
        elsewhere.
        """
        return self.collective(GATHER, out, inp, team=team, root=root, stream=stream)

    def scatter(
        self,
        out: torch.Tensor,
        inp: torch.Tensor | None,
        *,
        root: int,
        team: Team,
        stream: object = None,
    ) -> Work:
        """Writes part i of the root's `inp` [n parts] to `out` on member i; `inp` is None
        elsewhere.
        """
        return self.collective(SCATTER, out, inp, team=team, root=root, stream=stream)

    def reduce(
        self,
        out: torch.Tensor | None,
        inp: torch.Tensor,
        *,
        op: RedOp,
        root: int,
        team: Team,
        stream: object = None,
    ) -> Work:
        """Writes the reduction of all `inp` to `out` on the root; `out` is ignored elsewhere."""
        return self.collective(REDUCE, out, inp, team=team, reduce=op, root=root, stream=stream)

    def alltoall(
        self, out: torch.Tensor, inp: torch.Tensor, *, team: Team, stream: object = None
    ) -> Work:
        """Writes part i of member j's `inp` to part j of member i's `out`; all parts have one
        size.
        """
        return self.collective(ALL_TO_ALL, out, inp, team=team, stream=stream)


class Backend(NamedCollectives, Protocol):
    """Collectives and point-to-point copies among the ranks of a team.

    `where` is the user's line of what is communicated next, for errors.
    """

    where: str
    generation: int

    def can_capture(self, what: str) -> bool:
        """See `multidevice/transports/base/protocol.py`, as for the next five."""
        ...

    def capturing(self, stream: int) -> AbstractContextManager[list[object]]: ...

    def flush(self) -> None: ...

    def noting(self) -> AbstractContextManager[Counter[Calls]]: ...

    def enter_again(self, calls: Counter[Calls], sign: int = 1) -> None: ...

    def repeated_by(self, repeats: Repeats) -> None: ...

    @property
    def name(self) -> str:
        """The backend's short name: mpi, gloo, nccl, simulated."""
        ...

    def send(self, buf: torch.Tensor, *, peer: int, team: Team, stream: object = None) -> Work:
        """Sends `buf` to the member `peer`, which must post a matching `recv`."""
        ...

    def recv(self, buf: torch.Tensor, *, peer: int, team: Team, stream: object = None) -> Work:
        """Receives `buf` from the member `peer`."""
        ...

    def batch(self, transfers: Sequence[Transfer], *, team: Team, stream: object = None) -> Work:
        """Starts all transfers at once, so that a ring of sends and receives cannot block."""
        ...

    def barrier(self, *, team: Team, stream: object = None) -> None:
        """Returns when every member has entered the barrier and, on CUDA, the stream has reached
        it.
        """
        ...

    def bind(
        self,
        row: Collective,
        out: torch.Tensor | None,
        inp: torch.Tensor | None,
        *,
        team: Team,
        reduce: RedOp | None = None,
        root: int | None = None,
    ) -> Post | None:
        """Checks a collective that this rank has entered before, once for all buffers of these
        dtypes and sizes, and returns how to start it; None where each call has to be checked.
        """
        ...

    def bind_batch(self, transfers: Sequence[Transfer], *, team: Team) -> PostBatch | None:
        """Checks a batch that this rank has entered before, once for all tensors of these dtypes
        and sizes, and returns how to start it; None where each one has to be checked.
        """
        ...

    def drain(self) -> None:
        """Returns when the device has done all communications, or when that is hopeless."""
        ...

    def close(self) -> None:
        """Releases what the backend holds; later calls are errors."""
        ...


# How memory is named to peers (`mapped.name_of_piece`), in 8-byte words.
NAME_WORDS = 5


class PeerMemory(Backend, Protocol):
    """A backend whose members copy out of each other's memory."""

    def connect(self, team: Team) -> None:
        """Lets the members of a team find each other; collective over it at its first use.

        Raises `UnsupportedError` where they cannot map each other's memory.
        """
        ...

    def vote(self, team: Team, kind: int) -> tuple[int, ...] | None:
        """See `multidevice/transports/base/protocol.py`, as for the next two."""
        ...

    def start_over(self, team: Team) -> None: ...

    def take_back(self, team: Team) -> None: ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """Returns memory that peers can map, as uint8: what lies there is sent without a copy."""
        ...

    def lasting(self, nbytes: int) -> torch.Tensor:
        """Returns such memory for many runs of a program: it goes back to the system soon after
        nobody holds it (`release`)."""
        ...

    def shard(self, nbytes: int) -> torch.Tensor:
        """Returns such memory for a shard that is shown with those of others (`side_by_side`)."""
        ...

    def release(self) -> None:
        """Notes that a program has gone: memory that only it had is given back at the next run, on
        this rank alone. Finalizers may call it."""
        ...

    def tidy(self) -> None:
        """Gives back what nobody holds. Called at the beginning of a run: all that this rank began
        before is complete on its part, whatever the device has still to do."""
        ...

    def side_by_side(self, tensor: torch.Tensor, team: Team, what: str) -> torch.Tensor:
        """Returns the bytes of this dense tensor and of those of the other members, one behind the
        other in team order, as memory that may be read; it returns when all members have come.

        `what` names the call. Raises `UnsupportedError` where their memory cannot be mapped so, and
        `CommunicationError` where members bring something else; on all members.
        """
        ...

    def rendezvous(self, team: Team, what: str) -> None:
        """Returns when all members of a team have come."""
        ...


# ----------------------------------------------------------------------
# What a graph that repeats communications must know of their backend.

# What ranks say of a run that graphs repeat on all of them or on none (`Captured.vote`): "step by
# step", and "I have not captured it". What they have captured has numbers from FIRST_GRAPH on;
# between lies what `multidevice/coordination/control_channel.py` keeps for itself.
STEP_BY_STEP, NOT_CAPTURED, FIRST_GRAPH = 0, 2, 3


@dataclass(frozen=True)
class Vote:
    """The agreement of a team's ranks on how each run of a program is carried out."""

    voters: Callable[[], PeerMemory]
    team: Team

    def ask(self, kind: int) -> tuple[int, ...] | None:
        """See `Captured.vote`; collective over the team."""
        voters = self.voters()
        voters.connect(self.team)
        return voters.vote(self.team, kind)

    def start_over(self) -> None:
        """See `Captured.start_over`; collective over the team."""
        self.voters().start_over(self.team)

    def take_back(self) -> None:
        """See `Captured.take_back`."""
        self.voters().take_back(self.team)


class Repeats(Protocol):
    """An owner of graphs."""

    def forget(self) -> None:
        """Drops them."""
        ...


class Captured:
    """The part of a backend that graphs ask; by itself, nothing can be captured.

    `generation` counts how often communicators were given up: what was captured before is void.
    """

    _ledger: Ledger
    generation = 0
    _repeats: WeakSet[Repeats] | None = None

    def repeated_by(self, repeats: Repeats) -> None:
        """Notes who keeps graphs of this backend's communications."""
        self._repeats = self._repeats or WeakSet()
        self._repeats.add(repeats)

    def make_void(self) -> None:
        """Has all graphs dropped, before communicators go: NCCL's wait for graphs that hold them,
        for ever."""
        self.generation += 1
        for repeats in list(self._repeats or ()):
            repeats.forget()

    def can_capture(self, what: str) -> bool:
        """Returns whether a stream alone carries out a communication of this name, once posted, so
        that a graph may repeat it."""
        del what
        return False

    def vote(self, team: Team, kind: int) -> tuple[int, ...] | None:
        """Tells the members of a team what this rank would do in a run; returns what each one
        would, in team order. None where each may go its own way: where a graph of one rank goes
        together with the steps of another."""
        del team, kind
        return None

    def capturing(self, stream: int) -> AbstractContextManager[list[object]]:
        """Returns a context in which this rank captures a run that `stream` will repeat; it has
        what has to be kept for as long as the graph."""
        del stream
        return nullcontext([])

    def flush(self) -> None:
        """Enqueues what was put off in a capture, to go together with what might have followed."""

    def start_over(self, team: Team) -> None:
        """Makes up for a capture that members of a team have begun and not ended; collective."""
        del team

    def take_back(self, team: Team) -> None:
        """Makes the ranks of a team find, in their next exchange of run signatures, that this rank
        did not repeat a run that the others repeated: the graphs that they captured together become
        invalid.
        """
        del team

    @contextmanager
    def noting(self) -> Generator[Counter[Calls]]:
        """A context that counts the calls that this thread enters in it, per stream of calls."""
        noted = self._ledger.noted[get_ident()] = Counter[Calls]()
        try:
            yield noted
        finally:
            del self._ledger.noted[get_ident()]

    def enter_again(self, calls: Counter[Calls], sign: int = 1) -> None:
        """Counts calls that a graph repeats; with sign -1, those that were not made after all."""
        entered = self._ledger.entered
        for key, count in calls.items():
            entered[key] = entered.get(key, 0) + sign * count
