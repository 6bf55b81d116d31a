"""Inlining: sets `compute_at`, the number of outer loops that a tensor shares with its consumers.

A tensor that shares all loops needs no memory: each element is computed where it is read.
"""

from __future__ import annotations

from collections.abc import Collection

from fuser.ir.axis_graph import AxisGraph, mapped_axes, tensor_operands
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.ops.nodes import ReductionOp, WelfordOp
from fuser.ir.types import ParallelType
from fuser.schedule.loop_propagation import AxisMatcher, check_selected, follow
from fuser.support.errors import DefinitionError, counted

# These axes are executed as one access, so nothing can be computed inside them.
_CLOSED = frozenset({ParallelType.vectorize, ParallelType.group, ParallelType.tma})


class InlineLimits:
    """Computes how many outer loops each tensor of a fusion may at most share with its consumers.

    The tensor is then computed inside these loops (`compute_at`). A new object is created for each
    inlining call, because the limits depend on the schedule.
    """

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion
        self._barriers = _reduction_barriers(fusion)

    def limit(self, tv: TensorView, *, best_effort: bool = False) -> int:
        """Returns how many of the outermost loops of a tensor its consumers may share
        (`compute_at`).

        The shared loops satisfy four conditions:

        - They do not iterate reduction axes.
        - They are not vectorised; with `best_effort`, they are not unrolled either.
        - No consumer has to wait until they are complete. A consumer has to wait if it needs the
          result of a reduction, and the reduction is computed from another consumer.
        - Every consumer has loops over the same axes in the same order.
        """
        own = self._own_limit(tv, best_effort=best_effort)
        for op in self._fusion.uses(tv):
            if own == 0:
                break
            for out in op.outputs:
                own = min(own, _shared_prefix(tv, op, out, own))
        return own

    def _own_limit(self, tv: TensorView, *, best_effort: bool) -> int:
        barred = self._barriers.get(tv, frozenset())
        for position, axis in enumerate(tv.domain.loop):
            if axis.is_reduction() or axis.ptype in _CLOSED:
                return position
            if best_effort and axis.ptype is ParallelType.unroll:
                return position
            if barred and _logical_sources(tv, axis.number) & barred:
                return position
        return len(tv.domain.loop)


def inline_most(
    selected_tensors: Collection[TensorView] = (), *, fusion: Fusion | None = None
) -> None:
    """Inlines tensors as deeply as is legal: each is computed inside the loops of its consumers.

    Only the selected tensors are changed; without a selection, all tensors of the fusion.
    """
    from fuser.ir.fusion_guard import active_fusion

    chosen = list(selected_tensors)
    where = fusion or (chosen[0].fusion if chosen else active_fusion())
    check_selected(where, chosen)
    limits = InlineLimits(where)
    for tv in chosen or _inlinable(where):
        tv.compute_at = limits.limit(tv)


def inline_at(
    reference_tv: TensorView,
    pos: int = -1,
    best_effort: bool = False,
    selected_tensors: Collection[TensorView] = (),
) -> None:
    """Computes tensors inside the outermost `pos` loops of their consumers.

    `pos` is a number of loop axes of `reference_tv`; for another tensor, the corresponding number
    of loop axes is used. Without `selected_tensors`, all tensors are inlined. With `best_effort`, a
    tensor for which this number is not legal is inlined as deeply as is legal.

    Raises:
        DefinitionError: without `best_effort`, the position is not legal for a tensor.
    """
    fusion = reference_tv.fusion
    domain = reference_tv.domain
    rank = len(domain.loop)
    position = pos + rank + 1 if pos < 0 else pos
    if not 0 <= position <= rank:
        raise DefinitionError(
            f"inline_at: {reference_tv} has {counted(rank, 'loop axis')}, so the position must be "
            f"from {-rank - 1} to {rank}, but it is {pos}"
        )
    matcher = AxisMatcher(AxisGraph(fusion), reference_tv)
    check_selected(fusion, selected_tensors)
    limits = InlineLimits(fusion)
    for tv in selected_tensors or _inlinable(fusion):
        if tv is reference_tv:
            wanted = position
        else:
            found = follow(domain.transforms, tv.domain, matcher.matches(tv.domain))
            shared = {found[a.number].number for a in domain.loop[:position] if a.number in found}
            axes = [k for k, a in enumerate(tv.domain.loop) if a.number in shared]
            wanted = axes[-1] + 1 if axes else 0
        legal = limits.limit(tv, best_effort=best_effort)
        if wanted > legal and not best_effort and tv not in fusion.outputs:
            raise DefinitionError(
                f"inline_at: {tv} cannot be inlined at position {wanted}: its largest legal "
                f"position is {legal}. Pass best_effort=True to inline the tensor there"
            )
        tv.compute_at = min(wanted, legal)


def _inlinable(fusion: Fusion) -> list[TensorView]:
    return [tv for tv in fusion.tensors() if tv not in fusion.inputs and fusion.uses(tv)]


