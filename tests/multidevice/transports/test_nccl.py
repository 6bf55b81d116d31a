"""The NCCL backend without a GPU: a stand-in executes its raw calls on CPU memory.

The stand-in moves the data through simulated ranks. So addresses, counts, dtype numbers, roots and
groups are checked against the same plain implementation as the real backends.
"""

from __future__ import annotations

import ctypes
import threading
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import multidevice
from fuser.support.errors import CommunicationError, InputError
from hostir import HostIrEvaluator
from hostir.tools.run_text import shards_of
from multidevice import Communicator
from multidevice.coordination.bounded_wait import Calls
from multidevice.job.shard_tensor import shard_for_rank, unshard
from multidevice.transports import nccl
from multidevice.transports.base.checked_backend import stream_at
from multidevice.transports.base.collectives import ALL_TO_ALL, ALLREDUCE
from multidevice.transports.base.protocol import Transfer
from multidevice.transports.simulated import SimulatedBackend
from tests.support.host_programs import CASES, build
from tests.support.limits import HANG_S
from tests.support.rank_programs import collectives
from tests.support.stream_programs import N_STREAMS, PROGRAMS

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
    """A stand-in for the NCCL library and a communicator of it, on top of a simulated rank."""

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
    """The NCCL backend without the calls that need CUDA."""

    def __init__(self, control: Any, *, has_alltoall: bool, on_cpu: bool = True) -> None:
        self.sim = SimulatedBackend(control)
        stand_in: Any = StandIn(self.sim, has_alltoall=has_alltoall)
        super().__init__(control, CPU, stand_in, on_cpu=(lambda: self.sim) if on_cpu else None)

    def poll(self, done: Any, what: Any, needs: Any) -> None:
        # The thread that connects is no rank of the simulation, which would not wait for it.
        until = time.monotonic() + HANG_S
        while (
            what().startswith("the connection of the NCCL")
            and not done()
            and time.monotonic() < until
        ):
            time.sleep(1e-4)
        super().poll(done, what, needs)

    def settle(self, call: object) -> None: ...

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
            """Pairs a rank's copies to itself, and sends the others."""
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


