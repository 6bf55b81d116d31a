"""Device axes: axes whose index is the number of a device.

Rewrites of ops along a divided axis use them. The parts that devices compute then differ along an
axis of their own, which a sum over devices reduces:

    x [DIDx(N), K]   ->   r [DIDx(d), N/d, K] = reshape(x)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from fuser.ir.fusion import TensorView
from fuser.ir.ops.nodes import ReshapeOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar
from fuser.ops.building import add_op
from fuser.ops.reshaping import transformed_domain
from multidevice.sharding.placement import Cut, Cuts, add_cuts, placement


def split_over_devices(tv: TensorView, divisions: Mapping[int, Cuts]) -> TensorView:
    """Appends a reshape that splits axes of `tv`, which devices divide, into device axes.

    `divisions` has the divisions of the axes that are split, by the positions of these axes. Such
    an axis becomes one device axis for each division, outermost first, and one axis for the indices
    on a device. The result is divided like `tv`; no data is moved.
    """
    fusion, have = tv.fusion, placement(tv)
    roots = [fusion.clone_axis(a) for a in tv.domain.no_reductions]
    groups: list[tuple[list[int], list[Scalar]]] = []
    wanted: list[Cuts] = []
    for k, axis in enumerate(roots):
        cuts = divisions.get(k, ())
        counts: list[Scalar] = [sc.const(cut.devices) for cut in cuts]
        size = fusion.canonical(axis.size)
        if cuts:
            size = sc.ceildiv(size, prod(cut.devices for cut in cuts))
        groups.append(([k], [*counts, size]))
        wanted += [(on_own_axis(cut),) for cut in cuts]
        wanted.append(() if cuts else have[k])
    made = fusion.new_tensor(transformed_domain(fusion, roots, groups), tv.dtype(), mesh=tv.mesh)
    for axis, cuts in zip(made.domain.logical, wanted, strict=True):
        add_cuts(made, axis.number, cuts)
    add_op(ReshapeOp(made, tv))
    return made


def on_own_axis(cut: Cut) -> Cut:
    """Returns the division `cut` for a device axis, of which each device has one index."""
    return replace(cut, whole=True)
