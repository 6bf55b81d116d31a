"""Profiles a run: the time of each kernel, library call (cuBLAS, torch) and communication on this
rank.

The run is timed like a trace (`hostir.profiling.tracer`). First the program runs once, and its
steps are recorded as a plan. The plan runs once more to warm up, and then again with timers. The
profile is of the last run. Inputs that the program updates are copied first. The updates of the
last run are written to the caller's inputs, and torch's random generator advances as by one run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from fuser.ir.binding import signature_of
from fuser.ir.fusion import TensorView
from fuser.ir.op import Op
from fuser.support.inputs import flatten
from hostir.cost.report import length, union
from hostir.ir.effects import CALLER
from hostir.ir.ops import (
    EndCoalescing,
    LaunchKernel,
    P2PCommunication,
    StartCoalescing,
    StartsCommunication,
    Wait,
)
from hostir.profiling.op_recorder import OpNotes, TracedOp
from hostir.profiling.timers import HostWatch, Round, clock
from hostir.profiling.tracer import Runs, Source, Together, rounds_of, watched, ways_to_time
from hostir.runtime.inputs import Argument
from hostir.runtime.plan import Plan
from hostir.runtime.recorder import Recorder
from hostir.runtime.steps import Both, LaunchStep, Step
from hostir.runtime.streams import on_device
from multidevice.coordination.bounded_wait import Team

if TYPE_CHECKING:
    from fuser.kernels.executor import KernelLaunch
    from hostir.runtime.evaluator import ProgramEvaluator
    from multidevice.job.communicator import Communicator


@dataclass(frozen=True)
class ProfiledOp:
    """The measured time and memory of one op in one iteration of its loops, on this rank.

    - `group`: the number of the kernel group that the op launches; None if the op launches no
      kernel.
    - `writes`: the numbers of the tensors whose buffers the op fills.
    - `launch`: the launch of the kernel; None if the op launches no kernel.
    - `input_bytes`, `output_bytes`: the memory of the op's tensors, each element once.
    - `seconds`: the time in which the op's stream, or the CPU, worked for the op. The time of a
      communication includes the time of its Wait.
    - `activities`: the device's names of the kernels and copies, if known.
    """

    op: TracedOp
    group: int | None
    writes: tuple[int, ...]
    launch: KernelLaunch | None
    input_bytes: int
    output_bytes: int
    seconds: float = 0.0
    activities: tuple[str, ...] = ()


@dataclass(frozen=True)
class Profiled:
    """The measurements of one profiled run on this rank.

    - `work`: the measured time of each op that computes or communicates, in the order of the
      program.
    - `wall`: seconds from before the first op until the device was done, by the host's clock.
    - `host`: seconds from before the first op until the host had issued all ops.
    - `source`: the origin of the times of ops, such as CUDA events.
    - `input_bytes`, `output_bytes`: the memory of the program's inputs, and of its outputs and
      updated inputs.
    - `outputs`: the outputs of the run.
    """

    work: tuple[ProfiledOp, ...]
    wall: float
    host: float
    source: str
    device: torch.device
    input_bytes: int
    output_bytes: int
    outputs: list[torch.Tensor]


def take_profile(
    evaluator: ProgramEvaluator,
    communicator: Communicator | None,
    team: Team,
    inputs: Sequence[Argument],
    has_cupti: bool,
) -> Profiled:
    """Runs the evaluator's program on these inputs, and returns the profile of the run on this
    rank. All ranks of `team`, which are those of the program, must call this function together.

    `has_cupti` says whether CUPTI may be used to time kernels and copies. Otherwise CUDA events are
    used. Raises the errors of `FusionDefinition.trace`.
    """
    ranks = Together(communicator, team)

    def prepare() -> list[Argument]:
        given = flatten(inputs)
        signature_of(given)  # raises for an input that is no dense tensor or number
        evaluator.prepare(given)
        evaluator.are_apart(given, None)
        return given

    given = ranks.together(prepare)
    runs = Runs(evaluator, ranks, given, SizeNotes)
    device, ops = runs.plan.device, runs.notes.ops
    source = _source(device, has_cupti=has_cupti)
    ways = ranks.together(lambda: ways_to_time(device, source, communicator))
    with torch.no_grad(), on_device(device):
        watch, _ = watched(ops, ranks, ways, partial(rounds_of, runs, repeat=1))
        outputs = runs.keep(given)
        updated = [given[i] for i in runs.updated]
    work, waits = runs.notes.work(), runs.notes.waits()
    return _profiled(work, waits, watch, device, given, outputs, updated)


def profile_call(
    launch: KernelLaunch | None,
    name: str,
    tensors: tuple[Sequence[Argument], Sequence[torch.Tensor]],
    device: torch.device,
    run: Callable[[], None],
    has_cupti: bool,
) -> Profiled:
    """Profiles the launch of one kernel outside a host program.

    - `launch`, `name`: the launch of the kernel, if known, and the name in the profile.
    - `tensors`: (inputs, outputs) of the kernel.
    - `run`: launches the kernel on these tensors; the function is called several times.
    - `has_cupti`: whether CUPTI may be used to time the kernel.
    """
    given, outputs = tensors
    sizes = sum(map(nbytes_of, given)), sum(map(nbytes_of, outputs))
    op = TracedOp(name, name, "", (), CALLER, "compute")

    def rounds(watch: HostWatch) -> None:
        timed = watch.around(0, lambda slots: run())
        for _ in range(2):  # the first round is not counted: it makes objects that are made once
            _synchronize(device)
            watch.begin_round()
            begin = clock()
            timed([])
            issued = clock()
            _synchronize(device)
            watch.end_round(begin, issued, clock())

    with torch.no_grad(), on_device(device):
        ways = ways_to_time(device, _source(device, has_cupti=has_cupti), None)
        watch, _ = watched([op], Together(None, (0,)), ways, rounds)
    work = {0: ProfiledOp(op, None, (), launch, *sizes)}
    return _profiled(work, {}, watch, device, given, list(outputs))


def _source(device: torch.device, *, has_cupti: bool) -> Source:
    return "events" if device.type == "cuda" and not has_cupti else "auto"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _profiled(
    work: Mapping[int, ProfiledOp],
    waits: Mapping[int, int],
    watch: HostWatch,
    device: torch.device,
    given: Sequence[Argument],
    outputs: list[torch.Tensor],
    updated: Sequence[Argument] = (),
) -> Profiled:
    last = watch.rounds[-1]
    return Profiled(
        tuple(_timed(work, waits, last)),
        last.end - last.begin,
        last.issued - last.begin,
        watch.source,
        device,
        sum(map(nbytes_of, given)),
        sum(map(nbytes_of, {id(t): t for t in (*outputs, *updated)}.values())),
        outputs,
    )


def _timed(
    work: Mapping[int, ProfiledOp], waits: Mapping[int, int], run: Round
) -> list[ProfiledOp]:
    """Returns the ops in `work`, in program order, with the times that were measured in `run`.

    `work` has the op of each recorded step of the run, by the step's number. `waits` maps the step
    of each `Wait` to the step that started the communication. The time of a `Wait` counts for the
    communication.
    """
    spans: dict[int, list[tuple[float, float]]] = {}
    names: dict[int, dict[str, None]] = {}
    for t in run.work:
        step = waits.get(t.step, t.step)
        spans.setdefault(step, []).append((t.begin, t.end))
        if t.activity:
            names.setdefault(step, {})[t.activity] = None
    return [
        replace(
            found,
            seconds=length(union(spans.get(step, ()))),
            activities=tuple(names.get(step, ())),
        )
        for step, found in sorted(work.items())
    ]


# ------------------------------------------------------------------ sizes
def nbytes_of(value: object) -> int:
    """Returns how many bytes a tensor occupies in memory, where an axis of stride 0 counts as one
    element. Returns 0 for a number."""
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return 0
    count = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        count *= size if stride else 1
    return count * value.element_size()


class SizeNotes:
    """Collects data for the profiler's report while a run is recorded: the op of each recorded
    step, and the bytes that each op reads and writes. A step is a part of an op's work.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._ops = OpNotes(recorder)
        recorder.listeners.append(self)
        self._frame = recorder.frame
        # By the number of the step, as the steps are recorded.
        self._moves: dict[int, tuple[Op, tuple[int, ...], int, int]] = {}
        self._group_halves: list[P2PCommunication] | None = None
        # The number of a communication -> the step that starts it; the step of a Wait -> the step
        # that starts the communication.
        self._starts: dict[int, int] = {}
        self._wait_for: dict[int, int] = {}
        # The number of recorded steps, and the number of allocations before them.
        self._recorded, self._made_before = 0, 0

    @property
    def ops(self) -> list[TracedOp]:
        """The op of each step of the plan that `completed` returns, in order. A plan is the list of
        recorded steps of a program."""
        return self._ops.ops

    def on_kept(self, op: Op, steps: Sequence[Step]) -> None:
        """Records the bytes that `op` reads and writes. `steps` are the parts of the op's work that
        have been recorded for later runs.

        `Recorder` calls this method directly after the op has run, because the tensors may no
        longer exist at the end of the run.
        """
        self._recorded += len(steps)
        if isinstance(op, StartCoalescing):
            self._group_halves = []
        elif isinstance(op, P2PCommunication) and self._group_halves is not None:
            self._group_halves.append(op)
            return
        if not steps:
            return
        step = self._recorded - 1
        if isinstance(op, StartsCommunication):
            halves = (self._group_halves or ()) if isinstance(op, EndCoalescing) else ()
            self._starts.update({one.number: step for one in (op, *halves)})
        elif isinstance(op, Wait) and op.number in self._starts:
            self._wait_for[step] = self._starts[op.number]
        self._moves[step] = (op, *self._sized(op))

    def _sized(self, op: Op) -> tuple[tuple[int, ...], int, int]:
        """Returns (numbers of the tensors that an op writes, bytes read, bytes written). For the
        end of a group of transfers, these are the tensors of all its transfers."""
        halves: list[P2PCommunication] = []
        if isinstance(op, EndCoalescing):
            halves, self._group_halves = self._group_halves or [], None
        elif isinstance(op, P2PCommunication):
            halves = [op]
        if halves:
            sent = [h.buffer for h in halves if h.type == "send"]
            into = [h.buffer for h in halves if h.type != "send"]
        else:
            sent = [v for v in op.inputs if isinstance(v, TensorView)]
            into = [v for v in op.outputs if isinstance(v, TensorView)]
        root = self._frame.storage.root
        return (
            tuple(root(tv).number for tv in into),
            sum(map(self._nbytes, dict.fromkeys(sent))),
            sum(map(self._nbytes, dict.fromkeys(into))),
        )

    def _nbytes(self, tv: TensorView) -> int:
        return nbytes_of(self._frame.tensors.get(tv)) if self._frame.is_mine(tv) else 0

    def completed(self, plan: Plan) -> Plan:
        """Returns the plan (the list of recorded steps) with one more step for each allocation of
        an output, so that the allocations are timed, too. The profiler calls this method before
        `work` and `waits`, because their keys are step numbers of the returned plan.
        """
        self._plan = made = self._ops.completed(plan)
        self._made_before = len(made.steps) - len(plan.steps)
        return made

    def work(self) -> dict[int, ProfiledOp]:
        """Returns the ops that compute or communicate, with the bytes that they read and write but
        without times. The key is the number of the op's step in the list of steps that `completed`
        returned.
        """
        made: dict[int, ProfiledOp] = {}
        for number, ((step, _), op) in enumerate(zip(self._plan.steps, self.ops, strict=True)):
            if op.kind in ("host", "wait"):
                continue
            moved = self._moves.get(number - self._made_before)
            of, writes, read, written = moved or (None, (), 0, 0)
            group = of.group if isinstance(of, LaunchKernel) else None
            made[number] = ProfiledOp(op, group, writes, _launch_in(step), read, written)
        return made

    def waits(self) -> dict[int, int]:
        """Maps the recorded step of each `Wait` to the step that started the communication. Steps
        are numbered as in the list of steps that `completed` returned.
        """
        before = self._made_before
        return {at + before: of + before for at, of in self._wait_for.items()}


def _launch_in(step: Step) -> KernelLaunch | None:
    """Returns the kernel launch that a recorded step makes, or None if the step launches no
    kernel."""
    if isinstance(step, Both):
        return _launch_in(step.first) or _launch_in(step.second)
    return step.kernel if isinstance(step, LaunchStep) else None
