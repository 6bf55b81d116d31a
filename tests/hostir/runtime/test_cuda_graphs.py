"""Runs that graphs repeat, on a stand-in for CUDA graphs; tests/gpu/hostir/test_cuda_graphs.py has
them.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext

import pytest
import torch

from fuser import DataType, FusionDefinition, ParallelType, multidevice, ops
from fuser.runtime.captured_graphs import MAKERS
from fuser.support.locks import uncollected
from fuser.support.torch_calls import arithmetic_choices
from hostir import Allocate, HostIrContainer, HostIrEvaluator
from hostir.runtime import cuda_graphs
from hostir.runtime import plan as arena
from hostir.runtime.plan import BoundPlan, Plan
from multidevice.coordination.bounded_wait import Calls
from multidevice.transports.base.protocol import Captured
from tests.support.cuda_graph_cases import CASES, ENOUGH, IN_PLACE, check, defined, repeat
from tests.support.stand_in_graphs import CpuGraph, CpuGraphs, stand_in

CPU = torch.device("cpu")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CpuGraphs]:
    """Returns the graph makers that have captured, one per stream and arena."""
    monkeypatch.setattr(cuda_graphs, "MIN_STEPS", 1)
    return stand_in(monkeypatch)


def launches(made: list[CpuGraphs]) -> int:
    return sum(graph.launches for maker in made for graph in maker.made)


@pytest.mark.parametrize("name", CASES)
def test_runs_are_repeated(name: str, made: list[CpuGraphs]) -> None:
    fd = defined(CASES[name])
    lines = repeat(fd, CASES[name], CPU)
    assert any(line.startswith("captured: ") for line in lines), lines
    # The first launch of each is the capture itself.
    assert launches(made) - sum(len(maker.made) for maker in made) > 5, lines


def test_what_the_host_reads_is_not_repeated(made: list[CpuGraphs]) -> None:
    """A graph would repeat the groups of its capture in every run."""
    with FusionDefinition() as fd:
        tokens, experts = fd.define_tensor([8, 4]), fd.define_tensor([2, 4, 4])
        ends = fd.define_tensor([2], dtype=DataType.Int32)
        fd.add_output(fd.ops.neg(fd.ops.grouped_mm(fd.ops.neg(tokens), experts, ends)))
    given = [torch.randn(8, 4), torch.randn(2, 4, 4), torch.zeros(2, dtype=torch.int32)]
    for k in range(40):
        given[2].copy_(torch.tensor([k % 9, 8]))
        (out,) = fd.execute(given)
        want = torch.cat([given[0][: k % 9] @ given[1][0], given[0][k % 9 :] @ given[1][1]])
        torch.testing.assert_close(out, want)
        del out
    assert not launches(made)
    assert "grouped_mm reads an operand on the host in each run" in fd.cuda_graphs()[0]


def test_an_update_in_place_is_repeated(made: list[CpuGraphs]) -> None:
    fd = defined(IN_PLACE)
    x, w = IN_PLACE.make(CPU)
    for _ in range(60):
        y = x.double() @ w.double().T @ w.double().T
        want = (y @ w.double().T).tanh() + x.double()
        (got,) = fd.execute([x, w])
        torch.testing.assert_close(got.double(), y, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(x.double(), want, rtol=1e-3, atol=1e-3)
        x.div_(x.abs().max())
        del got  # so that the next run finds this place again
    assert launches(made) > 50


def _cast() -> ExitStack:
    """Casts as torch.autocast does, which itself needs a GPU."""
    stack = ExitStack()
    stack.callback(torch.set_autocast_enabled, "cuda", torch.is_autocast_enabled("cuda"))
    torch.set_autocast_enabled("cuda", True)
    return stack


def _deterministic() -> ExitStack:
    stack = ExitStack()
    stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
    torch.use_deterministic_algorithms(True)
    return stack


def _switched(name: str, value: object) -> ExitStack:
    stack, of = ExitStack(), torch.backends.cuda.matmul
    stack.callback(setattr, of, name, getattr(of, name))
    setattr(of, name, value)
    return stack


@pytest.mark.parametrize(
    "switch",
    [
        _cast,
        _deterministic,
        lambda: _switched("allow_fp16_reduced_precision_reduction", False),
        lambda: _switched("allow_bf16_reduced_precision_reduction", False),
        lambda: _switched("fp32_precision", "tf32"),
    ],
    ids=["autocast", "deterministic", "fp16", "bf16", "tf32"],
)
def test_what_torch_was_told_of_arithmetic_chooses_the_graph(
    switch: Callable[[], AbstractContextManager[object]],
) -> None:
    ask = arithmetic_choices()
    before = ask()
    with switch():
        assert ask() != before
    assert ask() == before


def test_zeros_of_both_signs_are_different_numbers(made: list[CpuGraphs]) -> None:
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([-1], contiguity=True) for _ in range(2))
        s = fd.define_scalar(None, DataType.Double)
        # In place, so that each run finds its tensors where they were.
        fd.add_output(fd.ops.add(fd.ops.mul(y, 0.0), fd.ops.div(x, s)), y)
    x, y = torch.ones(3), torch.ones(3)
    for k in range(4 * ENOUGH):
        s = -0.0 if k >= ENOUGH and k % 2 else 0.0
        fd.execute([x, y.fill_(1.0), s])
        assert torch.equal(y, x / s), f"run {k}"
    assert launches(made) >= 1


def test_calls_of_a_capture_that_is_refused_are_counted_once(
    made: list[CpuGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: cuda_graphs.Replays, *given: object) -> None:
        raise cuda_graphs._Refused("torch allocates an output anew in each run")

    monkeypatch.setattr(cuda_graphs.Replays, "_classify_slots", refuse)
    monkeypatch.setattr(Captured, "can_capture", lambda self, what: True)
    # Simulated ranks are threads that take turns.
    monkeypatch.setattr(cuda_graphs.USERS, "alone", lambda: nullcontext([]))

    def run() -> int:
        backend = multidevice.Communicator.instance().backend_for(CPU)
        assert isinstance(backend, Captured)
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, -1], contiguity=True)
            x.set_device_mesh(multidevice.DeviceMesh(range(2)))
            x.outer_split(0, 2)
            x.axis(0).parallelize(ParallelType.mesh_x)
            fd.add_output(fd.ops.sum(x, [0]))
        for _ in range(ENOUGH):
            (total,) = fd.execute([torch.ones(2, 3)])
            assert torch.equal(total, torch.full((3,), 4.0))
        assert "anew in each run" in fd.cuda_graphs()[0]
        return backend._ledger.entered[Calls("simulated", (0, 1))]

    with multidevice.simulate(2) as world:
        assert world.run(run) == [ENOUGH, ENOUGH]
    assert made, "nothing was captured"


def test_a_thread_is_no_user_for_having_the_number_of_one(made: list[CpuGraphs]) -> None:
    """The operating system reuses the ids of threads that have ended."""
    case = CASES["layers"]

    def use() -> int:
        defined(case).execute(case.make(CPU))
        return threading.get_ident()

    with ThreadPoolExecutor(1) as pool:
        number = pool.submit(use).result()
    may_end = threading.Event()
    idle: list[threading.Thread] = []
    while not any(thread.ident == number for thread in idle) and len(idle) < 50:
        idle.append(threading.Thread(target=may_end.wait))
        idle[-1].start()
    try:
        if not any(thread.ident == number for thread in idle):
            pytest.skip("the system gave no number of a thread again")
        fd = defined(case)
        assert any(line.startswith("captured: ") for line in repeat(fd, case, CPU))
    finally:
        may_end.set()
        for thread in idle:
            thread.join()


def test_nothing_is_captured_while_another_thread_runs_programs(made: list[CpuGraphs]) -> None:
    """Another thread might synchronise the device, which the driver forbids during a capture."""
    fd, case = defined(CASES["layers"]), CASES["layers"]
    other = defined(CASES["layers"])
    has_begun, may_end = threading.Event(), threading.Event()

    def body() -> None:
        other.execute(case.make(CPU))
        has_begun.set()
        may_end.wait()

    thread = threading.Thread(target=body, name="a server")
    thread.start()
    has_begun.wait()
    try:
        lines = repeat(fd, case, CPU)
    finally:
        may_end.set()
        thread.join()
    assert not any(maker.made for maker in made)
    why = "not captured: the threads a server run programs, too ("
    assert all(line.startswith(why) for line in lines), lines
    lines = repeat(fd, case, CPU)
    assert any(line.startswith("captured: ") for line in lines), lines


def test_what_a_caller_captures_has_memory_of_its_own(
    made: list[CpuGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise later, larger runs would free memory to which the caller's graph writes."""
    is_captured = False
    monkeypatch.setattr(arena, "capturing_on", lambda device: lambda stream: is_captured)
    lent: list[weakref.ref[arena.Arena]] = []
    bind = arena.Arena.bind

    def noted(self: arena.Arena, plan: Plan) -> BoundPlan:
        lent.append(weakref.ref(self))
        return bind(self, plan)

    monkeypatch.setattr(arena.Arena, "bind", noted)
    case = CASES["layers"]
    fd, inputs = defined(case), case.make(CPU)
    for _ in range(ENOUGH):
        check(case, inputs, fd.execute(inputs))
    (usual,), before = lent, launches(made)
    is_captured = True
    for _ in range(3):
        check(case, inputs, fd.execute(inputs))
    assert launches(made) == before
    gc.collect()
    assert [one() is None for one in lent] == [False, True, True, True]
    is_captured = False
    check(case, inputs, fd.execute(inputs))
    assert len(lent) == 4
    assert usual() is not None


