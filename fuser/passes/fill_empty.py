"""Fill what has no elements: empty tensors, and reductions over nothing.

Before: for these sizes some extents are 0. After: an op whose result is empty, or that reduces no
elements, is a `full` with the value that it means; ops that nothing reads any more are gone.

    T1[iS2{i0}, rS3{i1}] = reduction( T0[iS0{i0}, iS1{i1}], op = add )     sizes i1 = 0
    T1[iS2{i0}] = full({i0}, float(0))
"""

from __future__ import annotations

from collections.abc import Mapping

from fuser.ir.binding import size_of
from fuser.ir.domain.tensor_domain import IterDomain
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorOp
from fuser.ir.ops import nodes
from fuser.ir.ops.lookup import LookupOp
from fuser.ir.ops.resizing import PadOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Const, Number, Scalar, Symbol
from fuser.ir.tensor import TensorView
from fuser.ir.types import IterType
from fuser.ops.reduction_table import missing

Values = Mapping[Symbol, Number]


def fill_empty(fusion: Fusion, values: Values) -> None:
    """Rewrite `fusion` in place for these sizes; does nothing when no extent is 0."""
    if not any(_is_empty(a, values) for tv in fusion.tensors() for a in tv.domain.logical):
        return
    exprs: list[TensorOp] = []
    for op in fusion.exprs:
        exprs.extend(new.replace(where=op.where) for new in _filled(fusion, op, values))
    fusion.exprs = exprs
    fusion.exprs = fusion.used_exprs()


def _is_empty(axis: IterDomain, values: Values) -> bool:
    return size_of(axis.size, values) == 0


def _filled(fusion: Fusion, op: TensorOp, values: Values) -> list[TensorOp]:
    """Return the ops to put in place of `op`."""
    if isinstance(op, nodes.LibraryOp) and op.TAKES_EMPTY:
        return [op]
    reduces_nothing = any(
        _is_empty(a, values) for a in op.out_tensor.domain.logical if a.is_reduction()
    )
    if reduces_nothing and isinstance(op, nodes.LinearOp) and op.bias is not None:
        return _bias_alone(fusion, op, op.bias)
    pads_nothing = isinstance(op, PadOp) and any(
        _is_empty(a, values) for a in op.inp.domain.no_reductions
    )
    finds_nothing = isinstance(op, LookupOp) and any(
        _is_empty(a, values) for a in op.table.domain.no_reductions
    )
    # An expanded axis without elements is dropped before it is reduced: there is nothing to pick.
    drops_nothing = isinstance(op, nodes.SqueezeOp) and any(
        is_gone and _is_empty(a, values)
        for a, is_gone in zip(op.inp.domain.no_reductions, op.flags, strict=True)
    )
    is_empty = any(_is_empty(a, values) for a in op.out_tensor.domain.logical)
    if not (reduces_nothing or pads_nothing or finds_nothing or drops_nothing or is_empty):
        return [op]
    fills: list[TensorOp] = []
    for out, value in zip(op.outputs, _fill_values(op), strict=True):
        out.domain = out.domain.without_root()
        shape = tuple(a.size for a in out.domain.logical)
        fills.append(nodes.FullOp(out, shape, value))
    return fills


def _fill_values(op: TensorOp) -> list[Scalar]:
    """Return what each output holds, where it holds anything."""
    match op:
        case nodes.ReductionOp():
            return [op.init]
        case PadOp():
            return [op.value]
        case LookupOp():
            return [Const(missing(op.out.dtype()), op.out.dtype())]
        case nodes.WelfordOp():
            return [
                Const(missing(op.avg.dtype()), op.avg.dtype()),
                Const(0, op.var.dtype()),
                Const(0, DataType.Index),
            ]
        case _:
            return [Const(0, out.dtype()) for out in op.outputs]


def _bias_alone(fusion: Fusion, op: nodes.LinearOp, bias: TensorView) -> list[TensorOp]:
    """Return the ops of a linear without contracted elements: the bias, expanded."""
    flags = op.bias_lacks
    op.out.domain = op.out.domain.without_root()
    logical, sources = op.out.domain.logical, iter(bias.domain.no_reductions)
    axes = [
        fusion.new_axis(sc.ONE, IterType.broadcast) if new else fusion.clone_axis(next(sources))
        for new in flags
    ]
    row = fusion.new_tensor(axes, bias.dtype(), mesh=op.out.mesh)
    # The result's axes iterate; adding to zeros expands the row without expanded broadcasts.
    zeros = fusion.new_tensor([fusion.clone_axis(a) for a in logical], bias.dtype())
    shape = tuple(a.size for a in logical)
    made: list[TensorOp] = [
        nodes.BroadcastOp(row, bias, flags=flags),
        nodes.FullOp(zeros, shape, Const(0, bias.dtype())),
        nodes.BinaryOp(op.out, row, zeros, kind="add"),
    ]
    return made
