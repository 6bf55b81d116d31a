"""Streams of a run: ordered queues of work, on CUDA or on the CPU.

A host program switches between streams and makes one stream wait for another. Neither action blocks
the host.

- `CudaStreams`: the CUDA streams of torch.
- `CpuStreams`: runs all work immediately, which satisfies every order that a program can require.
- `DelayedStreams`: delays work as far as the program's own waits allow. A missing wait then causes
  a wrong result, so tests find it without a GPU.
- `UnservedStreams`: runs no work, for dry runs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch

from fuser.support.torch_calls import current_device_beside
from hostir.ir.effects import ENTRY

Work = Callable[[], object]
Ready = Callable[[], bool]
# A stream of a run: a torch.cuda.Stream, or the name of a CPU queue.
Handle = Hashable


def raw_handle(stream: Handle | None) -> int | None:
    """Returns the driver's handle of a CUDA stream; None for a CPU queue or for None."""
    return stream.cuda_stream if isinstance(stream, torch.cuda.Stream) else None


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context in which `device` is the current CUDA device.

    Returns an empty context if `device` is current already or is no CUDA device.
    """
    current = current_device_beside(device)
    is_current = current is None or current() == device.index
    return nullcontext() if is_current else torch.cuda.device(device)


class Streams(Protocol):
    """The streams of one evaluator.

    A stream with a number is made at its first use and kept until the evaluator ends.
    """

    # Whether submitted work may run later than it was submitted.
    holds_work_back: bool

    def handle(self, key: Hashable) -> Handle:
        """Returns the stream for `key`: a stream number, or a name that no op has captured."""
        ...

    def current(self) -> Handle:
        """Returns the current stream of this thread."""
        ...

    def enter(self, stream: Handle) -> None:
        """Makes `stream` the current stream of this thread."""
        ...

    def join(self, stream: Handle) -> None:
        """Makes the current stream wait for all work submitted so far to another stream."""
        ...

    def mark(self) -> object:
        """Returns a mark: the position in the current stream after all work submitted so far."""
        ...

    def join_mark(self, mark: object) -> None:
        """Makes the current stream wait for the work submitted before `mark` on another stream."""
        ...

    def submit(self, work: Work, ready: Ready | None = None) -> None:
        """Submits the function `work` to the current stream.

        `ready()` is whether `work` can run without waiting for a peer. If `ready` is None, `work`
        never waits for a peer.
        """
        ...

    def finish(self) -> None:
        """Runs all remaining work of the current stream; called before results are returned."""
        ...

    def abandon(self) -> None:
        """Drops submitted work that has not run; called after an error."""
        ...

    def standing_in(self, stand_in: Callable[[int], int]) -> AbstractContextManager[object]:
        """Returns a context in which this thread uses other streams in place of the program's.

        `stand_in` maps the raw handle of a stream to that of the stream to use. The context is
        needed while a run is captured in a CUDA graph.
        """
        ...


class CudaStreams:
    """CUDA streams from torch's pool.

    The host runs submitted work immediately. The kernels of the work are queued on the current CUDA
    stream.
    """

    holds_work_back = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[Hashable, torch.cuda.Stream] = {}
        self._local = threading.local()

    @contextmanager
    def standing_in(self, stand_in: Callable[[int], int]) -> Generator[None]:
        """Returns a context in which this thread uses the streams that `stand_in` returns."""
        self._local.stand_in = stand_in
        try:
            yield
        finally:
            self._local.stand_in = None

    def _actual(self, stream: Handle) -> torch.cuda.Stream:
        assert isinstance(stream, torch.cuda.Stream)
        stand_in = getattr(self._local, "stand_in", None)
        if stand_in is None:
            return stream
        return torch.cuda.ExternalStream(stand_in(stream.cuda_stream), device=self._device)

    def handle(self, key: Hashable) -> Handle:
        """Returns the CUDA stream for `key`, a number or a name; makes the stream at first use."""
        if key not in self._made:
            made = (
                torch.cuda.default_stream(self._device)
                if key == "Default"
                else torch.cuda.Stream(self._device)
            )
            self._made.setdefault(key, made)
        return self._made[key]

    def current(self) -> Handle:
        """Returns the current stream of this thread."""
        return torch.cuda.current_stream(self._device)

    def enter(self, stream: Handle) -> None:
        """Makes `stream` torch's current CUDA stream, for this thread."""
        torch.cuda.set_stream(self._actual(stream))

    def join(self, stream: Handle) -> None:
        """Makes the current stream wait for all work submitted so far to another stream."""
        torch.cuda.current_stream(self._device).wait_stream(self._actual(stream))

    def submit(self, work: Work, ready: Ready | None = None) -> None:
        """Runs `work` now, which queues kernels on the current CUDA stream."""
        work()

    def mark(self) -> object:
        """Records an event on the current CUDA stream; returns (stream, event)."""
        stream = torch.cuda.current_stream(self._device)
        return stream, stream.record_event()

    def join_mark(self, mark: object) -> None:
        """Makes the current stream wait for the event in `mark`, if another stream recorded it."""
        marked, event = cast("tuple[torch.cuda.Stream, torch.cuda.Event]", mark)
        current = torch.cuda.current_stream(self._device)
        if current != marked:
            current.wait_event(event)

    def finish(self) -> None:
        """Does nothing, because CUDA orders the caller's later work after the work of this run."""

    def abandon(self) -> None:
        """Does nothing, because work is never delayed."""


