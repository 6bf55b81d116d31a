"""The kernel IR: the result of lowering, from which the source text of a kernel is generated.

The kernel IR is a tree of statements over named scalars, register arrays, shared arrays and global
tensors. Indices and conditions are `Scalar`s over loop indices and sizes; the values of tensor
elements are `Expr`s.
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
    """A kernel argument: the stride, in elements, of the axis at position `axis` of the tensor
    `tv`.

    `axis` does not count reduction axes.
    """

    tv: TensorView
    axis: int


@record
class WorkspaceArg:
    """A kernel argument: the address of the array `LoweredKernel.workspaces[index]`, in which CUDA
    blocks exchange partial results.
    """

    index: int


Arg: TypeAlias = TensorArg | ScalarArg | StrideArg | WorkspaceArg


@record
class Workspace:
    """An array in global memory through which the CUDA blocks of a launch exchange partial results.

    `ctype` is the C type of an element. All bytes are zero before the first launch, and each launch
    leaves all bytes zero, so that no launch must clear the memory first.
    """

    ctype: str
    nbytes: Scalar


@record
class Fold:
    """The numbers of CUDA blocks along x, y and z of a kernel that is launched along x only.

    A device limits the number of blocks along y and z more than along x. The kernel computes its
    block coordinates x, y and z from the block number along x. See
    `fuser/lower/passes/launch_grid.py`.
    """

    counts: tuple[Scalar, Scalar, Scalar]


@record
class LoweredKernel:
    """A kernel before its text is generated: statements, arguments in order, launch shape, and
    conditions that a launch must satisfy.

    - `tensors`, `workspaces`, `scalars`: the global tensors, the zeroed arrays through which CUDA
      blocks exchange values, and the numbers that the kernel uses. `body` uses the names in
      `scalars`.
    - `args`: the arguments for `tensors`, then for `workspaces`, then for `scalars`.
    - `grid`, `block`: the numbers of CUDA blocks, and of threads per block, along x, y and z.
    - `threads`: the number of threads of a block.
    - `guards`: conditions over sizes and strides (`stride_symbol`) that must hold for a launch.
    - `alignments`: pairs (tensor, bytes). The tensor's address must be a multiple of the bytes.
    - `min_blocks`: the number of CUDA blocks that must fit on a multiprocessor at the same time.
      The compiler limits the registers per thread accordingly; 0 sets no limit.
    - `goes_backwards`: whether the CUDA blocks process the elements of the tensors from the last to
      the first.
    - `cluster`: the number of CUDA blocks that form a cluster, or 1 without clusters.
    - `parts`: the kernels that a horizontally fused launch contains. If there are any, `body` is
      empty.
    - `fold`: the numbers of blocks along x, y and z, if all blocks are numbered along x; otherwise
      None. If a device accepts fewer blocks than there are, each launched block does the work of
      several, one after another.
    - `limits`: the guards that compare a launch with the maximum numbers of the device. Empty if
      there is a `fold`, because such a kernel never needs more CUDA blocks than the device accepts.
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
        """Whether the threads of a CUDA block wait for one another or use shared memory."""
        return self.needs_smem or any(isinstance(s, Sync | ThreadReduce) for s in walk(self.body))


@record
class KernelPart:
    """One of the kernels that share a launch (horizontal fusion). The CUDA blocks of the launch are
    numbered along x.

    - `first`: the name of the kernel parameter with the number of this kernel's first CUDA block.
      For the first kernel, whose blocks begin at 0, `first` is "".
    - `across`: the name of the parameter with this kernel's number of blocks along x. Blocks are
      numbered along x first, then y. If the kernel has one block along y, `across` is "".
    - `renamed`: maps scalars of this kernel to the names of their parameters in the launch. A
      scalar without an entry keeps its name.
    """

    kernel: LoweredKernel
    first: str
    across: str
    renamed: Mapping[Symbol, str]


def stride_symbol(tv: TensorView, axis: int) -> Symbol:
    """Returns the symbol for the stride of the non-contiguous axis `axis` of `tv`, such as
    `T0_s1`.
    """
    return Symbol(f"T{tv.number}_s{axis}", DataType.Index, lo=0)


# ------------------------------------------------------------------ values
@record
class Var:
    """The value of a scalar variable of the kernel, or of a field of a struct variable
    (`T5.avg`).
    """

    name: str
    dtype: DataType


@record
class Element:
    """The value `name[index]` of an array in registers, or in shared memory if `shared` is set.

    If the elements are structs, `member` names the field; otherwise it is "".
    """

    name: str
    index: Scalar
    dtype: DataType
    member: str = ""
    shared: bool = False


