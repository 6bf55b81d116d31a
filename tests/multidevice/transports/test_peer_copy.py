"""Peer copies between CPU ranks: jobs of their own, and the mailbox and memory that ranks
share.
"""

from __future__ import annotations

import gc
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import multidevice
from fuser.support.errors import CommunicationError
from multidevice import Communicator
from multidevice.coordination.bounded_wait import Ledger
from multidevice.job.agreement import counts_of, realign
from multidevice.transports import peer_copy_cuda
from multidevice.transports.base.protocol import FIRST_GRAPH, NAME_WORDS, NOT_CAPTURED, Transfer
from multidevice.transports.memory.host_shared import SharedMemory
from multidevice.transports.peer_copy import SLOTS, Mailbox
from tests.support import mpi_abort
from tests.support.jobs import needs_mpi, run_job
from tests.support.rank_programs import collectives

CPU = torch.device("cpu")
alone = pytest.mark.skipif(mpi_abort.world_size() > 1, reason="starts jobs of its own")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_simulated_peers_carry_out_every_collective(size: int) -> None:
    with multidevice.simulate(size) as world:
        world.run(lambda: collectives.check_all(CPU, peers=True))


@alone
@needs_mpi
@pytest.mark.parametrize("size", [2, 4])
def test_collectives_under_mpirun(size: int) -> None:
    job = run_job("mpirun", size, "collectives.py", "cpu", "peers")
    assert job.code == 0, job.text
    assert job.text.count(f"of {size} on cuda") == size, job.text


@alone
def test_collectives_under_torchrun() -> None:
    job = run_job("torchrun", 2, "collectives.py", "cpu", "peers")
    assert job.code == 0, job.text
    assert job.text.count("of 2 on cuda") == 2, job.text


@alone
@needs_mpi
@pytest.mark.parametrize("kind", ["exception", "exit", "thread"])
def test_a_fault_ends_the_job(kind: str) -> None:
    job = run_job("mpirun", 2, "faults.py", kind, "peers")
    assert job.code != 0, job.text
    assert "rank 1" in job.text


@alone
@needs_mpi
def test_an_absent_peer_is_named() -> None:
    job = run_job("mpirun", 2, "faults.py", "stall", "peers")
    assert job.code == 7, job.text
    assert "allreduce(SUM) of float32[4] over team (0 1)" in job.text
    assert "rank 1 has not entered it" in job.text


@pytest.mark.mpi
def test_all_collectives_of_this_job(comm: Communicator) -> None:
    collectives.check_all(CPU, peers=True)


@pytest.mark.mpi(min_size=2)
def test_more_transfers_under_way_than_the_page_has_room_for(comm: Communicator) -> None:
    """The sender waits for a free slot, and all transfers arrive, waited for in reverse
    order.
    """
    peers, me, n = comm.peers_for(CPU), comm.rank(), comm.size()
    world = tuple(range(n))
    to, source = (me + 1) % n, (me - 1) % n
    count = 3 * SLOTS
    found = [torch.full((5,), -1.0) for _ in range(count)]
    works = [
        peers.batch(
            [
                Transfer("recv", found[k], source),
                Transfer("send", torch.full((5,), float(1000 * me + k)), to),
            ],
            team=world,
        )
        for k in range(count)
    ]
    for work in reversed(works):
        work.wait()
    for k, one in enumerate(found):
        assert one.tolist() == [1000.0 * source + k] * 5


@pytest.mark.mpi(min_size=2)
def test_memory_of_peers_is_sent_without_a_copy(comm: Communicator) -> None:
    """The receiver gets what the sender wrote after its send but before the receiver copies."""
    peers, me = comm.peers_for(CPU), comm.rank()
    world = tuple(range(comm.size()))
    mine = peers.empty(64).zero_()
    found = torch.zeros(64, dtype=torch.uint8)
    if me == 0:
        work = peers.send(mine, peer=1, team=world)
        mine.fill_(7)
        comm.barrier()
        work.wait()
    else:
        comm.barrier()
        if me == 1:
            peers.recv(found, peer=0, team=world).wait()
            assert found.tolist() == [7] * 64


@pytest.mark.mpi(min_size=2)
def test_what_a_failed_run_has_sent_is_not_received_by_the_next(comm: Communicator) -> None:
    peers, me, team = comm.peers_for(CPU), comm.rank(), (0, 1)
    if me < 2:
        found = torch.zeros(3)
        for run, is_failed in enumerate((True, False)):
            comm.begin_run(team)
            sent = Transfer("send", torch.full((3,), 10.0 * run + me), 1 - me)
            work = peers.batch([sent], team=team)
            if is_failed and me == 1:
                continue  # an error between the send and the receive
            if not is_failed:
                peers.recv(found, peer=1 - me, team=team).wait()
                work.wait()
                assert found.tolist() == [10.0 * run + 1 - me] * 3
        # Programs do this after an error: one rank has counted a call that the other has not.
        counts = [
            pickle.loads(x)
            for x in comm.exchange(pickle.dumps(counts_of(comm._control)), team=team)
        ]
        realign(comm._control, team, counts, has_failed=True)
    comm.barrier()


