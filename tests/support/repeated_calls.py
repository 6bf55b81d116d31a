"""Programs that are called repeatedly, to test when the compiled runner takes the calls over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fuser import FusionDefinition

# Calls after which one is the runner's, if any will be.
ENOUGH = 24


def program(inputs: int, build: Callable[..., Any]) -> FusionDefinition:
    with FusionDefinition() as fd:
        values = [fd.define_tensor([-1, -1], contiguity=True) for _ in range(inputs)]
        for out in build(fd.ops, *values):
            fd.add_output(out)
    return fd


def add() -> FusionDefinition:
    return program(2, lambda ops, x, y: [ops.add(x, y)])


def any_add() -> FusionDefinition:
    """Adds two 6 by 8 tensors that may have any strides."""
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([6, 8], contiguity=False) for _ in range(2))
        fd.add_output(fd.ops.add(x, y))
    return fd


def softmax(ops: Any, x: Any) -> list[Any]:
    e = ops.exp(ops.sub(x, ops.broadcast_in_dim(ops.max(x, [1]), x.shape(), [0])))
    return [ops.div(e, ops.broadcast_in_dim(ops.sum(e, [1]), x.shape(), [0]))]


def layers(ops: Any, x: Any, w: Any) -> list[Any]:
    y = ops.relu(ops.matmul(ops.tanh(x), w))
    return [ops.permute(y, [1, 0]), ops.sum(ops.matmul(y, w), [0]), x]


def runs(fd: FusionDefinition) -> int:
    """Returns how many calls the compiled runner has made."""
    return sum(call.steady.runs for call in fd.fec._by_signature.values() if call.steady)


def steady(fd: FusionDefinition, inputs: Any) -> None:
    for _ in range(ENOUGH):
        fd.execute(inputs)
    before = runs(fd)
    fd.execute(inputs)
    assert runs(fd) == before + 1, fd.compiled_runner()


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(
        x.dtype == y.dtype and x.stride() == y.stride() and torch.equal(x, y) for x, y in pairs
    )
