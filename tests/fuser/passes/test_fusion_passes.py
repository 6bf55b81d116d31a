"""Passes before segmentation: masks of attention become biases with the same meaning."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fuser import ops
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.memory_layout import is_stored
from fuser.ir.ops.attention_ops import SdpaFwdOp
from fuser.ir.verify import verify_fusion
from fuser.ops.define import define_tensor
from fuser.ops.reference.meaning import evaluate_fusion
from fuser.passes.fusion_passes import masks_to_biases
from tests.support.attention_reference import attend, draw

D = DataType
WHOLE = (2, 3, 4, 5)


def defined(
    dtype: DataType, mask: Sequence[int], bias: DataType | None, *, are_known: bool = False
) -> Fusion:
    fusion = Fusion()
    with FusionGuard(fusion):
        q, k, v = (define_tensor([-1] * 4, dtype=dtype) for _ in range(3))
        seen = define_tensor([n if n == 1 or are_known else -1 for n in mask], dtype=D.Bool)
        added = None if bias is None else define_tensor([-1, 1, -1, -1], dtype=bias)
        for tv in (q, k, v, seen, *([] if added is None else [added])):
            fusion.add_input(tv)
        for out in ops.sdpfa_fwd(q, k, v, added, seen)[:2]:
            fusion.add_output(out)
    return fusion


def attention_of(fusion: Fusion) -> SdpaFwdOp:
    return next(op for op in fusion.exprs if isinstance(op, SdpaFwdOp))


@pytest.mark.finding("G1")
@pytest.mark.parametrize("bias", [None, D.BFloat16, D.Float])
@pytest.mark.parametrize("mask", [(2, 3, 4, 5), (2, 1, 4, 5), (2, 1, 1, 5), (1, 1, 1, 1)])
def test_a_mask_becomes_a_bias_of_its_own_shape(
    mask: tuple[int, ...], bias: DataType | None
) -> None:
    fusion = defined(D.BFloat16, mask, bias)
    given = draw([(2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8)], D.BFloat16)
    seen = draw([mask], seed=2)[0] > -0.5
    added = [] if bias is None else draw([(2, 1, 4, 5)], bias, seed=3)
    masks_to_biases(fusion)
    verify_fusion(fusion, after="masks_to_biases")
    op = attention_of(fusion)
    assert op.mask is None and op.bias is not None
    assert op.bias.dtype() is (D.BFloat16 if bias is None else bias)
    if bias is None:
        stored = [is_stored(axis) for axis in op.bias.domain.no_reductions]
        assert stored == [n > 1 for n in mask]
    expected = attend([t.double() for t in given], added=added[0] if added else None, mask=seen)
    for got, want in zip(evaluate_fusion(fusion, [*given, seen, *added]), expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)
    # A second run changes nothing.
    exprs = fusion.exprs
    masks_to_biases(fusion)
    assert fusion.exprs == exprs


@pytest.mark.finding("G1")
def test_what_memory_repeats_is_made_once() -> None:
    fusion = defined(D.BFloat16, WHOLE, None, are_known=True)
    mask = attention_of(fusion).mask
    assert mask is not None
    axes = mask.domain.no_reductions
    masks_to_biases(fusion, repeated={axes[1].number, axes[2].number})
    verify_fusion(fusion, after="masks_to_biases")
    bias = attention_of(fusion).bias
    assert bias is not None
    assert [is_stored(axis) for axis in bias.domain.no_reductions] == [True, False, False, True]
    given = draw([(2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8)], D.BFloat16)
    seen = (draw([(2, 1, 1, 5)], seed=2)[0] > -0.5).expand(WHOLE)
    expected = attend([t.double() for t in given], mask=seen)
    for got, want in zip(evaluate_fusion(fusion, [*given, seen]), expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)
