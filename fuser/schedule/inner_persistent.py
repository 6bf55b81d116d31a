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
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod

from fuser.device import DeviceInfo
from fuser.ir import primitives
from fuser.ir import scalar as sc
from fuser.ir.axis_graph import AxisGraph
from fuser.ir.fusion import Fusion
from fuser.ir.nodes import LinearOp, MatmulOp, TensorOp
from fuser.ir.scalar import Number, Scalar, Symbol
from fuser.ir.tensor import TensorView
from fuser.ir.types import ParallelType
from fuser.record import record
from fuser.schedule.facts import Facts, RunExtents
from fuser.schedule.pointwise import common_rejection
from fuser.schedule.propagate import AxisMatcher
from fuser.schedule.rows import (
    EXPENSIVE,
    REDUCTIONS,
    divide_once,
    kept_values,
    levels_of,
    most_bytes,
    separate_levels,
    two_pass_welford,
)
from fuser.schedule.space import Access, Space, iteration_space
from fuser.schedule.tiling import (
    Loops,
    arrange,
    cache_input,
    intermediates,
    parallelize,
    split_tile,
    vectorize_last,
)
from fuser.schedule.vectorize import VectorWidths, power_of_two_at_least, power_of_two_at_most

PT = ParallelType
NOTHING: Mapping[TensorView, Access] = {}
# Registers that a thread keeps of its row: with two blocks or more on a multiprocessor one loads
# while another computes.
KEPT_REGISTERS = 32
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
# Up to this many elements, any number of rows is one kernel; up to LONG_ROW, FEW_ROWS and more are:
# separate kernels share a long row between blocks. Not every longer one fits registers.
SHORT_ROW = 8192
LONG_ROW = 16384
FEW_ROWS = 32


@record
class InnerPersistentParams:
    """What the inner persistent scheduler decides. Zero threads: plain loops of the CPU.

    `kept` counts the elements of a row in one thread; 0: every level loops over the row, `unroll`
    vectors of each input at a time. `keeps_costly`: results of costly ops are kept, too.
    `resident` threads are to find registers on a multiprocessor (0: the compiler decides).
    `exact`: what the threads keep is the row, so that nothing has to be tested.
    """

    threads_x: int = 0
    threads_y: int = 1
    vector: int = 1
    kept: int = 0
    keeps_costly: bool = False
    unroll: int = 1
    resident: int = 0
    exact: bool = False

    def is_near(self, other: InnerPersistentParams) -> bool:
        """Whether kernels of both differ in nothing that a small input would notice. Where one is
        exact, its guards tell whether it serves."""
        return replace(self, exact=False) == replace(other, exact=False)

    def is_alike(self, other: InnerPersistentParams) -> bool:
        """Whether a kernel made with `other` serves, if less well: not with most threads idle."""
        if (self.vector, bool(self.kept)) != (other.vector, bool(other.kept)):
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
            f"{', exact' if self.exact else ''})"
        )


# ------------------------------------------------------------------ what is accepted
def accepts(fusion: Fusion) -> str | None:
    """Return why the fusion is not of this kind, None when it is."""
    reductions = [op for op in fusion.exprs if isinstance(op, REDUCTIONS)]
    if not reductions:
        return "there is no reduction"
    for op in fusion.exprs:
        if isinstance(op, (MatmulOp, LinearOp)):
            return f"{op.name} of {op.out_tensor} is a contraction"
    if fusion.aliases:
        return "an output is written into an input"
    graph = AxisGraph(fusion)
    reason = common_rejection(fusion, graph)
    if reason is not None:
        return reason
    reference = reductions[0].out_tensor
    for op in reductions:
        if _classes(graph, op.out_tensor) != _classes(graph, reference):
            return f"{op.out_tensor} and {reference} reduce different axes"
    return _tensor_rejection(fusion, graph, reference) or _order_rejection(fusion, graph, reference)


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


def _order_rejection(fusion: Fusion, graph: AxisGraph, reference: TensorView) -> str | None:
    """The reduced axes are innermost in memory."""
    space = iteration_space(fusion, reference, graph)
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
    return columns <= SHORT_ROW or (columns <= LONG_ROW and rows >= FEW_ROWS)


def suits(fusion: Fusion, sizes: Mapping[Symbol, Number]) -> bool:
    """Whether one kernel pays for these sizes; unknown ones are those of many short rows."""
    extents = row_extents(_reference(fusion))
    try:
        rows, columns = (int(sc.evaluate(x, sizes)) for x in extents)
    except KeyError:
        return True
    return pays(rows, columns)


