"""Runs that graphs repeat, on a stand-in for CUDA graphs; tests/gpu/test_graphs.py has them."""

from __future__ import annotations

import pytest
import torch

from fuser import FusionDefinition
from fuser.runtime.graphs import MAKERS
from hostir import capture
from tests.hostir.graph_cases import CASES, ENOUGH, IN_PLACE, check, defined, repeat
from tests.hostir.stand_in_graphs import CpuGraphs

CPU = torch.device("cpu")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CpuGraphs]:
    """What captured, one per stream and arena."""
    found: list[CpuGraphs] = []

    def make(device: torch.device) -> CpuGraphs:
        found.append(CpuGraphs(device))
        return found[-1]

    monkeypatch.setitem(MAKERS, "cpu", make)
    monkeypatch.setattr(capture, "MIN_STEPS", 1)
    return found


def launches(made: list[CpuGraphs]) -> int:
    return sum(graph.launches for maker in made for graph in maker.made)


@pytest.mark.parametrize("name", CASES)
def test_runs_are_repeated(name: str, made: list[CpuGraphs]) -> None:
    fd = defined(CASES[name])
    lines = repeat(fd, CASES[name], CPU)
    assert any(line.startswith("captured: ") for line in lines), lines
    # More where malloc gives out addresses again; on a GPU it does.
    assert launches(made) >= 1, lines


def test_an_update_in_place_is_repeated(made: list[CpuGraphs]) -> None:
    fd = defined(IN_PLACE)
    x, w = IN_PLACE.make(CPU)
    for _ in range(60):
        y = x.double() @ w.double().T @ w.double().T
        want = (y @ w.double().T).tanh() + x.double()
        (got,) = fd.execute([x, w])
        torch.testing.assert_close(got.double(), y, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(x.double(), want, rtol=1e-3, atol=1e-3)
        x.div_(x.abs().max())
        del got  # so that the next run finds this place again
    assert launches(made) >= 1


def test_kernels_find_tensors_in_other_places(made: list[CpuGraphs]) -> None:
    """A program of kernels alone has one graph, whatever its tensors' addresses."""
    case = CASES["kernels"]
    fd = defined(case)
    kept: list[object] = []
    for _ in range(30):
        inputs = case.make(CPU)
        outputs = fd.execute(inputs)
        check(case, inputs, outputs)
        kept += [inputs, outputs]
    assert sum(len(maker.made) for maker in made) == 1
    assert launches(made) == 30 - capture.RUNS_BEFORE


def test_shapes_that_come_once_are_not_captured(made: list[CpuGraphs]) -> None:
    fd = defined(CASES["kernels"])
    for rows in range(2, 30):
        inputs = [torch.randn(rows, 8), torch.randn(rows, 8)]
        check(CASES["kernels"], inputs, fd.execute(inputs))
    assert not made
    assert all("has not run often enough" in line for line in fd.cuda_graphs())


def test_addresses_that_never_come_back_end_the_search(
    made: list[CpuGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "MAX_MISSES", 12)
    case = CASES["layers"]
    fd = defined(case)
    kept: list[object] = []
    for _ in range(30):
        inputs = case.make(CPU)
        outputs = fd.execute(inputs)
        check(case, inputs, outputs)
        kept += [inputs, outputs]
    assert sum(len(maker.made) for maker in made) == 1
    assert "lie elsewhere in each run" in fd.cuda_graphs()[0]


@pytest.mark.parametrize(
    ("options", "why"),
    [((), "the device cpu has no graphs"), (("cuda_graphs",), "FUSER_DISABLE=cuda_graphs")],
)
def test_the_reason_is_told(options: tuple[str, ...], why: str) -> None:
    case = CASES["layers"]
    fd = defined(case)
    inputs = case.make(CPU)
    assert fd.cuda_graphs() == []
    for _ in range(ENOUGH):
        fd.execute(inputs, _disable_options=options)
    assert fd.cuda_graphs() == [f"not captured: {why}"]


def test_a_refused_capture_runs_step_by_step(
    made: list[CpuGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: CpuGraphs, actions: object, slots: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(CpuGraphs, "capture", refuse)
    case = CASES["layers"]
    fd = defined(case)
    inputs = case.make(CPU)
    for _ in range(ENOUGH):
        check(case, inputs, fd.execute(inputs))
    (line,) = fd.cuda_graphs()
    assert line == ("not captured: RuntimeError: operation not permitted when stream is capturing")


def test_few_steps_are_not_captured(made: list[CpuGraphs], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(MAKERS, "cpu", CpuGraphs)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        fd.add_output(fd.ops.add(x, x))
    for _ in range(ENOUGH):
        fd.execute([torch.ones(3)])
    assert fd.cuda_graphs() == ["not captured: 1 step(s) gain nothing by it"]
