"""The cells of `bench.py kernels`: each times one pattern, dtype and shape, ours and torch's ways.

With several processes each takes the next cell when it has done one. What takes the host's time,
tracing and compiling, runs side by side; the GPU is used in turns (`kernel_timing.Turn`). So no
cell waits for the compilations of others, and none is timed beside another.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from kernel_patterns import PATTERNS, Pattern
from kernel_timing import Turn, set_count, take_turns_at_autotuning, time_interleaved, timer

from fuser import FusionDefinition

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}
Row = dict[str, Any]
Inputs = tuple[torch.Tensor, ...]


class Cell(NamedTuple):
    pattern: str
    dtype: str
    m: int
    n: int

    @staticmethod
    def of(row: Row) -> Cell:
        """Return the cell of a line."""
        return Cell(row["pattern"], row["dtype"], *row["shape"])

    def labels(self) -> Row:
        shape = [self.m, self.n]
        return {"bench": "kernels", "pattern": self.pattern, "dtype": self.dtype, "shape": shape}

    def __str__(self) -> str:
        return f"{self.pattern} {self.dtype} {self.m}x{self.n}"


class Plan(NamedTuple):
    """How cells are timed: beside which ways of torch (eager, or modes of torch.compile), on which
    device, in turns with whom."""

    peers: tuple[str, ...]
    device: str
    turns: Path | None = None

    @property
    def compiles(self) -> bool:
        return bool({*self.peers} - {"eager"})


# ------------------------------------------------------------------ one cell
def _peers(pattern: Pattern, names: Sequence[str]) -> dict[str, Callable[..., Any]]:
    eager = pattern.library or pattern.peer
    return {
        name: eager if name == "eager" else torch.compile(pattern.peer, dynamic=False, mode=name)
        for name in names
    }


def _first_calls(
    peers: dict[str, Callable[..., Any]], inputs: Inputs, plan: Plan, turn: Turn
) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    """Compile; return the peers that could be called, and why the others could not."""
    works, failed = {}, {}
    for name, peer in peers.items():
        try:
            with turn if name == "eager" else nullcontext():
                peer(*inputs)
                _free_memory(plan)
            works[name] = peer
        except torch.AcceleratorError:
            raise
        except Exception as error:
            failed[name] = repr(error)[:300]
    return works, failed


def measure(cell: Cell, plan: Plan, turn: Turn) -> Row:
    """Return the line of one cell."""
    pattern, dtype = PATTERNS[cell.pattern], DTYPES[cell.dtype]
    key = cell.m, cell.n, dtype
    torch.manual_seed(0)
    if plan.compiles:
        torch._dynamo.reset()
    with turn:
        inputs = pattern.random(*key, device=plan.device)
    fd = pattern.define(*key)
    began = time.perf_counter()
    outs = fd.execute(inputs)
    if plan.device == "cuda":
        torch.cuda.synchronize()
    first_s = time.perf_counter() - began
    dtypes = [str(out.dtype).removeprefix("torch.") for out in outs]
    with turn:
        errors, sigmas = pattern.errors(inputs, outs)
        del outs
        _free_memory(plan)
    peers, failed = _first_calls(_peers(pattern, plan.peers), inputs, plan, turn)
    nbytes = pattern.nbytes(*key)
    with turn:
        times = _times(fd, peers, pattern, key, inputs, plan.device)
        del inputs
        _free_memory(plan)
    counts = fd.fec.statistics()
    us = {name: round(median * 1e6, 3) for name, (median, _, _) in times.items()}
    return {
        **cell.labels(),
        "us": us,
        "us_min": {name: round(low * 1e6, 3) for name, (_, low, _) in times.items()},
        "us_max": {name: round(high * 1e6, 3) for name, (_, _, high) in times.items()},
        "nbytes": nbytes,
        "GBps": round(nbytes / us["ours"] / 1e3, 1),
        "kernels": counts["kernels"],
        "library_calls": counts["library_calls"],
        "relative_errors": errors,
        "output_dtypes": dtypes,
        **({"sigmas": round(sigmas, 2)} if pattern.dropout else {}),
        **({"peers_failed": failed} if failed else {}),
        "first_call_s": round(first_s, 3),
    }


def _free_memory(plan: Plan) -> None:
    """Return what torch keeps: other processes need it."""
    if plan.device == "cuda":
        torch.cuda.empty_cache()


def _times(
    fd: FusionDefinition,
    peers: dict[str, Callable[..., Any]],
    pattern: Pattern,
    key: tuple[int, int, torch.dtype],
    inputs: Inputs,
    device: str,
) -> dict[str, tuple[float, float, float]]:
    count = set_count(pattern.nbytes(*key))
    sets = [inputs, *(pattern.random(*key, device=device) for _ in range(count - 1))]
    candidates: dict[str, Callable[..., Any]] = {"ours": lambda *a: fd.execute(a), **peers}
    kind = timer(device)
    timed = time_interleaved([kind(fn, sets) for fn in candidates.values()])
    return dict(zip(candidates, timed, strict=True))


def measured(cell: Cell, plan: Plan, turn: Turn) -> tuple[Row, bool]:
    """Return the line of one cell, also where it could not be timed; and whether the process can
    still use the device: after some errors CUDA refuses all that follows."""
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
    """Time the cells that come, one line each; None ends it."""
    torch.set_num_threads(1)
    turn = Turn(plan.turns)
    if plan.compiles:
        import torch._inductor.config as inductor

        # Not also each with processes of its own.
        inductor.compile_threads = 1
        if plan.device == "cuda":
            take_turns_at_autotuning(turn)
    is_usable = True
    while is_usable and (cell := connection.recv()) is not None:
        row, is_usable = measured(cell, plan, turn)
        connection.send((row, is_usable))


class _Crew:
    """The processes, and the cell that each has."""

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
        if not self._idle:
            self.start()
        connection, process = self._idle.pop(0)
        self.busy[connection] = process, cell
        connection.send(cell)

    def receive(self, connection: Connection) -> Row:
        """Return what a process says; one that ended is left out from now on."""
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
    """Yield cells with their lines, in the order in which they are done, until a time of
    `time.monotonic`; with several processes, what they have in hand then is given up."""
    if processes > 1:
        return _side_by_side(cells, plan, processes, deadline)
    return _one_by_one(cells, plan, deadline)
