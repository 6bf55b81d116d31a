"""The inner persistent scheduler: dependent reductions along rows, as one kernel.

Later reductions and outputs depend on earlier reductions, as in softmax and layer norm.

All reductions reduce the same, innermost, axes. The loops of the first reduction, the reference
tensor, are copied to all other tensors. The reduced axes are merged into one axis, the *row*. A row
is processed by a CUDA block or by some of its threads.

Loops are listed from outer to inner. BIDx loops run over blocks, TIDx and TIDy loops over threads.
S loops are serial, UR unrolled, and V a vector. S 1 has one iteration, and `r` marks reduced axes.
`|` separates the loops over rows from those along a row, and these from the elements of a vector:

    GPU kept    [BIDx rows, TIDy rows | r S 1, r UR, r TIDx | r V]
    GPU looped  [BIDx rows, TIDy rows | r S, r UR, r TIDx | r V]
    CPU         [S rows | r S]

- *Kept*: each thread loads its elements of the row into registers once, in the dtype of memory, and
  computes everything from these. A result also stays in registers if it is used before and after
  some reduction is complete, and costs more to compute again (`row_levels.py`).
- *Looped*, for rows that do not fit in registers: the row is read again after each reduction that
  later ones depend on.
- *Shifted*, for rows whose length is no multiple of a vector: the iterations of each row start at
  the aligned address before the row (`ir.domain.Shift`). The first and last vector also load
  elements of neighbouring rows, which are ignored. Tensors that have only the row's axes are read
  element by element.
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
    loops_error,
    parallelize,
    shift_rows,
    split_tile,
    vectorize_last,
)
from fuser.support.device import DeviceInfo
from fuser.support.record import record

PT = ParallelType
# Ops whose results equal their operands, with other axes.
VIEWS = (BroadcastOp, SqueezeOp, LoadStoreOp)
# The number of row loops of a kernel with partial sums: the part, the rows of a part, the rows at a
# time.
ROWS_OF_PARTS = 3
NOTHING: Mapping[TensorView, Access] = {}
# Pairs (longest row, least number of rows) for which one kernel pays. Otherwise separate kernels,
# which split a long row over several blocks, are faster. Rows that do not fit in registers are read
# again. For the last pair, only 2048 rows of 50257 in bfloat16 were measured, on an H200.
ROWS_THAT_PAY = ((8192, 0), (16384, 32), (65536, 256))


# ------------------------------------------------------------------ acceptance
def accepts(fusion: Fusion) -> str | None:
    """Returns the reason why the inner persistent scheduler rejects the fusion; None if the fusion
    is accepted.

    The scheduler accepts reductions along the innermost axes in memory whose results are used along
    the same axes, as in softmax.
    """
    if fusion.aliases:
        return "an output is written into an input"
    reason = waiting_rejection(fusion)
    return reason or _order_rejection(fusion)


def waiting_rejection(fusion: Fusion) -> str | None:
    """Returns the reason why the fusion must be rejected, if the fusion is not like a softmax; None
    if it is.

    A fusion is like a softmax if all reductions reduce the same axes, and other ops along these
    axes need a reduction's result, so that these ops wait for the reduction.
    """
    reductions = [op for op in fusion.exprs if isinstance(op, REDUCING)]
    if not reductions:
        return "there is no reduction"
    for op in fusion.exprs:
        if isinstance(op, LibraryOp):
            return f"{op.name} of {op.out_tensor} is computed by a library call"
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
    """Returns the reason why the fusion must be rejected, if some tensor cannot have the loops of
    the reductions; None if all tensors can.

    `reference` is the result of the first reduction. A fusion is accepted under three conditions:

    - A tensor that depends on a reduction has only axes of `reference`.
    - An output has either all axes of `reference`, or all axes that are not reduced.
    - At least one op along the reduced axes uses the result of a reduction.
    """
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
    return None if waits else f"no op along the reduced axes uses the result of {reference}"


def _order_rejection(fusion: Fusion) -> str | None:
    """Returns the reason why the fusion must be rejected, if the reduced axes are not innermost in
    memory; None if they are.
    """
    reference = reference_of(fusion)
    space = iteration_space(fusion, reference)
    order = [space.is_reduced(p) for p in space.memory_order()]
    if order != sorted(order):
        return f"{reference} reduces axes that are not innermost in memory"
    return None


def row_extents(reduction: TensorView) -> tuple[Scalar, Scalar]:
    """Returns the number of rows of a reduction, and the number of elements in a row.

    One result of the reduction is computed from the elements of one row.
    """
    sizes: dict[bool, list[Scalar]] = {False: [], True: []}
    for axis in reduction.domain.logical:
        sizes[axis.is_reduction()].append(reduction.fusion.canonical(axis.extent))
    return sc.product(sizes[False]), sc.product(sizes[True])


def pays(rows: int, columns: int) -> bool:
    """Returns whether one kernel is at least as fast as several kernels for rows of this length.

    `rows` is the number of rows, and `columns` the number of elements of each row. Several kernels
    can split a long row over CUDA blocks, but read it several times.
    """
    return any(columns <= longest and rows >= fewest for longest, fewest in ROWS_THAT_PAY)


def suits(fusion: Fusion, sizes: Mapping[Symbol, Number]) -> bool:
    """Returns whether one kernel is at least as fast as several kernels for these sizes.

    Several kernels can split a long row (the reduced axes) over CUDA blocks. If a size is unknown,
    the rows are taken to be many and short, so the result is True.
    """
    known = rows_of(fusion, sizes)
    return known is None or pays(*known)


def rows_of(fusion: Fusion, sizes: Mapping[Symbol, Number]) -> tuple[int, int] | None:
    """Returns the number of rows and the number of elements in a row, or None if a size is unknown.

    One result of the fusion's first reduction is computed from the elements of one row.
    """
    try:
        rows, columns = (int(sc.evaluate(x, sizes)) for x in row_extents(reference_of(fusion)))
    except KeyError:
        return None
    return rows, columns


# ------------------------------------------------------------------ application
def apply(fusion: Fusion, params: InnerPersistentParams) -> None:
    """Schedules the fusion in place with these parameters.

    Ops are rewritten, and copies into registers are added. Then three things are set for each
    tensor: its loops, the CUDA blocks and threads that execute them, and how many of these loops
    its consumers share.
    """
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
    """Returns two lists of axis positions, of the non-reduced axes and of the reduced axes. Each
    list becomes one loop.

    The axes are those of the first reduction, whose loops all other tensors copy. The first list
    begins with the broadcast axes. An empty list is left out.
    """
    rank = len(view.reference.domain.logical)
    broadcast = [p for p in range(rank) if p not in view.space.concrete]
    rows = [*broadcast, *(p for run in view.iterated for p in run)]
    row = [p for run in view.reduced for p in run]
    return [g for g in (rows, row) if g]


def _apply_loops(view: RowView) -> None:
    groups = _groups(view)
    arrange(view.reference, groups)
    # Broadcast axes alone are no rows: a reader of the result may lack them.
    _finish(view, 1 if view.iterated else 0, [])


def _apply_threads(
    view: RowView,
    params: InnerPersistentParams,
    kept: list[TensorView],
    needed: Mapping[TensorView, int],
) -> None:
    """Schedules a fusion for the GPU: adds copies into registers, and sets the loops of all
    tensors.

    - `kept`: the tensors that registers hold over a whole row (the reduced axes).
    - `needed`: for each tensor, in which loop over the row the tensor is used. Loop n begins when n
      reductions, each of which depends on the one before, are complete. An input that several loops
      use is loaded again in each of them, unless registers hold the input.
    """
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
    # Inputs that are loaded repeatedly are loaded one tile at a time, with all loads of it
    # outstanding.
    _finish(view, shared if view.iterated else 0, kept, ahead, 1 if params.kept else tile)
    for tv in once:
        # The rows that a block processes one after another have different values.
        tv.compute_at = ROWS_OF_PARTS - 1 if view.parts else 0
    for tv in once_in_all:
        tv.compute_at = 0
    for copy, access in ahead.items():
        if _is_wide(view, params, access):
            vectorize_last(copy)
    for out in wide:
        vectorize_last(out)


def _is_wide(view: RowView, params: InnerPersistentParams, access: Access) -> bool:
    """Returns whether a tensor is accessed in vectors.

    With `params.shifted`, the read of each row begins at an aligned address, at or before the row's
    first element. A tensor without all axes, such as a weight, is then read element by element,
    because its vectors would not be aligned.
    """
    is_candidate = params.vector > 1 and access.is_vector_candidate(view.innermost)
    return is_candidate and (not params.shifted or access.tv in view.full)


def _once_per_row(view: RowView, levels: dict[TensorView, int]) -> list[TensorView]:
    """Returns the tensors that have one value per row and are read for all elements of the row.

    A row is the reduced axes. Each thread holds these values in registers, instead of computing
    them for each element. `levels` maps each tensor to the number of reductions, one after another,
    that the tensor depends on.
    """
    fusion, found = view.fusion, list[TensorView]()
    for access in view.space.accesses:
        tv = access.tv
        is_input = not access.is_output and bool(access.order and fusion.uses(tv))
        if is_input and view.axes(tv) == view.iterated_axes:
            found.append(cache_input(tv))
    # In a loop over rows, such a value must not depend on another one, because only reductions can
    # share the loop.
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
    """Returns whether the elements of a row are computed from `tv`, directly or through views.

    `tv` has one value per row. Registers should hold this value if all elements of the row read it.
    """
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
    """Builds the loops of the first reduction (the reference tensor), which the other tensors copy.

    Returns two numbers of loops: loops over rows, and loops of the tile. The tile is the part of a
    row (the reduced axes) that all threads process in one step.
    """
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
        # One tile holds the whole row.
        view.fusion.assume(tv.domain.loop[at].extent, sc.ONE)
    if params.vector > 1:
        # Only the first and last vector of a shifted row are tested element by element.
        tile += [PT.unswitch if params.shifted else PT.serial]
    parallelize(tv, [*types, PT.serial, *tile])
    return at, len(tile)


def _follow_rows(tv: TensorView, view: RowView, loops: Loops) -> None:
    """Gives the tensor `tv`, a partial sum over rows, the loops of the rows that it adds.

    A row is the reduced axes of the fusion's other reductions. A CUDA block adds the results of the
    rows that it processes; another kernel adds the sums of the blocks.
    """
    loops.repeat_along(tv, view.row_axes)
    parts, model = view.parts[tv], view.reference.domain.loop
    places = {a.number: k for k, a in enumerate(tv.domain.loop)}
    tv.reorder({places[parts.part]: 0, places[parts.rest]: 1})
    tv.split(1, model[ROWS_OF_PARTS - 1].extent)
    types = [PT.serial if a.ptype is PT.vectorize else a.ptype for a in model]
    parallelize(tv, types)


def _is_row(view: RowView, tv: TensorView) -> bool:
    """Returns whether a tensor has exactly the reduced axes, like the weight of a layer norm."""
    return view.axes(tv) == view.row_axes


def _assume_exact(view: RowView, groups: list[list[int]], params: InnerPersistentParams) -> None:
    """Lets the kernel assume that threads and elements fit exactly, so that it needs no bounds
    checks.

    Adds guards, which each launch checks: a row has exactly as many elements as its threads hold,
    and the number of rows is a multiple of the rows that a CUDA block processes at a time.
    """
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
    """Gives all tensors their loops, and sets how many outer loops each shares with its consumers.

    - `shared`: the number of loops over rows of the first reduction, whose loops the others copy.
    - `kept`: the tensors that registers hold over a whole row.
    - `ahead`: the copies of inputs that are loaded into registers before they are used.
    - `inside`: the number of innermost loops that such a copy does not share with its consumers.
    """
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
            raise loops_error(tv, reference)
    for tv in intermediates(fusion, ()):
        if isinstance(tv.definition(), REDUCING) or tv in kept:
            tv.compute_at = shared
        elif tv in ahead:
            tv.compute_at = len(tv.domain.loop) - inside
        else:
            loops.inline_whole(tv)


# ----------------------------------------------------------------------
# The heuristic of the inner persistent scheduler: the shape of blocks, and the values threads keep.

# Registers in which a thread keeps its part of a row. With at least two blocks per multiprocessor,
# one loads while another computes.
KEPT_REGISTERS = 32
# Bytes of a longer row that a thread keeps when a block has half of the maximum threads. If results
# along such a row are written, their conversion needs more registers than are left. Measured on an
# H200, cross entropy of 50257 columns in bfloat16: kept 100 us, looped 106; with its gradient 215
# and 188.
LONG_ROW_BYTES = 240
# Row length from which kernels with sums over rows load a wide weight in one vector, and rows in
# shorter vectors. Measured on an H200: rows of 4096 and 8192 take 4 to 17 % less time, rows of 1536
# and 1024 take 2 to 8 % more. From this length on, a thread also keeps this many bytes and elements
# of the row and the sums, so that fewer threads wait for one another. Measured on an H200,
# gradients of layer norm in bfloat16, 16384 x 8192: 238 us with 256 threads, 307 with 1024; 4096 x
# 4096: 34 and 45.
LONG_PARTS = 4096
LONG_PARTS_BYTES = 512
LONG_PARTS_KEPT = 32
# Registers of one multiprocessor that a row may take at most, and the limit up to which results of
# costly ops are kept rather than computed again.
ROW_REGISTERS = 40 * 1024
ROW_REGISTERS_COSTLY = 16 * 1024
THREADS_PER_BLOCK = 128
# Bytes of a cache line.
LINE = 128
# Threads of a multiprocessor. Cheap values are computed again rather than kept in more registers.
RESIDENT = 768
RESIDENT_ONE = 1024
# Threads along a row; a short list, so that few shapes of kernels exist.
ROW_THREADS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
LOOPED_THREADS = 512
LOOPED_BYTES = 32
# Threads of a block in a cluster, and bytes of a row that each thread may keep.
CLUSTER_THREADS = 512
CLUSTER_BYTES = 256
# Rows of at least this many bytes should be processed few at a time, so that they stay in the
# cache. Twice the loads, and twice the threads if results are written along the row, halve their
# number. Measured on an H200, rows of 50257 in float32: cross entropy 158 us (193 with twice the
# threads as well); with its gradient 326 (378 without this).
WIDE_ROW_BYTES = 128 << 10


@record
class InnerPersistentParams:
    """The parameters of an inner persistent kernel, which reduces rows that it uses several times.

    - `threads_x`: threads along a row; 0 for the serial loops of a CPU.
    - `threads_y`: rows that a CUDA block processes at a time.
    - `vector`: the number of elements of a vector.
    - `kept`: the number of elements of a row that one thread holds in registers. With 0, the row is
      read again after each reduction that others depend on.
    - `keeps_costly`: whether results of costly ops stay in registers, too.
    - `unroll`: with `kept` 0, the number of vectors of each input that a thread loads per
      iteration.
    - `resident`: the number of threads that must fit on a multiprocessor at the same time, which
      limits the registers per thread; 0 lets the compiler decide.
    - `exact`: whether the elements that the threads hold are exactly the row, so that no bounds
      check is needed.
    - `shifted`: whether rows that begin at any address are read in aligned vectors, except at their
      ends.
    - `cluster`: the number of CUDA blocks that process one row together.
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
        """Returns whether a compiled kernel with the parameters `other` can replace one with
        `self`.

        If so, no kernel is compiled with `self` for small inputs, because both take about the same
        time. `exact` may differ, because guards decide whether a kernel with `exact` can be used.
        """
        return replace(self, exact=False) == replace(other, exact=False)

    def is_alike(self, other: InnerPersistentParams) -> bool:
        """Returns whether a compiled kernel with `other` can replace one with `self`, though
        perhaps slower.

        Returns False if most threads of the replacing kernel would be idle.
        """
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
    """Returns parameters with which an inner persistent kernel is correct for all inputs, for
    example rows of any length.

    `device` is the device that runs the kernel.
    """
    if device.kind == "cpu":
        return InnerPersistentParams()
    return InnerPersistentParams(threads_x=THREADS_PER_BLOCK)


