"""Taking a trace: the same inputs several times, watched, on all ranks together.

1  all ranks check what they were given, and compile; an error of one is an error of all
2  one run through the table of handlers records a plan; then its runs to warm up
3  runs that nobody watches: of that plan, and as they are without a trace, by CUDA graphs
4  watched runs, each behind a barrier, with nothing left on the device
5  the ranks tell each other what they have measured, and the first of them writes the file
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, cast

import torch

from fuser.ir.binding import signature_of
from fuser.ir.op import walk
from fuser.ir.ops.nodes import LibraryOp
from fuser.support.arguments import LONGEST, require, show
from fuser.support.dumps import not_writable
from fuser.support.errors import ExecutionError, FuserError, InputError, UnsupportedError
from fuser.support.inputs import flatten
from fuser.support.torch_calls import generator_of
from hostir.cost.machine_model import Machine, find_machine
from hostir.cost.simulator import Timetable, timetable_of
from hostir.ir.buffer_aliasing import Storage
from hostir.profiling.op_recorder import OpNotes, TracedOp
from hostir.profiling.timeline import CPU, RankTrace, Trace, rank_from_dict, run_times, slices_of
from hostir.profiling.timers import CuptiWatch, EventWatch, HostWatch, clock
from hostir.runtime.cuda_graphs import RUNS_BEFORE
from hostir.runtime.evaluator import ProgramEvaluator
from hostir.runtime.frame import op_failed
from hostir.runtime.inputs import Argument, device_of, written_inputs
from hostir.runtime.plan import Arena, Arenas, Plan
from hostir.runtime.recorder import Recorder
from hostir.runtime.steps import Slots
from hostir.runtime.streams import on_device
from multidevice.coordination.bounded_wait import Team

if TYPE_CHECKING:
    from hostir.runtime.recorder import Recorder
    from multidevice.job.communicator import Communicator

# As far as a GPU's clock drifts from the host's between two looks of CUPTI at both.
_SLACK_S = 50e-6
# (wall, host) in seconds, of each run
Times = tuple[tuple[float, float], ...]
Source = Literal["auto", "cupti", "events", "host"]
N = TypeVar("N", bound="Notes")
_SOURCES = {"cpu": ("auto", "host"), "cuda": ("auto", "cupti", "events")}


class HostIrEvaluator(ProgramEvaluator):
    __doc__ = ProgramEvaluator.__doc__

    def trace(
        self,
        inputs: Sequence[Argument],
        path: str | os.PathLike[str] | None = None,
        *,
        warm_up: int = 3,
        repeat: int = 5,
        source: Source = "auto",
        predicted: str | None = None,
    ) -> Trace:
        """Runs several times on these inputs, all ranks of the program together, and returns what
        ran when; see `FusionDefinition.trace`."""
        asked = Asked(path, warm_up, repeat, source, predicted)
        watch = partial(watched_as_agreed, self, take_trace, asked=asked)
        return self.ranks.agreed(inputs, self._checked, watch, asked.line)


def take_trace(
    evaluator: ProgramEvaluator,
    communicator: Communicator | None,
    team: Team,
    inputs: Sequence[Argument],
    asked: Asked,
) -> Trace:
    """Returns the trace of a program on these inputs; see `HostIrEvaluator.trace`."""
    ranks = Together(communicator, team)

    def prepare() -> tuple[list[Argument], Path | None, Machine | None]:
        where, machine = asked.checked(is_written=ranks.is_first)
        given = flatten(inputs)
        signature_of(given)  # raises for what has no memory to look at
        evaluator.prepare(given)
        evaluator.are_apart(given, None)
        return given, where, machine

    given, where, machine = ranks.together(prepare)
    runs = Runs(evaluator, ranks, given, OpNotes)
    plan = runs.plan
    ways = ranks.together(lambda: ways_to_time(plan.device, asked.source, communicator))

    def predict() -> tuple[Timetable | None, str]:
        if machine is None:
            return None, ""
        try:
            return timetable_of(evaluator.program, runs.notes.values(), machine), ""
        except UnsupportedError as error:
            return None, str(error)  # what was asked for first is what a run takes

    made, why_not = ranks.together(predict)
    with torch.no_grad(), on_device(plan.device):
        plain = runs.plain(asked.warm_up, asked.repeat)
        usual, graphs = runs.usual(asked.warm_up, asked.repeat)
        rounds = partial(rounds_of, runs, repeat=asked.repeat)
        watch, whys = watched(runs.notes.ops, ranks, ways, rounds)
        shift, clocks = aligned(ranks)
    mine = _measured(runs, watch, shift, whys, plain=plain, usual=usual, graphs=graphs)
    found = [rank_from_dict(d) for d in ranks.tell(mine.to_dict())]
    predicted = None if made is None else (evaluator.program, made)
    trace = Trace(tuple(found), clocks, asked.warm_up, tuple(runs.outputs), predicted, why_not)
    ranks.together(lambda: trace.save(where) if where is not None else None)
    return trace


# ------------------------------------------------------------------ what was asked for
@dataclass(frozen=True)
class Asked:
    """What a trace is asked for: where to write it, runs to warm up, runs to watch, where times of
    the device come from, and the machine of the predicted timeline beside it."""

    path: str | os.PathLike[str] | None = None
    warm_up: int = 3
    repeat: int = 5
    source: Source = "auto"
    predicted: str | None = None

    @property
    def line(self) -> str:
        """What ranks claim besides what they trace: it must be alike."""
        names = "warm_up", "repeat", "source"
        runs = ", ".join(f"{name}={show(getattr(self, name))}" for name in names)
        return f"// traced: {runs}"

    def checked(self, *, is_written: bool) -> tuple[Path | None, Machine | None]:
        """Returns where this rank writes, if it does, and the machine.

        Raises `InputError` or `ArgumentError` for what cannot be.
        """
        for name, least in (("warm_up", 0), ("repeat", 1)):
            count: int = require("trace", name, getattr(self, name), int)
            if not least <= count <= LONGEST:
                raise InputError(f"trace: {name}={count}: expected {least} to {LONGEST}")
        machine: str | None = require("trace", "predicted", self.predicted, str | None)
        where = _path(self.path, is_written=is_written)
        return where, None if machine is None else find_machine(machine)


def _path(path: object, *, is_written: bool) -> Path | None:
    """Returns where this rank writes the file; None where it does not.

    Raises `InputError`, before anything runs, for what can be no file.
    """
    if path is None:
        return None
    try:
        where = Path(os.fsdecode(cast("str", path)))
    except Exception:  # what is no path may raise anything when it is asked for one
        where = Path()
    if where == Path() or "\0" in str(where):
        raise InputError(f"trace: path={show(path)}: expected the name of a file")
    if not is_written:
        return None
    if why := not_writable(where):
        raise InputError(f"trace: path={show(str(where))}: {why}")
    return where


def ways_to_time(
    device: torch.device, source: object, communicator: Communicator | None
) -> list[Callable[[Sequence[Any]], HostWatch]]:
    """Returns the ways to tell times on a device, the best first."""
    known = _SOURCES.get(device.type, ("auto", "host"))
    if not isinstance(source, str) or source not in known:
        raise InputError(
            f"trace: source={show(source)}: on {device} expected one of {', '.join(known)}"
        )
    if device.type != "cuda":
        return [HostWatch]
    events = partial(EventWatch, device=device)
    shares = communicator is not None and communicator.size() > 1 and not communicator.is_real()
    if source == "cupti" and shares:
        raise UnsupportedError(
            "trace: source='cupti': simulated ranks are threads of one process, of which CUPTI "
            "knows no ranks: use 'events'"
        )
    if source == "events" or shares:
        return [events]
    return [CuptiWatch] if source == "cupti" else [CuptiWatch, events]


# ------------------------------------------------------------------ the runs
def watched_as_agreed(
    evaluator: ProgramEvaluator,
    take: Callable[..., T],
    inputs: Sequence[Argument],
    asked: object,
) -> T:
    """Returns what `take_trace` or `take_profile` does, once the ranks have agreed.

    Raises `UnsupportedError` where `late_stream` holds work back.
    """
    if evaluator.late_stream is not None:
        raise UnsupportedError("trace: late_stream holds work back: run watched without it")
    ranks = evaluator.ranks
    return take(evaluator, ranks.communicator, ranks.team, inputs, asked)


def recorded(
    evaluator: ProgramEvaluator, inputs: Sequence[Argument], listen: Callable[[Recorder], T]
) -> tuple[T, Plan]:
    """Runs once, op by op, with a recorder to which what `listen` returns listens; returns that,
    and the plan, which nothing else runs."""
    evaluator.begin_run()
    with torch.no_grad():
        frame = evaluator.binder.frame(list(inputs))
        recorder = Recorder(frame, evaluator.free)
        listener = listen(recorder)
        evaluator.walk(frame, recorder)
    arenas = Arenas(frame.machine.device, "its steps are watched one by one")
    plan = recorder.finish(evaluator.outputs, arenas)
    recorder.forget_tensors()
    return listener, plan


class Notes(Protocol):
    """What is known of the steps of a recorder."""

    def completed(self, plan: Plan) -> Plan:
        """Returns the plan, of whose steps it knows."""
        ...


class Runs(Generic[N]):
    """The plan of these inputs, and how to run it: on copies of what it updates, which have their
    first values before each run, as torch's generator has its state. `listen` returns what knows of
    its steps."""

    def __init__(
        self,
        evaluator: ProgramEvaluator,
        ranks: Together,
        given: list[Argument],
        listen: Callable[[Recorder], N],
    ) -> None:
        self.ranks, self._evaluator = ranks, evaluator
        program = evaluator.program
        ops = [*walk(program.ops), *(op for unit in program.units.values() for op in unit.exprs)]
        draws = any(isinstance(op, LibraryOp) and op.draws for op in ops)
        self._drawn = generator_of(device_of(program.inputs, given)) if draws else None
        self._state = None if self._drawn is None else self._drawn.get_state()
        # The inputs that it updates.
        self.updated = written = written_inputs(program, Storage.of(program))
        self._restored: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._inputs = list(given)
        for i in written:
            value = given[i]
            assert isinstance(value, torch.Tensor), f"input {i} has no memory"
            copy = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
            self._inputs[i] = copy
            self._restored.append((copy, value.detach()))
        self._restore()
        self.notes, plan = recorded(evaluator, self._inputs, listen)
        self.plan = self.notes.completed(plan)
        self.outputs: list[torch.Tensor] = []

    def _restore(self) -> None:
        if self._drawn is not None and self._state is not None:
            self._drawn.set_state(self._state)
        with torch.no_grad():
            for copy, value in self._restored:
                copy.copy_(value)

    def keep(self, given: Sequence[Argument]) -> list[torch.Tensor]:
        """Makes the last run the one that the caller asked for: write what it updated into the
        inputs, and returns the outputs."""
        own: dict[int, torch.Tensor] = {}
        for copy, value in self._restored:
            value.copy_(copy)
        for mine, theirs in zip(self._inputs, given, strict=True):
            if mine is not theirs and isinstance(theirs, torch.Tensor):
                own[id(mine)] = theirs
        return [own.get(id(out), out) for out in self.outputs]

    def _synchronize(self) -> None:
        if self.plan.device.type == "cuda":
            torch.cuda.synchronize(self.plan.device)

    def bound(self, plan: Plan) -> Callable[[], None]:
        """Returns a run of a plan, in memory of its own, on the stream that is current now."""
        found = plan.bind(plan.memory(plan.nbytes), Arena(plan.device, plan.current_stream()))
        streams = plan.streams

        def run() -> None:
            entry = None if streams is None else streams.current()
            slots: Slots = [*self._inputs, *found.rest]
            place = 0
            try:
                for place, closure in enumerate(found.closures):  # noqa: B007
                    closure(slots)
            except BaseException as error:
                if streams is not None:
                    streams.enter(entry)
                op = found.ops[place] if found.ops else None
                if op is None or isinstance(error, FuserError) or not isinstance(error, Exception):
                    raise
                raise op_failed(op, error) from error
            self.outputs = [slots[i] for i in plan.outputs]

        return run

    def timed(
        self, run: Callable[[], None], begin_round: Callable[[], None] | None = None
    ) -> tuple[float, float, float]:
        """Runs once, all ranks together; return when it began, was issued, and was done."""
        self.outputs = []
        self._restore()
        self.ranks.begin_run()
        self._synchronize()
        if begin_round is not None:
            begin_round()
        self.ranks.barrier()
        begin = clock()
        run()
        issued = clock()
        self._synchronize()
        return begin, issued, clock()

    def plain(self, warm_up: int, repeat: int) -> Times:
        """Returns (wall, host) of runs that nobody watches, behind those to warm up."""
        run = self.bound(self.plan)
        for _ in range(warm_up):
            self.timed(run)
        return tuple(_wall_and_host(*self.timed(run)) for _ in range(repeat))

    def usual(self, warm_up: int, repeat: int) -> tuple[Times, tuple[str, ...]]:
        """Returns the same of runs as they are without a trace, and which CUDA graphs these use."""
        evaluator, inputs = self._evaluator, self._inputs
        known = evaluator.know(inputs)
        places: list[tuple[int, ...] | None] = [None]

        def run() -> None:
            self.outputs = evaluator.run_known(known, inputs, places[0])
            places[0] = known.contents.check(inputs)

        try:
            for _ in range(warm_up + RUNS_BEFORE + 2):
                self.timed(run)
            found = tuple(_wall_and_host(*self.timed(run)) for _ in range(repeat))
            return found, tuple(evaluator.cuda_graphs(known))
        finally:
            known.forget()


def _wall_and_host(begin: float, issued: float, end: float) -> tuple[float, float]:
    return end - begin, issued - begin


def watched(
    ops: Sequence[TracedOp],
    ranks: Together,
    ways: Sequence[Callable[[Sequence[Any]], HostWatch]],
    rounds: Callable[[HostWatch], None],
) -> tuple[HostWatch, list[str]]:
    """Returns a watch with the rounds that `rounds` runs, and why it is not one that came before in
    `ways`.

    Raises `ExecutionError` where none of them works on all ranks.
    """
    whys: list[str] = []
    for make in ways:
        watch = make(ops)
        why = _refusal(ranks, watch.start)
        if not why:
            try:
                rounds(watch)
            except BaseException:
                watch.abandon()
                raise
            why = _refusal(ranks, watch.stop)
        else:
            watch.abandon()
        if not why:
            return watch, whys
        whys.append(f"not by {watch.source}: {why}")
    raise ExecutionError(f"trace: what the device did cannot be timed: {'; '.join(whys)}")


def _refusal(ranks: Together, step: Callable[[], None]) -> str:
    """Returns why a step of a watch failed on some rank; "" where it did on none."""
    why = ""
    try:
        step()
    except ExecutionError as error:
        why = str(error)
    told = ranks.tell([ranks.rank, why])
    return next((f"rank {rank}: {text}" for rank, text in told if text), "")


def rounds_of(runs: Runs[N], watch: HostWatch, repeat: int) -> None:
    """Runs a plan as often as asked, and once before: that makes what the watch makes once."""
    run = runs.bound(watch.wrapped(runs.plan))
    for _ in range(1 + repeat):
        watch.end_round(*runs.timed(run, watch.begin_round))


def _measured(
    runs: Runs[OpNotes],
    watch: HostWatch,
    shift: float,
    whys: Sequence[str],
    **unwatched: Any,
) -> RankTrace:
    """Returns what this rank has measured, and what there is to doubt about it."""
    device, ops, rounds = runs.plan.device, runs.notes.ops, watch.rounds[1:]
    streams, last = runs.notes.stream_names(), rounds[-1]
    doubts = [*whys, *watch.doubts]
    slack = watch.skew_s + _SLACK_S
    outside = sum(
        t.begin < one.begin - slack or t.end > one.end + slack for one in rounds for t in one.work
    )
    if outside:
        doubts.append(f"{outside} pieces of work lie outside of their run by its clock")
    worked = {t.step for t in last.work}
    silent = [
        ops[t.step] for t in last.host if ops[t.step].kind == "compute" and t.step not in worked
    ]
    if silent:
        first = f"{silent[0].where}: {silent[0].text[:80]}"
        doubts.append(
            f"{len(silent)} ops left no work on the device, as those on empty tensors do: {first}"
        )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else CPU
    return RankTrace(
        rank=runs.ranks.rank,
        device=name,
        source=watch.source,
        ops=tuple(ops),
        streams=streams,
        slices=slices_of(last),
        runs=tuple(run_times(one, ops, streams) for one in rounds),
        began=last.begin + shift,
        skew_s=watch.skew_s,
        doubts=tuple(doubts),
        **unwatched,
    )


# ----------------------------------------------------------------------
# The ranks that run one program, at something that all of them do: errors, talk, and clocks.

T = TypeVar("T")
# Barriers that bound how far the clocks of ranks are apart.
_BARRIERS = 8
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Together:
    """The ranks of the program, seen from one; a rank outside of them is alone."""

    def __init__(self, communicator: Communicator | None, team: Team) -> None:
        self._communicator = communicator
        self._team = tuple(sorted(team))
        self.rank = 0 if communicator is None else communicator.rank()
        self._is_alone = communicator is None or len(team) < 2 or self.rank not in team
        self.is_first = self.rank == self._team[0]

    def together(self, work: Callable[[], T]) -> T:
        """Returns what this rank's work does, once that of all has been done without an error.

        Raises this rank's error, or `PeerError` naming another's; `work` does not communicate.
        """
        try:
            result = work()
        except Exception as error:
            self.barrier(error)
            raise
        self.barrier()
        return result

    def barrier(self, error: Exception | None = None) -> None:
        if self._communicator is not None and not self._is_alone:
            self._communicator.agree(error, team=self._team)

    def tell(self, what: T) -> list[T]:
        """Returns what each rank tells, in the order of the ranks: lists, texts and numbers."""
        if self._communicator is None or self._is_alone:
            return [json.loads(json.dumps(what))]
        told = self._communicator.exchange(json.dumps(what).encode(), team=self._team)
        return [json.loads(one) for one in told]

    def begin_run(self) -> None:
        """Counts a run, as every rank does."""
        if self._communicator is not None:
            self._communicator.begin_run(self._team)


def aligned(ranks: Together) -> tuple[float, str]:
    """Returns what to add to this rank's clock to have that of the first, and how sure that is.

    A barrier ends, on each rank, after it has begun on all: that bounds the distance.
    """
    marks: list[tuple[float, float]] = []
    for _ in range(_BARRIERS):
        begin = clock()
        ranks.barrier()
        marks.append((begin, clock()))
    told: list[tuple[str, list[tuple[float, float]], int]]
    told = ranks.tell((_host_name(), marks, ranks.rank))
    (host, first, _), *others = told
    if not others:
        return 0.0, "one"
    shift, widest, same = 0.0, 0.0, True
    for theirs, mine, rank in others:
        low = max(a - b for (a, _), (_, b) in zip(first, mine, strict=True))
        high = min(b - a for (_, b), (a, _) in zip(first, mine, strict=True))
        is_one = theirs == host and low <= 0.0 <= high
        found = 0.0 if is_one else (low + high) / 2
        widest, same = max(widest, (high - low) / 2), same and is_one
        shift = found if rank == ranks.rank else shift
    kept = f"barriers bound their distance to {widest * 1e6:.1f} us"
    if same:
        return shift, f"the ranks share that of their host; {kept}"
    return shift, f"of several hosts, set by the middle of what barriers allow; {kept}"


def _host_name() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return socket.gethostname()
