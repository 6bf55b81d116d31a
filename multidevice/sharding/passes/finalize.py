"""Final domains: writes device axes into allocation domains and puts them first in loop domains.

The allocation domain has the axes in memory order; the loop domain has the axes after all splits.
Before: divisions over devices and steps are splits in loop domains only, and allocation domains
describe whole tensors. After: every tensor that is divided has an allocation domain with its device
axes. If each step of a loop on the host allocates its own memory, the allocation domain also has
the axis of the steps (the stream axis). Every loop domain is `[stream?, DIDz?, DIDy?, DIDx?,
serial...]`, where `?` marks axes that may be missing. Segmentation and host lowering rely on these
allocation domains and on this order of the loop domains.

In the example, d devices divide N, and `i` marks axes that are not reduced:

    w [DIDx{d}, N/d, K], no allocation domain  ->  allocation (iDIDx{d}, iN/d, iK), contiguous
"""

from __future__ import annotations

from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.domain.tensor_domain import IterDomain, numbers
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.memory_layout import is_contiguous, memory_order
from fuser.ir.naming import in_ir, tensor_words
from fuser.ir.types import DEVICE_TYPES, STREAM_TYPES
from fuser.support.errors import ShardingError, user_code
from multidevice.sharding.placement import keep_cuts, spread_axes
from multidevice.sharding.queries import has_streams
from multidevice.sharding.reshard import communicates
from multidevice.sharding.streams import allocated_per_step, slice_per_loop

# Outermost first. Axes of other types follow, in their order.
_RANK = {p: k for k, p in enumerate((*STREAM_TYPES, *reversed(DEVICE_TYPES)))}


def finalize_domains(fusion: Fusion) -> None:
    """Completes the allocation domain of each tensor for its devices, and sorts its loop domain.

    The allocation domain has the axes in memory order; now it also describes the part that one
    device stores. The loop domain has the axes after all splits.

    Raises:
        ShardingError: a tensor has no mesh and the fusion has several, or an operand or result of a
            collective is not contiguous.
    """
    complete_meshes(fusion)
    per_step: set[TensorView] = set()
    if has_streams(fusion):
        slice_per_loop(fusion)
        per_step = allocated_per_step(fusion)
    for tv in fusion.tensors():
        shard_allocation(tv, per_step=tv in per_step)
        parallel_axes_to_front(tv)
    for op in fusion.exprs:
        if not communicates(op):
            continue
        for tv in (op.inputs[0], op.out_tensor):
            if not is_contiguous(tv):
                raise ShardingError(
                    "Resharding expression must have contiguous inputs and outputs: "
                    f"{tensor_words(tv)} is not contiguous, in {op.name}: declare it contiguous"
                    f"{user_code(op.where)}{in_ir(op)}"
                )


def complete_meshes(fusion: Fusion) -> None:
    """Gives every tensor without a mesh the only mesh of the fusion; such a tensor is replicated.

    Raises `ShardingError` if the fusion has several meshes.
    """
    meshes: dict[DeviceMesh, TensorView] = {}
    for tv in fusion.tensors():
        if tv.mesh is not None:
            meshes.setdefault(tv.mesh, tv)
    if not meshes:
        return
    for tv in fusion.tensors():
        if tv.mesh is None and not tv.is_cpu_scalar:
            if len(meshes) > 1:
                found = ", ".join(f"{mesh} ({of.label})" for mesh, of in meshes.items())
                raise ShardingError(
                    "Cannot have some TensorViews with device mesh and some without: "
                    f"{tensor_words(tv)} has no mesh, and other tensors have {found}: call "
                    f"set_device_mesh{user_code(tv.user_line())}{in_ir(tv)}"
                )
            tv.mesh = next(iter(meshes))


def shard_allocation(tv: TensorView, *, per_step: bool) -> None:
    """Describes in the allocation domain of a tensor (its axes in memory order) the part that one
    device stores.

    Each axis is replaced by the parts into which divisions over devices split it, in the same
    position, so that the memory order stays. If `per_step` is True, each step of a stream loop
    allocates memory for one block only, so divisions into steps are included. Contiguity is kept,
    too.
    """
    if not spread_axes(tv):
        return
    domain = tv.domain
    logical = domain.no_reductions
    allocation: list[IterDomain] = []
    contiguity: list[bool | None] = []
    for position, flag in memory_order(tv):
        parts = _parts(tv, logical[position], with_stream=per_step)
        allocation += parts
        # The distance between blocks of a strided axis follows from the stride of its elements; the
        # blocks themselves are consecutive.
        contiguity += [None if flag is None else True] * (len(parts) - 1) + [flag]
    reductions = [
        a
        for root in domain.logical
        if root.is_reduction()
        for a in _parts(tv, root, with_stream=False)
    ]
    made = domain.with_allocation(
        numbers((*allocation, *reductions)), (*contiguity, *(None for _ in reductions))
    )
    tv.domain = keep_cuts(domain, made)


def _parts(tv: TensorView, axis: IterDomain, *, with_stream: bool) -> list[IterDomain]:
    """Returns the parts into which a logical axis is split over devices, outermost first.

    The last entry is the axis of the elements that one device has. If `with_stream` is True, splits
    into the steps of a loop on the host are included.
    """
    parts: list[IterDomain] = []
    axes = tv.domain.axes
    while True:
        split = tv.domain.splits.get(axis.number)
        outer = None if split is None else tv.domain.rotated(split.outer)
        is_kept = outer is not None and (outer.is_device or (outer.is_stream and with_stream))
        if split is None or outer is None or not is_kept:
            return [*parts, axis]
        parts.append(outer)
        axis = axes[split.inner]


def parallel_axes_to_front(tv: TensorView) -> None:
    """Sorts the loop axes of a tensor: stream, mesh_z, mesh_y, mesh_x, then the others in present
    order.
    """
    loop = numbers(sorted(tv.domain.loop, key=lambda a: _RANK.get(a.ptype, len(_RANK))))
    if loop != tv.domain.loop_numbers:
        tv.domain = keep_cuts(tv.domain, tv.domain.with_loop(loop))
