"""Sharded programs: what is communicated, and that all ranks together equal torch."""

from __future__ import annotations

import pytest
import torch

from fuser import ops
from fuser.ir.fusion import Fusion
from fuser.ir.guard import FusionGuard
from tests.multidevice import sharded_models as models
from tests.multidevice.all_ranks import Run, X, Y, mesh, run, shard_axis


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def run_model(model: models.Model, seed: int = 0, *, b: int = 4, s: int = 8) -> Run:
    given = model.random_inputs(seed, b=b, s=s)
    done = run(model.fusion, list(given.values()))
    reference = models.mlp_reference if "wq" not in given else models.encoder_reference
    assert_close(done.outputs[0], reference(given))
    return done


# ------------------------------------------------------------------ MLP
@pytest.mark.parametrize("bias", [False, True])
def test_tensor_parallel_mlp_allreduces_once(bias: bool) -> None:
    model = models.mlp(bias=bias)
    t = model.tensors
    models.set_mesh(mesh(4), *(t[n] for n in model.shapes))
    shard_axis(t["w1"], 0, 4)
    if bias:
        shard_axis(t["b1"], 0, 4)
    shard_axis(t["w2"], 1, 4)
    done = run_model(model)
    assert done.collectives == [("Allreduce", "(0 1 2 3)")]
    assert not done.slices


def test_replicated_bias_of_a_column_parallel_linear_is_sliced() -> None:
    model = models.mlp()
    t = model.tensors
    models.set_mesh(mesh(2), *(t[n] for n in model.shapes))
    shard_axis(t["w1"], 0, 2)
    shard_axis(t["w2"], 1, 2)
    done = run_model(model)
    assert done.collectives == [("Allreduce", "(0 1)")]
    assert [(s.axis, s.count) for s in done.slices] == [(0, 2)]


@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 2, 2)])
def test_sequence_parallel_mlp(shape: tuple[int, ...]) -> None:
    """x and out cut along the sequence: allgather before, reduce-scatter after."""
    model = models.mlp()
    t, m = model.tensors, mesh(*shape)
    count = m.size_of(X)
    models.set_mesh(m, *(t[n] for n in model.shapes), t["out"])
    shard_axis(t["x"], 0 if shape == (4,) else 1, count)
    for name, axis in (("w1", 0), ("b1", 0), ("w2", 1)):
        shard_axis(t[name], axis, count)
    shard_axis(t["out"], 0 if shape == (4,) else 1, count)
    done = run_model(model)
    team = "(0 1 2 3)" if shape == (4,) else f"mesh_x of {m}"
    assert done.collectives == [("Allgather", team), ("ReduceScatter", team)]
    assert not done.slices


@pytest.mark.parametrize("shape", [(2, 2), (1, 2, 2), (2, 1)])
def test_data_and_tensor_parallel_mlp(shape: tuple[int, ...]) -> None:
    model = models.mlp()
    t, m = model.tensors, mesh(*shape)
    models.set_mesh(m, *(t[n] for n in model.shapes))
    shard_axis(t["x"], 0, m.size_of(Y), Y)
    for name, axis in (("w1", 0), ("b1", 0), ("w2", 1)):
        shard_axis(t[name], axis, m.size_of(X))
    done = run_model(model)
    team = f"mesh_x of {m}"
    assert done.collectives == ([("Allreduce", team)] if m.size_of(X) > 1 else [])
    assert not done.slices
    sharding = done.result.outputs[0]
    assert sharding is not None
    assert (sharding.axis_sharded_on(X), sharding.axis_sharded_on(Y)) == (-1, 0)


def test_weight_gradient_sums_over_the_batch() -> None:
    """dW = dy^T x with both cut along tokens: one allreduce over mesh_y."""
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"dy": [-1, 6], "x": [-1, 4]})
        fusion.add_output(ops.matmul(ops.permute(t["dy"], [1, 0]), t["x"]))
    m = mesh(3, 1)
    models.set_mesh(m, t["dy"], t["x"])
    for tv in t.values():
        shard_axis(tv, 0, 3, Y)
    dy = torch.randn(9, 6, dtype=torch.float64)
    x = torch.randn(9, 4, dtype=torch.float64)
    done = run(fusion, [dy, x])
    assert_close(done.outputs[0], dy.t() @ x)
    assert done.collectives == [("Allreduce", f"mesh_y of {m}")]


# ------------------------------------------------------------------ encoder layer
@pytest.mark.parametrize("shape", [(2,), (3,), (6,), (2, 3), (1, 1, 2)])
def test_encoder_layer_has_two_allreduces_and_nothing_else(shape: tuple[int, ...]) -> None:
    model = models.encoder_layer()
    m = mesh(*shape)
    models.shard_encoder(model, m)
    if len(shape) == 2:
        for name in ("x", "mask"):
            shard_axis(model.tensors[name], 0, shape[0], Y)
    done = run_model(model, s=5)
    team = "(" + " ".join(map(str, range(shape[0]))) + ")" if len(shape) == 1 else f"mesh_x of {m}"
    assert done.collectives == [("Allreduce", team)] * 2
    assert not done.slices


def test_encoder_layer_on_one_rank_communicates_nothing() -> None:
    model = models.encoder_layer()
    models.shard_encoder(model, mesh(1))
    done = run_model(model)
    assert done.collectives == []
    assert not done.slices
