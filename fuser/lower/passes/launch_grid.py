"""Launches inside of a device's limits: what has too many blocks along an axis counts them along x.

A GPU takes 65535 blocks along y and z, and 2^31 - 1 along x. A kernel relies on guards for its own
counts; where these fail, or are known to, the same kernel is lowered folded: its blocks lie one
behind the other along x, and each takes as many of them as there are too many:

    grid (4, 131072, 1)        for (fold = blockIdx.x; fold < blocks; fold += gridDim.x) {
    bx = blockIdx.x       ->     bx = fold % across; by = fold / across % down; ..
    by = blockIdx.y            grid (524288, 1, 1)

Blocks of a cluster stay beside one another along y: clusters are folded along x alone. Blocks that
wait for one another's results cannot be: their number along y is the scheduler's choice, which
keeps to the limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.ir.types import BLOCK_TYPES, GRID_TYPES, ParallelType
from fuser.lower.kernel_ir import (
    Arg,
    Body,
    Fold,
    KernelPart,
    LoweredKernel,
    ScalarArg,
    TensorArg,
    ThreadReduce,
    walk,
)
from fuser.support.device import DeviceInfo
from fuser.support.errors import DefinitionError, UnsupportedError, user_code
from fuser.support.record import replace

AXES = ("x", "y", "z")


def within_limits(kernel: LoweredKernel, device: DeviceInfo, *, folded: bool) -> LoweredKernel:
    """Returns a kernel that never launches more than a device takes: by guards, or `folded`.

    Raises:
        DefinitionError: a block has too many threads.
        UnsupportedError: it has to be folded, and its blocks wait for one another.
    """
    _check_block(kernel, device)
    if folded:
        return _folded(kernel, device)
    limits = (*_guards(kernel, device), *_block_guards(kernel, device))
    return replace(kernel, guards=(*kernel.guards, *limits), limits=limits)


def _guards(kernel: LoweredKernel, device: DeviceInfo) -> list[Scalar]:
    """Returns what must hold for the counts of blocks: of constants that are too many, what never
    does."""
    found: list[Scalar] = []
    for k, (count, most) in enumerate(zip(kernel.grid, device.max_grid, strict=True)):
        # Each block has an iteration, and of these 32 bits count fewer than blocks along x.
        is_counted = k == 0 and kernel.index_dtype is DataType.Int32 and most >= (1 << 31) - 1
        if not is_counted:
            found.append(sc.le(count, most))
    return [x for x in found if x != sc.const(True)]


def _block_guards(kernel: LoweredKernel, device: DeviceInfo) -> list[Scalar]:
    """Returns what must hold for threads of a block that are not constant."""
    pairs = [*zip(kernel.block, device.max_block, strict=True)]
    pairs.append((sc.product(kernel.block), device.max_threads_per_block))
    return [sc.le(n, most) for n, most in pairs if sc.int_value(n) is None]


def _folded(kernel: LoweredKernel, device: DeviceInfo) -> LoweredKernel:
    most = device.max_grid[0]
    if any(isinstance(s, ThreadReduce) and any(s.grid_axes) for s in walk(kernel.body)):
        raise UnsupportedError(
            f"{kernel.name}: blocks that put their results together are too many for {device.name}"
        )
    x, y, z = kernel.grid
    if kernel.cluster > 1:
        fold, beside = Fold((x, sc.ONE, sc.ONE)), (y, z)
    else:
        fold, beside = Fold((x, y, z)), (sc.ONE, sc.ONE)
    counts: list[Scalar] = []
    scalars, args = list(kernel.scalars), list(kernel.args)
    for axis, count in zip(AXES, fold.counts, strict=True):
        if sc.int_value(count) is None:
            name = Symbol(f"blocks_{axis}", DataType.Index, lo=1)
            scalars.append(name)
            args.append(ScalarArg(sc.cast(count, DataType.Index)))
            count = name
        counts.append(count)
    blocks = sc.minimum(sc.product(fold.counts), most)
    return replace(
        kernel,
        grid=(blocks, *beside),
        scalars=tuple(scalars),
        args=tuple(args),
        fold=Fold((counts[0], counts[1], counts[2])),
    )


# ------------------------------------------------------------------ schedules of users
def _check_block(kernel: LoweredKernel, device: DeviceInfo) -> None:
    """Raises `DefinitionError` for more threads than a block may have."""
    block = [sc.int_value(n) or 1 for n in kernel.block]
    is_over = any(n > most for n, most in zip(block, device.max_block, strict=True))
    if is_over or prod(block) > device.max_threads_per_block:
        raise _block_refusal(kernel.name, kernel.fusion, block, device)


def _block_refusal(
    name: str, fusion: Fusion, block: Sequence[int], device: DeviceInfo
) -> DefinitionError:
    for axis, threads, most in zip(AXES, block, device.max_block, strict=True):
        if threads > most:
            where = _named(fusion, BLOCK_TYPES, axis)
            return DefinitionError(
                f"kernel {name}: {threads} threads of a block along {axis}{where}, but "
                f"{device.name} takes at most {most}: split that axis by less"
            )
    return DefinitionError(
        f"kernel {name}: blocks of {' x '.join(map(str, block))} = {prod(block)} threads, but "
        f"{device.name} takes at most {device.max_threads_per_block}: split the axes of the "
        "threads by less"
    )


def refusal(
    name: str, fusion: Fusion, counts: Sequence[int], block: Sequence[int], device: DeviceInfo
) -> DefinitionError:
    """Returns the error of a schedule by hand that has too many blocks along an axis, or too many
    threads in a block."""
    over = [k for k in range(3) if counts[k] > device.max_grid[k]]
    if not over:
        return _block_refusal(name, fusion, block, device)
    axis, most = AXES[over[0]], device.max_grid[over[0]]
    return DefinitionError(
        f"kernel {name}: {counts[over[0]]} blocks along {axis}"
        f"{_named(fusion, GRID_TYPES, axis)}, but {device.name} takes at most {most}: "
        + (
            "give each block more work, by a split of that axis"
            if axis == "x"
            else "parallelize that axis by grid_x, or merge it into the axis that is"
        )
    )


def _named(fusion: Fusion, types: Sequence[ParallelType], axis: str) -> str:
    """Returns which axis of which tensor is parallelized so, and the user's line."""
    ptype = next(t for t in types if t.name.endswith(axis))
    for op in reversed(fusion.used_exprs()):
        for tv in op.outputs:
            found = next((a for a in tv.domain.loop if a.ptype is ptype), None)
            if found is not None:
                return f", of axis {found} ({ptype.name}) of {tv}{user_code(op.where)}"
    return ""


