"""Every elementwise op as a generated kernel on a GPU, compared with torch in float64."""

from __future__ import annotations

import pytest
import torch

from fuser.ir.dtypes import to_torch
from fuser.kernels.executor import FusedKernelExecutor, compile_many
from tests.fuser.schedule.test_pointwise_all_ops import CONTIGUOUS, check_out, ulp_error
from tests.support.op_cases import CASES, OpCase
from tests.support.small_fusions import sizes_of


@pytest.fixture(scope="module")
def executors() -> dict[str, FusedKernelExecutor]:
    """Returns the executors of all kernels, compiled together."""
    made: dict[str, FusedKernelExecutor] = {}
    requests = []
    shape = CONTIGUOUS[0]
    for case in CASES:
        fusion = case.define(2)
        executor = made[case.id] = FusedKernelExecutor(fusion, scheduler="pointwise", name="op")
        inputs = [t.cuda() for t in case.draw(shape, 0, "contiguous")]
        out = torch.empty(shape, dtype=to_torch(case.result), device="cuda")
        requests.append((executor, inputs, [out], sizes_of(fusion, *[shape] * len(inputs))))
    compile_many(requests, device="cuda")
    return made


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_op(case: OpCase, executors: dict[str, FusedKernelExecutor]) -> None:
    executor = executors[case.id]
    for seed, shape in enumerate(CONTIGUOUS):
        inputs = case.draw(shape, seed, "contiguous")
        out = torch.full(shape, 1, dtype=to_torch(case.result), device="cuda")
        sizes = sizes_of(executor.fusion, *[shape] * len(inputs))
        executor.run([t.cuda() for t in inputs], [out], sizes=sizes)
        check_out(case, out.cpu(), case.reference(inputs), f"{case.id} {shape} seed {seed}")


def test_tanh_over_all_magnitudes() -> None:
    """Tests the GPU's approximate tanh on dense points and on every float exponent."""
    case = next(c for c in CASES if c.name == "tanh" and to_torch(c.result) == torch.float32)
    fusion = case.define(1)
    executor = FusedKernelExecutor(fusion, scheduler="pointwise", name="op")
    dense = torch.linspace(-12, 12, 1 << 20)
    wide = torch.exp2(torch.linspace(-126, 127, 1 << 18)) * torch.tensor([[1.0], [-1.0]])
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan")])
    x = torch.cat([dense, wide.reshape(-1), special])
    out = torch.empty_like(x, device="cuda")
    executor.run([x.cuda()], [out], sizes=sizes_of(fusion, tuple(x.shape)))
    worst = ulp_error(out.cpu(), torch.tanh(x.double()), case.result, at_least=0.0)
    print(f"worst error {worst:.2f} ulp")
    assert worst <= 4
    assert torch.signbit(out.cpu()[-4]) and not torch.signbit(out.cpu()[-5])
