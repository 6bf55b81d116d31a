"""Tests pointwise kernels on rows of any length: full tensors are accessed in whole vectors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fuser import FusionDefinition, ops
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import TensorView
from fuser.runtime.cpu_kernel import CheckedCpuKernel
from fuser.schedule import pointwise
from fuser.schedule.pointwise import PointwiseParams
from tests.support.kernel_checks import back, check
from tests.support.small_fusions import define, make_executor, random, run

BF16 = DataType.BFloat16
SHAPES = [
    (9, 333),
    (64, 131),
    (7, 13),
    (1, 2049),
    (1000, 3),
    (3, 50257),
    (5, 8),
    (2, 4099),
    (33, 9),
]


@pytest.fixture(autouse=True)
def _as_with_much_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps wide vectors, which small inputs would not get, because the H200's threads would be
    idle."""
    monkeypatch.setattr(pointwise, "MANY_ELEMENTS", 1 << 20)


def _bias_residual(x: TensorView, b: TensorView, r: TensorView) -> TensorView:
    dtype = x.dtype()
    wide = DataType.Double if dtype is DataType.Double else DataType.Float
    biased = ops.add(ops.cast(x, wide), ops.broadcast(ops.cast(b, wide), [True, False]))
    return ops.cast(ops.add(ops.mul(biased, 0.5), ops.cast(r, wide)), dtype)


