"""Attention whose heads are split over the ranks: one allreduce, after the last product.

mpirun -np 2 python examples/attention_by_heads.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fuser import FusionDefinition, Replicate, Shard, multidevice

BATCH, TOKENS, HEADS, SIZE = 2, 16, 4, 8
WIDTH = HEADS * SIZE

comm = multidevice.Communicator.instance()
mesh = multidevice.DeviceMesh(range(comm.size()))

with FusionDefinition() as fd:
    x = fd.define_tensor(
        [BATCH, TOKENS, WIDTH], contiguity=True, mesh=mesh, placements=[Replicate()]
    )
    w_qkv = [
        fd.define_tensor([WIDTH, WIDTH], contiguity=True, mesh=mesh, placements=[Shard(0)])
        for _ in range(3)
    ]
    w_out = fd.define_tensor([WIDTH, WIDTH], contiguity=True, mesh=mesh, placements=[Shard(1)])
    heads = [fd.ops.reshape(fd.ops.linear(x, w), [BATCH, TOKENS, HEADS, SIZE]) for w in w_qkv]
    q, k, v = (fd.ops.permute(part, [0, 2, 1, 3]) for part in heads)
    attended, *_ = fd.ops.sdpfa_fwd(q, k, v, is_causal=True)
    merged = fd.ops.reshape(fd.ops.permute(attended, [0, 2, 1, 3]), [BATCH, TOKENS, WIDTH])
    fd.add_output(fd.ops.linear(merged, w_out))

torch.manual_seed(0)  # every rank makes the same data
whole = [torch.randn(BATCH, TOKENS, WIDTH), *torch.randn(4, WIDTH, WIDTH) / WIDTH**0.5]
tensors = (x, *w_qkv, w_out)
shards = [multidevice.shard_tensor(t, v) for t, v in zip(whole, tensors, strict=True)]
(result,) = fd.execute(shards)

exact_x, *exact_qkv, exact_out = (tensor.double() for tensor in whole)
exact = [(exact_x @ w.T).unflatten(2, (HEADS, SIZE)).transpose(1, 2) for w in exact_qkv]
expected = F.scaled_dot_product_attention(*exact, is_causal=True)
expected = expected.transpose(1, 2).flatten(2) @ exact_out.T
difference = (result - expected).abs().max().item()
assert difference < 1e-5, difference
count = f"{HEADS // comm.size()} of {HEADS} heads"
print(f"rank {comm.rank()}: {count}, differs from float64 by less than 1e-5\n", end="")
if comm.rank() == 0:
    lines = fd.fec.host_program().names_text().splitlines()
    print("\n".join(line for line in lines if "alloc" not in line.lower()))
