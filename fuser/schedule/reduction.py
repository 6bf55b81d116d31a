"""The reduction scheduler: reductions over the same axes, pointwise ops before and after them.

The first reduction is the reference. Its axes are put in the memory order of the inputs; whether
the innermost run is reduced decides the form (r: reduced, rows: the other axes, merged):

    GPU inner  [BIDx rows, TIDy rows | r BIDy, r S.., r US, r UR, r TIDx | r V]
    GPU outer  [BIDx columns, TIDx columns | r BIDy, r S, r US, r UR, r TIDy | columns V]
    GPU short  [BIDx columns, TIDx columns | r S, r US, r UR | columns UR, columns V]
    CPU inner  [S rows.. | r S..]
    CPU outer  [S rows.., S column tiles, US | r S.. | S 256 columns]

Inputs are loaded into registers right after US: all loads of an unrolled step are under way before
the first is used. An outer reduction keeps one accumulator per column of the vector. A short one,
over few rows, is a pointwise kernel over the columns of all iterated runs: no thread waits for
another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from fuser.ir import primitives
from fuser.ir.axis_graph import AxisGraph
from fuser.ir.fusion import Fusion, TensorOp
from fuser.ir.ops.nodes import LibraryOp, WelfordOp
from fuser.ir.tensor import TensorView
from fuser.ir.types import ParallelType
from fuser.ops.reference.meaning import REDUCING
from fuser.schedule.input_facts import Facts, RunExtents
from fuser.schedule.iteration_space import Access, Space, iteration_space
from fuser.schedule.loop_propagation import AxisMatcher
from fuser.schedule.pointwise import common_rejection, loaded_bytes
from fuser.schedule.reduction_params import (
    SHORT_ROWS,
    THREADS_INNER,
    THREADS_PER_SM,
    THREADS_PER_SM_WELFORD,
    ReductionParams,
    inner_params,
    outer_params,
    short_params,
)
from fuser.schedule.tiling import (
    Loops,
    arrange,
    cache_input,
    cache_output,
    intermediates,
    is_direct_input,
    parallelize,
    shift_rows,
    split_tile,
    vectorize_last,
)
from fuser.schedule.vectorize import VectorWidths
from fuser.support.device import DeviceInfo
from fuser.support.record import record, replace

PT = ParallelType
# Columns that a CPU kernel reduces together: their accumulators stay in the first-level cache.
CPU_COLUMNS = 256


# ------------------------------------------------------------------ what is accepted
def accepts(fusion: Fusion) -> str | None:
    """Return why the fusion is not a reduction of this kind, None when it is."""
    reductions = _reductions(fusion)
    if not reductions:
        return "there is no reduction"
    for op in fusion.exprs:
        if isinstance(op, LibraryOp):
            return f"{op.name} of {op.out_tensor} is an op of the library"
    graph = AxisGraph(fusion)
    joined = joined_spaces(fusion, graph)
    graph = AxisGraph(fusion, joined=joined) if joined else graph
    reason = common_rejection(fusion, graph)
    if reason is not None:
        return reason
    reference = reductions[0].out_tensor
    below: set[TensorView] = set()
    for op in fusion.exprs:
        reads_result = any(v in below for v in op.inputs)
        if isinstance(op, REDUCING):
            if reads_result:
                return f"{op.out_tensor} reduces something that depends on another reduction"
            if _classes(graph, op.out_tensor) != _classes(graph, reference):
                return f"{op.out_tensor} and {reference} reduce different axes"
        if reads_result or isinstance(op, REDUCING):
            below.update(op.outputs)
    return _tail_rejection(fusion, graph, reference, below)


def _tail_rejection(
    fusion: Fusion, graph: AxisGraph, reference: TensorView, below: set[TensorView]
) -> str | None:
    """After the reduction, every tensor has iterated axes of the reference only; outputs all."""
    if any(a.is_broadcast and a.expanded is not None for a in reference.domain.no_reductions):
        return f"the result of {reference} has an expanded axis, which its operands may iterate"
    matcher = AxisMatcher(graph, reference)
    iterated = {
        a.number for a in reference.domain.logical if not a.is_broadcast and not a.is_reduction()
    }
    everything = {a.number for a in reference.domain.logical if not a.is_broadcast}
    for tv in fusion.tensors():
        is_output = tv in fusion.outputs
        if tv not in below and not is_output:
            continue
        concrete = [a for a in tv.domain.no_reductions if not a.is_broadcast]
        matches = [matcher.reference_of(a) for a in concrete]
        numbers = {m.number for m in matches if m is not None}
        if None in matches or len(numbers) < len(concrete):
            return f"{tv} has axes that reduction {reference} does not have"
        if tv in below and not numbers <= iterated:
            return f"{tv} repeats the result of {reference} along a reduced axis"
        if is_output and numbers != (iterated if tv in below else everything):
            return f"output {tv} does not have the axes of reduction {reference}"
    return None


def joined_spaces(fusion: Fusion, graph: AxisGraph | None = None) -> list[tuple[int, int]]:
    """Return the pairs of axes by which reductions that nothing relates go over one space: those of
    the same extents, in the same places."""
    reference, *others = (op.out_tensor.domain.logical for op in _reductions(fusion))
    if not others:
        return []
    graph = graph or AxisGraph(fusion)
    pairs: list[tuple[int, int]] = []
    for logical in others:
        forms = [
            [(a.kind, fusion.canonical(a.size)) for a in axes] for axes in (reference, logical)
        ]
        if forms[0] != forms[1]:
            continue
        both = zip(reference, logical, strict=True)
        pairs += [(a.number, b.number) for a, b in both if not graph.mapped(a, b)]
    return pairs


def _classes(graph: AxisGraph, tv: TensorView) -> list[tuple[int, bool]]:
    return sorted((graph.find(a), a.is_reduction()) for a in tv.domain.logical)


def _reductions(fusion: Fusion) -> list[TensorOp]:
    return [op for op in fusion.exprs if isinstance(op, REDUCING)]


def _space(fusion: Fusion) -> Space:
    return iteration_space(fusion, _reductions(fusion)[0].out_tensor)


@record
class _Runs:
    """The runs of the reference's axes, in memory order: iterated and reduced."""

    iterated: tuple[tuple[int, ...], ...]
    reduced: tuple[tuple[int, ...], ...]
    inner: bool

    @property
    def innermost(self) -> int:
        runs = self.reduced if self.inner else self.iterated
        return runs[-1][-1] if runs else -1


