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
import ctypes
import fcntl
import os
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

import torch

from fuser.runtime.cuda_kernel import bind_primary_context
from fuser.support.errors import CommunicationError, UnsupportedError
from fuser.support.locks import make_lock
from multidevice.transports.base.checked_backend import stream_at
from multidevice.transports.memory.handles import Mapped, Name, name_of_piece, new_serial

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
        """Closes the files of what nobody here holds, and drops what peers have closed."""
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


# ----------------------------------------------------------------------
# Memory of one GPU that the processes of its host map; what streams do there: copies, flags.

T = TypeVar("T")
# Lets a stream wait until the flag at an address has come to a value, or writes it there.
WAIT, WRITE = "WAIT", "WRITE"
FlagOp = tuple[str, int, int]


class IpcMemory:
    """Memory of one GPU that the processes of its host can map.

    What a program keeps for its runs lies in pieces of its own, which are given back (`IpcPieces`).
    What each run takes in passing, and what is small, comes from a pool of torch's allocator that
    is never given back to the driver; within it, memory is reused as torch reuses any other.
    """

    def __init__(self, device: torch.device, hooks: Hooks | None = None) -> None:
        if device.type != "cuda":
            raise UnsupportedError(f"backend CUDA: {device} is no GPU")
        self.device = device
        calls = CudaCalls()
        self._cuda, self._call, self._check = calls.api, calls.call, calls.check
        self._copy = self._cuda.cuMemcpyAsync
        self._write, self._wait = self._cuda.cuStreamWriteValue32, self._cuda.cuStreamWaitValue32
        self._batch = self._cuda.cuStreamBatchMemOp
        self._pool: torch.cuda.MemPool | None = None
        self._pieces = IpcPieces(device, calls, hooks or Hooks())
        self.release, self.tidy = self._pieces.release, self._pieces.tidy
        self.find, self.close = self._pieces.find, self._pieces.close
        # What was mapped for good: others have its address.
        self._kept: list[Seen] = []

    def empty(self, nbytes: int) -> torch.Tensor:
        """Returns `nbytes` bytes of it, as uint8, for the current stream."""
        self._pool = self._pool or torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self._pool, device=self.device):
            made = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self.device)
        if self._pieces.name_at(made.data_ptr()) is None:
            begin, size = self._call("cuMemGetAddressRange", made.data_ptr())
            self._pieces.share(int(begin), int(size))
        return made[:nbytes]

    def lasting(self, nbytes: int) -> torch.Tensor:
        """Returns memory that is given back when nobody holds it; see `IpcPieces.allocate`."""
        if nbytes < UNIT_NBYTES // 2:
            return self.empty(nbytes)
        return self._pieces.allocate(nbytes)

    def name_of(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], int] | None:
        """See `PeerBackend.name_of`."""
        return self._pieces.name_at(tensor.data_ptr())

    def mapped(self, name: tuple[int, ...], peer: int) -> int:
        """Returns the address at which this process sees the memory of a peer, for good.

        Raises what `IpcPieces.find` does.
        """
        seen = self.find(name, peer)
        self._kept.append(seen)
        return seen.address

    def is_mapped(self, name: tuple[int, ...]) -> bool:
        """Returns whether the memory of a peer has been mapped before."""
        return name in self._pieces

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueues a copy; between two GPUs a copy engine carries it out."""
        self._check("cuMemcpyAsync", self._copy(target, source, nbytes, stream)[0])

    def set_flag(self, address: int, value: int, stream: int) -> None:
        """Lets the stream write a flag, after all that it has been given so far."""
        self._check("cuStreamWriteValue32", self._write(stream, address, value, 0)[0])

    def wait_flag(self, address: int, value: int, stream: int) -> None:
        """Lets the stream wait until a flag has come to a value."""
        # 0: greater or equal
        self._check("cuStreamWaitValue32", self._wait(stream, address, value, 0)[0])

    def use_flags(self, ops: Sequence[FlagOp], stream: int) -> None:
        """Lets the stream wait for flags and write others, in this order, at once."""
        self._check(
            "cuStreamBatchMemOp", self._batch(stream, len(ops), [*map(self._op, ops)], 0)[0]
        )

    def _op(self, op: FlagOp) -> Any:
        kind, address, value = op
        made = self._cuda.CUstreamBatchMemOpParams()
        types = self._cuda.CUstreamBatchMemOpType
        made.operation = getattr(types, f"CU_STREAM_MEM_OP_{kind}_VALUE_32")
        part = made.waitValue if kind == WAIT else made.writeValue
        part.operation, part.address = made.operation, self._cuda.CUdeviceptr(address)
        part.value, part.flags = value, 0
        return made

    def aside(self, act: Callable[[], object], stream: int) -> None:
        """Carries out what enqueues to a stream that is captured; what follows on the stream does
        not wait for it, though the graph does."""
        before = self.captured(stream)
        act()
        self._goes_on(stream, before)

    def beside(self, act: Callable[[], object], after: Sequence[object], stream: int) -> None:
        """Carries out what enqueues to a stream that is captured: behind the nodes `after`, beside
        what the stream has been given so far; what follows on the stream waits for both."""
        before = self.captured(stream)
        self._goes_on(stream, after)
        act()
        self._goes_on(stream, [*before, *self.captured(stream)])

    def captured(self, stream: int) -> list[Any]:
        """Returns the nodes that the next one on a captured stream will follow."""
        found = self._cuda.cuStreamGetCaptureInfo(stream)
        self._check("cuStreamGetCaptureInfo", found[0])
        return next(part for part in found if isinstance(part, list))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]

    def _goes_on(self, stream: int, after: Sequence[object]) -> None:
        """Has the next node on a captured stream follow these."""
        cuda, nodes = self._cuda, [*after]
        replace = cuda.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
        update = cuda.cuStreamUpdateCaptureDependencies
        try:
            (status,) = update(stream, nodes, None, len(nodes), int(replace))
        except TypeError:  # CUDA 12's
            (status,) = update(stream, nodes, len(nodes), int(replace))
        self._check("cuStreamUpdateCaptureDependencies", status)


def beside(device: torch.device, stream: int, act: Callable[[], T]) -> T:
    """Carries out, in a thread of its own and on a stream, what one that captures may not do."""
    done: list[T] = []
    failed: list[BaseException] = []

    def body() -> None:
        try:
            with torch.cuda.device(device), torch.cuda.stream(stream_at(stream, device)):
                bind_primary_context()
                done.append(act())
        except BaseException as error:  # raised below
            failed.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


# ----------------------------------------------------------------------
# Tensors over memory that torch has not made, on the device that they are said to be on.
#
# Torch looks up where a pointer lies; of memory of several GPUs side by side that is the first
# one's. DLPack says it. https://dmlc.github.io/dlpack/latest/c_api.html

_DEVICES = {"cpu": 1, "cuda": 2}
_UNSIGNED = 1
_NAME = b"dltensor"


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _DType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


class Holder:
    """What a tensor holds for as long as its memory is in use."""


# What tensors stand on: by the address of what torch was given.
_held: dict[int, Any] = {}


def _drop(address: int, held: dict[int, Any] = _held) -> None:
    held.pop(address, None)


_let_go = _Deleter(_drop)
# Torch may let go of memory when this module has gone already.
for _one in (_held, _let_go):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_one))


def raw_tensor(address: int, nbytes: int, device: torch.device, owner: object) -> torch.Tensor:
    """Returns so many bytes at an address as uint8; the tensor's memory holds `owner`."""
    sizes, strides = (ctypes.c_int64 * 1)(nbytes), (ctypes.c_int64 * 1)(1)
    where = _Device(_DEVICES[device.type], device.index or 0)
    made = _Tensor(address, where, 1, _DType(_UNSIGNED, 8, 1), sizes, strides, 0)
    managed = _Managed(made, None, _let_go)
    _held[ctypes.addressof(managed)] = managed, sizes, strides, owner
    return torch.from_dlpack(_capsule()(ctypes.addressof(managed), _NAME, None))


