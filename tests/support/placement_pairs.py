"""Pairs of placements of one tensor, and programs that change the one into the other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import torch

from fuser import DataType, FusionDefinition, ParallelType
from fuser.ir.fusion import TensorView
from multidevice import DeviceMesh

X, Y, Z = ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.mesh_z
# For each axis, the mesh dimensions that divide it, outermost first.
Names = tuple[tuple[ParallelType, ...], ...]
# All meshes have the same four ranks. The keys are their numbers of dimensions.
SIZES = {1: {X: 4}, 2: {X: 2, Y: 2}, 3: {X: 2, Y: 1, Z: 2}}
MESHES = {
    1: DeviceMesh(range(4)),
    2: DeviceMesh([[0, 1], [2, 3]]),
    3: DeviceMesh([[[0, 1]], [[2, 3]]]),
}
SHAPE = (8, 12, 4)


@cache
def placements(axes: int, ndim: int) -> list[Names]:
    """Returns all ways to divide `axes` axes by a subset of the mesh dimensions."""
    found: set[Names] = set()
    types = list(SIZES[ndim])
    for places in itertools.product(range(-1, axes), repeat=len(types)):
        on_axes = [[p for p, at in zip(types, places, strict=True) if at == k] for k in range(axes)]
        found.update(itertools.product(*(itertools.permutations(mine) for mine in on_axes)))
    return sorted(found, key=str)


def cut(tv: TensorView, names: Names, sizes: dict[ParallelType, int]) -> None:
    for axis in reversed(range(len(names))):
        for k, ptype in enumerate(names[axis]):
            tv.outer_split(axis + k, sizes[ptype])
            tv.axis(axis + k).parallelize(ptype)


def shard(whole: torch.Tensor, names: Names, mesh: DeviceMesh, rank: int) -> torch.Tensor:
    for axis, mine in enumerate(names):
        for ptype in mine:
            at = mesh.coordinate(rank, ptype)
            whole = whole.chunk(mesh.size_of(ptype), axis)[at]
    return whole.contiguous()


def program(
    op: str, source: Names, target: Names, ndim: int, shape: tuple[int, ...], *, is_symbolic: bool
) -> FusionDefinition:
    with FusionDefinition() as fd:
        sizes = [-1] * len(shape) if is_symbolic else [*shape]
        x = fd.define_tensor(sizes, contiguity=True, dtype=DataType.Float)
        y = fd.ops.sum(x, [len(shape) - 1]) if op == "sum" else fd.ops.set(fd.ops.neg(x))
        z = fd.ops.add(y, 1.0)
        fd.add_output(z)
        for tv in (x, y, z):
            tv.set_device_mesh(MESHES[ndim])
        cut(x, source, SIZES[ndim])
        cut(y, target, SIZES[ndim])
        cut(z, target, SIZES[ndim])
    return fd


def expected(op: str, whole: torch.Tensor) -> torch.Tensor:
    return (whole.double().sum(-1) + 1 if op == "sum" else 1 - whole.double()).float()


def pairs(op: str, ndim: int) -> list[tuple[Names, Names]]:
    sources, targets = placements(3, ndim), placements(2 if op == "sum" else 3, ndim)
    return list(itertools.product(sources, targets))


def whole_tensor() -> torch.Tensor:
    """Returns a tensor of integers, so that sums are exact in any order."""
    return torch.randint(-50, 50, SHAPE, generator=torch.Generator().manual_seed(1)).float()


def check_pairs_of_this_rank(
    found: Sequence[tuple[Names, Names]], ndim: int, rank: int, device: str, options: list[str]
) -> None:
    """Runs, for each pair, a copy from the one placement to the other on this rank of four."""
    whole = whole_tensor()
    for source, target in found:
        fd = program("set", source, target, ndim, SHAPE, is_symbolic=False)
        inputs = [shard(whole, source, MESHES[ndim], rank).to(device)]
        (out,) = fd.execute(inputs, _enable_options=options)
        want = shard(expected("set", whole), target, MESHES[ndim], rank)
        assert torch.equal(out.cpu(), want), (source, target)
