"""Simulated ranks: threads of one process instead of processes; exactly one runs at any time.

Another rank runs only when the running rank waits in a communication. The next rank is the one that
has been ready longest, so a run is deterministic. When no rank can run, every rank raises
`DeadlockError`, which says in which call each rank waits. Ranks that enter a collective with
different arguments raise an error that shows both calls. Tensors may be on the CPU, or on CUDA if
all ranks share one device.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fuser.support.errors import CommunicationError, DeadlockError, PeerError, UnsupportedError
from multidevice.coordination.bounded_wait import Need, Team
from multidevice.coordination.control_channel import Control, ControlCall
from multidevice.transports.base.checked_backend import (
    CheckedBackend,
    CollectiveCall,
    Exchange,
    stream_at,
    tensor_text,
)
from multidevice.transports.base.collectives import (
    ALL_TO_ALL,
    ALLGATHER,
    ALLREDUCE,
    BARRIER,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    TransportTable,
)
from multidevice.transports.base.protocol import Transfer
from multidevice.transports.memory.handles import await_members, side_by_side
from multidevice.transports.memory.host_shared import SharedMemory


class _DescribesPosition(Protocol):
    def describe(self) -> str: ...

    def needs(self) -> Iterable[Need]: ...


@dataclass(frozen=True)
class _LazyPosition:
    """The communication in which a simulated rank waits.

    `describe()` returns its text, and `needs()` the calls of other ranks that end the wait. Both
    functions are called only for error messages.
    """

    describe: Callable[[], str]
    needs: Callable[[], Iterable[Need]]


class Baton:
    """The scheduler of the simulated ranks of one run: only the rank that holds the baton runs.

    - `pending`: the collectives that some ranks of a team have entered and others have not.
    - `mailboxes`: the sends and receives that wait for the matching transfer.
    - `pages`: the memory that the ranks of each team share.
    - `generators`: the random number generators of the ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._gates = [threading.Semaphore(0) for _ in range(size)]
        self._ready: deque[int] = deque(range(size))
        self._waiting: dict[int, _DescribesPosition] = {}
        self._ended: dict[int, str] = {}
        self._failure: Callable[[], CommunicationError] | None = None
        self.pending: dict[tuple[Hashable, int], Rendezvous] = {}
        self.mailboxes: dict[str, deque[_Letter]] = {}
        self.pages: dict[Team, memoryview] = {}
        self.generators = Generators(size)

    def start(self) -> None:
        """Lets the first simulated rank run.

        Called once, when the threads of all ranks have been started.
        """
        self._pass_on()

    def begin(self, rank: int) -> None:
        """Blocks the thread of a rank until the scheduler lets the rank run for the first time."""
        self._gates[rank].acquire()
        self.generators.take(rank)

    def end(self, rank: int, error: BaseException | None) -> None:
        """Records that a rank has finished its program, and lets the next rank run.

        `error` is the exception that ended the rank, or None. After an exception, all other ranks
        raise a `PeerError`.
        """
        self.generators.leave(rank)
        if error is None:
            self._ended[rank] = "finished"
        else:
            text = f"{type(error).__name__}: {error}"
            self._ended[rank] = f"failed with {text}"
            if self._failure is None:
                self.fail(lambda: PeerError(f"rank {rank} failed: {text}"))
        self._pass_on()

    def fail(self, failure: Callable[[], CommunicationError]) -> None:
        """Makes every waiting rank, and every later call, raise the exception that `failure()`
        returns.
        """
        self._failure = failure
        for rank in sorted(self._waiting):
            self._ready.append(rank)
        self._waiting.clear()

    def check(self) -> None:
        """Raises the error of this run of simulated ranks, if a rank has failed or a deadlock was
        found.
        """
        if self._failure is not None:
            raise self._failure()

    def wait(self, rank: int, done: Callable[[], bool], position: _DescribesPosition) -> None:
        """Blocks a rank until `done()` is True; other ranks run meanwhile.

        `position` describes the communication in which the rank waits.

        Raises:
            DeadlockError: no rank can run.
            PeerError: another rank failed.
        """
        while not done():
            self.check()
            self._waiting[rank] = position
            self.generators.leave(rank)
            self._pass_on()
            self._gates[rank].acquire()
            self.generators.take(rank)

    def wake(self, ranks: Iterable[int]) -> None:
        """Marks the waiting ranks in `ranks` as ready to run, in this order."""
        for rank in ranks:
            if self._waiting.pop(rank, None) is not None:
                self._ready.append(rank)

    def _pass_on(self) -> None:
        if not self._ready and self._waiting:
            report = self._report()
            self.fail(lambda: DeadlockError(report))
        if self._ready:
            self._gates[self._ready.popleft()].release()

    def _report(self) -> str:
        lines = ["deadlock: no simulated rank can run"]
        for rank in range(self.size):
            position = self._waiting.get(rank)
            if position is None:
                lines.append(f"  rank {rank}: {self._ended.get(rank, 'not started')}")
                continue
            lines.append(f"  rank {rank}: waits in {position.describe()}")
        return "\n".join(lines)


