"""PythonProfiler: measures the kernels, library calls and communications of a run.

    with PythonProfiler() as prof:
        fd.execute(inputs)
    print(prof.profile)

Within the block, and everywhere if `FUSER_PROF` is set, `execute` issues the ops of the program one
by one, as a trace does (`hostir.profiling.profiler`). The results, in-place updates and random
numbers are those of a single run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from fuser.schedule.automatic import SchedulerType
from fuser.support import options
from fuser.support.arguments import checked
from fuser.support.device import peak_bandwidth_gbs
from fuser.support.errors import NotCompiledError, OtherEntranceError

if TYPE_CHECKING:
    import torch

    from fuser.frontend.program_cache import Program
    from fuser.kernels.executor import KernelLaunch
    from hostir.profiling.profiler import Profiled, ProfiledOp

_BY_HAND = "PythonProfiler(auto_scheduled=False) profiles only manual_execute, not execute"
_BY_ITSELF = "manual_execute is profiled by PythonProfiler(auto_scheduled=False)"


@dataclass(frozen=True)
class KernelProfile:
    """The measurements of one kernel, library call or communication of a run on this rank (process
    of the job).

    - `scheduler`: the name of a `SchedulerType` ("none" for the plain schedule of a single op),
      "cluster_persistent", "user", "expr_eval" for ops that torch evaluates, or "communication".
    - `segment_id`: the number of the part of the program that runs as one unit, or -1. If a loop on
      the host computes a tensor part by part, each iteration has its own `KernelProfile`.
    - `stream`: the number of the program's stream; -1 is the caller's.
    - `compile_time_ms`: the time in which the kernel was lowered and compiled, or found on disk,
      even if that was before this run. Kernels that were compiled together share their time
      equally.
    - `input_bytes`, `output_bytes`: bytes of the tensors of this rank.
    - `time_ms`: the run time; on CPU ranks, by the host's clock.

    An unknown value is None. On a CPU, `registers`, `device` and the percentage are unknown.
    `correlation_id` is always None.
    """

    name: str
    segment_id: int
    device: int | None
    stream: int
    correlation_id: int | None
    compile_time_ms: float
    time_ms: float
    effective_bandwidth_gbs: float
    percentage_peak_bandwidth: float | None
    grid_str: str
    block_str: str
    cluster_str: str
    shared_mem_str: str
    registers: int | None
    input_bytes: int
    output_bytes: int
    scheduler: str


@dataclass(frozen=True)
class FusionProfile:
    """The measurements of one run of a program on this rank (process of the job).

    - `cuda_evt_time_ms`: the time from the start of the first op until the device has finished.
    - `host_time_ms`: the time until the host has issued all ops. Both times are by the host's
      clock, without the checks of inputs and without compilation.
    - `kernel_time_ms`, `compile_time_ms`: sums over `kernel_profiles`.
    - `effective_bandwidth_gbs`: the bytes of the fusion's inputs and outputs, per `kernel_time_ms`.
    - `segments`: the number of parts of the program that run as one unit (kernels, library calls,
      ..), including those without work on the device.
    """

    verbose: bool
    fusion_id: int
    segments: int
    cuda_evt_time_ms: float
    host_time_ms: float
    compile_time_ms: float
    kernel_time_ms: float
    effective_bandwidth_gbs: float
    percentage_peak_bandwith: float | None
    input_bytes: int
    output_bytes: int
    kernel_profiles: list[KernelProfile] = field(default_factory=list[KernelProfile])
    source: str = ""

    def __str__(self) -> str:
        """Returns the profile as the table that `FUSER_PROF=print` writes to the terminal.

        If `verbose` is True, the table has more columns.
        """
        head = (
            f"fusion {self.fusion_id}: {self.segments} segments, {self.cuda_evt_time_ms:.3f} ms, "
            f"host {self.host_time_ms:.3f} ms, compiled in {self.compile_time_ms:.3f} ms, kernels "
            f"{self.kernel_time_ms:.3f} ms, {self.effective_bandwidth_gbs:.1f} GB/s"
            f"{_percent(self.percentage_peak_bandwith)}; by {self.source}"
        )
        columns = [c for c in _COLUMNS if self.verbose or not c[2]]
        rows = [[title for title, _, _ in columns]]
        rows += [[show(row) for _, show, _ in columns] for row in self.kernel_profiles]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        )
        return "\n".join([head, *(f"  {line}" for line in lines)])


def _percent(value: float | None) -> str:
    return "" if value is None else f" ({value:.1f} % of the peak)"


def _or_dash(value: object) -> str:
    return "-" if value in (None, "") else str(value)


# Title of a column, text of its cell, whether only a verbose table has the column.
_COLUMNS: tuple[tuple[str, Callable[[KernelProfile], str], bool], ...] = (
    ("segment", lambda k: str(k.segment_id), False),
    ("scheduler", lambda k: k.scheduler, False),
    ("ms", lambda k: f"{k.time_ms:.4f}", False),
    ("GB/s", lambda k: f"{k.effective_bandwidth_gbs:.1f}", False),
    (
        "% peak",
        lambda k: _or_dash(k.percentage_peak_bandwidth and round(k.percentage_peak_bandwidth, 1)),
        False,
    ),
    ("in MB", lambda k: f"{k.input_bytes / 1e6:.3f}", False),
    ("out MB", lambda k: f"{k.output_bytes / 1e6:.3f}", False),
    ("compile ms", lambda k: f"{k.compile_time_ms:.1f}", True),
    ("device", lambda k: _or_dash(k.device), True),
    ("stream", lambda k: str(k.stream), True),
    ("shared [dynamic, static]", lambda k: _or_dash(k.shared_mem_str), True),
    ("registers", lambda k: _or_dash(k.registers), False),
    ("grid", lambda k: _or_dash(k.grid_str), False),
    ("block", lambda k: _or_dash(k.block_str), False),
    ("name", lambda k: k.name, False),
)


# ------------------------------------------------------------------ profiles of measured runs
def profile_of_program(taken: Profiled, program: Program, fusion_id: int) -> FusionProfile:
    """Returns the profile of a program's run. `taken` has the measurements of the run."""
    segments = program.segmented.segments
    # Number of a tensor -> the segment that writes it.
    fills = {
        tv.number: segment.number
        for segment in segments
        for op in segment.exprs
        for tv in op.outputs
    }
    groups = program.container.groups

    def row(work: ProfiledOp) -> KernelProfile:
        if work.group is not None:
            name = groups[work.group].scheduler
            return _row(work, taken, work.group, _SCHEDULERS.get(name, name))
        segment = next((fills[n] for n in work.writes if n in fills), -1)
        is_sent = work.op.kind == "communication"
        return _row(work, taken, segment, "communication" if is_sent else "expr_eval")

    return _profile(taken, [row(work) for work in taken.work], fusion_id, len(segments))


