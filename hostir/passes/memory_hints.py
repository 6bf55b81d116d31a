"""Peers copy out of memory that they can map: where a program that sends so keeps what it sends."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from fuser.ir.fusion import TensorView
from fuser.ir.op import Op
from fuser.ir.ops import nodes
from fuser.ir.types import MemoryType
from hostir.ir.buffer_aliasing import Storage
from hostir.ir.effects import Reads
from hostir.ir.ops import PEER_COPIES, Allocate, LaunchKernel, ShareMemHandles, StartsCommunication
from hostir.ir.program import HostIrContainer, walk
from multidevice.sharding.placement import clone_domain


def let_peers_map(program: HostIrContainer) -> HostIrContainer:
    """Return the program in which peers copy out of symmetric memory.

    What it allocates itself is allocated there. An input, which lies where the caller put it, is
    copied there once, and sent from there:

        Communication 0 (type=Broadcast, .., input=T0, ..)
        -> T9 = ALLOCATE(mem_type=symmetric, ..); T9 = Set( T0 ); Communication 0 (.., input=T9, ..)

    Any other tensor is copied by each of its sends.
    """
    storage, sent = Storage.of(program), dict[TensorView, str]()
    for op in program.started():
        if getattr(op, "backend", "") == PEER_COPIES:
            read = (e.tensor for e in op.effects() if isinstance(e, Reads))
            sent.update((tv, op.where) for tv in read)
    made = {o.buffer for o in walk(program.ops) if isinstance(o, Allocate)}
    moved = made & {storage.root(tv) for tv in sent}
    for tv in program.tensors():
        if storage.root(tv) in moved:
            tv.memory = MemoryType.symmetric
    copies: dict[object, TensorView] = {}
    before: list[Op] = []
    for tv, where in sent.items():
        if tv in program.inputs and tv.memory is not MemoryType.symmetric:
            domain, _ = clone_domain(tv.fusion, tv.domain)
            copy = copies[tv] = tv.fusion.new_tensor(
                domain, tv.dtype(), mesh=tv.mesh, memory=MemoryType.symmetric
            )
            before += [Allocate(copy), nodes.LoadStoreOp(copy, tv).replace(where=where)]

    def from_copy(op: Op) -> Op:
        if isinstance(op, StartsCommunication | ShareMemHandles):
            return op.map_values(lambda v: copies.get(v, v))
        regions = op.fields_of("region")
        return op.replace(**{r: tuple(map(from_copy, getattr(op, r))) for r in regions})

    ops = (*before, *map(from_copy, program.ops))
    return HostIrContainer(program.values, ops, program.groups)


# ----------------------------------------------------------------------
# Kernels that read again what the kernel before them has read: statistics, then what is normalised
# with them, of tensors that no multiprocessor holds.
#
# The first leaves what it reads in the cache, the second begins with what was read last.

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
