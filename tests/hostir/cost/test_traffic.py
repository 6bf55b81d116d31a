"""The bytes of each communication, and the mesh dimensions along which it moves them, by hand."""

from __future__ import annotations

import re

import pytest
import torch

from fuser import ParallelType
from fuser.ir.fusion import TensorView
from hostir import (
    RANK,
    Allocate,
    CollectivePermute,
    Communication,
    HostIrContainer,
    P2PCommunication,
    TeamOf,
    Wait,
    eq,
    ne,
)
from hostir.cost.report import CommunicationCost, report
from multidevice import DeviceMesh
from tests.hostir.runtime.test_steps_symmetric_views import Parts, double
from tests.support.predicted_times import predicted

X, Y = ParallelType.mesh_x, ParallelType.mesh_y
GRID = DeviceMesh(torch.arange(6).reshape(2, 3))


def rows(program: HostIrContainer, number: int = 0) -> tuple[CommunicationCost, ...]:
    return predicted(program).classes[number].communications


def numbers(one: CommunicationCost) -> tuple[str, int, int, int, int]:
    return one.along, one.members, one.times, one.sent_nbytes, one.received_nbytes


def cut(tv: TensorView, ptype: ParallelType) -> TensorView:
    tv.axis(0).parallelize(ptype)
    return tv


def grid_program() -> HostIrContainer:
    """1000 bytes of each rank: an allgather along each dimension, and an allreduce along both."""
    hic = HostIrContainer()
    with hic:
        for number, (count, ptype) in enumerate(((2, Y), (3, X))):
            x, y = (
                cut(hic.input([count, 250], mesh=GRID), ptype),
                hic.tensor([count, 250], mesh=GRID),
            )
            team = TeamOf(GRID, (ptype,))
            hic.append(Allocate(y), Communication(x, y, number=number, type="Allgather", team=team))
            hic.append(Wait(number))
            hic.add_output(y)
        x, y = hic.input([250], mesh=GRID), hic.tensor([250], mesh=GRID)
        both = Communication(x, y, number=2, type="Allreduce", team=TeamOf(GRID, (Y, X)))
        hic.append(Allocate(y), both, Wait(2))
        hic.add_output(y)
    return hic


def test_each_collective_has_the_dimension_of_its_team() -> None:
    found = predicted(grid_program())
    (one,) = found.classes
    assert [numbers(row) for row in one.communications] == [
        ("mesh_y", 2, 1, 1000, 1000),
        ("mesh_x", 3, 1, 2000, 2000),
        ("mesh_y mesh_x", 6, 1, 1667, 1667),
    ]
    assert one.sent_along == {"mesh_y": 1000, "mesh_x": 2000, "mesh_y mesh_x": 1667}
    assert one.sent_nbytes == 4667
    text = report(found)
    assert "  sent along mesh_y: 1.000 kB\n  sent along mesh_x: 2.000 kB\n" in text
    assert re.search(r"1 x  2 ranks along mesh_y, line 4 \(\S+\): Communication 0 \(type=All", text)


def ring(ptype: ParallelType, count: int) -> HostIrContainer:
    """Each rank receives the parts of its team, of 1000 bytes, its own first."""
    team = TeamOf(GRID, (ptype,))
    here = RANK % 3 if ptype is X else RANK // 3
    hic = HostIrContainer()
    with hic:
        x = cut(hic.input([count, 250], mesh=GRID), ptype)
        y = hic.tensor([count, 250], mesh=GRID)
        hic.append(Allocate(y))
        own = hic.select(x, 0, here)
        with hic.loop(count) as i:
            to, source = (here - i + count) % count, (here + i) % count
            part = hic.select(y, 0, source)
            hic.append(CollectivePermute(own, part, to, source, number=0, team=team), Wait(0))
        hic.add_output(y)
    return hic


def test_the_steps_of_a_ring_are_one_row() -> None:
    assert [numbers(row) for row in rows(ring(X, 3))] == [("mesh_x", 3, 3, 2000, 2000)]
    assert [numbers(row) for row in rows(ring(Y, 2))] == [("mesh_y", 2, 2, 1000, 1000)]


def send_on(mesh: DeviceMesh, other: DeviceMesh, distance: int, backend: str) -> HostIrContainer:
    """Ranks of `mesh` send 1000 bytes each to ranks of `other`, `distance` further on."""
    hic = HostIrContainer()
    with hic:
        x, y = hic.input([250], mesh=mesh), hic.tensor([250], mesh=other)
        hic.append(Allocate(y))
        with hic.branch(ne(RANK // distance, 1)):
            to = RANK + distance
            hic.append(P2PCommunication(x, to, number=0, type="send", backend=backend), Wait(0))
        with hic.branch(eq(RANK // distance, 1)):
            source = RANK - distance
            hic.append(P2PCommunication(y, source, number=1, type="recv", backend=backend), Wait(1))
        hic.add_output(y)
    return hic


@pytest.mark.parametrize("backend", ["NCCL", "CUDA"])
def test_a_send_has_the_dimension_in_which_its_ends_differ(backend: str) -> None:
    down = predicted(send_on(GRID, GRID, 3, backend)).classes
    assert [(one.ranks, *map(numbers, one.communications)) for one in down] == [
        ((0, 1, 2), ("mesh_y", 2, 1, 1000, 0)),
        ((3, 4, 5), ("mesh_y", 2, 1, 0, 1000)),
    ]
    for one in down:
        (row,) = one.communications
        assert row.seconds == pytest.approx(1000 / 1e8) and "send" in row.op
    stages = DeviceMesh([0, 1]), DeviceMesh([2, 3])
    first, second = predicted(send_on(*stages, 2, backend)).classes
    assert [*map(numbers, first.communications)] == [("between meshes", 2, 1, 1000, 0)]
    assert second.sent_along == {"between meshes": 0} and second.received_nbytes == 1000


def test_a_kernel_that_reads_other_ranks_memory_is_a_row() -> None:
    parts = Parts(4)
    program = parts.made(*parts.head, parts.shows, double(parts.y, parts.view), *parts.tail)
    (row,) = rows(program)
    assert numbers(row) == ("mesh_x", 4, 1, 3 * 4096, 3 * 4096)
    # It reads all shards of the view, and writes as much.
    assert row.seconds == pytest.approx(3 * 4096 / 1e8 + 8 * 4096 / 1e9)
