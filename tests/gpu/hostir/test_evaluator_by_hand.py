"""Handmade host programs on CUDA streams; no op blocks the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import hostir
from fuser.ir.ops import nodes
from fuser.ir.types import ParallelType
from hostir import (
    Allocate,
    Communication,
    GetCurrentStream,
    HostIrContainer,
    HostIrEvaluator,
    SetCurrentStream,
    Stream,
    Synchronize,
    TeamOf,
    Wait,
)
from multidevice import Communicator, DeviceMesh
from tests.support.handmade_programs import (
    ENTRY,
    EXAMPLES,
    pipelined_allgather,
    rows_on_streams,
    run_here,
    run_simulated,
    switching,
)
from tests.support.moved_inputs import needs_a_gpu_per_rank


@pytest.fixture(autouse=True)
def _exact_float32_on_the_default_stream() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.cuda.set_stream(torch.cuda.default_stream())


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_equal_torch(name: str, reference: bool) -> None:
    """Runs on simulated ranks, which share the device."""
    example = EXAMPLES[name]
    run_simulated(example, example.build(), device="cuda", reference=reference)


def test_no_call_blocks_the_host() -> None:
    evaluator = HostIrEvaluator(rows_on_streams())
    given = torch.randn(64, 6, device="cuda")
    for _ in range(2):
        evaluator.run([given])
    torch.cuda.synchronize()
    # About half a second.
    torch.cuda._sleep(1_000_000_000)
    given.add_(1.0)
    (out,) = evaluator.run([given])
    assert not torch.cuda.current_stream().query(), "the host has waited for the device"
    assert torch.equal(out, given)


@pytest.mark.parametrize("method", ["run", "evaluate"])
def test_the_current_stream_stays_after_a_run(method: str) -> None:
    def of(*after: SetCurrentStream | Synchronize) -> torch.cuda.Stream:
        evaluator = HostIrEvaluator(switching(*after))
        seen: list[torch.cuda.Stream] = []
        for _ in range(3):
            (out,) = getattr(evaluator, method)([torch.ones(4, device="cuda")])
            assert torch.equal(out, torch.full((4,), 2.0, device="cuda"))
            seen.append(torch.cuda.current_stream())
        assert seen[0] == seen[1] == seen[2]
        torch.cuda.synchronize()
        return seen[0]

    default = torch.cuda.default_stream()
    assert of() != default
    joined = Synchronize(Stream(hostir.as_scalar(2)))
    assert of(SetCurrentStream(Stream(name="Default")), joined) == default
    mine = torch.cuda.Stream()
    torch.cuda.set_stream(mine)
    assert of(SetCurrentStream(ENTRY), joined) == mine


def test_the_callers_stream_is_waited_for() -> None:
    """The caller uses another stream in each run, and `GetCurrentStream` returns that one."""
    evaluator = HostIrEvaluator(rows_on_streams())
    streams = [torch.cuda.Stream() for _ in range(3)]
    given = torch.zeros(32, 6, device="cuda")
    torch.cuda.synchronize()
    results: list[torch.Tensor] = []
    for step in range(9):
        stream = streams[step % 3]
        stream.wait_stream(streams[(step - 1) % 3])
        with torch.cuda.stream(stream):
            torch.cuda._sleep(5_000_000)
            given.add_(1.0)
            results += evaluator.run([given])
    torch.cuda.synchronize()
    for step, out in enumerate(results):
        assert (out == step + 1).all().item(), step


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("reference", [False, True])
def test_examples_on_ranks(comm: Communicator, reference: bool) -> None:
    for name, example in EXAMPLES.items():
        if 1 < example.ranks <= comm.size():
            print(name)
            run_here(example, example.build(), comm, device="cuda", reference=reference)


@pytest.mark.mpi(min_size=2)
def test_no_collective_blocks_the_host(comm: Communicator) -> None:
    needs_a_gpu_per_rank(comm)
    example = EXAMPLES[f"HO-3 on {2 if comm.size() < 4 else 4}"]
    program = pipelined_allgather(example.ranks)()
    evaluator = HostIrEvaluator(program, comm)
    shapes = [tuple(int(x.value) for x in tv.shape()) for tv in program.inputs]  # pyright: ignore
    shapes[0] = (shapes[0][0], 1, *shapes[0][2:])
    mine = [torch.randn(shape, device="cuda") for shape in shapes]
    for _ in range(2):
        evaluator.run(mine)
    torch.cuda.synchronize()
    comm.barrier()
    torch.cuda._sleep(1_000_000_000)
    evaluator.run(mine)
    assert not torch.cuda.current_stream().query(), "the host has waited for the device"
    torch.cuda.synchronize()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("method", ["run", "evaluate"])
def test_a_wait_on_another_stream_waits(comm: Communicator, method: str) -> None:
    """A collective runs after slow matmuls; only the wait under test orders another stream after
    it.
    """
    if comm.rank() > 1:
        return
    n = 4096
    mesh = DeviceMesh([0, 1])
    hic = HostIrContainer()
    with hic:
        x = hic.input([2, n, n], mesh=mesh)
        partial, whole, y = (hic.tensor(s, mesh=mesh) for s in ([2, n, n], [n, n], [n, n]))
        for tv in (x, partial):
            tv.axis(0).parallelize(ParallelType.mesh_x)
        first, second = (Stream(hostir.as_scalar(i)) for i in range(2))
        hic.append(Allocate(partial), Allocate(whole), Allocate(y), GetCurrentStream(ENTRY))
        hic.append(SetCurrentStream(second), Synchronize(ENTRY))
        hic.append(SetCurrentStream(first), Synchronize(ENTRY))
        hic.append(*(nodes.MatmulOp(partial, x, x) for _ in range(4)))
        team = TeamOf(mesh, (ParallelType.mesh_x,))
        hic.append(Communication(partial, whole, number=0, type="Allreduce", team=team))
        hic.append(SetCurrentStream(second), Wait(0), nodes.LoadStoreOp(y, whole))
        hic.append(SetCurrentStream(ENTRY), Synchronize(second))
        hic.add_output(y)
    evaluator = HostIrEvaluator(hic, comm)
    eye = torch.eye(n, device="cuda")
    for step in range(1, 5):
        mine = (eye * (step + comm.rank())).unsqueeze(0)
        (out,) = getattr(evaluator, method)([mine])
        assert torch.equal(out, eye * (step**2 + (step + 1) ** 2)), step
        torch.cuda.synchronize()
