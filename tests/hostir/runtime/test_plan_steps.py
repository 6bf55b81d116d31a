"""The steps that programs record for later runs: golden texts of their kinds, order and number.

    HOSTIR_GOLDEN=write python -m pytest -q tests/hostir/runtime/test_plan_steps.py

makes the texts anew, one file for each group of programs. The plans of the tests that
`--from-text` watches are counted (`tests/support/program_copies.py`), by the account that is tested
here.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, ops
from hostir import Allocate, HostIrContainer
from hostir.runtime.evaluator import ProgramEvaluator
from hostir.runtime.frame import Frame
from hostir.runtime.plan import Plan
from hostir.runtime.plan_cache import PlanCache
from hostir.runtime.steps import Action, Both, Step
from hostir.tools.run_text import shards_of
from multidevice import Communicator, DeviceMesh, simulate
from tests.fuser.frontend.test_definition_user_programs_on_ranks import SHARED, run_on_rank
from tests.fuser.nvfuser import test_multi_device_executor as streamed
from tests.hostir.runtime.test_size_generic_plan import _two_layers as two_layers
from tests.support import handmade_programs, host_programs, stream_programs
from tests.support.plan_steps import (
    by_rank,
    compressed,
    faults,
    text_of,
    values_of,
    watched_plans,
)
from tests.support.user_programs import ALL
from tests.support.user_programs.table import Program

GOLDEN = Path(__file__).parent / "golden" / "steps"
Run = Callable[[], object]
Seen = tuple[ProgramEvaluator, Plan, Sequence[Any]]


# ------------------------------------------------------------------ programs
def _one_device(program: Program) -> Run:
    return lambda: program.build().execute(program.inputs())


def _on_ranks(count: int, body: Callable[[], object]) -> Run:
    def run() -> None:
        with simulate(count) as world:
            world.run(body)

    return run


def _shared(program: Program) -> Run:
    return _on_ranks(2, lambda: run_on_rank(program))


def _handmade(example: handmade_programs.Example) -> Run:
    return lambda: handmade_programs.run_simulated(example, example.build())


def _of_streams(program: stream_programs.Program) -> Run:
    return lambda: stream_programs.outputs_of(program, program.build())


def _compiled(case: host_programs.Case) -> Run:
    return lambda: host_programs.check(host_programs.build(case), case)


def _in_steps(case: streamed.Case) -> Run:
    def body() -> None:
        executor, inputs, _ = streamed.executor_of(case)
        xs = [torch.ones(shape) for shape in case.shapes]
        executor.run([streamed.local(x, tv) for x, tv in zip(xs, inputs, strict=True)])

    return _on_ranks(case.ranks, body)


def copies_of_inputs() -> HostIrContainer:
    """Has results in the memory of an input, which must be copied for the caller."""
    hic = HostIrContainer()
    with hic:
        x = hic.input([4, 6])
        turned = ops.permute(x, [1, 0])
        y, z = ops.set(turned), ops.set(x)
        hic.append(turned, y, z)
        hic.add_output(y)
        hic.add_output(z)
    return hic


def outputs_of_one_rank() -> HostIrContainer:
    """Has two ranks, each of which computes another output."""
    hic = HostIrContainer()
    with hic:
        for rank in range(2):
            x = hic.input([4, 6], mesh=DeviceMesh([rank]))
            y = hic.tensor([4, 6], mesh=DeviceMesh([rank]))
            hic.append(Allocate(y))
            hic.append(ops.neg(x), into=y)
            hic.add_output(y)
    return hic


OWN = {
    "copies of inputs": handmade_programs.Example(
        copies_of_inputs, ((4, 6),), lambda x: [x.permute(1, 0), x]
    ),
    "outputs of one rank": handmade_programs.Example(
        outputs_of_one_rank, ((4, 6), (4, 6)), lambda x, y: [-x, -y], ranks=2
    ),
}
PEERS = [n for n, case in streamed.CASES.items() if case.params]
GROUPS: dict[str, dict[str, Run]] = {
    "programs": {p.name: _one_device(p) for p in ALL},
    "programs_on_ranks": {p.name: _shared(p) for p in SHARED[::4]},
    "handmade": {name: _handmade(e) for name, e in handmade_programs.EXAMPLES.items()},
    "outputs": {name: _handmade(e) for name, e in OWN.items()},
    "streams": {name: _of_streams(p) for name, p in stream_programs.PROGRAMS.items()},
    "stream_axes": {
        **{name: _in_steps(case) for name, case in streamed.CASES.items()},
        **{
            f"{n} of copies": _in_steps(replace(streamed.CASES[n], params=streamed.PEERS))
            for n in PEERS
        },
    },
    "compiled": {name: _compiled(case) for name, case in host_programs.CASES.items()},
}
CASES = [pytest.param(g, n, id=f"{g} {n}") for g, group in GROUPS.items() for n in group]


def seen_in(run: Run) -> list[Seen]:
    """Returns the plans that evaluators record in a run, each with its inputs."""
    found: list[Seen] = []
    with watched_plans(lambda *seen: found.append(seen)):
        torch.manual_seed(0)
        run()
    return found


def told(seen: Sequence[Seen]) -> str:
    """Returns the plans as text, by rank, in the order in which they were made."""
    texts: dict[int, list[str]] = {}
    for evaluator, plan, inputs in seen:
        rank = values_of(evaluator, inputs)[1]
        texts.setdefault(rank, []).append(text_of(plan))
    return by_rank(texts)


# ------------------------------------------------------------------ golden texts
def section(group: str, name: str) -> str:
    """Returns the golden text of a program; "" if there is none."""
    path = GOLDEN / f"{group}.txt"
    text = path.read_text() if path.exists() else ""
    parts = dict(part.split(" ==\n", 1) for part in text.split("== ")[1:])
    return parts.get(name, "").removesuffix("\n")


def write_section(group: str, name: str, text: str) -> None:
    """Writes the text of a program into its file, in the order of the group."""
    names = [*GROUPS.get(group, SIZED)]
    parts = {n: section(group, n) for n in names} | {name: text}
    GOLDEN.mkdir(exist_ok=True)
    kept = [f"== {n} ==\n{part}\n" for n, part in parts.items() if part]
    (GOLDEN / f"{group}.txt").write_text("".join(kept))


def assert_golden(group: str, name: str, text: str) -> None:
    if os.environ.get("HOSTIR_GOLDEN") == "write":
        write_section(group, name, text)
    assert text == section(group, name)


@pytest.mark.parametrize(("group", "name"), CASES)
def test_programs_record_the_steps_of_the_golden_texts(group: str, name: str) -> None:
    seen = seen_in(GROUPS[group][name])
    # If the value of a float decides the steps, each run walks the program.
    assert_golden(group, name, told(seen) if seen else "no plan\n")


# ------------------------------------------------------------------ two sizes
Tensors = Callable[[int], list[Any]]
ROWS = (6, 10)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _any_size(define: Callable[..., Sequence[Any]], make: Tensors, updates: int = 0) -> Run:
    """Runs a definition of tensors of any sizes (and of scalars) on inputs of each number of rows;
    its first results are written into the first inputs."""

    def run() -> None:
        with FusionDefinition() as fd:
            declared: list[Any] = [
                fd.define_tensor([-1] * x.ndim, contiguity=True, dtype=x.dtype)
                if isinstance(x, torch.Tensor)
                else fd.define_scalar(None, DataType.Double)
                for x in make(2)
            ]
            for k, out in enumerate(define(fd.ops, *declared)):
                fd.add_output(out, declared[k] if k < updates else None)
        for rows in ROWS:
            fd.execute(make(rows))

    return run


def _layers(ops: Any, x: Any, v: Any, w: Any) -> list[Any]:
    return [ops.relu(ops.matmul(ops.relu(ops.matmul(x, v)), w))]


def _norm(ops: Any, x: Any, s: Any) -> list[Any]:
    total = ops.broadcast_in_dim(ops.sum(x, [1]), x.shape(), [0])
    return [ops.mul(ops.sub(x, total), s), ops.max(x, [0])]


def _heads(ops: Any, x: Any, w: Any) -> list[Any]:
    heads = ops.permute(ops.reshape(ops.linear(x, w), [x.shape()[0], 2, -1]), [1, 0, 2])
    return [heads, ops.exp(ops.matmul(heads, ops.permute(heads, [0, 2, 1])))]


def _parts(ops: Any, x: Any, w: Any) -> list[Any]:
    y = ops.relu(x)
    return [y, ops.matmul(ops.slice(y, [0, 1], [x.shape()[0], 5]), w), ops.cat([x, y], 0)]


def _updated(ops: Any, x: Any, y: Any) -> list[Any]:
    return [ops.add(x, y), ops.mul(x, y)]


def _drawn(ops: Any, x: Any) -> list[Any]:
    return [ops.mul(ops.rand_like(x), x), ops.randn_like(x)]


def _sorted(ops: Any, x: Any) -> list[Any]:
    y = ops.exp(x)
    return [ops.neg(ops.topk(y, 2, -1)[0]), ops.argsort(y, -1), ops.cumsum(y, 0)]


def _sets(ops: Any, x: Any) -> list[Any]:
    return [ops.set(ops.permute(x, [1, 0])), ops.permute(x, [1, 0])]


def _in_chunks(fixed: str) -> Run:
    """Defines a program with the same number of steps for all sizes of the other axes."""

    def body() -> None:
        ring = streamed.ring_of_any_rows(2) if fixed == "ring" else None
        if ring is not None:
            executor, x = ring
            for rows in ROWS:
                executor.run([streamed.local(normal(2, rows, 4), x)])
            return
        with FusionDefinition() as fd:
            x, w = fd.define_tensor([3, -1, -1]), fd.define_tensor([-1, -1])
            y = fd.ops.matmul(fd.ops.relu(x), w)
            fd.add_output(y)
            y.axis(0).parallelize(streamed.STREAM)
        for rows in ROWS:
            fd.execute([normal(3, rows, 4), normal(4, 5)])

    return _on_ranks(2, body) if fixed == "ring" else body


def _two_layers(ranks: int) -> Run:
    """Defines layers with weights cut by columns, then by rows, and an allreduce at the end."""

    def body() -> None:
        rank = Communicator.instance().rank()
        fd = two_layers(Communicator.instance())
        for rows in ROWS:
            v, w = normal(8, 6).chunk(ranks)[rank], normal(4, 8).chunk(ranks, 1)[rank]
            fd.execute([normal(rows, 6), v.contiguous(), w.contiguous()])

    return _on_ranks(ranks, body)


def _compiled_for(case: host_programs.Case) -> Run:
    program = host_programs.build(case)

    def body() -> None:
        communicator = Communicator.instance()
        evaluator = ProgramEvaluator(program, communicator)
        for factor in (1, 2):
            (first, *rest), more = case.inputs(), case.inputs()
            # The rows of x, and of a mask that has as many.
            inputs = [
                torch.cat([x] * factor) if x.shape[:2] == first.shape[:2] else x
                for x in (first, *rest)
            ]
            assert len(more) == len(inputs)
            evaluator.run(shards_of(program, inputs, communicator.rank()))

    return _on_ranks(case.ranks, body)


SIZED: dict[str, Run] = {
    "kernels and a scalar": _any_size(_norm, lambda n: [normal(n, 4), 0.5]),
    "matmuls": _any_size(_layers, lambda n: [normal(n, 4), normal(4, 8), normal(8, 5)]),
    "views": _any_size(_heads, lambda n: [normal(n, 4), normal(8, 4)]),
    "slices": _any_size(_parts, lambda n: [normal(n, 6), normal(4, 3)]),
    "in place": _any_size(_updated, lambda n: [normal(n, 4), normal(n, 4)], updates=1),
    "random": _any_size(_drawn, lambda n: [normal(n, 4)]),
    "library ops": _any_size(_sorted, lambda n: [normal(n, 4)]),
    "outputs of inputs": _any_size(_sets, lambda n: [normal(n, 4)]),
    "chunks": _in_chunks("chunks"),
    "ring on 2 ranks": _in_chunks("ring"),
    **{f"two layers on {n} ranks": _two_layers(n) for n in (1, 2, 4)},
    **{f"compiled {name}": _compiled_for(case) for name, case in host_programs.CASES.items()},
}


@pytest.mark.parametrize("name", SIZED)
def test_other_sizes_have_the_steps_of_the_golden_texts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_for_new_sizes, made = PlanCache.plan_for_new_sizes, list[Plan]()

    def noted(cache: PlanCache, frame: Frame) -> Plan | None:
        plan = plan_for_new_sizes(cache, frame)
        if plan is not None:
            made.append(plan)
        return plan

    monkeypatch.setattr(PlanCache, "plan_for_new_sizes", noted)
    seen = seen_in(SIZED[name])
    plans: dict[int, list[Seen]] = {}
    for one in seen:
        plans.setdefault(id(one[0]), []).append(one)
    for first, second in plans.values():
        assert second[1].describe() == first[1].describe()
        assert text_of(second[1]) == text_of(first[1])
    how = "by its pattern" if made else "recorded again"
    text = told([one for one, _ in plans.values()])
    assert_golden("sizes", name, f"another size: {how}\n{text}")


# ------------------------------------------------------------------ faults are told
def without(steps: Sequence[Any], k: int) -> tuple[Any, ...]:
    return (*steps[:k], *steps[k + 1 :])


def twice(steps: Sequence[Any], k: int) -> tuple[Any, ...]:
    return (*steps[: k + 1], *steps[k:])


FAULTY = [
    *(f"outputs {name}" for name in OWN),
    *(f"handmade {name}" for name in ("HI-10 then", "HI-11 symmetric", "deallocation", "chunks")),
    *(f"handmade {name}" for name in ("HI-2 units", "HO-1 on 2", "HO-4 on 2", "permutations on 2")),
    *(f"streams {name}" for name in ("step_buffers", "ring_linear", "forwarding_ring")),
    *(f"compiled {name}" for name in ("heads", "encoder2", "slice2", "mesh2x2")),
    *(f"programs {name}" for name in ("moe_gating", "adam", "nucleus_filter", "key_cache_step")),
]


@pytest.mark.parametrize("which", FAULTY)
def test_a_step_that_is_twice_there_or_not_there_is_told(which: str) -> None:
    group, _, name = which.partition(" ")
    for evaluator, plan, inputs in seen_in(GROUPS[group][name]):
        where = values_of(evaluator, inputs)
        assert not faults(plan, *where)
        for k, (step, op) in enumerate(plan.steps):
            for change in (without, twice):
                wrong = replace(plan, steps=change(plan.steps, k))
                assert faults(wrong, *where), f"{change.__name__} {plan.describe()[k]}"
            if isinstance(step, Both):
                half = (*plan.steps[:k], (step.first, op), *plan.steps[k + 1 :])
                assert faults(replace(plan, steps=half), *where), plan.describe()[k]


def test_a_transfer_of_a_group_that_is_started_twice_is_told() -> None:
    """The group is one step, whose text has the number of transfers."""
    groups = 0
    for evaluator, plan, inputs in seen_in(GROUPS["streams"]["ring_linear"]):
        for k, (step, op) in enumerate(plan.steps):
            start = step.first if isinstance(step, Both) else step
            if not isinstance(start, Action) or start.operands is None:
                continue
            more: Step = replace(start, operands=start.operands + 1)
            more = replace(step, first=more) if isinstance(step, Both) else more
            wrong = replace(plan, steps=(*plan.steps[:k], (more, op), *plan.steps[k + 1 :]))
            assert faults(wrong, *values_of(evaluator, inputs)), plan.describe()[k]
            groups += 1
    assert groups >= 4


def test_buffers_that_end_nowhere_are_told() -> None:
    ((evaluator, plan, inputs),) = seen_in(GROUPS["compiled"]["linear_relu_sum"])
    where = values_of(evaluator, inputs)
    assert plan.blocks and plan.made
    for wrong in (replace(plan, blocks=plan.blocks[1:]), replace(plan, made={})):
        (line,) = faults(wrong, *where)
        assert "buffers" in line


def test_announced_communications_have_one_more_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = seen_in(GROUPS["compiled"]["sequence2"])
    monkeypatch.setenv("FUSER_DUMP", "communication")
    announced = seen_in(GROUPS["compiled"]["sequence2"])
    assert "Posting" in capsys.readouterr().out
    counts: dict[int, int] = {}
    for evaluator, plan, inputs in announced:
        where = values_of(evaluator, inputs)
        assert not faults(plan, *where)
        for k in range(len(plan.steps)):
            assert faults(replace(plan, steps=without(plan.steps, k)), *where)
        counts[where[1]] = len(plan.steps) - len(plain[0][1].steps)
    # A line for each on rank 0, which alone writes.
    assert counts == {0: 2, 1: 0}


def test_lines_that_repeat_stand_once() -> None:
    assert compressed(list("abc")) == ["a", "b", "c"]
    assert compressed(list("aab")) == ["2 x a", "b"]
    assert compressed(list("xabbabb")) == ["x", "2 x (", "  a", "  2 x b", ")"]
    assert compressed(list("abab")) == ["a", "b", "a", "b"]
