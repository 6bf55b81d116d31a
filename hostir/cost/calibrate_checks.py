"""What measurements cannot be: such are repeated, and then refused (docs/cost.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

# A link that is faster than memory by more is none, though caches may carry what CPU ranks send.
CACHED = 10.0
# The best quarter of the repetitions of one measurement differs by less.
SPREAD = 2.0
# Rates of matmuls of one dtype, of neighbouring sizes, differ by less.
RATES = 4.0
# How many times as fast as the main dtype another one may be, by the device; half types have tiles
# of their own on some CPUs.
FASTER: Mapping[str, float] = {"cuda": 2.0, "cpu": 2.0}
HALF_ON_CPU, HALF_IN_TILES = 4.0, 32.0
_HALVES = ("Half", "BFloat16")

# (operations, operations per second), by operations.
Points = Sequence[tuple[float, float]]


def matmul_faults(rates: Mapping[str, Points], main: str, kind: str, *, has_tiles: bool) -> str:
    """Return what cannot be about rates by dtype, "" for nothing."""
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
    """Return which link is faster than the memory at its ends can be, "" for none."""
    memory, links = found["memory_bandwidth"], dict(found.get("nccl", {}))
    links |= {k: found[k] for k in ("nccl_other_bandwidth", "pull_bandwidth") if k in found}
    for name, bandwidth in links.items():
        if bandwidth > CACHED * memory:
            return (
                f"{name}: {bandwidth / 1e9:.3g} GB/s between ranks, though the memory of each "
                f"moves {memory / 1e9:.3g} GB/s"
            )
    return ""


def spread_faults(spreads: Sequence[float]) -> str:
    """Return what to say of measurements whose repetitions differ, each by a factor; "" if few."""
    count = sum(spread > SPREAD for spread in spreads)
    if not count:
        return ""
    return (
        f"{count} of {len(spreads)} measurements differ by more than a factor of {SPREAD:g} from "
        f"repetition to repetition, the worst by {max(spreads):.3g}"
    )
