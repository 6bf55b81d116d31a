"""Peers copy out of memory that they can map: where a program that sends so keeps what it sends."""

from __future__ import annotations

from fuser.ir.op import Op
from fuser.ir.ops import nodes
from fuser.ir.tensor import TensorView
from fuser.ir.types import MemoryType
from hostir.ir.buffer_aliasing import Storage
from hostir.ir.effects import Reads
from hostir.ir.ops import Allocate
from hostir.ir.program import HostIrContainer, walk
from hostir.ir.transfers import PEER_COPIES, ShareMemHandles, StartsCommunication
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
