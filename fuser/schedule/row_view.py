"""A fusion along the rows of its reductions, and the rewrites that its schedules begin with."""

from __future__ import annotations

from functools import cached_property

from fuser.ir import primitives
from fuser.ir.axis_graph import AxisGraph
from fuser.ir.fusion import Fusion, TensorOp
from fuser.ir.ops.costs import EXPENSIVE
from fuser.ir.tensor import TensorView
from fuser.ops.reference.meaning import REDUCING
from fuser.passes.row_parts import RowParts, row_parts
from fuser.schedule.iteration_space import Access, Space, iteration_space
from fuser.schedule.loop_propagation import AxisMatcher
from fuser.schedule.row_levels import divide_once, two_pass_welford


def reference_of(fusion: Fusion) -> TensorView:
    """Return the result of the first reduction along rows."""
    reductions = (op for op in fusion.exprs if isinstance(op, REDUCING))
    return next(op.out_tensor for op in reductions if row_parts(op) is None)


class RowView:
    """A fusion along the rows of its reference."""

    def __init__(self, fusion: Fusion) -> None:
        self.fusion = fusion
        self.reference = reference_of(fusion)
        self.graph = AxisGraph(fusion)
        self.space: Space = iteration_space(fusion, self.reference, self.graph)
        runs = self.space.runs(self.space.memory_order())
        self.iterated = [list(r) for r in runs if not self.space.is_reduced(r[0])]
        self.reduced = [list(r) for r in runs if self.space.is_reduced(r[0])]
        self.matcher = AxisMatcher(self.graph, self.reference)
        logical = self.reference.domain.logical
        self.row_axes = frozenset(logical[p].number for r in self.reduced for p in r)
        self.iterated_axes = frozenset(logical[p].number for r in self.iterated for p in r)

    @cached_property
    def parts(self) -> dict[TensorView, RowParts]:
        """Return the results that are parts of sums over the rows."""
        found = {op.out_tensor: row_parts(op) for op in self.fusion.exprs}
        return {tv: parts for tv, parts in found.items() if parts is not None}

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

    @cached_property
    def dense(self) -> tuple[Access, ...]:
        """Return the accesses to all elements, row behind row; none where one has gaps or another
        order."""
        found = [a for a in self.space.accesses if a.tv in self.full]
        return tuple(found) if self.space.are_dense(found) else ()

    def is_costly(self, op: TensorOp) -> bool:
        """Whether computing an op again costs more than keeping its result: it is expensive, or
        reads memory that is not kept."""
        full = self.full
        return op.name in EXPENSIVE or any(
            isinstance(v, TensorView) and v in self.fusion.inputs and v not in full
            for v in op.inputs
        )


def rewrite(fusion: Fusion, *, is_kept: bool, has_threads: bool) -> None:
    """Give the fusion the ops that suit the form."""
    _fork_outputs(fusion)
    if is_kept:
        two_pass_welford(fusion)
    if has_threads:
        divide_once(fusion, RowView(fusion).is_per_row)


def _fork_outputs(fusion: Fusion) -> None:
    """An output that others read is computed in registers; its copy is the output."""
    for out in dict.fromkeys(fusion.outputs):
        if fusion.uses(out):
            primitives.cache_fork(out)
