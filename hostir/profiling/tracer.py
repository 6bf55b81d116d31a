"""Takes a trace: runs a program several times on the same inputs, with timers, on all ranks.

1. All ranks check their inputs and compile. An error on one rank is raised on all ranks.
2. One run, op by op, records the steps of a plan. Runs to warm up follow.
3. Runs without timers: runs of the recorded steps, and ordinary runs by CUDA graphs.
4. Runs with timers. Each run begins after a barrier, with an idle device.
5. The ranks exchange their measurements, and the first rank writes the file.
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
from hostir.cost.simulator import SimulatedSchedule, simulated_schedule
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

# The most by which a GPU's clock drifts from the host's between two synchronisations by CUPTI.
_SLACK_S = 50e-6
# (wall, host) in seconds, of each run
Times = tuple[tuple[float, float], ...]
Source = Literal["auto", "cupti", "events", "host"]
N = TypeVar("N", bound="Notes")
_SOURCES = {"cpu": ("auto", "host"), "cuda": ("auto", "cupti", "events")}


class HostIrEvaluator(ProgramEvaluator):
    """Runs one host program on one rank, and traces runs. Each rank has its own evaluator.

    - `communicator` defaults to the communicator of this process. Only programs with a mesh need a
      communicator.
    - `device` defaults to the device of the first tensor input.
    - `settings` default to those of the environment variables.
    - `make_runner` makes the executor of a kernel of the program.
    - `number_of_streams` is the value of `numberOfStreams` in the program. Streams persist between
      runs.
    - `late_stream` (CPU only) is a stream number, "entry" or "all". The work of that stream is
      delayed as far as the program's own waits allow. A missing wait then causes a wrong result, so
      that tests find it.
    """

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
        """Runs the program several times on these inputs, on all ranks together, and returns the
        measured timeline.

        See `FusionDefinition.trace` for the arguments and the errors.
        """
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
    """Takes a trace of the evaluator's program on these inputs; see `HostIrEvaluator.trace`. All
    ranks of `team`, which are those of the program, must call this function together.

    `asked` has the user's arguments: the file, the numbers of runs, and the source of times.
    """
    ranks = Together(communicator, team)

    def prepare() -> tuple[list[Argument], Path | None, Machine | None]:
        where, machine = asked.checked(is_written=ranks.is_first)
        given = flatten(inputs)
        signature_of(given)  # raises for an input that is no dense tensor or number
        evaluator.prepare(given)
        evaluator.are_apart(given, None)
        return given, where, machine

    given, where, machine = ranks.together(prepare)
    runs = Runs(evaluator, ranks, given, OpNotes)
    plan = runs.plan
    ways = ranks.together(lambda: ways_to_time(plan.device, asked.source, communicator))

    def predict() -> tuple[SimulatedSchedule | None, str]:
        if machine is None:
            return None, ""
        try:
            return simulated_schedule(evaluator.program, runs.notes.values(), machine), ""
        except UnsupportedError as error:
            return None, str(error)  # the trace is still of use without a prediction

    made, why_not = ranks.together(predict)
    with torch.no_grad(), on_device(plan.device):
        plain = runs.plain(asked.warm_up, asked.repeat)
        usual, graphs = runs.usual(asked.warm_up, asked.repeat)
        rounds = partial(rounds_of, runs, repeat=asked.repeat)
        watch, whys = watched(runs.notes.ops, ranks, ways, rounds)
        shift, clocks = aligned(ranks)
    mine = _measured(runs, watch, shift, whys, plain=plain, usual=usual, graphs=graphs)
    found = [rank_from_dict(d) for d in ranks.exchange(mine.to_dict())]
    predicted = None if made is None else (evaluator.program, made)
    trace = Trace(tuple(found), clocks, asked.warm_up, tuple(runs.outputs), predicted, why_not)
    ranks.together(lambda: trace.save(where) if where is not None else None)
    return trace


# ------------------------------------------------------------------ the arguments of a trace
@dataclass(frozen=True)
class Asked:
    """The arguments that the user passed to `trace`.

    - `path`: the file to write; None to write no file.
    - `warm_up`: the number of runs before the traced runs; `repeat`: the number of traced runs.
    - `source`: the source of the device's times, such as "events".
    - `predicted`: the name of the machine for a predicted timeline in the same file; None for no
      prediction.
    """

    path: str | os.PathLike[str] | None = None
    warm_up: int = 3
    repeat: int = 5
    source: Source = "auto"
    predicted: str | None = None

    @property
    def line(self) -> str:
        """The arguments that must be equal on all ranks, as text. The text is part of the run
        signature, the description of a run that ranks compare before they begin it.
        """
        names = "warm_up", "repeat", "source"
        runs = ", ".join(f"{name}={show(getattr(self, name))}" for name in names)
        return f"// traced: {runs}"

    def checked(self, *, is_written: bool) -> tuple[Path | None, Machine | None]:
        """Checks the arguments before anything runs. Returns the file that this rank writes and the
        machine for the prediction; either is None if it is not needed.

        `is_written` says whether this rank writes the file. Raises `InputError` or `ArgumentError`
        for an invalid argument.
        """
        for name, least in (("warm_up", 0), ("repeat", 1)):
            count: int = require("trace", name, getattr(self, name), int)
            if not least <= count <= LONGEST:
                raise InputError(
                    f"trace: {name}={count}: expected a number from {least} to {LONGEST}"
                )
        machine: str | None = require("trace", "predicted", self.predicted, str | None)
        where = _path(self.path, is_written=is_written)
        return where, None if machine is None else find_machine(machine)


def _path(path: object, *, is_written: bool) -> Path | None:
    """Returns the file that this rank writes. Returns None if the user passed no `path`, or if
    another rank writes the file.

    Raises `InputError` for a path that cannot be written, before anything runs.
    """
    if path is None:
        return None
    try:
        where = Path(os.fsdecode(cast("str", path)))
    except Exception:  # an arbitrary object may raise any error here
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
    """Returns functions that make timers (`HostWatch` objects) for a device, in the order in which
    they are tried.

    `source` is the user's choice of the source of times, such as "events" or "auto". Raises
    `InputError` for a source that the device does not have. Raises `UnsupportedError` for CUPTI on
    simulated ranks, the threads of one process, because CUPTI cannot tell their work apart.
    """
    known = _SOURCES.get(device.type, ("auto", "host"))
    if not isinstance(source, str) or source not in known:
        raise InputError(
            f"trace: source={show(source)} cannot be used on {device}: expected one of "
            f"{', '.join(known)}"
        )
    if device.type != "cuda":
        return [HostWatch]
    events = partial(EventWatch, device=device)
    shares = communicator is not None and communicator.size() > 1 and not communicator.is_real()
    if source == "cupti" and shares:
        raise UnsupportedError(
            "trace: source='cupti': simulated ranks are threads of one process, and CUPTI cannot "
            "tell their work apart: use source='events'"
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
    """Takes a trace or a profile on all ranks. The caller ensures that the ranks have compared what
    they are about to run, and found it equal.

    `take` is `take_trace` or `take_profile`, and `asked` is its last argument. Raises
    `UnsupportedError` if the evaluator has a `late_stream`, which delays work on purpose.
    """
    if evaluator.late_stream is not None:
        raise UnsupportedError(
            "trace: the evaluator has late_stream, which delays work, so measured times would mean "
            "nothing: use an evaluator without late_stream"
        )
    ranks = evaluator.ranks
    return take(evaluator, ranks.communicator, ranks.team, inputs, asked)


def recorded(
    evaluator: ProgramEvaluator, inputs: Sequence[Argument], listen: Callable[[Recorder], T]
) -> tuple[T, Plan]:
    """Runs the program once, op by op, and records the steps as a plan, which can be repeated.
    Returns (result of `listen`, plan).

    `listen` is a function that makes an object, for example an `OpNotes`. The object is told the
    recorded steps of each op. The plan is not added to the evaluator's cache of plans, because a
    trace wraps its steps.
    """
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
    """The interface of an object that collects data about the recorded steps of a program, such as
    the op of each step.
    """

    def completed(self, plan: Plan) -> Plan:
        """Returns `plan` (the list of recorded steps) with one more step for each allocation of an
        output, so that the allocations are timed, too. Also completes the data, so that each step
        has an entry.
        """
        ...


class Runs(Generic[N]):
    """Repeats runs of one program on the same inputs `given`. Every run begins with the same
    values, so that runs can be compared.

    Runs update copies of the inputs. Before each run, the copies get their initial values, and
    torch's random generator gets its initial state. `listen` is a function that makes `notes`, the
    object that collects data about the recorded steps.
    """

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
        # The positions of the inputs that the program updates.
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
        """Makes the last run look like one ordinary call. Copies the updates of inputs by the last
        run into the caller's inputs `given`, and returns the outputs."""
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
        """Prepares `plan`, a list of recorded steps, to run in new memory and on the current
        stream. Returns a function without arguments that runs all steps once."""
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
        """Calls `run` once, on all ranks together. Returns three times in seconds of the host's
        clock: when the run began, when the host had issued all ops, and when the device was done.

        `begin_round` is called before the run, while the device is idle.
        """
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
        """Runs the recorded steps of the program without timers, `repeat` times, after `warm_up`
        further runs. Returns (wall, host) in seconds of each run."""
        run = self.bound(self.plan)
        for _ in range(warm_up):
            self.timed(run)
        return tuple(_wall_and_host(*self.timed(run)) for _ in range(repeat))

    def usual(self, warm_up: int, repeat: int) -> tuple[Times, tuple[str, ...]]:
        """Runs the program as an ordinary call does, `repeat` times. Returns (wall, host) in
        seconds of each run, and lines about CUDA graphs.

        Other runs precede these: at least `warm_up`, and enough for the program to capture a CUDA
        graph if it can.
        """
        evaluator, inputs = self._evaluator, self._inputs
        entry = evaluator.new_entry(inputs)
        places: list[tuple[int, ...] | None] = [None]

        def run() -> None:
            self.outputs = evaluator.run_entry(entry, inputs, places[0])
            places[0] = entry.contents.check(inputs)

        try:
            for _ in range(warm_up + RUNS_BEFORE + 2):
                self.timed(run)
            found = tuple(_wall_and_host(*self.timed(run)) for _ in range(repeat))
            return found, tuple(evaluator.cuda_graphs(entry))
        finally:
            entry.forget()


