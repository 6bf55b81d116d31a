"""Zeroed memory for kernels that a caller captures into a CUDA graph.

Some kernels need memory (workspaces) that is zero at their start, and leave it zero. It is
therefore cleared only once. Memory that is allocated during the capture of a graph would be cleared
by an extra node in every replay. To avoid that, the graph gets memory that was cleared before. The
memory can be used again when the driver has destroyed the graph and all its instances. A user
object of the graph (an object with a destructor that the driver calls) reports that by posting a
semaphore.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fuser.support.locks import make_lock
from fuser.support.torch_calls import raw_stream_on

if TYPE_CHECKING:
    import torch

# The maximum number of ready buffers of one size, and the maximum of their total bytes.
STOCK = 16
STOCK_BYTES = 32 << 20
SMALLEST = 256
# A value of `CUstreamCaptureMode`: permits calls that an active capture would forbid.
_RELAXED = 2
_NO_DESTRUCTOR_SYNC = 1
_MOVE = 1
_SEMAPHORE_BYTES = 64


def status_text(library: Any, status: int) -> str:
    """Returns the symbol and the number of a status of the CUDA driver, such as
    `CUDA_ERROR_INVALID_VALUE (1)`. `library` is the driver's library, loaded by ctypes."""
    symbol = ctypes.c_char_p()
    library.cuGetErrorName(status, ctypes.byref(symbol))
    return f"{symbol.value.decode()} ({status})" if symbol.value else f"the unknown status {status}"


@contextlib.contextmanager
def relaxed(library: Any) -> Generator[None]:
    """A context for calls of the CUDA driver that would otherwise make an active capture of a CUDA
    graph fail.

    `library` is libcuda, loaded by ctypes.
    """
    mode = ctypes.c_int(_RELAXED)
    library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@dataclass(frozen=True)
class _Memory:
    """A buffer that CUDA graphs may use, and the address of a semaphore. The driver posts the
    semaphore when a graph no longer uses the buffer.
    """

    data: torch.Tensor
    returned: int


