"""What allreduces take that are one kernel of ours, and which ones the model takes for such."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from fuser import DataType, ParallelType
from hostir import Allocate, Communication, HostIrContainer, TeamOf, Wait
from hostir.machine import H200, machine_from_json
from hostir.op_costs import BUS, collective_cost
from hostir.timetable import timetable_of
from hostir.transfers import PEER_COPIES
from multidevice import DeviceMesh

BF16 = DataType.BFloat16
KB, MB = 1 << 10, 1 << 20
# Bytes and microseconds in a CUDA graph, bfloat16; of four ranks only sizes that go in two shots.
MEASURED: Mapping[int, Mapping[int, float]] = {
    2: {
        1 * KB: 2.36,
        16 * KB: 2.99,
        64 * KB: 3.33,
        256 * KB: 5.05,
        1 * MB: 8.65,
        1376256: 10.31,
        2 * MB: 13.20,
    },
    4: {512 * KB: 13.83, 1 * MB: 16.52, 1376256: 18.91, 2 * MB: 22.40},
}


@pytest.mark.parametrize(
    ("ranks", "nbytes", "us"),
    [(d, nbytes, us) for d, rows in MEASURED.items() for nbytes, us in rows.items()],
)
def test_small_allreduces_take_what_was_measured(ranks: int, nbytes: int, us: float) -> None:
    found = collective_cost("Allreduce", ranks, nbytes, "NCCL", H200, dtype=BF16)
    assert found.seconds * 1e6 == pytest.approx(us, rel=0.15)
    # At most 32 blocks: most multiprocessors are left to others.
    assert 1 / 132 <= found.share <= 32 / 132


def test_without_nccl_larger_ones_are_kernels_too() -> None:
    found = collective_cost("Allreduce", 4, 4 * MB, PEER_COPIES, H200, dtype=BF16)
    assert found.seconds * 1e6 == pytest.approx(32.36, rel=0.15)
    beside = collective_cost("Allreduce", 4, 4 * MB, "NCCL", H200, dtype=BF16)
    assert beside.seconds * 1e6 == pytest.approx(44.18, rel=0.15)


def is_kernel(
    ranks: int,
    nbytes: int,
    backend: str = "NCCL",
    *,
    kind: str = "Allreduce",
    dtype: DataType = BF16,
) -> bool:
    """Whether the time of a kernel matters."""
    slow = replace(H200, allreduce_kernel_s=dict.fromkeys(H200.allreduce_kernel_s, 1.0))
    return collective_cost(kind, ranks, nbytes, backend, slow, dtype=dtype).seconds >= 1


def test_what_is_a_kernel() -> None:
    assert is_kernel(2, 1) and is_kernel(8, 2 * MB)
    assert not is_kernel(2, 0) and not is_kernel(2, 2 * MB + 2)
    assert is_kernel(2, 8 * MB, PEER_COPIES) and not is_kernel(2, 8 * MB + 2, PEER_COPIES)
    assert not is_kernel(9, KB)
    assert is_kernel(2, KB, dtype=DataType.Double) and not is_kernel(2, KB, dtype=DataType.Bool)
    assert not any(is_kernel(2, KB, kind=kind) for kind in BUS if kind != "Allreduce")


def test_none_is_where_they_are_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSER_DISABLE", "allreduce_kernel")
    assert not is_kernel(2, KB)


def seconds_of(nbytes: int, *, red_op: str = "SUM") -> float:
    """What the model says of a program of one allreduce."""
    mesh, program = DeviceMesh(range(2)), HostIrContainer()
    with program:
        x = program.input([2, nbytes // 4], mesh=mesh)
        x.axis(0).parallelize(ParallelType.mesh_x)
        y = program.tensor([nbytes // 4], mesh=mesh)
        team = TeamOf(mesh, (ParallelType.mesh_x,))
        program.append(
            Allocate(y),
            Communication(x, y, number=0, type="Allreduce", team=team, red_op=red_op),  # pyright: ignore[reportArgumentType]
            Wait(0),
        )
        program.add_output(y)
    return max(w.end for w in timetable_of(program, {}, H200).work)


def test_programs_are_charged_for_the_kernel() -> None:
    for red_op in ("SUM", "MAX"):
        assert seconds_of(64 * KB, red_op=red_op) * 1e6 == pytest.approx(3.33, rel=0.15)
    assert seconds_of(4 * MB) > 14e-6


def test_a_description_may_have_some_of_the_ways() -> None:
    found = machine_from_json('{"allreduce_kernel_s": {"PACKETS": 5e-6}}')
    assert found.allreduce_kernel_s == {**H200.allreduce_kernel_s, "PACKETS": 5e-6}
    with pytest.raises(Exception, match="allreduce_kernel_s has no 'ONE': expected one of PACKETS"):
        machine_from_json('{"allreduce_kernel_s": {"ONE": 5e-6}}')
