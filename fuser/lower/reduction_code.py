"""Reductions: declares accumulators, and combines them over threads and CUDA blocks.

The parallel types of the loops over the reduced axes decide how values are combined:

- Serial, unrolled and vectorised loops accumulate in registers.
- Thread axes are combined by `block_reduce`.
- Grid axes (over CUDA blocks) are combined by `grid_reduce`, or by `cluster_reduce` if the blocks
  form a cluster.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fuser.ir.dtypes import DataType, nbytes_of
from fuser.ir.ops.nodes import ReductionOp, WelfordOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.ir.types import BLOCK_TYPES, GRID_TYPES, ParallelType
from fuser.lower.buffers import Buffer, no_values, welford_ctype
from fuser.lower.context import Context
from fuser.lower.kernel_ir import (
    Declare,
    DrawTicket,
    Expr,
    ReducePart,
    ScalarValue,
    ThreadReduce,
    Workspace,
)
from fuser.lower.loop_tree import Stage
from fuser.ops.reduction_table import REDUCTIONS

_AXES = ("x", "y", "z")
# CUDA blocks exchange packets (`rt_reduce.h`): the bytes of a packet, and the bytes of the value in
# a packet.
PACKET_BYTES = 8
PAYLOAD_BYTES = 4


def _type(axis: str, kind: str) -> ParallelType:
    return ParallelType[f"{kind}_{axis}"]


def identity_of(buffer: Buffer) -> Expr:
    """Returns the neutral value of a reduction, such as 0 for a sum: to combine it with another
    value changes nothing.

    `buffer` is the accumulator of the reduction.
    """
    op = buffer.stage.op
    if isinstance(op, WelfordOp):
        return no_values(buffer.dtype)
    assert isinstance(op, ReductionOp)
    return ScalarValue(sc.const(REDUCTIONS[op.kind].identity(buffer.dtype)), buffer.dtype)


def functor_of(buffer: Buffer) -> str:
    """Returns the C type of the functor that combines two values of a reduction, such as
    `SumOp<float>`.

    `buffer` is the accumulator of the reduction.
    """
    op = buffer.stage.op
    if isinstance(op, WelfordOp):
        return welford_ctype(buffer.dtype, "WelfordOp")
    assert isinstance(op, ReductionOp)
    name = REDUCTIONS[op.kind].cuda
    if buffer.dtype is DataType.Bool:
        name = {"MaxOp": "OrOp", "MinOp": "AndOp", "SumOp": "OrOp", "ProdOp": "AndOp"}[name]
    return f"{name}<{buffer.ctype}>"


def declare_accumulator(buffer: Buffer) -> Declare:
    """Returns the declaration of an accumulator. Its initial value is the neutral value of the
    reduction, such as 0 for a sum.
    """
    return Declare(buffer.name, buffer.ctype, buffer.size, identity_of(buffer))


def element_layout(buffer: Buffer) -> tuple[int, int]:
    """Returns the size and the alignment of one accumulator in bytes. Both are upper bounds.

    The accumulator of a mean and variance (Welford) is the struct {T, T, T, count}. The count has
    the kernel's index type, for which the larger one is assumed.
    """
    nbytes = nbytes_of(buffer.dtype)
    if isinstance(buffer.stage.op, WelfordOp):
        return _up(3 * nbytes, 8) + 8, 8
    return nbytes, nbytes


def reduced_types(stage: Stage) -> set[ParallelType]:
    """Returns the thread and grid axes (as parallel types) along which a stage's reduction combines
    values. A stage is an op whose result is stored.
    """
    return {
        loop.ptype
        for loop in stage.own_loops
        if loop.is_reduction and loop.is_parallel and isinstance(loop.symbol, Symbol)
    }


def finish_reductions(ctx: Context, buffers: list[Buffer]) -> list[ThreadReduce]:
    """Returns the statements that combine the accumulators `buffers` over threads and CUDA blocks.

    The caller ensures that the loops of all these accumulators end at the same position of the
    kernel. Reductions over the same axes are combined in one statement, because this takes one
    exchange instead of several, and the same CUDA block then has all results.
    """
    groups: dict[object, list[Buffer]] = {}
    for buffer in buffers:
        types = reduced_types(buffer.stage)
        if types:
            key = (frozenset(types), buffer.size, _iterated(buffer.stage))
            groups.setdefault(key, []).append(buffer)
    return [_finish(ctx, group) for group in groups.values()]


def _finish(ctx: Context, group: list[Buffer]) -> ThreadReduce:
    types = reduced_types(group[0].stage)
    threads = _flags("block", types)
    grid = _flags("grid", types)
    size = group[0].size
    nbytes, _ = _layout(group)
    block = _product(ctx, BLOCK_TYPES)
    needed = sc.maximum(sc.mul(block, (size or 1) * nbytes), 16)
    ctx.reduction_bytes = sc.maximum(ctx.reduction_bytes, needed)
    parts = tuple(ReducePart(b.name, b.ctype, functor_of(b), identity_of(b)) for b in group)
    statement = ThreadReduce(parts, size, threads)
    if ctx.nesting.fusion.cluster > 1 and any(grid):
        _over_cluster(ctx, group, statement)
    elif any(grid):
        statement.grid_axes = grid
        _over_blocks(ctx, group, statement)
    return statement


def _flags(kind: str, types: Collection[ParallelType]) -> tuple[bool, bool, bool]:
    x, y, z = (_type(a, kind) in types for a in _AXES)
    return x, y, z


def _product(ctx: Context, types: Collection[ParallelType]) -> Scalar:
    return sc.product(ctx.nesting.extents.get(p, sc.ONE) for p in types)


def _iterated(stage: Stage) -> frozenset[ParallelType]:
    """Returns the thread and grid axes (as parallel types) over which a reduction stage loops
    without reducing them. A stage is an op whose result is stored.

    Threads with different coordinates along these axes compute different results.
    """
    return frozenset(
        loop.ptype
        for loop in stage.all_loops
        if loop.is_parallel and not loop.is_reduction and isinstance(loop.symbol, Symbol)
    )


def _layout(group: list[Buffer]) -> tuple[int, int]:
    """Returns the size and the alignment, in bytes, of a C struct with one element of each
    accumulator in `group`.

    The struct is nested, as `Pair<A, Pair<B, C>>`.
    """
    size, align = element_layout(group[-1])
    for buffer in reversed(group[:-1]):
        first, first_align = element_layout(buffer)
        align = max(align, first_align)
        size = _up(_up(first, align) + size, align)
    return size, align


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _over_blocks(ctx: Context, group: list[Buffer], statement: ThreadReduce) -> None:
    """Extends `statement` so that it combines the values of several CUDA blocks, too.

    `group` has the accumulators. If serial loops surround the reduction, each iteration has its own
    part of the array in global memory through which blocks exchange values.
    """
    stage = group[0].stage
    per_block = sc.mul(_groups(ctx, statement, stage), group[0].size or 1)
    rounds = [
        loop
        for loop in stage.loops[: stage.depth]
        if not loop.is_parallel and isinstance(loop.symbol, Symbol)
    ]
    turn: Scalar = sc.ZERO
    for loop in rounds:
        turn = sc.add(sc.mul(turn, loop.extent), loop.symbol)
    turns = sc.product(loop.extent for loop in rounds)
    elements = sc.mul(_product(ctx, GRID_TYPES), per_block)
    nbytes, _ = _layout(group)
    packets = sc.mul(elements, -(-nbytes // PAYLOAD_BYTES))
    statement.ticket = _ticket(ctx, group[0], statement.grid_axes)
    statement.packets = _workspace(ctx, "uint64_t", sc.mul(sc.mul(packets, turns), PACKET_BYTES))
    statement.packets_offset = sc.mul(turn, packets)
    statement.done = f"done{stage.tv.number}"
    ctx.done_flags.update((b.stage, statement.done) for b in group)


def _groups(ctx: Context, statement: ThreadReduce, stage: Stage) -> Scalar:
    """Returns the number of different values that the threads of a CUDA block hold for one
    accumulator, after the block has combined the values of its threads.

    Also sets `same_axes` of `statement`: along x, y and z, whether threads that differ only in this
    coordinate hold the same value.
    """
    iterated = _iterated(stage)
    x, y, z = (_type(a, "block") not in iterated for a in _AXES)
    statement.same_axes = (x, y, z)
    return _product(ctx, [p for p in BLOCK_TYPES if p in iterated])


def _over_cluster(ctx: Context, group: list[Buffer], statement: ThreadReduce) -> None:
    """Extends `statement` so that it combines the values of the CUDA blocks of a cluster, too.

    `group` has the accumulators. The function reserves shared memory, in which each block writes
    its own values and then copies of the values of the other blocks.
    """
    statement.cluster = ctx.nesting.fusion.cluster
    assert reduced_types(group[0].stage) & set(GRID_TYPES) == {ParallelType.grid_y}
    values = sc.mul(_groups(ctx, statement, group[0].stage), group[0].size or 1)
    nbytes, _ = _layout(group)
    needed = sc.mul(values, (statement.cluster + 1) * nbytes)
    ctx.reduction_bytes = sc.maximum(ctx.reduction_bytes, needed)


def _ticket(ctx: Context, buffer: Buffer, grid_axes: tuple[bool, bool, bool]) -> str:
    """Returns the name of the C variable with the CUDA block's ticket: its number among the blocks
    that have begun so far. Reductions over blocks use it to decide which block gets the result.

    Reductions along the same `grid_axes` (of x, y and z) share a ticket. The first request creates
    the ticket and the array in global memory that counts the blocks.
    """
    found = ctx.tickets.get(grid_axes)
    if found is None:
        reduced = reduced_types(buffer.stage)
        groups = _product(ctx, [p for p in GRID_TYPES if p not in reduced])
        begun = _workspace(ctx, "unsigned", sc.mul(groups, 4))
        name = f"ticket{len(ctx.tickets)}"
        found = ctx.tickets[grid_axes] = DrawTicket(name, begun, grid_axes)
    return found.name


def _workspace(ctx: Context, ctype: str, nbytes: Scalar) -> str:
    ctx.workspaces.append(Workspace(ctype, nbytes))
    return f"W{len(ctx.workspaces) - 1}"


def pair_text(names: Iterable[str], name: str = "Pair") -> str:
    """Returns the C text of nested pairs of the types `names`: `A` for one type, and `Pair<A,
    Pair<B, C>>` for three.

    `name` is the text to use in place of `Pair`.
    """
    *others, text = names
    for other in reversed(others):
        text = f"{name}<{other}, {text}>"
    return text
