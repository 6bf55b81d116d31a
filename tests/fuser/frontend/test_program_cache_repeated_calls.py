"""The host time of a repeated call, measured by the number of Python functions that it calls."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import FrameType
from typing import Any

import pytest
import torch

from fuser import FusionDefinition
from fuser.multidevice import Communicator, DeviceMesh, simulate
from fuser.runtime.captured_graphs import MAKERS
from hostir.runtime import cuda_graphs
from multidevice.coordination.bounded_wait import poll_until
from multidevice.coordination.control_channel import CallTokens, call_token
from multidevice.transports.simulated import Generators, SimulatedControl
from tests.support.counted_calls import name_of


class _Nothing:
    """A graph that does nothing, and the object that captures it."""

    stream = 0

    def __init__(self, device: torch.device | None = None) -> None: ...

    def stand_in(self, stream: int) -> int:
        return stream

    def capture(self, actions: Sequence[Callable[[Any], object]], slots: Any) -> _Nothing:
        for act in actions:
            act(slots)
        return self

    def kernel(self, call: Any, stream: int) -> object:
        return call.function(*call.arguments)

    def launch(self, stream: int) -> None: ...

    def update(self, node: object, call: object) -> None: ...

    def twin(self) -> _Nothing:
        return self


def python_calls(call: Callable[[], object]) -> Counter[str]:
    """Returns how often each function of the packages is called."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.split(".")[0] in ("fuser", "hostir", "multidevice"):
            found[f"{name}.{frame.f_code.co_qualname}"] += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def test_a_kernel() -> None:
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
        fd.add_output(fd.ops.add(x, y))
    inputs = [torch.randn(4, 8), torch.randn(4, 8)]
    for _ in range(8):
        fd.execute(inputs)
    found = python_calls(lambda: fd.execute(inputs))
    assert found.total() <= 12, found


def test_a_graph_and_the_agreement_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of functions does not depend on the steps of the graph and the tensors that it
    reads."""
    monkeypatch.setitem(MAKERS, "cpu", _Nothing)
    # Simulated ranks are threads that take turns.
    monkeypatch.setattr(cuda_graphs.USERS, "alone", lambda: nullcontext([]))

    def count() -> Counter[str]:
        with FusionDefinition() as fd:
            x, *weights = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(7))
            y = x
            for w in weights:
                y = fd.ops.relu(fd.ops.matmul(y, w))
            fd.add_output(y)
            for tv in (x, *weights):
                tv.set_device_mesh(DeviceMesh(range(Communicator.instance().size())))
        inputs = [torch.randn(8, 8) for _ in range(7)]
        held = [fd.execute(inputs) for _ in range(8)][-2:]
        del held
        for _ in range(60):
            fd.execute(inputs)
        # If the address of an output differs, a second graph may be captured for it. The smallest
        # of several counts excludes that.
        calls = [python_calls(lambda: fd.execute(inputs)) for _ in range(5)]
        found = min(calls, key=Counter.total)
        assert any(line.startswith("captured: ") for line in fd.cuda_graphs()), fd.cuda_graphs()
        return found

    alone = count()
    assert alone.total() <= 26, alone
    with simulate(2) as world:
        for found in world.run(count):
            # Not counted: functions with which simulated ranks wait for one another, and switch
            # their random generators.
            said = {name_of(CallTokens.say), name_of(call_token)}
            others = {
                f"{a.__module__}." for a in (SimulatedControl, poll_until, Generators, CallTokens)
            }
            mine = {k: n for k, n in found.items() if k in said or not k.startswith(tuple(others))}
            assert sum(mine.values()) <= 40, mine
