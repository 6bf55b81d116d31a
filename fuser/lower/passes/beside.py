"""Kernels beside one another: one launch has the blocks of all, one after the other along x."""

from __future__ import annotations

from collections.abc import Sequence

from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.lower.kernel_ir import Arg, Body, KernelPart, LoweredKernel, ScalarArg, TensorArg
from fuser.support.errors import UnsupportedError


def beside(kernels: Sequence[LoweredKernel], fusion: Fusion, name: str) -> LoweredKernel:
    """Return one kernel called `name` of all, made for `fusion`.

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
