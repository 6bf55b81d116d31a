"""Times the host work of calls.

Run `python benchmarks/host_time.py [--only add,softmax] [--no-peer] [--json F]`.

Rows have microseconds of `fd.execute([...])` without synchronisation, on the GPU where there is
one. On the CPU they include the time of the kernels on a few elements. The kinds of calls are:

- steady: the same class of inputs again; each result is freed at once, so its memory is reused.
- held: the same, but each result is kept until the next one, as in loops.
- alternate: two classes in turn.
- new_shape: sizes that the program has not seen yet.

`ours` uses the compiled runner where it can be made, `ours-python` does not. On a GPU, eager torch
and torch.compile (default, and reduce-overhead) take turns in the same run. Under mpirun, the cases
with a communication run too. Each row is the median of the repeats, with minimum and maximum. A
repeat has few enough calls that the GPU's queue does not fill.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Any

import torch
from turns import WARM_UPS, Lines, Run, by_clock, spread, take_turns

from fuser import DeviceMesh, FusionDefinition, ParallelType
from fuser.runtime import compiled_runner
from multidevice import Communicator

# Repeats after the warm-ups, and the calls of each.
REPEATS, CALLS = 13, 100
REPEATS_OF_NEW, NEW_SHAPES = 6, 12
N = 16
Tensors = list[torch.Tensor]
Row = dict[str, object]


# ------------------------------------------------------------------ programs
def _define(inputs: int, build: Callable[..., Any]) -> FusionDefinition:
    with FusionDefinition() as fd:
        values = [fd.define_tensor([-1, -1], contiguity=True) for _ in range(inputs)]
        fd.add_output(build(fd.ops, *values))
    return fd


def _segments(ops: Any, x: Any, *weights: Any) -> Any:
    """Defines five matmuls, with a kernel before, between and after them."""
    y = ops.relu(x)
    for w in weights:
        y = ops.relu(ops.matmul(y, w))
    total = ops.sum(y, [0])
    return ops.add(y, ops.broadcast_in_dim(total, y.shape(), [1]))


def _chain(ops: Any, x: Any, y: Any) -> Any:
    for _ in range(4):
        x = ops.tanh(ops.add(x, y))
    return x


def _softmax(ops: Any, x: Any) -> Any:
    e = ops.exp(ops.sub(x, ops.broadcast_in_dim(ops.max(x, [1]), x.shape(), [0])))
    return ops.div(e, ops.broadcast_in_dim(ops.sum(e, [1]), x.shape(), [0]))


def _torch_segments(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x)
    for w in weights:
        y = torch.relu(y @ w)
    return y + y.sum(0)


def _torch_chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = torch.tanh(x + y)
    return x


@dataclass(frozen=True)
class Case:
    """Our program, torch's, and the shapes of the inputs for a number of rows."""

    define: Callable[[], FusionDefinition]
    peer: Callable[..., torch.Tensor]
    shapes: Callable[[int], Sequence[tuple[int, int]]]

    def inputs(self, rows: int, device: str) -> Tensors:
        """Returns random inputs with this number of rows."""
        return [torch.randn(shape, device=device) for shape in self.shapes(rows)]


CASES = {
    "add": Case(
        lambda: _define(2, lambda ops, x, y: ops.add(x, y)), torch.add, lambda n: [(n, N)] * 2
    ),
    "chain8": Case(lambda: _define(2, _chain), _torch_chain, lambda n: [(n, N)] * 2),
    "softmax": Case(
        lambda: _define(1, _softmax), lambda x: torch.softmax(x, 1), lambda n: [(n, N)]
    ),
    "segments12": Case(lambda: _define(6, _segments), _torch_segments, lambda n: [(n, n)] * 6),
}


# ------------------------------------------------------------------ timing
def _rows(
    candidates: Mapping[str, Run], repeats: int = REPEATS, calls: int = CALLS, **what: object
) -> Iterator[Row]:
    """Yields a row for each candidate; they take turns."""
    measures = {who: by_clock(call, calls) for who, call in candidates.items()}
    for who, seconds in take_turns(measures, rounds=repeats).items():
        yield {"bench": "host_time", **what, "who": who, **spread(seconds).fields("us")}


def _peers(case: Case, inputs: Tensors) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "eager", partial(case.peer, *inputs)
    if not torch.cuda.is_available():
        return
    for name, mode in (("compile", "default"), ("reduce-overhead", "reduce-overhead")):
        torch._dynamo.reset()
        compiled = torch.compile(case.peer, mode=mode, dynamic=False)
        with torch.no_grad():
            for _ in range(4):
                compiled(*inputs)
        yield name, partial(compiled, *inputs)


