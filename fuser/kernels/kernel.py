"""A kernel as data: its text and what a launch needs to know; lowering and printing make it."""

from __future__ import annotations

from dataclasses import field

from fuser.codegen.cuda_text import print_kernel
from fuser.ir.dtypes import DataType
from fuser.ir.fusion import Fusion
from fuser.ir.scalar.constructors import Scalar
from fuser.ir.tensor import TensorView
from fuser.lower.kernel_ir import Arg, Workspace
from fuser.lower.pipeline import lower_kernel
from fuser.support.device import DeviceInfo
from fuser.support.kernel_source import KernelSource
from fuser.support.record import record


@record
class Kernel:
    """Text, arguments in order, launch shape, and what it relies on: see `LoweredKernel`."""

    source: KernelSource
    args: tuple[Arg, ...]
    grid: tuple[Scalar, Scalar, Scalar]
    block: tuple[Scalar, Scalar, Scalar]
    smem_bytes: Scalar
    workspaces: tuple[Workspace, ...]
    guards: tuple[Scalar, ...]
    limits: tuple[Scalar, ...]
    alignments: tuple[tuple[TensorView, int], ...]
    ir_text: str = field(compare=False)


def make_kernel(
    fusion: Fusion,
    *,
    name: str,
    index_dtype: DataType,
    device: DeviceInfo,
    folded: bool = False,
) -> Kernel:
    """Lower a scheduled fusion and print it; for the arguments and errors see `lower_kernel`."""
    lowered = lower_kernel(fusion, name=name, index_dtype=index_dtype, device=device, folded=folded)
    source, ir_text = print_kernel(lowered)
    return Kernel(
        source,
        lowered.args,
        lowered.grid,
        lowered.block,
        lowered.smem_bytes,
        lowered.workspaces,
        lowered.guards,
        lowered.limits,
        lowered.alignments,
        ir_text,
    )
