"""Memory that the processes of a host share, allocated in files without a name.

The parts of a tensor that several ranks store (shards) may also be mapped at consecutive addresses,
as one tensor (`SharedMemory.row`). Each part must then consist of whole pages of memory.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy
import torch

from fuser.support.locks import make_lock
from multidevice.transports.memory.handles import (
    Mapped,
    MemoryLocation,
    name_of_piece,
    new_serial,
    not_mapped,
)

# Memory is allocated from the system in pieces of at least this size; untouched pages cost nothing.
_CHUNK_NBYTES = 64 << 20
_ALIGNMENT_NBYTES = mmap.PAGESIZE
# How many pieces of the peers' memory stay mapped, and how many rows of shards.
_MAX_MAPPED, _MAX_ROWS = 64, 16
# Constants that the module `mmap` lacks.
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000


@dataclass(eq=False)
class _Chunk:
    """One large allocation of shared memory of this process, from which several tensors are
    allocated.

    Other processes map it through a file.

    - `serial`: a number that no other allocation of this process has.
    - `fd`: the descriptor of the file.
    - `array`, `address`: the memory, and its address.
    - `free`: the free ranges [start, stop) in it, in bytes.
    """

    serial: int
    fd: int
    array: numpy.ndarray
    address: int
    free: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def __post_init__(self) -> None:
        # Only once: after that, the number may belong to another file.
        self.close = weakref.finalize(self, os.close, self.fd)
        self.close.atexit = False

    @property
    def is_free(self) -> bool:
        return self.free == [(0, self.array.nbytes)]

    def take(self, nbytes: int) -> int:
        """Allocates a range of `nbytes` bytes in this allocation; returns its start.

        Returns -1 if no free range is large enough.
        """
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
    """Allocates memory that the other processes of the host can map, and maps memory of others."""

    unit, unit_nbytes, why_not = "pages", mmap.PAGESIZE, ""

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        self._addresses: list[int] = []
        # Ranges without users, recorded by finalizers, which may run at any time.
        self._returned: deque[tuple[_Chunk, int, int]] = deque()
        # The mapped memory of peers.
        self._mapped = Mapped(lambda fd, nbytes: _tensor(_array(fd, nbytes)), limit=_MAX_MAPPED)
        # How many of its pieces this process has closed, and whether `tidy` has work to do.
        self._closed = 0
        self._is_untidy = False
        self._rows: dict[tuple[object, ...], torch.Tensor] = {}
        self._lock = make_lock()

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocates `nbytes` bytes of shared memory, as a uint8 tensor.

        The memory is reused when the tensor is freed.
        """
        wanted = -(-max(nbytes, 1) // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
        self.tidy()
        with self._lock:
            self._take_back()
            chunk, start = self._place(wanted)
        part = chunk.array[start : start + nbytes]
        # A tensor holds the array that it was made of for as long as its memory is in use.
        weakref.finalize(part, self._returned.append, (chunk, start, wanted))
        return _tensor(part)

    def _take_back(self) -> None:
        while self._returned:
            chunk, start, size = self._returned.popleft()
            chunk.give_back(start, size)

    def release(self) -> None:
        """Records that a host program was deleted, so that the next `tidy` frees memory without
        users.

        Finalizers may call this before the tensors of the program are freed.
        """
        self._is_untidy = True

    def tidy(self) -> None:
        """Frees shared memory that no tensor uses: closes its files, so that it returns to the
        system.

        Does nothing if `release` was not called since the previous `tidy`. Data that another rank
        has not copied yet still counts as used. If another process has mapped the memory, the
        memory exists longer: until that process finds that the file was closed, and unmaps it, too.
        """
        if not self._is_untidy:
            return
        self._is_untidy = False
        with self._lock:
            self._take_back()
            self._rows.clear()
            for chunk in [c for c in self._chunks if c.is_free]:
                place = self._chunks.index(chunk)
                del self._chunks[place], self._addresses[place]
                chunk.close()
                self._closed += 1
        self._mapped.forget_closed()

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
        """Returns the name by which other processes map a tensor's memory, and the offset in bytes.

        Returns None if the tensor is not in shared memory of this process.
        """
        address = tensor.data_ptr()
        with self._lock:
            place = bisect.bisect(self._addresses, address) - 1
            if place < 0:
                return None
            chunk = self._chunks[place]
        at = address - chunk.address
        if at >= chunk.array.nbytes:
            return None
        return name_of_piece(chunk.fd, chunk.array.nbytes, chunk.serial, self._closed), at

    def mapped(self, name: tuple[int, ...], peer: int) -> torch.Tensor:
        """Returns a part of the shared memory of the rank `peer` as a uint8 tensor; the first call
        maps it.

        `name` is the name that the rank has sent. Raises `CommunicationError` if the process of the
        rank has ended.
        """
        return self._mapped.find(name, peer)

    def row(self, places: Sequence[MemoryLocation], nbytes: int) -> torch.Tensor:
        """Maps `nbytes` bytes at each location in `places`, at consecutive addresses, as one uint8
        tensor.

        A location is a rank, the name of memory that the rank shares, and an offset. The tensor can
        only be read. Each location must be at the start of a memory page, and `nbytes` a multiple
        of the page size. Raises `CommunicationError` if a process has ended.
        """
        key = (*((place.name[:4], place.at) for place in places), nbytes)
        found = self._rows.pop(key, None)
        if found is None:
            found = _row(places, nbytes)
        self._rows[key] = found
        while len(self._rows) > _MAX_ROWS:
            del self._rows[next(iter(self._rows))]
        return found

    def close(self) -> None:
        """Closes the files of all shared memory of this process; tensors that exist keep their
        memory.
        """
        self._mapped.clear()
        self._rows.clear()
        for chunk in self._chunks:
            chunk.close()
        self._chunks.clear()
        self._addresses.clear()


def _make_chunk(nbytes: int) -> _Chunk:
    fd = os.memfd_create("fuser-peer")
    os.ftruncate(fd, nbytes)
    array = _array(fd, nbytes)
    return _Chunk(new_serial(), fd, array, array.ctypes.data, [(0, nbytes)])


def _tensor(array: numpy.ndarray) -> torch.Tensor:
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]


