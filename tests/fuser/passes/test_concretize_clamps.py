"""Clamped ends of slices are decided per input class: extents contain no minima, values are
torch's."""

from __future__ import annotations

import itertools

import pytest
import torch

from fuser import FusionDefinition, ops
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.scalar.constructors import Const
from fuser.ops.define import define_tensor
from fuser.passes.concretize import concretization_key, concretize


def sliced(ends: tuple[int, ...], *, starts: tuple[int, ...] = (0, 0)) -> tuple[Fusion, TensorView]:
    """Defines x[starts[0]:ends[0], starts[1]:ends[1]] of a tensor of any sizes."""
    fusion = Fusion()
    with FusionGuard(fusion):
        x = define_tensor([-1, -1])
        fusion.add_input(x)
        fusion.add_output(ops.relu(ops.slice(x, list(starts), list(ends))))
    return fusion, x


def extents(fusion: Fusion, sizes: tuple[int, int]) -> tuple[list[object], object]:
    symbols = [a.extent for a in fusion.inputs[0].domain.logical]  # pyright: ignore
    new, key = concretize(fusion, dict(zip(symbols, sizes, strict=True)))  # pyright: ignore
    out = new.outputs[0]
    return [a.extent for a in out.domain.logical], key


@pytest.mark.parametrize("n", [1, 63, 64, 65, 1000])
def test_extents_are_constants_or_symbols(n: int) -> None:
    fusion, _ = sliced((64, 1 << 40))
    (first, second), _ = extents(fusion, (n, n))
    assert isinstance(first, Const) == (n >= 64) and "min" not in str(first)
    assert "min" not in str(second)


def test_one_key_where_the_same_side_is_taken() -> None:
    fusion, x = sliced((64, 64), starts=(3, 0))
    symbols = [a.extent for a in x.domain.logical]

    def key(*sizes: int) -> object:
        return concretization_key(fusion, dict(zip(symbols, sizes, strict=True)))  # pyright: ignore

    assert key(64, 65) == key(1000, 64) != key(63, 64)
    assert key(5, 63) == key(63, 4)
    assert key(5, 63) != key(63, 64)
    # From 3 to the end, which is empty.
    assert key(3, 63) != key(4, 63)


SIZES = (1, 2, 3, 4, 7, 8, 9, 20)


def test_slices_of_any_sizes() -> None:
    """One definition serves all sizes; each class has its own correct program."""
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([-1, -1]) for _ in range(2))
        left = fd.ops.slice(x, [0, 2], [4, 8])
        right = fd.ops.slice(x, [0, 0], [4, 2])
        fd.add_output(fd.ops.cat([left, right], 1))
        fd.add_output(fd.ops.sum(fd.ops.slice(y, [1, 0], [8, 3]), 0))
    for m, n in itertools.product(SIZES, SIZES):
        x, y = torch.randn(m, n, dtype=torch.float32), torch.randn(n, m)
        both, total = fd.execute([x, y])
        torch.testing.assert_close(both, torch.cat([x[:4, 2:8], x[:4, :2]], 1), rtol=0, atol=0)
        expected = y[1:8, :3].double().sum(0).float()
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-6)


def test_nested_clamps() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1])
        y = x
        for end in (9, 7, 12, 5):
            y = fd.ops.relu(fd.ops.slice(y, [0], [end]))
            y = fd.ops.pad(y, [1, 0])
        fd.add_output(y)
    for n in (1, 3, 4, 5, 6, 7, 8, 9, 10, 40):
        x = torch.randn(n)
        expected = x
        for end in (9, 7, 12, 5):
            expected = torch.nn.functional.pad(expected[:end].relu(), [1, 0])
        torch.testing.assert_close(fd.execute([x])[0], expected, rtol=0, atol=0)
