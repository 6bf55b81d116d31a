"""Buffers: the storage of stages, and how readers find their elements.

A local buffer holds the loops inside its depth that are not spread over threads; its readers must
read exactly what the same thread wrote, which the equality of the two index expressions proves. A
shared buffer is addressed by the logical index, so that any thread of the block may read any
element.
"""

from __future__ import annotations

from dataclasses import dataclass

from fuser.ir.dtypes import HALF_LIKE, DataType, c_type, nbytes_of
from fuser.ir.fusion import TensorView
from fuser.ir.ops.nodes import ReductionOp, WelfordOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Apply, Scalar, Symbol
from fuser.ir.types import GRID_TYPES
from fuser.lower.context import Context, Index
from fuser.lower.kernel_ir import Compute, Element, Expr, ScalarValue, Select, Var, convert
from fuser.lower.loop_tree import Loop, Stage
from fuser.support.errors import DefinitionError

# Shared tensors start at multiples of this many bytes.
SHARED_ALIGNMENT = 128
# The type of indices, which every kernel defines.
INDEX_CTYPE = "nvfuser_index_t"


def accumulator_dtype(stage: Stage) -> DataType:
    """Returns the dtype in which a reduction accumulates: half-like ones in Float."""
    assert isinstance(stage.op, ReductionOp | WelfordOp)
    dtype = stage.op.inp.dtype() if isinstance(stage.op, WelfordOp) else stage.tv.dtype()
    return DataType.Float if dtype in HALF_LIKE else dtype


def welford_ctype(dtype: DataType, name: str = "Welford") -> str:
    """Returns the C type of a Welford accumulator. It counts in the index type of the kernel, which
    has room for all iterations."""
    return f"{name}<{c_type(dtype)}, {INDEX_CTYPE}>"


def no_values(dtype: DataType) -> Expr:
    """Returns a Welford accumulator that holds nothing."""
    return Compute(welford_ctype(dtype) + "{{0, 0, 0, 0}}", (), dtype)


@dataclass
class Buffer:
    """Storage of one stage. `loops` index it, outer to inner; `size` None is a plain scalar.

    `ctype` is the element's C type. `offset` is the place of a shared buffer in bytes.
    """

    stage: Stage
    name: str
    dtype: DataType
    ctype: str
    loops: list[Loop]
    size: int | None = None
    axes: list[tuple[int, Scalar]] | None = None
    count: Scalar = sc.ONE
    offset: Scalar = sc.ZERO

    @property
    def is_shared(self) -> bool:
        return self.stage.storage == "shared"

    @property
    def nbytes(self) -> Scalar:
        return sc.mul(self.count, nbytes_of(self.dtype))

    # ------------------------------------------------------------ addressing
    def own_index(self) -> Scalar:
        """Returns the element that the stage itself writes in one iteration."""
        if self.axes is not None:
            raise AssertionError("a shared buffer is addressed by its logical index")
        return self.index_at({})

    def index_at(self, symbols: dict[Scalar, Scalar]) -> Scalar:
        """Returns the element at the given values of the buffer's loop symbols."""
        total: Scalar = sc.ZERO
        for loop in self.loops:
            at = symbols.get(loop.symbol, loop.symbol)
            total = sc.add(sc.mul(total, loop.extent), at)
        return total

    def element(self, index: Scalar, tv: TensorView) -> Var | Element:
        """Returns the element as a value; a Welford result is a field of it."""
        member = _member(self.stage, tv)
        if self.size is None and not self.is_shared:
            return Var(self.name + (f".{member}" if member else ""), self.value_dtype(tv))
        return Element(self.name, index, self.value_dtype(tv), member, self.is_shared)

    def value_dtype(self, tv: TensorView) -> DataType:
        """Returns the dtype of what is stored for `tv`: a Welford count is an Int."""
        if isinstance(self.stage.op, WelfordOp) and tv is self.stage.op.n:
            return DataType.Int
        return self.dtype

    def read(
        self, ctx: Context, tv: TensorView, index: Index, *, reader: Stage, guard: Scalar
    ) -> Expr:
        """Returns the element of `tv` at a logical index, as `reader` sees it.

        Where `guard` is false the index may be outside of the buffer: nothing is read there.
        """
        candidate = None if self.is_shared else self._own_element(ctx, index, reader)
        if candidate is not None:
            return convert(self.element(candidate, tv), tv.dtype())
        at = (
            self.shared_index(ctx, index)
            if self.is_shared
            else self._traced_index(ctx, index, reader)
        )
        element = self.element(at, tv)
        if guard == sc.const(True):
            return convert(element, tv.dtype())
        nothing = ScalarValue(sc.ZERO, element.dtype)
        return convert(Select(guard, element, nothing, element.dtype), tv.dtype())

    def shared_index(self, ctx: Context, index: Index) -> Scalar:
        assert self.axes is not None
        known = ctx.indexer.forward(self.stage.tv, index)
        total: Scalar = sc.ZERO
        for number, size in self.axes:
            total = sc.add(sc.mul(total, size), known[number])
        return ctx.simplify(total)

    def _own_element(self, ctx: Context, index: Index, reader: Stage) -> Scalar | None:
        """Returns the register that this iteration of the reader corresponds to, if it holds
        `index`: the reader's loops are the buffer's, one for one."""
        for candidate in self._paired(reader):
            written = tuple(
                ctx.simplify(sc.substitute(i, candidate))
                for i in ctx.indexer.stage_index(self.stage)
            )
            if written == tuple(ctx.simplify(i) for i in index):
                return self.index_at(candidate)
        return None

    def _traced_index(self, ctx: Context, index: Index, reader: Stage) -> Scalar:
        """Returns the register that holds a logical index, by following it to the stage's loops.

        An index that divides would address registers at run time: such a value is computed again by
        the reader, as is one that another thread or iteration holds.
        """
        symbols = self._traced(ctx, index)
        if symbols is not None and not any(map(_divides, symbols.values())):
            return self.index_at(symbols)
        if self.stage.storage == "local":
            ctx.assumptions.recompute(self.stage.tv)
        if symbols is not None:
            return self.index_at(symbols)
        raise DefinitionError(
            f"{reader.tv} reads other elements of {self.stage.tv} than its thread holds"
        )

    def _paired(self, reader: Stage) -> list[dict[Scalar, Scalar]]:
        """Pairs the buffer's loops with the reader's own serial loops, position by position."""
        theirs = [
            loop
            for loop in reader.all_loops[self.stage.depth :]
            if not loop.is_parallel and isinstance(loop.symbol, Symbol)
        ]
        choices = [theirs, [loop for loop in theirs if not loop.is_reduction]]
        return [
            {mine.symbol: loop.symbol for mine, loop in zip(self.loops, chosen, strict=True)}
            for chosen in choices
            if len(chosen) == len(self.loops)
        ] or ([{}] if not self.loops else [])

    def _traced(self, ctx: Context, index: Index) -> dict[Scalar, Scalar] | None:
        """Follows a logical index to the stage's loops; None unless the shared loops agree."""
        if self.stage.reference is not None:
            return None
        known = ctx.indexer.forward(self.stage.tv, index)
        own = {id(loop) for loop in self.loops}
        symbols: dict[Scalar, Scalar] = {}
        for number, loop in self.stage.axis_loops.items():
            if loop.is_reduction:
                continue
            if number not in known:
                return None
            at = ctx.simplify(known[number])
            if id(loop) in own:
                symbols[loop.symbol] = at
            elif at != loop.symbol:
                return None
        return symbols


