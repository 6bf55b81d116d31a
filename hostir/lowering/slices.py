"""Makes views of the part of a tensor that one rank or one loop iteration uses, and the scalar
expressions that select the part.

A stream axis is divided over the iterations of a loop. If it is a whole axis of the tensor, the
view of one iteration lacks this axis (`HirAliasSelect`). If it divides an axis of the tensor into
blocks, the view is one block (`ShardByStream`).

A random number is a function of its position in the whole tensor, but a kernel sees only a local
shard. So the kernel receives the index of its first element along each axis that ranks or loop
iterations divide:

    T1[iDIDx{4}, i{i0/4}] = rng_uniform({i0}, float, i3, i4)
    ->  T1 = rng_uniform({i0}, float, i3, i4, begin = {first1_0})       first1_0: rank * (i0/4)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from weakref import WeakKeyDictionary

from fuser.ir.domain.axis_path import transforms_between
from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.domain.tensor_domain import TensorDomain
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.memory_layout import memory_order
from fuser.ir.naming import in_ir, tensor_words
from fuser.ir.op import Op
from fuser.ir.ops.nodes import RandomOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.ir.types import DEVICE_TYPES, MemoryType, ParallelType
from fuser.support.errors import UnsupportedError, user_code
from hostir.analysis.rank_values import np
from hostir.ir.ops import NUMBER_OF_STREAMS, RANK, LaunchKernel, PostOnStream
from hostir.ir.program import HostIrContainer
from multidevice.sharding.passes.finalize import parallel_axes_to_front, shard_allocation
from multidevice.sharding.passes.localize import is_block
from multidevice.sharding.placement import (
    Cuts,
    add_cuts,
    axis_cuts,
    clone_domain,
    local_extent,
    placement,
    unparallelize,
)
from multidevice.sharding.queries import check_dropout
from multidevice.sharding.streams import StreamAxis, dropped_axes_of, stream_axes

# The number of mesh dimensions for which coordinates of ranks are cached.
MAX_MESHES = 256


# ------------------------------------------------------------------ scalars
@lru_cache(MAX_MESHES)
def coordinate(mesh: DeviceMesh, ptype: ParallelType) -> Scalar:
    """Returns the coordinate of the current rank along the mesh dimension `ptype`, as an expression
    of the symbol `rank`."""
    at = dict(zip(mesh.devices, mesh.coordinates(ptype), strict=True))
    first = min(mesh.devices)
    size = mesh.size_of(ptype)
    stride = next((rank - first for rank in sorted(at) if at[rank] == 1), 1) or 1
    row = sc.floordiv(sc.sub(RANK, first), stride)
    if all((rank - first) // stride == c for rank, c in at.items()):
        return row
    if all(((rank - first) // stride) % size == c for rank, c in at.items()):
        return sc.mod(row, size)
    found: Scalar = sc.ZERO
    for rank, c in at.items():
        found = sc.where(sc.eq(RANK, rank), c, found)
    return found


def rank_at(mesh: DeviceMesh, ptype: ParallelType, place: Scalar) -> Scalar:
    """Returns an expression for the global rank that has the coordinate `place` along the mesh
    dimension `ptype`. Along all other dimensions, that rank has the coordinates of the current
    rank.
    """
    here = coordinate(mesh, ptype)
    step = _distance(mesh, ptype)
    if step is None:
        return _device_at(mesh, {ptype: place})
    if mesh.ndim == 1:
        return sc.add(sc.mul(place, step), mesh.devices[0])
    return sc.add(RANK, sc.mul(sc.sub(place, here), step))


def _device_at(mesh: DeviceMesh, places: Mapping[ParallelType, Scalar]) -> Scalar:
    """Returns an expression for the global rank that has the coordinates `places`, by mesh
    dimension. The expression selects from a list of all ranks of the mesh, so it also serves
    irregular meshes.

    Along mesh dimensions that `places` lacks, the coordinates are those of the current rank.
    """
    position: Scalar = sc.ZERO
    for p in reversed(DEVICE_TYPES[: mesh.ndim]):
        place = places[p] if p in places else coordinate(mesh, p)
        position = sc.add(sc.mul(position, mesh.size_of(p)), place)
    found = sc.as_scalar(mesh.devices[0])
    for number, device in list(enumerate(mesh.devices))[1:]:
        found = sc.where(sc.eq(position, number), device, found)
    return found


@lru_cache(MAX_MESHES)
def _distance(mesh: DeviceMesh, ptype: ParallelType) -> int | None:
    """Returns the difference between the global ranks of two neighbours (devices whose coordinates
    along the mesh dimension `ptype` differ by one). Returns None if not all neighbours have the
    same difference.

    With one difference, the rank of any other device follows by arithmetic from this rank. If the
    mesh has only one device along the dimension, the result is 1.
    """
    dim = mesh.dim_of(ptype)
    if dim is None:
        return 1
    grid = np.asarray(mesh.devices, dtype=np.int64).reshape(mesh.shape)
    steps: list[int] = np.unique(np.diff(grid, axis=dim)).tolist() or [1]
    return steps[0] if len(steps) == 1 else None


def rotated(
    index: Scalar, count: Scalar, mesh: DeviceMesh | None, by: ParallelType | None
) -> Scalar:
    """Returns the number of the block that iteration `index` of a stream loop uses on the current
    rank. A stream loop computes one block of a tensor in each of its `count` iterations.

    If `by` is None, the block number is `index`. Otherwise the rank's coordinate along the mesh
    dimension `by` is added (modulo `count`), so that each rank begins with its own block.
    """
    if by is None:
        return index
    assert mesh is not None, f"blocks cannot be rotated along {by.text} without a mesh"
    return sc.mod(sc.add(index, coordinate(mesh, by)), count)


def reached(index: Scalar, count: Scalar, mesh: DeviceMesh, by: ParallelType) -> Scalar:
    """Returns the coordinate of the device to which the current rank sends its own block in
    iteration `index` of a stream loop (its iterations run on different streams).

    In a stream loop with `count` iterations, `rotated` says which device's block a device needs.
    `reached` is the inverse: which device needs the block of this rank. `by` is the mesh dimension
    of the coordinate.
    """
    return sc.mod(sc.sub(sc.add(count, coordinate(mesh, by)), index), count)


# ------------------------------------------------------------------ tensors
def selected(tv: TensorView, position: int) -> TensorView:
    """Returns a new tensor that stands for a view of one element of `tv` along the axis `position`.
    The new tensor lacks this axis. `position` is an axis index that does not count reduction axes.
    """
    gone = tv.domain.no_reductions[position].number
    fusion = tv.fusion
    part = _without(tv.domain, gone)
    if part is not None:
        domain, _ = clone_domain(fusion, part)
        out = fusion.new_tensor(domain, tv.dtype(), mesh=tv.mesh)
    else:
        kept = (a for a in tv.domain.logical if a.number != gone)
        axes = [fusion.clone_axis(a, rfactor=a.rfactor) for a in kept]
        out = fusion.new_tensor(axes, tv.dtype(), mesh=tv.mesh)
    order = [(p - (p > position), f) for p, f in _cut(tv, position) if p != position]
    _place(out, [c for p, c in enumerate(placement(tv)) if p != position], order)
    return out


def _has_device_parts(domain: TensorDomain) -> bool:
    return any(a.rfactor and a.is_device for a in domain.no_reductions)


def _without(domain: TensorDomain, gone: int) -> TensorDomain | None:
    """Returns `domain` (the axes of a tensor) without the axis with the number `gone`, for the view
    that one loop iteration uses.

    Returns None unless the tensor has partial sums: an axis of a summed dimension with one sum per
    device. Without partial sums, the caller can simply copy the other axes. With partial sums, the
    domain also has the split of the summed dimension, which must fit the remaining axes. In the
    example, the stream axis (an axis divided over the iterations of a loop) is removed:

        root [M, rK], logical [M, istream{s}rf, iDIDx{d}rf, r]
        -> root [M, r], logical [M, iDIDx, r]

    The root axes are those before the split of the reduction axis K, the logical axes those after
    the split.
    """
    if not _has_device_parts(domain):
        return None
    # If the axis that counts parts is dropped, the other one replaces the divided axis.
    split = next((t for t in domain.splits.values() if t.outer == gone), None)
    parted = {} if split is None else {split.inp: split.inner}
    logical = [n for n in domain.logical_numbers if n != gone]
    steps = transforms_between(domain, domain.root, domain.logical)
    made = domain.having(
        root=[parted.get(n, n) for n in domain.root_numbers if n != gone],
        logical=logical,
        loop=logical,
        allocation=(),
        contiguity=(),
        transforms=[t.renumbered(lambda n: parted.get(n, n)) for t in steps if t is not split],
    )
    return made.map_axes(lambda a: a.having(ptype=ParallelType.serial)).in_logical_order()


def slots(tv: TensorView, position: int) -> TensorView:
    """Returns a new tensor that stands for a buffer with one slot per stream. A slot holds one
    element of `tv` along the axis `position`. The first axis of the new tensor is the index of the
    slot.
    """
    fusion = tv.fusion
    gone = tv.domain.no_reductions[position].number
    kept = [a for a in tv.domain.logical if a.number != gone]
    axes = [fusion.new_axis(NUMBER_OF_STREAMS), *(fusion.clone_axis(a) for a in kept)]
    out = fusion.new_tensor(axes, tv.dtype(), mesh=tv.mesh, memory=MemoryType.global_)
    cuts = [(), *(c for p, c in enumerate(placement(tv)) if p != position)]
    inner = [
        (p + (p < position), flag if flag is None else True)
        for p, flag in memory_order(tv)
        if p != position
    ]
    _place(out, cuts, [(0, True), *inner])
    return out


def block(tv: TensorView, ptype: ParallelType) -> TensorView:
    """Returns a new tensor that stands for a view of one block of `tv`. A stream axis, which has
    the parallel type `ptype`, divides `tv` into blocks: one per iteration of a loop.

    `tv` may have several stream axes. The view has one block along the axis of type `ptype`, and
    all elements along the other axes.
    """
    fusion = tv.fusion
    kept = tv.domain if _has_device_parts(tv.domain) else tv.domain.without_root()
    domain, _ = clone_domain(fusion, kept)
    out = fusion.new_tensor(domain.in_logical_order(), tv.dtype(), mesh=tv.mesh)
    unparallelize(out, lambda a: a.is_stream and a.ptype is not ptype)
    position = next(s.position for s in stream_axes(tv) if s.ptype is ptype)
    _order(out, _cut(tv, position))
    shard_allocation(out, per_step=True)
    return out


Order = list[tuple[int, bool | None]]


def _cut(tv: TensorView, position: int) -> Order:
    """Returns the memory order of a part of `tv`: (axis position, whether contiguous) for each
    axis, outermost first. The part has only some of the elements along the axis `position`.

    The part has gaps in memory. Therefore the next axis outside of `position` is marked as not
    contiguous.
    """
    order = list(memory_order(tv))
    at = next(k for k, (p, _) in enumerate(order) if p == position)
    around = next((k for k in reversed(range(at)) if order[k][1] is not None), None)
    return [(p, False if k == around else flag) for k, (p, flag) in enumerate(order)]


def _place(out: TensorView, cuts: Sequence[Cuts], order: Order) -> None:
    for axis, mine in zip(out.domain.no_reductions, cuts, strict=True):
        add_cuts(out, axis.number, mine)
    _order(out, order)
    shard_allocation(out, per_step=False)
    parallel_axes_to_front(out)


def _order(tv: TensorView, order: Order) -> None:
    axes = tv.domain.no_reductions
    reductions = [a for a in tv.domain.logical if a.is_reduction()]
    numbers = [axes[p].number for p, _ in order] + [a.number for a in reductions]
    flags = [f for _, f in order] + [None] * len(reductions)
    tv.domain = tv.domain.with_allocation(numbers, flags)


# Positions of operands, and of results -> axes, in order.
Dropped = tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]
_dropped: WeakKeyDictionary[HostIrContainer, dict[Op, Dropped]] = WeakKeyDictionary()


def dropped_axes(op: LaunchKernel | PostOnStream, program: HostIrContainer) -> Dropped:
    """Returns the axes of extent 1 that a kernel's fusion has, but the tensors that its launch `op`
    passes do not have.

    A launch in a loop may pass a view of one element along an axis. Such a view lacks the axis. The
    first dictionary has the positions of the axes per operand of the launch, the second per result.
    Both dictionaries are empty for a `PostOnStream`, which passes no such views.
    """
    if isinstance(op, PostOnStream):
        return {}, {}
    # The result is cached, because every step asks.
    known = _dropped.get(program)
    if known is None:
        known = _dropped.setdefault(program, {})
    found = known.get(op)
    if found is None:
        found = known[op] = _find_dropped(op, program)
    return found


def _find_dropped(op: LaunchKernel, program: HostIrContainer) -> Dropped:
    group = program.groups[op.group].fusion
    found: Dropped = {}, {}
    for axes, mine, theirs in zip(
        found, (op.ins, op.outs), (group.inputs, group.outputs), strict=True
    ):
        for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if isinstance(a, TensorView) and isinstance(b, TensorView):
                gone = dropped_axes_of(b, a.ndim)
                if gone:
                    axes[k] = gone
    return found


# ------------------------------------------------------------------ shorter blocks
def _has_blocks(tv: TensorView) -> bool:
    """Whether each launch of a kernel works on one block of `tv`, a tensor of the kernel, because a
    stream loop divides `tv` into blocks, one per iteration. The last blocks may be shorter than the
    others.
    """
    return cut_axis(tv) is not None and is_block(tv)


def cut_axis(tv: TensorView) -> StreamAxis | None:
    """Returns the stream axis of `tv` that divides an axis of the tensor into blocks, one block per
    loop iteration. Returns None if no stream axis does so.
    """
    return next((axis for axis in stream_axes(tv) if not axis.is_logical), None)


def block_type(tv: TensorView) -> ParallelType:
    """Returns the parallel type of the stream axis that divides a logical axis of `tv` into blocks.
    The caller ensures that `tv` has one, otherwise an assertion fails.

    If a loop runs over several stream axes, each iteration has one index per axis. The type says
    which of these indices is the number of the block.
    """
    axis = cut_axis(tv)
    assert axis is not None, f"no stream axis divides {tv} into blocks"
    return axis.ptype


def split_tensor(fusion: Fusion) -> tuple[int, TensorView] | None:
    """Returns (position, tensor) of a tensor that a stream loop divides into blocks: each launch of
    the kernel works on the block of one iteration. Blocks may have unequal sizes, and a launch
    learns the size of its block from this tensor.

    Returns None if there is no such tensor, because all launches then have equal sizes. Positions
    count the kernel's tensor inputs, then its outputs. The position is -1 for a tensor inside of
    the kernel (see `with_block_number`). Inputs and inner tensors are included, because a reduction
    of blocks of unequal sizes may have results of equal sizes.
    """
    inputs = [tv for tv in fusion.inputs if isinstance(tv, TensorView)]
    for place, tv in reversed(list(enumerate((*inputs, *fusion.outputs)))):
        if _has_blocks(tv):
            return place, tv
    inside = next((tv for tv in fusion.tensors() if _has_blocks(tv)), None)
    return None if inside is None else (-1, inside)


def with_block_number(fusion: Fusion, index: Symbol) -> Fusion:
    """Returns a copy of a kernel's fusion with one more input: the number of the block that the
    current loop iteration computes.

    The new input has the name of the loop's index. A kernel needs the number if a divided tensor
    exists only inside the kernel, because then no operand has the size of the block. An example is
    the operand of a sum of ones.
    """
    made, _ = fusion.copy()
    made.inputs = [*made.inputs, index.with_range(lo=0)]
    return made


# ------------------------------------------------------------------ random numbers of shards
# (Tensor, stream type) -> the number of the block that a step has.
BlockOf = Callable[[TensorView, ParallelType], Scalar]


def _no_steps(tv: TensorView, ptype: ParallelType) -> Scalar:
    raise AssertionError(
        f"internal error: {tv} has the stream axis {ptype.text}, but is computed outside of a "
        "stream "
        "loop. Please report this definition"
    )


def with_places(fusion: Fusion, block_of: BlockOf = _no_steps) -> tuple[Fusion, tuple[Scalar, ...]]:
    """Returns a kernel's fusion with new inputs, from which its random ops learn at which index the
    rank's part of the tensor begins. Also returns the operands that a launch passes for these
    inputs.

    Each operand is an expression of the rank and of the loop iteration. `block_of` returns the
    number of the block of a tensor that an iteration uses.
    """
    ops: list[TensorOp] = []
    given: dict[Symbol, Scalar] = {}
    for op in fusion.exprs:
        cuts = axis_cuts(op.out) if isinstance(op, RandomOp) else {}
        if isinstance(op, RandomOp) and cuts:
            begin: list[Scalar] = []
            for k, axis in enumerate(op.out.domain.logical):
                first = _first(op.out, axis.size, cuts.get(axis.number, ()), block_of)
                symbol = Symbol(f"first{op.out.number}_{k}", DataType.Index, lo=0)
                begin.append(first if first is sc.ZERO else symbol)
                if first is not sc.ZERO:
                    given[symbol] = first
            op = op.replace(begin=tuple(begin))
        ops.append(op)
    if not given:
        return fusion, ()
    exprs, fusion.exprs = fusion.exprs, ops
    try:
        made, _ = fusion.copy()
    finally:
        fusion.exprs = exprs
    made.inputs = [*made.inputs, *given]
    return made, tuple(given.values())


def check_places(ops: Iterable[Op]) -> None:
    """Raises `UnsupportedError` for a random op in `ops` that would compute the same random numbers
    on all ranks or in all loop iterations.

    Kernels of a `FusionDefinition` receive the position of their part in the whole tensor, from
    which the random numbers follow. A random op in a program built by hand does not receive it, and
    neither does dropout in an attention op on several ranks.
    """
    ops = list(ops)
    check_dropout(ops)
    for op in ops:
        if isinstance(op, RandomOp) and not op.begin and axis_cuts(op.out):
            raise UnsupportedError(
                f"{op.name}: ranks or loop iterations divide {tensor_words(op.out)}, and would all "
                "get the same random numbers; define the op in a FusionDefinition, whose programs "
                "know the position of each part"
                f"{user_code(op.where)}{in_ir(op.out)}"
            )


def _first(tv: TensorView, extent: Scalar, cuts: Cuts, block_of: BlockOf) -> Scalar:
    """Returns the index of the first element of an axis of `tv` that the current rank uses in the
    current loop iteration.

    The whole axis has `extent` elements. `cuts` says how devices and stream loops divide the axis.
    `block_of` returns the number of the block that an iteration uses.
    """
    extent, first = tv.fusion.canonical(extent), sc.ZERO
    for cut in cuts:
        extent = local_extent(extent, (cut,), "first")
        if cut.ptype.is_device:
            assert tv.mesh is not None, f"{tv} is split over devices, but has no mesh"
            number = coordinate(tv.mesh, cut.ptype)
        else:
            number = block_of(tv, cut.ptype)
        first = sc.add(first, sc.mul(number, extent))
    return first
