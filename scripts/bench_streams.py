"""Allgather + linear in chunks over streams, beside the unchunked program, on the GPUs of a job.

mpirun -np 2 python scripts/bench_streams.py [--json FILE] [--m 8192 --k 8192 --n 28672]

x [chunks, ranks, M / (chunks ranks), K] is sharded over the ranks, w [N, K] by columns of the
result. Every form computes the same numbers from the same inputs:

unchunked: one allgather, one linear.
chunked on n streams: a stream axis of 8 chunks, an allgather and a linear per step.
head wait inside: the same, but every step waits for the entry stream in the main loop: the waits
    and the joins chain the steps, which is why the lowering puts them in a loop of their own.
broadcasts, ring, permutes: the shard outermost, one step per rank.

Method: the forms take turns; a burst of 8 calls between two CUDA events, 12 rounds after warm-up;
the median of the slowest rank, in ms, with the smallest and largest round.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fuser import DataType, FusionDefinition, ParallelType, multidevice
from fuser.multidevice import Communicator, DeviceMesh
from hostir.container import HostIrContainer
from hostir.evaluate import HostIrEvaluator
from hostir.lower_params import LowerParams
from hostir.ops import ForLoop

ROUNDS, BURST, CHUNKS = 12, 8, 8
X, STREAM = ParallelType.mesh_x, ParallelType.stream
Run = Callable[[], list[torch.Tensor]]


def define(form: str, d: int, m: int, k: int, n: int, dtype: DataType) -> tuple[Any, list[Any]]:
    """Return the definition and its tensors x, w."""
    with FusionDefinition() as fd:
        shape = [m, k] if form in ("broadcasts", "permutes", "ring") else [CHUNKS, d, -1, k]
        if -1 in shape:
            shape[2] = m // (CHUNKS * d)
        x = fd.define_tensor(shape, contiguity=True, dtype=dtype)
        w = fd.define_tensor([n, k], contiguity=True, dtype=dtype)
        gathered = fd.ops.set(x)
        y = fd.ops.linear(gathered, w)
        fd.add_output(y)
        mesh = DeviceMesh(range(d))
        for tv in (x, w, gathered):
            tv.set_device_mesh(mesh)
        w.outer_split(0, d)
        w.axis(0).parallelize(X)
        if len(shape) == 2:
            for tv in (x, gathered):
                tv.outer_split(0, d)
            x.axis(0).parallelize(X)
            if form == "permutes":
                gathered.swizzle1d(0, X)
            gathered.axis(0).parallelize(STREAM)
        else:
            x.axis(1).parallelize(X)
            if form != "unchunked":
                gathered.axis(0).parallelize(STREAM)
    return fd, [x, w]


def program_of(fd: Any, inputs: list[torch.Tensor], params: LowerParams) -> HostIrContainer:
    from fuser.frontend.executor_cache import FusionExecutorCache

    cache = FusionExecutorCache(fd.fusion, params=params)
    cache.execute(inputs)
    return cache.host_program()


def with_head_wait_inside(program: HostIrContainer) -> HostIrContainer:
    """Put the entering waits into the main loop."""
    ops = list(program.ops)
    at = next(i for i, op in enumerate(ops) if isinstance(op, ForLoop))
    head, main = ops[at], ops[at + 1]
    assert isinstance(head, ForLoop) and isinstance(main, ForLoop)
    ops[at : at + 2] = [main.replace(body=(*head.body, *main.body[1:]))]
    return program.with_ops(tuple(ops))


def forms(d: int, m: int, k: int, n: int, dtype: DataType, x: torch.Tensor, w: torch.Tensor):
    """Yield (name, run, the result as rows of M)."""
    communicator = Communicator.instance()

    def runner(program: HostIrContainer, inputs: list[torch.Tensor], streams: int) -> Run:
        evaluator = HostIrEvaluator(
            program, communicator, device=inputs[0].device, number_of_streams=streams
        )
        return lambda: evaluator.run(inputs)

    def local(form: str) -> tuple[Any, list[torch.Tensor]]:
        fd, (tx, tw) = define(form, d, m, k, n, dtype)
        shape = [int(str(e)) for e in tx.shape()]
        return fd, [multidevice.shard_tensor(t, tv) for t, tv in ((x.view(shape), tx), (w, tw))]

    fd, inputs = local("unchunked")
    yield "unchunked", runner(program_of(fd, inputs, LowerParams()), inputs, 1)
    fd, inputs = local("chunked")
    chunked = program_of(fd, inputs, LowerParams())
    for streams in (1, 2, 4, 8):
        yield f"chunked on {streams} streams", runner(chunked, inputs, streams)
    yield "head wait inside, 4 streams", runner(with_head_wait_inside(chunked), inputs, 4)
    for form in ("broadcasts", "permutes", "ring"):
        fd, inputs = local("broadcasts" if form == "ring" else form)
        params = LowerParams(offset_by_rank=form == "ring")
        yield form, runner(program_of(fd, inputs, params), inputs, 4)


def slowest(value: float, device: torch.device) -> float:
    """Return the largest value among the ranks."""
    communicator = Communicator.instance()
    here = torch.tensor([value], device=device)
    team = tuple(range(communicator.size()))
    out = torch.empty_like(here)
    communicator.backend_for(device).allreduce(out, here, op="MAX", team=team).wait()
    return float(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("m", 8192), ("k", 8192), ("n", 28672)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cpu", action="store_true", help="check the forms without timing them")
    args = parser.parse_args()
    communicator = Communicator.instance()
    d, rank = communicator.size(), communicator.rank()
    device = torch.device("cpu") if args.cpu else torch.device("cuda", communicator.local_rank())
    dtype, torch_dtype = (
        (DataType.Float, torch.float32) if args.cpu else (DataType.BFloat16, torch.bfloat16)
    )
    if not args.cpu:
        torch.cuda.set_device(device)
    generator = torch.Generator(device=device).manual_seed(0)
    x = torch.randn(args.m, args.k, device=device, generator=generator).to(torch_dtype) / 8
    w = torch.randn(args.n, args.k, device=device, generator=generator).to(torch_dtype) / 8
    columns = args.n // d
    want = x.float() @ w[rank * columns : (rank + 1) * columns].float().t()
    runs: dict[str, Run] = {}
    for name, run in forms(d, args.m, args.k, args.n, dtype, x, w):
        (got,) = run()
        error = ((got.float().reshape(want.shape) - want).norm() / want.norm()).item()
        assert error < 1e-2, f"{name}: relative error {error}"
        runs[name] = run
    del want
    if args.cpu:
        print(f"rank {rank}: {len(runs)} forms agree")
        return
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS + 2):
        for name, run in runs.items():
            torch.cuda.synchronize()
            communicator.barrier()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            run()
            start.record()
            for _ in range(BURST):
                run()
            stop.record()
            torch.cuda.synchronize()
            times[name].append(slowest(start.elapsed_time(stop) / BURST, device))
    base = statistics.median(times["unchunked"][2:])
    for name, all_rounds in times.items():
        rounds = all_rounds[2:]
        median = statistics.median(rounds)
        row = {
            "bench": "streams",
            "gpus": d,
            "shape": f"M{args.m} K{args.k} N{args.n}",
            "form": name,
            "ms": round(median, 4),
            "min": round(min(rounds), 4),
            "max": round(max(rounds), 4),
            "to_unchunked": round(median / base, 3),
        }
        if rank == 0:
            print(json.dumps(row), flush=True)
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
