"""Buffers: where the results of stages are stored, and at which index each element is. A stage is
an op whose result is stored.

A local buffer is in registers. It is declared inside the outer loops that its stage shares with the
stages that read it, and has one element for each iteration of the other serial loops. A stage that
reads a local buffer must read exactly the elements that the same thread wrote, because registers
are private to a thread. Lowering proves this: it compares the index expressions of writer and
reader.

A shared buffer is in shared memory and is addressed by the logical index of the tensor, so any
thread of the CUDA block may read any element.
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
# The C type of indices, which every kernel defines.
INDEX_CTYPE = "nvfuser_index_t"


def accumulator_dtype(stage: Stage) -> DataType:
    """Returns the dtype in which the reduction `stage` adds up its values.

    16-bit floating-point types are accumulated in Float, because sums of 16 bits would lose
    precision. All other types are accumulated in their own dtype.
    """
    assert isinstance(stage.op, ReductionOp | WelfordOp)
    dtype = stage.op.inp.dtype() if isinstance(stage.op, WelfordOp) else stage.tv.dtype()
    return DataType.Float if dtype in HALF_LIKE else dtype


def welford_ctype(dtype: DataType, name: str = "Welford") -> str:
    """Returns the C type of an accumulator for mean and variance (Welford's algorithm), such as
    `Welford<float, nvfuser_index_t>`.

    `dtype` is the dtype of the mean. `name` is the C++ template: `Welford` for an accumulator,
    `WelfordOp` for the functor that combines two of them. The count of values has the kernel's
    index type, which can hold the number of iterations.
    """
    return f"{name}<{c_type(dtype)}, {INDEX_CTYPE}>"


def no_values(dtype: DataType) -> Expr:
    """Returns the expression for an empty accumulator of a mean and variance (Welford): no number
    has been added to it.
    """
    return Compute(welford_ctype(dtype) + "{{0, 0, 0, 0}}", (), dtype)


@dataclass
class Buffer:
    """The storage of the result of one stage, in registers or shared memory. A stage is an op whose
    result is stored.

    - `loops`, for registers: the loops whose indices address an element, from outer to inner.
    - `size`: the number of elements of a register array, or None for a scalar variable.
    - `axes`, for shared memory: the axes that address an element, from outer to inner, as pairs
      (number (id) of the axis in the tensor's domain, axis size).
    - `count`, `offset`: a shared buffer's number of elements, and its position in bytes.
    - `ctype`: the C type of an element.
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
        """Whether the buffer is in shared memory."""
        return self.stage.storage == "shared"

    @property
    def nbytes(self) -> Scalar:
        """The size in bytes of a buffer in shared memory."""
        return sc.mul(self.count, nbytes_of(self.dtype))

    # ------------------------------------------------------------ addressing
    def own_index(self) -> Scalar:
        """Returns the index, in the register array, of the element that is written in the current
        iteration of the loops.
        """
        if self.axes is not None:
            raise AssertionError(
                f"internal error: {self.stage.tv} is in shared memory, but a kernel addresses it "
                "like "
                "registers. Please report this definition and its schedule"
            )
        return self.index_at({})

    def index_at(self, symbols: dict[Scalar, Scalar]) -> Scalar:
        """Returns the index of an element in the register array, for given values of the loop
        indices.

        `symbols` maps the index symbol of a loop to the value to use instead. A loop without an
        entry keeps its symbol, which stands for the current iteration.
        """
        total: Scalar = sc.ZERO
        for loop in self.loops:
            at = symbols.get(loop.symbol, loop.symbol)
            total = sc.add(sc.mul(total, loop.extent), at)
        return total

    def element(self, index: Scalar, tv: TensorView) -> Var | Element:
        """Returns the expression that reads or writes the element at `index` of this buffer.

        `tv` is the tensor to access. It matters for a Welford op, whose three results (mean,
        variance, count) are fields of one struct: the expression selects the field of `tv`.
        """
        member = _member(self.stage, tv)
        if self.size is None and not self.is_shared:
            return Var(self.name + (f".{member}" if member else ""), self.value_dtype(tv))
        return Element(self.name, index, self.value_dtype(tv), member, self.is_shared)

    def value_dtype(self, tv: TensorView) -> DataType:
        """Returns the dtype of the stored values of `tv`. This is the buffer's dtype, or Int if
        `tv` is the number of values of a mean and variance (Welford).
        """
        if isinstance(self.stage.op, WelfordOp) and tv is self.stage.op.n:
            return DataType.Int
        return self.dtype

    def read(
        self, ctx: Context, tv: TensorView, index: Index, *, reader: Stage, guard: Scalar
    ) -> Expr:
        """Returns the expression with which the op of `reader` reads the element of `tv` at
        `index`.

        `index` has one entry per axis that the user sees. Where `guard` is false, `index` may be
        outside of the buffer. The expression then reads nothing, and its value is 0.
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
        """Returns the position of an element in a shared-memory buffer, counted in elements.

        `index` is the element's index along the axes that the user sees.
        """
        assert self.axes is not None
        known = ctx.indexer.forward(self.stage.tv, index)
        total: Scalar = sc.ZERO
        for number, size in self.axes:
            total = sc.add(sc.mul(total, size), known[number])
        return ctx.simplify(total)

    def _own_element(self, ctx: Context, index: Index, reader: Stage) -> Scalar | None:
        """Returns the index of the register that a reader can use directly: the one that is written
        in the current iteration of the loops. Returns None if this register does not hold the
        element at `index`.

        `reader` is the stage (op with a stored result) that reads the buffer. The result is also
        None if the loops of `reader` and of the buffer do not correspond one to one.
        """
        for candidate in self._paired(reader):
            written = tuple(
                ctx.simplify(sc.substitute(i, candidate))
                for i in ctx.indexer.stage_index(self.stage)
            )
            if written == tuple(ctx.simplify(i) for i in index):
                return self.index_at(candidate)
        return None

    def _traced_index(self, ctx: Context, index: Index, reader: Stage) -> Scalar:
        """Returns the register that holds the element at `index`, as an index in the register
        array. `index` has one entry per axis that the user sees.

        The function first computes the loop indices at which this element is written, and then the
        register that is written there.

        Raises:
            NewAssumptionError: `reader` must compute the element itself, and lowering starts again.
                Reasons: another thread or iteration holds the element, or its register index
                contains a division, which the compiler could not replace by a constant.
            DefinitionError: another thread or iteration holds the element, and `reader` cannot
                compute it itself, because it is the result of a reduction.
        """
        symbols = self._traced(ctx, index)
        if symbols is not None and not any(map(_divides, symbols.values())):
            return self.index_at(symbols)
        if self.stage.storage == "local":
            ctx.assumptions.recompute(self.stage.tv)
        if symbols is not None:
            return self.index_at(symbols)
        raise DefinitionError(
            f"{reader.tv} reads elements of {self.stage.tv} that another thread or loop iteration "
            f"holds in registers: give both tensors the same loops, or copy {self.stage.tv} into "
            "shared memory"
        )

    def _paired(self, reader: Stage) -> list[dict[Scalar, Scalar]]:
        """Returns the possible assignments of the buffer's loops to serial loops of `reader`, the
        stage that reads the buffer.

        An assignment maps the index symbol of each buffer loop to that of a loop of `reader`, from
        outer to inner loops. Lowering uses it to test whether an element is read at the indices at
        which it was written.
        """
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
        """Returns the loop indices at which the element at `index` is written, as a dict from loop
        symbols to indices. `index` has one entry per axis that the user sees.

        Returns None if the registers of the current thread and iteration do not hold the element.
        This is so if it is written at another index of a loop that surrounds the buffer's
        declaration.
        """
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
    """Returns the buffer of every stage whose result is in registers or shared memory.

    A stage is an op whose result is stored. The offsets of shared buffers are assigned later, by
    `place_shared`.
    """
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
                f"{stage.tv} would need one register for each of {loop.extent} iterations, but "
                f"this number is not constant: inline {stage.tv} deeper, or split the axis by a "
                "constant"
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
    """Returns the shared-memory buffer of a stage. A stage is an op whose result is stored.

    The elements are ordered by the tensor's memory order if one is declared, and otherwise by the
    axes of the stage's loops. Two kinds of axes need no space in the buffer, because a CUDA block
    holds elements of only one position along them at a time: axes over CUDA blocks, and axes of
    serial loops around the buffer's declaration.
    """
    domain = stage.tv.domain
    if stage.reference is not None:
        raise DefinitionError(
            f"{stage.tv} cannot be in shared memory, because it is computed in the loops of its "
            f"consumer {stage.reference.tv}: leave {stage.tv} in local memory"
        )
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
    """Assigns positions in shared memory to the shared buffers, one after another from byte `start`
    on.

    Returns the position of the end of the last buffer, which is the kernel's need of shared memory
    in bytes.
    """
    end = start
    for buffer in buffers.values():
        if buffer.is_shared:
            slots = sc.ceildiv(end, SHARED_ALIGNMENT)
            buffer.offset = sc.mul(slots, SHARED_ALIGNMENT)
            end = sc.add(buffer.offset, buffer.nbytes)
    return end
