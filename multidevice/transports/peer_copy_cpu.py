"""Peer copies among the processes of a host: tensors in shared memory, copied by the receiver.

A rank copies the data of all its started receives during any of its waits. So a sender need not
wait until the receiver waits for that very receive.

Starting a batch of sends and receives blocks the rank until the received data has arrived. On a
GPU, the stream ensures that later sends come after these receives. CPU ranks have no streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

import torch

from fuser.support.errors import CommunicationError, FuserError, InputError
from multidevice.coordination.bounded_wait import Team, team_text
from multidevice.coordination.control_channel import Control
from multidevice.transports.base.checked_backend import CollectiveCall, Exchange
from multidevice.transports.memory.handles import side_by_side
from multidevice.transports.memory.host_shared import SharedMemory
from multidevice.transports.peer_copy import Mailbox, Numbered, PeerBackend, Sent

# The errors of a transfer itself. Any other error was raised by a signal handler at an arbitrary
# place: the peers still need the transfer.
_FAILURES = (FuserError, RuntimeError, MemoryError, OSError)


class _Copies:
    """A started communication of a CPU rank: lists of transfers, which are executed one after
    another.

    The transfers of a list begin when all transfers of the previous list have ended.
    """

    def __init__(
        self,
        backend: CpuPeerBackend,
        mailbox: Mailbox,
        steps: Iterator[list[Numbered]],
        call: CollectiveCall | Exchange,
    ) -> None:
        self._backend, self._mailbox, self._steps, self._call = backend, mailbox, steps, call
        self.run = backend.control.run
        self._sent: list[tuple[Sent, Numbered]] = []
        self._open: list[Numbered] = []
        self._ended = False
        self._error: Exception | None = None
        self.mailbox = mailbox
        # A wait for a free slot progresses all communications, including this one.
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
                (self._backend.posted(self._mailbox, one, self._call), one)
                for one in step
                if one.transfer.kind == "send"
            ]
        finally:
            self._is_posting = False

    def done(self) -> bool:
        """Copies data that has arrived, and begins the next transfers as far as possible without
        waiting.

        Returns whether all transfers have ended.
        """
        try:
            while not self._ended:
                if self._is_posting:
                    return False
                self._open = [o for o in self._open if not self._backend.received(self._mailbox, o)]
                self._sent = [s for s in self._sent if not self._mailbox.answered(s[0])]
                if self._open or self._sent:
                    return False
                self._begin_step()
        except _FAILURES as error:
            if isinstance(error, TimeoutError) and not isinstance(error, FuserError):
                raise
            # The error is raised in the wait for this communication, not in the wait that
            # progressed it.
            self._ended, self._error = True, error
        return True

    def _missing(self) -> list[Numbered]:
        """Returns the transfers that still wait for another rank.

        These are sends that the receiver has not answered, and receives whose data the sender has
        not announced. Only transfers that have begun are in the result.
        """
        return [*self._open, *(one for _, one in self._sent)]

    def receive(self) -> None:
        """Blocks until the data of all receives that have begun has arrived; sends may still be
        under way.

        So the transfers that this rank starts later come after its receives, as on a GPU.
        """

        def is_there() -> bool:
            return self.done() or not self._open

        if not is_there():
            self._backend.finish(is_there, self._call, self._missing())

    def wait(self) -> None:
        """Blocks until all transfers have ended; raises the error of a transfer that failed."""
        if not self._ended:
            self._backend.finish(self.done, self._call, self._missing())
        self._backend.control.works.discard(self)
        if self._error is not None:
            raise self._error

    def synchronize(self) -> None:
        """Blocks until all transfers have ended, the same as `wait`: CPU tensors have no stream."""
        self.wait()


class CpuPeerBackend(PeerBackend):
    """The backend for peer copies of CPU tensors: a receiver reads the sender's memory.

    The processes of a host share this memory.
    """

    def __init__(self, control: Control) -> None:
        super().__init__(control)
        self._memory = SharedMemory()
        control.on_mended.append(self._mend)

    def _give_up(self, teams: Sequence[Team]) -> None:
        super()._give_up(teams)
        kept = [*self._mailboxes.values()]
        works = self.control.works
        works -= {w for w in works if isinstance(w, _Copies) and w.mailbox not in kept}

    def _mend(self, team: Team) -> None:
        """Drops the mailboxes of a team, and of each team whose ranks all belong to it, after a
        failed call.

        A mailbox is the shared memory in which the ranks of a team announce transfers. A failed
        program may have left announcements there that no rank will answer.
        """
        self._give_up([t for t in self._mailboxes if {*t} <= {*team}])

    def _check_device(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu":
            raise InputError(
                "peer copies between CPU ranks communicate CPU tensors, but found a tensor on "
                f"{tensor.device}: move the tensor to the CPU"
            )

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocates memory that all processes of the host can map, as a uint8 tensor."""
        return self._memory.empty(nbytes)

    def tidy(self) -> None:
        """Frees shared memory that no tensor uses."""
        self._memory.tidy()

    def release(self) -> None:
        """Records that a host program was deleted, so that `tidy` frees its memory."""
        self._memory.release()

    def name_of(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], int] | None:
        """Returns the name of the shared memory that contains a tensor, and the tensor's offset in
        bytes.

        Other processes map the memory by this name. Returns None if the tensor is not in shared
        memory.
        """
        return self._memory.name_of(tensor)

    def side_by_side(self, tensor: torch.Tensor, team: Team, what: str) -> torch.Tensor:
        """Maps the parts (shards) that all ranks of a team store as one tensor, without a copy.

        The parts are in team order. `tensor` is this rank's part. `what` names the operation in
        error messages.
        """
        return side_by_side(self.control, self._memory, tensor, team, what)

    def _carry_out(
        self, mailbox: Mailbox, steps: Iterable[list[Numbered]], call: CollectiveCall | Exchange
    ) -> _Copies:
        work = _Copies(self, mailbox, iter(steps), call)
        # Keep it even if this rank does not wait for it: the peers need it.
        works = self.control.works
        if len(works) >= 64:
            works -= {old for old in works if old.done()}
        works.add(work)
        if isinstance(call, Exchange):
            # As on a GPU: later posts of this rank come after its receives.
            work.receive()
        return work

    def posted(self, mailbox: Mailbox, one: Numbered, call: CollectiveCall | Exchange) -> Sent:
        """Announces a send in the mailbox, the team's shared memory, so that the receiver can copy
        the data.

        `one` is the send, and `call` the communication to which it belongs.
        """
        return self._post(mailbox, one, call)

    def received(self, mailbox: Mailbox, one: Numbered) -> bool:
        """Copies the data of the receive `one` and returns True, if the sender has announced the
        data in the mailbox, the team's shared memory.

        Returns False if the sender has not announced the data yet.
        """
        peer, tensor = one.transfer.peer, one.transfer.tensor.detach()
        record = mailbox.find(peer, one.tag)
        if record is None:
            return False
        self._check_fits(mailbox, one, record)
        if record.nbytes:
            memory = self._memory.mapped(record.name, peer)
            source = memory[record.offset : record.offset + record.nbytes]
            # A tensor of one element is contiguous with any stride, also 0.
            flat = tensor.as_strided((tensor.numel(),), (1,))
            flat.copy_(source.view(flat.dtype))
        mailbox.answer(peer, record.slot, one.tag)
        self.control.wake((peer,))
        return True

    def finish(
        self, done: Callable[[], bool], call: CollectiveCall | Exchange, open_ones: list[Numbered]
    ) -> None:
        """Waits until `done()` returns True, which means that the communication `call` has ended.

        `open_ones` are the transfers for which other ranks must still act.
        """
        self._poll(done, call, open_ones)

    def drain(self) -> None:
        """Waits until other ranks have copied the data that they need out of this rank's memory.

        Waits only for communications of the last run. Communications of an earlier run have ended,
        or the run has failed, so that no rank will copy their data.
        """
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
        """Closes the backend and its shared memory; later communications raise an error."""
        super().close()
        self._memory.close()
