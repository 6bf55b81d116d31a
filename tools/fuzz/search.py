"""Random programs in a row, and the smallest program of each failure.

A program is a function of its seed. Hypothesis takes up the choices that a failing program was
made of, and shrinks it. (Hypothesis could draw the programs, too, but repeats itself: of its first
300 single programs 84 were different, with 42 ops; 300 seeds have 300 programs with 134 ops.) Each
program runs in a forked process, so that a crash or a hang is an outcome like others.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import select
import signal
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st
from hypothesis.database import ExampleDatabase, choices_to_bytes
from hypothesis.errors import Flaky

from tools.fuzz.builder import seeded
from tools.fuzz.drawn_random import DrawnRandom
from tools.fuzz.kinds import GENERATORS, has_any, modes_of, outcome_of
from tools.fuzz.product import Mode
from tools.fuzz.program import Output, Program, Ref, Stmt, TensorArg, TensorInput, plain_layout
from tools.fuzz.reductions import Parts, is_valid, reduced
from tools.fuzz.runner import Case, Outcome
from tools.fuzz.standalone import standalone_text
from tools.fuzz.tally import Failure, Tally, total

HANG_S = 60.0
# Programs of one process: it then gives way to a fresh one.
BLOCK = 100


# ------------------------------------------------------------------ running
def in_child(fn: Callable[[], Outcome], *, limit_s: float = HANG_S) -> Outcome:
    """Returns what `fn` returns, from a forked process, or how that ended: crash, hang."""
    read, write = os.pipe()
    with tempfile.TemporaryFile() as log:
        pid = os.fork()
        if pid == 0:
            os.close(read)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            faulthandler.enable(log)
            try:
                with os.fdopen(write, "w") as pipe:
                    pipe.write(json.dumps(asdict(fn())))
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(0)
        os.close(write)
        text, end = b"", time.monotonic() + limit_s
        while is_ready := bool(select.select([read], [], [], max(end - time.monotonic(), 0))[0]):
            part = os.read(read, 1 << 16)
            if not part:
                break
            text += part
        os.close(read)
        if not is_ready:
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        log.seek(0)
        story = log.read().decode(errors="replace")
    if len(story) > 3000:
        story = f"{story[:1500]}\n..\n{story[-1500:]}"
    if not is_ready:
        return Outcome("hang", f"no answer in {limit_s:g} s", story)
    if os.WIFSIGNALED(status):
        return Outcome("crash", f"signal {os.WTERMSIG(status)}", story)
    if not text:
        return Outcome("crash", "ended without an outcome", story)
    return Outcome(**json.loads(text))


def run_program(program: Program, mode: Mode) -> tuple[Outcome, Mode]:
    """Runs a program in a mode, and one that crashes in checked mode, too, which names the access
    that damages memory; returns the outcome and its mode."""

    def body(mode: Mode) -> Outcome:
        return outcome_of(Case.of(program), mode)

    if mode.device == "cuda":  # a fork cannot use the GPU of its parent
        return body(mode), mode
    outcome = in_child(lambda: body(mode))
    if outcome.kind == "crash" and not mode.checked:
        checked = replace(mode, checked=True)
        seen = in_child(lambda: body(checked))
        if seen.is_failure:
            return seen, checked
    return outcome, mode


# ------------------------------------------------------------------ searching
@dataclass(frozen=True)
class Search:
    """The programs of the seeds [seed, seed + cases), and how they run. `seconds` is for all of
    them, `shrink_s` for each failure; a refusal whose reason contains `shown` is a failure, too."""

    kind: str
    seed: int
    cases: int
    seconds: float
    schedules: tuple[str, ...] = ("cpu", "h200")
    device: str = "cpu"
    without: tuple[str, ...] = ()
    shown: str = ""
    shrink_s: float = 60.0
    out: Path = Path("fuzz-failures")

    def key(self, mode: Mode, outcome: Outcome) -> Key | None:
        """Returns mode, kind and reason of a failure, by which equal ones count once."""
        is_shown = outcome.kind == "refused" and self.shown and self.shown in outcome.reason
        return (str(mode), outcome.kind, outcome.reason) if outcome.is_failure or is_shown else None


Key = tuple[str, str, str]


def search(plan: Search) -> Tally:
    """Runs programs in this process; shrinks and writes down the first of each failure."""
    torch.set_num_threads(1)
    _warm_up()
    end = time.monotonic() + plan.seconds
    tally = Tally()
    failures: dict[Key, Failure] = {}
    for seed in range(plan.seed, plan.seed + plan.cases):
        program = GENERATORS[plan.kind](seed)
        if has_any(program, plan.without):
            continue
        for mode in modes_of(plan.kind, seed, plan.schedules, plan.device):
            if time.monotonic() > end:
                return tally
            outcome, ran = run_program(program, mode)
            tally.add(str(mode), outcome, seed)
            key = plan.key(ran, outcome)
            if key is not None and key not in failures:
                failures[key] = Failure(*key, outcome.detail, f"seed {seed}")
                tally.fail(failures[key])
                failures[key].path = _shrunk(plan, seed, ran, key, outcome)
    return tally


def _warm_up() -> None:
    """Runs a small program, so that the forked processes need not import what it imports."""
    x = TensorInput("x0", "Float", (4,), True, (), plain_layout(1))
    call = (TensorArg((4,), 0, "normal", 1),)
    program = Program((x,), (Stmt(("t0",), "neg", (Ref("x0"),)),), (Output("t0"),), (call,))
    assert outcome_of(Case.of(program), Mode()).kind == "ok"


class _Recorded(ExampleDatabase):
    """A database of one example: the choices that a program was made of."""

    def __init__(self, choices: Sequence[int]) -> None:
        super().__init__()
        # One choice more than the program takes: Hypothesis would hold an exact one to be shrunk.
        self._example = choices_to_bytes([*choices, 0])

    def fetch(self, key: bytes) -> Iterable[bytes]:
        """Yields the example, whatever test asks."""
        del key
        yield self._example

    def save(self, key: bytes, value: bytes) -> None:
        """Keeps nothing: the program is written down."""

    def delete(self, key: bytes, value: bytes) -> None:
        """Keeps nothing."""


class _ProgramFails(AssertionError):
    """A program fails as the one that is shrunk."""


class _TimeIsUp(BaseException):
    """Ends shrinking in the middle of a program."""


Draw = Callable[[st.SearchStrategy[Any]], Any]


def _below(draw: Draw) -> Callable[[int], int]:
    return lambda n: draw(st.integers(0, n - 1))


@st.composite
def programs(draw: Draw, kind: str) -> Program:
    """Draws a program of a kind, then the parts of it that are kept."""
    whole = GENERATORS[kind](DrawnRandom(_below(draw)))
    return reduced(whole, Parts.drawn(whole, _below(draw)))


@st.composite
def parts_of(draw: Draw, whole: Program) -> Parts:
    """Draws the parts of a program that are kept."""
    return Parts.drawn(whole, _below(draw))


def _shrunk(plan: Search, seed: int, mode: Mode, key: Key, outcome: Outcome) -> str:
    """Writes the smallest program that is found to fail as the one of a seed; returns the path.

    First parts of the program are dropped, then it is made anew of smaller choices.
    """
    path = plan.out / f"{plan.kind}_{seed}_{mode}.py".replace("+", "_")
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + plan.shrink_s
    choices: list[int] = []
    source = seeded(plan.kind, seed)

    def below(n: int) -> int:
        choices.append(source.randrange(n))
        return choices[-1]

    def write(program: Program, outcome: Outcome) -> None:
        title = f"{plan.kind} seed {seed}, {mode}: {outcome.kind} {outcome.reason}"
        path.write_text(standalone_text(program, mode, title, outcome.detail))

    def run_again(program: Program) -> None:
        """Raises if the program fails in the same way."""
        if time.monotonic() > end:
            raise _TimeIsUp
        if is_valid(program):
            now, ran = run_program(program, mode)
            if plan.key(ran, now) == key:
                write(program, now)
                raise _ProgramFails

    whole = GENERATORS[plan.kind](DrawnRandom(below))
    write(whole, outcome)
    smallest = Parts.all_of(whole)

    def run_parts(parts: Parts) -> None:
        nonlocal smallest
        try:
            run_again(reduced(whole, parts))
        except _ProgramFails:
            smallest = parts
            raise

    # A failure that does not come back each time keeps the program as it is.
    with contextlib.suppress(_TimeIsUp, Flaky):
        _minimise(parts_of(whole), run_parts, _Recorded(smallest.choices))
        _minimise(programs(plan.kind), run_again, _Recorded([*choices, *smallest.choices]))
    return str(path)


def _minimise(
    strategy: st.SearchStrategy[Any], body: Callable[[Any], None], start: ExampleDatabase
) -> None:
    """Has Hypothesis repeat `body` with smaller and smaller values, from those recorded."""
    settled = settings(
        database=start,
        deadline=None,
        phases=[Phase.reuse, Phase.shrink],
        suppress_health_check=[*HealthCheck],  # pyright: ignore[reportArgumentType]
        verbosity=Verbosity.quiet,
    )

    @settled
    @given(strategy)
    def test(value: Any) -> None:
        body(value)

    with contextlib.suppress(_ProgramFails):
        test()


def search_in_processes(plan: Search, processes: int) -> Tally:
    """Searches in blocks of programs, `processes` at a time; returns the sum of their tallies."""
    end = time.time() + plan.seconds
    starts = range(0, plan.cases, BLOCK)
    blocks = (
        replace(plan, seed=plan.seed + at, cases=min(BLOCK, plan.cases - at)) for at in starts
    )
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="fuzz-") as cache,
        ProcessPoolExecutor(
            processes, context, initializer=_begin, initargs=(cache,), max_tasks_per_child=1
        ) as pool,
    ):
        running: deque[Future[Tally]] = deque()
        done: list[Tally] = []
        for number, block in enumerate(blocks):
            if time.time() > end:
                break
            running.append(pool.submit(_search_until, block, end, number))
            if len(running) > processes:
                done.append(running.popleft().result())
        return total([*done, *(future.result() for future in running)])


def _begin(cache: str) -> None:
    os.environ |= {"FUSER_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}


def _search_until(plan: Search, end: float, number: int) -> Tally:
    if plan.device == "cuda":
        torch.cuda.set_device(number % torch.cuda.device_count())
    return search(replace(plan, seconds=end - time.time()))
