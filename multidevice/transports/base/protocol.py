"""The interface of communication backends (MPI, gloo, NCCL, peer copies, simulated ranks).

A backend moves tensors between the processes (ranks) of a job. A team is an ordered tuple of global
ranks: the processes that communicate. Roots and peers are global ranks, too. All tensors are
contiguous. A buffer may have `len(team)` equal parts; part `i` belongs to the rank `team[i]`.

Every member of the team must call the same collectives in the same order. A call returns at once
with a `Work` handle. The backend uses the buffers until `wait()` of the handle has returned.
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
    """The handle of a communication that this rank has started."""

    def wait(self) -> None:
        """Returns when later work may use the buffers of the communication.

        On the CPU, the data has arrived when `wait` returns. On CUDA, `wait` does not block the
        host: later work of the current stream runs after the communication.

        Raises:
            CommunicationTimeout: the deadline passed.
            PeerError: another rank failed, or left the job before it entered this communication.
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

    Two ranks match their sends and receives in the order in which the transfers are started.
    Simulated ranks may start transfers later than the host program says. In that case, `order` is
    the position of the transfer in the program; otherwise it is None.
    """

    kind: Literal["send", "recv"]
    tensor: torch.Tensor
    peer: int
    order: int | None = None


class NamedCollectives(Protocol):
    """One method per collective (allgather, allreduce, ..), for callers who write collectives by
    hand.

    All ranks of a team call the same method. `team` lists these ranks in order, and `stream` is the
    CUDA stream of the call (None for the current one).
    """

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
        """Starts the collective that `row`, an entry of the table of collectives, describes.

        - `out`, `inp`: the buffers. A buffer that only the root needs may be anything on other
          ranks.
        - `reduce`: the reduction, such as "SUM"; None if the collective does not reduce.
        - `root`: the root's global rank; None if the collective has no root.
        """
        ...

    def allgather(
        self, out: torch.Tensor, inp: torch.Tensor, *, team: Team, stream: object = None
    ) -> Work:
        """Concatenates the `inp` of all ranks of the team, in team order, in `out` on every
        rank.
        """
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
        """Writes the elementwise reduction of all ranks' `inp` to `out` on every rank of the team.

        `op` is the reduction, such as "SUM". `out` and `inp` may be the same tensor.
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
        """Reduces the `inp` of all ranks elementwise, and stores one part of the result on each
        rank.

        `op` is the reduction, such as "SUM". `inp` has one part per rank, in the order of `team`.
        The i-th rank receives part i in `out`.
        """
        return self.collective(REDUCE_SCATTER, out, inp, team=team, reduce=op, stream=stream)

    def broadcast(self, buf: torch.Tensor, *, root: int, team: Team, stream: object = None) -> Work:
        """Overwrites `buf` on every rank of the team with the contents of `buf` on the rank
        `root`.
        """
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
        """Concatenates the `inp` of all ranks of the team, in team order, in `out` on the rank
        `root`.

        Other ranks pass None for `out`.
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
        """Divides the `inp` of the rank `root` into one part per rank, and sends each rank its
        part.

        The i-th rank of the team receives part i in `out`. Other ranks than `root` pass None for
        `inp`.
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
        """Writes the elementwise reduction of all ranks' `inp` to `out` on the rank `root`.

        `op` is the reduction, such as "SUM". `out` is ignored on other ranks.
        """
        return self.collective(REDUCE, out, inp, team=team, reduce=op, root=root, stream=stream)

    def alltoall(
        self, out: torch.Tensor, inp: torch.Tensor, *, team: Team, stream: object = None
    ) -> Work:
        """Sends one part of `inp` to each rank of the team, and receives one part from each in
        `out`.

        Part i of the j-th rank's `inp` becomes part j of the i-th rank's `out`. All parts have the
        same size.
        """
        return self.collective(ALL_TO_ALL, out, inp, team=team, stream=stream)


