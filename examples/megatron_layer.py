"""A transformer layer and its gradients: weights and tokens are split as in Megatron.

mpirun -np 4 python examples/megatron_layer.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fuser import FusionDefinition, Shard, multidevice, ops, shard
from fuser.ops import linear, matmul, mean, permute, reshape, rsqrt

TOKENS, WIDTH, HEADS, HIDDEN, EPS = 16, 32, 8, 64, 1e-6
X, W, BY_HEAD = [TOKENS, WIDTH], [WIDTH, WIDTH], [TOKENS, HEADS, WIDTH // HEADS]
KEPT = Shard(0)  # the tokens between the products
GIVEN = [(X, KEPT)] * 2 + [(W, Shard(0))] * 3 + [(W, Shard(1))]
GIVEN += [([HIDDEN, WIDTH], Shard(0)), ([WIDTH, HIDDEN], Shard(1))]
comm = multidevice.Communicator.instance()
mesh = multidevice.DeviceMesh(range(comm.size()))

with FusionDefinition() as fd:
    tensors = [fd.define_tensor(s, contiguity=True, mesh=mesh, placements=[p]) for s, p in GIVEN]
    x, dz, wq, wk, wv, wo, up, down = tensors
    n = x * (scale := rsqrt(mean(x * x, [1], True) + EPS))
    q, k, v = (permute(reshape(linear(n, w), BY_HEAD), [1, 0, 2]) for w in (wq, wk, wv))
    p = ops.softmax(matmul(q, permute(k, [0, 2, 1])) / (root := (WIDTH / HEADS) ** 0.5), 2)
    a = reshape(permute(matmul(p, v), [1, 0, 2]), X)
    y = shard(x + linear(a, wo), mesh, [KEPT])
    n2 = y * (scale2 := rsqrt(mean(y * y, [1], True) + EPS))
    u = ops.relu(linear(n2, up))
    z = shard(y + linear(u, down), mesh, [KEPT])  # forward ends, and backward begins
    dn2 = matmul(du := ops.where(u > 0.0, matmul(dz, down), 0.0), up)
    dy = shard(dz + scale2 * (dn2 - n2 * mean(dn2 * n2, [1], True)), mesh, [KEPT])
    da = permute(reshape(matmul(dy, wo), BY_HEAD), [1, 0, 2])
    dp = matmul(da, permute(v, [0, 2, 1]))
    ds = p * (dp - ops.sum(dp * p, [2], True)) / root
    by_head = matmul(ds, k), matmul(permute(ds, [0, 2, 1]), q), matmul(permute(p, [0, 2, 1]), da)
    dq, dk, dv = (reshape(permute(d, [1, 0, 2]), X) for d in by_head)
    dn = matmul(dq, wq) + matmul(dk, wk) + matmul(dv, wv)  # added on each rank, then reduced
    dx = shard(dy + scale * (dn - n * mean(dn * n, [1], True)), mesh, [KEPT])
    pairs = (dq, n), (dk, n), (dv, n), (dy, a), (du, n2), (dz, u)
    for result in (z, dx, *(matmul(permute(d, [1, 0]), t) for d, t in pairs)):
        fd.add_output(result)

torch.manual_seed(0)  # every rank makes the same data
whole = [torch.randn(shape) / shape[1] ** 0.5 for shape, _ in GIVEN]
results = fd.execute([multidevice.shard_tensor(t, v) for t, v in zip(whole, tensors, strict=True)])
x64, dz64, *w64 = (t.double().requires_grad_() for t in whole)
norm = F.rms_norm(x64, [WIDTH], eps=EPS)
q64, k64, v64 = (F.linear(norm, w).view(BY_HEAD).transpose(0, 1) for w in w64[:3])
heads = F.scaled_dot_product_attention(q64, k64, v64).transpose(0, 1)
y64 = x64 + F.linear(heads.reshape(X), w64[3])
z64 = y64 + F.linear(F.linear(F.rms_norm(y64, [WIDTH], eps=EPS), w64[4]).relu(), w64[5])
exact = [z64, *torch.autograd.grad(z64, [x64, *w64], dz64)]
for result, want, tv in zip(results, exact, (x, x, *tensors[2:]), strict=True):
    assert (result - multidevice.shard_tensor(want.detach(), tv)).abs().max() < 1e-5
print(f"rank {comm.rank()}: {len(results[0])} tokens, within 1e-5 of float64\n", end="")
if comm.rank() == 0:
    print("\n".join(l for l in fd.fec.host_program().names_text().splitlines() if "team" in l))
