"""Measures a machine for the cost model: `python -m hostir calibrate`.

One process measures its device: memory bandwidth, matmuls, and the host's time per op. The ranks of
a job, one per GPU or on CPUs, also measure their links: collectives, sends and peer copies. All
other numbers come from an earlier calibration, or from the built-in machine if there is none.

A measurement consists of several bursts, and a burst is a row of equal calls. On a GPU, the calls
of a burst are enqueued after a kernel that waits, so that only the GPU's time is measured. The
result of a measurement is the lower quartile of its bursts, so that other work on the machine has
little influence. In a job, the result of the slowest rank is used. The host's times are those of
single calls without CUDA graphs. If results are impossible, all measurements are repeated.
Calibration fails if three attempts have impossible results.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from fuser import ops
from fuser.ir.dtypes import DataType
from fuser.ir.types import ParallelType
from fuser.support import options
from fuser.support.device import describe_device
from fuser.support.dumps import not_replaceable
from fuser.support.errors import FuserError, InputError
from hostir.cost.machine_model import (
    CPU,
    H200,
    Machine,
    machine_from_json,
    measured_file,
    read_once,
)
from hostir.cost.op_costs import whole_waves
from hostir.ir.ops import Allocate, Communication, Wait
from hostir.ir.program import HostIrContainer
from hostir.runtime.evaluator import ProgramEvaluator
from multidevice import DeviceMesh
from multidevice.job.communicator import Communicator
from multidevice.sharding.reshard import TeamOf
from multidevice.transports.base.allreduce_model import MAX_NBYTES, Way, sent_nbytes, shape_of
from multidevice.transports.base.collectives import ALLREDUCE, COLLECTIVES, Collective
from multidevice.transports.base.protocol import Transfer, Work

Fields = dict[str, Any]

# Bursts per measurement; extra bursts if these differ too much; attempts of the whole calibration.
_ROUNDS, _MORE_ROUNDS, _ATTEMPTS = 9, 3, 3
# A burst on a CPU ends before the system lets another process run.
_SLICE_S = 2e-3
# Cycles for which a GPU is kept waiting while the host enqueues a burst: about 10 ms.
_HEAD_START = 20_000_000
# Bytes and shapes by kind of device. Only large ones keep a GPU busy.
_CLONED = {"cuda": 512 << 20, "cpu": 16 << 20}
_MATMULS = {
    "cuda": ((4096, 4096, 4096), (4096, 8192, 8192), (8192, 8192, 8192), (8192, 8192, 28672)),
    "cpu": ((64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 512, 512)),
}
# The index of the shape in which dtypes are compared. In a small product on a CPU, the overhead of
# the library is as large as the product.
_COMPARED = {"cuda": slice(0, 2), "cpu": slice(1, 3)}
# The seconds of matmuls of one size before they are timed.
_LOAD_S = {"cuda": 0.05, "cpu": 0.0}
# The sizes of a collective from which latency and bandwidth are computed.
_SENT = {"cuda": (8 << 10, 64 << 20, 256 << 20), "cpu": (1 << 10, 1 << 20, 4 << 20)}
_DTYPES = {
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Float": torch.float32,
    "Double": torch.float64,
}
# On a CPU, the rank is the device, and communication takes its time.
_CPU: Fields = {
    "device": CPU,
    "multiprocessors": 1,
    "nccl_multiprocessors": 1,
    "kernel_fill_nbytes": 1.0,
    "tiles": ((1, 1, 1.0),),
    "nccl_fill_s": 0.0,
    **dict.fromkeys(("host_run_s", "host_kernel_s", "host_library_s", "host_post_s"), 0.0),
}


def calibrate_here(communicator: Communicator, kind: str | None, output: str | None) -> str:
    """Measures the device of this rank, and writes the machine description to a file on rank 0.
    Returns the text that `python -m hostir calibrate` prints. All ranks of the job must call this
    function.

    - `kind`: "cuda", "cpu", or None for a GPU if there is one.
    - `output`: the file to write, or None for the file that the cost model reads by default.

    Raises `InputError` before any measurement if the device does not exist or the file cannot be
    written. Raises `PeerError` if another rank has such an error.
    """
    device, file = _checked(communicator, kind, output)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    crowded = _crowded_text(communicator) if device.type == "cpu" else ""
    if crowded and output is None:
        raise InputError(
            f"{crowded}: start fewer ranks, or write the results to another file by -o FILE.json"
        )
    before, found, doubts = calibrate(communicator, device)
    doubts += [crowded] if crowded else []
    lines = [
        f"{file}, what differs from {before.name}:",
        *changes(before, found),
        *(f"not sure: {doubt}" for doubt in doubts),
    ]
    if communicator.rank() == 0:
        write(found, file)
    if communicator.size() == 1:
        lines += [
            f"links were not measured, and stay those of {before.name}: "
            "to measure links, run mpirun -np 2 python -m hostir calibrate"
        ]
    return "\n".join(lines)


def _crowded_text(communicator: Communicator) -> str:
    """Returns a warning if this host runs more ranks than it has cores, because ranks that take
    turns measure wrong times. Returns "" otherwise."""
    cores, ranks = os.cpu_count() or 1, communicator.local_size()
    if ranks <= cores:
        return ""
    return f"{ranks} ranks take turns on {cores} cores, so all measured times are too long"


def _checked(
    communicator: Communicator, kind: str | None, output: str | None
) -> tuple[torch.device, Path]:
    """Checks the user's arguments. Returns the device that this rank measures, and the file to
    which rank 0 writes the result. `kind` and `output` are those of `calibrate_here`.

    All ranks must call this function. If one rank has an error, all ranks raise an error.
    """
    kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
    device, why = torch.device(kind), ""
    if kind == "cuda":
        number = communicator.local_rank()
        device = torch.device(kind, number)
        if number >= torch.cuda.device_count():
            which = f" with number {number}" if number else ""
            why = f"--device cuda: there is no GPU{which} on this host"
    file = Path()
    if not why:
        # A symbolic link is kept, and its target is replaced.
        file = measured_file(device) if output is None else Path(os.path.realpath(output))
        if output == "":
            why = "--output '': expected the name of a file"
        elif output and communicator.rank() == 0 and (problem := not_replaceable(file)):
            why = f"--output {output}: {problem}"
    error = InputError(why) if why else None
    communicator.agree(error)
    if error is not None:
        raise error
    return device, file


def calibrate(
    communicator: Communicator, device: torch.device
) -> tuple[Machine, Machine, list[str]]:
    """Measures the device and the links between ranks. Returns (machine description before, new
    machine description, sentences about doubtful results).

    The description before is that of an earlier calibration, or the built-in machine "h200" if
    there is none. All ranks of the job must call this function. Raises `FuserError` if ranks cannot
    communicate, or if results are impossible in every attempt.
    """
    before, ranks = known_before(device), communicator.size()
    for _ in range(_ATTEMPTS):
        bench = _Bench(communicator, device)
        found = local_fields(bench, before)
        if ranks > 1:
            found |= link_fields(bench)
        faults = [*bench.faults, link_faults(found), spread_faults(bench.spreads)]
        if not any(faults):
            break
    else:
        raise FuserError(
            f"{'; '.join(filter(None, faults))}: other work must have disturbed each of "  # pyright: ignore[reportPossiblyUnboundVariable]
            f"{_ATTEMPTS} measurements. Nothing is written. Calibrate again when nothing else runs"
        )
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    after = replace(before, name=_name(name, ranks, before), **rounded(found))
    return before, after, bench.doubts


def _name(device: str, ranks: int, before: Machine) -> str:
    """Returns the name of the new machine description, such as "cpu, measured; links by 2 ranks".

    `ranks` is the number of ranks of this calibration. A single rank measures no links, so the note
    on links is then taken from the description `before`.
    """
    _, sep, links = before.name.partition("; links by ")
    links = f"{ranks} ranks" if ranks > 1 else links
    return f"{device}, measured" + (f"; links by {links}" if ranks > 1 or sep else "")


def rounded(fields: Fields) -> Fields:
    """Returns the measured fields of a machine description with all numbers rounded to three
    digits, because the measurements are not more precise."""

    def short(x: Any) -> Any:
        if isinstance(x, float):
            return float(f"{x:.3g}")
        if isinstance(x, tuple):
            return tuple(short(y) for y in x)  # pyright: ignore[reportUnknownVariableType]
        return {k: short(y) for k, y in x.items()} if isinstance(x, dict) else x  # pyright: ignore[reportUnknownVariableType]

    return {name: short(value) for name, value in fields.items()}


def known_before(device: torch.device) -> Machine:
    """Returns the machine description that an earlier calibration wrote for `device`. If there is
    none, or if its file cannot be read, returns the built-in machine "h200"."""
    file = measured_file(device)
    try:
        return machine_from_json(file.read_text(), where=str(file))
    except (FileNotFoundError, FuserError):
        return H200


def write(machine: Machine, file: Path) -> None:
    """Writes a machine description to a file atomically: a concurrent reader gets either the old or
    the new description.

    Raises `InputError` if the file cannot be written.
    """
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(machine.to_json() + "\n")
        part.replace(file)
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error}") from error
    finally:
        with suppress(OSError):  # where there is none
            part.unlink()
    read_once.cache_clear()


def changes(before: Machine, after: Machine) -> list[str]:
    """Returns a line of text for each field that differs between two machine descriptions, such as
    "launch_s: 2e-06 -> 3e-06"."""
    old, new = (json.loads(m.to_json()) for m in (before, after))
    return [f"{name}: {old[name]} -> {value}" for name, value in new.items() if old[name] != value]


class _Bench:
    """Times calls on a device, on all ranks of a job at the same time. Each measurement consists of
    several bursts, and a burst consists of several calls in a row.

    - `spreads`: for each measurement, how much its bursts differ, as the quotient of a long and a
      short one.
    - `doubts`: sentences about doubtful results; `faults`: sentences about impossible results.
    """

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self.communicator, self.device = communicator, device
        self.team = tuple(range(communicator.size()))
        # The factor between the better repetitions of each measurement; other doubtful results, and
        # impossible ones.
        self.spreads: list[float] = []
        self.doubts: list[str] = []
        self.faults: list[str] = []

    def seconds(self, call: Callable[[], object], times: int = 10) -> float:
        """Returns the device's time for one call of `call`, in seconds. Several calls in a row are
        timed together: at most `times` of them on a CPU, and at least `times` on a GPU, where more
        make the result more precise.
        """
        return self.interleaved([call], times)[0]

    def interleaved(
        self, calls: Sequence[Callable[[], object]], times: int = 10, load_s: float = 0.0
    ) -> list[float]:
        """Returns the device's time for each of several calls, in seconds. A burst is several
        repetitions of one call. Bursts of the different calls take turns, so that other work on the
        machine disturbs all calls alike.

        On a CPU, a burst has at most `times` repetitions. On a GPU, a burst has at least `times`
        repetitions and takes at least `load_s` seconds.
        """
        lengths = [self._length(call, times, load_s) for call in calls]
        found: list[list[float]] = [[] for _ in calls]
        for k in range(_ROUNDS * (1 + _MORE_ROUNDS)):
            if k >= _ROUNDS and k % _ROUNDS == 0 and max(map(_spread, found)) < SPREAD:
                break
            for call, length, rounds in zip(calls, lengths, found, strict=True):
                rounds.append(self._slowest(self._burst(call, length)))
        self.spreads += map(_spread, found)
        return [_low(rounds) for rounds in found]

    def _length(self, call: Callable[[], object], times: int, load_s: float) -> int:
        """Returns how often `call` is repeated in one timed burst: at most `times` on a CPU, at
        least `times` on a GPU.

        On a GPU, a burst takes at least `load_s` seconds. The GPU then reaches its sustained clock,
        which is lower than the clock at the start.
        """
        for _ in range(3):
            call()
        once = max(self._slowest(self._burst(call, 2)), 1e-9)
        if self.device.type == "cpu":
            return max(1, min(times, int(_SLICE_S / once)))
        return max(times, math.ceil(load_s / once))

    def _burst(self, call: Callable[[], object], times: int) -> float:
        self._meet()
        if self.device.type == "cpu":
            started = time.perf_counter()
            for _ in range(times):
                call()
            return (time.perf_counter() - started) / times
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        _keep_waiting()
        call()  # the ranks meet in it
        start.record()
        for _ in range(times):
            call()
        stop.record()
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(stop) / 1e3 / times

    def host_seconds(self, call: Callable[[], object], times: int = 20) -> float:
        """Returns the host's time for one call of `call`, in seconds, measured in rounds of `times`
        calls.

        A GPU works asynchronously, so most calls return before the GPU has done their work, and
        only few calls wait for the GPU. The lower quartile of the single calls leaves out the calls
        that wait.
        """
        for _ in range(10):
            call()
        rounds: list[float] = []
        for _ in range(_ROUNDS):
            self._meet()
            clock = [time.perf_counter()]
            for _ in range(times):
                call()
                clock.append(time.perf_counter())
            rounds.append(_low([b - a for a, b in pairwise(clock)]))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        return _low([self._slowest(r) for r in rounds])

    def _meet(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if len(self.team) > 1:
            self.communicator.barrier()

    def _slowest(self, seconds: float) -> float:
        if len(self.team) == 1:
            return seconds
        return max(map(float, self.communicator.exchange(repr(seconds).encode())))

    def random(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor of random numbers on the measured device. Zeros are not used, because a
        GPU multiplies zeros at a higher clock."""
        return torch.randn(*shape, device=self.device, dtype=torch.float32).to(dtype)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Returns an uninitialised tensor of `nbytes` bytes on the measured device."""
        return torch.empty(nbytes // 4, device=self.device, dtype=torch.float32)


def _low(times: Sequence[float]) -> float:
    """Returns the lower quartile of repeated measurements, because other work on the machine makes
    some measurements longer."""
    return sorted(times)[len(times) // 4]


def _spread(times: Sequence[float]) -> float:
    return _low(times) / max(min(times), 1e-9)


def _keep_waiting() -> None:
    """Keeps the GPU's current stream busy for a while, so that the host can enqueue the calls of a
    measurement before the first of them begins. The calls then run without gaps.
    """
    torch.cuda._sleep(_HEAD_START)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]


# ------------------------------------------------------------------ one device
def local_fields(bench: _Bench, machine: Machine) -> Fields:
    """Measures the fields of `Machine` that need no other rank: launches, memory bandwidth,
    matmuls, and the host's times."""
    kind = bench.device.type
    small = bench.empty(64)
    launch = bench.seconds(lambda: small.add_(1.0), 50)
    found: Fields = {"launch_s": launch} | (
        _cpu_fields(bench) if kind == "cpu" else _gpu_fields(bench)
    )
    source, target = (bench.empty(_CLONED[kind]) for _ in range(2))
    seconds = bench.seconds(lambda: target.copy_(source)) - launch
    moved = 2 * _CLONED[kind]
    found["memory_bandwidth"] = moved / max(seconds, 1e-9)
    return found | _matmul_fields(bench, replace(machine, **found))


