"""Communication of CPU tensors over gloo, for jobs that torchrun or Slurm started.

Torch's TCP store (a key-value server) is the control channel, over which the ranks exchange small
messages. The module creates one torch process group per team directly. Torch's default process
group therefore remains free for the user.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch

from fuser.support import options
from fuser.support.errors import CommunicationError, CommunicationTimeout, InputError, PeerError
from multidevice.coordination.bounded_wait import Calls, Event, Team, poll_until, team_text
from multidevice.coordination.control_channel import WITHIN_CALLS, ControlCall, JobControl
from multidevice.coordination.launcher import LauncherInfo, store_address, uses_agent_store
from multidevice.transports.base.checked_backend import (
    DONE,
    CheckedBackend,
    CollectiveCall,
    Exchange,
    is_of,
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
from multidevice.transports.base.protocol import Work

# Gloo's own wait is divided into slices, between which the peers are checked.
_WORK_SLICE = timedelta(milliseconds=10)
_FINISH_SLEEP_S = 0.01
# After a transport error, how long to wait for the peer's announcement of the cause.
_LISTEN_S = 1.5


class StoreControl(JobControl):
    """The control channel of a job over torch's TCP store, which rank 0 or torchrun's agent serves.

    Over a control channel, the ranks of a job exchange small messages, such as announcements of
    failures.

    Raises:
        CommunicationError: the store cannot be reached, or its port is in use. The message names
            the host and the port.
    """

    def __init__(self, launch: LauncherInfo) -> None:
        super().__init__(launch.rank, launch.size)
        self.launch = launch
        self.store: Any = _open_store(launch)
        self._heard = 0
        # The guard's thread may listen at the same time.
        self._listening = threading.Lock()
        self._stale: dict[Calls, list[str]] = {}

    def _gather(self, record: bytes, step: ControlCall) -> list[bytes]:
        return self._through_store(record, step, "record")

    def _gather_varied(
        self, payload: bytes, sizes: Sequence[int], step: ControlCall
    ) -> list[bytes]:
        return self._through_store(payload, step, "payload")

    def _through_store(self, payload: bytes, step: ControlCall, part: str) -> list[bytes]:
        keys = [f"{step.key}/{step.seq}/{part}/{rank}" for rank in step.team]
        mine = keys[step.team.index(self.rank)]
        try:
            # A leading byte, because the store cannot distinguish an empty value from a missing
            # one.
            self.store.set(mine, b"+" + payload)
            self.poll_until(lambda: self.store.check(keys), what=step.describe, needs=step.needs)
            values = [value[1:] for value in self.store.multi_get(keys)]
        except CommunicationTimeout as error:
            pairs = zip(step.team, keys, strict=True)
            late = [rank for rank, key in pairs if not self.store.check([key])]
            raise CommunicationTimeout(
                f"{error}; ranks {team_text(late)} have not entered this operation"
            ) from error
        except torch.distributed.DistError as error:
            raise PeerError(
                f"rank {self.rank} lost the connection to the job's TCP store during "
                f"{step.describe()}: {error}"
            ) from error
        # A rank that enters operation n knows that every rank has finished operation n - 2.
        stale = self._stale.setdefault(step.key, [])
        stale.append(mine)
        if len(stale) > 4:
            self.store.delete_key(stale.pop(0))
        return values

    def listen(self) -> None:
        """Reads the messages by which other ranks have announced a failure, or that they leave the
        job.

        The messages are in the TCP store (a key-value server).
        """
        with self._listening:
            count = self.store.add("events", 0)
            while self._heard < count:
                key = f"event/{self._heard + 1}"
                if not self.store.check([key]):
                    return
                self._heard += 1
                event = Event.decode(self.store.get(key))
                if event.rank != self.rank:
                    self.peers.record(event)

    def announce(self, event: Event) -> None:
        """Announces to the other ranks, through the TCP store, that this rank has failed or leaves
        the job.
        """
        try:
            self.store.set(f"event/{self._next_event()}", event.encode())
        except torch.distributed.DistError:
            return  # Rank 0 served the store and has ended: no rank can read it.

    def _next_event(self) -> int:
        # The number is reserved before the event is written: a reader waits for the missing event.
        return self.store.add("events", 1)

    def finish(self) -> None:
        """Waits until all other ranks have announced that they leave the job.

        If rank 0 serves the TCP store, rank 0 leaves last.
        """
        try:
            if not self.wait_for_leavers(lambda: time.sleep(_FINISH_SLEEP_S)):
                return
            self._leave_store()
        except torch.distributed.DistError:
            return  # Rank 0 served the store and has left after all others announced.

    def _leave_store(self) -> None:
        """Counts this rank as gone; the rank that serves the TCP store waits until all others are
        gone.
        """
        gone = self.store.add("gone", 1)
        if self.rank != 0 or uses_agent_store():
            return
        stop = time.monotonic() + options.timeout_s()
        while gone < self.size and time.monotonic() < stop:
            time.sleep(_FINISH_SLEEP_S / 5)
            gone = self.store.add("gone", 0)

    def abort(self, code: int) -> None:
        """Ends this process with the exit code `code`; the launcher then ends the other processes.

        The caller has announced the failure to the other ranks before. A rank that waits for this
        one therefore raises an error that names the cause.
        """
        sys.stderr.flush()
        os._exit(code)


def _open_store(launch: LauncherInfo) -> Any:
    dist: Any = import_module("torch.distributed")

    timeout = timedelta(seconds=options.timeout_s())
    shared = uses_agent_store()
    if shared:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    else:
        host, port = store_address(launch)
    try:
        store = dist.TCPStore(
            host,
            port,
            None,
            is_master=launch.rank == 0 and not shared,
            timeout=timeout,
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        raise CommunicationError(
            f"rank {launch.rank} cannot reach the job's TCP store at {host}:{port}: {error}. Set "
            "FUSER_MASTER_ADDR and FUSER_MASTER_PORT to use another host or port"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"fuser/{attempt}", store)


class _GlooWork:
    """A started communication: torch's handles of the gloo calls, which keep the buffers alive."""

    def __init__(
        self, backend: GlooBackend, works: list[Any], call: CollectiveCall | Exchange
    ) -> None:
        self._backend = backend
        self._works = works
        self._call = call

    def wait(self) -> None:
        """Blocks until all gloo calls have ended.

        If a gloo call fails because a peer failed, raises the error that the peer announced.
        """
        control = self._backend.control
        for work in self._works:
            try:
                control.poll_until(
                    lambda work=work: _is_done(work),
                    what=self._call.describe,
                    needs=self._call.needs,
                )
            except RuntimeError as error:
                if isinstance(error, CommunicationError):
                    raise
                raise self._backend.explain(error, self._call) from error
        self._works = []

    def synchronize(self) -> None:
        """Blocks until all gloo calls have ended, the same as `wait`: CPU tensors have no
        stream.
        """
        self.wait()


