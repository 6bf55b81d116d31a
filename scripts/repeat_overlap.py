"""Repeats programs that overlap a matmul and a communication, and compares them with themselves.

    mpirun -np 4 python scripts/repeat_overlap.py --repeats 1000 --device cuda --seconds 60
    mpirun -np 2 python scripts/repeat_overlap.py --repeats 50

Each program of `tests/support/overlap*.py` runs in each of its forms and by each possible
transport. Every repetition has new data, and every rank is delayed at random. Results must equal
those of the program without overlap, within rounding; the first ones are also compared with torch
in float64. Inputs are new tensors, or the previous ones with new contents. Results are checked
after up to two later runs have started. A repetition is a function of --seed and its number. If one
differs, the exit code is 1, and a line per repetition is printed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import fuser.frontend.executor_cache
from fuser import FusionDefinition, multidevice
from fuser.frontend.program_cache import PROGRAMS
from fuser.multidevice import Communicator
from hostir.cost import overlap_search
from hostir.cost.overlap_search import GainBound, OverlapCandidate
from tests.support.overlap_gradient_programs import GRADIENTS
from tests.support.overlap_programs import FORMS, SLOW, Form, X, defined, has_loops, several

# The allowed difference, relative to the largest number of a result: for sums in another order, or
# numbers rounded twice. A missing or wrong block differs by about 1.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.03}
# This number times --scale divides every sharded extent of a program.
SHARDED = 8
# The number of repetitions between two checks of the differences and of the clock.
CHUNK = 25
_ENABLED = ["machine(h200)"]  # any name; `Chosen` replaces the machine

# The functions that choose the fastest candidate, that reject candidates, and that find the
# machine.
_DECIDES = (
    (overlap_search, "pick"),
    (GainBound, "why_hopeless"),
    (overlap_search.Overlaps, "_why_not"),
    (fuser.frontend.executor_cache, "find_machine"),
)


class Chosen:
    """Replaces the product's decisions: records the candidates of each pair, and chooses one of
    them.
    """

    def __init__(self) -> None:
        self.taken: tuple[int, str] | None = None
        self.seen: set[tuple[int, str]] = set()

    def pick(self, candidates: Sequence[OverlapCandidate], *_: object) -> OverlapCandidate:
        """Returns the chosen candidate of a pair."""
        fits: dict[str, list[OverlapCandidate]] = {}
        for c in candidates[1:]:
            if c.seconds is not None:
                fits.setdefault(c.backend, []).append(c)
        self.seen |= {(k, library) for library, fit in fits.items() for k in range(len(fit))}
        if self.taken is None:
            return candidates[0]
        number, library = self.taken
        fit = fits.get(library) or fits.get("") or [candidates[0]]
        return fit[min(number, len(fit) - 1)]

    def __enter__(self) -> Chosen:
        self._kept = [(where, name, getattr(where, name)) for where, name in _DECIDES]
        instead = self.pick, lambda *_: "", lambda *_: "", lambda *_: SLOW
        for (where, name), function in zip(_DECIDES, instead, strict=True):
            setattr(where, name, function)
        return self

    def __exit__(self, *_: object) -> None:
        for where, name, function in self._kept:
            setattr(where, name, function)


@dataclass
class Ranks:
    """The state of one rank: its options, communicator, device and failures."""

    args: argparse.Namespace
    communicator: Communicator
    device: torch.device
    failures: list[str] = field(default_factory=list[str])

    def agreed(self, mine: Any) -> list[Any]:
        """Returns the values of all ranks."""
        if self.communicator.size() == 1:
            return [mine]
        return [json.loads(x) for x in self.communicator.exchange(json.dumps(mine).encode())]

    def say(self, text: str) -> None:
        """Prints a line on rank 0."""
        if self.communicator.rank() == 0:
            print(text, flush=True)

    def hold_up(self, rng: random.Random) -> None:
        """Keeps the device, or else the host, of this rank busy for a while."""
        if rng.random() < 0.5:
            return
        if self.device.type == "cuda" and rng.random() < 0.9:
            torch.cuda._sleep(rng.randrange(200_000))  # up to 0.1 ms
        else:
            time.sleep(rng.random() * 5e-4)


class Program:
    """One program, without overlap and in every form."""

    def __init__(self, name: str, form: Form, ranks: Ranks, chosen: Chosen) -> None:
        self.name, self.form, self.ranks = name, form, ranks
        self.plain = self._define()
        self.kept = self.inputs(0)
        chosen.taken, chosen.seen = None, set()
        self._define().execute(self.kept, _enable_options=_ENABLED)
        self.forms: dict[str, FusionDefinition] = {}
        for index, library in sorted(chosen.seen):
            chosen.taken = index, library
            PROGRAMS.clear()  # so that each form is decided again
            fd = self._define()
            fd.execute(self.kept, _enable_options=_ENABLED)
            what = f"{name}, form {index + 1}" + (f", {library}" if library else "")
            assert has_loops(fd.fec.host_program()), f"{what}: there are no steps"
            self.forms[what] = fd

    def _define(self) -> FusionDefinition:
        fd, self.tensors, _ = defined(self.form, self.ranks.communicator.size())
        return fd

    def inputs(self, repetition: int) -> list[torch.Tensor]:
        """Returns this rank's shards of the data of a repetition."""
        generator = torch.Generator(self.ranks.device)
        generator.manual_seed(self.ranks.args.seed * 1_000_003 + repetition)
        self.whole = [
            torch.randn(s, generator=generator, device=self.ranks.device).to(self.form.dtype)
            for s in self.form.shapes
        ]
        pairs = zip(self.whole, self.tensors, strict=True)
        return [multidevice.shard_tensor(x, tv) for x, tv in pairs]

    def run_plain(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the program without overlap."""
        disabled = ["auto_overlap"]
        return self.plain.execute(inputs, _enable_options=_ENABLED, _disable_options=disabled)

    def check_meaning(self) -> None:
        """Compares the program without overlap with float64."""
        size, rank = self.ranks.communicator.size(), self.ranks.communicator.rank()
        wants = several(self.form.meaning(*(x.double() for x in self.whole)))
        found = self.run_plain(self.kept)
        for got, want, sharding in zip(
            found, wants, self.plain.fec.get_output_shardings(), strict=True
        ):
            axis = sharding.axis_sharded_on(X)
            part = want if axis < 0 else want.chunk(size, axis)[rank]
            self._look(f"{self.name}, as it is, and torch", 0, self.ratio([got], [part]).item())

    def _look(self, what: str, repetition: int, ratio: float) -> None:
        if not ratio <= 1:
            self.ranks.failures.append(
                f"{what}: rank {self.ranks.communicator.rank()}, repetition {repetition}: "
                f"{ratio:.3g} times what rounding may be"
            )

    def ratio(self, got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the largest difference of results, relative to the allowed one; infinite
        for NaN.
        """
        worst = torch.zeros((), device=self.ranks.device, dtype=torch.float64)
        for a, b in zip(got, want, strict=True):
            bound = b.double().abs().max() * ROUNDING[self.form.dtype]
            apart = (a.double() - b.double()).abs().max() / bound
            worst = torch.maximum(worst, torch.nan_to_num(apart, nan=torch.inf))
        return worst

    def repeat(self, until: float) -> int:
        """Returns how often all forms have run: `--repeats` times, or until the time `until`."""
        done, worst = 0, dict.fromkeys(self.forms, 0.0)
        repeats: int = self.ranks.args.repeats
        while done < repeats:
            chunk = range(done, min(done + CHUNK, repeats))
            for what, ratios in self._chunk(chunk).items():
                for repetition, ratio in zip(chunk, torch.stack(ratios).tolist(), strict=True):
                    self._look(what, repetition, ratio)
                    worst[what] = max(worst[what], ratio)
            done += len(chunk)
            if self.ranks.agreed(time.monotonic() > until)[0]:
                break
        furthest = [max(found) for found in zip(*self.ranks.agreed([*worst.values()]), strict=True)]
        for (what, fd), most in zip(self.forms.items(), furthest, strict=True):
            graphs = fd.cuda_graphs() if self.ranks.device.type == "cuda" else []
            note = ", by CUDA graphs" if any(g.startswith("captured") for g in graphs) else ""
            self.ranks.say(f"{what}: {done} times{note}, {most:.2f} of rounding")
        return done

    def _chunk(self, repetitions: range) -> dict[str, list[torch.Tensor]]:
        """Returns, for each form, its difference from the program without overlap in each
        repetition.
        """
        found: dict[str, list[torch.Tensor]] = {what: [] for what in self.forms}
        later: deque[tuple[str, list[torch.Tensor], list[torch.Tensor]]] = deque()
        for repetition in repetitions:
            rng = random.Random(
                f"{self.ranks.args.seed} {self.ranks.communicator.rank()} {repetition}"
            )
            fresh = self.inputs(repetition)
            if repetition % 2:
                for mine, new in zip(self.kept, fresh, strict=True):
                    mine.copy_(new)
                fresh = self.kept
            want = self.run_plain(fresh)
            for what, fd in self.forms.items():
                self.ranks.hold_up(rng)
                later.append((what, fd.execute(fresh, _enable_options=_ENABLED), want))
                while len(later) > 2:
                    one, got, expected = later.popleft()
                    found[one].append(self.ratio(got, expected))
        for one, got, expected in later:
            found[one].append(self.ratio(got, expected))
        return found


def programs(args: argparse.Namespace) -> Iterator[tuple[str, Form]]:
    """Yields the programs of the option --only, with their extents scaled."""
    for name, form in {**FORMS, **GRADIENTS}.items():
        if args.only in name:
            shapes = [tuple(n * args.scale for n in shape) for shape in form.shapes]
            yield name, replace(form, shapes=shapes)


def run(args: argparse.Namespace) -> int:
    """Runs all programs on this rank; returns how many repetitions differ on any rank, or are
    missing.
    """
    communicator = Communicator.instance()
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    ranks = Ranks(args, communicator, device)
    if SHARDED * args.scale % communicator.size():
        ranks.say(
            f"{communicator.size()} ranks do not divide the extents of the programs: start as many "
            f"as divide {SHARDED * args.scale}"
        )
        return 1
    began, done, missing = time.monotonic(), 0, 0
    every = list(programs(args))
    with Chosen() as chosen:
        for number, (name, form) in enumerate(every):
            program = Program(name, form, ranks, chosen)
            program.check_meaning()
            # Divide the remaining time among the remaining programs.
            left = began + args.seconds - time.monotonic()
            found = program.repeat(time.monotonic() + left / (len(every) - number))
            done += found * len(program.forms)
            missing += (args.repeats - found) * len(program.forms)
    lines = [line for mine in ranks.agreed(ranks.failures) for line in mine]
    for line in lines[:50]:
        ranks.say(line)
    seconds = time.monotonic() - began
    ranks.say(f"{done} repetitions in {seconds:.0f} s, {missing} not made, {len(lines)} differ")
    return len(lines) + missing


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the programs of the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=50, help="of each form of each program")
    parser.add_argument("--seconds", type=float, default=600, help="in all, about")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="", help="programs whose name has this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=int, default=0, help="extents, times; 16 on GPUs, else 1")
    args = parser.parse_args(argv)
    args.scale = args.scale or (16 if args.device == "cuda" else 1)
    return int(run(args) > 0)


if __name__ == "__main__":
    sys.exit(main())