def _cpu_fields(bench: _Bench) -> Fields:
    """Returns the fields that are fixed for a CPU, and the measured time of a library call that
    computes almost nothing.

    The fields for the host's time are 0, because on a CPU the host's time is part of the device's
    time.
    """
    x = bench.random(8, 8, dtype=torch.float32)
    out = torch.empty_like(x)
    return {**_CPU, "matmul_launch_s": bench.seconds(lambda: torch.mm(x, x, out=out), 50)}


def _gpu_fields(bench: _Bench) -> Fields:
    multiprocessors = describe_device(bench.device).sm_count
    tiny = bench.random(128, 128, dtype=torch.bfloat16)
    out = torch.empty_like(tiny)
    one, nine = (_host_of(bench, _linears(n), [tiny, tiny]) for n in (1, 9))
    library = max((nine - one) / 8, 0.0)
    return {
        "multiprocessors": multiprocessors,
        "matmul_launch_s": bench.seconds(lambda: torch.mm(tiny, tiny, out=out), 50),
        "host_library_s": library,
        "host_run_s": max(one - library, 0.0),
        # Our kernel takes the host as long as a library call, without torch's part of it.
        "host_kernel_s": library * H200.host_kernel_s / H200.host_library_s,
    }


def _host_of(bench: _Bench, program: HostIrContainer, inputs: Sequence[torch.Tensor]) -> float:
    # The time of each op is needed, which a CUDA graph does not have.
    settings = options.settings(disable=["cuda_graphs"])
    evaluator = ProgramEvaluator(
        program, bench.communicator, device=bench.device, settings=settings
    )
    return bench.host_seconds(lambda: evaluator.run(inputs))


