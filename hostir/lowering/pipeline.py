"""From a fusion to a host program: every stage of the compiler, in order.

    stage        needs                        gives                               dump
    check        the definition               an error, or nothing                fusion_ir_original
    concretize   definition, class of inputs  a fusion of its own, of this class  ..ir_concretized
    simplify     the fusion                   the fusion, of fewer ops
    shard        the fusion                   local ops and reshardings           fusion_ir_preseg
    segment      the fusion, its loops        kernels, and what is between them   segmented_fusion
    lower        segments, loops              a host program                      host_ir_lowering
    complete     the program                  the program, with deallocations     host_ir_lowering

`build_program` runs all, `lower_sharded` those from the segmentation on; the cost model's search
for overlap lowers parts of a sharded fusion so. The fusion and the program are verified after every
pass over them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

from fuser.ir.binding import complete
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.naming import axis_words, in_ir
from fuser.ir.scalar.constructors import Number, Symbol
from fuser.ir.text.printer import fusion_text
from fuser.passes import fusion_passes
from fuser.passes.concretize import concretize, refined_sizes
from fuser.passes.segment import SegmentedFusion, segment_fusion
from fuser.schedule.inner_outer_persistent import PARTS
from fuser.schedule.registry import HORIZONTAL, Scheduler, find_scheduler
from fuser.schedule.transpose import stays_coalesced
from fuser.support import progress
from fuser.support.device import target_of
from fuser.support.errors import UnsupportedError, user_code
from fuser.support.options import NO_SETTINGS, Settings
from hostir.ir.program import HostIrContainer
from hostir.lowering.input_class import InputClass, specialise, symbol_values
from hostir.lowering.params import DEFAULT, STANDALONE, LowerParams
from hostir.lowering.segments import lower
from hostir.lowering.stream_loops import stands_alone
from hostir.passes.deallocation import PASSES, run_passes
from multidevice.sharding import queries, streams
from multidevice.sharding.passes.localize import Known, localize
from multidevice.sharding.passes.pipeline import ShardingResult, shard_fusion
from multidevice.sharding.placement import cut_line
from multidevice.sharding.queries import check_types

NO_SIZES: Mapping[Symbol, int] = {}


class KeepsDump(Protocol):
    """Keeps the text of a stage if somebody asked for it by the name of its option."""

    def __call__(self, name: str, text: Callable[[], str], note: str = "", /) -> None: ...


class Overlap(Protocol):
    """Gives tensors of a decomposed fusion steps, and returns the library of what these transfer
    from rank to rank, "" for that of the others."""

    def __call__(self, fusion: Fusion, /) -> str: ...


def _no_dump(name: str, text: Callable[[], str], note: str = "", /) -> None:
    del name, text, note


class Built(NamedTuple):
    """The segments and the verified host program of a fusion, and its shardings before overlap."""

    segmented: SegmentedFusion
    program: HostIrContainer
    shardings: ShardingResult


class KernelFacts(NamedTuple):
    """The facts about inputs and device by which kernels are cut.

    `sizes`: by these schedulers decide alike for all of the class. `row_parts`: as for
    `segment_fusion`. `are_joined`: pointwise kernels beside one another may be one. `has_clusters`:
    a long row may be a cluster's.
    """

    sizes: Mapping[Symbol, int] = NO_SIZES
    row_parts: int = 0
    are_joined: bool = False
    has_clusters: bool = False

    @classmethod
    def of(cls, input_class: InputClass, settings: Settings) -> KernelFacts:
        """Returns the facts for a class of inputs and the options of a call."""
        target = target_of(input_class.device, settings.argument("schedules_for"))
        is_cuda = target.kind == "cuda"
        is_joined = is_cuda and input_class.is_small and not settings.disabled("horizontal_fusion")
        return cls(
            sizes=input_class.sizes,
            row_parts=PARTS if is_cuda and input_class.knows_rows else 0,
            are_joined=is_joined,
            has_clusters=target.max_cluster > 1 and not settings.disabled("clusters"),
        )


NO_FACTS = KernelFacts()


def build_program(
    definition: Fusion,
    input_class: InputClass,
    *,
    backend_name: str,
    params: LowerParams = DEFAULT,
    dump: KeepsDump = _no_dump,
    overlap: Overlap | None = None,
    settings: Settings = NO_SETTINGS,
) -> Built:
    """Returns what becomes of a fusion for a class of inputs.

    `definition` does not change. `backend_name` is written on communications; `overlap` may give
    tensors steps; `settings` are the options of the call.
    Raises `FuserError` for what cannot be lowered.
    """
    dump("fusion_ir_original", lambda: fusion_text(definition))
    check_types(definition)
    progress.stage("passes")
    fusion, _ = concretize(definition, input_class.sizes)
    repeated = specialise(fusion, input_class)
    dump("fusion_ir_concretized", fusion.print_math)
    fusion_passes.run_passes(fusion, repeated=repeated)
    progress.stage("shardings")
    shardings, params = _shard(fusion, params, overlap, repeated)
    dump("fusion_ir_preseg", lambda: fusion_text(fusion))
    facts = KernelFacts.of(input_class, settings)
    segmented, program = lower_sharded(
        fusion, backend_name=backend_name, params=params, dump=dump, facts=facts
    )
    return Built(segmented, program, shardings)


def lower_sharded(
    fusion: Fusion,
    *,
    backend_name: str,
    params: LowerParams = DEFAULT,
    dump: KeepsDump = _no_dump,
    facts: KernelFacts = NO_FACTS,
) -> tuple[SegmentedFusion, HostIrContainer]:
    """Returns the segments and the verified host program of a sharded and finalized fusion."""

    def after(name: str, program: HostIrContainer) -> None:
        text = partial(program.full_text, first_line="")
        dump("host_ir_lowering", text, f"after {name}, full form")

    loops = streams.StreamLoops(fusion)
    segmented = _segment(fusion, loops, params, facts)
    dump("segmented_fusion", segmented.describe)
    lowered = lower(segmented, backend_name=backend_name, params=params, loops=loops)
    after("lowering", lowered)
    progress.stage("verification")
    passes = () if params.standalone else PASSES
    return segmented, run_passes(lowered, passes, after_each=after)


def _shard(
    fusion: Fusion, params: LowerParams, overlap: Overlap | None, repeated: Collection[int]
) -> tuple[ShardingResult, LowerParams]:
    """Shards the fusion, in place; returns the shardings, and the options with the library that the
    steps of `overlap` transfer with."""
    libraries: list[str] = []

    def give_steps(fusion: Fusion) -> None:
        assert overlap is not None
        libraries.append(overlap(fusion))

    shardings = shard_fusion(
        fusion,
        propagate=params.propagate,
        overlap=None if overlap is None else give_steps,
        repeated=repeated,
    )
    return shardings, replace(params, step_backend=libraries[0]) if any(libraries) else params


def _segment(
    fusion: Fusion, loops: streams.StreamLoops, params: LowerParams, facts: KernelFacts
) -> SegmentedFusion:
    """Returns the kernels of a sharded fusion, as schedulers take them, and what is between
    them."""
    values: dict[Symbol, Number] = dict(refined_sizes(facts.sizes))
    complete(fusion, values)
    known: Known = {}

    def scheduler_of(segment: Fusion) -> str | None:
        def suits(row: Scheduler) -> bool:
            return (facts.has_clusters or not row.in_clusters) and row.suits(segment, values)

        return find_scheduler(localize(segment, known=known)[0], suits=suits)

    def takes_both(union: Fusion) -> str | None:
        is_taken = HORIZONTAL.accepts(localize(union, known=known)[0]) is None
        return HORIZONTAL.name if is_taken else None

    return segment_fusion(
        fusion,
        find_scheduler=scheduler_of,
        pays=stays_coalesced,
        local_shape=streams.held_extents,
        may_share_kernel=loops.may_share_kernel,
        stands_alone=stands_alone(loops, params),
        row_parts=0 if queries.has_streams(fusion) else facts.row_parts,
        takes_both=takes_both if facts.are_joined else None,
    )


# ----------------------------------------------------------------------
# Loops over streams for the ops of a program by hand.


def lower_streams(
    program: HostIrContainer, *, params: LowerParams = STANDALONE, backend_name: str = "NCCL"
) -> HostIrContainer:
    """Returns the program that computes in steps what stands on stream axes, and communicates.

    Holds before: tensor ops alone, with the meshes and parallel types that they are to have.
    Holds after: what `MultiDeviceExecutor` makes of the same ops; `HostIrEvaluator` runs it.

        T1[istreamIdx2{i0}, iS3{i1}] = Set( T0[iS0{i0}, iS1{i1}] )
        -> T1 = ALLOCATE(..); S0 = GetCurrentStream(); FOR i ..: waits; FOR i ..: T3 = Set( T2 )

    Raises `UnsupportedError` for another op (write its loops, or let this pass make all), for a
    stream axis that a split or a merge made, and for what cannot be computed in steps.
    """
    ops: list[TensorOp] = []
    for op in program.ops:
        if not isinstance(op, TensorOp):
            raise UnsupportedError(
                f"lower_streams: {op.name} stands in the program{user_code(op.where)}: this pass "
                "makes the allocations, streams and loops of tensor ops alone"
            )
        ops.append(op)
    for tv in program.tensors():
        check_stream(tv)
    values, exprs = program.values, program.values.exprs
    values.exprs = ops
    try:
        fusion, _ = values.copy()
    finally:
        values.exprs = exprs
    sizes = {s: v for s, v in symbol_values(program, {}).items() if isinstance(v, int)}
    found = InputClass.as_declared(fusion, sizes)
    return build_program(fusion, found, backend_name=backend_name, params=params).program


def check_stream(tv: TensorView) -> None:
    """Raises `UnsupportedError` for a stream axis that is no logical axis of its tensor."""
    for axis in tv.domain.loop:
        if axis.is_stream and axis.number not in tv.domain.logical_numbers:
            raise UnsupportedError(
                f"Cannot stream parallelize on a split/merge axis: {axis_words(tv, axis)}; "
                "FusionDefinition.execute takes the outer part of an outer_split, and a merge"
                f"{user_code(cut_line(tv, axis.ptype))}{in_ir(axis, tv)}"
            )
