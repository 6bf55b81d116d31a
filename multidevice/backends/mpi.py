"""MPI through mpi4py: the control channel of MPI jobs, and the data backend of their CPU tensors.

All operations are nonblocking and polled, since a blocking MPI call neither ends at a deadline
nor shares its core. Data and control have communicators of their own, one per team, so that they
never mix with each other or with the user's traffic on MPI.COMM_WORLD.
"""

from __future__ import annotations

import faulthandler
import os
import re
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fuser import options
from fuser.errors import CommunicationError, InputError
from multidevice.backends.base import Call, CheckedBackend, Exchange
from multidevice.backends.protocol import Team
from multidevice.control import RECORD_NBYTES, JobControl, Step
from multidevice.waiting import Event, Need, poll_until, team_text

if TYPE_CHECKING:
    from mpi4py import MPI

_EVENT_TAG, _MEET_TAG = 1, 2
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


class MpiControl(JobControl):
    """The control channel over MPI; also makes and keeps the communicators of teams.

    Raises:
        CommunicationError: mpi4py's MPI is not the one whose launcher started this job.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        # MPI_Init runs when mpi4py.MPI is imported, holds the interpreter lock, and waits for all
        # ranks: only a watchdog in C can end it when a rank never arrives.
        faulthandler.dump_traceback_later(options.timeout_s(), exit=True)
        try:
            from mpi4py import MPI
        finally:
            faulthandler.cancel_dump_traceback_later()
        self.mpi = MPI
        world = MPI.COMM_WORLD
        if (world.Get_rank(), world.Get_size()) != (rank, size):
            raise CommunicationError(
                f"the launcher says rank {rank} of {size}, mpi4py says rank {world.Get_rank()} of "
                f"{world.Get_size()}: mpirun belongs to another MPI than mpi4py's "
                f"({MPI.Get_library_version().split(',')[0].strip()})"
            )
        self._posted: list[MPI.Request] = []
        # Requests of waits that ended with an error still write to their buffers.
        self._unfinished: list[MPI.Request] = []
        self._comms: dict[tuple[str, Team], MPI.Intracomm] = {}
        for channel in ("data", "control", "event"):
            self._comms[channel, self.world] = self._duplicate(channel)
        # What team communicators are made from; it is never lost.
        self._events = self._comms["event", self.world]
        # All ranks have come out of MPI_Init, so MPICH's segments need no name any more: they
        # would stay behind if the job were killed.
        _unlink_shared_memory()
        self.on_lost.append(self._forget)

    def _duplicate(self, channel: str) -> MPI.Intracomm:
        comm, request = self.mpi.COMM_WORLD.Idup()
        what = f"start-up of the {channel} channel over all {self.size} ranks"
        poll_until(request.Test, what=lambda: what, look=lambda _: None, rank=self.rank)
        return comm

    def communicator(
        self, channel: str, team: Team, call: Step | Call | None = None
    ) -> MPI.Intracomm:
        """Returns the team's communicator for data or control; collective over the team at first
        use. `call` is what needs it.
        """
        comm = self._comms.get((channel, team))
        if comm is None:
            # MPI_Comm_create_group blocks, so all members meet first, under the deadline.
            self._meet(channel, team, call)
            group = self._events.Get_group().Incl(list(team))
            tag = zlib.crc32(f"{channel}{team}".encode()) % 32768
            comm = self._events.Create_group(group, tag)
            self._comms[channel, team] = comm
        return comm

    def _forget(self, key: str) -> None:
        """Drops the communicator of a stream of calls: what is left in it must not be matched."""
        for channel, team in list(self._comms):
            name = "mpi" if channel == "data" else channel
            if channel != "event" and key == f"{name} {team_text(team)}":
                del self._comms[channel, team]

    def _meet(self, channel: str, team: Team, call: Step | Call | None) -> None:
        key = f"{channel} meeting {team_text(team)}"
        seq = self.ledger.enter(key)
        others = [rank for rank in team if rank != self.rank]
        # Messages of one meeting only: ranks may be on their way to different ones.
        tag = _MEET_TAG + zlib.crc32(f"{key} {seq}".encode()) % 30000
        message = [bytearray(0), self.mpi.BYTE]
        requests = [self._events.Isend(message, rank, tag) for rank in others]
        requests += [self._events.Irecv(message, rank, tag) for rank in others]
        self.poll_until(
            lambda: self.mpi.Request.Testall(requests),
            what=lambda: (
                f"set-up of the {channel} channel of team {team_text(team)}"
                + (f" for {call.describe()}" if call is not None else "")
            ),
            needs=lambda: (
                [Need(rank, key, seq + 1) for rank in others]
                + (call.needs() if call is not None else [])
            ),
        )

    def _gather(self, record: bytes, step: Step) -> list[bytes]:
        byte = self.mpi.BYTE
        everything = bytearray(RECORD_NBYTES * len(step.team))
        comm = self.communicator("control", step.team, step)
        self._complete(comm.Iallgather([record, byte], [everything, byte]), step)
        view = bytes(everything)
        return [view[start : start + RECORD_NBYTES] for start in range(0, len(view), RECORD_NBYTES)]

    def _gather_varied(self, payload: bytes, sizes: Sequence[int], step: Step) -> list[bytes]:
        byte = self.mpi.BYTE
        everything = bytearray(sum(sizes))
        comm = self.communicator("control", step.team, step)
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        request = comm.Iallgatherv([payload, byte], [everything, (list(sizes), offsets), byte])
        self._complete(request, step)
        return [
            bytes(everything[offset : offset + size])
            for offset, size in zip(offsets, sizes, strict=True)
        ]

    def _complete(self, request: MPI.Request, step: Step) -> None:
        try:
            self.poll_until(request.Test, what=step.describe, needs=step.needs)
        except BaseException:
            self._unfinished.append(request)
            raise

    def listen(self) -> None:
        """Takes in the announcements that have arrived."""
        status = self.mpi.Status()
        # A matched probe, because the guard's thread may listen at the same time.
        while message := self._events.Improbe(self.mpi.ANY_SOURCE, _EVENT_TAG, status):
            data = bytearray(status.Get_count(self.mpi.BYTE))
            message.Recv([data, self.mpi.BYTE])
            self.peers.record(Event.decode(bytes(data)))

    def announce(self, event: Event) -> None:
        """Sends the event to every peer without waiting."""
        if self.mpi.Is_finalized():
            return
        data = event.encode()
        for rank in self.world:
            if rank != self.rank:
                message = [data, self.mpi.BYTE]
                self._posted.append(self._events.Isend(message, rank, _EVENT_TAG))

    def finish(self) -> None:
        """Keeps MPI progressing until all peers have announced too, or the deadline has passed."""
        if self.mpi.Is_finalized():
            return
        sleep_s = 0.0

        def progress() -> None:
            nonlocal sleep_s
            self.mpi.Request.Testall(self._posted)
            time.sleep(sleep_s)
            sleep_s = min(_FINISH_SLEEP_S, sleep_s + _FINISH_SLEEP_S / 20)

        # MPI_Finalize and the launcher take over from here.
        self.wait_for_leavers(progress)

    def abort(self, code: int) -> None:
        """Ends all ranks of the job."""
        if not self.mpi.Is_finalized():
            _unlink_shared_memory()
            self.mpi.COMM_WORLD.Abort(code)
        os._exit(code)


def _unlink_shared_memory() -> None:
    """Removes the names of this job's MPICH segments, which an aborted job would leave behind.

    The ranks keep their mappings; a small /dev/shm would otherwise fill up with aborted jobs.
    """
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return
    for name in sorted(set(re.findall(r"/dev/shm/mpich_shm_\w+$", maps, re.MULTILINE))):
        Path(name).unlink(missing_ok=True)


class _MpiWork:
    """Requests in flight, with the buffers that they use."""

    def __init__(
        self, backend: MpiBackend, requests: list[MPI.Request], call: Call | Exchange
    ) -> None:
        self._backend = backend
        self._requests = requests
        self._call = call

    def done(self) -> bool:
        """Progresses MPI and returns whether all requests have completed."""
        return self._backend.mpi.Request.Testall(self._requests)

    def wait(self) -> None:
        """See `Work.wait`."""
        if not self._requests:
            return
        control = self._backend.control
        control.poll_until(self.done, what=self._call.describe, needs=self._call.needs)
        self._requests = []
        self._backend.pending.discard(self)

    def synchronize(self) -> None:
        """See `Work.synchronize`."""
        self.wait()


class MpiBackend(CheckedBackend):
    """Collectives on CPU tensors over MPI."""

    name = "mpi"
    in_place_parts = frozenset({"allgather"})

    def __init__(self, control: MpiControl) -> None:
        super().__init__(control.rank, control.size, control.ledger)
        self.control = control
        self.mpi = control.mpi
        # A request whose Work was dropped still writes to its buffers: they stay alive here.
        self.pending: set[_MpiWork] = set()

    def _check_device(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu":
            raise InputError(f"backend mpi takes CPU tensors, found one on {tensor.device}")

    def _start(self, call: Call) -> _MpiWork:
        comm = self.control.communicator("data", call.team, call)
        return self._track([_COLLECTIVES[call.op](self, comm, call)], call)

    def _start_batch(self, batch: Exchange) -> _MpiWork:
        # Point-to-point messages are matched by source and order, so a team needs no
        # communicator; the tag keeps equal pairs of different teams apart.
        comm = self.control.communicator("data", self.control.world)
        tag = zlib.crc32(repr(batch.team).encode()) % 32768
        requests: list[MPI.Request] = []
        for transfer in batch.transfers:
            post = comm.Isend if transfer.kind == "send" else comm.Irecv
            requests.append(post(self._bytes(transfer.tensor), transfer.peer, tag))
        return self._track(requests, batch)

    def _track(self, requests: list[MPI.Request], call: Call | Exchange) -> _MpiWork:
        work = _MpiWork(self, requests, call)
        if len(self.pending) >= 64:
            self.pending = {old for old in self.pending if not old.done()}
        self.pending.add(work)
        return work

    def _bytes(self, tensor: torch.Tensor | None) -> Any:
        """Returns the tensor as an MPI message of bytes."""
        if tensor is None:
            return None
        nbytes = tensor.numel() * tensor.element_size()
        return [self.mpi.buffer.fromaddress(tensor.data_ptr(), nbytes), self.mpi.BYTE]

    def _numbers(self, tensor: torch.Tensor | None) -> Any:
        """Returns the tensor as an MPI message of typed elements."""
        if tensor is None:
            return None
        nbytes = tensor.numel() * tensor.element_size()
        datatype = getattr(self.mpi, _DTYPES[tensor.dtype])
        return [self.mpi.buffer.fromaddress(tensor.data_ptr(), nbytes), datatype]

    def _operands(self, call: Call) -> tuple[Any, Any, Any]:
        """Returns (input, output, op) of a reduction."""
        same = (
            call.out is not None
            and call.inp is not None
            and call.out.data_ptr() == call.inp.data_ptr()
        )
        assert call.reduce is not None, "a reduction has an op"
        inp = self.mpi.IN_PLACE if same else self._numbers(call.inp)
        return inp, self._numbers(call.out), getattr(self.mpi, _RED_OPS[call.reduce])

    def post_allgather(self, comm: MPI.Intracomm, call: Call) -> MPI.Request:
        """Posts an allgather; the input may be this rank's part of the output."""
        assert call.inp is not None and call.out is not None, "checked"
        nbytes = call.inp.numel() * call.inp.element_size()
        own = call.inp.data_ptr() == call.out.data_ptr() + call.index * nbytes and nbytes > 0
        inp = self.mpi.IN_PLACE if own else self._bytes(call.inp)
        return comm.Iallgather(inp, self._bytes(call.out))

    def post_allreduce(self, comm: MPI.Intracomm, call: Call) -> MPI.Request:
        """Posts an allreduce."""
        return comm.Iallreduce(*self._operands(call))

    def post_reduce(self, comm: MPI.Intracomm, call: Call) -> MPI.Request:
        """Posts a reduce."""
        return comm.Ireduce(*self._operands(call), call.root_index)

    def post_reduce_scatter(self, comm: MPI.Intracomm, call: Call) -> MPI.Request:
        """Posts a reduce-scatter of equal blocks."""
        return comm.Ireduce_scatter_block(*self._operands(call))

    def post_alltoall(self, comm: MPI.Intracomm, call: Call) -> MPI.Request:
        """Posts an all-to-all of equal parts."""
        return comm.Ialltoall(self._bytes(call.inp), self._bytes(call.out))

    def post_broadcast(self, comm: MPI.Intracomm, call: Call) -> MPI.Request:
        """Posts a broadcast."""
        return comm.Ibcast(self._bytes(call.out), call.root_index)

    def post_gather(self, comm: MPI.Intracomm, call: Call) -> MPI.Request:
        """Posts a gather."""
        return comm.Igather(self._bytes(call.inp), self._bytes(call.out), call.root_index)

    def post_scatter(self, comm: MPI.Intracomm, call: Call) -> MPI.Request:
        """Posts a scatter."""
        return comm.Iscatter(self._bytes(call.inp), self._bytes(call.out), call.root_index)

    def post_barrier(self, comm: MPI.Intracomm, call: Call) -> MPI.Request:
        """Posts a barrier."""
        del call
        return comm.Ibarrier()


_COLLECTIVES: dict[str, Callable[[MpiBackend, Any, Call], Any]] = {
    "allgather": MpiBackend.post_allgather,
    "allreduce": MpiBackend.post_allreduce,
    "reduce": MpiBackend.post_reduce,
    "reduce_scatter": MpiBackend.post_reduce_scatter,
    "alltoall": MpiBackend.post_alltoall,
    "broadcast": MpiBackend.post_broadcast,
    "gather": MpiBackend.post_gather,
    "scatter": MpiBackend.post_scatter,
    "barrier": MpiBackend.post_barrier,
}


def local_layout(rank: int, size: int) -> tuple[int, int]:
    """Returns (local rank, local size) for launchers that do not say; collective over all ranks."""
    from mpi4py import MPI

    local = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED, rank)
    layout = (local.Get_rank(), local.Get_size())
    local.Free()
    return layout if layout[1] <= size else (rank, size)
