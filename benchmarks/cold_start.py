"""Times a fresh process until the first result of one encoder layer, in phases; for
`bench_cold.py`.

python benchmarks/cold_start.py DEVICE    prints one JSON object: seconds by phase

`seconds` has the phases that this project adds to a program of torch; `torch_s` has those that any
program of torch has.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

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
    sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
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
    phases = {phase: end - start for (_, start), (phase, end) in pairwise(marks)}
    heavy = ("torch._dynamo", "torch._inductor", "sympy", "torch.distributed")
    return {
        "seconds": {phase: phases.pop(phase) for phase in OWN_PHASES},
        "torch_s": round(sum(phases.pop(phase) for phase in TORCH_PHASES), 4),
        **{f"{phase}_s": round(seconds, 4) for phase, seconds in phases.items()},
        "imported": [name for name in heavy if name in sys.modules],
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
