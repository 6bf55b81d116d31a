"""Tests transform_like, parallelize_like, inline_most and inline_at, by loop domains as text."""

from __future__ import annotations

import pytest
import torch

from fuser import DataType, FusionDefinition, ops
from fuser.ir.axis_graph import AxisGraph
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.types import ParallelType
from fuser.ir.verify import verify_fusion
from fuser.schedule import (
    bounded_transform_backward,
    inline_at,
    inline_most,
    parallelize_like,
    transform_like,
)
from fuser.schedule.loop_propagation import AxisMatcher, LoopReplay
from fuser.support.errors import DefinitionError
from tests.support.small_fusions import define, domains

PT = ParallelType


def biased() -> Fusion:
    """Defines T0 [m, n] + T1 [n], where T2 is the broadcast of T1."""
    return define(lambda x, b: ops.add(x, ops.broadcast(b, [True, False])), (None, None), (None,))


def test_transforms_and_parallel_types_follow_the_reference() -> None:
    fusion = define(lambda x: ops.neg(ops.sin(x)), (None, None))
    out = fusion.outputs[0]
    out.merge(0)
    out.split(0, 128)
    out.axis(0).parallelize(PT.grid_x)
    out.axis(1).parallelize(PT.block_x)
    transform_like(out)
    parallelize_like(out)
    with FusionGuard(fusion):
        inline_most()
    verify_fusion(fusion)
    blocks = "( ceilDiv(( i0 * i2 ), 128) )"
    found = domains(fusion)
    assert found["T0"] == "iS0{i0}, iS1{i2}]"
    assert found["T1"] == f"iblockIdx.x10{{{blocks}}}, ithreadIdx.x11{{128}}] ca_pos( 2 )"
    assert found["T2"] == f"iblockIdx.x7{{{blocks}}}, ithreadIdx.x8{{128}}]"


def test_a_tensor_without_an_axis_skips_its_transforms() -> None:
    fusion = biased()
    out = fusion.outputs[0]
    out.split(0, 4)
    out.split(2, 8)
    transform_like(out, [fusion.exprs[0].out_tensor])
    assert str(fusion.exprs[0].out_tensor.domain).count("S") == 4
    broadcast = fusion.exprs[0].out_tensor
    assert [str(a.extent) for a in broadcast.domain.loop] == ["1", "1", "( ceilDiv(i3, 8) )", "8"]


def test_reduction_axes_go_last() -> None:
    fusion = define(lambda x: ops.neg(ops.sum(x, [0])), (None, None))
    out = fusion.outputs[0]
    out.split(0, 32)
    transform_like(out)
    total = fusion.exprs[0].out_tensor
    assert [a.kind.value for a in total.domain.loop] == ["i", "i", "r"]


def test_parallel_types_can_be_selected() -> None:
    fusion = define(lambda x: ops.neg(ops.sin(x)), (None, None))
    out, mid = fusion.outputs[0], fusion.exprs[0].out_tensor
    out.axis(0).parallelize(PT.grid_x)
    out.axis(1).parallelize(PT.block_x)
    parallelize_like(out, selected_parallel_types={PT.block_x})
    assert [a.ptype for a in mid.domain.loop] == [PT.serial, PT.block_x]
    parallelize_like(out, pos=1)
    assert [a.ptype for a in mid.domain.loop] == [PT.grid_x, PT.block_x]


def test_vectorize_is_copied_to_selected_tensors_only() -> None:
    fusion = define(lambda x: ops.neg(ops.sin(x)), (None,))
    out, mid = fusion.outputs[0], fusion.exprs[0].out_tensor
    out.split(0, 4)
    out.axis(1).parallelize(PT.vectorize)
    transform_like(out)
    parallelize_like(out)
    assert mid.domain.loop[1].ptype is PT.serial
    parallelize_like(out, selected_tensors=[mid])
    assert mid.domain.loop[1].ptype is PT.vectorize


def test_bounded_backward_stops_at_its_tensors() -> None:
    fusion = define(lambda x: ops.neg(ops.sin(ops.cos(x))), (None, None))
    cos, sin, neg = (op.out_tensor for op in fusion.exprs)
    neg.split(0, 4)
    neg.axis(0).parallelize(PT.stream)
    bounded_transform_backward(neg, 1, [sin], propagate_parallel_type=True)
    assert len(cos.domain.loop) == 2
    # Only axes before the position are copied; the rest of the split is kept with them.
    assert str(sin.domain.loop[0]).startswith("istreamIdx")
    with pytest.raises(DefinitionError, match="not upstream"):
        bounded_transform_backward(sin, 1, [neg])


