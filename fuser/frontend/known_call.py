"""What is known of calls with inputs of one signature."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fuser.frontend.program_cache import Program
from fuser.ir.binding import Contents
from hostir.auto_overlap import NoOverlap, Overlaps
from hostir.evaluate import HostIrEvaluator
from hostir.known import Known
from hostir.steady import Steady
from multidevice.agreement import Claim, Prepared
from multidevice.communicator import Communicator

# Runs of a call before the compiled runner is asked to take it, and at most between two questions;
# calls, one after another, that are not its own, before it lets go.
RUNS_BEFORE, MAX_PATIENCE, MAX_DECLINED = 8, 1024, 64


@dataclass
class BoundProgram:
    """A program and what runs it on this rank."""

    program: Program
    evaluator: HostIrEvaluator
    overlaps: Overlaps | NoOverlap


def sees_nothing(inputs: Iterable[Any]) -> None:
    """What sees no inputs at a glance."""
    del inputs


@dataclass(eq=False)
class Call:
    """What is known of calls with inputs of one signature."""

    communicator: Communicator
    bound: BoundProgram
    claim: Claim
    contents: Contents
    # Whether an input is a lazy view, to be computed before the run; `known` is of what it becomes.
    is_lazy: bool
    known: Known
    # `Contents.glance`; it sees nothing before the second call: many sizes come once.
    glance: Callable[[Iterable[Any]], tuple[int, ...] | None] = sees_nothing
    has_come_again: bool = False
    # What repeats such calls in one call of the compiled runner, or why nothing does; how many runs
    # pass before it is asked for, the next time and the time after.
    steady: Steady | None = None
    why_not: str = "it has not run often enough"
    runs_left: int = RUNS_BEFORE
    patience: int = RUNS_BEFORE

    def repeated(self) -> str:
        """Return how many such calls the compiled runner has repeated, or why none."""
        if self.steady is None:
            return f"not repeated: {self.why_not}"
        return f"repeated: {self.steady.runs} call(s)"

    def prepare(self, inputs: Any, places: tuple[int, ...]) -> Prepared[list[torch.Tensor]]:
        """Return what `FusionExecutorCache.prepare` does, for inputs that the glance has seen."""
        evaluator, known = self.bound.evaluator, self.known
        are_apart = evaluator.are_apart(inputs, known)
        return self.claim, (), partial(evaluator.run_known, known, inputs, places, are_apart)
