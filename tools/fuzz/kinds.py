"""The kinds of random programs: their generators, the modes in which they run, and how they run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tools.fuzz import sharded, single, streams
from tools.fuzz.product import Mode
from tools.fuzz.program import Program, TensorInput
from tools.fuzz.ranks import run_ranks
from tools.fuzz.runner import Case, Outcome, run

GENERATORS = {"single": single.generate, "sharded": sharded.generate, "streams": streams.generate}


def modes_of(kind: str, number: int, schedules: Sequence[str], device: str) -> list[Mode]:
    """Returns the modes of a program by its number (or seed): every tenth runs in checked mode."""
    checked = number % 10 == 3 and device == "cpu"
    late = late_streams(number) if kind == "streams" and device == "cpu" else ()
    return [Mode(name, checked, device, late) for name in schedules]


def late_streams(number: int) -> tuple[str, ...]:
    """Returns the streams that are held back, one at a time: every eighth number tries all."""
    numbers = range(8) if number % 8 == 0 else (number % 3, 3 + number % 5)
    return ("all", "entry", *map(str, numbers))


def outcome_of(case: Case, mode: Mode, fd: Any = None) -> Outcome:
    """Runs a program in a mode, on simulated ranks if it has annotations."""
    return (run_ranks if case.program.annotations else run)(case, mode, fd)


def has_any(program: Program, words: Iterable[str]) -> bool:
    """Whether a program has one of these ops, or `expanded` inputs."""
    used = {s.op for s in program.stmts}
    used |= {"expanded" for i in program.inputs if isinstance(i, TensorInput) and i.layout.expanded}
    return bool(used & set(words))