# ------------------------------------------------------------------ the fusion, seen along rows
def _reference(fusion: Fusion) -> TensorView:
    return next(op.out_tensor for op in fusion.exprs if isinstance(op, REDUCTIONS))


class _View:
    """A fusion along the rows of its reference."""

    def __init__(self, fusion: Fusion) -> None:
        self.fusion = fusion
        self.reference = _reference(fusion)
        self.graph = AxisGraph(fusion)
        self.space: Space = iteration_space(fusion, self.reference, self.graph)
        runs = self.space.runs(self.space.memory_order())
        self.iterated = [list(r) for r in runs if not self.space.is_reduced(r[0])]
        self.reduced = [list(r) for r in runs if self.space.is_reduced(r[0])]
        self.matcher = AxisMatcher(self.graph, self.reference)
        logical = self.reference.domain.logical
        self.row_axes = frozenset(logical[p].number for r in self.reduced for p in r)
        self.iterated_axes = frozenset(logical[p].number for r in self.iterated for p in r)

    @property
    def innermost(self) -> int:
        return self.reduced[-1][-1]

    def axes(self, tv: TensorView) -> frozenset[int] | None:
        """Return the axes of the reference that a tensor iterates; None where it has others."""
        concrete = [a for a in tv.domain.no_reductions if not a.is_broadcast]
        matches = [self.matcher.reference_of(a) for a in concrete]
        found = frozenset(m.number for m in matches if m is not None)
        return None if None in matches or len(found) < len(concrete) else found

    def is_per_row(self, tv: TensorView) -> bool:
        """Whether a tensor has one value for each row."""
        axes = self.axes(tv)
        return axes is not None and not axes & self.row_axes

    @cached_property
    def full(self) -> frozenset[TensorView]:
        """Return the tensors that have all axes, those read at shifted indices excepted."""
        wanted = self.row_axes | self.iterated_axes
        unknown = {a.tv for a in self.space.accesses if a.order is None and not a.is_output}
        return frozenset(
            tv for tv in self.fusion.tensors() if tv not in unknown and self.axes(tv) == wanted
        )

    def is_costly(self, op: TensorOp) -> bool:
        """Whether computing an op again costs more than keeping its result: it is expensive, or
        reads memory that is not kept."""
        full = self.full
        return op.name in EXPENSIVE or any(
            isinstance(v, TensorView) and v in self.fusion.inputs and v not in full
            for v in op.inputs
        )


# ------------------------------------------------------------------ heuristics
def generic(device: DeviceInfo) -> InnerPersistentParams:
    """Return the parameters that rely on nothing."""
    if device.kind == "cpu":
        return InnerPersistentParams()
    return InnerPersistentParams(threads_x=THREADS_PER_BLOCK)


def chooser(fusion: Fusion, device: DeviceInfo) -> Callable[[Facts], InnerPersistentParams]:
    """Return what chooses form, vector width and thread shape for an input class."""
    if device.kind == "cpu":
        loops = InnerPersistentParams()
        return lambda facts: loops
    given, _ = fusion.copy()
    _rewrite(given, InnerPersistentParams(threads_x=1, kept=1))
    view = _View(given)
    logical = view.reference.domain.logical
    widths = VectorWidths(view.space.vector_candidates(view.innermost))
    extents = RunExtents(given, [[logical[p] for p in run] for run in view.iterated + view.reduced])
    count = len(view.iterated)
    kept = kept_values(given, view.full, is_costly=view.is_costly)
    inputs = kept_values(given, view.full, is_costly=lambda op: False)
    has_costly = len(kept) > len(inputs)
    widest = max((a.nbytes for a in view.space.accesses if not a.is_output), default=4)

    def choose(facts: Facts) -> InnerPersistentParams:
        found = extents.of(facts)
        rows, columns = prod(found[:count]), prod(found[count:])
        vector = widths.of(facts, found[-1])
        plans = [(most_bytes(inputs, vector), False)]
        if has_costly:
            plans.insert(0, (most_bytes(kept, vector), True))
        for nbytes, costly in plans:
            limit = ROW_REGISTERS_COSTLY if costly else ROW_REGISTERS
            if columns * nbytes <= 4 * limit:
                return _kept_params(rows, columns, (vector, widest), nbytes, costly, device)
        return _looped_params(columns, vector, widest)

    return choose


