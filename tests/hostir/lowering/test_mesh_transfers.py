"""Copies between meshes: expressions of `rank` are right on every rank, and short."""

from __future__ import annotations

import itertools
import random

import torch

from fuser import FusionDefinition, Replicate, Shard, shard
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from hostir.ir.ops import RANK
from hostir.lowering.mesh_transfers import by_rank, is_one_of
from multidevice import DeviceMesh
from tests.support.host_programs import build_for


def value(x: Scalar, rank: int) -> int:
    return int(sc.evaluate(x, {RANK: rank}))


def test_values_by_rank() -> None:
    drawn = random.Random(3)
    for _ in range(200):
        ranks = drawn.sample(range(20), drawn.randint(1, 9))
        values = {rank: drawn.randint(0, 6) for rank in ranks}
        x = by_rank(values)
        assert {rank: value(x, rank) for rank in ranks} == values


def test_ranks_of_a_subset() -> None:
    for others in ((0, 1, 2, 3, 4), (1, 2, 5, 9)):
        for count in range(1, len(others)):
            for ranks in itertools.combinations(others, count):
                x = is_one_of(ranks, others)
                assert [r for r in others if value(x, r)] == [*ranks], (ranks, str(x))


def test_regular_meshes_have_short_expressions() -> None:
    assert str(by_rank({r: r + 512 for r in range(512)})) == "( rank + 512 )"
    assert str(is_one_of([0, 1], range(8))) == "( rank < 2 )"
    assert str(is_one_of([0, 1, 3], range(4))) == "( rank != 2 )"
    many = by_rank({r: 7 * r % 1024 for r in range(1024)})  # deep expressions cannot be evaluated
    assert all(value(many, r) == 7 * r % 1024 for r in (0, 1, 500, 1023))


def copied(source: list[int], target: list[int], cut: int | None) -> str:
    with FusionDefinition() as fd:
        x = fd.define_tensor(
            [8, 6], contiguity=True, mesh=DeviceMesh(source), placements=[Shard(0)]
        )
        y = fd.ops.set(x)
        shard(y, DeviceMesh(target), [Replicate() if cut is None else Shard(cut)])
        fd.add_output(y)
    return build_for(fd.fusion, [torch.zeros(8, 6)]).names_text()


def lines(text: str, *words: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if any(word in line for word in words)]


def test_the_program_of_a_handover() -> None:
    text = copied([0, 1], [2, 3], 0)
    assert lines(text, "P2P", "Coalescing", "Wait", "IF") == [
        "StartCoalescing",
        "P2PCommunication 0 (type=send, buffer=T0, peer=( rank + 2 ), backend=SIMULATED)",
        "P2PCommunication 1 (type=recv, buffer=T1, peer=( rank - 2 ), backend=SIMULATED)",
        "EndCoalescing 2",
        "Wait(Communication 2)",
    ]


def test_a_rank_of_both_meshes_copies_what_it_has() -> None:
    text = copied([0, 1], [1, 2], None)
    assert lines(text, "IF", "P2P", "Set(") == [
        "IF Manual ( rank == 1 ):",
        "T5 = Set( T4 )",
        "P2PCommunication 0 (type=send, buffer=T2, peer=( rank + 1 ), backend=SIMULATED)",
        "IF Manual ( rank == 0 ):",
        "P2PCommunication 1 (type=send, buffer=T2, peer=2, backend=SIMULATED)",
        "P2PCommunication 2 (type=recv, buffer=T6, peer=0, backend=SIMULATED)",
        "IF Manual ( rank == 2 ):",
        "P2PCommunication 3 (type=recv, buffer=T5, peer=1, backend=SIMULATED)",
    ]
