"""GPU memory that processes map from each other, on a stand-in for the driver.

No memory is freed while another process maps it, and none is unmapped or freed while the device may
use it.
"""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch

from fuser.support.errors import CommunicationError, UnsupportedError
from multidevice.transports.memory import cuda_ipc
from multidevice.transports.memory.cuda_ipc import UNIT_NBYTES, CudaCalls, Hooks, IpcPieces
from tests.support import mpi_abort
from tests.support.jobs import needs_mpi, run_job
from tests.support.stand_in_driver import GPU, Driver, driver

__all__ = ["driver"]

MB = 1 << 20


alone = pytest.mark.skipif(mpi_abort.world_size() > 1, reason="starts jobs of its own")


@alone
@needs_mpi
@pytest.mark.parametrize("kind", ["turns", "alone", "ahead", "views"])
def test_the_peer_copies_of_gpus_between_processes(kind: str) -> None:
    job = run_job("mpirun", 2, "stand_in_gpus.py", kind)
    assert job.code == 0 and job.text.count("ok rank") == 2, job.text


def pieces_on(driver: Driver, **hooks: Any) -> IpcPieces:
    return IpcPieces(GPU, CudaCalls(), Hooks(**{"is_idle": driver.idle, **hooks}))


def name_of(pieces: IpcPieces, tensor: torch.Tensor) -> tuple[int, ...]:
    found = pieces.name_at(tensor.data_ptr())
    assert found is not None
    return found[0]


def test_nothing_is_freed_before_peers_have_unmapped_it(driver: Driver) -> None:
    mine, peer = pieces_on(driver), pieces_on(driver)
    one, other = mine.allocate(3 * MB).fill_(1), mine.allocate(5 * MB).fill_(2)
    assert driver.nbytes == 10 * MB, "units of 2 MB"
    gone = name_of(mine, one)
    peer.find(gone, 0)
    peer.find(name_of(mine, other), 0)
    driver.is_busy = True
    del one
    gc.collect()
    for _ in range(3):
        mine.tidy()
        peer.tidy()
    assert "free" not in driver.log and "unmap" not in driver.log
    # The next name tells that something was given back.
    peer.find(name_of(mine, other), 0)
    driver.is_busy = True
    peer.tidy()
    driver.is_busy = True
    mine.tidy()
    assert driver.log[-4:] == ["idle", "unmap", "idle", "free"]
    assert driver.nbytes == 6 * MB and other.unique().tolist() == [2]
    assert gone not in peer
    before = len(driver.log)
    for pieces in (mine, peer, mine, peer):
        pieces.tidy()
    assert len(driver.log) == before, "what has been done is not done again"


def test_a_graph_keeps_what_it_reads(driver: Driver) -> None:
    mine, peer = pieces_on(driver), pieces_on(driver)
    x = mine.allocate(2 * MB)
    captured = [peer.find(name_of(mine, x), 0)]
    del x
    gc.collect()
    mine.tidy()
    for _ in range(3):
        peer.release()
        peer.tidy()
        mine.tidy()
    assert "unmap" not in driver.log
    captured.clear()
    peer.tidy()
    mine.tidy()
    assert driver.nbytes == 0


def test_graphs_that_keep_much_are_dropped(driver: Driver) -> None:
    captured: list[object] = []
    mine, peer = pieces_on(driver), pieces_on(driver, drop_graphs=captured.clear)
    for _ in range(40):
        x = mine.allocate(2 * MB)
        captured.append(peer.find(name_of(mine, x), 0))
        y = mine.allocate(2 * MB)
        del x
        mine.tidy()
        peer.find(name_of(mine, y), 0)
        peer.tidy()
        mine.tidy()
        assert driver.nbytes <= 2 * MB * 14


def test_nothing_goes_while_somebody_captures(driver: Driver) -> None:
    is_idle = [False]
    mine = pieces_on(driver, is_idle=lambda: is_idle[0])
    peer = pieces_on(driver, is_idle=lambda: is_idle[0])
    x = mine.allocate(2 * MB)
    peer.find(name_of(mine, x), 0)
    del x
    gc.collect()
    for _ in range(3):
        for pieces in (mine, peer):
            pieces.release()
            pieces.tidy()
    assert driver.log == ["allocate", "map"]
    is_idle[0] = True
    peer.tidy()
    mine.tidy()
    assert driver.nbytes == 0 and driver.log == ["allocate", "map", "unmap", "free"]


def test_programs_of_many_sizes_leave_nothing(driver: Driver) -> None:
    ranks = [pieces_on(driver), pieces_on(driver)]
    for k in range(60):
        held = [pieces.allocate((k + 3) * MB // 2) for pieces in ranks]
        for _ in range(2):
            for pieces in ranks:
                pieces.tidy()
            for me in (0, 1):
                ranks[me].find(name_of(ranks[1 - me], held[1 - me]), 1 - me)
        held.clear()
        for pieces in ranks:
            pieces.release()
        driver.is_busy = True
        assert driver.nbytes <= 3 * 2 * (k + 5) * MB
    for _ in range(3):
        for pieces in ranks:
            pieces.release()
            pieces.tidy()
    assert driver.nbytes == 0


_LOCKS = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_SH)
print("mapped", flush=True)
sys.stdin.read()
"""


def test_a_process_that_ends_keeps_nothing(driver: Driver) -> None:
    mine = pieces_on(driver)
    x = mine.allocate(2 * MB)
    pid, fd = name_of(mine, x)[:2]
    child = subprocess.Popen(
        [sys.executable, "-c", _LOCKS, f"/proc/{pid}/fd/{fd}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None and child.stdout.readline() == b"mapped\n"
        del x
        gc.collect()
        mine.tidy()
        assert driver.nbytes == 2 * MB
        child.send_signal(signal.SIGKILL)
        child.wait()
    mine.tidy()
    assert driver.nbytes == 0


def test_no_memory_is_an_error_with_numbers(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_ipc, "_NO_MEMORY_S", 0.0)
    driver.capacity = 10 * MB
    mine = pieces_on(driver)
    x = mine.allocate(8 * MB)
    with pytest.raises(
        torch.OutOfMemoryError, match=f"cannot allocate {4 * MB} bytes .* on cuda:3"
    ):
        mine.allocate(4 * MB)
    del x
    gc.collect()
    # Memory that nobody holds is given back before a new allocation fails.
    monkeypatch.setattr(cuda_ipc, "_NO_MEMORY_S", 20.0)
    assert mine.allocate(4 * MB).numel() == 4 * MB
    assert driver.log[-3:] == ["idle", "free", "allocate"]


def test_what_cannot_be_mapped_is_refused(driver: Driver) -> None:
    mine, peer = pieces_on(driver), pieces_on(driver)
    x = mine.allocate(UNIT_NBYTES)
    driver.refuses = "cuIpcOpenMemHandle"
    with pytest.raises(UnsupportedError, match="cuda:3 cannot map the memory of rank 3's GPU"):
        peer.find(name_of(mine, x), 3)
    name = name_of(mine, x)
    del x
    gc.collect()
    for _ in range(2):
        mine.tidy()
    assert driver.nbytes == 0, "a failed attempt keeps no lock"
    with pytest.raises(CommunicationError, match="rank 3's memory cannot be mapped"):
        peer.find(name, 3)
    driver.refuses = "cuIpcGetMemHandle"
    with pytest.raises(UnsupportedError, match="on cuda:3 cannot be mapped by other processes"):
        mine.allocate(UNIT_NBYTES)
    assert driver.nbytes == 0
