"""matmul, linear and grouped_mm. Results keep the contracted axis as a trailing reduction axis."""

from __future__ import annotations

from collections.abc import Sequence

from fuser.errors import DtypeError, user_line
from fuser.ir import scalar as sc
from fuser.ir.domain import IterDomain
from fuser.ir.dtypes import FLOAT8, DataType, DtypeLike, dtype_text, is_floating
from fuser.ir.guard import active_fusion
from fuser.ir.mma import GroupedMmaOp
from fuser.ir.nodes import LinearOp, MatmulOp
from fuser.ir.scalar import Const
from fuser.ir.tensor import TensorView
from fuser.ir.types import IterType
from fuser.ops.building import (
    add_op,
    axes_of,
    fail,
    join_axes,
    new_output,
    same_extent,
    unexpanded,
    unsupported,
)
from fuser.ops.elementwise import check_rank_at_least
from fuser.ops.factories import full_tensor

Mapped = list[tuple[TensorView, IterDomain]]


def _same_dtypes(name: str, tensors: Sequence[TensorView]) -> None:
    if len({t.dtype() for t in tensors}) > 1:
        found = ", ".join(f"{t.label} is {dtype_text(t.dtype())}" for t in tensors)
        raise DtypeError(f"{name}: Expected all operands to have one dtype, but {found}")
    if tensors[0].dtype() in FLOAT8:
        raise unsupported(
            name, f"{tensors[0]} has floats of one byte: write scaled_mm, or cast the operands"
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
    _same_dtypes(name, (a, b))
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
    _same_dtypes(name, operands)
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


# ------------------------------------------------------------------ groups
def joined_axes(name: str, mapped: Sequence[Mapped]) -> list[IterDomain]:
    """Create the output axes over mapped operand axes, whose elements may all differ."""
    fusion = active_fusion()
    joined = [unexpanded(join_axes(fusion, found, name)) for found in mapped]
    return [fusion.new_axis(a.extent, a.kind) for a in joined]


def grouped_mm(
    mat1: TensorView,
    mat2: TensorView,
    offsets: TensorView,
    scale1: TensorView | None = None,
    scale2: TensorView | None = None,
    alpha: TensorView | None = None,
    bias: TensorView | None = None,
    beta: TensorView | None = None,
    dtype: DtypeLike = DataType.BFloat16,
    output_block_scale_size: int = 0,
    output_block_scale_dtype: DtypeLike = DataType.BFloat16,
    output_gamma: bool = False,
) -> TensorView:
    """Append a matrix product per group, where the Int32 `offsets` [g] say at which positions of k
    (of [m, k] and [k, n]), n (of [g, m, k] and [k, n]) or m (of [m, k] and [g, k, n]) groups end.

    Rows and columns of no group are 0. The host reads the offsets in each run. What follows
    `offsets` is refused: it belongs to the scaled form, which is not there.
    """
    name = "grouped_mm"
    scaled = scale1, scale2, alpha, bias, beta, dtype, output_block_scale_size
    scaled += output_block_scale_dtype, output_gamma
    if scaled != (*[None] * 5, DataType.BFloat16, 0, DataType.BFloat16, False):
        raise unsupported(name, f"the scaled form, of {mat1}: multiply by scales before or after")
    _check_grouped(name, mat1, mat2, offsets)
    fusion = active_fusion()
    _, *letters = GroupedMmaOp.FORMS[mat1.ndim, mat2.ndim]
    mapped: dict[str, Mapped] = {}
    for tv, axes in zip((mat1, mat2, offsets), (*letters[:2], "g"), strict=True):
        for letter, axis in zip(axes, axes_of(tv), strict=True):
            mapped.setdefault(letter, []).append((tv, axis))
    for found in mapped.values():
        (first, axis), *others = found
        for tv, other in others:
            same_extent(fusion, axis.size, other.size, f"{name}: {first} and {tv}")
    k = contracted_axes(name, mapped["k"])
    out_axes = joined_axes(name, [mapped[c] for c in letters[2]])
    if k and sc.int_value(k[0].extent) == 0:
        return full_tensor([a.size for a in out_axes], Const(0, mat1.dtype()), mat1.dtype())
    out = new_output([*out_axes, *k], mat1.dtype(), [mat1, mat2])
    add_op(GroupedMmaOp(out, mat1, mat2, offsets))
    return out


def _check_grouped(name: str, mat1: TensorView, mat2: TensorView, offsets: TensorView) -> None:
    if (mat1.ndim, mat2.ndim) not in GroupedMmaOp.FORMS:
        raise fail(
            name, f"Expected two matrices, or one and a batch of them, but found {mat1} and {mat2}"
        )
    _same_dtypes(name, (mat1, mat2))
    if not is_floating(mat1.dtype()):
        raise DtypeError(
            f"{name}: Expected floating operands, but {mat1} is {dtype_text(mat1.dtype())} "
            f"(at {user_line()})"
        )
    if offsets.dtype() is not DataType.Int32 or offsets.ndim != 1:
        raise DtypeError(
            f"{name}: Expected offsets of one axis and of dtype Int32, but found {offsets} "
            f"(at {user_line()})"
        )
