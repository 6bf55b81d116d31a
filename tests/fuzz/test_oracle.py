"""The oracle itself: its bounds hold for torch in float32, and one dropped term breaks them."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz import elementwise, oracle, reductions
from tests.fuzz.program import Ref, Stmt
from tests.fuzz.runner import compare
from tests.fuzz.table import DTYPES, ROWS
from tests.fuzz.values import Num, Val, cast, exact

_TORCH_OPS = [r.name for r in ROWS.values() if r.arity == 1 and hasattr(torch, r.name)]


def _inputs(seed: int, n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", [n for n in _TORCH_OPS if not n.startswith("bitwise")])
def test_torch_in_float32_is_within_the_bounds(name: str) -> None:
    x = _inputs(0, 500)
    value = elementwise.pointwise(name, [exact(x.double(), "Float")])
    assert compare(getattr(torch, name)(x), value) is None


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


def test_explicit_casts_round() -> None:
    x = _inputs(4, 100)
    value = cast(exact(x.double(), "Float"), "BFloat16")
    assert value.is_exact and torch.equal(value.ref, x.bfloat16().double())


@pytest.mark.parametrize("dtype", ["Float", "BFloat16", "Double"])
def test_contractions(dtype: str) -> None:
    torch_dtype = DTYPES[dtype].torch
    a, b = _inputs(5, 12 * 64).reshape(12, 64).to(torch_dtype), _inputs(6, 64 * 8).reshape(64, 8)
    b = b.to(torch_dtype)
    value = reductions.matmul(exact(a.double(), dtype), exact(b.double(), dtype))
    assert compare(a @ b, value) is None
    assert compare(a[:, 1:] @ b[1:], value) is not None


def test_scalars_divide_with_truncation() -> None:
    assert elementwise.scalar_op("div", [Num(-5, "Int"), Num(2, "Int")]) == Num(-2, "Int")
    assert elementwise.scalar_op("mod", [Num(-5, "Int"), Num(3, "Int")]) == Num(-2, "Int")
