"""The kernel IR: the result of lowering, which code generation prints as text.

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
    """A kernel argument: the address of a fusion input or output."""

    tv: TensorView


@record
class ScalarArg:
    """A kernel argument: a number that the host computes from sizes and scalar inputs."""

    scalar: Scalar


@record
class StrideArg:
    """A kernel argument: the stride, in elements, of axis `axis` of the tensor. Reduction axes are
    not counted."""

    tv: TensorView
    axis: int


@record
class WorkspaceArg:
    """A kernel argument: the address of `LoweredKernel.workspaces[index]`."""

    index: int


Arg: TypeAlias = TensorArg | ScalarArg | StrideArg | WorkspaceArg


@record
class Workspace:
    """Scratch memory of a launch, of `ctype` elements. It is zero before the first launch, and the
    kernel leaves it zero.
    """

    ctype: str
    nbytes: Scalar


@record
class Fold:
    """The numbers of blocks along x, y and z of a kernel that is launched with all blocks along x;
    see
    `fuser/lower/passes/launch_grid.py`.
    """

    counts: tuple[Scalar, Scalar, Scalar]


@record
class LoweredKernel:
    """A kernel before its text: body, arguments in order, launch shape, and launch conditions.

    - `args` are first those of `tensors`, then of `workspaces`, then of `scalars`. `scalars` are
      the names of the latter in the body.
    - `guards` are conditions over sizes and strides (`stride_symbol`) that must hold for a launch.
    - `alignments` are pairs (tensor, bytes): the pointer must be a multiple of the bytes.
    - `min_blocks` makes the compiler use few enough registers for so many blocks per
      multiprocessor; 0 lets it decide.
    - `goes_backwards`: the blocks process the tensors from the end, the last part first.
    - `parts`, when not empty, are the kernels that this launch contains; the body is then empty.
    - `limits` are the guards for the device's maximum numbers of blocks; empty with a `fold`.
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
        """Whether the kernel uses shared memory."""
        return sc.int_value(self.smem_bytes) != 0

    @property
    def reduces(self) -> bool:
        """Whether a reduction combines values of several threads."""
        return any(isinstance(s, ThreadReduce) for s in walk(self.body))

    @property
    def waits(self) -> bool:
        """Whether threads of a block synchronise or share memory."""
        return self.needs_smem or any(isinstance(s, Sync | ThreadReduce) for s in walk(self.body))