def chooser(
    fusion: Fusion, device: DeviceInfo, *, extra_bytes: int = 0, in_clusters: bool = False
) -> Callable[[Facts], InnerPersistentParams]:
    """Returns a function that chooses a kernel's parameters for given inputs.

    The function gets the sizes and alignments of the inputs. `extra_bytes` is the number of bytes
    of registers that a thread needs for each of its elements in addition to the element itself,
    such as for accumulators. With `in_clusters`, the function also chooses how many CUDA blocks
    process a row together (a cluster).
    """
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
    # Norms read tensors with only the row's axes. For norms, kernels that read rows again were not
    # measured.
    writes = any(a.is_output and a.tv in view.full for a in view.space.accesses) and not has_columns
    widths = VectorWidths(candidates, shared=lambda a: has_full and not is_full[a.tv])
    long_widths = VectorWidths(candidates) if view.parts else widths
    # With sums over rows, a thread must process the same elements of each row, so these are not
    # shifted.
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
        wide = shifted_widths.wider(facts, columns, vector) if shifted_widths and is_narrow else 0
        if wide:
            vector, begin = wide, wide - 1
        shape = _RowsAccess(rows, columns, vector, widest, begin, len(inputs))
        if in_clusters:
            return _cluster_params(shape, most_bytes(inputs, vector), device)
        plans = [(most_bytes(inputs, vector) + extra_bytes, False)]
        if has_costly:
            plans.insert(0, (most_bytes(kept, vector) + extra_bytes, True))
        for nbytes, costly in plans:
            limit = ROW_REGISTERS_COSTLY if costly else ROW_REGISTERS
            spills = writes and nbytes < 4 and _is_long(shape, nbytes)
            if columns * nbytes <= 4 * limit and not spills:
                if extra_bytes and columns >= LONG_PARTS:
                    return _long_parts_params(shape, nbytes)
                return _kept_params(shape, nbytes, costly, device)
        # Inputs with only the row's axes are not shifted. Their elements are loaded one by one.
        return _looped_params(shape, has_columns=has_columns, writes=writes)

    return choose


