"""Host programs on a CUDA device: library ops, kernels, the arena per stream, simulated ranks."""

from __future__ import annotations

import pytest
import torch

from hostir.evaluate import HostIrEvaluator
from multidevice import Communicator, simulate
from multidevice.shard import shard_for_rank, unshard
from tests.hostir.programs import CASES, build, expected


@pytest.fixture(autouse=True)
def _exact_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("name", ["linear_relu_sum", "heads", "duplicates"])
def test_programs_equal_torch(name: str) -> None:
    case = CASES[name]
    evaluator = HostIrEvaluator(build(case))
    inputs = [t.cuda() for t in case.inputs()]
    reference = evaluator.evaluate(inputs)
    for _ in range(3):
        for got, same, want in zip(evaluator.run(inputs), reference, expected(case), strict=True):
            assert torch.equal(got, same)
            torch.testing.assert_close(got.cpu().double(), want, atol=1e-5, rtol=1e-5)


def test_every_stream_has_its_own_arena() -> None:
    case = CASES["linear_relu_sum"]
    evaluator = HostIrEvaluator(build(case))
    inputs = [t.cuda() for t in case.inputs()]
    evaluator.run(inputs)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = []
    for i in range(20):
        with torch.cuda.stream(streams[i % 2]):
            results.append(evaluator.run(inputs))
    torch.cuda.synchronize()
    for outputs in results:
        for got, want in zip(outputs, expected(case), strict=True):
            torch.testing.assert_close(got.cpu().double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["mlp2", "sequence2", "slice2", "mesh2x2", "encoder2"])
def test_simulated_ranks_share_a_device(name: str) -> None:
    case = CASES[name]
    program = build(case)

    def body() -> list[torch.Tensor]:
        communicator = Communicator.instance()
        evaluator = HostIrEvaluator(program, communicator)
        pairs = zip(case.inputs(), program.inputs, strict=True)
        mine = [shard_for_rank(t, tv, communicator.rank()).cuda() for t, tv in pairs]  # pyright: ignore[reportArgumentType]
        evaluator.run(mine)
        return evaluator.run(mine)

    with simulate(case.ranks) as world:
        by_rank = world.run(body)
    for i, (declared, want) in enumerate(zip(program.outputs, expected(case), strict=True)):
        whole = unshard([outputs[i].cpu() for outputs in by_rank], declared)
        torch.testing.assert_close(whole.double(), want, atol=1e-5, rtol=1e-5)