def _runs(space: Space) -> _Runs:
    runs = space.runs(space.memory_order())
    iterated = tuple(r for r in runs if not space.is_reduced(r[0]))
    reduced = tuple(r for r in runs if space.is_reduced(r[0]))
    return _Runs(iterated, reduced, not iterated or space.is_reduced(runs[-1][0]))


# ------------------------------------------------------------------ heuristics
def generic(device: DeviceInfo) -> ReductionParams:
    """Return parameters that rely on nothing; the form follows the fusion when applied."""
    threads = 0 if device.kind == "cpu" else THREADS_INNER
    return ReductionParams(inner=True, threads_x=threads)


def chooser(fusion: Fusion, device: DeviceInfo) -> Callable[[Facts], ReductionParams]:
    """Return what chooses form, vector width, thread shape and grid split for an input class."""
    given = fusion
    if joined := joined_spaces(fusion):
        given, _ = fusion.copy()
        given.joined = tuple(joined)
    space = _space(given)
    runs = _runs(space)
    if device.kind == "cpu":
        loops = ReductionParams(inner=runs.inner)
        return lambda facts: loops
    logical = space.reference.domain.logical
    widths = VectorWidths(space.vector_candidates(runs.innermost))
    widest = max((a.nbytes for a in space.accesses if not a.is_output), default=4)
    loaded = loaded_bytes(space)
    is_welford = any(isinstance(op, WelfordOp) for op in given.exprs)
    busy = device.sm_count * (THREADS_PER_SM_WELFORD if is_welford else THREADS_PER_SM)
    shifted = VectorWidths(_shiftable(space, runs))

    groups = [[logical[p] for p in run] for run in (*runs.iterated, *runs.reduced)]
    extents, rows = RunExtents(given, groups), len(runs.iterated)

    def choose(facts: Facts) -> ReductionParams:
        found = extents.of(facts)
        iterated, reduced = found[:rows], found[rows:]
        last = (reduced if runs.inner else iterated)[-1]
        vector = widths.of(facts, last)
        if not runs.inner and prod(reduced) <= SHORT_ROWS:
            return short_params(prod(iterated), prod(reduced), vector, loaded, device)
        words = shifted.wider(facts, last, vector)
        if words:
            reduced, step = [last + words - 1], (words, words * widest)
            return replace(inner_params(iterated, reduced, step, device), shifted=True)
        step = vector, vector * widest
        if runs.inner:
            return inner_params(iterated, reduced, step, device, is_welford=is_welford)
        return outer_params(iterated, reduced, step, loaded, busy, device)

    return choose


def _is_loaded(space: Space, access: Access) -> bool:
    """Whether an input is loaded ahead of its uses: it has all axes."""
    return is_direct_input(access) and set(access.order or ()) == set(space.concrete)


def _shiftable(space: Space, runs: _Runs) -> tuple[Access, ...]:
    """Return what is loaded ahead, and stored beside that, where it is rows one behind the other;
    else nothing."""
    stored = {a.tv for a in space.vector_candidates(runs.innermost) if a.is_output}
    found = tuple(a for a in space.accesses if a.tv in stored or _is_loaded(space, a))
    has_rows = runs.inner and bool(runs.iterated) and len(runs.reduced) == 1
    return found if has_rows and space.are_dense(found) else ()