def _linears(count: int) -> HostIrContainer:
    program = HostIrContainer()
    with program:
        x, w = (program.input([128, 128], DataType.BFloat16) for _ in range(2))
        for _ in range(count):
            y = ops.linear(x, w)
            program.append(y)
        program.add_output(y)  # pyright: ignore[reportPossiblyUnboundVariable]
    return program


def _matmul_fields(bench: _Bench, machine: Machine) -> Fields:
    """Measures the speed of matmuls in each dtype, as fields of `Machine`.

    A GPU computes a matmul in tiles, in waves of as many tiles as the GPU has multiprocessors. The
    last wave may leave multiprocessors idle. The speed is computed as if all waves were full,
    because the cost model accounts for the last wave separately (`whole_waves`).
    """
    kind = bench.device.type
    main = "BFloat16" if kind == "cuda" else "Float"

    def product(m: int, k: int, n: int, dtype: str) -> Callable[[], object]:
        a, b = (bench.random(*s, dtype=_DTYPES[dtype]) for s in ((m, k), (k, n)))
        out = torch.empty(m, n, device=bench.device, dtype=_DTYPES[dtype])
        return lambda: torch.mm(a, b, out=out)

    shapes = {d: _MATMULS[kind] if d == main else _MATMULS[kind][_COMPARED[kind]] for d in _DTYPES}
    asked = [(d, shape) for d, found in shapes.items() for shape in found]
    calls = [product(*shape, d) for d, shape in asked]
    times = bench.interleaved(calls, 8, _LOAD_S[kind])
    rates: dict[str, list[tuple[float, float]]] = {d: [] for d in _DTYPES}
    for (d, (m, k, n)), seconds in zip(asked, times, strict=True):
        area, _ = whole_waves(1, m, n, machine)
        alone = max(seconds - machine.matmul_launch_s, seconds / 2, 1e-9)
        rate = area * machine.multiprocessors * 2 * k / alone
        rates[d].append((float(2 * m * k * n), rate))
    has_tiles = torch.cpu._is_amx_tile_supported()  # pyright: ignore[reportPrivateUsage]
    bench.faults.append(matmul_faults(rates, main, kind, has_tiles=has_tiles))
    mains = dict(rates[main])
    dtypes = {d: points[-1][1] / mains[points[-1][0]] for d, points in rates.items()}
    return {"matmul": tuple(rates[main]), "matmul_dtypes": dtypes}