@record
class GlobalLoad:
    """The value `name[index]` of a tensor in global memory; zero where the condition `guard` is
    false, because nothing is loaded there.
    """

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
    """The value `arg` converted to `dtype`, rounded to the nearest value, ties to even."""

    arg: Expr
    dtype: DataType


@record
class Compute:
    """The C expression `template`, in which the texts of `args` replace the placeholders `{0}`,
    `{1}`, ...

    `dtype` is the dtype of the result.
    """

    template: str
    args: tuple[Expr, ...]
    dtype: DataType


@record
class Select:
    """The C expression `cond ? a : b`, where `cond` is a condition over indices."""

    cond: Scalar
    a: Expr
    b: Expr
    dtype: DataType


Expr: TypeAlias = Var | Element | GlobalLoad | ScalarValue | Convert | Compute | Select


def convert(value: Expr, dtype: DataType) -> Expr:
    """Returns `value` converted to `dtype`.

    Between Index and Int nothing is converted, because both have the same type in registers.
    """
    same = {DataType.Index: DataType.Int}
    if same.get(value.dtype, value.dtype) is same.get(dtype, dtype):
        return value
    if isinstance(value, ScalarValue) and _is_exact(value):
        return ScalarValue(value.scalar, dtype)
    return Convert(value, dtype)


def _is_exact(value: ScalarValue) -> bool:
    """Whether the dtype of `value` represents its scalar without rounding.

    If so, `convert` gives the scalar the wanted dtype directly, and the kernel needs no conversion.
    """
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
    """A sequence of statements, which is also the C scope of the names defined in the sequence."""

    statements: list[Statement] = field(default_factory=list)


@dataclass
class For:
    """A loop over `symbol` from 0 to `extent - 1`, or in the opposite order if `backward` is set.

    `pragma` is the C macro before the loop in the kernel's text, or "" for no macro. `unroll`
    says that the compiler must unroll the loop.
    """

    symbol: Symbol
    extent: Scalar
    body: Body
    unroll: bool = False
    pragma: str = ""
    backward: bool = False


@dataclass
class If:
    """Runs `then` if `cond` holds and all C variables in `flags` are true; runs `otherwise` (if
    there is one) in other cases.
    """

    cond: Scalar
    then: Body
    otherwise: Body | None = None
    flags: tuple[str, ...] = ()


@dataclass
class Unswitch:
    """A body that is emitted twice: without bounds checks, and with bounds checks.

    The kernel runs the first version if all elements of the body are inside the tensors.
    `expand_unswitch` replaces this statement by an `If` with both versions.
    """

    body: Body


@dataclass
class Let:
    """The statement `const nvfuser_index_t symbol = value`, where `value` is an index."""

    symbol: Symbol
    value: Scalar


@dataclass
class LetValue:
    """The statement `const T symbol = value`, which gives a symbol to a value that the kernel
    loads. Index expressions can contain symbols, but no loaded values.
    """

    symbol: Symbol
    value: Expr


@dataclass
class Define:
    """The statement `const T name = value`, where `value` is an element of a tensor."""

    name: str
    dtype: DataType
    value: Expr


@dataclass
class Declare:
    """Declares a register variable or array whose elements have C type `ctype`.

    - `size`: the number of elements of an array, or None for a scalar variable.
    - `init`: the initial value of all elements, or None if the elements are not initialised.
    """

    name: str
    ctype: str
    size: int | None
    init: Expr | None = None


@dataclass
class DeclareShared:
    """Declares an array in shared memory with `count` elements.

    The array begins `offset` bytes after the start of the CUDA block's shared memory.
    """

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
    """Writes `value` to the element at `index` of the global tensor `name`."""

    name: str
    index: Scalar
    value: Expr


@dataclass
class VectorLoad:
    """Loads `width` elements of a global or shared tensor into a register array.

    The elements from `index` on of the tensor `name` are written to `array` from element `at` on.
    If `aligned` is set, this is one memory access. Otherwise the kernel tests the address: an
    aligned address takes one access, another address one access per element.
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
    """Moves an element of a global tensor into the cache. The later statement that loads the
    element then waits less.
    """

    name: str
    index: Scalar


@dataclass
class Forget:
    """Tells the compiler that the register array `array` may have changed, although it has not. The
    compiler then computes all values derived from the array again.

    Without this statement, the compiler would keep the derived values in registers beside the
    array, and the registers do not suffice for both.
    """

    array: str


@dataclass
class VectorStore:
    """Stores `width` elements of a register array to a global or shared tensor.

    The elements from `at` on of `array` are written to the tensor `name` from element `index` on.
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
    """Adds `value` to the accumulator `target`, by the operation of a reduction.

    - `kind`: the kind of the reduction (such as `add` or `max`), or `welford` for mean and
      variance.
    - `functor`: the C type that combines two values.
    - `nan_flag`: the C variable that records whether a value was NaN, or "" for no such variable.
      With the variable, the accumulator itself may ignore NaNs.
    """

    target: Var | Element
    value: Expr
    kind: str
    functor: str
    nan_flag: str = ""