# ------------------------------------------------------------------ application
def apply(fusion: Fusion, params: ReductionParams) -> None:
    """Schedule the fusion in place."""
    fusion.joined = tuple(joined_spaces(fusion))
    # A result that others read stays in registers; its copy is the output.
    below = _below(fusion)
    for out in dict.fromkeys(fusion.outputs):
        if out in below and fusion.uses(out):
            primitives.cache_fork(out)
    space = _space(fusion)
    runs = _runs(space)
    if params.threads_x == 0:
        _apply_loops(fusion, space, runs)
    else:
        _apply_threads(fusion, space, runs, params)


def _broadcasts(space: Space) -> list[int]:
    return [p for p in range(len(space.reference.domain.logical)) if p not in space.concrete]


def _iterated_groups(space: Space, runs: _Runs) -> list[list[int]]:
    """Return the iterated runs; broadcast axes of the reference join the outermost."""
    groups = [list(r) for r in runs.iterated]
    broadcast = _broadcasts(space)
    if broadcast:
        groups[0:1] = [broadcast + (groups[0] if groups else [])]
    return groups


def _apply_loops(fusion: Fusion, space: Space, runs: _Runs) -> None:
    reference = space.reference
    rows, reduced = _iterated_groups(space, runs), [list(r) for r in runs.reduced]
    arrange(reference, [*rows, *reduced])
    # Broadcast axes alone are no rows: what reads the result may lack them.
    shared = len(rows) if runs.iterated else 0
    if not runs.inner:
        # [rows, columns, r..] -> [rows, column tiles, US, r.., columns of a tile]
        last = shared - 1
        reference.split(last, CPU_COLUMNS)
        reference.split(last, 1)
        reference.reorder({last + 2: len(reference.domain.loop) - 1})
        reference.axis(last + 1).parallelize(PT.unswitch)
        shared += 1
    _finish(fusion, reference, shared, {}, {}, 1)


def _apply_threads(fusion: Fusion, space: Space, runs: _Runs, params: ReductionParams) -> None:
    reference = space.reference
    below = _below(fusion)
    # Before outputs are copied: a copy of the reference has no reduced axes.
    rows = _iterated_groups(space, runs)
    reduced = [list(r) for r in runs.reduced]
    loaded: dict[TensorView, Access] = {}
    if params.vector * params.unroll * params.columns > 1:
        for access in space.accesses:
            if _is_loaded(space, access):
                loaded[cache_input(access.tv)] = access
    stored: dict[TensorView, TensorView] = {}
    if params.vector > 1:
        # Of an inner reduction, outputs beside it alone.
        for access in space.vector_candidates(runs.innermost):
            if access.is_output:
                is_below = access.tv in below
                registers, out = cache_output(access.tv)
                stored[registers] = out
                below.update([registers] if is_below else [])
    if not runs.inner and reference in stored.values():
        # The reduction moved into the registers; they are the reference now.
        reference = next(reg for reg, out in stored.items() if out is reference)
    shape = _shape_inner if runs.inner else _shape_outer
    shared, unswitch = shape(reference, rows, reduced, params)
    if not runs.iterated:
        shared = 0  # broadcast axes alone are no rows: what reads the result may lack them
    vectors = {
        tv: params.vector > 1 and a.is_vector_candidate(runs.innermost) for tv, a in loaded.items()
    }
    _finish(fusion, reference, shared, vectors, stored, unswitch + 1)


def _below(fusion: Fusion) -> set[TensorView]:
    """Return the results of reductions and everything computed from them."""
    below: set[TensorView] = set()
    for op in fusion.exprs:
        if isinstance(op, REDUCING) or any(v in below for v in op.inputs):
            below.update(op.outputs)
    return below


def _finish(
    fusion: Fusion,
    reference: TensorView,
    shared: int,
    loaded: dict[TensorView, bool],
    stored: dict[TensorView, TensorView],
    loads_at: int,
) -> None:
    """Give all tensors their loops and positions: `shared` loop axes of the reference are rows."""
    loops = Loops(fusion, reference)
    below = _below(fusion)
    kept = frozenset(
        a.number for a in reference.domain.logical if not a.is_reduction() and not a.is_broadcast
    )
    for tv in (*fusion.outputs, *intermediates(fusion, ())):
        if tv in fusion.inputs:
            continue
        is_reduction = isinstance(tv.definition(), REDUCING)
        if tv in below and not is_reduction:
            if not loops.repeat(tv, only=kept) and tv in fusion.outputs:
                raise AssertionError(f"output {tv} does not follow {reference}")
        elif not loops.repeat(tv) and (is_reduction or tv in fusion.outputs):
            raise AssertionError(f"{tv} does not follow {reference}")
    for tv in intermediates(fusion, ()):
        if isinstance(tv.definition(), REDUCING) or (tv in stored and tv in below):
            tv.compute_at = shared
        elif tv in stored:
            tv.compute_at = len(tv.domain.loop) - 1
        elif tv in loaded:
            tv.compute_at = loads_at
        else:
            loops.inline_whole(tv)
    for tv, is_vector in loaded.items():
        if is_vector:
            vectorize_last(tv)
    for out in stored.values():
        vectorize_last(out)


