"""Tests new sizes of programs that have run: right at the first call, without another walk."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from fuser import DataType, FusionDefinition, ParallelType
from fuser.ir.axis_graph import AxisGraph
from fuser.ir.fusion import Fusion
from fuser.ir.op import walk
from fuser.ir.scalar import constructors
from fuser.ir.scalar.compiled import compiled
from fuser.kernels import executor
from fuser.kernels.executor import compile_many
from fuser.runtime.compile import compile_kernels
from fuser.schedule.iteration_space import iteration_space
from hostir.analysis.collective_matching import find_mismatches
from hostir.analysis.races import find_races
from hostir.ir.buffer_aliasing import Storage, WholeShapes
from hostir.runtime.dry_run import can_bind, dry_run_plan
from hostir.runtime.evaluator import ProgramEvaluator
from hostir.runtime.execute import Execution
from hostir.runtime.inputs import InputBinder
from hostir.runtime.plan import Plan
from hostir.runtime.steps import LaunchStep, Multiply, View
from tests.support.counted_calls import calls_of, name_of
from tests.support.host_programs import CASES, build

SIZES = [5, 1, 0, 2, 3, 8, 64, 7, 16, 33, 100, 1, 17, 0, 31]


# ------------------------------------------------------------------ programs
def _layers() -> FusionDefinition:
    """Defines three matmuls, kernels before and between them, and a norm of columns."""
    with FusionDefinition() as fd:
        x, *weights = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(4))
        y = fd.ops.relu(x)
        for w in weights:
            y = fd.ops.relu(fd.ops.matmul(y, w))
        total = fd.ops.sum(y, [0])
        fd.add_output(fd.ops.add(y, fd.ops.broadcast_in_dim(total, y.shape(), [1])))
    return fd


def _layers_meaning(x: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
    y = x.double().relu()
    for w in weights:
        y = (y @ w.double()).relu()
    return [y + y.sum(0)]


def _rows() -> FusionDefinition:
    """Defines a kernel for any layout, an output that is a reshaped view, and a scalar."""
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([-1, -1]) for _ in range(2))
        s = fd.define_scalar(None, DataType.Double)
        z = fd.ops.mul(fd.ops.add(x, y), s)
        flat = fd.ops.reshape(z, [fd.ops.mul(z.shape()[0], z.shape()[1])])
        fd.add_output(z)
        fd.add_output(fd.ops.sum(fd.ops.exp(z), [1]))
        fd.add_output(flat)
    return fd


def _in_place() -> FusionDefinition:
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([-1], contiguity=True) for _ in range(2))
        fd.add_output(fd.ops.add(x, y), alias_input=x)
        fd.add_output(fd.ops.mul(x, y))
    return fd


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def _square(n: int) -> list[torch.Tensor]:
    return [_normal(n, n, seed=k) / max(n, 1) ** 0.5 for k in range(4)]


# ------------------------------------------------------------------ right at once
def test_each_new_size_is_right_at_its_first_call_and_later() -> None:
    fd = _layers()
    for n in SIZES:
        inputs = _square(n)
        (want,) = _layers_meaning(*inputs)
        for _ in range(3):
            (got,) = fd.execute(inputs)
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_the_first_run_of_a_bound_program_equals_evaluate_bit_for_bit(name: str) -> None:
    case = CASES[name]
    if case.ranks > 1:
        return
    evaluator = ProgramEvaluator(build(case))
    inputs = case.inputs()
    want = evaluator.evaluate(inputs)
    for _ in range(3):
        for got, expected in zip(evaluator.run(inputs), want, strict=True):
            assert torch.equal(got, expected) and got.stride() == expected.stride()


@pytest.mark.parametrize("schedules", [(), ("schedules_for(h200)",)])
def test_layouts_and_places_of_new_sizes(schedules: Sequence[str]) -> None:
    """Uses tensors that are transposed, have gaps, and have any alignment."""
    fd, memory = _rows(), _normal(4096, seed=1)
    for n, m in [(4, 8), (5, 7), (1, 9), (8, 1), (0, 4), (3, 0), (16, 12), (6, 20), (13, 13)]:
        for start in (0, 1, 4, 2):
            x = memory[start : start + n * m].view(n, m)
            for y in (
                _normal(n, m),
                _normal(m, n).t(),
                _normal(n, 2 * m + 1)[:, 1 : 2 * m + 1 : 2],
            ):
                for _ in range(2):
                    z, sums, flat = fd.execute([x, y, 0.5], _enable_options=schedules)
                    want = (x.double() + y.double()) * 0.5
                    torch.testing.assert_close(z.double(), want, rtol=1e-5, atol=1e-5)
                    torch.testing.assert_close(
                        sums.double(), want.exp().sum(1), rtol=1e-4, atol=1e-4
                    )
                    assert torch.equal(flat, z.reshape(-1))


def test_new_sizes_of_an_update_in_place() -> None:
    fd, memory = _in_place(), _normal(512)
    for n in (4, 9, 1, 0, 33, 100):
        for x, y in (
            (_normal(n), _normal(n, seed=1)),
            (memory[1 : n + 1].clone(), memory[3 : n + 3]),
        ):
            for _ in range(2):
                old = x.clone()
                (product,) = fd.execute([x, y])
                torch.testing.assert_close(x.double(), old.double() + y)
                torch.testing.assert_close(product.double(), old.double() * y)
        both = _normal(n, seed=2)
        old = both.clone()
        # The input that is only read lies where the update is written.
        (product,) = fd.execute([both, both])
        assert torch.equal(both, old + old) and torch.equal(product, old * old)


def test_threads_bring_new_sizes_at_once() -> None:
    fd, count, wrong = _layers(), 3, list[int]()
    fd.execute(_square(4))
    start = threading.Barrier(count)

    def body(first: int) -> None:
        start.wait()
        # Sizes of its own, and sizes that all threads bring at once.
        for n in [k for j in range(12) for k in (10 + first + count * j, 60 + j)]:
            inputs = _square(n)
            (want,) = _layers_meaning(*inputs)
            for _ in range(2):
                (got,) = fd.execute(inputs)
                if not torch.allclose(got.double(), want, rtol=1e-4, atol=1e-4):
                    wrong.append(n)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ------------------------------------------------------------------ bound without a run
def test_a_first_run_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = _layers()
    fd.execute(_square(4))

    def walked(*args: object) -> None:
        raise AssertionError("the first run of a new size went op by op")

    monkeypatch.setattr(ProgramEvaluator, "walk", walked)
    for n in (5, 6, 1):
        (got,) = fd.execute(_square(n))
        torch.testing.assert_close(got.double(), _layers_meaning(*_square(n))[0])


def test_what_is_bound_and_what_evaluate_runs_are_the_same_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Later sizes add kernels; another kernel might fit, too, and round differently."""
    case = CASES["linear_relu_sum"]
    evaluator, inputs = ProgramEvaluator(build(case)), case.inputs()
    want = evaluator.run(inputs)

    def bound_anew(*args: object, **kwargs: object) -> None:
        raise AssertionError("evaluate chose its kernels anew")

    monkeypatch.setattr(executor.FusedKernelExecutor, "bind", bound_anew)
    for got, expected in zip(evaluator.evaluate(inputs), want, strict=True):
        assert torch.equal(got, expected)


