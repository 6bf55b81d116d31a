"""The reduction scheduler: reductions over the same axes, with pointwise ops before and after them.

The first reduction is the reference tensor, whose loops all other tensors copy. Its axes are put in
the memory order of the inputs. In an *inner* reduction, the innermost axes in memory are reduced;
in an *outer* reduction, they are not.

Loops are listed from outer to inner. BIDx and BIDy loops run over CUDA blocks, TIDx and TIDy loops
over threads. S loops are serial, UR unrolled, and V a vector. US is unswitched: the body exists in
two versions, with and without bounds checks. `r` marks reduced axes. All other axes are called rows
or columns. `..` stands for several axes, and `|` separates the loops over results, those over the
elements of one result, and those of a vector:

    GPU inner  [BIDx rows, TIDy rows | r BIDy, r S.., r US, r UR, r TIDx | r V]
    GPU outer  [BIDx columns, TIDx columns | r BIDy, r S, r US, r UR, r TIDy | columns V]
    GPU short  [BIDx columns, TIDx columns | r S, r US, r UR | columns UR, columns V]
    CPU inner  [S rows.. | r S..]
    CPU outer  [S rows.., S column tiles, US | r S.. | S 256 columns]

Inputs are loaded into registers right after US. All loads of an unrolled loop are thus issued
before the first value is used. An outer reduction has one accumulator per column of the vector. A
*short* reduction is an outer one over few elements per column. Each thread sums whole columns, so
no thread waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from fuser.ir import primitives
from fuser.ir.axis_graph import AxisGraph
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.ops.nodes import LibraryOp, WelfordOp
from fuser.ir.types import ParallelType
from fuser.ops.reference.meaning import REDUCING
from fuser.schedule.input_facts import Facts, RunExtents
from fuser.schedule.iteration_space import (
    Access,
    Space,
    VectorWidths,
    iteration_space,
    power_of_two_at_least,
    power_of_two_at_most,
)
from fuser.schedule.loop_propagation import AxisMatcher
from fuser.schedule.pointwise import (
    BYTES_IN_FLIGHT,
    common_rejection,
    loaded_bytes,
    loads_for,
    unroll_of,
)
from fuser.schedule.tiling import (
    Loops,
    arrange,
    cache_input,
    cache_output,
    intermediates,
    is_direct_input,
    loops_error,
    parallelize,
    shift_rows,
    split_tile,
    vectorize_last,
)
from fuser.support.device import DeviceInfo
from fuser.support.record import record, replace

PT = ParallelType
# Columns that a CPU kernel reduces together, so that their accumulators stay in the L1 cache.
CPU_COLUMNS = 256


# ------------------------------------------------------------------ acceptance
def accepts(fusion: Fusion) -> str | None:
    """Returns the reason why the reduction scheduler rejects the fusion; None if the fusion is
    accepted.

    The scheduler accepts independent reductions over the same axes, with pointwise ops before and
    after the reductions.
    """
    reductions = _reductions(fusion)
    if not reductions:
        return "there is no reduction"
    for op in fusion.exprs:
        if isinstance(op, LibraryOp):
            return f"{op.name} of {op.out_tensor} is computed by a library call"
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
                return f"{op.out_tensor} reduces a value that depends on another reduction"
            if _classes(graph, op.out_tensor) != _classes(graph, reference):
                return f"{op.out_tensor} and {reference} reduce different axes"
        if reads_result or isinstance(op, REDUCING):
            below.update(op.outputs)
    return _tail_rejection(fusion, graph, reference, below)


def _tail_rejection(
    fusion: Fusion, graph: AxisGraph, reference: TensorView, below: set[TensorView]
) -> str | None:
    """Returns the reason why the fusion must be rejected, if some tensor cannot have the loops of
    the reductions; None if all tensors can.

    `reference` is the result of the first reduction, and `below` are the tensors that depend on a
    reduction. A fusion is accepted under two conditions:

    - A tensor in `below` has only axes of `reference` that are not reduced. If it is an output, it
      has all of them.
    - Any other output has all axes of `reference`.
    """
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
    """Returns pairs of axes that one kernel can iterate by the same loop, although no op relates
    them.

    The first axis of a pair is an axis of the first reduction. The second is the axis at the same
    position of another reduction. Two reductions have such pairs only if all their axes have equal
    extents, position by position.
    """
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
    """The axes of a reduction in memory order, in groups of adjacent axes that one loop can
    iterate.

    The axes of a group are contiguous in every tensor of the kernel.

    - `iterated`, `reduced`: the groups of non-reduced and of reduced axes, outermost first.
    - `inner`: whether the innermost group is reduced.
    """

    iterated: tuple[tuple[int, ...], ...]
    reduced: tuple[tuple[int, ...], ...]
    inner: bool

    @property
    def innermost(self) -> int:
        """The position of the innermost axis along which the kernel reads memory; -1 if there are
        no axes.
        """
        runs = self.reduced if self.inner else self.iterated
        return runs[-1][-1] if runs else -1


def _runs(space: Space) -> _Runs:
    runs = space.runs(space.memory_order())
    iterated = tuple(r for r in runs if not space.is_reduced(r[0]))
    reduced = tuple(r for r in runs if space.is_reduced(r[0]))
    return _Runs(iterated, reduced, not iterated or space.is_reduced(runs[-1][0]))


# ------------------------------------------------------------------ heuristics
def generic(device: DeviceInfo) -> ReductionParams:
    """Returns parameters with which a reduction kernel is correct for all inputs.

    The field `inner` (whether the innermost axes in memory are reduced) has no effect, because
    `apply` finds this out from the fusion. `device` is the device that runs the kernel.
    """
    threads = 0 if device.kind == "cpu" else THREADS_INNER
    return ReductionParams(inner=True, threads_x=threads)


def chooser(fusion: Fusion, device: DeviceInfo) -> Callable[[Facts], ReductionParams]:
    """Returns a function that chooses a reduction kernel's parameters for given inputs.

    The function gets the sizes and alignments of the inputs. It chooses vector width, thread
    counts, and the number of CUDA blocks that share one reduction.
    """
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
        wide = shifted.wider(facts, last, vector)
        if wide:
            reduced, step = [last + wide - 1], (wide, wide * widest)
            return replace(inner_params(iterated, reduced, step, device), shifted=True)
        step = vector, vector * widest
        if runs.inner:
            return inner_params(iterated, reduced, step, device, is_welford=is_welford)
        return outer_params(iterated, reduced, step, loaded, busy, device)

    return choose


def _is_loaded(space: Space, access: Access) -> bool:
    """Returns whether an input is loaded into registers before it is used. This is so if it has all
    axes.
    """
    return is_direct_input(access) and set(access.order or ()) == set(space.concrete)


def _shiftable(space: Space, runs: _Runs) -> tuple[Access, ...]:
    """Returns the inputs and outputs that could be accessed in vectors if rows were shifted.

    The read of a shifted row begins at an aligned address, at or before the row's first element, so
    that vectors are aligned even if the row's length is no multiple of a vector. The result has two
    kinds of tensors: inputs that are loaded into registers before they are used, and outputs that
    are stored in vectors. Returns an empty tuple if some of these tensors have gaps in memory or
    another memory order, or if the reduced axes are not innermost.
    """
    stored = {a.tv for a in space.vector_candidates(runs.innermost) if a.is_output}
    found = tuple(a for a in space.accesses if a.tv in stored or _is_loaded(space, a))
    has_rows = runs.inner and bool(runs.iterated) and len(runs.reduced) == 1
    return found if has_rows and space.are_dense(found) else ()


# ------------------------------------------------------------------ application
def apply(fusion: Fusion, params: ReductionParams) -> None:
    """Schedules the fusion in place with these parameters.

    Copies into registers are added. Then three things are set for each tensor: its loops, the CUDA
    blocks and threads that execute them, and how many of these loops its consumers share.
    """
    fusion.joined = tuple(joined_spaces(fusion))
    # A result that other ops read stays in registers; its copy becomes the output.
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
    """Returns the groups of non-reduced axes of the reductions; each group becomes one loop.

    Broadcast axes join the outermost group.
    """
    groups = [list(r) for r in runs.iterated]
    broadcast = _broadcasts(space)
    if broadcast:
        groups[0:1] = [broadcast + (groups[0] if groups else [])]
    return groups


def _apply_loops(fusion: Fusion, space: Space, runs: _Runs) -> None:
    reference = space.reference
    rows, reduced = _iterated_groups(space, runs), [list(r) for r in runs.reduced]
    arrange(reference, [*rows, *reduced])
    # Broadcast axes alone are no rows: a reader of the result may lack them.
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
    # Computed before outputs are copied, because a copy of the reference has no reduced axes.
    rows = _iterated_groups(space, runs)
    reduced = [list(r) for r in runs.reduced]
    loaded: dict[TensorView, Access] = {}
    if params.vector * params.unroll * params.columns > 1:
        for access in space.accesses:
            if _is_loaded(space, access):
                loaded[cache_input(access.tv)] = access
    stored: dict[TensorView, TensorView] = {}
    if params.vector > 1:
        # In an inner reduction, only outputs that do not depend on it are candidates.
        for access in space.vector_candidates(runs.innermost):
            if access.is_output:
                is_below = access.tv in below
                registers, out = cache_output(access.tv)
                stored[registers] = out
                below.update([registers] if is_below else [])
    if not runs.inner and reference in stored.values():
        # The registers hold the reduction now, so they are the reference.
        reference = next(reg for reg, out in stored.items() if out is reference)
    shape = _shape_inner if runs.inner else _shape_outer
    shared, unswitch = shape(reference, rows, reduced, params)
    if not runs.iterated:
        shared = 0  # broadcast axes alone are no rows: a reader of the result may lack them
    vectors = {
        tv: params.vector > 1 and a.is_vector_candidate(runs.innermost) for tv, a in loaded.items()
    }
    _finish(fusion, reference, shared, vectors, stored, unswitch + 1)


def _below(fusion: Fusion) -> set[TensorView]:
    """Returns the results of reductions, and all tensors that are computed from these results."""
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
    """Gives all tensors their loops, and sets how many outer loops each shares with its consumers.

    - `reference`: the reduction whose loops the other tensors copy.
    - `shared`: the number of its loops over non-reduced axes.
    - `loaded`: copies of inputs in registers; the value says whether the copy is a vector.
    - `loads_at`: the number of loops that these copies share with their consumers.
    - `stored`: maps each result in registers to the output in memory.
    """
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
                raise loops_error(tv, reference)
        elif not loops.repeat(tv) and (is_reduction or tv in fusion.outputs):
            raise loops_error(tv, reference)
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
    """Splits a reduced axis into [(BIDy,) S, US, tile.., (vector)]: blocks, loops, threads and a
    vector.

    BIDy are CUDA blocks, S is a serial loop, US an unswitched loop (its body exists with and
    without bounds checks). `tile` has the factors and parallel types of a tile from outer to inner.
    `grid` is the number of CUDA blocks that share the reduction. With `is_outer`, neighbouring
    parts of the axis belong to different blocks, so that the blocks read nearby rows at the same
    time. Returns the parallel types of the new axes, from outer to inner.
    """
    if vector > 1:
        tv.split(axis, vector)
    types = [PT.unswitch, *split_tile(tv, axis, tile)]
    types += [PT.serial] if vector > 1 else []
    tv.split(axis, 1)
    if grid > 1 and is_outer:
        # All blocks process nearby rows at a time, so that these rows are in the cache together.
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
    """Builds the loops of a reduction whose reduced axes are innermost in memory.

    `rows` and `reduced` are groups of positions of the non-reduced and the reduced axes, outermost
    first. Returns (number of loops over rows, position of the unswitched loop). The body of the
    unswitched loop exists with and without bounds checks; inputs are loaded inside it.
    """
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
    """Builds the loops of a reduction whose reduced axes are not innermost in memory.

    `rows` and `reduced` are groups of positions of the non-reduced and the reduced axes, outermost
    first. Returns (number of loops over non-reduced axes, position of the unswitched loop). The
    body of the unswitched loop exists with and without bounds checks; inputs are loaded inside it.
    """
    outside = [p for run in rows[:-1] for p in run]
    groups = [outside] if outside else []
    arrange(tv, [*groups, rows[-1], [p for run in reduced for p in run]])
    column = len(groups)
    if params.vector > 1:
        tv.split(column, params.vector)
    if outside and params.threads_y == 1:
        # One index for all columns, so that blocks are full even if a row has few columns.
        tv.merge(0, 1)
        column, outside = 0, []
    tv.split(column, params.columns * params.threads_x)
    inside = [PT.serial] if params.vector > 1 else []
    if params.columns > 1:
        tv.split(column + 1, params.threads_x)
        tv.reorder({column + 1: column + 2})
        inside = [PT.unroll, *inside]
    if outside:
        # Blocks of columns and the outer rows share BIDx.
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


# ----------------------------------------------------------------------
# The heuristic of the reduction scheduler: threads, blocks and vectors of each form.

# Bytes of one input that a thread loads before it uses the first value; measured on an H200.
BYTES_INNER = 32
BYTES_OUTER = 128
MAX_UNROLL = 16
# Threads that keep a multiprocessor busy. With fewer rows, each row gets more threads, then several
# blocks.
THREADS_PER_SM = 1024
# The same for variances across blocks, whose combination takes longer. Measured on an H200, batch
# norm of 8192 x 1536 in bfloat16: 30.4 us with 1024, 25.0 with 512.
THREADS_PER_SM_WELFORD = 512
THREADS_INNER = 128
# The maximum number of blocks on a multiprocessor.
BLOCKS_PER_SM = 32
THREADS_OUTER = 256
# Bytes that one block reads in about the time that blocks need to exchange partial results. If a
# strip of columns, one sector wide, has no more bytes, one block sums it alone. Measured on an
# H200, relative to several blocks: a column sum of 16 KB strips takes half the time, one of 64 KB
# strips 0.9 to 1.4 times as long.
BYTES_ALONE = 32768
BYTES_SECTOR = 32
THREADS_ALONE = 512
# If all steps are separate blocks, and still fewer than multiprocessors, blocks of half the width
# are used, down to half of these bytes. Measured on an H200, a column sum of 2048 x 384 in float32:
# 4.23 us with 96 blocks, 3.60 with 192.
LEAST_HALVED = 16
# If a load is no wider than this (an odd number of half-precision columns), more threads are used
# to have as many bytes outstanding. Measured on an H200, 4096 x 50257: 133 us, torch.compile's
# kernel 128.
NARROW = 2
THREADS_OUTER_NARROW = 512
MAX_THREADS_PER_ROW = 256
# Rows that consist of several runs in memory: the number of runs that are unrolled, and the range
# of threads per run. Whole warps are used instead of powers of two if the latter leave more than a
# tenth of the lanes idle. The largest number of threads is chosen among those within a twentieth of
# the fewest idle lanes; for variances of wide vectors, whose values take registers, at most half as
# many. If there are rows for all multiprocessors, they are not split over blocks. Measured on an
# H200, sums and variances of 64 x 256 x 3136 over the outer and the inner axis, in us
# (torch.compile; a tile of 256 threads and two blocks): bfloat16 27.0 (31.8; 44.4) and 40.0 (54.8;
# 68.8; with 416 threads 48.8), float32 48.9 (50.6; 64.3) and 51.3 (57.3; 119.9).
UNROLL_OUTER = 4
LEAST_RUN_THREADS, MOST_RUN_THREADS = 128, 512
WIDE = 4
IDLE_LANES = 1.1
NEARLY_BEST = 1.05
# An outer reduction of at most this many rows is short: a thread sums whole columns.
SHORT_ROWS = 16
THREADS_SHORT = 128
# Rows of at least this many vectors are processed by two warps.
LONG_ROW = 512


@record
class ReductionParams:
    """The parameters of a reduction kernel.

    - `inner`: whether the innermost axes in memory are reduced.
    - `threads_x`: threads along the innermost axes; 0 for the serial loops of a CPU. `threads_y`:
      threads along the other axes.
    - `vector`: the number of elements of a vector. `unroll`: the number of vectors that a thread
      loads before it uses the first.
    - `grid`: the number of CUDA blocks that share one reduction.
    - `unroll_outer`: whether the outer one of two loops over reduced axes is unrolled.
    - `columns`: the number of vectors of neighbouring results per thread, in a reduction over outer
      axes.
    - `shifted`: whether rows that begin at any address are read in aligned vectors
      (`ir.domain.Shift`).
    """

    inner: bool
    threads_x: int = 0
    threads_y: int = 1
    vector: int = 1
    unroll: int = 1
    grid: int = 1
    unroll_outer: bool = False
    columns: int = 1
    shifted: bool = False

    def is_near(self, other: ReductionParams) -> bool:
        """Returns whether a compiled kernel with the parameters `other` can replace one with
        `self`.

        If so, no kernel is compiled with `self` for small inputs, because both kernels take about
        the same time. Returns False if the numbers of threads, or of CUDA blocks per reduction,
        differ, because such kernels differ by a factor of two in time for inputs of 25 MB.
        """
        mine, others = (replace(p, unroll=0, unroll_outer=False, columns=0) for p in (self, other))
        return mine == others

    def is_alike(self, other: ReductionParams) -> bool:
        """Returns whether a compiled kernel with `other` can replace one with `self`, though
        perhaps slower.
        """
        forms = [(p.inner, p.vector, bool(p.threads_x), p.shifted) for p in (self, other)]
        return forms[0] == forms[1]

    def __str__(self) -> str:
        form = "inner" if self.inner else "outer"
        if not self.threads_x:
            return f"reduction({form}, loops)"
        where = " of the outer run" if self.unroll_outer else ""
        columns = f", columns {self.columns}" if self.columns > 1 else ""
        return (
            f"reduction({form}, threads {self.threads_x}x{self.threads_y}, vector {self.vector}, "
            f"unroll {self.unroll}{where}, grid {self.grid}{columns}"
            f"{', shifted' if self.shifted else ''})"
        )


def inner_params(
    iterated: list[int],
    reduced: list[int],
    step: tuple[int, int],
    device: DeviceInfo,
    *,
    is_welford: bool = False,
) -> ReductionParams:
    """Returns the parameters of a reduction whose reduced axes are innermost in memory.

    `iterated` and `reduced` are the extents of the loops over non-reduced and reduced axes, from
    outer to inner. `step` is the number of elements of a vector and its bytes. `is_welford`:
    whether a variance is computed.
    """
    vector, nbytes = step
    rows, chunks, outer = prod(iterated), -(-reduced[-1] // vector), prod(reduced[:-1])
    wanted = device.sm_count * THREADS_PER_SM
    most = min(power_of_two_at_least(-(-wanted // rows)), MAX_THREADS_PER_ROW)
    x = min(
        power_of_two_at_least(chunks),
        max(most, device.warp_size * (2 if chunks >= LONG_ROW else 1)),
    )
    per_thread = BYTES_INNER if most <= device.warp_size else 2 * BYTES_INNER
    unroll = min(loads_for(per_thread, nbytes, MAX_UNROLL), power_of_two_at_least(-(-chunks // x)))
    unroll_outer = unroll < UNROLL_OUTER <= outer and chunks <= x
    is_heavy = is_welford and vector > WIDE
    fuller = _fuller(chunks, x * unroll, is_heavy=is_heavy) if outer >= UNROLL_OUTER else 0
    if fuller:
        x, unroll_outer = fuller, True
    if unroll_outer:
        unroll = UNROLL_OUTER
    y = min(max(THREADS_INNER // x, 1), power_of_two_at_least(rows))
    steps = -(-(outer * -(-chunks // x)) // unroll)
    is_enough = fuller and rows >= device.sm_count
    grid = 1 if is_enough else _grid(-(-rows // y) * x * y, steps, wanted, device)
    return ReductionParams(True, x, y, vector, unroll, grid, unroll_outer)


def _fuller(chunks: int, tile: int, *, is_heavy: bool) -> int:
    """Returns a number of threads that leaves clearly fewer threads idle than usual; 0 if there is
    no such number.

    The threads process a row of `chunks` vectors. Usually they process `tile` vectors at a time,
    and some threads are idle in the last step. With `is_heavy`, the maximum number of threads is
    halved, because variances of wide vectors take many registers.
    """

    def covered(x: int) -> int:
        return -(-chunks // x) * x

    most = MOST_RUN_THREADS // 2 if is_heavy else MOST_RUN_THREADS
    threads = range(LEAST_RUN_THREADS, most + 1, 32)
    least = min(map(covered, threads))
    best = max(x for x in threads if covered(x) <= NEARLY_BEST * least)
    return best if covered(best) * IDLE_LANES < covered(tile) else 0


def outer_params(
    iterated: list[int],
    reduced: list[int],
    step: tuple[int, int],
    loaded: int,
    busy: int,
    device: DeviceInfo,
) -> ReductionParams:
    """Returns the parameters of a reduction whose reduced axes are not innermost in memory.

    - `iterated`, `reduced`: the extents of the loops over non-reduced and reduced axes, from outer
      to inner.
    - `step`: the number of elements of a vector, and its bytes.
    - `loaded`: the bytes of one element, added up over all inputs.
    - `busy`: the number of threads that keep the device busy.
    """
    vector, nbytes = step
    chunks, rows = -(-iterated[-1] // vector), prod(reduced)
    x = min(power_of_two_at_least(chunks), device.warp_size)
    threads = THREADS_OUTER_NARROW if nbytes <= NARROW else THREADS_OUTER
    y = min(threads // x, power_of_two_at_least(rows))
    unroll = min(loads_for(BYTES_OUTER, nbytes, MAX_UNROLL), power_of_two_at_least(-(-rows // y)))
    blocks = prod(iterated[:-1]) * -(-chunks // x)
    steps = -(-rows // (y * unroll))
    grid = _grid(blocks * x * y, steps, busy, device)
    chosen = ReductionParams(False, x, y, vector, unroll, grid)
    narrow = max(min(x, BYTES_SECTOR // nbytes), 1)
    most = rows * narrow * vector * loaded
    if grid > 1 and most <= BYTES_ALONE:
        return _alone(chosen, narrow, rows, most)
    is_few = steps > 1 and blocks * grid < device.sm_count and grid * 2 > steps
    is_wide = x == device.warp_size and nbytes >= LEAST_HALVED
    return replace(chosen, vector=vector // 2) if is_few and is_wide else chosen


def _alone(chosen: ReductionParams, x: int, rows: int, nbytes: int) -> ReductionParams:
    """Returns a copy of the parameters `chosen` in which each column is summed by one CUDA block,
    without an exchange between blocks.

    With `chosen`, several blocks share each sum. The columns of a block have so few bytes that the
    exchange would take longer than the sum in one block. A block has `x` threads along the columns,
    and reads `nbytes` bytes in all `rows` together.
    """
    wanted = max(power_of_two_at_least(-(-nbytes // BYTES_OUTER)), THREADS_OUTER)
    y = min(min(wanted, THREADS_ALONE) // x, power_of_two_at_least(rows))
    unroll = min(chosen.unroll, power_of_two_at_least(-(-rows // y)))
    return replace(chosen, threads_x=x, threads_y=y, unroll=unroll, grid=1)


def short_params(
    columns: int, rows: int, vector: int, loaded: int, device: DeviceInfo
) -> ReductionParams:
    """Returns the parameters of a reduction over few outer elements, in which a thread sums whole
    columns.

    - `columns`, `rows`: the numbers of results, and of elements that are summed for each.
    - `vector`: the number of elements of a vector.
    - `loaded`: the bytes of one element, added up over all inputs.
    """
    # Steps of equal length: an incomplete step takes the slower path with tests.
    steps = max(-(-rows * loaded * vector // BYTES_OUTER), 1)
    unroll = max(-(-rows // steps), 1)
    each = unroll_of(loaded * unroll, columns, vector, BYTES_IN_FLIGHT, device)
    return ReductionParams(False, THREADS_SHORT, 1, vector, unroll, columns=each)


def _grid(threads: int, steps: int, wanted: int, device: DeviceInfo) -> int:
    """Returns the number of CUDA blocks that share a reduction of `steps` serial iterations.

    `threads` is the number of threads of the whole kernel if each reduction has one block. With the
    returned number of blocks, about `wanted` threads exist, none is idle, and all blocks can run at
    the same time. The number is a power of two, or halfway between two powers.
    """
    if threads * 2 > wanted:
        return 1
    at_once = min(device.sm_count * BLOCKS_PER_SM, device.max_grid[1])
    most = max(min(wanted // threads, steps, at_once), 1)
    power = power_of_two_at_most(most)
    return power * 3 // 2 if power * 3 // 2 <= most else power
