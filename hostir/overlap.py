"""Inputs that share memory with one that is updated in place.

A program reads old values and writes its updates at the end, as far as anybody can see. Where an
input that is written shares elements with another one, that one is therefore copied for the run;
of two updates that share elements, the one that was stated last remains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from fuser.ir.binding import Argument

Body = Callable[[list[Argument]], list[torch.Tensor]]
_Layout = tuple[tuple[int, ...], tuple[int, ...], int]


class Updates:
    """The inputs that a program writes, by position, in the order of its updates."""

    def __init__(self, positions: Sequence[int]) -> None:
        self._positions = tuple(dict.fromkeys(positions))
        # The addresses that were found to lie apart in the last run.
        self._apart: object = None

    def run(self, inputs: list[Argument], signature: object, body: Body) -> list[torch.Tensor]:
        """Return the outputs of `body` on inputs that share no memory with updated ones."""
        addresses = [x.data_ptr() if isinstance(x, torch.Tensor) else 0 for x in inputs]
        if self._apart == (signature, addresses):
            return body(inputs)
        copies = self._copies(inputs)
        if not copies:
            self._apart = (signature, addresses)
            return body(inputs)
        outputs = body([copies.get(i, x) for i, x in enumerate(inputs)])
        for i in self._positions:
            if i in copies:
                _tensor(inputs[i]).copy_(copies[i])
        given = {id(copy): _tensor(inputs[i]) for i, copy in copies.items()}
        return [given.get(id(out), out) for out in outputs]

    def _copies(self, inputs: Sequence[Argument]) -> dict[int, torch.Tensor]:
        tensors = {i: x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.numel()}
        rank = {p: k for k, p in enumerate(self._positions)}
        # By address: only neighbours whose ranges of bytes meet are compared.
        order = sorted(tensors, key=lambda i: tensors[i].data_ptr())
        found: set[int] = set()
        open_: list[int] = []
        for i in order:
            x = tensors[i]
            open_ = [j for j in open_ if _end(tensors[j]) > x.data_ptr()]
            for j in open_:
                if (i in rank or j in rank) and share_elements(tensors[j], x):
                    # Of two updates the later one; else the one that is only read.
                    found.add(max(i, j, key=lambda k: rank.get(k, len(rank))))
            open_.append(i)
        return {i: _copy(tensors[i]) for i in sorted(found)}


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
