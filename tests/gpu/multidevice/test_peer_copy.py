"""Peer copies between GPUs, which ranks may share: mapping and stream waits work the same way.

mpirun -np N python -m pytest --with-mpi tests/gpu/multidevice/test_peer_copy.py
"""

from __future__ import annotations

import random

import pytest
import torch

from multidevice import Communicator
from multidevice.transports.base.protocol import Transfer
from multidevice.transports.peer_copy import SLOTS
from tests.support.rank_programs import collectives

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def device(comm: Communicator) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_everything(comm: Communicator, device: torch.device) -> None:
    collectives.check_all(device, peers=True)


def test_a_ring_under_random_delays(comm: Communicator, device: torch.device) -> None:
    """Senders overwrite their data at once; ranks and streams are at different places."""
    peers, me, n = comm.peers_for(device), comm.rank(), comm.size()
    world, chance = tuple(range(n)), random.Random(me)
    to, source = (me + 1) % n, (me - 1) % n
    streams = [torch.cuda.Stream() for _ in range(3)]
    is_mapped = [peers.empty(4 << 16).view(torch.float32), torch.empty(1 << 16, device=device)]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for k in range(400):
        with torch.cuda.stream(streams[k % 3]):
            mine = is_mapped[k % 2] if k % 3 == 0 else torch.empty(1 << 16, device=device)
            if chance.random() < 0.2:
                torch.cuda._sleep(chance.randrange(2_000_000))
            mine.fill_(1000 * me + k)
            found = torch.empty(1 << 16, device=device)
            both = [Transfer("recv", found, source), Transfer("send", mine, to)]
            work = peers.batch(both, team=world)
            if chance.random() < 0.2:
                torch.cuda._sleep(chance.randrange(2_000_000))
            work.wait()
            mine.fill_(-1)
            # Only one stream at a time may use memory that peers may still access.
            wrong += (found != 1000 * source + k).sum()
            for other in streams:
                other.wait_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    assert wrong.item() == 0


def test_waits_that_come_late(comm: Communicator, device: torch.device) -> None:
    peers, me, n = comm.peers_for(device), comm.rank(), comm.size()
    world = tuple(range(n))
    to, source = (me + 1) % n, (me - 1) % n
    count = 2 * SLOTS + 5
    found = [torch.empty(1000, device=device) for _ in range(count)]
    works = [
        peers.batch(
            [
                Transfer("send", torch.full((1000,), 1000.0 * me + k, device=device), to),
                Transfer("recv", found[k], source),
            ],
            team=world,
        )
        for k in range(count)
    ]
    for work in reversed(works):
        work.wait()
    torch.cuda.synchronize()
    for k, one in enumerate(found):
        assert (one == 1000.0 * source + k).all()


def test_halves_of_a_large_allreduce_are_added_in_order(
    comm: Communicator, device: torch.device
) -> None:
    """Large allreduces add in float32 in the order of the ranks, and round once."""
    me, n, count = comm.rank(), comm.size(), 5 << 20
    peers, world = comm.peers_for(device), tuple(range(n))

    def of(rank: int) -> torch.Tensor:
        generator = torch.Generator(device=device).manual_seed(rank)
        return torch.randn(count, generator=generator, device=device).bfloat16()

    want = of(0).float()
    for rank in range(1, n):
        want += of(rank)
    found = torch.empty(count, dtype=torch.bfloat16, device=device)
    peers.allreduce(found, of(me), op="SUM", team=world).wait()
    assert torch.equal(found, want.bfloat16())


def test_a_wait_stands_in_the_stream_that_waits(comm: Communicator, device: torch.device) -> None:
    """Only the stream that calls `wait` is blocked; the sending stream can go on."""
    peers, me, n = comm.peers_for(device), comm.rank(), comm.size()
    world, to, source = tuple(range(n)), (me + 1) % n, (me - 1) % n
    sending, waiting = torch.cuda.Stream(), torch.cuda.Stream()
    mine = peers.empty(4 << 16).view(torch.float32)
    found = torch.empty(1 << 16, device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    sending.wait_stream(torch.cuda.current_stream())
    for k in range(20):
        with torch.cuda.stream(sending):
            mine.fill_(1000 * me + k)
            if (me + k) % 2:
                torch.cuda._sleep(3_000_000)  # this rank copies late
        both = [Transfer("recv", found, source), Transfer("send", mine, to)]
        work = peers.batch(both, team=world, stream=sending)
        with torch.cuda.stream(waiting):
            work.wait()
            mine.fill_(-1)
        with torch.cuda.stream(sending):
            wrong += (found != 1000 * source + k).sum()
        sending.wait_stream(waiting)
    torch.cuda.synchronize()
    assert wrong.item() == 0
