"""Checks the buffers that a caller provides for results, and the memory that the buffers share.

A result is written while the program runs. Two cases of shared memory need a check:

- The buffer shares elements with an input. Then no later op may read the input. The op that writes
  the buffer may read the input only if the op can work in place.
- Two buffers share elements. Such buffers always raise an error, because one result would be lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

import torch

from fuser.ir.binding import Argument, tensor_problem
from fuser.ir.dtypes import to_torch
from fuser.ir.fusion import TensorView, Value
from fuser.ir.memory_layout import expanded_positions
from fuser.ir.op import Op, walk
from fuser.ir.ops import nodes
from fuser.ir.scalar.constructors import Symbol
from fuser.support.arguments import show
from fuser.support.errors import CommunicationError, InputError, user_code
from fuser.support.inputs import flatten
from hostir.analysis.walker import EachOpOnce, Walk
from hostir.ir.buffer_aliasing import Storage, buffer_sharing_of
from hostir.ir.effects import Makes, Part, Reads, Writes, effects_of
from hostir.ir.ops import AxisOrder, ForLoop, IfThenElse, SetCurrentStream, StartsCommunication
from hostir.ir.program import HostIrContainer
from hostir.runtime.communication import flat
from hostir.runtime.frame import Frame
from hostir.runtime.inputs import overlaps_itself, share_elements

_POINTWISE = (nodes.UnaryOp, nodes.BinaryOp, nodes.TernaryOp, nodes.CastOp, nodes.LoadStoreOp)


def inputs_and_buffers(
    program: HostIrContainer, values: Mapping[Value, Argument]
) -> tuple[list[Argument], dict[TensorView, Argument]]:
    """Splits a caller's `values` into the program's inputs and the buffers for results.

    Returns (list of inputs, buffers by tensor of the program). Raises `InputError` for an input
    without a value, and for a key that is not in the program.
    """
    if not isinstance(values, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            f"Expected a dict from each input of the program to its value, but got {show(values)}"
        )
    missing = [i for i, v in enumerate(program.inputs) if v not in values]
    if missing:
        i = missing[0]
        raise InputError(f"Expected a value for input {i}, {program.inputs[i]}, but got none")
    inputs = flatten([values[v] for v in program.inputs])
    tensors = program.tensors()
    given = {v: t for v, t in values.items() if v not in program.inputs}
    for stranger in (v for v in given if v not in tensors):
        raise InputError(
            f"{show(stranger)} is not a tensor or scalar of this program: pass a value for each "
            "input, and buffers only for tensors of the program"
        )
    return inputs, {v: t for v, t in given.items() if isinstance(v, TensorView)}


def bind_buffers(frame: Frame, given: Mapping[TensorView, object]) -> None:
    """Stores the caller's buffers in `frame`, so that the run writes the results into the buffers.

    `frame` is the state of the run. `given` has the buffer of each result. Raises `InputError` for
    a buffer that does not fit its result. Also raises `InputError` if a buffer shares memory with
    another buffer or an input, so that a value would be lost.
    """
    buffers = {tv: _buffer(frame, tv, t) for tv, t in given.items()}
    _check_pairs(buffers)
    shared = [
        (tv, x)
        for tv, buffer in buffers.items()
        for x, other in frame.tensors.items()
        if share_elements(buffer, other)
    ]
    frame.storage = frame.storage.with_buffers(buffers)
    if shared:
        uses = _BufferUses(frame, buffers)
        for tv, x in shared:
            uses.check(tv, x, is_same=_box(buffers[tv]) == _box(frame.tensors[x]))
    frame.tensors.update(buffers)
    _check_transfers(frame, buffers)


def _buffer(frame: Frame, tv: TensorView, given: object) -> torch.Tensor:
    whole = frame.storage.root(tv)
    if any(a.out is tv and a.into is frame.storage.shows.get(tv) for a in frame.program.aliases):
        raise InputError(
            f"{tv} updates the input {whole} in place, so it cannot have another buffer: pass no "
            f"buffer for {tv}"
        )
    if tv in frame.storage.named:
        raise InputError(f"{tv} is a part of {whole}: pass a buffer for {whole} instead")
    if not isinstance(given, torch.Tensor):
        raise InputError(f"Expected a tensor as the buffer of {tv}, but got {show(given)}")
    problem = tensor_problem(given)
    if problem:
        raise InputError(f"Expected a plain tensor as the buffer of {tv}, but it is {problem}")
    expected = frame.local_shape(tv), to_torch(tv.dtype()), frame.machine.device
    found = tuple(given.shape), given.dtype, given.device
    if found != expected:
        wanted, got = (
            f"{shape}, {dtype} on {device}" for shape, dtype, device in (expected, found)
        )
        raise InputError(
            f"Expected a tensor of shape {wanted} as the buffer of {tv}, but got {got}"
        )
    stored = given
    for axis in expanded_positions(tv):
        stored = stored.narrow(axis, 0, min(1, stored.size(axis)))
    if overlaps_itself(stored):
        raise InputError(
            f"Expected a tensor with memory for every element as the buffer of {tv}, but got shape "
            f"{found[0]} with strides {given.stride()}"
        )
    return given


def _check_pairs(buffers: Mapping[TensorView, torch.Tensor]) -> None:
    for (first, a), (second, b) in combinations(buffers.items(), 2):
        if share_elements(a, b):
            raise InputError(
                f"the buffers of {first} and {second} share elements, so one result would be lost: "
                "pass separate buffers"
            )


def _check_transfers(frame: Frame, buffers: Mapping[TensorView, torch.Tensor]) -> None:
    """Raises `InputError` if no backend can send or receive a caller's buffer, because its strides
    leave gaps.

    Without this check, the backend would raise the error when other ranks already wait.
    """
    for op in frame.program.started():
        for tv in (*op.inputs, *op.outputs):
            if isinstance(tv, TensorView) and tv in buffers and frame.is_mine(tv):
                try:
                    flat(op, tv, buffers[tv], AxisOrder.of(tv))
                except CommunicationError as error:
                    raise InputError(f"{error}{user_code(op.where)}") from None


def _box(t: torch.Tensor) -> object:
    return t.data_ptr(), t.shape, t.stride(), t.dtype


# ------------------------------------------------------------------ uses in program order
@dataclass(frozen=True)
class _Use:
    """One use of a buffer by an op of the program: a read or a write.

    - `at`: the position of the op in the program. All ops in a loop have the position of the loop.
    - `loops`: the indices of the loops around the op.
    - `tensor`: the tensor that is the whole buffer.
    - `parts`: the selections (of an element or a chunk along an axis), applied one after another,
      that lead from the buffer to the part that the op uses.
    """

    op: Op
    at: int
    loops: tuple[Symbol, ...]
    tensor: TensorView
    parts: tuple[Part | None, ...]
    is_write: bool


class _BufferUses(Walk[None]):
    """The reads and writes of all buffers by the ops of a program, in program order.

    `given` are the tensors for which the caller provides buffers.
    """

    def __init__(self, frame: Frame, given: Iterable[TensorView]) -> None:
        super().__init__(EachOpOnce())
        self._frame, self._given = frame, frozenset(given)
        self._all: list[_Use] = []
        # The position at which the outermost open loop begins.
        self._loop_begin = 0
        self.run(frame.program.ops)
        in_turn = SetCurrentStream | StartsCommunication
        # Ops on streams, and communications, may run concurrently with later ops.
        self._is_ordered = not any(isinstance(o, in_turn) for o in walk(frame.program.ops))

    def on_region(self, op: ForLoop | IfThenElse) -> None:
        """Handles a loop or branch before its ops. Records where an outermost loop begins in the
        program, because all ops in the loop count as one position; other regions need no record.
        """
        if isinstance(op, ForLoop) and not self.indices:
            self._loop_begin = len(self._all)

    def on_op(self, op: Op) -> None:
        """Handles an op of the program: records the buffers that `op` reads and writes, which
        `check` compares later.
        """
        storage = self._frame.storage
        if self._frame.is_idle(op):
            return
        loops = tuple(index for index, _ in self.indices)
        at = self._loop_begin if loops else len(self._all)
        for effect in effects_of(op, storage.buffered):
            if isinstance(effect, Reads | Writes | Makes):
                whole, parts = self._named(effect.tensor, storage)
                if isinstance(effect, Makes) and not effect.is_filled:
                    continue
                is_write = not isinstance(effect, Reads)
                self._all.append(_Use(op, at, loops, whole, parts, is_write))

    def _named(
        self, tv: TensorView, storage: Storage
    ) -> tuple[TensorView, tuple[Part | None, ...]]:
        parts: list[Part | None] = []
        while tv in storage.shows and tv not in self._given:
            parts.append(storage.parts.get(tv))
            tv = storage.shows[tv]
        return tv, tuple(parts)

    def check(self, tv: TensorView, x: TensorView, *, is_same: bool) -> None:
        """Raises `InputError` if the program would read the input `x` after it was overwritten. The
        caller passes a buffer for the result `tv` that shares memory with `x`, so an op that writes
        `tv` overwrites `x`.

        `is_same` is whether the buffer has the same address, shape and strides as `x`.
        """
        program = self._frame.program
        what = f"the buffer of {tv} shares elements with input {program.inputs.index(x)}, {x}"
        if x in (self._named(out, self._frame.storage)[0] for out in program.outputs):
            raise InputError(f"{what}, which is also an output: pass a separate buffer")
        written = [u for u in self._all if u.tensor is tv and u.is_write]
        for use in (u for u in self._all if u.tensor is x):
            if use.is_write:
                raise InputError(
                    f"{what}, which is updated in place: pass a separate buffer"
                    f"{user_code(use.op.where)}"
                )
            for write in written:
                if self._is_ordered and use.at < write.at:
                    continue
                if use.op is write.op and _is_in_place(use, write, is_same=is_same):
                    continue
                raise InputError(
                    f"{what}, which {use.op.name} reads although {write.op.name} may have "
                    "overwritten it already: pass a buffer with memory of its own"
                    f"{user_code(use.op.where)}"
                )


def _is_in_place(use: _Use, write: _Use, *, is_same: bool) -> bool:
    """Whether one op may read and write the same memory, because it reads exactly the elements that
    it overwrites, in every iteration of its loops.

    `use` is the op's read of a buffer, and `write` is its write of a buffer with the same memory.
    `is_same` is whether both buffers have the same address, shape and strides.
    """
    op = use.op
    is_permuted = isinstance(op, nodes.LoadStoreOp) and bool(op.out.domain.root_numbers)
    is_elementwise = isinstance(op, _POINTWISE) and not is_permuted
    if not use.loops and buffer_sharing_of(op) == "freely":
        return True
    steps = {p.index for p in write.parts if p is not None}
    return is_elementwise and is_same and use.parts == write.parts and steps.issuperset(use.loops)
