"""Times matmuls next to communications: ours, torch's async-TP, and the bounds of both, in one run.

mpirun -np N python3 benchmarks/overlap_time.py [--json F] [--shapes l70b_up,sp_mlp]
    [--methods auto,async_tp] [--rounds 12] [--budget 150] [--cpu]

Shapes are [M, K] x [K, N] of a layer whose weight is cut over the ranks:

- ag: x is gathered by rows.
- rs, ar: the sum over the ranks is cut by rows, or whole.
- mlp: M tokens of width K, with N inside; rows are gathered before it and cut after it.

Methods:

- mm: only the matmuls, by cuBLAS.
- nccl: only the collectives.
- seq: eager torch, one after the other.
- async_tp: torch.ops.symm_mem; for ar the better of its two (symm_two_shot, async_tp_rs+ag).
- as_defined: our definition without steps (FUSER_DISABLE=auto_overlap).
- auto: our definition as users run it, in the steps that the cost model chooses.
- copies: steps in the definition, by peer copies (FUSER_ENABLE=peer_copies).

Our methods are called by `FusionDefinition.execute`. The times are measured by `turns.take_turns`;
`ms` is the median over the rounds of the slowest rank. First, each method's result is compared with
seq's, and rows of seq's with float64. A method that is wrong or raises on any rank is left out on
all ranks, with a message.

- `to_roof`: the time divided by the larger of mm and nccl.
- `async_tp_to_it`: async-TP's time divided by this one's.
- `predicted_ms`: the cost model's time for our program.
- `report_ms`: the sum of the overlap report's times of the chosen candidates.

Budget: a shape that might not end within the budget is not started; the remaining shapes are
printed. --cpu: CPU ranks, small sizes, gloo; its times mean nothing.
"""

# ruff: noqa: E402
from __future__ import annotations

import os
import time

BEGAN = time.monotonic()
# Before torch is imported. NVLink multicast stays off (docs/architecture.md, D9).
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")

import argparse
import gc
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matmul_pairs
import torch
import torch.distributed as dist
import torch_peers
from torch_peers import Run
from turns import Lines, Times, take_turns_on_ranks

from fuser import DataType, FusionDefinition
from fuser.multidevice import Communicator
from hostir.cost.machine_model import H200, Machine, machine_of
from hostir.cost.report import predict
from hostir.cost.simulator import simulated_schedule
from hostir.ir.ops import NUMBER_OF_STREAMS, CollectivePermute, Communication, P2PCommunication

# The length of a burst, and the longest time of a shape (fewer rounds are made then).
BURST_S, SHAPE_S, FIRST_S = 0.025, 8.0, 4.0
FLOPS = 700e12
SAMPLES = 16
TOLERANCES = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
STREAMS = 4


@dataclass(frozen=True)
class Shape:
    """An operation of `OPS`, and its sizes."""

    op: str
    m: int
    k: int
    n: int


SHAPES = {
    "nvf_col": Shape("ag", 8192, 8192, 32768),
    "ddlb": Shape("ag", 32768, 16384, 32768),
    "l70b_up": Shape("ag", 8192, 8192, 28672),
    "l70b_qkv": Shape("ag", 8192, 8192, 10240),
    "l8b_up": Shape("ag", 8192, 4096, 14336),
    "quack_8k": Shape("ag", 8192, 8192, 8192),
    "gpt3_up": Shape("ag", 2048, 12288, 49152),
    "small_m": Shape("ag", 1024, 8192, 28672),
    "commbound": Shape("ag", 16384, 8192, 4096),
    "nvf_row": Shape("rs", 8192, 32768, 8192),
    "l70b_down": Shape("rs", 8192, 28672, 8192),
    "l70b_o": Shape("rs", 8192, 8192, 8192),
    "l8b_down": Shape("rs", 8192, 14336, 4096),
    "gpt3_down": Shape("rs", 2048, 49152, 12288),
    "rs_small_m": Shape("rs", 1024, 28672, 8192),
    "ar_l70b_down": Shape("ar", 8192, 28672, 8192),
    "ar_2k": Shape("ar", 2048, 28672, 8192),
    "ar_decode": Shape("ar", 64, 28672, 8192),
    "sp_mlp": Shape("mlp", 8192, 8192, 28672),
}


@dataclass(frozen=True)
class Op:
    """An operation: our definition and torch's methods.

    - `copies`: the form of our definition for the method `copies`.
    - `gathers`, `sums`: whether rows are gathered before the first matmul, and summed after the
      last.
    - `cuts_rows`: whether the result is cut by rows.
    - `matmuls`: the number of matmuls.
    """

    define: Callable[..., matmul_pairs.Defined]
    peers: Callable[..., dict[str, Run]]
    copies: str
    gathers: bool
    sums: bool
    cuts_rows: bool
    matmuls: int = 1


