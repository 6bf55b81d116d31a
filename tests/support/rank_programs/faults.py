"""One rank misbehaves while the others wait; the job must end soon and name the rank.

    mpirun -np 2 python tests/support/rank_programs/faults.py KIND [FILE]

Each kind prints what it does; the test that starts it measures the time from the line "go".
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from fuser.support.errors import CommunicationTimeout, PeerError
from multidevice.coordination.launcher import read_launch
from multidevice.job.communicator import Communicator


def bad_rank(kind: str) -> None:
    """Fails in the given way; the last rank calls this instead of the second collective."""
    if kind == "exception":
        raise ValueError("planted failure")
    if kind == "collected":
        ours = sys.excepthook

        def collecting(kind: Any, error: Any, trace: Any) -> None:
            """Writes the previous hook's output after that returns, as torch.distributed's hook
            does.
            """
            before, sys.stderr = sys.stderr, io.StringIO()
            ours(kind, error, trace)
            before.write(sys.stderr.getvalue())

        sys.excepthook = collecting
        raise ValueError("planted failure")
    if kind == "thread":

        def fail() -> None:
            raise ValueError("planted failure")

        threading.Thread(target=fail).start()
        while True:
            time.sleep(0.1)
    if kind in ("exit", "exit_unwaited"):
        sys.exit(0)
    if kind in ("exit_code", "exit_code_unwaited"):
        sys.exit(3)
    if kind == "raise_exit":
        raise SystemExit(0)
    if kind in ("os_exit", "kill"):
        # Written to a file, because text printed just before such an end may be lost.
        maps = Path("/proc/self/maps").read_text()
        Path(sys.argv[2]).write_text(" ".join(set(re.findall(r"/dev/shm/mpich\w+", maps))))
        if kind == "os_exit":
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stall":
        # Far beyond the deadline of the others, and the limit of the test.
        time.sleep(1000)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    raise AssertionError(kind)


def limit_waits() -> None:
    """Sets a short timeout once the ranks are connected: start-up may be slow on a busy
    machine.
    """
    os.environ["FUSER_TIMEOUT_S"] = "1"


def wait_until_stopped(pid: int) -> None:
    while "(stopped)" not in Path(f"/proc/{pid}/status").read_text():
        time.sleep(0.01)


def main() -> None:
    """Runs one collective, then makes the last rank fail."""
    kind = sys.argv[1]
    if kind == "import" and read_launch().rank == 1:
        print("go", flush=True)
        import_module("no_such_module")
    comm = Communicator.instance()
    backend = comm.peers_for("cpu") if "peers" in sys.argv[2:] else comm.backend_for("cpu")
    team = tuple(range(comm.size()))
    x = torch.ones(4)
    last = comm.rank() == comm.size() - 1
    backend.allreduce(x, x, op="SUM", team=team).wait()
    if comm.rank() == 0:
        print("go", flush=True)
    if kind == "clean":
        return
    if kind == "caught_exit":
        try:
            sys.exit(3)
        except SystemExit:
            return
    if kind == "late":
        # The root leaves right after its part of a broadcast: no error, though the others come
        # later.
        if not last:
            time.sleep(1.0)
        backend.broadcast(x, root=team[-1], team=team).wait()
        return
    pid = torch.tensor([os.getpid() if last else 0])
    if kind == "stop":
        backend.allreduce(pid, pid, op="SUM", team=team).wait()
    if kind in ("stall", "stop"):
        limit_waits()
    if last:
        bad_rank(kind)
    if kind == "stop":
        wait_until_stopped(int(pid.item()))
        return
    if kind.endswith("_unwaited"):
        while True:
            time.sleep(0.1)
    if kind == "stall":
        try:
            backend.allreduce(x, x, op="SUM", team=team).wait()
        except CommunicationTimeout as error:
            print(f"timeout: {error}", flush=True)
            os._exit(7)
    try:
        if kind == "exit":
            comm.agree(None)
        backend.allreduce(x, x, op="SUM", team=team).wait()
    except PeerError as error:
        print(f"rank {comm.rank()} got PeerError: {error}", flush=True)
        raise


if __name__ == "__main__":
    main()