class CpuStreams:
    """CPU queues whose work runs immediately when it is submitted."""

    holds_work_back = False

    def __init__(self) -> None:
        self._local = threading.local()

    def handle(self, key: Hashable) -> Handle:
        """Returns the name of the queue for `key`; on the CPU, the name stands for the stream."""
        return ENTRY if key == "Default" else key

    def current(self) -> Handle:
        """Returns the current stream of this thread."""
        return getattr(self._local, "current", ENTRY)

    def enter(self, stream: Handle) -> None:
        """Makes the queue named `stream` the current queue of this thread."""
        self._local.current = stream

    def join(self, stream: Handle) -> None:
        """Does nothing, because all submitted work has already run."""

    def mark(self) -> object:
        """Returns the current queue's name; a mark needs no position, as all work has run."""
        return self.current()

    def join_mark(self, mark: object) -> None:
        """Does nothing, because all submitted work has already run."""

    def submit(self, work: Work, ready: Ready | None = None) -> None:
        """Runs `work` now, even if it has to wait for a peer."""
        work()

    def finish(self) -> None:
        """Does nothing, because all submitted work has already run."""

    def abandon(self) -> None:
        """Does nothing, because all submitted work has already run."""

    def standing_in(self, stand_in: Callable[[int], int]) -> AbstractContextManager[object]:
        """Returns an empty context, because runs on the CPU are not captured in graphs."""
        return nullcontext()


class UnservedStreams(CpuStreams):
    """CPU queues whose work never runs: the streams of a dry run."""

    def submit(self, work: Work, ready: Ready | None = None) -> None:
        """Drops `work` without running it."""


@dataclass(frozen=True)
class _Until:
    """A queue entry that waits until `stream` has done the first `count` entries of its queue."""

    stream: Handle
    count: int


@dataclass(frozen=True)
class _Wait:
    """A queue entry with work that waits for a peer.

    Other streams of this rank continue until `ready()` is true.
    """

    work: Work
    ready: Ready


@dataclass
class _Queue:
    """The queue of one stream.

    `waiting` has the entries that have not run. `given` and `done` are how many entries have been
    submitted and have run.
    """

    waiting: deque[Work | _Until | _Wait] = field(default_factory=deque[Work | _Until | _Wait])
    given: int = 0
    done: int = 0


class DelayedStreams(CpuStreams):
    """CPU queues whose work runs as late as the program allows.

    The work of a delayed stream runs when another stream, or the end of the run, waits for that
    stream. If `late` is a stream, only `late` is delayed, and other streams only while waiting for
    `late`. If `late` is None, all streams are delayed.
    """

    holds_work_back = True

    def __init__(self, late: Handle | None = None) -> None:
        super().__init__()
        self._late = late
        self._queues: dict[Handle, _Queue] = {}
        # The queues that have an entry which is running now.
        self._served: list[_Queue] = []

    def _queue(self, stream: Handle) -> _Queue:
        return self._queues.setdefault(stream, _Queue())

    def join(self, stream: Handle) -> None:
        """Appends to the current queue a wait for all work submitted so far to `stream`."""
        self.join_mark(_Until(stream, self._queue(stream).given))

    def mark(self) -> object:
        """Returns a wait entry for all work submitted so far to the current stream."""
        return _Until(self.current(), self._queue(self.current()).given)

    def join_mark(self, mark: object) -> None:
        """Appends the wait entry `mark` to the current queue, if it is for another stream."""
        assert isinstance(mark, _Until)
        if mark.stream != self.current():
            self._give(mark)

    def submit(self, work: Work, ready: Ready | None = None) -> None:
        """Appends `work` to the current queue; `ready()` is whether the peer has done its part."""
        self._give(work if ready is None else _Wait(work, ready))

    def _give(self, entry: Work | _Until | _Wait) -> None:
        queue = self._queue(self.current())
        queue.waiting.append(entry)
        queue.given += 1
        if self._late is not None:
            self._advance()

    def _advance(self) -> None:
        """Runs the work of every stream except the late one, until the stream waits for it."""
        self._go_on(lambda stream: stream == self._late)

    def _go_on(self, is_held: Callable[[Handle], bool]) -> None:
        moved = True
        while moved:
            moved = False
            for stream, queue in list(self._queues.items()):
                if is_held(stream):
                    continue
                while queue.waiting:
                    entry = queue.waiting[0]
                    if isinstance(entry, _Until) and self._queue(entry.stream).done < entry.count:
                        break
                    if isinstance(entry, _Wait) and not entry.ready():
                        break
                    moved = True
                    self._serve(queue)

    def _serve(self, queue: _Queue) -> None:
        entry = queue.waiting.popleft()
        self._served.append(queue)
        try:
            if isinstance(entry, _Until):
                self._drain(entry.stream, entry.count)
            elif isinstance(entry, _Wait):
                if not entry.ready():
                    # The peer may wait for transfers that other streams of this rank must post.
                    self._go_on(lambda stream: self._queues[stream] in self._served)
                entry.work()
            else:
                entry()
        finally:
            self._served.pop()
        queue.done += 1

    def _drain(self, stream: Handle, upto: int) -> None:
        queue = self._queue(stream)
        while queue.done < upto:
            self._serve(queue)

    def finish(self) -> None:
        """Runs all remaining work of the current queue, and all work that this queue waits for."""
        current = self.current()
        self._drain(current, self._queue(current).given)

    def abandon(self) -> None:
        """Drops all submitted work that has not run."""
        self._queues.clear()
        self._served.clear()
