"""Makes ranks disagree at random, and checks that each of them raises an error that says why.

    mpirun -np 4 python scripts/disagree.py --seed 1 --cases 50
    torchrun --nproc-per-node 2 scripts/disagree.py
    python scripts/disagree.py --ranks 4          (simulated ranks)

Each case runs a sharded program on all ranks. One rank (or half of them) deviates: other extents,
dtypes, programs, options or numbers, missing or additional calls, errors before or in the run. Each
rank must end the call within 10 s with a typed error, or with the right numbers. Then all ranks
synchronise, and the next call must be right. Otherwise the exit code is 1, and a line per rank is
printed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from fuser import DataType, FusionDefinition, ParallelType
from fuser.multidevice import Communicator, DeviceMesh
from fuser.support.errors import DeadlockError, FuserError
from multidevice import simulate

LIMIT_S = 10.0


class Planted(Exception):
    """An error that a case raises on purpose."""


# ------------------------------------------------------------------ programs
@dataclass(frozen=True)
class Program:
    """A sharded program of one input [rows, columns], and its expected result on each rank."""

    kind: str
    devices: tuple[int, ...]
    scale: float = 1.0
    dtype: torch.dtype = torch.float32
    contiguous: bool = True

    def define(self) -> FusionDefinition:
        """Returns the definition."""
        types = {torch.float32: DataType.Float, torch.float64: DataType.Double}
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, -1], contiguity=self.contiguous, dtype=types[self.dtype])
            number = fd.define_scalar(None, DataType.Double)
            count = fd.define_scalar(None, DataType.Int)
            if self.devices:
                self._cut(x, 1 if self.kind == "sum" else 0)
            y = fd.ops.mul(fd.ops.mul(x, fd.ops.add(number, count)), self.scale)
            y = fd.ops.sum(y, [1]) if self.kind == "sum" else fd.ops.set(y)
            if self.devices:
                y.set_device_mesh(DeviceMesh(list(self.devices)))
            if self.devices and self.kind == "swap":
                self._cut(y, 1)
            fd.add_output(y)
        return fd

    def _cut(self, tv: Any, axis: int) -> None:
        tv.set_device_mesh(DeviceMesh(list(self.devices)))
        tv.outer_split(axis, len(self.devices))
        tv.axis(axis).parallelize(ParallelType.mesh_x)

    def expected(self, given: Inputs, rank: int) -> torch.Tensor:
        """Returns the result of `rank` when every rank passes `given`: by torch, in float64."""
        if rank not in self.devices and self.devices:
            return torch.empty(0)
        place = self.devices.index(rank) if self.devices else 0
        parts = [given.shard(r) for r in self.devices or (rank,)]
        whole = torch.cat(parts, 1 if self.kind == "sum" else 0).double()
        whole = whole * (given.number + given.count) * self.scale
        if self.kind == "sum":
            return whole.sum(1)
        if self.kind == "swap" and self.devices:
            return whole.chunk(len(self.devices), 1)[place]
        return whole


@dataclass(frozen=True)
class Inputs:
    """The inputs of one call; the contents of a shard depend on the rank and on the call."""

    call: int
    rows: int
    columns: int
    number: float = 2.0
    count: int = 3
    dtype: torch.dtype = torch.float32
    strided: bool = False

    def shard(self, rank: int) -> torch.Tensor:
        """Returns the shard of a rank."""
        values = torch.arange(self.rows * self.columns, dtype=self.dtype) + 100 * rank + self.call
        return values.view(self.rows, self.columns) % 97

    def pass_to(self, rank: int) -> list[Any]:
        """Returns the arguments of a rank."""
        shard = self.shard(rank)
        if self.strided:
            shard = torch.stack([shard, shard], -1)[..., 0]
        return [shard, self.number, self.count]


# ------------------------------------------------------------------ cases
@dataclass
class Case:
    """One rank's side of a case: its calls, in a list that all ranks execute in order."""

    name: str
    rank: int
    odd: bool
    random: random.Random
    devices: tuple[int, ...]
    calls: list[Callable[[], None]] = field(default_factory=list)

    def inputs(self, **changes: Any) -> Inputs:
        """Returns inputs for the next call, with some fields changed."""
        shape = {"rows": 3, "columns": 4 * len(self.devices)}
        return Inputs(**{"call": len(self.calls), **shape, **changes})

    def program(self, **changes: Any) -> Program:
        """Returns a program, with some fields changed."""
        return Program(**{"kind": KINDS[0], "devices": self.devices, **changes})

    def call(self, program: Program, given: Inputs, **options: Any) -> None:
        """Adds a call that must raise a typed error or return the right result."""
        self.calls.append(lambda: check(fd_of(program), program, given, self.rank, **options))


