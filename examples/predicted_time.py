"""Predicts the time and the memory of an MLP on 1 to 8 H200, without a GPU and without mpirun.

python examples/predicted_time.py
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fuser import DataType, FusionDefinition, Replicate, Shard, multidevice
from hostir import HostIrContainer
from hostir.tools import cli

SIZES = "i0=8192,i1=8192,i3=32768,i5=8192"  # rows, width, hidden width, width again


def mlp(ranks: int, whole: list[torch.Tensor]) -> HostIrContainer:
    """Runs the MLP on the calling rank, compares with float64, and returns the host program."""
    mesh = multidevice.DeviceMesh(range(ranks))
    with FusionDefinition() as fd:
        x, up, down = (
            fd.define_tensor(
                [-1, -1], contiguity=True, dtype=DataType.BFloat16, mesh=mesh, placements=[axis]
            )
            for axis in (Replicate(), Shard(0), Shard(1))
        )
        fd.add_output(fd.ops.linear(fd.ops.gelu(fd.ops.linear(x, up)), down))
    shards = [multidevice.shard_tensor(t, v) for t, v in zip(whole, (x, up, down), strict=True)]
    (result,) = fd.execute(shards)
    exact_x, exact_up, exact_down = (tensor.double() for tensor in whole)
    expected = torch.nn.functional.gelu(exact_x @ exact_up.T) @ exact_down.T
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=0.05)
    return fd.fec.host_program()


torch.manual_seed(0)
whole = [torch.randn(shape, dtype=torch.bfloat16) for shape in ((4, 8), (16, 8), (8, 16))]
print("ranks  predicted ms  exposed ms  GB per rank")
for ranks in (1, 2, 4, 8):
    with multidevice.simulate(ranks) as world:
        program = world.run(mlp, ranks, whole)[0]
    with TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
        file = Path(folder, "program.txt")
        file.write_text(program.full_text())
        assert not cli.main(["cost", str(file), "--machine", "h200", "--size", SIZES, "--json"])
    cost = json.loads(printed.getvalue())
    rank = cost["classes"][0]  # all ranks run the same operations
    memory = (rank["input_nbytes"] + rank["peak_nbytes"]) / 1e9
    print(f"{ranks:5}{1e3 * cost['seconds']:14.2f}{1e3 * rank['exposed']:12.2f}{memory:13.2f}")
print(program.names_text())
