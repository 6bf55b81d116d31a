"""How torch computes matmul and linear: one call on views of the operands and of the result.

Which views torch can make follows from shapes and strides; it is found out once for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F

from fuser.ir.ops import nodes

Tensor = torch.Tensor
ViewOf = Callable[[Tensor], Tensor]
# F.linear, whose form of Python takes no `out`. It turns the weight without a call of Python.
_LINEAR: Callable[..., object] = torch._C._nn.linear  # pyright: ignore
Contract = Callable[[Sequence[Tensor], Tensor], object]
"""Writes the product of the inputs into the output."""


@dataclass(frozen=True)
class Product:
    """`function(*operands, out=...)`: `operands` has the place of each among the inputs and its
    view, `result` the view of the output; None stands for the tensor itself."""

    function: Callable[..., object]
    operands: tuple[tuple[int, ViewOf | None], ...]
    result: ViewOf | None = None

    def __call__(self, ins: Sequence[Tensor], out: Tensor) -> None:
        operands = [ins[i] if view is None else view(ins[i]) for i, view in self.operands]
        self.function(*operands, out=out if self.result is None else self.result(out))


def bind_contraction(op: nodes.Contraction, inputs: Sequence[Tensor], out: Tensor) -> Contract:
    """Return how the op is computed for operands of these shapes and strides, into an output that
    is never resized.

    Nothing is allocated where torch can view operands and result as one matrix product or one batch
    of them: that is a `Product`.
    """
    met = met_operands(op, inputs)
    way = (_bind_matmul if isinstance(op, nodes.MatmulOp) else _bind_linear)(met, out)
    return way if met is inputs else lambda ins, out: way(met_operands(op, ins), out)


def met_operands(op: nodes.Contraction, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the operands with as much of their contracted axis as both have.

    The one element of an operand that is known to have one meets none in an empty block.
    """
    a, b, *bias = inputs
    at = -1 if isinstance(op, nodes.LinearOp) else max(b.dim() - 2, 0)
    if a.shape[-1] == b.shape[at] or 0 not in (a.shape[-1], b.shape[at]):
        return inputs
    return [a.narrow(-1, 0, 0), b.narrow(at, 0, 0), *bias]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, rounded once: x [*i, k], weight [*w, n, k], bias [*w, n] give
    [*w, *i, n]."""
    if weight.dim() < 3:
        return F.linear(x, weight, bias)
    *batch, n, k = weight.shape
    rows, count = prod(x.shape[:-1]), prod(batch)
    left = x.reshape(rows, k).expand(count, rows, k)
    right = weight.reshape(count, n, k).mT
    if bias is None:
        made = torch.bmm(left, right)
    else:
        made = torch.baddbmm(bias.reshape(count, 1, n), left, right)
    return made.view(*batch, *x.shape[:-1], n)


def _bind_linear(inputs: Sequence[Tensor], out: Tensor) -> Contract:
    if inputs[1].dim() > 2:
        return _bind_batched(inputs, out)
    if inputs[1].dim() == 1:
        # One column of the result.
        wide = _bind_linear(_widened(inputs), out.unsqueeze(-1))
        return lambda ins, out: wide(_widened(ins), out.unsqueeze(-1))
    rows, result = (-1, inputs[0].shape[-1]), (-1, out.shape[-1])
    if not (_can_view(inputs[0], rows) and _can_view(out, result)):
        return _copied_linear
    bias = ((2, None),) if len(inputs) == 3 else ()
    return Product(_LINEAR, ((0, _as(inputs[0], rows)), (1, None), *bias), _as(out, result))


def _bind_batched(inputs: Sequence[Tensor], out: Tensor) -> Contract:
    """Bind a linear whose weights are a batch: every one of them takes all rows."""
    x, weight, *bias = inputs
    *batch, n, k = weight.shape
    rows, columns = (-1, k), (-1, n, k)
    result, addend = (prod(batch), prod(x.shape[:-1]), n), (-1, 1, n)
    viewed = ((x, rows), (weight, columns), (out, result), *((b, addend) for b in bias))
    if not all(_can_view(t, shape) for t, shape in viewed):
        return _copied_linear

    def left(x: Tensor) -> Tensor:
        return x.view(rows).expand(result[0], -1, -1)

    def right(weight: Tensor) -> Tensor:
        return weight.view(columns).mT

    factors = (0, left), (1, right)
    if not bias:
        return Product(torch.bmm, factors, _as(out, result))
    return Product(torch.baddbmm, ((2, lambda b: b.view(addend)), *factors), _as(out, result))


def _copied_linear(ins: Sequence[Tensor], out: Tensor) -> None:
    out.copy_(linear(*ins))


def _widened(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [inputs[0], *(t.unsqueeze(0) for t in inputs[1:])]


def _bind_matmul(inputs: Sequence[Tensor], out: Tensor) -> Contract:
    a, b = inputs
    if a.ndim == b.ndim == out.ndim == 2 and a.numel() and out.numel():
        return _AS_THEY_ARE

    def copied(ins: Sequence[Tensor], out: Tensor) -> None:
        out.copy_(torch.matmul(ins[0], ins[1]))

    if b.ndim == 2:
        # A vector is one row.
        kept, function = 1, torch.mm
    elif a.ndim == b.ndim > 2 and a.shape[:-2] == b.shape[:-2]:
        kept, function = 2, torch.bmm
    else:
        kept, function = 0, torch.matmul
    rows_a, rows_b, rows_out = ((-1, *x.shape[-kept:]) if kept else () for x in (a, b, out))
    viewed = ((a, rows_a), (out, rows_out), *(((b, rows_b),) if kept == 2 else ()))
    if kept and all(_can_view(x, shape) for x, shape in viewed):
        right = _as(b, rows_b) if kept == 2 else None
        return Product(function, ((0, _as(a, rows_a)), (1, right)), _as(out, rows_out))
    # Permuted heads: torch packs the operands, and writes a contiguous `out` without a copy.
    if a.ndim > 2 and b.ndim > 2 and out.is_contiguous():
        return Product(torch.matmul, ((0, None), (1, None)))
    return copied


_AS_THEY_ARE = Product(torch.mm, ((0, None), (1, None)))


def _can_view(x: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether there is a view of another shape; never of an empty tensor."""
    try:
        return x.numel() > 0 and (_is_own(x, shape) or x.view(shape) is not None)
    except RuntimeError:
        return False


def _as(x: Tensor, shape: tuple[int, ...]) -> ViewOf | None:
    """Return how a tensor like `x` is viewed with this shape; None where that is its own."""
    return None if _is_own(x, shape) else lambda x: x.view(shape)


def _is_own(x: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a view of this shape, of one axis that takes what is left and the last ones of `x`,
    is `x` itself."""
    return x.dim() == len(shape) and x.shape[1:] == shape[1:]
