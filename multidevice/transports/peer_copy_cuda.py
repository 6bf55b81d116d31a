"""Peer copies between the GPUs of a host: copy engines read over NVLink, and streams wait for
flags.

A flag is a number in GPU memory by which one GPU signals another one. The host only determines
where the data is stored. CUDA streams define the order:

- The sender's stream writes the flag *ready* into the receiver's memory.
- The receiver's stream waits for *ready*, copies, and writes the flag *done* into the sender's
  memory.
- Work that overwrites the data waits for *done*.

Flags count the transfers that used the same entry of the mailbox, so flags are never reset. No
kernel runs, so the multiprocessors stay free. Only an allreduce of at most MAX_NBYTES bytes is a
kernel (`peer_allreduce`).

In CUDA graphs, each transfer has two flags that no other transfer uses. The rank that waits for a
flag sets the flag back to 0. All ranks repeat a graph equally often (`PeerBackend.vote`), and at
the end of a graph all its flags are 0.

Each graph node with flag operations takes microseconds on the GPU. Therefore:

- Flag operations at the same time are one node.
- No later work waits for the write of *done*.
- The wait for *ready* runs parallel to the stream's work before the copy, once this rank has itself
  written *ready* for its earlier sends.

The GPU chooses the order in which it runs nodes that do not depend on each other, but the order is
the same on all ranks. One node first writes *ready* and then waits, so ranks cannot wait for each
other in a cycle.
"""

from __future__ import annotations

import struct
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from fuser.support.errors import CommunicationError, InputError, UnsupportedError
from fuser.support.torch_calls import capturing_on, raw_stream_on
from multidevice.coordination.bounded_wait import Team, team_text
from multidevice.coordination.control_channel import Control
from multidevice.transports.allreduce_kernel import AllreduceKernels
from multidevice.transports.base.allreduce_model import MAX_NBYTES
from multidevice.transports.base.checked_backend import (
    CollectiveCall,
    Exchange,
    stream_at,
    stream_handle,
)
from multidevice.transports.base.launch_order import CudaDriver, LaunchOrder
from multidevice.transports.base.protocol import NOT_CAPTURED, Post, Work
from multidevice.transports.memory.cuda_ipc import (
    WAIT,
    WRITE,
    CudaCalls,
    FlagOp,
    Hooks,
    IpcMemory,
    Seen,
    beside,
)
from multidevice.transports.memory.cuda_vmm import GpuShards
from multidevice.transports.memory.handles import side_by_side
from multidevice.transports.peer_copy import (
    NAME_WORDS,
    SLOTS,
    Mailbox,
    Numbered,
    PeerBackend,
    Record,
    Sent,
)

_FLAG_NBYTES = 4
# How many transfers from one rank to another may be in graphs. Their use numbers begin above those
# of the mailbox's slots.
_GRAPH_SLOTS = 1 << 14
_IN_GRAPHS = 1 << 32
# The number of flags of one kind for one direction between two ranks; and the kinds.
_FLAGS = SLOTS + _GRAPH_SLOTS
_READY, _DONE = 0, 1


@dataclass
class _Capture:
    """The state of this backend while its work is captured into a CUDA graph.

    - `stream`: the stream on which the graph will be launched.
    - `held`: objects that must live as long as the graph.
    - `open`: sends whose data may not be overwritten yet, because no stream waits for the
      receiver's copy so far.
    - `writes`: delayed writes of flags (numbers by which GPUs signal each other), to combine them
      with later flag operations.
    - `after`: the graph nodes after which the delayed writes must run, by handle.
    """

    stream: int
    held: list[object] = field(default_factory=list[object])
    open: set[Sent] = field(default_factory=set[Sent])
    writes: list[FlagOp] = field(default_factory=list[FlagOp])
    after: dict[int, object] = field(default_factory=dict[int, object])
    # The captured stream of the last delayed write.
    last: int = 0
    # Stream -> the nodes of its last copies, and the sends that were open then.
    copied: dict[int, tuple[list[object], set[Sent]]] = field(
        default_factory=dict[int, tuple[list[object], set[Sent]]]
    )