@cache
def _capsule() -> Any:
    made = ctypes.pythonapi.PyCapsule_New
    made.restype = ctypes.py_object
    made.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return made


# ----------------------------------------------------------------------
# The driver's API, whose calls are checked.


class CudaCalls:
    """Calls of the driver, by name; `api` has its types."""

    def __init__(self) -> None:
        self.api: Any = driver()
        self._success = self.api.CUresult.CUDA_SUCCESS

    def call(self, name: str, *args: object) -> Any:
        """Returns what a call returns behind its status. Raises `CommunicationError`."""
        status, *results = getattr(self.api, name)(*args)
        self.check(name, status)
        return results[0] if len(results) == 1 else results

    def check(self, name: str, status: Any) -> None:
        """Raises `CommunicationError` where a call has failed."""
        if status != self._success:
            raise CommunicationError(f"{name}: {status.name}")


@contextmanager
def driving(cuda: CudaCalls, device: torch.device) -> Generator[None]:
    """A context for calls on a device that another thread's capture need not hear of."""
    relaxed = cuda.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    with on_device(device):
        before = cuda.call("cuThreadExchangeStreamCaptureMode", relaxed)
        try:
            yield
        finally:
            cuda.call("cuThreadExchangeStreamCaptureMode", before)


@contextmanager
def on_device(device: torch.device) -> Generator[None]:
    """A context in which this thread drives a device."""
    with torch.cuda.device(device):
        bind_primary_context()
        yield


def driver() -> Any:
    """Returns the driver's API. Raises `UnsupportedError` without cuda-bindings."""
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise UnsupportedError(
            f"backend CUDA needs cuda-bindings ({error}): install fuser-hostir[cu12] or [cu13]"
        ) from error
