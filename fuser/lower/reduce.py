"""Reductions: accumulators, and their combination over threads and blocks.

A reduction is staged by the parallel types of its reduction loops: serial, unrolled and vectorised ones
accumulate in registers, thread axes are combined by `block_reduce`, block axes by `grid_reduce`.
"""

from __future__ import annotations

from fuser.ir import scalar as sc
from fuser.ir.dtypes import DataType, nbytes_of
from fuser.ir.nodes import ReductionOp, WelfordOp
from fuser.ir.scalar import Scalar, Symbol
from fuser.ir.types import BLOCK_TYPES, GRID_TYPES, ParallelType
from fuser.lower.allocate import Buffer
from fuser.lower.context import Context
from fuser.lower.kernel import Declare, ThreadReduce, Workspace
from fuser.lower.predicate import done_flag
from fuser.lower.loops import Stage
from fuser.ops.table import REDUCTIONS

_AXES = ("x", "y", "z")


def _type(axis: str, kind: str) -> ParallelType:
    return ParallelType[f"{kind}_{axis}"]


def identity_of(buffer: Buffer) -> str:
    """Return the C text of the value that changes nothing."""
    from fuser.codegen.cuda import literal

    op = buffer.stage.op
    if isinstance(op, WelfordOp):
        return f"{buffer.ctype}{{0, 0, 0}}"
    assert isinstance(op, ReductionOp)
    return literal(REDUCTIONS[op.kind].identity(buffer.dtype), buffer.dtype)


def functor_of(buffer: Buffer) -> str:
    """Return the C type of the combining functor: `SumOp<float>`."""
    op = buffer.stage.op
    name = "WelfordOp" if isinstance(op, WelfordOp) else REDUCTIONS[op.kind].cuda  # pyright: ignore[reportAttributeAccessIssue]
    if buffer.dtype is DataType.Bool:
        name = {"MaxOp": "OrOp", "MinOp": "AndOp", "SumOp": "OrOp", "ProdOp": "AndOp"}[name]
    ctype = buffer.ctype[len("Welford<") : -1] if name == "WelfordOp" else buffer.ctype
    return f"{name}<{ctype}>"


def declare_accumulator(buffer: Buffer) -> Declare:
    """Return the declaration of an accumulator, set to the identity."""
    return Declare(buffer.name, buffer.ctype, buffer.size, identity_of(buffer))


def element_bytes(buffer: Buffer) -> int:
    """Return the size of one accumulator in bytes, with padding."""
    nbytes = nbytes_of(buffer.dtype)
    if not isinstance(buffer.stage.op, WelfordOp):
        return nbytes
    return 2 * nbytes + 8 if nbytes >= 4 else 16


def reduced_types(stage: Stage) -> set[ParallelType]:
    """Return the parallel types over which a reduction combines."""
    return {
        loop.ptype
        for loop in stage.own_loops
        if loop.is_reduction and loop.is_parallel and isinstance(loop.symbol, Symbol)
    }


def finish_reduction(ctx: Context, buffer: Buffer) -> ThreadReduce | None:
    """Return the combination over threads and blocks; None when each thread has its own result."""
    stage = buffer.stage
    types = reduced_types(stage)
    if not types:
        return None
    threads = tuple(_type(a, "block") in types for a in _AXES)
    grid = tuple(_type(a, "grid") in types for a in _AXES)
    count = buffer.size or 1
    block = _product(ctx, BLOCK_TYPES)
    needed = sc.mul(block, max(count * element_bytes(buffer), 1))
    ctx.reduction_bytes = sc.maximum(ctx.reduction_bytes, sc.maximum(needed, 16))
    statement = ThreadReduce(
        buffer.name,
        buffer.size,
        functor_of(buffer),
        identity_of(buffer),
        (threads[0], threads[1], threads[2]),
    )
    if not any(grid):
        return statement
    return _over_blocks(ctx, buffer, statement, (grid[0], grid[1], grid[2]))


def _product(ctx: Context, types: tuple[ParallelType, ...]) -> Scalar:
    return sc.product(ctx.plan.extents.get(p, sc.ONE) for p in types)


def _over_blocks(
    ctx: Context, buffer: Buffer, statement: ThreadReduce, grid: tuple[bool, bool, bool]
) -> ThreadReduce:
    """Add the grid step, with scratch memory of its own for every serial iteration around it."""
    stage = buffer.stage
    extents = ctx.plan.extents
    # Threads along axes that the stage does not iterate hold the same value.
    iterated = {
        loop.ptype
        for loop in stage.all_loops
        if not loop.is_reduction and isinstance(loop.symbol, Symbol)
    }
    same = tuple(_type(a, "block") not in iterated for a in _AXES)
    kept = [
        _type(a, "block") for a, is_same in zip(_AXES, same, strict=True) if not is_same
    ]
    per_block = sc.mul(_product(ctx, tuple(kept)), buffer.size or 1)
    rounds = [
        loop.find()
        for loop in stage.loops[: stage.depth]
        if not loop.is_parallel and isinstance(loop.symbol, Symbol)
    ]
    turn: Scalar = sc.ZERO
    for loop in rounds:
        turn = sc.add(sc.mul(turn, loop.extent), loop.symbol)
    turns = sc.product(loop.extent for loop in rounds)
    elements = sc.mul(_product(ctx, GRID_TYPES), per_block)
    groups = sc.product(
        extents.get(_type(a, "grid"), sc.ONE)
        for a, reduced in zip(_AXES, grid, strict=True)
        if not reduced
    )
    first = len(ctx.workspaces)
    nbytes = element_bytes(buffer)
    ctx.workspaces += [
        Workspace(sc.mul(sc.mul(elements, nbytes), turns), zeroed=False),
        Workspace(sc.mul(sc.mul(groups, 4), turns), zeroed=True),
    ]
    ctx.workspace_ctypes += [buffer.ctype, "int"]
    statement.grid_axes = grid
    statement.same_axes = (same[0], same[1], same[2])
    statement.work, statement.semaphore = f"W{first}", f"W{first + 1}"
    statement.work_offset = sc.mul(turn, elements)
    statement.semaphore_offset = sc.mul(turn, groups)
    statement.done = done_flag(stage)
    return statement
