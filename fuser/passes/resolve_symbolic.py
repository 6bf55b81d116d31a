"""Resolves `?` axes: axes of which it is undecided whether they are ordinary (iteration) axes or
broadcast axes of size 1.

Before: some reshapes have `?` axes, because their sizes are symbols and it is unknown which axes
they merge and split. Slices and pads have `?` axes that may have size 1. Tensors computed from such
results have `?` axes, too.

After: every axis is an iteration, a broadcast or a reduction. Tensors and axes keep their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from fuser.ir.axis_graph import mapped_axes, tensor_operands
from fuser.ir.binding import size_of
from fuser.ir.domain.axis_path import Rules, SizeRules, forward, replay
from fuser.ir.domain.tensor_domain import (
    IterDomain,
    MergeTransform,
    Resize,
    SplitTransform,
    Swizzle1D,
    TensorDomain,
    merged_extent,
)
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.ops import nodes
from fuser.ir.ops.lookup import GatherOp
from fuser.ir.ops.nodes import PadOp, SliceOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Number, Scalar, Symbol
from fuser.ir.types import IterType
from fuser.ops.building import join_axes, unexpanded
from fuser.ops.reshaping import ReshapePlan, plan_reshape, transformed_domain, undecided_domain
from fuser.support.errors import InputError

# The values of symbols. None: no size is known, and sizes are not compared.
Values = Mapping[Symbol, Number] | None


def is_undecided(op: TensorOp) -> bool:
    """Returns whether the op is a reshape for which only the input sizes decide which axes it
    merges and splits.

    The result of such a reshape has `?` axes: axes that may turn out to have size 1 and be
    broadcasts.
    """
    if not isinstance(op, nodes.ReshapeOp):
        return False
    # A tensor without axes has no root axes.
    return op.out.domain.is_undecided or not op.out.domain.root_numbers


def resized_axes(op: TensorOp) -> tuple[IterDomain, ...]:
    """Returns the axes of a slice's or pad's result that may have size 1.

    Such an axis becomes a broadcast axis if the size is 1, and otherwise an iteration axis. For
    other ops, returns ().
    """
    if not isinstance(op, SliceOp | PadOp):
        return ()
    domain = op.out.domain
    outs = domain.states(t.out for t in domain.transforms if isinstance(t, Resize))
    return tuple(a for a in outs if a.kind is IterType.symbolic)


def deciding_sizes(op: TensorOp) -> tuple[Scalar, ...]:
    """Returns the sizes that decide whether axes of the op's result are broadcasts: an axis of size
    1 becomes a broadcast.

    For a reshape, returns (), because the sizes decide more: which axes it merges and splits
    (`ReshapePlan`).
    """
    if isinstance(op, nodes.ExpandOp):
        pairs = zip(op.inp.domain.no_reductions, op.shape, strict=True)
        named = (
            size for a, size in pairs if a.kind is IterType.symbolic and sc.int_value(size) is None
        )
        return (*named, *(x for a, size in _open_axes(op) for x in (a.size, size)))
    return tuple(a.size for a in resized_axes(op))


def _open_axes(op: TensorOp) -> list[tuple[IterDomain, Scalar]]:
    """Returns the axes of an expand's operand that may turn out to have size 1, each with the size
    to which it is expanded.

    If such an axis has size 1, the expand repeats it; otherwise its size must be the wanted size
    already.
    """
    if not isinstance(op, nodes.ExpandOp):
        return []
    axes = op.inp.domain.no_reductions
    return [
        (a, size)
        for a, out, size in zip(axes, op.out.domain.maybe_root, op.shape, strict=True)
        if out.kind is IterType.symbolic and a.kind is IterType.iteration
    ]


def iterate_resized(fusion: Fusion) -> None:
    """Turns axes of the results of slice and pad ops into iteration axes, in place: those whose
    size may be 1, depending on the inputs.

    Otherwise, such an axis would be a broadcast axis for some input sizes and an iteration axis for
    others. But a kernel that serves several sets of sizes needs one kind for all of them. An
    iteration axis of size 1 is not repeated to match a longer one: an op whose operands have
    different sizes there raises an error.
    """
    if any(resized_axes(op) or _open_axes(op) for op in fusion.used_exprs()):
        resolve_symbolic(fusion, iter(()), None)


def resolve_symbolic(fusion: Fusion, plans: Iterator[ReshapePlan], values: Values) -> None:
    """Decides for all `?` axes of `fusion`, in place, whether they are iteration or broadcast axes.

    `plans` yields, for each reshape with `?` axes in program order, which axes it merges, splits,
    adds and removes. Reshapes that no output needs have no plan. `values` has the sizes. If
    `values` is None, `?` axes of slices and pads become iteration axes.
    """
    exprs: list[TensorOp] = []
    changed: set[TensorView] = set()
    for op in fusion.used_exprs():
        is_stale = any(v in changed for v in op.inputs if isinstance(v, TensorView))
        if is_undecided(op) and values is not None:
            assert isinstance(op, nodes.ReshapeOp)
            exprs += (e.replace(where=op.where) for e in _decide(fusion, op, next(plans), values))
            changed.add(op.out)
            continue
        if isinstance(op, nodes.ExpandOp):
            made, source = _with_broadcasts(fusion, op, values)
            exprs += (e.replace(where=op.where) for e in made)
            is_stale = is_stale or bool(_open_axes(op))
            op = op.map_values(lambda v, op=op, source=source: source if v is op.inp else v)
        if is_stale or resized_axes(op):
            for out in op.outputs:
                changed.add(out)
                states = _root_states(fusion, op, out, values)
                out.domain = _updated(out.domain, states, values)
        exprs.append(op)
    fusion.exprs = exprs


# ------------------------------------------------------------------ undecided reshapes
def _decide(
    fusion: Fusion, op: nodes.ReshapeOp, plan: ReshapePlan, values: Values
) -> list[TensorOp]:
    """Returns the squeeze, reshape and broadcast ops that replace a reshape with `?` axes (axes
    that may turn out to be broadcasts).

    `plan` says which axes are removed, merged, split and added, and `values` has the sizes. If the
    tensor has no elements, the reshape stays. Axes of size 1 of the result then become broadcast
    axes, and all others iteration axes.
    """
    out = op.out
    if plan.is_empty:
        states = [
            replace(a, kind=IterType.broadcast, extent=sc.ONE)
            if q in plan.added
            else replace(a, kind=IterType.iteration)
            for q, a in enumerate(out.domain.logical)
        ]
        out.domain = _updated(out.domain.having(root=()), states, values)
        return [op]
    exprs: list[TensorOp] = []
    source = op.inp
    is_kept = all(group.is_kept for group in plan.groups)
    sizes = [a.extent for a in out.domain.logical]
    if plan.squeezed and is_kept and not plan.added:
        axes = [source.domain.no_reductions[g.ins[0]] for g in plan.groups]
        _unify(fusion, zip(axes, sizes, strict=True), values)
        states = [_like(a, axis) for a, axis in zip(out.domain.logical, axes, strict=True)]
        out.domain = _updated(out.domain.having(root=()), states, values)
        return [nodes.SqueezeOp(out, source, flags=_squeezed_flags(source, plan))]
    if plan.squeezed:
        source = _squeezed(fusion, source, plan, exprs)
    kept = [p for p in range(op.inp.ndim) if p not in plan.squeezed]
    groups = [([kept.index(p) for p in g.ins], [sizes[q] for q in g.outs]) for g in plan.groups]
    targets = [out.domain.logical[q] for g in plan.groups for q in g.outs]
    named = targets if not plan.added else []
    domain = _grouped_domain(fusion, source, groups, named, values)
    if not plan.added:
        _define(out, domain, values)
        exprs.append(nodes.ReshapeOp(out, source))
        return exprs
    middle = source
    if not is_kept:
        middle = fusion.new_tensor(domain, out.dtype(), mesh=out.mesh)
        exprs.append(nodes.ReshapeOp(middle, source))
    flags = tuple(q in plan.added for q in range(len(sizes)))
    sources = iter(domain.logical)
    states = [
        replace(a, kind=IterType.broadcast, extent=sc.ONE, rfactor=False)
        if new
        else _like(a, next(sources))
        for a, new in zip(out.domain.logical, flags, strict=True)
    ]
    out.domain = _updated(out.domain.having(root=()), states, values)
    exprs.append(nodes.BroadcastOp(out, middle, flags=flags))
    return exprs


def _squeezed(
    fusion: Fusion,
    tv: TensorView,
    plan: ReshapePlan,
    exprs: list[TensorOp],
) -> TensorView:
    axes, flags = tv.domain.no_reductions, _squeezed_flags(tv, plan)
    kept = [fusion.clone_axis(a) for a, gone in zip(axes, flags, strict=True) if not gone]
    out = fusion.new_tensor(kept, tv.dtype(), mesh=tv.mesh)
    exprs.append(nodes.SqueezeOp(out, tv, flags=flags))
    return out


def _squeezed_flags(tv: TensorView, plan: ReshapePlan) -> tuple[bool, ...]:
    return tuple(p in plan.squeezed for p in range(tv.ndim))


def _unify(fusion: Fusion, pairs: Iterable[tuple[IterDomain, Scalar]], values: Values) -> None:
    """Records that axes which a reshape keeps have equal sizes in its operand and in its result.

    `pairs` has each such axis of the operand, with the size that the reshape declares for the
    result. A pair is ignored if the two sizes differ with `values`.
    """
    for axis, size in pairs:
        if _size(axis.size, values) == _size(size, values):
            fusion.unify_extents(axis.size, size)


def _grouped_domain(
    fusion: Fusion,
    source: TensorView,
    groups: Sequence[tuple[Sequence[int], Sequence[Scalar]]],
    named: Sequence[IterDomain],
    values: Values,
) -> TensorDomain:
    """Returns the axes of a reshape's result, with the merges and splits that derive them from the
    axes of the operand `source`.

    `values` has the sizes. Each entry of `groups` has the positions of operand axes, and the sizes
    of the result axes into which they are reshaped. If `named` is not empty, the axes of the result
    get the numbers (ids) of its entries.
    """
    root = [fusion.clone_axis(a) for a in source.domain.no_reductions]
    at = 0
    for ins, sizes in groups:
        if len(ins) == len(sizes) == 1:
            axis = root[ins[0]]
            _unify(fusion, [(axis, sizes[0])], values)
            if named:
                root[ins[0]] = replace(axis, number=named[at].number)
        at += len(sizes)
    return transformed_domain(fusion, root, groups, named=named)


def _define(out: TensorView, domain: TensorDomain, values: Values) -> None:
    """Gives `out` the axes of `domain`, and the merges and splits between them.

    The splits and merges by which the loops of `out` were scheduled before are applied again.
    """
    old = out.domain
    whole = old.having(
        root=domain.root_numbers,
        logical=domain.logical_numbers,
        transforms=(*domain.transforms, *old.transforms),
        axes=(
            replace(a, ptype=old.axes[n].ptype if n in old.axes else a.ptype)
            for n, a in domain.axes.items()
        ),
    )
    out.domain = _updated(whole, list(domain.root), values)


def _with_broadcasts(
    fusion: Fusion, op: nodes.ExpandOp, values: Values
) -> tuple[list[TensorOp], TensorView]:
    """Returns ops that turn the axes of size 1 of an expand's operand into broadcast axes, and
    their result, which is the new operand.

    An expand can repeat only broadcast axes. The ops are two reshapes: the first merges all axes,
    and the second splits the merged axis again. The result of the second has broadcast axes where
    the size is 1. Returns no ops if no axis with size 1 is expanded.
    """
    inp, sizes = op.inp, [a.size for a in op.inp.domain.no_reductions]
    spread = (_size(a.size, values) == 1 != _size(size, values) for a, size in _open_axes(op))
    if values is None or not any(spread):
        return [], inp
    exprs: list[TensorOp] = []
    flat = inp
    if len(sizes) > 1:
        axes = [fusion.clone_axis(a) for a in inp.domain.no_reductions]
        groups = [(range(len(sizes)), [sc.product(sizes)])]
        domain = transformed_domain(fusion, axes, groups)
        flat = fusion.new_tensor(domain, inp.dtype(), mesh=inp.mesh)
        exprs.append(nodes.ReshapeOp(flat, inp))
    out = fusion.new_tensor(undecided_domain(fusion, flat, sizes), inp.dtype(), mesh=inp.mesh)
    counts = [size_of(x, values) for x in sizes]
    outs = [sc.const(n) for n in counts]
    plan = plan_reshape([sc.const(prod(counts))], outs, [False])
    assert plan is not None, f"{op}: one axis is split into any sizes of its product"
    return [*exprs, *_decide(fusion, nodes.ReshapeOp(out, flat), plan, values)], out


# ------------------------------------------------------------------ downstream
def _root_states(fusion: Fusion, op: TensorOp, out: TensorView, values: Values) -> list[IterDomain]:
    """Returns the axes that `op` computes for the result `out`, with kinds and sizes that follow
    from the operands' axes.

    These are the root axes: the axes before a reshape derives others from them.
    """
    columns: dict[int, list[tuple[TensorView, IterDomain]]] = {}
    for index, tv in tensor_operands(op):
        for source, target in mapped_axes(op, index, out):
            columns.setdefault(target.number, []).append((tv, source))
    if isinstance(op, nodes.SqueezeOp):
        _check_squeeze(op, values)
    states: list[IterDomain] = []
    for position, axis in enumerate(out.domain.maybe_root):
        pairs = columns.get(axis.number, [])
        if not pairs:
            states.append(axis)
            continue
        sized = _check_sizes(op, axis, pairs, values)
        if axis.is_reduction():
            for _, other in sized[1:]:
                fusion.unify_extents(sized[0][1].size, other.size, f"{op.name} at {op.where}")
        joined = join_axes(fusion, pairs, op.name)
        if isinstance(op, nodes.ExpandOp):
            joined = _expanded(fusion, op, joined, axis, op.shape[position], values)
        elif isinstance(op, nodes.LibraryOp) and not op.KEEPS_EXPANDED:
            joined = unexpanded(joined)
        elif isinstance(op, GatherOp) and position in op.narrowed():
            joined = unexpanded(joined)  # each position may read another element of the table
        states.append(_like(axis, joined))
    return states


def _like(axis: IterDomain, source: IterDomain) -> IterDomain:
    """Returns `axis` with the kind and sizes of `source`. A reduction axis keeps its kind."""
    if axis.is_reduction():
        return replace(axis, extent=source.size)
    return replace(axis, kind=source.kind, extent=source.extent, expanded=source.expanded)


def _expanded(
    fusion: Fusion,
    op: nodes.ExpandOp,
    axis: IterDomain,
    out: IterDomain,
    size: Scalar,
    values: Values,
) -> IterDomain:
    """Returns `axis`, an axis of an expand's operand, expanded to `size`.

    `out` is the axis of the expand's result. If it is undecided whether `out` is a broadcast, the
    sizes in `values` decide whether the axis is expanded.
    """
    if out.is_broadcast:
        return replace(axis, expanded=out.expanded)
    have, want = _size(axis.size, values), _size(size, values)
    if axis.is_broadcast and axis.expanded is None:
        return axis if want == 1 else replace(axis, expanded=size)
    if have != want:
        raise InputError(
            f"expand: only an axis of size 1 can be expanded. For these inputs, axis {axis} of "
            f"{op.inp} has size {have}, not {want} (at {op.where})"
        )
    fusion.unify_extents(axis.size, size, f"expand: {op.inp} at {op.where}")
    return axis


def _size(x: Scalar, values: Values) -> int | None:
    return None if values is None else size_of(x, values)


def _check_squeeze(op: nodes.SqueezeOp, values: Values) -> None:
    for axis, gone in zip(op.inp.domain.no_reductions, op.flags, strict=True):
        if gone and not axis.is_broadcast:
            raise InputError(
                "Can not squeeze non-broadcasting dimension(s). For these inputs, axis "
                f"{axis} of {op.inp} has size {_size(axis.size, values)} (at {op.where})"
            )


def _check_sizes(
    op: TensorOp,
    out: IterDomain,
    pairs: Sequence[tuple[TensorView, IterDomain]],
    values: Values,
) -> list[tuple[TensorView, IterDomain]]:
    """Checks that the axes of `op`'s operands that correspond to the axis `out` of its result have
    equal sizes. Returns the (tensor, axis) pairs that were compared.

    `pairs` has the operands, each with its axis. A broadcast axis that is not expanded may have
    another size and is not compared, unless `out` is a reduction axis.
    """
    sized = [
        (tv, a)
        for tv, a in pairs
        if not a.is_broadcast or a.expanded is not None or out.is_reduction()
    ]
    for tv, axis in sized[1:]:
        first_tv, first = sized[0]
        have, want = _size(first.size, values), _size(axis.size, values)
        if have != want:
            raise InputError(
                f"Expected sizes to match, but found {have} and {want} in {op.name} of {first_tv} "
                f"and {tv} (at {op.where})"
            )
    return sized


# ------------------------------------------------------------------ replay
def _updated(domain: TensorDomain, states: Sequence[IterDomain], values: Values) -> TensorDomain:
    """Returns a copy of `domain` in which the axes `states` replace those with the same numbers
    (ids).

    Axes that splits and merges derive from these axes are recomputed.
    """
    rules = _Restate(domain, values)
    known = replay(forward(domain.transforms), {a.number: a for a in states}, rules)
    made = domain.with_axes(
        *(replace(a, ptype=domain.axes[n].ptype) for n, a in known.items() if n in domain.axes)
    )
    flags: list[bool | None] = []
    for a, had in zip(made.maybe_allocation, domain.contiguity, strict=True):
        is_skipped = a.kind in (IterType.broadcast, IterType.reduction)
        flags.append(None if is_skipped else had is not False)
    return made.having(contiguity=flags)


class _Restate(Rules[IterDomain]):
    """The rules by which kinds and sizes of axes follow from those of the axes that are split,
    merged or resized.
    """

    needs_all = False

    def __init__(self, domain: TensorDomain, values: Values) -> None:
        self._axes, self._values = domain.axes, values
        self._sizes = SizeRules()

    def split(self, t: SplitTransform, inp: IterDomain) -> tuple[IterDomain, IterDomain]:
        """Returns the outer and the inner axis of a split, both of the kind of the split axis."""
        outer, inner = self._axes[t.outer], self._axes[t.inner]
        # A reshape's split is exact: its declared sizes stay.
        sizes = (outer.size, inner.size) if outer.rfactor else self._sizes.split(t, inp.size)
        return _sized(outer, inp, sizes[0]), _sized(inner, inp, sizes[1])

    def merge(
        self, t: MergeTransform, outer: IterDomain | None, inner: IterDomain | None
    ) -> IterDomain:
        """Returns the merged axis, which is a broadcast axis only if both axes are broadcasts."""
        o, i = outer or self._axes[t.outer], inner or self._axes[t.inner]
        expanded = i.expanded if o.expanded is None else o.expanded
        like = replace(i if o.is_broadcast else o, expanded=expanded)
        out = self._axes[t.out]
        if not like.is_broadcast:
            return _sized(out, like, merged_extent(o, i, is_view=out.rfactor))
        return _sized(out, like, self._sizes.merge(t, o.size, i.size))

    def resize(self, t: Resize, inp: IterDomain) -> IterDomain:
        """Returns the resized axis. A `?` axis becomes a broadcast axis if its size is 1."""
        out, size = self._axes[t.out], self._sizes.resize(t, inp.size)
        if out.kind is not IterType.symbolic:
            return replace(out, extent=size)
        if self._values is not None and size_of(size, self._values) == 1:
            return replace(out, kind=IterType.broadcast, extent=sc.ONE)
        return replace(out, kind=IterType.iteration, extent=size)

    def swizzle(self, t: Swizzle1D, inp: IterDomain) -> IterDomain:
        """Returns the axis whose positions are a rotation of those of `inp`, with the kind and size
        of `inp`.
        """
        return _sized(self._axes[t.out], inp, inp.size)


def _sized(out: IterDomain, inp: IterDomain, size: Scalar) -> IterDomain:
    """Returns the derived axis `out` with the kind of its source axis `inp` and extent `size`."""
    if inp.is_broadcast:
        expanded = None if inp.expanded is None else size
        return replace(out, kind=IterType.broadcast, extent=sc.ONE, expanded=expanded)
    return replace(out, kind=inp.kind, extent=size, expanded=None)
