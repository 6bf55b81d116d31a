"""Runs all stages of the compiler, from a fusion to a host program, in order.

    stage        input                        output                              dump
    check        the definition               an error, or nothing                fusion_ir_original
    concretize   definition, class of inputs  a copy of the fusion for the class  ..ir_concretized
    simplify     the fusion                   the fusion with fewer ops
    shard        the fusion                   local ops and reshardings           fusion_ir_preseg
    segment      the fusion, its loops        kernels, and the ops between them   segmented_fusion
    lower        segments, loops              a host program                      host_ir_lowering
    complete     the program                  the program, with deallocations     host_ir_lowering

The last column is the value of `FUSER_DUMP` that prints the text after the stage; `..` stands for
`fusion_`. The fusion and the program are verified after every pass.

`build_program` runs all stages. `lower_sharded` runs only the stages `segment`, `lower` and
`complete`. The cost model's search for overlap calls `lower_sharded` for parts of a sharded fusion.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

from fuser.ir.binding import complete
from fuser.ir.canonical_form import part_key
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
from fuser.support.locks import uncollected
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
    """The interface of a function that stores the text of a compiler stage, if the user asked for a
    dump of this stage."""

    def __call__(self, name: str, text: Callable[[], str], note: str = "", /) -> None:
        """Stores the text of the stage `name` as a dump. `text` is called to make the text only if
        the user asked for this dump. `note` is added to the heading."""


class Overlap(Protocol):
    """The interface of a function that pipelines a sharded fusion, so that communication overlaps
    with computation.

    The function divides tensors into blocks. Each iteration of a loop of the host program then
    communicates or computes one block, and the iterations run on different streams.
    """

    def __call__(self, fusion: Fusion, /) -> str:
        """Divides tensors of `fusion` into blocks, which the iterations of stream loops compute.
        Changes `fusion` in place.

        Returns the name of the library for transfers between ranks inside these loops. Returns ""
        if the loops use the same library as all other communications.
        """
        ...


def _no_dump(name: str, text: Callable[[], str], note: str = "", /) -> None:
    del name, text, note


class Built(NamedTuple):
    """The result of compiling a fusion: its segments (kernels and the ops between them), the
    verified host program, and its shardings. `shardings` describe the fusion before tensors are
    divided into blocks for pipelining.
    """

    segmented: SegmentedFusion
    program: HostIrContainer
    shardings: ShardingResult


class KernelFacts(NamedTuple):
    """Facts about the inputs and the device that decide which kernels are made.

    - `sizes`: the sizes of an example of the inputs. With all other inputs that share the compiled
      program, schedulers would make the same choices.
    - `row_parts`: if not 0, a kernel that works along rows may also sum over all rows. The kernel
      then computes this many partial sums, which another kernel adds.
    - `are_joined`: independent pointwise kernels may become one kernel.
    - `has_clusters`: a long row may be reduced by a cluster of CUDA blocks.
    """

    sizes: Mapping[Symbol, int] = NO_SIZES
    row_parts: int = 0
    are_joined: bool = False
    has_clusters: bool = False

    @classmethod
    def of(cls, input_class: InputClass, settings: Settings) -> KernelFacts:
        """Returns the facts by which kernels are chosen. They follow from `input_class`, a class of
        inputs that share one compiled program, and from `settings`, the options of a call. The
        input class has the sizes and the kind of device.
        """
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
    """Compiles the fusion `definition` to a host program for one class of inputs (inputs that share
    a compiled program).

    `definition` is not changed. `backend_name` is the library that communications name. `overlap`
    divides tensors into blocks, so that communication and computation can overlap; None divides no
    tensor. `dump` stores the text of each stage, and `settings` are the options of the call. Raises
    `FuserError` for a fusion that cannot be lowered.
    """
    with uncollected:
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
    """Returns the segments and the verified host program of `fusion`, which already has its final
    shardings. Segments are the kernels and the ops between kernels.

    `facts` are facts about inputs and device. The other parameters are those of `build_program`.
    """

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
    """Shards `fusion` in place. Returns the shardings, and `params` with the communication library
    that `overlap` chose.

    `overlap` divides tensors into blocks so that communication and computation can overlap; None
    divides no tensor. `repeated` are the numbers (ids) of the axes that have stride 0 in the
    inputs, so that memory has one element along the axis.
    """
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
    """Divides a sharded fusion into segments: kernels that a scheduler accepts, and the ops between
    these kernels.

    `loops` are the stream loops of the fusion, which compute tensors block by block. `facts` are
    facts about inputs and device, by which schedulers choose.
    """
    values: dict[Symbol, Number] = dict(refined_sizes(facts.sizes))
    complete(fusion, values)
    known: Known = {}
    # Kernels of equal layers need the same scheduler.
    chosen: dict[Hashable, str | None] = {}

    def scheduler_of(segment: Fusion) -> str | None:
        def suits(row: Scheduler) -> bool:
            return (facts.has_clusters or not row.in_clusters) and row.suits(segment, values)

        key = part_key(segment)
        if key not in chosen:
            chosen[key] = find_scheduler(localize(segment, known=known)[0], suits=suits)
        return chosen[key]

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
# Loops over streams for the ops of a program built by hand.


def lower_streams(
    program: HostIrContainer, *, params: LowerParams = STANDALONE, backend_name: str = "NCCL"
) -> HostIrContainer:
    """Returns a host program with loops over streams, whose iterations run on different streams.

    An axis of the parallel type stream is divided over the iterations of such a loop. A tensor of
    `program` that has such an axis is computed in a loop, one block along this axis per iteration.
    The communications of these tensors are part of the loops.

    Before the call, the program has only tensor ops, and the tensors have their final meshes and
    parallel types. The returned program equals that of nvFuser's `MultiDeviceExecutor`, and
    `HostIrEvaluator` can run it.

        T1[istreamIdx2{i0}, iS3{i1}] = Set( T0[iS0{i0}, iS1{i1}] )
        -> T1 = ALLOCATE(..); S0 = GetCurrentStream(); FOR i ..: waits; FOR i ..: T3 = Set( T2 )

    `backend_name` is the library that communications name. Raises `UnsupportedError` for a host op
    in the program, and for a stream axis that is split or merged. An op that cannot be computed in
    a loop over streams also raises `UnsupportedError`.
    """
    ops: list[TensorOp] = []
    for op in program.ops:
        if not isinstance(op, TensorOp):
            raise UnsupportedError(
                f"lower_streams: expected a program of tensor ops only, found the op {op.name}"
                f"{user_code(op.where)}: leave it out, because lower_streams adds all allocations, "
                "streams and loops"
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
    """Raises `UnsupportedError` if a stream axis of `tv` (an axis that a loop over streams divides)
    results from a split or merge. `lower_streams` supports only axes that the tensor itself has.
    """
    for axis in tv.domain.loop:
        if axis.is_stream and axis.number not in tv.domain.logical_numbers:
            raise UnsupportedError(
                f"Cannot stream parallelize on a split/merge axis: {axis_words(tv, axis)}; "
                "use FusionDefinition.execute, which supports the outer part of an outer_split, "
                "and a merge"
                f"{user_code(cut_line(tv, axis.ptype))}{in_ir(axis, tv)}"
            )