# ------------------------------------------------------------------ between ranks
def link_fields(bench: _Bench) -> Fields:
    """Measures the fields of `Machine` that describe communication. All ranks of a job must call
    this function."""
    bench.communicator.begin_run(bench.team)
    backend = bench.communicator.backend_for(bench.device)
    team, n = bench.team, len(bench.team)
    small, middle, large = _SENT[bench.device.type]

    def calls_of(row: Collective) -> Callable[[int], Callable[[], None]]:
        """Returns a function that prepares a call of the collective `row`, for its measurement.

        The argument of the returned function is the number of bytes of the input or the output,
        whichever is larger. The collective works in place if this type of collective allows it.
        """

        def make(nbytes: int) -> Callable[[], None]:
            part = nbytes // n if row.growth else nbytes
            inp = bench.empty(row.inp.parts(n) * part)
            out = inp if row.sharing == "same" else bench.empty(row.out.parts(n) * part)
            reduce = "SUM" if row.reduces else None
            return lambda: backend.collective(row, out, inp, team=team, reduce=reduce).wait()

        make.__name__ = row.method
        return make

    def sends(nbytes: int) -> Callable[[], None]:
        return _ring(bench, bench.empty(nbytes), bench.empty(nbytes), backend.batch)

    bandwidths: dict[str, float] = {}
    latencies: list[float] = []
    ramps: list[float] = []
    for row in (c for c in COLLECTIVES.values() if c.h200_bandwidth is not None):
        sizes = small, middle, large
        latency, ramp, bandwidth = _fit(bench, calls_of(row), row.bus(n), sizes)
        bandwidths[row.name] = bandwidth
        if row is not ALLREDUCE:  # of which small ones go another way than large ones
            ramps.append(ramp)
            latencies.append(latency)
    found: Fields = {
        "nccl": bandwidths,
        "nccl_latency_s": statistics.mean(latencies),
        "nccl_other_bandwidth": _fit(bench, sends, 1.0, (small, middle, large))[2],
    }
    if bench.device.type == "cuda":
        found["nccl_fill_s"] = statistics.mean(ramps)
        one, five = (_host_of_posts(bench, k) for k in (1, 5))
        found["host_post_s"] = max((five - one) / 4, 0.0)
    if bench.device.type == "cuda" and not options.disabled("allreduce_kernel"):
        found |= _allreduce_fields(bench, calls_of(ALLREDUCE))
    return found | _peer_fields(bench)


