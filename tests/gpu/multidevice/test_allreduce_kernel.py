"""Allreduces as one kernel between GPUs.

mpirun -np N python -m pytest --with-mpi tests/gpu/multidevice/test_allreduce_kernel.py

Ranks may share a GPU: then their kernels take turns, and each is slow. The kernel itself is tested
in `tests/multidevice/transports/base/test_allreduce_model.py`.
"""

from __future__ import annotations

import random
import time

import pytest
import torch

from fuser.support.errors import CommunicationError, CommunicationTimeout
from multidevice import Communicator
from multidevice.coordination.bounded_wait import Calls
from multidevice.transports.base.allreduce_model import MAX_NBYTES, Way, shape_of
from multidevice.transports.base.collectives import ALLREDUCE
from multidevice.transports.base.protocol import RedOp
from multidevice.transports.nccl import NcclBackend
from multidevice.transports.peer_copy_cuda import CudaPeerBackend
from tests.multidevice.transports.base.test_allreduce_model import DTYPES, reductions
from tests.support.rank_programs import collectives

pytestmark = pytest.mark.mpi(min_size=2)
REDUCTIONS = {dtype: reductions(dtype) for dtype in DTYPES}
# Each is three kernels to compile.
SOME: list[tuple[torch.dtype, RedOp]] = [
    *((dtype, "SUM") for dtype in DTYPES),
    (torch.bfloat16, "MAX"),
    (torch.float32, "AVG"),
    (torch.float16, "PRODUCT"),
    (torch.int32, "MIN"),
]
FOLDS = {"SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}


@pytest.fixture
def device(comm: Communicator) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def world(comm: Communicator) -> tuple[int, ...]:
    return tuple(range(comm.size()))


@pytest.fixture
def backend(comm: Communicator, device: torch.device) -> NcclBackend | CudaPeerBackend:
    """The backend of small allreduces that are kernels: NCCL's if each rank has a GPU.

    If ranks share a GPU, NCCL cannot connect them, and the NCCL backend goes through the CPU. Then
    it is the backend of peer copies.
    """
    if torch.cuda.device_count() < comm.local_size():
        peers = comm.peers_for(device)
        assert isinstance(peers, CudaPeerBackend)
        return peers
    found = comm.backend_for(device)
    assert isinstance(found, NcclBackend)
    return found


def values(seed: int, rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns a rank's operand, which every rank can compute from seed and rank."""
    generator = torch.Generator("cuda").manual_seed(1000 * seed + rank)
    whole = torch.randint(-7, 8, (count,), generator=generator, device="cuda")
    if not dtype.is_floating_point:
        return whole.to(dtype)
    part = torch.rand(count, generator=generator, device="cuda", dtype=torch.float64)
    return (whole + part).to(dtype)


def reduced(inps: list[torch.Tensor], op: RedOp) -> torch.Tensor:
    """Returns the reduction, computed in float64 or, for integers, in their own dtype."""
    dtype = inps[0].dtype
    wide = [x.double() if dtype.is_floating_point else x for x in inps]
    total = wide[0]
    for x in wide[1:]:
        total = FOLDS["SUM" if op == "AVG" else op](total, x)
    return (total / len(wide) if op == "AVG" else total).to(dtype)


def check(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    collectives.same(found, expected.cpu(), what, ulps=1.0 if found.dtype.itemsize == 2 else 4.0)


@pytest.mark.timeout(400)
def test_all_reductions_and_dtypes(
    comm: Communicator, device: torch.device, backend: NcclBackend | CudaPeerBackend
) -> None:
    """All reductions and dtypes, special values, reversed and smaller teams."""
    me = comm.rank()
    world = tuple(range(comm.size()))
    teams = [world, world[::-1]]
    if comm.size() == 4:
        teams.append((0, 2) if me in (0, 2) else (3, 1))
    for team in teams:
        for dtype in DTYPES:
            for op in REDUCTIONS[dtype]:
                for count in (1, 5, 1000):
                    inps = [values(count, r, count, dtype) for r in team]
                    mine, expected = inps[team.index(me)], reduced(inps, op)
                    out = torch.zeros_like(mine)
                    backend.allreduce(out, mine, op=op, team=team).wait()
                    check(out, expected, f"{op} {dtype} {count}")
                    backend.allreduce(mine, mine, op=op, team=team).wait()
                    check(mine, expected, f"{op} {dtype} {count} in place")
    for dtype in (torch.float32, torch.bfloat16):
        collectives_of_special_values(comm, device, backend, dtype)
    assert backend.kernels.is_used and not backend.kernels.why_not, backend.kernels.why_not


def collectives_of_special_values(
    comm: Communicator,
    device: torch.device,
    backend: NcclBackend | CudaPeerBackend,
    dtype: torch.dtype,
) -> None:
    special = torch.tensor(collectives.SPECIAL, dtype=dtype, device=device)
    inps = [special.roll(3 * r) for r in range(comm.size())]
    for op in ("MIN", "MAX"):
        out = torch.zeros_like(special)
        team = tuple(range(comm.size()))
        backend.allreduce(out, inps[comm.rank()], op=op, team=team).wait()
        expected = inps[0]
        for x in inps[1:]:
            expected = FOLDS[op](expected, x)
        assert torch.equal(out.nan_to_num(6e4), expected.nan_to_num(6e4)), (op, dtype)


@pytest.mark.timeout(400)
def test_random_messages(comm: Communicator, device: torch.device, seeded: int) -> None:
    """200 messages of random sizes up to the largest, on fresh data, at any address."""
    peers, me, size = comm.peers_for(device), comm.rank(), comm.size()
    world, ways = tuple(range(size)), set[Way]()
    for k in range(200):
        (dtype, op), nbytes = random.choice(SOME), int(2 ** random.uniform(0, 23))
        count, shift = max(nbytes // dtype.itemsize, 1), random.randrange(3)
        shape = shape_of(count * dtype.itemsize, size, dtype)
        assert shape is not None
        ways.add(shape.way)
        inps = [values(k, r, count, dtype) for r in world]
        mine = torch.cat([inps[me][:shift], inps[me]])[min(shift, count) :]
        buffer = torch.full((count + 8,), 77, dtype=dtype, device=device)
        out = buffer[shift : shift + count]
        peers.allreduce(out, mine, op=op, team=world).wait()
        what = f"{k}: {op} of {count} {dtype} at {shift}, {shape}"
        check(out, reduced(inps, op), what)
        assert (buffer[:shift] == 77).all() and (buffer[shift + count :] == 77).all(), what
    # Of two ranks, each sends as much in one shot.
    assert ways == set(Way) - ({Way.TWO_SHOTS} if size == 2 else set())


def test_ranks_get_the_same_bits(
    comm: Communicator, device: torch.device, world: tuple[int, ...]
) -> None:
    peers = comm.peers_for(device)
    for nbytes in (1 << 12, 1 << 17, 1 << 22):
        out = torch.randn(nbytes // 4, device=device) * (comm.rank() + 0.1)
        peers.allreduce(out, out, op="SUM", team=world).wait()
        bits = out.view(torch.int32)
        theirs = torch.zeros(len(world), bits.numel(), dtype=torch.int32, device=device)
        peers.allgather(theirs, bits, team=world).wait()
        assert (theirs == theirs[0]).all(), nbytes


def test_bound_calls_have_the_bits_of_unbound_ones(
    comm: Communicator,
    device: torch.device,
    world: tuple[int, ...],
    backend: NcclBackend | CudaPeerBackend,
) -> None:
    stream = torch.cuda.current_stream().cuda_stream
    for each in {comm.peers_for(device), backend}:
        for op in REDUCTIONS[torch.float32]:
            inp, out = torch.randn(3000, device=device), torch.zeros(3000, device=device)
            each.allreduce(out, inp, op=op, team=world).wait()
            post = each.bind(ALLREDUCE, out, inp, team=world, reduce=op)
            assert post is not None
            for _ in range(20):
                again = torch.zeros_like(out)
                post(again.data_ptr(), inp.data_ptr(), stream).wait()
                assert torch.equal(again, out)


def test_streams_under_random_delays(
    comm: Communicator, device: torch.device, world: tuple[int, ...], seeded: int
) -> None:
    """Allreduces on three unordered streams, with ranks at different places."""
    peers, me, n = comm.peers_for(device), comm.rank(), comm.size()
    chance = random.Random(me)
    streams = [torch.cuda.Stream() for _ in range(3)]
    counts = (100, 40_000, 600_000)
    wrong = torch.zeros(3, dtype=torch.int64, device=device)
    torch.cuda.synchronize()
    for k in range(200):
        which = random.randrange(3)
        with torch.cuda.stream(streams[which]):
            if chance.random() < 0.2:
                torch.cuda._sleep(chance.randrange(2_000_000))
            mine = torch.full((random.choice(counts),), float(k + me), device=device)
            peers.allreduce(mine, mine, op="SUM", team=world).wait()
            wrong[which] += (mine != n * k + n * (n - 1) // 2).sum()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0, 0]


def test_a_graph_with_branches(
    comm: Communicator,
    device: torch.device,
    world: tuple[int, ...],
    backend: NcclBackend | CudaPeerBackend,
) -> None:
    """A graph with an allreduce in each of two branches, one before and one after; replayed."""
    me, n = comm.rank(), comm.size()
    x, side = torch.ones(5000, device=device), torch.cuda.Stream()
    big = torch.ones(200_000, device=device)
    for t in (x, big):
        backend.allreduce(t.clone(), t, op="SUM", team=world).wait()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = torch.empty_like(x)
        backend.allreduce(first, x, op="SUM", team=world).wait()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            branch = torch.empty_like(big)
            backend.allreduce(branch, big * first[0], op="SUM", team=world).wait()
        second = torch.empty_like(x)
        backend.allreduce(second, x * 2, op="SUM", team=world).wait()
        torch.cuda.current_stream().wait_stream(side)
        last = torch.empty_like(x)
        backend.allreduce(last, second + branch[0], op="SUM", team=world).wait()
    for k in range(200):
        x.fill_(k + me)
        big.fill_(me + 1)
        graph.replay()
        total, ranks = n * k + n * (n - 1) // 2, n * (n + 1) // 2
        assert (first == total).all(), k
        assert (second == 2 * total).all(), k
        assert (branch == total * ranks).all(), k
        assert (last == n * (2 * total + total * ranks)).all(), k


def test_graphs_on_streams_that_nothing_orders(
    comm: Communicator, device: torch.device, world: tuple[int, ...]
) -> None:
    """Two graphs and eager allreduces, each on its own stream, with ranks at different
    places.
    """
    peers, me, n = comm.peers_for(device), comm.rank(), comm.size()
    chance = random.Random(me)
    streams = [torch.cuda.Stream() for _ in range(3)]
    inputs = [torch.zeros(size, device=device) for size in (3000, 100_000, 3000)]
    outs = [torch.zeros_like(x) for x in inputs]
    for out, x in zip(outs, inputs, strict=True):
        peers.allreduce(out, x, op="SUM", team=world).wait()
    torch.cuda.synchronize()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph, x, out in zip(graphs, inputs, outs, strict=False):
        with torch.cuda.graph(graph):
            peers.allreduce(out, x, op="SUM", team=world).wait()
            peers.allreduce(out, out, op="SUM", team=world).wait()
    wrong = torch.zeros(3, dtype=torch.int64, device=device)
    torch.cuda.synchronize()
    for k in range(100):
        for which, (x, out) in enumerate(zip(inputs, outs, strict=True)):
            with torch.cuda.stream(streams[which]):
                if chance.random() < 0.2:
                    torch.cuda._sleep(chance.randrange(2_000_000))
                x.fill_(k + me + which)
                if which < 2:
                    graphs[which].replay()
                else:
                    peers.allreduce(out, x, op="SUM", team=world).wait()
                total = n * (k + which) + n * (n - 1) // 2
                wrong[which] += (out != (n * total if which < 2 else total)).sum()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0, 0]


def test_a_first_call_is_not_captured(
    comm: Communicator, device: torch.device, world: tuple[int, ...]
) -> None:
    peers = CudaPeerBackend(comm._control, device)
    x = torch.ones(100, device=device)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(CommunicationError, match="make this call once before"),
        torch.cuda.graph(graph),
    ):
        x.add_(1)
        peers.allreduce(x, x, op="SUM", team=world)
    peers.close()


def test_what_is_larger_is_left_to_the_backend(
    comm: Communicator, device: torch.device, world: tuple[int, ...]
) -> None:
    peers, backend = comm.peers_for(device), comm.backend_for(device)
    x = torch.ones(MAX_NBYTES // 4 + 1, device=device)
    peers.allreduce(x, x, op="SUM", team=world).wait()
    assert (x == comm.size()).all()
    if torch.cuda.device_count() >= comm.local_size():
        x = torch.ones(MAX_NBYTES // 4 + 1, device=device)
        backend.allreduce(x, x, op="SUM", team=world).wait()
        assert (x == comm.size()).all()


def test_a_rank_that_does_not_come_is_named(
    comm: Communicator,
    device: torch.device,
    world: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel ends after the timeout, and the error names the missing rank."""
    peers, me, last = CudaPeerBackend(comm._control, device), comm.rank(), comm.size() - 1
    x = torch.ones(100, device=device)
    peers.allreduce(x, x, op="SUM", team=world).synchronize()
    comm.barrier()
    if me == last:
        # Count the call without starting it, so that later errors do not report it as lost. The
        # others' second call below never starts.
        comm._control.ledger.enter(Calls("cuda", tuple(world)))
    else:
        monkeypatch.setenv("FUSER_TIMEOUT_S", "2")
        y, began = torch.ones(200, device=device), time.monotonic()
        work = peers.allreduce(y, y, op="SUM", team=world)
        with pytest.raises(CommunicationTimeout, match=r"allreduce\(SUM\) of float32\[200\]"):
            work.synchronize()
        torch.cuda.synchronize()
        assert time.monotonic() - began < 10, "the kernel went on"
        with pytest.raises(CommunicationTimeout, match=f"rank {last} has not started"):
            peers.allreduce(y, y, op="SUM", team=world)
    monkeypatch.undo()
    comm.barrier()
    peers.close()