def _wall_and_host(begin: float, issued: float, end: float) -> tuple[float, float]:
    return end - begin, issued - begin


def watched(
    ops: Sequence[TracedOp],
    ranks: Together,
    ways: Sequence[Callable[[Sequence[Any]], HostWatch]],
    rounds: Callable[[HostWatch], None],
) -> tuple[HostWatch, list[str]]:
    """Times the runs that `rounds` makes, by the first kind of timer (`HostWatch` object) that
    works on all ranks.

    `ways` has the functions that make timers, and `ops` the op of each recorded step. Returns the
    timer, and the reasons why earlier kinds failed. Raises `ExecutionError` if no kind works.
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
    raise ExecutionError(f"trace: the work of the device cannot be timed: {'; '.join(whys)}")


def _refusal(ranks: Together, step: Callable[[], None]) -> str:
    """Calls `step`, which starts or stops the timers of this rank. All ranks must call this
    function. Returns the reason why `step` failed on some rank, or "" if it failed on no rank. All
    ranks get the same text, so all continue or all stop.
    """
    why = ""
    try:
        step()
    except ExecutionError as error:
        why = str(error)
    told = ranks.exchange([ranks.rank, why])
    return next((f"rank {rank}: {text}" for rank, text in told if text), "")


def rounds_of(runs: Runs[N], watch: HostWatch, repeat: int) -> None:
    """Runs the recorded steps of `runs` with the timers of `watch`, `repeat` times.

    One more run precedes these runs, because some objects are created only in the first run with
    timers.
    """
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
    """Returns the measurements of this rank, with remarks about uncertain measurements.

    - `shift`: the seconds to add to this rank's clock to get the clock of the first rank.
    - `whys`: the reasons why other kinds of timers failed.
    - `unwatched`: the times of runs without timers, by field of `RankTrace`.
    """
    device, ops, rounds = runs.plan.device, runs.notes.ops, watch.rounds[1:]
    streams, last = runs.notes.stream_names(), rounds[-1]
    doubts = [*whys, *watch.doubts]
    slack = watch.skew_s + _SLACK_S
    outside = sum(
        t.begin < run.begin - slack or t.end > run.end + slack for run in rounds for t in run.work
    )
    if outside:
        doubts.append(f"by the device's clock, {outside} pieces of work are outside of their run")
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
        runs=tuple(run_times(run, ops, streams) for run in rounds),
        began=last.begin + shift,
        skew_s=watch.skew_s,
        doubts=tuple(doubts),
        **unwatched,
    )


# ----------------------------------------------------------------------
# Actions that all ranks of a program do together: raising errors, exchanging data, setting clocks.

T = TypeVar("T")
# The number of barriers by which the difference of the ranks' clocks is bounded.
_BARRIERS = 8
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Together:
    """Actions that all ranks of a program do together while they take a trace, such as a barrier.

    `team` are the ranks of the program. A rank that is not in `team`, or that is alone in `team`,
    does not communicate.
    """

    def __init__(self, communicator: Communicator | None, team: Team) -> None:
        self._communicator = communicator
        self._team = tuple(sorted(team))
        self.rank = 0 if communicator is None else communicator.rank()
        self._is_alone = communicator is None or len(team) < 2 or self.rank not in team
        self.is_first = self.rank == self._team[0]

    def together(self, work: Callable[[], T]) -> T:
        """Calls `work` on all ranks. Returns this rank's result once `work` has succeeded on all
        ranks.

        Raises this rank's error, or `PeerError` with the error of another rank. `work` must not
        communicate.
        """
        try:
            result = work()
        except Exception as error:
            self.barrier(error)
            raise
        self.barrier()
        return result

    def barrier(self, error: Exception | None = None) -> None:
        """Waits until all ranks have called this method. If one rank passes an `error`, raises
        `PeerError` on the other ranks."""
        if self._communicator is not None and not self._is_alone:
            self._communicator.agree(error, team=self._team)

    def exchange(self, what: T) -> list[T]:
        """Sends `what` to all ranks. Returns the data of all ranks, in the order of the ranks.

        The data must consist of lists, dicts, texts and numbers, because they are sent as JSON.
        """
        if self._communicator is None or self._is_alone:
            return [json.loads(json.dumps(what))]
        texts = self._communicator.exchange(json.dumps(what).encode(), team=self._team)
        return [json.loads(text) for text in texts]

    def begin_run(self) -> None:
        """Adds 1 to this rank's count of runs. Every rank must call this method once per run,
        because ranks that copy out of each other's memory tell runs apart by the counts.
        """
        if self._communicator is not None:
            self._communicator.begin_run(self._team)


def aligned(ranks: Together) -> tuple[float, str]:
    """Compares the clocks of the ranks. Returns the seconds to add to this rank's clock to get the
    first rank's clock, and a text about the accuracy.

    A barrier ends on a rank only after all ranks have begun the barrier. Each of several barriers
    therefore bounds the difference of two clocks from both sides; the middle of the bounds is
    taken.
    """
    marks: list[tuple[float, float]] = []
    for _ in range(_BARRIERS):
        begin = clock()
        ranks.barrier()
        marks.append((begin, clock()))
    told: list[tuple[str, list[tuple[float, float]], int]]
    told = ranks.exchange((_host_name(), marks, ranks.rank))
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
