"""Tests of the oracle: its bounds hold for torch in float32, and exclude a sum without one
term.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from tests.fuser.ops.test_quantize import brute_force
from tools.fuzz import oracle
from tools.fuzz.ops import (
    attention,
    blocks,
    composites,
    elementwise,
    groups,
    lookups,
    reductions,
    scaled,
)
from tools.fuzz.program import Ref, Stmt
from tools.fuzz.runner import compare
from tools.fuzz.table import DTYPES, FLOAT8, ROWS, Row
from tools.fuzz.values import InvalidProgram, Num, Val, cast, exact, stored

_TORCH_OPS = [r.name for r in ROWS.values() if r.arity == 1 and hasattr(torch, r.name)]


def _inputs(seed: int, n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", [n for n in _TORCH_OPS if "f" in ROWS[n].dtypes])
def test_torch_in_float32_is_within_the_bounds(name: str) -> None:
    x = _inputs(0, 500)
    value = elementwise.pointwise(name, [exact(x.double(), "Float")])
    assert compare(getattr(torch, name)(x), value) is None


@pytest.mark.parametrize("name", [n for n in _TORCH_OPS if "c" in ROWS[n].dtypes])
def test_torch_in_complex64_is_within_the_bounds(name: str) -> None:
    z = torch.complex(_inputs(0, 500), _inputs(1, 500))
    value = elementwise.pointwise(name, [exact(z.to(torch.complex128), "ComplexFloat")])
    out = getattr(torch, name)(z)
    assert compare(out, value) is None
    if out.is_complex():
        assert compare(out * (1 + 1e-3), value) is not None
    assert float(value.bound.isinf().double().mean()) < 0.1


@pytest.mark.parametrize("n", [64, 1024])
def test_one_dropped_term_of_a_sum_is_noticed(n: int) -> None:
    noticed = 0
    for seed in range(100):
        x = _inputs(seed, n)
        value = reductions.reduce("sum", exact(x.double(), "Float"), [0])
        assert compare(x.sum(), value) is None
        dropped = x.abs().argsort()[n // 2]
        noticed += compare(x.sum() - x[dropped], value) is not None
    assert noticed >= 99


def test_one_wrong_element_is_noticed() -> None:
    x, y = _inputs(0, 100_000), _inputs(1, 100_000)
    value = elementwise.pointwise("mul", [exact(t.double(), "Float") for t in (x, y)])
    out = x * y
    assert compare(out, value) is None
    out[77_777] *= 1 + 1e-6
    assert "1 of 100000 elements" in str(compare(out, value))


def test_a_quotient_may_be_a_product_with_a_reciprocal() -> None:
    """x times 1/y is accepted as x/y, although it is exact only for powers of two."""
    x, two = _inputs(0, 1000), torch.tensor(2.0)
    of_itself = elementwise.pointwise("div", [exact(x.double(), "Float")] * 2)
    product = x * x.reciprocal()
    assert bool((product != 1).any()) and compare(product, of_itself) is None
    assert compare(product * (1 + 1e-6), of_itself) is not None
    halves = elementwise.pointwise("div", [exact(t.double(), "Float") for t in (x, two)])
    assert compare(x / 2, halves) is None and halves.is_exact


def test_errors_accumulate_through_statements() -> None:
    x = _inputs(3, 1000)
    env: oracle.Env = {"x": exact(x.double(), "Float")}
    for k, op in enumerate(("sin", "exp", "tanh")):
        oracle.run_stmt(Stmt((f"t{k}",), op, (Ref("x" if not k else f"t{k - 1}"),)), env)
    value = env["t2"]
    assert isinstance(value, Val)
    assert compare(x.sin().exp().tanh(), value) is None
    assert float(value.bound.max()) < 1e-4


def test_a_value_near_a_jump_is_not_compared() -> None:
    near = Val(
        torch.tensor([1.0, 1.5], dtype=torch.float64), torch.full((2,), 1e-6).double(), "Float"
    )
    value = elementwise.pointwise("floor", [near])
    assert compare(torch.tensor([0.0, 1.0]), value) is None
    assert compare(torch.tensor([1.0, 2.0]), value) is not None
    compared = elementwise.pointwise("ge", [near, Num(1.0, "Double")])
    assert compare(torch.tensor([False, True]), compared) is None
    assert compare(torch.tensor([False, False]), compared) is not None


_CRITICAL = torch.tensor([0, 1, -1, 2, -2, 3, 0.5, -0.5, 1.5, math.pi / 2], dtype=torch.float64)
_FLOATING = [r for r in ROWS.values() if "f" in r.dtypes and r.rule != "select"]


@pytest.mark.parametrize("row", _FLOATING, ids=lambda r: r.name)
def test_all_values_within_the_bounds_of_the_operands_are_expected(row: Row) -> None:
    n, gen = 50_000, torch.Generator().manual_seed(0)

    def near() -> tuple[Val, torch.Tensor]:
        """Returns values next to jumps and poles, and the results that are allowed there."""
        at = _CRITICAL[torch.randint(0, len(_CRITICAL), (n,), generator=gen)]
        shift, off = torch.rand(2, n, generator=gen, dtype=torch.float64) * 2 - 1
        bound = 1e-3 * (torch.rand(n, generator=gen) < 0.5).double()
        ref = at + bound * shift**5
        return Val(ref, bound, "Double"), ref + bound * off

    pairs = [near() for _ in range(row.arity)]
    value = elementwise.pointwise(row.name, [v for v, _ in pairs])
    assert compare(row.fn(*(x for _, x in pairs)), value) is None


_OF_ZERO: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "div": lambda y: y / y,
    "fmod": lambda y: torch.fmod(y, y),
    "remainder": lambda y: torch.remainder(y, y),
    "pow": lambda y: y**-2.0,
    "log": torch.log,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
}


@pytest.mark.parametrize("name", _OF_ZERO)
@pytest.mark.parametrize("first", ["exp", "erfc"])
def test_what_its_dtype_can_not_hold_is_not_compared(name: str, first: str) -> None:
    """Results that overflow or underflow in float32, but not in float64, are not compared."""
    x = torch.tensor([-150.0, -95.0, -88.0, 88.8, 150.0, 12.0, 10.0, 2.5])
    small = elementwise.pointwise(first, [exact(x.double(), "Float")])
    operands = [small] if ROWS[name].arity == 1 else [small, small]
    if name == "pow":
        operands = [small, Num(-2.0, "Double")]
    value = elementwise.pointwise(name, operands)
    out = _OF_ZERO[name](getattr(torch, first)(x))
    assert compare(out, value) is None
    out[-1] *= 1.01
    assert name in ("fmod", "remainder") or compare(out, value) is not None


@pytest.mark.parametrize("name", ["log", "log2", "log10", "log1p", "atan", "atanh", "reciprocal"])
def test_a_complex_pole_within_the_bounds_may_be_met(name: str) -> None:
    """Infinity is allowed if the bounds include a pole, even if all their corners are finite."""
    pole = {"log1p": -1.0, "atan": -1j, "atanh": 1.0}.get(name, 0.0)
    ref = torch.full((2,), pole, dtype=torch.complex128) + torch.tensor([3e-6 + 4e-6j, 0.3 + 0.4j])
    near = Val(ref, torch.full((2,), 6e-6).double(), "ComplexFloat")
    value = elementwise.pointwise(name, [near])
    out = getattr(torch, name)(ref)
    assert compare(out.to(torch.complex64), value) is None
    out[0] = complex("inf")
    assert compare(out.to(torch.complex64), value) is None
    out[1] *= 1.01
    assert compare(out.to(torch.complex64), value) is not None


def test_counts_are_no_int_to_cat() -> None:
    """Counts have the dtype Index; next to a tensor of Int they become Int, next to a number
    not.
    """
    count = reductions.welford(exact(_inputs(0, 6).double().reshape(2, 3), "Float"), [1])[2]
    beside = (Num(2, "Int"), exact(torch.ones(2).long(), "Int"))
    results = [elementwise.pointwise("mul", [count, other]) for other in beside]
    assert [v.dtype for v in (count, *results)] == ["Index", "Index", "Int"]
    assert compare(torch.tensor([6, 6]), results[0]) is None


def test_explicit_casts_round() -> None:
    x = _inputs(4, 100)
    value = cast(exact(x.double(), "Float"), "BFloat16")
    assert value.is_exact and torch.equal(value.ref, x.bfloat16().double())


def test_a_float_of_one_byte_is_one_of_those_within_the_bound() -> None:
    """All one-byte floats within the bound are accepted; the next ones outside are not."""
    for dtype in FLOAT8:
        to = DTYPES[dtype].torch
        codes = torch.arange(256, dtype=torch.uint8).view(to).double()
        codes = codes[codes.isfinite()].unique()
        for ref, bound in [(-3.1, 0.2), (0.01, 0.02), (17.0, 0.9), (440.0, 30.0), (1e-3, 0.0)]:
            value = stored(torch.tensor([ref]).double(), torch.tensor([bound]).double(), dtype)
            near = (ref + bound * torch.linspace(-1, 1, 1001).double()).to(to)
            assert all(compare(x.reshape(1), value) is None for x in near)
            low, high = float(near.double().min()), float(near.double().max())
            outside = [*codes[codes < low][-1:], *codes[codes > high][:1]]
            far = max(high - value.ref.item(), value.ref.item() - low)
            outside = [x for x in outside if abs(float(x) - value.ref.item()) > far]
            assert all(compare(x.reshape(1).to(to), value) is not None for x in outside)


@pytest.mark.parametrize("dtype", ["Float", "BFloat16", "Double"])
def test_contractions(dtype: str) -> None:
    torch_dtype = DTYPES[dtype].torch
    a, b = _inputs(5, 12 * 64).reshape(12, 64).to(torch_dtype), _inputs(6, 64 * 8).reshape(64, 8)
    b = b.to(torch_dtype)
    value = reductions.matmul(exact(a.double(), dtype), exact(b.double(), dtype))
    assert compare(a @ b, value) is None
    assert compare(a[:, 1:] @ b[1:], value) is not None


@pytest.mark.parametrize("dtype", ["Float", "BFloat16", "Double"])
def test_a_linear_whose_weights_are_a_batch(dtype: str) -> None:
    torch_dtype = DTYPES[dtype].torch
    x, w = (_inputs(i, 3 * 12 * 16).reshape(3, 12, 16).to(torch_dtype) for i in (0, 1))
    bias = _inputs(2, 36).reshape(3, 12).to(torch_dtype)
    value = reductions.linear(*(exact(t.double(), dtype) for t in (x, w, bias)))
    made = torch.stack([torch.nn.functional.linear(x, a, b) for a, b in zip(w, bias, strict=True)])
    assert compare(made, value) is None
    assert compare(made.transpose(0, 1), value) is not None


def test_products_of_scaled_factors() -> None:
    a = _inputs(0, 9 * 40).reshape(9, 40).to(torch.float8_e4m3fn)
    b = _inputs(1, 40 * 5).reshape(40, 5).to(torch.float8_e5m2)
    rows, columns, beta = _inputs(2, 9).reshape(9, 1), _inputs(3, 1), torch.tensor(-1.5)
    bias = _inputs(4, 5).half().float()
    product = (rows * a.float()) @ (columns * b.float()) + beta * bias
    x, y = exact(a.double(), "Float8_e4m3fn"), exact(b.double(), "Float8_e5m2")
    s, u = (exact(t.double(), "Float") for t in (rows, columns))
    for dtype in ("Float", "BFloat16", "Float8_e4m3fn", "Float8_e8m0fnu"):
        like = DTYPES[dtype].torch
        more = exact(bias.double(), "Half"), exact(beta.double(), "Float")
        value = scaled.product(x, y, s, u, None, *more, dtype=dtype)
        assert compare(product.to(like), value) is None
        assert compare((product + beta * bias).to(like), value) is not None


def test_products_of_groups() -> None:
    a, b = _inputs(0, 12 * 7).reshape(12, 7), _inputs(1, 3 * 7 * 4).reshape(3, 7, 4)
    offsets = exact(torch.tensor([2, 2, 9]), "Int32")
    of_rows = groups.products(
        exact(a.double(), "Float"), exact(b.double(), "Float"), offsets, dtype="Float"
    )
    out = torch.cat([a[:2] @ b[0], a[2:9] @ b[2], torch.zeros(3, 4)])
    assert compare(out, of_rows) is None
    out[8] = a[8] @ b[1]
    assert compare(out, of_rows) is not None
    # The same matrices, each with the groups along its other axis.
    c, d = a.T.contiguous(), b.mT.contiguous()
    of_columns = groups.products(
        exact(d.double(), "Float"), exact(c.double(), "Float"), offsets, dtype="Float"
    )
    assert torch.equal(of_columns.ref, of_rows.ref.T)
    parts = groups.products(
        exact(c.double(), "Float"), exact(a.double(), "Float"), offsets, dtype="Float"
    )
    assert compare(torch.stack([c[:, :2] @ a[:2], 0 * c @ a, c[:, 2:9] @ a[2:9]]), parts) is None
    fallen = exact(torch.tensor([2, 1, 9]), "Int32")
    with pytest.raises(InvalidProgram):
        groups.products(
            exact(c.double(), "Float"), exact(a.double(), "Float"), fallen, dtype="Float"
        )


def test_products_of_scaled_groups() -> None:
    """Compares each form of grouped products with float32 products per group."""
    a, b = _inputs(0, 12 * 7).reshape(12, 7), _inputs(1, 3 * 7 * 4).reshape(3, 7, 4)
    a, b = a.to(torch.float8_e4m3fn).double(), b.to(torch.float8_e5m2).double()
    rows, columns = _inputs(2, 36).reshape(3, 12, 1), _inputs(3, 12).reshape(3, 1, 4)
    alpha, bias = torch.tensor([1.5, 0.0, -2.0]), _inputs(4, 36).reshape(3, 12, 1)
    offsets = exact(torch.tensor([2, 2, 9]), "Int32")
    few = [exact(t, "Float8_e5m2") for t in (a, b)]
    scales = [exact(t.double(), "Float") for t in (rows, columns)]
    more = {n: exact(t.double(), "Float") for n, t in (("alpha", alpha), ("bias", bias))}
    value = groups.products(*few, offsets, *scales, dtype="Float", **more)
    out = torch.zeros(12, 4)
    for g, mine in ((0, slice(2)), (2, slice(2, 9))):
        product = (a[mine] @ b[g]).float() * rows[g, mine] * columns[g] * alpha[g]
        out[mine] = product + bias[g, mine]
    assert compare(out, value) is None
    out[1] += alpha[1] - alpha[0]
    assert compare(out, value) is not None
    # The same with groups of columns.
    few, scales = [v.view(lambda t: t.mT) for v in few], [v.view(lambda t: t.mT) for v in scales]
    more["bias"] = more["bias"].view(lambda t: t.mT)
    turned = groups.products(*few[::-1], offsets, *scales[::-1], dtype="Float", **more)
    assert torch.equal(turned.ref, value.ref.T)


def test_added_rows() -> None:
    x, rows, at = _inputs(0, 20).reshape(4, 5), _inputs(1, 300).reshape(60, 5), torch.arange(60) % 3
    given = exact(x.double(), "Float"), exact(at, "Int"), exact(rows.double(), "Float")
    value = lookups.index_put_accumulate(*given)
    out = x.index_put((at,), rows, accumulate=True)
    assert compare(out, value) is None
    assert not value.bound[3].any() and bool(value.bound[:3].all())
    assert compare(out - rows[7] * (torch.arange(4) == 1).unsqueeze(1), value) is not None
    out[3] += 1e-6
    assert compare(out, value) is not None


def test_the_finite_part_of_an_infinite_complex_sum_is_rounded() -> None:
    x, rows = (torch.complex(_inputs(i, 40), _inputs(i + 1, 40)).reshape(20, 2) for i in (0, 2))
    x[:, 0].real[::2], rows[:, 1].imag[3] = math.inf, -math.inf
    given, added = (exact(t.to(torch.complex128), "ComplexFloat") for t in (x, rows))
    at = torch.arange(20)
    value = lookups.index_put_accumulate(given, exact(at, "Int"), added)
    out = x.index_put((at,), rows, accumulate=True)
    assert compare(out, value) is None
    assert compare(x.sum(0), reductions.reduce("sum", given, [0])) is None
    out[3, 0] *= 1 + 1e-3
    assert compare(out, value) is not None


def test_blocks_are_those_of_brute_force() -> None:
    x = _inputs(0, 640).reshape(2, 320) * 10 ** _inputs(1, 640).reshape(2, 320)
    x[0, :32], x[1, 5] = 0.0, math.inf
    found = blocks.nv_block_quantize(exact(x.double(), "Float"), False, 32, "Float8_e4m3fn")
    assert all(v.is_exact for v in found)
    expected = brute_force(x[:, 32:])
    assert compare(expected[0], found[0].view(lambda t: t[:, 32:])) is None
    assert compare(expected[1], found[1].view(lambda t: t[:, 1:])) is None
    assert float(found[1].ref[0, 0]) == 2.0**-127 and float(found[1].ref[1, 0]) == 2.0**127
    beyond = torch.tensor(math.inf).to(torch.float8_e4m3fn).double()
    torch.testing.assert_close(found[0].ref[1, 5], beyond, equal_nan=True)
    # Where the largest may be on both sides of a power's limit, so may the scale.
    near = Val(torch.full((32,), 448.0).double(), torch.full((32,), 0.1).double(), "Float")
    values, scales = blocks.nv_block_quantize(near, False, 32, "Float8_e4m3fn")
    assert compare(torch.tensor([2.0]).to(torch.float8_e8m0fnu), scales) is None
    assert compare(torch.tensor([4.0]).to(torch.float8_e8m0fnu), scales) is not None
    assert bool(values.bound.isinf().all())


@pytest.mark.parametrize("dtype", ["Float", "BFloat16", "Double"])
def test_attention(dtype: str) -> None:
    operands = [_inputs(seed, 2 * 3 * 6 * 8).reshape(2, 3, 6, 8) for seed in range(4)]
    operands = [t.to(DTYPES[dtype].torch) for t in operands]
    q, k, v, g = [exact(t.double(), dtype) for t in operands]
    a, b, c = given = [t.clone().requires_grad_() for t in operands[:3]]
    out = torch.nn.functional.scaled_dot_product_attention(a, b, c, is_causal=True)
    value, sums, *seeds = attention.forward(q, k, v, is_causal=True)
    grads = torch.autograd.grad(out, given, operands[3])
    values = attention.backward(g, q, k, v, value, sums, None, True, seeds[0], seeds[1], None)
    for got, known in zip((out, *grads), (value, *values), strict=True):
        assert compare(got.detach(), known) is None
        assert compare(got.detach() * 1.5, known) is not None
    assert compare(out.detach().transpose(0, 1).reshape(out.shape), value) is not None


def test_scalars_divide_with_truncation() -> None:
    assert elementwise.scalar_op("div", [Num(-5, "Int"), Num(2, "Int")]) == Num(-2, "Int")
    assert elementwise.scalar_op("mod", [Num(-5, "Int"), Num(3, "Int")]) == Num(-2, "Int")


def test_a_rounded_product_is_not_exact_because_its_last_digits_happen_to_be_zeros() -> None:
    """1.31 * x rounds to a number with few digits, but a fused multiply-add does not round
    it.
    """
    x, a = torch.tensor([-0.7442831993103027]), torch.ones(1, dtype=torch.float64)
    value = elementwise.addcmul(
        exact(a, "Double"), exact(x.double(), "Float"), exact(a, "Double"), Num(1.31, "Double")
    )
    fused = torch.tensor([float(1 + Fraction(x.item()) * Fraction(1.31))], dtype=torch.float64)
    assert float((1 + 1.31 * x.double() - fused).abs()) > 0
    assert compare(fused, value) is None
    assert 0 < float(value.bound) < 1e-15


@pytest.mark.parametrize("dtype", ["Float", "BFloat16"])
def test_the_sign_of_a_nan_is_nobodys(dtype: str) -> None:
    x = torch.tensor([math.nan, -math.nan, 1.0, -1.0], dtype=torch.float64)
    value = elementwise.pointwise("signbit", [exact(x, dtype)])
    assert value.bound.isinf().tolist() == [True, True, False, False]
    assert compare(torch.tensor([True, False, False, True]), value) is None


@pytest.mark.parametrize("limits", [(-0.5, 1), (-1, 1.5), (-1, 2), (None, 0.5), (-2, None)])
@pytest.mark.parametrize("dtype", ["Int", "Int32", "Float", "Double", "BFloat16", "Half"])
def test_limits_promote_as_in_torch(
    dtype: str, limits: tuple[int | float | None, int | float | None]
) -> None:
    x = torch.arange(-4, 5).to(DTYPES[dtype].torch)
    given = x.double() if x.is_floating_point() else x.long()
    value = elementwise.clamp(exact(given, dtype), *limits)
    want = x.clamp(*limits)
    assert DTYPES[value.dtype].torch is want.dtype
    assert compare(want, value) is None and compare(want + 1, value) is not None


@pytest.mark.parametrize("axes", [None, [], 0, -1, [0, 1]], ids=str)
@pytest.mark.parametrize("dtype", ["Float", "Double", "BFloat16"])
def test_means_are_those_of_torch(dtype: str, axes: int | list[int] | None) -> None:
    x = (_inputs(5, 60).reshape(5, 12) + 3).to(DTYPES[dtype].torch)
    value = composites.mean(exact(x.double(), dtype), axes)
    want = x.double().mean(axes).to(x.dtype)
    assert compare(want, value) is None and compare(want * 1.5, value) is not None
