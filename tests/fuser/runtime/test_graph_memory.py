"""Tests memory that is lent to the caller's graphs, with a substitute for the driver."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from fuser.runtime.graph_memory import SMALLEST, STOCK, GraphMemory

_LIBC = ctypes.CDLL(None)


class _Driver:
    """A driver with one graph under capture, which holds user objects until it is destroyed."""

    def __init__(self) -> None:
        self.made: dict[int, int] = {}
        self.held: list[int] = []
        self.graph = 77
        self.refuses = ""
        self.mode = 0

    def _status(self, name: str) -> int:
        return 801 if self.refuses == name else 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        mode._obj.value, self.mode = self.mode, mode._obj.value
        return 0

    def cuUserObjectCreate(self, made: Any, semaphore: Any, post: Any, *rest: Any) -> int:
        del rest
        assert post.value == ctypes.cast(_LIBC.sem_post, ctypes.c_void_p).value
        number = 1000 + len(self.made)
        made._obj.value = number
        self.made[number] = semaphore.value
        return self._status("create")

    def cuStreamGetCaptureInfo_v2(self, stream: Any, *places: Any) -> int:
        del stream
        places[2]._obj.value = self.graph
        return self._status("capture")

    def cuGraphRetainUserObject(self, graph: Any, made: Any, *rest: Any) -> int:
        del rest
        assert graph.value == self.graph
        if status := self._status("retain"):
            return status
        self.held.append(made.value)
        return 0

    def cuUserObjectRelease(self, made: Any, *rest: Any) -> int:
        del rest
        self._post(made.value)
        return 0

    def _post(self, number: int) -> None:
        _LIBC.sem_post(ctypes.c_void_p(self.made[number]))

    def destroy_graph(self) -> None:
        for number in self.held:
            self._post(number)
        self.held.clear()


def _memory() -> tuple[GraphMemory, _Driver]:
    driver = _Driver()
    return GraphMemory(torch.device("cpu"), driver, _LIBC), driver


def _addresses(memory: GraphMemory, nbytes: int, count: int) -> list[int]:
    lent = [memory.lend(nbytes) for _ in range(count)]
    assert all(t is not None and t.numel() == nbytes and not t.any() for t in lent)
    return [t.data_ptr() for t in lent if t is not None]


def test_a_graph_has_its_memory_until_it_is_destroyed() -> None:
    memory, driver = _memory()
    assert memory.lend(100) is None
    memory.make_ready(100)
    first = _addresses(memory, 100, STOCK)
    assert len(set(first)) == STOCK
    assert all(b - a >= SMALLEST for a, b in zip(sorted(first), sorted(first)[1:], strict=False))
    # No piece is left, and there never was one of another size.
    assert memory.lend(100) is None
    assert memory.lend(SMALLEST + 1) is None
    driver.destroy_graph()
    assert sorted(_addresses(memory, SMALLEST, STOCK)) == sorted(first)


def test_what_is_lent_is_replaced() -> None:
    memory, driver = _memory()
    memory.make_ready(5000)
    first = _addresses(memory, 5000, STOCK)
    memory.make_ready(8000)
    assert driver.mode == 0  # of captures, as it was
    assert not set(first) & set(_addresses(memory, 8192, STOCK))


def test_a_driver_that_refuses_lends_nothing_and_loses_nothing() -> None:
    memory, driver = _memory()
    memory.make_ready(64)
    for refusal in ("create", "capture", "retain"):
        driver.refuses = refusal
        assert memory.lend(64) is None
    driver.refuses, driver.graph = "", 0
    assert memory.lend(64) is None
    driver.graph = 5
    assert len(set(_addresses(memory, 64, STOCK))) == STOCK
    assert memory.lend(64) is None
