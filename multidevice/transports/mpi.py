"""Communication of CPU tensors over MPI (mpi4py), and the control channel of jobs of mpirun.

Over the control channel, the ranks exchange small messages. All operations are nonblocking and
polled, because a blocking MPI call has no deadline and occupies its core. No MPI communicator is
created after start-up: creating one would block. After an error, a rank could never be sure that
all other ranks take part.

MPI's own collectives are used in the team of all ranks, until an error interrupts one of them.
Other teams, and all teams after such an error, exchange point-to-point messages, whose tags
distinguish the calls. Data and control messages have separate communicators. So they never mix with
each other or with the user's messages on MPI.COMM_WORLD.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fuser.support import options
from fuser.support.errors import CommunicationError, InputError
from multidevice.coordination import shared_page
from multidevice.coordination.bounded_wait import Calls, Event, poll_until
from multidevice.coordination.control_channel import RECORD_NBYTES, ControlCall, JobControl
from multidevice.transports.base.checked_backend import CheckedBackend, CollectiveCall, Exchange
from multidevice.transports.base.collectives import (
    ALL_TO_ALL,
    ALLGATHER,
    ALLREDUCE,
    BARRIER,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    Collective,
)
from multidevice.transports.base.p2p_collectives import steps_of
from multidevice.transports.base.protocol import Transfer

if TYPE_CHECKING:
    from mpi4py import MPI

_EVENT_TAG = 1
_FINISH_SLEEP_S = 0.002

_RED_OPS = {"SUM": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX"}
_DTYPES = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    torch.int64: "INT64_T",
    torch.int32: "INT32_T",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
}


def _no_mpi4py(error: Exception) -> str:
    """Returns the error message for a failed import of mpi4py; `error` is the exception of the
    import.
    """
    python = sys.executable or "python"
    if isinstance(error, ModuleNotFoundError) and error.name == "mpi4py":
        remedy = f"{python} -m pip install 'mpi4py>=4.1,<5' installs it"
    else:
        remedy = (
            f"{python} -m pip install mpich installs one, or set MPI4PY_LIBMPI to the libmpi.so of "
            "this mpirun"
        )
    return (
        f"a job of mpirun needs mpi4py and an MPI library, and one is missing ({error}): {remedy}; "
        "torchrun starts ranks without MPI"
    )


class MpiControl(JobControl):
    """The control channel of a job over MPI, by which the ranks exchange small messages.

    Also creates the MPI communicators for control messages and for data.

    Raises:
        CommunicationError: mpi4py is missing, or uses another MPI than the launcher of this job.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        # MPI_Init runs when mpi4py.MPI is imported. It holds the interpreter lock and waits for all
        # ranks, so only a watchdog in C can end it when a rank never starts.
        faulthandler.dump_traceback_later(options.timeout_s(), exit=True)
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise CommunicationError(_no_mpi4py(error)) from None
        finally:
            faulthandler.cancel_dump_traceback_later()
        self.mpi = MPI
        world = MPI.COMM_WORLD
        if (world.Get_rank(), world.Get_size()) != (rank, size):
            raise CommunicationError(
                f"the launcher says rank {rank} of {size}, mpi4py says rank {world.Get_rank()} of "
                f"{world.Get_size()}: mpirun belongs to another MPI than mpi4py's "
                f"({MPI.Get_library_version().split(',')[0].strip()}); use the mpirun of that MPI"
            )
        self._posted: list[MPI.Request] = []
        # Requests of waits that ended with an error still write to their buffers. The error may
        # make even the request objects inaccessible, so the buffers themselves are kept here.
        self.unfinished: list[object] = []
        self.tags = 1 + (world.Get_attr(MPI.TAG_UB) or 32767)
        self._control = self._duplicate("control")
        self.data = self._duplicate("data")
        self._events = self._duplicate("event")
        # All ranks have finished MPI_Init, so MPICH's segments no longer need names. The names
        # would be left behind if the job were killed.
        shared_page.unlink_mpich_segments()

    def _duplicate(self, channel: str) -> MPI.Intracomm:
        comm, request = self.mpi.COMM_WORLD.Idup()
        what = f"start-up of the {channel} channel over all {self.size} ranks"
        poll_until(request.Test, what=lambda: what, look=lambda _: None, rank=self.rank)
        return comm

    def tag(self, key: Calls, seq: int) -> int:
        """Returns the MPI tag for the messages of call number `seq` in the sequence of calls `key`.

        Messages of an abandoned call never match a later call, because the numbers differ.
        """
        return (zlib.crc32(str(key).encode()) + seq) % self.tags

    def _gather(self, record: bytes, step: ControlCall) -> list[bytes]:
        return self._gather_varied(record, [RECORD_NBYTES] * len(step.team), step)

    def _gather_varied(
        self, payload: bytes, sizes: Sequence[int], step: ControlCall
    ) -> list[bytes]:
        tag, byte = self.tag(step.key, step.seq), self.mpi.BYTE
        found = {rank: bytearray(size) for rank, size in zip(step.team, sizes, strict=True)}
        found[self.rank][:] = payload
        others = [rank for rank in step.team if rank != self.rank]
        requests: list[MPI.Request] = []
        try:
            requests += [self._control.Irecv([found[rank], byte], rank, tag) for rank in others]
            requests += [self._control.Isend([payload, byte], rank, tag) for rank in others]
            self.poll_until(
                lambda: self.mpi.Request.Testall(requests), what=step.describe, needs=step.needs
            )
        except BaseException:
            self.unfinished += requests, found, payload
            raise
        return [bytes(part) for part in found.values()]

    def listen(self) -> None:
        """Reads the messages by which other ranks have announced a failure, or that they leave the
        job.
        """
        status = self.mpi.Status()
        # A matched probe, because the guard's thread may listen at the same time.
        while message := self._events.Improbe(self.mpi.ANY_SOURCE, _EVENT_TAG, status):
            data = bytearray(status.Get_count(self.mpi.BYTE))
            message.Recv([data, self.mpi.BYTE])
            self.peers.record(Event.decode(bytes(data)))

    def announce(self, event: Event) -> None:
        """Announces to all other ranks that this rank has failed or leaves the job; does not
        wait.
        """
        if self.mpi.Is_finalized():
            return
        data = event.encode()
        for rank in self.world:
            if rank != self.rank:
                message = [data, self.mpi.BYTE]
                self._posted.append(self._events.Isend(message, rank, _EVENT_TAG))

    def finish(self) -> None:
        """Waits until all other ranks have announced that they leave the job, or until the
        deadline.

        MPI makes progress meanwhile, so that messages which other ranks still need are delivered.
        """
        if self.mpi.Is_finalized():
            return
        sleep_s = 0.0

        def progress() -> None:
            nonlocal sleep_s
            self.mpi.Request.Testall(self._posted)
            time.sleep(sleep_s)
            sleep_s = min(_FINISH_SLEEP_S, sleep_s + _FINISH_SLEEP_S / 20)

        # After this, MPI_Finalize and the launcher wait for the other ranks.
        self.wait_for_leavers(progress)

    def abort(self, code: int) -> None:
        """Ends all ranks of the job by MPI_Abort with the exit code `code`."""
        if not self.mpi.Is_finalized():
            shared_page.unlink_mpich_segments()
            self.mpi.COMM_WORLD.Abort(code)
        os._exit(code)


