"""Allgather + linear, and linear + reduce-scatter, in steps over streams, on the GPUs of a job.

mpirun -np 2 python benchmarks/stream_time.py [--op rs] [--json FILE] [--m 8192 --k 8192 --n 28672]
    [--forms unchunked,auto,copies]

The steps are compared with the unchunked programs. There are two operations:

ag: x [M, K] is sharded by rows, w [N, K] by columns of the result.
rs: both are sharded along K (28672, with N = 8192, by default), and the sum by rows.

Every form computes the same numbers from the same inputs:

unchunked: one collective, one linear.
auto: the same definition, in the steps that the cost model chooses, if any. Its prediction is
    printed to stderr (docs/explanation/cost-model.md).
chunked on n streams: a stream axis of 8 chunks, a linear and a collective per step. All ranks
    share each chunk.
head wait inside: the same, but every step waits for the entry stream in the main loop. These waits
    chain the steps, which is why the lowering puts them in a separate loop.
broadcasts, permutes, ring (ag): the shard outermost, one step per rank.
reduces, exchange (rs): the same. Each step reduces its block to its rank, or sends it there, and
    the blocks are summed after the last step.
copies: the shard outermost, each rank's own block first; readers copy the others (peer copies).

Method: the forms take turns. A round is a burst of 8 calls between two CUDA events; there are 12
rounds after warm-up. Reported are the median of the slowest rank, in ms, and the smallest and
largest round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matmul_pairs import Defined, define_gather, define_scatter
from turns import Lines, take_turns_on_ranks

from fuser import DataType, multidevice
from fuser.multidevice import Communicator
from hostir import HostIrEvaluator
from hostir.ir.ops import ForLoop
from hostir.ir.program import HostIrContainer
from hostir.lowering.params import DEFAULT, LowerParams

ROUNDS, BURST = 12, 8
Run = Callable[[], list[torch.Tensor]]
Made = tuple[HostIrContainer, list[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]


@dataclass(frozen=True)
class Op:
    """An operation: its definition in a form, the sizes K and N, and its forms with one step per
    rank.
    """

    define: Callable[..., Defined]
    sizes: tuple[int, int]
    steps: tuple[tuple[str, str, LowerParams], ...]


OPS = {
    "ag": Op(
        define_gather,
        (8192, 28672),
        (
            ("broadcasts", "broadcasts", LowerParams()),
            ("permutes", "permutes", LowerParams()),
            ("ring", "broadcasts", LowerParams(offset_by_rank=True)),
            ("copies", "permutes", LowerParams(backend="CUDA")),
            ("unchunked copies", "unchunked", LowerParams(backend="CUDA")),
        ),
    ),
    "rs": Op(
        define_scatter,
        (28672, 8192),
        (
            ("reduces", "reduces", LowerParams()),
            ("exchange", "exchange", LowerParams()),
            ("copies", "exchange", LowerParams(backend="CUDA")),
        ),
    ),
}


def program_of(
    fd: Any, inputs: list[torch.Tensor], params: LowerParams, *, is_auto: bool
) -> HostIrContainer:
    """Returns the host program of a definition; with `is_auto`, in the steps that the cost model
    chooses.
    """
    from fuser.frontend.executor_cache import FusionExecutorCache

    cache = FusionExecutorCache(fd.fusion, params=params)
    cache.execute(inputs, _disable_options=[] if is_auto else ["auto_overlap"])
    if is_auto and Communicator.instance().rank() == 0:
        print(cache.overlap_report(inputs), file=sys.stderr, flush=True)
    return cache.host_program()


def with_head_wait_inside(program: HostIrContainer) -> HostIrContainer:
    """Returns the program with the waits for the entry stream inside the main loop."""
    ops = list(program.ops)
    at = next(i for i, op in enumerate(ops) if isinstance(op, ForLoop))
    head, main = ops[at], ops[at + 1]
    assert isinstance(head, ForLoop) and isinstance(main, ForLoop)
    ops[at : at + 2] = [main.replace(body=(*head.body, *main.body[1:]))]
    return program.with_ops(tuple(ops))


def forms(
    op: Op,
    d: int,
    m: int,
    dtype: DataType,
    x: torch.Tensor,
    w: torch.Tensor,
    wanted: Callable[[str], bool],
):
    """Yields (name, run, function that cuts this rank's part of the result [M, N]) of each wanted
    form.
    """
    communicator = Communicator.instance()

    def runner(program: HostIrContainer, inputs: list[torch.Tensor], streams: int) -> Run:
        evaluator = HostIrEvaluator(
            program, communicator, device=inputs[0].device, number_of_streams=streams
        )
        return lambda: evaluator.run(inputs)

    def made(form: str, params: LowerParams = DEFAULT, *, is_auto: bool = False) -> Made:
        fd, tx, tw, y = op.define(form, d, m, x.shape[1], w.shape[0], dtype)
        shape = [int(str(e)) for e in tx.shape()]
        inputs = [multidevice.shard_tensor(t, tv) for t, tv in ((x.view(shape), tx), (w, tw))]

        def local(whole: torch.Tensor) -> torch.Tensor:
            """Returns this rank's part of y [M, N]."""
            if op is OPS["ag"]:
                return whole.chunk(d, 1)[communicator.rank()]
            return multidevice.shard_tensor(whole.view(*shape[:-1], -1), y)

        return program_of(fd, inputs, params, is_auto=is_auto), inputs, local

    for name in ("unchunked", "auto"):
        if wanted(name):
            program, inputs, local = made("unchunked", is_auto=name == "auto")
            yield name, runner(program, inputs, 4), local
    if wanted("chunked"):
        program, inputs, local = made("chunked")
        for streams in (1, 2, 4, 8):
            yield f"chunked on {streams} streams", runner(program, inputs, streams), local
        inside = with_head_wait_inside(program)
        yield "head wait inside, 4 streams", runner(inside, inputs, 4), local
    for name, form, params in op.steps:
        if wanted(name):
            program, inputs, local = made(form, params)
            yield name, runner(program, inputs, 4), local


def main() -> None:
    """Checks all forms, and prints a row of times for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", choices=OPS, default="ag")
    parser.add_argument("--m", type=int, default=8192)
    parser.add_argument("--k", type=int)
    parser.add_argument("--n", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--forms", default="", help="those to run, beside unchunked; default: all")
    parser.add_argument("--cpu", action="store_true", help="check the forms without timing them")
    args = parser.parse_args()
    op = OPS[args.op]
    args.k, args.n = args.k or op.sizes[0], args.n or op.sizes[1]
    communicator = Communicator.instance()
    d, rank = communicator.size(), communicator.rank()
    device = torch.device("cpu") if args.cpu else torch.device("cuda", torch.cuda.current_device())
    dtype, torch_dtype = (
        (DataType.Float, torch.float32) if args.cpu else (DataType.BFloat16, torch.bfloat16)
    )
    generator = torch.Generator(device=device).manual_seed(0)
    x = torch.randn(args.m, args.k, device=device, generator=generator).to(torch_dtype) / 8
    w = torch.randn(args.n, args.k, device=device, generator=generator).to(torch_dtype) / 8
    want = x.float() @ w.float().t()
    runs: dict[str, Run] = {}
    chosen = args.forms.split(",")
    known = {"unchunked", "auto", "chunked", *(name for name, _, _ in op.steps)}
    if args.forms and (unknown := set(chosen) - known):
        parser.error(f"--forms {', '.join(unknown)}: expected {', '.join(sorted(known))}")

    def wanted(name: str) -> bool:
        return not args.forms or name in chosen or name == "unchunked"

    for name, run, local in forms(op, d, args.m, dtype, x, w, wanted):
        (got,) = run()
        mine = local(want)
        error = ((got.float().reshape(mine.shape) - mine).norm() / mine.norm()).item()
        assert error < 1e-2, f"{name}: relative error {error}"
        runs[name] = run
    del want
    if args.cpu:
        print(f"rank {rank}: {len(runs)} forms agree")
        return
    found = take_turns_on_ranks(runs, device, rounds=ROUNDS, burst=BURST)
    base = statistics.median(found["unchunked"].ms)
    lines = Lines(args.json, rank=rank)
    for name, times in found.items():
        row = {
            "bench": "streams",
            "op": args.op,
            "gpus": d,
            "shape": f"M{args.m} K{args.k} N{args.n}",
            "form": name,
            **times.row(),
            "to_unchunked": round(statistics.median(times.ms) / base, 3),
        }
        lines.emit(row)


if __name__ == "__main__":
    main()
