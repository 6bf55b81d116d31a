"""Attention and its gradients, computed in float64 from the definition; fusions of attention."""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from fuser import DataType, FusionDefinition, TensorView
from fuser.ir.dtypes import to_torch

D = DataType


Tensors = Sequence[torch.Tensor]


# Of values of about 1, in sums of up to 64; gradients with a scale of 2 are up to 4, and torch's
# own kernel in Float is up to 2.4e-6 off on some processors.
ATOL = {D.Float: 8e-6, D.Double: 1e-12, D.Half: 3e-3, D.BFloat16: 2e-2}


# log_sumexp is Float whatever the operands are; torch's kernel rounds half-like scores.
LSE_ATOL = {D.Float: 2e-6, D.Double: 1e-6, D.Half: 2e-4, D.BFloat16: 2e-4}


def attend(
    operands: Tensors,
    *,
    added: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output and log_sumexp of float64 operands, computed from the definition."""
    query, key, value = operands
    scores = torch.einsum("...le,...se->...ls", query, key)
    scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if added is not None:
        scores = scores + added.double()
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf)
    if is_causal:
        rows, columns = scores.shape[-2:]
        later = torch.arange(columns)[None, :] > torch.arange(rows)[:, None]
        scores = torch.where(later, -math.inf, scores)
    weights = scores.exp()
    total = weights.sum(-1)
    weights = weights / torch.where(total == 0, 1, total).unsqueeze(-1)
    weights = weights if kept is None else weights * kept
    return torch.einsum("...ls,...sv->...lv", weights, value), total.log()


def gradients(operands: Tensors, grad: torch.Tensor, **how: object) -> Tensors:
    given = [t.detach().double().clone().requires_grad_() for t in operands]
    out, _ = attend(given, **how)  # pyright: ignore[reportArgumentType]
    return torch.autograd.grad(out, given, grad.double(), allow_unused=False)


def draw(shapes: Sequence[Sequence[int]], dtype: DataType = D.Float, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes)
    return [t.to(to_torch(dtype)) for t in made]


def define(
    *,
    dtype: DataType = D.Float,
    rank: int = 4,
    backward: bool = True,
    place: Callable[[dict[str, TensorView]], None] = lambda tensors: None,
    **named: object,
) -> FusionDefinition:
    """Defines attention and, if `backward`, the gradients of query, key and value.

    The outputs are output, log_sumexp, seed and offset, then the gradients.
    """
    with FusionDefinition() as fd:
        names = ("query", "key", "value", *(("grad",) if backward else ()))
        tensors = {n: fd.define_tensor([-1] * rank, contiguity=False, dtype=dtype) for n in names}
        read = [tensors[n] for n in names[:3]]
        results = fd.ops.sdpfa_fwd(*read, **named)
        tensors |= dict(zip(("out", "log_sumexp", "seed", "offset"), results, strict=True))
        outputs = [*results]
        if backward:
            numbers = (named.get(n) for n in ("dropout_p", "is_causal", "scale"))
            dropped, causal, scale = numbers
            outputs += fd.ops.sdpfa_bwd(
                tensors["grad"], *read, *results[:2], dropped, causal, *results[2:], scale
            )
            tensors |= zip(("grad_query", "grad_key", "grad_value"), outputs[4:], strict=True)
        place(tensors)
        for out in outputs:
            fd.add_output(out)
    return fd


def check(got: Tensors, expected: Tensors, dtype: DataType) -> None:
    """Compares output, log_sumexp and gradients; without dropout, seed and offset must be 0."""
    assert got[0].dtype == to_torch(dtype) and got[1].dtype == torch.float32
    for t, shape in zip(got[2:4], ((2,), ()), strict=True):
        assert t.dtype == torch.uint64 and t.shape == shape and not t.view(torch.int64).any()
    computed = [got[0], *got[4:]]
    for one, want in zip(computed, (expected[0], *expected[2:]), strict=True):
        torch.testing.assert_close(one.double(), want, rtol=ATOL[dtype], atol=ATOL[dtype])
    lse = LSE_ATOL[dtype]
    torch.testing.assert_close(got[1].double(), expected[1], rtol=lse, atol=lse)
