"""A host program is read from its text; without one of its waits the race check refuses it.

python examples/missing_wait.py
"""

from __future__ import annotations

import torch

from fuser import FusionDefinition, ParallelType, VerifyError
from hostir import HostIrEvaluator, parse

STEPS, ROWS, K, N = 4, 8, 16, 32

with FusionDefinition() as fd:
    x = fd.define_tensor([STEPS, ROWS, K], contiguity=True)
    w = fd.define_tensor([N, K], contiguity=True)
    y = fd.ops.linear(x, w)
    y.axis(0).parallelize(ParallelType.stream)  # a loop of 4 steps on 4 streams
    fd.add_output(y)

torch.manual_seed(0)
inputs = [torch.randn(STEPS, ROWS, K), torch.randn(N, K)]
expected = inputs[0].double() @ inputs[1].double().T
fd.execute(inputs)
print(fd.fec.host_program().names_text())

text = fd.fec.host_program().full_text()
(result,) = HostIrEvaluator(parse(text)).run(inputs)
difference = (result - expected).abs().max().item()
assert difference < 1e-5, difference
print("read from its text: differs from float64 by less than 1e-5")

before, _, after = text.rpartition("    Synchronize(Stream ( streamIdx")
edited = before + after.partition("\n")[2]  # without the line: the caller waits for no step
try:
    HostIrEvaluator(parse(edited)).run(inputs)
except VerifyError as error:
    print("\n".join(str(error).splitlines()[:2]))
(result,) = HostIrEvaluator(parse(edited), late_stream="all").run(inputs)
print("without the check, and with delayed streams:", result.flatten()[:3].tolist())
