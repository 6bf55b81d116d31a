"""Host programs on a GPU: library ops, kernels, one arena per stream, simulated ranks."""

from __future__ import annotations

import threading

import pytest
import torch

from hostir import HostIrEvaluator
from multidevice import Communicator, simulate
from multidevice.job.shard_tensor import shard_for_rank, unshard
from tests.support.host_programs import CASES, build, expected


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


def test_launches_of_another_device_are_made_there() -> None:
    """A program runs on its inputs' device even if another device is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = CASES["linear_relu_sum"]
    evaluator = HostIrEvaluator(build(case))
    inputs = [t.to("cuda:1") for t in case.inputs()]
    with torch.cuda.device(0):
        for _ in range(3):
            for got, want in zip(evaluator.run(inputs), expected(case), strict=True):
                assert got.device == torch.device("cuda", 1)
                torch.testing.assert_close(got.cpu().double(), want, atol=1e-5, rtol=1e-5)
            assert torch.cuda.current_device() == 0


def test_two_threads_on_two_streams() -> None:
    """Each run uses the arena and the packed arguments of its own stream."""
    case = CASES["linear_relu_sum"]
    evaluator = HostIrEvaluator(build(case))
    sets = [[t.cuda() * scale for t in case.inputs()] for scale in (1.0, -0.5)]
    wanted = [evaluator.evaluate(inputs) for inputs in sets]
    for inputs in sets:
        evaluator.run(inputs)
    torch.cuda.synchronize()
    wrong: list[int] = []

    def body(i: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(200):
                found = evaluator.run(sets[i])
                if not all(torch.equal(a, b) for a, b in zip(found, wanted[i], strict=True)):
                    wrong.append(i)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_steady_call_asks_torch_for_no_stream_object(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["heads"]
    evaluator = HostIrEvaluator(build(case))
    inputs = [t.cuda() for t in case.inputs()]
    evaluator.run(inputs)
    evaluator.run(inputs)

    def asked(*args: object) -> None:
        raise AssertionError("torch.cuda.current_stream takes longer than a launch")

    monkeypatch.setattr(torch.cuda, "current_stream", asked)
    evaluator.run(inputs)