def profile_of_kernel(taken: Profiled, fusion_id: int) -> FusionProfile:
    """Returns the profile of the run of a kernel whose schedule the user wrote.

    `taken` has the measurements of the run. The profile has one kernel.
    """
    return _profile(taken, [_row(work, taken, 0, "user") for work in taken.work], fusion_id, 1)


# Name of a scheduler without a `SchedulerType` -> the name that profiles show.
_SCHEDULERS = {"plain": SchedulerType.none.name}


def _profile(
    taken: Profiled, rows: list[KernelProfile], fusion_id: int, segments: int
) -> FusionProfile:
    seconds = sum(work.seconds for work in taken.work)
    gbs, percent = _bandwidth(taken, taken.input_bytes + taken.output_bytes, seconds)
    # A kernel that runs in several steps was compiled once.
    made = {id(w.launch.variant): w.launch.variant.made_s for w in taken.work if w.launch}
    return FusionProfile(
        verbose="print.verbose" in options.profiler_modes(),
        fusion_id=fusion_id,
        segments=segments,
        cuda_evt_time_ms=taken.wall * 1e3,
        host_time_ms=taken.host * 1e3,
        compile_time_ms=sum(made.values()) * 1e3,
        kernel_time_ms=seconds * 1e3,
        effective_bandwidth_gbs=gbs,
        percentage_peak_bandwith=percent,
        input_bytes=taken.input_bytes,
        output_bytes=taken.output_bytes,
        kernel_profiles=rows,
        source=taken.source,
    )


