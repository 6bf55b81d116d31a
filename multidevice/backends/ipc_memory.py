"""Memory of one GPU that the processes of its host map; what streams do there: copies, flags."""

from __future__ import annotations

import bisect
import struct
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeVar

import torch

from fuser.errors import CommunicationError, UnsupportedError
from fuser.runtime.cuda_kernel import bind_primary_context
from multidevice.backends.base import stream_at

T = TypeVar("T")
_HANDLE = struct.Struct("<8Q")
# Lets a stream wait until the flag at an address has come to a value, or writes it there.
WAIT, WRITE = "WAIT", "WRITE"
FlagOp = tuple[str, int, int]


class IpcMemory:
    """Memory of one GPU that the processes of its host can map.

    It comes from a pool of torch's allocator that is never given back to the driver, so what a peer
    has mapped stays what it is; within the pool, memory is reused as torch reuses any other.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise UnsupportedError(f"backend CUDA: {device} is no GPU")
        self.device = device
        self._cuda: Any = driver()
        self._success = self._cuda.CUresult.CUDA_SUCCESS
        self._copy = self._cuda.cuMemcpyAsync
        self._write, self._wait = self._cuda.cuStreamWriteValue32, self._cuda.cuStreamWaitValue32
        self._batch = self._cuda.cuStreamBatchMemOp
        self._pool = torch.cuda.MemPool()
        # Beginnings and ends of the driver's allocations, and their names.
        self._begins: list[int] = []
        self._blocks: list[tuple[int, tuple[int, ...]]] = []
        self._mapped: dict[tuple[int, ...], int] = {}

    def empty(self, nbytes: int) -> torch.Tensor:
        """Returns `nbytes` bytes of it, as uint8, for the current stream."""
        with torch.cuda.use_mem_pool(self._pool, device=self.device):
            made = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self.device)
        if self._find(made.data_ptr()) is None:
            self._export(made.data_ptr())
        return made[:nbytes]

    def _export(self, address: int) -> None:
        begin, size = self._call("cuMemGetAddressRange", address)
        try:
            handle = self._call("cuIpcGetMemHandle", begin)
        except CommunicationError as error:
            raise UnsupportedError(
                f"backend CUDA: memory on {self.device} cannot be mapped by other processes "
                f"({error}); torch's expandable segments (PYTORCH_CUDA_ALLOC_CONF) cannot"
            ) from None
        place = bisect.bisect(self._begins, int(begin))
        self._begins.insert(place, int(begin))
        words = _HANDLE.unpack(bytes(handle.reserved))
        self._blocks.insert(place, (int(begin) + int(size), (*words, int(begin))))

    def _find(self, address: int) -> tuple[tuple[int, ...], int] | None:
        place = bisect.bisect(self._begins, address) - 1
        if place < 0 or address >= self._blocks[place][0]:
            return None
        return self._blocks[place][1], address - self._begins[place]

    def name_of(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], int] | None:
        """See `PeerBackend.name_of`."""
        return self._find(tensor.data_ptr())

    def mapped(self, name: tuple[int, ...], peer: int) -> int:
        """Returns the address at which this process sees the memory of a peer.

        Raises `UnsupportedError` where the GPUs have no access to each other.
        """
        found = self._mapped.get(name)
        if found is None:
            handle = self._cuda.CUipcMemHandle()
            handle.reserved = _HANDLE.pack(*name[:-1])
            lazy = self._cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
            try:
                found = int(self._call("cuIpcOpenMemHandle", handle, int(lazy.value)))
            except CommunicationError as error:
                raise UnsupportedError(
                    f"backend CUDA: {self.device} cannot map the memory of rank {peer}'s GPU "
                    f"({error}): use NCCL"
                ) from None
            self._mapped[name] = found
        return found

    def is_mapped(self, name: tuple[int, ...]) -> bool:
        """Returns whether `mapped` has been asked for this memory before."""
        return name in self._mapped

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

    def _call(self, name: str, *args: object) -> Any:
        status, *results = getattr(self._cuda, name)(*args)
        self._check(name, status)
        return results[0] if len(results) == 1 else results

    def _check(self, name: str, status: Any) -> None:
        if status != self._success:
            raise CommunicationError(f"{name}: {status.name}")

    def close(self) -> None:
        """Unmaps the memory of peers."""
        for address in self._mapped.values():
            self._cuda.cuIpcCloseMemHandle(address)
        self._mapped.clear()


def driver() -> Any:
    """Returns the driver's API. Raises `UnsupportedError` without cuda-bindings."""
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise UnsupportedError(
            f"backend CUDA needs cuda-bindings ({error}): install fuser-hostir[cu12] or [cu13]"
        ) from error


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