@dataclass
class AccumulateBlock:
    """Adds the first `count` elements of a register array to a Welford accumulator (for mean and
    variance).
    """

    target: Var
    array: str
    count: Scalar


@dataclass
class AccumulateBatch:
    """Adds elements of a register array to a Welford accumulator (for mean and variance), with one
    division for all of them.

    - `mask`: the C variable whose set bits select the elements, or "" for all elements.
    - `held`: the C variable with the number of values that the accumulator holds already.
    """

    target: Var | Element
    array: str
    mask: str
    held: str


@record
class ReducePart:
    """One of the accumulators that a `ThreadReduce` statement combines over threads.

    `functor` is the C type that combines two values. `identity` is the neutral value of the
    reduction, such as 0 for a sum.
    """

    name: str
    ctype: str
    functor: str
    identity: Expr


@dataclass
class DrawTicket:
    """Takes the ticket of a CUDA block, which is its number among the blocks that have begun so
    far.

    Reductions over CUDA blocks use the ticket to decide which block gets the result. `grid_axes`
    says along which of x, y and z they combine blocks. `name` is the C variable for the ticket,
    `begun` the array in global memory that counts the blocks.
    """

    name: str
    begun: str
    grid_axes: tuple[bool, bool, bool]


@dataclass
class ThreadReduce:
    """Combines accumulators over threads and CUDA blocks, all accumulators in one exchange.

    - `parts`: the accumulators.
    - `size`: the number of elements of each accumulator array, or None if accumulators are scalars.
    - `thread_axes`, `grid_axes`: whether to combine along x, y and z, over threads and over blocks.
    - `same_axes`: for each of x, y and z, whether threads of a block that differ only in this
      coordinate hold the same value, once the block has combined the values of its threads.
    - `packets`, `packets_offset`: the array in global memory through which blocks exchange values,
      and the position in the array that this statement uses.
    - `ticket`: the C variable with the block's number in the order in which blocks begin. This
      number decides which block has the result.
    - `done`: the C variable that is true in the block that has the result.
    - `cluster`: the number of blocks in a cluster. In a cluster of several blocks, each block
      receives the result.
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
    """A barrier for all threads of a CUDA block."""


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
    """Returns a copy of `expr` in which scalars have been replaced.

    `fn` returns the replacement of an index or condition. `value` returns the replacement of an
    operand that is a `ScalarValue`.
    """
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
    """Returns a copy of a statement, with its scalars replaced as by `map_expr`.

    The statement must not contain other statements; a loop, for example, is not allowed.
    """
    changes: dict[str, object] = {}
    for name in _SCALAR_FIELDS.get(type(statement), ()):
        scalar = getattr(statement, name)
        changes[name] = None if scalar is None else fn(scalar)
    for name in _VALUE_FIELDS.get(type(statement), ()):
        changes[name] = map_expr(getattr(statement, name), fn, value)
    return with_changes(statement, changes) if changes else statement


def with_changes(statement: StatementT, changes: dict[str, object]) -> StatementT:
    """Returns a copy of a statement with some fields changed.

    The result equals that of `dataclasses.replace`, which is slower, because it inspects each
    field.
    """
    made = object.__new__(type(statement))
    made.__dict__.update(statement.__dict__, **changes)
    return made


def bodies(statement: Statement) -> tuple[Body, ...]:
    """Returns the bodies (lists of statements) directly inside a statement: that of a loop, or both
    branches of an `If`.
    """
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
    """Yields every statement of a body and of all nested bodies, outer statements before inner
    ones.
    """
    for statement in body.statements:
        yield statement
        for inner in bodies(statement):
            yield from walk(inner)


def expr_parts(expr: Expr) -> Iterator[Expr]:
    """Yields an expression and all its subexpressions."""
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
    """Yields every expression that a statement reads or writes, and all parts of these
    expressions.
    """
    for name in _VALUE_FIELDS.get(type(statement), ()):
        yield from expr_parts(getattr(statement, name))
