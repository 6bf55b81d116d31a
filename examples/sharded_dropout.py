"""Dropout over several ranks drops the same elements as on one device.

mpirun -np 2 python examples/sharded_dropout.py
"""

from __future__ import annotations

import torch

from fuser import DataType, FusionDefinition, Shard, multidevice, shard

ROWS, COLUMNS, KEEP, SEED = 4, 32, 0.75, 7

comm = multidevice.Communicator.instance()
mesh = multidevice.DeviceMesh(range(comm.size()))


def define(fd: FusionDefinition):
    """Defines dropout of x [rows, columns] with a seed; returns x and the result."""
    x = fd.define_tensor([-1, -1], contiguity=True)
    seed = fd.define_scalar(dtype=DataType.Int)
    drawn = fd.ops.uniform(0.0, 1.0, x.shape(), rng_seed=seed, rng_offset=0)
    y = fd.ops.where(drawn < KEEP, x / KEEP, 0.0)
    fd.add_output(y)
    return x, y


with FusionDefinition() as on_one_device:
    define(on_one_device)
with FusionDefinition() as on_all_ranks:
    x, y = define(on_all_ranks)
    for tensor in (x, y):
        shard(tensor, mesh, [Shard(0)])

torch.manual_seed(0)  # every rank makes the same data
whole = torch.randn(ROWS, COLUMNS)
(expected,) = on_one_device.execute([whole, SEED])
(result,) = on_all_ranks.execute([multidevice.shard_tensor(whole, x), SEED])
assert torch.equal(result, multidevice.shard_tensor(expected, y))  # bit for bit

difference = (expected - torch.where(expected != 0, whole.double() / KEEP, 0)).abs().max().item()
assert difference < 1e-6, difference
kept = "\n".join("".join("x" if v else "." for v in row) for row in (result != 0).tolist())
print(f"rank {comm.rank()}: {len(result)} of {ROWS} rows, equal to one device\n{kept}\n", end="")
if comm.rank() == 0:
    print(on_all_ranks.fec.host_program().names_text())
