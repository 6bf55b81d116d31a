"""Memory of one GPU that the processes of its host map; what streams do there: copies, flags."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from fuser.runtime.cuda_kernel import bind_primary_context
from fuser.support.errors import UnsupportedError
from multidevice.transports.base.checked_backend import stream_at
from multidevice.transports.memory.cuda_calls import CudaCalls
from multidevice.transports.memory.cuda_ipc import UNIT_NBYTES, Hooks, IpcPieces, Seen

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
