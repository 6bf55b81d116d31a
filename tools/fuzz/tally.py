"""The counts of a run of a fuzzer: programs that were compared, refused, and wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tools.fuzz.runner import Outcome


@dataclass
class Failure:
    """One program that failed in one mode, and the path of the script that shows it."""

    mode: str
    kind: str
    reason: str
    detail: str
    path: str = ""

    def line(self) -> str:
        """Returns the failure in one line, with the last line of its story."""
        last = (self.detail.strip().splitlines() or [""])[-1][:200]
        return f"{self.mode}: {self.kind}: {self.reason} | {last} {self.path}".rstrip()


@dataclass
class Tally:
    """Counts of runs, refusals (by mode and reason) and compared values; and the failures."""

    cases: Counter[str] = field(default_factory=Counter)
    refused: dict[str, Counter[str]] = field(default_factory=dict)
    # The first seed that was refused for a reason, by mode and reason.
    examples: dict[tuple[str, str], int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    outputs: int = 0
    elements: int = 0
    masked: int = 0

    def add(self, mode: str, outcome: Outcome, seed: int) -> None:
        """Counts one run; a failure is kept by `fail`."""
        mode = mode.replace("+checked", "")
        self.cases[mode] += 1
        if outcome.kind == "refused":
            self.refused.setdefault(mode, Counter())[outcome.reason] += 1
            self.examples.setdefault((mode, outcome.reason), seed)
        self.outputs += outcome.outputs
        self.elements += outcome.elements
        self.masked += outcome.masked

    def fail(self, failure: Failure) -> None:
        """Keeps a failure, and prints it at once: a run may be stopped before its summary."""
        self.failures.append(failure)
        print(f"  {failure.line()}", flush=True)

    def refused_beyond(self, percent: float) -> list[str]:
        """Returns a line per mode of which more was refused than so many percent; three standard
        deviations more may be chance, which counts in small samples."""
        lines: list[str] = []
        for mode, count in sorted(self.cases.items()):
            refused = sum(self.refused.get(mode, Counter[str]()).values())
            allowed = count * percent / 100
            if refused > allowed + 3 * math.sqrt(allowed):
                share = f"{refused} of {count} runs were refused, more than {percent:g}%"
                lines.append(f"{mode}: {share}")
        return lines


def total(tallies: Iterable[Tally]) -> Tally:
    """Returns the sum of tallies; failures with the same mode, kind and reason count once."""
    whole = Tally()
    for part in tallies:
        whole.cases += part.cases
        for mode, reasons in part.refused.items():
            whole.refused.setdefault(mode, Counter()).update(reasons)
        whole.examples = part.examples | whole.examples
        known = {(f.mode, f.kind, f.reason) for f in whole.failures}
        whole.failures += [f for f in part.failures if (f.mode, f.kind, f.reason) not in known]
        whole.outputs += part.outputs
        whole.elements += part.elements
        whole.masked += part.masked
    return whole


def summary(tally: Tally, seconds: float) -> str:
    """Returns the report: counts, refusals by reason, failures."""
    runs = sum(tally.cases.values())
    lines = [
        f"{runs} runs in {seconds:.1f}s, {tally.outputs} outputs and {tally.elements} elements "
        f"compared, {100 * tally.masked / max(tally.elements, 1):.1f}% of them uncertain"
    ]
    for mode, count in sorted(tally.cases.items()):
        reasons = tally.refused.get(mode, Counter())
        refused = sum(reasons.values())
        lines.append(f"{mode}: {count} runs, {refused} refused ({100 * refused / count:.2f}%)")
        for why, n in reasons.most_common():
            example = f"(seed {tally.examples[mode, why]})"
            lines.append(f"  {n:5d} {100 * n / count:5.2f}%  {why}  {example}")
    lines.append(f"{len(tally.failures)} failures")
    lines += [f"  {failure.line()}" for failure in tally.failures]
    return "\n".join(lines)
