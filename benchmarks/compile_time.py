"""Times a definition until its CUDA text, in phases, without a compiler; for `bench_compile.py`.

python benchmarks/compile_time.py CASE    measures one case in this process, prints one JSON object

It measures everything that a first `execute` does before it compiles, with the H200's schedules on
CPU tensors. Times are CPU seconds of the process, which other processes lengthen less than wall
time.
"""

from __future__ import annotations

import functools
import hashlib
import json
import pkgutil
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from time import thread_time
from typing import Any, NamedTuple

SCHEDULES = "schedules_for(h200)"
ROWS, COLUMNS = 64, 96
RANKS = 2

# The functions of each phase: (module, function). If a phase calls a function of another phase, the
# call counts for that phase.
PHASES: dict[str, tuple[tuple[str, str], ...]] = {
    "concretize": (
        ("hostir.lowering.pipeline", "concretize"),
        ("hostir.lowering.pipeline", "specialise"),
    ),
    "passes": (
        ("fuser.passes.fusion_passes", "run_passes"),
        ("hostir.lowering.pipeline", "shard_fusion"),
    ),
    "segment": (("hostir.lowering.pipeline", "segment_fusion"),),
    "host": (("hostir.lowering.pipeline", "lower"), ("hostir.lowering.pipeline", "run_passes")),
    "schedule": (
        ("fuser.kernels.executor:FusedKernelExecutor", "_chooser"),
        ("fuser.kernels.executor:FusedKernelExecutor", "_lower"),
    ),
    "lower": (("fuser.kernels.kernel_variant", "lower_kernel"),),
    "codegen": (("fuser.kernels.kernel_variant", "print_kernel"),),
    "verify": (
        ("fuser.passes.concretize", "verify_fusion"),
        ("fuser.passes.fusion_passes", "verify_fusion"),
        ("multidevice.sharding.passes.pipeline", "verify_fusion"),
        ("hostir.passes.deallocation", "verify"),
        ("hostir.analysis.preflight", "check_before_run"),
    ),
}


# ------------------------------------------------------------------ programs
def chain(fd: Any, count: int) -> list[Any]:
    """Returns all results of `count` pointwise ops, each applied to the one before."""
    from fuser import DataType

    x, y = (fd.define_tensor([-1, -1], contiguity=True, dtype=DataType.Float) for _ in range(2))
    ops, value, made = fd.ops, x, list[Any]()
    steps = (ops.tanh, lambda v: ops.mul(v, 1.5), lambda v: ops.add(v, y))
    for i in range(count):
        value = steps[i % 3](value)
        made.append(value)
    return made


def define_chain(fd: Any, count: int) -> None:
    """Defines a chain of `count` pointwise ops."""
    fd.add_output(chain(fd, count)[-1])


def define_outputs(fd: Any, count: int) -> None:
    """Defines a chain in which every tenth result is an output."""
    for value in chain(fd, count)[9::10]:
        fd.add_output(value)


def define_sums(fd: Any, count: int) -> None:
    """Defines row sums, each of its own tensor."""
    for _ in range(count):
        fd.add_output(fd.ops.sum(fd.define_tensor([-1, -1], contiguity=True), dim=1))


def define_sums_of_one(fd: Any, count: int) -> None:
    """Defines row sums of multiples of one tensor."""
    x = fd.define_tensor([-1, -1], contiguity=True)
    for i in range(count):
        fd.add_output(fd.ops.sum(fd.ops.mul(x, i + 0.5), dim=1))


def define_diamonds(fd: Any, count: int) -> None:
    """Defines a chain in which each value is the sum of two ops on the one before."""
    value = fd.define_tensor([-1, -1], contiguity=True)
    for _ in range(count):
        value = fd.ops.add(fd.ops.tanh(value), fd.ops.sin(value))
    fd.add_output(value)


