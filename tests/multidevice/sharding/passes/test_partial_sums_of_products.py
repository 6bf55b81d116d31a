"""Products of operands of which devices divide different axes: one is gathered, or both are moved.

A weight gradient is an example: devices divide the features of one operand, and the tokens of the
other one, which another product reads as a whole.
"""

from __future__ import annotations

import pytest
import torch

from fuser import DataType, FusionDefinition, Replicate, Shard, TensorView, shard
from multidevice import DeviceMesh
from tests.support.rank_by_rank import Run, run

MESH = DeviceMesh(range(4))
GRID = DeviceMesh([[0, 1], [2, 3]])
Pieces = list[Shard | Replicate]


def define(
    fd: FusionDefinition, shape: list[int], pieces: Pieces, mesh: DeviceMesh = MESH
) -> TensorView:
    return fd.define_tensor(
        shape, contiguity=True, dtype=DataType.Double, mesh=mesh, placements=pieces
    )


def numbers(*shape: int) -> torch.Tensor:
    """Returns small integers, so that sums are exact in any order."""
    seed = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-3, 4, shape, generator=seed).double()


def kinds(done: Run) -> list[str]:
    return [kind for kind, _ in done.collectives]


def product(tokens: int, features: int, *, is_symbolic: bool = False) -> tuple[Run, bool]:
    """Multiplies g [features, tokens], divided along features, by x [tokens, 8], along tokens.

    Returns the run, and whether its result equals that of torch.
    """
    with FusionDefinition() as fd:
        sizes = [-1, -1] if is_symbolic else [features, tokens]
        g = define(fd, sizes, [Shard(0)])
        x = define(fd, [-1, -1] if is_symbolic else [tokens, 8], [Shard(0)])
        fd.add_output(fd.ops.matmul(g, x))
    whole = [numbers(features, tokens), numbers(tokens, 8)]
    done = run(fd.fusion, whole)
    return done, torch.equal(done.outputs[0], whole[0] @ whole[1])


@pytest.mark.parametrize(
    ("tokens", "features", "expected"),
    [(8, 16, ["Allgather"]), (64, 4, ["AllToAll", "ReduceScatter"])],
)
def test_fewer_elements_are_sent(tokens: int, features: int, expected: list[str]) -> None:
    # A device sends 3/4 tokens * 8 elements in a gather, or else 3/16 tokens * features in an
    # all-to-all and 3/4 features * 8 in a reduce-scatter.
    gathered = tokens * 8
    moved = tokens * features / 4 + features * 8
    assert (gathered <= moved) == (expected == ["Allgather"])
    done, is_right = product(tokens, features)
    assert is_right
    assert kinds(done) == expected


def test_symbolic_extents_are_not_compared() -> None:
    done, is_right = product(8, 16, is_symbolic=True)
    assert is_right
    assert kinds(done) == ["AllToAll", "ReduceScatter"]


def weight_gradient(
    fd: FusionDefinition, x: TensorView, w: TensorView, g: TensorView
) -> tuple[TensorView, TensorView]:
    return fd.ops.linear(x, w), fd.ops.matmul(fd.ops.permute(g, [1, 0]), x)


@pytest.mark.parametrize("is_symbolic", [False, True])
def test_a_weight_gradient_reads_what_the_layer_has_gathered(*, is_symbolic: bool) -> None:
    shapes = [[64, 8], [4, 8], [64, 4]]
    with FusionDefinition() as fd:
        sizes = [[-1, -1] for _ in shapes] if is_symbolic else shapes
        pieces: list[Pieces] = [[Shard(0)], [Shard(0)], [Shard(1)]]
        x, w, g = (define(fd, s, p) for s, p in zip(sizes, pieces, strict=True))
        for result in weight_gradient(fd, x, w, g):
            fd.add_output(result)
    whole = [numbers(*shape) for shape in shapes]
    done = run(fd.fusion, whole)
    assert torch.equal(done.outputs[0], whole[0] @ whole[1].T)
    assert torch.equal(done.outputs[1], whole[2].T @ whole[0])
    assert kinds(done) == ["Allgather"]


def test_parts_along_another_mesh_dimension_stay() -> None:
    """Batches are divided along mesh_y, tokens or features along mesh_x."""
    with FusionDefinition() as fd:
        x = define(fd, [64, 8], [Shard(0), Shard(0)], GRID)
        w = define(fd, [4, 8], [Replicate(), Shard(0)], GRID)
        g = define(fd, [64, 4], [Shard(0), Shard(1)], GRID)
        y, dw = weight_gradient(fd, x, w, g)
        fd.add_output(y)
        fd.add_output(dw)
    whole = [numbers(64, 8), numbers(4, 8), numbers(64, 4)]
    done = run(fd.fusion, whole)
    assert torch.equal(done.outputs[0], whole[0] @ whole[1].T)
    assert torch.equal(done.outputs[1], whole[2].T @ whole[0])
    assert done.collectives == [
        ("Allgather", f"mesh_x of {GRID}"),
        ("Allreduce", f"mesh_y of {GRID}"),
    ]


def test_operands_that_are_divided_alike_are_not_gathered() -> None:
    with FusionDefinition() as fd:
        g, x = define(fd, [16, 8], [Shard(1)]), define(fd, [8, 8], [Shard(0)])
        fd.add_output(shard(fd.ops.matmul(g, x), MESH, [Shard(0)]))
    whole = [numbers(16, 8), numbers(8, 8)]
    done = run(fd.fusion, whole)
    assert torch.equal(done.outputs[0], whole[0] @ whole[1])
    assert kinds(done) == ["ReduceScatter"]


@pytest.mark.parametrize("is_symbolic", [False, True])
def test_a_permuted_tensor_is_not_gathered_again(*, is_symbolic: bool) -> None:
    shapes = [[64, 8], [4, 8], [64, 4]]
    with FusionDefinition() as fd:
        sizes = [[-1, -1] for _ in shapes] if is_symbolic else shapes
        pieces: list[Pieces] = [[Shard(0)], [Shard(0)], [Shard(1)]]
        x, w, u = (define(fd, s, p) for s, p in zip(sizes, pieces, strict=True))
        fd.add_output(fd.ops.linear(x, w))
        fd.add_output(fd.ops.matmul(fd.ops.permute(x, [1, 0]), u))
    whole = [numbers(*shape) for shape in shapes]
    done = run(fd.fusion, whole)
    assert torch.equal(done.outputs[0], whole[0] @ whole[1].T)
    assert torch.equal(done.outputs[1], whole[0].T @ whole[2])
    assert kinds(done) == ["Allgather"]
