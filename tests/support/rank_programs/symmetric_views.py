"""Every rank writes its shard, and reads the shards of all ranks as one tensor, without a copy.

    mpirun -np 2 python tests/support/rank_programs/symmetric_views.py KIND [PROGRAM]

A KIND other than `right` names a mistake that the last rank makes.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

import multidevice
from fuser import ParallelType
from fuser.ir.fusion import TensorView
from fuser.ir.ops import nodes
from fuser.ir.types import MemoryType
from hostir import (
    Allocate,
    HostIrContainer,
    HostIrEvaluator,
    SymmetricContiguousView,
    parse,
)
from hostir.passes.deallocation import insert_deallocate
from multidevice.job.communicator import Communicator

RUNS = 5


def double(out: TensorView, inp: TensorView) -> nodes.BinaryOp:
    return nodes.BinaryOp(out, inp, inp, kind="add")


def program_of(ranks: int, rows: int = 4) -> HostIrContainer:
    """A program y = 2 * (all shards of 2 x), where a shard of x is [1, rows, 256]."""
    mesh = multidevice.DeviceMesh(range(ranks))
    program = HostIrContainer()
    with program:
        x = program.input([ranks, rows, 256], mesh=mesh)
        t = program.tensor([ranks, rows, 256], mesh=mesh, memory=MemoryType.symmetric)
        view, y = (program.tensor([ranks, rows, 256], mesh=mesh) for _ in range(2))
        for spread in (x, t):
            spread.axis(0).parallelize(ParallelType.mesh_x)
        program.append(Allocate(t), double(t, x), SymmetricContiguousView(view, t))
        program.append(Allocate(y), double(y, view))
        program.add_output(y)
    return insert_deallocate(program)


def run_here(
    program: HostIrContainer, runs: int = RUNS, device: torch.device | str = "cpu"
) -> None:
    """Runs on fresh data and compares with torch, on this rank.

    Repetitions do not agree with the other ranks first, so that this rank runs ahead of slower ones
    as far as the program allows.
    """
    x, rank = program.inputs[0], Communicator.instance().rank()
    assert isinstance(x, TensorView)
    evaluator = HostIrEvaluator(program)
    shape = [int(str(n)) for n in x.shape()]
    for k in range(runs):
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(k))
        shard = multidevice.shard_tensor(whole, x).to(device)
        run = evaluator.evaluate if k == runs - 1 else evaluator.run_as_agreed
        (out,) = run([shard])
        assert torch.equal(out.cpu(), 4 * whole), f"rank {rank}, run {k}"


def main() -> None:
    kind, communicator = sys.argv[1], Communicator.instance()
    rank, size = communicator.rank(), communicator.size()
    is_last = rank == size - 1
    rows = {"uneven": 8 if is_last else 4, "no_page": 3}.get(kind, 4)
    program = program_of(size, rows)
    if len(sys.argv) > 2:
        program = parse(Path(sys.argv[2]).read_text())
    run_here(program, 2)
    communicator.barrier()
    print("go", flush=True)
    if is_last and kind == "leaves":
        sys.exit(0)
    if kind == "stops":
        # Not before: to connect and to compile may take long on a busy machine.
        os.environ["FUSER_TIMEOUT_S"] = "1"
    if is_last and kind == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    run_here(program)
    print(f"ok rank {rank}", flush=True)


if __name__ == "__main__":
    main()
