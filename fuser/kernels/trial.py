"""One kernel with several parameters on the same inputs: their results and their times.

Results go into memory of the trial, never to the caller's tensors: what a kernel updates in place
is read from the caller's tensor and written here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from fuser.ir.dtypes import to_torch
from fuser.ir.fusion import Fusion
from fuser.ir.scalar.constructors import Number
from fuser.kernels.kernel_variant import Variant
from fuser.kernels.operands import address, span
from fuser.runtime.prepared_launch import BoundLaunch
from fuser.support.device import VECTOR_BYTES, DeviceInfo, describe_device

# Elements that are compared at a time.
_CHUNK = 1 << 22
_SMALLEST = torch.finfo(torch.float64).tiny
# What rounding may change, relative to a result and to the root mean square of all, by the coarsest
# dtype inside of a kernel: a sum in another order is another sum, and may be rounded the other way.
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 2.0**-8,
    torch.bfloat16: 2.0**-5,
}
_COARSEST = 2.0**-1


@dataclass
class TuningCandidate:
    """A kernel with some parameters, and its launch on the caller's inputs and memory of a trial.

    `seconds` are the times of its runs.
    """

    params: Any
    variant: Variant
    launch: BoundLaunch
    tensors: Sequence[torch.Tensor]
    numbers: Sequence[Number]
    seconds: list[float] = field(default_factory=list)

    def run(self) -> None:
        """Launch on the current stream.

        Raises:
            KernelError: the device refuses the launch, or a finding of checked mode.
        """
        assert self.variant.compiled is not None, "a candidate runs before it is compiled"
        self.launch.run(self.variant.compiled, self.tensors, self.numbers, None)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def is_launchable(launch: BoundLaunch, device: DeviceInfo) -> bool:
    """Whether a device takes blocks of this size, so many of them, with so much shared memory."""
    shapes = ((launch.grid, device.max_grid), (launch.block, device.max_block))
    if any(n > most for shape, limits in shapes for n, most in zip(shape, limits, strict=True)):
        return False
    threads = prod(launch.block)
    return (
        threads <= device.max_threads_per_block and launch.smem_bytes <= device.max_smem_per_block
    )


# ------------------------------------------------------------------ memory
class Scratch:
    """Memory for the results of a kernel, laid out as the caller's."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self._flat: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []
        for out in outputs:
            # It begins in the same place of a vector of memory: a kernel may rely on that.
            skipped = address(out) % VECTOR_BYTES // out.element_size()
            length = skipped + span(out)
            flat = torch.zeros(length, dtype=out.dtype, device=out.device)
            self._flat.append(flat)
            self.tensors.append(flat.as_strided(out.shape, out.stride(), skipped))

    def take(self, other: Scratch) -> None:
        """Copy the results of another one of the same layout."""
        for mine, others in zip(self._flat, other._flat, strict=True):
            mine.copy_(others)

    def clear(self) -> None:
        """Make what a kernel does not write the same for all."""
        for flat in self._flat:
            flat.zero_()

    def difference(self, other: Scratch, tolerance: float) -> float | None:
        """Return by how much the largest difference of floats exceeds `tolerance`, as a factor; inf
        for other values, None where the results agree."""
        worst = 0.0
        for mine, others in zip(self._flat, other._flat, strict=True):
            worst = max(worst, _worst(mine, others, tolerance))
        return worst if worst > 1 else None


def scratch_nbytes(outputs: Sequence[torch.Tensor]) -> int:
    """Return the bytes that a trial takes: two sets of results, and what it compares of them."""
    compared = min(max((span(t) for t in outputs), default=0), _CHUNK)
    return 2 * sum(span(t) * t.element_size() for t in outputs) + 8 * 8 * compared


def free_nbytes(device: torch.device) -> int | None:
    """Return the bytes that torch can still have on a device; None where nobody tells."""
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
    """Return what rounding may change in the results of a fusion; see `Scratch.difference`."""
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
    """Yield parts of a flat tensor in double precision."""
    flat = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    for part in flat.split(_CHUNK):
        yield (part if part.dtype == torch.float64 else part.float()).double()


# ------------------------------------------------------------------ time
# Runs something on the current stream and returns how many seconds that took.
Timer = Callable[[Callable[[], object]], float]


def make_timer(device: torch.device) -> Timer:
    """Return what times a kernel on a device; on a GPU with none of its operands in the cache."""
    return _CudaTimer(device) if device.type == "cuda" else _time_on_host


def _time_on_host(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


class _CudaTimer:
    """Measures with events of the device. What overwrites the cache before also gives the host time
    to put all into the stream, so that the events measure the kernel alone."""

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
    """Time candidates in turns, so many rounds, or as many of them as fit in the budget; at least
    three. What they had measured before is forgotten."""
    for candidate in candidates:
        candidate.seconds.clear()
    began = time.monotonic()
    for k in range(rounds):
        if k >= 3 and time.monotonic() - began > budget_s:
            break
        for candidate in candidates:
            candidate.seconds.append(timer(candidate.run))
