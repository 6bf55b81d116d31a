"""Lookups along an axis that devices divide: each device reads its own part, then parts are added.

Each device subtracts the first position of its part from the index. Where the index points into the
part of another device, it contributes a zero. So exactly one device contributes an element, and the
sum over devices is the element itself. In the example, d devices divide the V rows of a table, so
each has V/d rows. `first`, the first row of each device, is iota(d) * V/d. DIDx(V) is an axis
divided over devices, and `r` marks the axis over which `sum` adds:

    out [N, H] = embedding_fwd(index [N], table [DIDx(V), H])
      ->  near  [DIDx(d), N]      = index - first          position in the part of a device
          other [DIDx(d), N]      = whether `index` is in the table, but `near` not in the part
          rows  [DIDx(d), N, H]   = take_along_axis(reshape(table) [DIDx(d), V/d, H], near)
          part  [DIDx(d), N, H]   = where(other, -0.0, rows)
          out   [N, H, rDIDx(d)]  = sum(part)              an allreduce or a reduce-scatter

The results are those of the undivided lookup, bit for bit:

- The zero is -0.0 for floats, because x + -0.0 is x for every x, also for -0.0. Values of Bool are
  combined by a maximum, and Float8 values are added in Float.
- An index outside of the table is `other` on no device. Each device then reads an index outside of
  its part, which gives NaN, or 0 in a dtype without NaN, as in the undivided table.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import takewhile
from math import prod
from typing import cast as typing_cast

from fuser.ir.axis_graph import tensor_operands
from fuser.ir.dtypes import FLOAT8, DataType, category
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.ops.lookup import GatherOp, LookupOp, SelectOp
from fuser.ir.ops.nodes import CastOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.types import DEVICE_TYPES
from fuser.ops import factories, indexing
from fuser.ops.building import (
    OperandLike,
    broadcast_tensor,
    cast_tensor,
    convert,
    squeeze_axes,
)
from fuser.ops.elementwise import apply_pointwise
from multidevice.sharding.passes.device_axes import on_own_axis, split_over_devices
from multidevice.sharding.passes.partial_sums import combine_parts
from multidevice.sharding.passes.provenance import record_parts
from multidevice.sharding.placement import (
    Cut,
    Cuts,
    Placement,
    add_cuts,
    axis_cuts,
    copy_like,
    is_plain_broadcast,
    placement,
    spread_axes,
)
from multidevice.sharding.propagation import apply_steps, forward_cuts
from multidevice.sharding.queries import uneven_axes


def mask_divided_lookups(fusion: Fusion) -> None:
    """Rewrites lookups along an axis that devices divide: lookups in their parts, then a sum.

    Before: the table of a lookup may be divided along the looked-up axis. After: it is not, except
    where `_is_gathered` is True or a masked lookup is impossible. These lookups later read a copy
    of the whole table.
    """
    for op in fusion.exprs:
        if isinstance(op, LookupOp) and (cuts := _divisions(op)) and not _is_gathered(op, cuts):
            fusion.replace_expr(op, _masked(op, cuts))


def _divisions(op: LookupOp) -> Cuts:
    """Returns the divisions over devices of the looked-up axis, if they allow a masked lookup;
    otherwise ().

    They do not allow it in these cases:

    - The index is a scalar.
    - Steps of a stream loop divide the axis, too.
    - The table and the result are on different meshes.
    - The axis is a broadcast, which each device has.
    - The devices have parts of unequal sizes.
    """
    axis = op.table.domain.no_reductions[op.axis]
    if axis.number in uneven_axes(op.table):
        return ()
    cuts = axis_cuts(op.table).get(axis.number, ())
    is_local = axis.is_broadcast or isinstance(op, SelectOp)
    is_elsewhere = op.table.mesh != op.out.mesh or any(not c.ptype.is_device for c in cuts)
    return () if is_local or is_elsewhere else cuts


def _is_gathered(op: LookupOp, cuts: Cuts) -> bool:
    """Returns whether each device gets the whole looked-up axis, which devices divide by `cuts`.

    Let the table have t elements and the result r, on d devices. A device sends t (d-1)/d elements
    if the table is gathered. It sends 2 r (d-1)/d elements if the parts of the result are added on
    all devices, or r (d-1)/d if each device needs only its block of the result. The table is
    gathered if

    - all extents are constants, and fewer elements are then sent; and
    - the user has not placed the table. The user's own division is never undone, because it may
      have been chosen for the memory of the devices.

    With symbolic extents, nothing can be compared, and the parts are added.
    """
    if op.table.mesh_is_user_set:
        return False
    canonical = op.table.fusion.canonical
    sizes = [
        [sc.int_value(canonical(a.size)) for a in tv.domain.no_reductions]
        for tv in (op.table, op.out)
    ]
    if any(size is None for mine in sizes for size in mine):
        return False
    table, result = (prod(size or 0 for size in mine) for mine in sizes)
    kept = {c.ptype for mine in placement(op.out, DEVICE_TYPES) for c in mine}
    return table < result * (1 if kept.issuperset(c.ptype for c in cuts) else 2)


def _masked(op: LookupOp, cuts: Cuts) -> list[TensorOp]:
    """Returns the ops that replace one lookup, whose looked-up axis devices divide by `cuts`."""
    fusion, out = op.out.fusion, op.out
    before = fusion.exprs
    with FusionGuard(fusion):
        part = _contribution(op, cuts)
    made = list(fusion.exprs[len(before) :])
    fusion.exprs = before
    _place_part(op, cuts, part)
    _place_aligned(op, cuts, part, made)
    total, dtype = out, part.dtype()
    if dtype is not out.dtype():
        total = copy_like(out, out.mesh, placement(out), dtype=dtype)
    kind = "max" if dtype is DataType.Bool else "add"
    types = [cut.ptype for cut in cuts]
    combine = combine_parts(total, part, types, kind=kind, init=sc.const(0, dtype))
    record_parts(op, op.table, combine, "lookup")
    made.append(combine)
    if total is not out:
        made.append(CastOp(out, total))
    return [new.replace(where=op.where) for new in made]


# ------------------------------------------------------------------ placements
def _placement_of_part(op: LookupOp, cuts: Cuts) -> Placement:
    """Returns how devices and steps divide those axes of a contribution that the result has, too. A
    contribution is what each device computes for the result of the lookup.

    `cuts` divide the looked-up axis; no other axis is divided along their mesh dimensions. An axis
    along which the table is divided keeps this division, so that no device gathers the table. The
    sum of the contributions is divided anew instead, because it is usually smaller than the table.
    Otherwise, the axes are divided like those of the result.
    """
    wanted, whole = placement(op.out), op.whole_axes(op.out)
    busy = {cut.ptype for cut in cuts}
    if any(cut.ptype.is_stream for mine in wanted for cut in mine):
        free = (tuple(cut for cut in mine if cut.ptype not in busy) for mine in wanted)
        return tuple(() if k in whole else mine for k, mine in enumerate(free))
    pairs = zip(op.table_map(), placement(op.table, DEVICE_TYPES), strict=True)
    fixed = {to: mine for to, mine in pairs if to is not None and to not in whole}
    used = busy.union(cut.ptype for mine in fixed.values() for cut in mine)
    found: list[Cuts] = []
    for k, mine in enumerate(wanted):
        kept = fixed.get(k, ())
        rest = mine[len(kept) :] if mine[: len(kept)] == kept and k not in whole else ()
        found.append((*kept, *takewhile(lambda cut: cut.ptype not in used, rest)))
    return tuple(found)


def _place_part(op: LookupOp, cuts: Cuts, part: TensorView) -> None:
    """Divides the contribution `part` over devices. Its first new axes are divided by `cuts`, the
    other axes as `_placement_of_part` says.

    If a stream loop computes an operand of the lookup in steps, the contribution is divided into
    these steps, too.
    """
    out, divided = op.out, range(op.axis, op.axis + len(cuts))
    numbers = [part.domain.no_reductions[k].number for k in divided]
    part.domain = part.domain.map_axes(
        lambda a: replace(a, rfactor=True) if a.number in numbers else a
    )
    kept = [a for a in part.domain.no_reductions if a.number not in numbers]
    for number, cut in zip(numbers, cuts, strict=True):
        add_cuts(part, number, (on_own_axis(cut),))
    for axis, mine in zip(kept, _placement_of_part(op, cuts), strict=True):
        add_cuts(part, axis.number, mine)
    twins = {a.number: b for a, b in zip(out.domain.no_reductions, kept, strict=True)}
    for index, operand in tensor_operands(op):
        found = forward_cuts(op, index, out)
        apply_steps(part, operand, tuple((twins[a.number], mine) for a, mine in found))


def _place_aligned(op: LookupOp, cuts: Cuts, part: TensorView, made: Sequence[TensorOp]) -> None:
    """Divides the results of the ops `made` in the same way as the contribution `part`.

    Only results with the same number of axes as the contribution are divided, unless they are
    divided already. Broadcast axes are not divided.
    """
    wanted = list(placement(part))
    if not op.index.ndim:
        wanted.insert(op.axis + len(cuts), ())
    for tv in (new.out_tensor for new in made):
        if tv.ndim == len(wanted) and not spread_axes(tv):
            for axis, mine in zip(tv.domain.no_reductions, wanted, strict=True):
                if not is_plain_broadcast(axis):
                    add_cuts(tv, axis.number, mine)


# ------------------------------------------------------------------ the contribution of a device
def _contribution(op: LookupOp, cuts: Cuts) -> TensorView:
    """Appends the ops that compute the contribution of each device to the result of a lookup.

    The contribution has the axes of the result. Before the axis `op.axis`, it has one more axis for
    each division in `cuts`, with one index per device. Intermediate tensors have the same axes; an
    axis on which a tensor does not depend is a broadcast axis. If the index has no axes,
    intermediate tensors have one more axis, along which the lookup is made. The contribution lacks
    this axis.
    """
    extent = op.table.fusion.canonical(op.table.domain.no_reductions[op.axis].size)
    size = sc.ceildiv(extent, prod(cut.devices for cut in cuts))
    places = {_place(op, cuts, to) for to in op.index_map() if to is not None}
    index = _aligned(op.index, places, _rank(op, cuts))
    index = typing_cast(TensorView, convert(index, DataType.Int))
    near, stride = index, size
    for k, cut in reversed(list(enumerate(cuts))):
        number = _aligned_parts(_device_numbers(op, cut), {op.axis + k}, index.ndim)
        near = _call("sub", near, _call("mul", number, stride))
        stride = sc.mul(stride, cut.devices)
    is_elsewhere = _call("logical_not", _is_within(near, size))
    other = _call("logical_and", _is_within(index, extent), is_elsewhere)
    near = _call("where", other, 0, near)
    look_up = indexing.gather if isinstance(op, GatherOp) else indexing.take_along_axis
    rows = look_up(_split_table(op, cuts), near, op.axis + len(cuts))
    if rows.dtype() in FLOAT8:
        rows = cast_tensor(rows, DataType.Float)
    part = _call("where", other, _zero(rows.dtype()), rows)
    return part if op.index.ndim else squeeze_axes(part, {op.axis + len(cuts)})


def _rank(op: LookupOp, cuts: Cuts) -> int:
    """Returns the number of axes of all tensors from which a contribution is computed."""
    return op.out.ndim + len(cuts) + (op.index.ndim == 0)


def _place(op: LookupOp, cuts: Cuts, position: int) -> int:
    """Returns the position that an axis of the result has among the axes of the contribution (the
    part of the result that one device computes).

    `position` is the position of the axis in the result. The contribution has one more axis for
    each division in `cuts`. These axes come before the axis `op.axis`.
    """
    return position + (len(cuts) if position >= op.axis else 0)


def _aligned(tv: TensorView, places: Collection[int], rank: int) -> TensorView:
    """Appends a broadcast that gives `tv` `rank` axes; its own axes get the positions `places`."""
    if tv.ndim == rank:
        return tv
    return broadcast_tensor(tv, tuple(place not in places for place in range(rank)))


def _aligned_parts(tv: TensorView, places: Collection[int], rank: int) -> TensorView:
    """Does the same as `_aligned`, and divides the result like `tv`."""
    wide = _aligned(tv, places, rank)
    if wide is not tv:
        axes = [wide.domain.no_reductions[place] for place in sorted(places)]
        for axis, cuts in zip(axes, placement(tv), strict=True):
            add_cuts(wide, axis.number, cuts)
    return wide


def _device_numbers(op: LookupOp, cut: Cut) -> TensorView:
    """Appends an op that gives each device its number along the mesh dimension of `cut`."""
    numbers = factories.iota(cut.devices)
    numbers.mesh = op.out.mesh
    add_cuts(numbers, numbers.domain.logical[0].number, (on_own_axis(cut),))
    return numbers


def _split_table(op: LookupOp, cuts: Cuts) -> TensorView:
    """Appends the ops that split the looked-up axis of the table.

    The new axes are one axis for each division in `cuts`, and one for the positions that each
    device has. The axes that only the index has become broadcasts.
    """
    table = split_over_devices(op.table, {op.axis: cuts})
    shift = op.index.ndim == 0
    kept = (to for to in op.table_map() if to is not None)
    places = {_place(op, cuts, to + shift) for to in kept}
    places.update(range(op.axis, op.axis + len(cuts) + 1))
    return _aligned_parts(table, places, _rank(op, cuts))


def _call(name: str, *operands: OperandLike) -> TensorView:
    return typing_cast(TensorView, apply_pointwise(name, operands))


def _is_within(index: TensorView, size: Scalar) -> TensorView:
    """Appends the ops that compute whether 0 <= index < size."""
    return _call("logical_and", _call("ge", index, 0), _call("lt", index, size))


def _zero(dtype: DataType) -> Scalar:
    """Returns the number that changes no value to which it is added; for Bool, False."""
    zeros = {"bool": False, "int": 0, "float": -0.0, "complex": complex(-0.0, -0.0)}
    return sc.const(zeros[category(dtype)], dtype)
