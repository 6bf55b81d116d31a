"""Programs are made, run and dropped in turn; the memory that ranks map stays bounded.

mpirun -np 2 python tests/support/rank_programs/dropped_programs.py KIND
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch

import multidevice
from fuser import ParallelType
from fuser.ir.types import MemoryType
from hostir import (
    RANK,
    Allocate,
    EndCoalescing,
    HostIrContainer,
    HostIrEvaluator,
    P2PCommunication,
    StartCoalescing,
    Wait,
)
from hostir.passes.deallocation import insert_deallocate
from multidevice.job.communicator import Communicator
from tests.support.rank_programs.symmetric_views import double, program_of, run_here

MB = 1 << 20


def mapped_nbytes() -> int:
    """Returns how many bytes of its own and its peers' shared memory this process has mapped."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:fuser-peer" in line:
            begin, end = line.split()[0].split("-")
            total += int(end, 16) - int(begin, 16)
    return total


def exchange_of(ranks: int, rows: int) -> HostIrContainer:
    """A program in which each rank doubles its rows of 1 MB and gets those of the next rank."""
    mesh, program = multidevice.DeviceMesh(range(ranks)), HostIrContainer()
    with program:
        x, t, y = (program.tensor([ranks, rows, MB // 4], mesh=mesh) for _ in range(3))
        x = program.input([ranks, rows, MB // 4], mesh=mesh)
        t.memory = MemoryType.symmetric
        for tv in (x, t, y):
            tv.axis(0).parallelize(ParallelType.mesh_x)
        program.append(Allocate(t), Allocate(y), double(t, x))
        to, source = (RANK + ranks - 1) % ranks, (RANK + 1) % ranks
        program.append(
            StartCoalescing(),
            P2PCommunication(t, to, number=0, type="send", backend="CUDA"),
            P2PCommunication(y, source, number=1, type="recv", backend="CUDA"),
            EndCoalescing(2),
            Wait(2),
        )
        program.add_output(y)
    return insert_deallocate(program)


def used_nbytes(comm: Communicator) -> int:
    """Returns the GPU memory in use once all ranks have freed what they can."""
    comm.barrier()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    comm.barrier()
    free, total = torch.cuda.mem_get_info()
    return total - free


class Exchange:
    """A program that can run, with its expected result."""

    def __init__(self, rows: int, device: torch.device | str = "cpu") -> None:
        self.device = device
        here = Communicator.instance()
        self.rows, self.rank, self.ranks = rows, here.rank(), here.size()
        self.evaluator = HostIrEvaluator(exchange_of(self.ranks, rows))

    def run(self, times: int = 2) -> None:
        for k in range(times):
            value = float(10 * k + self.rank)
            x = torch.full([1, self.rows, MB // 4], value, device=self.device)
            (out,) = self.evaluator.run([x])
            assert (out == 2.0 * (10 * k + (self.rank + 1) % self.ranks)).all()


def turns() -> None:
    """Runs 50 programs, the first ones large, and checks that dropped ones free their memory."""
    most, found = 0, list[int]()
    for k in range(50):
        one = Exchange(66 if k < 3 else 1 + k % 7)
        one.run()
        del one
        gc.collect()
        most = max(most, mapped_nbytes())
        found.append(mapped_nbytes())
    # Pieces of 128 MB, two of this rank (the last run's, and this one's) and two of its peer; and
    # later one of 64 MB of each.
    assert most <= 4 * 128 * MB, found
    assert max(found[10:]) <= 2 * 64 * MB, found
    print("mapped", found[0] // MB, found[-1] // MB)


def alone() -> None:
    """One rank drops its programs and the other keeps them; old and new programs still run on
    both.
    """
    kept = [Exchange(66), Exchange(3)]
    for one in kept:
        one.run()
    if kept[0].rank == 0:
        kept.clear()
        gc.collect()
        kept = [Exchange(66), Exchange(3)]
    for _ in range(3):
        Exchange(2).run()
        gc.collect()
        for one in kept:
            one.run(3)


def views() -> None:
    """Views of the shards of all ranks are unmapped, too."""
    ranks = Communicator.instance().size()
    for k in range(20):
        run_here(program_of(ranks, 4 * (1 + k)))
        gc.collect()
    Exchange(1).run()
    # Its own piece, the peer's, and no rows.
    assert mapped_nbytes() <= 2 * 64 * MB, mapped_nbytes()


def main() -> None:
    # Later collections then look at the programs alone, not at all that the imports made.
    gc.freeze()
    {"turns": turns, "alone": alone, "views": views}[sys.argv[1]]()
    print(f"ok rank {Communicator.instance().rank()}", flush=True)


if __name__ == "__main__":
    main()
