"""The programs of this process, and the cache entries of calls.

A program is the result of lowering one structure (the fusion's full text) for a backend, an input
class and options. All definitions and ranks with this key share it. It contains no rank, so
simulated ranks share it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from fuser.ir.binding import Contents, Signature, inputs_text
from fuser.ir.domain.device_mesh import DeviceMesh
from fuser.ir.fusion import TensorView
from fuser.ir.scalar.constructors import Symbol
from fuser.kernels.executor import FusedKernelExecutor
from fuser.kernels.kernel_variant import Lowered
from fuser.passes.concretize import refined_sizes
from fuser.passes.segment import SegmentedFusion
from fuser.runtime import compiled_runner
from fuser.support.device import VECTOR_BYTES
from fuser.support.dumps import Dump
from fuser.support.locks import make_reentrant_lock
from fuser.support.lru import Recent
from fuser.support.options import Settings
from hostir.cost.overlap_search import NoOverlap, Overlaps
from hostir.ir.ops import KernelGroup
from hostir.ir.program import HostIrContainer
from hostir.runtime.agreement import first_line
from hostir.runtime.evaluator import ProgramEvaluator
from hostir.runtime.kernels import CacheReuse, StepKernels, make_kernel_executor, second_reads
from hostir.runtime.native_runner import Steady
from hostir.runtime.plan_cache import SignatureEntry
from multidevice.job.agreement import Prepared, RunSignature
from multidevice.job.communicator import Communicator
from multidevice.sharding.queries import CutAxis, Sharding, check_cuts, cut_axes

# The number of programs that the process keeps; the least recently used ones are dropped first.
MAX_PROGRAMS = 256


@dataclass
class Program:
    """One lowering: the host program, and the kernels that all its ranks and users share.

    - `communications`: text of the communications, which ranks compare before they run.
    - `label`: the name of the program in dumps.
    - `rank`: the rank that created it.
    - `dumps`: the texts of stages that `FUSER_DUMP` asked for.
    - `shardings`: the shardings of all outputs, hidden ones included, chosen by the user and by
      propagation; () without meshes.
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
        """The user's line of the first communication; "" without communication."""
        return first_line(self.container)

    @property
    def shown_outputs(self) -> list[TensorView]:
        """The outputs that callers get."""
        fusion = self.segmented.fusion
        return [out for out in fusion.outputs if not fusion.is_hidden(out)]

    @property
    def output_shardings(self) -> list[Sharding]:
        """The shardings of `shown_outputs`; [] if no tensor has a mesh."""
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
        """Raises `ShardingError` if a (global) size of a sharded axis is not a multiple of its
        devices."""
        if self._cut_axes:
            check_cuts(self._cut_axes, refined_sizes(sizes))

    def kernel(self, group: KernelGroup) -> FusedKernelExecutor | StepKernels:
        """Returns the executor of a kernel group, which is created at its first use."""
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
        """Returns the number of the kernel group that an executor belongs to."""
        return next(
            number
            for number, runner in self._kernels.items()
            if runner is executor or (isinstance(runner, StepKernels) and runner.has(executor))
        )


class ProgramCache:
    """Finds or builds programs. A lock ensures that only one is built at a time, and none twice."""

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
        """Returns the program for a key and the chosen overlapped steps, and builds it if there is
        none.

        `steps` returns the choice. It may change while a program is built. `build` must not
        communicate, because it runs under the lock.
        """
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
        """Returns the object that decides about overlapped steps for the programs of a key."""
        with self._lock:
            found = self._overlaps.recall(key)
            if found is None:
                found = self._overlaps[key] = make()
            return found

    def size(self) -> int:
        """Returns the number of cached programs."""
        return self._programs.size()

    def clear(self) -> None:
        """Drops all programs from the cache. Programs that are in use stay valid."""
        self._programs, self._overlaps = Recent(MAX_PROGRAMS), Recent(MAX_PROGRAMS)


PROGRAMS = ProgramCache()


# ----------------------------------------------------------------------
# The cache entries of calls, one for each signature of inputs.

# Runs of a call before the compiled runner is first tried; the largest number of runs between two
# attempts; the number of successive other calls after which a runner is dropped.
RUNS_BEFORE, MAX_PATIENCE, MAX_DECLINED = 8, 1024, 64


CallKey = tuple[Communicator, Settings, torch.device | None, Signature]


def status_lines(
    lines: Callable[[CallCacheEntry], list[str]],
    calls: Mapping[CallKey, CallCacheEntry],
    usual: Settings,
    passed: int,
) -> list[str]:
    """Returns a status line for each class of calls, which ends with the class.

    Of the inputs, it shows the first `passed`: those that the caller passes.
    """
    return [
        f"{line} {_class_text(key, usual, passed)}"
        for key, call in list(calls.items())
        for line in lines(call)
    ]


