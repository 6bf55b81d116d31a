"""Memory of one GPU in pieces that the processes of its host map, each for as long as it is used.

A piece is one allocation of the driver; its file (`mapped`) has the handle by which peers map it.
The driver must not free what anybody has mapped. So a peer keeps a shared lock on the file until it
has unmapped the piece (the system drops the locks of a process that ends); the owner closes the
file under its name when nobody here holds the piece, and frees that when it gets the lock alone.

Peers unmap what was given back when nothing there can read it any more: a graph that may holds what
it was captured with. Both wait until the device has done all that it was given, at the beginning of
a run: then it has nothing that a peer must still answer.
"""

from __future__ import annotations

import bisect
import fcntl
import os
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from fuser.support.errors import CommunicationError, UnsupportedError
from fuser.support.locks import make_lock
from multidevice.transports.memory.cuda_calls import CudaCalls, driving
from multidevice.transports.memory.handles import Mapped, Name, name_of_piece, new_serial
from multidevice.transports.memory.raw_tensor import Holder, raw_tensor

# The driver hands out memory in units of this; less of it would share its handle with others.
UNIT_NBYTES = 2 << 20
_HANDLE = struct.Struct("<8Q")
# Runs in which the owner of a piece looks whether its peers have unmapped it; later, when a program
# goes.
_LOOKS = 64
# Pieces that were given back and are kept by graphs, before these are dropped.
_MAX_IN_GRAPHS = 8
# How long peers have to unmap what was given back, where there is no memory for more.
_NO_MEMORY_S = 2.0


@dataclass(eq=False)
class _Piece:
    """A piece of this process: its file, where it lies, and, once it is given back, the file under
    another number, for its lock."""

    serial: int
    fd: int
    begin: int
    nbytes: int
    lock: int = -1

    def __post_init__(self) -> None:
        # Once: the number of a file that is closed may be another one's.
        self.close = weakref.finalize(self, os.close, self.fd)
        self.close.atexit = False


@dataclass(eq=False)
class Seen:
    """Where this process sees a piece of a peer. Who may still read it holds this."""

    address: int


@dataclass
class Hooks:
    """What the user of the memory does for it: `is_idle` waits until the device has done all that
    it was given (False where that cannot be told now); `drop_graphs` drops all graphs; `told`
    returns what tells whether peers have mapped all that they have been told of until now."""

    is_idle: Callable[[], bool] = field(default=lambda: False)
    drop_graphs: Callable[[], None] = field(default=lambda: None)
    told: Callable[[], Callable[[], bool]] = field(default=lambda: lambda: True)


