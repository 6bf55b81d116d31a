"""`Communicator`: this process's rank in the job, and the communication backend for each device."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

from fuser.support import options
from fuser.support.errors import CommunicationError, UnsupportedError
from multidevice.coordination.bounded_wait import Team
from multidevice.coordination.control_channel import OF_USERS, Control, LocalControl
from multidevice.coordination.launcher import ALONE, LauncherInfo, read_launch
from multidevice.job import early_abort
from multidevice.job.agreement import Channel, Extents, Prepared, Turns
from multidevice.job.failure_guard import Guard, start_monitor
from multidevice.transports.base.protocol import Backend, PeerMemory

if TYPE_CHECKING:
    from multidevice.transports.gloo import StoreControl
    from multidevice.transports.mpi import MpiControl

# The communicator of the simulated rank that runs in this context, if any.
current_communicator: ContextVar[Communicator | None] = ContextVar(
    "current_communicator", default=None
)
_lock = threading.Lock()
# The processes that this one was forked from. Comparing process numbers instead would need a system
# call.
_ancestors: list[int] = []
os.register_at_fork(after_in_child=lambda: _ancestors.append(os.getppid()))
B = TypeVar("B")
T = TypeVar("T")
_singleton: list[Communicator] = []


class Communicator:
    """The connection of this process to the other ranks of its job.

    `Communicator.instance()` creates the object from the launcher's environment at first use.

    Raises:
        CommunicationError: the environment is inconsistent, or the ranks cannot be connected.
    """

    def __init__(
        self,
        launch: LauncherInfo,
        control: Control,
        make_backend: Callable[[torch.device], Backend],
        make_peers: Callable[[torch.device], PeerMemory],
    ) -> None:
        self._ancestors = len(_ancestors)
        self._launch = launch
        self._control = control
        self._make_backend = make_backend
        self._make_peers = make_peers
        self._backends: dict[tuple[str, int], Backend] = {}
        self._peers: dict[tuple[str, int], PeerMemory] = {}
        # Detects threads that call programs with a mesh at the same time.
        self.turns = Turns()
        self._channels: dict[Team, Channel | None] = {}

    @staticmethod
    def instance() -> Communicator:
        """Returns the communicator of this process.

        On a simulated rank, returns the communicator of that rank.
        """
        simulated = current_communicator.get()
        if simulated is not None:
            return simulated
        if not _singleton:
            with _lock:
                if not _singleton:
                    _singleton.append(_create())
        return _singleton[0]

    def size(self) -> int:
        """Returns the number of ranks of the job."""
        return self._launch.size

    def rank(self) -> int:
        """Returns the rank of this process in the job, which is its device number in meshes."""
        return self._launch.rank

    def local_size(self) -> int:
        """Returns the number of ranks on this host."""
        return self._launch.local_size

    def local_rank(self) -> int:
        """Returns the position of this process among the ranks of its host."""
        return self._launch.local_rank

    def is_available(self) -> bool:
        """Returns whether a launcher started this process as a rank of a job."""
        return self._launch.launcher != "none"

    def is_real(self) -> bool:
        """Returns whether the ranks are processes; simulated ranks are threads of one process."""
        return self._launch.launcher not in ("simulated", "none")

    def barrier(self) -> None:
        """Waits until every rank of the job has called the method.

        Raises:
            CommunicationError: there is no launcher.
        """
        if not self.is_available():
            raise CommunicationError(
                "The singleton Communicator isn't available. This is most likely because the "
                "program was started without a launcher: use mpirun or torchrun."
            )
        if self.size() > 1:
            self._control.agree(None, stream=OF_USERS)

    def backend_for(self, device: torch.device | str) -> Backend:
        """Returns the backend that communicates tensors on `device`."""
        return _found(self._backends, self._make_backend, torch.device(device))

    def peers_for(self, device: torch.device | str) -> PeerMemory:
        """Returns the backend that copies tensors on `device` directly out of other ranks' memory.

        Users choose this backend by `CommunicatorBackend.cuda`.
        """
        return _found(self._peers, self._make_peers, torch.device(device))

    def release_peers(self) -> None:
        """Records that a program with peer copies was deleted, so that its memory can be freed.

        See `PeerMemory.release`.
        """
        for made in list(self._peers.values()):
            made.release()

    def are_on_one_host(self, devices: Team) -> bool:
        """Returns whether all ranks in `devices` run on this host.

        The first call exchanges messages, so all these ranks must make the call.
        """
        channel = self.channel(devices)
        return channel is None or channel.shares_memory

    def have_access(self, device: torch.device) -> bool:
        """Returns whether the ranks of this host can map each other's memory on devices of the same
        type as `device` (CPU or CUDA).
        """
        if device.type != "cuda" or not self.is_real():
            return True
        count = self.local_size()
        if count > torch.cuda.device_count():
            return False  # each process sees its own GPU alone
        pairs = itertools.permutations(range(count), 2)
        # Other processes cannot map memory of torch's expandable segments.
        chosen = (os.environ.get(n, "") for n in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
        is_mappable = not any("expandable_segments:true" in c.lower() for c in chosen)
        return is_mappable and all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)

    def begin_run(self, team: Team) -> None:
        """Counts one more run of a host program that the ranks of `team` run together, and frees
        memory of peer copies that is no longer used.

        All ranks of the team begin the same number of runs. The count prevents that a later run
        receives messages of a failed run.
        """
        self._control.begin_run(team)
        for made in tuple(self._peers.values()):
            made.tidy()

    def exchange(self, payload: bytes, *, team: Team | None = None) -> list[bytes]:
        """Sends `payload` to all ranks of a team; returns the payloads of all ranks, in team order.

        If `team` is None, the team has all ranks.
        """
        return self._control.exchange(payload, team=team, stream=OF_USERS)

    def agree(
        self, error: BaseException | None, digest: bytes = b"", *, team: Team | None = None
    ) -> None:
        """Waits for all ranks of a team; returns if no rank has an error and all digests (at most
        16 bytes) are equal.

        If `team` is None, the team has all ranks.

        Raises:
            error: this rank's own error, if there is one.
            PeerError: another rank has an error; the message names rank, type and text.
            ProgramMismatchError: the digests differ; `compare_texts` then shows where.
        """
        self._control.agree(error, digest=digest, team=team, stream=OF_USERS)

    def compare_texts(self, text: str, *, team: Team | None = None) -> None:
        """Raises an error on all ranks of the team if the ranks do not all pass the same text.

        The `ProgramMismatchError` shows the first line that differs. If `team` is None, the team
        has all ranks.
        """
        self._control.compare_texts(text, team=team, stream=OF_USERS)

    def channel(self, devices: Team) -> Channel | None:
        """Returns the channel on which the ranks in `devices` agree on the program before each
        call.

        Device numbers that are no ranks of the job are left out. Returns None if this rank needs to
        agree with no other rank. Raises `CommunicationError` in a process that was forked from a
        rank.
        """
        if len(_ancestors) > self._ancestors and self.size() > 1:
            raise CommunicationError(
                f"this process was forked from rank {self.rank()} and is not a rank of the job: "
                "only the process that the launcher started may run programs with a mesh"
            )
        if devices not in self._channels:
            team = tuple(sorted({rank for rank in devices if rank < self.size()}))
            is_alone = len(team) < 2 or self.rank() not in team
            made = None if is_alone else Channel(self._control, team, self.turns)
            self._channels.setdefault(devices, made)  # another thread's, if that was faster
        return self._channels[devices]

    def drain(self) -> None:
        """Waits, with a deadline, until the communications that this rank has started are complete.

        Called before this process leaves the job.
        """
        for backend in self._all_backends():
            backend.drain()

    def close(self) -> None:
        """Closes all communication backends, in an order that is the same on all ranks."""
        for backend in self._all_backends():
            backend.close()

    def _all_backends(self) -> list[Backend]:
        kinds = self._backends, self._peers
        return [made[key] for made in kinds for key in sorted(made)]


def _found(
    made: dict[tuple[str, int], B], make: Callable[[torch.device], B], device: torch.device
) -> B:
    """Returns the object for a device from the cache `made`; the first call creates it by
    `make`.
    """
    index: int | None = device.index
    if device.type == "cuda" and index is None:  # pyright: ignore[reportUnnecessaryComparison]
        index = torch.cuda.current_device()
    key = (device.type, index or 0)
    if key not in made:
        made[key] = make(torch.device(*key) if key[0] == "cuda" else device)
    return made[key]


def _create() -> Communicator:
    """Creates the communicator of this process from the launcher's environment variables."""
    options.check_environment()
    launch = read_launch()
    if launch.rank == 0:
        options.check_dump_ranks(launch.size)
    if launch is ALONE or launch.size == 1:
        alone = replace(launch, local_rank=0, local_size=1)
        control = LocalControl()
        return Communicator(alone, control, _local_backend, _local_peers)
    return _connect(launch)


