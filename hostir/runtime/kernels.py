"""The executors that run the compiled kernels of a host program.

- The kernel of a stream loop runs once per loop iteration, on one block (part) of a tensor. The
  last blocks may be shorter or empty.
- A kernel may read tensors that the preceding kernel has left in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from fuser.ir.binding import Argument
from fuser.ir.fusion import TensorView
from fuser.ir.op import walk
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Symbol
from fuser.support import dumps
from fuser.support.errors import ExecutionError, user_code
from hostir.ir.effects import bounds
from hostir.ir.ops import LaunchKernel
from hostir.ir.program import HostIrContainer
from hostir.lowering.slices import check_places, cut_axis, split_tensor
from multidevice.sharding.placement import Block
from multidevice.sharding.queries import local_extents
from multidevice.sharding.streams import block_extents

if TYPE_CHECKING:
    from fuser.kernels.executor import FusedKernelExecutor, KernelLaunch
    from fuser.kernels.kernel_variant import Lowered
    from fuser.support.options import Settings
    from hostir.ir.ops import KernelGroup

Sizes = Mapping[Symbol, int]


class StepKernels:
    """Runs the kernel of a loop that computes a tensor part by part, one part per iteration and
    stream.

    There is one compiled kernel each for full parts, for the shorter last part, and for empty
    parts, because they have other sizes.
    """

    def __init__(
        self, place: int, split: TensorView, make: Callable[[Block], FusedKernelExecutor]
    ) -> None:
        axis = cut_axis(split)
        assert axis is not None
        self._place, self._position, self._split = place, axis.position, split
        self._extent = split.fusion.canonical(block_extents(split)[axis.position])
        self._whole, self._count = local_extents(split)[axis.position], axis.count
        self._make = make
        self._made: dict[Block, FusedKernelExecutor] = {}

    def pick(
        self, inputs: Sequence[Argument], outputs: Sequence[torch.Tensor], sizes: Sizes
    ) -> FusedKernelExecutor | None:
        """Returns the executor for the current loop iteration. There is one executor for full parts
        of a tensor, one for the shorter last part, and one for empty parts.

        `inputs` and `outputs` are the tensors of the iteration. `sizes` has the extents of whole
        tensors. Returns None if all results are empty, so that nothing is launched.
        """
        tensors = [*(v for v in inputs if isinstance(v, torch.Tensor)), *outputs]
        if not any(out.numel() for out in outputs):
            return None
        full = int(sc.evaluate(self._extent, sizes))
        if self._place >= 0:
            length = tensors[self._place].size(self._position)
        else:
            whole, count = (int(sc.evaluate(x, sizes)) for x in (self._whole, self._count))
            _, length = bounds(whole, self._number(inputs), count)
        block: Block = "empty" if length == 0 else "first" if length == full else "last"
        if block not in self._made:
            self._made[block] = self._make(block)
        return self._made[block]

    def has(self, executor: FusedKernelExecutor) -> bool:
        """Whether `executor` runs one of the kernels that this object has made for its loop."""
        return any(made is executor for made in self._made.values())

    def _number(self, inputs: Sequence[Argument]) -> int:
        if inputs and isinstance(inputs[-1], int):
            return inputs[-1]
        raise ExecutionError(
            f"a kernel computes {self._split} block by block, but no operand has the size of a "
            "block: pass the number of the block as the last input of the kernel"
            f"{user_code(self._split.user_line())}"
        )

    def launch_for(
        self,
        inputs: Sequence[Argument],
        outputs: Sequence[torch.Tensor],
        *,
        sizes: Sizes,
        device: torch.device | None = None,
    ) -> KernelLaunch | None:
        """Returns the kernel launch for one loop iteration, which computes one part of the tensors.
        The launch is data that later runs can repeat on tensors of equal layouts.

        Returns None if all results are empty. See `KernelRunner.launch_for` for `device`.
        """
        kernel = self.pick(inputs, outputs, sizes)
        if kernel is None:
            return None
        return kernel.launch_for(inputs, outputs, sizes=sizes, device=device)

    def run(
        self, inputs: Sequence[Argument], outputs: Sequence[torch.Tensor], *, sizes: Sizes
    ) -> None:
        """Launches the kernel for the part of the tensors that the current loop iteration computes.

        Does nothing if all results are empty.
        """
        kernel = self.pick(inputs, outputs, sizes)
        if kernel is not None:
            kernel.run(inputs, outputs, sizes=sizes)


# ----------------------------------------------------------------------
# L2 reuse: a reduction kernel and the following pointwise kernel read the same tensor, for example
# the statistics of rows and then their normalisation.
#
# The first kernel keeps its inputs in the L2 cache. The second kernel counts its blocks from the
# last to the first, so that it begins with the data that were read last.

# Schedulers of kernels whose CUDA blocks may run in any order.
_IN_ANY_ORDER = ("pointwise", "transpose")


class CacheReuse(NamedTuple):
    """The input tensors that one kernel shares with the kernel before or after it, through the
    GPU's L2 cache.

    - `again`: the numbers of those input tensors that the next kernel reads again. This kernel then
      tries to keep them in the cache.
    - `is_second`: whether this kernel reads inputs that the preceding kernel has left in the cache.
      This kernel then runs its CUDA blocks in reverse order, so that it begins with the elements
      that were read last.
    """

    again: frozenset[int] = frozenset()
    is_second: bool = False


# No kernel reuses the L2 cache.
NOTHING_AGAIN: Mapping[int, CacheReuse] = MappingProxyType({})


def second_reads(program: HostIrContainer) -> Mapping[int, CacheReuse]:
    """Finds pairs of consecutive kernels that read the same tensors.

    The second kernel can then read these tensors from the GPU's L2 cache. The first kernel of a
    pair is a reduction. The second kernel needs the results of the first, and may run its CUDA
    blocks in any order. Returns the reuse of each such kernel, by the number of its kernel group.
    """
    found: dict[int, CacheReuse] = {}
    launches = [op for op in walk(program.ops) if isinstance(op, LaunchKernel)]
    for first, second in pairwise(launches):
        again = {*first.ins} & {*second.ins}
        schedulers = [program.groups[op.group].scheduler for op in (first, second)]
        waits = not {*first.outs}.isdisjoint(second.ins)
        if schedulers[0] != "reduction" or schedulers[1] not in _IN_ANY_ORDER or not waits:
            continue
        numbers = frozenset(tv.number for tv in again if isinstance(tv, TensorView))
        if numbers:
            found[first.group] = CacheReuse(again=numbers)
            found[second.group] = CacheReuse(is_second=True)
    return found


# ----------------------------------------------------------------------
# The executor of a kernel group.


def make_kernel_executor(
    group: KernelGroup,
    settings: Settings,
    *,
    of: str = "a host program",
    rank: int = 0,
    lowered: Lowered | None = None,
    reads: Mapping[int, CacheReuse] = NOTHING_AGAIN,
) -> FusedKernelExecutor | StepKernels:
    """Returns the executor that compiles and runs the kernel `group` of a host program.

    If the kernel runs once per iteration of a loop, on one part of a tensor, returns a
    `StepKernels`, because the parts may differ in size.

    - `of` and `rank` appear in dumps of the kernel.
    - `lowered`: the cache of lowered kernels. Executors with the same cache share kernels that
      differ only in names; None: this executor shares no kernels.
    - `reads`: for the whole program, the tensors that one kernel reads after another from the GPU's
      L2 cache, as `second_reads` returns them.
    """
    from fuser.kernels.autotune import TunedExecutor
    from fuser.kernels.executor import FusedKernelExecutor
    from multidevice.sharding.passes.localize import localize

    kind = TunedExecutor if settings.enabled("tune") else FusedKernelExecutor

    def make(block: Block) -> FusedKernelExecutor:
        fusion, _ = localize(group.fusion, block)
        if group.number in reads:
            fusion, _ = fusion.copy()
            fusion.read_again, fusion.goes_backwards = reads[group.number]
        last = "" if block == "first" else f"_{block}"
        return kind(
            fusion,
            scheduler=group.scheduler,
            name=f"kernel{group.number}{last}",
            settings=settings,
            of=f"kernel group {group.number}{last} of {of}",
            dump=partial(dumps.write, rank=rank),
            lowered=lowered,
        )

    check_places(group.fusion.exprs)
    split = split_tensor(group.fusion)
    return make("first") if split is None else StepKernels(*split, make)
