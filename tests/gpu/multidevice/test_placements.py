"""Plans of communications on ranks that share a GPU; if each rank has one, they run over NCCL.

Moves between meshes, partial sums that go into other placements, uneven shards, and lookups along
divided axes. Values are integers, so results are exact in any order of addition.

mpirun -np 4 python -m pytest --with-mpi tests/gpu/multidevice/test_placements.py
"""

from __future__ import annotations

import math
import random

import pytest
import torch

from fuser import DataType, FusionDefinition, Replicate, Shard, multidevice, shard
from multidevice import Communicator
from tests.multidevice.sharding import test_mesh_transfer as transfers
from tests.multidevice.sharding.passes import test_partial_sums_to_placements as sums
from tests.support import placement_pairs
from tests.support.lookup_programs import draw_index

pytestmark = [
    pytest.mark.mpi(min_size=4),
    pytest.mark.filterwarnings("ignore:ranks .* share the GPU"),
    pytest.mark.parametrize("options", [[], ["peer_copies"]]),
]


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-20, 20, shape, generator=torch.Generator().manual_seed(1)).float()


def test_copies_between_meshes(options: list[str], comm: Communicator) -> None:
    whole, rank, drawn = integers(*transfers.SHAPE), comm.rank(), random.Random(8)
    for source in drawn.sample(transfers.PLACES, 8):
        targets = drawn.sample(transfers.others(source), 6)
        fd = transfers.copies(source, targets, transfers.SHAPE)
        given = transfers.shard(whole, source, rank).contiguous().cuda()
        outs = fd.execute([given], _enable_options=options)
        for target, out in zip(targets, outs, strict=True):
            has = target[0].has(rank)
            want = transfers.shard(whole, target, rank) if has else torch.empty(0)
            assert torch.equal(out.cpu(), want), (source, target)


@pytest.mark.parametrize("mesh", ["4", "2x2"])
def test_partial_sums(mesh: str, options: list[str], comm: Communicator) -> None:
    partial = [pair for pair in sums.pairs(2, mesh) if pair[0][-1]]
    devices, rank = sums.GRIDS[mesh][0], comm.rank()
    whole = integers(*sums.EXTENTS[:3])
    for source, target in random.Random(9).sample(partial, min(16, len(partial))):
        fd = sums.program(source, target, mesh)
        given = placement_pairs.shard(whole, source, devices, rank).cuda()
        (out,) = fd.execute([given], _enable_options=options)
        want = placement_pairs.shard(whole.double().sum(-1).float(), target, devices, rank)
        assert torch.equal(out.cpu(), want), (source, target)


@pytest.mark.parametrize("rows", [3, 5, 7])
@pytest.mark.parametrize("is_symbolic", [False, True])
def test_uneven_shards(
    rows: int, options: list[str], comm: Communicator, *, is_symbolic: bool
) -> None:
    x, w = integers(rows, 6), integers(9, 6)
    mesh = multidevice.DeviceMesh(range(4))
    with FusionDefinition() as fd:
        a, b = (
            fd.define_tensor(
                [-1, -1] if is_symbolic else [*t.shape],
                contiguity=True,
                dtype=DataType.Float,
                mesh=mesh,
                placements=[Shard(0)],
            )
            for t in (x, w)
        )
        y = fd.ops.linear(a, b)
        fd.add_output(shard(fd.ops.neg(y), mesh, [Shard(1)]))
        fd.add_output(shard(fd.ops.sum(y, [0]), mesh, [Shard(0)]))
        fd.add_output(fd.ops.max(a, [0]))
    want = x.double() @ w.double().T

    def part(whole: torch.Tensor, axis: int) -> torch.Tensor:
        step = math.ceil(whole.shape[axis] / 4)
        blocks = whole.split(step, axis)
        own = blocks[comm.rank()] if comm.rank() < len(blocks) else whole.narrow(axis, 0, 0)
        return own.float()

    shards = [multidevice.shard_tensor(t.cuda(), tv) for t, tv in ((x, a), (w, b))]
    for _ in range(2):
        outs = fd.execute(shards, _enable_options=options)
        for out, expected in zip(
            outs, (part(-want, 1), part(want.sum(0), 0), x.amax(0)), strict=True
        ):
            assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("result", [Replicate(), Shard(0)])
def test_lookups_along_a_divided_axis(
    result: object, options: list[str], comm: Communicator
) -> None:
    table, index = integers(16, 8), draw_index((12,), 16)
    mesh = multidevice.DeviceMesh(range(4))
    with FusionDefinition() as fd:
        t, i = (
            fd.define_tensor(
                [*x.shape], contiguity=True, dtype=dtype, mesh=mesh, placements=[placed]
            )
            for x, dtype, placed in (
                (table, DataType.Float, Shard(0)),
                (index, DataType.Int, Replicate()),
            )
        )
        fd.add_output(out := shard(fd.ops.embedding_fwd(i, t), mesh, [result]))
    given = [multidevice.shard_tensor(x.cuda(), tv) for x, tv in ((table, t), (index, i))]
    (found,) = fd.execute(given, _enable_options=options)
    assert torch.equal(found.cpu(), multidevice.shard_tensor(table[index], out))
