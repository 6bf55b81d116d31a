"""Tensor ops that torch carries out: library calls into allocated outputs, and views.

Sizes are those of the local shards, so ops that name a shape take it from there.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch

from fuser.ir.fusion import TensorOp
from fuser.ir.ops import nodes
from fuser.ir.tensor import TensorView
from fuser.ops.reference.library_calls import CallOperands, Kernels, LibraryCall, Returning
from fuser.ops.reference.meaning import bind_call, evaluate_into, evaluate_op
from fuser.support.errors import UnsupportedError
from hostir.ir.shard_layout import is_repeated, write
from hostir.lowering.random_offsets import check_places
from hostir.runtime.frame import Frame
from hostir.runtime.inputs import Values

_Shape = tuple[int, ...]
# Views that name their shape: the torch function of (input, local shape of the output).
SHAPED: dict[type[TensorOp], Callable[[torch.Tensor, _Shape], torch.Tensor]] = {
    nodes.ReshapeOp: lambda x, shape: x.reshape(shape),
    nodes.ExpandOp: lambda x, shape: x.expand(shape),
}


def compute(op: TensorOp, frame: Frame) -> list[torch.Tensor]:
    """Return the op's results: views where torch can make them; of any size what nobody reads."""
    shaped = SHAPED.get(type(op))
    if shaped is not None:
        return [shaped(frame.tensors[op.inputs[0]], frame.local_shape(op.out_tensor))]
    check_places([op])
    inputs = [frame.tensors[v] if isinstance(v, TensorView) else None for v in op.inputs]
    unread = frame.storage.unread
    return evaluate_op(op, inputs, frame.values, device=frame.machine.device, unread=unread)


def compute_into(op: TensorOp, frame: Frame, outs: Sequence[torch.Tensor]) -> None:
    """Write the op's results into `outs`."""
    if isinstance(op, nodes.Contraction):
        inputs, out = [frame.tensors[v] for v in op.inputs], as_contracted(op, outs[0])
        (contract_repeated if is_repeated(out) else evaluate_into)(op, inputs, out)
        return
    ins = [frame.tensors[v] for v in op.inputs if isinstance(v, TensorView)]
    # By the host alone: what no later run would tell at once is told here.
    call = library_call(op, ins, outs, (frame.values, frame.storage.unread))
    if call is not None and not isinstance(call, Returning):
        call(ins, outs)
        return
    values = compute(op, frame) if call is None else call.make(ins)
    for result, out, value in zip(op.outputs, outs, values, strict=True):
        if result not in frame.storage.unread:
            write(out, value)


def library_call(
    op: TensorOp,
    ins: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    known: tuple[Values, Container[TensorView]],
    kernels: Kernels | None = None,
) -> LibraryCall | Returning | None:
    """Return what writes the results of an op into tensors like these, of operands like these, or
    returns them; None where they are computed op by op of torch. `known` has the values of symbols
    and what nothing reads."""
    if any(out.is_meta or is_repeated(out) for out in outs):
        return None
    check_places([op])
    values, unread = known
    reads = [out not in unread for out in op.outputs]
    return bind_call(op, CallOperands(ins, outs, values, reads, kernels))


def contract_repeated(
    op: nodes.Contraction, inputs: Sequence[torch.Tensor], out: torch.Tensor
) -> None:
    """Compute a contraction into `out`, of which memory holds one element along some axes."""
    whole = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    evaluate_into(op, inputs, whole)
    write(out, whole)


def as_contracted(op: TensorOp, out: torch.Tensor) -> torch.Tensor:
    """Return the output without the axes that number the ranks or steps of a partial result.

    Their size is 1 here. Raises `UnsupportedError` for a result that keeps reduced elements apart.
    """
    axes = op.out_tensor.domain.no_reductions
    if not any(axis.rfactor for axis in axes):
        return out
    for position, axis in reversed(list(enumerate(axes))):
        if axis.rfactor:
            if out.shape[position] != 1:
                raise UnsupportedError(
                    f"{op.name} {op.out_tensor.label} keeps {out.shape[position]} parts of its "
                    f"reduced axis ({axis}) on one device; rfactor the part that stays local "
                    f"instead{f', user code at {op.where}' if op.where else ''}"
                )
            out = out.squeeze(position)
    return out