# ----------------------------------------------------------------------
# Kernels beside one another: one launch has the blocks of all, one after the other along x.


def beside(kernels: Sequence[LoweredKernel], fusion: Fusion, name: str) -> LoweredKernel:
    """Returns one kernel called `name` of all, made for `fusion`.

    Blocks and threads are counted along x. Raises `UnsupportedError` for kernels that wait for
    other threads, or have shapes along z.
    """
    tensors = {tv.number: tv for kernel in kernels for tv in kernel.tensors}
    # Parameters by name.
    given: dict[str, tuple[Symbol, Arg]] = {}

    def parameter(name: str, value: Scalar) -> str:
        given[name] = sc.name_for(name, value), ScalarArg(sc.cast(value, DataType.Index))
        return name

    first: Scalar = sc.ZERO
    parts: list[KernelPart] = []
    for k, kernel in enumerate(kernels):
        _check(kernel)
        across, down, _ = kernel.grid
        begin = parameter(f"first{k}", first) if k else ""
        width = "" if sc.int_value(down) == 1 else parameter(f"across{k}", across)
        renamed: dict[Symbol, str] = {}
        args = kernel.args[len(kernel.tensors) :]
        for symbol, arg in zip(kernel.scalars, args, strict=True):
            # A size or a stride is the same in all parts; other names are of one part alone.
            if isinstance(arg, ScalarArg) and arg.scalar != symbol:
                renamed[symbol] = f"p{k}_{symbol.name}"
            name_of_all = renamed.get(symbol, symbol.name)
            given[name_of_all] = Symbol(name_of_all, symbol.dtype), arg
        parts.append(KernelPart(kernel, begin, width, renamed))
        first = sc.add(first, sc.mul(across, down))
    threads = max(kernel.threads for kernel in kernels)
    return LoweredKernel(
        name=name,
        fusion=fusion,
        body=Body([]),
        index_dtype=kernels[0].index_dtype,
        tensors=tuple(tensors.values()),
        workspaces=(),
        scalars=tuple(symbol for symbol, _ in given.values()),
        args=(*map(TensorArg, tensors.values()), *(arg for _, arg in given.values())),
        grid=(first, sc.ONE, sc.ONE),
        block=(sc.const(threads), sc.ONE, sc.ONE),
        threads=threads,
        min_blocks=max(kernel.min_blocks for kernel in kernels),
        smem_bytes=sc.ZERO,
        guards=tuple(dict.fromkeys(g for kernel in kernels for g in kernel.guards)),
        alignments=tuple(a for kernel in kernels for a in kernel.alignments),
        parts=tuple(parts),
    )


def _check(kernel: LoweredKernel) -> None:
    has_z = any(sc.int_value(shape[2]) != 1 for shape in (kernel.grid, kernel.block))
    if has_z or kernel.waits or kernel.workspaces or kernel.cluster > 1 or kernel.goes_backwards:
        raise UnsupportedError(f"{kernel.name}: no kernel that stands beside others")