def _class_text(key: CallKey, usual: Settings, passed: int) -> str:
    _, settings, where, inputs = key
    shown = [inputs_text(inputs[:passed])]
    shown += [] if settings is usual else [str(settings)]
    shown += [] if where is None else [f"device {where}"]
    return f"(inputs {'; '.join(shown)})"


@dataclass
class BoundProgram:
    """A program, and the evaluator that runs it on this rank."""

    program: Program
    evaluator: ProgramEvaluator
    overlaps: Overlaps | NoOverlap


def why_never(*, draws: bool, is_lazy: bool, have_ranks: bool) -> str:
    """Returns why the compiled runner can never repeat calls of this kind; "" if it can."""
    reasons = {
        "it draws random numbers, which change from call to call": draws,
        "lazy views are computed": is_lazy,
        "its ranks agree on each call": have_ranks,
    }
    return next((why for why, holds in reasons.items() if holds), "")


def no_fast_path(inputs: Iterable[Any]) -> None:
    """Rejects all inputs. It is the quick check of a call entry that has none yet."""
    del inputs


@dataclass(eq=False)
class CallCacheEntry:
    """Cache entry of the calls with inputs of one signature."""

    communicator: Communicator
    bound: BoundProgram
    claim: RunSignature
    contents: Contents
    # Whether an input is a lazy view, which is computed before the run. `known` is then the entry
    # of the computed inputs.
    is_lazy: bool
    known: SignatureEntry
    # Why the compiled runner can never repeat such a call; "" if it can.
    never: str = ""
    # The quick check of inputs, `Contents.glance`. The second call creates it, because many
    # signatures occur only once.
    glance: Callable[[Iterable[Any]], tuple[int, ...] | None] = no_fast_path
    has_come_again: bool = False
    # Whether a quick check in C has been tried.
    is_fast_path_tried: bool = False
    # The compiled runner of such calls, or why there is none. `runs_left`: after so many runs it is
    # tried again; `patience`: the interval after that.
    steady: Steady | None = None
    why_not: str = "it has not run often enough"
    runs_left: int = RUNS_BEFORE
    patience: int = RUNS_BEFORE

    def graphs(self) -> list[str]:
        """Returns the number of CUDA graphs that repeat such calls on each stream, or why there are
        none."""
        return self.bound.evaluator.cuda_graphs(self.known)

    def repeated(self) -> list[str]:
        """Returns the number of such calls that the compiled runner has repeated, or why there are
        none."""
        if self.steady is None:
            return [f"not repeated: {self.never or self._what_is_awaited()}"]
        return [f"repeated: {self.steady.runs} call(s)"]

    def _what_is_awaited(self) -> str:
        """Returns why the compiled runner does not repeat such calls yet, and when it is tried
        again."""
        why = self.why_not
        if why == compiled_runner.COMPILING:
            why = compiled_runner.waits_for()
        return f"{why}; asked again in {self.runs_left} call(s)"

    def drop_fast_path(self, declined: Steady) -> None:
        """Drops the compiled runner of such calls, because it no longer accepts them.

        A runner that was useful is replaced soon. An error (which frees its arena) or a larger
        program (which moves the arena) may have invalidated it.
        """
        why = "the calls were of other kinds, one has failed, or a larger program moved its memory"
        self.steady, self.why_not = None, why
        if declined.runs > MAX_DECLINED:
            self.patience = RUNS_BEFORE
        self.runs_left = self.patience

    def enable_fast_path(self, inputs: Iterable[Any]) -> None:
        """Replaces the quick check of inputs by one in C, if the compiled runner is available.

        Called after enough runs of such calls. If the runner is still being compiled, tries again
        later.
        """
        if self.why_not != compiled_runner.COMPILING:  # the compilation ends soon
            self.patience = min(2 * self.patience, MAX_PATIENCE)
        self.runs_left = self.patience
        is_off = self.bound.program.settings.disabled("compiled_runner")
        if is_off or self.is_fast_path_tried or self.glance is no_fast_path:
            return
        runner = compiled_runner.find()
        if runner is None:
            return
        self.is_fast_path_tried, tensors = True, tuple(inputs)
        places = self.contents.places(tensors)
        # It rejects some kinds of tensors by raising.
        with suppress(RuntimeError, TypeError, ValueError):
            self.glance = runner.Glance(tensors, VECTOR_BYTES - 1, places, self.glance)

    def prepare(self, inputs: Any, places: tuple[int, ...]) -> Prepared[list[torch.Tensor]]:
        """Returns the result of `FusionExecutorCache.prepare`, for inputs that the quick check has
        accepted."""
        self.runs_left -= 1
        if not self.runs_left:
            self.enable_fast_path(inputs)
        evaluator, known = self.bound.evaluator, self.known
        are_apart = evaluator.are_apart(inputs, known)
        return self.claim, (), partial(evaluator.run_entry, known, inputs, places, are_apart)