def test_two_ranks_on_one_gpu_are_named_where_no_host_can_help(
    no_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_device_name", lambda device: "GPU-0")

    def check() -> None:
        control = Communicator.instance()._control
        backend = StandInBackend(control, has_alltoall=True, on_cpu=False)
        x = torch.ones(2)
        with pytest.raises(CommunicationError, match="ranks 0, 1 share the GPU GPU-0"):
            backend.allreduce(x, x, op="SUM", team=(0, 1))

    with multidevice.simulate(2) as world:
        world.run(check)


def on_gpus(monkeypatch: pytest.MonkeyPatch, gpus: str) -> None:
    """Places rank i on the GPU named by the i-th letter."""
    monkeypatch.setattr(
        nccl, "_device_name", lambda device: f"GPU-{gpus[Communicator.instance().rank()]}"
    )


@pytest.mark.finding("G44")
@pytest.mark.parametrize("gpus", ["aa", "aaaa", "aabb", "abca"])
def test_collectives_of_ranks_that_share_a_gpu_equal_brute_force(
    no_cuda: None, monkeypatch: pytest.MonkeyPatch, gpus: str
) -> None:
    on_gpus(monkeypatch, gpus)
    world = tuple(range(len(gpus)))

    def check() -> None:
        comm = Communicator.instance()
        backend = StandInBackend(comm._control, has_alltoall=True)
        for dtype in collectives.DTYPES:
            collectives.check_dtype(backend, comm.rank(), world, dtype, CPU, 5)
        collectives.check_dtype(backend, comm.rank(), world[::-1], torch.float32, CPU, 3)
        collectives.check_errors(comm, backend, world, CPU)
        backend.barrier(team=world)
        assert not backend.can_capture("allgather"), "the host carries them out"
        assert not backend._comms, "NCCL would refuse the team"

    with multidevice.simulate(len(gpus)) as ranks, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ranks.run(check)
    (text,) = [str(w.message) for w in told if "share the GPU" in str(w.message)]
    by_gpu = {gpu: [str(r) for r in world if gpus[r] == gpu] for gpu in gpus}
    for gpu, users in by_gpu.items():
        is_shared = len(users) > 1
        assert (f"ranks {', '.join(users)} share the GPU GPU-{gpu}" in text) == is_shared
    assert "over simulated" in text and "one rank per GPU" in text


@pytest.mark.finding("G44")
def test_teams_whose_ranks_have_a_gpu_each_keep_nccl_beside_teams_that_share_one(
    no_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpus(monkeypatch, "aabb")

    def body() -> set[tuple[int, ...]]:
        comm = Communicator.instance()
        backend = StandInBackend(comm._control, has_alltoall=True)
        me, same = comm.rank(), (0, 1) if comm.rank() < 2 else (2, 3)
        across = (me % 2, me % 2 + 2)
        for _ in range(2):
            for team in (same, across, (0, 1, 2, 3)):
                out = torch.empty(len(team))
                backend.allgather(out, torch.tensor([float(me)]), team=team).wait()
                assert out.tolist() == [float(rank) for rank in team]
                backend.allreduce(out, out.clone(), op="SUM", team=team).wait()
                assert out.tolist() == [float(len(team) * rank) for rank in team]
            # As after an error: all members of a team set up their communicator again.
            for key in [k for k in comm._control.ledger.entered if k.kind == "nccl"]:
                comm._control.lose(key)
        return {team for team, staging in backend._shared.items() if staging is None}

    with multidevice.simulate(4) as world, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = world.run(body)
    assert found == [set()] * 4, "all teams were given up"


@pytest.mark.finding("G44")
@pytest.mark.parametrize("gpus", ["aa", "ab", "aaaa", "aabb", "aabc"])
def test_programs_run_on_ranks_that_share_a_gpu(
    no_cuda: None, monkeypatch: pytest.MonkeyPatch, gpus: str
) -> None:
    """Whole programs, in first runs and replays, with and without stream loops."""
    on_gpus(monkeypatch, gpus)
    for name, case in PROGRAMS.items():
        if case.ranks != len(gpus):
            continue
        program = case.build()

        def body(program: Any = program, case: Any = case) -> list[list[torch.Tensor]]:
            comm = Communicator.instance()
            comm._backends["cpu", 0] = StandInBackend(comm._control, has_alltoall=True)
            evaluator = HostIrEvaluator(program, comm, number_of_streams=N_STREAMS)
            mine = shards_of(program, case.inputs(), comm.rank())
            return [evaluator.run(mine) for _ in range(3)]

        with multidevice.simulate(case.ranks) as world, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            by_rank = world.run(body)
        for turn in range(3):
            outputs = zip(program.outputs, case.expected(), strict=True)
            for i, (tv, want) in enumerate(outputs):
                shards = [runs[turn][i] for runs in by_rank]
                whole = unshard(shards, tv) if tv.mesh is not None else shards[0]
                torch.testing.assert_close(whole.double(), want, rtol=1e-4, atol=1e-4, msg=name)


def test_the_handle_0_is_the_default_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.cuda.ExternalStream(0) is a stream of torch's pool, which the default one never orders.
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: ("default", device))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    gpu = torch.device("cuda", 1)
    assert stream_at(0, gpu) == ("default", gpu)
    assert stream_at(64, gpu) == (64, gpu)


@pytest.mark.parametrize("name", ["mlp2", "sequence2", "mlp4", "mesh2x2", "encoder2"])
def test_a_replayed_program_posts_by_addresses(
    no_cuda: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A replay does not check buffers again, but still counts its calls."""
    case = CASES[name]
    program = build(case)
    is_steady = threading.Event()

    def checked(*args: object, **kwargs: object) -> None:
        assert not is_steady.is_set(), "a steady run checks its buffers"

    monkeypatch.setattr(StandInBackend, "_check_buffers", checked)

    def body() -> None:
        comm = Communicator.instance()
        backend = StandInBackend(comm._control, has_alltoall=True)
        comm._backends["cpu", 0] = backend
        evaluator = HostIrEvaluator(program, comm)
        pairs = zip(case.inputs(), program.inputs, strict=True)
        mine = [shard_for_rank(t, tv, comm.rank()) for t, tv in pairs]  # pyright: ignore[reportArgumentType]
        wanted = evaluator.evaluate(mine)
        evaluator.run(mine)
        comm.barrier()
        is_steady.set()
        posts = len(program.started())

        def run(inputs: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
            before = counted()
            for a, b in zip(evaluator.run(inputs), wanted, strict=True):
                assert torch.equal(a, b)
            assert counted() - before == posts

        def counted() -> int:
            entered = comm._control.ledger.entered
            return sum(n for key, n in entered.items() if key.kind == "nccl")

        for _ in range(2):
            run(mine, wanted)
        # Each team gives up its communicator, as after an error: the next posts connect anew.
        for key in [k for k in comm._control.ledger.entered if k.kind == "nccl"]:
            comm._control.lose(key)
        assert not backend._comms
        run(mine, wanted)
        comm.barrier()
        is_steady.clear()

    with multidevice.simulate(case.ranks) as world:
        world.run(body)


@pytest.mark.parametrize("name", ["ring_linear", "forwarding_ring", "permute_ring"])
def test_replayed_transfers_are_posted_by_addresses(
    no_cuda: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    case = PROGRAMS[name]
    program = case.build()
    is_steady = threading.Event()
    check = StandInBackend._check_tensor

    def checked(self: StandInBackend, *args: Any) -> None:
        assert not is_steady.is_set(), "a steady run checks its tensors"
        check(self, *args)

    monkeypatch.setattr(StandInBackend, "_check_tensor", checked)

    def body() -> list[torch.Tensor]:
        comm = Communicator.instance()
        backend = StandInBackend(comm._control, has_alltoall=True)
        comm._backends["cpu", 0] = backend
        evaluator = HostIrEvaluator(program, comm, number_of_streams=N_STREAMS)
        mine = shards_of(program, case.inputs(), comm.rank())
        wanted = evaluator.evaluate(mine)
        evaluator.run(mine)
        comm.barrier()
        is_steady.set()

        def moved() -> int:
            entered = comm._control.ledger.entered
            return sum(n for key, n in entered.items() if key.ends)

        counts: list[int] = []
        for _ in range(3):
            before = moved()
            for a, b in zip(evaluator.run(mine), wanted, strict=True):
                assert torch.equal(a, b)
            counts.append(moved() - before)
        assert counts[0] > 0 and set(counts) == {counts[0]}
        comm.barrier()
        is_steady.clear()
        return wanted

    with multidevice.simulate(case.ranks) as world:
        by_rank = world.run(body)
    for i, (tv, want) in enumerate(zip(program.outputs, case.expected(), strict=True)):
        shards = [outputs[i] for outputs in by_rank]
        whole = unshard(shards, tv) if tv.mesh is not None else shards[0]
        torch.testing.assert_close(whole.double(), want, rtol=1e-4, atol=1e-4)


def test_a_failed_post_of_a_replay_is_explained(no_cuda: None) -> None:
    def body() -> None:
        comm = Communicator.instance()
        backend = StandInBackend(comm._control, has_alltoall=True)
        x, out = torch.ones(4, 2), torch.empty(4, 2)
        backend.allreduce(out, x, op="SUM", team=(0, 1)).wait()
        backend.where = "model.py:7"
        post = backend.bind(ALLREDUCE, out, x, team=(0, 1), reduce="SUM")
        assert post is not None
        # Calls that are staged, or whose buffers overlap, cannot be posted by address.
        assert backend.bind(ALLREDUCE, out, x, team=(0, 1), reduce="MAX") is None
        assert backend.bind(ALL_TO_ALL, x, x, team=(0, 1)) is None
        post(out.data_ptr(), x.data_ptr(), 0).wait()
        assert out.tolist() == [[2.0] * 2] * 4
        with pytest.raises(InputError, match="float32"):
            backend.bind(ALLREDUCE, out, x.double(), team=(0, 1), reduce="SUM")

        def refuse(*args: object) -> None:
            raise RuntimeError("NCCL: unhandled")

        backend._comms.clear()
        broken: Any = SimpleNamespace(allreduce=refuse)
        backend._comm = lambda team: broken
        where = r"allreduce\(SUM\) of float32\[4, 2\] over team.* number 2, for model.py:7 failed"
        with pytest.raises(CommunicationError, match=where):
            post(out.data_ptr(), x.data_ptr(), 0)

    with multidevice.simulate(2) as world:
        world.run(body)


def test_graphs_go_before_communicators(no_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured graphs are destroyed first: NCCL waits forever to free a communicator they
    hold.
    """
    monkeypatch.setattr("multidevice.transports.nccl._ABORT_LIMIT_S", 0.1)

    class Graphs:
        def __init__(self, order: list[str]) -> None:
            self.order = order

        def forget(self) -> None:
            self.order.append("graphs")

    def body() -> None:
        comm, order, team = Communicator.instance(), list[str](), (0, 1)
        backend = StandInBackend(comm._control, has_alltoall=True)
        x = torch.ones(4, 2)
        backend.allreduce(torch.empty(4, 2), x, op="SUM", team=team).wait()
        graphs = Graphs(order)
        backend.repeated_by(graphs)
        begun, held = threading.Event(), threading.Event()

        def abort() -> None:
            order.append("communicator")
            begun.set()
            held.wait()

        monkeypatch.setattr(backend._comms[team], "abort", abort)
        before = backend.generation
        backend._forget(Calls("nccl", (0, 2)))
        assert order == ["graphs"] and team in backend._comms
        backend._forget(Calls("nccl", (0, 1)))
        # On a busy machine the limit may pass before the thread that aborts has begun.
        assert begun.wait(HANG_S)
        assert order == ["graphs", "graphs", "communicator"]
        assert backend.generation == before + 2
        backend.close()
        assert order[3:] == ["graphs"]
        held.set()

    with multidevice.simulate(2) as world:
        world.run(body)


def test_what_a_graph_repeats_is_counted_without_other_threads(no_cuda: None) -> None:
    def body() -> None:
        comm, team = Communicator.instance(), (0, 1)
        backend = StandInBackend(comm._control, has_alltoall=True)
        x, ledger = torch.ones(4, 2), backend._ledger
        backend.allreduce(torch.empty(4, 2), x, op="SUM", team=team).wait()  # connects
        before, other = dict(ledger.entered), Calls("nccl", (0, 2))
        with backend.noting() as calls:
            backend.allreduce(torch.empty(4, 2), x, op="SUM", team=team).wait()
            thread = threading.Thread(target=ledger.enter, args=(other,))
            thread.start()
            thread.join()
        key = Calls(backend.name, team)
        assert calls[key] == 1 and other not in calls
        backend.enter_again(calls)
        assert ledger.entered[key] == before.get(key, 0) + 2
        backend.enter_again(calls, -1)
        assert ledger.entered[key] == before.get(key, 0) + 1
        assert ledger.entered[other] == 1 and not ledger.noted

    with multidevice.simulate(2) as world:
        world.run(body)
