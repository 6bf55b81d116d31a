"""The outer persistent scheduler: reductions over outer axes in one kernel that reads inputs once.

Ops over the same rows depend on the reductions, as in batch norm of channels-last inputs. The
*rows* are the reduced axes, the *columns* the others.

A CUDA block processes a *strip* of a few columns, and its threads hold all rows of the strip in
registers. If the rows do not fit, the threads read them in a loop (`GPU looped`), once for each
reduction.

The table has the loops, from outer to inner. `|` separates the loops over columns from those over
rows, and these from the columns of one vector. BIDx loops run over CUDA blocks, and TIDx and TIDy
loops over threads. S loops are serial, UR unrolled, and V a vector. US is unswitched: the body
exists in two versions, with and without bounds checks. S 1 has one iteration, `r` marks reduced
axes, and `..` stands for several axes:

    GPU         [BIDx columns, TIDx columns | r S 1, r UR, r TIDy | columns V]
    GPU looped  [BIDx columns, TIDx columns | r S, r TIDy | columns V]
    CPU         [S columns.., S column tiles, US | r S.. | S 256 columns]

Each reduction is one exchange within the block, of one value per column and thread. Each thread
holds its elements of tensors with only the column axes (weights, means) in registers, as a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

from fuser.ir import primitives
from fuser.ir.fusion import Alias, Fusion, TensorView
from fuser.ir.ops.nodes import LibraryOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Number, Symbol
from fuser.ir.types import ParallelType
from fuser.ops.reference.meaning import REDUCING
from fuser.schedule import inner_persistent
from fuser.schedule.input_facts import Facts, RunExtents
from fuser.schedule.iteration_space import (
    Access,
    VectorWidths,
    power_of_two_at_least,
)
from fuser.schedule.row_levels import (
    RowView,
    kept_values,
    levels_of,
    most_bytes,
    rewrite,
    separate_levels,
)
from fuser.schedule.tiling import (
    Loops,
    arrange,
    cache_input,
    intermediates,
    loops_error,
    parallelize,
    split_tile,
    vectorize_last,
)
from fuser.support.device import VECTOR_BYTES, DeviceInfo
from fuser.support.record import record

PT = ParallelType
# The number of loop axes that all tensors share: the block's columns and the thread's.
SHARED = 2
# Bytes of a row in a strip: a cache line if there are strips for all multiprocessors, and at least
# a sector, the unit in which memory is read.
LINE = 128
SECTOR = 32
# Bytes of a block's registers that hold its strip: for the narrowest strips, and for wider ones,
# several of which share a multiprocessor.
MOST_BYTES = 128 * 1024
BYTES_SHARED = 64 * 1024
# Bytes of registers in which a thread keeps its rows if there are many blocks.
KEPT_BYTES = 128
BLOCKS_OF = (128, 256, 512, 1024)
# Columns of a vector. Each takes registers for its sums and for values per column. If there are few
# blocks, an exchange of fewer columns ends sooner. Measured on an H200 with vectors of 2 and of 4
# columns, bfloat16: 512 x 1024 took 2.7 and 3.2 us, 128 x 1048576 165 and 154.
MOST_COLUMNS = 4
MOST_COLUMNS_FEW_BLOCKS = 2
# Threads that a multiprocessor must have registers for.
RESIDENT = 1024
THREADS_GENERIC = (32, 8)
# Columns that a CPU kernel reduces together.
CPU_COLUMNS = 256
# Classes of row counts: whether a strip fits depends on the values that are kept. If vectors do not
# divide the columns, they are read one by one, in strips as wide as a cache line, because they are
# not aligned. Two kernels take half the time for 2048 x 50257 in float32.
STEPS = (256, 512, 1024, 2048, 4096)
ROWS_OF_SINGLE_COLUMNS = 8


@record
class OuterPersistentParams:
    """The parameters of an outer persistent kernel, which reduces columns that it uses several
    times.

    The rows are the reduced axes of the kernel, the columns the others.

    - `threads_x`: threads along the columns; 0 for the serial loops of a CPU.
    - `threads_y`: threads along the rows.
    - `vector`: the number of columns in a vector.
    - `kept`: the number of rows that one thread holds in registers. With 0, the rows are read again
      after each reduction that others depend on.
    - `resident`: the number of threads that must fit on a multiprocessor at the same time, which
      limits the registers per thread; 0 lets the compiler decide.
    - `exact`: whether the threads' rows are exactly all rows, and all CUDA blocks have the same
      number of columns. No bounds check is then needed.
    """

    threads_x: int = 0
    threads_y: int = 1
    vector: int = 1
    kept: int = 0
    resident: int = 0
    exact: bool = False

    def is_near(self, other: OuterPersistentParams) -> bool:
        """Returns whether a compiled kernel with the parameters `other` can replace one with
        `self`.

        If so, no kernel is compiled with `self` for small inputs, because both take about the same
        time. `exact` may differ, because guards decide whether a kernel with `exact` can be used.
        """
        return replace(self, exact=False) == replace(other, exact=False)

    def is_alike(self, other: OuterPersistentParams) -> bool:
        """Returns whether a compiled kernel with `other` can replace one with `self`, though
        perhaps slower.

        Returns False if most threads of the replacing kernel would be idle.
        """
        forms = [(p.vector, bool(p.kept), bool(p.threads_x)) for p in (self, other)]
        sizes = self.threads_y * self.kept, other.threads_y * other.kept
        return forms[0] == forms[1] and max(sizes) <= 2 * min(sizes)

    def __str__(self) -> str:
        if not self.threads_x:
            return "outer_persistent(loops)"
        what = f"kept {self.kept}, resident {self.resident}" if self.kept else "looped"
        return (
            f"outer_persistent(threads {self.threads_x}x{self.threads_y}, vector {self.vector}, "
            f"{what}{', exact' if self.exact else ''})"
        )


# ------------------------------------------------------------------ acceptance
def accepts(fusion: Fusion) -> str | None:
    """Returns the reason why the outer persistent scheduler rejects the fusion; None if the fusion
    is accepted.

    The scheduler accepts reductions along outer axes in memory whose results are used along the
    same axes, as in batch norm of channels-last inputs.
    """
    reason = inner_persistent.waiting_rejection(fusion)
    if reason is None:
        reason = next(filter(None, (_update_rejection(fusion, a) for a in fusion.aliases)), None)
    if reason is not None:
        return reason
    view = RowView(fusion)
    order = view.space.memory_order()
    if not view.iterated or view.space.is_reduced(order[-1]):
        return f"{view.reference} reduces axes that are innermost in memory"
    return None


def _update_rejection(fusion: Fusion, alias: Alias) -> str | None:
    """Returns the reason why the fusion must be rejected, if an output cannot overwrite an input;
    None if it can.

    `alias` names the output and the input that share memory. A thread may write the output while
    other threads still read old values of the input. Therefore no reduction and no other output may
    depend on the input.
    """
    below = {alias.into}
    for op in fusion.exprs:
        if any(v in below for v in op.inputs):
            below.update(op.outputs)
            if isinstance(op, (*REDUCING, LibraryOp)):
                return f"{op.out_tensor} reduces {alias.into}, which {alias.out} overwrites"
    others = [out for out in fusion.outputs if out in below and out is not alias.out]
    return f"{others[0]} reads {alias.into}, which {alias.out} overwrites" if others else None


def step_of(columns: int, rows: int) -> int:
    """Returns the index in `STEPS`, a list of row counts, of the smallest count that is at least
    `rows`.

    All sizes with the same index get the same decision about this scheduler. If vectors do not
    divide the columns, the columns are read one by one, which is slower. `rows` is then multiplied
    by `ROWS_OF_SINGLE_COLUMNS` first.
    """
    rows *= ROWS_OF_SINGLE_COLUMNS if columns % MOST_COLUMNS else 1
    return next((k for k, most in enumerate(STEPS) if rows <= most), len(STEPS))


def most_rows(fusion: Fusion) -> int:
    """Returns the largest row count for which one CUDA block can hold all rows in registers.

    The rows are the reduced axes. The result is one of `STEPS`, for a block with the smallest
    number of columns that this scheduler uses. Returns 0 if even the smallest count does not fit.
    """
    view, nbytes = _view_and_bytes(fusion)
    columns = max(SECTOR // _widest(view), 1)
    fits = [step for step in STEPS if step * columns * nbytes <= MOST_BYTES]
    return max(fits, default=0)


def _view_and_bytes(fusion: Fusion) -> tuple[RowView, int]:
    """Returns a view of the fusion along its rows, and the bytes of registers that a thread needs
    for each element that it holds.

    The rows are the reduced axes. The view is one of a copy of the fusion, which is rewritten as
    `apply` does; the fusion itself is not changed.
    """
    given, _ = fusion.copy()
    rewrite(given, is_kept=True, has_threads=True)
    view = RowView(given)
    kept = kept_values(given, view.full, is_costly=lambda op: False)
    return view, max(most_bytes(kept, 1), 4)


def _widest(view: RowView) -> int:
    """Returns the number of bytes of an element of the widest input that has all axes."""
    read = (a for a in view.space.accesses if not a.is_output and a.tv in view.full)
    return max((a.nbytes for a in read), default=4)


def suits(fusion: Fusion, sizes: Mapping[Symbol, Number]) -> bool:
    """Returns whether one CUDA block can hold the rows of a few columns in registers, for these
    sizes.

    The rows are the reduced axes, the columns the others. Returns False if a size is unknown.
    """
    known = inner_persistent.rows_of(fusion, sizes)
    return known is not None and most_rows(fusion) in STEPS[step_of(*known) :]


# ------------------------------------------------------------------ heuristics
def generic(device: DeviceInfo) -> OuterPersistentParams:
    """Returns parameters with which an outer persistent kernel is correct for all inputs, for
    example any number of rows.

    `device` is the device that runs the kernel.
    """
    if device.kind == "cpu":
        return OuterPersistentParams()
    return OuterPersistentParams(*THREADS_GENERIC)


def chooser(fusion: Fusion, device: DeviceInfo) -> Callable[[Facts], OuterPersistentParams]:
    """Returns a function that chooses a kernel's parameters for given inputs.

    The function gets the sizes and alignments of the inputs. It chooses vector width and thread
    counts.
    """
    if device.kind == "cpu":
        loops = OuterPersistentParams()
        return lambda facts: loops
    view, nbytes = _view_and_bytes(fusion)
    logical, widest = view.reference.domain.logical, _widest(view)
    candidates = view.space.vector_candidates(view.iterated[-1][-1])
    widths = VectorWidths([a for a in candidates if a.tv in view.full])
    runs = [[logical[p] for p in run] for run in view.iterated + view.reduced]
    extents, count = RunExtents(view.fusion, runs), len(view.iterated)

    def choose(facts: Facts) -> OuterPersistentParams:
        found = extents.of(facts)
        columns, rows = found[:count], prod(found[count:])
        widest_vector = widths.of(facts, columns[-1])
        for most in (MOST_COLUMNS, MOST_COLUMNS_FEW_BLOCKS):
            vector = min(widest_vector, most)
            step = vector, vector * widest, vector * nbytes
            params = _kept_params(columns, rows, step, device)
            blocks = prod(columns[:-1]) * -(-columns[-1] // (vector * params.threads_x))
            if blocks > 2 * device.sm_count:
                break
        return params

    return choose


def _kept_params(
    columns: list[int], rows: int, step: tuple[int, int, int], device: DeviceInfo
) -> OuterPersistentParams:
    """Returns the parameters of an outer persistent kernel whose vectors have a given width.

    Its threads hold all rows in registers; if the rows do not fit, the kernel reads them again
    instead. `columns` are the extents of the axes that are not reduced, from outer to inner. `rows`
    is the number of elements that are reduced to one. `step` describes a vector: its number of
    elements, its bytes in memory, and its bytes in registers.
    """
    vector, nbytes, kept_bytes = step
    chunks, outside = -(-columns[-1] // vector), prod(columns[:-1])
    least, x = (max(n // nbytes, 1) for n in (SECTOR, LINE))
    x = min(x, power_of_two_at_least(chunks))
    while x > least and (
        rows * x * kept_bytes > BYTES_SHARED
        or outside * -(-chunks // x) < device.sm_count - device.sm_count // 8
    ):
        x //= 2
    most = max(KEPT_BYTES // kept_bytes, 1)
    threads = next((t for t in BLOCKS_OF if t * most >= rows * x), BLOCKS_OF[-1])
    y = min(max(threads // x, 1), power_of_two_at_least(rows))
    kept = power_of_two_at_least(-(-rows // y))
    if x * y * kept * kept_bytes > MOST_BYTES:
        return OuterPersistentParams(*THREADS_GENERIC, vector)
    exact = rows == kept * y and chunks % x == 0
    return OuterPersistentParams(x, y, vector, kept, RESIDENT, exact)


# ------------------------------------------------------------------ application
def apply(fusion: Fusion, params: OuterPersistentParams) -> None:
    """Schedules the fusion in place with these parameters.

    Ops are rewritten, and copies into registers are added. Then three things are set for each
    tensor: its loops, the CUDA blocks and threads that execute them, and how many of these loops
    its consumers share.
    """
    rewrite(fusion, is_kept=params.kept > 0, has_threads=params.threads_x > 0)
    if params.threads_x == 0:
        view = RowView(fusion)
        _finish(view, _shape_loops(view), [])
        return
    fusion.resident_threads = params.resident
    for out in dict.fromkeys(fusion.outputs):
        if isinstance(out.definition(), REDUCING):
            primitives.cache_before(out)
    view = RowView(fusion)
    kept = _kept(view) if params.kept else []
    per_column = [tv for tv in fusion.tensors() if view.is_per_row(tv)]
    separate_levels(fusion, frozenset({*kept, *per_column}))
    _apply_threads(RowView(fusion), params)


def _kept(view: RowView) -> list[TensorView]:
    found = kept_values(view.fusion, view.full, is_costly=lambda op: False)
    return [k.tv for k in found]


def _apply_threads(view: RowView, params: OuterPersistentParams) -> None:
    fusion, innermost = view.fusion, view.iterated[-1][-1]
    kept: list[TensorView] = []
    wide: list[TensorView] = []
    for access in view.space.accesses:
        tv = access.tv
        if not access.is_output:
            stays = (tv in view.full and params.kept) or view.axes(tv) == view.iterated_axes
            if not (stays and access.order and fusion.uses(tv)):
                continue
            tv = cache_input(tv)
            kept.append(tv)
        if _is_wide(access, innermost, params):
            wide.append(tv)
    _shape(view, params)
    _finish(view, SHARED, kept)
    for tv in wide:
        vectorize_last(tv)


def _is_wide(access: Access, innermost: int, params: OuterPersistentParams) -> bool:
    fits = access.nbytes * params.vector <= VECTOR_BYTES or not access.is_output
    return params.vector > 1 and fits and access.is_vector_candidate(innermost)


def _once_per_column(view: RowView) -> list[TensorView]:
    """Returns the tensors that have one value per column and are read for all rows of the column.

    The rows are the reduced axes, the columns the others. Each thread holds these values in
    registers, instead of computing them for each element.
    """
    fusion, levels = view.fusion, levels_of(view.fusion)
    found: list[TensorView] = []
    for op in fusion.exprs:
        tv = op.out_tensor
        if isinstance(op, REDUCING) or tv in fusion.outputs or not levels.get(tv):
            continue
        along = any(not view.is_per_row(out) for u in fusion.uses(tv) for out in u.outputs)
        if along and view.axes(tv) == view.iterated_axes:
            found.append(tv)
    return found


def _groups(view: RowView) -> tuple[list[int], list[int], list[int]]:
    """Returns three lists of axis positions: of the outer columns, of the inner columns, and of the
    rows.

    Rows are the axes that the first reduction reduces, and columns its other axes. The inner
    columns are the innermost group of columns that is contiguous in every tensor. All other columns
    are outer columns. Broadcast axes come first, before the other outer columns, so that the
    innermost axis, along which vectors run, is no broadcast.
    """
    rank = len(view.reference.domain.logical)
    broadcast = [p for p in range(rank) if p not in view.space.concrete]
    first, *rest = view.iterated
    *others, columns = [*broadcast, *first], *rest
    outside = [p for run in others for p in run]
    return outside, columns, [p for run in view.reduced for p in run]


def _shape(view: RowView, params: OuterPersistentParams) -> None:
    """Builds the loops of the first reduction for the GPU; all other tensors copy these loops."""
    tv, fusion = view.reference, view.fusion
    groups = _groups(view)
    outside = groups[0]
    are_whole = params.exact and _assume_exact(view, params)
    arrange(tv, [g for g in groups if g])
    column = 1 if outside else 0
    # Whole strips need no test. For other strips, one test covers all elements of a vector.
    if are_whole:
        tv.split(column, params.threads_x * params.vector)
    if params.vector > 1:
        tv.split(column + are_whole, params.vector)
    if not are_whole:
        tv.split(column, params.threads_x)
    if outside:
        # Strips of columns and the outer columns share BIDx.
        tv.merge(0, 1)
    # [BIDx, TIDx, (V), r] -> [BIDx, TIDx, r.., (V)]
    tv.reorder({len(tv.domain.loop) - 1: SHARED})
    tile = split_tile(tv, SHARED, ((params.kept, PT.unroll), (params.threads_y, PT.block_y)))
    if params.kept:
        # One tile holds all rows.
        fusion.assume(tv.domain.loop[SHARED].extent, sc.ONE)
    inside = [PT.serial] if params.vector > 1 else []
    parallelize(tv, [PT.grid_x, PT.block_x, PT.serial, *tile, *inside])


def _assume_exact(view: RowView, params: OuterPersistentParams) -> bool:
    """Lets the kernel assume that threads and elements fit exactly, so that it needs no bounds
    checks.

    Adds guards, which each launch checks: the number of rows is exactly the number that the threads
    hold, and the number of columns is a multiple of a CUDA block's columns. Returns whether the
    columns are now known to be such a multiple.
    """
    fusion, logical = view.fusion, view.reference.domain.logical
    _, columns, rows = _groups(view)
    count = sc.product(logical[p].extent for p in rows)
    fusion.assume(count, sc.const(params.threads_y * params.kept))
    width = params.threads_x * params.vector
    size = fusion.canonical(sc.product(logical[p].extent for p in columns))
    if isinstance(size, Symbol):
        fusion.divisible[size] = width
        return True
    known = sc.int_value(size)
    return known is not None and known % width == 0


def _shape_loops(view: RowView) -> int:
    """Builds the loops of the first reduction for the CPU; all other tensors copy these loops.

    Returns the number of loops over columns, the axes that are not reduced.
    """
    tv = view.reference
    outside, columns, _ = _groups(view)
    rows = [outside, columns] if outside else [columns]
    arrange(tv, [*rows, *view.reduced])
    # [columns, r..] -> [column tiles, US, r.., columns of a tile]
    last = len(rows) - 1
    tv.split(last, CPU_COLUMNS)
    tv.split(last, 1)
    tv.reorder({last + 2: len(tv.domain.loop) - 1})
    tv.axis(last + 1).parallelize(PT.unswitch)
    return len(rows) + 1


def _finish(view: RowView, shared: int, kept: list[TensorView]) -> None:
    """Gives all tensors their loops, and sets how many outer loops each shares with its consumers.

    All tensors get loops like those of the first reduction. `shared` is the number of its outermost
    loops, which run over columns (axes that are not reduced). Reductions and the tensors that
    registers hold share these loops with their consumers. `kept` are tensors that registers hold.
    """
    fusion, reference = view.fusion, view.reference
    loops, view = Loops(fusion, reference), RowView(fusion)
    once = _once_per_column(view)
    for tv in (*fusion.outputs, *intermediates(fusion, ())):
        axes = view.axes(tv)
        is_reduction = isinstance(tv.definition(), REDUCING)
        done = loops.repeat(tv) or (
            not is_reduction and axes is not None and loops.repeat(tv, only=axes)
        )
        if not done and (is_reduction or tv in fusion.outputs):
            raise loops_error(tv, reference)
    for tv in intermediates(fusion, ()):
        if isinstance(tv.definition(), REDUCING) or tv in kept or tv in once:
            tv.compute_at = shared
        else:
            loops.inline_whole(tv)
