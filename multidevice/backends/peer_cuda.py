"""Peer copies between the GPUs of a host: copy engines read over NVLink, streams wait for flags.

The host only finds out where the data lies; the order is that of the streams. A sender's stream
writes the flag *ready* into the receiver's memory; the receiver's stream waits for it, copies, and
writes the flag *done* into the sender's, for which whoever reuses the data waits. Flags count the
uses of their slot, so nothing is ever reset. No kernel runs: the multiprocessors are free. Only an
allreduce of at most MAX_NBYTES is one kernel (`peer_allreduce`).

A transfer in a graph has two flags of its own, which whoever waits for them sets back to 0: all
ranks repeat a graph equally often (`PeerBackend.vote`), and when it ends all its flags are 0.
"""

from __future__ import annotations

import bisect
import struct
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeVar

import torch

from fuser.errors import CommunicationError, InputError, UnsupportedError
from fuser.runtime.cuda_kernel import bind_primary_context
from fuser.torch_calls import capturing_on, raw_stream_on
from multidevice.backends.allreduce_kernel import MAX_NBYTES
from multidevice.backends.base import Call, Exchange, stream_at, stream_handle
from multidevice.backends.captured import NOT_CAPTURED
from multidevice.backends.launch_order import CudaDriver, LaunchOrder
from multidevice.backends.peer import NAME_WORDS, SLOTS, Numbered, Page, PeerBackend, Sent
from multidevice.backends.peer_allreduce import AllreduceKernels
from multidevice.backends.protocol import Post, Work
from multidevice.control import Control
from multidevice.waiting import team_text

T = TypeVar("T")
_HANDLE = struct.Struct("<8Q")
_FLAG_NBYTES = 4
# Transfers between two ranks, in one direction, that may be in graphs; their uses begin where no
# slot of the page will ever come.
_GRAPH_SLOTS = 1 << 14
_IN_GRAPHS = 1 << 32
# Flags of one kind, in one direction between two ranks; and the kinds.
_FLAGS = SLOTS + _GRAPH_SLOTS
_READY, _DONE = 0, 1


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


def _beside(device: torch.device, stream: int, act: Callable[[], T]) -> T:
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


@dataclass
class _Capture:
    """What a graph, which `stream` will repeat, needs to be kept; and its sends that no stream has
    waited for yet."""

    stream: int
    held: list[object] = field(default_factory=list[object])
    open: set[Sent] = field(default_factory=set[Sent])


class _Enqueued:
    """Copies that streams carry out; `sent` are those of whose data no wait says that it may be
    overwritten."""

    def __init__(
        self, backend: CudaPeerBackend, page: Page, sent: list[Sent], call: Call | Exchange
    ) -> None:
        self._backend, self._page, self._sent, self._call = backend, page, sent, call

    def wait(self) -> None:
        """Lets the current stream wait until the peers have copied what this rank sends."""
        if self._sent:
            self._backend.settle(self._page, self._sent, self._call.stream)
            self._sent = []

    def synchronize(self) -> None:
        """See `Work.synchronize`; polls the stream under the deadline."""
        self.wait()
        self._backend.synchronize(self._call)


