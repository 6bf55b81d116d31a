"""Kernels that read again what the kernel before them has read: statistics, then what is normalised
with them, of tensors that no multiprocessor holds.

The first leaves what it reads in the cache, the second begins with what was read last.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from fuser.ir.tensor import TensorView
from hostir.ir.ops import LaunchKernel
from hostir.ir.program import HostIrContainer, walk

# Kernels whose blocks may run in any order.
_IN_ANY_ORDER = ("pointwise", "transpose")


class CacheReuse(NamedTuple):
    """The inputs of a kernel, by number, that the next one reads again; whether it is the next."""

    again: frozenset[int] = frozenset()
    is_second: bool = False


# Of kernels none of which is known to follow another.
NOTHING_AGAIN: Mapping[int, CacheReuse] = MappingProxyType({})


def second_reads(program: HostIrContainer) -> Mapping[int, CacheReuse]:
    """Return the groups of which there is something to say.

    The second kernel waits for results of the first, and their order is that of the program.
    """
    found: dict[int, CacheReuse] = {}
    launches = [op for op in walk(program.ops) if isinstance(op, LaunchKernel)]
    for first, second in pairwise(launches):
        again = {*first.ins} & {*second.ins}
        schedulers = [program.groups[op.group].scheduler for op in (first, second)]
        waits = not {*first.outs}.isdisjoint(second.ins)
        if schedulers[0] != "reduction" or schedulers[1] not in _IN_ANY_ORDER or not waits:
            continue
        numbers = frozenset(tv.number for tv in again if isinstance(tv, TensorView))
        if numbers:
            found[first.group] = CacheReuse(again=numbers)
            found[second.group] = CacheReuse(is_second=True)
    return found
