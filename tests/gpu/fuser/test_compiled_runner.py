"""Calls that the compiled runner makes on GPUs, by kernel launches and by graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuser import FusionDefinition
from fuser.runtime import compiled_runner
from tests.support.cuda_graph_cases import CASES, check, defined, repeat

CUDA = torch.device("cuda")


@pytest.fixture(scope="module", autouse=True)
def _runner() -> None:
    assert compiled_runner.wait(100.0) is not None, compiled_runner.why_not()


def _add() -> FusionDefinition:
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
        fd.add_output(fd.ops.add(x, y))
    return fd


def _runs(fd: FusionDefinition) -> int:
    return sum(call.steady.runs for call in fd.fec._by_signature.values() if call.steady)


def _steady(fd: FusionDefinition, inputs: Any) -> None:
    for _ in range(100):
        fd.execute(inputs)
    before = _runs(fd)
    fd.execute(inputs)
    assert _runs(fd) == before + 1, fd.compiled_runner()


@pytest.mark.parametrize("name", CASES)
def test_equals_torch(name: str) -> None:
    case = CASES[name]
    fd = defined(case)
    repeat(fd, case, CUDA, runs=150)
    inputs = case.make(CUDA)
    if name == "numbers":
        return
    _steady(fd, inputs)
    before, held = _runs(fd), list[torch.Tensor]()
    for k in range(60):
        inputs = case.make(CUDA) if name == "kernels" else inputs
        outputs = fd.execute(inputs)
        check(case, inputs, outputs)
        held = [*held[-(k % 3) :], *outputs]
    assert _runs(fd) > before + 10, fd.compiled_runner()


@pytest.mark.parametrize("disabled", ["", "cuda_graphs"])
def test_streams_and_captures_are_told_apart(
    disabled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSER_DISABLE", disabled)
    fd, inputs = _add(), [torch.randn(64, 64, device=CUDA) for _ in range(2)]
    _steady(fd, inputs)
    before, side = _runs(fd), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        (out,) = fd.execute(inputs)
    side.synchronize()
    assert torch.equal(out, inputs[0] + inputs[1]) and _runs(fd) == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (out,) = fd.execute(inputs)
    assert _runs(fd) == before
    inputs[0].fill_(3.0)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, inputs[0] + inputs[1])
    _steady(fd, inputs)
    # And on a stream of its own, which can be captured.
    fd = _add()
    with torch.cuda.stream(side):
        _steady(fd, inputs)
        before = _runs(fd)
        graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        (out,) = fd.execute(inputs)
    assert _runs(fd) == before
    inputs[0].fill_(4.0)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, inputs[0] + inputs[1])


def test_another_device_is_current() -> None:
    fd, inputs = _add(), [torch.randn(64, 64, device="cuda:0") for _ in range(2)]
    _steady(fd, inputs)
    before = _runs(fd)
    cpu = [x.cpu() for x in inputs]
    assert torch.equal(fd.execute(cpu)[0], cpu[0] + cpu[1])
    assert _runs(fd) == before
    if torch.cuda.device_count() < 2:
        return
    _steady(fd, inputs)
    before = _runs(fd)
    with torch.cuda.device(1):
        assert torch.equal(fd.execute(inputs)[0], inputs[0] + inputs[1])
        other = [x.to("cuda:1") for x in inputs]
        assert torch.equal(fd.execute(other)[0], other[0] + other[1])
    assert _runs(fd) == before
