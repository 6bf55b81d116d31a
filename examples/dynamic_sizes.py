"""One program serves many sizes, and the definition reports how it repeats the calls.

python examples/dynamic_sizes.py
"""

from __future__ import annotations

import time

import torch

from fuser import FusionDefinition

with FusionDefinition() as fd:
    x = fd.define_tensor([-1, -1], contiguity=True)
    w = fd.define_tensor([-1, -1], contiguity=True)
    fd.add_output(fd.ops.softmax(fd.ops.linear(x, w), 1))

torch.manual_seed(0)
weight = torch.randn(16, 32)
programs = []
for rows in (8, 100, 1000, 8, 0):
    data = torch.randn(rows, 32)
    (y,) = fd.execute([data, weight])
    expected = (data.double() @ weight.double().T).softmax(1)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-5)
    program = fd.fec.host_program()
    if program not in programs:
        programs.append(program)
    print(f"{rows} rows: program {programs.index(program)}, equal to float64 within 1e-5")
print(programs[0].names_text())

# A C function that repeats calls is compiled in the background after some calls of one size.
inputs = [torch.randn(8, 32), weight]
end = time.monotonic() + 60
while not fd.compiled_runner()[0].startswith("repeated") and time.monotonic() < end:
    fd.execute(inputs)
for _ in range(10):
    fd.execute(inputs)
print("\n".join(fd.compiled_runner()))
