"""View first, compute then: a reshape that a reduction reads becomes a view of an input.

Memory holds an input as it is, so reshaping it costs nothing (`views.py`). Behind a cast, the axes
of the reduction would not be those of the input: a scheduler would know neither their order in
memory nor where words begin. Of group norm:

    T1 = __bfloat2float(T0 [n, c, h, w])          T3 = reshape(T0) [n, g, c / g * h * w]
    T2 = reshape(T1) [n, g, c / g * h * w]   ->   T2 = __bfloat2float(T3)
    .. = Welford(T2)                              .. = Welford(T2)

Before: any fusion. After: no reshape below which a reduction is reads what only it reads and one
op computes of an input, element by element. That no update writes into the input is required: its
views have its new values.
"""

from __future__ import annotations

from fuser.ir import primitives
from fuser.ir.fusion import Fusion, TensorOp
from fuser.ir.ops.nodes import BinaryOp, CastOp, LoadStoreOp, ReshapeOp, UnaryOp
from fuser.ir.tensor import TensorView
from fuser.ops.reference.meaning import REDUCING

_ELEMENTWISE = (CastOp, UnaryOp, BinaryOp, LoadStoreOp)


def view_first(fusion: Fusion) -> None:
    """Rewrite the fusion in place."""
    if not any(isinstance(op, ReshapeOp) for op in fusion.exprs):
        return
    reduced = _read_by_reductions(fusion)
    for op in fusion.exprs:
        if not isinstance(op, ReshapeOp) or op.out not in reduced:
            continue
        while (made := _computed(fusion, op)) is not None:
            op = _swap(fusion, op, made)
    fusion.exprs = fusion.used_exprs()


def _read_by_reductions(fusion: Fusion) -> set[TensorView]:
    """Return the tensors that reductions read, and those that these are computed from."""
    found: set[TensorView] = set()
    for op in reversed(fusion.exprs):
        if isinstance(op, REDUCING) or any(out in found for out in op.outputs):
            found.update(v for v in op.inputs if isinstance(v, TensorView))
    return found


def _computed(fusion: Fusion, op: ReshapeOp) -> TensorOp | None:
    """Return the op that computes what a reshape reads, where it can come after."""
    tv = op.inp
    if any(t.mesh_is_user_set or t.cut_lines or t.domain.allocation for t in (tv, op.out)):
        return None
    made = fusion.definition(tv)
    if tv in fusion.outputs or fusion.uses(tv) != [op] or not isinstance(made, _ELEMENTWISE):
        return None
    return made if _begins_with_input(fusion, tv) else None


def _begins_with_input(fusion: Fusion, tv: TensorView) -> bool:
    """Whether ops of one tensor each compute a tensor from an input that nothing overwrites."""
    while isinstance(made := fusion.definition(tv), _ELEMENTWISE):
        tensors = [v for v in made.inputs if isinstance(v, TensorView)]
        is_permuted = isinstance(made, LoadStoreOp) and bool(tv.domain.root)
        if len(tensors) != 1 or tensors[0].is_cpu_scalar or is_permuted:
            return False
        tv = tensors[0]
    return tv in fusion.inputs and not any(alias.into is tv for alias in fusion.aliases)


def _swap(fusion: Fusion, op: ReshapeOp, made: TensorOp) -> ReshapeOp:
    """Let a reshape read what `made` reads, and `made` give the reshape's result; return the new
    reshape."""
    (source,) = (v for v in made.inputs if isinstance(v, TensorView))
    named = primitives.cache_before(op.out)
    moved, copy = fusion.definition(named), fusion.definition(op.out)
    assert moved is not None and copy is not None
    view = fusion.new_tensor(named.domain, source.dtype(), mesh=named.mesh)
    reshape = ReshapeOp(view, source).replace(where=op.where)
    names = {source: view, op.inp: op.out}
    last = made.map_values(lambda v: names.get(v, v) if isinstance(v, TensorView) else v)
    fusion.replace_expr(moved, [reshape])
    fusion.replace_expr(copy, [last])
    fusion.replace_expr(made, ())
    return reshape