class _Enqueued:
    """The handle of a communication whose copies CUDA streams execute.

    `sent` are the sends whose data may not be overwritten yet, because no stream has waited for the
    receivers' copies.
    """

    def __init__(
        self,
        backend: CudaPeerBackend,
        mailbox: Mailbox,
        sent: list[Sent],
        call: CollectiveCall | Exchange,
    ) -> None:
        self._backend, self._mailbox, self._sent, self._call = backend, mailbox, sent, call

    def wait(self) -> None:
        """Makes the current CUDA stream wait until the receivers have copied the data that this
        rank sends.
        """
        self._wait_on(None)

    def _wait_on(self, stream: object) -> None:
        if self._sent:
            self._backend.settle(self._mailbox, self._sent, stream)
            self._sent = []

    def synchronize(self) -> None:
        """Blocks the host until the CUDA stream of the communication has done its work, with a
        deadline.
        """
        self._wait_on(self._call.stream)
        self._backend.synchronize(self._call)


class CudaPeerBackend(PeerBackend):
    """The backend for peer copies between GPUs: a receiver reads the sender's memory.

    It serves the tensors of one GPU, on the current or a given CUDA stream.
    """

    def __init__(self, control: Control, device: torch.device) -> None:
        super().__init__(control)
        self.device = device
        self._hooks = Hooks(self._is_idle, self.make_void, self._told)
        self._memory = IpcMemory(device, self._hooks)
        self._shards: GpuShards | None = None
        self._current = raw_stream_on(device)
        # Per mailbox: this rank's flags [ready, done][member][slot], and the addresses of the
        # others' flags.
        self._flags: dict[Mailbox, torch.Tensor] = {}
        self._theirs: dict[Mailbox, dict[int, int]] = {}
        # Sends that no stream has waited for: peers may still read their data.
        self._held: dict[Sent, Mailbox] = {}
        self._is_captured = capturing_on(device)
        self._capture: _Capture | None = None
        # How many transfers to each member are in graphs.
        self._graphed: dict[Mailbox, Counter[int]] = {}
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
                f"peer copies of this rank communicate tensors on {self.device}, but found a "
                f"tensor on {tensor.device}: move the tensor to {self.device}"
            )

    def _captures_now(self, stream: int) -> bool:
        return self._is_captured is not None and self._is_captured(stream)

    def _handle(self, stream: object) -> int:
        return self._current() if stream is None else stream_handle(stream, self.device)

    def _on(self, stream: object) -> AbstractContextManager[object]:
        if stream is None:
            return nullcontext()
        return torch.cuda.stream(stream_at(stream_handle(stream, self.device), self.device))

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocates GPU memory that other ranks can map, as a uint8 tensor.

        During the capture of a CUDA graph, the memory belongs to the graph.
        """
        capture = self._capture
        if capture is None:
            return self._memory.empty(nbytes)
        # The memory belongs to the graph. It must not come from the pool of the capture.
        made = beside(self.device, capture.stream, lambda: self._memory.lasting(nbytes))
        capture.held.append(made)
        return made

    def lasting(self, nbytes: int) -> torch.Tensor:
        """Allocates GPU memory that other ranks can map, for a buffer that a program keeps for many
        runs.

        Outside the capture of a CUDA graph, a large buffer gets a separate allocation of the
        driver, which is freed after use.
        """
        if self._capture is not None or self._captures_now(self._current()):
            return self.empty(nbytes)
        return self._memory.lasting(nbytes)

    def tidy(self) -> None:
        """Frees memory that has no user; does nothing while a CUDA graph is being captured."""
        if self._capture is None and not self._captures_now(self._current()):
            self._memory.tidy()
            if self._shards is not None:
                self._shards.tidy()

    def release(self) -> None:
        """Records that a host program was deleted, so that `tidy` frees its memory."""
        self._memory.release()
        if self._shards is not None:
            self._shards.release()

    def shard(self, nbytes: int) -> torch.Tensor:
        """Allocates GPU memory for the part (shard) of a tensor that one rank stores.

        The memory can be mapped beside other ranks' shards. If this GPU cannot share such memory,
        returns memory of `empty`.
        """
        shards = self._find_shards()
        if shards.why_not:
            return self.empty(nbytes)
        return shards.empty(nbytes, self._current())

    def _find_shards(self) -> GpuShards:
        if self._shards is None:
            self._shards = GpuShards(self.device, CudaCalls(), self._hooks)
        return self._shards

    def _told(self) -> Callable[[], bool]:
        """Returns a function for the announcements that this rank has made so far. The function
        returns True once other ranks have mapped the memory of all of them.

        This rank announces the memory of the data before each transfer. The other rank maps the
        memory, then answers; only after the answer may this rank free the memory. That this rank's
        host has continued proves nothing, because not the host but a CUDA stream waits for the
        other rank.
        """
        open_ones = {mailbox: mailbox.unanswered() for mailbox in self._mailboxes.values()}

        def is_found() -> bool:
            for mailbox, some in list(open_ones.items()):
                is_given_up = self._mailboxes.get(mailbox.team) is not mailbox
                open_ones[mailbox] = [] if is_given_up else mailbox.still_unanswered(some)
            return not any(open_ones.values())

        return is_found

    def _is_idle(self) -> bool:
        """Blocks the host until the GPU has done all its work, with a deadline; returns True then.

        Returns False if the capture of a CUDA graph makes it impossible to wait for the device.
        """
        done: list[bool] = []

        def body() -> None:
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError:
                return
            done.append(True)

        # In a thread, because a stream may wait for a rank that has failed.
        waiting = threading.Thread(target=body, daemon=True)
        waiting.start()
        self.control.poll_until(
            lambda: not waiting.is_alive(),
            what=lambda: f"the work of {self.device} before the memory of other ranks is freed",
            needs=list,
        )
        return bool(done)

    def name_of(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], int] | None:
        """Returns the name by which other ranks map a tensor's memory, and the offset of the tensor
        in this memory.

        The offset is in bytes. Returns None if other ranks cannot map the memory.
        """
        return self._memory.name_of(tensor)

    def side_by_side(self, tensor: torch.Tensor, team: Team, what: str) -> torch.Tensor:
        """Maps the parts (shards) that all ranks of a team store as one tensor, without a copy.

        The parts are in team order. First waits until the current stream has written this rank's
        shard `tensor`. `what` names the operation in error messages.
        """
        # The data must be written before the other members continue.
        self._finish(what)
        return side_by_side(self.control, self._find_shards(), tensor, team, what)

    def rendezvous(self, team: Team, what: str) -> None:
        """Blocks until all ranks of a team have called the method with the same description `what`.

        First waits until the current stream has done its work.
        """
        self._finish(what)
        super().rendezvous(team, what)

    def _finish(self, what: str) -> None:
        """Blocks the host until the current CUDA stream has done its work, with a deadline.

        `what` names the operation that needs the finished work, for error messages.
        """
        stream = torch.cuda.current_stream(self.device)
        self.control.poll_until(stream.query, what=lambda: f"the work before {what}", needs=list)

    # ------------------------------------------------------------ flags
    def _connected(self, mailbox: Mailbox) -> None:
        """Allocates this rank's flags for a new team, and maps the other ranks' flags.

        A flag is a number in GPU memory by which one GPU signals another one. `mailbox` is the
        memory in which the ranks of the team announce transfers.
        """
        team = mailbox.team
        flags = self._memory.empty(2 * len(team) * _FLAGS * _FLAG_NBYTES).zero_()
        # Also waits for all earlier work: a stream that waits for a failed rank may never finish.
        self.control.poll_until(
            torch.cuda.current_stream(self.device).query,
            what=lambda: f"the work of {self.device} before team {team_text(team)} connects",
            needs=list,
        )
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
        # Wait for all members: none may set a flag that is not cleared yet, or copy where another
        # cannot.
        self.control.agree(error, team=team)
        self._flags[mailbox], self._theirs[mailbox] = flags, theirs

    def _give_up(self, teams: Sequence[Team]) -> None:
        super()._give_up(teams)
        kept = set(self._mailboxes.values())
        for mailbox in [p for p in self._flags if p not in kept]:
            del self._flags[mailbox], self._theirs[mailbox]
            self._graphed.pop(mailbox, None)

    def _flag(
        self, mailbox: Mailbox, kind: int, of: int, about: int, slot: int, use: int
    ) -> tuple[int, int]:
        """Returns the address of a flag of a transfer, and the value that the flag gets.

        A flag is a number in GPU memory by which one GPU signals another one. `kind` is _READY (the
        data may be copied) or _DONE (it has been copied). The flag is stored in the memory of rank
        `of`, and rank `about` writes it. `slot` is the mailbox entry of the transfer, and `use` the
        number of the transfer among those of this entry. In a CUDA graph, each transfer has flags
        of its own, with the value 1.
        """
        base = self._flags[mailbox].data_ptr() if of == self.rank else self._theirs[mailbox][of]
        member = kind * len(mailbox.team) + mailbox.team.index(about)
        place, value = (SLOTS + use - _IN_GRAPHS, 1) if use >= _IN_GRAPHS else (slot, use)
        return base + (member * _FLAGS + place) * _FLAG_NBYTES, value

    def _set(self, mailbox: Mailbox, kind: int, of: int, slot: int, use: int, stream: int) -> None:
        """Enqueues a write of a flag in the memory of rank `of`, on a CUDA stream.

        A flag is a number by which one GPU signals another one that data is ready or has been
        copied (`kind`). The flag signals transfer number `use` of the mailbox entry `slot`. During
        the capture of a CUDA graph, a write of *ready* is delayed, to combine it with later flag
        operations.
        """
        address, value = self._flag(mailbox, kind, of, self.rank, slot, use)
        capture = self._capture
        if capture is None:
            self._memory.set_flag(address, value, stream)
        elif kind == _READY:
            capture.last = stream
            capture.writes.append((WRITE, address, value))
            capture.after.update((int(node), node) for node in self._memory.captured(stream))
        else:
            # No work of this run depends on it.
            write = partial(self._memory.set_flag, address, value, stream)
            self._memory.aside(write, stream)

    def _await(
        self, mailbox: Mailbox, kind: int, uses: Sequence[tuple[int, int, int]], stream: int
    ) -> None:
        """Makes a CUDA stream wait for flags in this rank's memory, by which other GPUs signal it.

        `kind` says whether the flags signal that data is ready or has been copied. `uses` has (rank
        that writes the flag, mailbox entry, number of the transfer in this entry) for each flag.
        """
        flags = [self._flag(mailbox, kind, self.rank, by, slot, use) for by, slot, use in uses]
        capture = self._capture
        if capture is None:
            for address, value in flags:
                self._memory.wait_flag(address, value, stream)
            return
        ops = [op for at, value in flags for op in ((WAIT, at, value), (WRITE, at, 0))]
        if kind == _READY and capture.writes:
            self._use_beside(capture, ops, stream)
        else:
            self.flush()
            self._memory.use_flags(ops, stream)

    def _use_beside(self, capture: _Capture, waits: Sequence[FlagOp], stream: int) -> None:
        """Adds one node to a CUDA graph that writes delayed flags, then waits for the flags in
        `waits`.

        A flag is a number by which one GPU signals another one. The node runs after the work that
        the delayed flags report as done.
        """
        ops, after = [*capture.writes, *waits], [*capture.after.values()]
        capture.writes.clear()
        capture.after.clear()
        self._memory.beside(lambda: self._memory.use_flags(ops, stream), after, stream)

    def flush(self) -> None:
        """Enqueues the flag writes that the current capture of a CUDA graph has delayed.

        A flag is a number by which one GPU signals another one.
        """
        capture = self._capture
        if capture is not None and capture.writes:
            stream = capture.last
            self._memory.aside(lambda: self._use_beside(capture, (), stream), stream)

    # ------------------------------------------------------------ graphs
    def can_capture(self, what: str) -> bool:
        """Returns whether a CUDA graph may repeat the communication `what`: all but "barrier"."""
        return what != "barrier"

    @contextmanager
    def capturing(self, stream: int) -> Generator[list[object]]:
        """Returns a context in which this rank captures a CUDA graph, for later launches on
        `stream`.

        The value of the context is a list of objects that must live as long as the graph. Raises
        `CommunicationError` at the end of the context if a send was started for which no stream
        waits.
        """
        self._capture = capture = _Capture(stream)
        try:
            yield capture.held
            if capture.open:
                peers = team_text(sorted({sent.peer for sent in capture.open}))
                raise CommunicationError(
                    f"this run cannot be captured as a CUDA graph, because no stream waits for its "
                    f"sends to ranks {peers}: add a Wait for each of these sends to the program, "
                    "or run it without CUDA graphs"
                )
        finally:
            self._capture = None

    def _poll(
        self,
        done: Callable[[], bool],
        call: CollectiveCall | Exchange,
        open_ones: Sequence[Numbered],
    ) -> None:
        mailbox = self._voting
        if self._capture is None or mailbox is None:
            super()._poll(done, call, open_ones)
            return

        def gone() -> list[int]:
            number = self.control.ledger.entered.get(mailbox.votes, 0)
            return mailbox.said.who_says(NOT_CAPTURED, number)

        super()._poll(lambda: done() or bool(gone()), call, open_ones)
        if not done():
            raise CommunicationError(
                f"this rank captures no CUDA graph of this run, because ranks {team_text(gone())} "
                "could not capture it"
            )

    def _use(self, mailbox: Mailbox, peer: int, slot: int) -> int:
        if self._capture is None:
            # Flags of a slot are written in order: its last transfer must be done before the next
            # is ready.
            if use := mailbox.uses(peer, slot):
                self._await(mailbox, _DONE, [(peer, slot, use)], self._current())
            return mailbox.next_use(peer, slot)
        count = self._graphed.setdefault(mailbox, Counter[int]())
        if count[peer] == _GRAPH_SLOTS:
            raise CommunicationError(
                f"this run cannot be captured: all CUDA graphs together can contain at most "
                f"{_GRAPH_SLOTS} sends to rank {peer}, and earlier graphs use all of them. The run "
                "is executed without a graph, with the same results"
            )
        count[peer] += 1
        return _IN_GRAPHS + count[peer] - 1

    # ------------------------------------------------------------ small allreduces
    def _start_reduction(self, call: CollectiveCall) -> Work:
        work = self.kernels.start(call, self._handle(call.stream))
        return super()._start_reduction(call) if work is None else work

    def _bind_reduction(self, call: CollectiveCall) -> Post | None:
        takes = self.kernels.takes(call)
        return self.kernels.bind(call) if takes else super()._bind_reduction(call)

    # ------------------------------------------------------------ transfers
    def _carry_out(
        self, mailbox: Mailbox, steps: Iterable[list[Numbered]], call: CollectiveCall | Exchange
    ) -> _Enqueued:
        stream = self._handle(call.stream)
        if self._capture is None and self._captures_now(stream):
            raise UnsupportedError(
                f"{call.describe()}: the caller cannot capture peer copies in a CUDA graph, "
                "because all ranks must agree on each run: call the program outside a capture"
            )
        sent: list[Sent] = []
        with self._on(call.stream):
            for step in steps:
                self.settle(mailbox, sent, call.stream)
                # All sends are posted first: where two ranks exchange data, neither waits for the
                # other.
                sent = [
                    self._send(mailbox, one, call, stream)
                    for one in step
                    if one.transfer.kind == "send"
                ]
                self._pull(mailbox, [o for o in step if o.transfer.kind == "recv"], call, stream)
        if self._capture is None:
            self._held.update(dict.fromkeys(sent, mailbox))
        else:
            self._capture.held.append(self._flags[mailbox])
        return _Enqueued(self, mailbox, sent, call)

    def _send(
        self, mailbox: Mailbox, one: Numbered, call: CollectiveCall | Exchange, stream: int
    ) -> Sent:
        sent = self._post(mailbox, one, call)
        sent.stream = stream
        self._set(mailbox, _READY, sent.peer, sent.slot, sent.use, stream)
        if self._capture is not None:
            self._capture.open.add(sent)
        return sent

    def _pull(
        self,
        mailbox: Mailbox,
        ones: Sequence[Numbered],
        call: CollectiveCall | Exchange,
        stream: int,
    ) -> None:
        """Makes a CUDA stream wait until the senders' data is ready, then copy the data of all
        receives `ones`.

        The copies run one after another.
        """
        found = [(one.transfer, *self._find(mailbox, one, call)) for one in ones]
        if not found:
            return
        uses = [(t.peer, record.slot, record.use) for t, record, _ in found]
        self._await(mailbox, _READY, uses, stream)
        for t, record, seen in found:
            if seen is not None:
                source = seen.address + record.offset
                self._memory.copy(t.tensor.data_ptr(), source, record.nbytes, stream)
            self._set(mailbox, _DONE, t.peer, record.slot, record.use, stream)
        if self._capture is not None:
            copies = self._memory.captured(stream)
            self._capture.copied[stream] = copies, set(self._capture.open)

    def _find(
        self, mailbox: Mailbox, one: Numbered, call: CollectiveCall | Exchange
    ) -> tuple[Record, Seen | None]:
        """Waits until the sender has announced the data of the receive `one`, and maps the sender's
        memory.

        Then answers the sender, which may free the memory only after that. Returns the announcement
        and the mapped memory; the memory is None if the data is empty.
        """
        peer = one.transfer.peer
        record = mailbox.find(peer, one.tag)
        if record is None:
            self._poll(lambda: mailbox.find(peer, one.tag) is not None, call, (one,))
            record = mailbox.find(peer, one.tag)
        assert record is not None, "it was found"
        self._check_fits(mailbox, one, record)
        # The peer may free the memory only after this rank has mapped it and answered.
        seen = self._seen(record.name, peer) if record.nbytes else None
        mailbox.answer(peer, record.slot, one.tag)
        return record, seen

    def _seen(self, name: tuple[int, ...], peer: int) -> Seen:
        capture = self._capture
        if capture is None or self._memory.is_mapped(name):
            seen = self._memory.find(name, peer)
        else:
            seen = beside(self.device, capture.stream, lambda: self._memory.find(name, peer))
        if capture is not None:
            capture.held.append(seen)
        return seen

    def settle(self, mailbox: Mailbox, sent: list[Sent], stream: object) -> None:
        """Makes a CUDA stream wait until the receivers have copied the data of the sends `sent`.

        After that, the stream may overwrite the data.
        """
        handle = self._handle(stream)
        if sent:
            uses = [(one.peer, one.slot, one.use) for one in sent]
            copies, were_open = self._copied(handle)
            if were_open.issuperset(sent):
                # Peers copy these when this rank copies theirs, so the wait need not follow later
                # work.
                wait = partial(self._await, mailbox, _DONE, uses, handle)
                self._memory.beside(wait, copies, handle)
            else:
                self._await(mailbox, _DONE, uses, handle)
        for one in sent:
            if self._capture is not None:
                self._capture.open.discard(one)
                continue
            if one.stream != handle and one.held.numel():
                # Torch reuses freed memory in the stream for which it was allocated.
                one.held.record_stream(stream_at(handle, self.device))
            self._held.pop(one, None)

    def _copied(self, stream: int) -> tuple[list[object], set[Sent]]:
        nothing: tuple[list[object], set[Sent]] = [], set()
        return nothing if self._capture is None else self._capture.copied.get(stream, nothing)

    def synchronize(self, call: CollectiveCall | Exchange) -> None:
        """Blocks the host until the CUDA stream of the communication `call` has done its work."""
        stream = stream_at(self._handle(call.stream), self.device)
        self.control.poll_until(stream.query, what=call.describe, needs=call.needs)

    def drain(self) -> None:
        """Blocks the host until the current stream has done its work, or until the deadline.

        Called before the process ends, because other ranks may still read this rank's memory.
        """
        if self._closed or not (self._mailboxes or self.kernels.is_used):
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
        """Closes the backend, and unmaps the memory of other ranks."""
        super().close()
        self._memory.close()
