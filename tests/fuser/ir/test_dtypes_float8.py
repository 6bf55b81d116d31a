"""Floats of one byte: conversions of all codes, moves of bytes, and computation in Float.

The expected values are torch's own conversions, and torch's ops on float32 or on the bytes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, TensorView, ops
from fuser.ir.fusion import Fusion
from fuser.ir.fusion_guard import FusionGuard
from fuser.kernels.executor import FusedKernelExecutor
from fuser.multidevice import Communicator, DeviceMesh, shard_tensor
from fuser.ops.define import define_scalar, define_tensor
from fuser.support.device import H200
from fuser.support.errors import DefinitionError, DtypeError, InputError, UnsupportedError
from multidevice import simulate
from tests.support.cuts import cut
from tests.support.float8_codes import FLOAT8, OTHERS, D, Tensor, check, check_bytes, codes, run
from tests.support.small_fusions import define as define_one
from tests.support.small_fusions import sizes_of

pytestmark = pytest.mark.from_text

EACH = pytest.mark.parametrize("dtype", FLOAT8)
SCHEDULES = pytest.mark.parametrize("options", [[], ["schedules_for(h200)"]], ids=["cpu", "h200"])


# ------------------------------------------------------------------ conversions
@SCHEDULES
@EACH
def test_all_codes_become_every_dtype(dtype: DataType, options: list[str]) -> None:
    wanted = {**OTHERS, **FLOAT8}
    x = codes(dtype)
    # Infinities and NaN cannot be converted to an integer.
    finite = x.float().abs() < 2**31
    outs = run(lambda t: [ops.cast(t, d) for d in wanted], x, options=options)
    for out, to in zip(outs, wanted.values(), strict=True):
        keep = finite if not (to.is_floating_point or to is torch.bool) else slice(None)
        check(out[keep], x.to(to)[keep])


def near_codes(dtype: DataType) -> Tensor:
    """Returns all values of a dtype, the middles between them, and the next floats on both
    sides."""
    values = codes(dtype).double()
    values = values[values.isfinite()].unique()
    points = torch.cat([values, (values[1:] + values[:-1]) / 2]).float()
    bits = points.view(torch.int32)
    near = [(bits + step).view(torch.float32) for step in range(-3, 4)]
    inf, nan = float("inf"), float("nan")
    special = [inf, -inf, nan, -nan, 3.4028235e38, -3.4028235e38, 1e-45, -1e-45, 0.0, -0.0, 1e-40]
    generator = torch.Generator().manual_seed(5)
    any_bits = torch.randint(-(2**31), 2**31, (50_000,), generator=generator).int()
    return torch.cat([*near, torch.tensor(special), any_bits.view(torch.float32)])


@SCHEDULES
@EACH
def test_every_dtype_is_rounded_as_torch_does(dtype: DataType, options: list[str]) -> None:
    points = near_codes(dtype)
    whole = points.nan_to_num(0).clamp(-(2.0**31), 2.0**31 - 256)
    inputs = [(points if to.is_floating_point else whole).to(to) for to in OTHERS.values()]
    outs = run(lambda *ts: [ops.cast(t, dtype) for t in ts], *inputs, options=options)
    for out, x in zip(outs, inputs, strict=True):
        check_bytes(out, x.to(FLOAT8[dtype]))


def test_what_is_too_large() -> None:
    """Too large numbers become the largest value (NaN in older torch), infinity, or NaN."""
    x = torch.tensor([464.0, 464.1, 61439.0, 61440.0, 1.5 * 2.0**127, float("inf")])
    outs = run(lambda t: [ops.cast(ops.cast(t, d), D.Float) for d in FLOAT8], x)
    inf, nan = float("inf"), float("nan")
    beyond = torch.tensor(1e4).to(torch.float8_e4m3fn).float()
    assert beyond.isnan() or float(beyond) == 448.0
    check(outs[0], torch.tensor([448.0, *[float(beyond)] * 5]))
    check(outs[1], torch.tensor([448.0, 448.0, 57344.0, inf, inf, inf]))
    check(outs[2], torch.tensor([512.0, 512.0, 65536.0, 65536.0, nan, nan]))


# ------------------------------------------------------------------ moved
@SCHEDULES
@EACH
def test_bytes_are_moved_as_they_are(dtype: DataType, options: list[str]) -> None:
    x = codes(dtype).view(16, 16)
    index, places = torch.tensor([5, 0, 15, 5]), torch.tensor([[3, 3, 9], [15, 0, 1]])

    def build(t: Any, i: Any, p: Any) -> list[Any]:
        one = ops.full([], 1.0, dtype)
        return [
            ops.set(t),
            ops.permute(t, [1, 0]),
            ops.slice(t, [3, 2], [9, 13]),
            ops.cat([t, t], 1),
            ops.pad(t, [1, 2, 0, 3], 2.0),
            ops.reshape(t, [8, 32]),
            ops.expand(ops.broadcast(t, [True, False, False]), [2, 16, 16]),
            ops.index_select(t, i, 1),
            ops.select(t, ops.size(i, 0), 0),
            ops.gather(t, p, 0),
            ops.embedding_fwd(i, t),
            ops.scatter(t, p, ops.slice(t, [4, 4], [6, 7]), 1),
            ops.triu(ops.pad(t, [0, 0, 0, 0]), -15),
            ops.add(one, 0.0),
        ]

    outs = run(build, x, index, places, options=options)
    b = x.view(torch.uint8)
    two = torch.tensor(2.0).to(FLOAT8[dtype]).view(torch.uint8).item()
    wanted = [
        b,
        b.mT,
        b[3:9, 2:13],
        torch.cat([b, b], 1),
        torch.nn.functional.pad(b, [1, 2, 0, 3], value=two),
        b.view(8, 32),
        b.expand(2, 16, 16),
        b[:, index],
        b[4],
        b.gather(0, places),
        b[index],
        b.scatter(1, places, b[4:6, 4:7]),
    ]
    for out, expected in zip(outs, wanted, strict=False):
        assert torch.equal(out.contiguous().view(torch.uint8), expected)
    check(outs[12], x)
    check(outs[13], torch.tensor(1.0))


@EACH
def test_indices_outside_of_a_table_give_nan(dtype: DataType) -> None:
    x = codes(dtype).view(16, 16)
    index = torch.tensor([3, 16, -1])
    (out,) = run(lambda t, i: ops.index_select(t, i, 0), x, index, options=())
    assert out[1:].isnan().all() and torch.equal(out[0].view(torch.uint8), x.view(torch.uint8)[3])


# ------------------------------------------------------------------ computed
@SCHEDULES
@EACH
def test_ops_compute_in_float(dtype: DataType, options: list[str]) -> None:
    to = FLOAT8[dtype]
    generator = torch.Generator().manual_seed(3)
    x, y = ((torch.randn(37, 16, generator=generator) * 3).to(to) for _ in range(2))

    def build(a: Any, b: Any) -> list[Any]:
        return [
            ops.add(a, b),
            ops.mul(a, 2.0),
            ops.sub(a, ops.cast(b, D.BFloat16)),
            ops.lt(a, b),
            ops.eq(a, a),
            ops.isnan(a),
            ops.abs(a),
            ops.relu(a),
            ops.clamp(a, None, 1.0),
            ops.where(ops.ge(a, 1.0), a, b),
            ops.where(ops.ge(a, 1.0), a, 2.0),
            ops.maximum(a, b),
            ops.sum(a, [1]),
            ops.max(a, [0]),
            ops.min(a, [0, 1], True),
            ops.sum(a, [1], False, D.Float),
            ops.cummax(a, 1),
            ops.argsort(a, 1, stable=True),
            *ops.topk(a, define_scalar(3, D.Int), 1, sorted=True)[:1],
            ops.mul(ops.size(a, 0), a),
        ]

    outs = run(build, x, y, options=options)
    a, b = x.float(), y.float()
    wanted = [
        a + b,
        a * 2,
        a - b.bfloat16().float(),
        a < b,
        a == a,
        a.isnan(),
        a.abs().to(to),
        a.relu().to(to),
        a.clamp(max=1.0).to(to),
        torch.where(a >= 1, a, b).to(to),
        torch.where(a >= 1, a, 2.0).to(to),
        torch.maximum(a, b),
        a.double().sum(1).float().to(to),
        a.amax(0).to(to),
        a.amin([0, 1], True).to(to),
        a.double().sum(1).float(),
        a.cummax(1).values.to(to),
        torch.argsort(a, dim=1, stable=True),
        a.topk(3, 1, sorted=True).values.to(to),
        a * 37,
    ]
    for k, (out, expected) in enumerate(zip(outs, wanted, strict=True)):
        if k in (12, 15):  # in another order
            assert out.dtype is expected.dtype
            torch.testing.assert_close(out.float(), expected.float(), rtol=0.13, atol=1e-5)
        else:
            check(out, expected)


def test_what_dtypes_become() -> None:
    with FusionGuard(Fusion()):
        a, b, c, h, i = (
            define_tensor([-1], dtype=d)
            for d in (D.Float8_e4m3fn, D.Float8_e5m2, D.Float8_e8m0fnu, D.Half, D.Int)
        )
        d = define_tensor([-1], dtype=D.Double)
        for out, wanted in (
            (ops.add(a, a), D.Float),
            (ops.add(a, b), D.Float),
            (ops.add(a, h), D.Float),
            (ops.add(a, d), D.Double),
            (ops.mul(a, 1.5), D.Float),
            (ops.mul(a, 2), D.Float),
            (ops.mul(a, i), D.Float),
            (ops.exp(c), D.Float),
            (ops.where(ops.lt(a, a), a, a), D.Float8_e4m3fn),
            (ops.where(ops.lt(a, a), a, i), D.Float8_e4m3fn),
            (ops.where(ops.lt(a, a), b, c), D.Float),
            (ops.silu(b), D.Float8_e5m2),
            (ops.sum(b, [0]), D.Float8_e5m2),
            (ops.sum(b, [0], dtype=D.Float), D.Float),
            (ops.cumsum(c, 0), D.Float8_e8m0fnu),
        ):
            assert isinstance(out, TensorView) and out.dtype() is wanted


@EACH
def test_sums_round_once(dtype: DataType) -> None:
    """Rounded partial sums of so many ones would be wrong: near 448, adding 1 changes nothing."""
    x = torch.ones(1, 384).to(FLOAT8[dtype])
    (out,) = run(lambda t: ops.sum(t, [1]), x)
    check(out, torch.tensor([384.0]).to(FLOAT8[dtype]))
    (none,) = run(lambda t: ops.sum(t, [1]), x[:, :0].contiguous())
    check(none, torch.tensor([0.0]).to(FLOAT8[dtype]))


@EACH
def test_what_stands_beside_a_run(dtype: DataType) -> None:
    """Validation, scripts for inputs of any layout, updates in place, numbers and traces work."""
    x = torch.arange(1.0, 97.0).view(8, 12).to(FLOAT8[dtype])
    with FusionDefinition() as fd:
        a, s = fd.define_tensor([-1, -1], dtype=dtype), fd.define_scalar(None, dtype)
        fd.add_output(fd.ops.cast(fd.ops.add(a, 1.0), dtype), a)
        fd.add_output(fd.ops.mul(a, s))
    for layout in (x.clone(), x.t().contiguous().t()):
        (out,) = fd.validate([layout, 2.0])
        check(out, x.float() * 2)
        check(layout, (x.float() + 1).to(FLOAT8[dtype]))
        exec(fd.repro_script_for([layout, 2.0]), {})
    fd.trace([x.clone(), 2.0])
    with pytest.raises(InputError, match=r"1e\+39 is out of the range of __e"):
        fd.execute([x, 1e39])


# ------------------------------------------------------------------ refused
def test_refusals() -> None:
    with FusionGuard(Fusion()):
        x = define_tensor([-1, -1], dtype=D.Float8_e4m3fn)
        with pytest.raises(DtypeError, match="variance_mean is not supported for __e4m3 please"):
            ops.var_mean(x, [0])
        with pytest.raises(UnsupportedError, match=r"matmul: T.*write scaled_mm"):
            ops.matmul(x, x)
        with pytest.raises(UnsupportedError, match=r"linear: T.*write scaled_mm"):
            ops.linear(x, x)
        with pytest.raises(DtypeError, match="Promoted type must be single or double"):
            ops.nextafter(x, x)
        for value, dtype in (
            (449.0, D.Float8_e4m3fn),
            (6e4, D.Float8_e5m2),
            (2.0**127 * 1.5, D.Float8_e8m0fnu),
        ):
            with pytest.raises(DefinitionError, match=r"is out of the range of __e"):
                define_scalar(value, dtype)


# ------------------------------------------------------------------ kernels
def test_a_vector_holds_sixteen() -> None:
    dtype = D.Float8_e4m3fn
    fusion = define_one(lambda t: ops.cast(ops.mul(t, 2.0), dtype), (None, None), dtype=dtype)
    executor = FusedKernelExecutor(fusion, scheduler="pointwise", name="twice", device=H200)
    x = torch.empty((4096, 8192), dtype=torch.float8_e4m3fn, device="meta")
    launch = executor.launch_for(
        [x], [x], sizes=sizes_of(fusion, x.shape), device=torch.device("cpu")
    )
    assert launch is not None
    text = launch.variant.kernel.source.text
    assert "load_vec<16>" in text or "load_vec_cs<16>" in text
    assert "store_vec<16>" in text or "store_vec_cs<16>" in text


# ------------------------------------------------------------------ ranks
@pytest.mark.parametrize("ranks", [2, 4])
@EACH
def test_shards_are_sent_as_bytes_and_summed_in_float(dtype: DataType, ranks: int) -> None:
    whole = codes(dtype).view(16, 16)
    numbers = (torch.arange(64.0).view(8, 8) % 5 + 1).to(FLOAT8[dtype])

    def program() -> tuple[list[Tensor], str]:
        mesh = DeviceMesh(range(Communicator.instance().size()))
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, -1], dtype=dtype, contiguity=True)
            n = fd.define_tensor([-1, -1], dtype=dtype, contiguity=True)
            gathered, total, most = fd.ops.set(x), fd.ops.sum(n, [0]), fd.ops.max(n, [0])
            for tv in (x, n, gathered, total, most):
                tv.set_device_mesh(mesh)
            cut(x, 0, mesh)
            cut(n, 0, mesh)
            for tv in (gathered, total, most):
                fd.add_output(tv)
        outs = fd.execute([shard_tensor(whole, x), shard_tensor(numbers, n)])
        return outs, fd.fec.host_program().full_text()

    with simulate(ranks) as world:
        results = world.run(program)
    for (gathered, total, most), text in results:
        assert torch.equal(gathered.view(torch.uint8), whole.view(torch.uint8))
        check(total, numbers.float().sum(0).to(FLOAT8[dtype]))
        check(most, numbers.float().amax(0).to(FLOAT8[dtype]))
        assert "Allgather" in text and "Allreduce" in text


def test_a_reduction_of_bytes_is_refused_on_all_ranks() -> None:
    x = torch.ones(4).to(torch.float8_e5m2)

    def program() -> None:
        backend = Communicator.instance().backend_for("cpu")
        backend.allreduce(x, x, op="SUM", team=(0, 1)).wait()

    with (
        simulate(2) as world,
        pytest.raises(UnsupportedError, match=r"reductions of torch.float8_e5m2 are not supported"),
    ):
        world.run(program)
