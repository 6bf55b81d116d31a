"""A layer whose tokens and hidden features no number of ranks divides.

mpirun -np 4 python examples/uneven_shards.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fuser import FusionDefinition, Shard, multidevice, shard

TOKENS, WIDTH, HIDDEN = 7, 8, 27

comm = multidevice.Communicator.instance()
mesh = multidevice.DeviceMesh(range(comm.size()))

with FusionDefinition() as fd:
    x = fd.define_tensor([TOKENS, WIDTH], contiguity=True, mesh=mesh, placements=[Shard(0)])
    up = fd.define_tensor([HIDDEN, WIDTH], contiguity=True, mesh=mesh, placements=[Shard(0)])
    down = fd.define_tensor([WIDTH, HIDDEN], contiguity=True, mesh=mesh, placements=[Shard(1)])
    hidden = fd.ops.gelu(fd.ops.linear(x, up))
    y = fd.ops.linear(hidden, down)
    shard(y, mesh, [Shard(0)])  # tokens, as in x
    fd.add_output(y)

torch.manual_seed(0)  # every rank makes the same data
whole = [torch.randn(TOKENS, WIDTH)]
whole += [torch.randn(HIDDEN, WIDTH) / WIDTH**0.5, torch.randn(WIDTH, HIDDEN) / HIDDEN**0.5]
shards = [multidevice.shard_tensor(t, v) for t, v in zip(whole, (x, up, down), strict=True)]
(result,) = fd.execute(shards)

exact_x, exact_up, exact_down = (tensor.double() for tensor in whole)
exact = F.linear(F.gelu(F.linear(exact_x, exact_up)), exact_down)
expected = multidevice.shard_tensor(exact, y)
assert result.shape == expected.shape
difference = (result - expected).abs().max().item()
assert difference < 1e-5, difference
shapes = " ".join(str(list(t.shape)) for t in (*shards, result))
print(f"rank {comm.rank()}: {shapes}, differs from float64 by less than 1e-5\n", end="")
if comm.rank() == 0:
    lines = fd.fec.host_program().names_text().splitlines()
    print("\n".join(line for line in lines if "alloc" not in line.lower()))
