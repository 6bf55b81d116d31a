"""The time that each op takes when nothing else runs, and the fraction of the machine that the op
uses.

A host op returns the bytes that the op reads and writes (`HostOp.work`). A tensor op that is more
than one kernel has a function in the table `COSTS`.

Sizes are those of one rank. A cost is the time of the GPU. The field `host_s` is the host's time to
issue the op. Kernels are limited by memory. Matmuls are limited by arithmetic or by memory,
whichever takes longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from fuser.ir.dtypes import DataType, nbytes_of, to_torch
from fuser.ir.fusion import Fusion, TensorOp, TensorView
from fuser.ir.memory_layout import memory_order
from fuser.ir.op import Op
from fuser.ir.ops.attention_ops import AttentionOp, SdpaBwdOp, SdpaFwdOp
from fuser.ir.ops.lookup import LookupOp
from fuser.ir.ops.matrix_products import GroupedMmaOp, GroupedScalesOp, ProductOp, ScaledMmaOp
from fuser.ir.ops.nodes import LibraryOp, LinearOp, MatmulOp
from fuser.ir.ops.scan_ops import ArgsortOp, TopKOp
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Number, Symbol
from fuser.support import options
from fuser.support.errors import UnsupportedError, user_code
from hostir.cost.machine_model import CPU, Machine
from hostir.ir.ops import PEER_COPIES, HostOp, LaunchKernel, Sizes
from hostir.ir.shard_layout import held_nbytes
from multidevice.sharding.queries import local_extents
from multidevice.transports.base.allreduce_model import is_known, sent_nbytes, shape_of
from multidevice.transports.base.collectives import ALLREDUCE, Collective
from multidevice.transports.base.protocol import RedOp

# Tensor -> the largest number of bytes that a kernel reads of this tensor.
Found = Mapping[TensorView, int]
NOTHING: Found = {}


@dataclass(frozen=True)
class Cost:
    """The cost of an op when nothing else runs.

    `share` is the fraction of the multiprocessors that the op uses, `nbytes` the bytes moved, and
    `flops` the floating-point operations.
    """

    seconds: float
    share: float
    nbytes: int = 0
    flops: int = 0
    host_s: float = 0.0


# ------------------------------------------------------------------ kernels
def _kernel(op: TensorOp, sizes: Sizes, machine: Machine) -> Cost:
    """Returns the cost of a kernel that reads every operand and writes every result once."""
    both = dict.fromkeys((*op.inputs, *op.outputs))
    return _moves(sum(_held(v, sizes) for v in both if isinstance(v, TensorView)), machine)


def _moves(nbytes: int, machine: Machine) -> Cost:
    share = max(min(1.0, nbytes / machine.kernel_fill_nbytes), 1 / machine.multiprocessors)
    # A small kernel uses few multiprocessors, and takes at least the time of a launch.
    seconds = machine.launch_s + nbytes / machine.memory_bandwidth if nbytes else 0.0
    return Cost(seconds, share, nbytes, 0, machine.host_kernel_s)


def _grouped_scales(op: GroupedScalesOp, sizes: Sizes, machine: Machine) -> Cost:
    """Returns the cost of grouping scales: writing the result, copying the groups one by one, and
    rearranging the result into tiles."""
    groups, tiles = sizes(op.input_offsets)[0], held_nbytes(op.out, sizes(op.out))
    cost = _moves(2 * held_nbytes(op.inp, sizes(op.inp)) + 3 * tiles, machine)
    more = groups + 1
    return replace(
        cost,
        seconds=cost.seconds + more * machine.launch_s,
        host_s=cost.host_s + more * machine.host_library_s,
    )


# ------------------------------------------------------------------ sorts
def _argsort(op: ArgsortOp, sizes: Sizes, machine: Machine) -> Cost:
    """Returns the cost of a radix sort: for each byte of an element, one pass over all elements and
    indices."""
    passes = nbytes_of(op.inp.dtype())
    return _moves(passes * 2 * sum(_held(tv, sizes) for tv in (op.inp, op.out)), machine)


def _topk(op: TopKOp, sizes: Sizes, machine: Machine) -> Cost:
    """Returns the cost of a radix select: for each byte of an element, one read of all elements."""
    passes = nbytes_of(op.inp.dtype())
    written = sum(_held(tv, sizes) for tv in (op.found, op.places))
    return _moves(passes * _held(op.inp, sizes) + written, machine)


def _held(tv: TensorView, sizes: Sizes) -> int:
    return held_nbytes(tv, sizes(tv))


# ------------------------------------------------------------------ matmuls
def _linear(op: LinearOp, sizes: Sizes, machine: Machine) -> Cost:
    *rows, k = sizes(op.x)
    weight = sizes(op.weight)
    columns = weight[-2] if len(weight) > 1 else 1
    nbytes = sum(held_nbytes(v, sizes(v)) for v in op.inputs if isinstance(v, TensorView))
    packed = 0
    if len(rows) > 1 and (axes := [p for p, _ in memory_order(op.x)]) != sorted(axes):
        # Rows that are not contiguous are packed first.
        packed = 2 * held_nbytes(op.x, sizes(op.x))
    batch = math.prod(weight[:-2])
    return _matmul_cost(batch, math.prod(rows), columns, k, nbytes, op, machine, packed)


def _matmul(op: MatmulOp, sizes: Sizes, machine: Machine) -> Cost:
    a, b = sizes(op.a), sizes(op.b)
    *left, k = a
    rows, columns = (left[-1] if left else 1), (b[-1] if len(b) > 1 else 1)
    batch = max(math.prod(left[:-1]), math.prod(b[:-2]))
    nbytes = held_nbytes(op.a, a) + held_nbytes(op.b, b)
    return _matmul_cost(batch, rows, columns, k, nbytes, op, machine)


def _grouped(op: GroupedMmaOp, sizes: Sizes, machine: Machine) -> Cost:
    """Returns the cost of one matrix product per group, in sequence. The ragged axis is assumed to
    be divided into equal parts."""
    extents = {
        c: n for f, tv in op.tensors() for c, n in zip(op.letters(f), sizes(tv), strict=True)
    }
    groups = extents["g"]
    if groups:
        extents[op.ragged] = math.ceil(extents[op.ragged] / groups)
    m, n, k = (extents[c] for c in "mnk")
    cost = _product_cost(groups, m, n, k, op, sizes, machine)
    more = max(groups - 1, 0)
    return replace(
        cost,
        seconds=cost.seconds + more * machine.matmul_launch_s,
        host_s=cost.host_s + more * machine.host_library_s,
    )


def _scaled(op: ScaledMmaOp, sizes: Sizes, machine: Machine) -> Cost:
    (m, k), n = sizes(op.mat1), sizes(op.mat2)[1]
    return _product_cost(1, m, n, k, op, sizes, machine)


def _product_cost(
    batch: int, m: int, n: int, k: int, op: ProductOp, sizes: Sizes, machine: Machine
) -> Cost:
    """Returns the cost of `batch` matrix products [m, k] x [k, n] whose operands are on the device.

    Floats of one byte are costed like a wider dtype, because their speed is not measured.
    """
    nbytes = sum(_held(tv, sizes) for f, tv in op.tensors() if f not in ("offsets", "out"))
    wider = DataType.Float if machine.device == CPU else DataType.BFloat16
    dtype = wider if op.is_scaled else None
    return _matmul_cost(batch, m, n, k, nbytes, op, machine, dtype=dtype)


def _matmul_cost(
    batch: int,
    m: int,
    n: int,
    k: int,
    nbytes: int,
    op: LibraryOp,
    machine: Machine,
    packed: int = 0,
    dtype: DataType | None = None,
) -> Cost:
    """Returns the cost of `batch` matrix products [m, k] x [k, n].

    `nbytes` are the bytes of the operands, and `packed` the bytes moved to make an operand
    contiguous. `dtype` is the dtype of the computation, by default that of the result.
    """
    flops, result = 2 * batch * m * n * k, op.out_tensor
    scale = _speed(op, result, machine, dtype or result.dtype())
    nbytes += batch * m * n * nbytes_of(result.dtype())
    if not flops:
        return _moves(nbytes, machine)
    rate = _rate(flops, machine.matmul) * scale
    area, tiles = whole_waves(batch, m, n, machine)
    arithmetic = area * machine.multiprocessors * 2 * k / rate
    memory = nbytes / machine.memory_bandwidth
    seconds = machine.matmul_launch_s + max(arithmetic, memory)
    seconds += packed / machine.memory_bandwidth
    return Cost(seconds, _occupancy(tiles, machine), nbytes + packed, flops, machine.host_library_s)


def _occupancy(tiles: int, machine: Machine) -> float:
    """Returns the average fraction of the multiprocessors that a matmul with this number of tiles
    uses.

    The last wave of tiles leaves some multiprocessors to other work, such as an NCCL collective.
    """
    waves = math.ceil(tiles / machine.multiprocessors)
    return tiles / (waves * machine.multiprocessors)


def _speed(op: LibraryOp, tv: TensorView, machine: Machine, dtype: DataType) -> float:
    """Returns the speed of matrix products in `dtype`, relative to the fastest dtype. `tv` is the
    result, for messages."""
    scale = machine.matmul_dtypes.get(dtype.name)
    if scale is None:
        raise UnsupportedError(
            f"cost: {op.name} {tv} has a dtype without a measured speed "
            f"(measured: {', '.join(machine.matmul_dtypes)}){user_code(op.where)}"
        )
    return scale


# ------------------------------------------------------------------ attention
# Rows of scores that a multiprocessor computes at a time; the number of products over e and over v.
_ROWS = 128
_PRODUCTS: dict[type[Op], tuple[int, int]] = {SdpaFwdOp: (1, 1), SdpaBwdOp: (3, 2)}


def _attention(op: AttentionOp, sizes: Sizes, machine: Machine) -> Cost:
    """Returns the cost of attention. Operands are read and results are written once, because the
    scores stay on the chip."""
    tensors = [tv for _, tv in op.tensors()]
    nbytes = sum(held_nbytes(tv, sizes(tv)) for tv in tensors)
    extents = {
        c: n
        for field, tv in op.tensors()
        if field in ("query", "key", "value")
        for c, n in zip(op.letters(field), sizes(tv), strict=True)
    }
    l, s, e, v = map(extents.pop, "lsev")
    extents.pop("g", None)
    batch = math.prod(extents.values())
    of_e, of_v = _PRODUCTS[type(op)]
    flops = 2 * batch * l * s * (of_e * e + of_v * v)
    if op.is_always_causal:
        flops //= 2
    rate = _rate(flops, machine.matmul) * _speed(op, tensors[0], machine, tensors[0].dtype())
    seconds = max(flops / rate, nbytes / machine.memory_bandwidth) if flops else 0.0
    share = min(1.0, max(batch * math.ceil(l / _ROWS), 1) / machine.multiprocessors)
    seconds += machine.matmul_launch_s
    return Cost(seconds, share, nbytes, flops, machine.host_library_s)


def whole_waves(batch: int, m: int, n: int, machine: Machine) -> tuple[float, int]:
    """Returns (elements of the result per multiprocessor, number of tiles) for the fastest tile
    shape.

    The result has the shape [batch, m, n]. The tiles are computed in waves of one tile per
    multiprocessor. The elements are divided by the relative speed of the tile shape.
    """
    return min(
        (math.ceil(tiles / machine.multiprocessors) * rows * columns / speed, tiles)
        for rows, columns, speed in machine.tiles
        for tiles in [batch * math.ceil(m / rows) * math.ceil(n / columns)]
    )


def under_load(machine: Machine, flops: float) -> Machine:
    """Returns the machine with the matmul rate of a call that does `flops` operations in matmuls.

    A GPU's clock depends on how long the GPU is busy, with any number of ops. A CPU's rates depend
    on the size of one product, so the machine is returned unchanged.
    """
    if machine.device == CPU or not flops:
        return machine
    return replace(machine, matmul=((flops, _rate(flops, machine.matmul)),))


def _rate(flops: float, points: Sequence[tuple[float, float]]) -> float:
    """Returns the operations per second for `flops` operations. `points` are (operations, rate),
    interpolated in the logarithm of the operations."""
    if flops <= points[0][0]:
        return points[0][1]
    for (a, slow), (b, fast) in pairwise(points):
        if flops <= b:
            part = math.log(flops / a) / math.log(b / a)
            return slow + part * (fast - slow)
    return points[-1][1]


# ------------------------------------------------------------------ communications
def collective_cost(
    row: Collective,
    members: int,
    nbytes: int,
    backend: str,
    machine: Machine,
    *,
    dtype: DataType,
    reduce: RedOp = "SUM",
    staged: int = 0,
) -> Cost:
    """Returns the cost of a collective. `nbytes` is the size of a rank's input or output, whichever
    is larger.

    `row` describes the type of collective, `members` is the size of the team, and `reduce` the
    reduction. `staged` is the number of bytes that peer copies first copy into memory that other
    ranks can map.
    """
    moved = nbytes * row.bus(members)
    if row is ALLREDUCE:
        found = allreduce_kernel_cost(members, nbytes, backend, machine, dtype, reduce)
        if found is not None:
            return found
    if backend != PEER_COPIES:
        bandwidth = machine.nccl.get(row.name, machine.nccl_other_bandwidth)
        return _nccl(moved, bandwidth, machine)
    local = staged * 2 + (nbytes + moved if row.reduces else 2 * nbytes / members)
    seconds = row.rounds(members) * machine.copy_latency_s + moved / machine.pull_bandwidth
    seconds += local / machine.memory_bandwidth
    return Cost(seconds, _copy_share(machine), int(moved), 0, machine.host_post_s)


def allreduce_kernel_cost(
    members: int, nbytes: int, backend: str, machine: Machine, dtype: DataType, reduce: RedOp
) -> Cost | None:
    """Returns the cost of an allreduce of `nbytes` that is one kernel among `members` GPUs of a
    host.

    Returns None if a library does the allreduce, because no kernel exists for these arguments.
    """
    if machine.device == CPU:
        return None
    shape = shape_of(nbytes, members, to_torch(dtype))
    if shape is None or not is_known(to_torch(dtype), reduce):
        return None
    if options.disabled("allreduce_kernel"):
        return None
    sent = sent_nbytes(shape.way, nbytes, members)
    seconds = machine.allreduce_kernel_s[shape.way.name] + sent / machine.allreduce_kernel_bandwidth
    share = min(1.0, shape.blocks / machine.multiprocessors)
    return Cost(seconds, share, sent, 0, machine.host_post_s)


def transfer_cost(nbytes: int, backend: str, machine: Machine) -> Cost:
    """Returns the cost of a transfer of `nbytes` from one rank to another."""
    if backend != PEER_COPIES:
        return _nccl(nbytes, machine.nccl_other_bandwidth, machine)
    seconds = machine.copy_latency_s + nbytes / machine.pull_bandwidth
    return Cost(seconds, _copy_share(machine), nbytes, 0, machine.host_post_s)


def _copy_share(machine: Machine) -> float:
    """Returns the fraction of the multiprocessors that a peer copy uses: 0 on a GPU, because a GPU
    has copy engines, and 1 on a CPU."""
    return 1.0 if machine.device == CPU else 0.0


def _nccl(moved: float, bandwidth: float, machine: Machine) -> Cost:
    filled = moved / (moved + machine.nccl_fill_nbytes)
    seconds = machine.nccl_latency_s + filled * machine.nccl_fill_s + moved / bandwidth
    share = min(1.0, machine.nccl_multiprocessors / machine.multiprocessors)
    return Cost(seconds, share, int(moved), 0, machine.host_post_s)


def staging_cost(nbytes: int, machine: Machine) -> Cost:
    """Returns the cost of a copy of `nbytes` within one GPU."""
    return _moves(2 * nbytes, machine)


# ------------------------------------------------------------------ the table
COSTS: dict[type[TensorOp], Callable[[Any, Sizes, Machine], Cost]] = {
    ArgsortOp: _argsort,
    GroupedMmaOp: _grouped,
    GroupedScalesOp: _grouped_scales,
    LinearOp: _linear,
    MatmulOp: _matmul,
    ScaledMmaOp: _scaled,
    SdpaBwdOp: _attention,
    SdpaFwdOp: _attention,
    TopKOp: _topk,
}


def cost_of(op: Op, sizes: Sizes, machine: Machine, found: Found = NOTHING) -> Cost | None:
    """Returns the cost of an op that computes. Returns None for an op that only makes views, waits,
    or changes streams.

    `sizes` returns the local shape of a tensor. `found` has the bytes that a kernel reads of its
    lookup tables. Raises `UnsupportedError` for an op that the model does not know.
    """
    if isinstance(op, TensorOp):
        return COSTS.get(type(op), _kernel)(op, sizes, machine)
    assert isinstance(op, HostOp), f"{op.name} is no op of host programs"
    work = op.work(sizes)
    if work is None:
        return None
    return _moves(sum(min(n, found.get(tv, n)) for tv, n in work.items()), machine)


# ----------------------------------------------------------------------
# The bytes that a kernel reads of its lookup tables: those of the results, which may be much less
# than the tables.


def found_in_tables(op: LaunchKernel, kernel: Fusion, values: Mapping[Symbol, Number]) -> Found:
    """Returns how many bytes a rank's launch of a kernel reads of each of its lookup tables.

    Only operands that nothing but lookups reads are counted. `values` binds the symbols of extents.
    """
    if not any(isinstance(e, LookupOp) for e in kernel.exprs):
        return NOTHING
    found: dict[TensorView, int] = {}
    for given, declared in zip(op.ins, kernel.inputs, strict=False):
        if not (isinstance(given, TensorView) and isinstance(declared, TensorView)):
            continue
        lookups = [e for e in kernel.exprs if isinstance(e, LookupOp) and e.table is declared]
        is_table = lookups and all(e in lookups for e in kernel.uses(declared))
        if is_table and not any(e.index is declared for e in lookups):
            found[given] = sum(_nbytes(e.out, values) for e in lookups)
    return found


def _nbytes(tv: TensorView, values: Mapping[Symbol, Number]) -> int:
    shape = tuple(int(sc.evaluate(n, values)) for n in local_extents(tv))
    return held_nbytes(tv, shape)
