"""The protocol of communication backends.

A team is an ordered tuple of global ranks. Roots and peers are global ranks, too. All tensors are
contiguous. A buffer may have `len(team)` equal parts; part `i` belongs to the rank `team[i]`.

A call enters a collective. Every member of the team must enter the same collectives in the same
order. The call returns at once with a `Work`. The backend uses the buffers until `Work.wait()` has
returned.
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
    """A communication that a rank has started."""

    def wait(self) -> None:
        """Returns when later work may use the buffers.

        On the CPU, the data has arrived when `wait` returns. On CUDA, the stream runs later work
        after the communication.

        Raises:
            CommunicationTimeout: the deadline passed.
            PeerError: a peer failed, or left before it entered this communication.
        """
        ...

    def synchronize(self) -> None:
        """Blocks the host until the data has arrived; raises the same errors as `wait`."""
        ...


# Starts a collective. Arguments: the addresses of output and input (0: none), and the stream (a raw
# handle).
Post = Callable[[int, int, int], Work]


# Starts a batch of transfers. Arguments: the addresses of the tensors, in order, and the stream.
PostBatch = Callable[[Sequence[int], int], Work]


@dataclass(frozen=True)
class Transfer:
    """One half of a point-to-point copy: a send to, or a receive from, the global rank `peer`.

    Sends and receives are matched in the order in which they are started. If simulated ranks start
    transfers later than the program says, `order` is the position of the transfer in the program.
    """

    kind: Literal["send", "recv"]
    tensor: torch.Tensor
    peer: int
    order: int | None = None


class NamedCollectives(Protocol):
    """One method per collective, for callers who write collectives by hand."""

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
        """Starts the collective that `row` describes.

        Some buffers are needed on the root only: other members may pass anything for them. `reduce`
        is passed if the collective reduces, `root` if the collective has a root.
        """
        ...

    def allgather(
        self, out: torch.Tensor, inp: torch.Tensor, *, team: Team, stream: object = None
    ) -> Work:
        """Concatenates the `inp` of all members, in team order, in `out` on every member."""
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
        """Writes the elementwise reduction of all members' `inp` to `out` on every member.

        `out` and `inp` may be the same tensor.
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
        """Reduces the `inp` of all members elementwise, and writes one part of the result to `out`.

        `inp` has one part per member, in team order. Member i receives part i.
        """
        return self.collective(REDUCE_SCATTER, out, inp, team=team, reduce=op, stream=stream)

    def broadcast(self, buf: torch.Tensor, *, root: int, team: Team, stream: object = None) -> Work:
        """Overwrites `buf` on every member with the contents of the root's `buf`."""
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
        """Concatenates the `inp` of all members, in team order, in `out` on the root.

        Other members pass None for `out`.
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
        """Divides the root's `inp` into one part per member, and writes part i to `out` on member
        i.

        Other members pass None for `inp`.
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
        """Writes the elementwise reduction of all members' `inp` to `out` on the root.

        `out` is ignored on other members.
        """
        return self.collective(REDUCE, out, inp, team=team, reduce=op, root=root, stream=stream)

    def alltoall(
        self, out: torch.Tensor, inp: torch.Tensor, *, team: Team, stream: object = None
    ) -> Work:
        """Writes part i of member j's `inp` to part j of member i's `out`.

        `inp` and `out` have one part per member. All parts have the same size.
        """
        return self.collective(ALL_TO_ALL, out, inp, team=team, stream=stream)