class Rendezvous:
    """One collective among simulated ranks, with the ranks of the team that have entered it so far.

    - `entries`: the call of each rank, by position in the team.
    - `arrivals`: the CUDA event at which each rank's data is ready; None on the CPU.
    - `done`: whether all ranks of the team have entered.
    - `error`: the error message if the ranks' calls differ.
    - `finished`: the CUDA event after which the results are complete.
    """

    def __init__(self) -> None:
        self.entries: dict[int, Any] = {}
        self.arrivals: dict[int, Any] = {}
        self.left = 0
        self.done = False
        self.error: str | None = None
        self.result: Any = None
        self.finished: Any = None


def join_rendezvous(
    baton: Baton,
    position: _DescribesPosition,
    *,
    key: Hashable,
    seq: int,
    team: Team,
    index: int,
    entry: Any,
    arrival: Any,
    complete: Callable[[Rendezvous], None],
) -> Rendezvous:
    """Enters a collective of simulated ranks, without waiting for the other ranks of the team.

    - `position`: describes the call in error messages.
    - `key`, `seq`: identify the collective.
    - `index`: the position of this rank in the team.
    - `entry`, `arrival`: this rank's call, and the CUDA event at which its data is ready.
    - `complete`: called by the last rank that enters, on behalf of all ranks.

    Returns the object that all ranks of the collective share.
    """
    baton.check()
    rendezvous = baton.pending.setdefault((key, seq), Rendezvous())
    rendezvous.entries[index] = entry
    rendezvous.arrivals[index] = arrival
    if len(rendezvous.entries) == len(team):
        del baton.pending[key, seq]
        complete(rendezvous)
        rendezvous.done = True
        baton.wake(team)
    return rendezvous


class SimulatedControl(Control):
    """The control channel of one simulated rank, over which ranks exchange small messages."""

    def __init__(self, rank: int, size: int, baton: Baton) -> None:
        super().__init__(rank, size)
        self.baton = baton

    def page(self, nbytes: int, team: Team) -> memoryview | None:
        """Returns zeroed memory that the ranks of the team share, as 8-byte words; the first call
        allocates it.

        Ordinary memory suffices, because simulated ranks are threads of one process.
        """
        return self.baton.pages.setdefault(team, memoryview(bytearray(nbytes)).cast("Q"))

    def wake(self, team: Team) -> None:
        """Makes the waiting ranks of `team` check again whether their waits have ended."""
        self.baton.wake(team)

    def poll_until(
        self,
        done: Callable[[], bool],
        *,
        what: Callable[[], str],
        needs: Callable[[], Iterable[Need]],
    ) -> None:
        """Blocks this rank until `done()` is True; other ranks run meanwhile.

        There is no deadline, because the scheduler (`Baton`) finds every deadlock. `what()` and
        `needs()` describe the wait in error messages.
        """
        self.baton.wait(self.rank, done, _LazyPosition(lambda: what() + self.trouble, needs))

    def _gather(self, record: bytes, step: ControlCall) -> list[bytes]:
        return self._collect(record, step, "record")

    def _gather_varied(
        self, payload: bytes, sizes: Sequence[int], step: ControlCall
    ) -> list[bytes]:
        return self._collect(payload, step, "payload")

    def _collect(self, payload: bytes, step: ControlCall, part: str) -> list[bytes]:
        rendezvous = join_rendezvous(
            self.baton,
            step,
            key=f"{step.key} {part}",
            seq=step.seq,
            team=step.team,
            index=step.team.index(self.rank),
            entry=payload,
            arrival=None,
            complete=lambda _: None,
        )
        place = _LazyPosition(lambda: step.describe() + self.trouble, step.needs)
        self.baton.wait(self.rank, lambda: rendezvous.done, place)
        return [rendezvous.entries[i] for i in range(len(step.team))]


