"""Peer copies among the processes of a host: buffers in shared memory, copied by the receiver.

A rank copies what it receives while it waits, for whatever it waits; so nobody has to wait for a
rank that is not in a communication itself. A receive of its own returns when the data is there:
streams of CPU ranks are served at once.
"""

from __future__ import annotations

import bisect
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import numpy
import torch

from fuser.errors import CommunicationError, InputError
from fuser.locks import make_lock
from multidevice.backends.base import Call, Exchange
from multidevice.backends.peer import NAME_WORDS, Numbered, Page, PeerBackend, Sent
from multidevice.control import Control
from multidevice.waiting import team_text

# Memory is taken from the system in pieces of at least this; what nobody touches costs nothing.
_CHUNK_NBYTES = 64 << 20
_ALIGNMENT_NBYTES = 256
# How many pieces of the peers' memory stay mapped.
_MAX_MAPPED = 64


@dataclass(eq=False)
class _Chunk:
    """A piece of shared memory: its file, its address, and the free ranges [start, stop)."""

    fd: int
    array: numpy.ndarray
    address: int
    free: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def take(self, nbytes: int) -> int:
        """Returns the beginning of a free range of this size; -1 when there is none."""
        for k, (start, stop) in enumerate(self.free):
            if stop - start >= nbytes:
                self.free[k : k + 1] = [(start + nbytes, stop)] if stop - start > nbytes else []
                return start
        return -1

    def give_back(self, start: int, nbytes: int) -> None:
        stop = start + nbytes
        k = bisect.bisect(self.free, (start, stop))
        if k < len(self.free) and self.free[k][0] == stop:
            stop = self.free.pop(k)[1]
        if k and self.free[k - 1][1] == start:
            start = self.free.pop(k - 1)[0]
            k -= 1
        self.free.insert(k, (start, stop))


class SharedMemory:
    """Memory of this process that the others of its host can map."""

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        self._addresses: list[int] = []
        # What is not held any more; noted by finalizers, which run anywhere.
        self._returned: deque[tuple[_Chunk, int, int]] = deque()
        self._mapped: dict[tuple[int, ...], torch.Tensor] = {}
        self._lock = make_lock()

    def empty(self, nbytes: int) -> torch.Tensor:
        """Returns `nbytes` bytes of it, as uint8, for as long as somebody holds them."""
        wanted = -(-max(nbytes, 1) // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
        with self._lock:
            while self._returned:
                chunk, start, size = self._returned.popleft()
                chunk.give_back(start, size)
            chunk, start = self._place(wanted)
        part = chunk.array[start : start + nbytes]
        # A tensor holds the array that it was made of for as long as its memory is in use.
        weakref.finalize(part, self._returned.append, (chunk, start, wanted))
        return _tensor(part)

    def _place(self, nbytes: int) -> tuple[_Chunk, int]:
        for chunk in self._chunks:
            start = chunk.take(nbytes)
            if start >= 0:
                return chunk, start
        # Powers of two, so that slowly growing sizes find room where smaller ones were.
        chunk = _make_chunk(max(1 << (nbytes - 1).bit_length(), _CHUNK_NBYTES))
        place = bisect.bisect(self._addresses, chunk.address)
        self._chunks.insert(place, chunk)
        self._addresses.insert(place, chunk.address)
        return chunk, chunk.take(nbytes)

    def name_of(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], int] | None:
        """See `PeerBackend.name_of`."""
        address = tensor.data_ptr()
        place = bisect.bisect(self._addresses, address) - 1
        if place < 0:
            return None
        chunk = self._chunks[place]
        at = address - chunk.address
        if at >= chunk.array.nbytes:
            return None
        name = os.getpid(), chunk.fd, chunk.array.nbytes
        return (*name, *(0,) * (NAME_WORDS - len(name))), at

    def mapped(self, name: tuple[int, ...], peer: int) -> torch.Tensor:
        """Returns the memory of a peer, as uint8.

        Raises `CommunicationError` when its process is gone.
        """
        found = self._mapped.pop(name, None)
        if found is None:
            pid, fd, nbytes = name[:3]
            try:
                opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
                try:
                    found = _tensor(_array(opened, nbytes))
                finally:
                    os.close(opened)
            except OSError as error:
                raise CommunicationError(
                    f"rank {peer}'s memory cannot be mapped: {error}"
                ) from None
        self._mapped[name] = found
        while len(self._mapped) > _MAX_MAPPED:
            del self._mapped[next(iter(self._mapped))]
        return found

    def close(self) -> None:
        """Closes the files; tensors that are still held keep their memory."""
        self._mapped.clear()
        for chunk in self._chunks:
            with suppress(OSError):
                os.close(chunk.fd)
        self._chunks.clear()
        self._addresses.clear()


def _make_chunk(nbytes: int) -> _Chunk:
    fd = os.memfd_create("fuser-peer")
    os.ftruncate(fd, nbytes)
    array = _array(fd, nbytes)
    return _Chunk(fd, array, array.ctypes.data, [(0, nbytes)])


def _tensor(array: numpy.ndarray) -> torch.Tensor:
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]


