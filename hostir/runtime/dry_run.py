"""Rehearsal: a program is walked on tensors without contents, before anything is launched.

It tells which kernels a run needs and, for programs whose every size it can tell, all that later
runs repeat: their plan. Views are all that torch makes of such tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fuser.ir.binding import Argument
from fuser.ir.fusion import TensorView
from fuser.ir.op import walk
from fuser.ir.scalar.constructors import Symbol
from fuser.support.device import VECTOR_BYTES
from hostir.ir.ops import HostOp
from hostir.ir.program import HostIrContainer
from hostir.ir.shard_layout import spanned
from hostir.runtime.execute import Execution, OnlyRunTells
from hostir.runtime.frame import Frame
from hostir.runtime.kernels import StepKernels
from hostir.runtime.plan import Arenas, Plan
from hostir.runtime.recorder import Recorder
from hostir.runtime.steps import LaunchStep
from hostir.runtime.streams import UnservedStreams, Work
from hostir.runtime.symbolic_plan import Pattern, pattern_of

if TYPE_CHECKING:
    from fuser.kernels.executor import KernelRequest


def can_bind(program: HostIrContainer) -> bool:
    """Whether a rehearsal can tell what runs of a program repeat."""
    return all(not isinstance(op, HostOp) or op.is_rehearsed for op in walk(program.ops))


@dataclass
class Rehearsal:
    """The findings of a dry run: a request for every kernel, and the plan of later runs, where one
    was asked for and can be told."""

    requests: Sequence[KernelRequest]
    plan: Plan | None = None
    # Of this plan and those of other sizes, where they have one.
    pattern: Pattern | None = None

    @property
    def is_compiled(self) -> bool:
        """Whether every kernel is known to be compiled."""
        if self.plan is None:
            return False
        launches = [step.kernel for step, _ in self.plan.steps if isinstance(step, LaunchStep)]
        return len(launches) == len(self.requests) and all(k.variant.compiled for k in launches)


def rehearse(frame: Frame) -> Rehearsal:
    """Walks the program of a frame for its kernels: one request for all steps of a loop that are
    alike."""
    requests: dict[object, KernelRequest] = {}

    def note(request: KernelRequest) -> None:
        runner, ins, outs, _ = request
        requests.setdefault((runner, *map(_launched_alike, (*ins, *outs))), request)

    walked = _emptied(frame, note)
    with torch.no_grad():
        Execution(walked).run(frame.program.ops)
    return Rehearsal(list(requests.values()))


def rehearse_plan(
    frame: Frame, free: frozenset[int], outputs: list[TensorView], arenas: Arenas
) -> Rehearsal:
    """Walks a program that `can_bind` also for the plan that yields `outputs`.

    There is none where a result's strides are torch's to choose, or where an input begins between
    two elements of its dtype.
    """
    requests: list[KernelRequest] = []
    if any(t.data_ptr() % t.element_size() for t in frame.tensors.values()):
        return rehearse(frame)
    walked = _emptied(frame, requests.append)
    recorder = Recorder(walked, free, frame.machine)
    with torch.no_grad():
        try:
            recorder.execution.run(frame.program.ops)
        except OnlyRunTells:
            return rehearse(frame)
        plan = recorder.finish(outputs, arenas)
        pattern = pattern_of(recorder, plan)
    recorder.forget_tensors()
    return Rehearsal(requests, plan, pattern)


def _emptied(frame: Frame, note: Callable[[KernelRequest], object]) -> Frame:
    """Returns a frame like this one, of tensors without contents, which launches nothing; `note`
    is told of the kernels."""
    from fuser.kernels.executor import FusedKernelExecutor

    def launch(
        group: int,
        ins: Sequence[Argument],
        outs: Sequence[torch.Tensor],
        sizes: Mapping[Symbol, int],
    ) -> Work:
        runner = frame.machine.runner(group)
        if isinstance(runner, StepKernels):
            runner = runner.pick(ins, outs, sizes)
        if isinstance(runner, FusedKernelExecutor):
            note((runner, ins, outs, sizes))
        return _nothing

    meta, streams = torch.device("meta"), UnservedStreams()
    machine = replace(frame.machine, device=meta, streams=streams, launch=launch)
    contents = {tv: _without_contents(t) for tv, t in frame.tensors.items()}
    return frame.elsewhere(machine, contents)


def _nothing() -> None:
    pass


def _without_contents(t: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that begins in the same place of a vector of memory, as far as its elements
    can be counted."""
    shape, strides, skipped = t.shape, t.stride(), t.data_ptr() % VECTOR_BYTES // t.element_size()
    if not skipped:
        made = torch.empty_strided(shape, strides, dtype=t.dtype, device="meta")
    else:
        room = torch.empty(skipped + spanned(shape, strides), dtype=t.dtype, device="meta")
        made = room.as_strided(shape, strides, skipped)
    return made.requires_grad_() if t.requires_grad else made


def _launched_alike(value: Argument) -> object:
    """Returns what a kernel may know of an operand: where in a vector of memory it begins, not
    where in memory."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.shape, value.stride(), value.storage_offset() * value.element_size() % VECTOR_BYTES
