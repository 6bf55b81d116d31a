"""Timers for the recorded steps of a program. A step is a part of an op's work that later runs
repeat. A *watch* (as in stopwatch) wraps each step, and records when the step's work runs on the
host and on the device.

There is one class of watches for each source of times:

    HostWatch   CPU     the host's clock around each op
    EventWatch  CUDA    events before and after each op, on its stream
    CuptiWatch  CUDA    CUPTI, through torch.profiler: when each kernel and copy ran
"""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fuser.support.errors import ExecutionError, counted
from fuser.support.torch_calls import range_named
from hostir.profiling.op_recorder import TracedOp
from hostir.runtime.plan import Plan
from hostir.runtime.steps import Binding, Closure, Slots, Step

# Seconds of a clock that all processes of a host share.
clock = time.monotonic
# The prefix of the names of steps' ranges in a profile.
_RANGE = "hostir step "


@dataclass(frozen=True)
class Timed:
    """The time that one recorded step of a program took on the host, or that its kernel or copy
    took on a device. `begin` and `end` are seconds of the host's clock.

    - `step`: the number of the step in the list of recorded steps.
    - `activity`: the device's name of the kernel or copy; "" if unknown.
    - `queue`: the device's own name of the stream; "" if unknown.
    """

    step: int
    begin: float
    end: float
    activity: str = ""
    queue: str = ""


@dataclass
class Round:
    """The times of one timed run, in seconds of the host's clock.

    - `begin`: when the run began; `issued`: when the host had issued all ops; `end`: when the
      device was done.
    - `host`: the time of each recorded step on the host.
    - `work`: the times of kernels, copies and communications on streams.
    """

    begin: float = 0.0
    issued: float = 0.0
    end: float = 0.0
    host: list[Timed] = field(default_factory=list[Timed])
    work: list[Timed] = field(default_factory=list[Timed])


@dataclass(frozen=True, eq=False)
class _WatchedStep:
    step: Step
    number: int
    watch: HostWatch

    def bind(self, binding: Binding) -> Closure | None:
        closure = self.step.bind(binding)
        return None if closure is None else self.watch.around(self.number, closure)


class HostWatch:
    """Times each recorded step of a program by the host's clock. The host's clock suffices on a
    CPU, because the work of a step is done when the call returns.

    - `ops`: the op of each step; `rounds`: the times of each run, complete after `stop`.
    - `doubts`: remarks about uncertain times.
    - `skew_s`: an upper bound, in seconds, on how far the clock of the times in `Round.work`
      differs from the host's clock.
    """

    source = "the host's clock around each op"

    def __init__(self, ops: Sequence[TracedOp]) -> None:
        self.ops = ops
        self.rounds: list[Round] = []
        self.doubts: list[str] = []
        self.skew_s = 0.0
        self._notes: list[Timed] = []

    def wrapped(self, plan: Plan) -> Plan:
        """Returns the plan (the list of recorded steps of a program) with each step wrapped, so
        that this object times the step in each run.
        """
        steps = ((_WatchedStep(step, i, self), op) for i, (step, op) in enumerate(plan.steps))
        return replace(plan, steps=tuple(steps))

    def around(self, number: int, closure: Closure) -> Closure:
        """Returns a function that runs `closure`, the action of recorded step `number`, and records
        how long the action takes on the host."""
        note = self._note

        def timed(slots: Slots) -> None:
            begin = clock()
            closure(slots)
            note(number, begin, clock())

        return timed

    def _note(self, number: int, begin: float, end: float) -> None:
        self._notes.append(Timed(number, begin, end))

    def start(self) -> None:
        """Starts the measurement, before the first timed run. Does nothing here, because the host's
        clock always runs.

        A subclass raises `ExecutionError` if its source of times, such as CUPTI, cannot be used.
        """

    def begin_round(self) -> None:
        """Prepares for a timed run, and drops the unfinished times of an earlier run. Called while
        the device is idle."""
        self._notes = []

    def end_round(self, begin: float, issued: float, end: float) -> None:
        """Adds the times of a run to `rounds`. Called when the device is done with the run.

        The run began at `begin`. The host had issued all ops at `issued`, and the device was done
        at `end`.
        """
        self.rounds.append(Round(begin, issued, end, self._notes))

    def abandon(self) -> None:
        """Stops the measurement after an error on some rank. Does nothing here, because the host's
        clock needs no stop.
        """

    def stop(self) -> None:
        """Stops the measurement after the last timed run, and completes `rounds`, the times of each
        run. On a CPU, the execution time of an op is the host time of its recorded step.

        A subclass raises `ExecutionError` if some times are missing.
        """
        for run in self.rounds:
            run.work = [t for t in run.host if self.ops[t.step].kind != "host"]


