"""GPU memory that the other processes of the host map while they use it (CUDA IPC).

Memory is shared in pieces. A piece is one allocation of the CUDA driver. Each piece has a file
without a name (see `handles`), which contains the handle by which other processes map the piece.
The owner must not free a piece that another process has mapped. Therefore:

- Another process holds a shared lock on the file until it has unmapped the piece. The system
  releases the locks of a process that ends.
- When no tensor of the owner uses the piece, the owner withdraws it: the owner closes the
  descriptor by which other processes find the file. It frees the piece when it gets an exclusive
  lock on the file, through a second descriptor.

Another process unmaps a withdrawn piece when no object of that process refers to the piece any
more. A captured CUDA graph that may read the piece refers to such an object. Before memory is
unmapped or freed, a process waits until its GPU has done all its work. It does so at the beginning
of a run: then no process waits for work of another GPU, so the wait ends.
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

# The driver allocates memory in units of this size; smaller allocations would share a handle.
UNIT_NBYTES = 2 << 20
_HANDLE = struct.Struct("<8Q")
# In how many runs the owner of a piece checks whether its peers have unmapped it. After that, it
# checks only when a program is deleted.
_LOOKS = 64
# How many returned pieces may be kept alive by graphs before the graphs are dropped.
_MAX_IN_GRAPHS = 8
# How long peers have to unmap returned pieces when there is not enough memory.
_NO_MEMORY_S = 2.0


@dataclass(eq=False)
class _Piece:
    """A piece of GPU memory that this process has allocated and other processes can map.

    Other processes map it through a file.

    - `serial`: a number that no other piece of this process has.
    - `fd`: the descriptor of the file, by which other processes find the file.
    - `begin`, `nbytes`: the address and the size of the piece.
    - `lock`: -1 as long as a tensor uses the piece. Afterwards a second descriptor of the file:
      this process can lock the file exclusively when no other process maps the piece any more.
    """

    serial: int
    fd: int
    begin: int
    nbytes: int
    lock: int = -1

    def __post_init__(self) -> None:
        # Only once: after that, the number may belong to another file.
        self.close = weakref.finalize(self, os.close, self.fd)
        self.close.atexit = False


@dataclass(eq=False)
class Seen:
    """A piece of another process's GPU memory that is mapped in this process, at `address`.

    A piece is one allocation of the CUDA driver. Every object that may still read the piece holds a
    reference to this `Seen`. The piece is unmapped after the last reference is gone.
    """

    address: int


@dataclass
class Hooks:
    """Functions of the peer copy backend that the allocator of mapped GPU memory calls.

    - `is_idle`: waits until the GPU has done all its work; returns False if that is impossible now.
    - `drop_graphs`: drops all CUDA graphs, which may keep memory alive.
    - `told`: called when memory has no users. Returns a function that returns True when the memory
      may be withdrawn: when the other ranks have mapped all memory that this rank announced to them
      before the call of `told`.
    """

    is_idle: Callable[[], bool] = field(default=lambda: False)
    drop_graphs: Callable[[], None] = field(default=lambda: None)
    told: Callable[[], Callable[[], bool]] = field(default=lambda: lambda: True)


class IpcPieces:
    """The GPU memory that processes share by CUDA IPC, in pieces: allocations of the CUDA driver.

    The object has the pieces that this process has allocated on one device, and the pieces of other
    processes that it has mapped.
    """

    def __init__(self, device: torch.device, cuda: CudaCalls, hooks: Hooks) -> None:
        self.device, self._cuda, self._hooks = device, cuda, hooks
        # The start addresses of this process's pieces, and the pieces.
        self._begins: list[int] = []
        self._pieces: list[_Piece] = []
        # Pieces without users: recorded by finalizers, which may run at any time; those that peers
        # may still have to map; and those that peers have not unmapped yet.
        self._returned: deque[_Piece] = deque()
        self._told: list[tuple[list[_Piece], Callable[[], bool]]] = []
        self._retired: list[_Piece] = []
        self._closed = self._looks = 0
        self._is_untidy = False
        self._mapped = Mapped(self._open, on_forgotten=self.release)
        self._alive: weakref.WeakSet[Seen] = weakref.WeakSet()
        # Mapped pieces that nothing in this process can read any more: (address, file).
        self._unused: deque[tuple[int, int]] = deque()
        self._lock = make_lock()

    # ------------------------------------------------------------ of this process
    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocates `nbytes` bytes of GPU memory that other processes can map, as a uint8 tensor.

        The memory is a separate allocation of the CUDA driver. Raises `torch.OutOfMemoryError` if
        there is not enough memory.
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
                # Free the caches of this process, and wait for pieces that peers have not unmapped
                # yet.
                torch.cuda.empty_cache()
                stop = stop or time.monotonic() + _NO_MEMORY_S
                if time.monotonic() > stop:
                    raise torch.OutOfMemoryError(
                        f"cannot allocate {size} bytes that other ranks can map on {self.device}, "
                        f"because there is not enough memory ({error})"
                    ) from None
                self._is_untidy = True
                self.tidy()

    def share(self, begin: int, nbytes: int) -> _Piece:
        """Registers an allocation of the CUDA driver as memory that other processes can map. The
        allocation has `nbytes` bytes from the address `begin` on.

        Raises `UnsupportedError` if other processes cannot map the allocation.
        """
        try:
            handle = self._cuda.call("cuIpcGetMemHandle", begin)
        except CommunicationError as error:
            raise UnsupportedError(
                f"peer copies: memory on {self.device} cannot be mapped by other processes "
                f"({error}): if PYTORCH_CUDA_ALLOC_CONF enables torch's expandable segments, "
                "disable them"
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
        """Returns the name by which other processes map the memory at `address`, and the offset in
        bytes.

        Returns None if this process does not share memory at the address.
        """
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
        """Returns memory of the rank `peer`, mapped in this process; the first call maps it.

        `name` is the name of the memory that the rank has sent.

        Raises:
            CommunicationError: the process of the rank has ended.
            UnsupportedError: the GPUs cannot access each other.
        """
        try:
            return self._mapped.find(name, peer)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"peer copies: {self.device} cannot map the memory of rank {peer}'s GPU ({error}): "
                "use NCCL instead"
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
        """Records that a user of shared GPU memory was deleted, so that the next `tidy` frees
        unused memory.

        Finalizers may call this method, because it frees nothing itself.
        """
        self._is_untidy = True

    def tidy(self) -> None:
        """Unmaps memory that other processes no longer share, and frees own memory that no process
        maps.

        The method waits for the GPU. The caller ensures that no other rank waits for work of this
        GPU, because both could then wait for each other.
        """
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
        """Withdraws own memory that no tensor uses, and drops the memory that other processes have
        withdrawn.

        To withdraw a piece of memory, its owner closes the file through which it shares the piece;
        other processes see this and unmap the piece. `tidy` then frees own pieces that no process
        maps, and unmaps dropped ones.
        """
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
        self._is_untidy = False  # all dropped pieces are recorded now
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
        """Unmaps all memory of other processes, at the end of this process."""
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
    """Returns whether no other process maps the shared memory `piece`, so that it may be freed.

    Each process that maps it holds a lock on its file. The result is True if this process gets the
    exclusive lock.
    """
    try:
        fcntl.flock(piece.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


# ----------------------------------------------------------------------
# Memory of one GPU that the processes of its host map, and the copies and flags of streams in it.

T = TypeVar("T")
# Kinds of flag operations: the stream waits until the flag at an address reaches a value, or writes
# it.
WAIT, WRITE = "WAIT", "WRITE"
FlagOp = tuple[str, int, int]


class IpcMemory:
    """Memory of one GPU that the other processes of the host can map, and copies and flags in it.

    A flag is a number in memory by which one GPU signals another one. Buffers that a program keeps
    for its runs are separate allocations of the driver, which are freed after use (`IpcPieces`).
    Temporary and small allocations come from a pool of torch's allocator. The pool is never
    returned to the driver, but torch reuses its memory as usual.
    """

    def __init__(self, device: torch.device, hooks: Hooks | None = None) -> None:
        if device.type != "cuda":
            raise UnsupportedError(f"peer copies by CUDA IPC need a CUDA device, found {device}")
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
        # Pieces that stay mapped, because other objects have their addresses.
        self._kept: list[Seen] = []

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocates `nbytes` bytes from torch's memory pool, as a uint8 tensor, for the current
        stream.
        """
        self._pool = self._pool or torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self._pool, device=self.device):
            made = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self.device)
        if self._pieces.name_at(made.data_ptr()) is None:
            begin, size = self._call("cuMemGetAddressRange", made.data_ptr())
            self._pieces.share(int(begin), int(size))
        return made[:nbytes]

    def lasting(self, nbytes: int) -> torch.Tensor:
        """Allocates GPU memory for a buffer that a program keeps for many runs, as a uint8 tensor.

        The memory is freed when it has no users. Small buffers come from the pool instead
        (`empty`).
        """
        if nbytes < UNIT_NBYTES // 2:
            return self.empty(nbytes)
        return self._pieces.allocate(nbytes)

    def name_of(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], int] | None:
        """Returns the name by which other processes map a tensor's memory, and the offset in bytes.

        Returns None if other processes cannot map the memory.
        """
        return self._pieces.name_at(tensor.data_ptr())

    def mapped(self, name: tuple[int, ...], peer: int) -> int:
        """Returns the address at which this process sees the memory `name` of the rank `peer`.

        The memory stays mapped until the process ends. Raises the same errors as `IpcPieces.find`.
        """
        seen = self.find(name, peer)
        self._kept.append(seen)
        return seen.address

    def is_mapped(self, name: tuple[int, ...]) -> bool:
        """Returns whether this process has already mapped the memory `name` of another rank."""
        return name in self._pieces

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueues a copy of `nbytes` bytes on a CUDA stream, from the address `source` to the
        address `target`.

        Between two GPUs, a copy engine executes the copy.
        """
        self._check("cuMemcpyAsync", self._copy(target, source, nbytes, stream)[0])

    def set_flag(self, address: int, value: int, stream: int) -> None:
        """Enqueues a write of `value` to the flag at `address`, after all earlier work of the
        stream.

        A flag is a number in memory by which one GPU signals another one.
        """
        self._check("cuStreamWriteValue32", self._write(stream, address, value, 0)[0])

    def wait_flag(self, address: int, value: int, stream: int) -> None:
        """Makes later work of a CUDA stream wait until the flag at `address` is at least `value`.

        A flag is a number in memory by which one GPU signals another one.
        """
        # 0: greater or equal
        self._check("cuStreamWaitValue32", self._wait(stream, address, value, 0)[0])

    def use_flags(self, ops: Sequence[FlagOp], stream: int) -> None:
        """Enqueues several waits for flags and writes of flags as one operation, in the given
        order.

        Each of `ops` is (`WAIT` or `WRITE`, address of the flag, value). A flag is a number in
        memory by which one GPU signals another one.
        """
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
        """Captures the work that `act` enqueues as a side branch of a CUDA graph.

        Later work of the captured stream does not wait for this work, but the end of the graph
        does.
        """
        before = self.captured(stream)
        act()
        self._goes_on(stream, before)

    def beside(self, act: Callable[[], object], after: Sequence[object], stream: int) -> None:
        """Captures the work that `act` enqueues as a branch of a CUDA graph that runs parallel to
        the stream's earlier work.

        The branch begins after the graph nodes `after`. Later work of the stream waits both for the
        branch and for the stream's earlier work.
        """
        before = self.captured(stream)
        self._goes_on(stream, after)
        act()
        self._goes_on(stream, [*before, *self.captured(stream)])

    def captured(self, stream: int) -> list[Any]:
        """Returns nodes of the CUDA graph that is captured on `stream`: those on which the next
        captured work will depend.
        """
        found = self._cuda.cuStreamGetCaptureInfo(stream)
        self._check("cuStreamGetCaptureInfo", found[0])
        return next(part for part in found if isinstance(part, list))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]

    def _goes_on(self, stream: int, after: Sequence[object]) -> None:
        """Makes the next node that is captured on `stream` depend on the CUDA graph nodes `after`,
        instead of the latest work of `stream`.
        """
        cuda, nodes = self._cuda, [*after]
        replace = cuda.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
        update = cuda.cuStreamUpdateCaptureDependencies
        try:
            (status,) = update(stream, nodes, None, len(nodes), int(replace))
        except TypeError:  # CUDA 12's
            (status,) = update(stream, nodes, len(nodes), int(replace))
        self._check("cuStreamUpdateCaptureDependencies", status)


def beside(device: torch.device, stream: int, act: Callable[[], T]) -> T:
    """Runs `act` in another thread, on the given device and CUDA stream, and returns its result.

    This is needed for CUDA calls that a thread may not make while it captures a CUDA graph.
    """
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
# Tensors over memory that torch has not allocated, on a given device.
#
# Torch looks up the device of a pointer. For a range with memory of several GPUs, that would be the
# first GPU. DLPack states the device. https://dmlc.github.io/dlpack/latest/c_api.html

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
    """An object without contents that a tensor references as long as the tensor's memory is in use.

    A finalizer of this object is called when the memory has no users.
    """


# The objects that keep the memory of tensors alive, by the address of the structure passed to
# torch.
_held: dict[int, Any] = {}


def _drop(address: int, held: dict[int, Any] = _held) -> None:
    held.pop(address, None)


_let_go = _Deleter(_drop)
# Torch may release memory after this module was destroyed, at the end of the process.
for _one in (_held, _let_go):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_one))


def raw_tensor(address: int, nbytes: int, device: torch.device, owner: object) -> torch.Tensor:
    """Returns a uint8 tensor for the `nbytes` bytes at a memory address. The tensor keeps `owner`
    alive.
    """
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
    """Calls functions of the CUDA driver by name, and raises an error if a call fails.

    `api` is the module of the driver's Python bindings.
    """

    def __init__(self) -> None:
        self.api: Any = driver()
        self._success = self.api.CUresult.CUDA_SUCCESS

    def call(self, name: str, *args: object) -> Any:
        """Calls the function `name` of the CUDA driver; returns its results without the status.

        Raises `CommunicationError` if the call fails.
        """
        status, *results = getattr(self.api, name)(*args)
        self.check(name, status)
        return results[0] if len(results) == 1 else results

    def check(self, name: str, status: Any) -> None:
        """Raises `CommunicationError` if `status`, the result of a driver call, is not success."""
        if status != self._success:
            raise CommunicationError(f"the CUDA driver call {name} failed with {status.name}")


@contextmanager
def driving(cuda: CudaCalls, device: torch.device) -> Generator[None]:
    """Returns a context for calls of the CUDA driver on a device.

    Inside the context, the calls do not disturb the capture of a CUDA graph in another thread.
    """
    relaxed = cuda.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    with on_device(device):
        before = cuda.call("cuThreadExchangeStreamCaptureMode", relaxed)
        try:
            yield
        finally:
            cuda.call("cuThreadExchangeStreamCaptureMode", before)


@contextmanager
def on_device(device: torch.device) -> Generator[None]:
    """Returns a context in which `device` is the current device of this thread."""
    with torch.cuda.device(device):
        bind_primary_context()
        yield


def driver() -> Any:
    """Imports the Python bindings of the CUDA driver (`cuda.bindings.driver`); returns the module.

    Raises `UnsupportedError` if the package cuda-bindings is not installed.
    """
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise UnsupportedError(
            f"peer copies between GPUs need the package cuda-bindings ({error}): install "
            "fuser-hostir[cu12] or fuser-hostir[cu13]"
        ) from error
