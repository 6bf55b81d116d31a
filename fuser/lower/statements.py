"""Builds the statements of a kernel: the loops, and inside them the statements of each stage. A
stage is an op whose result is stored.
"""

from __future__ import annotations

from fuser.ir.dtypes import c_type, nbytes_of
from fuser.ir.fusion import TensorView
from fuser.ir.ops.nodes import LoadStoreOp, ReductionOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.ir.types import ParallelType
from fuser.lower.buffers import Buffer, allocate
from fuser.lower.context import (
    Context,
    Predicate,
    range_conditions,
    stage_predicate,
    writer_predicate,
)
from fuser.lower.kernel_ir import (
    Accumulate,
    Assign,
    Body,
    Declare,
    DeclareShared,
    Element,
    Expr,
    For,
    If,
    Store,
    Unswitch,
    Var,
    VectorLoad,
    VectorStore,
    convert,
)
from fuser.lower.loop_tree import Loop, Node, Stage, loop_tree
from fuser.lower.reduction_code import (
    declare_accumulator,
    finish_reductions,
    functor_of,
    reduced_types,
)
from fuser.lower.values import At, Scope, ValueBuilder
from fuser.lower.vector_access import (
    MAX_LOADED_BYTES,
    MAX_VECTOR_BYTES,
    vector_base,
    vector_width,
)


def build_body(ctx: Context) -> tuple[Body, dict[Stage, Buffer]]:
    """Returns the statements of a kernel, and the buffer of each stage. A stage is an op whose
    result is stored.

    The statements are not complete. Later passes add barriers, expand `Unswitch` statements and
    move index computations out of loops.
    """
    buffers = allocate(ctx)
    builder = _StatementBuilder(ctx, buffers)
    body = Body()
    for buffer in buffers.values():
        if buffer.is_shared:
            body.statements.append(
                DeclareShared(buffer.name, buffer.dtype, buffer.offset, buffer.count)
            )
    builder.nodes(loop_tree(ctx.nesting), Scope(body), 0)
    # At the very begin, so that the tickets have arrived when the first reduction ends.
    body.statements[:0] = ctx.tickets.values()
    return body, buffers


