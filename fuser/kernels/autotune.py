"""The option `tune`: times schedule parameters (threads, vector width, ..) near those that the
heuristic chose without measuring, and stores the fastest.

For each class of inputs (`InputsClass`), the parameters come from the first of these sources that
has them:

1. the cache in memory;
2. the cache on disk;
3. a measurement on the first inputs of the class.

A measurement first times the heuristic's choice and its neighbours (parameters that differ from it
by few factors of two), one run of each in turn. It then times the neighbours of the fastest of
these. The fastest of all replaces the heuristic's choice if it is faster by more than the noise.

Inputs belong to the same class if the heuristic does not distinguish them. Such inputs have equal
layouts, equal parameters chosen by the heuristic, and sizes with equal numbers of bits. The results
of all candidates must agree with the results of the heuristic's choice.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from fuser.ir.canonical_form import CanonicalForm, form_of, form_text
from fuser.ir.domain.strided_layout import StridedLayout
from fuser.ir.dtypes import DataType, to_torch
from fuser.ir.fusion import Fusion
from fuser.ir.memory_layout import Layout
from fuser.ir.scalar.constructors import Number, Symbol
from fuser.kernels.autotune_candidates import from_fields, neighbours, to_fields
from fuser.kernels.executor import FusedKernelExecutor, KernelLaunch, Record, Value, VariantKey
from fuser.kernels.kernel_variant import (
    Sizes,
    Variant,
    address,
    describe,
    index_dtype,
    is_plain,
    span,
)
from fuser.runtime.compile import compiler_of
from fuser.runtime.kernel_cache import KernelCache, digest
from fuser.runtime.prepared_launch import BoundLaunch
from fuser.support import dumps, options
from fuser.support.device import VECTOR_BYTES, DeviceInfo, describe_device
from fuser.support.errors import (
    CompileError,
    DefinitionError,
    FuserError,
    KernelError,
    UnsupportedError,
    warn,
)
from fuser.support.lru import Recent
from fuser.support.record import record
from fuser.support.version import __version__

# The maximum numbers of neighbours that are timed, timed at once, and lowered. Many lowered ones
# turn out equal.
MAX_TIMED = 24
TIMED_AT_ONCE = 12
MAX_LOWERED = 3 * MAX_TIMED
# Rounds for all candidates, and for the fastest ones against the choice; seconds for each phase.
ROUNDS, LAST_ROUNDS = 7, 21
BUDGET_S = 1.0
FINALISTS = 3
# The best replaces the choice if its median is lower by this share, and if it wins this share of
# rounds.
MARGIN = 0.03
WON_SHARE = 0.75
# The maximum number of classes of inputs whose parameters are cached, per kernel.
MAX_CLASSES = 256

Params = Any


@record
class InputsClass:
    """A class of inputs for which a kernel has the same tuned parameters. The fields are the facts,
    besides the fusion, on which the choice of these parameters depends.

    - `layouts`: the memory layouts of the inputs, then the outputs.
    - `chosen`: the schedule parameters that the heuristic chose without measuring.
    - `index`: the integer type of the kernel's indices.
    - `sizes`: the number of bits of each size, by name. Sizes of one order of magnitude are equal.
    - `device`: the device description that the heuristic uses.
    - `runs_on`: the kind of device that runs the kernel.
    """

    layouts: tuple[Layout, ...]
    chosen: Params
    index: DataType
    sizes: tuple[tuple[str, int], ...]
    device: DeviceInfo
    runs_on: str

    @property
    def sizes_text(self) -> dict[str, str]:
        """The smallest and largest value of each size in this class of inputs, as text, by the
        size's name.
        """
        return {name: f"{(1 << bits) >> 1} to {(1 << bits) - 1}" for name, bits in self.sizes}


@dataclass
class Trial:
    """The input of a search for the fastest schedule parameters: a compiled kernel, and the tensors
    of a call.

    - `variant`, `launch`: the kernel with the parameters that the heuristic chose, and its launch.
    - `inputs`, `outputs`, `numbers`: the tensors and the scalar inputs of the call.
    - `lower` returns the kernel and the launch for other parameters, or None if these parameters
      cannot be used.
    - `compile` compiles lowered kernels.
    """

    variant: Variant
    launch: BoundLaunch
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    numbers: Sequence[Number]
    lower: Callable[[Params], tuple[Variant, BoundLaunch] | None]
    compile: Callable[[Sequence[Variant]], None]


@record
class Report:
    """The result of tuning a kernel for one class of inputs: pairs of schedule parameters and their
    measured seconds.

    - `choice`: the parameters that the heuristic chose without measuring. `best`: the fastest.
    - `timed`: the alternatives (neighbours of the choice) that were timed.
    - `refused`: the number of neighbours that could not be used.
    """

    choice: tuple[Params, float]
    best: tuple[Params, float]
    timed: tuple[tuple[Params, float], ...]
    refused: int

    def lines(self) -> list[str]:
        """Returns the result of tuning as lines of text, for a dump."""
        took = {p: f"{s * 1e6:.2f} us" for p, s in (*self.timed, self.choice, self.best)}
        gain = 1 - self.best[1] / self.choice[1] if self.choice[1] else 0.0
        found = [f"heuristic: {self.choice[0]}, {took[self.choice[0]]}"]
        if self.best[0] == self.choice[0]:
            found.append("best: the same")
        else:
            found.append(f"best: {self.best[0]}, {took[self.best[0]]} ({100 * gain:.1f} % less)")
        if self.timed or self.refused:
            found.append(f"timed: {len(self.timed)} neighbours; left out: {self.refused}")
        found += [f"  {took[p]}  {p}" for p, _ in self.timed]
        return found


class Tuning:
    """Finds and caches the fastest schedule parameters of one kernel, for each class of inputs
    (`InputsClass`).
    """

    def __init__(
        self,
        fusion: Fusion,
        scheduler: str,
        name: str,
        of: str,
        dump: dumps.Write,
        *,
        checked: bool,
    ) -> None:
        self._fusion, self._scheduler = fusion, scheduler
        self._name, self._of, self._dump = name, of, dump
        self._checked = checked
        self._decided: Recent[InputsClass, Params | None] = Recent(MAX_CLASSES)
        # Keys of entries in the disk cache that cannot be used.
        self._refused: set[str] = set()

    @functools.cached_property
    def _form(self) -> CanonicalForm:
        return form_of(self._fusion)

    @functools.cached_property
    def _text(self) -> str:
        return form_text(self._form)

    def sizes_of(
        self, symbols: Iterable[Symbol], values: Mapping[Symbol, Number]
    ) -> tuple[tuple[str, int], ...]:
        """Returns pairs (name, number of bits of the value) for the sizes among `symbols` that have
        a value. They identify sizes of one order of magnitude.

        In the names, the symbols are numbered in the order of the fusion. Fusions that differ only
        in names therefore get equal results.
        """
        sized = {s for s in symbols if s in values}
        named = ((f"{s.name[0]}{k}", s) for k, s in enumerate(self._form.symbols) if s in sized)
        return tuple((name, int(values[s]).bit_length()) for name, s in named)

    def known(self, asked: InputsClass) -> Params | None:
        """Returns the tuned parameters for the class of inputs `asked` from the cache in memory or
        on disk; None if neither cache has them.

        If there are no alternatives to the parameters that the heuristic chose, nothing has to be
        timed, and the heuristic's parameters are returned.
        """
        found = self._decided.recall(asked)
        if found is None and not neighbours(asked.chosen):
            found = self._decided[asked] = asked.chosen
            self._show(f"{asked.chosen} has no neighbours")
        if found is None:
            found = self._kept(asked, KernelCache(), self._key(asked))
        return found

    def find(self, asked: InputsClass, given: Trial) -> Params:
        """Returns the tuned parameters for the class of inputs `asked`, and stores them. To find
        them, this call times kernels on the tensors in `given`.

        If another process has stored parameters on disk in the meantime, these are returned, and
        nothing is timed.
        """
        key, cache = self._key(asked), KernelCache()
        with cache.lock(key):
            found = self._kept(asked, cache, key)
            if found is not None:
                return found
            report = self._timed(given)
            if report is not None:
                cache.store_tuned(key, self._entry(asked, report))
                self._show("timed now", report)
        found = asked.chosen if report is None else report.best[0]
        # If the choice itself could not be lowered, the parameters used in its place count as the
        # choice.
        found = asked.chosen if report and found == report.choice[0] else found
        self._decided[asked] = found
        return found

    def refuse(self, asked: InputsClass) -> None:
        """Discards the stored parameters for the class of inputs `asked`, because no kernel can be
        lowered with them.
        """
        self._decided[asked] = None
        self._leave_out(self._key(asked))

    def _leave_out(self, key: str) -> None:
        self._refused.add(key)
        warn(
            f"tune: the entry on disk for {self._name} cannot be used, so {self._name} is timed "
            "again",
            RuntimeWarning,
        )

    # ------------------------------------------------------------ on disk
    def _key(self, asked: InputsClass) -> str:
        return digest(
            __version__,
            compiler_of(asked.runs_on, checked=self._checked),
            repr(asked),
            self._scheduler,
            self._text,
        )

    def _kept(self, asked: InputsClass, cache: KernelCache, key: str) -> Params | None:
        entry = None if key in self._refused else cache.find_tuned(key)
        if entry is None:
            return None
        try:
            choice, best = (
                (from_fields(entry[name]["params"], asked.chosen), float(entry[name]["us"]) * 1e-6)
                for name in ("heuristic", "best")
            )
        except (KeyError, TypeError, ValueError):
            choice, best = (None, 0.0), (None, 0.0)
        if choice[0] is None or best[0] is None:
            self._leave_out(key)
            return None
        found = asked.chosen if best[0] == choice[0] else best[0]
        self._decided[asked] = found
        self._show("kept on disk", Report(choice, best, (), 0))
        return found

    def _entry(self, asked: InputsClass, report: Report) -> dict[str, Any]:
        def row(pair: tuple[Params, float]) -> dict[str, Any]:
            params, seconds = pair
            return {"params": to_fields(params), "us": round(seconds * 1e6, 3)}

        return {
            "kernel": self._name,
            "device": asked.device.name,
            "version": __version__,
            "sizes": asked.sizes_text,
            "heuristic": row(report.choice),
            "best": row(report.best),
            "timed": {str(params): round(seconds * 1e6, 3) for params, seconds in report.timed},
            "fusion": self._text.splitlines(),
        }

    def _show(self, note: str, report: Report | None = None) -> None:
        if options.dump_enabled("scheduler_params"):
            lines = [] if report is None else report.lines()
            text = "\n".join([f"{self._name}: {note}", *lines])
            self._dump(dumps.Dump("scheduler_params", self._of, text, "tuned"))

    # ------------------------------------------------------------ timing
    def _timed(self, given: Trial) -> Report | None:
        """Searches for the fastest parameters on the tensors of a call, and returns the report.

        Returns None, after a warning, if there is not enough memory for the search.
        """
        device = given.outputs[0].device
        wanted, free = scratch_nbytes(given.outputs), free_nbytes(device)
        try:
            if free is not None and wanted > free:
                raise torch.OutOfMemoryError(
                    f"timing other parameters needs {wanted} bytes on {device}, but only {free} "
                    "bytes are free"
                )
            return _Search(given, self._name, tolerance_of(self._fusion)).run()
        except torch.OutOfMemoryError as error:
            warn(
                f"tune: {self._name} keeps the heuristic's parameters, because there is not enough "
                f"memory to time others: {str(error).partition(chr(10))[0]}. Free {wanted} bytes "
                "in addition to the tensors of the call, and run again",
                RuntimeWarning,
            )
            return None


class _Search:
    """A search for the fastest schedule parameters: times the heuristic's choice and its
    neighbours, which differ from it by few factors of two.
    """

    def __init__(self, given: Trial, name: str, tolerance: float) -> None:
        self._given, self._name, self._tolerance = given, name, tolerance
        self._expected, self._scratch = Scratch(given.outputs), Scratch(given.outputs)
        self._timer: Timer = make_timer(given.outputs[0].device)
        self._choice = self._candidate(given.variant, given.launch)
        self._seen = {given.variant.params}
        self._forms = {_form_of(given.variant, given.launch)}
        self._refused = 0

    def _candidate(self, variant: Variant, launch: BoundLaunch) -> TuningCandidate:
        tensors = [*self._given.inputs, *self._scratch.tensors]
        return TuningCandidate(variant.params, variant, launch, tensors, self._given.numbers)

    def run(self) -> Report:
        """Times the neighbours of the heuristic's choice, then the neighbours of the fastest
        candidate so far, and returns the report.

        Neighbours are parameters that differ by few factors of two. At the end, the fastest
        candidates are timed once more against the heuristic's choice.
        """
        self._choice.run()
        self._expected.take(self._scratch)
        found: list[TuningCandidate] = []
        best = self._choice
        while len(found) < MAX_TIMED:
            new = self._around(best, min(TIMED_AT_ONCE, MAX_TIMED - len(found)))
            found += new
            race([self._choice, *new], self._timer, ROUNDS, BUDGET_S)
            fastest = min([self._choice, *found], key=lambda c: c.median)
            if fastest is best or not new:
                break
            best = fastest
        return self._report(found)

    def _report(self, found: list[TuningCandidate]) -> Report:
        """Times the fastest of the candidates `found` once more against the heuristic's choice, and
        returns the result.

        A candidate replaces the choice only if it is faster by more than the noise: its median is
        lower by the share `MARGIN`, and it wins the share `WON_SHARE` of the rounds.
        """
        choice = self._choice
        faster = sorted((c for c in found if c.median < choice.median), key=lambda c: c.median)
        finalists = faster[:FINALISTS]
        if finalists:
            race([choice, *finalists], self._timer, LAST_ROUNDS, BUDGET_S)
        best = min([choice, *finalists], key=lambda c: c.median)
        pairs = list(zip(best.seconds, choice.seconds, strict=True))
        won = sum(mine < its for mine, its in pairs)
        if best.median > (1 - MARGIN) * choice.median or won < WON_SHARE * len(pairs):
            best = choice
        timed = sorted(((c.params, c.median) for c in found), key=lambda pair: pair[1])
        ends = (choice.params, choice.median), (best.params, best.median)
        return Report(*ends, tuple(timed), self._refused)

    def _around(self, center: TuningCandidate, most: int) -> list[TuningCandidate]:
        """Returns at most `most` new candidates whose parameters differ from those of `center` by
        few factors of two, nearest first. They compile, and compute the same results as the
        heuristic's choice.
        """
        found: list[TuningCandidate] = []
        for params in neighbours(center.params):
            if len(found) >= most or len(self._seen) > MAX_LOWERED:
                break
            if params in self._seen:
                continue
            self._seen.add(params)
            try:
                made = self._given.lower(params)
            except AssertionError as error:
                made = None
                self._warn(params, f"it cannot be lowered: {error}")
            if made is None:
                self._refused += 1
            elif _form_of(*made) not in self._forms:
                self._forms.add(_form_of(*made))
                found.append(self._candidate(*made))
        return [c for c in self._compiled(found) if self._is_right(c)]

    def _compiled(self, found: list[TuningCandidate]) -> list[TuningCandidate]:
        """Compiles all candidates together, and returns those that the compiler accepts.

        If the compiler rejects one, the candidates are compiled one by one, to find the others.
        """
        try:
            self._given.compile([c.variant for c in found])
        except CompileError:
            for candidate in found:
                try:
                    self._given.compile([candidate.variant])
                except CompileError:
                    self._refused += 1
        return [c for c in found if c.variant.compiled is not None]

    def _is_right(self, candidate: TuningCandidate) -> bool:
        """Whether a candidate can be launched, and its results agree with those of the heuristic's
        choice.
        """
        self._scratch.clear()
        try:
            candidate.run()
        except KernelError as error:
            if candidate.tensors[0].device.type == "cpu":
                self._warn(candidate.params, str(error))  # on a CPU, this is an internal error
            self._refused += 1
            return False
        excess = self._expected.difference(self._scratch, self._tolerance)
        if excess is not None:
            what = f"its results differ by {excess:.3g} times the tolerance for rounding"
            self._warn(candidate.params, what)
            self._refused += 1
        return excess is None

    def _warn(self, params: Params, what: str) -> None:
        warn(
            f"internal error, please report: tune leaves out {params} of {self._name}: {what}",
            RuntimeWarning,
        )


def _form_of(variant: Variant, launch: BoundLaunch) -> Hashable:
    """Returns a value that identifies a launch: the kernel's text, the numbers of blocks and
    threads, and the arguments.

    Different parameters may lead to equal launches for these inputs, of which only one is timed.
    """
    shape = launch.grid, launch.block, launch.smem_bytes
    return variant.kernel.source.text, shape, tuple(launch.args)


@functools.cache
def warn_of_capture() -> None:
    """Warns once per process that nothing can be timed while a CUDA graph is being captured."""
    warn(
        "tune: the first run of a kernel is captured in a CUDA graph, so nothing can be timed, and "
        "the graph has the heuristic's parameters: run the definition once before the capture",
        RuntimeWarning,
    )


# ----------------------------------------------------------------------
# One kernel with several parameters on the same inputs: their results and their times.
#
# Results are written to memory of the trial, never to the caller's tensors. A kernel that updates
# an input in place reads the caller's tensor and writes to the trial's memory.

# Elements that are compared at a time.
_CHUNK = 1 << 22
_SMALLEST = torch.finfo(torch.float64).tiny
# The error that rounding may cause, relative to a result and to the root mean square of all, by the
# coarsest dtype inside a kernel. A sum in another order has another value, which may round the
# other way.
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 2.0**-8,
    torch.bfloat16: 2.0**-5,
}
_COARSEST = 2.0**-1


@dataclass
class TuningCandidate:
    """A kernel that is timed: it was lowered with certain schedule parameters, and has a launch on
    the caller's inputs.

    The results are written to buffers that belong to the search, not to the caller's outputs.
    `tensors` are the inputs, then these buffers. `numbers` are the scalar inputs. `seconds` are the
    times of the measured runs.
    """

    params: Any
    variant: Variant
    launch: BoundLaunch
    tensors: Sequence[torch.Tensor]
    numbers: Sequence[Number]
    seconds: list[float] = field(default_factory=list)

    def run(self) -> None:
        """Launches the candidate's kernel on the current CUDA stream.

        Raises:
            KernelError: the device rejects the launch, or checked mode reported an error.
        """
        assert self.variant.compiled is not None, "a candidate runs before it is compiled"
        self.launch.run(self.variant.compiled, self.tensors, self.numbers, None)

    @property
    def median(self) -> float:
        """The median of the measured times, in seconds."""
        return statistics.median(self.seconds)


def is_launchable(launch: BoundLaunch, device: DeviceInfo) -> bool:
    """Whether the device accepts a launch: its numbers of blocks and threads, and its bytes of
    shared memory."""
    shapes = ((launch.grid, device.max_grid), (launch.block, device.max_block))
    if any(n > most for shape, limits in shapes for n, most in zip(shape, limits, strict=True)):
        return False
    threads = prod(launch.block)
    return (
        threads <= device.max_threads_per_block and launch.smem_bytes <= device.max_smem_per_block
    )


# ------------------------------------------------------------------ memory
class Scratch:
    """Buffers for the results of a kernel that is timed. The caller's outputs must not change, so
    these buffers with the same layouts and alignments are written instead.
    """

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self._flat: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []
        for out in outputs:
            # The buffer has the same alignment as the caller's output. A kernel may rely on it.
            skipped = address(out) % VECTOR_BYTES // out.element_size()
            length = skipped + span(out)
            flat = torch.zeros(length, dtype=out.dtype, device=out.device)
            self._flat.append(flat)
            self.tensors.append(flat.as_strided(out.shape, out.stride(), skipped))

    def take(self, other: Scratch) -> None:
        """Copies the results from `other`, which has buffers of the same layouts."""
        for mine, others in zip(self._flat, other._flat, strict=True):
            mine.copy_(others)

    def clear(self) -> None:
        """Fills the buffers with zeros. Elements that no kernel writes are then equal for all
        candidates."""
        for flat in self._flat:
            flat.zero_()

    def difference(self, other: Scratch, tolerance: float) -> float | None:
        """Compares the results in these buffers with those in `other`. Returns None if they agree
        within `tolerance`.

        Otherwise, returns the largest difference of floating-point results as a multiple of the
        allowed difference. Returns inf if integers differ, or numbers that are not finite.
        """
        worst = 0.0
        for mine, others in zip(self._flat, other._flat, strict=True):
            worst = max(worst, _worst(mine, others, tolerance))
        return worst if worst > 1 else None


def scratch_nbytes(outputs: Sequence[torch.Tensor]) -> int:
    """Returns the bytes that a search for the fastest parameters allocates: two sets of results,
    and temporary tensors for the comparison of results.
    """
    compared = min(max((span(t) for t in outputs), default=0), _CHUNK)
    return 2 * sum(span(t) * t.element_size() for t in outputs) + 8 * 8 * compared


def free_nbytes(device: torch.device) -> int | None:
    """Returns the bytes that torch can still allocate on a device. Returns None if the number is
    unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None


