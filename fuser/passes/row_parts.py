"""Sums over rows in two steps: the sums of some rows each (*parts*), then the sum of the parts.

    total [r rows, n]   ->   parts [r rows/264, i 264, n];  total [r 264, n] = sum(parts)

A kernel that goes over whole rows can make parts on its way, which is what the backward of a norm
needs: gradients of its input, row by row, and of its weights, over all rows.
"""

from __future__ import annotations

from fuser.ir.domain.axis_path import transforms_between
from fuser.ir.domain.tensor_domain import SplitTransform
from fuser.ir.fusion import TensorOp
from fuser.ir.ops.nodes import ReductionOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.tensor import TensorView
from fuser.ir.types import MemoryType, ParallelType
from fuser.support.record import record


@record
class RowParts:
    """A reduction that makes parts: how many, which of its axes counts them, and which is left to
    reduce."""

    count: int
    part: int
    rest: int


def row_parts(op: TensorOp) -> RowParts | None:
    """Return how an op makes parts of sums over rows, None for any other op."""
    if not isinstance(op, ReductionOp) or not op.out.domain.root:
        return None
    domain = op.out.domain
    reduced = [a.number for a in domain.logical if a.is_reduction()]
    *_, last = transforms_between(domain, domain.root, domain.logical) or [None]
    if not isinstance(last, SplitTransform) or not last.inner_split or [last.outer] != reduced:
        return None
    count = sc.int_value(last.factor)
    return None if count is None else RowParts(count, last.inner, last.outer)


def may_come_in_parts(total: TensorView) -> bool:
    """Whether a reduction can be split: it has one result, whose order in memory is not declared,
    and whose axes no devices share."""
    op, domain = total.definition(), total.domain
    is_plain = domain.loop_numbers == domain.logical_numbers and not domain.allocation
    is_serial = all(a.ptype is ParallelType.serial for a in domain.loop)
    return isinstance(op, ReductionOp) and is_plain and is_serial


def split_rows(total: TensorView, count: int) -> TensorView:
    """Make a reduction the sum of `count` parts, and return these.

    The reduced axes count as one, in their order; part k has rows k, k + count, and so on.
    """
    axes = [k for k, a in enumerate(total.domain.loop) if a.is_reduction()]
    first = axes[0]
    total.reorder({at: first + k for k, at in enumerate(axes)})
    for _ in axes[1:]:
        total.merge(first)
    total.split(first, count)
    parts = total.rfactor([first])
    parts.memory = MemoryType.global_
    return parts
