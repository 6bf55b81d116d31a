"""Remove broadcast-squeeze: a squeeze of axes that a broadcast has just inserted.

Before: squeeze(broadcast(x)). After: x itself, or one broadcast or one squeeze of x with the flags
that are left. Kernels then see no axes that nothing iterates.

    T1 = broadcast( T0, flags = {false, true} )
    T2 = squeeze( T1, flags = {false, true} )      ->   uses of T2 read T0
"""

from __future__ import annotations

from fuser.ir.fusion import Fusion, TensorOp
from fuser.ir.ops.nodes import BroadcastOp, ReshapeOp, SqueezeOp
from fuser.ir.tensor import TensorView


def remove_bcast_squeeze(fusion: Fusion) -> None:
    """Rewrite `fusion` in place."""
    for op in fusion.exprs:
        if not isinstance(op, SqueezeOp):
            continue
        definition = fusion.definition(op.inp)
        if isinstance(definition, BroadcastOp):
            new = _joined(definition, op)
            if isinstance(new, ReshapeOp) and is_replaceable(fusion, op.out):
                fusion.replace_uses(op.out, definition.inp)
                fusion.replace_expr(op, ())
            elif new is not None:
                if isinstance(new, ReshapeOp):
                    op.out.domain = op.out.domain.having(root=op.out.domain.logical_numbers)
                fusion.replace_expr(op, (new.replace(where=op.where),))
    fusion.exprs = fusion.used_exprs()


def is_replaceable(fusion: Fusion, tv: TensorView) -> bool:
    """Whether uses of `tv` may read another tensor: nothing outside the fusion knows it."""
    return tv not in fusion.outputs and not tv.mesh_is_user_set and not tv.domain.allocation


def _joined(first: BroadcastOp, second: SqueezeOp) -> TensorOp | None:
    """Return one op from `first.inp` to `second.out`, a reshape where nothing is left to do; None
    when it takes both kinds."""
    pairs = list(zip(first.flags, second.flags, strict=True))
    added = [new for new, gone in pairs if not gone]
    dropped = [gone for new, gone in pairs if not new]
    if any(added) and any(dropped):
        return None
    if any(added):
        return BroadcastOp(second.out, first.inp, flags=tuple(added))
    if any(dropped):
        return SqueezeOp(second.out, first.inp, flags=tuple(dropped))
    return ReshapeOp(second.out, first.inp)