def _allreduce_fields(bench: _Bench, make: Callable[[int], Callable[[], None]]) -> Fields:
    """Measures allreduces of small tensors, which this project carries out as one kernel instead of
    a library call. Returns the time of each algorithm of this kernel, and one bandwidth at which
    all algorithms send.

    `make` prepares an allreduce of a given number of bytes. Each algorithm is timed with its
    smallest and its largest message. Returns {} if nothing can be measured.
    """
    n = len(bench.team)
    sizes: dict[Way, list[int]] = {}
    for nbytes in (1 << k for k in range(10, MAX_NBYTES.bit_length())):
        if (shape := shape_of(nbytes, n, torch.float32)) is not None:
            sizes.setdefault(shape.way, []).append(nbytes)
    times = {
        way: [(sent_nbytes(way, k, n), bench.seconds(make(k))) for k in (found[0], found[-1])]
        for way, found in sizes.items()
    }
    if not times:
        return {}
    # The bandwidth follows from the algorithm that sends the most.
    (few, short), (many, long) = max(times.values(), key=lambda ends: ends[-1][0])
    if many == few or long <= short:
        return {}
    bandwidth = (many - few) / (long - short)
    ends = {way: [t - sent / bandwidth for sent, t in found] for way, found in times.items()}
    latencies = {way.name: max(statistics.mean(found), 1e-9) for way, found in ends.items()}
    return {
        "allreduce_kernel_s": {**H200.allreduce_kernel_s, **latencies},
        "allreduce_kernel_bandwidth": bandwidth,
    }


