"""The streams of a run: ordered queues of work, on CUDA or on the CPU.

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
    """Returns the CUDA driver's handle of a stream; None for a stream on the CPU, or for None."""
    return stream.cuda_stream if isinstance(stream, torch.cuda.Stream) else None


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context in which `device` is the current CUDA device of this thread.

    The context does nothing if `device` is current already or is no CUDA device.
    """
    current = current_device_beside(device)
    is_current = current is None or current() == device.index
    return nullcontext() if is_current else torch.cuda.device(device)


class Streams(Protocol):
    """The interface of the streams that a program's runs use: ordered queues of work on one device.

    A stream with a number is made at its first use, and is kept for later runs of the program.
    """

    # Whether submitted work may run later than it was submitted.
    holds_work_back: bool

    def handle(self, key: Hashable) -> Handle:
        """Returns the stream for `key`, which is a stream number of the program, or a stream name.

        A name that the program has given to its current stream by a `GetCurrentStream` op is not
        passed to this method. `Execution` looks up such a name among the run's values.
        """
        ...

    def current(self) -> Handle:
        """Returns the current stream of this thread, to which new work is submitted."""
        ...

    def enter(self, stream: Handle) -> None:
        """Makes `stream` the current stream of this thread, to which new work is submitted."""
        ...

    def join(self, stream: Handle) -> None:
        """Makes the current stream wait for all work that has been submitted to `stream` so far."""
        ...

    def mark(self) -> object:
        """Returns an object that marks the end of all work submitted to the current stream so far.

        Another stream can wait for this work with `join_mark`.
        """
        ...

    def join_mark(self, mark: object) -> None:
        """Makes the current stream wait for the work that an earlier call of the method `mark` has
        marked by the object `mark`.
        """
        ...

    def submit(self, work: Work, ready: Ready | None = None) -> None:
        """Submits the function `work` to the current stream, which calls the function.

        `ready()` is whether `work` can run without waiting for another rank. If `ready` is None,
        `work` never waits for another rank.
        """
        ...

    def finish(self) -> None:
        """Runs all remaining work of the current stream, before a run returns its results."""
        ...

    def abandon(self) -> None:
        """Drops the submitted work that has not run yet, after an error in a run. Otherwise a later
        run would carry it out.
        """
        ...

    def standing_in(self, stand_in: Callable[[int], int]) -> AbstractContextManager[object]:
        """Returns a context in which this thread uses substitutes for the program's streams.

        `stand_in` maps the raw handle of a stream to that of the substitute. The context is needed
        while a run is captured in a CUDA graph, because the capture uses streams of its own.
        """
        ...


class CudaStreams:
    """The CUDA streams of a program, from torch's pool of streams.

    The host calls submitted functions immediately. The kernels that a function launches are queued
    on the current CUDA stream.
    """

    holds_work_back = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[Hashable, torch.cuda.Stream] = {}
        self._local = threading.local()

    @contextmanager
    def standing_in(self, stand_in: Callable[[int], int]) -> Generator[None]:
        """Returns a context in which this thread uses substitutes for the program's CUDA streams,
        while a run is captured in a CUDA graph.

        `stand_in` maps the raw handle of a stream to that of the substitute.
        """
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
        """Returns the CUDA stream for `key`, a number or a name of the program.

        The stream is made at the first call for `key`.
        """
        if key not in self._made:
            made = (
                torch.cuda.default_stream(self._device)
                if key == "Default"
                else torch.cuda.Stream(self._device)
            )
            self._made.setdefault(key, made)
        return self._made[key]

    def current(self) -> Handle:
        """Returns torch's current CUDA stream of this thread."""
        return torch.cuda.current_stream(self._device)

    def enter(self, stream: Handle) -> None:
        """Makes `stream` torch's current CUDA stream, for this thread."""
        torch.cuda.set_stream(self._actual(stream))

    def join(self, stream: Handle) -> None:
        """Makes the current CUDA stream wait for all kernels that are queued on `stream` so far."""
        torch.cuda.current_stream(self._device).wait_stream(self._actual(stream))

    def submit(self, work: Work, ready: Ready | None = None) -> None:
        """Calls `work` now. Kernels that `work` launches are queued on the current CUDA stream."""
        work()

    def mark(self) -> object:
        """Records a CUDA event on the current stream, and returns (stream, event).

        Another stream can wait for the event with `join_mark`.
        """
        stream = torch.cuda.current_stream(self._device)
        return stream, stream.record_event()

    def join_mark(self, mark: object) -> None:
        """Makes the current stream wait for the CUDA event in `mark`, which is (stream, event).

        If the current stream has recorded the event itself, no wait is needed.
        """
        marked, event = cast("tuple[torch.cuda.Stream, torch.cuda.Event]", mark)
        current = torch.cuda.current_stream(self._device)
        if current != marked:
            current.wait_event(event)

    def finish(self) -> None:
        """Does nothing. On other kinds of streams, this method runs the remaining work of the
        current stream. On CUDA, the device does the work in order, so the caller's later work runs
        after the work of this run.
        """

    def abandon(self) -> None:
        """Does nothing. On other kinds of streams, this method drops submitted functions after an
        error. On CUDA, all submitted functions have already been called.
        """


