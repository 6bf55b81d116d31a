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
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

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
    arguments.add_argument("--json", default="")
    arguments.add_argument("--sizes", default=",".join(map(str, sorted(SIZES))))
    arguments.add_argument("--dtype", default="bfloat16")
    arguments.add_argument("--repeats", type=int, default=15)
    options = arguments.parse_args()
    communicator = Communicator.instance()
    rows = []
    for nbytes in map(int, options.sizes.split(",")):
        for row in bench(communicator, nbytes, getattr(torch, options.dtype), options.repeats):
            rows.append(row)
            if communicator.rank() == 0:
                print(json.dumps(row), flush=True)
    if options.json and communicator.rank() == 0:
        with open(options.json, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


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
    ways = {
        (what, who): make(backend, x, team)
        for who, backend in candidates.items()
        for what, make in (("graph", _graph), ("eager", _eager), ("post", _post))
    }
    found: dict[tuple[str, str], list[float]] = {key: [] for key in ways}
    for _ in range(repeats + 2):
        for key, measure in ways.items():
            torch.cuda.synchronize()
            communicator.barrier()
            found[key].append(_slowest(communicator, measure()))
    for (what, who), us in found.items():
        kept = us[2:]
        numbers = {"us": statistics.median(kept), "us_min": min(kept), "us_max": max(kept)}
        yield {
            "bench": "allreduce_time",
            "what": what,
            "who": who,
            "ranks": len(team),
            "gpus": min(torch.cuda.device_count(), communicator.local_size()),
            "nbytes": nbytes,
            "dtype": str(dtype).removeprefix("torch."),
            "way": shape.way.name if who == "kernel" and shape is not None else "",
            **{k: round(v, 2) for k, v in numbers.items()},
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


def _slowest(communicator: Communicator, us: float) -> float:
    return max(map(float, communicator.exchange(repr(us).encode())))


def _timed(run: Callable[[], object], calls: int) -> float:
    """Returns microseconds of the GPU per call; the ranks have synchronised before."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / calls


def _graph(backend: CheckedBackend, x: torch.Tensor, team: tuple[int, ...]) -> Callable[[], float]:
    out = torch.empty_like(x)
    for _ in range(3):
        backend.allreduce(out, x, op="SUM", team=team).wait()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CHAIN):
            backend.allreduce(out, x, op="SUM", team=team).wait()

    def run() -> None:
        for _ in range(REPLAYS):
            graph.replay()

    graph.replay()
    return partial(_timed, run, CHAIN * REPLAYS)


def _start(backend: CheckedBackend, x: torch.Tensor, team: tuple[int, ...]) -> Callable[[], object]:
    out = torch.empty_like(x)
    for _ in range(3):
        backend.allreduce(out, x, op="SUM", team=team).wait()
    post = backend.bind(ALLREDUCE, out, x, team=team, reduce="SUM")
    assert post is not None, "it is bound"
    stream = torch.cuda.current_stream().cuda_stream
    # The tensors live as long as the function.
    return lambda out=out, x=x: post(out.data_ptr(), x.data_ptr(), stream)


def _eager(backend: CheckedBackend, x: torch.Tensor, team: tuple[int, ...]) -> Callable[[], float]:
    start = _start(backend, x, team)

    def run() -> None:
        for _ in range(CHAIN):
            start()

    return partial(_timed, run, CHAIN)


def _post(backend: CheckedBackend, x: torch.Tensor, team: tuple[int, ...]) -> Callable[[], float]:
    start = _start(backend, x, team)

    def measure() -> float:
        began = time.perf_counter()
        for _ in range(POSTS):
            start()
        return (time.perf_counter() - began) / POSTS * 1e6

    return measure


if __name__ == "__main__":
    main()
