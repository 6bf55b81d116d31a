"""Shards of several GPUs mapped side by side, on a stand-in for the driver.

The tests check what is seen, and in which order memory is mapped, unmapped and given back.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fuser.support.errors import CommunicationError, UnsupportedError
from multidevice.transports.memory.cuda_ipc import CudaCalls
from multidevice.transports.memory.cuda_vmm import GpuShards, let_files_be_taken
from multidevice.transports.memory.handles import MemoryLocation, side_by_side
from tests.support.limits import HANG_S
from tests.support.stand_in_driver import CPU, GPU, UNIT, Driver, driver

__all__ = ["driver"]


def shards_on(driver: Driver) -> GpuShards:
    return GpuShards(GPU, CudaCalls(), driver.hooks)


def place_of(shards: GpuShards, tensor: torch.Tensor, rank: int = 0) -> MemoryLocation:
    found = shards.name_of(tensor)
    assert found is not None
    return MemoryLocation(rank, *found)


def test_a_row_copies_nothing(driver: Driver) -> None:
    """A write by one rank is seen through a mapping made earlier; ranks are in the given
    order.
    """
    ranks = [shards_on(driver) for _ in range(3)]
    parts = [s.empty(2 * UNIT, 0).fill_(k) for k, s in enumerate(ranks, 1)]
    places = [place_of(ranks[k], parts[k], k) for k in (2, 0, 1)]
    row = ranks[1].row(places, 2 * UNIT)
    assert row.device == CPU and row.numel() == 6 * UNIT
    assert row.view(3, -1)[:, 0].tolist() == [3, 1, 2]
    parts[0].fill_(7)
    assert row.view(3, -1)[:, -1].tolist() == [3, 7, 2]
    assert ranks[1].row(places, 2 * UNIT) is row, "mapped once"


def test_nothing_is_unmapped_while_it_is_held_or_used(driver: Driver) -> None:
    mine, other = shards_on(driver), shards_on(driver)
    x = mine.empty(UNIT, 0).fill_(1)
    row = other.row([place_of(mine, x)] * 2, UNIT)
    last = row.view(torch.int32)[-3:]
    del row, x
    gc.collect()
    for shards in (mine, other):
        driver.is_busy = True
        shards.tidy()
        assert driver.is_busy, "no program has gone: nothing is waited for"
        shards.release()
        shards.tidy()
    # The owner has given its shard back; what another one sees stays.
    assert len(driver.reserved) == 1 and last.tolist() == [0x01010101] * 3
    del last
    gc.collect()
    driver.is_busy = True
    other.release()
    other.tidy()
    assert not driver.reserved and not driver.mapped


def test_a_shard_is_used_again_on_its_stream(driver: Driver) -> None:
    shards = shards_on(driver)
    names = list[tuple[int, ...]]()
    for stream, nbytes in ((7, 100), (7, UNIT), (8, UNIT), (7, UNIT + 1)):
        x = shards.empty(nbytes, stream)
        assert x.numel() == nbytes
        names.append(place_of(shards, x).name)
        del x
        gc.collect()
    assert names[0] == names[1] and len(set(names)) == 3


def test_other_memory_has_no_place(driver: Driver) -> None:
    shards = shards_on(driver)
    assert shards.name_of(torch.ones(3)) is None
    x = shards.empty(UNIT, 0)
    assert place_of(shards, x[512:]).at == 512


def meeting(shards: GpuShards, tensor: torch.Tensor, others: list[Any]) -> torch.Tensor:
    """Returns the view that rank 0 gets if the other ranks send this information."""

    def exchange(mine: bytes, team: object) -> list[bytes]:
        first = json.loads(mine)
        return [mine, *(json.dumps([*first[:3], *one]).encode() for one in others)]

    control: Any = SimpleNamespace(exchange=exchange)
    return side_by_side(control, shards, tensor, tuple(range(1 + len(others))), "the view")


def test_members_meet(driver: Driver) -> None:
    mine, other = shards_on(driver), shards_on(driver)
    x, y = mine.empty(UNIT, 0).fill_(1), other.empty(UNIT, 0).fill_(2)
    place = place_of(other, y)
    told = ["", place.name, place.at]
    assert meeting(mine, x, [told]).view(2, -1)[:, 5].tolist() == [1, 2]


def test_shards_that_are_no_units_are_refused(driver: Driver) -> None:
    shards = shards_on(driver)
    x = shards.empty(3 * 4096, 0)
    with pytest.raises(UnsupportedError) as error:
        meeting(shards, x, [["", *shards.name_of(x)]])  # type: ignore[misc]
    text = f"units of {UNIT} bytes, but the shard of rank 0 has 12288 bytes: pad the shard"
    assert text in str(error.value) and "the view" in str(error.value)


def test_a_gpu_that_cannot_share_is_refused(driver: Driver) -> None:
    driver.lacks = "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"
    shards = shards_on(driver)
    with pytest.raises(
        UnsupportedError, match=rf"cannot map the memory of rank 0.* \({driver.lacks} is 0\)"
    ):
        meeting(shards, torch.zeros(UNIT), [[shards.why_not, [], 0]])


def test_a_mapping_that_fails_leaves_nothing(driver: Driver) -> None:
    shards = shards_on(driver)
    x = shards.empty(UNIT, 0)
    place = place_of(shards, x)
    before = dict(driver.reserved)
    driver.refuses = "cuMemSetAccess"
    with pytest.raises(UnsupportedError, match=r"ranks 0, 1 .*REFUSED.*Allgather"):
        shards.row([place, MemoryLocation(1, place.name, 0)], UNIT)
    gone = MemoryLocation(1, (2**22 + 1, *place.name[1:]), 0)
    with pytest.raises(CommunicationError, match="rank 1's memory cannot be mapped"):
        shards.row([place, gone], UNIT)
    assert driver.reserved == before and not driver.handles
    driver.refuses = "cuMemCreate"
    text = f"cannot allocate {3 * UNIT} bytes for a shard on cuda:3"
    with pytest.raises(torch.OutOfMemoryError, match=text):
        shards.empty(3 * UNIT, 0)


_TAKES = """
import os, sys
from multidevice.transports.memory.cuda_vmm import take_file
fd = take_file(int(sys.argv[1]), int(sys.argv[2]))
os.pwrite(fd, b"seen", 0)
"""


def test_a_file_is_taken_by_another_process() -> None:
    let_files_be_taken()
    fd = os.memfd_create("one")
    taking = [sys.executable, "-c", _TAKES, str(os.getpid()), str(fd)]
    subprocess.run(taking, check=True, timeout=HANG_S)
    assert os.pread(fd, 9, 0) == b"seen"
    os.close(fd)