class _RowsAccess(NamedTuple):
    """The number of rows and of elements per row, and how a kernel accesses them.

    - `rows`, `columns`: the number of rows, and of elements in each.
    - `vector`: the number of elements of a vector.
    - `widest`: the bytes of the widest element.
    - `begin`: the largest possible number of elements between an aligned address and a row's start.
    - `inputs`: the number of inputs that have all axes.
    """

    rows: int
    columns: int
    vector: int
    widest: int
    begin: int
    inputs: int

    @property
    def chunks(self) -> int:
        """The number of vectors that cover a row."""
        return -(-(self.columns + self.begin) // self.vector)


def _most_chunks(shape: _RowsAccess, nbytes: int) -> int:
    """Returns the number of vectors of a row that a thread can hold in registers.

    `nbytes` is the size of an element. The registers of an element have at least 4 bytes, because
    values of narrower types are converted to 4 bytes.
    """
    return max(4 * KEPT_REGISTERS // (max(nbytes, 4) * shape.vector), 1)


def _is_long(shape: _RowsAccess, nbytes: int) -> bool:
    """Returns whether the threads of one CUDA block cannot hold all vectors of a row in registers.

    `nbytes` is the size of an element.
    """
    return shape.chunks > ROW_THREADS[-1] * _most_chunks(shape, nbytes)


def _kept_params(
    shape: _RowsAccess, nbytes: int, costly: bool, device: DeviceInfo
) -> InnerPersistentParams:
    rows, columns, vector, widest, begin, _ = shape
    chunks, is_shifted = shape.chunks, begin > 0
    most = _most_chunks(shape, nbytes)
    # Adjacent lanes read whole cache lines. Lanes without work cost as much as others.
    least = min(max(LINE // (vector * widest), 1), device.warp_size, power_of_two_at_least(chunks))
    lanes = device.warp_size
    if is_shifted and lanes * most < chunks <= lanes * (most + most // 4):
        most += most // 4  # a shifted row has one vector more, which is not worth two warps
    fit = [t for t in ROW_THREADS if least <= t and t * most >= chunks]
    if not fit:
        # Two rows per multiprocessor, if the registers of half the threads can hold a row.
        half = ROW_THREADS[-1] // 2
        fit = [half if chunks * vector * nbytes <= half * LONG_ROW_BYTES else 2 * half]
    warp = [t for t in fit if t <= device.warp_size] or fit[:2]
    x = min(warp, key=lambda t: t * -(-chunks // t))
    batch = -(-chunks // x)
    y = max(THREADS_PER_BLOCK // x, 1) if rows > device.sm_count else 1
    exact = x * batch * vector == columns and rows % y == 0 and not is_shifted
    if x * batch != chunks and (x <= lanes or not is_shifted):
        # Rounded up, so that rows of many lengths share few kernels.
        batch = max(min(power_of_two_at_least(batch), most), batch)
    kept = batch * vector
    # Several narrow inputs take more registers after they are converted.
    is_one = shape.inputs == 1 and costly
    resident = RESIDENT_ONE if is_one or nbytes < 4 else RESIDENT
    return InnerPersistentParams(
        x, y, vector, kept, costly, resident=resident, exact=exact, shifted=is_shifted
    )


def _long_parts_params(shape: _RowsAccess, nbytes: int) -> InnerPersistentParams:
    """Returns the parameters for long rows if the kernel also sums over rows, as gradients of norms
    do.

    A CUDA block processes one row at a time, and the compiler decides about registers.
    """
    most = max(min(LONG_PARTS_BYTES // nbytes, LONG_PARTS_KEPT) // shape.vector, 1)
    fit = [t for t in ROW_THREADS if t * most >= shape.chunks] or [ROW_THREADS[-1]]
    x = min(fit[:2], key=lambda t: t * -(-shape.chunks // t))
    kept = -(-shape.chunks // x) * shape.vector
    return InnerPersistentParams(x, 1, shape.vector, kept, exact=x * kept == shape.columns)


def _looped_params(shape: _RowsAccess, *, has_columns: bool, writes: bool) -> InnerPersistentParams:
    """Returns the parameters of a kernel for rows that registers cannot hold.

    A row is the reduced axes. The row is read again after each reduction that later ones depend on.

    - `has_columns`: whether some input has only the row's axes, like a weight.
    - `writes`: whether some output has all axes. The caller passes False if `has_columns` is True.
    """
    row_bytes = shape.inputs * shape.columns * shape.widest
    chunks, times = shape.chunks, 1 if has_columns or row_bytes < WIDE_ROW_BYTES else 2
    x = min(power_of_two_at_least(chunks), (times if writes else 1) * LOOPED_THREADS)
    unroll = max(times * LOOPED_BYTES // (shape.vector * shape.widest), 1)
    unroll = min(power_of_two_at_most(unroll), power_of_two_at_least(-(-chunks // x)), 8)
    if 10 * _covered(chunks, x * unroll // 2) < 9 * _covered(chunks, x * unroll):
        unroll //= 2  # the last step would be mostly empty
    return InnerPersistentParams(x, 1, shape.vector, unroll=unroll, shifted=shape.begin > 0)


def _cluster_params(shape: _RowsAccess, nbytes: int, device: DeviceInfo) -> InnerPersistentParams:
    """Returns the parameters of a kernel in which a cluster of CUDA blocks processes a row.

    The smallest cluster whose threads can hold the row in registers is chosen. If no cluster can,
    the row is read again after each reduction. The cluster is then so large that the rows of all
    running clusters fit in the L2 cache. `nbytes` is the size of an element.
    """
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
