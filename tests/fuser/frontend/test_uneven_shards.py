"""Calls on shards of symbolic extents that no number of ranks divides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fuser import DataType, FusionDefinition, Replicate, Shard, multidevice, shard
from fuser.support.errors import InputError, ShardingError

ROWS, WHOLE = Shard(0), Replicate()


def chunk(whole: torch.Tensor, parts: int, index: int) -> torch.Tensor:
    blocks = whole.chunk(parts)
    return blocks[index] if index < len(blocks) else whole.narrow(0, 0, 0)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(ranks: Sequence[int]) -> FusionDefinition:
    """Defines: rows of x on different ranks; a linear layer, and sums over its rows."""
    mesh = multidevice.DeviceMesh(ranks)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], dtype=DataType.Double, mesh=mesh, placements=[ROWS])
        w = fd.define_tensor([-1, -1], dtype=DataType.Double, mesh=mesh, placements=[WHOLE])
        y = fd.ops.linear(x, w)
        fd.add_output(y)
        fd.add_output(fd.ops.sum(fd.ops.exp(y), [0]))
        fd.add_output(shard(fd.ops.neg(y), mesh, [WHOLE]))
    return fd


def check(fd: FusionDefinition, rows: int, ranks: int) -> None:
    rank = multidevice.Communicator.instance().rank()
    x, w = randn(rows, 4, seed=rows), randn(3, 4)
    y, total, whole = fd.execute([chunk(x, ranks, rank), w])
    torch.testing.assert_close(y, chunk(x @ w.T, ranks, rank))
    torch.testing.assert_close(total, (x @ w.T).exp().sum(0))
    torch.testing.assert_close(whole, -(x @ w.T))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_extents_change_between_divisible_and_not(ranks: int) -> None:
    """Rank 0 passes 4 rows of 7 and of 8 over 2 ranks, and must see that rank 1 changed."""

    def body() -> None:
        fd = layer(range(ranks))
        for rows in (8, 7, 8, 7, 7, 6, 5, 12, 5, 11, 8):
            check(fd, rows, ranks)

    with multidevice.simulate(ranks) as world:
        world.run(body)


@pytest.mark.mpi(min_size=4)
def test_extents_change_on_real_ranks(comm: object) -> None:
    fd = layer([0, 1, 2, 3])
    for rows in (8, 7, 7, 8, 5, 5, 12):
        check(fd, rows, 4)


def exchanges(run: Callable[[], None]) -> int:
    """Returns how often this rank exchanges descriptions with others during `run`."""
    control = multidevice.Communicator.instance().channel((0, 1))._control  # pyright: ignore
    exchange, count = control.exchange, [0]

    def counting(*args: Any, **named: Any) -> Any:
        count[0] += 1
        return exchange(*args, **named)

    control.exchange = counting
    try:
        run()
    finally:
        del control.exchange
    return count[0]


def test_repeated_calls_need_no_exchange() -> None:
    """Also if the extents are uneven: ranks announce the extents of the last such call."""

    def body() -> None:
        fd = layer([0, 1])
        for rows in (8, 7):
            for _ in range(2):
                check(fd, rows, 2)
            assert exchanges(lambda n=rows: check(fd, n, 2)) == 0
        assert exchanges(lambda: check(fd, 8, 2)) > 0

    with multidevice.simulate(2) as world:
        world.run(body)


def test_a_result_that_no_input_shares_is_cut_unevenly() -> None:
    def body() -> None:
        rank = multidevice.Communicator.instance().rank()
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, 3], dtype=DataType.Double, mesh=[0, 1], placements=[ROWS])
            y = fd.define_tensor([3, -1], dtype=DataType.Double)
            z = shard(fd.ops.permute(y, [1, 0]), [0, 1], [ROWS])
            fd.add_output(fd.ops.sum(x, [0]))
            fd.add_output(z)
        for rows in (6, 7):
            a, b = randn(rows, 3), randn(3, 5, seed=1)
            total, part = fd.execute([chunk(a, 2, rank), b])
            torch.testing.assert_close(total, a.sum(0))
            torch.testing.assert_close(part, chunk(b.T, 2, rank).contiguous())

    with multidevice.simulate(2) as world:
        world.run(body)


@pytest.mark.parametrize(
    ("sizes", "kind", "words"),
    [
        (
            (3, 4),
            InputError,
            r"unequal extents along axis 0: 3 on rank 0, 4 on rank 1. 2 ranks div",
        ),
        ((5, 3), InputError, r"5 on rank 0, 3 on rank 1"),
        ((1, 0), ShardingError, "has one element"),
    ],
)
def test_shards_that_are_no_blocks_are_refused(
    sizes: tuple[int, int], kind: type, words: str
) -> None:
    def body() -> None:
        rank = multidevice.Communicator.instance().rank()
        fd = layer([0, 1])
        with pytest.raises(kind, match=words):
            fd.execute([torch.ones(sizes[rank], 4, dtype=torch.float64), randn(3, 4)])
        check(fd, 7, 2)

    with multidevice.simulate(2) as world:
        world.run(body)


def test_a_whole_input_must_still_be_equal_on_all_ranks() -> None:
    def body() -> None:
        rank = multidevice.Communicator.instance().rank()
        fd = layer([0, 1])
        with pytest.raises(InputError, match="an input that no device axis cuts must be equal"):
            fd.execute([chunk(randn(7, 4), 2, rank), randn(3 + rank, 4)])
        check(fd, 7, 2)

    with multidevice.simulate(2) as world:
        world.run(body)


def test_an_error_for_equal_extents_is_still_raised_on_all_ranks() -> None:
    def body() -> None:
        fd = layer([0, 1])
        with pytest.raises(InputError, match="i1"):
            fd.execute([randn(4, 4), randn(3, 5)])
        check(fd, 7, 2)

    with multidevice.simulate(2) as world:
        world.run(body)
