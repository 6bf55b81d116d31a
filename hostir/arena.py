"""The memory of replayed runs: one buffer per stream, which all intermediates share by liveness.

Only tensors that a program deallocates lie here, so nothing that a caller can hold is ever reused.
Each plan has fixed offsets; two tensors share bytes when one is given up before the other begins.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fuser.locks import make_lock

# Offsets are multiples of this, so that every block is as well aligned as a fresh tensor.
ALIGNMENT_NBYTES = 256


@dataclass(frozen=True)
class Block:
    """A buffer of a plan: where it lies in the arena, and how it is seen as a tensor."""

    slot: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes from the first to past the last element; 0 without elements."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.strides, strict=True)
        return (1 + sum((n - 1) * s for n, s in steps)) * self.dtype.itemsize

    def view(self, arena: torch.Tensor) -> torch.Tensor:
        """Return the tensor in a uint8 arena."""
        part = arena[self.offset : self.offset + self.nbytes].view(self.dtype)
        return part.as_strided(self.shape, self.strides)

    def fresh(self, device: torch.device) -> torch.Tensor:
        """Return the tensor in memory of its own."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


def first_fit(lifetimes: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Return (offsets, total bytes) of blocks (begin, end, bytes), in order of their begin.

    Each block takes the lowest gap between the blocks that are alive when it begins.
    """
    offsets: list[int] = []
    total = 0
    for begin, _, nbytes in lifetimes:
        earlier = zip(offsets, lifetimes, strict=False)
        alive = sorted((at, at + _aligned(size)) for at, (_, end, size) in earlier if end > begin)
        offset = 0
        for start, stop in alive:
            if start - offset >= nbytes:
                break
            offset = max(offset, stop)
        offsets.append(offset)
        total = max(total, offset + _aligned(nbytes))
    return offsets, total


class Arena:
    """The buffers of one evaluator, by stream: a run on another stream never waits for this one."""

    def __init__(self) -> None:
        self._buffers: dict[object, torch.Tensor] = {}
        self._views: dict[tuple[object, object], dict[int, torch.Tensor]] = {}
        self._lock = make_lock()

    @contextmanager
    def views(
        self, plan: object, blocks: Sequence[Block], nbytes: int, device: torch.device
    ) -> Generator[dict[int, torch.Tensor]]:
        """Yield the tensors of a plan by slot, for the time of one run.

        A run inside or beside another one of the same evaluator gets memory of its own.
        """
        if not self._lock.acquire(blocking=False):
            yield {block.slot: block.fresh(device) for block in blocks}
            return
        try:
            stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
            found = self._views.get((plan, stream))
            if found is None:
                buffer = self._buffer(stream, nbytes, device)
                found = {block.slot: block.view(buffer) for block in blocks}
                self._views[plan, stream] = found
            yield found
        finally:
            self._lock.release()

    def _buffer(self, stream: object, nbytes: int, device: torch.device) -> torch.Tensor:
        buffer = self._buffers.get(stream)
        if buffer is None or buffer.numel() < nbytes:
            # Views of the smaller buffer would keep it alive: their plans make new ones.
            self._views = {k: v for k, v in self._views.items() if k[1] != stream}
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._buffers[stream] = buffer
        return buffer

    def forget(self, plan: object) -> None:
        """Drop the views of a plan that will not run again."""
        self._views = {k: v for k, v in self._views.items() if k[0] is not plan}
