"""Which results kernels recompute, and which are stored because recomputing costs more."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from fuser import ops
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.ops.nodes import LoadStoreOp
from fuser.passes.merge_groups import worth_storing
from fuser.passes.segment import SegmentedFusion
from tests.support.segmented_fusions import check_values, cut, fusion_of, kinds, without_persistent


def computed(segmented: SegmentedFusion) -> Counter[str]:
    """Returns how often all kernels together compute each kind of op."""
    return Counter(e.name for s in segmented.segments for e in s.exprs)


def both_sums(x: TensorView) -> tuple[TensorView, TensorView]:
    """Returns sums over different axes, which are two kernels."""
    return ops.sum(x, dim=0), ops.sum(x, dim=1)


def test_a_long_chain_is_computed_once() -> None:
    def build(x: TensorView) -> tuple[TensorView, TensorView]:
        for _ in range(60):
            x = ops.tanh(ops.mul(x, 1.01))
        return both_sums(x)

    fusion = fusion_of(build, 2)
    segmented = cut(fusion)
    assert kinds(segmented) == ["reduction", "reduction"]
    assert computed(segmented)["tanh"] == 60
    check_values(fusion, (3, 5))


def test_what_is_cheap_is_computed_again() -> None:
    fusion = fusion_of(lambda x: both_sums(ops.exp(x)), 2)
    segmented = cut(fusion)
    assert kinds(segmented) == ["reduction", "reduction"]
    assert computed(segmented)["exp"] == 2
    check_values(fusion, (3, 5))


def test_of_a_chain_only_the_costly_part_is_stored() -> None:
    """Three kernels need the expensive part; two of them add a cheap op."""

    def build(x: TensorView) -> tuple[TensorView, ...]:
        for _ in range(20):
            x = ops.tanh(x)
        return *both_sums(ops.add(x, 1.0)), ops.permute(ops.sum(ops.neg(x), [0, 1]), [])

    fusion = fusion_of(build, 2)
    segmented = cut(fusion)
    assert computed(segmented)["tanh"] == 20
    (stored,) = [s.outputs for s in segmented.segments if "tanh" in [e.name for e in s.exprs]]
    assert [segmented.fusion.definition(o).name for o in stored] == ["tanh", "sum"]  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("dim", [0, 1])
def test_stacked_softmaxes_do_not_compute_each_other_again(dim: int) -> None:
    """Persistent kernels compute each exponential once, for the sum and for the quotient."""

    def build(x: TensorView) -> TensorView:
        for _ in range(16):
            e = ops.exp(ops.sub(x, ops.max(x, dim=dim, keepdim=True)))
            x = ops.div(e, ops.sum(e, dim=dim, keepdim=True))
        return x

    fusion = fusion_of(build, 2)
    assert computed(cut(fusion))["exp"] == 16
    check_values(fusion, (3, 5))


@pytest.mark.parametrize("dim", [0, 1])
def test_whatever_the_schedulers_take(dim: int) -> None:
    """Without persistent kernels, each exponential is computed twice: for the sum and the
    quotient."""

    def build(x: TensorView) -> TensorView:
        for _ in range(16):
            e = ops.exp(ops.sub(x, ops.max(x, dim=dim, keepdim=True)))
            x = ops.div(e, ops.sum(e, dim=dim, keepdim=True))
        return x

    fusion = fusion_of(build, 2)
    assert computed(cut(fusion, without_persistent))["exp"] == 32


# ------------------------------------------------------------------ against all choices
def cost(fusion: Fusion, targets: set[TensorView]) -> float:
    """Returns the cost per element (bytes, and instructions as bytes) if each target is one
    kernel."""
    found = 0.0
    for target in targets:
        ops_, reads, todo = set[TensorOp](), set[TensorView](), [fusion.definition(target)]
        while todo:
            op = todo.pop()
            assert op is not None
            if op in ops_:
                continue
            ops_.add(op)
            for v in op.inputs:
                if isinstance(v, TensorView):
                    if v in targets or fusion.definition(v) is None:
                        reads.add(v)
                    else:
                        todo.append(fusion.definition(v))
        found += 4 * (1 + len(reads))
        found += sum(20 if op.name in ("tanh", "div") else 1 for op in ops_) / 8
    return found


@pytest.mark.parametrize("seed", range(60))
def test_near_the_best_of_all_choices(seed: int) -> None:
    """The choice for random pointwise graphs, with one kernel per output, is close to the
    optimum."""
    rng = random.Random(seed)

    def build(*xs: TensorView) -> tuple[TensorView, ...]:
        made, ends = [*xs], list[TensorView]()
        for k in range(9):
            a, b = rng.choice(made[-4:]), rng.choice(made)
            for _ in range(rng.choice((0, 0, 1, 4))):
                a = ops.tanh(a)
            made.append(rng.choice((ops.add, ops.div, ops.mul))(a, b))
            if k > 3 and rng.random() < 0.5:
                ends.append(ops.neg(made[-1]))
        return (*ends, ops.neg(made[-1]), ops.neg(made[-3]))

    fusion = fusion_of(build, 2, 2, 2)
    exprs, outputs = fusion.used_exprs(), {*fusion.outputs}
    assert not any(isinstance(e, LoadStoreOp) for e in exprs)
    ways = [_cone(fusion, {out}) for out in outputs]
    inputs = [v for v in fusion.inputs if isinstance(v, TensorView)]
    more = worth_storing(fusion, exprs, ways, [*inputs, *outputs])
    shared = [e.out_tensor for e in exprs if sum(e in way for way in ways) > 1]
    shared = [t for t in shared if t not in outputs][-10:]
    every = (
        cost(fusion, outputs | {*some})
        for n in range(len(shared) + 1)
        for some in itertools.combinations(shared, n)
    )
    found, best, none = cost(fusion, outputs | {*more}), min(every), cost(fusion, outputs)
    assert found <= none and found <= 1.25 * best, (found, best, none)


def _cone(fusion: Fusion, targets: set[TensorView]) -> frozenset[TensorOp]:
    ops_, todo = set[TensorOp](), [fusion.definition(t) for t in targets]
    while todo:
        op = todo.pop()
        if op is not None and op not in ops_:
            ops_.add(op)
            todo += [fusion.definition(v) for v in op.inputs if isinstance(v, TensorView)]
    return frozenset(ops_)
