"""The dry run: carries out a host program on tensors without contents (torch's `meta` device).

Nothing is launched, computed or communicated. A dry run finds two things:

- the kernels that a run needs, so that all kernels are compiled before the first launch, several at
  the same time;
- the plan of recorded steps that later runs repeat, for programs that `can_bind`.
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
from hostir.runtime.size_generic_plan import SizeGenericPlan, size_generic_plan
from hostir.runtime.steps import LaunchStep
from hostir.runtime.streams import UnservedStreams, Work

if TYPE_CHECKING:
    from fuser.kernels.executor import KernelRequest


def can_bind(program: HostIrContainer) -> bool:
    """Whether a dry run, on tensors without contents, can record the steps of `program` that later
    runs repeat.

    Otherwise a real run must record them.
    """
    return all(not isinstance(op, HostOp) or op.has_dry_run for op in walk(program.ops))


@dataclass
class DryRun:
    """The results of a dry run: the kernels that a run needs, and the plan, the list of steps that
    later runs repeat.

    Each kernel is described by a request, which has the executor, the operands, the results and the
    sizes of the launch. `plan` is None if no plan was asked for, or if only a real run can record
    the plan.
    """

    requests: Sequence[KernelRequest]
    plan: Plan | None = None
    # Makes the plans of other sizes; None if other sizes may need other steps.
    generic_plan: SizeGenericPlan | None = None

    @property
    def is_compiled(self) -> bool:
        """Whether all kernels of the plan (the recorded steps that later runs repeat) are compiled.
        False if there is no plan.
        """
        if self.plan is None:
            return False
        launches = [step.kernel for step, _ in self.plan.steps if isinstance(step, LaunchStep)]
        return len(launches) == len(self.requests) and all(k.variant.compiled for k in launches)


def dry_run(frame: Frame) -> DryRun:
    """Finds the kernels that a run of the program in `frame` needs, without running the program.

    `frame` is the state with which the run would begin, with the inputs. Loop iterations with equal
    shapes, strides and alignments need only one kernel, so they share one request in the result.
    """
    requests: dict[object, KernelRequest] = {}

    def note(request: KernelRequest) -> None:
        runner, ins, outs, _ = request
        requests.setdefault((runner, *map(_kernel_key, (*ins, *outs))), request)

    walked = _emptied(frame, note)
    with torch.no_grad():
        Execution(walked).run(frame.program.ops)
    return DryRun(list(requests.values()))


def dry_run_plan(
    frame: Frame, free: frozenset[int], outputs: list[TensorView], arenas: Arenas
) -> DryRun:
    """Finds the kernels that a run needs, and records the plan, the list of steps that later runs
    repeat.

    - `frame`: the state with which the run would begin, with the program (for which `can_bind` must
      hold) and the inputs.
    - `free`: the positions of those scalar inputs on which no size depends. Their values may change
      between the runs that repeat the plan.
    - `outputs`: the tensors that runs of the plan return.
    - `arenas`: manages the memory of intermediates.

    No plan is recorded in two cases: only torch can choose the strides of a result, or the address
    of an input is not a multiple of the input's element size. A real run must then record the plan.
    """
    requests: list[KernelRequest] = []
    if any(t.data_ptr() % t.element_size() for t in frame.tensors.values()):
        return dry_run(frame)
    walked = _emptied(frame, requests.append)
    recorder = Recorder(walked, free, frame.machine)
    with torch.no_grad():
        try:
            recorder.execution.run(frame.program.ops)
        except OnlyRunTells:
            return dry_run(frame)
        plan = recorder.finish(outputs, arenas)
        generic_plan = size_generic_plan(recorder, plan)
    recorder.forget_tensors()
    return DryRun(requests, plan, generic_plan)


def _emptied(frame: Frame, note: Callable[[KernelRequest], object]) -> Frame:
    """Returns a copy of `frame` for a dry run. Each tensor is replaced by one of the same shape,
    strides and dtype that has no memory. Numbers keep their values.

    A kernel launch in the dry run launches nothing. Instead, `note` is called with a description of
    the launch, so that the kernel can be compiled.
    """
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
    """Returns a tensor without contents that has the shape, strides, dtype and alignment of `t`.

    The tensor is on torch's `meta` device. Its storage offset, in whole elements, represents the
    alignment.
    """
    shape, strides, skipped = t.shape, t.stride(), t.data_ptr() % VECTOR_BYTES // t.element_size()
    if not skipped:
        made = torch.empty_strided(shape, strides, dtype=t.dtype, device="meta")
    else:
        room = torch.empty(skipped + spanned(shape, strides), dtype=t.dtype, device="meta")
        made = room.as_strided(shape, strides, skipped)
    return made.requires_grad_() if t.requires_grad else made


def _kernel_key(value: Argument) -> object:
    """Returns the properties of a kernel operand that decide which compiled kernel is needed.
    Launches with equal properties share a kernel.

    For a tensor, these are shape, strides, and the address modulo the bytes of a vector access. For
    a number, this is the number.
    """
    if not isinstance(value, torch.Tensor):
        return value
    return value.shape, value.stride(), value.storage_offset() * value.element_size() % VECTOR_BYTES
