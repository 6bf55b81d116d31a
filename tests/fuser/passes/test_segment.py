"""Segmentation: which tensors are stored, recomputed or aliases, and the order of segments."""

from __future__ import annotations

import pytest

from fuser import ops
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ops.define import define_tensor
from fuser.support.errors import UnsupportedError
from tests.support.segmented_fusions import check_values, cut, fusion_of, kinds, without_persistent


def softmax(x: TensorView) -> TensorView:
    e = ops.exp(ops.sub(x, ops.max(x, dim=1, keepdim=True)))
    return ops.div(e, ops.sum(e, dim=1, keepdim=True))


def test_a_pointwise_chain_with_two_outputs_is_one_kernel() -> None:
    def build(x: TensorView) -> tuple[TensorView, TensorView]:
        y = ops.exp(x)
        return y, ops.mul(ops.add(y, 1.0), y)

    fusion = fusion_of(build, 2)
    (segment,) = cut(fusion).segments
    assert (segment.scheduler, len(segment.exprs)) == ("pointwise", 3)
    assert segment.outputs == tuple(fusion.outputs)
    check_values(fusion, (3, 5))


def test_softmax_is_one_kernel() -> None:
    fusion = fusion_of(softmax, 2)
    (segment,) = cut(fusion).segments
    assert segment.scheduler == "inner_persistent"
    assert [e.name for e in segment.exprs].count("exp") == 1
    check_values(fusion, (3, 5))


def test_what_is_computed_from_the_rows_of_a_norm_joins_it() -> None:
    """Neither kernel reads a result of the other, but both compute the same sum."""

    def build(x: TensorView, r: TensorView) -> tuple[TensorView, TensorView]:
        h = ops.add(ops.mul(x, 0.5), r)
        centred = ops.sub(h, ops.div(ops.sum(h, [1], keepdim=True), 8.0))
        return ops.mul(centred, ops.rsqrt(ops.sum(ops.mul(h, h), [1], keepdim=True))), ops.mul(h, 2)

    fusion = fusion_of(build, 2, 2)
    assert kinds(cut(fusion)) == ["inner_persistent"]
    check_values(fusion, (5, 8), (5, 8))


def test_what_reads_more_than_the_rows_of_a_norm_stays_a_kernel() -> None:
    def build(x: TensorView, r: TensorView) -> tuple[TensorView, TensorView]:
        return ops.div(x, ops.sum(x, [1], keepdim=True)), ops.add(x, r)

    fusion = fusion_of(build, 2, 2)
    assert kinds(cut(fusion)) == ["inner_persistent", "pointwise"]
    check_values(fusion, (5, 8), (5, 8))


def test_softmax_over_outer_axes_recomputes_exponentials_and_stores_the_reductions_only() -> None:
    def build(x: TensorView) -> TensorView:
        e = ops.exp(ops.sub(x, ops.max(x, dim=0, keepdim=True)))
        return ops.div(e, ops.sum(e, dim=0, keepdim=True))

    fusion = fusion_of(build, 2)
    assert kinds(cut(fusion)) == ["outer_persistent"]
    segmented = cut(fusion, without_persistent)
    assert kinds(segmented) == ["reduction", "reduction", "pointwise"]
    stored = [o for s in segmented.segments[:-1] for o in s.outputs]
    assert [len(o.domain.no_reductions) for o in stored] == [1, 1]
    assert [e.name for e in segmented.segments[-1].exprs].count("exp") == 1
    check_values(fusion, (3, 5))


def test_a_norm_of_columns_keeps_what_belongs_to_the_reduced_space_in_its_kernel() -> None:
    def build(x: TensorView, r: TensorView) -> TensorView:
        h = ops.add(x, r)
        var, mean = ops.var_mean(h, [0], 0, True)
        return ops.mul(ops.sub(h, mean), ops.rsqrt(ops.add(var, 1e-5)))

    fusion = fusion_of(build, 2, 2)
    assert kinds(cut(fusion)) == ["outer_persistent"]
    segmented = cut(fusion, without_persistent)
    assert kinds(segmented) == ["reduction", "pointwise"]
    assert "rsqrt" in [e.name for e in segmented.segments[0].exprs]
    check_values(fusion, (3, 5), (3, 5))


def test_a_norm_of_columns_that_keeps_its_statistics_is_two_kernels() -> None:
    """The broadcast statistics are stored once, as the outputs of the caller."""

    def build(x: TensorView) -> tuple[TensorView, ...]:
        var, mean = ops.var_mean(x, [0, 1], 0)
        r = ops.rsqrt(ops.add(var, 1e-5))
        over = [ops.broadcast(v, [True, True, False]) for v in (mean, r)]
        return ops.mul(ops.sub(x, over[0]), over[1]), mean, r

    fusion = fusion_of(build, 3)
    assert kinds(cut(fusion)) == ["outer_persistent"]
    segmented = cut(fusion, without_persistent)
    assert kinds(segmented) == ["reduction", "pointwise"]
    assert segmented.segments[0].outputs == tuple(fusion.outputs[1:])
    check_values(fusion, (3, 2, 5))


def _scaled_sums(x: TensorView, w: TensorView) -> tuple[TensorView, ...]:
    """Returns sums as outputs, and a tensor that is computed from them."""
    total, largest = ops.sum(x, [0]), ops.max(x, [0])
    rate = ops.exp(ops.div(total, x.size(0)))
    shares = ops.mul(x, ops.broadcast(ops.mul(rate, largest), [True, False]))
    return total, largest, rate, ops.mul(shares, ops.broadcast(w, [True, False]))


