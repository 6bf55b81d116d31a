"""Plans a tensor-parallel layer for 512 GPUs, without a GPU, a launcher, or memory for its tensors.

python examples/plan_a_big_mesh.py
"""

from __future__ import annotations

from typing import Any

import torch

import hostir
from fuser import DataType, FusionDefinition, Replicate, Shard, multidevice

TOKENS, WIDTH, HIDDEN = 65536, 8192, 32768
DATA, TENSOR = 8, 64  # mesh_y splits the tokens, mesh_x the hidden features

mesh = multidevice.DeviceMesh(torch.arange(DATA * TENSOR).reshape(DATA, TENSOR))
kind: dict[str, Any] = {"contiguity": True, "dtype": DataType.BFloat16, "mesh": mesh}
with FusionDefinition() as fd:
    x = fd.define_tensor([-1, -1], placements=[Shard(0), Replicate()], **kind)
    y_gradient = fd.define_tensor([-1, -1], placements=[Shard(0), Replicate()], **kind)
    up = fd.define_tensor([-1, -1], placements=[Replicate(), Shard(0)], **kind)
    down = fd.define_tensor([-1, -1], placements=[Replicate(), Shard(1)], **kind)
    hidden = fd.ops.relu(fd.ops.linear(x, up))
    fd.add_output(fd.ops.linear(hidden, down))
    fd.add_output(fd.ops.matmul(fd.ops.permute(y_gradient, [1, 0]), hidden))  # that of `down`

shapes = [(TOKENS, WIDTH), (TOKENS, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)]
planned = hostir.program_for(fd, inputs=shapes, rank=511, device="cuda", machine="h200")

# The same numbers by hand: each rank has 1/8 of the tokens, and 1/64 of the hidden features.
nbytes = 2  # of a bfloat16
activations = TOKENS // DATA * WIDTH * nbytes
weight = HIDDEN // TENSOR * WIDTH * nbytes
hidden_part = TOKENS // DATA * HIDDEN // TENSOR * nbytes
assert [one.along for one in planned.communications] == ["mesh_x", "mesh_y"]
assert planned.sent_along == {  # an allreduce over n ranks sends 2 (n - 1) / n of its bytes
    "mesh_x": 2 * (TENSOR - 1) * activations // TENSOR,
    "mesh_y": 2 * (DATA - 1) * weight // DATA,
}
assert planned.input_nbytes == 2 * activations + 2 * weight
# During the first allreduce: its operand, its result, and the hidden features for the gradient.
assert planned.peak_nbytes == 2 * activations + hidden_part

for along, sent in planned.sent_along.items():
    print(f"sends {sent / 1e6:.1f} MB along {along}")
gb = (planned.input_nbytes + planned.peak_nbytes) / 1e9
print(f"needs {gb:.3f} GB, {planned.input_nbytes / 1e9:.3f} GB of them for the inputs")
print("\n".join(hostir.explain(planned.program, "all", planned.predict())))
