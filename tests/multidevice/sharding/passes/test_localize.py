"""Local fusions compute on shards the shard of the result; only some constants change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fuser import ops
from fuser.ir.binding import bind_inputs
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.scalar import constructors as sc
from fuser.ir.verify import verify_fusion
from fuser.ops.reference.meaning import evaluate_fusion
from fuser.support.errors import ShardingError
from multidevice.job.shard_tensor import shard_for_rank
from multidevice.sharding.passes.localize import localize
from multidevice.sharding.passes.pipeline import shard_fusion
from tests.support import sharded_fusions as models
from tests.support.rank_by_rank import X, Y, mesh, shard_axis


def softmax_merge(x: TensorView) -> TensorView:
    """A program: softmax of [b, heads, s, d], permuted and reshaped to [b, s, heads * d]."""
    y = ops.permute(models.softmax(x), [0, 2, 1, 3])
    return ops.reshape(y, [y.size(0), y.size(1), 24])


LOCAL_RESHAPE = """\
Inputs:
  T0_g_double[iS0{( ceilDiv(i0, 2) )}, iS1{8}]
Outputs:
  T1_g_double[iS2{( ceilDiv(i0, 2) )}, iS4{2}rf, iS5{4}rf]

%kernel_math {
T1_g_double[iS2{( ceilDiv(i0, 2) )}, iS4{2}rf, iS5{4}rf] = \
reshape( T0_g_double[iS0{( ceilDiv(i0, 2) )}, iS1{8}] )
} // %kernel_math\u0020

