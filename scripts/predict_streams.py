"""Compares the cost model with measured times: allgather + linear, linear + reduce-scatter or
allreduce.

python scripts/predict_streams.py [--machine FILE.json]

The measurements are from 2 and 4 H200. Programs are lowered at full size on simulated ranks and not
run. The measured times are:

- the lines of the files of benchmarks/results in `FILES`, of the same programs
  (`tests/hostir/cost/test_simulator_recorded.py` checks their order);
- on 4 GPUs, other programs of the same shapes: torch's matmul, NCCL's collective, both in sequence,
  and a handwritten pipeline of copy engines with inputs in symmetric memory.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import stream_time as bench
from matmul_pairs import X

from fuser import DataType, multidevice
from hostir.cost.machine_model import Machine, find_machine
from hostir.cost.report import RankTimes, predict
from hostir.cost.simulator import simulated_schedule
from hostir.ir.ops import NUMBER_OF_STREAMS
from hostir.ir.program import HostIrContainer
from hostir.lowering.input_class import Classifier
from hostir.lowering.params import DEFAULT, LowerParams
from hostir.lowering.pipeline import build_program
from hostir.runtime.inputs import InputBinder
from multidevice.sharding.queries import local_sizes

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
BF16 = DataType.BFloat16
# Measurements of stream_time.py and overlap_time.py, over NCCL and peer copies.
FILES = ("h200x2_streams", "h200x2_auto", "h200x4_streams", "h200x2_overlap", "h200x4_overlap")
# 4 GPUs, ms: op, M, K, N: matmul, NCCL, both in sequence; copy engines (None: not measured).
FOUR: dict[tuple[str, int, int, int], tuple[float, float, float, float | None]] = {
    ("ag", 8192, 8192, 32768): (1.551, 0.367, 1.952, None),
    ("ag", 8192, 8192, 28672): (1.365, 0.370, 1.738, 1.237),
    ("ag", 8192, 8192, 10240): (0.444, 0.347, 0.787, None),
    ("ag", 8192, 4096, 14336): (0.316, 0.189, 0.499, 0.352),
    ("ag", 8192, 8192, 8192): (0.353, 0.347, 0.692, 0.386),
    ("ag", 16384, 8192, 4096): (0.357, 0.660, 1.009, None),
    ("rs", 8192, 32768, 8192): (1.602, 0.360, 1.974, None),
    ("rs", 8192, 28672, 8192): (1.376, 0.359, 1.755, 1.356),
    ("rs", 8192, 8192, 8192): (0.373, 0.350, 0.720, 0.459),
    ("rs", 8192, 14336, 4096): (0.315, 0.188, 0.499, 0.359),
    ("ar", 8192, 28672, 8192): (1.277, 0.628, 1.979, None),
    ("ar", 2048, 28672, 8192): (0.313, 0.174, 0.483, None),
}


def lowered(
    op: str, form: str, params: LowerParams, d: int, m: int, k: int, n: int
) -> HostIrContainer:
    """Returns the program that stream_time would run; its inputs are never written."""

    def build() -> HostIrContainer:
        fd, x, w, _ = bench.OPS[op].define(form, d, m, k, n, BF16)
        shapes = [local_sizes(tv, [int(str(n)) for n in tv.shape()]) for tv in (x, w)]
        inputs = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
        cpu = torch.device("cpu")
        values = InputBinder(fd.fusion).bind(inputs, cpu)
        sizes = {s: v for s, v in values.items() if isinstance(v, int)}
        found = Classifier(fd.fusion).classify(inputs, sizes, cpu)
        backend = params.backend or "NCCL"
        return build_program(fd.fusion, found, backend_name=backend, params=params).program

    with multidevice.simulate(d) as world:
        return world.run(build)[0]


def in_sequence(op: str, d: int, m: int, k: int, n: int) -> HostIrContainer:
    """Returns a program of one dense collective and one linear."""
    from fuser import ops
    from hostir import Allocate, Communication, TeamOf, Wait

    mesh = multidevice.DeviceMesh(range(d))
    team = TeamOf(mesh, (X,))
    hic = HostIrContainer()
    with hic:
        if op == "ag":
            shape = [d, m // d, k]
            x, y = hic.input(shape, BF16, mesh=mesh), hic.tensor([m, k], BF16, mesh=mesh)
            x.axis(0).parallelize(X)
            w = hic.input([n // d, k], BF16)
            hic.append(Allocate(y), Communication(y, y, number=0, type="Allgather", team=team))
            hic.ops = (*hic.ops[:-1], hic.ops[-1].replace(inp=x))
            out = ops.linear(y, w)
            hic.append(Wait(0), out)
        else:
            x, w = hic.input([m, k // d], BF16), hic.input([n, k // d], BF16)
            part = ops.linear(x, w)
            hic.append(part)
            part.set_device_mesh(mesh)
            rows = m // d if op == "rs" else m
            out = hic.tensor([rows, n], BF16, mesh=mesh)
            kind = "ReduceScatter" if op == "rs" else "Allreduce"
            hic.append(Allocate(out), Communication(part, out, number=0, type=kind, team=team))
            hic.append(Wait(0))
        hic.add_output(out)
    return hic


def times(program: HostIrContainer, machine: Machine, streams: int = 4) -> RankTimes:
    """Returns the predicted times of a program on its slowest rank."""
    made = simulated_schedule(program, {NUMBER_OF_STREAMS: streams}, machine)
    return predict(program, made).classes[0]


@dataclass(frozen=True)
class Recorded:
    """A line of a file: the program, and the median, smallest and largest of its rounds, in ms.

    `run` names the file and which of its runs: times of one run may be compared.
    """

    run: str
    op: str
    gpus: int
    shape: tuple[int, int, int]
    form: str
    ms: float
    smallest: float
    largest: float

    def __str__(self) -> str:
        m, k, n = self.shape
        return f"{self.op}, {self.gpus} GPUs, {m} x {k} x {n}, {self.form}"


def recorded() -> list[Recorded]:
    """Returns the lines of all files whose programs this script can lower."""
    found: list[Recorded] = []
    for name in FILES:
        runs = 0
        for line in (RESULTS / f"{name}.jsonl").read_text().splitlines():
            row = json.loads(line)
            runs += "described" in row
            form = row.get("form") or {"as_defined": "unchunked", "copies": "copies"}.get(
                row.get("method", "")
            )
            if form in (None, "auto") or row.get("op") not in bench.OPS or "ms" not in row:
                continue
            if "form" in row:
                m, k, n = (int(size[1:]) for size in row["shape"].split())
            else:
                m, k, n = row["m"], row["k"], row["n"]
            shape = m, k, n
            numbers = (row["ms"], row["min"], row["max"])
            found.append(Recorded(f"{name} {runs}", row["op"], row["gpus"], shape, form, *numbers))
    return found


@functools.cache
def _program(op: str, gpus: int, shape: tuple[int, int, int], form: str) -> HostIrContainer:
    steps = {name: (made, params) for name, made, params in bench.OPS[op].steps}
    usual = "unchunked" if form == "unchunked" else "chunked"
    made, params = steps.get(form, (usual, DEFAULT))
    program = lowered(op, made, params, gpus, *shape)
    return bench.with_head_wait_inside(program) if form.startswith("head wait") else program


def predicted_ms(row: Recorded, machine: Machine) -> float:
    """Returns the predicted time of the program of a line."""
    is_chunked = row.form.startswith("chunked on")
    streams = int(row.form.split()[2]) if is_chunked else 4
    program = _program(row.op, row.gpus, row.shape, "chunked" if is_chunked else row.form)
    return times(program, machine, streams).seconds * 1e3


def show(name: str, predicted: float, measured: float, errors: list[float]) -> None:
    """Prints a row of the table, and appends its error."""
    ratio = predicted / measured
    errors.append(abs(ratio - 1))
    mark = "" if errors[-1] <= 0.15 else "  *"
    print(f"| {name} | {predicted:.2f} | {measured:.2f} | {ratio:.2f}{mark} |")


def main() -> None:
    """Prints the table of predicted and measured times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", default="h200")
    machine = find_machine(parser.parse_args().machine)
    errors: list[float] = []
    print("| program | predicted, ms | measured, ms | ratio (* beyond 15 %) |\n|---|---|---|---|")
    for row in recorded():
        show(str(row), predicted_ms(row, machine), row.ms, errors)
    for (op, m, k, n), (matmul, nccl, both, copies) in FOUR.items():
        one = times(in_sequence(op, 4, m, k, n), machine)
        name = f"{op}, 4 GPUs, {m} x {k} x {n}"
        show(f"{name}, matmul", one.compute * 1e3, matmul, errors)
        show(f"{name}, NCCL", one.communication * 1e3, nccl, errors)
        show(f"{name}, in sequence", one.seconds * 1e3, both, errors)
        if copies is not None:
            form, params = next((f, p) for name, f, p in bench.OPS[op].steps if name == "copies")
            program = lowered(op, form, params, 4, m, k, n)
            show(f"{name}, copies", times(program, machine).seconds * 1e3, copies, errors)
    inside = sum(e <= 0.15 for e in errors)
    print(f"\n{inside} of {len(errors)} within 15 %, median {statistics.median(errors):.1%}")


if __name__ == "__main__":
    main()
