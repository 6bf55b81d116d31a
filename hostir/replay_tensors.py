"""How the ops of tensors that no kernel computes are repeated: views, products, torch's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from fuser.ir import nodes
from fuser.ir.core import Op
from fuser.ir.nodes import TensorOp
from fuser.ir.scalar import Symbol
from fuser.ir.tensor import TensorView
from fuser.ops.products import Product, bind_contraction
from hostir.frame import Frame, Machine
from hostir.layout import is_repeated, write
from hostir.library import as_contracted, compute, contract_repeated
from hostir.steps import Closure, Multiply, Slots, Step

if TYPE_CHECKING:
    from hostir.replay import Recorder


class OnlyRunTells(Exception):
    """Torch chooses how a result lies in memory: that is known when it has been computed."""


def tensor_op(of: Recorder, op: Op) -> Step | Closure:
    assert isinstance(op, TensorOp), f"{op.name} cannot be replayed"
    if all(out in of.frame.storage.buffered for out in op.outputs):
        return _into(of, op)
    view = of.as_strided(op)
    if view is None and of.is_rehearsal:
        raise OnlyRunTells
    return view if view is not None else _computed(of, op)


def _into(of: Recorder, op: TensorOp) -> Step | Closure:
    if not isinstance(op, nodes.Contraction):
        return _copied(of, op)
    tensors = of.frame.tensors
    ins, out = tuple(of.slot(v) for v in op.inputs), of.slot(op.out)
    return contraction(op, (ins, out), [tensors[v] for v in op.inputs], tensors[op.out])


def contraction(
    op: nodes.Contraction,
    slots: tuple[tuple[int, ...], int],
    operands: Sequence[torch.Tensor],
    sample: torch.Tensor,
) -> Step | Closure:
    """Return the step that computes a product for operands and a result that lie like these; they
    are in these slots."""
    ins, out = slots
    result = as_contracted(op, sample)
    if is_repeated(result):
        return lambda slots: contract_repeated(
            op, [slots[i] for i in ins], as_contracted(op, slots[out])
        )
    way = bind_contraction(op, operands, result)
    if isinstance(way, Product) and result is sample:
        return Multiply(way, ins, out)

    def contract(slots: Slots) -> None:
        way([slots[i] for i in ins], slots[out])

    def contract_partial(slots: Slots) -> None:
        way([slots[i] for i in ins], as_contracted(op, slots[out]))

    return contract if result is sample else contract_partial


def _copied(of: Recorder, op: TensorOp) -> Closure:
    outs = {o: (of.slot(o), of.frame.tensors[o]) for o in op.outputs}
    return copying(op, of.frame, _computing(of, op), outs)


def copying(
    op: TensorOp,
    frame: Frame,
    compute_step: Callable[[Slots], list[torch.Tensor]],
    outs: Mapping[TensorView, tuple[int, torch.Tensor]],
) -> Closure:
    """Return what computes values and copies those that are read into the tensors of slots; `outs`
    has the slot of each result and a tensor that lies like it."""
    read = [(i, *outs[o]) for i, o in enumerate(op.outputs) if o not in frame.storage.unread]
    puts = [(i, slot, writer(like)) for i, slot, like in read]

    def copy(slots: Slots) -> None:
        values = compute_step(slots)
        for i, slot, put in puts:
            put(slots[slot], values[i])

    return copy


def writer(like: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """Return how values are copied into a tensor of this layout."""
    return write if is_repeated(like) else torch.Tensor.copy_


def _computed(of: Recorder, op: TensorOp) -> Closure:
    compute_step, outs = _computing(of, op), [of.new_slot(o) for o in op.outputs]

    def assign(slots: Slots) -> None:
        for out, value in zip(outs, compute_step(slots), strict=True):
            slots[out] = value

    return assign


def _computing(of: Recorder, op: TensorOp) -> Callable[[Slots], list[torch.Tensor]]:
    tensors = [(v, of.slot(v)) for v in op.inputs if isinstance(v, TensorView)]
    scalars = [(s, of.slot(s)) for s in of.free]
    return computing(op, of.frame, tensors, scalars, of.machine)


def computing(
    op: TensorOp,
    frame: Frame,
    tensors: Sequence[tuple[TensorView, int]],
    scalars: Sequence[tuple[Symbol, int]],
    machine: Machine | None = None,
) -> Callable[[Slots], list[torch.Tensor]]:
    """Return how torch computes an op on the tensors and scalars of slots; on the machine of the
    frame, or on another."""
    program, storage, values, indices = frame.program, frame.storage, frame.values, frame.indices
    where = machine or frame.machine

    def run(slots: Slots) -> list[torch.Tensor]:
        now = Frame(
            program,
            where,
            storage,
            {**values, **{s: slots[i] for s, i in scalars}},
            {v: slots[i] for v, i in tensors},
            indices=indices,
        )
        return compute(op, now)

    return run