def _shared_prefix(tv: TensorView, op: TensorOp, consumer: TensorView, upto: int) -> int:
    """Returns the number of outermost loops of `tv`, at most `upto`, that `consumer` also has, in
    the same order.

    `op` reads `tv` and computes `consumer`. `tv` can be computed inside the loops that both have.
    `consumer` may have other loops between them.
    """
    matches = {
        target.number: source
        for index, operand in tensor_operands(op)
        if operand is tv
        for source, target in mapped_axes(op, index, consumer)
    }
    found = follow(consumer.domain.transforms, tv.domain, matches)
    loops = {a.number for a in tv.domain.loop}
    stands_for = [found[a.number].number for a in consumer.domain.loop if a.number in found]
    # Consumer loops that tv does not have may be in between: tv is computed again in each
    # iteration.
    iterated = [n for n in dict.fromkeys(stands_for) if n in loops]
    for count, axis in enumerate(tv.domain.loop[:upto]):
        if count == len(iterated) or iterated[count] != axis.number:
            return count
    return upto


def _logical_sources(tv: TensorView, number: int) -> set[int]:
    """Returns the numbers (ids) of the axes from which splits and merges made a loop axis.

    `number` is the id of the loop axis. The result includes all axes on the way, up to the logical
    axes (those that the user sees).
    """
    return tv.domain.above({number})


def _reduction_barriers(fusion: Fusion) -> dict[TensorView, frozenset[int]]:
    """Returns, for each tensor, the logical axes whose loops its consumers must not share with the
    tensor.

    One consumer of a tensor may lead to a reduction, and another consumer to an op that needs the
    reduction's result. The loop over the reduced axes must end between the two consumers. The
    tensor therefore needs storage, as the row of a softmax does.
    """
    barred: dict[TensorView, frozenset[int]] = {}
    for reduction in fusion.exprs:
        if not isinstance(reduction, (ReductionOp, WelfordOp)):
            continue
        reduced = {
            source.number for source, target in mapped_axes(reduction, 0) if target.is_reduction()
        }
        above, after = _cone(fusion, reduction)
        if not after:
            continue
        # The axes that are reduced later, for each tensor above the reduction.
        for tv, axes in _axes_upstream(fusion, reduction, reduced).items():
            leads = [
                any(o in above for o in op.outputs) or op is reduction for op in fusion.uses(tv)
            ]
            needs = [op is not reduction and _leads_to(op, after) for op in fusion.uses(tv)]
            pairs = [(a, b) for i, a in enumerate(leads) for j, b in enumerate(needs) if i != j]
            if any(a and b for a, b in pairs):
                barred[tv] = barred.get(tv, frozenset()) | axes
    return barred


def _leads_to(op: TensorOp, after: dict[TensorOp, bool]) -> bool:
    return after.get(op, False)


def _cone(fusion: Fusion, reduction: TensorOp) -> tuple[set[TensorView], dict[TensorOp, bool]]:
    """Returns the tensors from which a reduction is computed, and the ops that may have to wait for
    the reduction.

    The tensors are the direct and indirect operands of the reduction. There are two kinds of ops:

    - ops that use the result of the reduction, directly or through other ops;
    - ops whose results lead to an op of the first kind on a path without the reduction.

    The ops are the keys of a dict, which serves as an ordered set; each value is True.
    """
    above: set[TensorView] = {v for v in reduction.inputs if isinstance(v, TensorView)}
    for op in reversed(fusion.exprs):
        if any(o in above for o in op.outputs):
            above.update(v for v in op.inputs if isinstance(v, TensorView))
    below: set[TensorView] = set(reduction.outputs)
    joins: dict[TensorOp, bool] = {}
    for op in fusion.exprs:
        if any(v in below for v in op.inputs):
            below.update(op.outputs)
            joins[op] = True
    leading: set[TensorView] = set()
    for op in reversed(fusion.exprs):
        if op is reduction:
            continue
        if op in joins or any(o in leading for o in op.outputs):
            joins[op] = True
            leading.update(v for v in op.inputs if isinstance(v, TensorView))
    return above, joins


def _axes_upstream(
    fusion: Fusion, reduction: TensorOp, reduced: set[int]
) -> dict[TensorView, frozenset[int]]:
    """Returns, for each tensor from which a reduction is computed, the logical axes of this tensor
    that become reduced axes.

    `reduced` are the numbers (ids) of the reduced axes, as axes of the reduction's operand.
    """
    marked: dict[TensorView, set[int]] = {}
    source = next(v for v in reduction.inputs if isinstance(v, TensorView))
    marked[source] = set(reduced)
    for op in reversed(fusion.exprs):
        for out in op.outputs:
            if out not in marked:
                continue
            axes = out.domain.above(marked[out])
            for index, operand in tensor_operands(op):
                hit = {s.number for s, t in mapped_axes(op, index, out) if t.number in axes}
                marked.setdefault(operand, set()).update(hit)
    return {tv: frozenset(axes) for tv, axes in marked.items()}