def _array(fd: int, nbytes: int) -> numpy.ndarray:
    return numpy.frombuffer(mmap.mmap(fd, nbytes), dtype=numpy.uint8)


class _Copies:
    """Transfers in steps: those of each are posted when those of the last one have ended."""

    def __init__(
        self,
        backend: CpuPeerBackend,
        page: Page,
        steps: Iterator[list[Numbered]],
        call: Call | Exchange,
    ) -> None:
        self._backend, self._page, self._steps, self._call = backend, page, steps, call
        self.run = backend.control.run
        self._sent: list[tuple[Sent, Numbered]] = []
        self._open: list[Numbered] = []
        self._ended = False
        self._error: Exception | None = None
        # A wait for a free slot lets all communications go on, this one among them.
        self._is_posting = False
        self._begin_step()

    def _begin_step(self) -> None:
        step = next(self._steps, None)
        if step is None:
            self._ended = True
            return
        self._open = [one for one in step if one.transfer.kind == "recv"]
        self._is_posting = True
        try:
            self._sent = [
                (self._backend.posted(self._page, one, self._call), one)
                for one in step
                if one.transfer.kind == "send"
            ]
        finally:
            self._is_posting = False

    def done(self) -> bool:
        """Copies what has come, goes on as far as possible, and returns whether all has ended."""
        try:
            while not self._ended:
                if self._is_posting:
                    return False
                self._open = [o for o in self._open if not self._backend.received(self._page, o)]
                self._sent = [s for s in self._sent if not self._page.answered(s[0])]
                if self._open or self._sent:
                    return False
                self._begin_step()
        except Exception as error:
            # Whoever waits for this communication hears of it, not who happened to look.
            self._ended, self._error = True, error
        return True

    def _missing(self) -> list[Numbered]:
        """Return what a peer has still to do its half of."""
        return [*self._open, *(one for _, one in self._sent)]

    def receive(self) -> None:
        """Returns when all that this step receives is there."""

        def is_there() -> bool:
            return self.done() or not self._open

        if not is_there():
            self._backend.finish(is_there, self._call, self._missing())

    def wait(self) -> None:
        """See `Work.wait`."""
        if not self._ended:
            self._backend.finish(self.done, self._call, self._missing())
        self._backend.control.works.discard(self)
        if self._error is not None:
            raise self._error

    def synchronize(self) -> None:
        """See `Work.synchronize`."""
        self.wait()


class CpuPeerBackend(PeerBackend):
    """Peer copies of CPU tensors."""

    def __init__(self, control: Control) -> None:
        super().__init__(control)
        self._memory = SharedMemory()

    def _check_device(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu":
            raise InputError(f"backend CUDA of CPU ranks takes CPU tensors, not on {tensor.device}")

    def empty(self, nbytes: int) -> torch.Tensor:
        return self._memory.empty(nbytes)

    def name_of(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], int] | None:
        return self._memory.name_of(tensor)

    def _carry_out(
        self, page: Page, steps: Iterable[list[Numbered]], call: Call | Exchange
    ) -> _Copies:
        work = _Copies(self, page, iter(steps), call)
        # Even if nobody waits for it, the others need it.
        works = self.control.works
        if len(works) >= 64:
            works -= {old for old in works if old.done()}
        works.add(work)
        if isinstance(call, Exchange):
            # As on a GPU: what a rank posts next comes after what it receives.
            work.receive()
        return work

    def posted(self, page: Page, one: Numbered, call: Call | Exchange) -> Sent:
        """Posts a send."""
        return self._post(page, one, call)

    def received(self, page: Page, one: Numbered) -> bool:
        """Copies what a peer has posted; returns whether it had."""
        peer, tensor = one.transfer.peer, one.transfer.tensor.detach()
        record = page.find(peer, one.tag)
        if record is None:
            return False
        self._check_fits(page, one, record)
        if record.nbytes:
            memory = self._memory.mapped(record.name, peer)
            source = memory[record.offset : record.offset + record.nbytes]
            # Of one element, any stride counts as contiguous, also 0.
            flat = tensor.as_strided((tensor.numel(),), (1,))
            flat.copy_(source.view(flat.dtype))
        page.answer(peer, record.slot, one.tag)
        self.control.wake((peer,))
        return True

    def finish(
        self, done: Callable[[], bool], call: Call | Exchange, open_ones: list[Numbered]
    ) -> None:
        """Waits until a work has ended."""
        self._poll(done, call, open_ones)

    def drain(self) -> None:
        """Serves the peers that still copy out of this rank's memory: those of the last run, since
        a run that others follow has ended, or nobody will copy what it sent."""
        works, run = self.control.works, self.control.run
        mine = [w for w in works if isinstance(w, _Copies) and w.run is run]
        if self._closed or not mine:
            return
        with suppress(CommunicationError):
            self.control.poll_until(
                lambda: all(w.done() for w in mine),
                what=lambda: f"the last copies of ranks {team_text(self.control.world)}",
                needs=list,
            )

    def close(self) -> None:
        super().close()
        self._memory.close()
