"""A signal kills the last rank or the whole job; the job must print which rank it was.

    mpirun -np 2 python tests/support/rank_programs/killed.py KIND

Each rank prints "ready" when the ranks are connected, and when it can receive signals.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import torch

from fuser import FusionDefinition, multidevice
from multidevice import Communicator


def program() -> Callable[[], object]:
    """Returns a function that calls a program on all ranks."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 8])
        y = fd.ops.relu(x)
        fd.add_output(y)
        for tv in (x, y):
            tv.set_device_mesh(multidevice.DeviceMesh(range(Communicator.instance().size())))
    return lambda: fd.execute([torch.randn(4, 8)])


def kill_self() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still here")


def compute() -> NoReturn:
    x = torch.ones(64, 64)
    while True:
        x = torch.tanh(x @ x)


def sleep() -> NoReturn:
    while True:
        time.sleep(1000)


def wait_until_posted(comm: Communicator, rank: int) -> None:
    """Returns once a rank has posted in the wait-for graph that it waits."""
    wait_graph = comm._control.wait_graph  # pyright: ignore[reportPrivateUsage]
    assert wait_graph is not None
    while (found := wait_graph._peers().get(rank)) is None or found.wait is None:  # pyright: ignore[reportPrivateUsage]
        time.sleep(0.01)


def kill_waiting(comm: Communicator, pid: int, wait: Callable[[], object]) -> None:
    """The last rank waits for the first, which then kills it."""
    if comm.rank() == comm.size() - 1:
        wait()
    wait_until_posted(comm, comm.size() - 1)
    os.kill(pid, signal.SIGKILL)
    sleep()


def waited_for(comm: Communicator, wait: Callable[[], object]) -> None:
    """The other ranks wait for the last rank, which then kills itself."""
    if comm.rank() < comm.size() - 1:
        wait()
    wait_until_posted(comm, 0)
    kill_self()


def outlive_interrupts() -> None:
    signal.signal(signal.SIGINT, lambda *_: print("ready for more", flush=True))
    print("ready for interrupts", flush=True)
    sleep()


def main(kind: str) -> None:
    comm = Communicator.instance()
    pids = [int(pid) for pid in comm.exchange(str(os.getpid()).encode())]
    is_last = comm.rank() == comm.size() - 1
    print(f"ready: rank {comm.rank()} is process {os.getpid()}", flush=True)
    call = program()
    everyone = tuple(range(comm.size()))
    x = torch.ones(4)

    def allreduce() -> None:
        comm.backend_for("cpu").allreduce(x, x, op="SUM", team=everyone).wait()

    if kind in ("calls", "normal"):
        for _ in range(3):
            call()
    if kind in ("computing", "sleeping", "calls"):
        (kill_self if is_last else compute if kind == "computing" else sleep)()
    if kind == "collective":
        waited_for(comm, allreduce)
    if kind == "first run":
        waited_for(comm, call)
    if kind == "waiting":
        kill_waiting(comm, pids[-1], allreduce)
    if kind == "waiting in the first run":
        kill_waiting(comm, pids[-1], call)
    if kind == "crash":
        (lambda: ctypes.string_at(0))() if is_last else comm.barrier()
    if kind == "exception":
        if is_last:
            raise ValueError("planted failure")
        comm.barrier()
    if kind == "os_exit":
        os._exit(3) if is_last else sleep()
    if kind == "idle":
        print("ready for signals", flush=True)
        sleep()
    if kind == "stubborn":
        outlive_interrupts()


if __name__ == "__main__":
    main(sys.argv[1])
