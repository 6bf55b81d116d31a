"""Kernels that the user scheduled by hand: `FusionDefinition.manual_execute`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fuser import dumps
from fuser.errors import DefinitionError, UnsupportedError
from fuser.frontend.draws import Draws
from fuser.inputs import device_of
from fuser.ir import scalar as sc
from fuser.ir.binding import Argument
from fuser.ir.dtypes import to_torch
from fuser.ir.fusion import Fusion
from fuser.kernels.executor import KernelExecutor
from fuser.lower.stream import steps_of
from fuser.passes.concretize import refine_extents
from hostir.bind import InputBinder
from hostir.layout import allocated_strides


class ManualKernel:
    """One kernel for a fusion, with the schedule that its tensors have when this is made.

    Raises:
        UnsupportedError: the fusion has a mesh, a stream axis, aliased outputs, or random ops
            without a seed.
    """

    def __init__(self, fusion: Fusion) -> None:
        if fusion.aliases or any(tv.mesh is not None for tv in fusion.tensors()):
            raise UnsupportedError("manual_execute: meshes and aliased outputs are for execute()")
        if steps_of(fusion) is not None:
            raise UnsupportedError("manual_execute: loops over streams are for execute()")
        if Draws.of(fusion) is not None:
            raise UnsupportedError(
                "manual_execute: give random ops rng_seed and rng_offset, execute() draws them"
            )
        if len(set(fusion.outputs)) != len(fusion.outputs):
            raise DefinitionError("manual_execute: an output was added twice")
        self._fusion, _ = fusion.copy()
        refine_extents(self._fusion)
        self._binder = InputBinder(self._fusion)
        self._executor = KernelExecutor(
            self._fusion, scheduler="user", name="user", of=f"the kernel of {dumps.next_fusion()}"
        )

    def run(self, inputs: Sequence[Argument]) -> list[torch.Tensor]:
        """Return the outputs, freshly allocated, in order."""
        device = device_of(inputs, None)
        values = self._binder.bind(inputs, device)
        outputs: list[torch.Tensor] = []
        for out in self._fusion.outputs:
            shape = [int(sc.evaluate(self._fusion.canonical(x), values)) for x in out.shape()]
            strides = allocated_strides(out, shape)
            dtype = to_torch(out.dtype())
            outputs.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))
        sizes = {s: v for s, v in values.items() if isinstance(v, int)}
        self._executor.run(list(inputs), outputs, sizes=sizes)
        return outputs

    def kernel_text(self) -> str:
        """Return the CUDA text of the kernels made so far."""
        return "\n".join(v.kernel.source.text for v in self._executor.variants)
