"""What is known of calls with inputs of one signature."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fuser.frontend.program_cache import Program
from fuser.ir.binding import Contents, Signature, inputs_text
from fuser.runtime import compiled_runner
from fuser.support.device import VECTOR_BYTES
from fuser.support.options import Settings
from hostir.cost.overlap_search import NoOverlap, Overlaps
from hostir.runtime.evaluator import ProgramEvaluator
from hostir.runtime.known import Known
from hostir.runtime.native_runner import Steady
from multidevice.job.agreement import Claim, Prepared
from multidevice.job.communicator import Communicator

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
    """Return the lines of each class of calls, and at their ends what tells it from others: of the
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
    """Return why the compiled runner will repeat no call of this kind; "" where it may."""
    reasons = {
        "it draws random numbers, which change from call to call": draws,
        "lazy views are computed": is_lazy,
        "its ranks agree on each call": have_ranks,
    }
    return next((why for why, holds in reasons.items() if holds), "")


def sees_nothing(inputs: Iterable[Any]) -> None:
    """What sees no inputs at a glance."""
    del inputs


@dataclass(eq=False)
class CallCacheEntry:
    """What is known of calls with inputs of one signature."""

    communicator: Communicator
    bound: BoundProgram
    claim: Claim
    contents: Contents
    # Whether an input is a lazy view, to be computed before the run; `known` is of what it becomes.
    is_lazy: bool
    known: Known
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
        """Return how many CUDA graphs repeat such calls on each stream, or why none."""
        return self.bound.evaluator.cuda_graphs(self.known)

    def repeated(self) -> list[str]:
        """Return how many such calls the compiled runner has repeated, or why none."""
        if self.steady is None:
            return [f"not repeated: {self.never or self._what_is_awaited()}"]
        return [f"repeated: {self.steady.runs} call(s)"]

    def _what_is_awaited(self) -> str:
        """Return why the compiled runner repeats no such call yet, and when it is asked again."""
        why = self.why_not
        if why == compiled_runner.COMPILING:
            why = compiled_runner.waits_for()
        return f"{why}; asked again in {self.runs_left} call(s)"

    def let_go(self, declined: Steady) -> None:
        """Drop what repeats such calls and no longer does. One that was of use is soon made anew:
        an error, which takes its arena, or a larger program, which moves it, may have ended that.
        """
        why = "the calls were of other kinds, one has failed, or a larger program moved its memory"
        self.steady, self.why_not = None, why
        if declined.runs > MAX_DECLINED:
            self.patience = RUNS_BEFORE
        self.runs_left = self.patience

    def hasten(self, inputs: Iterable[Any]) -> None:
        """Let calls like this one, which has come often, be seen by a glance in C, once there is
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
        """Return what `FusionExecutorCache.prepare` does, for inputs that the glance has seen."""
        self.runs_left -= 1
        if not self.runs_left:
            self.hasten(inputs)
        evaluator, known = self.bound.evaluator, self.known
        are_apart = evaluator.are_apart(inputs, known)
        return self.claim, (), partial(evaluator.run_known, known, inputs, places, are_apart)
