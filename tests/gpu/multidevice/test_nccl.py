"""NCCL on GPUs, one per rank.

mpirun -np N python -m pytest --with-mpi tests/gpu/multidevice/test_nccl.py

All collectives are compared with plain torch, for every binding that is installed. Further tests
check stream order, capture in a CUDA graph, and waits with a timeout.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from fuser.support.errors import InputError
from multidevice import Communicator
from multidevice.transports.base.protocol import RedOp
from multidevice.transports.nccl import NcclBackend
from multidevice.transports.nccl_binding import CupyBinding, Nccl4pyBinding
from tests.support.rank_programs import collectives

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def device(comm: Communicator) -> torch.device:
    if torch.cuda.device_count() < comm.local_size():
        pytest.skip(f"{comm.local_size()} ranks, {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def world(comm: Communicator) -> tuple[int, ...]:
    return tuple(range(comm.size()))


def test_the_device_is_the_local_rank(comm: Communicator, device: torch.device) -> None:
    assert device.index == comm.local_rank()


def test_everything(device: torch.device) -> None:
    collectives.check_all(device)


@pytest.mark.parametrize(("module", "binding"), [("cupy", CupyBinding), ("nccl", Nccl4pyBinding)])
def test_each_binding(
    comm: Communicator,
    device: torch.device,
    world: tuple[int, ...],
    module: str,
    binding: type[CupyBinding] | type[Nccl4pyBinding],
) -> None:
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    backend = NcclBackend(comm._control, device, binding())
    for dtype in collectives.DTYPES:
        collectives.check_dtype(backend, comm.rank(), world, dtype, device, 1000)
    torch.cuda.synchronize()
    comm.barrier()
    backend.close()


def test_a_collective_is_ordered_by_the_stream_it_is_given(
    comm: Communicator, device: torch.device, world: tuple[int, ...]
) -> None:
    backend = comm.backend_for(device)
    side = torch.cuda.Stream()
    x = torch.zeros(1 << 20, device=device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # A long wait on the side stream: a collective on any other stream would read zeros.
        torch.cuda._sleep(20_000_000)
        x.fill_(comm.rank() + 1)
    work = backend.allreduce(x, x, op="SUM", team=world, stream=side)
    work.wait()
    work.synchronize()
    assert side.query(), "synchronize returned before the stream was done"
    expected = sum(range(1, comm.size() + 1))
    assert (x == expected).all().item()
    with torch.cuda.stream(side):
        backend.allreduce(x, x, op="MAX", team=world, stream=side.cuda_stream).synchronize()
    assert (x == expected).all().item()


@pytest.mark.parametrize("op", ["SUM", "MAX"])
def test_the_default_stream_orders_a_reduction(
    comm: Communicator, device: torch.device, world: tuple[int, ...], op: RedOp
) -> None:
    # A maximum is prepared by kernels of torch: they ran on a stream of its pool, beside this one.
    backend = comm.backend_for(device)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    x = torch.zeros(1 << 20, device=device)
    out = torch.zeros_like(x)
    expected = sum(range(1, comm.size() + 1)) if op == "SUM" else comm.size()
    for step in range(3):
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        x.fill_((comm.rank() + 1) * 10**step)
        work = backend.allreduce(out, x, op=op, team=world)
        work.wait()
        seen = out.clone()
        work.synchronize()
        assert torch.cuda.current_stream().query(), "synchronize returned before the stream"
        assert (seen == expected * 10**step).all().item()


def test_capture_in_a_graph(
    comm: Communicator, device: torch.device, world: tuple[int, ...]
) -> None:
    backend = comm.backend_for(device)
    x, out = torch.ones(4096, device=device), torch.zeros(4096 * comm.size(), device=device)
    # First use connects the team, which cannot be captured.
    backend.allgather(out, x, team=world).synchronize()
    backend.allreduce(x.clone(), x, op="SUM", team=world).synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        backend.allreduce(y, y, op="SUM", team=world).wait()
        backend.allgather(out, y, team=world).wait()
    for step in range(3):
        x.fill_(step + comm.rank())
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert (out == 2 * sum(step + r for r in world)).all().item()
    del graph


def test_the_wrong_device_is_an_error(
    comm: Communicator, device: torch.device, world: tuple[int, ...]
) -> None:
    backend = comm.backend_for(device)
    with pytest.raises(InputError, match="cpu"):
        backend.allreduce(torch.ones(1), torch.ones(1), op="SUM", team=world)
    with pytest.raises(InputError, match="a stream must be"):
        x = torch.ones(1, device=device)
        backend.allreduce(x, x, op="SUM", team=world, stream="side")


def test_simulated_ranks_share_one_device(device: torch.device) -> None:
    import multidevice

    with multidevice.simulate(3) as simulated:
        simulated.run(collectives.check_all, device)


def test_speed_of_a_small_allreduce(
    comm: Communicator, device: torch.device, world: tuple[int, ...]
) -> None:
    """Prints the host and device time of a 64 KB bfloat16 allreduce; no bound is asserted."""
    import time

    backend = comm.backend_for(device)
    x = torch.ones(32768, device=device, dtype=torch.bfloat16)
    for _ in range(20):
        backend.allreduce(x, x, op="MAX", team=world)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(200):
        backend.allreduce(x, x, op="MAX", team=world)
    enqueued = time.perf_counter() - start
    torch.cuda.synchronize()
    total = time.perf_counter() - start
    print(f"allreduce of 64 KB: {enqueued * 5e3:.1f} us host, {total * 5e3:.1f} us in all")