@pytest.mark.parametrize("is_static", [False, True], ids=["symbols", "numbers"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_bias_beside_rows(shape: tuple[int, int], dtype: torch.dtype, is_static: bool) -> None:
    x, r = (random(shape, dtype, seed) for seed in (0, 1))
    check(
        _bias_residual,
        lambda x, b, r: (x + b) * 0.5 + r,
        [x, random(shape[1:], dtype, 2), r],
        "h200",
        broadcast_ones=False,
        is_static=is_static,
    )


# ------------------------------------------------------------------ operands of other shapes
def _sum_of_all(flags: Sequence[Sequence[bool]]) -> object:
    def build(x: TensorView, *others: TensorView) -> TensorView:
        total = x
        for t, kept in zip(others, flags, strict=True):
            total = ops.add(total, ops.broadcast(t, [not k for k in kept]))
        return back(total, torch.float32)

    return build


@pytest.mark.parametrize("shape", [(5, 9, 11), (2, 3, 130), (4, 17, 3), (3, 5, 1)], ids=str)
@pytest.mark.parametrize(
    "flags",
    [
        [(False, True, True)],
        [(True, False, False)],
        [(False, True, False)],
        [(True, False, True)],
        [(True, True, False)],
        [(False, False, True), (True, False, False), (False, True, False), (True, False, True)],
    ],
    ids=str,
)
def test_operands_of_other_axes(shape: tuple[int, ...], flags: Sequence[tuple[bool, ...]]) -> None:
    x = random(shape, torch.float32)
    kept = [[n for n, k in zip(shape, f, strict=True) if k] for f in flags]
    others = [random(s, torch.float32, seed) for seed, s in enumerate(kept, 1)]

    def expected(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        for t, f in zip(others, flags, strict=True):
            x = x + t.reshape([n if k else 1 for n, k in zip(shape, f, strict=True)])
        return x

    check(_sum_of_all(flags), expected, [x, *others], "h200", broadcast_ones=False)  # pyright: ignore[reportArgumentType]


def test_an_operand_in_another_order() -> None:
    """x [a, b, c] and w [c, a]: both axes of w have another order than in x."""
    x, w = random((6, 5, 13), torch.float32), random((13, 6), torch.float32, 1)
    check(
        lambda x, w: ops.add(x, ops.broadcast(ops.permute(w, [1, 0]), [False, True, False])),
        lambda x, w: x + w.t()[:, None],
        [x, w],
        "h200",
    )


@pytest.mark.parametrize(
    ("dtype", "shared", "vector"),
    [(torch.bfloat16, 1, 8), (torch.bfloat16, 2, 4), (torch.bfloat16, 4, 0), (torch.float32, 4, 0)],
    ids=str,
)
def test_what_rows_share_narrows_flat_vectors(dtype: torch.dtype, shared: int, vector: int) -> None:
    def build(x: TensorView, *others: TensorView) -> TensorView:
        total = ops.cast(x, DataType.Float)
        for t in others:
            total = ops.add(total, ops.broadcast(ops.cast(t, DataType.Float), [True, False]))
        return ops.cast(total, x.dtype())

    inputs = [random((64, 131), dtype), *(random((131,), dtype, n + 1) for n in range(shared))]
    params = check(build, lambda x, *others: x + torch.stack(others).sum(0), inputs, "h200")
    assert isinstance(params, PointwiseParams)
    assert (params.vector if params.flat else 0) == vector


def test_rows_with_gaps_are_not_flat() -> None:
    x, b = random((9, 400), torch.bfloat16)[:, :333], random((333,), torch.bfloat16, 1)
    params = check(
        lambda x, b: ops.cast(ops.add(x, ops.broadcast(b, [True, False])), BF16),
        lambda x, b: x + b,
        [x, b],
        "h200",
    )
    assert isinstance(params, PointwiseParams)
    assert not params.flat


# ------------------------------------------------------------------ what is loaded
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
@pytest.mark.parametrize(("dtype", "nbytes"), [(torch.bfloat16, 2), (torch.float32, 4)], ids=str)
def test_full_tensors_move_in_whole_words(
    shape: tuple[int, int], dtype: torch.dtype, nbytes: int
) -> None:
    from fuser.ir.dtypes import from_torch

    declared: list[list[int | None]] = [[None, None], [None], [None, None]]
    fusion = define(_bias_residual, *declared, dtype=from_torch(dtype))
    executor = make_executor(fusion, "h200")
    x, r, b = random(shape, dtype), random(shape, dtype, 1), random(shape[1:], dtype, 2)
    run(executor, [x, b, r], [shape])
    (variant,) = executor.variants
    assert isinstance(variant.compiled, CheckedCpuKernel)
    words, left = divmod(x.numel(), 16 // nbytes)
    singles = {nbytes: left} if left else {}
    assert variant.compiled.counters.global_stores == {16: words, **singles}
    # The bias is read once per element, x and the residual once in total.
    loads = {16: 2 * words, nbytes: 2 * left + x.numel()}
    assert variant.compiled.counters.global_loads == loads


def test_rows_of_many_lengths_share_a_kernel() -> None:
    fusion = define(_bias_residual, [None, None], [None], [None, None], dtype=BF16)
    executor = make_executor(fusion, "h200")
    for shape in [(9, 333), (8, 131), (64, 131), (12, 4099)]:
        x, r = (random(shape, torch.bfloat16, seed) for seed in (0, 1))
        b = random(shape[1:], torch.bfloat16, 2)
        (out,) = run(executor, [x, b, r], [shape])
        wanted = (x.double() + b.double()) * 0.5 + r.double()
        torch.testing.assert_close(out.double(), wanted, rtol=1e-2, atol=1e-2)
    assert len(executor.variants) == 1


def test_a_word_of_which_all_is_always_there_is_stored_without_a_test() -> None:
    """The inputs have gaps after their rows. The sizes are constant multiples of a vector."""
    with FusionDefinition() as fd:
        scale, x = (fd.define_tensor(n, contiguity=False) for n in ([8, 1, 1], [8, 8]))
        fd.add_output(fd.ops.mul(scale, x))
        fd.add_output(fd.ops.var(x, [0, 1], 0, False))
    scale, rows = random((8, 1, 1), torch.float32), random((8, 13), torch.float32, 1)[:, :8]
    out, spread = fd.execute([scale, rows], _enable_options=["schedules_for(h200)"])
    assert torch.equal(out, scale * rows)
    torch.testing.assert_close(spread.double(), rows.double().var(correction=0))


# ------------------------------------------------------------------ random numbers
@pytest.mark.parametrize("shape", [(9, 333), (7, 13), (64, 131), (2, 4099)], ids=str)
def test_a_dropout_draws_by_the_place_in_the_tensor(shape: tuple[int, int]) -> None:
    """A kernel with vectors draws the same numbers as one that processes single elements."""

    def build(x: TensorView, b: TensorView) -> TensorView:
        sizes = [x.size(k) for k in range(2)]
        drawn = ops.uniform(0.0, 1.0, sizes, rng_seed=20, rng_offset=0, dtype=DataType.Float)
        biased = ops.add(x, ops.broadcast(b, [True, False]))
        return ops.where(ops.lt(drawn, 0.75), biased, 0.0)

    x, b = random(shape, torch.float32).abs() + 1, random(shape[1:], torch.float32, 1).abs()
    found: list[torch.Tensor] = []
    for device in ("h200", "cpu"):
        executor = make_executor(define(build, [None, None], [None]), device)
        found += run(executor, [x, b], [shape])
    assert torch.equal(*found)
    # 0.75 of all elements, within five standard deviations.
    assert abs((found[0] != 0).double().mean() - 0.75) < 5 * (0.1875 / x.numel()) ** 0.5
