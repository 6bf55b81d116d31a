"""The inner persistent scheduler: reductions along rows that later reductions and outputs wait for
(softmax, layer norm), as one kernel.

The first reduction is the reference; all reduce the same, innermost, axes. The reduced axes are
merged into one, the row, which a block takes, or some threads of one:

    GPU kept    [BIDx rows, TIDy rows | r S 1, r UR, r TIDx | r V]
    GPU looped  [BIDx rows, TIDy rows | r S, r UR, r TIDx | r V]
    CPU         [S rows | r S]

Kept: each thread loads its part of the row into registers once, as memory has it, and what follows
is computed from there; what costs more to compute than to keep, and is needed at several levels
(`rows.py`), is kept, too. Looped, for rows that do not fit: every level goes over the row again.
Shifted, where no word of memory divides the rows: each is moved back to where its first word
begins (`ir.domain.Shift`); the elements of that word, and of the last, that are its neighbours' are
loaded with them and not looked at. Tensors that have the row alone are read element by element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fuser.ir import primitives
from fuser.ir.axis_graph import AxisGraph
from fuser.ir.fusion import Fusion, TensorOp
from fuser.ir.ops.nodes import BroadcastOp, LibraryOp, LoadStoreOp, SqueezeOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Number, Scalar, Symbol
from fuser.ir.tensor import TensorView
from fuser.ir.types import ParallelType
from fuser.ops.reference.meaning import REDUCING
from fuser.schedule.inner_persistent_params import InnerPersistentParams
from fuser.schedule.iteration_space import Access, direct_uses, iteration_space
from fuser.schedule.loop_propagation import AxisMatcher
from fuser.schedule.pointwise import common_rejection
from fuser.schedule.row_levels import (
    kept_values,
    levels_of,
    separate_levels,
)
from fuser.schedule.row_view import RowView, reference_of, rewrite
from fuser.schedule.tiling import (
    Loops,
    arrange,
    cache_input,
    intermediates,
    parallelize,
    shift_rows,
    split_tile,
    vectorize_last,
)

PT = ParallelType
# Ops whose results are their operands, under other axes.
VIEWS = (BroadcastOp, SqueezeOp, LoadStoreOp)
# The loops of the rows of parts: the part, the rows of a part, the rows at once.
ROWS_OF_PARTS = 3
NOTHING: Mapping[TensorView, Access] = {}
# Rows of so many elements are one kernel where there are so many of them: separate kernels share a
# long row between blocks. What does not fit registers is read again. Of the last pair only rows of
# 50257 in bfloat16, 2048 of them, were measured on an H200.
ROWS_THAT_PAY = ((8192, 0), (16384, 32), (65536, 256))


# ------------------------------------------------------------------ what is accepted
def accepts(fusion: Fusion) -> str | None:
    """Return why the fusion is not of this kind, None when it is."""
    if fusion.aliases:
        return "an output is written into an input"
    reason = waiting_rejection(fusion)
    return reason or _order_rejection(fusion)


def waiting_rejection(fusion: Fusion) -> str | None:
    """Return why not all reductions are over the same axes, along which something waits for
    them."""
    reductions = [op for op in fusion.exprs if isinstance(op, REDUCING)]
    if not reductions:
        return "there is no reduction"
    for op in fusion.exprs:
        if isinstance(op, LibraryOp):
            return f"{op.name} of {op.out_tensor} is an op of the library"
    graph = AxisGraph(fusion)
    reason = common_rejection(fusion, graph)
    if reason is not None:
        return reason
    reference = reductions[0].out_tensor
    for op in reductions:
        if _classes(graph, op.out_tensor) != _classes(graph, reference):
            return f"{op.out_tensor} and {reference} reduce different axes"
    return _tensor_rejection(fusion, graph, reference)


def _classes(graph: AxisGraph, tv: TensorView) -> list[tuple[int, bool]]:
    return sorted((graph.find(a), a.is_reduction()) for a in tv.domain.logical)


def _tensor_rejection(fusion: Fusion, graph: AxisGraph, reference: TensorView) -> str | None:
    """What waits for a reduction has axes of the reference only; outputs have rows or all axes."""
    if any(a.is_broadcast and a.expanded is not None for a in reference.domain.no_reductions):
        return f"the result of {reference} has an expanded axis, which its operands may iterate"
    matcher = AxisMatcher(graph, reference)
    logical = [a for a in reference.domain.logical if not a.is_broadcast]
    everything = {a.number for a in logical}
    iterated = {a.number for a in logical if not a.is_reduction()}
    levels = levels_of(fusion)
    waits = False
    for tv in fusion.tensors():
        is_output = tv in fusion.outputs
        if not levels.get(tv) and not is_output:
            continue
        concrete = [a for a in tv.domain.no_reductions if not a.is_broadcast]
        matches = [matcher.reference_of(a) for a in concrete]
        numbers = {m.number for m in matches if m is not None}
        if None in matches or len(numbers) < len(concrete):
            return f"{tv} has axes that reduction {reference} does not have"
        if is_output and numbers not in (iterated, everything):
            return f"output {tv} does not have the axes of reduction {reference}, nor its rows"
        waits = waits or (bool(levels.get(tv)) and not numbers <= iterated)
    return None if waits else f"nothing along the reduced axes waits for {reference}"


def _order_rejection(fusion: Fusion) -> str | None:
    """The reduced axes are innermost in memory."""
    reference = reference_of(fusion)
    space = iteration_space(fusion, reference)
    order = [space.is_reduced(p) for p in space.memory_order()]
    if order != sorted(order):
        return f"{reference} reduces axes that are not innermost in memory"
    return None


def row_extents(reduction: TensorView) -> tuple[Scalar, Scalar]:
    """Return how many rows a reduction has, and of how many elements."""
    sizes: dict[bool, list[Scalar]] = {False: [], True: []}
    for axis in reduction.domain.logical:
        sizes[axis.is_reduction()].append(reduction.fusion.canonical(axis.extent))
    return sc.product(sizes[False]), sc.product(sizes[True])


def pays(rows: int, columns: int) -> bool:
    """Whether one kernel takes no longer than several, which share a long row between blocks."""
    return any(columns <= longest and rows >= fewest for longest, fewest in ROWS_THAT_PAY)


def suits(fusion: Fusion, sizes: Mapping[Symbol, Number]) -> bool:
    """Whether one kernel pays for these sizes; unknown ones are those of many short rows."""
    known = rows_of(fusion, sizes)
    return known is None or pays(*known)


def rows_of(fusion: Fusion, sizes: Mapping[Symbol, Number]) -> tuple[int, int] | None:
    """Return how many rows there are of how many elements, None where that is not known."""
    try:
        rows, columns = (int(sc.evaluate(x, sizes)) for x in row_extents(reference_of(fusion)))
    except KeyError:
        return None
    return rows, columns


# ------------------------------------------------------------------ application
def apply(fusion: Fusion, params: InnerPersistentParams) -> None:
    """Schedule the fusion in place."""
    fusion.resident_threads = params.resident
    fusion.cluster = params.cluster
    rewrite(fusion, is_kept=params.kept > 0, has_threads=params.threads_x > 0)
    view = RowView(fusion)
    if params.threads_x == 0:
        _apply_loops(view)
        return
    kept: list[TensorView] = []
    is_costly = view.is_costly if params.keeps_costly else lambda op: False
    if params.kept:
        kept = [k.tv for k in kept_values(fusion, view.full, is_costly=is_costly)]
    kept = [tv for tv in kept if tv not in fusion.inputs]
    per_row = [tv for tv in fusion.tensors() if view.is_per_row(tv)]
    needed = separate_levels(fusion, frozenset({*kept, *per_row}))
    _apply_threads(RowView(fusion), params, kept, needed)


def _groups(view: RowView) -> list[list[int]]:
    """Return the rows, as one group with the broadcast axes of the reference, and the row."""
    rank = len(view.reference.domain.logical)
    broadcast = [p for p in range(rank) if p not in view.space.concrete]
    rows = [*broadcast, *(p for run in view.iterated for p in run)]
    row = [p for run in view.reduced for p in run]
    return [g for g in (rows, row) if g]


def _apply_loops(view: RowView) -> None:
    groups = _groups(view)
    arrange(view.reference, groups)
    # Broadcast axes alone are no rows: what reads the result may lack them.
    _finish(view, 1 if view.iterated else 0, [])


def _apply_threads(
    view: RowView,
    params: InnerPersistentParams,
    kept: list[TensorView],
    needed: Mapping[TensorView, int],
) -> None:
    """Schedule a fusion whose levels are separate; `needed` gives that of each tensor."""
    fusion, full, levels = view.fusion, view.full, levels_of(view.fusion)
    accesses = {a.tv: a for a in view.space.accesses}
    ahead: dict[TensorView, Access] = {}
    for access in [a for a in view.space.accesses if not a.is_output and a.order]:
        tv = access.tv
        is_wide = _is_wide(view, params, access)
        if params.kept and tv in full and fusion.uses(tv):
            copy = cache_input(tv)
            kept.append(copy)
            ahead[copy] = access
        elif is_wide or (tv in full and params.unroll > 1):
            for uses in _by_level(direct_uses(tv), needed):
                copy = primitives.cache_after(
                    tv, propagate_allocation_domain=False, cached_uses=uses
                )
                ahead[copy] = access
    once = _once_per_row(view, levels) if view.iterated else []
    once_in_all = [tv for tv, a in ahead.items() if view.parts and _is_row(view, a.tv)]
    shared, tile = _shape(view, params)
    wide = [out for out in dict.fromkeys(fusion.outputs) if _is_wide(view, params, accesses[out])]
    # What is loaded again and again is loaded a tile at a time: all of it is under way at once.
    _finish(view, shared if view.iterated else 0, kept, ahead, 1 if params.kept else tile)
    for tv in once:
        # Rows of one block that follow each other have other values.
        tv.compute_at = ROWS_OF_PARTS - 1 if view.parts else 0
    for tv in once_in_all:
        tv.compute_at = 0
    for copy, access in ahead.items():
        if _is_wide(view, params, access):
            vectorize_last(copy)
    for out in wide:
        vectorize_last(out)


def _is_wide(view: RowView, params: InnerPersistentParams, access: Access) -> bool:
    """Whether a tensor is accessed in vectors: where rows are shifted, one that lies as they do."""
    is_candidate = params.vector > 1 and access.is_vector_candidate(view.innermost)
    return is_candidate and (not params.shifted or access.tv in view.full)


def _once_per_row(view: RowView, levels: dict[TensorView, int]) -> list[TensorView]:
    """Return what has a value for each row and is read along it: a register of each thread."""
    fusion, found = view.fusion, list[TensorView]()
    for access in view.space.accesses:
        tv = access.tv
        is_input = not access.is_output and bool(access.order and fusion.uses(tv))
        if is_input and view.axes(tv) == view.iterated_axes:
            found.append(cache_input(tv))
    # In a loop over rows none waits for another: they would have to share it, as reductions do.
    waits: set[TensorView] = set(found) if view.parts else set()
    for op in fusion.exprs:
        tv = op.out_tensor
        if tv not in levels or isinstance(op, REDUCING) or tv in fusion.outputs:
            continue
        if not view.is_per_row(tv):
            continue
        if any(v in waits for v in op.inputs):
            waits.add(tv)
            continue
        has_rows = bool(levels.get(tv)) and view.axes(tv) == view.iterated_axes
        if has_rows and not isinstance(op, VIEWS) and _is_read_along(view, tv):
            found.append(tv)
            waits.update([tv] if view.parts else [])
    return found


def _is_read_along(view: RowView, tv: TensorView) -> bool:
    """Whether a value of a row is read for its elements, at once or through views."""
    return any(
        not view.is_per_row(out) or (isinstance(op, VIEWS) and _is_read_along(view, out))
        for op in view.fusion.uses(tv)
        for out in op.outputs
    )


def _by_level(uses: Sequence[TensorOp], needed: Mapping[TensorView, int]) -> list[list[TensorOp]]:
    found: dict[int, list[TensorOp]] = {}
    for op in uses:
        found.setdefault(needed.get(op.out_tensor, 0), []).append(op)
    return list(found.values())


def _shape(view: RowView, params: InnerPersistentParams) -> tuple[int, int]:
    """Build the loops of the reference; return how many of them are rows, and the tile's."""
    tv, groups = view.reference, _groups(view)
    if params.exact:
        _assume_exact(view, groups, params)
    arrange(tv, groups)
    if params.shifted and params.vector > 1:
        shift_rows(tv, 0, 1, params.vector)
    types: list[ParallelType] = []
    if view.parts:
        # [rows] -> [parts, rows of a part, TIDy]
        tv.split(0, next(iter(view.parts.values())).count)
        tv.reorder({0: 1})
        tv.split(1, params.threads_y)
        types += [PT.grid_x, PT.serial, PT.block_y]
    elif len(groups) > 1:
        if params.threads_y > 1:
            tv.split(0, params.threads_y)
            types += [PT.grid_x, PT.block_y]
        else:
            types += [PT.grid_x]
    at = len(types)
    if params.vector > 1:
        tv.split(at, params.vector)
    batch = params.kept // params.vector if params.kept else params.unroll
    inside = (params.cluster, PT.grid_y), (batch, PT.unroll), (params.threads_x, PT.block_x)
    tile = split_tile(tv, at, inside)
    if params.kept:
        # One tile holds the row.
        view.fusion.assume(tv.domain.loop[at].extent, sc.ONE)
    if params.vector > 1:
        # Only the words at the ends of a shifted row are tested element by element.
        tile += [PT.unswitch if params.shifted else PT.serial]
    parallelize(tv, [*types, PT.serial, *tile])
    return at, len(tile)


