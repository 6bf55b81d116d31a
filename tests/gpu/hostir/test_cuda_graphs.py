"""Runs that CUDA graphs replay: the programs of tests/support/cuda_graph_cases.py, and
others.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, ParallelType
from fuser.multidevice import DeviceMesh
from fuser.runtime.graph_memory import STOCK
from multidevice import Communicator
from tests.support.cuda_graph_cases import CASES, ENOUGH, IN_PLACE, check, defined, repeat
from tests.support.moved_inputs import needs_a_gpu_per_rank


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_runs_are_repeated(name: str) -> None:
    fd = defined(CASES[name])
    lines = repeat(fd, CASES[name], torch.device("cuda"), runs=120)
    assert any(line.startswith("captured: ") for line in lines), lines


@pytest.mark.gpu
def test_without_graphs() -> None:
    fd, case = defined(CASES["layers"]), CASES["layers"]
    inputs = case.make(torch.device("cuda"))
    for _ in range(ENOUGH):
        check(case, inputs, fd.execute(inputs, _disable_options=["cuda_graphs"]))
    assert fd.cuda_graphs()[0].startswith("not captured: FUSER_DISABLE=cuda_graphs")


@pytest.mark.gpu
def test_an_update_in_place_is_repeated() -> None:
    fd = defined(IN_PLACE)
    x, w = IN_PLACE.make(torch.device("cuda"))
    for _ in range(ENOUGH + 12):
        y = x.double() @ w.double().T @ w.double().T
        want = (y @ w.double().T).tanh() + x.double()
        (got,) = fd.execute([x, w])
        torch.testing.assert_close(got.double(), y, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(x.double(), want, rtol=1e-2, atol=1e-2)
        x.div_(x.abs().max())
    assert fd.cuda_graphs()[0].startswith("captured: ")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["layers", "streams"])
def test_two_streams_in_flight(name: str) -> None:
    """Two streams run at the same time, each with its own graphs, memory and library
    workspaces.
    """
    case = CASES[name]
    fd, device = defined(case), torch.device("cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]
    sets = [case.make(device) for _ in streams]
    torch.cuda.synchronize()
    for _ in range(30):
        results: list[list[torch.Tensor]] = []
        for stream, inputs in zip(streams, sets, strict=True):
            with torch.cuda.stream(stream):
                # So long that both are in flight together.
                torch.cuda._sleep(200_000)
                results.append(fd.execute(inputs))
        torch.cuda.synchronize()
        for inputs, outputs in zip(sets, results, strict=True):
            check(case, inputs, outputs)
    assert sum(line.startswith("captured: ") for line in fd.cuda_graphs()) == 2


@pytest.mark.gpu
def test_threads_wait_for_the_device() -> None:
    """No thread captures while another thread may run programs on the device."""
    case, device = CASES["layers"], torch.device("cuda")
    fd, count = defined(case), 4
    sets = [case.make(device) for _ in range(count)]
    fd.execute(sets[0])
    torch.cuda.synchronize()
    failed: list[BaseException] = []
    start = threading.Barrier(count)

    def body(i: int) -> None:
        outputs: list[torch.Tensor] = []
        try:
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                for k in range(100):
                    outputs = fd.execute(sets[i])
                    torch.empty(1 << 20, device=device).normal_()
                    if k % 3 == 0:
                        torch.cuda.synchronize()
                check(case, sets[i], outputs)
        except BaseException as error:  # shown by the assertion
            failed.append(error)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    lines = repeat(fd, case, device)  # of this thread, which is alone again
    assert any(line.startswith("captured: ") for line in lines), lines
    assert not any("Error" in line for line in lines), lines


@pytest.mark.gpu
def test_a_switch_of_torch_is_seen() -> None:
    """A change of torch's arithmetic settings takes effect, although a captured graph keeps its
    own.
    """
    with FusionDefinition() as fd:
        x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
        for _ in range(4):
            x = fd.ops.matmul(x, w)
        fd.add_output(x)
    inputs = [torch.randn(512, 512, device="cuda"), torch.randn(512, 512, device="cuda") / 22]
    before = torch.backends.cuda.matmul.allow_tf32
    found: dict[bool, torch.Tensor] = {}
    try:
        for _ in range(ENOUGH):
            for choice in (False, True):
                torch.backends.cuda.matmul.allow_tf32 = choice
                (got,) = fd.execute(inputs)
                assert torch.equal(found.setdefault(choice, got.clone()), got)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert not torch.equal(found[False], found[True])
    assert fd.cuda_graphs()[0].startswith("captured: ")


@pytest.mark.gpu
def test_a_loop_over_blocks_of_half_precision() -> None:
    with FusionDefinition() as fd:
        x, w = (fd.define_tensor([-1, -1], dtype=DataType.BFloat16) for _ in range(2))
        y = fd.ops.linear(fd.ops.relu(x), w)
        fd.add_output(y)
        y.outer_split(0, 3)
        y.axis(0).parallelize(ParallelType.stream)
    w = torch.randn(48, 64, device="cuda", dtype=torch.bfloat16)
    for rows in (31, 64):
        for _ in range(2 * ENOUGH):
            x = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16)
            (got,) = fd.execute([x, w])
            want = x.double().relu() @ w.double().T
            torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-1)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("replicated", [True, False])
def test_collectives_are_repeated(replicated: bool, comm: Communicator) -> None:
    """NCCL calls are captured and still counted; ranks need not capture in the same run."""
    needs_a_gpu_per_rank(comm)
    d, rank = comm.size(), comm.rank()
    device = torch.device("cuda", torch.cuda.current_device())
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 16 * d], contiguity=True)
        w = fd.define_tensor([24, 16 * d], contiguity=True)
        y = fd.ops.linear(fd.ops.tanh(x), w)
        z = fd.ops.relu(y)
        fd.add_output(z)
        for tv in (x, w, y, z):
            tv.set_device_mesh(mesh)
        for tv in (x, w):
            tv.outer_split(1, d)
            tv.axis(1).parallelize(ParallelType.mesh_x)
        if not replicated:
            z.outer_split(0, d)
            z.axis(0).parallelize(ParallelType.mesh_x)
    generator = torch.Generator().manual_seed(3)
    kept: list[torch.Tensor] = []
    for k in range(40):
        wide = [torch.randn(s, generator=generator) for s in ((8 * d, 16 * d), (24, 16 * d))]
        mine = [t.chunk(d, 1)[rank].contiguous().to(device) for t in wide]
        if k % 7 == rank:
            kept.append(torch.empty_like(mine[0]))  # so that addresses differ between ranks
        (got,) = fd.execute(mine)
        want = (wide[0].double().tanh() @ wide[1].double().T).relu()
        want = want if replicated else want.chunk(d)[rank]
        torch.testing.assert_close(got.cpu().double(), want, rtol=1e-3, atol=1e-3)
    assert any(line.startswith("captured: ") for line in fd.cuda_graphs()), fd.cuda_graphs()


@pytest.mark.gpu
def test_what_cannot_be_captured_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed capture ends on all of its streams, and torch's random generator still works."""
    case, device = CASES["streams"], torch.device("cuda")
    fd, inputs = defined(case), case.make(device)

    def refuse(self: object, call: object, stream: int) -> None:
        torch.ones(3, device=device).sum().item()  # asks for what was not computed

    monkeypatch.setattr("fuser.runtime.captured_graphs.CudaGraphs.kernel", refuse)
    for _ in range(ENOUGH):
        check(case, inputs, fd.execute(inputs))
    (line,) = fd.cuda_graphs()
    assert line.startswith("not captured: "), line
    assert torch.randn(3, device=device).isfinite().all()