def _local_backend(device: torch.device) -> Backend:
    """Returns a communication backend for a job of one rank, which needs no transport."""
    from multidevice.transports.simulated import Baton, SimulatedBackend, SimulatedControl

    del device
    return SimulatedBackend(SimulatedControl(0, 1, Baton(1)))


def _local_peers(device: torch.device) -> PeerMemory:
    """Returns the backend for peer copies (a receiver reads the sender's memory) in a job of one
    rank, which copies from no other rank.
    """
    from multidevice.transports.simulated import Baton, SimulatedControl, SimulatedPeers

    return SimulatedPeers(SimulatedControl(0, 1, Baton(1)), device)


def _connect(launch: LauncherInfo) -> Communicator:
    choice = options.backend()
    uses_mpi = launch.launcher == "mpi" if choice == "auto" else choice == "mpi"
    control: MpiControl | StoreControl
    if uses_mpi:
        from multidevice.transports.mpi import MpiBackend, MpiControl, local_layout

        control = mpi = MpiControl(launch.rank, launch.size)
        if launch.local_rank < 0 or launch.local_size < 0:
            local_rank, local_size = local_layout(launch.rank, launch.size)
            launch = replace(launch, local_rank=local_rank, local_size=local_size)
        on_cpu: Callable[[], Backend] = lambda: MpiBackend(mpi)  # noqa: E731
    else:
        from multidevice.transports.gloo import GlooBackend, StoreControl

        if launch.local_rank < 0 or launch.local_size < 0:
            launch = replace(launch, local_rank=launch.rank, local_size=launch.size)
        control = store = StoreControl(launch)
        on_cpu = lambda: GlooBackend(store)  # noqa: E731
    if torch.cuda.is_available():
        # If there are more ranks than GPUs, ranks share GPUs, assigned round robin.
        torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())
    guard = Guard(control)
    control.connect_wait_graph()

    def make_backend(device: torch.device) -> Backend:
        if device.type == "cpu":
            return on_cpu()
        if device.type == "cuda":
            from multidevice.transports.nccl import NcclBackend

            cpu = torch.device("cpu")
            backend = NcclBackend(control, device, on_cpu=lambda: communicator.backend_for(cpu))
            guard.reports.append(backend.kernels.failure)
            guard.watch()
            return backend
        raise UnsupportedError(
            f"tensors on {device} cannot be communicated: use CPU or CUDA tensors"
        )

    def make_peers(device: torch.device) -> PeerMemory:
        if device.type == "cpu":
            from multidevice.transports.peer_copy_cpu import CpuPeerBackend

            return CpuPeerBackend(control)
        if device.type == "cuda":
            from multidevice.transports.peer_copy_cuda import CudaPeerBackend

            backend = CudaPeerBackend(control, device)
            guard.reports.append(backend.kernels.failure)
            guard.watch()
            return backend
        raise UnsupportedError(
            f"peer copies do not support tensors on {device}: use CPU or CUDA tensors"
        )

    communicator = Communicator(launch, control, make_backend, make_peers)
    guard.on_exit.append(communicator.drain)
    guard.after_exit.append(communicator.close)
    guard.install()
    if uses_mpi and control.wait_graph is not None:
        start_monitor(control.wait_graph)
    early_abort.disarm()
    return communicator