class Backend(NamedCollectives, Protocol):
    """Collectives and point-to-point copies among the ranks of a team.

    - `where`: the user's line of the next communication, for error messages.
    - `generation`: how often communicators were dropped (see `Captured`).
    """

    where: str
    generation: int

    def can_capture(self, what: str) -> bool:
        """Same as `Captured.can_capture`: whether a CUDA graph may repeat communication `what`."""
        ...

    def capturing(self, stream: int) -> AbstractContextManager[list[object]]:
        """Same as `Captured.capturing`: returns the context in which a CUDA graph is captured."""
        ...

    def flush(self) -> None:
        """Same as `Captured.flush`: enqueues the flag writes that a capture has delayed."""
        ...

    def noting(self) -> AbstractContextManager[Counter[Calls]]:
        """Same as `Captured.noting`: returns a context that counts the calls of this thread."""
        ...

    def enter_again(self, calls: Counter[Calls], sign: int = 1) -> None:
        """Same as `Captured.enter_again`: counts the calls that a CUDA graph repeats."""
        ...

    def repeated_by(self, repeats: Repeats) -> None:
        """Same as `Captured.repeated_by`: registers an owner of CUDA graphs."""
        ...

    @property
    def name(self) -> str:
        """The backend's short name: mpi, gloo, nccl, cuda or simulated."""
        ...

    def send(self, buf: torch.Tensor, *, peer: int, team: Team, stream: object = None) -> Work:
        """Sends `buf` to the member `peer`, which must start a matching `recv`."""
        ...

    def recv(self, buf: torch.Tensor, *, peer: int, team: Team, stream: object = None) -> Work:
        """Receives data from the member `peer` into `buf`."""
        ...

    def batch(self, transfers: Sequence[Transfer], *, team: Team, stream: object = None) -> Work:
        """Starts all transfers at once, so that a ring of sends and receives cannot deadlock."""
        ...

    def barrier(self, *, team: Team, stream: object = None) -> None:
        """Returns when every member has entered the barrier.

        On CUDA, all work that `stream` had before the barrier is complete, too.
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
        """Checks a collective that this rank has entered before; returns a function that starts it.

        The returned function accepts all buffers with the dtypes and sizes of `out` and `inp`.
        Returns None if every call must be checked anew.
        """
        ...

    def bind_batch(self, transfers: Sequence[Transfer], *, team: Team) -> PostBatch | None:
        """Checks a batch that this rank has entered before; returns a function that starts it.

        The returned function accepts all tensors with the dtypes and sizes of those in `transfers`.
        Returns None if every batch must be checked anew.
        """
        ...

    def drain(self) -> None:
        """Returns when the device has completed all communications, or cannot complete them any
        more.
        """
        ...

    def close(self) -> None:
        """Releases the backend's resources; later calls raise an error."""
        ...


# The size of the name of shared memory (`handles.name_of_piece`), in 8-byte words.
NAME_WORDS = 5


