"""The ordered passes that run on a concretized fusion before it is sharded and segmented."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial

from fuser.ir.fusion import Fusion
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.ops.attention_ops import SdpaFwdOp
from fuser.ir.tensor import TensorView
from fuser.ir.verify import verify_fusion
from fuser.ops.elementwise import cast
from fuser.ops.resize import slice as slice_axes
from fuser.ops.rows import ROWS
from fuser.passes.consecutive_casts import consecutive_casts
from fuser.passes.look_up_first import look_up_first
from fuser.passes.remove_bcast_squeeze import remove_bcast_squeeze
from fuser.passes.remove_unused import remove_unused
from fuser.passes.separate_updates import separate_updates
from fuser.passes.view_first import view_first

PASSES: tuple[tuple[str, Callable[[Fusion], None]], ...] = (
    # Before uses are counted: it adds some.
    ("separate_updates", separate_updates),
    # Early, so that the others do not count uses that do not matter.
    ("remove_unused", remove_unused),
    ("remove_bcast_squeeze", remove_bcast_squeeze),
    # After the views are gone that stood between two casts.
    ("consecutive_casts", consecutive_casts),
    # After unused ops are gone, which would count as readers of a table.
    ("look_up_first", look_up_first),
    # After casts are gone that would stand between a reshape and an input.
    ("view_first", view_first),
)


def run_passes(fusion: Fusion, *, repeated: Collection[int] = ()) -> None:
    """Run all passes in place, verifying the fusion after each; `repeated` are the axes of inputs,
    by number, of which memory holds one element for this input class."""
    # First, so that the others see its kernels.
    masked = ("masks_to_biases", partial(masks_to_biases, repeated=repeated))
    for name, run in (masked, *PASSES):
        run(fusion)
        verify_fusion(fusion, after=name)


def masks_to_biases(fusion: Fusion, *, repeated: Collection[int] = ()) -> None:
    """Makes a bias of each mask of attention: a kernel computes it, and torch's kernels add it.

        T4 = sdpa(T0, T1, T2, mask = T3 [n, 1, l, s])   ->   T5 [n, 1, l, s] = where(T3, 0, -inf)
                                                             T4 = sdpa(T0, T1, T2, bias = T5)

    Torch would make the bias of all heads, element by element. Before: any fusion. After: no
    attention reads a mask. A bias has as few elements as its mask, also where memory repeats one
    element of an input along an axis; it is of the query's dtype, or of the dtype of the bias that
    was given. `repeated` are the axes of inputs, by number, of which memory holds one element for
    this input class.
    """
    for op in fusion.exprs:
        if isinstance(op, SdpaFwdOp) and op.mask is not None:
            before = fusion.exprs
            with FusionGuard(fusion):
                bias = _bias_of_mask(op, op.mask, repeated)
            made = [one.replace(where=op.where) for one in fusion.exprs[len(before) :]]
            fusion.exprs = before
            fusion.replace_expr(op, [*made, op.replace(bias=bias, mask=None)])


def _bias_of_mask(op: SdpaFwdOp, mask: TensorView, repeated: Collection[int]) -> TensorView:
    """Appends the ops that compute the bias of a mask, and of the bias that there is."""
    axes = mask.domain.no_reductions
    if op.bias is None and any(axis.number in repeated for axis in axes):
        ends = [1 if axis.number in repeated else axis.size for axis in axes]
        mask = slice_axes(mask, [0] * len(axes), ends)
    made = ROWS["where"].function(mask, 0.0 if op.bias is None else op.bias, -math.inf)
    return cast(made, (op.query if op.bias is None else op.bias).dtype())