def _fit(
    bench: _Bench,
    make: Callable[[int], Callable[[], None]],
    moved: float,
    sizes: tuple[int, int, int],
) -> tuple[float, float, float]:
    """Computes (latency, ramp, bandwidth) of a communication from its times for messages of three
    sizes. The ramp is the extra time that a large message needs to reach full bandwidth.

    `make` prepares a call for a message size. For each byte of a message, a rank moves `moved`
    bytes. The bandwidth is computed from the difference between the two larger sizes.
    """
    few, middle, many = (bench.seconds(make(size)) for size in sizes)
    if many < SPREAD * few:
        bench.doubts.append(
            f"{make.__name__}: {sizes[2]} bytes took {many:.3g} s, {sizes[0]} bytes {few:.3g} s: "
            "the difference is too small to compute the time per byte"
        )
    bandwidth = moved * sizes[2] / many
    # If the middle size took as long as the largest, other work disturbed it.
    if many - middle > 0.5 * (sizes[2] - sizes[1]) / sizes[2] * many:
        bandwidth = moved * (sizes[2] - sizes[1]) / (many - middle)
    latency = max(few - moved * sizes[0] / bandwidth, 0.0)
    return latency, max(middle - latency - moved * sizes[1] / bandwidth, 0.0), bandwidth


def _ring(
    bench: _Bench,
    inp: torch.Tensor,
    out: torch.Tensor,
    batch: Callable[..., Work],
    count: int = 1,
) -> Callable[[], None]:
    """Returns a function for timing, which makes transfers along a ring of all ranks.

    In a call of the function, every rank sends `inp` to the next rank and receives `out` from the
    previous rank, `count` times. The call ends when the transfers have ended. `batch` is the method
    of a communication backend that starts a list of transfers together.
    """
    rank, n = bench.communicator.rank(), len(bench.team)
    both = [
        Transfer("send", inp, (rank + 1) % n),
        Transfer("recv", out, (rank - 1) % n),
    ]
    return lambda: batch(both * count, team=bench.team).wait()


def _peer_fields(bench: _Bench) -> Fields:
    """Measures the latency and the bandwidth of copies out of another rank's memory. Returns {} if
    the ranks cannot map each other's memory."""
    here = bench.communicator
    if not (here.are_on_one_host(bench.team) and here.have_access(bench.device)):
        return {}
    peers = here.peers_for(bench.device)

    def copies(nbytes: int, count: int = 1) -> Callable[[], None]:
        mapped = peers.empty(nbytes).view(torch.float32)
        return _ring(bench, mapped, bench.empty(nbytes), peers.batch, count)

    sizes = _SENT[bench.device.type]
    _, _, bandwidth = _fit(bench, copies, 1.0, sizes)
    # The time of one more copy among several. A single one includes the wait for its answer, which
    # other work hides in a program.
    one, five = (bench.seconds(copies(sizes[0], k)) for k in (1, 5))
    latency = max((five - one) / 4 - sizes[0] / bandwidth, 0.0)
    return {"copy_latency_s": latency, "pull_bandwidth": bandwidth}