@record
class KernelPart:
    """One kernel of a horizontally fused launch.

    - `first` names the parameter with the number of the part's first block; "" for the first part.
      The blocks of a part follow those of the part before it.
    - `across` names the parameter with the number of blocks along x; "" if there is one block along
      y. Blocks are counted along x first, then y.
    - `renamed` maps those of the part's scalars whose parameters have other names in the launch.
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
    """`name[index]` of a global tensor where `guard` holds, zero elsewhere."""

    name: str
    index: Scalar
    dtype: DataType
    guard: Scalar


@record
class ScalarValue:
    """A `Scalar` (constant, parameter or index) converted to `dtype`."""

    scalar: Scalar
    dtype: DataType


@record
class Convert:
    """The value `arg` converted to `dtype`, rounded to nearest even."""

    arg: Expr
    dtype: DataType


@record
class Compute:
    """The C expression `template` with the texts of `args` inserted; `dtype` is the type of the
    result.
    """

    template: str
    args: tuple[Expr, ...]
    dtype: DataType


@record
class Select:
    """The C expression `cond ? a : b`, with a condition over indices."""

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
    """Whether the value's dtype represents the scalar exactly. Its conversion can then be
    skipped."""
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
    """A sequence of statements, and the scope of the names defined in it."""

    statements: list[Statement] = field(default_factory=list)


@dataclass
class For:
    """A loop over `symbol` from 0 to `extent`, or with `backward` from the last value to 0.
    `pragma` is the macro printed before it, "" for none.
    """

    symbol: Symbol
    extent: Scalar
    body: Body
    unroll: bool = False
    pragma: str = ""
    backward: bool = False


@dataclass
class If:
    """Runs `then` where `cond` holds and all `flags` (C variables) are set, else `otherwise`."""

    cond: Scalar
    then: Body
    otherwise: Body | None = None
    flags: tuple[str, ...] = ()


@dataclass
class Unswitch:
    """A subtree that `expand_unswitch` emits twice: without its predicates, and with them."""

    body: Body


@dataclass
class Let:
    """The statement `const nvfuser_index_t name = value`, for an index."""

    symbol: Symbol
    value: Scalar


@dataclass
class LetValue:
    """`const T name = value`: a value computed in the kernel that indices and conditions use."""

    symbol: Symbol
    value: Expr


@dataclass
class Define:
    """The statement `const T name = value`, for a value."""

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
    """Writes `value` to a register scalar, or to an element of a register or shared array."""

    target: Var | Element
    value: Expr


@dataclass
class Store:
    """Writes `value` to a global tensor."""

    name: str
    index: Scalar
    value: Expr


@dataclass
class VectorLoad:
    """Loads `width` elements of a global or shared tensor into a register array, from element `at`
    on.

    It is one access if `aligned`. Otherwise the kernel tests the address: one access where it is
    aligned, single elements where it is not.
    """

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
    """Prefetches an element of a global tensor into the cache; a later statement loads it."""

    name: str
    index: Scalar


@dataclass
class Forget:
    """Makes the compiler recompute all values that it has derived from a register array."""

    array: str


@dataclass
class VectorStore:
    """Stores `width` elements of a register array, from element `at` on, to a global or shared
    tensor.
    """

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
    """Combines `value` into an accumulator.

    `kind` is a ReductionOp kind or `welford`. With a `nan_flag`, NaNs are recorded in that variable
    and the accumulator may ignore them.
    """

    target: Var | Element
    value: Expr
    kind: str
    functor: str
    nan_flag: str = ""


@dataclass
class AccumulateBlock:
    """Combines the first `count` elements of a register array into a Welford accumulator."""

    target: Var
    array: str
    count: Scalar


@dataclass
class AccumulateBatch:
    """Combines elements of a register array into a Welford accumulator: those whose bits are set in
    the variable `mask`, or all if `mask` is "". The variable `held` has the accumulator's value
    count.
    """

    target: Var | Element
    array: str
    mask: str
    held: str


@record
class ReducePart:
    """One accumulator of a reduction over threads."""

    name: str
    ctype: str
    functor: str
    identity: Expr


@dataclass
class DrawTicket:
    """Draws the block's ticket, its number among the blocks that have begun, for grid reductions
    over these axes.
    """

    name: str
    begun: str
    grid_axes: tuple[bool, bool, bool]


@dataclass
class ThreadReduce:
    """Combines accumulators (`size` None: scalars) over thread and block axes, all in one exchange.

    - `done` names the flag of a grid reduction. It is true in the block that has the result, which
      the block's `ticket` decides.
    - `same_axes` are the thread axes along which all threads hold the same value after the step
      within the block.
    - With a `cluster` of more than one block, each block receives the result.
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
    """Returns a copy of the value: `fn` maps its indices and conditions, `value` maps its
    scalars."""
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
    """Returns a copy of a statement without a body, rewritten as by `map_expr`."""
    changes: dict[str, object] = {}
    for name in _SCALAR_FIELDS.get(type(statement), ()):
        scalar = getattr(statement, name)
        changes[name] = None if scalar is None else fn(scalar)
    for name in _VALUE_FIELDS.get(type(statement), ()):
        changes[name] = map_expr(getattr(statement, name), fn, value)
    return with_changes(statement, changes) if changes else statement


def with_changes(statement: StatementT, changes: dict[str, object]) -> StatementT:
    """Does the same as `dataclasses.replace` for statements, but faster: it does not inspect each
    field.
    """
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
    """Yields the value and all its subexpressions."""
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
    """Yields every value that a statement reads or writes, with their subexpressions."""
    for name in _VALUE_FIELDS.get(type(statement), ()):
        yield from expr_parts(getattr(statement, name))
