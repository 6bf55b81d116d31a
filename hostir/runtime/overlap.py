"""Inputs that share memory with one that is updated in place.

A program reads old values and writes its updates at the end, as far as anybody can see. Where an
input that is written shares elements with one that is only read, that one is therefore copied for
the run. Two updates that share elements are refused: one would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch.autograd.graph import increment_version

from fuser.ir.binding import Argument
from fuser.support.errors import InputError, user_code
from hostir.ir.buffer_aliasing import Storage
from hostir.ir.effects import Writes, effects_of
from hostir.ir.program import HostIrContainer, walk

Body = Callable[[list[Argument]], list[torch.Tensor]]
_Layout = tuple[tuple[int, ...], tuple[int, ...], int]


def written_inputs(program: HostIrContainer, storage: Storage) -> tuple[int, ...]:
    """Return the positions of the inputs that a program writes into: declared updates, and those of
    its ops."""
    effects = (e for op in walk(program.ops) for e in effects_of(op, storage.buffered))
    written = {storage.root(e.tensor) for e in effects if isinstance(e, Writes)}
    written.update(alias.into for alias in program.aliases)
    return tuple(i for i, value in enumerate(program.inputs) if value in written)


@contextmanager
def noted(tensors: Sequence[Argument], written: Sequence[int]) -> Generator[None]:
    """Tell autograd which of these a run writes, however it ends: a backward pass that needs an old
    value raises."""
    try:
        yield
    finally:
        changed = (tensors[i] for i in written if i < len(tensors))
        if found := [x for x in changed if isinstance(x, torch.Tensor)]:
            increment_version(found)


class Updates:
    """The inputs that a program writes, by position, in the order of its updates."""

    def __init__(self, program: HostIrContainer) -> None:
        self._program = program
        place = {v: i for i, v in enumerate(program.inputs)}
        # Position -> the user's line of the update.
        self._written = {place[a.into]: a.where for a in program.aliases if a.into in place}
        # The addresses that were found to lie apart in the last run.
        self._apart: object = None

    def are_apart(self, inputs: Sequence[Argument], signature: object) -> bool:
        """Whether no updated input shares memory with another input.

        Raises `InputError` where two updated ones have an element in common.
        """
        addresses = [x.data_ptr() if isinstance(x, torch.Tensor) else 0 for x in inputs]
        if self._apart == (signature, addresses):
            return True
        is_apart = not self._shared(inputs)
        if is_apart:
            self._apart = (signature, addresses)
        return is_apart

    def run(self, inputs: list[Argument], body: Body) -> list[torch.Tensor]:
        """Return the outputs of `body` on inputs that share no memory with updated ones."""
        copies = {i: _copy(_tensor(inputs[i])) for i in sorted(self._shared(inputs))}
        outputs = body([copies.get(i, x) for i, x in enumerate(inputs)])
        given = {id(copy): _tensor(inputs[i]) for i, copy in copies.items()}
        return [given.get(id(out), out) for out in outputs]

    def _shared(self, inputs: Sequence[Argument]) -> set[int]:
        """Return the positions of the inputs that are read while another one is written there."""
        tensors = {i: x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.numel()}
        # By address: only neighbours whose ranges of bytes meet are compared.
        order = sorted(tensors, key=lambda i: tensors[i].data_ptr())
        found: set[int] = set()
        open_: list[int] = []
        for i in order:
            x = tensors[i]
            open_ = [j for j in open_ if _end(tensors[j]) > x.data_ptr()]
            for j in open_:
                written = {i, j} & self._written.keys()
                if written and share_elements(tensors[j], x):
                    if len(written) == 2:
                        raise self._lost_update((min(i, j), max(i, j)), inputs)
                    found |= {i, j} - written
            open_.append(i)
        return found

    def _lost_update(self, pair: tuple[int, int], inputs: Sequence[Argument]) -> InputError:
        one, other = (
            f"input {i}, {self._program.inputs[i]} (shape {tuple(x.shape)}, strides {x.stride()}, "
            f"byte {x.data_ptr() - x.untyped_storage().data_ptr()} of its storage)"
            for i, x in ((i, _tensor(inputs[i])) for i in pair)
        )
        where = " and ".join(dict.fromkeys(self._written[i] for i in pair if self._written[i]))
        return InputError(
            f"{one}, and {other}, share elements, and both are updated in place: one update would "
            f"be lost; pass a copy of one{user_code(where)}"
        )


def _tensor(x: Argument) -> torch.Tensor:
    assert isinstance(x, torch.Tensor), f"{x} has no memory"
    return x


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def _end(x: torch.Tensor) -> int:
    return x.data_ptr() + _span(x.shape, x.stride()) * x.element_size()


def _copy(x: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides, gaps and overlaps included."""
    flat = x.as_strided((_span(x.shape, x.stride()),), (1,))
    return flat.clone().as_strided(x.shape, x.stride(), 0)


def share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have a byte in common."""
    if a.device != b.device or not a.numel() or not b.numel():
        return False
    layouts = ((tuple(t.shape), t.stride(), t.element_size()) for t in (a, b))
    return _share(*layouts, b.data_ptr() - a.data_ptr())


@lru_cache(maxsize=1024)
def _share(a: _Layout, b: _Layout, distance: int) -> bool:
    ends = [_span(shape, strides) * size for shape, strides, size in (a, b)]
    if distance >= ends[0] or -distance >= ends[1]:
        return False
    if distance == 0 or (_is_dense(*a[:2]) and _is_dense(*b[:2])):
        return True
    low = min(0, distance)
    marks = torch.zeros(max(ends[0], distance + ends[1]) - low, dtype=torch.bool)
    _bytes_of(marks, a, -low).fill_(True)
    return bool(_bytes_of(marks, b, distance - low).any())


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a tensor fills its range."""
    expected = 1
    for n, stride in sorted(zip(shape, strides, strict=True), key=lambda x: x[1]):
        if n > 1 and stride > expected:
            return False
        expected = max(expected, expected + (n - 1) * stride)
    return True


def _bytes_of(marks: torch.Tensor, layout: _Layout, offset: int) -> torch.Tensor:
    shape, strides, size = layout
    return marks.as_strided((*shape, size), (*(s * size for s in strides), 1), offset)


def overlaps_itself(x: torch.Tensor) -> bool:
    """Whether two elements of a tensor may lie in one place (expanded axes, sliding windows)."""
    reach = 1
    for n, stride in sorted(zip(x.shape, x.stride(), strict=True), key=lambda s: s[1]):
        if n > 1:
            if stride < reach:
                return True
            reach += (n - 1) * stride
    return False
