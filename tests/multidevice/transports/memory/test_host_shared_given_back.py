"""Memory that peers map is given back when the programs that used it have been dropped."""

from __future__ import annotations

import gc
import os

import pytest
import torch

import multidevice
from multidevice.job.communicator import Communicator
from multidevice.transports.memory import host_shared
from multidevice.transports.memory.host_shared import SharedMemory
from multidevice.transports.simulated import SimulatedPeers
from tests.support import mpi_abort
from tests.support.jobs import needs_mpi, run_job
from tests.support.rank_programs.dropped_programs import MB, Exchange
from tests.support.rank_programs.symmetric_views import program_of, run_here

alone = pytest.mark.skipif(mpi_abort.world_size() > 1, reason="starts jobs of its own")


@alone
@needs_mpi
@pytest.mark.parametrize("kind", ["turns", "alone", "views"])
def test_programs_made_and_dropped_in_turn_under_mpirun(kind: str) -> None:
    job = run_job("mpirun", 2, "dropped_programs.py", kind)
    assert job.code == 0 and job.text.count("ok rank") == 2, job.text


def open_files() -> int:
    return sum("fuser-peer" in os.readlink(f"/proc/self/fd/{fd}") for fd in _numbers())


def _numbers() -> list[str]:
    found = os.listdir("/proc/self/fd")
    return [fd for fd in found if os.path.islink(f"/proc/self/fd/{fd}")]


def test_simulated_ranks_leave_no_files_open() -> None:
    def body() -> None:
        Exchange(1).run()
        run_here(program_of(2))

    gc.collect()
    before = open_files()
    for _ in range(3):
        with multidevice.simulate(2) as world:
            world.run(body)
    gc.collect()
    assert open_files() == before


def test_what_somebody_holds_stays_and_the_rest_goes() -> None:
    memory = SharedMemory()
    held, other = memory.empty(1000).fill_(3), memory.empty(70 << 20)
    place, gone = memory.name_of(held), memory.name_of(other)
    memory.release()
    del other
    gc.collect()
    assert place is not None and gone is not None
    reader = SharedMemory()
    assert reader.mapped(gone[0], 0).numel() == gone[0][2]
    memory.tidy()
    assert memory.name_of(held) is not None and held.unique().tolist() == [3]
    with pytest.raises(FileNotFoundError):
        os.stat(f"/proc/{gone[0][0]}/fd/{gone[0][1]}")
    again = memory.name_of(held)
    assert again is not None
    # The next name of a peer tells that it has closed something.
    assert reader.mapped(again[0], 0)[again[1]] == 3
    assert again[0] in reader._mapped and gone[0] not in reader._mapped  # pyright: ignore[reportPrivateUsage]


def test_nothing_goes_while_no_program_has_gone() -> None:
    """Memory that a program uses in each run is taken from the system once."""
    memory, places = SharedMemory(), set[object]()
    for _ in range(5):
        place = memory.name_of(memory.empty(1 << 20))
        gc.collect()
        memory.tidy()
        places.add(place)
    assert len(places) == 1


def test_a_file_under_the_number_of_another_is_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file is closed and the system gives its number to the next one; a reader must map
    anew.
    """
    monkeypatch.setattr(host_shared, "_CHUNK_NBYTES", 1 << 16)
    memory, reader = SharedMemory(), SharedMemory()
    values: list[float] = []
    names: set[tuple[int, ...]] = set()
    for k in range(4):
        x = memory.empty(256).view(torch.float32).fill_(float(k))
        name = memory.name_of(x)
        assert name is not None
        names.add(name[0][:3])
        values.append(reader.mapped(name[0], 0).view(torch.float32)[name[1] // 4].item())
        del x
        gc.collect()
        memory.release()
        memory.tidy()
    assert values == [0.0, 1.0, 2.0, 3.0]
    assert len(names) == 1, "the system gave other numbers: nothing was shown"


def test_a_steady_run_takes_no_memory_for_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors to send lie in the arena, which peers can map, at the same place in each run."""
    made = list[int]()
    before = SimulatedPeers.empty

    def empty(self: SimulatedPeers, nbytes: int) -> torch.Tensor:
        made.append(nbytes)
        return before(self, nbytes)

    monkeypatch.setattr(SimulatedPeers, "empty", empty)

    def body() -> list[int]:
        one = Exchange(1)
        one.run(3)
        (plan,) = one.evaluator.plans()
        assert [b.nbytes for b in plan.blocks] == [MB]
        Communicator.instance().barrier()
        count = len(made)
        one.run(3)
        return made[count:]

    with multidevice.simulate(2) as world:
        assert world.run(body) == [[], []]
