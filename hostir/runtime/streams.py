"""Streams as a run sees them: ordered queues of work, on CUDA, on the CPU, or held back.

The host program switches between streams and makes one wait for another; nothing here blocks the
host. `CpuStreams` serves every queue at once, which keeps all orders that a program may ask for.
`DelayedStreams` holds work back as far as the program's own waits allow, so that a missing wait
shows as a wrong result without a GPU.
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
# A stream of a run: a torch.cuda.Stream, or the name of a queue.
Handle = Hashable


def raw_handle(stream: Handle | None) -> int | None:
    """Returns the driver's handle of a CUDA stream, None for any other."""
    return stream.cuda_stream if isinstance(stream, torch.cuda.Stream) else None


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context in which a CUDA device is the current one: kernels and buffers go there."""
    current = current_device_beside(device)
    is_current = current is None or current() == device.index
    return nullcontext() if is_current else torch.cuda.device(device)


class Streams(Protocol):
    """The streams of one evaluator; numbered ones are made at their first use and persist."""

    # Whether submitted work may run later than it was submitted.
    holds_work_back: bool

    def handle(self, key: Hashable) -> Handle:
        """Returns the stream of a number, or of a name that no run captured."""
        ...

    def current(self) -> Handle: ...

    def enter(self, stream: Handle) -> None:
        """Makes the stream current, for this thread."""
        ...

    def join(self, stream: Handle) -> None:
        """Makes the current stream wait for all that the other has been given so far."""
        ...

    def mark(self) -> object:
        """Returns the place that the current stream has come to, for `join_mark`."""
        ...

    def join_mark(self, mark: object) -> None:
        """Makes the current stream wait for what stands before a mark on another one."""
        ...

    def submit(self, work: Work, ready: Ready | None = None) -> None:
        """Gives work to the current stream; until `ready()`, it would wait for a peer."""
        ...

    def finish(self) -> None:
        """Serves what the current stream still has to do: called before results are returned."""
        ...

    def abandon(self) -> None:
        """Forgets what was submitted and has not run: called after an error."""
        ...

    def standing_in(self, stand_in: Callable[[int], int]) -> AbstractContextManager[object]:
        """Returns a context in which this thread uses other streams in place of the program's, by
        their raw handles: a run is captured.
        """
        ...


class CudaStreams:
    """CUDA streams of torch's pool; work is submitted by carrying it out."""

    holds_work_back = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[Hashable, torch.cuda.Stream] = {}
        self._local = threading.local()

    @contextmanager
    def standing_in(self, stand_in: Callable[[int], int]) -> Generator[None]:
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
        if key not in self._made:
            made = (
                torch.cuda.default_stream(self._device)
                if key == "Default"
                else torch.cuda.Stream(self._device)
            )
            self._made.setdefault(key, made)
        return self._made[key]

    def current(self) -> Handle:
        return torch.cuda.current_stream(self._device)

    def enter(self, stream: Handle) -> None:
        torch.cuda.set_stream(self._actual(stream))

    def join(self, stream: Handle) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._actual(stream))

    def submit(self, work: Work, ready: Ready | None = None) -> None:
        work()

    def mark(self) -> object:
        stream = torch.cuda.current_stream(self._device)
        return stream, stream.record_event()

    def join_mark(self, mark: object) -> None:
        marked, event = cast("tuple[torch.cuda.Stream, torch.cuda.Event]", mark)
        current = torch.cuda.current_stream(self._device)
        if current != marked:
            current.wait_event(event)

    def finish(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class CpuStreams:
    """Queues that are served at once."""

    holds_work_back = False

    def __init__(self) -> None:
        self._local = threading.local()

    def handle(self, key: Hashable) -> Handle:
        return ENTRY if key == "Default" else key

    def current(self) -> Handle:
        return getattr(self._local, "current", ENTRY)

    def enter(self, stream: Handle) -> None:
        self._local.current = stream

    def join(self, stream: Handle) -> None:
        pass

    def mark(self) -> object:
        return self.current()

    def join_mark(self, mark: object) -> None:
        pass

    def submit(self, work: Work, ready: Ready | None = None) -> None:
        work()

    def finish(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def standing_in(self, stand_in: Callable[[int], int]) -> AbstractContextManager[object]:
        return nullcontext()


class UnservedStreams(CpuStreams):
    """Queues that are never served: a program is walked for its shapes."""

    def submit(self, work: Work, ready: Ready | None = None) -> None:
        pass


@dataclass(frozen=True)
class _Until:
    """The place in a queue where another stream must have done so much of its work."""

    stream: Handle
    count: int


@dataclass(frozen=True)
class _Wait:
    """Work that waits for a peer: other streams go on meanwhile."""

    work: Work
    ready: Ready


@dataclass
class _Queue:
    """The work of a stream that has not run yet, and how much has."""

    waiting: deque[Work | _Until | _Wait] = field(default_factory=deque[Work | _Until | _Wait])
    given: int = 0
    done: int = 0


class DelayedStreams(CpuStreams):
    """Queues of which some are served as late as the program allows.

    With `late`, that stream alone is held back, and those that come to wait for it; all others are
    served at once. Without, every stream is served only when another one, or the end of the run,
    waits for it.
    """

    holds_work_back = True

    def __init__(self, late: Handle | None = None) -> None:
        super().__init__()
        self._late = late
        self._queues: dict[Handle, _Queue] = {}
        # Those of which an entry is being served now.
        self._served: list[_Queue] = []

    def _queue(self, stream: Handle) -> _Queue:
        return self._queues.setdefault(stream, _Queue())

    def join(self, stream: Handle) -> None:
        self.join_mark(_Until(stream, self._queue(stream).given))

    def mark(self) -> object:
        return _Until(self.current(), self._queue(self.current()).given)

    def join_mark(self, mark: object) -> None:
        assert isinstance(mark, _Until)
        if mark.stream != self.current():
            self._give(mark)

    def submit(self, work: Work, ready: Ready | None = None) -> None:
        self._give(work if ready is None else _Wait(work, ready))

    def _give(self, entry: Work | _Until | _Wait) -> None:
        queue = self._queue(self.current())
        queue.waiting.append(entry)
        queue.given += 1
        if self._late is not None:
            self._advance()

    def _advance(self) -> None:
        """Serves all streams but the late one, up to where they wait for it."""
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
                    # The peer may wait for what other streams of this rank have still to post.
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
        current = self.current()
        self._drain(current, self._queue(current).given)

    def abandon(self) -> None:
        self._queues.clear()
        self._served.clear()
