"""Propagation of cuts: which tensors get them, from which others, and through which reshapes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch

from fuser import ops
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ops.define import define_tensor
from fuser.support.errors import ShardingError
from multidevice.sharding.passes.pipeline import shard_fusion
from multidevice.sharding.placement import placement
from multidevice.sharding.propagation import propagate_shardings
from multidevice.sharding.queries import is_resharding
from multidevice.sharding.reshard import team_of
from tests.support import sharded_fusions as models
from tests.support.rank_by_rank import X, Y, mesh, run, shard_axis


def loops(tv: TensorView) -> str:
    """Returns the loop axes as text such as `x2 S S rx2`.

    `x2` is an axis over 2 devices, `S` is serial, and `r` marks reductions.
    """
    letters = {X: "x", Y: "y"}
    return " ".join(
        ("r" if a.is_reduction() else "")
        + (f"{letters[a.ptype]}{a.size}" if a.ptype in letters else "S")
        for a in tv.domain.loop
    )


# ------------------------------------------------------------------ linear and matmul
def test_column_parallel_linear() -> None:
    model = models.mlp()
    t = model.tensors
    models.set_mesh(mesh(2), *(t[n] for n in model.shapes))
    shard_axis(t["w1"], 0, 2)
    facts = propagate_shardings(model.fusion)
    assert loops(t["up"]) == "S S x2 S rS"
    assert loops(t["act"]) == "S S x2 S"
    # w2 is the user's: replicated. The product over the cut axis is a choice of decomposition.
    assert loops(t["out"]) == "S S S rx2 rS"
    assert [str(f) for f in facts[t["up"]]] == [
        f"mesh forward from {t['w1'].label}",
        f"deviceIdx.x x 2 forward from {t['w1'].label}",
    ]
    assert all(t[n] not in facts for n in model.shapes)


def test_the_weight_comes_before_the_input() -> None:
    """Input and weight both propagate mesh_x, to different axes of the result: the weight's
    wins.
    """
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"x": [4, 8], "w": [6, 8]})
        out = ops.linear(t["x"], t["w"])
        fusion.add_output(out)
    models.set_mesh(mesh(2), *t.values())
    shard_axis(t["x"], 0, 2)
    shard_axis(t["w"], 0, 2)
    propagate_shardings(fusion)
    assert loops(out) == "S x2 S rS"


def test_two_dimensions_meet_in_one_result() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"x": [4, 8], "w": [8, 6]})
        out = ops.matmul(t["x"], t["w"])
        fusion.add_output(out)
    models.set_mesh(mesh(2, 2), *t.values())
    shard_axis(t["x"], 0, 2, Y)
    shard_axis(t["w"], 1, 2)
    propagate_shardings(fusion)
    assert loops(out) == "y2 S x2 S rS"


# ------------------------------------------------------------------ backward
def test_a_residual_turns_the_allreduce_into_a_reduce_scatter() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"x": [-1, 8], "y": [-1, 12], "w": [8, 12]})
        linear = ops.linear(t["y"], t["w"])
        out = ops.add(linear, t["x"])
        fusion.add_output(out)
    models.set_mesh(mesh(2), *t.values())
    shard_axis(t["x"], 0, 2)
    shard_axis(t["y"], 1, 2)
    shard_axis(t["w"], 1, 2)
    given = [torch.randn(4, n, dtype=torch.float64) for n in (8, 12)]
    w = torch.randn(8, 12, dtype=torch.float64)
    done = run(fusion, [*given, w])
    torch.testing.assert_close(done.outputs[0], given[0] + given[1] @ w.t())
    assert done.collectives == [("ReduceScatter", "(0 1)")]


def test_unannotated_inputs_are_replicated_and_factories_follow_their_consumer() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"x": [8, 4], "y": [8, 4]})
        ones = ops.full([8, 4], 1.0, t["x"].dtype())
        out = ops.mul(ops.add(t["x"], t["y"]), ones)
        fusion.add_output(out)
    t["x"].set_device_mesh(mesh(2))
    shard_axis(t["x"], 0, 2)
    propagate_shardings(fusion)
    assert loops(t["y"]) == "S S"
    assert t["y"].mesh == mesh(2)
    assert loops(ones) == "x2 S S"
    assert loops(out) == "x2 S S"


def test_a_users_result_keeps_its_placement_but_not_its_reduction() -> None:
    """A row-parallel result for which only a mesh was set is still summed over devices."""
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"x": [4, 8], "w": [6, 8]})
        out = ops.linear(t["x"], t["w"])
        fusion.add_output(out)
    models.set_mesh(mesh(2), *t.values(), out)
    shard_axis(t["x"], 1, 2)
    shard_axis(t["w"], 1, 2)
    propagate_shardings(fusion)
    assert loops(out) == "S S rx2 rS"


def test_a_reduce_scatter_result_hands_its_reduction_to_the_operand() -> None:
    """out is [x2(M), N, rx2(K)]: the operand is cut along K, so that each rank's product is
    local.
    """
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"x": [4, 8], "w": [6, 8]})
        inner = models.tensor(ops.sin(t["x"]))
        out = ops.linear(inner, t["w"])
        fusion.add_output(out)
    models.set_mesh(mesh(2), *t.values(), out)
    shard_axis(t["w"], 1, 2)
    shard_axis(out, 0, 2)
    x = torch.randn(4, 8, dtype=torch.float64)
    w = torch.randn(6, 8, dtype=torch.float64)
    done = run(fusion, [x, w])
    torch.testing.assert_close(done.outputs[0], x.sin() @ w.t())
    assert loops(inner) == "x2 S S"  # finalized: the device axis leads
    assert [len(cuts) for cuts in placement(inner)] == [0, 1]
    assert done.collectives == [("ReduceScatter", "(0 1)")]


def test_the_counting_result_of_welford_follows_its_siblings() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"x": [8, 4]})
        avg, var, n = ops.welford(t["x"], [1])
        fusion.add_output(ops.add(avg, var))
    t["x"].set_device_mesh(mesh(2))
    shard_axis(t["x"], 0, 2)
    propagate_shardings(fusion)
    assert [loops(tv) for tv in (avg, var, n)] == ["x2 S rS"] * 3


def test_unreached_tensors_need_a_single_mesh() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"a": [4], "b": [4], "c": [4]})
        for tv in t.values():
            fusion.add_output(ops.sin(tv))
    t["a"].set_device_mesh(mesh(2))
    copy, twins = fusion.copy()
    shard_fusion(copy)
    assert twins[t["c"]].mesh == mesh(2)
    t["b"].set_device_mesh(mesh(3))
    with pytest.raises(ShardingError, match="some TensorViews with device mesh and some without"):
        shard_fusion(fusion)


# ------------------------------------------------------------------ order of annotation
def _late_or_early(early: bool) -> str:
    fusion = Fusion()
    with FusionGuard(fusion):
        shapes = {"x": [-1, 8], "w1": [16, 8], "b1": [16], "w2": [8, 16], "b2": [8]}
        t = models.inputs(shapes)

        def annotate() -> None:
            models.set_mesh(mesh(2), *t.values())

        if early:
            annotate()
        out = ops.linear(models.gelu(ops.linear(t["x"], t["w1"], t["b1"])), t["w2"], t["b2"])
        fusion.add_output(ops.add(out, t["x"]))
        if not early:
            annotate()
    for name, axis in (("w1", 0), ("b1", 0), ("w2", 1)):
        shard_axis(t[name], axis, 2)
    shard_fusion(fusion)
    return fusion.print_math()


def test_annotating_before_or_after_the_ops_gives_the_same_program() -> None:
    assert _late_or_early(early=True) == _late_or_early(early=False)


# ------------------------------------------------------------------ reshapes
def reshaped(shape: Sequence[int], new: Sequence[int]) -> tuple[Fusion, TensorView, TensorView]:
    fusion = Fusion()
    with FusionGuard(fusion):
        x = define_tensor(list(shape), True)
        fusion.add_input(x)
        out = ops.reshape(x, list(new))
        fusion.add_output(out)
    return fusion, x, out


@pytest.mark.finding("G15")
@pytest.mark.parametrize(
    ("shape", "new", "axis"), [([2, 6], [12], 1), ([6], [3, 2], 0), ([2, 2, 6], [2, 12], 2)]
)
def test_a_reshape_does_not_keep_cuts_that_it_would_spread(
    shape: list[int], new: list[int], axis: int
) -> None:
    fusion, x, out = reshaped(shape, new)
    x.set_device_mesh(mesh(2))
    shard_axis(x, axis, 2)
    propagate_shardings(fusion)
    assert out.mesh == mesh(2) and not any(placement(out))


@pytest.mark.finding("G15")
def test_a_reshape_keeps_the_outer_ones_of_several_cuts() -> None:
    fusion, x, out = reshaped([8], [2, 4])
    x.set_device_mesh(mesh(2, 2))
    shard_axis(x, 0, 2, Y)
    shard_axis(x, 1, 2, X)
    propagate_shardings(fusion)
    assert [[c.ptype for c in cuts] for cuts in placement(out)] == [[Y], []]


def _factorings(size: int) -> list[tuple[int, ...]]:
    found = {(size,)}
    for a in range(1, size + 1):
        if size % a == 0:
            found |= {(a, size // a)}
            found |= {(a, b, size // a // b) for b in range(1, size // a + 1) if size // a % b == 0}
    return sorted(found)


def _blocks(shape: Sequence[int], axis: int, count: int) -> list[int]:
    """Returns the device that holds each element of the flattened tensor."""
    index = torch.arange(math.prod(shape)).view(*shape)
    held = torch.zeros_like(index)
    for device, block in enumerate(index.chunk(count, axis)):
        held.view(-1)[block.reshape(-1)] = device
    return held.view(-1).tolist()


@pytest.mark.parametrize(("size", "count"), [(6, 2), (6, 3), (8, 2), (12, 2), (12, 3)])
def test_reshapes_keep_exactly_the_cuts_that_need_no_data(size: int, count: int) -> None:
    """Compares all reshapes with a listing of the elements on each device.

    A cut is propagated if and only if each device then holds the same elements before and after.
    """
    kept = 0
    for shape, new in itertools.product(_factorings(size), repeat=2):
        for axis in range(len(shape)):
            if shape[axis] % count != 0 or shape == new:
                continue
            fusion, x, out = reshaped(shape, new)
            x.set_device_mesh(mesh(count))
            shard_axis(x, axis, count)
            if any(a.is_broadcast and a.is_device for a in x.domain.loop):
                continue
            source = _blocks(shape, axis, count)
            even = [k for k, extent in enumerate(new) if extent % count == 0]
            possible = [k for k in even if _blocks(new, k, count) == source]
            propagate_shardings(fusion)
            cut = [k for k, cuts in enumerate(placement(out)) if cuts]
            if not cut:
                # To gather although a cut is possible would be a missed opportunity.
                assert not possible, (shape, new, axis)
                continue
            local = not any(is_resharding(op) for op in fusion.exprs)
            assert local, (shape, new, axis)
            assert cut == possible[:1] or (len(cut) == 1 and cut[0] in possible), (shape, new, axis)
            kept += 1
    assert kept > 0


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda x: ops.reshape(x, [2, 3, 4, 8]), [2, 12, 8]),
        (lambda x: ops.reshape(ops.permute(x, [1, 0, 2]), [12, 2, 2, 4]), [2, 12, 8]),
        (lambda x: ops.reshape(ops.reshape(x, [2, 12, 2, 4]), [24, 8]), [2, 12, 8]),
    ],
)
def test_backward_through_views(
    build: Callable[[TensorView], TensorView], shape: list[int]
) -> None:
    """Only the result is annotated; its producers get cuts where they can, and values stay
    right.
    """
    fusion = Fusion()
    with FusionGuard(fusion):
        x = models.inputs({"x": shape})["x"]
        out = build(ops.sin(x))
        fusion.add_output(out)
    whole = torch.randn(shape, dtype=torch.float64)
    from fuser.ops.reference.meaning import evaluate_fusion

    (want,) = evaluate_fusion(fusion, [whole])
    out.set_device_mesh(mesh(2))
    shard_axis(out, 0, 2)
    done = run(fusion, [whole])
    torch.testing.assert_close(done.outputs[0], want)
    assert done.collectives == []
    assert [team_of(s).size for s in done.slices] == [2]
