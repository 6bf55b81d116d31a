"""Runs benchmarks/overlap_time.py with planted wrong results, which it must report.

The second rank's results are wrong if they come from peer copies in steps. With WRONG=scatter,
torch's reduce-scatter is wrong on all ranks, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import overlap_time

from fuser import FusionDefinition
from fuser.multidevice import Communicator

execute, scatter = FusionDefinition.execute, dist.reduce_scatter_tensor


def wrong(fd: FusionDefinition, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    found = execute(fd, inputs)
    moved = {getattr(op, "backend", "") for op in fd.fec.host_program().started()}
    if "CUDA" in moved and Communicator.instance().rank() == 1:
        return [x + 1 for x in found]
    return found


def doubled(out: torch.Tensor, inp: torch.Tensor) -> None:
    scatter(out, inp)
    out.mul_(2)


if __name__ == "__main__":
    if os.environ.get("WRONG") == "scatter":
        dist.reduce_scatter_tensor = doubled
    FusionDefinition.execute = wrong  # pyright: ignore[reportAttributeAccessIssue]
    overlap_time.main()
