"""A column-parallel linear layer whose allgather runs in chunks, each beside the linear of another.

mpirun -np 2 python examples/streamed_linear.py
FUSER_DUMP='host_ir(short)' mpirun -np 2 python examples/streamed_linear.py    # and read what runs
"""

from __future__ import annotations

import torch

from fuser import DataType, FusionDefinition, ParallelType, multidevice

CHUNKS, ROWS, K, N = 4, 6, 16, 8

comm = multidevice.Communicator.instance()
d = comm.size()
mesh = multidevice.DeviceMesh(range(d))

with FusionDefinition() as fd:
    x = fd.define_tensor([CHUNKS, d, ROWS, K], contiguity=True, dtype=DataType.Float)
    w = fd.define_tensor([N, K], contiguity=True, dtype=DataType.Float)
    y = fd.ops.linear(x, w)
    fd.add_output(y)
    for tensor in (x, w, y):
        tensor.set_device_mesh(mesh)
    x.axis(1).parallelize(ParallelType.mesh_x)  # every rank holds a part of each chunk
    y.axis(0).parallelize(ParallelType.stream)  # the chunks are the steps of a loop over streams

torch.manual_seed(0)
x_full, w_full = torch.randn(CHUNKS, d, ROWS, K), torch.randn(N, K)
(got,) = fd.execute([multidevice.shard_tensor(x_full, x), w_full])
want = (x_full.double() @ w_full.double().T).float()
print(f"rank {comm.rank()}: largest difference {(got - want).abs().max().item():.1e}\n", end="")
