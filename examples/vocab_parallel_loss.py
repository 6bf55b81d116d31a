"""An embedding, logits and a cross entropy whose vocabulary is split over the ranks.

mpirun -np 4 python examples/vocab_parallel_loss.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fuser import FusionDefinition, Shard, multidevice

VOCABULARY, WIDTH, TOKENS = 64, 16, 12

comm = multidevice.Communicator.instance()
mesh = multidevice.DeviceMesh(range(comm.size()))

with FusionDefinition() as fd:
    tokens = fd.define_tensor([TOKENS], contiguity=True, dtype=torch.int64)
    targets = fd.define_tensor([TOKENS], contiguity=True, dtype=torch.int64)
    # One weight for both ends of the model. Each rank has the rows of some words.
    size = [VOCABULARY, WIDTH]
    weight = fd.define_tensor(size, contiguity=True, mesh=mesh, placements=[Shard(0)])
    logits = fd.ops.linear(fd.ops.embedding_fwd(tokens, weight), weight)  # columns of some words
    shifted = logits - fd.ops.max(logits, [1], keepdim=True)
    powers = fd.ops.exp(shifted)
    total = fd.ops.sum(powers, dim=1, keepdim=True)
    target = fd.ops.broadcast(targets, [False, True])
    loss = fd.ops.mean(fd.ops.log(total) - fd.ops.take_along_axis(shifted, target, dim=1))
    # The gradient of the loss at the logits, split like the logits.
    words = fd.ops.broadcast(fd.ops.iota(VOCABULARY), [True, False])
    one_hot = fd.ops.where(fd.ops.eq(words, target), 1.0, 0.0)
    gradient = (powers / total - one_hot) * (1 / TOKENS)
    fd.add_output(loss)
    fd.add_output(gradient)

torch.manual_seed(0)  # every rank makes the same data
given = torch.randint(VOCABULARY, [2, TOKENS])
whole = torch.randn(size)
results = fd.execute([*given, multidevice.shard_tensor(whole, weight)])

exact = F.linear(F.embedding(given[0], whole.double()), whole.double()).requires_grad_()
exact_loss = F.cross_entropy(exact, given[1])
(exact_gradient,) = torch.autograd.grad(exact_loss, exact)
part = exact_gradient.chunk(comm.size(), dim=1)[comm.rank()]
for result, expected in zip(results, (exact_loss, part), strict=True):
    difference = (result - expected).abs().max().item()
    assert difference < 1e-5, difference
shape = f"{results[1].shape[1]} of {VOCABULARY} words"
print(f"rank {comm.rank()}: {shape}, differs from float64 by less than 1e-5\n", end="")
if comm.rank() == 0:
    lines = fd.fec.host_program().names_text().splitlines()
    print("\n".join(line for line in lines if "alloc" not in line.lower()))