class CudaPeerBackend(PeerBackend):
    """Peer copies of the tensors of one GPU, on the current stream or the one that is given."""

    def __init__(self, control: Control, device: torch.device) -> None:
        super().__init__(control)
        self.device = device
        self._memory = IpcMemory(device)
        self._current = raw_stream_on(device)
        # Of each page: this rank's flags [ready, done][member][slot], and where it sees others'.
        self._flags: dict[Page, torch.Tensor] = {}
        self._theirs: dict[Page, dict[int, int]] = {}
        # Sends that nobody has waited for: peers may still read them.
        self._held: dict[Sent, Page] = {}
        self._is_captured = capturing_on(device)
        self._capture: _Capture | None = None
        # How many transfers to each member are in graphs.
        self._graphed: dict[Page, Counter[int]] = {}
        self.kernels = AllreduceKernels(
            control,
            device,
            MAX_NBYTES,
            lambda: self._memory,
            lambda: LaunchOrder(CudaDriver(device)),
        )

    def _check_device(self, tensor: torch.Tensor) -> None:
        if tensor.numel() and tensor.device != self.device:
            raise InputError(
                f"backend CUDA of {self.device} takes tensors there, found one on {tensor.device}"
            )

    def _handle(self, stream: object) -> int:
        return self._current() if stream is None else stream_handle(stream, self.device)

    def _on(self, stream: object) -> AbstractContextManager[object]:
        if stream is None:
            return nullcontext()
        return torch.cuda.stream(stream_at(stream_handle(stream, self.device), self.device))

    def empty(self, nbytes: int) -> torch.Tensor:
        capture = self._capture
        if capture is None:
            return self._memory.empty(nbytes)
        # The graph's for as long as there is one, and out of reach of the memory of its maker.
        made = _beside(self.device, capture.stream, lambda: self._memory.empty(nbytes))
        capture.held.append(made)
        return made

    def name_of(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], int] | None:
        return self._memory.name_of(tensor)

    # ------------------------------------------------------------ flags
    def _connected(self, page: Page) -> None:
        """Makes the flags, and maps those of the others."""
        team = page.team
        flags = self._memory.empty(2 * len(team) * _FLAGS * _FLAG_NBYTES).zero_()
        torch.cuda.current_stream(self.device).synchronize()
        place = self._memory.name_of(flags)
        assert place is not None, "memory made for peers has a name"
        name, at = place
        hello = struct.pack(f"<{NAME_WORDS + 1}Q", *name, at)
        error: BaseException | None = None
        theirs: dict[int, int] = {}
        for rank, answer in zip(team, self.control.exchange(hello, team=team), strict=True):
            *words, offset = struct.unpack(f"<{NAME_WORDS + 1}Q", answer)
            if rank != self.rank and error is None:
                try:
                    theirs[rank] = self._memory.mapped(tuple(words), rank) + offset
                except UnsupportedError as found:
                    error = found
        # Nobody sets a flag that is still to be cleared, or copies where one cannot.
        self.control.agree(error, team=team)
        self._flags[page], self._theirs[page] = flags, theirs

    def _forget(self, key: str) -> None:
        super()._forget(key)
        kept = set(self._pages.values())
        for page in [p for p in self._flags if p not in kept]:
            del self._flags[page], self._theirs[page]
            self._graphed.pop(page, None)

    def _flag(
        self, page: Page, kind: int, of: int, about: int, slot: int, use: int
    ) -> tuple[int, int]:
        """Returns the address of the flag, of a kind (_READY, _DONE), that lies with rank `of` and
        is about rank `about`, and the value that it comes to by this use of the slot."""
        base = self._flags[page].data_ptr() if of == self.rank else self._theirs[page][of]
        member = kind * len(page.team) + page.team.index(about)
        place, value = (SLOTS + use - _IN_GRAPHS, 1) if use >= _IN_GRAPHS else (slot, use)
        return base + (member * _FLAGS + place) * _FLAG_NBYTES, value

    def _set(self, page: Page, kind: int, of: int, slot: int, use: int, stream: int) -> None:
        """Lets a stream tell rank `of`."""
        self._memory.set_flag(*self._flag(page, kind, of, self.rank, slot, use), stream)

    def _await(self, page: Page, kind: int, by: int, slot: int, use: int, stream: int) -> None:
        """Lets a stream wait until it is told by rank `by`."""
        address, value = self._flag(page, kind, self.rank, by, slot, use)
        self._memory.wait_flag(address, value, stream)
        if use >= _IN_GRAPHS:
            self._memory.set_flag(address, 0, stream)

    # ------------------------------------------------------------ graphs
    def can_capture(self, what: str) -> bool:
        """See `Captured.can_capture`."""
        return what != "barrier"

    @contextmanager
    def capturing(self, stream: int) -> Generator[list[object]]:
        """See `Captured.capturing`."""
        self._capture = capture = _Capture(stream)
        try:
            yield capture.held
            if capture.open:
                peers = team_text(sorted({sent.peer for sent in capture.open}))
                raise CommunicationError(f"no stream waits for what is sent to ranks {peers}")
        finally:
            self._capture = None

    def _poll(
        self, done: Callable[[], bool], call: Call | Exchange, open_ones: Sequence[Numbered]
    ) -> None:
        if self._capture is None:
            super()._poll(done, call, open_ones)
            return
        page = self.page(call.team)

        def gone() -> list[int]:
            number = self.control.ledger.entered.get(page.votes, 0)
            return page.said.who_says(NOT_CAPTURED, number)

        super()._poll(lambda: done() or bool(gone()), call, open_ones)
        if not done():
            raise CommunicationError(f"ranks {team_text(gone())} could not capture it")

    def _use(self, page: Page, peer: int, slot: int) -> int:
        if self._capture is None:
            # Flags of a slot come in order: its last transfer is over before the next is ready.
            if use := page.uses(peer, slot):
                self._await(page, _DONE, peer, slot, use, self._current())
            return page.next_use(peer, slot)
        count = self._graphed.setdefault(page, Counter[int]())
        if count[peer] == _GRAPH_SLOTS:
            raise CommunicationError(f"{_GRAPH_SLOTS} transfers to rank {peer} are in graphs")
        count[peer] += 1
        return _IN_GRAPHS + count[peer] - 1

    # ------------------------------------------------------------ small allreduces
    def _start_reduction(self, call: Call) -> Work:
        work = self.kernels.start(call, self._handle(call.stream))
        return super()._start_reduction(call) if work is None else work

    def _bind_reduction(self, call: Call) -> Post | None:
        takes = self.kernels.takes(call)
        return self.kernels.bind(call) if takes else super()._bind_reduction(call)

    # ------------------------------------------------------------ transfers
    def _carry_out(
        self, page: Page, steps: Iterable[list[Numbered]], call: Call | Exchange
    ) -> _Enqueued:
        stream = self._handle(call.stream)
        if self._capture is None and self._is_captured is not None and self._is_captured():
            raise UnsupportedError(
                f"{call.describe()}: peer copies cannot be a part of a graph that the caller "
                "captures: the ranks agree on each run, and repeat it by graphs of their own"
            )
        sent: list[Sent] = []
        with self._on(call.stream):
            for step in steps:
                self.settle(page, sent, call.stream)
                # All sends come first: where two ranks exchange, neither waits for the other.
                sent = [
                    self._send(page, one, call, stream)
                    for one in step
                    if one.transfer.kind == "send"
                ]
                for one in step:
                    if one.transfer.kind == "recv":
                        self._pull(page, one, call, stream)
        if self._capture is None:
            self._held.update(dict.fromkeys(sent, page))
        else:
            self._capture.held.append(self._flags[page])
        return _Enqueued(self, page, sent, call)

    def _send(self, page: Page, one: Numbered, call: Call | Exchange, stream: int) -> Sent:
        sent = self._post(page, one, call)
        sent.stream = stream
        self._set(page, _READY, sent.peer, sent.slot, sent.use, stream)
        if self._capture is not None:
            self._capture.open.add(sent)
        return sent

    def _pull(self, page: Page, one: Numbered, call: Call | Exchange, stream: int) -> None:
        peer, tensor = one.transfer.peer, one.transfer.tensor
        record = page.find(peer, one.tag)
        if record is None:
            self._poll(lambda: page.find(peer, one.tag) is not None, call, (one,))
            record = page.find(peer, one.tag)
        assert record is not None, "it was found"
        self._check_fits(page, one, record)
        page.answer(peer, record.slot, one.tag)
        self._await(page, _READY, peer, record.slot, record.use, stream)
        if record.nbytes:
            source = self._mapped(record.name, peer) + record.offset
            self._memory.copy(tensor.data_ptr(), source, record.nbytes, stream)
        self._set(page, _DONE, peer, record.slot, record.use, stream)

    def _mapped(self, name: tuple[int, ...], peer: int) -> int:
        if self._capture is None or self._memory.is_mapped(name):
            return self._memory.mapped(name, peer)
        return _beside(self.device, self._capture.stream, lambda: self._memory.mapped(name, peer))

    def settle(self, page: Page, sent: list[Sent], stream: object) -> None:
        """Lets a stream wait until the receivers have copied."""
        handle = self._handle(stream)
        for one in sent:
            self._await(page, _DONE, one.peer, one.slot, one.use, handle)
            if self._capture is not None:
                self._capture.open.discard(one)
                continue
            if one.stream != handle and one.held.numel():
                # Torch keeps what is freed for the stream that it was made for.
                one.held.record_stream(stream_at(handle, self.device))
            self._held.pop(one, None)

    def synchronize(self, call: Call | Exchange) -> None:
        """Returns when the stream of a call has done its work."""
        stream = stream_at(self._handle(call.stream), self.device)
        self.control.poll_until(stream.query, what=call.describe, needs=call.needs)

    def drain(self) -> None:
        """Waits for the device, within the deadline: peers may read this rank's memory."""
        if self._closed or not (self._pages or self.kernels.is_used):
            return
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        try:
            self.control.poll_until(
                done.query,
                what=lambda: (
                    f"the device's last copies among ranks {team_text(self.control.world)}"
                ),
                needs=list,
            )
        except CommunicationError:
            return

    def close(self) -> None:
        super().close()
        self._memory.close()
