"""The processes that run programs: each reads seeds from its input and reports events.

An event is one line of JSON on the given descriptor: `at` before a step that may crash or hang,
`done` after it. All programs of a batch are lowered first, so that one compiler process can compile
their kernels.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import resource
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tools.fuzz import sharded, single, streams
from tools.fuzz.minimise import in_child, minimise
from tools.fuzz.product import Mode, compile_all
from tools.fuzz.program import Program, TensorInput
from tools.fuzz.ranks import collect_ranks, run_ranks
from tools.fuzz.runner import Case, Outcome, collect, run
from tools.fuzz.standalone import standalone_text

# A worker that uses more memory than this is replaced by a new one.
MAX_RESIDENT_KB = 4_000_000


GENERATORS = {"single": single.generate, "sharded": sharded.generate, "streams": streams.generate}


def modes_of(kind: str, seed: int, schedules: Sequence[str], device: str) -> list[Mode]:
    """Returns the modes of one seed: every tenth program runs in checked mode."""
    checked = seed % 10 == 3 and device == "cpu"
    late = late_streams(seed) if kind == "streams" and device == "cpu" else ()
    return [Mode(name, checked, device, late) for name in schedules]


def late_streams(seed: int) -> tuple[str, ...]:
    """Returns the streams to delay, one at a time; every eighth seed tries all of them."""
    numbers = range(8) if seed % 8 == 0 else (seed % 3, 3 + seed % 5)
    return ("all", "entry", *map(str, numbers))


@functools.lru_cache(maxsize=64)
def program_of(kind: str, seed: int) -> Program:
    """Returns the program of a seed, from a cache."""
    return GENERATORS[kind](seed)


def outcome_of(kind: str, case: Case, mode: Mode, fd: Any = None) -> Outcome:
    """Runs a case in a mode, on simulated ranks if it has meshes; returns the outcome."""
    return (run_ranks if case.program.annotations else run)(case, mode, fd)


class _Reporter:
    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "w", buffering=1)

    def send(self, **event: Any) -> None:
        self._file.write(json.dumps(event) + "\n")


def has_any(program: Program, words: Iterable[str]) -> bool:
    """Whether a program has one of these ops, or `expanded` inputs."""
    found = {s.op for s in program.stmts}
    found |= {
        "expanded" for i in program.inputs if isinstance(i, TensorInput) and i.layout.expanded
    }
    return bool(found & set(words))


def serve(
    kind: str, schedules: Sequence[str], device: str, without: Sequence[str], descriptor: int
) -> None:
    """Runs the batches of seeds that arrive on stdin, one line each."""
    faulthandler.enable()
    torch.set_num_threads(1)
    reporter = _Reporter(descriptor)
    reporter.send(ready=True)
    for line in sys.stdin:
        seeds = [s for s in json.loads(line) if not has_any(program_of(kind, s), without)]
        _batch(kind, seeds, schedules, device, reporter)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > MAX_RESIDENT_KB
        reporter.send(idle=True, tired=grown)


def _batch(
    kind: str, seeds: Iterable[int], schedules: Sequence[str], device: str, to: _Reporter
) -> None:
    work: list[tuple[int, Mode, Case, Any]] = []
    sources: list[tuple[Any, bool]] = []
    for seed in seeds:
        to.send(at=seed, mode="oracle")
        case = Case.of(program_of(kind, seed))
        lower = collect_ranks if case.program.annotations else collect
        for mode in modes_of(kind, seed, schedules, device):
            to.send(at=seed, mode=str(mode))
            fd, wanted = lower(case, mode)
            sources += wanted
            work.append((seed, mode, case, fd))
    to.send(at=None, mode="compiler")
    compile_all(sources, device)
    for seed, mode, case, fd in work:
        to.send(at=seed, mode=str(mode))
        to.send(done=seed, mode=str(mode), **asdict(outcome_of(kind, case, mode, fd)))


def mode_named(text: str) -> Mode:
    """Returns the mode with this text, such as `cpu+checked`."""
    words = text.split("+")
    return Mode(words[0], "checked" in words, "cuda" if "cuda" in words else "cpu")


def shrink(kind: str, seed: int, mode_text: str, seconds: float, folder: Path) -> Path:
    """Minimises the failure of a seed and writes the standalone program; returns its path."""
    mode = mode_named(mode_text)
    if kind == "streams" and mode.device == "cpu":
        mode = replace(mode, late=late_streams(0))
    torch.set_num_threads(1)

    def result(program: Program) -> tuple[str, str]:
        if mode.device == "cuda":
            out = outcome_of(kind, Case.of(program), mode)
            return out.kind, out.reason

        def body() -> tuple[str, str]:
            out = outcome_of(kind, Case.of(program), mode)
            return out.kind, out.reason

        return in_child(body)

    program = program_of(kind, seed)
    wanted = result(program)
    if wanted[0] in ("ok", "crash") and mode.device == "cpu" and not mode.checked:
        # A program that damages memory may crash later, or not at all: checked mode detects the
        # access itself.
        seen, mode = (wanted, mode), replace(mode, checked=True)
        wanted = result(program)
        if wanted[0] == "ok":
            wanted, mode = seen
    if wanted[0] not in ("ok", "refused") or seconds < 0:
        program = minimise(program, lambda p: result(p) == wanted, seconds=abs(seconds))
    title = f"{kind} seed {seed}, {mode}: {wanted[0]} {wanted[1]}"
    story = ""
    if wanted[0] not in ("crash", "hang"):
        # A crash cannot report its story.
        story = outcome_of(kind, Case.of(program), mode).detail
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}_{seed}_{mode_text.replace('+', '_')}.py"
    path.write_text(standalone_text(program, mode, title, story))
    return path
