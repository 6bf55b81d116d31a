"""Ranks 2 and 3 are not in the program: they wait for the end of the job before its first call.

mpirun -np 4 python tests/support/rank_programs/idle_ranks.py
"""

from __future__ import annotations

import torch

from fuser import DataType, FusionDefinition, ParallelType, multidevice
from multidevice.coordination.bounded_wait import Calls, Need, poll_until

comm = multidevice.Communicator.instance()
rank, team = comm.rank(), (0, 1)
# Who is in the end of the job has not entered these, and is told apart by where it waits.
NEVER = [Need(r, Calls("never", comm._control.world), 1) for r in (2, 3)]


def is_alone() -> bool:
    """Returns whether the other ranks already wait for the end of the job."""
    wait_graph = comm._control.wait_graph
    assert wait_graph is not None
    return wait_graph.suspects(NEVER).count("waits in the end of the job") == 2


with FusionDefinition() as fd:
    x = fd.define_tensor([-1, 32], contiguity=True, dtype=DataType.Float)
    w = fd.define_tensor([64, 32], contiguity=True, dtype=DataType.Float)
    fd.add_output(fd.ops.linear(x, w))
    for t in (x, w):
        t.set_device_mesh(multidevice.DeviceMesh(team))
        t.outer_split(1, 2)
        t.axis(1).parallelize(ParallelType.mesh_x)
if rank in team:
    poll_until(is_alone, what=lambda: "the end of the others", look=lambda _: None, rank=rank)
    for call in range(3):
        random = torch.Generator().manual_seed(call)
        full = [torch.randn(s, generator=random) for s in ((3 + call, 32), (64, 32))]
        shards = [multidevice.shard_tensor(t, tv) for t, tv in zip(full, (x, w), strict=True)]
        (out,) = fd.execute(shards)
        expected = full[0].double() @ full[1].double().T
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
print(f"ok rank {rank}", flush=True)
