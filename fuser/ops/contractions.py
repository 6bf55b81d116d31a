"""matmul and linear. Results keep the contracted axis as a trailing reduction axis."""

from __future__ import annotations

from collections.abc import Sequence

from fuser.ir.domain.tensor_domain import IterDomain
from fuser.ir.dtypes import FLOAT8, dtype_text
from fuser.ir.fusion_guard import active_fusion
from fuser.ir.ops.nodes import LinearOp, MatmulOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Const
from fuser.ir.tensor import TensorView
from fuser.ir.types import IterType
from fuser.ops.building import (
    add_op,
    axes_of,
    declare_extent,
    fail,
    join_axes,
    new_output,
    unsupported,
)
from fuser.ops.elementwise import check_rank_at_least
from fuser.ops.factories import full_tensor
from fuser.support.errors import DtypeError

Mapped = list[tuple[TensorView, IterDomain]]


def check_same_dtypes(
    name: str, tensors: Sequence[TensorView], advice: str = "write scaled_mm"
) -> None:
    """Raise `DtypeError` for tensors of several dtypes, `UnsupportedError` with what to do for
    floats of one byte."""
    if len({t.dtype() for t in tensors}) > 1:
        found = ", ".join(f"{t.label} is {dtype_text(t.dtype())}" for t in tensors)
        raise DtypeError(f"{name}: Expected all operands to have one dtype, but {found}")
    if tensors[0].dtype() in FLOAT8:
        raise unsupported(
            name, f"{tensors[0]} has floats of one byte: {advice}, or cast the operands"
        )


def _axis(name: str, mapped: Mapped) -> IterDomain:
    """Create the output axis over mapped operand axes."""
    fusion = active_fusion()
    joined = join_axes(fusion, mapped, name)
    return fusion.new_axis(joined.extent, joined.kind, expanded=joined.expanded)


def contracted_axes(name: str, mapped: Mapped) -> list[IterDomain]:
    """Create the reduction axis; none when the contracted axis has size 1 in all operands."""
    fusion = active_fusion()
    joined = join_axes(fusion, mapped, name)
    if joined.is_broadcast and joined.expanded is None:
        return []
    return [fusion.new_axis(joined.size, IterType.reduction)]


def matmul(arg1: TensorView, arg2: TensorView) -> TensorView:
    """Append torch.matmul: 1-D operands and batch broadcasting as there; dtypes must be equal."""
    name = "matmul"
    a, b = arg1, arg2
    for tv in (a, b):
        check_rank_at_least(name, tv, 1)
    check_same_dtypes(name, (a, b))
    ax, bx = axes_of(a), axes_of(b)
    nbatch = max(a.ndim - 2, b.ndim - 2, 0)
    axes: list[IterDomain] = []
    for i in range(nbatch):
        back = nbatch - i + 2
        mapped = [(tv, x[-back]) for tv, x in ((a, ax), (b, bx)) if len(x) >= back]
        axes.append(_axis(name, mapped))
    if a.ndim > 1:
        axes.append(_axis(name, [(a, ax[-2])]))
    if b.ndim > 1:
        axes.append(_axis(name, [(b, bx[-1])]))
    k = contracted_axes(name, [(a, ax[-1]), (b, bx[max(b.ndim - 2, 0)])])
    if k and sc.int_value(k[0].extent) == 0:
        return full_tensor([x.size for x in axes], Const(0, a.dtype()), a.dtype())
    out = new_output([*axes, *k], a.dtype(), [a, b])
    add_op(MatmulOp(out, a, b))
    return out


def _check_bias(name: str, weight: TensorView, bias: TensorView) -> None:
    """Require that a bias has one element where a weight has one: the weight is never spread."""
    fusion = active_fusion()
    for w, b in zip(axes_of(weight), axes_of(bias), strict=False):
        if not w.is_broadcast or w.expanded is not None or b.is_broadcast:
            continue
        size = fusion.canonical(b.size)
        if sc.int_value(size) not in (None, 1):
            raise fail(name, f"{bias} has {size} elements along {b}, but {weight} has 1 along {w}")
        declare_extent(fusion, sc.ONE, b.size, f"{name}: {weight} and {bias}")


def linear(arg1: TensorView, arg2: TensorView, bias: TensorView | None = None) -> TensorView:
    """Append x @ weight.T + bias: x [*i, K], weight [*w, N, K], bias [*w, N] -> [*w, *i, N, rK]."""
    name = "linear"
    x, weight = arg1, arg2
    check_rank_at_least(name, x, 1)
    if weight.ndim < 2:
        raise fail(name, f"Input B must be at least 2D, got {weight}")
    operands = [x, weight]
    if bias is not None:
        operands.append(bias)
        if bias.ndim != weight.ndim - 1:
            want = "1 axis" if weight.ndim == 2 else f"{weight.ndim - 1} axes, as {weight} has"
            raise fail(name, f"bias must have {want}, got {bias}")
        _check_bias(name, weight, bias)
    check_same_dtypes(name, operands)
    *rows, x_k = axes_of(x)
    *columns, weight_k = axes_of(weight)
    mapped: list[Mapped] = [[(weight, a)] for a in columns]
    if bias is not None:
        for found, a in zip(mapped, axes_of(bias), strict=True):
            found.append((bias, a))
    *batch, n = mapped
    axes = [_axis(name, found) for found in (*batch, *([(x, a)] for a in rows), n)]
    k = contracted_axes(name, [(x, x_k), (weight, weight_k)])
    # Only the mesh of x is copied: weights are often sharded on axes that the result lacks.
    out = new_output([*axes, *k], x.dtype(), [x])
    add_op(LinearOp(out, x, weight, bias))
    return out
