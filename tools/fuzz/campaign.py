"""Runs a fuzzer: starts worker processes, collects their reports, and summarises them at the end.

A worker that dies, or is silent for too long, costs one program, which counts as a failure. A new
worker continues.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

SCRIPT = Path(__file__).parents[2] / "scripts" / "fuzz.py"
HANG_S = 60.0
COMPILER_S = 300.0


@dataclass
class Failure:
    """One program that failed, in one mode."""

    seed: int
    mode: str
    kind: str
    reason: str
    detail: str
    path: str = ""


@dataclass
class Tally:
    """The counts of a run, by mode."""

    cases: Counter[str] = field(default_factory=Counter)
    refused: dict[str, Counter[str]] = field(default_factory=dict)
    examples: dict[tuple[str, str], int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    outputs: int = 0
    elements: int = 0
    masked: int = 0

    def fail(self, failure: Failure) -> None:
        """Counts a failure, and prints it at once: a run may be stopped before its summary."""
        self.failures.append(failure)
        last = (failure.detail.strip().splitlines() or [""])[-1][:200]
        what = f"{failure.kind}: {failure.reason}"
        print(f"  seed {failure.seed} {failure.mode}: {what} | {last}", flush=True)

    def add(self, event: dict[str, Any]) -> None:
        """Counts the outcome of one program that a worker reported."""
        mode, reason = event["mode"].replace("+checked", ""), event["reason"]
        self.cases[mode] += 1
        if event["kind"] == "refused":
            self.refused.setdefault(mode, Counter())[reason] += 1
            self.examples.setdefault((mode, reason), event["done"])
        elif event["kind"] != "ok":
            self.fail(Failure(event["done"], event["mode"], event["kind"], reason, event["detail"]))
        self.outputs += event["outputs"]
        self.elements += event["elements"]
        self.masked += event["masked"]

    def refused_beyond(self, percent: float) -> list[str]:
        """Returns a line for each mode in which more than `percent` of the runs were refused.

        In small samples, up to three standard deviations more may be chance and are accepted.
        """
        found: list[str] = []
        for mode, count in sorted(self.cases.items()):
            refused = sum(self.refused.get(mode, Counter[str]()).values())
            allowed = count * percent / 100
            if refused > allowed + 3 * math.sqrt(allowed):
                what = f"{refused} of {count} runs were refused, more than {percent:g}%"
                found.append(f"{mode}: {what}")
        return found


class _Worker:
    """One worker process, and the program that it is working on."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        read, write = os.pipe()
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "worker", *arguments, "--report-to", str(write)],
            stdin=subprocess.PIPE,
            stdout=self.log,
            stderr=self.log,
            pass_fds=[write],
            env=environment,
            text=True,
            start_new_session=True,
        )
        os.close(write)
        self.pipe = os.fdopen(read)
        os.set_blocking(read, False)
        self.buffer = ""
        self.batch: list[int] = []
        self.done: set[tuple[int, str]] = set()
        self.at: tuple[int | None, str] = (None, "start")
        self.since = time.monotonic()

    def give(self, batch: list[int]) -> None:
        self.batch, self.done = batch, set()
        self.since = time.monotonic()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(batch) + "\n")
        self.process.stdin.flush()

    def events(self) -> list[dict[str, Any]] | None:
        """Returns the events reported since the last call; None when the worker has ended."""
        try:
            text = self.pipe.read()
        except BlockingIOError:
            return []
        if text == "":
            return None
        *lines, self.buffer = (self.buffer + (text or "")).split("\n")
        self.since = time.monotonic()
        return [json.loads(line) for line in lines]

    @property
    def is_late(self) -> bool:
        limit = COMPILER_S if self.at[0] is None else HANG_S
        return bool(self.batch) and time.monotonic() - self.since > limit

    def last_words(self) -> str:
        self.log.seek(0)
        return self.log.read()[-3000:].decode(errors="replace")

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.pipe.close()