def _follow_rows(tv: TensorView, view: RowView, loops: Loops) -> None:
    """Give parts the loops of the rows that they sum."""
    loops.repeat_along(tv, view.row_axes)
    parts, model = view.parts[tv], view.reference.domain.loop
    places = {a.number: k for k, a in enumerate(tv.domain.loop)}
    tv.reorder({places[parts.part]: 0, places[parts.rest]: 1})
    tv.split(1, model[ROWS_OF_PARTS - 1].extent)
    types = [PT.serial if a.ptype is PT.vectorize else a.ptype for a in model]
    parallelize(tv, types)


def _is_row(view: RowView, tv: TensorView) -> bool:
    """Whether a tensor has the axes of a row and no others."""
    return view.axes(tv) == view.row_axes


def _assume_exact(view: RowView, groups: list[list[int]], params: InnerPersistentParams) -> None:
    """Make the length of the row a constant, and the rows whole blocks."""
    logical = view.reference.domain.logical
    *rows, row = groups
    if len(row) == 1:
        view.fusion.assume(
            logical[row[0]].extent, sc.const(params.cluster * params.threads_x * params.kept)
        )
    size = view.fusion.canonical(logical[rows[0][0]].extent) if rows else None
    at_once = 1 if view.parts else params.threads_y
    if at_once > 1 and isinstance(size, Symbol) and len(rows[0]) == 1:
        view.fusion.divisible[size] = at_once


def _finish(
    view: RowView,
    shared: int,
    kept: Sequence[TensorView],
    ahead: Mapping[TensorView, Access] = NOTHING,
    inside: int = 0,
) -> None:
    """Give all tensors their loops and positions: `shared` loop axes of the reference are rows,
    what is loaded `ahead` has `inside` loops of its own."""
    fusion, reference = view.fusion, view.reference
    loops, view = Loops(fusion, reference), RowView(fusion)
    for tv in (*fusion.outputs, *intermediates(fusion, ())):
        if tv in view.parts:
            _follow_rows(tv, view, loops)
            continue
        axes = view.axes(tv)
        is_step = isinstance(tv.definition(), REDUCING) or tv in fusion.outputs
        if isinstance(tv.definition(), REDUCING):
            done = loops.repeat(tv)
        else:
            done = axes is not None and (loops.repeat(tv) or loops.repeat(tv, only=axes))
        if not done and is_step:
            raise AssertionError(f"{tv} does not follow {reference}")
    for tv in intermediates(fusion, ()):
        if isinstance(tv.definition(), REDUCING) or tv in kept:
            tv.compute_at = shared
        elif tv in ahead:
            tv.compute_at = len(tv.domain.loop) - inside
        else:
            loops.inline_whole(tv)