@pytest.mark.gpu
def test_emptied_caches_leave_graphs_their_memory() -> None:
    case, device = CASES["streams"], torch.device("cuda")
    fd, inputs = defined(case), case.make(device)
    for _ in range(ENOUGH):
        fd.execute(inputs)
    for _ in range(5):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        filled = [torch.full((1 << 20,), float("nan"), device=device) for _ in range(64)]
        outputs = fd.execute(inputs)
        assert all(t.isnan().all() for t in filled)
        check(case, inputs, outputs)
        del filled


@pytest.mark.gpu
def test_a_caller_who_captures_gets_the_steps() -> None:
    case, device = CASES["layers"], torch.device("cuda")
    fd, inputs = defined(case), case.make(device)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(ENOUGH):
            fd.execute(inputs)
    assert fd.cuda_graphs()[0].startswith("captured: ")
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        outputs = fd.execute(inputs)
    for _ in range(3):
        for v in inputs:
            v.normal_()
        graph.replay()
        check(case, inputs, outputs)
        check(case, inputs, fd.execute(inputs))


@pytest.mark.gpu
def test_the_graphs_of_a_caller_keep_their_memory() -> None:
    """A caller's graphs give right results after later runs on their stream, in any launch
    order.
    """
    with FusionDefinition() as fd:
        x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
        y = fd.ops.tanh(fd.ops.linear(x, w))
        fd.add_output(fd.ops.sum(fd.ops.linear(y, w), [0]))
    device, side = torch.device("cuda"), torch.cuda.Stream()
    w = torch.randn(64, 64, device=device) / 8

    def meaning(x: torch.Tensor) -> torch.Tensor:
        wide = w.double()
        return ((x.double() @ wide.T).tanh() @ wide.T).sum(0)

    def checked(x: torch.Tensor, got: torch.Tensor) -> None:
        torch.testing.assert_close(got.double(), meaning(x), rtol=1e-3, atol=1e-1)

    xs = [torch.randn(4096, 64, device=device) for _ in range(2)]
    for x in xs:  # on another stream than that of the captures
        checked(x, fd.execute([x, w])[0])
    torch.cuda.synchronize()
    made: list[tuple[torch.cuda.CUDAGraph, torch.Tensor]] = []
    for x in xs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            (out,) = fd.execute([x, w])
        made.append((graph, out))
    larger = torch.randn(16384, 64, device=device)
    with torch.cuda.stream(side):
        checked(larger, fd.execute([larger, w])[0])
        checked(xs[0], fd.execute([xs[0], w])[0])
    torch.cuda.synchronize()
    filled = [torch.full((1 << 18,), float("nan"), device=device) for _ in range(64)]
    for x, (graph, out) in reversed(list(zip(xs, made, strict=True))):
        graph.replay()
        checked(x, out)
    assert all(t.isnan().all() for t in filled)


