"""The launch of a kernel as data: numbers of CUDA blocks and threads, arguments and workspaces.
Each call supplies tensor addresses and scalar inputs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fuser.runtime.compiled_kernel import CompiledKernel, Dim3, PreparedLaunch, slot_code
from fuser.runtime.graph_memory import graph_memory
from fuser.support.errors import KernelError

if TYPE_CHECKING:
    import torch

Number = bool | int | float
# Bytes of a sector of a GPU's L2 cache, so that no two workspaces share one.
WORKSPACE_ALIGNMENT = 32


@dataclass
class BoundLaunch:
    """A kernel's launch for all tensors of one shape, strides and alignment.

    - `args`: the arguments by parameter. Each run replaces the arguments that `pointers`, `numbers`
      and `workspaces` list.
    - `grid`, `block`: the numbers of CUDA blocks, and of threads per block, along x, y and z.
    - `pointers`: pairs (parameter index, position of its tensor among the tensors of a call).
    - `numbers`: pairs (parameter index, function from the scalar inputs of a call to the argument).
    - `workspaces`: pairs (parameter index, bytes) of memory through which CUDA blocks exchange
      values. It is zero before and after each launch.
    - `is_repeatable`: False if each launch must pack its arguments again.
    """

    args: list[Any]
    grid: Dim3
    block: Dim3
    smem_bytes: int
    pointers: tuple[tuple[int, int], ...]
    numbers: tuple[tuple[int, Callable[[Sequence[Number]], Number]], ...] = ()
    workspaces: tuple[tuple[int, int], ...] = ()
    is_repeatable: bool = True
    _prepared: PreparedLaunch | None = None
    _scratch: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_repeatable = self.is_repeatable and not (self.numbers or self.workspaces)

    def run(
        self,
        kernel: CompiledKernel,
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[Number],
        stream: int | None,
    ) -> None:
        """Launches the kernel on these tensors and scalar inputs. If `stream` (the raw handle of a
        CUDA stream) is None, torch's current stream is used.

        Raises:
            KernelError: the launch failed, or the run-time checks of a checked kernel found an
                error.
        """
        if not self.is_repeatable:
            try:
                kernel.launch(
                    self._arguments(tensors, numbers, stream),
                    grid=self.grid,
                    block=self.block,
                    smem_bytes=self.smem_bytes,
                    stream=stream,
                )
            except KernelError:
                # A kernel that was stopped may have left nonzero workspaces.
                self._scratch.clear()
                raise
            return
        prepared = self._prepared
        if prepared is None:
            prepared = self._prepared = kernel.prepare(
                self._arguments(tensors, numbers, stream),
                grid=self.grid,
                block=self.block,
                smem_bytes=self.smem_bytes,
            )
        set_pointer = prepared.set_pointer
        for param, position in self.pointers:
            set_pointer(param, tensors[position].data_ptr())
        prepared.run(stream)

    def prepare(
        self,
        kernel: CompiledKernel,
        names: Sequence[int],
        fixed: Mapping[int, torch.Tensor],
        numbers: Sequence[Number],
        memories: Sequence[torch.Tensor],
    ) -> tuple[PreparedLaunch, tuple[tuple[int, int], ...]]:
        """Returns a launch with its own packed arguments, and pairs (parameter index, tensor name)
        of the addresses that each call must replace.

        - `names` has the name (an integer) of each tensor.
        - `fixed` has the tensors, by name, that are the same in all calls and are not in the pairs.
        - `numbers` has the scalar inputs.
        - `memories` are the workspaces (`make_memories`), which the caller must keep alive.
        """
        args, moving = list(self.args), list[tuple[int, int]]()
        for param, position in self.pointers:
            name = names[position]
            tensor = fixed.get(name)
            if tensor is None:
                moving.append((param, name))
                args[param] = 0
            else:
                args[param] = tensor
        self._fill(args, numbers, memories)
        grid, block, smem_bytes = self.grid, self.block, self.smem_bytes
        prepared = kernel.prepare(args, grid=grid, block=block, smem_bytes=smem_bytes)
        return prepared, tuple(moving)

    def number_writers(
        self, kernel: CompiledKernel
    ) -> list[tuple[Callable[..., None], int, Callable[[Sequence[Number]], Number]]]:
        """Returns what a caller needs to replace the values of parameters in a packed launch. Each
        parameter that depends on the scalar inputs of a call has a triple:

        - a function that packs a value into the words of a `LaunchCall`;
        - the position of the parameter in the words, in bytes;
        - a function that computes the value from the scalar inputs.
        """
        params = kernel.source.params
        return [
            (struct.Struct("=" + slot_code(params[i])).pack_into, 8 * i, value_for)
            for i, value_for in self.numbers
        ]

    def make_memories(self, device: torch.device) -> list[torch.Tensor]:
        """Returns new, zeroed memory for each workspace, through which the CUDA blocks of a launch
        exchange values.

        The workspaces are parts of one allocation. The caller ensures that launches which may
        overlap do not use the same workspaces.
        """
        if not self.workspaces:
            return []
        import torch

        sizes = [
            -(-nbytes // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT for _, nbytes in self.workspaces
        ]
        memory, ready = None, graph_memory(device)
        if ready is not None and torch.cuda.is_current_stream_capturing():
            memory = ready.lend(sum(sizes))
        elif ready is not None:
            ready.make_ready(sum(sizes))
        if memory is None:
            # If a graph captures this, it clears the memory in every replay.
            memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        parts = memory.split(sizes)
        return [part[:nbytes] for part, (_, nbytes) in zip(parts, self.workspaces, strict=True)]

    def _arguments(
        self, tensors: Sequence[torch.Tensor], numbers: Sequence[Number], stream: int | None
    ) -> list[Any]:
        memories = self._memories(tensors[0].device, stream) if self.workspaces else ()
        return self._filled(tensors, numbers, memories)

    def _filled(
        self,
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[Number],
        memories: Sequence[torch.Tensor],
    ) -> list[Any]:
        args = list(self.args)
        for param, position in self.pointers:
            args[param] = tensors[position]
        self._fill(args, numbers, memories)
        return args

    def _fill(
        self, args: list[Any], numbers: Sequence[Number], memories: Sequence[torch.Tensor]
    ) -> None:
        for param, value_for in self.numbers:
            args[param] = value_for(numbers)
        if self.workspaces:
            for (param, _), memory in zip(self.workspaces, memories, strict=True):
                args[param] = memory

    def _memories(self, device: torch.device, stream: int | None) -> list[torch.Tensor]:
        """Returns the workspaces (zeroed memory through which CUDA blocks exchange values) for
        launches on a stream.

        Each stream has its own workspaces, because launches on different streams may overlap. A
        captured launch gets new workspaces, because its replays may overlap with all other
        launches.
        """
        import torch

        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self.make_memories(device)
        if stream is None:
            is_cuda = device.type == "cuda"
            stream = torch.cuda.current_stream(device).cuda_stream if is_cuda else 0
        found = self._scratch.get(stream)
        if found is None:
            found = self._scratch[stream] = self.make_memories(device)
        return found
