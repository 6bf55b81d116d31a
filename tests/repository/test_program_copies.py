"""Tests that `--from-text` finds differences between programs and their copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fuser import FusionDefinition, ParallelType, multidevice
from fuser.frontend import python_printer
from fuser.ops.define import define_tensor
from hostir.runtime.evaluator import ProgramEvaluator
from hostir.runtime.plan import Plan
from hostir.runtime.recorder import Recorder
from tests.support.program_copies import Watch, Watcher, check_copies, check_runs

# The tests plant what is to be found.
pytestmark = pytest.mark.from_text(watched=False)
WATCHER = Watcher()


@pytest.fixture
def watch() -> Iterator[Watch]:
    WATCHER.watch = made = Watch(has_runs=True)
    WATCHER.known.clear()
    with WATCHER.installed():
        yield made


def wrong_of(watch: Watch) -> str:
    """Returns the differences found in copies and in runs."""
    WATCHER.watch = None
    watch.settle(Counter())
    return "\n".join([*check_copies(watch, Counter()), *check_runs(watch)])


def scaled(factor: float = 0.3) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.mul(x, factor))
        fd.add_output(fd.ops.rand_like(x))
    return fd


def updated() -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], stride_order=[0, 1])
        fd.add_output(fd.ops.add(x, 1.0), x)
    return fd


def sharded(*, across: bool = True) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.sum(x, 0 if across else 1))
        fd.add_output(fd.ops.rand_like(x))
        x.set_device_mesh([0, 1])
        x.outer_split(0, 2)
        x.axis(0).parallelize(ParallelType.mesh_x)
    return fd


def by_hand() -> FusionDefinition:
    with FusionDefinition() as fd:
        y = fd.ops.exp(fd.define_tensor([-1, -1]))
        fd.add_output(y)
        y.axis(0).parallelize(ParallelType.grid_x)
    return fd


def run(fd: FusionDefinition) -> None:
    x = torch.randn(6, 4)
    if fd.fusion.aliases:
        x = torch.randn(4, 6).t()
    for _ in range(3):
        fd.execute([x])


def run_on_ranks(fd: FusionDefinition) -> None:
    x = torch.randn(6, 4)
    with multidevice.simulate(2) as world:
        world.run(lambda: [fd.execute([x]) for _ in range(3)])


def run_by_hand(fd: FusionDefinition) -> None:
    fd.manual_execute([torch.randn(6, 4)])


KINDS: list[tuple[Callable[[], FusionDefinition], Callable[[FusionDefinition], None], int]] = [
    (scaled, run, 1),
    (updated, run, 1),
    (sharded, run_on_ranks, 2),
    (by_hand, run_by_hand, 1),
]
of_each_kind = pytest.mark.parametrize(("define", "execute", "ranks"), KINDS)


@of_each_kind
def test_first_runs_are_noted_and_equal(
    watch: Watch,
    define: Callable[[], FusionDefinition],
    execute: Callable[[FusionDefinition], None],
    ranks: int,
) -> None:
    execute(define())
    assert len(watch.seen) == 1
    (runs,) = watch.worlds.values()
    assert [len(runs[rank]) for rank in range(ranks)] == [1] * ranks
    assert not wrong_of(watch) and not watch.left_out


@pytest.mark.parametrize("times", [0, 1, 2])
@pytest.mark.parametrize(("define", "execute", "ranks"), KINDS[:3])
def test_steps_that_a_plan_lacks_or_has_twice_are_told(
    watch: Watch,
    monkeypatch: pytest.MonkeyPatch,
    define: Callable[[], FusionDefinition],
    execute: Callable[[FusionDefinition], None],
    ranks: int,
    times: int,
) -> None:
    finish = Recorder.finish

    def so_often(recorder: Recorder, *args: Any) -> Plan:
        """Returns a plan with each of its steps repeated `times` times."""
        plan = finish(recorder, *args)
        recorder.generic[:] = [make for make in recorder.generic for _ in range(times)]
        return replace(plan, steps=tuple(step for step in plan.steps for _ in range(times)))

    monkeypatch.setattr(Recorder, "finish", so_often)
    execute(define())
    assert watch.plans >= ranks
    assert bool(watch.wrong_plans) is (times != 1), watch.wrong_plans
    for line in watch.wrong_plans:
        assert "expected" in line and "found" in line


@of_each_kind
def test_results_that_differ_are_told(
    watch: Watch,
    define: Callable[[], FusionDefinition],
    execute: Callable[[FusionDefinition], None],
    ranks: int,
) -> None:
    execute(define())
    (runs,) = watch.worlds.values()
    noted = runs[ranks - 1][0].found
    # The outputs, then the inputs that are updated.
    (*_, last) = (t for part in noted for t in part)  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]
    last[0] += 1e-3
    assert wrong_of(watch).count("its copy has other results: Tensor-likes are not equal") == 1
    last[0] -= 1e-3


def test_strides_that_differ_are_told(watch: Watch) -> None:
    run(scaled())
    (run_noted,) = watch.worlds[None][0]
    (outputs, _) = run_noted.found
    outputs[0] = outputs[0].t().contiguous().t()  # pyright: ignore
    assert "its copy has other results: (torch.float32, (6, 4), (4, 1)), expected" in wrong_of(
        watch
    )


def test_texts_that_say_something_else_are_told(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_printer, "number_text", lambda value: f"{value:.3f}")
    run(scaled(0.30001))
    assert "0.30001" in wrong_of(watch)


def test_texts_that_raise_are_told(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_printer, "number_text", lambda value: f"{value}!")
    run(scaled())
    assert "SyntaxError" in wrong_of(watch)


def test_programs_without_a_text_are_told(watch: Watch) -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.neg(define_tensor([4])))
    with pytest.raises(RuntimeError):
        fd.execute([])
    assert "no Python statement can create" in wrong_of(watch)


def test_programs_that_a_rank_did_not_end_are_left_out(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank failed in a program, so the copies are not run."""
    fd, other = sharded(across=False), by_hand()
    plain = ProgramEvaluator.run_entry

    def failing(*args: Any, **kwargs: Any) -> Any:
        outputs = plain(*args, **kwargs)
        if not multidevice.Communicator.instance().rank():
            raise ValueError("on one rank")
        return outputs

    def run_both() -> None:
        other.execute([torch.ones(2, 2)])
        monkeypatch.setattr(ProgramEvaluator, "run_entry", failing)
        fd.execute([torch.randn(6, 4)])

    with multidevice.simulate(2) as world, pytest.raises(ValueError):
        world.run(run_both)
    monkeypatch.undo()
    (runs,) = watch.worlds.values()
    # A program without a mesh is noted once, on whichever rank it ran first.
    assert {rank: len(some) for rank, some in runs.items()} == {0: 1, 1: 1}
    assert not wrong_of(watch)
    assert {rank: len(some) for rank, some in runs.items()} == {0: 1, 1: 0}
    assert watch.left_out == {"some ranks did not run the program": 1}
