"""Two threads of a rank call programs at once: all ranks refuse these calls, and no others.

mpirun -np 2 python tests/support/rank_programs/concurrent_threads.py
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fuser import DataType, FusionDefinition, ParallelType, multidevice
from fuser.support.errors import UnsupportedError
from multidevice.coordination.bounded_wait import poll_until

comm = multidevice.Communicator.instance()
rank, control = comm.rank(), comm._control
with FusionDefinition() as fd:
    x = fd.define_tensor([-1, 8], contiguity=True, dtype=DataType.Float)
    x.set_device_mesh(multidevice.DeviceMesh((0, 1)))
    x.outer_split(0, 2)
    x.axis(0).parallelize(ParallelType.mesh_x)
    fd.add_output(fd.ops.sum(x, [0]))


def wait(done: Callable[[], object]) -> None:
    poll_until(lambda: bool(done()), what=lambda: "the other", look=lambda _: None, rank=rank)


def call(inputs: Any) -> str:
    """Calls the program with one row of ones on each rank; returns "right", or how it failed."""
    try:
        (out,) = fd.execute(inputs)
    except UnsupportedError as error:
        return str(error)
    return "right" if torch.equal(out, torch.full((8,), 2.0)) else f"wrong: {out}"


ROW = [torch.ones(1, 8)]


def at_once(first: str, second: str, inputs: Any = ROW) -> dict[str, str]:
    """Makes calls in two threads of these names; the first call stays open until the second is
    made.
    """
    found: dict[str, str] = {}

    def act(name: str, mine: Any) -> None:
        found[name] = call(mine)

    threads = [threading.Thread(target=act, args=(first, inputs), name=first)]
    threads[0].start()
    wait(is_inside.is_set)
    threads.append(threading.Thread(target=act, args=(second, ROW), name=second))
    threads[1].start()
    for thread in threads:
        thread.join()
    is_inside.clear()
    return found


def held_open() -> Iterator[torch.Tensor]:
    """Yields the input once another thread waits to call."""
    is_inside.set()
    wait(lambda: comm.turns.latecomer)
    yield from ROW


is_inside = threading.Event()
pages: list[str] = []
page = control.page


def held_page(nbytes: int, team: tuple[int, ...]) -> memoryview | None:
    """Returns a team's shared memory once the other thread wants it too, or waits for this
    call.
    """
    pages.append(threading.current_thread().name)
    is_inside.set()
    wait(lambda: comm.turns.latecomer or len(pages) > 1)
    return page(nbytes, team)


# The first use of the team.
control.page = held_page
found = at_once("one", "other")
control.page = page
assert pages == ["one"], pages
assert found["one"].startswith("two threads of one rank, one and other,"), found
assert "(and one and other on rank 1)" in found["one"] or rank, found
assert found["other"].startswith("two threads of one rank, other and another one,"), found
assert call(ROW) == "right"

# Each rank refuses another thread first.
names = ["one", "other"]
found = at_once(names[rank], names[1 - rank], held_open())
mine, peers = (f"{names[r]} and {names[1 - r]}" for r in (rank, 1 - rank))
start = f"two threads of one rank, {mine}, called programs with a mesh at the same time"
assert found[names[rank]].startswith(f"{start} (and {peers} on rank {1 - rank})"), found
assert call(ROW) == "right"

# Only one of the ranks has two threads.
if rank == 0:
    found = at_once("one", "other", held_open())
    assert all(text.startswith("two threads of one rank") for text in found.values()), found
else:
    for who in ("one and other", "other and another one"):
        text = call(ROW)
        assert f"{who} on rank 0, called" in text and "matches the one of MainThread" in text, text
for _ in range(3):
    assert call(ROW) == "right"
print(f"ok rank {rank}", flush=True)
