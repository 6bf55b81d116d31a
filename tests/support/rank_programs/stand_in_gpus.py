"""Peer copies of GPUs on a stand-in for the CUDA driver, whose memory is the host's.

mpirun -np 2 python tests/support/rank_programs/stand_in_gpus.py KIND
"""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multidevice.job.communicator import Communicator
from multidevice.transports import peer_copy_cuda
from multidevice.transports.base.protocol import Transfer
from multidevice.transports.memory.cuda_ipc import IpcMemory
from multidevice.transports.memory.cuda_vmm import GpuShards
from multidevice.transports.peer_copy_cuda import CudaPeerBackend
from tests.support.rank_programs.dropped_programs import Exchange
from tests.support.rank_programs.symmetric_views import program_of, run_here
from tests.support.stand_in_driver import CPU, GPU, UNIT, Driver, watch

# Rows of 1 KB that make a shard as large as the driver maps it.
ROWS = UNIT >> 10


def gpu_of_this_rank() -> Driver:
    """Patches the package so that programs on the CPU copy between peers as GPUs do."""
    driver = watch(setattr)

    def empty(self: IpcMemory, nbytes: int) -> torch.Tensor:
        return self._pieces.allocate(max(nbytes, 1))[:nbytes]

    stream = SimpleNamespace(query=lambda: True, cuda_stream=0)
    patches: list[tuple[Any, str, Any]] = [
        (IpcMemory, "empty", empty),
        (peer_copy_cuda, "IpcMemory", lambda device, hooks: IpcMemory(GPU, hooks)),
        (peer_copy_cuda, "GpuShards", lambda device, *about: GpuShards(GPU, *about)),
        (torch.cuda, "current_stream", lambda device: stream),
        (torch.cuda, "synchronize", lambda device: driver.idle()),
        (CudaPeerBackend, "drain", lambda self: driver.idle()),
    ]
    for of, name, new in patches:
        setattr(of, name, new)
    communicator = Communicator.instance()
    communicator._peers["cpu", 0] = CudaPeerBackend(communicator._control, CPU)
    return driver


def turns(driver: Driver) -> None:
    """Growing programs, each dropped after a few runs, free their memory."""
    for k in range(30):
        Exchange(1 + k).run(3)
        gc.collect()
        assert driver.nbytes <= 5 * (k + 4) << 20, f"{k}: {driver.nbytes >> 20} MB"
        assert len(driver.elsewhere) <= 6
    for _ in range(5):
        Exchange(1).run()
        gc.collect()
    assert driver.nbytes <= 16 << 20, driver.nbytes
    assert driver.log.count("free") > 20 and driver.log.count("unmap") > 20


def alone(driver: Driver) -> None:
    """One rank drops its programs, and the other keeps them."""
    kept = [Exchange(40), Exchange(3)]
    for _ in range(6):
        if kept[0].rank == 0:
            kept.clear()
            gc.collect()
            kept = [Exchange(40), Exchange(3)]
        for one in kept:
            one.run(4)
        Exchange(2).run()
    assert driver.nbytes <= 200 << 20, driver.nbytes


def ahead(driver: Driver) -> None:
    """A rank sends and drops memory before its peer has mapped it."""
    here = Communicator.instance()
    peers, me, team = here.peers_for(CPU), here.rank(), (0, 1)
    peers.connect(team)
    here.begin_run(team)
    driver.is_late = True
    if me == 0:
        x = peers.lasting(3 << 20).fill_(7)
        peers.batch([Transfer("send", x, 1)], team=team).wait()
        del x
        for _ in range(4):
            peers.release()
            peers.tidy()
    here.barrier()
    if me == 1:
        found = torch.zeros(3 << 20, dtype=torch.uint8)
        peers.recv(found, peer=0, team=team).wait()
        assert found.unique().tolist() == [7]
    for _ in range(4):
        here.barrier()
        peers.release()
        peers.tidy()
    assert driver.log.count("free") == (me == 0) and driver.log.count("unmap") == (me == 1)


def views(driver: Driver) -> None:
    """Shards are mapped side by side, and unmapped when their program is dropped."""
    ranks = Communicator.instance().size()
    for k in range(4):
        run_here(program_of(ranks, ROWS * (1 + k)))
        gc.collect()
    assert len(driver.reserved) <= 4, "the last program's, and what the one before has left"
    for rows in (ROWS + 1, 4):
        with pytest.raises(Exception, match=f"units of {UNIT} bytes") as error:
            run_here(program_of(ranks, rows))
        assert "SymmetricContiguousView" in str(error.value)
    driver.lacks = "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
    backend: Any = Communicator.instance().peers_for(CPU)
    backend._shards = None
    with pytest.raises(Exception, match=rf"{driver.lacks} is 0.*Allgather"):
        run_here(program_of(ranks, ROWS))


def main() -> None:
    driver = gpu_of_this_rank()
    # Later collections then look at the programs alone, not at all that the imports made.
    gc.freeze()
    kinds = {"turns": turns, "alone": alone, "ahead": ahead, "views": views}
    kinds[sys.argv[1]](driver)
    Communicator.instance().barrier()
    print(f"ok rank {Communicator.instance().rank()}", flush=True)


if __name__ == "__main__":
    main()
