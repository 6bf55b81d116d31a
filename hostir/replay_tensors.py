"""How the ops of tensors that no kernel computes are repeated: views, products, torch's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from fuser.ir import nodes
from fuser.ir import scalar as sc
from fuser.ir.core import Op
from fuser.ir.nodes import TensorOp
from fuser.ir.scalar import Scalar, Symbol
from fuser.ir.tensor import TensorView
from fuser.ops.library_calls import Call
from fuser.ops.products import Product, bind_contraction
from fuser.ops.torch_meaning import NODES
from hostir.frame import Frame, Machine
from hostir.layout import is_repeated, write
from hostir.library import as_contracted, compute, contract_repeated, library_call
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
        return _written(of, op)
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


def _written(of: Recorder, op: TensorOp) -> Closure:
    outs = {o: (of.slot(o), of.frame.tensors[o]) for o in op.outputs}
    return writing(op, of.frame, _tensor_slots(of, op), _scalar_slots(of), outs, of.machine)


def writing(
    op: TensorOp,
    frame: Frame,
    tensors: Sequence[tuple[TensorView, int]],
    scalars: Sequence[tuple[Symbol, int]],
    outs: Mapping[TensorView, tuple[int, torch.Tensor]],
    machine: Machine | None = None,
) -> Closure:
    """Return what writes the results of an op into the tensors of slots.

    `outs` has the slot of each result and a tensor that lies like it.

    Torch writes by itself where it can: the first run binds its call, for all runs of the class.
    """
    copy = _copying(op, frame, computing(op, frame, tensors, scalars, machine), outs)
    changes = {s for s, _ in scalars}
    if NODES[type(op)].into is None or any(
        not changes.isdisjoint(sc.symbols(v)) for v in op.inputs if isinstance(v, Scalar)
    ):
        return copy
    slot_of = dict(tensors)
    ins = [slot_of[v] for v in op.inputs if isinstance(v, TensorView)]
    into = [outs[o][0] for o in op.outputs]
    calls: list[Call | None] = []

    def write_results(slots: Slots) -> None:
        given, results = [slots[i] for i in ins], [slots[i] for i in into]
        if not calls:
            calls.append(library_call(op, given, results, frame))
        call = calls[0]
        if call is None:
            copy(slots)
        else:
            call(given, results)

    return write_results


def _copying(
    op: TensorOp,
    frame: Frame,
    compute_step: Callable[[Slots], list[torch.Tensor]],
    outs: Mapping[TensorView, tuple[int, torch.Tensor]],
) -> Closure:
    """Return what computes values and copies those that are read into the tensors of slots."""
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
    return computing(op, of.frame, _tensor_slots(of, op), _scalar_slots(of), of.machine)


def _tensor_slots(of: Recorder, op: TensorOp) -> list[tuple[TensorView, int]]:
    return [(v, of.slot(v)) for v in op.inputs if isinstance(v, TensorView)]


def _scalar_slots(of: Recorder) -> list[tuple[Symbol, int]]:
    return [(s, of.slot(s)) for s in of.free]


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