def _kept_params(
    rows: int, columns: int, widths: tuple[int, int], nbytes: int, costly: bool, device: DeviceInfo
) -> InnerPersistentParams:
    vector, widest = widths
    chunks = -(-columns // vector)
    # The compiler keeps what it converts in its wider form.
    most = max(4 * KEPT_REGISTERS // (max(nbytes, 4) * vector), 1)
    # Lanes that lie side by side read whole lines of memory; those without work cost as others do.
    least = min(max(LINE // (vector * widest), 1), device.warp_size, power_of_two_at_least(chunks))
    fit = [t for t in ROW_THREADS if least <= t and t * most >= chunks] or [ROW_THREADS[-1]]
    warp = [t for t in fit if t <= device.warp_size] or fit[:1]
    x = min(warp, key=lambda t: t * -(-chunks // t))
    batch = -(-chunks // x)
    y = max(THREADS_PER_BLOCK // x, 1) if rows > device.sm_count else 1
    exact = x * batch * vector == columns and rows % y == 0
    if x * batch != chunks:
        # Rows of many lengths share few kernels.
        batch = max(min(power_of_two_at_least(batch), most), batch)
    kept = batch * vector
    # Several narrow inputs take more registers once they are converted.
    resident = RESIDENT_ONE if costly or nbytes < 4 else RESIDENT
    return InnerPersistentParams(x, y, vector, kept, costly, resident=resident, exact=exact)


def _looped_params(columns: int, vector: int, widest: int) -> InnerPersistentParams:
    chunks = -(-columns // vector)
    x = min(power_of_two_at_least(chunks), LOOPED_THREADS)
    unroll = max(LOOPED_BYTES // (vector * widest), 1)
    unroll = min(power_of_two_at_most(unroll), power_of_two_at_least(-(-chunks // x)), 8)
    return InnerPersistentParams(x, 1, vector, unroll=unroll)


# ------------------------------------------------------------------ application
def apply(fusion: Fusion, params: InnerPersistentParams) -> None:
    """Schedule the fusion in place."""
    _rewrite(fusion, params)
    view = _View(fusion)
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
    _apply_threads(_View(fusion), params, kept, needed)


def _rewrite(fusion: Fusion, params: InnerPersistentParams) -> None:
    """Give the fusion the ops that suit the form."""
    _fork_outputs(fusion)
    fusion.resident_threads = params.resident
    if params.kept:
        two_pass_welford(fusion)
    if params.threads_x:
        divide_once(fusion, _View(fusion).is_per_row)


def _fork_outputs(fusion: Fusion) -> None:
    """An output that others read is computed in registers; its copy is the output."""
    for out in dict.fromkeys(fusion.outputs):
        if fusion.uses(out):
            primitives.cache_fork(out)


def _groups(view: _View) -> list[list[int]]:
    """Return the rows, as one group with the broadcast axes of the reference, and the row."""
    rank = len(view.reference.domain.logical)
    broadcast = [p for p in range(rank) if p not in view.space.concrete]
    rows = [*broadcast, *(p for run in view.iterated for p in run)]
    row = [p for run in view.reduced for p in run]
    return [g for g in (rows, row) if g]


def _apply_loops(view: _View) -> None:
    groups = _groups(view)
    arrange(view.reference, groups)
    # Broadcast axes alone are no rows: what reads the result may lack them.
    _finish(view, 1 if view.iterated else 0, [])


def _apply_threads(
    view: _View,
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
        is_wide = params.vector > 1 and access.is_vector_candidate(view.innermost)
        if params.kept and tv in full and fusion.uses(tv):
            copy = cache_input(tv)
            kept.append(copy)
            ahead[copy] = access
        elif is_wide or (tv in full and params.unroll > 1):
            for uses in _by_level(fusion.uses(tv), needed):
                copy = primitives.cache_after(
                    tv, propagate_allocation_domain=False, cached_uses=uses
                )
                ahead[copy] = access
    once = _once_per_row(view, levels) if view.iterated else []
    shared, tile = _shape(view, params)
    wide = [
        out
        for out in dict.fromkeys(fusion.outputs)
        if params.vector > 1 and accesses[out].is_vector_candidate(view.innermost)
    ]
    # What is loaded again and again is loaded a tile at a time: all of it is under way at once.
    _finish(view, shared if view.iterated else 0, kept, ahead, 1 if params.kept else tile)
    for tv in once:
        tv.compute_at = 0
    for copy, access in ahead.items():
        if params.vector > 1 and access.is_vector_candidate(view.innermost):
            vectorize_last(copy)
    for out in wide:
        vectorize_last(out)


def _once_per_row(view: _View, levels: dict[TensorView, int]) -> list[TensorView]:
    """Return what has a value for each row and is read along it: a register of each thread."""
    fusion, found = view.fusion, list[TensorView]()
    for access in view.space.accesses:
        tv = access.tv
        is_input = not access.is_output and bool(access.order and fusion.uses(tv))
        if is_input and view.axes(tv) == view.iterated_axes:
            found.append(cache_input(tv))
    # None waits for another: their loops would have to be shared, as those of reductions are.
    waits: set[TensorView] = set(found)
    for op in fusion.exprs:
        tv = op.out_tensor
        if tv not in levels or isinstance(op, REDUCTIONS) or tv in fusion.outputs:
            continue
        if not view.is_per_row(tv):
            continue
        if any(v in waits for v in op.inputs):
            waits.add(tv)
        elif levels.get(tv) and view.axes(tv) == view.iterated_axes:
            along = any(not view.is_per_row(out) for u in fusion.uses(tv) for out in u.outputs)
            if along:
                found.append(tv)
                waits.add(tv)
    return found


def _by_level(uses: Sequence[TensorOp], needed: Mapping[TensorView, int]) -> list[list[TensorOp]]:
    found: dict[int, list[TensorOp]] = {}
    for op in uses:
        found.setdefault(needed.get(op.out_tensor, 0), []).append(op)
    return list(found.values())


def _shape(view: _View, params: InnerPersistentParams) -> tuple[int, int]:
    """Build the loops of the reference; return how many of them are rows, and the tile's."""
    tv, groups = view.reference, _groups(view)
    if params.exact:
        _assume_exact(view, groups, params)
    arrange(tv, groups)
    types: list[ParallelType] = []
    if len(groups) > 1:
        if params.threads_y > 1:
            tv.split(0, params.threads_y)
            types += [PT.grid_x, PT.block_y]
        else:
            types += [PT.grid_x]
    at = len(types)
    if params.vector > 1:
        tv.split(at, params.vector)
    batch = params.kept // params.vector if params.kept else params.unroll
    tile = split_tile(tv, at, ((batch, PT.unroll), (params.threads_x, PT.block_x)))
    if params.kept:
        # One tile holds the row.
        view.fusion.assume(tv.domain.loop[at].extent, sc.ONE)
    tile += [PT.serial] if params.vector > 1 else []
    parallelize(tv, [*types, PT.serial, *tile])
    return at, len(tile)


def _assume_exact(view: _View, groups: list[list[int]], params: InnerPersistentParams) -> None:
    """Make the length of the row a constant, and the rows whole blocks."""
    logical = view.reference.domain.logical
    *rows, row = groups
    if len(row) == 1:
        view.fusion.assume(logical[row[0]].extent, sc.const(params.threads_x * params.kept))
    size = view.fusion.canonical(logical[rows[0][0]].extent) if rows else None
    if params.threads_y > 1 and isinstance(size, Symbol) and len(rows[0]) == 1:
        view.fusion.divisible[size] = params.threads_y


def _finish(
    view: _View,
    shared: int,
    kept: Sequence[TensorView],
    ahead: Mapping[TensorView, Access] = NOTHING,
    inside: int = 0,
) -> None:
    """Give all tensors their loops and positions: `shared` loop axes of the reference are rows,
    what is loaded `ahead` has `inside` loops of its own."""
    fusion, reference = view.fusion, view.reference
    loops, view = Loops(fusion, reference), _View(fusion)
    for tv in (*fusion.outputs, *intermediates(fusion, ())):
        axes = view.axes(tv)
        is_step = isinstance(tv.definition(), REDUCTIONS) or tv in fusion.outputs
        if isinstance(tv.definition(), REDUCTIONS):
            done = loops.repeat(tv)
        else:
            done = axes is not None and (loops.repeat(tv) or loops.repeat(tv, only=axes))
        if not done and is_step:
            raise AssertionError(f"{tv} does not follow {reference}")
    for tv in intermediates(fusion, ()):
        if isinstance(tv.definition(), REDUCTIONS) or tv in kept:
            tv.compute_at = shared
        elif tv in ahead:
            tv.compute_at = len(tv.domain.loop) - inside
        else:
            loops.inline_whole(tv)