def _row(work: ProfiledOp, taken: Profiled, segment: int, scheduler: str) -> KernelProfile:
    gbs, percent = _bandwidth(taken, work.input_bytes + work.output_bytes, work.seconds)
    grid, block, shared, registers = _shape(work.launch, taken.device)
    return KernelProfile(
        name=_name(work),
        segment_id=segment,
        device=taken.device.index,
        stream=work.op.stream,
        correlation_id=None,
        compile_time_ms=0.0 if work.launch is None else work.launch.variant.made_s * 1e3,
        time_ms=work.seconds * 1e3,
        effective_bandwidth_gbs=gbs,
        percentage_peak_bandwidth=percent,
        grid_str=grid,
        block_str=block,
        cluster_str=_cluster(work.launch),
        shared_mem_str=shared,
        registers=registers,
        input_bytes=work.input_bytes,
        output_bytes=work.output_bytes,
        scheduler=scheduler,
    )


def _name(work: ProfiledOp) -> str:
    """Returns the name of the function of a kernel, for its profile.

    For other ops, returns the name of the op and the names of its activities on the device.
    """
    if work.launch is not None:
        return work.launch.variant.kernel.source.name
    return " ".join([work.op.name, *(f"[{name}]" for name in work.activities)])


def _shape(launch: KernelLaunch | None, device: torch.device) -> tuple[str, str, str, int | None]:
    """Returns the numbers of CUDA blocks and threads, the shared memory and the registers of a
    kernel launch, the first three as text.

    Without a launch, returns "" three times and None.
    """
    if launch is None:
        return "", "", "", None
    found = launch.launch
    attributes: dict[str, int] = getattr(launch.kernel, "attributes", dict[str, int])()
    static = attributes.get("static_smem_bytes", 0)
    shared = f"[{found.smem_bytes}, {static}]"
    return _dims(found.grid), _dims(found.block), shared, attributes.get("registers")


def _cluster(launch: KernelLaunch | None) -> str:
    """Returns the shape of a cluster of CUDA blocks as text, or "" for a launch without
    clusters.
    """
    blocks = 1 if launch is None else launch.kernel.source.cluster
    return _dims((1, blocks, 1)) if blocks > 1 else ""


def _dims(dims: Sequence[int]) -> str:
    return f"[{', '.join(map(str, dims))}]"


def _bandwidth(taken: Profiled, nbytes: int, seconds: float) -> tuple[float, float | None]:
    """Returns the bandwidth of a run in GB/s, and in percent of the device's peak.

    The percentage is None if the peak is not known.
    """
    gbs = nbytes / seconds * 1e-9 if seconds > 0 else 0.0
    peak = peak_bandwidth_gbs(taken.device)
    return gbs, None if peak is None else 100 * gbs / peak