class Backend(NamedCollectives, Protocol):
    """A communication backend: collectives and point-to-point copies among the ranks of a team.

    - `where`: the user's source line of the next communication, for error messages.
    - `generation`: how often the backend has dropped its communicators. A CUDA graph that was
      captured at a smaller number is invalid, because it uses dropped communicators (see
      `Captured`).
    """

    where: str
    generation: int

    def can_capture(self, what: str) -> bool:
        """Returns whether a CUDA graph may repeat the communication `what`, such as "barrier".

        This is allowed if the communication needs nothing from the host once it is enqueued.
        """
        ...

    def capturing(self, stream: int) -> AbstractContextManager[list[object]]:
        """Returns a context in which this rank captures its work as a CUDA graph.

        The graph is to be launched on `stream`. The value of the context is a list, to which the
        backend adds objects that the graph uses. The caller keeps the list as long as the graph.
        """
        ...

    def flush(self) -> None:
        """Enqueues the flag writes that a capture of a CUDA graph has delayed.

        A flag is a number in memory by which one GPU signals another one. Writes are delayed to
        combine them with later flag operations.
        """
        ...

    def noting(self) -> AbstractContextManager[Counter[Calls]]:
        """Returns a context that counts the communications that this thread starts inside it.

        A CUDA graph that is captured in the context repeats these communications; `enter_again`
        then counts them at each launch.
        """
        ...

    def enter_again(self, calls: Counter[Calls], sign: int = 1) -> None:
        """Adds the communications that a launched CUDA graph repeats to this rank's counts.

        Each rank counts the communications that it has entered, because ranks compare the counts to
        detect errors. `calls` has the counts of one launch. With `sign` -1, they are subtracted,
        for a capture that was given up.
        """
        ...

    def repeated_by(self, repeats: Repeats) -> None:
        """Registers `repeats`, an owner of CUDA graphs that contain communications of this backend.

        When the backend drops its communicators, it calls `repeats.forget`, which drops the graphs.
        """
        ...

    @property
    def name(self) -> str:
        """The backend's short name: mpi, gloo, nccl, cuda or simulated."""
        ...

    def send(self, buf: torch.Tensor, *, peer: int, team: Team, stream: object = None) -> Work:
        """Sends `buf` to the rank `peer` of the team, which must start a matching `recv`."""
        ...

    def recv(self, buf: torch.Tensor, *, peer: int, team: Team, stream: object = None) -> Work:
        """Receives data from the rank `peer` of the team into `buf`."""
        ...

    def batch(self, transfers: Sequence[Transfer], *, team: Team, stream: object = None) -> Work:
        """Starts several sends and receives at once, so that a ring of transfers cannot
        deadlock.
        """
        ...

    def barrier(self, *, team: Team, stream: object = None) -> None:
        """Blocks the host until every rank of the team has called the method.

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
        """Checks the arguments of a collective once; returns a function that starts the same
        collective without the checks, for later runs of the same program.

        The arguments are those of `collective`. This rank has entered the collective before. The
        returned function accepts all buffers with the dtypes and sizes of `out` and `inp`. Returns
        None if each call must be checked.
        """
        ...

    def bind_batch(self, transfers: Sequence[Transfer], *, team: Team) -> PostBatch | None:
        """Checks a batch of transfers once; returns a function that starts the same transfers
        without the checks, for later runs of the same program.

        This rank has entered the batch before. The returned function accepts all tensors with the
        dtypes and sizes of the tensors in `transfers`. Returns None if each batch must be checked.
        """
        ...

    def drain(self) -> None:
        """Waits until the device has completed all communications, or cannot complete them any
        more.

        Called at the end of the process.
        """
        ...

    def close(self) -> None:
        """Releases the communicators and the memory of the backend; later calls raise an error."""
        ...


# The size of the name of shared memory (`handles.name_of_piece`), in 8-byte words.
NAME_WORDS = 5


class PeerMemory(Backend, Protocol):
    """A backend for peer copies: the receiver copies out of the sender's memory.

    The receiver's process has mapped the memory of the sender into its own address space, so no
    copy on the sender's side is needed.
    """

    def connect(self, team: Team) -> None:
        """Prepares a team of ranks for copies from each other's memory.

        The first call for a team exchanges messages, so all ranks of the team must make that call.
        Raises `UnsupportedError` if the ranks cannot map each other's memory.
        """
        ...

    def vote(self, team: Team, kind: int) -> tuple[int, ...] | None:
        """Sends this rank's vote on how to execute a run to a team; returns the votes of all its
        ranks, in team order.

        A run is one execution of a program: by its recorded steps, or by launching a CUDA graph.
        The vote `kind` is STEP_BY_STEP, NOT_CAPTURED (this rank could not capture a graph), or the
        number of a graph. Returns None if the ranks need not agree.
        """
        ...

    def start_over(self, team: Team) -> None:
        """Cleans up after a capture of a CUDA graph that ranks of a team have begun and not ended.

        All ranks of the team must make the call.
        """
        ...

    def take_back(self, team: Team) -> None:
        """Makes the other ranks of a team drop the CUDA graphs that the team captured together.

        Called after this rank failed in a run that all ranks should have executed by launching
        graphs.
        """
        ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocates memory that other ranks can map, as a uint8 tensor.

        Data in such memory is sent without a copy on the sender's side.
        """
        ...

    def lasting(self, nbytes: int) -> torch.Tensor:
        """Allocates memory that other ranks can map, for a buffer that a program keeps for many
        runs.

        The memory is returned to the system soon after its last user has dropped it (see
        `release`).
        """
        ...

    def shard(self, nbytes: int) -> torch.Tensor:
        """Allocates memory for the part (shard) of a tensor that one rank stores.

        Other ranks can map the memory, and `side_by_side` can show the shards of a team as one
        tensor.
        """
        ...

    def release(self) -> None:
        """Records that a host program was deleted, so that the next call of `tidy` frees its
        memory.

        Other ranks need not call this method. Finalizers may call `release`, because it frees
        nothing itself.
        """
        ...

    def tidy(self) -> None:
        """Frees memory that has no user; called at the beginning of a run of a host program.

        At that time, this rank has done its part of all communications that it began before. Only
        work that is still on the device may be left.
        """
        ...

    def side_by_side(self, tensor: torch.Tensor, team: Team, what: str) -> torch.Tensor:
        """Maps the shards of all ranks of a team as one tensor, in team order, without a copy.

        A shard is the part of a tensor that one rank stores. `tensor` is this rank's shard and must
        be dense. The result can only be read. `what` names the operation in error messages. Returns
        when all ranks have made the call.

        Raises, on all members:
            UnsupportedError: the shards cannot be mapped as one range of addresses.
            CommunicationError: the ranks of the team make different calls.
        """
        ...

    def rendezvous(self, team: Team, what: str) -> None:
        """Blocks until all ranks of a team have called the method with the same description
        `what`.
        """
        ...


