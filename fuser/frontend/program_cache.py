"""The cache of this process's compiled programs, and the cache entries of calls.

A program is the result of compiling one fusion for a communication library (backend), a class of
inputs and options. The key of a program contains these and the fusion's full text. All definitions
and ranks with the same key share the program. Simulated ranks (threads of one process) share
programs, too, because a program contains no rank.
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

# The number of programs that the process caches; the least recently used ones are dropped first.
MAX_PROGRAMS = 256


@dataclass
class Program:
    """A compiled program: the host program (launches, communications, allocations), and the kernels
    that all its ranks and definitions share.

    - `communications`: text of the communications, which ranks (processes of the job) compare
      before they run.
    - `label`: the name of the program in dumps.
    - `rank`: the rank that created the program.
    - `dumps`: the texts of compiler stages that `FUSER_DUMP` requests.
    - `shardings`: how all outputs, including those that only update an input, are distributed over
      devices, as chosen by the user and by propagation. The tuple is empty if no tensor has a mesh.
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
        """The user's source line of the first communication, or "" if the program does not
        communicate.
        """
        return first_line(self.container)

    @property
    def shown_outputs(self) -> list[TensorView]:
        """The outputs that callers get, without those that only update an input."""
        fusion = self.segmented.fusion
        return [out for out in fusion.outputs if not fusion.is_hidden(out)]

    @property
    def output_shardings(self) -> list[Sharding]:
        """The distribution over devices of each output that callers get. The list is empty if no
        tensor has a mesh.
        """
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
        """Checks that each axis which is split over devices has a size that is a multiple of the
        number of these devices.

        `sizes` has the values of the symbols for whole (not local) sizes.

        Raises:
            ShardingError: a size is not a multiple of the number of devices.
        """
        if self._cut_axes:
            check_cuts(self._cut_axes, refined_sizes(sizes))

    def kernel(self, group: KernelGroup) -> FusedKernelExecutor | StepKernels:
        """Returns the executor that compiles and launches the kernels of `group`: a part of the
        program that is computed by one kernel.

        The first use of the group creates the executor.
        """
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
        """Returns the number of the part of the program (kernel group) whose kernels `executor`
        runs.
        """
        return next(
            number
            for number, runner in self._kernels.items()
            if runner is executor or (isinstance(runner, StepKernels) and runner.has(executor))
        )


class ProgramCache:
    """The cache of this process's compiled programs.

    A lock ensures that only one program is built at a time, and no program twice.
    """

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
        """Returns the program for a key, and calls `build` if there is none.

        `steps` returns which matmuls and communications are currently chosen to run at the same
        time. Its result is a part of the key. It is requested again after `build`, because the
        choice may change while a program is built. `build` runs under the cache's lock, and
        therefore must not communicate.
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
        """Returns the object that decides which matmuls and communications run at the same time
        (overlap) in programs with the key `key`.

        If there is none, `make` creates the object.
        """
        with self._lock:
            found = self._overlaps.recall(key)
            if found is None:
                found = self._overlaps[key] = make()
            return found

    def size(self) -> int:
        """Returns the number of cached programs."""
        return self._programs.size()

    def clear(self) -> None:
        """Removes all programs from the cache. Programs that are in use stay valid."""
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
    """Returns lines of text on the cached calls. Each line ends with a description of the inputs
    and options of the call.

    `lines` is a function that returns the lines of one call, without the description. `calls` are
    the cached calls. `usual` are the options of a call that sets no options itself. A description
    has only the first `passed` inputs, which are those of the caller. The other inputs, such as
    seeds, were added by the program.
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
    """A program on this rank (process of the job), and the evaluator that runs it with this rank's
    communicator.

    `overlaps` decides which matmuls and communications run at the same time.
    """

    program: Program
    evaluator: ProgramEvaluator
    overlaps: Overlaps | NoOverlap


def why_never(*, draws: bool, is_lazy: bool, have_ranks: bool) -> str:
    """Returns the reason why the compiled runner can never repeat calls of this kind, or "" if it
    can.

    The compiled runner is a C function that repeats a call. The parameters say whether the call
    draws random numbers, has lazy views as inputs, or runs on several ranks.
    """
    reasons = {
        "it draws random numbers, which change from call to call": draws,
        "lazy views are computed": is_lazy,
        "its ranks agree on each call": have_ranks,
    }
    return next((why for why, holds in reasons.items() if holds), "")


def no_fast_path(inputs: Iterable[Any]) -> None:
    """Rejects all inputs, by returning None. A new cache entry has this function as its quick check
    of inputs, until a real one is built.
    """
    del inputs


@dataclass(eq=False)
class CallCacheEntry:
    """The cache entry of all calls whose inputs have one signature (shapes, strides, dtypes,
    devices).
    """

    communicator: Communicator
    bound: BoundProgram
    run_signature: RunSignature
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
    # The compiled runner of such calls, or why there is none. `runs_left`: the number of runs after
    # which the runner is tried again. `patience`: the number of runs between later attempts.
    steady: Steady | None = None
    why_not: str = "it has not run often enough"
    runs_left: int = RUNS_BEFORE
    patience: int = RUNS_BEFORE

    def graphs(self) -> list[str]:
        """Returns lines of text: how many CUDA graphs repeat calls with such inputs on each stream,
        or why none does.
        """
        return self.bound.evaluator.cuda_graphs(self.known)

    def repeated(self) -> list[str]:
        """Returns lines of text (one line): how many calls with such inputs the compiled runner (a
        C function) has repeated, or why it has repeated none.
        """
        if self.steady is None:
            return [f"not repeated: {self.never or self._what_is_awaited()}"]
        return [f"repeated: {self.steady.runs} call(s)"]

    def _what_is_awaited(self) -> str:
        """Returns the reason why the compiled runner (a C function) does not repeat calls with such
        inputs yet.

        The text also says after how many calls the runner is tried again.
        """
        why = self.why_not
        if why == compiled_runner.COMPILING:
            why = compiled_runner.waits_for()
        return f"{why}; asked again in {self.runs_left} call(s)"

    def drop_fast_path(self, declined: Steady) -> None:
        """Drops `declined`, the compiled runner for such inputs (a C function that repeats calls).

        The runner has rejected too many calls because they had other inputs, or has become invalid.
        A runner is invalid after an error has freed the buffer of intermediates, or after a larger
        program has moved this buffer. If the runner was used often, a new runner is soon prepared.
        """
        why = "too many calls had other inputs, a run failed, or a larger program moved the memory"
        self.steady, self.why_not = None, why
        if declined.runs > MAX_DECLINED:
            self.patience = RUNS_BEFORE
        self.runs_left = self.patience

    def enable_fast_path(self, inputs: Iterable[Any]) -> None:
        """Replaces the quick check of inputs by a faster check in C, if the compiled runner (a C
        extension) is available.

        This method is called after enough calls with such inputs. If the runner is still being
        compiled, the method is called again later.
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
        """Prepares a run for inputs that the quick check has accepted, but launches nothing.

        Returns this rank's run signature (which describes the program and its sizes), the scalar
        inputs, and the function that runs the program. Ranks compare the first two before they run.
        `places` are the alignments of the inputs in memory, which the quick check returned.
        """
        self.runs_left -= 1
        if not self.runs_left:
            self.enable_fast_path(inputs)
        evaluator, known = self.bound.evaluator, self.known
        are_apart = evaluator.are_apart(inputs, known)
        return (
            self.run_signature,
            (),
            partial(evaluator.run_entry, known, inputs, places, are_apart),
        )
