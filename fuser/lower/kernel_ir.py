"""What lowering makes: a kernel without its text, in the kernel IR that codegen prints.

The kernel IR is a tree of statements over named scalars, register arrays, shared arrays and global
tensors. Indices and conditions are `Scalar`s over loop symbols; values are `Expr`s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import torch

from fuser.ir.dtypes import DataType, to_torch
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Const, Scalar, Symbol
from fuser.support.record import record, replace

INT32_LIMIT = 2**31 - 1


# ------------------------------------------------------------------ the kernel's interface
@record
class TensorArg:
    """The address of a fusion input or output."""

    tv: TensorView


@record
class ScalarArg:
    """A number that the host computes from sizes and scalar inputs."""

    scalar: Scalar


@record
class StrideArg:
    """The stride, in elements, of axis `axis` of the tensor (reduction axes are not counted)."""

    tv: TensorView
    axis: int


@record
class WorkspaceArg:
    """The address of `LoweredKernel.workspaces[index]`."""

    index: int


Arg: TypeAlias = TensorArg | ScalarArg | StrideArg | WorkspaceArg


@record
class Workspace:
    """Memory of a launch, of `ctype` elements: zero before the first launch, and the kernel leaves
    it zero."""

    ctype: str
    nbytes: Scalar


@record
class Fold:
    """How many blocks a kernel has along x, y and z that are all counted along x; see
    `lower.fold_grid`."""

    counts: tuple[Scalar, Scalar, Scalar]


@record
class LoweredKernel:
    """A kernel before its text: body, arguments in order, launch shape, and what it relies on.

    `args` are those of `tensors`, of `workspaces`, then of `scalars`, which are their names in the
    body. `guards` are conditions over sizes and strides (`stride_symbol`) that must hold for a
    launch; `alignments` are the (tensor, bytes) that pointers must satisfy. The compiler keeps to
    as many registers as let `min_blocks` blocks share a multiprocessor (0: it decides).
    `goes_backwards`: the last block begins. With `parts` it is all of these, and has no body.
    `limits` are the guards that the device takes so many blocks; with a `fold` there are none.
    """

    name: str
    fusion: Fusion
    body: Body
    index_dtype: DataType
    tensors: tuple[TensorView, ...]
    workspaces: tuple[Workspace, ...]
    scalars: tuple[Symbol, ...]
    args: tuple[Arg, ...]
    grid: tuple[Scalar, Scalar, Scalar]
    block: tuple[Scalar, Scalar, Scalar]
    threads: int
    min_blocks: int
    smem_bytes: Scalar
    guards: tuple[Scalar, ...]
    alignments: tuple[tuple[TensorView, int], ...]
    goes_backwards: bool = False
    cluster: int = 1
    parts: tuple[KernelPart, ...] = ()
    limits: tuple[Scalar, ...] = ()
    fold: Fold | None = None

    @property
    def needs_smem(self) -> bool:
        return sc.int_value(self.smem_bytes) != 0

    @property
    def reduces(self) -> bool:
        """Whether threads put their results together."""
        return any(isinstance(s, ThreadReduce) for s in walk(self.body))

    @property
    def waits(self) -> bool:
        """Whether threads of a block wait for one another, or share memory."""
        return self.needs_smem or any(isinstance(s, Sync | ThreadReduce) for s in walk(self.body))


@record
class KernelPart:
    """A kernel beside others: its blocks follow those of the parts before it, of which the
    parameter `first` tells the number ("" for the first part). Those along x, `across`, come before
    the next along y ("": there is one along y). Some of its scalars are `renamed` parameters.
    """

    kernel: LoweredKernel
    first: str
    across: str
    renamed: Mapping[Symbol, str]


def stride_symbol(tv: TensorView, axis: int) -> Symbol:
    """Returns the symbol of the stride of a non-contiguous axis: `T0_s1`."""
    return Symbol(f"T{tv.number}_s{axis}", DataType.Index, lo=0)


# ------------------------------------------------------------------ values
@record
class Var:
    """A named scalar variable, or a field of one (`T5.avg`)."""

    name: str
    dtype: DataType


@record
class Element:
    """`name[index]` of a register or shared array; `member` picks a field of a struct element."""

    name: str
    index: Scalar
    dtype: DataType
    member: str = ""
    shared: bool = False


@record
class GlobalLoad:
    """`name[index]` of a global tensor; under `guard` only, zero otherwise."""

    name: str
    index: Scalar
    dtype: DataType
    guard: Scalar


@record
class ScalarValue:
    """A `Scalar` (constant, parameter, index) converted to `dtype`."""

    scalar: Scalar
    dtype: DataType


@record
class Convert:
    """`arg` converted to `dtype`, rounding to nearest even."""

    arg: Expr
    dtype: DataType


@record
class Compute:
    """`template` filled with the texts of `args`; `dtype` is the type of the result."""

    template: str
    args: tuple[Expr, ...]
    dtype: DataType


@record
class Select:
    """`cond ? a : b`, with a condition over indices."""

    cond: Scalar
    a: Expr
    b: Expr
    dtype: DataType


Expr: TypeAlias = Var | Element | GlobalLoad | ScalarValue | Convert | Compute | Select


def convert(value: Expr, dtype: DataType) -> Expr:
    """Returns the value in another dtype; Index and Int are one type in registers."""
    same = {DataType.Index: DataType.Int}
    if same.get(value.dtype, value.dtype) is same.get(dtype, dtype):
        return value
    if isinstance(value, ScalarValue) and _is_exact(value):
        return ScalarValue(value.scalar, dtype)
    return Convert(value, dtype)


def _is_exact(value: ScalarValue) -> bool:
    """Whether the value's dtype holds the scalar: what is converted again is the scalar itself."""
    scalar, dtype = value.scalar, value.dtype
    if not isinstance(scalar, Const):
        return scalar.dtype is dtype or (
            sc.is_int(scalar) and dtype in (DataType.Index, DataType.Int)
        )
    try:
        held = torch.tensor(scalar.value, dtype=to_torch(dtype)).item()
    except (RuntimeError, OverflowError):
        return False
    return held == scalar.value or (held != held and scalar.value != scalar.value)


