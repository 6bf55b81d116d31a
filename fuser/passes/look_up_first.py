"""Look up first, compute then: of a table that is computed element by element, only what is found.

A table has to lie in memory (`segment.py`), so what computes it would be a kernel of its own, and
write all of it:

    T2 = sub(T0 [n, v], T1 [n, 1])             T4 = takeAlongAxis(T0, T5, dim = 1)
    T3 = takeAlongAxis(T2, T5, dim = 1)   ->   T3 = sub(T4, T1)

Before: any fusion. After: no table that nothing else reads is a cast, sum, difference, product or
negative of one floating tensor and what is the same all along the looked-up axis. These cost less
than the memory that they spare, however often an element is found; NaN stays NaN.
"""

from __future__ import annotations

from fuser.ir.dtypes import is_floating
from fuser.ir.fusion import Fusion, TensorOp
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.ops.lookup import EmbeddingFwdOp, GatherOp, IndexSelectOp, LookupOp, TakeAlongAxisOp
from fuser.ir.ops.nodes import BinaryOp, CastOp, UnaryOp
from fuser.ir.tensor import TensorView
from fuser.ops import indexing

_KINDS = {UnaryOp: ("neg",), BinaryOp: ("add", "sub", "mul")}


def look_up_first(fusion: Fusion) -> None:
    """Rewrite the fusion in place."""
    is_done = False
    while not is_done:
        is_done = True
        for op in fusion.used_exprs():
            if not isinstance(op, LookupOp):
                continue
            made = fusion.definition(op.table)
            source = None if made is None else _source(fusion, op, made)
            if made is not None and source is not None:
                _swap(fusion, op, made, source)
                is_done = False


def _source(fusion: Fusion, op: LookupOp, made: TensorOp) -> TensorView | None:
    """Return the operand of a table's definition that a lookup may read instead, None for none."""
    table = op.table
    is_placed = table.mesh_is_user_set or bool(table.cut_lines)
    if is_placed or table in fusion.outputs or fusion.uses(table) != [op]:
        return None
    is_cheap = isinstance(made, CastOp) or getattr(made, "kind", "") in _KINDS.get(type(made), ())
    tensors = {v for v in made.inputs if isinstance(v, TensorView)}
    if not is_cheap or not all(is_floating(v.dtype()) for v in (table, *tensors)):
        return None
    along = {v for v in tensors if not v.domain.no_reductions[op.axis].is_broadcast}
    if len(along) != 1 or not _fits(op, tensors - along):
        return None
    return along.pop()


def _fits(op: LookupOp, others: set[TensorView]) -> bool:
    """Whether the result of a lookup meets the other operands as the table does."""
    if any(v.domain.no_reductions[op.axis].expanded is not None for v in others):
        return False
    match op:
        case IndexSelectOp() | TakeAlongAxisOp():
            return True
        case GatherOp():
            return not op.narrowed()
        case EmbeddingFwdOp():
            return not others
        case _:
            return False


def _swap(fusion: Fusion, op: LookupOp, made: TensorOp, source: TensorView) -> None:
    before = fusion.exprs
    with FusionGuard(fusion):
        found = _looked_up(op, source)
    lookups = [e.replace(where=op.where) for e in fusion.exprs[len(before) :]]
    fusion.exprs = before
    names = {source: found, op.table: op.out}
    last = made.map_values(lambda v: names.get(v, v) if isinstance(v, TensorView) else v)
    fusion.replace_expr(op, [*lookups, last])
    fusion.exprs = fusion.used_exprs()


def _looked_up(op: LookupOp, source: TensorView) -> TensorView:
    match op:
        case IndexSelectOp():
            return indexing.index_select(source, op.index, op.dim)
        case TakeAlongAxisOp():
            return indexing.take_along_axis(source, op.index, op.dim)
        case GatherOp():
            return indexing.gather(source, op.index, op.dim)
        case EmbeddingFwdOp():
            return indexing.embedding_fwd(op.index, source)
        case _:
            raise AssertionError(f"{op.name} of {source}")