def test_without_memory_for_all_at_once_a_first_run_goes_op_by_op(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fd, asked = _layers(), list[object]()
    fd.execute(_square(4))
    with monkeypatch.context() as patch:

        def refuse(plan: Plan) -> None:
            asked.append(plan)
            raise torch.OutOfMemoryError("no memory for all intermediates at once")

        patch.setattr(Plan, "reserve", refuse)
        for _ in range(2):
            (got,) = fd.execute(_square(9))
            torch.testing.assert_close(got.double(), _layers_meaning(*_square(9))[0])
    assert len(asked) == 2, "what found no memory was remembered as bound"
    (got,) = fd.execute(_square(9))
    torch.testing.assert_close(got.double(), _layers_meaning(*_square(9))[0])


def test_what_only_a_run_tells_is_not_bound_before() -> None:
    """Communications need the agreement of ranks, and streams belong to a run."""
    for name, case in CASES.items():
        program = build(case)
        assert can_bind(program) is not bool(program.started()), name


@pytest.mark.parametrize("count", [None, 2])
def test_compilers_are_not_asked_for_new_sizes_of_a_stream(
    monkeypatch: pytest.MonkeyPatch, count: int | None
) -> None:
    """Of a program that no dry run binds, too: looking into the caches of kernels takes longer
    than to launch them."""
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
        z = fd.ops.add(x, y)
        fd.add_output(z)
        if count is not None:
            z.outer_split(0, count)
        z.axis(0).parallelize(ParallelType.stream)

    def check(n: int) -> None:
        x, y = _normal(n, 6), _normal(n, 6, seed=1)
        assert torch.equal(fd.execute([x, y])[0], x + y)

    for n in (8, 12, 5):
        check(n)

    def asked(*args: object, **kwargs: object) -> None:
        raise AssertionError("a compiler was asked for kernels that exist")

    monkeypatch.setattr(executor, "compile_kernels", asked)
    for n in (16, 7, 20):
        check(n)


# ------------------------------------------------------------------ size-generic plans
def _linears() -> FusionDefinition:
    """Defines products whose shapes differ for torch, and a kernel for any layout."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1, -1])
        w, v = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
        b = fd.define_tensor([-1], contiguity=True)
        h = fd.ops.tanh(fd.ops.linear(fd.ops.exp(x), w, b))
        fd.add_output(fd.ops.linear(h, v))
    return fd


def _linears_meaning(
    x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, b: torch.Tensor
) -> list[torch.Tensor]:
    x, w, v, b = (t.double() for t in (x, w, v, b))
    return [(x.exp() @ w.T + b).tanh() @ v.T]


def _linear_inputs(n: int, start: int) -> list[torch.Tensor]:
    """Returns inputs; the first has any alignment, and gaps for some sizes."""
    memory = _normal(4 * n * 9 + 8)
    x = memory[start : start + 3 * n * 9].view(3, n, 9)[:, :, : 9 - n % 2]
    k = x.shape[2]
    return [x, _normal(n + 1, k) / 4, _normal(5, n + 1) / 4, _normal(n + 1)]


def _assert_alike(made: Plan, told: Plan) -> None:
    for name in ("inputs", "size", "outputs", "blocks", "nbytes", "device", "records", "why_not"):
        assert getattr(made, name) == getattr(told, name), name
    assert [*made.made] == [*told.made]
    for (a, op), (b, other) in zip(made.steps, told.steps, strict=True):
        assert op is other and type(a) is type(b)
        if isinstance(a, LaunchStep) and isinstance(b, LaunchStep):
            assert a.operands == b.operands and a.kernel.variant is b.kernel.variant
            launches = a.kernel.launch, b.kernel.launch
            for one in launches:
                for i, _ in one.numbers:
                    one.args[i] = None  # of some earlier call
            assert replace(launches[0], numbers=()) == replace(launches[1], numbers=())
            # The parameters that depend on a run's scalars, and their current values.
            assert repr(a.numbers) == repr(b.numbers) and (a.read is None) is (b.read is None)
            values = [[(i, repr(of(a.numbers))) for i, of in one.numbers] for one in launches]
            assert values[0] == values[1]
        elif isinstance(a, View) and isinstance(b, View):
            assert a == b
        elif isinstance(a, Multiply) and isinstance(b, Multiply):
            assert (a.ins, a.out) == (b.ins, b.out)
            assert a.product.function is b.product.function
            views = [(p.result, *(v for _, v in p.operands)) for p in (a.product, b.product)]
            assert [v is None for v in views[0]] == [v is None for v in views[1]]


@pytest.mark.parametrize("schedules", [(), ("schedules_for(h200)",)])
def test_a_size_generic_plan_makes_the_plans_of_dry_runs(schedules: Sequence[str]) -> None:
    programs: list[tuple[FusionDefinition, Callable[[int], list[torch.Tensor]]]] = [
        (_layers(), _square),
        (_linears(), lambda n: _linear_inputs(n, n % 5)),
    ]
    for fd, make in programs:
        alike = 0
        for n in (12, 16, 7, 33, 1, 2, 64, 40, 41, 5, 100):
            for _ in range(2):
                fd.execute(make(n), _enable_options=schedules)
            evaluator, inputs = fd.fec._last().evaluator, make(n)
            generic = evaluator.cache._generic_plans[torch.device("cpu")]
            made = generic.plan_for(evaluator.binder.frame(list(inputs)))
            arenas = evaluator.cache.arenas_on(torch.device("cpu"))
            frame = evaluator.binder.frame(list(inputs))
            told = dry_run_plan(frame, evaluator.free, evaluator.outputs, arenas).plan
            assert told is not None
            if made is not None:
                _assert_alike(made, told)
                alike += 1
        assert alike >= 9


def test_later_sizes_have_no_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, linears = _layers(), _linears()
    # All of them in two classes: columns that are no multiple of 4 count as more rows (`step_of`).
    for n in range(33, 43):
        layers.execute(_square(n))
        linears.execute(_linear_inputs(n, 0))

    def refuse(*given: object) -> None:
        raise AssertionError("a program was walked again")

    monkeypatch.setattr(Execution, "run", refuse)
    for n in range(43, 53):
        (got,) = layers.execute(_square(n))
        (want,) = _layers_meaning(*_square(n))
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
        inputs = _linear_inputs(n, 4 * (n % 2))
        (got,) = linears.execute(inputs)
        (want,) = _linears_meaning(*inputs)
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_unusual_sizes_have_a_dry_run() -> None:
    """Uses sizes without elements, and ordinary sizes after them."""
    fd = _linears()
    for n in (8, 9, 0, 10, 0, 11):
        inputs = _linear_inputs(n, 0) if n else [torch.zeros(3, 0, 9), *_linear_inputs(4, 0)[1:]]
        want = _linears_meaning(*inputs)[0]
        (got,) = fd.execute(inputs)
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------ what a new size may cost
# Functions that look at programs, fusions or scalars, and how often each may run per new size.
COUNTED: dict[Callable[..., object], int] = {
    AxisGraph.__init__: 0,
    Fusion.copy: 0,
    Fusion.tensors: 0,
    Fusion.used_exprs: 0,
    constructors._evaluate: 0,  # pyright: ignore[reportPrivateUsage]
    constructors.apply: 0,
    compiled: 0,
    compile_many: 0,
    iteration_space: 0,
    compile_kernels: 0,
    walk: 0,
    find_races: 0,
    find_mismatches: 0,
    WholeShapes.of: 1,
    Storage.of: 1,
    Execution.run: 0,
    InputBinder.bind: 1,
}
# Python calls per launched or computed op of the host program (5 kernels and 3 products below).
MAX_CALLS_PER_OP = 110


@pytest.mark.parametrize("schedules", [(), ("schedules_for(h200)",)])
def test_a_new_size_looks_at_no_program_again(schedules: Sequence[str]) -> None:
    fd = _layers()

    def execute(n: int) -> object:
        return fd.execute(_square(n), _enable_options=schedules)

    for n in range(40, 52):
        execute(n)
    for n in (52, 53, 56):
        inputs = _square(n)
        names = calls_of(partial(fd.execute, inputs, _enable_options=schedules))
        counts = {name_of(f): (names[name_of(f)], most) for f, most in COUNTED.items()}
        over = {name: n for name, (n, most) in counts.items() if n > most}
        assert not over, f"size {n}: {over}"
        kinds = fd.fec.statistics()
        ops = kinds["kernels"] + kinds["library_calls"]
        assert ops == 7
        assert names.total() <= MAX_CALLS_PER_OP * ops, names.most_common(12)


class _Garbage:
    """Garbage in a cycle: the collector frees it and calls a Python function for each object."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        pass


def test_what_the_collector_does_is_not_counted() -> None:
    """The amount of garbage of earlier tests, and the time of its collection, are random."""

    def run() -> None:
        _Garbage()
        for _ in range(100):
            [[] for _ in range(100)]

    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        names = calls_of(run)
    finally:
        gc.set_threshold(*thresholds)
    assert names[name_of(_Garbage.__init__)] == 1 and not names[name_of(_Garbage.__del__)]


def test_functions_that_look_at_programs_are_counted() -> None:
    """A renamed function would always be counted 0 times."""

    def run() -> None:
        with FusionDefinition() as fd:
            x, y = (fd.define_tensor([-1, -1]) for _ in range(2))
            fd.add_output(fd.ops.matmul(fd.ops.relu(x), y))
        for size in (3, 4):
            fd.execute([torch.ones(size, size), torch.ones(size, size)])
        build(CASES["mlp2"])  # looks for races and mismatches between ranks, too

    names = calls_of(run)
    never = {name_of(f) for f in COUNTED if not names[name_of(f)]}
    assert not never, never


@pytest.mark.parametrize("modes", [(True, False), (False, True)])
def test_inference_mode_comes_and_goes(modes: tuple[bool, bool]) -> None:
    """Buffers of later runs are writable in every autograd mode, for any mode of the first run."""
    fd, inputs = _layers(), _square(6)
    (want,) = _layers_meaning(*inputs)
    for mode in modes * 2:
        for _ in range(2):
            with torch.inference_mode(mode):
                (got,) = fd.execute(inputs)
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
            assert got.is_inference() is mode