def _divides(x: Scalar) -> bool:
    return (isinstance(x, Apply) and x.op in ("/", "%")) or any(map(_divides, sc.children(x)))


def _member(stage: Stage, tv: TensorView) -> str:
    if not isinstance(stage.op, WelfordOp):
        return ""
    return {stage.op.avg: "mean()", stage.op.var: "m2", stage.op.n: "count()"}[tv]


def allocate(ctx: Context) -> dict[Stage, Buffer]:
    """Gives every stage that needs storage its buffer; shared ones follow each other."""
    return {s: _allocate(ctx, s) for s in ctx.nesting.stages if s.storage != "global"}


def _allocate(ctx: Context, stage: Stage) -> Buffer:
    name = f"T{stage.tv.number}" if stage.storage != "reduction" else f"r{stage.tv.number}"
    if stage.storage == "shared":
        return _allocate_shared(ctx, stage, name)
    loops = [
        loop
        for loop in stage.own_loops
        if not loop.is_parallel and not loop.is_reduction and isinstance(loop.symbol, Symbol)
    ]
    size = 1
    for loop in loops:
        extent = sc.int_value(loop.extent)
        if extent is None:
            raise DefinitionError(
                f"{stage.tv} would need a register for each of {loop.extent} iterations; "
                "inline it deeper, or split the axis by a constant"
            )
        size *= extent
    dtype = stage.tv.dtype()
    ctype = c_type(dtype)
    if stage.is_reduction:
        dtype = accumulator_dtype(stage)
        ctype = c_type(dtype)
        if isinstance(stage.op, WelfordOp):
            ctype = welford_ctype(dtype)
    return Buffer(stage, name, dtype, ctype, loops, size if loops else None)


def _allocate_shared(ctx: Context, stage: Stage, name: str) -> Buffer:
    """Lays a shared tensor out by its allocation domain, or by its loops.

    Left out are the axes that do not distinguish elements of one block at one time: block axes, and
    serial loops outside of the buffer.
    """
    domain = stage.tv.domain
    if stage.reference is not None:
        raise DefinitionError(f"{stage.tv} is shared, but has no loops of its own")
    outside = {
        n
        for n, loop in stage.axis_loops.items()
        if loop.ptype in GRID_TYPES
        or (not loop.is_parallel and _position(stage, loop) < stage.depth)
    }
    axes = [
        (a.number, ctx.nesting.fusion.canonical(a.size))
        for a in (domain.allocation or domain.loop)
        if a.number not in outside and a.ptype not in GRID_TYPES and not a.is_broadcast
    ]
    count = sc.product(size for _, size in axes)
    return Buffer(
        stage, name, stage.tv.dtype(), c_type(stage.tv.dtype()), [], axes=axes, count=count
    )


def _position(stage: Stage, loop: Loop) -> int:
    found = [k for k, mine in enumerate(stage.loops) if mine.find() is loop.find()]
    return found[0] if found else len(stage.loops)


def place_shared(buffers: dict[Stage, Buffer], start: Scalar) -> Scalar:
    """Gives shared buffers their offsets after `start` bytes; returns the bytes used."""
    end = start
    for buffer in buffers.values():
        if buffer.is_shared:
            words = sc.ceildiv(end, SHARED_ALIGNMENT)
            buffer.offset = sc.mul(words, SHARED_ALIGNMENT)
            end = sc.add(buffer.offset, buffer.nbytes)
    return end
