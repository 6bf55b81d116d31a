"""The time that each op takes when nothing else runs, and the fraction of the GPU that the op uses.

The cost of a host op follows from the bytes that the op reads and writes (`HostOp.work`). A tensor
op is costed as one kernel that reads its operands and writes its results. A tensor op that takes
more than one kernel has a function in the table `COSTS`.

Sizes are those of one rank's shards. A cost is the time of the GPU. The field `host_s` is the
host's time to issue the op. Kernels are limited by memory. Matmuls are limited by arithmetic or by
memory, whichever takes longer.
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
    """The cost of one op on one rank when nothing else runs.

    - `seconds`: the time on the GPU; `host_s`: the host's time to issue the op.
    - `share`: the fraction of the GPU's multiprocessors that the op uses.
    - `nbytes`: the bytes that are moved; `flops`: the floating-point operations.
    """

    seconds: float
    share: float
    nbytes: int = 0
    flops: int = 0
    host_s: float = 0.0


# ------------------------------------------------------------------ kernels
def _kernel(op: TensorOp, sizes: Sizes, machine: Machine) -> Cost:
    """Returns the cost of a tensor op that runs as one kernel. The kernel reads every operand and
    writes every result once."""
    both = dict.fromkeys((*op.inputs, *op.outputs))
    return _moves(sum(_held(v, sizes) for v in both if isinstance(v, TensorView)), machine)


def _moves(nbytes: int, machine: Machine) -> Cost:
    share = max(min(1.0, nbytes / machine.kernel_fill_nbytes), 1 / machine.multiprocessors)
    # A small kernel uses few multiprocessors, and takes at least the time of a launch.
    seconds = machine.launch_s + nbytes / machine.memory_bandwidth if nbytes else 0.0
    return Cost(seconds, share, nbytes, 0, machine.host_kernel_s)


def _grouped_scales(op: GroupedScalesOp, sizes: Sizes, machine: Machine) -> Cost:
    """Returns the cost of an op that arranges scales in the tiled layout that a grouped product
    reads. (A grouped product makes one matrix product per group of rows.)

    The cost has three parts: initialising the result, one copy per group into the result, and one
    more pass that rearranges the whole result into tiles.
    """
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
    """Returns the cost of an argsort, which runs as a radix sort. For each byte of an element, the
    sort makes one pass over all elements and indices."""
    passes = nbytes_of(op.inp.dtype())
    return _moves(passes * 2 * sum(_held(tv, sizes) for tv in (op.inp, op.out)), machine)


def _topk(op: TopKOp, sizes: Sizes, machine: Machine) -> Cost:
    """Returns the cost of a top-k, which runs as a radix select. For each byte of an element, the
    select reads all elements once."""
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
    """Returns the cost of a grouped product: one matrix product per group of rows, one after
    another. The groups are assumed to have equal sizes, because their sizes are only known when the
    program runs.
    """
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
    """Returns the cost of `batch` matrix products [m, k] x [k, n] of the op `op`. `sizes` returns
    the shape of a tensor on this rank.

    Scaled products of floats of one byte are costed like a wider dtype, because their speed is not
    measured.
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
    """Returns the cost of `batch` matrix products [m, k] x [k, n] of the op `op`.

    - `nbytes`: the bytes of the operands.
    - `packed`: the bytes moved by an extra copy that makes an operand contiguous.
    - `dtype`: the dtype of the computation; None for the dtype of the result.
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
    """Returns the average fraction of the GPU's multiprocessors that a matmul with this number of
    tiles uses.

    Each multiprocessor computes one tile at a time, so the tiles run in waves. The last wave leaves
    some multiprocessors to other work, such as an NCCL collective.
    """
    waves = math.ceil(tiles / machine.multiprocessors)
    return tiles / (waves * machine.multiprocessors)


def _speed(op: LibraryOp, tv: TensorView, machine: Machine, dtype: DataType) -> float:
    """Returns the speed of matrix products in `dtype`, relative to float16. Raises
    `UnsupportedError` if the machine has no measured speed for `dtype`. The message names `op` and
    its tensor `tv`."""
    scale = machine.matmul_dtypes.get(dtype.name)
    if scale is None:
        raise UnsupportedError(
            f"cost: {op.name} {tv} has a dtype without a measured speed, {dtype.name}, so the time "
            f"cannot be predicted (measured: {', '.join(machine.matmul_dtypes)})"
            f"{user_code(op.where)}"
        )
    return scale


# ------------------------------------------------------------------ attention
# Rows of scores that a multiprocessor computes at a time; the number of products over e and over v.
_ROWS = 128
_PRODUCTS: dict[type[Op], tuple[int, int]] = {SdpaFwdOp: (1, 1), SdpaBwdOp: (3, 2)}


def _attention(op: AttentionOp, sizes: Sizes, machine: Machine) -> Cost:
    """Returns the cost of an attention op. The operands are read once and the results are written
    once, because the attention scores stay on the chip."""
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
    """Computes how the result of matrix products, of shape [batch, m, n], is divided into tiles.
    Each multiprocessor computes one tile at a time, so the tiles run in waves.

    Returns (elements per multiprocessor, number of tiles) for the fastest tile shape of `machine`.
    The elements determine the time. They are rounded up to whole tiles and waves, and divided by
    the relative speed of the tile shape.
    """
    return min(
        (math.ceil(tiles / machine.multiprocessors) * rows * columns / speed, tiles)
        for rows, columns, speed in machine.tiles
        for tiles in [batch * math.ceil(m / rows) * math.ceil(n / columns)]
    )


def under_load(machine: Machine, flops: float) -> Machine:
    """Returns the machine with a constant matmul rate: that of a call with `flops` operations in
    all its matmuls.

    A GPU lowers its clock when it is busy for long, so the rate depends on all matmuls of the call.
    On a CPU, the rate depends on the size of each matmul, so the machine is returned unchanged.
    """
    if machine.device == CPU or not flops:
        return machine
    return replace(machine, matmul=((flops, _rate(flops, machine.matmul)),))


def _rate(flops: float, points: Sequence[tuple[float, float]]) -> float:
    """Returns the matmul speed in operations per second for a matmul of `flops` operations.

    `points` has measured (operations, operations per second). Between two points, the speed is
    interpolated in the logarithm of the operations.
    """
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
    """Returns the cost of a collective such as an allgather.

    - `row`: the type of the collective; `members`: the number of ranks in the team.
    - `nbytes`: the bytes of a rank's input or output, whichever is larger.
    - `backend`: the communication library; `reduce`: the reduction.
    - `staged`: for collectives in which ranks copy out of each other's memory, the bytes in memory
      that other ranks cannot map. They are first copied into memory that others can map.
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
    """Returns the cost of an allreduce of `nbytes` among `members` GPUs of one host. The allreduce
    runs as one kernel of this project on each GPU, without a communication library.

    Returns None if there is no such kernel for these arguments. The library `backend` then does the
    allreduce.
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
    """Returns the cost of sending `nbytes` from one rank to another by the library `backend`."""
    if backend != PEER_COPIES:
        return _nccl(nbytes, machine.nccl_other_bandwidth, machine)
    seconds = machine.copy_latency_s + nbytes / machine.pull_bandwidth
    return Cost(seconds, _copy_share(machine), nbytes, 0, machine.host_post_s)


def _copy_share(machine: Machine) -> float:
    """Returns the fraction of the multiprocessors that a copy out of another rank's memory uses. On
    a GPU the fraction is 0, because copy engines make the copy. On a CPU the fraction is 1."""
    return 1.0 if machine.device == CPU else 0.0


def _nccl(moved: float, bandwidth: float, machine: Machine) -> Cost:
    filled = moved / (moved + machine.nccl_fill_nbytes)
    seconds = machine.nccl_latency_s + filled * machine.nccl_fill_s + moved / bandwidth
    share = min(1.0, machine.nccl_multiprocessors / machine.multiprocessors)
    return Cost(seconds, share, int(moved), 0, machine.host_post_s)


def staging_cost(nbytes: int, machine: Machine) -> Cost:
    """Returns the cost of a copy of `nbytes` within the memory of one GPU."""
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

    - `sizes`: a function that returns the shape of a tensor's shard (the part that a rank stores).
    - `found`: for a kernel, how many bytes it reads of each lookup table; see `found_in_tables`.

    Raises `UnsupportedError` for a dtype whose speed is unknown, and for an op that is not yet
    scheduled into kernels.
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
    """Returns, for each lookup table of a kernel, how many bytes one launch reads of the table. A
    lookup table is a tensor that the kernel reads at indices, such as an embedding; a lookup of few
    rows reads much less than the whole table.

    An operand is included only if nothing but lookups reads the operand. `values` maps the symbols
    of extents to numbers.
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
