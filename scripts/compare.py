"""Times the kernels of two checkouts in turns, on one GPU.

`python scripts/compare.py OTHER_CHECKOUT [--json FILE] [--shapes 16384x8192,...]`

One worker process per checkout captures the calls of a program in a CUDA graph, as `bench.py` does.
The graphs are replayed in turns. Reported per program are the median, minimum and maximum of 25
ratios (this checkout's time over the other's), and at the end the geometric mean of the medians.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPES = ((16384, 8192), (32768, 1024), (8192, 1536), (4096, 4096))
TURNS, WARM_UPS = 25, 5


# ------------------------------------------------------------------ programs
def softmax(fd: Any, x: Any) -> Any:
    """Defines softmax of a bfloat16 matrix."""
    from fuser import DataType

    ops = fd.ops
    wide = ops.cast(x, DataType.Float)
    e = ops.exp(ops.sub(wide, ops.max(wide, dims=[1], keepdim=True)))
    return ops.cast(ops.div(e, ops.sum(e, dims=[1], keepdim=True)), DataType.BFloat16)


def layer_norm_alone(fd: Any, x: Any) -> Any:
    """Defines a layer norm without weights of a bfloat16 matrix."""
    from fuser import DataType

    ops = fd.ops
    wide = ops.cast(x, DataType.Float)
    var, mean = ops.var_mean(wide, [1], 0, True)
    normal = ops.mul(ops.sub(wide, mean), ops.rsqrt(ops.add(var, 1e-5)))
    return ops.cast(normal, DataType.BFloat16)


def column_max(fd: Any, x: Any) -> Any:
    """Defines the maximum of each column."""
    return fd.ops.max(x, dims=[0])


def programs() -> dict[str, Callable[..., Any]]:
    """Returns the definitions by name: the main ones of `bench.py` and three more."""
    import bench

    found: dict[str, Callable[..., Any]] = {n: bench.PATTERNS[n].build for n in bench.MAIN}
    return {
        **found,
        "softmax": softmax,
        "layer_norm_alone": layer_norm_alone,
        "column_max": column_max,
    }


# ------------------------------------------------------------------ one checkout
def work() -> None:
    """Answers requests, one JSON line each: a program and shape to prepare, or a replay."""
    import bench
    import torch

    replay: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        if request is None:
            replay.run()
            print(json.dumps(replay.seconds.pop()), flush=True)
            continue
        name, (m, n) = request
        known = bench.PATTERNS.get(name)
        dtype = torch.bfloat16
        operands = known.operands(m, n, dtype) if known else [bench.Operand((m, n), dtype)]
        nbytes = known.nbytes(m, n, dtype) if known else 4 * m * n
        torch.manual_seed(0)
        sets = [tuple(o.make("cuda") for o in operands) for _ in range(bench.set_count(nbytes))]
        fd = bench.define(programs()[name], operands)
        replay = None
        torch.cuda.empty_cache()
        replay = bench.Replay(lambda *a, fd=fd: fd.execute(a), sets)
        print(json.dumps(fd.fec.statistics()["kernels"]), flush=True)


class Worker:
    """The worker process of one checkout."""

    def __init__(self, checkout: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--work"],
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: object) -> Any:
        """Returns the answer to one request."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended: {request}")
        return json.loads(line)


def main() -> int:
    """Compares the two checkouts, and prints a row for each program and shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", nargs="?", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shapes", default=",".join(f"{m}x{n}" for m, n in SHAPES))
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work()
        return 0
    mine, other = Worker(Path(__file__).resolve().parents[1]), Worker(args.other.resolve())
    rows: list[dict[str, Any]] = []
    for name in programs():
        for shape in ([int(v) for v in s.split("x")] for s in args.shapes.split(",")):
            kernels = [w.ask([name, shape]) for w in (mine, other)]
            pairs = [(mine.ask(None), other.ask(None)) for _ in range(WARM_UPS + TURNS)][WARM_UPS:]
            ratios = [a / b for a, b in pairs]
            row = {
                "bench": "compare",
                "program": name,
                "shape": shape,
                "kernels": kernels,
                "us": [round(statistics.median(t) * 1e6, 2) for t in zip(*pairs, strict=True)],
                "ratio": round(statistics.median(ratios), 4),
                "ratio_min": round(min(ratios), 4),
                "ratio_max": round(max(ratios), 4),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    mean = math.exp(statistics.fmean(math.log(r["ratio"]) for r in rows))
    worst = max(r["ratio"] for r in rows)
    rows.append({"bench": "compare", "geomean": round(mean, 4), "worst": worst})
    print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