def _host_of_posts(bench: _Bench, count: int) -> float:
    program, n = HostIrContainer(), len(bench.team)
    mesh = DeviceMesh(range(n))
    team = TeamOf(mesh, (ParallelType.mesh_x,))
    with program:
        x = program.input([n, 1024], mesh=mesh)
        x.axis(0).parallelize(ParallelType.mesh_x)
        for number in range(count):
            y = program.tensor([n, 1024], mesh=mesh)
            gather = Communication(x, y, number=number, type="Allgather", team=team)
            program.append(Allocate(y), gather, Wait(number))
        program.add_output(y)  # pyright: ignore[reportPossiblyUnboundVariable]
    return _host_of(bench, program, [torch.ones(1, 1024, device=bench.device)])


# ----------------------------------------------------------------------
# Impossible results: these are measured again, and then refused (docs/explanation/cost-model.md).

# The factor by which a link may be faster than memory, since CPU ranks may send through caches.
CACHED = 10.0
# The largest factor between the best quarter of the repetitions of one measurement.
SPREAD = 2.0
# The largest factor between rates of matmuls of one dtype and neighbouring sizes.
RATES = 4.0
# The largest speed of a dtype relative to the main one, by device. Some CPUs have special matrix
# units for half types.
FASTER: Mapping[str, float] = {"cuda": 2.0, "cpu": 2.0}
HALF_ON_CPU, HALF_IN_TILES = 4.0, 32.0
_HALVES = ("Half", "BFloat16")

# (operations, operations per second), by operations.
Points = Sequence[tuple[float, float]]


def matmul_faults(rates: Mapping[str, Points], main: str, kind: str, *, has_tiles: bool) -> str:
    """Returns a sentence about impossible matmul speeds, or "" if there are none.

    - `rates`: for each dtype, measured points (operations, operations per second).
    - `main`: the dtype to which others are compared; `kind`: "cuda" or "cpu".
    - `has_tiles`: whether the CPU has matrix units, which make half types much faster.
    """
    for dtype, points in rates.items():
        for (few, slow), (many, fast) in pairwise(points):
            short, long = few / slow, many / fast
            if long <= short or not 1 / RATES < fast / slow < RATES:
                return (
                    f"{dtype} matmuls of {few:.3g} and {many:.3g} operations take "
                    f"{short * 1e6:.3g} and {long * 1e6:.3g} us: their rates differ by a factor "
                    f"of {max(fast / slow, slow / fast):.3g}, where less than {RATES:g} is possible"
                )
    for dtype, points in rates.items():
        most = FASTER[kind]
        if kind == "cpu" and dtype in _HALVES:
            most = HALF_IN_TILES if has_tiles else HALF_ON_CPU
        mains = dict(rates[main])
        factor = max(rate / mains[flops] for flops, rate in points)
        if factor > most:
            return (
                f"{dtype} matmuls are {factor:.3g} times as fast as {main} ones, where at most "
                f"{most:g} times is possible"
            )
    return ""


def link_faults(found: Mapping[str, Any]) -> str:
    """Returns a sentence about a link between ranks that is impossibly fast compared with memory,
    or "" if there is none.

    `found` has the measured fields of `Machine`.
    """
    memory, links = found["memory_bandwidth"], dict(found.get("nccl", {}))
    links |= {k: found[k] for k in ("nccl_other_bandwidth", "pull_bandwidth") if k in found}
    for name, bandwidth in links.items():
        if bandwidth > CACHED * memory:
            return (
                f"{name}: measured {bandwidth / 1e9:.3g} GB/s between ranks, though the memory of "
                f"each rank moves only {memory / 1e9:.3g} GB/s"
            )
    return ""


def spread_faults(spreads: Sequence[float]) -> str:
    """Returns a sentence if repetitions of the same measurement differ too much, or "" otherwise.

    `spreads` has, for each measurement, the quotient of a long and a short repetition.
    """
    count = sum(spread > SPREAD for spread in spreads)
    if not count:
        return ""
    return (
        f"{count} of {len(spreads)} measurements differ by more than a factor of {SPREAD:g} from "
        f"repetition to repetition, the worst by {max(spreads):.3g}"
    )