KINDS = ["sum", "whole", "swap"]
_definitions: dict[tuple[Program, int], FusionDefinition] = {}


def fd_of(program: Program) -> FusionDefinition:
    """Returns the definition of a program for this rank, made at first use."""
    # Each simulated rank has its own definition, as ranks that are processes have.
    key = (program, Communicator.instance().rank())
    if key not in _definitions:
        _definitions[key] = program.define()
    return _definitions[key]


def check(fd: FusionDefinition, program: Program, given: Inputs, rank: int, **options: Any) -> None:
    """Executes a definition and compares the result with the expected one."""
    (out,) = fd.execute(given.pass_to(rank), **options)
    want = program.expected(given, rank)
    assert out.numel() == want.numel(), f"{tuple(out.shape)}, expected {tuple(want.shape)}"
    if want.numel():
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-3)


def extents(case: Case, main: Program) -> None:
    """Adds a call with other extents on the odd ranks."""
    rows, columns = case.random.choice([(4, 0), (0, 4), (2, 4), (-2, 0), (0, -4)])
    base = case.inputs()
    odd = Inputs(base.call, base.rows + rows, base.columns + columns * len(case.devices))
    case.call(main, odd if case.odd else base)


def dtypes(case: Case, main: Program) -> None:
    """Adds a call with another dtype on the odd ranks."""
    both = case.random.random() < 0.5
    given = case.inputs(dtype=torch.float64 if case.odd else torch.float32)
    program = case.program(kind=main.kind, dtype=given.dtype) if both else main
    case.call(program, given)


def programs(case: Case, main: Program) -> None:
    """Adds a call of another program on the odd ranks."""
    other = case.random.choice(
        [
            case.program(kind=main.kind, scale=2.0),
            case.program(kind=case.random.choice([k for k in KINDS if k != main.kind])),
            case.program(kind=main.kind, devices=tuple(reversed(case.devices))),
        ]
    )
    case.call(other if case.odd else main, case.inputs())


def order(case: Case, main: Program) -> None:
    """Adds two calls that the odd ranks make in the other order."""
    other = case.program(kind=main.kind, scale=3.0)
    for program in (other, main) if case.odd else (main, other):
        case.call(program, case.inputs())


def more_calls(case: Case, main: Program) -> None:
    """Adds more calls on the odd ranks than on the others."""
    for _ in range(1 + case.odd * case.random.randint(1, 2)):
        case.call(main, case.inputs())


def fewer_calls(case: Case, main: Program) -> None:
    """Adds one call less on the odd ranks than on the others."""
    case.call(main, case.inputs())
    if not case.odd:
        case.call(main, case.inputs())


def no_mesh(case: Case, main: Program) -> None:
    """Adds a call of a program without a mesh on the odd ranks."""
    case.call(case.program(kind=main.kind, devices=()) if case.odd else main, case.inputs())


def other_team(case: Case, main: Program) -> None:
    """Adds a call of a program on fewer devices on the odd ranks."""
    smaller = tuple(sorted({case.rank, *case.devices[:2]}))[:2] if case.odd else case.devices
    case.call(case.program(kind=main.kind, devices=smaller), case.inputs(columns=16))


def barrier(case: Case, main: Program) -> None:
    """Adds a barrier in place of the call on the odd ranks."""
    if case.odd:
        case.calls.append(Communicator.instance().barrier)
    else:
        case.call(main, case.inputs())


def wrong_kinds(case: Case, main: Program) -> None:
    """Adds a call in which the odd ranks pass an argument of a wrong type."""
    wrong = case.random.choice([None, "text", object(), 1j, [None], {}])
    position = case.random.randrange(3)
    values = case.inputs().pass_to(case.rank)
    if case.odd:
        values[position] = wrong
    case.calls.append(lambda: void(fd_of(main).execute(values)))


