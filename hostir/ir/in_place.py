"""Which ops may write over what they read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fuser.ir.fusion import TensorOp
from fuser.ir.op import Op
from fuser.ir.ops.nodes import CastOp, LibraryOp
from fuser.ir.tensor import TensorView
from fuser.passes.view_ops import VIEW_OPS
from hostir.ir.effects import Effect, Reads, Writes
from hostir.ir.ops import LaunchKernel, LocalSlice, PostOnStream
from hostir.ir.transfers import CollectivePermute, Communication

# How an operand and a result may lie in one buffer:
#   freely   the whole result is computed before any of it is written
#   same     element on element
#   slot     the smaller is the member's own slot, the larger has one slot per member
Manner = Literal["freely", "same", "slot", "never"]

_OPS: dict[type[Op], Manner] = {
    CastOp: "same",
    CollectivePermute: "never",
    LaunchKernel: "same",
    LocalSlice: "same",
    PostOnStream: "freely",
    **dict.fromkeys(VIEW_OPS, "same"),
}
_COLLECTIVES: dict[str, Manner] = {
    "Allgather": "slot",
    "Allreduce": "same",
    "AllToAll": "never",
    "Broadcast": "same",
    "Gather": "slot",
    "Reduce": "same",
    "ReduceScatter": "slot",
    "Scatter": "slot",
}
NEEDS = {
    "same": "must be its operand element on element, or have memory of its own",
    "slot": "may share this rank's own slot with its operand, no other memory",
    "never": "needs memory of its own",
}


def manner(op: Op) -> Manner:
    """Return how an operand and a result of an op may lie in one buffer."""
    if isinstance(op, Communication):
        return _COLLECTIVES[op.type]
    if isinstance(op, LibraryOp):
        return "never"
    return _OPS.get(type(op), "freely" if isinstance(op, TensorOp) else "same")


def pairs(effects: Sequence[Effect]) -> list[tuple[Reads | Writes, Writes]]:
    """Return the operands with each result, and each result with the later ones."""
    touched = [e for e in effects if isinstance(e, Reads | Writes)]
    return [
        (a, b)
        for k, b in enumerate(touched)
        if isinstance(b, Writes)
        for j, a in enumerate(touched)
        if isinstance(a, Reads) or j < k
    ]


def words(op: Op, a: TensorView, b: TensorView, *, is_read: bool) -> str:
    """Return what is wrong where `a`, an operand or another result, shares memory with `b`."""
    if not is_read:
        which = f"{a.label} is two of its results" if a is b else f"results {a.label}, {b.label}"
        return f"{which}{'' if a is b else ' share memory'}: each needs memory of its own"
    both = f"{b.label} is read and written" if a is b else f"writes {b.label} over {a.label}"
    return f"{both}: the result of {op.name} {NEEDS[manner(op)]}"
