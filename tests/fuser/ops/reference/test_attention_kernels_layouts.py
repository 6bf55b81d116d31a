"""Results of attention have the memory order of their operands, as torch's kernels write them. The
transpose before the next projection is then a view."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fuser import FusionDefinition
from hostir import HostIrEvaluator
from hostir.ir.parser import parse
from tests.support.attention_reference import attend, define, draw, gradients

pytestmark = pytest.mark.from_text

Tensor = torch.Tensor
# Positions of n, h, l and e in memory, outermost first, and the strides of a result.
ORDERS = {"rows": (0, 1, 2, 3), "heads beside": (0, 2, 1, 3), "heads outside": (1, 0, 2, 3)}


def laid(t: Tensor, order: Sequence[int]) -> Tensor:
    back = [list(order).index(p) for p in range(t.dim())]
    return t.permute(*order).contiguous().permute(*back)


def packed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns query, key and value as parts of one projection [n, l, 3, h, e]."""
    whole = torch.stack([t.transpose(1, 2) for t in tensors], 2)
    return [part.transpose(1, 2) for part in whole.unbind(2)]


def dense(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    strides, step = [0] * len(shape), 1
    for p in reversed(order):
        strides[p], step = step, step * shape[p]
    return tuple(strides)


@pytest.mark.finding("attention layout")
@pytest.mark.parametrize("key_order", ORDERS)
@pytest.mark.parametrize("query_order", ORDERS)
def test_results_lie_as_their_operands(query_order: str, key_order: str) -> None:
    """In the first runs and in those that repeat a plan; with one definition for all layouts."""
    fd = define(is_causal=True)
    given = draw([(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), (2, 3, 5, 8)])
    wide = [t.double() for t in given]
    expected = [
        *attend(wide[:3], is_causal=True),
        *gradients(given[:3], wide[3], is_causal=True),
    ]
    orders = [ORDERS[name] for name in (query_order, key_order, "rows", "heads beside")]
    read = [laid(t, order) for t, order in zip(given, orders, strict=True)]
    for _ in range(4):
        out, log_sumexp, _, _, *grads = fd.execute(read)
        assert out.stride() == dense(out.shape, orders[0]) and log_sumexp.is_contiguous()
        for grad, order in zip(grads, orders, strict=False):
            assert grad.stride() == dense(grad.shape, order)
        for got, want in zip((out, log_sumexp, *grads), expected, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.finding("attention layout")
def test_parts_of_one_projection_give_a_result_without_gaps() -> None:
    given = draw([(2, 3, 5, 8)] * 3)
    expected, _ = attend([t.double() for t in given])
    for _ in range(3):
        out = define(backward=False).execute(packed(given))[0]
        assert out.stride() == dense(out.shape, ORDERS["heads beside"])
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_query_whose_rows_lie_apart_gives_rows() -> None:
    """Torch's kernels need rows with stride 1: they get a copy of such a query."""
    given = draw([(2, 3, 5, 8)] * 3)
    apart = [laid(t, (0, 1, 3, 2)) for t in given]
    expected, _ = attend([t.double() for t in given])
    for _ in range(3):
        out = define(backward=False).execute(apart)[0]
        assert out.is_contiguous()
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_computed", [False, True])
def test_what_merges_the_heads_is_a_view(is_computed: bool) -> None:
    """The query has the layout of a projection, from a caller or from a kernel. The host program is
    the same."""
    with FusionDefinition() as fd:
        q, k, v = (fd.define_tensor([-1, 3, -1, 8], contiguity=False) for _ in range(3))
        weight = fd.define_tensor([4, 24], contiguity=True)
        n, rows = fd.ops.size(q, 0), fd.ops.size(q, 2)
        if is_computed:
            q, k, v = (fd.ops.mul(t, 2.0) for t in (q, k, v))
        out = fd.ops.permute(fd.ops.sdpfa_fwd(q, k, v)[0], [0, 2, 1, 3])
        fd.add_output(fd.ops.linear(fd.ops.reshape(out, [n, rows, 24]), weight))
    given = draw([(2, 3, 5, 8)] * 3)
    (weights,) = draw([(4, 24)], seed=1)
    beside = [*(laid(t, ORDERS["heads beside"]) for t in given), weights]
    factor = 2.0 if is_computed else 1.0
    expected, _ = attend([factor * t.double() for t in given])
    expected = expected.transpose(1, 2).reshape(2, 5, 24) @ weights.double().T
    projected = torch.empty(0)
    for _ in range(3):
        (projected,) = fd.execute(beside)
        torch.testing.assert_close(projected.double(), expected, rtol=1e-4, atol=1e-5)
    counts = fd.fec.statistics()
    assert (counts["kernels"] > 0) == is_computed and counts["aliases"] == 2, counts
    program = fd.fec.host_program()
    again = parse(program.full_text())
    assert torch.equal(HostIrEvaluator(again, device="cpu").run(beside)[0], projected)
    text = str(program)
    assert "LaunchKernel" not in text[text.index("sdpa(") :]