# ------------------------------------------------------------------ statements
@dataclass
class Body:
    """A sequence of statements: a scope for names."""

    statements: list[Statement] = field(default_factory=list)


@dataclass
class For:
    """A loop over `symbol` from 0 to `extent`, `backward` from the last to the first; `pragma` is
    the macro printed before it, "" for none."""

    symbol: Symbol
    extent: Scalar
    body: Body
    unroll: bool = False
    pragma: str = ""
    backward: bool = False


@dataclass
class If:
    """`then` where `cond` holds. A `predicate` guards against work outside of the tensors."""

    cond: Scalar
    then: Body
    otherwise: Body | None = None
    flags: tuple[str, ...] = ()


@dataclass
class Unswitch:
    """Marks a subtree that is emitted twice: without its predicates, and with them."""

    body: Body


@dataclass
class Let:
    """`const nvfuser_index_t name = value`."""

    symbol: Symbol
    value: Scalar


@dataclass
class LetValue:
    """`const T name = value`: a value that kernels find out, named in indices and conditions."""

    symbol: Symbol
    value: Expr


@dataclass
class Define:
    """`const T name = value`."""

    name: str
    dtype: DataType
    value: Expr


@dataclass
class Declare:
    """A register scalar (`size` None) or array, of `ctype` elements, with an initial value."""

    name: str
    ctype: str
    size: int | None
    init: Expr | None = None


@dataclass
class DeclareShared:
    """A shared array of `count` elements at `offset` bytes in the block's buffer."""

    name: str
    dtype: DataType
    offset: Scalar
    count: Scalar


@dataclass
class Assign:
    """Write `value` to a register or shared array element, or to a register scalar."""

    target: Var | Element
    value: Expr


@dataclass
class Store:
    """Write `value` to a global tensor."""

    name: str
    index: Scalar
    value: Expr


@dataclass
class VectorLoad:
    """`width` elements of a global or shared tensor into a register array at `at`: one access, or,
    of memory that may not be `aligned`, one where the address allows it."""

    array: str
    at: Scalar
    name: str
    index: Scalar
    width: int
    dtype: DataType
    streaming: bool = False
    shared: bool = False
    aligned: bool = True


@dataclass
class Prefetch:
    """Ask for an element of a global tensor, which is loaded later."""

    name: str
    index: Scalar


@dataclass
class Forget:
    """What the compiler has computed from a register array is computed again from here on."""

    array: str


@dataclass
class VectorStore:
    """`width` elements of a register array from `at` into a global or shared tensor."""

    name: str
    index: Scalar
    array: str
    at: Scalar
    width: int
    dtype: DataType
    streaming: bool = False
    shared: bool = False


@dataclass
class Accumulate:
    """Combine `value` into an accumulator. `kind` is a ReductionOp kind or `welford`; with a
    `nan_flag`, NaNs go there and the accumulator may drop them."""

    target: Var | Element
    value: Expr
    kind: str
    functor: str
    nan_flag: str = ""


@dataclass
class AccumulateBlock:
    """Combine the first `count` elements of a register array into a Welford accumulator."""

    target: Var
    array: str
    count: Scalar


@dataclass
class AccumulateBatch:
    """Combine the elements of a register array whose bits are set in the variable `mask` ("": all)
    into a Welford accumulator that holds as many values as the variable `held` says."""

    target: Var | Element
    array: str
    mask: str
    held: str


@record
class ReducePart:
    """One accumulator of a combination over threads."""

    name: str
    ctype: str
    functor: str
    identity: Expr


@dataclass
class DrawTicket:
    """Draw the block's number among those that have begun, for grid reductions over these axes."""

    name: str
    begun: str
    grid_axes: tuple[bool, bool, bool]