def _split_reduction(
    tv: TensorView,
    axis: int,
    *,
    vector: int = 1,
    tile: Sequence[tuple[int, ParallelType]],
    grid: int = 1,
    is_outer: bool = False,
) -> list[ParallelType]:
    """Split a reduced axis into [(BIDy,) S, US, tile.., (vector)]; return the types outside in."""
    if vector > 1:
        tv.split(axis, vector)
    types = [PT.unswitch, *split_tile(tv, axis, tile)]
    types += [PT.serial] if vector > 1 else []
    tv.split(axis, 1)
    if grid > 1 and is_outer:
        # All blocks are at rows near each other: the rows read last are in the cache together.
        tv.split(axis, grid)
        tv.reorder({axis: axis + 1})
        return [PT.grid_y, PT.serial, *types]
    if grid > 1:
        tv.outer_split(axis, grid)
        return [PT.grid_y, PT.serial, *types]
    return [PT.serial, *types]


def _shape_inner(
    tv: TensorView, rows: list[list[int]], reduced: list[list[int]], params: ReductionParams
) -> tuple[int, int]:
    """Build the loops of an inner reduction; return (row axes, position of US)."""
    outer = [p for run in reduced[:-1] for p in run]
    groups = [[p for run in rows for p in run]] if rows else []
    groups += [outer] if outer else []
    arrange(tv, [*groups, reduced[-1]])
    if params.shifted and params.vector > 1:
        shift_rows(tv, 0, 1, params.vector)
    types: list[ParallelType] = []
    at = 0
    if rows:
        if params.threads_y > 1:
            tv.split(0, params.threads_y)
            types += [PT.grid_x, PT.block_y]
        else:
            types += [PT.grid_x]
        at = len(types)
    shared = at
    lanes, unroll = (params.threads_x, PT.block_x), (params.unroll, PT.unroll)
    vector = params.vector
    if not outer:
        types += _split_reduction(tv, at, vector=vector, tile=(unroll, lanes), grid=params.grid)
    else:
        # [.., ro, ri] -> [.., (BIDy ro,) S ro, S ri, US, UR of either, TIDx, V]
        tile = (lanes,) if params.unroll_outer else (unroll, lanes)
        inner = _split_reduction(tv, at + 1, vector=vector, tile=tile)
        if params.unroll_outer and params.unroll > 1:
            tv.split(at, params.unroll)
            tv.reorder({at + 1: at + 3})
            inner[2:2] = [PT.unroll]
        if params.grid > 1:
            tv.outer_split(at, params.grid)
            types += [PT.grid_y]
        types += [PT.serial, *inner]
    parallelize(tv, types)
    return shared, types.index(PT.unswitch)


def _shape_outer(
    tv: TensorView, rows: list[list[int]], reduced: list[list[int]], params: ReductionParams
) -> tuple[int, int]:
    """Build the loops of an outer reduction; return (column axes, position of US)."""
    outside = [p for run in rows[:-1] for p in run]
    groups = [outside] if outside else []
    arrange(tv, [*groups, rows[-1], [p for run in reduced for p in run]])
    column = len(groups)
    if params.vector > 1:
        tv.split(column, params.vector)
    if outside and params.threads_y == 1:
        # One index over all columns: the blocks are full, however few columns a row has.
        tv.merge(0, 1)
        column, outside = 0, []
    tv.split(column, params.columns * params.threads_x)
    inside = [PT.serial] if params.vector > 1 else []
    if params.columns > 1:
        tv.split(column + 1, params.threads_x)
        tv.reorder({column + 1: column + 2})
        inside = [PT.unroll, *inside]
    if outside:
        # Blocks of columns and the other rows share BIDx.
        tv.merge(0, 1)
    # [BIDx, TIDx, (UR), (V), r] -> [BIDx, TIDx, r.., (UR), (V)]
    end = len(tv.domain.loop) - 1
    tv.reorder({end: 2})
    tile = ((params.unroll, PT.unroll), (params.threads_y, PT.block_y))
    types = [
        PT.grid_x,
        PT.block_x,
        *_split_reduction(tv, 2, tile=tile, grid=params.grid, is_outer=True),
    ]
    parallelize(tv, [*types, *inside])
    return 2, types.index(PT.unswitch)
