"""Host ops: the operations that exist only in host programs.

Question: which host ops are there, and what does each do?
Imports: `hostir.ir.effects`, `hostir.ir.shard_layout`, `fuser.ir`, `multidevice.sharding`.
An op class declares all facts about an op in methods and class variables, most of which have a
default: see `HostOp`. A host program may also contain tensor ops of the fusion IR.
Files, in reading order:

- `base`: the base class of host ops, the interface by which ops run, and the check of op fields.
- `local`: buffers and their names, work on the device, streams, control flow.
- `transfers`: communications between ranks, and the wait for the end of a communication.
"""

from __future__ import annotations

from fuser.ir.op import Op
from hostir.ir.ops.base import (
    NUMBER_OF_STREAMS,
    PEER_COPIES,
    RANK,
    BufferSharing,
    HostOp,
    Movement,
    ProgramAround,
    Sizes,
    Work,
    checked_slots,
    complete_fields,
    missing_slots,
)
from hostir.ir.ops.local import (
    Allocate,
    Deallocate,
    ForLoop,
    GetCurrentStream,
    HirAliasSelect,
    IfThenElse,
    KernelGroup,
    LaunchKernel,
    LocalSlice,
    PostOnStream,
    SetCurrentStream,
    ShardByStream,
    StreamOp,
    SymmetricContiguousView,
    Synchronize,
    loop_index,
    stream_cut,
)
from hostir.ir.ops.transfers import (
    LIBRARIES,
    TRANSFER_KINDS,
    AxisOrder,
    CollectivePermute,
    Communication,
    EndCoalescing,
    P2PCommunication,
    ShareMemHandles,
    StartCoalescing,
    StartsCommunication,
    TransferKind,
    Wait,
    library_name,
)

# Every op that only host programs have, in order of declaration. Classes with subclasses are bases.
HOST_OPS: tuple[type[HostOp], ...] = tuple(
    checked_slots(cls)
    for cls in Op.REGISTRY.values()
    if issubclass(cls, HostOp) and cls is not HostOp and not cls.__subclasses__()
)

__all__ = [
    "HOST_OPS",
    "LIBRARIES",
    "NUMBER_OF_STREAMS",
    "PEER_COPIES",
    "RANK",
    "TRANSFER_KINDS",
    "Allocate",
    "AxisOrder",
    "CollectivePermute",
    "Communication",
    "Deallocate",
    "EndCoalescing",
    "ForLoop",
    "GetCurrentStream",
    "HirAliasSelect",
    "HostOp",
    "IfThenElse",
    "KernelGroup",
    "LaunchKernel",
    "LocalSlice",
    "BufferSharing",
    "Movement",
    "P2PCommunication",
    "PostOnStream",
    "ProgramAround",
    "SetCurrentStream",
    "ShardByStream",
    "ShareMemHandles",
    "Sizes",
    "StartCoalescing",
    "StartsCommunication",
    "StreamOp",
    "SymmetricContiguousView",
    "Synchronize",
    "TransferKind",
    "Wait",
    "Work",
    "complete_fields",
    "library_name",
    "missing_slots",
    "loop_index",
    "stream_cut",
]
