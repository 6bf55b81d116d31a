"""The NCCL backend: communication between CUDA tensors, on the current stream or a given stream.

A collective is enqueued on a CUDA stream, and later work of this stream runs after the collective.
Therefore `wait` does nothing, and a CUDA graph can capture collectives. A host program orders the
collectives by the streams on which it enqueues them. An NCCL communicator is created at the first
use of a team (the ranks that communicate). So each collective must be called once before a CUDA
graph captures the collective.

Two kinds of calls do not use NCCL:

- An allreduce of at most MAX_NBYTES bytes runs as one CUDA kernel (`peer_allreduce`), if the GPUs
  are on one host and can map each other's memory.
- NCCL refuses a team in which two ranks share a GPU. Such a team communicates through host memory
  (`Staging`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from fuser.support.errors import CommunicationError, InputError, UnsupportedError, warn
from multidevice.coordination.bounded_wait import Calls, Need, Team, team_text
from multidevice.coordination.control_channel import Control
from multidevice.transports.allreduce_kernel import AllreduceKernels
from multidevice.transports.base.allreduce_model import MAX_NBYTES
from multidevice.transports.base.checked_backend import (
    DONE,
    CheckedBackend,
    CollectiveCall,
    Exchange,
    FinishingWork,
    is_of,
    stream_at,
    stream_handle,
    transfer_key,
)
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
    TransportTable,
)
from multidevice.transports.base.launch_order import CudaDriver, LaunchOrder
from multidevice.transports.base.protocol import Backend, Post, PostBatch, Work
from multidevice.transports.memory.cuda_ipc import IpcMemory
from multidevice.transports.nccl_binding import (
    DTYPES,
    RED_OPS,
    UINT8,
    NcclBinding,
    NcclComm,
    load_binding,
)

# How long to wait until communicators are freed: NCCL waits for graphs that use them.
_ABORT_LIMIT_S = 10.0


class _StreamWork:
    """A communication that was enqueued on a CUDA stream. Later work of this stream runs after the
    communication.
    """

    def __init__(
        self, backend: NcclBackend, comm: NcclComm, stream: int, call: CollectiveCall | Exchange
    ) -> None:
        self._backend = backend
        self._comm = comm
        self._stream = stream
        self._call = call

    def wait(self) -> None:
        """Does nothing, because the CUDA stream itself runs later work after the communication.

        The method exists because every handle of a communication has `wait`.
        """

    def synchronize(self) -> None:
        """Blocks the host until the CUDA stream has completed the communication.

        Checks NCCL's asynchronous errors while it waits, and raises an error at the deadline.
        """
        stream = stream_at(self._stream, self._backend.device)

        def done() -> bool:
            self._comm.check()
            return stream.query()

        self._backend.poll(done, self._call.describe, self._call.needs)


class NcclBackend(CheckedBackend):
    """The communication backend for the tensors of one CUDA device, over NCCL."""

    name = "nccl"
    stages_half = False
    has_avg = True
    in_place_parts = frozenset({ALLGATHER, REDUCE_SCATTER})

    def __init__(
        self,
        control: Control,
        device: torch.device,
        binding: NcclBinding | None = None,
        *,
        kernels_nbytes: int = MAX_NBYTES,
        on_cpu: Callable[[], Backend] | None = None,
    ) -> None:
        """Creates a backend for the tensors of the GPU `device`.

        - `control`: the control channel, over which the ranks of the job exchange small messages.
        - `binding`: the Python binding of NCCL; None for the first one that works.
        - `kernels_nbytes`: allreduces of at most this many bytes run as one CUDA kernel, not as
          NCCL calls.
        - `on_cpu`: returns the backend for CPU tensors, over which ranks that share a GPU
          communicate. If `on_cpu` is None, such communications raise an error.
        """
        super().__init__(control.rank, control.size, control.ledger)
        self.control = control
        self.device = device
        self.binding = load_binding() if binding is None else binding
        self._comms: dict[Team, NcclComm] = {}
        # Team -> its staging where ranks share a GPU, None where each rank has its own GPU. Teams
        # are added at their first use.
        self._shared: dict[Team, Staging | None] = {}
        self._on_cpu = on_cpu
        # The GPUs about which a warning was printed.
        self._told: set[str] = set()
        self.kernels = AllreduceKernels(
            control,
            device,
            kernels_nbytes,
            lambda: IpcMemory(device),
            lambda: LaunchOrder(CudaDriver(device)),
        )
        control.on_lost.append(self._forget)

    def _forget(self, key: Calls) -> None:
        """Aborts the NCCL communicators that a failed sequence of calls used; `key` names the
        sequence.

        Otherwise a later call could be matched with a call that the failure left unfinished.
        """
        # All members must drop the entry, because they make the next one together.
        self._shared.pop(key.team, None)
        lost = [team for team in self._comms if is_of(key, self.name, team)]
        if lost or key.kind == self.name:
            self.make_void()
        for team in lost:
            _abort([self._comms.pop(team)])

    def can_capture(self, what: str) -> bool:
        """Returns whether a CUDA graph may repeat the communication `what`.

        Returns False if `what` is "barrier", or if ranks of some team share a GPU. In both cases
        the host must wait for the device, which a CUDA graph cannot repeat.
        """
        return what != "barrier" and not any(self._shared.values())

    def poll(
        self,
        done: Callable[[], bool],
        what: Callable[[], str],
        needs: Callable[[], list[Need]],
    ) -> None:
        """Waits until `done()` returns True; an error of NCCL meanwhile is raised as
        `CommunicationError`.

        - `what()`: the name of the operation, for messages.
        - `needs()`: the calls that other ranks must enter before the operation can complete.

        Raises `CommunicationTimeout` at the deadline.
        """
        try:
            self.control.poll_until(done, what=what, needs=needs)
        except CommunicationError:
            raise
        except RuntimeError as error:
            raise CommunicationError(f"{what()} failed on rank {self.rank}: {error}") from error

    def _check_device(self, tensor: torch.Tensor) -> None:
        if tensor.device != self.device:
            raise InputError(
                f"the NCCL backend of this rank communicates tensors on {self.device}, but found a "
                f"tensor on {tensor.device}: move the tensor to {self.device}"
            )

    def _on(self, stream: object) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream_at(self._handle(stream), self.device))

    def _pinned(self, stream: object) -> int:
        return self._handle(stream)

    def _handle(self, stream: object) -> int:
        return stream_handle(stream, self.device)

    def _comm(self, team: Team) -> NcclComm:
        """Returns the NCCL communicator of a team.

        The first call for a team creates the communicator, so all ranks of the team must make that
        call.
        """
        comm = self._comms.get(team)
        if comm is None:
            comm = self._connect(team)
            self._comms[team] = comm
        return comm

    def _staging(self, team: Team) -> Staging | None:
        """Returns the object by which a team communicates through host memory, if its ranks share a
        GPU.

        NCCL cannot serve such a team. Returns None if each rank has its own GPU. All ranks of the
        team get the same answer. The first call for a team exchanges messages, so all ranks of the
        team must make that call.
        """
        if team not in self._shared:
            self._shared[team] = self._meet(team)
        return self._shared[team]

    def _meet(self, team: Team) -> Staging | None:
        answers = self.control.exchange(_device_name(self.device).encode(), team=team)
        users: dict[str, list[int]] = {}
        for rank, answer in sorted(zip(team, answers, strict=True)):
            users.setdefault(answer.decode(), []).append(rank)
        shared = {name: ranks for name, ranks in users.items() if len(ranks) > 1}
        if not shared:
            return None
        text = "; ".join(
            f"ranks {', '.join(map(str, ranks))} share the GPU {name}"
            for name, ranks in shared.items()
        )
        if self._on_cpu is None:
            raise CommunicationError(
                f"{text}: NCCL needs one GPU per rank, so start one rank per GPU"
            )
        staging = Staging(self._on_cpu(), self._on, self._pinned, self.settle)
        # One rank of the team prints the warning, once per GPU.
        is_speaker = self.rank == min(min(ranks) for ranks in shared.values())
        if is_speaker and not self._told.issuperset(shared):
            self._told.update(shared)
            warn(
                f"{text}: NCCL needs one GPU per rank, so teams with these ranks communicate "
                f"through the memory of the host, over {staging.name}. Results are the same, but "
                "times are longer. FUSER_ENABLE=peer_copies copies within the GPU instead; for "
                "speed start one rank per GPU"
            )
        return staging

    def settle(self, call: CollectiveCall | Exchange) -> None:
        """Blocks the host until the device has done all work that is now on the CUDA stream of
        `call`.

        Raises `UnsupportedError` if a CUDA graph is being captured on that stream.
        """
        with self._on(call.stream):
            if torch.cuda.is_current_stream_capturing():
                raise UnsupportedError(
                    f"{call.describe()}: ranks that share a GPU communicate through the host, "
                    "and a CUDA graph cannot repeat work of the host: make this call outside the "
                    "capture, or start one rank per GPU"
                )
        stream = stream_at(self._handle(call.stream), self.device)
        self.poll(stream.query, call.describe, list)

    def _connect(self, team: Team) -> NcclComm:
        unique_id = self.binding.unique_id() if team[0] == self.rank else b""
        answers = self.control.exchange(unique_id, team=team)
        index = team.index(self.rank)
        result: list[NcclComm] = []
        failure: list[BaseException] = []

        def connect() -> None:
            try:
                torch.cuda.set_device(self.device)
                result.append(self.binding.connect(len(team), answers[0], index))
            except Exception as error:
                failure.append(error)

        # ncclCommInitRank blocks until every member calls it. It runs in a thread, so that this one
        # can check the deadline.
        thread = threading.Thread(target=connect, name="nccl-connect", daemon=True)
        thread.start()
        self.poll(
            lambda: not thread.is_alive(),
            lambda: f"the connection of the NCCL team {team_text(team)}",
            list,
        )
        if failure:
            raise CommunicationError(
                f"NCCL ({self.binding.name}) cannot connect rank {self.rank} with the other ranks "
                f"of the team {team_text(team)}: {failure[0]}"
            ) from failure[0]
        return result[0]

    def _start_reduction(self, call: CollectiveCall) -> Work:
        staging = self._staging(call.team)
        if staging is not None:
            return staging.start(call)
        work = self.kernels.start(call, self._handle(call.stream))
        return super()._start_reduction(call) if work is None else work

    def _bind_reduction(self, call: CollectiveCall) -> Post | None:
        if self._shared.get(call.team) is not None:
            return None
        takes = self.kernels.takes(call)
        return self.kernels.bind(call) if takes else super()._bind_reduction(call)

    def _start(self, call: CollectiveCall) -> Work:
        staging = self._staging(call.team)
        if staging is not None:
            return staging.start(call)
        post = _COLLECTIVES[call.row]
        comm = self._comm(call.team)
        stream = self._handle(call.stream)
        try:
            post(self, comm, call)(_address(call.out), _address(call.inp), stream)
        except RuntimeError as error:
            raise self._explain(error, call) from error
        return _StreamWork(self, comm, stream, call)

    def _bind(self, call: CollectiveCall) -> Post | None:
        team, key, enter, comms = call.team, call.key, self._ledger.enter, self._comms
        comm = comms.get(team)
        if comm is None:
            return None
        # The call and error messages need only the sizes of the tensors.
        call = replace(call, out=_without_contents(call.out), inp=_without_contents(call.inp))
        post = _COLLECTIVES[call.row](self, comm, call)

        def start(out: int, inp: int, stream: int) -> Work:
            nonlocal comm, post
            if comms.get(team) is not comm:  # dropped after an error, or closed
                self._index(call.row.method, team)
                comm = self._comm(team)
                post = _COLLECTIVES[call.row](self, comm, call)
            number = enter(key)
            try:
                post(out, inp, stream)
            except RuntimeError as error:
                raise self._explain(error, replace(call, seq=number)) from error
            return DONE  # the stream orders what follows

        return start

    def _start_batch(self, batch: Exchange) -> Work:
        staging = self._staging(batch.team)
        if staging is not None:
            return staging.start_batch(batch)
        comm = self._comm(batch.team)
        stream = self._handle(batch.stream)
        copies = [
            (t.kind, t.tensor.data_ptr(), _nbytes(t.tensor), batch.team.index(t.peer))
            for t in batch.transfers
        ]
        try:
            self.post_copies(comm, copies, stream)
        except RuntimeError as error:
            raise self._explain(error, batch) from error
        return _StreamWork(self, comm, stream, batch)

    def _bind_batch(self, batch: Exchange) -> PostBatch | None:
        team, enter, comms = batch.team, self._ledger.enter, self._comms
        if team not in comms:
            return None
        comm = comms[team]
        keys = [transfer_key(t, self.rank, team, mirrored=False) for t in batch.transfers]
        ends = [(t.kind, _nbytes(t.tensor), team.index(t.peer)) for t in batch.transfers]
        emptied = (replace(t, tensor=_without_contents(t.tensor)) for t in batch.transfers)
        batch = replace(batch, transfers=tuple(emptied))

        def start(addresses: Sequence[int], stream: int) -> Work:
            nonlocal comm
            if comms.get(team) is not comm:  # dropped after an error, or closed
                self._index("batch", team)
                comm = self._comm(team)
            numbers = tuple(enter(key) for key in keys)
            pairs = zip(addresses, ends, strict=True)
            try:
                self.post_copies(comm, [(k, at, n, peer) for at, (k, n, peer) in pairs], stream)
            except RuntimeError as error:
                raise self._explain(error, replace(batch, sequence=numbers)) from error
            return DONE

        return start

    def _explain(self, error: RuntimeError, call: CollectiveCall | Exchange) -> CommunicationError:
        if isinstance(error, CommunicationError):
            return error
        return CommunicationError(f"{call.describe()} failed on rank {self.rank}: {error}")

    def drain(self) -> None:
        """Blocks the host until the GPU has completed all communications, or until the deadline.

        Raises no error at the deadline, because another thread of this process reports endless
        waits.
        """
        is_used = self._comms or self.kernels.is_used
        if self._closed or not is_used or not torch.cuda.is_initialized():
            return
        thread = threading.Thread(
            target=torch.cuda.synchronize, args=(self.device,), name="nccl-drain", daemon=True
        )
        thread.start()
        try:
            self.poll(
                lambda: not thread.is_alive(), lambda: f"the last work of {self.device}", list
            )
        except CommunicationError:
            return

    def close(self) -> None:
        """Frees all NCCL communicators, in team order, which is the same on all ranks."""
        super().close()
        self.make_void()
        _abort([self._comms[team] for team in sorted(self._comms)])
        self._comms.clear()
        self.kernels.close()

    def post_copies(
        self, comm: NcclComm, copies: list[tuple[str, int, int, int]], stream: int
    ) -> None:
        """Enqueues sends and receives on a CUDA stream as one NCCL group, so that they run
        together.

        Each entry of `copies` is ("send" or "recv", memory address, number of bytes, position of
        the peer in the team).
        """
        self.binding.group_start()
        try:
            for kind, address, nbytes, index in copies:
                post = comm.send if kind == "send" else comm.recv
                post(address, nbytes, UINT8, index, stream)
        finally:
            self.binding.group_end()


def _abort(comms: list[NcclComm]) -> None:
    """Frees NCCL communicators in a thread, and waits for that thread at most `_ABORT_LIMIT_S`
    seconds.

    The limit is needed because NCCL waits for each CUDA graph that uses the communicator. Such a
    graph may still exist, for example in the traceback of an error.
    """

    def abort() -> None:
        for comm in comms:
            comm.abort()

    thread = threading.Thread(target=abort, name="nccl-abort", daemon=True)
    thread.start()
    thread.join(_ABORT_LIMIT_S)


def _device_name(device: torch.device) -> str:
    cuda: Any = torch.cuda
    return str(cuda.get_device_properties(device).uuid)


def _nbytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _reduction(call: CollectiveCall) -> tuple[int, int]:
    """Returns the numbers by which NCCL denotes the dtype of the call's operand, and its
    reduction.
    """
    assert call.inp is not None and call.reduce is not None, "checked"
    return DTYPES[str(call.inp.dtype).removeprefix("torch.")], RED_OPS[call.reduce]


def _without_contents(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else torch.empty_like(tensor, device="meta")


# Each function returns a function that enqueues its collective on (output, input, stream): two
# addresses and a raw handle.
_Enqueue = Callable[[int, int, int], Any]


def _allgather(backend: NcclBackend, comm: NcclComm, call: CollectiveCall) -> _Enqueue:
    allgather, nbytes = comm.allgather, _nbytes(call.inp)
    return lambda out, inp, stream: allgather(inp, out, nbytes, UINT8, stream)


def _allreduce(backend: NcclBackend, comm: NcclComm, call: CollectiveCall) -> _Enqueue:
    assert call.inp is not None, "checked"
    allreduce, count, (dtype, op) = comm.allreduce, call.inp.numel(), _reduction(call)
    return lambda out, inp, stream: allreduce(inp, out, count, dtype, op, stream)


def _reduce(backend: NcclBackend, comm: NcclComm, call: CollectiveCall) -> _Enqueue:
    assert call.inp is not None, "checked"
    reduce, count, root, (dtype, op) = (
        comm.reduce,
        call.inp.numel(),
        call.root_index,
        _reduction(call),
    )
    return lambda out, inp, stream: reduce(inp, out, count, dtype, op, root, stream)


def _reduce_scatter(backend: NcclBackend, comm: NcclComm, call: CollectiveCall) -> _Enqueue:
    assert call.out is not None, "checked"
    reduce_scatter, count, (dtype, op) = comm.reduce_scatter, call.out.numel(), _reduction(call)
    return lambda out, inp, stream: reduce_scatter(inp, out, count, dtype, op, stream)


def _broadcast(backend: NcclBackend, comm: NcclComm, call: CollectiveCall) -> _Enqueue:
    broadcast, nbytes, root = comm.broadcast, _nbytes(call.out), call.root_index
    return lambda out, inp, stream: broadcast(out, out, nbytes, UINT8, root, stream)


def _gather(backend: NcclBackend, comm: NcclComm, call: CollectiveCall) -> _Enqueue:
    nbytes, root = _nbytes(call.inp), call.root_index
    parts = range(len(call.team) if call.is_root else 0)

    def enqueue(out: int, inp: int, stream: int) -> None:
        copies = [("send", inp, nbytes, root)]
        copies += [("recv", out + i * nbytes, nbytes, i) for i in parts]
        backend.post_copies(comm, copies, stream)

    return enqueue


def _scatter(backend: NcclBackend, comm: NcclComm, call: CollectiveCall) -> _Enqueue:
    nbytes, root = _nbytes(call.out), call.root_index
    parts = range(len(call.team) if call.is_root else 0)

    def enqueue(out: int, inp: int, stream: int) -> None:
        copies = [("recv", out, nbytes, root)]
        copies += [("send", inp + i * nbytes, nbytes, i) for i in parts]
        backend.post_copies(comm, copies, stream)

    return enqueue


def _alltoall(backend: NcclBackend, comm: NcclComm, call: CollectiveCall) -> _Enqueue:
    count = len(call.team)
    nbytes = _nbytes(call.inp) // count
    if comm.has_alltoall:
        alltoall = comm.alltoall
        return lambda out, inp, stream: alltoall(inp, out, nbytes, UINT8, stream)

    def enqueue(out: int, inp: int, stream: int) -> None:
        sends = [("send", inp + i * nbytes, nbytes, i) for i in range(count)]
        recvs = [("recv", out + i * nbytes, nbytes, i) for i in range(count)]
        backend.post_copies(comm, sends + recvs, stream)

    return enqueue


def _barrier(backend: NcclBackend, comm: NcclComm, call: CollectiveCall) -> _Enqueue:
    def enqueue(out: int, inp: int, stream: int) -> None:
        with backend._on(stream):  # pyright: ignore[reportPrivateUsage]
            token = torch.zeros(1, dtype=torch.uint8, device=backend.device)
        comm.allreduce(token.data_ptr(), token.data_ptr(), 1, UINT8, RED_OPS["MAX"], stream)

    return enqueue


_COLLECTIVES = TransportTable[Callable[[NcclBackend, NcclComm, CollectiveCall], _Enqueue]](
    "backend nccl",
    {
        ALLGATHER: _allgather,
        ALLREDUCE: _allreduce,
        REDUCE: _reduce,
        REDUCE_SCATTER: _reduce_scatter,
        BROADCAST: _broadcast,
        GATHER: _gather,
        SCATTER: _scatter,
        ALL_TO_ALL: _alltoall,
        BARRIER: _barrier,
    },
)


# ----------------------------------------------------------------------
# Communications of ranks that share a GPU, staged through the memory of the host.
#
# NCCL refuses a team in which two ranks use one GPU. The data of such a team is copied to the host,
# communicated by the backend of CPU tensors, and copied back. The host waits for the device in each
# call. Programs for several GPUs can be tried on one GPU in this way, but not timed.


class Staging:
    """Communicates GPU tensors through host memory, for teams in which two ranks share a GPU.

    The backend `host` communicates the CPU copies of the tensors. The other arguments are
    functions:

    - `on(stream)`: returns a context in which torch's ops are enqueued on a CUDA stream.
    - `pinned(stream)`: returns the CUDA stream that `stream` denotes now. None denotes the current
      stream, which may be another one later.
    - `settle(call)`: blocks until the device has done all work that is now on the call's stream.
    """

    def __init__(
        self,
        host: Backend,
        on: Callable[[object], AbstractContextManager[object]],
        pinned: Callable[[object], object],
        settle: Callable[[CollectiveCall | Exchange], None],
    ) -> None:
        self._host, self._on, self._pinned, self._settle = host, on, pinned, settle

    @property
    def name(self) -> str:
        """The name of the backend of the CPU copies of GPU tensors, such as "mpi"."""
        return self._host.name

    def start(self, call: CollectiveCall) -> Work:
        """Starts a collective on CPU copies; `wait` of the returned handle copies the result to the
        GPU.
        """
        self._settle(call)
        self._host.where = call.where
        try:
            return self._collective(call)
        finally:
            self._host.where = ""

    def _collective(self, call: CollectiveCall) -> Work:
        if call.row.has_one_buffer:
            return self._one_buffer(call)
        if call.row is BARRIER:
            self._host.barrier(team=call.team)
            return DONE
        inp = None if call.inp is None else self._copied(call.inp, call.stream)
        out = None if call.out is None else _room_for(call.out)
        work = self._host.collective(
            call.row, out, inp, team=call.team, reduce=call.reduce, root=call.root
        )
        return self._finishing(work, [(call.out, out)], call.stream)

    def _one_buffer(self, call: CollectiveCall) -> Work:
        assert call.out is not None and call.root is not None, "checked"
        buffer = self._copied(call.out, call.stream) if call.is_root else _room_for(call.out)
        work = self._host.collective(call.row, buffer, buffer, team=call.team, root=call.root)
        received = [] if call.is_root else [(call.out, buffer)]
        return self._finishing(work, received, call.stream)

    def start_batch(self, batch: Exchange) -> Work:
        """Starts sends and receives of CPU copies of GPU tensors.

        `wait` of the returned handle copies received data to the GPU.
        """
        self._settle(batch)
        staged = [
            replace(
                t,
                tensor=self._copied(t.tensor, batch.stream)
                if t.kind == "send"
                else _room_for(t.tensor),
            )
            for t in batch.transfers
        ]
        pairs = zip(batch.transfers, staged, strict=True)
        received = [(t.tensor, copy.tensor) for t, copy in pairs if t.kind == "recv"]
        work = self._host.batch(staged, team=batch.team)
        return self._finishing(work, received, batch.stream)

    def _copied(self, tensor: torch.Tensor, stream: object) -> torch.Tensor:
        """Returns a copy of a GPU tensor in new host memory; the copy runs on the CUDA stream
        `stream`.
        """
        with self._on(stream):
            return _room_for(tensor).copy_(tensor.detach())

    def _finishing(
        self,
        work: Work,
        received: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]],
        stream: object,
    ) -> Work:
        stream = self._pinned(stream)

        def write() -> None:
            # The copies block until they are done: the caller may continue on another stream.
            with self._on(stream):
                for out, copy in received:
                    if out is not None and copy is not None:
                        out.detach().copy_(copy)

        return FinishingWork(work, write)


def _room_for(tensor: torch.Tensor) -> torch.Tensor:
    """Allocates an uninitialised CPU tensor with the shape and dtype of `tensor`."""
    return torch.empty(tensor.shape, dtype=tensor.dtype)