class IpcPieces:
    """The pieces of this process on one device, and those of its peers."""

    def __init__(self, device: torch.device, cuda: CudaCalls, hooks: Hooks) -> None:
        self.device, self._cuda, self._hooks = device, cuda, hooks
        # Beginnings of this process's pieces, and the pieces.
        self._begins: list[int] = []
        self._pieces: list[_Piece] = []
        # Nobody holds these any more: noted by finalizers, which run anywhere; those that peers may
        # have to map yet; and those that wait for peers to unmap them.
        self._returned: deque[_Piece] = deque()
        self._told: list[tuple[list[_Piece], Callable[[], bool]]] = []
        self._retired: list[_Piece] = []
        self._closed = self._looks = 0
        self._is_untidy = False
        self._mapped = Mapped(self._open, on_forgotten=self.release)
        self._alive: weakref.WeakSet[Seen] = weakref.WeakSet()
        # What nobody here can read any more: address, file.
        self._unused: deque[tuple[int, int]] = deque()
        self._lock = make_lock()

    # ------------------------------------------------------------ of this process
    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns so many bytes in a piece of their own, as uint8.

        Raises `torch.OutOfMemoryError`.
        """
        size = -(-nbytes // UNIT_NBYTES) * UNIT_NBYTES
        with driving(self._cuda, self.device):
            begin = self._new(size)
            try:
                piece = self.share(begin, size)
            except BaseException:
                self._cuda.call("cuMemFree", begin)
                raise
        made = Holder()
        weakref.finalize(made, self._returned.append, piece).atexit = False
        return raw_tensor(piece.begin, nbytes, self.device, made)

    def _new(self, size: int) -> int:
        stop = 0.0
        while True:
            try:
                return int(self._cuda.call("cuMemAlloc", size))
            except CommunicationError as error:
                # What others of this process keep for later, and what peers have not unmapped yet.
                torch.cuda.empty_cache()
                stop = stop or time.monotonic() + _NO_MEMORY_S
                if time.monotonic() > stop:
                    raise torch.OutOfMemoryError(
                        f"no {size} bytes for peers to map on {self.device} ({error})"
                    ) from None
                self._is_untidy = True
                self.tidy()

    def share(self, begin: int, nbytes: int) -> _Piece:
        """Lets peers map an allocation of the driver. Raises `UnsupportedError` where it cannot."""
        try:
            handle = self._cuda.call("cuIpcGetMemHandle", begin)
        except CommunicationError as error:
            raise UnsupportedError(
                f"backend CUDA: memory on {self.device} cannot be mapped by other processes "
                f"({error}); torch's expandable segments (PYTORCH_CUDA_ALLOC_CONF) cannot"
            ) from None
        fd = os.memfd_create("fuser-gpu")
        os.write(fd, bytes(handle.reserved))
        piece = _Piece(new_serial(), fd, begin, nbytes)
        with self._lock:
            place = bisect.bisect(self._begins, begin)
            self._begins.insert(place, begin)
            self._pieces.insert(place, piece)
        return piece

    def name_at(self, address: int) -> tuple[Name, int] | None:
        """Returns how peers call the memory at an address, and the bytes from its beginning."""
        with self._lock:
            place = bisect.bisect(self._begins, address) - 1
            if place < 0:
                return None
            piece = self._pieces[place]
        at = address - piece.begin
        if at >= piece.nbytes:
            return None
        return name_of_piece(piece.fd, piece.nbytes, piece.serial, self._closed), at

    # ------------------------------------------------------------ of peers
    def __contains__(self, name: Name) -> bool:
        return name in self._mapped

    def find(self, name: Name, peer: int) -> Seen:
        """Returns where this process sees a piece of a peer; maps it at its first use.

        Raises `CommunicationError` when its process is gone, `UnsupportedError` where the GPUs have
        no access to each other.
        """
        try:
            return self._mapped.find(name, peer)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"backend CUDA: {self.device} cannot map the memory of rank {peer}'s GPU "
                f"({error}): use NCCL"
            ) from None

    def _open(self, fd: int, nbytes: int) -> Seen:
        lock = os.dup(fd)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            handle = self._cuda.api.CUipcMemHandle()
            handle.reserved = os.pread(fd, _HANDLE.size, 0)
            lazy = self._cuda.api.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
            with driving(self._cuda, self.device):
                address = int(self._cuda.call("cuIpcOpenMemHandle", handle, int(lazy.value)))
        except BaseException as error:
            os.close(lock)
            if isinstance(error, CommunicationError):
                raise UnsupportedError(str(error)) from None
            raise
        seen = Seen(address)
        self._alive.add(seen)
        weakref.finalize(seen, self._unused.append, (address, lock)).atexit = False
        return seen

    # ------------------------------------------------------------ what nobody has any more
    def release(self) -> None:
        """Notes that a user has gone, here or at a peer. Finalizers may call it."""
        self._is_untidy = True

    def tidy(self) -> None:
        """Gives back what nobody here holds, unmaps what peers have given back, and frees what they
        have unmapped. Only called where nothing is under way that peers have still to answer."""
        if not (self._is_untidy or self._returned or self._told or self._unused or self._looks):
            return
        with self._lock:
            if self._is_untidy or self._returned or self._told:
                self._retire()
            elif self._looks:
                self._looks -= 1
            freed = [piece for piece in self._retired if _is_unmapped(piece)]
            unmapped = [self._unused.popleft() for _ in range(len(self._unused))]
        if not (freed or unmapped):
            return
        is_idle = False
        try:
            is_idle = self._hooks.is_idle()
        finally:
            if not is_idle:
                self._unused.extend(unmapped)
        if is_idle:
            self._unmap(unmapped)
            self._free(freed)

    def _retire(self) -> None:
        """Close the files of what nobody here holds, and drop what peers have closed."""
        if self._returned:
            returned = [self._returned.popleft() for _ in range(len(self._returned))]
            self._told.append((returned, self._hooks.told()))
        told, self._told = self._told, []
        known: list[_Piece] = []
        for pieces, is_known in told:
            if is_known():
                known += pieces
            else:
                self._told.append((pieces, is_known))
        for piece in known:
            place = self._pieces.index(piece)
            del self._pieces[place], self._begins[place]
            piece.lock = os.dup(piece.fd)
            piece.close()
            self._closed += 1
            self._retired.append(piece)
        self._looks = _LOOKS if self._retired else 0
        self._mapped.forget_closed()
        self._is_untidy = False  # what it has dropped is known
        if len(self._alive) - len(self._mapped) > _MAX_IN_GRAPHS:
            self._hooks.drop_graphs()

    def _unmap(self, unmapped: list[tuple[int, int]]) -> None:
        with driving(self._cuda, self.device):
            for address, lock in unmapped:
                self._cuda.call("cuIpcCloseMemHandle", address)
                os.close(lock)

    def _free(self, freed: list[_Piece]) -> None:
        with driving(self._cuda, self.device):
            for piece in freed:
                self._cuda.call("cuMemFree", piece.begin)
                os.close(piece.lock)
                self._retired.remove(piece)
        if not self._retired:
            self._looks = 0

    def close(self) -> None:
        """Unmaps the memory of peers, at the end of the process."""
        self._mapped.clear()
        for seen in list(self._alive):
            self._unused.append((seen.address, -1))
        if not self._unused:
            return
        with driving(self._cuda, self.device):
            for address, _ in list(self._unused):
                with suppress(CommunicationError):
                    self._cuda.call("cuIpcCloseMemHandle", address)
        self._unused.clear()


def _is_unmapped(piece: _Piece) -> bool:
    """Whether no peer has a piece mapped that was given back."""
    try:
        fcntl.flock(piece.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
