"""A training step whose batch is split over the ranks: allreduces add up the gradients.

mpirun -np 2 python examples/data_parallel_step.py
"""

from __future__ import annotations

import torch

from fuser import FusionDefinition, Replicate, Shard, multidevice

BATCH, INPUTS, OUTPUTS, RATE = 32, 16, 8, 0.1

comm = multidevice.Communicator.instance()
mesh = multidevice.DeviceMesh(range(comm.size()))

with FusionDefinition() as fd:
    x = fd.define_tensor([BATCH, INPUTS], contiguity=True, mesh=mesh, placements=[Shard(0)])
    target = fd.define_tensor([BATCH, OUTPUTS], contiguity=True, mesh=mesh, placements=[Shard(0)])
    w = fd.define_tensor([OUTPUTS, INPUTS], contiguity=True, mesh=mesh, placements=[Replicate()])
    b = fd.define_tensor([OUTPUTS], contiguity=True, mesh=mesh, placements=[Replicate()])
    # The loss is the mean of all squared errors, and this is its gradient at the linear layer.
    gradient = (fd.ops.linear(x, w, b) - target) * (2 / (BATCH * OUTPUTS))
    w_gradient = fd.ops.matmul(fd.ops.permute(gradient, [1, 0]), x)
    b_gradient = fd.ops.sum(gradient, dim=0)
    fd.add_output(w - RATE * w_gradient)
    fd.add_output(b - RATE * b_gradient)

torch.manual_seed(0)  # every rank makes the same data
x_full, target_full = torch.randn(BATCH, INPUTS), torch.randn(BATCH, OUTPUTS)
weight, bias = torch.randn(OUTPUTS, INPUTS), torch.randn(OUTPUTS)
shards = [multidevice.shard_tensor(t, v) for t, v in ((x_full, x), (target_full, target))]
stepped = fd.execute([*shards, weight, bias])

parameters = [weight.double().requires_grad_(), bias.double().requires_grad_()]
output = torch.nn.functional.linear(x_full.double(), *parameters)
loss = torch.nn.functional.mse_loss(output, target_full.double())
gradients = torch.autograd.grad(loss, parameters)
for result, parameter, exact in zip(stepped, parameters, gradients, strict=True):
    difference = (result - (parameter - RATE * exact)).abs().max().item()
    assert difference < 1e-6, difference
samples = f"{len(shards[0])} of {BATCH} samples"
print(f"rank {comm.rank()}: {samples}, differs from float64 by less than 1e-6\n", end="")
if comm.rank() == 0:
    lines = fd.fec.host_program().names_text().splitlines()
    print("\n".join(line for line in lines if "alloc" not in line.lower()))
