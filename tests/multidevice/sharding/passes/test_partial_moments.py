"""Means and variances along a divided axis come from the moments of the parts; nothing is gathered.

Expected values are torch's, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fuser import FusionDefinition, Replicate, Shard, TensorView, shard
from fuser.multidevice import DeviceMesh, shard_tensor, simulate
from hostir.ir.parser import parse
from hostir.ir.program import equal

pytestmark = pytest.mark.from_text

R, S = Replicate(), Shard
Placements = Sequence[Any]
LINE, SQUARE = [0, 1, 2, 3], [[0, 1], [2, 3]]
# dtype -> the absolute tolerance for elements of a size of about 1
TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 5e-3}


def run(
    x: torch.Tensor,
    devices: object,
    placements: Placements,
    build: Callable[..., tuple[TensorView, ...]],
    placed: Placements | None = None,
    *,
    static: bool = False,
) -> tuple[list[torch.Tensor], list[str], list[TensorView]]:
    """Runs `build` on a rank; returns its results, the communications, and the result tensors."""
    mesh = DeviceMesh(devices)
    with FusionDefinition() as fd:
        shape = list(x.shape) if static else [-1] * x.ndim
        tv = fd.define_tensor(shape, True, x.dtype, mesh=mesh, placements=placements)
        outs = list(build(fd, tv))
        for out in outs:
            if placed is not None:
                shard(out, mesh, placed)
            fd.add_output(out)
    results = [fd.execute([shard_tensor(x, tv)]) for _ in range(2)][-1]
    program = fd.fec.host_program()
    assert equal(parse(program.full_text()), program)
    lines = program.names_text().splitlines()
    types = [line.split("(type=")[1].split(",")[0] for line in lines if "(type=" in line]
    return results, types, outs


def moments(dims: Sequence[int]) -> Callable[..., tuple[TensorView, ...]]:
    return lambda fd, x: fd.ops.var_mean(x, list(dims))


def drawn(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    return (2 * values + 3).to(dtype)


def check(
    x: torch.Tensor, dims: Sequence[int], devices: object, placements: Placements, **options: Any
) -> list[str]:
    """Compares the moments on all ranks with torch; returns the communications of a rank."""
    expected = torch.var_mean(x.double(), tuple(dims))
    tolerance = TOLERANCES[x.dtype]

    def on_rank() -> list[str]:
        results, types, outs = run(x, devices, placements, moments(dims), **options)
        for result, whole, out in zip(results, expected, outs, strict=True):
            part = shard_tensor(whole, out) if options.get("placed") else whole
            torch.testing.assert_close(result.double(), part, rtol=0, atol=tolerance)
        return types

    with simulate(DeviceMesh(devices).size) as world:
        found = world.run(on_rank)
    assert all(types == found[0] for types in found)
    return found[0]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_rows_that_devices_share_need_two_sums(dtype: torch.dtype, static: bool) -> None:
    found = check(drawn((6, 12), dtype), [1], LINE, [S(1)], static=static)
    assert found == ["Allreduce"] * 2


@pytest.mark.parametrize("extent", [4, 8, 20])
def test_parts_of_one_two_and_five_elements(extent: int) -> None:
    for static in (False, True):
        assert check(drawn((3, extent)), [1], LINE, [S(1)], static=static) == ["Allreduce"] * 2


@pytest.mark.parametrize(
    ("shape", "dims", "placements", "placed", "types"),
    [
        ((8, 6), [0], [S(0), S(0)], [R, R], ["Allreduce"] * 4),
        ((8, 6), [0], [S(0), S(1)], [R, S(0)], ["Allreduce"] * 2),
        ((8, 6), [0], [S(1), S(0)], [S(0), R], ["Allreduce"] * 2),
        ((8, 6), [0, 1], [S(0), S(1)], [R, R], ["Allreduce"] * 4),
        ((8, 6), [0, 1], [R, S(0)], [R, R], ["Allreduce"] * 2),
        ((4, 8, 6), [0, 2], [R, S(2)], [R, R], ["Allreduce"] * 2),
        ((4, 8, 6), [1], [S(1), S(0)], [R, S(0)], ["Allreduce"] * 2),
        ((4, 8, 6), [1], [S(2), S(0)], [S(1), S(0)], []),
        ((4, 8, 6), [1], [R, S(1)], [R, S(0)], ["Allreduce", "ReduceScatter"]),
        ((4, 8, 6), [1], [R, S(1)], [S(0), S(1)], ["Allreduce", "ReduceScatter"]),
    ],
    ids=str,
)
def test_any_axes_of_a_mesh_of_two_dimensions(
    shape: Sequence[int],
    dims: Sequence[int],
    placements: Placements,
    placed: Placements,
    types: list[str],
) -> None:
    found = check(drawn(shape), dims, SQUARE, placements, placed=placed)
    assert sorted(found) == sorted(types)


@pytest.mark.parametrize(
    ("shape", "placements", "types"),
    [
        ((6, 10), [R, S(1)], ["Allreduce"] * 2),
        ((5, 12), [S(0), S(1)], ["Allreduce"] * 2 + ["Allgather"] * 2),
        ((6, 7), [R, S(1)], ["Allgather"]),
    ],
    ids=str,
)
def test_parts_of_unequal_sizes_are_gathered(
    shape: Sequence[int], placements: Placements, types: list[str]
) -> None:
    """Rows may be shared unevenly; the elements of a row that devices share must be equal parts."""
    found = check(drawn(shape), [1], SQUARE, placements, placed=[R, R], static=True)
    assert sorted(found) == sorted(types)


def test_a_large_mean_costs_no_precision() -> None:
    """Sums of squares without the mean would lose all digits of the variance."""
    x = drawn((4, 64)) + 1e6

    def on_rank() -> None:
        results, _, _ = run(x, LINE, [S(1)], moments([1]))
        for result, expected in zip(results, torch.var_mean(x, 1), strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-9, atol=0)

    with simulate(4) as world:
        world.run(on_rank)


def test_moments_of_special_values_are_those_of_torch() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.ones(4, 8, dtype=torch.float64)
    x[1, 2], x[2, 7], x[3, 0], x[3, 5] = nan, inf, inf, -inf

    def on_rank() -> None:
        results, _, _ = run(x, LINE, [S(1)], moments([1]))
        for result, expected in zip(results, torch.var_mean(x, 1), strict=True):
            torch.testing.assert_close(result, expected, equal_nan=True)

    with simulate(4) as world:
        world.run(on_rank)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_welford_returns_the_number_of_all_elements(dtype: torch.dtype) -> None:
    """Moments of Half are combined in Float, and rounded once."""
    x = drawn((3, 8), dtype)

    def on_rank() -> None:
        results, types, _ = run(x, LINE, [S(1)], lambda fd, tv: fd.ops.welford(tv, [1]))
        average, squares, count = (result.double() for result in results)
        expected = x.double().var(1, correction=0) * 8
        torch.testing.assert_close(average, x.double().mean(1).to(dtype).double())
        torch.testing.assert_close(squares, expected.to(dtype).double())
        assert count.tolist() == [8, 8, 8] and types == ["Allreduce"] * 2

    with simulate(4) as world:
        world.run(on_rank)


def test_a_layer_norm_of_divided_features_gathers_nothing() -> None:
    x = drawn((6, 16))

    def build(fd: FusionDefinition, tv: TensorView) -> tuple[TensorView, ...]:
        return (fd.ops.layer_norm(tv, [16]),)

    def on_rank() -> list[str]:
        (result,), types, (out,) = run(x, LINE, [S(1)], build, [S(1)], static=True)
        whole = torch.nn.functional.layer_norm(x, [16])
        torch.testing.assert_close(result, shard_tensor(whole, out))
        return types

    with simulate(4) as world:
        assert world.run(on_rank)[0] == ["Allreduce"] * 2


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("shape", [(0, 8), (3, 0)], ids=str)
def test_moments_of_no_elements(shape: Sequence[int]) -> None:
    x = drawn(shape)

    def on_rank() -> None:
        results, _, _ = run(x, LINE, [S(1)], moments([1]))
        for result, expected in zip(results, torch.var_mean(x, 1), strict=True):
            torch.testing.assert_close(result, expected, equal_nan=True)

    with simulate(4) as world:
        world.run(on_rank)


# ------------------------------------------------------------------ launched ranks
@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize(
    ("devices", "placements", "placed"),
    [
        (LINE, [S(1)], [R]),
        (LINE, [S(1)], [S(0)]),
        (SQUARE, [S(1), S(1)], [R, R]),
        (SQUARE, [S(0), S(1)], [S(0), R]),
    ],
    ids=str,
)
def test_on_four_ranks(
    devices: object, placements: Placements, placed: Placements, comm: Any
) -> None:
    x = drawn((8, 12))
    results, _, outs = run(x, devices, placements, moments([1]), placed)
    for result, whole, out in zip(results, torch.var_mean(x, 1), outs, strict=True):
        torch.testing.assert_close(result, shard_tensor(whole, out))
