"""The inner-outer persistent scheduler: what `inner_persistent` computes along rows, and sums over
the rows beside it (the backward of layer and RMS norm), as one kernel that reads the rows once.

The sums over rows come in parts (`passes.row_parts`); a block makes one part of each, row after
row, and another kernel adds the parts up:

    rows      [BIDx part, S rows of the part, TIDy rows | r S 1, r UR, r TIDx | r V]
    parts     [BIDx part, r S rows of the part, r TIDy rows | S 1, UR, TIDx | V]

Each thread keeps its piece of the row, as `inner_persistent` does, and beside it an accumulator for
each element of each sum. What has the row alone (weights) is loaded once per block. There are no
plain loops of this kind: on the CPU two kernels take their place.
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

# Parts of each sum: two for each multiprocessor of an H200. None of these numbers is measured yet.
PARTS = 264
# One kernel pays for so many rows at least, of so many elements at most: the accumulators and the
# row find room in the registers of one block.
FEWEST_ROWS = 4 * PARTS
LONGEST_ROW = 8192
# Rows are read in words of so many elements at least; others do better with rows that are shifted.
WORD = 4
# Threads of a block, where a row takes fewer, and for how many a multiprocessor has registers.
THREADS = 512
RESIDENT = 1024


# ------------------------------------------------------------------ what is accepted
def accepts(fusion: Fusion) -> str | None:
    """Returns why the fusion is not of this kind, None when it is."""
    found = {op.out_tensor: parts for op in fusion.exprs if (parts := row_parts(op)) is not None}
    if not found:
        return "no sum over rows comes in parts"
    for tv in found:
        if tv not in fusion.outputs or fusion.uses(tv):
            return f"parts {tv} are read in the kernel that makes them"
    if len({parts.count for parts in found.values()}) > 1:
        return "sums over rows come in different numbers of parts"
    reason = inner_persistent.accepts(without_parts(fusion))
    return reason or _parts_rejection(fusion, found)


def without_parts(fusion: Fusion) -> Fusion:
    """Returns a copy that computes the other outputs alone."""
    rest, mapping = fusion.copy()
    made = {mapping[op.out_tensor] for op in fusion.exprs if row_parts(op) is not None}
    rest.outputs = [out for out in rest.outputs if out not in made]
    rest.exprs = rest.used_exprs()
    return rest


def _parts_rejection(fusion: Fusion, found: Mapping[TensorView, RowParts]) -> str | None:
    """The parts sum the rows that the other reductions have, element by element."""
    view = RowView(fusion)
    reference, logical = view.reference, view.reference.domain.logical
    rows = [logical[p].number for run in view.iterated for p in run]
    if not rows:
        return f"{reference} has no rows"
    for tv in found:
        # Of rows of several axes the parts count in the tensor's order, the kernel in memory's.
        axes: dict[bool, list[int]] = {True: [], False: []}
        for axis in tv.domain.root:
            match = view.matcher.reference_of(axis)
            if not axis.is_broadcast:
                axes[axis.is_reduction()].append(-1 if match is None else match.number)
        if axes[True] != rows or {*axes[False]} != view.row_axes:
            return f"parts {tv} do not sum the rows of {reference} in the order of memory"
        (operand,) = (v for v in _definition(tv).inputs if isinstance(v, TensorView))
        if view.axes(operand) != view.row_axes | view.iterated_axes:
            return f"{operand}, which parts {tv} sum, has other axes than {reference}"
    return None


def _definition(tv: TensorView) -> TensorOp:
    made_by = tv.definition()
    assert made_by is not None
    return made_by


def pays(rows: int, columns: int) -> bool:
    """Whether one kernel for rows and the sums over them takes no longer than two."""
    return rows >= FEWEST_ROWS and columns <= LONGEST_ROW and columns % WORD == 0


def suits(fusion: Fusion, sizes: Mapping[Symbol, Number]) -> bool:
    """Whether one kernel pays for these sizes."""
    known = inner_persistent.rows_of(fusion, sizes)
    return known is not None and pays(*known)


# ------------------------------------------------------------------ heuristics
def generic(device: DeviceInfo) -> InnerPersistentParams:
    """Returns what serves rows of any alignment, and of eight times the length that `suits` allows:
    a program is chosen by global sizes."""
    threads = device.max_threads_per_block
    return InnerPersistentParams(threads, kept=8 * LONGEST_ROW // threads, resident=RESIDENT)


def chooser(fusion: Fusion, device: DeviceInfo) -> Callable[[Facts], InnerPersistentParams]:
    """Returns what chooses vector width and thread shape for an input class."""
    parts = [op.out_tensor for op in fusion.exprs if row_parts(op) is not None]
    accumulators = sum(nbytes_of(tv.dtype()) for tv in parts)
    choose_rows = inner_persistent.chooser(fusion, device, beside=accumulators)

    def choose(facts: Facts) -> InnerPersistentParams:
        rows = choose_rows(facts)
        if rows.kept and not rows.resident:
            return rows  # long ones
        at_once = max(THREADS // rows.threads_x, 1)
        return replace(rows, threads_y=at_once, resident=RESIDENT)

    return choose


apply = inner_persistent.apply
