"""Fusions scheduled by hand, for tests of lowering; their kernels run against torch in
float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fuser.ir.binding import bind_inputs
from fuser.ir.domain.tensor_domain import TensorDomain, contiguity_for
from fuser.ir.dtypes import DataType, to_torch
from fuser.ir.fusion import Fusion, TensorView
from fuser.ir.fusion_guard import FusionGuard
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Number
from fuser.ir.types import IterType, ParallelType
from fuser.kernels.kernel_variant import Kernel, make_kernel
from fuser.lower.kernel_ir import (
    ScalarArg,
    StrideArg,
    TensorArg,
    WorkspaceArg,
    stride_symbol,
)
from fuser.ops.reference.meaning import evaluate_fusion
from fuser.runtime.compile import compile_kernels
from fuser.runtime.compiled_kernel import CompiledKernel
from fuser.support.device import CPU, H200, DeviceInfo

P = ParallelType
Build = Callable[..., "TensorView | Sequence[TensorView]"]


def new_input(
    fusion: Fusion,
    shape: Sequence[int],
    dtype: DataType = DataType.Float,
    *,
    contiguity: bool | Sequence[bool | None] = True,
    order: Sequence[int] | None = None,
) -> TensorView:
    """Adds an input: 1 is a broadcast axis, -1 a symbol, another number a constant extent.

    `order` lists the logical axes from the outermost in memory to the innermost.
    """
    axes = [
        fusion.new_axis(sc.ONE, IterType.broadcast)
        if n == 1
        else fusion.new_axis(fusion.new_extent(lo=1) if n < 0 else sc.const(n))
        for n in shape
    ]
    allocation = tuple(axes[k] for k in order) if order is not None else ()
    flags = (
        contiguity_for(allocation or axes, contiguity)
        if isinstance(contiguity, bool)
        else tuple(contiguity)
    )
    domain = TensorDomain.of(axes, allocation=allocation, contiguity=flags)
    tv = fusion.new_tensor(domain, dtype)
    fusion.add_input(tv)
    return tv


def define(build: Build, *inputs: Sequence[int], dtype: DataType = DataType.Float) -> Fusion:
    """Returns the fusion of `build(*inputs)`, whose results become the outputs."""
    fusion = Fusion()
    with FusionGuard(fusion):
        results = build(*(new_input(fusion, s, dtype) for s in inputs))
        for out in (results,) if isinstance(results, TensorView) else results:
            fusion.add_output(out)
    return fusion


def parallelize(tv: TensorView, *types: ParallelType | None) -> None:
    """Gives each loop axis a parallel type, by position (None: serial)."""
    for k, ptype in enumerate(types):
        if ptype is not None:
            tv.axis(k).parallelize(ptype)


def lower(
    fusion: Fusion,
    *,
    name: str = "kernel",
    index: DataType = DataType.Int32,
    device: DeviceInfo = H200,
) -> Kernel:
    return make_kernel(fusion, name=name, index_dtype=index, device=device)


def launch(
    fusion: Fusion,
    kernel: Kernel,
    inputs: Sequence[torch.Tensor | Number],
    *,
    checked: bool = True,
    compiled: CompiledKernel | None = None,
) -> list[torch.Tensor]:
    """Runs a kernel on the CPU; outputs are first filled with a pattern that no result has."""
    values = dict(bind_inputs(fusion, inputs))
    outputs = []
    for tv in fusion.outputs:
        sizes = [
            (int(sc.evaluate(fusion.canonical(x), values)) for x in (a.extent, a.size))
            for a in tv.domain.no_reductions
        ]
        held, shape = zip(*sizes, strict=True) if sizes else ((), ())
        outputs.append(torch.full(held, 77, dtype=to_torch(tv.dtype())).expand(shape))
    given = dict(zip((*fusion.inputs, *fusion.outputs), (*inputs, *outputs), strict=True))
    for tv, t in given.items():
        if isinstance(tv, TensorView):
            assert isinstance(t, torch.Tensor)
            values.update((stride_symbol(tv, k), s) for k, s in enumerate(t.stride()))
    for guard in kernel.guards:
        assert sc.evaluate(guard, values), f"guard {guard} fails for {values}"
    for tv, nbytes in kernel.alignments:
        assert given[tv].data_ptr() % nbytes == 0  # pyright: ignore
    args: list[object] = []
    for arg in kernel.args:
        match arg:
            case TensorArg():
                args.append(given[arg.tv])
            case ScalarArg():
                args.append(sc.evaluate(arg.scalar, values))
            case StrideArg():
                args.append(given[arg.tv].stride(arg.axis))  # pyright: ignore
            case WorkspaceArg():
                space = kernel.workspaces[arg.index]
                nbytes = int(sc.evaluate(space.nbytes, values))
                args.append(torch.zeros(nbytes, dtype=torch.uint8))
    grid = tuple(int(sc.evaluate(x, values)) for x in kernel.grid)
    block = tuple(int(sc.evaluate(x, values)) for x in kernel.block)
    if compiled is None:
        (compiled,) = compile_kernels([kernel.source], "cpu", checked=checked)
    for _ in range(2 if kernel.workspaces else 1):
        # Twice: workspaces must be left as they were found.
        compiled.launch(
            args,  # pyright: ignore
            grid=grid,  # pyright: ignore
            block=block,  # pyright: ignore
            smem_bytes=int(sc.evaluate(kernel.smem_bytes, values)),
        )
    return outputs


LOWERED: list[Kernel] = []


def check(
    fusion: Fusion,
    inputs: Sequence[torch.Tensor | Number],
    *,
    index: DataType = DataType.Int32,
    device: DeviceInfo = H200,
    rtol: float = 2e-5,
    checked: bool = True,
) -> Kernel:
    """Lowers a fusion, runs its kernel in checked mode, and compares with torch in float64."""
    kernel = lower(fusion, index=index, device=device)
    LOWERED.append(kernel)
    compare(fusion, kernel, inputs, launch(fusion, kernel, inputs, checked=checked), rtol=rtol)
    return kernel


def compare(
    fusion: Fusion,
    kernel: Kernel,
    inputs: Sequence[torch.Tensor | Number],
    outputs: Sequence[torch.Tensor],
    *,
    rtol: float = 2e-5,
) -> None:
    """Compares a kernel's outputs with torch in float64; a failure shows the kernel."""
    expected = evaluate_fusion(fusion, list(inputs), dtype=torch.float64)
    for tv, found, want in zip(fusion.outputs, outputs, expected, strict=True):
        tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(found.dtype, rtol)
        try:
            torch.testing.assert_close(
                found.to(torch.float64),
                want.to(torch.float64).broadcast_to(found.shape),
                rtol=tolerance,
                atol=tolerance,
                equal_nan=True,
            )
        except AssertionError as error:
            raise AssertionError(f"{tv}: {error}\n{kernel.source.text}") from None


def random(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-9, 10, tuple(shape), generator=generator).to(dtype)


__all__ = [
    "CPU",
    "H200",
    "LOWERED",
    "P",
    "check",
    "compare",
    "define",
    "launch",
    "lower",
    "new_input",
    "parallelize",
    "random",
]