class MpiWork:
    """The handle of a started communication, which consists of several lists of MPI requests.

    The requests of a list are posted when all requests of the previous list have ended.
    """

    def __init__(
        self,
        control: MpiControl,
        steps: Iterator[list[MPI.Request]],
        call: CollectiveCall | Exchange,
    ) -> None:
        self._control = control
        self._steps = steps
        # Kept here because requests do not keep the tensors alive.
        self._call = call
        self._requests = next(steps, None)

    def done(self) -> bool:
        """Lets MPI make progress without waiting, and posts the next requests if the current ones
        have ended.

        Returns whether the whole communication has ended.
        """
        testall = self._control.mpi.Request.Testall
        while self._requests is not None and testall(self._requests):
            try:
                self._requests = next(self._steps, None)
            except BaseException:
                self._control.unfinished.append(self._call)
                raise
        return self._requests is None

    def wait(self) -> None:
        """Blocks until the whole communication has ended, with a deadline."""
        if self._requests is not None:
            self._control.poll_until(self.done, what=self._call.describe, needs=self._call.needs)
        self._control.works.discard(self)

    def synchronize(self) -> None:
        """Blocks until the whole communication has ended, the same as `wait`: CPU tensors have no
        stream.
        """
        self.wait()


class MpiBackend(CheckedBackend):
    """The communication backend for CPU tensors, over MPI."""

    name = "mpi"
    in_place_parts = frozenset({ALLGATHER})

    def __init__(self, control: MpiControl) -> None:
        super().__init__(control.rank, control.size, control.ledger)
        self.control = control
        self.mpi = control.mpi
        self._world_key = Calls(self.name, control.world)
        # In the ledger, so that ranks that differ in it find out when they compare their counts.
        self._direct_key = Calls(f"direct {self.name}", control.world)
        control.on_lost.append(self._forget)

    def _forget(self, key: Calls) -> None:
        """Stops the use of MPI's own collectives if a collective of the team of all ranks has
        failed.

        Otherwise later collectives could match messages of the failed one. `key` names the sequence
        of calls that failed.
        """
        if key == self._world_key:
            self.control.ledger.entered[self._direct_key] = 1

    def _check_device(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu":
            raise InputError(
                "the MPI backend communicates CPU tensors, but found a tensor on "
                f"{tensor.device}: move the tensor to the CPU"
            )

    def _start(self, call: CollectiveCall) -> MpiWork:
        control = self.control
        is_direct = call.team == control.world and call.row in _COLLECTIVES
        if is_direct and self._direct_key not in control.ledger.entered:
            return self._track(lambda: self._whole(call), call)
        tag = control.tag(call.key, call.seq)
        return self._track(lambda: self._posted(steps_of(call), tag), call)

    def _whole(self, call: CollectiveCall) -> Iterator[list[MPI.Request]]:
        return iter([[_COLLECTIVES[call.row](self, self.control.data, call)]])

    def _start_batch(self, batch: Exchange) -> MpiWork:
        tag = self.control.tag(Calls("batch", batch.team), 0)
        return self._track(
            lambda: iter([self._requests(batch.transfers, tag, batch.sequence)]), batch
        )

    def _posted(self, steps: Iterable[Sequence[Transfer]], tag: int) -> Iterator[list[MPI.Request]]:
        for transfers in steps:
            yield self._requests(transfers, tag, (0,) * len(transfers))

    def _requests(
        self, transfers: Sequence[Transfer], tag: int, numbers: Sequence[int]
    ) -> list[MPI.Request]:
        comm, tags = self.control.data, self.control.tags
        post = {"send": comm.Isend, "recv": comm.Irecv}
        return [
            post[t.kind](self._bytes(t.tensor), t.peer, (tag + number) % tags)
            for t, number in zip(transfers, numbers, strict=True)
        ]

    def _track(
        self, post: Callable[[], Iterator[list[MPI.Request]]], call: CollectiveCall | Exchange
    ) -> MpiWork:
        try:
            work = MpiWork(self.control, post(), call)
        except BaseException:
            self.control.unfinished.append(call)
            raise
        # Keep it even if no rank waits for it: its requests use its buffers, and the peers need it.
        works = self.control.works
        if len(works) >= 64:
            works -= {old for old in works if old.done()}
        works.add(work)
        return work

    def _bytes(self, tensor: torch.Tensor | None) -> Any:
        """Returns the memory of a tensor as an MPI buffer of bytes; None for None."""
        if tensor is None:
            return None
        nbytes = tensor.numel() * tensor.element_size()
        return [self.mpi.buffer.fromaddress(tensor.data_ptr(), nbytes), self.mpi.BYTE]

    def _numbers(self, tensor: torch.Tensor | None) -> Any:
        """Returns the memory of a tensor as an MPI buffer of elements of its dtype; None for
        None.
        """
        if tensor is None:
            return None
        nbytes = tensor.numel() * tensor.element_size()
        datatype = getattr(self.mpi, _DTYPES[tensor.dtype])
        return [self.mpi.buffer.fromaddress(tensor.data_ptr(), nbytes), datatype]

    def _operands(self, call: CollectiveCall) -> tuple[Any, Any, Any]:
        """Returns (input, output, reduction) of a call, as arguments of an MPI reduction.

        The input is MPI.IN_PLACE if input and output are the same memory.
        """
        same = (
            call.out is not None
            and call.inp is not None
            and call.out.data_ptr() == call.inp.data_ptr()
        )
        assert call.reduce is not None, "a reduction has an op"
        inp = self.mpi.IN_PLACE if same else self._numbers(call.inp)
        return inp, self._numbers(call.out), getattr(self.mpi, _RED_OPS[call.reduce])

    # ------------------------------------------------------------ MPI's own calls
    def post_allgather(self, comm: MPI.Intracomm, call: CollectiveCall) -> MPI.Request:
        """Starts MPI's allgather on `comm`; returns the MPI request.

        The input may be this rank's own part of the output.
        """
        assert call.inp is not None and call.out is not None, "checked"
        nbytes = call.inp.numel() * call.inp.element_size()
        own = call.inp.data_ptr() == call.out.data_ptr() + call.index * nbytes and nbytes > 0
        inp = self.mpi.IN_PLACE if own else self._bytes(call.inp)
        return comm.Iallgather(inp, self._bytes(call.out))

    def post_allreduce(self, comm: MPI.Intracomm, call: CollectiveCall) -> MPI.Request:
        """Starts MPI's allreduce on `comm`; returns the MPI request."""
        return comm.Iallreduce(*self._operands(call))

    def post_reduce(self, comm: MPI.Intracomm, call: CollectiveCall) -> MPI.Request:
        """Starts MPI's reduce on `comm`; returns the MPI request."""
        return comm.Ireduce(*self._operands(call), call.root_index)

    def post_reduce_scatter(self, comm: MPI.Intracomm, call: CollectiveCall) -> MPI.Request:
        """Starts MPI's reduce-scatter with blocks of equal size on `comm`; returns the MPI
        request.
        """
        return comm.Ireduce_scatter_block(*self._operands(call))

    def post_alltoall(self, comm: MPI.Intracomm, call: CollectiveCall) -> MPI.Request:
        """Starts MPI's all-to-all with parts of equal size on `comm`; returns the MPI request."""
        return comm.Ialltoall(self._bytes(call.inp), self._bytes(call.out))

    def post_broadcast(self, comm: MPI.Intracomm, call: CollectiveCall) -> MPI.Request:
        """Starts MPI's broadcast on `comm`; returns the MPI request."""
        return comm.Ibcast(self._bytes(call.out), call.root_index)

    def post_gather(self, comm: MPI.Intracomm, call: CollectiveCall) -> MPI.Request:
        """Starts MPI's gather on `comm`; returns the MPI request."""
        return comm.Igather(self._bytes(call.inp), self._bytes(call.out), call.root_index)

    def post_scatter(self, comm: MPI.Intracomm, call: CollectiveCall) -> MPI.Request:
        """Starts MPI's scatter on `comm`; returns the MPI request."""
        return comm.Iscatter(self._bytes(call.inp), self._bytes(call.out), call.root_index)

    def post_barrier(self, comm: MPI.Intracomm, call: CollectiveCall) -> MPI.Request:
        """Starts MPI's barrier on `comm`; returns the MPI request."""
        del call
        return comm.Ibarrier()


# MPI's own calls, for teams of all ranks; all other calls are sends and receives.
_COLLECTIVES: dict[Collective, Callable[[MpiBackend, Any, CollectiveCall], Any]] = {
    ALLGATHER: MpiBackend.post_allgather,
    ALLREDUCE: MpiBackend.post_allreduce,
    REDUCE: MpiBackend.post_reduce,
    REDUCE_SCATTER: MpiBackend.post_reduce_scatter,
    ALL_TO_ALL: MpiBackend.post_alltoall,
    BROADCAST: MpiBackend.post_broadcast,
    GATHER: MpiBackend.post_gather,
    SCATTER: MpiBackend.post_scatter,
    BARRIER: MpiBackend.post_barrier,
}


def local_layout(rank: int, size: int) -> tuple[int, int]:
    """Returns this rank's number among the ranks of its host, and how many ranks this host has.

    MPI determines both numbers, if the launcher sets no environment variables for them. All ranks
    of the job must make the call.
    """
    from mpi4py import MPI

    local = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED, rank)
    layout = (local.Get_rank(), local.Get_size())
    local.Free()
    return layout if layout[1] <= size else (rank, size)