# ----------------------------------------------------------------------
# The part of a backend that CUDA graphs use which repeat its communications.

# The votes of ranks on a run that graphs repeat on all of them or on none (`Captured.vote`): "run
# the steps", and "I have not captured a graph". Captured graphs have numbers from FIRST_GRAPH on.
# The number between is GAVE_UP of `multidevice/coordination/control_channel.py`.
STEP_BY_STEP, NOT_CAPTURED, FIRST_GRAPH = 0, 2, 3


@dataclass(frozen=True)
class Vote:
    """The agreement of a team on how to execute a run: by its recorded steps or by a CUDA graph.

    With peer copies, either all ranks launch a graph or none does, because graphs contain the
    addresses of other ranks' data. `voters()` returns the backend over which the ranks exchange
    their votes.
    """

    voters: Callable[[], PeerMemory]
    team: Team

    def ask(self, kind: int) -> tuple[int, ...] | None:
        """Sends this rank's vote on how to execute a run to the team; returns the votes of all
        ranks, in team order.

        The vote `kind` is STEP_BY_STEP (execute the recorded steps), NOT_CAPTURED (this rank could
        not capture a CUDA graph), or the number of a graph to launch. Returns None if the ranks
        need not agree. All ranks of the team must make the call.
        """
        voters = self.voters()
        voters.connect(self.team)
        return voters.vote(self.team, kind)

    def start_over(self) -> None:
        """Cleans up after a capture of a CUDA graph that ranks of the team have begun and not
        ended.

        All ranks of the team must make the call.
        """
        self.voters().start_over(self.team)

    def take_back(self) -> None:
        """Makes the other ranks drop the CUDA graphs that the team captured together.

        Called after this rank failed in a run that all ranks should have executed by launching
        graphs.
        """
        self.voters().take_back(self.team)


