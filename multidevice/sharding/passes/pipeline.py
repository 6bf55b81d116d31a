"""The list of passes that shard a fusion, in order; the fusion is verified after each pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.memory_layout import memory_order
from fuser.ir.ops.nodes import Reshard
from fuser.ir.types import DEVICE_TYPES, ParallelType
from fuser.ir.verify import verify_fusion
from fuser.passes.fusion_passes import write_instead
from fuser.passes.infer_layouts import infer_layouts
from multidevice.sharding.passes.communication_layout import communicated, lay_out_communication
from multidevice.sharding.passes.decompose import complete_steps, decompose_reshardings
from multidevice.sharding.passes.finalize import complete_meshes, finalize_domains
from multidevice.sharding.passes.merged_streams import unmerge_streams
from multidevice.sharding.passes.provenance import (
    complete_origins,
    record_propagation,
    record_reshardings,
)
from multidevice.sharding.placement import (
    add_cuts,
    axis_cuts,
    copy_like,
    cut_origin,
    is_plain_broadcast,
    placement,
    spread_axes,
    stream_axis_of,
    stream_cuts,
    unparallelize,
)
from multidevice.sharding.propagation import Fact, propagate_shardings, spread_reductions
from multidevice.sharding.queries import (
    Sharding,
    check_annotations,
    check_dropout,
    check_shared_keys,
    check_swizzles,
    has_mesh,
    has_streams,
    sharding_of,
)
from multidevice.sharding.reshard import Copies, communicates, is_step_slice
from multidevice.sharding.streams import drop_steps_of_devices, keep_computable_streams


@dataclass(frozen=True)
class ShardingResult:
    """The result of the sharding passes on a fusion.

    - `facts`: for each tensor, the reasons for its mesh and for the division of its axes over
      devices. Tensors that the user annotated have none.
    - `outputs`: the sharding of each output of the fusion; empty if no tensor has a mesh. Outputs
      that are written into an input, and are not returned to the user, are included.
    - `communications`: the ops that communicate, in program order.
    """

    facts: Mapping[TensorView, tuple[Fact, ...]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    outputs: tuple[Sharding | None, ...] = ()
    communications: tuple[Reshard, ...] = ()


def drop_unit_axes(fusion: Fusion) -> None:
    """Removes the parallel type from axes that are divided over a mesh dimension with one device.

    With one device, such an axis is not divided and needs no communication. Without this pass,
    there would be collectives among one rank.
    """
    for tv in fusion.tensors():
        mesh = tv.mesh
        if mesh is None:
            continue
        if any(a.is_device and mesh.size_of(a.ptype) == 1 for a in tv.domain.allocation):
            _allocate_whole(tv)
        for number, cuts in axis_cuts(tv).items():
            kept = tuple(c for c in cuts if not (c.ptype.is_device and c.count == 1))
            if kept and kept != cuts:
                # Cuts inside the removed one are made again, without it.
                here = [a for a in spread_axes(tv) if cut_origin(tv, a)[0] == number]
                unparallelize(tv, lambda a, here=here: a in here)
                add_cuts(tv, number, kept)
        unparallelize(tv, lambda a, mesh=mesh: a.is_device and mesh.size_of(a.ptype) == 1)


def _allocate_whole(tv: TensorView) -> None:
    """Replaces the parts of divided axes in a tensor's allocation domain by whole axes, in the same
    order.

    The allocation domain has the axes in memory order. Later passes may remove divisions. The pass
    `finalize_domains` then adds the parts of all axes that are still divided.
    """
    order, domain = memory_order(tv), tv.domain
    axes = [domain.no_reductions[p].number for p, _ in order]
    reductions = [a.number for a in domain.logical if a.is_reduction()]
    flags = [flag for _, flag in order] + [None] * len(reductions)
    tv.domain = domain.with_allocation([*axes, *reductions], flags)


def drop_unit_streams(fusion: Fusion) -> None:
    """Removes the stream type from axes of extent 1, along which a loop would have only one step.

    A stream type says that a loop on the host computes the tensor along the axis, one block per
    step. The user gives an axis the stream type before its extent is known. When the fusion is
    concretized for its input sizes, an axis of extent 1 becomes a broadcast.
    """
    for tv in fusion.tensors():
        units = [a for a in tv.domain.loop if a.is_stream and is_plain_broadcast(a)]
        for axis in units:
            tv.parallelize_axis(axis, ParallelType.serial)
        if units:
            unparallelize(tv, lambda _: False)


def split_streamed_remainders(fusion: Fusion) -> None:
    """Splits a stream axis off the part of an axis that each device has, with one index per step.

    A stream axis is one along which a loop on the host computes the tensor, one block per step. In
    the example, each of d devices has M/d indices, and the user has put the stream type on this
    inner part of the split. Other passes expect the stream type on the outer part of a split, so
    one more split is added:

        t [DIDx(M), stream(M/d)]   ->   t [DIDx(M), stream(M/d), 1]
    """
    for tv in fusion.tensors():
        inner = {t.inner for t in tv.domain.splits.values()} - {*tv.domain.logical_numbers}
        if not any(tv.domain.rotated(number).is_stream for number in inner):
            continue
        streams = stream_cuts(tv)
        unparallelize(tv, lambda a: a.is_stream)
        for number, cut in streams:
            add_cuts(tv, number, (cut,))


def place_updates(fusion: Fusion) -> None:
    """Gives each tensor that is written into a fusion input the placement of that input.

    The placement says how devices share the axes. If the tensor has another placement, a copy with
    the right one is written instead. In the example, T2 -> T0 means that T2 is written into input
    T0, and DIDx marks an axis that devices share:

        T2 [i0, i1] -> T0 [DIDx(i0), i1]      =>  T3 [DIDx(i0), i1] = set(T2); T3 -> T0
    """
    for alias in fusion.aliases:
        there = placement(alias.into, DEVICE_TYPES)
        if alias.out.mesh != alias.into.mesh or placement(alias.out, DEVICE_TYPES) != there:
            write_instead(fusion, alias, copy_like(alias.out, alias.into.mesh, there))


# `record_reshardings` and `complete_origins` only write records for people. The order of the others
# matters:
#
# - Unit axes are dropped once shardings are known (the outputs' shardings name them) and before
#   communication is inserted.
# - `lay_out_communication` works on single collectives.
# - `infer_layouts` then lets other tensors follow the inputs, whose orders belong to this rank,
#   where communication leaves the order open.
# - Domains are finalized last: allocation domains describe whole tensors before it, and shards
#   after it.
def _passes(repeated: Collection[int]) -> tuple[tuple[str, Callable[[Fusion], None]], ...]:
    return (
        ("record_reshardings", record_reshardings),
        ("lay_out_communication", lay_out_communication),
        ("infer_layouts", partial(_follow_inputs, repeated=repeated)),
        ("finalize_domains", finalize_domains),
        ("complete_origins", complete_origins),
    )


def _follow_inputs(fusion: Fusion, *, repeated: Collection[int]) -> None:
    fixed = communicated(fusion)
    infer_layouts(fusion, repeated=repeated, fixed=fixed, is_part=is_step_slice)


def complete(fusion: Fusion, *, repeated: Collection[int] = ()) -> None:
    """Runs the passes after `decompose_reshardings`: they choose memory orders, and write the
    divisions of axes into the domains of the tensors.

    `repeated` has the numbers of the input axes that have stride 0, such as expanded axes. The pass
    `infer_layouts` uses it when it chooses memory orders.
    """
    verify_fusion(fusion, after="decompose_reshardings")
    for name, run in _passes(repeated):
        run(fusion)
        verify_fusion(fusion, after=name)


def complete_alone(fusion: Fusion) -> None:
    """Runs the rest of the sharding passes on a fusion that has only some ops of another fusion.

    The ops were copied out of the other fusion to predict their time alone. This happens while
    `decompose_reshardings` calls its callback `overlap`. So all passes after that call remain to be
    run.
    """
    complete_steps(fusion, Copies(fusion))
    complete(fusion)


def shard_fusion(
    fusion: Fusion,
    *,
    propagate: bool = True,
    overlap: Callable[[Fusion], None] | None = None,
    repeated: Collection[int] = (),
) -> ShardingResult:
    """Runs all sharding passes on a fusion, in place.

    - `propagate`: False if every tensor is annotated, so that the division over devices need not be
      propagated to other tensors.
    - `overlap`: a callback that may choose tensors that a loop on the host computes in steps; see
      `decompose_reshardings`.
    - `repeated`: the numbers of the input axes that have stride 0; see `infer_layouts`.

    If the fusion has no mesh, and no tensor that a loop on the host computes in steps, only memory
    orders are chosen. Afterwards every op is local or a `Reshard`, whose type of communication is
    `communication_type(op)`.

    Raises:
        ShardingError: annotations contradict meshes, or a sharding cannot be computed.
        UnsupportedError: a communication that is not implemented, or an axis along which an op
            cannot be computed in steps.
    """
    drop_unit_streams(fusion)
    if not (has_mesh(fusion) or has_streams(fusion)):
        infer_layouts(fusion, repeated=repeated)
        verify_fusion(fusion, after="infer_layouts")
        return ShardingResult()
    unmerge_streams(fusion)
    check_annotations(fusion)
    split_streamed_remainders(fusion)
    drop_steps_of_devices(fusion)
    streamed = {tv for tv in fusion.tensors() if stream_axis_of(tv) is not None}
    facts: dict[TensorView, tuple[Fact, ...]] = {}
    if propagate:
        facts = propagate_shardings(fusion)
    else:
        spread_reductions(fusion)
    keep_computable_streams(fusion, asked=streamed)
    complete_meshes(fusion)
    check_swizzles(fusion)
    check_dropout(fusion.exprs)
    check_shared_keys(fusion.exprs)
    record_propagation(fusion, facts)
    place_updates(fusion)
    verify_fusion(fusion, after="propagate_shardings")
    outputs = tuple(sharding_of(out) for out in fusion.outputs) if has_mesh(fusion) else ()
    drop_unit_axes(fusion)
    verify_fusion(fusion, after="drop_unit_axes")
    decompose_reshardings(fusion, overlap=overlap)
    complete(fusion, repeated=repeated)
    found = tuple(op for op in fusion.exprs if isinstance(op, Reshard) and communicates(op))
    return ShardingResult(MappingProxyType(facts), outputs, found)