def test_what_is_computed_from_sums_alone_joins_their_kernel() -> None:
    fusion = fusion_of(_scaled_sums, 2, 1)
    assert kinds(cut(fusion)) == ["outer_persistent"]
    segmented = cut(fusion, without_persistent)
    assert kinds(segmented) == ["reduction", "pointwise"]
    assert [e.name for e in segmented.segments[1].exprs].count("exp") == 0
    check_values(fusion, (7, 5), (5,))


def test_what_needs_more_than_sums_stays_apart() -> None:
    """A merged kernel would read the weight one element at a time."""

    def build(x: TensorView, w: TensorView) -> tuple[TensorView, ...]:
        total = ops.sum(x, [0])
        return total, ops.sub(w, ops.mul(total, 0.1))

    fusion = fusion_of(build, 2, 1)
    assert kinds(cut(fusion)) == ["reduction", "pointwise"]
    check_values(fusion, (7, 5), (5,))


def test_reductions_of_the_same_input_share_a_kernel() -> None:
    fusion = fusion_of(lambda x: (ops.sum(x, dim=1), ops.max(x, dim=1)), 2)
    assert kinds(cut(fusion)) == ["reduction"]
    check_values(fusion, (3, 5))


def test_a_merge_that_would_make_a_cycle_is_refused() -> None:
    """With a -> matmul -> b and a -> b, the pointwise ops around the library op stay separate."""

    def build(x: TensorView, w: TensorView) -> TensorView:
        a = ops.exp(x)
        return ops.add(ops.matmul(a, w), a)

    segmented = cut(fusion_of(build, 2, 2))
    assert kinds(segmented) == ["pointwise", "library", "pointwise"]
    # a is stored for the matmul, so the last kernel reads it instead of recomputing it.
    assert [e.name for e in segmented.segments[-1].exprs] == ["add"]


def test_heads_of_a_stored_tensor_are_aliases_and_merged_heads_are_copied_once() -> None:
    def build(x: TensorView, w: TensorView) -> TensorView:
        y = ops.linear(x, w)
        heads = ops.permute(ops.reshape(y, [x.size(0), x.size(1), 3, 4]), [0, 2, 1, 3])
        mixed = ops.matmul(heads, ops.permute(heads, [0, 1, 3, 2]))
        back = ops.permute(ops.matmul(mixed, heads), [0, 2, 1, 3])
        return ops.linear(ops.reshape(back, [x.size(0), x.size(1), 12]), w)

    fusion = Fusion()
    with FusionGuard(fusion):
        x = define_tensor([-1, -1, 12], contiguity=True)
        w = define_tensor([12, 12], contiguity=True)
        for tv in (x, w):
            fusion.add_input(tv)
        fusion.add_output(build(x, w))
    assert kinds(cut(fusion)) == [
        *("library", "alias", "alias", "alias", "library", "library"),
        *("alias", "pointwise", "library"),
    ]


def test_a_view_between_kernel_ops_stays_in_the_kernel() -> None:
    fusion = fusion_of(lambda x: ops.relu(ops.permute(ops.exp(x), [1, 0])), 2)
    assert kinds(cut(fusion)) == ["transpose"]
    check_values(fusion, (3, 5))


def test_a_tensor_that_is_dear_to_recompute_is_stored() -> None:
    def build(*xs: TensorView) -> tuple[TensorView, TensorView]:
        total = xs[0]
        for x in xs[1:]:
            total = ops.add(total, x)
        return ops.sum(total, dim=0), ops.sum(total, dim=1)

    few, many = fusion_of(build, 2, 2), fusion_of(build, 2, 2, 2, 2, 2)
    assert kinds(cut(few)) == ["reduction", "reduction"]
    segmented = cut(many)
    # The kernel that stores the tensor also computes its sum.
    assert [len(s.outputs) for s in segmented.segments] == [2, 1]
    assert kinds(segmented) == ["reduction", "reduction"]
    check_values(few, *((3, 5),) * 2)
    check_values(many, *((3, 5),) * 5)


def test_an_op_that_no_scheduler_accepts_is_named() -> None:
    fusion = fusion_of(ops.exp, 2)
    with pytest.raises(UnsupportedError, match=r"T1_g_float.*segmented_fusions\.py"):
        cut(fusion, lambda f: None)


def test_segment_set_is_a_border_between_kernels() -> None:
    """Without segment_set, one kernel computes all of this."""

    def chain(x: TensorView, border: bool) -> tuple[TensorView, ...]:
        a = ops.exp(x)
        a = ops.segment_set(a) if border else a
        return (ops.add(a, x),)

    assert kinds(cut(fusion_of(lambda x: chain(x, False), 2))) == ["pointwise"]
    assert kinds(cut(fusion_of(lambda x: chain(x, True), 2))) == ["pointwise", "alias", "pointwise"]


def test_segment_set_of_an_output_is_a_copy() -> None:
    def chain(x: TensorView) -> tuple[TensorView, ...]:
        a = ops.segment_set(ops.exp(x))
        return a, ops.add(a, 1.0)

    assert kinds(cut(fusion_of(chain, 1))) == ["pointwise", "library", "pointwise"]
