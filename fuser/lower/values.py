"""Builds the expression of one element of a tensor, starting from the op that reads it.

`ValueBuilder.value` follows operands up to tensors that are stored (fusion inputs and buffers). On
the way, it defines one scalar variable per op. A scope caches values per (tensor, index, guard), so
that an element that several ops read is computed once.

`_BY_OP` has a function for each kind of op that computes. Copies and views only change the index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias, TypeGuard

from fuser.ir.dtypes import HALF_LIKE, DataType, category, is_inexact
from fuser.ir.fusion import TensorOp, TensorView
from fuser.ir.ops.lookup import (
    EmbeddingFwdOp,
    GatherOp,
    IndexSelectOp,
    LookupOp,
    SelectOp,
    TakeAlongAxisOp,
)
from fuser.ir.ops.nodes import (
    BinaryOp,
    CastOp,
    CatOp,
    FullOp,
    IotaOp,
    PadOp,
    RandomOp,
    TernaryOp,
    UnaryOp,
)
from fuser.ir.pointwise_table import POINTWISE
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Const, Scalar, Symbol
from fuser.ir.scalar.simplify import interval
from fuser.lower.buffers import Buffer
from fuser.lower.context import Context, Index, inside_pad
from fuser.lower.kernel_ir import (
    INT32_LIMIT,
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
    convert,
    values_of,
    walk,
)
from fuser.lower.loop_tree import COORDINATES, Stage
from fuser.lower.vector_access import terms_of
from fuser.ops.factories import key_of
from fuser.ops.reduction_table import compute_dtype, computed_in, missing
from fuser.ops.reference.meaning import nodes_computed
from fuser.support.errors import UnsupportedError
from fuser.support.record import record

# ----------------------------------------------------------------------
# Lookups: the kernel itself loads the index at which it reads the table.
#
#     t1 = T1[tx];  in1 = fm_is_row(t1, n);  j1 = in1 ? t1 : 0;  t2 = in1 ? T0[j1 * w + k] : NaN
#
# `in1` and `j1` are symbols like loop indices, so addresses and conditions can contain them. No
# memory is read for an index outside of the table.

TRUE = sc.const(True)
# The ops that `looked_up` evaluates.
LOOKUPS = (SelectOp, IndexSelectOp, EmbeddingFwdOp, TakeAlongAxisOp, GatherOp)


def looked_up(build: ValueBuilder, op: TensorOp, at: At) -> Expr:
    """Returns the expression of one element of a lookup's result: the kernel first loads an index,
    and then reads the table at this index.

    `op` is the lookup, and `at` describes the element. For an index outside of the table, the value
    is `missing(dtype)` (NaN for a floating-point dtype).
    """
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
    # Along these axes the index may be shorter than the table. Binding checks the inputs for it.
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
    """Returns two symbols for the index that a lookup has loaded: one says whether this index is
    inside the table, the other is the index itself.

    Symbols are needed because conditions and addresses cannot contain loaded values. Statements
    that define the symbols are appended to the scope in `at`. `place` is the loaded index and
    `extent` the size of the table axis. For an index outside of the table, the second symbol is 0,
    which is a legal index.
    """
    mark = build.mark(op.out)
    is_inside = Symbol(f"in{mark}", DataType.Bool, lo=0, hi=1)
    row = sc.index(f"j{mark}", extent)
    # All 64 bits are compared, although the kernel's index type may have 32.
    arguments = place, ScalarValue(extent, DataType.Int)
    test: Expr = Compute("fm_is_row({0}, {1})", arguments, DataType.Bool)
    if at.guard != TRUE:
        # Outside of the guard the loaded index is arbitrary, and must not be reported as an error.
        test = Select(at.guard, test, ScalarValue(sc.const(False), DataType.Bool), DataType.Bool)
    none = ScalarValue(sc.ZERO, DataType.Index)
    found = Select(is_inside, place, none, DataType.Index)
    at.scope.body.statements += [LetValue(is_inside, test), LetValue(row, found)]
    return is_inside, row


# ------------------------------------------------------------------ out of loops
def lift_lookup_indices(body: Body) -> None:
    """Moves the computation of a lookup index out of a loop, to a place before the loop, if no
    iteration changes the index. The body is changed in place.

    Table reads inside the loop can then become vector loads, and no iteration has to load a lookup
    index first.
    """
    made: list[Statement] = []
    for statement in body.statements:
        for inner in bodies(statement):
            lift_lookup_indices(inner)
        if isinstance(statement, For):
            made += _lifted(statement)
        made.append(statement)
    body.statements = made


def _lifted(loop: For) -> list[Statement]:
    """Removes from a loop the definitions of lookup indices that no iteration changes, and returns
    the removed statements in order.

    Definitions from which such an index is computed are removed, too.
    """
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
    """Returns the names of all variables that an iteration of the loop defines or writes.
    Statements that read them cannot be moved out of the loop, to a place before it.
    """
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
    """Returns the name of the variable to which a name in an expression refers: `r1` for the field
    `r1.mean`.
    """
    return name.partition(".")[0]


def _wanted(statements: list[Statement]) -> set[str]:
    """Returns the names of the lookup indices that `statements` define, and of all variables from
    which these are computed.
    """
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
    """Returns the names of all variables and tensors in the value of a definition."""
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


# ----------------------------------------------------------------------
# Values: builds the expression of one element of a tensor for its reader.

# Number of consecutive random elements that share the generator's output, at most
# (`codegen/rt_random.h`).
RANDOM_BLOCK = 4
Axes: TypeAlias = Mapping[int, Scalar]
Key: TypeAlias = tuple[TensorView, Index, Scalar]


class Scope:
    """A list of statements (`body`), with a cache of the values that these statements may use.

    The statements may also use the values of `parent`, the scope around this one.
    """

    def __init__(self, body: Body, parent: Scope | None = None) -> None:
        self.body = body
        self.parent = parent
        self._values: dict[Key, Expr] = {}

    def find(self, key: Key) -> Expr | None:
        """Returns the cached expression for `key` in this scope or a surrounding one, or None.

        A key is (tensor, index, guard); the guard is the condition under which the value may be
        loaded.
        """
        scope: Scope | None = self
        while scope is not None:
            if (value := scope._values.get(key)) is not None:
                return value
            scope = scope.parent
        return None

    def root(self) -> Body:
        """Returns the body of the outermost scope, which is the body of the whole kernel."""
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope.body

    def remember(self, key: Key, value: Expr) -> None:
        """Caches the expression of a value in this scope.

        A key is (tensor, index, guard); the guard is the condition under which the value may be
        loaded.
        """
        self._values[key] = value


@record
class At:
    """The element of a tensor for which a function such as `_pointwise` builds the expression, and
    the code that reads the element.

    - `out` is the tensor. `index` is the element's index along the axes that the user sees, and
      `axes` has its index along every axis, by axis number (id).
    - `stage` reads the element, and `scope` receives the statements that compute it.
    - `guard` is the condition under which memory may be read.
    """

    stage: Stage
    scope: Scope
    guard: Scalar
    out: TensorView
    axes: Axes
    index: Index


# Recursion limit: after this many ops, the value reached is built first. Long chains then need
# little of Python's stack.
MAX_DEPTH = 50
Request: TypeAlias = tuple[TensorView, Index, Stage, Scope, Scalar]


class _TooDeepError(Exception):
    """Raised if the recursion from ops to their operands becomes too deep for Python's stack.

    `request` describes the value that must be built first. Once it is cached, the values that
    depend on it need less depth.
    """

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.request = request


class ValueBuilder:
    """Builds the expressions of the values that stages (ops whose results are stored) read.

    The statements that an expression needs, such as definitions of variables, are appended to a
    scope.
    """

    def __init__(self, ctx: Context, buffers: dict[Stage, Buffer]) -> None:
        self.ctx = ctx
        self.buffers = buffers
        self._names: dict[int, int] = {}
        self._random: set[TensorView] = set()
        self._depth = 0

    def value(
        self, tv: TensorView, index: Index, *, stage: Stage, scope: Scope, guard: Scalar = TRUE
    ) -> Expr:
        """Returns the expression of the element of `tv` at `index`, which `stage` reads. `index`
        has one entry per axis that the user sees.

        The statements that compute the value are appended to `scope`. Where `guard` is false,
        nothing is loaded from global memory and the value is arbitrary.
        """
        known = scope.find((tv, index, guard))
        if known is not None:
            return known
        request = (tv, index, stage, scope, guard)
        if self._depth:
            return self._known(request)
        todo: list[Request] = [request]
        while True:
            try:
                known = self._known(todo[-1])
            except _TooDeepError as deep:
                todo.append(deep.request)
                continue
            todo.pop()
            if not todo:
                return known

    def _known(self, request: Request) -> Expr:
        """Builds the expression that `request` describes, and caches it in the scope of the
        request.
        """
        if self._depth == MAX_DEPTH:
            raise _TooDeepError(request)
        tv, index, stage, scope, guard = request
        self._depth += 1
        try:
            made = self._make(tv, index, stage, scope, guard)
        finally:
            self._depth -= 1
        scope.remember((tv, index, guard), made)
        return made

    def operand(
        self,
        op: TensorOp,
        position: int,
        dtype: DataType | None,
        at: At,
    ) -> Expr:
        """Returns the expression of an operand of `op`, converted to `dtype`.

        `position` is the number of the operand, and `at` the element of the result that is
        computed. If `dtype` is None, the operand is not converted.
        """
        operand = op.inputs[position]
        if isinstance(operand, Scalar):
            scalar = self.ctx.nesting.fusion.canonical(operand)
            return ScalarValue(scalar, dtype if dtype is not None else operand.dtype)
        index = self.ctx.indexer.operand_index(op, position, at.out, at.axes)
        value = self.value(operand, index, stage=at.stage, scope=at.scope, guard=at.guard)
        return value if dtype is None else convert(value, dtype)

    def define(self, tv: TensorView, value: Expr, scope: Scope) -> Var:
        """Appends to `scope` the definition of a new C variable with `value`, and returns the
        variable.

        `tv` is the tensor of which the value is an element. The variable is called `t5` for tensor
        5, and `t5_1` for the next element of this tensor.
        """
        name = f"t{self.mark(tv)}"
        scope.body.statements.append(Define(name, value.dtype, value))
        return Var(name, value.dtype)

    def mark(self, tv: TensorView) -> str:
        """Returns a suffix for the names of C variables that belong to `tv`. It is new at each
        call: `5`, `5_1`, `5_2`.
        """
        count = self._names.get(tv.number, 0)
        self._names[tv.number] = count + 1
        return f"{tv.number}_{count}" if count else str(tv.number)

    def random_state(self, tv: TensorView, scope: Scope) -> str:
        """Returns the name of the C variable with the random generator's state for the elements of
        `tv`.

        The first call for a tensor declares the variable at the start of the kernel.
        """
        name = f"r{tv.number}"
        if tv not in self._random:
            self._random.add(tv)
            scope.root().statements.insert(0, Declare(name, "FuserRandom", None))
        return name

    def _make(
        self, tv: TensorView, index: Index, stage: Stage, scope: Scope, guard: Scalar
    ) -> Expr:
        source = self.ctx.nesting.stage_of.get(tv)
        if source is not None and source.storage != "global":
            buffer = self.buffers[source]
            element = buffer.read(self.ctx, tv, index, reader=stage, guard=guard)
            # Registers have names already. A shared element is read once, for all its readers.
            return self.define(tv, element, scope) if buffer.is_shared else element
        op = self.ctx.nesting.fusion.definition(tv)
        if op is None:
            if tv.is_cpu_scalar:
                raise UnsupportedError(
                    f"{tv} is a CPU scalar tensor, which kernels do not accept as an input: define "
                    "a scalar, or a tensor on the device"
                )
            offset = self.ctx.simplify(self.ctx.indexer.offset(tv, index))
            load = GlobalLoad(f"T{tv.number}", offset, tv.dtype(), guard)
            return self.define(tv, load, scope)
        axes = self.ctx.indexer.tensor_axes(tv, index)
        return self.compute(op, tv, At(stage, scope, guard, tv, axes, index))

    def compute(self, op: TensorOp, out: TensorView, at: At) -> Expr:
        """Returns the expression that computes one element of `out`, which is a result of `op`.

        `at` describes the element. The statements that compute it are appended to the scope in
        `at`.
        """
        if isinstance(op, _VIEWS):
            return self.operand(op, 0, None, at)
        rule = _BY_OP.get(type(op))
        if rule is None:
            raise UnsupportedError(
                f"no generated kernel can compute the op {op.name}, which defines {out}: use "
                "execute(), which runs this op by a library or in the host program"
            )
        value = rule(self, op, at)
        if isinstance(value, Var | ScalarValue):
            return value
        return self.define(out, value, at.scope)


# ------------------------------------------------------------------ one rule per op


def _pointwise(build: ValueBuilder, op: TensorOp, at: At) -> Expr:
    row = POINTWISE[op.name]
    dtype = compute_dtype(op)
    types = [dtype] * row.arity
    if op.name == "where":
        types[0] = DataType.Bool
    args = tuple(build.operand(op, k, t, at) for k, t in enumerate(types))
    out = at.out.dtype()
    if op.name in _IS_AT and dtype is DataType.Int and not build.ctx.is_cpu:
        for x, place in (args, args[::-1]):
            if _is_place(place) and not isinstance(x, ScalarValue):
                return _compare_place(_IS_AT[op.name], x, place.scalar, out)
    # Comparisons, the parts of complex numbers and ops that build complex numbers compute in the
    # result's dtype.
    computed = dtype if category(out) == category(dtype) else out
    text = row.cuda if row.cuda_int is None or is_inexact(dtype) else row.cuda_int
    return convert(Compute(text, args, computed), out)


# C templates that compare a 64-bit value with an index.
_IS_AT = {"eq": "fm_is_at({0}, {1}, {2})", "ne": "!fm_is_at({0}, {1}, {2})"}
_PLACES = frozenset(COORDINATES.values())


def _is_place(x: Expr) -> TypeGuard[ScalarValue]:
    return isinstance(x, ScalarValue) and any(s.is_index for s in sc.symbols(x.scalar))


def _compare_place(template: str, x: Expr, place: Scalar, out: DataType) -> Expr:
    """Returns the expression, of dtype `out`, that compares a 64-bit value `x` with `place`, an
    index expression such as the position of an element along an axis.

    `template` is the C text of the comparison. The index is passed to it as a 64-bit base and a
    32-bit offset, because an addition of 32 bits is cheaper. The offset consists of the terms of
    the index that change in the thread's own loops and fit in 32 bits.
    """
    step = sc.ZERO
    for factors, count in terms_of(place):
        term = sc.mul(count, sc.product(factors))
        is_own = all(isinstance(f, Symbol) and f.is_index for f in factors)
        if is_own and not any(f.name in _PLACES for f in sc.symbols(term)):
            longer = sc.add(step, term)
            least, most = interval(longer)
            step = longer if least >= 0 and most <= INT32_LIMIT else step
    base = ScalarValue(sc.sub(place, step), DataType.Int)
    made = Compute(template, (x, base, ScalarValue(step, DataType.Int32)), DataType.Bool)
    return convert(made, out)


def _cast(build: ValueBuilder, op: TensorOp, at: At) -> Expr:
    return build.operand(op, 0, at.out.dtype(), at)


def _full(build: ValueBuilder, op: TensorOp, at: At) -> Expr:
    assert isinstance(op, FullOp)
    return ScalarValue(build.ctx.nesting.fusion.canonical(op.value), at.out.dtype())


def _iota(build: ValueBuilder, op: TensorOp, at: At) -> Expr:
    assert isinstance(op, IotaOp)
    dtype = DataType.Float if at.out.dtype() in HALF_LIKE else at.out.dtype()
    canonical = build.ctx.nesting.fusion.canonical
    place = build.ctx.simplify(at.index[0])
    start, step = (sc.int_value(canonical(x)) for x in (op.start, op.step))
    if (start, step) == (0, 1) and dtype in (DataType.Int, DataType.Index):
        return ScalarValue(place, dtype)
    args = (
        ScalarValue(canonical(op.start), dtype),
        ScalarValue(place, dtype),
        ScalarValue(canonical(op.step), dtype),
    )
    return convert(Compute("{0} + {1} * {2}", args, dtype), at.out.dtype())


def _random(build: ValueBuilder, op: TensorOp, at: At) -> Expr:
    assert isinstance(op, RandomOp)
    canonical = build.ctx.nesting.fusion.canonical
    place: Scalar = sc.ZERO
    for k, extent in enumerate(op.shape):
        first = canonical(op.begin[k]) if op.begin else sc.ZERO
        place = sc.add(sc.mul(place, canonical(extent)), sc.add(first, at.index[k]))
    numbers = (*map(canonical, key_of(op)), *_whole_blocks(build.ctx.simplify(place)))
    ends = () if op.a is None or op.b is None else (canonical(op.a), canonical(op.b))
    real = computed_in(at.out.dtype())
    args = (
        *(ScalarValue(x, DataType.Int) for x in numbers),
        *(ScalarValue(x, real) for x in ends),
    )
    places = ", ".join(f"{{{k}}}" for k in range(len(args)))
    state = build.random_state(op.out, at.scope)
    return Compute(f"fm_{op.kind}<{{t}}>({state}, {places})", args, at.out.dtype())


def _whole_blocks(place: Scalar) -> tuple[Scalar, Scalar]:
    """Splits the position of an element in a random tensor into two parts: a multiple of
    `RANDOM_BLOCK`, and a remainder.

    One output of the random generator serves `RANDOM_BLOCK` neighbouring elements. With the split,
    the compiler can see which elements share an output, so that it is computed once. If the
    remainder might be negative, the parts are 0 and the whole position.
    """
    left = sc.ZERO
    for factors, count in terms_of(place):
        if not factors or count % RANDOM_BLOCK:
            left = sc.add(left, sc.mul(count, sc.product(factors)))
    return (sc.sub(place, left), left) if interval(left)[0] >= 0 else (sc.ZERO, place)


def _pad(build: ValueBuilder, op: TensorOp, at: At) -> Expr:
    assert isinstance(op, PadOp)
    inside, value = _padded_operand(build, op, at)
    dtype = at.out.dtype()
    filler = ScalarValue(build.ctx.nesting.fusion.canonical(op.value), dtype)
    return value if inside == TRUE else Select(inside, value, filler, dtype)


def _padded_operand(build: ValueBuilder, op: PadOp, at: At) -> tuple[Scalar, Expr]:
    """Returns the condition that an element of a padded tensor is not padding, and the expression
    of the operand's value where the condition holds.
    """
    index = build.ctx.indexer.operand_index(op, 0, at.out, at.axes)
    # The root index: the operand's own index is 0 along a broadcast axis, even if that axis is
    # padded.
    root = tuple(at.axes[a.number] for a in at.out.domain.maybe_root)
    inside = inside_pad(build.ctx, op, root)
    guard = sc.logical_and(at.guard, inside)
    return inside, build.value(op.inp, index, stage=at.stage, scope=at.scope, guard=guard)


def _cat(build: ValueBuilder, op: TensorOp, at: At) -> Expr:
    assert isinstance(op, CatOp)
    dtype = at.out.dtype()
    choices = [_piece(build, op, k, at) for k in range(len(op.pieces))]
    result = convert(choices[-1][1], dtype)
    for inside, value in reversed(choices[:-1]):
        result = Select(inside, convert(value, dtype), result, dtype)
    return result


def _piece(build: ValueBuilder, op: CatOp, k: int, at: At) -> tuple[Scalar, Expr]:
    """Returns the condition under which an element of a concatenation belongs to its operand number
    `k`, and the element's value where the condition holds.

    An operand is usually the result of a pad, which enlarges the tensor that the user passed to the
    size of the concatenation. If so, the condition is that the element is not padding, and the
    value is read from the user's tensor.
    """
    piece = op.pieces[k]
    definition = build.ctx.nesting.fusion.definition(piece)
    if isinstance(definition, PadOp) and piece not in build.ctx.nesting.stage_of:
        index = build.ctx.indexer.operand_index(op, k, at.out, at.axes)
        axes = build.ctx.indexer.tensor_axes(piece, index)
        inner = At(at.stage, at.scope, at.guard, piece, axes, index)
        return _padded_operand(build, definition, inner)
    canonical, simplify = build.ctx.nesting.fusion.canonical, build.ctx.simplify
    i = simplify(at.index[op.dim])
    start = canonical(op.ends[k - 1]) if k else sc.ZERO
    inside = sc.logical_and(sc.le(start, i), sc.lt(i, simplify(canonical(op.ends[k]))))
    guarded = At(at.stage, at.scope, sc.logical_and(at.guard, inside), at.out, at.axes, at.index)
    return inside, build.operand(op, k, None, guarded)


_VIEWS = nodes_computed("index")
_BY_OP: dict[type[TensorOp], Callable[[ValueBuilder, TensorOp, At], Expr]] = {
    UnaryOp: _pointwise,
    BinaryOp: _pointwise,
    TernaryOp: _pointwise,
    CastOp: _cast,
    FullOp: _full,
    IotaOp: _iota,
    RandomOp: _random,
    PadOp: _pad,
    CatOp: _cat,
    **dict.fromkeys(LOOKUPS, looked_up),
}
