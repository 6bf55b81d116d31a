"""Tests graphs that the compiled runner launches, with a stand-in for CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuser.runtime import compiled_runner
from fuser.support.errors import KernelError
from hostir.runtime import cuda_graphs, plan, steps
from tests.support.cuda_graph_cases import CASES, Inputs, check, defined, repeat
from tests.support.limits import HANG_S
from tests.support.repeated_calls import (
    runs,
    steady,
)
from tests.support.stand_in_graphs import CpuGraphs, Recycled, stand_in

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _runner() -> None:
    assert compiled_runner.wait(HANG_S) is not None, compiled_runner.why_not()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CpuGraphs]:
    """Returns the graph makers that have captured, one per stream and arena."""
    monkeypatch.setattr(cuda_graphs, "MIN_STEPS", 1)
    return stand_in(monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_graphs_equal_torch(name: str, made: list[CpuGraphs]) -> None:
    case = CASES[name]
    fd = defined(case)
    lines = repeat(fd, case, CPU, runs=80)
    assert any(line.startswith("captured: ") for line in lines), lines
    inputs: Inputs = case.make(CPU)
    for _ in range(60):
        check(case, inputs, fd.execute(inputs))
    lines = fd.compiled_runner()
    if name != "numbers":
        assert any(line.startswith("repeated: ") for line in lines), lines
    assert all(graph.launches for maker in made for graph in maker.made)


def test_graphs_are_told_where_tensors_lie(made: list[CpuGraphs]) -> None:
    fd = defined(CASES["kernels"])
    inputs = CASES["kernels"].make(CPU)
    for _ in range(40):
        fd.execute(inputs)
    steady(fd, inputs)
    before = runs(fd)
    held: list[torch.Tensor] = []
    for k in range(40):
        inputs = CASES["kernels"].make(CPU)
        got = fd.execute(inputs)
        check(CASES["kernels"], inputs, got)
        held = [*held[-(k % 5) :], *got]
    assert runs(fd) == before + 40
    (maker,) = made
    assert len(maker.made) == 1


def _captures_per_batch(made: list[CpuGraphs]) -> list[int]:
    """Runs six layers with different weights, one after the other, in every batch."""
    case, captured = CASES["layers"], list[int]()
    fd = defined(case)
    weights = [[torch.randn(12, 16) / 4, torch.randn(16, 12) / 4] for _ in range(6)]
    first = torch.empty(8, 16)  # new ones would lie anywhere
    for _ in range(12):
        x = first.copy_(torch.randn(8, 16))
        for w, v in weights:
            wanted = case.meaning(*(t.double() for t in (x, w, v)))
            x = fd.execute([x, w, v])[0]
            torch.testing.assert_close(x.double(), wanted[0], rtol=1e-3, atol=1e-3)
        captured.append(sum(len(maker.made) for maker in made))
    return captured


def test_as_soon_as_without_the_runner(
    made: list[CpuGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner keeps no tensor and allocates none twice, so addresses recur as without it."""
    with_it = _captures_per_batch(made)
    made.clear()
    monkeypatch.setattr(plan, "_POOLS", {})
    monkeypatch.setattr(steps, "empty_on", Recycled().empty_on)
    monkeypatch.setenv("FUSER_DISABLE", "compiled_runner")
    assert with_it == _captures_per_batch(made)


class _Raw:
    """A graph that C launches by address; its C functions call Python."""

    def __init__(self, graph: Any) -> None:
        import ctypes

        self.graph, self.log = graph, list[str]()
        self.status = {"launch": 0, "update": 0}
        number = ctypes.c_void_p
        self._launch = ctypes.CFUNCTYPE(ctypes.c_int, number, number)(self._by_launch)
        self._set = ctypes.CFUNCTYPE(ctypes.c_int, number, number, number)(self._by_update)
        self._nodes: list[tuple[Any, Any]] = []
        entries = [ctypes.cast(f, number).value for f in (self._launch, self._set)]
        self.raw = (*entries, 77)

    def raw_node(self, node: Any, call: Any) -> tuple[int, int]:
        self._nodes.append((node, call))
        return len(self._nodes), 4096

    def _by_launch(self, handle: int, stream: int) -> int:
        self.log.append("launch")
        if not self.status["launch"]:
            assert handle == 77
            self.graph.launch(stream or 0)
        return self.status["launch"]

    def _by_update(self, handle: int, node: int, params: int) -> int:
        self.log.append("update")
        if not self.status["update"]:
            assert (handle, params) == (77, 4096)
            self.graph.update(*self._nodes[node - 1])
        return self.status["update"]

    def launch(self, stream: int) -> None:
        self.log.append("launch by Python")
        self.graph.launch(stream)

    def update(self, node: Any, call: Any) -> None:
        self.log.append("update by Python")
        self.graph.update(node, call)


def test_graphs_by_address(made: list[CpuGraphs], monkeypatch: pytest.MonkeyPatch) -> None:
    raws: list[_Raw] = []
    original = CpuGraphs.capture

    def captured(self: CpuGraphs, actions: Any, slots: Any) -> Any:
        raws.append(_Raw(original(self, actions, slots)))
        return raws[-1]

    monkeypatch.setattr(CpuGraphs, "capture", captured)
    case = CASES["kernels"]
    fd, inputs = defined(case), case.make(CPU)
    for _ in range(40):
        fd.execute(inputs)
    steady(fd, inputs)
    (raw,) = raws
    kernels = fd.fec.statistics()["kernels"]
    for launch, update in ((0, 0), (3, 0), (0, 3)):
        raw.status.update(launch=launch, update=update)
        raw.log.clear()
        inputs, before = case.make(CPU), runs(fd)
        check(case, inputs, fd.execute(inputs))
        assert runs(fd) == before + 1
        assert raw.log.count("update") == kernels and raw.log.count("launch") == 1
        assert raw.log.count("update by Python") == (kernels if update else 0)
        assert raw.log.count("launch by Python") == (1 if launch else 0)
    raw.status["launch"] = 3
    monkeypatch.setattr(raw, "launch", _refuse)
    with pytest.raises(KernelError, match="refused"):
        fd.execute(inputs)
    raw.status["launch"] = 0
    check(case, inputs, fd.execute(inputs))


def _refuse(stream: int) -> None:
    raise KernelError(f"the driver refused {stream}")
