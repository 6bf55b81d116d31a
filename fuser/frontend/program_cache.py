"""The programs of this process: one for each structure, whichever definition or rank asks for it.

A program is what lowering makes of a structure (the fusion's full text), a backend's name, an input
class and options. No rank stands in it, so simulated ranks share one, as equal definitions do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.scalar.constructors import Symbol
from fuser.ir.tensor import TensorView
from fuser.kernels.alike import Lowered
from fuser.kernels.executor import FusedKernelExecutor
from fuser.passes.concretize import refined_sizes
from fuser.passes.segment import SegmentedFusion
from fuser.support.dumps import Dump
from fuser.support.locks import make_reentrant_lock
from fuser.support.lru import Recent
from fuser.support.options import Settings
from hostir.cost.overlap_search import Overlaps
from hostir.ir.program import HostIrContainer, KernelGroup
from hostir.passes.second_reads import CacheReuse, second_reads
from hostir.runtime.kernels import StepKernels, make_kernel_executor
from hostir.runtime.run_signature import first_line
from multidevice.sharding.queries import CutAxis, Sharding, check_cuts, cut_axes

# Programs that the process keeps; those used least lately go first.
MAX_PROGRAMS = 256


@dataclass
class Program:
    """One lowering: the host program, and the kernels that all its ranks and users share.

    `communications` is what it sends and receives: what the ranks compare before they run.
    `label` is what dumps call it, `rank` is that of the rank that made it, and `dumps` are the
    texts of the stages that were asked for. `shardings` are those of all outputs, hidden ones
    included, as users and propagation have placed them; () without meshes.
    """

    segmented: SegmentedFusion
    container: HostIrContainer
    communications: str
    settings: Settings
    label: str
    rank: int
    dumps: list[Dump]
    shardings: tuple[Sharding | None, ...] = ()
    _kernels: dict[int, FusedKernelExecutor | StepKernels] = field(default_factory=dict)
    _lowered: Lowered = field(default_factory=Lowered)

    @cached_property
    def first_line(self) -> str:
        """The user's line of the first communication, "" for none."""
        return first_line(self.container)

    @property
    def shown_outputs(self) -> list[TensorView]:
        """The outputs that callers get."""
        fusion = self.segmented.fusion
        return [out for out in fusion.outputs if not fusion.is_hidden(out)]

    @property
    def output_shardings(self) -> list[Sharding]:
        """The shardings of `shown_outputs`, [] when nothing has a mesh."""
        fusion = self.segmented.fusion
        pairs = zip(fusion.outputs, self.shardings, strict=True) if self.shardings else ()
        shown = (sharding for out, sharding in pairs if not fusion.is_hidden(out))
        return [sharding or Sharding(DeviceMesh(()), {}) for sharding in shown]

    @cached_property
    def _reads(self) -> Mapping[int, CacheReuse]:
        return second_reads(self.container)

    @cached_property
    def _cut_axes(self) -> tuple[CutAxis, ...]:
        return cut_axes(self.segmented.fusion)

    def check_divisible(self, sizes: Mapping[Symbol, int]) -> None:
        """Raise `ShardingError` where a mesh does not divide one of these (global) sizes."""
        if self._cut_axes:
            check_cuts(self._cut_axes, refined_sizes(sizes))

    def kernel(self, group: KernelGroup) -> FusedKernelExecutor | StepKernels:
        """Return what runs a kernel group, made at its first use."""
        found = self._kernels.get(group.number)
        if found is None:
            made = make_kernel_executor(
                group,
                self.settings,
                of=self.label,
                rank=self.rank,
                lowered=self._lowered,
                reads=self._reads,
            )
            found = self._kernels.setdefault(group.number, made)
        return found

    def group_of(self, executor: FusedKernelExecutor) -> int:
        """Return the number of the kernel group that an executor runs."""
        return next(
            number
            for number, runner in self._kernels.items()
            if runner is executor or (isinstance(runner, StepKernels) and runner.has(executor))
        )


class ProgramCache:
    """Finds or builds programs; one is built at a time, so that nothing is lowered twice."""

    def __init__(self, limit: int = MAX_PROGRAMS) -> None:
        self._programs: Recent[Hashable, Program] = Recent(limit)
        self._overlaps: Recent[Hashable, Overlaps] = Recent(limit)
        self._lock = make_reentrant_lock()
        self.lowerings = 0

    def find_or_build(
        self,
        key: Hashable,
        build: Callable[[], Program],
        steps: Callable[[], Hashable] = lambda: None,
    ) -> Program:
        """Return the program of a key, and of the steps that were chosen, which may be known only
        when one was built. `build` must not communicate: it runs under the lock."""
        found = self._programs.recall((key, steps()))
        if found is not None:
            return found
        with self._lock:
            found = self._programs.recall((key, steps()))
            if found is None:
                found = build()
                self._programs[key, steps()] = found
                self.lowerings += 1
            return found

    def overlaps(self, key: Hashable, make: Callable[[], Overlaps]) -> Overlaps:
        """Return what decides about the steps of the programs of a key."""
        with self._lock:
            found = self._overlaps.recall(key)
            if found is None:
                found = self._overlaps[key] = make()
            return found

    def size(self) -> int:
        return self._programs.size()

    def clear(self) -> None:
        """Forget all programs; those in use live on with their users."""
        self._programs, self._overlaps = Recent(MAX_PROGRAMS), Recent(MAX_PROGRAMS)


PROGRAMS = ProgramCache()
