"""The protocol of communication backends.

A team is an ordered tuple of global ranks; roots and peers are global ranks too. All tensors are
contiguous. A buffer may have `len(team)` equal parts; part `i` belongs to `team[i]`.

A call enters a collective, which every member of the team must enter, in the same order. It returns
at once with a `Work`. The backend uses the buffers until `Work.wait()` has returned.
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
        """Returns when later work may use the buffers.

        On CPU the data has arrived then; on CUDA the stream orders later work after it.

        Raises:
            CommunicationTimeout: the deadline passed.
            PeerError: a peer failed, or left before it entered this communication.
        """
        ...

    def synchronize(self) -> None:
        """Returns when the data has arrived, as seen from the host; raises the same errors as
        `wait`.
        """
        ...


# Starts a collective. Arguments: the addresses of output and input (0: none), and the stream (a raw
# handle).
Post = Callable[[int, int, int], Work]


# Starts a batch of transfers. Arguments: the addresses of the tensors, in order, and the stream.
PostBatch = Callable[[Sequence[int], int], Work]


@dataclass(frozen=True)
class Transfer:
    """One half of a point-to-point copy: `kind` is "send" to or "recv" from the global rank `peer`.

    Sends and receives are matched in the order in which they are started. If simulated ranks start
    them later than the program says, `order` is their position in the program.
    """

    kind: Literal["send", "recv"]
    tensor: torch.Tensor
    peer: int
    order: int | None = None


class NamedCollectives(Protocol):
    """The collectives as methods, for callers who write them by hand."""

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

        `reduce` is passed for rows that reduce, `root` for those that have a root.
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
        """Writes the elementwise reduction of all `inp` to `out` on every member; both may be one
        tensor.
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
        """Writes part i of member j's `inp` to part j of member i's `out`; all parts have the same
        size.
        """
        return self.collective(ALL_TO_ALL, out, inp, team=team, stream=stream)


class Backend(NamedCollectives, Protocol):
    """Collectives and point-to-point copies among the ranks of a team.

    `where` is the user's line of the next communication, for errors. `generation`: see `Captured`.
    """

    where: str
    generation: int

    def can_capture(self, what: str) -> bool:
        """Same as `Captured.can_capture`: whether a graph may repeat a communication."""
        ...

    def capturing(self, stream: int) -> AbstractContextManager[list[object]]:
        """Same as `Captured.capturing`: returns the context of a capture."""
        ...

    def flush(self) -> None:
        """Same as `Captured.flush`: enqueues delayed flag writes."""
        ...

    def noting(self) -> AbstractContextManager[Counter[Calls]]:
        """Same as `Captured.noting`: counts the calls of this thread."""
        ...

    def enter_again(self, calls: Counter[Calls], sign: int = 1) -> None:
        """Same as `Captured.enter_again`: counts calls that a graph repeats."""
        ...

    def repeated_by(self, repeats: Repeats) -> None:
        """Same as `Captured.repeated_by`: registers an owner of graphs."""
        ...

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
        """Checks a collective that this rank has entered before, and returns a function that starts
        it.

        The function works on all buffers with the dtypes and sizes of the arguments. Returns None
        where each call must be checked.
        """
        ...

    def bind_batch(self, transfers: Sequence[Transfer], *, team: Team) -> PostBatch | None:
        """Checks a batch that this rank has entered before, and returns a function that starts it.

        The function works on all tensors with the dtypes and sizes of the arguments. Returns None
        where each batch must be checked.
        """
        ...

    def drain(self) -> None:
        """Returns when the device has done all communications, or when it can no longer complete
        them.
        """
        ...

    def close(self) -> None:
        """Releases the backend's resources; later calls are errors."""
        ...


# The size of the name of shared memory (`handles.name_of_piece`), in 8-byte words.
NAME_WORDS = 5


class PeerMemory(Backend, Protocol):
    """A backend whose members copy out of each other's memory."""

    def connect(self, team: Team) -> None:
        """Connects the members of a team; collective over it at its first use.

        Raises `UnsupportedError` where they cannot map each other's memory.
        """
        ...

    def vote(self, team: Team, kind: int) -> tuple[int, ...] | None:
        """Same as `Captured.vote`: exchanges the members' votes on a run."""
        ...

    def start_over(self, team: Team) -> None:
        """Same as `Captured.start_over`: cleans up after an unfinished capture."""
        ...

    def take_back(self, team: Team) -> None:
        """Same as `Captured.take_back`: makes the others drop graphs captured together."""
        ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """Returns memory that peers can map, as uint8: its contents are sent without a copy
        first.
        """
        ...

    def lasting(self, nbytes: int) -> torch.Tensor:
        """Returns memory that peers can map, for many runs of a program.

        It is returned to the system soon after its last user has dropped it (`release`).
        """
        ...

    def shard(self, nbytes: int) -> torch.Tensor:
        """Returns memory that peers can map, for a shard that `side_by_side` shows with
        others.
        """
        ...

    def release(self) -> None:
        """Records that a program was deleted. The next run frees, on this rank alone, memory that
        only this program used.

        Finalizers may call it.
        """
        ...

    def tidy(self) -> None:
        """Frees memory that has no user. Called at the beginning of a run.

        All communications that this rank began before are complete on its part, except for the work
        that is still on the device.
        """
        ...

    def side_by_side(self, tensor: torch.Tensor, team: Team, what: str) -> torch.Tensor:
        """Returns readable memory with the bytes of this tensor and of the other members', in team
        order.

        The tensor must be dense. Returns when all members have called it. `what` names the call.

        Raises, on all members:
            UnsupportedError: their memory cannot be mapped in this way.
            CommunicationError: the members make different calls.
        """
        ...

    def rendezvous(self, team: Team, what: str) -> None:
        """Returns when all members of a team have made the call `what`."""
        ...