class Repeats(Protocol):
    """The interface of an object that owns captured CUDA graphs, which repeat communications."""

    def forget(self) -> None:
        """Drops all CUDA graphs of this owner."""
        ...


class Captured:
    """The methods of a backend that CUDA graphs use; this base class allows no capture.

    A CUDA graph may repeat communications without new calls of the backend. `generation` counts how
    often the backend has dropped its communicators. A graph that was captured under a smaller
    number is invalid, because it uses dropped communicators.
    """

    _ledger: Ledger
    generation = 0
    _repeats: WeakSet[Repeats] | None = None

    def repeated_by(self, repeats: Repeats) -> None:
        """Registers `repeats`, an owner of CUDA graphs that contain this backend's communications.

        `make_void` makes all owners drop their graphs.
        """
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
        """Returns whether a CUDA graph may repeat the communication `what`, such as "barrier".

        This is allowed if the communication needs nothing from the host once it is enqueued. This
        base class returns False.
        """
        del what
        return False

    def vote(self, team: Team, kind: int) -> tuple[int, ...] | None:
        """Sends this rank's vote on how to execute a run to a team; returns all votes, in team
        order.

        A run is one execution of a program. The vote `kind` is STEP_BY_STEP (execute the recorded
        steps), NOT_CAPTURED (this rank could not capture a CUDA graph), or the number of a graph to
        launch. Returns None if the ranks need not agree: one rank may launch a graph while another
        one runs its recorded steps. This base class returns None.
        """
        del team, kind
        return None

    def capturing(self, stream: int) -> AbstractContextManager[list[object]]:
        """Returns a context in which this rank captures a CUDA graph, for a later launch on
        `stream`.

        The value of the context is a list, to which a backend adds objects that the graph uses. The
        caller keeps the list as long as the graph. In this base class, the list stays empty.
        """
        del stream
        return nullcontext([])

    def flush(self) -> None:
        """Enqueues the flag writes that a capture has delayed to combine them with later flag
        operations.

        A flag is a number in memory by which one GPU signals another one. This base class has none.
        """

    def start_over(self, team: Team) -> None:
        """Cleans up after a capture of a CUDA graph that ranks of a team have begun and not ended.

        All ranks of the team must make the call.
        """
        del team

    def take_back(self, team: Team) -> None:
        """Makes the other ranks of a team drop the CUDA graphs that the team captured together.

        Called after this rank failed in a run that all ranks should have executed by launching
        graphs. The other ranks notice the failure in their next exchange of messages. The ranks
        then compare how many calls each has made, and these counts differ.
        """
        del team

    @contextmanager
    def noting(self) -> Generator[Counter[Calls]]:
        """Returns a context whose value counts the communications that this thread starts inside
        it.

        A CUDA graph that is captured inside repeats these communications. Each sequence of calls
        (`Calls`: kind and team) has its own count.
        """
        noted = self._ledger.noted[get_ident()] = Counter[Calls]()
        try:
            yield noted
        finally:
            del self._ledger.noted[get_ident()]

    def enter_again(self, calls: Counter[Calls], sign: int = 1) -> None:
        """Adds `calls` to the counts of communications that this rank has entered.

        Called for each launch of a CUDA graph, because a graph repeats communications without calls
        of the backend. With `sign` -1, subtracts the counts of a capture that was given up: a
        capture executes nothing.
        """
        entered = self._ledger.entered
        for key, count in calls.items():
            entered[key] = entered.get(key, 0) + sign * count
