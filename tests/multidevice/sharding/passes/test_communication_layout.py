"""Copies and memory orders around collectives, and the final allocation domains."""

from __future__ import annotations

import pytest
import torch

from fuser import ops
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.memory_layout import is_contiguous, memory_order
from fuser.ir.ops.nodes import LoadStoreOp
from fuser.ops.define import define_tensor
from multidevice.sharding.reshard import communication_type
from tests.support import sharded_fusions as models
from tests.support.rank_by_rank import Run, X, Y, mesh, run, shard_axis


def order(tv: TensorView) -> list[int]:
    return [p for p, _ in memory_order(tv)]


def copies(done: Run) -> int:
    """Returns the number of `Set` ops that copy locally, without communication."""
    return sum(isinstance(op, LoadStoreOp) for op in done.fusion.exprs)


def gathered(axis: int, *, contiguous: bool = True, is_input: bool = True) -> Run:
    """A program y = set(x), with x [6, 4] cut along `axis` and y replicated."""
    fusion = Fusion()
    with FusionGuard(fusion):
        x = define_tensor([-1, -1], contiguous, models.DataType.Double)
        fusion.add_input(x)
        source = x if is_input else models.tensor(ops.sin(x))
        y = models.tensor(ops.set(source))
        fusion.add_output(y)
    models.set_mesh(mesh(2), x, y)
    shard_axis(x, axis, 2)
    whole = torch.arange(24, dtype=torch.float64).view(6, 4)
    done = run(fusion, [whole])
    torch.testing.assert_close(done.outputs[0], whole if is_input else whole.sin())
    assert done.collectives == [("Allgather", "(0 1)")]
    return done


def test_an_outermost_cut_is_gathered_as_it_is() -> None:
    done = gathered(0)
    assert copies(done) == 0
    assert order(done.fusion.outputs[0]) == [0, 1]


def test_an_inner_cut_of_an_input_is_copied_with_that_axis_outermost() -> None:
    done = gathered(1)
    assert copies(done) == 1
    (op,) = done.result.communications
    assert order(op.inputs[0]) == [1, 0]
    assert order(done.fusion.outputs[0]) == [1, 0]


def test_a_kernels_own_result_is_written_in_the_order_needed() -> None:
    done = gathered(1, is_input=False)
    assert copies(done) == 0
    (op,) = done.result.communications
    assert order(op.inputs[0]) == [1, 0]


def test_a_strided_input_is_made_contiguous_first() -> None:
    done = gathered(0, contiguous=False)
    assert copies(done) == 1
    (op,) = done.result.communications
    assert is_contiguous(op.inputs[0])


def test_a_declared_memory_order_is_kept_by_a_copy_behind() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x = models.inputs({"x": [-1, -1]})["x"]
        y = models.tensor(ops.set(x))
        fusion.add_output(y)
    models.set_mesh(mesh(2), x, y)
    shard_axis(x, 0, 2)
    y.set_allocation_domain([y.axis(1), y.axis(0)], True)
    whole = torch.randn(4, 6, dtype=torch.float64)
    done = run(fusion, [whole])
    torch.testing.assert_close(done.outputs[0], whole)
    assert copies(done) == 1
    assert order(y) == [1, 0]


@pytest.mark.parametrize(("axis", "expected"), [(0, 0), (1, 1)])
def test_reduce_scatter_of_a_linear_scatters_the_outermost_axis(axis: int, expected: int) -> None:
    """torch writes the partial product row-major, so scattering another axis needs a copy."""
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"x": [-1, 8], "w": [6, 8]})
        out = ops.linear(t["x"], t["w"])
        fusion.add_output(out)
    models.set_mesh(mesh(2), *t.values(), out)
    shard_axis(t["x"], 1, 2)
    shard_axis(t["w"], 1, 2)
    shard_axis(out, axis, 2)
    x = torch.randn(4, 8, dtype=torch.float64)
    w = torch.randn(6, 8, dtype=torch.float64)
    done = run(fusion, [x, w])
    torch.testing.assert_close(done.outputs[0], x @ w.t())
    assert done.collectives == [("ReduceScatter", "(0 1)")]
    assert copies(done) == expected