# ------------------------------------------------------------------ agreement
def tolerance_of(fusion: Fusion) -> float:
    """Returns by how much results of a fusion may differ between kernels because of rounding. It
    depends on the least precise dtype of the fusion's tensors.

    `Scratch.difference` says how the number is used.
    """
    dtypes = {to_torch(tv.dtype()) for tv in fusion.tensors()}
    floats = [d for d in dtypes if d.is_floating_point]
    return max((_TOLERANCE.get(d, _COARSEST) for d in floats), default=_TOLERANCE[torch.float32])


def _worst(mine: torch.Tensor, others: torch.Tensor, tolerance: float) -> float:
    if not (mine.is_floating_point() or mine.is_complex()):
        return 0.0 if torch.equal(mine, others) else float("inf")
    squares, count, worst = 0.0, 0, 0.0
    for a in _chunks(mine):
        finite = a[torch.isfinite(a)]
        squares, count = squares + float(finite.square().sum()), count + finite.numel()
    scale = (squares / max(count, 1)) ** 0.5
    for a, b in zip(_chunks(mine), _chunks(others), strict=True):
        both = torch.isfinite(a) & torch.isfinite(b)
        if not torch.allclose(a[~both], b[~both], rtol=0, atol=0, equal_nan=True):
            return float("inf")
        a, b = a[both], b[both]
        if a.numel():
            allowed = (tolerance * (a.abs() + scale)).clamp_min(_SMALLEST)
            worst = max(worst, float(((a - b).abs() / allowed).max()))
    return worst


