"""The cells of `bench.py kernels`: each times one pattern, dtype and shape, with our and torch's
kernels.

With several processes, each takes the next cell when it has finished one. Host work (tracing and
compiling) runs in parallel; the GPU is used in turns (`kernel_timing.Turn`). So no cell waits for
the compilations of others, and no two cells are timed at the same time.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

import torch
from kernel_patterns import PATTERNS, Pattern, quack_peer
from kernel_patterns.pattern import as_tuple
from kernel_timing import Turn, set_count, take_turns_at_autotuning, time_interleaved, timer

from fuser import FusionDefinition

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}

T = TypeVar("T")
Row = dict[str, Any]
Inputs = tuple[torch.Tensor, ...]


class Cell(NamedTuple):
    """A pattern, dtype and shape (m rows, n columns) to time."""

    pattern: str
    dtype: str
    m: int
    n: int

    @staticmethod
    def of(row: Row) -> Cell:
        """Returns the cell of a line."""
        return Cell(row["pattern"], row["dtype"], *row["shape"])

    def labels(self) -> Row:
        """Returns the fields that name this cell in its line."""
        shape = [self.m, self.n]
        return {"bench": "kernels", "pattern": self.pattern, "dtype": self.dtype, "shape": shape}

    def __str__(self) -> str:
        return f"{self.pattern} {self.dtype} {self.m}x{self.n}"


class Plan(NamedTuple):
    """The settings with which cells are timed.

    - `peers`: eager, modes of torch.compile, or QuACK.
    - `device`: the device to use.
    - `turns`: the lock file for the use of the GPU, None for one process.
    """

    peers: tuple[str, ...]
    device: str
    turns: Path | None = None

    @property
    def compiles(self) -> bool:
        """Whether any peer is a mode of torch.compile."""
        return bool({*self.peers} - {"eager", quack_peer.NAME})


# ------------------------------------------------------------------ one cell
class _Peers:
    """The peers that work (torch's calls and QuACK's kernel), and the errors of the others."""

    def __init__(self, name: str, plan: Plan) -> None:
        pattern = PATTERNS[name]
        self.works: dict[str, Callable[..., Any]] = {}
        for peer in plan.peers:
            if peer == "eager":
                self.works[peer] = pattern.library or pattern.peer
            elif peer != quack_peer.NAME:
                self.works[peer] = torch.compile(pattern.peer, dynamic=False, mode=peer)
            elif name in quack_peer.KERNELS:
                self.works[peer] = quack_peer.KERNELS[name]
        self.failed: dict[str, str] = {}
        self._plan = plan

    def attempt(self, what: Callable[[str, Callable[..., Any]], T]) -> dict[str, T]:
        """Calls a function with each peer; a peer that raises is left out from then on.

        Raises:
            torch.AcceleratorError: the device can no longer be used.
        """
        done: dict[str, T] = {}
        for name, peer in [*self.works.items()]:
            try:
                done[name] = what(name, peer)
            except Exception as error:
                self.failed[name] = repr(error)[:300]
                del self.works[name]
                if self._plan.device == "cuda":
                    torch.cuda.synchronize()
        return done


def measure(cell: Cell, plan: Plan, turn: Turn) -> Row:
    """Returns the line of one cell."""
    pattern, key = PATTERNS[cell.pattern], (cell.m, cell.n, DTYPES[cell.dtype])
    nbytes, fd = pattern.nbytes(*key), pattern.define(*key)
    torch.manual_seed(0)
    with turn:
        sets = [pattern.random(*key, device=plan.device)]
    checked = _check(fd, pattern, sets[0], plan, turn)
    if plan.compiles:
        torch._dynamo.reset()
    peers = _Peers(cell.pattern, plan)

    def first_call(name: str, peer: Callable[..., Any]) -> None:
        with turn if name == "eager" else nullcontext():
            made = peer(*sets[0])
            if name == quack_peer.NAME:
                with turn:
                    checked["quack_errors"] = pattern.errors(sets[0], as_tuple(made))[0]
            del made
            _free_memory(plan)

    peers.attempt(first_call)
    with turn:
        sets += [pattern.random(*key, device=plan.device) for _ in range(set_count(nbytes) - 1)]
        times = _times(lambda *given: fd.execute(given), peers, sets, plan.device)
        sets.clear()
        _free_memory(plan)
    counts = fd.fec.statistics()
    return {
        **cell.labels(),
        **times,
        "nbytes": nbytes,
        "GBps": round(nbytes / times["us"]["ours"] / 1e3, 1),
        "kernels": counts["kernels"],
        "library_calls": counts["library_calls"],
        **checked,
        **({"peers_failed": peers.failed} if peers.failed else {}),
    }


def _check(fd: FusionDefinition, pattern: Pattern, inputs: Inputs, plan: Plan, turn: Turn) -> Row:
    """Runs the pattern once, which compiles it; returns the time and the errors of the
    results.
    """
    began = time.perf_counter()
    outs = fd.execute(inputs)
    if plan.device == "cuda":
        torch.cuda.synchronize()
    first_s = time.perf_counter() - began
    with turn:
        errors, sigmas = pattern.errors(inputs, outs)
        dtypes = [str(out.dtype).removeprefix("torch.") for out in outs]
        del outs
        _free_memory(plan)
    return {
        "relative_errors": errors,
        "output_dtypes": dtypes,
        **({"sigmas": round(sigmas, 2)} if pattern.dropout else {}),
        "first_call_s": round(first_s, 3),
    }


def _free_memory(plan: Plan) -> None:
    """Frees torch's cached memory, because other processes need it."""
    if plan.device == "cuda":
        torch.cuda.empty_cache()


