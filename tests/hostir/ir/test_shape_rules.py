"""Results with buffers of their own: a shape or a dtype that the op does not make is refused."""

# Host programs by hand take plain numbers where a Scalar is declared.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fuser.ir.dtypes import DataType
from fuser.ir.fusion import TensorView
from fuser.ir.op import Op
from fuser.ir.ops import nodes
from fuser.ir.scalar.constructors import Number, Symbol, as_scalar, symbols
from fuser.ir.types import ParallelType
from fuser.support.errors import VerifyError
from hostir import NUMBER_OF_STREAMS, RANK, Allocate, HirAliasSelect, HostIrContainer, LocalSlice
from hostir.analysis.preflight import check_before_run
from hostir.ir.verifier import verify
from hostir.tools.run_text import run_simulated
from multidevice import DeviceMesh

MESH, X = DeviceMesh([0, 1]), ParallelType.mesh_x
Make = Callable[[TensorView, TensorView], Op]


def _program(
    make: Make, shape: tuple[int, ...], out: tuple[int, ...], dtype: DataType, cut: str = ""
) -> HostIrContainer:
    """Returns x -> y by one op; `cut` has the names of what devices cut along axis 0."""
    hic = HostIrContainer()
    with hic:
        mesh = MESH if cut else None
        x, y = hic.input(shape, mesh=mesh), hic.tensor(out, dtype, mesh=mesh)
        for name, tv in (("x", x), ("y", y)):
            if name in cut:
                tv.axis(0).parallelize(X)
        hic.append(Allocate(y), make(y, x))
        hic.add_output(y)
    return hic


def _add(y: TensorView, x: TensorView) -> Op:
    return nodes.BinaryOp(y, x, as_scalar(1.0), kind="add")


def _less(y: TensorView, x: TensorView) -> Op:
    return nodes.BinaryOp(y, x, as_scalar(1.0), kind="lt")


def _slice(axis: int) -> Make:
    return lambda y, x: LocalSlice(y, x, axis=axis, ptype=X)


