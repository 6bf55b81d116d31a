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
from multidevice.localize import is_block
from multidevice.placement import Block
from multidevice.streams import block_extents, stream_axis

if TYPE_CHECKING:
    from fuser.kernels.executor import KernelExecutor

Sizes = Mapping[Symbol, int]


def split_tensor(group: KernelGroup) -> tuple[int, TensorView] | None:
    """Return a tensor of which a kernel's steps may see a shorter block, and its place among inputs
    and outputs; None where all steps are alike.

    Parts of a reduction are alike, but what they are parts of is not: so inputs count as well.
    """
    inputs = [tv for tv in group.fusion.inputs if isinstance(tv, TensorView)]
    for place, tv in reversed(list(enumerate((*inputs, *group.fusion.outputs)))):
        axis = stream_axis(tv)
        if axis is not None and not axis.is_logical and is_block(tv):
            return place, tv
    return None


class StepKernels:
    """The kernel of a group for equal blocks, and its twins for a shorter last one and for none."""

    def __init__(
        self, place: int, split: TensorView, make: Callable[[Block], KernelExecutor]
    ) -> None:
        axis = stream_axis(split)
        assert axis is not None
        self._place, self._position = place, axis.position
        self._extent = split.fusion.canonical(block_extents(split)[axis.position])
        self._make = make
        self._made: dict[Block, KernelExecutor] = {}

    def pick(
        self, inputs: Sequence[Argument], outputs: Sequence[torch.Tensor], sizes: Sizes
    ) -> KernelExecutor | None:
        """Return what runs a step with these tensors; None where its results have no elements."""
        tensors = [*(v for v in inputs if isinstance(v, torch.Tensor)), *outputs]
        if not any(out.numel() for out in outputs):
            return None
        length = tensors[self._place].size(self._position)
        full = int(sc.evaluate(self._extent, sizes))
        block: Block = "empty" if length == 0 else "first" if length == full else "last"
        if block not in self._made:
            self._made[block] = self._make(block)
        return self._made[block]

    def run(
        self, inputs: Sequence[Argument], outputs: Sequence[torch.Tensor], *, sizes: Sizes
    ) -> None:
        """See `KernelRunner.run`."""
        kernel = self.pick(inputs, outputs, sizes)
        if kernel is not None:
            kernel.run(inputs, outputs, sizes=sizes)
