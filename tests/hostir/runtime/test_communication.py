"""Tests the data of every communication type, for contiguous and permuted shards."""

from __future__ import annotations

import pytest
import torch

from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion
from fuser.ir.scalar.constructors import const
from fuser.ir.types import ParallelType
from fuser.support.errors import CommunicationError
from hostir.ir.ops import AxisOrder, Communication
from hostir.runtime.communication import CommunicationCall, flat, post
from multidevice import Communicator, simulate
from multidevice.sharding.reshard import TeamOf
from multidevice.transports.base.collectives import COLLECTIVES
from multidevice.transports.base.protocol import Backend, RedOp
from tests.support.collective_meanings import MEANINGS

N, PART = 3, 4


def _communication(kind: str, red_op: RedOp = "SUM") -> Communication:
    fusion, mesh = Fusion(), DeviceMesh(range(N))
    axes = [fusion.new_axis(fusion.new_extent())]
    inp, out = (fusion.new_tensor(axes, DataType.Float, mesh=mesh) for _ in range(2))
    op = Communication(
        inp,
        out,
        number=0,
        type=kind,
        team=TeamOf(mesh, (ParallelType.mesh_x,)),
        root=const(1) if COLLECTIVES[kind].is_rooted else None,
        red_op=red_op if COLLECTIVES[kind].reduces else "SUM",
        backend="SIMULATED",
    )
    op.verify()
    return op


def _call(
    op: Communication, rank: int, team: tuple[int, ...], backend: Backend
) -> CommunicationCall:
    return CommunicationCall(op, rank, team, backend, -1 if op.root is None else team[1])


def _inputs() -> list[torch.Tensor]:
    return [torch.arange(N * PART, dtype=torch.float32) * (r + 1) - 5 * r for r in range(N)]


def _expected(kind: str, rank: int) -> torch.Tensor | None:
    """Returns the data that a rank receives if every rank passes its input, or its first part."""
    operands = [x[:PART] if COLLECTIVES[kind].growth > 0 else x for x in _inputs()]
    return MEANINGS[kind].results(operands, 1)[rank]


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_every_type_moves_what_its_name_says(kind: str) -> None:
    op = _communication(kind)

    def body() -> torch.Tensor | None:
        rank = Communicator.instance().rank()
        want = _expected(kind, rank)
        inp: torch.Tensor | None = _inputs()[rank]
        if COLLECTIVES[kind].growth > 0:
            inp = inp[:PART]
        if COLLECTIVES[kind].inp.at_root and rank != 1:
            inp = None
        out = None if want is None else torch.full_like(want, -1)
        backend = Communicator.instance().backend_for("cpu")
        post(_call(op, rank, op.team.ranks(rank), backend), inp, out).wait()
        return out

    with simulate(N) as world:
        for rank, got in enumerate(world.run(body)):
            want = _expected(kind, rank)
            assert (got is None) == (want is None)
            if got is not None and want is not None:
                assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("red_op", "torch_op"),
    [("SUM", "sum"), ("PRODUCT", "prod"), ("MIN", "amin"), ("MAX", "amax")],
)
def test_reductions(red_op: RedOp, torch_op: str) -> None:
    op = _communication("Allreduce", red_op)

    def body() -> torch.Tensor:
        rank = Communicator.instance().rank()
        out = torch.empty(N * PART)
        backend = Communicator.instance().backend_for("cpu")
        post(_call(op, rank, op.team.ranks(rank), backend), _inputs()[rank], out).wait()
        return out

    want = getattr(torch.stack(_inputs()), torch_op)(0)
    with simulate(N) as world:
        assert all(torch.equal(got, want) for got in world.run(body))


def test_permuted_shards_are_sent_in_their_declared_order() -> None:
    op = _communication("Allreduce")
    x = torch.randn(2, 3, 4).permute(2, 0, 1)
    sent = flat(op, op.inp, x, AxisOrder((1, 2, 0), ()))
    assert sent.data_ptr() == x.data_ptr()
    assert sent.is_contiguous()


def test_an_expanded_axis_is_sent_once() -> None:
    op = _communication("Allreduce")
    x = torch.randn(2, 1, 4).expand(2, 5, 4)
    assert torch.equal(flat(op, op.inp, x, AxisOrder(None, (1,))), x[:, :1])


@pytest.mark.parametrize(
    "x", [torch.zeros(4, 6)[:, :3], torch.zeros(3, 4).t(), torch.zeros(4, 1).expand(4, 3)]
)
def test_a_shard_that_is_not_dense_in_its_order_is_refused(x: torch.Tensor) -> None:
    """Sent in its memory order, the shard would arrive as other numbers."""
    op = _communication("Allreduce")
    backend = Communicator.instance().backend_for("cpu")
    for inp, out in ((x, torch.zeros(4, 3)), (torch.zeros(4, 3), x)):
        with pytest.raises(CommunicationError, match=r"shape \(4, 3\) and strides"):
            post(_call(op, 0, (0,), backend), inp, out)