class EventWatch(HostWatch):
    """Times each op that computes or communicates, by CUDA events before and after the op on its
    stream.

    The time of an op includes two kinds of waiting after the first event. One is a wait on the
    device. The other is the host's time until the launch, if the stream is idle.
    """

    source = "CUDA events around each op"

    def __init__(self, ops: Sequence[TracedOp], device: torch.device) -> None:
        super().__init__(ops)
        self._device = device
        self._events: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        self._base = self._event()
        self._base_at = 0.0

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def around(self, number: int, closure: Closure) -> Closure:
        """Returns a function that runs `closure`, the action of recorded step `number`, between two
        CUDA events.

        A step that puts no work on a stream is timed only by the host's clock.
        """
        if self.ops[number].kind not in ("compute", "communication"):
            return super().around(number, closure)
        note, make = self._note, self._event

        def timed(slots: Slots) -> None:
            first, last = make(), make()
            begin = clock()
            first.record()
            closure(slots)
            last.record()
            note(number, begin, clock())
            self._events.append((number, first, last))

        return timed

    def begin_round(self) -> None:
        """Prepares for a timed run: records a CUDA event, and the host's time at which the device
        reaches this event. The times of later events are measured from it.
        """
        super().begin_round()
        self._events = []
        self._base = self._event()
        before = clock()
        self._base.record()
        self._base.synchronize()
        after = clock()
        self._base_at = (before + after) / 2
        self.skew_s = max(self.skew_s, (after - before) / 2)

    def end_round(self, begin: float, issued: float, end: float) -> None:
        """Adds the times of a run to `rounds`, after the times of events are converted to the
        host's clock. For the arguments, see `HostWatch.end_round`."""
        super().end_round(begin, issued, end)
        at, base = self._base_at, self._base
        self.rounds[-1].work = [
            Timed(n, at + base.elapsed_time(a) * 1e-3, at + base.elapsed_time(b) * 1e-3)
            for n, a, b in self._events
        ]

    def stop(self) -> None:
        """Stops the measurement after the last timed run. Does nothing here, because `end_round`
        has already completed the times of each run.
        """