FLOAT, HALF, BOOL = DataType.Float, DataType.Half, DataType.Bool
# Op, shapes, dtype of the result, what is cut -> what is said (None: it is right).
CASES: dict[str, tuple[Make, tuple[int, ...], tuple[int, ...], DataType, str, str | None]] = {
    "product": (lambda y, x: nodes.MatmulOp(y, x, x), (4, 4), (4, 4), FLOAT, "", None),
    "product, summed": (
        lambda y, x: nodes.MatmulOp(y, x, x),
        (4, 6),
        (4, 6),
        FLOAT,
        "",
        r"matmul: axis 1 of input 0 .* and axis 0 of input 0 .* extent 6 and extent 4",
    ),
    "product, result": (
        lambda y, x: nodes.MatmulOp(y, x, x),
        (4, 4),
        (4, 5),
        FLOAT,
        "",
        r"matmul: axis 1 of input 0 .* and axis 1 of T1.* extent 4 and extent 5",
    ),
    "linear": (lambda y, x: nodes.LinearOp(y, x, x, None), (4, 6), (4, 4), FLOAT, "", None),
    "linear, columns": (
        lambda y, x: nodes.LinearOp(y, x, x, None),
        (4, 6),
        (4, 6),
        FLOAT,
        "",
        r"linear: axis 0 of input 0 .* and axis 1 of T1.* extent 4 and extent 6",
    ),
    "linear, a batch": (
        lambda y, x: nodes.LinearOp(y, x, x, None),
        (3, 4, 6),
        (3, 3, 4, 4),
        FLOAT,
        "",
        None,
    ),
    "linear, a batch in another order": (
        lambda y, x: nodes.LinearOp(y, x, x, None),
        (3, 4, 6),
        (4, 3, 3, 4),
        FLOAT,
        "",
        r"linear: axis 0 of input 0 .* and axis 0 of T1.* extent 3 and extent 4",
    ),
    "sum": (_add, (4, 6), (4, 6), FLOAT, "", None),
    "sum, size": (
        _add,
        (4, 6),
        (4, 7),
        FLOAT,
        "",
        r"add: axis 1 of input 0 .* and axis 1 of T1.* extent 6 and extent 7",
    ),
    "sum, rank": (
        _add,
        (4, 6),
        (4,),
        FLOAT,
        "",
        r"add: input 0 .*T0.* has 2 axes, which do not fit the 1 axis of the result T1",
    ),
    "sum, one row": (
        _add,
        (4, 6),
        (1, 6),
        FLOAT,
        "",
        r"add: axis 0 of input 0 .* and axis 0 of T1.* extent 4 and extent 1",
    ),
    "sum, dtype": (
        _add,
        (4, 6),
        (4, 6),
        HALF,
        "",
        "add: with these operands the result has the dtype float, but",
    ),
    "comparison": (_less, (4, 6), (4, 6), BOOL, "", None),
    "comparison, dtype": (
        _less,
        (4, 6),
        (4, 6),
        FLOAT,
        "",
        "lt: with these operands the result has the dtype bool, but T1.* dtype float",
    ),
    "copy": (nodes.LoadStoreOp, (2, 6), (2, 6), FLOAT, "xy", None),
    "copy of a shard": (
        nodes.LoadStoreOp,
        (2, 6),
        (2, 6),
        FLOAT,
        "x",
        r"set: the part on mesh_x of axis 0 of input 0 .* are split over different devices",
    ),
    "total": (
        lambda y, x: nodes.ReductionOp(y, x, as_scalar(0.0), kind="add"),
        (4, 6),
        (4,),
        FLOAT,
        "",
        r"sum: input 0 .*T0.* has 2 axes, which do not fit the 1 axis of the result T1",
    ),
    "slice": (_slice(0), (2, 6), (2, 6), FLOAT, "y", None),
    "slice of a shard": (
        _slice(0),
        (2, 6),
        (2, 6),
        FLOAT,
        "xy",
        "LocalSlice: .* axis 0 of T0_g_float is already split by deviceIdx.x",
    ),
    "slice, axis": (
        _slice(1),
        (2, 6),
        (2, 6),
        FLOAT,
        "y",
        r"LocalSlice: axis 0 of input 0 .* are split over different devices",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_results_are_what_ops_make(name: str) -> None:
    make, shape, out, dtype, cut, text = CASES[name]
    hic = _program(make, shape, out, dtype, cut)
    if text is None:
        return verify(hic)
    with pytest.raises(VerifyError, match=text):
        verify(hic)
    return None


def _selects(axis: int, size: object) -> HostIrContainer:
    """Returns a program that copies the elements of x [size, 8] along an axis, named as [8]."""
    hic = HostIrContainer()
    with hic:
        x = hic.input([size, 8])
        y = hic.tensor([x.size(axis), 8])
        hic.append(Allocate(y))
        with hic.loop(x.size(axis)) as i:
            row = hic.tensor([8])
            hic.append(HirAliasSelect(row, x, i, axis=x.domain.no_reductions[axis]))
            hic.append(nodes.LoadStoreOp(hic.select(y, 0, i), row))
        hic.add_output(y)
    return hic


def _values(hic: HostIrContainer, rows: int) -> dict[Symbol, Number]:
    (x,) = hic.inputs
    assert isinstance(x, TensorView)
    (size,) = symbols(x.shape()[0])
    return {RANK: 0, NUMBER_OF_STREAMS: 4, size: rows}


def test_a_name_has_the_axes_of_what_it_names() -> None:
    text = r"HirAliasSelect: axis 0 of input 0 .* and axis 0 of T2.* extent 6 and extent 8"
    with pytest.raises(VerifyError, match=text):
        verify(_selects(1, 6))


def test_sizes_that_inputs_bind_are_compared_before_the_run() -> None:
    wrong, right = _selects(1, -1), _selects(0, -1)
    verify(wrong)
    check_before_run(wrong, _values(wrong, 8), rank=0)
    with pytest.raises(VerifyError, match=r"HirAliasSelect: .* and axis 0 of T2"):
        other = _selects(1, -1)
        check_before_run(other, _values(other, 6), rank=0)
    x = torch.randn(6, 8)
    ((got,),) = run_simulated(right, [x], ranks=1)
    assert torch.equal(got, x)
