"""Programs whose runs are replayed by CUDA graphs, on GPUs or on the CPU's stand-in for
graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fuser import DataType, FusionDefinition, ParallelType
from hostir.runtime.cuda_graphs import RUNS_BEFORE

Inputs = list[Any]
# Runs after which a set of addresses that came each time is captured, and two more.
ENOUGH = RUNS_BEFORE + 3


@dataclass(frozen=True)
class Case:
    """A program: `define` declares inputs and outputs, `make` returns new inputs, `meaning` is
    float64.
    """

    define: Callable[[FusionDefinition], None]
    make: Callable[[torch.device], Inputs]
    meaning: Callable[..., list[torch.Tensor]]


def _kernels(fd: FusionDefinition) -> None:
    x, y = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
    s = fd.ops.sum(fd.ops.mul(x, y), [1], keepdim=True)
    t = fd.ops.sum(fd.ops.exp(fd.ops.sub(x, fd.ops.max(x, [1], keepdim=True))), [0])
    fd.add_output(fd.ops.add(fd.ops.mul(x, s), t))
    fd.add_output(s)


def _layers(fd: FusionDefinition) -> None:
    x, w, v = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(3))
    h = fd.ops.tanh(fd.ops.linear(x, w))
    fd.add_output(fd.ops.linear(h, v))
    fd.add_output(fd.ops.sum(fd.ops.linear(fd.ops.relu(h), v), [0]))


def _numbers(fd: FusionDefinition) -> None:
    x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
    s, n = fd.define_scalar(None, DataType.Double), fd.define_scalar(None, DataType.Int)
    y = fd.ops.matmul(fd.ops.mul(x, s), w)
    z = fd.ops.matmul(fd.ops.add(y, n), w)
    fd.add_output(fd.ops.mul(fd.ops.sum(z, [1]), s))
    fd.add_output(y)


def _views(fd: FusionDefinition) -> None:
    x, w = (fd.define_tensor([8, 12], contiguity=True) for _ in range(2))
    y = fd.ops.linear(x, w)
    z = fd.ops.linear(fd.ops.neg(y), y)
    fd.add_output(fd.ops.permute(fd.ops.linear(z, fd.ops.abs(z)), [1, 0]))
    fd.add_output(fd.ops.permute(x, [1, 0]))
    fd.add_output(fd.ops.reshape(y, [4, 16]))


def _sorts(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, -1], contiguity=True)
    k = fd.define_scalar(3, DataType.Int)
    found, places = fd.ops.topk(fd.ops.neg(x), k, 1, sorted=True)
    fd.add_output(found)
    fd.add_output(fd.ops.take_along_axis(x, places, 1))
    fd.add_output(fd.ops.cumsum(fd.ops.exp(x), 0))
    fd.add_output(fd.ops.argsort(x, 1, stable=True))


def _in_place(fd: FusionDefinition) -> None:
    x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
    y = fd.ops.linear(fd.ops.linear(x, w), w)
    fd.add_output(fd.ops.add(fd.ops.tanh(fd.ops.linear(y, w)), x), x)
    fd.add_output(y)


def _streams(fd: FusionDefinition) -> None:
    x, w = (fd.define_tensor([-1, -1, -1], contiguity=True) for _ in range(2))
    y = fd.ops.matmul(x, w)
    z = fd.ops.relu(y)
    fd.add_output(fd.ops.sum(z, [2]))
    for tv in (x, w, y, z):
        tv.axis(0).parallelize(ParallelType.stream)


def _randn(device: torch.device, *shapes: tuple[int, ...]) -> Inputs:
    return [torch.randn(shape, device=device) for shape in shapes]


def _softmax_like(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    s = (x * y).sum(1, keepdim=True)
    return [x * s + (x - x.amax(1, keepdim=True)).exp().sum(0), s]


def _layers_meaning(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    h = (x @ w.T).tanh()
    return [h @ v.T, (h.relu() @ v.T).sum(0)]


def _numbers_meaning(x: torch.Tensor, w: torch.Tensor, s: float, n: int) -> list[torch.Tensor]:
    y = (x * s) @ w
    return [((y + n) @ w).sum(1) * s, y]


def _views_meaning(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    y = x @ w.T
    z = -y @ y.T
    return [(z @ z.abs().T).T, x.T, y.reshape(4, 16)]


def _sorts_meaning(x: torch.Tensor) -> list[torch.Tensor]:
    found = (-x).topk(3, 1).values
    places = x.sort(dim=1, stable=True).indices.double()
    return [found, -found, x.exp().cumsum(0), places]


def _in_place_meaning(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    y = x @ w.T @ w.T
    return [y]


COUNT = iter(range(10**9))

CASES: dict[str, Case] = {
    "kernels": Case(_kernels, lambda d: _randn(d, (13, 24), (13, 24)), _softmax_like),
    "layers": Case(_layers, lambda d: _randn(d, (12, 16), (24, 16), (8, 24)), _layers_meaning),
    "numbers": Case(
        _numbers,
        lambda d: [*_randn(d, (9, 16), (16, 16)), 0.5 + next(COUNT) % 7, next(COUNT) % 5],
        _numbers_meaning,
    ),
    "views": Case(_views, lambda d: _randn(d, (8, 12), (8, 12)), _views_meaning),
    "sorts": Case(_sorts, lambda d: _randn(d, (6, 16)), _sorts_meaning),
    "streams": Case(
        _streams,
        lambda d: _randn(d, (4, 6, 8), (4, 8, 5)),
        lambda x, w: [(x @ w).relu().sum(2)],
    ),
}


def defined(case: Case) -> FusionDefinition:
    with FusionDefinition() as fd:
        case.define(fd)
    return fd


def check(case: Case, inputs: Inputs, outputs: list[torch.Tensor]) -> None:
    """Compares outputs with torch's in float64."""
    wide = [v.double().cpu() if isinstance(v, torch.Tensor) else v for v in inputs]
    wanted = case.meaning(*wide)
    assert len(outputs) == len(wanted)
    for got, want in zip(outputs, wanted, strict=True):
        # Sums cancel: what counts is the size of their terms.
        atol = 1e-4 * float(want.abs().max())
        torch.testing.assert_close(got.double().cpu(), want, rtol=1e-3, atol=atol)


IN_PLACE = Case(_in_place, lambda d: _randn(d, (8, 8), (8, 8)), _in_place_meaning)


def repeat(fd: FusionDefinition, case: Case, device: torch.device, runs: int = 40) -> list[str]:
    """Runs on old and new tensors in turn and keeps some results; returns the report of
    graphs.
    """
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    steady = case.make(device)
    for k in range(runs):
        inputs = steady if k % 3 else case.make(device)
        if k % 5 == 0:
            # A graph must read again what was written into its inputs.
            for v in inputs:
                if isinstance(v, torch.Tensor):
                    v.copy_(torch.randn(v.shape))
        outputs = fd.execute(inputs)
        check(case, inputs, outputs)
        for kept, copied in held:
            assert torch.equal(kept, copied), "a run wrote into what the caller holds"
        places = [v.untyped_storage().data_ptr() for v in inputs if isinstance(v, torch.Tensor)]
        own = [o for o in outputs if o.untyped_storage().data_ptr() not in places]
        held = [*held[-3:], *((o, o.clone()) for o in own if k % 4 == 0)]
    return fd.cuda_graphs()
