"""reshape: which input axes become which output axes.

A plan pairs consecutive input axes with consecutive output axes of equal product, found by walking
from both ends, so that leading symbolic axes stay untouched:

    [i0, i1, 384] -> [i0, i1, 12, 32]      groups (0)->(0) (1)->(1) (2)->(2 3)

A group of one and one is kept as it is; any other is merged, then split from the right (inner
splits by the inner sizes). Axes of size 1 are squeezed before and broadcast after. Where sizes
cannot be compared symbolically, the output axes are `?` until `fuser.passes.concretize` knows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fuser.ir.domain.build_domain import DomainBuilder
from fuser.ir.domain.tensor_domain import IterDomain, TensorDomain
from fuser.ir.fusion import Fusion
from fuser.ir.fusion_guard import active_fusion
from fuser.ir.ops.nodes import ReshapeOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Const, Scalar
from fuser.ir.tensor import TensorView
from fuser.ir.types import IterType
from fuser.ops.building import (
    SizeLike,
    add_op,
    as_extent,
    axes_of,
    broadcast_tensor,
    clone_axes,
    declare_extent,
    fail,
    new_output,
    squeeze_axes,
)
from fuser.ops.factories import full_tensor
from fuser.support.record import record

Positions = tuple[int, ...]


@record
class AxisGroup:
    """Consecutive input positions and the output positions that they become."""

    ins: Positions
    outs: Positions

    @property
    def is_kept(self) -> bool:
        return len(self.ins) == len(self.outs) == 1


@record
class ReshapePlan:
    """Squeeze these input positions, transform the groups, broadcast these output positions.

    Where there are no elements, there is nothing to transform: only the broadcasts count.
    """

    groups: tuple[AxisGroup, ...]
    squeezed: Positions = ()
    added: Positions = ()
    is_empty: bool = False


# ------------------------------------------------------------------ analysis
def _divides(a: Scalar, b: Scalar) -> bool:
    """Whether b = a * k provably."""
    return sc.int_value(a) != 0 and sc.int_value(sc.mod(b, a)) == 0


def _walk(ins: Sequence[Scalar], outs: Sequence[Scalar]) -> list[tuple[int, int]]:
    """Return the lengths (inputs, outputs) of the groups found from the left, up to doubt."""
    found: list[tuple[int, int]] = []
    i = j = 0
    while i < len(ins) and j < len(outs):
        have, want = ins[i], outs[j]
        a, b = i + 1, j + 1
        while have != want:
            take_input = _takes_input(have, want)
            if take_input is None or (a >= len(ins) if take_input else b >= len(outs)):
                return found
            if take_input:
                have, a = sc.mul(have, ins[a]), a + 1
            else:
                want, b = sc.mul(want, outs[b]), b + 1
        found.append((a - i, b - j))
        i, j = a, b
    return found


def _takes_input(have: Scalar, want: Scalar) -> bool | None:
    """Whether the input side of an unequal group must grow; None when that is unknown."""
    x, y = sc.int_value(have), sc.int_value(want)
    if x is not None and y is not None:
        return x < y
    if _divides(have, want):
        return True
    return False if _divides(want, have) else None


def group_sizes(ins: Sequence[Scalar], outs: Sequence[Scalar]) -> list[tuple[int, int]] | None:
    """Return the lengths (inputs, outputs) of all groups over sizes without ones.

    None when the middle that both walks leave is not provably one group.
    """
    left = _walk(ins, outs)
    i, j = (sum(n[k] for n in left) for k in range(2))
    rest_in, rest_out = list(ins[i:]), list(outs[j:])
    right = _walk(rest_in[::-1], rest_out[::-1])
    a, b = (sum(n[k] for n in right) for k in range(2))
    middle_in, middle_out = rest_in[: len(rest_in) - a], rest_out[: len(rest_out) - b]
    middle: list[tuple[int, int]] = []
    if middle_in or middle_out:
        if not middle_in or not middle_out:
            return None
        is_single = len(middle_in) == 1 or len(middle_out) == 1
        if not is_single and sc.product(middle_in) != sc.product(middle_out):
            return None
        middle = [(len(middle_in), len(middle_out))]
    return [*left, *middle, *reversed(right)]


def plan_reshape(
    ins: Sequence[Scalar], outs: Sequence[Scalar], is_broadcast: Sequence[bool]
) -> ReshapePlan | None:
    """Return the plan for these sizes, None when it cannot be decided.

    `is_broadcast` says which input axes can be squeezed; a size-1 axis that cannot is merged into a
    neighbouring group.
    """
    big_in = [p for p, s in enumerate(ins) if sc.int_value(s) != 1]
    big_out = [p for p, s in enumerate(outs) if sc.int_value(s) != 1]
    lengths = group_sizes([ins[p] for p in big_in], [outs[p] for p in big_out])
    if lengths is None:
        return None
    groups: list[AxisGroup] = []
    for a, b in lengths:
        groups.append(AxisGroup(tuple(big_in[:a]), tuple(big_out[:b])))
        big_in, big_out = big_in[a:], big_out[b:]
    return _place_ones(groups, (len(ins), len(outs)), is_broadcast)


def _place_ones(
    groups: list[AxisGroup], ranks: tuple[int, int], is_broadcast: Sequence[bool]
) -> ReshapePlan | None:
    """Add the axes of size 1: kept where both sides have one at a boundary, else squeezed,
    broadcast, or merged into a group."""
    placed: list[AxisGroup] = []
    squeezed: list[int] = []
    added: list[int] = []
    loose: list[int] = []
    in_at = out_at = 0
    for group in [*groups, AxisGroup((ranks[0],), (ranks[1],))]:
        ones_in = list(range(in_at, group.ins[0]))
        ones_out = list(range(out_at, group.outs[0]))
        loose += [p for p in ones_in if not is_broadcast[p]]
        ones_in = [p for p in ones_in if is_broadcast[p]]
        both = min(len(ones_in), len(ones_out))
        placed += [AxisGroup((p,), (q,)) for p, q in zip(ones_in, ones_out, strict=False)]
        squeezed += ones_in[both:]
        added += ones_out[both:]
        if group.ins[0] == ranks[0]:
            break
        inside = [p for p in range(group.ins[0], group.ins[-1]) if p not in group.ins]
        squeezed += [p for p in inside if is_broadcast[p]]
        ins = sorted([*group.ins, *(p for p in inside if not is_broadcast[p])])
        added += [q for q in range(group.outs[0], group.outs[-1]) if q not in group.outs]
        placed.append(AxisGroup(tuple(ins), group.outs))
        in_at, out_at = group.ins[-1] + 1, group.outs[-1] + 1
    if loose and not _merge_loose(placed, loose, added):
        return None
    return ReshapePlan(tuple(placed), tuple(sorted(squeezed)), tuple(sorted(added)))


def _merge_loose(placed: list[AxisGroup], loose: list[int], added: list[int]) -> bool:
    """Put size-1 iteration axes into neighbouring groups; False when there is no group."""
    if not placed and added:
        placed.append(AxisGroup((), (added.pop(0),)))
    if not placed:
        return False
    for p in loose:
        after = [k for k, g in enumerate(placed) if g.ins and g.ins[0] > p]
        k = after[0] if after else len(placed) - 1
        placed[k] = AxisGroup(tuple(sorted((*placed[k].ins, p))), placed[k].outs)
    return True


# ------------------------------------------------------------------ domains
def transformed_domain(
    fusion: Fusion,
    root: Sequence[IterDomain],
    groups: Sequence[tuple[Sequence[int], Sequence[Scalar]]],
    *,
    named: Sequence[IterDomain] = (),
) -> TensorDomain:
    """Return the domain that merges and splits root axes as the groups say.

    A group is (root positions, output sizes). `named` gives the logical axes' numbers, where they
    exist already.
    """
    built = DomainBuilder(fusion, root)
    logical: list[IterDomain] = []
    for ins, sizes in groups:
        at = len(logical)
        numbers = [a.number for a in named[at : at + len(sizes)]]
        if len(ins) == len(sizes) == 1:
            logical.append(root[ins[0]])
            continue
        merged = root[ins[0]]
        for p in ins[1:]:
            merged = built.merge(merged, root[p], rfactor=True)
        logical += _split_all(built, merged, sizes, numbers)
    return TensorDomain.of(
        logical, root=root, transforms=built.transforms, between=built.axes.values()
    )


def _split_all(
    built: DomainBuilder, axis: IterDomain, sizes: Sequence[Scalar], numbers: Sequence[int]
) -> list[IterDomain]:
    """Split `axis` from the right into axes of these sizes, under these numbers if given."""

    def settle(made: IterDomain, k: int) -> IterDomain:
        state = _with_size(made, sizes[k])
        return built.restate(made, replace(state, number=numbers[k]) if numbers else state)

    inner_axes: list[IterDomain] = []
    for k in range(len(sizes) - 1, 0, -1):
        axis, inner = built.split(axis, sizes[k], rfactor=True)
        inner_axes.append(settle(inner, k))
    # The quotient is the declared size: the split is exact.
    return [settle(axis, 0), *reversed(inner_axes)]


def _with_size(axis: IterDomain, size: Scalar) -> IterDomain:
    if axis.expanded is not None:
        return replace(axis, expanded=size)
    return axis if axis.is_broadcast else replace(axis, extent=size)


# ------------------------------------------------------------------ the op
def reshape(arg: TensorView, new_shape: Sequence[SizeLike]) -> TensorView:
    """View `arg` with other sizes in the same row-major order; one size may be -1.

    Raises `DefinitionError` when constants show that the element counts differ.
    """
    tv = arg
    fusion = active_fusion()
    ins = [fusion.canonical(a.size) for a in axes_of(tv)]
    outs = _output_sizes(tv, ins, new_shape)
    if any(sc.int_value(s) == 0 for s in (*ins, *outs)):
        return full_tensor(outs, Const(0, tv.dtype()), tv.dtype())
    is_broadcast = [a.is_broadcast for a in axes_of(tv)]
    plan = plan_reshape(ins, outs, is_broadcast)
    return _undecided(tv, outs) if plan is None else apply_plan(tv, plan, outs)


def _output_sizes(
    tv: TensorView, ins: Sequence[Scalar], new_shape: Sequence[SizeLike]
) -> list[Scalar]:
    """Return the canonical output sizes, with -1 inferred."""
    name = "reshape"
    fusion = active_fusion()
    given = [as_extent(s, name, i, lowest=-1) for i, s in enumerate(new_shape)]
    inferred = [i for i, s in enumerate(given) if sc.int_value(s) == -1]
    if len(inferred) > 1:
        raise fail(name, "A maximum of one value of -1 can be specified.")
    outs = [fusion.canonical(s) for s in given]
    if inferred:
        others = sc.product(s for i, s in enumerate(outs) if i != inferred[0])
        if sc.int_value(others) == 0:
            raise fail(name, f"-1 is ambiguous beside a size of 0 for {tv}")
        outs[inferred[0]] = sc.floordiv(sc.product(ins), others)
    have, want = _without_common(ins, outs)
    if have is not None and want is not None and have != want:
        sizes = ", ".join(map(str, outs))
        raise fail(
            name,
            f"Total element counts across view operation must match, got {tv} and sizes [{sizes}]",
        )
    return outs


def _without_common(ins: Sequence[Scalar], outs: Sequence[Scalar]) -> tuple[int | None, int | None]:
    """Return both element counts after cancelling symbols; None for one that keeps symbols."""
    have, want = list(ins), list(outs)
    for size in ins:
        if size in want and sc.int_value(size) != 0:
            want.remove(size)
            have.remove(size)
    return sc.int_value(sc.product(have)), sc.int_value(sc.product(want))


def apply_plan(tv: TensorView, plan: ReshapePlan, outs: Sequence[Scalar]) -> TensorView:
    """Append squeeze, reshape and broadcast as the plan says; where all axes are kept, a reshape
    that changes nothing."""
    fusion = active_fusion()
    source = tv
    if plan.squeezed:
        tv = squeeze_axes(tv, set(plan.squeezed))
    kept = [p for p in range(source.ndim) if p not in plan.squeezed]
    groups = [(tuple(kept.index(p) for p in g.ins), [outs[q] for q in g.outs]) for g in plan.groups]
    axes = axes_of(tv)
    for ins, sizes in groups:
        if len(ins) == len(sizes) == 1:
            declare_extent(fusion, axes[ins[0]].size, sizes[0], f"reshape of {source}")
    if not all(g.is_kept for g in plan.groups) or not (plan.squeezed or plan.added):
        domain = transformed_domain(fusion, clone_axes(tv), groups)
        out = new_output(domain, tv.dtype(), [tv])
        add_op(ReshapeOp(out, tv))
        tv = out
    if plan.added:
        tv = broadcast_tensor(tv, tuple(q in plan.added for q in range(len(outs))))
    return tv


def _undecided(tv: TensorView, outs: Sequence[Scalar]) -> TensorView:
    """Append a reshape whose symbolic output axes are `?` and belong to no input axis yet."""
    fusion = active_fusion()
    if not outs:
        raise fail("reshape", f"to rank 0, but the element count of {tv} is not known to be 1")
    out = new_output(undecided_domain(fusion, tv, outs), tv.dtype(), [tv])
    add_op(ReshapeOp(out, tv))
    return out


def undecided_domain(fusion: Fusion, tv: TensorView, sizes: Sequence[Scalar]) -> TensorDomain:
    """Return the domain of a reshape of `tv` to `sizes` that sizes of inputs decide."""
    root = tuple(fusion.clone_axis(a) for a in axes_of(tv))
    logical = tuple(fusion.new_axis(s, _undecided_kind(s), rfactor=True) for s in sizes)
    return TensorDomain.of(logical, root=root)


def _undecided_kind(size: Scalar) -> IterType:
    value = sc.int_value(size)
    if value is None:
        return IterType.symbolic
    return IterType.broadcast if value == 1 else IterType.iteration