class GraphMemory:
    """The zeroed memory of one device for captured CUDA graphs: buffers that are ready, and buffers
    that graphs use.
    """

    def __init__(self, device: torch.device, driver: Any, libc: Any) -> None:
        """Stores the device and the C libraries to call: libcuda (`driver`) and libc."""
        self._device, self._driver, self._libc = device, driver, libc
        self._post = ctypes.cast(libc.sem_post, ctypes.c_void_p)
        self._stream = raw_stream_on(device)
        self._stock: dict[int, list[_Memory]] = {}
        self._lent: list[_Memory] = []
        self._lock = make_lock()

    def make_ready(self, nbytes: int) -> None:
        """Allocates and clears buffers of at least `nbytes` bytes, which later captures of CUDA
        graphs can use. The calling thread must not be capturing, because the clearing would be
        captured, too.
        """
        import torch

        size = _size_of(nbytes)
        with self._lock:
            self._take_back()
            stock = self._stock.setdefault(size, [])
            missing = max(min(STOCK, STOCK_BYTES // size), 1) - len(stock)
            if missing <= 0:
                return
            # Another thread may be capturing.
            with relaxed(self._driver):
                data = torch.zeros(missing * size, dtype=torch.uint8, device=self._device)
                if self._device.type == "cuda":
                    # A graph may be launched on any stream, so the clearing must be complete.
                    torch.cuda.current_stream(self._device).synchronize()
            stock += [_Memory(part, self._new_semaphore()) for part in data.split(size)]

    def lend(self, nbytes: int) -> torch.Tensor | None:
        """Returns a zeroed buffer for the CUDA graph that is being captured on the current stream.
        Returns None if no buffer is ready.

        The driver reports when the graph no longer uses the buffer. Another graph can then use it.
        """
        with self._lock:
            self._take_back()
            stock = self._stock.get(_size_of(nbytes))
            if not stock:
                return None
            memory = stock.pop()
            made = ctypes.c_void_p()
            status = self._driver.cuUserObjectCreate(
                ctypes.byref(made),
                ctypes.c_void_p(memory.returned),
                self._post,
                ctypes.c_uint(1),
                ctypes.c_uint(_NO_DESTRUCTOR_SYNC),
            )
            if status:
                stock.append(memory)
                return None
            # From now on the driver posts the semaphore, even if attaching it to the graph fails.
            self._lent.append(memory)
            graph = self._graph()
            if graph is not None and not self._driver.cuGraphRetainUserObject(
                graph, made, ctypes.c_uint(1), ctypes.c_uint(_MOVE)
            ):
                return memory.data[:nbytes]
            self._driver.cuUserObjectRelease(made, ctypes.c_uint(1))
            return None

    def nbytes(self) -> int:
        """Returns the total bytes of the buffers that are ready and of those that graphs use."""
        with self._lock:
            self._take_back()
            kept = [*self._lent, *(memory for stock in self._stock.values() for memory in stock)]
        return sum(memory.data.numel() for memory in kept)

    def _graph(self) -> ctypes.c_void_p | None:
        """Returns the CUDA graph that is being captured on the current stream. Returns None if
        there is no capture.
        """
        status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
        nodes, count = ctypes.c_void_p(), ctypes.c_size_t()
        places = (ctypes.byref(x) for x in (status, number, graph, nodes, count))
        failed = self._driver.cuStreamGetCaptureInfo_v2(ctypes.c_void_p(self._stream()), *places)
        return None if failed or not graph.value else graph

    def _take_back(self) -> None:
        """Makes the buffers that CUDA graphs no longer use ready for other graphs."""
        lent: list[_Memory] = []
        for memory in self._lent:
            is_back = self._libc.sem_trywait(ctypes.c_void_p(memory.returned)) == 0
            (self._stock[memory.data.numel()] if is_back else lent).append(memory)
        self._lent = lent

    def _new_semaphore(self) -> int:
        """Returns the address of a new semaphore. It is never freed, because a CUDA graph that
        posts it may outlive the Python interpreter.
        """
        self._libc.calloc.restype = ctypes.c_void_p
        address = self._libc.calloc(ctypes.c_size_t(1), ctypes.c_size_t(_SEMAPHORE_BYTES))
        self._libc.sem_init(ctypes.c_void_p(address), ctypes.c_int(0), ctypes.c_uint(0))
        return int(address)


def _size_of(nbytes: int) -> int:
    """Returns the size of a buffer for at least `nbytes` bytes: a power of two, so that many
    requests can use the same buffers.
    """
    return max(SMALLEST, 1 << (nbytes - 1).bit_length())


@functools.cache
def _of(index: int) -> GraphMemory | None:
    """Returns the zeroed memory for CUDA graphs on the CUDA device number `index`. Returns None if
    the C libraries lack a needed function.
    """
    import torch

    try:
        driver, libc = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None)
        needed = (
            driver.cuUserObjectCreate,
            driver.cuUserObjectRelease,
            driver.cuGraphRetainUserObject,
            driver.cuStreamGetCaptureInfo_v2,
            libc.sem_trywait,
        )
        return GraphMemory(torch.device("cuda", index), driver, libc) if all(needed) else None
    except (OSError, AttributeError):
        return None


def graph_memory_nbytes(device: torch.device) -> int:
    """Returns the bytes of zeroed memory for CUDA graphs on a device, whether ready or in use."""
    if device.type != "cuda" or (found := graph_memory(device)) is None:
        return 0
    return found.nbytes()


def graph_memory(device: torch.device) -> GraphMemory | None:
    """Returns the object that owns a device's zeroed buffers for CUDA graphs: memory that kernels
    need to find zeroed. There is one object per device. Returns None for a device without graphs,
    such as the CPU.
    """
    import torch

    if device.type != "cuda":
        return None
    return _of(torch.cuda.current_device() if device.index is None else device.index)