OPS = {
    "ag": Op(matmul_pairs.define_gather, torch_peers.gather, "permutes", True, False, False),
    "rs": Op(matmul_pairs.define_scatter, torch_peers.scatter, "exchange", False, True, True),
    "ar": Op(matmul_pairs.define_allreduce, torch_peers.allreduce, "exchange", False, True, False),
    "mlp": Op(matmul_pairs.define_mlp, torch_peers.mlp, "", True, True, True, 2),
}
# Our methods: whether they use the form of the copies, and their options.
OURS: dict[str, tuple[bool, dict[str, str]]] = {
    "as_defined": (False, {"FUSER_DISABLE": "auto_overlap"}),
    "auto": (False, {}),
    "copies": (True, {"FUSER_ENABLE": "peer_copies"}),
}
ASYNC = ("async_tp", "async_tp_rs+ag", "symm_two_shot")
PEERS = ("mm", "nccl", "seq", *ASYNC)


class Bench:
    """The settings for all shapes (ranks, device), and the rows."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.communicator = Communicator.instance()
        self.rank, self.size = self.communicator.rank(), self.communicator.size()
        self.is_cpu, self.rounds, self.budget_s = args.cpu, args.rounds, args.budget
        self.methods = args.methods
        self.device = torch.device("cpu")
        self.dtype, self.torch_dtype = DataType.Float, torch.float32
        if not self.is_cpu:
            self.device = torch.device("cuda", torch.cuda.current_device())
            self.dtype, self.torch_dtype = DataType.BFloat16, torch.bfloat16
        self.machine: Machine = machine_of(self.device) or H200
        labels = {"bench": "overlap_time", "gpus": self.size}
        if self.is_cpu:
            labels["device"] = "cpu"
        self.lines = Lines(args.json, rank=self.rank, **labels)
        torch_peers.connect(self.device)

    def emit(self, **row: Any) -> None:
        """Prints a row and appends it to the file, on the first rank."""
        self.lines.emit(row)

    def why_not(self, error: str) -> str:
        """Returns the first error among the ranks, "" where none has one."""
        found = [text.decode() for text in self.communicator.exchange(error.encode())]
        return next((f"rank {rank}: {text}" for rank, text in enumerate(found) if text), "")

    def elapsed_s(self) -> float:
        """Returns the seconds since the last rank began."""
        mine = repr(time.monotonic() - BEGAN).encode()
        return max(map(float, self.communicator.exchange(mine)))

    # ------------------------------------------------------------ one shape
    def run(self, name: str, shape: Shape) -> None:
        """Checks and times all methods on one shape."""
        began = time.monotonic()
        op = OPS[shape.op]
        inputs = self.inputs(shape)
        peers = op.peers(*inputs)
        runs: dict[str, Run] = {}
        ours: dict[str, FusionDefinition] = {}
        want = peers["seq"]().clone()
        self.check_rows(op, inputs, want)

        def add(method: str, run: Run) -> bool:
            """Adds a method if its result is right on all ranks; returns whether it is."""
            error = ""
            try:
                error = difference(run(), want, TOLERANCES[self.torch_dtype])
            except Exception as caught:  # any error of a library is reported in its row
                error = f"{type(caught).__name__}: {caught}"[:300]
            if why := self.why_not(error):
                self.emit(shape=name, op=shape.op, method=method, skipped=why)
                return False
            runs[method] = run
            return True

        for method, run in peers.items():
            if method in ("mm", "nccl"):  # parts of seq, whose result was checked
                runs[method] = run
            elif method in self.methods and not (self.is_cpu and method in ASYNC):
                add(method, run)
        for method, (is_in_steps, options) in OURS.items():
            form = op.copies if is_in_steps else "unchunked"
            if method not in self.methods or not form:
                continue
            if self.is_cpu and method == "auto":
                options = {"FUSER_ENABLE": "machine(h200)"}
            fd = op.define(form, self.size, shape.m, shape.k, shape.n, self.dtype)[0]
            with environment(options):
                is_right = add(method, lambda fd=fd: fd.execute(inputs)[0])
            if is_right:
                ours[method] = fd
        flops = op.matmuls * 2 * shape.m * shape.k * shape.n / self.size
        burst = max(2, min(8, int(BURST_S / (flops / FLOPS))))
        left = SHAPE_S - (time.monotonic() - began)
        found = take_turns_on_ranks(
            runs, self.device, rounds=self.rounds, burst=burst, limit_s=left
        )
        said = {method: self.said_of(method, fd, inputs) for method, fd in ours.items()}
        self.report(name, shape, found, said, burst)

    def inputs(self, shape: Shape) -> list[torch.Tensor]:
        """Returns this rank's shards."""
        m, k, n, d = shape.m, shape.k, shape.n, self.size
        sizes = {
            "ag": [(m // d, k), (n // d, k)],
            "rs": [(m, k // d), (n, k // d)],
            "ar": [(m, k // d), (n, k // d)],
            "mlp": [(m // d, k), (n // d, k), (k, n // d)],
        }[shape.op]
        generator = torch.Generator(device=self.device).manual_seed(self.rank)
        make = {"device": self.device, "dtype": self.torch_dtype, "generator": generator}
        # Results of a magnitude of one: sums over K of products of inputs and weights.
        (first, *weights) = [torch.randn(size, **make) for size in sizes]
        return [first, *(w.mul_(k**-0.5) for w in weights)]

    def check_rows(self, op: Op, inputs: Sequence[torch.Tensor], got: torch.Tensor) -> None:
        """Compares some rows of the result with float64; raises AssertionError."""
        x, *weights = inputs
        m = len(x) * (self.size if op.gathers else 1)
        rows = torch.arange(0, m, max(1, m // SAMPLES), device=self.device)
        if op.gathers:
            want = _own(rows, len(x), self.rank)
            sample = torch.zeros(len(rows), x.shape[1], dtype=torch.float64, device=self.device)
            sample[want] = x[rows[want] - self.rank * len(x)].double()
            dist.all_reduce(sample)
        else:
            sample = x[rows].double()
        for number, w in enumerate(weights):
            sample = torch.nn.functional.gelu(sample) if number else sample
            sample = sample @ w.double().t()
        if op.sums:
            dist.all_reduce(sample)
        if op.cuts_rows:
            mine = _own(rows, len(got), self.rank)
            rows, sample = rows[mine] - self.rank * len(got), sample[mine]
        why = self.why_not(difference(got[rows], sample, TOLERANCES[self.torch_dtype]))
        assert not why, f"NCCL, then cuBLAS, against float64: {why}"

    # ------------------------------------------------------------ the cost model
    def said_of(
        self, method: str, fd: FusionDefinition, inputs: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        """Returns facts about the program that runs: its predicted time and the overlap report.

        Also its communications, and the CUDA graphs that repeat it.
        """
        program = fd.fec.host_program()
        made = simulated_schedule(program, {NUMBER_OF_STREAMS: STREAMS}, self.machine)
        seconds = max(one.seconds for one in predict(program, made).classes)
        row: dict[str, Any] = {"predicted_ms": round(seconds * 1e3, 4)}
        if method == "auto":
            row.update(reported(fd.overlap_report(inputs)))
        moves = {
            f"{getattr(op, 'type', type(op).__name__)} by {op.backend}"
            for op in program.started()
            if isinstance(op, Communication | P2PCommunication | CollectivePermute)
        }
        return {**row, "moves": sorted(moves), "graphs": fd.cuda_graphs()}

    # ------------------------------------------------------------ rows
    def report(
        self,
        name: str,
        shape: Shape,
        found: Mapping[str, Times],
        said: Mapping[str, dict[str, Any]],
        burst: int,
    ) -> None:
        """Emits a row for each method of a shape."""
        medians = {method: statistics.median(times.ms) for method, times in found.items()}
        roof = max(medians["mm"], medians["nccl"])
        rivals = [medians[method] for method in ASYNC if method in medians]
        for method, times in found.items():
            row = times.row()
            row["host_us"] = round(statistics.median(times.host_us), 1)
            row["to_roof"] = round(medians[method] / roof, 3)
            if rivals:
                row["async_tp_to_it"] = round(min(rivals) / medians[method], 3)
            for key in ("predicted", "report"):
                if f"{key}_ms" in (facts := said.get(method, {})):
                    row[f"{key}_to_measured"] = round(facts[f"{key}_ms"] / medians[method], 3)
            self.emit(
                shape=name,
                **vars(shape),
                method=method,
                **row,
                rounds=len(times.ms),
                burst=burst,
                **said.get(method, {}),
            )

    def summarize(self) -> None:
        """Emits summary rows for each of our methods, over groups of operations."""
        for ops in (("ag", "rs"), ("ag",), ("rs",), ("ar",), ("mlp",)):
            for method in OURS:
                rows = [
                    r for r in self.lines.rows if r.get("op") in ops and r.get("method") == method
                ]
                rows = [r for r in rows if "ms" in r]
                if rows:
                    self.emit(summary="+".join(ops), method=method, **summary_of(rows))


def _own(rows: torch.Tensor, count: int, rank: int) -> torch.Tensor:
    """Returns which rows are among the `count` rows of a rank."""
    return rows // count == rank


def difference(got: torch.Tensor, want: torch.Tensor, limit: float) -> str:
    """Returns what is wrong with a result; "" if it is right."""
    if got.shape != want.shape:
        return f"the result is {list(got.shape)}, expected {list(want.shape)}"
    kind = torch.promote_types(want.dtype, torch.float32)
    error = ((got.to(kind) - want.to(kind)).norm() / want.to(kind).norm()).item()
    # NaN must count as wrong, too.
    return "" if error < limit else f"relative error {error:.2e}, at most {limit:.0e} expected"


def reported(report: str) -> dict[str, Any]:
    """Returns the candidates in an overlap report with their predicted milliseconds, and the chosen
    ones.

    `report_ms` is the sum of the times of the chosen candidates.
    """
    candidates: list[dict[str, float]] = []
    chosen: list[str] = []
    total = 0.0
    for name, ms, mark in _CANDIDATE.findall(report):
        name = name.partition(_ESTIMATED)[0]
        if name == AS_IT_IS:
            candidates.append({})
        candidates[-1][name] = float(ms)
        if mark:
            chosen.append(name)
            total += float(ms)
    row = {"candidates": candidates, "chosen": chosen}
    return {**row, "report_ms": round(total, 4)} if chosen else row


# The name of the first candidate of each pair in a report; see docs/explanation/cost-model.md.
AS_IT_IS = "as it is"
# The text in a report where a library's time is estimated from another's numbers.
_ESTIMATED = " by the numbers of "
_CANDIDATE = re.compile(r"^  (\S.*?) +(\d+\.\d+) ms(   <- chosen)?$", re.MULTILINE)


def summary_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns geometric means and the worst of the ratios of some shapes."""
    out: dict[str, Any] = {"shapes": len(rows)}
    for key, worst in (("async_tp_to_it", min), ("to_roof", max)):
        found = {row["shape"]: row[key] for row in rows if key in row}
        if found:
            name = worst(found, key=lambda shape: found[shape])
            out[key] = round(statistics.geometric_mean(found.values()), 3)
            out[f"worst_{key}"] = found[name]
            out[f"worst_{key}_shape"] = name
    for key in ("predicted_to_measured", "report_to_measured"):
        found = [row[key] for row in rows if key in row]
        if found:
            within = sum(abs(ratio - 1) <= 0.15 for ratio in found)
            out[f"{key}_within_15%"] = f"{within} of {len(found)}"
            out[f"{key}_range"] = [min(found), max(found)]
    return out


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets variables that a definition reads at its first run; later calls then need no
    options.
    """
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def small(shape: Shape, d: int) -> Shape:
    """Returns a shape of the same kind for CPU ranks."""
    m, k, n = (8 * d * max(1, size // 4096) for size in (shape.m, shape.k, shape.n))
    return Shape(shape.op, m, k, n)


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Returns a function that reads a list of known names."""

    def read(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(
                f"{', '.join(unknown)}: expected some of {', '.join(known)}"
            )
        return found

    return read


def main() -> None:
    """Prints the rows of the shapes of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shapes", type=names([*SHAPES]), default=[*SHAPES])
    known = [*PEERS, *OURS]
    parser.add_argument("--methods", type=names(known), default=known)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--budget", type=float, default=150, help="seconds")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    bench = Bench(args)
    bench.emit(
        torch=torch.__version__,
        machine="cpu" if args.cpu else torch.cuda.get_device_name(),
        described=bench.machine.name,
    )
    longest_s = FIRST_S
    for number, name in enumerate(args.shapes):
        began_s = bench.elapsed_s()
        if began_s + longest_s > args.budget:
            bench.emit(budget_s=args.budget, left=args.shapes[number:])
            break
        shape = small(SHAPES[name], bench.size) if args.cpu else SHAPES[name]
        bench.run(name, shape)
        gc.collect()
        if not args.cpu:
            torch.cuda.empty_cache()
        longest_s = max(longest_s, bench.elapsed_s() - began_s)
    bench.summarize()
    bench.emit(seconds=round(bench.elapsed_s(), 1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
