"""Kernels with dependent reductions: levels, the values held between levels, and rewrites.

A *row* is the reduced axes of such a kernel, taken as one axis. The *level* of a value is the
number of reductions that it depends on, one after another. Reductions and outputs of one level
iterate the row in one loop:

    level 0  m = max(x)        level 1  s = sum(exp(x - m))        level 2  y = exp(x - m) / s
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

from fuser import ops
from fuser.ir import primitives
from fuser.ir.axis_graph import AxisGraph
from fuser.ir.dtypes import HALF_LIKE, DataType, nbytes_of
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.ops.nodes import EXPENSIVE, CastOp, WelfordOp
from fuser.ir.scalar import constructors as sc
from fuser.ops.reductions import without_shift
from fuser.ops.reference.meaning import REDUCING
from fuser.passes.segment import RowParts, row_parts
from fuser.schedule.iteration_space import Access, Space, iteration_space
from fuser.schedule.loop_propagation import AxisMatcher
from fuser.support.record import record


def levels_of(fusion: Fusion) -> dict[TensorView, int]:
    """Returns the level of every tensor: how many reductions, one after another, it depends on.

    In a softmax, the maximum has level 1, the sum level 2.
    """
    found: dict[TensorView, int] = {}
    for op in fusion.exprs:
        level = max((found.get(v, 0) for v in op.inputs if isinstance(v, TensorView)), default=0)
        found.update(dict.fromkeys(op.outputs, level + isinstance(op, REDUCING)))
    return found


def level_of_step(op: TensorOp, levels: dict[TensorView, int]) -> int:
    """Returns the number of the loop over a row in which an op runs.

    A row is the reduced axes of a kernel, which has several loops over the row, one after another.
    Loop n begins when n reductions, each of which depends on the one before, are complete. `levels`
    maps each tensor to the number of such reductions on which it depends: a result with the number
    n is computed in loop n. A reduction counts itself, but runs in the loop before, because its
    result is complete only after that loop.
    """
    return levels[op.out_tensor] - isinstance(op, REDUCING)


def steps_that_read(fusion: Fusion) -> dict[TensorView, set[int]]:
    """Returns, for each tensor, the numbers of the loops over a row in which the kernel reads the
    tensor.

    A row is the reduced axes. Loop n begins when n reductions, each of which depends on the one
    before, are complete. In each loop, some reductions and outputs are computed. The loop reads a
    tensor if such a reduction or output is computed from the tensor, directly or through ops that
    are no reductions.
    """
    levels, found = levels_of(fusion), dict[TensorView, set[int]]()
    for op in reversed(fusion.used_exprs()):
        mine = {level for out in op.outputs for level in found.get(out, ())}
        if isinstance(op, REDUCING):
            mine = set()
        if isinstance(op, REDUCING) or any(out in fusion.outputs for out in op.outputs):
            mine.add(level_of_step(op, levels))
        for v in op.inputs:
            if isinstance(v, TensorView):
                found.setdefault(v, set()).update(mine)
    return found


# ------------------------------------------------------------------ kept values
@record
class KeptValue:
    """A value that registers hold over a whole row, and the first and last time of its use.

    A row is the reduced axes of a kernel, taken as one axis. Inputs are loaded at time -1. After n
    reductions, each of which depends on the one before, values are computed at time 2n, and the
    next reduction runs at time 2n + 1.
    """

    tv: TensorView
    begin: int
    end: int


def kept_values(
    fusion: Fusion, rows: frozenset[TensorView], *, is_costly: Callable[[TensorOp], bool]
) -> list[KeptValue]:
    """Returns the values that registers hold over a whole row, with the times of their use.

    `rows` are the tensors that have all axes of the kernel, including those of the row (the reduced
    axes). The result has two kinds of values:

    - inputs in `rows`;
    - results of ops for which `is_costly` returns True, if they are used both before and after some
      reduction is complete.
    """
    levels = levels_of(fusion)
    starts = [op for op in fusion.used_exprs() if op.out_tensor in rows and is_costly(op)]
    costly = {_last_of_chain(op, levels, rows) for op in starts}
    times: dict[TensorView, set[int]] = {}
    found: list[KeptValue] = []
    for op in reversed(fusion.used_exprs()):
        level = level_of_step(op, levels)
        mine: set[int] = set()
        for out in op.outputs:
            mine |= times.get(out, set())
        if isinstance(op, REDUCING) or any(out in fusion.outputs for out in op.outputs):
            mine = {2 * level + 1}
        elif op.out_tensor in costly and len({t // 2 for t in mine}) > 1:
            found.append(KeptValue(op.out_tensor, 2 * level, max(mine)))
            mine = {2 * level}
        for v in op.inputs:
            if isinstance(v, TensorView):
                times.setdefault(v, set()).update(mine)
    inputs = [v for v in fusion.inputs if isinstance(v, TensorView) and v in rows and times.get(v)]
    return [*(KeptValue(v, -1, max(times[v])) for v in inputs), *reversed(found)]


def _last_of_chain(
    op: TensorOp, levels: dict[TensorView, int], rows: frozenset[TensorView]
) -> TensorView:
    """Returns the value that registers hold in place of the result of `op`.

    The purpose is to hold few bytes. If the result has only one reader, the reader's result may be
    held instead, and so on. Of these results, the one with the fewest bytes is chosen, and of
    equal ones the last. In this example, the results are u, b, w and h. A bool takes 4 bytes in a
    register, as a float does, so `h` is held:

        u = rand(); b = u < p; w = where(b, x, 0); h = w + r
    """
    fusion = op.out_tensor.fusion
    tv = best = op.out_tensor
    least = _nbytes_computed(tv)
    while len(uses := fusion.uses(tv)) == 1:
        (reader,) = uses
        out = reader.out_tensor
        if isinstance(reader, REDUCING) or out not in rows or levels[out] != levels[tv]:
            break
        tv = out
        if (nbytes := _nbytes_computed(tv)) <= least:
            best, least = tv, nbytes
    return best


def _nbytes_computed(tv: TensorView) -> int:
    """Returns the bytes of one element in registers; a bool takes a whole register of 4 bytes."""
    return 4 if tv.dtype() is DataType.Bool else nbytes_of(tv.dtype())


def most_bytes(kept: Iterable[KeptValue], vector: int) -> int:
    """Returns the most bytes of registers that the values in `kept` take at one time, per element
    of a row.

    A register has 4 bytes. If a vector of `vector` elements has fewer bytes, each of its elements
    is counted as a whole register.
    """
    values = list(kept)
    sizes = [nbytes_of(k.tv.dtype()) for k in values]
    costs = [(k, n if n * vector >= 4 else 4) for k, n in zip(values, sizes, strict=True)]
    ends = {t for k in values for t in (k.begin, k.end - 1)}
    return max((sum(n for k, n in costs if k.begin <= t < k.end) for t in ends), default=0)


# ------------------------------------------------------------------ rewrites
def separate_levels(fusion: Fusion, shared: frozenset[TensorView]) -> dict[TensorView, int]:
    """Duplicates ops whose results are needed in several loops over a row, so that each loop
    computes its own copy.

    A row is the reduced axes of a kernel. Loop n over the row begins when n reductions, each of
    which depends on the one before, are complete. After the duplication, each loop can load the
    operands of the copy early. Ops with results in `shared` are not duplicated. Returns, for each
    tensor, the number of the loop in which the tensor is needed.

        c = f(x); m = max(c); d = sub(c, m)   ->   c = f(x); m = max(c); e = f(x); d = sub(e, m)
    """
    levels = levels_of(fusion)
    # Keyed by results, because an op is replaced when its operands change.
    needed: dict[TensorView, set[int]] = {}
    for op in reversed(fusion.used_exprs()):
        if _is_step(fusion, op) or any(out in shared for out in op.outputs):
            found = {level_of_step(op, levels)}
        else:
            users = [u.out_tensor for out in op.outputs for u in fusion.uses(out)]
            found = set[int]().union(*(needed.get(u, ()) for u in users))
        needed.update(dict.fromkeys(op.outputs, found))
    for op in reversed(fusion.used_exprs()):
        first, *others = sorted(needed[op.out_tensor]) or [0]
        needed.update((out, {first}) for out in op.outputs)
        # A factory op relates the axes of its readers, so it is not duplicated.
        is_factory = not any(isinstance(v, TensorView) for v in op.inputs)
        for level in () if is_factory else others:
            twin = _clone(fusion, op)
            needed.update((out, {level}) for out in twin.outputs)
            for old, new in zip(op.outputs, twin.outputs, strict=True):
                fusion.replace_uses(
                    old, new, where=lambda u, level=level: needed.get(u.out_tensor) == {level}
                )
    return {tv: min(found, default=0) for tv, found in needed.items()}


def _is_step(fusion: Fusion, op: TensorOp) -> bool:
    return isinstance(op, REDUCING) or any(out in fusion.outputs for out in op.outputs)


def _clone(fusion: Fusion, op: TensorOp) -> TensorOp:
    """Inserts a copy of a pointwise op after the op, with new results, and returns the copy."""
    twins: dict[TensorView, TensorView] = {}
    for out in op.outputs:
        axes = {n: fusion.clone_axis(a, rfactor=a.rfactor) for n, a in out.domain.axes.items()}
        domain = out.domain.map_axes(lambda a, axes=axes: axes[a.number])
        twins[out] = fusion.new_tensor(domain, out.dtype(), mesh=out.mesh)
    twin = op.map_values(lambda v: twins.get(v, v) if isinstance(v, TensorView) else v)
    fusion.insert_after(op, [twin])
    return twin


def divide_once(fusion: Fusion, per_row: Callable[[TensorView], bool]) -> None:
    """Replaces divisions by a value per row with multiplications by the reciprocal of that value.

    A row is the reduced axes of a kernel. One division per row computes the reciprocal:

        y = x / s   ->   k = 2^-64 where |s| is huge, 2^64 where it is tiny, else 1
                         r = 1 / (s * k);  y = (x * k) * r

    The scale k keeps the reciprocal of any divisor a normal number. The quotient is within 1.5
    units in the last place. `per_row` returns whether a tensor has one value per row.
    """
    for op in fusion.exprs:
        divisor = op.inputs[1] if op.name == "div" else None
        out = op.outputs[0]
        if (
            not isinstance(divisor, TensorView)
            or not isinstance(op.inputs[0], TensorView)
            or {divisor.dtype(), op.inputs[0].dtype(), out.dtype()} != {DataType.Float}
            or not per_row(divisor)
            or per_row(out)
        ):
            continue
        with FusionGuard(fusion):
            before = fusion.exprs
            size = ops.abs(divisor)
            small = ops.where(ops.lt(size, 2.0**-100), 2.0**64, 1.0)
            scale = ops.where(ops.gt(size, 2.0**100), 2.0**-64, small)
            scale = ops.cast(scale, DataType.Float)
            factor = ops.reciprocal(ops.mul(divisor, scale))
            quotient = ops.mul(ops.mul(op.inputs[0], scale), factor)
            made = fusion.exprs[len(before) :]
        # The new ops write to the old result tensor, because it may have a declared memory order.
        last = made[-1].map_values(lambda v, new=quotient, old=out: old if v is new else v)
        at = before.index(op)
        fusion.exprs = (*before[:at], *made[:-1], last, *before[at + 1 :])


def _is_half(fusion: Fusion, tv: TensorView) -> bool:
    made = fusion.definition(tv)
    return isinstance(made, CastOp) and made.inp.dtype() in HALF_LIKE


def two_pass_welford(fusion: Fusion) -> None:
    """Computes variances in two passes over the row in registers, so that no element needs a
    division.

    A row is the reduced axes. The first pass is a sum for the mean, the second a sum of squared
    deviations:

        avg, var, n = welford(x)  ->  mean = sum(x) / count; d = x - mean
                                      var = max(sum(d * d) - sum(d) * (sum(d) / count), 0)

    Inputs converted from half precision need no correction term. Such inputs deviate from their
    mean by 0, or by at least 2^-12 of the mean. The rounding error of the mean is far smaller.

    A Welford op is left unchanged in three cases:

    - Its count is used.
    - Its sums would have half precision.
    - Its results are outputs with a declared memory order.
    """
    for op in fusion.exprs:
        if not isinstance(op, WelfordOp) or op.inp.dtype() in HALF_LIKE:
            continue
        if fusion.uses(op.n) or op.n in fusion.outputs:
            continue
        if any(out.domain.allocation and out in fusion.outputs for out in op.outputs):
            continue
        dims = [k for k, a in enumerate(op.avg.domain.logical) if a.is_reduction()]
        at = fusion.exprs.index(op)
        before = fusion.exprs
        with FusionGuard(fusion):
            count = sc.product(op.inp.size(d) for d in dims)
            mean = ops.div(ops.sum(op.inp, dims=dims), count)
            flags = [a.is_reduction() for a in op.avg.domain.logical]
            deviation = ops.sub(op.inp, ops.broadcast(mean, flags))
            squares = ops.sum(ops.mul(deviation, deviation), dims=dims)
            if not _is_half(fusion, op.inp):
                squares = without_shift(squares, ops.sum(deviation, dims=dims), count)
        made = fusion.exprs[len(before) :]
        fusion.exprs = (*before[:at], *made, *before[at + 1 :])
        for old, new in ((op.avg, mean), (op.var, squares)):
            fusion.replace_uses(old, new)
            fusion.outputs = [new if out is old else out for out in fusion.outputs]
            new.memory = old.memory


# ----------------------------------------------------------------------
# A fusion along the rows of its reductions, and the rewrites that their schedules begin with.


def reference_of(fusion: Fusion) -> TensorView:
    """Returns the result of the first reduction along rows, whose loops all other tensors copy.

    Partial sums over rows are skipped.
    """
    reductions = (op for op in fusion.exprs if isinstance(op, REDUCING))
    return next(op.out_tensor for op in reductions if row_parts(op) is None)


class RowView:
    """A fusion seen along the rows of its first reduction, whose loops all other tensors copy.

    One result of the reduction is computed from the elements of one row.

    - `iterated`, `reduced`: the positions of this reduction's non-reduced and reduced axes, in
      groups that are contiguous in every tensor.
    - `iterated_axes`, `row_axes`: the numbers (ids) of the non-reduced and of the reduced axes.
    """

    def __init__(self, fusion: Fusion) -> None:
        self.fusion = fusion
        self.reference = reference_of(fusion)
        self.graph = AxisGraph(fusion)
        self.space: Space = iteration_space(fusion, self.reference, self.graph)
        runs = self.space.runs(self.space.memory_order())
        self.iterated = [list(r) for r in runs if not self.space.is_reduced(r[0])]
        self.reduced = [list(r) for r in runs if self.space.is_reduced(r[0])]
        self.matcher = AxisMatcher(self.graph, self.reference)
        logical = self.reference.domain.logical
        self.row_axes = frozenset(logical[p].number for r in self.reduced for p in r)
        self.iterated_axes = frozenset(logical[p].number for r in self.iterated for p in r)

    @cached_property
    def parts(self) -> dict[TensorView, RowParts]:
        """The results that are partial sums over the rows, each with the axes of these sums.

        A row is the reduced axes of the fusion's first reduction. Another kernel adds the partial
        sums.
        """
        found = {op.out_tensor: row_parts(op) for op in self.fusion.exprs}
        return {tv: parts for tv, parts in found.items() if parts is not None}

    @property
    def innermost(self) -> int:
        """The position of the innermost reduced axis of the fusion's first reduction."""
        return self.reduced[-1][-1]

    def axes(self, tv: TensorView) -> frozenset[int] | None:
        """Returns the numbers (ids) of the axes that a tensor has in common with the first
        reduction.

        All tensors of the fusion copy the loops of this reduction. Broadcast axes are ignored.
        Returns None if the tensor has an axis that the reduction does not have.
        """
        concrete = [a for a in tv.domain.no_reductions if not a.is_broadcast]
        matches = [self.matcher.reference_of(a) for a in concrete]
        found = frozenset(m.number for m in matches if m is not None)
        return None if None in matches or len(found) < len(concrete) else found

    def is_per_row(self, tv: TensorView) -> bool:
        """Returns whether a tensor has at most one value per row, because it has no reduced axis.

        A row is the reduced axes of the fusion's first reduction.
        """
        axes = self.axes(tv)
        return axes is not None and not axes & self.row_axes

    @cached_property
    def full(self) -> frozenset[TensorView]:
        """The tensors that have all axes of the fusion's first reduction, including the reduced
        ones.

        Tensors that are read at shifted indices are left out.
        """
        wanted = self.row_axes | self.iterated_axes
        unknown = {a.tv for a in self.space.accesses if a.order is None and not a.is_output}
        return frozenset(
            tv for tv in self.fusion.tensors() if tv not in unknown and self.axes(tv) == wanted
        )

    @cached_property
    def dense(self) -> tuple[Access, ...]:
        """The inputs and outputs that have all axes of the fusion's first reduction, as `Access`es.

        The tuple is empty unless all of these tensors are without gaps in memory and have one
        memory order.
        """
        found = [a for a in self.space.accesses if a.tv in self.full]
        return tuple(found) if self.space.are_dense(found) else ()

    def is_costly(self, op: TensorOp) -> bool:
        """Returns whether computing an op again costs more than holding its result in registers.

        True if the op is expensive. Also True if the op reads an input that is not held in
        registers, because the input would then be loaded from memory again.
        """
        full = self.full
        return op.name in EXPENSIVE or any(
            isinstance(v, TensorView) and v in self.fusion.inputs and v not in full
            for v in op.inputs
        )


def rewrite(fusion: Fusion, *, is_kept: bool, has_threads: bool) -> None:
    """Applies the rewrites with which the schedules of kernels with dependent reductions begin.

    The fusion is changed in place. With `is_kept`, registers hold the row (the reduced axes), so
    variances are computed in two passes. With `has_threads`, the kernel is for a GPU, so divisions
    by a value per row are replaced by multiplications. Always, outputs that other ops read are also
    kept in registers.
    """
    _fork_outputs(fusion)
    if is_kept:
        two_pass_welford(fusion)
    if has_threads:
        divide_once(fusion, RowView(fusion).is_per_row)


def _fork_outputs(fusion: Fusion) -> None:
    """Copies each output that other ops read, so that these ops read registers and not memory.

    The copy becomes the output in memory.
    """
    for out in dict.fromkeys(fusion.outputs):
        if fusion.uses(out):
            primitives.cache_fork(out)
