"""The modes in which a program runs, and the parts of the product that fuzzers use beyond its API.

One compiler process compiles the kernels of many programs.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fuser.runtime import compile as entrance


@dataclass(frozen=True)
class Mode:
    """How a program runs: with which schedules, with or without checks, on which device.

    With the schedules `graphs`, a program uses the CPU's schedules, and a stand-in for CUDA graphs
    repeats the runs.
    """

    schedules: str = "cpu"
    checked: bool = False
    device: str = "cpu"
    # The streams whose work is delayed in additional runs: see the option `late_stream`.
    late: tuple[str, ...] = ()

    def runs(self, calls: Sequence[int]) -> Iterator[tuple[list[str], int]]:
        """Yields the options and the number of each call of a run."""
        yield from ((self.options, m) for m in calls)
        if self.has_graphs:
            yield from ((self.options, m) for m in sorted(set(calls)) * 3)
        for late in self.late:
            yield from (([*self.options, f"late_stream({late})"], m) for m in sorted(set(calls)))

    @property
    def has_graphs(self) -> bool:
        """Whether graphs repeat calls."""
        return self.device == "cuda" or self.schedules == "graphs"

    @contextmanager
    def eager_graphs(self) -> Generator[None]:
        """Returns a context in which each run is captured after its first repetition, however short
        it is.
        """
        if not self.has_graphs:
            yield
            return
        from fuser.runtime.captured_graphs import MAKERS
        from hostir.runtime import cuda_graphs, plan
        from tests.support.stand_in_graphs import CpuGraphs

        before = cuda_graphs.RUNS_BEFORE, cuda_graphs.MIN_STEPS, dict(MAKERS)
        cuda_graphs.RUNS_BEFORE = cuda_graphs.MIN_STEPS = 1
        pools = plan._POOLS  # pyright: ignore[reportPrivateUsage]
        if self.device == "cpu":
            MAKERS["cpu"] = CpuGraphs
            plan._POOLS = {}
        try:
            yield
        finally:
            cuda_graphs.RUNS_BEFORE, cuda_graphs.MIN_STEPS = before[:2]
            MAKERS.clear()
            MAKERS.update(before[2])
            plan._POOLS = pools

    @property
    def options(self) -> list[str]:
        """Returns the options of `FusionDefinition.execute`."""
        described = ["schedules_for(h200)"] if self.schedules == "h200" else []
        return [*described, *(["checked"] if self.checked else [])]

    def __str__(self) -> str:
        return "+".join(
            [
                self.schedules,
                *(["checked"] if self.checked else []),
                *([self.device] * (self.device != "cpu")),
            ]
        )


class _Postponed(BaseException):
    """Ends a run at the point where it would have called the compiler."""


@contextmanager
def collecting(sources: list[tuple[Any, bool]]) -> Generator[None]:
    """Records the kernels that a run needs, and ends the run there by raising `_Postponed`."""
    original = entrance.compile_kernels

    def postpone(wanted: Iterable[Any], device: Any, *, checked: bool = False) -> Any:
        found = [(source, checked) for source in wanted]
        if not found:
            return []
        sources.extend(found)
        raise _Postponed

    users = [m for m in list(sys.modules.values()) if vars(m).get("compile_kernels") is original]
    for module in users:
        setattr(module, "compile_kernels", postpone)  # noqa: B010
    try:
        yield
    except _Postponed:
        pass
    finally:
        for module in users:
            setattr(module, "compile_kernels", original)  # noqa: B010


def compile_all(sources: Sequence[tuple[Any, bool]], device: str) -> None:
    """Compiles kernels together; one that is refused does not stop the others."""
    for checked in (False, True):
        wanted = [s for s, c in sources if c is checked]
        if not wanted:
            continue
        try:
            entrance.compile_kernels(wanted, device, checked=checked)
        except Exception:
            # The program of the refused kernel raises the error again when it runs.
            for source in wanted:
                try:
                    entrance.compile_kernels([source], device, checked=checked)
                except Exception:
                    continue
