"""`FUSER_DUMP=communication`: each communication when it is posted."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fuser.ir.op import Op, op_text
from fuser.ir.tensor import TensorView
from fuser.support import dumps
from hostir.ir.transfers import PEER_COPIES, StartsCommunication
from hostir.runtime.frame import ExecutionContext

Find = Callable[[TensorView], torch.Tensor | None]


def announcer(op: Op, machine: ExecutionContext) -> Callable[[Find], None] | None:
    """Return what writes down that `op` is posted, given what finds its shards.

    Where another library than the one that the op names carries it out, the line says which. None
    for an op that posts nothing, and where nobody asked; a recorded program asks once, when it is
    recorded.
    """
    if not (isinstance(op, StartsCommunication) and (op.inputs or op.outputs)):
        return None
    write = dumps.lines("communication", "this process", rank=machine.rank)
    if write is None:
        return None
    names = {"operand": "input_tensor", "result": "output_tensor"}
    fields = [(names[kind], n) for kind in names for n in op.fields_of(kind)]  # pyright: ignore[reportArgumentType]
    tensors = [(what, tv) for what, n in fields if isinstance(tv := getattr(op, n), TensorView)]

    def announce(find: Find) -> None:
        found = [(what, find(tv)) for what, tv in tensors]
        sizes = (f"{what} {'none' if t is None else list(t.shape)}" for what, t in found)
        write(f"Posting {op_text(op)}{_carrier(op, machine)} with {' and '.join(sizes)}")

    return announce


def _carrier(op: StartsCommunication, machine: ExecutionContext) -> str:
    named = getattr(op, "backend", PEER_COPIES)
    library = named if named == PEER_COPIES else machine.backend(named).name.upper()
    return f", carried out by {library}," if library != named else ""
