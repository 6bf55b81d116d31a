"""The ordered passes that run on a concretized fusion before it is distributed over devices and
divided into kernels.

In a concretized fusion, everything that depends on input sizes is decided (`concretize.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from fuser.ir import primitives
from fuser.ir.dtypes import COMPLEX_OF, DataType, is_floating
from fuser.ir.fusion import Alias, Fusion, TensorOp, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.ops.attention_ops import SdpaFwdOp
from fuser.ir.ops.lookup import EmbeddingFwdOp, GatherOp, IndexSelectOp, LookupOp, TakeAlongAxisOp
from fuser.ir.ops.nodes import (
    BinaryOp,
    BroadcastOp,
    CastOp,
    LoadStoreOp,
    ReshapeOp,
    SqueezeOp,
    UnaryOp,
)
from fuser.ir.verify import verify_fusion
from fuser.ops import indexing
from fuser.ops.elementwise import cast
from fuser.ops.reference.meaning import REDUCING
from fuser.ops.resize import slice as slice_axes
from fuser.ops.rows import ROWS

# ---------------------------------------------------------------------------------- look_up_first
_KINDS = {UnaryOp: ("neg",), BinaryOp: ("add", "sub", "mul")}


def look_up_first(fusion: Fusion) -> None:
    """Moves a lookup before the elementwise ops that compute its table.

    A generated kernel reads the table of a lookup from memory. A separate kernel would therefore
    compute and write the whole table, although the lookup reads only some elements:

        T2 = sub(T0 [n, v], T1 [n, 1])             T4 = takeAlongAxis(T0, T5, dim = 1)
        T3 = takeAlongAxis(T2, T5, dim = 1)   ->   T3 = sub(T4, T1)

    Before: any fusion. After: no lookup can be moved any further. A lookup is moved if nothing else
    reads its table, and if the table is the result of a cast, sum, difference, product or negation.
    Only one operand of that op, of a floating-point dtype, may have the looked-up axis; the others
    are constant along this axis. These ops cost less than the memory traffic that they save, even
    if elements are looked up repeatedly. NaN stays NaN.
    """
    is_done = False
    while not is_done:
        is_done = True
        for op in fusion.used_exprs():
            if not isinstance(op, LookupOp):
                continue
            made = fusion.definition(op.table)
            source = None if made is None else _source(fusion, op, made)
            if made is not None and source is not None:
                _looked_up_first(fusion, op, made, source)
                is_done = False


def _source(fusion: Fusion, op: LookupOp, made: TensorOp) -> TensorView | None:
    """Returns the operand of `made` from which the lookup `op` can read directly.

    `made` is the op that computes the lookup's table. The caller exchanges the two ops: the lookup
    then reads this operand, and `made` computes only the elements that are looked up. Returns None
    if the two ops cannot be exchanged.
    """
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
    """Returns whether the lookup `op` can be exchanged with the elementwise op that computes its
    table: whether shapes stay compatible if that op reads the result of the lookup instead.

    `others` are the operands of the elementwise op that are not looked up.
    """
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


def _looked_up_first(fusion: Fusion, op: LookupOp, made: TensorOp, source: TensorView) -> None:
    """Replaces the lookup `op` by a lookup of `source`, followed by a copy of `made` that reads the
    result of the new lookup.

    `made` is the elementwise op that computed the table of `op` from `source`.
    """
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
            raise AssertionError(
                "internal error: the optimization that moves lookups first does not support the "
                "op "
                f"{op.name} of {source}. Please report this definition"
            )


# ------------------------------------------------------------------------------------- view_first
_ELEMENTWISE = (CastOp, UnaryOp, BinaryOp, LoadStoreOp)


def view_first(fusion: Fusion) -> None:
    """Moves reshapes before the elementwise ops on an input, if a reduction reads the result.

    Reshaping an input costs nothing, because the result is a view (`view_ops.py`). If the reshape
    comes after a cast, the axes of the reduction are not axes of the input. A schedule then knows
    neither their order in memory nor their alignment. In group norm:

        T1 = __bfloat2float(T0 [n, c, h, w])          T3 = reshape(T0) [n, g, c / g * h * w]
        T2 = reshape(T1) [n, g, c / g * h * w]   ->   T2 = __bfloat2float(T3)
        .. = Welford(T2)                              .. = Welford(T2)

    Before: any fusion. After: a reshape whose result reaches a reduction does not read the result
    of elementwise ops on an input, unless other ops also read that result. Inputs that an in-place
    update overwrites are excluded, because their views would show the new values.
    """
    if not any(isinstance(op, ReshapeOp) for op in fusion.exprs):
        return
    reduced = _read_by_reductions(fusion)
    for op in fusion.exprs:
        if not isinstance(op, ReshapeOp) or op.out not in reduced:
            continue
        while (made := _computed(fusion, op)) is not None:
            op = _viewed_first(fusion, op, made)
    fusion.exprs = fusion.used_exprs()


def _read_by_reductions(fusion: Fusion) -> set[TensorView]:
    """Returns the tensors on which the result of a reduction depends."""
    found: set[TensorView] = set()
    for op in reversed(fusion.exprs):
        if isinstance(op, REDUCING) or any(out in found for out in op.outputs):
            found.update(v for v in op.inputs if isinstance(v, TensorView))
    return found


def _computed(fusion: Fusion, op: ReshapeOp) -> TensorOp | None:
    """Returns the elementwise op that computes the operand of the reshape `op`.

    Returns None unless the two ops can be exchanged, and the reshape then becomes a view of an
    input.
    """
    tv = op.inp
    if any(t.mesh_is_user_set or t.cut_lines or t.domain.allocation for t in (tv, op.out)):
        return None
    made = fusion.definition(tv)
    if tv in fusion.outputs or fusion.uses(tv) != [op] or not isinstance(made, _ELEMENTWISE):
        return None
    return made if _begins_with_input(fusion, tv) else None


def _begins_with_input(fusion: Fusion, tv: TensorView) -> bool:
    """Returns whether a chain of unary ops computes `tv` from an input that no in-place update
    overwrites.
    """
    while isinstance(made := fusion.definition(tv), _ELEMENTWISE):
        tensors = [v for v in made.inputs if isinstance(v, TensorView)]
        is_permuted = isinstance(made, LoadStoreOp) and bool(tv.domain.root)
        if len(tensors) != 1 or tensors[0].is_cpu_scalar or is_permuted:
            return False
        tv = tensors[0]
    return tv in fusion.inputs and not any(alias.into is tv for alias in fusion.aliases)


def _viewed_first(fusion: Fusion, op: ReshapeOp, made: TensorOp) -> ReshapeOp:
    """Exchanges a reshape and the op `made` that computes its operand; returns the new reshape."""
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


# ------------------------------------------------------------------------------ consecutive_casts
_D = DataType
# dtype -> the real dtypes that represent all its values.
_REAL: dict[DataType, frozenset[DataType]] = {
    _D.Bool: frozenset({_D.Int32, _D.Int, _D.Index, _D.Half, _D.BFloat16, _D.Float, _D.Double}),
    _D.Int32: frozenset({_D.Int, _D.Index, _D.Double}),
    _D.Int: frozenset({_D.Index}),
    _D.Index: frozenset({_D.Int}),
    _D.Half: frozenset({_D.Float, _D.Double}),
    _D.BFloat16: frozenset({_D.Float, _D.Double}),
    _D.Float8_e4m3fn: frozenset({_D.Half, _D.BFloat16, _D.Float, _D.Double}),
    _D.Float8_e5m2: frozenset({_D.Half, _D.BFloat16, _D.Float, _D.Double}),
    _D.Float8_e8m0fnu: frozenset({_D.BFloat16, _D.Float, _D.Double}),
    _D.Float: frozenset({_D.Double}),
    _D.Double: frozenset(),
}
# dtype -> the dtypes that represent all its values, complex ones included.
_HOLDS: dict[DataType, frozenset[DataType]] = {
    **{
        d: held | {COMPLEX_OF[x] for x in {d} | held if x in COMPLEX_OF}
        for d, held in _REAL.items()
    },
    _D.ComplexFloat: frozenset({_D.ComplexDouble}),
    _D.ComplexDouble: frozenset(),
}


def consecutive_casts(fusion: Fusion) -> None:
    """Removes a cast that does not round if its result is cast again.

    Before: cast(cast(x, A), B), where A represents every value of x's dtype. After: cast(x, B), or
    x itself if B is x's dtype. If the first cast rounds, both stay.

        T1 = __half2float(T0)
        T2 = __float2half(T1)      ->   uses of T2 read T0
    """
    for op in fusion.exprs:
        if not isinstance(op, CastOp):
            continue
        source = op.inp
        while isinstance(definition := fusion.definition(source), CastOp):
            if source.dtype() not in _HOLDS[definition.inp.dtype()]:
                break
            source = definition.inp
        if source is op.inp:
            continue
        if source.dtype() is op.out.dtype() and is_replaceable(fusion, op.out):
            fusion.replace_uses(op.out, source)
            fusion.replace_expr(op, ())
            continue
        new: TensorOp = (
            LoadStoreOp(op.out, source)
            if source.dtype() is op.out.dtype()
            else CastOp(op.out, source)
        )
        fusion.replace_expr(op, (new.replace(where=op.where),))
    fusion.exprs = fusion.used_exprs()


# --------------------------------------------------------------------------- remove_bcast_squeeze
def remove_bcast_squeeze(fusion: Fusion) -> None:
    """Removes a squeeze of axes that a broadcast has just inserted.

    Before: squeeze(broadcast(x)). After: x itself, or one broadcast or one squeeze of x for the
    axes that are only inserted or only removed. Kernels then have no loops over axes that are
    inserted and removed again.

        T1 = broadcast( T0, flags = {false, true} )
        T2 = squeeze( T1, flags = {false, true} )      ->   uses of T2 read T0
    """
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
    """Returns whether ops that read `tv` may read another tensor with equal values instead.

    Returns False if `tv` is an output, or if the user declared its placement on devices or its
    layout.
    """
    return tv not in fusion.outputs and not tv.mesh_is_user_set and not tv.domain.allocation


def _joined(first: BroadcastOp, second: SqueezeOp) -> TensorOp | None:
    """Returns one op from `first.inp` to `second.out` that replaces a broadcast and a squeeze.

    It is a broadcast, a squeeze, or a reshape that changes nothing if every inserted axis is
    removed again. Returns None if both a broadcast and a squeeze would remain.
    """
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


# ------------------------------------------------------------------------------- separate_updates
def separate_updates(fusion: Fusion) -> None:
    """Adds a copy of each input that is itself written into another input.

    Before: the tensor that an in-place update writes may be a fusion input. After: it is a copy
    (`set`) of that input, so an op reads the input's old value before another update overwrites it.
    Host programs are built on this assumption. In the example, `T0 -> T1` is an in-place update
    that writes T0 into T1.

        inputs T0, T1; T0 -> T1, T1 -> T0      T2 = set(T0); T3 = set(T1); T2 -> T1, T3 -> T0
    """
    for alias in fusion.aliases:
        if alias.out in fusion.inputs and alias.out is not alias.into:
            axes = [fusion.clone_axis(a) for a in alias.out.domain.no_reductions]
            value = fusion.new_tensor(axes, alias.out.dtype(), mesh=alias.out.mesh)
            write_instead(fusion, alias, value)


def write_instead(fusion: Fusion, alias: Alias, value: TensorView) -> None:
    """Changes the in-place update `alias` so that the new tensor `value` is written into the input.

    Before, another tensor was written. The function adds the op that copies this tensor to `value`.
    """
    op = LoadStoreOp(value, alias.out)
    definition = fusion.definition(alias.out)
    fusion.insert_after(definition, [op.replace(where=definition.where if definition else "")])
    value.memory = alias.into.memory
    shared = [a for a in fusion.aliases if a.out is alias.out]
    at = fusion.aliases.index(alias)
    if len(shared) > 1 or (alias.out in fusion.inputs and not alias.hidden):
        # The output stays: it updates other inputs, too, or is returned to the caller.
        fusion.aliases[at] = Alias(value, alias.into, where=alias.where)
        fusion.outputs.append(value)
        return
    fusion.aliases[at] = replace(alias, out=value)
    fusion.outputs = [value if out is alias.out else out for out in fusion.outputs]


# ---------------------------------------------------------------------------------- remove_unused
def remove_unused(fusion: Fusion) -> None:
    """Removes ops on which no output depends.

    Before: any fusion. After: some output depends on every op. Later passes and the division into
    kernels rely on this.
    """
    fusion.exprs = fusion.used_exprs()


# ----------------------------------------------------------------------
# The ordered passes that run on a concretized fusion before it is sharded and segmented.

PASSES: tuple[tuple[str, Callable[[Fusion], None]], ...] = (
    # First, because it adds uses, which other passes count.
    ("separate_updates", separate_updates),
    # Early, so that other passes do not count uses by unused ops.
    ("remove_unused", remove_unused),
    ("remove_bcast_squeeze", remove_bcast_squeeze),
    # After views between two casts were removed.
    ("consecutive_casts", consecutive_casts),
    # After unused ops were removed, which would count as readers of a table.
    ("look_up_first", look_up_first),
    # After casts between a reshape and an input were removed.
    ("view_first", view_first),
)


def run_passes(fusion: Fusion, *, repeated: Collection[int] = ()) -> None:
    """Runs all passes in place, and verifies the fusion after each pass.

    `repeated` has the numbers (ids) of the input axes that have stride 0 for the current inputs, so
    that memory holds only one element along these axes.
    """
    # First, so that the other passes also rewrite the ops that it adds.
    masked = ("masks_to_biases", partial(masks_to_biases, repeated=repeated))
    for name, run in (masked, *PASSES):
        run(fusion)
        verify_fusion(fusion, after=name)


def masks_to_biases(fusion: Fusion, *, repeated: Collection[int] = ()) -> None:
    """Replaces each boolean mask of attention by an additive bias that a kernel computes.

        T4 = sdpa(T0, T1, T2, mask = T3 [n, 1, l, s])   ->   T5 [n, 1, l, s] = where(T3, 0, -inf)
                                                             T4 = sdpa(T0, T1, T2, bias = T5)

    Without this pass, torch would expand the mask to all heads. Before: any fusion. After: no
    attention reads a mask.

    A bias has as few elements as its mask, also along input axes of stride 0, where memory holds
    only one element. `repeated` has the numbers (ids) of these axes. The dtype of the new bias is
    that of an existing bias, or else that of the query.
    """
    for op in fusion.exprs:
        if isinstance(op, SdpaFwdOp) and op.mask is not None:
            before = fusion.exprs
            with FusionGuard(fusion):
                bias = _bias_of_mask(op, op.mask, repeated)
            made = [new.replace(where=op.where) for new in fusion.exprs[len(before) :]]
            fusion.exprs = before
            fusion.replace_expr(op, [*made, op.replace(bias=bias, mask=None)])


def _bias_of_mask(op: SdpaFwdOp, mask: TensorView, repeated: Collection[int]) -> TensorView:
    """Appends ops that compute the additive bias which replaces the boolean mask of the attention
    `op`, and returns the bias.

    If `op` has a bias already, its values are used where the mask is true. `repeated` has the
    numbers (ids) of axes of stride 0, where the new bias needs only one element.
    """
    axes = mask.domain.no_reductions
    if op.bias is None and any(axis.number in repeated for axis in axes):
        ends = [1 if axis.number in repeated else axis.size for axis in axes]
        mask = slice_axes(mask, [0] * len(axes), ends)
    made = ROWS["where"].function(mask, 0.0 if op.bias is None else op.bias, -math.inf)
    return cast(made, (op.query if op.bias is None else op.bias).dtype())