def run_agreed(
    communicator: Communicator,
    devices: Team,
    prepare: Callable[[], Prepared[T]],
    resolve: Callable[[Extents], Prepared[T]] | None = None,
) -> T:
    """Prepares a call on every rank in `devices`, and runs it once the ranks agree on the program.

    `prepare` returns the run signature (a description of the program), the numbers that may change
    between calls, and a function that runs the call. If `prepare` raises an error on one rank,
    every rank raises an error before anything is communicated. If ranks pass shards of unequal
    extents, `resolve` prepares the call instead, from the extents of all ranks.

    The calls of a rank have an order, and the other ranks must make their calls in the same order.
    Calls from two threads of one rank have no order. If a thread calls while another thread is in a
    call, both calls raise an error, on all ranks.

    Raises:
        UnsupportedError: another thread of this rank called at the same time.
        Exception: the error of `prepare` or of the run on this rank.
        PeerError: another rank raised an error in `prepare`; the message names rank, type and text.
        InputError: the ranks passed different local extents or different numbers.
        ProgramMismatchError: the ranks run different programs; the message shows the first
            differing line, and names inputs whose properties (such as strides) cause it.
        DeadlockError: ranks wait for each other in calls of different teams.
    """
    channel = communicator.channel(devices)
    return prepare()[2]() if channel is None else channel.run(prepare, resolve)
