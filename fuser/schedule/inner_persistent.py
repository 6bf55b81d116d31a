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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from fuser.ir import primitives
from fuser.ir.axis_graph import AxisGraph
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.ops.nodes import BroadcastOp, LibraryOp, LoadStoreOp, SqueezeOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Number, Scalar, Symbol
from fuser.ir.types import ParallelType
from fuser.ops.reference.meaning import REDUCING
from fuser.schedule.input_facts import Facts, RunExtents
from fuser.schedule.iteration_space import (
    Access,
    VectorWidths,
    direct_uses,
    iteration_space,
    power_of_two_at_least,
    power_of_two_at_most,
)
from fuser.schedule.loop_propagation import AxisMatcher
from fuser.schedule.pointwise import common_rejection
from fuser.schedule.row_levels import (
    RowView,
    kept_values,
    levels_of,
    most_bytes,
    reference_of,
    rewrite,
    separate_levels,
)
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
from fuser.support.device import DeviceInfo
from fuser.support.record import record

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
    """Returns why the fusion is not of this kind, None when it is."""
    if fusion.aliases:
        return "an output is written into an input"
    reason = waiting_rejection(fusion)
    return reason or _order_rejection(fusion)


def waiting_rejection(fusion: Fusion) -> str | None:
    """Returns why not all reductions are over the same axes, along which something waits for
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
    """Returns how many rows a reduction has, and of how many elements."""
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
    """Returns how many rows there are of how many elements, None where that is not known."""
    try:
        rows, columns = (int(sc.evaluate(x, sizes)) for x in row_extents(reference_of(fusion)))
    except KeyError:
        return None
    return rows, columns


# ------------------------------------------------------------------ application
def apply(fusion: Fusion, params: InnerPersistentParams) -> None:
    """Schedules the fusion in place."""
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
    """Returns the rows, as one group with the broadcast axes of the reference, and the row."""
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
    """Schedules a fusion whose levels are separate; `needed` gives that of each tensor."""
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
    """Returns what has a value for each row and is read along it: a register of each thread."""
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
    """Builds the loops of the reference; returns how many of them are rows, and the tile's."""
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
    """Gives parts the loops of the rows that they sum."""
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
    """Makes the length of the row a constant, and the rows whole blocks."""
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
    """Gives all tensors their loops and positions: `shared` loop axes of the reference are rows,
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


# ----------------------------------------------------------------------
# What the inner persistent scheduler decides, and how: the shape of blocks, what threads keep.

# Registers that a thread keeps of its row: with two blocks or more on a multiprocessor one loads
# while another computes.
KEPT_REGISTERS = 32
# Bytes that one of half of the most threads keeps of a row that takes more registers than that.
# Where results lie along such a row, converting its elements for them takes registers that are not
# there. Measured on an H200, cross entropy of 50257 columns in bfloat16: 100 us, looped 106; with
# its gradient 215, looped 188.
LONG_ROW_BYTES = 240
# Columns from which kernels with sums over rows load a wide weight in one word, and rows in shorter
# ones. Measured on an H200: 4096 and 8192 take 4 to 17 % less time, 1536 and 1024 2 to 8 % more.
# From there a thread also keeps so much of the row and the sums: fewer threads wait for one
# another. Measured on an H200, gradients of layer norm in bfloat16, 16384 x 8192: 238 us with 256
# threads, 307 with 1024; 4096 x 4096 34 and 45.
LONG_PARTS = 4096
LONG_PARTS_BYTES = 512
LONG_PARTS_KEPT = 32
# Of one multiprocessor, what a row may keep at most, and up to where results of costly ops are kept
# rather than computed again.
ROW_REGISTERS = 40 * 1024
ROW_REGISTERS_COSTLY = 16 * 1024
THREADS_PER_BLOCK = 128
# Bytes of a line of memory.
LINE = 128
# Threads of a multiprocessor: what is cheap is computed again rather than kept in more registers.
RESIDENT = 768
RESIDENT_ONE = 1024
# Threads along a row, so that few shapes of kernels exist.
ROW_THREADS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
LOOPED_THREADS = 512
LOOPED_BYTES = 32
# Threads of a block of a cluster, and bytes of a row that each may keep.
CLUSTER_THREADS = 512
CLUSTER_BYTES = 256
# Bytes of a row of which few are to be on their way through the cache at once: with twice the
# loads, and twice the threads where results lie along it, there are half as many. Measured on an
# H200, rows of 50257 in float32: cross entropy 158 us (with twice the threads, too, 193), with its
# gradient 326 (without both 378).
WIDE_ROW_BYTES = 128 << 10


@record
class InnerPersistentParams:
    """What the inner persistent scheduler decides. Zero threads: plain loops of the CPU.

    `kept` counts the elements of a row in one thread; 0: every level loops over the row, `unroll`
    vectors of each input at a time. `keeps_costly`: results of costly ops are kept, too.
    `resident` threads are to find registers on a multiprocessor (0: the compiler decides).
    `exact`: what the threads keep is the row, so that nothing has to be tested. `shifted`: rows of
    any length are read in whole words of memory, but for their ends. `cluster` blocks take a row.
    """

    threads_x: int = 0
    threads_y: int = 1
    vector: int = 1
    kept: int = 0
    keeps_costly: bool = False
    unroll: int = 1
    resident: int = 0
    exact: bool = False
    shifted: bool = False
    cluster: int = 1

    def is_near(self, other: InnerPersistentParams) -> bool:
        """Whether kernels of both differ in nothing that a small input would notice. Where one is
        exact, its guards tell whether it serves."""
        return replace(self, exact=False) == replace(other, exact=False)

    def is_alike(self, other: InnerPersistentParams) -> bool:
        """Whether a kernel made with `other` serves, if less well: not with most threads idle."""
        forms = [(p.vector, bool(p.kept), p.shifted, p.cluster) for p in (self, other)]
        if forms[0] != forms[1]:
            return False
        sizes = self.threads_x * self.kept, other.threads_x * other.kept
        return max(sizes) <= 2 * min(sizes)

    def __str__(self) -> str:
        if not self.threads_x:
            return "inner_persistent(loops)"
        what = f"looped, unroll {self.unroll}"
        if self.kept:
            what = f"kept {self.kept}" + (" with results" if self.keeps_costly else "")
        return (
            f"inner_persistent(threads {self.threads_x}x{self.threads_y}, vector {self.vector}, "
            f"{what}, resident {self.resident}"
            f"{', exact' if self.exact else ''}{', shifted' if self.shifted else ''}"
            f"{f', cluster {self.cluster}' if self.cluster > 1 else ''})"
        )


# ------------------------------------------------------------------ heuristics
def generic(device: DeviceInfo) -> InnerPersistentParams:
    """Returns the parameters that rely on nothing."""
    if device.kind == "cpu":
        return InnerPersistentParams()
    return InnerPersistentParams(threads_x=THREADS_PER_BLOCK)


def chooser(
    fusion: Fusion, device: DeviceInfo, *, beside: int = 0, in_clusters: bool = False
) -> Callable[[Facts], InnerPersistentParams]:
    """Returns what chooses form, vector width and thread shape for an input class, where a thread
    keeps `beside` bytes more for each element of its row; `in_clusters`: also how many blocks take
    a row."""
    if device.kind == "cpu":
        loops = InnerPersistentParams()
        return lambda facts: loops
    given, _ = fusion.copy()
    rewrite(given, is_kept=True, has_threads=True)
    view = RowView(given)
    logical = view.reference.domain.logical
    candidates = view.space.vector_candidates(view.innermost)
    is_full = {a.tv: a.tv in view.full for a in candidates}
    has_full, has_columns = any(is_full.values()), not all(is_full.values())
    # Of norms, which read columns, no looped form was measured.
    writes = any(a.is_output and a.tv in view.full for a in view.space.accesses) and not has_columns
    widths = VectorWidths(candidates, shared=lambda a: has_full and not is_full[a.tv])
    long_widths = VectorWidths(candidates) if view.parts else widths
    # What sums rows looks at the same elements of each.
    shifted_widths = VectorWidths(view.dense) if view.iterated and not view.parts else None
    extents = RunExtents(given, [[logical[p] for p in run] for run in view.iterated + view.reduced])
    count = len(view.iterated)
    kept = kept_values(given, view.full, is_costly=view.is_costly)
    inputs = kept_values(given, view.full, is_costly=lambda op: False)
    has_costly = len(kept) > len(inputs)
    read = [a for a in view.space.accesses if not a.is_output]
    widest = max((a.nbytes for a in read if a.tv in view.full), default=4)

    def choose(facts: Facts) -> InnerPersistentParams:
        found = extents.of(facts)
        rows, columns = prod(found[:count]), prod(found[count:])
        vector, begin = (long_widths if columns >= LONG_PARTS else widths).of(facts, found[-1]), 0
        is_narrow = vector < widths.within(facts)
        words = shifted_widths.wider(facts, columns, vector) if shifted_widths and is_narrow else 0
        if words:
            vector, begin = words, words - 1
        shape = _RowsAccess(rows, columns, vector, widest, begin, len(inputs))
        if in_clusters:
            return _cluster_params(shape, most_bytes(inputs, vector), device)
        plans = [(most_bytes(inputs, vector) + beside, False)]
        if has_costly:
            plans.insert(0, (most_bytes(kept, vector) + beside, True))
        for nbytes, costly in plans:
            limit = ROW_REGISTERS_COSTLY if costly else ROW_REGISTERS
            spills = writes and nbytes < 4 and _is_long(shape, nbytes)
            if columns * nbytes <= 4 * limit and not spills:
                if beside and columns >= LONG_PARTS:
                    return _long_parts_params(shape, nbytes)
                return _kept_params(shape, nbytes, costly, device)
        # Those along the row alone are not shifted with it: their elements are loaded one by one.
        return _looped_params(shape, has_columns=has_columns, writes=writes)

    return choose


class _RowsAccess(NamedTuple):
    """How many rows there are of how many elements, and how these are accessed: the elements of a
    vector, the bytes of the widest one, and how many elements a row may begin behind a word; and
    how many inputs have them."""

    rows: int
    columns: int
    vector: int
    widest: int
    begin: int
    inputs: int

    @property
    def chunks(self) -> int:
        """The vectors that hold a row."""
        return -(-(self.columns + self.begin) // self.vector)


def _most_chunks(shape: _RowsAccess, nbytes: int) -> int:
    """Returns the vectors that a thread keeps where a block has threads enough: the compiler keeps
    what it converts in its wider form."""
    return max(4 * KEPT_REGISTERS // (max(nbytes, 4) * shape.vector), 1)


def _is_long(shape: _RowsAccess, nbytes: int) -> bool:
    """Whether no block has threads enough to keep a row so."""
    return shape.chunks > ROW_THREADS[-1] * _most_chunks(shape, nbytes)


def _kept_params(
    shape: _RowsAccess, nbytes: int, costly: bool, device: DeviceInfo
) -> InnerPersistentParams:
    rows, columns, vector, widest, begin, _ = shape
    chunks, is_shifted = shape.chunks, begin > 0
    most = _most_chunks(shape, nbytes)
    # Lanes that lie side by side read whole lines of memory; those without work cost as others do.
    least = min(max(LINE // (vector * widest), 1), device.warp_size, power_of_two_at_least(chunks))
    lanes = device.warp_size
    if is_shifted and lanes * most < chunks <= lanes * (most + most // 4):
        most += most // 4  # a shifted row has a word more: not two warps for that
    fit = [t for t in ROW_THREADS if least <= t and t * most >= chunks]
    if not fit:
        # Two rows on a multiprocessor, where their threads' registers hold them.
        half = ROW_THREADS[-1] // 2
        fit = [half if chunks * vector * nbytes <= half * LONG_ROW_BYTES else 2 * half]
    warp = [t for t in fit if t <= device.warp_size] or fit[:2]
    x = min(warp, key=lambda t: t * -(-chunks // t))
    batch = -(-chunks // x)
    y = max(THREADS_PER_BLOCK // x, 1) if rows > device.sm_count else 1
    exact = x * batch * vector == columns and rows % y == 0 and not is_shifted
    if x * batch != chunks and (x <= lanes or not is_shifted):
        # Rows of many lengths share few kernels.
        batch = max(min(power_of_two_at_least(batch), most), batch)
    kept = batch * vector
    # Several narrow inputs take more registers once they are converted.
    is_one = shape.inputs == 1 and costly
    resident = RESIDENT_ONE if is_one or nbytes < 4 else RESIDENT
    return InnerPersistentParams(
        x, y, vector, kept, costly, resident=resident, exact=exact, shifted=is_shifted
    )


def _long_parts_params(shape: _RowsAccess, nbytes: int) -> InnerPersistentParams:
    """One row at a time beside sums over rows: the compiler decides about registers."""
    most = max(min(LONG_PARTS_BYTES // nbytes, LONG_PARTS_KEPT) // shape.vector, 1)
    fit = [t for t in ROW_THREADS if t * most >= shape.chunks] or [ROW_THREADS[-1]]
    x = min(fit[:2], key=lambda t: t * -(-shape.chunks // t))
    kept = -(-shape.chunks // x) * shape.vector
    return InnerPersistentParams(x, 1, shape.vector, kept, exact=x * kept == shape.columns)


def _looped_params(shape: _RowsAccess, *, has_columns: bool, writes: bool) -> InnerPersistentParams:
    """`writes`: along the row, and no columns are read."""
    row_bytes = shape.inputs * shape.columns * shape.widest
    chunks, times = shape.chunks, 1 if has_columns or row_bytes < WIDE_ROW_BYTES else 2
    x = min(power_of_two_at_least(chunks), (times if writes else 1) * LOOPED_THREADS)
    unroll = max(times * LOOPED_BYTES // (shape.vector * shape.widest), 1)
    unroll = min(power_of_two_at_most(unroll), power_of_two_at_least(-(-chunks // x)), 8)
    if 10 * _covered(chunks, x * unroll // 2) < 9 * _covered(chunks, x * unroll):
        unroll //= 2  # the last step would have little to do
    return InnerPersistentParams(x, 1, shape.vector, unroll=unroll, shifted=shape.begin > 0)


def _cluster_params(shape: _RowsAccess, nbytes: int, device: DeviceInfo) -> InnerPersistentParams:
    """Returns the least cluster whose threads keep a row; where none does, one that reads a row so
    that all rows under way stay in the cache of second level."""
    most = min(device.max_cluster, device.max_grid[1])
    sizes = [1 << k for k in range(1, most.bit_length())]
    if not sizes:
        return _looped_params(shape, has_columns=False, writes=False)
    x, is_shifted = CLUSTER_THREADS, shape.begin > 0
    for cluster in sizes:
        batch = -(-shape.chunks // (cluster * x))
        if batch * shape.vector * nbytes <= CLUSTER_BYTES:
            kept = batch * shape.vector
            exact = cluster * x * kept == shape.columns
            return InnerPersistentParams(
                x, 1, shape.vector, kept, exact=exact, shifted=is_shifted, cluster=cluster
            )
    row_bytes = shape.inputs * shape.columns * shape.widest
    fits = [c for c in sizes if 2 * row_bytes * (device.sm_count // c) <= device.l2_bytes]
    looped = _looped_params(shape, has_columns=False, writes=False)
    return replace(looped, cluster=(fits or sizes[-1:])[0])


def _covered(chunks: int, step: int) -> int:
    return -(-chunks // step) * step