def _is_done(work: Any) -> bool:
    """Waits up to 10 ms for a torch work handle; returns whether its gloo call has ended.

    The wait blocks, so that gloo's own threads can use the core.
    """
    try:
        work.wait(_WORK_SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        # The work may have ended just after the slice. Ask again: its own failure is raised again.
        work.wait(_WORK_SLICE)
    return True


class _Transfer:
    """A gloo send or receive, with a thread that detects when the transfer ends.

    The thread is needed because gloo offers only a blocking wait for a transfer.
    """

    def __init__(self, work: Any, timeout: timedelta) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work, timeout), daemon=True)
        self._thread.start()

    def _run(self, work: Any, timeout: timedelta) -> None:
        try:
            work.wait(timeout)
        except RuntimeError as error:
            self._error = error

    def is_completed(self) -> bool:
        """Returns whether the transfer has ended."""
        return not self._thread.is_alive()

    def wait(self, timeout: timedelta) -> None:
        """Waits up to `timeout` for the transfer.

        Raises the transfer's error, or a RuntimeError if the transfer has not ended in time.
        """
        self._thread.join(timeout.total_seconds())
        if self._thread.is_alive():
            raise RuntimeError(
                f"the gloo transfer has not ended within {timeout.total_seconds():g} s"
            )
        if self._error is not None:
            raise self._error