class PeerMemory(Backend, Protocol):
    """A backend whose members copy out of each other's mapped memory."""

    def connect(self, team: Team) -> None:
        """Connects the members of a team, so that they can copy from each other's memory.

        The first call for a team is collective over the team. Raises `UnsupportedError` if the
        members cannot map each other's memory.
        """
        ...

    def vote(self, team: Team, kind: int) -> tuple[int, ...] | None:
        """Same as `Captured.vote`: exchanges the members' votes on how to execute a run."""
        ...

    def start_over(self, team: Team) -> None:
        """Same as `Captured.start_over`: cleans up after an unfinished capture of a CUDA graph."""
        ...

    def take_back(self, team: Team) -> None:
        """Same as `Captured.take_back`: makes other members drop graphs captured together."""
        ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocates memory that peers can map, as a uint8 tensor.

        The contents of such memory are sent without a copy on the sender's side.
        """
        ...

    def lasting(self, nbytes: int) -> torch.Tensor:
        """Allocates memory that peers can map, for many runs of a program.

        The memory is returned to the system soon after its last user has dropped it (see
        `release`).
        """
        ...

    def shard(self, nbytes: int) -> torch.Tensor:
        """Allocates memory for a shard, which peers can map and `side_by_side` can concatenate."""
        ...

    def release(self) -> None:
        """Records that a program was deleted.

        The next run frees the memory that only this program used, without communicating with other
        ranks. Finalizers may call this method, because it frees nothing itself.
        """
        ...

    def tidy(self) -> None:
        """Frees memory that has no user; called at the beginning of a run.

        All communications that this rank began before are complete on its part, except for the work
        that is still on the device.
        """
        ...

    def side_by_side(self, tensor: torch.Tensor, team: Team, what: str) -> torch.Tensor:
        """Maps the shards of all members as one range of memory, in team order, for reading.

        `tensor` is this member's shard and must be dense. `what` names the call. Returns when all
        members have made the call.

        Raises, on all members:
            UnsupportedError: the members' memory cannot be mapped as one range.
            CommunicationError: the members make different calls.
        """
        ...

    def rendezvous(self, team: Team, what: str) -> None:
        """Blocks until all members of a team have made the call that `what` names."""
        ...


# ----------------------------------------------------------------------
# The part of a backend that CUDA graphs use which repeat its communications.

# The votes of ranks on a run that graphs repeat on all of them or on none (`Captured.vote`): "run
# the steps", and "I have not captured a graph". Captured graphs have numbers from FIRST_GRAPH on.
# The number between is GAVE_UP of `multidevice/coordination/control_channel.py`.
STEP_BY_STEP, NOT_CAPTURED, FIRST_GRAPH = 0, 2, 3


@dataclass(frozen=True)
class Vote:
    """The vote of a team's ranks on how a run is executed: step by step or by a CUDA graph.

    `voters` returns the backend over which the ranks exchange their votes.
    """

    voters: Callable[[], PeerMemory]
    team: Team

    def ask(self, kind: int) -> tuple[int, ...] | None:
        """Connects the team and exchanges the votes of its members, as `Captured.vote`.

        `kind` is this rank's vote. Collective over the team.
        """
        voters = self.voters()
        voters.connect(self.team)
        return voters.vote(self.team, kind)

    def start_over(self) -> None:
        """Cleans up after an unfinished capture, as `Captured.start_over`; collective over the
        team.
        """
        self.voters().start_over(self.team)

    def take_back(self) -> None:
        """Makes the other members drop the graphs captured together, as `Captured.take_back`."""
        self.voters().take_back(self.team)


class Repeats(Protocol):
    """An owner of captured CUDA graphs."""

    def forget(self) -> None:
        """Drops all graphs of this owner."""
        ...


class Captured:
    """The methods of a backend that CUDA graphs use; this base class allows no capture.

    `generation` counts how often communicators were dropped. A graph that was captured under a
    smaller number is invalid.
    """

    _ledger: Ledger
    generation = 0
    _repeats: WeakSet[Repeats] | None = None

    def repeated_by(self, repeats: Repeats) -> None:
        """Registers an owner of CUDA graphs that contain this backend's communications."""
        self._repeats = self._repeats or WeakSet()
        self._repeats.add(repeats)

    def make_void(self) -> None:
        """Drops all CUDA graphs that contain this backend's communications.

        Called before communicators are freed, because NCCL would wait forever for graphs that use
        them.
        """
        self.generation += 1
        for repeats in list(self._repeats or ()):
            repeats.forget()

    def can_capture(self, what: str) -> bool:
        """Whether a CUDA graph may repeat the communication that `what` names.

        A graph may repeat a communication that needs nothing from the host once it is enqueued.
        This base class returns False.
        """
        del what
        return False

    def vote(self, team: Team, kind: int) -> tuple[int, ...] | None:
        """Sends this rank's vote on a run to the members of a team; returns all votes, in team
        order.

        `kind` is the vote: STEP_BY_STEP, NOT_CAPTURED or the number of a graph. Returns None if
        ranks need not agree, because one rank may launch a graph while another runs the recorded
        steps.
        """
        del team, kind
        return None

    def capturing(self, stream: int) -> AbstractContextManager[list[object]]:
        """Returns a context in which this rank captures a CUDA graph, which `stream` will launch
        later.

        The value of the context is a list of objects that must live as long as the graph.
        """
        del stream
        return nullcontext([])

    def flush(self) -> None:
        """Enqueues the work that a capture has delayed to combine it with later work."""

    def start_over(self, team: Team) -> None:
        """Cleans up after a capture that members of a team have begun and not ended.

        Collective over the team.
        """
        del team

    def take_back(self, team: Team) -> None:
        """Makes the ranks of a team drop the CUDA graphs that they captured together.

        The next exchange of run signatures shows the other ranks that this rank did not repeat a
        run which they repeated.
        """
        del team

    @contextmanager
    def noting(self) -> Generator[Counter[Calls]]:
        """Returns a context whose value counts the calls that this thread enters inside the
        context.

        The counts are separate for each sequence of calls (`Calls`).
        """
        noted = self._ledger.noted[get_ident()] = Counter[Calls]()
        try:
            yield noted
        finally:
            del self._ledger.noted[get_ident()]

    def enter_again(self, calls: Counter[Calls], sign: int = 1) -> None:
        """Counts `calls` as entered because a CUDA graph repeats them.

        With `sign` -1, subtracts calls that were counted before but not made.
        """
        entered = self._ledger.entered
        for key, count in calls.items():
            entered[key] = entered.get(key, 0) + sign * count