# ----------------------------------------------------------------------
# The part of a backend that CUDA graphs use which repeat its communications.

# The votes of ranks on a run that graphs repeat on all of them or on none (`Captured.vote`): "run
# the steps", and "I have not captured a graph". Captured graphs have numbers from FIRST_GRAPH on.
# The number between is GAVE_UP of `multidevice/coordination/control_channel.py`.
STEP_BY_STEP, NOT_CAPTURED, FIRST_GRAPH = 0, 2, 3


@dataclass(frozen=True)
class Vote:
    """The vote of a team's ranks on how each run of a program is carried out: by steps or by a
    graph.
    """

    voters: Callable[[], PeerMemory]
    team: Team

    def ask(self, kind: int) -> tuple[int, ...] | None:
        """Same as `Captured.vote`; collective over the team."""
        voters = self.voters()
        voters.connect(self.team)
        return voters.vote(self.team, kind)

    def start_over(self) -> None:
        """Same as `Captured.start_over`; collective over the team."""
        self.voters().start_over(self.team)

    def take_back(self) -> None:
        """Same as `Captured.take_back`: makes the others drop graphs captured together."""
        self.voters().take_back(self.team)


class Repeats(Protocol):
    """An owner of captured graphs."""

    def forget(self) -> None:
        """Drops its graphs."""
        ...


class Captured:
    """The part of a backend that CUDA graphs use. In this base class, nothing can be captured.

    `generation` counts how often communicators were dropped: graphs captured before are invalid.
    """

    _ledger: Ledger
    generation = 0
    _repeats: WeakSet[Repeats] | None = None

    def repeated_by(self, repeats: Repeats) -> None:
        """Registers an owner of graphs that contain this backend's communications."""
        self._repeats = self._repeats or WeakSet()
        self._repeats.add(repeats)

    def make_void(self) -> None:
        """Drops all graphs, before communicators are freed: NCCL would wait forever for graphs that
        use them.
        """
        self.generation += 1
        for repeats in list(self._repeats or ()):
            repeats.forget()

    def can_capture(self, what: str) -> bool:
        """Returns whether a graph may repeat a communication of this name.

        That is so if the stream alone carries it out once it is posted.
        """
        del what
        return False

    def vote(self, team: Team, kind: int) -> tuple[int, ...] | None:
        """Sends this rank's vote on a run to the members of a team; returns the votes of all, in
        team order.

        Returns None where ranks need not agree: one rank may launch a graph while another runs the
        steps.
        """
        del team, kind
        return None

    def capturing(self, stream: int) -> AbstractContextManager[list[object]]:
        """Returns a context in which this rank captures a run that `stream` will repeat.

        The value of the context is a list of objects that must live as long as the graph.
        """
        del stream
        return nullcontext([])

    def flush(self) -> None:
        """Enqueues work that was delayed in a capture so that it could be combined with later
        work.
        """

    def start_over(self, team: Team) -> None:
        """Cleans up after a capture that members of a team have begun and not ended;
        collective.
        """
        del team

    def take_back(self, team: Team) -> None:
        """Makes the ranks of a team drop the graphs that they captured together.

        They find out in their next exchange of run signatures that this rank did not repeat a run
        which the others repeated.
        """
        del team

    @contextmanager
    def noting(self) -> Generator[Counter[Calls]]:
        """Returns a context that counts the calls that this thread enters in it, per sequence of
        calls.
        """
        noted = self._ledger.noted[get_ident()] = Counter[Calls]()
        try:
            yield noted
        finally:
            del self._ledger.noted[get_ident()]

    def enter_again(self, calls: Counter[Calls], sign: int = 1) -> None:
        """Counts the calls that a graph repeats; with sign -1, uncounts those that were not
        made.
        """
        entered = self._ledger.entered
        for key, count in calls.items():
            entered[key] = entered.get(key, 0) + sign * count
