"""Predicates: which iterations of a stage do work.

A loop runs past its axis only at a split that does not divide: then the index of the split axis is
compared with its extent. Merges need no test, so no predicate divides. Threads and blocks that a
stage does not use, or uses only in part, are tested by their coordinates.
"""

from __future__ import annotations

from typing import Literal

from fuser.ir.ops.resizing import PadOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.ir.types import BLOCK_TYPES, GRID_TYPES, ParallelType
from fuser.lower.context import Context
from fuser.lower.loop_tree import COORDINATES, Loop, Nesting, Stage
from fuser.support.errors import UnsupportedError
from fuser.support.record import record

Lanes = Literal["all", "any", "each"]


@record
class Predicate:
    """A condition over indices and the flags (of finished grid reductions) that must be set."""

    cond: Scalar
    flags: tuple[str, ...] = ()


def range_conditions(
    ctx: Context, stage: Stage, *, lanes: Lanes = "all", of_operand: bool = False
) -> list[Scalar]:
    """Return the tests that keep a stage's iterations inside its tensor, or inside the operand of a
    reduction: whether all lanes of a vector are, whether any may be, or of each by itself."""
    begins: list[Scalar] = []
    if stage.reference is not None:
        renamed: dict[Scalar, Scalar] = {
            theirs.symbol: mine.symbol
            for theirs, mine in zip(stage.reference.all_loops, stage.all_loops, strict=True)
            if isinstance(theirs.symbol, Symbol)
        }
        conds = [sc.substitute(c, renamed) for c in range_conditions(ctx, stage.reference)]
    else:
        known = ctx.indexer.stage_axes(stage)
        conds = [
            sc.lt(
                ctx.simplify(known[split.inp]),
                ctx.simplify(ctx.size(stage.tv, split.inp)),
            )
            for split in ctx.partial_splits(stage.tv, of_operand=of_operand)
        ]
        for shift in ctx.shifts(stage.tv):
            index = ctx.simplify(known[shift.inp])
            begins.append(sc.le(0, index))
            conds.append(sc.lt(index, ctx.simplify(ctx.size(stage.tv, shift.inp))))
    if stage.vector is not None and lanes != "each":
        width = sc.int_value(stage.vector.extent)
        assert width is not None
        first: dict[Scalar, Scalar] = {stage.vector.symbol: sc.ZERO}
        last: dict[Scalar, Scalar] = {stage.vector.symbol: sc.const(width - 1)}
        # The last lane of a shifted row's first word is inside.
        begins = [sc.substitute(c, first) for c in begins] if lanes == "all" else []
        conds = [sc.substitute(c, last if lanes == "all" else first) for c in conds]
    return [*begins, *conds, *_partial_launch(ctx.nesting, stage.all_loops)]


def _partial_launch(nesting: Nesting, loops: list[Loop]) -> list[Scalar]:
    """Test the coordinates of parallel loops that are shorter than the launch."""
    conds: list[Scalar] = []
    for loop in loops:
        if loop.is_parallel and isinstance(loop.symbol, Symbol):
            conds.append(sc.lt(loop.symbol, loop.extent))
    return conds


def stage_predicate(ctx: Context, stage: Stage, *, lanes: Lanes = "all") -> Predicate:
    """Return the predicate of a stage's innermost statement; see `range_conditions`."""
    conds = range_conditions(ctx, stage, lanes=lanes, of_operand=stage.is_reduction)
    if stage.storage not in ("global", "shared"):
        return Predicate(sc.all_of(conds))
    return writer_predicate(ctx, stage, stage.all_loops, conds)


def writer_predicate(
    ctx: Context, stage: Stage, loops: list[Loop], conds: list[Scalar]
) -> Predicate:
    """Return the predicate of a write to memory that several threads see: one of them writes.

    A thread axis that the writer does not iterate is fixed to 0; of the blocks of a grid reduction,
    the one that finished it writes.
    """
    finished = _grid_reductions(ctx.nesting, stage)
    by_flag = {p for s in finished for p in grid_axes(s)}
    types = BLOCK_TYPES if stage.storage == "shared" else (*GRID_TYPES, *BLOCK_TYPES)
    used = {loop.ptype for loop in loops if isinstance(loop.symbol, Symbol)}
    extra: list[Scalar] = []
    for ptype in types:
        extent = ctx.nesting.extents.get(ptype, sc.ONE)
        if ptype in used or ptype in by_flag or sc.int_value(extent) == 1:
            continue
        extra.append(sc.eq(sc.index(COORDINATES[ptype], extent), 0))
    flags = tuple(dict.fromkeys(ctx.done_flags[s] for s in finished))
    if len(flags) > 1:
        names = " and ".join(str(s.tv) for s in finished)
        raise UnsupportedError(
            f"{stage.tv} needs the grid reductions {names}, which different blocks may finish: "
            "their loops differ"
        )
    return Predicate(sc.all_of([*conds, *extra]), flags)


def grid_axes(stage: Stage) -> tuple[ParallelType, ...]:
    """Return the block axes over which a reduction combines so that one block has the result: in
    a cluster all have it."""
    if not stage.is_reduction or stage.tv.fusion.cluster > 1:
        return ()
    return tuple(
        loop.ptype
        for loop in stage.own_loops
        if loop.is_reduction and loop.ptype in GRID_TYPES and sc.int_value(loop.extent) != 1
    )


def _grid_reductions(nesting: Nesting, stage: Stage) -> list[Stage]:
    """Return the grid reductions that a stage depends on, itself included."""
    seen: dict[Stage, None] = {}

    def visit(s: Stage) -> None:
        if s in seen:
            return
        seen[s] = None
        for r in s.reads:
            visit(r)

    visit(stage)
    return [s for s in sorted(seen, key=lambda s: s.number) if grid_axes(s)]


def inside_pad(ctx: Context, op: PadOp, index: tuple[Scalar, ...]) -> Scalar:
    """Return the condition that a pad's root index lies inside its operand.

    Only the sides that are padded are tested: where elements are dropped, every index is inside.
    """
    canonical, simplify = ctx.nesting.fusion.canonical, ctx.simplify
    conds: list[Scalar] = []
    sides = zip(op.inp.domain.no_reductions, index, op.left, op.right, strict=True)
    for axis, i, left, right in sides:
        i = simplify(i)
        if not _never_positive(left):
            conds.append(sc.le(0, i))
        if not _never_positive(right):
            conds.append(sc.lt(i, simplify(canonical(axis.size))))
    return sc.all_of(conds)


def _never_positive(x: Scalar) -> bool:
    value = sc.int_value(x)
    return value is not None and value <= 0