def wrong_inputs(case: Case, main: Program) -> None:
    """Adds a call in which the odd ranks pass a wrong list of inputs."""
    values: Any = case.inputs().pass_to(case.rank)
    if case.odd:
        values = case.random.choice([None, 3, values[:1], [*values, 1], [], values[0]])
    case.calls.append(lambda: void(fd_of(main).execute(values)))


def numbers(case: Case, main: Program) -> None:
    """Adds a call in which the odd ranks pass another scalar."""
    name, value = case.random.choice([("number", 5.0), ("number", float("nan")), ("count", 8)])
    case.call(main, case.inputs(**{name: value} if case.odd else {}))


def exceptions(case: Case, main: Program) -> None:
    """Adds a call in which the inputs of the odd ranks raise an error."""
    kind = case.random.choice(
        [Planted, KeyError, MemoryError, KeyboardInterrupt, ZeroDivisionError]
    )
    values = case.inputs().pass_to(case.rank)

    def some() -> Iterator[Any]:
        yield values[0]
        raise Planted if kind is Planted else kind("planted")

    case.calls.append(lambda: void(fd_of(main).execute(some() if case.odd else values)))


def failing_build(case: Case, main: Program) -> None:
    """Adds a call whose preparation fails on the odd ranks."""

    def act() -> None:
        fd = main.define()
        if case.odd:
            fd.fec = cache = type_of_cache(fd)
            del fd._fusion
            cache._bind = failing  # pyright: ignore[reportPrivateUsage]
        check(fd, main, given, case.rank)

    given = case.inputs()
    case.calls.append(act)


def failing_run(case: Case, main: Program) -> None:
    """Adds a call that fails on the odd ranks after the agreement.

    The other ranks may already communicate then.
    """
    given = case.inputs()

    def act() -> None:
        fd = main.define()
        if case.odd:
            fd.fec = cache = type_of_cache(fd)
            del fd._fusion
            bind = cache._bind  # pyright: ignore[reportPrivateUsage]

            def failing_later(*args: Any) -> Any:
                bound = bind(*args)
                bound.evaluator.run = failing
                return bound

            cache._bind = failing_later  # pyright: ignore[reportPrivateUsage]
        check(fd, main, given, case.rank)

    case.calls.append(act)


def failing(*args: Any, **kwargs: Any) -> Any:
    """Raises the planted error."""
    raise Planted("planted")


def type_of_cache(fd: FusionDefinition) -> Any:
    """Returns a new executor cache for a definition."""
    from fuser.frontend.executor_cache import FusionExecutorCache

    return FusionExecutorCache(fd.fusion)


def call_options(case: Case, main: Program) -> None:
    """Adds a call with other options on the odd ranks."""
    names = case.random.choice([["nonsense"], ["checked"], [3], "id_model"])
    if case.odd:
        case.call(main, case.inputs(), _enable_options=names)
    else:
        case.call(main, case.inputs())


def layouts(case: Case, main: Program) -> None:
    """Adds a valid call in which only the local layout differs."""
    program = case.program(kind=main.kind, contiguous=False)
    case.call(program, case.inputs(strided=case.odd))


def void(_: object) -> None:
    """Drops a result: only the error counts."""


CASES = [
    *(extents, dtypes, programs, order, more_calls, fewer_calls, no_mesh, other_team, barrier),
    *(wrong_kinds, wrong_inputs, numbers, exceptions, failing_build, failing_run, call_options),
    layouts,
]


