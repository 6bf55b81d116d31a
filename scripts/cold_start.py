"""Times a fresh process until the first result of one encoder layer, in phases, for `bench.py
cold`.

python scripts/cold_start.py DEVICE    prints one JSON object: seconds by phase
"""

from __future__ import annotations

import compileall
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from lowering_time import run_fresh

BATCH, TOKENS = 8, 128
# The phases of torch itself, and those that this project adds.
TORCH_PHASES = ("import_torch", "device")
OWN_PHASES = ("import", "define", "first_result")


def measure(device: str) -> dict[str, Any]:
    """Returns the seconds of each phase in this process."""
    marks = [("", time.perf_counter())]

    def mark(phase: str) -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        marks.append((phase, time.perf_counter()))

    import torch

    marks.append(("import_torch", time.perf_counter()))
    # The device's context and its matrix library: any torch program pays for them.
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    square = torch.ones(64, 64, device=device, dtype=dtype)
    torch.addmm(square[0], square, square)
    mark("device")
    import minilm

    from fuser import DataType
    from fuser.multidevice import DeviceMesh

    mark("import")
    layer = minilm.encoder_layer(
        DeviceMesh([0]), DataType.BFloat16 if device == "cuda" else DataType.Float
    )
    mark("define")
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (_, n, k, _) in minilm.LINEARS.items():
        shapes |= {f"{name}.weight": (n, k), f"{name}.bias": (n,)}
    for name in minilm.NORMS:
        shapes |= {f"{name}.weight": (minilm.HIDDEN,), f"{name}.bias": (minilm.HIDDEN,)}
    weights = {k: torch.full(s, 0.01, dtype=dtype, device=device) for k, s in shapes.items()}
    x = torch.ones(BATCH, TOKENS, minilm.HIDDEN, dtype=dtype, device=device)
    mask = torch.zeros(BATCH, 1, 1, TOKENS, device=device)
    inputs = [x, mask, *layer.bind(weights, device)]
    mark("inputs")
    layer.fd.execute(inputs)
    mark("first_result")
    layer.fd.execute(inputs)
    mark("second_result")
    found: dict[str, Any] = {phase: end - start for (_, start), (phase, end) in pairwise(marks)}
    heavy = ("torch._dynamo", "torch._inductor", "sympy", "torch.distributed")
    found["imported"] = [name for name in heavy if name in sys.modules]
    return found


def bench_cold(device: str, repeats: int = 5) -> list[dict[str, Any]]:
    """Returns medians over fresh processes, with an empty kernel cache and with a filled one."""
    rows: list[dict[str, Any]] = []
    # Compile the bytecode, as pip does for installed packages.
    for package in ("fuser", "multidevice", "hostir", "scripts"):
        compileall.compile_dir(Path(__file__).parents[1] / package, quiet=1)
    with tempfile.TemporaryDirectory() as filled:
        run_fresh(__file__, device, FUSER_CACHE_DIR=filled)
        for kind in ("cold", "warm"):
            found: list[dict[str, Any]] = []
            for _ in range(repeats):
                with tempfile.TemporaryDirectory() as empty:
                    folder = empty if kind == "cold" else filled
                    found.append(run_fresh(__file__, device, FUSER_CACHE_DIR=folder))
            row: dict[str, Any] = {"bench": "cold", "device": device, "kernel_cache": kind}
            row |= {
                f"{phase}_s": round(statistics.median(f[phase] for f in found), 4)
                for phase in found[0]
                if phase != "imported"
            }
            own = [sum(f[p] for p in OWN_PHASES) for f in found]
            torchs = [sum(f[p] for p in TORCH_PHASES) for f in found]
            row["own_s"] = round(statistics.median(own), 4)
            row["own_spread_s"] = round(max(own) - min(own), 4)
            row["torch_s"] = round(statistics.median(torchs), 4)
            row["imported"] = found[0]["imported"]
            rows.append(row)
            print(
                f"{device} {kind} cache: {row['own_s']:.3f} s from `import fuser` to the first "
                f"result (spread {row['own_spread_s']:.3f}; import {row['import_s']:.3f}, define "
                f"{row['define_s']:.3f}, execute {row['first_result_s']:.3f}); torch itself "
                f"{row['torch_s']:.3f}; second call {1e3 * row['second_result_s']:.2f} ms"
            )
    return rows


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
