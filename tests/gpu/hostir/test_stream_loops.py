"""Stream loops on CUDA streams and events, with NCCL on the current stream."""

from __future__ import annotations

import pytest
import torch

from fuser import FusionDefinition
from multidevice import Communicator
from tests.fuser.nvfuser import test_multi_device_executor as executor_cases
from tests.hostir.lowering import test_stream_loops as stream_cases

REPETITIONS = 4


@pytest.mark.gpu
@pytest.mark.parametrize("name", stream_cases.CASES)
def test_streams_on_a_gpu(name: str) -> None:
    case = stream_cases.CASES[name]
    with FusionDefinition() as fd:
        case.define(fd)
    user = torch.cuda.Stream()
    for repetition in range(REPETITIONS):
        for shapes in case.shapes:
            # A user's own stream, whose work must be seen, and must be waited for by ours.
            with torch.cuda.stream(user if repetition % 2 else torch.cuda.current_stream()):
                inputs = [torch.randn(s, device="cuda") for s in shapes]
                stream = torch.cuda.current_stream()
                outputs = fd.execute(inputs)
                assert torch.cuda.current_stream() == stream
                expected = case.meaning(*(x.double() for x in inputs))
                for got, want in zip(outputs, expected, strict=True):
                    torch.testing.assert_close(got.double(), want, atol=1e-3, rtol=1e-3)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "name", [n for n, case in executor_cases.CASES.items() if case.ranks == executor_cases.D]
)
def test_stream_loops_on_two_gpus(name: str, comm: Communicator) -> None:
    if comm.size() != executor_cases.D:
        pytest.skip(f"for {executor_cases.D} ranks")
    case = executor_cases.CASES[name]
    device = torch.device("cuda", torch.cuda.current_device())
    executor, inputs, out = executor_cases.executor_of(case)
    generator = torch.Generator().manual_seed(0)
    for _ in range(REPETITIONS):
        xs = [torch.randn(shape, generator=generator) for shape in case.shapes]
        mine = [executor_cases.local(x, tv).to(device) for x, tv in zip(xs, inputs, strict=True)]
        (got,) = executor.run(mine)
        want = executor_cases.local(case.meaning(*(x.double() for x in xs)), out)
        torch.testing.assert_close(got.cpu().double(), want, atol=1e-3, rtol=1e-3)