@pytest.mark.mpi(min_size=3)
def test_a_capture_ends_where_any_rank_of_the_program_gave_it_up(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that gives up a capture tells all ranks of the program, whichever team they wait
    in.
    """
    monkeypatch.setattr(peer_copy_cuda, "IpcMemory", lambda *about: SharedMemory())
    monkeypatch.setattr(peer_copy_cuda.CudaPeerBackend, "_connected", lambda self, mailbox: None)
    peers, world = peer_copy_cuda.CudaPeerBackend(comm._control, CPU), tuple(range(comm.size()))
    call: Any = SimpleNamespace(team=(0, 1), describe=lambda: "a recv", needs=list)
    try:
        if comm.rank() < 2:
            peers.connect((0, 1))
        peers.vote(world, FIRST_GRAPH)
        if comm.rank() == 0:
            gone = pytest.raises(CommunicationError, match="could not capture it")
            with gone, peers.capturing(0):
                peers._poll(lambda: False, call, ())
        assert NOT_CAPTURED in peers.vote(world, NOT_CAPTURED)
    finally:
        comm._control.on_lost.remove(peers._forget)


@pytest.mark.mpi(min_size=3)
def test_what_a_capture_left_behind_takes_no_room(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers, me, team = comm.peers_for(CPU), comm.rank(), (0, 1)
    peers.start_over(tuple(range(comm.size())))
    if me < 2:
        peers.connect(team)
    for _ in range(SLOTS * (me == 0)):
        peers.send(torch.zeros(3), peer=1, team=team)
    peers.start_over(tuple(range(comm.size())))
    if me == 0:
        peers.send(torch.ones(3), peer=1, team=team).wait()
    if me == 1:
        found = torch.zeros(3)
        peers.recv(found, peer=0, team=team).wait()
        assert found.tolist() == [1.0] * 3


@pytest.mark.mpi(min_size=2)
def test_one_element_of_any_stride_is_received(comm: Communicator) -> None:
    peers, me = comm.peers_for(CPU), comm.rank()
    if me < 2:
        found = torch.zeros(1).as_strided((1, 1), (0, 0))
        mine = torch.full((1,), me + 5.0).expand(1, 1).as_strided((1, 1), (0, 0))
        both = [Transfer("send", mine, 1 - me), Transfer("recv", found, 1 - me)]
        peers.batch(both, team=(0, 1)).wait()
        assert found.item() == 6.0 - me
    comm.barrier()


@pytest.mark.mpi(min_size=2)
def test_a_transfer_that_does_not_fit_is_named_on_both_sides(comm: Communicator) -> None:
    peers, me = comm.peers_for(CPU), comm.rank()
    team = (0, 1)
    if me < 2:
        with pytest.raises(CommunicationError) as caught:
            if me == 0:
                peers.send(torch.ones(4), peer=1, team=team).wait()
            else:
                peers.recv(torch.ones(3), peer=0, team=team).wait()
        assert "rank 0 sends" in str(caught.value)
        assert "rank 1" in str(caught.value)
    comm.barrier()


def test_a_slot_is_free_when_its_record_was_answered() -> None:
    words = memoryview(bytearray(Mailbox.nbytes(2))).cast("Q")
    controls: Any = [SimpleNamespace(rank=rank, ledger=Ledger()) for rank in (3, 5)]
    sender, receiver = (Mailbox(words, (3, 5), control) for control in controls)
    x = torch.arange(6, dtype=torch.int16)
    sent = [
        sender.post(5, sender.free_slot(5), tag, x, (0,) * NAME_WORDS, 8 * tag, 1)
        for tag in range(1, SLOTS + 1)
    ]
    assert sender.free_slot(5) == -1
    assert receiver.find(3, SLOTS + 1) is None
    record = receiver.find(3, 4)
    assert record is not None
    assert (record.elements, record.dtype, record.offset) == (6, torch.int16, 32)
    assert not sender.answered(sent[3])
    receiver.answer(3, record.slot, 4)
    assert sender.answered(sent[3])
    assert sender.free_slot(5) == record.slot
    again = sender.post(5, record.slot, SLOTS + 9, x, (0,) * NAME_WORDS, 0, 2)
    assert (again.use, sender.answered(again)) == (2, False)


def test_shared_memory_is_reused_when_nobody_holds_it() -> None:
    memory = SharedMemory()
    a, b = memory.empty(1000), memory.empty(1000)
    a.fill_(1)
    b.fill_(2)
    place = memory.name_of(a)
    view = a.view(torch.int32)[3:5]
    del a
    gc.collect()
    c = memory.empty(1000).fill_(3)
    assert view.tolist() == [0x01010101] * 2, "a view keeps its memory"
    assert b.unique().tolist() == [2]
    assert c.unique().tolist() == [3]
    del view
    gc.collect()
    again = memory.empty(900)
    assert memory.name_of(again) == place
    assert memory.name_of(torch.ones(3)) is None


def test_large_and_small_pieces_of_shared_memory_do_not_meet() -> None:
    memory = SharedMemory()
    sizes = [1, 255, 256, 257, 70 << 20, 4096, 0, 3]
    pieces = [memory.empty(n) for n in sizes]
    for k, piece in enumerate(pieces):
        piece.fill_(k)
    for k, piece in enumerate(pieces):
        assert piece.numel() == sizes[k]
        assert (piece == k).all()


def test_slowly_growing_sizes_take_the_same_memory() -> None:
    memory = SharedMemory()
    places = set[object]()
    for k in range(20):
        piece = memory.empty((66 + 2 * k) << 20)
        found = memory.name_of(piece)
        assert found is not None
        places.add(found[0])
        del piece
        gc.collect()
    assert len(places) == 1
