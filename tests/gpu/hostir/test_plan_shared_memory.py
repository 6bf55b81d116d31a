"""Programs on one stream share their arena on a GPU, also those replayed by CUDA graphs.

Another test checks what torch.profiler shows of them.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fuser import FusionDefinition

pytestmark = [pytest.mark.gpu]
MIB = 1 << 20


def program(scale: float, steps: int = 2) -> FusionDefinition:
    """Returns steps of relu and matmul; each scale makes another program."""
    with FusionDefinition() as fd:
        a = y = fd.define_tensor([-1, -1], contiguity=True, dtype=torch.bfloat16)
        for _ in range(steps):
            y = fd.ops.matmul(fd.ops.cast(fd.ops.relu(fd.ops.mul(y, scale)), torch.bfloat16), a)
        fd.add_output(y)
    return fd


def expected(a: torch.Tensor, scale: float, steps: int = 2) -> torch.Tensor:
    y = a
    for _ in range(steps):
        y = (y * scale).relu() @ a
    return y


def drawn(n: int) -> torch.Tensor:
    return torch.randn(n, n, device="cuda", dtype=torch.bfloat16) / n**0.5


def check(found: torch.Tensor, a: torch.Tensor, scale: float, steps: int = 2) -> None:
    want = expected(a, scale, steps).double()
    error = (found.double() - want).abs().max()
    assert error <= 0.03 * want.abs().max(), error


@pytest.mark.finding("G30")
def test_six_programs_keep_one_buffer_and_give_it_back() -> None:
    gc.collect()
    before, a = torch.cuda.memory_allocated(), drawn(2048)
    made, one = [program(1.0 + k / 8) for k in range(6)], 0
    for k, fd in enumerate(made):
        for _ in range(2):
            check(fd.execute([a])[0], a, 1.0 + k / 8)
        if not k:
            one = torch.cuda.memory_allocated() - before - a.nbytes
    assert one < made[0].memory().needed * 5 // 4 + 40 * MIB
    # Libraries keep workspaces of a few bytes for each.
    assert torch.cuda.memory_allocated() - before - a.nbytes <= one + MIB
    assert made[0].memory().total == made[-1].memory().shared
    kept, held = made[0].memory().total, torch.cuda.memory_allocated()
    made.clear()
    fd = None
    gc.collect()
    assert held - torch.cuda.memory_allocated() >= kept


@pytest.mark.finding("G30")
def test_graphs_of_several_programs_share_a_buffer_that_moves() -> None:
    sizes = (64, 256, 128, 512, 96)
    made = [(program(1.0 + k / 8, 3), drawn(n), 1.0 + k / 8) for k, n in enumerate(sizes)]
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for first in range(1, len(made) + 1):
        # Each larger one moves what the others are bound to.
        held: list[tuple[int, torch.Tensor]] = []
        for turn in range(24):
            with torch.cuda.stream(streams[turn % 2]):
                for k, (fd, a, _) in enumerate(made[:first]):
                    found = fd.execute([a])[0]
                    if turn % 7 == 0:
                        held.append((k, found))
        torch.cuda.synchronize()
        for k, found in held:
            check(found, *made[k][1:], 3)
    for fd, *_ in made[:3]:
        assert any(line.startswith("captured: ") for line in fd.cuda_graphs()), fd.cuda_graphs()
    found = made[0][0].memory()
    assert found.shared == found.total and found.needed < found.total


@pytest.mark.finding("G30")
def test_a_graph_of_the_callers_keeps_its_memory() -> None:
    """Another program that runs and needs more memory does not disturb the caller's graph."""
    fd, a = program(1.5), drawn(128)
    fd.execute([a])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            fd.execute([a])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (out,) = fd.execute([a])
    large = drawn(1024)
    for _ in range(4):
        check(program(1.25).execute([large])[0], large, 1.25)
        a.copy_(drawn(128))
        graph.replay()
        torch.cuda.synchronize()
        check(out, a, 1.5)


@pytest.mark.finding("G27")
def test_torch_profiler_shows_kernels_and_graphs_by_name_and_line() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.softmax(x, -1))
    given = [torch.randn(64, 512, device="cuda")]
    fd.execute(given)
    line = fd.fusion.exprs[0].where

    def seen() -> list[str]:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
            fd.execute(given)
            torch.cuda.synchronize()
        found = [e for e in prof.events() or () if line in e.name]
        print([(e.name, e.device_time_total) for e in found])
        return [e.name for e in found if e.device_type.name == "CPU"]

    name = f"kernel max, sub, exp, sum, div at {line}"
    assert seen() == [name]
    held: list[torch.Tensor] = []
    for _ in range(60):
        held = fd.execute(given)
    del held
    (found,) = seen()
    captured = fd.cuda_graphs()[0].startswith("captured: ")
    assert found == (f"CUDA graph of 1 step at {line}" if captured else name)
