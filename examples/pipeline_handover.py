"""Two layers on two halves of the ranks: the first half hands its result to the second half.

mpirun -np 4 python examples/pipeline_handover.py
"""

from __future__ import annotations

import torch

from fuser import FusionDefinition, Replicate, Shard, multidevice, shard

TOKENS, WIDTH, HIDDEN = 16, 8, 32

comm = multidevice.Communicator.instance()
half = max(comm.size() // 2, 1)
first = multidevice.DeviceMesh(range(half))
second = multidevice.DeviceMesh(range(comm.size() - half, comm.size()))
rows, whole = [Shard(0)], [Replicate()]

with FusionDefinition() as fd:
    x = fd.define_tensor([TOKENS, WIDTH], contiguity=True, mesh=first, placements=rows)
    w1 = fd.define_tensor([HIDDEN, WIDTH], contiguity=True, mesh=first, placements=whole)
    w2 = fd.define_tensor([WIDTH, HIDDEN], contiguity=True, mesh=second, placements=whole)
    hidden = fd.ops.relu(fd.ops.linear(x, w1))
    received = fd.ops.set(hidden)
    shard(received, second, rows)
    y = fd.ops.linear(received, w2)
    fd.add_output(y)

torch.manual_seed(0)  # every rank makes the same data
x_full, weight1 = torch.randn(TOKENS, WIDTH), torch.randn(HIDDEN, WIDTH)
weight2 = torch.randn(WIDTH, HIDDEN)
# A rank outside the mesh of an input passes a tensor of the same size, which is not read.
(result,) = fd.execute([multidevice.shard_tensor(x_full, x), weight1, weight2])

line = f"rank {comm.rank()}: computes the first layer"
if second.has(comm.rank()):
    exact = torch.relu(x_full.double() @ weight1.double().T) @ weight2.double().T
    mine = second.shard_tensor(exact, 0)
    difference = (result - mine).abs().max().item()
    assert difference < 1e-4, difference
    line = f"rank {comm.rank()}: {len(result)} of {TOKENS} rows, right to 1e-4"
else:
    assert result.shape == (0,)
print(f"{line}\n", end="")
if comm.rank() == 0:
    lines = fd.fec.host_program().names_text().splitlines()
    print("\n".join(line for line in lines if "alloc" not in line.lower()))
