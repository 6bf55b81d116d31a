"""Merging: how often schedulers are asked, and which merges remain when they refuse."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from benchmarks.lowering_time import Case, define_transformer, lower_case
from fuser import ops
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.ops.nodes import BinaryOp
from fuser.passes import merge_groups
from fuser.passes.merge_groups import Merger
from fuser.schedule.registry import find_scheduler
from tests.support.segmented_fusions import check_values, cut, fusion_of
from tools.fuzz.runner import define
from tools.fuzz.single import generate


def chain_of_outputs(x: TensorView, count: int) -> tuple[TensorView, ...]:
    made: list[TensorView] = []
    for i in range(count):
        x = ops.add(ops.mul(x, float(i + 2)), 1.0)  # pyright: ignore[reportAssignmentType]
        made.append(x)
    return tuple(made)


def test_many_outputs_are_one_kernel_of_few_questions() -> None:
    """A scheduler is asked once for each output alone, and once for all of them together."""
    asked: list[int] = []

    def scheduler(fusion: Fusion) -> str | None:
        asked.append(len(fusion.exprs))
        return find_scheduler(fusion)

    segmented = cut(fusion_of(lambda x: chain_of_outputs(x, 40), 2), scheduler)
    assert len(segmented.segments) == 1
    assert asked == [2] * 40 + [80]


@pytest.mark.parametrize("most", range(1, 8))
def test_what_is_refused_is_halved(most: int) -> None:
    """Each kernel computes as many of seven outputs as a scheduler accepts, in program order."""

    def scheduler(fusion: Fusion) -> str | None:
        adds = sum(isinstance(e, BinaryOp) for e in fusion.exprs) // 2
        return find_scheduler(fusion) if adds <= most else None

    segmented = cut(fusion_of(lambda x: chain_of_outputs(x, 7), 2), scheduler)
    sizes = [len(s.outputs) for s in segmented.segments]
    expected = [most] * (7 // most) + [7 % most] * (7 % most > 0)
    assert sizes == expected
    assert [len(s.exprs) for s in segmented.segments] == [2 * n for n in expected]
    check_values(fusion_of(lambda x: chain_of_outputs(x, 7), 2), (3, 4))


def test_a_kernel_has_a_bounded_number_of_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_groups, "MAX_OPERANDS", 5)
    segmented = cut(
        fusion_of(lambda x: tuple(ops.sum(ops.mul(x, i + 0.5), [1]) for i in range(10)), 2)
    )
    assert [len(s.outputs) for s in segmented.segments] == [4, 4, 2]


def test_groups_with_a_third_step_between_them_stay_apart_until_it_is_merged() -> None:
    """With a -> b -> c and a -> c, merging a and c alone would make a cycle through b."""

    def build(x: TensorView) -> tuple[TensorView, ...]:
        a, b, c = chain_of_outputs(x, 3)
        return a, b, ops.add(c, a)  # pyright: ignore[reportReturnType]

    def scheduler(fusion: Fusion) -> str | None:
        # A kernel of the first two outputs is refused.
        outputs = {o.number for o in fusion.outputs}
        return None if refused_pair <= outputs else find_scheduler(fusion)

    fusion = fusion_of(build, 2)
    refused_pair = {fusion.outputs[0].number, fusion.outputs[1].number}
    segmented = cut(fusion, scheduler)
    # The last output joins the second; the first stays alone.
    assert [len(s.outputs) for s in segmented.segments] == [1, 2]


def test_a_kernel_moves_tensors_along_two_innermost_axes_at_most() -> None:
    """Ops that read one tensor in three orders are two kernels; one op with three orders is one."""

    def results(x: TensorView) -> tuple[TensorView, ...]:
        y = ops.exp(x)
        return (
            y,
            ops.permute(ops.neg(y), [0, 2, 1]),
            ops.permute(ops.abs(y), [2, 1, 0]),
            ops.permute(ops.sin(y), [1, 2, 0]),
        )

    def total(x: TensorView, y: TensorView, z: TensorView) -> TensorView:
        return ops.add(x, ops.add(ops.permute(y, [0, 2, 1]), ops.permute(z, [2, 1, 0])))

    fusion = fusion_of(results, 3)
    found = [(s.scheduler, len(s.outputs)) for s in cut(fusion).segments]
    assert found == [("transpose", 2), ("transpose", 2)]
    check_values(fusion, (3, 4, 5))
    sums = cut(fusion_of(total, 3, 3, 3)).segments
    assert [s.scheduler for s in sums if s.kind == "kernel"] == ["pointwise"]


def test_permutations_that_undo_each_other_merge() -> None:
    def build(x: TensorView) -> tuple[TensorView, TensorView]:
        y = ops.permute(ops.exp(x), [1, 0])
        return y, ops.neg(ops.permute(y, [1, 0]))

    (segment,) = cut(fusion_of(build, 2)).segments
    assert segment.scheduler == "transpose"
    check_values(fusion_of(build, 2), (3, 5))


def is_apart(merger: Any, start: object, goal: object) -> bool:
    """Returns whether a step depends on another through a third one, by searching all paths."""
    todo = [s for s in merger._sources(start) if s != goal]
    seen: set[object] = set()
    while todo:
        step = todo.pop()
        if step == goal:
            return True
        if step not in seen:
            seen.add(step)
            todo += merger._sources(step)
    return False


@pytest.mark.finding("G4")
def test_the_order_of_steps_tells_which_need_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a transformer and random programs, after each contraction and each undo:

    - every step has a larger number than the steps that it depends on;
    - the search between two numbers finds the same dependences as a search of all paths.
    """
    asked: Counter[bool] = Counter()
    contract, undo, are_apart = (
        getattr(Merger, name) for name in ("_contract", "_undo", "_are_apart")
    )

    def check_order(merger: Any) -> None:
        steps = [*merger._groups, *(e for es in merger._reading.values() for e in es)]
        for step in steps:
            numbers = [merger._number[s] for s in merger._sources(step)]
            assert max(numbers, default=-1) < merger._number[step]

    def contracting(merger: Any, place: int, other: int) -> object:
        done = contract(merger, place, other)
        check_order(merger)
        return done

    def undoing(merger: Any, done: object) -> None:
        undo(merger, done)
        check_order(merger)

    def asking(merger: Any, i: int, j: int) -> bool:
        found = are_apart(merger, i, j)
        assert found == (is_apart(merger, i, j) or is_apart(merger, j, i))
        asked[found] += 1
        return found

    monkeypatch.setattr(Merger, "_contract", contracting)
    monkeypatch.setattr(Merger, "_undo", undoing)
    monkeypatch.setattr(Merger, "_are_apart", asking)
    lower_case(Case(define_transformer, 3, ()), 3)
    for seed in range(30):
        print("seed", seed)
        cut(define(generate(seed)).fusion)
    assert min(asked[True], asked[False]) > 10