class GlooBackend(CheckedBackend):
    """The communication backend for CPU tensors, over torch's gloo."""

    name = "gloo"

    def __init__(self, control: StoreControl) -> None:
        super().__init__(control.rank, control.size, control.ledger)
        self.control = control
        self._groups: dict[Team, Any] = {}
        # Dropped groups with unfinished work: to destroy them would wait for it.
        self._lost: list[Any] = []
        control.on_lost.append(self._forget)

    def _forget(self, key: Calls) -> None:
        """Drops the torch process group that a failed sequence of calls used; `key` names the
        sequence.

        Otherwise a later call could receive messages of the failed call.
        """
        for team in list(self._groups):
            if is_of(key, self.name, team):
                self._lost.append(self._groups.pop(team))

    def _check_device(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu":
            raise InputError(
                "the gloo backend communicates CPU tensors, but found a tensor on "
                f"{tensor.device}: move the tensor to the CPU"
            )

    def _timeout(self) -> timedelta:
        # Longer than the control channel's deadline, so that its error, which names the operation,
        # is raised.
        return timedelta(seconds=options.timeout_s() + 10)

    def _group(self, team: Team) -> Any:
        """Returns the torch process group of a team.

        The first call for a team creates the group, so all ranks of the team must make that call.
        """
        group = self._groups.get(team)
        if group is None:
            dist: Any = import_module("torch.distributed")

            # Gloo's own rendezvous blocks, so the members first synchronise where peers are
            # watched.
            self.control.exchange(b"gloo", team=team)
            # Every group has its own prefix in the store, also one that replaces another.
            number = self.control.ledger.entered[Calls(WITHIN_CALLS, team)]
            store = dist.PrefixStore(f"gloo {team_text(team)} {number}", self.control.store)
            # The option class has no public name, but it is the only way to choose the interface.
            opts = dist.ProcessGroupGloo._Options()
            opts._timeout = self._timeout()
            launch = self.control.launch
            local = launch.local_size == launch.size and "GLOO_SOCKET_IFNAME" not in os.environ
            opts._devices = [
                dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
                if local
                else dist.ProcessGroupGloo.create_default_device()
            ]
            try:
                group = dist.ProcessGroupGloo(store, team.index(self.rank), len(team), opts)
            except RuntimeError as error:
                raise CommunicationError(
                    f"gloo cannot connect rank {self.rank} with the other ranks of the team "
                    f"{team_text(team)}: {error}"
                ) from error
            self._groups[team] = group
        return group

    def explain(self, error: RuntimeError, call: CollectiveCall | Exchange) -> CommunicationError:
        """Returns the cause of the gloo error `error`: the failure that another rank of `call`
        announced.

        Waits a short time for such announcements. If there is none, returns `error` as a
        `CommunicationError`.
        """
        stop = time.monotonic() + _LISTEN_S
        try:
            poll_until(
                lambda: bool(self.control.peers.events) or time.monotonic() > stop,
                what=call.describe,
                look=lambda _: self.control.listen(),
                rank=self.rank,
            )
            self.control.peers.check(call.describe(), call.needs())
        except CommunicationError as found:
            return found
        except RuntimeError as lost:
            return PeerError(
                f"rank {self.rank} lost the connection to the job's TCP store during "
                f"{call.describe()}: {lost}"
            )
        return CommunicationError(f"{call.describe()} failed on rank {self.rank}: {error}")

    def _start(self, call: CollectiveCall) -> Work:
        # Some of gloo's algorithms never complete without data.
        if call.row is not BARRIER and not _has_data(call.inp) and not _has_data(call.out):
            return DONE
        post, group = _COLLECTIVES[call.row], self._group(call.team)
        try:
            return _GlooWork(self, post(group, call), call)
        except RuntimeError as error:
            raise self.explain(error, call) from error

    def _start_batch(self, batch: Exchange) -> _GlooWork:
        group = self._group(batch.team)
        works: list[Any] = []
        for transfer in batch.transfers:
            post = group.send if transfer.kind == "send" else group.recv
            try:
                work = post([_bytes(transfer.tensor)], batch.team.index(transfer.peer), 0)
            except RuntimeError as error:
                raise self.explain(error, batch) from error
            works.append(_Transfer(work, self._timeout()))
        return _GlooWork(self, works, batch)

    def close(self) -> None:
        """Drops the torch process groups of all teams; later communications raise an error."""
        super().close()
        self._groups.clear()


def _has_data(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.numel() > 0


def _bytes(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "this member has a buffer"
    return tensor.view(-1).view(torch.uint8)


def _parts(tensor: torch.Tensor | None, count: int) -> list[torch.Tensor]:
    return list(_bytes(tensor).view(count, -1).unbind(0))


def _reduction(call: CollectiveCall) -> Any:
    dist: Any = import_module("torch.distributed")

    return {
        "SUM": dist.ReduceOp.SUM,
        "PRODUCT": dist.ReduceOp.PRODUCT,
        "MIN": dist.ReduceOp.MIN,
        "MAX": dist.ReduceOp.MAX,
    }[call.reduce or ""]


def _in_place(call: CollectiveCall) -> torch.Tensor:
    """Copies the call's input to its output and returns the output, because gloo reduces in place.

    If this rank has no output, returns a copy of the input.
    """
    assert call.inp is not None, "every member of a reduction has an input"
    if call.out is None:
        return call.inp.clone()
    if call.out.data_ptr() != call.inp.data_ptr():
        call.out.view(-1).copy_(call.inp.view(-1))
    return call.out


def _allgather(group: Any, call: CollectiveCall) -> list[Any]:
    return [group._allgather_base(_bytes(call.out), _bytes(call.inp))]


def _allreduce(group: Any, call: CollectiveCall) -> list[Any]:
    dist: Any = import_module("torch.distributed")

    opts = dist.AllreduceOptions()
    opts.reduceOp = _reduction(call)
    return [group.allreduce([_in_place(call)], opts)]


def _reduce(group: Any, call: CollectiveCall) -> list[Any]:
    dist: Any = import_module("torch.distributed")

    opts = dist.ReduceOptions()
    opts.reduceOp = _reduction(call)
    opts.rootRank = call.root_index
    return [group.reduce([_in_place(call)], opts)]


class _ReduceParts:
    """A reduce-scatter, executed as an all-to-all in which each rank receives its part of all
    operands, and a local reduction of the received parts.

    An allreduce would send twice as much data.
    """

    def __init__(self, work: Any, parts: torch.Tensor, call: CollectiveCall) -> None:
        self._work = work
        self._parts = parts
        self._call = call
        self.is_completed = work.is_completed

    def wait(self, timeout: timedelta) -> None:
        """Waits up to `timeout` for the all-to-all, then reduces the received parts in team
        order.
        """
        self._work.wait(timeout)
        assert self._call.out is not None, "every member of a reduce-scatter has an output"
        parts = self._parts.view(len(self._call.team), -1)
        total = parts[0]
        for part in parts[1:]:
            total = _FOLDS[self._call.reduce or ""](total, part)
        self._call.out.view(-1).copy_(total)


_FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


def _reduce_scatter(group: Any, call: CollectiveCall) -> list[Any]:
    assert call.inp is not None, "checked"
    parts = torch.empty_like(call.inp)
    (work,) = _exchange_parts(group, parts, call.inp)
    return [_ReduceParts(work, parts, call)]


def _broadcast(group: Any, call: CollectiveCall) -> list[Any]:
    return [group.broadcast(_bytes(call.out), call.root_index)]


def _gather(group: Any, call: CollectiveCall) -> list[Any]:
    dist: Any = import_module("torch.distributed")

    opts = dist.GatherOptions()
    opts.rootRank = call.root_index
    outs = [_parts(call.out, len(call.team))] if call.is_root else []
    return [group.gather(outs, [_bytes(call.inp)], opts)]


def _scatter(group: Any, call: CollectiveCall) -> list[Any]:
    dist: Any = import_module("torch.distributed")

    opts = dist.ScatterOptions()
    opts.rootRank = call.root_index
    inps = [_parts(call.inp, len(call.team))] if call.is_root else []
    return [group.scatter([_bytes(call.out)], inps, opts)]


def _alltoall(group: Any, call: CollectiveCall) -> list[Any]:
    return _exchange_parts(group, call.out, call.inp)


def _exchange_parts(group: Any, out: torch.Tensor | None, inp: torch.Tensor | None) -> list[Any]:
    dist: Any = import_module("torch.distributed")

    return [group.alltoall_base(_bytes(out), _bytes(inp), [], [], dist.AllToAllOptions())]


def _barrier(group: Any, call: CollectiveCall) -> list[Any]:
    del call
    return [group.allreduce([torch.zeros(1)])]


_COLLECTIVES = TransportTable[Callable[[Any, CollectiveCall], list[Any]]](
    "backend gloo",
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