def test_softmax_keeps_its_row_where_the_reduction_needs_it() -> None:
    def softmax(x: TensorView) -> TensorView:
        e = ops.exp(ops.sub(x, ops.broadcast(ops.max(x, [1]), [False, True])))
        return ops.div(e, ops.broadcast(ops.sum(e, [1]), [False, True]))

    fusion = define(softmax, (None, None))
    with FusionGuard(fusion):
        inline_most()
    positions = {f"T{tv.number}": tv.compute_at for tv in fusion.tensors()}
    # T4 = exp is read by the sum, and after it by the division, so only the row loop is shared.
    assert positions == {"T0": 0, "T1": 1, "T2": 2, "T3": 2, "T4": 1, "T5": 1, "T6": 2, "T7": 0}


def test_a_chain_into_one_reduction_is_inlined_whole() -> None:
    fusion = define(lambda x: ops.sum(ops.exp(ops.sin(x)), [1]), (None, None))
    with FusionGuard(fusion):
        inline_most()
    assert [op.out_tensor.compute_at for op in fusion.exprs] == [2, 2, 0]


def test_inline_at_a_position() -> None:
    fusion = define(lambda x: ops.neg(ops.sin(x)), (None, None))
    out, mid = fusion.outputs[0], fusion.exprs[0].out_tensor
    inline_at(out, 1)
    assert mid.compute_at == 1
    out.reorder({0: 1})
    with pytest.raises(DefinitionError, match="largest legal position"):
        inline_at(out, 1)
    inline_at(out, 1, best_effort=True)
    assert mid.compute_at == 0


def test_vectorized_axes_are_not_shared() -> None:
    fusion = define(lambda x: ops.neg(ops.sin(x)), (None,))
    mid = fusion.exprs[0].out_tensor
    fusion.outputs[0].split(0, 4)
    transform_like(fusion.outputs[0])
    mid.axis(1).parallelize(PT.vectorize)
    inline_most([mid])
    assert mid.compute_at == 1


def test_a_broadcast_that_becomes_an_axis_elsewhere_does_not_hide_that_axis() -> None:
    """The second output has x's broadcast axis twice: as a broadcast, and concretized by
    the mask."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([1, 2], contiguity=True)
        y = fd.define_tensor([2, 2], contiguity=True)
        mask = fd.define_tensor([2, 2], contiguity=True, dtype=DataType.Bool)
        wide = fd.ops.broadcast(x, [True, False, True, False])
        fd.add_output(fd.ops.where(mask, y, y))
        fd.add_output(fd.ops.where(mask, x, wide))
    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])
    for options in ([], ["schedules_for(h200)", "checked"]):
        got = fd.execute([a, b, b > 3], _enable_options=options)
        assert torch.equal(got[0], b)
        assert torch.equal(got[1], a.expand(1, 1, 2, 2))


def test_tensors_that_differ_in_numbers_alone_get_the_same_loops() -> None:
    """The result for the first tensor is renumbered for the others."""
    fusion = define(
        lambda x, b: ops.neg(ops.mul(ops.sin(ops.add(x, b)), ops.exp(x))), (None, None), (1, None)
    )
    out = fusion.outputs[0]
    out.merge(0)
    out.split(0, 128)
    out.split(0, 4, inner_split=False)
    matcher, loops = AxisMatcher(AxisGraph(fusion), out), LoopReplay(out.domain)
    alike: list[bool] = []
    for tv in fusion.tensors()[2:-1]:
        before, matches = tv.domain, matcher.matches(tv.domain)
        LoopReplay(out.domain).apply(tv, matches)
        alone, tv.domain = tv.domain, before
        loops.apply(tv, matches)
        verify_fusion(fusion)
        extents = [[str(a.extent) for a in d.loop] for d in (alone, tv.domain)]
        assert extents[0] == extents[1]
        assert {*before.axes} <= {*tv.domain.axes}
        alike.append(tv.domain.transforms[0].inputs == before.logical_numbers)
    assert all(alike) and len(alike) == 4
    numbers = [n for tv in fusion.tensors() for n in tv.domain.axes]
    assert len(numbers) == len({*numbers})
