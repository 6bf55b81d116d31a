"""RMS norm, written as single operations, becomes one generated kernel.

python examples/rms_norm.py
"""

from __future__ import annotations

import torch

from fuser import FusionDefinition

ROWS, WIDTH, EPSILON = 64, 256, 1e-6

with FusionDefinition() as fd:
    x = fd.define_tensor([-1, WIDTH], contiguity=True)
    weight = fd.define_tensor([WIDTH], contiguity=True)
    mean_square = fd.ops.mean(x * x, dim=1, keepdim=True)
    fd.add_output(x * fd.ops.rsqrt(mean_square + EPSILON) * weight)

torch.manual_seed(0)
inputs = [torch.randn(ROWS, WIDTH), torch.randn(WIDTH)]
(y,) = fd.execute(inputs)

exact_x, exact_weight = (tensor.double() for tensor in inputs)
expected = torch.nn.functional.rms_norm(exact_x, [WIDTH], exact_weight, EPSILON)
difference = (y - expected).abs().max().item()
assert difference < 1e-5, difference
print("largest difference from torch in float64: below 1e-5")
print(fd.fec.host_program().names_text())
print(fd.fec.get_cuda_kernel(inputs))