def _array(fd: int, nbytes: int) -> numpy.ndarray:
    return numpy.frombuffer(mmap.mmap(fd, nbytes), dtype=numpy.uint8)


def _row(places: Sequence[MemoryLocation], nbytes: int) -> torch.Tensor:
    """Maps parts of several processes' files at consecutive addresses; returns one uint8 tensor.

    The memory is unmapped when the tensor is freed.
    """
    total = nbytes * len(places)
    start = _map(None, total, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    memory = (ctypes.c_uint8 * total).from_address(start)
    weakref.finalize(memory, _libc().munmap, ctypes.c_void_p(start), ctypes.c_size_t(total))
    for k, place in enumerate(places):
        pid, fd = place.name[:2]
        try:
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
            try:
                fixed = mmap.MAP_SHARED | _MAP_FIXED
                _map(start + k * nbytes, nbytes, mmap.PROT_READ, fixed, opened, place.at)
            finally:
                os.close(opened)
        except OSError as error:
            raise not_mapped(place.rank, error) from None
    return torch.frombuffer(memory, dtype=torch.uint8)


def _map(at: int | None, nbytes: int, access: int, flags: int, fd: int, offset: int) -> int:
    """Calls the system's mmap function, because Python's mmap cannot choose an address.

    Returns the address of the mapped memory. `at` is the wanted address, None for any. The other
    arguments are those of mmap.
    """
    if flags & mmap.MAP_ANONYMOUS:
        flags |= _MAP_NORESERVE
    found = _libc().mmap(at, nbytes, access, flags, fd, offset)
    if found in (None, ctypes.c_void_p(-1).value):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return found


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    size = ctypes.c_size_t
    libc.mmap.argtypes = (ctypes.c_void_p, size, *[ctypes.c_int] * 3, ctypes.c_int64)
    libc.munmap.argtypes = (ctypes.c_void_p, size)
    return libc
