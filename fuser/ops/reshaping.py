"""Ops that rearrange axes: reshape, broadcast, expand, squeeze, permute; and sizes of a tensor.

The plan of a reshape divides the input axes and the output axes into groups with equal products of
sizes. The groups are searched from both ends, so that leading symbolic axes are not changed:

    [i0, i1, 384] -> [i0, i1, 12, 32]      groups (0)->(0) (1)->(1) (2)->(2 3)

- A group with one input and one output axis needs no op.
- In any other group, the input axes are merged, and the result is split from the right (inner
  splits by the inner sizes).
- Axes of size 1 are squeezed before and broadcast after these steps.
- If sizes cannot be compared symbolically, the output axes are `?` (it is undecided whether they
  are broadcasts of size 1) until `fuser.passes.concretize` knows the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fuser.ir.domain.tensor_domain import DomainBuilder, IterDomain, TensorDomain
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import active_fusion
from fuser.ir.ops.nodes import ExpandOp, LoadStoreOp, ReshapeOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Apply, Const, Scalar
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
    prepend_axes,
    squeeze_axes,
    wrap_dim,
)
from fuser.ops.elementwise import copy_tensor
from fuser.ops.factories import full_tensor
from fuser.support.errors import counted
from fuser.support.record import record

Positions = tuple[int, ...]


@record
class AxisGroup:
    """A part of a reshape: the input axes `ins` become the output axes `outs`.

    Both are positions of consecutive axes, and the products of both lists of sizes are equal.
    """

    ins: Positions
    outs: Positions

    @property
    def is_kept(self) -> bool:
        """Whether one input axis becomes one output axis, so that nothing changes."""
        return len(self.ins) == len(self.outs) == 1


@record
class ReshapePlan:
    """The division of a reshape into simple steps.

    First, the input axes at the positions `squeezed` are removed. Then the input axes of each group
    in `groups` become the output axes of the group, by merges and splits. Last, the output axes at
    the positions `added` are inserted as broadcasts. A tensor without elements (`is_empty`) needs
    only the last step.
    """

    groups: tuple[AxisGroup, ...]
    squeezed: Positions = ()
    added: Positions = ()
    is_empty: bool = False


# ------------------------------------------------------------------ analysis
def _divides(a: Scalar, b: Scalar) -> bool:
    """Returns whether it can be proved that `b` is an integer multiple of `a`."""
    return sc.int_value(a) != 0 and sc.int_value(sc.mod(b, a)) == 0


def _walk(ins: Sequence[Scalar], outs: Sequence[Scalar]) -> list[tuple[int, int]]:
    """Divides the axes of a reshape into groups with equal products of input and output sizes, from
    the left. Returns (number of input axes, number of output axes) of each group.

    Stops before the first group that the symbolic sizes `ins` and `outs` do not decide.
    """
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
    """Returns whether a group of axes of a reshape must be extended by an input axis.

    `have` is the product of the group's input sizes, and `want` the product of its output sizes. If
    they differ, the group is extended by an input axis (True) or by an output axis (False). Returns
    None if the symbolic sizes do not decide this.
    """
    x, y = sc.int_value(have), sc.int_value(want)
    if x is not None and y is not None:
        return x < y
    if _divides(have, want):
        return True
    return False if _divides(want, have) else None


def group_sizes(ins: Sequence[Scalar], outs: Sequence[Scalar]) -> list[tuple[int, int]] | None:
    """Divides the axes of a reshape into groups with equal products of input and output sizes.
    Returns (number of input axes, number of output axes) of each group.

    `ins` and `outs` are the sizes of the axes, without sizes of 1. Groups are searched from the
    left and from the right. The axes that remain in the middle become one group. Returns None if it
    cannot be proved that the products of their input and output sizes are equal.
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
    """Returns how a reshape from sizes `ins` to sizes `outs` is divided into squeezes, merges,
    splits and new axes.

    Returns None if the symbolic sizes do not decide this. `is_broadcast` has a flag per input axis:
    whether it is a broadcast, which can be squeezed. Other axes of size 1 are merged with
    neighbours.
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
    """Returns how a reshape is divided into simple steps, from `groups` of axes whose sizes are not
    1.

    The function decides what happens to the axes of size 1, which are in no group:

    - If input and output both have a broadcast axis of size 1 between the same two groups, the axis
      is kept.
    - Other input axes of size 1 are squeezed if they are broadcasts, and else merged into a group.
    - Other output axes of size 1 are inserted as broadcasts.

    `ranks` is (number of input axes, number of output axes). `is_broadcast` says for each input
    axis whether it is a broadcast. Returns None if an axis can neither be squeezed nor merged.
    """
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
    """Merges the input axes `loose` of a reshape into neighbouring groups of axes, in place in the
    list `placed`. Returns whether this was possible.

    The axes `loose` have size 1 but are not broadcasts, so they cannot be squeezed. If there is no
    group, one of the output axes `added` (new axes of size 1) becomes a group, and is removed from
    `added`. If `added` is empty, too, the result is False.
    """
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
    """Returns the axes of a reshape's result, which merges and splits derive from the axes `root`.

    `groups` has pairs (positions of axes to merge, sizes into which the merged axis is split).
    `named` has existing axes, whose numbers (ids) the new axes get.
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
    """Splits `axis` from the right into axes of these sizes.

    The new axes get the numbers (ids) in `numbers`, or new ids if `numbers` is empty.
    """

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
    """Returns `arg` with other sizes in the same row-major order; one size may be -1.

    Raises:
        DefinitionError: constant sizes show that the numbers of elements differ, or more than one
            size is -1.

    Example: `fd.ops.reshape(x, [-1, 12, 32])` of x [b, s, 384] is [b * s, 12, 32].
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
    """Returns the output sizes of a reshape as scalars, with the inferred size in place of -1.

    Raises `DefinitionError` for more than one -1, and if constant sizes show that the numbers of
    elements differ.
    """
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
            raise fail(
                name,
                f"the size -1 of {tv} cannot be computed, because another size is 0: pass the size",
            )
        outs[inferred[0]] = sc.floordiv(sc.product(ins), others)
    have, want = _without_common(ins, outs)
    if have is not None and want is not None and have != want:
        sizes = ", ".join(map(str, outs))
        raise fail(
            name,
            f"Total element counts across view operation must match, got {tv} and sizes [{sizes}]: "
            f"without the sizes that both have in common, they have {have} and {want} elements",
        )
    return outs


def _without_common(ins: Sequence[Scalar], outs: Sequence[Scalar]) -> tuple[int | None, int | None]:
    """Returns the products of the sizes `ins` and `outs`, without sizes that both have. If the two
    products differ, so do the numbers of elements.

    A product that still has symbols is None.
    """
    have, want = list(ins), list(outs)
    for size in ins:
        if size in want and sc.int_value(size) != 0:
            want.remove(size)
            have.remove(size)
    return sc.int_value(sc.product(have)), sc.int_value(sc.product(want))


def apply_plan(tv: TensorView, plan: ReshapePlan, outs: Sequence[Scalar]) -> TensorView:
    """Adds the squeeze, reshape and broadcast ops into which a reshape is divided (`plan`), and
    returns the result.

    If nothing changes, adds a reshape without effect. `outs` are the sizes of the result.
    """
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
    """Adds a reshape to sizes `outs` for which only the sizes of the program's inputs can decide
    which axes are merged and split. Returns its result.

    Each output axis with a symbolic size is a `?` axis: it is not known yet whether it is a
    broadcast.
    """
    fusion = active_fusion()
    if not outs:
        raise fail(
            "reshape", f"new_shape is [], which is a tensor of 1 element, but {tv} may have several"
        )
    out = new_output(undecided_domain(fusion, tv, outs), tv.dtype(), [tv])
    add_op(ReshapeOp(out, tv))
    return out


def undecided_domain(fusion: Fusion, tv: TensorView, sizes: Sequence[Scalar]) -> TensorDomain:
    """Returns the axes of the result of a reshape of `tv` to `sizes`, without any merges and
    splits.

    Only the sizes of the program's inputs can decide which axes are merged and split.
    """
    root = tuple(fusion.clone_axis(a) for a in axes_of(tv))
    logical = tuple(fusion.new_axis(s, _undecided_kind(s), rfactor=True) for s in sizes)
    return TensorDomain.of(logical, root=root)


def _undecided_kind(size: Scalar) -> IterType:
    value = sc.int_value(size)
    if value is None:
        return IterType.symbolic
    return IterType.broadcast if value == 1 else IterType.iteration


# ----------------------------------------------------------------------
# Op functions that insert, remove or permute axes, and those that return sizes.


def broadcast(arg: TensorView, is_broadcast_dim: Sequence[bool]) -> TensorView:
    """Inserts axes of size 1.

    `is_broadcast_dim` has one flag per output axis: True for a new axis. If no flag is True, `arg`
    itself is returned.

    Raises:
        DefinitionError: the number of False is not the number of axes of `arg`.

    Example: x [n] with [False, True] -> [n, 1].
    """
    tv = arg
    flags = tuple(bool(f) for f in is_broadcast_dim)
    if flags.count(False) != tv.ndim:
        raise fail(
            "broadcast",
            f"is_broadcast_dim must have one False for each axis of {tv} "
            f"({counted(tv.ndim, 'axis')}), got {list(flags)}",
        )
    return broadcast_tensor(tv, flags) if any(flags) else tv


def broadcast_in_dim(
    arg: TensorView, shape: Sequence[SizeLike], broadcast_dims: Sequence[int]
) -> TensorView:
    """Moves input axis i to output position broadcast_dims[i], and expands the result to `shape`.

    Raises:
        DefinitionError: `broadcast_dims` does not have one position per axis of `arg`, an output
            position is repeated, or a size cannot be expanded.

    Example: x [n] with shape [m, n, k] and broadcast_dims [1] -> [m, n, k].
    """
    name = "broadcast_in_dim"
    tv = arg
    if len(broadcast_dims) != tv.ndim:
        raise fail(
            name,
            f"broadcast_dims must have one entry for each axis of {tv} "
            f"({counted(tv.ndim, 'axis')}), but it has {len(broadcast_dims)}: "
            f"{list(broadcast_dims)}",
        )
    if len(shape) < tv.ndim:
        raise fail(
            name,
            f"shape has {counted(len(shape), 'size')}, but the result must have at least the "
            f"{counted(tv.ndim, 'axis')} of {tv}",
        )
    flags = [True] * len(shape)
    for dim in broadcast_dims:
        position = wrap_dim(dim, len(shape), name, tv)
        if not flags[position]:
            raise fail(name, f"output position {dim} is specified more than once.")
        flags[position] = False
    placed = broadcast_tensor(tv, tuple(flags)) if any(flags) else tv
    return expand(placed, shape)


def expand(arg: TensorView, shape: Sequence[SizeLike]) -> TensorView:
    """Expands broadcast axes to the sizes in `shape`.

    - A size of -1 keeps an axis. If `shape` has more sizes than `arg` has axes, new axes are added
      before the first axis.
    - An expanded axis has one element in memory, with stride 0.
    - Any other axis keeps its size, which must equal the size in `shape`. If one of the two sizes
      is symbolic, the two are compared when the program gets its inputs.
    - If nothing is expanded, the result is a copy.

    Raises:
        DefinitionError: `shape` has too few sizes, or a constant size cannot be expanded.
    """
    name = "expand"
    tv = arg
    sizes = [as_extent(s, name, i, lowest=-1) for i, s in enumerate(shape)]
    if len(sizes) < tv.ndim:
        raise fail(
            name,
            f"shape has {counted(len(sizes), 'size')}, but {tv} has "
            f"{counted(tv.ndim, 'axis')}: pass one size for each axis",
        )
    if len(sizes) > tv.ndim:
        tv = prepend_axes(tv, len(sizes) - tv.ndim)
    fusion = active_fusion()
    planned = [_expanded(tv, a, s) for a, s in zip(axes_of(tv), sizes, strict=True)]
    if all(new is old for new, old in zip(planned, axes_of(tv), strict=True)):
        return copy_tensor(tv)
    out = new_output([fusion.clone_axis(a) for a in planned], tv.dtype(), [tv])
    targets = tuple(a.size for a in axes_of(out))
    add_op(ExpandOp(out, tv, targets))
    return out


def _expanded(tv: TensorView, axis: IterDomain, size: Scalar) -> IterDomain:
    """Returns `axis` expanded to `size`; `axis` itself if nothing changes.

    Raises `DefinitionError` if the axis is no broadcast and has another constant size than the
    constant `size`.
    """
    fusion = active_fusion()
    value = sc.int_value(size)
    if value == -1 or size == axis.size:
        return axis
    if axis.kind is IterType.symbolic:
        return replace(axis, extent=size)
    if axis.is_broadcast and axis.expanded is None:
        return replace(axis, expanded=size)
    if _is_quotient(axis.size) and sc.int_value(fusion.canonical(axis.size)) in (None, 1):
        same = fusion.canonical(axis.size) is fusion.canonical(size)
        # A size inferred by a reshape may be 1. Whether it is a broadcast depends on the inputs.
        return axis if same else replace(axis, kind=IterType.symbolic, extent=size)
    if value is not None and isinstance(fusion.canonical(axis.size), Const):
        if sc.int_value(fusion.canonical(axis.size)) != value:
            raise fail(
                "expand",
                f"Invalid expand size, {value}, for {axis} of {tv}: expected {axis.size} or -1, "
                "because only an axis of size 1 can be expanded",
            )
        return axis
    declare_extent(fusion, axis.size, size, f"expand: {tv}")
    return axis


def _is_quotient(size: Scalar) -> bool:
    """Returns whether a size is a quotient, as a reshape infers it for -1. Such a size may turn out
    to be 1.
    """
    return isinstance(size, Apply) and size.op in ("/", "floorDiv")


def squeeze(arg: TensorView, dims: Sequence[int], squeeze_expanded: bool = False) -> TensorView:
    """Removes the axes `dims`, which must be broadcast axes.

    Expanded axes are removed only with `squeeze_expanded`.

    Raises:
        DefinitionError: an axis does not exist, is not a broadcast, or is expanded.

    Example: x [n, 1] with [1] -> [n].
    """
    tv = arg
    axes = axes_of(tv)
    if not axes and list(dims):
        raise fail("squeeze", f"dims are {list(dims)}, but {tv} has no axes")
    gone = {wrap_dim(d, tv.ndim, "squeeze", tv) for d in dims}
    if not gone:
        return copy_tensor(tv)
    for d in sorted(gone):
        if axes[d].kind not in (IterType.broadcast, IterType.symbolic):
            raise fail(
                "squeeze", f"Can not squeeze non-broadcasting dimension(s). Axis {axes[d]} of {tv}"
            )
        if axes[d].expanded is not None and not squeeze_expanded:
            raise fail(
                "squeeze",
                f"Refusing to squeeze expanded IterDomain {axes[d]} of {tv}: pass "
                "squeeze_expanded=True, and the result has one of its equal elements",
            )
    return squeeze_axes(tv, gone)


def permute(arg: TensorView, dims: Sequence[int]) -> TensorView:
    """Reorders the axes: output axis i is input axis dims[i]. The memory is not reordered.

    Raises:
        DefinitionError: `dims` is not a permutation of the axes.

    Example: x [a, b, c] with [2, 0, 1] -> [c, a, b].
    """
    tv = arg
    if tv.ndim == 0 or not dims:
        return copy_tensor(tv)
    order = [wrap_dim(d, tv.ndim, "permute", tv) for d in dims]
    if sorted(order) != list(range(tv.ndim)):
        raise fail(
            "permute",
            f"dims must contain each axis of {tv} once ({counted(tv.ndim, 'axis')}), got "
            f"{list(dims)}",
        )
    root = tuple(clone_axes(tv))
    logical = tuple(root[d] for d in order)
    domain = TensorDomain.of(logical, root=root)
    out = new_output(domain, tv.dtype(), [tv])
    add_op(LoadStoreOp(out, tv))
    return out


def stride_order(arg: TensorView, stride_order: Sequence[int]) -> TensorView:
    """Copies a tensor into another memory order.

    Entry i of `stride_order` is the position of axis i in the order of strides: 0 for the axis with
    the smallest stride. The copy is contiguous.

    Raises:
        DefinitionError: `stride_order` is not a permutation of 0 to rank - 1.

    Example: [2, 1, 0] is row-major for three axes.
    """
    tv = arg
    out = copy_tensor(tv)
    if not stride_order:
        return out
    out.set_allocation_domain(ordered_axes(axes_of(out), stride_order, "stride_order"), True)
    return out


def ordered_axes(
    axes: Sequence[IterDomain], stride_order: Sequence[int], op_name: str
) -> list[IterDomain]:
    """Returns `axes`, the axes of a tensor, in memory order, outermost axis first.

    Entry i of `stride_order` is 0 if axis i has the smallest stride, 1 for the next, and so on.
    Raises `DefinitionError` for a wrong length, entries out of range and duplicates.
    """
    rank = len(axes)
    if len(stride_order) != rank:
        raise fail(
            op_name,
            f"Length of stride_order argument ({len(stride_order)}) must be zero or match that of "
            f"shape argument ({rank})",
        )
    text = "defineTensor stride_order argument is out of range, expects entries in"
    for entry in stride_order:
        if not 0 <= entry < rank:
            raise fail(op_name, f"{text} [0, {rank}), got {entry}")
    if len(set(stride_order)) != rank:
        found = list(stride_order)
        raise fail(op_name, f"defineTensor got duplicated stride_order entries: {found}")
    placed = {rank - 1 - entry: axis for axis, entry in zip(axes, stride_order, strict=True)}
    return [placed[i] for i in range(rank)]


def size(arg: TensorView, dim: int) -> Scalar:
    """Returns the size of axis `dim` as a scalar; for an expanded axis, the expanded size."""
    return arg.size(dim)


def shape(arg: TensorView, /) -> list[Scalar]:
    """Returns the sizes of all axes as scalars; for an expanded axis, the expanded size."""
    return arg.shape()
