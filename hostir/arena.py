"""The memory of replayed runs: one buffer, which the intermediates of all streams share.

Only tensors that a program deallocates lie here, so nothing that a caller can hold is ever reused.
Each plan has fixed offsets; two tensors share bytes when one is given up before the other begins,
by the program's own waits (`hostir.lifetimes`). The runs that use one buffer begin on one stream.
Where some tensors must lie in memory that peers can map, the whole buffer does.
A plan is bound to an arena once: its steps then know where their intermediates lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from fuser.runtime.graphs import MAKERS, GraphMaker
from fuser.torch_calls import capturing_on, lasting
from hostir.clocks import Clock
from hostir.layout import spanned
from hostir.lifetimes import Lifetime, Moment

if TYPE_CHECKING:
    from hostir.plan import BoundPlan, Plan

# Offsets are multiples of this, so that every block is as well aligned as a fresh tensor.
ALIGNMENT_NBYTES = 256
# By which a buffer is larger than what asked for it: torch's allocator rounds as much.
MAX_ROOM_NBYTES = 2 << 20
# Plans that stay bound to one arena.
MAX_BOUND = 256
# Arenas of one stream that are kept for the next runs: as many runs beside one another.
MAX_SPARE = 4


class Block(NamedTuple):
    """A buffer of a plan: where it lies in the arena, and how it is seen as a tensor."""

    slot: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes from the first to past the last element; 0 without elements."""
        return spanned(self.shape, self.strides) * self.dtype.itemsize

    def at(self, offset: int) -> Block:
        """Return this buffer in another place."""
        return Block(self.slot, self.shape, self.strides, self.dtype, offset)

    def view(self, arena: torch.Tensor) -> torch.Tensor:
        """Return the tensor in an arena, seen as elements of its dtype."""
        return arena.as_strided(self.shape, self.strides, self.offset // self.dtype.itemsize)


def views_of(blocks: Sequence[Block], arena: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the tensors of blocks in a uint8 arena, by slot."""
    typed = {dtype: arena.view(dtype) for dtype in {b.dtype for b in blocks}}
    return {b.slot: b.view(typed[b.dtype]) for b in blocks}


def with_room(nbytes: int) -> int:
    """Return how large a buffer is made for so many bytes: up to a fourth larger, and by less than
    MAX_ROOM_NBYTES, so that somewhat larger sizes of a program fit, too, and nothing is bound anew.
    """
    step = min(1 << max(nbytes.bit_length() - 3, 0), MAX_ROOM_NBYTES)
    return -(-nbytes // step) * step


def first_fit(blocks: Sequence[tuple[Lifetime, int]]) -> tuple[list[int], int]:
    """Return (offsets, total bytes) of blocks (lifetime, bytes), in the order of their allocations.

    Each block takes the lowest gap of memory that nobody uses any more for all that its allocation
    knows of other streams.
    """
    ends = [lifetime.end for lifetime, _ in blocks]
    # Of thousands of blocks only those are compared that lie where another one might.
    after = (_Over(lifetime.begin, ends) for lifetime, _ in blocks)
    return fit(after, [nbytes for _, nbytes in blocks])


class IsOver(Protocol):
    """Which blocks are over, by their place in the order of their allocations."""

    def __getitem__(self, owner: int, /) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Over:
    """Which are over when a block begins: found out when somebody asks."""

    begin: Clock
    ends: Sequence[Moment]

    def __getitem__(self, owner: int, /) -> bool:
        stream, tick = self.ends[owner]
        return self.begin.get(stream, 0) >= tick


def successions(lifetimes: Sequence[Lifetime]) -> list[list[bool]]:
    """Return, for each lifetime, which of those before it are over when it begins."""
    ends = [lifetime.end for lifetime in lifetimes]
    return [
        [one.begin.get(stream, 0) >= tick for stream, tick in ends[:k]]
        for k, one in enumerate(lifetimes)
    ]


def fit(after: Iterable[IsOver], sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return `first_fit` of blocks of these sizes, of which each comes `after` earlier ones."""
    offsets: list[int] = []
    # Who had each part of memory last: beginning, end, and which block. Whoever comes after it
    # comes after all that had the part before. The parts follow one another.
    parts: list[tuple[int, int, int]] = []
    for block, (is_over, nbytes) in enumerate(zip(after, sizes, strict=True)):
        size = -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
        start, first, last = 0, 0, -1
        for last, (_, stop, owner) in enumerate(parts):
            if not is_over[owner]:
                start, first = stop, last + 1
            elif stop - start >= size:
                break
        offsets.append(start)
        if not size:
            continue
        mine = [(start, start + size, block)]
        if parts and parts[last][1] > start + size:
            mine.append((start + size, *parts[last][1:]))
        parts[first : last + 1] = mine
    return offsets, parts[-1][1] if parts else 0


class Arena:
    """The buffer of the runs on one stream of one device, one run at a time."""

    def __init__(self, device: torch.device, stream: int, *, is_captured: bool = False) -> None:
        """`is_captured`: for one run, which is a part of a graph that the caller makes."""
        self.stream, self.is_captured = stream, is_captured
        self._device = device
        self._buffer: torch.Tensor | None = None
        # Whether peers can map it.
        self._is_mapped = False
        # Plans whose intermediates lie here.
        self.bound: dict[Plan, BoundPlan] = {}
        self._graphs: GraphMaker | None = None

    def graphs(self) -> GraphMaker:
        """Return what captures the runs of this arena. Raises `KernelError` where nothing can."""
        if self._graphs is None:
            self._graphs = MAKERS[self._device.type](self._device)
        return self._graphs

    def bind(self, plan: Plan) -> BoundPlan:
        """Let the intermediates of a plan lie here."""
        with lasting():
            is_mapped = plan.symmetric is not None
            has_room = self._buffer is not None and self._buffer.numel() >= plan.nbytes
            if self._buffer is None or not has_room or (is_mapped and not self._is_mapped):
                # Views of the smaller buffer would keep it alive.
                self.bound.clear()
                self._buffer = plan.memory(with_room(plan.nbytes))
                self._is_mapped = is_mapped
            if len(self.bound) >= MAX_BOUND:
                self.bound.clear()
            found = self.bound[plan] = plan.bind(self._buffer, self)
        return found


class Arenas:
    """The arenas of one evaluator and device that no run uses now, by stream (a raw handle).

    A run takes one and gives it back: one inside or beside another run finds another arena, and one
    on another stream never waits for this one. That of a run that failed is not given back: what is
    still in flight may write into it. Nor is that of a run which the caller captures: his graph
    will write there whenever it is launched. It lies in the memory of his graph.
    """

    def __init__(self, device: torch.device, why_not: str = "") -> None:
        """`why_not` says why no graph may repeat these runs; "" where one may."""
        self.device = device
        self.why_not = why_not
        self._is_capturing = capturing_on(device)
        self._spare: dict[int, list[Arena]] = {}

    def take(self, stream: int) -> Arena:
        """Return an arena for a run that begins on this stream, the current one."""
        if self._is_capturing is not None and self._is_capturing(stream):
            return Arena(self.device, stream, is_captured=True)
        try:
            return self._spare[stream].pop()  # at once, whatever other threads do
        except (KeyError, IndexError):
            self._spare.setdefault(stream, [])
            return Arena(self.device, stream)

    def give(self, arena: Arena) -> None:
        """Take back an arena after a run."""
        if not arena.is_captured:
            spare = self._spare[arena.stream]
            if len(spare) < MAX_SPARE:
                spare.append(arena)

    def spare(self, stream: int) -> list[Arena]:
        """Return the arenas of a stream that no run uses now; `take` takes the last one."""
        return self._spare.setdefault(stream, [])

    def bound(self, plan: Plan) -> list[BoundPlan]:
        """Return how a plan is bound to those that no run uses now."""
        spare = [arena for arenas in list(self._spare.values()) for arena in list(arenas)]
        return [arena.bound[plan] for arena in spare if plan in arena.bound]

    def forget(self, plan: Plan) -> None:
        """Drop what is bound of a plan that will hardly run again."""
        for spare in list(self._spare.values()):
            for arena in list(spare):
                arena.bound.pop(plan, None)
