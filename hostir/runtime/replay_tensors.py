"""How the ops of tensors that no kernel computes are repeated: views, products, torch's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from fuser.ir.dtypes import to_torch
from fuser.ir.fusion import TensorOp
from fuser.ir.op import Op
from fuser.ir.ops import nodes
from fuser.ir.scalar import constructors as sc
from fuser.ir.scalar.constructors import Scalar, Symbol
from fuser.ir.tensor import TensorView
from fuser.ops.reference.library_calls import LibraryCall, Returning, WritingOne
from fuser.ops.reference.matmul_calls import Product, bind_contraction
from fuser.ops.reference.meaning import NODES
from hostir.ir.shard_layout import is_repeated, share_storage, write
from hostir.runtime.frame import ExecutionContext, Frame
from hostir.runtime.library_kernels import kernels_of
from hostir.runtime.steps import Closure, Multiply, Slots, Step
from hostir.runtime.torch_ops import as_contracted, compute, contract_repeated, library_call

if TYPE_CHECKING:
    from hostir.runtime.recorder import Recorder


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
    row = NODES[type(op)]
    if row.into is None or row.may_return:
        of.let_results_be_buffers(op)
    outs = {o: (of.slot(o), of.frame.tensors[o]) for o in op.outputs}
    return writing(op, of.frame, _tensor_slots(of, op), _scalar_slots(of), outs, of.machine)


def writing(
    op: TensorOp,
    frame: Frame,
    tensors: Sequence[tuple[TensorView, int]],
    scalars: Sequence[tuple[Symbol, int]],
    outs: Mapping[TensorView, tuple[int, torch.Tensor]],
    machine: ExecutionContext | None = None,
) -> Closure:
    """Return what writes the results of an op into the tensors of slots.

    `outs` has the slot of each result and a tensor that lies like it.

    Torch writes by itself where it can: the first run binds its call, for all runs of the class.
    """
    slot_of = dict(tensors)
    ins = [slot_of[v] for v in op.inputs if isinstance(v, TensorView)]
    put = _putting(op, frame, outs, ins)
    compute_step = computing(op, frame, tensors, scalars, machine)
    changes = {s for s, _ in scalars}
    numbers = [v for v in op.inputs if isinstance(v, Scalar)]
    if NODES[type(op)].into is None or any(changes & {*sc.symbols(v)} for v in numbers):
        return lambda slots: put(slots, compute_step(slots))
    may_return = NODES[type(op)].may_return
    into = [outs[o][0] for o in op.outputs]
    buffers = [Lying.of(o, outs[o][1]) for o in op.outputs]
    known = frame.values, frame.storage.unread
    where = (machine or frame.machine).device
    kernels = kernels_of(where) if where.type == "cuda" else None

    def results(slots: Slots) -> list[torch.Tensor]:
        pairs = zip(into, buffers, strict=True)
        return [buffer.make(where) if slots[i] is None else slots[i] for i, buffer in pairs]

    def bind(slots: Slots) -> Closure:
        given = [slots[i] for i in ins]
        call = library_call(op, given, results(slots), known, kernels)
        if call is None:
            return lambda slots: put(slots, compute_step(slots))
        if isinstance(call, Returning):
            keeps = isinstance(op, nodes.LibraryOp) and op.MAKES_RESULTS
            store = _keeping(op, frame, outs) if keeps else put
            if keeps and call.direct is not None:
                return _first_kept(call, ins, (into[0], buffers[0]), store)
            return lambda slots: store(slots, call.make([slots[i] for i in ins]))
        if may_return:
            return lambda slots: _write_all(slots, call, ins, into, results(slots))
        if isinstance(call, WritingOne):
            function, numbers, a, b = call.function, call.numbers, ins[0], into[call.out]
            return lambda slots: function(slots[a], *numbers, out=slots[b])
        if len(ins) == len(into) == 1:
            (a,), (b,) = ins, into
            return lambda slots: call((slots[a],), (slots[b],))
        return lambda slots: call([slots[i] for i in ins], [slots[i] for i in into])

    bound: list[Closure] = []

    def write_results(slots: Slots) -> None:
        if not bound:
            bound.append(bind(slots))
        bound[0](slots)

    return write_results


def _write_all(
    slots: Slots, call: LibraryCall, ins: list[int], into: list[int], made: list[torch.Tensor]
) -> None:
    """Write results, of which some were not made before."""
    call([slots[i] for i in ins], made)
    for i, result in zip(into, made, strict=True):
        slots[i] = result


class Lying(NamedTuple):
    """The memory layout of the buffer of a result."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tv: TensorView, like: torch.Tensor) -> Lying:
        return Lying(tuple(like.shape), like.stride(), to_torch(tv.dtype()))

    def make(self, device: torch.device) -> torch.Tensor:
        """Return memory for the result."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def is_of(self, value: torch.Tensor, ins: Sequence[torch.Tensor]) -> bool:
        """Whether a value lies so, in memory that no operand has."""
        return (
            (tuple(value.shape), value.stride(), value.dtype) == self
            and not (value.is_conj() or value.is_neg() or value.storage_offset())
            and not any(share_storage(value, x) for x in ins)
        )


def _putting(
    op: TensorOp,
    frame: Frame,
    outs: Mapping[TensorView, tuple[int, torch.Tensor]],
    ins: Sequence[int],
) -> Callable[[Slots, Sequence[torch.Tensor]], None]:
    """Return what copies values that are read into the tensors of slots; into a slot without a
    tensor it puts the value itself, where that lies as the buffer would."""
    puts = [
        (slot, writer(like), Lying.of(o, like), o not in frame.storage.unread)
        for o, (slot, like) in ((o, outs[o]) for o in op.outputs)
    ]

    def put(slots: Slots, values: Sequence[torch.Tensor]) -> None:
        for value, (slot, write_into, buffer, is_read) in zip(values, puts, strict=True):
            if slots[slot] is None:
                if not is_read or buffer.is_of(value, [slots[k] for k in ins]):
                    slots[slot] = value
                    continue
                slots[slot] = buffer.make(value.device)
            if is_read:
                write_into(slots[slot], value)

    return put


def _keeping(
    op: TensorOp, frame: Frame, outs: Mapping[TensorView, tuple[int, torch.Tensor]]
) -> Callable[[Slots, Sequence[torch.Tensor]], None]:
    """Return what `_putting` does, for values in memory of their own."""
    read = [
        (k, slot, writer(like), Lying.of(o, like))
        for k, o in enumerate(op.outputs)
        if o not in frame.storage.unread
        for slot, like in [outs[o]]
    ]

    def keep(slots: Slots, values: Sequence[torch.Tensor]) -> None:
        for k, slot, write_into, buffer in read:
            value = values[k]
            if slots[slot] is None:
                if value.stride() == buffer.strides and value.dtype is buffer.dtype:
                    slots[slot] = value
                    continue
                slots[slot] = buffer.make(value.device)
            write_into(slots[slot], value)

    return keep


def _first_kept(
    call: Returning,
    ins: Sequence[int],
    into: tuple[int, Lying],
    store: Callable[[Slots, Sequence[torch.Tensor]], None],
) -> Closure:
    """Return what calls `direct` on the tensors of slots and keeps its first result, as `_keeping`
    does, for two operands or more: few steps of the host beside torch's own call."""
    direct, (out, (shape, strides, dtype)) = call.direct, into
    is_dense = strides == torch.empty(shape, device="meta").stride()
    assert direct is not None
    a, b, *more = (ins[place] for place in call.places)

    def keep(slots: Slots, values: Sequence[torch.Tensor]) -> None:
        first = values[0]
        if is_dense and slots[out] is None and first.stride() != strides:
            # Memory and a copy by one call; itself where only strides of single elements differ.
            first = first.contiguous()
        if slots[out] is None and first.stride() == strides and first.dtype is dtype:
            slots[out] = first
        else:
            store(slots, values)

    if len(more) == 1:
        (c,) = more
        return lambda slots: keep(slots, direct(slots[a], slots[b], slots[c]))
    return lambda slots: keep(slots, direct(slots[a], slots[b], *[slots[i] for i in more]))


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
    machine: ExecutionContext | None = None,
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
