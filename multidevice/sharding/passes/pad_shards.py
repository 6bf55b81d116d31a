"""Uneven shards: axes that devices cannot divide evenly are padded, so that all shards are equal.

d devices divide an axis of N elements into blocks of ceil(N/d) elements, as torch's DTensor does.
The last blocks may be shorter, or empty. This pass pads such an axis to d * ceil(N/d) elements
wherever it is divided; the whole axis then begins with the N elements of the tensor. Where the axis
is not divided, it keeps N elements. In the examples, 2 devices divide 7 elements, so that each has
4 (DIDx{2}, 4):

    y [7] = set(x [DIDx{2}, 4])        ->   z [8] = set(x [DIDx{2}, 4])          an allgather
                                            y [7] = slice(z, 0:7)
    y [DIDx{2}, 4] = set(x [7])        ->   z [8] = pad(x)
                                            y [DIDx{2}, 4] = set(z)              a local slice
    s [] = sum(x [DIDx{2}, 4])         ->   m = where([0, 1, .., 7] < 7, x, 0)
                                            s [] = sum(m)

Elements of the padding may have any value, also NaN. So an op that sums over a padded axis replaces
them first. All later stages handle shards of equal size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fuser.ir.axis_graph import mapped_axes, tensor_operands
from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.domain.tensor_domain import IterDomain, Resize, TensorDomain
from fuser.ir.dtypes import HALF_LIKE, DataType
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.naming import axis_words, in_ir
from fuser.ir.ops import scan_ops
from fuser.ir.ops.nodes import (
    BinaryOp,
    BroadcastOp,
    CastOp,
    CatOp,
    Contraction,
    ExpandOp,
    FullOp,
    IotaOp,
    LoadStoreOp,
    PadOp,
    ReductionOp,
    ReshapeOp,
    SliceOp,
    SqueezeOp,
    TernaryOp,
    UnaryOp,
    WelfordOp,
)
from fuser.ir.scalar import constructors as sc
from fuser.ir.types import IterType, ParallelType
from fuser.ops.reduction_table import REDUCTIONS
from fuser.ops.resize import resized_domain
from fuser.passes.view_ops import is_copy
from fuser.support.errors import ShardingError, padding_words, user_code
from multidevice.sharding.placement import (
    Cut,
    add_cuts,
    copy_like,
    cut_line,
    placement,
)
from multidevice.sharding.queries import (
    UnevenAxis,
    check_heads_of_keys,
    has_streams,
    uneven_axes,
)
from multidevice.sharding.reshard import replace_operand

# Ops that compute an element of the result from the elements at the same position along each axis
# that devices divide. Elements of the padding then have no effect on other elements.
_POSITIONWISE = (
    UnaryOp,
    BinaryOp,
    TernaryOp,
    CastOp,
    LoadStoreOp,
    BroadcastOp,
    SqueezeOp,
    ExpandOp,
    FullOp,
    ReductionOp,
    WelfordOp,
    Contraction,
    SliceOp,
    PadOp,
    CatOp,
    ReshapeOp,
    scan_ops.AlongAxisOp,
)


def types_to_gather(op: TensorOp) -> set[ParallelType]:
    """Returns the mesh dimensions that unevenly divide an axis of an operand or result of `op`, if
    `op` does not ignore padding.

    The op must then be computed whole along these dimensions. A reshape ignores the padding of axes
    that it neither splits nor merges; other ops ignore it on all axes or on none.
    """
    tensors = (*(tv for _, tv in tensor_operands(op)), *op.outputs)
    uneven = [(tv, number, axis) for tv in tensors for number, axis in uneven_axes(tv).items()]
    if not isinstance(op, _POSITIONWISE):
        return {axis.ptype for _, _, axis in uneven}
    if not isinstance(op, ReshapeOp):
        return set()
    # A reshape keeps the blocks of an axis that it neither splits nor merges.
    kept = {c.number for c in op.out.domain.root} & {c.number for c in op.out.domain.logical}
    kept |= {p.number for p, c in mapped_axes(op, 0) if c.number in kept}
    return {axis.ptype for _, number, axis in uneven if number not in kept}


def pad_uneven_shards(fusion: Fusion) -> None:
    """Pads each axis that devices cannot divide evenly, in each tensor in which they divide it.

    Before: every op is local, or a copy or sum that changes the division over devices. After: also
    all extents that devices divide are divisible.

    Raises:
        ShardingError: an axis is divided unevenly in a program with a stream loop, or in a tensor
            that updates an input in place.
    """
    padded = {tv: axes for tv in fusion.tensors() if (axes := uneven_axes(tv))}
    if not padded:
        return
    _check(fusion, padded)
    for tv, axes in padded.items():
        tv.domain = _with_extents(tv.domain, {n: axis.padded for n, axis in axes.items()})
    pass_ = _Padder(fusion, padded)
    for op in fusion.exprs:
        if is_copy(op):
            pass_.pad_copy(op)
        else:
            pass_.pad_operands(op)


def _check(fusion: Fusion, padded: Mapping[TensorView, Mapping[int, UnevenAxis]]) -> None:
    """Raises `ShardingError` for uneven axes that this pass cannot pad."""
    updates = {tv: alias for alias in fusion.aliases for tv in (alias.out, alias.into)}
    for tv, axes in padded.items():
        for number, axis in axes.items():
            logical, cut = tv.domain.axes[number], Cut(axis.ptype, axis.devices)
            check_heads_of_keys(tv, logical, axis.extent, cut)
            what = (
                f"{axis_words(tv, logical)} has {axis.extent} elements, which the "
                f"{axis.devices} devices of {tv.mesh} cannot share equally"
            )
            line = f"{user_code(cut_line(tv, axis.ptype))}{in_ir(tv)}"
            advice = padding_words(axis.extent, axis.devices)
            if has_streams(fusion):
                raise ShardingError(
                    f"{what}: uneven shards are not supported in a program with stream "
                    f"axes{advice}{line}"
                )
            if tv in updates:
                raise ShardingError(
                    f"{what}: an input with uneven shards cannot be updated in place{advice}, or "
                    f"return the new value as an output{line}"
                )


def _with_extents(domain: TensorDomain, extents: Mapping[int, int]) -> TensorDomain:
    """Returns `domain` with other extents of the axes whose numbers are the keys of `extents`."""

    def resized(axis: IterDomain) -> IterDomain:
        if axis.number not in extents:
            return axis
        extent = sc.const(extents[axis.number])
        return axis.having(expanded=extent) if axis.is_broadcast else axis.having(extent=extent)

    return domain.map_axes(resized)


class _Padder:
    """Makes the operands and the result of each op agree on which axes are padded.

    `padded` maps each tensor that has padded axes to these axes, by axis number.
    """

    def __init__(
        self, fusion: Fusion, padded: Mapping[TensorView, Mapping[int, UnevenAxis]]
    ) -> None:
        self._fusion, self._padded = fusion, dict(padded)
        # Tensors that are True for elements of the axis, and False for elements of the padding.
        self._masks: dict[tuple[DeviceMesh | None, UnevenAxis], TensorView] = {}

    # -------------------------------------------------------------- copies
    def pad_copy(self, op: LoadStoreOp) -> None:
        """Pads the axes that a copy begins to divide, and removes the padding of axes that it
        gathers. In both cases, devices cannot divide the axis evenly.
        """
        inp, out = op.inp, op.out
        before, after = self._by_position(inp), self._by_position(out)
        if before == after:
            return
        both = before.keys() & after.keys()
        pairs = zip(placement(inp), placement(out), strict=True)
        divided = {p for p, (have, want) in enumerate(pairs) if have and want}
        if changed := {p for p in divided if _padding(before, p) != _padding(after, p)}:
            between = self._gathered(inp, changed)
            first = LoadStoreOp(between, inp).replace(where=op.where)
            second = op.replace(inp=between)
            self._fusion.replace_expr(op, [first, second])
            self.pad_copy(first)
            self.pad_copy(second)
            return
        more = {p: axis for p, axis in after.items() if p not in both}
        fewer = {p: axis for p, axis in before.items() if p not in both}
        ops: list[TensorOp] = []
        if more:
            inp = self._pad(inp, more, ops)
        if fewer:
            whole = copy_like(out, out.mesh, placement(out))
            numbers = [a.number for a in whole.domain.no_reductions]
            extents = {numbers[p]: axis.padded for p, axis in fewer.items()}
            whole.domain = _with_extents(whole.domain, extents)
            ops += [op.replace(inp=inp, out=whole), _slice(out, whole, fewer)]
        else:
            ops.append(op.replace(inp=inp))
        self._fusion.replace_expr(op, [made.replace(where=op.where) for made in ops])

    def _by_position(self, tv: TensorView) -> dict[int, UnevenAxis]:
        axes = self._padded.get(tv, {})
        return {
            p: axes[a.number] for p, a in enumerate(tv.domain.no_reductions) if a.number in axes
        }

    def _gathered(self, tv: TensorView, positions: Collection[int]) -> TensorView:
        """Creates a tensor like `tv` in which the axes at `positions` are not divided."""
        cuts = tuple(() if p in positions else c for p, c in enumerate(placement(tv)))
        made = copy_like(tv, tv.mesh, cuts)
        numbers = [a.number for a in made.domain.no_reductions]
        axes = self._by_position(tv)
        kept = {numbers[p]: axes[p].extent for p in positions if p in axes}
        made.domain = _with_extents(made.domain, kept)
        self._padded[made] = {numbers[p]: axis for p, axis in axes.items() if p not in positions}
        return made

    def _pad(
        self, tv: TensorView, axes: Mapping[int, UnevenAxis], ops: list[TensorOp]
    ) -> TensorView:
        """Appends a pad of the axes at the positions `axes` to `ops`; returns the padded tensor."""
        added = [axes[p].padded - axes[p].extent if p in axes else 0 for p in range(tv.ndim)]
        widths = [(sc.ZERO, sc.const(n)) for n in added]
        root = [self._fusion.clone_axis(a) for a in tv.domain.no_reductions]
        domain = resized_domain(self._fusion, root, widths)
        out = self._fusion.new_tensor(domain, tv.dtype(), mesh=tv.mesh)
        for axis, cuts in zip(domain.logical, placement(tv), strict=True):
            add_cuts(out, axis.number, cuts)
        ops.append(PadOp(out, tv, tuple(w for pair in widths for w in pair)))
        return out

    # -------------------------------------------------------------- other ops
    def pad_operands(self, op: TensorOp) -> None:
        """Pads operands of a local op or of a sum over devices where its result is padded.

        Where the op reduces a padded axis, the padding is replaced by the identity of the
        reduction.
        """
        ops: list[TensorOp] = []
        made = op
        for index, operand in tensor_operands(op):
            reduced: dict[int, UnevenAxis] = {}
            missing: dict[int, UnevenAxis] = {}
            for out in op.outputs:
                self._compare(op, index, out, reduced, missing)
            given = operand
            if reduced:
                given = self._masked(op, given, reduced, ops)
            if missing:
                given = self._pad(given, missing, ops)
            if given is not operand:
                made = replace_operand(made, index, given)
        made = _with_sizes(made)
        if made is not op:
            self._fusion.replace_expr(op, [x.replace(where=op.where) for x in (*ops, made)])

    def _compare(
        self,
        op: TensorOp,
        index: int,
        out: TensorView,
        reduced: dict[int, UnevenAxis],
        missing: dict[int, UnevenAxis],
    ) -> None:
        """Finds the axes of operand `index` that are padded and reduced, and those that lack the
        padding that `out` has. Adds both to `reduced` and `missing`, by position.
        """
        operand = op.inputs[index]
        have, want = self._padded.get(operand, {}), self._padded.get(out, {})
        position = {a.number: p for p, a in enumerate(operand.domain.no_reductions)}
        left = set(have)
        for mine, root in mapped_axes(op, index, out):
            left.discard(mine.number)
            axis = have.get(mine.number)
            if root.is_reduction() and axis is not None:
                reduced[position[mine.number]] = axis
                out.domain = _with_extents(out.domain, {root.number: axis.padded})
            elif axis is None and root.number in want and not mine.is_broadcast:
                missing[position[mine.number]] = want[root.number]
            else:
                assert axis is None or want.get(root.number) == axis, (
                    f"{op}: {mine} and {root} are not padded alike"
                )
        assert not left, f"{op} ignores padded axes of {operand}"

    def _masked(
        self,
        op: TensorOp,
        tv: TensorView,
        axes: Mapping[int, UnevenAxis],
        ops: list[TensorOp],
    ) -> TensorView:
        """Appends ops that replace the padding of `tv` by the identity of the reduction `op`.

        `axes` has the padded axes that `op` reduces, by position. Returns the new tensor.
        """
        kind = op.kind if isinstance(op, ReductionOp) else "add"
        narrow = tv.dtype() if tv.dtype() in HALF_LIKE else None
        for position, axis in axes.items():
            value = tv
            if narrow is not None:
                value = copy_like(tv, tv.mesh, placement(tv), dtype=DataType.Float)
                ops.append(CastOp(value, tv))
            mask = self._broadcast(
                self._mask(tv.mesh, axis, placement(tv)[position][0]), tv, position, ops
            )
            kept = copy_like(value, value.mesh, placement(value))
            identity = sc.Const(REDUCTIONS[kind].identity(value.dtype()), value.dtype())
            ops.append(TernaryOp(kept, mask, value, identity, kind="where"))
            tv = kept
            if narrow is not None:
                tv = copy_like(kept, kept.mesh, placement(kept), dtype=narrow)
                ops.append(CastOp(tv, kept))
        return tv

    def _broadcast(
        self, mask: TensorView, like: TensorView, position: int, ops: list[TensorOp]
    ) -> TensorView:
        """Appends a broadcast of the vector `mask` to the axes of `like`; returns the result."""
        if like.ndim == 1:
            return mask
        flags = tuple(p != position for p in range(like.ndim))
        (only,) = mask.domain.logical
        axes = [
            self._fusion.new_axis(sc.ONE, IterType.broadcast)
            if new
            else self._fusion.clone_axis(only)
            for new in flags
        ]
        out = self._fusion.new_tensor(axes, DataType.Bool, mesh=mask.mesh)
        add_cuts(out, axes[position].number, placement(mask)[0])
        ops.append(BroadcastOp(out, mask, flags=flags))
        return out

    def _mask(self, mesh: DeviceMesh | None, axis: UnevenAxis, cut: Cut) -> TensorView:
        """Returns a vector that is True for elements of the axis and False for its padding.

        The vector is divided by `cut`. All devices compute it whole, and keep their block.
        """
        known = self._masks.get((mesh, axis))
        if known is not None:
            return known
        fusion = self._fusion

        def vector(dtype: DataType) -> TensorView:
            return fusion.new_tensor([fusion.new_axis(length)], dtype, mesh=mesh)

        length = sc.const(axis.padded)
        index, whole, mask = vector(DataType.Int), vector(DataType.Bool), vector(DataType.Bool)
        add_cuts(mask, mask.domain.logical[0].number, (cut,))
        extent = sc.Const(axis.extent, DataType.Int)
        start, step = sc.Const(0, DataType.Int), sc.Const(1, DataType.Int)
        fusion.insert_after(
            None,
            [
                IotaOp(index, length, start, step),
                BinaryOp(whole, index, extent, kind="lt"),
                LoadStoreOp(mask, whole),
            ],
        )
        self._masks[mesh, axis] = mask
        return mask


def _padding(axes: Mapping[int, UnevenAxis], position: int) -> int:
    """Returns the number of elements that are added to an axis; 0 if it is divided evenly."""
    return axes[position].padded - axes[position].extent if position in axes else 0


def _slice(out: TensorView, inp: TensorView, axes: Mapping[int, UnevenAxis]) -> TensorOp:
    """Returns the op that computes `out` as `inp` without padding along the axes at the positions
    `axes`.
    """
    fusion, domain = out.fusion, out.domain.without_root()
    logical = domain.no_reductions
    root = [
        fusion.clone_axis(inp.domain.no_reductions[p]) if p in axes else a
        for p, a in enumerate(logical)
    ]
    resizes = [
        Resize(root[p].number, logical[p].number, sc.ZERO, sc.const(axis.extent - axis.padded))
        for p, axis in axes.items()
    ]
    derived = [logical[p].having(rfactor=True) for p in axes]
    out.domain = domain.having(
        root=[a.number for a in root],
        transforms=(*resizes, *domain.transforms),
        axes=(*(root[p] for p in axes), *derived),
    )
    stops = [sc.const(axes[p].extent) if p in axes else a.size for p, a in enumerate(logical)]
    return SliceOp(out, inp, SliceOp.ranges_of([sc.ZERO] * len(logical), stops))


def _with_sizes(op: TensorOp) -> TensorOp:
    """Returns `op` with the sizes of its result as operands, if it has such operands.

    A slice of a padded axis keeps all its elements, so it ends at the extent of the result.
    """
    sizes = tuple(a.size for a in op.out_tensor.domain.no_reductions)
    match op:
        case FullOp() | ExpandOp():
            return op if op.shape == sizes else op.replace(shape=sizes)
        case SliceOp():
            root, logical = op.out.domain.maybe_root, op.out.domain.logical
            stops = tuple(
                r.size if r.number == axis.number else stop
                for r, axis, stop in zip(root, logical, op.stops, strict=True)
            )
            return (
                op if stops == op.stops else op.replace(ranges=SliceOp.ranges_of(op.starts, stops))
            )
        case _:
            return op
