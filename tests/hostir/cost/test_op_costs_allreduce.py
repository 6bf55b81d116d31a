"""The predicted time of allreduces that are one kernel, and the allreduces that the model takes for
such."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from fuser import DataType, ParallelType
from hostir import Allocate, Communication, HostIrContainer, TeamOf, Wait
from hostir.cost.machine_model import H200, machine_from_json
from hostir.cost.op_costs import collective_cost
from hostir.cost.simulator import simulated_schedule
from hostir.ir.ops import PEER_COPIES
from multidevice import DeviceMesh
from multidevice.transports.base.collectives import ALLREDUCE, COLLECTIVES, Collective

BF16 = DataType.BFloat16
KB, MB = 1 << 10, 1 << 20
# Bytes and microseconds in a CUDA graph, bfloat16.
MEASURED: Mapping[int, Mapping[int, float]] = {
    2: {
        16 * KB: 2.99,
        64 * KB: 3.22,
        256 * KB: 3.81,
        512 * KB: 4.62,
        1376256: 8.03,
        2 * MB: 10.0,
        4 * MB: 15.86,
    },
    4: {
        16 * KB: 3.44,
        64 * KB: 3.87,
        256 * KB: 5.68,
        512 * KB: 6.96,
        1376256: 9.89,
        2 * MB: 13.44,
        4 * MB: 24.63,
    },
}


@pytest.mark.parametrize(
    ("ranks", "nbytes", "us"),
    [(d, nbytes, us) for d, rows in MEASURED.items() for nbytes, us in rows.items()],
)
def test_small_allreduces_take_what_was_measured(ranks: int, nbytes: int, us: float) -> None:
    found = collective_cost(ALLREDUCE, ranks, nbytes, "NCCL", H200, dtype=BF16)
    assert found.seconds * 1e6 == pytest.approx(us, rel=0.15)
    # At most 64 blocks: half of the multiprocessors are left to others.
    assert 1 / 132 <= found.share <= 64 / 132


def test_without_nccl_larger_ones_are_kernels_too() -> None:
    assert collective_cost(ALLREDUCE, 4, 8 * MB, PEER_COPIES, H200, dtype=BF16).share > 0
    found = collective_cost(ALLREDUCE, 4, 4 * MB, PEER_COPIES, H200, dtype=DataType.Int32)
    assert found.seconds * 1e6 == pytest.approx(31.7, rel=0.15)


def is_kernel(
    ranks: int,
    nbytes: int,
    backend: str = "NCCL",
    *,
    row: Collective = ALLREDUCE,
    dtype: DataType = BF16,
) -> bool:
    """Whether the time of a kernel matters."""
    slow = replace(H200, allreduce_kernel_s=dict.fromkeys(H200.allreduce_kernel_s, 1.0))
    return collective_cost(row, ranks, nbytes, backend, slow, dtype=dtype).seconds >= 1


def test_what_is_a_kernel() -> None:
    assert is_kernel(2, 1) and is_kernel(8, 8 * MB)
    assert not is_kernel(2, 0) and not is_kernel(2, 8 * MB + 2)
    assert is_kernel(2, 8 * MB, PEER_COPIES) and not is_kernel(2, 8 * MB + 2, PEER_COPIES)
    assert not is_kernel(9, KB)
    assert is_kernel(2, KB, dtype=DataType.Double) and not is_kernel(2, KB, dtype=DataType.Bool)
    assert not any(
        is_kernel(2, KB, row=row) for row in COLLECTIVES.values() if row is not ALLREDUCE
    )


def test_none_is_where_they_are_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSER_DISABLE", "allreduce_kernel")
    assert not is_kernel(2, KB)


def seconds_of(nbytes: int, *, red_op: str = "SUM") -> float:
    """Returns the predicted time of a program of one allreduce."""
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
    return max(w.end for w in simulated_schedule(program, {}, H200).work)


def test_programs_are_charged_for_the_kernel() -> None:
    for red_op in ("SUM", "MAX"):
        assert seconds_of(64 * KB, red_op=red_op) * 1e6 == pytest.approx(3.22, rel=0.15)
    assert seconds_of(16 * MB) > 14e-6


def test_a_description_may_have_some_of_the_ways() -> None:
    found = machine_from_json('{"allreduce_kernel_s": {"PACKETS": 5e-6}}')
    assert found.allreduce_kernel_s == {**H200.allreduce_kernel_s, "PACKETS": 5e-6}
    with pytest.raises(
        Exception, match=r"allreduce_kernel_s .* entry 'ONE': its entries are PACKETS"
    ):
        machine_from_json('{"allreduce_kernel_s": {"ONE": 5e-6}}')