class _Letter:
    """A send or a receive of a simulated rank that waits for the matching transfer of the other
    rank.

    `rank` is the rank that started the transfer. `arrival` is the CUDA event when its data is
    ready, and `finished` the event when the data has moved. Both are None on the CPU.
    """

    def __init__(self, transfer: Transfer, rank: int, stream: object, arrival: Any) -> None:
        self.transfer = transfer
        self.rank = rank
        self.stream = stream
        self.arrival = arrival
        self.done = False
        self.error: str | None = None
        self.finished: Any = None


class _SimulatedWork:
    """The handle of a communication of a simulated rank.

    The communication is complete when all its collectives or transfers (`parts`) are done.
    """

    def __init__(
        self,
        backend: SimulatedBackend,
        parts: Sequence[Rendezvous | _Letter],
        call: CollectiveCall | Exchange,
    ) -> None:
        self._backend = backend
        self._parts = parts
        self._call = call

    def is_done(self) -> bool:
        """Returns whether the data of all collectives and transfers of this communication has
        moved.
        """
        return all(part.done for part in self._parts)

    def wait(self) -> None:
        """Blocks the rank until the data has moved.

        On CUDA, the data is moved by work on a stream. The stream of the call then waits for that
        work.
        """
        backend = self._backend
        backend.baton.wait(backend.rank, self.is_done, self._call)
        for part in self._parts:
            if part.error is not None:
                raise CommunicationError(part.error)
            if part.finished is not None:
                _current_stream(self._call.stream).wait_event(part.finished)

    def synchronize(self) -> None:
        """Blocks the rank until the data has arrived; on CUDA, also until the device has moved the
        data.
        """
        self.wait()
        for part in self._parts:
            if part.finished is not None:
                part.finished.synchronize()


class SimulatedBackend(CheckedBackend):
    """The backend of simulated ranks, which are threads: copies directly between the ranks'
    tensors.

    Reductions of 16-bit floats accumulate in float32, in team order.
    """

    name = "simulated"

    def __init__(self, control: SimulatedControl) -> None:
        super().__init__(control.rank, control.size, control.ledger)
        self.control = control
        self.baton = control.baton
        # How often teams have resynchronised after an error: earlier transfers must not match later
        # ones.
        self._mended: Counter[Team] = Counter()
        control.on_mended.append(self._mend)

    def _mend(self, team: Team) -> None:
        self._mended[team] += 1

    def _check_device(self, tensor: torch.Tensor) -> None:
        del tensor

    def _on(self, stream: object) -> AbstractContextManager[object]:
        if stream is None:
            return nullcontext()
        return torch.cuda.stream(_current_stream(stream))

    def _start(self, call: CollectiveCall) -> _SimulatedWork:
        arrival = _record_event(call.inp if call.inp is not None else call.out, call.stream)
        rendezvous = join_rendezvous(
            self.baton,
            call,
            key=call.key,
            seq=call.seq,
            team=call.team,
            index=call.index,
            entry=call,
            arrival=arrival,
            complete=_complete,
        )
        return _SimulatedWork(self, [rendezvous], call)

    def _start_batch(self, batch: Exchange) -> _SimulatedWork:
        self.baton.check()
        letters = [self._post(transfer, batch) for transfer in batch.transfers]
        return _SimulatedWork(self, letters, batch)

    def _post(self, transfer: Transfer, batch: Exchange) -> _Letter:
        sends = transfer.kind == "send"
        source, target = (self.rank, transfer.peer) if sends else (transfer.peer, self.rank)
        since = sum(n for team, n in self._mended.items() if {*batch.team} <= {*team})
        box = self.baton.mailboxes.setdefault(
            f"{source}->{target} {batch.team} {transfer.order} {since}", deque()
        )
        arrival = _record_event(transfer.tensor, batch.stream)
        letter = _Letter(transfer, self.rank, batch.stream, arrival)
        if not box or box[0].transfer.kind == transfer.kind:
            box.append(letter)
            return letter
        other = box.popleft()
        send, recv = (letter, other) if sends else (other, letter)
        self._deliver(send, recv)
        for one in (send, recv):
            one.done = True
        self.baton.wake([other.rank])
        return letter

    def _deliver(self, send: _Letter, recv: _Letter) -> None:
        source, target = send.transfer.tensor, recv.transfer.tensor
        if source.dtype != target.dtype or source.numel() != target.numel():
            text = (
                f"rank {send.rank} sends {tensor_text(source)} to rank {recv.rank}, "
                f"which receives {tensor_text(target)}: dtype and number of elements must be equal"
            )
            send.error = recv.error = text
            return
        with _after([send.arrival, recv.arrival], send.stream):
            target.view(-1).copy_(source.view(-1))
            send.finished = recv.finished = _record_event(target, send.stream)


