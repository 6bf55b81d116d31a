"""Lookups in kernels: where to read a table is a value that the kernel itself loads.

    t1 = T1[tx];  in1 = fm_is_row(t1, n);  j1 = in1 ? t1 : 0;  t2 = in1 ? T0[j1 * w + k] : NaN

`in1` and `j1` are names like those of loops, so that addresses and conditions are made of them as
of any index. No memory is read for an index outside of the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fuser.ir.dtypes import DataType
from fuser.ir.fusion import TensorOp
from fuser.ir.ops.lookup import (
    EmbeddingFwdOp,
    GatherOp,
    IndexSelectOp,
    LookupOp,
    SelectOp,
    TakeAlongAxisOp,
)
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Const, Scalar, Symbol
from fuser.lower.kernel_ir import (
    Accumulate,
    AccumulateBatch,
    AccumulateBlock,
    Assign,
    Body,
    Compute,
    Declare,
    DeclareShared,
    Define,
    DrawTicket,
    Element,
    Expr,
    For,
    Forget,
    GlobalLoad,
    If,
    Let,
    LetValue,
    Prefetch,
    ScalarValue,
    Select,
    Statement,
    Store,
    Sync,
    ThreadReduce,
    Unswitch,
    Var,
    VectorLoad,
    VectorStore,
    bodies,
    values_of,
    walk,
)
from fuser.ops.reduction_table import missing

if TYPE_CHECKING:
    from fuser.lower.values import At, ValueBuilder

TRUE = sc.const(True)
# The ops that `looked_up` is the value of.
LOOKUPS = (SelectOp, IndexSelectOp, EmbeddingFwdOp, TakeAlongAxisOp, GatherOp)


def looked_up(build: ValueBuilder, op: TensorOp, at: At) -> Expr:
    """Return the element of a table that an index says, as seen from a reader of the result."""
    assert isinstance(op, LookupOp)
    axes = op.table.domain.no_reductions
    size = build.ctx.nesting.fusion.canonical
    extent = build.ctx.simplify(size(axes[op.axis].size))
    if isinstance(op, SelectOp):
        given = sc.cast(size(op.index), DataType.Int)
        wrapped = sc.where(sc.lt(given, 0), sc.add(given, extent), given)
        place: Expr = ScalarValue(wrapped, DataType.Int)
    else:
        place = build.operand(op, 1 - op.TABLE, DataType.Int, at)
    is_inside, row = _name_place(build, op, place, extent, at)
    roots = op.out.domain.maybe_root
    index = [
        sc.ZERO if axis.is_broadcast else row if target is None else at.axes[roots[target].number]
        for axis, target in zip(axes, op.table_map(), strict=True)
    ]
    # The index may be shorter than the table along these axes, which inputs are checked for.
    inside = sc.all_of(
        [
            is_inside,
            *(
                sc.lt(build.ctx.simplify(index[k]), build.ctx.simplify(size(axes[k].size)))
                for k, target in enumerate(op.table_map())
                if target in op.narrowed()
            ),
        ]
    )
    guard = sc.logical_and(at.guard, inside)
    value = build.value(op.table, tuple(index), stage=at.stage, scope=at.scope, guard=guard)
    dtype = at.out.dtype()
    nothing = ScalarValue(Const(missing(dtype), dtype), dtype)
    return Select(inside, value, nothing, dtype)


def _name_place(
    build: ValueBuilder, op: LookupOp, place: Expr, extent: Scalar, at: At
) -> tuple[Symbol, Symbol]:
    """Name whether a place is in the table, and the place; 0 where it is not."""
    mark = build.mark(op.out)
    is_inside = Symbol(f"in{mark}", DataType.Bool, lo=0, hi=1)
    row = sc.index(f"j{mark}", extent)
    # All 64 bits are compared: an index of the kernel may have 32.
    arguments = place, ScalarValue(extent, DataType.Int)
    test: Expr = Compute("fm_is_row({0}, {1})", arguments, DataType.Bool)
    if at.guard != TRUE:
        # Elsewhere the place is arbitrary, and none to complain about.
        test = Select(at.guard, test, ScalarValue(sc.const(False), DataType.Bool), DataType.Bool)
    none = ScalarValue(sc.ZERO, DataType.Index)
    found = Select(is_inside, place, none, DataType.Index)
    at.scope.body.statements += [LetValue(is_inside, test), LetValue(row, found)]
    return is_inside, row


# ------------------------------------------------------------------ out of loops
def lift_places(body: Body) -> None:
    """Find out places before the loops that they are the same in, in place.

    What is read at them may then be loaded in words (`words.py`), and no iteration waits for its
    index first.
    """
    made: list[Statement] = []
    for statement in body.statements:
        for inner in bodies(statement):
            lift_places(inner)
        if isinstance(statement, For):
            made += _lifted(statement)
        made.append(statement)
    body.statements = made


def _lifted(loop: For) -> list[Statement]:
    """Take the places, and what they are made of, that no iteration changes out of a loop."""
    statements = loop.body.statements
    if not any(isinstance(s, LetValue) for s in statements):
        return []
    changing = _changed(loop)
    wanted = _wanted(statements)
    lifted: list[Statement] = []
    for s in statements:
        name = _name(s)
        if name in wanted and not _names_in(s) & changing:
            changing.discard(name)
            lifted.append(s)
    taken = {id(s) for s in lifted}
    loop.body.statements = [s for s in statements if id(s) not in taken]
    return lifted


def _changed(loop: For) -> set[str]:
    """Return the names of what an iteration defines or writes."""
    return {loop.symbol.name, *(name for s in walk(loop.body) for name in _written(s))}


def _written(s: Statement) -> Iterator[str]:
    match s:
        case For() | Let() | LetValue():
            yield s.symbol.name
        case Define() | Declare() | DeclareShared() | DrawTicket() | Store() | VectorStore():
            yield s.name
        case Assign() | Accumulate() | AccumulateBlock() | AccumulateBatch():
            yield _variable(s.target.name)
        case VectorLoad():
            yield s.array
        case ThreadReduce():
            yield from (s.done, *(part.name for part in s.parts))
        case If() | Unswitch() | Sync() | Prefetch() | Forget():
            pass


def _variable(name: str) -> str:
    """Return the name of a variable, given that of one of its fields."""
    return name.partition(".")[0]


def _wanted(statements: list[Statement]) -> set[str]:
    """Return the names of places, and of the values that lead to them."""
    wanted: set[str] = set()
    for s in reversed(statements):
        name = _name(s)
        if isinstance(s, LetValue) or name in wanted:
            wanted |= {name, *_names_in(s)}
    return wanted


def _name(s: Statement) -> str:
    match s:
        case LetValue():
            return s.symbol.name
        case Define():
            return s.name
        case _:
            return ""


def _names_in(s: Statement) -> set[str]:
    """Return the names that the value of a definition is made of."""
    found: set[str] = set()
    for part in values_of(s):
        match part:
            case Var():
                found.add(_variable(part.name))
            case Element() | GlobalLoad():
                found.add(part.name)
            case _:
                pass
        found.update(x.name for scalar in _scalars(part) for x in sc.symbols(scalar))
    return found


def _scalars(part: Expr) -> tuple[Scalar, ...]:
    match part:
        case Element():
            return (part.index,)
        case GlobalLoad():
            return part.index, part.guard
        case ScalarValue():
            return (part.scalar,)
        case Select():
            return (part.cond,)
        case _:
            return ()
