"""Times allreduces: one kernel compared with NCCL.

mpirun -np N python benchmarks/allreduce_time.py
    [--json F] [--sizes 1024,65536] [--dtype bfloat16] [--repeats 15]

There are three times:

- graph: microseconds per allreduce in a CUDA graph of 20, by the GPU's clock.
- eager: the same for 20 that the host starts one by one.
- post: host microseconds to start one bound allreduce, without synchronisation.

Candidates take turns in one run. Each row has the median over the repeats of the slowest rank, with
minimum and maximum. Where ranks share a GPU, NCCL is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from turns import (
    Lines,
    Measure,
    Run,
    by_clock,
    by_events,
    slowest,
    spread,
    synchronize,
    take_turns,
)

from multidevice import Communicator
from multidevice.transports.base.allreduce_model import shape_of
from multidevice.transports.base.checked_backend import CheckedBackend
from multidevice.transports.base.collectives import ALLREDUCE
from multidevice.transports.nccl import NcclBackend

CHAIN, REPLAYS, POSTS = 20, 20, 100
SIZES = (*(1 << k for k in range(10, 23)), 32 * 56 * 384 * 2)


def main() -> None:
    """Prints a row for each size, time and candidate."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--json", type=Path, help="append one JSON line per measurement")
    arguments.add_argument("--sizes", default=",".join(map(str, sorted(SIZES))))
    arguments.add_argument("--dtype", default="bfloat16")
    arguments.add_argument("--repeats", type=int, default=15)
    options = arguments.parse_args()
    communicator = Communicator.instance()
    lines = Lines(options.json, rank=communicator.rank())
    for nbytes in map(int, options.sizes.split(",")):
        for row in bench(communicator, nbytes, getattr(torch, options.dtype), options.repeats):
            lines.emit(row)


def bench(
    communicator: Communicator, nbytes: int, dtype: torch.dtype, repeats: int
) -> Iterator[dict[str, object]]:
    """Yields the rows of one size."""
    device = torch.device("cuda", torch.cuda.current_device())
    team = tuple(range(communicator.size()))
    shape = shape_of(nbytes, len(team), dtype)
    candidates: dict[str, CheckedBackend] = {"kernel": _kernel(communicator, device)}
    if torch.cuda.device_count() >= communicator.local_size():
        candidates["nccl"] = _nccl(communicator, device)
    x = torch.ones(nbytes // dtype.itemsize, dtype=dtype, device=device)

    def before() -> None:
        synchronize()
        communicator.barrier()

    measures = {
        f"{what} {who}": make(backend, x, team, before)
        for who, backend in candidates.items()
        for what, make in (("graph", _graph), ("eager", _eager), ("post", _post))
    }
    found = slowest(communicator, take_turns(measures, rounds=repeats))
    for name, seconds in found.items():
        what, who = name.split()
        yield {
            "bench": "allreduce_time",
            "what": what,
            "who": who,
            "ranks": len(team),
            "gpus": min(torch.cuda.device_count(), communicator.local_size()),
            "nbytes": nbytes,
            "dtype": str(dtype).removeprefix("torch."),
            "way": shape.way.name if who == "kernel" and shape is not None else "",
            **spread(seconds).fields("us"),
        }


_made: dict[str, NcclBackend] = {}


def _kernel(communicator: Communicator, device: torch.device) -> CheckedBackend:
    backend = communicator.peers_for(device)
    assert isinstance(backend, CheckedBackend)
    return backend


def _nccl(communicator: Communicator, device: torch.device) -> CheckedBackend:
    """Returns the backend that uses NCCL for all sizes."""
    if "nccl" not in _made:
        _made["nccl"] = NcclBackend(communicator._control, device, kernels_nbytes=0)
    return _made["nccl"]


def _graph(backend: CheckedBackend, x: torch.Tensor, team: tuple[int, ...], before: Run) -> Measure:
    out = torch.empty_like(x)
    for _ in range(3):
        backend.allreduce(out, x, op="SUM", team=team).wait()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CHAIN):
            backend.allreduce(out, x, op="SUM", team=team).wait()
    graph.replay()
    measure = by_events(graph.replay, REPLAYS, before=before)
    # The result lives as long as the function.
    return lambda out=out: measure() / CHAIN


def _start(backend: CheckedBackend, x: torch.Tensor, team: tuple[int, ...]) -> Run:
    out = torch.empty_like(x)
    for _ in range(3):
        backend.allreduce(out, x, op="SUM", team=team).wait()
    post = backend.bind(ALLREDUCE, out, x, team=team, reduce="SUM")
    assert post is not None, "it is bound"
    stream = torch.cuda.current_stream().cuda_stream
    # The tensors live as long as the function.
    return lambda out=out, x=x: post(out.data_ptr(), x.data_ptr(), stream)


def _eager(backend: CheckedBackend, x: torch.Tensor, team: tuple[int, ...], before: Run) -> Measure:
    return by_events(_start(backend, x, team), CHAIN, before=before)


def _post(backend: CheckedBackend, x: torch.Tensor, team: tuple[int, ...], before: Run) -> Measure:
    return by_clock(_start(backend, x, team), POSTS, before=before)


if __name__ == "__main__":
    main()