def _times(
    ours: Callable[..., Any], peers: _Peers, sets: Sequence[Inputs], device: str
) -> dict[str, dict[str, float]]:
    """Returns medians, minima and maxima in microseconds, by candidate."""
    kind = timer(device)
    timers = {"ours": kind(ours, sets)} | peers.attempt(lambda _, peer: kind(peer, sets))
    spreads = time_interleaved([*timers.values()])
    columns = zip(("us", "us_min", "us_max"), zip(*spreads, strict=True), strict=True)
    return {
        what: {name: round(s * 1e6, 3) for name, s in zip(timers, seconds, strict=True)}
        for what, seconds in columns
    }


def measured(cell: Cell, plan: Plan, turn: Turn) -> tuple[Row, bool]:
    """Returns the line of one cell, also if it failed, and whether the process can still use the
    device.

    After some errors CUDA refuses all later calls.
    """
    try:
        with torch.no_grad():
            return measure(cell, plan, turn), True
    except Exception as error:
        row = {**cell.labels(), "failed": f"{type(error).__name__}: {error}"[:2000]}
    try:
        if plan.device == "cuda":
            torch.cuda.synchronize()
        _free_memory(plan)
    except torch.AcceleratorError:
        return row, False
    return row, True


# ------------------------------------------------------------------ processes
def _work(connection: Connection, plan: Plan) -> None:
    """Times the cells that it receives, one line each, until it receives None."""
    torch.set_num_threads(1)
    turn = Turn(plan.turns)
    if plan.compiles:
        import torch._inductor.config as inductor

        # This process must not start compile processes itself.
        inductor.compile_threads = 1
        if plan.device == "cuda":
            take_turns_at_autotuning(turn)
    is_usable = True
    while is_usable and (cell := connection.recv()) is not None:
        row, is_usable = measured(cell, plan, turn)
        connection.send((row, is_usable))


class _Crew:
    """The worker processes, and the cell of each."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._context = multiprocessing.get_context("spawn")
        self.busy: dict[Connection, tuple[SpawnProcess, Cell]] = {}
        self._idle: list[tuple[Connection, SpawnProcess]] = []

    def start(self) -> None:
        mine, its = self._context.Pipe()
        process = self._context.Process(target=_work, args=(its, self._plan), daemon=True)
        process.start()
        its.close()
        self._idle.append((mine, process))

    def give(self, cell: Cell) -> None:
        self._idle = [(c, process) for c, process in self._idle if process.is_alive()]
        if not self._idle:
            self.start()
        connection, process = self._idle.pop(0)
        self.busy[connection] = process, cell
        connection.send(cell)

    def receive(self, connection: Connection) -> Row:
        """Returns the line that a process sends; a process that ended is left out from then
        on.
        """
        process, cell = self.busy.pop(connection)
        try:
            row, is_usable = connection.recv()
        except (EOFError, OSError):
            process.join()
            return {**cell.labels(), "failed": f"the process ended ({process.exitcode})"}
        if is_usable:
            self._idle.append((connection, process))
        return row

    def end(self) -> None:
        for process, _ in self.busy.values():
            process.kill()
        for connection, process in self._idle:
            with suppress(OSError):
                connection.send(None)
            process.join(10)


def _side_by_side(
    cells: Sequence[Cell], plan: Plan, processes: int, deadline: float
) -> Iterator[tuple[Cell, Row]]:
    waiting = list(reversed(cells))
    with TemporaryDirectory() as folder:
        crew = _Crew(plan._replace(turns=Path(folder) / "turn"))
        try:
            while waiting or crew.busy:
                while waiting and len(crew.busy) < processes and time.monotonic() < deadline:
                    crew.give(waiting.pop())
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                for connection in wait(list(crew.busy), min(left, 3600.0)):
                    assert isinstance(connection, Connection)
                    _, cell = crew.busy[connection]
                    yield cell, crew.receive(connection)
        finally:
            crew.end()


def _one_by_one(cells: Sequence[Cell], plan: Plan, deadline: float) -> Iterator[tuple[Cell, Row]]:
    turn = Turn()
    for cell in cells:
        if time.monotonic() >= deadline:
            return
        row, is_usable = measured(cell, plan, turn)
        yield cell, row
        if not is_usable:
            return


def measure_all(
    cells: Sequence[Cell], plan: Plan, *, processes: int, deadline: float
) -> Iterator[tuple[Cell, Row]]:
    """Yields cells with their lines, in the order in which they are finished, until `deadline`.

    `deadline` is a time of `time.monotonic`. With several processes, unfinished cells are dropped
    then.
    """
    if processes > 1:
        return _side_by_side(cells, plan, processes, deadline)
    return _one_by_one(cells, plan, deadline)
