"""The grid of a launch: device limits, grids folded to one axis, and horizontal fusion of kernels.

A GPU accepts 65535 CUDA blocks along y and z, and 2^31 - 1 along x. A kernel has guards (conditions
that are checked before a launch) for its numbers of blocks. If these fail, the same kernel is
lowered again with a folded grid: all blocks are numbered along x. If there are too many, each
launched block does the work of several:

    grid (4, 131072, 1)        for (fold = blockIdx.x; fold < blocks; fold += gridDim.x) {
    bx = blockIdx.x       ->     bx = fold % across; by = fold / across % down; ..
    by = blockIdx.y            grid (524288, 1, 1)

`across` and `down` are the numbers of blocks along x and y in the original grid, `blocks` is the
number of all blocks, and `bx`, `by` are the coordinates that the kernel uses.

The blocks of a cluster must stay adjacent along y, so in a grid of clusters only x is folded.
Blocks that wait for one another's results cannot be folded. The scheduler chooses their number
along y within the limits.
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
    """Returns a copy of the kernel that never launches more CUDA blocks than `device` accepts.

    With `folded`, a launched block does the work of several blocks. Otherwise, guards (conditions
    that are checked before a launch) reject a launch with too many blocks.

    Raises:
        DefinitionError: a block has too many threads.
        UnsupportedError: a block would have to do the work of several, but the blocks wait for one
            another.
    """
    _check_block(kernel, device)
    if folded:
        return _folded(kernel, device)
    limits = (*_guards(kernel, device), *_block_guards(kernel, device))
    return replace(kernel, guards=(*kernel.guards, *limits), limits=limits)


def _guards(kernel: LoweredKernel, device: DeviceInfo) -> list[Scalar]:
    """Returns the conditions that the numbers of CUDA blocks of a launch are within the device's
    limits.

    If a number is constant and too large, its condition is the constant False.
    """
    found: list[Scalar] = []
    for k, (count, most) in enumerate(zip(kernel.grid, device.max_grid, strict=True)):
        # Each block has an iteration. With 32-bit indices, there are fewer iterations than the
        # limit along x.
        is_counted = k == 0 and kernel.index_dtype is DataType.Int32 and most >= (1 << 31) - 1
        if not is_counted:
            found.append(sc.le(count, most))
    return [x for x in found if x != sc.const(True)]


def _block_guards(kernel: LoweredKernel, device: DeviceInfo) -> list[Scalar]:
    """Returns the conditions that the numbers of threads of a CUDA block are within the device's
    limits.

    Constant numbers of threads need no condition, because `_check_block` has checked them.
    """
    pairs = [*zip(kernel.block, device.max_block, strict=True)]
    pairs.append((sc.product(kernel.block), device.max_threads_per_block))
    return [sc.le(n, most) for n, most in pairs if sc.int_value(n) is None]


def _folded(kernel: LoweredKernel, device: DeviceInfo) -> LoweredKernel:
    most = device.max_grid[0]
    if any(isinstance(s, ThreadReduce) and any(s.grid_axes) for s in walk(kernel.body)):
        raise UnsupportedError(
            f"kernel {kernel.name} needs more CUDA blocks than {device.name} can launch "
            f"({' x '.join(map(str, device.max_grid))}). No block can do the work of several, "
            "because the blocks combine their results: use a schedule with more work for each "
            "block, or smaller inputs"
        )
    x, y, z = kernel.grid
    if kernel.cluster > 1:
        fold, rest = Fold((x, sc.ONE, sc.ONE)), (y, z)
    else:
        fold, rest = Fold((x, y, z)), (sc.ONE, sc.ONE)
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
        grid=(blocks, *rest),
        scalars=tuple(scalars),
        args=tuple(args),
        fold=Fold((counts[0], counts[1], counts[2])),
    )


# ------------------------------------------------------------------ schedules of users
def _check_block(kernel: LoweredKernel, device: DeviceInfo) -> None:
    """Checks that a CUDA block of the kernel has no more threads than the device accepts.

    Raises:
        DefinitionError: the block has too many threads.
    """
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
                f"kernel {name}: a block has {threads} threads along {axis}{where}, but "
                f"{device.name} accepts at most {most}: split that axis by less"
            )
    return DefinitionError(
        f"kernel {name}: a block has {' x '.join(map(str, block))} = {prod(block)} threads, but "
        f"{device.name} accepts at most {device.max_threads_per_block}: split the thread axes by "
        "less"
    )


def refusal(
    name: str, fusion: Fusion, counts: Sequence[int], block: Sequence[int], device: DeviceInfo
) -> DefinitionError:
    """Returns the error for a schedule, written by the user, that exceeds the device's limits.

    `counts` are the numbers of CUDA blocks along x, y and z; `block` has the numbers of threads of
    a block along x, y and z. If no number of blocks is too large, the error is about the threads.
    """
    over = [k for k in range(3) if counts[k] > device.max_grid[k]]
    if not over:
        return _block_refusal(name, fusion, block, device)
    axis, most = AXES[over[0]], device.max_grid[over[0]]
    return DefinitionError(
        f"kernel {name}: the grid has {counts[over[0]]} blocks along {axis}"
        f"{_named(fusion, GRID_TYPES, axis)}, but {device.name} accepts at most {most}: "
        + (
            "give each block more work, by a split of that axis"
            if axis == "x"
            else "parallelize that axis by grid_x, or merge it into the axis that is"
        )
    )


def _named(fusion: Fusion, types: Sequence[ParallelType], axis: str) -> str:
    """Returns text for an error message about the number of blocks or threads along `axis`, which
    is x, y or z.

    The text names the tensor axis that is parallelised along `axis`, the tensor, and the line of
    the user's program that created the tensor. `types` has the parallel types of blocks if the
    error is about blocks, and those of threads if it is about threads. Returns "" if no tensor axis
    is found.
    """
    ptype = next(t for t in types if t.name.endswith(axis))
    for op in reversed(fusion.used_exprs()):
        for tv in op.outputs:
            found = next((a for a in tv.domain.loop if a.ptype is ptype), None)
            if found is not None:
                return f" for axis {found} ({ptype.name}) of {tv}{user_code(op.where)}"
    return ""


# ----------------------------------------------------------------------
# Horizontal fusion: one launch contains the blocks of several kernels, one after another along x.


def fuse_horizontally(kernels: Sequence[LoweredKernel], fusion: Fusion, name: str) -> LoweredKernel:
    """Returns one kernel named `name` whose launch has the CUDA blocks of all `kernels`, side by
    side.

    `fusion` is the fusion that the kernels compute together. In the launch, blocks and threads are
    numbered along x only.

    Raises:
        UnsupportedError: a kernel synchronises threads, exchanges values between blocks, uses a
            cluster, or numbers its blocks from the last to the first. Also if a kernel has several
            blocks or threads along z.
    """
    tensors = {tv.number: tv for kernel in kernels for tv in kernel.tensors}
    # Kernel parameters by name.
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
            # A size or stride is the same in all kernels. Other names belong to one kernel.
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
    reasons = {
        "synchronises threads": bool(kernel.waits),
        "uses workspaces": bool(kernel.workspaces),
        "uses a cluster of blocks": kernel.cluster > 1,
        "has blocks or threads along z": has_z,
        "counts its blocks from the last to the first": kernel.goes_backwards,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise UnsupportedError(
            f"kernel {kernel.name} cannot share a launch with other kernels, because it "
            f"{' and '.join(found)}"
        )