class _StatementBuilder:
    """Builds the statements for the tree of loops, and appends them to the bodies of the kernel."""

    def __init__(self, ctx: Context, buffers: dict[Stage, Buffer]) -> None:
        self.ctx = ctx
        self.buffers = buffers
        self.values = ValueBuilder(ctx, buffers)
        self._if_scopes: dict[int, Scope] = {}
        # Measured on an H200: streaming stores help a pointwise kernel, streaming loads cost it 5%.
        # Sums that each thread computes alone, and kernels that load a row once, behave like
        # pointwise kernels.
        reductions = (s for s in ctx.nesting.stages if s.is_reduction)
        self._streams_loads = any(reduced_types(s) for s in reductions)

    # ------------------------------------------------------------ the tree
    def nodes(self, nodes: list[Node], scope: Scope, depth: int) -> None:
        for node in nodes:
            local = [s for s in node.stages if s.depth == depth and s.storage != "global"]
            for stage in local:
                self.declare(stage, scope)
            self.node(node, scope, depth)
            self.finish([s for s in local if s.is_reduction], scope)

    def node(self, node: Node, scope: Scope, depth: int) -> None:
        if node.loop is None:
            assert node.stage is not None
            self.leaf(node.stage, scope)
            return
        loop = node.loop
        if loop.ptype is ParallelType.unswitch:
            inner = Scope(Body(), scope)
            scope.body.statements.append(Unswitch(inner.body))
            scope = inner
        if loop.is_trivial:
            self.nodes(node.children, scope, depth + 1)
            return
        inner = self.open_loop(loop, scope)
        self.nodes(node.children, inner, depth + 1)

    def open_loop(self, loop: Loop, scope: Scope, *, unroll: bool = False) -> Scope:
        assert isinstance(loop.symbol, Symbol)
        inner = Scope(Body(), scope)
        unroll = unroll or loop.ptype in (ParallelType.unroll, ParallelType.vectorize)
        scope.body.statements.append(For(loop.symbol, loop.extent, inner.body, unroll=unroll))
        return inner

    def declare(self, stage: Stage, scope: Scope) -> None:
        buffer = self.buffers[stage]
        if stage.is_reduction:
            scope.body.statements.append(declare_accumulator(buffer))
        elif not buffer.is_shared:
            scope.body.statements.append(Declare(buffer.name, buffer.ctype, buffer.size))

    def guarded(self, predicate: Predicate, scope: Scope) -> Scope:
        """Returns the scope (list of statements) to which to append statements that run only under
        `predicate`.

        Consecutive statements with equal predicates share one `If`.
        """
        if predicate == Predicate(sc.const(True)):
            return scope
        last = scope.body.statements[-1] if scope.body.statements else None
        if isinstance(last, If) and (last.cond, last.flags) == (predicate.cond, predicate.flags):
            known = self._if_scopes.get(id(last.then))
            if known is not None:
                return known
        inner = Scope(Body(), scope)
        scope.body.statements.append(If(predicate.cond, inner.body, flags=predicate.flags))
        self._if_scopes[id(inner.body)] = inner
        return inner

    # ------------------------------------------------------------ the work of a stage
    def leaf(self, stage: Stage, scope: Scope) -> None:
        if stage.vector is not None and self.ctx.may_be_partial(stage):
            move = self.load_part if stage.storage == "local" else self.store_part
            move(stage, stage.vector, scope)
            return
        inside = self.guarded(stage_predicate(self.ctx, stage), scope)
        if stage.is_reduction:
            self.accumulate(stage, inside)
        elif stage.vector is not None:
            self.vector(stage, inside)
        else:
            self.write(stage, self.result(stage, inside), inside)

    def at(self, stage: Stage, scope: Scope) -> At:
        axes = self.ctx.indexer.stage_axes(stage)
        index = tuple(axes[a.number] for a in stage.tv.domain.no_reductions)
        if stage.reference is not None:
            axes = self.ctx.indexer.tensor_axes(stage.tv, index)
        return At(stage, scope, sc.const(True), stage.tv, axes, index)

    def result(self, stage: Stage, scope: Scope) -> Expr:
        return self.values.compute(stage.op, stage.tv, self.at(stage, scope))

    def write(self, stage: Stage, value: Expr, scope: Scope) -> None:
        """Appends the statement that writes `value` to the element which the stage computes in the
        current iteration. A stage is an op whose result is stored.
        """
        tv = stage.tv
        value = convert(value, tv.dtype())
        index = self.ctx.indexer.stage_index(stage)
        if stage.storage == "global":
            offset = self.ctx.simplify(self.ctx.indexer.offset(tv, index))
            scope.body.statements.append(Store(f"T{tv.number}", offset, value))
            return
        buffer = self.buffers[stage]
        at = buffer.shared_index(self.ctx, index) if buffer.is_shared else buffer.own_index()
        scope.body.statements.append(Assign(buffer.element(at, tv), value))

    # ------------------------------------------------------------ vectors
    def vector(self, stage: Stage, scope: Scope) -> None:
        assert stage.vector is not None
        if stage.storage == "local":
            buffer = self.buffers[stage]
            base = sc.substitute(buffer.own_index(), {stage.vector.symbol: sc.ZERO})
            self.load_vector(stage, buffer.name, base, scope)
            return
        array, base = self.source_array(stage, scope)
        self.store_vector(stage, array, base, scope)

    def load_part(self, stage: Stage, vector: Loop, scope: Scope) -> None:
        """Appends the statements that load a vector into the registers of `stage`, if the vector
        may contain elements outside of one row. `vector` is the loop over the elements.

        A row has the elements along the vectorised axis, at fixed indices of all other axes. Rows
        may begin at any address. The loaded vector begins at an aligned address, so it may also
        contain elements of neighbouring rows. A vector that crosses the end of the tensor is loaded
        element by element.
        """
        inside = self.guarded(stage_predicate(self.ctx, stage, lanes="any"), scope)
        word, part = Scope(Body(), inside), Scope(Body(), inside)
        self.vector(stage, word)
        load = word.body.statements[-1]  # of several loads, the last ends with the vector
        assert isinstance(load, VectorLoad)
        source = stage.op.inputs[0]
        assert isinstance(source, TensorView)
        canonical = self.ctx.nesting.fusion.canonical
        size = sc.product(canonical(a.size) for a in source.domain.no_reductions)
        self.elements(stage, vector, part)
        is_whole = sc.lt(sc.add(load.index, load.width - 1), self.ctx.simplify(size))
        inside.body.statements.append(If(is_whole, word.body, part.body))

    def store_part(self, stage: Stage, vector: Loop, scope: Scope) -> None:
        """Appends the statements that store a vector of `stage`, if the vector may contain elements
        outside of one row. `vector` is the loop over the elements.

        A row has the elements along the vectorised axis, at fixed indices of all other axes. A
        vector that is completely inside the row is stored by one access. Otherwise, those of its
        elements that are inside the row are stored one by one.
        """
        word, part = Scope(Body(), scope), Scope(Body(), scope)
        self.vector(stage, word)
        self.elements(stage, vector, part)
        whole = stage_predicate(self.ctx, stage)
        if whole.cond == sc.const(True) and not whole.flags:
            scope.body.statements += word.body.statements
            return
        scope.body.statements.append(If(whole.cond, word.body, part.body, flags=whole.flags))

    def elements(self, stage: Stage, vector: Loop, scope: Scope) -> None:
        """Appends statements that copy the elements of a vector one by one, without those outside
        of the row. `vector` is the loop over the elements.

        A row has the elements along the vectorised axis, at fixed indices of all other axes.
        """
        each = self.open_loop(vector, scope, unroll=True)
        inside = self.guarded(stage_predicate(self.ctx, stage, lanes="each"), each)
        self.write(stage, self.result(stage, inside), inside)

    def load_vector(self, stage: Stage, array: str, at: Scalar, scope: Scope) -> None:
        """Appends statements that load the operand of a copy op (the op of `stage`) as a vector
        into the register array `array`, from element `at` on.

        A vector wider than one memory access takes several accesses.
        """
        assert stage.vector is not None and isinstance(stage.op, LoadStoreOp)
        source, width = stage.op.inp, vector_width(stage, most=MAX_LOADED_BYTES)
        word = min(width, MAX_VECTOR_BYTES // nbytes_of(stage.tv.dtype()))
        here = self.at(stage, scope)
        index = self.ctx.indexer.operand_index(stage.op, 0, stage.tv, here.axes)
        origin = self.ctx.nesting.stage_of.get(source)
        if origin is not None:
            offset = self.buffers[origin].shared_index(self.ctx, index)
        else:
            offset = self.ctx.indexer.offset(source, index)
            self.align(source, word)
        base = vector_base(self.ctx, source, offset, stage.vector.symbol, width=width)
        streaming = origin is None and self._streams_loads and _is_repeated(stage)
        scope.body.statements += [
            VectorLoad(
                array,
                sc.add(at, k),
                f"T{source.number}",
                sc.add(base, k),
                word,
                stage.tv.dtype(),
                streaming=streaming and self.is_read_once(source, stage),
                shared=origin is not None,
            )
            for k in range(0, width, word)
        ]

    def source_array(self, stage: Stage, scope: Scope) -> tuple[str, Scalar]:
        """Returns the name of the register array that holds the vector which `stage` stores, and
        the index of the vector's first element in the array.

        If no array holds the vector yet, the statements that compute the vector are appended to
        `scope`.
        """
        assert stage.vector is not None
        v = stage.vector.symbol
        width = vector_width(stage)
        is_copy = isinstance(stage.op, LoadStoreOp)
        if is_copy:
            source = stage.op.inp  # pyright: ignore[reportAttributeAccessIssue]
            origin = self.ctx.nesting.stage_of.get(source)
            if origin is not None and origin.storage == "local":
                value = self.result(stage, scope)
                base = sc.substitute(value.index, {v: sc.ZERO}) if isinstance(value, Element) else v
                if isinstance(value, Element) and sc.add(base, v) == value.index:
                    return value.name, base
        name = f"v{stage.tv.number}"
        scope.body.statements.append(Declare(name, c_type(stage.tv.dtype()), width))
        if is_copy and (
            stage.op.inp in self.ctx.nesting.fusion.inputs  # pyright: ignore[reportAttributeAccessIssue]
            or self.is_shared(stage.op.inp)  # pyright: ignore[reportAttributeAccessIssue]
        ):
            self.load_vector(stage, name, sc.ZERO, scope)
            return name, sc.ZERO
        inner = self.open_loop(stage.vector, scope)
        value = convert(self.result(stage, inner), stage.tv.dtype())
        inner.body.statements.append(Assign(Element(name, v, stage.tv.dtype()), value))
        return name, sc.ZERO

    def is_shared(self, tv: TensorView) -> bool:
        origin = self.ctx.nesting.stage_of.get(tv)
        return origin is not None and origin.storage == "shared"

    def store_vector(self, stage: Stage, array: str, at: Scalar, scope: Scope) -> None:
        assert stage.vector is not None
        tv, width = stage.tv, vector_width(stage)
        index = self.ctx.indexer.stage_index(stage)
        is_shared = stage.storage == "shared"
        if is_shared:
            offset = self.buffers[stage].shared_index(self.ctx, index)
        else:
            offset = self.ctx.indexer.offset(tv, index)
            self.align(tv, width)
        base = vector_base(self.ctx, tv, offset, stage.vector.symbol, width=width)
        streaming = not is_shared and self.ctx.nesting.fusion.alias_of(tv) is None
        scope.body.statements.append(
            VectorStore(
                f"T{tv.number}", base, array, at, width, tv.dtype(), streaming, shared=is_shared
            )
        )

    def align(self, tv: TensorView, width: int) -> None:
        known = self.ctx.alignments.get(tv, 1)
        self.ctx.alignments[tv] = max(known, width * nbytes_of(tv.dtype()))

    def is_read_once(self, source: TensorView, stage: Stage) -> bool:
        """Whether `stage`, the computation of one stored tensor, is the only reader of `source` in
        this and all later kernels, and reads each element exactly once.

        Such loads are marked as streaming, so that the cache does not keep the elements.
        """
        fusion = self.ctx.nesting.fusion
        if source.number in fusion.read_again:
            return False
        if len(fusion.uses(source)) != 1 or any(a.into is source for a in fusion.aliases):
            return False
        if stage.reference is not None:
            return False
        # A surrounding loop that no axis of the stage iterates reads everything again.
        own = {loop.find() for loop in stage.axis_loops.values()}
        around = [loop for loop in stage.all_loops if isinstance(loop.symbol, Symbol)]
        if any(loop.find() not in own for loop in around):
            return False
        have = sc.product(fusion.canonical(a.extent) for a in source.domain.no_reductions)
        return have == sc.product(fusion.canonical(a.size) for a in stage.tv.domain.logical)

    # ------------------------------------------------------------ reductions
    def accumulate(self, stage: Stage, scope: Scope) -> None:
        buffer = self.buffers[stage]
        value = self.values.operand(stage.op, 0, buffer.dtype, self.at(stage, scope))
        target: Var | Element
        if buffer.size is None:
            target = Var(buffer.name, buffer.dtype)
        else:
            target = Element(buffer.name, buffer.own_index(), buffer.dtype)
        kind = stage.op.kind if isinstance(stage.op, ReductionOp) else "welford"
        scope.body.statements.append(Accumulate(target, value, kind, functor_of(buffer)))

    def finish(self, stages: list[Stage], scope: Scope) -> None:
        """Appends the statements that combine the accumulators of the reductions `stages` over
        threads and CUDA blocks.

        Results that are fusion outputs are then written to global memory.
        """
        scope.body.statements += finish_reductions(self.ctx, [self.buffers[s] for s in stages])
        for stage in stages:
            for out in stage.op.outputs:
                if out in self.ctx.nesting.fusion.outputs:
                    self.write_result(stage, out, scope)

    def write_result(self, stage: Stage, out: TensorView, scope: Scope) -> None:
        buffer = self.buffers[stage]
        kept = [loop for loop in stage.all_loops if not loop.is_reduction]
        conds = [c for c in range_conditions(self.ctx, stage) if not _uses_reduction(stage, c)]
        for loop in buffer.loops:
            scope = self.open_loop(loop, scope, unroll=True)
        inside = self.guarded(writer_predicate(self.ctx, stage, kept, conds), scope)
        axes = self.ctx.indexer.stage_axes(stage)
        index = tuple(axes[a.number] for a in stage.tv.domain.no_reductions)
        offset = self.ctx.simplify(self.ctx.indexer.offset(out, index))
        value = buffer.element(buffer.own_index(), out)
        inside.body.statements.append(Store(f"T{out.number}", offset, convert(value, out.dtype())))


def _is_repeated(stage: Stage) -> bool:
    """Whether a loop surrounds the declaration of a stage's registers, so that other values fill
    the registers in each iteration. A stage is an op whose result is stored.
    """
    around = stage.loops[: stage.depth]
    return any(not loop.is_trivial for loop in around)


def _uses_reduction(stage: Stage, cond: Scalar) -> bool:
    """Whether a condition contains the index of a loop over an axis that the stage reduces. A stage
    is an op whose result is stored.
    """
    reduced = {loop.symbol for loop in stage.all_loops if loop.is_reduction}
    return any(s in reduced for s in sc.symbols(cond))
