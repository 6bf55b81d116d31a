"""The programs of this process: one for each structure, whichever definition or rank asks for it.

A program is what lowering makes of a structure (the fusion's full text), a backend's name, an input
class and options. No rank stands in it, so simulated ranks share one, as equal definitions do.
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
        """Raises `ShardingError` where a mesh does not divide one of these (global) sizes."""
        if self._cut_axes:
            check_cuts(self._cut_axes, refined_sizes(sizes))

    def kernel(self, group: KernelGroup) -> FusedKernelExecutor | StepKernels:
        """Returns what runs a kernel group, made at its first use."""
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
        """Returns the number of the kernel group that an executor runs."""
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
        """Returns the program of a key, and of the steps that were chosen, which may be known only
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
        """Returns what decides about the steps of the programs of a key."""
        with self._lock:
            found = self._overlaps.recall(key)
            if found is None:
                found = self._overlaps[key] = make()
            return found

    def size(self) -> int:
        return self._programs.size()

    def clear(self) -> None:
        """Forgets all programs; those in use live on with their users."""
        self._programs, self._overlaps = Recent(MAX_PROGRAMS), Recent(MAX_PROGRAMS)


PROGRAMS = ProgramCache()


# ----------------------------------------------------------------------
# What is known of calls with inputs of one signature.

# Runs of a call before the compiled runner is asked to take it, and at most between two questions;
# calls, one after another, that are not its own, before it lets go.
RUNS_BEFORE, MAX_PATIENCE, MAX_DECLINED = 8, 1024, 64


CallKey = tuple[Communicator, Settings, torch.device | None, Signature]


def told(
    lines: Callable[[CallCacheEntry], list[str]],
    calls: Mapping[CallKey, CallCacheEntry],
    usual: Settings,
    passed: int,
) -> list[str]:
    """Returns the lines of each class of calls, and at their ends what tells it from others: of the
    inputs, those that the caller has `passed`."""
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
    """A program and what runs it on this rank."""

    program: Program
    evaluator: ProgramEvaluator
    overlaps: Overlaps | NoOverlap


def why_never(*, draws: bool, is_lazy: bool, have_ranks: bool) -> str:
    """Returns why the compiled runner will repeat no call of this kind; "" where it may."""
    reasons = {
        "it draws random numbers, which change from call to call": draws,
        "lazy views are computed": is_lazy,
        "its ranks agree on each call": have_ranks,
    }
    return next((why for why, holds in reasons.items() if holds), "")


def sees_nothing(inputs: Iterable[Any]) -> None:
    """Placeholder of a check of inputs: it accepts none."""
    del inputs


@dataclass(eq=False)
class CallCacheEntry:
    """Cache entry of the calls with inputs of one signature."""

    communicator: Communicator
    bound: BoundProgram
    claim: RunSignature
    contents: Contents
    # Whether an input is a lazy view, to be computed before the run; `known` is of what it becomes.
    is_lazy: bool
    known: SignatureEntry
    # Why the compiled runner can repeat no such call, where that is known before it runs; else "".
    never: str = ""
    # `Contents.glance`; it sees nothing before the second call: many sizes come once.
    glance: Callable[[Iterable[Any]], tuple[int, ...] | None] = sees_nothing
    has_come_again: bool = False
    # Whether that has been tried in C.
    is_hastened: bool = False
    # What repeats such calls in one call of the compiled runner, or why nothing does; how many runs
    # pass before it is asked for, the next time and the time after.
    steady: Steady | None = None
    why_not: str = "it has not run often enough"
    runs_left: int = RUNS_BEFORE
    patience: int = RUNS_BEFORE

    def graphs(self) -> list[str]:
        """Returns how many CUDA graphs repeat such calls on each stream, or why none."""
        return self.bound.evaluator.cuda_graphs(self.known)

    def repeated(self) -> list[str]:
        """Returns how many such calls the compiled runner has repeated, or why none."""
        if self.steady is None:
            return [f"not repeated: {self.never or self._what_is_awaited()}"]
        return [f"repeated: {self.steady.runs} call(s)"]

    def _what_is_awaited(self) -> str:
        """Returns why the compiled runner repeats no such call yet, and when it is asked again."""
        why = self.why_not
        if why == compiled_runner.COMPILING:
            why = compiled_runner.waits_for()
        return f"{why}; asked again in {self.runs_left} call(s)"

    def let_go(self, declined: Steady) -> None:
        """Drops what repeats such calls and no longer does. One that was of use is soon made anew:
        an error, which takes its arena, or a larger program, which moves it, may have ended that.
        """
        why = "the calls were of other kinds, one has failed, or a larger program moved its memory"
        self.steady, self.why_not = None, why
        if declined.runs > MAX_DECLINED:
            self.patience = RUNS_BEFORE
        self.runs_left = self.patience

    def hasten(self, inputs: Iterable[Any]) -> None:
        """Lets calls like this one, which has come often, be seen by a glance in C, once there is
        one; ask again later where there is none yet."""
        if self.why_not != compiled_runner.COMPILING:  # which ends soon
            self.patience = min(2 * self.patience, MAX_PATIENCE)
        self.runs_left = self.patience
        is_off = self.bound.program.settings.disabled("compiled_runner")
        if is_off or self.is_hastened or self.glance is sees_nothing:
            return
        runner = compiled_runner.find()
        if runner is None:
            return
        self.is_hastened, tensors = True, tuple(inputs)
        places = self.contents.places(tensors)
        # Of tensors of some kinds it sees nothing.
        with suppress(RuntimeError, TypeError, ValueError):
            self.glance = runner.Glance(tensors, VECTOR_BYTES - 1, places, self.glance)

    def prepare(self, inputs: Any, places: tuple[int, ...]) -> Prepared[list[torch.Tensor]]:
        """Returns what `FusionExecutorCache.prepare` does, for inputs that the glance has seen."""
        self.runs_left -= 1
        if not self.runs_left:
            self.hasten(inputs)
        evaluator, known = self.bound.evaluator, self.known
        are_apart = evaluator.are_apart(inputs, known)
        return self.claim, (), partial(evaluator.run_known, known, inputs, places, are_apart)
