"""Insertion of Deallocate: every buffer is given up after its last use."""

from __future__ import annotations

from fuser.errors import VerifyError
from fuser.ir.core import Op
from fuser.ir.tensor import TensorView
from hostir.container import HostIrContainer
from hostir.ops import Communication, Deallocate, Wait
from hostir.storage import Storage


def insert_deallocate(program: HostIrContainer) -> HostIrContainer:
    """Give up every tensor after the last use of its buffer.

    Holds before: no Deallocate. Holds after: every tensor that does not share a buffer with a
    program input or output is deallocated exactly once, views before the buffer that they show.
    The memory plan and `hostir.verify` rely on it.

        T2 = ALLOCATE(..); LaunchKernel(.. T2); T3 = matmul(T2, T1)
        -> ... T3 = matmul(T2, T1); Deallocate { T2 }
    """
    if any(isinstance(op, Deallocate) for op in program.ops):
        raise VerifyError("insert_deallocate: the program has a Deallocate already")
    storage = Storage.of(program)
    last = _last_uses(program.ops, storage)
    ops: list[Op] = []
    for i, op in enumerate(program.ops):
        ops.append(op)
        ending = [tv for tv in reversed(storage.tensors) if last.get(tv) == i]
        ops += [Deallocate(tv) for tv in ending if not storage.escapes(tv)]
    return program.with_ops(tuple(ops))


def _last_uses(ops: tuple[Op, ...], storage: Storage) -> dict[TensorView, int]:
    """Return where each tensor's buffer is touched last; a communication ends at its Wait."""
    last: dict[TensorView, int] = {}
    in_flight: dict[int, tuple[TensorView, ...]] = {}
    for i, op in enumerate(ops):
        touched = [v for v in (*op.inputs, *op.outputs) if isinstance(v, TensorView)]
        if isinstance(op, Communication):
            in_flight[op.number] = tuple(touched)
        if isinstance(op, Wait):
            touched = list(in_flight.get(op.number, ()))
        for tv in touched:
            # A view keeps the buffer that it shows, but a buffer does not keep its other views.
            while True:
                last[tv] = i
                shown = storage.shown_by(tv)
                if shown is None:
                    break
                tv = shown
    return last