def _chunks(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields consecutive parts of a 1-d tensor, converted to double precision. A whole converted
    tensor would need too much memory.
    """
    flat = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    for part in flat.split(_CHUNK):
        yield (part if part.dtype == torch.float64 else part.float()).double()


# ------------------------------------------------------------------ time
# Runs a function on the current stream, and returns the seconds it took.
Timer = Callable[[Callable[[], object]], float]


def make_timer(device: torch.device) -> Timer:
    """Returns a function that measures the run time of a kernel on a device.

    On a GPU, the L2 cache is overwritten before each run, so that operands come from memory.
    """
    return _CudaTimer(device) if device.type == "cuda" else _time_on_host


def _time_on_host(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


class _CudaTimer:
    """Measures the run time of a kernel by CUDA events.

    Before each run, the L2 cache is overwritten. Meanwhile, the host enqueues the kernel and the
    two events, so that the events measure only the kernel.
    """

    def __init__(self, device: torch.device) -> None:
        nbytes = 2 * describe_device(device).l2_bytes
        self._flushed = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._start, self._stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, run: Callable[[], object]) -> float:
        self._flushed.zero_()
        self._start.record()
        run()
        self._stop.record()
        self._stop.synchronize()
        return self._start.elapsed_time(self._stop) * 1e-3


def race(candidates: Sequence[TuningCandidate], timer: Timer, rounds: int, budget_s: float) -> None:
    """Times all candidates in turns, one run of each per round, so that changes of the device's
    speed affect all candidates alike.

    Stops after `rounds` rounds, or when `budget_s` seconds have passed, but not before three
    rounds. Earlier measurements of the candidates are discarded.
    """
    for candidate in candidates:
        candidate.seconds.clear()
    began = time.monotonic()
    for k in range(rounds):
        if k >= 3 and time.monotonic() - began > budget_s:
            break
        for candidate in candidates:
            candidate.seconds.append(timer(candidate.run))


# ----------------------------------------------------------------------
# The executor of the option `tune`: parameters by measured time, not only by the heuristic.

_Bind = Callable[[Variant], "Record | None"]


class TunedExecutor(FusedKernelExecutor):
    """Runs a fusion as a kernel with schedule parameters that are chosen by measurement (`Tuning`).

    Parameters are timed at the first run of each class of inputs (`InputsClass`) that is not
    captured in a CUDA graph. The parameters of the heuristic, which does not measure, are used in
    three cases:

    - A run is captured in a CUDA graph before the parameters of its class are known.
    - The maximum number of versions of the kernel already exists.
    - The tuned kernel does not accept the tensors of the run.
    """

    def __init__(self, fusion: Fusion, **given: Any) -> None:
        super().__init__(fusion, **given)
        names = self.scheduler.name, self.name, self._of
        self._tuning = Tuning(self.fusion, *names, self._dump, checked=self.checked)

    def launch_laid(
        self,
        tensors: Sequence[StridedLayout],
        sizes: Sizes,
        device: torch.device,
        numbers: Sequence[Number] = (),
        *,
        are_sized: bool = False,
    ) -> KernelLaunch | None:
        """Always returns None: there is no launch for tensors of which only the layouts are known,
        because a tuned kernel must first be timed on tensors with contents.
        """
        del tensors, sizes, device, numbers, are_sized
        return None

    def launch_for(
        self,
        inputs: Sequence[Value],
        outputs: Sequence[torch.Tensor],
        *,
        sizes: Sizes,
        device: torch.device | None = None,
    ) -> KernelLaunch | None:
        """Returns the launch that `run` would execute for tensors of these shapes, strides and
        alignments, or None during the capture of a CUDA graph.

        The caller uses the returned launch again for later runs. During a capture nothing can be
        timed, so the launch might be slower than one that is found later. In all other cases this
        is `FusedKernelExecutor.launch_for`.
        """
        if device is None and _is_captured(outputs):
            return None
        return super().launch_for(inputs, outputs, sizes=sizes, device=device)

    def _record(
        self,
        inputs: Sequence[Value],
        outputs: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[Number],
        sizes: Sizes,
        device: DeviceInfo | None = None,
    ) -> Record | None:
        """Returns the version of the kernel and the launch for tensors of these shapes, strides and
        alignments. Both are cached only if parameters could be timed.

        Nothing is timed if `device` is passed, or during the capture of a CUDA graph. Returns None
        if an extent is 0.
        """
        if device is None and not _is_captured(outputs):
            return super()._record(inputs, outputs, tensors, numbers, sizes)
        return self.bind(inputs, outputs, sizes=sizes, device=device)

    def bind(
        self,
        inputs: Sequence[Value],
        outputs: Sequence[torch.Tensor],
        *,
        sizes: Sizes,
        device: DeviceInfo | None = None,
    ) -> Record | None:
        """Returns the fastest version of the kernel for these tensors, and its launch; None if an
        extent is 0.

        If the parameters for these inputs are not known yet, this call times kernels. Nothing is
        timed if `device` is passed, or during the capture of a CUDA graph. The result has the
        parameters of the heuristic, which does not measure, in two cases: the parameters are not
        known, or the fastest version does not accept these tensors.
        """
        tensors = [*[v for v in inputs if isinstance(v, torch.Tensor)], *outputs]
        numbers = tuple(v for v in inputs if not isinstance(v, torch.Tensor))
        bound = self._extents.bind(inputs, outputs, tensors, sizes)
        if bound is None:
            return None
        runs_on = device or describe(tensors)
        info = self._device or runs_on
        layouts, alignments = self._laid(tensors, are_plain=all(map(is_plain, tensors)))
        given = layouts, alignments, bound, tensors, info
        chosen = self._chosen(layouts, alignments, bound, info)
        index = index_dtype(bound.iterations, tensors)
        sizes_of = self._tuning.sizes_of(self._extents.symbols, bound.sizes)
        asked = InputsClass(layouts, chosen, index, sizes_of, info, runs_on.kind)

        def serve(variant: Variant) -> Record | None:
            launch = self._launch_of(variant, tensors, bound.values, alignments)
            return (variant, launch) if launch and is_launchable(launch, info) else None

        params = self._tuning.known(asked)
        if params is None and device is None and not self._is_full:
            if _is_captured(outputs):
                warn_of_capture()
            else:
                choice = self._by_heuristic(*given)
                params = self._timed(asked, choice, tensors, numbers, serve)
        key = (layouts, params, index)
        has_room = key in self._variants or not self._is_full
        if params is None or params == chosen or not has_room:
            return self._by_heuristic(*given)
        if key not in self._variants and not self._can_lower(key, asked):
            return self.bind(inputs, outputs, sizes=sizes, device=device)
        return serve(self._variants[key]) or self._by_heuristic(*given)

    def _can_lower(self, key: VariantKey, asked: InputsClass) -> bool:
        """Lowers the kernel with the parameters in `key` that tuning has found for the class of
        inputs `asked`. Stores the kernel and returns True if this succeeds; otherwise returns
        False.
        """
        try:
            self._variants[key] = self._lower(key, asked.device)
        except (UnsupportedError, DefinitionError):
            self._tuning.refuse(asked)
            return False
        # The tuned variant replaces the heuristic's variant, because their number is limited.
        self._variants.pop((asked.layouts, asked.chosen, asked.index), None)
        return True

    def _timed(
        self,
        asked: InputsClass,
        choice: Record,
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[Number],
        serve: _Bind,
    ) -> Any:
        """Times the kernel with several schedule parameters on these tensors, and returns the
        fastest parameters.

        - `asked`: the class of the inputs.
        - `choice`: the kernel and the launch with the parameters that the heuristic chose without
          measuring.
        - `tensors`, `numbers`: the tensors and scalar inputs of the call.
        - `serve`: a function that returns a version of the kernel with its launch on these tensors,
          or None if the version cannot run with them.
        """

        def lower(params: Any) -> Record | None:
            """Returns the kernel with the parameters `params` and its launch, or None if these
            parameters cannot be used.

            The kernel is used only for the search: it is not added to the versions of the executor.
            """
            try:
                key = (asked.layouts, params, asked.index)
                return serve(self._scheduled(key, asked.device)[0])
            except FuserError:
                return None

        variant, launch = choice
        self._compiled(variant, tensors)
        ends = len(tensors) - len(self.fusion.outputs)
        device = tensors[0].device
        return self._tuning.find(
            asked,
            Trial(
                variant,
                launch,
                tensors[:ends],
                tensors[ends:],
                numbers,
                lower,
                lambda variants: self._compile(variants, device),
            ),
        )

    def _nearby(
        self,
        key: VariantKey,
        alignments: Mapping[int, int],
        values: Mapping[Symbol, Number],
        tensors: Sequence[torch.Tensor | StridedLayout],
    ) -> Record | None:
        """Returns a version of the kernel that was made for similar sizes, and its launch, if no
        further version may be made.

        If the maximum number of versions is not reached yet, returns None. A new version is then
        made, whose parameters are timed for the new sizes.
        """
        return super()._nearby(key, alignments, values, tensors) if self._is_full else None


def _is_captured(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether launches on these tensors' device are being recorded into a CUDA graph of the
    caller."""
    return tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