class CpuStreams:
    """The streams of a program on the CPU, where submitted work runs immediately."""

    holds_work_back = False

    def __init__(self) -> None:
        self._local = threading.local()

    def handle(self, key: Hashable) -> Handle:
        """Returns the name of the CPU stream for `key`, a stream number or name of the program."""
        return ENTRY if key == "Default" else key

    def current(self) -> Handle:
        """Returns the name (handle) of this thread's current stream."""
        return getattr(self._local, "current", ENTRY)

    def enter(self, stream: Handle) -> None:
        """Makes the stream with the name `stream` the current stream of this thread."""
        self._local.current = stream

    def join(self, stream: Handle) -> None:
        """Does nothing, because submitted work on the CPU has already run. On other kinds of
        streams, this method makes the current stream wait for the work of `stream`.
        """

    def mark(self) -> object:
        """Returns an object that marks the work submitted to the current stream so far: the name of
        the stream.

        No stream has to wait for this mark, because all submitted work has already run.
        """
        return self.current()

    def join_mark(self, mark: object) -> None:
        """Does nothing, because submitted work on the CPU has already run. On other kinds of
        streams, this method makes the current stream wait for the work before `mark`.
        """

    def submit(self, work: Work, ready: Ready | None = None) -> None:
        """Calls `work` now, even if `work` has to wait for another rank (`ready` is ignored)."""
        work()

    def finish(self) -> None:
        """Does nothing, because submitted work on the CPU has already run. On other kinds of
        streams, this method runs the remaining work of the current stream.
        """

    def abandon(self) -> None:
        """Does nothing, because submitted work on the CPU has already run. On other kinds of
        streams, this method drops the work that has not run, after an error.
        """

    def standing_in(self, stand_in: Callable[[int], int]) -> AbstractContextManager[object]:
        """Returns a context that does nothing, because runs on the CPU are not captured in CUDA
        graphs. On CUDA, the context replaces the program's streams by substitutes.
        """
        return nullcontext()


class UnservedStreams(CpuStreams):
    """The streams of a dry run, which follows a program without computing anything. No work runs on
    them.
    """

    def submit(self, work: Work, ready: Ready | None = None) -> None:
        """Drops the function `work`, because a dry run computes nothing. Other kinds of streams
        call the function.
        """


@dataclass(frozen=True)
class _Until:
    """An entry in the work queue of a stream that makes this stream wait for another stream. It is
    part of the test mode in which streams delay work.

    The wait ends when the other stream, `stream`, has done the first `count` entries of its own
    queue.
    """

    stream: Handle
    count: int


@dataclass(frozen=True)
class _Wait:
    """An entry in the work queue of a stream, whose function `work` waits for another rank. It is
    part of the test mode in which streams delay work.

    Until `ready()` is true, the other streams of this rank continue.
    """

    work: Work
    ready: Ready


@dataclass
class _Queue:
    """The work queue of one stream, in the test mode in which streams delay work.

    - `waiting`: the entries that have not run.
    - `given`, `done`: how many entries have been submitted, and how many have run.
    """

    waiting: deque[Work | _Until | _Wait] = field(default_factory=deque[Work | _Until | _Wait])
    given: int = 0
    done: int = 0


class DelayedStreams(CpuStreams):
    """CPU streams that run work as late as the program's waits allow, to show missing waits.

    Tests use this class. The work of a delayed stream runs only when another stream, or the end of
    the run, waits for it. If `late` is a stream, only that stream is delayed, and others only while
    they wait for `late`. If `late` is None, all streams are delayed.
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
        """Makes the current stream wait for all work that has been submitted to `stream` so far.

        The wait is an entry in the queue of the current stream.
        """
        self.join_mark(_Until(stream, self._queue(stream).given))

    def mark(self) -> object:
        """Returns an entry that another stream can append to its queue, to wait for all work
        submitted to the current stream so far.
        """
        return _Until(self.current(), self._queue(self.current()).given)

    def join_mark(self, mark: object) -> None:
        """Makes the current stream wait for the work before `mark`, which the method `mark` has
        returned: the entry `mark` is appended to the stream's queue.

        If `mark` is for the current stream itself, no wait is needed.
        """
        assert isinstance(mark, _Until)
        if mark.stream != self.current():
            self._give(mark)

    def submit(self, work: Work, ready: Ready | None = None) -> None:
        """Appends the function `work` to the queue of the current stream. The stream calls the
        function as late as the program allows.

        `ready()` is whether `work` can run without waiting for another rank.
        """
        self._give(work if ready is None else _Wait(work, ready))

    def _give(self, entry: Work | _Until | _Wait) -> None:
        queue = self._queue(self.current())
        queue.waiting.append(entry)
        queue.given += 1
        if self._late is not None:
            self._advance()

    def _advance(self) -> None:
        """Runs the work of every stream but the delayed one, until each of them waits for the
        delayed stream.
        """
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
        """Runs all remaining work of the current stream.

        If the current stream waits for another stream, the work of that stream runs, too.
        """
        current = self.current()
        self._drain(current, self._queue(current).given)

    def abandon(self) -> None:
        """Drops the submitted work of all streams that has not run, after an error in a run."""
        self._queues.clear()
        self._served.clear()