"""

CASES: dict[str, tuple[Callable[[TensorView], object], list[int], list[int], int]] = {
    # name: (op, declared shape, shape, axis to cut)
    "pointwise": (lambda x: ops.mul(ops.sin(x), 2.0), [-1, 6], [4, 6], 0),
    "split": (lambda x: ops.reshape(x, [x.size(0), 6, 4]), [-1, 24], [5, 24], 1),
    "split three": (lambda x: ops.reshape(x, [6, 2, 2]), [24], [24], 0),
    "merge": (lambda x: ops.reshape(x, [24, 5]), [6, 4, 5], [6, 4, 5], 0),
    "merge symbols": (
        lambda x: ops.reshape(x, [sc.mul(x.size(0), x.size(1)), 3]),
        [-1, -1, 3],
        [4, 5, 3],
        0,
    ),
    "merge then split": (lambda x: ops.reshape(x, [4, 6, 5]), [8, 3, 5], [8, 3, 5], 0),
    "softmax of heads": (softmax_merge, [-1, 6, -1, 4], [2, 6, 3, 4], 1),
    "slice": (lambda x: ops.slice(x, [0, 1], [x.size(0), 4]), [-1, 6], [4, 6], 0),
    "pad": (lambda x: ops.pad(x, [1, 2]), [-1, 6], [4, 6], 0),
    "cat": (lambda x: ops.cat([x, ops.sin(x)], 1), [-1, 6], [4, 6], 0),
    "expand": (
        lambda x: ops.add(ops.broadcast_in_dim(x, [x.size(0), 3], [0]), 1.0),
        [-1],
        [4],
        0,
    ),
    "full": (lambda x: ops.add(x, ops.full([8, 3], 2.0, x.dtype())), [8, 3], [8, 3], 0),
    "sum": (lambda x: ops.sum(x, 1), [-1, 6, 2], [4, 6, 2], 0),
    "layer norm": (
        lambda x: ops.var_mean(x, [1], 0, True)[0],
        [-1, 6],
        [4, 6],
        0,
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [1, 2])
def test_the_op_on_shards_is_the_shard_of_the_op(name: str, count: int) -> None:
    build, declared, shape, axis = CASES[name]
    fusion = Fusion()
    with FusionGuard(fusion):
        x = models.inputs({"x": declared})["x"]
        out = build(x)
        assert isinstance(out, TensorView)
        fusion.add_output(out)
    whole = torch.randn(shape, dtype=torch.float64)
    values = bind_inputs(fusion, [whole])
    (want,) = evaluate_fusion(fusion, [whole])
    x.set_device_mesh(mesh(count))
    shard_axis(x, axis, count)
    result = shard_fusion(fusion)
    assert result.communications == ()
    local, twins = localize(fusion)
    verify_fusion(local, after="localize")
    assert set(twins) == set(fusion.tensors())
    for tv in local.tensors():
        assert tv.mesh is None
        assert not any(a.is_device for a in tv.domain.axes.values())
        assert tv.domain.loop == tv.domain.logical
    for rank in range(count):
        shard = shard_for_rank(whole, x, rank)
        (got,) = evaluate_fusion(local, [shard], values=values)
        torch.testing.assert_close(got, shard_for_rank(want, fusion.outputs[0], rank))


def test_text_of_a_local_reshape() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x = models.inputs({"x": [-1, 24]})["x"]
        fusion.add_output(ops.reshape(x, [x.size(0), 6, 4]))
    models.set_mesh(mesh(2, 3), x)
    shard_axis(x, 0, 2, Y)
    shard_axis(x, 2, 3, X)
    shard_fusion(fusion)
    local, _ = localize(fusion)
    assert local.print_math() == LOCAL_RESHAPE


def test_sizes_among_the_operands_are_local_too() -> None:
    """Size operands of slice, expand and full become local sizes: kernels do not clamp them."""
    fusion = Fusion()
    with FusionGuard(fusion):
        x = models.inputs({"x": [8, 6]})["x"]
        part = ops.slice(x, [0, 1], [8, 4])
        row = ops.sum(x, 1)
        wide = ops.expand(ops.broadcast(row, [False, True]), [8, 3])
        filled = ops.full([8, 3], 2.0, x.dtype())
        out = models.tensor(ops.add(models.tensor(ops.add(part, wide)), filled))
        fusion.add_output(out)
    x.set_device_mesh(mesh(2))
    shard_axis(x, 0, 2)
    shard_fusion(fusion)
    local, _ = localize(fusion)
    texts = {op.name: " ".join(str(op).split()) for op in local.exprs}
    assert texts["slice"].endswith("{ {0, 4, 1} {1, 4, 1} } )")
    assert texts["expand"].endswith("{4, 3} )")
    assert "full({4, 3}, double(2))" in texts["full"]


def test_a_partial_product_is_the_local_product_and_an_axis_of_one() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"x": [-1, 8], "w": [6, 8]})
        fusion.add_output(ops.linear(t["x"], t["w"]))
    models.set_mesh(mesh(2), *t.values())
    for tv in t.values():
        shard_axis(tv, 1, 2)
    shard_fusion(fusion)
    product = fusion.exprs[0].out_tensor
    single, twins = fusion.copy()
    single.exprs = single.exprs[:1]
    single.outputs = [twins[product]]
    local, _ = localize(single)
    assert [op.name for op in local.exprs] == ["linear", "broadcast"]
    x = torch.randn(3, 8, dtype=torch.float64)
    w = torch.randn(6, 8, dtype=torch.float64)
    values = bind_inputs(fusion, [x, w])
    (got,) = evaluate_fusion(local, [x[:, 4:], w[:, 4:]], values=values)
    torch.testing.assert_close(got, (x[:, 4:] @ w[:, 4:].t())[..., None])


def test_the_memory_order_is_kept() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x = models.inputs({"x": [8, 6]})["x"]
        y = models.tensor(ops.sin(x))
        fusion.add_output(y)
    y.set_allocation_domain([y.axis(1), y.axis(0)], True)
    x.set_device_mesh(mesh(2))
    shard_axis(x, 0, 2)
    shard_fusion(fusion)
    local, twins = localize(fusion)
    verify_fusion(local, after="localize")
    domain = twins[y].domain
    assert domain.allocation == (domain.logical[1], domain.logical[0])
    assert domain.contiguity == (True, True)
    assert twins[x].domain.allocation == ()


def test_reshardings_are_refused() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x = models.inputs({"x": [8, 6]})["x"]
        y = models.tensor(ops.set(x))
        fusion.add_output(y)
    models.set_mesh(mesh(2), x, y)
    shard_axis(x, 0, 2)
    shard_fusion(fusion)
    with pytest.raises(ShardingError, match="without communication contains an op that moves data"):
        localize(fusion)


def test_without_meshes_it_is_a_copy() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x = models.inputs({"x": [8, 6]})["x"]
        fusion.add_output(ops.sum(ops.sin(x), 0))
    local, _ = localize(fusion)
    assert str(local) == str(fusion)
