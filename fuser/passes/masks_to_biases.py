"""A mask of attention becomes a bias: a kernel computes it, and torch's kernels add it.

    T4 = sdpa(T0, T1, T2, mask = T3 [n, 1, l, s])   ->   T5 [n, 1, l, s] = where(T3, 0, -inf)
                                                         T4 = sdpa(T0, T1, T2, bias = T5)

Torch would make the bias of all heads, element by element. Before: any fusion. After: no attention
reads a mask. A bias has as few elements as its mask, also where memory repeats one element of an
input along an axis; it is of the query's dtype, or of the dtype of the bias that was given.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from fuser.ir.attention import SdpaFwdOp
from fuser.ir.fusion import Fusion
from fuser.ir.guard import FusionGuard
from fuser.ir.tensor import TensorView
from fuser.ops.elementwise import cast
from fuser.ops.resize import slice as slice_axes
from fuser.ops.rows import ROWS


def masks_to_biases(fusion: Fusion, *, repeated: Collection[int] = ()) -> None:
    """Rewrite the fusion in place; `repeated` are the axes of inputs, by number, of which memory
    holds one element for this input class."""
    for op in fusion.exprs:
        if isinstance(op, SdpaFwdOp) and op.mask is not None:
            before = fusion.exprs
            with FusionGuard(fusion):
                bias = _bias(op, op.mask, repeated)
            made = [one.replace(where=op.where) for one in fusion.exprs[len(before) :]]
            fusion.exprs = before
            fusion.replace_expr(op, [*made, op.replace(bias=bias, mask=None)])


def _bias(op: SdpaFwdOp, mask: TensorView, repeated: Collection[int]) -> TensorView:
    """Append what makes the bias of a mask, and of the bias that there is."""
    axes = mask.domain.no_reductions
    if op.bias is None and any(axis.number in repeated for axis in axes):
        ends = [1 if axis.number in repeated else axis.size for axis in axes]
        mask = slice_axes(mask, [0] * len(axes), ends)
    made = ROWS["where"].function(mask, 0.0 if op.bias is None else op.bias, -math.inf)
    return cast(made, (op.query if op.bias is None else op.bias).dtype())
