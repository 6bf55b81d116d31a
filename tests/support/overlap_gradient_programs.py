"""Backward passes of layers with matmuls next to collectives, and their torch meaning.

g stands for the gradient of a layer's output, x or y for its input, and w for its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fuser import DataType, FusionDefinition, TensorView
from fuser.multidevice import DeviceMesh
from tests.support.overlap_programs import Form, cut, inputs_of

Build = Callable[[FusionDefinition, int], tuple[list[TensorView], TensorView]]
SENT = ("recv", "send")


def transposed(fd: FusionDefinition, x: TensorView) -> TensorView:
    return fd.ops.permute(x, [1, 0])


def placed(tv: TensorView, d: int, axis: int | None = None) -> TensorView:
    tv.set_device_mesh(DeviceMesh(range(d)))
    if axis is not None:
        cut(tv, axis, d)
    return tv


def of_weight(
    op: str = "matmul", *, columns: bool = True, dtype: DataType = DataType.Float
) -> Build:
    """g^T x, where the rows of x are gathered; each rank has all rows of g, in all columns or a
    block.
    """

    def build(fd: FusionDefinition, d: int) -> tuple[list[TensorView], TensorView]:
        x, g = inputs_of(fd, d, 2, 2, dtype=dtype)
        rows = placed(fd.ops.set(x), d)
        left = transposed(fd, g)
        y = (
            fd.ops.matmul(left, rows)
            if op == "matmul"
            else fd.ops.linear(left, transposed(fd, rows))
        )
        cut(x, 0, d)
        if columns:
            cut(g, 1, d)
        placed(y, d, 0 if columns else None)
        return [x, g], y

    return build


def of_weight_transposed(fd: FusionDefinition, d: int) -> tuple[list[TensorView], TensorView]:
    """x^T g: the gathered tensor is the first factor."""
    x, g = inputs_of(fd, d, 2, 2, dtype=DataType.Float)
    y = fd.ops.matmul(transposed(fd, placed(fd.ops.set(x), d)), g)
    cut(x, 0, d)
    cut(g, 1, d)
    return [x, g], placed(y, d, 1)


def of_both(fd: FusionDefinition, d: int) -> tuple[list[TensorView], tuple[TensorView, ...]]:
    """Both gradients of a layer whose g is gathered by rows: g w, and g^T y, which sums over the
    rows.
    """
    g, w, y = inputs_of(fd, d, 2, 2, 2, dtype=DataType.Float)
    rows = placed(fd.ops.set(g), d)
    outs = fd.ops.matmul(rows, w), fd.ops.matmul(transposed(fd, rows), y)
    cut(g, 0, d)
    cut(w, 1, d)
    cut(y, 1, d)
    for out in outs:
        placed(out, d, 1)
    return [g, w, y], outs


def of_columns(fd: FusionDefinition, d: int) -> tuple[list[TensorView], TensorView]:
    """A linear with a bias whose contracted axis K is gathered."""
    x, w, b = inputs_of(fd, d, 2, 2, 1, dtype=DataType.Float)
    y = fd.ops.linear(placed(fd.ops.set(x), d), w, b)
    cut(x, 1, d)
    cut(w, 0, d)
    cut(b, 0, d)
    return [x, w, b], placed(y, d, 1)


def of_square(fd: FusionDefinition, d: int) -> tuple[list[TensorView], TensorView]:
    """x^T x: both factors are the gathered tensor."""
    (x,) = inputs_of(fd, d, 2, dtype=DataType.Float)
    rows = placed(fd.ops.set(x), d)
    y = placed(fd.ops.matmul(transposed(fd, rows), rows), d)
    cut(x, 0, d)
    return [x], y


def of_batches(rows: int, columns: int, axis: int, shape: Sequence[int]) -> Build:
    """g^T x of rows with two axes, one of which is gathered; extents are constant or
    symbolic.
    """

    def build(fd: FusionDefinition, d: int) -> tuple[list[TensorView], TensorView]:
        x, g = (
            fd.define_tensor([*shape, n], contiguity=True, dtype=DataType.Float)
            for n in (rows, columns)
        )

        def flat(tv: TensorView) -> TensorView:
            a, b, n = fd.ops.shape(tv)
            return fd.ops.reshape(tv, [fd.ops.mul(a, b), n])

        gathered = placed(fd.ops.set(placed(x, d)), d)
        y = fd.ops.matmul(transposed(fd, flat(placed(g, d))), flat(gathered))
        cut(x, axis, d)
        cut(g, 2, d)
        return [x, g], placed(y, d, 0)

    return build


def of_both_batched(
    fd: FusionDefinition, d: int
) -> tuple[list[TensorView], tuple[TensorView, ...]]:
    """Both gradients of a layer whose rows have two axes of symbolic extents."""
    g, y = inputs_of(fd, d, 3, 3, dtype=DataType.Float)
    (w,) = inputs_of(fd, d, 2, dtype=DataType.Float)
    rows = placed(fd.ops.set(g), d)

    def flat(tv: TensorView) -> TensorView:
        a, b, n = fd.ops.shape(tv)
        return fd.ops.reshape(tv, [fd.ops.mul(a, b), n])

    outs = fd.ops.linear(rows, w), fd.ops.matmul(transposed(fd, flat(rows)), flat(y))
    cut(g, 0, d)
    cut(y, 2, d)
    cut(w, 0, d)
    return [g, y, w], (placed(outs[0], d, 2), placed(outs[1], d, 1))


def means_batches(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return torch.einsum("abk,abn->nk", x, g)


def beside_others(fd: FusionDefinition, d: int) -> tuple[list[TensorView], tuple[TensorView, ...]]:
    """A gathered tensor with five readers: linear, layer norm, residual sum, row sum, and an
    output.
    """
    x, w = inputs_of(fd, d, 2, 2, dtype=DataType.Float)
    rows = placed(fd.ops.set(x), d)
    y = placed(fd.ops.linear(rows, w), d, 1)
    mean = fd.ops.div(fd.ops.sum(rows, [1], True), 16.0)
    centred = fd.ops.sub(rows, mean)
    squares = fd.ops.sum(fd.ops.mul(centred, centred), [1], True)
    normal = fd.ops.mul(centred, fd.ops.rsqrt(fd.ops.add(squares, 1.0)))
    residual = fd.ops.add(rows, fd.ops.tanh(normal))
    cut(x, 0, d)
    cut(w, 0, d)
    return [x, w], (rows, y, normal, residual, fd.ops.sum(rows, [0]))


def means_others(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    centred = x - x.sum(1, keepdim=True) / 16
    normal = centred * (centred.square().sum(1, keepdim=True) + 1).rsqrt()
    return x, x @ w.T, normal, x + torch.tanh(normal), x.sum(0)


def of_input(axis: int | None) -> Build:
    """g w, with g cut by columns and w by rows; the sum over ranks is cut along an axis."""

    def build(fd: FusionDefinition, d: int) -> tuple[list[TensorView], TensorView]:
        g, w = inputs_of(fd, d, 2, 2, dtype=DataType.Float)
        y = fd.ops.matmul(g, w)
        cut(g, 1, d)
        cut(w, 0, d)
        return [g, w], placed(y, d, axis)

    return build


def of_rows(axis: int | None, op: str = "matmul") -> Build:
    """g^T x, with both cut by rows; the sum over ranks is cut along an axis."""

    def build(fd: FusionDefinition, d: int) -> tuple[list[TensorView], TensorView]:
        x, g = inputs_of(fd, d, 2, 2, dtype=DataType.Float)
        left = transposed(fd, g)
        y = fd.ops.matmul(left, x) if op == "matmul" else fd.ops.linear(left, transposed(fd, x))
        cut(x, 0, d)
        cut(g, 0, d)
        return [x, g], placed(y, d, axis)

    return build


def weight(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return g.T @ x


def gradients(m: int, k: int, n: int) -> dict[str, Form]:
    """Returns the forms for M rows, K columns and N others; the number of ranks divides M and
    N.
    """
    xg: Sequence[tuple[int, int]] = ((m, k), (m, n))
    half = DataType.BFloat16
    return {
        "weight gradient": Form(of_weight(), weight, xg),
        "weight gradient, linear": Form(of_weight("linear"), weight, xg),
        "weight gradient, half": Form(of_weight(dtype=half), weight, xg, dtype=torch.bfloat16),
        "weight gradient, all columns": Form(of_weight(columns=False), weight, xg),
        "weight gradient, transposed": Form(of_weight_transposed, lambda x, g: x.T @ g, xg),
        "both gradients": Form(of_both, lambda g, w, y: (g @ w, g.T @ y), ((m, k), (k, n), (m, n))),
        "both gradients, batched": Form(
            of_both_batched,
            lambda g, y, w: (g @ w.T, torch.einsum("abk,abn->kn", g, y)),
            ((m, 3, k), (m, 3, n), (n, k)),
        ),
        "columns": Form(of_columns, lambda x, w, b: x @ w.T + b, ((k, m), (n, m), (n,))),
        "beside others": Form(beside_others, means_others, ((m, k), (n, k))),
        "input gradient, scattered": Form(of_input(0), torch.matmul, ((m, n), (n, k))),
        "input gradient, columns": Form(of_input(1), torch.matmul, ((k, n), (n, m))),
        "input gradient, whole": Form(
            of_input(None), torch.matmul, ((m, n), (n, k)), (*SENT, "Allgather")
        ),
        "weight gradient, scattered": Form(of_rows(0), weight, xg),
        "weight gradient, scattered linear": Form(of_rows(0, "linear"), weight, xg),
        "weight gradient, scattered columns": Form(of_rows(1), weight, ((n, m), (n, k))),
        "weight gradient, whole": Form(of_rows(None), weight, xg, (*SENT, "Allgather")),
    }


GRADIENTS = gradients(32, 16, 48)