# ------------------------------------------------------------------ active profilers
class Profiler:
    """Receives the profiles of runs, and stores the last one.

    `PythonProfiler` creates one for its `with` block.
    """

    def __init__(self, *, is_by_hand: bool | None = None) -> None:
        """Creates a profiler for one kind of run.

        `is_by_hand` is True for runs of `manual_execute` and False for runs of `execute`. If
        `is_by_hand` is None, both kinds are accepted, and each profile is written to the terminal
        if `FUSER_PROF=print` is set.
        """
        self._is_by_hand = is_by_hand

    def begin(self, *, by_hand: bool) -> bool:
        """Checks that a run may begin, and returns whether CUPTI may be used to measure times.

        `by_hand` says that the run is of `manual_execute`, not of `execute`.

        Raises:
            OtherEntranceError: this profiler is for the other kind of run.
        """
        if self._is_by_hand not in (None, by_hand):
            raise OtherEntranceError(f"PythonProfiler: {_BY_ITSELF if by_hand else _BY_HAND}")
        return not any(mode.endswith("nocupti") for mode in options.profiler_modes())

    def take(self, profile: FusionProfile) -> None:
        """Stores the profile of a finished run, and writes it to the terminal if that was
        requested.
        """
        _LAST.set(profile)
        if self._is_by_hand is None and _prints():
            print(profile)


# The active profilers of all threads. If the list is empty, a run has no profiler in its thread.
PROFILERS: list[Profiler] = []
_HERE: ContextVar[Profiler | None] = ContextVar("profiler", default=None)
_LAST: ContextVar[FusionProfile | None] = ContextVar("profile", default=None)
_OF_THE_PROCESS = Profiler()


def profiler_here(*, is_on: bool) -> Profiler | None:
    """Returns the profiler of this thread, which the innermost `PythonProfiler` block created.

    Without such a block, returns the process's own profiler if `is_on` is True, else None. `is_on`
    says that `FUSER_PROF` is set.
    """
    return _HERE.get() or (_OF_THE_PROCESS if is_on else None)


def _prints() -> bool:
    return any(mode.startswith("print") for mode in options.profiler_modes())


class PythonProfiler:
    """Profiles the runs of this thread within a `with` block. `profile` is that of the last run.

    - `auto_scheduled=False` profiles `manual_execute` instead of `execute`.
    - On several ranks (processes of the job), all ranks must profile the same runs. Each rank gets
      the profile of its own ops. If only some ranks profile a run, that is an error.
    - The ops of a run are issued one by one, twice, and never as a CUDA graph. The profile
      therefore contains no capture and no warm-up.
    - With `FUSER_PROF=print`, the profile is printed at the end of the block.

    Raises:
        OtherEntranceError: a run of the other kind (`execute` or `manual_execute`), or a block
            within another such block.
    """

    @checked
    def __init__(self, auto_scheduled: bool = True) -> None:
        self._profiler = Profiler(is_by_hand=not auto_scheduled)
        self._profile: FusionProfile | None = None
        self._token: Token[Profiler | None] | None = None

    def __enter__(self) -> PythonProfiler:
        if _HERE.get() is not None:
            raise OtherEntranceError(
                "PythonProfiler: blocks cannot be nested, and another block is open in this thread"
            )
        reset_profiler()
        self._token = _HERE.set(self._profiler)
        PROFILERS.append(self._profiler)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._token is not None, "__exit__ without __enter__"
        self._profile = _LAST.get()
        PROFILERS.remove(self._profiler)
        _HERE.reset(self._token)
        self._token = None
        if kind is None and self._profile is not None and _prints():
            print(self._profile)

    @property
    def profile(self) -> FusionProfile:
        """The profile of the last run in the block.

        Raises:
            NotCompiledError: nothing ran in the block.
        """
        found = self._profile if self._token is None else _LAST.get()
        if found is None:
            raise NotCompiledError("PythonProfiler: no program has run within its block")
        return found


def get_fusion_profile() -> FusionProfile:
    """Returns the profile of the last profiled run of this thread.

    A run is profiled within a `PythonProfiler` block, or if `FUSER_PROF` is set.

    Raises:
        NotCompiledError: this thread has no profiled run.
    """
    found = _LAST.get()
    if found is None:
        raise NotCompiledError(
            "get_fusion_profile: nothing was profiled: run within PythonProfiler, or set "
            "FUSER_PROF=enable"
        )
    return found


def reset_profiler() -> None:
    """Deletes the profile of the last run of this thread."""
    _LAST.set(None)