class CuptiWatch(HostWatch):
    """Times each kernel and copy of a program's recorded steps by CUPTI, through torch.profiler.

    Each recorded step is a named range on the host in the profile. A kernel or copy belongs to the
    step in whose range it was launched.
    """

    source = "CUPTI, through torch.profiler"

    def __init__(self, ops: Sequence[TracedOp]) -> None:
        super().__init__(ops)
        self._profile: Any = None

    def around(self, number: int, closure: Closure) -> Closure:
        """Returns a function that runs `closure`, the action of recorded step `number`, in a named
        range of torch.profiler."""
        name, note = f"{_RANGE}{number}", self._note
        make: Callable[[str], AbstractContextManager[object]] = range_named

        def timed(slots: Slots) -> None:
            begin = clock()
            with make(name):
                closure(slots)
            note(number, begin, clock())

        return timed

    def start(self) -> None:
        """Starts torch.profiler. Raises `ExecutionError` if torch.profiler cannot start, for
        example because another profiler is active."""
        from torch.profiler import ProfilerActivity, profile

        try:
            made = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            made.__enter__()
        except Exception as error:  # e.g. another active profiler, or missing permissions for CUPTI
            what = f"{type(error).__name__}: {error}"
            raise ExecutionError(f"torch.profiler cannot start: {what}") from error
        self._profile = made

    def abandon(self) -> None:
        """Stops torch.profiler after an error on some rank, and drops the recorded profile. Does
        nothing if torch.profiler is not running."""
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            self._profile = None

    def stop(self) -> None:
        """Stops torch.profiler, and completes `rounds` with the times from its exported profile.

        Raises `ExecutionError` if the export fails or lacks times.
        """
        made = self._profile
        try:
            self.abandon()
            with TemporaryDirectory() as folder:
                path = Path(folder) / "profile.json"
                made.export_chrome_trace(str(path))
                text = path.read_text()
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise ExecutionError(f"torch.profiler cannot export its profile: {what}") from error
        self.take(text)

    def take(self, text: str) -> None:
        """Adds the times of kernels and copies to `rounds`. `text` is a profile that torch.profiler
        has exported.

        Raises `ExecutionError` if a step is missing in the profile, or if some op computes but the
        profile has no kernel or copy.
        """
        found = read_profile(text, _RANGE)
        notes = [t for run in self.rounds for t in run.host]
        if [r.name for r in found.ranges] != [f"{_RANGE}{t.step}" for t in notes]:
            raise ExecutionError(
                f"torch.profiler has recorded {counted(len(found.ranges), 'range')}, but the runs "
                f"had {counted(len(notes), 'step')}, which need one range each: trace again"
            )
        if any(op.kind == "compute" for op in self.ops) and not found.activities:
            raise ExecutionError(
                "CUPTI has recorded no work of the device, although some ops compute: trace "
                "again, or pass source='events'"
            )
        # The profile has another clock. A range begins just after the recorded time of its step.
        shifts = sorted(t.begin - r.begin for t, r in zip(notes, found.ranges, strict=True))
        shift = shifts[len(shifts) // 2] if shifts else 0.0
        ends = len(shifts) // 20
        self.skew_s = max((abs(s - shift) for s in shifts[ends : len(shifts) - ends]), default=0.0)
        owners = [(run, t.step) for run in self.rounds for t in run.host]
        strangers: list[Activity] = []
        for activity in found.activities:
            if activity.range is None:
                strangers.append(activity)
                continue
            run, step = owners[activity.range]
            begin, end = activity.begin + shift, activity.end + shift
            run.work.append(Timed(step, begin, end, activity.name, activity.queue))
        self._doubt(strangers, shift, found.doubtful)

    def _doubt(self, strangers: Sequence[Activity], shift: float, doubtful: int) -> None:
        """Adds remarks to `doubts` about kernels and copies that may belong to another recorded
        step, or to no step.

        - `strangers`: the kernels and copies that were launched in no range of a step.
        - `shift`: the seconds to add to the profile's clock to get the host's clock.
        - `doubtful`: the number of kernels and copies whose range is doubtful, because two entries
          of the profile contradict each other.
        """
        lost = [
            a
            for a in strangers
            if any(r.begin < a.end + shift and a.begin + shift < r.end for r in self.rounds)
        ]
        if lost:
            names = ", ".join(dict.fromkeys(a.name[:60] for a in lost[:4]))
            self.doubts.append(
                f"{len(lost)} activities of the device belong to no op, and are in no sum: {names}"
            )
        if doubtful:
            self.doubts.append(
                f"{doubtful} activities were launched within another op than CUPTI's own "
                "correlation says, which was followed"
            )


# ----------------------------------------------------------------------
# The file that torch.profiler exports: the activities of a device, and the host range of each.
#
# An activity (a kernel, a copy, a fill) has two references: a correlation number of the call that
# launched it, and an external id of torch's innermost op at that time. Each leads to a range. If
# the ranges differ, the external id counts, because it needs no comparison of clocks.

_ACTIVITIES = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_OPS = ("cpu_op", "user_annotation")


@dataclass(frozen=True)
class Range:
    """A named range of time on the host, in an exported profile of torch.profiler. Each recorded
    step of a program is timed in such a range. Times are seconds of the profile's clock.
    """

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Activity:
    """A kernel, copy or fill on a device, in an exported profile of torch.profiler. Times are
    seconds of the profile's clock.

    `queue` is the device's name of the stream. `range` is the index of the range in which the
    activity was launched, or None if it was launched outside all ranges.
    """

    name: str
    queue: str
    begin: float
    end: float
    range: int | None


@dataclass(frozen=True)
class Profile:
    """The contents of an exported profile of torch.profiler: ranges on the host, and activities on
    the device, each sorted by their begin.

    `doubtful` is the number of activities whose range is doubtful, because two entries of the
    profile contradict each other.
    """

    ranges: list[Range]
    activities: list[Activity]
    doubtful: int


def read_profile(text: str, prefix: str) -> Profile:
    """Reads an exported profile of torch.profiler. Returns the ranges whose names begin with
    `prefix`, and the kernels, copies and fills that ran on the device.

    Ranges must not overlap. Raises `ExecutionError` if `text` is no export of torch.profiler.
    """
    try:
        events: list[dict[str, Any]] = [
            e for e in json.loads(text)["traceEvents"] if e.get("ph") == "X"
        ]
        return _read(events, prefix)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ExecutionError(f"the export of torch.profiler cannot be read: {what}") from error


def _read(events: Sequence[dict[str, Any]], prefix: str) -> Profile:
    # External id of torch's op -> its begin; correlation number -> the begin of the launching call.
    ops: dict[int, float] = {}
    calls: dict[int, float] = {}
    ranges: list[Range] = []
    for event in events:
        kind, args = event.get("cat"), event.get("args", {})
        begin, end = _interval(event)
        if kind in _OPS:
            if "External id" in args:
                ops[args["External id"]] = begin
            if event["name"].startswith(prefix):
                ranges.append(Range(event["name"], begin, end))
        elif kind in _CALLS and "correlation" in args:
            calls[args["correlation"]] = begin
    ranges.sort(key=lambda r: r.begin)
    begins = [r.begin for r in ranges]

    def range_at(time: float | None) -> int | None:
        if time is None:
            return None
        place = bisect_right(begins, time) - 1
        return place if place >= 0 and time <= ranges[place].end else None

    activities: list[Activity] = []
    doubtful = 0
    for event in events:
        if event.get("cat") not in _ACTIVITIES:
            continue
        args = event["args"]
        by_id = range_at(ops.get(args.get("External id", 0)))
        by_call = range_at(calls.get(args.get("correlation", 0)))
        doubtful += by_id is not None and by_call is not None and by_id != by_call
        place = by_call if by_id is None else by_id
        queue = f"stream {args['stream']}" if "stream" in args else ""
        activities.append(Activity(event["name"], queue, *_interval(event), place))
    activities.sort(key=lambda a: a.begin)
    return Profile(ranges, activities, doubtful)


def _interval(event: dict[str, Any]) -> tuple[float, float]:
    """Returns (begin, end) of an event in an exported profile, in seconds. The profile has times in
    microseconds."""
    begin = float(event["ts"])
    return begin * 1e-6, (begin + float(event.get("dur", 0.0))) * 1e-6