class SimulatedPeers(SimulatedBackend):
    """The backend for peer copies (a receiver reads the sender's memory) of simulated ranks.

    The ranks can read all memory, because they are threads of one process.
    """

    name = "cuda"

    def __init__(self, control: SimulatedControl, device: torch.device) -> None:
        super().__init__(control)
        self._device = device
        self._memory = SharedMemory()

    def connect(self, team: Team) -> None:
        """Does nothing, because simulated ranks need no preparation for peer copies."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocates memory that all simulated ranks can read, as a uint8 tensor.

        On the CPU, the memory is shared memory of the host, so that `side_by_side` can map parts of
        several ranks as one tensor. On CUDA, it is ordinary memory of the device.
        """
        if self._device.type == "cpu":
            return self._memory.empty(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def lasting(self, nbytes: int) -> torch.Tensor:
        """Allocates memory for a buffer that a program keeps for many runs, by calling `empty`."""
        return self.empty(nbytes)

    def shard(self, nbytes: int) -> torch.Tensor:
        """Allocates memory for the part (shard) of a tensor that one rank stores, by calling
        `empty`.
        """
        return self.empty(nbytes)

    def release(self) -> None:
        """Records that a host program was deleted, so that `tidy` frees its memory."""
        self._memory.release()

    def tidy(self) -> None:
        """Frees shared memory that no tensor uses."""
        self._memory.tidy()

    def side_by_side(self, tensor: torch.Tensor, team: Team, what: str) -> torch.Tensor:
        """Maps the parts (shards) that all ranks of a team store as one tensor, without a copy.

        The parts are in team order. `tensor` is this rank's part. `what` names the operation in
        error messages. Works on the CPU only; raises `UnsupportedError` on other devices.
        """
        if self._device.type != "cpu":
            raise UnsupportedError(
                f"{what}: simulated ranks cannot map memory on {self._device}, only on the CPU"
            )
        return side_by_side(self.control, self._memory, tensor, team, what)

    def rendezvous(self, team: Team, what: str) -> None:
        """Blocks until all ranks of a team have called the method with the same description
        `what`.
        """
        await_members(self.control, team, what)

    def close(self) -> None:
        """Closes the backend and its shared memory; later communications raise an error."""
        super().close()
        self._memory.close()


def _current_stream(stream: object) -> torch.cuda.Stream:
    if isinstance(stream, torch.cuda.Stream):
        return stream
    if isinstance(stream, int):
        return stream_at(stream)
    return torch.cuda.current_stream()


def _record_event(tensor: torch.Tensor | None, stream: object) -> Any:
    """Records a CUDA event on `stream`; returns None for a CPU tensor or no tensor.

    If `stream` is None, the current stream is used.
    """
    if tensor is None or tensor.device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(_current_stream(stream))
    return event


def _after(events: Iterable[Any], stream: object) -> AbstractContextManager[object]:
    """Returns a context in which torch's ops run on `stream`, after the CUDA events `events`.

    Events that are None are ignored.
    """
    real = [event for event in events if event is not None]
    if not real:
        return nullcontext()
    current = _current_stream(stream)
    for event in real:
        current.wait_event(event)
    return torch.cuda.stream(current)


def _complete(rendezvous: Rendezvous) -> None:
    """Moves the data of a collective that all ranks of the team have entered.

    Then drops the ranks' calls from `rendezvous`, the object that the ranks' `Work` handles share.
    Otherwise the handle of one rank would keep the other ranks' tensors alive.
    """
    calls: list[CollectiveCall] = [rendezvous.entries[i] for i in range(len(rendezvous.entries))]
    last, arrivals = next(reversed(rendezvous.entries)), list(rendezvous.arrivals.values())
    rendezvous.entries.clear()
    rendezvous.arrivals.clear()
    signatures = [_signature(call) for call in calls]
    for call, signature in zip(calls, signatures, strict=True):
        if signature != signatures[0]:
            rendezvous.error = (
                f"the ranks of the team {calls[0].team} must make the same call, but rank "
                f"{calls[0].team[0]} calls {calls[0].describe()}; rank {call.team[call.index]} "
                f"calls {call.describe()}"
            )
            return
    stream = calls[last].stream
    with _after(arrivals, stream), torch.no_grad():
        _MOVES[calls[0].row](calls)
        rendezvous.finished = _record_event(_any_tensor(calls[last]), stream)


def _any_tensor(call: CollectiveCall) -> torch.Tensor | None:
    return call.out if call.out is not None else call.inp


def _signature(call: CollectiveCall) -> tuple[object, ...]:
    """Returns the facts about a collective that must be equal on all ranks of the team.

    These are the collective, the reduction, the root, the dtype, and the number of elements per
    part.
    """
    tensor = _any_tensor(call)
    if tensor is None:
        return (call.row, call.reduce, call.root)
    side = call.row.inp if call.out is None else call.row.out
    count = tensor.numel() // side.parts(len(call.team))
    return (call.row, call.reduce, call.root, tensor.dtype, count)


def _inputs(calls: Sequence[CollectiveCall]) -> list[torch.Tensor]:
    return [call.inp.view(-1) for call in calls if call.inp is not None]


def _write(call: CollectiveCall, value: torch.Tensor) -> None:
    if call.out is not None:
        call.out.view(-1).copy_(value.view(-1))


_REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


def _reduced(calls: Sequence[CollectiveCall]) -> torch.Tensor:
    inputs = _inputs(calls)
    total = inputs[0].clone()
    for value in inputs[1:]:
        total = _REDUCE[calls[0].reduce or ""](total, value)
    return total


# ---------------------------------------------------------------- what each collective moves
def _move_allgather(calls: Sequence[CollectiveCall]) -> None:
    everything = torch.cat(_inputs(calls))
    for call in calls:
        _write(call, everything)


def _move_allreduce(calls: Sequence[CollectiveCall]) -> None:
    total = _reduced(calls)
    for call in calls:
        _write(call, total)


def _move_reduce_scatter(calls: Sequence[CollectiveCall]) -> None:
    parts = _reduced(calls).view(len(calls), -1)
    for call, part in zip(calls, parts, strict=True):
        _write(call, part)


def _move_alltoall(calls: Sequence[CollectiveCall]) -> None:
    count = len(calls)
    parts = torch.stack([inp.view(count, -1) for inp in _inputs(calls)])
    for index, call in enumerate(calls):
        _write(call, parts[:, index].contiguous())


def _move_broadcast(calls: Sequence[CollectiveCall]) -> None:
    root = calls[calls[0].root_index]
    assert root.inp is not None, "a broadcast has one buffer on every member"
    for call in calls:
        if call is not root:
            _write(call, root.inp)


def _move_scatter(calls: Sequence[CollectiveCall]) -> None:
    root = calls[calls[0].root_index]
    assert root.inp is not None, "the root of a scatter has the input"
    parts = root.inp.clone().view(len(calls), -1)
    for call, part in zip(calls, parts, strict=True):
        _write(call, part)


def _move_nothing(calls: Sequence[CollectiveCall]) -> None:
    del calls


_MOVES = TransportTable[Callable[[Sequence[CollectiveCall]], None]](
    "backend simulated",
    {
        ALLGATHER: _move_allgather,
        GATHER: _move_allgather,
        ALLREDUCE: _move_allreduce,
        REDUCE: _move_allreduce,
        REDUCE_SCATTER: _move_reduce_scatter,
        ALL_TO_ALL: _move_alltoall,
        BROADCAST: _move_broadcast,
        SCATTER: _move_scatter,
        BARRIER: _move_nothing,
    },
)


# ----------------------------------------------------------------------
# Each simulated rank has its own states of torch's random number generators, as processes have.


class Generators:
    """The states of torch's random number generators of each simulated rank that is not running.

    Each rank thus has its own random numbers, as a process has. At first, every rank has the states
    of the caller.
    """

    def __init__(self, size: int) -> None:
        self._states = [_states()] * size

    def take(self, rank: int) -> None:
        """Loads the random number generator states of a rank that starts to run."""
        _restore(self._states[rank])

    def leave(self, rank: int) -> None:
        """Saves the random number generator states of a rank that stops running."""
        self._states[rank] = _states()


def _states() -> tuple[torch.Tensor, list[torch.Tensor]]:
    return torch.default_generator.get_state(), [g.get_state() for g in _of_gpus()]


def _restore(states: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    host, gpus = states
    torch.default_generator.set_state(host)
    for generator, state in zip(_of_gpus(), gpus, strict=False):
        generator.set_state(state)


def _of_gpus() -> tuple[torch.Generator, ...]:
    """Returns torch's random number generators of all GPUs.

    Returns an empty tuple while a CUDA graph is captured, because the states cannot be read then.
    """
    is_idle = torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
    return torch.cuda.default_generators if is_idle else ()
