"""Tensor-parallel MLPs on 1-D, 2x2 and 1x2x2 meshes, checked on simulated and real ranks.

Tests run it on simulated ranks and under mpirun; torchrun runs it as a script:

    torchrun --standalone --nproc-per-node 4 tests/support/rank_programs/mlp.py [--device cuda]

Every rank builds the same global tensors from one seed, runs its shards, and compares its part of
the result with torch in float64.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from typing import Any

import torch

from fuser import DataType, FusionDefinition, ParallelType
from fuser.multidevice import Communicator, DeviceMesh, shard_tensor

BATCH, TOKENS, HIDDEN = 4, 8, 16
X, Y = ParallelType.mesh_x, ParallelType.mesh_y
MESHES = {
    "1-D": [0, 1, 2, 3],
    "2x2": [[0, 1], [2, 3]],
    "1x2x2": [[[0, 1], [2, 3]]],
}


@dataclass(frozen=True)
class Case:
    """A program, and the type and team of each communication that it must have, in order."""

    name: str
    mesh: str
    sequence_parallel: bool
    expected: tuple[tuple[str, str], ...]


def _team(mesh: str, ptype: str = "mesh_x") -> str:
    return "(0 1 2 3)" if mesh == "1-D" else f"{ptype} of {DeviceMesh(MESHES[mesh])}"


CASES = tuple(
    Case(f"{kind} on {mesh}", mesh, kind == "sequence", tuple((c, _team(mesh)) for c in comms))
    for mesh in MESHES
    for kind, comms in (
        ("sequence", ("Allgather", "ReduceScatter")),
        ("data and tensor", ("Allreduce",)),
    )
)


def shard(tv: Any, mesh: DeviceMesh, axis: int | None = None, ptype: ParallelType = X) -> None:
    """Puts a tensor on the mesh: replicated, or with a loop axis cut over one mesh dimension."""
    tv.set_device_mesh(mesh)
    if axis is not None:
        tv.outer_split(axis, mesh.size_of(ptype))
        tv.axis(axis).parallelize(ptype)


def define(case: Case, mesh: DeviceMesh) -> tuple[FusionDefinition, list[Any], Any]:
    """Defines an MLP of x [b, t, h], linear, gelu, linear, with weights cut over mesh_x.

    Tokens are cut over mesh_x at both ends for sequence parallelism, and replicated otherwise. The
    batch is cut over mesh_y if the mesh has it (data parallelism).
    """
    with FusionDefinition() as fd:
        ops = fd.ops
        x = fd.define_tensor([-1, -1, HIDDEN], contiguity=True, dtype=DataType.Double)
        w1 = fd.define_tensor([4 * HIDDEN, HIDDEN], contiguity=True, dtype=DataType.Double)
        b1 = fd.define_tensor([4 * HIDDEN], contiguity=True, dtype=DataType.Double)
        w2 = fd.define_tensor([HIDDEN, 4 * HIDDEN], contiguity=True, dtype=DataType.Double)
        b2 = fd.define_tensor([HIDDEN], contiguity=True, dtype=DataType.Double)
        up = ops.linear(x, w1, b1)
        active = ops.mul(ops.mul(up, 0.5), ops.add(ops.erf(ops.mul(up, 0.5**0.5)), 1.0))
        out = ops.linear(active, w2, b2)
        fd.add_output(out)
        for tv in (x, out):
            shard(tv, mesh)
            if mesh.ndim > 1:
                shard(tv, mesh, 0, Y)
            if case.sequence_parallel:
                shard(tv, mesh, 1 if mesh.ndim == 1 else 2)
        shard(w1, mesh, 0)
        shard(b1, mesh, 0)
        shard(w2, mesh, 1)
        shard(b2, mesh)
    return fd, [x, w1, b1, w2, b2], out


def communications(text: str) -> list[tuple[str, str]]:
    """Returns type and team of every communication in a program's text."""
    found = re.findall(r"Communication \d+ \(type=(\w+), team=(.*?), (?:root|input)=", text)
    return [(kind, team) for kind, team in found]


def check(case: Case, device: str = "cpu") -> None:
    """Runs one case on this rank, with and without overlap, and compares with torch in float64.

    The expected communications are those of the program without overlap.
    """
    mesh = DeviceMesh(MESHES[case.mesh])
    fd, tensors, out = define(case, mesh)
    generator = torch.Generator().manual_seed(7)
    shapes = ((BATCH, TOKENS, HIDDEN), (4 * HIDDEN, HIDDEN), (4 * HIDDEN,))
    shapes = (*shapes, (HIDDEN, 4 * HIDDEN), (HIDDEN,))
    full = [torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes]
    x, w1, b1, w2, b2 = full
    linear, gelu = torch.nn.functional.linear, torch.nn.functional.gelu
    expected = linear(gelu(linear(x, w1, b1)), w2, b2)
    local = [shard_tensor(t, tv).to(device) for t, tv in zip(full, tensors, strict=True)]
    for disabled in ([], ["auto_overlap"]):
        (got,) = fd.execute(local, _disable_options=disabled)
        torch.testing.assert_close(got.cpu(), shard_tensor(expected, out), rtol=1e-10, atol=1e-10)
    found = communications(str(fd.fec.host_program()))
    assert found == list(case.expected), f"{case.name}: {found} is not {case.expected}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    comm = Communicator.instance()
    device = args.device
    if device == "cuda":
        device = f"cuda:{torch.cuda.current_device()}"
    for case in CASES:
        check(case, device)
    if comm.rank() == 0:
        print(f"{len(CASES)} programs on {comm.size()} ranks: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