def _captured(run: Callable[[], list[torch.Tensor]]) -> tuple[torch.cuda.CUDAGraph, Any, list[int]]:
    """Returns a captured graph, the results, and the kinds of its nodes (0: kernel, 2:
    memset).
    """
    driver, side = ctypes.CDLL("libcuda.so.1"), torch.cuda.Stream()
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made, stream=side):
        results = run()
        places = (ctypes.byref(x) for x in (status, number, graph))
        stream = ctypes.c_void_p(side.cuda_stream)
        assert driver.cuStreamGetCaptureInfo_v2(stream, *places, None, None) == 0
        nodes, count, kind = (ctypes.c_void_p * 64)(), ctypes.c_size_t(64), ctypes.c_int()
        assert driver.cuGraphGetNodes(graph, nodes, ctypes.byref(count)) == 0
        kinds: list[int] = []
        for k in range(count.value):
            assert driver.cuGraphNodeGetType(ctypes.c_void_p(nodes[k]), ctypes.byref(kind)) == 0
            kinds.append(kind.value)
    return made, results, kinds


@pytest.mark.gpu
def test_the_graph_of_a_caller_is_its_kernels() -> None:
    """A caller's graph has no memset: its counters stay reserved and cleared until it is
    destroyed.
    """
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.sum(x, [0, 1]))
        fd.add_output(fd.ops.max(x, [0, 1]))
    device = torch.device("cuda")
    xs = [torch.randn(512, 1024, device=device) for _ in range(2)]
    fd.execute([xs[0]])
    kept: list[tuple[torch.cuda.CUDAGraph, Any]] = []
    for _ in range(3 * STOCK):  # more than are ready at a time
        graph, results, kinds = _captured(lambda: fd.execute([xs[0]]))
        assert set(kinds) == {0}, kinds
        kept = [(graph, results)]
        torch.cuda.synchronize()
    second, others, _ = _captured(lambda: fd.execute([xs[1]]))
    kept.append((second, others))
    streams = [torch.cuda.Stream() for _ in kept]
    found: set[tuple[float, ...]] = set()
    for _ in range(50):
        for stream, (graph, _) in zip(streams, kept, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        fd.execute([xs[0]])  # beside both
        torch.cuda.synchronize()
        found.add(tuple(float(t) for _, results in kept for t in results))
    (got,) = found  # bit for bit
    for total, largest, x in zip(got[::2], got[1::2], xs, strict=True):
        assert abs(total - float(x.double().sum())) < 1e-2
        assert largest == float(x.max())


@pytest.mark.gpu
def test_graphs_come_and_go() -> None:
    """Memory of dropped captures is reused, also if garbage is collected during a capture."""
    case, device = CASES["streams"], torch.device("cuda")
    inputs = case.make(device)
    for k in range(40):
        fd = defined(case)
        fd.cycle = fd  # pyright: ignore[reportAttributeAccessIssue]
        for _ in range(ENOUGH):
            check(case, inputs, fd.execute(inputs))
        assert fd.cuda_graphs()[0].startswith("captured: "), k


@pytest.mark.gpu
def test_garbage_goes_while_a_caller_captures() -> None:
    """Garbage collection may destroy graphs of dropped programs while the caller captures."""
    case, device = CASES["layers"], torch.device("cuda")
    inputs, side = case.make(device), torch.cuda.Stream()
    kept = defined(case)
    kept.execute(inputs)
    for _ in range(3):
        fd = defined(case)
        fd.cycle = fd  # pyright: ignore[reportAttributeAccessIssue]
        for _ in range(ENOUGH):
            fd.execute(inputs)
        assert fd.cuda_graphs()[0].startswith("captured: ")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            outputs = kept.execute(inputs)
            del fd
            gc.collect()
        graph.replay()
        check(case, inputs, outputs)