def define_mlp(fd: Any, ops: int, mesh: Any = None) -> None:
    """Defines layers of a linear and seven pointwise ops.

    On a mesh, every first layer splits its features and every second one sums over them.
    """
    from fuser import ParallelType

    x = fd.define_tensor([-1, COLUMNS], contiguity=True)
    tensors, value = [x], x
    for layer in range(ops // 8):
        weight = fd.define_tensor([COLUMNS, COLUMNS], contiguity=True)
        tensors.append(weight)
        if mesh is not None:
            weight.set_device_mesh(mesh)
            weight.outer_split(layer % 2, mesh.size)
            weight.axis(layer % 2).parallelize(ParallelType.mesh_x)
        hidden = fd.ops.linear(value, weight)
        cube = fd.ops.mul(fd.ops.mul(hidden, hidden), hidden)
        inner = fd.ops.add(hidden, fd.ops.mul(cube, 0.044715))
        value = fd.ops.mul(hidden, fd.ops.tanh(inner))
        value = fd.ops.add(value, 1.0)
    if mesh is not None:
        x.set_device_mesh(mesh)
    fd.add_output(value)


class Case(NamedTuple):
    """A program with this number of ops, its time limit in ms (None: no limit), and its
    ranks.
    """

    define: Callable[..., None]
    ops: int
    bar_ms: float | None = None
    ranks: int = 1


CASES = {
    **{
        f"chain {n}": Case(define_chain, n, bar)
        for n, bar in ((20, 15), (100, 60), (300, None), (1000, 400), (3000, 1200), (10000, None))
    },
    "outputs 1000": Case(define_outputs, 1000, 3000),
    "sums 1000": Case(define_sums, 1000, 3000),
    "sums 1000 of one tensor": Case(define_sums_of_one, 1000, 3000),
    "MLP 992": Case(define_mlp, 992, 3000),
    "MLP 992, 2 ranks": Case(define_mlp, 992, 4000, RANKS),
    "diamonds 18": Case(define_diamonds, 18),
}
# Two cases, and the largest ratio of their times.
GROWTH, GROWTH_BAR = ("chain 300", "chain 3000"), 12.0
LONGEST = "chain 3000"


# ------------------------------------------------------------------ clocks
class Clock:
    """CPU seconds of one thread by phase; a nested phase counts only for itself."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("define", *PHASES, "rest"), 0.0)
        self._inside: list[str] = []
        self._thread = 0
        self._since = 0.0

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Returns a context that counts for a phase, in the thread that called `begin`."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._turn()
        self._inside.append(name)
        try:
            yield
        finally:
            self._turn()
            self._inside.pop()

    def begin(self) -> None:
        """Starts to count in this thread."""
        self._thread, self._inside, self._since = threading.get_ident(), ["rest"], thread_time()

    def end(self) -> bool:
        """Stops counting; returns whether this is the thread that called `begin`."""
        is_mine = threading.get_ident() == self._thread
        if is_mine:
            self._turn()
            self._thread = 0
        return is_mine

    def _turn(self) -> None:
        now = thread_time()
        if self._thread:
            self.seconds[self._inside[-1]] += now - self._since
        self._since = now

    def watch(self, phase: str, owner: str, name: str) -> None:
        """Makes calls of a function of a module or class count for a phase."""
        found = pkgutil.resolve_name(owner)
        run = getattr(found, name)

        @functools.wraps(run)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase):
                return run(*args, **kwargs)

        setattr(found, name, timed)


class _TextsAreMade(Exception):
    """Ends a first run at the point where the compiler would start."""


@contextmanager
def without_compiler(texts: list[str], clock: Clock) -> Generator[None]:
    """Returns a context in which first runs end before the compiler; `texts` receives their
    kernels.
    """
    import fuser.kernels.executor as executor

    def stop(sources: Iterable[Any], *_: Any, **__: Any) -> list[Any]:
        found = [source.text for source in sources]
        if clock.end():
            texts.extend(found)
        raise _TextsAreMade

    compiler, executor.compile_kernels = executor.compile_kernels, stop
    try:
        yield
    except _TextsAreMade:
        pass
    finally:
        executor.compile_kernels = compiler


# ------------------------------------------------------------------ one measurement
def make_inputs(fd: Any, ranks: int) -> list[Any]:
    """Returns this rank's inputs; a symbolic extent is ROWS or COLUMNS."""
    import torch

    from fuser.ir.scalar.constructors import int_value
    from fuser.multidevice import shard_tensor

    found: list[Any] = []
    for tv in fd.fusion.inputs:
        shape = zip(tv.shape(), (ROWS, COLUMNS), strict=True)
        t = torch.zeros([int_value(size) or default for size, default in shape])
        found.append(t if ranks == 1 else shard_tensor(t, tv))
    return found


def run_case(case: Case, count: int, clock: Clock) -> tuple[Any, list[Any], list[str]]:
    """Defines the program of a case with `count` ops, and makes the texts of its kernels.

    Returns the definition, inputs and texts of the first rank.
    """
    from fuser import FusionDefinition
    from fuser.multidevice import DeviceMesh
    from multidevice import simulate

    texts: list[str] = []
    made: list[tuple[Any, list[Any]]] = []

    def run() -> None:
        mesh = DeviceMesh(range(case.ranks)) if case.ranks > 1 else None
        is_first = not made
        if is_first:
            clock.begin()
        with clock.phase("define"), FusionDefinition() as fd:
            case.define(fd, count, *([mesh] if mesh is not None else []))
        with clock.phase("rest"):
            inputs = make_inputs(fd, case.ranks)
        made.append((fd, inputs))
        fd.execute(inputs, _enable_options=[SCHEDULES])

    with without_compiler(texts, clock):
        if case.ranks > 1:
            with simulate(case.ranks) as world:
                world.run(run)
        else:
            run()
    return *made[0], texts


def measure(name: str) -> dict[str, Any]:
    """Returns the seconds of each phase in this process, which has compiled a small one before."""
    case = CASES[name]
    run_case(case, 16, Clock())
    clock = Clock()
    for phase, watched in PHASES.items():
        for owner, function in watched:
            clock.watch(phase, owner, function)
    fd, inputs, texts = run_case(case, case.ops, clock)
    assert texts, f"{name}: no kernel has a text"
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
    found = {"kernels": len(texts), "characters": sum(map(len, texts)), "digest": digest}
    found |= {"seconds": clock.seconds}
    if name == LONGEST:
        from hostir.ir.parser import parse

        text = fd.fec.program_for(inputs).full_text()
        began = thread_time()
        parse(text)
        found["parse_s"] = round(thread_time() - began, 4)
    return found


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