class _Held:
    """A call whose result is kept until the next one is made."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call, self._result = call, None

    def __call__(self) -> None:
        self._result = self._call()


def _ways(case: Case, inputs: Tensors, check: bool) -> Iterator[tuple[str, FusionDefinition]]:
    """Yields our program with and without the compiled runner, after warm-up."""
    before = os.environ.get("FUSER_DISABLE", "")
    for who, more in (("ours", ""), ("ours-python", "compiled_runner")):
        os.environ["FUSER_DISABLE"] = ",".join(filter(None, (before, more)))
        fd = case.define()
        (out,) = fd.execute(inputs)
        if check:
            torch.testing.assert_close(out, case.peer(*inputs), rtol=1e-3, atol=1e-3)
        del out
        hold = _Held(partial(fd.execute, inputs))
        for call in [hold] * 20 + [partial(fd.execute, inputs)] * 40:
            call()
        yield who, fd
    os.environ["FUSER_DISABLE"] = before


def bench_steady(name: str, case: Case, device: str, peers: bool) -> Iterator[Row]:
    """Yields the rows of repeated calls with one class of inputs."""
    inputs = case.inputs(N, device)
    ways = dict(_ways(case, inputs, check=True))
    candidates: dict[str, Run] = {who: partial(fd.execute, inputs) for who, fd in ways.items()}
    if peers:
        candidates |= dict(_peers(case, inputs))
    held = {who: _Held(call) for who, call in candidates.items()}
    about = {"case": name, "segments": ways["ours"].fec.statistics()["segments"]}
    print("#", name, *ways["ours"].compiled_runner(), *ways["ours"].cuda_graphs(), file=sys.stderr)
    yield from _rows(candidates, what="steady", **about)
    yield from _rows(held, what="held", **about)


def bench_alternate(name: str, case: Case, device: str) -> Iterator[Row]:
    """Yields the row of calls that alternate between two classes of inputs."""
    fd = case.define()
    sets = [case.inputs(N, device), case.inputs(2 * N, device)]
    for _ in range(20):
        for inputs in sets:
            fd.execute(inputs)
    turns = cycle(sets)
    return _rows({"ours": lambda: fd.execute(next(turns))}, what="alternate", case=name)


def bench_new_shape(name: str, case: Case, device: str) -> Iterator[Row]:
    """Yields the row of calls with new sizes, after a few sizes that compile the kernels."""
    fd, rows = case.define(), count(2 * N)
    for _ in range(8):
        fd.execute(case.inputs(next(rows), device))
    count_of_sets = NEW_SHAPES * (REPEATS_OF_NEW + WARM_UPS)
    sets = iter([case.inputs(next(rows), device) for _ in range(count_of_sets)])
    call = partial(_execute_next, fd, sets)
    return _rows({"ours": call}, REPEATS_OF_NEW, NEW_SHAPES, what="new_shape", case=name)


def _execute_next(fd: FusionDefinition, sets: Iterator[Tensors]) -> None:
    fd.execute(next(sets))


# ------------------------------------------------------------------ on ranks
def _allreduce(size: int) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([size, -1], contiguity=True)
        y = fd.ops.sum(x, [0])
        fd.add_output(y)
        mesh = DeviceMesh(range(size))
        for tv in (x, y):
            tv.set_device_mesh(mesh)
        x.axis(0).parallelize(ParallelType.mesh_x)
    return fd


def bench_ranks(communicator: Communicator, device: str) -> Iterator[Row]:
    """Yields the rows of a program with one allreduce, and of the backend's allreduce alone.

    All ranks make the same calls in the same order.
    """
    size = communicator.size()
    team = tuple(range(size))
    backend = communicator.backend_for(torch.device(device))
    fd, x, out = _allreduce(size), torch.randn(1, N, device=device), torch.empty(N, device=device)
    inp = torch.randn(N, device=device)

    def post() -> None:
        backend.allreduce(out, inp, op="SUM", team=team).wait()

    candidates: dict[str, Run] = {"program": lambda: fd.execute([x]), "backend": post}
    for call in candidates.values():
        for _ in range(5):
            call()
    yield from _rows(candidates, what="allreduce", case=f"{size} ranks")


def main() -> int:
    """Prints the rows of the cases of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", default=",".join(CASES), help="cases, comma-separated")
    parser.add_argument("--no-peer", action="store_true", help="leave torch's own ways out")
    parser.add_argument("--json", type=Path, help="append one JSON line per measurement")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    communicator = Communicator.instance()
    compiled_runner.wait(60.0)
    print("# the compiled runner:", compiled_runner.why_not() or "is there", file=sys.stderr)
    if communicator.size() > 1 and device == "cuda":
        device = f"cuda:{torch.cuda.current_device()}"
    lines = Lines(args.json, rank=communicator.rank())

    def measured() -> Iterator[Row]:
        if communicator.size() > 1:
            yield from bench_ranks(communicator, device)
        for name in filter(None, args.only.split(",")):
            case = CASES[name]
            yield from bench_steady(name, case, device, not args.no_peer)
            yield from bench_alternate(name, case, device)
            yield from bench_new_shape(name, case, device)

    for row in measured():
        lines.emit({**row, "device": device, "torch": torch.__version__})
    return 0


if __name__ == "__main__":
    sys.exit(main())