@dataclass
class ThreadReduce:
    """Combine accumulators (`size` None: scalars) over thread and block axes, all in one exchange.

    `done` names the flag of a grid reduction: true in the block that has the result, which its
    `ticket` decides. `same_axes` are the thread axes along which all threads hold the same value
    after the block step. Of a `cluster` of more than one block each gets the result.
    """

    parts: tuple[ReducePart, ...]
    size: int | None
    thread_axes: tuple[bool, bool, bool]
    grid_axes: tuple[bool, bool, bool] = (False, False, False)
    same_axes: tuple[bool, bool, bool] = (False, False, False)
    packets: str = ""
    packets_offset: Scalar | None = None
    ticket: str = ""
    done: str = ""
    cluster: int = 1


@dataclass
class Sync:
    """A block-wide barrier."""


Statement: TypeAlias = (
    For
    | If
    | Unswitch
    | Let
    | LetValue
    | Define
    | Declare
    | DeclareShared
    | Assign
    | Store
    | VectorLoad
    | Prefetch
    | Forget
    | VectorStore
    | Accumulate
    | AccumulateBlock
    | AccumulateBatch
    | DrawTicket
    | ThreadReduce
    | Sync
)
StatementT = TypeVar("StatementT", bound=Statement)
Rewrite: TypeAlias = Callable[[Scalar], Scalar]


def map_expr(expr: Expr, fn: Rewrite, value: Callable[[ScalarValue], Expr]) -> Expr:
    """Returns the value with `fn` applied to its indices and conditions, `value` to its scalars."""
    match expr:
        case Var():
            return expr
        case Element():
            return replace(expr, index=fn(expr.index))
        case GlobalLoad():
            return replace(expr, index=fn(expr.index), guard=fn(expr.guard))
        case ScalarValue():
            return value(expr)
        case Convert():
            return replace(expr, arg=map_expr(expr.arg, fn, value))
        case Compute():
            return replace(expr, args=tuple(map_expr(a, fn, value) for a in expr.args))
        case Select():
            a, b = map_expr(expr.a, fn, value), map_expr(expr.b, fn, value)
            return replace(expr, cond=fn(expr.cond), a=a, b=b)


# The scalar and value fields of the statements that hold no other statements.
_SCALAR_FIELDS: dict[type, tuple[str, ...]] = {
    Store: ("index",),
    VectorLoad: ("at", "index"),
    Prefetch: ("index",),
    VectorStore: ("at", "index"),
    ThreadReduce: ("packets_offset",),
    DeclareShared: ("offset", "count"),
    Let: ("value",),
    AccumulateBlock: ("count",),
}
_VALUE_FIELDS: dict[type, tuple[str, ...]] = {
    LetValue: ("value",),
    Define: ("value",),
    Assign: ("target", "value"),
    Store: ("value",),
    Accumulate: ("target", "value"),
    AccumulateBlock: ("target",),
    AccumulateBatch: ("target",),
}


def map_statement(
    statement: Statement, fn: Rewrite, value: Callable[[ScalarValue], Expr]
) -> Statement:
    """Returns a statement without a body, rewritten as by `map_expr`."""
    changes: dict[str, object] = {}
    for name in _SCALAR_FIELDS.get(type(statement), ()):
        scalar = getattr(statement, name)
        changes[name] = None if scalar is None else fn(scalar)
    for name in _VALUE_FIELDS.get(type(statement), ()):
        changes[name] = map_expr(getattr(statement, name), fn, value)
    return with_changes(statement, changes) if changes else statement


def with_changes(statement: StatementT, changes: dict[str, object]) -> StatementT:
    """Does what `dataclasses.replace` does, for statements: that looks at each field."""
    made = object.__new__(type(statement))
    made.__dict__.update(statement.__dict__, **changes)
    return made


def bodies(statement: Statement) -> tuple[Body, ...]:
    """Returns the nested bodies of a statement."""
    match statement:
        case For() | Unswitch():
            return (statement.body,)
        case If():
            return (
                (statement.then,)
                if statement.otherwise is None
                else (
                    statement.then,
                    statement.otherwise,
                )
            )
        case _:
            return ()


def walk(body: Body) -> Iterator[Statement]:
    """Yields every statement, outer before inner."""
    for statement in body.statements:
        yield statement
        for inner in bodies(statement):
            yield from walk(inner)


def expr_parts(expr: Expr) -> Iterator[Expr]:
    """Yields the value and everything it is made of."""
    yield expr
    match expr:
        case Convert():
            yield from expr_parts(expr.arg)
        case Compute():
            for a in expr.args:
                yield from expr_parts(a)
        case Select():
            yield from expr_parts(expr.a)
            yield from expr_parts(expr.b)
        case _:
            pass


def values_of(statement: Statement) -> Iterator[Expr]:
    """Yields every value that a statement reads or writes, parts included."""
    for name in _VALUE_FIELDS.get(type(statement), ()):
        yield from expr_parts(getattr(statement, name))