@dataclass
class Campaign:
    """The seeds to run and how."""

    kind: str
    first: int
    cases: int
    seconds: float
    schedules: str = "cpu,h200"
    device: str = "cpu"
    processes: int = 1
    without: str = ""
    batch: int = 24

    def run(self) -> Tally:
        """Runs all seeds in worker processes until they are done or the time is over; returns the
        counts.
        """
        tally = Tally()
        seeds = deque(range(self.first, self.first + self.cases))
        end = time.monotonic() + self.seconds
        spoken = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="fuzz-") as cache, selectors.DefaultSelector() as s:
            workers = {n: self._start(n, cache, s) for n in range(self.processes)}
            while workers and time.monotonic() < end:
                for key, _ in s.select(timeout=1.0):
                    n = key.data
                    events = workers[n].events()
                    if events is None:
                        self._bury(workers[n], tally, seeds, "crash", s)
                        workers[n] = self._start(n, cache, s)
                        continue
                    for event in events:
                        if not self._take(workers[n], event, tally, seeds):
                            self._stop(workers.pop(n), s)
                            if event.get("tired"):
                                workers[n] = self._start(n, cache, s)
                            break
                for n, worker in list(workers.items()):
                    if worker.is_late:
                        self._bury(worker, tally, seeds, "hang", s)
                        workers[n] = self._start(n, cache, s)
                if time.monotonic() - spoken > 20:
                    spoken = time.monotonic()
                    print(
                        f"  {sum(tally.cases.values())} runs, {len(tally.failures)} failures",
                        flush=True,
                    )
            for worker in workers.values():
                self._stop(worker, s)
        return tally

    def _start(self, n: int, cache: str, selector: selectors.BaseSelector) -> _Worker:
        environment = os.environ | {"FUSER_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        if self.device == "cuda":
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            found = visible.split(",") if visible else _gpus()
            if found:
                environment["CUDA_VISIBLE_DEVICES"] = found[n % len(found)]
        arguments = [self.kind, "--schedules", self.schedules, "--device", self.device]
        worker = _Worker([*arguments, "--without", self.without], environment)
        selector.register(worker.pipe, selectors.EVENT_READ, n)
        return worker

    def _stop(self, worker: _Worker, selector: selectors.BaseSelector) -> None:
        selector.unregister(worker.pipe)
        worker.end()

    def _take(
        self, worker: _Worker, event: dict[str, Any], tally: Tally, seeds: deque[int]
    ) -> bool:
        """Records an event; returns whether the worker has something to do."""
        if "done" in event:
            worker.done.add((event["done"], event["mode"]))
            tally.add(event)
        elif "at" in event:
            worker.at = (event["at"], event["mode"])
        else:
            if event.get("tired") or not seeds:
                worker.batch = []
                return False
            worker.give([seeds.popleft() for _ in range(min(self.batch, len(seeds)))])
        return True

    def _bury(
        self,
        worker: _Worker,
        tally: Tally,
        seeds: deque[int],
        kind: str,
        selector: selectors.BaseSelector,
    ) -> None:
        """Counts the program on which a worker died, and puts the rest of its batch back."""
        seed, mode = worker.at
        selector.unregister(worker.pipe)
        worker.end()
        code = worker.process.returncode
        left = [x for x in worker.batch if not any(d[0] == x for d in worker.done)]
        if seed is not None:
            tally.cases[mode.replace("+checked", "")] += 1
            story = worker.last_words()
            tally.fail(Failure(seed, mode, kind, f"{kind} (exit code {code})", story))
            left = [x for x in left if x != seed]
        elif worker.batch or code:
            raise RuntimeError(f"a worker ended in {mode} with {code}:\n{worker.last_words()}")
        seeds.extendleft(reversed(left))

    def shrink(self, failure: Failure, seconds: float, folder: Path) -> str:
        """Minimises a failure in a separate process; returns the path of the program."""
        command = [sys.executable, str(SCRIPT), "shrink", self.kind, "--seed", str(failure.seed)]
        command += ["--mode", failure.mode, "--seconds", str(seconds), "--out", str(folder)]
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds * 3 + 300, check=False
        )
        lines = answer.stdout.strip().splitlines()
        return lines[-1] if answer.returncode == 0 and lines else answer.stderr[-400:]


def _gpus() -> list[str]:
    answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return [str(k) for k, _ in enumerate(answer.stdout.strip().splitlines())]


def summary(tally: Tally, seconds: float) -> str:
    """Returns the report: counts, refusals by reason, failures."""
    runs = sum(tally.cases.values())
    lines = [
        f"{runs} runs in {seconds:.1f}s, {tally.outputs} outputs and {tally.elements} elements "
        f"compared, {100 * tally.masked / max(tally.elements, 1):.1f}% of them uncertain"
    ]
    for mode, count in sorted(tally.cases.items()):
        reasons = tally.refused.get(mode, Counter())
        total = sum(reasons.values())
        lines.append(f"{mode}: {count} runs, {total} refused ({100 * total / count:.2f}%)")
        for reason, n in reasons.most_common():
            example = tally.examples[mode, reason]
            lines.append(f"  {n:5d} {100 * n / count:5.2f}%  {reason}  (seed {example})")
    lines.append(f"{len(tally.failures)} failures")
    for f in tally.failures:
        lines.append(f"  seed {f.seed} {f.mode}: {f.kind}: {f.reason} {f.path}")
    return "\n".join(lines)
