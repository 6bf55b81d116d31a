"""The inner-outer persistent scheduler: ops along rows, and sums over the rows, in one kernel.

The kernel reads the rows once. Such kernels compute the backward of layer and RMS norm. They have
ops along rows (the reduced axes, taken as one), as in `inner_persistent`, and sums of their results
over the rows.

The sums over rows are computed as partial sums (`row_parts` of `fuser.passes.segment`). A CUDA
block processes several rows, its *part*. It has its own partial sum of each output, to which it
adds these rows one after another. Another kernel adds the partial sums.

Loops are listed from outer to inner. BIDx loops run over blocks, TIDx and TIDy loops over threads.
S loops are serial, UR unrolled, and V a vector. S 1 has one iteration, and `r` marks reduced axes.
`|` separates the loops over rows from those along a row, and these from the elements of a vector:

    rows      [BIDx part, S rows of the part, TIDy rows | r S 1, r UR, r TIDx | r V]
    parts     [BIDx part, r S rows of the part, r TIDy rows | S 1, UR, TIDx | V]

The first line is for ops along rows, the second for the sums over rows. Each thread holds its
elements of the row in registers, as in `inner_persistent`, and an accumulator for each element of
each sum. Tensors with only the row's axes (weights) are loaded once per block. On the CPU, two
kernels are used instead of this scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fuser.ir.dtypes import nbytes_of
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.scalar.constructors import Number, Symbol
from fuser.passes.segment import RowParts, row_parts
from fuser.schedule import inner_persistent
from fuser.schedule.inner_persistent import InnerPersistentParams
from fuser.schedule.input_facts import Facts
from fuser.schedule.row_levels import RowView
from fuser.support.device import DeviceInfo

# The number of partial sums: two for each multiprocessor of an H200. These numbers are not
# measured.
PARTS = 264
# One kernel pays for at least this many rows of at most this many elements, because a block's
# registers must hold the row and the accumulators.
FEWEST_ROWS = 4 * PARTS
LONGEST_ROW = 8192
# Rows are read in vectors of at least this many elements; shifted rows are faster for others.
LEAST_VECTOR = 4
# Threads of a block if a row takes fewer, and threads that a multiprocessor must have registers
# for.
THREADS = 512
RESIDENT = 1024


# ------------------------------------------------------------------ acceptance
def accepts(fusion: Fusion) -> str | None:
    """Returns the reason why the inner-outer persistent scheduler rejects the fusion; None if the
    fusion is accepted.

    An accepted fusion has reductions along rows, as for `inner_persistent`, and sums of their
    results over the rows. These sums must be partial sums: each CUDA block adds some rows, and
    another kernel adds the sums of the blocks.
    """
    found = {op.out_tensor: parts for op in fusion.exprs if (parts := row_parts(op)) is not None}
    if not found:
        return "no sum over rows is computed in partial sums"
    for tv in found:
        if tv not in fusion.outputs or fusion.uses(tv):
            return f"the partial sums {tv} are read in the kernel that computes them"
    if len({parts.count for parts in found.values()}) > 1:
        return "the sums over rows have different numbers of partial sums"
    reason = inner_persistent.accepts(without_parts(fusion))
    return reason or _parts_rejection(fusion, found)


def without_parts(fusion: Fusion) -> Fusion:
    """Returns a copy of the fusion without the outputs that are partial sums over the rows.

    Another kernel adds such partial sums. The copy is used to test whether all other outputs can be
    computed along rows by one kernel.
    """
    rest, mapping = fusion.copy()
    made = {mapping[op.out_tensor] for op in fusion.exprs if row_parts(op) is not None}
    rest.outputs = [out for out in rest.outputs if out not in made]
    rest.exprs = rest.used_exprs()
    return rest


def _parts_rejection(fusion: Fusion, found: Mapping[TensorView, RowParts]) -> str | None:
    """Returns the reason why the fusion must be rejected, if some partial sums do not add exactly
    the rows of the other reductions; None if all partial sums do.

    A CUDA block adds the rows that it has just computed, so other rows are not possible. `found`
    maps each result that has partial sums to the axes of these sums.
    """
    view = RowView(fusion)
    reference, logical = view.reference, view.reference.domain.logical
    rows = [logical[p].number for run in view.iterated for p in run]
    if not rows:
        return f"the reduction {reference} has no axis that is not reduced, so it has no rows"
    for tv in found:
        # If rows have several axes, the parts are counted in the tensor's order, and the kernel's
        # rows in memory order.
        axes: dict[bool, list[int]] = {True: [], False: []}
        for axis in tv.domain.root:
            match = view.matcher.reference_of(axis)
            if not axis.is_broadcast:
                axes[axis.is_reduction()].append(-1 if match is None else match.number)
        if axes[True] != rows or {*axes[False]} != view.row_axes:
            return f"the partial sums {tv} do not add the rows of {reference} in memory order"
        (operand,) = (v for v in _definition(tv).inputs if isinstance(v, TensorView))
        if view.axes(operand) != view.row_axes | view.iterated_axes:
            return f"{operand}, which the partial sums {tv} add, has other axes than {reference}"
    return None


def _definition(tv: TensorView) -> TensorOp:
    made_by = tv.definition()
    assert made_by is not None
    return made_by


def pays(rows: int, columns: int) -> bool:
    """Returns whether one kernel for ops along rows and sums over the rows is at least as fast as
    two.

    `rows` is the number of rows, and `columns` the number of elements of each row.
    """
    return rows >= FEWEST_ROWS and columns <= LONGEST_ROW and columns % LEAST_VECTOR == 0


def suits(fusion: Fusion, sizes: Mapping[Symbol, Number]) -> bool:
    """Returns whether one kernel is at least as fast as two for these sizes; False if a size is
    unknown.

    Two kernels would compute ops along rows and sums over the rows separately.
    """
    known = inner_persistent.rows_of(fusion, sizes)
    return known is not None and pays(*known)


# ------------------------------------------------------------------ heuristics
def generic(device: DeviceInfo) -> InnerPersistentParams:
    """Returns parameters for rows of any alignment, up to eight times as long as `suits` allows.

    The scheduler is chosen for the sizes of whole tensors, but the kernel gets a rank's shards,
    which have other sizes. Therefore the parameters also accept rows that `suits` would reject.
    """
    threads = device.max_threads_per_block
    return InnerPersistentParams(threads, kept=8 * LONGEST_ROW // threads, resident=RESIDENT)


def chooser(fusion: Fusion, device: DeviceInfo) -> Callable[[Facts], InnerPersistentParams]:
    """Returns a function that chooses a kernel's parameters for given inputs.

    The function gets the sizes and alignments of the inputs. It chooses vector width and thread
    counts.
    """
    parts = [op.out_tensor for op in fusion.exprs if row_parts(op) is not None]
    accumulators = sum(nbytes_of(tv.dtype()) for tv in parts)
    choose_rows = inner_persistent.chooser(fusion, device, extra_bytes=accumulators)

    def choose(facts: Facts) -> InnerPersistentParams:
        rows = choose_rows(facts)
        if rows.kept and not rows.resident:
            return rows  # long rows: the compiler decides about registers
        at_once = max(THREADS // rows.threads_x, 1)
        return replace(rows, threads_y=at_once, resident=RESIDENT)

    return choose


apply = inner_persistent.apply
