"""A mixture of experts on one device: tokens are sorted by expert, and two grouped products run.

python examples/mixture_of_experts.py
"""

from __future__ import annotations

import torch

from fuser import DataType, FusionDefinition

TOKENS, WIDTH, HIDDEN, EXPERTS = 24, 16, 32, 4

with FusionDefinition() as fd:
    x = fd.define_tensor([-1, WIDTH], contiguity=True)
    router = fd.define_tensor([EXPERTS, WIDTH], contiguity=True)
    up = fd.define_tensor([EXPERTS, WIDTH, HIDDEN], contiguity=True)
    down = fd.define_tensor([EXPERTS, HIDDEN, WIDTH], contiguity=True)
    scores = fd.ops.softmax(fd.ops.linear(x, router), 1)
    best, expert = fd.ops.topk(scores, 1)  # [tokens, 1] both
    counts = fd.ops.sum(fd.ops.eq(expert, fd.ops.iota(EXPERTS)), dim=0)
    ends = fd.ops.cast(fd.ops.cumsum(counts, 0), DataType.Int32)
    order = fd.ops.argsort(fd.ops.squeeze(expert, [1]), 0, stable=True)
    sorted_x = fd.ops.index_select(x, order, 0)
    hidden = fd.ops.relu(fd.ops.grouped_mm(sorted_x, up, ends))
    sorted_y = fd.ops.grouped_mm(hidden, down, ends)
    fd.add_output(best * fd.ops.index_select(sorted_y, fd.ops.argsort(order, 0), 0))
    fd.add_output(counts)

torch.manual_seed(0)
inputs = [torch.randn(TOKENS, WIDTH), torch.randn(EXPERTS, WIDTH)]
inputs += [torch.randn(EXPERTS, WIDTH, HIDDEN) / 4, torch.randn(EXPERTS, HIDDEN, WIDTH) / 6]
y, tokens = fd.execute(inputs)

exact_x, exact_router, exact_up, exact_down = (tensor.double() for tensor in inputs)
score, chosen = (exact_x @ exact_router.T).softmax(1).max(1)
exact_hidden = (exact_x[:, None] @ exact_up[chosen]).relu()
expected = score[:, None] * (exact_hidden @ exact_down[chosen])[:, 0]
difference = (y - expected).abs().max().item()
assert difference < 1e-5, difference
assert torch.equal(tokens, chosen.bincount(minlength=EXPERTS))
print("largest difference from torch in float64: below 1e-5")
print("tokens of each expert:", tokens.tolist())
lines = fd.fec.host_program().names_text().splitlines()
print("\n".join(line for line in lines if "alloc" not in line.lower()))
