"""The NCCL backend without a GPU: its raw calls go to a stand-in that reads CPU memory at the
addresses.

The stand-in moves the data through simulated ranks, so addresses, counts, dtype numbers, roots and
groups are all checked against the same brute force as the real backends.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

import multidevice
from fuser.errors import CommunicationError
from multidevice import Communicator
from multidevice.backends import nccl
from multidevice.backends.base import stream_at
from multidevice.backends.protocol import Transfer
from multidevice.backends.simulated import SimulatedBackend
from tests.multidevice.programs import collectives

CPU = torch.device("cpu")
# The numbers of nccl.h.
DTYPES = {
    0: torch.int8,
    1: torch.uint8,
    2: torch.int32,
    4: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.bfloat16,
}
OPS = {0: "SUM", 1: "PRODUCT", 2: "MAX", 3: "MIN", 4: "AVG"}


def memory(address: int, count: int, dtype: int) -> torch.Tensor:
    """Returns the `count` elements at an address as a tensor."""
    kind = DTYPES[dtype]
    if count == 0:
        return torch.empty(0, dtype=kind)
    raw = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=kind)


class StandIn:
    """A binding and its communicator in one object, on top of a simulated rank."""

    name = "stand-in"

    def __init__(self, sim: SimulatedBackend, *, has_alltoall: bool) -> None:
        self.sim = sim
        self.has_alltoall = has_alltoall
        self.team: tuple[int, ...] = ()
        self.group: list[tuple[str, torch.Tensor, int]] | None = None
        self.members: dict[int, StandIn] = {}

    def unique_id(self) -> bytes:
        return bytes(range(100, 228))

    def connect(self, size: int, unique_id: bytes, index: int) -> StandIn:
        assert unique_id == bytes(range(100, 228))
        comm = StandIn(self.sim, has_alltoall=self.has_alltoall)
        comm.team = (size, index)
        self.latest = comm
        return comm

    def group_start(self) -> None:
        self.group = []

    def group_end(self) -> None:
        raise NotImplementedError  # each binding's stand-in below has its own

    def check(self) -> None: ...

    def abort(self) -> None: ...

    def allreduce(self, inp: int, out: int, count: int, dtype: int, op: int, stream: int) -> None:
        args: dict[str, Any] = {"op": OPS[op], "team": self.team}
        self.sim.allreduce(memory(out, count, dtype), memory(inp, count, dtype), **args).wait()

    def reduce(
        self, inp: int, out: int, count: int, dtype: int, op: int, root: int, stream: int
    ) -> None:
        target = memory(out, count, dtype) if out else None
        args: dict[str, Any] = {"op": OPS[op], "team": self.team, "root": self.team[root]}
        self.sim.reduce(target, memory(inp, count, dtype), **args).wait()

    def reduce_scatter(
        self, inp: int, out: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        whole = memory(inp, count * len(self.team), dtype)
        args: dict[str, Any] = {"op": OPS[op], "team": self.team}
        self.sim.reduce_scatter(memory(out, count, dtype), whole, **args).wait()

    def allgather(self, inp: int, out: int, count: int, dtype: int, stream: int) -> None:
        whole = memory(out, count * len(self.team), dtype)
        self.sim.allgather(whole, memory(inp, count, dtype), team=self.team).wait()

    def alltoall(self, inp: int, out: int, count: int, dtype: int, stream: int) -> None:
        n = count * len(self.team)
        self.sim.alltoall(memory(out, n, dtype), memory(inp, n, dtype), team=self.team).wait()

    def broadcast(self, inp: int, out: int, count: int, dtype: int, root: int, stream: int) -> None:
        assert inp == out
        self.sim.broadcast(memory(out, count, dtype), root=self.team[root], team=self.team).wait()


class StandInBackend(nccl.NcclBackend):
    """The NCCL backend with the calls that need CUDA cut off."""

    def __init__(self, control: Any, *, has_alltoall: bool) -> None:
        self.sim = SimulatedBackend(control)
        stand_in: Any = StandIn(self.sim, has_alltoall=has_alltoall)
        super().__init__(control, CPU, stand_in)

    def _handle(self, stream: object) -> int:
        return 0

    def _on(self, stream: object) -> Any:
        return torch.no_grad()

    def _connect(self, team: tuple[int, ...]) -> Any:
        comm: Any = super()._connect(team)
        assert comm.team == (len(team), team.index(self.rank))
        comm.team = team
        copies: list[tuple[Any, torch.Tensor, int]] = []

        def post(kind: str):
            def enqueue(address: int, count: int, dtype: int, index: int, stream: int) -> None:
                copies.append((kind, memory(address, count, dtype), team[index]))

            return enqueue

        def group_end() -> None:
            """Matches the copies to itself here, and sends the others."""
            own = {kind: t for kind, t, peer in copies if peer == self.rank}
            if own:
                own["recv"].copy_(own["send"])
            others = [Transfer(k, t, p) for k, t, p in copies if p != self.rank]
            copies.clear()
            self.sim.batch(others, team=team).wait()

        comm.send, comm.recv = post("send"), post("recv")
        comm.group_end = group_end
        return comm

    def post_copies(self, comm: Any, copies: Any, stream: int) -> None:
        self.binding.group_end = comm.group_end  # type: ignore[method-assign]
        super().post_copies(comm, copies, stream)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        nccl, "_device_name", lambda device: f"GPU-{Communicator.instance().rank()}"
    )


@pytest.mark.parametrize("has_alltoall", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_collectives(no_cuda: None, size: int, has_alltoall: bool) -> None:
    def check() -> None:
        comm = Communicator.instance()
        backend = StandInBackend(comm._control, has_alltoall=has_alltoall)
        world = tuple(range(size))
        for dtype in collectives.DTYPES:
            collectives.check_dtype(backend, comm.rank(), world, dtype, CPU, 5)
        collectives.check_dtype(backend, comm.rank(), world[::-1], torch.float32, CPU, 3)
        collectives.check_errors(comm, backend, world, CPU)

    with multidevice.simulate(size) as world:
        world.run(check)


def test_two_ranks_on_one_gpu_are_named(no_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_device_name", lambda device: "GPU-0")

    def check() -> None:
        backend = StandInBackend(Communicator.instance()._control, has_alltoall=True)
        x = torch.ones(2)
        with pytest.raises(CommunicationError, match=r"ranks 0 and 1 use the same GPU \(GPU-0\)"):
            backend.allreduce(x, x, op="SUM", team=(0, 1))

    with multidevice.simulate(2) as world:
        world.run(check)


def test_the_handle_0_is_the_default_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.cuda.ExternalStream(0) is a stream of torch's pool, which the default one never orders.
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: ("default", device))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    gpu = torch.device("cuda", 1)
    assert stream_at(0, gpu) == ("default", gpu)
    assert stream_at(64, gpu) == (64, gpu)
