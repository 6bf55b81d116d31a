"""Kernels that run step by step: on equal blocks, on a shorter last one, and on none at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from fuser.ir import scalar as sc
from fuser.ir.binding import Argument
from fuser.ir.scalar import Symbol
from fuser.ir.tensor import TensorView
from hostir.container import KernelGroup
from multidevice.placement import Block
from multidevice.streams import block_extents, stream_axis

if TYPE_CHECKING:
    from fuser.kernels.executor import KernelExecutor

Sizes = Mapping[Symbol, int]


def split_output(group: KernelGroup) -> TensorView | None:
    """Return a result of a kernel whose steps may see a shorter block; None where all are alike."""
    for out in group.fusion.outputs:
        axis = stream_axis(out)
        if axis is not None and not axis.is_logical:
            return out
    return None


class StepKernels:
    """The kernel of a group for equal blocks, and its twin for a shorter last one."""

    def __init__(self, out: TensorView, make: Callable[[Block], KernelExecutor]) -> None:
        axis = stream_axis(out)
        assert axis is not None
        self._position = axis.position
        self._extent = out.fusion.canonical(block_extents(out)[axis.position])
        self._make = make
        self._made: dict[Block, KernelExecutor] = {}

    def pick(self, outputs: Sequence[torch.Tensor], sizes: Sizes) -> KernelExecutor | None:
        """Return what runs a step with these results; None where they have no elements."""
        length = outputs[0].size(self._position)
        if length == 0:
            return None
        block: Block = "first" if length == int(sc.evaluate(self._extent, sizes)) else "last"
        if block not in self._made:
            self._made[block] = self._make(block)
        return self._made[block]

    def run(
        self, inputs: Sequence[Argument], outputs: Sequence[torch.Tensor], *, sizes: Sizes
    ) -> None:
        """See `KernelRunner.run`."""
        kernel = self.pick(outputs, sizes)
        if kernel is not None:
            kernel.run(inputs, outputs, sizes=sizes)