def test_no_garbage_is_collected_before_the_last_capture_ends() -> None:
    """Captures of several threads overlap; the collector stays off until the last one ends."""
    first, second = ExitStack(), ExitStack()
    assert gc.isenabled()
    first.enter_context(uncollected)
    second.enter_context(uncollected)
    first.close()
    between = gc.isenabled()
    second.close()
    assert (between, gc.isenabled()) == (False, True)


def test_kernels_find_tensors_in_other_places(made: list[CpuGraphs]) -> None:
    """A program of kernels alone has one graph for all addresses of its tensors."""
    case = CASES["kernels"]
    fd = defined(case)
    kept: list[object] = []
    for _ in range(30):
        inputs = case.make(CPU)
        outputs = fd.execute(inputs)
        check(case, inputs, outputs)
        kept += [inputs, outputs]
    assert sum(len(maker.made) for maker in made) == 1
    assert launches(made) == 30 - cuda_graphs.RUNS_BEFORE


def test_an_output_that_is_a_view_of_another_one(made: list[CpuGraphs]) -> None:
    """Each run of a hand-written program makes views of its own outputs, also after a launch."""
    hic = HostIrContainer()
    with hic:
        x, w = hic.input([8, 12]), hic.input([6, 12])
        y = ops.linear(x, w)
        z = ops.permute(y, [1, 0])
        hic.append(Allocate(y), y, z)
        hic.add_output(z)
        hic.add_output(y)
    evaluator, runs = HostIrEvaluator(hic), 4 * ENOUGH
    a, b = torch.randn(8, 12), torch.randn(6, 12)
    for _ in range(runs):
        a.normal_()
        turned, plain = evaluator.run([a, b])
        want = a.double() @ b.double().T
        torch.testing.assert_close(plain.double(), want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(turned.double(), want.T, rtol=1e-4, atol=1e-4)
        assert turned.data_ptr() == plain.data_ptr()
        del turned, plain
    assert launches(made) > ENOUGH, evaluator.cuda_graphs()


def test_shapes_that_come_once_are_not_captured(made: list[CpuGraphs]) -> None:
    fd = defined(CASES["kernels"])
    for rows in range(2, 30):
        inputs = [torch.randn(rows, 8), torch.randn(rows, 8)]
        check(CASES["kernels"], inputs, fd.execute(inputs))
    assert not made
    assert all("has not run often enough" in line for line in fd.cuda_graphs())


def test_addresses_that_never_come_back_end_the_search(
    made: list[CpuGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_MISSES", 12)
    case = CASES["layers"]
    fd = defined(case)
    kept: list[object] = []
    for _ in range(30):
        inputs = case.make(CPU)
        outputs = fd.execute(inputs)
        check(case, inputs, outputs)
        kept += [inputs, outputs]
    assert sum(len(maker.made) for maker in made) == 1
    assert "have other addresses in each run" in fd.cuda_graphs()[0]


@pytest.mark.parametrize(
    ("options", "why"),
    [((), "the device cpu has no graphs"), (("cuda_graphs",), "FUSER_DISABLE=cuda_graphs")],
)
def test_the_reason_is_told(options: tuple[str, ...], why: str) -> None:
    case = CASES["layers"]
    fd = defined(case)
    inputs = case.make(CPU)
    assert fd.cuda_graphs() == []
    for _ in range(ENOUGH):
        fd.execute(inputs, _disable_options=options)
    assert fd.cuda_graphs()[0].startswith(f"not captured: {why}")


def test_a_refused_capture_runs_step_by_step(
    made: list[CpuGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: CpuGraphs, actions: object, slots: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(CpuGraphs, "capture", refuse)
    case = CASES["layers"]
    fd = defined(case)
    inputs = case.make(CPU)
    for _ in range(ENOUGH):
        check(case, inputs, fd.execute(inputs))
    (line,) = fd.cuda_graphs()
    why = "not captured: RuntimeError: operation not permitted when stream is capturing ("
    assert line.startswith(why)


def test_few_steps_are_not_captured(made: list[CpuGraphs], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(MAKERS, "cpu", CpuGraphs)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.relu(fd.ops.matmul(x, x)))
    for _ in range(ENOUGH):
        fd.execute([torch.ones(3, 3)])
    assert fd.cuda_graphs()[0].startswith(
        "not captured: a CUDA graph would not make 2 step(s) faster"
    )


def test_a_kernel_alone_is_captured_later(
    made: list[CpuGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph saves little per run; many shapes with few runs must not pay for captures."""
    monkeypatch.setattr(cuda_graphs, "MIN_STEPS", 3)
    monkeypatch.setenv("FUSER_DISABLE", "compiled_runner")
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        fd.add_output(fd.ops.add(x, x))
    inputs = [torch.ones(3)]
    for _ in range(cuda_graphs.RUNS_BEFORE_FEW):
        fd.execute(inputs)
    assert not any(maker.made for maker in made)
    for k in range(4):
        assert torch.equal(fd.execute([torch.full((3,), float(k))])[0], torch.full((3,), 2.0 * k))
    assert launches(made) > 2


def test_tensors_that_take_turns_have_a_twin_each(
    made: list[CpuGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a copy of the graph per address, no kernel needs an update any more."""
    monkeypatch.setenv("FUSER_DISABLE", "compiled_runner")
    case = CASES["kernels"]
    fd, sets = defined(case), [case.make(CPU) for _ in range(3)]
    for k in range(60):
        check(case, sets[k % 3], fd.execute(sets[k % 3]))
    updates = 0

    def count(self: CpuGraph, node: object, call: object) -> None:
        nonlocal updates
        updates += 1

    with monkeypatch.context() as patched:
        patched.setattr(CpuGraph, "update", count)
        for k in range(30):
            check(case, sets[k % 3], fd.execute(sets[k % 3]))
    assert not updates
    # More places than twins: one of them is told.
    sets += [case.make(CPU) for _ in range(3)]
    for k in range(60):
        check(case, sets[k % 6], fd.execute(sets[k % 6]))
    ((graph,),) = [maker.made for maker in made]
    assert len(graph.twins) == cuda_graphs.MAX_TWINS