# ------------------------------------------------------------------ running
def run_case(seed: int, log: Callable[[str], None]) -> list[str]:
    """Runs one case on this rank; returns what was wrong."""
    communicator = Communicator.instance()
    rank, size = communicator.rank(), communicator.size()
    chosen = random.Random(seed)
    make = CASES[seed % len(CASES)]
    devices = tuple(range(size))
    odd = {chosen.randrange(size)} if chosen.random() < 0.7 else set(range(size // 2))
    main = Program(chosen.choice(KINDS), devices)
    case = Case(make.__name__, rank, rank in odd, random.Random(seed), devices)
    case.random.random()
    wrong: list[str] = []
    warm = chosen.random() < 0.5
    if warm:
        wrong += attempt(lambda: check(fd_of(main), main, case.inputs(call=7), rank), True, "first")
    make(case, main)
    outcomes: list[str] = []
    for number, call in enumerate(case.calls):
        started = time.monotonic()
        found = attempt(call, False, f"call {number}", outcomes)
        took = time.monotonic() - started
        wrong += found
        if took > LIMIT_S:
            wrong.append(f"call {number} took {took:.1f} s")
    if any("DeadlockError" in o for o in outcomes) and is_simulated(communicator):
        return finish(wrong, case, seed, rank, outcomes, log)  # it ends a simulated run
    started = time.monotonic()
    for _ in range(4):
        try:
            communicator.barrier()
            break
        except DeadlockError:
            if is_simulated(communicator):
                return finish(wrong, case, seed, rank, outcomes, log)
            outcomes.append("DeadlockError at the barrier")
    else:
        wrong.append("the ranks do not meet again")
    if time.monotonic() - started > LIMIT_S:
        wrong.append("the barrier took too long")
    for program in (main, Program("whole", devices, scale=5.0)):
        given = case.inputs(call=9)
        wrong += attempt(lambda: check(fd_of(program), program, given, rank), True, "next")  # noqa: B023
    return finish(wrong, case, seed, rank, outcomes, log)


def is_simulated(communicator: Communicator) -> bool:
    """Whether the ranks are simulated."""
    return communicator.backend_for("cpu").name == "simulated"


def finish(
    wrong: list[str],
    case: Case,
    seed: int,
    rank: int,
    outcomes: list[str],
    log: Callable[[str], None],
) -> list[str]:
    """Logs how the calls of a case ended, and returns the errors with the name of the case."""
    log(f"seed {seed} {case.name} rank {rank}{' (odd)' if case.odd else ''}: {'; '.join(outcomes)}")
    return [f"seed {seed} {case.name} rank {rank}: {text}" for text in wrong]


def attempt(
    call: Callable[[], None], must_work: bool, name: str, outcomes: list[str] | None = None
) -> list[str]:
    """Makes a call and records how it ended; returns what was wrong."""
    outcomes = [] if outcomes is None else outcomes
    try:
        call()
        outcomes.append("right")
    except (FuserError, Planted, KeyError, MemoryError, KeyboardInterrupt, ZeroDivisionError) as e:
        outcomes.append(f"{type(e).__name__}: {e}")
        if must_work:
            return [f"{name} call: {type(e).__name__}: {e}"]
    except BaseException as e:
        outcomes.append(f"{type(e).__name__}: {e}")
        return [f"{name}: {traceback.format_exc()}"]
    return []


def main() -> int:
    """Runs the cases of the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--cases", type=int, default=34)
    parser.add_argument("--ranks", type=int, default=0, help="simulate so many ranks")
    parser.add_argument("--verbose", action="store_true", help="print how every call ended")
    args = parser.parse_args()
    wrong: list[str] = []
    log = (lambda text: print(text, flush=True)) if args.verbose else void
    slowest = 0.0
    for seed in range(args.seed, args.seed + args.cases):
        started = time.monotonic()
        if args.ranks:
            wrong += simulated(args.ranks, seed, log)
        else:
            wrong += run_case(seed, log)
        slowest = max(slowest, time.monotonic() - started)
        if wrong:
            break
    for text in wrong:
        print(f"WRONG {text}", flush=True)
    if not wrong:
        print(
            f"{args.cases} disagreements, all heard; the slowest took {slowest:.1f} s", flush=True
        )
    return 1 if wrong else 0


def simulated(ranks: int, seed: int, log: Callable[[str], None]) -> list[str]:
    """Runs one case on simulated ranks."""
    _definitions.clear()
    try:
        with simulate(ranks) as world:
            return [text for texts in world.run(run_case, seed, log) for text in texts]
    except DeadlockError as error:
        log(f"seed {seed}: {error}")
        return []


if __name__ == "__main__":
    sys.exit(main())
