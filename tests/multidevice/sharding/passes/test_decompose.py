"""The collectives of sharded programs; the results of all ranks together equal torch's."""

from __future__ import annotations

import re

import pytest
import torch

from fuser import ops
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion
from fuser.ir.fusion_guard import FusionGuard
from multidevice.sharding.passes.pipeline import shard_fusion
from multidevice.sharding.reshard import team_of
from tests.support import sharded_fusions as models
from tests.support.rank_by_rank import Run, X, Y, mesh, run, shard_axis


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
    assert [(s.target, team_of(s).size) for s in done.slices] == [(0, 2)]


@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 2, 2)])
def test_sequence_parallel_mlp(shape: tuple[int, ...]) -> None:
    """x and out are cut along the sequence: an allgather before, a reduce-scatter after."""
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


# ------------------------------------------------------------------ goldens
def math_of(fusion: Fusion) -> list[str]:
    """Returns the ops as text, one per line, without meshes."""
    body = fusion.print_math().split("%kernel_math {\n")[1].split("\n} //")[0]
    body = re.sub(r" \(DeviceMesh\{[0-9 {}]*\}\)", "", body)
    return re.sub(r"\n +", " ", body).split("\n")


def linear_fusion(dtype: DataType, *, axis: int, bias: bool) -> Fusion:
    """A program out = linear(x [-1, 8], w [6, 8], b [6]) with x and w cut along `axis`."""
    fusion = Fusion()
    with FusionGuard(fusion):
        t = models.inputs({"x": [-1, 8], "w": [6, 8]} | ({"b": [6]} if bias else {}), dtype)
        fusion.add_output(ops.linear(t["x"], t["w"], t.get("b")))
    models.set_mesh(mesh(2), *t.values())
    for name in "xw":
        shard_axis(t[name], axis, 2)
    return fusion


def linear_inputs(bias: bool) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(5)
    shapes = [(4, 8), (6, 8), (6,)][: 2 + bias]
    return [torch.randn(s, generator=gen, dtype=torch.float64) for s in shapes]


def test_row_parallel_linear_in_half_precision_adds_its_bias_once_in_float() -> None:
    fusion = linear_fusion(DataType.BFloat16, axis=1, bias=True)
    assert math_of(fusion) == [
        "T3_g___bfloat[iS5{i0}, iS6{6}, rS7{8}] = linear("
        "T0_g___bfloat[iS0{i0}, ideviceIdx.x8{2}, iS9{4}], "
        "T1_g___bfloat[iS2{6}, ideviceIdx.x10{2}, iS11{4}], T2_g___bfloat[iS4{6}])"
    ]
    given = linear_inputs(bias=True)
    done = run(fusion, given)
    assert [re.sub(r"\[.*?\]", "", line) for line in math_of(fusion)] == [
        "T9_l___bfloat = linear(T0_g___bfloat, T1_g___bfloat)",
        "T4_l___bfloat = Reshard( T9_l___bfloat, along = {deviceIdx.x}, from = 2, op = add )",
        "T6_l_float = __bfloat2float(T4_l___bfloat);",
        "T5_l___bfloat = broadcast( T2_g___bfloat, flags = {true, false} )",
        "T7_l_float = __bfloat2float(T5_l___bfloat);",
        "T8_l_float = T6_l_float + T7_l_float;",
        "T3_g___bfloat = __float2bfloat(T8_l_float);",
    ]
    want = torch.nn.functional.linear(*given)
    torch.testing.assert_close(done.outputs[0], want, rtol=2**-8, atol=2**-8)


def test_partial_sum_and_its_sum() -> None:
    fusion = linear_fusion(DataType.Double, axis=1, bias=False)
    given = linear_inputs(bias=False)
    done = run(fusion, given)
    assert math_of(fusion) == [
        "T3_l_double[ideviceIdx.x16{2}rf, iS13{i0}, iS14{6}, rS17{4}rf] = linear("
        "T0_g_double[ideviceIdx.x7{2}, iS0{i0}, iS8{4}], "
        "T1_g_double[ideviceIdx.x9{2}, iS2{6}, iS10{4}])",
        "T2_g_double[rdeviceIdx.x18{2}, iS4{i0}, iS5{6}] = Reshard( "
        "T3_l_double[ideviceIdx.x16{2}rf, iS13{i0}, iS14{6}, rS17{4}rf], "
        "along = {deviceIdx.x}, from = 2, op = add )",
    ]
    assert_close(done.outputs[0], given[0] @ given[1].t())


def test_a_sequence_parallel_operand_is_gathered_before_the_op() -> None:
    fusion = linear_fusion(DataType.Double, axis=0, bias=False)
    given = linear_inputs(bias=False)
    done = run(fusion, given)
    assert math_of(fusion) == [
        "T3_l_double[iS13{i0}, iS14{8}] = Reshard( "
        "T0_g_double[ideviceIdx.x7{2}, iS8{( ceilDiv(i0, 2) )}, iS1{8}], "
        "along = {deviceIdx.x}, from = 0 )",
        "T2_g_double[ideviceIdx.x11{2}, iS4{i0}, iS12{3}, rS6{8}] = linear("
        "T3_l_double[iS13{i0}, iS14{8}], T1_g_double[ideviceIdx.x9{2}, iS10{3}, iS3{8}])",
    ]
    assert_close(done.outputs[0], given[0] @ given[1].t())


def test_a_unary_op_is_computed_on_shards_and_gathered_after() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x = models.inputs({"x": [-1]})["x"]
        y = ops.sin(x)
        fusion.add_output(y)
    models.set_mesh(mesh(2), x, y)
    shard_axis(x, 0, 2)
    whole = torch.arange(6, dtype=torch.float64)
    done = run(fusion, [whole])
    assert [op.name for op in fusion.exprs] == ["sin", "reshard"]
    assert_close(done.outputs[0], whole.sin())


def test_a_slice_comes_before_the_op() -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        x = models.inputs({"x": [-1]})["x"]
        y = ops.sin(x)
        fusion.add_output(y)
    models.set_mesh(mesh(2), x, y)
    shard_axis(y, 0, 2)
    whole = torch.arange(6, dtype=torch.float64)
    done = run(fusion, [whole])
    assert [op.name for op in fusion.exprs] == ["reshard", "sin"]
    assert_close(done.outputs[0], whole.sin())
    assert done.collectives == []


def test_fusions_without_meshes_stay_as_they_are() -> None:
    model = models.encoder_layer()
    before = str(model.fusion)
    assert shard_fusion(model.fusion).communications == ()
    assert str(model.fusion) == before


def test_the_program_does_not_depend_on_hash_order() -> None:
    """Sharding the same definition twice gives the same text."""
    texts: list[str] = []
    for _ in range(2):
        model = models.encoder_layer()
        models.shard_encoder(model, mesh(2))
        shard_fusion(model.fusion)
        texts.append(str(model.fusion))
    assert texts[0] == texts[1]