@pytest.mark.parametrize("kind", ["sum", "max", "min", "prod"])
@pytest.mark.parametrize("scatter", [False, True])
def test_every_reduction_kind(kind: str, scatter: bool) -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x = models.inputs({"x": [4, 6, 2]})["x"]
        out = getattr(ops, kind)(x, 1)
        fusion.add_output(out)
    models.set_mesh(mesh(2), x, out)
    shard_axis(x, 1, 2)
    if scatter:
        shard_axis(out, 0, 2)
    whole = torch.randn(4, 6, 2, dtype=torch.float64)
    want = whole.sum(1) if kind == "sum" else whole.prod(1) if kind == "prod" else None
    if want is None:
        want = (whole.amax if kind == "max" else whole.amin)(1)
    done = run(fusion, [whole])
    torch.testing.assert_close(done.outputs[0], want)
    (op,) = done.result.communications
    assert op.reduction == {"sum": "add", "prod": "mul"}.get(kind, kind)
    assert communication_type(op) == ("ReduceScatter" if scatter else "Allreduce")


def test_two_dimensions_are_gathered_one_after_the_other() -> None:
    """A tensor cut along both mesh dimensions is gathered by two allgathers: rows, then
    columns.
    """
    m = mesh(2, 2)
    fusion = Fusion()
    with FusionGuard(fusion):
        x = models.inputs({"x": [8, 4]})["x"]
        y = models.tensor(ops.set(x))
        fusion.add_output(y)
    models.set_mesh(m, x, y)
    shard_axis(x, 0, 2, Y)
    shard_axis(x, 1, 2, X)
    whole = torch.randn(8, 4, dtype=torch.float64)
    done = run(fusion, [whole])
    torch.testing.assert_close(done.outputs[0], whole)
    assert done.collectives == [("Allgather", f"mesh_x of {m}"), ("Allgather", f"mesh_y of {m}")]


def test_a_contraction_cut_twice_is_summed_over_mesh_x_then_mesh_y() -> None:
    m = mesh(2, 2)
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"x": [4, 8], "w": [6, 8]})
        out = ops.linear(t["x"], t["w"])
        fusion.add_output(out)
    models.set_mesh(m, *t.values())
    for tv in t.values():
        shard_axis(tv, 1, 2, Y)
        shard_axis(tv, 2, 2, X)
    x = torch.randn(4, 8, dtype=torch.float64)
    w = torch.randn(6, 8, dtype=torch.float64)
    done = run(fusion, [x, w])
    torch.testing.assert_close(done.outputs[0], x @ w.t())
    assert done.collectives == [("Allreduce", f"mesh_x of {m}"), ("Allreduce", f"mesh_y of {m}")]


def test_consumers_share_a_gathered_copy() -> None:
    """The sequence-parallel x is read by q, k and v, and gathered once."""
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"x": [-1, 8], "q": [4, 8], "k": [4, 8], "v": [4, 8]})
        for name in "qkv":
            fusion.add_output(ops.linear(t["x"], t[name]))
    models.set_mesh(mesh(2), *t.values())
    for tv in t.values():
        shard_axis(tv, 0, 2)
    given = [torch.randn(n, 8, dtype=torch.float64) for n in (6, 4, 4, 4)]
    done = run(fusion, given)
    assert done.collectives == [("Allgather", "(0 1)")]
    for got, w in zip(done.outputs, given[1:], strict=True):
        torch.testing.assert_close(got, given[0] @ w.t())


# ------------------------------------------------------------------ finalized domains
def test_device_axes_reach_allocation_and_lead_the_loop_domain() -> None:
    m = mesh(2, 2)
    fusion = Fusion()
    with FusionGuard(fusion):
        x = models.inputs({"x": [8, 4]})["x"]
        y = models.tensor(ops.sin(x))
        fusion.add_output(y)
    models.set_mesh(m, x)
    shard_axis(x, 1, 2, X)
    shard_axis(x, 0, 2, Y)
    run(fusion, [torch.randn(8, 4, dtype=torch.float64)])
    for tv in (x, y):
        assert [a.ptype for a in tv.domain.loop[:2]] == [Y, X]
        assert [a.ptype for a in tv.domain.allocation if a.is_device] == [Y, X]
        # Parts stand where their axis stood: [y, 8/2, x, 4/2].
        assert [str(a.extent) for a in tv.domain.allocation] == ["2", "4", "2", "2"]
        assert is_contiguous(tv)
