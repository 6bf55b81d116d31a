"""Lowers a scheduled fusion to a kernel: builds the statements, then runs passes over them in a
fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.ir.types import BLOCK_TYPES, GRID_TYPES, ParallelType
from fuser.lower.buffers import Buffer, place_shared
from fuser.lower.context import Assumptions, Context, Indexer, NewAssumptionError, quotient_symbol
from fuser.lower.kernel_ir import (
    INT32_LIMIT,
    Accumulate,
    Arg,
    Body,
    DeclareShared,
    For,
    GlobalLoad,
    LoweredKernel,
    ScalarArg,
    Store,
    StrideArg,
    TensorArg,
    ThreadReduce,
    VectorLoad,
    VectorStore,
    WorkspaceArg,
    stride_symbol,
    values_of,
    walk,
)
from fuser.lower.loop_tree import COORDINATES, NoNestError, Stage, nest_stages
from fuser.lower.passes.batched_welford import batch_welfords
from fuser.lower.passes.cpu_loops import sum_in_blocks, vectorize_loops
from fuser.lower.passes.hoist import Hoister
from fuser.lower.passes.launch_grid import fuse_horizontally, within_limits
from fuser.lower.passes.load_order import alternate_directions, convert_again, prefetch_next
from fuser.lower.passes.synchronize import insert_barriers
from fuser.lower.passes.unroll import expand_unswitch, mark_unrolled
from fuser.lower.passes.vector_loads import divide_once, load_vectors
from fuser.lower.reduction_code import element_layout
from fuser.lower.statements import build_body
from fuser.lower.values import lift_lookup_indices
from fuser.support.device import DeviceInfo
from fuser.support.errors import UnsupportedError

MAX_ATTEMPTS = 32
# Threads per multiprocessor, each with 80 registers: enough for eight outstanding loads of 16
# bytes.
RESIDENT_THREADS = 768
# The same for kernels whose threads combine their sums: the number that the reduction scheduler
# assumes. Kernels with more than `HELD_BYTES_TOGETHER` of arrays per thread are left out: the
# compiler would spill parts of the arrays to memory.
RESIDENT_THREADS_TOGETHER = 1024
HELD_BYTES_TOGETHER = 144


@dataclass
class State:
    """A kernel that is being lowered: the fields that the passes read and change.

    `hoister` moves index arithmetic out of loops. `smem_bytes` is the kernel's need of shared
    memory in bytes.
    """

    ctx: Context
    body: Body
    buffers: dict[Stage, Buffer]
    hoister: Hoister
    smem_bytes: Scalar = sc.ZERO


def _place_shared(state: State) -> None:
    state.smem_bytes = place_shared(state.buffers, state.ctx.reduction_bytes)
    offsets = {b.name: b.offset for b in state.buffers.values() if b.is_shared}
    for s in state.body.statements:
        if isinstance(s, DeclareShared):
            s.offset = offsets[s.name]


def _insert_barriers(state: State) -> None:
    insert_barriers(state.body)


def _expand_unswitch(state: State) -> None:
    state.body = expand_unswitch(state.body)


def _mark_unrolled(state: State) -> None:
    mark_unrolled(state.body)


def _alternate_directions(state: State) -> None:
    if not state.ctx.is_cpu:
        alternate_directions(state.body)


def _divide_once(state: State) -> None:
    if not state.ctx.is_cpu:
        divide_once(state.body, state.ctx.nesting.fusion.least)


def _lift_lookup_indices(state: State) -> None:
    lift_lookup_indices(state.body)


def _load_vectors(state: State) -> None:
    if not state.ctx.is_cpu:
        load_vectors(state.body)


def _prefetch_next(state: State) -> None:
    if not state.ctx.is_cpu:
        prefetch_next(state.body)


def _convert_again(state: State) -> None:
    if not state.ctx.is_cpu:
        convert_again(state.body)


def _sum_in_blocks(state: State) -> None:
    if state.ctx.is_cpu:
        sum_in_blocks(state.body)


def _batch_welfords(state: State) -> None:
    if not state.ctx.is_cpu:
        batch_welfords(state.body)


def _vectorize_loops(state: State) -> None:
    if state.ctx.is_cpu:
        vectorize_loops(state.body)


def _hoist(state: State) -> None:
    state.hoister.run(state.body)


PASSES: tuple[tuple[str, Callable[[State], None]], ...] = (
    # After all reductions have requested their scratch memory, which precedes the shared tensors.
    ("place_shared", _place_shared),
    # Before unswitching: a subtree with barriers is not duplicated.
    ("insert_barriers", _insert_barriers),
    # Before hoisting: both versions use the values that are computed outside of them.
    ("expand_unswitch", _expand_unswitch),
    # The next ten run before hoisting, which replaces loop symbols by names.
    ("mark_unrolled", _mark_unrolled),
    ("alternate_directions", _alternate_directions),
    ("divide_once", _divide_once),
    # Before load_vectors: it cannot widen a load whose index is computed inside the loop.
    ("lift_lookup_indices", _lift_lookup_indices),
    ("load_vectors", _load_vectors),
    ("prefetch_next", _prefetch_next),
    ("convert_again", _convert_again),
    ("sum_in_blocks", _sum_in_blocks),
    ("batch_welfords", _batch_welfords),
    ("vectorize_loops", _vectorize_loops),
    ("hoist", _hoist),
)


def lower_kernel(
    fusion: Fusion,
    *,
    name: str,
    index_dtype: DataType,
    device: DeviceInfo,
    folded: bool = False,
) -> LoweredKernel:
    """Lowers a scheduled fusion to a kernel named `name`.

    `index_dtype` is the type of index arithmetic, Int or Int32. With `folded`, the kernel accepts
    any number of CUDA blocks, also more than the device can launch, because a block may then do the
    work of several. Equal arguments give equal kernels.

    Raises:
        UnsupportedError: the schedule cannot be carried out. The message names the tensor.
        DefinitionError: the schedule contradicts itself or the device's limits.
    """
    lowered = _lower(fusion, name, index_dtype, device)
    return within_limits(lowered, device, folded=folded)


def _lower(fusion: Fusion, name: str, index_dtype: DataType, device: DeviceInfo) -> LoweredKernel:
    if index_dtype not in (DataType.Int, DataType.Int32):
        raise UnsupportedError(
            f"kernel {name}: the index dtype must be Int or Int32, but it is {index_dtype.name}"
        )
    if fusion.parts:
        kernels = [_lower(part, name, index_dtype, device) for part in fusion.parts]
        return fuse_horizontally(kernels, fusion, name)
    _unify_extents(fusion)
    assumptions = Assumptions(dict(fusion.divisible))
    for _ in range(MAX_ATTEMPTS):
        try:
            state = _attempt(fusion, assumptions, is_cpu=device.kind == "cpu")
        except NewAssumptionError:
            continue
        except NoNestError as refused:
            assumptions.recomputed[refused.tv] = None
            continue
        return _finish(state, name, index_dtype, device)
    raise UnsupportedError(
        f"kernel {name} cannot be generated from its schedule: each of {MAX_ATTEMPTS} attempts has "
        "found one more size that a vector must divide, or one more tensor that must be computed "
        "again. Use narrower vectors, or inline fewer tensors"
    )


def _unify_extents(fusion: Fusion) -> None:
    """Replaces extents that are known to be equal by one symbol, so that index expressions
    simplify.
    """
    if not fusion.equal_extents():
        return
    for tv in fusion.tensors():
        domain = tv.domain.map_axes(
            lambda a: a.having(
                extent=fusion.canonical(a.extent),
                expanded=None if a.expanded is None else fusion.canonical(a.expanded),
            )
        )
        if domain is not tv.domain:
            tv.domain = domain


def _attempt(fusion: Fusion, assumptions: Assumptions, *, is_cpu: bool) -> State:
    nesting = nest_stages(fusion, recomputed=assumptions.recomputed)
    ctx = Context(nesting, assumptions, Indexer(nesting), is_cpu)
    body, buffers = build_body(ctx)
    state = State(ctx, body, buffers, Hoister())
    for _, run in PASSES:
        run(state)
    return state


# ------------------------------------------------------------------ the interface
def _finish(state: State, name: str, index_dtype: DataType, device: DeviceInfo) -> LoweredKernel:
    ctx = state.ctx
    tensors = _touched_tensors(state)
    args: list[Arg] = [TensorArg(tv) for tv in tensors]
    args += [WorkspaceArg(k) for k in range(len(ctx.workspaces))]
    scalars = state.hoister.parameters.by_value
    quotients: dict[Scalar, Scalar] = {
        quotient_symbol(s, by): sc.floordiv(s, by) for s, by in ctx.assumptions.divisible.items()
    }
    strides = {
        stride_symbol(tv, axis): StrideArg(tv, axis) for tv in tensors for axis in range(tv.ndim)
    }
    params: list[Symbol] = []
    for (value, dtype), symbol in scalars.items():
        original = sc.substitute(value, quotients)
        arg = strides.get(original) if isinstance(original, Symbol) else None
        args.append(arg or ScalarArg(sc.cast(original, dtype)))
        params.append(symbol)
    extents = ctx.nesting.extents
    grid, block = _launch(extents, GRID_TYPES), _launch(extents, BLOCK_TYPES)
    threads = sc.int_value(sc.product(block))
    if threads is None:
        # A manual schedule may assign a thread to each element of an axis. Guards enforce the
        # limit.
        threads = device.max_threads_per_block
    guards = [*ctx.nesting.fusion.assumed, *ctx.guards, *ctx.assumptions.guards()]
    guards += [sc.le(n, x) for x, n in ctx.nesting.fusion.least.items()]
    if index_dtype is DataType.Int32:
        guards += _int32_guards(state, tensors)
    return LoweredKernel(
        name=name,
        fusion=ctx.nesting.fusion,
        body=state.body,
        index_dtype=index_dtype,
        tensors=tensors,
        workspaces=tuple(ctx.workspaces),
        scalars=tuple(params),
        args=tuple(args),
        grid=grid,
        block=block,
        threads=threads,
        min_blocks=_min_blocks(state, threads),
        smem_bytes=state.smem_bytes,
        guards=tuple(g for g in dict.fromkeys(guards) if g != sc.const(True)),
        alignments=tuple(ctx.alignments.items()),
        goes_backwards=ctx.nesting.fusion.goes_backwards,
        cluster=ctx.nesting.fusion.cluster,
    )


def _touched_tensors(state: State) -> tuple[TensorView, ...]:
    """Returns the global tensors that the kernel reads or writes, which are its arguments.

    Inputs are first, then outputs, both in the order of the fusion.
    """
    names: set[str] = set()
    for s in walk(state.body):
        if isinstance(s, Store) or (isinstance(s, VectorLoad | VectorStore) and not s.shared):
            names.add(s.name)
        names.update(p.name for p in values_of(s) if isinstance(p, GlobalLoad))
    fusion = state.ctx.nesting.fusion
    known = dict.fromkeys(v for v in (*fusion.inputs, *fusion.outputs) if isinstance(v, TensorView))
    return tuple(tv for tv in known if f"T{tv.number}" in names)


def _launch(
    extents: dict[ParallelType, Scalar], types: tuple[ParallelType, ...]
) -> tuple[Scalar, Scalar, Scalar]:
    x, y, z = (extents.get(p, sc.ONE) for p in sorted(types, key=lambda p: COORDINATES[p]))
    return x, y, z


def _min_blocks(state: State, threads: int) -> int:
    """Returns the number of CUDA blocks that must fit on a multiprocessor at the same time (the
    second argument of `__launch_bounds__`), which limits the registers per thread; 0 lets the
    compiler decide.

    `threads` is the number of threads per block. There is a limit if the schedule demands one, or
    if an iteration of a loop accumulates several loads. Without the limit, the compiler tends to
    use too few registers for such a loop: the kernel waits for the first loads of an iteration
    before it issues the last loads. Measured on an H200: the column sums of 2048 x 384 take 3.6 us
    with the limit and 4.2 us without.
    """
    if state.ctx.is_cpu:
        return 0
    resident = state.ctx.nesting.fusion.resident_threads
    if not resident and _sums_in_steps(state.body):
        if not any(isinstance(s, ThreadReduce) for s in walk(state.body)):
            resident = RESIDENT_THREADS
        elif _held_bytes(state) <= HELD_BYTES_TOGETHER:
            resident = RESIDENT_THREADS_TOGETHER
    return resident // max(threads, 32)


def _sums_in_steps(body: Body) -> bool:
    """Whether a kernel has a loop that accumulates several loaded values in each iteration. Such
    kernels need many registers for outstanding loads.
    """
    loops = [s for s in walk(body) if isinstance(s, For) and not s.unroll]
    steps = [s.body for s in loops if any(isinstance(i, Accumulate) for i in walk(s.body))]
    unrolled = [u for step in steps for u in walk(step) if isinstance(u, For) and u.unroll]
    return any(map(_loads, unrolled))


def _held_bytes(state: State) -> int:
    """Returns the size in bytes of all register arrays of one thread."""
    arrays = [b for b in state.buffers.values() if b.size is not None and not b.is_shared]
    return sum(b.size * element_layout(b)[0] for b in arrays if b.size is not None)


def _loads(loop: For) -> bool:
    """Whether the body of a loop reads global memory."""
    return any(
        isinstance(s, VectorLoad) or any(isinstance(v, GlobalLoad) for v in values_of(s))
        for s in walk(loop.body)
    )


def _int32_guards(state: State, tensors: tuple[TensorView, ...]) -> list[Scalar]:
    """Returns the conditions under which every index of the kernel fits in 32 bits.

    This includes indices past the end of a tensor, which an incomplete last block computes.
    """
    ctx = state.ctx
    bounds: dict[Scalar, None] = {}
    for tv in tensors:
        last: Scalar = sc.ZERO
        for axis, stride in ctx.indexer.strides(tv):
            last = sc.add(last, sc.mul(ctx.nesting.fusion.canonical(axis.size), stride))
        bounds[last] = None
    for stage in ctx.nesting.stages:
        for split in ctx.partial_splits(stage.tv):
            bounds[sc.product(ctx.size(stage.tv, n) for n in split.outputs)] = None
        bounds[sc.product(loop.extent for loop in stage.all_loops)] = None
    return [sc.le(b, INT32_LIMIT) for b in bounds if sc.int_value(b) is None]
