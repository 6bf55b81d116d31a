"""Tests that autograd notices in-place updates: a backward pass that needs an old value raises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fuser import FusionDefinition, ops
from hostir import HostIrContainer, HostIrEvaluator

RUNS = 30  # enough for the plan, its repetition and the compiled runner


def added() -> FusionDefinition:
    with FusionDefinition() as fd:
        a = fd.define_tensor([-1])
        b = fd.define_tensor([-1])
        fd.add_output(fd.ops.add(a, b), a)
    return fd


def by_hand() -> HostIrEvaluator:
    """Returns a program whose op writes into an input without a declared alias."""
    hic = HostIrContainer()
    with hic:
        a, b = hic.input([-1]), hic.input([-1])
        hic.append(ops.add(a, b), into=a)
    return HostIrEvaluator(hic)


Run = Callable[[list[torch.Tensor]], object]
WAYS: dict[str, Callable[[], Run]] = {
    "execute": lambda: added().execute,
    "run": lambda: by_hand().run,
    "evaluate": lambda: by_hand().evaluate,
}


@pytest.mark.parametrize("way", WAYS)
def test_each_run_moves_the_version_of_what_it_updates(way: str) -> None:
    run, a, b = WAYS[way](), torch.zeros(8), torch.ones(8)
    for i in range(RUNS):
        before = a._version, b._version
        run([a, b])
        assert a.tolist() == [i + 1.0] * 8
        assert a._version > before[0] and b._version == before[1]


@pytest.mark.parametrize("way", WAYS)
def test_a_backward_pass_that_needs_the_old_value_raises_as_torch_does(way: str) -> None:
    run = WAYS[way]()
    for _ in range(RUNS):
        w, x = torch.ones(8, requires_grad=True), torch.full((16,), 5.0)
        loss = (w * x[:8]).sum()  # keeps x
        run([x[8:], torch.ones(8)])  # a view of the same tensor: torch counts by storage of views
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_inputs_that_share_memory_and_inference_tensors_are_updated() -> None:
    run, whole = added().execute, torch.zeros(9)
    version = whole._version
    run([whole[1:], whole[:-1]])
    assert whole._version > version
    with torch.inference_mode():
        a = torch.zeros(8)
    run([a, torch.ones(8)])
    assert a.tolist() == [1.0] * 8


def test_what_a_caller_gives_for_a_result_is_written() -> None:
    hic = HostIrContainer()
    with hic:
        x = hic.input([4])
        y = ops.add(x, 1.0)
        hic.append(y)
        hic.add_output(y)
    buffer, given = torch.zeros(4), torch.ones(4)
    HostIrEvaluator(hic).run_with_input({x: given, y: buffer})
    assert buffer.tolist() == [2.0] * 4
    assert buffer._version > 0 and given._version == 0


def test_a_program_that_updates_nothing_moves_no_version() -> None:
    with FusionDefinition() as fd:
        a = fd.define_tensor([-1])
        fd.add_output(fd.ops.add(a, 1.0))
    x = torch.zeros(8)
    for _ in range(RUNS):
        (out,) = fd.execute([x])
        assert x._version == 0 and out._version == 0
