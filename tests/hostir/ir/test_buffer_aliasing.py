"""An op over its own operands: what would be wrong is refused, what is right stays and is right."""

# Host programs by hand take plain numbers where a Scalar is declared.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fuser import ops
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.ops import nodes
from fuser.ir.scalar.constructors import as_scalar
from fuser.ir.types import ParallelType
from fuser.ops.define import define_tensor
from fuser.support.errors import VerifyError
from hostir import (
    RANK,
    Allocate,
    CollectivePermute,
    Communication,
    HostIrContainer,
    PostOnStream,
    TeamOf,
    Wait,
)
from hostir.analysis.preflight import check_before_run
from hostir.ir.ops import NUMBER_OF_STREAMS
from hostir.ir.verifier import verify
from hostir.tools.run_text import run_simulated
from multidevice import DeviceMesh

MESH = DeviceMesh([0, 1])
TEAM = TeamOf(MESH, (ParallelType.mesh_x,))
# Makes a program that puts its result into a copy `y` of its input.
Body = Callable[[HostIrContainer, TensorView], object]


def _program(body: Body, *shape: int, ranks: int = 1) -> HostIrContainer:
    hic = HostIrContainer()
    with hic:
        mesh = MESH if ranks > 1 else None
        x, y = hic.input(shape, mesh=mesh), hic.tensor(shape, mesh=mesh)
        hic.append(Allocate(y), nodes.LoadStoreOp(y, x))
        body(hic, y)
        hic.add_output(y)
    return hic


def _add(out: TensorView, a: TensorView, b: TensorView) -> nodes.BinaryOp:
    return nodes.BinaryOp(out, a, b, kind="add")


def _collective(kind: str, inp: TensorView, out: TensorView) -> tuple[Communication, Wait]:
    return Communication(inp, out, number=0, type=kind, team=TEAM), Wait(0)


def _into_a_row(hic: HostIrContainer, y: TensorView) -> None:
    a, b = hic.select(y, 0, 0), hic.select(y, 0, 1)
    hic.append(nodes.MatmulOp(b, a, y))


def _permuted(hic: HostIrContainer, y: TensorView) -> None:
    t = ops.permute(y, [1, 0])
    hic.append(t, nodes.LoadStoreOp(y, t))


def _both_results(hic: HostIrContainer, y: TensorView) -> None:
    fusion = Fusion()
    with FusionGuard(fusion):
        a = define_tensor([-1, -1], contiguity=True)
        fusion.add_input(a)
        fusion.add_output(ops.add(a, 1.0))
        fusion.add_output(ops.mul(a, 2.0))
    hic.append(PostOnStream((y,), (y, y), unit=hic.unit(fusion)))


def _permute(hic: HostIrContainer, y: TensorView) -> None:
    other = 1 - RANK
    hic.append(CollectivePermute(y, y, other, other, number=0, team=TEAM), Wait(0))


def _gather_slot(slot: object) -> Body:
    def body(hic: HostIrContainer, y: TensorView) -> None:
        hic.append(*_collective("Allgather", hic.select(y, 0, slot), y))

    return body


WRONG: dict[str, tuple[Body, int, str]] = {
    "matmul into its operand": (
        lambda hic, y: hic.append(nodes.MatmulOp(y, y, y)),
        1,
        r"T1_g_float is both read and written: the result of matmul needs a buffer that no",
    ),
    "matmul into a row of its operand": (
        _into_a_row,
        1,
        r"T3_g_float overwrites the operand T1_g_float(.|\n)*reads T1_g_float and writes T1_g_flo",
    ),
    "a copy of the transposed": (
        _permuted,
        1,
        r"operand T2_g_float: the result of set may share a buffer with an operand only if both",
    ),
    "two results in one buffer": (
        _both_results,
        1,
        r"T1_g_float is given for two results of the op: each result needs a separate buffer",
    ),
    "an exchange": (
        lambda hic, y: hic.append(*_collective("AllToAll", y, y)),
        2,
        r"result of Communication 0 \(AllToAll\) needs a buffer that no operand uses",
    ),
    "a permutation": (
        _permute,
        2,
        "result of CollectivePermute 0 needs a buffer that no operand uses",
    ),
    "a gather at the wrong slot": (
        _gather_slot(0),
        2,
        "over operand: .*only where the operand is this rank's block of the result",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_would_read_its_own_result_is_refused(name: str) -> None:
    body, ranks, text = WRONG[name]
    hic = _program(body, 4 if ranks == 1 else 2, 4, ranks=ranks)
    with pytest.raises(VerifyError, match=text):
        verify(hic)
        check_before_run(hic, {RANK: 1, NUMBER_OF_STREAMS: 4}, rank=ranks - 1)


def test_elementwise_ops_update_in_place() -> None:
    def body(hic: HostIrContainer, y: TensorView) -> None:
        hic.append(_add(y, y, y))
        with hic.loop(3) as i:
            row = hic.select(y, 0, i + 1)
            hic.append(_add(row, row, hic.select(y, 0, i)))

    x = torch.arange(16.0).reshape(4, 4)
    ((got,),) = run_simulated(_program(body, 4, 4), [x], ranks=1)
    assert torch.equal(got, (2 * x).cumsum(0))


def test_a_reduction_takes_one_rows_place() -> None:
    """A result that is computed before it is written may use any memory."""

    def body(hic: HostIrContainer, y: TensorView) -> None:
        total = ops.sum(y, [0])
        first = hic.select(y, 0, 0)
        hic.append(total, nodes.LoadStoreOp(first, total))
        hic.append(_add(first, first, hic.select(y, 0, 1)))

    x = torch.arange(16.0).reshape(4, 4)
    ((got,),) = run_simulated(_program(body, 4, 4), [x], ranks=1)
    assert torch.equal(got, torch.stack([x.sum(0) + x[1], *x[1:]]))


def test_collectives_in_place() -> None:
    def body(hic: HostIrContainer, y: TensorView) -> None:
        hic.append(*_collective("Allreduce", y, y))
        mine = hic.select(y, 0, RANK)
        hic.append(nodes.BinaryOp(mine, mine, as_scalar(1.0) + RANK, kind="mul"))
        hic.append(Communication(mine, y, number=1, type="Allgather", team=TEAM), Wait(1))

    x = torch.arange(8.0).reshape(2, 4)
    for (got,) in run_simulated(_program(body, 2, 4, ranks=2), [x], ranks=2):
        assert torch.equal(got, 2 * x * torch.tensor([[1.0], [2.0]]))
