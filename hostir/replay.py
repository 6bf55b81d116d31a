"""Replay: a program bound to one class of inputs, as a flat list of closures over slots.

The first run of a class is the reference evaluation; after each op the *recorder* notes what a
later run has to repeat: sizes, strides, teams and kernel launches are fixed, only tensors change.
Intermediates lie in an arena (`hostir.arena`); what a caller gets is allocated by every run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fuser.ir import nodes
from fuser.ir.core import Op
from fuser.ir.dtypes import to_torch
from fuser.ir.nodes import TensorOp
from fuser.ir.scalar import Scalar, Symbol
from fuser.ir.tensor import TensorView
from fuser.ops.torch_meaning import bind_contraction
from hostir.announce import announcer
from hostir.arena import Arena, Block, first_fit
from hostir.bind import Argument
from hostir.frame import Frame
from hostir.layout import allocated_strides
from hostir.library import as_contracted, compute, contract_repeated, is_repeated, write
from hostir.ops import Allocate, Communication, Deallocate, LaunchKernel, LocalSlice, Wait
from hostir.post import post

Slots = list[Any]
Closure = Callable[[Slots], None]


@dataclass(frozen=True, eq=False)
class Plan:
    """What a class of inputs repeats: the steps, how many slots they need, where outputs lie.

    `blocks` are the buffers that live in an arena of `nbytes`; outputs are allocated by steps.
    `records` tells whether torch would record gradients, of inputs that require some.
    """

    steps: tuple[Closure, ...]
    size: int
    outputs: tuple[int, ...]
    blocks: tuple[Block, ...]
    nbytes: int
    device: torch.device
    records: bool

    def run(self, inputs: list[Argument], arena: Arena) -> list[torch.Tensor]:
        """Carry out the steps on these inputs and return the visible outputs."""
        slots: Slots = [*inputs, *[None] * (self.size - len(inputs))]
        if not self.blocks:
            for step in self.steps:
                step(slots)
            return [slots[i] for i in self.outputs]
        with arena.views(self, self.blocks, self.nbytes, self.device) as views:
            for slot, tensor in views.items():
                slots[slot] = tensor
            for step in self.steps:
                step(slots)
        return [slots[i] for i in self.outputs]


class Recorder:
    """Turns the ops of one reference run into steps."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        inputs = frame.program.inputs
        self._slot: dict[object, int] = {v: i for i, v in enumerate(inputs)}
        self._size = len(inputs)
        self._free = _free_scalars(frame)
        self._records = any(t.requires_grad for t in frame.tensors.values())
        self._steps: list[Closure] = []
        # Buffers and where in the program they begin and end (None: they outlive it).
        self._blocks: dict[TensorView, Block] = {}
        self._begin: dict[TensorView, int] = {}
        self._end: dict[TensorView, int] = {}
        self._position = 0

    def record(self, op: Op) -> None:
        """Note what the op, which has just been carried out, does."""
        self._position += 1
        step = RECORD[type(op)](self, op) if type(op) in RECORD else self._tensor_op(op)
        if step is not None:
            self._steps.append(step)

    def finish(self, outputs: list[TensorView]) -> Plan:
        """Return the plan that yields these tensors."""
        for tv in outputs:
            if not self._frame.is_mine(tv):
                self._steps.append(self._absent(tv))
        blocks, nbytes = self._place()
        fresh = tuple(self._make(b) for tv, b in self._blocks.items() if tv not in self._end)
        return Plan(
            (*fresh, *self._steps),
            self._size,
            tuple(self.slot(t) for t in outputs),
            blocks,
            nbytes,
            self._frame.machine.device,
            self._records,
        )

    def _place(self) -> tuple[tuple[Block, ...], int]:
        """Give every buffer that the program deallocates its place in the arena."""
        tensors = list(self._end)
        tensors.sort(key=self._begin.__getitem__)
        offsets, nbytes = first_fit(
            [(self._begin[t], self._end[t], self._blocks[t].nbytes) for t in tensors]
        )
        placed = zip(tensors, offsets, strict=True)
        return tuple(replace(self._blocks[t], offset=at) for t, at in placed), nbytes

    def _make(self, block: Block) -> Closure:
        """Return the step that makes a buffer which outlives the run."""
        make, device, i = torch.empty_strided, self._frame.machine.device, block.slot
        shape, strides, dtype = block.shape, block.strides, block.dtype

        def allocate(slots: Slots) -> None:
            slots[i] = make(shape, strides, dtype=dtype, device=device)

        return allocate

    def slot(self, value: object) -> int:
        """Return the slot of a tensor, an input scalar or a communication."""
        if value not in self._slot:
            self._slot[value] = self._size
            self._size += 1
        return self._slot[value]

    # ------------------------------------------------------------ ops
    def _absent(self, tv: TensorView) -> Closure:
        i, nothing = self.slot(tv), self._frame.result(tv)

        def absent(slots: Slots) -> None:
            slots[i] = nothing

        return absent

    def _allocate(self, op: Allocate) -> Closure | None:
        tv = op.buffer
        i, shape = self.slot(tv), self._frame.local_shape(tv)
        self._blocks[tv] = Block(i, shape, allocated_strides(tv, shape), to_torch(tv.dtype()))
        self._begin[tv] = self._position

        def clear(slots: Slots) -> None:
            slots[i].zero_()

        return clear if op.zero_init else None

    def _deallocate(self, op: Deallocate) -> Closure | None:
        tv = op.buffer
        if tv in self._blocks:
            self._end[tv] = self._position
            return None
        i = self.slot(tv)

        def deallocate(slots: Slots) -> None:
            slots[i] = None

        return deallocate

    def _launch(self, op: LaunchKernel) -> Closure:
        for out in op.outs:
            if out not in self._slot:
                self._slot[out] = self.slot(self._frame.alias_target(out))
        ins = [self._argument(v) for v in op.ins]
        outs = [self.slot(o) for o in op.outs]
        run, sizes = self._frame.machine.kernel(op.group).run, self._frame.sizes

        def launch(slots: Slots) -> None:
            run([get(slots) for get in ins], [slots[o] for o in outs], sizes=sizes)

        return launch

    def _argument(self, value: TensorView | Scalar) -> Callable[[Slots], Argument]:
        """Return how to read an operand: a slot, or a scalar over the run's input scalars."""
        if isinstance(value, TensorView) or value in self._slot:
            i = self.slot(value)
            return lambda slots: slots[i]
        frame, dynamic = self._frame, self._free
        if not any(s in dynamic for s in _symbols(value)):
            number = frame.number(value)
            return lambda slots: number
        places = {s: self._slot[s] for s in dynamic}

        def evaluate(slots: Slots) -> Argument:
            from fuser.ir.scalar import evaluate

            return evaluate(value, {**frame.values, **{s: slots[i] for s, i in places.items()}})

        return evaluate

    def _communication(self, op: Communication) -> Closure | None:
        frame = self._frame
        team = op.team.ranks(frame.machine.rank)
        if not team:
            return None
        inp, out = (self.slot(t) if frame.is_mine(t) else -1 for t in (op.inp, op.out))
        work, backend = self.slot(("work", op.number)), frame.machine.backend()

        def communicate(slots: Slots) -> None:
            slots[work] = post(
                op,
                team,
                backend,
                slots[inp] if inp >= 0 else None,
                slots[out] if out >= 0 else None,
            )

        announce = announcer(op, frame.machine.rank)
        if announce is None:
            return communicate

        def announced(slots: Slots) -> None:
            announce(*(slots[i] if i >= 0 else None for i in (inp, out)))
            communicate(slots)

        return announced

    def _wait(self, op: Wait) -> Closure | None:
        if ("work", op.number) not in self._slot:
            return None
        work = self.slot(("work", op.number))

        def wait(slots: Slots) -> None:
            slots[work].wait()
            slots[work] = None

        return wait

    def _local_slice(self, op: LocalSlice) -> Closure:
        start, length = self._frame.slice_bounds(op)
        inp, out, axis = self.slot(op.inp), self.slot(op.out), op.axis

        put = self._writer(op.out)

        def local_slice(slots: Slots) -> None:
            put(slots[out], slots[inp].narrow(axis, start, length))

        return local_slice

    def _tensor_op(self, op: Op) -> Closure:
        assert isinstance(op, TensorOp), f"{op.name} cannot be replayed"
        if all(out in self._slot for out in op.outputs):
            return self._into(op)
        view = self._as_strided(op)
        return view if view is not None else self._computed(op)

    def _into(self, op: TensorOp) -> Closure:
        if not isinstance(op, nodes.MatmulOp | nodes.LinearOp):
            return self._copied(op)
        ins, out = [self.slot(v) for v in op.inputs], self.slot(op.out)

        sample = self._frame.tensors[op.out]
        result = as_contracted(op, sample)
        if is_repeated(result):
            return lambda slots: contract_repeated(
                op, [slots[i] for i in ins], as_contracted(op, slots[out])
            )
        way = bind_contraction(op, [self._frame.tensors[v] for v in op.inputs], result)

        def contract(slots: Slots) -> None:
            way([slots[i] for i in ins], slots[out])

        def contract_partial(slots: Slots) -> None:
            way([slots[i] for i in ins], as_contracted(op, slots[out]))

        return contract if result is sample else contract_partial

    def _copied(self, op: TensorOp) -> Closure:
        compute_step, outs = self._computing(op), [self.slot(o) for o in op.outputs]

        puts = [self._writer(o) for o in op.outputs]

        def copy(slots: Slots) -> None:
            for put, out, value in zip(puts, outs, compute_step(slots), strict=True):
                put(slots[out], value)

        return copy

    def _writer(self, tv: TensorView) -> Callable[[torch.Tensor, torch.Tensor], object]:
        """Return how values are copied into a tensor of this layout."""
        return write if is_repeated(self._frame.tensors[tv]) else torch.Tensor.copy_

    def _as_strided(self, op: TensorOp) -> Closure | None:
        """Return a view by sizes and strides; None when the op made no view of its first input."""
        source = op.inputs[0] if op.inputs else None
        if not isinstance(source, TensorView) or len(op.outputs) != 1:
            return None
        before, after = self._frame.tensors[source], self._frame.tensors[op.out_tensor]
        if not after.numel() or after.data_ptr() == 0 or not _share(before, after):
            return None
        i, o = self.slot(source), self.slot(op.out_tensor)
        shape, strides = tuple(after.shape), after.stride()
        shift = after.storage_offset() - before.storage_offset()

        def view(slots: Slots) -> None:
            slots[o] = slots[i].as_strided(shape, strides)

        def shifted_view(slots: Slots) -> None:
            x = slots[i]
            slots[o] = x.as_strided(shape, strides, x.storage_offset() + shift)

        return shifted_view if shift else view

    def _computed(self, op: TensorOp) -> Closure:
        compute_step, outs = self._computing(op), [self.slot(o) for o in op.outputs]

        def assign(slots: Slots) -> None:
            for out, value in zip(outs, compute_step(slots), strict=True):
                slots[out] = value

        return assign

    def _computing(self, op: TensorOp) -> Callable[[Slots], list[torch.Tensor]]:
        frame = self._frame
        tensors = [(v, self.slot(v)) for v in op.inputs if isinstance(v, TensorView)]
        scalars = [(s, self._slot[s]) for s in self._free]

        def run(slots: Slots) -> list[torch.Tensor]:
            now = Frame(
                frame.program,
                frame.machine,
                {**frame.values, **{s: slots[i] for s, i in scalars}},
                {v: slots[i] for v, i in tensors},
            )
            return compute(op, now)

        return run


def _symbols(value: Scalar) -> tuple[Symbol, ...]:
    from fuser.ir.scalar import symbols

    return symbols(value)


def _free_scalars(frame: Frame) -> tuple[Symbol, ...]:
    """Return the input scalars whose value may change within a class of inputs."""
    inputs, free = frame.program.inputs, frame.program.free_inputs()
    scalars = ((i, v) for i, v in enumerate(inputs) if isinstance(v, Symbol))
    return tuple(v for i, v in scalars if i in free or not isinstance(frame.values[v], int))


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


RECORD: dict[type[Op], Callable[[Recorder, Any], Closure | None]] = {
    Allocate: Recorder._allocate,  # pyright: ignore[reportPrivateUsage]
    Deallocate: Recorder._deallocate,  # pyright: ignore[reportPrivateUsage]
    LaunchKernel: Recorder._launch,  # pyright: ignore[reportPrivateUsage]
    Communication: Recorder._communication,  # pyright: ignore[reportPrivateUsage]
    Wait: Recorder._wait,  # pyright: ignore[reportPrivateUsage]
    LocalSlice: Recorder._local_slice,  # pyright: ignore[reportPrivateUsage]
}
